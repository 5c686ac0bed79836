"""Hydra source that reads rows of the papers' tables as experiment files: ``+experiment=<table>/<row>``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf

from fedbench.config.paper_tables import PREFIX, read_row, read_tables, row_names

SCHEME = "paper"


class PaperSource(ConfigSource):
    """A Hydra source for the tables in conf folders.

    Args:
        provider: The name of the source.
        path: ``paper://<folder>``, or several folders separated as in PATH.
    """

    def __init__(self, provider: str, path: str):
        super().__init__(provider, path)
        self.folders = [Path(folder) for folder in self.path.split(os.pathsep) if folder]

    @staticmethod
    def scheme() -> str:
        """Return "paper", with which the paths of these sources begin: paper://..."""
        return SCHEME

    def available(self) -> bool:
        """Return whether all folders of the source exist."""
        return all(folder.is_dir() for folder in self.folders)

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a table row as the content of an experiment file.

        Args:
            config_path: experiment/<table>/<row>.

        Raises:
            ConfigLoadError: No table has the row.
        """
        row = self._row(config_path)
        if row is None:
            raise ConfigLoadError(f"{config_path} is not a row of a table in {self.path}")
        # provider and full_path() say where the keys come from, for --info
        # _global_: the keys of the row are at the top level, not below "experiment"
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(row), {"package": "_global_"})

    def is_config(self, config_path: str) -> bool:
        """Return whether the path is experiment/table/row, and the table has such a row."""
        return self._row(config_path) is not None

    def is_group(self, config_path: str) -> bool:
        """Return whether the path is "experiment", or "experiment/" and the name of a table."""
        group, _, table = config_path.partition("/")
        return f"{group}/" == PREFIX and (not table or table in read_tables(self.folders))

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names below a path: of the tables for "experiment", or of the rows for "experiment/<table>".

        Args:
            config_path: The path.
            results_filter: What to list.  Tables are groups and rows are configurations; None for either.
        """
        table = config_path.partition("/")[2]
        if (results_filter is ObjectType.CONFIG and not table) or (results_filter is ObjectType.GROUP and table):
            return []
        if not table:
            return sorted(read_tables(self.folders))
        return sorted(row.partition("/")[2] for row in row_names(self.folders) if row.startswith(f"{table}/"))

    def _row(self, config_path: str) -> dict | None:
        """Return the content of the experiment at ``experiment/<table>/<row>``; None if no table has this row."""
        return read_row(config_path, self.folders) if config_path.startswith(PREFIX) else None


def source_path(folders: Iterable[str | Path]) -> str:
    """Return the path of a PaperSource for the tables in conf folders, as in "paper://a:b" for the folders a and b."""
    return f"{SCHEME}://{os.pathsep.join(map(str, folders))}"
