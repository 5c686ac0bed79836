"""The contract tests have teeth: methods with the classic slips fail the test that is meant for them."""

import pytest
import test_contract as contract
import torch
from test_contract import Case

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.pgfed import PGFed
from fedbench.simulation.simulator import Simulation


class Closure(FedAvg):
    """A [K, P] tensor that does not come in as a state: in the cohort's order, not the chunk's."""

    def round(self, cohort):
        number = cohort.index[:, None].float()                                        # [K, 1]
        out = cohort.train(self.w, extra_grad=lambda s: 0.01 * number[:s.k] * s.theta)
        self.w = cohort.weights @ out.theta


class Counter(FedAvg):
    """State in a Python number, which no checkpoint holds."""

    seen = 0

    def round(self, cohort):
        self.seen += 1
        self.w = self.w + (cohort.weights @ cohort.train(self.w).theta - self.w) / self.seen


class Restless(FedAvg):
    """Evaluation changes the state."""

    def personalized(self, cohort, final):
        self.w = self.w * 1.001
        return self.w


class Everywhere(FedAvg):
    """Writes the rows of clients that were not there."""

    def __init__(self):
        super().__init__("local")

    def round(self, cohort):
        super().round(cohort)
        self.theta[cohort.ids * 0 + 3] = self.w


class Global(FedAvg):
    """Draws from the global generator."""

    def round(self, cohort):
        super().round(cohort)
        self.w = self.w + 1e-3 * torch.randn_like(self.w)


class First(FedAvg):
    """Treats the client with the lowest number apart."""

    def round(self, cohort):
        self.w = cohort.train(self.w).theta[0]


class Frozen(FedAvg):
    """Never learns."""

    def round(self, cohort):
        cohort.train(self.w)


class Drifting(FedAvg):
    """Moves without learning."""

    def round(self, cohort):
        super().round(cohort)
        self.w = self.w * 0.99


class Forgetful(PGFed):
    """Leaves a matrix of the server out of its state."""

    def state_dict(self):
        return {n: v for n, v in super().state_dict().items() if n != "G"}


SLIPS = [(Closure, contract.test_every_plan_gives_the_same_rows),
         (Counter, contract.test_a_resumed_run_is_the_uninterrupted_one),
         (Forgetful, contract.test_a_resumed_run_is_the_uninterrupted_one),
         (Restless, contract.test_evaluation_changes_nothing_and_repeats),
         (Restless, contract.test_a_resumed_run_is_the_uninterrupted_one),
         (Everywhere, contract.test_rows_outside_the_cohort_stay_put),
         (Global, contract.test_global_generators_are_left_alone),
         (Global, contract.test_a_seed_repeats_and_another_differs),
         (First, contract.test_renumbering_the_clients_renumbers_their_rows),
         (Frozen, contract.test_training_moves_what_is_deployed),
         (Drifting, contract.test_without_learning_nobody_moves)]


@pytest.mark.parametrize("slip, test", SLIPS, ids=lambda x: x.__name__)
def test_a_slip_is_found(slip: type, test, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = contract.case("pgfed" if issubclass(slip, PGFed) else "fedavg")

    class Slipped(Case):
        def simulation(self, *args, **how) -> Simulation:
            sim = super().simulation(*args, **how)
            sim.algorithm = slip()
            return sim
    case = Slipped(base.name, base.overrides, base.optimizer)
    reference = contract.reference.__wrapped__
    monkeypatch.setattr(contract, "case", lambda name: case)
    monkeypatch.setattr(contract, "reference", lambda name: reference(name))
    wanted = test.__code__.co_varnames[:test.__code__.co_argcount]
    given = {"method": case, "plan": "loop", "tmp_path": tmp_path, "monkeypatch": monkeypatch}
    with pytest.raises((AssertionError, AttributeError, RuntimeError)):
        test(**{name: given[name] for name in wanted})
