"""The options of a composed configuration: which option, or which class of the user's own, each group has."""

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
    """A copy of a composed config with ``choices`` and without ``hydra``, whose node tells the choices.

    Where another class is named (``model._target_=my.Net``) than the chosen option has, that class is the choice; what
    the option says for its own class is left out where the command line names the other one.
    """
    overrides: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    folders = [Path(source.path) for source in hydra.runtime.config_sources if source.schema == "file"]
    choices = {**hydra.runtime.choices, **_lists(overrides)}
    cfg = cfg.copy()
    with open_dict(cfg):
        cfg.pop("hydra", None)
        cfg.choices = {group: choices.get(group) for group in GROUPS}
        for group in RESERVED:
            given: dict[str, str] = {}  # key -> all overrides of it
            for text in overrides:
                if match := re.match(rf"\+*{group}\.(\w+)", text):
                    given[match[1]] = f"{given.get(match[1], '')} {text}"
            _name_class(cfg, group, given, folders)
        _decide_cohort(cfg, overrides)
        for old in rename_options(cfg):
            _warn_of_old_name(old)
    return cfg


@cache
def _warn_of_old_name(old: str) -> None:
    log.warning("%s is now called %s; the old name is accepted for one release", old, new_name(old))


def _name_class(cfg: DictConfig, group: str, given: Mapping[str, str], folders: list[Path]) -> None:
    """Put the class that is built in the place of an option that has another one; where the command line, which has
    given these keys, names that class, drop the option's."""
    option, target = cfg.choices[group], _target(cfg, group)
    if target is None or option is None:
        return
    known = target_of(group, str(option), folders)
    if known == target:
        return
    if "_target_" in given:
        _drop_unasked(cfg, group, {**_set_in_files(cfg, group, folders), **given})
        cfg.choices[group] = class_name(group, target, folders)
    else:
        cfg.choices[group] = label_of(group, str(option), target, folders)


def _target(cfg: DictConfig, group: str) -> str | None:
    """The class that a group names; None where it names none, which ``check`` says."""
    try:
        target = OmegaConf.select(cfg, f"{group}._target_")
    except OmegaConfBaseException:
        return None
    return target if isinstance(target, str) else None


def _set_in_files(cfg: DictConfig, group: str, folders: list[Path]) -> dict[str, str]:
    """The group's keys that experiment files, and this machine's, set: they were asked for, too."""
    names = [f"experiment/{name}" for name in str(cfg.choices.experiment or "").split(",") if name]
    of_each_file = [keys_set(name, group, folders) for name in ["local", *names]]
    return {key: text for keys in of_each_file for key, text in keys.items()}


def _drop_unasked(cfg: DictConfig, group: str, asked: Mapping[str, str]) -> None:
    """Drop the keys of the chosen option that nobody has asked for."""
    reserved = getattr(RESERVED[group], "__dataclass_fields__", ())
    for key in set(cfg[group]) - {*asked, *reserved}:
        del cfg[group][key]
    for name in [*(cfg[group].get("columns") or ())]:  # they are patterns of that class's parameters
        if not re.search(rf"\b{name}\b", asked.get("columns", "")):
            del cfg[group].columns[name]


def _decide_cohort(cfg: DictConfig, overrides: list[str]) -> None:
    """Of clients_per_round and sample_rate the command line's counts, whatever files say; ConfigError for both."""
    given = dict(text.lstrip("+").split("=", 1) for text in overrides if "=" in text)
    number, rate = given.get("clients_per_round", "null"), given.get("sample_rate")
    require(
        number == "null" or rate is None,
        f"clients_per_round={number} and sample_rate={rate} both say how many "
        "clients take part in a round: give one of them",
    )
    if rate is not None and "clients_per_round" in cfg:
        cfg.clients_per_round = None


def _lists(overrides: Any) -> dict[str, str]:
    """Groups of which several options were chosen, ``+experiment=[a,b]`` as a,b: Hydra does not tell these."""
    matches = (re.fullmatch(r"\+*(\w+)=\[(.*)\]", text) for text in overrides)
    return {match[1]: match[2].replace(" ", "") for match in matches if match}


def named_classes(values: Mapping[str, Any]) -> dict[str, str]:
    """By group, the classes that a checked config names in place of those of its options."""
    targets = {group: values[group]["_target_"] for group in RESERVED}
    return {group: t for group, t in targets.items() if is_class(group, values["choices"].get(group), t)}
