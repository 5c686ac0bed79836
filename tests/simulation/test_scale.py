"""What a round costs depends on its cohort, not on how many clients there are; N x N methods say what they need."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tiny import CPU, HEAD, calls, engine_on, mlp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedbench.algorithms.apple import APPLE
from fedbench.algorithms.base import Algorithm
from fedbench.algorithms.fedamp import FedAMP
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedfomo import FedFomo
from fedbench.algorithms.fedper import FedPer
from fedbench.algorithms.pgfed import PGFed
from fedbench.algorithms.pgfed_ce import PGFedCE
from fedbench.core.options import ConfigError
from fedbench.core.rows import RowStore
from fedbench.core.split import Ragged
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.federation import Federation
from fedbench.nn.flat import FlatModel
from fedbench.simulation import build, evaluate
from fedbench.tasks.base import task_for

MANY = 3_000_000
COHORT, ROUNDS = 4, 3


def crowd(clients: int) -> Engine:
    """So many clients of two samples to train and one to test on, out of a hundred that they share."""
    rng = np.random.default_rng(0)

    def held(each: int) -> Ragged:
        return Ragged.from_sizes(np.arange(each * clients) % 100, np.full(clients, each))

    f = Federation(
        torch.from_numpy(rng.normal(size=(100, 1, 4, 4)).astype(np.float32)),
        torch.from_numpy(rng.integers(0, 3, 100)),
        {"train": held(2), "test": held(1), "val": held(0)},
        task_for("classification")(),
        3,
    )
    return engine_on(f, FlatModel(mlp(), HEAD, new_module=lambda *_: mlp()), cohort_size=COHORT)


class Numbers(TorchDispatchMode):
    """Counts the numbers that torch's operations return."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        self.count += sum(t.numel() for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, Tensor))
        return found


def least(work: Callable[[int], object]) -> tuple[int, int, int]:
    """What some rounds take: the fewest calls, and with them the fewest numbers that torch made and bytes that numpy
    held at once."""
    taken = []
    for r in range(ROUNDS):
        calls_made = calls(lambda r=r: work(r))
        tracemalloc.start()
        with Numbers() as numbers:
            work(r)
        taken.append((calls_made, numbers.count, tracemalloc.get_traced_memory()[1]))
        tracemalloc.stop()
    return min(taken)


@pytest.fixture(scope="module")
def crowds() -> list[Engine]:
    return [crowd(1000), crowd(MANY)]


@pytest.mark.parametrize("make", [FedAvg, FedPer])
def test_a_round_among_millions_costs_what_it_costs_among_a_thousand(
    make: Callable[[], Algorithm], crowds: list[Engine]
) -> None:
    """Training and evaluation of a few; the state holds no more than the rows that were written."""

    def ids(e: Engine, r: int) -> np.ndarray:
        return build.draw_cohort(0, r, e.federation.num_clients, COHORT)

    rounds, scores = [], []
    for e in crowds:
        algorithm = make()
        algorithm.setup(e.federation, e.model, e.rows)
        rounds.append(least(lambda r, a=algorithm, e=e: a.round(Cohort(e, ids(e, r), r))))
        scores.append(least(lambda r, a=algorithm, e=e: evaluate.personal(a, e, ids(e, r), 0, False)))
        assert all(r.used <= ROUNDS * COHORT and len(r.store) <= 2 * ROUNDS * COHORT for r in e.rows.all.values())
    for few, many in (rounds, scores):
        assert all(b < 1.5 * a for a, b in zip(few, many, strict=True)), (few, many)


def test_statistics_of_few_clients_are_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation of all clients computes the same scores for groups of clients as for all together."""
    e, algorithm = crowd(1000), FedPer()
    algorithm.setup(e.federation, e.model, e.rows)
    algorithm.round(Cohort(e, np.arange(COHORT), 0))
    together = evaluate.personal(algorithm, e, np.arange(1000), 0, False)
    sizes: list[int] = []
    of_cohort = Cohort.sample_statistics
    monkeypatch.setattr(evaluate, "MAX_CLIENTS", 128)
    monkeypatch.setattr(
        Cohort, "sample_statistics", lambda self, *args: (sizes.append(len(self)), of_cohort(self, *args))[1]
    )
    found = evaluate.personal(algorithm, e, np.arange(1000), 0, False)
    assert sizes == [128] * 7 + [104]
    for name, values in together.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)


N_BY_N = {
    "pgfed": PGFed,
    "pgfed_mo": partial(PGFed, beta=0.5),
    "pgfed_ce": PGFedCE,
    "fedfomo": FedFomo,
    "apple": APPLE,
    "apple, bandwidth": partial(APPLE, bandwidth=2),
}


@pytest.mark.parametrize("name", N_BY_N)
def test_a_matrix_between_clients_that_fits_nowhere_is_refused_in_numbers(
    name: str, crowds: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of millions of clients, before round 1; a few thousand are told what they take."""
    monkeypatch.setattr("fedbench.core.rows.disk_space", lambda: 100 << 30)

    def state(e: Engine) -> RowStore:
        algorithm = N_BY_N[name]()
        algorithm.check(e.federation, e.model, e.optimizer)
        store = RowStore(e.federation.num_clients, CPU, 10 << 30, 0, most=50_000)
        algorithm.setup(e.federation, e.model, store)
        return store

    with pytest.raises(ConfigError, match=r"3,000,000 (x 3,000,000 numbers|clients take).*lower partition.num_clients"):
        state(crowds[1])
    assert any("1,000 x 1,000 numbers, 3.8 MiB at most" in line for line in state(crowds[0]).plan())


def test_fedamp_says_what_comparing_everybody_takes(crowds: list[Engine], caplog: pytest.LogCaptureFixture) -> None:
    """8 bytes of each of 163 numbers: 3.6 GiB for 3,000,000 clients; nothing worth saying for a thousand."""
    caplog.set_level("INFO", "fedbench")
    for e, said in zip(crowds, (False, True)):
        FedAMP().setup(e.federation, e.model, RowStore(e.federation.num_clients, CPU, 10 << 30, 0))
        assert ("with all earlier participants (up to 3,000,000) and reads up to 3.6 GiB" in caplog.text) is said
