"""A run's configuration as plain values: resolved, flattened, shown, hashed, saved and read again."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedbench.core import moved
from fedbench.core.options import ConfigError, require

# Keys that change where a run is, not what it computes: not part of its hash, nor of a sweep cell's name.
WHEREABOUTS = (
    *("resume", "output_dir", "sweep_dir", "data_dir", "dataset.data_dir"),
    *("checkpoint.*", "tracking", "tracking.*", "hardware"),
    *("hardware.device", "hardware.executor", "hardware.chunk", "hardware.threads", "hardware.graphs", "hardware.ddp"),
)
# Keys that came after runs had been stored without them, at the values that leave everything as it was.
NEUTRAL = {"algorithm.adapt": "alpha"}
MISSING: Any = object()


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Resolved, as dicts and lists; ConfigError for a missing value or an interpolation to nowhere."""
    try:
        return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "the configuration"
        said = str(error).splitlines()[0]
        missing = "issing mandatory" in said
        raise ConfigError(f"{key} must be given" if missing else f"{key}: {said}") from error


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted key -> value; lists and empty mappings are values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def is_matched(key: str, patterns: Iterable[str]) -> bool:
    """Whether a dotted key matches one of the patterns (``tracking.*``)."""
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def show(value: Any) -> str:
    """A value as the user would write it in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(show, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {show(item)}" for key, item in value.items()) + "}"
    return repr(value)


def config_hash(cfg: DictConfig | Mapping[str, Any]) -> str:
    """sha256 (hex) of everything that can change a run's numbers.

    Left out: WHEREABOUTS, NEUTRAL values, the display name, the printed cells, the names of the chosen options (their
    content is in), privacy where it is off.  A file below data_dir counts by its path relative to it, so that data
    may move.
    """
    values = plain(cfg) if isinstance(cfg, DictConfig) else dict(cfg)
    if (values.get("privacy") or {}).get("epsilon") is None:
        values.pop("privacy", None)
    root = str(values["data_dir"]).rstrip("/\\")
    flat = {key: value for key, value in flatten(values).items() if NEUTRAL.get(key, MISSING) != value}
    kept = {key: _canonical(key, value, root) for key, value in flat.items() if not _aside(key)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _aside(key: str) -> bool:
    return key in ("name", "paper") or key.startswith(("choices.", "paper.")) or is_matched(key, WHEREABOUTS)


def _canonical(key: str, value: Any, root: str) -> Any:
    """1.0 as 1, paths below root relative to it, and targets by the names that they had first, so that equal settings
    have equal text."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [_canonical(key, item, root) for item in value]
    if isinstance(value, str) and value.startswith((f"{root}/", f"{root}\\")):
        return f"<data_dir>{value[len(root) :]}"
    return moved.original(value) if key.endswith("_target_") and isinstance(value, str) else value


def renewed(values: Any) -> Any:
    """Stored values whose targets are those by which their classes are found now."""
    if isinstance(values, list):
        return [renewed(value) for value in values]
    if not isinstance(values, Mapping):
        return values
    return {key: moved.current(value) if str(key).endswith("_target_") and isinstance(value, str) else renewed(value)
            for key, value in values.items()}


def save_config(cfg: DictConfig | Mapping[str, Any], path: Path) -> None:
    """Write a resolved config as YAML, atomically."""
    values = plain(cfg) if isinstance(cfg, DictConfig) else dict(cfg)
    part = path.with_name(f"{path.name}.part")
    try:
        OmegaConf.save(OmegaConf.create(values), part)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def load_config(path: Path) -> DictConfig:
    """A saved config: plain values only, so that reading it can run nothing.

    ConfigError when it is not readable as such.
    """
    try:
        text = path.read_text(encoding="utf-8")
        cfg = OmegaConf.create(text)
    except Exception as error:  # yaml and omegaconf have no common base
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"{path} cannot be read: {said}") from error
    require(isinstance(cfg, DictConfig) and "${" not in text, f"{path} is not a config that fedbench saved")
    values = renewed(OmegaConf.to_container(cfg))
    if "resume" in values:
        values["resume"] = None
    return OmegaConf.create(values)  # type: ignore[return-value]


def clients_to_train(everyone: int, new: int) -> int:
    """N: all clients but those that come after training."""
    require(new < everyone, f"new_clients.count={new} leaves nobody to train: the partition has {everyone} clients")
    return everyone - new


def check_cohort(clients_per_round: int | None, num_clients: int) -> None:
    require(clients_per_round is None or clients_per_round <= num_clients,
            f"clients_per_round={clients_per_round} is more than the {num_clients} clients there are")
