"""Names that are spelled in two ways: equal numbers are refused, other likenesses get a warning, by every reader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedbench.core.options import ConfigError
from fedbench.data._names import check_spelling
from fedbench.data.arrays.npz import Npz
from fedbench.data.arrays.pfllib import PFLlib
from fedbench.data.images.image_folder import ImageFolder
from fedbench.data.images.image_table import ImageTable
from fedbench.data.tables.table_csv import TableCsv


@pytest.mark.parametrize("names", [["1", "1.0"], ["7", "x", "007"], ["0", "-0.0"], ["+3", "3."], [".5", "0.5"]])
def test_equal_numbers_are_refused(names: list[str]) -> None:
    first, second = sorted(name for name in names if name != "x")
    with pytest.raises(ConfigError, match="equal numbers") as refusal:
        check_spelling(names, "a.csv: the column label")
    assert f"a.csv: the column label: {first!r} and {second!r}" in str(refusal.value)


@pytest.mark.parametrize(("names", "warned"), [
    (["Yes", "yes"], True),
    (["North  ward", "north ward"], True),
    (["no", "No ", "maybe"], True),
    (["1", "2", "10", "1a", "yes", "no"], False),
    (["12345678901234567890", "12345678901234567891"], False),  # one float64
    (["4_7", "47", "nan", "NAN1", "1e", "0x1", "1e1", "10"], False),
])  # fmt: skip
def test_names_that_look_alike_get_a_warning(names: list[str], warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    check_spelling(names, "a.csv: the column label")
    assert ("differ only by case or blanks" in caplog.text) == warned


def test_many_are_not_listed() -> None:
    with pytest.raises(ConfigError, match=r"'2' and '2\.0' and 6 more are equal numbers"):
        check_spelling([f"{i}{end}" for i in range(9) for end in ("", ".0")], "x")


def csv_file(folder: Path, header: str, first: str, second: str) -> str:
    lines = [f"{i},{i % 2},{'a' if i % 2 else first},{first if i % 3 else second}" for i in range(12)]
    (folder / "a.csv").write_text("\n".join([header, *lines]) + "\n")
    return str(folder / "a.csv")


def table(folder: Path, first: str, second: str, **columns: str) -> None:
    path = csv_file(folder, "x,z,kind,who", first, second)
    TableCsv(path, columns={"label": "who", **columns}, ignore=["kind"]).load()


def pictures(folder: Path, first: str, second: str, role: str) -> None:
    image = Image.new("L", (4, 4))
    rows = ["image,label,patient,silo"]
    for i in range(12):
        image.save(folder / f"{i}.png")
        row = {"image": f"{i}.png", "label": "ab"[i % 2], "patient": f"p{i}", "silo": "cd"[i % 2]}
        row[role] = first if i % 3 else second
        rows.append(",".join(row.values()))
    (folder / "p.csv").write_text("\n".join(rows) + "\n")
    ImageTable(str(folder), str(folder / "p.csv"), resize=4).load()


def folders(folder: Path, first: str, second: str) -> None:
    for name in (first, second):
        (folder / "f" / name).mkdir(parents=True)
        Image.new("L", (4, 4)).save(folder / "f" / name / "0.png")
    ImageFolder(str(folder), str(folder / "f"), 4).load()


def arrays(folder: Path, first: str, second: str, role: str) -> None:
    columns = {"y": np.arange(12) % 2, "client": np.arange(12) % 3}
    columns[role] = np.array([first, second] * 6)
    np.savez(folder / "a.npz", X=np.zeros((12, 3), np.float32), **columns)  # type: ignore[arg-type]
    Npz(str(folder), str(folder / "a.npz")).load()


READERS: dict[str, Callable[[Path, str, str], None]] = {
    "label": table,
    "client": lambda f, a, b: table(f, a, b, label="z", client="who"),
    "patient": lambda f, a, b: table(f, a, b, label="z", patient="who"),
    "picture's label": lambda f, a, b: pictures(f, a, b, "label"),
    "picture's patient": lambda f, a, b: pictures(f, a, b, "patient"),
    "picture's silo": lambda f, a, b: pictures(f, a, b, "silo"),
    "class folders": folders,
    "array of labels": lambda f, a, b: arrays(f, a, b, "y"),
    "array of clients": lambda f, a, b: arrays(f, a, b, "client"),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_looks(reader: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"'7' and '7\.0' are equal numbers|'7\.0' and '7'"):
        READERS[reader](tmp_path, "7", "7.0")
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    (tmp_path / "two").mkdir()
    if reader in ("label", "picture's label"):
        with pytest.raises(
            ConfigError, match=r"'Yes' and 'yes', which differ only by case .* list them in dataset\.classes"
        ):
            READERS[reader](tmp_path / "two", "Yes", "yes")
        return
    READERS[reader](tmp_path / "two", "Yes", "yes")
    assert [r.levelname for r in caplog.records if "differ only by case" in r.getMessage()] == ["WARNING"]


def test_labels_that_dataset_classes_lists_may_look_alike(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = csv_file(tmp_path, "x,z,kind,who", "Yes", "yes")
    made = TableCsv(path, columns={"label": "who"}, ignore=["kind"], classes=["Yes", "a", "yes"]).load()
    assert made.class_names == ["Yes", "a", "yes"] and "differ only by case" in caplog.text


def test_files_of_clients_too(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        for name in ("1", "01"):
            np.savez(tmp_path / part / f"{name}.npz", data={"x": np.zeros((2, 3)), "y": np.arange(2)})  # type: ignore
    with pytest.raises(ConfigError, match="'01' and '1' are equal numbers"):
        PFLlib(str(tmp_path)).load()


def test_categories_and_listed_classes_too(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "x,z,kind,who", "7", "7.0")
    with pytest.raises(ConfigError, match=r"column who: '7' and '7\.0' are equal numbers"):
        TableCsv(path, columns={"label": "z"}, categorical=["who", "kind"]).load()
    with pytest.raises(ConfigError, match=r"dataset\.classes: '7' and '7\.0'"):
        TableCsv(path, columns={"label": "who"}, classes=["7", "7.0"]).load()
