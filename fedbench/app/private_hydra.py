"""Names of Hydra that it keeps private: all that fedbench uses stand here, and nowhere else.

They are those of hydra-core 1.3 (pyproject.toml: below 1.4).  tests/app/test_private_hydra.py looks for them in the
version that is installed.
"""

from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.utils import get_args_parser

NAMES = (
    "hydra._internal.callbacks.Callbacks",
    "hydra._internal.config_loader_impl.ConfigRepository",
    "hydra._internal.config_repository.ConfigRepository",
    "hydra._internal.config_repository.ConfigRepository._create_defaults_list",
    "hydra._internal.config_repository.ConfigRepository._extract_defaults_list",
    "hydra._internal.utils.get_args_parser",
)

__all__ = ["NAMES", "Callbacks", "ConfigRepository", "config_loader_impl", "defaults_of", "get_args_parser"]


def defaults_of(repository: ConfigRepository, path: str, config: Any) -> Any:
    """Return the defaults list of an option's content, which is then without it."""
    return repository._create_defaults_list(path, repository._extract_defaults_list(path, config))
