"""Propose trials (choices of a method's options), and stop bad ones early by successive halving."""

from __future__ import annotations

import logging
import math
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fedbench.config.override_text import value_text
from fedbench.core.options import ConfigError
from fedbench.tune.space import Dimension, grid

SEARCHES = ("tpe", "random", "grid")
Values = dict[str, str]  # values of a trial in Hydra's grammar, by config key


class Proposer(Protocol):
    """Proposes the trials of one method."""

    def propose(self, count: int) -> list[Values]:
        """Return the values of the next trials, {dotted key: value as text} each.

        Args:
            count: The largest number of trials.  Fewer are returned, or [], if the search has no more.
        """
        ...

    def observe(self, scores: Sequence[float]) -> None:
        """Take the scores of trials, on which later proposals may depend.

        Args:
            scores: One score for each trial that the last `propose` returned, in its order.  Larger is better, and NaN
                stands for a failed trial.
        """
        ...


class Grid:
    """Propose the combinations of listed values, in random order if there are more than trials.

    Args:
        space: The search space.
        trials: The number of trials.
        seed: The seed of the order.
    """

    def __init__(self, space: Mapping[str, Dimension], trials: int, seed: int) -> None:
        combinations = grid(space)
        self.left = combinations if len(combinations) <= trials else random.Random(seed).sample(combinations, trials)

    def propose(self, count: int) -> list[Values]:
        """Return the next combinations of values, {dotted key: value as text} each.

        Args:
            count: The largest number of combinations.  Fewer are returned, or [], if no more are left.
        """
        proposed, self.left = self.left[:count], self.left[count:]
        return proposed

    def observe(self, scores: Sequence[float]) -> None:
        """Ignore the scores, because a grid does not depend on them."""


class Optuna:
    """Propose trials by a sampler of Optuna.  The first trial has the default values.

    Args:
        space: The search space.
        search: "tpe" (tree-structured Parzen estimator; Bergstra et al., NeurIPS 2011) or "random".
        default: The default values that lie in the search space, by config key.
        seed: The seed of the sampler.
    """

    def __init__(self, space: Mapping[str, Dimension], search: str, default: Mapping[str, Any], seed: int) -> None:
        try:
            import optuna
        except ImportError as error:
            raise ConfigError(
                f"--search {search} needs Optuna: pip install 'fedbench-pfl[tune]'; --search grid works without it"
            ) from error
        optuna.logging.set_verbosity(logging.WARNING)
        samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
        self.space = space
        self.study = optuna.create_study(direction="maximize", sampler=samplers[search](seed=seed))
        self.failed = optuna.trial.TrialState.FAIL
        self.asked: list[Any] = []
        if default:
            texts = {key: value_text(value) if space[key].values else value for key, value in default.items()}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                self.study.enqueue_trial(texts)

    def propose(self, count: int) -> list[Values]:
        """Return the values that Optuna suggests for the next ``count`` trials, {dotted key: value as text} each.

        Without options to search, the first call returns [{}], one trial with default values, and later calls [].
        """
        if not self.space and self.study.trials:
            return []
        self.asked = [self.study.ask() for _ in range(count if self.space else 1)]
        return [{key: _suggest(trial, item) for key, item in self.space.items()} for trial in self.asked]

    def observe(self, scores: Sequence[float]) -> None:
        """Pass scores to Optuna, from which its sampler proposes the next trials.

        Args:
            scores: The scores of the trials that `propose` returned last (``asked``), in the same order.  Larger is
                better, NaN for a failed trial.
        """
        for trial, score in zip(self.asked, scores, strict=True):
            if math.isnan(score):
                self.study.tell(trial, state=self.failed)  # Optuna's constant for a failed trial
            else:
                self.study.tell(trial, score)


def _suggest(trial: Any, item: Dimension) -> str:
    """Return the value that Optuna suggests for an option, as text in Hydra's grammar, such as "0.1".

    Args:
        trial: Optuna's trial.
        item: The option, with its values or interval.
    """
    if item.values:
        return str(trial.suggest_categorical(item.key, item.values))
    suggest = trial.suggest_int if item.integer else trial.suggest_float
    return value_text(item.rounded(suggest(item.key, item.low, item.high, log=item.log)))


def proposer(
    search: str, space: Mapping[str, Dimension], default: Mapping[str, Any], trials: int, seed: int = 0
) -> Proposer:
    """Return the object that proposes the trials of a search.

    Args:
        search: "tpe" (a sampler of Optuna that learns from scores), "random" or "grid" (all combinations of values).
        space: The search space of the method: from config key to the values to try.
        default: The default values that lie in the search space, by config key.
        trials: The number of trials.
        seed: The seed of random choices.
    """
    return Grid(space, trials, seed) if search == "grid" else Optuna(space, search, default, seed)


def rungs(rounds: int, trials: int, factor: int | None, every: int) -> list[int]:
    """Return the rounds after which trials are compared in successive halving, ascending; the last is ``rounds``.

    Each of these rungs has ``factor`` times the rounds of the one before.  There are as many as the trials suffice for,
    when one of ``factor`` trials goes on at each.

    Args:
        rounds: The number of rounds of a complete run.
        trials: The number of trials of a method.
        factor: One of ``factor`` trials goes on to the next rung; None: every trial is run completely.
        every: The number of rounds between evaluations.  Rungs are multiples of it.

    References:
        Jamieson and Talwalkar, AISTATS 2016.
    """
    ascending = [rounds]
    # at most log_factor(trials) rungs before the last; rounded, because log(9, 3) may be 1.9999999999999998
    while factor is not None and len(ascending) <= round(math.log(trials, factor), 9):
        earlier = math.ceil(rounds / factor ** len(ascending) / every) * every  # rounded up to an evaluation
        if earlier >= ascending[0]:  # by rounding
            break
        ascending.insert(0, earlier)
    return ascending


def promoted(scores: Sequence[float], factor: int) -> list[int]:
    """Return the indices of the best trials that go on, one of ``factor`` rounded up, the best first.

    Args:
        scores: The scores of the trials; larger is better.  Trials with NaN never go on.
        factor: One of ``factor`` trials goes on.
    """
    order = sorted((i for i, score in enumerate(scores) if not math.isnan(score)), key=lambda i: -scores[i])
    return order[: math.ceil(len(scores) / factor)]
