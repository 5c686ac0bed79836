"""Record which option, or class of the user, a composed configuration has for each group, such as model."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fedbench.config.conf_tree import GROUPS, class_name, is_class, keys_set, label_of, target_of
from fedbench.config.run_keys import RESERVED
from fedbench.core.options import require
from fedbench.core.renamed import new_name, rename_options

log = logging.getLogger(__name__)


def with_choices(cfg: DictConfig, hydra: Any) -> DictConfig:
    """Return a copy of a composed configuration, without its key hydra (Hydra's own options).

    Its new key ``choices`` has the chosen option of each group, such as {"algorithm": "fedavg"}.

    If another class is given (``model._target_=my.Net``) than that of the chosen option, the choice is the name of that
    class.  If the command line gives it, the values of the option's file are removed, because they are for the option's
    class.

    Args:
        cfg: The composed configuration.
        hydra: The value of the configuration's key hydra, with the chosen options and the overrides.

    Raises:
        ConfigError: The command line gives both clients_per_round and sample_rate.
    """
    overrides: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    folders = [Path(source.path) for source in hydra.runtime.config_sources if source.schema == "file"]
    choices = {**hydra.runtime.choices, **_chosen_lists(overrides)}  # choices such as [a,b], which Hydra omits
    cfg = cfg.copy()
    with open_dict(cfg):
        cfg.pop("hydra", None)
        cfg.choices = {group: choices.get(group) for group in GROUPS}
        for group in RESERVED:  # the groups whose options are classes
            overridden: dict[str, str] = {}  # the overrides of each key of the group, joined by spaces
            for text in overrides:
                if match := re.match(rf"\+*{group}\.(\w+)", text):
                    overridden[match[1]] = f"{overridden.get(match[1], '')} {text}"
            _record_class(cfg, group, overridden, folders)
        _choose_cohort_key(cfg, overrides)
        _set_weights_for_privacy(cfg, overrides)
        for old in rename_options(cfg):  # which replaces old names of keys in cfg, and returns them
            _warn_of_old_name(old)
    return cfg


@cache
def _warn_of_old_name(old: str) -> None:
    """Warn that an option has a new name.  The function is cached, so that it warns once per process and option.

    Args:
        old: The dotted key that the user gave.
    """
    log.warning(
        "%s is now called %s: use the new name, because the old one is accepted for one release only",
        old,
        new_name(old),
    )


def _record_class(cfg: DictConfig, group: str, overridden: Mapping[str, str], folders: list[Path]) -> None:
    """Replace the choice of a group by the name of a class, if ``_target_`` is not the class of the chosen option.

    For example, choices.model becomes "MyNet" with model._target_=my.MyNet.  If the command line gives the class, the
    other values of the option's file are removed.

    Args:
        cfg: The configuration with ``choices`` (the chosen option of each group); changed in place.
        group: The group of options, such as "algorithm".
        overridden: The keys of the group that the command line sets, each with its overrides as text.
        folders: The folders of options.
    """
    option, target = cfg.choices[group], _target(cfg, group)
    if target is None or option is None or target_of(group, str(option), folders) == target:
        return
    if "_target_" in overridden:
        # all keys but those that the user's files or command set
        _drop_values_of_option(cfg, group, {**_set_in_files(cfg, group, folders), **overridden})
        cfg.choices[group] = class_name(group, target, folders)
    else:  # a file sets the class; if it only takes it from another key (${...}), the option's name remains
        cfg.choices[group] = label_of(group, str(option), target, folders)


def _target(cfg: DictConfig, group: str) -> str | None:
    """Return the value of GROUP._target_; None if it is missing or no text, which `check` reports later."""
    try:
        target = OmegaConf.select(cfg, f"{group}._target_")
    except OmegaConfBaseException:
        return None
    return target if isinstance(target, str) else None


def _set_in_files(cfg: DictConfig, group: str, folders: list[Path]) -> dict[str, str]:
    """Return the keys of a group that the user's local.yaml and chosen experiment files set; the last file counts.

    Args:
        cfg: The configuration with ``choices`` (the chosen option of each group).
        group: The group of options, such as "algorithm".
        folders: The folders of options.

    Returns:
        The values as text, by key without the group: {"lr": "0.1"} for optimizer.lr=0.1.
    """
    names = [f"experiment/{name}" for name in str(cfg.choices.experiment or "").split(",") if name]
    of_each_file = [keys_set(name, group, folders) for name in ["local", *names]]
    return {key: text for keys in of_each_file for key, text in keys.items()}


def _drop_values_of_option(cfg: DictConfig, group: str, requested: Mapping[str, str]) -> None:
    """Remove the keys of a group that only the file of the chosen option sets.

    It is called if the user names another class than that of the option: these values are arguments of the latter.

    Args:
        cfg: The configuration; changed in place.
        group: The group of options, such as "algorithm".
        requested: The keys of the group that the command line and experiment files set, with their values as text.
            These are kept, as are the reserved keys of the group, which fedbench reads itself for any class.
    """
    reserved = getattr(RESERVED[group], "__dataclass_fields__", ())
    for key in set(cfg[group]) - {*requested, *reserved}:
        del cfg[group][key]
    # columns is a mapping of names to patterns for parameters of the class: those are kept whose names were requested
    for name in [*(cfg[group].get("columns") or ())]:
        if not re.search(rf"\b{name}\b", requested.get("columns", "")):
            del cfg[group].columns[name]


def _choose_cohort_key(cfg: DictConfig, overrides: list[str]) -> None:
    """Set clients_per_round of the files to None if the command line gives sample_rate, which replaces it.

    Args:
        cfg: The configuration; changed in place.
        overrides: The overrides of the command line.

    Raises:
        ConfigError: The command line gives both.
    """
    values = dict(text.lstrip("+").split("=", 1) for text in overrides if "=" in text)  # as text, by key
    number, rate = values.get("clients_per_round", "null"), values.get("sample_rate")
    require(
        number == "null" or rate is None,
        f"clients_per_round={number} and sample_rate={rate} both set the clients per round: remove one of them",
    )
    if rate is not None and "clients_per_round" in cfg:
        cfg.clients_per_round = None


def _set_weights_for_privacy(cfg: DictConfig, overrides: list[str]) -> None:
    """Set client_weights=uniform with privacy=central, unless the command line sets it.

    Args:
        cfg: The configuration; changed in place.
        overrides: The overrides of the command line.
    """
    is_set = any(text.lstrip("+").startswith("client_weights=") for text in overrides)
    is_central = _target(cfg, "privacy") is not None  # only privacy=central has a class
    if not is_set and "client_weights" in cfg and is_central:
        cfg.client_weights = "uniform"


def _chosen_lists(overrides: Any) -> dict[str, str]:
    """Return the options of groups that are given a list, as {"experiment": "a,b"} for ``+experiment=[a,b]``.

    Hydra does not record these choices.
    """
    matches = (re.fullmatch(r"\+*(\w+)=\[(.*)\]", text) for text in overrides)
    return {match[1]: match[2].replace(" ", "") for match in matches if match}


def named_classes(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the groups for which the user named a class of their own, such as ``model._target_=my.Net``.

    Args:
        values: The checked configuration.

    Returns:
        The name of the class by group, such as {"model": "my.Net"}.  Groups with a class of fedbench are left out.
    """
    targets = {group: values[group]["_target_"] for group in RESERVED}  # RESERVED: the groups whose options are classes
    return {group: t for group, t in targets.items() if is_class(group, values["choices"].get(group), t)}
