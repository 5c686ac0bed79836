"""What a local step does to a row, in one pass over memory: a loop that numba compiles, where it is installed.

On a CPU a row of a million numbers is larger than a core's cache, so that what an operation costs is the rows it reads
and writes.  Adding a direction to the gradient, an inner product and SGD with momentum, one after the other, move ten
rows, one loop seven: on one thread 0.72 to 0.81 of the time for 878,538 numbers, and 0.93 to 0.96 of PGFed's rounds
with FedAvgCNN.  Rows of fewer than LARGE numbers stay with torch: they fit in a cache, and a run of small models should
not wait for a compiler (two seconds).
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)
LARGE = 200_000            # of numbers in a row: about what a core's own cache holds of the seven
BLOCK = 4096               # products summed in float32 before they go to float64, as in linalg.dot
_COMPILING = threading.Lock()


def fits(theta: Tensor, *others: Tensor) -> bool:
    """Whether these rows [k, P] are for the loop: large float32 ones in one piece on a CPU, numba installed."""
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
            keep: float, weight_decay: float, nesterov: bool) -> Tensor:
    """Inner products of theta [k, P] with along [P] or [k, P], then a step of SGD along grad + plus, both [k, P].

    theta and momentum [k, P] (None: there is none) change in place; keep: the momentum's factor; lr: one or [k, 1].
    Equal to the separate operations but for rounding: the products within 5e-6 where all have one sign.  # [k]
    """
    k = len(theta)
    lift = torch.empty(k)
    rates = lr.reshape(k).float() if isinstance(lr, Tensor) else torch.full((k,), lr)
    velocity = theta[:, :0] if momentum is None else momentum
    ahead, straight = (keep, 1.0) if nesterov or momentum is None else (1.0, 0.0)      # of velocity, of gradient
    _compiled()(theta.numpy(), grad.numpy(), plus.numpy(), (along[None] if along.dim() == 1 else along).numpy(),
                velocity.numpy(), rates.numpy(), *map(np.float32, (keep, weight_decay, ahead, straight)), lift.numpy())
    return lift


def _compiled() -> Callable[..., None]:
    """The loop as machine code, in which the interpreter lock is released.  Threads arrive here together."""
    with _COMPILING:
        return _compile()


@functools.cache
def _compile() -> Callable[..., None]:
    import numba
    rows, vector, number = numba.float32[:, ::1], numba.float32[::1], numba.float32
    kinds = numba.void(*5 * [rows], vector, *4 * [number], vector)
    return numba.njit(kinds, nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})(_loop)


def _loop(theta, grad, plus, along, velocity, lr, keep, decay, ahead, straight, lift):        # type: ignore[no-untyped-def]
    for i in range(len(theta)):
        total, other, rate = 0.0, along[min(i, len(along) - 1)], lr[i]
        for a in range(0, theta.shape[1], BLOCK):
            # of slices, whose indices are never negative, numba makes vector instructions
            w, g, p = theta[i, a:a + BLOCK], grad[i, a:a + BLOCK], plus[i, a:a + BLOCK]
            b, part = other[a:a + BLOCK], np.float32(0)
            if velocity.shape[1] > 0:
                v = velocity[i, a:a + BLOCK]
                for n in range(len(w)):
                    part += w[n] * b[n]
                    direction = g[n] + p[n] + decay * w[n]
                    v[n] = keep * v[n] + direction
                    w[n] -= rate * (ahead * v[n] + straight * direction)
            else:
                for n in range(len(w)):
                    part += w[n] * b[n]
                    w[n] -= rate * (g[n] + p[n] + decay * w[n])
            total += part
        lift[i] = total
