"""A run's configuration: composed from Hydra's groups, checked, hashed, saved.

run_keys.py states every key outside the groups; a group's keys are those of its ``_target_`` (schema.py) plus the
reserved ones stated there.  Whatever Hydra would say about a mistake is said again in one sentence of
ours, without its advice to write ``+key``: a key that nothing takes is refused however it is written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fedbench.cli import run_keys
from fedbench.cli.compose import Composer, cell_name
from fedbench.cli.conf_tree import (
    GROUPS,
    class_name,
    find_conf_dir,
    group_options,
    is_class,
    keys_set,
    label_of,
    nearest,
    target_of,
)
from fedbench.cli.run_keys import INJECTED, KINDS, RESERVED, RunConfig
from fedbench.cli.schema import Kind, Signature, check_options, check_target, signature_of
from fedbench.cli.source import family, locate
from fedbench.core.nested import flatten
from fedbench.core.options import ConfigError, check_each, require
from fedbench.core.settings import (
    WHEREABOUTS,
    check_cohort,
    clients_to_train,
    config_hash,
    load_config,
    plain,
    save_config,
    show,
)

__all__ = [
    "GROUPS",
    "check",
    "compose",
    "config_hash",
    "find_conf_dir",
    "group_options",
    "load_config",
    "save_config",
]


OmegaConf.register_new_resolver("cell_name", cell_name, replace=True)
OmegaConf.register_new_resolver("whereabouts", lambda: list(WHEREABOUTS), replace=True)


def compose(overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """The run's config, unresolved, without Hydra's node and with ``choices``: the option of each group.

    Raises ConfigError for whatever Hydra refuses.  Values are not checked here: see ``check``.
    """
    composer = Composer(config_dir)
    composer.refuse_repeated(overrides)
    full = composer.compose(overrides)
    idle = next((text for text in overrides if text.lstrip("+~").startswith(("resume=", "hydra."))), None)
    require(idle is None, f"{idle} is for python -m fedbench: it says where a run is, and there is none here")
    return with_choices(full, full.hydra)


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
    return cfg


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
    reserved = signature_of(f"{run_keys.__name__}.{RESERVED[group]}").options if RESERVED[group] else {}
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


def check(cfg: DictConfig) -> dict[str, Any]:
    """The resolved config, or ConfigError with one sentence about the first thing that is wrong."""
    values = plain(cfg)
    _check_top(values)
    for group in RESERVED:
        try:
            check_target(group, values[group], _adjust(group), _owner(group, values))
        except ConfigError:
            _check_kind(group, values[group].get("_target_"))  # then its options are beside the point
            raise
    _check_clients(values)
    return values


def _check_kind(group: str, target: Any) -> None:
    """Refuse a class whose source says that it is none for its group."""
    word, expected = KINDS[group]
    names = family(locate(target, f"{group}._target_")) if isinstance(target, str) else None
    require(names is None or word in names, f"{group}._target_={target} is no {expected}")


def _check_clients(values: Mapping[str, Any]) -> None:
    """What asks for a number of clients, where the partition's is known before there are data."""
    num_clients = values["partition"]["num_clients"]
    if num_clients is None:
        return
    n = clients_to_train(num_clients, values["new_clients"]["count"])
    check_cohort(values["clients_per_round"], n)
    check_each("local.epochs", values["local"]["epochs"], n, "numbers")
    check_each("optimizer.lr", values["optimizer"].get("lr"), n)
    check_each("finetune.lr", values["finetune"]["lr"] if values["finetune"]["epochs"] else None, n)


def named_classes(values: Mapping[str, Any]) -> dict[str, str]:
    """By group, the classes that a checked config names in place of those of its options."""
    targets = {group: values[group]["_target_"] for group in RESERVED}
    return {group: t for group, t in targets.items() if is_class(group, values["choices"].get(group), t)}


def _check_top(values: dict[str, Any]) -> None:
    top = signature_of(f"{run_keys.__name__}.RunConfig")
    for key in values:
        if key not in top.options:
            listed = f" the keys are {', '.join(sorted({*top.options} - {'choices'}))}"
            raise ConfigError(f"{key} is unknown:{_suggest(str(key), values) or listed}")
    for group in RESERVED:
        require(
            isinstance(values.get(group), Mapping),
            f"{group} must be one of its options ({', '.join(group_options(group))}), got {show(values.get(group))}",
        )
    check_options("", {**values, **{group: {} for group in RESERVED}}, top, "a run")
    fewest, most = values["system"]["fewest_epochs"], values["local"]["epochs"]
    least = most if isinstance(most, int) else min(most, default=0)
    require(
        fewest is None or fewest <= least,
        f"system.fewest_epochs={fewest} is more than local.epochs={show(most)}, which is the most that a client draws",
    )
    require(values["name"] != "", "name must be text or null, got ''")
    _check_privacy(values.get("privacy") or {"epsilon": None})


def _check_privacy(privacy: Mapping[str, Any]) -> None:
    """What the keys of privacy ask of one another."""
    epsilon, clip = privacy["epsilon"], privacy.get("clip")
    if epsilon is None:
        return
    given = f"where privacy.epsilon={show(epsilon)} asks for noise in proportion to it, got {show(clip)}"
    require(
        math.isinf(epsilon) or (clip is not None and not math.isinf(clip)),
        f"privacy.clip must be a finite number > 0 {given}; null goes with privacy.epsilon=inf, which adds none",
    )
    require(
        privacy["calibration"] == "paper" or privacy["sensitivity"] == "clip",
        "privacy.sensitivity must be clip where privacy.calibration=analytic (it is 2 privacy.clip there), got "
        f"{show(privacy['sensitivity'])}",
    )


def _suggest(name: str, values: dict[str, Any]) -> str:
    """Suggest keys for a top-level name that is none; a nested key of that name first (lr: optimizer.lr)."""
    dotted = [key for key in flatten(values) if not key.startswith((name, "choices"))]
    same = [key for key in dotted if key.rsplit(".")[-1] == name]
    if same:
        return f" did you mean {' or '.join(same[:3])}?"
    return nearest(name, [*RunConfig.__dataclass_fields__, "+experiment", *dotted])


def _owner(group: str, values: dict[str, Any]) -> str:
    """Who takes a group's keys, in a sentence: the chosen option, or the class in its place."""
    chosen, target = (values.get("choices") or {}).get(group), str(values[group].get("_target_", group))
    return f"{group}={chosen}" if chosen and not is_class(group, chosen, target) else target


def _adjust(group: str) -> Callable[[Signature], Signature]:
    """Take out what code passes, put in the keys that are ours."""

    def adjusted(signature: Signature) -> Signature:
        options = {k: v for k, v in signature.options.items() if k not in INJECTED.get(group, ())}
        reserved: dict[str, tuple[Kind, bool]] = {}
        if RESERVED[group]:
            reserved = signature_of(f"{run_keys.__name__}.{RESERVED[group]}").options
        return replace(signature, options={**options, **reserved})

    return adjusted
