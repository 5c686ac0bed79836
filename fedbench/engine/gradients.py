"""The gradient of a step's batch losses: what is asked, and the ways to compute it.

`Direct` computes it at once: a plain chain's own backward pass where there is one, else autograd.  `Graphs` replays
the same operations as CUDA graphs, one launch for some hundred.  together.py joins the asks of several runs.  All give
the same rows; the executor has one of them.

Letters: k clients still training, K of the chunk, P numbers of a row, B batch.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedbench.core.options import require
from fedbench.nn.compiled import Product
from fedbench.nn.flat import Columns, FlatModel
from fedbench.nn.program import Call
from fedbench.tasks.task import Task

if TYPE_CHECKING:
    from fedbench.engine.federation import Inputs
    from fedbench.engine.local import Batch

log = logging.getLogger(__name__)
BUCKETS = 16            # sizes of the active prefix that have a graph of their own: finished clients fill them up
MOST = 128              # recordings: beyond that, gradients are computed directly
AGREE = 1e-2            # relative distance of a graph's first result from the direct one that TF32 may cause


class Wanted(NamedTuple):
    """Of the parameters: which need a gradient; is that every trained column; their names; are they wanted whole."""

    which: tuple[bool, ...]
    everything: bool
    names: tuple[str, ...]
    whole: bool

    @classmethod
    def of(cls, model: FlatModel, columns: Columns) -> Wanted:
        """What must be differentiated for these of the trained columns."""
        which = tuple(_overlaps(span, columns) for span in model.spans.values())
        names = tuple(n for n, w in zip(model.spans, which) if w)
        size = sum(b - a for n, (a, b) in model.spans.items() if n in names)
        return cls(which, columns.slices == model.trained.slices, names, bool(names) and size == columns.size)


def _overlaps(span: tuple[int, int], columns: Columns) -> bool:
    return any(max(a, span[0]) < min(b, span[1]) for a, b in columns.slices)


@dataclass
class Ask:
    """The gradient of sum_b weight[b] loss[b] of every client at its row, in the wanted columns.

    rows [k, P]: their float buffers (BatchNorm) are updated in place.  keys [k]: seeds of dropout, or None.
    space() gives [k, P] to write into.  turn: how many gradients this step asked for before.  named: model.named, or
    something that remembers what it gave.  products: weights, of one row, whose gradient may be given as its factors,
    in which case it is not written.
    """

    model: FlatModel
    task: Task
    rows: Tensor
    batch: Batch
    columns: Columns
    wanted: Wanted
    space: Callable[[], Tensor]
    keys: Tensor | None = None
    turn: int = 0
    named: Callable[[Tensor], dict[str, Tensor]] | None = None
    products: dict[str, Product] = field(default_factory=dict)

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        return (self.named or self.model.named)(rows)


class Direct:
    """Every gradient when it is asked for, by the model's chain or by autograd.  overwrites: what was given is the
    place of what will be given at the next ask of the same turn."""

    overwrites = False

    def forget(self) -> None:
        """Give back memory that is held for later asks."""

    def home(self, rows: Tensor) -> Tensor:
        """Where a chunk's rows [K, P] are to lie while it trains, with their values."""
        return rows

    def __call__(self, ask: Ask) -> tuple[Tensor, Tensor]:
        """The gradient [k, P], zero outside the wanted columns, until the next step; the losses [k]."""
        if ask.model.chain is not None and ask.wanted.whole:
            return _by_chain(ask)
        return _by_autograd(ask)


def _by_chain(ask: Ask) -> tuple[Tensor, Tensor]:
    out, model = ask.space(), ask.model
    if len(ask.wanted.names) < len(model.shapes) or model.extended:          # extras are no part of the chain
        out.zero_()
    named, into = ask.views(ask.rows), ask.views(out)
    return out, chain_gradient(model, ask.task, named, ask.batch, {n: into[n] for n in ask.wanted.names}, ask.products)


def chain_gradient(model: FlatModel, task: Task, named: dict[str, Tensor], batch: Batch, out: dict[str, Tensor],
                   products: Mapping[str, Product] | None = None) -> Tensor:
    """Fill out, or products instead, with the gradient of each client's weighted batch loss; returns the losses.  # [k]
    """
    many = len(batch.weight) > 1
    x, params = batch.x, named
    if not many:
        params, x, out = {n: p[0] for n, p in named.items()}, x[0], {n: o[0] for n, o in out.items()}   # type: ignore
    assert model.chain is not None and isinstance(x, Tensor)
    params = model.complete(params, many)
    logits, tape = model.chain.forward(params, x, many)
    logits = logits if many else logits[None]
    losses, grad = task.loss_and_gradient(logits, batch.y, batch.weight, batch.class_mask)
    model.chain.backward(params, tape, grad if many else grad[0], many, {**out, **(products or {})})
    return (losses.detach() * batch.weight).sum(1)


def differentiate(ask: Ask, losses_of: Callable[[list[Tensor]], Tensor]) -> tuple[Tensor, Tensor]:
    """Gradient [k, P] and value [k] of losses_of(leaves), per sample [k, B] or per client [k]; leaves: the rows,
    parameter by parameter [k, n], of which the wanted ones are differentiated."""
    which = ask.wanted.which
    parts = ask.rows.detach().split(ask.model.sizes, dim=-1)
    leaves = [p.requires_grad_() if w else p for p, w in zip(parts, which)]
    with torch.enable_grad():
        losses = losses_of(leaves)
        losses = (losses * ask.batch.weight).sum(1) if losses.dim() == 2 else losses      # [k]
        learning = [p for p, w in zip(leaves, which) if w]
        grads = torch.autograd.grad(losses.sum(), learning, materialize_grads=True) if losses.requires_grad \
            else tuple(torch.zeros_like(p) for p in learning)
    return _assembled(ask, grads), losses.detach()


def _by_autograd(ask: Ask) -> tuple[Tensor, Tensor]:
    lead, model, buffers = ask.rows.shape[:-1], ask.model, {}

    def losses(leaves: list[Tensor]) -> Tensor:                              # [k, B]
        params = {n: p.view(*lead, *shape) for (n, shape), p in zip(model.shapes.items(), leaves)}
        logits, updated = in_training(model, params, ask.batch.x, ask.keys)
        buffers.update(updated)
        return ask.task.loss(logits, ask.batch.y, ask.batch.class_mask)
    found = differentiate(ask, losses)
    keep_buffers(model, ask.rows, buffers)
    return found


def in_training(model: FlatModel, params: dict[str, Tensor], x: Inputs, keys: Tensor | None,
                until: str | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits (or features, until "head") in training mode, and the float buffers that the pass has updated, which are
    copies of those in params."""
    buffers = {n: params[n].detach().clone() for n in model.buffer_names}
    try:
        return model.apply(params | buffers, x, True, Call(True, keys), until), buffers
    except ValueError as error:
        require("more than 1 value per channel" not in str(error), "a batch of one sample has no statistics for "
                "the model's batch norm: set local.drop_last=true, another local.batch_size, or another norm")
        raise


def keep_buffers(model: FlatModel, rows: Tensor, buffers: dict[str, Tensor]) -> None:
    """Write float buffers [k, ...] into the rows [k, P]."""
    for name, value in buffers.items():
        a, b = model.spans[name]
        rows.detach()[..., a:b] = value.reshape(len(rows), -1)


def _assembled(ask: Ask, grads: Iterable[Tensor]) -> Tensor:
    """The parameters' gradients as one [k, P] tensor."""
    out, model = ask.space(), ask.model
    if ask.wanted.everything:
        learns = model.trained.size
        torch.cat([g.flatten(1) for g in grads], dim=1, out=out[:, :learns] if learns < out.shape[1] else out)
        out[:, learns:] = 0                            # a method may have written there
        return out
    out.zero_()
    kept = iter(grads)
    for (a, b), w in zip(model.spans.values(), ask.wanted.which):
        if w:
            g = next(kept).flatten(1)
            for c, d in (ask.columns & Columns([(a, b)])).slices:
                out[:, c:d] = g[:, c - a:d - a]
    return out


# -- CUDA graphs -----------------------------------------------------------------------------------------------
Work = Callable[[], None]


class CudaGraphs:
    """Records work, whose tensors stay where they are, as a CUDA graph; returns its replay.

    All graphs of one recorder share a memory pool: they run one after the other, and everything that outlives a replay
    lies outside.  All are warmed up and recorded on one side stream, so that libraries have one workspace there.
    """

    side: Any = None

    def __init__(self) -> None:
        self.last: Callable[[], Any] = lambda: None        # a pool lives as long as a graph of its does

    def __call__(self, work: Work) -> Work:
        side = CudaGraphs.side = CudaGraphs.side or torch.cuda.Stream()
        graph, beside = torch.cuda.CUDAGraph(), self.last()
        pool = torch.cuda.graph_pool_handle() if beside is None else beside.pool()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):                             # libraries choose and set up their kernels
                work()
            with torch.cuda.graph(graph, pool=pool, stream=side):
                work()
        torch.cuda.current_stream().wait_stream(side)
        self.last = weakref.ref(graph)
        return graph.replay


class Graphs(Direct):
    """Replays: what an ask brings is copied to fixed places, a recorded graph runs on them.

    A chunk's rows live in such a place (`home`), so that a step copies its batch alone.  There is a graph for each
    size of the active prefix, up to BUCKETS of them, which also compute, for nothing, clients that have finished;
    models with batch statistics get exact sizes.  The first replay of a kind is compared with the direct
    computation; if they differ, or if something cannot be recorded, everything is computed directly from then on, and
    said so.  record(work) -> replay: what records (default: CudaGraphs()).
    """

    overwrites = True

    def __init__(self, record: Callable[[Work], Work] | None = None):
        self.record = record or CudaGraphs()
        self.off, self.count = False, 0                # clients of the chunk that is at home
        self.seen: Counter = Counter()                 # asks of a kind that has no recording
        self.replays: dict[Any, tuple[Work, Ask, Tensor]] = {}
        self.places: dict[Any, Tensor] = {}            # by name and shape: [K, ...], K the largest seen

    def forget(self) -> None:
        self.replays.clear()
        self.places.clear()

    def home(self, rows: Tensor) -> Tensor:
        self.count = len(rows)
        return rows if self.off else self._place("home", rows)

    def __call__(self, ask: Ask) -> tuple[Tensor, Tensor]:
        xs = ask.batch.x.values() if isinstance(ask.batch.x, dict) else [ask.batch.x]
        if self.off or any(len(x) > 1 and x.stride(0) == 0 for x in xs):      # one batch for all: not to be written out
            return super().__call__(ask)
        k, fixed = len(ask.rows), self._fixed(ask)
        kind = (id(ask.model), type(ask.task), ask.wanted, tuple(ask.columns.slices), ask.turn, len(fixed.rows),
                fixed.rows.data_ptr(), _shapes(fixed.batch), fixed.keys is None)
        if kind not in self.replays and not (self._pays(kind, ask) and self._record(kind, fixed, k)):
            return super().__call__(ask)
        replay, recorded, losses = self.replays[kind]
        replay()
        if ask.model.buffer_names and ask.rows.data_ptr() != fixed.rows.data_ptr():
            ask.rows.copy_(fixed.rows[:k])             # their buffers have moved
        return recorded.space()[:k], losses[:k]

    def _pays(self, kind: Any, ask: Ask) -> bool:
        """Whether to record a kind: what may be a size that never comes again only at its second time."""
        self.seen[kind] += 1
        return len(self.replays) < MOST and (self.seen[kind] > 1 or not ask.model.batch_statistics)

    def _place(self, name: str, values: Tensor, size: int | None = None) -> Tensor:
        """values [k, ...] in a fixed place, of which the first size rows are given (default k)."""
        key = (name, values.shape[1:], values.dtype)
        k, place = len(values), self.places.get(key)
        if place is None or len(place) < (size or k):
            if place is not None:
                self.replays.clear()                   # they speak of places that are no more
            place = self.places[key] = values.new_zeros(size or k, *values.shape[1:])
        if place.data_ptr() != values.data_ptr():
            place[:k].copy_(values)
        return place[:size or k]

    def _fixed(self, ask: Ask) -> Ask:
        """The ask, everything that it reads copied to its fixed place; filled up to the size of a bucket."""
        k, batch, model = len(ask.rows), ask.batch, ask.model
        home = self.places.get(("home", ask.rows.shape[1:], ask.rows.dtype))
        at_home = home is not None and home.data_ptr() == ask.rows.data_ptr()
        guest = self.places.get((f"rows {ask.turn}", ask.rows.shape[1:], ask.rows.dtype))
        most = self.count if self.count >= k else max(k, 0 if guest is None else len(guest))
        step = max(1, -(-most // BUCKETS))
        size = k if model.batch_statistics else min(most, -(-k // step) * step)

        def place(name: str, values: Tensor | None) -> Any:
            return None if values is None else self._place(name, values, size)
        rows = self._place("home" if at_home else f"rows {ask.turn}", ask.rows, size)
        x = {n: place(f"x {n}", v) for n, v in batch.x.items()} if isinstance(batch.x, dict) else place("x", batch.x)
        still = replace(batch, x=x, y=place("y", batch.y), weight=place("weight", batch.weight), index=None,
                        class_mask=place("mask", batch.class_mask))
        out = self._place(f"gradient {ask.turn}", ask.rows[:0], size)
        return replace(ask, rows=rows, batch=still, space=lambda: out, keys=place("keys", ask.keys), named=None)

    def _record(self, kind: Any, fixed: Ask, k: int) -> bool:
        """Record what computes the ask and compare its k clients; False: this does not go."""
        before, losses = fixed.rows.clone(), fixed.rows.new_zeros(len(fixed.rows))
        direct = super().__call__

        def work() -> None:
            losses.copy_(direct(fixed)[1])
        try:
            work()
            expected = fixed.space()[:k].clone()
            fixed.rows.copy_(before)
            replay = self.record(work)
            fixed.rows.copy_(before)
            fixed.space().zero_()
            replay()
            away = float((fixed.space()[:k] - expected).norm() / expected.norm().clamp_min(1e-30))
            fault = None if away <= AGREE else f"a replay differs by {away:.2g} from the direct computation"
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:                  # what cannot be recorded says so in many ways
            fault = (str(error).strip() or type(error).__name__).splitlines()[0]
        fixed.rows.copy_(before)
        if fault is not None:
            self.off = True
            self.replays.clear()
            log.warning("CUDA graphs are off for this run: %s", fault)
            return False
        self.replays[kind] = (replay, fixed, losses)
        return True


def _shapes(batch: Batch) -> tuple:
    x = tuple(batch.x.items()) if isinstance(batch.x, dict) else (("", batch.x),)
    mask = None if batch.class_mask is None else batch.class_mask.shape
    return (*((n, v.shape, v.data_ptr()) for n, v in x), batch.weight.shape, batch.y.shape, mask)
