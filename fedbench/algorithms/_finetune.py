"""Fine-tuning of the deployed models at evaluation, for any method.

FedAvg-FT is `algorithm=fedavg finetune.epochs=5`.  The fine-tuned models are evaluated and discarded: nothing is
communicated and no state changes.  If a method defines its own `predict`, the loss uses its logits, in evaluation mode,
and only the rows "theta" of the deployed dict are trained.
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
    """Base class of methods that wrap another method, `inner`.

    Public methods of Algorithm that a subclass does not define are forwarded to inner.  Class attributes (requires,
    reads, ...) are not.
    """

    inner: Algorithm

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, method in vars(Algorithm).items():
            if callable(method) and not name.startswith("_") and name not in vars(cls):
                setattr(cls, name, _forwarded(method))


def _forwarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method for `Wrapper` that calls the method of the same name of `self.inner`.

    Args:
        method: A method of `Algorithm`, of which only name and docstring are used.

    Returns:
        The new method.  It passes its arguments on, and returns the result.
    """

    @functools.wraps(method)
    def call(self: Wrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, method.__name__)(*args, **kwargs)

    return call


class FineTuned(Wrapper):
    """Wrapper that fine-tunes the models that another method, `inner`, deploys: the parameters `part`, at rate `lr`.

    Args:
        inner: The method.
        epochs: Epochs of fine-tuning.
        lr: Learning rate, or one per client; None uses optimizer.lr.
        when: Value of finetune.when: "end" fine-tunes after the last round only, any other value at every evaluation.
        part: Column group to train, a named set of parameters such as "head", or "all" trained columns.
    """

    def __init__(self, inner: Algorithm, epochs: int, lr: float | Sequence[float] | None, when: str, part: str):
        self.inner, self.epochs, self.lr, self.when, self.part = inner, epochs, per_client(lr), when, part
        self.bypasses_upload, self.reads_all_samples = inner.bypasses_upload, inner.reads_all_samples
        self.fine_tunes_after_training = inner.fine_tunes_after_training or when == "end"

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError if the wrapped method or fine-tuning cannot run with these clients, model and optimizer."""
        self.inner.check(federation, model, optimizer)
        self.check_settings(federation.num_clients, model.columns, optimizer)

    def check_settings(self, num_clients: int | None, groups: Collection[str], optimizer: Optimizer) -> None:
        """Raise ConfigError unless the wrapped method's options, finetune.lr and finetune.part are valid.

        Args:
            num_clients: Number of training clients; None if only the data set determines it.
            groups: Names of the model's sets of parameters (columns of a row), such as "head".
            optimizer: The local optimizer.
        """
        self.inner.check_settings(num_clients, groups, optimizer)
        if isinstance(self.lr, PerClient) and num_clients is not None:
            check_each("finetune.lr", list(self.lr.values), num_clients)
        if self.part != "all":
            require_group(self.part, "finetune.part", groups)

    def personalized(self, cohort: Cohort, final: bool) -> Any:
        """Return the inner method's deployed models, fine-tuned; with when="end" and before the end, unchanged.

        Args:
            cohort: The clients to evaluate.
            final: Whether the last round is over.

        Returns:
            What inner's `personalized` returns: rows, or a dict whose rows "theta" alone are fine-tuned.
        """
        deployed = self.inner.personalized(cohort, final)
        if self.when == "end" and not final:
            return deployed
        is_dict = isinstance(deployed, dict)
        # one model for each client, even if all share it; cohort.positions: for each client, its row in `deployed`
        start = select_rows(deployed if is_dict else {"theta": deployed}, cohort.positions)  # each [K, ...]
        theta, others = start["theta"], {name: value for name, value in start.items() if name != "theta"}

        def deployed_loss(s: Step, theta: Tensor, batch: Batch) -> Tensor:  # of inner's own logits  [k, B]
            rows = {"theta": theta, **vars(s.state)} if is_dict else theta  # s.state has the tensors `others`
            return s.task_loss(self.inner.predict(s.model, rows, batch.x), batch)

        tuned = cohort.train(
            theta,
            # None, the task's loss, if the inner method predicts by its model alone
            loss=None if type(self.inner).predict is Algorithm.predict else deployed_loss,
            columns=None if self.part == "all" else cohort.model.columns[self.part],
            # key: of the random batches; fresh: without optimizer state from the training
            how=LocalTraining(
                epochs=self.epochs, lr=cohort.value(self.lr), key="finetune", optimizer=cohort.engine.optimizer.fresh()
            ),
            **others,
        ).theta
        return {**deployed, "theta": tuned} if is_dict else tuned
