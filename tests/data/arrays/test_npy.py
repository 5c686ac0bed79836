"""Folders of .npy files: inputs are left where they lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedbench.core.mapped import is_read_only_file
from fedbench.core.options import ConfigError
from fedbench.data.arrays.npy import Npy
from fedbench.data.arrays.npz import Npz


def saved(folder: Path, **arrays: np.ndarray) -> str:
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)
    return str(folder)


RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (12, 3, 6, 5), dtype=np.uint8)
LABELS = np.arange(12) % 3


def test_the_same_arrays_as_those_of_an_npz(tmp_path: Path) -> None:
    more = {"client": np.repeat(["a", "b"], 6), "split": np.arange(12) % 2 * 2, "classes": np.array(["x", "y", "z"])}
    found = Npy(saved(tmp_path, X=IMAGES, y=LABELS, **more)).load()
    np.savez(tmp_path / "all.npz", X=IMAGES, y=LABELS, **more)
    wanted = Npz(str(tmp_path), str(tmp_path / "all.npz")).load()
    assert found.digest == wanted.digest and found.class_names == ["x", "y", "z"] and found.domain_names == ["a", "b"]
    assert isinstance(found.inputs, np.memmap) and is_read_only_file(found.inputs)


def test_features_and_other_tasks(tmp_path: Path) -> None:
    x = RNG.random((12, 7), np.float32)
    assert Npy(saved(tmp_path, X=x, y=LABELS)).load().mean is None
    several = np.maximum(np.eye(3)[LABELS], np.eye(3)[0])
    assert Npy(saved(tmp_path, X=x, y=several)).load().task == "multilabel"


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"y": LABELS}, r"X\.npy does not exist"),
        ({"X": IMAGES}, r"y\.npy does not exist"),
        ({"X": IMAGES.astype(float), "y": LABELS}, "is float64"),
        ({"X": IMAGES[:, 0], "y": LABELS}, r"is uint8 \(12, 6, 5\)"),
        ({"X": np.asfortranarray(IMAGES), "y": LABELS}, "in C order"),
        ({"X": np.ascontiguousarray(IMAGES.transpose(0, 2, 3, 1)), "y": LABELS}, "with its channels last"),
        ({"X": np.zeros((12, 6, 5, 3), np.float32), "y": LABELS}, "with its channels last"),
        ({"X": IMAGES.astype(np.uint16), "y": LABELS}, r"is uint16 .*: write uint8"),
        (
            {"X": np.zeros((12, 0), np.float32), "y": LABELS},
            r"has shape \(12, 0\), so that its samples have no numbers",
        ),
        ({"X": IMAGES, "y": LABELS[1:]}, "X has 12 rows, y has 11 rows"),
        ({"X": np.full((12, 2), np.inf, np.float32), "y": LABELS}, "not finite"),
        ({"X": np.array([None] * 12), "y": LABELS}, "damaged or not a .npy file of numbers"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, arrays: dict[str, np.ndarray], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Npy(saved(tmp_path, **arrays)).load()


def test_labels_whose_header_claims_more_than_there_is(tmp_path: Path) -> None:
    saved(tmp_path, X=IMAGES)
    with open(tmp_path / "y.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (10**12,)})
    with pytest.raises(ConfigError, match=r"y\.npy is damaged or not a \.npy file of numbers"):
        Npy(str(tmp_path)).load()


def test_a_path_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"set dataset\.path to one with X\.npy"):
        Npy().load()
