"""Tensors that processes divide compute what whole tensors compute, and exchange no more than they need."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from cases import case, run_rounds
from tiny import CPU
from torch import Tensor

from fedbench.engine.divided_tensor import DividedTensor, divided
from fedbench.engine.ranks import Ranks
from fedbench.engine.sharded_rows import ShardedRows, ShardedRowStore
from fedbench.nn.columns import Columns
from fedbench.testing import _federation

IDS = np.array([1, 2, 4, 7, 8])  # clients 2, 4 and 8 belong to rank 0
COLUMNS = Columns([(0, 1), (2, 4)])


class ThreadRanks(Ranks):
    """One of two ranks that are threads of this process.  `log` lists its collective calls."""

    def __init__(self, rank: int, barrier: Barrier, slots: list[Any]):
        super().__init__(rank, 2)
        self.by_owner = True
        self.barrier, self.slots, self.log = barrier, slots, []

    def share(self, value: Any) -> list[Any]:
        self.slots[self.rank] = value
        self.barrier.wait(20)
        values = list(self.slots)
        self.barrier.wait(20)
        return values

    def synchronize(self, what: str, bits: int = 0, failure: str | None = None) -> int:
        if not self.is_distributed:
            return bits
        values = self.share((what, bits))
        assert values[0][0] == values[1][0]
        self.log.append(what)
        return values[0][1] | values[1][1]

    def gather(self, what: str, value: Any) -> list[Any]:
        return self.share(value) if self.is_distributed else [value]

    def exchange(
        self, positions_by_rank: list[np.ndarray], results: dict[str, Tensor], changed: Any = None
    ) -> set[str]:
        self.log.append({name: [*values.shape] for name, values in results.items()})
        given = self.share({name: values.clone() for name, values in results.items()})
        for positions, tensors in zip(positions_by_rank, given):
            for name, values in results.items():
                values[torch.from_numpy(positions)] = tensors[name][torch.from_numpy(positions)]
        return set(results)

    def sum(self, what: str, tensor: Tensor) -> Tensor:
        self.log.append([*tensor.shape])
        first, second = self.share(tensor)
        return first + second


def in_two_threads(work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """Return what work(ranks) returns on each of two ranks."""
    barrier, slots = Barrier(2), [None, None]

    def run(rank: int) -> Any:
        try:
            return work(ThreadRanks(rank, barrier, slots))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def written(x: Tensor, index: Any, values: Any) -> Tensor:
    x = x.clone()
    x[index] = values
    return x


def changed_view(x: Tensor, touch: Callable[[Tensor], Any]) -> Tensor:
    """Return x after an assignment through a view, before or after `touch` has needed all rows."""
    x = x.clone()
    view = x[:, 1:3]
    touch(x)
    view[:, 0] = 7
    view.mul_(2)
    return torch.cat([x, view], 1)


# x [5, 4], y [5, 4] divided or not, w [4] and weights [5] that all ranks have
DIVIDED: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "difference": lambda x, y, w, p: x - w,
    "from the left": lambda x, y, w, p: w - x,
    "numbers": lambda x, y, w, p: 2 * (1 - x) / 3 + x**2 - (-x).abs() + 1 / (x + 5),
    "two tensors": lambda x, y, w, p: x * y,
    "whole on the left": lambda x, y, w, p: p[:, None] * x,
    "comparison": lambda x, y, w, p: torch.where((x > 0) & (y < 1), x, 0),
    "columns": lambda x, y, w, p: x[:, 1:3],
    "last columns": lambda x, y, w, p: x[..., -1],
    "listed columns": lambda x, y, w, p: x[:, torch.tensor([3, 0])],
    "new axis": lambda x, y, w, p: x[:, None] * y[:, :, None],
    "take": lambda x, y, w, p: COLUMNS.take(x),
    "put": lambda x, y, w, p: COLUMNS.put(x, COLUMNS.take(y)),
    "put into one row": lambda x, y, w, p: COLUMNS.put(w, COLUMNS.take(y)),
    "put one row": lambda x, y, w, p: COLUMNS.put(x, COLUMNS.take(w)),
    "cat": lambda x, y, w, p: torch.cat([x, y, p[:, None]], dim=-1),
    "stack": lambda x, y, w, p: torch.stack([x, y], dim=1),
    "sum of a row": lambda x, y, w, p: x.sum(1) + y.square().sum(dim=-1) + x.norm(dim=1) + x.amax(1),
    "flag of a row": lambda x, y, w, p: (x > 0).any(1) | (y > 0).all(dim=1),
    "shapes": lambda x, y, w, p: x.view(5, 2, 2).flatten(1).unflatten(1, (2, 2)).reshape(5, -1).unsqueeze(-1),
    "expand": lambda x, y, w, p: x[:, None].expand(-1, 3, 4),
    "types": lambda x, y, w, p: x.double().to(y).clone().detach().contiguous(),
    "product": lambda x, y, w, p: x @ torch.ones(4, 2),
    "rows": lambda x, y, w, p: x[torch.tensor([3, 0])] + y[np.array([3, 0])],
    "flags as positions": lambda x, y, w, p: x[torch.tensor([True, False, True, True, False])],
    "assigned columns": lambda x, y, w, p: written(x, (slice(None), 1), y[:, 0]),
    "assigned rows": lambda x, y, w, p: written(x, torch.tensor([4, 1]), x[torch.tensor([4, 1])] + 1),
    "assigned row": lambda x, y, w, p: written(x, torch.tensor([4, 1]), w),
}
SUMMED: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "mean": lambda x, y, w, p: p @ x,
    "mean of numbers": lambda x, y, w, p: p @ x[:, 0],
    "two means": lambda x, y, w, p: torch.stack([p, 2 * p]) @ x,
    "weights of rows": lambda x, y, w, p: x[:, 0] @ y,
    "sum": lambda x, y, w, p: (x - w).sum(0),
}
EXCHANGED: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "products of rows": lambda x, y, w, p: x @ x.T,
    "many means": lambda x, y, w, p: torch.ones(4, 5) @ x,
    "median": lambda x, y, w, p: x.median(0).values,
    "one row": lambda x, y, w, p: x[2],
    "stack before the rows": lambda x, y, w, p: torch.stack([x, y], dim=-3),
    "sorted": lambda x, y, w, p: x.argsort(0),
    "other rows": lambda x, y, w, p: x[torch.tensor([1, 2, 3])] - y[torch.tensor([2, 3, 4])],
    "in place": lambda x, y, w, p: x.clone().add_(y),
    "whole tensor": lambda x, y, w, p: torch.zeros(5, 4).index_copy(0, torch.arange(5), x),
    "view before": lambda x, y, w, p: changed_view(x, lambda x: None),
    "view after": lambda x, y, w, p: changed_view(x, lambda x: x.median()),
    "maximum": lambda x, y, w, p: x.max(),
    "mean over rows": lambda x, y, w, p: x.mean(0),
}


def inputs(ranks: Ranks | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x [5, 4] and y [5, 4], divided if there are ranks, w [4] and weights p [5]."""
    x, y = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    if ranks is not None:
        mine = torch.from_numpy(np.flatnonzero(ranks.owner(IDS) == ranks.rank))
        x, y = (divided(values[mine], IDS, ranks) for values in (x, y))
    return x, y, torch.tensor([0.5, -1, 2, 0]), torch.arange(1.0, 6) / 15


@pytest.mark.parametrize("name", [*DIVIDED, *SUMMED, *EXCHANGED])
def test_operations_on_divided_tensors_equal_those_on_whole_ones(name: str) -> None:
    operation = (DIVIDED | SUMMED | EXCHANGED)[name]
    expected = operation(*inputs(None))

    def work(ranks: ThreadRanks) -> tuple[bool, list[Any], Tensor]:
        result = operation(*inputs(ranks))
        is_divided, log = isinstance(result, DividedTensor), list(ranks.log)
        assert result.shape == expected.shape and result.dtype == expected.dtype
        return is_divided, log, result.whole() if is_divided else result

    first, second = in_two_threads(work)
    assert first[:2] == second[:2]
    torch.testing.assert_close(first[2], second[2], rtol=0, atol=0)
    torch.testing.assert_close(first[2], expected, rtol=1e-6, atol=1e-6)
    is_divided, log, _ = first
    assert is_divided == (name in DIVIDED)
    assert log == ([] if name in DIVIDED else [[*expected.shape]] if name in SUMMED else log)
    assert name not in EXCHANGED or any(isinstance(call, dict) for call in log)


def test_the_rows_of_a_tensor_are_exchanged_once() -> None:
    def work(ranks: ThreadRanks) -> list[Any]:
        x = inputs(ranks)[0]
        columns = x[:, :2]
        assert float(x.max()) == float(x.max())
        assert float(columns.max()) <= float(x.max())  # a view of rows that are here
        return ranks.log

    assert in_two_threads(work)[0] == [{"rows [5, 4]": [5, 4]}]


def test_a_process_without_a_row_takes_part_in_the_same_exchanges() -> None:
    """Rank 1 has no rows, so that its copies are empty."""

    def work(ranks: ThreadRanks) -> list[Any]:
        x = torch.arange(6.0).view(2, 3) if ranks.is_first else torch.zeros(0, 3)
        x = divided(x, np.array([2, 4]), ranks)
        copies = [x[:, 1:].contiguous(), x[:, :2].reshape(2, -1), x[:, 2:].flatten(1), x.view(2, -1)]
        return [*(float(copy.max()) for copy in copies), float(torch.ones(2) @ x[:, 0])]

    assert in_two_threads(work) == [[5, 4, 5, 5, 3]] * 2


def test_flags_and_comparisons_send_bits_instead_of_rows() -> None:
    def work(ranks: ThreadRanks) -> list[Any]:
        x, y, w, _ = inputs(ranks)
        found = [bool((x > -9).all()), bool((x > 9).any()), torch.equal(x, x + 0), torch.equal(x, y), torch.equal(x, w)]
        return [*found, *ranks.log]

    two = "comparison of rows"
    assert in_two_threads(work)[1] == [True, False, True, False, False, "flag", "flag", two, two]


def test_a_step_can_use_the_rows_of_its_own_clients_only() -> None:
    def work(ranks: ThreadRanks) -> str:
        x = inputs(ranks)[0]
        mine = torch.from_numpy(np.flatnonzero(ranks.owner(IDS) == ranks.rank))
        with ranks.undistributed():
            assert type(x[mine]) is Tensor and len(x[mine]) == len(mine)
            with pytest.raises(RuntimeError) as error:
                x[torch.arange(5)]
            with pytest.raises(RuntimeError):
                x.max()
        return str(error.value)

    assert in_two_threads(work)[0].startswith(
        "this process does not have all rows of a tensor [5, 4], because hardware."
    )


def test_rows_that_were_trained_here_are_stored_without_an_exchange() -> None:
    def work(ranks: ThreadRanks) -> list[Any]:
        rows = ShardedRows(ranks, "v", 9, torch.zeros(4), CPU, "device", 9)
        x = inputs(ranks)[0]
        rows[IDS] = x
        rows[IDS[:2]] = x[torch.tensor([0, 1])] + 1
        assert not ranks.log and isinstance(rows[IDS], DividedTensor)
        return [rows[IDS].whole(), type(rows[np.array([0, 3])])]

    expected = inputs(None)[0]
    expected[:2] += 1
    found, kind = in_two_threads(work)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert kind is Tensor  # rows that no client has written


def sharded_store(ranks: Ranks, num_clients: int, device: torch.device, **limits: int) -> ShardedRowStore:
    """Return a store of divided rows with the limits of memory that `RowStore` gets."""
    return ShardedRowStore(ranks, num_clients, device, *limits.values(), most=num_clients)


@pytest.mark.parametrize(
    ("method", "trainings", "averaged"), [("fedavg", 1, 163), ("fedper", 1, 136), ("ditto", 2, 163)]
)
def test_a_mean_is_one_sum_and_no_row_of_a_client_is_sent(
    method: str, trainings: int, averaged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round sends losses, flags and one sum; `averaged` is the number of averaged columns."""
    sims = {}

    def work(ranks: ThreadRanks) -> list[Any]:
        sim = sims[ranks.rank]
        sim.engine.executor.ranks = sim.engine.rows.ranks = ranks
        for rows in sim.engine.rows.all.values():
            rows.ranks = ranks
        run_rounds(sim, 2, evaluated=False)
        return ranks.log

    for rank in range(2):
        monkeypatch.setattr(_federation, "RowStore", partial(sharded_store, Ranks(rank, 2)))
        sims[rank] = case(method).simulation("loop")
    round_log = [{"loss": [4]}, "flag"] * trainings + [[averaged]]
    assert in_two_threads(work) == [2 * round_log] * 2
