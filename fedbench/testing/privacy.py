"""An audit of central privacy: a lower bound of epsilon from an attack on many small runs.

The auditor plants a canary client, whose upload points where no other upload does.  In half of the runs the canary is
not in the federation.  An attacker guesses from the server's model whether it was.  With probability `CONFIDENCE`, the
rates of its errors exclude every epsilon below the bound (Jagielski, Ullman and Oprea, NeurIPS 2020).

The runs use `Cohort.upload` and `Cohort.mean`, as those of a method do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.stats import beta

from fedbench.channel.central import CentralPrivacy
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.federation import Federation
from fedbench.testing._federation import CPU, engine_on, ragged, seeded

CONFIDENCE = 0.95  # of the lower bound
LENGTH = 4  # numbers of an upload


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Attributes:
        epsilon: Epsilon of the accountant.
        lower_bound: The epsilon that the attack proves at least, with probability `CONFIDENCE`.
        runs: Number of runs with the canary, and without it, that were attacked.
    """

    epsilon: float
    lower_bound: float
    runs: int


def audit(
    noise_multiplier: float,
    rounds: int = 1,
    clients: int = 20,
    expected: float = 20.0,
    delta: float = 1e-2,
    runs: int = 2000,
    clip: float = 1.0,
    size: float = 10.0,
    applied: CentralPrivacy | None = None,
) -> Audit:
    """Attack runs of central differential privacy, and compare the proven lower bound with the accountant's epsilon.

    An attacker sees the final model, and guesses whether one client, the canary, was in the federation.

    Args:
        noise_multiplier: z, the standard deviation of the noise in units of the clipping norm.
        rounds: Rounds of a run.
        clients: Number of clients, the canary included.
        expected: Expected number of clients of a round.
        delta: Delta of (epsilon, delta)-privacy.
        runs: Number of attacked runs of each kind.  As many runs of each kind before them choose the threshold.
        clip: The clipping norm C.
        size: Norm of the canary's upload as a multiple of C.  More than 1 tests the clipping.
        applied: The mechanism that the runs apply.  None: the one that is accounted for.  Tests give a broken one.

    Returns:
        The accountant's epsilon and the lower bound.
    """
    federation = Federation.build(*ragged((2,) * clients, (2,)), CPU, normalize=True)  # two samples of two numbers
    e = engine_on(federation, seeded(lambda: torch.nn.Linear(2, 3)), rounds=rounds, client_weights="uniform")
    promised = CentralPrivacy(
        e.rows, clients, expected, rounds, noise_multiplier=noise_multiplier, delta=delta, clip=clip
    )
    e = replace(e, central=applied or promised)
    # the attacker's score of each run, which the canary makes larger
    scores = np.array(
        [
            [score(replace(e, seed=2 * run + has_canary), bool(has_canary), clip, size) for has_canary in (0, 1)]
            for run in range(2 * runs)
        ]
    )  # [2 runs, 2]: without and with the canary
    threshold = best_threshold(scores[:runs], delta)
    without, with_canary = (scores[runs:] > threshold).sum(0)
    bound = lower_bound(true_positives=int(with_canary), false_positives=int(without), n=runs, delta=delta)
    return Audit(promised.epsilon(rounds), bound, runs)


def score(e: Engine, has_canary: bool, clip: float, size: float) -> float:
    """Run the rounds of a small federation, and return the attacker's score, which the canary makes larger.

    Args:
        e: The engine, whose seed is new in each run.
        has_canary: Whether client 0, the canary, is in the federation.
        clip: The clipping norm C.
        size: Norm of the canary's upload as a multiple of C.
    """
    assert e.central is not None
    w = torch.zeros(LENGTH)
    for round in range(e.rounds):
        ids = e.central.draw_poisson(e.seed, round)  # the clients of the round
        cohort = Cohort(e, ids if has_canary else ids[ids > 0], round)
        received = cohort.broadcast(w=w).w
        change = torch.zeros(len(cohort), LENGTH)
        change[:, 1] = 0.5 * clip  # the others move along another axis than the canary, which moves along axis 0
        change[cohort.index == 0] = torch.eye(LENGTH)[0] * size * clip  # index: the client of each row
        up = cohort.upload(w=received + change, relative_to={"w": "w"})  # what is clipped is the change of w
        w = cohort.mean(up.w, updates="w")  # the broadcast w plus the noisy mean of the changes
    return float(w[0])


def best_threshold(scores: np.ndarray, delta: float) -> float:
    """Return the score above which guessing that the canary was there gives the largest bound.

    Args:
        scores: Scores of runs without and with the canary.  # [n, 2]
        delta: Delta.
    """
    n = len(scores)
    candidates = np.quantile(scores, np.linspace(0.005, 0.995, 199))  # at every half percent
    bounds = [lower_bound(int((scores[:, 1] > t).sum()), int((scores[:, 0] > t).sum()), n, delta) for t in candidates]
    return float(candidates[int(np.argmax(bounds))])


def lower_bound(true_positives: int, false_positives: int, n: int, delta: float) -> float:
    """Return the epsilon that an attack proves at least, with probability `CONFIDENCE`; 0 if it proves none.

    (epsilon, delta)-privacy implies TPR <= e^epsilon FPR + delta and TNR <= e^epsilon FNR + delta.  Clopper-Pearson
    intervals bound the rates.

    Args:
        true_positives: Number of runs with the canary in which the attacker guessed that it was there.
        false_positives: The same of the runs without it.
        n: Number of runs of each kind.
        delta: Delta.
    """
    level = (1 - CONFIDENCE) / 2  # half for each of the two rates
    bounds = [0.0]
    for hits, errors in ((true_positives, false_positives), (n - false_positives, n - true_positives)):
        least = beta.ppf(level, hits, n - hits + 1) if hits else 0.0  # of the rate of hits
        most = beta.ppf(1 - level, errors + 1, n - errors) if errors < n else 1.0  # of the rate of errors
        if least > delta:
            bounds.append(math.log((least - delta) / most))
    return max(bounds)
