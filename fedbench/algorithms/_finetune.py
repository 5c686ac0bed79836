"""Fine-tuning at evaluation, for any method: what a client would deploy is trained a little more, and thrown away.

FedAvg-FT is `algorithm=fedavg finetune.epochs=5`.  Nothing is sent and no state changes.  What is trained is what is
deployed: where a method has logits of its own (`predict`), the loss is of those, in evaluation mode, and of all that it
deploys the rows theta learn.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from fedbench.algorithms.base import Algorithm
from fedbench.core.options import check_rates
from fedbench.engine.cohort import Cohort, cut
from fedbench.engine.federation import Federation, Inputs
from fedbench.engine.local import Batch, Step
from fedbench.engine.optim import Optimizer
from fedbench.engine.per_client import PerClient, own, per_client
from fedbench.engine.rows import RowStore
from fedbench.nn.flat import FlatModel, require_group


class FineTuned(Algorithm):
    """inner, with epochs of plain local training (fresh optimizer; lr: one, a list of one for each client, or None: the
    optimizer's) on the column group `part` ("all": every trained column), at every evaluation or (when="end") only
    after the last round."""

    def __init__(self, inner: Algorithm, epochs: int, lr: float | Sequence[float] | None, when: str, part: str):
        self.inner, self.epochs, self.lr, self.when, self.part = inner, epochs, per_client(lr), when, part
        self.leaks = inner.leaks

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        self.inner.check(federation, model, optimizer)
        self.check_settings(federation.num_clients, model.columns, optimizer)

    def check_settings(self, num_clients: int | None, groups: Collection[str], optimizer: Optimizer) -> None:
        self.inner.check_settings(num_clients, groups, optimizer)
        if isinstance(self.lr, PerClient) and num_clients is not None:
            check_rates("finetune.lr", list(self.lr.values), num_clients)
        if self.part != "all":
            require_group(self.part, "finetune.part", groups)

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        self.inner.setup(federation, model, rows)

    def round(self, cohort: Cohort) -> None:
        self.inner.round(cohort)

    def personalized(self, cohort: Cohort, final: bool) -> Any:
        rows = self.inner.personalized(cohort, final)
        if self.when == "end" and not final:
            return rows
        columns = None if self.part == "all" else cohort.model.columns[self.part]
        bag = cut(rows if isinstance(rows, dict) else {"theta": rows}, cohort.positions)             # each [K, ...]
        start, beside = bag["theta"], {name: value for name, value in bag.items() if name != "theta"}

        def deployed_loss(s: Step, theta: Tensor, batch: Batch) -> Tensor:
            held = {name: getattr(s, name) for name in beside}
            logits = self.inner.predict(s.model, {"theta": theta, **held} if isinstance(rows, dict) else theta, batch.x)
            return s.task_loss(logits, batch)

        loss = None if type(self.inner).predict is Algorithm.predict else deployed_loss
        tuned = cohort.train(start, loss=loss, epochs=self.epochs, lr=own(self.lr, cohort), columns=columns,
                             key="finetune", optimizer=cohort.engine.optimizer.fresh(), **beside).theta
        return {**rows, "theta": tuned} if isinstance(rows, dict) else tuned

    def predict(self, model: FlatModel, rows: Any, inputs: Inputs) -> Tensor:
        return self.inner.predict(model, rows, inputs)

    def global_row(self) -> Tensor | None:
        return self.inner.global_row()

    def newcomer_row(self, cohorts: Sequence[Cohort]) -> Tensor:
        return self.inner.newcomer_row(cohorts)

    def matrices(self) -> dict[str, Tensor]:
        return self.inner.matrices()

    def measured(self, cohort: Cohort) -> dict[str, Tensor]:
        return self.inner.measured(cohort)

    def state_dict(self) -> dict[str, Tensor]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.inner.load_state_dict(state)
