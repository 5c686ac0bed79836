"""Images per second of local training, each executor beside a bare PyTorch loop, interleaved in one process.

    uv run python scripts/benchmark.py                          # all workloads, generated
    uv run python scripts/benchmark.py mlp --files DIR --data DIR    # the fixed workloads (*.json) in DIR
    uv run python scripts/benchmark.py scale --clients 100 1000 1000000
    uv run python scripts/benchmark.py pgfed                    # PGFed against FedAvg at 5 local epochs

The bare loop is an nn.Module and a torch.optim.SGD per client, its tensors in memory, one thread: a yardstick, no
ceiling.  A workload fixes who has which sample, who is sampled when, and the local work (cnn: 25 clients, 6 a
round, FedAvgCNN; mlp: digits, 20 clients, all a round; many: 1,000 clients of 20 samples, 100 a round).  Round
times leave out evaluation, process start and the first round.  Times vary on a shared machine; ratios of
neighbouring rounds do so less: min, median and max over rounds are printed.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedbench import build
from fedbench.algorithms.base import Algorithm
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedper import FedPer
from fedbench.algorithms.pgfed import PGFed
from fedbench.cohort import Cohort, Engine
from fedbench.data.base import Arrays
from fedbench.executor import Executor, plans
from fedbench.federation import Federation
from fedbench.flat import FlatModel
from fedbench.models.fedavg_cnn import FedAvgCNN
from fedbench.models.mlp import MLP
from fedbench.optim import SGD
from fedbench.partition.base import Ragged, Split
from fedbench.rows import RowStore
from fedbench.simulator import peak_memory, synchronize

COLUMNS = {"head": ["head.*"]}
LOCAL = {"cnn": {"batch_size": 10, "epochs": 1, "lr": 0.005}, "mlp": {"batch_size": 10, "epochs": 5, "lr": 0.05},
         "many": {"batch_size": 10, "epochs": 1, "lr": 0.05}}


class Workload:
    """name; train, test: index lists per client; schedule: ids of each round (the first is warm-up)."""

    def __init__(self, name: str, arrays: Arrays, train: list | Ragged, test: list | Ragged, schedule: list,
                 work: dict):
        self.name, self.arrays, self.schedule, self.work = name, arrays, schedule, work
        none = Ragged.from_sizes(np.empty(0, np.int64), np.zeros(len(train), np.int64))
        self.split = Split(*(r if isinstance(r, Ragged) else Ragged.from_lists(r) for r in (train, none, test)))

    def module(self) -> nn.Module:
        shape = self.arrays.inputs.shape[1:]                                      # type: ignore[union-attr]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return FedAvgCNN(shape, 10) if self.name.startswith("cnn") else MLP(shape, 10)

    def engine(self, executor: str, device: torch.device, momentum: float = 0.0) -> Engine:
        federation = Federation.build(self.arrays, self.split, device)
        federation.cohort_size = len(self.schedule[0])
        model = FlatModel(self.module(), COLUMNS, device)
        candidates = plans(executor, None, None, device, federation.cohort_size)
        engine = Engine(federation, model, SGD(self.work["lr"], momentum), Executor(candidates[0], device),
                        RowStore(federation.num_clients, device, *build.memory_limits(device)),
                        epochs=self.work["epochs"], batch_size=self.work["batch_size"])
        if len(candidates) > 1:
            build.choose_executor(engine, candidates)
        return engine


class Bare:
    """The yardstick: FedAvg by a module and an optimizer per client."""

    def __init__(self, work: Workload, device: torch.device):
        federation = Federation.build(work.arrays, work.split, device)
        self.work, self.model, self.federation = work, work.module().to(device), federation
        self.x, self.y = federation.gather(torch.arange(len(federation.targets), device=device))

    def round(self, round: int) -> int:
        generator = np.random.default_rng(round)
        states, sizes, seen = [], [], 0
        for i in self.work.schedule[round]:
            own = self.work.split.train[i]
            model = copy.deepcopy(self.model)
            optimizer = torch.optim.SGD(model.parameters(), lr=self.work.work["lr"])
            for _ in range(self.work.work["epochs"]):
                order = torch.from_numpy(generator.permutation(own)).to(self.y.device)
                for index in order.split(self.work.work["batch_size"]):
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(self.x[index]), self.y[index])
                    loss.backward()
                    optimizer.step()
                    seen += len(index)
            states.append(model.state_dict())
            sizes.append(len(own))
        weights = [n / sum(sizes) for n in sizes]
        self.model.load_state_dict({k: sum(w * s[k] for w, s in zip(weights, states)) for k in states[0]})
        return seen


class Ours:
    """A method on an engine."""

    def __init__(self, work: Workload, executor: str, device: torch.device, algorithm: Algorithm | None = None,
                 momentum: float = 0.0):
        self.work, self.engine = work, work.engine(executor, device, momentum)
        self.algorithm = algorithm or FedAvg()
        self.algorithm.setup(self.engine.federation, self.engine.model, self.engine.rows)

    def round(self, round: int) -> int:
        torch.set_num_threads(1)
        cohort = Cohort(self.engine, np.array(sorted(self.work.schedule[round])), round)
        self.algorithm.round(cohort)
        return cohort.ledger.samples


def measure(rivals: dict, rounds: int, device: torch.device, warmup: int = 1) -> dict[str, list[float]]:
    """Images/s of every rival in every timed round, the rivals taking turns."""
    rates: dict[str, list[float]] = {name: [] for name in rivals}
    for r in range(rounds):
        for name, rival in rivals.items():
            torch.set_num_threads(1)
            began = time.perf_counter()
            seen = rival.round(r)
            synchronize(device)
            if r >= warmup:
                rates[name].append(seen / (time.perf_counter() - began))
    return rates


def report(title: str, rates: dict[str, list[float]], base: str, device: torch.device, out: list) -> None:
    print(f"\n{title}   (peak memory {peak_memory(device):,.0f} MB)")
    print(f"  {'':22s} {'images/s':>10s}   ratio to {base}: median (min to max), n={len(rates[base])}")
    for name, rate in rates.items():
        ratios = [a / b for a, b in zip(rate, rates[base])]
        row = {"workload": title, "name": name, "images_per_s": statistics.median(rate), "base": base,
               "ratio": statistics.median(ratios), "min": min(ratios), "max": max(ratios), "n": len(ratios)}
        out.append(row)
        print(f"  {name:22s} {row['images_per_s']:10,.0f}   {row['ratio']:6.2f} ({row['min']:.2f} to {row['max']:.2f})")


# -- workloads -------------------------------------------------------------------------------------------------
def digits() -> Arrays:
    from fedbench.data.digits import Digits
    return Digits().load()


def images(data: Path | None, count: int = 15_000) -> Arrays:
    """CIFAR-10 where a folder with cifar10_jpeg.npz is given, else random images of its shape (equally fast)."""
    if data is not None:
        from fedbench.data.cifar import CIFAR10
        return CIFAR10(data_dir="data", path=str(data / "cifar10_jpeg.npz")).load()
    generator = np.random.default_rng(0)
    return Arrays(generator.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8), generator.integers(0, 10, count),
                  np.zeros(count, np.int8), 10, mean=(0.5,) * 3, std=(0.5,) * 3)


def from_file(path: Path, data: Path | None) -> Workload:
    spec = json.loads(path.read_text())
    arrays = digits() if spec["source"] == "digits" else images(data)
    clients = spec["clients"]
    return Workload(spec["name"], arrays, [c["train"] for c in clients], [c["test"] for c in clients],
                    spec["schedule"], {"batch_size": spec["batch_size"], "epochs": spec["local_epochs"],
                                       "lr": spec["lr"]})


def generated(name: str, clients: int | None = None, rounds: int = 12) -> Workload:
    """A workload of the same kind as the fixed ones: sizes drawn once, multiples of the batch."""
    rng = np.random.default_rng(20261121)
    arrays = images(None) if name == "cnn" else digits()
    n, k = {"cnn": (25, 6), "mlp": (20, 20), "many": (clients or 1000, 100)}[name]
    sizes = 10 * {"cnn": rng.integers(8, 127, n), "mlp": rng.integers(3, 17, n), "many": np.full(n, 2)}[name]
    total = len(arrays.targets)
    train = [rng.integers(0, total, s) for s in sizes]
    schedule = [sorted(rng.choice(n, min(k, n), replace=False).tolist()) for _ in range(6 if name == "cnn" else rounds)]
    return Workload(name, arrays, train, [t[:2] for t in train], schedule, LOCAL[name])


def crowd(clients: int, rounds: int = 32) -> Workload:
    """As `many`, made at once: 20 samples each, 100 clients a round."""
    rng, arrays = np.random.default_rng(20261121), digits()
    own = rng.integers(0, len(arrays.targets), (clients, 20))
    schedule = [build.draw_cohort(0, r, clients, min(100, clients)).tolist() for r in range(rounds)]
    held = [Ragged.from_sizes(part.ravel(), np.full(clients, part.shape[1])) for part in (own, own[:, :2])]
    return Workload("many", arrays, *held, schedule, LOCAL["many"])


def scaled(clients: int, algorithm: Algorithm, device: torch.device) -> dict:
    """Round times and peak memory of a method among so many clients."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    rival, times = Ours(crowd(clients), "vmap", device, algorithm), []
    for r in range(len(rival.work.schedule)):
        began = clock()
        rival.round(r)
        synchronize(device)
        times.append(1e3 * (clock() - began))
    state = sum(r.used * r.row_bytes for r in rival.engine.rows.all.values()) / 2**20
    return {"workload": "scale", "name": type(algorithm).__name__.lower(), "clients": clients, "n": len(times) - 2,
            "ms": statistics.median(times[2:]), "min": min(times[2:]), "max": max(times[2:]), "state_mb": state,
            "peak_memory_mb": peak_memory(device)}


def scale(counts: list[int], device: torch.device, out: list) -> None:
    """ms per round and peak memory of FedAvg and FedPer as N grows, 100 a round, each in a process of its own.

    On a CPU the milliseconds are of processor time, which other processes do not lengthen.
    """
    print("\nms a round (evaluation apart), median (min to max), 100 of N clients a round, 20 samples each")
    for n in counts:
        for algorithm in (FedAvg(), FedPer()):
            if device.type == "cpu":
                with multiprocessing.get_context("fork").Pool(1) as apart:
                    row = apart.apply(scaled, (n, algorithm, device))
            else:
                torch.cuda.reset_peak_memory_stats()
                row = scaled(n, algorithm, device)
            out.append(row)
            print(f"  N={n:>9,}  {row['name']:7s} {row['ms']:6.2f} ({row['min']:.2f} to {row['max']:.2f}) ms   rows of "
                  f"clients {row['state_mb']:.2f} MB   peak {row['peak_memory_mb']:,.0f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["mlp", "many", "cnn", "pgfed"],
                        help="mlp, many (many1000), cnn, pgfed, scale")
    parser.add_argument("--files", type=Path, help="folder with the fixed workloads mlp.json, many1000.json, cnn.json")
    parser.add_argument("--data", type=Path, help="folder with cifar10_jpeg.npz, for cnn.json")
    parser.add_argument("--executors", nargs="+", default=["auto", "loop", "threads", "vmap"])
    parser.add_argument("--rounds", type=int, help="at most this many rounds, the first for warm-up")
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000, 10_000, 100_000, 1_000_000],
                        help="N of the scale workload")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    device, out = torch.device(args.device), []
    for name in args.workloads:
        if name == "scale":
            scale(args.clients, device, out)
            continue
        base = "cnn" if name == "pgfed" else name.removesuffix("1000")
        stem = "many1000" if base == "many" else base
        work = from_file(args.files / f"{stem}.json", args.data) if args.files else generated(base)
        rounds = min(args.rounds or len(work.schedule), len(work.schedule))
        if name == "pgfed":
            work.work = {**work.work, "epochs": 5}
            rivals = {a.__name__.lower(): Ours(work, "auto", device, a(), 0.9) for a in (FedAvg, PGFed)}
            rates = measure(rivals, min(rounds, args.rounds or 4), device, warmup=2)
            report("pgfed against fedavg, cnn, 5 local epochs", rates, "fedavg", device, out)
            continue
        rivals = {"bare loop": Bare(work, device)} | {e: Ours(work, e, device) for e in args.executors}
        auto = rivals.get("auto")
        rates = measure(rivals, rounds, device)
        title = f"{work.name}: {len(work.split.train)} clients, {len(work.schedule[0])} a round"
        if auto is not None:
            title += f"; auto = {auto.engine.executor.plan}"
        report(title, rates, "bare loop", device, out)
    if args.json:
        args.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
