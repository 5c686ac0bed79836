"""Names of methods in ``report --compare``, given to groups: runs of one method that differ only in the seed."""

from __future__ import annotations

from collections import Counter
from difflib import get_close_matches
from pathlib import Path

from fedbench.core.options import ConfigError, require
from fedbench.report.display import METHOD_KEYS, legend_name
from fedbench.report.summary import METHOD_PREFIXES, Group, differing


def set_settings(groups: list[Group], keys: list[str]) -> None:
    """Set the setting in which each group's method is compared: its values of all keys that are not of the method.

    Keys of the method are, for example, algorithm, algorithm.mu and optimizer.lr.  ``group.labels`` has the values of
    all keys of ``--group``.

    Args:
        groups: The groups of runs that ``--group`` made; changed in place.
        keys: The config keys of ``--group``.

    Raises:
        ConfigError: No key is of the method, or a group has two runs of the same seed.
    """
    flag = f"--group {','.join(keys)}"
    require("seed" not in keys, f"{flag}: --compare pairs runs by seed: leave out seed")
    method_keys = [key for key in keys if key in METHOD_KEYS or key.startswith(METHOD_PREFIXES)]
    require(bool(method_keys), f"{flag} has no key of the methods to compare: add algorithm")
    for group in groups:
        group.setting = {key: value for key, value in group.labels.items() if key not in method_keys}
        seed, count = Counter(run.seed for run in group.runs).most_common(1)[0]
        if count > 1:
            others = ", ".join(key for key in differing(group.runs) if key not in keys)
            raise ConfigError(
                f"{flag}: {group.name} has {count} runs of seed {seed}, which differ in {others}: add these keys"
            )


def name_methods(settings: dict[str, list[Group]]) -> dict[str, dict[str, Group]]:
    """Return the groups of runs by the name of the method and the description of the setting.

    Args:
        settings: From description of a setting, such as "mnist, dirichlet, cnn", to its groups.

    Returns:
        From name, and then from description, to the group.  The name is the option of ``algorithm=``, such as "pgfed",
        if it occurs once in each setting.  Else the distinguishing options follow, as in "pgfed algorithm.mu=0.1".

    Raises:
        ConfigError: Two groups of a setting have the same name.
    """
    # options of algorithm= that several groups of one setting have
    repeated = {name for groups in settings.values() for name, n in Counter(map(option_of, groups)).items() if n > 1}
    methods: dict[str, dict[str, Group]] = {}
    for description, groups in settings.items():
        for group in groups:
            option = option_of(group)
            name = option if option and option not in repeated else full_name(group)
            by_description = methods.setdefault(name, {})
            require(
                description not in by_description,
                f"--compare: several groups of runs have the name {name} in {description}; group runs by keys that "
                "distinguish them, as in --group algorithm,algorithm.mu",
            )
            by_description[description] = group
    return methods


def option_of(group: Group) -> str:
    """Return the method of a group of runs, such as "fedprox"; "" if the runs are grouped by other keys only."""
    return next((str(value) for key, value in group.labels.items() if key in METHOD_KEYS), "")


def full_name(group: Group) -> str:
    """Return the method of a group of runs and its distinguishing options, such as "fedprox algorithm.mu=0.1"."""
    labels = {key: value for key, value in group.method_labels.items() if value is not None}
    return " ".join(str(value) if key in METHOD_KEYS else f"{key}={value}" for key, value in labels.items())


def display_name(name: str, group: Group) -> str:
    """Return the name of a method as tables show it: "PGFed mu=0.1" for "pgfed mu=0.1".

    Args:
        name: A key of `name_methods`.
        group: A group of this method.
    """
    labels = group.method_labels
    if name == option_of(group):  # the name has no options, such as "pgfed"
        labels = {key: value for key, value in labels.items() if key in METHOD_KEYS}
    return legend_name(labels, conf=group.conf)


def find_method(text: str, methods: dict[str, dict[str, Group]]) -> str:
    """Return the name in ``methods`` of a method that the user typed, as in CSV files (pgfed) or in tables (PGFed).

    Args:
        text: A word of ``--compare``.
        methods: From name, and then from description of the setting, to the group of runs (`name_methods`).

    Raises:
        ConfigError: There is no such method, or several.
    """
    displayed = {name: display_name(name, next(iter(groups.values()))) for name, groups in methods.items()}
    for name, displayed_name in displayed.items():
        if text in (name, displayed_name):
            return name
    of_this_option = [name for name, groups in methods.items() if text == option_of(next(iter(groups.values())))]
    require(
        not of_this_option,
        f"--compare {text}: several groups of runs have this method: name one of "
        f"{', '.join(repr(name) for name in of_this_option[:6])}",
    )
    require(
        not Path(text).is_dir(),
        f"--compare {text}: this is a folder; folders come first, as in: report {text} --compare pgfed fedavg",
    )
    nearest = get_close_matches(text, methods, n=4, cutoff=0.4) or [*methods][:8]
    runs = f"the runs have {', '.join(nearest)}" if nearest else "no run has finished yet"
    raise ConfigError(f"--compare {text}: no finished run has this method; {runs}")
