"""Gradients as CUDA graphs: one launch replays several hundred operations.

A CUDA graph reads and writes the same memory in every replay.  The tensors of a request are therefore copied to static
buffers first.

Letters: k clients still training, K clients of the chunk, P length of a row.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbench.core.inputs import unwrap_inputs, wrap_inputs
from fedbench.engine.batch import Batch
from fedbench.engine.gradients import DifferentiatedParameters, DirectGradients, GradientRequest

log = logging.getLogger(__name__)
Work = Callable[[], None]
NUM_SIZES = 16  # numbers of clients for which there is a graph: k is rounded up
MAX_GRAPHS = 128  # further gradients are computed directly
TOLERANCE = 1e-2  # largest relative difference between the first replay and the direct computation: TF32 needs it


class CudaGraphs:
    """Records operations as CUDA graphs.

    All graphs share one memory pool, because they run one after the other and their results are in static buffers
    outside of it.  All are recorded on one side stream, so that libraries allocate one workspace.
    """

    side_stream: Any = None

    def __init__(self) -> None:
        self.last_graph: Callable[[], Any] = lambda: None  # a weak reference: the pool exists while any graph does

    def __call__(self, work: Work) -> Work:
        """Record a graph.

        Args:
            work: Runs the operations.  It is called three times.

        Returns:
            A function that replays the operations.
        """
        side = CudaGraphs.side_stream = CudaGraphs.side_stream or torch.cuda.Stream()
        graph, earlier = torch.cuda.CUDAGraph(), self.last_graph()
        pool = torch.cuda.graph_pool_handle() if earlier is None else earlier.pool()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # warm-up: libraries select their kernels
                work()
            with torch.cuda.graph(graph, pool=pool, stream=side):
                work()
        torch.cuda.current_stream().wait_stream(side)
        self.last_graph = weakref.ref(graph)
        return graph.replay


class GraphKey(NamedTuple):
    """What two requests must have in common to use the same graph.

    Attributes:
        model: id() of the model.
        task: Key of the task's loss.
        parameters: The parameters that need a gradient.
        slices: The columns to differentiate.
        index: Index of the request in its local step, which has its own buffer for the gradient.
        num_clients: Number of clients that the graph computes.
        rows_address: Memory address of the static rows.
        shapes: Shapes of the batch, and addresses of its inputs.
        has_dropout: Whether the graph reads keys for dropout.
    """

    model: int
    task: Any
    parameters: DifferentiatedParameters
    slices: tuple[tuple[int, int], ...]
    index: int
    num_clients: int
    rows_address: int
    shapes: tuple
    has_dropout: bool

    @classmethod
    def of(cls, request: GradientRequest, static: GradientRequest) -> GraphKey:
        """Return the key of a request.

        Args:
            request: The request.  Its index says which of the gradients of a step it is.
            static: The same request with static buffers.
        """
        return cls(
            model=id(request.model),
            task=request.task.key,
            parameters=request.parameters,
            slices=tuple(request.columns.slices),
            index=request.index,
            num_clients=len(static.rows),
            rows_address=static.rows.data_ptr(),
            shapes=_shapes(static.batch),
            has_dropout=static.dropout_keys is not None,
        )


class RecordedGradient(NamedTuple):
    """A recorded graph.

    Attributes:
        replay: Replays the graph.
        request: The request with static buffers, from which the graph reads.
        losses: The tensor that receives the losses.  # [k]
    """

    replay: Work
    request: GradientRequest
    losses: Tensor


class GraphedGradients(DirectGradients):
    """Computes gradients by replaying CUDA graphs (`replays`), which read `static_buffers` at fixed addresses.

    The rows of a chunk stay in a static buffer (`to_static_rows`), so that a step only copies its batch.  There is one
    graph for each of up to NUM_SIZES numbers of clients.  If fewer clients still train, the graph also computes
    finished ones, whose results are ignored.  Models with batch statistics have a graph for each exact k.

    The first replay of a graph is compared with the direct computation.  If they differ, or if operations cannot be
    recorded, a warning is logged and all further gradients are computed directly (`disabled`).

    Args:
        record: Records operations and returns their replay.  Default: CudaGraphs().

    Attributes:
        disabled: Whether all gradients are computed directly.
        chunk_size: Number of clients of the chunk whose rows are in the static buffer.
        num_requests: From the key of a request to the number of requests that had no graph.
        replays: From the key of a request to its recorded graph.
        static_buffers: Static buffers [K, ...], by name, shape and type, for the largest K so far.
    """

    def __init__(self, record: Callable[[Work], Work] | None = None):
        self.record = record or CudaGraphs()
        self.disabled = False
        self.chunk_size = 0
        self.num_requests: Counter[GraphKey] = Counter()
        self.replays: dict[GraphKey, RecordedGradient] = {}
        self.static_buffers: dict[Any, Tensor] = {}

    def free_memory(self) -> None:
        """Delete all recorded graphs, and the static GPU buffers that they read and write."""
        self.replays.clear()
        self.static_buffers.clear()

    def to_static_rows(self, rows: Tensor) -> Tensor:
        """Copy the rows [K, P] of a chunk to the buffer that graphs read and change, and return the buffer.

        If graphs are disabled, the rows themselves are returned.
        """
        self.chunk_size = len(rows)
        return rows if self.disabled else self._to_static("chunk", rows)

    def __call__(self, request: GradientRequest) -> tuple[Tensor, Tensor]:
        """Compute a gradient, by a graph if there is one or if it is worth recording.

        Args:
            request: What to differentiate.

        Returns:
            The gradient [k, P] and the losses [k].
        """
        is_expanded = request.batch.shared and len(request.rows) > 1  # copying would repeat one batch for each client
        if self.disabled or is_expanded:
            return super().__call__(request)
        k, static = len(request.rows), self._static_request(request)
        key = GraphKey.of(request, static)
        if key not in self.replays and not (self._is_worth_recording(key, request) and self._record(key, static, k)):
            return super().__call__(request)
        recorded = self.replays[key]
        recorded.replay()
        if request.model.buffer_names and request.rows.data_ptr() != static.rows.data_ptr():
            request.rows.copy_(static.rows[:k])  # the graph updated the running statistics of the static rows
        return recorded.request.new_gradient()[:k], recorded.losses[:k]

    def _is_worth_recording(self, key: GraphKey, request: GradientRequest) -> bool:
        """Return whether to record a graph for a request that has none, and count the request.

        True for up to MAX_GRAPHS = 128 graphs.  With batch statistics (BatchNorm), each number of clients needs its own
        graph, so that one is recorded at the second request only.

        Args:
            key: The key of the graph.
            request: The request, for its model.
        """
        self.num_requests[key] += 1
        is_expected_again = self.num_requests[key] > 1 or not request.model.batch_statistics
        return len(self.replays) < MAX_GRAPHS and is_expected_again

    def _to_static(self, name: str, values: Tensor, size: int | None = None) -> Tensor:
        """Copy values to their static buffer.  A buffer that is too small is replaced.

        Args:
            name: Name of the values, part of the key of the buffer.
            values: The values.  # [k, ...]
            size: Number of rows to return, at least k.  None: k.

        Returns:
            The first rows of the buffer.  # [size, ...]
        """
        key = (name, values.shape[1:], values.dtype)
        k, buffer = len(values), self.static_buffers.get(key)
        if buffer is None or len(buffer) < (size or k):
            if buffer is not None:
                self.replays.clear()  # they use the previous buffer
            buffer = self.static_buffers[key] = values.new_zeros(size or k, *values.shape[1:])
        if buffer.data_ptr() != values.data_ptr():  # else, the values are in the buffer already
            buffer[:k].copy_(values)
        return buffer[: size or k]

    def _static_request(self, request: GradientRequest) -> GradientRequest:
        """Copy the tensors of a request to static buffers, whose memory addresses stay the same in later requests.

        Args:
            request: The request, of k clients.

        Returns:
            An equal request that reads from the buffers.  It has as many clients as the graph computes
            (`_graph_size`), of which those after the first k are ignored.
        """
        batch, index = request.batch, request.index  # which of the step's gradients it is
        # if the rows to differentiate are the trained ones of the chunk, they are in its buffer already
        chunk_buffer = self.static_buffers.get(("chunk", request.rows.shape[1:], request.rows.dtype))
        is_chunk = chunk_buffer is not None and chunk_buffer.data_ptr() == request.rows.data_ptr()
        size = self._graph_size(request)

        def to_static(name: str, values: Tensor | None) -> Any:
            return None if values is None else self._to_static(name, values, size)

        rows = self._to_static("chunk" if is_chunk else f"rows {index}", request.rows, size)
        x = {name: to_static(f"x {name}", values) for name, values in wrap_inputs(batch.x).items()}
        static_batch = replace(
            batch,
            x=unwrap_inputs(x, batch.x),
            y=to_static("y", batch.y),
            weight=to_static("weight", batch.weight),
            index=None,  # gradients do not need the indices of samples
            class_mask=to_static("mask", batch.class_mask),
        )
        gradient = self._to_static(f"gradient {index}", request.rows[:0], size)
        return replace(
            request,
            rows=rows,
            batch=static_batch,
            new_gradient=lambda: gradient,
            dropout_keys=to_static("keys", request.dropout_keys),
            named=None,  # a cache of views of other rows
        )

    def _graph_size(self, request: GradientRequest) -> int:
        """Return the number of clients that the graph of a request computes: its k clients, rounded up.

        Rounding leaves at most NUM_SIZES sizes, and so few graphs.  With batch statistics, it is exactly k, because a
        replay would change the running statistics of finished clients.
        """
        k, rows = len(request.rows), request.rows
        if request.model.batch_statistics:
            return k
        # max_size: the largest number of clients whose rows the static buffer holds
        if self.chunk_size >= k:
            max_size = self.chunk_size
        else:  # not the rows of a chunk, for example in an evaluation: an earlier request of this index made the buffer
            buffer = self.static_buffers.get((f"rows {request.index}", rows.shape[1:], rows.dtype))
            max_size = max(k, 0 if buffer is None else len(buffer))
        step = max(1, -(-max_size // NUM_SIZES))  # -(-a // b): a / b rounded up
        return min(max_size, -(-k // step) * step)

    def _record(self, key: GraphKey, static: GradientRequest, k: int) -> bool:
        """Record a graph, and compare its first replay with the direct computation.

        Args:
            key: Key under which the graph is stored.
            static: The request with static buffers.
            k: Number of clients whose gradients are compared.

        Returns:
            Whether the graph can be used.  If not, all further gradients are computed directly.
        """
        # each computation updates the running statistics in the rows, which are therefore restored
        rows_before, losses = static.rows.clone(), static.rows.new_zeros(len(static.rows))
        compute_directly = super().__call__

        def work() -> None:
            _, direct_losses = compute_directly(static)  # the gradient is in the static buffer
            losses.copy_(direct_losses)

        try:
            work()
            expected = static.new_gradient()[:k].clone()
            static.rows.copy_(rows_before)
            replay = self.record(work)  # records the graph of `work`, and returns a function that replays it
            static.rows.copy_(rows_before)
            static.new_gradient().zero_()
            replay()
            # relative l2 distance of the replayed from the direct gradient
            distance = float((static.new_gradient()[:k] - expected).norm() / expected.norm().clamp_min(1e-30))
            problem = None
            if not distance <= TOLERANCE:  # true for NaN
                problem = f"a replay differs by {distance:.2g} from the direct computation"
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # operations that cannot be recorded raise various errors
            problem = (str(error).strip() or type(error).__name__).splitlines()[0]
        static.rows.copy_(rows_before)
        if problem is not None:
            self.disabled = True
            self.replays.clear()
            log.warning(
                "CUDA graphs are off for this run: %s.  Set hardware.graphs=false to avoid this warning", problem
            )
            return False
        self.replays[key] = RecordedGradient(replay, static, losses)
        return True


def _shapes(batch: Batch) -> tuple:
    """Return what must be equal in two batches of the same graph, as part of the graph's key.

    Returns:
        (name, shape, memory address) of each input, and then the shapes of the weights, targets and class mask (None
        without a class mask).
    """
    x = tuple((name, values.shape, values.data_ptr()) for name, values in wrap_inputs(batch.x).items())
    mask_shape = None if batch.class_mask is None else batch.class_mask.shape
    return (*x, batch.weight.shape, batch.y.shape, mask_shape)
