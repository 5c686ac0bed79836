"""What a machine's memory and its arithmetic allow a local step, and the share of it that is reached.

A step trains k clients, one batch of B images each, on rows of P float32 numbers.  It must move at least

    4 P (k (weights read forward, read backward; gradient written, read; row written  = 5
            + momentum read, written                                                  = 2, if there is any
            + what a method reads beside a client's row                               PGFed: 1, its aux)
         + what a method reads that all clients share)                                PGFed: 1, gbar

bytes, so that copy bandwidth allows  k B bandwidth / bytes  images/s.  The update's own read of the row is taken to be
the backward pass's, and what one kernel could hand on to the next is not counted twice; activations, the images and
whatever happens once a round (the server, evaluation, PGFed's gradient pass after training) are left out: the bound is
above what can be reached.  Small rows stay in a cache, which is faster than memory: a share above 1 says so.

FLOPs of an image are counted by torch.utils.flop_counter in forward and backward of the plain module (products of
matrices and convolutions; 2 for a multiplication with its addition), so that the matrix rate allows  rate / FLOPs
images/s.  An inner product of a row (PGFed's, 2 P a step) is among what is left out.

Bandwidth: the bytes read and written by copying a large tensor; rate: 2 n^3 over the time of an n x n product; each the
best of several, on all cores of a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from bench_clock import Clock, Turns, row
from bench_work import Workload
from torch import nn

from fedbench.engine.executor import cores
from fedbench.simulation import build

NUMBER = 4  # bytes
READS = {"fedavg": (0, 0), "pgfed": (1, 1)}  # rows read in a step: beside each client's own, and shared by all


@dataclass(frozen=True)
class Machine:
    """The measured speed of a machine: copies in bytes/s (read and written), and products in FLOP/s by precision."""

    copy: float
    products: dict[str, float]

    def __str__(self) -> str:
        rates = ", ".join(f"{rate / 1e9:,.0f} in {name}" for name, rate in self.products.items())
        return f"copies {self.copy / 1e9:,.1f} GB/s; multiplies matrices at GFLOP/s: {rates}"


@functools.cache
def machine(device: torch.device, megabytes: int | None = None, side: int | None = None) -> Machine:
    """Return the measured speed of a machine: of copies in memory, and of matrix products in each precision.

    Args:
        device: The device.
        megabytes: The size of a copied tensor; None for 1,024, or 256 on a CPU.
        side: The side of the square matrices; None for 8,192, or 2,048 on a CPU.
    """
    gpu = device.type == "cuda"
    names = ["float32", *(["tf32", "bf16"] if gpu else [])]
    side = side or (8192 if gpu else 2048)
    with all_cores():
        return Machine(
            copy_rate(device, (megabytes or (1024 if gpu else 256)) * 2**20 // NUMBER),
            {name: product_rate(device, name, side) for name in names},
        )


@contextmanager
def all_cores() -> Iterator[None]:
    """Let torch use all cores of the machine in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def copy_rate(device: torch.device, numbers: int) -> float:
    """Bytes/s."""
    source = torch.ones(numbers, device=device)
    target = torch.empty_like(source)
    return 2 * NUMBER * numbers / least(device, lambda: target.copy_(source))


def product_rate(device: torch.device, precision: str, side: int) -> float:
    """Return the FLOP/s of the product of two square matrices.

    Args:
        device: The device.
        precision: "float32", "tf32" or "bf16".
        side: The side of the matrices.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    # ones would be multiplied at a higher clock: a GPU's power depends on the bits that change
    a = torch.rand(side, side, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))
    out = torch.empty_like(a)
    build.set_precision("tf32" if precision == "tf32" else "float32")
    try:
        return 2 * side**3 / least(device, lambda: torch.mm(a, a, out=out))
    finally:
        build.set_precision("float32")


def least(device: torch.device, work: Callable[[], Any], times: int = 5) -> float:
    """Return the seconds of the fastest of several calls, after one call for warm-up."""
    clock = Clock(device)
    work()
    return min(clock(work)[1] for _ in range(times))


def step_bytes(size: int, clients: int, momentum: bool, own: int = 0, shared: int = 0) -> int:
    """Return the bytes that a local step of all clients must read and write, by the formula above.

    Args:
        size: The length P of a row.
        clients: The number of clients.
        momentum: Whether SGD has momentum.
        own: The number of rows that the method reads beside the row of each client.
        shared: The number of rows that it reads for all clients together.
    """
    return NUMBER * size * (clients * (5 + 2 * momentum + own) + shared)


def image_flops(module: nn.Module, shape: tuple[int, ...], batch: int) -> float:
    """Return the FLOPs of the forward and backward pass per image, for a batch of images of this shape."""
    from torch.utils.flop_counter import FlopCounterMode  # imports much, which processes of growth need not

    x, y = torch.zeros(batch, *shape), torch.zeros(batch, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        nn.functional.cross_entropy(module(x), y).backward()
    return counter.get_total_flops() / batch


@dataclass(frozen=True)
class Step:
    """A local step of a method on a workload: bytes that it moves, FLOPs and images, of all clients together."""

    method: str
    moved: int
    flops: float
    images: int

    @classmethod
    def of(cls, method: str, work: Workload) -> Step:
        """Return the local step of a method, "fedavg" or "pgfed", on a workload."""
        batch = work.work["batch_size"]
        own, shared = READS[method]
        shape = tuple(work.arrays.inputs.shape[1:])  # type: ignore[union-attr]
        images = work.cohort * batch
        moved = step_bytes(work.flat().size, work.cohort, work.work["momentum"] > 0, own, shared)
        return cls(method, moved, image_flops(work.module(), shape, batch) * images, images)

    def allows(self, found: Machine, precision: str) -> dict[str, float]:
        """Images/s by what bounds them."""
        return {
            "bytes": self.images * found.copy / self.moved,
            f"{precision} products": self.images * found.products[precision] / self.flops,
        }


def roofline(turns: Turns, work: Workload, found: Machine) -> list[dict[str, Any]]:
    """Return a row for each rival and bound: its images/s as a fraction of those that the bound allows.

    The bounds are the memory and the arithmetic of the machine.

    Args:
        turns: The measured rivals.
        work: The workload.
        found: The speed of the machine.
    """
    steps = {m: Step.of(m, work) for m in dict.fromkeys(rival.method for rival in turns.rivals.values())}
    return [
        row(
            f"{work}, roofline",
            name,
            [rate / most for rate in turns.rates[name]],
            bound=bound,
            method=rival.method,
            allowed_images_per_s=most,
            step_bytes=steps[rival.method].moved,
            step_flops=steps[rival.method].flops,
            step_images=steps[rival.method].images,
        )
        for name, rival in turns.rivals.items()
        for bound, most in steps[rival.method].allows(found, rival.precision).items()
    ]
