"""The data files that scikit-learn carries, read without importing scikit-learn (which takes seconds)."""

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fedbench.core.options import ConfigError


def bundled_csv(name: str, skip: int = 0, delimiter: str | None = ",") -> np.ndarray:
    """A CSV of numbers from scikit-learn's data folder, gzipped or not, without its first lines.  delimiter: None is
    any white space.  # [rows, columns], or [rows] of a single column"""
    spec = find_spec("sklearn")
    path = Path(str(spec.origin)).parent / "datasets" / "data" / name if spec else None
    if path is None or not path.exists():
        raise ConfigError(f"{name} is part of scikit-learn, which is not installed here (pip install scikit-learn)")
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
        return np.loadtxt(file, delimiter=delimiter, skiprows=skip)
