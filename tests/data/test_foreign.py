"""Files of other programs are called what they are, whichever data set they are given to."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedbench.core.options import ConfigError
from fedbench.data.arrays.npy import Npy
from fedbench.data.arrays.npz import Npz
from fedbench.data.arrays.pfllib import PFLlib
from fedbench.data.images.image_folder import ImageFolder
from fedbench.data.images.image_table import ImageTable
from fedbench.data.tables.table_csv import TableCsv
from fedbench.data.text.shakespeare import Shakespeare


def parquet(folder: Path) -> Path:
    (folder / "a.parquet").write_bytes(b"PAR1" + b"\0" * 16)
    return folder / "a.parquet"


def excel(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "a.xlsx", "w") as archive:
        archive.writestr("xl/workbook.xml", "")
    return folder / "a.xlsx"


def hdf5(folder: Path) -> Path:
    (folder / "a.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + b"\0" * 16)
    return folder / "a.h5"


def zipped(folder: Path) -> Path:
    (folder / "a.csv.gz").write_bytes(b"\x1f\x8b" + b"\0" * 16)
    return folder / "a.csv.gz"


def arrow(folder: Path) -> Path:
    """A data set that Hugging Face's datasets saved to disk."""
    (folder / "hf" / "train").mkdir(parents=True)
    (folder / "hf" / "train" / "data-00000-of-00001.arrow").write_bytes(b"ARROW1\0\0")
    return folder / "hf"


def leaf(folder: Path, x: Any = (0.5,) * 64, y: Any = 3) -> Path:
    """FEMNIST: flat pictures and classes of each user."""
    for part in ("train", "test"):
        (folder / "leaf" / part).mkdir(parents=True)
        data = {user: {"x": [x] * 4, "y": [y] * 4} for user in ("f1", "f2")}
        text = {"users": [*data], "num_samples": [4, 4], "user_data": data}
        (folder / "leaf" / part / "all_data.json").write_text(json.dumps(text))
    return folder / "leaf"


READERS: dict[str, Callable[[Path, str], Any]] = {
    "npz": lambda here, path: Npz(str(here), path),
    "npy": lambda here, path: Npy(path),
    "table_csv": lambda here, path: TableCsv(path),
    "image_table": lambda here, path: ImageTable(str(here), path),
    "image_folder": lambda here, path: ImageFolder(str(here), path),
    "pfllib": lambda here, path: PFLlib(path),
}
KINDS = {
    parquet: "a Parquet file",
    excel: "an Excel workbook",
    hdf5: "an HDF5 file",
    zipped: "a gzip file",
    arrow: "an Arrow file of Hugging Face datasets",
    leaf: "a JSON file of LEAF",
}


@pytest.mark.parametrize("made", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_the_kind_of_file_is_named(reader: str, made: Callable[[Path], Path], tmp_path: Path) -> None:
    path = made(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        READERS[reader](tmp_path, str(path)).load()
    said = str(refusal.value)
    files_only = reader == "image_folder" and path.is_file()  # "is not a folder" says enough
    assert files_only or f"is {KINDS[made]}, which dataset={reader} does not read: convert it to a CSV file" in said


@pytest.mark.parametrize(("x", "y"), [((0.5,) * 64, 3), (["1", "Mon", "me", "text"], "4")])
def test_other_sets_of_leaf_are_no_text(tmp_path: Path, x: Any, y: Any) -> None:
    with pytest.raises(ConfigError, match="f1 has samples that are not text, as in LEAF's FEMNIST or Sent140"):
        Shakespeare(str(leaf(tmp_path, x, y))).load()


def test_a_client_without_a_test_file_is_named(tmp_path: Path) -> None:
    for name in ("train/0", "train/1", "train/12", "test/0", "test/12"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.npz").touch()
    with pytest.raises(ConfigError, match=r"must be the same; 1\.npz is only in one of them"):
        PFLlib(str(tmp_path)).load()
