"""What a stopped run may go on with: the configuration that its checkpoint was written with, and more rounds."""

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
    WHEREABOUTS,
    config_hash,
    is_matched,
    load_config,
    plain,
    renewed,
    show,
    updated_flat,
)

FREE = ("name", "paper", "paper.*", *(key for key in WHEREABOUTS if not key.startswith("hardware")))
# choices.* follow from the keys; hardware is kept as it was, whatever is asked
KEPT_OR_FREE = (*FREE, "hardware.*", "choices.hardware", "choices.tracking", "choices.callbacks")
ABSENT: Any = object()


def check_saved(cfg: DictConfig, run_dir: Path, saved: dict[str, Any]) -> None:
    """ConfigError unless a checkpoint was written by a run of this config; rounds may have grown."""
    values, done = plain(cfg), saved["round"]
    then = updated_flat(renewed(json.loads(saved["config"]))) if "config" in saved else {}
    known = [then["rounds"]] if then else [cfg.rounds, *requested_rounds(run_dir)]
    wrote = next((r for r in known if config_hash({**values, "rounds": r}) == saved["config_hash"]), 0)
    keys = changed(then, flatten(values))
    names = f" ({', '.join(keys)})" if keys else ""
    require(
        wrote > 0 and not any(key.startswith("choices.") for key in keys),
        f"resume={run_dir}: config.yaml is not the one that its checkpoint was written with{names}; put it back, "
        "or start a new run",
    )
    require(
        type(done) is int and 1 <= done <= wrote,
        f"resume={run_dir}: the checkpoint says that {done} rounds were done, of {wrote}",
    )
    check_rounds(run_dir, values, wrote, cfg.rounds)


def check_rounds(folder: Path, stored: Mapping[str, Any], before: int, rounds: int) -> None:
    """Refuse fewer rounds than a run had before, and more where its learning rates depended on their number."""
    require(rounds >= before, f"resume={folder}: rounds={rounds} is below the run's {before}")
    schedule = (stored["optimizer"].get("schedule") or {}).get("name", "constant")
    why = f"the learning rates of optimizer.schedule.name={schedule} so far were those of {before} rounds"
    free = rounds == before or schedule in ("constant", "exponential")
    require(free, f"resume={folder}: rounds cannot grow, because {why}")


def changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys (dotted) of a run's config whose values were others, as key=now (was: then)."""
    return [
        f"{key}={show(now.get(key))} (was: {show(then.get(key))})"
        for key in sorted({*then, *now})
        if then
        and then.get(key, ABSENT) != now.get(key, ABSENT)
        and key != "rounds"
        and not is_matched(key, KEPT_OR_FREE)
    ]


def requested_rounds(folder: Path) -> list[int]:
    """Every number of rounds that the run in a folder was ever asked for."""
    path = folder / "config.yaml"
    return [*([int(load_config(path).rounds)] if path.is_file() else []), *_earlier_rounds(folder)]


def _earlier_rounds(folder: Path) -> Iterator[int]:
    """rounds= of earlier resumes: what they added stays asked for."""
    for path in sorted((folder / ".hydra").glob("overrides.resume-*.yaml")):
        try:
            words = yaml.safe_load(path.read_text(encoding="utf-8")) or []
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(
                f"{path} cannot be read ({str(error).splitlines()[0]}): it tells the rounds that an "
                "earlier resume= asked for"
            ) from error
        for text in words if isinstance(words, list) else ():
            match = re.fullmatch(r"\+*rounds=(\d+)", str(text))
            if match:
                yield int(match[1])
