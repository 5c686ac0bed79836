"""The tables of a run as pandas DataFrames."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import TYPE_CHECKING

from fedbench.core.options import ConfigError
from fedbench.report.runs import read_header, whole_lines

if TYPE_CHECKING:
    from pandas import DataFrame


def read_frame(path: Path) -> DataFrame:
    """A CSV file as a DataFrame: float64, where all are whole int64, NaN for an empty cell; no rows where there is no
    file.  A last line cut by a kill is left out.

    Raises ConfigError without pandas, and where the file is damaged.
    """
    try:
        pandas = importlib.import_module("pandas")
    except ImportError as error:
        raise ConfigError(
            f"{path.name} is read as a pandas DataFrame, and pandas is not installed: pip install pandas"
        ) from error
    if not read_header(path):
        return pandas.DataFrame()
    try:
        return pandas.read_csv(io.StringIO("".join(whole_lines(path))), float_precision="round_trip")
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {str(error).strip()}") from error
