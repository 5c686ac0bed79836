"""FedNTD: its limits, and what the distillation leaves alone."""

from types import SimpleNamespace

import pytest
import torch
from by_hand import COHORTS_OF_FOUR, LR, four_of_six, points
from tiny import HEAD, close, engine, equal, mlp, play, ragged

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedntd import FedNTD
from fedbench.core.options import ConfigError
from fedbench.engine.optim import SGD


def test_fedntd_without_its_term_is_fedavg_bit_for_bit() -> None:
    equal(
        play(four_of_six(), FedNTD(beta=0.0), 3, COHORTS_OF_FOUR).w, play(four_of_six(), FedAvg(), 3, COHORTS_OF_FOUR).w
    )
    assert (
        play(four_of_six(), FedNTD(), 3, COHORTS_OF_FOUR).w - play(four_of_six(), FedAvg(), 3, COHORTS_OF_FOUR).w
    ).abs().max() > 1e-3


def test_fedntd_with_one_local_step_is_fedavg() -> None:
    """The term and its gradient are 0 at theta = w, where the only step is taken."""
    a, b = (four_of_six(SGD(lr=LR), batch_size=100) for _ in range(2))
    close(play(a, FedNTD(beta=5.0), 3, COHORTS_OF_FOUR).w, play(b, FedAvg(), 3, COHORTS_OF_FOUR).w, 1e-6)


def test_fedntd_with_two_classes_is_fedavg() -> None:
    """One class is left without the true one, and its probability is 1."""
    a, b = (engine(*ragged(classes=2), mlp(classes=2), SGD(lr=LR), columns=HEAD, epochs=3) for _ in range(2))
    close(play(a, FedNTD(beta=5.0), 2).w, play(b, FedAvg(), 2).w, 1e-6)


@pytest.mark.parametrize("mask", [None, [[True, True, False, True]]])
def test_fedntd_ignores_the_true_class_and_classes_that_a_client_does_not_have(mask: list | None) -> None:
    """exp(log q) is the softmax of the logits / tau of the other classes."""
    batch = SimpleNamespace(y=torch.tensor([[1]]), class_mask=None if mask is None else torch.tensor(mask))
    logits = torch.tensor([[[1.0, 9.0, 2.0, 3.0]]], requires_grad=True)
    log_q = FedNTD(tau=2.0).not_true(logits, batch)  # type: ignore[arg-type]
    others = [0, 2, 3] if mask is None else [0, 3]
    close(log_q.exp()[0, 0, others], (logits[0, 0, others] / 2).softmax(0))
    assert not log_q.exp()[0, 0, 1]
    (g,) = torch.autograd.grad((torch.tensor([0.2, 0.0, 0.0, 0.8]) * log_q).sum(), logits)
    assert not g[0, 0, 1]
    assert g[0, 0, 0] and g[0, 0, 3]


def test_fedntd_refuses_targets_that_are_no_classes() -> None:
    with pytest.raises(ConfigError, match="algorithm=fedntd needs one class per sample"):
        play(points([[1.0]]), FedNTD())
