"""Adapters in ViLT: parameter counts of FedPIA's tables, neutral initialization, and equal results of all executors."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from cases import assert_same, case, run_rounds, state_of
from tiny import CPU, close, compose, equal, every_second, ragged
from torch import Tensor

from fedbench.adapters.base import Adapter
from fedbench.adapters.compacter import Compacter, PHMLinear
from fedbench.adapters.prompt import Prompt
from fedbench.core.options import ConfigError
from fedbench.core.settings import config_hash, to_dict
from fedbench.engine.federation import Federation
from fedbench.models.vilt import ViLT
from fedbench.nn.flat import FlatModel
from fedbench.simulation import build
from fedbench.simulation.build_model import RESERVED
from fedbench.simulation.instantiate import make

TINY = ["model=vilt_tiny", "model.width=8", "model.heads=2"]
NAMED = {"image": (1, 16, 16), "text": (8,)}
BOTH = "adapter.places=[text,image] adapter.tap=output"
# (words, numbers on ViLT-B/32 beside the head, what an adapter is called in FedPIA's tables)
TABLE = [
    ("houlsby adapter.width=48", 1_789_056),
    ("pfeiffer adapter.width=48", 894_528),
    ("parallel adapter.width=48", 894_528),
    ("parallel adapter.width=384", 7_091_712),
    ("parallel adapter.width=48 adapter.places=[*.ffn]", 894_528),
    ("compacter", 57_088),
    ("fusion adapter.adapters=5 adapter.width=48", 21_252_096 + 5 * 894_528),
    ("lora adapter.rank=16 adapter.places=[*.query,*.value]", 589_824),
    ("bias", 104_448),
    ("layernorm", 39_936),
    (f"prompt {BOTH}", 7_680),
    (f"prompt {BOTH} adapter.tokens=50 adapter.reparam=true", 2 * 334_272),
]
ADAPTED = [  # the same on vilt_tiny
    ["adapter=houlsby", "adapter.width=4"],
    ["adapter=houlsby", "adapter.width=4", "adapter.init=normal"],
    ["adapter=pfeiffer", "adapter.width=4"],
    ["adapter=parallel", "adapter.width=4"],
    ["adapter=parallel", "adapter.width=4", "adapter.places=[*.ffn]"],
    ["adapter=compacter", "adapter.width=8"],
    ["adapter=fusion", "adapter.width=4"],
    ["adapter=lora", "adapter.rank=2", "adapter.places=[*.query,*.value]"],
    ["adapter=bias"],
    ["adapter=layernorm"],
    ["adapter=prompt", "adapter.places=[text,image]", "adapter.tap=output", "adapter.tokens=2"],
    ["adapter=prompt", "adapter.places=[text,image]", "adapter.tap=output", "adapter.reparam=true"],
]
LATER_OPTIONS = [a for a in ADAPTED if not {"adapter=compacter", "adapter=prompt", "adapter.init=normal"} & {*a}]


def words(overrides: list[str]) -> str:
    return " ".join(overrides).replace("adapter.", "")


def adapter_of(overrides: list[str]) -> Adapter:
    return make(compose(["algorithm=fedavg", *overrides]).adapter, key="adapter")


@functools.cache
def federation() -> tuple[Any, Any]:
    return ragged(sizes=(7, 21, 12, 4, 16, 9), val=(3,) * 6, shape=NAMED)


@functools.cache
def bare() -> FlatModel:
    return build.model(compose(["algorithm=fedavg", *TINY]), Federation.build(*federation(), CPU))


def adapted(overrides: list[str]) -> FlatModel:
    return build.model(compose(["algorithm=fedavg", *TINY, *overrides]), Federation.build(*federation(), CPU))


def batch(n: int = 5) -> dict[str, Tensor]:
    x, _ = Federation.build(*federation(), CPU).gather(torch.arange(n))
    assert isinstance(x, dict)
    return x


# -- numbers ---------------------------------------------------------------------------------------------
def on_meta(overrides: list[str]) -> ViLT:
    with torch.device("meta"):
        shape = {"image": (1, 384, 384), "text": (40,)}
        model = make(compose(["model=vilt_b32"]).model, RESERVED, key="model", input_shape=shape, num_classes=7)
        adapter_of(overrides).insert(model)
    return model


@pytest.mark.parametrize("said, numbers", TABLE)
def test_numbers_on_vilt_b32(said: str, numbers: int) -> None:
    model = on_meta(f"adapter={said}".split())
    learns = [p.numel() for n, p in model.named_parameters() if p.requires_grad and not n.startswith("head.")]
    frozen = [p.numel() for n, p in model.named_parameters() if not p.requires_grad]
    assert sum(learns) == numbers
    new = 0 if said in ("bias", "layernorm") else numbers
    assert sum(learns) + sum(frozen) - new == 111_595_008


def test_numbers_of_a_fusion_on_vilt_b32() -> None:
    """3 x 768^2 + 2 x 768 in each of 12 layers, whatever the number of adapters."""
    model, of_block = on_meta(["adapter=fusion", "adapter.adapters=5", "adapter.width=48"]), [0] * 12
    for name, p in model.named_parameters():
        if re.match(r"blocks\.\d+\.(query|key|value)\.", name) and p.requires_grad:
            of_block[int(name.split(".")[1])] += p.numel()
    assert of_block == [1_771_008] * 12 and sum(of_block) == 21_252_096


# -- in the model ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("overrides", LATER_OPTIONS, ids=words)
def test_outputs_are_the_bare_models_at_first(overrides: list[str]) -> None:
    model = adapted(overrides)
    assert adapter_of(overrides).neutral
    equal(model.predict(model.init_row(), batch()), bare().predict(bare().init_row(), batch()))


@pytest.mark.parametrize("overrides", ADAPTED, ids=words)
def test_what_learns_acts(overrides: list[str]) -> None:
    """Every parameter of the row has a gradient; none of the backbone's is in it; all clients at once are each one."""
    model, x = adapted(overrides), batch()
    own = bare().spans.keys() if overrides[0] not in ("adapter=bias", "adapter=layernorm") else set()
    assert model.spans.keys() & own == {"head.weight", "head.bias"} & own
    assert model.uses_vmap == (overrides[0] == "adapter=compacter")
    rows = model.init_row() + 0.3 * torch.randn(3, model.size, generator=torch.Generator().manual_seed(0))
    rows.requires_grad_()
    many = {name: torch.stack([t, t.flip(0), t.roll(2, 0)]) for name, t in x.items()}
    logits = model.forward(rows, many)
    grad = torch.autograd.grad(logits.square().sum(), rows)[0]
    idle = [n for n, (a, b) in model.spans.items() if not bool(grad[:, a:b].any())]
    assert not idle
    for i in range(3):
        close(logits[i], model.forward(rows[i], {name: t[i] for name, t in many.items()}), 1e-5)


@functools.cache
def played(method: str, adapter: str, plan: str) -> dict[str, Tensor]:
    """Two rounds of four of six clients."""
    arrays, split = federation()
    of = case(method)
    sim = of.on([*TINY, *adapter.split(), *of.optimizer]).simulation(plan, split, arrays)
    return state_of(run_rounds(sim, 2))


@pytest.mark.parametrize("adapter", every_second(map(" ".join, ADAPTED)))
@pytest.mark.parametrize("method", [pytest.param("fedavg", marks=pytest.mark.slow), "fedper"])
def test_methods_under_every_plan(method: str, adapter: str) -> None:
    assert_same(played(method, adapter, "loop"), played(method, adapter, "vmap"), 1e-5)


OTHERS = ["apple", "pgfed", "scaffold", "ditto", "pfednet"]


@pytest.mark.parametrize("adapter", ["adapter=lora adapter.rank=2", "adapter=houlsby adapter.width=4"])
@pytest.mark.parametrize(
    "method", [m if m in ("pgfed", "pfednet") else pytest.param(m, marks=pytest.mark.slow) for m in OTHERS]
)
def test_methods_that_know_nothing_of_adapters(method: str, adapter: str) -> None:
    """By configuration alone: one result by every plan, and no row has a number of the frozen network's."""
    state = played(method, adapter, "loop")
    assert_same(state, played(method, adapter, "vmap"), 1e-5)
    model = adapted(adapter.split())
    learns = model.columns["adapter"].size + model.columns["head"].size
    assert model.size == learns
    rows = [tensor for name, tensor in state.items() if name.startswith("/rows/")]
    assert rows and all(tensor.shape[-1] <= learns for tensor in rows)


def test_fedper_shares_what_is_added_and_keeps_heads() -> None:
    for overrides in ADAPTED:
        model = adapted(overrides)
        base, head, added = (model.columns[name] for name in ("base", "head", "adapter"))
        assert base.size + head.size == model.size
        assert (base & added).size + (head & added).size == added.size


# -- bottlenecks -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "place, tap, expected",
    [
        ("blocks.0", "output", lambda b, A, x, v: (y := b(x, v)) + A(y)),  # Pfeiffer: behind the residual
        ("blocks.0.ffn.mlp", "input", lambda b, A, x, v: b(x, v) + 4 * A(b.ffn.norm(x + b.attn(b.norm(x), v)))),
        ("blocks.0.ffn", "input", lambda b, A, x, v: b(x, v) + 4 * A(x + b.attn(b.norm(x), v))),
        ("blocks.0.attn", "output", lambda b, A, x, v: (z := x + (o := b.attn(b.norm(x), v)) + A(o)) + b.ffn(z)),
    ],
)
def test_places_by_hand(place: str, tap: str, expected: Any) -> None:
    """Where a bottleneck reads and writes: behind a block, beside the mlp (of the normed and of the residual stream),
    behind attention."""
    torch.manual_seed(0)
    model, plain_one = (ViLT(NAMED, 3, width=8, heads=2) for _ in range(2))
    plain_one.load_state_dict(model.state_dict())
    scale = 4 if tap == "input" else 1
    adapter_of(["adapter=houlsby", f"adapter.places=[{place}]", f"adapter.tap={tap}", f"adapter.scale={scale}",
                "adapter.init=normal"]).insert(model)  # fmt: skip
    x, visible = torch.randn(2, 5, 8), torch.ones(2, 1, 1, 5, dtype=torch.bool)
    network = model.get_submodule(f"{place}.adapter")
    close(model.blocks[0](x, visible), expected(plain_one.blocks[0], network, x, visible), 1e-6)


def test_small_normal_numbers_at_first() -> None:
    model = ViLT(NAMED, 3, width=64)
    adapter_of(["adapter=houlsby", "adapter.width=48", "adapter.init=normal"]).insert(model)
    weights = [p for n, p in model.named_parameters() if ".adapter." in n and n.endswith("weight")]
    assert all(abs(p.std().item() - 0.02) < 1e-3 for p in weights) and len(weights) == 8
    assert not any(p.any() for n, p in model.named_parameters() if ".adapter." in n and n.endswith("bias"))


# -- Compacter -------------------------------------------------------------------------------------------
def layers(rank: int = 1) -> tuple[ViLT, list[PHMLinear]]:
    torch.manual_seed(0)
    model = ViLT(NAMED, 3)
    Compacter(["*.attn", "*.mlp"], width=8, rank=rank).insert(model)
    return model, [m for m in model.modules() if isinstance(m, PHMLinear)]


@pytest.mark.parametrize("rank", [1, 2])
def test_a_sum_of_kronecker_products(rank: int) -> None:
    """y = x H + b with H = sum_i kron(A_i, s_i t_i), written out."""
    model, found = layers(rank)
    A = model.get_parameter("blocks.0.attn.adapter.down.rule.A")
    for layer in found:
        with torch.no_grad():
            layer.bias.normal_()
        H = sum(torch.kron(A[i], layer.s[i] @ layer.t[i]) for i in range(4))
        x = torch.randn(2, 3, layer.s.shape[0] * layer.s.shape[1])
        close(layer(x), x @ H + layer.bias, 1e-6)
        close(layer.weight(), H, 1e-7)


def test_one_rule_for_all_layers() -> None:
    """One A in the row, and in the state dict; a change of it is one of every layer."""
    model, found = layers()
    assert [n for n, _ in model.named_parameters() if n.endswith(".A")] == ["blocks.0.attn.adapter.down.rule.A"]
    assert [n for n in model.state_dict() if n.endswith(".A")] == ["blocks.0.attn.adapter.down.rule.A"]
    before = [layer.weight() for layer in found]
    with torch.no_grad():
        model.get_parameter("blocks.0.attn.adapter.down.rule.A").mul_(2)
    for layer, H in zip(found, before):
        close(layer.weight(), 2 * H, 1e-7)
    again, _ = layers()
    again.load_state_dict(model.state_dict())
    x = {"image": torch.randn(2, *NAMED["image"]), "text": torch.ones(2, 8, dtype=torch.int64)}
    equal(again(x), model(x))


def test_what_permutes_a_compacter() -> None:
    """I_n (x) Q of the hidden units, Q a permutation of the inner ones, changes nothing; one of the outer ones does."""
    model, (down, up, *_) = layers()
    network = model.get_submodule("blocks.0.attn.adapter")
    with torch.no_grad():
        model.get_parameter("blocks.0.attn.adapter.down.rule.A").normal_()
        down.bias.normal_()
    x, Q = torch.randn(5, 32), torch.tensor([1, 0])
    before = network(x)
    with torch.no_grad():
        down.t.copy_(down.t[:, :, Q])
        down.bias.copy_(down.bias.view(4, 2)[:, Q].flatten())
        up.s.copy_(up.s[:, Q])
    close(network(x), before, 1e-5)
    with torch.no_grad():
        down.bias.copy_(down.bias.view(4, 2).roll(1, 0).flatten())
    assert (network(x) - before).abs().max() > 1e-2


@pytest.mark.parametrize(
    "change, sentence",
    [
        (["adapter.width=6"], "adapter.n=4 must divide adapter.width=6"),
        (["adapter.width=9", "adapter.n=3"], "adapter.n=3 must divide 8, the width of a layer in adapter.places"),
    ],
)
def test_what_compacter_refuses(change: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        adapted(["adapter=compacter", *change])


# -- prompts ---------------------------------------------------------------------------------------------
def test_prompts_by_hand() -> None:
    """They stand behind the first token of text and image, with its modality, and are seen by all; padding is not."""
    torch.manual_seed(0)
    model, plain_one = (ViLT(NAMED, 3, width=8, heads=2) for _ in range(2))
    plain_one.load_state_dict(model.state_dict())
    Prompt(["text", "image"], tokens=3).insert(model)
    x = batch(2)
    x["text"][0, 3:] = 0
    text = plain_one.text(x["text"]) + model.text_modality
    image = plain_one.image(x["image"]) + model.image_modality
    of_text = (model.text.prompts + model.text_modality).expand(2, -1, -1)
    of_image = (model.image.prompts + model.image_modality).expand(2, -1, -1)
    tokens = torch.cat([text[:, :1], of_text, text[:, 1:], image[:, :1], of_image, image[:, 1:]], 1)
    visible = torch.cat([torch.ones(2, 4), x["text"][:, 1:] != 0, torch.ones(2, 8)], 1).bool()[:, None, None]
    for block in plain_one.blocks:
        tokens = block(tokens, visible)
    expected = torch.tanh(plain_one.pooler(plain_one.norm(tokens)[:, 0]))
    close(model.pooled(x), expected, 1e-5)


def test_prompts_take_no_list_and_nothing_empty() -> None:
    with pytest.raises(ConfigError, match=r"adapter\.places=\['blocks'\]: the model has no layer 'blocks' that"):
        adapted(["adapter=prompt"])


@pytest.mark.parametrize("name", ["houlsby", "pfeiffer", "parallel"])
def test_a_run_from_before_init_has_the_same_hash(name: str) -> None:
    cfg = compose(["model=vit_tiny", f"adapter={name}"])
    stored = to_dict(cfg)
    assert stored["adapter"].pop("init") == "zero_up"
    assert config_hash(stored) == config_hash(cfg)
    assert config_hash(stored) != config_hash(compose(["model=vit_tiny", f"adapter={name}", "adapter.init=normal"]))
