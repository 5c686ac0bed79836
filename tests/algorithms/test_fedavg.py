"""FedAvg and FedAvg-local: client weights, limits, and rounds by hand."""

import numpy as np
import torch
import torch.nn.functional as F
from by_hand import LR, B, P, W, descent, four_of_six, squares
from tiny import (
    all_clients,
    close,
    deployed,
    engine,
    equal,
    mlp,
    play,
    ragged,
)

from fedbench.algorithms.fedavg import FedAvg
from fedbench.engine.cohort import Cohort
from fedbench.engine.optim import SGD


def test_fedavg_by_hand() -> None:
    """theta_i = b_i + 0.9^2 (w - b_i);  w <- sum p_i theta_i with p = n_i / n = (1, 3, 2) / 6; twice."""
    e = squares(steps=2)
    algorithm, w = play(e, FedAvg(), 2), W
    for _ in range(2):
        w = P @ descent(w, B, 2)
    close(algorithm.w, w)
    equal(deployed(e, algorithm), algorithm.w.expand(3, -1))


def test_fedavg_weights_are_those_of_the_cohort() -> None:
    e = squares()
    w = play(e, FedAvg(), 1, [[0, 2]]).w
    close(w, torch.tensor([1 / 3, 2 / 3]) @ descent(W, B[[0, 2]], 1))


def test_fedavg_with_one_full_batch_step_is_gradient_descent_on_the_union() -> None:
    """sum q_i grad f_i is the gradient of the mean loss over everybody's samples."""
    e = four_of_six(SGD(lr=LR), batch_size=100)
    w = play(e, FedAvg(), 3).w
    index = torch.from_numpy(e.federation.splits["train"].indices)
    x, y = e.federation.gather(index)
    row = e.model.init_row()
    for _ in range(3):
        row = row.detach().requires_grad_()
        row = row - LR * torch.autograd.grad(F.cross_entropy(e.model.predict(row, x), y), row)[0]
    close(w, row.detach())


def test_fedavg_with_one_client_is_centralized_sgd() -> None:
    """N = 1: the rounds are the epochs of a plain loop, momentum kept."""
    arrays, split = ragged(sizes=(17,))
    e = engine(arrays, split, mlp(), SGD(lr=LR, momentum=0.9, reset="never"))
    w = play(e, FedAvg(), 3).w
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), LR, 0.9)
    for r in range(3):
        batches: list = []
        all_clients(e, r, "trial").train(w, step=lambda s, b: batches.append((b.x[0], b.y[0], b.counts[0])))  # noqa: B023
        for x, y, n in batches:
            optimizer.zero_grad()
            F.cross_entropy(module(x[:n]), y[:n]).backward()
            optimizer.step()
    close(w, torch.cat([p.detach().reshape(-1) for p in module.parameters()]))


def test_fedavg_of_one_sampled_client_is_its_sgd() -> None:
    e = four_of_six()
    algorithm = play(e, FedAvg(), 1, [[3]])
    close(algorithm.w, Cohort(four_of_six(), np.array([3]), 0).train(e.model.init_row()).theta[0])


def test_fedavg_local_deploys_what_a_client_last_trained() -> None:
    """By hand: round 1 with clients 0 and 1, round 2 with 1 and 2; client 0 keeps its first model."""
    e = squares(cohort_size=2)
    algorithm = play(e, FedAvg("local"), 2, [[0, 1], [1, 2]])
    w1 = torch.tensor([1 / 4, 3 / 4]) @ descent(W, B[:2], 1)
    close(deployed(e, algorithm), torch.stack([descent(W, B[0], 1), descent(w1, B[1], 1), descent(w1, B[2], 1)]))
    equal(algorithm.w, play(squares(cohort_size=2), FedAvg(), 2, [[0, 1], [1, 2]]).w)
    before = play(squares(cohort_size=2), FedAvg("local"), 1, [[0, 1]])
    equal(before.theta[np.array([2])][0], W)


def test_a_client_of_no_weight_changes_nothing() -> None:
    """As n_i / n goes to 0 a client disappears from the mean: one sample against ten thousand."""
    arrays, split = ragged(sizes=(1, 10_000))
    e = engine(arrays, split, mlp(), batch_size=10_000)
    both = play(e, FedAvg()).w
    alone = Cohort(e, np.array([1]), 0).train(e.model.init_row()).theta[0]
    close(both, alone, 1e-4)
