"""What a local step does to a row, in one pass over memory: loops that numba compiles, where it is installed.

On a CPU a row of a million numbers is larger than a core's cache, so that what an operation costs is the rows it reads
and writes.  Adding a direction to the gradient, an inner product and SGD with momentum, one after the other, move ten
rows, one loop seven.  A large linear layer's gradient, the product of what a few samples sent back and what they sent
forth, need not even be written: multiplied out within the loop, a few rows of the weight at a time, it is never more
than they are.  For a weight of 512 x 1,600 on two threads, its product included: 0.6 to 0.8 of the time for 10 samples,
0.8 for 32, 1.0 for 64.  Rows of fewer than LARGE numbers stay with torch: they fit in a cache, and a run of small
models should not wait for a compiler (two seconds).
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)
LARGE = 200_000            # of numbers in a row: about what a core's own cache holds of the seven
FEW = 32                   # samples: beyond these a matrix product is worth being written
BLOCK = 4096               # products summed in float32 before they go to float64, as in linalg.dot
_COMPILING = threading.Lock()


@dataclass
class Product:
    """The gradient of one weight [O, I] of one row, whose columns begin at `start`, as its two factors: y^T x.

    y [B, O], x [B, I]: what each sample sent back to the layer and forth into it; None until somebody gives them.
    """

    start: int
    y: Tensor | None = None
    x: Tensor | None = None

    def give(self, y: Tensor, x: Tensor) -> None:
        self.y, self.x = y.contiguous(), x.contiguous()


def fits(theta: Tensor, *others: Tensor) -> bool:
    """Whether these rows [k, P] are for the loops: large float32 ones in one piece on a CPU, numba installed."""
    rows = (theta, *others)
    return (theta.device.type == "cpu" and theta.shape[1] >= LARGE and installed()
            and all(r.dtype == torch.float32 and r.is_contiguous() for r in rows))


@functools.cache
def installed() -> bool:
    try:
        import numba  # noqa: F401
    except ImportError as error:               # it is not there, or not for this version of numpy
        log.info("steps that add to a gradient go over memory several times: %s (pip install 'fedbench[fast]')", error)
        return False
    return True


def descend(theta: Tensor, grad: Tensor, plus: Tensor, along: Tensor, momentum: Tensor | None, lr: float | Tensor,
            keep: float, weight_decay: float, nesterov: bool, products: Sequence[Product] = ()) -> Tensor:
    """Inner products of theta [k, P] with along [P] or [k, P], then a step of SGD along grad + plus, both [k, P].

    theta and momentum [k, P] (None: there is none) change in place; keep: the momentum's factor; lr: one or [k, 1].
    products (of one row, k = 1): stand for grad in their columns, which is not read there.
    Equal to the separate operations but for rounding: the inner products within 5e-6 where all have one sign.  # [k]
    """
    k, size = theta.shape
    lift = torch.zeros(k)
    rates = lr.reshape(k).float() if isinstance(lr, Tensor) else torch.full((k,), lr)
    velocity = theta[:, :0] if momentum is None else momentum
    along = along[None] if along.dim() == 1 else along
    ahead, straight = (keep, 1.0) if nesterov or momentum is None else (1.0, 0.0)      # of velocity, of gradient
    rows = [r.numpy() for r in (theta, grad, plus, along, velocity)]
    rest = [*map(np.float32, (keep, weight_decay, ahead, straight)), rates.numpy(), lift.numpy()]
    dense, multiplied = _compiled()
    at = 0
    for product in sorted(products, key=lambda p: p.start):
        assert product.y is not None and product.x is not None
        dense(*rows, at, product.start, *rest)
        multiplied(*rows, product.start, product.y.numpy(), product.x.numpy(), *rest)
        at = product.start + product.y.shape[1] * product.x.shape[1]
    dense(*rows, at, size, *rest)
    return lift


def _compiled() -> tuple[Callable[..., None], Callable[..., None]]:
    """The loops as machine code, in which the interpreter lock is released.  Threads arrive here together."""
    with _COMPILING:
        return _compile()


@functools.cache
def _compile() -> tuple[Callable[..., None], Callable[..., None]]:
    import numba
    jit = functools.partial(numba.njit, nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})
    rows, vector, number = numba.float32[:, ::1], numba.float32[::1], numba.float32
    rest, move = [*4 * [number], vector, vector], jit(_move)
    return (jit(numba.void(*5 * [rows], numba.int64, numba.int64, *rest))(_over_rows(move)),
            jit(numba.void(*5 * [rows], numba.int64, rows, rows, *rest))(_over_product(move)))


# What numba compiles: of slices, whose indices are never negative, it makes vector instructions.
def _move(w, g, p, b, v, rate, keep, decay, ahead, straight):                                 # type: ignore[no-untyped-def]
    """w . b, before w (and v, where it has numbers) takes a step along g + p."""
    part = np.float32(0)
    if len(v) > 0:
        for n in range(len(w)):
            part += w[n] * b[n]
            direction = g[n] + p[n] + decay * w[n]
            v[n] = keep * v[n] + direction
            w[n] -= rate * (ahead * v[n] + straight * direction)
    else:
        for n in range(len(w)):
            part += w[n] * b[n]
            w[n] -= rate * (g[n] + p[n] + decay * w[n])
    return part


def _over_rows(move: Any) -> Callable[..., None]:
    def loop(theta, grad, plus, along, velocity, start, stop, keep, decay, ahead, straight, lr, lift):    # type: ignore
        for i in range(len(theta)):
            total, other = 0.0, along[min(i, len(along) - 1)]
            for a in range(start, stop, BLOCK):
                z = min(a + BLOCK, stop)
                total += move(theta[i, a:z], grad[i, a:z], plus[i, a:z], other[a:z], velocity[i, a:z],
                              lr[i], keep, decay, ahead, straight)
            lift[i] += total
    return loop


def _over_product(move: Any) -> Callable[..., None]:
    def loop(theta, grad, plus, along, velocity, start, y, x, keep, decay, ahead, straight, lr, lift):    # type: ignore
        total, few, (size, width) = 0.0, len(x) // 5 * 5, (y.shape[1], x.shape[1])
        g, h = np.empty(width, np.float32), np.empty(width, np.float32)                  # rows o and q of the gradient
        for o in range(0, size, 2):
            q = min(o + 1, size - 1)
            g[:], h[:] = np.float32(0), np.float32(0)
            for b in range(0, few, 5):                                                   # as many as registers hold
                p0, p1, p2, p3, p4 = y[b, o], y[b + 1, o], y[b + 2, o], y[b + 3, o], y[b + 4, o]
                r0, r1, r2, r3, r4 = y[b, q], y[b + 1, q], y[b + 2, q], y[b + 3, q], y[b + 4, q]
                x0, x1, x2, x3, x4 = x[b], x[b + 1], x[b + 2], x[b + 3], x[b + 4]
                for j in range(width):
                    g[j] += p0 * x0[j] + p1 * x1[j] + p2 * x2[j] + p3 * x3[j] + p4 * x4[j]
                    h[j] += r0 * x0[j] + r1 * x1[j] + r2 * x2[j] + r3 * x3[j] + r4 * x4[j]
            for b in range(few, len(x)):
                p0, r0, x0 = y[b, o], y[b, q], x[b]
                for j in range(width):
                    g[j] += p0 * x0[j]
                    h[j] += r0 * x0[j]
            a, z = start + o * width, start + q * width
            total += move(theta[0, a:a + width], g, plus[0, a:a + width], along[0, a:a + width],
                          velocity[0, a:a + width], lr[0], keep, decay, ahead, straight)
            if z > a:
                total += move(theta[0, z:z + width], h, plus[0, z:z + width], along[0, z:z + width],
                              velocity[0, z:z + width], lr[0], keep, decay, ahead, straight)
        lift[0] += total
    return loop
