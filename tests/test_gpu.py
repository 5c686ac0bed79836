"""Methods and options on a GPU: the same tensors as on a CPU, up to rounding."""

from __future__ import annotations

import pytest
import torch
from cases import METHODS, Case, case, run_rounds, state_of
from torch import Tensor

from fedbench.config.conf_tree import group_options
from fedbench.engine.executor import Plan
from fedbench.simulation.devices import set_precision

pytestmark = pytest.mark.gpu

TOLERANCE = 2e-3  # relative to the largest value of a tensor, after three rounds
PLANS = [pytest.param(Plan("vmap", 0, 1, 1, graphs), id="graphs" if graphs else "direct") for graphs in (False, True)]
SMALL = ["model=mlp", "model.hidden=[8]"]
IMAGES = ["model=resnet", "model.widths=[4]"]
VIT = ["model=vit_tiny", "model.patch=2", "model.width=8", "model.heads=2", "model.depth=1"]
OPTIONS = [
    *([*SMALL, f"compression={name}"] for name in group_options("compression") if name not in ("none", "cer")),
    [*SMALL, "compression=topk", "compression.direction=both"],
    *([*SMALL, f"aggregator={name}"] for name in group_options("aggregator") if not name.endswith("krum")),
    *([*SMALL, f"aggregator={name}", "aggregator.f=0", "aggregator.pre=nnm"] for name in ("krum", "multi_krum")),
    *([*IMAGES, f"attack={name}"] for name in group_options("attack") if name != "none"),
    *([*SMALL, f"server={name}"] for name in group_options("server")),
    *([*VIT, f"adapter={name}"] for name in group_options("adapter")),
    *([*VIT, "adapter=lora", f"adapter.sync={name}"] for name in ("ffa", "fedsa", "flora", "fedex")),
    *([*SMALL, f"optimizer={name}"] for name in group_options("optimizer")),
    [*SMALL, "privacy.epsilon=5"],
    [*SMALL, "privacy.epsilon=5", "privacy.calibration=analytic"],
]


def compare(case: Case, plan: Plan) -> None:
    """Assert that three rounds on the GPU give the tensors of the CPU."""
    set_precision("float32")  # by default, PyTorch convolves in TF32
    expected = state_of(run_rounds(case.simulation(), 3, evaluated=True))
    found = state_of(run_rounds(case.simulation(plan, device=torch.device("cuda")), 3, evaluated=True))
    assert found.keys() == expected.keys()
    far = {name: distance(found[name].cpu(), expected[name]) for name in expected}
    assert all(value <= TOLERANCE for value in far.values()), {n: v for n, v in far.items() if v > TOLERANCE}


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors, divided by the largest finite absolute value of the second."""
    assert a.shape == b.shape and a.dtype == b.dtype
    a, b = a.double(), b.double()
    assert torch.equal(a.isfinite(), b.isfinite())
    a, b = a[b.isfinite()], b[b.isfinite()]
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) if b.numel() else 0.0


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", METHODS)
def test_methods(name: str, plan: Plan) -> None:
    method = case(name)
    if method.reason:
        pytest.skip(method.reason)
    compare(method, plan)


@pytest.mark.parametrize("overrides", OPTIONS, ids=" ".join)
def test_options(overrides: list[str]) -> None:
    compare(Case("fedavg", overrides), Plan("vmap", 0, 1, 1, graphs=True))
