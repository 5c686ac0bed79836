"""The run's files are exact, survive a crash and are what W&B gets; W&B cannot prompt, hang or fail a run."""

import json
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf
from tiny import on_disk_first

from fedbench.core.options import ConfigError
from fedbench.report.runs import Run, read_columns
from fedbench.simulation.csv_table import read_rows
from fedbench.simulation.tracking import Tracker
from fedbench.simulation.wandb_record import run_names, wandb_key_is_configured, wandb_mode

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
        "tracking": {"mode": mode, "project": "fedbench", "entity": None, "group": None, "tags": ["mine"]},
        "choices": {"algorithm": "pgfed", "dataset": "digits", "partition": "iid", "experiment": None},
        "lr": "${seed}",
    }
    return OmegaConf.create(base | changes)


def write(tracker: Tracker, rounds: range) -> None:
    for t in rounds:
        tracker.metrics(t, {"train/loss": 1 / t, "personal/accuracy": t / 8, "personal/auc": float("nan")})
        tracker.clients(t, {"n_train": np.array([5, 6]), "personal/accuracy": np.array([t / 3, np.nan])})
        tracker.costs(t, {"steps": np.int64(4), "train_s": 0.25, "peak_memory_mb": None})


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / f"{name}.csv").read_bytes() for name in ("metrics", "clients", "costs")}


def test_files_say_exactly_what_was_given(tmp_path):
    with Tracker(tmp_path, config()) as tracker:
        write(tracker, range(1, 3))
        assert (tmp_path / "metrics.csv").read_text().count("\n") == 3  # flushed before the run ends
    written = {name: content.decode().splitlines() for name, content in files(tmp_path).items()}
    assert written["metrics"] == [
        "round,train/loss,personal/accuracy,personal/auc",
        "1,1.0,0.125,nan",
        "2,0.5,0.25,nan",
    ]
    assert written["clients"][:3] == [
        "round,client,n_train,personal/accuracy",
        "1,0,5,0.3333333333333333",
        "1,1,6,nan",
    ]
    assert written["costs"][1] == "1,4,0.25,"


def test_client_ids_are_kept_where_given(tmp_path):
    with Tracker(tmp_path, config()) as tracker:
        tracker.clients(1, {"client": np.array([7, 9]), "personal/accuracy": np.array([0.5, 1.0])})
    assert (tmp_path / "clients.csv").read_text().splitlines()[1:] == ["1,7,0.5", "1,9,1.0"]


NAMES = np.array(["north, old", 'say "x"', "#3"])


def test_names_are_cells_that_every_reader_takes(tmp_path):
    with Tracker(tmp_path, config()) as tracker:
        tracker.clients(1, {"client": np.arange(3), "name": NAMES, "personal/accuracy": np.array([0.5, 1.0, 0.1])})
    path = tmp_path / "clients.csv"
    assert path.read_text().splitlines()[1:] == ['1,0,"north, old",0.5', '1,1,"say ""x""",1.0', "1,2,#3,0.1"]
    assert [row["name"] for row in read_rows(path)] == NAMES.tolist()
    assert read_columns(path)["name"].tolist() == NAMES.tolist()
    (tmp_path / "summary.json").write_text("{}")
    rounds, ids, values = Run(tmp_path).clients("personal/accuracy")
    assert rounds.tolist() == [1] and ids.tolist() == [0, 1, 2] and values.tolist() == [[0.5, 1.0, 0.1]]


def test_a_table_begun_without_names_goes_on_without(tmp_path):
    """As those of runs of older versions."""
    columns = {"client": np.arange(3), "personal/accuracy": np.array([0.5, 1.0, 0.1])}
    with Tracker(tmp_path, config()) as tracker:
        tracker.clients(1, columns)
    with Tracker(tmp_path, config(), resume_round=1) as tracker:
        tracker.clients(2, {**columns, "name": NAMES})
    lines = (tmp_path / "clients.csv").read_text().splitlines()
    assert lines[0] == "round,client,personal/accuracy" and lines[4:] == ["2,0,0.5", "2,1,1.0", "2,2,0.1"]


@pytest.mark.parametrize("damage", ["", "\n3,0.1", "\n"])
def test_resumed_files_are_byte_for_byte_those_of_an_uninterrupted_run(tmp_path, damage):
    """The crash came after round 4 was written, the checkpoint was of round 2; a last line may be cut off."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder, rounds in ((whole, range(1, 7)), (broken, range(1, 5))):
        folder.mkdir()
        with Tracker(folder, config()) as tracker:
            write(tracker, rounds)
    for name in ("metrics", "clients"):
        path = broken / f"{name}.csv"
        path.write_bytes(path.read_bytes()[:-1] + damage.encode())
    with Tracker(broken, config(), resume_round=2) as tracker:
        write(tracker, range(3, 7))
    assert files(broken) == files(whole)
    assert not list(broken.glob("*.part"))


@pytest.mark.parametrize("kept", [0, 2, 9])
def test_truncation_keeps_rounds_up_to_the_checkpoint(tmp_path, kept):
    with Tracker(tmp_path, config()) as tracker:
        write(tracker, range(1, 5))
    Tracker(tmp_path, config(), resume_round=kept).close("running")
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["round", *(str(t) for t in range(1, min(kept, 4) + 1))]


def test_new_run_in_a_used_folder_starts_afresh(tmp_path):
    for _ in range(2):
        with Tracker(tmp_path, config()) as tracker:
            write(tracker, range(1, 2))
    assert (tmp_path / "metrics.csv").read_text().count("\n") == 2


@pytest.mark.parametrize("resume_round", [None, 1])
def test_unknown_column_is_refused(tmp_path, resume_round):
    Tracker(tmp_path, config()).metrics(1, {"personal/accuracy": 0.5, "personal/auc": 0.5})
    if resume_round is None:
        (tmp_path / "metrics.csv").unlink()
    tracker = Tracker(tmp_path, config(), resume_round)
    tracker.metrics(
        2, {"personal/accuracy": 0.5, "personal/auc": 1.0} if resume_round is None else {"personal/auc": 1.0}
    )
    with pytest.raises(ValueError, match=r"metrics.csv has no column global/accuracy"):
        tracker.metrics(3, {"global/accuracy": 0.5})


def test_a_count_that_the_first_row_has_not_is_left_to_the_summary(tmp_path):
    """The header is fixed, also of a run that began before there were counts."""
    with Tracker(tmp_path, config()) as tracker:
        tracker.metrics(1, {"personal/loss": 0.5, "personal/auc": 0.9, "personal/auc_clients": 3})
        tracker.metrics(2, {"personal/loss": 0.5, "personal/loss_clients": 2, "personal/auc": 0.8})
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines == ["round,personal/loss,personal/auc,personal/auc_clients", "1,0.5,0.9,3", "2,0.5,0.8,"]


def test_summary_is_json_without_numpy_or_nan(tmp_path):
    with Tracker(tmp_path, config()) as tracker:
        tracker.summary({"a": np.float32(0.5), "b": float("nan"), "c": np.arange(2), "d": {"e": (Path("x"), None)}})
    read = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert read == {"a": 0.5, "b": None, "c": [0, 1], "d": {"e": ["x", None]}}


def test_the_files_that_are_replaced_are_on_the_disk_first(tmp_path, monkeypatch):
    with on_disk_first(monkeypatch) as names:
        with Tracker(tmp_path, config()) as tracker:
            for number in range(2):
                tracker.summary({"a": number})
                tracker.metrics(number + 1, {"x": 0.5})
        with Tracker(tmp_path, config(), 1):  # rows beyond the checkpoint are cut off
            pass
    assert names.count("summary.json") == 2 and names.count("metrics.csv") == 1


def test_failed_write_of_the_summary_leaves_the_old_one(tmp_path):
    tracker = Tracker(tmp_path, config())
    tracker.summary({"a": 1})
    with pytest.raises(TypeError):
        tracker.summary({"a": object()})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"a": 1}


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


@pytest.mark.parametrize(("wanted", "named"), [("on", "tracking.mode is on"), ("auto", "WANDB_MODE is maybe")])
def test_unknown_mode_is_refused(monkeypatch, wanted, named):
    monkeypatch.setenv("WANDB_MODE", "maybe")
    with pytest.raises(ConfigError, match=named + "; allowed are auto, online, offline, disabled"):
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


def test_offline_run_is_recorded_whole_when_it_closes(tmp_path, fake):
    """Rounds 1-2 were written before an interruption: the record of the resumed run has them too."""
    first, notices = Tracker(tmp_path, config("auto"), notice=lambda line: None), []
    write(first, range(1, 4))
    first.close("running")
    assert fake.runs == []
    with Tracker(tmp_path, config("auto"), resume_round=2, notice=notices.append) as tracker:
        write(tracker, range(3, 5))
        tracker.summary({"last": {"personal/accuracy": 0.5}, "best": {"round": 4, "values": {}}, "commit": "c0ffee"})
        assert fake.runs == []
    (run,) = fake.runs
    assert notices[1:] == [f"W&B: recorded offline; to upload it: wandb sync {Path(run.dir).parent}"]
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
    cfg = config(name="n" * 200, seed=17)
    cfg.choices.dataset = "d" * 100
    names = run_names(cfg)
    assert len(names["name"]) == 128 and names["name"].endswith("-s17")
    assert run_names(config(name="n" * 199 + "m", seed=17))["name"] != names["name"]
    assert all(0 < len(tag) <= 64 for tag in names["tags"]) and len(names["group"]) <= 128


def test_experiment_is_the_group(tmp_path, fake):
    chosen = {**config().choices, "experiment": "pgfed_table1/fedavg"}
    Tracker(tmp_path, config("offline", choices=chosen)).close("failed")
    (run,) = fake.runs
    assert run.options["group"] == "pgfed_table1/fedavg"
    assert run.options["tags"][-1] == "pgfed_table1"
    assert run.exit_code == 1


def test_online_run_is_sent_as_it_goes_and_continued_by_its_id(tmp_path, fake, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    notices: list[str] = []
    with (
        pytest.raises(KeyboardInterrupt),
        Tracker(tmp_path, config("auto"), notice=notices.append) as tracker,
    ):
        write(tracker, range(1, 3))
        raise KeyboardInterrupt
    assert notices == ["W&B: https://example.test/abc123"]
    assert (tmp_path / "wandb_id.txt").read_text() == "abc123\n"
    with Tracker(tmp_path, config("auto"), resume_round=2) as tracker:
        write(tracker, range(3, 4))
    first, second = fake.runs
    assert (first.options["id"], first.options["resume"]) == (None, "allow")
    assert [step for step, _ in first.logged] == [1, 1, 2, 2]
    assert first.logged[1] == (1, {"round": 1, "cost/steps": 4, "cost/train_s": 0.25})
    assert second.options["id"] == "abc123"
    assert [step for step, _ in second.logged[:-1]] == [3, 3]


def test_login_between_two_attempts_sends_the_earlier_rounds(tmp_path, fake, monkeypatch):
    first = Tracker(tmp_path, config("auto"))
    write(first, range(1, 3))
    first.close("running")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    Tracker(tmp_path, config("auto"), resume_round=2)
    assert [step for step, _ in fake.runs[0].logged] == [1, 2]


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_no_failure_of_wandb_reaches_the_run(tmp_path, fake, monkeypatch, mode, broken):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    fake.broken = broken
    notices: list[str] = []
    with Tracker(tmp_path, config(mode), notice=notices.append) as tracker:
        write(tracker, range(1, 3))
    assert all("\n" not in line for line in notices)
    assert any("failed" in line for line in notices)
    assert (tmp_path / "metrics.csv").read_text().count("\n") == 3


def test_disabled_and_auto_do_not_import_wandb_before_the_end(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would raise
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    notices: list[str] = []
    with Tracker(tmp_path, config("disabled"), notice=notices.append) as tracker:
        write(tracker, range(1, 3))
    assert notices == []
    tracker = Tracker(tmp_path, config("auto"), notice=notices.append)
    write(tracker, range(1, 3))
    assert len(notices) == 1


def test_real_wandb_offline(tmp_path):
    pytest.importorskip("wandb")
    notices: list[str] = []
    with Tracker(tmp_path, config("offline"), notice=notices.append) as tracker:
        write(tracker, range(1, 4))
        tracker.summary({"status": "finished", "last": {"personal/accuracy": 0.5}})
    (recorded,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert notices == [f"W&B: recorded offline; to upload it: wandb sync {recorded.parent}"]
    deadline = time.perf_counter() + 300  # W&B's own process may write a little after finish() returned
    while recorded.stat().st_size < 1000 and time.perf_counter() < deadline:
        time.sleep(0.02)
    assert recorded.stat().st_size > 1000


def test_real_wandb_without_a_server_falls_back_to_offline(tmp_path, monkeypatch):
    """A key is configured but nobody answers: no hang, no traceback, and the numbers are recorded offline."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("fedbench.simulation.wandb_record.SECONDS_TO_CONNECT", 3.0)
    notices: list[str] = []
    with Tracker(tmp_path, config("online"), notice=notices.append) as tracker:
        write(tracker, range(1, 3))
    assert "connecting failed" in notices[0]
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
