"""What a stopped run may go on with: the config that its checkpoint was written with, and more rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from fedbench.app.compose import compose
from fedbench.config.check import check
from fedbench.core.nested import flatten
from fedbench.core.options import ConfigError
from fedbench.core.settings import config_hash, save_config, to_dict
from fedbench.simulation.resume_checks import changed, check_rounds, check_saved, requested_rounds


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    return check(compose(["rounds=4", "algorithm=fedavg"]))


def config(values: dict[str, Any], **changes: Any) -> DictConfig:
    return OmegaConf.create({**values, **changes})


def saved(values: dict[str, Any], round: Any = 2, **more: Any) -> dict[str, Any]:
    return {"round": round, "config_hash": config_hash(values), "config": json.dumps(flatten(values)), **more}


def test_the_same_config_and_more_rounds_pass(values: dict[str, Any], tmp_path: Path) -> None:
    check_saved(config(values), tmp_path, saved(values))
    check_saved(config(values, rounds=9), tmp_path, saved(values))


def test_what_is_free_may_have_changed(values: dict[str, Any], tmp_path: Path) -> None:
    """Names, folders and hardware do not change what is computed."""
    cfg = config(values, name="other", output_dir="elsewhere", hardware={**values["hardware"], "executor": "loop"})
    check_saved(cfg, tmp_path, saved(values))


def test_a_value_of_the_run_may_not(values: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"differs from the configuration of the checkpoint \(seed=7 \(was: 0\)\); restore it"
    ):
        check_saved(config(values, seed=7), tmp_path, saved(values))


def test_a_choice_may_not_change_its_name(values: dict[str, Any], tmp_path: Path) -> None:
    """The hash does not count names; the report would."""
    choices = {**values["choices"], "algorithm": "fedprox"}
    with pytest.raises(ConfigError, match=r"\(choices\.algorithm='fedprox' \(was: 'fedavg'\)\)"):
        check_saved(config(values, choices=choices), tmp_path, saved(values))


@pytest.mark.parametrize("round", [0, 5, -1, True, 2.0, "2"])
def test_rounds_that_cannot_be_are_refused(round: Any, values: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"the checkpoint is damaged, because its round is {round} of 4"):
        check_saved(config(values), tmp_path, saved(values, round))


def test_rounds_may_not_become_fewer(values: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rounds=3 is less than the run's 4"):
        check_saved(config(values, rounds=3), tmp_path, saved(values))


@pytest.mark.parametrize(
    ("schedule", "free"), [("constant", True), ("exponential", True), ("cosine", False), ("linear", False)]
)
def test_more_rounds_only_where_rates_do_not_depend_on_them(schedule: str, free: bool, tmp_path: Path) -> None:
    stored = {"optimizer": {"schedule": {"name": schedule}}}
    check_rounds(tmp_path, stored, 4, 4)
    if free:
        return check_rounds(tmp_path, stored, 4, 5)
    with pytest.raises(ConfigError, match=rf"rounds=.* cannot replace .*, because .*name={schedule}"):
        check_rounds(tmp_path, stored, 4, 5)


def test_more_rounds_are_refused_if_noise_was_computed_for_fewer(tmp_path: Path) -> None:
    stored = {"optimizer": {}, "privacy": {"target_epsilon": 4.0}}
    check_rounds(tmp_path, stored, 4, 4)
    with pytest.raises(ConfigError, match=r"rounds=5 cannot replace 4, because the noise.*target_epsilon=4\.0 for 4"):
        check_rounds(tmp_path, stored, 4, 5)
    check_rounds(tmp_path, {"optimizer": {}, "privacy": {"target_epsilon": None, "noise_multiplier": 1.0}}, 4, 5)


def test_a_checkpoint_of_an_older_version_is_known_by_the_rounds_that_were_asked(
    values: dict[str, Any], tmp_path: Path
) -> None:
    """It has a hash and no config: the hash is that of one of the numbers of rounds in the folder."""
    old = {"round": 2, "config_hash": config_hash({**values, "rounds": 6})}
    save_config(values, tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="differs from the configuration of the checkpoint; restore it"):
        check_saved(config(values, rounds=9), tmp_path, old)
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra/overrides.resume-1.yaml").write_text("[seed=1, rounds=6]")
    assert sorted(requested_rounds(tmp_path)) == [4, 6]
    check_saved(config(values, rounds=9), tmp_path, old)
    assert to_dict(config(values))["rounds"] == 4


def test_overrides_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra/overrides.resume-1.yaml").write_text("[rounds=6")
    with pytest.raises(ConfigError, match=r"overrides\.resume-1\.yaml cannot be read .* has the number of rounds"):
        requested_rounds(tmp_path)


def test_the_keys_that_changed_are_named_with_both_values() -> None:
    then = {"seed": 0, "rounds": 4, "name": None, "gone": 1}
    assert changed(then, {"seed": 1, "rounds": 9, "name": "x", "new": 2}) == [
        "gone=null (was: 1)",
        "new=2 (was: null)",
        "seed=1 (was: 0)",
    ]
    assert changed({}, {"seed": 1}) == []  # a checkpoint of an older version: unknown
