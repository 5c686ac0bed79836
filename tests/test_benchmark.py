"""The benchmark counts what it says, times what it should, and writes rows that hold what they promise."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import CPU

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.pgfed import PGFed
from fedbench.models.fedavg_cnn import FedAvgCNN
from fedbench.models.mlp import MLP
from fedbench.simulation.environment import peak_memory

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import bench_clock
import bench_growth
import bench_ranks
import bench_roofline
import bench_shares
import bench_work
import benchmark

GPU = torch.device("cuda")


def tiny_workload(name: str = "tiny", sizes: tuple = (25, 14, 9), **work: Any) -> bench_work.Workload:
    """Digits by three clients, two of them a round, in batches that do not divide what they have."""
    train = [np.arange(n) + 50 * i for i, n in enumerate(sizes)]
    split = bench_work.split_of(train, [t[:2] for t in train])
    return bench_work.Workload(
        name,
        bench_work.digits(),
        split,
        [[0, 2], [1, 2], [0, 1], [0, 2]],
        {"batch_size": 10, "epochs": 2, "lr": 0.05, **work},
        "mlp",
        8,
    )


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's rates measured on almost nothing."""
    monkeypatch.setattr(benchmark, "machine", lambda device: bench_roofline.machine(device, 1, 32))


# -- the roofline --------------------------------------------------------------------------------------------
def test_bytes_of_a_step_by_hand() -> None:
    """64-64-10 has 4,810 numbers: 5 rows of 19,240 bytes for a client without momentum, 2 more with; PGFed reads its
    aux as well, and all its clients one gbar."""
    row = 4 * (64 * 64 + 64 + 64 * 10 + 10)
    assert row == 19_240
    work = bench_work.generated("mlp")
    assert (work.cohort, work.work["batch_size"]) == (20, 10)
    moving = work.doing(momentum=0.9)
    assert bench_roofline.Step.of("fedavg", work).moved == 20 * 5 * row
    assert bench_roofline.Step.of("fedavg", moving).moved == 20 * 7 * row
    assert bench_roofline.Step.of("pgfed", moving).moved == (20 * 8 + 1) * row


def test_flops_of_an_image_by_hand() -> None:
    """A product forward, and two backward: for its weights and, behind the first layer, for its input."""
    layers = 2 * 64 * 64, 2 * 64 * 10
    assert bench_roofline.image_flops(MLP((64,), 10), (64,), 10) == 2 * layers[0] + 3 * layers[1]
    conv = 2 * 32 * 3 * 25 * 28 * 28, 2 * 64 * 32 * 25 * 10 * 10
    linear = 2 * 64 * 5 * 5 * 512, 2 * 512 * 10
    found = bench_roofline.image_flops(FedAvgCNN((3, 32, 32), 10), (3, 32, 32), 4)
    assert found == 2 * conv[0] + 3 * (conv[1] + sum(linear))
    step = bench_roofline.Step.of("pgfed", bench_work.generated("mlp").doing(batch_size=5).cut(5))
    assert (step.images, step.flops) == (20 * 5, 20 * 5 * (2 * layers[0] + 3 * layers[1]))


def test_what_a_machine_allows_by_hand() -> None:
    """1,000 bytes and 500 FLOPs for 20 images: 2,000 bytes/s allow 40 images/s, 100 FLOP/s allow 4."""
    step = bench_roofline.Step("fedavg", 1000, 500.0, 20)
    found = bench_roofline.Machine(2000.0, {"float32": 100.0, "tf32": 1000.0})
    assert step.allows(found, "float32") == {"bytes": 40.0, "float32 products": 4.0}
    assert step.allows(found, "tf32") == {"bytes": 40.0, "tf32 products": 40.0}


def test_rates_count_both_directions_and_both_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_roofline, "least", lambda device, work: work() is None or 0.5)
    assert bench_roofline.copy_rate(CPU, 1000) == 2 * 4 * 1000 / 0.5
    assert bench_roofline.product_rate(CPU, "float32", 10) == 2 * 10**3 / 0.5


def test_a_machine_is_measured_on_all_cores_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def least(device: torch.device, work: Callable) -> float:
        threads.append(torch.get_num_threads())
        return 1.0

    monkeypatch.setattr(bench_roofline, "least", least)
    monkeypatch.setattr(bench_roofline, "cores", lambda: 2)
    bench_roofline.machine(CPU, 1, 8)
    assert threads == [2, 2] and torch.get_num_threads() == 1


# -- time and memory -----------------------------------------------------------------------------------------
def test_a_clock_of_the_processor_does_not_count_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the clock of the wall does."""
    wall, processor = [0.0], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: wall[0])
    monkeypatch.setattr(time, "process_time", lambda: processor[0])

    def wait() -> str:
        wall[0] += 5
        processor[0] += 1
        return "done"

    assert bench_clock.Clock(CPU)(wait) == ("done", 5)
    assert bench_clock.Clock(CPU, processor=True)(wait) == ("done", 1)


def test_on_a_gpu_events_are_recorded_around_the_work_and_awaited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Event:
        made = 0

        def __init__(self, enable_timing: bool):
            assert enable_timing
            self.name = ("begin", "end")[Event.made]
            Event.made += 1

        def record(self) -> None:
            said.append(self.name)

        def synchronize(self) -> None:
            said.append(f"await {self.name}")

        def elapsed_time(self, other: Any) -> float:
            assert (self.name, other.name) == ("begin", "end")
            return 250.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert bench_clock.Clock(GPU)(lambda: said.append("work") or 7) == (7, 0.25)
    assert said == ["begin", "work", "end", "await end"]


class Memory:
    """Stands in for the GPU's allocator: bytes held now, and the most since the last reset."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = self.most = 0
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.now)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.most)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(self, "most", self.now))

    def work(self, keeps: int, takes: int = 0) -> Callable[[], None]:
        """Some work that takes so many bytes on top of what it keeps."""

        def do() -> None:
            self.now += keeps
            self.most = max(self.most, self.now + takes)

        return do


def test_memory_of_a_rival_leaves_out_what_the_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """One holds 10 MB and takes 1 for a round and 3 for the next; the other holds 100 MB, 1 more after its round, and
    takes 2: 13 and 103.  A third once took 500."""
    memory, mb = Memory(monkeypatch), 2**20
    small, large, greedy = (bench_clock.Meter(GPU) for _ in range(3))
    greedy(memory.work(0, 500 * mb))
    small(memory.work(10 * mb))
    large(memory.work(100 * mb))
    for takes in (1, 3):
        small(memory.work(0, takes * mb))
    large(memory.work(mb, 2 * mb))
    assert (small.peak_mb, large.peak_mb, greedy.peak_mb) == (13.0, 103.0, 500.0)
    assert bench_clock.Meter(CPU).peak_mb is None


class Runner:
    """Trains on so many images a round and says how long that takes."""

    precision = "float32"

    def __init__(self, images: int, precision: str = "float32"):
        self.images, self.precision, self.seen = images, precision, []

    def round(self, round: int) -> int:
        self.seen.append((round, torch.backends.cudnn.allow_tf32))
        return self.images * (round + 1)


def test_rivals_take_turns_and_the_first_round_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second for everybody: rates of rounds 1 and 2 are 2 and 3 times those of round 0; each computes in its own
    precision, and float32 is what is left behind."""
    monkeypatch.setattr(bench_clock, "Clock", lambda device: lambda work: (work(), 1.0))
    turns = bench_clock.Turns({"slow": lambda: Runner(10), "fast": lambda: Runner(40, "tf32")}, CPU).play(3)
    assert turns.rates == {"slow": [20.0, 30.0], "fast": [80.0, 120.0]}
    assert turns.rivals["slow"].seen == [(r, False) for r in range(3)]
    assert turns.rivals["fast"].seen == [(r, True) for r in range(3)]
    assert not torch.backends.cudnn.allow_tf32
    slow, fast = turns.rows("title", "slow")
    assert (fast["ratio"], fast["min"], fast["max"], fast["n"], fast["images_per_s"]) == (4.0, 4.0, 4.0, 2, 100.0)
    assert slow["ratio"] == 1.0 and fast["precision"] == "tf32" and {*bench_clock.PROMISED} <= fast.keys()


# -- workloads -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_bare_loop_trains_on_as_many_images_as_a_method(drop_last: bool) -> None:
    """25 and 9 samples in batches of 10, two epochs: 68, or 58 without what is left over of a whole batch."""
    work = tiny_workload(drop_last=drop_last)
    ours = bench_work.Ours(work, work.plans("loop", CPU), CPU)
    assert bench_work.Bare(work, CPU).round(0) == ours.round(0) == (58 if drop_last else 68)


def test_the_bare_loop_learns_as_fedavg_does() -> None:
    """Where every batch is a client's whole split, order means nothing: the rows of the server are the same."""
    work = tiny_workload(sizes=(10, 10, 10), momentum=0.9)
    bare, ours = bench_work.Bare(work, CPU), bench_work.Ours(work, work.plans("vmap", CPU), CPU)
    for r in range(3):
        assert bare.round(r) == ours.round(r) == 40
    learned = torch.cat([p.reshape(-1) for p in bare.model.parameters()])
    torch.testing.assert_close(ours.algorithm.w, learned.detach(), rtol=1e-4, atol=1e-5)


def test_a_workload_can_be_cut_and_given_other_work() -> None:
    work = tiny_workload()
    assert work.cut(10).split.train.sizes.tolist() == [10, 10, 9]
    assert work.doing(epochs=5).work["epochs"] == 5 and work.work["epochs"] == 2


def test_the_papers_setting_is_that_of_its_experiment() -> None:
    """25 clients, 6 of them a round, 45,000 of 60,000 images to train on (the floor for each client)."""
    work = bench_work.paper(25, None, 2)
    assert (work.clients, work.cohort, len(work.schedule)) == (25, 6, 2)
    assert work.work == {
        **{"epochs": 5, "steps": None, "batch_size": 10, "drop_last": True},
        **{"lr": 0.005, "momentum": 0.9},
    }
    assert 45_000 - 25 <= work.split.train.sizes.sum() <= 45_000


# -- growth --------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_line_is_measured_in_a_process_of_its_own() -> None:
    """What this process held does not count there."""
    ballast = np.ones(150 << 20, np.uint8)  # MB
    found = bench_growth.apart(bench_growth.Line("cohort", "pgfed", 6, 3, rounds=4), CPU)
    assert len(found["times"]) == 2 and min(found["times"]) > 0
    assert found["numbers"] == 4810 and found["state_mb"] > 0
    assert found["libraries_mb"] <= found["peak_memory_mb"] < peak_memory(CPU)
    assert len(ballast)


def test_a_line_says_who_trains_on_what(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bench_work.Workload] = []

    def ours(work: bench_work.Workload, plans: list, device: torch.device, algorithm: Any) -> None:
        assert isinstance(algorithm, PGFed)
        found.append(work)
        raise InterruptedError

    monkeypatch.setattr(bench_growth, "Ours", ours)
    with pytest.raises(InterruptedError):
        bench_growth.measured(bench_growth.Line("model", "pgfed", 9, 4, "cnn", 32, rounds=3, momentum=0.9), CPU)
    work = found[0]
    assert (work.clients, work.cohort, len(work.schedule), work.width) == (9, 4, 3, 32)
    assert work.model == "cnn" and work.work["momentum"] == 0.9 and set(work.split.train.sizes) == {20}


def test_curves_compare_every_line_with_the_first_of_its_curve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A cohort of k takes k ms a round."""

    def found(line: bench_growth.Line, device: torch.device) -> dict[str, Any]:
        times = [1.0 * line.cohort] * line.rounds
        return {"times": times, "plan": "p", "numbers": 1, "state_mb": 0.0, "libraries_mb": 0.0, "peak_memory_mb": 9.0}

    monkeypatch.setattr(bench_growth, "apart", found)
    out = bench_growth.curves(bench_growth.over_cohorts([6, 25, 400], models=("mlp",)), CPU, most=3)
    assert [(r["ratio"], r["ms"], r["n"]) for r in out] == [(1.0, 6.0, 3), (25 / 6, 25.0, 3), (400 / 6, 400.0, 3)]
    assert all({*bench_clock.PROMISED} <= r.keys() for r in out) and "400 a round" in capsys.readouterr().out


def test_lines_of_each_curve() -> None:
    cohorts = list(bench_growth.over_cohorts([6, 500]))
    assert {(line.model, line.cohort, line.clients) for line in cohorts} == {
        (m, k, 500) for m in ("mlp", "cnn") for k in (6, 500)
    }
    models = list(bench_growth.over_models({"mlp": (8, 16), "cnn": (32,)}))
    assert [(line.model, line.width) for line in models] == [("mlp", 8), ("mlp", 16), ("cnn", 32)]
    assert [line.cohort for line in bench_growth.over_clients([10, 1000])] == [10, 100, 10, 100]


# -- shares --------------------------------------------------------------------------------------------------
def test_shares_by_hand() -> None:
    """10 s: 3 before, 6 of rounds (4 training, 1 evaluation, so 1 for tracking), 1 after."""
    run = bench_shares.Run(3.0, 6.0, 1.0, [3.0, 1.0], [0.75, 0.25])
    one = bench_shares.Run(3.0, 4.0, 1.0, [3.0], [0.75])
    out = {r["rival"]: r for r in bench_shares.rows("title", one, run)}
    assert {name: r["ratio"] for name, r in out.items()} == pytest.approx(
        {
            "start-up": 0.3,
            "training": 0.4,
            "evaluation": 0.1,
            "tracking and checkpoints": 0.1,
            "the end": 0.1,
            "evaluation, round by round": 0.2,
            "all but training": 1 / 3,
            "a run of one round, less the round": 4.25 / 8,
        }
    )
    assert out["evaluation, round by round"]["n"] == 2
    assert sum(run.parts.values()) == pytest.approx(run.whole)


@pytest.mark.slow
def test_a_real_run_is_divided() -> None:
    run = bench_shares.played(
        [
            "dataset=synthetic",
            "dataset.n=200",
            "partition=iid",
            "partition.num_clients=5",
            "model=logistic",
            "algorithm=fedavg",
            "tracking=disabled",
            "rounds=2",
        ]
    )
    assert len(run.train) == len(run.evaluation) == 2
    assert all(seconds > 0 for seconds in run.parts.values()) and run.processor > 0


def test_a_run_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"python -m fedbench rounds=-1 failed: fedbench: rounds must be"):
        bench_shares.played(["rounds=-1"])


# -- ranks ---------------------------------------------------------------------------------------------------
def test_lines_of_ranks_and_bytes_by_hand() -> None:
    """Options need several processes.  A rank of four gets 3/4 of 8 clients' two rows of 9 numbers and a loss.

    With divided rows, it gets 3/4 of their two losses, and two times 3/4 of the 7 averaged columns.
    """
    found = list(bench_ranks.variants(["cnn"], (1, 2), 3, [["a=1"], ["a=2", "b=3"]]))
    assert [(line.processes, line.options) for line in found] == [(1, ()), (2, ()), (2, ("a=1",)), (2, ("a=2", "b=3"))]
    assert bench_ranks.modelled_bytes(9, 7, 8, 4, trainings=2, is_divided=False) == 2 * 8 * 40 * 3 / 4
    assert bench_ranks.modelled_bytes(9, 7, 8, 4, trainings=2, is_divided=True) == (2 * 8 + 2 * 7) * 4 * 3 / 4
    assert bench_ranks.modelled_bytes(9, 7, 8, 1, trainings=2, is_divided=True) == 0


def test_rows_of_ranks_become_runs_of_a_page(tmp_path: Path) -> None:
    memory = ("peak_memory_mb", "built_memory_mb", "libraries_mb", "rows_mb", "planned_rows_mb")
    numbers = dict.fromkeys(("images_per_s", *memory), 1.5)
    numbers |= {"data_mb": 2.5, "received_mb": 3.5, "modelled_mb": 3.5, "numbers": 7, "averaged": 6, "cohort": 4}
    rows = [
        {"workload": "cnn", "rival": "2", "processes": 2, "options": [], **numbers},
        {"workload": "cnn", "rival": "2 x", "processes": 2, "options": ["hardware.samples=sharded"], **numbers},
    ]
    about = {"commit": "0123456789abcdef", "machine": {"processor": "P", "cores": 2}}
    about["versions"] = {"python": "3.11", "torch": "2.15"}
    bench_ranks.write_runs(tmp_path / "runs.csv", rows, about)
    head, first, second = (tmp_path / "runs.csv").read_text().splitlines()
    assert head.startswith("part,run,method,processes,divided,seed,n,status,form,commit,machine,images_per_s,")
    assert first.startswith(
        'main,cnn 2,cnn,2,nothing,0,1,finished,full,0123456789ab,"P, 2 cores; Python 3.11, torch 2.15",'
    )
    assert second.split(",")[4] == "samples=sharded" and second.endswith(",2.5,3.5,3.5,7,6,4")


def test_settings_of_ranks_are_workloads_with_samples_of_their_own() -> None:
    for name, clients, cohort in (("cnn", 25, 6), ("many10000", 10_000, 100), ("resnet18", 1000, 4)):
        work = bench_ranks.SETTINGS[name].work(2)
        assert (work.clients, work.cohort, len(work.schedule)) == (clients, cohort, 2)
        used = np.concatenate([work.split.train.indices, work.split.test.indices])
        assert len(np.unique(used)) == len(used) == len(work.arrays.targets)


@pytest.mark.slow
def test_two_processes_receive_the_bytes_of_the_model(capsys: pytest.CaptureFixture) -> None:
    found, divided = bench_ranks.table(bench_ranks.variants(["many10000"], [2], 2, [["hardware.rows=sharded"]]))
    assert found["received_mb"] == pytest.approx(found["modelled_mb"]) and found["modelled_mb"] > 0.9
    assert divided["received_mb"] == pytest.approx(divided["modelled_mb"]) and divided["modelled_mb"] < 0.02
    assert divided["rows_mb"] <= 0.6 * found["rows_mb"]
    assert found["rows_mb"] == pytest.approx(198 * 650 * 4 / 2**20, rel=0.02)  # of about 200 clients, on each rank
    assert found["data_mb"] == pytest.approx(220_000 * (64 * 4 + 8) / 2**20)
    assert found["libraries_mb"] < found["peak_memory_mb"] and "many10000 2 processes" in capsys.readouterr().out


@pytest.mark.slow
def test_a_line_that_fails_says_why() -> None:
    line = bench_ranks.Line("many10000", 1, 2, ("algorithm.lam=1",))
    with pytest.raises(RuntimeError, match=r"^many10000 1 processes algorithm.lam=1 failed: .*") as caught:
        bench_ranks.measured(line)
    assert "TypeError: FedPer() takes no arguments" in str(caught.value)


# -- the command line ----------------------------------------------------------------------------------------
def test_a_workload_from_its_command_to_its_file(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = [
        "mlp",
        "--samples",
        "20",
        "--rounds",
        "3",
        "--executors",
        "loop",
        "vmap",
        "--device",
        "cpu",
        "--json",
        str(tmp_path / "rows.json"),
    ]
    benchmark.main(words)
    written = json.loads((tmp_path / "rows.json").read_text())
    assert {"machine", "commit", "dirty", "versions", "command", "started"} <= written["surroundings"].keys()
    assert written["surroundings"]["command"].startswith("python scripts/benchmark.py mlp --samples 20")
    assert written["rates"]["copy_bytes_per_s"] > 0 and written["rates"]["product_flop_per_s"]["float32"] > 0
    rows = written["rows"]
    assert all({*bench_clock.PROMISED} <= r.keys() and r["min"] <= r["ratio"] <= r["max"] for r in rows)
    assert {r["rival"] for r in rows} == {"bare loop", "loop", "vmap"} and {r["n"] for r in rows} == {2}
    bounds = [r for r in rows if "bound" in r]
    assert len(bounds) == 2 * 3
    for r in bounds:
        rate = next(own["images_per_s"] for own in rows if own["rival"] == r["rival"] and "bound" not in own)
        assert r["ratio"] == pytest.approx(rate / r["allowed_images_per_s"])
    printed = capsys.readouterr().out
    assert "bare loop" in printed and "a step of fedavg (200 images): 1.92 MB" in printed


def test_the_checklist_has_every_method_under_every_plan(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried on a CPU and on three clients; what grows is measured elsewhere."""
    asked: list[tuple] = []

    def paper(clients: int, data: Path | None, rounds: int) -> bench_work.Workload:
        return tiny_workload(f"paper {clients}", momentum=0.9)

    def curves(lines: Any, device: torch.device, most: int | None) -> list:
        asked.extend((line.model, line.method, line.cohort) for line in lines)
        return []

    monkeypatch.setattr(benchmark, "paper", paper)
    monkeypatch.setattr(benchmark, "curves", curves)
    bench = benchmark.Bench(benchmark.parsed(["gpu", "--device", "cpu", "--rounds", "3", "--cohorts", "2"]), CPU)
    benchmark.gpu(bench)
    plans = bench_work.every_plan(tiny_workload(), CPU)
    assert len({p.name for p in plans.values()}) == 3
    for title in ("paper 25: 3 clients, 2 a round", "paper 100: 3 clients, 2 a round"):
        assert {r["rival"] for r in bench.rows if r["workload"] == title} == {
            "bare loop",
            *(f"{m} {p}" for m in ("fedavg", "pgfed") for p in (*plans, "auto")),
        }
    assert {(r["rival"], r["method"]) for r in bench.rows if "bound" in r} >= {
        ("bare loop", "fedavg"),
        ("pgfed auto", "pgfed"),
    }
    assert asked == [("cnn", "fedavg", 2), ("cnn", "pgfed", 2)]


def test_a_gpu_is_asked_for_in_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words in (["gpu"], ["mlp", "gpu", "--device", "cpu"], ["gpu", "--rounds", "2"]):
        with pytest.raises(SystemExit):
            benchmark.parsed(words)
        assert "gpu needs a CUDA device, and there is none here; --device cpu --rounds 2" in capsys.readouterr().err
    assert benchmark.parsed(["gpu", "--device", "cpu", "--rounds", "2"]).workloads == ["gpu"]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["mpl"], "there is no workload mpl; there are mlp, many"), (["mlp", "--rounds", "1"], "--rounds 1: at least 2")],
)
def test_mistakes_in_the_command_are_said(words: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        benchmark.parsed(words)
    assert said in capsys.readouterr().err


def test_on_a_gpu_precisions_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 and TF32 for both methods; the rivals are only named here."""
    monkeypatch.setattr(bench_work.Workload, "plans", lambda self, name, device: [])
    bench, asked = SimpleNamespace(device=GPU), []
    bench.compare = lambda title, work, makers, **more: asked.extend(
        (name, maker.keywords or maker.args[-1], type(maker.args[-2])) for name, maker in makers.items()
    )
    benchmark.precisions(bench, tiny_workload())
    assert asked == [(f"{m.__name__.lower()} auto {p}", p, m) for m in (FedAvg, PGFed) for p in ("float32", "tf32")]
