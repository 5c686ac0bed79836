"""The engine: what all cohorts of a run share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from fedbench.channel.compression import Compression
from fedbench.channel.privacy import Privacy
from fedbench.core.rows import Rows, RowStore
from fedbench.engine.executor import Executor
from fedbench.engine.federation import Federation
from fedbench.engine.optim import Optimizer
from fedbench.nn.flat import FlatModel
from fedbench.server.base import ServerRule
from fedbench.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What all cohorts of a run share.  Its fields stay as they are; what rounds change is in `rows`.

    Attributes:
        federation: The clients that take part in the rounds, with their data.
        with_new_clients: The same and, after them, the clients that are new when the rounds are over.
        model: The model as a row.
        optimizer: Of local steps.
        executor: What runs the chunks of a cohort.
        rows: The stores of all clients' states: the method's, optimizer buffers, residuals of compression.
        privacy: What is done to uploads.
        compression: What is done to all messages.
        server: How the server moves its model to the mean of the uploads.  None: it takes the mean.
        seed: The run's seed.
        rounds: Number of rounds of the run.
        epochs: local.epochs, one number for all or each client's.  # [N]
        steps: local.steps, which replaces epochs, or None.
        batch_size: local.batch_size.
        drop_last: local.drop_last.
        eval_batch: Samples of a client at once, outside of training.
        shared_batch: The same of all clients, where they hold one row.  None: eval_batch.
        client_weights: Of clients in a mean that the server takes.
        step_fraction: Fraction of its local steps that each client does in rounds.  None: all do all.  # [N]
        fewest_epochs: The least number of epochs that a client draws.  None: epochs are not drawn.
    """

    federation: Federation
    with_new_clients: Federation | None = None
    model: FlatModel
    optimizer: Optimizer
    executor: Executor
    rows: RowStore
    privacy: Privacy | None = None
    compression: Compression | None = None
    server: ServerRule | None = None
    seed: int = 0
    rounds: int = 1
    epochs: float | np.ndarray = 1
    steps: int | None = None
    batch_size: int = 10
    drop_last: bool = False
    eval_batch: int = 64
    shared_batch: int | None = None
    client_weights: Literal["samples", "uniform"] = "samples"
    step_fraction: np.ndarray | None = None
    fewest_epochs: int | None = None

    @property
    def task(self) -> Task:
        """The loss and the scores of the data set."""
        return self.federation.task

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self.federation.device

    def optimizer_state(self, owner: str, buffer: str, width: int) -> Rows:
        """Return the kept optimizer buffers of all clients for the rows called owner (optimizer.reset=never)."""
        name = f"optimizer/{owner}/{buffer}"
        if name in self.rows.all:
            return self.rows.all[name]
        sample, parameters = torch.zeros(1, width, device=self.device), len(self.model.parameter_spans(width))
        return self.rows(name, self.optimizer.new(buffer, sample, parameters)[0])
