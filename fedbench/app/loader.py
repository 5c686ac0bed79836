"""Hydra's configuration loader with a cache, and a guard for Hydra's global state."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from hydra.version import VersionBase, setbase
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from fedbench.app.paper_source import PaperSource, source_path
from fedbench.app.private_hydra import ConfigRepository
from fedbench.config.conf_tree import GROUPS
from fedbench.core.options import ConfigError

VERSION_BASE = "1.3"
# mappings whose keys are arguments of ray.init, ray.remote and submitit
PASSED_ON = ("hydra.launcher.ray.init.", "hydra.launcher.ray.remote.", "hydra.launcher.additional_parameters.")
COMPLAINTS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError)  # errors of invalid configurations


@contextmanager
def restore_hydra() -> Iterator[None]:
    """Clear Hydra's global state for the block and restore it afterwards.

    The calling program may be a Hydra application itself.
    """
    application, config, version = GlobalHydra.instance(), HydraConfig.instance(), VersionBase.instance()
    before = application.hydra, config.cfg, version.version_base
    application.clear()
    setbase(VERSION_BASE)
    try:
        yield
    finally:
        application.hydra, config.cfg, version.version_base = before


class CachedRepository(ConfigRepository):
    """Hydra's repository of configuration files, with a cache and with the papers' tables (paper_source.py).

    The runs of a sweep share most files, so each file is read once.
    """

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        """Set ``sources``, where Hydra looks for options: its folders, and the tables of papers in these folders."""
        super().initialize_sources(config_search_path)
        folders = [source.path for source in self.sources if source.scheme() == "file"]
        self.sources.insert(-1, PaperSource("fedbench", source_path(folders)))  # Hydra's schema must be the last
        self.cached: dict[str, ConfigResult | None] = {}

    def __deepcopy__(self, memo: dict) -> CachedRepository:
        copied = object.__new__(type(self))  # each composition copies the repository; the copies share the cache
        vars(copied).update(vars(self))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"cached": {}}  # another process reads the files again

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Return a copy of a file's keys, because composition modifies it.

        Raises:
            ConfigError: The file cannot be read.
        """
        if config_path not in self.cached:
            try:
                self.cached[config_path] = super().load_config(config_path)
            except OSError as error:  # also raised for a file that is not a mapping
                raise ConfigError(
                    f"{config_path}.yaml cannot be read as a mapping of keys ({error}): write lines such as lr: 0.1"
                ) from error
        return copy.deepcopy(self.cached[config_path])


class Loader(ConfigLoader):
    """Wrapper of Hydra's loader (``hydra``) that composes each run of a sweep once, for check, sweeper and launcher.

    Hydra requires `++` before a key that a YAML file omits, even if the constructor has it.  So a composition that
    fails is repeated with `++` before every key.  Keys that no constructor has are refused later (config/check.py).

    Args:
        hydra: Hydra's loader.
    """

    def __init__(self, hydra: Any):
        self.hydra = hydra
        self.hydra.repository = CachedRepository(hydra.get_search_path())
        self.composed_runs: dict[tuple[str, ...], DictConfig] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"composed_runs": {}}  # another process composes its runs again

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Compose a configuration; if that fails, once more with `++` before overrides that change a key.

        The arguments are those of Hydra's loader.

        Args:
            config_name: The name of the main file.
            overrides: The overrides.
            run_mode: Whether they describe a single run or a sweep.
            from_shell: Ignored, because it only matters for Hydra's messages.
            validate_sweep_overrides: Whether swept values are checked.
        """
        try:
            return self.hydra.load_configuration(
                config_name,
                overrides,
                run_mode,
                from_shell=False,
                validate_sweep_overrides=validate_sweep_overrides,
            )
        except COMPLAINTS:  # errors of Hydra, OmegaConf and YAML
            added = self.with_plus_signs(overrides)
            if added == overrides:
                raise
            return self.hydra.load_configuration(
                config_name, added, run_mode, from_shell=False, validate_sweep_overrides=validate_sweep_overrides
            )

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Return the configuration of one run of a sweep, a copy of that in the cache if there is one.

        Args:
            master_config: The configuration of the sweep, with its key hydra (Hydra's own options).
            sweep_overrides: The overrides of the run, by which `compose_and_cache_run` has cached its configuration.
        """
        config = self.composed_runs.get(tuple(sweep_overrides))
        return self._compose_run(master_config, sweep_overrides) if config is None else copy.deepcopy(config)

    def compose_and_cache_run(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Return the configuration of one run of a sweep, and cache it for `load_sweep_config`.

        Args:
            master_config: The configuration of the sweep, with its key hydra (Hydra's own options).
            sweep_overrides: The overrides of the run.
        """
        config = self._compose_run(master_config, sweep_overrides)
        self.composed_runs[tuple(sweep_overrides)] = copy.deepcopy(config)
        return config

    def _compose_run(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Compose one run of a sweep; if that fails, once more with `++` before overrides that change a key.

        Args:
            master_config: The configuration of the sweep, with its key hydra (Hydra's own options).
            sweep_overrides: The overrides of the run.
        """
        try:
            return self.hydra.load_sweep_config(master_config, list(sweep_overrides))
        except COMPLAINTS:  # errors of Hydra, OmegaConf and YAML
            return self.hydra.load_sweep_config(master_config, self.with_plus_signs(sweep_overrides))

    def with_plus_signs(self, overrides: Iterable[str]) -> list[str]:
        """Return overrides, with `++` before those that change a key's value.

        Hydra then accepts keys that no file has.  Choices of options, such as algorithm=ditto, stay as they are
        (`_changes_a_key`).
        """
        parsed = OverridesParser.create(self).parse_overrides(list(overrides))
        return [f"++{text}" if _changes_a_key(override) else text for text, override in zip(overrides, parsed)]

    def get_search_path(self) -> ConfigSearchPath:
        """Return the search path for configuration files."""
        return self.hydra.get_search_path()

    def get_sources(self) -> list:
        """Return the sources of configuration files, the folders and tables of the search path."""
        return self.hydra.get_sources()

    def list_groups(self, parent_name: str) -> list[str]:
        """Return the names of groups of options, such as "algorithm", inside of another group; "" is the top level."""
        return self.hydra.list_groups(parent_name)

    def get_group_options(self, group_name: str, *given: Any, **named: Any) -> list[str]:
        """Return the names of a group's options, such as "fedavg" of "algorithm".

        The other arguments are passed on to the method of Hydra's loader.
        """
        return self.hydra.get_group_options(group_name, *given, **named)

    def compute_defaults_list(self, config_name: str | None, overrides: list[str], run_mode: RunMode) -> Any:
        """Return Hydra's DefaultsList: the files of a configuration, in the order in which they are merged."""
        return self.hydra.compute_defaults_list(config_name, overrides, run_mode)


def _changes_a_key(override: Override) -> bool:
    """Return whether an override has the form key=value without + or ~, and its key may be a new one.

    Names of groups of options and Hydra's keys may not, except keys that a launcher passes on to Ray or Slurm.
    """
    key = override.key_or_group
    if override.type is not OverrideType.CHANGE or key in GROUPS or "/" in key:
        return False
    return not override.is_hydra_override() or key.startswith(PASSED_ON)
