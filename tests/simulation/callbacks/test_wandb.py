"""W&B gets the content of the tables, and can neither prompt, hang nor fail a run."""

import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf

from fedbench.core.options import ConfigError
from fedbench.simulation.callbacks.tables import Tables
from fedbench.simulation.callbacks.wandb import Wandb
from fedbench.simulation.callbacks.wandb_names import run_names, wandb_key_is_configured, wandb_mode

VARIABLES = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "NETRC")


@pytest.fixture(autouse=True)
def no_login(monkeypatch, tmp_path):
    """Neither the machine's W&B login nor its variables reach a test."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))


class FakeRun:
    """Records what is done with a W&B run; ``broken`` names a method that raises."""

    def __init__(self, options: dict, broken: str = "") -> None:
        self.options, self.broken = options, broken
        self.id, self.url = options.get("id") or "abc123", "https://example.test/abc123"
        self.dir = f"{options['dir']}/wandb/{options['mode']}-run-abc123/files"
        self.logged: list[tuple[int | None, dict]] = []
        self.summary: dict = {}
        self.config = dict(options["config"])
        self.metrics: list = []
        self.exit_code: int | None = None

    def define_metric(self, name: str, **options) -> None:
        self.metrics.append((name, options))

    def log(self, values: dict, step: int | None = None) -> None:
        if self.broken == "log":
            raise RuntimeError("no network\nmore lines")
        self.logged.append((step, values))

    def finish(self, exit_code: int = 0) -> None:
        if self.broken == "finish":
            raise RuntimeError("no network")
        self.exit_code = exit_code


@pytest.fixture
def fake(monkeypatch):
    """A stand-in for the wandb module: ``runs`` are the runs that were opened, ``broken`` is what fails."""
    module = types.ModuleType("wandb")
    module.__spec__ = types.SimpleNamespace(name="wandb")
    module.runs, module.broken = [], ""

    class Settings:
        model_fields = dict.fromkeys(["init_timeout", "silent", "console"])

        def __init__(self, **values) -> None:
            self.values = values

    def init(**options) -> FakeRun:
        if module.broken == "init":
            raise RuntimeError("timed out")
        module.runs.append(FakeRun(options, module.broken))
        return module.runs[-1]

    module.Settings, module.init = Settings, init
    module.Table = lambda columns, data: {"columns": columns, "data": data}
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def config(mode: str = "disabled", **changes) -> DictConfig:
    base = {
        "name": None,
        "seed": 3,
        "sweep_dir": "sweeps",
        "tracking": {"mode": mode, "project": "fedbench", "entity": None, "group": None, "tags": ["mine"]},
        "choices": {"algorithm": "pgfed", "dataset": "digits", "partition": "iid", "experiment": None},
        "lr": "${seed}",
    }
    return OmegaConf.create(base | changes)


class Playing:
    """A run without training: rounds are written to the tables and reported to W&B, in this order."""

    def __init__(self, folder: Path, cfg: DictConfig, done: int = 0) -> None:
        self.run_dir, self.cfg, self.done = folder, cfg, done
        self.notices: list[str] = []
        self.tables, self.wandb = Tables(), Wandb(cfg.tracking.mode, self.notices.append)
        self.tables.open(folder, done)
        self.wandb.on_start(self, None)

    def play(self, upto: int) -> "Playing":
        while self.done < upto:
            self.done = t = self.done + 1
            metrics = {"train/loss": 1 / t, "personal/accuracy": t / 8, "personal/auc": float("nan")}
            clients = {"n_train": np.array([5, 6]), "personal/accuracy": np.array([t / 3, np.nan])}
            costs = {"steps": np.int64(4), "train_s": 0.25, "peak_memory_mb": None}
            self.tables.add_metrics(t, metrics)
            self.tables.add_clients(t, clients)
            self.tables.add_costs(t, costs)
            self.wandb.on_evaluation(self, metrics, clients)
            self.wandb.on_round_end(self, costs)
        return self

    def end(self, status: str = "finished", **summary) -> "Playing":
        self.tables.close()
        self.wandb.on_end(self, status, summary)
        return self


@pytest.mark.parametrize(
    ("wanted", "variable", "key", "mode"),
    [
        ("auto", None, False, "offline"),
        ("auto", None, True, "online"),
        ("auto", "disabled", True, "disabled"),
        ("auto", "dryrun", True, "offline"),
        ("auto", "", False, "offline"),  # as if it were not set
        ("auto", "online", False, "offline"),  # wandb would ask for a key: never a prompt
        ("online", "offline", True, "online"),
        ("online", None, False, "offline"),
        ("offline", "online", True, "offline"),
        ("disabled", "online", True, "disabled"),
    ],
)
def test_mode(monkeypatch, wanted, variable, key, mode):
    if variable is not None:
        monkeypatch.setenv("WANDB_MODE", variable)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    chosen, line = wandb_mode(wanted)
    assert chosen == mode
    assert bool(line) == (mode == "offline" and wanted != "offline" and variable != "dryrun")
    assert "\n" not in line


def test_mode_without_wandb(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert wandb_mode("auto")[0] == "disabled"
    assert "not installed" in wandb_mode("online")[1]
    assert wandb_mode("disabled") == ("disabled", "")


@pytest.mark.parametrize(("wanted", "key", "value"), [("on", "tracking.mode", "on"), ("auto", "WANDB_MODE", "maybe")])
def test_unknown_mode_is_refused(monkeypatch, wanted, key, value):
    monkeypatch.setenv("WANDB_MODE", "maybe")
    with pytest.raises(ConfigError, match=f"{key} must be one of auto, online, offline, disabled, got {value}"):
        wandb_mode(wanted)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("machine api.wandb.ai login user password " + "k" * 40, True),
        ("machine example.org login user password x", False),
        ("machine api.wandb.ai login user password x\nnonsense", False),
    ],
)
def test_key_in_netrc(tmp_path, monkeypatch, text, found):
    (tmp_path / "netrc").write_text(text + "\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert wandb_key_is_configured() == found


def test_offline_run_is_recorded_whole_when_it_ends(tmp_path, fake):
    """Rounds 1-2 were written before an interruption: the record of the resumed run has them too."""
    Playing(tmp_path, config("auto")).play(3).end("interrupted")
    assert fake.runs == []
    resumed = Playing(tmp_path, config("auto"), done=2).play(4)
    assert fake.runs == []
    resumed.end(last={"personal/accuracy": 0.5}, best={"round": 4, "values": {}}, commit="c0ffee")
    (run,) = fake.runs
    assert resumed.notices[1:] == [f"W&B: recorded offline; to upload it: wandb sync {Path(run.dir).parent}"]
    assert [step for step, _ in run.logged] == [1, 2, 3, 4, None]
    assert run.logged[1][1] == pytest.approx(
        {"round": 2, "train/loss": 0.5, "personal/accuracy": 0.25, "personal/auc": np.nan,
         "cost/steps": 4, "cost/train_s": 0.25}, nan_ok=True)  # fmt: skip
    assert run.logged[-1][1]["clients"]["data"][0] == [4, 0, 5, 4 / 3]
    assert run.summary == {"last/personal/accuracy": 0.5, "best/round": 4}
    assert run.config["facts"] == {"commit": "c0ffee"}
    assert run.config["lr"] == 3  # resolved
    assert run.metrics == [("*", {"step_metric": "round", "summary": "none"})]
    assert run.exit_code == 0
    options = run.options
    assert (options["mode"], options["dir"], options["project"]) == ("offline", str(tmp_path), "fedbench")
    assert (options["name"], options["group"]) == ("pgfed-digits-iid-s3", "digits-iid")
    assert options["tags"] == ["mine", "digits", "iid"]
    assert options["settings"].values == {"init_timeout": 20.0, "silent": True, "console": "off"}


def test_a_long_name_keeps_its_seed():
    cfg, folder = config(name="n" * 200, seed=17), Path("run")
    cfg.choices.dataset = "d" * 100
    names = run_names(cfg, folder)
    assert len(names["name"]) == 128 and names["name"].endswith("-s17")
    assert run_names(config(name="n" * 199 + "m", seed=17), folder)["name"] != names["name"]
    assert all(0 < len(tag) <= 64 for tag in names["tags"]) and len(names["group"]) <= 128


def test_cells_of_a_sweep_have_a_name_each(tmp_path):
    cfg = config(sweep_dir=str(tmp_path / "lr_alpha"))
    cells = [f"optimizer.lr={lr},partition.alpha={alpha}" for lr in (0.1, 1) for alpha in (0.1, 1)]
    names = [run_names(cfg, tmp_path / "lr_alpha" / cell) for cell in cells]
    assert [n["name"] for n in names] == [f"pgfed-digits-iid-s3 {cell}" for cell in cells]
    assert {n["group"] for n in names} == {"digits-iid"}
    assert run_names(cfg, tmp_path / "elsewhere" / "run")["name"] == "pgfed-digits-iid-s3"
    cfg.tracking.group = "mine"
    assert run_names(cfg, tmp_path / "lr_alpha" / cells[0])["group"] == "mine"
    long = run_names(config(name="n" * 200, sweep_dir=str(tmp_path)), tmp_path / ("c" * 100))["name"]
    assert len(long) == 128 and long.endswith("-s3 " + "c" * 100)


def test_experiment_is_the_group(tmp_path, fake):
    chosen = {**config().choices, "experiment": "pgfed_table1/fedavg"}
    Playing(tmp_path, config("offline", choices=chosen)).end("failed")
    (run,) = fake.runs
    assert run.options["group"] == "pgfed_table1/fedavg"
    assert run.options["tags"][-1] == "pgfed_table1"
    assert run.exit_code == 1


def test_online_run_is_sent_as_it_goes_and_continued_by_its_id(tmp_path, fake, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    started = Playing(tmp_path, config("auto")).play(2).end("interrupted")
    assert started.notices == ["W&B: https://example.test/abc123"]
    assert (tmp_path / "wandb_id.txt").read_text() == "abc123\n"
    Playing(tmp_path, config("auto"), done=2).play(3).end()
    first, second = fake.runs
    assert (first.options["id"], first.options["resume"]) == (None, "allow")
    assert [step for step, _ in first.logged] == [1, 1, 2, 2]
    assert first.logged[1] == (1, {"round": 1, "cost/steps": 4, "cost/train_s": 0.25})
    assert second.options["id"] == "abc123"
    assert [step for step, _ in second.logged[:-1]] == [3, 3]


def test_login_between_two_attempts_sends_the_earlier_rounds(tmp_path, fake, monkeypatch):
    Playing(tmp_path, config("auto")).play(2).end("interrupted")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    Playing(tmp_path, config("auto"), done=2)
    assert [step for step, _ in fake.runs[0].logged] == [1, 2]


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_no_failure_of_wandb_reaches_the_run(tmp_path, fake, monkeypatch, mode, broken):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    fake.broken = broken
    notices = Playing(tmp_path, config(mode)).play(2).end().notices
    assert all("\n" not in line for line in notices)
    assert any("failed" in line for line in notices)


def test_disabled_and_auto_do_not_import_wandb_before_the_end(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would raise
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert Playing(tmp_path, config("disabled")).play(2).end().notices == []
    assert len(Playing(tmp_path, config("auto")).play(2).notices) == 1


def test_real_wandb_offline(tmp_path):
    pytest.importorskip("wandb")
    notices = Playing(tmp_path, config("offline")).play(3).end(last={"personal/accuracy": 0.5}).notices
    (recorded,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert notices == [f"W&B: recorded offline; to upload it: wandb sync {recorded.parent}"]
    deadline = time.perf_counter() + 300  # W&B's own process may write a little after finish() returned
    while recorded.stat().st_size < 1000 and time.perf_counter() < deadline:
        time.sleep(0.02)
    assert recorded.stat().st_size > 1000


@pytest.mark.slow
def test_real_wandb_without_a_server_falls_back_to_offline(tmp_path, monkeypatch):
    """A key is configured but nobody answers: no hang, no traceback, and the numbers are recorded offline."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("fedbench.simulation.callbacks.wandb.SECONDS_TO_CONNECT", 3.0)
    notices = Playing(tmp_path, config("online")).play(2).end().notices
    assert "connecting failed" in notices[0]
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
