"""Alignment of the hidden units of two bottlenecks by optimal transport (OTFusion).

Singh and Jaggi, NeurIPS 2020.  With m units of weight 1/m in both networks, optimal transport is an assignment:
T = P / m for a permutation P, which SciPy finds faster than a general solver.  A bottleneck is one hidden layer between
layers that the frozen network fixes, so every bottleneck is aligned independently.

Letters: K clients, S bottlenecks, m units of a bottleneck, d values that describe a unit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedbench.nn.columns import Columns
from fedbench.nn.flat import FlatModel
from fedbench.nn.hidden_units import HasHiddenUnits, HiddenUnits

MOVE_COST = 1e-7  # added if a unit moves, relative to the largest cost, so units with equal costs stay


@dataclass(frozen=True)
class Bottleneck:
    """A bottleneck of the model.

    Attributes:
        name: Name of the layer.
        hidden_units: Its hidden units.
        columns: Columns of its parameters in a row.
    """

    name: str
    hidden_units: HiddenUnits
    columns: Columns

    @property
    def prefix(self) -> str:
        """Return the prefix of this layer's parameter names: "fc1." for a layer named "fc1", "" for the whole model."""
        return f"{self.name}." if self.name else ""


def bottlenecks_of(model: FlatModel, within: Columns) -> list[Bottleneck]:
    """Return the bottlenecks of the model whose trained parameters are all within some columns.

    A bottleneck is a layer, such as an adapter, that maps its input to a few hidden units and back.  The order of
    these units can be changed without changing the layer's output.

    Args:
        model: The model.  Its layers with a method `hidden_units` are searched.
        within: Columns of a row, such as all columns outside the head.

    Returns:
        The bottlenecks, in the order of the model's layers; empty if there are none.
    """
    bottlenecks = []
    for name, module in model.module.named_modules():
        hidden_units = module.hidden_units() if isinstance(module, HasHiddenUnits) else None
        if hidden_units is None:  # another layer, or a bottleneck whose units have a fixed order
            continue
        # names of the parameters in the model
        names = [f"{name}.{member}" if name else member for member in hidden_units.parameter_names]
        if all(n in model.spans for n in names):  # spans: columns (start, stop) of each trained parameter in a row
            columns = Columns([model.spans[n] for n in names])
            if (columns & within).size == columns.size:  # all of them are within
                bottlenecks.append(Bottleneck(name, hidden_units, columns))
    return bottlenecks


# -- one bottleneck --------------------------------------------------------------------------------------
def costs(mover: Tensor, anchor: Tensor) -> Tensor:
    """Return the Euclidean distances between the m units of two bottlenecks, each described by d numbers.

    Args:
        mover: Values that describe the units to be reordered.  # [..., m, d]
        anchor: Values that describe the units whose order they shall get.  # [..., m, d]

    Returns:
        Distance of unit i of mover and unit j of anchor, on the host.  # [..., m, m] float64
    """
    a, b = mover.double().cpu(), anchor.double().cpu()
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")  # exact: equal rows have distance 0


def assign(cost: np.ndarray) -> np.ndarray:
    """Return the order of the mover's units with minimal total cost.

    Args:
        cost: Cost of moving unit i to position j.  # [m, m]

    Returns:
        For each position j, the unit order[j] that comes there; the sum of cost[order[j], j] is minimal.  # [m] int64
    """
    m, largest = len(cost), float(np.abs(cost).max(initial=0))
    if not largest:  # all costs are 0: every unit stays
        return np.arange(m)
    # a unit off the diagonal moves, which costs a little more (MOVE_COST = 1e-7), so that units with equal costs stay
    cost = cost + MOVE_COST * largest * (1 - np.eye(m))
    mover_units, positions = linear_sum_assignment(cost)
    order = np.empty(m, np.int64)
    order[positions] = mover_units  # unit mover_units[n] comes to position positions[n]
    return order


# -- rows ------------------------------------------------------------------------------------------------
def incoming(model: FlatModel, rows: Tensor, bottleneck: Bottleneck) -> Tensor:
    """Return the weights that enter each hidden unit of a bottleneck.

    Args:
        model: The model.
        rows: K client models as rows.  # [K, P]
        bottleneck: The bottleneck with m hidden units.

    Returns:
        For each model and unit, its d incoming weights.  # [K, m, d]
    """
    # named: the parameters by name  [K, ...] each
    return bottleneck.hidden_units.incoming_weights(model.named(rows), bottleneck.prefix)


def renumber(model: FlatModel, rows: Tensor, bottleneck: Bottleneck, orders: Tensor) -> None:
    """Reorder the units of each row of rows [K, P] in place: unit orders[k, j] moves to position j.

    Args:
        model: The model.
        rows: K client models as rows, which are changed.  # [K, P]
        bottleneck: The bottleneck, which has m units.
        orders: Order of the units of each row.  # [K, m] int64
    """
    named = model.named(rows)  # views of rows
    # axes: from the name of a parameter to its shape, and to the axis of that shape along which the units are
    for parameter, (shape, axis) in bottleneck.hidden_units.axes.items():
        values = named[bottleneck.prefix + parameter].view(len(rows), *shape)  # a view of rows
        broadcast_shape = [1] * len(shape)  # 1 except along the axis of the units
        broadcast_shape[axis] = bottleneck.hidden_units.size
        index = orders.to(rows.device).view(len(rows), *broadcast_shape).expand_as(values)
        values.copy_(values.gather(axis + 1, index))  # + 1: the first axis is that of the K rows


@dataclass(frozen=True)
class Alignment:
    """Aligned rows, and statistics of the alignment.

    Attributes:
        rows: Rows with reordered units, [K, P].
        moved: Share of units that moved, [K, S].
        before: Mean cost of a unit before the alignment, [K, S].
        after: Mean cost of a unit after the alignment, [K, S].
    """

    rows: Tensor
    moved: Tensor
    before: Tensor
    after: Tensor


def align(model: FlatModel, rows: Tensor, bottlenecks: list[Bottleneck], cost: list[Tensor]) -> Alignment:
    """Reorder the units of every bottleneck, for each row, so that the total cost of their moves is minimal.

    Args:
        model: The model.
        rows: K client models as rows, which are not changed.  # [K, P]
        bottlenecks: The bottlenecks.
        cost: For each bottleneck, the cost of moving unit i to position j.  # [K, m, m] each

    Returns:
        The aligned rows, and statistics of each row and each of the S bottlenecks: share of units that moved, and
        mean cost of a unit before and after.  # [K, S] each
    """
    rows = rows.clone()
    shape = (len(rows), len(bottlenecks))
    moved, before, after = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
    for s, (bottleneck, costs_of_bottleneck) in enumerate(zip(bottlenecks, cost, strict=True)):
        table = costs_of_bottleneck.numpy()  # [K, m, m]
        orders = np.stack([assign(c) for c in table])  # [K, m]
        position = np.arange(bottleneck.hidden_units.size)
        moved[:, s] = torch.from_numpy((orders != position).mean(1))  # share of units that move
        before[:, s] = torch.from_numpy(table[:, position, position].mean(1))  # mean cost of units that all stay
        # mean cost of unit order[j] at position j
        after[:, s] = torch.from_numpy(np.take_along_axis(table, orders[:, None], 1)[:, 0].mean(1))
        renumber(model, rows, bottleneck, torch.from_numpy(orders))  # reorders the units in rows
    return Alignment(rows, moved, before, after)
