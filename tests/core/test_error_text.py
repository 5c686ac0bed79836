"""Mistakes of fedbench are raised as they are; errors of other people's code become one sentence."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from fedbench.core.error_text import FEDBENCH, describe_error, is_raised_here, is_raised_outside_layers
from fedbench.core.options import ConfigError
from fedbench.models._backbone import Backbone, classifier_of
from fedbench.nn import traced_graph
from fedbench.nn.flat import FlatModel
from fedbench.simulation.output_checks import _outputs


class Slip(nn.Module):
    """A layer that calls fedbench wrongly: the mistake is the layer's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        classifier_of(x)  # type: ignore[arg-type]
        return x


def slip(*_: object) -> nn.Module:
    """Fail within a line of fedbench."""
    return classifier_of(3)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("call", "here", "outside_layers"),
    [(slip, True, True), (lambda: json.loads("x"), False, False), (lambda: Slip()(torch.ones(1)), True, False)],
)
def test_whose_line_it_was(call, here: bool, outside_layers: bool) -> None:
    with pytest.raises((AttributeError, ValueError)) as raised:
        call()
    assert is_raised_here(raised.value) == here
    assert is_raised_outside_layers(raised.value) == outside_layers


def test_a_neighbouring_folder_is_not_fedbench() -> None:
    """Code of a folder such as fedbench_plugins, beside fedbench, is the user's."""
    code = compile("1 / 0", str(FEDBENCH.with_name("fedbench_plugins") / "own.py"), "exec")
    with pytest.raises(ZeroDivisionError) as raised:
        exec(code)
    assert not is_raised_here(raised.value)
    assert "own.py, line 1" in describe_error(raised.value)


def test_a_mistake_in_tracing_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the module's own code means that it is not traced."""

    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    assert traced_graph.trace(Asks()) is None
    monkeypatch.setattr(traced_graph, "OPERATORS", None)
    with pytest.raises(TypeError):
        traced_graph.trace(nn.Sequential(nn.Linear(2, 2)))


def test_a_mistake_in_building_a_network_is_raised() -> None:
    with pytest.raises(AttributeError):
        Backbone(slip, "model.name=x", (3, 4, 4), 2, 3)
    with pytest.raises(ConfigError, match=r"model.name=x cannot be built for images \(3, 4, 4\): Expecting value"):
        Backbone(lambda: json.loads("x"), "model.name=x", (3, 4, 4), 2, 3)


def test_a_mistake_in_computing_outputs_is_raised() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(AttributeError):
        _outputs(FlatModel(nn.Linear(3, 2), {}), x, False, "it fails", slip)
    with pytest.raises(ConfigError, match="it fails: AttributeError"):
        _outputs(FlatModel(nn.Sequential(Slip(), nn.Linear(3, 2)), {}), x, False, "it fails", lambda module: None)
