"""Adapters of a user's: a right one holds, and each check finds the slip that it is for."""

from __future__ import annotations

import random
import re
import sys
from types import ModuleType

import pytest
import torch
from conftest import ROOT
from own_adapter import Rescale, Scaled
from torch import Tensor, fx, nn

from fedbench import commands
from fedbench.adapters.lora import LoRALinear
from fedbench.core.options import ConfigError
from fedbench.testing import adapter, check_adapter

PAGE = (ROOT / "docs" / "adapters.md").read_text()


def slip(layer: type[nn.Module]) -> type[Rescale]:
    """The adapter with this layer."""
    name = layer.__name__ + "Adapter"
    return type(name, (Rescale,), {"layer": layer, "__doc__": layer.__doc__, "__qualname__": name})


class Idle(Scaled):
    """What is new does not learn."""

    def __init__(self, layer: nn.Linear):
        super().__init__(layer)
        self.scale.requires_grad_(False)


class Writing(Scaled):
    """Changes the frozen weights, in a pass that no trace follows."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] > 0:
            self.base_layer.weight.data.mul_(1.01)
        return super().forward(x)


class Detached(Scaled):
    """No gradient reaches what is new."""

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) * self.scale.detach()


class Loud(Scaled):
    """Doubles all outputs at first."""

    def __init__(self, layer: nn.Linear):
        super().__init__(layer)
        self.scale.data.mul_(2)


class Drawn(Scaled):
    """Draws from Python's generator."""

    def __init__(self, layer: nn.Linear):
        super().__init__(layer)
        self.scale.data.mul_(1 + 1e-6 * random.random())


class Counting(Scaled):
    """Computes otherwise each time."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] > 0:
            self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


class Traced(Scaled):
    """Computes otherwise where it is traced."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if isinstance(x, fx.Proxy) else self.base_layer(x) + 0 * self.scale


SLIPS = [
    (slip(Idle), "a_row_holds_what_learns", "is new and does not learn"),
    (slip(Writing), "the_backbone_stays", "is not what it was before training"),
    (slip(Detached), "what_is_added_learns", "has no gradient"),
    (slip(Loud), "outputs_are_the_models_at_first", "`neutral` is set"),
    (slip(Drawn), "draws_are_keyed", "begins otherwise"),
    (slip(Counting), "clients_are_independent", "alone than among 3"),
    (slip(Traced), "mapped_over_clients", "mapped by torch.vmap than among 3"),
    (slip(Counting), "plans_agree", "away from the loop's"),
]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("my_adapters")
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], vars(module))
    module.FromThePage = module.Rescale
    for cls in (Rescale, *(found for found, *_ in SLIPS)):
        setattr(module, cls.__name__, cls)
        monkeypatch.setattr(cls, "__module__", "my_adapters")
    monkeypatch.setitem(sys.modules, "my_adapters", module)


@pytest.mark.parametrize("name", ["Rescale", "FromThePage"])
def test_a_right_one_holds(name: str) -> None:
    report = check_adapter(f"my_adapters.{name}")
    report.raise_if_broken()
    assert not report.skipped and len(report.held) == len(adapter.SUITE.checks)


@pytest.mark.parametrize("found, check, words", SLIPS, ids=lambda x: x.__name__ if isinstance(x, type) else "")
def test_what_is_wrong_with_an_adapter_is_named(found: type, check: str, words: str) -> None:
    broken = check_adapter(found, only=[check]).broken
    assert check in broken and words in broken[check], broken


def test_every_check_of_adapters_finds_a_slip() -> None:
    assert {check for _, check, _ in SLIPS} == set(adapter.SUITE.checks)


def test_the_command_tells_an_adapter_by_its_class(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["check", "my_adapters.Rescale", "--only", "plans_agree"]) == 0
    assert commands.main(["check", "adapter=lora", "rank=3", "--only", "plans_agree"]) == 0
    assert capsys.readouterr().out.count("1 hold, 0 broken") == 2


def test_what_is_no_adapter_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no adapter"):
        check_adapter(nn.Linear, {"in_features": 2, "out_features": 3})
    with pytest.raises(ConfigError, match=r"places=\['nowhere'\]"):
        check_adapter("lora", {"places": ["nowhere"]})
    assert LoRALinear(nn.Linear(2, 3), 1, 1.0)(torch.zeros(1, 2)).shape == (1, 3)
