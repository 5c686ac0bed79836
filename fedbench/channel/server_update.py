"""The server's step from its old model and the clients' mean to its new model (option `server`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedbench.core.options import RunError
from fedbench.core.rows import Rows, RowStore
from fedbench.nn.flat import FlatModel
from fedbench.server.base import ServerRule, ServerStep

SERVER = np.zeros(1, np.int64)  # the only row of a server state


def server_step(
    rule: ServerRule, step: ServerStep, name: str, rows: RowStore, model: FlatModel, changes_state: bool
) -> Tensor:
    """Compute the server's new value of a tensor.

    The rule moves the trained parameters.  Running statistics of batch norm get their mean.
    The rule's state is in row stores named server/<name>/<state>.  # [1, p]

    Args:
        rule: The server rule.
        step: The old value, the uploads and their mean, with all n columns.
        name: Name by which the tensor was broadcast.
        rows: Creates the row stores.
        model: Defines which columns are running statistics.
        changes_state: Whether the rule's state is stored.

    Returns:
        The new value.  # [n]

    Raises:
        RunError: Running statistics may be anywhere in the tensor.
    """
    p = _num_parameters(model, name, len(step.w))  # the first p columns are parameters, the rest running statistics
    # one row store [1, p] for each state of the rule, such as "m"; SERVER is its only row
    stores = {key: _state(rows, f"server/{name}/{key}", initial, step.w[:p]) for key, initial in rule.states.items()}
    state = {key: store[SERVER][0] for key, store in stores.items()}  # [p] each
    # the step without running statistics
    uploads = step.uploads[:, :p] if isinstance(step.uploads, Tensor) else step.uploads  # sealed by privacy=central
    parameters = replace(step, w=step.w[:p], mean=step.mean[:p], uploads=uploads)
    new = rule.step(parameters, state)  # [p]
    if changes_state:
        for key, store in stores.items():
            store[SERVER] = state[key][None]
    return torch.cat([new, step.mean[p:]])  # running statistics get their mean


def _num_parameters(model: FlatModel, name: str, size: int) -> int:
    """Return the number of parameters in a tensor of the server.  Running statistics come after them.

    Args:
        model: Defines which columns are running statistics.
        name: Name by which the tensor was broadcast, for the message.
        size: Length of the tensor.

    Raises:
        RunError: Running statistics may be anywhere in the tensor.
    """
    layout = model.message_layout(size)  # None: no row of the model and no column group has this size
    if layout is None and model.buffer_names:
        raise RunError(
            f"server: the method averages {name!r} with {size:,} values, neither a whole model nor a group of "
            "model.columns, so it may include BatchNorm's running statistics, which a server optimizer must not "
            "change. Use a model without them, for example with model.norm=group, or server=average"
        )
    return size if layout is None else layout.parameters


def _state(rows: RowStore, path: str, initial: float, like: Tensor) -> Rows:
    """Return the row store of a state of the rule.  The first time, create it.

    Args:
        rows: Creates the row stores.
        path: Name of the state.
        initial: Initial value of all its entries.
        like: The server's parameters, for shape, type and device.  # [p]

    Returns:
        The store.  # [1, p]
    """
    return rows.all[path] if path in rows.all else rows(path, torch.full_like(like, initial), count=1)
