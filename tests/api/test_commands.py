"""fedbench.run, .sweep and .load do what the command line does, and leave their process as it was."""

import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pytest
import torch
from conftest import ROOT
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.version import VersionBase

import fedbench
from fedbench.commands import main
from fedbench.core.options import ConfigError
from fedbench.report.command import main as report
from fedbench.tools.export import client_state

QUICK: dict[str, Any] = {
    "algorithm": "fedavg",
    "rounds": 3,
    "local": {"epochs": 1},
    "model": {"hidden": [8]},
    "hardware": {"executor": "vmap"},
    "tracking": "disabled",
    "checkpoint.every": 1,
}
CELLS = {**QUICK, "model": {"hidden": [[8]]}, "rounds": 1}  # of a sweep
WORDS = ["algorithm=fedavg", "rounds=3", "local.epochs=1", "model.hidden=[8]", "hardware.executor=vmap"]
WORDS += ["tracking=disabled", "checkpoint.every=1"]
MINE = """
import os, signal
import numpy as np
from torch import nn
from fedbench.algorithms.fedavg import FedAvg
from fedbench.data.base import Arrays

class Net(nn.Sequential):
    def __init__(self, input_shape, num_classes, width: int = 4):
        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, num_classes))

class Stripes:
    'A data set: three kinds of stripes, with noise.'

    def __init__(self, n: int = 300):
        self.n = n

    def load(self):
        rng = np.random.default_rng(0)
        y = np.arange(self.n) % 3
        waves = np.sin(np.arange(64).reshape(1, 1, 8, 8) * (y + 1)[:, None, None, None])
        x = (waves + rng.normal(size=(self.n, 1, 8, 8))).astype(np.float32)
        split = (np.arange(self.n) % 5 == 0).astype(np.int8)
        return Arrays(inputs=x, targets=y.astype(np.int64), split=split, num_classes=3)

class Halves(FedAvg):
    'A method: the server goes only half of the way.'

    def round(self, cohort):
        before = self.global_row().clone()
        super().round(cohort)
        self.w = (before + self.w) / 2

class Kaput(FedAvg):
    def round(self, cohort):
        raise RuntimeError("kaput")

class Leaves(FedAvg):
    def round(self, cohort):
        raise SystemExit(3)

class Refuses(FedAvg):
    def round(self, cohort):
        from fedbench.core.options import ConfigError
        raise ConfigError("algorithm.x is not for these data")

class Interrupted(FedAvg):
    def round(self, cohort):
        super().round(cohort)
        if cohort.round == 1 and os.path.exists("interrupt"):
            os.remove("interrupt")
            signal.raise_signal(signal.SIGINT)
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, with a module of one's own in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("mine.py").write_text(MINE)
    monkeypatch.delitem(sys.modules, "mine", raising=False)


def same(a: Path, b: Path, *names: str) -> bool:
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in names or ("metrics.csv", "clients.csv"))


def test_a_run_is_that_of_a_command_whatever_was_before() -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [*WORDS, "partition.alpha=0.3", "name=a b", "hydra.run.dir=cli"]
    subprocess.run([sys.executable, "-m", "fedbench", *words], env=env, check=True, capture_output=True, timeout=300)
    fedbench.run("seed=1 hydra.run.dir=other", **{**QUICK, "algorithm": "scaffold"})
    for folder in ("first", "second"):
        torch.manual_seed(5)
        np.random.seed(5)  # noqa: NPY002
        run = fedbench.run("partition.alpha=0.3", f"hydra.run.dir={folder}", **{**QUICK, "name": "a b"})
        assert same(Path("cli"), run.path, "metrics.csv", "clients.csv", "config.yaml", ".hydra/config.yaml")
        assert {path.name for path in run.path.iterdir()} == {path.name for path in Path("cli").iterdir()}
    assert run.summary["command"].startswith("python -m fedbench partition.alpha=0.3 hydra.run.dir=second")


def test_the_folder_is_named_as_the_command_line_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    run = fedbench.run(**QUICK)
    assert run.path.parent == Path("runs/fedavg/digits").absolute()
    said = capsys.readouterr()
    assert "round 3/3" in said.out and "next:" not in said.out and said.err == ""
    assert repr(run).startswith("Run(method fedavg, dataset digits") and f"path {Path('runs')}" in repr(run)


def state() -> dict[str, Any]:
    """What of the process a run may touch."""
    root, ours = logging.root, logging.getLogger("fedbench")
    return {
        "hydra": (GlobalHydra.instance().hydra, HydraConfig.instance().cfg, VersionBase.instance().version_base),
        "logging": [(one.handlers[:], one.level, one.disabled, one.propagate) for one in (root, ours)],
        "torch": (torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32),
        "drawn": (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()),  # noqa: NPY002
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "process": (os.getcwd(), sys.path[:], sys.argv[:], dict(os.environ), sys.stdout, threading.active_count()),
    }


@pytest.fixture
def application(tmp_path: Path) -> Iterator[None]:
    """An application of Hydra that is the caller's own."""
    (tmp_path / "theirs").mkdir()
    with hydra.initialize_config_dir(str(tmp_path / "theirs"), version_base="1.2"):
        yield


def test_nothing_is_left_behind(application: None, tmp_path: Path) -> None:
    mine = logging.FileHandler(tmp_path / "mine.log", mode="w")
    logging.root.addHandler(mine)
    torch.set_num_threads(2)
    try:
        before = state()
        fedbench.run("hardware.precision=tf32", **QUICK)
        assert state() == before
        with pytest.raises(RuntimeError, match="kaput"):
            fedbench.run("algorithm._target_=mine.Kaput", "hardware.executor=threads", tracking="disabled")
        with pytest.raises(ConfigError):
            fedbench.run("rounds=none")
        assert {**state(), "process": None} == {**before, "process": None}
        fedbench.sweep("seed=0,1", launcher="basic", **CELLS)
        assert state()["hydra"] == before["hydra"] and state()["torch"] == before["torch"]
        logging.getLogger("theirs").warning("still heard")
        assert (tmp_path / "mine.log").read_text().endswith("still heard\n")
    finally:
        torch.set_num_threads(1)
        logging.root.removeHandler(mine)
        mine.close()


@pytest.mark.parametrize(
    "words",
    [
        ["algorithm=pgfde"],
        ["lr=0.1"],
        ["pgfed"],
        ["seed=1", "seed=2"],
        ["algorithm._target_=mine.Refuses", "tracking=disabled", "rounds=1"],
        ["resume=nowhere"],
    ],
)
def test_mistakes_are_the_sentences_of_the_command_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        fedbench.run(*words)
    assert capsys.readouterr().err == "" and (not Path("runs").exists() or "mine.Refuses" in words[0])
    assert main(words) != 0
    assert capsys.readouterr().err == f"fedbench: {raised.value}\n"
    assert raised.value._render_traceback_() == [f"fedbench: {raised.value}"]


def test_what_is_for_a_sweep_or_for_torchrun_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"seed=0,1 has several values: add -m .*, or use fedbench\.sweep"):
        fedbench.run("seed=0,1")
    with pytest.raises(ConfigError, match=r"use fedbench\.sweep"):
        fedbench.run("hydra.mode=MULTIRUN")
    with pytest.raises(ConfigError, match="resume must be a run folder, got ''"):
        fedbench.run(resume="")
    with pytest.raises(ConfigError, match="resume is given twice, as resume=a and resume=b"):
        fedbench.run("resume=a resume=b")
    with pytest.raises(ConfigError, match="hardware=ddp needs processes that torchrun starts"):
        fedbench.run(hardware="ddp")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ConfigError, match="torchrun"):
        fedbench.run()


def test_a_method_that_fails_raises_what_it_raised(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="kaput") as raised:
        fedbench.run("hydra.run.dir=here", "algorithm._target_=mine.Kaput", tracking="disabled")
    assert raised.traceback[-1].path.name == "mine.py"
    assert raised.value.__notes__ == [f"run folder: {Path('here').absolute()}"]
    run = fedbench.load("here")
    assert run.status == "failed" and "kaput" in Path("here/error.txt").read_text()
    with pytest.raises(ConfigError, match=r"called sys\.exit\(3\)"):
        fedbench.run("algorithm._target_=mine.Leaves", tracking="disabled")
    assert capsys.readouterr().err == ""


def test_an_interrupted_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    import mine  # type: ignore[import-not-found]

    asked = {**QUICK, "algorithm": mine.Interrupted}
    whole = fedbench.run("hydra.run.dir=whole", **asked)
    Path("interrupt").touch()
    with pytest.raises(KeyboardInterrupt):
        fedbench.run("hydra.run.dir=part", **asked)
    part = fedbench.load("part")
    assert part.status == "interrupted" and len(part.metrics) == 2
    call = f"fedbench.run('algorithm._target_=mine.Interrupted', resume={str(part.path)!r})"
    assert call in capsys.readouterr().err
    again = eval(call)
    assert again.status == "finished" and again.path == part.path and same(whole.path, again.path)


def test_classes_and_options_of_ones_own() -> None:
    import mine  # type: ignore[import-not-found]

    run = fedbench.run(**{**QUICK, "model": mine.Net, "model.width": 3})
    module = run.model(2)
    assert isinstance(module, mine.Net) and module[1].out_features == 3 and not module.training
    kept = client_state(run.path, 2, ["model._target_=mine.Net"])
    assert all(torch.equal(module.state_dict()[name], value) for name, value in kept.items())
    with pytest.raises(ConfigError, match=r"if you trust it, add model\._target_=mine\.Net"):
        fedbench.load(run.path).model(2)
    assert isinstance(fedbench.load(run.path).model(2, "model._target_=mine.Net"), mine.Net)
    with pytest.raises(ConfigError, match="client 20 is not among the 20 clients"):
        run.model(20)

    options = Path("options/model")
    options.mkdir(parents=True)
    (options / "narrow.yaml").write_text("_target_: mine.Net\nwidth: 2\n")
    run = fedbench.run(config_dir="options", **{**QUICK, "model": "narrow"})
    assert run.config["choices"]["model"] == "narrow" and run.model(0)[1].out_features == 2
    assert fedbench.load(run.path, config_dir="options").model(0)[1].out_features == 2


def test_a_sweep_is_that_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    runs = fedbench.sweep(**{**CELLS, "algorithm": ["local", "fedavg"], "seed": [3]})
    said = capsys.readouterr().out
    assert "run 1 of 2" in said and "2 runs: 2 finished" in said
    assert [(run.config["choices"]["algorithm"], run.config["seed"]) for run in runs] == [("local", 3), ("fedavg", 3)]
    words = ["-m", "algorithm=local,fedavg", "rounds=1", *WORDS[2:], "seed=3"]
    assert main(words) == 0 and "2 finished already" in capsys.readouterr().out  # the same cells
    for flags, asked in (
        ([], {}),
        (["--select", "best", "--format", "csv"], {"select": "best", "format": "csv"}),
        (["--group", "algorithm", "--target", "0.5"], {"group": ["algorithm"], "target": 0.5}),
    ):
        assert report(["sweeps", *flags]) == 0
        printed = capsys.readouterr().out
        assert str(runs.table(**asked)) == printed == str(fedbench.load("sweeps").table(**asked))
    assert repr(runs.table()) == str(runs.table())
    assert report([str(run.path.relative_to(Path.cwd())) for run in runs[1:]]) == 0
    assert str(runs[1:].table()) == capsys.readouterr().out
    with pytest.raises(ConfigError, match="select must be last, best or best_val, got 'first'"):
        runs.table(select="first")
    with pytest.raises(ConfigError, match="no run has the metric personal/acc"):
        runs.table(metric="personal/acc")


@pytest.mark.slow
def test_a_strangers_classes_give_one_table_in_python_and_on_the_command_line() -> None:
    """Method, model and data from a file outside of the repository; the command line in a process of its own."""
    import mine  # type: ignore[import-not-found]

    from fedbench.algorithms.fedavg import FedAvg

    own = {"algorithm": [mine.Halves, FedAvg], "dataset": mine.Stripes, "model": mine.Net}
    asked = {"partition.num_clients": 4, "local.epochs": 1, "hardware.executor": "vmap", "tracking": "disabled"}
    runs = fedbench.sweep(**own, **asked, rounds=2, seed=[0, 1])
    words = [f"{key}={value}" for key, value in asked.items()]
    words += ["algorithm._target_=mine.Halves,fedbench.algorithms.fedavg.FedAvg", "rounds=2", "seed=0,1"]
    words += ["dataset._target_=mine.Stripes", "model._target_=mine.Net", "sweep_dir=typed"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path.cwd())])}

    def command(*words: str) -> str:
        done = subprocess.run([sys.executable, "-m", *words], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    command("fedbench", "-m", *words)
    printed = command("fedbench", "report", "typed", "--format", "csv")
    scores = [[line.split(",")[:5] for line in text.splitlines()] for text in (printed, str(runs.table(format="csv")))]
    assert scores[0] == scores[1] and "Halves" in printed
    assert len({run.summary["last"]["personal/accuracy"] for run in runs}) == 4


def test_a_failed_cell_is_among_the_runs() -> None:
    words = "algorithm._target_=mine.Kaput,fedbench.algorithms.fedavg.FedAvg"
    runs = fedbench.sweep(words, **CELLS)
    assert [run.status for run in runs] == ["failed", "finished"]
    assert "kaput" in runs.table() and runs[1:].table().count("FedAvg") > 0
    with pytest.raises(ConfigError, match="algorithm=fedavgg is not an option"):
        fedbench.sweep(algorithm=["fedavg", "fedavgg"])


def test_load_finds_runs_and_says_where_there_are_none() -> None:
    Path("empty").mkdir()
    with pytest.raises(ConfigError, match="no runs found in empty"):
        fedbench.load("empty")
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        fedbench.load("nowhere")


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, fedbench\n"
        "heavy = {'torch', 'hydra', 'omegaconf', 'numpy', 'yaml', 'pandas', 'rich', 'IPython'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert {'run', 'sweep', 'load', 'Run', 'Runs'} <= set(dir(fedbench)) and not hasattr(fedbench, 'walk')\n"
        "from fedbench import core, run\n"
        "assert not {'torch', 'pandas'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
