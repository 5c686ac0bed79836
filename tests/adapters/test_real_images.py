"""Adapters in a vision transformer under seven methods, on real images: the digits, and (slow) CIFAR-10.

Whole runs as a command starts them, two rounds each: the loop, threads and all clients at once give the same rows.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import assert_same, state_of
from tiny import compose
from torch import Tensor

from fedbench.nn.batched_operators import ForwardContext
from fedbench.simulation import simulator
from fedbench.simulation.run_state import Simulation

METHODS = ["fedavg", "fedper", "pgfed", "apple", "scaffold", "ditto", "pfedme"]
ADAPTERS = {"lora": ["adapter=lora", "adapter.rank=4"], "houlsby": ["adapter=houlsby", "adapter.width=8"]}
RUN = ["hardware=cpu", "tracking=disabled", "rounds=2", "local.epochs=1", "local.batch_size=8", "optimizer.lr=0.05"]
DIGITS = [
    "dataset=digits",
    "dataset.subset=0.1",
    "model=vit_tiny",
    "model.patch=2",
    "model.width=16",
    "model.depth=2",
    "model.heads=2",
]
CIFAR = ["dataset=cifar10", "dataset.subset=0.01", "model=vit_tiny"]  # width 64, 4 blocks, 32 x 32
CLIENTS = 4


def run(folder: Path, *overrides: str, rounds: int = 2) -> tuple[Simulation, dict[str, Tensor]]:
    """A run after its rounds, and what of its module was in no row before: the frozen backbone, buffers included."""
    clients = ["partition=dirichlet", f"partition.num_clients={CLIENTS}", "partition.min_size=8"]
    folder.mkdir(exist_ok=True)
    sim = simulator.prepare(compose([*RUN, *clients, *overrides]), folder, None)
    before = outside(sim)
    for sim.done in range(1, rounds + 1):
        sim.algorithm.round(simulator.Cohort(sim.engine, np.arange(CLIENTS), sim.done - 1))
    return sim, before


def outside(sim: Simulation) -> dict[str, Tensor]:
    learns = sim.engine.model.spans
    return {n: t.clone() for n, t in sim.engine.model.module.state_dict().items() if n not in learns}


def agree(method: str, adapter: str, data: list[str], folder: Path) -> None:
    def played(executor: str) -> tuple[Simulation, dict[str, Tensor]]:
        return run(folder / executor, f"algorithm={method}", *data, *ADAPTERS[adapter], f"hardware.executor={executor}")

    sims = {executor: played(executor) for executor in ("vmap", "loop", "threads")}
    states = {executor: state_of(sim) for executor, (sim, _) in sims.items()}
    for executor in ("loop", "threads"):
        assert_same(states[executor], states["vmap"], 1e-5)
    sim, before = sims["vmap"]
    model, after = sim.engine.model, outside(sim)
    assert {n.partition(".")[0] for n in model.spans} == {"blocks", "head"}
    assert all(n.startswith("head.") or ".lora_" in n or ".adapter." in n for n in model.spans)
    assert before.keys() == after.keys() and all(torch.equal(t, after[n]) for n, t in before.items())
    assert sum(t.numel() for t in before.values()) > model.size


def by_default(i: int, j: int) -> list:
    """Two methods with one adapter each by default, all with both where slow tests are asked for."""
    return [] if i == j else [pytest.mark.slow]


@pytest.mark.parametrize(
    "method, adapter",
    [pytest.param(m, a, marks=by_default(i, j)) for i, m in enumerate(METHODS) for j, a in enumerate(ADAPTERS)],
)
def test_digits(method: str, adapter: str, tmp_path: Path) -> None:
    agree(method, adapter, DIGITS, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("method", METHODS)
def test_cifar10(method: str, adapter: str, tmp_path: Path, shared_data: Path) -> None:
    path = f"dataset.path={shared_data / 'cifar10_jpeg.npz'}"
    agree(method, adapter, [*CIFAR, path], tmp_path)


@functools.cache
def images(folder: Path) -> Tensor:
    sim, _ = run(folder, "algorithm=fedavg", *DIGITS, rounds=0)
    x = sim.engine.federation.inputs
    assert isinstance(x, Tensor)
    return x[:6]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapted_model_begins_as_the_bare_one(adapter: str, tmp_path: Path) -> None:
    """At first equal, and no longer after two rounds."""
    x = images(tmp_path / "images")
    bare = run(tmp_path / "bare", "algorithm=fedavg", *DIGITS, rounds=0)[0].engine.model
    sim, _ = run(tmp_path / "adapted", "algorithm=fedavg", *DIGITS, *ADAPTERS[adapter])
    model = sim.engine.model

    def logits(row: Tensor) -> Tensor:
        return model.forward(row, x, ForwardContext())

    first = bare.predict(bare.init_row(), x)
    assert torch.equal(logits(model.init_row()), first)
    trained = sim.algorithm.global_row()
    assert trained is not None and not torch.allclose(logits(trained), first, atol=1e-2)
