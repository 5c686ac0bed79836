"""Hydra, with our sentences: composing, the cells of a sweep, its complaints in words to act on."""

from __future__ import annotations

import copy
import fnmatch
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.utils import setup_globals
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedbench.app.private_hydra import ConfigLoaderImpl, ConfigRepository, basic_sweeper, create_config_search_path
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
from fedbench.core import caller
from fedbench.core.options import ConfigError, require
from fedbench.core.settings import WHEREABOUTS, is_matched, show

CONFIG_NAME = "config"
VERSION_BASE = "1.3"
NAME_LENGTH = 100
SWEEPER_PARAMS = "hydra.sweeper.params"
QUOTED = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
# ~ or ~/..., as a value or a part of one; quoted text is matched first, and left as it is.
HOME = re.compile(QUOTED + r"|(^|(?<!\\)[,\[:]\s*)(~(?:/[^,\[\]{}'\"]*)?)(?=$|[,\]}])")
COMPLAINTS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError)


OmegaConf.register_new_resolver("whereabouts", lambda: list(WHEREABOUTS), replace=True)


class CachedRepository(ConfigRepository):
    """Hydra's repository, which reads every file once: a sweep's cells share nearly all of theirs.

    What is lent is a copy, because composing writes into it.  The compositions of sixty experiments take 0.6 of the
    time so.
    """

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        """Hydra's: called when the search path is set."""
        super().initialize_sources(config_search_path)
        self.cached: dict[str, ConfigResult | None] = {}

    def __deepcopy__(self, memo: dict) -> CachedRepository:
        same = object.__new__(type(self))  # every composition has one, to give it other sources if need be
        vars(same).update(vars(self))
        return same

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"cached": {}}  # another process reads for itself

    def load_config(self, config_path: str) -> ConfigResult | None:
        """A copy of the file's keys; ConfigError where it cannot be read."""
        if config_path not in self.cached:
            try:
                self.cached[config_path] = super().load_config(config_path)
            except OSError as error:  # no right to read it; OmegaConf says the same of a file that is no mapping
                raise ConfigError(f"{config_path}.yaml is no file of keys that can be read: {error}") from error
        return copy.deepcopy(self.cached[config_path])


class Composer:
    """Composes overrides on the conf folder, and on the user's --config-dir where one is given.

    needed: keys that were composed only because ``++`` was put before them: options that a constructor has
    and its YAML omits.  Hydra would tell the user to write ``+key``; here nobody need know, because what no
    constructor takes is refused by ``config.check`` however it is written.
    """

    def __init__(self, config_dir: str | None = None):
        require(config_dir != "", "--config-dir '' names no folder")
        require(config_dir is None or Path(config_dir).is_dir(), f"--config-dir {config_dir}: no such folder")
        version.setbase(VERSION_BASE)
        setup_globals()
        path = create_config_search_path(str(find_conf_dir()))
        if config_dir is not None:  # where Hydra's own --config-dir goes: after ours, before the schemas
            anchor = SearchPathQuery(provider="schema")
            path.prepend("command-line", f"file://{Path(config_dir).resolve()}", anchor)
        self.loader = ConfigLoaderImpl(path)
        self.loader.repository = CachedRepository(path)
        self.folders = conf_dirs(config_dir)
        self.needed: set[str] = set()

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
            self._check_choice(override)
            require(
                multirun or not override.is_sweep_override(),
                f"{override.input_line} is several values: {_how_to_sweep()} to run them all (a list is written "
                f"{override.key_or_group}=[a,b])",
            )
        while True:
            try:
                return _with_good_log(self._load(self.rewrite(overrides), multirun))
            except RecursionError as error:
                raise ConfigError(_in_a_circle(self.folders)) from error
            except COMPLAINTS as error:
                unknown = re.match(r"Could not override '([^']+)'", str(error))
                keys = {override.key_or_group for override in parsed if not override.is_hydra_override()}
                if not unknown or unknown[1] not in keys - self.needed:
                    raise ConfigError(explain(error)) from error
                self.needed.add(unknown[1])

    def rewrite(self, overrides: list[str]) -> list[str]:
        """The overrides with ``++`` before the needed keys."""
        return [
            f"++{text}" if override.type is OverrideType.CHANGE and override.key_or_group in self.needed else text
            for text, override in zip(map(word_with_home, overrides), self.parse(overrides))
        ]

    def cells(self, overrides: list[str], params: Iterable[str] = ()) -> list[list[str]]:
        """The runs of a sweep, each as its overrides: the product of the swept values, in Hydra's order."""
        parsed = self.parse([*params, *overrides])
        for override in parsed:
            _check_swept(override)
            key = override.key_or_group
            require(
                not override.is_interval_sweep(),
                f"{override.input_line} is an interval: this sweeper goes "
                f"through values that are listed, {key}=1,2,3 or {key}=range(1,4)",
            )
        try:
            return basic_sweeper().BasicSweeper.split_arguments(parsed, None)[0]
        except HydraException as error:
            raise ConfigError(explain(error)) from error

    def swept(self, overrides: list[str]) -> list[str]:
        """Keys that take several values."""
        return [o.key_or_group for o in self.parse(overrides) if o.is_sweep_override()]

    def _load(self, overrides: list[str], multirun: bool) -> DictConfig:
        mode = RunMode.MULTIRUN if multirun else RunMode.RUN
        return self.loader.load_configuration(CONFIG_NAME, list(overrides), run_mode=mode, from_shell=False)

    def _check_choice(self, override: Override) -> None:
        """Refuse an unknown option of a group, and a plus where there must be none (or the reverse)."""
        group = override.key_or_group
        if group not in GROUPS or override.is_delete():
            return
        options, plus = group_options(group, self.folders), "+" if group == "experiment" else ""
        require(
            bool(plus) or not _is_list(override),
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


def _how_to_sweep() -> str:
    return "add -m" if caller.current() is None else "call fedbench.sweep"


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
    """Hydra's, OmegaConf's or YAML's complaint in one sentence, never advising to add a key."""
    text = str(error) or str(error.__cause__ or type(error).__name__)
    for pattern, sentence in SENTENCES:
        match = re.search(pattern, text)
        if match:
            cause = str(error.__cause__ or "").split("\n")[0]
            return sentence(match, text, cause)
    return " ".join(line.strip() for line in text.split("\n") if line.strip() and "To append" not in line)


def _no_option(match: re.Match, text: str, _: str) -> str:
    group, name = match[2], match[3]
    options = re.findall(r"^\t(\S+)$", text, re.MULTILINE)
    listed = f" {group} has {', '.join(options)}" if options else ""
    place = f"{match[1]}: " if match[1] and match[1] not in (CONFIG_NAME, "hydra/config") else ""
    hint = nearest(name, options) + listed
    return f"{place}{group}={name} is not an option:{hint or ' there is no such file'}"


SENTENCES = (
    (r"(?:In '([^']*)': )?Could not find '([^']+)/([^/']+)'", _no_option),
    (r"Could not override '([^']+)'", lambda m, *_: f"{m[1]} is unknown"),
    (r"Could not delete from config\. '([^']*)'", lambda m, *_: f"~{m[1]}: there is no such key to delete"),
    (r"Could not delete", lambda m, t, _: t.split("\n")[0]),
    (r"Multiple values for (\S+?)\.?\s", lambda m, *_: f"{m[1]} is given twice"),
    (
        r"Could not append to config\. An item is already at '([^']*)'",
        lambda m, *_: f"{m[1]} is there already: write it without the plus",
    ),
    (r"Sweeping over Hydra's configuration.*'(.*)'", lambda m, *_: f"{m[1]}: Hydra's keys cannot be swept"),
    (r"Error merging override \+*(.*)", lambda m, _, cause: f"{m[1]} does not fit there: {cause}"),
    (r'in "(.*)", line (\d+)', lambda m, t, _: f"{m[1]}, line {m[2]}: {t.splitlines()[0]}"),
)


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


def quoted(path: Path) -> str:
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
