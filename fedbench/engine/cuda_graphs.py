"""Gradients replayed as CUDA graphs: one launch for some hundred operations.

Letters: k clients still training, K of the chunk, P numbers of a row.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedbench.core.inputs import unwrap_inputs, wrap_inputs
from fedbench.engine.batch import Batch
from fedbench.engine.gradients import DirectGradients, GradientRequest

log = logging.getLogger(__name__)
Work = Callable[[], None]
BUCKETS = 16  # sizes of the active prefix that have a graph of their own: finished clients fill them up
MOST_RECORDINGS = 128  # beyond that, gradients are computed directly
TOLERANCE = 1e-2  # relative distance of a graph's first result from the direct one that TF32 may cause


class CudaGraphs:
    """Records work, whose tensors stay where they are, as a CUDA graph; returns its replay.

    All graphs of one recorder share a memory pool: they run one after the other, and everything that outlives a replay
    lies outside.  All are warmed up and recorded on one side stream, so that libraries have one workspace there.
    """

    side_stream: Any = None

    def __init__(self) -> None:
        self.last_graph: Callable[[], Any] = lambda: None  # a pool lives as long as a graph of its does

    def __call__(self, work: Work) -> Work:
        """Run work twice, record it, and return what replays it."""
        side = CudaGraphs.side_stream = CudaGraphs.side_stream or torch.cuda.Stream()
        graph, earlier = torch.cuda.CUDAGraph(), self.last_graph()
        pool = torch.cuda.graph_pool_handle() if earlier is None else earlier.pool()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # libraries choose and set up their kernels
                work()
            with torch.cuda.graph(graph, pool=pool, stream=side):
                work()
        torch.cuda.current_stream().wait_stream(side)
        self.last_graph = weakref.ref(graph)
        return graph.replay


class GraphedGradients(DirectGradients):
    """Replays: what a request brings is copied to fixed places, a recorded graph runs on them.

    A chunk's rows live in such a place (`to_static_rows`), so that a step copies its batch alone.  There is a graph for
    each size of the active prefix, up to BUCKETS of them, which also compute, for nothing, clients that have finished;
    models with batch statistics get exact sizes.  The first replay of a kind is compared with the direct
    computation; if they differ, or if something cannot be recorded, everything is computed directly from then on
    (`disabled`), and said so.  record(work) -> replay: what records (default: CudaGraphs()).
    """

    def __init__(self, record: Callable[[Work], Work] | None = None):
        self.record = record or CudaGraphs()
        self.disabled = False
        self.chunk_size = 0  # clients of the chunk whose rows are in their place
        self.requests: Counter = Counter()  # of a kind that has no recording
        self.replays: dict[Any, tuple[Work, GradientRequest, Tensor]] = {}  # kind -> replay, what it reads, its losses
        self.places: dict[Any, Tensor] = {}  # by name and shape: [K, ...], K the largest seen

    def free_memory(self) -> None:
        """Give back the recordings and the places of their tensors."""
        self.replays.clear()
        self.places.clear()

    def to_static_rows(self, rows: Tensor) -> Tensor:
        """Return rows [K, P] of a chunk, copied to their fixed place."""
        self.chunk_size = len(rows)
        return rows if self.disabled else self._place("chunk", rows)

    def __call__(self, request: GradientRequest) -> tuple[Tensor, Tensor]:
        """The gradient [k, P] and the losses [k], by a replay where there is one or it pays to record it."""
        if self.disabled or (request.batch.shared and len(request.rows) > 1):  # not to be written out for each client
            return super().__call__(request)
        k, fixed = len(request.rows), self._fixed(request)
        kind = _kind(request, fixed)
        if kind not in self.replays and not (self._pays(kind, request) and self._record(kind, fixed, k)):
            return super().__call__(request)
        replay, recorded, losses = self.replays[kind]
        replay()
        if request.model.buffer_names and request.rows.data_ptr() != fixed.rows.data_ptr():
            request.rows.copy_(fixed.rows[:k])  # their running statistics have moved
        return recorded.new_gradient()[:k], losses[:k]

    def _pays(self, kind: Any, request: GradientRequest) -> bool:
        """Whether to record a kind: what may be a size that never comes again only at its second time."""
        self.requests[kind] += 1
        often = self.requests[kind] > 1 or not request.model.batch_statistics
        return len(self.replays) < MOST_RECORDINGS and often

    def _place(self, name: str, values: Tensor, size: int | None = None) -> Tensor:
        """values [k, ...] in a fixed place, of which the first size rows are given (default k)."""
        key = (name, values.shape[1:], values.dtype)
        k, place = len(values), self.places.get(key)
        if place is None or len(place) < (size or k):
            if place is not None:
                self.replays.clear()  # they speak of places that are no more
            place = self.places[key] = values.new_zeros(size or k, *values.shape[1:])
        if place.data_ptr() != values.data_ptr():
            place[:k].copy_(values)
        return place[: size or k]

    def _fixed(self, request: GradientRequest) -> GradientRequest:
        """The request, everything that it reads copied to its fixed place; filled up to the size of a bucket."""
        batch, index = request.batch, request.index
        chunk_place = self.places.get(("chunk", request.rows.shape[1:], request.rows.dtype))
        in_place = chunk_place is not None and chunk_place.data_ptr() == request.rows.data_ptr()
        size = self._bucket(request)

        def place(name: str, values: Tensor | None) -> Any:
            return None if values is None else self._place(name, values, size)

        rows = self._place("chunk" if in_place else f"rows {index}", request.rows, size)
        x = {name: place(f"x {name}", t) for name, t in wrap_inputs(batch.x).items()}
        fixed_batch = replace(
            batch,
            x=unwrap_inputs(x, batch.x),
            y=place("y", batch.y),
            weight=place("weight", batch.weight),
            index=None,
            class_mask=place("mask", batch.class_mask),
        )
        gradient = self._place(f"gradient {index}", request.rows[:0], size)
        return replace(
            request,
            rows=rows,
            batch=fixed_batch,
            new_gradient=lambda: gradient,
            dropout_keys=place("keys", request.dropout_keys),
            named=None,
        )

    def _bucket(self, request: GradientRequest) -> int:
        """How many clients the graph for this request computes: k, or k rounded up to one of BUCKETS sizes."""
        k, rows = len(request.rows), request.rows
        if request.model.batch_statistics:
            return k
        # a chunk's own clients, of which k are still training; other rows (an evaluation's) may be more than that, and
        # their place keeps the size of the most that came
        place = self.places.get((f"rows {request.index}", rows.shape[1:], rows.dtype))
        most = self.chunk_size if self.chunk_size >= k else max(k, 0 if place is None else len(place))
        width = max(1, -(-most // BUCKETS))  # of a bucket, in clients
        return min(most, -(-k // width) * width)

    def _record(self, kind: Any, fixed: GradientRequest, k: int) -> bool:
        """Record what computes the request and compare its k clients; False: this does not go."""
        before, losses = fixed.rows.clone(), fixed.rows.new_zeros(len(fixed.rows))
        compute_directly = super().__call__

        def work() -> None:
            losses.copy_(compute_directly(fixed)[1])

        try:
            work()
            expected = fixed.new_gradient()[:k].clone()
            fixed.rows.copy_(before)
            replay = self.record(work)
            fixed.rows.copy_(before)
            fixed.new_gradient().zero_()
            replay()
            distance = float((fixed.new_gradient()[:k] - expected).norm() / expected.norm().clamp_min(1e-30))
            fault = None if distance <= TOLERANCE else f"a replay differs by {distance:.2g} from the direct computation"
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # what cannot be recorded says so in many ways
            fault = (str(error).strip() or type(error).__name__).splitlines()[0]
        fixed.rows.copy_(before)
        if fault is not None:
            self.disabled = True
            self.replays.clear()
            log.warning("CUDA graphs are off for this run: %s", fault)
            return False
        self.replays[kind] = (replay, fixed, losses)
        return True


def _kind(request: GradientRequest, fixed: GradientRequest) -> tuple:
    """What two requests must have in common so that one recording computes both."""
    return (
        id(request.model),
        request.task.key,
        request.parameters,
        tuple(request.columns.slices),
        request.index,
        len(fixed.rows),
        fixed.rows.data_ptr(),
        _shapes(fixed.batch),
        fixed.dropout_keys is None,
    )


def _shapes(batch: Batch) -> tuple:
    x = wrap_inputs(batch.x).items()
    mask = None if batch.class_mask is None else batch.class_mask.shape
    return (*((n, v.shape, v.data_ptr()) for n, v in x), batch.weight.shape, batch.y.shape, mask)
