"""Aggregation rules: equal to ByzFL, to NumPy by hand, and to their definitions with weights; robust and symmetric.

golden/byzfl.npz has results of ByzFL 0.0.11 on ROWS, written by:

    PYTHONPATH=tests/helpers uv run --with byzfl==0.0.11 python tests/aggregators/test_rules.py
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import close, equal
from torch import Tensor

from fedbench.aggregators import _columns
from fedbench.aggregators._columns import weighted_median
from fedbench.aggregators._mixing import bucket_means, mix_nearest, squared_distances
from fedbench.aggregators.base import Aggregator
from fedbench.config.conf_tree import group_options, read_option
from fedbench.core.options import ConfigError
from fedbench.simulation.instantiate import make

NAMES = group_options("aggregator")
ROBUST = [name for name in NAMES if name != "mean"]
TRIMMING = ["median", "trimmed_mean", "meamed", "krum", "multi_krum"]  # results are in the range of correct values
WEIGHTED = ["mean", "median", "trimmed_mean", "geometric_median", "centered_clipping", "norm_bound"]
PRE = ["none", "nnm", "bucketing"]
N, F, P = 11, 3, 40
ROWS = torch.from_numpy(np.random.default_rng(0).standard_normal((N, P)))  # float64
UNIFORM = torch.full((N,), 1 / N, dtype=torch.float64)
COUNTS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5])
ZERO = torch.zeros(P, dtype=torch.float64)


def rule(name: str, **options: Any) -> Aggregator:
    """Return a rule with the options of conf/aggregator, but those given."""
    f = {} if name == "mean" else {"f": F}
    return make({**read_option(f"aggregator/{name}"), **f, **options}, key="aggregator")


def combined(
    of: Aggregator, rows: Tensor = ROWS, weights: Tensor | None = None, center: Tensor | None = ZERO, order: Any = None
) -> Tensor:
    n = len(rows)
    weights = rows.new_full((n,), 1 / n) if weights is None else weights
    return of.aggregate(rows, weights, center, torch.arange(n) if order is None else order)


# -- other implementations -----------------------------------------------------------------------------------
BYZFL = [  # a rule, its options, and the same in ByzFL
    ("mean", {}, "Average()"),
    ("median", {}, "Median()"),
    ("trimmed_mean", {}, "TrMean(f=3)"),
    ("krum", {"neighbors": "n-f-1"}, "Krum(f=3)"),
    ("multi_krum", {"neighbors": "n-f-1"}, "MultiKrum(f=3)"),
    ("meamed", {}, "Meamed(f=3)"),
    ("geometric_median", {"nu": 0.1}, "GeometricMedian(nu=0.1, T=3)"),
    ("centered_clipping", {"tau": 2.0, "iterations": 4}, "CenteredClipping(L=4, tau=2.0)"),
    ("norm_bound", {"bound": 2.0}, "CenteredClipping(L=1, tau=2.0)"),
]
GOLDEN = Path(__file__).parents[1] / "golden" / "byzfl.npz"


def write_golden() -> None:
    """Write what ByzFL returns for the first n of ROWS, its mixed rows, and its buckets with their permutation."""
    import byzfl  # type: ignore[import-not-found]

    found = {}
    for n in (N, N - 1):
        for _, _, other in BYZFL:
            found[f"{n} {other}"] = eval(f"byzfl.{other}", {"byzfl": byzfl})(ROWS[:n].numpy().copy())
        found[f"{n} NNM"] = byzfl.NNM(f=F)(ROWS[:n].numpy().copy())
        for name, function in (("Bucketing", byzfl.Bucketing(s=3)), ("order", np.random.permutation)):
            np.random.seed(5)  # noqa: NPY002
            found[f"{n} {name}"] = function(ROWS[:n].numpy().copy() if name == "Bucketing" else n)
    np.savez_compressed(GOLDEN, **found)


@pytest.mark.parametrize("name, options, other", BYZFL)
@pytest.mark.parametrize("n", [N, N - 1])
def test_rules_equal_byzfl(name: str, options: dict[str, Any], other: str, n: int) -> None:
    close(combined(rule(name, **options), ROWS[:n]), torch.from_numpy(np.load(GOLDEN)[f"{n} {other}"]), 1e-6)


@pytest.mark.parametrize("n", [N, N - 1])
def test_mixing_and_buckets_equal_byzfl(n: int) -> None:
    golden = {name: torch.from_numpy(array) for name, array in np.load(GOLDEN).items()}
    weights = ROWS.new_full((n,), 1 / n)
    close(mix_nearest(ROWS[:n], weights, F), golden[f"{n} NNM"], 1e-6)
    means, weights = bucket_means(ROWS[golden[f"{n} order"]], weights, 3)
    close(means, golden[f"{n} Bucketing"], 1e-6)
    close(weights, torch.tensor([3, 3, 3, n - 9]).double() / n)


def test_krum_of_the_paper_by_hand() -> None:
    """The score sums n - f - 2 distances; f = 4 of 11 is the most."""
    x = ROWS.numpy()
    d = ((x[:, None] - x[None]) ** 2).sum(2)
    for f in range(5):
        scores = np.array([np.sort(np.delete(d[i], i))[: N - f - 2].sum() for i in range(N)])
        equal(combined(rule("krum", f=f)), ROWS[int(scores.argmin())])
        best = np.argsort(scores)[: N - f]
        close(combined(rule("multi_krum", f=f)), torch.from_numpy(x[best].mean(0)), 1e-12)
        close(combined(rule("multi_krum", f=f, m=2)), torch.from_numpy(x[best[:2]].mean(0)), 1e-12)
    assert rule("krum").max_f(N) == 4 and rule("krum", neighbors="n-f-1").max_f(N) == 5


def test_distances_are_exact_far_from_the_origin() -> None:
    rows = (ROWS * 1e-3 + 100).float()
    expected = (rows.double()[:, None] - rows.double()[None]).square().sum(2)
    close(squared_distances(rows), expected, 1e-9)


def test_meamed_prefers_the_smaller_of_two_values_at_the_same_distance() -> None:
    """The median is 1, and 0 is as near to it as 2; of four values, it is 3, and 2 and 4 are nearer than 0 and 6."""
    equal(combined(rule("meamed", f=1), torch.tensor([[2.0], [0.0], [1.0]]), center=None), torch.tensor([0.5]))
    rows = torch.tensor([[0.0], [2.0], [4.0], [6.0]])
    equal(combined(rule("meamed", f=1), rows, center=None), torch.tensor([2.0]))


# -- weights -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["mean", "median", "geometric_median", "centered_clipping", "norm_bound"])
def test_a_weight_of_three_is_three_equal_uploads(name: str) -> None:
    repeated = ROWS.repeat_interleave(COUNTS, 0)
    found = combined(rule(name), weights=COUNTS / COUNTS.sum().double())
    close(found, combined(rule(name), repeated), 1e-9)
    if name == "median":
        close(found, torch.from_numpy(np.median(repeated.numpy(), 0)), 1e-12)
    assert float((found - combined(rule(name))).abs().max()) > 1e-3


def test_weighted_median_between_two_halves() -> None:
    rows = torch.tensor([[3.0], [1.0], [10.0], [2.0]])
    close(weighted_median(rows, torch.tensor([0.25, 0.125, 0.25, 0.375])), torch.tensor([2.5]))
    close(weighted_median(rows, torch.tensor([0.25, 0.1, 0.25, 0.4])), torch.tensor([2.5]))
    close(weighted_median(rows, torch.tensor([0.3, 0.05, 0.3, 0.35])), torch.tensor([3.0]))


def test_weighted_trimmed_mean_by_hand() -> None:
    """Values are left out by their number, whatever their weights."""
    w = (COUNTS / COUNTS.sum()).double()
    order = ROWS.argsort(0)[F : N - F]  # [n - 2f, P]
    kept = w[order]
    close(combined(rule("trimmed_mean"), weights=w), (ROWS.gather(0, order) * kept).sum(0) / kept.sum(0), 1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pre", PRE)
def test_equal_weights_are_the_rule_without_weights(name: str, pre: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code for weights gives the same when all are equal.  With them, rules of `WEIGHTED` change."""
    of = rule(name, **({} if name == "mean" else {"pre": pre}))
    expected, with_weights = combined(of), combined(of, weights=(COUNTS / COUNTS.sum()).double())
    for module in (_columns, *[__import__(f"fedbench.aggregators.{m}", fromlist=["x"]) for m in ("trimmed_mean",)]):
        monkeypatch.setattr(module, "are_equal", lambda weights: False)
    close(combined(of), expected, 1e-9)
    assert of.uses_weights == (name in WEIGHTED)
    assert torch.equal(with_weights, expected) == (not of.uses_weights)


def test_mixing_with_weights_by_hand() -> None:
    w, d = (COUNTS / COUNTS.sum()).double(), torch.cdist(ROWS, ROWS)
    nearest = [d[i].argsort()[: N - F] for i in range(N)]
    close(mix_nearest(ROWS, w, F), torch.stack([(w[j] @ ROWS[j]) / w[j].sum() for j in nearest]), 1e-12)


# -- limits ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["trimmed_mean", "meamed", "multi_krum"])
def test_f_0_is_the_mean_bit_for_bit(name: str) -> None:
    rows, weights = ROWS.float(), UNIFORM.float()
    equal(combined(rule(name, f=0), rows, weights), weights @ rows)
    equal(combined(rule("multi_krum", m=N), rows, weights), weights @ rows)
    weights = COUNTS / COUNTS.sum()
    equal(combined(rule("trimmed_mean", f=0), rows, weights), weights @ rows)
    equal(mix_nearest(rows, weights, 0), (weights @ rows).expand(N, -1))


@pytest.mark.parametrize("name, option", [("centered_clipping", "tau"), ("norm_bound", "bound")])
@pytest.mark.parametrize("pre", ["none", "nnm"])
def test_a_large_radius_is_the_mean_bit_for_bit(name: str, option: str, pre: str) -> None:
    rows, w = ROWS.float(), COUNTS / COUNTS.sum()
    found = combined(rule(name, **{option: 1e9}, pre=pre, f=0), rows, w, ZERO.float())
    equal(found, w @ (rows if pre == "none" else (w @ rows).expand(N, -1)))


def test_a_large_smoothing_is_the_mean() -> None:
    w = (COUNTS / COUNTS.sum()).double()
    close(combined(rule("geometric_median", nu=1e9), weights=w), w @ ROWS, 1e-7)


@pytest.mark.parametrize("center", [None, ZERO])
def test_the_geometric_median_of_very_large_rows(center: Tensor | None) -> None:
    """In float32, the norms of rows of 1e25 are infinite."""
    expected = combined(rule("geometric_median"), center=center)
    found = combined(rule("geometric_median"), (ROWS * 1e25).float(), center=None if center is None else center.float())
    close(found.double() / 1e25, expected, 1e-5)
    wrong = ROWS.float().index_fill(0, torch.tensor([4]), 3e38)
    assert is_in_range(combined(rule("geometric_median"), wrong, center=ZERO.float()), ROWS[[0, 1, 2, 3]].float() * 2)


def test_the_norm_of_a_single_change_is_bounded() -> None:
    center = torch.ones_like(ZERO)
    moved = combined(rule("norm_bound", bound=0.5), ROWS[:1] * 1e6, center=center) - center
    close(moved.norm(), torch.tensor(0.5).double(), 1e-6)


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("pre", PRE)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_few_uploads(name: str, pre: str, n: int) -> None:
    """f is limited to what so few allow, and equal uploads are returned."""
    of = rule(name, pre=pre)
    assert torch.isfinite(combined(of, ROWS[:n])).all()
    close(combined(of, ROWS[:1].expand(n, -1), center=ROWS[0]), ROWS[0], 1e-9)


# -- what the rules are for ------------------------------------------------------------------------------------
def is_in_range(found: Tensor, honest: Tensor) -> bool:
    """Return whether an estimate is no farther from the mean of the honest rows than the farthest of them."""
    mean = honest.mean(0)
    return float((found - mean).norm()) <= float((honest - mean).norm(dim=1).max())


@pytest.mark.parametrize("pre", PRE)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("center", [None, ZERO])
def test_f_uploads_at_a_million_do_not_move_the_estimate_away(name: str, pre: str, center: Tensor | None) -> None:
    """They move the mean.  Two of seven buckets are wrong."""
    n, f = 14, 2
    rows = torch.cat([ROWS, ROWS[:3] + 0.1]).float()
    for sign in (1, -1):
        wrong = rows.clone()
        wrong[[4, 7]] += sign * 1e6
        honest = rows[[i for i in range(n) if i not in (4, 7)]]
        of = rule(name, **({} if name == "mean" else {"pre": pre, "f": f}))
        found = combined(of, wrong, center=None if center is None else center.float())
        assert is_in_range(found, honest) == (name != "mean")
        if name in TRIMMING:
            assert bool((found >= honest.min(0).values - 1e-6).all() and (found <= honest.max(0).values + 1e-6).all())


def with_wrong(wrong: Iterable[int], sign: int = 1) -> tuple[Tensor, Tensor]:
    """Return ROWS, in which some are equal and at a distance of a million, and the others alone."""
    rows, wrong = ROWS.clone(), list(wrong)
    rows[wrong] = ROWS[0] + sign * 1e6
    return rows, ROWS[[i for i in range(N) if i not in wrong]]


def distance_in_radii(found: Tensor, honest: Tensor) -> float:
    """Return the distance to the mean of the honest rows, divided by that of the farthest of them."""
    mean = honest.mean(0)
    return float((found - mean).norm() / (honest - mean).norm(dim=1).max())


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("f", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("sign", [1, -1])
def test_every_rule_withstands_f_wrong_uploads(name: str, f: int, sign: int) -> None:
    """For each f that it allows, n > 2f.  Rules that do not trim stay within the bound of the geometric median.

    It is 2 (1 - a) / (1 - 2a) times the radius of the honest rows, for a fraction a of wrong ones.
    """
    of = rule(name, f=f)
    if f > of.max_f(N):
        pytest.skip(f"{name} allows at most f={of.max_f(N)} of {N}")
    rows, honest = with_wrong(range(2, 2 + f), sign)
    found = combined(of, rows)
    if name in TRIMMING:
        assert bool(((found >= honest.min(0).values - 1e-9) & (found <= honest.max(0).values + 1e-9)).all())
    assert distance_in_radii(found, honest) <= 2 * (1 - f / N) / (1 - 2 * f / N)


BREAKS = [  # a rule, its f, and the smallest number of equal wrong rows among N that it does not withstand
    *(("mean", 0, 1), ("trimmed_mean", 3, 4), ("trimmed_mean", 5, 6), ("meamed", 3, 4), ("multi_krum", 3, 4)),
    *(("median", 0, 6), ("geometric_median", 0, 6), ("centered_clipping", 0, 6), ("norm_bound", 0, 6)),
    *(("krum", 2, 6), ("krum", 4, 6)),
]


@pytest.mark.parametrize("name, f, wrong", BREAKS)
def test_every_rule_breaks_where_theory_says(name: str, f: int, wrong: int) -> None:
    """One wrong row less does no harm.  The geometric median goes to the wrong rows in many iterations."""
    more = {"iterations": 300} if name == "geometric_median" else {}
    of = rule(name, **({} if name == "mean" else {"f": f}), **more)
    assert distance_in_radii(combined(of, *with_wrong(range(N - wrong, N))[:1]), ROWS[: N - wrong]) > 1000
    rows, honest = with_wrong(range(N - wrong + 1, N))
    assert distance_in_radii(combined(of, rows), honest) < 12


@pytest.mark.parametrize("name", ["median", "geometric_median", "centered_clipping", "norm_bound"])
@pytest.mark.parametrize("wrong, breaks", [((5, 7, 10), False), ((0, 1, 3, 6, 8, 9), False), ((2, 5, 7, 10), True)])
def test_attackers_with_less_than_half_of_the_weight_do_no_harm(
    name: str, wrong: tuple[int, ...], breaks: bool
) -> None:
    """Three of 11 clients have 20 of 44, six have 15, and four have 24."""
    weights = (COUNTS / COUNTS.sum()).double()
    assert (float(weights[list(wrong)].sum()) > 0.5) == breaks
    rows, honest = with_wrong(wrong)
    found = combined(rule(name, **({"iterations": 300} if name == "geometric_median" else {})), rows, weights)
    assert (distance_in_radii(found, honest) > 1000) == breaks


@pytest.mark.parametrize("name", ["centered_clipping", "norm_bound"])
@pytest.mark.parametrize("share", [0.001, 0.3, 0.6])
def test_the_median_distance_counts_the_weights_of_infinite_distances(name: str, share: float) -> None:
    """The norms of rows of 1e30 are infinite in float32.  Rows with most of the weight decide, whoever comes first."""
    weights = torch.tensor([0.001, 0.999 - share, share / 2, share / 2])
    for order in ([0, 1, 2, 3], [3, 2, 0, 1], [2, 0, 3, 1]):
        rows, center = ROWS[:4].float(), ZERO.float()
        rows[2:] = 1e30
        found = combined(rule(name), rows[order], weights[order], center)
        if share > 0.5:  # all distances are at most the median, which is infinite
            equal(found, weights[order] @ rows[order])
        else:
            assert float(found.norm()) <= float(rows[:2].norm(dim=1).max()) * 3


def test_a_number_bounds_how_far_any_upload_moves_the_estimate() -> None:
    """Also with a majority of wrong rows: tau in each iteration."""
    rows, _ = with_wrong(range(9))
    assert 1 < float(combined(rule("centered_clipping", tau=0.5), rows).norm()) <= 1.5 + 1e-9
    assert 0.4 < float(combined(rule("norm_bound", bound=0.5), rows).norm()) <= 0.5 + 1e-9


# rules that give the same bits for each order of clients: they select or sort values
SORTING = ["median", "krum", "meamed", "trimmed_mean"]


@pytest.mark.parametrize("pre", PRE)
@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_clients_does_not_matter(name: str, pre: str) -> None:
    """Bit for bit for rules that sort, else up to rounding."""
    generator = torch.Generator().manual_seed(1)
    permutation, order = torch.randperm(N, generator=generator), torch.randperm(N, generator=generator)
    w = COUNTS / COUNTS.sum()
    of, rows, center = rule(name, **({} if name == "mean" else {"pre": pre})), ROWS.float(), ZERO.float()
    same = torch.argsort(permutation)[order]  # the buckets have the same clients
    found = combined(of, rows[permutation], w[permutation], center, same)
    expected = combined(of, rows, w, center, order)
    close(found, expected, 1e-6)
    if pre == "none" and name in SORTING:
        equal(found, expected)


def test_weights_stay_with_values_that_are_sorted_by_their_bits() -> None:
    """On a CPU, float32 rows are sorted in another way than float64 ones: also zeros, equal and tiny values."""
    rows = torch.randn(300, 50, generator=torch.Generator().manual_seed(0))
    rows[:, 0], rows[:, 1], rows[::2, 2], rows[:, 3] = 0.0, -0.0, 1.0, rows[:, 3] * 1e-42
    rows[:, 4], rows[0, 5], rows[1, 5] = -rows[:, 4].abs(), 3.4e38, -3.4e38
    before, weights = rows.clone(), torch.rand(300, dtype=torch.float64)
    for of in (rows, rows.double()):
        ((values, w),) = _columns.sorted_with_weights(of, weights)
        equal(values.double(), rows.double().T.sort(1).values)
        for column in range(50):
            pairs = list(zip(values[column].tolist(), w[column].tolist()))
            assert sorted(pairs) == sorted(zip(rows[:, column].tolist(), weights.tolist()))
    equal(rows, before)


# -- options ---------------------------------------------------------------------------------------------------
def test_a_fraction_of_wrong_uploads_is_rounded_up() -> None:
    found = {f: combined(rule("trimmed_mean", f=f)) for f in (0, 1, 2, 3, 1 / 11, 0.1, 0.2, 0.45)}
    equal(found[1 / 11], found[1])
    equal(found[0.1], found[2])
    equal(found[0.2], found[3])
    close(found[0.45], combined(rule("median")))


@pytest.mark.parametrize("f", [0.5, 1.5])
def test_a_part_of_a_client_is_refused(f: float) -> None:
    with pytest.raises(ConfigError, match=f"aggregator.f={f} must be a whole number of clients, or a fraction"):
        rule("median", f=f)


@pytest.mark.parametrize("name", ["median", "geometric_median", "centered_clipping", "norm_bound"])
def test_a_fraction_is_not_checked_by_rules_that_do_not_use_it(name: str) -> None:
    """The default is one wrong upload of two.  With pre=nnm, f is used, and a number is a statement of the user."""
    rule(name, f=0.1).check(2)
    rule(name, f=0).check(1)
    for options in ({"f": 1}, {"f": 0.1, "pre": "nnm"}, {"f": 0.1, "pre": "bucketing"}):
        with pytest.raises(ConfigError, match="assumes 1 wrong upload, but with 2 clients"):
            rule(name, **options).check(2)
    with pytest.raises(ConfigError, match="assumes 1 wrong upload"):
        rule("trimmed_mean", f=0.1).check(2)


def test_too_many_wrong_uploads_are_refused() -> None:
    rule("trimmed_mean", f=2).check(5)
    rule("krum", f=0.2).check(5)
    with pytest.raises(
        ConfigError, match="f=3 assumes 3 wrong uploads, but with 5 clients a round this rule allows at"
    ):
        rule("trimmed_mean", f=3).check(5)
    with pytest.raises(ConfigError, match=r"allows at most 1: lower aggregator\.f, or raise clients_per_round"):
        rule("krum", f=2).check(5)
    with pytest.raises(ConfigError, match=r"f=0\.2 assumes 2 wrong uploads, but with 8 clients a round in 4 buckets"):
        rule("median", f=0.2, pre="bucketing").check(8)


if __name__ == "__main__":
    write_golden()


def test_buckets_keep_weights() -> None:
    """The mean of a bucket is weighted, and its weight is the sum of those of its uploads."""
    rows, weights = torch.tensor([[0.0], [10.0], [4.0]]), torch.tensor([0.1, 0.4, 0.5])
    means, of_buckets = bucket_means(rows, weights, 2)
    torch.testing.assert_close(means, torch.tensor([[8.0], [4.0]]))
    torch.testing.assert_close(of_buckets, torch.tensor([0.5, 0.5]))


def test_half_of_the_weight_is_found_despite_rounding() -> None:
    """In float32, 9/80 + 31/80 is less than 0.5; the median then is the mean of the two middle values."""
    counts = torch.tensor([9.0, 31.0, 22.0, 17.0, 1.0])
    rows = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0]])
    assert weighted_median(rows, counts / 80).tolist() == [1.5]
