"""Computations over all samples of a split, for each client of a cohort: gradients, losses, and functions of samples.

A split is processed in blocks of eval.batch_size samples of each client.  The clients of a chunk are in descending
order of their number of samples, so that a block consists of samples of the first k clients.  Weights of samples are
divided by the size of the split, so that they sum to 1 over all blocks.

Letters: K clients of the cohort, k clients of a chunk or block, n samples, b samples of a client in a block, P length
of a row, C classes.
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
from fedbench.engine.divided_tensor import divided
from fedbench.engine.engine import Engine
from fedbench.engine.federation import Inputs
from fedbench.engine.gradients import add_extra_losses, manual_gradient
from fedbench.engine.local_work import batch_size_of
from fedbench.nn.batched_operators import ForwardContext
from fedbench.nn.flat import FlatModel
from fedbench.tasks.base import SampleStatistics

# (model, rows, inputs [k, b, ...], targets [k, b, ...], class mask [k, C] or None) -> tensors by name [k, b, ...]
SampleFunction = Callable[[FlatModel, Any, Inputs, Tensor, Tensor | None], SampleStatistics]
ChunkFunction = Callable[[Tensor, Iterator[Batch]], None]  # (positions [k] of clients in the cohort, blocks)


def gradient(engine: Engine, context: RoundContext, rows: Tensor, split: str, drop_last: bool) -> tuple[Tensor, Tensor]:
    """Return the gradient and the mean loss over all samples of each client's split.

    Args:
        engine: Has the model, the loss, the samples of all splits, and the processes and threads that compute.
        context: The clients and the round.
        rows: Model parameters: one row for all clients [P], or one for each [K, P].
        split: Name of the split, such as "train".
        drop_last: Whether to omit the samples after the last full batch of local.batch_size samples.  A client with
            fewer samples than that keeps all.

    Returns:
        The gradient [K, P] and the mean loss [K].
    """
    rows = rows.expand(len(context), -1) if rows.dim() == 1 else rows  # [K, P]
    gradients = torch.zeros(len(context), rows.shape[1], device=context.device)
    losses = torch.zeros(len(context), device=context.device)

    def compute_chunk(index: Tensor, blocks: Iterator[Batch]) -> None:
        """Compute the gradients and losses of a chunk, and write them to `gradients` and `losses` of all clients.

        Args:
            index: Positions of its clients in the cohort.  # [k]
            blocks: Their samples, with weights 1 / number of the client's samples in all blocks, so that sums over
                blocks are means.  Later blocks may have only the first clients.
        """
        theta = rows[index]  # [k, P]
        total_gradient = torch.zeros_like(theta)
        total_loss = losses.new_zeros(len(theta))
        # [k, P], overwritten by each block from the second one on; the first is written to the total directly
        block_gradient = None
        for n, block in enumerate(blocks):
            k = len(block.weight)
            if n == 1:
                block_gradient = torch.zeros_like(theta)
            if block_gradient is None:
                total_loss[:k] += _block_gradient(engine, theta[:k], block, total_gradient[:k])
            else:
                total_loss[:k] += _block_gradient(engine, theta[:k], block, block_gradient[:k])
                total_gradient[:k] += block_gradient[:k]
        gradients[index] = total_gradient
        losses[index] = total_loss

    positions_by_rank = _run_chunks(engine, context, compute_chunk, engine.federation.splits[split], drop_last)
    ranks = engine.executor.ranks
    if ranks.is_distributed and engine.rows.is_sharded:  # gradients stay with the processes that own the clients
        ranks.exchange(positions_by_rank, {"loss": losses})
        mine = torch.from_numpy(np.sort(positions_by_rank[ranks.rank])).to(context.device)
        return divided(gradients[mine], context.ids, ranks), losses
    ranks.exchange(positions_by_rank, {"gradient": gradients, "loss": losses})
    return gradients, losses


def _block_gradient(engine: Engine, rows: Tensor, block: Batch, out: Tensor) -> Tensor:
    """Compute the gradient on a block, in evaluation mode.

    Args:
        engine: Has the model and the task, with its loss.
        rows: The parameters of one model per client.  # [k, P]
        block: The block.
        out: Is overwritten by the gradient; columns without one (running statistics) must be 0.  # [k, P]

    Returns:
        The weighted losses.  # [k]
    """
    model, task = engine.model, engine.task
    if model.manual_backward is not None:  # the model has a backward pass without autograd
        return manual_gradient(model, task, model.named(rows), block, model.named(out))
    named = model.named(rows.detach())
    # what autograd differentiates: all parameters, but no running statistics
    leaves = {n: p.requires_grad_() for n, p in named.items() if n not in model.buffer_names}
    with torch.enable_grad():
        context = ForwardContext()
        logits = model.apply(named, block.x, batched=True, context=context)
        sample_losses = task.loss(logits, block.y, block.class_mask)  # [k, b]
        sample_losses = add_extra_losses(sample_losses, context.extra_losses)
        losses = (sample_losses * block.weight).sum(1)
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
    for name, parameter_gradient in zip(leaves, gradients):
        start, stop = model.spans[name]
        out[:, start:stop] = parameter_gradient.reshape(len(out), -1)
    return losses.detach()


def loss(engine: Engine, context: RoundContext, rows: Tensor, split: str) -> Tensor:
    """Return the mean loss over all samples of each client's split.

    Args:
        engine: Has the model, the loss, the samples of all splits, and the processes and threads that compute.
        context: The clients and the round.
        rows: Model parameters: one row for all clients [P], or one for each [K, P].
        split: Name of the split, such as "train".

    Returns:
        The mean losses.  # [K]
    """
    rows = rows.expand(len(context), -1) if rows.dim() == 1 else rows
    losses = torch.zeros(len(context), device=context.device)

    def compute_chunk(index: Tensor, blocks: Iterator[Batch]) -> None:
        """Compute the losses of a chunk, and write them to `losses` of all clients.

        Args:
            index: Positions of its clients in the cohort.  # [k]
            blocks: Their samples.  Later blocks may have only the first clients.
        """
        theta, total_loss = rows[index], losses.new_zeros(len(index))
        for block in blocks:
            logits = engine.model.predict(theta[: len(block.weight)], block.x)
            sample_losses = engine.task.loss(logits, block.y, block.class_mask)  # [k, b]
            # weight [k, b]: 1 / number of the client's samples in all blocks, or 0 for padding
            total_loss[: len(sample_losses)] += (sample_losses * block.weight).sum(1)
        losses[index] = total_loss

    positions_by_rank = _run_chunks(engine, context, compute_chunk, engine.federation.splits[split])
    engine.executor.ranks.exchange(positions_by_rank, {"loss": losses})
    return losses


def map_samples(
    engine: Engine, context: RoundContext, rows: Any, fn: SampleFunction, samples: Ragged, of_none: SampleStatistics
) -> dict[str, list[Tensor]]:
    """Apply a function to samples of each client.

    Args:
        engine: Has the model, the inputs and targets of the samples, and the processes and threads that compute.
        context: The clients and the round.
        rows: Model parameters: one row for all clients [P], one for each [K, P], or a dict of such tensors.
        fn: The function.
        samples: Indices of the samples to use, a list for each of the N clients.
        of_none: The function's results for no sample.  # [0, ...] each

    Returns:
        For each name one tensor per client, in the order of its samples.  # [n_i, ...] each
    """
    ranks = engine.executor.ranks
    may_join_clients = engine.federation.class_mask is None and not (
        ranks.is_distributed and engine.federation.shard is not None
    )
    if isinstance(rows, Tensor) and rows.dim() == 1 and may_join_clients:
        return _map_samples_with_shared_row(engine, context, rows, fn, samples.select(context.ids), of_none)
    results = {name: [values] * len(context) for name, values in of_none.items()}
    sizes = samples.sizes_of(context.ids)

    def compute_chunk(index: Tensor, blocks: Iterator[Batch]) -> None:
        """Apply the function `fn` to the samples of a chunk, and write its results to `results` of all clients.

        Args:
            index: Positions of its clients in the cohort.  # [k]
            blocks: Their samples.  Later blocks may have only the first clients.
        """
        positions = index.tolist()
        slots = _SampleSlots(sizes[positions], context.device)  # sizes: numbers of samples of the K clients
        outputs: SampleStatistics = {}  # for all samples of the chunk, because small tensors would fragment memory
        for block in blocks:
            k = len(block.weight)
            real, slot = slots.of(block)  # indices of the block's samples without padding; their places in outputs
            block_outputs = fn(engine.model, select_rows(rows, index[:k]), block.x, block.y, block.class_mask)
            for name, values in block_outputs.items():
                flat = values.flatten(0, 1)  # [k * b, ...]
                flat = flat if real is None else flat.index_select(0, real)
                if name not in outputs:
                    outputs[name] = flat.new_empty(slots.total, *flat.shape[1:])
                outputs[name].index_copy_(0, slot, flat)
            slots.advance(block)
        for name, values in outputs.items():
            for position, client_values in zip(positions, values.split(sizes[positions].tolist())):
                results[name][position] = client_values

    positions_by_rank = _run_chunks(engine, context, compute_chunk, samples)
    for tensors in results.values():
        ranks.exchange_lists(positions_by_rank, tensors, context.device)
    return results


class _SampleSlots:
    """Positions of samples in a tensor [total, ...] of all samples of a chunk, one client after the other.

    Args:
        sizes: Number of samples of each client.  # [k]
        device: The compute device.
    """

    def __init__(self, sizes: np.ndarray, device: torch.device):
        self.total, self.device = int(sizes.sum()), device
        self._next = np.cumsum(sizes) - sizes  # position of each client's next sample  # [k]

    def of(self, block: Batch) -> tuple[Tensor | None, Tensor]:
        """Return where the results of a block's real samples are, and where they belong.

        Args:
            block: The block.

        Returns:
            The indices of the real samples among the block's k * b samples, or None if all are real; and their
            positions in the tensor of all samples of the chunk.
        """
        k, width = block.weight.shape
        position = self._next[:k, None] + np.arange(width)  # after those of the client's earlier blocks  [k, b]
        is_real = np.arange(width) < block.counts[:, None]  # [k, b]
        real = None if is_real.all() else to_device(np.flatnonzero(is_real), self.device)
        return real, to_device(position[is_real], self.device)

    def advance(self, block: Batch) -> None:
        """Advance the next position of each client by its number of real samples in a block, block.counts."""
        self._next[: len(block.counts)] += block.counts


def _map_samples_with_shared_row(
    engine: Engine, context: RoundContext, row: Tensor, fn: SampleFunction, samples: Ragged, of_none: SampleStatistics
) -> dict[str, list[Tensor]]:
    """Do `map_samples` for one row of all clients, whose samples then form large batches.

    Args:
        engine: Has the model, the inputs and targets of the samples, and the processes and threads that compute.
        context: The clients and the round.
        row: The parameters of the one model.  # [P]
        fn: The function.
        samples: Indices of the samples to use, a list for each of the K clients of the cohort.
        of_none: The function's results for no sample.  # [0, ...] each

    Returns:
        For each name one tensor per client, in the order of its samples.  # [n_i, ...] each
    """
    engine.federation.require_samples(context.ids)
    index = torch.from_numpy(samples.indices).to(context.device)
    size, ranks = engine.shared_batch or engine.eval_batch, engine.executor.ranks
    blocks = [slice(start, start + size) for start in range(0, len(index), size)]
    blocks_by_rank = ranks.assign(np.ones(len(blocks), np.int64))
    my_blocks = blocks_by_rank[ranks.rank]
    outputs: SampleStatistics = {}  # for all samples, because small tensors would fragment memory

    def compute_block(start: int, stop: int) -> None:
        """Apply the function `fn` to one block, a slice of the samples of all clients, and write to `outputs`.

        Args:
            start: Index of the block among those of this rank.
            stop: start + 1, unused.
        """
        block = blocks[my_blocks[start]]
        fetched = engine.federation.fetch(samples.indices[None, block])
        x, y = engine.federation.gather(index[None, block], fetched=fetched)
        for name, values in fn(engine.model, row[None], x, y, None).items():  # None: no client lacks classes
            all_values = outputs.get(name)
            if all_values is None:
                all_values = outputs.setdefault(name, values.new_empty(len(index), *values.shape[2:]))
            all_values[block] = values[0]  # values [1, b, ...]: one client

    engine.executor.run(compute_block, len(my_blocks), single=True)
    results = {}
    for name, empty in of_none.items():
        tensors = [outputs[name][block] if name in outputs else empty for block in blocks]
        ranks.exchange_lists(blocks_by_rank, tensors, context.device)
        if not tensors:
            whole = empty
        elif ranks.is_distributed:
            whole = torch.cat(tensors)
        else:
            whole = outputs[name]
        results[name] = list(whole.split(np.diff(samples.offsets).tolist()))
    return results


def subsample(engine: Engine, context: RoundContext, split: str, limit: int, key: str) -> Ragged:
    """Return at most limit samples of each client of the cohort, and none of other clients.

    Args:
        engine: Has the samples of all splits, and the seed.
        context: The clients and the round.
        split: Name of the split to sample from, such as "train".
        limit: Maximum number of samples of a client.
        key: Calls of a round with the same key return the same samples.

    Returns:
        Indices of the samples, a list for each of the N clients.
    """
    whole = engine.federation.splits[split]
    sizes = np.zeros(len(whole), np.int64)
    sizes[context.ids] = np.minimum(whole.sizes_of(context.ids), limit)
    sampled = [
        np.sort(
            rng.generator(engine.seed, "samples", key, client, context.round).choice(
                whole[client], sizes[client], replace=False
            )
        )
        for client in sorted(context.ids.tolist())  # the order of clients in a Ragged
    ]
    return Ragged.from_sizes(np.concatenate([np.empty(0, np.int64), *sampled]), sizes)


def fraction_of(engine: Engine, context: RoundContext, split: str, fraction: float, key: str) -> Ragged:
    """Return a fraction of the samples of each client of the cohort, and none of other clients.

    Args:
        engine: Has the samples of all splits, and the seed.
        context: The clients and the round.
        split: Name of the split to sample from, such as "train".
        fraction: Fraction of the samples, rounded down, but at least one sample.
        key: Calls of a round with the same key return the same samples.

    Returns:
        Indices of the samples, a list for each of the N clients.
    """
    whole = engine.federation.splits[split]
    sizes = whole.sizes_of(context.ids)  # [K]
    counts = np.minimum(np.maximum((fraction * sizes).astype(np.int64), 1), sizes)  # [K]
    base = rng.key(engine.seed, "fraction", key, context.round)
    parts = [np.empty(0, np.int64) for _ in range(len(whole))]
    # rng.subsets draws `counts` of `sizes` positions for each client
    for client, positions in zip(context.ids.tolist(), rng.subsets(base, context.ids, sizes, counts)):
        parts[client] = whole[client][positions]
    return Ragged.from_lists(parts)


def _run_chunks(
    engine: Engine, context: RoundContext, compute_chunk: ChunkFunction, samples: Ragged, drop_last: bool = False
) -> list[np.ndarray]:
    """Call a function for each chunk of this rank's clients.

    Args:
        engine: Has the processes and threads that compute, the inputs and targets, and the batch sizes.
        context: The clients and the round.
        compute_chunk: Gets the positions [k] of the chunk's clients in the cohort, and their blocks of samples.
        samples: Indices of the samples to use, a list for each of the N clients.
        drop_last: Whether to omit the samples after the last full batch of local.batch_size samples.  A client with
            fewer samples than that keeps all.

    Returns:
        For each rank, the positions of its clients in the cohort.
    """
    sizes, ranks = samples.sizes_of(context.ids), engine.executor.ranks
    if drop_last:
        batch_sizes = np.maximum(np.minimum(batch_size_of(engine, context), sizes), 1)
        sizes = sizes // batch_sizes * batch_sizes
    positions_by_rank = ranks.assign(sizes, context.ids)
    my_positions = positions_by_rank[ranks.rank]

    def job(start: int, stop: int) -> None:
        positions = my_positions[start:stop]
        index = torch.from_numpy(positions).to(context.device)
        compute_chunk(index, _blocks(engine, context, samples, positions, sizes[positions]))

    with ranks.undistributed():  # these are this rank's clients only: nothing is divided again, or exchanged
        engine.executor.run(job, len(my_positions))
    return positions_by_rank


def _blocks(
    engine: Engine, context: RoundContext, samples: Ragged, positions: np.ndarray, sizes: np.ndarray
) -> Iterator[Batch]:
    """Yield blocks of samples.

    Args:
        engine: Has the inputs and targets of the samples, and the block size eval.batch_size.
        context: The clients and the round.
        samples: Indices of the samples to use, a list for each of the N clients.
        positions: Positions of the clients in the cohort.  # [k]
        sizes: Number of samples to use of each client, descending.  # [k]

    Yields:
        Blocks of about equal size.  The weights of a client's samples sum to 1 over all blocks.
    """
    ids = context.ids[positions]
    max_size = int(sizes.max(initial=0))
    num_blocks = max(1, -(-max_size // engine.eval_batch))  # rounded up, as is block_size
    block_size = -(-max_size // num_blocks)
    for start in range(0, max_size, max(1, block_size)):
        engine.executor.raise_if_stopped()
        k = int((sizes > start).sum())
        counts = np.minimum(sizes[:k] - start, block_size)
        # positions in a client's list; its last sample is repeated as padding, which gets the weight 0  [k, b]
        slot = np.minimum(start + np.arange(counts.max()), sizes[:k, None] - 1)
        index = samples.indices[samples.offsets[ids[:k]][:, None] + slot]
        block = BatchLoader(engine.federation, ids[:k], index[None], counts[None])(0, k)  # a training of one step
        share = torch.from_numpy(counts / sizes[:k]).float().to(context.device)  # of the client's samples  [k]
        block.weight = block.weight * share[:, None]
        yield block


def select_rows(rows: Any, index: Tensor) -> Any:
    """Return the rows of some clients.

    Args:
        rows: One row for all clients [P], one for each [K, ...], or a dict of such tensors.
        index: Positions of the clients.  # [k]

    Returns:
        The rows.  A shared row is expanded.  # [k, ...]
    """
    if isinstance(rows, dict):
        return {name: select_rows(values, index) for name, values in rows.items()}
    return rows[index] if rows.dim() > 1 else rows.expand(len(index), *rows.shape)
