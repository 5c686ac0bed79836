"""The values that a search may try for each option of a method.

They are declared in the YAML file of an option, in Hydra's grammar, with their source behind a semicolon:

    # search: mu=tag(log,interval(0.001,1)); FedProx, section 5.2, tries 0.001, 0.01, 0.1 and 1

A command may replace them: ``fedbench tune algorithm=fedprox algorithm.mu=0.01,0.1``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig, OmegaConf

from fedbench.app.compose import Composer
from fedbench.config.conf_tree import option_files
from fedbench.config.override_text import value_text
from fedbench.core.options import require

SEARCHED_GROUPS = ("algorithm", "optimizer", "server", "compression", "adapter")
COMMENT = re.compile(r"^# search: ([\w.]+)=(.+?);\s*(.+)$", re.MULTILINE)
DIGITS = 4  # significant digits of numbers drawn from an interval


@dataclass(frozen=True)
class Dimension:
    """The values of one config key that a search may try: either listed ones or an interval.

    Attributes:
        key: The config key.
        values: The listed values, in Hydra's grammar; empty for an interval.
        low: The lower end of the interval.
        high: The upper end of the interval, which is included.
        log: Whether values are drawn uniformly on a logarithmic scale.
        integer: Whether values are integers.
    """

    key: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    integer: bool = False

    def contains(self, value: Any) -> bool:
        """Return whether a value of the configuration is one of the listed values or lies in the interval.

        The ends of the interval are included.  True, False and texts lie in no interval.
        """
        if self.values:
            return value_text(value) in self.values
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high

    def rounded(self, value: float) -> float | int:
        """Return a value of the interval with `DIGITS` significant digits, so that names of folders stay short.

        A value that rounding moves out of the interval is set to its end.  Integers keep all digits.
        """
        if self.integer:
            return round(value)
        if value == 0:
            return 0.0
        rounded = round(value, DIGITS - 1 - math.floor(math.log10(abs(value))))
        return min(max(rounded, self.low), self.high)


def search_space(
    composed: DictConfig, given: Sequence[Override], composer: Composer, fixed: Collection[str]
) -> dict[str, Dimension]:
    """Return what a search may try for one method: a dict from config key to the values.

    They are declared in the YAML files of the chosen options of SEARCHED_GROUPS, such as "algorithm" and "optimizer".

    Args:
        composed: The composed configuration of the method, with its key hydra (Hydra's own options).
        given: Overrides of the command with several values or an interval.  They replace those of the YAML files.
            Keys of a method that does not have the option are left out.
        composer: Parses the comments of the YAML files.
        fixed: Keys with one value in the command, which are not searched.

    Raises:
        ConfigError: A comment or an override is invalid.
    """
    choices, space = composed.hydra.runtime.choices, {}  # choices: from config group to the chosen option
    for group in SEARCHED_GROUPS:
        # the values in the comments "# search:" of the option's YAML file
        for key, text in declared(group, str(choices[group]), composer.folders).items():
            space[key] = dimension(composer.parse([f"{key}={text}"])[0])
    for override in given:
        if _has_key(composed, override.key_or_group) or override.key_or_group in space:
            space[override.key_or_group] = dimension(override)
    return {key: space[key] for key in space if key not in fixed}


def _has_key(composed: DictConfig, key: str) -> bool:
    """Return whether a configuration has a key such as "algorithm.mu".  A key with the value null counts."""
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(composed, parent) if parent else composed
    return OmegaConf.is_dict(node) and name in node


def declared(group: str, option: str, folders: Sequence[Path]) -> dict[str, str]:
    """Return the values to try that the comments ``# search: key=values; source`` of an option's YAML files declare.

    Args:
        group: The config group, such as "algorithm".
        option: The option of the group, such as "fedprox".
        folders: The folders of configuration files, with those of --config-dir.

    Returns:
        A dict from config key, such as "algorithm.mu", to values in Hydra's grammar, such as "interval(0.1,1)".
    """
    files = option_files(group, option, folders)
    found = [match for text in files.values() for match in COMMENT.findall(text)]
    return {f"{group}.{key}": values for key, values, _ in found}


def dimension(override: Override) -> Dimension:
    """Return the dimension, the values of one config key to try, that a swept override describes.

    Args:
        override: A list of values such as mu=0.1,1, or an interval such as mu=tag(log,interval(0.1,1)).  The tag log
            asks for a logarithmic scale.  An interval between two integers has integers only.

    Raises:
        ConfigError: The override has one value only, or an interval is empty.
    """
    key = override.key_or_group
    require(
        override.is_sweep_override(),
        f"{override.input_line} has one value: a search needs several, as in {key}=0.1,1 or {key}=interval(0.1,1)",
    )
    if not override.is_interval_sweep():
        return Dimension(key, tuple(str(text) for text in override.sweep_string_iterator()))
    interval = override.value()
    assert isinstance(interval, IntervalSweep)
    low, high, log = interval.start, interval.end, "log" in interval.tags
    require(
        low is not None and high is not None and low < high and (low > 0 or not log),
        f"{override.input_line}: the interval must have a lower end below its upper end"
        + (", and above 0 because of the logarithm" if log else ""),
    )
    is_integer = isinstance(low, int) and isinstance(high, int)
    return Dimension(key, low=low, high=high, log=log, integer=is_integer)  # type: ignore[arg-type]


def default_point(space: Mapping[str, Dimension], composed: DictConfig) -> dict[str, Any]:
    """Return the default values of the searched options, as far as the search could also propose them.

    Args:
        space: The search space: from the dotted key of an option to the values to try.
        composed: The configuration with the defaults.

    Returns:
        {dotted key: default}.  Keys whose default is not among the values to try are left out.
    """
    values = {key: OmegaConf.select(composed, key) for key in space}
    return {key: value for key, value in values.items() if space[key].contains(value)}


def grid(space: Mapping[str, Dimension]) -> list[dict[str, str]]:
    """Return all combinations of the listed values, each as a dict from config key to value in Hydra's grammar.

    Args:
        space: A dict from config key to its dimension, a list of values or an interval.

    Raises:
        ConfigError: A key has an interval.
    """
    for key, dimension in space.items():
        require(
            bool(dimension.values),  # empty for an interval
            f"--search grid needs listed values, and {key} has an interval: list its values in the command, as in "
            f"{key}=0.01,0.1, or use --search random",
        )
    return [dict(zip(space, values)) for values in itertools.product(*(item.values for item in space.values()))]
