"""MedMNIST: what the package says of its sets, and where their files are looked for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from fedbench.core.options import ConfigError
from fedbench.data._files import md5_of
from fedbench.data.images.medmnist import MedMNIST, _names

info: Any = pytest.importorskip("medmnist.info", reason="needs the medmnist package")
INFO: dict[str, Any] = info.INFO


def save(path: Path, side: int, train: int, val: int = 2, test: int = 2) -> Path:
    """A grey set of two classes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for part, n in (("train", train), ("val", val), ("test", test)):
        arrays[f"{part}_images"] = np.zeros((n, side, side), np.uint8)
        arrays[f"{part}_labels"] = (np.arange(n) % 2)[:, None].astype(np.uint8)
    np.savez(path, **arrays)
    return path


def test_medmnist_has_the_flags_of_the_package() -> None:
    assert set(get_args(get_type_hints(MedMNIST.__init__)["flag"])) == {flag for flag in INFO if "3d" not in flag}


def test_medmnists_classes_keep_the_names_of_old_runs() -> None:
    """They are part of the digest of the data, which a resume compares."""
    assert _names(INFO["bloodmnist"]["label"])[3] == "immature granulocytes"
    assert _names(INFO["breastmnist"]["label"]) == ["malignant", "normal or benign"]
    assert _names(INFO["retinamnist"]["label"]) == [f"grade {i}" for i in range(5)]
    assert _names(INFO["tissuemnist"]["label"])[0] == "collecting duct, connecting tubule"
    assert _names(INFO["organamnist"]["label"])[1:3] == ["femur-left", "femur-right"]


def test_medmnist_asks_the_packages_address_and_md5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("fedbench.data.images.medmnist.download", lambda *given: asked.append(given))
    with pytest.raises(ConfigError):
        MedMNIST(str(tmp_path), flag="octmnist").load()
    info = INFO["octmnist"]
    assert asked == [([info["url"]], tmp_path / "octmnist.npz", info["MD5"], "octmnist")]


def test_medmnists_own_folder_is_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that the package has downloaded is read; one in data_dir comes first."""
    root, data_dir = tmp_path / "medmnist", tmp_path / "data"
    monkeypatch.setattr("medmnist.info.DEFAULT_ROOT", str(root))
    for folder, n in ((root, 5), (data_dir, 7)):
        save(folder / "pneumoniamnist.npz", 28, n)
    source = MedMNIST(str(data_dir), flag="pneumoniamnist", verify=False)
    assert len(source.load()) == 11
    (data_dir / "pneumoniamnist.npz").unlink()
    assert len(source.load()) == 9


def test_a_larger_size_is_verified_by_its_md5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "pneumoniamnist_64.npz", 64, 4)
    source = MedMNIST(str(tmp_path), str(path), flag="pneumoniamnist")
    with pytest.raises(ConfigError, match=r"is not the published pneumoniamnist\.npz"):
        source.load()
    monkeypatch.setitem(INFO["pneumoniamnist"], "MD5_64", md5_of(path))
    assert source.load().inputs.shape == (8, 1, 64, 64)


def test_medmnist_without_the_package_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "medmnist.info", None)
    with pytest.raises(ConfigError, match=r"needs the medmnist package: run pip install medmnist"):
        MedMNIST(str(tmp_path)).load()
