"""``resume=<run directory>``: what the run was, and that the command does not ask for anything else.

A stored config is data from disk: it is read as plain values, and only targets that this installation's conf
(or the user's own --config-dir or command line) names are ever built from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from fedbench.app.compose import Composer
from fedbench.config.check import check
from fedbench.config.choices import with_choices
from fedbench.config.conf_tree import GROUPS, conf_dirs, group_options, is_class, label_of
from fedbench.config.run_keys import RESERVED
from fedbench.config.targets import as_word, foreign, trusted
from fedbench.core.files import read_json
from fedbench.core.nested import flatten
from fedbench.core.options import ConfigError, require
from fedbench.core.settings import is_matched, load_config, plain, show
from fedbench.simulation.continuing import ABSENT, FREE, KEPT_OR_FREE, check_rounds, rounds_asked
from fedbench.simulation.run_folder import CHECKPOINTS, check_files, is_finished


def prepare(folder: Path, overrides: list[str], config_dir: str | None) -> tuple[dict[str, Any], bool]:
    """The config to go on with, and whether the run is finished; ConfigError for what forbids resuming."""
    stored = _read(folder)
    for group in RESERVED:  # runs of other classes were once named after the option
        option, folders = stored["choices"].get(group), conf_dirs(config_dir)
        stored["choices"][group] = label_of(group, option, _target(stored, group), folders)
    repeated = _repeated(folder, stored, overrides, config_dir)
    _check_stored(folder, stored)
    changed = {}
    if len(overrides) > len(repeated):
        changed = _compare(folder, overrides, repeated, stored, config_dir)
    stored["rounds"] = max([stored["rounds"], *rounds_asked(folder)])
    rounds = changed.pop("rounds", stored["rounds"])
    _check_same(folder, stored, changed)
    check_rounds(folder, stored, stored["rounds"], rounds)
    merged = OmegaConf.create(stored)
    for key, value in {**changed, "rounds": rounds}.items():
        if key == "rounds" or is_matched(key, FREE):
            OmegaConf.update(merged, key, value)
    values = check(merged)
    done = read_json(folder / "summary.json").get("rounds", 0)
    finished = isinstance(done, int) and rounds <= done and is_finished(folder, values)
    _check_checkpoint(folder, finished)
    return values, finished


def _repeated(folder: Path, stored: Mapping[str, Any], overrides: list[str], config_dir: str | None) -> dict[str, str]:
    """Return the overrides, by key, that repeat values which would run code.

    Raises:
        ConfigError: The overrides do not repeat one of them.
    """
    given = {o.key_or_group: o for o in Composer(config_dir).parse(overrides)}
    classes, pickles = foreign(stored, config_dir), trusted(stored)
    for key, value in [*classes, *pickles]:
        is_repeated = key in given and str(given[key].value()) == value
        said = (
            f"builds {value}, which nothing in this installation's conf names; if it is yours"
            if (key, value) in classes
            else f"trusts {value}, whose pickles may run code when they are read; if you know who wrote it"
        )
        require(is_repeated, f"resume={folder}: its config {said}, say {as_word(key, value)} as well")
    return {key: str(given[key].input_line) for key, _ in [*classes, *pickles]}


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


def _check_stored(folder: Path, stored: Mapping[str, Any]) -> None:
    """Refuse a stored config whose values are not those of a run, before anything is computed with them."""
    try:
        check(OmegaConf.create(dict(stored)))
    except ConfigError as error:
        raise ConfigError(f"resume={folder}: its config.yaml is not one that fedbench saved: {error}") from error


def _compare(
    folder: Path, overrides: list[str], repeated: Mapping[str, str], stored: Mapping[str, Any], config_dir: str | None
) -> dict[str, Any]:
    """The values (dotted) that the overrides set on top of the run's own options.

    repeated: those of them that only name what the run has; what follows from them was not asked for.
    """
    composer = Composer(config_dir)
    composer.refuse_repeated(overrides)
    named = {override.key_or_group for override in composer.parse(overrides)}
    base = []
    for group, option in stored["choices"].items():
        if not option or group == "experiment" or is_class(group, option, _target(stored, group), composer.folders):
            continue
        if option in group_options(group, composer.folders):
            base.append(f"{group}={option}")
            continue
        asked = next((key for key in named - repeated.keys() if key.startswith(f"{group}.")), None)
        require(
            asked is None,
            f"resume={folder}: whether {asked} is as the run had it cannot be told, because {group}={option} is an "
            "option of another folder: give that one with --config-dir",
        )
    before, after = _values(composer, [*base, *repeated.values()]), _values(composer, [*base, *overrides])
    given = [pattern for key in named if key not in GROUPS for pattern in (key, f"{key}.*")]
    return {k: v for k, v in after.items() if v != before.get(k, ABSENT) or is_matched(k, given)}


def _values(composer: Composer, overrides: list[str]) -> dict[str, Any]:
    full = composer.compose(overrides)
    cfg = with_choices(full, full.hydra)
    names_class = any("._target_=" in text for text in overrides)  # its options are in the stored config only
    return flatten(plain(cfg) if names_class else check(cfg))


def _check_same(folder: Path, stored: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
    """Refuse keys that the command sets to other values than the run had."""
    flat = flatten(stored)
    other = [k for k, v in changed.items() if flat.get(k, ABSENT) != v and not is_matched(k, KEPT_OR_FREE)]
    groups = [key.removeprefix("choices.") for key in other if key.startswith("choices.")]
    within = [f"{group}.*" for group in groups]  # another option has other keys: say only which
    lines = [
        f"{key.removeprefix('choices.')}={show(flat[key]) if key in flat else 'absent'} (asked: {show(changed[key])})"
        for key in other
        if not is_matched(key, within)
    ]
    before = f"resume={folder}: it was run with {', '.join(lines)}"
    require(not lines, f"{before}; a run goes on as it was, so leave these out or start a new one")


def _check_checkpoint(folder: Path, finished: bool) -> None:
    has_checkpoint = any((folder / name).exists() for name in CHECKPOINTS)
    require(has_checkpoint or finished, f"resume={folder}: it has no {CHECKPOINTS[0]} to go on from; start it again")
