"""Data files in scikit-learn's package, read without importing scikit-learn, which is slow."""

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fedbench.core.options import ConfigError, require


def bundled_csv(name: str, shape: tuple[int, ...], skip: int = 0, delimiter: str | None = ",") -> np.ndarray:
    """Read a CSV of numbers from scikit-learn's data folder, gzipped or not.

    Args:
        name: The name of the file, for example "breast_cancer.csv".
        shape: The expected shape of the array.
        skip: The number of header lines.
        delimiter: The text between cells.  None: any white space.

    Returns:
        An array of the expected shape, float64.

    Raises:
        ConfigError: scikit-learn is not installed, or its file has another shape.
    """
    spec = find_spec("sklearn")
    path = Path(str(spec.origin)).parent / "datasets" / "data" / name if spec else None
    if path is None or not path.exists():
        raise ConfigError(
            f"the file {name} is in the package scikit-learn, which is not installed: run pip install scikit-learn"
        )
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
        table = np.loadtxt(file, delimiter=delimiter, skiprows=skip)
    require(
        table.shape == shape,
        f"the table in {path} has shape {table.shape}, but {shape} is expected: reinstall scikit-learn "
        "(pip install --force-reinstall scikit-learn)",
    )
    return table
