"""Alignment of hidden units: reordering, costs, and minimal assignments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bottlenecks import ADAPTERS, bottlenecks_of, model_of, spread
from tiny import close, equal
from torch import Tensor

from fedbench.algorithms import _alignment as alignment


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_renumbering_changes_no_output(adapter: str) -> None:
    model = model_of(adapter)
    rows, bottlenecks = spread(model, 3), bottlenecks_of(model)
    assert len(bottlenecks) == {"houlsby": 4, "pfeiffer": 2, "parallel": 2, "compacter": 4}[adapter]
    x = torch.randn(3, 4, 1, 4, 4)
    before, moved = model.forward(rows, x), rows.clone()
    rng = np.random.default_rng(0)
    for bottleneck in bottlenecks:
        orders = np.stack([rng.permutation(bottleneck.hidden_units.size) for _ in range(3)])
        alignment.renumber(model, moved, bottleneck, torch.from_numpy(orders))
    assert (moved != rows).any() and not torch.equal(moved, rows)
    close(model.forward(moved, x), before, 1e-5)
    other = rows.clone()  # the axis that other layers read is another matter
    name = next(n for n in model.spans if n.endswith(("adapter.up.weight", "adapter.up.t")))
    axis = 1 if name.endswith("weight") else 3
    model.named(other)[name].copy_(model.named(rows)[name].flip(axis))
    assert (model.forward(other, x) - before).abs().max() > 1e-3


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_permuted_twin_is_recovered_bit_for_bit(adapter: str) -> None:
    model = model_of(adapter)
    rows, bottlenecks = spread(model, 4), bottlenecks_of(model)
    twin, rng = rows.clone(), np.random.default_rng(1)
    for bottleneck in bottlenecks:
        orders = np.stack([rng.permutation(bottleneck.hidden_units.size) for _ in range(4)])
        alignment.renumber(model, twin, bottleneck, torch.from_numpy(orders))

    def cost(of: Tensor) -> list[Tensor]:
        return [alignment.costs(*(alignment.incoming(model, r, s) for r in (of, rows))) for s in bottlenecks]

    aligned = alignment.align(model, twin, bottlenecks, cost(twin))
    equal(aligned.rows, rows)
    assert not aligned.after.any() and (aligned.before > 0).any() and (aligned.moved > 0).any()
    noise = twin + 1e-3 * torch.randn(twin.shape, generator=torch.Generator().manual_seed(2))
    close(alignment.align(model, noise, bottlenecks, cost(noise)).rows, rows, 0.01)
    stays = alignment.align(model, rows, bottlenecks, cost(rows))
    equal(stays.rows, rows)
    assert not stays.moved.any()


def test_compacters_weights_are_the_written_out_sum() -> None:
    """What leads to a unit c are the columns (a, c) of H for all a."""
    model = model_of("compacter")
    row = spread(model, 2)
    for bottleneck in bottlenecks_of(model):
        model.module.load_state_dict(model.state_dict(row[1]), strict=False)
        H = model.module.get_submodule(f"{bottleneck.name}.adapter.down").weight()  # [in, 6]
        found = alignment.incoming(model, row, bottleneck)[1]  # [3, 2 in]
        assert found.shape == (3, 2 * len(H)) and bottleneck.hidden_units.num_blocks == 2
        for c in range(3):
            close(found[c].sort().values, torch.cat([H[:, c], H[:, 3 + c]]).sort().values, 1e-5)


def test_assignments_are_the_least_and_ties_stay() -> None:
    import ot

    rng = np.random.default_rng(0)
    for m in (1, 2, 7, 24):
        cost = rng.random((m, m))
        order = alignment.assign(cost)
        assert sorted(order) == list(range(m))
        uniform = np.full(m, 1 / m)
        plan = np.asarray(ot.emd(uniform, uniform, cost))  # [unit, place]
        assert cost[order, np.arange(m)].mean() == pytest.approx(float((plan * cost).sum()))
        assert order.tolist() == plan.argmax(0).tolist()
        assert alignment.assign(np.full((m, m), 3.0)).tolist() == list(range(m))
        assert alignment.assign(np.zeros((m, m))).tolist() == list(range(m))


def test_costs_are_distances() -> None:
    a, b = torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    assert alignment.costs(a, b).tolist() == [[5, 1], [0, pytest.approx(18**0.5)]]
