"""CUDA graphs of gradients: replays read static buffers, and give the rows of the direct computation.

On a CPU, a recorder of torch operations replaces CUDA graphs.
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
    """Records operations, to replay them on the same tensors and on their results."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        self.calls.append((operation, args, kwargs or {}, out))
        return out

    def replay(self):
        results = {}  # id of a recorded result -> result of the replay

        def current(tensor):
            return results.get(id(tensor), tensor)

        for operation, args, kwargs, recorded_out in self.calls:
            out = operation(*tree_map(current, args), **tree_map(current, kwargs))
            results.update(zip(map(id, tree_leaves(recorded_out)), tree_leaves(out)))


def recorded(work):
    """Record the operations of a function, and return their replay."""
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
def test_methods_have_the_same_results_with_graphs(method) -> None:
    """Steps of these methods have several gradients, at other rows than theta, and states."""
    rows = []
    for record in (None, recorded):
        e = make("linear", "vmap")
        if record:
            e, graphs = replaying(e)
        algorithm = method()
        play(e, algorithm, 3)
        rows.append(algorithm.personalized(all_clients(e, 3), True))
    found = [r["theta"] if isinstance(r, dict) else r for r in rows]
    close(found[1], found[0], 5e-5)
    assert not graphs.disabled and graphs.replays


def test_dropout_has_new_masks_in_every_step() -> None:
    """Its keys are an input of the graph."""

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


def test_a_shared_batch_is_not_copied_for_each_client() -> None:
    """PGFed's exact objective uses the samples of all clients, in one expanded tensor."""
    rows = []
    for record in (False, True):
        e, graphs = make("linear", "vmap"), None
        if record:
            e, graphs = replaying(e)
        algorithm = PGFedExact(mu=0.1)
        play(e, algorithm, 2)
        rows.append(algorithm.theta[np.arange(6)])
        if graphs is not None:
            copied = {len(p) for p in graphs.static_buffers.values() if p.shape[1:2] == (sum(SIZES),)}
            assert graphs.replays and copied <= {1}  # of the client that trains longest, when it is alone
    close(rows[1], rows[0], 5e-5)


def test_rows_in_a_static_buffer_are_not_copied() -> None:
    e, graphs = replaying(make("linear"))
    all_clients(e).train(e.model.init_row(), how=LocalTraining(steps=2))
    names = {key[0] for key in graphs.static_buffers}
    assert "chunk" in names and not any(name.startswith("rows") for name in names)


def test_finished_clients_are_computed_and_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are graphs for few numbers of clients."""
    monkeypatch.setattr(cuda_graphs, "NUM_SIZES", 2)
    e, graphs = replaying(make("linear"))
    close(work(e), work(make("linear")), 5e-5)
    assert {key.num_clients for key in graphs.replays} == {3, 6}


def test_a_larger_chunk_needs_new_graphs() -> None:
    """Graphs that use smaller static buffers are removed."""
    e, graphs = replaying(make("linear"))
    plain = make("linear")
    for ids in ([0, 1], [0, 1, 2, 3, 4, 5], [2, 3]):
        found = [all_clients(x).subset(np.isin(np.arange(6), ids)).train(x.model.init_row()).theta for x in (e, plain)]
        close(*found)
    assert not graphs.disabled


def test_a_wrong_replay_disables_graphs_with_a_warning(caplog) -> None:
    """The results are then computed directly."""

    def broken(work):
        def replay():
            work()
            graphs.static_buffers[next(key for key in graphs.static_buffers if key[0] == "gradient 0")].mul_(1.5)

        return replay

    e, graphs = replaying(make("linear"), broken)
    close(work(e), work(make("linear")))
    assert graphs.disabled and "CUDA graphs are off for this run: a replay differs by 0.5" in caplog.text


def test_operations_that_cannot_be_recorded_are_computed_directly(caplog) -> None:
    def refuse(work):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    e, graphs = replaying(make("layer norm"), refuse)
    close(work(e), work(make("layer norm")))
    assert graphs.disabled and "stream is capturing" in caplog.text and "more" not in caplog.text


def test_running_statistics_of_a_state_are_updated() -> None:
    """A step may compute gradients at a state instead of theta."""

    def step(s, batch):
        s.state.other.sub_(0.1 * s.grad(batch, rows=s.state.other))

    found = []
    for e in (replaying(make("batch norm"))[0], make("batch norm")):
        found.append(all_clients(e).train(e.model.init_row(), step=step, other=e.model.init_row().repeat(6, 1)).other)
    close(*found, 5e-5)


def test_padded_batches_under_batch_norm_keep_their_first_gradient() -> None:
    """Clients are grouped by batch size.  A second gradient of a step must not overwrite the first."""

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


def test_free_memory_removes_graphs() -> None:
    e, graphs = replaying(make("linear"))
    plain = make("linear")
    for x in (e, plain):
        all_clients(x).train(x.model.init_row())
    e.executor.gradients.free_memory()
    assert not graphs.static_buffers and not graphs.replays
    close(work(e), work(plain), 5e-5)


def test_finished_clients_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished client may have diverged, which does not make a graph wrong."""
    monkeypatch.setattr(cuda_graphs, "NUM_SIZES", 1)
    e, graphs = replaying(make("linear"))
    placed = graphs.to_static_rows(torch.full((6, e.model.size), float("nan")))
    placed[:5] = e.model.init_row()
    graphs.count = 6

    def step(s, batch):
        s.descend(s.grad(batch))

    gradients_of = all_clients(e).subset(np.arange(6) < 5)
    graphs.to_static_rows = lambda rows: placed[: len(rows)].copy_(rows)  # type: ignore[method-assign]
    gradients_of.train(e.model.init_row(), step=step, how=LocalTraining(steps=2))
    assert graphs.replays and not graphs.disabled


def test_recording_does_not_change_running_statistics() -> None:
    e, _ = replaying(make("batch norm"))
    plain = make("batch norm")
    a, b = (all_clients(x).train(x.model.init_row(), how=LocalTraining(steps=1)).theta for x in (e, plain))
    close(a[:, e.model.trained.size :], b[:, e.model.trained.size :], 1e-6)


def test_the_plan_selects_graphs() -> None:
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
