"""A run's folder from somebody else runs nothing: its config neither trusts a pickle nor names a class by itself."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from fedbench.commands import main
from fedbench.config.targets import user_classes
from fedbench.core.options import ConfigError
from fedbench.core.settings import load_config
from fedbench.simulation.status import resume_command
from fedbench.tools import export, export_command

MARK = "open('ran', 'w').close()"
SMALL = ["model=logistic", "local.epochs=1", "tracking=disabled", "hardware.device=cpu", "hardware.executor=loop"]
NET = """
import subprocess
import torch

class Net(torch.nn.Linear):
    def __init__(self, input_shape, num_classes): super().__init__(64, num_classes)
    def forward(self, x): return super().forward(x.flatten(1))

def clean(command: str): subprocess.run(command, shell=True)
"""


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (MARK,)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "argv", ["fedbench"])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


def exported(*words: str) -> int:
    return export_command.main([*words])


def stored_with(run: Path, **values: Any) -> None:
    """Edit the config of a run as who gives it away could."""
    cfg = load_config(run / "config.yaml")
    for key, value in values.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, merge=False)
    OmegaConf.save(cfg, run / "config.yaml")


def test_a_pickle_is_trusted_by_the_command_alone(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lists = [list(range(900)), list(range(900, 1797))]
    Path("lists.pkl").write_bytes(pickle.dumps(lists))
    words = ["partition=file", "partition.path=lists.pkl", "partition.trust=lists.pkl"]
    assert main([*SMALL, *words, "rounds=1", "hydra.run.dir=run"]) == 0
    Path("lists.pkl").write_bytes(pickle.dumps([Evil(), *lists]))
    capsys.readouterr()
    asked = (
        "its config.yaml trusts lists.pkl, whose pickles may run code when they are read; if you know who wrote it, "
    )
    asked += "add partition.trust=lists.pkl to the command"
    assert main(["resume=run", "rounds=2"]) == 2
    assert asked in capsys.readouterr().err
    assert exported("run", "--client", "0", "--predictions", "p.npz") == 2
    assert asked in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"add partition\.trust=lists.pkl to the command"):
        export.client_state("run", 0)
    assert not Path("ran").exists() and not Path("client0.pt").exists()
    Path("lists.pkl").write_bytes(pickle.dumps(lists))
    assert resume_command(Path("run")).endswith("resume=run partition.trust=lists.pkl")
    assert main(["resume=run", "partition.trust=lists.pkl", "rounds=2"]) == 0
    assert json.loads(Path("run/summary.json").read_text())["rounds"] == 2
    assert exported("run", "--client", "0", "partition.trust=lists.pkl") == 0


@pytest.mark.parametrize(("value", "word"), [("PFL", "PFL"), (7, "7"), (True, "true")])
def test_a_stored_trust_of_data_is_asked_for_before_anything_is_read(
    value: Any, word: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path("run")
    run.mkdir()
    choices = {"dataset": "pfllib"}
    dataset = {"_target_": "fedbench.data.arrays.pfllib.PFLlib", "path": "PFL", "trust": value}
    OmegaConf.save(OmegaConf.create({"rounds": 1, "choices": choices, "dataset": dataset}), run / "config.yaml")
    assert main(["resume=run"]) == 2
    assert f"add dataset.trust={word} to the command" in capsys.readouterr().err
    assert main(["resume=run", "dataset.trust=other"]) == 2
    assert f"add dataset.trust={word} to the command" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "run", "is_own"),
    [
        ("run1.evil.Net", "run1", False),  # the folder lies where the command is typed
        ("run1.sub.evil.Net", "run1", False),
        ("evil.Net", "run1", False),  # by a search path that leads there
        ("got.run1.evil.Net", "got/run1", False),
        ("got.evil.Net", "got/run1", False),  # beside the run, in what it came in
        ("mine.subprocess.getoutput", "run1", False),  # of another module, by way of one's own
        ("mine.clean", "run1", False),  # no class
        ("fedbench.data._pickled.read_object", "run1", False),
        ("mine.Net", "run1", True),
        ("own.deep.mine.Net", "got/run1", True),
        ("own.deep.mine.Net", "../elsewhere", True),
    ],
)
def test_own_classes_are_defined_in_own_files(
    target: str, run: str, is_own: bool, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the file of the whole dotted path, of which nothing is imported."""
    evil = f"raise SystemExit('imported')\n{NET}"
    for path in ("run1/evil.py", "run1/sub/evil.py", "got/run1/evil.py", "got/evil.py", "mine.py", "own/deep/mine.py"):
        (here / path).parent.mkdir(parents=True, exist_ok=True)
        (here / path).write_text(evil)
    (here / "own" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.setattr(sys, "path", [*sys.path, str(here / "run1")])
    found = user_classes({"model": {"_target_": target}}, None, here / run)
    assert found == ([f"model._target_={target}"] if is_own else [])


def test_code_in_a_foreign_run_is_not_imported(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "mine.py").write_text(NET)
    own = "model._target_=mine.Net"
    assert main([*SMALL[1:], own, "rounds=1", "partition.num_clients=2", "hydra.run.dir=run1"]) == 0
    assert exported("run1", "--client", "0") == 0  # one's own needs no naming
    shutil.copytree("run1", "got/run1")
    for run in ("run1", "got/run1"):
        target = f"{run.replace('/', '.')}.evil.Net"
        (here / run / "evil.py").write_text(f"{MARK}\n{NET}")
        stored_with(here / run, model___target_=target)
        capsys.readouterr()
        assert exported(run, "--client", "1") == 2
        assert f"if you trust it, add model._target_={target} to the command" in capsys.readouterr().err
        assert main([f"resume={run}"]) == 2
        assert f"if you trust it, add model._target_={target} to the command" in capsys.readouterr().err
        stored_with(here / run, model___target_="mine.Net", optimizer__inner=[{"_target_": target}])
        assert main([f"resume={run}", own]) == 2
        assert f"add optimizer.inner.0._target_={target} to the command" in capsys.readouterr().err
    assert not Path("ran").exists() and not Path("client1.pt").exists()
