"""A run's configuration: composed from Hydra's groups, checked, hashed, saved.

run_keys.py states every key outside the groups; a group's keys are those of its ``_target_`` (schema.py) plus the
reserved ones stated there.  Whatever Hydra would say about a mistake is said again in one sentence of
ours, without its advice to write ``+key``: a key that nothing takes is refused however it is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from fedbench.config import run_keys
from fedbench.config.conf_tree import (
    group_options,
    is_class,
    nearest,
)
from fedbench.config.run_keys import INJECTED, KINDS, RESERVED, RunConfig
from fedbench.config.schema import Kind, Signature, check_options, check_target, signature_of
from fedbench.config.source import family, locate
from fedbench.core.nested import flatten
from fedbench.core.options import ConfigError, check_each, require
from fedbench.core.settings import (
    check_cohort,
    clients_to_train,
    plain,
    show,
)


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
