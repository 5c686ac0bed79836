"""Passes over the whole split of every client of a cohort: gradients, losses, and what is made of each sample.

A split is passed over in blocks of as many samples a client as memory suits (eval.batch_size).  A block is of the first
clients of a chunk, those with samples left; its weights are parts of the split, so that they sum to 1 over the blocks.

Letters: K clients of the cohort, k of a chunk, n samples, b of a block, P numbers of a row, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.core import rng
from fedbench.core.round_context import RoundContext
from fedbench.core.split import Ragged
from fedbench.engine.batch import Batch, BatchLoader, to_device
from fedbench.engine.engine import Engine
from fedbench.engine.federation import Inputs
from fedbench.engine.gradients import add_extra_losses, manual_gradient
from fedbench.nn.batched_operators import ForwardContext
from fedbench.nn.flat import FlatModel
from fedbench.tasks.base import SampleStatistics

# (model, rows, inputs x [k, b, ...], targets y [k, b, ...], class mask [k, C] or None) -> by name [k, b, ...]
SampleFunction = Callable[[FlatModel, Any, Inputs, Tensor, Tensor | None], SampleStatistics]
ChunkWork = Callable[[Tensor, Iterator[Batch]], None]  # (positions [k] in the cohort, blocks)


def gradient(engine: Engine, context: RoundContext, rows: Tensor, split: str, drop_last: bool) -> tuple[Tensor, Tensor]:
    """Gradient [K, P] and mean loss [K] of rows [P] or [K, P]; drop_last: of full local batches alone."""
    rows = rows.expand(len(context), -1) if rows.dim() == 1 else rows
    gradients = torch.zeros(len(context), rows.shape[1], device=context.device)
    losses = torch.zeros(len(context), device=context.device)

    def chunk(where: Tensor, blocks: Iterator[Batch]) -> None:
        theta = rows[where]  # [k, P]
        total, loss = torch.zeros_like(theta), losses.new_zeros(len(theta))
        scratch = None  # [k, P], for the second block and all after it: each overwrites what the one before left there
        for n, block in enumerate(blocks):
            k = len(block.weight)
            if n == 1:
                scratch = torch.zeros_like(theta)
            target = total if scratch is None else scratch  # the first block's gradient is the total so far
            loss[:k] += _block_gradient(engine, theta[:k], block, target[:k])
            if target is not total:
                total[:k] += target[:k]
        gradients[where], losses[where] = total, loss

    assigned = _run_chunks(engine, context, chunk, engine.federation.splits[split], drop_last)
    engine.executor.ranks.exchange(assigned, {"gradient": gradients, "loss": losses})
    return gradients, losses


def _block_gradient(engine: Engine, rows: Tensor, block: Batch, out: Tensor) -> Tensor:
    """Write the gradient [k, P] of rows on a block, in evaluation mode; returns its weighted losses [k].

    Every column that has a gradient is overwritten.  The others, such as running statistics, are left as they are: out
    must come with zeros there.
    """
    model, task = engine.model, engine.task
    if model.manual_backward is not None:
        return manual_gradient(model, task, model.named(rows), block, model.named(out))
    named = model.named(rows.detach())
    leaves = {n: p.requires_grad_() for n, p in named.items() if n not in model.buffer_names}
    with torch.enable_grad():
        context = ForwardContext()
        logits = model.apply(named, block.x, True, context)
        each = add_extra_losses(task.loss(logits, block.y, block.class_mask), context.extra_losses)  # [k, b]
        losses = (each * block.weight).sum(1)
        grads = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
    for name, g in zip(leaves, grads):
        a, b = model.spans[name]
        out[:, a:b] = g.reshape(len(out), -1)
    return losses.detach()


def loss(engine: Engine, context: RoundContext, rows: Tensor, split: str) -> Tensor:
    """Mean loss of rows [P] or [K, P].  # [K]"""
    rows = rows.expand(len(context), -1) if rows.dim() == 1 else rows
    losses = torch.zeros(len(context), device=context.device)

    def chunk(where: Tensor, blocks: Iterator[Batch]) -> None:
        theta, total = rows[where], losses.new_zeros(len(where))
        for block in blocks:
            logits = engine.model.predict(theta[: len(block.weight)], block.x)
            each = engine.task.loss(logits, block.y, block.class_mask)
            total[: len(each)] += (each * block.weight).sum(1)
        losses[where] = total

    engine.executor.ranks.exchange(
        _run_chunks(engine, context, chunk, engine.federation.splits[split]), {"loss": losses}
    )
    return losses


def map_samples(
    engine: Engine, context: RoundContext, rows: Any, fn: SampleFunction, part: Ragged, of_none: SampleStatistics
) -> dict[str, list[Tensor]]:
    """What fn makes of every sample of a part of the data: by name, one tensor [n_i, ...] per client.

    rows: one row for all [P], or [K, P], or a dict of such.  of_none: what fn makes of no sample.
    """
    if isinstance(rows, Tensor) and rows.dim() == 1 and engine.federation.class_mask is None:
        return _each_sample_by_one_row(engine, context, rows, fn, part.select(context.ids), of_none)
    each = {name: [t] * len(context) for name, t in of_none.items()}
    sizes = part.sizes_of(context.ids)

    def chunk(where: Tensor, blocks: Iterator[Batch]) -> None:
        positions = where.tolist()
        destinations = _Destinations(sizes[positions], context.device)
        made: SampleStatistics = {}  # of all samples of the chunk, as in _each_sample_by_one_row
        for block in blocks:
            k = len(block.weight)
            slots, to = destinations.of(block)
            for name, t in fn(engine.model, select_rows(rows, where[:k]), block.x, block.y, block.class_mask).items():
                flat = t.flatten(0, 1) if slots is None else t.flatten(0, 1).index_select(0, slots)
                if name not in made:
                    made[name] = flat.new_empty(destinations.total, *flat.shape[1:])
                made[name].index_copy_(0, to, flat)
            destinations.advance(block)
        for name, whole in made.items():
            for position, of_client in zip(positions, whole.split(sizes[positions].tolist())):
                each[name][position] = of_client

    assigned = _run_chunks(engine, context, chunk, part)
    for tensors in each.values():
        engine.executor.ranks.exchange_lists(assigned, tensors, context.device)
    return each


class _Destinations:
    """Where what is made of each sample goes, in a tensor [total, ...] of all samples of a chunk, client after client.

    sizes [k]: the samples of each client.
    """

    def __init__(self, sizes: np.ndarray, device: torch.device):
        self.total, self.device = int(sizes.sum()), device
        self._next = np.cumsum(sizes) - sizes  # where each client's next sample goes  [k]

    def of(self, block: Batch) -> tuple[Tensor | None, Tensor]:
        """Which of the k * b slots of a block hold a sample (None: all, there is no padding), and where each goes."""
        k, width = block.weight.shape
        to = self._next[:k, None] + np.arange(width)  # [k, b]
        real = np.arange(width) < block.counts[:, None]  # [k, b]
        slots = None if real.all() else to_device(np.flatnonzero(real), self.device)
        return slots, to_device(to[real], self.device)

    def advance(self, block: Batch) -> None:
        """The samples of a block have been written."""
        self._next[: len(block.counts)] += block.counts


def _each_sample_by_one_row(
    engine: Engine, context: RoundContext, row: Tensor, fn: SampleFunction, part: Ragged, of_none: SampleStatistics
) -> dict[str, list[Tensor]]:
    """All clients hold one row: one unbatched pass over all their samples, part [K]."""
    index = torch.from_numpy(part.indices).to(context.device)
    size, ranks = engine.shared_batch or engine.eval_batch, engine.executor.ranks
    blocks = [slice(a, a + size) for a in range(0, len(index), size)]
    assigned = ranks.assign(np.ones(len(blocks), np.int64))
    mine = assigned[ranks.rank]
    # One tensor for all samples: a small one for every block would fragment the memory.
    made: SampleStatistics = {}

    def job(a: int, b: int) -> None:
        block = blocks[mine[a]]
        fetched = engine.federation.fetch(part.indices[None, block])
        x, y = engine.federation.gather(index[None, block], fetched=fetched)
        for name, t in fn(engine.model, row[None], x, y, None).items():
            whole = made.get(name)
            if whole is None:
                whole = made.setdefault(name, t.new_empty(len(index), *t.shape[2:]))
            whole[block] = t[0]

    engine.executor.run(job, len(mine), single=True)
    each = {}
    for name, nothing in of_none.items():
        tensors = [made[name][block] if name in made else nothing for block in blocks]
        ranks.exchange_lists(assigned, tensors, context.device)
        whole = nothing if not tensors else torch.cat(tensors) if ranks.is_distributed else made[name]
        each[name] = list(whole.split(np.diff(part.offsets).tolist()))
    return each


def subsample(engine: Engine, context: RoundContext, split: str, limit: int, key: str) -> Ragged:
    """Return at most limit samples of each client of the cohort, and none of other clients.

    Args:
        engine: What all cohorts of the run share.
        context: The clients and the round.
        split: The split to sample from.
        limit: Largest number of samples.
        key: Calls of a round with the same key return the same samples.
    """
    whole = engine.federation.splits[split]
    sizes = np.zeros(len(whole), np.int64)
    sizes[context.ids] = np.minimum(whole.sizes_of(context.ids), limit)
    drawn = [
        np.sort(
            rng.generator(engine.seed, "samples", key, client, context.round).choice(
                whole[client], sizes[client], replace=False
            )
        )
        for client in sorted(context.ids.tolist())  # as they lie in a Ragged
    ]
    return Ragged.from_sizes(np.concatenate([np.empty(0, np.int64), *drawn]), sizes)


def fraction_of(engine: Engine, context: RoundContext, split: str, fraction: float, key: str) -> Ragged:
    """Return a fraction of the samples of each client of the cohort, and none of other clients.

    Arguments are those of `Cohort.subsample`.
    """
    whole = engine.federation.splits[split]
    sizes = whole.sizes_of(context.ids)  # [K]
    counts = np.minimum(np.maximum((fraction * sizes).astype(np.int64), 1), sizes)  # [K]
    base = rng.key(engine.seed, "fraction", key, context.round)
    parts = [np.empty(0, np.int64) for _ in range(len(whole))]
    for client, positions in zip(context.ids.tolist(), rng.subsets(base, context.ids, sizes, counts)):
        parts[client] = whole[client][positions]
    return Ragged.from_lists(parts)


def _run_chunks(
    engine: Engine, context: RoundContext, work: ChunkWork, part: Ragged, drop_last: bool = False
) -> list[np.ndarray]:
    """Do the work for every chunk of this rank's clients, without gradients; returns each rank's positions."""
    sizes, ranks = part.sizes_of(context.ids), engine.executor.ranks
    if drop_last:
        batch_sizes = np.maximum(np.minimum(engine.batch_size, sizes), 1)
        sizes = sizes // batch_sizes * batch_sizes
    assigned = ranks.assign(sizes)
    order = assigned[ranks.rank]

    def job(a: int, b: int) -> None:
        positions = order[a:b]
        work(
            torch.from_numpy(positions).to(context.device), _blocks(engine, context, part, positions, sizes[positions])
        )

    engine.executor.run(job, len(order))
    return assigned


def _blocks(
    engine: Engine, context: RoundContext, part: Ragged, positions: np.ndarray, sizes: np.ndarray
) -> Iterator[Batch]:
    """Blocks that cover the first sizes [k] samples, which descend, of the clients at these positions."""
    ids = context.ids[positions]
    longest, width = int(sizes.max(initial=0)), engine.eval_batch
    size = -(-longest // max(1, -(-longest // width)))  # the last block as long as the others
    for at in range(0, longest, max(1, size)):
        engine.executor.raise_if_stopped()
        k = int((sizes > at).sum())
        counts = np.minimum(sizes[:k] - at, size)
        slot = np.minimum(at + np.arange(counts.max()), sizes[:k, None] - 1)
        index = part.indices[part.offsets[ids[:k]][:, None] + slot]
        block = BatchLoader(engine.federation, ids[:k], index[None], counts[None])(0, k)
        block.weight = block.weight * torch.from_numpy(counts / sizes[:k]).float().to(context.device)[:, None]
        yield block


def select_rows(rows: Any, where: Tensor) -> Any:
    """Rows [K, ...] at positions where [k]; a shared row [P] once for each; a dict of such."""
    if isinstance(rows, dict):
        return {name: select_rows(values, where) for name, values in rows.items()}
    return rows[where] if rows.dim() > 1 else rows.expand(len(where), *rows.shape)
