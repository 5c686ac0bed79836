"""Proposed trials: planted optima are found, halving keeps the best, and a search is repeatable."""

import math

import pytest

from fedbench.tune.search import promoted, proposer, rungs
from fedbench.tune.space import Dimension

LR = {"optimizer.lr": Dimension("optimizer.lr", low=1e-4, high=10, log=True)}
LISTED = {"optimizer.lr": Dimension("optimizer.lr", ("0.001", "0.01", "0.1", "1"))}
PLANTED = 0.05


def score(values: dict[str, str]) -> float:
    return -(math.log(float(values["optimizer.lr"]) / PLANTED) ** 2)


def search(kind: str, space: dict[str, Dimension], trials: int, default: dict | None = None) -> list[dict[str, str]]:
    proposals, found = proposer(kind, space, default or {}, trials), []
    while batch := proposals.propose(min(1 if kind == "tpe" else trials, trials - len(found))):
        found += batch
        proposals.observe([score(values) for values in batch])
    return found


def test_a_planted_learning_rate_is_found_by_tpe() -> None:
    found = search("tpe", LR, 40)
    best = float(max(found, key=score)["optimizer.lr"])
    assert PLANTED / 1.3 < best < PLANTED * 1.3
    late = [score(values) for values in found[20:]]
    early = [score(values) for values in found[:10]]
    assert sum(late) / len(late) > sum(early) / len(early)  # it learns from the scores


def test_a_planted_value_is_found_by_grid() -> None:
    found = search("grid", LISTED, 4)
    assert max(found, key=score) == {"optimizer.lr": "0.1"} and len(found) == 4


def test_a_large_grid_is_sampled_without_repetition() -> None:
    found = search("grid", LISTED | {"a": Dimension("a", ("1", "2", "3"))}, 5)
    assert len(found) == len({tuple(values.items()) for values in found}) == 5


@pytest.mark.parametrize("kind", ["tpe", "random", "grid"])
def test_a_search_is_repeatable(kind: str) -> None:
    space = LISTED if kind == "grid" else LR
    assert search(kind, space, 4) == search(kind, space, 4)


@pytest.mark.parametrize("kind", ["tpe", "random"])
@pytest.mark.parametrize("space, default", [(LR, 0.02), (LISTED, 0.01)])
def test_the_first_trial_has_the_default_values(kind: str, space: dict[str, Dimension], default: float) -> None:
    assert search(kind, space, 3, {"optimizer.lr": default})[0] == {"optimizer.lr": str(default)}


@pytest.mark.parametrize("kind", ["tpe", "random", "grid"])
def test_a_method_without_options_has_one_trial(kind: str) -> None:
    proposals = proposer(kind, {}, {}, 5)
    assert proposals.propose(5) == [{}]
    proposals.observe([1.0])
    assert proposals.propose(4) == []


def test_a_failed_trial_is_not_repeated_as_the_best() -> None:
    proposals = proposer("tpe", LISTED, {}, 2)
    proposals.propose(1)
    proposals.observe([math.nan])
    assert proposals.propose(1)


@pytest.mark.parametrize(
    "rounds, trials, factor, every, expected",
    [
        (27, 27, 3, 1, [1, 3, 9, 27]),
        (27, 9, 3, 1, [3, 9, 27]),
        (27, 2, 3, 1, [27]),
        (20, 20, None, 1, [20]),
        (20, 8, 2, 5, [5, 10, 20]),
        (4, 100, 2, 1, [1, 2, 4]),
    ],
)
def test_rungs(rounds: int, trials: int, factor: int | None, every: int, expected: list[int]) -> None:
    assert rungs(rounds, trials, factor, every) == expected


def test_the_best_trials_go_on() -> None:
    assert promoted([0.1, 0.9, math.nan, 0.5], 2) == [1, 3]
    assert promoted([0.1, 0.9, 0.5, 0.2], 3) == [1, 2]
    assert promoted([math.nan, 0.3, math.nan], 1) == [1]
