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
from yaml import YAMLError

from fedbench.core import moved
from fedbench.core.files import replacing
from fedbench.core.nested import flatten
from fedbench.core.options import ConfigError, require
from fedbench.core.removed import drop_removed, with_removed
from fedbench.core.renamed import new_name, old_name, rename_options

# Keys that change where a run is, not what it computes: not part of its hash, nor of a sweep cell's name.
WHEREABOUTS = (
    *("resume", "output_dir", "sweep_dir", "data_dir", "dataset.data_dir"),
    *("checkpoint.*", "tracking", "tracking.*", "callbacks", "callbacks.*", "hardware"),
    *("hardware.device", "hardware.executor", "hardware.chunk", "hardware.threads", "hardware.graphs", "hardware.ddp"),
    "hardware.data",
)
# Keys that came after runs had been stored without them, at the values that leave everything as it was.
# Not of a group's class, which has its own defaults.
LATER_KEYS = {"client_weights": "samples", "model.freeze": [], "folds": None, "fold": 0}
LATER_KEYS |= {"system.dropout": 0.0, "system.slow": 0.0, "system.slow_steps": 0.5}
LATER_KEYS |= {"system.fewest_epochs": None}
NEUTRAL = {
    "adapter.convolutions": False,
    "adapter.init": "zero_up",
    "adapter.twin": False,
    "algorithm.adapt": "alpha",
    "optimizer.schedule.per": "round",
    "task.sample_f1": False,
    "task.loss": "bce_mean",
    **LATER_KEYS,
}
NEUTRAL |= {"dataset.scale": "standard", "dataset.fill": "mean", "dataset.constant": False}  # of dataset=table_csv
NEUTRAL |= {"dataset.label_separator": None}  # of dataset=image_table
NEUTRAL |= {"dataset.decimal": "point"}
NEUTRAL |= {"dataset.anatomy": "generated"}  # of dataset=tumours
NEUTRAL |= {"dataset.window": None}  # of images
NEUTRAL |= {"model.l1": 0.0, "model.bias": True}  # of model=logistic
# of questions about pictures
NEUTRAL |= {"dataset.min_count": 1, "dataset.answers": "all", "dataset.normalizer": "plain"}
# Groups that came later, at the options that leave everything as it was.
NEUTRAL_GROUPS = {
    "adapter": ("none", {"_target_": "fedbench.adapters.none.NoAdapter"}),
    "task": ("auto", {"_target_": "fedbench.tasks.auto.Auto"}),
    "compression": (
        "none",
        {"_target_": "fedbench.compression.none.NoCompression", "error_feedback": True, "direction": "up"},
    ),
    "callbacks": ("none", {}),
}
# Former patterns of the words in adapter.places; other patterns of these words have no older form.
FORMER_PLACES = {"attention": "*.attn", "mlp": "*.mlp"}
MISSING: Any = object()


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Return a config resolved, as dicts and lists, with ``~/`` expanded.

    Raises:
        ConfigError: A value is missing, or an interpolation has no target.
    """
    try:
        return with_home(OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "the configuration"
        reason = str(error).splitlines()[0]
        missing = "issing mandatory" in reason
        raise ConfigError(f"{key} must be given" if missing else f"{key}: {reason}") from error


def with_home(value: Any) -> Any:
    """Return resolved values with ``~`` expanded in strings that begin with it."""
    if isinstance(value, dict):
        return {key: with_home(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_home(item) for item in value]
    is_below = isinstance(value, str) and (value == "~" or value.startswith("~/"))
    return os.path.expanduser(value) if is_below else value


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

    Removed options count at the values that they had, and renamed ones by their old names. Left out: WHEREABOUTS,
    NEUTRAL values, the display name, the printed cells, the names of the chosen options (their content is in),
    privacy where it is off. A file below data_dir counts by its path relative to it, so that data may move.
    """
    values = plain(cfg) if isinstance(cfg, DictConfig) else dict(cfg)
    if (values.get("privacy") or {}).get("epsilon") is None:
        values.pop("privacy", None)
    for group, (_, neutral) in NEUTRAL_GROUPS.items():
        if values.get(group) == neutral:
            del values[group]
    root = str(values["data_dir"]).rstrip("/\\")
    flat = {key: value for key, value in flatten(with_removed(values)).items() if NEUTRAL.get(key, MISSING) != value}
    counted = {old_name(key): _canonical(key, value, root) for key, value in flat.items() if not _is_left_out(key)}
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()


def _is_left_out(key: str) -> bool:
    return key in ("name", "paper") or key.startswith(("choices.", "paper.")) or is_matched(key, WHEREABOUTS)


def _canonical(key: str, value: Any, root: str) -> Any:
    """1.0 as 1, paths below root relative to it, and targets by the names that they had first, so that equal settings
    have equal text."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [_canonical(key, item, root) for item in value]
    if key == "adapter.places":
        place = str(value).removeprefix("optional:")
        return FORMER_PLACES.get(place, place)
    if isinstance(value, str) and value.startswith((f"{root}/", f"{root}\\")):
        return f"<data_dir>{value[len(root) :]}"
    return moved.original(value) if key.endswith("_target_") and isinstance(value, str) else value


def renewed(values: Any) -> Any:
    """Stored values whose targets are those by which their classes are found now."""
    if isinstance(values, list):
        return [renewed(value) for value in values]
    if not isinstance(values, Mapping):
        return values
    return {
        key: moved.current(value) if str(key).endswith("_target_") and isinstance(value, str) else renewed(value)
        for key, value in values.items()
    }


def update_stored(values: dict[str, Any]) -> None:
    """Bring the nested values of a stored run up to date.

    Keys and groups that came later are added.  Options that were removed are deleted where they had no effect.
    """
    drop_removed(values)
    rename_options(values)
    if isinstance(values.get("choices"), dict):
        for key, neutral in LATER_KEYS.items():
            group, _, name = key.rpartition(".")
            of = values.setdefault(group, {}) if group else values
            if isinstance(of, dict):  # a stored file may have been edited into anything
                of.setdefault(name, neutral)
        for group, (option, neutral) in NEUTRAL_GROUPS.items():
            values.setdefault(group, dict(neutral))
            values["choices"].setdefault(group, option)


def updated_flat(flat: dict[str, Any]) -> dict[str, Any]:
    """Return stored values by dotted key, brought up to date as by `update_stored`."""
    flat = {**LATER_KEYS, **{new_name(key): value for key, value in flat.items()}}
    drop_removed(flat)
    for group, (option, neutral) in NEUTRAL_GROUPS.items():
        if not any(key.startswith(f"{group}.") for key in flat):
            flat = {**flat, f"choices.{group}": option, **flatten({group: neutral})}
    return flat


def save_config(cfg: DictConfig | Mapping[str, Any], path: Path) -> None:
    """Write a resolved config as YAML, atomically."""
    values = plain(cfg) if isinstance(cfg, DictConfig) else dict(cfg)
    with replacing(path) as partial:
        OmegaConf.save(OmegaConf.create(values), partial)


def load_config(path: Path) -> DictConfig:
    """A saved config: plain values only, so that reading it can run nothing.

    ConfigError when it is not readable as such.
    """
    try:
        text = path.read_text(encoding="utf-8")
        cfg = OmegaConf.create(text)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"{path} cannot be read: {reason}") from error
    require(isinstance(cfg, DictConfig) and "${" not in text, f"{path} is not a config that fedbench saved")
    values = renewed(OmegaConf.to_container(cfg))
    if "resume" in values:
        values["resume"] = None
    update_stored(values)
    return OmegaConf.create(values)  # type: ignore[return-value]


def clients_to_train(num_clients: int, num_new: int) -> int:
    """N: all clients but those that come after training; ConfigError where that leaves none."""
    require(
        num_new < num_clients,
        f"new_clients.count={num_new} leaves nobody to train: the partition has {num_clients} clients",
    )
    return num_clients - num_new


def check_cohort(clients_per_round: int | None, num_clients: int) -> None:
    """ConfigError where a round asks for more clients than there are."""
    require(
        clients_per_round is None or clients_per_round <= num_clients,
        f"clients_per_round={clients_per_round} is more than the {num_clients} clients there are",
    )
