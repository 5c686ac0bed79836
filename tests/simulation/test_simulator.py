"""A whole run: its files, that it repeats byte for byte, and that nothing is lost however it is stopped."""

from __future__ import annotations

import copy
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from omegaconf import DictConfig
from tiny import compose

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.pgfed import PGFed
from fedbench.config.choices import named_classes
from fedbench.core.options import ConfigError, RunError
from fedbench.core.settings import to_dict
from fedbench.core.split import Split
from fedbench.data.base import Arrays
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.simulation import build, checkpoint, simulator
from fedbench.simulation.simulator import Simulation, run
from fedbench.tasks.classification import Classification

OPTIONS = [
    "algorithm=pgfed",
    "model.hidden=[8]",
    "partition.num_clients=6",
    "partition=dirichlet",
    "partition.alpha=1",
    "rounds=4",
    "clients_per_round=3",
    "local.epochs=1",
    "local.batch_size=64",
    "optimizer.momentum=0.9",
    "optimizer.reset=never",
    "dataset.val_fraction=0.2",
    "tracking=disabled",
    "hardware.device=cpu",
    "hardware.executor=vmap",
    "checkpoint.every=1",
]
TABLES = ("metrics.csv", "clients.csv")


def config(*overrides: str) -> DictConfig:
    return compose([*OPTIONS, *overrides])


def table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def same_tables(a: Path, b: Path) -> None:
    for name in TABLES:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    run(config(), folder)
    return folder


# -- the record ------------------------------------------------------------------------------------------
class Adapted(FedAvg):
    """Clients deploy the server's row after a training of their own."""

    def personalized(self, cohort, final):
        return cohort.train(cohort.broadcast(w=self.w).w).theta


class Late(FedAvg):
    """Clients deploy the server's row from the second round on."""

    def personalized(self, cohort, final):
        return self.w + 0.1 * (cohort.round == 0)


def test_global_scores_are_the_servers_whatever_clients_deploy(tmp_path: Path) -> None:
    """Adapted is FedAvg until it deploys: global/* are FedAvg's, to the byte, and personal/* are others."""
    same = {}
    for name in ("FedAvg", "Adapted", "Late"):
        cls = "fedbench.algorithms.fedavg.FedAvg" if name == "FedAvg" else f"{__name__}.{name}"
        cfg = config("algorithm=fedavg", "rounds=2", f"algorithm._target_={cls}")
        (tmp_path / name).mkdir()
        same[name] = run(cfg, tmp_path / name)["personal_is_global"]
    assert same == {"FedAvg": True, "Adapted": False, "Late": False}
    original, adapted, late = (table(tmp_path / name / "clients.csv") for name in same)
    for row, other in zip(original, adapted, strict=True):
        assert row["global/loss"] == row["personal/loss"] == other["global/loss"] != other["personal/loss"]
    assert [row["global/loss"] == row["personal/loss"] for row in late] == [row["round"] == "2" for row in late]


def test_a_run_leaves_its_files(whole: Path) -> None:
    assert {
        "metrics.csv",
        "clients.csv",
        "costs.csv",
        "summary.json",
        "partition.npz",
        "partition.json",
        "checkpoint.pt",
        "checkpoint.prev.pt",
    } <= set(os.listdir(whole))
    metrics, clients, costs = (table(whole / f"{name}.csv") for name in ("metrics", "clients", "costs"))
    assert [int(r["round"]) for r in metrics] == [1, 2, 3, 4] == [int(r["round"]) for r in costs]
    assert [(int(r["round"]), int(r["client"])) for r in clients] == [(r, i) for r in range(1, 5) for i in range(6)]
    summary = json.loads((whole / "summary.json").read_text())
    split = Split.load(whole / "partition.npz")
    assert summary["partition_hash"] == split.hash == json.loads((whole / "partition.json").read_text())["hash"]
    assert summary["status"] == "finished" and summary["algorithm"] == "pgfed" and summary["cohort"] == 3
    for r in clients[:6]:
        assert int(r["n_train"]) == split.train.sizes[int(r["client"])]
        assert int(r["n_test"]) == split.test.sizes[int(r["client"])]


def test_the_columns_fit_together(whole: Path) -> None:
    """Means over clients are those of clients.csv; best, last and best by validation are rows of metrics.csv."""
    metrics, clients = table(whole / "metrics.csv"), table(whole / "clients.csv")
    summary, split = json.loads((whole / "summary.json").read_text()), Split.load(whole / "partition.npz")
    for row in metrics:
        own = [c for c in clients if c["round"] == row["round"]]
        for name in ("personal/accuracy", "personal/loss", "global/accuracy", "val/accuracy"):
            each = np.array([float(c[name]) for c in own])
            part = split.val if name.startswith("val") else split.test
            n = part.sizes[[int(c["client"]) for c in own]]
            assert float(row[name]) == pytest.approx(each.mean())
            assert float(row[f"{name}_weighted"]) == pytest.approx((each * n).sum() / n.sum())
    scores = [float(r["personal/accuracy"]) for r in metrics]
    val = [float(r["val/accuracy"]) for r in metrics]
    assert summary["best"]["round"] == 1 + int(np.argmax(scores)) and summary["best"]["metric"] == "personal/accuracy"
    assert summary["best_val"]["round"] == 1 + int(np.argmax(val))
    assert summary["last"]["personal/accuracy"] == scores[-1]
    assert summary["best"]["values"]["personal/accuracy"] == max(scores)


def test_costs_are_the_methods_account(whole: Path) -> None:
    """Samples of the cohort's local epoch; bytes as in test_algorithms; sums in the summary."""
    split, costs = Split.load(whole / "partition.npz"), table(whole / "costs.csv")
    cost = json.loads((whole / "summary.json").read_text())["cost"]
    for r, row in enumerate(costs):
        ids = build.draw_cohort(0, r, 6, 3)
        assert int(row["samples"]) == split.train.sizes[ids].sum() and int(row["cohort"]) == 3
        size = (64 * 8 + 8) + (8 * 10 + 10)
        assert int(row["bytes_down"]) == 3 * 4 * (size if r == 0 else 3 * size + 3)
        assert int(row["bytes_up"]) == 3 * 4 * (2 * size + 1 + 3 * (r > 0))
    for name in ("samples", "steps", "bytes_down", "bytes_up"):
        assert cost[name] == sum(int(row[name]) for row in costs)


def test_a_run_repeats_byte_for_byte_and_a_seed_matters(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "again").mkdir(), (tmp_path / "other").mkdir()
    run(config(), tmp_path / "again")
    same_tables(tmp_path / "again", whole)
    run(config("seed=1", "rounds=1"), tmp_path / "other")
    assert (tmp_path / "other" / "clients.csv").read_text().splitlines()[1:7] != (
        whole / "clients.csv"
    ).read_text().splitlines()[1:7]
    assert (tmp_path / "other" / "partition.npz").read_bytes() == (whole / "partition.npz").read_bytes()


def test_evaluation_now_and_then_and_of_some(whole: Path, tmp_path: Path) -> None:
    """eval.every and eval.clients choose rows of the tables; they change no number in them (but the last digits of a
    loss where a processor multiplies fewer matrices at once in another order)."""
    run(config("eval.every=3", "eval.clients=2"), tmp_path)
    rows, full = table(tmp_path / "clients.csv"), table(whole / "clients.csv")
    assert [int(r["round"]) for r in table(tmp_path / "metrics.csv")] == [3, 4]
    assert len(rows) == 4 and len({r["client"] for r in rows}) == 2
    for row in rows:
        (same,) = (r for r in full if (r["round"], r["client"]) == (row["round"], row["client"]))
        assert {k: float(v) for k, v in row.items() if v} == pytest.approx({k: float(v) for k, v in same.items() if v})
    assert len(table(tmp_path / "costs.csv")) == 4


# -- stopped and resumed ---------------------------------------------------------------------------------
DRIVER = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from fedbench.simulation import checkpoint, simulator
from fedbench.app.compose import compose

def die():
    os.kill(os.getpid(), signal.SIGKILL)

folder, *places = sys.argv[1].split("|")
for where in places:                        # a process each, forked after the imports and before any work
    if not (child := os.fork()):
        break
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, where
else:
    sys.exit()

calls = []
def after(real, count):
    def wrapped(*args, **how):
        calls.append(where)
        if len(calls) == count:
            die()
        return real(*args, **how)
    return wrapped

if where == "round":                        # in the middle of round 3
    from fedbench.algorithms.pgfed import PGFed
    PGFed.train = after(PGFed.train, 2)
elif where == "before the checkpoint":      # the rows of round 2 are written, its state is not
    checkpoint.save = after(checkpoint.save, 2)
elif where == "while writing":              # half of the third checkpoint is on disk, slowly
    real = torch.save
    def slow(state, file):
        calls.append(where)
        if len(calls) < 3:
            return real(state, file)
        import io
        whole = io.BytesIO()
        real(state, whole)
        file.write(whole.getvalue()[:whole.tell() // 2])
        file.flush()
        os.fsync(file.fileno())
        die()
    torch.save = slow
elif where == "between renames":            # checkpoint.pt has moved to checkpoint.prev.pt, nothing has its place
    real = os.replace
    def replace(a, b):
        real(a, b)
        if Path(b).name == checkpoint.PREVIOUS:
            die()
    os.replace = replace
elif where == "during an evaluation":       # clients.csv lacks the second round's rows, metrics.csv has them
    from fedbench.simulation.callbacks.tables import Tables
    Tables.add_clients = after(Tables.add_clients, 2)
simulator.run(compose(sys.argv[2:]), Path(folder) / where)
"""
PLACES = ("round", "before the checkpoint", "while writing", "between renames", "during an evaluation")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run killed with -9 at each place."""
    folder = tmp_path_factory.mktemp("killed")
    for place in PLACES:
        (folder / place).mkdir()
    (folder / "driver.py").write_text(DRIVER)
    done = subprocess.run(
        [sys.executable, str(folder / "driver.py"), "|".join([str(folder), *PLACES]), *OPTIONS],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr.decode()
    return {place: folder / place for place in PLACES}


@pytest.mark.parametrize("place", PLACES)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(place: str, killed: dict[str, Path], whole: Path) -> None:
    """kill -9 in a round, beside a checkpoint, and at the worst moments of writing one, then resume: the tables are
    those of the uninterrupted run, byte for byte."""
    folder = killed[place]
    assert json.loads((folder / "summary.json").read_text())["status"] == "running"
    before = [p for p in TABLES if not (folder / p).exists() or (folder / p).read_bytes() != (whole / p).read_bytes()]
    assert before
    result = run(config(), folder, resume=True)
    same_tables(folder, whole)
    assert result["status"] == "finished" and result["rounds_done"] == 4
    mine, theirs = (checkpoint.load(f) for f in (folder, whole))
    assert torch.equal(mine["algorithm"]["w"], theirs["algorithm"]["w"])
    for name in theirs["rows"]:
        assert torch.equal(mine["rows"][name]["rows"], theirs["rows"][name]["rows"]), name
    finished, uninterrupted = (json.loads((f / "summary.json").read_text()) for f in (folder, whole))
    for name in ("last", "best", "best_val", "partition_hash", "config_hash", "executor"):
        assert finished[name] == uninterrupted[name], name
    assert [r["samples"] for r in table(folder / "costs.csv")] == [r["samples"] for r in table(whole / "costs.csv")]
    assert finished["cost"]["samples"] == uninterrupted["cost"]["samples"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2])
def test_a_signal_finishes_the_round_and_saves(
    number: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, before = PGFed.train, signal.default_int_handler
    outside = signal.signal(number, before)  # a job in the background begins with SIGINT ignored

    def signalled(self, *args) -> Any:
        os.kill(os.getpid(), number)
        return real(self, *args)

    with monkeypatch.context() as m:
        m.setattr(PGFed, "train", signalled)  # first called in round 2
        with pytest.raises(KeyboardInterrupt):
            run(config("checkpoint.every=0"), tmp_path)
    assert checkpoint.load(tmp_path)["round"] == 2
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "running"
    assert signal.signal(number, outside) == before
    run(config("checkpoint.every=0"), tmp_path, resume=True)
    same_tables(tmp_path, whole)


def test_a_truncated_checkpoint_gives_way_to_the_one_before(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    path = tmp_path / "run" / checkpoint.NAME
    path.write_bytes(path.read_bytes()[:1000])
    assert run(config(), tmp_path / "run", resume=True)["status"] == "finished"  # round 4 once more
    same_tables(tmp_path / "run", whole)


def test_a_finished_run_can_be_prolonged(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    run(config("rounds=5"), tmp_path / "run", resume=True)
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert rows[:5] == (whole / "metrics.csv").read_text().splitlines() and len(rows) == 6


def test_a_resumed_run_keeps_its_executor(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hardware.executor=auto chooses once; bit-exactness needs the same way of computing."""
    shutil.copytree(whole, tmp_path / "run")
    monkeypatch.setattr(build, "choose_executor", lambda *args: pytest.fail("timed again"))
    result = run(config("rounds=5", "hardware.executor=auto"), tmp_path / "run", resume=True)
    assert result["executor"] == json.loads((whole / "summary.json").read_text())["executor"]


def test_auto_is_as_good_as_its_choice(tmp_path: Path) -> None:
    """What was timed leaves no trace, kept momentum included."""
    (tmp_path / "auto").mkdir(), (tmp_path / "named").mkdir()
    chosen = run(config("rounds=2", "hardware.executor=auto"), tmp_path / "auto")["executor"]
    run(
        config(
            "rounds=2",
            f"hardware.executor={chosen['name']}",
            f"hardware.chunk={chosen['chunk'] or 'null'}",
            f"hardware.threads={max(chosen['workers'], chosen['intra'])}",
        ),
        tmp_path / "named",
    )
    same_tables(tmp_path / "auto", tmp_path / "named")


def test_data_that_changed_is_refused(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their digest; where a checkpoint of an older version has none, by the partition that they give."""
    shutil.copytree(whole, tmp_path / "run")
    real = build.load

    def changed(cfg: DictConfig) -> Arrays:
        arrays = real(cfg)
        arrays.targets[:100] = (arrays.targets[:100] + 1) % 10
        return arrays

    monkeypatch.setattr(build, "load", changed)
    with pytest.raises(ConfigError, match=r"resume=.*the data have changed since the run began \(digest"):
        run(config(), tmp_path / "run", resume=True)
    saved = checkpoint.load(whole)
    del saved["data_hash"], saved["file"]
    checkpoint.save(tmp_path / "run", saved)
    with pytest.raises(ConfigError, match=r"resume=.*the data files have changed, because their partition is"):
        run(config(), tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    "override",
    ["optimizer.lr=0.2", "seed=1", "local.batch_size=32", "model.hidden=[9]", "partition.alpha=2", "eval.every=2"],
)
def test_another_config_is_refused(override: str, whole: Path, tmp_path: Path) -> None:
    """What an edited config.yaml comes to: the checkpoint was made with another one."""
    shutil.copytree(whole, tmp_path / "run")
    key = override.split("=")[0]
    with pytest.raises(ConfigError, match=rf"differs from the configuration of the checkpoint \({key}=.* \(was: ") as e:
        run(config(override), tmp_path / "run", resume=True)
    assert "\n" not in str(e.value)
    same_tables(tmp_path / "run", whole)


def test_another_label_is_refused(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    cfg = config()
    cfg.choices.algorithm = "fedavg"
    with pytest.raises(ConfigError, match=r"choices\.algorithm='fedavg' \(was: 'pgfed'\)"):
        run(cfg, tmp_path / "run", resume=True)


def test_rounds_of_a_schedule_do_not_grow_by_an_edit(tmp_path: Path) -> None:
    run(config("rounds=2", "optimizer.schedule.name=cosine"), tmp_path)
    with pytest.raises(ConfigError, match=r"rounds=3 cannot replace 2"):
        run(config("rounds=3", "optimizer.schedule.name=cosine"), tmp_path, resume=True)
    with pytest.raises(ConfigError, match=r"rounds=1 is less than the run's 2"):
        run(config("rounds=1", "optimizer.schedule.name=cosine"), tmp_path, resume=True)


def foreign_ids(state: dict[str, Any]) -> None:
    next(iter(state["rows"].values()))["ids"][0] = 6


def repeated_ids(state: dict[str, Any]) -> None:
    ids = next(rows["ids"] for rows in state["rows"].values() if len(rows["ids"]) > 1)
    ids[0] = ids[1]


def narrow_rows(state: dict[str, Any]) -> None:
    rows = next(iter(state["rows"].values()))
    rows["rows"] = rows["rows"][:, :-1]


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda state: state.update(round=99), "the checkpoint is damaged, because its round is 99 of 4"),
        (lambda state: state.update(round=-3), "the checkpoint is damaged, because its round is -3 of 4"),
        (lambda state: state.update(round=True), "the checkpoint is damaged, because its round is True of 4"),
        (lambda state: state.update(algorithm={}), "does not fit the run (it has no entry 'w')"),
        (
            lambda state: state["algorithm"].update(w=state["algorithm"]["w"][:-1]),
            "the tensor 'w' of the checkpoint is torch.float32 (609,), but the method now has",
        ),
        (
            lambda state: state["algorithm"].update(w=state["algorithm"]["w"].double()),
            "the tensor 'w' of the checkpoint is torch.float64 (610,), but the method now has",
        ),
        (lambda state: state.update(rows={}), "does not fit the run (it has no "),
        (
            lambda state: state["rows"].update(x=next(iter(state["rows"].values()))),
            "the checkpoint has the state x, which the method does not create",
        ),
        (lambda state: state.update(record="[1"), "does not fit the run (Expecting"),
        (foreign_ids, "must belong to different clients from 0 to 5"),
        (repeated_ids, "must belong to different clients from 0 to 5"),
        (narrow_rows, "the method now needs torch.float32"),
    ],
)
@pytest.mark.parametrize("digest", [True, False])
def test_what_no_run_saves_is_refused(edit: Any, words: str, digest: bool, whole: Path, tmp_path: Path) -> None:
    """Also where a checkpoint of an older version carries no digest."""
    shutil.copytree(whole, tmp_path / "run")
    state = {name: value for name, value in checkpoint.load(whole).items() if name not in ("digest", "file")}
    state = copy.deepcopy(state)
    edit(state)
    if digest:
        checkpoint.save(tmp_path / "run", state)
    else:
        torch.save(state, tmp_path / "run" / checkpoint.NAME)
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        run(config(), tmp_path / "run", resume=True)
    assert str(error.value).startswith(f"resume={tmp_path / 'run'}: ") and "\n" not in str(error.value)
    same_tables(tmp_path / "run", whole)


def test_server_state_returns_to_the_device(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are read to host memory; state that does not exist before the first round (PGFed's G) has no
    device to go back to but the run's."""
    saved = checkpoint.load(whole)
    sim = simulator.prepare(config(), whole, None)
    sim.algorithm.w = sim.algorithm.w.to("meta")  # stands for a GPU here
    monkeypatch.setattr(Engine, "device", torch.device("meta"))
    sim.load(saved)
    assert {t.device.type for t in sim.algorithm.state_dict().values()} == {"meta"}
    assert {"G", "c", "gbar", "prev", "w"} <= sim.algorithm.state_dict().keys()


# -- mistakes --------------------------------------------------------------------------------------------
def test_a_loss_that_is_not_finite_ends_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"client \d+ .* in round \d: optimizer.lr=1e\+09"):
        run(config("optimizer.lr=1e9"), tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    "override, sentence",
    [
        ("clients_per_round=7", r"clients_per_round=7 must be at most the number of training clients, 6"),
        ("model=fedavg_cnn", r"model=fedavg_cnn needs images of at least 16x16, but the data set gives \(1, 8, 8\)"),
        ("finetune.epochs=1 finetune.part=neck", r"finetune.part needs the parameter group 'neck'.*base, head"),
        ("hardware.device=cuda:99", r"hardware.device=cuda:99"),
        ("algorithm=scaffold", r"algorithm=scaffold needs plain SGD"),
    ],
)
def test_what_cannot_be_is_one_sentence(override: str, sentence: str, tmp_path: Path) -> None:
    options = [o for o in OPTIONS if override != "model=fedavg_cnn" or not o.startswith("model.")]
    with pytest.raises(ConfigError, match=sentence) as error:
        run(compose([*options, *override.split()]), tmp_path)
    assert "\n" not in str(error.value)


# -- cohorts ---------------------------------------------------------------------------------------------
def test_cohorts_are_drawn_by_seed_and_round_alone() -> None:
    drawn = [build.draw_cohort(0, r, 20, 5) for r in range(200)]
    assert all(len(set(c)) == 5 and (np.diff(c) > 0).all() for c in drawn)
    assert (build.draw_cohort(0, 3, 20, 5) == drawn[3]).all()
    assert any((build.draw_cohort(1, r, 20, 5) != drawn[r]).any() for r in range(3))
    share = np.bincount(np.concatenate(drawn), minlength=20) / 200
    assert abs(share - 0.25).max() < 0.1
    assert build.draw_cohort(0, 0, 4, 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "rate, n, size", [(0.25, 20, 5), (0.1, 6, 1), (0.001, 6, 1), (1.0, 6, 6), (0.7, 10, 7), (0.29, 100, 29)]
)
def test_the_cohorts_size(rate: float, n: int, size: int) -> None:
    """max(1, floor(N rate)), without 0.29 x 100 = 28.999..."""
    assert build.cohort_size(compose([f"sample_rate={rate}"]), n) == size


def test_every_method_meets_the_same_clients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    met: dict[str, list] = {"fedavg": [], "scaffold": []}
    for name, seen in met.items():
        real = Cohort.__init__

        def init(self, engine: Engine, ids, round, mode="round", dropped=0, real=real, seen=seen) -> None:
            if mode == "round":
                seen.append(list(ids))
            real(self, engine, ids, round, mode, dropped)

        (tmp_path / name).mkdir()
        with monkeypatch.context() as m:
            m.setattr(Cohort, "__init__", init)
            run(config(f"algorithm={name}", "optimizer.momentum=0"), tmp_path / name)
    assert met["fedavg"] == met["scaffold"] and len(met["fedavg"]) == 4


def test_the_summary_names_the_classes_that_ran(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ones_method.py").write_text("from fedbench.algorithms.fedavg import FedAvg\nclass Mine(FedAvg): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "classes" not in json.loads((whole / "summary.json").read_text())
    cfg = config("algorithm._target_=ones_method.Mine", "rounds=1", "tracking=disabled")
    found = run(cfg, tmp_path, command_entries={"classes": named_classes(to_dict(cfg))})
    assert (found["name"], found["algorithm"], found["model"]) == ("Mine", "Mine", cfg.choices.model)
    assert found["classes"] == {"algorithm": "ones_method.Mine"}


def test_notes_keep_the_first_best_round() -> None:
    sim = Simulation.__new__(Simulation)
    sim.best, sim.best_val, sim.engine = None, None, SimpleNamespace(task=Classification())
    for done, score, val in [(1, float("nan"), 0.1), (2, 0.5, 0.3), (3, 0.7, 0.3), (4, 0.7, float("nan"))]:
        sim.done = done
        sim.record_metrics({"personal/accuracy": score, "val/accuracy": val})
    assert sim.best["round"] == 3 and sim.best_val["round"] == 2 and sim.last["personal/accuracy"] == 0.7


def test_uniform_means_for_methods_that_take_means(tmp_path: Path) -> None:
    """Another model than by samples."""
    for weights in ("samples", "uniform"):
        (tmp_path / weights).mkdir()
        run(config("algorithm=fedavg", "rounds=1", f"weights={weights}"), tmp_path / weights)
    samples, uniform = (checkpoint.load(tmp_path / weights)["algorithm"]["w"] for weights in ("samples", "uniform"))
    assert not torch.allclose(samples, uniform)


@pytest.mark.parametrize("algorithm", ["fedamp", "scaffold"])
def test_uniform_means_are_refused_where_they_change_nothing(algorithm: str, tmp_path: Path) -> None:
    """The server takes no mean, or one that is uniform by the method."""
    said = f"client_weights=uniform has no effect: algorithm={algorithm} does not average clients by number of"
    with pytest.raises(ConfigError, match=said):
        run(config(f"algorithm={algorithm}", "rounds=1", "client_weights=uniform", "optimizer.momentum=0"), tmp_path)
