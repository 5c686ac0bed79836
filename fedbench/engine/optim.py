"""Optimizers of clients: they update rows (a model's parameters) and buffers in place, as torch.optim does.

Buffers, such as momentum, are new in each round (optimizer.reset=round), or stay with the client from one participation
to the next (optimizer.reset=never).  Papers differ in this.

Letters: k clients, K clients of the cohort, N clients of the federation, P length of a row, p number of updated
columns, S parameters of a model, T local steps.
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

OptimizerState = dict[str, Tensor]  # buffers by name: [k, P] each, and the step counts of parameters [k, S]
Rate = float | Tensor  # one learning rate, or one for each client [k, 1]


class ParameterIndex:
    """The index of the parameter to which each column of a row belongs.

    Args:
        spans: Start and stop column (exclusive) of each parameter.  # [S]
        device: The compute device.

    Attributes:
        of_column: Index of the parameter of each column.  # [P] int64
    """

    def __init__(self, spans: Sequence[tuple[int, int]], device: torch.device):
        self._spans, self._device = spans, device
        sizes = torch.tensor([stop - start for start, stop in spans])
        self.of_column = torch.arange(len(spans)).repeat_interleave(sizes).to(device)
        self._within: dict[tuple[tuple[int, int], ...], Tensor] = {}

    def within(self, columns: Columns) -> Tensor:
        """Return the indices, from 0 to S - 1, of all parameters that `columns` overlap, ascending.  # [s] int64"""
        key = tuple(columns.slices)
        if key not in self._within:
            indices = [i for i, (start, stop) in enumerate(self._spans) if columns.overlaps(start, stop)]
            self._within[key] = torch.tensor(indices, dtype=torch.int64, device=self._device)
        return self._within[key]


class Schedule:
    """Factor of the learning rate over a run: `warmup` rounds of growth, then decay by `gamma` a round, or to `final`.

    Schedules after the warm-up:
      - constant: 1;
      - exponential: gamma**r, where r is the number of rounds since the warm-up;
      - linear, cosine: from 1 to `final` after the last round, as torch's CosineAnnealingLR with T_max rounds.

    With per="round", all clients and steps of a round have one factor, schedule(round, num_rounds).  With per="step",
    the factor changes with the steps of a client, schedule.of_steps(round, num_rounds, num_steps).  The schedule then
    assumes that a client with n steps in this round has n steps in every round: step t of round r is step r n + t of
    num_rounds n.

    Args:
        name: The schedule after the warm-up.
        warmup: Number of rounds of the warm-up.
        gamma: Factor of a round, for "exponential".
        final: Factor after the last round, for "linear" and "cosine".
        per: Whether the factor changes with rounds or with local steps.
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

    def __call__(self, round: int, num_rounds: int) -> float:
        """Return the factor of a round, as if per="round".

        Args:
            round: Index of the round, from 0.
            num_rounds: Number of rounds of the run.
        """
        return self._factor(round, num_rounds, 1)

    def of_steps(self, round: int, num_rounds: int, num_steps: np.ndarray) -> np.ndarray:
        """Return the factors of all local steps of a round.

        Args:
            round: Index of the round, from 0.
            num_rounds: Number of rounds of the run.
            num_steps: Number of local steps of each client in this round.  # [K]

        Returns:
            The factors.  Those after the last step of a client are 1 and unused.  # [T, K]
        """
        factors = np.ones((int(num_steps.max(initial=0)), len(num_steps)))
        for n in np.unique(num_steps[num_steps > 0]).tolist():
            first = round * n  # steps before this round, if a client takes n in each
            of_n_steps = [self._factor(step, num_rounds * n, n) for step in range(first, first + n)]
            factors[:n, num_steps == n] = np.array(of_n_steps)[:, None]
        return factors

    def _factor(self, step: int, num_steps: int, steps_per_round: int) -> float:
        """Return the factor at a step.

        Args:
            step: Index of the step among all steps of the run, from 0.
            num_steps: Number of steps of the run.
            steps_per_round: Number of steps of a round.  Warm-up and gamma are in rounds.
        """
        warmup = self.warmup * steps_per_round
        if step < warmup:
            return (step + 1) / (warmup + 1)
        steps_after_warmup = step - warmup
        progress = steps_after_warmup / max(num_steps - warmup, 1)  # in [0, 1)
        return {
            "constant": 1.0,
            "exponential": self.gamma ** (steps_after_warmup / steps_per_round),
            "linear": 1 - (1 - self.final) * progress,
            "cosine": self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2,
        }[self.name]


class Optimizer:
    """Base class of optimizers; `buffers` names what they keep for each row, such as momentum.

    Args:
        lr: The learning rate, or a list with one for each of the N clients.
        reset: When buffers are reset: "round" (in each round) or "never".
        clip: Maximum l2 norm of a client's gradient, or None.
        schedule: The options of Schedule, or None.

    Attributes:
        buffers: Names of the buffers of a row.  "count" is the number of steps of each parameter.
        is_plain_sgd: Whether a step is exactly theta -= lr * gradient, which SCAFFOLD requires.
    """

    is_plain_sgd = False
    buffers: tuple[str, ...] = ()

    def __init__(self, lr: float | list[float], reset: str, clip: float | None, schedule: Mapping | None):
        self.lr, self.reset, self.clip = lr, reset, clip
        self.schedule = Schedule(**(schedule or {}))

    def rate(self, round: int, num_rounds: int, ids: np.ndarray, scheduled: bool = True) -> Rate:
        """Return the learning rate in a round.

        Args:
            round: Index of the round, from 0.
            num_rounds: Number of rounds of the run.
            ids: The clients.  # [K]
            scheduled: Whether to multiply it by the schedule's factor of the round.

        Returns:
            One learning rate, or one for each client.  # [K, 1]
        """
        factor = self.schedule(round, num_rounds) if scheduled else 1.0
        if not isinstance(self.lr, list):
            return self.lr * factor
        return torch.tensor([[self.lr[i] * factor] for i in ids.tolist()])

    def check(self, num_clients: int) -> None:
        """Raise ConfigError if the option optimizer.lr is a list without exactly num_clients = N numbers."""
        check_each("optimizer.lr", self.lr, num_clients)

    def new(self, name: str, theta: Tensor, parameters: int = 1) -> Tensor:
        """Return a new buffer.  Here it is zeros; subclasses may override this.

        Args:
            name: Name of the buffer, unused here.
            theta: The parameters of one model per client.  # [k, P]
            parameters: Number of parameters in a row, S, unused here.

        Returns:
            The buffer of k clients.  # [k, P]
        """
        return torch.zeros_like(theta)

    def with_clip(self, norm: float | None) -> Optimizer:
        """Return a copy of the optimizer that clips each client's gradient to the l2 norm `norm`.

        None: return this optimizer itself.
        """
        if norm is None:
            return self
        other = copy.copy(self)
        other.clip, other.is_plain_sgd = norm, False  # with clipping, a step is not theta -= lr * gradient
        return other

    def clipped(self, grad: Tensor, updating: Tensor) -> Tensor:
        """Scale down the gradients of clients whose norm exceeds the option clip.

        Args:
            grad: The gradients.  # [k, P]
            updating: Their columns that update the rows, of which the norm is computed.  # [k, p]

        Returns:
            The gradients, times clip / norm for a client whose norm is larger than clip.  # [k, P]
        """
        assert self.clip is not None
        norm = updating.norm(dim=1, keepdim=True)  # [k, 1]
        return grad * (self.clip / norm.clamp_min(1e-12)).clamp_max(1)  # 1e-12: no division by 0

    def reach(self, num_steps: int) -> np.ndarray:
        """Return how far each step of a round moves a row along a constant gradient of 1, divided by the learning rate.

        For optimizers that normalize the gradient, this is about 1 for gradients of any size.

        Args:
            num_steps: Number of steps.

        Returns:
            One distance for each step.  # [T]
        """
        return np.ones(num_steps)

    def fresh(self) -> Optimizer:
        """Return a copy with reset="round", which begins each training with new buffers (such as momentum of 0)."""
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
        """Update columns of rows in place.

        Args:
            rows: The parameters of one model per client.  # [k, P]
            grad: Their gradient, which is not changed.  # [k, P]
            columns: The parameters to update, as columns of a row.
            state: The buffers of the rows, which are updated.
            lr: The learning rate: one, or one for each client [k, 1].
            index: The parameters of the columns, unused here; for optimizers that count steps.
        """
        for start, stop in columns.slices:
            buffers = {name: buffer[:, start:stop] for name, buffer in state.items()}
            self.update(rows[:, start:stop], grad[:, start:stop], buffers, lr)

    def update(self, theta: Tensor, grad: Tensor, state: OptimizerState, lr: Rate) -> None:
        """Update rows in place.  Subclasses must implement it, unless they override `step`.

        Args:
            theta: The updated columns of the parameters of each client.  # [k, p]
            grad: Their gradient, which is not changed.  # [k, p]
            state: The buffers of the rows, which are updated.  # [k, p] each
            lr: The learning rate: one, or one for each client [k, 1].
        """
        raise NotImplementedError


def _subtract(theta: Tensor, lr: Rate, step: Tensor) -> None:
    """Subtract lr * step from theta [k, p] in place; lr is one number, or one for each client [k, 1]."""
    if isinstance(lr, Tensor):
        theta.addcmul_(step, lr, value=-1)
    else:
        theta.add_(step, alpha=-lr)


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, Nesterov momentum and weight decay, as torch.optim.SGD.

    With momentum and one learning rate for all clients, PyTorch's fused kernel updates the rows.

    Args:
        lr: The learning rate, or a list with one for each client.
        momentum: Factor of the previous velocity.
        weight_decay: Factor of the rows that is added to the gradient.
        nesterov: Whether to use Nesterov momentum.
        reset: When buffers are reset: "round" (in each round) or "never".
        clip: Maximum l2 norm of a client's gradient, or None.
        schedule: The options of Schedule, or None.
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
        require(
            momentum > 0 or not nesterov,
            "optimizer.nesterov=true needs optimizer.momentum > 0, got 0: set optimizer.momentum=0.9, or "
            "optimizer.nesterov=false",
        )
        self.momentum, self.weight_decay, self.nesterov = momentum, weight_decay, nesterov
        self.buffers = ("momentum",) if momentum else ()
        self.is_plain_sgd = not momentum and not weight_decay and clip is None

    def update(self, theta: Tensor, grad: Tensor, state: OptimizerState, lr: Rate) -> None:
        """Update rows in place.

        v <- momentum v + g';  theta <- theta - lr v, or with Nesterov momentum theta <- theta - lr (g' + momentum v),
        where g' = grad + weight_decay theta.

        Args:
            theta: The updated columns of the parameters of each client.  # [k, p]
            grad: Their gradient, which is not changed.  # [k, p]
            state: The buffer "momentum" with v, which is updated, or no buffer without momentum.  # [k, p]
            lr: The learning rate: one, or one for each client [k, 1].
        """
        if self.momentum and not isinstance(lr, Tensor) and _can_use_fused_kernel(theta, grad, state["momentum"]):
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
                is_first_step=False,  # the buffer exists: zeros, or the momentum so far
            )
            return
        if self.weight_decay:
            grad = grad.add(theta, alpha=self.weight_decay)
        if self.momentum:
            velocity = state["momentum"].mul_(self.momentum).add_(grad)
            grad = grad.add(velocity, alpha=self.momentum) if self.nesterov else velocity
        _subtract(theta, lr, grad)

    def reach(self, num_steps: int) -> np.ndarray:
        """Return how far each step t = 1, ..., T of a round moves a row along a constant gradient of 1, over lr.

        With momentum m, it is v_t = 1 + m + ... + m^(t-1), or 1 + m v_t with Nesterov momentum.  If clients keep their
        momentum between rounds, it is the limit 1 / (1 - m).
        """
        m = self.momentum
        if self.reset == "never":
            return np.full(num_steps, 1 / (1 - m))
        v = (1 - m ** np.arange(1, num_steps + 1)) / (1 - m)
        return 1 + m * v if self.nesterov else v


def _can_use_fused_kernel(*rows: Tensor) -> bool:
    """Return whether PyTorch's fused SGD kernel can be used.

    It needs a CPU or CUDA device, contiguous tensors, and fewer than 2^31 values.

    Args:
        *rows: The parameters, their gradient and the momentum.  # [k, p] each
    """
    fits = rows[0].numel() < 2**31  # the kernel has 32-bit indices
    has_kernel = fused_sgd is not None and rows[0].device.type in ("cpu", "cuda")
    return has_kernel and fits and all(r.is_contiguous() for r in rows)


class Adam(Optimizer):
    """Adam, or AdamW with decoupled=true.

    Args:
        lr: The learning rate, or a list with one for each client.
        beta1: Decay rate of the first moment.
        beta2: Decay rate of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Factor of weight decay.
        decoupled: Whether weight decay is subtracted from the rows (AdamW), instead of added to the gradient.
        reset: When buffers are reset: "round" (in each round) or "never".
        clip: Maximum l2 norm of a client's gradient, or None.
        schedule: The options of Schedule, or None.

    References:
        Kingma and Ba, ICLR 2015, Algorithm 1.  Loshchilov and Hutter, ICLR 2019 (AdamW).
    """

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
        """Return a new buffer of zeros.

        Args:
            name: "first" or "second", a moment; or "count", the number of steps of each parameter.
            theta: The parameters of one model per client.  # [k, P]
            parameters: Number of parameters in a row, S.

        Returns:
            The buffer.  # [k, P], or [k, S] for "count"
        """
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
        """Update columns of rows in place.  Bias correction uses the number of steps of each parameter.

        Args:
            rows: The parameters of one model per client.  # [k, P]
            grad: Their gradient, which is not changed.  # [k, P]
            columns: The parameters to update, as columns of a row.
            state: The moments [k, P] and the numbers of steps [k, S] of the rows, which are updated.
            lr: The learning rate: one, or one for each client [k, 1].
            index: The parameter of each column.  It is required.
        """
        assert index is not None
        b1, b2 = self.betas
        count = state["count"]  # number of steps of each parameter  [k, S]
        count[:, index.within(columns)] += 1
        bias1, bias2 = 1 - b1**count, (1 - b2**count).sqrt()  # bias corrections of both moments  [k, S]
        for start, stop in columns.slices:
            # parameter: the index of the parameter to which each column belongs
            theta, g, parameter = rows[:, start:stop], grad[:, start:stop], index.of_column[start:stop]
            if self.weight_decay and self.decoupled:
                theta.sub_(theta * (lr * self.weight_decay))
            elif self.weight_decay:
                g = g.add(theta, alpha=self.weight_decay)
            first = state["first"][:, start:stop].mul_(b1).add_(g, alpha=1 - b1)
            second = state["second"][:, start:stop].mul_(b2).addcmul_(g, g, value=1 - b2)
            step = first / (second.sqrt() / bias2[:, parameter] + self.eps) / bias1[:, parameter]
            _subtract(theta, lr, step)
