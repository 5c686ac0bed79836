"""Checks of a user's method: a correct one passes, and each check finds its mistake."""

import functools
import inspect

import pytest
import torch
from contract import assert_failed

from fedbench.algorithms.base import Algorithm
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.pgfed import PGFed
from fedbench.core.options import Positive
from fedbench.engine.cohort import Cohort
from fedbench.testing import Report, check_algorithm
from fedbench.testing._probes import random_uploads
from fedbench.testing.algorithm import SUITE, case_for


class FedNova(Algorithm):
    """Wang et al., NeurIPS 2020: differences divided by each client's number of local steps."""

    def __init__(self, server_lr: Positive = 1.0):
        self.server_lr = server_lr

    def setup(self, federation, model, rows):
        self.w = model.init_row()  # [P]
        self.momentum = torch.zeros_like(self.w)  # [P]
        self.steps = rows("steps", default=torch.zeros(()))  # lazy [N], how many in all

    def round(self, cohort):
        w = cohort.broadcast(w=self.w).w
        out = cohort.train(w)
        d = (out.theta - w) / out.steps[:, None]  # [K, P]
        up = cohort.upload(d=d, relative_to={"d": None})
        tau = cohort.upload(tau=out.steps, relative_to={"tau": None}).tau  # [K]
        self.momentum = 0.5 * self.momentum + cohort.mean(tau) * cohort.mean(up.d)
        self.w = self.w + self.server_lr * self.momentum
        self.steps[cohort.ids] = self.steps[cohort.ids] + out.steps

    def personalized(self, cohort, final):
        return self.w

    def global_row(self):
        return self.w


class Closure(FedAvg):
    """A [K, P] tensor that does not come in as a state: in the cohort's order, not the chunk's."""

    def round(self, cohort):
        number = cohort.index[:, None].float()  # [K, 1]
        out = cohort.train(self.w, extra_grad=lambda s: 0.01 * number[: s.k] * s.theta)
        self.w = cohort.mean(out.theta)


class Misfit(FedAvg):
    """Reads a tensor whose rows do not fit those of a step."""

    def round(self, cohort):
        w = cohort.broadcast(w=self.w).w
        anchor = w.expand(len(cohort), -1)  # [K, P]
        out = cohort.train(w, extra_grad=lambda s: s.theta - anchor)
        self.w = cohort.mean(cohort.upload(theta=out.theta, relative_to={"theta": "w"}).theta)


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
        store[: self.theta.used] += 0.01 * (store.device.type == "cpu" and self.theta.location == "disk")


class Meagre(FedAvg):
    """Takes a part of a batch that small clients do not have."""

    def round(self, cohort):
        def step(s, batch):
            if (batch.counts < 3).any():
                raise IndexError("a third sample")
            s.descend(s.grad(batch))

        self.w = cohort.mean(cohort.train(self.w, step=step).theta)


class Extra(FedAvg):
    """Trains the head, and changes the whole row."""

    def round(self, cohort):
        def step(s, batch):
            s.descend(s.grad(batch))
            s.theta.sub_(0.1 * s.lr * s.theta)

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


MISTAKES = [
    (Closure, "executor_loop", "cohort.train(name=tensor)"),
    (Closure, "executor_threads", "in two threads"),
    (Closure, "executor_pairs", "two clients at a time"),
    (Closure, "no_closure_over_the_cohort", "reads number, "),
    (Closure, "no_closure_over_the_cohort", "pass it as cohort.train(number=number) and read s.state.number"),
    (Misfit, "no_closure_over_the_cohort", "pass it as cohort.train(anchor=anchor)"),
    (Closure, "executor_batch_statistics", "on a model with BatchNorm"),
    (Counter, "resume", "self.seen changed but is not restored. Remedy: keep state in tensors on self"),
    (Forgetful, "resume", "self.G changed"),
    (Restless, "evaluation_changes_nothing", "other rows in its second call"),
    (Restless, "resume", "self.w"),
    (Tuning, "last_round_deploys_the_same", "`personalized` returns other rows after the last round"),
    (Untuned, "last_round_deploys_the_same", "fine_tunes_after_training is set, but"),
    (Flat, "global_is_the_servers_row", "`global_row` returns shape"),
    (Everywhere, "only_the_cohort_changes", "of client 3 changed"),
    (InPlace, "state_on_disk", "Remedy: write rows by rows[ids] = values"),
    (Global, "no_global_generator", "a round uses the global generator of torch. Remedy: use cohort.random"),
    (Global, "a_seed_repeats", "with the same seed"),
    (Reader, "no_global_generator", "with another seed of torch"),
    (First, "renumbering_clients", "in another order"),
    (Frozen, "training_moves_rows", "initial rows after training"),
    (Drifting, "nothing_moves_without_learning", "with a learning rate of 1e-30"),
    (Extra, "only_trained_columns_move", "trains 27 of 163 columns, but body.1.weight, body.1.bias"),
    (Padded, "padding_is_ignored", "batch.weight"),
    (Silent, "bytes_are_counted", "0 bytes up and 0 bytes down"),
    (Silent, "nothing_bypasses_upload", "depend on data of client 0"),
    (Cloned, "references_are_what_was_sent", "upload(theta=..., relative_to=...): relative_to is a Tensor, not"),
    (Waiting, "no_step_waits_for_the_device", "waits for the device"),
    (Endless, "cohorts_of_one", "not finite"),
    (Endless, "a_single_client", "not finite"),
    (Meagre, "clients_of_two_samples", "IndexError: a third sample"),
]
cached_case = functools.cache(case_for)


def test_a_correct_one_passes() -> None:
    report = check_algorithm(FedNova, {"server_lr": 0.7})
    report.raise_if_failed()
    assert report.ok and report.skipped == {} and len(report.passed) == len(SUITE.checks)


@pytest.mark.parametrize("cls, check, message", MISTAKES)
def test_a_mistake_is_found(cls: type, check: str, message: str) -> None:
    assert_failed(Report("", "", "", [SUITE.outcome(check, cached_case(cls))]), check, message)


def test_every_check_finds_a_mistake() -> None:
    assert {check for _, check, _ in MISTAKES} == set(SUITE.checks)


def test_random_uploads_take_the_arguments_of_upload() -> None:
    names = list(inspect.signature(Cohort.upload).parameters)
    with random_uploads([]):
        assert list(inspect.signature(Cohort.upload).parameters) == names
