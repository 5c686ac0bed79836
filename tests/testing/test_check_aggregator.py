"""Checks of a user's aggregation rule: a correct one passes, and each check finds its mistake."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest
import torch
from conftest import ROOT
from contract import assert_failed

from fedbench import commands
from fedbench.aggregators.base import Aggregator
from fedbench.aggregators.mean import Mean
from fedbench.aggregators.median import Median
from fedbench.aggregators.trimmed_mean import TrimmedMean
from fedbench.config.conf_tree import group_options
from fedbench.core.options import ConfigError
from fedbench.testing import aggregator, check_aggregator

PAGE = (ROOT / "docs" / "robust.md").read_text()
RECIPE = (ROOT / "docs" / "rules.md").read_text()


class Column(Median):
    """Has one row instead of a vector."""

    def combine(self, u):
        return super().combine(u)[None]


class Single(Median):
    """Has float32 values whatever the uploads have."""

    def combine(self, u):
        return super().combine(u).float()


class Divided(Median):
    """Divides by the number of other clients, which is 0 for one upload."""

    def combine(self, u):
        return super().combine(u) + 0 * u.rows.sum(0) / (len(u.rows) - 1)


class InPlace(TrimmedMean):
    """Clamps the uploads that it was given."""

    def combine(self, u):
        u.rows.clamp_(-1, 1)
        return super().combine(u)


class Momentum(Median):
    """Adds a tenth of its last estimate."""

    last: torch.Tensor | float = 0.0

    def combine(self, u):
        found = super().combine(u)
        self.last, found = found, found + 0.1 * (self.last if torch.is_tensor(self.last) else 0)
        return found


class Random(Median):
    """Takes a random upload."""

    uses_weights = False

    def combine(self, u):
        return u.rows[torch.randint(len(u.rows), ())]


class Unnormalized(Median):
    """Divides by the number of clients plus one."""

    def combine(self, u):
        return super().combine(u) * len(u.rows) / (len(u.rows) + 1)


class First(Median):
    """Takes the first upload."""

    uses_weights = False

    def combine(self, u):
        return u.rows[0].clone()


class Origin(Median):
    """Clips values to a multiple of the median norm, around 0 instead of the server's value."""

    def combine(self, u):
        return u.mean * (u.rows.norm(dim=1).median() / u.rows.norm(dim=1).max())


class Absolute(Median):
    """Rounds to tenths."""

    def combine(self, u):
        return (10 * super().combine(u)).round() / 10


class Unweighted(Median):
    """Takes the median of torch, and says that it uses weights."""

    def combine(self, u):
        return u.rows.median(0).values


class Optimistic(TrimmedMean):
    """Says that it withstands half of the clients."""

    def max_f(self, m):
        return m // 2


class Plain(Mean):
    """Says that it withstands wrong uploads, and is the mean."""

    def __init__(self, f=0.1):
        Aggregator.__init__(self, f)


class Inner(TrimmedMean):
    """Leaves out one value too few."""

    def combine(self, u):
        values = u.rows.sort(0).values[max(u.f - 1, 0) : len(u.rows) - u.f]
        return values.mean(0)


MISTAKES = [
    (Column, "the_estimate_is_like_an_upload", "give (1, 1) torch.float32"),
    (Single, "the_estimate_is_like_an_upload", "torch.float64 on cpu give (1,) torch.float32"),
    (Divided, "the_estimate_is_like_an_upload", "values that are not finite"),
    (InPlace, "inputs_are_unchanged", "in place"),
    (Momentum, "calls_are_independent", "another estimate after other uploads"),
    (Random, "calls_are_independent", "the global generator of torch"),
    (Unnormalized, "equal_uploads_are_returned", "1 equal uploads give another estimate"),
    (First, "the_order_of_clients_does_not_matter", "do not use the position of a row"),
    (Origin, "it_moves_with_the_uploads", "use differences"),
    (Absolute, "it_scales_with_the_uploads", "set `scale_free` to False"),
    (Unweighted, "weights_count_if_it_uses_them", "`uses_weights` is True, but other weights do not change it"),
    (Optimistic, "f_is_below_half", "max_f(2) is 1, not between 0 and 0"),
    (Plain, "wrong_uploads_do_not_move_it_far", "2 wrong uploads of 11 at a distance of 1e+06"),
    (Inner, "wrong_uploads_do_not_move_it_far", "times the radius of the correct ones"),
]


@pytest.fixture(autouse=True)
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the rule of the page importable."""
    module = ModuleType("my_aggregators")
    exec(re.search(r"```python\n# my_aggregators.py\n(.*?)```", RECIPE, re.DOTALL)[1], vars(module))
    monkeypatch.setitem(sys.modules, "my_aggregators", module)


def test_the_example_of_the_page_passes() -> None:
    report = check_aggregator("my_aggregators.Midrange", {"f": 2})
    report.raise_if_failed()
    assert report.passed == list(aggregator.SUITE.checks)


@pytest.mark.parametrize("cls, check, message", MISTAKES)
def test_a_mistake_is_found(cls: type, check: str, message: str) -> None:
    assert_failed(check_aggregator(cls, only=[check]), check, message)


def test_every_check_finds_a_mistake() -> None:
    assert {check for _, check, _ in MISTAKES} == set(aggregator.SUITE.checks)


def test_the_command_checks_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["check", "my_aggregators.Midrange", "f=1"]) == 0
    assert commands.main(["check", "aggregator=krum", "pre=nnm", "--only", "inputs_are_unchanged"]) == 0
    assert commands.main(["check", "aggregator=mean"]) == 0
    printed = capsys.readouterr().out
    assert "10 checks: 10 passed" in printed and "it assumes no wrong upload" in printed


def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["check", "my_aggregators.Midrange"]) == 0
    beginning, end = (RECIPE.partition("aggregator my_aggregators")[2].partition("```")[0]).split("  ...\n")
    printed = capsys.readouterr().out
    assert printed.startswith(f"aggregator my_aggregators{beginning}") and printed.endswith(end)
    assert len(beginning) > 200 and len(end) > 100


def test_other_classes_are_refused() -> None:
    with pytest.raises(ConfigError, match="is not a subclass of fedbench"):
        check_aggregator("fedbench.engine.optim.SGD", {"lr": 1.0})


def test_the_page_names_every_option() -> None:
    assert all(f"`{option}`" in PAGE for option in group_options("aggregator"))
