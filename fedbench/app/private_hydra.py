"""Private names of Hydra.  fedbench imports them only here.

They exist in hydra-core 1.3 (pyproject.toml requires a version below 1.4).  tests/app/test_private_hydra.py checks that
the installed version has them.
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
