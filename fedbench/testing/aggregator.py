"""Checks of aggregation rules on random uploads of N = 11 clients: symmetries, weights, wrong uploads, and no state.

Some checks have fewer clients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor

from fedbench.aggregators.base import Aggregator
from fedbench.core.rng import RowRandom
from fedbench.simulation.instantiate import make
from fedbench.testing import _probes as probes
from fedbench.testing._suite import Report, Suite
from fedbench.testing._targets import Target, described, path_of

N, SIZE = 11, 40  # clients, values of an upload
NUMBERS = (1, 2, 3, N)  # of clients
FAR = 1e6  # distance of a wrong upload
TOLERANCE = 1e-5  # of a rule's estimate, relative to the uploads


@dataclass
class AggregatorCase:
    """An aggregation rule to check, by its class and options."""

    values: dict[str, Any]

    def make(self) -> Aggregator:
        """Return a new object of the rule's class."""
        return make(self.values, key="aggregator")

    def estimate(
        self,
        rows: Tensor,
        weights: Tensor | None = None,
        center: Tensor | None = None,
        order: Tensor | None = None,
    ) -> Tensor:
        """Return the estimate of a new rule.

        Args:
            rows: The uploads.  # [n, p]
            weights: Their weights, with sum 1.  None: equal ones.  # [n]
            center: The value that the server sent.  None: there is none.  # [p]
            order: The positions of the rows in the order in which they fill buckets, groups of rows that the rule may
                average first.  None: 0 to n - 1.  # [n]
        """
        n = len(rows)
        weights = rows.new_full((n,), 1 / n) if weights is None else weights
        order = torch.arange(n, device=rows.device) if order is None else order
        return self.make().aggregate(rows, weights, center, order)


SUITE: Suite[AggregatorCase] = Suite("aggregator")


def check_aggregator(
    target: Target, options: Mapping[str, Any] | None = None, *, only: Iterable[str] | None = None
) -> Report:
    """Check an aggregation rule.

    Args:
        target: Its class, its dotted path, or the name of an option of conf/aggregator.
        options: Arguments of its constructor.
        only: The names of the checks to run; None runs all.

    Returns:
        The result of every check.

    Raises:
        ConfigError: The rule cannot be built.
    """
    # setting: the uploads, for the heading of the report
    setting = f"on uploads of {SIZE} values by at most {N} clients"
    return SUITE.run(path_of(target), setting, case_for(target, options), only)


def case_for(target: Target, options: Mapping[str, Any] | None = None) -> AggregatorCase:
    """Return the case that the checks receive: the rule, by its class and options.

    Args:
        target: Its class, its dotted path, or the name of an option of conf/aggregator.
        options: Arguments of its constructor.

    Raises:
        ConfigError: It cannot be built, or is not an Aggregator.
    """
    return AggregatorCase(described("aggregator", target, options, Aggregator))


def uploads(n: int = N, size: int = SIZE) -> Tensor:
    """Return random uploads, the same in each call, around a point that is not 0.  # [n, size]"""
    return RowRandom(torch.arange(n) + 17).normal(size) + RowRandom(torch.tensor([5])).normal(size)


def weights_of(n: int = N) -> Tensor:
    """Return unequal weights with sum 1, proportional to 1, 2, 3, 4, 1, 2 and so on.  # [n] float32"""
    weights = torch.arange(n) % 4 + 1.0
    return weights / weights.sum()


def _inputs_for_symmetry(case: AggregatorCase) -> tuple[Tensor, Tensor, Tensor]:
    """Return uploads [N, SIZE], weights [N] and the server's value [SIZE], for checks of symmetries.

    With pre="nnm" (nearest-neighbour mixing), weights are equal.  Mixing may give several clients the same row up to
    rounding, so that rounding would decide whose weight a rule leaves out.
    """
    weights = torch.full((N,), 1 / N) if case.make().pre == "nnm" else weights_of()
    return uploads(), weights, torch.zeros(SIZE)


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference of two tensors, divided by the largest absolute value of the second."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


# -- estimates -------------------------------------------------------------------------------------------
@SUITE.check
def the_estimate_is_like_an_upload(case: AggregatorCase) -> None:
    """The estimate is a finite tensor with the length, the type and the device of an upload, for any number of clients.

    Remedy: `combine` must return [p] for rows [m, p], also for m = 1, and make tensors like u.rows.
    """
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        # NUMBERS: numbers of clients n
        for n, size, dtype in itertools.product(NUMBERS, (1, SIZE), (torch.float32, torch.float64)):
            rows = uploads(n, size).to(device, dtype)
            for center in (None, rows.new_zeros(size)):
                found = case.estimate(rows, weights_of(n).to(rows), center)
                is_like = found.shape == (size,) and found.dtype == rows.dtype and found.device == rows.device
                text = f"{tuple(rows.shape)} {rows.dtype} on {device}"
                assert is_like, f"rows {text} give {tuple(found.shape)} {found.dtype} on {found.device}"
                assert torch.isfinite(found).all(), f"rows {text} give values that are not finite"


@SUITE.check
def inputs_are_unchanged(case: AggregatorCase) -> None:
    """Uploads, weights and the server's value are not changed.

    Remedy: copy them before writing.
    """
    rows, weights, center = uploads(), weights_of(), torch.zeros(SIZE)
    case.estimate(rows, weights, center)
    is_same = torch.equal(rows, uploads()) and torch.equal(weights, weights_of()) and not center.any()
    assert is_same, "an input is changed in place"


@SUITE.check
def calls_are_independent(case: AggregatorCase) -> None:
    """Equal uploads give equal estimates, whatever was combined before, and no global random generator is used.

    Remedy: keep no state, because a resumed run would not restore it.
    """
    rule, rows, order = case.make(), uploads(), torch.arange(N)
    states = probes.global_random_states()
    first = rule.aggregate(rows, weights_of(), torch.zeros(SIZE), order)
    used = probes.generators_used_since(states)
    assert not used, f"the global generator of {' and '.join(used)} is used"
    rule.aggregate(100 * rows[:5] + 3, weights_of(5), center=None, order=order[:5])  # other uploads
    second = rule.aggregate(rows, weights_of(), torch.zeros(SIZE), order)
    assert torch.equal(first, second), "the same uploads give another estimate after other uploads"


@SUITE.check
def equal_uploads_are_returned(case: AggregatorCase) -> None:
    """If all clients upload what the server sent, this is the estimate.

    Remedy: divide sums by the sum of the weights, and do not divide by a distance of 0.
    """
    x = uploads()[0]
    for n in NUMBERS:  # of clients
        found = case.estimate(x.expand(n, -1), weights_of(n), x)
        assert _distance(found, x) <= TOLERANCE, f"{n} equal uploads give another estimate"


# -- symmetries ------------------------------------------------------------------------------------------
@SUITE.check
def the_order_of_clients_does_not_matter(case: AggregatorCase) -> None:
    """The estimate does not depend on the order of the uploads, up to rounding.

    Remedy: do not use the position of a row.
    """
    rows, weights, center = _inputs_for_symmetry(case)
    # the order in which clients fill buckets, groups that the rule may average first: each keeps its clients
    reverse = torch.arange(N).flip(0)
    reversed_estimate = case.estimate(rows.flip(0), weights.flip(0), center, order=reverse)
    distance = _distance(reversed_estimate, case.estimate(rows, weights, center))
    assert distance <= TOLERANCE, (
        f"uploads in reverse order give an estimate that differs by {distance:.2g} of its values"
    )


@SUITE.check
def it_moves_with_the_uploads(case: AggregatorCase) -> None:
    """If a vector is added to all uploads and to the server's value, the estimate moves by this vector.

    Remedy: use differences, and u.center in place of 0.
    """
    (rows, weights, center), shift = _inputs_for_symmetry(case), 3 + uploads(1)[0]
    moved = case.estimate(rows + shift, weights, center + shift)
    distance = _distance(moved, case.estimate(rows, weights, center) + shift)
    assert distance <= 10 * TOLERANCE, f"moved uploads give an estimate that differs by {distance:.2g} of its values"


@SUITE.check
def it_scales_with_the_uploads(case: AggregatorCase) -> None:
    """If all uploads and the server's value are multiplied by a number, so is the estimate.

    Remedy: use no absolute numbers, or set `scale_free` to False on the object, for example for a norm in an option.
    """
    if not case.make().scale_free:
        raise SkipTest("its attribute `scale_free` is false")
    rows, weights, center = _inputs_for_symmetry(case)
    expected = case.estimate(rows, weights, center)
    for factor in (-2.0, 1e-2, 1e3):
        distance = _distance(case.estimate(factor * rows, weights, factor * center), factor * expected)
        found = (
            f"uploads that are multiplied by {factor:g} give an estimate that differs by {distance:.2g} of its values"
        )
        assert distance <= 10 * TOLERANCE, found


@SUITE.check
def weights_count_if_it_uses_them(case: AggregatorCase) -> None:
    """Other weights change the estimate if `uses_weights` is true, and do not if it is false.

    Remedy: set `uses_weights = False` on the class of a rule that does not read u.weights.
    """
    rows, center = uploads(), torch.zeros(SIZE)
    # weights=None: equal ones
    unweighted = case.estimate(rows, weights=None, center=center)
    changes = not torch.equal(case.estimate(rows, weights_of(), center), unweighted)
    uses = case.make().uses_weights
    assert changes == uses, f"`uses_weights` is {uses}, but other weights {'change' if changes else 'do not change'} it"


# -- wrong uploads ---------------------------------------------------------------------------------------
@SUITE.check
def f_is_below_half(case: AggregatorCase) -> None:
    """`max_f`, the largest number of wrong rows among m, is from 0 to less than m / 2; the rule works with this f.

    Remedy: no rule can withstand wrong uploads by half of the clients: return at most (m - 1) // 2.
    """
    rule = case.make()
    for m in range(1, 21):
        most = rule.max_f(m)
        assert 0 <= most <= (m - 1) // 2, f"max_f({m}) is {most}, not between 0 and {(m - 1) // 2}"
    rule.f = rule.max_f(N)
    found = rule.aggregate(uploads(), weights_of(), center=None, order=torch.arange(N))
    assert torch.isfinite(found).all(), f"with f={rule.f} of {N} clients, the estimate is not finite"


@SUITE.check
def wrong_uploads_do_not_move_it_far(case: AggregatorCase) -> None:
    """Wrong uploads by f clients leave the estimate near the correct ones.

    Remedy: for a fraction a of wrong uploads, keep the distance to the mean of the correct ones below
    2 (1 - a) / (1 - 2a) times that of the farthest correct one, or let `max_f` return less.
    """
    rule = case.make()
    m = math.ceil(N / rule.bucket_size) if rule.pre == "bucketing" else N  # rows that the rule combines
    wrong = min(rule.num_wrong(N), rule.max_f(m))  # as many as it assumes and can withstand
    if wrong == 0:
        raise SkipTest("with its options, it assumes no wrong upload")
    rows = uploads()
    correct, mean = rows[wrong:], rows[wrong:].mean(0)
    radius = (correct - mean).norm(dim=1).max()
    most = 2 * (1 - wrong / N) / (1 - 2 * wrong / N)
    for sign in (1, -1):
        for center in (None, mean):
            moved = torch.cat([rows[:wrong] + sign * FAR, correct])  # the first uploads are wrong ones
            found = case.estimate(moved, weights=None, center=center)
            radii = float((found - mean).norm() / radius)
            text = f"{wrong} wrong uploads of {N} at a distance of {FAR:g} in each value move the estimate by"
            assert radii <= most, (
                f"{text} {radii:.2g} times the radius of the correct ones; at most {most:.2g} is allowed"
            )
