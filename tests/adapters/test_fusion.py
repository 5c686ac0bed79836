"""AdapterFusion: attention over adapters by hand, and over those of exported clients."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import assert_same, case, run_rounds, state_of
from tiny import CPU, close, compose, equal, ragged
from torch import Tensor, nn

from fedbench.adapters.bottleneck import Bottleneck
from fedbench.adapters.fusion import Fusion
from fedbench.core.options import ConfigError
from fedbench.engine.federation import Federation
from fedbench.models.vilt import ViLT
from fedbench.nn.flat import FlatModel
from fedbench.simulation import build, checkpoint

TINY = ["model=vilt_tiny", "model.width=8", "model.heads=2"]
NAMED = {"image": (1, 16, 16), "text": (8,)}
BLOCK = ["block"]
WIDTH = 3


def vilt(depth: int = 2) -> ViLT:
    torch.manual_seed(0)
    return ViLT(NAMED, 3, width=8, heads=2, depth=depth)


def drawn(module: nn.Module, where: str, seed: int = 1, size: float = 0.5) -> None:
    """Random numbers in all parameters with this word in their names."""
    g = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        if where in name:
            p.data = size * torch.randn(p.shape, generator=g)


def fused(layer: nn.Module, adapters: int = 3, **options: Any) -> Any:
    """The layer with a fusion all of whose numbers are drawn."""
    torch.manual_seed(0)
    adapted = Fusion(["*"], adapters, WIDTH, **options).adapt(layer, "layer")
    for name, p in adapted.named_parameters():
        if not name.startswith("base_layer"):
            nn.init.normal_(p, std=0.4)
    return adapted


# -- the layer -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("activation, scale", [("relu", 1.0), ("gelu", 2.5)])
def test_by_hand(activation: Any, scale: float) -> None:
    """Sample by sample: every score, their softmax, and V of the outputs' mean by it."""
    layer, x = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 6)), torch.randn(7, 5)
    adapted = fused(layer, activation=activation, scale=scale)
    s = {"relu": torch.relu, "gelu": F.gelu}[activation]
    found = adapted(x)
    for i, y in enumerate(layer(x)):
        outputs = [scale * (A.up.weight @ s(A.down.weight @ y + A.down.bias) + A.up.bias) for A in adapted.adapters]
        query = adapted.query.weight @ y + adapted.query.bias
        scores = [query @ (adapted.key.weight @ z + adapted.key.bias) for z in outputs]
        p = torch.stack(scores).softmax(0)
        assert p.max() < 0.999
        close(found[i], y + adapted.value.weight @ sum(share * z for share, z in zip(p, outputs)), 1e-5)


def test_what_is_drawn_at_first() -> None:
    layer = nn.Linear(300, 300)
    adapted: Any = Fusion(["*"], 2, WIDTH).adapt(layer, "layer")
    for score in (adapted.query, adapted.key):
        assert abs(score.weight.std().item() - 0.02) < 1e-3 and not score.bias.any()
    equal(adapted.value.weight, torch.eye(300))
    assert adapted.value.bias is None and (adapted.query.weight != adapted.key.weight).any()
    assert (adapted.adapters[0].down.weight != adapted.adapters[1].down.weight).any()


def test_equal_adapters_are_one() -> None:
    """Whatever Q and K are, with V the identity: Pfeiffer et al.'s bottleneck."""
    layer, x = nn.Linear(5, 6), torch.randn(7, 5)
    adapted, one = fused(layer), Bottleneck(["*"], WIDTH, "relu").adapt(layer, "layer")
    nn.init.eye_(adapted.value.weight)
    for A in adapted.adapters:
        A.load_state_dict(adapted.adapters[0].state_dict())
    one.adapter.load_state_dict(adapted.adapters[0].state_dict())  # type: ignore[union-attr]
    close(adapted(x), one(x), 1e-5)  # type: ignore[misc]


def test_neither_the_order_of_adapters_nor_the_keys_bias_moves_an_output() -> None:
    layer, x = nn.Linear(5, 6), torch.randn(7, 5)
    adapted = fused(layer)
    before = adapted(x)
    adapted.adapters = nn.ModuleList(reversed(adapted.adapters))
    close(adapted(x), before, 1e-5)
    nn.init.normal_(adapted.key.bias)
    close(adapted(x), before, 1e-5)
    nn.init.normal_(adapted.query.bias)
    assert (adapted(x) - before).abs().max() > 1e-2


def test_behind_attention_that_is_told_what_is_masked() -> None:
    model, bare = vilt(), vilt()
    Fusion(["*.attn"], 2, WIDTH).insert(model)
    drawn(model, "attn.")
    attn: Any = model.blocks[0].attn
    bare.blocks[0].attn.load_state_dict(attn.base_layer.state_dict())
    x, visible = torch.randn(2, 5, 8), torch.tensor([True, True, False, True, True]).view(1, 1, 1, 5)
    y = bare.blocks[0].attn(x, visible)
    close(attn(x, visible), y + attn.added(x, y), 1e-6)
    assert (attn(x, visible) - y).abs().max() > 1e-2


# -- over the adapters of files --------------------------------------------------------------------------
@pytest.fixture
def bank(tmp_path: Path) -> list[dict[str, Tensor]]:
    """Three clients' state_dicts, in files as fedbench export writes them."""
    of = build.model(compose(["algorithm=fedavg", *TINY, "adapter=pfeiffer", f"adapter.width={WIDTH}"]), clients())
    states = []
    for k in range(3):
        drawn(of.module, ".adapter.", seed=k)
        drawn(of.module, "head.", seed=k)
        states.append({name: t.clone() for name, t in of.module.state_dict().items()})
        with (tmp_path / f"client{k}.pt").open("wb") as file:
            checkpoint.dump(states[-1], file)
    return states


@functools.cache
def federation() -> tuple[Any, Any]:
    return ragged(sizes=(7, 21, 12, 4, 16, 9), val=(3,) * 6, shape=NAMED)


def clients() -> Federation:
    return Federation.build(*federation(), CPU)


def words(folder: Path, pattern: str = "client*.pt") -> list[str]:
    return [*TINY, "adapter=fusion", f"adapter.width={WIDTH}", f"adapter.adapters='{folder / pattern}'"]


def over(folder: Path, *more: str) -> FlatModel:
    return build.model(compose(["algorithm=fedavg", *words(folder), *more]), clients())


def test_a_row_holds_the_fusion_and_the_head_alone(bank: list, tmp_path: Path) -> None:
    model = over(tmp_path)
    kinds = {re.sub(r"^blocks\.\d\.", "", name) for name in model.spans}
    fusion = {"query.weight", "query.bias", "key.weight", "key.bias", "value.weight"}
    assert kinds == fusion | {"head.weight", "head.bias"}
    assert model.columns["adapter"].size == 2 * (3 * 8 * 8 + 2 * 8) == model.size - model.columns["head"].size
    block: Any = model.module.get_submodule("blocks.1")
    for k, state in enumerate(bank):
        equal(block.adapters[k].up.weight, state["blocks.1.adapter.up.weight"])
    rows = model.init_rows(2, "own")
    assert (rows[0] != rows[1]).any()


def test_at_first_it_is_the_mean_of_the_clients_adapters_by_attention(bank: list, tmp_path: Path) -> None:
    """Each client's file once more: of one of them alone the model is the client's, but for the head."""
    model = build.model(compose(["algorithm=fedavg", *words(tmp_path, "client1.pt")]), clients())
    head = model.columns["head"]
    row = head.put(model.init_row(), torch.cat([bank[1][f"head.{n}"].flatten() for n in ("weight", "bias")]))
    one = vilt()
    Bottleneck(BLOCK, WIDTH, "relu").insert(one)
    one.load_state_dict(bank[1])
    x, _ = clients().gather(torch.arange(5))
    assert isinstance(x, dict)
    close(model.predict(row, x), one.eval()(x), 1e-5)
    several = over(tmp_path)
    assert (several.predict(head.put(several.init_row(), head.take(row)), x) - one(x)).abs().max() > 1e-3


def test_adapters_stay_and_every_plan_agrees(bank: list, tmp_path: Path) -> None:
    states = []
    for plan in ("loop", "threads", "vmap"):
        of = case("fedper")
        sim = of.on([*words(tmp_path), *of.optimizer]).simulation(plan, federation()[1], federation()[0])
        before = {n: t.clone() for n, t in sim.engine.model.module.named_parameters() if not t.requires_grad}
        assert sum(".adapters." in n for n in before) == 2 * 3 * 4
        states.append(state_of(run_rounds(sim, 2)))
        after = dict(sim.engine.model.module.named_parameters())
        assert all(torch.equal(after[n], t) for n, t in before.items())
    assert_same(states[0], states[2], 1e-5)
    assert_same(states[1], states[2], 1e-5)
    model, rows = over(tmp_path), states[0]["/deployed"]
    moved = (rows - model.init_row()).abs().amax(0)
    assert all(n.endswith("key.bias") or moved[a:b].max() > 1e-6 for n, (a, b) in model.spans.items())


@pytest.mark.parametrize(
    "change, sentence",
    [
        (["seed=1"], r"the frozen parameter \S+ in \S*client0.pt differs from the model's. Set the model"),
        (["model.depth=3"], r"the frozen parameter blocks.2\S+ in .* differs from the model's"),
        (["adapter.width=4"], r"down.weight has shape \(3, 8\) in \S*client0.pt, but \(4, 8\) with adapter.width=4"),
        (["adapter.places=['*.attn']"], r"has no blocks.0.attn.adapter.down.weight; its adapter parameters are bl"),
        (
            ["adapter.places=['blocks.0']"],
            r"also has blocks.1.adapter.down.bias, for which the model has no",
        ),
        (["adapter.adapters=nothing/*.pt"], "adapter.adapters=nothing/.*: no file matches this pattern"),
        (["adapter.adapters=README.md"], "README.md cannot be read as a file of fedbench export"),
    ],
)
def test_files_that_do_not_fit(change: list[str], sentence: str, bank: list, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(ConfigError, match=sentence):
        over(tmp_path, *change)


def test_what_is_frozen_is_not_said_to_learn(bank: list, tmp_path: Path) -> None:
    module = build.model(compose(["algorithm=fedavg", *TINY]), clients()).module
    of = Fusion(BLOCK, str(tmp_path / "*.pt"), WIDTH)
    assert len(of.insert(module)) == 2 * 5 and not of.neutral and Fusion(BLOCK, 3).neutral


def test_files_of_other_adapters_are_refused(tmp_path: Path) -> None:
    for name, sentence in (
        ("lora", "has no blocks.0.adapter.down.weight; its adapter parameters are none"),
        (
            "pfeiffer adapter.twin=true",
            r"also has blocks\.\S+\.twin\.down\.bias, .* adapter.twin=false",
        ),
    ):
        other = build.model(compose(["algorithm=fedavg", *TINY, *f"adapter={name}".split()]), clients())
        torch.save(other.module.state_dict(), tmp_path / "client0.pt")
        with pytest.raises(ConfigError, match=sentence):
            over(tmp_path, "adapter.width=16")
