"""Callbacks of a user's: the page's example holds, and each check finds the slip that it is for."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT

from fedbench import commands
from fedbench.core.options import ConfigError
from fedbench.simulation.callbacks.base import Callback
from fedbench.testing import callback, check_callback

PAGE = (ROOT / "docs" / "callbacks.md").read_text()


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


SLIPS = [
    (Raising, "hooks_succeed", "KeyError"),
    (Training, "results_stay", "differs from that of a run without"),
    (Rounding, "results_stay", "copy metrics"),
    (Pickled, "state_is_json", "PosixPath"),
    (Forgetful, "resume", "self.rounds is 1 after a resume, and 3 without an interruption"),
    (Late, "an_early_end_is_no_error", "last"),
    (Whole, "scores_that_are_not_finite", "NaN"),
]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slips, and the example of the page, as classes of a user's module."""
    module = ModuleType("my_callbacks")
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], vars(module))
    for slip, *_ in SLIPS:
        setattr(module, slip.__name__, slip)
        monkeypatch.setattr(slip, "__module__", "my_callbacks")
    monkeypatch.setitem(sys.modules, "my_callbacks", module)


def test_the_example_of_the_page_holds() -> None:
    check_callback("my_callbacks.BestRound").raise_if_broken()


@pytest.mark.parametrize("slip, check, words", SLIPS, ids=lambda x: x.__name__ if isinstance(x, type) else "")
def test_what_is_wrong_with_a_callback_is_named(slip: type, check: str, words: str) -> None:
    broken = check_callback(slip, only=[check]).broken
    assert check in broken and words in broken[check], broken


def test_every_check_of_callbacks_finds_a_slip() -> None:
    assert {check for _, check, _ in SLIPS} == set(callback.SUITE.checks)


def test_the_command_finds_a_callback_by_its_class_and_by_its_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "callbacks").mkdir()
    (tmp_path / "callbacks" / "best.yaml").write_text("best:\n  _target_: my_callbacks.BestRound\n")
    only = ["--only", "state_is_json"]
    assert commands.main(["check", "my_callbacks.BestRound", *only]) == 0
    assert commands.main(["check", "callbacks=best", "--config-dir", str(tmp_path), *only]) == 0
    assert capsys.readouterr().out.count("1 hold, 0 broken") == 2
    assert commands.main(["check", "callbacks=none"]) == 2
    assert "names 0 callbacks" in capsys.readouterr().err


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no callback"):
        check_callback("fedbench.engine.optim.SGD", {"lr": 1.0})
