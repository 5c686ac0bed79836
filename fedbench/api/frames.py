"""The tables of a run as pandas DataFrames."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from fedbench.core.options import ConfigError
from fedbench.report.runs import read_columns, whole_lines

if TYPE_CHECKING:
    from pandas import DataFrame


def read_frame(path: Path) -> DataFrame:
    """A CSV file of numbers as a DataFrame: float64, NaN for an empty cell; int64 where all cells are whole numbers;
    empty where there is no file.  A last line cut by a kill is left out.

    Raises ConfigError without pandas, and where the file is damaged.
    """
    try:
        pandas = importlib.import_module("pandas")
    except ImportError as error:
        raise ConfigError(
            f"{path.name} is read as a pandas DataFrame, and pandas is not installed: pip install pandas"
        ) from error
    columns = read_columns(path)  # to the last digit, as the reports read it
    rows = list(csv.reader(whole_lines(path)))[1:] if columns else []
    numbers = [(i, name) for i, name in enumerate(columns) if name != "name"]
    whole = [name for i, name in numbers if rows and all(row[i].isdigit() for row in rows)]
    return pandas.DataFrame(columns).astype(dict.fromkeys(whole, "int64"))
