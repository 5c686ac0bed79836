"""A cohort: any set of clients, and what can be computed on them.

The round's cohort is one; all clients, a slice at a time, are others (evaluation).  What a method asks here it
gets in the order of `ids`, whatever way the executor chose to compute it.

Letters: N clients of the federation, K of the cohort, P numbers of a row.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.core import rng
from fedbench.core.options import RunError
from fedbench.engine.executor import Executor
from fedbench.engine.federation import Federation, Inputs
from fedbench.engine.gradients import chain_gradient
from fedbench.engine.local import Batch, Chunk, Feed, Loss, Step, plain_step, train_chunk
from fedbench.engine.optim import Optimizer, Rate
from fedbench.engine.privacy import Privacy
from fedbench.engine.rows import Rows, RowStore
from fedbench.engine.threads import Steps
from fedbench.nn.flat import Columns, FlatModel
from fedbench.nn.program import Call
from fedbench.tasks.task import Task

DIVERGED = 1e8          # a mean training loss beyond this has left every useful scale, even while it is finite
RESERVED = {*dir(Step), *Step.__annotations__, "theta"}       # names that no state may have


@dataclass
class Ledger:
    """What a round cost by the method's own account."""

    steps: int = 0
    samples: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    loss: float = float("nan")


@dataclass
class Engine:
    """What all cohorts of a run share.  epochs, batch_size, drop_last: the local.* keys; rounds: of the run;
    eval_batch: samples of a client at once, outside training; shared_batch: of all clients, where they hold one row
    (None: as many); everyone: the federation with its new clients, who come last and take no part in the rounds;
    privacy: what is done to uploads."""

    federation: Federation
    model: FlatModel
    optimizer: Optimizer
    executor: Executor
    rows: RowStore
    seed: int = 0
    rounds: int = 1
    epochs: int = 1
    batch_size: int = 10
    drop_last: bool = False
    eval_batch: int = 64
    shared_batch: int | None = None
    memories: dict[str, Rows] = field(default_factory=dict)
    everyone: Federation | None = None
    privacy: Privacy | None = None

    @property
    def task(self) -> Task:
        return self.federation.task

    @property
    def device(self) -> torch.device:
        return self.federation.device

    def memory(self, owner: str, buffer: str, width: int) -> Rows:
        """The kept optimizer buffers of all clients for the rows called owner (optimizer.reset=never)."""
        name = f"optimizer/{owner}/{buffer}"
        if name not in self.memories:
            sample = torch.zeros(1, width, device=self.device)
            self.memories[name] = self.rows(name, self.optimizer.new(buffer, sample)[0])
        return self.memories[name]


class Cohort:
    """ids [K] (ascending, host), weights [K] = n_i / sum n over the cohort, num_samples [K], round (from 0),
    num_clients N, rounds of the run."""

    def __init__(self, engine: Engine, ids: np.ndarray, round: int, purpose: str = "round"):
        self.engine, self.ids, self.round, self.purpose = engine, np.asarray(ids, np.int64), round, purpose
        self.federation, self.model = engine.federation, engine.model
        self.num_clients, self.rounds = engine.federation.num_clients, engine.rounds
        self.ledger = Ledger()
        self._sent: list[tuple[str, np.ndarray, Tensor]] = []      # with privacy: to whom [k], and what [k, ...]
        self._uploads: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def num_samples(self) -> Tensor:
        """Training samples per client.  # [K] float32"""
        return torch.from_numpy(self.federation.num_samples[self.ids]).float().to(self.device)

    @property
    def longest(self) -> int:
        """Local steps of the client that takes most, in a training as configured."""
        e = self.engine
        steps, _ = rng.lengths(self.federation.num_samples[self.ids], e.batch_size, epochs=e.epochs,
                               drop_last=e.drop_last)
        return int(steps.max(initial=0))

    @property
    def weights(self) -> Tensor:
        """n_i / sum over the cohort.  # [K]"""
        n = self.federation.num_samples[self.ids].astype(np.float64)
        return torch.from_numpy(n / n.sum()).float().to(self.device)

    @property
    def index(self) -> Tensor:
        """ids as an int64 tensor on the device.  # [K]"""
        return torch.from_numpy(self.ids).to(self.device)

    def rate(self, optimizer: Optimizer | None = None) -> Rate:
        """This round's learning rate: one, or one a client.  # [K, 1]"""
        found = (optimizer or self.engine.optimizer).rate(self.round, self.rounds, self.ids)
        return found.to(self.device) if isinstance(found, Tensor) else found

    @property
    def positions(self) -> Tensor:
        """0 to K - 1, on the device.  # [K]"""
        return torch.arange(len(self), device=self.device)

    def everyone(self) -> Cohort:
        """All clients, in this round and on this cohort's account: for methods that begin with everybody."""
        whole = copy.copy(self)
        whole.ids = np.arange(self.num_clients)
        return whole

    def only(self, which: np.ndarray) -> Cohort:
        """Some of these clients, which [K] bool, in this round and on this cohort's account: for what not all do."""
        some = copy.copy(self)
        some.ids = self.ids[which]
        return some

    def generator(self, *purpose: int | str) -> np.random.Generator:
        """A keyed generator for a method's own draws in this round."""
        return rng.generator(self.engine.seed, *purpose, self.round)

    def random(self, purpose: str) -> rng.RowRandom:
        """Keyed draws with one row per client of the cohort."""
        base = rng.key(self.engine.seed, purpose, self.round)
        return rng.RowRandom(torch.from_numpy(rng.client_keys(base, self.ids)).to(self.device))

    # -- communication -----------------------------------------------------------------------------------
    def broadcast(self, **tensors: Tensor) -> SimpleNamespace:
        """Send the same tensors to every client of the cohort; returns what they see."""
        self.ledger.bytes_down += len(self) * sum(_bytes(t) for t in tensors.values())
        if self.engine.privacy is not None:
            self._sent += [(name, self.ids, t.expand(len(self), *t.shape)) for name, t in tensors.items()]
        return SimpleNamespace(**tensors)

    def download(self, **tensors: Tensor) -> SimpleNamespace:
        """Send each client its own row of tensors [K, ...]; returns what they see."""
        self._rows_only("download", tensors)
        self.ledger.bytes_down += sum(_bytes(t) for t in tensors.values())
        if self.engine.privacy is not None:
            self._sent += [(name, self.ids, t) for name, t in tensors.items()]
        return SimpleNamespace(**tensors)

    def fetch(self, which: Tensor, **rows: Tensor) -> SimpleNamespace:
        """Client i downloads one row of each tensor [n, ...] for every True in which[i]; returns what they see.

        One tensor for all: that a client reads only the rows it fetched is the method's to respect.
        """
        self._rows_only("fetch", {"which": which})
        self.ledger.bytes_down += int(which.sum()) * sum(_bytes(t[0]) for t in rows.values())
        return SimpleNamespace(**rows)

    def upload(self, *, around: Mapping[str, Tensor | None] | None = None, **tensors: Tensor) -> SimpleNamespace:
        """Every client sends its row of tensors [K, ...]; returns what the server sees: with privacy, something else.

        around: by name, what the server expects of a tensor before it comes ([...], [K, ...]; None: 0), from where
        privacy measures a client's part; default: what was sent to the clients in this round in the same shape (under
        the same name if there is such, else the first), or else 0.  It must not depend on what the server was not told.
        """
        self._rows_only("upload", tensors)
        self.ledger.bytes_up += sum(_bytes(t) for t in tensors.values())
        if self.engine.privacy is not None:
            tensors = {name: self._released(name, t, around or {}) for name, t in tensors.items()}
        return SimpleNamespace(**tensors)

    def _released(self, name: str, value: Tensor, around: Mapping[str, Tensor | None]) -> Tensor:
        assert self.engine.privacy is not None
        again, self._uploads[name] = self._uploads[name], self._uploads[name] + 1
        expected = around[name] if name in around else self._known(name, value.shape[1:])
        return self.engine.privacy.release(self, name, value, expected, again)

    def _known(self, name: str, shape: torch.Size) -> Tensor | None:
        """What each of these clients was sent in this shape, under this name if there is such, else first."""
        alike = [s for s in self._sent if s[2].shape[1:] == shape and np.isin(self.ids, s[1]).all()]
        if not alike:
            return None
        _, ids, sent = next((s for s in alike if s[0] == name), alike[0])
        order = np.argsort(ids)
        where = order[np.searchsorted(ids[order], self.ids)]
        return sent if np.array_equal(ids, self.ids) else sent[torch.from_numpy(where).to(sent.device)]

    def _rows_only(self, what: str, tensors: dict[str, Tensor]) -> None:
        for name, t in tensors.items():
            if len(t) != len(self):
                raise ValueError(f"{what}({name}=...): {len(t)} rows for {len(self)} clients")

    # -- training ----------------------------------------------------------------------------------------
    def train(self, start: Tensor, *, step: Callable[[Step, Batch], None] | None = None,
              extra_grad: Callable[[Step], Tensor] | None = None, loss: Loss | None = None,
              columns: Columns | None = None, epochs: int | None = None, steps: int | None = None,
              lr: Rate | None = None, batch_size: int | None = None, drop_last: bool | None = None,
              split: str = "train", key: str = "local", buffers: str | dict[str, str] = "theta",
              optimizer: Optimizer | None = None, counted: float = 1.0, uploaded: bool | Columns = True,
              **state: Tensor) -> SimpleNamespace:
        """Local training from start [P] or [K, P]; state: tensors [K, ...] that a step reads and changes.

        step(s, batch) replaces "gradient, plus extra_grad(s), descend".  loss(s, rows, batch) -> [k, B] replaces
        the task's.  columns: only these learn.  key: trainings of a round with the same key draw the same batches.
        buffers: under whose name kept optimizer buffers are stored (a second personal row has its own); a dict
        such as {"theta": name, "v": name} where a step descends on states [K, ...] as well.
        counted: the share of the drawn samples that counts as trained on (images/s): what a batch serves beside
        the update that it defines, or a second pass for a second model, is work but no further sample.
        uploaded: whether the rows are uploaded afterwards, or which of their columns: privacy clips the steps of these.
        Returns theta [K, P], every state, steps [K] float32, loss [K] (mean over steps), lr.
        """
        if hidden := sorted(RESERVED & state.keys()):
            raise ValueError(f"train({hidden[0]}=...): a step has something else under this name; choose another")
        e, ids = self.engine, self.ids
        optimizer = optimizer or e.optimizer
        lr = self.rate(optimizer) if lr is None else lr
        columns = self.model.trained if columns is None else columns & self.model.trained
        plan = self._schedule(split, key, epochs if steps is None else None, steps, batch_size, drop_last)
        order, counts = plan["order"], plan["counts"]
        together, written = e.executor.ranks.together, {"theta", "loss"}
        rows = start.expand(len(ids), -1) if start.dim() == 1 else start
        out = {"theta": torch.empty(len(ids), rows.shape[1], device=self.device),
               **{n: torch.empty_like(t) for n, t in state.items()}, "loss": torch.zeros(len(ids), device=self.device)}
        names = {"theta": buffers} if isinstance(buffers, str) else buffers
        kept = self._kept_memory(optimizer, names, {"theta": rows, **state})
        step_key = rng.key(e.seed, key, self.round)
        goes = uploaded if isinstance(uploaded, Columns) else self.model.all if uploaded else Columns([])
        most = e.privacy.step_clip if e.privacy is not None and self.purpose == "round" else None
        clip = None if most is None else (goes, most)

        def job(a: int, b: int) -> Steps:
            mine = order[a:b]                                            # positions in ids, most steps first
            where = torch.from_numpy(mine).to(self.device)
            begin = rows[where] if rows.stride(0) else rows[:b - a].clone()
            chunk = Chunk(ids[mine], e.executor.gradients.home(begin),
                          {n: t[where] for n, t in state.items()},
                          {buffers_of: {n: t[where] for n, t in m.items()}
                           for buffers_of, m in kept.items()}, clip)
            feed = Feed(self.federation, chunk.ids, plan["index"][:, a:b], counts[:, a:b], step_key)
            rate = lr[where] if isinstance(lr, Tensor) else lr
            yield from train_chunk(e, chunk, feed, plan["steps"][mine], rate, columns, step or plain_step(extra_grad),
                                   loss, step_key, optimizer)
            out["theta"][where], out["loss"][where] = chunk.theta, chunk.loss
            for n, t in chunk.state.items():
                out[n][where] = t
                if together and not torch.equal(t, state[n][where]):
                    written.add(n)
            for owner, m in kept.items():
                for n in m:
                    m[n][where] = chunk.memory[owner][n]

        e.executor.run(job, len(order), plan["steps"][order])
        memories = {f"{owner}/{n}": t for owner, m in kept.items() for n, t in m.items()}
        moved = e.executor.ranks.exchange(plan["shares"], {**out, **memories}, written | memories.keys())
        for n in state.keys() - moved if together else ():
            out[n].copy_(state[n])                                       # as it was given, on every rank
        self._keep_memory(kept, names)
        self._account(plan, counted, out["loss"], out["theta"])
        return SimpleNamespace(**out, steps=torch.from_numpy(plan["steps"]).float().to(self.device), lr=lr)

    def _schedule(self, split: str, key: str, epochs: int | None, steps: int | None, batch_size: int | None,
                  drop_last: bool | None) -> dict[str, Any]:
        """Which sample when: steps [K] and samples [K] of all clients, what each rank trains (shares), and of this
        rank's clients, most steps first, order [k], index [T, k, B] and counts [T, k] (host)."""
        e, part = self.engine, self.federation.splits[split]
        sizes, batch_size = part.sizes_of(self.ids), batch_size or e.batch_size
        how: Any = {"epochs": e.epochs if epochs is None and steps is None else epochs, "steps": steps,
                    "drop_last": e.drop_last if drop_last is None else drop_last}
        done, samples = rng.lengths(sizes, batch_size, **how)                              # [K]
        shares = e.executor.ranks.share(done)
        order = shares[e.executor.ranks.rank]
        position, counts = rng.batches(rng.key(e.seed, "batches", key, self.round), self.ids[order], sizes[order],
                                       batch_size, **how)
        begin = part.offsets[self.ids[order]]
        index = part.indices[np.minimum(begin[None, :, None] + position, max(len(part.indices) - 1, 0))]
        return {"shares": shares, "order": order, "index": index, "counts": counts, "steps": done, "samples": samples}

    def _kept_memory(self, optimizer: Optimizer, names: dict[str, str], moved: dict[str, Tensor]
                     ) -> dict[str, dict[str, Tensor]]:
        if optimizer.reset != "never" or not optimizer.buffers or self.purpose != "round":
            return {}                             # what is trained for an evaluation or a trial leaves no trace
        return {rows: {b: self.engine.memory(name, b, moved[rows].shape[1])[self.ids] for b in optimizer.buffers}
                for rows, name in names.items()}

    def _keep_memory(self, kept: dict[str, dict[str, Tensor]], names: dict[str, str]) -> None:
        for rows, memory in kept.items():
            for buffer, values in memory.items():
                self.engine.memory(names[rows], buffer, values.shape[1])[self.ids] = values

    def _account(self, plan: dict[str, Any], counted: float, loss: Tensor, theta: Tensor) -> None:
        self.ledger.steps += int(plan["steps"].sum())
        self.ledger.samples += round(counted * int(plan["samples"].sum()))
        trained = torch.from_numpy(np.flatnonzero(plan["steps"])).to(loss.device)
        if len(trained):
            sound = (loss.abs() < DIVERGED) & torch.isfinite(theta.sum(1))
            if not bool(sound.all()):
                self._stop(int(torch.nonzero(~sound)[0].item()), loss)
            self.ledger.loss = float(loss[trained].mean())

    def _stop(self, position: int, loss: Tensor) -> None:
        value = float(loss[position])
        what = f"has diverged ({value:.3g})" if np.isfinite(value) else "is not finite"
        lr, client = self.engine.optimizer.lr, self.ids[position]
        raise RunError(f"the training loss of client {client} {what} in round {self.round + 1}: "
                       f"optimizer.lr={lr[client] if isinstance(lr, list) else lr:g} is probably too large")

    # -- whole splits ------------------------------------------------------------------------------------
    def gradient(self, rows: Tensor, split: str = "train", drop_last: bool = False) -> tuple[Tensor, Tensor]:
        """Gradient [K, P] and mean loss [K] of rows [P] or [K, P] over a client's whole split.

        drop_last: leave out the samples beyond the last full local batch, as some released codes do.
        """
        rows = rows.expand(len(self), -1) if rows.dim() == 1 else rows
        out = torch.zeros(len(self), rows.shape[1], device=self.device)
        losses = torch.zeros(len(self), device=self.device)

        def chunk(where: Tensor, blocks: Iterator[Batch]) -> Steps:
            theta = rows[where]                                                       # [k, P]
            total, loss = torch.zeros_like(theta), losses.new_zeros(len(theta))
            grad = total                                                              # of the first block
            for n, batch in enumerate(blocks):
                k = len(batch.weight)
                grad = torch.zeros_like(theta) if n == 1 else grad
                loss[:k] += self._block_gradient(theta[:k], batch, grad[:k])
                if n > 0:
                    total[:k] += grad[:k]
                yield
            out[where], losses[where] = total, loss

        shares = self._chunks(chunk, split, drop_last)
        self.engine.executor.ranks.exchange(shares, {"gradient": out, "loss": losses})
        return out, losses

    def _block_gradient(self, rows: Tensor, batch: Batch, into: Tensor) -> Tensor:
        """Write the gradient [k, P] of rows on a block, in evaluation mode; returns its weighted losses [k]."""
        model, task = self.model, self.engine.task
        if model.chain is not None:
            return chain_gradient(model, task, model.named(rows), batch, model.named(into))
        named = model.named(rows.detach())
        leaves = {n: p.requires_grad_() for n, p in named.items() if n not in model.buffer_names}
        with torch.enable_grad():
            logits = model.apply(named, batch.x, True, Call())
            each = (task.loss(logits, batch.y, batch.class_mask) * batch.weight).sum(1)
            learned = torch.autograd.grad(each.sum(), list(leaves.values()), materialize_grads=True)
        for name, g in zip(leaves, learned):
            a, b = model.spans[name]
            into[:, a:b] = g.reshape(len(into), -1)
        return each.detach()

    def loss(self, rows: Tensor, split: str = "train") -> Tensor:
        """Mean loss of rows [P], [K, P] or [K, M, P] over each client's whole split.  # [K] or [K, M]"""
        if rows.dim() == 3:
            each = [self.loss(rows[:, m], split) for m in range(rows.shape[1])]
            return torch.stack(each, dim=1) if each else rows.new_zeros(len(rows), 0)
        rows = rows.expand(len(self), -1) if rows.dim() == 1 else rows
        losses = torch.zeros(len(self), device=self.device)

        def chunk(where: Tensor, blocks: Iterator[Batch]) -> Steps:
            theta, total = rows[where], losses.new_zeros(len(where))
            for batch in blocks:
                logits = self.model.predict(theta[:len(batch.weight)], batch.x)
                each = self.engine.task.loss(logits, batch.y, batch.class_mask)
                total[:len(each)] += (each * batch.weight).sum(1)
                yield
            losses[where] = total

        self.engine.executor.ranks.exchange(self._chunks(chunk, split), {"loss": losses})
        return losses

    def forward(self, rows: Any, fn: Callable[[FlatModel, Any, Inputs], Tensor] | None = None,
                split: str = "test") -> list[Tensor]:
        """fn(model, rows [k, ...], inputs [k, b, ...]) -> [k, b, ...] over each client's whole split, in order.

        rows: [P], [K, P], or a dict of such (cut to the chunk alike).  Returns one tensor [n_i, ...] per client.
        """
        fn = fn or (lambda model, r, x: model.predict(r, x))
        shared = isinstance(rows, Tensor) and (rows.dim() == 1 or (len(self) > 1 and rows.stride(0) == 0))
        if shared and self.federation.class_mask is None:
            return self._forward_shared(rows if rows.dim() == 1 else rows[0], fn, split)
        found = [torch.zeros(0, device=self.device)] * len(self)

        def chunk(where: Tensor, blocks: Iterator[Batch]) -> Steps:
            parts: list[list[Tensor]] = [[] for _ in where]
            for batch in blocks:
                y = fn(self.model, cut(rows, where[:len(batch.weight)]), batch.x)
                for i, count in enumerate(batch.counts):
                    parts[i].append(y[i, :count])
                yield
            for position, part in zip(where.tolist(), parts):
                found[position] = torch.cat(part) if part else found[position]

        self.engine.executor.ranks.exchange_lists(self._chunks(chunk, split), found, self.device)
        return found

    def _forward_shared(self, row: Tensor, fn: Callable, split: str) -> list[Tensor]:
        """All clients hold one row: one unbatched pass over all their samples."""
        part = self.federation.splits[split].select(self.ids)
        index = torch.from_numpy(part.indices).to(self.device)
        size, ranks = self.engine.shared_batch or self.engine.eval_batch, self.engine.executor.ranks
        pieces: list[Any] = [None] * -(-len(index) // size)
        shares = ranks.share(np.ones(len(pieces), np.int64))
        mine = shares[ranks.rank]

        def job(a: int, b: int) -> None:
            at = int(mine[a])
            x, _ = self.federation.gather(index[None, at * size:(at + 1) * size])
            pieces[at] = fn(self.model, row[None], x)[0]

        self.engine.executor.run(job, len(mine), pieces=True)
        ranks.exchange_lists(shares, pieces, self.device)
        whole = torch.cat(pieces) if pieces else torch.zeros(0, device=self.device)
        return list(whole.split(np.diff(part.offsets).tolist()))

    def _chunks(self, work: Callable[[Tensor, Iterator[Batch]], Steps], split: str, drop_last: bool = False
                ) -> list[np.ndarray]:
        """work(where [k] positions, blocks) for every chunk of this rank's clients, without gradients, which yields
        after every block; returns the positions that each rank worked on.

        The blocks cover each client's whole split; a batch is of the first clients of the chunk, those with samples
        left, and its weights are shares of the split, so that they sum to 1 over the blocks.
        """
        part, ranks = self.federation.splits[split], self.engine.executor.ranks
        sizes = part.sizes_of(self.ids)
        if drop_last:
            own = np.maximum(np.minimum(self.engine.batch_size, sizes), 1)
            sizes = sizes // own * own
        shares = ranks.share(sizes)
        order = shares[ranks.rank]
        begin, width = part.offsets[self.ids], self.engine.eval_batch

        def blocks(mine: np.ndarray) -> Iterator[Batch]:
            n = sizes[mine]
            longest = int(n.max(initial=0))
            size = -(-longest // max(1, -(-longest // width)))   # the last block as long as the others
            for at in range(0, longest, max(1, size)):
                now = mine[n > at]                               # a prefix: sizes descend
                counts = np.minimum(sizes[now] - at, size)
                slot = np.minimum(at + np.arange(counts.max()), sizes[now][:, None] - 1)
                index = part.indices[begin[now][:, None] + slot]
                batch = Feed(self.federation, self.ids[now], index[None], counts[None])(0, len(now))
                batch.weight = batch.weight * torch.from_numpy(counts / sizes[now]).float().to(self.device)[:, None]
                yield batch

        def job(a: int, b: int) -> Steps:
            return work(torch.from_numpy(order[a:b]).to(self.device), blocks(order[a:b]))

        self.engine.executor.run(job, len(order), -(-sizes[order] // width))
        return shares


def _bytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


def cut(rows: Any, where: Tensor) -> Any:
    """Rows [K, ...] at positions where [k]; a shared row [P] once for each; a dict of such."""
    if isinstance(rows, dict):
        return {n: cut(v, where) for n, v in rows.items()}
    return rows[where] if rows.dim() > 1 else rows.expand(len(where), *rows.shape)

