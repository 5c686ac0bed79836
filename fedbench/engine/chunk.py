"""A chunk of clients that train together: what all chunks of a training have in common, and the rows of one.

Letters: K clients of the chunk, k still training, P numbers of a row, B batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedbench.core.rng import RowRandom
from fedbench.engine.batch import Batch
from fedbench.engine.optim import Memory, Optimizer, Rate
from fedbench.nn.flat import Columns

if TYPE_CHECKING:
    from fedbench.engine.engine import Engine
    from fedbench.engine.step import Step

Loss = Callable[["Step", Tensor, Batch], Tensor]  # (s, rows [k, P], batch) -> [k, B] or [k]
StepFunction = Callable[["Step", Batch], None]


@dataclass(frozen=True)
class TrainingSetup:
    """What all chunks of one training have in common.

    columns: those that learn.  loss: instead of the task's, or None.  step_key: of the keyed draws in its steps.
    clip (privacy): the columns that will be uploaded, and the largest norm of a step's gradient in them.
    """

    engine: Engine
    optimizer: Optimizer
    columns: Columns
    loss: Loss | None
    step_key: int
    clip: tuple[Columns, float] | None = None


@dataclass
class Chunk:
    """What one chunk starts from and leaves: rows of theta and of every named state, clients in chunk order.

    num_steps [K], on the host, descends.  loss: summed over the steps, after the last one their mean.
    """

    ids: np.ndarray  # [K]
    num_steps: np.ndarray  # [K]
    lr: Rate
    pace: Tensor | None  # what a schedule by steps makes of lr in each  # [T, K]
    theta: Tensor  # [K, P]
    state: dict[str, Tensor]  # each [K, ...]
    memory: dict[str, Memory]  # optimizer buffers by the name of the rows they belong to
    loss: Tensor = field(init=False)  # [K]

    def lr_of_step(self, t: int, k: int) -> Tensor:
        """The rates of the first k clients in step t, where a schedule goes by steps.  # [k, 1]"""
        assert self.pace is not None
        return self.pace[t, :k, None] * (self.lr[:k] if isinstance(self.lr, Tensor) else self.lr)

    def __post_init__(self) -> None:
        self.loss = torch.zeros(len(self.ids), device=self.theta.device)


@dataclass(slots=True)
class StepProgress:
    """What the local step under way has done so far."""

    gradients: int = 0  # that were requested
    tensors: int = 0  # of the gradient pool that are in use
    random: RowRandom | None = None
    differentiated: Tensor | None = None  # the rows that a custom loss was given
    statistics: dict[str, Tensor] = field(default_factory=dict)  # running statistics that it has updated
    extra: list[Tensor] = field(default_factory=list)  # extra losses [k, B] of the module at those rows

    def keep(self, rows: Tensor, statistics: dict[str, Tensor], extra: list[Tensor]) -> None:
        """Keep what a pass at some rows leaves: running statistics and extra losses of the rows being differentiated,
        which go with their gradient; statistics of other rows, say a teacher's, only as long as there are none."""
        if rows is self.differentiated or not self.statistics:
            self.statistics = statistics
        if rows is self.differentiated and extra:
            self.extra = extra

    def restart(self) -> None:
        """Begin another step, in place: a new object for each would take 0.5 of a small model's 80 microseconds."""
        self.gradients = self.tensors = 0
        self.random = self.differentiated = None
        self.statistics.clear()
        self.extra = []
