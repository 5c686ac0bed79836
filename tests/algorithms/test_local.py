"""Local: clients are independent."""

import numpy as np
import torch
from by_hand import COHORTS_OF_FOUR, B, W, descent, four_of_six, squares
from tiny import (
    close,
    deployed,
    equal,
    play,
)

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.local import Local


def test_local_trains_alone_and_when_sampled() -> None:
    e = squares(steps=2, cohort_size=2)
    rows = deployed(e, play(e, Local(), 3, [[0, 1], [1, 2], [0, 1]]))
    close(rows, torch.stack([descent(W, B[0], 4), descent(W, B[1], 6), descent(W, B[2], 2)]))


def test_local_does_not_see_the_others_data() -> None:
    one, other = four_of_six(), four_of_six()
    mine = other.federation.splits["train"][1]
    elsewhere = np.setdiff1d(np.arange(len(other.federation.targets)), mine)
    other.federation.inputs[torch.from_numpy(elsewhere)] += 1
    a, b = (deployed(e, play(e, Local(), 3, COHORTS_OF_FOUR)) for e in (one, other))
    equal(a[1], b[1])
    assert not torch.allclose(a[0], b[0])


def test_local_is_fedavg_local_without_aggregation() -> None:
    """Aggregation replaced by the identity: what a client sends back is what it gets again."""

    class Kept(FedAvg):
        def round(self, cohort):
            self.theta[cohort.ids] = cohort.train(self.theta[cohort.ids]).theta

    a, b = four_of_six(), four_of_six()
    equal(deployed(a, play(a, Local(), 4, COHORTS_OF_FOUR)), deployed(b, play(b, Kept("local"), 4, COHORTS_OF_FOUR)))
