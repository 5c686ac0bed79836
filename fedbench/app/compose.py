"""Compose configurations of single runs and of sweeps with Hydra, with one-sentence error messages."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterable
from pathlib import Path

import yaml
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from fedbench.app import cell_name  # noqa: F401  a resolver in conf/config.yaml
from fedbench.app.loader import COMPLAINTS, VERSION_BASE, Loader, restore_hydra
from fedbench.app.overrides import check_choice, check_key, check_swept, leaves, unreadable
from fedbench.config.choices import with_choices
from fedbench.config.conf_tree import (
    GROUPS,
    conf_dirs,
    find_conf_dir,
    group_options,
    group_overview,
    includes_itself,
    nearest,
)
from fedbench.config.override_text import quoted, with_home
from fedbench.core.options import ConfigError, require
from fedbench.core.renamed import new_name
from fedbench.core.settings import show

CONFIG_NAME = "config"
SWEEPER_PARAMS = "hydra.sweeper.params"
SEARCH_PATH = "hydra.searchpath"


class Composer:
    """Compose configurations from overrides and files of conf folders (``folders``), by Hydra's loader (``loader``).

    Args:
        config_dir: The user's --config-dir, with more configuration files.

    Raises:
        ConfigError: config_dir is not a folder.
    """

    def __init__(self, config_dir: str | None = None):
        require(config_dir != "", "--config-dir is empty: give the folder of your own options, or leave it out")
        require(
            config_dir is None or Path(config_dir).is_dir(),
            f"--config-dir {config_dir}: no such folder; give the folder of your own options",
        )
        self.config_dir = config_dir and Path(config_dir).resolve()
        self.folders = conf_dirs(config_dir)
        with restore_hydra():
            initialize_config_dir(str(find_conf_dir()), job_name="fedbench", version_base=VERSION_BASE)
            self.loader = Loader(GlobalHydra.instance().config_loader())

    def parse(self, overrides: list[str]) -> list[Override]:
        """Parse overrides by Hydra's grammar.

        Args:
            overrides: Texts such as "seed=3" or "+experiment=debug".

        Returns:
            One Override per text.

        Raises:
            ConfigError: A text is not a valid override.
        """
        overrides = [with_home(text) for text in overrides]  # ~ is expanded
        try:
            parsed = OverridesParser.create(self.loader).parse_overrides(overrides)
        except OverrideParseException as error:
            raise ConfigError(unreadable(error.override, self.folders)) from error
        for override in parsed:
            check_key(override)
        return parsed

    def refuse_repeated(self, overrides: list[str]) -> None:
        """Raise ConfigError if two overrides set the same key; Hydra would silently use the last one."""
        text_of_key: dict[str, str] = {}  # from key to the first override that sets it
        for override in self.parse(overrides):
            for key in leaves(override):  # the dotted keys that it sets
                before = text_of_key.setdefault(new_name(key), str(override.input_line))
                require(
                    before == override.input_line,
                    f"{key} is given twice, as {before} and {override.input_line}: remove one of them",
                )

    def expand(self, overrides: list[str]) -> list[str]:
        """Expand ``glob(pattern)`` and ``hydra.sweeper.params`` in overrides.

        A pattern also matches nested options (table/row).  It may be an item of a list, whose other items are combined
        with every match: ``[glob(table/*),reduced/mnist10]``.

        Args:
            overrides: The overrides of a command.

        Returns:
            The expanded overrides.

        Raises:
            ConfigError: A pattern has no match.
        """
        return [expanded for text in overrides for expanded in self._expand_params(self._expand_globs(text))]

    def _expand_params(self, text: str) -> list[str]:
        """Return ["seed=0,1"] for ``hydra.sweeper.params={seed: "0,1"}``, a mapping that Hydra cannot set.

        Any other override is returned as a list of one.
        """
        key, _, value = text.lstrip("+").partition("=")
        if key != SWEEPER_PARAMS and not key.startswith(f"{SWEEPER_PARAMS}."):
            return [text]
        override, name = self.parse([text])[0], key.removeprefix(SWEEPER_PARAMS).lstrip(".")
        # the values of one key (as text if there are several, "0,1"), or a mapping of all keys
        params = value if override.is_sweep_override() else override.value()
        params = {name: params} if name else params  # name: the key after hydra.sweeper.params.
        if not isinstance(params, dict) or not params:
            return [text]
        return [f"{k}={v if isinstance(v, str) else show(v)}" for k, v in params.items()]

    def _expand_globs(self, text: str) -> str:
        """Replace each ``glob(pattern)`` of an override by the matching options: ``algorithm=fed1,fed2``.

        Args:
            text: The override.  It is returned unchanged without a pattern, or if its key is not a group.
        """
        key, _, value = text.partition("=")
        if "glob(" not in value or key.lstrip("+") not in GROUPS:
            return text
        items = re.split(r",(?![^\[\]]*\]|[^()]*\))", value)  # at commas outside brackets
        return f"{key}={','.join(one for item in items for one in self._matches(key.lstrip('+'), item))}"

    def _matches(self, group: str, item: str) -> list[str]:
        """Return an item of an override once for each option that its ``glob(pattern)`` matches.

        Args:
            group: The group of options, such as "algorithm".
            item: An item such as ``[glob(table/*),debug]``.  Without a pattern, it is returned as a list of one.

        Raises:
            ConfigError: No option matches.
        """
        match = re.fullmatch(r"(.*)\bglob\(([^()]*)\)(.*)", item)
        if match is None:
            return [item]
        names = group_options(group, self.folders)
        matched = fnmatch.filter(names, match[2].strip())
        require(
            bool(matched),
            f"{group}={item} matches no option; the options are {', '.join(group_overview(names)) or 'none'}",
        )
        return [f"{match[1]}{name}{match[3]}" for name in matched]

    def compose(self, overrides: list[str], multirun: bool = False) -> DictConfig:
        """Compose a configuration.

        Args:
            overrides: The expanded overrides.
            multirun: Whether they describe a sweep, and may have several values.

        Returns:
            The configuration, unchecked, with its key hydra (Hydra's own options).

        Raises:
            ConfigError: An override or a configuration file is invalid.
        """
        parsed = self.parse(overrides)
        for override in parsed:
            check_swept(override)
            check_choice(override, self.folders)
            require(
                multirun or not override.is_sweep_override(),
                f"{override.input_line} has several values: add -m to run all of them, or use fedbench.sweep in Python "
                f"(write {override.key_or_group}=[a,b] for one value that is a list)",
            )
        try:
            with restore_hydra():
                return _check_verbose(self._load(overrides, RunMode.MULTIRUN if multirun else RunMode.RUN))
        except RecursionError as error:  # files of options that include each other
            raise ConfigError(_circular_defaults(self.folders)) from error
        except COMPLAINTS as error:  # of Hydra, OmegaConf and YAML
            raise ConfigError(explain(error)) from error

    def _load(self, overrides: list[str], mode: RunMode) -> DictConfig:
        """Return the configuration that Hydra composes, with --config-dir in its search path.

        Args:
            overrides: The overrides.
            mode: Whether they describe one run or a sweep.

        Raises:
            ConfigError: An override sets the search path, too.
        """
        texts = [with_home(text) for text in overrides]
        if self.config_dir is not None:
            search_path = next((text for text in texts if text.lstrip("+").startswith(SEARCH_PATH)), None)
            require(
                search_path is None,
                f"{search_path} and --config-dir {self.config_dir} both name folders: remove one of them",
            )
            texts.append(f"{SEARCH_PATH}=[{quoted(f'file://{self.config_dir}')}]")
        return self.loader.load_configuration(CONFIG_NAME, texts, mode)

    def for_hydra(self, overrides: list[str]) -> list[str]:
        """Return checked overrides in the form that Hydra's own commands, such as --cfg, accept.

        Old names of keys are replaced by current ones.  ``++`` is added before overrides that change a key, because
        Hydra requires it for keys that no YAML file has.
        """
        added = self.loader.with_plus_signs(overrides)
        # the plus signs, the key, and the rest from "=" on; None for an override without a plus sign
        names = [re.fullmatch(r"(\++)([^=]*)(.*)", text, re.DOTALL) for text in added]
        return [text if name is None else f"{name[1]}{new_name(name[2])}{name[3]}" for text, name in zip(added, names)]

    def compose_run(self, master: DictConfig, overrides: list[str]) -> DictConfig:
        """Compose one run of a sweep, as its launcher will.

        Args:
            master: The configuration of the sweep, with its key hydra (Hydra's own options).
            overrides: The overrides of the run.

        Raises:
            ConfigError: An override or a configuration file is invalid.
        """
        for override in self.parse(overrides):
            check_choice(override, self.folders)
        try:
            return self.loader.compose_and_cache_run(master, overrides)
        except COMPLAINTS as error:
            raise ConfigError(explain(error)) from error

    def run_overrides(self, overrides: list[str], params: Iterable[str] = ()) -> list[list[str]]:
        """Return the overrides of each run of a sweep: the product of the swept values, in Hydra's order.

        Args:
            overrides: The overrides of the sweep, some with several values.
            params: Overrides in hydra.sweeper.params.

        Raises:
            ConfigError: An override is invalid or sweeps over an interval.
        """
        values: dict[str, list[str]] = {}
        for override in self.parse([*params, *overrides]):  # an override replaces the parameter with the same key
            check_swept(override)
            key = override.get_key_element()
            require(
                not override.is_interval_sweep(),
                f"{override.input_line} is an interval, which this sweeper does not support: list the values, as in "
                f"{key}=1,2,3 or {key}=range(1,4)",
            )
            swept = override.is_sweep_override()
            texts = override.sweep_string_iterator() if swept else [override.get_value_element_as_str()]
            values[key] = [f"{key}={text}" for text in texts]
        return [list(run) for run in itertools.product(*values.values())]


def _circular_defaults(folders: list[Path]) -> str:
    """Return the message of an error: which of the user's YAML files include themselves by their lists `defaults`.

    Args:
        folders: The conf folders, of which the last is the user's.
    """
    names = [path.relative_to(folders[-1]).with_suffix("").as_posix() for path in folders[-1].rglob("*.yaml")]
    circular = ", ".join(name for name in sorted(names) if includes_itself(name, folders))
    return f"files in {folders[-1]} include themselves by their defaults: {circular}"


def _check_verbose(full: DictConfig) -> DictConfig:
    """Return a configuration unchanged.  Raise ConfigError unless hydra.verbose is Boolean, text or a list."""
    verbose = full.hydra.verbose
    require(
        isinstance(verbose, bool | str) or OmegaConf.is_list(verbose),
        f"hydra.verbose must be true, false, or a name or list of loggers, got {show(verbose)}",
    )
    return full


def explain(error: BaseException) -> str:
    """Return the message of an error of Hydra, OmegaConf or YAML in one line, without its advice to add a key."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={name} is not an option:{nearest(name, error.options)} {group} has {', '.join(error.options)}"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: {error.problem}"
    text = str(error) or str(error.__cause__ or type(error).__name__)
    if match := re.fullmatch(r"Could not override '(.*?)'\.", text.split("\n")[0].strip()):
        return f"{match[1]} is not a key: correct or remove it (--cfg all prints the keys of a run and of Hydra)"
    if match := re.match(r"Could not delete from config\. '(.*?)' does not exist\.", text.split("\n")[0].strip()):
        return f"~{match[1]} deletes a key that the configuration does not have: correct or remove it"
    advice = ("To append", "Set the environment variable", "full_key:", "object_type=")  # lines that are left out
    lines = [line.strip() for line in text.split("\n")]
    return " ".join(line for line in lines if line and not line.startswith(advice))


def compose(overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """Compose the configuration of one run.

    Args:
        overrides: The overrides, such as "seed=3".
        config_dir: A folder with more configuration files.

    Returns:
        The configuration, unresolved and unchecked, without its key hydra (Hydra's own options).  ``choices`` has the
        option of each group.

    Raises:
        ConfigError: An override or a configuration file is invalid.
    """
    composer = Composer(config_dir)
    composer.refuse_repeated(overrides)
    full = composer.compose(overrides)
    no_effect = next((text for text in overrides if text.lstrip("+~").startswith(("resume=", "hydra."))), None)
    require(no_effect is None, f"{no_effect} works only in python -m fedbench without a subcommand: leave it out")
    return with_choices(full, full.hydra)
