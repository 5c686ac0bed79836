"""scripts/split_classes.py: two files with different classes, and the published parts of both."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny import compose

from fedbench.core.options import ConfigError
from fedbench.data.base import TEST
from fedbench.simulation import build

ROOT = Path(__file__).resolve().parents[2]


def split(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["split_classes.py", *arguments])
    runpy.run_path(str(ROOT / "scripts" / "split_classes.py"), run_name="__main__")


def write_source(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (40, 3, 4, 4), dtype=np.uint8)
    y, is_test = np.arange(40) % 5, np.arange(40) % 4 == 0
    np.savez(path, X=x, y=y, split=np.where(is_test, "test", "train"), classes=np.array(list("abcde")))
    return x, y, is_test


@pytest.mark.parametrize("arguments, number", [([], 2), (["--classes", "3"], 3)])
def test_each_file_has_its_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], number: int
) -> None:
    x, y, is_test = write_source(tmp_path / "all.npz")
    files = [str(tmp_path / f"{name}.npz") for name in ("first", "second")]
    split(monkeypatch, *files, "dataset=npz", f"dataset.path={tmp_path / 'all.npz'}", *arguments)
    for file, classes in zip(files, (range(number), range(number, 5))):
        arrays = build.data(compose(["dataset=npz", f"dataset.path={file}", "dataset.split=published"]))
        kept = np.isin(y, list(classes))
        assert np.array_equal(np.asarray(arrays.inputs), x[kept])
        assert np.array_equal(arrays.targets, y[kept] - classes.start)
        assert np.array_equal(arrays.split == TEST, is_test[kept])
        assert arrays.class_names == list("abcde")[classes.start : classes.stop]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["dataset=digits", "--classes", "10"], "--classes 10 must be at least 1 and less than 10"),
        (["dataset=diabetes442"], "dataset=diabetes442: the samples are not images with one label each"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        split(monkeypatch, str(tmp_path / "first.npz"), str(tmp_path / "second.npz"), *arguments)
