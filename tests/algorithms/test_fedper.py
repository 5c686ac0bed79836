"""FedPer: its limits, and rounds by hand."""

import pytest
import torch
from by_hand import COHORTS_OF_FOUR, B, W, descent, four_of_six, squares
from tiny import CPU, close, compose, deployed, engine, equal, mlp, play, ragged

from fedbench.algorithms.base import Algorithm
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedper import FedPer
from fedbench.algorithms.ifca import IFCA
from fedbench.config.conf_tree import group_options
from fedbench.core.options import ConfigError
from fedbench.engine.federation import Federation
from fedbench.engine.optim import SGD
from fedbench.nn.columns import Columns
from fedbench.simulation import build


def test_fedper_with_an_empty_head_is_fedavg() -> None:
    a, b = four_of_six(columns={"head": []}), four_of_six()
    one, other = play(a, FedPer(), 4, COHORTS_OF_FOUR), play(b, FedAvg(), 4, COHORTS_OF_FOUR)
    equal(one.u, other.w)
    equal(deployed(a, one), other.w.expand(6, -1))


WITH_BASE = (
    *("fedas", "fedbabu", "fedcp", "feddat", "fedgh", "fedpac", "fedper", "fedpia", "fedrep", "fedrod", "gpfl"),
    "lg_fedavg",
)


def test_methods_that_share_a_base() -> None:
    """IFCA shares one by an option."""
    found = [name for name in group_options("algorithm") if _method(name).has_base]
    assert tuple(found) == WITH_BASE
    assert IFCA(shared_body=True).has_base


@pytest.mark.parametrize("name", WITH_BASE)
@pytest.mark.parametrize("change", [["model=logistic"], ["model=mlp", "model.freeze=['body*']"]])
def test_an_empty_base_is_refused(name: str, change: list[str]) -> None:
    """FedPer on a model that is all head, or of which nothing else learns, would be Local under another name."""
    cfg = compose([f"algorithm={name}", *change])
    federation = Federation.build(*ragged(), CPU)
    with pytest.raises(ConfigError, match=rf"algorithm={name} needs trained parameters outside"):
        _method(name).check(federation, build.model(cfg, federation), SGD(lr=0.1))


def test_ifca_shares_no_empty_body() -> None:
    federation = Federation.build(*ragged(), CPU)
    model = build.model(compose(["algorithm=ifca", "model=logistic"]), federation)
    IFCA().check(federation, model, SGD(lr=0.1))
    with pytest.raises(ConfigError, match="algorithm=ifca needs trained parameters outside"):
        IFCA(shared_body=True).check(federation, model, SGD(lr=0.1))


def _method(name: str) -> Algorithm:
    return build.algorithm(compose([f"algorithm={name}"]))


def test_fedper_by_hand() -> None:
    """theta = [u, h], h the last number.  Clients 0 and 1 in round 1, 1 and 2 in round 2.  u is averaged, h is each
    client's own descent; client 0 deploys the new u with its old h."""
    e = squares(steps=2, cohort_size=2)
    e.model.columns["head"] = Columns([(2, 3)])
    algorithm = play(e, FedPer(), 2, [[0, 1], [1, 2]])
    one = descent(W, B, 2)  # [3, 3]
    u = torch.tensor([1 / 4, 3 / 4]) @ one[:2, :2]
    two = torch.tensor([3 / 5, 2 / 5]) @ descent(u, B[1:, :2], 2)
    h = torch.stack([one[0, 2], descent(W, B[1], 4)[2], one[2, 2]])
    close(algorithm.u, two)
    close(deployed(e, algorithm), torch.cat([two.expand(3, -1), h[:, None]], 1))


def test_fedper_never_sampled_clients_have_the_first_head() -> None:
    e = four_of_six()
    algorithm = play(e, FedPer(), 2, [[0, 1, 2, 3], [0, 1, 2, 3]])
    head, rows = e.model.columns["head"], deployed(e, algorithm)
    equal(head.take(rows[5]), head.take(e.model.init_row()))
    equal(e.model.without("head").take(rows[5]), algorithm.u)


def test_fedper_needs_a_head() -> None:
    arrays, split = ragged()
    with pytest.raises(ConfigError, match=r"algorithm=fedper needs the parameter group 'head'"):
        play(engine(arrays, split, mlp()), FedPer())
