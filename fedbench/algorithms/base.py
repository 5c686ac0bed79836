"""What a method is: a setup, a round on a cohort, and what each client would deploy.

Methods import from here the types of what they are given: Cohort, Federation, FlatModel, RowStore, Step ...
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fedbench.core.options import require
from fedbench.core.rows import Rows, RowStore
from fedbench.engine.batch import Batch
from fedbench.engine.cohort import Cohort
from fedbench.engine.federation import Federation, Inputs
from fedbench.engine.optim import Optimizer
from fedbench.engine.per_client import PerClient
from fedbench.engine.step import Step
from fedbench.engine.training import LocalTraining
from fedbench.nn.columns import Columns, require_group
from fedbench.nn.flat import FlatModel

__all__ = [
    "Algorithm",
    "Batch",
    "Cohort",
    "Columns",
    "Federation",
    "FlatModel",
    "Inputs",
    "LocalStep",
    "LocalTraining",
    "Optimizer",
    "RowStore",
    "Rows",
    "Step",
]

LocalStep = Callable[[Step, Batch], None]  # what a client does with a batch: cohort.train(..., step=...)


class Algorithm:
    """Base class of methods.  State is plain tensors (and NumPy ids) on self, and Rows made in `setup`.

    Attributes:
        requires: Column groups of the model that the method needs.
        alone: Whether no other columns may be trained.
        has_base: Whether the method separates the head from a base, all other columns.  Some of the base must be
            trained.
        reads: Parts of a sample that a model's frozen encoder computes only on request, such as "tokens".
        leaks: How a client's data reach others without cohort.upload, in words.  Privacy then refuses the method.
        numbered: Why results depend on the order of clients, in words.
        tuned_at_end: Whether `personalized` returns other rows after the last round than before it, by fine-tuning or
            merging.  The last value is then reported apart.
        waits: Why a local step asks the device for a number, in words.  On a GPU each request waits for its queue.
    """

    requires: tuple[str, ...] = ()
    alone: bool = False
    has_base: bool = False
    reads: tuple[str, ...] = ()
    tuned_at_end: bool = False
    leaks: str | None = None
    numbered: str | None = None
    waits: str | None = None

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Refuse, in one sentence, what the method cannot run on."""
        self.check_settings(federation.num_clients, model.columns, optimizer)
        require(
            not self.alone or "adapter" not in model.columns,
            f"the method computes with the model's {' and '.join(self.requires)} alone, and here more learns: use "
            "adapter=none",
        )
        require(
            not self.has_base or bool((model.without("head") & model.trained).size),
            f"algorithm={self._name}: nothing of the model learns but its head, and the method needs a base beside it: "
            "choose a model with further layers, let them learn (model.freeze), or use algorithm=local or fedavg",
        )

    @property
    def _name(self) -> str:
        """Return the name after algorithm= (x for fedbench/algorithms/x.py), or the class of a user's method."""
        module = type(self).__module__
        return module.rpartition(".")[2] if module.startswith("fedbench.algorithms.") else type(self).__name__

    def check_settings(self, num_clients: int | None, groups: Collection[str], optimizer: Optimizer) -> None:
        """The part of `check` for which neither data nor a module are needed: it comes before they are loaded.

        num_clients: None where only the data say.  groups: the names of the model's column groups.
        """
        for group in self.requires:
            require_group(group, f"algorithm={self._name}", groups)
        for option, value in vars(self).items():
            if isinstance(value, PerClient) and num_clients is not None:
                require(
                    len(value) == num_clients,
                    f"algorithm.{option} lists {len(value):,} numbers, and there are "
                    f"{num_clients:,} clients to train: one each, or a single number for all",
                )

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Make the state; rows(name, default) gives a lazy [N, ...] store."""
        raise NotImplementedError

    def round(self, cohort: Cohort) -> None:
        """One communication round with the sampled clients."""
        raise NotImplementedError

    def personalized(self, cohort: Cohort, final: bool) -> Any:
        """What each client of the cohort would deploy: rows [K, P] (or [P] if one for all), or a dict of such for
        `predict`.  May train.  final: after the last round."""
        raise NotImplementedError

    def predict(self, model: FlatModel, rows: Any, inputs: Inputs) -> Tensor:
        """Logits [k, b, C] of what `personalized` returned, on inputs [k, b, ...]."""
        return model.predict(rows, inputs)

    def global_row(self) -> Tensor | None:
        """The server's model [P], or None where the method has none."""
        return None

    def newcomer_row(self, cohorts: Sequence[Cohort]) -> Tensor:
        """The row [P] from which a client starts that took no part: the server's, or, where the method has none,
        the weighted mean of what the clients deploy, which they upload for it.  cohorts: all clients, a
        few at a time."""
        row = self.global_row()
        if row is not None:
            return row
        total = sum(float(c.client_weights.sum()) for c in cohorts)
        parts = []
        for c in cohorts:
            up = c.upload(newcomer=self._rows(c), replaces={"newcomer": c.model.init_row()})
            share = torch.from_numpy(c.client_weights).float().to(c.device) / total
            parts.append(c.mean(up.newcomer, weights=share))
        return torch.stack(parts).sum(0)

    def newcomer_rows(self, newcomers: Cohort, cohorts: Sequence[Cohort]) -> Tensor:
        """The rows [M, P] from which each of these clients starts, or one for all [P]: where the method knows no more
        of them, `newcomer_row`.  newcomers: clients that took no part; what they tell of themselves they upload."""
        return self.newcomer_row(cohorts)

    def _rows(self, cohort: Cohort) -> Tensor:
        """The rows of what the cohort deploys.  # [K, P]"""
        deployed = self.personalized(cohort, True)
        rows = deployed["theta"] if isinstance(deployed, dict) else deployed
        return rows.expand(len(cohort), -1)

    def matrices(self) -> dict[str, Tensor]:
        """Small tensors that figures show, by name, recorded over the rounds: matrices [N, N] (who learned to use
        whom), or no larger ones of another shape, which stays the same."""
        return {}

    def measured(self, cohort: Cohort) -> dict[str, Tensor]:
        """What figures show of each client of the cohort [K, ...], measured after the last round, by name."""
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor on self by name; Rows are saved by the simulator."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Set what `state_dict` gave, on the device of what stands there now."""
        for name, value in state.items():
            now = getattr(self, name, None)
            setattr(self, name, value.to(now.device) if isinstance(now, Tensor) else value)
