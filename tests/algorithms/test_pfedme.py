"""pFedMe: steps by hand, its limits, and its proximal point."""

import pytest
from by_hand import Normed, points, row, six_clients
from tiny import (
    HEAD,
    all_clients,
    close,
    deployed,
    engine,
    play,
    ragged,
    seeded,
)

from fedbench.algorithms.pfedme import PFedMe
from fedbench.core.options import ConfigError
from fedbench.engine.optim import SGD


@pytest.mark.parametrize("deploy, want", [("theta", 0.2822), ("w", 0.1836)])
def test_pfedme_by_hand(deploy: str, want: float) -> None:
    """w = 0, c = 1, lam 2, lr 0.25, inner lr 0.1, two inner steps, two batches, beta 0.5.
    Batch 1: theta 0.1, then 0.1 - 0.1 (-0.9 + 2 x 0.1) = 0.17; w_i = 0.5 x 0.17 = 0.085.
    Batch 2: 0.17 - 0.1 (-0.83 + 2 x 0.085) = 0.236, then 0.236 - 0.1 (-0.764 + 2 x 0.151) = 0.2822;
    w_i = 0.085 + 0.5 (0.2822 - 0.085) = 0.1836.  Server: 0.5 x 0.1836."""
    e = points([[1, 1]], lr=0.25, batch_size=1)
    a = play(e, PFedMe(lam=2, inner_lr=0.1, inner_steps=2, beta=0.5, deploy=deploy))
    close(deployed(e, a)[0], row(want))
    close(a.w, row(0.0918))


@pytest.mark.parametrize("options", [{"lam": 0.0}, {"beta": 0.0}])
def test_pfedme_server_stands_still(options: dict) -> None:
    e = six_clients()
    a = play(e, PFedMe(**options), 2)
    close(a.w, e.model.init_row(), 1e-6)
    assert (deployed(e, a) != e.model.init_row()).any(1).all()


def test_pfedme_envelope_of_a_full_step() -> None:
    """lam lr = 1: w_i = theta_i after every batch; both are deployed alike, and averaged."""
    e, other = six_clients(epochs=2), six_clients(epochs=2)
    a, b = (play(x, PFedMe(lam=10, deploy=d), 2) for x, d in ((e, "theta"), (other, "w")))
    close(deployed(e, a), deployed(other, b), 1e-6)
    close(a.w, all_clients(e).weights @ deployed(e, a), 1e-6)


def test_pfedme_finds_the_proximal_point() -> None:
    """argmin 0.5 (theta - c)^2 + (lam/2) (theta - w)^2 = (c + lam w) / (1 + lam)."""
    e = points([[3.0]], lr=0.1, start=-1.0)
    a = play(e, PFedMe(lam=4, inner_lr=0.1, inner_steps=60))
    close(deployed(e, a)[0], row((3 + 4 * -1.0) / 5))


def test_pfedme_takes_statistics_from_theta_and_extrapolates_none() -> None:
    e = engine(*ragged(), seeded(Normed), SGD(lr=0.1), columns=HEAD, drop_last=True)
    a = play(e, PFedMe(lam=1))
    statistics = e.model.trained.rest(e.model.size)
    close(statistics.take(a.w), all_clients(e).weights @ statistics.take(deployed(e, a)), 1e-6)
    with pytest.raises(ConfigError, match="must be <= 1"):
        play(e, PFedMe(beta=2.0))
    play(six_clients(), PFedMe(beta=2.0))
