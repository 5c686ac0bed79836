"""Checks of a user's callback: a correct one passes, and each check finds its mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
from contract import assert_failed, import_example

from fedbench import commands
from fedbench.core.options import ConfigError
from fedbench.simulation.callbacks.base import Callback
from fedbench.testing import callback, check_callback


class Raising(Callback):
    """Asks for a score that there is none of."""

    def on_evaluation(self, run, metrics, clients):
        metrics["personal/f2"]


class Training(Callback):
    """Moves the server."""

    def on_round_end(self, run, costs):
        run.algorithm.w = run.algorithm.w + 0.1


class Rounding(Callback):
    """Rounds the run's own scores."""

    def on_evaluation(self, run, metrics, clients):
        for name, value in metrics.items():
            metrics[name] = round(value, 1)


class Pickled(Callback):
    """Saves a path."""

    def on_checkpoint(self, run):
        return {"folder": Path("runs")}


class Forgetful(Callback):
    """Counts the rounds of its process."""

    def __init__(self):
        self.rounds = 0

    def on_round_end(self, run, costs):
        self.rounds += 1


class Late(Callback):
    """Has no scores to print before the first evaluation."""

    def on_evaluation(self, run, metrics, clients):
        self.last = metrics

    def on_end(self, run, status, summary):
        print(self.last)


class Whole(Callback):
    """Takes every score for a finite number."""

    def on_evaluation(self, run, metrics, clients):
        int(100 * metrics["personal/accuracy"])


MISTAKES = [
    (Raising, "hooks_succeed", "KeyError"),
    (Training, "results_stay", "differs from that of a run without"),
    (Rounding, "results_stay", "copy metrics"),
    (Pickled, "state_is_json", "PosixPath"),
    (Forgetful, "resume", "self.rounds is 1 after resuming, and 3 without an interruption"),
    (Late, "an_early_end_is_no_error", "last"),
    (Whole, "scores_that_are_not_finite", "NaN"),
]


@pytest.fixture(autouse=True)
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    import_example(monkeypatch, "callbacks.md", "my_callbacks")


def test_the_example_of_the_page_passes() -> None:
    check_callback("my_callbacks.BestRound").raise_if_failed()


@pytest.mark.parametrize("cls, check, message", MISTAKES)
def test_a_mistake_is_found(cls: type, check: str, message: str) -> None:
    assert_failed(check_callback(cls, only=[check]), check, message)


def test_every_check_finds_a_mistake() -> None:
    assert {check for _, check, _ in MISTAKES} == set(callback.SUITE.checks)


def test_the_command_checks_callbacks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "callbacks").mkdir()
    (tmp_path / "callbacks" / "best.yaml").write_text("best:\n  _target_: my_callbacks.BestRound\n")
    only = ["--only", "state_is_json"]
    assert commands.main(["check", "my_callbacks.BestRound", *only]) == 0
    assert commands.main(["check", "callbacks=best", "--config-dir", str(tmp_path), *only]) == 0
    assert capsys.readouterr().out.count("1 passed, 0 failed") == 2
    assert commands.main(["check", "callbacks=none"]) == 2
    assert "defines 0 callbacks" in capsys.readouterr().err


def test_other_classes_are_refused() -> None:
    with pytest.raises(ConfigError, match="is not a subclass of fedbench"):
        check_callback("fedbench.engine.optim.SGD", {"lr": 1.0})
