"""The contract tests have teeth: methods with the classic slips fail the test that is meant for them."""

import functools

import pytest
import torch

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.pgfed import PGFed
from fedbench.testing.algorithm import SUITE, case_for


class Closure(FedAvg):
    """A [K, P] tensor that does not come in as a state: in the cohort's order, not the chunk's."""

    def round(self, cohort):
        number = cohort.index[:, None].float()  # [K, 1]
        out = cohort.train(self.w, extra_grad=lambda s: 0.01 * number[: s.k] * s.theta)
        self.w = cohort.mean(out.theta)


class Counter(FedAvg):
    """State in a Python number, which no checkpoint holds."""

    seen = 0

    def round(self, cohort):
        self.seen += 1
        self.w = self.w + (cohort.mean(cohort.train(self.w).theta) - self.w) / self.seen


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


class InPlace(FedAvg):
    """Changes what it read of its rows, which is a copy."""

    def __init__(self):
        super().__init__("local")

    def round(self, cohort):
        super().round(cohort)
        store = self.theta.store
        store[: self.theta.used] += 0.01 * (store.device.type == "cpu" and self.theta.place == "disk")


class Meagre(FedAvg):
    """Takes a part of a batch that small clients do not have."""

    def round(self, cohort):
        def step(s, batch):
            if (batch.counts < 3).any():
                raise IndexError("a third sample")
            s.descend(s.grad(batch))

        self.w = cohort.mean(cohort.train(self.w, step=step).theta)


class Extra(FedAvg):
    """Trains the head, and moves the body by a step of its own."""

    def round(self, cohort):
        def step(s, batch):
            gradient = s.grad(batch, columns=cohort.model.trained)
            s.theta -= s.lr * gradient

        self.w = cohort.mean(cohort.train(self.w, step=step, columns=cohort.model.columns["head"]).theta)


class Padded(FedAvg):
    """A loss for each client that averages over the batch, padding included."""

    def round(self, cohort):
        def loss(s, rows, batch):
            return s.task_loss(s.forward(rows, batch), batch).mean(1)  # [k]

        self.w = cohort.mean(cohort.train(self.w, loss=loss).theta)


class Reader(FedAvg):
    """Reads the global generator, and puts it back."""

    def round(self, cohort):
        super().round(cohort)
        with torch.random.fork_rng(devices=[]):
            self.w = self.w + 1e-3 * torch.randn_like(self.w)


class Silent(FedAvg):
    """Sends nothing that is counted."""

    def round(self, cohort):
        self.w = cohort.mean(cohort.train(self.w).theta)


class Waiting(FedAvg):
    """Asks for a number in every step."""

    def round(self, cohort):
        def pull(s):
            return s.theta * float(s.theta.norm() > 1)

        self.w = cohort.mean(cohort.train(self.w, extra_grad=pull).theta)


class Endless(FedAvg):
    """Divides by what is 0 where a cohort is one client."""

    def round(self, cohort):
        super().round(cohort)
        self.w = self.w + 0.0 / (len(cohort) - 1) if len(cohort) > 1 else self.w * float("nan")


class Tuning(FedAvg):
    """Fine-tunes after the last round, and does not say so."""

    def personalized(self, cohort, final):
        return cohort.train(self.w).theta if final else self.w


class Untuned(FedAvg):
    """Says that it fine-tunes, and does not."""

    fine_tunes_after_training = True


class Flat(FedAvg):
    """A global model that is no row."""

    def global_row(self):
        return self.w[None]


class Cloned(FedAvg):
    """Measures an upload from a copy of what was sent."""

    def round(self, cohort):
        w = cohort.broadcast(w=self.w).w.clone()
        up = cohort.upload(theta=cohort.train(w).theta, relative_to={"theta": w})
        self.w = cohort.mean(up.theta)


SLIPS = [
    (Closure, "executor_loop"),
    (Closure, "executor_threads"),
    (Closure, "executor_pairs"),
    (Closure, "no_closure_over_the_cohort"),
    (Closure, "executor_batch_statistics"),
    (Counter, "resume"),
    (Forgetful, "resume"),
    (Restless, "evaluation_changes_nothing"),
    (Restless, "resume"),
    (Tuning, "last_round_deploys_the_same"),
    (Untuned, "last_round_deploys_the_same"),
    (Flat, "global_is_the_servers_row"),
    (Everywhere, "only_the_cohort_changes"),
    (InPlace, "state_on_disk"),
    (Global, "no_global_generator"),
    (Global, "a_seed_repeats"),
    (Reader, "no_global_generator"),
    (First, "renumbering_clients"),
    (Frozen, "training_moves_rows"),
    (Drifting, "nothing_moves_without_learning"),
    (Extra, "only_trained_columns_move"),
    (Padded, "padding_is_ignored"),
    (Silent, "bytes_are_counted"),
    (Silent, "nothing_passes_by_upload"),
    (Cloned, "references_are_what_was_sent"),
    (Waiting, "no_step_waits_for_the_device"),
    (Endless, "cohorts_of_one"),
    (Endless, "a_single_client"),
    (Meagre, "clients_of_two_samples"),
]


@pytest.mark.parametrize("slip, check", SLIPS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_slip_is_found(slip: type, check: str) -> None:
    assert SUITE.outcome(check, slipped(slip)).status == "broken"


def test_every_check_finds_a_slip() -> None:
    assert {check for _, check in SLIPS} == set(SUITE.checks)


slipped = functools.cache(case_for)
