"""``-m ... --dry-run``: what a sweep would do, without doing it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from fedbench.app.dry_run import BEGIN, Planned, _seconds_left
from fedbench.commands import main
from fedbench.core.lock import writing

RUN = ["-m", "algorithm=local,fedavg", "seed=0", "model=logistic", "tracking=disabled", "hardware=cpu", "sweep_dir=s"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def listed(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, list[str]]:
    """The lines of the table by the option of algorithm=, as words."""
    capsys.readouterr()
    assert main([*RUN, "--dry-run", *more]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("algorithm=")]
    return {re.split("[=,]", line)[1]: re.split("  +", line.strip()) for line in lines}


def test_states_of_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    name = "algorithm={},model=logistic,rounds=4,seed=0"
    assert listed(capsys, "rounds=4") == {
        method: [name.format(method), "to begin", "0 of 4", "unknown"] for method in ("local", "fedavg")
    }
    assert not (tmp_path / "s").exists()  # nothing is made
    assert main([*RUN, "rounds=4", "checkpoint.pause_after=2"]) == 0
    local, fedavg = (tmp_path / "s" / name.format(method) for method in ("local", "fedavg"))
    assert [words[1:3] for words in listed(capsys, "rounds=4").values()] == [["to resume", "2 of 4"]] * 2
    (local / "checkpoint.pt").write_bytes(b"")  # without a checkpoint it would begin again
    (local / "checkpoint.prev.pt").unlink(missing_ok=True)
    assert listed(capsys, "rounds=4")["local"][1:3] == ["to begin", "0 of 4"]
    assert main([*RUN, "rounds=4"]) == 0
    assert [words[1:] for words in listed(capsys, "rounds=4").values()] == [["finished", "4 of 4", "0 s"]] * 2
    with writing(fedavg):
        assert listed(capsys, "rounds=4")["fedavg"][1] == "in another process"
    shutil.copy(fedavg / "config.yaml", local / "config.yaml")
    assert "with other options" in listed(capsys, "rounds=4")["local"][-1]


def test_an_estimate_prefers_the_run_then_its_method() -> None:
    own = Planned("a", "fedavg", BEGIN, 2, 10, 3.0)
    same = Planned("b", "fedavg", BEGIN, 0, 10, None)
    other = Planned("c", "ditto", BEGIN, 0, 10, 7.0)
    new = Planned("d", "local", BEGIN, 0, 10, None)
    every = [own, same, other, new]
    assert [_seconds_left(run, every) for run in every] == [24.0, 30.0, 70.0, 50.0]
    assert _seconds_left(new, [new]) is None


@pytest.mark.parametrize("command", [["--dry-run"], [*RUN, "--json", "--dry-run"], ["-m", "--dry-run", "resume=x"]])
def test_refusals(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    assert "--dry-run lists what a sweep would do: use it with -m" in capsys.readouterr().err


def test_the_values_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "rounds=2,-1", "--dry-run"]) == 2
    assert "rounds" in capsys.readouterr().err
