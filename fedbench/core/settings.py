"""The configuration of a run as plain values: resolve, hash, save, load, and update those of older versions."""

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

# Keys that do not affect results, such as folders and devices.  They are not in the configuration's hash, nor in the
# names of a sweep's run folders.
UNHASHED_KEYS = (
    *("resume", "output_dir", "sweep_dir", "data_dir", "dataset.data_dir"),
    *("checkpoint.*", "tracking", "tracking.*", "callbacks", "callbacks.*", "hardware"),
    *("hardware.device", "hardware.executor", "hardware.chunk", "hardware.threads", "hardware.graphs", "hardware.ddp"),
    *("hardware.data", "hardware.rows", "hardware.samples"),
)
# Keys of later versions, with the values that have no effect.  They are added to stored runs of older versions.
LATER_KEYS = {"client_weights": "samples", "model.freeze": [], "folds": None, "fold": 0}
LATER_KEYS |= {"system.dropout": 0.0, "system.slow": 0.0, "system.slow_steps": 0.5}
LATER_KEYS |= {"system.fewest_epochs": None, "local.steps": None, "stop.patience": None}
LATER_CHOICES = {"privacy": "local"}  # options of sections that older versions had without a choice
# Keys of later versions, with the values that are not hashed, so that older runs keep their hashes.
LATER_OPTIONS = {
    "adapter.convolutions": False,
    "adapter.init": "zero_up",
    "adapter.sync": "average",
    "adapter.twin": False,
    "algorithm.adapt": "alpha",
    "optimizer.schedule.per": "round",
    "task.sample_f1": False,
    "task.loss": "bce_mean",
    **LATER_KEYS,
}
LATER_OPTIONS |= {"dataset.scale": "standard", "dataset.fill": "mean", "dataset.constant": False}  # dataset=table_csv
LATER_OPTIONS |= {"dataset.label_separator": None}  # dataset=image_table
LATER_OPTIONS |= {"dataset.decimal": "point"}
LATER_OPTIONS |= {"dataset.anatomy": "generated"}  # dataset=tumours
LATER_OPTIONS |= {"dataset.window": None}  # images
LATER_OPTIONS |= {"model.l1": 0.0, "model.bias": True}  # model=logistic
# visual question answering
LATER_OPTIONS |= {"dataset.min_count": 1, "dataset.answers": "all", "dataset.normalizer": "plain"}
# Groups of later versions: the option that has no effect, and its values.
LATER_GROUPS = {
    "adapter": ("none", {"_target_": "fedbench.adapters.none.NoAdapter"}),
    "task": ("auto", {"_target_": "fedbench.tasks.auto.Auto"}),
    "compression": (
        "none",
        {"_target_": "fedbench.compression.none.NoCompression", "error_feedback": True, "direction": "up"},
    ),
    "callbacks": ("none", {}),
    "server": ("average", {"_target_": "fedbench.server.average.Average"}),
    "aggregator": ("mean", {"_target_": "fedbench.aggregators.mean.Mean"}),
    "attack": ("none", {"_target_": "fedbench.attacks.none.NoAttack"}),
}
# Names in adapter.places, with the patterns that older versions stored for them.
FORMER_PLACES = {"attention": "*.attn", "mlp": "*.mlp"}
MISSING: Any = object()


def to_dict(cfg: DictConfig) -> dict[str, Any]:
    """Return a configuration as dicts and lists, with interpolations and ``~/`` resolved.

    Args:
        cfg: The configuration.

    Raises:
        ConfigError: A value is missing, or an interpolation cannot be resolved.
    """
    try:
        return with_home(OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "the configuration"
        reason = str(error).splitlines()[0]
        is_missing = "missing mandatory" in reason.lower()  # OmegaConf's message for a value of ???
        raise ConfigError(
            f"{key} must be given: add {key}=..."
            if is_missing
            else f"{key} refers to another value that cannot be resolved ({reason}): correct the name in ${{...}}"
        ) from error


def with_home(value: Any) -> Any:
    """Return nested values in which strings ``~`` and ``~/...`` are replaced by paths in the user's home folder."""
    if isinstance(value, dict):
        return {key: with_home(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_home(item) for item in value]
    is_in_home = isinstance(value, str) and (value == "~" or value.startswith("~/"))
    return os.path.expanduser(value) if is_in_home else value


def is_matched(key: str, patterns: Iterable[str]) -> bool:
    """Return whether a dotted key matches any of the patterns with the wildcards of fnmatch, such as ``tracking.*``."""
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def show(value: Any) -> str:
    """Return a value as text for messages, in YAML: null, true, 'text', [1, 2], {key: value}."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(show, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {show(item)}" for key, item in value.items()) + "}"
    return repr(value)


def config_hash(cfg: DictConfig | Mapping[str, Any]) -> str:
    """Return the sha256 (hex) of all values that affect results.

    Older runs keep their hashes: removed options are hashed at their former values, and renamed ones by their old
    names.  Options (LATER_OPTIONS) and groups (LATER_GROUPS) of later versions are hashed only if they have an effect.
    Keys without effect on results (UNHASHED_KEYS) are not hashed, nor are the display name and the paper's table row.
    The names of the chosen options and privacy that is off are not hashed either.
    Paths in data_dir are hashed relative to it, so that the data may move.

    Args:
        cfg: The configuration, or its values.
    """
    values = to_dict(cfg) if isinstance(cfg, DictConfig) else dict(cfg)
    privacy = values.get("privacy") or {}
    # neither privacy=local with epsilon, nor privacy=central, which has a class
    if privacy.get("epsilon") is None and "_target_" not in privacy:
        values.pop("privacy", None)
    for group, (_, neutral) in LATER_GROUPS.items():  # neutral: the values without effect
        if values.get(group) == neutral:
            del values[group]
    root = str(values["data_dir"]).rstrip("/\\")
    flat = {  # LATER_OPTIONS: the value without effect of each later option; MISSING, for others, equals no value
        key: value for key, value in flatten(with_removed(values)).items() if LATER_OPTIONS.get(key, MISSING) != value
    }
    hashed = {old_name(key): _canonical(key, value, root) for key, value in flat.items() if not _is_left_out(key)}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()


def _is_left_out(key: str) -> bool:
    """Return whether `config_hash` omits a dotted key, because its value does not affect results."""
    return key in ("name", "paper") or key.startswith(("choices.", "paper.")) or is_matched(key, UNHASHED_KEYS)


def _canonical(key: str, value: Any, root: str) -> Any:
    """Return a value such that equal settings have equal JSON.

    1.0 becomes 1, and paths in root become relative.  Classes get their original paths (moved.py).  Layer names of
    adapter.places become the patterns that older versions stored.

    Args:
        key: The dotted key of the value.
        value: The value.
        root: The folder data_dir, without a slash at its end.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [_canonical(key, item, root) for item in value]
    if key == "adapter.places":
        # "optional:" precedes a place that the model may lack; older versions had no such prefix
        layer = str(value).removeprefix("optional:")
        return FORMER_PLACES.get(layer, layer)  # such as "*.attn" for attention
    if isinstance(value, str) and value.startswith((f"{root}/", f"{root}\\")):
        return f"<data_dir>{value[len(root) :]}"
    return moved.original(value) if key.endswith("_target_") and isinstance(value, str) else value


def renewed(values: Any) -> Any:
    """Return a copy of nested values in which keys that end with ``_target_`` name classes where they are today.

    For example, fedbench.optim.SGD, a path of an earlier release, becomes fedbench.engine.optim.SGD.
    """
    if isinstance(values, list):
        return [renewed(value) for value in values]
    if not isinstance(values, Mapping):
        return values
    return {
        key: moved.current(value) if str(key).endswith("_target_") and isinstance(value, str) else renewed(value)
        for key, value in values.items()
    }


def update_stored(values: dict[str, Any]) -> None:
    """Update the values of a stored run of an older version, in place.

    Keys and groups of later versions are added.  Removed options are deleted if they had no effect.  The entry
    "choices" has the chosen option of each group, such as {"optimizer": "sgd"}.

    Args:
        values: The nested values.
    """
    drop_removed(values)
    rename_options(values)
    if isinstance(values.get("choices"), dict):
        for key, neutral in LATER_KEYS.items():  # keys of later versions, with the values that have no effect
            group, _, name = key.rpartition(".")
            group_values = values.setdefault(group, {}) if group else values
            if isinstance(group_values, dict):  # the file may have been edited
                group_values.setdefault(name, neutral)
        for group, (option, neutral) in LATER_GROUPS.items():  # groups of later versions, with options of no effect
            values.setdefault(group, dict(neutral))
            values["choices"].setdefault(group, option)
        values["choices"] = LATER_CHOICES | values["choices"]  # the option that older versions used without a choice


def updated_flat(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a stored run of an older version with today's keys; removed options are omitted.

    Args:
        flat: The values by dotted key.

    Returns:
        The updated values by dotted key.
    """
    # LATER_CHOICES, LATER_KEYS: what older versions lacked, with values of no effect
    choices = {f"choices.{group}": option for group, option in LATER_CHOICES.items()}
    flat = {**LATER_KEYS, **choices, **{new_name(key): value for key, value in flat.items()}}
    drop_removed(flat)
    for group, (
        option,
        values,
    ) in LATER_GROUPS.items():  # groups of options that older versions lack, with values of no effect
        if not any(key.startswith(f"{group}.") for key in flat):
            flat = {**flat, f"choices.{group}": option, **flatten({group: values})}
    return flat


def save_config(cfg: DictConfig | Mapping[str, Any], path: Path) -> None:
    """Write a resolved configuration as YAML, atomically.

    Args:
        cfg: The configuration, or its values.
        path: The file.
    """
    values = to_dict(cfg) if isinstance(cfg, DictConfig) else dict(cfg)
    with replacing(path) as partial:
        OmegaConf.save(OmegaConf.create(values), partial)


def load_config(path: Path) -> DictConfig:
    """Read a saved configuration.  It contains only plain values, so reading it runs no code.

    Args:
        path: The file.

    Returns:
        The configuration, updated to this version.

    Raises:
        ConfigError: The file cannot be read, or was not saved by fedbench.
    """
    try:
        text = path.read_text(encoding="utf-8")
        cfg = OmegaConf.create(text)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(
            f"{path} cannot be read as a configuration ({reason}): restore the file, or name another run"
        ) from error
    require(  # "${" begins an interpolation, which can run code
        isinstance(cfg, DictConfig) and "${" not in text,
        f"{path} was not saved by fedbench, because it is not a mapping of plain values: name the folder of a run",
    )
    values = renewed(OmegaConf.to_container(cfg))  # with the current names of classes that have moved
    if "resume" in values:
        values["resume"] = None  # that of the command which wrote the file; the caller decides anew
    update_stored(values)  # adds and removes options, in place
    return OmegaConf.create(values)  # type: ignore[return-value]


def clients_to_train(num_clients: int, num_new: int) -> int:
    """Return the number of training clients, num_clients - num_new.

    Args:
        num_clients: The number of all clients.
        num_new: The number of new clients, which take no part in training.

    Raises:
        ConfigError: There is no training client.
    """
    require(
        num_new < num_clients,
        f"new_clients.count={num_new} must be less than the number of clients, {num_clients}: "
        "lower it, or raise partition.num_clients",
    )
    return num_clients - num_new


def check_cohort(clients_per_round: int | None, num_clients: int) -> None:
    """Raise ConfigError if the option clients_per_round (None: not set) exceeds the number of training clients."""
    require(
        clients_per_round is None or clients_per_round <= num_clients,
        f"clients_per_round={clients_per_round} must be at most the number of training clients, {num_clients}: "
        "lower it, or raise partition.num_clients",
    )
