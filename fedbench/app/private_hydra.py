"""Names of Hydra that it keeps private: all that fedbench uses stand here, and nowhere else.

They are those of hydra-core 1.3 (pyproject.toml: below 1.4).  tests/app/test_private_hydra.py looks for them in the
version that is installed.
"""

from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.utils import create_config_search_path, get_args_parser

NAMES = (
    "hydra._internal.config_loader_impl.ConfigLoaderImpl",
    "hydra._internal.config_loader_impl.ConfigLoaderImpl.load_configuration",
    "hydra._internal.config_loader_impl.ConfigLoaderImpl.load_sweep_config",
    "hydra._internal.config_repository.ConfigRepository",
    "hydra._internal.config_repository.ConfigRepository.initialize_sources",
    "hydra._internal.config_repository.ConfigRepository.load_config",
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeper.split_arguments",
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeper.validate_batch_is_legal",
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeperConf",
    "hydra._internal.utils.create_config_search_path",
    "hydra._internal.utils.get_args_parser",
)

__all__ = [
    "NAMES",
    "ConfigLoaderImpl",
    "ConfigRepository",
    "basic_sweeper",
    "create_config_search_path",
    "get_args_parser",
]


def basic_sweeper() -> Any:
    """The module of BasicSweeper and BasicSweeperConf, as it is now: Hydra executes it again when it looks for plugins,
    and a class of the first execution would not work any more."""
    from hydra._internal.core_plugins import basic_sweeper

    return basic_sweeper
