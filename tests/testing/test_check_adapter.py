"""Checks of a user's adapter: correct ones pass, and each check finds its mistake."""

from __future__ import annotations

import random

import pytest
from contract import assert_failed, import_example
from own_adapter import Rescale, Scaled
from torch import Tensor, fx, nn

from fedbench import commands
from fedbench.core.options import ConfigError
from fedbench.testing import adapter, check_adapter


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


class IdleAdapter(Rescale):
    layer = Idle


class WritingAdapter(Rescale):
    layer = Writing


class DetachedAdapter(Rescale):
    layer = Detached


class LoudAdapter(Rescale):
    layer = Loud


class DrawnAdapter(Rescale):
    layer = Drawn


class CountingAdapter(Rescale):
    layer = Counting


class TracedAdapter(Rescale):
    layer = Traced


MISTAKES = [
    (IdleAdapter, "a_row_holds_what_learns", "new parameters that are not trained"),
    (WritingAdapter, "the_backbone_stays", "training changes"),
    (DetachedAdapter, "what_is_added_learns", "parameters that do not change"),
    (LoudAdapter, "outputs_are_the_models_at_first", "`neutral` is set"),
    (DrawnAdapter, "draws_are_keyed", "other initial values"),
    (CountingAdapter, "clients_are_independent", "computed alone and with 2 other clients differ"),
    (TracedAdapter, "mapped_over_clients", "mapped by torch.vmap and with 2 other clients differ"),
    (CountingAdapter, "plans_agree", "and executor=loop differ"),
]


@pytest.fixture(autouse=True)
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    import_example(monkeypatch, "adapters.md", "my_adapters")


@pytest.mark.parametrize("target", [Rescale, "my_adapters.Rescale"])
def test_a_correct_one_passes(target: str | type) -> None:
    report = check_adapter(target)
    report.raise_if_failed()
    assert not report.skipped and len(report.passed) == len(adapter.SUITE.checks)


@pytest.mark.parametrize("cls, check, message", MISTAKES)
def test_a_mistake_is_found(cls: type, check: str, message: str) -> None:
    assert_failed(check_adapter(cls, only=[check]), check, message)


def test_every_check_finds_a_mistake() -> None:
    assert {check for _, check, _ in MISTAKES} == set(adapter.SUITE.checks)


def test_the_command_checks_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["check", "my_adapters.Rescale", "--only", "plans_agree"]) == 0
    assert commands.main(["check", "adapter=lora", "rank=3", "--only", "plans_agree"]) == 0
    assert capsys.readouterr().out.count("1 passed, 0 failed") == 2


def test_other_classes_and_missing_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="is not a subclass of fedbench"):
        check_adapter(nn.Linear, {"in_features": 2, "out_features": 3})
    with pytest.raises(ConfigError, match=r"places=\['nowhere'\]"):
        check_adapter("lora", {"places": ["nowhere"]})
