"""Recorded gradients: replays read fixed places, and give the rows of the direct computation.

Without CUDA, a recording operation by operation stands for a graph: like one it knows only the tensors that it was
recorded with, and repeats whatever Python did then.
"""

import numpy as np
import pytest
import torch
from modules import MODELS, make, work
from tiny import SIZES, all_clients, close, engine, play, ragged, seeded
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fedbench.algorithms.apfl import APFL
from fedbench.algorithms.ditto import Ditto
from fedbench.algorithms.per_fedavg import PerFedAvg
from fedbench.algorithms.pfedme import PFedMe
from fedbench.algorithms.pgfed import PGFed
from fedbench.algorithms.pgfed_exact import PGFedExact
from fedbench.core.rows import RowStore
from fedbench.engine import cuda_graphs
from fedbench.engine.cuda_graphs import GraphedGradients
from fedbench.engine.engine import Engine
from fedbench.engine.executor import Executor, Plan
from fedbench.engine.federation import Federation
from fedbench.engine.gradients import DirectGradients
from fedbench.engine.optim import SGD
from fedbench.engine.training import LocalTraining
from fedbench.nn.flat import FlatModel


class Recording(TorchDispatchMode):
    """The operations of a work, to be done again on the tensors of then and on what they made."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        self.calls.append((operation, args, kwargs or {}, out))
        return out

    def replay(self):
        made = {}  # id of a tensor of then -> that of now

        def now(tensor):
            return made.get(id(tensor), tensor)

        for operation, args, kwargs, then in self.calls:
            out = operation(*tree_map(now, args), **tree_map(now, kwargs))
            made.update(zip(map(id, tree_leaves(then)), tree_leaves(out)))


def recorded(work):
    """work as a recording of its operations on the tensors of now."""
    with Recording() as recording:
        work()
    return recording.replay


def replaying(e: Engine, record=recorded) -> tuple[Engine, GraphedGradients]:
    graphs = e.executor.gradients = GraphedGradients(record)
    return e, graphs


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chunk", [0, pytest.param(2, marks=pytest.mark.slow), 1])
def test_replays_give_the_direct_rows(model: str, chunk: int) -> None:
    plan = Plan("any", chunk, 1, 1)
    e, graphs = replaying(make(model, plan))
    close(work(e), work(make(model, plan)), 5e-5)
    assert not graphs.disabled and graphs.replays, "nothing was recorded: the test compares nothing"


@pytest.mark.parametrize("method", [PGFed, Ditto, APFL, lambda: PerFedAvg(mode="hf"), PFedMe])
def test_methods_do_not_notice(method) -> None:
    """Several gradients a step, at rows that lie elsewhere, and states beside them."""
    rows = []
    for record in (None, recorded):
        e = make("chain", "vmap")
        if record:
            e, graphs = replaying(e)
        algorithm = method()
        play(e, algorithm, 3)
        rows.append(algorithm.personalized(all_clients(e, 3), True))
    found = [r["theta"] if isinstance(r, dict) else r for r in rows]
    close(found[1], found[0], 5e-5)
    assert not graphs.disabled and graphs.replays


def test_dropout_draws_anew_in_every_step() -> None:
    """Its seeds are part of what is asked, no number of the recording."""

    def build() -> Engine:
        arrays, split = ragged()
        module = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        return engine(arrays, split, module, SGD(lr=0.1, momentum=0.9, reset="never"), seed=3)

    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    e, graphs = replaying(build())
    close(work(e), work(plain), 5e-5)
    assert graphs.replays and not graphs.disabled


def test_a_batch_that_all_clients_share_is_not_written_out() -> None:
    """PGFed's exact objective passes over everybody's samples: they are one tensor, and stay one beside recordings."""
    rows = []
    for record in (False, True):
        e, graphs = make("chain", "vmap"), None
        if record:
            e, graphs = replaying(e)
        algorithm = PGFedExact(mu=0.1)
        play(e, algorithm, 2)
        rows.append(algorithm.theta[np.arange(6)])
        if graphs is not None:
            copied = {len(p) for p in graphs.static_buffers.values() if p.shape[1:2] == (sum(SIZES),)}
            assert graphs.replays and copied <= {1}  # of the client that trains longest, when it is alone
    close(rows[1], rows[0], 5e-5)


def test_a_step_copies_only_its_batch_where_rows_are_in_place() -> None:
    e, graphs = replaying(make("chain"))
    all_clients(e).train(e.model.init_row(), how=LocalTraining(steps=2))
    names = {key[0] for key in graphs.static_buffers}
    assert "chunk" in names and not any(name.startswith("rows") for name in names)


def test_finished_clients_fill_up_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few sizes of the active prefix are recorded, and those who have finished stand still."""
    monkeypatch.setattr(cuda_graphs, "NUM_SIZES", 2)
    e, graphs = replaying(make("chain"))
    close(work(e), work(make("chain")), 5e-5)
    assert {key.num_clients for key in graphs.replays} == {3, 6}


def test_a_larger_chunk_moves_everything() -> None:
    """What was recorded on places that were too small is forgotten."""
    e, graphs = replaying(make("chain"))
    plain = make("chain")
    for ids in ([0, 1], [0, 1, 2, 3, 4, 5], [2, 3]):
        found = [all_clients(x).subset(np.isin(np.arange(6), ids)).train(x.model.init_row()).theta for x in (e, plain)]
        close(*found)
    assert not graphs.disabled


def test_a_replay_that_differs_is_found_and_said(caplog) -> None:
    """A recording that goes wrong costs speed, never a result."""

    def broken(work):
        def replay():
            work()
            graphs.static_buffers[next(key for key in graphs.static_buffers if key[0] == "gradient 0")].mul_(1.5)

        return replay

    e, graphs = replaying(make("chain"), broken)
    close(work(e), work(make("chain")))
    assert graphs.disabled and "CUDA graphs are off for this run: a replay differs by 0.5" in caplog.text


def test_what_cannot_be_recorded_is_computed_directly(caplog) -> None:
    def refuse(work):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    e, graphs = replaying(make("no chain"), refuse)
    close(work(e), work(make("no chain")))
    assert graphs.disabled and "stream is capturing" in caplog.text and "more" not in caplog.text


def test_statistics_of_rows_that_are_no_home_come_back() -> None:
    """A step may differentiate another state: the buffers in it move, as they do without recordings."""

    def step(s, batch):
        s.state.other.sub_(0.1 * s.grad(batch, rows=s.state.other))

    found = []
    for e in (replaying(make("batch norm"))[0], make("batch norm")):
        found.append(all_clients(e).train(e.model.init_row(), step=step, other=e.model.init_row().repeat(6, 1)).other)
    close(*found, 5e-5)


def test_padded_batches_under_batch_norm_keep_their_first_gradient() -> None:
    """Clients are grouped by batch size there, and a second gradient of a step must not land on the first."""

    def step(s, batch):
        if not batch.full or s.k == 1:
            return
        first = s.grad(batch)
        kept = first.clone()
        fewer = batch.counts - (np.arange(s.k) == 0)
        second = s.grad(batch.between(np.zeros_like(fewer), fewer))
        assert torch.equal(first, kept) and not torch.equal(first, second)
        compared.append(len(graphs.replays))

    compared: list[int] = []
    e, graphs = replaying(make("batch norm"))
    all_clients(e).train(e.model.init_row(), step=step, how=LocalTraining(steps=12, batch_size=3))
    assert max(compared) >= 2 and not graphs.disabled


def test_memory_is_given_back_and_taken_again() -> None:
    e, graphs = replaying(make("chain"))
    plain = make("chain")
    for x in (e, plain):
        all_clients(x).train(x.model.init_row())
    e.executor.gradients.free_memory()
    assert not graphs.static_buffers and not graphs.replays
    close(work(e), work(plain), 5e-5)


def test_what_fills_a_bucket_up_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished client that has diverged says nothing about the recording."""
    monkeypatch.setattr(cuda_graphs, "NUM_SIZES", 1)
    e, graphs = replaying(make("chain"))
    placed = graphs.to_static_rows(torch.full((6, e.model.size), float("nan")))
    placed[:5] = e.model.init_row()
    graphs.count = 6

    def step(s, batch):
        s.descend(s.grad(batch))

    gradients_of = all_clients(e).subset(np.arange(6) < 5)
    graphs.to_static_rows = lambda rows: placed[: len(rows)].copy_(rows)  # type: ignore[method-assign]
    gradients_of.train(e.model.init_row(), step=step, how=LocalTraining(steps=2))
    assert graphs.replays and not graphs.disabled


def test_recording_leaves_running_statistics_alone() -> None:
    e, _ = replaying(make("batch norm"))
    plain = make("batch norm")
    a, b = (all_clients(x).train(x.model.init_row(), how=LocalTraining(steps=1)).theta for x in (e, plain))
    close(a[:, e.model.trained.size :], b[:, e.model.trained.size :], 1e-6)


def test_the_plan_says_which() -> None:
    assert type(Executor(Plan("vmap", 0, 1, 1), torch.device("cpu")).gradients) is DirectGradients
    recording = Plan("vmap", 0, 1, 1, graphs=True)
    assert type(Executor(recording, torch.device("cuda")).gradients) is GraphedGradients
    assert type(Executor(recording, torch.device("cpu")).gradients) is DirectGradients  # resumed where there is no GPU


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_cuda_graphs_give_the_direct_rows(model: str) -> None:
    arrays, split = ragged(shape=MODELS[model][1])

    def on_gpu(graphs: bool) -> Engine:
        device = torch.device("cuda")
        federation = Federation.build(arrays, split, device)
        return Engine(
            federation=federation,
            model=FlatModel(seeded(MODELS[model][0]), device=device),
            optimizer=SGD(lr=0.1, momentum=0.9, reset="never"),
            executor=Executor(Plan("vmap", 0, 1, 1, graphs), device),
            rows=RowStore(6, device, 1 << 30, 1 << 30),
            batch_size=5,
            rounds=4,
            eval_batch=8,
        )

    e = on_gpu(True)
    close(work(e), work(on_gpu(False)), 5e-4)
    assert not e.executor.gradients.disabled and e.executor.gradients.replays
