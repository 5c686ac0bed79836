"""Local training of rows is PyTorch training of each client: same batches, same steps, whatever the cohort."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from modules import MODELS
from tiny import HEAD, PLANS, SIZES, all_clients, close, engine, equal, mlp, ragged, seeded
from torch import Tensor, nn

from fedbench.core import rng
from fedbench.core.options import ConfigError
from fedbench.engine.batch import Batch
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.federation import Augment
from fedbench.engine.optim import SGD, Adam, Optimizer
from fedbench.engine.training import LocalTraining
from fedbench.nn.flat import FlatModel

IDS = np.arange(len(SIZES))


OPTIMIZERS: dict[str, tuple[Callable[[], Optimizer], Callable]] = {
    "sgd": (lambda: SGD(lr=0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": (
        lambda: SGD(lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=0.01, nesterov=True),
    ),
    "adam": (lambda: Adam(lr=0.01, eps=1e-3), lambda p: torch.optim.Adam(p, 0.01, eps=1e-3)),
}


def build(model: str = "linear", optimizer: str = "sgd", **options) -> Engine:
    make, shape = MODELS[model]
    arrays, split = ragged(shape=shape)
    return engine(arrays, split, seeded(make), OPTIMIZERS[optimizer][0](), **{"epochs": 2, **options})


class Bare:
    """A client in plain PyTorch: its module, its optimizer, a loop over its batches."""

    def __init__(self, e: Engine, client: int, row: Tensor, optimizer: str):
        self.e, self.client = e, client
        self.module = copy.deepcopy(e.model.module).train()
        self.load(row)
        self.optimizer = OPTIMIZERS[optimizer][1]([p for p in self.module.parameters() if p.requires_grad])

    def load(self, row: Tensor) -> None:
        self.module.load_state_dict(self.e.model.state_dict(row), strict=False)

    def batches(
        self, round: int = 0, key: str = "local", batch_size: int | None = None, drop_last: bool = False, **work
    ) -> list[np.ndarray]:
        e, own = self.e, self.e.federation.splits["train"][self.client]
        position, counts = rng.batches(
            rng.key(e.seed, "batches", key, round),
            np.array([self.client]),
            np.array([len(own)]),
            batch_size or e.batch_size,
            drop_last=drop_last,
            **(work or {"epochs": e.epochs}),
        )
        return [own[position[t, 0, : counts[t, 0]]] for t in range(len(counts))]

    def train(self, round: int = 0, clip: float | None = None, **how) -> tuple[Tensor, float]:
        """The row after training, and the mean loss over steps."""
        losses = []
        for index in self.batches(round, **how):
            x, y = self.e.federation.gather(torch.from_numpy(index))
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.module(x), y)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(self.module.parameters(), clip)
            self.optimizer.step()
            losses.append(loss.item())
        return self.row(), float(np.mean(losses))

    def row(self) -> Tensor:
        state = self.module.state_dict()
        return torch.cat([state[n].reshape(-1) for n in self.e.model.spans]).detach().clone()


# -- equal to PyTorch ------------------------------------------------------------------------------------
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_training_equals_a_pytorch_loop_for_each_client(model: str, optimizer: str) -> None:
    """Padding and other clients have no effect.  Batch norm receives batches without padding."""
    e = build(model, optimizer)
    start = e.model.init_row()
    out = all_clients(e).train(start)
    for i in IDS:
        row, loss = Bare(e, i, start, optimizer).train()
        close(out.theta[i], row, 1e-4 if optimizer == "adam" else 2e-5)
        assert out.loss[i].item() == pytest.approx(loss, abs=1e-5)
        assert out.steps[i] == 2 * -(-SIZES[i] // min(5, SIZES[i]))


@pytest.mark.parametrize("plan", ["loop", "vmap"])
def test_frozen_layers_before_a_manual_backward_pass_do_not_change(plan: str) -> None:
    """They are not in rows.  No gradient is computed below the first trained layer."""
    arrays, split = ragged()
    module = seeded(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    )
    for layer in (module[1], module[5]):
        layer.requires_grad_(False)
    e = engine(arrays, split, module, SGD(lr=0.1), plan=plan, epochs=2)
    assert e.model.manual_backward is not None and e.model.size == 8 * 8 + 8
    start = e.model.init_row()
    out, scores = all_clients(e).train(start), all_clients(e).forward(start.expand(len(IDS), -1).clone())
    for i in IDS:
        close(out.theta[i], Bare(e, i, start, "sgd").train()[0])
        x, _ = e.federation.gather(torch.from_numpy(e.federation.splits["test"][i]))
        close(scores[i], module(x).detach())


FLAT = {
    "flat mlp": lambda: nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)),
    "one layer": lambda: nn.Sequential(nn.Linear(16, 3, bias=False)),
}


@pytest.mark.parametrize("plan", ["loop", "vmap"])
@pytest.mark.parametrize("name", FLAT)
def test_linear_layers_on_flat_inputs_have_a_manual_backward_pass(name: str, plan: str) -> None:
    """Their gradient equals that of the same layers after nn.Flatten."""
    arrays, split = ragged(shape=(16,))
    e = engine(arrays, split, seeded(FLAT[name]), SGD(lr=0.1), plan=plan, epochs=2)
    assert e.model.manual_backward is not None
    start = e.model.init_row()
    out, scores = all_clients(e).train(start), all_clients(e).forward(start.expand(len(IDS), -1).clone())
    behind = engine(arrays, split, nn.Sequential(nn.Flatten(), *e.model.module), SGD(lr=0.1), plan=plan, epochs=2)
    equal(out.theta, all_clients(behind).train(start).theta)
    equal(all_clients(e).gradient(out.theta)[0], all_clients(behind).gradient(out.theta)[0])
    for i in IDS:
        close(out.theta[i], Bare(e, i, start, "sgd").train()[0])
        x, _ = e.federation.gather(torch.from_numpy(e.federation.splits["test"][i]))
        close(scores[i], e.model.module(x).detach())


def test_layers_before_flatten_need_autograd() -> None:
    """Convolutions without nn.Flatten, and linear layers before it, have no manual backward pass."""
    for module in (
        nn.Sequential(nn.Conv2d(1, 3, 3)),
        nn.Sequential(nn.ReLU()),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)),
    ):
        assert FlatModel(module).manual_backward is None


@pytest.mark.parametrize(
    "how",
    [
        {"steps": 3},
        {"epochs": 1, "drop_last": True},
        {"batch_size": 8},
        {"steps": 0},
        {"key": "other"},
        {"batch_size": 1, "epochs": 1},
    ],
    ids=str,
)
def test_settings_of_local_training(how: dict) -> None:
    e = build(optimizer="momentum")
    start = e.model.init_row()
    out = all_clients(e, round=2).train(start, how=LocalTraining(**how))
    for i in IDS:
        bare = Bare(e, i, start, "momentum")
        work = {} if {"steps", "epochs"} & set(how) else {"epochs": 2}
        row = bare.train(2, **how, **work)[0] if how.get("steps") != 0 else start
        close(out.theta[i], row)


def test_each_client_starts_from_its_row() -> None:
    e = build()
    start = e.model.init_row() + 0.1 * torch.randn(len(IDS), e.model.size)
    before = start.clone()
    out = all_clients(e).train(start)
    equal(start, before)
    for i in IDS:
        close(out.theta[i], Bare(e, i, start[i], "sgd").train()[0])


def test_clients_of_one_sample_and_cohorts_of_one() -> None:
    arrays, split = ragged(sizes=(1, 6))
    e = engine(arrays, split, mlp())
    start = e.model.init_row()
    for ids in ([0], [1], [0, 1]):
        out = Cohort(e, np.array(ids), 0).train(start)
        for j, i in enumerate(ids):
            close(out.theta[j], Bare(e, i, start, "sgd").train()[0])


def test_a_client_without_samples_does_not_change() -> None:
    arrays, split = ragged(sizes=(0, 6, 3), test=(1, 1, 1))
    e = engine(arrays, split, mlp())
    start = e.model.init_row()
    out = all_clients(e).train(start)
    equal(out.theta[0], start)
    assert out.steps.tolist() == [0, 2, 1] and out.loss[0] == 0
    close(out.theta[2], Bare(e, 2, start, "sgd").train()[0])
    alone = Cohort(e, np.array([0]), 0).train(start)
    equal(alone.theta[0], start)


@pytest.mark.parametrize("model", ["linear", "batch norm"])
def test_clipping_uses_the_norm_of_trained_columns(model: str) -> None:
    e = build(model)
    e = replace(e, optimizer=SGD(lr=0.1, clip=0.05))
    start = e.model.init_row()
    plain, pulled = (
        all_clients(e).train(start),
        all_clients(e).train(start, step=lambda s, b: s.descend(s.grad(b).add_(0 * s.theta))),
    )
    for i in IDS:
        close(plain.theta[i], Bare(e, i, start, "sgd").train(clip=0.05)[0])
    equal(pulled.theta, plain.theta)


def test_gradients_outside_of_the_trained_columns_are_ignored() -> None:
    """A method may add lam (theta - w) over the whole row, running statistics included: they are neither moved by
    the optimizer, nor counted in a clipped norm, nor left in the gradient of the next step."""
    e = build("batch norm")
    e = replace(e, optimizer=SGD(lr=0.1, clip=0.05, momentum=0.9, weight_decay=0.1))
    trained = e.model.trained
    seen = []

    def step(s, batch: Batch, everywhere: bool) -> None:
        g = s.grad(batch)
        seen.append(g[:, trained.size :].abs().max().item())
        pull = 5 * (s.theta + 1)
        for a, b in (e.model.all if everywhere else trained).slices:
            g[:, a:b] += pull[:, a:b]
        s.descend(g)

    start = e.model.init_row()
    one, other = (all_clients(e).train(start, step=lambda s, b, w=w: step(s, b, w)) for w in (True, False))
    equal(one.theta, other.theta)
    assert max(seen) == 0


# -- optimizer memory ------------------------------------------------------------------------------------
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("reset", ["round", "never"])
@pytest.mark.parametrize("plan", PLANS)
def test_optimizer_buffers_are_kept_or_new(optimizer: str, reset: str, plan: str) -> None:
    """Three rounds with different cohorts.  A kept buffer is that of the client's last participation."""
    e = build(optimizer=optimizer, plan=plan, epochs=1)
    e.optimizer.reset = reset
    start = e.model.init_row()
    bare = {i: Bare(e, i, start, optimizer) for i in IDS}
    for r, ids in enumerate([[0, 1, 4], [1, 2, 3, 4], [0, 4, 5]]):
        out = Cohort(e, np.array(ids), r).train(start)
        for j, i in enumerate(ids):
            if reset == "round":
                bare[i] = Bare(e, i, start, optimizer)
            bare[i].load(start)
            close(out.theta[j], bare[i].train(r)[0], 1e-4)


def test_two_personal_rows_have_separate_buffers() -> None:
    e = build(optimizer="momentum", epochs=1)
    e.optimizer.reset = "never"
    start = e.model.init_row()
    for r in range(2):
        cohort = all_clients(e, r)
        one, two = cohort.train(start), cohort.train(start, how=LocalTraining(buffers="v"))
        equal(one.theta, two.theta)


@pytest.mark.parametrize("mode", ["evaluation", "trial"])
def test_only_rounds_store_optimizer_buffers(mode: str) -> None:
    """Evaluations and trials of an executor do not change the clients' momentum."""
    e = build(optimizer="momentum")
    e.optimizer.reset = "never"
    start = e.model.init_row()
    all_clients(e, 0).train(start)
    kept = e.rows.all["optimizer/theta/momentum"].state_dict()
    all_clients(e, 0, mode).train(start)
    equal(e.rows.all["optimizer/theta/momentum"].state_dict(), kept)
    fresh = build(optimizer="momentum")
    fresh.optimizer.reset = "never"
    equal(all_clients(fresh, 1, mode).train(start).theta, all_clients(e, 1, mode).train(start).theta)


@pytest.mark.parametrize("model", ["linear", "batch norm"])
def test_only_the_parameters_of_a_group_with_buffers_learn(model: str) -> None:
    """model.without("head") contains running statistics, which have no gradient, weight decay or momentum."""
    arrays, split = ragged()
    e = engine(arrays, split, seeded(MODELS[model][0]), SGD(lr=0.1, weight_decay=0.1), columns=HEAD)
    base, start = e.model.without("head"), e.model.init_row()
    out = all_clients(e).train(start, step=lambda s, b: s.descend(s.grad(b, columns=base), columns=base))
    close(out.theta, all_clients(e).train(start, columns=base).theta)
    buffers = e.model.trained.rest(e.model.size)
    close(buffers.take(out.theta), buffers.take(all_clients(e).train(start, columns=base).theta))


def test_adam_counts_steps_and_not_slices() -> None:
    """head | body.1.bias are two slices of one step; body then head within a step, or one phase after the other,
    each see their own first step."""
    arrays, split = ragged()
    e = engine(arrays, split, mlp(), Adam(lr=0.01, eps=1e-3), columns={**HEAD, "two": ["body.1.bias", "head.bias"]})
    start, two = e.model.init_row(), e.model.columns["two"]
    assert len(two.slices) == 2
    out = all_clients(e).train(start, columns=two)
    base, head = e.model.columns["base"], e.model.columns["head"]

    def alternate(s, batch: Batch) -> None:
        s.descend(s.grad(batch, columns=base), columns=base)
        s.descend(s.grad(batch, columns=head), columns=head)

    turns = all_clients(e).train(start, step=alternate)
    for i in IDS:
        bare = Bare(e, i, start, "adam")
        parameters = dict(bare.module.named_parameters())
        for n, p in parameters.items():
            p.requires_grad_(n.endswith("bias"))
        bare.optimizer = torch.optim.Adam([p for p in parameters.values() if p.requires_grad], 0.01, eps=1e-3)
        close(out.theta[i], bare.train()[0], 1e-4)
        bare = Bare(e, i, start, "adam")
        halves = [torch.optim.Adam(m.parameters(), 0.01, eps=1e-3) for m in (bare.module.body, bare.module.head)]
        for index in bare.batches():
            x, y = e.federation.gather(torch.from_numpy(index))
            for half in halves:
                bare.module.zero_grad()
                F.cross_entropy(bare.module(x), y).backward()
                half.step()
        close(turns.theta[i], bare.row(), 1e-4)


def test_adam_counts_the_steps_of_every_parameter() -> None:
    """Two rounds of a head for two steps, then the base, the head's bias with both: a parameter's correction is of the
    steps that it made itself, with buffers that clients keep too."""
    arrays, split = ragged()
    adam = Adam(lr=0.01, eps=1e-3, reset="never")
    e = engine(arrays, split, mlp(), adam, epochs=2, columns={**HEAD, "rest": ["body.*", "head.bias"]})
    head, rest = e.model.columns["head"], e.model.columns["rest"]

    def in_turn(s, batch: Batch) -> None:
        columns = head if s.t < 2 else rest
        s.descend(s.grad(batch, columns=columns), columns=columns)

    start = e.model.init_row()
    rows = all_clients(e).train(start, step=in_turn).theta
    rows = Cohort(e, np.arange(len(split.train)), 1).train(rows, step=in_turn).theta
    assert e.rows.all["optimizer/theta/count"].default.shape == (len(e.model.spans),)
    for i in IDS:
        bare = Bare(e, i, start, "adam")
        named = dict(bare.module.named_parameters())
        optimizer = torch.optim.Adam(named.values(), 0.01, eps=1e-3)
        for round in range(2):
            for t, index in enumerate(bare.batches(round=round)):
                x, y = e.federation.gather(torch.from_numpy(index))
                optimizer.zero_grad()
                F.cross_entropy(bare.module(x), y).backward()
                for name, p in named.items():
                    moves = name.startswith("head.") if t < 2 else name == "head.bias" or name.startswith("body.")
                    p.grad = p.grad if moves else None
                optimizer.step()
        close(rows[i], bare.row(), 1e-4)


def test_a_schedule_by_steps_is_torchs_scheduler() -> None:
    """Each client's learning rate decreases over its own number of steps.  `lr` is the mean."""
    schedule = {"name": "linear", "warmup": 0.4, "per": "step"}
    arrays, split = ragged()
    e = engine(arrays, split, mlp(), SGD(lr=0.2, momentum=0.5, schedule=schedule), epochs=2, rounds=3)
    start = e.model.init_row()
    out = Cohort(e, np.arange(len(split.train)), 1).train(start)
    assert out.lr.shape == (len(split.train), 1)
    now = Cohort(e, np.arange(len(split.train)), 1).rate()  # of each client's first step in the round
    for i in IDS:
        bare = Bare(e, i, start, "sgd")
        optimizer = torch.optim.SGD(bare.module.parameters(), 1.0, momentum=0.5)
        batches = bare.batches(round=1)
        total, rates = 3 * len(batches), []
        for t, index in enumerate(batches):
            at, warm = len(batches) + t, 0.4 * len(batches)
            rates.append(0.2 * (1 - (at - warm) / (total - warm)))
            optimizer.param_groups[0]["lr"] = rates[-1]
            x, y = e.federation.gather(torch.from_numpy(index))
            optimizer.zero_grad()
            F.cross_entropy(bare.module(x), y).backward()
            optimizer.step()
        close(out.theta[i], bare.row(), 1e-4)
        if rates:
            close(out.lr[i], torch.tensor([np.mean(rates)]).float())
            close(now[i], torch.tensor([rates[0]]).float())


def test_adam_counts_every_descent_on_the_same_columns() -> None:
    """Two calls of s.descend in a step, as in pFedMe, are two steps of torch's optimizer."""
    e = build(optimizer="adam")
    start = e.model.init_row()

    def step(s, batch: Batch) -> None:
        for _ in range(2):
            s.descend(s.grad(batch))

    out = all_clients(e).train(start, step=step)
    for i in IDS:
        bare = Bare(e, i, start, "adam")
        for index in bare.batches():
            x, y = e.federation.gather(torch.from_numpy(index))
            for _ in range(2):
                bare.optimizer.zero_grad()
                F.cross_entropy(bare.module(x), y).backward()
                bare.optimizer.step()
        close(out.theta[i], bare.row(), 1e-4)


# -- columns ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["linear", "batch norm"])
@pytest.mark.parametrize("group", ["head", "base"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_only_the_named_columns_learn(model: str, group: str, optimizer: str) -> None:
    """Other parameters do not change, even with weight decay.  Running statistics are updated."""
    e = build(model, optimizer)
    columns = type(e.model)(e.model.module, HEAD).columns
    start = e.model.init_row()
    out = all_clients(e).train(start, columns=columns[group])
    for i in IDS:
        bare = Bare(e, i, start, optimizer)
        named = dict(bare.module.named_parameters())
        for n, p in named.items():
            p.requires_grad_(n.startswith("head.") == (group == "head"))
        bare.optimizer = OPTIMIZERS[optimizer][1]([p for p in named.values() if p.requires_grad])
        close(out.theta[i], bare.train()[0])


@pytest.mark.parametrize("model", ["linear", "layer norm", "batch norm"])
def test_no_columns_at_all(model: str) -> None:
    """The base of a logistic model is empty.  Training it changes nothing."""
    e = build(model)
    none, trained, start = (
        e.model.columns.get("none", e.model.trained & type(e.model.trained)([])),
        e.model.trained,
        e.model.init_row(),
    )
    out = all_clients(e).train(start, columns=none)
    equal(trained.take(out.theta), trained.take(start).expand(len(IDS), -1))
    assert torch.isfinite(out.loss).all() and (out.loss > 0).all()

    def step(s, batch: Batch) -> None:
        g = s.grad(batch, columns=none)
        assert trained.take(g).abs().max() == 0
        s.descend(torch.ones_like(s.theta), columns=none)

    equal(trained.take(all_clients(e).train(start, step=step).theta), trained.take(start).expand(len(IDS), -1))


def test_columns_that_a_step_creates() -> None:
    """Temporary sets of columns have correct gradients."""
    e = build("layer norm")
    spans = list(e.model.spans.values())

    def step(s, batch: Batch) -> None:
        whole = s.grad(batch).clone()
        for a, b in spans:
            part = s.grad(batch, columns=type(s.columns)([(a, b)]))
            close(part[:, a:b], whole[:, a:b])
            assert part[:, :a].abs().sum() == 0 and part[:, b:].abs().sum() == 0
        s.descend(whole)

    all_clients(e).train(e.model.init_row(), step=step, how=LocalTraining(steps=2))


@pytest.mark.parametrize("model", ["linear", "batch norm"])
def test_unused_added_columns_have_gradient_zero(model: str) -> None:
    e = build(model)
    e.model.extend(gate=torch.tensor([2.0, 3.0]))
    gate, start, plain = e.model.columns["gate"], e.model.init_row(), build(model)
    out, expected = all_clients(e).train(start), all_clients(plain).train(plain.model.init_row())
    for name, value in plain.model.named(expected.theta).items():
        close(e.model.named(out.theta)[name], value)
    equal(gate.take(out.theta), gate.take(start).expand(len(IDS), -1))
    equal(
        all_clients(e).train(start, columns=gate).theta[:, : gate.slices[0][1]],
        start.expand(len(IDS), -1)[:, : gate.slices[0][1]],
    )

    def loss(s, rows: Tensor, batch: Batch) -> Tensor:
        return s.task_loss(s.forward(rows, batch), batch) + (gate.take(rows) ** 2).sum(1, keepdim=True)

    moved = all_clients(e).train(start, loss=loss, how=LocalTraining(steps=1))
    close(gate.take(moved.theta), 0.8 * gate.take(start).expand(len(IDS), -1))  # lr 0.1 times 2 gate


# -- steps, states, losses -------------------------------------------------------------------------------
@pytest.mark.parametrize("plan", PLANS)
def test_states_follow_their_client(plan: str) -> None:
    """In an unsorted cohort that is divided into chunks, each client has its own state in all its steps."""
    e = build(plan=plan, epochs=1)
    ids = np.array([5, 0, 3, 1])
    cohort = Cohort(e, ids, 0)
    who = torch.from_numpy(ids).float()[:, None]
    start = e.model.init_row() + who  # every row names its client

    def step(s, batch: Batch) -> None:
        assert (s.theta.sub(s.state.who).sub(e.model.init_row()).abs() < 1e-4).all()
        assert s.theta.shape[0] == s.k == len(batch.y) == len(s.num_steps)
        assert (s.num_steps > s.t).all()
        s.state.seen.add_(1)
        s.state.last.fill_(s.t)
        s.state.matrix[:, 1] = s.state.who[:, 0]

    out = cohort.train(start, step=step, who=who, seen=torch.zeros(4), last=torch.zeros(4), matrix=torch.zeros(4, 2))
    steps = torch.tensor([-(-SIZES[i] // min(5, SIZES[i])) for i in ids]).float()
    equal(out.seen, steps)
    equal(out.last, steps - 1)
    equal(out.steps, steps)
    equal(out.who, who)
    equal(out.matrix[:, 1], who[:, 0])
    equal(out.theta, start)


def test_states_passed_to_train_are_not_changed() -> None:
    e = build()
    state = torch.zeros(len(IDS), 2)
    shared = torch.zeros(2).expand(len(IDS), -1)  # one row seen by all

    def step(s, batch: Batch) -> None:
        s.state.a.add_(1)
        s.state.b.add_(1)

    out = all_clients(e).train(e.model.init_row(), step=step, how=LocalTraining(steps=2), a=state, b=shared)
    assert out.a.eq(2).all() and out.b.eq(2).all() and state.eq(0).all() and shared.eq(0).all()


def test_a_state_must_be_passed_and_is_changed_in_place() -> None:
    """Assigning another tensor to a state is an error, because the change would be lost."""
    e = build()
    start, alpha = e.model.init_row(), torch.zeros(len(IDS))
    with pytest.raises(AttributeError, match="alpha"):
        all_clients(e).train(start, step=lambda s, b: s.state.alpha)

    def bind_state(s, batch: Batch) -> None:
        s.state.alpha = s.theta

    def bind_theta(s, batch: Batch) -> None:
        s.theta = s.theta + 1

    for step, name in ((bind_state, "alpha"), (bind_theta, "theta")):
        with pytest.raises(AttributeError, match=name):
            all_clients(e).train(start, step=step, alpha=alpha)
    with pytest.raises(ValueError, match="theta as a state of clients, but theta are the trained parameters"):
        all_clients(e).train(start, step=lambda s, b: None, theta=alpha)


@pytest.mark.parametrize("name, value", [("key", "head"), ("epochs", 2), ("lr", torch.ones(4, 1)), ("uploaded", False)])
def test_settings_passed_as_states_are_refused(name: str, value: Any) -> None:
    e = build()
    with pytest.raises(
        ValueError, match=rf"train\({name}=\.\.\.\) passes {name} as a state .*how=LocalTraining\({name}=\.\.\.\)"
    ):
        all_clients(e).train(e.model.init_row(), **{name: value})
    with pytest.raises(ValueError, match=r"train\(tau=\.\.\.\) must be a tensor .* got float"):
        all_clients(e).train(e.model.init_row(), tau=0.5)  # type: ignore[arg-type]


def test_extra_gradient_is_the_gradient_of_a_penalty() -> None:
    """The gradient mu (theta - w) and the penalty mu/2 ||theta - w||^2 give the same rows."""
    e = build("layer norm")
    w = e.model.init_row()
    anchor = w + 0.1

    def loss(s, rows: Tensor, batch: Batch) -> Tensor:
        each = (s.task_loss(s.forward(rows, batch), batch) * batch.weight).sum(1)
        return each + 0.25 * (rows - anchor).square().sum(1)

    by_loss = all_clients(e).train(w, loss=loss)
    close(by_loss.theta, all_clients(e).train(w, extra_grad=lambda s: 0.5 * (s.theta - anchor)).theta)


@pytest.mark.parametrize("model", MODELS)
def test_a_custom_loss_that_is_the_tasks_loss(model: str) -> None:
    e = build(model, "momentum")
    start = e.model.init_row()
    plain = all_clients(e).train(start)

    def per_sample(s, rows: Tensor, batch: Batch) -> Tensor:
        return s.task_loss(s.forward(rows, batch), batch)

    def per_client(s, rows: Tensor, batch: Batch) -> Tensor:
        return (per_sample(s, rows, batch) * batch.weight).sum(1)

    for loss in (per_sample, per_client):
        out = all_clients(e).train(start, loss=loss)
        close(out.theta, plain.theta)
        close(out.loss, plain.loss)


def test_head_on_features_is_the_forward_pass() -> None:
    e = build("batch norm")
    start = e.model.init_row()

    def loss(s, rows: Tensor, batch: Batch) -> Tensor:
        return s.task_loss(s.model.head(rows, s.features(rows, batch)), batch)

    close(all_clients(e).train(start, loss=loss).theta, all_clients(e).train(start).theta)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", ["layer norm", "batch norm"])
def test_a_custom_loss_has_the_values_of_its_clients(model: str, plan: str) -> None:
    """States, rates, steps and draws inside a loss are those of the rows it is given, also where the engine groups
    clients by the size of their batch."""
    e = build(model, plan=plan)
    start, who = e.model.init_row(), torch.from_numpy(IDS).float()[:, None]
    steps = torch.tensor([2 * -(-n // min(5, n)) for n in SIZES]).float()

    def loss(s, rows: Tensor, batch: Batch) -> Tensor:
        k = len(rows)
        assert s.state.who.shape == (k, 1) and len(batch.y) == len(s.num_steps) == s.k == k
        equal(s.lr, 0.01 + 0.001 * s.state.who)
        equal(torch.from_numpy(s.num_steps).float(), steps[s.state.who[:, 0].long()])
        noise = (s.rng.uniform(1) - 0.5) * s.state.who
        return s.task_loss(s.forward(rows, batch), batch) * (1 + 0.1 * noise)

    out = all_clients(e).train(start, loss=loss, how=LocalTraining(lr=0.01 + 0.001 * who), who=who)
    alone = [
        Cohort(e, IDS[i : i + 1], 0).train(
            start, loss=loss, how=LocalTraining(lr=0.01 + 0.001 * who[i : i + 1]), who=who[i : i + 1]
        )
        for i in IDS
    ]
    close(out.theta, torch.cat([o.theta for o in alone]))


@pytest.mark.parametrize("teacher_first", [True, False])
def test_running_statistics_are_those_of_the_trained_rows(teacher_first: bool) -> None:
    """A loss with a teacher does not change the student's statistics."""
    e = build("batch norm")
    start, teacher = e.model.init_row(), e.model.init_row() + 0.3
    plain = all_clients(e).train(start)

    def loss(s, rows: Tensor, batch: Batch) -> Tensor:
        if teacher_first:
            s.forward(s.state.teacher, batch)
        each = s.task_loss(s.forward(rows, batch), batch)
        if not teacher_first:
            s.forward(s.state.teacher, batch)
        return each

    out = all_clients(e).train(start, loss=loss, teacher=teacher.expand(len(IDS), -1))
    close(out.theta, plain.theta)


def test_a_forward_pass_without_gradient_does_not_update_statistics() -> None:
    e = build("batch norm", batch_size=4)  # every first batch is full: clients are not grouped
    start = e.model.init_row()

    def step(s, batch: Batch) -> None:
        assert batch.full
        s.forward(s.theta + 1, batch)
        g = s.grad(batch, loss=lambda s, rows, b: rows.square().sum(1))
        s.descend(g)

    out = all_clients(e).train(start, step=step, how=LocalTraining(steps=1))
    buffers = e.model.trained.rest(e.model.size)
    equal(buffers.take(out.theta), buffers.take(start).expand(len(IDS), -1))


def test_several_gradients_of_a_step_have_separate_memory() -> None:
    e = build()

    def step(s, batch: Batch) -> None:
        one = s.grad(batch)
        first = one.clone()
        two = s.grad(batch, rows=s.theta + 1)
        equal(one, first)
        assert not torch.equal(one, two)
        s.descend(two.sub_(two).add_(one))

    twice, plain = (all_clients(e).train(e.model.init_row(), step=how) for how in (step, None))
    close(twice.theta, plain.theta)
    close(twice.loss, plain.loss)  # train/loss is that of the first of them


def test_a_learning_rate_per_client() -> None:
    """The learning rates of a step are those of the clients that still train."""
    for plan in PLANS:
        e = build(plan=plan)
        start = e.model.init_row()
        rates = torch.linspace(0.01, 0.2, len(IDS))[:, None]
        out = all_clients(e).train(start, how=LocalTraining(lr=rates))
        for i in IDS:
            close(
                out.theta[i], Cohort(e, IDS[i : i + 1], 0).train(start, how=LocalTraining(lr=rates[i].item())).theta[0]
            )
        equal(out.lr, rates)


def test_a_training_with_another_optimizer() -> None:
    e = build()
    start = e.model.init_row()
    out = all_clients(e).train(start, how=LocalTraining(optimizer=Adam(lr=0.01, eps=1e-3)))
    for i in IDS[:2]:
        close(out.theta[i], Bare(e, i, start, "adam").train()[0], 1e-4)


def test_a_descent_on_a_state_has_its_own_momentum() -> None:
    """Two rows with the same gradients stay equal.  A third one without gradients does not change."""
    e = build(optimizer="momentum")
    start = e.model.init_row()

    def step(s, batch: Batch) -> None:
        g = s.grad(batch)
        s.descend(g)
        s.descend(g, name="v")

    rows = start.expand(len(IDS), -1)
    out = all_clients(e).train(start, step=step, v=rows, u=rows)
    equal(out.v, out.theta)
    equal(out.u, rows)
    close(out.theta, all_clients(e).train(start).theta)


@pytest.mark.parametrize("model", ["linear", "batch norm"])
def test_kept_buffers_of_a_state(model: str) -> None:
    """With buffers={"theta": ..., "v": ...}, a state keeps its momentum as theta does."""
    e = build(model, "momentum", epochs=1)
    e.optimizer.reset = "never"
    start = e.model.init_row()

    def step(s, batch: Batch) -> None:
        g = s.grad(batch).clone()
        s.descend(g.clone())
        s.descend(g, name="v")

    trained = e.model.trained
    for r in range(2):
        out = all_clients(e, r).train(
            start, step=step, how=LocalTraining(buffers={"theta": "one", "v": "two"}), v=start.expand(len(IDS), -1)
        )
        equal(trained.take(out.v), trained.take(out.theta))
    for i in IDS[:2]:
        bare = Bare(e, i, start, "momentum")
        bare.train(0)
        bare.load(start)
        close(out.theta[i], bare.train(1)[0])


@pytest.mark.parametrize("model", ["linear", "batch norm"])
def test_batches_are_gathered_in_blocks_of_any_size(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    e = build(model)
    e.federation.augment = Augment(flip=True, crop=1)
    whole = all_clients(e).train(e.model.init_row())
    for size in (1, 1000):
        monkeypatch.setattr("fedbench.engine.batch.BLOCK_BYTES", size)
        equal(all_clients(e).train(e.model.init_row()).theta, whole.theta)


@pytest.mark.parametrize("native", [True, False])
def test_a_batch_of_one_sample_with_batch_norm_is_refused(native: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8))
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x) if native else self.body(x).clone())

    arrays, split = ragged(sizes=(6, 4))  # batches of 5 and 1
    e = engine(arrays, split, seeded(Net))
    with pytest.raises(ConfigError, match=r"one sample, .* set local.drop_last=true .* raise local.batch_size"):
        all_clients(e).train(e.model.init_row())
    assert all_clients(e).train(e.model.init_row(), how=LocalTraining(drop_last=True)).steps.tolist() == [1, 1]


def test_random_numbers_of_a_step_depend_on_its_key() -> None:
    e = build()

    def noise(s, batch: Batch) -> None:
        s.state.drawn.add_(s.rng.normal(3) * (s.t + 1))

    def run(ids: list[int], round: int = 0, plan: str = "vmap", key: str = "local") -> Tensor:
        e.executor.__init__(PLANS[plan], e.device)
        return (
            Cohort(e, np.array(ids), round)
            .train(e.model.init_row(), step=noise, how=LocalTraining(key=key), drawn=torch.zeros(len(ids), 3))
            .drawn
        )

    whole = run([0, 1, 2, 3])
    equal(whole[[1, 3]], run([1, 3]))
    equal(whole, run([0, 1, 2, 3], plan="loop"))
    assert not torch.equal(whole, run([0, 1, 2, 3], round=1))
    assert not torch.equal(whole, run([0, 1, 2, 3], key="other"))
    assert len(whole.unique()) == whole.numel()


def test_every_step_has_new_random_numbers() -> None:
    """Otherwise, dropout would have the same mask in all steps of a round."""
    drawn: list[Tensor] = []
    all_clients(build()).train(
        build().model.init_row(), step=lambda s, b: drawn.append(s.rng.uniform(2)), how=LocalTraining(steps=3)
    )
    assert len(torch.stack(drawn).unique()) == 3 * len(IDS) * 2


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("native", [True, False])
def test_dropout_in_training_is_the_same_under_every_plan(plan: str, native: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.5))
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x) if native else self.body(x).clone())

    arrays, split = ragged()

    def run(plan: str) -> Tensor:
        e = engine(arrays, split, seeded(Net), plan=plan)
        return all_clients(e).train(e.model.init_row()).theta

    close(run(plan), run("loop"))


# -- batches ---------------------------------------------------------------------------------------------
def batch(counts: list[int], width: int) -> Batch:
    counts = np.array(counts)
    slots = np.arange(width)
    weight = (slots < counts[:, None]) / np.maximum(counts, 1)[:, None]
    x = torch.arange(len(counts) * width).float().view(len(counts), width, 1)
    return Batch(x, x[..., 0].long(), torch.from_numpy(weight).float(), counts)


def test_real_samples_of_a_batch() -> None:
    b = batch([4, 2, 1], 4)
    assert not b.full and batch([4, 4], 4).full
    assert b.real.tolist() == [[True] * 4, [True, True, False, False], [True, False, False, False]]
    close(b.weight.sum(1), torch.ones(3))


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_parts_of_a_batch(parts: int) -> None:
    """Each real sample is in one part, in order.  Parts have about equal sizes and weights of sum 1."""
    b = batch([5, 4, 3, 2, 1], 6)
    pieces = b.split(parts)
    assert len(pieces) == parts
    for i, n in enumerate(b.counts):
        seen = [p.y[i, : p.counts[i]].tolist() for p in pieces]
        assert [y for part in seen for y in part] == b.y[i, :n].tolist()
        assert max(map(len, seen)) - min(map(len, seen)) <= 1
        for p in pieces:
            real = p.real[i]
            assert real.sum() == p.counts[i] and p.weight[i][~real].abs().sum() == 0
            close(p.weight[i].sum(), torch.tensor(float(p.counts[i] > 0)))


def test_parts_of_a_dict_and_masks() -> None:
    b = batch([3, 2], 4)
    b.x, b.class_mask = {"a": b.x, "b": b.x[..., 0] * 2}, torch.tensor([[True, False], [True, True]])
    one, two = b.split(2)
    assert one.x["b"][0, 0].item() == 2 * one.x["a"][0, 0].item() and two.x["a"].shape[:2] == (2, 1)
    assert one.class_mask is b.class_mask


@pytest.mark.parametrize("plan", ["vmap", "pairs"])
def test_indices_of_the_samples_of_a_batch(plan: str) -> None:
    """They are correct for a batch, its halves, and some of its clients."""
    e, seen = build(plan=plan, epochs=1), []

    def step(s, batch: Batch) -> None:
        some = batch.take_clients(np.arange(s.k - 1, s.k), torch.arange(s.k - 1, s.k), int(batch.counts[-1]))
        for b in (batch, *batch.split(2), some):
            x, y = e.federation.gather(b.index)
            for i, n in enumerate(b.counts):
                equal(x[i, :n], b.x[i, :n])
                equal(y[i, :n], b.y[i, :n])
        seen.extend(int(j) for i, n in enumerate(batch.counts) for j in batch.index[i, :n])

    all_clients(e).train(e.model.init_row(), step=step)
    assert sorted(seen) == sorted(e.federation.splits["train"].indices.tolist())


@pytest.mark.parametrize("model", ["linear", "batch norm"])
def test_gradients_on_parts_of_a_batch(model: str) -> None:
    """The halves' gradients, weighted by their sizes, are the batch's (where no statistics couple the samples);
    clients with one sample leave the second half empty, with gradient 0."""
    arrays, split = ragged(sizes=(7, 5, 1))
    e = engine(arrays, split, seeded(MODELS[model][0]), batch_size=8)

    def step(s, batch: Batch) -> None:
        one, two = batch.split(2)
        g1, g2 = s.grad(one), s.grad(two)
        share = torch.from_numpy(one.counts / batch.counts).float()[:, None]
        whole = s.grad(batch)
        empty = torch.from_numpy(two.counts == 0)
        trained = s.model.trained
        assert trained.take(g2)[empty].abs().sum() == 0
        assert torch.isfinite(g1).all() and torch.isfinite(g2).all()
        if model == "linear":
            close(share * g1 + (1 - share) * g2, whole)
        s.descend(whole)

    all_clients(e).train(e.model.init_row(), step=step, how=LocalTraining(steps=2))
