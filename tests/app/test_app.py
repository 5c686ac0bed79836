"""The command line: help, runs, sweeps, resuming and how each of them ends; the simulator is a stand-in here."""

import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from fedbench.app.compose import Composer
from fedbench.app.launch import run_command
from fedbench.app.single import make_folder
from fedbench.app.sweep import RunTask
from fedbench.commands import main
from fedbench.config.conf_tree import find_conf_dir
from fedbench.core.lock import writing
from fedbench.core.options import ConfigError
from fedbench.core.settings import load_config
from fedbench.simulation.log import Console
from fedbench.simulation.processes import TORCHRUN
from fedbench.simulation.status import write_status

# What ``name=`` says happens; otherwise a run that finishes.  Lines of calls.txt are the calls it got.
STAND_IN = """
import json, os, time, zipfile
from fedbench.core.settings import config_hash
from fedbench.core.options import ConfigError

class RunError(ConfigError):
    pass

def run(cfg, run_dir, resume=False, command_entries=None, progress=True):
    with open(run_dir / "calls.txt", "a") as file:
        file.write(f"resume={resume} rounds={cfg.rounds} seed={cfg.seed} project={cfg.tracking.project}\\n")
    with open(run_dir / "executors.txt", "a") as file:
        file.write(f"{cfg.hardware.executor}\\n")
    if cfg.name == "refused":
        raise ConfigError("dataset.path: there is no such file")
    if cfg.name != "early":
        zipfile.ZipFile(run_dir / "checkpoint.pt", "w").close()
    if cfg.name == "bug" and not resume:
        raise RuntimeError("kaput\\nmore of it")
    if cfg.name == "mistake":
        raise ConfigError("dataset.path: there is no such file")
    if cfg.name == "diverged":
        raise RunError("the loss is not finite")
    if cfg.name in ("interrupted", "early"):
        raise KeyboardInterrupt
    if cfg.name == "die":
        os._exit(9)
    if cfg.name == "wait":
        (run_dir / "ready").touch()
        time.sleep(600)
    last = {"personal/accuracy": 0.4 + 0.1 * cfg.seed}
    best = {"metric": "personal/accuracy", "round": 1, "values": {"personal/accuracy": 0.5 + 0.1 * cfg.seed}}
    best_val = None
    if cfg.dataset.val_fraction:
        last["val/accuracy"] = 0.1
        values = {"personal/accuracy": 0.31 + 0.1 * cfg.seed, "val/accuracy": 0.25 - 0.1 * cfg.seed}
        best_val = {"metric": "val/accuracy", "round": 2, "values": values}
    summary = {"status": "finished", "rounds": cfg.rounds, "config_hash": config_hash(cfg), "num_clients": 6}
    summary |= {"last": last, "best": best, "best_val": best_val}
    if cfg.name == "few":
        summary["last"]["personal/accuracy_clients"] = 3
    (run_dir / "summary.json").write_text(json.dumps(summary))
    return summary
"""


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """fedbench.simulation.simulator is the stand-in, in this process; the working directory is empty."""
    module = types.ModuleType("fedbench.simulation.simulator")
    exec(STAND_IN, module.__dict__)
    monkeypatch.setitem(sys.modules, "fedbench.simulation.simulator", module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedbench"])
    monkeypatch.setattr("fedbench.app.launch.ending", lambda summary, folder: None)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Hydra configures the root logger of the process; the next test must not meet its handlers."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def elsewhere(tmp_path: Path) -> dict[str, str]:
    """The environment of a process whose fedbench.simulation.simulator is the stand-in."""
    (tmp_path / "site").mkdir()
    text = f"import sys, types\nm = types.ModuleType('fedbench.simulation.simulator')\nsource = {STAND_IN!r}\n"
    lazy = (
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'fedbench.simulation.simulator':\n"
        "            from importlib.machinery import ModuleSpec\n"
        "            return ModuleSpec(name, self)\n"
        "    def create_module(self, spec): return None\n"
        "    def exec_module(self, module): exec(source, module.__dict__)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    (tmp_path / "site" / "sitecustomize.py").write_text(text + lazy)
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), root])}


def runs(folder: str = "runs") -> list[Path]:
    """The run directories below a folder, oldest first."""
    return sorted((path.parent for path in Path(folder).rglob("status.json")), key=str)


def calls(folder: Path) -> list[str]:
    return (folder / "calls.txt").read_text().splitlines()


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said on standard error: one line, and no traceback."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0].removeprefix("fedbench: ")


# Help and questions


@pytest.mark.parametrize(
    ("arguments", "status", "banned"),
    [
        (["--help"], 0, "torch hydra omegaconf numpy rich sklearn pydantic"),
        (["algorithm=pgfde"], 2, "torch numpy sklearn wandb rich"),
    ],
)
def test_answers_come_before_heavy_imports(arguments: list[str], status: int, banned: str) -> None:
    code = (
        "import sys\n"
        "from fedbench.commands import main\n"
        "status = main(sys.argv[1:])\n"
        f"bad = set({banned!r}.split()) & set(sys.modules); assert not bad, bad\n"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stderr


def test_cfg_job_is_hydras_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cfg", "job", "--resolve", "algorithm=fedprox", "algorithm.mu=0.25"]) == 0
    shown = OmegaConf.create(capsys.readouterr().out)
    assert shown.algorithm == {"_target_": "fedbench.algorithms.fedprox.FedProx", "mu": 0.25, "official_noop": False}
    assert main(["--cfg", "job", "--package", "optimizer"]) == 0
    assert capsys.readouterr().out.startswith("# @package optimizer")
    assert main(["algorithm.muu=1", "--cfg", "job"]) == 2
    assert "did you mean algorithm.mu?" in sentence(capsys)
    assert main(["--info", "defaults"]) == 0
    assert "algorithm/pgfed" in capsys.readouterr().out
    assert not list(Path().iterdir())


def test_completion_is_hydras(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_LINE", "fedbench algorithm=pgf")
    assert main(["-sc", "query=bash"]) == 0
    assert "algorithm=pgfed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nothing"], "unrecognized arguments: --nothing"),
        (["--cfg", "nothing"], "invalid choice: 'nothing'"),
        (["--cfg", "job", "-m"], "remove -m"),
        (["--config-path", "x"], "--config-path is not supported"),
        (["--experimental-rerun", "x.pickle"], "--experimental-rerun is not supported"),
        (["--config-dir", "nowhere"], "--config-dir nowhere: no such folder"),
        (["rounds=0"], "rounds must be a whole number >= 1, got 0"),
        (["-m", "seed=0,1", "rounds=2,0"], "rounds must be a whole number >= 1, got 0"),
        (["-m", "algorithm=local,fedprox", "algorithm.mu=1"], "algorithm.mu is unknown: algorithm=local takes"),
        (["-m", "seed=1,1"], "the same run twice, seed=1"),
        (["-m", "hydra.job.name=a,b"], "configuration is not supported : 'hydra.job.name=a,b'"),
        (["-m", "resume=x"], "resume= is for one run"),
        (["resume=nowhere"], "resume=nowhere: there is no such run folder"),
    ],
)
def test_mistakes_end_with_status_2_and_leave_nothing(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert words in sentence(capsys)
    assert not list(Path().iterdir())


# One run


def test_a_run_has_its_config_and_its_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["seed=3", "algorithm=local"]) == 0
    (folder,) = runs()
    assert folder.parts[:3] == ("runs", "local", "digits")
    cfg = load_config(folder / "config.yaml")
    assert cfg.seed == 3 and cfg.choices.algorithm == "local" and "hydra" not in cfg
    assert sorted(OmegaConf.load(folder / ".hydra" / "overrides.yaml")) == ["algorithm=local", "seed=3"]
    assert json.loads((folder / "status.json").read_text())["status"] == "finished"
    assert capsys.readouterr().err == ""


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path: Path) -> None:
    made = [make_folder(tmp_path / "a" / "now", fresh=True).name for _ in range(3)]
    assert made == ["now", "now-1", "now-2"]


def test_the_run_folder_may_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["hydra.run.dir=mine", "rounds=30"]) == 0
    assert calls(Path("mine")) == ["resume=False rounds=30 seed=0 project=fedbench"]
    assert "mine: finished already" in capsys.readouterr().out
    status = Path("mine") / "status.json"
    before = status.read_text()
    status.write_text(json.dumps({"status": "interrupted", "score": None, "sentence": "while it was checked"}))
    assert main(["hydra.run.dir=mine", "rounds=30"]) == 0
    assert json.loads(status.read_text()) == json.loads(before)  # a finished run says so again


@pytest.mark.parametrize("run_id", ["none", "job-7"])
def test_processes_that_torchrun_starts_again_go_on(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another id, another agent of torchrun (where there is no id), another configuration have folders of their own."""
    monkeypatch.setenv(TORCHRUN, run_id)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")

    def interrupted(*words: str) -> None:
        with pytest.raises(KeyboardInterrupt):
            run_command(["name=interrupted", *words])

    interrupted()
    (folder,) = runs()
    assert folder.name.startswith("torchrun-")
    interrupted()
    assert runs() == [folder] and [line.split()[0] for line in calls(folder)] == ["resume=False", "resume=True"]
    interrupted("seed=1")
    assert len(runs()) == 2
    monkeypatch.setattr(os, "getppid", lambda: 0)
    interrupted()
    assert len(runs()) == (3 if run_id == "none" else 2)
    before = len(runs())
    assert [run_command(["seed=2"]), run_command(["seed=2"])] == [0, 0]  # what is finished is not begun again
    assert len(runs()) == before + 2


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("mistake", 2, "dataset.path: there is no such file"),
        ("diverged", 1, "the loss is not finite"),
        ("bug", 1, "RuntimeError: kaput (the traceback is in"),
    ],
)
def test_a_failed_run_leaves_its_reason(name: str, status: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"name={name}"]) == status
    assert sentence(capsys).startswith(words)
    (folder,) = runs()
    reason = (folder / "error.txt").read_text()
    assert reason.startswith(words.split(" (")[0]) and "Traceback" in reason
    assert "Traceback" in (folder / "run.log").read_text()


@pytest.mark.parametrize("name", ["interrupted", "early"])
def test_an_interrupted_run_says_how_to_go_on(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"name={name}"]) == 130
    (folder,) = runs()
    saved = name == "interrupted"
    assert (f"resume={folder.resolve()}" in sentence(capsys)) is saved


def test_sigterm_is_an_interruption(elsewhere: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedbench", "name=wait", "hydra.run.dir=run"]
    process = subprocess.Popen(command, env=elsewhere, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not (tmp_path / "run" / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 130
    assert "interrupted; it is saved" in error and "Traceback" not in error


@pytest.mark.parametrize("overrides", [["output_dir=file/below"], ["-m", "seed=0,1", "sweep_dir=file/below"]])
def test_an_output_path_below_a_file(overrides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("mine")
    assert main(overrides) == 2
    assert re.match(r"cannot make the folder .*file/below.*(output_dir|sweep_dir)", sentence(capsys))
    assert Path("file").read_text() == "mine"


def test_the_folder_of_a_run_that_never_began_is_taken_away(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["name=refused"]) == 2
    assert sentence(capsys) == "dataset.path: there is no such file"
    assert not list(Path().iterdir())
    assert main(["seed=3"]) == 0
    assert main(["name=refused", "algorithm=local"]) == 2
    assert [path.parts[:3] for path in runs()] == [("runs", "pgfed", "digits")]
    assert [path.name for path in Path("runs").iterdir()] == ["pgfed"]
    assert main(["name=refused", "hydra.run.dir=mine/below"]) == 2
    assert not Path("mine").exists()
    Path("mine").mkdir()
    assert main(["name=refused", "hydra.run.dir=mine"]) == 2
    assert (Path("mine") / "error.txt").exists()  # a folder that was there before stays


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["output_dir="], "output_dir must be text that names a folder, got ''"),
        (["hydra.run.dir="], "hydra.run.dir must be the path of a folder, got ''"),
        (["-m", "seed=0,1", "sweep_dir="], "sweep_dir must be text that names a folder, got ''"),
        (["-m", "seed=0,1", "hydra.sweep.dir="], "hydra.sweep.dir must be the path of a folder, got ''"),
        (["-m", "seed=0", "hydra.sweep.subdir="], "hydra.sweep.subdir must be the path of a folder, got ''"),
    ],
)
def test_no_folder_is_no_place_to_write(overrides: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty output_dir was the file system's root, an empty hydra.run.dir the folder the command is typed in."""
    assert main(overrides) == 2
    assert words in sentence(capsys)
    assert not list(Path().iterdir())


def test_a_run_of_ones_own_class_is_named_after_it(tmp_path: Path) -> None:
    source = "from fedbench.algorithms.base import Algorithm\nclass Mine(Algorithm):\n"
    (tmp_path / "both_kinds.py").write_text(f"{source}    def load(self): ...\n")
    assert main(["algorithm._target_=both_kinds.Mine", "dataset._target_=both_kinds.Mine"]) == 0
    (folder,) = runs()
    assert folder.parts[:3] == ("runs", "Mine", "Mine")
    choices = load_config(folder / "config.yaml").choices
    assert (choices.algorithm, choices.dataset, choices.model) == ("Mine", "Mine", "mlp")


def test_a_users_own_group_and_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A method of one Python file beside the command and one YAML file in a folder of the user's."""
    source = "from fedbench.algorithms.base import Algorithm\nclass Mine(Algorithm):\n"
    (tmp_path / "group_method.py").write_text(f"{source}    def __init__(self, strength: float): ...\n")
    (tmp_path / "myconf" / "algorithm").mkdir(parents=True)
    text = "_target_: group_method.Mine\nstrength: 0.5\n"
    (tmp_path / "myconf" / "algorithm" / "mine.yaml").write_text(text)
    own = ["--config-dir", "myconf", "algorithm=mine"]
    assert main([*own, "hydra.run.dir=run", "name=bug"]) == 1
    capsys.readouterr()
    assert main([*own, "algorithm.strength=x"]) == 2
    assert "algorithm.strength must be a number" in sentence(capsys)
    assert main(["resume=run"]) == 2
    assert "uses the class group_method.Mine, which is not part of fedbench" in sentence(capsys)
    assert main(["--config-dir", "myconf", "resume=run"]) == 0


def test_an_own_class_is_named_in_what_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = "from fedbench.algorithms.base import Algorithm\nclass Mine(Algorithm):\n"
    (tmp_path / "mymethod.py").write_text(f"{source}    def __init__(self, strength: float): ...\n")
    main(["algorithm._target_=mymethod.Mine", "algorithm.strength=2", "name=interrupted", "hydra.run.dir=run"])
    said = sentence(capsys)
    words = shlex.split(said[said.index("resume=") :])
    assert words == [f"resume={Path('run').resolve()}", "algorithm._target_=mymethod.Mine"]
    assert main([*words, "algorithm.strength=3"]) == 2
    assert "the run has algorithm.strength=2" in sentence(capsys)
    assert main(words) == 130  # it goes on, to be interrupted again
    assert main([*words, "rounds=60", "algorithm.strength=2"]) == 130
    assert main(["resume=run", "rounds=60"]) == 2  # the stored name alone builds nothing
    assert "uses the class mymethod.Mine, which is not part of fedbench" in capsys.readouterr().err
    cfg = load_config(Path("run/config.yaml"))
    assert cfg.choices.algorithm == "Mine"
    cfg.choices.algorithm = "pgfed"  # as it was once stored
    OmegaConf.save(cfg, "run/config.yaml")
    assert main([*words, "rounds=60"]) == 130


def test_a_summary_without_numbers_is_no_traceback(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(stopped)
    (stopped / "summary.json").write_text('{"status": "finished", "rounds": "ten", "best": 3}')
    assert main([f"resume={stopped}"]) == 0
    assert calls(stopped)[-1].startswith("resume=True")
    best = '{"metric": "personal/accuracy", "values": {"personal/accuracy": "high"}}'
    (stopped / "summary.json").write_text(f'{{"status": "finished", "rounds": 10, "best": {best}}}')
    assert main([f"resume={stopped}"]) == 0
    assert "finished already" in capsys.readouterr().out


def test_resume_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume="]) == 2
    assert sentence(capsys).startswith("resume= is empty: give a run folder")
    assert not [*runs()]


def test_the_console_handler_writes_to_the_present_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    Console().emit(logging.LogRecord("a", logging.INFO, "", 0, "hello", None, None))
    assert capsys.readouterr().out == "hello\n"


# Resuming


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test that needs an interrupted run leaves one for the others."""
    return tmp_path_factory.mktemp("template") / "run"


@pytest.fixture
def stopped(template: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A run that was interrupted, in a folder whose name Hydra's grammar would not take."""
    if not template.exists():
        options = ["name=interrupted", "algorithm=fedprox", "algorithm.mu=0.5", "rounds=10"]
        main([*options, f"hydra.run.dir={template}"])
        capsys.readouterr()
    shutil.copytree(template, "a=b,c")
    return Path("a=b,c")


def finish(folder: Path) -> None:
    """The stand-in's run goes through from now on."""
    cfg = load_config(folder / "config.yaml")
    cfg.name = None
    OmegaConf.save(cfg, folder / "config.yaml")


def test_resume_goes_on_in_the_folder(stopped: Path) -> None:
    finish(stopped)
    before = (stopped / "config.yaml").read_bytes(), (stopped / ".hydra" / "overrides.yaml").read_bytes()
    extra = ["algorithm.mu=0.5", "algorithm=fedprox", "rounds=12", "tracking.project=other", "checkpoint.every=2"]
    assert main([f"resume={stopped}", *extra]) == 0
    assert calls(stopped)[-1] == "resume=True rounds=12 seed=0 project=other"
    assert before == ((stopped / "config.yaml").read_bytes(), (stopped / ".hydra" / "overrides.yaml").read_bytes())
    assert list(OmegaConf.load(stopped / ".hydra" / "overrides.resume-1.yaml")) == extra
    assert [path.name for path in Path().iterdir()] == [str(stopped)]


def test_a_finished_run_is_not_run_again_unless_it_grows(stopped: Path, capsys: pytest.CaptureFixture) -> None:
    finish(stopped)
    for arguments, rounds in (([], 10), ([], 10), (["rounds=12"], 12), ([], 12), (["rounds=11"], None)):
        status = main([f"resume={stopped}", *arguments])
        assert status == (0 if rounds else 2)
        if rounds:
            assert f" rounds={rounds} " in calls(stopped)[-1]
    assert len(calls(stopped)) == 3
    assert "finished already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.mu=0.01"], "the run has algorithm.mu=0.5 (requested: 0.01)"),
        (["algorithm=pgfed"], "the run has algorithm='fedprox' (requested: 'pgfed')"),
        (["seed=1", "local.epochs=1"], "seed=0 (requested: 1)"),
        (["rounds=9"], "rounds=9 is less than the run's 10"),
        (["+experiment=debug"], "experiment=null (requested: 'debug')"),
        (["rounds=many"], "rounds must be a whole number"),
        (["seed=0,1"], "several values"),
        (["algorithm.muu=1"], "algorithm.muu is not a key of this run: did you mean algorithm.mu or"),
        (["model._target_=fedbench.models.logistic.Logistic"], "(requested: 'fedbench.models.logistic.Logistic')"),
        (["~model.hidden"], "~model.hidden deletes a key"),
    ],
)
def test_resume_refuses_another_config(
    stopped: Path, overrides: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"resume={stopped}", *overrides]) == 2
    assert words in sentence(capsys)
    assert len(calls(stopped)) == 1 and not list((stopped / ".hydra").glob("*resume*"))


def test_resume_keeps_the_hardware_and_says_so(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(stopped)
    before = (stopped / "executors.txt").read_text().split()
    assert main([f"resume={stopped}", "hardware=cuda", "hardware.executor=threads"]) == 0
    assert (stopped / "executors.txt").read_text().split() == [*before, before[-1]] != [*before, "threads"]
    assert "is resumed with its first hardware options (device='auto'" in sentence(capsys)


def test_resume_of_what_is_no_run(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (stopped / "checkpoint.pt").unlink()
    assert main([f"resume={stopped}"]) == 2
    assert "has no checkpoint.pt; start the run again" in sentence(capsys)
    (stopped / "config.yaml").write_text("a: 1")
    assert main([f"resume={stopped}"]) == 2
    assert "was not saved by fedbench" in sentence(capsys)
    (stopped / "config.yaml").unlink()
    assert main([f"resume={stopped}"]) == 2
    assert "this is not a run folder" in sentence(capsys)


@pytest.mark.parametrize(
    "key, value",
    [
        ("rounds", "four"),
        ("rounds", None),
        ("rounds", 10**23),
        ("seed", "x"),
        ("model", None),
        ("dataset", None),
        ("optimizer", None),
        ("optimizer", 3),
        ("hardware", None),
        ("local", None),
        ("choices", None),
    ],
)
@pytest.mark.parametrize("more", [[], ["rounds=3"]])
def test_resume_of_an_edited_config_is_one_sentence(
    stopped: Path, key: str, value: object, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A value that no run can have, a group that is null: said, with the folder, before anything comes of it."""
    path = stopped / "config.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), key: value}))
    assert main([f"resume={stopped}", *more]) == 2
    said = sentence(capsys)
    assert f"resume={stopped}: its config.yaml was not saved by fedbench" in said
    assert key in said or key == "choices"


@pytest.mark.parametrize("where", ["algorithm", "model.columns"])
def test_resume_builds_nothing_foreign(stopped: Path, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = load_config(stopped / "config.yaml")
    OmegaConf.update(cfg, f"{where}.x", [{"_target_": "os.system", "command": "true"}], force_add=True)
    OmegaConf.save(cfg, stopped / "config.yaml")
    assert main([f"resume={stopped}"]) == 2
    assert "its config.yaml uses the class os.system" in sentence(capsys)


def test_a_schedule_of_the_total_forbids_growing(capsys: pytest.CaptureFixture[str]) -> None:
    main(["name=interrupted", "optimizer.schedule.name=cosine", "hydra.run.dir=run"])
    capsys.readouterr()
    assert main(["resume=run", "rounds=1000"]) == 2
    assert "cannot replace" in sentence(capsys)


# Sweeps


def test_a_sweep_skips_what_is_finished(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["-m", "algorithm=local,fedavg", "seed=1"]
    assert main(command) == 0
    cells = runs("sweeps")
    assert [cell.name for cell in cells] == ["algorithm=fedavg,seed=1", "algorithm=local,seed=1"]
    assert "2 runs: 2 finished" in capsys.readouterr().out
    assert main([*command, "tracking=disabled", "hardware=cpu"]) == 0  # the same runs, elsewhere
    out = capsys.readouterr().out
    assert "2 runs: 2 finished already" in out and "0.5000" in out
    assert all(len(calls(cell)) == 1 for cell in cells)


def test_long_names_of_cells_keep_the_seed() -> None:
    """Under every launcher's config; a name that the user chose stays."""
    long = ["algorithm=fedprox", "clients_per_round=5", "dataset=synthetic", "dataset.n=2000", "local.batch_size=20"]
    long += ["local.epochs=3", "optimizer.lr=0.05", "partition.num_clients=10"]
    assert main(["-m", *long, "seed=10,11"]) == 0
    assert [cell.name.partition(",")[0] for cell in runs("sweeps")] == ["seed=10", "seed=11"]
    assert main(["-m", "seed=0,1", "sweep_dir=own", "hydra.sweep.subdir=mine-${seed}"]) == 0
    assert [cell.name for cell in runs("own")] == ["mine-0", "mine-1"]


@pytest.mark.parametrize(
    "words",
    [
        ["hydra.sweeper.params={seed: '3,4'}"],
        ["hydra.sweeper.params={algorithm.mu: 0.1, seed: '3,4'}", "algorithm=fedprox"],
        ["hydra.sweeper.params.seed='3,4'"],
        ["+hydra.sweeper.params.seed=3,4"],
        ["seed=3,", "4"],
        ["seed=3", ",4"],
        ["seed=3, 4"],
    ],
)
def test_ways_to_write_a_sweep(words: list[str]) -> None:
    assert main(["-m", *words]) == 0
    assert sorted(calls(cell)[0].split()[2] for cell in runs("sweeps")) == ["seed=3", "seed=4"]


def test_sweeper_params_without_m(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hydra.sweeper.params={seed: '3,4'}"]) == 2
    assert sentence(capsys).startswith("seed=3,4 has several values: add -m")


def test_a_long_check_is_not_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("fedbench.app.sweep.SECONDS_AT_FIRST", 0)
    monkeypatch.setattr("fedbench.app.sweep.SECONDS_BETWEEN", 0)
    monkeypatch.setattr("fedbench.app.sweep.MAX_CHECKED_RUNS", 1)
    assert main(["-m", "seed=0,1"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("checking")]
    assert lines == [f"checking the swept values of 2 runs before the sweep starts: {k} of 2 done" for k in (0, 1)]


def test_home_is_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A shell leaves the ~ of key=~/folder as it is."""
    home = tmp_path / "a home"
    monkeypatch.setenv("HOME", str(home))
    options = ["data_dir=~/data", "dataset=npz", "dataset.path='~/x.npz'"]
    assert main(["-m", "seed=0,1", "sweep_dir=~/sweeps", *options]) == 0
    cells = runs(str(home / "sweeps"))
    assert len(cells) == 2 and not Path("~").exists()
    config = load_config(cells[0] / "config.yaml")
    assert config.data_dir == str(home / "data") and config.dataset.path == str(home / "x.npz")
    parsed = Composer().parse(
        ["dataset.paths={a: ~/a, b: '~/b'}", "dataset.path=~/a,~/b", "model.weights=[~/a, 'x~/y']"]
    )
    assert parsed[0].value() == {"a": str(home / "a"), "b": "~/b"}  # which is written out with the whole configuration
    assert [item.text for item in parsed[1].sweep_iterator()] == [str(home / "a"), str(home / "b")]
    assert parsed[2].value() == [str(home / "a"), "x~/y"]
    assert main(["output_dir=~/runs"]) == 0 and runs(str(home / "runs"))
    assert main(["hydra.run.dir=~/one"]) == 0 and (home / "one" / "config.yaml").is_file()
    (home / "own").mkdir()
    assert main(["resume=~/one", "--config-dir=~/own"]) == 0
    assert "one: finished already" in capsys.readouterr().out


def test_a_failed_cell_does_not_stop_the_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "name=bug,mistake,fine"]) == 1
    out, error = capsys.readouterr()
    assert "3 runs: 2 failed, 1 finished" in out and "run 3 of 3: name=fine" in out
    assert "RuntimeError: kaput" in error and "Traceback" not in out + error
    assert Path("sweeps/name=mistake/error.txt").exists()
    assert main(["-m", "name=bug,fine"]) == 0  # the stand-in's bug is gone when it resumes
    assert calls(Path("sweeps/name=bug"))[-1].startswith("resume=True")
    assert not Path("sweeps/name=bug/error.txt").exists()


def test_a_cell_goes_on_with_the_hardware_it_was_started_with() -> None:
    """Resuming is exact with the same executor only, whatever this command says or leaves out."""
    main(["-m", "name=bug,fine", "hardware.executor=loop"])
    assert main(["-m", "name=bug,fine"]) == 0
    cell = Path("sweeps/name=bug")
    assert calls(cell)[-1].startswith("resume=True")
    assert (cell / "executors.txt").read_text().split() == ["loop", "loop"]


def test_the_closing_table_of_a_sweep_shows_no_best_round_on_test_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "name=fine,few", "seed=1", "sweep_dir=without"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"run +status +last +clients +\n", out)
    assert re.search(r"name=few,seed=1 +finished +0\.5000 +3 of 6 +\n", out) and "0.6000" not in out
    assert main(["-m", "seed=1", "dataset.val_fraction=0.2", "sweep_dir=with"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"run +status +last +best by val +val +\n", out)
    assert re.search(r"finished +0\.5000 +0\.4100 +0\.1500", out) and "0.6000" not in out


@pytest.mark.parametrize(
    ("overrides", "got", "words"),
    [
        ([], [0.4, 0.5], "the test accuracy of the last round, because there are no validation samples"),
        (["dataset.val_fraction=0.2"], [0.25, 0.15], "the best validation accuracy"),
    ],
)
def test_a_sweeper_gets_no_best_round_on_test_parts(
    overrides: list[str],
    got: list[float],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    returned: list[float] = []
    run = RunTask.__call__

    def recorded(task: RunTask, cfg: DictConfig) -> float:
        returned.append(run(task, cfg))
        return returned[-1]

    monkeypatch.setattr(RunTask, "__call__", recorded)
    monkeypatch.setattr("fedbench.app.sweep.BASIC", "another")  # as Optuna's
    assert main(["-m", "seed=0,1", *overrides]) == 0
    assert returned == pytest.approx(got)
    assert f"seed=0: score for the sweeper {got[0]:.4f}, {words}" in capsys.readouterr().out


def test_an_interruption_stops_the_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "name=interrupted,fine"]) == 130
    assert "2 runs: 1 interrupted, 1 not started" in capsys.readouterr().out


def test_a_killed_cell_is_told_and_done_again(
    elsewhere: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes of joblib's, one of which dies; afterwards its cell goes on from the checkpoint."""
    command = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "name=die,fine"]
    done = subprocess.run(
        [sys.executable, "-m", "fedbench", *command],
        env=elsewhere,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    assert re.search(r"name=die\s+died", done.stdout), done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert Path("sweeps/name=die/config.yaml").exists()


@pytest.mark.slow  # a cell that fails, and joblib's processes, are in other tests
def test_joblib_cells_report_through_files(elsewhere: dict[str, str], tmp_path: Path) -> None:
    command = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "name=fine,bug"]
    done = subprocess.run(
        [sys.executable, "-m", "fedbench", *command],
        env=elsewhere,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    assert "2 runs: 1 finished, 1 failed" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_cell_of_another_config_is_set_aside(capsys: pytest.CaptureFixture[str]) -> None:
    main(["-m", "seed=0,1"])
    cell = Path("sweeps/seed=0")
    cfg = load_config(cell / "config.yaml")
    cfg.rounds = 7
    OmegaConf.save(cfg, cell / "config.yaml")
    (cell / "mine.txt").write_text("precious")
    assert main(["-m", "seed=0,1"]) == 0
    assert Path("sweeps/seed=0.old-1/mine.txt").read_text() == "precious"
    assert len(calls(cell)) == 1 and len(calls(Path("sweeps/seed=0.old-1"))) == 1
    assert "2 runs: 1 finished, 1 finished already" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "seed: 0\nrounds: 8\n",
        *(pytest.param(text, marks=pytest.mark.slow) for text in ("data_dir: data\nprivacy: 3\n", "seed: [", "7")),
    ],
)
def test_a_cell_whose_config_was_cut_off_is_set_aside(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["-m", "seed=0,1"])
    Path("sweeps/seed=0/config.yaml").write_text(text)
    assert main(["-m", "seed=0,1"]) == 0
    assert Path("sweeps/seed=0.old-1/config.yaml").read_text() == text
    assert "2 runs: 1 finished, 1 finished already" in capsys.readouterr().out


def test_a_truncated_checkpoint_means_starting_the_cell_again() -> None:
    main(["-m", "name=bug,fine"])
    (Path("sweeps/name=bug") / "checkpoint.pt").write_bytes(b"PK\x03\x04 cut off")
    assert main(["-m", "name=bug,fine"]) == 1
    assert calls(Path("sweeps/name=bug"))[-1].startswith("resume=False")


def test_swept_hardware_has_cells_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "hardware.executor=loop,vmap", "hardware.chunk=2"]) == 0
    assert [cell.name for cell in runs("sweeps")] == ["hardware.executor=loop", "hardware.executor=vmap"]


def test_the_grid_of_an_experiment_file_is_swept_by_m_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    text = "# @package _global_\nrounds: 3\nhydra:\n  sweeper:\n    params:\n      seed: 0,1\n"
    (tmp_path / "conf" / "experiment" / "grid.yaml").write_text(text)
    assert main(["--config-dir", "conf", "-m", "+experiment=grid"]) == 0
    assert [cell.name for cell in runs("sweeps")] == ["experiment=grid,seed=0", "experiment=grid,seed=1"]


def test_many_cells_are_checked_one_value_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "seed=range(0,200)", "algorithm=local,fedavg", "optimizer.lr=0.1,abc"]) == 2
    assert "optimizer.lr must be a number > 0 or a list, each entry a number > 0, got 'abc'" in sentence(capsys)


def test_a_sweeper_of_ones_choice() -> None:
    assert main(["-m", "hydra/sweeper=basic", "seed=0,1", "sweep_dir=own"]) == 0
    assert len(runs("own")) == 2


# One writer


def everything(folder: Path) -> dict[str, bytes]:
    """All files below a folder but the locks."""
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_a_second_resume_is_one_sentence_and_touches_nothing(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(stopped)
    with writing(stopped):
        before = everything(stopped)
        assert main([f"resume={stopped}", "rounds=12"]) == 1
        assert f"{stopped} is in use by process {os.getpid()} on " in sentence(capsys)
        assert everything(stopped) == before
    assert main([f"resume={stopped}"]) == 0


def test_a_second_run_in_a_named_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Whether it asks for the same run or for another, which used to rename the folder away."""
    main(["hydra.run.dir=mine"])
    capsys.readouterr()
    with writing(Path("mine")):
        before = everything(Path("mine"))
        for seed in (0, 1):
            assert main([f"seed={seed}", "hydra.run.dir=mine"]) == 1
            assert "mine is in use by process" in sentence(capsys)
        assert everything(Path()) == before


def test_a_sweep_goes_on_with_the_cells_that_nobody_has(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sweeps/seed=1").mkdir(parents=True)
    command = ["-m", "seed=0,1,2"]
    with writing(Path("sweeps/seed=1")):
        assert main(command) == 1
        out, error = capsys.readouterr()
        assert "3 runs: 2 finished, 1 in another process" in out
        assert re.search(rf"seed=1 +in another process +process {os.getpid()} on ", out)
        assert error.count("is in use by process") == 1 and not list(Path("sweeps").glob(".met*"))
        assert [path.name for path in Path("sweeps/seed=1").iterdir()] == [".lock"]
    assert main(command) == 0
    assert "3 runs: 2 finished already, 1 finished" in capsys.readouterr().out


def test_a_cell_that_the_other_process_has_finished_meanwhile(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table tells how it stands at the end of the sweep, not when it was met."""
    main(["-m", "seed=0,1"])
    module = sys.modules["fedbench.simulation.simulator"]
    run = module.run
    with ExitStack() as met:
        met.enter_context(writing(Path("sweeps/seed=0")))

        def release(*given: Any, **how: Any) -> Any:  # in seed=2, after seed=0 was met
            met.close()
            return run(*given, **how)

        monkeypatch.setattr(module, "run", release)
        assert main(["-m", "seed=0,1,2"]) == 0
    assert "3 runs: 2 finished already, 1 finished" in capsys.readouterr().out


def test_a_cell_that_another_command_finds_finished_meanwhile(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status is then the other command's, and the table shows it."""
    module = sys.modules["fedbench.simulation.simulator"]
    run = module.run

    def meanwhile(cfg: Any, folder: Path, *how: Any) -> Any:
        if cfg.seed == 1:
            write_status(folder.with_name("seed=0"), "finished", 0.5)
        return run(cfg, folder, *how)

    monkeypatch.setattr(module, "run", meanwhile)
    assert main(["-m", "seed=0,1"]) == 0
    assert "2 runs: 2 finished" in capsys.readouterr().out


@pytest.mark.slow
def test_joblib_cells_are_locked_too(elsewhere: dict[str, str], tmp_path: Path) -> None:
    command = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "name=fine,other"]
    Path("sweeps/name=fine").mkdir(parents=True)
    with writing(Path("sweeps/name=fine")):
        done = subprocess.run(
            [sys.executable, "-m", "fedbench", *command],
            env=elsewhere,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 1 and "2 runs: 1 in another process, 1 finished" in done.stdout, done.stderr


# The installation


def test_the_conf_folder_is_found() -> None:
    assert (find_conf_dir() / "algorithm").is_dir() and find_conf_dir().is_absolute()


def test_main_reads_the_processs_arguments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["fedbench", "rounds=0"])
    assert main() == 2
    assert sys.argv == ["fedbench", "rounds=0"]
    with pytest.raises(ConfigError):
        make_folder(Path("/proc/nothing/here"), fresh=True)


@pytest.mark.parametrize(
    ("words", "group"),
    [
        (["rounds=2", "data_dir=elsewhere"], "rounds=2,seed"),
        (["algorithm=fedavg"], "algorithm=fedavg,seed"),
        (["sweep_dir=mine/lr_alpha"], "lr_alpha"),
        (["tracking.group=given"], "given"),
    ],
)
def test_the_cells_of_a_sweep_have_one_group(words: list[str], group: str) -> None:
    """One that tells sweeps in the default folder apart."""
    assert main(["-m", *words, "seed=0,1"]) == 0
    configs = [load_config(path) for path in Path().rglob("config.yaml") if path.parent.name != ".hydra"]
    assert [config.tracking.group for config in configs] == [group] * 2
