"""Names of Hydra that it keeps private: all that fedbench uses stand here, and nowhere else.

They are those of hydra-core 1.3 (pyproject.toml: below 1.4).  tests/app/test_private_hydra.py looks for them in the
version that is installed.
"""

from hydra._internal.callbacks import Callbacks
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.utils import get_args_parser

NAMES = (
    "hydra._internal.callbacks.Callbacks",
    "hydra._internal.config_repository.ConfigRepository",
    "hydra._internal.utils.get_args_parser",
)

__all__ = ["NAMES", "Callbacks", "ConfigRepository", "get_args_parser"]
