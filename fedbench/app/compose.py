"""Composing configurations with Hydra: one run, the cells of a sweep, and mistakes in one sentence."""

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
from fedbench.app.loader import COMPLAINTS, VERSION_BASE, Loader, hydra_kept
from fedbench.app.overrides import check_choice, check_key, check_swept, leaves, unreadable
from fedbench.config.choices import with_choices
from fedbench.config.conf_tree import GROUPS, conf_dirs, find_conf_dir, group_options, includes_itself, menu, nearest
from fedbench.config.override_text import quoted, with_home
from fedbench.core.options import ConfigError, require
from fedbench.core.renamed import new_name
from fedbench.core.settings import show

CONFIG_NAME = "config"
SWEEPER_PARAMS = "hydra.sweeper.params"
SEARCH_PATH = "hydra.searchpath"


class Composer:
    """Composes overrides on the conf folder, and on the user's --config-dir where one is given."""

    def __init__(self, config_dir: str | None = None):
        require(config_dir != "", "--config-dir '' names no folder")
        require(config_dir is None or Path(config_dir).is_dir(), f"--config-dir {config_dir}: no such folder")
        self.config_dir = config_dir and Path(config_dir).resolve()
        self.folders = conf_dirs(config_dir)
        with hydra_kept():
            initialize_config_dir(str(find_conf_dir()), job_name="fedbench", version_base=VERSION_BASE)
            self.loader = Loader(GlobalHydra.instance().config_loader())

    def parse(self, overrides: list[str]) -> list[Override]:
        """One Override per text; ConfigError for text that is none."""
        overrides = [with_home(text) for text in overrides]
        try:
            parsed = OverridesParser.create(self.loader).parse_overrides(overrides)
        except OverrideParseException as error:
            raise ConfigError(unreadable(error.override, self.folders)) from error
        for override in parsed:
            check_key(override)
        return parsed

    def refuse_repeated(self, overrides: list[str]) -> None:
        """Refuse a command that gives a key two values: Hydra would take the last without a word."""
        given: dict[str, str] = {}
        for override in self.parse(overrides):
            for key in leaves(override):
                before = given.setdefault(new_name(key), str(override.input_line))
                require(
                    before == override.input_line,
                    f"{key} is given twice, in {before} and in {override.input_line}: leave one of them out",
                )

    def expand(self, overrides: list[str]) -> list[str]:
        """Expand ``glob(pattern)`` and ``hydra.sweeper.params`` in overrides.

        A pattern also matches nested options (table/row).  It may stand in a list, with options that go with every
        match:  ``[glob(table/*),reduced/mnist10]``.  The parameters of the sweeper become overrides.
        """
        return [one for text in overrides for one in self._params(self._expanded(text))]

    def _params(self, text: str) -> list[str]:
        """Return ``seed=0,1`` for ``hydra.sweeper.params={seed: "0,1"}``; Hydra cannot set the whole mapping."""
        key, _, value = text.lstrip("+").partition("=")
        if key != SWEEPER_PARAMS and not key.startswith(f"{SWEEPER_PARAMS}."):
            return [text]
        override, name = self.parse([text])[0], key.removeprefix(SWEEPER_PARAMS).lstrip(".")
        params = value if override.is_sweep_override() else override.value()
        params = {name: params} if name else params
        if not isinstance(params, dict) or not params:
            return [text]
        return [f"{k}={v if isinstance(v, str) else show(v)}" for k, v in params.items()]

    def _expanded(self, text: str) -> str:
        key, _, value = text.partition("=")
        if "glob(" not in value or key.lstrip("+") not in GROUPS:
            return text
        items = re.split(r",(?![^\[\]]*\]|[^()]*\))", value)  # at commas outside brackets
        return f"{key}={','.join(one for item in items for one in self._matches(key.lstrip('+'), item))}"

    def _matches(self, group: str, item: str) -> list[str]:
        match = re.fullmatch(r"(.*)\bglob\(([^()]*)\)(.*)", item)
        if match is None:
            return [item]
        names = group_options(group, self.folders)
        matched = fnmatch.filter(names, match[2].strip())
        require(bool(matched), f"{group}={item} matches none: {group} has {', '.join(menu(names)) or 'no option'}")
        return [f"{match[1]}{name}{match[3]}" for name in matched]

    def compose(self, overrides: list[str], multirun: bool = False) -> DictConfig:
        """Hydra's full config, with its ``hydra`` node; ConfigError with one sentence where it refuses."""
        parsed = self.parse(overrides)
        for override in parsed:
            check_swept(override)
            check_choice(override, self.folders)
            require(
                multirun or not override.is_sweep_override(),
                f"{override.input_line} is several values: add -m to run them all, or call fedbench.sweep in Python "
                f"(a list is written {override.key_or_group}=[a,b])",
            )
        try:
            with hydra_kept():
                return _checked_log(self._load(overrides, RunMode.MULTIRUN if multirun else RunMode.RUN))
        except RecursionError as error:
            raise ConfigError(_in_a_circle(self.folders)) from error
        except COMPLAINTS as error:
            raise ConfigError(explain(error)) from error

    def _load(self, overrides: list[str], mode: RunMode) -> DictConfig:
        words = [with_home(text) for text in overrides]
        if self.config_dir is not None:
            given = next((text for text in words if text.lstrip("+").startswith(SEARCH_PATH)), None)
            require(given is None, f"{given} and --config-dir {self.config_dir} both name folders: give one of them")
            words.append(f"{SEARCH_PATH}=[{quoted(f'file://{self.config_dir}')}]")
        return self.loader.load_configuration(CONFIG_NAME, words, mode)

    def for_hydra(self, overrides: list[str]) -> list[str]:
        """Return checked overrides for Hydra: by current names, with ``++`` before those that change a key."""
        added = self.loader.added(overrides)
        names = [re.fullmatch(r"(\++)([^=]*)(.*)", text, re.DOTALL) for text in added]
        return [text if name is None else f"{name[1]}{new_name(name[2])}{name[3]}" for text, name in zip(added, names)]

    def compose_cell(self, master: DictConfig, overrides: list[str]) -> DictConfig:
        """Compose one cell of a sweep, as its launcher will.

        Raises:
            ConfigError: Hydra refuses it.
        """
        for override in self.parse(overrides):
            check_choice(override, self.folders)
        try:
            return self.loader.keep_cell(master, overrides)
        except COMPLAINTS as error:
            raise ConfigError(explain(error)) from error

    def cells(self, overrides: list[str], params: Iterable[str] = ()) -> list[list[str]]:
        """Return the overrides of each run of a sweep: the product of the swept values, in Hydra's order."""
        values: dict[str, list[str]] = {}
        for override in self.parse([*params, *overrides]):
            check_swept(override)
            key = override.get_key_element()
            require(
                not override.is_interval_sweep(),
                f"{override.input_line} is an interval: this sweeper goes "
                f"through values that are listed, {key}=1,2,3 or {key}=range(1,4)",
            )
            swept = override.is_sweep_override()
            texts = override.sweep_string_iterator() if swept else [override.get_value_element_as_str()]
            values[key] = [f"{key}={text}" for text in texts]
        return [list(cell) for cell in itertools.product(*values.values())]


def _in_a_circle(folders: list[Path]) -> str:
    """Return the options of the user's folder that include themselves."""
    names = [path.relative_to(folders[-1]).with_suffix("").as_posix() for path in folders[-1].rglob("*.yaml")]
    circle = ", ".join(name for name in sorted(names) if includes_itself(name, folders))
    return f"options of {folders[-1]} include themselves by their defaults: {circle}"


def _checked_log(full: DictConfig) -> DictConfig:
    verbose = full.hydra.verbose
    require(
        isinstance(verbose, bool | str) or OmegaConf.is_list(verbose),
        f"hydra.verbose must be true, false or names of loggers, got {show(verbose)}",
    )
    return full


def explain(error: BaseException) -> str:
    """Return the complaint of Hydra, OmegaConf or YAML in one line, without its advice to add a key."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={name} is not an option:{nearest(name, error.options)} {group} has {', '.join(error.options)}"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: {error.problem}"
    text = str(error) or str(error.__cause__ or type(error).__name__)
    advice = ("To append", "Set the environment variable", "full_key:", "object_type=")
    lines = [line.strip() for line in text.split("\n")]
    return " ".join(line for line in lines if line and not line.startswith(advice))


def compose(overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """The run's config, unresolved, without Hydra's node and with ``choices``: the option of each group.

    Raises ConfigError for whatever Hydra refuses.  Values are not checked here: see ``check``.
    """
    composer = Composer(config_dir)
    composer.refuse_repeated(overrides)
    full = composer.compose(overrides)
    no_effect = next((text for text in overrides if text.lstrip("+~").startswith(("resume=", "hydra."))), None)
    require(no_effect is None, f"{no_effect} is for python -m fedbench: it says where a run is, and there is none here")
    return with_choices(full, full.hydra)
