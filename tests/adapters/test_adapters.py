"""Adapters: trained and frozen parameters, and equal results of all executors."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case, assert_same, case, run_rounds, set_up, state_of
from tiny import CPU, close, compose, equal, every_second, ragged
from torch import Tensor, nn

from fedbench.adapters.base import Adapter
from fedbench.adapters.bottleneck import Bottleneck
from fedbench.adapters.lora import LoRA
from fedbench.adapters.none import NoAdapter
from fedbench.adapters.parameters import Parameters
from fedbench.adapters.prompt import Prompt
from fedbench.config.conf_tree import group_options
from fedbench.core.options import ConfigError
from fedbench.core.settings import config_hash, to_dict
from fedbench.engine.federation import Federation
from fedbench.models.vit_tiny import ViTTiny
from fedbench.nn.batched_operators import ForwardContext
from fedbench.nn.flat import FlatModel
from fedbench.simulation import build

TINY = ["model=vit_tiny", "model.patch=2", "model.width=8", "model.heads=2", "model.depth=2"]
ADAPTERS = {
    "lora": ["adapter.rank=2"],
    "houlsby": ["adapter.width=3"],
    "pfeiffer": ["adapter.width=3"],
    "parallel": ["adapter.width=3"],
    "bias": [],
    "layernorm": [],
}
METHODS = ["fedavg", "fedper", "pgfed", "apple", "scaffold", "ditto", "pfedme"]
ELSEWHERE = {"none", "compacter", "prompt", "fusion"}  # in test_vilt_adapters.py and test_fusion.py
ADDS = [name for name in ADAPTERS if name not in ("bias", "layernorm")]


def overrides(adapter: str) -> list[str]:
    return [*TINY, f"adapter={adapter}", *ADAPTERS[adapter]]


@functools.cache
def federation() -> Federation:
    return Federation.build(*ragged(sizes=(7, 21, 12, 4, 16, 9), val=(3,) * 6), CPU)


def model_of(adapter: str, *more: str) -> FlatModel:
    """A new one, its numbers drawn so that adapters act."""
    model = build.model(compose(["algorithm=fedavg", *overrides(adapter), *more]), federation())
    return model


def spread(model: FlatModel, k: int = 3) -> Tensor:
    return model.init_row() + 0.3 * torch.randn(k, model.size, generator=torch.Generator().manual_seed(1))


def mapped(model: FlatModel) -> FlatModel:
    """The same, computed by torch.vmap: a layer with a hook is in no program."""
    model.module.get_submodule("norm").register_forward_hook(lambda *_: None)
    again = FlatModel(model.module, {})
    assert again.traced_graph is None and again.uses_vmap
    return again


def test_every_option_of_the_menu_is_tried_here() -> None:
    assert {*ADAPTERS, *ELSEWHERE} == set(group_options("adapter"))


# -- what learns -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_row_holds_adapter_and_head_alone(adapter: str) -> None:
    model = model_of(adapter)
    whole = build.model(compose(["algorithm=fedavg", *TINY]), federation())
    head = {"head.weight", "head.bias"}
    if adapter in ADDS:
        assert not model.spans.keys() & (whole.spans.keys() - head)
        kinds = {name.split(".")[-2] for name in model.spans.keys() - head}
        assert kinds == ({"lora_A", "lora_B"} if adapter == "lora" else {"down", "up"})
        adapted = {name.rpartition(".adapter")[0].rpartition(".lora")[0] or name for name in model.spans.keys() - head}
        assert all(name.startswith("blocks.") for name in adapted)
    else:
        ends = "bias" if adapter == "bias" else ("weight", "bias")
        wanted = {n for n in whole.spans if n.endswith(ends) and (adapter == "bias" or "norm" in n)}
        assert set(model.spans) == wanted | head
    numbers = model.columns["adapter"].size + model.columns["head"].size
    shared = 3 if adapter == "bias" else 0  # the head's bias is one, too
    assert numbers - shared == model.size == model.trained.size


def test_sizes() -> None:
    """By hand: 8 wide, 2 blocks; LoRA of rank 2 on 8 -> 24, 8 -> 8, 8 -> 16 and 16 -> 8; bottlenecks of 3."""
    lora = 2 * 2 * ((8 + 24) + (8 + 8) + 2 * (8 + 16))
    bottleneck = 8 * 3 + 3 + 3 * 8 + 8
    expected = {"lora": lora, "houlsby": 2 * 2 * bottleneck, "pfeiffer": 2 * bottleneck, "parallel": 2 * bottleneck}
    assert {name: model_of(name).columns["adapter"].size for name in ADDS} == expected


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_outputs_are_the_bare_models_at_first(adapter: str) -> None:
    bare = build.model(compose(["algorithm=fedavg", *TINY]), federation())
    model, x = model_of(adapter), torch.randn(5, 1, 4, 4)
    equal(model.predict(model.init_row(), x), bare.predict(bare.init_row(), x))


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_training_leaves_what_is_frozen(adapter: str) -> None:
    sim = set_up(case("fedavg").on(overrides(adapter)).simulation())
    module, learns = sim.engine.model.module, sim.engine.model.spans
    before = {n: t.clone() for n, t in module.state_dict().items() if n not in learns}
    start = sim.algorithm.w.clone()
    run_rounds(sim, 2)
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items() if n not in learns)
    moved = {n for n, (a, b) in learns.items() if not torch.equal(sim.algorithm.w[a:b], start[a:b])}
    assert moved == set(learns)


def test_independent_draws_share_the_backbone() -> None:
    model = model_of("lora")
    rows = model.init_rows(2, "own")
    a, b = model.spans["blocks.0.attn.qkv.lora_A.weight"]
    assert not torch.equal(rows[0, a:b], rows[1, a:b]) and not torch.equal(rows[0, a:b], model.init_row()[a:b])
    c, d = model.spans["blocks.0.attn.qkv.lora_B.weight"]
    assert not rows[:, c:d].any()


# -- all ways compute the same ---------------------------------------------------------------------------
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_program_and_a_mapped_module_agree(adapter: str) -> None:
    """Logits, features and gradients of three clients: the program, torch.vmap, and a loop."""
    model = model_of(adapter)
    assert model.traced_graph is not None and model.manual_backward is None
    rows, x = spread(model), torch.randn(3, 5, 1, 4, 4)
    other = mapped(model_of(adapter))

    def run(m: FlatModel, rows: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        leaf = rows.clone().requires_grad_()
        logits = m.apply(m.named(leaf), x, True, ForwardContext(True))
        return logits, m.features(rows, x), torch.autograd.grad(logits.square().sum(), leaf)[0]

    found, expected = run(model, rows, x), run(other, rows, x)
    alone = [torch.cat(parts) for parts in zip(*(run(model, rows[i : i + 1], x[i : i + 1]) for i in range(3)))]
    for a, b, c in zip(found, expected, alone):
        close(a, b, 2e-5 * float(b.detach().abs().max()))
        close(a, c, 2e-5 * float(c.detach().abs().max()))


@functools.cache
def played(method: str, adapter: str, plan: str) -> dict[str, Tensor]:
    return state_of(run_rounds(adapted(method, adapter).simulation(plan), 2))


def adapted(method: str, adapter: str) -> Case:
    return case(method).on([*overrides(adapter), *case(method).optimizer])


@pytest.mark.parametrize("adapter", ["lora", pytest.param("houlsby", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", every_second(METHODS))
def test_methods_under_every_plan(method: str, adapter: str) -> None:
    for plan in ("loop", "threads"):
        assert_same(played(method, adapter, plan), played(method, adapter, "vmap"), 1e-5)


# -- what a mean of rows is ------------------------------------------------------------------------------
def test_the_mean_of_factors_lacks_their_covariance() -> None:
    """mean(B) mean(A) = mean(B A) - cov(B, A), and a mean of rows is the former."""
    model = model_of("lora")
    rows = spread(model)
    (a, b), (c, d) = (model.spans[f"blocks.0.attn.qkv.lora_{x}.weight"] for x in "AB")

    def factors(rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows[..., a:b].unflatten(-1, (2, 8)), rows[..., c:d].unflatten(-1, (24, 2))

    A, B = factors(rows)  # [3, 2, 8], [3, 24, 2]
    mean_A, mean_B = factors(rows.mean(0))
    gap = ((B - mean_B) @ (A - mean_A)).mean(0)
    close(mean_B @ mean_A, (B @ A).mean(0) - gap, 1e-5)
    assert gap.norm() > 0.1 * (B @ A).mean(0).norm()


# -- what is refused -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change, words",
    [
        (
            ["adapter=lora", "adapter.places=[no.*]"],
            r"adapter\.places=\['no\.\*'\]: the model has no layer 'no\.\*' that",
        ),
        (["adapter=houlsby", "adapter.places=[embed]"], r"adapter\.places=\['embed'\]: the model has no layer 'embed'"),
        (
            ["adapter=houlsby", "adapter.places=[attention,'*.mpl']"],
            r"the model has no layer '\*\.mpl' that this adapter can adapt; its layers .* write optional:\*\.mpl",
        ),
        (["adapter=bias", "adapter.parameters=[x]"], r"adapter\.parameters=\['x'\]: 'x' matches no parameter"),
        (["adapter=bias", "adapter.parameters=['*.bias','*.gain']"], r"parameters=.*: '\*\.gain' matches no parameter"),
    ],
)
def test_what_cannot_be_adapted_is_one_sentence(change: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build.model(compose(["algorithm=fedavg", *TINY, *change]), federation())


@pytest.mark.parametrize("tap, activation", [("output", "silu"), ("input", "relu"), ("input", "gelu")])
def test_bottlenecks_by_hand(tap: Any, activation: Any) -> None:
    """y + scale U s(D y), or U s(D x), of a sublayer 5 -> 3."""
    sublayer, x = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(6, 5)
    adapted: Any = Bottleneck(["*"], 2, activation, tap, 3.0).adapt(sublayer, "mlp")
    down, up = adapted.adapter.down, adapted.adapter.up
    equal(adapted(x), sublayer(x))
    for p in up.parameters():
        nn.init.normal_(p)
    y = sublayer(x)
    s = {"silu": lambda z: z * torch.sigmoid(z), "relu": lambda z: z.clamp_min(0), "gelu": F.gelu}[activation]
    inner = (y if tap == "output" else x) @ down.weight.T + down.bias
    close(adapted(x), y + 3 * (s(inner) @ up.weight.T + up.bias), 1e-5)


def test_attention_that_gives_two_results() -> None:
    """Of nn.MultiheadAttention the rows are adapted, and the weights come through."""
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(3, 5, 8)
    adapted: Any = Bottleneck(["*"], 3, init="normal").adapt(layer, "attn")
    y, weights = layer(x, x, x)
    found, same = adapted(x, x, x, need_weights=True)
    close(found, y + adapted.adapter(y), 1e-6)
    equal(same, weights)
    assert adapted(x, x, x, need_weights=False)[1] is None


def test_pfeiffer_reads_the_residual_stream() -> None:
    """y + A(y) with y = x + mlp(norm(x)); before a norm that ends a block, norm(y + A(norm(y)))."""
    cfg = compose(["algorithm=fedavg", *TINY, "adapter=pfeiffer", "adapter.width=3", "adapter.init=normal"])
    model, bare = build.model(cfg, federation()), build.model(compose(["algorithm=fedavg", *TINY]), federation())
    block: Any = model.module.get_submodule("blocks.1")
    x = torch.randn(2, 4, 8)
    y = bare.module.get_submodule("blocks.1")(x)
    A = block.adapter
    close(block(x), y + torch.relu(y @ A.down.weight.T + A.down.bias) @ A.up.weight.T + A.up.bias, 1e-5)
    norm = nn.LayerNorm(8)
    nn.init.normal_(norm.weight)
    adapted: Any = Bottleneck(["*"], 3, "relu", init="normal").adapt(norm, "norm")
    close(adapted(y), norm(y + adapted.adapter(norm(y))), 1e-5)


def test_the_mean_token_includes_prompts() -> None:
    """Of vit_tiny, whose head reads the mean of all tokens."""
    module = ViTTiny((1, 4, 4), 3, patch=2, width=8, depth=1)
    Prompt(["blocks"], tokens=2, tap="input").insert(module)
    seen: dict[str, Tensor] = {}
    module.norm.register_forward_hook(lambda m, i, out: seen.update(tokens=out))
    logits = module(torch.randn(3, 1, 4, 4))
    assert seen["tokens"].shape == (3, 4 + 2, 8)
    close(logits, module.head(seen["tokens"].mean(1)), 1e-6)


def test_biases_of_a_new_bottleneck() -> None:
    """U and its bias are 0 under zero_up, D's bias is as PyTorch draws it; both biases are 0 under normal."""
    zero, normal = (Bottleneck(["*"], 4, init=init).network(8, 8, "adapter") for init in ("zero_up", "normal"))
    assert not zero.up.weight.any() and not zero.up.bias.any() and zero.down.bias.all()
    assert not normal.up.bias.any() and not normal.down.bias.any() and normal.up.weight.all()


def test_what_need_not_be_there_may_be_missing() -> None:
    places = "adapter.places=[attention,'optional:*.gate','optional:mlp']"
    cfg = compose(["algorithm=fedavg", *TINY, "adapter=houlsby", "adapter.width=3", places])
    assert build.model(cfg, federation()).columns["adapter"].size == model_of("houlsby").columns["adapter"].size


def test_words_of_places_have_the_hash_of_the_patterns_before() -> None:
    cfg = compose(["algorithm=fedavg", *TINY, "adapter=houlsby"])
    stored = to_dict(cfg)
    assert stored["adapter"]["places"] == ["attention", "mlp"]
    stored["adapter"]["places"] = ["*.attn", "*.mlp"]
    assert config_hash(stored) == config_hash(cfg)
    stored["adapter"]["places"] = ["*.attn"]
    assert config_hash(stored) != config_hash(cfg)


def test_biases_alone_may_learn() -> None:
    module = ViTTiny((1, 4, 4), 3, patch=2, width=8)
    chosen = Parameters(["*.bias"], train=[]).insert(module)
    assert [n for n, p in module.named_parameters() if p.requires_grad] == chosen
    assert "head.bias" in chosen and "head.weight" not in chosen


def test_no_adapter_leaves_all() -> None:
    module = ViTTiny((1, 4, 4), 3, patch=2, width=8)
    before = {n: (p, p.requires_grad) for n, p in module.named_parameters()}
    assert NoAdapter().insert(module) == []
    assert all(before[n][0] is p and p.requires_grad for n, p in module.named_parameters())


def test_an_adapter_of_ones_own() -> None:
    cfg: Any = compose(["algorithm=fedavg", *TINY]).copy()
    cfg.adapter = {"_target_": "own_adapter.Rescale"}
    model = build.model(cfg, federation())
    assert model.traced_graph is not None and model.columns["adapter"].size == 2 * (24 + 8 + 16 + 8)
    rows, x = spread(model), torch.randn(3, 5, 1, 4, 4)
    many = model.predict(rows, x)
    for i in range(3):
        close(many[i], model.predict(rows[i], x[i]), 2e-5)
    x = torch.randn(4, 8)
    layer = nn.Linear(8, 3)
    wrapped = LoRA(["*"], rank=2, alpha=6, train=["none"]).adapt(layer, "layer")
    assert wrapped is not None
    nn.init.normal_(wrapped.lora_B.weight)  # type: ignore[union-attr, arg-type]
    product = wrapped.lora_B.weight @ wrapped.lora_A.weight  # type: ignore[union-attr, operator]
    close(wrapped(x), x @ (layer.weight + 3 * product).T + layer.bias, 1e-5)
    assert isinstance(Parameters(["*"]), Adapter)


def test_a_lora_run_from_before_convolutions_has_the_same_hash() -> None:
    cfg = compose(["algorithm=fedavg", *TINY, "adapter=lora"])
    stored = to_dict(cfg)
    del stored["adapter"]["convolutions"], stored["model"]["freeze"]
    assert config_hash(stored) == config_hash(cfg)
    assert config_hash(stored) != config_hash(
        compose(["algorithm=fedavg", *TINY, "adapter=lora", "model.freeze=[norm.*]"])
    )
