"""A tenth of the campaign: damaged folders, pairs of processes, kills.  FEDBENCH_CAMPAIGN=10 runs all of it."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT

from fedbench.app.compose import compose
from fedbench.commands import main
from fedbench.simulation import build, simulator

SHARE = int(os.environ.get("FEDBENCH_CAMPAIGN", "1"))
OPTIONS = [
    "model=logistic",
    "partition.num_clients=6",
    "rounds=8",
    "local.epochs=1",
    "tracking=disabled",
    "hardware.device=cpu",
    "hardware.executor=loop",
    "checkpoint.every=1",
]
TABLES = ("metrics.csv", "clients.csv")
METHODS = ("pgfed", "fedavg")


def words(data: Path, method: str, folder: Path) -> list[str]:
    return [*OPTIONS, f"algorithm={method}", "dataset=npz", f"dataset.path={data}", f"data_dir={folder}/data"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data.npz, and of each method a run that finished, one that was stopped after round 5, and one of another seed."""
    folder = tmp_path_factory.mktemp("made")
    arrays = build.load(compose(["dataset=digits"]))
    np.savez(folder / "data.npz", X=arrays.inputs, y=arrays.targets)
    real = simulator.run_round

    def play(sim: simulator.Simulation, *how: Any) -> Any:
        if sim.done == 5:
            raise KeyboardInterrupt
        return real(sim, *how)

    for method in METHODS:
        command = words(folder / "data.npz", method, folder)
        assert main([*command, f"hydra.run.dir={folder}/{method}-finished"]) == 0
        assert main([*command, "seed=1", f"hydra.run.dir={folder}/{method}-foreign"]) == 0
        simulator.run_round = play
        try:
            assert main([*command, f"hydra.run.dir={folder}/{method}-stopped"]) == 130
        finally:
            simulator.run_round = real
    return folder


# -- damages ---------------------------------------------------------------------------------------------
def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def zero(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start, size = draw.randrange(len(data) or 1), draw.choice((1, 16, 512))
    data[start : start + size] = bytes(len(data[start : start + size]))
    path.write_bytes(data)


def cut(path: Path, draw: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: draw.randrange(len(data) or 1)])


def remove(path: Path, draw: random.Random) -> None:
    path.unlink()


def swap(path: Path, draw: random.Random) -> None:
    """The same file of a run with another seed."""
    folder = next(p for p in (path.parent, *path.parents) if (p / ".from").is_file())
    other = Path((folder / ".from").read_text()) / path.relative_to(folder)
    if other.is_file():
        path.write_bytes(other.read_bytes())


def digit(path: Path, draw: random.Random) -> None:
    """Another digit somewhere in a text."""
    text = path.read_bytes()
    places = [m.start() for m in re.finditer(rb"\d", text)]
    if places:
        place = draw.choice(places)
        path.write_bytes(text[:place] + b"%d" % ((text[place] - 48 + draw.randrange(1, 10)) % 10) + text[place + 1 :])


def tensor(path: Path, draw: random.Random) -> None:
    """Another number in a tensor, the file itself being a sound one."""
    state = torch.load(path, weights_only=True)
    found = [*state["algorithm"].values(), *(rows["rows"] for rows in state["rows"].values())]
    flat = draw.choice([t for t in found if t.numel()]).view(-1)
    flat[draw.randrange(len(flat))] += 1
    torch.save(state, path)


def count(path: Path, draw: random.Random) -> None:
    """Another number of rounds, foreign clients, or no method in a checkpoint."""
    state = torch.load(path, weights_only=True)
    draw.choice(
        [
            lambda: state.update(round=draw.choice([99, -3, 0, 2])),
            lambda: state.update(algorithm={}),
            lambda: state["rows"].clear(),
            lambda: state.update(record="{}"),
            lambda: [rows["ids"].add_(6) for rows in state["rows"].values()],
        ]
    )()
    torch.save(state, path)


def option(path: Path, draw: random.Random) -> None:
    """Another value of an option that changes results."""
    values = yaml.safe_load(path.read_text())
    group, key, value = draw.choice(
        [
            ("optimizer", "lr", 0.5),
            ("local", "batch_size", 7),
            ("partition", "alpha", 9.0),
            ("partition", "seed", 4),
            (None, "seed", 3),
            (None, "sample_rate", 0.9),
            ("model", "bias", False),
            ("dataset", "test_fraction", 0.5),
        ]
    )
    (values[group] if group else values)[key] = value
    path.write_text(yaml.safe_dump(values))


TEXTS = (
    "metrics.csv",
    "clients.csv",
    "costs.csv",
    "summary.json",
    "partition.json",
    "config.yaml",
    "status.json",
    ".hydra/overrides.yaml",
)
BINARIES = ("checkpoint.pt", "checkpoint.prev.pt", "partition.npz", "matrices.npz")
KINDS: list[tuple[Callable[[Path, random.Random], None], tuple[str, ...]]] = [
    *((kind, TEXTS + BINARIES) for kind in (flip, zero, cut, remove, swap)),
    (digit, TEXTS),
    (flip, BINARIES[:2]),
    (zero, BINARIES[:2]),
    (tensor, BINARIES[:1]),
    (count, BINARIES[:1]),
    (option, TEXTS[5:6]),
]


def change(data: Path, draw: random.Random) -> None:
    """Another value or label among the data."""
    with np.load(data) as file:
        arrays = dict(file)
    values = arrays[draw.choice(("X", "y"))].reshape(-1)
    place = draw.randrange(len(values))
    values[place] = (values[place] + 1) % 10
    np.savez(data, **arrays)


@contextmanager
def damaged(folder: Path, data: Path, draw: random.Random) -> Iterator[str]:
    """One damage, or two; which.  The data are put back afterwards."""
    good, said = data.read_bytes(), []
    for _ in range(draw.choice((1, 1, 1, 2))):
        kind, names = draw.choice(KINDS)
        if draw.random() < 0.1:
            change(data, draw)
            said.append("changed data")
        elif (path := folder / draw.choice(names)).is_file():
            with suppress(RuntimeError, KeyError, ValueError):  # it was damaged before
                kind(path, draw)
            said.append(f"{kind.__name__} {path.name}")
    try:
        yield ", ".join(said)
    finally:
        data.write_bytes(good)


def results(folder: Path) -> list[Any]:
    """What a run found."""
    summary = json.loads((folder / "summary.json").read_text())
    return [
        *((folder / name).read_bytes() for name in TABLES),
        *(summary[name] for name in ("status", "rounds_done", "last", "best", "partition_hash", "config_hash")),
    ]


@pytest.mark.slow
def test_damaged_folders(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused in a sentence, or the results of the run that nothing happened to; nothing else, in one process."""
    tally: Counter[str] = Counter()
    for number in range(30 * SHARE):
        draw = random.Random(number)
        method, state = draw.choice(METHODS), draw.choice(("finished", "stopped"))
        folder = tmp_path / f"{number}"
        shutil.copytree(made / f"{method}-{state}", folder)
        (folder / ".from").write_text(str(made / f"{method}-foreign"))
        command = words(made / "data.npz", method, made)
        again = [f"resume={folder}"] if draw.random() < 0.7 else [*command, f"hydra.run.dir={folder}"]
        with damaged(folder, made / "data.npz", draw) as said:
            capsys.readouterr()
            status = main(again)
            out, error = capsys.readouterr()
        where = f"{number}: {method} {state}, {said}, {again[0]}: {status}\n{out}\n{error}"
        assert "Traceback" not in out + error, where
        lines = [line for line in error.splitlines() if line.startswith("fedbench: ")]
        if "changed data" in said and "round 1/8" in out:  # a new run, on the data that there are
            assert status == 0 and again[0] != f"resume={folder}", where
        elif status == 0:
            assert results(folder) == results(made / f"{method}-finished"), where
        else:
            assert lines and lines == error.splitlines() and len(lines) <= 2, where
            assert "kaput" not in error and not re.search(r"\w+Error: ", error), where
        noticed = "in silence" if status == 0 and not lines and "trying the previous one" not in out + error else "said"
        tally[f"{'refused' if status else 'recovered'}, {noticed}"] += 1
        shutil.rmtree(folder)
    print("damages:", dict(tally))


# -- processes -------------------------------------------------------------------------------------------
DRIVER = """
import json, os, random, signal, sys, time
import torch
torch.set_num_threads(1)
import numpy, fedbench.app.launch, fedbench.simulation.simulator, fedbench.report         # before any fork
from fedbench.commands import main

def child(words, output, fatal=None):
    '''main(words) in a process of its own; fatal: the number of the event of a file in its folder at which it is
    killed.'''
    if pid := os.fork():
        return pid
    with open(output, "wb", 0) as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    seen, folder = [0], words[-1].partition("=")[2]
    def heard(event, arguments):
        if event in ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir") and folder in str(arguments[0]):
            seen[0] += 1
            if seen[0] == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
    if fatal is not None:
        sys.addaudithook(heard)
    status = main(words)
    sys.stdout.flush()
    if fatal == 0:
        print("events", seen[0], flush=True)
    os._exit(status)

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

for line in sys.stdin:
    job = json.loads(line)
    began = time.monotonic()
    pids = [child(words, output, fatal) for words, output, fatal in job["children"]]
    if job.get("seconds") is not None:
        time.sleep(job["seconds"])
        os.kill(pids[0], signal.SIGKILL)
    codes = [ended(pid) for pid in pids]
    print(json.dumps([codes, time.monotonic() - began]), flush=True)
"""


class Driver:
    """A warm process that forks those of the campaign."""

    def __init__(self, folder: Path):
        self.folder, self.number = folder, 0
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=folder,
        )

    def __call__(
        self, *commands: list[str], fatal: int | None = None, seconds: float | None = None
    ) -> tuple[list[int], list[str], float]:
        """Exit statuses, outputs and seconds of commands that begin at once; the first is killed, if at all."""
        self.number += 1
        outputs = [self.folder / f"output-{self.number}-{i}" for i in range(len(commands))]
        children = [[words, str(path), fatal] for words, path in zip(commands, outputs)]
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"children": children, "seconds": seconds}) + "\n")
        self.process.stdin.flush()
        codes, took = json.loads(self.process.stdout.readline())
        return codes, [path.read_text() for path in outputs], took


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path)
    yield driver
    assert driver.process.stdin is not None
    driver.process.stdin.close()
    assert driver.process.wait(60) == 0


def same(folder: Path, other: Path) -> bool:
    return all((folder / name).read_bytes() == (other / name).read_bytes() for name in TABLES)


@pytest.mark.slow
def test_pairs_of_processes(made: Path, tmp_path: Path, driver: Driver) -> None:
    """On one folder or one sweep: no row is lost, and who comes second says so."""
    tally: Counter[str] = Counter()
    busy = re.compile(r"^fedbench: \S+ is in use by process \d+ on \S+; only one process .*$", re.M)
    for number in range(4 * SHARE):
        folder, method = tmp_path / f"pair-{number}", METHODS[number // 4 % 2]
        command = words(made / "data.npz", method, made)
        kind = ("resume", "sweep", "other", "joblib")[number % 4]
        if kind == "resume":
            shutil.copytree(made / f"{method}-stopped", folder)
            codes, said, _ = driver(*[[f"resume={folder}"]] * 2)
        elif kind == "other":
            pair = [[*command, f"seed={seed}", f"hydra.run.dir={folder}"] for seed in (0, 1)]
            codes, said, _ = driver(*pair)
        else:
            extra = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"] if kind == "joblib" else []
            codes, said, _ = driver(*[["-m", *command, "seed=0,1,2", f"sweep_dir={folder}", *extra]] * 2)
        where = f"{number} {kind} {codes}\n" + "\n----\n".join(said)
        assert all("Traceback" not in text for text in said), where
        met = [len(busy.findall(text)) for text in said]
        ends = sorted(path.parent for path in tmp_path.glob(f"pair-{number}*/**/summary.json"))
        for end in ends:
            values = json.loads((end / "summary.json").read_text())
            assert values["status"] == "finished" and values["rounds_done"] == 8, where
            if values["seed"] < 2:
                assert same(end, made / f"{method}-{('finished', 'foreign')[values['seed']]}"), where
        assert len(ends) == 3 if "sweep_dir" in str(kind) or kind in ("sweep", "joblib") else ends, where
        if kind in ("resume", "other"):
            assert sorted(codes) == [0, sum(met)] and sum(met) <= 1, where
        else:
            assert 0 in codes and set(codes) <= {0, 1} and "died" not in "".join(said), where
            assert sum(" in another process" in text for text in said) >= codes.count(1), where
        tally[f"{kind}: {'met' if sum(met) else 'one after the other'}"] += 1
    print("pairs:", dict(tally))


@pytest.mark.slow
def test_kills(made: Path, tmp_path: Path, driver: Driver) -> None:
    """Whatever a run is doing when it is killed, at any file it opens, renames or removes, or at any time: once it has
    gone on (or, without a checkpoint yet, was started again) its tables are those of the whole run."""
    tally: Counter[str] = Counter()
    for method in METHODS:
        command = words(made / "data.npz", method, made)
        _, (said,), took = driver([*command, f"hydra.run.dir={tmp_path / method}"], fatal=0)
        events = int(re.findall(r"^events (\d+)$", said, re.M)[-1])
        for number in range(2 * SHARE):
            draw = random.Random(f"{method} {number}")
            folder = tmp_path / f"{method}-{number}"
            again = [*command, f"hydra.run.dir={folder}"]
            how = {"fatal": draw.randint(1, events)} if number % 2 else {"seconds": draw.uniform(0.3, 1) * took}
            (code,), _, _ = driver(again, **how)  # type: ignore[arg-type]
            resumed = (folder / "checkpoint.pt").exists() or (folder / "checkpoint.prev.pt").exists()
            (status,), (said,), _ = driver([f"resume={folder}"] if resumed else again)
            assert status == 0 and "Traceback" not in said, f"{method} {how} {code}\n{said}"
            assert same(folder, made / f"{method}-finished"), f"{method} {how} {code}\n{said}"
            tally[f"{'killed' if code == -9 else 'over'}, {'resumed' if resumed else 'started again'}"] += 1
    print("kills:", dict(tally))
