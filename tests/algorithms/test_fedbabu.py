"""FedBABU: rounds and fine-tuning by hand."""

import pytest
import torch
from by_hand import COHORTS, products, row, six_clients
from tiny import (
    close,
    deployed,
    equal,
    play,
)

from fedbench.algorithms.fedbabu import FedBABU
from fedbench.engine.optim import SGD


@pytest.mark.parametrize(
    "part, head, want",
    [
        ("all", "frozen", (1.42, 2.014)),
        ("head", "frozen", (1.4, 2.014)),
        ("base", "frozen", (1.42, 2.0)),
        ("all", "zero", (1.4, 0.21)),
    ],
)
def test_fedbabu_by_hand(part: str, head: str, want: tuple[float, float]) -> None:
    """u = 1, h = 2, lr 0.1, c = (3, 5):  u = 1 + 0.1 (1, 3) 2 = (1.2, 1.6), of mean 1.4; h stays.  Fine-tuning of
    client 0 with lr 0.05: error 2.8 - 3 = -0.2, u = 1.4 + 0.05 x 0.2 x 2, h = 2 + 0.05 x 0.2 x 1.4.  From h = 0:
    error -3, the gradient of u is 0, h = 0.05 x 3 x 1.4 = 0.21."""
    e = products([3, 5], SGD(lr=0.1))
    a = play(e, FedBABU(finetune_lr=0.05, finetune_part=part, finetune_head=head))
    close(deployed(e, a, final=False), torch.tensor([[1.4, 2.0]] * 2))
    close(deployed(e, a, final=True)[0], row(*want))
    close(a.global_row(), row(1.4, 2.0))  # and fine-tuning left the server alone


def test_fedbabu_never_trains_the_head() -> None:
    e = six_clients(SGD(lr=0.1, momentum=0.9, weight_decay=0.1), epochs=2)
    init, head = e.model.init_row(), e.model.columns["head"]
    a = play(e, FedBABU(finetune_epochs=0), 3, COHORTS)
    rows = deployed(e, a, final=True)
    equal(head.take(rows), head.take(init).expand(6, -1))
    assert (a.base.take(rows) != a.base.take(init)).all()
    equal(rows, a.global_row().expand(6, -1))  # E_ft = 0: [u, h_init]


def test_fedbabu_zero_head_gives_the_base_no_first_gradient() -> None:
    e = six_clients(batch_size=100)  # so that fine-tuning is one step
    a = play(e, FedBABU(finetune_head="zero", finetune_lr=0.1))
    rows = deployed(e, a)
    equal(a.base.take(rows), a.base.take(a.w).expand(6, -1))
    assert (a.head.take(rows) != 0).any(1).all()


def test_fedbabu_says_that_it_is_tuned_at_the_end() -> None:
    assert FedBABU().fine_tunes_after_training and not FedBABU(finetune_epochs=0).fine_tunes_after_training
