"""A local step on a row in one pass over memory: loops that numba compiles, where it is installed.

On a CPU a row of a million numbers is larger than a core's cache, so that what an operation costs is the rows it reads
and writes.  Adding an offset to the gradient, an inner product and SGD with momentum, one after the other, move ten
rows, one loop seven.  A large linear layer's gradient, the product of its output's gradients and its inputs for a few
samples, need not even be written: it is multiplied out within the loop, two rows of the weight at a time.  For a
weight of 512 x 1,600 on two threads, its product included: 0.6 to 0.8 of the time for 10 samples, 0.8 for 32, 1.0 for
64.  Rows of fewer than LARGE numbers stay with torch: they fit in a cache, and a run of small
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
LARGE = 200_000  # of numbers in a row: about what a core's own cache holds of the seven
FEW = 32  # samples: beyond these a matrix product is worth being written
BLOCK = 4096  # products summed in float32 before they go to float64, as in linalg.dot
_COMPILING = threading.Lock()


@dataclass
class Product:
    """The gradient of one weight [O, I] of one row, whose columns begin at `start`, as its two factors: y^T x.

    y [B, O]: the gradient of the layer's output; x [B, I]: its input.  None until a backward pass gives them.
    """

    start: int
    y: Tensor | None = None
    x: Tensor | None = None

    def give(self, y: Tensor, x: Tensor) -> None:
        """Keep the factors, in one piece each."""
        self.y, self.x = y.contiguous(), x.contiguous()


def fits(theta: Tensor, *others: Tensor) -> bool:
    """Whether these rows [k, P] are for the loops: large float32 ones in one piece on a CPU, numba installed."""
    rows = (theta, *others)
    return (
        theta.device.type == "cpu"
        and theta.shape[1] >= LARGE
        and installed()
        and all(r.dtype == torch.float32 and r.is_contiguous() for r in rows)
    )


@functools.cache
def installed() -> bool:
    """Whether numba can be imported; says once what is slower without it."""
    try:
        import numba  # noqa: F401
    except ImportError as error:  # it is not there, or not for this version of numpy
        log.info("steps that add to a gradient go over memory several times: %s (pip install 'fedbench[fast]')", error)
        return False
    return True


@dataclass
class SGDRule:
    """A step of SGD: lr (one, or [k, 1]), momentum's factor, weight decay, Nesterov's variant."""

    lr: float | Tensor
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False


def descend_and_project(
    theta: Tensor,
    grad: Tensor,
    offset: Tensor,
    direction: Tensor,
    velocity: Tensor | None,
    rule: SGDRule,
    products: Sequence[Product] = (),
) -> Tensor:
    """Inner products of theta [k, P] with direction [P] or [k, P], then a step of SGD by grad + offset, both [k, P].

    theta and velocity [k, P] (None: there is none) change in place.  products (of one row, k = 1) stand for grad in
    their columns, which is not read there.
    Equal to the separate operations but for rounding: the inner products within 5e-6 where all have one sign.  # [k]
    """
    k, size = theta.shape
    projections = torch.zeros(k)
    rates = rule.lr.reshape(k).float() if isinstance(rule.lr, Tensor) else torch.full((k,), rule.lr)
    no_velocity = theta[:, :0]
    direction = direction[None] if direction.dim() == 1 else direction
    # theta moves by lr times of_velocity * velocity + of_gradient * gradient
    of_velocity, of_gradient = (rule.momentum, 1.0) if rule.nesterov or velocity is None else (1.0, 0.0)
    rows = [r.numpy() for r in (theta, grad, offset, direction, no_velocity if velocity is None else velocity)]
    factors = map(np.float32, (rule.momentum, rule.weight_decay, of_velocity, of_gradient))
    rest = [*factors, rates.numpy(), projections.numpy()]
    over_rows, over_product = _compiled()
    done = 0  # columns
    for product in sorted(products, key=lambda p: p.start):
        assert product.y is not None and product.x is not None
        over_rows(*rows, done, product.start, *rest)
        over_product(*rows, product.start, product.y.numpy(), product.x.numpy(), *rest)
        done = product.start + product.y.shape[1] * product.x.shape[1]
    over_rows(*rows, done, size, *rest)
    return projections


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
    return (
        jit(numba.void(*5 * [rows], numba.int64, numba.int64, *rest))(_over_rows(move)),
        jit(numba.void(*5 * [rows], numba.int64, rows, rows, *rest))(_over_product(move)),
    )


# What numba compiles: of slices, whose indices are never negative, it makes vector instructions.
def _move(w, g, p, d, v, rate, momentum, decay, of_velocity, of_gradient):  # type: ignore[no-untyped-def]
    """w . d, before w (and the velocity v, where it has numbers) takes a step by the gradient g + p."""
    projection = np.float32(0)
    if len(v) > 0:
        for n in range(len(w)):
            projection += w[n] * d[n]
            gradient = g[n] + p[n] + decay * w[n]
            v[n] = momentum * v[n] + gradient
            w[n] -= rate * (of_velocity * v[n] + of_gradient * gradient)
    else:
        for n in range(len(w)):
            projection += w[n] * d[n]
            w[n] -= rate * (g[n] + p[n] + decay * w[n])
    return projection


def _over_rows(move: Any) -> Callable[..., None]:
    """The loop over columns start to stop of all rows, BLOCK of them at a time."""

    def loop(theta, grad, offset, direction, velocity, start, stop, momentum, decay, of_v, of_g, lr, result):  # type: ignore
        for i in range(len(theta)):
            total, toward = 0.0, direction[min(i, len(direction) - 1)]
            for a in range(start, stop, BLOCK):
                z = min(a + BLOCK, stop)
                total += move(
                    theta[i, a:z],
                    grad[i, a:z],
                    offset[i, a:z],
                    toward[a:z],
                    velocity[i, a:z],
                    lr[i],
                    momentum,
                    decay,
                    of_v,
                    of_g,
                )
            result[i] += total

    return loop


def _over_product(move: Any) -> Callable[..., None]:
    """The loop over one weight of one row, whose gradient y^T x is multiplied out two of its rows at a time.

    Five samples at a time: as many factors as registers hold.
    """

    def loop(theta, grad, offset, direction, velocity, start, y, x, momentum, decay, of_v, of_g, lr, result):  # type: ignore
        total, fives, (size, width) = 0.0, len(x) // 5 * 5, (y.shape[1], x.shape[1])
        g, h = np.empty(width, np.float32), np.empty(width, np.float32)  # rows o and q of the gradient
        for o in range(0, size, 2):
            q = min(o + 1, size - 1)
            g[:], h[:] = np.float32(0), np.float32(0)
            for b in range(0, fives, 5):
                p0, p1, p2, p3, p4 = y[b, o], y[b + 1, o], y[b + 2, o], y[b + 3, o], y[b + 4, o]
                r0, r1, r2, r3, r4 = y[b, q], y[b + 1, q], y[b + 2, q], y[b + 3, q], y[b + 4, q]
                x0, x1, x2, x3, x4 = x[b], x[b + 1], x[b + 2], x[b + 3], x[b + 4]
                for j in range(width):
                    g[j] += p0 * x0[j] + p1 * x1[j] + p2 * x2[j] + p3 * x3[j] + p4 * x4[j]
                    h[j] += r0 * x0[j] + r1 * x1[j] + r2 * x2[j] + r3 * x3[j] + r4 * x4[j]
            for b in range(fives, len(x)):
                p0, r0, x0 = y[b, o], y[b, q], x[b]
                for j in range(width):
                    g[j] += p0 * x0[j]
                    h[j] += r0 * x0[j]
            a, z = start + o * width, start + q * width
            total += move(
                theta[0, a : a + width],
                g,
                offset[0, a : a + width],
                direction[0, a : a + width],
                velocity[0, a : a + width],
                lr[0],
                momentum,
                decay,
                of_v,
                of_g,
            )
            if z > a:
                total += move(
                    theta[0, z : z + width],
                    h,
                    offset[0, z : z + width],
                    direction[0, z : z + width],
                    velocity[0, z : z + width],
                    lr[0],
                    momentum,
                    decay,
                    of_v,
                    of_g,
                )
        result[0] += total

    return loop
