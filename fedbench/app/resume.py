"""``resume=<run folder>``: read a stored configuration, and check that the command does not change the run.

The stored configuration may come from someone else.  So a class in it is only built if this installation's conf folder,
the user's --config-dir or the command line names it.
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
from fedbench.config.override_text import value_text
from fedbench.config.run_keys import RESERVED
from fedbench.config.targets import foreign, trusted
from fedbench.core.files import read_json
from fedbench.core.nested import flatten
from fedbench.core.options import ConfigError, require
from fedbench.core.removed import refuse_removed
from fedbench.core.settings import is_matched, load_config, show, to_dict, with_home
from fedbench.simulation.resume_checks import ABSENT, CHANGEABLE, NOT_COMPARED, check_rounds, requested_rounds
from fedbench.simulation.run_folder import CHECKPOINTS, check_files, is_finished


def prepare(folder: Path, overrides: list[str], config_dir: str | None) -> tuple[dict[str, Any], bool]:
    """Return the configuration with which to resume a run.

    Args:
        folder: The run folder.
        overrides: The overrides of the command, without resume=.
        config_dir: The --config-dir of the command.

    Returns:
        The checked configuration, and whether the run is finished.

    Raises:
        ConfigError: The run cannot be resumed, or the overrides would change it.
    """
    stored = _read(folder)
    # RESERVED: the groups whose options are classes; older runs recorded the option even if another class was built
    for group in RESERVED:
        option, folders = stored["choices"].get(group), conf_dirs(config_dir)
        stored["choices"][group] = label_of(group, option, _target(stored, group), folders)
    composer = Composer(config_dir)
    composer.refuse_repeated(overrides)
    parsed = composer.parse(overrides)
    if "callbacks" in {override.key_or_group for override in parsed}:
        stored["callbacks"] = {}  # the callbacks of the command replace them
    _check_repeated(folder, stored, parsed, config_dir)
    stored.get("checkpoint", {})["pause_after"] = None  # a pause of the first command does not pause this one
    config = _checked(folder, stored)
    # earlier resume commands may have asked for more rounds than config.yaml has
    before = config["rounds"] = max([config["rounds"], *requested_rounds(folder)])
    requested = _requested(composer, parsed)
    _check_same(folder, config, requested)
    # CHANGEABLE: patterns of keys that a resumed run may change, such as tracking.*
    changes = {key: value for key, value in requested.items() if key == "rounds" or is_matched(key, CHANGEABLE)}
    if changes:
        merged = OmegaConf.create(config)
        for key, value in sorted(changes.items(), key=lambda item: item[0] not in GROUPS):  # options first
            OmegaConf.update(merged, key, value, merge=False)
        config = check(merged)
    check_rounds(folder, config, before, config["rounds"])  # refuses fewer rounds than before
    done = read_json(folder / "summary.json").get("rounds", 0)  # the rounds of the finished run
    finished = isinstance(done, int) and config["rounds"] <= done and is_finished(folder, config)
    _check_checkpoint(folder, finished)
    return config, finished


def _check_repeated(
    folder: Path, stored: Mapping[str, Any], overrides: Sequence[Override], config_dir: str | None
) -> None:
    """Raise ConfigError if the stored configuration may run foreign code that the overrides do not repeat.

    Args:
        folder: The run folder, for the message.
        stored: The stored configuration.
        overrides: The overrides of the command, which must repeat foreign classes and trusted pickles.
        config_dir: The --config-dir of the command, whose classes are not foreign.
    """
    value_by_key = {override.key_or_group: str(override.value()) for override in overrides if not override.is_delete()}
    classes, pickles = foreign(stored, config_dir), trusted(stored)
    for key, value in [*classes, *pickles]:
        reason = (
            f"uses the class {value}, which is not part of fedbench and may run any code; if you trust it"
            if (key, value) in classes
            else f"trusts {value}, whose pickles may run code when they are read; if you know who wrote it"
        )
        is_repeated = value_by_key.get(key) == str(value)
        require(is_repeated, f"resume={folder}: its config.yaml {reason}, add {key}={value_text(value)} to the command")


def record(folder: Path, overrides: list[str]) -> None:
    """Save the overrides of a resume in .hydra/overrides.resume-<k>.yaml.

    Args:
        folder: The run folder.
        overrides: The overrides of the command, without resume=.
    """
    inner = folder / ".hydra"
    inner.mkdir(exist_ok=True)
    path = next(p for k in count(1) if not (p := inner / f"overrides.resume-{k}.yaml").exists())
    path.write_text(yaml.safe_dump(list(overrides)), encoding="utf-8")


def unchanged_hardware(folder: Path, values: Mapping[str, Any], overrides: list[str]) -> str:
    """Return a notice that hardware options of the command have no effect; "" if it has no hardware options.

    Args:
        folder: The run folder.
        values: The configuration of the run.
        overrides: The overrides of the command.
    """
    if not any(text.lstrip("+").startswith("hardware") for text in overrides):
        return ""
    options = ", ".join(f"{key}={show(value)}" for key, value in values["hardware"].items())
    return f"{folder} is resumed with its first hardware options ({options}), so that the results are bit-exact"


def require_run(folder: Path) -> None:
    """Raise ConfigError unless the folder has a config.yaml, and no subfolder named like a file of a run."""
    require(folder.is_dir(), f"resume={folder}: there is no such run folder; give the folder of an earlier run")
    path = folder / "config.yaml"
    require(
        path.is_file(),
        f"resume={folder}: this is not a run folder, because it has no config.yaml; give the folder of an earlier run",
    )
    check_files(folder)


def _read(folder: Path) -> dict[str, Any]:
    """Return the content of a run's config.yaml as dicts and lists.

    Raises:
        ConfigError: It cannot be read, or was not saved by fedbench, because it lacks "choices" or "rounds".
    """
    path = folder / "config.yaml"
    stored = OmegaConf.to_container(load_config(path))
    is_valid = isinstance(stored, dict) and isinstance(stored.get("choices"), dict) and "rounds" in stored
    require(is_valid, f"resume={folder}: its config.yaml was not saved by fedbench; restore it, or start a new run")
    return stored  # type: ignore[return-value]


def _target(stored: Mapping[str, Any], group: str) -> str | None:
    """Return the dotted path of a class, ``GROUP._target_`` in a run's configuration; None if it is missing."""
    return stored[group].get("_target_") if isinstance(stored.get(group), Mapping) else None


def _checked(folder: Path, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Check a stored configuration, and return its values.

    Args:
        folder: The run folder, for messages.
        stored: The stored configuration.

    Raises:
        ConfigError: It has a removed option, or a key or value that this release does not accept.
    """
    for group, values in stored.items():
        refuse_removed(f"resume={folder}: {group}", values)
    try:
        return check(OmegaConf.create(dict(stored)))
    except ConfigError as error:
        raise ConfigError(
            f"resume={folder}: its config.yaml was not saved by fedbench in this form: {error}"
        ) from error


def _requested(composer: Composer, overrides: Sequence[Override]) -> dict[str, Any]:
    """Return the values that the overrides set, by dotted key.

    The chosen option of a group is under choices.<group>.  For groups that a resumed run may change (tracking and
    callbacks), the values of the option's file are included.

    Args:
        composer: Composes the files of options.
        overrides: The overrides of the command.

    Raises:
        ConfigError: An override has several values, deletes a key, or chooses an unknown option.
    """
    requested: dict[str, Any] = {}
    for override in overrides:
        key, text = override.key_or_group, override.input_line
        require(
            not override.is_sweep_override(), f"{text} has several values, but resume= is for one run: give one value"
        )
        require(not override.is_delete(), f"{text} deletes a key, but a resumed run cannot change: remove it")
        value = override.value()
        if key in GROUPS:
            check_choice(override, composer.folders)
            requested[f"choices.{key}"] = ",".join(value) if isinstance(value, list) else value
            if is_matched(key, CHANGEABLE):  # a group that a resumed run may change
                requested[key] = to_dict(composer.compose([str(text)])[key])
        elif not override.is_hydra_override():
            resolved = OmegaConf.to_container(OmegaConf.create({"value": value}), resolve=True)
            requested |= flatten({key: with_home(resolved)["value"]})  # with_home expands ~ in paths
    return requested


def _check_same(folder: Path, stored: Mapping[str, Any], requested: Mapping[str, Any]) -> None:
    """Raise ConfigError if the command sets a key that a resumed run cannot change to another value.

    Args:
        folder: The run folder, for messages.
        stored: The configuration of the run.
        requested: The values that the command sets, by dotted key.
    """
    flat = flatten(stored)
    # ABSENT equals no value.  NOT_COMPARED are keys that a resumed run may change, such as hardware.device.
    changed = [
        key
        for key, value in requested.items()
        if flat.get(key, ABSENT) != value and key != "rounds" and not is_matched(key, NOT_COMPARED)
    ]
    unknown = next((key for key in changed if key not in flat), None)
    if unknown is not None:
        group, _, name = unknown.partition(".")
        # if the unknown key is an option that an earlier version had, the message says what replaces it
        refuse_removed(group, {"_target_": _target(stored, group), name: requested[unknown]})
        keys = [key for key in flat if not key.startswith("choices")]
        advice = nearest(unknown, keys) or " remove it, because a resumed run cannot change"
        raise ConfigError(f"{unknown} is not a key of this run:{advice}")
    values = [
        f"{key.removeprefix('choices.')}={show(flat[key])} (requested: {show(requested[key])})" for key in changed
    ]
    require(
        not values,
        f"resume={folder}: the run has {', '.join(values)}; a resumed run cannot change, so remove these or start a "
        "new run",
    )


def _check_checkpoint(folder: Path, finished: bool) -> None:
    """Raise ConfigError if a run folder has no checkpoint, unless `finished`: whether the run is finished."""
    has_checkpoint = any((folder / name).exists() for name in CHECKPOINTS)
    require(has_checkpoint or finished, f"resume={folder}: it has no {CHECKPOINTS[0]}; start the run again")
