"""Processes that store the states of their own clients compute what one process with all states computes.

The module is its own driver: `python test_sharded_rows.py FOLDER COUNT WORK NAMES` forks processes that run `drive`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from cases import METHODS, assert_same, case, run_rounds, state_of, tensors
from conftest import ROOT
from forked import rank_pid, run_forked
from tiny import CPU, compose, equal, once

from fedbench.core.rows import Rows
from fedbench.core.settings import config_hash
from fedbench.engine import ranks, sharded_rows
from fedbench.engine.ranks import Ranks
from fedbench.engine.sharded_rows import SMALL, ShardedRows, ShardedRowStore
from fedbench.simulation import checkpoint, evaluate, simulator
from fedbench.testing import _federation

SHARDED = ["hardware=ddp", "hardware.rows=sharded"]
SETTING = [
    *("dataset=digits", "dataset.subset=0.3", "partition.num_clients=7", "clients_per_round=4", "model.hidden=[8]"),
    *("rounds=3", "local.epochs=1", "tracking=disabled", "hardware.device=cpu", "hardware.executor=loop"),
    *("hardware.threads=1", "checkpoint.every=1"),
]
# commands of runs that read and write states of clients in every way
USUAL = {
    "fedper": ["algorithm=fedper", "compression=topk", "compression.share=0.1", "system.dropout=0.3"],
    "pgfed": ["algorithm=pgfed", "new_clients.count=2"],
    "early": ["algorithm=ditto", "stop.patience=1", "dataset.val_fraction=0.3", "optimizer.lr=0.3", "rounds=6"],
    "apple": ["algorithm=apple"],
    "central": ["algorithm=fedper", "privacy=central", "privacy.noise_multiplier=1"],
}
OTHERS = {
    "fedavg": ["algorithm=fedavg", "aggregator=median", "system.dropout=0.3"],
    "fedrep": ["algorithm=fedrep", "optimizer.momentum=0.5", "optimizer.reset=never"],
    "fedfomo": ["algorithm=fedfomo", "compression=topk", "compression.share=0.1"],
    "scaffold": ["algorithm=scaffold", "privacy=local", "privacy.epsilon=8", "privacy.calibration=analytic"],
    "fedala": ["algorithm=fedala", "finetune.epochs=1"],
    "pfednet": ["algorithm=pfednet"],
    "pfedme": ["algorithm=pfedme", "system.slow=0.5"],
    "adam": ["algorithm=fedavg", "optimizer=adam", "optimizer.reset=never"],  # counts of steps
    "dithered": ["algorithm=fedavg", "compression=chain", "compression.direction=both"],
}
COMMANDS = USUAL | OTHERS
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]),
    "WANDB_MODE": "disabled",
}
TOLERANCE = 5e-6  # relative to 1 + the value: sums of rows are reordered, in each of up to six rounds
ROWS = 400  # rows of 64 KiB for the test of memory


# -- in several processes --------------------------------------------------------------------------------
def words_of(name: str, *more: str) -> list[str]:
    """Return the overrides of a command.  The command line refuses a key that is given twice, so the last one stays."""
    return [*{word.split("=")[0]: word for word in [*SETTING, *COMMANDS[name], *more]}.values()]


def ran(name: str, folder: Path, *words: str, resume: bool = False) -> None:
    """Run or resume a command in this process, as one of the processes of the run."""
    folder.mkdir(parents=True, exist_ok=True)
    simulator.run(compose(words_of(name, *words)), folder, resume=resume)


def played(name: str) -> dict[str, torch.Tensor]:
    """Run two rounds of a method and return all states, the deployed rows, and each client's scores."""
    sim = case(name).simulation("loop")
    sim.engine.executor.ranks = ranks.current()
    found = state_of(run_rounds(sim, 2, evaluated=True))
    scores = evaluate.personal(sim.algorithm, sim.engine, np.arange(6), 2, False)
    return found | {f"/scores/{n}": torch.from_numpy(v) for n, v in scores.items()}


def anonymous_memory() -> int:
    """Return the memory of this process in bytes, without mapped files."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def stored(r: Ranks, folder: Path) -> dict[str, Any]:
    """Return the bytes of the states of clients in this process, and errors of wrong accesses."""
    found: dict[str, Any] = {}
    for method in ("fedper", "pgfed"):
        all_clients = ["partition=iid", "partition.num_clients=40", "clients_per_round=40", "rounds=2"]
        cfg = compose([*SETTING, *all_clients, *SHARDED, f"algorithm={method}"])
        sim = simulator.prepare(cfg, folder, None)
        for _ in range(2):
            simulator.run_round(sim, [])
        found[method] = sum(rows.store.nbytes for rows in sim.engine.rows.all.values())
    before, rows = anonymous_memory(), matrix(r, ROWS, torch.zeros(1 << 14))
    for start in range(0, ROWS, 10):
        ids = np.arange(start, start + 10)
        rows[ids] = torch.from_numpy(ids).float()[:, None].expand(10, 1 << 14)
    found["memory"] = anonymous_memory() - before
    found["read"] = rows[np.array([3, 1, 399])][:, 0]
    if r.world_size > 1:
        with r.undistributed(), pytest.raises(RuntimeError) as error:
            rows[np.array([(r.rank + 1) % r.world_size])]
        found["error"] = str(error.value)
    return found


def matrix(r: Ranks, count: int, default: torch.Tensor) -> Rows:
    if r.world_size == 1:
        return Rows("w", count, default, CPU)
    return ShardedRows(r, "w", count, default, CPU, "device", sharded_rows.count_owned(r, count))


def drive(folder: Path, work: str, names: list[str]) -> None:
    """Do the work of the tests that need several processes: "commands", "methods", "stored" or "resume"."""
    r = ranks.connect()
    if work == "commands":
        sharded_rows.BLOCK = 1 << 10  # small, so that checkpoints are gathered in several blocks, in files
        for name in names:
            ran(name, folder / name, *SHARDED)
    elif work == "methods":
        r.by_owner = True
        _federation.RowStore = lambda n, device, **limits: ShardedRowStore(  # type: ignore[misc]
            r, n, device, *limits.values(), most=n
        )
        found = {name: played(name) for name in names if not case(name).reason}
        torch.save(found, folder / f"{r.rank}.pt")
    elif work == "resume":
        for name in names:
            ran(name, folder / name, *(SHARDED if r.world_size > 1 else []), resume=True)
    else:
        torch.save(stored(r, folder), folder / f"{r.rank}.pt")
    ranks.disconnect()


def forked(folder: Path, count: int, work: str, names: list[str]) -> None:
    """Run `drive` in a number of processes."""
    command = [sys.executable, __file__, str(folder), str(count), work, json.dumps(names)]
    done = subprocess.run(command, env=ENVIRONMENT, timeout=900, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def results(factory: pytest.TempPathFactory, count: int, work: str, names: list[str]) -> list[dict[str, Any]]:
    folder = once(factory, f"rows-{work}{count}", lambda folder: forked(folder, count, work, names))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


# -- runs ------------------------------------------------------------------------------------------------
def assert_equal_runs(a: Path, b: Path) -> None:
    """Assert that two runs have the same tables and states, up to rounding: processes add up their sums of rows."""
    for table in ("metrics.csv", "clients.csv"):
        pd.testing.assert_frame_equal(pd.read_csv(a / table), pd.read_csv(b / table), rtol=TOLERANCE, atol=TOLERANCE)
    saved = [checkpoint.load(folder) for folder in (a, b)]
    parts = [{name: state[name] for name in ("algorithm", "rows", "compression")} for state in saved]
    assert_close(tensors(parts[0]), tensors(parts[1]))
    assert [*parts[0]["rows"]] == [*parts[1]["rows"]]
    for state in saved:  # the same order of rows
        for name, rows in state["rows"].items():
            equal(rows["ids"], saved[0]["rows"][name]["ids"])
    if "early_stopping" in saved[0]:
        best = [state["early_stopping"]["state"]["rows"] for state in saved]
        assert_close(tensors(best[0]), tensors(best[1]))
    if (a / "matrices.npz").exists():
        first, second = (np.load(folder / "matrices.npz") for folder in (a, b))
        assert_close(*({name: torch.from_numpy(found[name]) for name in found.files} for found in (first, second)))
    if (a / "new_clients.csv").exists():
        first, second = (pd.read_csv(folder / "new_clients.csv") for folder in (a, b))
        pd.testing.assert_frame_equal(first, second, rtol=TOLERANCE, atol=TOLERANCE)


def assert_close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Assert that tensors by name are equal up to TOLERANCE, and that integers are equal."""
    assert first.keys() == second.keys()
    for name, values in first.items():
        torch.testing.assert_close(second[name], values, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True, msg=name)


def assert_as_one(factory: pytest.TempPathFactory, name: str, count: int, names: list[str]) -> None:
    folder = once(factory, f"rows-commands{count}", lambda folder: forked(folder, count, "commands", names))
    one = once(factory, f"rows-one-{name}", lambda folder: ran(name, folder / name))
    assert_equal_runs(one / name, folder / name)


def is_slow(request: pytest.FixtureRequest) -> bool:
    return any(item.path == request.path and item.get_closest_marker("slow") for item in request.session.items)


@pytest.mark.parametrize("name", [*USUAL, *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)])
def test_two_processes_with_divided_states_equal_one(
    name: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> None:
    assert_as_one(tmp_path_factory, name, 2, [*(COMMANDS if is_slow(request) else USUAL)])


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_three_processes_with_divided_states_equal_one(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert_as_one(tmp_path_factory, name, 3, [*COMMANDS])


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_the_states_of_one_process(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    if case(name).reason:
        pytest.skip(str(case(name).reason))
    expected = played(name)
    first, second = (rank[name] for rank in results(tmp_path_factory, 2, "methods", METHODS))
    assert_same(second, first)
    assert_close(expected, first)


@pytest.mark.slow
def test_a_process_of_four_stores_a_quarter_of_the_states(tmp_path_factory: pytest.TempPathFactory) -> None:
    (one,), four = results(tmp_path_factory, 1, "stored", []), results(tmp_path_factory, 4, "stored", [])
    assert one["memory"] > 0.95 * ROWS * (1 << 16)
    for rank, found in enumerate(four):
        for name in ("fedper", "pgfed", "memory"):
            assert found[name] <= 0.35 * one[name], name
        assert found["read"].tolist() == [3, 1, 399]
        assert found["error"] == (
            f"this process does not store the state 'w' of client {(rank + 1) % 4}, because hardware.rows=sharded: "
            "set hardware.rows=replicated, or read it outside of Ranks.undistributed"
        )


@pytest.mark.slow
def test_checkpoints_resume_with_other_numbers_of_processes(tmp_path: Path) -> None:
    """One, two and three processes each continue the checkpoint that another number of processes left."""
    names = ["fedper", "early", "apple"]
    for name in names:
        ran(name, tmp_path / "whole" / name)
    for before, after in ((1, 2), (2, 3), (3, 1), (3, 2)):
        folder = tmp_path / f"{before}to{after}"
        for name in names:
            begin(name, folder / name, before)
        forked(folder, after, "resume", names)
        for name in names:
            assert_equal_runs(tmp_path / "whole" / name, folder / name)


def begin(name: str, folder: Path, count: int) -> None:
    """Run the first round of a command by torchrun or in one process."""
    words = words_of(name, "checkpoint.pause_after=1", f"hydra.run.dir={folder}")
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={count}"] if count > 1 else []
    words += SHARDED if count > 1 else []
    command = [sys.executable, *launch, "-m", "fedbench", *words]
    done = subprocess.run(command, env=ENVIRONMENT, timeout=600, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_with_a_killed_process_ends_as_if_it_were_not(tmp_path: Path) -> None:
    """Rank 1 is killed in a round.  The run is resumed in two processes, and a copy of its folder in three."""
    words = words_of("fedper", "rounds=300", "eval.every=100", *SHARDED)

    def torchrun(count: int, *more: str) -> subprocess.Popen:
        launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", "-m", "fedbench"]
        return subprocess.Popen(
            [*launch, *more], env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    folder, copy = tmp_path / "run", tmp_path / "copy"
    process = torchrun(2, *words, f"hydra.run.dir={folder}")
    deadline = time.monotonic() + 300
    while not (folder / checkpoint.PREVIOUS).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(rank_pid(process, 1), signal.SIGKILL)
    error = process.communicate(timeout=300)[1]  # rank 0 misses rank 1, or torchrun stops it before that
    assert process.returncode != 0, error
    assert 2 <= checkpoint.load(folder)["round"] < 300
    shutil.copytree(folder, copy)
    for count, resumed in ((2, folder), (3, copy)):
        process = torchrun(count, f"resume={resumed}")
        out, error = process.communicate(timeout=600)
        assert process.returncode == 0, out + error
        assert "resuming after round" in out
    ran("fedper", tmp_path / "whole", "rounds=300", "eval.every=100")
    assert_equal_runs(tmp_path / "whole", folder)
    assert_equal_runs(tmp_path / "whole", copy)


# -- one process of two, by hand -------------------------------------------------------------------------
def test_the_plan_says_what_a_process_stores_and_what_a_read_exchanges() -> None:
    store = ShardedRowStore(Ranks(1, 2), 7, CPU, 1 << 30, 0, most=6)
    store("w", torch.zeros(1 << 18))
    store("count", torch.zeros(SMALL // 4))
    store("server", torch.zeros(1 << 18), count=1)
    assert store.plan() == [
        "w: 3 of 7 x 262,144 numbers, 3.0 MiB at most, device of each process; a gather of all rows exchanges 6.0 MiB",
        "count: 6 of 7 x 4 numbers, 0.0 MiB at most, device",
        "server: 1 x 262,144 numbers, 1.0 MiB at most, device",
    ]
    assert [type(rows) for rows in store.all.values()] == [ShardedRows, Rows, Rows]


def test_rows_of_other_processes_take_no_memory_but_count_as_written() -> None:
    rows = matrix(Ranks(1, 2), 7, torch.zeros(3))
    ids = np.array([4, 1, 6, 3])
    rows[ids] = torch.arange(12.0).view(4, 3)
    assert rows.used == 2 and len(rows.store) == 3
    assert rows.has(np.arange(7)).tolist() == [False, True, False, True, True, False, True]
    assert rows.touched().tolist() == [1, 3, 4, 6]
    state = rows.state_dict()
    equal(state["written"], torch.from_numpy(ids))
    equal(state["ids"], torch.tensor([1, 3]))
    equal(state["rows"], torch.tensor([[3.0, 4, 5], [9, 10, 11]]))
    restored = matrix(Ranks(1, 2), 7, torch.zeros(3))
    restored.load_state_dict({"ids": torch.from_numpy(ids), "rows": torch.arange(12.0).view(4, 3)})  # a checkpoint
    for name, tensor in restored.state_dict().items():
        equal(tensor, state[name])


def test_a_full_disk_is_an_error_before_the_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_rows.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1))
    state = {"w": {"ids": torch.zeros(0, dtype=torch.int64), "written": torch.arange(0), "rows": torch.zeros(0, 3)}}
    assert sharded_rows.gathered(state, Ranks(), tmp_path)["w"]["rows"].shape == (0, 3)
    monkeypatch.setattr(sharded_rows, "BLOCK", 8)
    state["w"]["written"] = torch.arange(2)
    with pytest.raises(OSError, match=r"rows .w. of all processes take 0\.0 GiB"):
        sharded_rows.gathered(state, Ranks(), tmp_path)


def test_the_division_changes_no_result_so_no_hash() -> None:
    assert config_hash(compose(SHARDED)) == config_hash(compose(["hardware=ddp"]))


if __name__ == "__main__":
    folder, count, work, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    if work == "methods":
        for method in names:
            case(method)  # once for all processes
    sys.exit(run_forked(count, partial(drive, folder, work, names)))
