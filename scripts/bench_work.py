"""Workloads of the benchmark, and what trains on them: a bare loop of PyTorch, and methods on fedbench's engine."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_clock import Rival
from torch import nn

from fedbench.algorithms.base import Algorithm
from fedbench.algorithms.fedavg import FedAvg
from fedbench.app.compose import compose
from fedbench.core.rows import RowStore
from fedbench.core.split import Ragged, Split
from fedbench.data.base import Arrays
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.executor import EXECUTORS, Executor, Plan, candidate_plans
from fedbench.engine.federation import Federation
from fedbench.engine.optim import SGD
from fedbench.models.fedavg_cnn import FedAvgCNN
from fedbench.models.mlp import MLP
from fedbench.nn.flat import FlatModel
from fedbench.simulation import build

SEED = 20261121
COLUMNS = {"head": ["head.*"]}
WIDTHS = {"cnn": 512, "mlp": 64}  # of the hidden layer before the head, unless a workload says another
LOCAL = {
    "cnn": {"batch_size": 10, "epochs": 1, "lr": 0.005},
    "mlp": {"batch_size": 10, "epochs": 5, "lr": 0.05},
    "many": {"batch_size": 10, "epochs": 1, "lr": 0.05},
}


class Workload:
    """A partitioned data set, the clients of each round, a model and the options of local training.

    Args:
        name: The name.
        arrays: The data set.
        split: The samples of each client.
        schedule: The indices of the clients of each round.  The first round is for warm-up.
        work: The options of local training: batch_size, epochs and lr; and momentum (default: 0) and drop_last
            (default: False).
        model: "cnn" or "mlp".
        width: The width of the model's last hidden layer; None for that of WIDTHS.
    """

    def __init__(
        self,
        name: str,
        arrays: Arrays,
        split: Split,
        schedule: list,
        work: dict[str, Any],
        model: str,
        width: int | None = None,
    ):
        self.name, self.arrays, self.split, self.schedule = name, arrays, split, schedule
        self.work, self.model, self.width = {"momentum": 0.0, "drop_last": False, **work}, model, width or WIDTHS[model]

    def module(self) -> nn.Module:
        shape = self.arrays.inputs.shape[1:]  # type: ignore[union-attr]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return FedAvgCNN(shape, 10, self.width) if self.model == "cnn" else MLP(shape, 10, [self.width])

    def flat(self, device: torch.device | str = "cpu") -> FlatModel:
        return FlatModel(self.module(), COLUMNS, device)

    @property
    def cohort(self) -> int:
        """The number of clients per round."""
        return len(self.schedule[0])

    def plans(self, executor: str, device: torch.device) -> list[Plan]:
        """Return the executor plans that an option of hardware.executor allows."""
        return candidate_plans(executor, None, None, device, self.cohort)

    def engine(self, candidates: Sequence[Plan], device: torch.device) -> Engine:
        """Return the engine of the workload.

        Args:
            candidates: Executor plans.  Of several ones, the fastest is chosen as in a run.
            device: The device.
        """
        federation = Federation.build(self.arrays, self.split, device)
        federation.cohort_size = self.cohort
        model, work = self.flat(device), self.work
        engine = Engine(
            federation=federation,
            model=model,
            optimizer=SGD(work["lr"], work["momentum"]),
            executor=Executor(candidates[0], device),
            rows=RowStore(federation.num_clients, device, *build.memory_limits(device)),
            epochs=work["epochs"],
            batch_size=work["batch_size"],
            drop_last=work["drop_last"],
            eval_batch=build.evaluation_batch(device),
        )
        if len(candidates) > 1:
            return build.choose_executor(engine, list(candidates))
        return build.use(engine, candidates[0])

    def cut(self, samples: int) -> Workload:
        """Return this workload with at most `samples` training samples for each client."""
        train = Ragged.from_lists([own[:samples] for own in map(self.split.train.__getitem__, range(self.clients))])
        return Workload(
            self.name,
            self.arrays,
            Split(train, self.split.val, self.split.test),
            self.schedule,
            self.work,
            self.model,
            self.width,
        )

    def doing(self, **work: Any) -> Workload:
        """Return this workload with other options of local training, such as ``epochs=5``."""
        return Workload(self.name, self.arrays, self.split, self.schedule, self.work | work, self.model, self.width)

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.split.train)

    def __str__(self) -> str:
        return f"{self.name}: {self.clients} clients, {self.cohort} a round"


class Bare:
    """The yardstick: FedAvg by plain PyTorch, with a module and an optimizer per client, one after the other."""

    method, plan = "fedavg", None

    def __init__(self, work: Workload, device: torch.device, precision: str = "float32"):
        federation = Federation.build(work.arrays, work.split, device)
        self.work, self.model, self.federation, self.precision = work, work.module().to(device), federation, precision
        self.x, self.y = federation.gather(torch.arange(len(federation.targets), device=device))

    def round(self, round: int) -> int:
        """Train the clients of a round (from 0), average their models, and return the number of images trained on."""
        generator = np.random.default_rng(round)
        states, sizes, seen = [], [], 0
        for i in self.work.schedule[round]:
            own = self.work.split.train[i]
            model = copy.deepcopy(self.model)
            seen += self.train(model, own, generator)
            states.append(model.state_dict())
            sizes.append(len(own))
        weights = [n / sum(sizes) for n in sizes]
        self.model.load_state_dict({k: sum(w * s[k] for w, s in zip(weights, states)) for k in states[0]})
        return seen

    def train(self, model: nn.Module, own: np.ndarray, generator: np.random.Generator) -> int:
        """Train a client's model in place for its local epochs, and return the number of images trained on.

        Args:
            model: The model.
            own: The indices of the client's samples.
            generator: The generator that shuffles them.
        """
        work, seen = self.work.work, 0
        size = work["batch_size"]
        # as in fedbench, only a client with more samples than a batch drops its last, smaller batch
        last = len(own) - len(own) % size if work["drop_last"] and len(own) > size else len(own)
        optimizer = torch.optim.SGD(model.parameters(), lr=work["lr"], momentum=work["momentum"])
        for _ in range(work["epochs"]):
            order = torch.from_numpy(generator.permutation(own)[:last]).to(self.y.device)
            for index in order.split(size):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(self.x[index]), self.y[index])
                loss.backward()
                optimizer.step()
                seen += len(index)
        return seen


class Ours:
    """A method on fedbench's engine.  Of several executor plans, the fastest is chosen."""

    def __init__(
        self,
        work: Workload,
        candidates: Sequence[Plan],
        device: torch.device,
        algorithm: Algorithm | None = None,
        precision: str = "float32",
    ):
        build.set_precision(precision)  # which plan is the fastest may depend on it
        self.work, self.precision, self.engine = work, precision, work.engine(candidates, device)
        self.algorithm = algorithm or FedAvg()
        self.method = type(self.algorithm).__name__.lower()
        self.algorithm.setup(self.engine.federation, self.engine.model, self.engine.rows)
        build.set_precision("float32")

    @property
    def plan(self) -> Plan:
        return self.engine.executor.plan

    def round(self, round: int) -> int:
        cohort = Cohort(self.engine, np.array(sorted(self.work.schedule[round])), round)
        self.algorithm.round(cohort)
        return cohort.cost.samples


def ours(
    work: Workload, executors: Sequence[str], device: torch.device, method: Callable[[], Algorithm] = FedAvg
) -> dict[str, Callable[[], Rival]]:
    """Return functions that make a method with an executor, by the name of the executor.

    Args:
        work: The workload.
        executors: The names of the executors.
        device: The device.
        method: The class of the method.
    """
    return {
        name: partial(lambda name: Ours(work, work.plans(name, device), device, method()), name) for name in executors
    }


def every_plan(work: Workload, device: torch.device) -> dict[str, Plan]:
    """Return all plans that a user can choose or that executor=auto considers, by their short names."""
    return {plan.short_name: plan for name in (*EXECUTORS, "auto") for plan in work.plans(name, device)}


# -- what they train on --------------------------------------------------------------------------------------
def digits() -> Arrays:
    from fedbench.data.images.digits import Digits

    return Digits().load()


def images(data: Path | None, count: int = 15_000) -> Arrays:
    """Return CIFAR-10 from a folder with cifar10_jpeg.npz; without a folder, random images, which are equally fast.

    Args:
        data: The folder; None for random images.
        count: The number of random images.
    """
    if data is not None:
        from fedbench.data.images.cifar import CIFAR10

        return CIFAR10(data_dir="data", path=str(data / "cifar10_jpeg.npz")).load()
    generator = np.random.default_rng(0)
    return Arrays(
        generator.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8),
        generator.permutation(count) % 10,
        np.zeros(count, np.int8),
        10,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    )


def split_of(train: list | Ragged, test: list | Ragged) -> Split:
    none = Ragged.from_sizes(np.empty(0, np.int64), np.zeros(len(train), np.int64))
    return Split(*(r if isinstance(r, Ragged) else Ragged.from_lists(r) for r in (train, none, test)))


def from_file(path: Path, data: Path | None) -> Workload:
    """Return the workload in a JSON file.

    Args:
        path: The file.
        data: The folder of CIFAR-10; None for random images of the same size.
    """
    spec = json.loads(path.read_text())
    arrays = digits() if spec["source"] == "digits" else images(data)
    clients = spec["clients"]
    split = split_of([c["train"] for c in clients], [c["test"] for c in clients])
    return Workload(
        spec["name"],
        arrays,
        split,
        spec["schedule"],
        {"batch_size": spec["batch_size"], "epochs": spec["local_epochs"], "lr": spec["lr"]},
        spec["model"],
    )


def generated(name: str) -> Workload:
    """Return a generated workload, "cnn", "mlp" or "many", whose clients' sizes are multiples of the batch size."""
    rng = np.random.default_rng(SEED)
    arrays = images(None) if name == "cnn" else digits()
    n, k = {"cnn": (25, 6), "mlp": (20, 20), "many": (1000, 100)}[name]
    sizes = 10 * {"cnn": rng.integers(8, 127, n), "mlp": rng.integers(3, 17, n), "many": np.full(n, 2)}[name]
    train = [rng.integers(0, len(arrays.targets), s) for s in sizes]
    rounds = 6 if name == "cnn" else 12
    schedule = [sorted(rng.choice(n, k, replace=False).tolist()) for _ in range(rounds)]
    return Workload(
        name, arrays, split_of(train, [t[:2] for t in train]), schedule, LOCAL[name], "cnn" if name == "cnn" else "mlp"
    )


def paper(clients: int, data: Path | None, rounds: int) -> Workload:
    """Return PGFed's setting on CIFAR-10: its partition, a quarter of the clients per round, 5 epochs; momentum 0.9."""
    cfg = compose(["+experiment=setting/pgfed_cifar", f"partition.num_clients={clients}"])
    arrays = images(data, 60_000)
    split, size = build.partition(cfg, arrays), build.cohort_size(cfg, clients)
    schedule = [build.draw_cohort(0, r, clients, size).tolist() for r in range(rounds)]
    return Workload(
        "paper's CIFAR-10", arrays, split, schedule, {**cfg.local, "lr": cfg.optimizer.lr, "momentum": 0.9}, "cnn"
    )


def crowd(clients: int, cohort: int, rounds: int, model: str = "mlp", width: int | None = None) -> Workload:
    """Return a workload of many clients with 20 samples each.

    Args:
        clients: The number of clients.
        cohort: The number of clients per round.
        rounds: The number of rounds.
        model: "mlp" or "cnn".
        width: The width of the model; None for the model's own.
    """
    rng, arrays = np.random.default_rng(SEED), digits() if model == "mlp" else images(None, 2000)
    own = rng.integers(0, len(arrays.targets), (clients, 20))
    schedule = [build.draw_cohort(0, r, clients, min(cohort, clients)).tolist() for r in range(rounds)]
    train, test = (Ragged.from_sizes(part.ravel(), np.full(clients, part.shape[1])) for part in (own, own[:, :2]))
    return Workload("crowd", arrays, split_of(train, test), schedule, LOCAL["many"], model, width)
