"""Attacks on uploads: rows by hand and as in ByzFL, honest rows untouched, knowledge, and rounds of one kind of client.

golden/byzfl_attacks.npz has results of ByzFL 0.0.11 on HONEST, written by:

    PYTHONPATH=tests/helpers uv run --with byzfl==0.0.11 python tests/attacks/test_uploads.py
"""

from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from tiny import close, equal
from torch import Tensor

from fedbench.aggregators._columns import weighted_median
from fedbench.aggregators.base import Aggregator
from fedbench.aggregators.median import Median
from fedbench.aggregators.trimmed_mean import TrimmedMean
from fedbench.attacks.alie import largest_z
from fedbench.attacks.base import Attack, Observed
from fedbench.attacks.foe import line_search
from fedbench.channel.attackers import Attackers
from fedbench.config.conf_tree import group_options, read_option
from fedbench.core.options import ConfigError
from fedbench.core.round_context import Mode, RoundContext
from fedbench.core.rows import RowStore
from fedbench.simulation.instantiate import make

CPU = torch.device("cpu")
N, F, P = 11, 3, 40
EVERYBODY = range(N)
IDS = np.array([1, 4, 8])  # the attackers among 0 to 10
HONEST_IDS = np.setdiff1d(np.arange(N), IDS)
REFERENCE = torch.linspace(-1, 1, P).double()
CHANGES = torch.from_numpy(np.random.default_rng(0).standard_normal((N, P)))  # float64
HONEST = CHANGES[HONEST_IDS]
UPLOADS = CHANGES + REFERENCE
ON_UPLOADS = [name for name in group_options("attack") if name not in ("none", "label_flip", "backdoor")]
NEEDS_HONEST = ["ipm", "alie", "foe", "mimic"]


def attack(name: str, **options: Any) -> Attack:
    """Return an attack with the options of conf/attack, but those given."""
    return make({**read_option(f"attack/{name}"), **options}, key="attack")


def context(ids: Any = EVERYBODY, round: int = 0, mode: Mode = "round", seed: int = 0) -> RoundContext:
    ids = np.array(list(ids))
    ones = np.ones(len(ids))
    return RoundContext(
        ids=ids,
        num_samples=ones.astype(np.int64),
        client_weights=ones,
        num_clients=N,
        round=round,
        mode=mode,
        seed=seed,
        device=CPU,
    )


class Run:
    """The uploads of a run with an attack."""

    def __init__(self, name: str, rule: Aggregator | None = None, ids: np.ndarray = IDS, **options: Any):
        self.attackers = Attackers(attack(name, **options), ids, RowStore(N, CPU, 1 << 20, 0), rule)

    def upload(
        self, value: Tensor = UPLOADS, of: Any = EVERYBODY, reference: Any = REFERENCE, call: int = 0, **how: Any
    ) -> Tensor:
        return self.attackers.upload(context(of, **how), "w", value, reference, call)


def rows(name: str, rule: Aggregator | None = None, **options: Any) -> Tensor:
    """Return the attackers' changes of a first round.  # [f, P]"""
    return (Run(name, rule, **options).upload() - REFERENCE)[IDS]


# -- rows by hand --------------------------------------------------------------------------------------------
def test_sign_flip_by_hand() -> None:
    close(rows("sign_flip", scale=3.0), -3 * CHANGES[IDS], 1e-12)


@pytest.mark.parametrize("epsilon", [0.1, 2.0])
def test_ipm_by_hand(epsilon: float) -> None:
    close(rows("ipm", epsilon=epsilon), -epsilon * HONEST.mean(0).expand(F, -1), 1e-12)
    close(rows("ipm", epsilon=epsilon, knows="own"), -epsilon * CHANGES[IDS].mean(0).expand(F, -1), 1e-12)


def test_alie_by_hand() -> None:
    """With the paper's z: s = floor(11/2 + 1) - 3 = 3, z = quantile((11 - 3 - 3) / (11 - 3)) = quantile(5/8)."""
    for knows, known in (("all", HONEST), ("own", CHANGES[IDS])):
        x = known.numpy()
        for z, used in ((None, NormalDist().inv_cdf(5 / 8)), (1.5, 1.5)):
            expected = torch.from_numpy(x.mean(0) - used * x.std(0)).expand(F, -1)
            close(rows("alie", z=z, knows=knows), expected, 1e-12)


@pytest.mark.parametrize(
    "n, f, fraction", [(50, 12, 24 / 38), (20, 4, 9 / 16), (10, 2, 0.5), (2, 1, 0.5), (3, 2, 0.5), (5, 3, 0.5)]
)
def test_z_of_the_paper(n: int, f: int, fraction: float) -> None:
    """n = 50 and f = 24 % is the paper's experiment.  Without a majority to form, z is 0 and not negative."""
    close(torch.tensor(largest_z(n, f)), torch.tensor(NormalDist().inv_cdf(fraction)), 1e-12)
    assert all(0 <= largest_z(a, b) < 10 for a in range(1, 40) for b in range(1, a + 1))


class Observes(Attack):
    """An attacker that only computes the server's aggregate."""

    def corrupt(self, o: Observed) -> Tensor:
        self.aggregate = o.aggregate(o.truthful)
        return o.truthful


@pytest.mark.parametrize("rule", [None, Median()])
def test_attackers_know_the_weights_of_the_clients(rule: Aggregator | None) -> None:
    weights, observes = np.arange(1.0, N + 1), Observes()
    of = replace(context(), client_weights=weights)
    Attackers(observes, IDS, RowStore(N, CPU, 1 << 20, 0), rule).upload(of, "w", UPLOADS, REFERENCE, 0)
    w = torch.from_numpy(weights / weights.sum())
    close(observes.aggregate, w @ CHANGES if rule is None else weighted_median(CHANGES, w), 1e-6)


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(f=3), None])
def test_foe_finds_the_factor_that_harms_most(rule: Aggregator | None) -> None:
    """No factor of a grid harms the rule more.  The mean has no maximum, so that the factor is the limit."""
    found, mean = rows("foe", rule, evaluations=40, largest=6.0), HONEST.mean(0)
    factors = found[0] / mean
    close(factors, factors[:1].expand(P), 1e-6)
    equal(found, found[:1].expand(F, -1))

    def harm(row: Tensor) -> float:
        all_rows = CHANGES.clone()
        all_rows[IDS] = row
        weights = torch.full((N,), 1 / N, dtype=torch.float64)
        rule_of = weights @ all_rows if rule is None else rule.aggregate(all_rows, weights, mean * 0, torch.arange(N))
        return float((rule_of - mean).norm())

    best = max(harm((1 - eta) * mean) for eta in np.linspace(0, 6, 61))
    assert harm(found[0]) >= 0.999 * best > 2 * harm(mean)
    if rule is None:
        close(factors[0], torch.tensor(-5.0).double(), 1e-9)


def test_foe_evaluates_the_rule_as_often_as_it_says() -> None:
    calls: list[float] = []
    line_search(lambda x: calls.append(x) or -abs(x - 3.5), 12, 100.0)  # type: ignore[func-returns-value]
    assert len(calls) == 12 and calls[:4] == [0.0, 1.0, 3.0, 7.0]
    close(torch.tensor(calls[4:6]), torch.tensor([3 + 3.2, 3 + 2.56]))
    close(torch.tensor(line_search(lambda x: -abs(x - 3.5), 60, 100.0)), torch.tensor(3.5), 0.1)


def test_mimic_of_a_given_client() -> None:
    close(rows("mimic", client=5), CHANGES[5].expand(F, -1), 1e-12)
    value = UPLOADS[HONEST_IDS[0] :][[0, 1, 4]]  # without client 5
    equal(Run("mimic", client=5).upload(value, [0, 1, 4]), value)


def test_mimic_follows_the_direction_of_largest_variance() -> None:
    """In the warm-up, the farthest client of a round is chosen.  Then the last choice stays."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.nn.functional.normalize(torch.randn(P, generator=generator, dtype=torch.float64), dim=0)
    run, end = Run("mimic", warmup=4), 1.0  # end: which end of the direction z points to
    for round, farthest in enumerate([6, 2, 5, 3, 0, 7]):
        along = torch.linspace(-0.5, 0.5, N).double()
        along[[farthest, 9]] = torch.tensor([3.0, -3.0]).double() * end
        value = along[:, None] * direction + 0.01 * torch.randn(N, P, generator=generator).double()
        sent = run.upload(value, reference=None, round=round)
        z = run.attackers.rows.all["attack/w/z"].whole()[0]
        assert abs(float(z @ direction)) > 0.99
        if round == 0:
            end = float(torch.sign(z @ direction))
            farthest = farthest if end > 0 else 9
        equal(sent[IDS], value[farthest if round < 4 else 3].expand(F, -1))
    ids = [0, 1, 2, 5]  # without client 3, the farthest one of the round
    sent = run.upload(value[ids], ids, None, round=9)
    equal(sent[1], value[[0, 2, 5][int((value[[0, 2, 5]] @ z).argmax())]])
    equal(run.attackers.rows.all["attack/w/z"].whole()[0], z)
    equal(run.upload(value, reference=None, round=10)[1], value[3])  # which is remembered


def test_mimic_first_round_by_hand() -> None:
    """z is unit(C^T C start) for centered changes C, and the mimicked client has the largest <d, z>."""
    run = Run("mimic")
    sent = run.upload()
    z = run.attackers.rows.all["attack/w/z"].whole()[0]
    centered = HONEST - HONEST.mean(0)
    close(z.norm(), torch.tensor(1.0).double(), 1e-9)
    residual = z - torch.linalg.lstsq(centered.T, z[:, None]).solution[:, 0] @ centered  # z is in the span of C
    assert float(residual.norm()) < 1e-6
    equal(sent[1], UPLOADS[HONEST_IDS[int((HONEST @ z).argmax())]])
    second = UPLOADS + 0.1
    run.upload(second, round=1)
    mean = (HONEST.mean(0) + (HONEST + 0.1).mean(0)) / 2
    moved = (HONEST + 0.1 - mean) @ z @ (HONEST + 0.1 - mean)
    expected = z / 2 + moved / moved.norm() / 2
    close(run.attackers.rows.all["attack/w/z"].whole()[0], expected / expected.norm(), 1e-9)


def test_gaussian_noise_is_keyed() -> None:
    """It depends on name, round, call, client and seed, and on nothing else."""
    found = rows("gaussian", std=2.0)
    assert 1.6 < float(found.std()) < 2.4 and abs(float(found.mean())) < 0.5
    others = [
        Run("gaussian", std=2.0).upload(round=1),
        Run("gaussian", std=2.0).upload(call=1),
        Run("gaussian", std=2.0).upload(seed=1),
        Run("gaussian", std=2.0).attackers.upload(context(), "v", UPLOADS, REFERENCE, 0),
    ]
    assert all(float((other[IDS] - REFERENCE - found).abs().min(1).values.max()) > 0 for other in others)
    assert not torch.equal(found[0], found[1])
    some = [1, 3, 8]  # the noise of a client does not depend on the others
    equal((Run("gaussian", std=2.0).upload(UPLOADS[some], some) - REFERENCE)[[0, 2]], found[[0, 2]])


# -- ByzFL ---------------------------------------------------------------------------------------------------
GOLDEN = Path(__file__).parents[1] / "golden" / "byzfl_attacks.npz"
SAMPLE_STD = (len(HONEST) / (len(HONEST) - 1)) ** 0.5  # ByzFL divides the variance by h - 1
BYZFL = [  # an attack, its options, and the same in ByzFL
    ("ipm", {"epsilon": 1.0}, "SignFlipping()"),
    ("ipm", {"epsilon": 0.3}, "InnerProductManipulation(tau=0.3)"),
    ("alie", {"z": 1.5 * SAMPLE_STD}, "ALittleIsEnough(tau=-1.5)"),
    ("mimic", {"client": int(HONEST_IDS[4])}, "Mimic(epsilon=4)"),
]
SEARCHED = "Optimal_InnerProductManipulation(agg=byzfl.TrMean(f=3), pre_agg_list=[], f=3, evals=20, delta=1.0)"


def write_golden() -> None:
    """Write what ByzFL returns for HONEST."""
    import byzfl  # type: ignore[import-not-found]

    names = [other for _, _, other in BYZFL] + [SEARCHED]
    np.savez_compressed(GOLDEN, **{n: eval(f"byzfl.{n}", {"byzfl": byzfl})(HONEST.numpy().copy()) for n in names})


@pytest.mark.parametrize("name, options, other", BYZFL)
def test_attacks_equal_byzfl(name: str, options: dict[str, Any], other: str) -> None:
    close(rows(name, **options), torch.from_numpy(np.load(GOLDEN)[other]).expand(F, -1), 1e-6)


def test_the_line_search_equals_byzfl() -> None:
    """ByzFL searches the factor of IPM, which is eta - 1."""
    mean, weights = HONEST.mean(0), torch.full((N,), 1 / N, dtype=torch.float64)

    def distance(tau: float) -> float:
        all_rows = torch.cat([HONEST, (-tau * mean).expand(F, -1)])
        return float((TrimmedMean(f=3).aggregate(all_rows, weights, None, torch.arange(N)) - mean).norm())

    found = line_search(distance, 20, 1e9)
    close(-found * mean, torch.from_numpy(np.load(GOLDEN)[SEARCHED]), 1e-6)


# -- honest rows and rounds ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ON_UPLOADS)
@pytest.mark.parametrize("shape", [(N, P), (N, 5, 8), (N,)])
def test_honest_rows_are_untouched(name: str, shape: tuple[int, ...]) -> None:
    """Also for uploads of other shapes, and references of one row per client or of none."""
    value = (UPLOADS[:, 0] if len(shape) == 1 else UPLOADS).reshape(shape).float()
    for reference in (None, value[0] * 0.3, value * 0.3):
        sent = Run(name).upload(value, reference=reference)
        assert sent.shape == value.shape and sent.dtype == value.dtype
        equal(sent[HONEST_IDS], value[HONEST_IDS])
        assert all(not torch.equal(sent[i], value[i]) for i in IDS)
        assert bool(torch.isfinite(sent).all())


@pytest.mark.parametrize("name", ON_UPLOADS)
def test_only_floating_point_uploads_of_rounds_with_attackers_change(name: str) -> None:
    run, ids = Run(name), [0, 2, 3]
    assert run.upload(UPLOADS[ids], ids).equal(UPLOADS[ids])
    counts = torch.arange(N)
    assert run.upload(counts, reference=None).equal(counts)
    assert run.upload(mode="evaluation").equal(UPLOADS)
    assert not run.attackers.rows.all


@pytest.mark.parametrize("name", ON_UPLOADS)
def test_rounds_without_honest_clients(name: str) -> None:
    """Attackers that need honest uploads are then honest themselves; with knows=own they are not."""
    sent = Run(name).upload(UPLOADS[IDS], IDS)
    assert sent.equal(UPLOADS[IDS]) == (name in NEEDS_HONEST)
    if name in ("ipm", "alie"):
        assert not Run(name, knows="own").upload(UPLOADS[IDS], IDS).equal(UPLOADS[IDS])
    one = Run(name, ids=IDS[:1]).upload(UPLOADS[:2], [0, 1])
    assert bool(torch.isfinite(one).all()) and one[0].equal(UPLOADS[0])


# -- the choice of attackers ---------------------------------------------------------------------------------
def test_attackers_are_a_fixed_fraction() -> None:
    chosen = [attack("alie", fraction=0.2).choose(seed, 20) for seed in range(5)]
    assert all(len(ids) == 4 and (np.diff(ids) > 0).all() for ids in chosen)
    assert len({tuple(ids) for ids in chosen}) > 1
    assert attack("foe", fraction=0.2).choose(3, 20).tolist() == chosen[3].tolist()
    sizes = {(f, n): len(attack("alie", fraction=f).choose(0, n)) for f, n in ((0.25, 10), (0.24, 10), (0.3, 7))}
    assert sizes == {(0.25, 10): 3, (0.24, 10): 2, (0.3, 7): 2}
    assert attack("alie", clients=[7, 3]).choose(0, 20).tolist() == [3, 7]
    assert not len(attack("alie", fraction=0.0).choose(0, 20)) and not len(attack("none").choose(0, 20))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"clients": [3, 20]}, r"attack\.clients=\[3, 20\] must be different training clients, from 0 to 19"),
        ({"clients": [3, 3]}, r"attack\.clients=\[3, 3\] must be different training clients"),
        ({"clients": list(range(20))}, "the attack has 20 attackers, but must leave one of the 20 training clients"),
        ({"fraction": 0.98}, "the attack has 20 attackers, but must leave one"),
        ({"fraction": 0.02}, r"attack\.fraction=0\.02 of 20 clients rounds to no client: use 0, or at least 0\.025"),
    ],
)
def test_impossible_attackers_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attack("alie", **options).choose(0, 20)


@pytest.mark.parametrize("client", [4, N])
def test_only_an_honest_client_is_mimicked(client: int) -> None:
    with pytest.raises(ConfigError, match=f"attack.client={client} must be an honest training client: choose one of 0"):
        attack("mimic", client=client).check(IDS, N)


if __name__ == "__main__":
    write_golden()
