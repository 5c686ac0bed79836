"""What a run says of itself: each thing once, in lines that fit, in commands as the user types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import compose

from fedbench.core.split import Ragged, Split
from fedbench.core.suggest import suggested
from fedbench.data.base import Arrays
from fedbench.engine.federation import Federation
from fedbench.report.paper import commands
from fedbench.simulation.simulator import run
from fedbench.simulation.status import resume_command
from fedbench.simulation.summary import task_line
from fedbench.simulation.summary_text import clauses, ending, next_lines

OPTIONS = [
    *("dataset=digits", "model=logistic", "partition.num_clients=6", "clients_per_round=2", "rounds=2"),
    *("local.epochs=1", "tracking=disabled", "hardware.device=cpu", "eval.every=2"),
]


def said(caplog: pytest.LogCaptureFixture, folder: Path, *words: str, resume: bool = False) -> list[str]:
    """The lines of a run's log."""
    caplog.clear()
    caplog.set_level("INFO", "fedbench")
    folder.mkdir(exist_ok=True)
    run(compose([*OPTIONS, *words]), folder, resume)
    return [line for record in caplog.records for line in record.getMessage().splitlines()]


def test_a_run_that_goes_on_says_from_where(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    words = ["algorithm=fedavg", "hardware.executor=vmap"]
    first = said(caplog, tmp_path / "run", *words)
    assert not any("resuming" in line for line in first)
    again = said(caplog, tmp_path / "run", *words, "rounds=3", resume=True)
    assert again[0].endswith("; resuming after round 2 of 3")


@pytest.mark.parametrize("executor", ["auto", "loop"])
def test_the_first_lines_are_about_the_run(executor: str, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    lines = said(caplog, tmp_path / "run", f"hardware.executor={executor}")
    counts = np.array(json.loads((tmp_path / "run" / "partition.json").read_text())["label_counts"]).sum(0)
    listed = ", ".join(f"{digit} {n}" for digit, n in enumerate(counts))
    first = "pgfed on digits, dirichlet partition: 6 clients, 2 per round, 2 rounds, model logistic, seed 0"
    assert lines[0] == first
    assert f"classification: 10 classes; training samples: {listed}" in lines


def test_task_line_of_each_kind_of_targets() -> None:
    def line(targets: np.ndarray, **given: Any) -> str:
        n, kind = len(targets), given.pop("task")
        arrays = Arrays(np.zeros((n, 1, 2, 2), np.uint8), targets, np.zeros(n, np.int8), task=kind, **given)
        parts = [Ragged.from_lists([np.array(part)]) for part in (range(n - 1), [], [n - 1])]
        return task_line(Federation.build(arrays.check(), Split(*parts)))

    labels = np.array([0, 0, 3, 1])
    names = ["well", "ill", "dead", "x" * 30]
    assert line(labels, task="classification", num_classes=4, class_names=names) == (
        f"classification: 4 classes; training samples: well 2, ill 0, dead 0, {'x' * 24} 1; 2 without any"
    )
    shown = line(labels, task="classification", num_classes=12)
    assert shown.endswith("8 0, 9 0, ...; 10 without any")
    hot = np.eye(3, dtype=np.float32)[[0, 0, 1, 2]]
    assert line(hot, task="multilabel", num_classes=3) == (
        "multilabel: 3 labels; training samples: 0 2, 1 1, 2 0; 1 without any"
    )
    assert line(np.float32([1, 2, 3, 4]), task="regression", num_classes=1) == "regression: 1 number"
    masks = np.zeros((4, 2, 2), np.uint8)
    assert line(masks, task="segmentation", num_classes=2) == "segmentation: 2 classes"


@pytest.mark.parametrize("executor", ["auto", "loop"])
def test_the_executor_is_named_once(executor: str, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    lines = said(caplog, tmp_path / "run", f"hardware.executor={executor}")
    assert sum("; executor " in line for line in lines) == 1
    assert sum(line.startswith("executor ") for line in lines) == 0
    assert sum(line.startswith("executors timed: ") for line in lines) == (executor == "auto")


@pytest.mark.parametrize(("cohort", "clients", "hints"), [(1, 6, 1), (2, 6, 0), (1, 1, 0)])
def test_a_round_of_one_client_is_noted(
    cohort: int, clients: int, hints: int, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Where there are more to be had."""
    numbers = [f"clients_per_round={cohort}", f"partition.num_clients={clients}"]
    lines = said(caplog, tmp_path / "run", *numbers, "hardware.executor=loop")
    assert sum("a round has one client" in line for line in lines) == hints


def test_what_noise_promises_is_said_in_lines(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """At the start and at the end, the same words."""
    lines = said(caplog, tmp_path / "run", "privacy.epsilon=1", "hardware.executor=loop")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    whole = summary["privacy"]["guarantee"]
    first, *rest = clauses(whole)
    assert len(rest) >= 3
    at = lines.index(f"privacy: {first}")
    assert lines[at + 1 : at + 1 + len(rest)] == [f"  {clause}" for clause in rest]
    ending(summary, tmp_path / "run")
    closing = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(closing) if line.startswith("  privacy: ") and line.endswith(first))
    assert closing[at + 1 : at + 1 + len(rest)] == [f"    {clause}" for clause in rest]


def test_a_sentence_breaks_at_its_semicolons() -> None:
    assert clauses("a, b; c; d") == ["a, b;", "c;", "d"] and clauses("a") == ["a"]


def test_commands_are_suggested_as_they_are_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With `uv run` where that started the process, also where Python is in other hands."""
    summary = {"algorithm": "pgfed", "dataset": "digits"}
    for start, value in (("python -m", ""), ("uv run python -m", "/bin/uv")):
        monkeypatch.setenv("UV", value)
        assert all(line.startswith(f"  {start} fedbench") for line in next_lines(summary, tmp_path))
        assert resume_command(tmp_path).startswith(f"{start} fedbench ")
        assert suggested("python -m fedbench") == f"{start} fedbench"
    assert commands("t", [], []) == ["Every cell has a run."]


def test_the_comparison_that_is_suggested_is_of_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its data, files and options, also those of a --config-dir; not its method, seed or folder."""
    monkeypatch.setenv("UV", "")
    monkeypatch.chdir(tmp_path)
    run_dir, hydra = tmp_path / "run", tmp_path / "run" / ".hydra"
    hydra.mkdir(parents=True)
    summary = {"algorithm": "nova", "dataset": "npz"}
    given = ["algorithm=nova", "algorithm.mu=1", "seed=3", "hydra.run.dir=run", "dataset=npz", "dataset.path=a b.npz"]
    (hydra / "overrides.yaml").write_text("".join(f"- {word}\n" for word in [*given, "+experiment=debug"]))
    sources = [{"path": "/else/conf", "provider": "main"}, {"path": str(tmp_path / "mine"), "provider": "command-line"}]
    (hydra / "hydra.yaml").write_text(json.dumps({"hydra": {"runtime": {"config_sources": sources}}}))
    [line] = [line for line in next_lines(summary, run_dir) if "compare methods" in line]
    assert line.split("  ")[1] == (
        "python -m fedbench --config-dir mine -m algorithm=local,fedavg,nova seed=0,1,2 dataset=npz "
        "'dataset.path=a b.npz' +experiment=debug"
    )
