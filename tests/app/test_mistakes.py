"""What is malformed, interrupted half-way or written on a full disk ends in one sentence, and spoils nothing."""

import errno
import json
import logging
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedbench.app.compose import Composer
from fedbench.app.single import FAILED, MISTAKE
from fedbench.commands import main
from fedbench.core.options import ConfigError
from fedbench.simulation.log import LogFile

SMALL = [
    "rounds=3",
    "tracking=disabled",
    "hardware.executor=vmap",
    "hardware.threads=1",
    "model.hidden=[8]",
    "local.epochs=1",
    "partition.num_clients=4",
    "sample_rate=0.5",
    "checkpoint.every=1",
    "hydra.run.dir=run",
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder, with what Hydra does to the root logger undone."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedbench"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said on standard error: one line, and no traceback."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0].removeprefix("fedbench: ")


# -- the command line ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-m", "seed=range(0,0)"], "seed=range(0,0) has no values: give seed at least one"),
        (["-m", "seed=range(3,1)", "algorithm=local,fedavg"], "seed=range(3,1) has no values"),
        (["-m", "algorithm=range(0,0)"], "algorithm=range(0,0) has no values"),
        (["-m", "seed=glob(*)"], "seed=glob(*) has no values"),
        (["-m", "seed=range(0,9,0)"], "seed=range(0,9,0) is not a valid range ("),
        (["-m", "seed=interval(0,1)"], "seed=interval(0,1) is an interval"),
        (["-m", "algorithm=local,fedavg", "--cfg", "job"], "show the configuration of one run: remove -m"),
        (["dataset=quilts"], "; give the folder of your own options by --config-dir"),
        (["algorithm=[a,b]"], "algorithm=[a,b] is a list, but a run has one algorithm"),
        (["dataset=[digits,mnist]"], "dataset=[digits,mnist] is a list"),
        (["-m", "model=[mlp,logistic],mlp"], "model=[mlp,logistic],mlp is a list"),
        (["local=3"], "local must be a group of keys (epochs, steps, batch_size, drop_last), got 3"),
        (["=3"], "'=3' has no key: write key=value"),
        (["="], "'=' has no key"),
        (["~"], "'~' has no key"),
        (["-m", "=3,4"], "'=3,4' has no key"),
        (["hydra=3"], "hydra=3 would replace all keys of Hydra"),
        (["hydra/launcher=3"], "hydra/launcher must be the name of an option, got 3"),
        (["hydra.verbose=3"], "hydra.verbose must be true, false, or a name or list of loggers, got 3"),
        (["choices=1"], "choices is a record of the chosen options"),
        (["+choices.algorithm=fedavg"], "choices is a record of the chosen options"),
        (["+seed=1"], "Either remove + prefix: 'seed=1'"),
        (["seed=1", "seed=2"], "seed is given twice, as seed=1 and seed=2"),
        (["seed=1", "++seed=2"], "seed is given twice, as seed=1 and ++seed=2"),
        (["algorithm=fedprox", "algorithm=fedavg"], "algorithm is given twice"),
        (["-m", "seed=0,1", "seed=2,3"], "seed is given twice"),
        (["local={epochs:1}", "local.epochs=2"], "local.epochs is given twice, as local={epochs:1} and local.ep"),
        (["resume=a", "resume=b"], "resume is given twice, as resume=a and resume=b"),
        (["+resume=nowhere"], "resume=nowhere: there is no such run folder"),
        (["resume=nowhere", "--cfg", "job"], "remove one of them"),
        (["--config-dir", ""], "--config-dir is empty: give the folder"),
        (["+algorithm._convert_=nope"], "algorithm._convert_ must be one of 'none', 'partial', 'object', 'all', got"),
        (["+model._recursive_=3"], "model._recursive_ must be one of true, false, got 3"),
        (["name=''"], "name is empty: give the run a name"),
        (["--package", "optimizer"], "--package selects a part of the output of --cfg job"),
    ],
)  # fmt: skip
def test_a_malformed_word_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == MISTAKE
    assert said in sentence(capsys)
    assert not list(Path().iterdir())


def test_what_is_said_twice_alike_is_no_mistake() -> None:
    composer = Composer()
    composer.refuse_repeated(["seed=1", "seed=1", "local={epochs:1}", "local.batch_size=2", "~algorithm.mu"])
    with pytest.raises(ConfigError, match=r"local\.epochs is given twice"):
        composer.refuse_repeated(["local.epochs=1", "local={batch_size:3,epochs:2}"])


def test_a_file_of_options_that_is_no_mapping(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine/algorithm").mkdir(parents=True)
    Path("mine/algorithm/bad.yaml").write_text("3\n")
    assert main(["--config-dir", "mine", "algorithm=bad"]) == MISTAKE
    assert "algorithm/bad.yaml cannot be read as a mapping of keys" in sentence(capsys)


def test_a_launcher_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "hydra/launcher=together", "seed=0,1"]) == MISTAKE
    assert "hydra/launcher=together is not an option: hydra/launcher has basic, joblib" in sentence(capsys)


def test_a_part_of_the_config_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cfg", "job", "--package", "nothing"]) == MISTAKE
    assert "nothing" in sentence(capsys)


# -- a run that stops itself -----------------------------------------------------------------------------
def method(name: str, body: str) -> list[str]:
    """A method of the user's whose round does this; the words that choose it."""
    Path("mine/algorithm").mkdir(parents=True)
    Path(f"mine/algorithm/{name}.yaml").write_text(f"_target_: {name}.Own\n")
    Path(f"{name}.py").write_text(
        "import sys\nfrom fedbench.algorithms.fedavg import FedAvg\n\n\nclass Own(FedAvg):\n"
        f"    def round(self, cohort):\n        {body}\n"
    )
    return ["--config-dir", "mine", f"algorithm={name}"]


def test_rows_that_are_nobodys_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A server that keeps the uploads where it should have their mean."""
    words = method("unmixed", "self.w = cohort.train(cohort.broadcast(w=self.w).w).theta")
    assert main([*SMALL, *words]) == FAILED
    expected = r"Own\.personalized returned shape \[\d+, \d+\] for \d+ clients: expected one shared row \[P\]"
    assert re.search(expected, sentence(capsys))


@pytest.mark.parametrize("code", ["", "0", "'done'"])
def test_a_method_that_ends_the_process_is_a_failed_run(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = method(f"quits{len(code)}", f"sys.exit({code})")
    assert main([*SMALL, *words]) == FAILED
    assert f"its code called sys.exit({code or None})" in sentence(capsys)
    assert json.loads(Path("run/status.json").read_text())["status"] == "failed"
    assert json.loads(Path("run/summary.json").read_text())["status"] == "failed"
    assert "sys.exit" in Path("run/error.txt").read_text()


def test_a_sweep_goes_on_after_a_cell_that_ended_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    words = method("leaves", "sys.exit(0)")
    assert main(["-m", *[word for word in SMALL if "hydra" not in word], *words, "seed=0,1"]) == FAILED
    assert "2 runs: 2 failed" in capsys.readouterr().out


# -- a full disk, and what a killed process leaves ---------------------------------------------------------
def failing(real: Callable[..., Any], call: int) -> Callable[..., Any]:
    """The function, which raises from its call of that number on."""
    calls = [0]

    def fails(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] >= call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **options)

    return fails


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    assert main([*SMALL[:-1], f"hydra.run.dir={folder}"]) == 0
    return folder


def same(folder: Path, whole: Path) -> None:
    for name in ("metrics.csv", "clients.csv"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    assert not half_written(folder)


def half_written(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix in (".part", ".partial")]


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        ("fedbench.core.settings.OmegaConf", "save", 1),  # config.yaml
        pytest.param("fedbench.partition.base.np", "savez", 1, marks=pytest.mark.slow),  # partition.npz
        ("fedbench.simulation.partition_files", "replace_text", 1),  # partition.json
        pytest.param(
            "fedbench.simulation.callbacks.tables.CsvTable", "append", 1, marks=pytest.mark.slow
        ),  # metrics.csv
        pytest.param(
            "fedbench.simulation.callbacks.tables.CsvTable", "extend", 2, marks=pytest.mark.slow
        ),  # clients.csv
        ("fedbench.simulation.callbacks.tables.CsvTable", "append", 4),  # costs.csv
        pytest.param("fedbench.simulation.checkpoint.os", "fsync", 3, marks=pytest.mark.slow),  # the first checkpoint
        ("fedbench.simulation.checkpoint.os", "fsync", 4),  # the second one
        pytest.param("fedbench.simulation.checkpoint", "dump", 2, marks=pytest.mark.slow),
        ("fedbench.simulation.simulator", "write_measured", 1),
    ],
)
def test_a_full_disk_is_one_sentence_and_the_run_goes_on_where_it_was(
    owner: str, name: str, call: int, whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as m:
        m.setattr(f"{owner}.{name}", failing(pkgutil.resolve_name(f"{owner}.{name}"), call))
        assert main(SMALL) == FAILED
    said = sentence(capsys)
    saved = Path("run/checkpoint.pt").exists()
    assert said.startswith("the disk of ") and ("resume it with" in said) is saved
    assert not Path("run/error.txt").exists() or Path("run/error.txt").stat().st_size
    assert not half_written(Path("run"))
    assert main(["resume=run"] if saved else SMALL) == 0
    same(Path("run"), whole)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes a disk of so many KiB, or makes it larger."""
    folder = tmp_path / "disk"

    def sized(kib: int) -> Path:
        again = "remount," if folder.exists() else ""
        folder.mkdir(exist_ok=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"{again}size={kib}k", "none", str(folder)], check=False, capture_output=True
        )
        if done.returncode:
            pytest.skip("needs the right to mount a file system")
        return folder

    yield sized
    subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


SLOW_SIZES = [pytest.param(kib, marks=pytest.mark.slow) for kib in (40, 108)]


@pytest.mark.parametrize("kib", [8, 80, *SLOW_SIZES])
def test_a_disk_that_is_really_full(
    kib: int, disk: Callable[[int], Path], whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In config.yaml, partition.json, the first checkpoint, a later one."""
    folder = disk(kib) / "run"
    words = [*SMALL[:-1], f"hydra.run.dir={folder}"]
    assert main(words) == FAILED
    assert sentence(capsys).startswith("the disk of ")
    assert not [
        path
        for path in folder.iterdir()
        if path.name in ("error.txt", "status.json", "summary.json") and not path.stat().st_size
    ]
    assert not half_written(folder)
    disk(4096)
    assert main([f"resume={folder}"] if (folder / "checkpoint.pt").exists() else words) == 0
    same(folder, whole)


def test_what_a_killed_process_was_writing_is_removed(whole: Path) -> None:
    left = [
        "summary.json.part",
        "status.json.part",
        "metrics.csv.part",
        "checkpoint.pt.partial",
        "matrices.npz.4711.partial",
        ".hydra/config.yaml.part",
    ]
    Path("run/.hydra").mkdir(parents=True)
    for name in left:
        Path("run", name).write_text("half")
    Path("run/mine.part").mkdir()
    Path("run/status.json").write_text(json.dumps({"token": "of another command", "status": "finished", "exit": 0}))
    assert main(SMALL) == 0
    assert Path("run/mine.part").is_dir()
    Path("run/mine.part").rmdir()
    same(Path("run"), whole)


def test_a_log_that_cannot_be_written_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder").mkdir()
    for path in (Path("folder"), Path("/dev/full")):
        handler = LogFile(path, delay=True)
        handler.emit(logging.LogRecord("a", logging.INFO, "", 0, "hello", None, None))
        handler.close()
    assert capsys.readouterr() == ("", "")


# -- the other commands ----------------------------------------------------------------------------------
@pytest.fixture
def around(whole: Path) -> None:
    """A run, a file and a folder to name."""
    Path("run").symlink_to(whole)
    Path("folder").mkdir()
    Path("plain").write_text("hello")


RESULTS = [
    ("export", ["run", "--client", "0", "--out"]),
    ("export", ["run", "--predictions"]),
    ("report", ["run", "--format", "text", "--out"]),
    ("partition", ["--out"]),
    ("partition", ["--figure"]),
    ("fid", ["--network", "random", "--out"]),
]
NAMES = ["folder", "plain/x.pt", "", "a" * 300 + ".pt"]


@pytest.mark.parametrize(("name", "words"), RESULTS)
@pytest.mark.parametrize("path", NAMES)
def test_a_file_that_cannot_be_written_is_told_before_the_work(
    name: str, words: list[str], path: str, around: None, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = words[-1]
    assert main([name, *words, path]) == 2
    out, error = capsys.readouterr()
    assert flag in error and len(error.splitlines()) == 1 and out == ""
    assert {entry.name for entry in Path().iterdir()} == {"run", "folder", "plain"}


@pytest.mark.parametrize("words", [["--client", "1", "--out", "new/below/x.pt"], ["--predictions", "new/below/x.npz"]])
def test_an_export_makes_the_folder_that_is_missing(words: list[str], around: None) -> None:
    assert main(["export", "run", *words]) == 0
    assert [path.suffix for path in Path("new/below").iterdir()] in ([".pt"], [".npz"])


@pytest.mark.parametrize(("name", "words"), [*RESULTS[:3]])
def test_a_full_disk_leaves_the_file_as_it_was(
    name: str, words: list[str], around: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("old.pt").write_text("old")
    monkeypatch.setattr("fedbench.core.files.os.replace", failing(os.replace, 1))
    assert main([name, *words, "old.pt"]) == 2
    assert "old.pt cannot be written: No space left on device" in sentence(capsys)
    assert Path("old.pt").read_text() == "old" and not list(Path().glob("*.part"))


def test_a_device_is_written_to_and_not_replaced(
    around: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert main(["report", "run", "--format", "csv", "--out", "pipe"]) == 0
    assert os.read(reader, 6) == b"method" and Path("pipe").is_fifo()
    os.close(reader)
    assert main(["partition", "--out", "pipe"]) == 2
    assert "pipe must be a file" in capsys.readouterr().err and Path("pipe").is_fifo()


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        *(("export", ["run", "--client", text], f"must be the index of a client, an integer from 0 to 3, got {text!r}")
          for text in ("x", "1.5", "", "9" * 30)),
        ("export", ["run", "--client", "-1"], "must be the index of a client, an integer from 0 to 3, got '-1'"),
        ("export", ["run", "--client", "0", "--client", "1"], "--client is given twice"),
        ("export", ["run", "--client", "4"], "client 4 is not among the 4 clients, which are 0 to 3"),
        ("export", ["run", "--out", "x.pt", "--predictions", "y.npz"], "--out x.pt is the file of a client's model"),
        ("export", ["run", "--client", "0", "--out", "x", "--predictions", "x"], "--out and --predictions are both x"),
        ("export", ["run", "--client", "0", "=3"], "'=3' has no key"),
        ("export", ["plain", "--client", "0"], "plain"),
        ("partition", ["resume=nowhere"], "resume=nowhere works only in python -m fedbench without"),
        ("partition", ["hydra.run.dir=x"], "hydra.run.dir=x works only in python -m fedbench without"),
        ("partition", ["algorithm=[a,b]"], "algorithm=[a,b] is a list"),
        ("partition", ["seed=1", "seed=2"], "seed is given twice"),
        ("partition", ["--figure", "picture"], "--figure picture must end in one of .png"),
        ("partition", ["--figure", "x.png", "--out", "x.png"], "--out and --figure are both x.png"),
        ("fid", ["--network", ""], "neither inception nor random"),
        ("fid", ["--network", "random", "--weights", "plain"], "--weights plain is for --network inception"),
        ("fid", ["--network", "random", "=3"], "'=3' has no key"),
        ("report", ["run", "--paper", ""], "--paper is empty: give it a value, as in --paper apple_practical"),
        ("report", ["run", "--metric", ""], "--metric is empty: give it a value, as in --metric accuracy"),
        ("report", ["run", "--group", ""], "--group is empty: give it a value, as in --group algorithm"),
        ("report", ["run", "--group", "seed,,rounds"], "--group seed,,rounds must be config keys separated by commas"),
        ("report", ["run", "--against", "", "--figures", "f"], "--against is empty: give it a value, as in"),
        ("report", ["run", "--choose", ""], "--choose is empty: give it a value, as in --choose optimizer.lr"),
        ("report", ["run", "--target", "-1"], "--target is -1; personal/accuracy is a fraction: give a value"),
        ("report", ["run", "--target", "nan"], "--target must be a number, got nan"),
        ("report", ["run", "--paper", "pgfed_table1_cifar", "--select", "best"], "cannot be combined with --select"),
        ("report", ["run", "--paper", "pgfed_table1_cifar", "--group", "seed"], "cannot be combined with --group"),
        ("report", ["run", "--figures", "plain"], "--figures plain cannot be made: File exists"),
        ("report", ["run", "--figures", ""], "--figures must name a folder"),
        ("figures", ["run", "--out", "plain/x"], "--out plain/x cannot be made: Not a directory"),
        ("figures", ["run", "--out", ""], "--out must name a folder"),
        ("figures", ["run", "--rounds", "-1"], "--rounds"),
        ("figures", ["run", "--target", "7"], "--target is 7; personal/accuracy is a fraction: give a value"),
        ("figures", ["run", "--rounds", "0,,1"], "must be integers >= 0 separated by commas"),
        ("figures", ["run", "--target", "nan"], "--target must be a number, got nan"),
        ("figures", [], "the following arguments are required: folders (see python -m fedbench figures --help)"),
        ("report", ["run", "--target", "x"], "argument --target: invalid float value: 'x'"),
        ("report", ["run", "--config-dir", "gone"], "argument --config-dir: no such folder: 'gone'"),
        ("paper", ["pgfed_table1", "run"], "table pgfed_table1: no such table; the nearest are pgfed_table1_cifar"),
    ],
)  # fmt: skip
def test_a_malformed_use_of_a_command(
    name: str, words: list[str], said: str, around: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, *words]) == 2
    out, error = capsys.readouterr()
    assert said in error and len(error.splitlines()) == 1 and out == ""
    assert {entry.name for entry in Path().iterdir()} <= {"run", "folder", "plain", "f"}
