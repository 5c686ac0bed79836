"""Processes that store the samples of their own clients compute what one process with all samples computes.

The module is its own driver: `python test_shard.py FOLDER COUNT` forks processes that run `drive`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import METHODS, assert_same, case, run_rounds, state_of
from conftest import ROOT
from forked import run_forked
from tiny import CPU, close, compose, equal, once

from fedbench.core.mapped import EntryReader
from fedbench.core.options import ConfigError
from fedbench.core.split import Ragged, Split
from fedbench.data.base import Arrays
from fedbench.data.synthetic import Synthetic
from fedbench.engine import ranks
from fedbench.engine.cohort import Cohort
from fedbench.engine.federation import Federation
from fedbench.engine.shard import Shard
from fedbench.simulation import build, evaluate
from fedbench.simulation.summary import task_line

SHARDED = {"hardware.samples": "sharded"}
ACCEPTED = ("fedavg", "fedper", "pgfed")  # on one, two and three processes
REFUSED = "pgfed_exact"
USUAL = ("fedfomo", "fedproto", "knn_per", "pfedprompt", "pfednet", "ditto")
OTHERS = [name for name in METHODS if name not in (*ACCEPTED, *USUAL, REFUSED)]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]),
    "WANDB_MODE": "disabled",
}


# -- in several processes --------------------------------------------------------------------------------
def is_able(name: str) -> bool:
    return not case(name).reason


def played(name: str, **values: Any) -> dict[str, torch.Tensor]:
    """Run two rounds and return all states, the deployed rows, and each client's scores."""
    sim = case(name).simulation("loop", **values)
    sim.engine.executor.ranks = ranks.current()
    found = state_of(run_rounds(sim, 2, evaluated=True))
    scores = evaluate.personal(sim.algorithm, sim.engine, np.arange(6), 2, False)
    return found | {f"/scores/{n}": torch.from_numpy(v) for n, v in scores.items()}


def message_of(work: Any) -> str:
    """Return the message of the error that a function raises."""
    try:
        work()
    except (RuntimeError, ConfigError) as error:
        return str(error)
    return "nothing"


def built(*overrides: str) -> Any:
    """Return the engine of a command, with its method set up."""
    cfg = checked_config(*overrides)
    arrays = build.data(cfg)
    method = build.algorithm(cfg)
    engine = build.engine(cfg, arrays, build.partition(cfg, arrays), method=method)
    method.setup(engine.federation, engine.model, engine.rows)
    return engine, method


def checked_config(*overrides: str) -> Any:
    shape = ["partition.num_clients=8", "clients_per_round=4", "hardware.device=cpu", "hardware.executor=loop"]
    return compose([*shape, "hardware=ddp", "hardware.samples=sharded", *overrides])


TARGETS = {  # whose targets are divided, too
    "masks": ["dataset.kind=segmentation", "dataset.shape=[1,16,16]", "model=unet", "model.width=2", "model.norm=none"],
    "multilabel": ["dataset.kind=multilabel", "model=logistic"],
}


def with_divided_targets(kind: str) -> dict[str, Any]:
    """Train one round on targets of several numbers."""
    method_name = "fedrod" if kind == "masks" else "fedavg"  # FedRoD reads the clients' label counts
    engine, method = built(
        f"algorithm={method_name}", "dataset=synthetic", "dataset.n=400", "partition=iid", *TARGETS[kind]
    )
    method.round(Cohort(engine, np.arange(4), 0))
    federation, scores = engine.federation, evaluate.personal(method, engine, np.arange(8), 0, False)
    totals = federation.class_totals
    return {
        "w": method.w,
        "bytes": federation.stored_bytes,
        "counts": torch.from_numpy(federation.label_counts),
        "totals": torch.zeros(0) if totals is None else torch.from_numpy(totals),
        "scores": torch.from_numpy(scores["iou" if kind == "masks" else "auc"]),
        "line": task_line(federation),
    }


def drive(folder: Path, names: list[str]) -> None:
    """Run all parts of the tests that need several processes, and save the results of each."""
    r = ranks.connect()
    found: dict[str, Any] = {}
    engine, _ = built("algorithm=fedavg", "dataset=digits")
    federation = engine.federation
    found["bytes"] = federation.stored_bytes
    other = np.flatnonzero(r.owner(np.arange(8)) != r.rank)[:1]
    sample = torch.from_numpy(federation.splits["test"][int(other[0])][:1])
    with r.undistributed():
        found["training"] = message_of(lambda: Cohort(engine, other, 0).train(engine.model.init_row()))
        found["sample"] = message_of(lambda: federation.gather(sample))
    found["refused"] = message_of(lambda: built(f"algorithm={REFUSED}", "dataset=digits"))
    found |= {kind: with_divided_targets(kind) for kind in TARGETS}
    r.by_owner = True
    found["methods"] = {name: played(name, **SHARDED) for name in names if is_able(name)}
    torch.save(found, folder / f"{r.rank}.pt")
    ranks.disconnect()


def results(tmp_path_factory: pytest.TempPathFactory, count: int, names: list[str]) -> list[dict[str, Any]]:
    """Return what each of several processes found."""

    def make(folder: Path) -> None:
        command = [sys.executable, __file__, str(folder), str(count), json.dumps(names)]
        done = subprocess.run(command, env=ENVIRONMENT, timeout=600, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    folder = once(tmp_path_factory, f"shards{count}", make)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    slow = any(item.path == request.path and item.get_closest_marker("slow") for item in request.session.items)
    return results(tmp_path_factory, 2, [*ACCEPTED, *USUAL, *(OTHERS if slow else ())])


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results(tmp_path_factory, 3, [*ACCEPTED])


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results(tmp_path_factory, 4, [])


def assert_as_one(name: str, found: list[dict[str, Any]]) -> None:
    """Assert that processes have the states and scores of one; the loss of a shared row differs by rounding."""
    if not is_able(name):
        pytest.skip(str(case(name).reason))
    expected = played(name)
    for rank in found:
        of_rank = dict(rank["methods"][name])
        close(of_rank.pop("/scores/loss"), expected["/scores/loss"], 1e-6)
        assert_same(of_rank, {n: t for n, t in expected.items() if n != "/scores/loss"})


@pytest.mark.parametrize("name", [*ACCEPTED, *USUAL, *(pytest.param(m, marks=pytest.mark.slow) for m in OTHERS)])
def test_two_processes_with_divided_samples_equal_one(name: str, two: list[dict[str, Any]]) -> None:
    assert_as_one(name, two)


@pytest.mark.slow
@pytest.mark.parametrize("name", ACCEPTED)
def test_three_processes_with_divided_samples_equal_one(name: str, three: list[dict[str, Any]]) -> None:
    assert_as_one(name, three)


@pytest.mark.slow
def test_a_process_of_four_stores_a_quarter_of_the_samples(four: list[dict[str, Any]]) -> None:
    engine, _ = built("algorithm=fedavg", "dataset=digits")
    assert engine.federation.shard is None  # one process
    assert max(rank["bytes"] for rank in four) <= 0.35 * engine.federation.stored_bytes
    assert sum(rank["bytes"] for rank in four) >= engine.federation.stored_bytes


@pytest.mark.slow
@pytest.mark.parametrize("kind", TARGETS)
def test_targets_of_several_numbers_are_divided_and_counted(kind: str, four: list[dict], two: list[dict]) -> None:
    expected = with_divided_targets(kind)
    for found in (four, two):
        assert max(rank[kind]["bytes"] for rank in found) <= (1 / len(found) + 0.1) * expected["bytes"]
        for of_rank in (rank[kind] for rank in found):
            assert of_rank["line"] == expected["line"]
            for name in ("w", "counts", "totals", "scores"):
                equal(of_rank[name], expected[name])


def test_samples_of_other_clients_are_an_error(two: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(two):
        assert found["training"] == (
            f"this process has no samples of client {1 - rank}, because hardware.samples=sharded: set "
            "hardware.samples=replicated, or compute the client in the process that has its samples"
        )
        assert found["sample"].startswith("this process does not store a sample that it was asked for, because")
        assert found["refused"].startswith(
            "hardware.samples=sharded does not work with this method: algorithm=pgfed_exact lets clients compute with "
            "each other's samples; use hardware.samples=replicated, or another algorithm"
        )


# -- many clients ----------------------------------------------------------------------------------------
MILLION = [
    *("algorithm=fedper", "model=mlp", "model.hidden=[8]", "partition=iid", "partition.num_clients=1000000"),
    *("dataset=synthetic", "dataset.n=3000000", "dataset.shape=[8]", "clients_per_round=100", "rounds=3"),
    *("eval.every=3", "hardware=ddp", "hardware.samples=sharded", "hardware.device=cpu", "hardware.executor=vmap"),
    *("tracking=disabled", "hydra.run.dir=run"),
]
PEAK = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL);"
PEAK += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"  # KiB, of the process with the most


@pytest.mark.slow
def test_two_processes_train_a_million_clients_with_heads_in_3_gb_each(tmp_path: Path) -> None:
    """All clients are evaluated after the last round."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "fedbench", *MILLION]
    command = [sys.executable, "-c", PEAK, *torchrun]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 3e9
    with (tmp_path / "run" / "clients.csv").open() as file:
        assert sum(1 for _ in file) == 1_000_001


# -- one process of three, by hand -----------------------------------------------------------------------
def divided(arrays: Arrays, on_host: bool = False) -> tuple[Federation, Federation, np.ndarray]:
    """Return a federation of six clients, and that of the process which owns clients 1 and 4, with their samples."""
    n = len(arrays.targets)
    part = Ragged.from_sizes(np.random.default_rng(0).permutation(n), np.full(6, n // 6))
    split = Split(part, Ragged.from_sizes(np.zeros(0, np.int64), np.zeros(6, np.int64)), part)
    shard = Shard.of(np.arange(6) % 3 == 1, (split.train, split.val, split.test))
    whole = Federation.build(arrays, split, CPU, on_host=on_host)
    return whole, Federation.build(arrays, split, CPU, on_host=on_host, shard=shard), np.append(part[1], part[4])


def equal_batches(whole: Federation, part: Federation, samples: np.ndarray) -> None:
    for index in (torch.from_numpy(samples), torch.from_numpy(samples[:8]).view(2, 4)):
        (x, y), (found_x, found_y) = whole.gather(index), part.gather(index)
        equal(found_y, y)
        assert all(torch.equal(a, b) for a, b in zip(leaves(found_x), leaves(x), strict=True))


def leaves(x: Any) -> list[torch.Tensor]:
    return [*x.values()] if isinstance(x, dict) else [x]


def test_other_samples_are_not_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((120, 5), np.float32))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    arrays = Arrays(mapped, np.arange(120) % 3, np.zeros(120, np.int8), 3)
    read: list[np.ndarray] = []
    into = EntryReader.into
    monkeypatch.setattr(EntryReader, "into", lambda self, out, i: (read.append(i), into(self, out, i))[1])
    whole, part, samples = divided(arrays)
    assert part.shard is not None and np.array_equal(np.concatenate(read), part.shard.samples)
    assert set(samples) <= set(part.shard.samples) and len(part.shard.samples) <= len(samples) + 7
    assert part.stored_bytes == len(part.shard.samples) * 20 + 120 * 8  # labels of all samples
    equal_batches(whole, part, samples)


@pytest.mark.parametrize("in_file", [True, False])
def test_inputs_on_the_host_are_divided_unless_they_stay_in_a_file(tmp_path: Path, in_file: bool) -> None:
    values = np.random.default_rng(0).random((120, 5), np.float32)
    np.save(tmp_path / "x.npy", values)
    inputs = np.load(tmp_path / "x.npy", mmap_mode="r") if in_file else values
    whole, part, samples = divided(Arrays(inputs, np.arange(120) % 3, np.zeros(120, np.int8), 3), on_host=True)
    assert part.shard is not None and part.on_host
    assert part.stored_bytes == 120 * 8 + (0 if in_file else len(part.shard.samples) * 20)
    equal_batches(whole, part, samples)


def test_entries_that_samples_share_are_divided() -> None:
    """Nine questions are about one image; a process stores the images of its clients' questions."""
    whole, part, samples = divided(Synthetic(kind="questions", n=540).load())
    images = {len(f.named_inputs()["image"]) for f in (part,)}
    assert images == {len(np.unique(part.shard.samples // 9))} and max(images) <= 60  # type: ignore[union-attr]
    assert len(part.named_inputs()["question"]) == len(part.shard.samples)  # type: ignore[union-attr]
    equal_batches(whole, part, samples)


if __name__ == "__main__":
    for method in json.loads(sys.argv[3]):
        case(method)  # once for all processes
    sys.exit(run_forked(int(sys.argv[2]), partial(drive, Path(sys.argv[1]), json.loads(sys.argv[3]))))
