"""The engine: what all cohorts of a run share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from fedbench.engine.compression import Compression
from fedbench.engine.executor import Executor
from fedbench.engine.federation import Federation
from fedbench.engine.optim import Optimizer
from fedbench.engine.privacy import Privacy
from fedbench.engine.rows import Rows, RowStore
from fedbench.nn.flat import FlatModel
from fedbench.tasks.base import Task


@dataclass
class Engine:
    """What all cohorts of a run share.

    epochs (of all, or [N]), batch_size, drop_last: the local.* keys.  rounds: of the run.  eval_batch: samples of a
    client at once, outside training; shared_batch: of all clients, where they hold one row (None: as many).  memories:
    the stores of kept optimizer buffers.  with_new_clients: the federation and its new clients, who come last and take
    no part in the rounds.  privacy: what is done to uploads; compression: to all messages.  weights: of clients in a
    mean that the server takes.  pace [N]: the share of its local
    steps that each client does in rounds (None: all of them).  fewest_epochs: where its draws of epochs begin (None:
    nothing is drawn).
    """

    federation: Federation
    model: FlatModel
    optimizer: Optimizer
    executor: Executor
    rows: RowStore
    seed: int = 0
    rounds: int = 1
    epochs: int | np.ndarray = 1
    batch_size: int = 10
    drop_last: bool = False
    eval_batch: int = 64
    shared_batch: int | None = None
    memories: dict[str, Rows] = field(default_factory=dict)
    with_new_clients: Federation | None = None
    privacy: Privacy | None = None
    compression: Compression | None = None
    weights: Literal["samples", "uniform"] = "samples"
    pace: np.ndarray | None = None
    fewest_epochs: int | None = None

    @property
    def task(self) -> Task:
        """The loss and the scores of the data set."""
        return self.federation.task

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self.federation.device

    def memory(self, owner: str, buffer: str, width: int) -> Rows:
        """The kept optimizer buffers of all clients for the rows called owner (optimizer.reset=never)."""
        name = f"optimizer/{owner}/{buffer}"
        if name not in self.memories:
            sample, parameters = torch.zeros(1, width, device=self.device), len(self.model.parameter_spans(width))
            self.memories[name] = self.rows(name, self.optimizer.new(buffer, sample, parameters)[0])
        return self.memories[name]
