"""Images per second of local training, each executor beside a bare PyTorch loop, interleaved in one process.

    uv run python scripts/benchmark.py                          # mlp many cnn pgfed, generated
    uv run python scripts/benchmark.py mlp --files DIR --data DIR    # the fixed workloads (*.json) in DIR
    uv run python scripts/benchmark.py scale --clients 100 1000 1000000     # N grows
    uv run python scripts/benchmark.py growth --cohorts 6 25 100 400        # the cohort grows, and the model
    uv run python scripts/benchmark.py shares                   # evaluation, tracking and start-up of whole runs
    uv run python scripts/benchmark.py ranks                    # a round in 1, 2 and 4 processes: memory, bytes
    uv run python scripts/benchmark.py modules                  # networks that are no model of fedbench's
    uv run python scripts/benchmark.py gpu --json gpu.json      # all that is worth measuring on a GPU
    uv run python scripts/benchmark.py gpu --device cpu --rounds 2 --samples 20     # is that wired?

The bare loop is an nn.Module and a torch.optim.SGD per client, its tensors in memory, one thread: a yardstick, no
ceiling.  The roofline is the ceiling: images/s that the machine's measured copy bandwidth and matrix rate allow a local
step, by the formulae of bench_roofline.py.  A workload fixes who has which sample, who is sampled when, and the local
work (cnn: 25 clients, 6 a round, FedAvgCNN; mlp: digits, 20 clients, all a round; many: 1,000 clients of 20 samples,
100 a round; pgfed: PGFed against FedAvg on cnn and mlp at 5 local epochs).  Round times leave out evaluation, process
start and the first round, of pgfed the first two.  Times vary on a shared machine; ratios of neighbouring rounds do so
less: min, median and max over rounds are printed.  --json FILE writes every row, and on what machine, commit and
versions it was measured.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_clock import Rival, Turns
from bench_growth import WIDTHS, curves, over_clients, over_cohorts, over_models
from bench_modules import NETWORKS, Network
from bench_ranks import PROCESSES, table, variants, write_runs
from bench_ranks import SETTINGS as SHARED
from bench_roofline import machine, roofline
from bench_shares import SETTINGS, shares
from bench_work import Bare, Ours, Workload, every_plan, from_file, generated, ours, paper

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.pgfed import PGFed
from fedbench.simulation.environment import describe_environment, now, peak_memory

FILES = {"mlp": "mlp", "many": "many1000", "cnn": "cnn"}
GPU_ROUNDS = 4  # the first two for warm-up


@dataclass
class Bench:
    """The arguments of the command, the device, and the rows measured so far."""

    args: argparse.Namespace
    device: torch.device
    rows: list[dict[str, Any]] = field(default_factory=list)
    rates: dict[str, Any] | None = None  # of the machine, once measured
    started: str = field(default_factory=now)

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Add rows, and write all rows to the file of --json, so that an interrupted benchmark leaves its results."""
        self.rows += rows
        if self.args.json:
            write(self.args.json, self)

    def load(self, name: str) -> Workload:
        files = self.args.files
        return self.cut(from_file(files / f"{FILES[name]}.json", self.args.data) if files else generated(name))

    def cut(self, work: Workload) -> Workload:
        return work.cut(self.args.samples) if self.args.samples else work

    def compare(
        self,
        title: str,
        work: Workload,
        makers: dict[str, Callable[[], Rival]],
        base: str,
        rounds: int,
        warmup: int = 1,
    ) -> None:
        """Let rivals take turns, and print their images/s, their ratios and their fractions of the roofline.

        Args:
            title: The title of the table.
            work: The workload.
            makers: Functions that make the rivals, by name.
            base: The rival to which ratios are computed.
            rounds: The number of rounds.
            warmup: The number of first rounds that are not timed.
        """
        rounds = min(self.args.rounds or rounds, rounds, len(work.schedule))
        turns = Turns(makers, self.device).play(rounds, min(warmup, rounds - 1))
        speed = machine(self.device)
        self.rates = {"copy_bytes_per_s": speed.copy, "product_flop_per_s": speed.products}
        compared, bounds = turns.rows(title, base), roofline(turns, work, speed)
        for row in compared:
            row["plan"] = str(turns.rivals[row["rival"]].plan or "")
        self.add(compared + bounds)
        show(title, compared, bounds, f"this machine {speed}", self.device)


def show(
    title: str, compared: list[dict[str, Any]], bounds: list[dict[str, Any]], speed: str, device: torch.device
) -> None:
    """Print a comparison of rivals.

    Args:
        title: The title.
        compared: A row for each rival, from `Turns.rows`.
        bounds: A row for each rival and bound, from `roofline`.
        speed: The speed of the machine in words.
        device: The device.
    """
    base, n = compared[0]["base"], compared[0]["n"]
    width = max(len(r["rival"]) for r in compared)
    print(f"\n{title}" + ("" if device.type == "cuda" else f"   (peak memory of all {peak_memory(device):,.0f} MB)"))
    print(f"  {'':{width}s} {'images/s':>10s}   ratio to {base}: median (min to max), n={n}; share of the roofline")
    for r in compared:
        reached = ", ".join(f"{b['ratio']:.1%} of {b['bound']}'" for b in bounds if b["rival"] == r["rival"])
        peak = "" if r["peak_memory_mb"] is None else f"   peak {r['peak_memory_mb']:,.0f} MB"
        print(
            f"  {r['rival']:{width}s} {r['images_per_s']:10,.0f}   {r['ratio']:6.2f} ({r['min']:.2f} to "
            f"{r['max']:.2f})   {reached}{peak}"
        )
    for name, plan in {r["rival"]: r["plan"] for r in compared if "auto" in r["rival"]}.items():
        print(f"  {name} = {plan}")
    print(f"  {speed}")
    for method in dict.fromkeys(b["method"] for b in bounds):
        own = {b["bound"]: b for b in bounds if b["method"] == method}
        step = next(iter(own.values()))
        allowed = ", ".join(f"{bound} {b['allowed_images_per_s']:,.0f}" for bound, b in own.items())
        print(
            f"  a step of {method} ({step['step_images']} images): {step['step_bytes'] / 1e6:,.2f} MB, "
            f"{step['step_flops'] / 1e9:,.3f} GFLOP; images/s allowed by {allowed}",
            flush=True,
        )


# -- workloads -------------------------------------------------------------------------------------------------
def executors(bench: Bench, name: str) -> None:
    """FedAvg on each executor beside the bare loop."""
    work, device = bench.load(name), bench.device
    rivals = {"bare loop": partial(Bare, work, device)} | ours(work, bench.args.executors, device)
    bench.compare(str(work), work, rivals, "bare loop", len(work.schedule))


def pgfed(bench: Bench) -> None:
    """Compare PGFed with FedAvg at 5 local epochs.  Two rounds are for warm-up: PGFed's first round is FedAvg's."""
    for name, momentum in (("cnn", 0.9), ("mlp", 0.0)):
        work = bench.load(name).doing(epochs=5, momentum=momentum)
        candidates = work.plans("auto", bench.device)
        rivals = {
            f"{a.__name__.lower()} auto": partial(Ours, work, candidates, bench.device, a()) for a in (FedAvg, PGFed)
        }
        title = f"pgfed against fedavg, {name}, 5 local epochs, momentum {momentum}"
        bench.compare(title, work, rivals, base="fedavg auto", rounds=len(work.schedule), warmup=2)


def scale(bench: Bench) -> None:
    bench.add(curves(over_clients(bench.args.clients), bench.device, bench.args.rounds))


def growth(bench: Bench) -> None:
    widths = {model: bench.args.widths or own for model, own in WIDTHS.items()}
    for lines in (over_cohorts(bench.args.cohorts), over_models(widths)):
        bench.add(curves(lines, bench.device, bench.args.rounds))


def ranks(bench: Bench) -> None:
    args = bench.args
    bench.add(rows := table(variants(args.settings, args.processes, args.rounds or 6, args.options)))
    if args.csv:
        write_runs(args.csv, rows, describe_environment())


def all_shares(bench: Bench) -> None:
    for name in SETTINGS:
        bench.add(shares(SETTINGS[name], name, bench.args.rounds or 20, bench.args.tracking))


def modules(bench: Bench) -> None:
    """Compare the executor that auto chooses with the bare loop, for networks of all kinds.

    There is no roofline, because the FLOPs of fused layers are not counted.
    """
    for name in NETWORKS:
        work = bench.cut(Network(name))
        makers: dict[str, Callable[[], Rival]] = {"bare loop": partial(Bare, work, bench.device)}
        makers |= ours(work, ["auto"], bench.device)
        rounds = min(bench.args.rounds or len(work.schedule), len(work.schedule))
        turns = Turns(makers, bench.device).play(rounds)
        bench.add(rows := turns.rows(str(work), "bare loop"))
        bare, auto = rows
        print(
            f"{work}: auto {auto['ratio']:.2f} times the bare loop ({auto['min']:.2f} to {auto['max']:.2f}, n="
            f"{auto['n']}), {auto['images_per_s']:,.0f} to {bare['images_per_s']:,.0f} images/s; "
            f"{turns.rivals['auto'].plan}",
            flush=True,
        )


def gpu(bench: Bench) -> None:
    """Measure PGFed's setting with 25 and 100 clients in all executors and precisions, and then growing cohorts."""
    for clients in (25, 100):
        work = bench.cut(paper(clients, bench.args.data, GPU_ROUNDS))
        every_executor(bench, work)
        precisions(bench, work)
    lines = over_cohorts(bench.args.cohorts, ("fedavg", "pgfed"), ("cnn",))
    bench.add(curves(lines, bench.device, bench.args.rounds))


def every_executor(bench: Bench, work: Workload) -> None:
    """Compare FedAvg and PGFed in all executor plans, and in the one that auto chooses, with the bare loop."""
    rivals: dict[str, Callable[[], Rival]] = {"bare loop": partial(Bare, work, bench.device)}
    each = {name: [plan] for name, plan in every_plan(work, bench.device).items()}
    each["auto"] = work.plans("auto", bench.device)
    for method in (FedAvg, PGFed):
        rivals |= {
            f"{method.__name__.lower()} {name}": partial(Ours, work, candidates, bench.device, method())
            for name, candidates in each.items()
        }
    bench.compare(str(work), work, rivals, base="bare loop", rounds=GPU_ROUNDS, warmup=2)


def precisions(bench: Bench, work: Workload) -> None:
    """Compare TF32 with float32 in the plan that auto chooses; on a CPU, measure float32 only."""
    names = ("float32", "tf32") if bench.device.type == "cuda" else ("float32",)
    candidates = work.plans("auto", bench.device)
    rivals = {
        f"{method.__name__.lower()} auto {precision}": partial(
            Ours, work, candidates, bench.device, method(), precision
        )
        for method in (FedAvg, PGFed)
        for precision in names
    }
    bench.compare(f"{work}, precisions", work, rivals, base="fedavg auto float32", rounds=GPU_ROUNDS, warmup=2)


WORKLOADS: dict[str, Callable[[Bench], None]] = {
    **{name: partial(executors, name=name) for name in FILES},
    "many1000": partial(executors, name="many"),
    "pgfed": pgfed,
    "scale": scale,
    "growth": growth,
    "shares": all_shares,
    "ranks": ranks,
    "modules": modules,
    "gpu": gpu,
}


# -- the command line ------------------------------------------------------------------------------------------
def parsed(argv: list[str]) -> argparse.Namespace:
    """Return the parsed arguments, and ``argv`` itself as ``words``; exit with a message if one is invalid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="workload", help=", ".join(WORKLOADS))
    parser.add_argument("--files", type=Path, help="folder with the fixed workloads mlp.json, many1000.json, cnn.json")
    parser.add_argument("--data", type=Path, help="folder with cifar10_jpeg.npz, for cnn.json and gpu")
    parser.add_argument("--executors", nargs="+", default=["auto", "loop", "threads", "vmap"])
    parser.add_argument("--rounds", type=int, help="at most this many rounds, the first for warm-up")
    parser.add_argument("--samples", type=int, help="at most this many training samples a client, to try things out")
    parser.add_argument(
        "--clients", type=int, nargs="+", default=[100, 1000, 10_000, 100_000, 1_000_000], help="N of scale"
    )
    parser.add_argument("--cohorts", type=int, nargs="+", default=[6, 25, 100, 400], help="clients a round of growth")
    parser.add_argument("--widths", type=int, nargs="+", help="of the models of growth, in place of each model's own")
    parser.add_argument("--settings", nargs="+", default=[*SHARED], choices=[*SHARED], help="of ranks")
    parser.add_argument("--processes", type=int, nargs="+", default=[*PROCESSES], help="of ranks")
    parser.add_argument(
        "--options",
        nargs="+",
        action="append",
        default=[],
        help="of ranks: also with these, such as hardware.rows=sharded; may be repeated for other lines",
    )
    parser.add_argument("--tracking", default="disabled", help="of shares: disabled, offline, ...")
    parser.add_argument("--device", help="cpu, cuda, cuda:1; default: cuda where there is one")
    parser.add_argument("--csv", type=Path, help="of ranks: also write the runs.csv of a page of results")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args(argv)
    args.words = argv
    args.workloads = args.workloads or ["mlp", "many", "cnn", "pgfed"]
    if unknown := [name for name in args.workloads if name not in WORKLOADS]:
        parser.error(f"there is no workload {unknown[0]}; there are {', '.join(WORKLOADS)}")
    if args.rounds is not None and args.rounds < 2:
        parser.error(f"--rounds {args.rounds}: at least 2, the first is for warm-up")
    if "gpu" in args.workloads and not torch.cuda.is_available() and not (args.device == "cpu" and args.rounds):
        parser.error("gpu needs a CUDA device, and there is none here; --device cpu --rounds 2 tries it on a CPU")
    return args


def main(argv: list[str] | None = None) -> None:
    """Measure the workloads of a command line; None for the arguments of the process."""
    args = parsed(sys.argv[1:] if argv is None else argv)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.index is not None:
        torch.cuda.set_device(device)
    bench = Bench(args, device)
    for name in args.workloads:
        WORKLOADS[name](bench)


def write(path: Path, bench: Bench) -> None:
    """Write the results to a JSON file.

    Its keys are surroundings (machine, commit, dirty, versions, command, started), rates (of the machine; null if not
    measured) and rows (with the keys in bench_clock.PROMISED and others).
    """
    command = shlex.join(["python", "scripts/benchmark.py", *bench.args.words])
    about = describe_environment() | {"command": command, "started": bench.started}
    path.write_text(json.dumps({"surroundings": about, "rates": bench.rates, "rows": bench.rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
