"""Which hidden unit of one network is which of another's: Singh and Jaggi, NeurIPS 2020 (OTFusion), for bottlenecks.

With as many units of weight 1/m on either side optimal transport is an assignment: T = P / m for a permutation P, which
SciPy finds faster than POT's general solver (the tests compare them).  A bottleneck is one hidden layer between axes
that the frozen network fixes, so that every site is solved by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedbench.nn.columns import Columns
from fedbench.nn.flat import FlatModel
from fedbench.nn.units import HasUnits, Units

STAY = 1e-7  # of the largest cost, added where a unit moves: equal costs leave everything where it is


@dataclass(frozen=True)
class Site:
    """The units of the model's layer `name`, and the columns of its bottleneck in a row."""

    name: str
    units: Units
    columns: Columns

    @property
    def prefix(self) -> str:
        """Before its parameters' names."""
        return f"{self.name}." if self.name else ""


def sites_of(model: FlatModel, within: Columns) -> list[Site]:
    """Every place of the model with hidden units all of whose parameters are among these columns of a row."""
    sites = []
    for name, module in model.module.named_modules():
        units = module.units() if isinstance(module, HasUnits) else None
        if units is None:
            continue
        names = [f"{name}.{member}" if name else member for member in units.members]
        if all(n in model.spans for n in names):
            columns = Columns([model.spans[n] for n in names])
            if (columns & within).size == columns.size:
                sites.append(Site(name, units, columns))
    return sites


# -- one site --------------------------------------------------------------------------------------------
def costs(mover: Tensor, anchor: Tensor) -> Tensor:
    """Distance of what describes each unit, mover and anchor [..., m, d].  # [..., m, m] float64, on the host"""
    a, b = mover.double().cpu(), anchor.double().cpu()
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")  # whose distance of equal rows is 0


def assign(cost: np.ndarray) -> np.ndarray:
    """Which unit i of the mover takes the anchor's place j: order[j] = i, of the least sum of cost [i, j].  # [m]"""
    m, largest = len(cost), float(np.abs(cost).max(initial=0))
    if not largest:
        return np.arange(m)
    cost = cost + STAY * largest * (1 - np.eye(m))
    units, places = linear_sum_assignment(cost)
    order = np.empty(m, np.int64)
    order[places] = units
    return order


# -- rows ------------------------------------------------------------------------------------------------
def incoming(model: FlatModel, rows: Tensor, site: Site) -> Tensor:
    """The weights that lead to each unit of rows [K, P].  # [K, m, d]"""
    return site.units.incoming(model.named(rows), site.prefix)


def renumber(model: FlatModel, rows: Tensor, site: Site, orders: Tensor) -> None:
    """Put unit orders[k, j] of each row in place j, in rows [K, P] themselves.  orders [K, m] int64."""
    named = model.named(rows)
    for part, (shape, axis) in site.units.parts.items():
        seen = named[site.prefix + part].view(len(rows), *shape)
        ones = [1] * len(shape)
        ones[axis] = site.units.size
        index = orders.to(rows.device).view(len(rows), *ones).expand_as(seen)
        seen.copy_(seen.gather(axis + 1, index))


@dataclass(frozen=True)
class Alignment:
    """rows [K, P] with their units renumbered; of each row and site the share of units that moved, and the mean cost of
    a unit before and after.  # [K, S] each"""

    rows: Tensor
    moved: Tensor
    before: Tensor
    after: Tensor


def align(model: FlatModel, rows: Tensor, sites: list[Site], cost: list[Tensor]) -> Alignment:
    """Rows [K, P] (copied), renumbered at every site by its cost [K, m, m] of unit i of the row in place j."""
    rows = rows.clone()
    shape = (len(rows), len(sites))
    moved, before, after = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
    for s, (site, of_site) in enumerate(zip(sites, cost, strict=True)):
        table = of_site.numpy()
        orders = np.stack([assign(c) for c in table])  # [K, m]
        place = np.arange(site.units.size)
        moved[:, s] = torch.from_numpy((orders != place).mean(1))
        before[:, s] = torch.from_numpy(table[:, place, place].mean(1))
        after[:, s] = torch.from_numpy(np.take_along_axis(table, orders[:, None], 1)[:, 0].mean(1))
        renumber(model, rows, site, torch.from_numpy(orders))
    return Alignment(rows, moved, before, after)
