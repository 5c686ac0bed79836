"""Check the composed configuration of a run.

The keys of a group are the parameters of its ``_target_`` (schema.py) and the reserved ones.  All other keys are
declared in run_keys.py.  Unknown keys are refused.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from fedbench.config.conf_tree import group_options, is_class, nearest
from fedbench.config.find_target import find_target
from fedbench.config.run_keys import INJECTED, KINDS, RESERVED, PrivacyConfig, RunConfig
from fedbench.config.schema import check_options, check_target, options_of
from fedbench.core.nested import flatten
from fedbench.core.options import ConfigError, check_each, require
from fedbench.core.settings import (
    check_cohort,
    clients_to_train,
    show,
    to_dict,
)


def check(cfg: DictConfig) -> dict[str, Any]:
    """Check a configuration, and return its resolved values.

    Args:
        cfg: The composed configuration, and ``choices``, the chosen option of each group.

    Raises:
        ConfigError: A key or value is invalid; the message is about the first mistake.
    """
    values = to_dict(cfg)
    _check_top(values)
    for group in RESERVED:  # the groups whose options are classes, each with the keys that the class does not get
        _check_kind(group, values[group].get("_target_"))  # such as a model for the group algorithm
        owner = _owner(group, values)  # what defines its options, for messages
        # hidden: arguments that fedbench passes to the class; reserved: options that the class does not get
        check_target(group, values[group], owner, hidden=INJECTED.get(group, ()), reserved=RESERVED[group])
    _check_callbacks(values["callbacks"])
    _check_clients(values)
    return values


def _check_callbacks(callbacks: Mapping[str, Any]) -> None:
    """Raise ConfigError if a callback has an invalid option, or needs a package that is not installed.

    Args:
        callbacks: The options of each callback, by its name in the group ``callbacks``.
    """
    for name, entry in callbacks.items():
        key = f"callbacks.{name}"
        require(
            isinstance(entry, Mapping), f"{key} must have a class, as in {key}._target_=my.Callback, got {show(entry)}"
        )
        check_target(key, entry)
        # from the name of a package that the class imports to its name for pip
        packages = getattr(find_target(entry["_target_"], f"{key}._target_"), "packages", {})
        for package, pip_name in packages.items():
            require(
                importlib.util.find_spec(package) is not None,
                f"callbacks={name} needs the package {package}: pip install {pip_name}, or choose callbacks=none",
            )


def _check_kind(group: str, target: Any) -> None:
    """Raise ConfigError if the class of a group is of another kind, such as a model for the group algorithm.

    Args:
        group: The group of options, such as "algorithm".
        target: Its value of ``_target_``.  Functions, and values that are no text, are not checked here.
    """
    required_name, expected = KINDS[group]  # a method or base class that its classes have, and the kind in words
    cls = find_target(target, f"{group}._target_") if isinstance(target, str) else None
    if isinstance(cls, type):
        fits = hasattr(cls, required_name) or required_name in {base.__name__ for base in cls.__mro__}
        require(
            fits,
            f"{group}._target_={target} is not a {expected}: name such a class, or choose an option by {group}=...",
        )


def _check_clients(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if an option does not fit partition.num_clients.

    Check nothing if this is null, because the number of clients is then known only after the partition is made.

    Args:
        values: The resolved configuration.
    """
    num_clients = values["partition"]["num_clients"]
    if num_clients is None:
        return
    num_trained = clients_to_train(num_clients, values["new_clients"]["count"])
    check_cohort(values["clients_per_round"], num_trained)
    # check_each: an option that is a list must have one entry for each client that is trained
    check_each("local.epochs", values["local"]["epochs"], num_trained, what="numbers")
    check_each("local.batch_size", values["local"]["batch_size"], num_trained, what="numbers")
    check_each("optimizer.lr", values["optimizer"].get("lr"), num_trained)
    is_fine_tuned = values["finetune"]["epochs"] > 0  # else finetune.lr is not used
    check_each("finetune.lr", values["finetune"]["lr"] if is_fine_tuned else None, num_trained)


def _check_top(values: dict[str, Any]) -> None:
    """Check the keys outside the groups, and that each group has an option.

    Args:
        values: The resolved configuration.

    Raises:
        ConfigError: A key is unknown or has an invalid value, or a group has no option.
    """
    fields = RunConfig.__dataclass_fields__
    for key in values:
        if key not in fields:
            listed = f" the keys are {', '.join(sorted({*fields} - {'choices'}))}"
            raise ConfigError(f"{key} is unknown:{_suggest(str(key), values) or listed}")
    for group in RESERVED:
        require(
            isinstance(values.get(group), Mapping),
            f"{group} must be one of its options ({', '.join(group_options(group))}), got {show(values.get(group))}",
        )
    # {}: the options of these groups are checked by themselves
    check_options(
        "", {**values, **{group: {} for group in (*RESERVED, "privacy")}}, options_of(RunConfig), owner="a run"
    )
    # fewest: each round, a client draws its number of local epochs from this one to local.epochs; None: no draw
    fewest, epochs = values["system"]["fewest_epochs"], values["local"]["epochs"]
    all_epochs = epochs if isinstance(epochs, list) else [epochs]  # one number for each client, or one for all
    require(
        fewest is None or all(float(number).is_integer() for number in all_epochs),
        f"system.fewest_epochs={fewest} draws whole numbers of epochs, so local.epochs must be whole, got "
        f"{show(epochs)}: change it, or set system.fewest_epochs=null",
    )
    require(
        fewest is None or fewest <= min(all_epochs, default=0),
        f"system.fewest_epochs={fewest} must be at most local.epochs={show(epochs)}: lower it, or raise local.epochs",
    )
    require(
        fewest is None or values["local"]["steps"] is None,
        f"system.fewest_epochs={fewest} draws numbers of epochs, so local.steps must be null, got "
        f"{values['local']['steps']}: remove one of the two options",
    )
    require(
        not isinstance(values["local"]["batch_size"], list) or not values["new_clients"]["count"],
        f"local.batch_size={show(values['local']['batch_size'])} lists one number per training client, and the "
        f"{values['new_clients']['count']} new clients have none: give one number for all, or set new_clients.count=0",
    )
    require(values["name"] != "", "name is empty: give the run a name, or null for the name of its algorithm")
    _check_privacy(values)


def _check_privacy(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if an option of privacy is invalid, or does not fit the others.

    Args:
        values: The resolved configuration.  A class in privacy (privacy=central) is checked against its constructor.
    """
    privacy = values.get("privacy")
    if privacy is None:  # privacy=none
        return
    require(
        isinstance(privacy, Mapping),
        f"privacy must be one of its options ({', '.join(group_options('privacy'))}), got {show(privacy)}",
    )
    if "_target_" in privacy:
        check_target("privacy", privacy, owner="privacy=central", hidden=INJECTED["privacy"])
        require(
            values["client_weights"] == "uniform",
            f"client_weights must be uniform with privacy=central, got {values['client_weights']}: a mean by numbers "
            "of samples has no bounded sensitivity; remove the option, or set client_weights=uniform",
        )
        return
    check_options("privacy", privacy, options_of(PrivacyConfig), owner="privacy=local")
    epsilon, clip = privacy["epsilon"], privacy.get("clip")
    if epsilon is None:  # no privacy, so that the other keys are not used
        return
    require(
        math.isinf(epsilon) or (clip is not None and not math.isinf(clip)),
        f"privacy.clip must be a finite number > 0 with privacy.epsilon={show(epsilon)}, got {show(clip)}; use "
        "privacy.epsilon=inf for no noise",
    )
    require(
        privacy["calibration"] == "paper" or privacy["sensitivity"] == "clip",
        f"privacy.sensitivity must be clip with privacy.calibration=analytic, got {show(privacy['sensitivity'])}; set "
        "it to clip, or use privacy.calibration=paper",
    )


def _suggest(name: str, values: dict[str, Any]) -> str:
    """Return " did you mean ...?" for an unknown top-level key; "" if no key is similar.

    If a group of options has a key of this name, it is suggested first: optimizer.lr for lr.

    Args:
        name: The unknown key.
        values: The values of the configuration.
    """
    # flatten has the unknown key itself, too, and "choices", which users do not set
    dotted = [key for key in flatten(values) if not key.startswith((name, "choices"))]
    keys_of_this_name = [key for key in dotted if key.rsplit(".")[-1] == name]
    if keys_of_this_name:
        return f" did you mean {' or '.join(keys_of_this_name[:3])}?"
    # +experiment is the only group that is chosen with a plus
    return nearest(name, [*RunConfig.__dataclass_fields__, "+experiment", *dotted])


def _owner(group: str, values: dict[str, Any]) -> str:
    """Return what defines the options of a group, for messages: "algorithm=pgfed", or the path of the user's class.

    Without a class, it is the name of the group.

    Args:
        group: The group of options, such as "algorithm".
        values: The resolved configuration.
    """
    chosen, target = (values.get("choices") or {}).get(group), str(values[group].get("_target_", group))
    return f"{group}={chosen}" if chosen and not is_class(group, chosen, target) else target
