"""What a cohort computes over whole splits is plain PyTorch, client by client; exchanges are metered."""

import copy
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from modules import MODELS
from tiny import (
    HEAD,
    PLANS,
    SIZES,
    Affine,
    Point,
    Squares,
    all_clients,
    close,
    compose,
    engine,
    engine_on,
    equal,
    every_second,
    mlp,
    ragged,
    seeded,
    targets_federation,
)
from torch import Tensor, nn

from fedbench.algorithms.base import Algorithm
from fedbench.algorithms.ditto import Ditto
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedprox import FedProx
from fedbench.algorithms.per_fedavg import PerFedAvg
from fedbench.config.check import check
from fedbench.core import rng
from fedbench.core.options import ConfigError, RunError
from fedbench.core.split import Ragged
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.optim import SGD
from fedbench.engine.per_client import PerClient
from fedbench.engine.training import LocalTraining
from fedbench.models.resnet import ResNet
from fedbench.nn.flat import FlatModel
from fedbench.simulation import evaluate
from fedbench.simulation.build import make
from fedbench.simulation.devices import shared_evaluation_batch

IDS = np.array([4, 0, 5, 2])  # unsorted, not all
TEST = (3, 12, 0, 6, 8, 1)  # client 2 has nothing to be tested on


def build(model: str = "linear", plan: str = "vmap", **options) -> Engine:
    make, shape = MODELS[model]
    arrays, split = ragged(shape=shape, test=TEST)
    return engine(arrays, split, seeded(make), plan=plan, **{"eval_batch": 8, **options})


def spread(e: Engine, k: int = len(IDS)) -> Tensor:
    noise = torch.randn(k, e.model.trained.size, generator=torch.Generator().manual_seed(3))
    return e.model.trained.put(e.model.init_row(), e.model.trained.take(e.model.init_row()) + 0.1 * noise)


def samples(e: Engine, client: int, split: str = "train", drop_last: bool = False) -> tuple[Tensor, Tensor]:
    index = e.federation.splits[split][client]
    own = min(e.batch_size, len(index))
    return e.federation.gather(torch.from_numpy(index[: len(index) // own * own] if drop_last else index))


def reference(e: Engine, row: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradient (0 for buffers), loss and logits of the module with this row, in evaluation mode."""
    module = copy.deepcopy(e.model.module)
    module.load_state_dict(e.model.state_dict(row), strict=False)
    logits = module(x)
    loss = F.cross_entropy(logits, y)
    loss.backward()
    gradient = [p.grad.reshape(-1) for p in module.parameters()] + [torch.zeros(e.model.size - e.model.trained.size)]
    return torch.cat(gradient), loss.detach(), logits.detach()


# -- whole splits ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_gradient_and_loss_over_a_split(model: str, plan: str) -> None:
    e = build(model, plan)
    cohort, rows = Cohort(e, IDS, 0), spread(e)
    g, f = cohort.gradient(rows)
    f_again, f_shared, g_shared = cohort.loss(rows), cohort.loss(rows[0]), cohort.gradient(rows[0])[0]
    for j, i in enumerate(IDS):
        expected = reference(e, rows[j], *samples(e, i))
        close(g[j], expected[0], 2e-5)
        close(f[j], expected[1])
        close(f_again[j], expected[1])
        shared = reference(e, rows[0], *samples(e, i))
        close(f_shared[j], shared[1])
        close(g_shared[j], shared[0], 2e-5)


@pytest.mark.parametrize("plan", PLANS)
def test_gradient_over_full_batches_only(plan: str) -> None:
    """With drop_last, the first floor(n_i / B) B samples of a client count, where B = min(5, n_i)."""
    e = build(plan=plan)
    g, f = Cohort(e, IDS, 0).gradient(spread(e), drop_last=True)
    for j, i in enumerate(IDS):
        expected = reference(e, spread(e)[j], *samples(e, i, drop_last=True))
        close(g[j], expected[0], 2e-5)
        close(f[j], expected[1])


@pytest.mark.parametrize("plan", PLANS)
def test_losses_of_several_rows_for_each_client(plan: str) -> None:
    """Rows [K, M, P] have losses [K, M], as in FedFomo."""
    e = build(plan=plan)
    cohort = Cohort(e, IDS, 0)
    rows = torch.stack([spread(e), spread(e) + 0.1, spread(e).flip(0)], dim=1)
    losses = cohort.loss(rows, "test")
    assert losses.shape == (4, 3)
    for j, i in enumerate(IDS):
        for m in range(3):
            expected = reference(e, rows[j, m], *samples(e, i, "test"))[1] if TEST[i] else torch.tensor(0.0)
            close(losses[j, m], expected)
    assert cohort.loss(rows[:, :0]).shape == (4, 0)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", ["linear", "batch norm", "vmap only"])
def test_forward_over_a_split(model: str, plan: str) -> None:
    e = build(model, plan)
    cohort, rows = Cohort(e, IDS, 0), spread(e)
    own, shared = cohort.forward(rows), cohort.forward(rows[1])
    expanded = cohort.forward(rows[1].expand(4, -1))
    for j, i in enumerate(IDS):
        assert len(own[j]) == len(shared[j]) == TEST[i]
        if TEST[i]:
            close(own[j], reference(e, rows[j], *samples(e, i, "test"))[2])
            close(shared[j], reference(e, rows[1], *samples(e, i, "test"))[2])
            close(expanded[j], shared[j])


def test_forward_of_a_function_of_a_dict_of_rows() -> None:
    """One of the rows is shared by all clients.  The results are features."""
    for plan in PLANS:
        e = build(plan=plan)
        cohort, rows = Cohort(e, IDS, 0), spread(e)
        scale = torch.arange(1.0, 5)[:, None]

        def mix(model, bag, x: Tensor) -> Tensor:
            return model.features(bag["theta"], x) * bag["scale"][..., None] + bag["shift"][:, None]

        z = cohort.forward({"theta": rows, "scale": scale, "shift": torch.ones(8)}, mix, "train")
        for j, i in enumerate(IDS):
            close(z[j], e.model.features(rows[j], samples(e, i)[0]) * (j + 1) + 1)


def test_an_empty_split() -> None:
    e = build()
    cohort, rows = Cohort(e, IDS, 0), spread(e)
    g, f = cohort.gradient(rows, "val")
    assert g.abs().sum() == 0 and f.abs().sum() == 0 and cohort.loss(rows, "val").sum() == 0
    assert [len(z) for z in cohort.forward(rows, split="val")] == [0] * 4
    assert [len(z) for z in cohort.forward(rows[0], split="val")] == [0] * 4


def test_an_empty_cohort() -> None:
    e = build()
    nobody = Cohort(e, np.empty(0, np.int64), 0)
    assert nobody.gradient(e.model.init_row())[0].shape == (0, e.model.size)
    assert nobody.forward(e.model.init_row()) == []


def test_results_do_not_depend_on_the_size_of_blocks() -> None:
    small, large = build("batch norm", eval_batch=2), build("batch norm", eval_batch=1000)
    rows = spread(small)
    for a, b in zip(Cohort(small, IDS, 0).gradient(rows), Cohort(large, IDS, 0).gradient(rows)):
        close(a, b)
    for a, b in zip(Cohort(small, IDS, 0).forward(rows), Cohort(large, IDS, 0).forward(rows)):
        close(a, b)


def test_a_shared_row_is_evaluated_in_larger_batches() -> None:
    """These contain samples of several clients.  Gradients use batches of each client."""
    e, seen = build(eval_batch=2), []

    def fn(model: FlatModel, rows: Tensor, x: Tensor) -> Tensor:
        seen.append(x.shape[1])
        return model.predict(rows, x)

    cohort, row = Cohort(e, IDS, 0), e.model.init_row()
    small = cohort.forward(row, fn)
    large = Cohort(replace(e, shared_batch=5), IDS, 0).forward(row, fn)
    total = sum(TEST[i] for i in IDS)
    assert seen == [min(2, total - a) for a in range(0, total, 2)] + [min(5, total - a) for a in range(0, total, 5)]
    for a, b in zip(small, large, strict=True):
        close(a, b)
    cohort.forward(spread(e), fn)
    assert max(seen[-3:]) <= 2


@pytest.mark.parametrize(
    ("device", "sample_bytes", "expected"),
    [("cpu", 256, 1024), ("cpu", 3 * 32 * 32 * 4, 128), ("cuda", 256, 16384), ("cuda", 3 * 32 * 32 * 4, 512)],
)
def test_blocks_of_small_inputs_are_larger(device: str, sample_bytes: int, expected: int) -> None:
    assert shared_evaluation_batch(torch.device(device), sample_bytes) == expected


# -- who and how much ------------------------------------------------------------------------------------
def test_the_size_of_blocks_depends_on_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    e = build()
    monkeypatch.setattr(evaluate, "SLICE_BYTES", 2 * 4 * e.model.size)
    assert [s.tolist() for s in evaluate.slices(e, IDS[:3])] == [[4, 0], [5]]


def test_weights_and_numbers_of_samples() -> None:
    cohort = Cohort(build(), IDS, 3)
    n = torch.tensor([18.0, 7, 9, 12])
    equal(cohort.num_samples, n)
    close(cohort.weights, n / 46)
    assert cohort.index.tolist() == IDS.tolist() and len(cohort) == 4
    assert (cohort.round, cohort.rounds, cohort.num_clients) == (3, 4, 6)


def test_bytes_of_all_clients_count_for_the_cohort() -> None:
    e = build()
    cohort = Cohort(e, IDS, 3)
    whole = cohort.all_clients()
    assert (whole.ids.tolist(), whole.round, cohort.ids.tolist()) == (list(range(6)), 3, IDS.tolist())
    whole.broadcast(w=torch.zeros(10))
    cohort.broadcast(w=torch.zeros(10))
    assert cohort.cost.bytes_down == (6 + 4) * 40
    close(whole.train(e.model.init_row()).theta[IDS], cohort.train(e.model.init_row()).theta)


def test_random_numbers_of_a_method_are_keyed() -> None:
    e = build()
    cohort, other = Cohort(e, IDS, 0), Cohort(e, IDS[:2], 0)
    equal(cohort.random("x").normal(3)[:2], other.random("x").normal(3))
    assert not torch.equal(cohort.random("x").normal(3), Cohort(e, IDS, 1).random("x").normal(3))
    assert cohort.generator("y").integers(1 << 30) == Cohort(e, IDS[:1], 0).generator("y").integers(1 << 30)
    assert cohort.generator("y").integers(1 << 30) != cohort.generator("z").integers(1 << 30)


def test_bytes_of_messages() -> None:
    """A broadcast of float32 values counts once for each of 4 clients."""
    cohort = Cohort(build(), IDS, 0)
    w, rows = torch.zeros(10), torch.arange(12.0).view(4, 3)
    assert cohort.broadcast(w=w).w is w
    assert cohort.cost.bytes_down == 4 * 10 * 4
    sent = cohort.download(a=rows, b=torch.zeros(4))
    equal(sent.a, rows)
    assert cohort.cost.bytes_down == 160 + 4 * 12 + 4 * 4
    which = torch.tensor([[True, False, True], [False] * 3, [True] * 3, [False] * 3])
    cohort.fetch(which, core=torch.zeros(3, 5))
    assert cohort.cost.bytes_down == 224 + 5 * 5 * 4 and cohort.cost.bytes_up == 0
    equal(cohort.upload(theta=rows, relative_to={"theta": None}).theta, rows)
    assert cohort.cost.bytes_up == 48
    for send in (cohort.download, cohort.upload):
        with pytest.raises(ValueError, match=r"the tensor has 10 rows, and the cohort has 4 clients"):
            send(w=w)


def test_steps_and_samples_of_a_training_are_counted() -> None:
    e = build(epochs=2)
    cohort = Cohort(e, IDS, 0)
    out = cohort.train(e.model.init_row())
    assert cohort.cost.samples == 2 * sum(SIZES[i] for i in IDS)
    assert cohort.cost.steps == out.steps.sum() == 2 * (4 + 2 + 2 + 3)
    assert cohort.cost.loss == pytest.approx(out.loss.mean().item())
    for share, samples in ((0.5, 3), (0, 3)):  # what a batch serves beside its update is no sample more
        cohort.train(e.model.init_row(), how=LocalTraining(throughput_weight=share))
        assert cohort.cost.samples == samples * sum(SIZES[i] for i in IDS)


@pytest.mark.parametrize(
    "make, share", [(FedAvg, 1), (Ditto, 1), (PerFedAvg, 1 / 2), (partial(PerFedAvg, "hf"), 1 / 3)]
)
def test_a_second_pass_over_samples_does_not_count(make: Callable[[], Algorithm], share: float) -> None:
    """Images per second count the 12 samples of each of four clients once."""
    arrays, split = ragged((12,) * 4)
    e = engine(arrays, split, mlp(), batch_size=2, columns=HEAD)
    algorithm = make()
    algorithm.setup(e.federation, e.model, e.rows)
    cohort = all_clients(e)
    algorithm.round(cohort)
    assert cohort.cost.samples == 4 * 12 * share


# -- mistakes that must not stay hidden ------------------------------------------------------------------
def test_the_training_loss_is_that_of_clients_with_steps() -> None:
    """Clients without samples take no step, and do not count as a loss of 0 in the mean."""
    e = build()
    e.federation.splits["some"] = Ragged.from_lists(
        [np.arange(3) if i in (0, 4) else np.empty(0, np.int64) for i in range(len(SIZES))]
    )
    cohort = Cohort(e, IDS, 0)
    out = cohort.train(e.model.init_row(), how=LocalTraining(split="some"))
    assert out.steps.tolist() == [1, 1, 0, 0] and (out.loss > 0.1).tolist() == [True, True, False, False]
    assert cohort.cost.loss == pytest.approx(float(out.loss[:2].mean()))


@pytest.mark.parametrize("plan", ["loop", "threads", "vmap", "pairs"])
def test_a_closure_over_the_cohorts_rows_is_found(plan: str) -> None:
    """A [K, P] tensor that does not come in as a state is in the wrong order, or of the wrong length, under every
    plan: its owner fails or learns something else than with the tensor passed as a state."""
    e = build(plan=plan)
    cohort, pull = Cohort(e, IDS, 0), spread(e)
    right = cohort.train(e.model.init_row(), extra_grad=lambda s: s.theta - s.state.pull, pull=pull).theta
    try:
        wrong = cohort.train(e.model.init_row(), extra_grad=lambda s: s.theta - pull).theta
    except RuntimeError:
        return
    assert not torch.allclose(right, wrong, atol=1e-3)


@pytest.mark.parametrize("plan", PLANS)
def test_a_loss_that_is_not_finite_is_an_error(plan: str) -> None:
    e = replace(build(plan=plan), optimizer=SGD(lr=0.1))
    start = e.model.init_row().expand(4, -1).clone()
    start[2] = float("inf")
    with pytest.raises(RunError, match=r"client 5 is not finite in round 3: optimizer.lr=0.1"):
        Cohort(e, IDS, 2).train(start)
    assert issubclass(RunError, ConfigError)


def test_parameters_that_are_not_finite_are_an_error() -> None:
    e = replace(build(), optimizer=SGD(lr=3e38))
    with pytest.raises(RunError, match=r"round 1"):
        Cohort(e, IDS, 0).train(e.model.init_row(), how=LocalTraining(steps=1))


@pytest.mark.parametrize("task, sign", [("squares", 1), ("affine", 1), ("affine", -1)])
def test_a_loss_of_1e8_has_diverged(task: str, sign: int) -> None:
    """The sign does not matter."""

    def loss_of(value: float) -> float:
        target = sign * (value if task == "affine" else (2 * value) ** 0.5)
        own = targets_federation([np.array([[target]])], Affine() if task == "affine" else Squares())
        start = [1.0 if task == "affine" else 0.0]
        e = engine_on(own, Point(start), SGD(lr=1e-12), batch_size=1)
        return float(all_clients(e).train(e.model.init_row()).loss)

    assert loss_of(0.9e8) == pytest.approx(sign * 0.9e8, rel=1e-5)
    with pytest.raises(RunError, match=r"client 0 has diverged \(-?1.1e\+08\) in round 1"):
        loss_of(1.1e8)


def test_rows_are_not_shared_between_trainings() -> None:
    """A training does not change the results of the previous one."""
    e = build()
    cohort = Cohort(e, IDS, 0)
    one = cohort.train(e.model.init_row())
    kept = {n: v.clone() for n, v in vars(one).items() if isinstance(v, Tensor)}
    g, _ = cohort.gradient(one.theta)
    kept_g = g.clone()
    cohort.train(one.theta)
    cohort.gradient(one.theta + 1)
    equal({n: v for n, v in vars(one).items() if isinstance(v, Tensor)}, kept)
    equal(g, kept_g)


def test_batches_depend_on_the_key() -> None:
    """Two trainings of a round with one key have the same batches.  Other keys and rounds have others."""
    e = build()

    def seen(round: int, key: str) -> list:
        out: list = []
        Cohort(e, IDS[:1], round).train(
            e.model.init_row(), step=lambda s, b: out.append(b.y.tolist()), how=LocalTraining(key=key)
        )
        return out

    assert seen(0, "a") == seen(0, "a") != seen(0, "b") and seen(0, "a") != seen(1, "a")
    index = rng.batches(rng.key(0, "batches", "a", 0), IDS[:1], np.array([18]), 5, epochs=1)[0][0, 0]
    own = e.federation.splits["train"][4][index]
    assert seen(0, "a")[0][0] == e.federation.targets[torch.from_numpy(own)].tolist()


def test_a_model_with_frozen_parameters() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = ResNet((1, 4, 4), 6, [4], "group").requires_grad_(False)
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.frozen(x))

    arrays, split = ragged()
    e = engine(arrays, split, seeded(Net))
    assert e.model.size == 21
    g, _ = all_clients(e).gradient(e.model.init_row())
    for i in range(6):
        module = e.model.module
        module.zero_grad()
        x, y = samples(e, i)
        F.cross_entropy(module(x), y).backward()
        close(g[i], torch.cat([module.head.weight.grad.reshape(-1), module.head.bias.grad]))
    assert all_clients(e).train(e.model.init_row()).theta.shape == (6, 21)


def test_sizes_are_those_of_the_helper() -> None:
    arrays, split = ragged()
    assert split.train.sizes.tolist() == list(SIZES)
    assert all_clients(engine(arrays, split, mlp())).ids.tolist() == [*range(6)]


# -- a rate for each client ------------------------------------------------------------------------------
RATES = [0.05, 0.2, 0.01, 0.1, 0.3, 0.15]


def personal(method: str, lr: float | list[float], plan: str) -> Tensor:
    """Return the states of clients IDS after a round (SCAFFOLD: c_i; Per-FedAvg: one step from the initial row)."""
    e = replace(build("linear", plan), optimizer=SGD(lr=lr))
    a = make(compose([f"algorithm={method}"]).algorithm)
    a.setup(e.federation, e.model, e.rows)
    if method != "per_fedavg":
        a.round(Cohort(e, np.sort(IDS), 0))
    if method == "scaffold":
        return e.rows.all["c_i"][np.sort(IDS)]
    with torch.no_grad():
        return a.personalized(Cohort(e, np.sort(IDS), 0, "evaluation"), False)


@pytest.mark.parametrize("plan", every_second(["vmap", "loop", "threaded pairs"]))
@pytest.mark.parametrize("method", ["local", "scaffold", "per_fedavg", "pgfed", "ditto", "pfedme", "fedamp"])
def test_a_client_with_its_own_rate_trains_as_if_all_had_it(method: str, plan: str) -> None:
    mixed = personal(method, RATES, plan)
    for position, client in enumerate(np.sort(IDS)):
        close(mixed[position], personal(method, RATES[client], plan)[position], 1e-5)
    assert not torch.allclose(mixed, personal(method, 0.1, plan))


@pytest.mark.parametrize("plan", ["vmap", "loop", "threaded pairs"])
@pytest.mark.parametrize(("method", "option"), [("fedprox", "mu"), ("ditto", "lam")])
def test_a_client_with_its_own_hyperparameter_trains_as_if_all_had_it(method: str, option: str, plan: str) -> None:
    values, ids = [0.0, 3.0, 1.0, 0.5, 2.0, 4.0], np.sort(IDS)

    def trained(value: float | list[float]) -> Tensor:
        e, seen = build("linear", plan, epochs=3), []
        a = make({**compose([f"algorithm={method}"]).algorithm, option: value})
        a.setup(e.federation, e.model, e.rows)
        a.check(e.federation, e.model, e.optimizer)
        cohort = Cohort(e, ids, 0)
        train = cohort.train
        cohort.train = lambda *args, **more: seen.append(train(*args, **more)) or seen[-1]  # type: ignore
        a.round(cohort)
        return seen[0].theta  # FedProx: theta; Ditto: v

    mixed = trained(values)
    for position, client in enumerate(ids):
        close(mixed[position], trained(values[client])[position], 1e-5)
    assert not torch.allclose(mixed, trained(1.0))


def test_a_list_of_hyperparameters_is_one_for_each_client() -> None:
    e = build()
    with pytest.raises(ConfigError, match=r"algorithm.mu lists 2 values, and there are 6 training clients"):
        FedProx([0.1, 0.2]).check(e.federation, e.model, e.optimizer)
    with pytest.raises(ConfigError, match=r"algorithm.mu must be .*, got \[0.1, -1\]"):
        check(compose(["algorithm=fedprox", "algorithm.mu=[0.1,-1]"]))
    assert not PerClient([0, 0]) and PerClient([0, 1])


def test_a_list_of_rates_is_one_for_each_client() -> None:
    from fedbench.simulation import build as parts

    cfg = compose(["optimizer.lr=[0.1,0.2]", "partition.num_clients=3", "partition=iid"])
    words = r"optimizer.lr lists 2 rates, and there are 3 clients"
    with pytest.raises(ConfigError, match=words):
        check(cfg)
    arrays = parts.data(cfg)
    with pytest.raises(ConfigError, match=words):
        parts.engine(cfg, arrays, parts.partition(cfg, arrays))
    with pytest.raises(ConfigError, match=r"optimizer.lr must be .*, got \[0.1, -1\]"):
        check(compose(["optimizer.lr=[0.1,-1]"]))


def test_fields_of_an_engine_cannot_be_set() -> None:
    e = build()
    with pytest.raises(FrozenInstanceError):
        e.rounds = 2  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        Engine(e.federation, e.model)  # type: ignore[misc]


# -- means ---------------------------------------------------------------------------------------------------
def test_means_are_weighted_by_samples_or_uniform() -> None:
    e, uniform = build(), build(client_weights="uniform")
    n = e.federation.num_samples[IDS]
    rows, by_samples = torch.randn(4, 3), torch.from_numpy(n / n.sum()).float()
    close(Cohort(e, IDS, 0).mean(rows), (by_samples[:, None] * rows).sum(0))
    close(Cohort(uniform, IDS, 0).mean(rows), rows.mean(0))
    close(Cohort(e, IDS, 0).mean(rows, weights="uniform"), rows.mean(0))
    close(Cohort(e, IDS, 0).mean(rows, weights=torch.tensor([1.0, 0, 2, 0])), rows[0] + 2 * rows[2])
    close(Cohort(e, IDS, 0).sum(rows), rows.sum(0))


def test_means_of_groups() -> None:
    cohort, rows = Cohort(build(), IDS, 0), torch.randn(4, 3)
    groups = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0]])  # [M, K]
    means = cohort.mean(rows, groups=groups)
    for mean, members in ((means[0], [0, 2]), (means[1], [1, 3])):
        n = cohort.num_samples[members]
        close(mean, (n[:, None] * rows[members]).sum(0) / n.sum())
    equal(means[2], torch.zeros(3))


def test_a_mean_of_matrices_is_over_clients() -> None:
    """Uploads are [K, a, b] with a = K, where a matrix product could use the wrong axis."""
    cohort = Cohort(build(), IDS, 0)
    uploads = torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(0))
    close(cohort.mean(uploads), (cohort.weights[:, None, None] * uploads).sum(0))
    groups = torch.tensor([[True, False, True, False], [False, True, False, True]])
    assert cohort.mean(uploads, groups=groups).shape == (2, 4, 3)


def test_only_a_mean_notes_that_the_runs_weights_are_used() -> None:
    """Reading the weights, and a mean by weights that the method chooses, do not."""
    cohort = Cohort(build(client_weights="uniform"), IDS, 0)
    close(cohort.weights, torch.full((4,), 0.25))
    close(torch.from_numpy(cohort.client_weights), torch.ones(4).double())
    cohort.mean(torch.ones(4, 2), weights=cohort.weights)
    cohort.mean(torch.ones(4, 2), weights="uniform")
    cohort.sum(torch.ones(4, 2))
    assert not cohort.cost.takes_means
    cohort.subset(np.array([True, True, False, False])).mean(torch.ones(2, 2))
    assert cohort.cost.takes_means


@pytest.mark.parametrize("plan", PLANS)
def test_forward_of_some_samples(plan: str) -> None:
    """As many as asked for, of each client's own: the same for the same key, others in another round, for one row and
    for each client's."""
    e = build(plan=plan)
    cohort, row = Cohort(e, IDS, 0), e.model.init_row()
    whole = cohort.forward(row)
    some = cohort.forward(row, limit=4, key="anchor")
    for i, (every, few) in enumerate(zip(whole, some, strict=True)):
        assert len(few) == min(4, TEST[IDS[i]])
        where = [int(torch.argmin((every - z).abs().sum(1))) for z in few]
        close(every[where], few)
        assert where == sorted(set(where))
    for again in (cohort.forward(row, limit=4, key="anchor"), cohort.forward(row.repeat(4, 1), limit=4, key="anchor")):
        close(torch.cat(again), torch.cat(some))
    for other in (cohort.forward(row, limit=4), Cohort(e, IDS, 1).forward(row, limit=4, key="anchor")):
        assert not torch.allclose(torch.cat(other), torch.cat(some))
    few = Cohort(e, IDS[:2], 0).forward(row, limit=4, key="anchor")
    close(torch.cat(few), torch.cat(some[:2]))  # a client's samples do not depend on who else is there


@pytest.mark.parametrize("plan", PLANS)
def test_forward_in_blocks_keeps_the_order_of_samples(plan: str) -> None:
    """Blocks have 2 samples, clients have 0 to 12 samples and different rows."""
    ids = np.arange(len(TEST))
    rows = torch.stack([(1 + i) * build().model.init_row() for i in ids.tolist()])
    whole, blocks = (Cohort(build(plan=plan, eval_batch=size), ids, 0).forward(rows) for size in (12, 2))
    assert [len(z) for z in blocks] == list(TEST)
    for a, b in zip(whole, blocks, strict=True):
        close(a, b)
