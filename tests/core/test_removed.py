"""Runs stored with options that were removed: read, hashed and resumed where these had no effect, refused otherwise."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny import compose

import fedbench
from fedbench.commands import main
from fedbench.config.check import check
from fedbench.config.conf_tree import group_options, target_of
from fedbench.config.find_target import find_target
from fedbench.core.files import read_json
from fedbench.core.options import ConfigError
from fedbench.core.removed import REMOVED, drop_removed, with_removed
from fedbench.core.settings import config_hash, load_config, updated_flat
from fedbench.report.runs import Run
from fedbench.simulation import checkpoint
from fedbench.simulation.checkpoint import NAME

WORDS = [
    *("algorithm=fedamp", "model.hidden=[2]", "dataset.subset=0.1", "partition.num_clients=4", "sample_rate=0.75"),
    *("local.epochs=1", "checkpoint.every=1", "tracking=disabled", "hardware.device=cpu", "hardware.threads=1"),
]
STORED = {"start": "own", "peers": "everyone"}  # options of FedAMP
GROUPS = {"adapters": "adapter", "algorithms": "algorithm", "data": "dataset", "models": "model"}  # by package
PEERS = "algorithm.peers is no longer an option: remove it. The server always mixes the last uploads of all clients."


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Go to an empty folder, and keep Hydra's log handlers out of the next test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.chdir(tmp_path)
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def group_of(target: str) -> str:
    package = target.split(".")[1]
    return GROUPS.get(package, package)


def chosen(target: str) -> str:
    """Return the override that chooses a class with removed options."""
    group = group_of(target)
    return f"{group}={next(name for name in group_options(group) if target_of(group, name) == target)}"


def edit_config(run: Path, **options: Any) -> None:
    """Write further options of the method into config.yaml."""
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["algorithm"] |= options
    (run / "config.yaml").write_text(yaml.safe_dump(values))


def stored_run(**options: Any) -> Path:
    """Return a run of two rounds, stored as an earlier release did, with further options of the method."""
    run = Path("old")
    assert main([*WORDS, "rounds=2", f"hydra.run.dir={run}"]) == 0
    edit_config(run, **options)
    state = checkpoint.load(run)
    config = json.loads(state["config"]) | {f"algorithm.{name}": value for name, value in options.items()}
    checkpoint.save(run, {**state, "config": json.dumps(config)}, rotate=False)
    (run / "checkpoint.prev.pt").unlink()
    return run


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line on standard error."""
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("fedbench: ")


# -- stored runs -----------------------------------------------------------------------------------------
def test_a_stored_run_keeps_its_hash_and_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    run = stored_run(**STORED)
    stored = yaml.safe_load((run / "config.yaml").read_text())
    assert stored["algorithm"].items() >= STORED.items()
    read = load_config(run / "config.yaml")
    assert not STORED.keys() & read.algorithm.keys()
    assert not STORED.keys() & Run(run).config["algorithm"].keys()
    # of the stored values all options count at what they are, as in the earlier release
    assert config_hash(read) == config_hash(stored) == read_json(run / "summary.json")["config_hash"]
    assert config_hash(read) == torch.load(run / NAME, weights_only=True)["config_hash"]
    capsys.readouterr()
    assert main([f"resume={run}"]) == 0
    assert main([*WORDS, "rounds=2", f"hydra.run.dir={run}"]) == 0
    assert capsys.readouterr().out.count("finished already") == 2
    assert main([f"resume={run}", "rounds=3"]) == 0
    assert main([*WORDS, "rounds=3", "hydra.run.dir=whole"]) == 0
    for name in ("metrics.csv", "clients.csv"):
        assert (run / name).read_bytes() == Path("whole", name).read_bytes()
    assert read_json(run / "summary.json")["config_hash"] == read_json(Path("whole/summary.json"))["config_hash"]


@pytest.mark.parametrize("options", [{"peers": "last_cohort"}, {"start": "own", "peers": "last_cohort"}])
def test_a_stored_run_with_another_value_is_refused(
    options: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = stored_run(**options)
    before = (run / NAME).read_bytes()
    capsys.readouterr()
    assert main([f"resume={run}"]) == 2
    assert sentence(capsys) == f"resume={run}: {PEERS}"
    assert main([f"resume={run}", "rounds=3"]) == 2
    assert sentence(capsys) == f"resume={run}: {PEERS}"
    assert (run / NAME).read_bytes() == before
    assert main(["report", str(run)]) == 0  # its numbers are still read
    assert "FedAMP" in capsys.readouterr().out


@pytest.mark.parametrize("target", REMOVED)
def test_removed_options_count_in_the_hash_as_before(target: str) -> None:
    """Values with all of them present, whose hash is the earlier release's, or with none: the same at neutral values
    alone, of which the flat values in a checkpoint are freed, too."""
    now, group = check(compose([chosen(target)])), group_of(target)
    options = {name: neutral for name, (neutral, _) in REMOVED[target].items()}
    before = {**now, group: {**now[group], **options}}
    assert config_hash(now) == config_hash(before)
    for option in options:
        other = {**now, group: {**now[group], option: "another"}}
        assert config_hash(other) != config_hash(now)
        flat = {f"{group}._target_": target, f"{group}.{option}": "another"}
        assert updated_flat(flat)[f"{group}.{option}"] == "another"
    flat = {f"{group}.{key}": value for key, value in before[group].items()}
    kept = {key: value for key, value in updated_flat(flat).items() if key.startswith(f"{group}.")}
    assert kept == {f"{group}.{key}": value for key, value in now[group].items()}


def test_a_list_counts_as_it_was_written() -> None:
    """The operators of a chain never stored the defaults of conf."""
    operators = [{"_target_": "fedbench.compression.deflate.Deflate"}]
    cfg = compose(["compression=chain"])
    cfg.compression.operators = operators
    assert with_removed(check(cfg))["compression"]["operators"] == operators
    stored = {"compression": {"operators": [{**operators[0], "level": 6}]}}
    drop_removed(stored)
    assert stored["compression"]["operators"] == operators


@pytest.mark.parametrize("target", REMOVED)
def test_what_was_removed_is_gone(target: str) -> None:
    taken = inspect.signature(find_target(target, f"{group_of(target)}._target_")).parameters
    assert taken and not taken.keys() & REMOVED[target].keys()


# -- commands --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "words",
    [
        ["algorithm=fedamp", "algorithm.peers=last_cohort"],
        ["algorithm=fedamp", "+algorithm.peers=everyone"],
        ["-m", "algorithm=fedamp", "algorithm.peers=everyone,last_cohort"],
    ],
)
def test_a_command_with_a_removed_option_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert sentence(capsys) == PEERS
    assert not any(Path.cwd().iterdir())


def test_a_resume_with_a_removed_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    run = stored_run(**STORED)
    capsys.readouterr()
    for value in ("everyone", "last_cohort"):
        assert main([f"resume={run}", f"algorithm.peers={value}"]) == 2
        assert sentence(capsys) == PEERS


@pytest.mark.parametrize("target", REMOVED)
def test_every_removed_option_is_refused_with_its_alternative(target: str) -> None:
    cfg, group = compose([chosen(target)]), group_of(target)
    options = dict(cfg[group])
    for option, (neutral, instead) in REMOVED[target].items():
        cfg[group] = {**options, option: neutral}
        with pytest.raises(ConfigError) as refused:
            check(cfg)
        assert str(refused.value) == f"{group}.{option} is no longer an option: remove it. {instead}"


def test_the_function_of_a_run_refuses_it() -> None:
    with pytest.raises(ConfigError, match=PEERS):
        fedbench.run("algorithm=fedamp", "algorithm.peers=last_cohort")
