"""The engine: model, task, data, optimizer, executor, client states and options of a run, for all cohorts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from fedbench.aggregators.base import Aggregator
from fedbench.channel.attackers import Attackers
from fedbench.channel.central import CentralPrivacy
from fedbench.channel.compression import Compression
from fedbench.channel.lora_sync import LoraSync
from fedbench.channel.privacy import Privacy
from fedbench.core.rows import Rows, RowStore
from fedbench.engine.executor import Executor
from fedbench.engine.federation import Federation
from fedbench.engine.optim import Optimizer
from fedbench.nn.client_ranks import ClientRanks
from fedbench.nn.flat import FlatModel
from fedbench.server.base import ServerRule
from fedbench.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Model, data, optimizer, executor and options of a run.  Fields do not change; states of clients are in `rows`.

    Attributes:
        federation: The clients that take part in the rounds, with their data.
        with_new_clients: The same clients, followed by those that are new after the last round.  None: no new clients.
        model: The model whose parameters are rows.
        optimizer: The clients' optimizer.
        executor: Computes the chunks of a cohort.
        rows: The states of all clients: the method's, optimizer buffers, residuals of compression.
        privacy: Clips uploads and adds noise, or None.
        central: Clips uploads and adds noise to their means (privacy=central), or None.
        compression: Compresses messages, or None.
        client_ranks: Which columns of a row each client has if ranks differ.  None: all clients have all columns.
        lora_sync: Rule that combines the clients' LoRA factors.  None: their means.
        server: Server rule that moves the server's model towards the mean of the uploads.  None: it takes the mean.
        aggregator: Rule that combines uploads.  None: their mean.
        attackers: Clients that attack the run.  None: all are honest.
        seed: The run's seed.
        rounds: Number of rounds of the run.
        epochs: local.epochs: one number for all clients, or one for each.  # [N]
        steps: local.steps, which replaces epochs, or None.
        batch_size: local.batch_size: one for all clients, or one for each.  # [N]
        drop_last: local.drop_last.
        eval_batch: Number of samples of a client that are computed at once, outside of training.
        shared_batch: The same for clients that share one row.  None: eval_batch.
        client_weights: Weights of clients in the server's mean.
        step_fraction: Fraction of its local steps that each client completes in a round.  None: 1.  # [N]
        fewest_epochs: system.fewest_epochs, the minimum of a random number of epochs.  None: it is not random.
    """

    federation: Federation
    with_new_clients: Federation | None = None
    model: FlatModel
    optimizer: Optimizer
    executor: Executor
    rows: RowStore
    privacy: Privacy | None = None
    central: CentralPrivacy | None = None
    compression: Compression | None = None
    client_ranks: ClientRanks | None = None
    lora_sync: LoraSync | None = None
    server: ServerRule | None = None
    aggregator: Aggregator | None = None
    attackers: Attackers | None = None
    seed: int = 0
    rounds: int = 1
    epochs: float | np.ndarray = 1
    steps: int | None = None
    batch_size: int | np.ndarray = 10
    drop_last: bool = False
    eval_batch: int = 64
    shared_batch: int | None = None
    client_weights: Literal["samples", "uniform"] = "samples"
    step_fraction: np.ndarray | None = None
    fewest_epochs: int | None = None

    @property
    def task(self) -> Task:
        """The task of the run, with its loss and metrics."""
        return self.federation.task

    @property
    def device(self) -> torch.device:
        """The device that has the model parameters and computes: cpu or a GPU."""
        return self.federation.device

    def optimizer_state(self, owner: str, buffer: str, length: int) -> Rows:
        """Return a buffer of the optimizer that all clients keep between rounds (optimizer.reset=never).

        Args:
            owner: Name of the rows to which it belongs (`LocalTraining.buffers`).
            buffer: Name of the buffer.
            length: Length of these rows.

        Returns:
            The store of the buffer, created at the first call.  # [N, ...]
        """
        name = f"optimizer/{owner}/{buffer}"
        if name in self.rows.all:  # the states of clients that exist so far, by name
            return self.rows.all[name]
        row = torch.zeros(1, length, device=self.device)  # for the shape and device of the initial buffer
        # the last argument: how many parameters (tensors) a row has, for a buffer with a number for each of them
        initial = self.optimizer.new(buffer, row, len(self.model.parameter_spans(length)))
        return self.rows(name, initial[0])
