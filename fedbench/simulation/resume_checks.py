"""Check that a resumed run has the configuration of its checkpoint.  Only some options may change, such as rounds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from fedbench.core.nested import flatten
from fedbench.core.options import ConfigError, require
from fedbench.core.settings import (
    UNHASHED_KEYS,
    config_hash,
    is_matched,
    load_config,
    renewed,
    show,
    to_dict,
    updated_flat,
)

# Patterns of keys that may change when a run resumes.
CHANGEABLE = ("name", "paper", "paper.*", *(key for key in UNHASHED_KEYS if not key.startswith("hardware")))
# Patterns of keys that are not compared.  Hardware options of a command are ignored.
NOT_COMPARED = (*CHANGEABLE, "hardware.*", "choices.hardware", "choices.tracking", "choices.callbacks")
ABSENT: Any = object()


def check_saved(cfg: DictConfig, run_dir: Path, saved: dict[str, Any]) -> None:
    """Check that a checkpoint was written by a run of this configuration, possibly with fewer rounds.

    Args:
        cfg: The configuration.
        run_dir: The run folder.
        saved: The content of the checkpoint.

    Raises:
        ConfigError: The checkpoint is of another configuration.
    """
    values, done = to_dict(cfg), saved["round"]
    # Old checkpoints have only the hash of their configuration, so all values that rounds may have had are tried.
    # Names of classes (renewed) and keys (updated_flat) of older versions become those of today.
    stored = updated_flat(renewed(json.loads(saved["config"]))) if "config" in saved else {}
    candidates = [stored["rounds"]] if stored else [cfg.rounds, *requested_rounds(run_dir)]
    rounds_before = next((r for r in candidates if config_hash({**values, "rounds": r}) == saved["config_hash"]), 0)
    keys = changed(stored, flatten(values))
    names = f" ({', '.join(keys)})" if keys else ""
    require(
        rounds_before > 0 and not any(key.startswith("choices.") for key in keys),
        f"resume={run_dir}: config.yaml differs from the configuration of the checkpoint{names}; restore it, or start "
        "a new run",
    )
    require(
        type(done) is int and 1 <= done <= rounds_before,
        f"resume={run_dir}: the checkpoint is damaged, because its round is {done} of {rounds_before}: restore the "
        "checkpoint, or start a new run",
    )
    check_rounds(run_dir, values, rounds_before, cfg.rounds)


def check_rounds(folder: Path, stored: Mapping[str, Any], before: int, rounds: int) -> None:
    """Check a new number of rounds of a run.

    Args:
        folder: The run folder, for error messages.
        stored: The configuration of the run.
        before: The number of rounds before.
        rounds: The new number of rounds.

    Raises:
        ConfigError: There are fewer rounds, or more although learning rates or noise depend on their number.
    """
    require(
        rounds >= before,
        f"resume={folder}: rounds={rounds} is less than the run's {before}: leave it out, or give a larger number",
    )
    schedule = (stored["optimizer"].get("schedule") or {}).get("name", "constant")
    require(
        rounds == before or schedule in ("constant", "exponential"),
        f"resume={folder}: rounds={rounds} cannot replace {before}, because the learning rates of "
        f"optimizer.schedule.name={schedule} depend on the number of rounds; leave it out, or start a new run",
    )
    target = (stored.get("privacy") or {}).get("target_epsilon")
    require(
        rounds == before or target is None,
        f"resume={folder}: rounds={rounds} cannot replace {before}, because the noise of its finished rounds was "
        f"computed from privacy.target_epsilon={target} for {before} rounds; leave it out, or start a new run",
    )


def changed(stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ, as "key=value (was: value)".  Keys that may change are not compared.

    Args:
        stored: The configuration in the checkpoint by dotted key; empty if the checkpoint has none.
        current: The configuration to compare by dotted key.
    """
    if not stored:
        return []
    return [  # ABSENT stands for a missing key, because None may be a value
        f"{key}={show(current.get(key))} (was: {show(stored.get(key))})"
        for key in sorted({*stored, *current})
        if stored.get(key, ABSENT) != current.get(key, ABSENT) and key != "rounds" and not is_matched(key, NOT_COMPARED)
    ]


def requested_rounds(folder: Path) -> list[int]:
    """Return all numbers of rounds that a run was started or resumed with, as far as its folder records them.

    Args:
        folder: The run folder.

    Returns:
        The option rounds in config.yaml, if the file exists; then those in earlier commands with resume=, in order.
    """
    path = folder / "config.yaml"
    return [*([int(load_config(path).rounds)] if path.is_file() else []), *_earlier_rounds(folder)]


def _earlier_rounds(folder: Path) -> Iterator[int]:
    """Yield the values of rounds= in the earlier resume commands of a run, which are stored in its folder .hydra.

    Raises:
        ConfigError: A file with such a command cannot be read.
    """
    for path in sorted((folder / ".hydra").glob("overrides.resume-*.yaml")):
        try:
            overrides = yaml.safe_load(path.read_text(encoding="utf-8")) or []
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(
                f"{path} cannot be read ({str(error).splitlines()[0]}): it has the number of rounds of an earlier "
                "resume=; restore it, or start a new run"
            ) from error
        for text in overrides if isinstance(overrides, list) else ():
            match = re.fullmatch(r"\+*rounds=(\d+)", str(text))  # Hydra's + or ++ may precede a key
            if match:
                yield int(match[1])
