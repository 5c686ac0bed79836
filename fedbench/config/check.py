"""Check a run's composed configuration.

run_keys.py states the keys outside the groups. A group's keys are those of its ``_target_`` (schema.py) and the
reserved ones. A key that nothing takes is refused, however it is written.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from fedbench.config.conf_tree import group_options, is_class, nearest
from fedbench.config.find_target import find_target
from fedbench.config.run_keys import INJECTED, KINDS, RESERVED, RunConfig
from fedbench.config.schema import check_options, check_target, options_of
from fedbench.core.nested import flatten
from fedbench.core.options import ConfigError, check_each, require
from fedbench.core.settings import (
    check_cohort,
    clients_to_train,
    plain,
    show,
)


def check(cfg: DictConfig) -> dict[str, Any]:
    """Return the resolved config.

    Raises:
        ConfigError: One sentence about the first thing that is wrong.
    """
    values = plain(cfg)
    _check_top(values)
    for group in RESERVED:
        _check_kind(group, values[group].get("_target_"))
        owner = _owner(group, values)
        check_target(group, values[group], owner, INJECTED.get(group, ()), RESERVED[group])
    _check_callbacks(values["callbacks"])
    _check_clients(values)
    return values


def _check_callbacks(callbacks: Mapping[str, Any]) -> None:
    """Check each callback against its constructor, and that the packages it needs are installed."""
    for name, entry in callbacks.items():
        key = f"callbacks.{name}"
        require(
            isinstance(entry, Mapping), f"{key} must name a class, as in {key}._target_=my.Callback, got {show(entry)}"
        )
        check_target(key, entry)
        packages = getattr(find_target(entry["_target_"], f"{key}._target_"), "packages", {})
        for package, pip_name in packages.items():
            require(
                importlib.util.find_spec(package) is not None,
                f"callbacks={name} needs the package {package}: pip install {pip_name}, or choose callbacks=none",
            )


def _check_kind(group: str, target: Any) -> None:
    """Refuse a class that is none for its group."""
    word, expected = KINDS[group]
    found = find_target(target, f"{group}._target_") if isinstance(target, str) else None
    if isinstance(found, type):
        fits = hasattr(found, word) or word in {base.__name__ for base in found.__mro__}
        require(fits, f"{group}._target_={target} is no {expected}")


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
    known = RunConfig.__dataclass_fields__
    for key in values:
        if key not in known:
            listed = f" the keys are {', '.join(sorted({*known} - {'choices'}))}"
            raise ConfigError(f"{key} is unknown:{_suggest(str(key), values) or listed}")
    for group in RESERVED:
        require(
            isinstance(values.get(group), Mapping),
            f"{group} must be one of its options ({', '.join(group_options(group))}), got {show(values.get(group))}",
        )
    check_options("", {**values, **{group: {} for group in RESERVED}}, options_of(RunConfig), "a run")
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
