"""Local training of a chunk of clients: the step loop, and what a method's step can ask for.

A chunk is k >= 1 clients in descending order of their number of steps, so that those still training are a
prefix.  `Step` (called s in methods) shows every state cut to that prefix; `Batch` carries padding as weight 0.
A chunk sees only itself: chunks run one after the other, in threads or on other ranks, with equal results.

Letters: k clients still training, P numbers of a row, B batch, T steps, C classes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedbench.core.linalg import dot
from fedbench.core.rng import RowRandom, client_keys, key
from fedbench.engine.federation import Federation, Inputs
from fedbench.engine.gradients import Ask, Wanted, differentiate, in_training, keep_buffers
from fedbench.engine.optim import Memory, Optimizer, Rate
from fedbench.engine.per_client import PerClient
from fedbench.engine.privacy import within
from fedbench.engine.threads import Steps
from fedbench.nn import compiled
from fedbench.nn.compiled import Product
from fedbench.nn.flat import Columns, FlatModel
from fedbench.tasks.task import Task

if TYPE_CHECKING:
    from fedbench.engine.cohort import Engine

Loss = Callable[["Step", Tensor, "Batch"], Tensor]       # (s, rows [k, P], batch) -> [k, B] or [k]
BLOCK_BYTES = 1 << 20                                    # of gathered batches held ahead


@dataclass
class Batch:
    """x [k, B, ...] (or a dict of such), y [k, B, ...], weight [k, B]: each client's weights sum to 1 over its real
    samples, padding has 0.  counts: real samples per client, on the host [k].  class_mask [k, C] or None.
    index [k, B]: which samples of the federation these are (padding: some sample)."""

    x: Inputs
    y: Tensor
    weight: Tensor
    counts: np.ndarray
    class_mask: Tensor | None = None
    index: Tensor | None = None

    @property
    def full(self) -> bool:
        """Whether no client's batch is padded."""
        return bool((self.counts == self.weight.shape[1]).all())

    @property
    def real(self) -> Tensor:
        """Which slots hold a sample.  # [k, B] bool"""
        counts = sent(self.counts, self.weight.device)
        return torch.arange(self.weight.shape[1], device=self.weight.device) < counts[:, None]

    def split(self, parts: int) -> list[Batch]:
        """Consecutive parts of every client's real samples, as equal as can be; a client with fewer samples than
        parts leaves some of its parts empty (weight 0)."""
        edges = [np.ceil(self.counts * i / parts).astype(int) for i in range(parts + 1)]
        return [self.between(a, b) for a, b in itertools.pairwise(edges)]

    def between(self, start: np.ndarray, stop: np.ndarray) -> Batch:
        """The samples start[i] <= slot < stop[i] of client i, moved to the front of a narrower batch."""
        counts = stop - start
        width = int(counts.max(initial=1))
        device = self.weight.device
        slot = sent(start, device)[:, None] + torch.arange(width, device=device)          # [k, b]
        real = torch.arange(width, device=device) < sent(counts, device)[:, None]
        slot = slot.clamp_max(self.weight.shape[1] - 1)
        client = torch.arange(len(counts), device=self.weight.device)[:, None]
        weight = self.weight[client, slot] * real
        total = weight.sum(1, keepdim=True)
        x = {n: v[client, slot] for n, v in self.x.items()} if isinstance(self.x, dict) else self.x[client, slot]
        index = None if self.index is None else self.index[client, slot]
        return Batch(x, self.y[client, slot], weight / total.clamp_min(1e-30), counts, self.class_mask, index)

    def rows(self, chosen: np.ndarray, which: Tensor, width: int) -> Batch:
        """Some clients, chosen on the host and which on the device, cut to their first `width` samples."""
        x = {n: v[which, :width] for n, v in self.x.items()} if isinstance(self.x, dict) \
            else self.x[which, :width]
        mask = None if self.class_mask is None else self.class_mask[which]
        index = None if self.index is None else self.index[which, :width]
        return Batch(x, self.y[which, :width], self.weight[which, :width], self.counts[chosen], mask, index)


def sent(values: np.ndarray, device: torch.device) -> Tensor:
    """The values on the device; a GPU gets them from pinned memory, so that the host need not wait for it."""
    here = torch.from_numpy(np.ascontiguousarray(values))
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


class Feed:
    """The batches of a chunk, gathered from the federation a block of steps at a time.

    index [T, k, B] sample numbers (padding 0), counts [T, k] real ones; keys [k] seeds of augmentation.
    """

    def __init__(self, federation: Federation, ids: np.ndarray, index: np.ndarray, counts: np.ndarray,
                 augment_key: int | None = None):
        self.federation, self.counts = federation, counts
        device = federation.device
        self.index = torch.from_numpy(index).to(device)
        slots = np.arange(index.shape[2])
        weight = (slots < counts[..., None]) / np.maximum(counts, 1)[..., None]
        self.weight = torch.from_numpy(weight.astype(np.float32)).to(device)                 # [T, k, B]
        self.mask = None if federation.class_mask is None else federation.class_mask[torch.from_numpy(ids)]
        self.augment = federation.augment if augment_key is not None else None
        self.keys = torch.from_numpy(client_keys(augment_key or 0, ids)).to(device)
        self.block = (0, 0)
        self.x: Any = None
        self.y: Any = None

    def _load(self, t: int) -> None:
        per_step = max(1, self.index[t].numel() * self.federation.sample_bytes)
        stop = min(len(self.index), t + max(1, BLOCK_BYTES // per_step))
        active = int((self.counts[t] > 0).sum())
        self.x, self.y = self.federation.gather(self.index[t:stop, :active], self.augment is not None)
        if self.augment is not None:
            moved = [self.augment(_at(self.x, i), self.y[i], RowRandom(self.keys[:active] ^ key("step", t + i) >> 1))
                     for i in range(stop - t)]
            self.x, self.y = _stack([x for x, _ in moved]), torch.stack([y for _, y in moved])
        self.block = (t, stop)

    def __call__(self, t: int, k: int) -> Batch:
        """Step t for the first k clients."""
        if not self.block[0] <= t < self.block[1]:
            self._load(t)
        i = t - self.block[0]
        return Batch(_at(self.x, i, k), self.y[i, :k], self.weight[t, :k], self.counts[t, :k],
                     None if self.mask is None else self.mask[:k], self.index[t, :k])


def _at(x: Inputs, i: int, k: int | None = None) -> Inputs:
    return {n: v[i, :k] for n, v in x.items()} if isinstance(x, dict) else x[i, :k]


def _stack(batches: list[Any]) -> Any:
    if isinstance(batches[0], dict):
        return {n: torch.stack([b[n] for b in batches]) for n in batches[0]}
    return torch.stack(batches)


@dataclass
class Chunk:
    """What one chunk starts from and leaves: rows of theta and of every named state, clients in chunk order.  clip
    (privacy): the columns that will be uploaded, and the largest norm of a step's gradient in them."""

    ids: np.ndarray                           # [k]
    theta: Tensor                             # [k, P]
    state: dict[str, Tensor]                  # each [k, ...]
    memory: dict[str, dict[str, Tensor]]      # optimizer buffers by the name of the rows they belong to
    clip: tuple[Columns, float] | None = None
    loss: Tensor = field(default_factory=lambda: torch.zeros(0))


class Step:
    """Inside a local step: states by name, cut to the k rows still training, and what can be computed on them.

    s.theta [k, P] and every tensor passed to `train` as state: s.alpha, s.c_i, ... ; writing into them in place, or
    assigning s.alpha = value, changes the state.  s.t: the step.  s.lr: the learning rate.  s.rng: keyed draws.
    s.model, s.num_steps [k] (host): all local steps of each client.
    """

    engine: Engine
    model: FlatModel
    task: Task
    k: int
    t: int
    lr: Rate
    num_steps: np.ndarray
    columns: Columns

    def __init__(self, engine: Engine, chunk: Chunk, num_steps: np.ndarray, lr: Rate, columns: Columns,
                 loss: Loss | None, step_key: int, optimizer: Optimizer):
        own = self.__dict__                               # states are set through __setattr__, these are not states
        own.update(engine=engine, model=engine.model, task=engine.task, columns=columns, lr=lr, k=0, t=-1,
                   num_steps=num_steps)
        own["_chunk"], own["_optimizer"], own["_loss"] = chunk, optimizer, loss
        own["_all_steps"], own["_all_lr"], own["_step_key"] = num_steps, lr, step_key
        own["_keys"] = sent(client_keys(step_key, chunk.ids), chunk.theta.device)
        own["_views"] = {}                                # states cut to the active clients
        own["_pool"], own["_drawn"] = [], 0               # gradient tensors, and how many this step has used
        own["_asked"] = 0                                 # gradients that this step has asked for
        own["_plans"], own["_layouts"], own["_buffers"], own["_draws"] = {}, {}, {}, None
        own["_own"] = None                                # the rows that a custom loss is given
        own["_owned"] = {}                                # hyperparameters that differ by client, of the chunk
        own["_moved"] = {}                                # columns each name has moved in this step
        chunk.loss = torch.zeros(len(chunk.ids), device=chunk.theta.device)

    # -- states ------------------------------------------------------------------------------------------
    if not TYPE_CHECKING:
        def __getattr__(self, name: str) -> Tensor:
            try:
                return self.__dict__["_views"][name]
            except KeyError:
                raise AttributeError(f"this step has no state {name!r}: pass it to cohort.train({name}=...)") from None

        def __setattr__(self, name: str, value: Tensor) -> None:
            if name not in self._views:
                raise AttributeError(f"{name!r} is no state of this step: pass it to cohort.train({name}=...)")
            if value is not self._views[name]:
                self._views[name].copy_(value)

    if TYPE_CHECKING:
        theta: Tensor
        _chunk: Chunk
        _optimizer: Optimizer
        _loss: Loss | None
        _all_steps: np.ndarray
        _all_lr: Rate
        _step_key: int
        _keys: Tensor
        _views: dict[str, Tensor]
        _pool: list[Tensor]
        _drawn: int
        _asked: int
        _plans: dict[tuple[tuple[int, int], ...], Wanted]
        _layouts: dict[tuple[int, int], dict[str, Tensor]]
        _buffers: dict[str, Tensor]
        _own: Tensor | None
        _draws: RowRandom | None
        _moved: dict[str, Columns]
        _owned: dict[PerClient, Tensor]

        def __getattr__(self, name: str) -> Tensor: ...
        def __setattr__(self, name: str, value: Tensor) -> None: ...

    @property
    def rng(self) -> RowRandom:
        """Keyed draws of this step, one row per active client."""
        if self._draws is None:
            self.__dict__["_draws"] = RowRandom(self._keys[:self.k] ^ (key("t", self.t) >> 1))
        return self.__dict__["_draws"]

    def own(self, value: float | PerClient) -> float | Tensor:
        """A hyperparameter for the active clients: the number that all have, or each one's.  # [k, 1]"""
        if not isinstance(value, PerClient):
            return value
        if value not in self._owned:
            self._owned[value] = value.of(self._chunk.ids, self._chunk.theta.device)                 # [K, 1]
        return self._owned[value][:self.k]

    def begin(self, t: int, k: int) -> None:
        """Move to step t with k clients active."""
        own, chunk = self.__dict__, self._chunk
        own["t"], own["_asked"], own["_drawn"], own["_draws"], own["_moved"] = t, 0, 0, None, {}
        if k != self.k:
            own["k"] = k
            own["_views"] = {"theta": chunk.theta[:k], **{n: v[:k] for n, v in chunk.state.items()}}
            own["num_steps"] = self._all_steps[:k]
            own["lr"] = self._all_lr[:k] if isinstance(self._all_lr, Tensor) else self._all_lr
            own["_layouts"] = {}

    @property
    def summed_loss(self) -> Tensor:
        """Each client's batch losses (of the first gradient of every step) so far, summed.  # [k]"""
        return self._chunk.loss[:self.k]

    # -- what a method computes --------------------------------------------------------------------------
    def grad(self, batch: Batch, rows: Tensor | None = None, loss: Loss | None = None,
             columns: Columns | None = None) -> Tensor:
        """Gradient of the batch loss at rows (default s.theta), zero outside the trained columns.  # [k, P]

        loss(s, rows, batch) -> per-sample losses [k, B] (weighted here by batch.weight) or per-client ones [k].
        The result lives until the next step.  Float buffers (BatchNorm) of rows are updated in place.
        """
        return self._grad(batch, rows, loss, columns, {})

    def _grad(self, batch: Batch, rows: Tensor | None, loss: Loss | None, columns: Columns | None,
              products: dict[str, Product]) -> Tensor:
        """grad, but for what is given as products."""
        rows = self.theta if rows is None else rows
        columns = self.columns if columns is None else columns & self.model.trained
        turn, self.__dict__["_asked"] = self._asked, self._asked + 1
        if self.model.batch_statistics and not batch.full:
            grad, losses = self._exact_sizes(batch, rows, loss or self._loss, columns, turn)
        else:
            grad, losses = self._gradient(batch, rows, loss or self._loss, columns, turn, products)
        if turn == 0:                                   # the first gradient of a step is the training loss
            self._chunk.loss[:len(losses)] += losses
        return grad

    def _gradient(self, batch: Batch, rows: Tensor, loss: Loss | None, columns: Columns, turn: int,
                  products: dict[str, Product] | None = None) -> tuple[Tensor, Tensor]:
        """Gradient [k, P] and losses [k] of the task's own loss, or of the given one."""
        ask = Ask(self.model, self.task, rows, batch, columns, self._wanted(columns), self._from_pool, self._dropout,
                  turn, self._named, products or {})
        if loss is None:
            return self.engine.executor.gradients(ask)
        self.__dict__["_buffers"] = {}

        def losses(leaves: list[Tensor]) -> Tensor:
            own = self.__dict__["_own"] = torch.cat(leaves, dim=-1)
            return loss(self, own, batch)
        found = differentiate(ask, losses)
        keep_buffers(self.model, rows, self._buffers)
        return found

    @property
    def _dropout(self) -> Tensor | None:
        return self.rng.keys if self.model.has_dropout else None

    def _named(self, rows: Tensor) -> dict[str, Tensor]:
        """model.named(rows), remembered for the tensors that every step uses: the states and the gradients."""
        where = (rows.data_ptr(), self.k)
        if where not in self._layouts:
            named = self.model.named(rows)
            pooled = any(rows.data_ptr() == g.data_ptr() for g in self._pool)
            if pooled or any(rows is own for own in self._views.values()):
                self._layouts[where] = named
            return named
        return self._layouts[where]

    def _wanted(self, columns: Columns) -> Wanted:
        which = tuple(columns.slices)
        if which not in self._plans:
            self._plans[which] = Wanted.of(self.model, columns)
        return self._plans[which]

    def _run(self, params: dict[str, Tensor], batch: Batch, until: str | None, own: bool) -> Tensor:
        """own: these are the rows being differentiated, so their statistics go with the gradient (of other rows,
        say a teacher's, only as long as there are none)."""
        found, buffers = in_training(self.model, params, batch.x, self._dropout, until)
        if own or not self._buffers:
            self.__dict__["_buffers"] = buffers
        return found

    def _from_pool(self) -> Tensor:
        if self._drawn == len(self._pool):
            self._pool.append(torch.empty_like(self._chunk.theta))
        self.__dict__["_drawn"] += 1
        return self._pool[self._drawn - 1][:self.k]

    def _exact_sizes(self, batch: Batch, rows: Tensor, loss: Loss | None, columns: Columns, turn: int
                     ) -> tuple[Tensor, Tensor]:
        """Models with batch statistics: clients grouped by batch size, so that no padding enters the statistics."""
        whole = self._from_pool()
        losses = torch.zeros(len(rows), device=rows.device)
        for size in np.unique(batch.counts):
            chosen = np.flatnonzero(batch.counts == size)
            which = sent(chosen, rows.device)
            own = rows[which]
            whole[which], losses[which] = self._only(chosen, which)._gradient(
                batch.rows(chosen, which, int(size)), own, loss, columns, turn)
            rows[which] = own                                   # the buffers that the forward pass updated
        return whole, losses

    def _only(self, chosen: np.ndarray, which: Tensor) -> Step:
        """This step seen by some of its clients, chosen on the host and which on the device, for reading."""
        chunk = Chunk(self._chunk.ids[chosen], self.theta[which], {n: v[which] for n, v in self._views.items()
                                                                  if n != "theta"}, {})
        lr = self.lr[which] if isinstance(self.lr, Tensor) else self.lr
        sub = Step(self.engine, chunk, self.num_steps[chosen], lr, self.columns, self._loss,
                   self._step_key, self._optimizer)
        sub.begin(self.t, len(chosen))
        return sub

    def forward(self, rows: Tensor, batch: Batch) -> Tensor:
        """Logits of rows [k, P] on the batch; differentiable inside a loss.  # [k, B, C]"""
        return self._run(self.model.named(rows), batch, None, rows is self._own)

    def features(self, rows: Tensor, batch: Batch) -> Tensor:
        """What enters the head.  # [k, B, F]"""
        return self._run(self.model.named(rows), batch, "head", rows is self._own)

    def task_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """The task's per-sample loss.  # [k, B]"""
        return self.task.loss(logits, batch.y, batch.class_mask)

    def descend(self, grad: Tensor, name: str = "theta", lr: Rate | None = None, columns: Columns | None = None,
                uploaded: bool = True) -> None:
        """One step of the configured optimizer on the named rows, in the trained columns (or these ones).

        The rows' buffers are their own.  Columns that are not named stand still, momentum included.  A state that is
        no row of the model (of another width) has no such columns: all of it moves.  uploaded=False: what moves here
        never leaves the client (`train` may say so of all steps), so that privacy does not clip it.
        """
        rows, columns = self._views[name], self.columns if columns is None else columns & self.model.trained
        if rows.shape[1] != self.model.size:
            columns = Columns([(0, rows.shape[1])])
        memory, rate = self._memory(name), self.lr if lr is None else lr
        if self._optimizer.clip is not None:
            grad = self._optimizer.clipped(grad, columns.take(grad))
        if self._chunk.clip is not None and uploaded:
            grad = self._within(grad, columns)
        if self._again(name, columns):
            self._optimizer.tick(memory)
        for a, b in columns.slices:
            cut = {n: m[:, a:b] if m.shape[1] > 1 else m for n, m in memory.items()}
            self._optimizer.update(rows[:, a:b], grad[:, a:b], cut, rate)

    def advance(self, batch: Batch, plus: Tensor, along: Tensor) -> Tensor:
        """`descend(grad(batch) + plus)`, plus [k, P]; theta's inner products with along [P] or [k, P] before it.  # [k]

        The same as the three operations, which read and write a row several times, in fewer passes over memory where
        that can be done.
        """
        clipped = self._optimizer.clip is not None or self._chunk.clip is not None
        if clipped or self.columns.slices != [(0, self.model.size)]:
            grad, before = self.grad(batch), dot(self.theta, along)
            self.descend(grad.add_(plus))
            return before
        memory = self._memory("theta")
        products = self._products(batch) if self._optimizer.compiles(self.theta, plus, along, *memory.values()) else {}
        grad = self._grad(batch, None, None, None, products)
        if self._again("theta", self.columns):
            self._optimizer.tick(memory)
        given = [p for p in products.values() if p.y is not None]
        return self._optimizer.advance(self.theta, grad, plus, along, memory, self.lr, given)

    def _products(self, batch: Batch) -> dict[str, Product]:
        """Weights whose gradient is better not written before a compiled step: large ones, of few samples."""
        model = self.model
        if self.k > 1 or model.chain is None or batch.weight.shape[1] > compiled.FEW:
            return {}
        spans = {name: model.spans[name] for name in model.chain.linear if name in model.spans}
        return {name: Product(a) for name, (a, b) in spans.items() if b - a >= compiled.LARGE}

    def _memory(self, name: str) -> Memory:
        """The optimizer's buffers of the named rows, of the clients still training."""
        memory = self._chunk.memory.setdefault(name, {})
        for buffer in self._optimizer.buffers:
            if buffer not in memory:
                whole = self._chunk.theta if name == "theta" else self._chunk.state[name]
                memory[buffer] = self._optimizer.new(buffer, whole)
        return {n: m[:self.k] for n, m in memory.items()}

    def _within(self, grad: Tensor, columns: Columns) -> Tensor:
        """grad with the part that moves what is uploaded clipped, for privacy."""
        assert self._chunk.clip is not None
        goes, most = self._chunk.clip
        part = columns if grad.shape[1] != self.model.size else columns & goes
        return part.put(grad, within(part.take(grad), None, most))

    def _again(self, name: str, columns: Columns) -> bool:
        """Whether these columns begin another optimizer step of the named rows: parts that move one after the
        other within a local step share one."""
        before = self._moved.get(name)
        again = before is None or (before & columns).size > 0
        self._moved[name] = columns if before is None or again else before | columns
        return again


def train_chunk(engine: Engine, chunk: Chunk, feed: Feed, num_steps: np.ndarray, lr: Rate, columns: Columns,
                step: Callable[[Step, Batch], None], loss: Loss | None, step_key: int, optimizer: Optimizer) -> Steps:
    """Run all local steps of a chunk, in place, yielding after each.  num_steps [k] descending, on the host."""
    s = Step(engine, chunk, num_steps, lr, columns, loss, step_key, optimizer)
    active = (num_steps[None] > np.arange(int(num_steps.max(initial=0)))[:, None]).sum(1)      # [T]
    for t, k in enumerate(active.tolist()):
        s.begin(t, k)
        step(s, feed(t, k))
        yield
    chunk.loss /= torch.from_numpy(np.maximum(num_steps, 1)).to(chunk.loss)


def plain_step(extra_grad: Callable[[Step], Tensor] | None) -> Callable[[Step, Batch], None]:
    """Gradient of the loss, plus extra_grad(s) [k, P] in the trained columns, then descend."""
    def step(s: Step, batch: Batch) -> None:
        g = s.grad(batch)
        if extra_grad is not None:
            extra = extra_grad(s)
            for a, b in s.columns.slices:
                g[:, a:b] += extra[:, a:b]
        s.descend(g)
    return step
