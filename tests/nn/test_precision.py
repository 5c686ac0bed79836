"""Forward and backward in bfloat16, with float32 rows, logits and gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from prompts import prompts
from tiny import all_clients, close, compose, engine, equal, mlp, ragged, seeded
from torch import Tensor, nn

from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.training import LocalTraining
from fedbench.models.fedavg_cnn import FedAvgCNN
from fedbench.models.resnet import ResNet
from fedbench.simulation import build, evaluate


class Mapped(nn.Module):
    """A module that cannot be traced and uses torch.vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x.reshape(x.shape[0], -1))))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple]] = {
    "mlp": (mlp, (1, 4, 4)),
    "cnn": (lambda: FedAvgCNN((3, 16, 16), 3, width=32), (3, 16, 16)),
    "batch norm": (lambda: ResNet((3, 8, 8), 3, [8, 16], "batch"), (3, 8, 8)),
    "group norm": (lambda: ResNet((3, 8, 8), 3, [8, 16], "group"), (3, 8, 8)),
    "mapped": (Mapped, (1, 4, 4)),
}


def build_engine(name: str, plan: str = "vmap", **options) -> Engine:
    if name == "prompt":
        return prompts(plan=plan)
    make, shape = MODELS[name]
    return engine(*ragged(shape=shape), seeded(make), plan=plan, **options)


def gradients(e: Engine, autocast: bool, custom: bool = False) -> Tensor:
    """Of the first local step, every client's.  custom: under autograd, by a loss of the method's own.  # [K, P]"""
    e.model.autocast = autocast
    found: list[tuple[np.ndarray, Tensor]] = []

    def step(s, batch) -> None:
        loss = (lambda s, rows, batch: s.task_loss(s.forward(rows, batch), batch)) if custom else None
        found.append((batch.counts, s.grad(batch, loss=loss).clone()))

    with torch.random.fork_rng(devices=[]):
        all_clients(e).train(e.model.init_row(), step=step, how=LocalTraining(steps=1))
    e.model.autocast = False
    return torch.cat([g for _, g in sorted(found, key=lambda pair: -len(pair[1]))])


def test_a_way_for_every_kind_of_model() -> None:
    e = {name: build_engine(name).model for name in (*MODELS, "prompt")}
    assert {n for n, m in e.items() if m.manual_backward is not None} == {"mlp", "cnn"}
    assert {n for n, m in e.items() if m.traced_graph is None} == {"mapped", "prompt"}


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("plan", ["vmap", "loop"])
@pytest.mark.parametrize("name", [*MODELS, "prompt"])
def test_gradients_are_close_to_float32s(name: str, plan: str, custom: bool) -> None:
    e = build_engine(name, plan)
    exact, low = gradients(e, False, custom), gradients(e, True, custom)
    assert low.dtype == torch.float32
    assert torch.cosine_similarity(exact.flatten(), low.flatten(), dim=0) > 0.99
    each = torch.cosine_similarity(exact, low, dim=1).min()
    assert each > (0.95 if "norm" in name else 0.99)  # of a norm's few samples: 4 in the smallest client
    close(low.norm(dim=1), exact.norm(dim=1), 0.05)
    away = (low - exact).norm() / exact.norm()
    assert away > 1e-3  # bfloat16 has 8 bits: computed in float32, it would be 0
    equal(gradients(e, False, custom), exact)


@pytest.mark.parametrize("name", [*MODELS, "prompt"])
def test_what_comes_out_is_float32(name: str) -> None:
    e = build_engine(name)
    model, cohort = e.model, all_clients(e)
    row = model.init_row()
    exact = cohort.forward(row)
    model.autocast = True
    for rows in (row, row.repeat(len(cohort), 1)):
        found = cohort.forward(rows)
        assert all(z.dtype == torch.float32 for z in found)
        close(torch.cat(found), torch.cat(exact), 0.05)
        assert not torch.equal(torch.cat(found), torch.cat(exact))
    assert not torch.is_autocast_enabled("cpu")
    if name != "prompt":
        x = torch.randn(4, *MODELS[name][1])
        z = model.features(row, x)
        assert z.dtype == model.head(row, z).dtype == torch.float32
        close(model.head(row, z), model.predict(row, x), 0.02)
        rounded = model.head(row, z)
        model.autocast = False
        assert not torch.equal(model.head(row, z), rounded)


@pytest.mark.parametrize("name", ["cnn", "batch norm"])
def test_rows_are_float32s(name: str) -> None:
    """A step of lr 1e-4 moves weights by less than bfloat16 can tell apart, and still by 1/100 of a step of lr 0.01."""
    e = build_engine(name)
    e.model.autocast = True
    start = e.model.init_row()
    small, large = (all_clients(e).train(start, how=LocalTraining(steps=1, lr=lr)).theta - start for lr in (1e-4, 1e-2))
    small, large = (e.model.trained.take(moved) for moved in (small, large))
    assert small.dtype == torch.float32
    wide = start[: small.shape[1]].abs() > 0.01
    assert (small.abs() < 2**-9 * start[: small.shape[1]].abs())[:, wide].float().mean() > 0.9
    close(small, large / 100, 1e-6)
    assert torch.cosine_similarity(small, large, dim=1).min() > 0.99


# -- whole runs ------------------------------------------------------------------------------------------
def accuracy(model: tuple[str, ...], autocast: bool) -> float:
    """In percent, over all clients' test samples, after 8 rounds on digits (twice as large for a FedAvgCNN)."""
    cfg = compose(
        [
            "algorithm=fedavg",
            "dataset=digits",
            "partition=dirichlet",
            "partition.num_clients=6",
            "partition.alpha=1.0",
            "rounds=8",
            "sample_rate=1.0",
            "local.epochs=2",
            "local.batch_size=20",
            "optimizer.lr=0.05",
            "optimizer.momentum=0.9",
            "hardware=cpu",
            "hardware.executor=vmap",
            *model,
        ]
    )
    arrays = build.data(cfg)
    if "model=fedavg_cnn" in model:
        arrays.inputs = np.asarray(arrays.inputs).repeat(2, axis=-1).repeat(2, axis=-2)
    e, method = build.engine(cfg, arrays, build.partition(cfg, arrays)), build.algorithm(cfg)
    e.model.autocast = autocast
    method.setup(e.federation, e.model, e.rows)
    ids = np.arange(6)
    for round in range(cfg.rounds):
        method.round(Cohort(e, ids, round))
    found = evaluate.personal(method, e, ids, cfg.rounds - 1, True)
    sizes = e.federation.splits["test"].sizes
    return 100 * float((found["accuracy"] * sizes).sum() / sizes.sum())


CNN = pytest.param(("model=fedavg_cnn", "model.width=32"), marks=pytest.mark.slow)  # minutes where bfloat16 is emulated


@pytest.mark.parametrize("model", [("model=mlp", "model.hidden=[32]"), CNN])
def test_a_run_is_as_accurate(model: tuple[str, ...]) -> None:
    exact = accuracy(model, False)
    assert exact > 85
    assert abs(accuracy(model, True) - exact) <= 2
