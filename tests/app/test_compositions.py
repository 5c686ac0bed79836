"""How often a configuration is composed and checked between a command and its runs, and what these print."""

import os
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl

import fedbench
from fedbench.app import single
from fedbench.commands import main

QUICK = ["rounds=1", "tracking=disabled", "hardware.executor=vmap", "model.hidden=[4]", "partition.num_clients=4"]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, int]:
    """How often Hydra's loader has composed, and how often values were checked; the working directory is empty."""
    monkeypatch.chdir(tmp_path)
    counted = {"composed": 0, "checked": 0}
    compose, check = ConfigLoaderImpl.load_configuration, single.check

    def composing(*given: Any, **named: Any) -> Any:
        counted["composed"] += 1
        return compose(*given, **named)

    def checking(*given: Any) -> Any:
        counted["checked"] += 1
        return check(*given)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", composing)
    monkeypatch.setattr(single, "check", checking)
    return counted


def test_a_command_is_composed_and_checked_once(counts: dict[str, int]) -> None:
    assert main(QUICK) == 0
    assert counts == {"composed": 1, "checked": 1}


def test_a_run_from_python_is_composed_and_checked_once(counts: dict[str, int]) -> None:
    fedbench.run(*QUICK, seed=3, local={"epochs": 1})
    assert counts == {"composed": 1, "checked": 1}


def test_a_sweep_composes_each_cell_once(counts: dict[str, int]) -> None:
    assert main(["-m", *QUICK, "seed=0,1,2,3"]) == 0
    assert counts == {"composed": 5, "checked": 8}  # before the first one runs, and each cell by itself


def test_quiet_prints_the_final_table_only(counts: dict[str, int], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quiet", *QUICK]) == 0
    out = capsys.readouterr().out
    assert out.startswith("\npgfed on digits") and "round 1/1" not in out and "partition dirichlet" not in out
    assert main(["-q", "-m", *QUICK, "seed=0,1"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert lines[0] == "" and lines[1].startswith("run ") and not [line for line in lines if "run 1 of 2" in line]


def test_a_sweep_prints_one_line_for_each_cell(counts: dict[str, int], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", *QUICK, "seed=0,1"]) == 0
    before, _, table = capsys.readouterr().out.partition("\n\n")
    assert [line.split(":")[0] for line in before.splitlines()] == ["run 1 of 2", "run 2 of 2"]
    assert table.startswith("run ") and "2 runs: 2 finished" in table
    assert main(["-m", *QUICK, "seed=0,1"]) == 0
    before = capsys.readouterr().out.partition("\n\n")[0]
    assert [line.rpartition(": ")[2] for line in before.splitlines()] == ["finished already"] * 2


def test_no_environment_variable_is_a_messenger() -> None:
    package = Path(fedbench.__file__).parent
    text = {path: path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    for word in ("addaudithook", "FEDBENCH_SWEEP", "FEDBENCH_CELLS", "FEDBENCH_COMMAND", "ContextVar", "env_set"):
        assert not [path for path, source in text.items() if word in source], word
    assert not [key for key in os.environ if key.startswith("FEDBENCH_") and key != "FEDBENCH_DATA"]
