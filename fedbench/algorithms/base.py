"""Base class of federated learning methods, and the types that a method needs.

A row is the flat vector of all parameters and buffers of one model.
Letters of shapes: N clients, K clients of a cohort, k clients of one step, P entries of a row, B samples of a batch,
C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fedbench.core.options import require
from fedbench.core.renamed import refuse_old_names
from fedbench.core.rows import Rows, RowStore
from fedbench.engine.batch import Batch
from fedbench.engine.cohort import Cohort
from fedbench.engine.divided_tensor import DividedTensor
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

LocalStep = Callable[[Step, Batch], None]  # a custom local step: cohort.train(..., step=...)

OLD_NAMES = {
    "alone": "exclusive_columns",
    "leaks": "bypasses_upload",
    "numbered": "depends_on_client_order",
    "waits": "syncs_with_device",
    "tuned_at_end": "fine_tunes_after_training",
    "newcomer_row": "initial_row_for_new_clients",
    "newcomer_rows": "initial_rows_for_new_clients",
}


class Algorithm:
    """Base class of methods.  A row [P] is a model's parameters and buffers as one vector; a cohort is K clients.

    A method implements `setup`, `round` and `personalized`.  A method with a server model also implements `global_row`.
    Its state is the tensors on self, and the row stores made in `setup`.

    Attributes:
        requires: Column groups of the model that the method needs.
        exclusive_columns: Whether only the required column groups may be trained.
        has_base: Whether the method separates the head from the base (all other columns).  The model must then have
            trained parameters in its base.
        reads: Outputs of a model's frozen encoder that are computed only on request, such as "tokens".
        bypasses_upload: Reason why client data reach others without `cohort.upload`, or None.  Privacy refuses such a
            method.
        reads_all_samples: Reason why the work of a client reads samples of other clients, or None.  Such a method
            is refused if processes divide the samples.
        depends_on_client_order: Reason why results depend on the order of clients, or None.
        fine_tunes_after_training: Whether `personalized` fine-tunes or merges models after the last round only.  The
            last value is then reported separately.
        supports_client_ranks: Whether clients may have products of different ranks (adapter.rank as a list).  Local
            steps may then use received rows only in gradients, which have no columns above a client's rank.  Subclasses
            do not inherit it.
        averages_one_model: Whether a round replaces the server's model, which all clients receive, exactly once by
            `cohort.mean(..., updates=...)`.  Rules for LoRA (adapter.sync) need it.  Subclasses do not inherit it.
        syncs_with_device: Reason why a local step reads a value back from the device, or None.  On a GPU each read
            synchronizes.
    """

    requires: tuple[str, ...] = ()
    exclusive_columns: bool = False
    has_base: bool = False
    reads: tuple[str, ...] = ()
    fine_tunes_after_training: bool = False
    bypasses_upload: str | None = None
    reads_all_samples: str | None = None
    depends_on_client_order: str | None = None
    supports_client_ranks: bool = False
    averages_one_model: bool = False
    syncs_with_device: str | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_old_names(cls, OLD_NAMES)

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Check that the method can run on this federation, model and optimizer.

        Args:
            federation: The clients and their data.
            model: The model.
            optimizer: The local optimizer.

        Raises:
            ConfigError: The method cannot run.  The message names the option to change.
        """
        self.check_settings(federation.num_clients, model.columns, optimizer)
        # exclusive_columns: the method trains only the sets of parameters in `requires`; has_base: it trains
        # the head and the rest of the model, its base, in different ways
        require(
            not self.exclusive_columns or "adapter" not in model.columns,
            f"algorithm={self._name} trains only the model's {' and '.join(self.requires)}, and an adapter would add "
            "other trained parameters: set adapter=none",
        )
        require(
            not self.has_base or bool((model.without("head") & model.trained).size),
            f"algorithm={self._name} needs trained parameters outside the model's head, and there are none: choose a "
            "deeper model, train more of its layers (model.freeze), or use algorithm=local or fedavg",
        )

    @property
    def _name(self) -> str:
        """Return the method's name for messages: x for fedbench/algorithms/x.py, else the name of the user's class."""
        module = type(self).__module__
        return module.rpartition(".")[2] if module.startswith("fedbench.algorithms.") else type(self).__name__

    def check_settings(self, num_clients: int | None, groups: Collection[str], optimizer: Optimizer) -> None:
        """Check the options alone, before data and model are loaded.

        Args:
            num_clients: Number of training clients, or None if only the data set determines it.
            groups: Names of the model's sets of parameters (columns of a row), such as "head".
            optimizer: The local optimizer, unused here; methods that restrict it override this function.

        Raises:
            ConfigError: The options contradict each other, the model or the number of clients.
        """
        for group in self.requires:  # sets of parameters that the model must have, such as "head"
            require_group(group, f"algorithm={self._name}", groups)
        for option, value in vars(self).items():
            if isinstance(value, PerClient) and num_clients is not None:
                require(
                    len(value) == num_clients,
                    f"algorithm.{option} lists {len(value):,} values, and there are {num_clients:,} training clients: "
                    "give one value per client, or a single number for all",
                )

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Initialize the state of the server and of all clients.

        Args:
            federation: The clients and their data.
            model: The model, whose functions get all parameters and buffers as a row [P].
            rows: rows(name, default=...) returns a lazy [N, ...] store with one row for each client.
        """
        raise NotImplementedError

    def round(self, cohort: Cohort) -> None:
        """Run one communication round with the sampled clients (`cohort`): they train and upload, the server updates.

        The default raises NotImplementedError.
        """
        raise NotImplementedError

    def personalized(self, cohort: Cohort, final: bool) -> Any:
        """Return the models that the cohort's clients would deploy.

        The method may train here, for example to fine-tune.  Its state must not change.

        Args:
            cohort: Clients to evaluate.  They need not have been sampled in the last round.
            final: Whether the last round is over.  Methods that fine-tune after training do so only then.

        Returns:
            Rows [K, P], or one row [P] for all clients.  A method with its own `predict` may return a dict of tensors
            [K, ...].
        """
        raise NotImplementedError

    def predict(self, model: FlatModel, rows: Any, inputs: Inputs) -> Tensor:
        """Return the logits of deployed models.

        Args:
            model: The model.
            rows: The models that k clients deploy: rows [k, P], one row [P], or a dict of tensors [k, ...].
            inputs: Inputs of b samples of each client.  # [k, b, ...]

        Returns:
            Logits.  # [k, b, C]
        """
        return model.predict(rows, inputs)

    def global_row(self) -> Tensor | None:
        """Return the server's current model as a flat parameter vector [P], or None if there is no server model."""
        return None

    def initial_row_for_new_clients(self, cohorts: Sequence[Cohort]) -> Tensor:
        """Return the one initial model that all new clients get.

        If the method has a server model (`global_row`), this is the initial model.  If not, all training clients upload
        their deployed models, and the mean of these, by client weights, is the initial model.

        Args:
            cohorts: All training clients, split into cohorts.

        Returns:
            One row for all new clients.  # [P]
        """
        row = self.global_row()
        if row is not None:
            return row
        total = sum(float(c.client_weights.sum()) for c in cohorts)  # weight of all training clients
        weighted_sums = []  # of each cohort's models, [P] each
        for c in cohorts:
            # previous: the difference from the initial model is sent, because the server has no other version
            up = c.upload(newcomer=self._deployed_rows(c), previous={"newcomer": c.model.init_row()})
            weights = torch.from_numpy(c.client_weights).float().to(c.device) / total  # sum to 1 over all cohorts
            weighted_sums.append(c.mean(up.newcomer, weights=weights))
        return torch.stack(weighted_sums).sum(0)

    def initial_rows_for_new_clients(self, new_clients: Cohort, cohorts: Sequence[Cohort]) -> Tensor:
        """Return the initial model of each new client.

        By default all get that of `initial_row_for_new_clients`, and `new_clients` is unused.

        Args:
            new_clients: M clients that took no part in training.  Whatever the server learns of them they must upload.
            cohorts: All training clients, split into cohorts.

        Returns:
            Rows [M, P], or one row [P] for all.
        """
        return self.initial_row_for_new_clients(cohorts)

    def _deployed_rows(self, cohort: Cohort) -> Tensor:
        """Return the models that the clients deploy after the last round, as rows.

        Args:
            cohort: The clients.

        Returns:
            The rows that `personalized` returned, or their entry "theta" if it is a dict; one row for all is repeated.
            # [K, P]
        """
        deployed = self.personalized(cohort, final=True)
        rows = deployed["theta"] if isinstance(deployed, dict) else deployed
        return rows.expand(len(cohort), -1)

    def matrices(self) -> dict[str, Tensor]:
        """Return small tensors by name, which the run records over the rounds (matrices.npz).

        Returns:
            Tensors whose shapes do not change, with at most N x N entries, such as the weights between clients.
        """
        return {}

    def measured(self, cohort: Cohort) -> dict[str, Tensor]:
        """Return measurements of the cohort's clients for plots, after the last round.  The default has none.

        Returns:
            A dict from name to a tensor with one entry per client.  # [K, ...] each
        """
        return {}

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the attribute `name` to `value`, a part of the server's state.

        Of a tensor whose rows are divided over processes, every process first gets all rows.
        """
        super().__setattr__(name, value.whole() if isinstance(value, DividedTensor) else value)

    def state_dict(self) -> dict[str, Tensor]:
        """Return all attributes that are tensors, by attribute name.  Tensors made by `rows` are saved separately."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the attributes from the dict that `state_dict` returned.

        Args:
            state: Tensors by attribute name.  Each moves to the device of the attribute that it replaces.
        """
        for name, value in state.items():
            current = getattr(self, name, None)
            setattr(self, name, value.to(current.device) if isinstance(current, Tensor) else value)
