"""FedRep: phases by hand, and the parameters that each phase leaves unchanged."""

import numpy as np
import torch
from by_hand import COHORTS, products, six_clients
from tiny import (
    all_clients,
    close,
    deployed,
    equal,
    play,
)

from fedbench.algorithms.fedbabu import FedBABU
from fedbench.algorithms.fedrep import FedRep
from fedbench.engine.optim import SGD, Adam
from fedbench.engine.training import LocalTraining


def test_fedrep_by_hand() -> None:
    """u = 1, h = 2, lr 0.1, c = (3, 5).  Head: h = 2 + 0.1 (1, 3) = (2.1, 2.3).  Base, at the new head:
    u = 1 + 0.1 (0.9 x 2.1, 2.7 x 2.3) = (1.189, 1.621), of mean 1.405."""
    e = products([3, 5], SGD(lr=0.1))
    close(deployed(e, play(e, FedRep())), torch.tensor([[1.405, 2.1], [1.405, 2.3]]))


def test_fedrep_keeps_counters_of_head_and_base_apart() -> None:
    """Adam's corrections of the base are by the steps of the base, round after round."""
    e = six_clients(Adam(lr=0.01, reset="never"))
    play(e, FedRep(head_epochs=3), 2)
    steps = all_clients(e).train(e.model.init_row()).steps[:, None]  # of an epoch
    of_head = torch.tensor([name.startswith("head.") for name in e.model.spans])  # [S]
    close(e.rows.all["optimizer/head/count"].whole(), torch.where(of_head, 6 * steps, 0))
    close(e.rows.all["optimizer/theta/count"].whole(), torch.where(of_head, steps, 3 * steps))  # and above


def test_fedrep_counts_both_kinds_of_epochs() -> None:
    e = six_clients(epochs=2)
    a = play(e, FedRep(head_epochs=3, body_epochs=1), rounds=0)
    cohort = all_clients(e)
    a.round(cohort)
    assert cohort.cost.samples == (3 + 1) * sum(e.federation.num_samples)


def test_fedrep_without_head_epochs_is_fedbabu() -> None:
    e, other = six_clients(SGD(lr=0.1, momentum=0.9), epochs=2), six_clients(SGD(lr=0.1, momentum=0.9), epochs=2)
    a, b = play(e, FedRep(head_epochs=0), 3, COHORTS), play(other, FedBABU(), 3, COHORTS)
    equal(a.u, b.base.take(b.w))
    equal(deployed(e, a, final=False), deployed(other, b, final=False))


def test_fedrep_phases_leave_the_other_part_alone() -> None:
    e = six_clients()
    head, base = e.model.columns["head"], e.model.without("head")
    first = all_clients(e).train(e.model.init_row(), columns=head, how=LocalTraining(key="head")).theta
    equal(base.take(first), base.take(e.model.init_row()).expand(6, -1))
    a = play(e, FedRep())
    equal(a.v[np.arange(6)], head.take(first))
    equal(a.u, all_clients(e).weights @ base.take(all_clients(e).train(first, columns=base).theta))
