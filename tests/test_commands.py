"""The subcommands, and every command that README, CONTRIBUTING and docs/ print, with fewer rounds and smaller data.

The latter are marked slow: processes, one after the other in one folder, as a reader would type them.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image
from silo_files import make_table
from test_docs import PAGES, examples, files

import fedbench
from fedbench.app.help import SUBCOMMANDS
from fedbench.commands import main
from fedbench.config.conf_tree import conf_dirs
from fedbench.report import paper
from fedbench.report.method_figures import figure_title
from fedbench.report.runs import find_runs

NOT_HERE = {  # the commands that are not run, and why
    r"^pip install": "changes the environment",
    r"dataset=dtd": "downloads CLIP's weights and the pictures",
    r"sphinx-build": "tests/site/test_site.py builds the site",
}
FEWER = {  # by pattern, what a run is given, in place of its own word for the same key
    rf"-m fedbench( |$)(?!resume|{'|'.join(SUBCOMMANDS)})": [
        "rounds=1",
        "local.epochs=1",
        "hardware.executor=vmap",
        "tracking=disabled",
    ],
    r"num_clients=1000000": ["partition.num_clients=1000", "dataset.n=10000", "eval.clients=100"],
    r"tiny_clip": ["model.pretrained=null", "seed=0"],
    r"pgfed_table1_cifar(/| --run)|mine/": [  # of CIFAR-10
        *("dataset=generated", "dataset.subset=1", "partition.num_clients=4", "seed=0"),
        *("rounds=1", "local.epochs=1", "tracking=disabled"),
    ],
    r"new_clients": ["new_clients.epochs=1"],
    r"task=with_top2": ["output_dir=own_metric"],  # a report compares runs of one primary score
    r"image_folder|image_table": ["dataset.resize=16"],
    r"pytest": ["--collect-only"],
}
TUMOURS = ["dataset=tumours", "model=unet", "model.width=2", "partition=iid", "local.epochs=1"]
MNIST = re.compile(r"dataset=mnist")


def commands(page: Path) -> list[str]:
    """The commands of a page, without comments: lines of its bash blocks, and indented lines outside of blocks."""
    text = page.read_text().replace("\\\n", " ")
    shell = "".join(re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL))
    indented = "".join(re.findall(r"^    .*\n", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE))
    lines = re.findall(r"^ *((?:uv|pip|bash|python|torchrun) .*)$", shell + indented, re.MULTILINE)
    return [re.sub(r"\s{2,}#.*$|\s+# .*$", "", line).strip() for line in lines]


COMMANDS = [command for page in PAGES for command in commands(page)]


def test_commands_are_found() -> None:
    """A page that is laid out in another way shows here, not by silence."""
    assert len(COMMANDS) > 25
    assert all(any(re.search(pattern, command) for command in COMMANDS) for pattern in NOT_HERE)
    starts = {command.split()[0] for command in COMMANDS}
    assert starts == {"pip", "uv"}


def words_of(command: str, folder: Path) -> list[str]:
    """The words to run: this environment's programs, a run that is there for <time>, and less work."""
    for run in re.findall(r"\S*<time>", command):
        found = sorted(folder.glob(run.split("=")[-1].replace("<time>", "*")))
        command = command.replace("<time>", found[-1].name)
    words = shlex.split(command)
    assert words[:2] != ["uv", "pip"] and words[0] == "uv" and words[1] == "run", command
    program, *rest = words[2:]
    start = {
        "python": [sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "pytest": [sys.executable, "-m", "pytest"],
    }[program]
    fewer = [word for pattern, added in FEWER.items() if re.search(pattern, command) for word in added]
    replaced = {word.split("=")[0] for word in fewer}
    return [*start, *(word for word in rest if word.split("=")[0] not in replaced), *fewer]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the commands expect of the reader: files and a model of one's own."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3000, 8, 8)).astype(np.float32), np.arange(3000) % 10
    parts = {"train": slice(2500), "test": slice(2500, None)}
    images, labels = (
        {f"{n}_{what}": v[part] for n, part in parts.items()} for what, v in (("images", x), ("labels", y))
    )
    np.savez(tmp_path / "my.npz", **images, **labels)
    table, _ = make_table(tmp_path)
    table.rename(tmp_path / "my.csv")
    (tmp_path / "table.csv").write_text(
        "age,ward,label\n" + "".join(f"{i},{'ab'[i % 2]},{i // 300}\n" for i in range(600))
    )
    for source in examples((ROOT / "docs" / "formats.md").read_text()):
        if "np.save" in source:  # what writes the files of the next command
            subprocess.run([sys.executable, "-c", source], cwd=tmp_path, check=True)
    for part, some in parts.items():
        for i in range(5):
            path = tmp_path / "dataset" / "MNIST" / part / f"{i}.npz"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(path, data={"x": x[some][i::5], "y": y[some][i::5]})  # type: ignore[arg-type]
    (tmp_path / "lists.json").write_text(json.dumps([list(range(i, 1700, 5)) for i in range(5)]))
    for i, label in enumerate(y):
        path = tmp_path / "DIR" / f"class {label}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(path)
    make_nih(tmp_path / "nih", rng)
    for name, source in [of for page in PAGES for of in files(page.read_text()).items()]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    return tmp_path


def make_nih(folder: Path, rng: np.random.Generator) -> None:
    """Write pictures and a table of labels in the layout of NIH ChestX-ray14."""
    rows = ["Image Index,Finding Labels,Patient ID"]
    for i in range(200):
        name = f"{i // 2:08}_{i % 2:03}.png"
        path = folder / f"images_{1 + i // 100:03}" / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (16, 16), np.uint8)).save(path)
        rows.append(f"{name},{('No Finding', 'Mass', 'Mass|Nodule')[i % 3]},{i // 2}")
    (folder / "Data_Entry_2017.csv").write_text("\n".join(rows) + "\n")


@pytest.mark.slow
def test_every_command_of_the_pages_runs(folder: Path) -> None:
    """FEDBENCH_COMMANDS=REGEX runs those alone that match."""
    data = os.environ.get("FEDBENCH_DATA", str(ROOT.parent / "shared" / "data"))
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]),
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "disabled",
        "FEDBENCH_DATA": data,
    }

    def run(words: list[str]) -> subprocess.CompletedProcess[str]:
        cwd = ROOT if {"pytest", "scripts/audit_privacy.py", "scripts/benchmark.py"} & set(words) else folder
        return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=900, check=False)

    # whose outlines a page draws
    tumours = ["algorithm=pfednet", "rounds=1", "hydra.run.dir=runs/pfednet/tumours/first", *TUMOURS]
    assert run([sys.executable, "-m", "fedbench", *tumours, "tracking=disabled"]).returncode == 0
    failed, skipped = [], []
    for command in filter(re.compile(os.environ.get("FEDBENCH_COMMANDS", "")).search, COMMANDS):
        reasons = [why for pattern, why in NOT_HERE.items() if re.search(pattern, command)]
        if MNIST.search(command) and not (Path(data) / "mnist.npz").exists():
            reasons.append("downloads MNIST")
        if reasons:
            skipped.append(f"{command}: {reasons[0]}")
            continue
        done = run(words_of(command, folder))
        print(done.returncode, command)
        if done.returncode != 0:
            failed.append(f"{command}\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
    print(*skipped, sep="\n")
    assert not failed, "\n\n".join(failed)


# -- subcommands -----------------------------------------------------------------------------------------
USES = {  # a use of each, and what it prints; run: a finished run
    "report": (["run", "--format", "csv"], "method,"),
    "paper": (["pgfed_table1_cifar"], "cells are not run"),
    "figures": (["run", "--out", "drawn"], "figure: drawn"),
    "export": (["run", "--client", "0", "--out", "c.pt"], "c.pt: state_dict of client 0, 650 values"),
    "partition": (["partition.num_clients=3", "dataset.subset=0.2"], "3 clients, "),
    "check": (["partition=iid", "--only", "a_seed_repeats"], "a_seed_repeats"),
    "synthesize": (["--run", "gone"], "gone"),
    "fid": (["dataset=digits", "--network", "random"], "there are no extra images to compare"),
    "contours": (["run"], "run is a run of task=classification"),
    "tune": (["rounds=2", "dataset.val_fraction=0.2", "seed=0", "--trials", "1", "--test-seeds", "1"], "chosen values"),
    "options": (["server=momentum"], "server.beta="),
    "pages": (["write", "page", "run"], "page/README.md"),
}
MISTAKES = ("synthesize", "fid", "contours")  # the uses that are refused: a real one takes too long


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    shutil.copytree(ROOT / "tests" / "runs_of_0_1" / "runs" / "fedavg", folder / "run")
    return folder


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_a_subcommand_helps_and_works(
    name: str, finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(finished)
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert f"usage: python -m fedbench {name} " in capsys.readouterr().out
    words, printed = USES[name]
    assert main([name, *words]) == (2 if name in MISTAKES else 0)
    out, err = capsys.readouterr()
    assert printed in (err if name in MISTAKES else out)
    assert main([name, "--no-such-flag"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("fedbench: ") and err.endswith(f"(see python -m fedbench {name} --help)\n")
    assert err.count("\n") == 1


def test_the_help_of_a_subcommand_needs_no_torch() -> None:
    """Under half a second on an idle core: torch alone takes two."""
    code = """
import sys
from contextlib import suppress
from fedbench.commands import main
for name in sys.argv[1:]:
    with suppress(SystemExit):
        main([name, "--help"])
    assert "torch" not in sys.modules, name
"""
    done = subprocess.run([sys.executable, "-c", code, *SUBCOMMANDS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_help_lists_the_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, (_, what) in SUBCOMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(what)}$", out, re.MULTILINE)


def test_a_misspelt_subcommand_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reprot", "sweeps"]) == 2
    assert capsys.readouterr().err == "fedbench: reprot is not a subcommand: did you mean report or export?\n"


@pytest.mark.parametrize("name", ["report", pytest.param("export", marks=pytest.mark.slow)])
def test_the_former_names_work_and_name_the_new_form(name: str, finished: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words, printed = USES[name]
    command = [sys.executable, "-m", f"fedbench.{name}", *words]
    done = subprocess.run(command, cwd=finished, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, f"python -m fedbench.{name} is now called python -m fedbench {name}\n")
    assert printed in done.stdout


def test_no_other_module_is_a_command() -> None:
    package = ROOT / "fedbench"
    runnable = [path for path in package.rglob("*.py") if '__name__ == "__main__"' in path.read_text()]
    mains = set(package.rglob("__main__.py"))
    assert {p.relative_to(package).as_posix() for p in {*runnable, *mains}} == {
        "__main__.py",
        "report/__main__.py",
        "export.py",
    }


# -- options of the user's own ---------------------------------------------------------------------------
@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run of a method in --config-dir, whose class is not in the working directory."""
    folder = tmp_path_factory.mktemp("mine")
    options = {
        "algorithm/mine": "# MINE: nobody\n_target_: own_method.Mine\ndeploy: global\n",
        "partition/halves": "# In halves\n_target_: fedbench.partition.iid.IID\nnum_clients: 2\nseed: 7\n",
        "experiment/mine": "# @package _global_\npaper: {table: pgfed_table1_cifar, method: Mine}\n",
    }
    for name, text in options.items():
        path = folder / "here" / "options" / f"{name}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (folder / "lib").mkdir()
    (folder / "lib" / "own_method.py").write_text(
        "from fedbench.algorithms.fedavg import FedAvg\n\nclass Mine(FedAvg):\n    pass\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder / "lib"))
        patch.chdir(folder / "here")
        small = "model=logistic dataset.subset=0.1 rounds=1 local.epochs=1 tracking=disabled hardware.executor=vmap"
        words = ["algorithm=mine", "partition=halves", *small.split(), "--config-dir", "options", "hydra.run.dir=run"]
        assert main(words) == 0
        yield folder
        sys.modules.pop("own_method", None)


NAME_IT = "add algorithm._target_=own_method.Mine"
OWN_USES = {  # what a use prints with --config-dir, and without it
    "report": (["run"], "MINE", "mine"),
    "export": (
        ["run", "--client", "0"],
        "client0.pt: state_dict of client 0",
        NAME_IT,
    ),
    "partition": (["partition=halves", "dataset.subset=0.1"], "partition.seed=7", "partition=halves"),
    "check": (
        ["algorithm=mine", "--only", "a_seed_repeats"],
        "a_seed_repeats",
        "there is no option mine in conf/algorithm",
    ),
    "contours": (["run"], "task=classification", NAME_IT),
    "fid": (["--network", "run"], "there are no extra images to compare", NAME_IT),
    "synthesize": (["--run", "run"], "is a run of task=classification: choose a run of task=denoising", NAME_IT),
}


@pytest.mark.parametrize("name", OWN_USES)
def test_a_subcommand_knows_the_options_of_config_dir(
    name: str, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, with_it, without = OWN_USES[name]
    capsys.readouterr()
    main([name, *words, "--config-dir", "options"])
    assert with_it in "".join(capsys.readouterr())
    main([name, *words])
    printed = "".join(capsys.readouterr())
    assert without in printed and with_it not in printed


def test_figures_papers_and_python_know_the_options_of_config_dir(mine: Path) -> None:
    conf = tuple(conf_dirs("options"))
    (run,) = find_runs(["run"], "options")
    assert figure_title(run).startswith("MINE, ") and figure_title(find_runs(["run"])[0]).startswith("mine, ")
    assert "MINE" in fedbench.Runs([fedbench.load("run", config_dir="options")]).table()  # type: ignore[list-item]
    found = {experiment.name: experiment.paper for experiment in paper.experiments(conf)}
    assert found["mine"] == {"table": "pgfed_table1_cifar", "method": "Mine"} and "pgfed_table1_cifar/pgfed" in found
