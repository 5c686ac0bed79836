"""Processes that share a run compute what one process computes; one that fails or dies ends the run with a sentence.

The module is its own driver: `python test_ranks.py FOLDER` makes two processes on gloo, forked after the imports, that
run `drive` once for all tests which look at what it found.  The command is tested under torchrun itself.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bottlenecks import summed
from cases import METHODS, Case, assert_same, case, config, run_rounds, state_of
from conftest import ROOT
from forked import rank_pid
from tiny import CPU, all_clients, close, compose, engine, equal, mlp, once, ragged

from fedbench.app import launch, single
from fedbench.app.compose import Composer
from fedbench.core.options import ConfigError, RunError
from fedbench.engine import ranks
from fedbench.engine.executor import Executor, Plan
from fedbench.engine.ranks import Ranks
from fedbench.simulation import build, checkpoint, evaluate, simulator

SIZES = (3, 8, 1, 8, 2)
NORM, SUMMED = "fedavg, batch statistics", "fedpia, outputs that are added"
ROBUST = "fedavg, multi_krum of buckets"
ATTACKED = "fedper, mimic among compressed uploads"
OTHERS = (NORM, SUMMED, ROBUST, ATTACKED)  # than methods as conf has them
USUAL = METHODS[::4]  # whom two processes play by default: the others where slow tests are asked for
LOOP = Plan("loop", 1, 1, 1)
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(
        [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "helpers"), os.environ.get("PYTHONPATH", "")]
    ),
    "WANDB_MODE": "disabled",
}


def torchrun(*words: str, folder: Path, **how: Any) -> subprocess.Popen:
    """Return the ranks of one of two processes on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *words]
    return subprocess.Popen(
        command, env=ENVIRONMENT, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how
    )


# -- in two processes ------------------------------------------------------------------------------------
def simulation(name: str) -> Any:
    if name == NORM:
        found = Case("fedavg", ["model=resnet", "model.widths=[4]", "model.norm=batch", *case("fedavg").optimizer])
        return found.simulation("loop", **{"local.batch_size": 8})
    if name == ROBUST:
        rule = ["aggregator=multi_krum", "aggregator.pre=bucketing", "aggregator.f=0"]
        return case("fedavg").on([*case("fedavg").overrides, *rule]).simulation("loop")
    if name == ATTACKED:
        attack = ["attack=mimic", "attack.clients=[0,3]", "aggregator=median", "compression=topk"]
        return case("fedper").on([*case("fedper").overrides, *attack]).simulation("loop")
    return (summed() if name == SUMMED else case(name)).simulation("loop")


def played(name: str, together: Ranks | None = None) -> dict[str, torch.Tensor]:
    """Run two rounds and return all states, the deployed rows, and each client's scores."""
    sim = simulation(name)
    sim.engine.executor.ranks = together or Ranks()
    found = state_of(run_rounds(sim, 2, evaluated=True))
    scores = evaluate.personal(sim.algorithm, sim.engine, np.arange(6), 2, False)
    return found | {f"/scores/{n}": torch.from_numpy(v) for n, v in scores.items()}


def is_able(name: str) -> bool:
    return name in OTHERS or not case(name).reason


def results() -> dict[str, torch.Tensor]:
    """Return results of five items, with tensors of all types."""
    n = len(SIZES)
    return {
        "float": torch.arange(3.0 * n).view(n, 3) + 1,
        "bool": torch.arange(n) % 2 == 0,
        "double": torch.arange(n) / 3 + torch.ones(n, dtype=torch.float64),
        "int": torch.arange(1, 4 * n + 1).view(n, 2, 2),
        "nothing": torch.zeros(n, 0),
        "kept": torch.ones(n),
    }


def exchanged(r: Ranks) -> dict[str, Any]:
    """Each rank knows its share of the results; `kept` is changed by nobody, `int` by rank 1 alone says so."""
    shares, whole = r.assign(np.array(SIZES)), results()
    mine = torch.from_numpy(shares[r.rank])
    have = {name: torch.zeros_like(t) for name, t in whole.items()}
    for name, t in whole.items():
        have[name][mine] = t[mine]
    moved = r.exchange(shares, have, {"float", "bool", "double", "nothing"} | ({"int"} if r.rank else set()))
    lists = [torch.full((SIZES[i], 2), float(i)) if i in shares[r.rank] else torch.zeros(0) for i in range(len(SIZES))]
    r.exchange_lists(shares, lists, CPU)
    scores = r.compute_distributed(np.array(SIZES), lambda where: {"square": where.astype(np.float64) ** 2})
    few = r.compute_distributed(np.array([4]), lambda where: {"square": np.array([25.0])})
    return {"moved": moved, "have": have, "lists": lists, "scores": scores, "few": few, "shares": shares}


def refused(r: Ranks, work: Any) -> str:
    """Return the message of the error that a function raises on this rank."""
    try:
        work()
    except (RunError, ZeroDivisionError) as error:
        r.report_failure(error)
        return f"{type(error).__name__}: {error}"
    return "nothing"


def failing(r: Ranks) -> None:
    """Let rank 1 fail while rank 0 waits for its results."""
    arrays, split = ragged()
    e = engine(arrays, split, mlp(), plan="loop")
    e.executor.ranks = r
    all_clients(e).train(e.model.init_row(), step=lambda s, batch: s.descend(s.grad(batch) * (1 / (1 - r.rank))))


def taking_turns(r: Ranks, file: Path) -> str:
    def work() -> str:
        if not file.exists():
            time.sleep(0.2)
            file.write_text(f"rank {r.rank}")
        return file.read_text()

    return r.first_on_each_machine(work)


def asked() -> list[str]:
    """The methods that are played, as the process that asks for them has said."""
    return METHODS if os.environ.get("PLAY") == "all" else USUAL


def fork(folder: Path) -> int:
    """Run `drive` in two processes, and return how many failed."""
    torch.set_num_threads(1)
    for name in asked():
        case(name)  # once for both
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(2):
        if not (child := os.fork()):
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            drive(folder)
            sys.exit()
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


def drive(folder: Path) -> None:
    """Run all parts of the tests that need two processes, and save the results of each."""
    r = ranks.connect()
    assert r is ranks.current() and (r.world_size, r.local_world_size, r.local_rank) == (2, 2, r.rank)
    found: dict[str, Any] = {"exchanged": exchanged(r)}
    found["failed"] = refused(r, lambda: failing(r))
    found["apart"] = refused(r, lambda: r.synchronize("training" if r.is_first else "evaluation"))
    found["disagreed"] = refused(r, lambda: r.require_equal("partition", "abc" if r.is_first else "xyz"))
    found["bits"] = [r.synchronize("stop?", bits) for bits in (0, r.rank, 1 << r.rank)]
    found["decided"] = r.broadcast_object("plan", LOOP if r.is_first else None)
    found["turns"] = taking_turns(r, folder / "turns")
    found["methods"] = {name: played(name, r) for name in [*asked(), *OTHERS] if is_able(name)}
    torch.save(found, folder / f"{r.rank}.pt")
    ranks.disconnect()
    assert ranks.current().world_size == 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return the results of rank 0 and rank 1."""
    slow = any(item.path == request.path and item.get_closest_marker("slow") for item in request.session.items)
    play = {"PLAY": "all" if slow else "usual"}

    def make(folder: Path) -> None:
        command = [sys.executable, __file__, str(folder)]
        done = subprocess.run(command, env=ENVIRONMENT | play, timeout=300, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    folder = once(tmp_path_factory, "pair", make)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize(
    "name", [*(m if m in USUAL else pytest.param(m, marks=pytest.mark.slow) for m in METHODS), *OTHERS]
)
def test_two_processes_have_the_rows_and_scores_of_one(name: str, pair: list[dict[str, Any]]) -> None:
    """With chunks of one client, they are equal bit for bit, except for the loss of a shared row."""
    if not is_able(name):
        pytest.skip(str(case(name).reason))
    expected = played(name)
    for rank in range(2):
        found = pair[rank]["methods"][name]
        close(found.pop("/scores/loss"), expected["/scores/loss"], 1e-6)
        assert_same(found, {n: t for n, t in expected.items() if n != "/scores/loss"})


def test_exchange_sends_changed_tensors_of_all_types(pair: list[dict[str, Any]]) -> None:
    whole = results()
    shares = pair[0]["exchanged"]["shares"]
    for rank, found in enumerate(p["exchanged"] for p in pair):
        assert found["moved"] == {"float", "bool", "double", "int", "nothing"}
        for name in found["moved"]:
            equal(found["have"][name], whole[name])
        assert found["have"]["kept"].nonzero().flatten().tolist() == sorted(shares[rank].tolist())
        for i, part in enumerate(found["lists"]):
            equal(part, torch.full((SIZES[i], 2), float(i)))
        assert found["scores"]["square"].tolist() == [0, 1, 4, 9, 16] and found["few"]["square"].tolist() == [25]


def test_a_failure_on_one_rank_is_raised_on_all(pair: list[dict[str, Any]]) -> None:
    """Rank 1 raises its own error, and rank 0 raises OtherRankFailed."""
    assert pair[0]["failed"] == "OtherRankFailed: rank 1: ZeroDivisionError: division by zero"
    assert pair[1]["failed"] == "ZeroDivisionError: division by zero"
    for p in pair:
        assert (
            p["apart"] == "OtherRankFailed: the processes no longer compute the same thing: rank 0 is at 'training', "
            "rank 1 is at 'evaluation'; start all of them with the same command and the same version of fedbench"
        )
        assert p["disagreed"].startswith("RunError: rank 1 has another partition than rank 0 (xyz, abc)")


def test_values_of_one_rank_are_sent_to_all(pair: list[dict[str, Any]]) -> None:
    for p in pair:
        assert p["bits"] == [0, 1, 3] and p["decided"] == LOOP and p["turns"] == "rank 0"


# -- the command -----------------------------------------------------------------------------------------
SHORT = [
    "rounds=2",
    "model.hidden=[8]",
    "partition.num_clients=6",
    "partition.alpha=1",
    "clients_per_round=4",
    "local.epochs=1",
    "local.batch_size=64",
    "tracking=disabled",
    "hardware.executor=loop",
    "system.dropout=0.3",
    "system.slow=0.5",
]
FEW = ["fedavg", "scaffold", "pgfed", "apple", "fedrep", "fedfomo"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Run a sweep of six runs in the two processes of torchrun."""

    def make(folder: Path) -> None:
        process = torchrun(
            "-m",
            "fedbench",
            "-m",
            f"algorithm={','.join(FEW)}",
            "hardware=ddp",
            *SHORT,
            "sweep_dir=.",
            "checkpoint.every=1",
            folder=folder,
        )
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
        (folder / "said.json").write_text(json.dumps({"out": out, "error": error}))

    folder = once(tmp_path_factory, "swept", make)
    return SimpleNamespace(folder=folder, **json.loads((folder / "said.json").read_text()))


def table(path: Path) -> tuple[list[str], np.ndarray]:
    head, *lines = path.read_text().splitlines()
    return head.split(","), np.array([[float(v or "nan") for v in line.split(",")] for line in lines])


@pytest.mark.parametrize("algorithm", FEW)
def test_a_run_under_torchrun_equals_that_of_one_process(
    algorithm: str, swept: SimpleNamespace, tmp_path: Path
) -> None:
    simulator.run(compose([f"algorithm={algorithm}", "hardware.device=cpu", *SHORT]), tmp_path)
    (folder,) = swept.folder.glob(f"algorithm={algorithm},*")
    for name in ("metrics.csv", "clients.csv"):
        (head, found), (columns, expected) = table(folder / name), table(tmp_path / name)
        assert head == columns
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    mine, theirs = checkpoint.load(folder), checkpoint.load(tmp_path)
    for part in ("algorithm", "rows"):
        assert_same(tensors(mine[part]), tensors(theirs[part]))
    for name in ("steps", "samples", "bytes_down", "bytes_up"):
        assert summary(folder)["cost"][name] == summary(tmp_path)["cost"][name] > 0, name
    assert summary(folder)["config_hash"] == summary(tmp_path)["config_hash"]
    assert summary(folder)["executor"]["ranks"] == 2 and summary(tmp_path)["executor"]["ranks"] == 1


def tensors(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    return (
        {k: t for key, v in value.items() for k, t in tensors(v, f"{name}/{key}").items()}
        if isinstance(value, dict)
        else {name: value}
    )


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def test_only_rank_0_writes_and_logs(swept: SimpleNamespace) -> None:
    cells = [p for p in swept.folder.iterdir() if p.is_dir()]
    assert len(cells) == len(FEW)
    assert swept.out.count("mean personalized accuracy") == len(FEW)
    assert all("2 processes share the clients" in (folder / "run.log").read_text() for folder in cells)
    assert "6 runs: 6 finished" in swept.out and "Traceback" not in swept.error
    for folder in cells:
        assert summary(folder)["command"].startswith("torchrun --nproc-per-node=2 -m fedbench -m algorithm=")
        assert len(table(folder / "costs.csv")[1]) == 2
        assert not list(folder.glob("*.partial")) and not list(folder.glob("*.part"))


def questioned(*words: str) -> None:
    full = Composer().compose(list(words))
    single.checked(full, full.hydra)
    single.check_processes(full, list(words))


def test_ddp_needs_torchrun_and_torchrun_needs_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    command = "torchrun --nproc-per-node=<number> -m fedbench hardware=ddp rounds=3"
    with pytest.raises(ConfigError, match=re.escape(command)):
        questioned("hardware=ddp", "rounds=3")
    with pytest.raises(ConfigError, match=r"torchrun --nproc"):
        launch.run_command(["-m", "hardware=auto,ddp"])
    questioned("rounds=3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    questioned("hardware=ddp")
    with pytest.raises(ConfigError, match=r"torchrun started 2 processes: add hardware=ddp"):
        questioned("rounds=3")
    with pytest.raises(ConfigError, match=r"remove hydra/launcher"):
        launch.run_command(["-m", "hardware=ddp", "seed=0,1", "hydra/launcher=joblib"])
    monkeypatch.setenv("WORLD_SIZE", "1")
    questioned("rounds=3")


def test_the_hash_does_not_depend_on_the_number_of_processes() -> None:
    """A run can be resumed with another number of processes."""
    from fedbench.config.check import check
    from fedbench.core.settings import config_hash

    assert config_hash(check(compose(["hardware=ddp"]))) == config_hash(check(compose(["hardware=auto"])))


# -- alone -----------------------------------------------------------------------------------------------
def two(rank: int = 0) -> Ranks:
    return Ranks(rank, 2, rank, 2)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("work", [(5, 9, 0, 9, 2, 7), (100, 1, 1, 1, 1, 1), (3,), ()])
def test_assignments_cover_each_client_once_and_are_balanced(size: int, work: tuple[int, ...]) -> None:
    """Most work first within each share; nobody has more than the best share and one client's work on top."""
    shares = Ranks(0, size).assign(np.array(work, np.int64))
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(work))) and len(shares) == size
    loads = [sum(work[i] for i in share) for share in shares]
    for share in shares:
        assert [work[i] for i in share] == sorted((work[i] for i in share), reverse=True)
    assert max(loads) <= max(sum(work) / size + max(work, default=0), max(work, default=0))
    if work == (100, 1, 1, 1, 1, 1) and size == 2:
        assert sorted(loads) == [5, 100]
    if work == (5, 9, 0, 9, 2, 7) and size == 2:
        assert sorted(loads) == [16, 16]


def test_an_undistributed_rank_computes_everything() -> None:
    r, work = two(1), np.array([1, 5, 3])
    with r.undistributed():
        assert not r.is_distributed and r.assign(work)[1].tolist() == [1, 2, 0]
        assert r.synchronize("anything", 5) == 5 and r.gather("anything", "x") == ["x"]
        assert r.compute_distributed(work, lambda where: {"x": where})["x"].tolist() == [0, 1, 2]
    assert r.is_distributed and not Ranks().is_distributed


def test_rank_0_selects_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 times the plans without the others, and sends its choice to rank 1."""
    told = []
    monkeypatch.setattr(Ranks, "gather", lambda self, what, value: told.append(value) or [value or LOOP] * 2)
    arrays, split = ragged()
    for rank in range(2):
        e = replace(engine(arrays, split, mlp()), executor=Executor(LOOP, CPU, two(rank)))
        e = build.choose_executor(e, [LOOP, Plan("threads", 1, 2, 1)])
        assert e.executor.ranks.world_size == 2 and e.executor.plan == (told[0] if rank == 0 else LOOP)
    assert isinstance(told[0], Plan) and told[1] is None


def test_different_states_of_processes_are_logged_once(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """Once; equal ones are not, even if a number is none."""
    sim = run_rounds(simulation("fedavg"), 1)
    sim.engine.executor.ranks = two()
    for other, said in ((0.0, 0), (1e-6, 1), (1e-6, 1)):
        monkeypatch.setattr(Ranks, "gather", lambda self, what, sums, more=other: [sums, [s + more for s in sums]])
        simulator.check_ranks_agree(sim)
        assert caplog.text.count("the server's state differs between processes") == said
    sim.ranks_differ, sim.algorithm.w = False, sim.algorithm.w * float("nan")
    simulator.check_ranks_agree(sim)
    assert caplog.text.count("differs between") == 1


def devices(monkeypatch: pytest.MonkeyPatch, count: int, local: int, local_size: int) -> None:
    monkeypatch.setattr(ranks, "_ranks", Ranks(local, local_size, local, local_size))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_each_process_of_a_machine_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch, 4, 3, 4)
    assert build.device_of(config("fedavg", "hardware=ddp")) == torch.device("cuda", 3)
    assert build.device_of(config("fedavg", "hardware=ddp", "hardware.device=cuda:0")) == torch.device("cuda", 0)
    assert build.device_of(config("fedavg", "hardware=ddp", "hardware.device=cpu")) == CPU
    devices(monkeypatch, 2, 3, 4)
    with pytest.raises(ConfigError, match=r"4 processes on a machine with 2 CUDA devices: use --nproc-per-node=2"):
        build.device_of(config("fedavg", "hardware=ddp"))
    devices(monkeypatch, 0, 3, 4)
    assert build.device_of(config("fedavg", "hardware=ddp")) == CPU


def test_processes_of_a_machine_divide_its_cores_and_memory() -> None:
    from fedbench.engine.executor import candidate_plans, cores

    assert candidate_plans("threads", None, None, CPU, 5, 2) == [Plan("threads", 1, max(1, cores() // 2), 1)]
    assert candidate_plans("threads", None, None, CPU, 5, 1000) == [Plan("threads", 1, 1, 1)]
    one, four = build.memory_limits(CPU), build.memory_limits(CPU, 4)
    assert one[0] // 4 == four[0] and four[1] == 0
    assert four[2] == pytest.approx(one[2] / 4, rel=0.1)


# -- stopped ---------------------------------------------------------------------------------------------
LONG = [
    "-m",
    "fedbench",
    "hardware=ddp",
    "hydra.run.dir=run",
    *SHORT,
    "rounds=400",
    "checkpoint.every=1",
    "eval.every=100",
]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen, Path]]:
    """Start a run of 400 rounds under torchrun, and wait for its first checkpoints."""
    process = torchrun(*LONG, folder=tmp_path)
    deadline = time.monotonic() + 300
    while not (tmp_path / "run" / checkpoint.PREVIOUS).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    yield process, tmp_path / "run"
    process.kill()
    process.wait()


def goes_on(folder: Path, tmp_path: Path) -> None:
    """In one process, to the end of a run that was never stopped."""
    saved = checkpoint.load(folder)
    assert 2 <= saved["round"] < 400
    cfg = compose([*SHORT, "rounds=400", "checkpoint.every=0", "eval.every=100", "hardware.device=cpu"])
    (tmp_path / "whole").mkdir()
    assert simulator.run(cfg, folder, resume=True)["rounds_done"] == 400
    simulator.run(cfg, tmp_path / "whole")
    assert_same(
        tensors(checkpoint.load(folder)["algorithm"]), tensors(checkpoint.load(tmp_path / "whole")["algorithm"])
    )
    np.testing.assert_allclose(*(table(f / "metrics.csv")[1] for f in (folder, tmp_path / "whole")), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_run_with_an_error(rank: int, running: tuple, tmp_path: Path) -> None:
    """The other process raises an error with the command to resume.  The checkpoint is intact."""
    process, folder = running
    os.kill(rank_pid(process, rank), signal.SIGKILL)
    error = process.communicate(timeout=300)[1]
    assert process.returncode != 0
    said = next(line for line in error.splitlines() if "another process of this run has ended" in line)
    assert f"saved; resume it with: torchrun --nproc-per-node=2 -m fedbench resume={folder}" in said
    assert said.startswith("fedbench: " if rank else "rank 1: ")
    assert json.loads((folder / "status.json").read_text())["status"] == ("failed" if rank else "running")
    goes_on(folder, tmp_path)


@pytest.mark.slow
def test_a_signal_to_torchrun_saves_a_checkpoint_and_the_run_can_be_resumed(running: tuple, tmp_path: Path) -> None:
    process, folder = running
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=300)
    command = re.search(r"it is saved; resume it with: torchrun --nproc-per-node=2 (-m fedbench .*)", error)
    assert command and out.count("stopping after this round") == 1
    assert json.loads((folder / "status.json").read_text())["status"] == "interrupted"
    before = checkpoint.load(folder)["round"]
    assert before < 400
    again = torchrun(*shlex.split(command[1]), folder=tmp_path)
    assert again.wait(300) == 0
    assert json.loads((folder / "summary.json").read_text())["executor"]["ranks"] == 2
    cfg = compose([*SHORT, "rounds=400", "checkpoint.every=0", "eval.every=100", "hardware.device=cpu"])
    (tmp_path / "whole").mkdir()
    simulator.run(cfg, tmp_path / "whole")
    assert_same(
        tensors(checkpoint.load(folder)["algorithm"]), tensors(checkpoint.load(tmp_path / "whole")["algorithm"])
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("device", "needed"), [("cuda:0", 1), ("auto", 2)])
def test_gpus(device: str, needed: int, tmp_path: Path) -> None:
    """Two processes on one GPU exchange through the host, on two through NCCL; float32 tolerance, and the scores."""
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} CUDA device(s)")
    process = torchrun(
        "-m",
        "fedbench",
        "hardware=ddp",
        f"hardware.device={device}",
        *SHORT,
        "algorithm=pgfed",
        "hydra.run.dir=run",
        folder=tmp_path,
    )
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 0, error
    simulator.run(compose([*SHORT, "algorithm=pgfed", "hardware.device=cuda:0"]), tmp_path)
    (head, found), (columns, expected) = (table(folder / "metrics.csv") for folder in (tmp_path / "run", tmp_path))
    assert head == columns
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    sys.exit(fork(Path(sys.argv[1])))
