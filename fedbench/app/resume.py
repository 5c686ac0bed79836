"""``resume=<run directory>``: what the run was, and that the command does not ask for anything else.

A stored config is data from disk: it is read as plain values, and only targets that this installation's conf
(or the user's own --config-dir or command line) names are ever built from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from fedbench.app.compose import Composer
from fedbench.app.overrides import check_choice
from fedbench.config.check import check
from fedbench.config.conf_tree import GROUPS, conf_dirs, label_of, nearest
from fedbench.config.override_text import word
from fedbench.config.run_keys import RESERVED
from fedbench.config.targets import foreign, trusted
from fedbench.core.files import read_json
from fedbench.core.nested import flatten
from fedbench.core.options import ConfigError, require
from fedbench.core.removed import refuse_removed
from fedbench.core.settings import is_matched, load_config, plain, show, with_home
from fedbench.simulation.resume_checks import ABSENT, FREE, KEPT_OR_FREE, check_rounds, rounds_asked
from fedbench.simulation.run_folder import CHECKPOINTS, check_files, is_finished


def prepare(folder: Path, overrides: list[str], config_dir: str | None) -> tuple[dict[str, Any], bool]:
    """Return the checked config to go on with, and whether the run is finished.

    Raises:
        ConfigError: The run cannot be resumed, or the overrides ask for another run.
    """
    stored = _read(folder)
    for group in RESERVED:  # older runs name the option even where they build another class
        option, folders = stored["choices"].get(group), conf_dirs(config_dir)
        stored["choices"][group] = label_of(group, option, _target(stored, group), folders)
    composer = Composer(config_dir)
    composer.refuse_repeated(overrides)
    parsed = composer.parse(overrides)
    if "callbacks" in {override.key_or_group for override in parsed}:
        stored["callbacks"] = {}  # those of the command replace them
    _check_repeated(folder, stored, parsed, config_dir)
    config = _checked(folder, stored)
    before = config["rounds"] = max([config["rounds"], *rounds_asked(folder)])
    asked = _asked(composer, parsed)
    _check_same(folder, config, asked)
    changes = {key: value for key, value in asked.items() if key == "rounds" or is_matched(key, FREE)}
    if changes:
        merged = OmegaConf.create(config)
        for key, value in sorted(changes.items(), key=lambda item: item[0] not in GROUPS):  # options first
            OmegaConf.update(merged, key, value, merge=False)
        config = check(merged)
    check_rounds(folder, config, before, config["rounds"])
    done = read_json(folder / "summary.json").get("rounds", 0)
    finished = isinstance(done, int) and config["rounds"] <= done and is_finished(folder, config)
    _check_checkpoint(folder, finished)
    return config, finished


def _check_repeated(
    folder: Path, stored: Mapping[str, Any], overrides: Sequence[Override], config_dir: str | None
) -> None:
    """Refuse a stored config that would run code, unless the overrides repeat what it names."""
    given = {override.key_or_group: str(override.value()) for override in overrides if not override.is_delete()}
    classes, pickles = foreign(stored, config_dir), trusted(stored)
    for key, value in [*classes, *pickles]:
        said = (
            f"builds {value}, which nothing in this installation's conf names; if it is yours"
            if (key, value) in classes
            else f"trusts {value}, whose pickles may run code when they are read; if you know who wrote it"
        )
        is_repeated = given.get(key) == str(value)
        require(is_repeated, f"resume={folder}: its config {said}, say {key}={word(value)} as well")


def record(folder: Path, overrides: list[str]) -> None:
    """Keep what a resume was given, beside the overrides the run was started with."""
    inner = folder / ".hydra"
    inner.mkdir(exist_ok=True)
    path = next(p for k in count(1) if not (p := inner / f"overrides.resume-{k}.yaml").exists())
    path.write_text(yaml.safe_dump(list(overrides)), encoding="utf-8")


def hardware_kept(folder: Path, values: Mapping[str, Any], overrides: list[str]) -> str:
    """A notice when the command asks for hardware: the run keeps what it was started with ('' otherwise)."""
    if not any(text.lstrip("+").startswith("hardware") for text in overrides):
        return ""
    kept = ", ".join(f"{key}={show(value)}" for key, value in values["hardware"].items())
    return f"{folder} keeps the hardware options it was started with ({kept}): resuming is then exact"


def require_run(folder: Path) -> None:
    """Refuse a folder that is none of a run."""
    require(folder.is_dir(), f"resume={folder}: there is no such run directory")
    path = folder / "config.yaml"
    require(path.is_file(), f"resume={folder}: this is not a run directory (it has no config.yaml)")
    check_files(folder)


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    stored = OmegaConf.to_container(load_config(path))
    known = isinstance(stored, dict) and isinstance(stored.get("choices"), dict) and "rounds" in stored
    require(known, f"resume={folder}: its config.yaml is not one that fedbench saved")
    return stored  # type: ignore[return-value]


def _target(stored: Mapping[str, Any], group: str) -> str | None:
    """The class that a stored config builds for a group."""
    return stored[group].get("_target_") if isinstance(stored.get(group), Mapping) else None


def _checked(folder: Path, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a stored config, checked."""
    for group, values in stored.items():
        refuse_removed(f"resume={folder}: {group}", values)
    try:
        return check(OmegaConf.create(dict(stored)))
    except ConfigError as error:
        raise ConfigError(f"resume={folder}: its config.yaml is not one that fedbench saved: {error}") from error


def _asked(composer: Composer, overrides: Sequence[Override]) -> dict[str, Any]:
    """Return what the overrides set, by dotted key; the name of an option as choices.<group>.

    The options of a group that may change (tracking, callbacks) are those of its file.
    """
    asked: dict[str, Any] = {}
    for override in overrides:
        key, text = override.key_or_group, override.input_line
        require(not override.is_sweep_override(), f"{text} is several values, and resume= is for one run")
        require(not override.is_delete(), f"{text} deletes a key, and a run goes on as it was: leave it out")
        value = override.value()
        if key in GROUPS:
            check_choice(override, composer.folders)
            asked[f"choices.{key}"] = ",".join(value) if isinstance(value, list) else value
            if is_matched(key, FREE):
                asked[key] = plain(composer.compose([str(text)])[key])
        elif not override.is_hydra_override():
            resolved = OmegaConf.to_container(OmegaConf.create({"value": value}), resolve=True)
            asked |= flatten({key: with_home(resolved)["value"]})
    return asked


def _check_same(folder: Path, stored: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuse keys that the command sets to other values than the run had."""
    flat = flatten(stored)
    other = [
        k for k, v in asked.items() if flat.get(k, ABSENT) != v and k != "rounds" and not is_matched(k, KEPT_OR_FREE)
    ]
    unknown = next((key for key in other if key not in flat), None)
    group, _, name = str(unknown).partition(".")
    refuse_removed(group, {"_target_": _target(stored, group), name: asked.get(str(unknown))})
    keys = [key for key in flat if not key.startswith("choices")]
    require(unknown is None, f"{unknown} is unknown to this run:{nearest(str(unknown), keys)}")
    lines = [f"{key.removeprefix('choices.')}={show(flat[key])} (asked: {show(asked[key])})" for key in other]
    before = f"resume={folder}: it was run with {', '.join(lines)}"
    require(not lines, f"{before}; a run goes on as it was, so leave these out or start a new one")


def _check_checkpoint(folder: Path, finished: bool) -> None:
    has_checkpoint = any((folder / name).exists() for name in CHECKPOINTS)
    require(has_checkpoint or finished, f"resume={folder}: it has no {CHECKPOINTS[0]} to go on from; start it again")
