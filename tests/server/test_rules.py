"""Server rules: their limits, and steps by hand."""

import math

import numpy as np
import pytest
import torch
from by_hand import COHORTS_OF_FOUR, four_of_six
from tiny import close, engine, equal, play, ragged, seeded
from torch import Tensor, nn

from fedbench.algorithms.fedadagrad import FedAdagrad
from fedbench.algorithms.fedadam import FedAdam
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedavgm import FedAvgM
from fedbench.algorithms.fedexp import FedExP
from fedbench.algorithms.fedyogi import FedYogi
from fedbench.channel.channel import UnknownReference
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.optim import SGD
from fedbench.server._adaptive import Adaptive
from fedbench.server.adagrad import Adagrad
from fedbench.server.adam import Adam
from fedbench.server.base import ServerRule, ServerStep
from fedbench.server.exp import Extrapolation
from fedbench.server.momentum import Momentum
from fedbench.server.yogi import Yogi

W = torch.tensor([1.0, -2.0, 0.5])
UPLOADS = torch.tensor([[2.0, -2.0, 0.0], [0.0, 0.0, 0.5]])
WEIGHTS = torch.tensor([0.25, 0.75])


def step_of(rule: ServerRule, w: Tensor = W, uploads: Tensor = UPLOADS, state: dict | None = None, round: int = 0):
    """Return the new w and the new state.  Without a state, the rule starts from its initial one."""
    state = {name: torch.full_like(w, value) for name, value in rule.states.items()} if state is None else state
    return rule.step(ServerStep(w, WEIGHTS @ uploads, uploads, WEIGHTS, round), state), state


def test_momentum_of_a_constant_change_is_a_geometric_sum() -> None:
    """After t rounds with change d, w has moved by d (1 - beta^t) / (1 - beta) in each round summed."""
    rule, w, state, d = Momentum(0.9), W, None, torch.tensor([1.0, -1.0, 2.0])
    for t in range(1, 5):
        before = w
        w, state = step_of(rule, w, (w - d).expand(2, -1), state)
        close(before - w, d * (1 - 0.9**t) / (1 - 0.9))


def test_nesterov_momentum_by_hand() -> None:
    """v = d in round 1, so w - (d + 0.5 d); with the same d in round 2, v = 1.5 d and w - (d + 0.75 d)."""
    rule, d = Momentum(0.5, nesterov=True), torch.tensor([1.0, 0.0, -1.0])
    one, state = step_of(rule, W, (W - d).expand(2, -1))
    close(one, W - 1.5 * d)
    two, _ = step_of(rule, one, (one - d).expand(2, -1), state)
    close(two, one - 1.75 * d)


@pytest.mark.parametrize("rule", [Adam(initial_v=0.0), Yogi(initial_v=0.0)])
def test_adam_and_yogi_agree_in_the_first_round_from_zero(rule: Adaptive) -> None:
    new, _ = step_of(rule)
    delta = WEIGHTS @ UPLOADS - W
    close(new, W + 0.1 * 0.1 * delta / ((0.01 * delta.square()).sqrt() + 1e-3))


def test_adagrad_steps_less_than_its_rate_in_the_first_round() -> None:
    new, _ = step_of(Adagrad(lr=0.3, initial_v=0.0))
    delta = WEIGHTS @ UPLOADS - W
    close(new - W, 0.3 * delta / (delta.abs() + 1e-3))
    assert float((new - W).abs().max()) < 0.3


def test_adam_without_decay_steps_by_the_sign() -> None:
    new, _ = step_of(Adam(lr=0.2, beta1=0.0, beta2=0.0, tau=1e-12, initial_v=0.0))
    close(new, W + 0.2 * (WEIGHTS @ UPLOADS - W).sign())


@pytest.mark.parametrize("rule", [Adam, Yogi, Adagrad])
def test_a_huge_tau_is_the_mean(rule: type[Adaptive]) -> None:
    new, _ = step_of(rule(lr=1e4, beta1=0.0, tau=1e4, initial_v=0.0))
    close(new, WEIGHTS @ UPLOADS, 1e-3)


def test_v_starts_at_tau_squared() -> None:
    assert Adam(tau=0.1).states["v"] == pytest.approx(0.01) and Yogi(initial_v=0.5).states["v"] == 0.5


def test_flowers_bias_correction_has_its_exponent_one_too_high() -> None:
    plain, _ = step_of(Adam(), round=0)
    flower, _ = step_of(Adam(bias_correction="flower"), round=0)
    close((flower - W) / (plain - W), torch.full((3,), math.sqrt(1 - 0.99**2) / (1 - 0.9**2)))


def test_fedexp_step_lengths() -> None:
    """Equal changes: 1/2, so 1.  Orthogonal changes of one length: K / 2 with uniform weights and eps = 0."""
    rule, zero = Extrapolation(0.0), torch.zeros(4)
    changes = torch.eye(4)
    uniform = torch.full((4,), 0.25)
    step = ServerStep(zero, uniform @ changes, changes, uniform, 0)
    close(rule.server_lr(step), torch.tensor(2.0))
    equal_changes = torch.ones(4, 4)
    close(rule.server_lr(ServerStep(zero, equal_changes[0], equal_changes, uniform, 0)), torch.tensor(1.0))
    nothing = torch.zeros(4, 4)
    close(rule.server_lr(ServerStep(zero, nothing[0], nothing, uniform, 0)), torch.tensor(1.0))


# -- in a run --------------------------------------------------------------------------------------------
def with_rule(rule: ServerRule | None, **options: object) -> Engine:
    e = four_of_six(**options)
    object.__setattr__(e, "server", rule)
    return e


def test_the_option_is_the_method() -> None:
    """server=momentum with FedAvg is FedAvgM, and so on, bit for bit.  FedOpt averages uniformly by default."""
    for rule, method in (
        (Momentum(0.8, 0.5), FedAvgM(0.8, 0.5)),
        (Adam(0.2), FedAdam(0.2, weights="samples")),
        (Yogi(0.2), FedYogi(0.2, weights="samples")),
        (Adagrad(0.2), FedAdagrad(0.2, weights="samples")),
        (Extrapolation(0.01), FedExP(0.01, deploy="last", weights="samples")),
    ):
        one = play(with_rule(rule), FedAvg(), 3, COHORTS_OF_FOUR)
        other = play(four_of_six(), method, 3, COHORTS_OF_FOUR)
        equal(one.w, other.w)
        assert not torch.equal(one.w, play(four_of_six(), FedAvg(), 3, COHORTS_OF_FOUR).w)


def test_fedavgm_without_momentum_is_fedavg() -> None:
    one = play(four_of_six(), FedAvgM(0.0), 3, COHORTS_OF_FOUR)
    close(one.w, play(four_of_six(), FedAvg(), 3, COHORTS_OF_FOUR).w, 1e-6)


def test_fedexp_with_one_client_a_round_is_fedavg() -> None:
    cohorts = [[0], [3], [5]]
    one = play(four_of_six(), FedExP(deploy="last"), 3, cohorts)
    close(one.w, play(four_of_six(), FedAvg(), 3, cohorts).w, 1e-6)


def test_fedexp_deploys_the_mean_of_the_last_two() -> None:
    e = four_of_six()
    algorithm = play(e, FedExP(), 2, COHORTS_OF_FOUR)
    last = play(four_of_six(), FedExP(deploy="last"), 2, COHORTS_OF_FOUR).w
    before = play(four_of_six(), FedExP(deploy="last"), 1, COHORTS_OF_FOUR).w
    close(algorithm.global_row(), (last + before) / 2)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def one_round(rule: ServerRule | None) -> tuple[Tensor, int]:
    """Return the server's row after a round, and the number of its parameters."""
    arrays, split = ragged()
    e = engine(arrays, split, seeded(Norm), SGD(lr=0.5), batch_size=4, drop_last=True)
    object.__setattr__(e, "server", rule)
    return play(e, FedAvg(), 1).w, e.model.trained.size


@pytest.mark.parametrize("rule", [Momentum(lr=0.5), Adam(1.0), Extrapolation(0.0)])
def test_running_statistics_are_averaged_under_every_rule(rule: ServerRule) -> None:
    """After one round, they are those of FedAvg, and the parameters are not."""
    (plain, p), (moved, _) = one_round(None), one_round(rule)
    equal(moved[p:], plain[p:])
    assert not torch.equal(moved[:p], plain[:p])


def test_a_mean_that_updates_an_unknown_tensor_is_an_error() -> None:
    e = with_rule(Momentum())
    cohort = Cohort(e, np.arange(4), 0)
    cohort.broadcast(w=e.model.init_row())
    with pytest.raises(UnknownReference, match="broadcast no tensor 'v'"):
        cohort.mean(torch.zeros(4, e.model.size), updates="v")
