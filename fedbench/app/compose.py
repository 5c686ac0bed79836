"""Composing configurations with Hydra: one run, the cells of a sweep, and mistakes in one sentence."""

from __future__ import annotations

import copy
import fnmatch
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from hydra.version import VersionBase, setbase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedbench.app.private_hydra import ConfigRepository
from fedbench.config.choices import with_choices
from fedbench.config.conf_tree import (
    GROUPS,
    conf_dirs,
    find_conf_dir,
    group_options,
    includes_itself,
    menu,
    nearest,
)
from fedbench.core.options import ConfigError, require
from fedbench.core.settings import WHEREABOUTS, is_matched, show

CONFIG_NAME = "config"
VERSION_BASE = "1.3"
NAME_LENGTH = 100
SWEEPER_PARAMS = "hydra.sweeper.params"
SEARCH_PATH = "hydra.searchpath"
QUOTED = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
# ~ or ~/..., as a value or a part of one; quoted text is matched first, and left as it is.
HOME = re.compile(QUOTED + r"|(^|(?<!\\)[,\[:]\s*)(~(?:/[^,\[\]{}'\"]*)?)(?=$|[,\]}])")
COMPLAINTS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError)


OmegaConf.register_new_resolver("whereabouts", lambda: list(WHEREABOUTS), replace=True)


@contextmanager
def hydra_kept() -> Iterator[None]:
    """Leave Hydra's global state as it was: the calling program may be a Hydra application too."""
    application, config, version = GlobalHydra.instance(), HydraConfig.instance(), VersionBase.instance()
    before = application.hydra, config.cfg, version.version_base
    application.clear()
    setbase(VERSION_BASE)
    try:
        yield
    finally:
        application.hydra, config.cfg, version.version_base = before


class CachedRepository(ConfigRepository):
    """Hydra's repository of option files that reads every file once, as the cells of a sweep share nearly all."""

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        """Look for files in these folders from now on."""
        super().initialize_sources(config_search_path)
        self.cached: dict[str, ConfigResult | None] = {}

    def __deepcopy__(self, memo: dict) -> CachedRepository:
        same = object.__new__(type(self))  # each composition copies the repository
        vars(same).update(vars(self))
        return same

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"cached": {}}  # another process reads the files anew

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Return a copy of the file's keys, because composing writes into it.

        Raises:
            ConfigError: The file cannot be read.
        """
        if config_path not in self.cached:
            try:
                self.cached[config_path] = super().load_config(config_path)
            except OSError as error:  # also of a file that is no mapping
                raise ConfigError(f"{config_path}.yaml is no file of keys that can be read: {error}") from error
        return copy.deepcopy(self.cached[config_path])


class Loader(ConfigLoader):
    """Hydra's loader, which composes a cell of a sweep once for its check, its sweeper and its launcher.

    Options that a constructor has and its YAML file omits need `++` before them in Hydra.  Where a composition fails,
    it is done again with `++` before every key: what no constructor takes is refused by the check of the values.
    """

    def __init__(self, hydra: Any):
        self.hydra = hydra
        self.hydra.repository = CachedRepository(hydra.get_search_path())
        self.cells: dict[tuple[str, ...], DictConfig] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"cells": {}}  # another process composes its cells anew

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Compose a configuration."""
        try:
            return self.hydra.load_configuration(config_name, overrides, run_mode, False, validate_sweep_overrides)
        except COMPLAINTS:
            added = self._added(overrides)
            if added == overrides:
                raise
            return self.hydra.load_configuration(config_name, added, run_mode, False, validate_sweep_overrides)

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Compose a cell of a sweep, or return a copy of it if `keep_cell` has composed it."""
        cell = self.cells.get(tuple(sweep_overrides))
        return self._compose_cell(master_config, sweep_overrides) if cell is None else copy.deepcopy(cell)

    def keep_cell(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Compose a cell of a sweep, and keep it for the sweeper and the launcher of this process."""
        cell = self._compose_cell(master_config, sweep_overrides)
        self.cells[tuple(sweep_overrides)] = copy.deepcopy(cell)
        return cell

    def _compose_cell(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        try:
            return self.hydra.load_sweep_config(master_config, list(sweep_overrides))
        except COMPLAINTS:
            return self.hydra.load_sweep_config(master_config, self._added(sweep_overrides))

    def _added(self, overrides: Iterable[str]) -> list[str]:
        """Return the overrides with `++` before those that change a key."""
        parsed = OverridesParser.create(self).parse_overrides(list(overrides))
        return [f"++{text}" if _changes_a_key(override) else text for text, override in zip(overrides, parsed)]

    def get_search_path(self) -> ConfigSearchPath:
        """Return the folders with options."""
        return self.hydra.get_search_path()

    def get_sources(self) -> list:
        """Return the sources of options."""
        return self.hydra.get_sources()

    def list_groups(self, parent_name: str) -> list[str]:
        """Return the groups of options."""
        return self.hydra.list_groups(parent_name)

    def get_group_options(self, group_name: str, *given: Any, **named: Any) -> list[str]:
        """Return the options of a group."""
        return self.hydra.get_group_options(group_name, *given, **named)

    def compute_defaults_list(self, config_name: str | None, overrides: list[str], run_mode: RunMode) -> Any:
        """Return the options of a configuration in the order in which they are merged."""
        return self.hydra.compute_defaults_list(config_name, overrides, run_mode)


def _changes_a_key(override: Override) -> bool:
    group = override.key_or_group in GROUPS or "/" in override.key_or_group
    return override.type is OverrideType.CHANGE and not group and not override.is_hydra_override()


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
        overrides = [word_with_home(text) for text in overrides]
        try:
            parsed = OverridesParser.create(self.loader).parse_overrides(overrides)
        except OverrideParseException as error:
            raise ConfigError(_unreadable(error.override, self.folders)) from error
        for override in parsed:
            _check_key(override)
        return parsed

    def refuse_repeated(self, overrides: list[str]) -> None:
        """Refuse a command that gives a key two values: Hydra would take the last without a word."""
        given: dict[str, str] = {}
        for override in self.parse(overrides):
            for key in _leaves(override):
                before = given.setdefault(key, str(override.input_line))
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
            _check_swept(override)
            self.check_choice(override)
            require(
                multirun or not override.is_sweep_override(),
                f"{override.input_line} is several values: add -m to run them all, or call fedbench.sweep in Python "
                f"(a list is written {override.key_or_group}=[a,b])",
            )
        try:
            with hydra_kept():
                return _with_good_log(self._load(overrides, RunMode.MULTIRUN if multirun else RunMode.RUN))
        except RecursionError as error:
            raise ConfigError(_in_a_circle(self.folders)) from error
        except COMPLAINTS as error:
            raise ConfigError(explain(error)) from error

    def _load(self, overrides: list[str], mode: RunMode) -> DictConfig:
        words = [word_with_home(text) for text in overrides]
        if self.config_dir is not None:
            given = next((text for text in words if text.lstrip("+").startswith(SEARCH_PATH)), None)
            require(given is None, f"{given} and --config-dir {self.config_dir} both name folders: give one of them")
            words.append(f"{SEARCH_PATH}=[{quoted(f'file://{self.config_dir}')}]")
        return self.loader.load_configuration(CONFIG_NAME, words, mode)

    def compose_cell(self, master: DictConfig, overrides: list[str]) -> DictConfig:
        """Compose one cell of a sweep, as its launcher will.

        Raises:
            ConfigError: Hydra refuses it.
        """
        for override in self.parse(overrides):
            self.check_choice(override)
        try:
            return self.loader.keep_cell(master, overrides)
        except COMPLAINTS as error:
            raise ConfigError(explain(error)) from error

    def cells(self, overrides: list[str], params: Iterable[str] = ()) -> list[list[str]]:
        """Return the overrides of each run of a sweep: the product of the swept values, in Hydra's order."""
        values: dict[str, list[str]] = {}
        for override in self.parse([*params, *overrides]):
            _check_swept(override)
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

    def check_choice(self, override: Override) -> None:
        """Refuse an unknown option of a group, and a plus where there must be none (or the reverse)."""
        group = override.key_or_group
        if group not in GROUPS or override.is_delete():
            return
        options, plus = group_options(group, self.folders), "+" if group == "experiment" else ""
        require(
            bool(plus) or group == "callbacks" or not _is_list(override),
            f"{override.input_line} is a list, and a run takes one option "
            f"of {group}; to run each of several: -m {group}=a,b",
        )
        for value in _values(override):
            if value in options:
                continue
            hint = nearest(str(value), options, f"{plus}{group}=")
            shown = value if isinstance(value, str) else show(value)
            same = [name for name in options if name.startswith(f"{str(value).split('/')[0]}/")]
            listed = ", ".join(same or menu(options)) or "none"
            own = "" if hint or len(self.folders) > 1 else "; an option of your own needs --config-dir"
            raise ConfigError(f"{group}={shown} is not an option:{hint} {group} has {listed}{own}")
        why = "an experiment is added to the default run" if plus else "the plus is for +experiment only"
        written = bool(plus) == (override.type is not OverrideType.CHANGE)
        require(written, f"write {plus}{str(override.input_line).lstrip('+')}: {why}")


def _in_a_circle(folders: list[Path]) -> str:
    """Return the options of the user's folder that include themselves."""
    names = [path.relative_to(folders[-1]).with_suffix("").as_posix() for path in folders[-1].rglob("*.yaml")]
    circle = ", ".join(name for name in sorted(names) if includes_itself(name, folders))
    return f"options of {folders[-1]} include themselves by their defaults: {circle}"


def _values(override: Override) -> list[Any]:
    return [one for value in _given(override) for one in (value if isinstance(value, list) else [value])]


def _given(override: Override) -> list[Any]:
    """The values of an override, several in a sweep."""
    if override.is_sweep_override():
        return list(override.sweep_iterator()) if override.is_discrete_sweep() else []
    return [override.value()]


def _is_list(override: Override) -> bool:
    return any(isinstance(value, list) for value in _given(override))


def _check_key(override: Override) -> None:
    """Refuse a word that names no key, or one that is not the user's to set."""
    key, text = override.key_or_group, override.input_line
    require(key != "", f"{text!r} names no key: write key=value, as in seed=3")
    require(key != "hydra", f"{text} would replace all of Hydra's keys: write one of them, as in hydra.run.dir=folder")
    require(
        key.split(".")[0] != "choices",
        f"{text}: choices is what a run notes of its groups; choose an option by "
        "the name of the group, as in algorithm=fedavg",
    )
    if "/" in key and not override.is_delete() and not override.is_sweep_override():
        require(
            isinstance(override.value(), str | list),
            f"{text}: {key} is chosen by the name of an option, got {show(override.value())}",
        )


def _check_swept(override: Override) -> None:
    """Refuse a sweep over nothing."""
    if not override.is_sweep_override() or override.is_interval_sweep():
        return
    try:
        some = any(True for _ in override.sweep_iterator())
    except ValueError as error:  # range(0,9,0)
        raise ConfigError(f"{override.input_line} cannot be counted out: {error}") from error
    require(
        some,
        f"{override.input_line} is no value at all: give {override.key_or_group} one or more "
        f"({override.key_or_group}=range(0,3) is 0, 1, 2)",
    )


def _leaves(override: Override) -> list[str]:
    """The dotted keys that an override sets; none where it deletes."""
    if override.is_delete():
        return []
    key = override.key_or_group if override.package is None else f"{override.key_or_group}@{override.package}"
    value = None if override.is_sweep_override() else override.value()
    return [f"{key}.{inner}" for inner in _inner(value)] if isinstance(value, dict) and value else [key]


def _inner(values: dict[Any, Any]) -> list[str]:
    return [
        leaf
        for key, value in values.items()
        for leaf in ([f"{key}.{inner}" for inner in _inner(value)] if isinstance(value, dict) else [str(key)])
    ]


def _with_good_log(full: DictConfig) -> DictConfig:
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


def _unreadable(text: str, folders: list[Path]) -> str:
    """Why a word on the command line is no override; a bare option name is recognized."""
    if "=" not in text:
        owners = [group for group in GROUPS for name in group_options(group, folders) if name == text]
        meant = " or ".join(f"{'+' if group == 'experiment' else ''}{group}={text}" for group in owners)
        return f"{text!r} is not of the form key=value" + (f": did you mean {meant}?" if meant else "")
    key, value = text.split("=", 1)
    return f"cannot read {text!r}: put quotes around an unusual value, as in '{key}=\"{value}\"'"


def cell_name(overrides: Iterable[str], excluded: Iterable[str], folder: str = "", swept: Iterable[str] = ()) -> str:
    """Return the folder name of a sweep's run: its overrides, sorted, without the keys that match ``excluded``.

    Characters that a file system may refuse become _, and long names are cut.  A long name starts with the overrides of
    the ``swept`` keys, and the others fill the remaining length.  Changed and cut names end in a hash of the full text,
    so that two runs never share a folder.  A run whose former name exists in ``folder`` keeps that name.
    """
    patterns, differs = list(excluded), set(swept)
    naming = sorted(text.lstrip("+") for text in overrides if not is_matched(_key(text), patterns))
    full = ",".join(naming) or "default"
    safe = _safe(full)
    if safe == full and len(full) <= NAME_LENGTH:
        return full
    end = f"-{hashlib.sha256(full.encode()).hexdigest()[:8]}"
    room = NAME_LENGTH - len(end)
    before = f"{safe[:room]}{end}"  # the former rule: cut at the end
    if folder and (Path(folder).expanduser() / before).is_dir():
        return before
    first = [text for text in naming if _key(text) in differs]
    common = [text for text in naming if _key(text) not in differs]
    return f"{_safe(','.join([*_fitting(first, room), *common]))[:room]}{end}"


def _safe(text: str) -> str:
    return re.sub(r"[^\w.,=+\-\[\]~]", "_", text)


def _fitting(overrides: list[str], room: int) -> list[str]:
    """Return the overrides, shortened to the room: first keys to their last part, then each to its end."""
    if len(",".join(overrides)) <= room:
        return overrides
    short = [text.partition("=")[0].rpartition(".")[2] + "=" + text.partition("=")[2] for text in overrides]
    if len(",".join(short)) <= room:
        return short
    fair = max(room // len(short) - 1, 1)  # short overrides leave their spare room to long ones
    spare = sum(max(fair - len(text), 0) for text in short)
    most = fair + spare // max(sum(len(text) > fair for text in short), 1)
    return [text[-most:] for text in short]


def word_with_home(text: str) -> str:
    """Return an override with ``~`` expanded in paths: a shell does not expand ``key=~/folder``."""
    key, equals, value = text.partition("=")
    return key + equals + HOME.sub(_expanded_home, value)


def _expanded_home(match: re.Match[str]) -> str:
    before, path = match.groups()
    return match[0] if path is None else before + _typeable(Path(path.rstrip()).expanduser())


def _typeable(path: Path) -> str:
    return str(path) if re.fullmatch(r"[\w./-]+", str(path), re.ASCII) else quoted(path)


def quoted(path: Path | str) -> str:
    """Quote a path as a value in Hydra's grammar."""
    text = str(path).replace("'", "\\'")
    return f"'{text}'"


def _key(override: str) -> str:
    return override.lstrip("+~").split("=", 1)[0]


OmegaConf.register_new_resolver("cell_name", cell_name, replace=True)


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
