"""Fine-tuning at evaluation, for any method: what a client would deploy is trained a little more, and thrown away.

FedAvg-FT is `algorithm=fedavg finetune.epochs=5`.  Nothing is sent and no state changes.  What is trained is what is
deployed: where a method has logits of its own (`predict`), the loss is of those, in evaluation mode, and of all that it
deploys the rows theta learn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

from fedbench.algorithms.base import Algorithm, Batch, Cohort, Federation, FlatModel, LocalTraining, Optimizer, Step
from fedbench.core.options import check_each
from fedbench.engine.full_batch import select_rows
from fedbench.engine.per_client import PerClient, per_client
from fedbench.nn.columns import require_group


class Wrapper(Algorithm):
    """A method around another one, `inner`: every hook that a subclass does not define is inner's.

    Hooks are the public functions of Algorithm; its class attributes (requires, reads, ...) are not forwarded.
    """

    inner: Algorithm

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, hook in vars(Algorithm).items():
            if callable(hook) and not name.startswith("_") and name not in vars(cls):
                setattr(cls, name, _forwarded(hook))


def _forwarded(hook: Callable[..., Any]) -> Callable[..., Any]:
    """inner's hook of this name."""

    @functools.wraps(hook)
    def call(self: Wrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, hook.__name__)(*args, **kwargs)

    return call


class FineTuned(Wrapper):
    """inner, with epochs of plain local training (fresh optimizer; lr: one, a list of one for each client, or None: the
    optimizer's) on the column group `part` ("all": every trained column), at every evaluation or (when="end") only
    after the last round."""

    def __init__(self, inner: Algorithm, epochs: int, lr: float | Sequence[float] | None, when: str, part: str):
        self.inner, self.epochs, self.lr, self.when, self.part = inner, epochs, per_client(lr), when, part
        self.leaks = inner.leaks
        self.tuned_at_end = inner.tuned_at_end or when == "end"

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """inner's, and finetune.*."""
        self.inner.check(federation, model, optimizer)
        self.check_settings(federation.num_clients, model.columns, optimizer)

    def check_settings(self, num_clients: int | None, groups: Collection[str], optimizer: Optimizer) -> None:
        """inner's, and as many rates as clients, columns that the model has."""
        self.inner.check_settings(num_clients, groups, optimizer)
        if isinstance(self.lr, PerClient) and num_clients is not None:
            check_each("finetune.lr", list(self.lr.values), num_clients)
        if self.part != "all":
            require_group(self.part, "finetune.part", groups)

    def personalized(self, cohort: Cohort, final: bool) -> Any:
        """What inner deploys, its rows theta fine-tuned."""
        deployed = self.inner.personalized(cohort, final)
        if self.when == "end" and not final:
            return deployed
        is_dict = isinstance(deployed, dict)
        start = select_rows(deployed if is_dict else {"theta": deployed}, cohort.positions)  # each [K, ...]
        theta, beside = start["theta"], {name: value for name, value in start.items() if name != "theta"}

        def deployed_loss(s: Step, theta: Tensor, batch: Batch) -> Tensor:
            rows = {"theta": theta, **vars(s.state)} if is_dict else theta
            return s.task_loss(self.inner.predict(s.model, rows, batch.x), batch)

        tuned = cohort.train(
            theta,
            loss=None if type(self.inner).predict is Algorithm.predict else deployed_loss,
            columns=None if self.part == "all" else cohort.model.columns[self.part],
            how=LocalTraining(
                epochs=self.epochs, lr=cohort.value(self.lr), key="finetune", optimizer=cohort.engine.optimizer.fresh()
            ),
            **beside,
        ).theta
        return {**deployed, "theta": tuned} if is_dict else tuned
