"""local.batch_size with one number per client: each client trains as if all had its number."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from tiny import compose

from fedbench.config.check import check
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort
from fedbench.engine.training import LocalTraining
from fedbench.simulation.simulator import prepare, run, run_round

SIZES = [4, 16, 7, 64, 1, 1000]  # one client takes one sample per step, one all of them
OPTIONS = [
    *("dataset=digits", "model=logistic", "partition.num_clients=6", "partition.alpha=1", "clients_per_round=4"),
    *("rounds=6", "local.epochs=2", "local.batch_size=16", "tracking=disabled", "hardware.device=cpu"),
    *("hardware.executor=vmap", "checkpoint.every=1", "optimizer.momentum=0.9", "optimizer.reset=never"),
]
ROOT = Path(__file__).resolve().parents[2]


def config(*overrides: str) -> DictConfig:
    """OPTIONS with other values, and plain SGD for SCAFFOLD."""
    needs = ["optimizer.momentum=0", "optimizer.reset=round"] if "algorithm=scaffold" in overrides else []
    words = dict(word.split("=", 1) for word in [*OPTIONS, *needs, *overrides])
    return compose([f"{key}={value}" for key, value in words.items()])


def rounds(cfg: DictConfig, folder: Path, upto: int) -> Any:
    folder.mkdir(exist_ok=True)
    sim = prepare(cfg, folder, None)
    for _ in range(upto):
        run_round(sim, [])
    return sim


def listed(*overrides: str) -> list[str]:
    return [f"local.batch_size={SIZES}".replace(" ", ""), *overrides]


def clients(folder: Path) -> list[dict[str, Any]]:
    with (folder / "clients.csv").open(newline="") as file:
        return [{**row, "time": ""} for row in csv.DictReader(file)]


def same(one: Any, other: Any, tolerance: float = 1e-6) -> bool:
    return torch.allclose(one, other, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    "more",
    [
        (),
        *(
            pytest.param((word,), marks=pytest.mark.slow)
            for word in ("local.drop_last=true", "local.steps=5", "hardware.executor=loop")
        ),
    ],
)
def test_a_client_trains_as_if_all_had_its_batch_size(more: tuple[str, ...], tmp_path: Path) -> None:
    """The same samples in the same order; padding of shorter batches changes kernels, so 1e-6."""
    sim = rounds(config("algorithm=fedavg", *listed(*more)), tmp_path, 0)
    everybody = np.arange(6)
    found = Cohort(sim.engine, everybody, 3).train(sim.algorithm.global_row())
    for k, size in enumerate(SIZES):
        one = rounds(config("algorithm=fedavg", f"local.batch_size={size}", *more), tmp_path / str(k), 0)
        expected = Cohort(one.engine, everybody, 3).train(one.algorithm.global_row())
        assert found.steps[k] == expected.steps[k] and same(found.theta[k], expected.theta[k])
        assert same(found.loss[k], expected.loss[k])


def test_numbers_of_steps_and_full_batches(tmp_path: Path) -> None:
    sim = rounds(config("algorithm=fedavg", *listed("local.epochs=1")), tmp_path, 0)
    cohort = Cohort(sim.engine, np.array([1, 3, 5]), 0)
    n, sizes = sim.engine.federation.num_samples[cohort.ids], np.array(SIZES)[cohort.ids]
    assert cohort.batch_size.tolist() == sizes.tolist()  # type: ignore[union-attr]
    assert cohort.num_steps.tolist() == (-(-n // sizes)).tolist() == cohort.train(sim.algorithm.w).steps.tolist()
    whole = n // np.minimum(sizes, n) * np.minimum(sizes, n)  # samples of full batches
    _, loss = cohort.gradient(sim.algorithm.w, drop_last=True)
    for i, client in enumerate(cohort.ids):
        federation = sim.engine.federation
        samples = torch.from_numpy(federation.splits["train"][client][: whole[i]])
        x, y = federation.gather(samples)
        logits = sim.engine.model.forward(sim.algorithm.w, x)
        assert same(loss[i], torch.nn.functional.cross_entropy(logits, y), 1e-5)
    own = cohort.train(sim.algorithm.w, how=LocalTraining(batch_size=10, epochs=1)).steps  # a method's own number
    assert own.tolist() == (-(-n // 10)).tolist()


@pytest.mark.parametrize("method", ["pgfed", "per_fedavg", "scaffold", pytest.param("fedgh", marks=pytest.mark.slow)])
def test_equal_numbers_in_a_list_are_one_number(method: str, tmp_path: Path) -> None:
    for name, size in (("list", [16] * 6), ("one", 16)):
        (tmp_path / name).mkdir()
        words = [f"algorithm={method}", f"local.batch_size={size}", "rounds=2"]
        run(config(*words, *(["model=mlp"] if method == "fedgh" else [])), tmp_path / name)
    assert clients(tmp_path / "list") == clients(tmp_path / "one")


def test_per_fedavg_multiplies_the_number_of_each_client(tmp_path: Path) -> None:
    sim = rounds(config("algorithm=per_fedavg", *listed()), tmp_path, 1)
    assert torch.isfinite(sim.algorithm.global_row()).all()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["local.batch_size=[1,2]"], "local.batch_size lists 2 numbers, and there are 6 clients to train"),
        (["local.batch_size=[1,2,3,4,5,0]"], "local.batch_size must be a whole number >= 1 or a list"),
        (
            ["local.batch_size=[1,2,3,4,5]", "new_clients.count=1"],
            "the 1 new clients have none: give one number for all",
        ),
    ],
)
def test_refusals(words: list[str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check(config("algorithm=fedavg", *words))


@pytest.mark.slow
def test_processes_and_resuming_change_nothing(tmp_path: Path) -> None:
    words = ["algorithm=fedper", "dataset=digits", "model=mlp", "partition.num_clients=6", "clients_per_round=4"]
    words += [
        *listed(),
        "rounds=4",
        "tracking=disabled",
        "hardware.threads=1",
        "checkpoint.every=1",
        "compression=topk",
    ]
    words += ["system.dropout=0.3"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def fedbench(*more: str, start: tuple[str, ...] = ()) -> None:
        command = [sys.executable, *start, "-m", "fedbench", *words, *more]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr

    fedbench("hydra.run.dir=whole", "hardware.device=cpu")
    fedbench("hydra.run.dir=parts", "hardware.device=cpu", "checkpoint.pause_after=2")
    fedbench("hydra.run.dir=parts", "hardware.device=cpu")
    assert (tmp_path / "parts/clients.csv").read_bytes() == (tmp_path / "whole/clients.csv").read_bytes()
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2")
    fedbench("hydra.run.dir=ranks", "hardware=ddp", "hardware.device=cpu", start=torchrun)
    for one, other in zip(clients(tmp_path / "ranks"), clients(tmp_path / "whole"), strict=True):
        assert {k: float(v) for k, v in one.items() if k != "time"} == pytest.approx(
            {k: float(v) for k, v in other.items() if k != "time"}, abs=1e-5
        )
