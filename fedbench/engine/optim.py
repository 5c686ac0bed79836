"""Client optimizers as operations on rows: theta [k, P] and its buffers change in place.

The same arithmetic as torch.optim, one row per client.  Buffers live for a round (`reset: round`) or with the
client from one participation to the next (`reset: never`); the papers differ, so experiments say which.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedbench.core.options import NonNegative, Positive, Probability, check_each, require
from fedbench.core.private_torch import fused_sgd
from fedbench.nn.columns import Columns

OptimizerState = dict[str, Tensor]  # by the name of a buffer: [k, P], and the step counts of S parameters [k, S]
Rate = float | Tensor  # one learning rate, or one per row [k, 1]


class ParameterIndex:
    """The parameters that the columns of a row belong to.

    Args:
        spans: First column of each of the S parameters, and the column after its last.
        device: The device that computes.

    Attributes:
        of_column: The parameter of each column.  # [P] int64
    """

    def __init__(self, spans: Sequence[tuple[int, int]], device: torch.device):
        self._spans, self._device = spans, device
        sizes = torch.tensor([b - a for a, b in spans])
        self.of_column = torch.arange(len(spans)).repeat_interleave(sizes).to(device)
        self._within: dict[tuple[tuple[int, int], ...], Tensor] = {}

    def within(self, columns: Columns) -> Tensor:
        """Return the parameters that have a number in these columns.  # int64"""
        key = tuple(columns.slices)
        if key not in self._within:
            numbers = [i for i, span in enumerate(self._spans) if columns.overlaps(*span)]
            self._within[key] = torch.tensor(numbers, device=self._device)
        return self._within[key]


class Schedule:
    """Factor of the learning rate over a run: `warmup` rounds of linear growth, then the schedule `name`.

    constant: 1.
    exponential: gamma**r, r rounds after the warm-up.
    linear, cosine: from 1 towards `final`, which would be the factor of the round after the last one, as in torch's
        CosineAnnealingLR with T_max rounds.

    With per="round", call schedule(round, total): one factor for all clients and steps of a round.
    With per="step", call schedule.of_steps(round, total, steps [K]): a table [T, K] of the local steps of K clients.  A
    client with n steps in this round is taken to make n in every round.  Step t of round r is number r n + t of
    total n, so that the warm-up grows within rounds.
    """

    def __init__(
        self,
        name: Literal["constant", "cosine", "linear", "exponential"] = "constant",
        warmup: NonNegative = 0,
        gamma: float = 1.0,
        final: float = 0.0,
        per: Literal["round", "step"] = "round",
    ):
        self.name, self.warmup, self.gamma, self.final, self.per = name, warmup, gamma, final, per

    def __call__(self, round: int, total: int) -> float:
        """The factor in a round (from 0) of so many in all; by rounds, whatever `per` says."""
        return self._factor(round, total, 1)

    def of_steps(self, round: int, total: int, steps: np.ndarray) -> np.ndarray:
        """The factors of all local steps of clients that make steps [K] of them in the round; T: the most.  # [T, K]"""
        table = np.ones((int(steps.max(initial=0)), len(steps)))  # 1, and unused, beyond a client's last step
        for n in np.unique(steps[steps > 0]).tolist():
            first = round * n  # by its clock: as if it made n steps in every round
            factors = [self._factor(at, total * n, n) for at in range(first, first + n)]
            table[:n, steps == n] = np.array(factors)[:, None]
        return table

    def _factor(self, at: int, end: int, per_round: int) -> float:
        """The factor at one of end rounds, or of end steps, per_round of them in a round."""
        warmup = self.warmup * per_round
        if at < warmup:
            return (at + 1) / (warmup + 1)
        past = at - warmup
        progress = past / max(end - warmup, 1)  # from 0, and 1 after the last round or step
        return {
            "constant": 1.0,
            "exponential": self.gamma ** (past / per_round),
            "linear": 1 - (1 - self.final) * progress,
            "cosine": self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2,
        }[self.name]


class Optimizer:
    """Base class of optimizers.

    Args:
        lr: The learning rate, or a list with one for each of the N clients.
        reset: How long buffers live: "round", or "never" to end.
        clip: Largest l2 norm of a client's gradient, or None.
        schedule: The options of Schedule.

    Attributes:
        buffers: Names of the buffers of a row.  One named "count" has the number of steps of each parameter.
        plain: Whether a step is theta -= lr * gradient and nothing else, which SCAFFOLD requires.
    """

    plain = False
    buffers: tuple[str, ...] = ()

    def __init__(self, lr: float | list[float], reset: str, clip: float | None, schedule: Mapping | None):
        self.lr, self.reset, self.clip = lr, reset, clip
        self.schedule = Schedule(**(schedule or {}))

    def rate(self, round: int, total: int, ids: np.ndarray, scheduled: bool = True) -> Rate:
        """The rate of clients ids [K] in a round, or before any schedule: one, or one a client.  # [K, 1]"""
        factor = self.schedule(round, total) if scheduled else 1.0
        if not isinstance(self.lr, list):
            return self.lr * factor
        return torch.tensor([[self.lr[i] * factor] for i in ids.tolist()])

    def check(self, num_clients: int) -> None:
        """Refuse a list of rates of another length than there are clients."""
        check_each("optimizer.lr", self.lr, num_clients)

    def new(self, name: str, theta: Tensor, parameters: int = 1) -> Tensor:
        """Return a new buffer for rows theta [k, P] of S parameters."""
        return torch.zeros_like(theta)

    def with_clip(self, norm: float | None) -> Optimizer:
        """Return this optimizer with gradients clipped to a norm; None: unchanged."""
        if norm is None:
            return self
        other = copy.copy(self)
        other.clip, other.plain = norm, False
        return other

    def clipped(self, grad: Tensor, moving: Tensor) -> Tensor:
        """grad [k, P] scaled down where the norm of its part that moves the rows, moving [k, p], is above clip."""
        assert self.clip is not None
        norm = moving.norm(dim=1, keepdim=True)  # [k, 1]
        return grad * (self.clip / norm.clamp_min(1e-12)).clamp_max(1)

    def reach(self, steps: int) -> np.ndarray:
        """Return how far a round's first steps move a row along a constant gradient of 1, in learning rates.  # [T]

        Optimizers that normalize the gradient move by about one rate, for gradients of any size.
        """
        return np.ones(steps)

    def fresh(self) -> Optimizer:
        """This optimizer with buffers that end with one training, for rows thrown away afterwards."""
        other = copy.copy(self)
        other.reset = "round"
        return other

    def step(
        self,
        rows: Tensor,
        grad: Tensor,
        columns: Columns,
        state: OptimizerState,
        lr: Rate,
        index: ParameterIndex | None = None,
    ) -> None:
        """Move these columns of rows [k, P] in place.

        Args:
            rows: The rows.  # [k, P]
            grad: Their gradient, which stays unchanged.  # [k, P]
            columns: The columns that move.
            state: The buffers of the rows, which change.
            lr: The learning rate: one, or one a client [k, 1].
            index: The parameters of the columns, for optimizers that count steps.
        """
        for a, b in columns.slices:
            self.update(rows[:, a:b], grad[:, a:b], {n: m[:, a:b] for n, m in state.items()}, lr)

    def update(self, theta: Tensor, grad: Tensor, state: OptimizerState, lr: Rate) -> None:
        """Move theta [k, p] in place.  grad [k, p] stays unchanged; the buffers [k, p] change."""
        raise NotImplementedError


def _subtract(theta: Tensor, lr: Rate, step: Tensor) -> None:
    """theta <- theta - lr step, in place; lr: one or [k, 1]."""
    if isinstance(lr, Tensor):
        theta.addcmul_(step, lr, value=-1)
    else:
        theta.add_(step, alpha=-lr)


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, weight decay and Nesterov's variant.

    With momentum and one rate for all clients, PyTorch's fused kernel moves the rows.
    """

    def __init__(
        self,
        lr: Positive | list[Positive],
        momentum: Probability = 0.0,
        weight_decay: NonNegative = 0.0,
        nesterov: bool = False,
        reset: Literal["round", "never"] = "round",
        clip: Positive | None = None,
        schedule: dict | None = None,
    ):
        super().__init__(lr, reset, clip, schedule)
        require(momentum > 0 or not nesterov, "optimizer.nesterov=true needs optimizer.momentum > 0, got 0")
        self.momentum, self.weight_decay, self.nesterov = momentum, weight_decay, nesterov
        self.buffers = ("momentum",) if momentum else ()
        self.plain = not momentum and not weight_decay and clip is None

    def update(self, theta: Tensor, grad: Tensor, state: OptimizerState, lr: Rate) -> None:
        """v <- momentum v + g + decay theta; theta <- theta - lr v (Nesterov: lr (g + decay theta + momentum v))."""
        if self.momentum and not isinstance(lr, Tensor) and _fused_kernel_takes(theta, grad, state["momentum"]):
            fused_sgd(
                [theta],
                [grad],
                [state["momentum"]],
                weight_decay=self.weight_decay,  # type: ignore
                momentum=self.momentum,
                lr=lr,
                dampening=0.0,
                nesterov=self.nesterov,
                maximize=False,
                is_first_step=False,
            )
            return
        if self.weight_decay:
            grad = grad.add(theta, alpha=self.weight_decay)
        if self.momentum:
            velocity = state["momentum"].mul_(self.momentum).add_(grad)
            grad = grad.add(velocity, alpha=self.momentum) if self.nesterov else velocity
        _subtract(theta, lr, grad)

    def reach(self, steps: int) -> np.ndarray:
        """v_t = 1 + m + ... + m^(t-1), with Nesterov 1 + m v_t; where clients keep their momentum, its limit.  # [T]"""
        m = self.momentum
        if self.reset == "never":
            return np.full(steps, 1 / (1 - m))
        v = (1 - m ** np.arange(1, steps + 1)) / (1 - m)
        return 1 + m * v if self.nesterov else v


def _fused_kernel_takes(*rows: Tensor) -> bool:
    """Whether the fused kernel takes these; it has counted numbers in 32 bits."""
    small, known = rows[0].numel() < 2**31, rows[0].device.type in ("cpu", "cuda")
    return fused_sgd is not None and small and known and all(r.is_contiguous() for r in rows)


class Adam(Optimizer):
    """Adam (Kingma and Ba, ICLR 2015); `decoupled` decay is AdamW's (Loshchilov and Hutter, ICLR 2019)."""

    buffers = ("first", "second", "count")

    def __init__(
        self,
        lr: Positive | list[Positive],
        beta1: Probability = 0.9,
        beta2: Probability = 0.999,
        eps: Positive = 1e-8,
        weight_decay: NonNegative = 0.0,
        decoupled: bool = False,
        reset: Literal["round", "never"] = "round",
        clip: Positive | None = None,
        schedule: dict | None = None,
    ):
        super().__init__(lr, reset, clip, schedule)
        self.betas, self.eps = (beta1, beta2), eps
        self.weight_decay, self.decoupled = weight_decay, decoupled

    def new(self, name: str, theta: Tensor, parameters: int = 1) -> Tensor:
        """Return zeros: a moment [k, P], or the number of steps of each parameter [k, S]."""
        return theta.new_zeros(len(theta), parameters) if name == "count" else torch.zeros_like(theta)

    def step(
        self,
        rows: Tensor,
        grad: Tensor,
        columns: Columns,
        state: OptimizerState,
        lr: Rate,
        index: ParameterIndex | None = None,
    ) -> None:
        """Algorithm 1 of the paper.  Weight decay is part of the gradient, or (decoupled) of theta alone.

        A parameter that some steps leave out has fewer steps than the others, and its own bias correction.
        """
        assert index is not None
        b1, b2 = self.betas
        count = state["count"]  # [k, S]
        count[:, index.within(columns)] += 1
        bias1, bias2 = 1 - b1**count, (1 - b2**count).sqrt()  # [k, S]
        for a, b in columns.slices:
            theta, g, parameter = rows[:, a:b], grad[:, a:b], index.of_column[a:b]
            if self.weight_decay and self.decoupled:
                theta.sub_(theta * (lr * self.weight_decay))
            elif self.weight_decay:
                g = g.add(theta, alpha=self.weight_decay)
            first = state["first"][:, a:b].mul_(b1).add_(g, alpha=1 - b1)
            second = state["second"][:, a:b].mul_(b2).addcmul_(g, g, value=1 - b2)
            step = first / (second.sqrt() / bias2[:, parameter] + self.eps) / bias1[:, parameter]
            _subtract(theta, lr, step)
