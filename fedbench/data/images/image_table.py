"""Pictures listed in a CSV file: which picture, which label, whose it is, and from which silo it came.

The layout of the breast-cancer case study (RSNA, CBIS-DDSM, CMMD): a table and a folder of pictures.  With
partition=domain every silo is a client; a patient's pictures are never both trained and tested on (Arrays.subject,
which partitions respect).  Only listed pictures of the wanted silos are decoded, and only once (data_dir/cache).
"""

import csv
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from fedbench.core.options import ConfigError, Count, Seed, require, require_distinct
from fedbench.data._depth import check_window
from fedbench.data._files import cached, log
from fedbench.data._foreign import refuse_foreign
from fedbench.data._images import READER, half, open_pictures
from fedbench.data._names import check_spelling
from fedbench.data.base import TRAIN, Arrays
from fedbench.data.images._extra import extra_path, join_extra
from fedbench.data.images._label_lists import join_columns, refuse_lists, split_lists
from fedbench.data.images.image_folder import PARTS, ImageFolder
from fedbench.data.tables.table_csv import best_delimiter

COLUMNS = {"image": "image", "label": "label", "patient": "patient", "silo": "silo", "split": None}
FIELD = re.compile(r"\{([^{}]*)\}")
Row = dict[str, str]


class ImageTable:
    """Pictures listed in a CSV file.

    Args:
        path: The CSV file.
        folder: The folder of the picture paths.  None: the folder of the CSV file.  A picture that is absent there is
            searched in the folders below by its name.
        columns: Names of the columns for image, label, patient, silo and split.  patient may be None (every picture is
            of another patient), and so may silo (one silo) and split.  split holds train, val or test, for
            dataset.split=published.  The image may combine columns: "{patient_id}_{image_id}.png".  The label may be a
            list of columns of 0 and 1, one for each class.  These are classes if every picture has one, else labels.
        label_separator: Text between the labels of a cell.  None: a cell is one label.
        classes: Names in the order of their numbers.  None: all in the table, sorted.  Other labels are ignored in
            lists, and refused otherwise.
        silos: Names in the order of their numbers.  None: all in the table, sorted.  Rows of other silos are ignored.
        negatives: For each silo, the number of pictures of the first class for each picture of the others, drawn from
            `seed`.  None: all pictures.
        window: [low, high], the values that become black and white in pictures of more than 8 bits.  None: the range of
            all pictures.
        resize: Side in pixels.
        color: grey or rgb.
        extra: Pictures for training only: a CSV file with the columns image (relative to its folder), label and silo,
            or a folder silo/class/picture.
    """

    def __init__(
        self,
        data_dir: str,
        path: str | None = None,
        folder: str | None = None,
        columns: dict[str, str | list[str] | None] | None = None,
        classes: list | None = None,
        silos: list | None = None,
        negatives: list | None = None,
        seed: Seed = 0,
        resize: Count = 224,
        color: Literal["rgb", "grey"] = "grey",
        extra: str | None = None,
        label_separator: str | None = None,
        window: Sequence[float] | None = None,
    ):
        self.window = check_window(window)
        self.data_dir, self.path, self.folder, self.extra = data_dir, path, folder, extra
        self.columns = {**COLUMNS, **(columns or {})}
        odd = sorted(set(self.columns) - set(COLUMNS))
        require(not odd, f"dataset.columns knows {', '.join(COLUMNS)}, not {', '.join(odd)}")
        lists = [name for name, column in self.columns.items() if isinstance(column, list) and name != "label"]
        require(not lists, f"dataset.columns.{(lists or [''])[0]} must be one column: only label may be a list of them")
        self.label_separator = label_separator
        require(label_separator != "", "dataset.label_separator must be null or what stands between two labels")
        self.classes = None if classes is None else [str(c) for c in classes]
        require_distinct(self.classes or (), "dataset.classes")
        self.silos = None if silos is None else [str(s) for s in silos]
        require_distinct(self.silos or (), "dataset.silos")
        self.negatives, self.seed, self.resize = negatives, seed, resize
        self.color: Literal["rgb", "grey"] = color

    def load(self) -> Arrays:
        """Read the table and its pictures; ConfigError with one sentence about the first thing that is wrong."""
        require(self.path is not None, "dataset=image_table needs dataset.path=<a CSV file>")
        path = Path(str(self.path))
        extra = None if self.extra is None else extra_path(self.extra, or_table=True)
        arrays = self._read(Table(path, self.columns), Path(self.folder or path.parent)).check()
        return arrays if extra is None else join_extra(arrays, self._extra(extra), str(extra)).check()

    def _extra(self, path: Path) -> Arrays:
        """The pictures for training only."""
        if path.is_dir():
            return ImageFolder(self.data_dir, str(path), self.resize, "domain", self.color, None, self.window).read(
                True
            )
        plain = ImageTable(self.data_dir, resize=self.resize, color=self.color, window=self.window)
        return plain._read(Table(path, {**COLUMNS, "patient": None}), path.parent, is_extra=True)

    def _read(self, table: "Table", folder: Path, is_extra: bool = False) -> Arrays:
        table.keep_silos(self.silos)
        class_names, targets = self._labels(table)
        silo_names, domain = numbered(table, "silo", self.silos)
        chosen = np.arange(len(targets))
        if self.negatives is not None:
            require(targets.ndim == 1, "dataset.negatives needs one label a picture")
            chosen = subsample(targets, domain, self.negatives, silo_names, self.seed)
        names, patients = table.values("image"), table.values("patient")
        if self.columns["patient"] is not None:
            check_spelling(patients, f"{table.path}: the patient")
        images = self._pictures(table.path, folder, [names[i] for i in chosen], is_extra)
        return Arrays(
            inputs=images,
            targets=targets[chosen],
            split=table.parts()[chosen],
            num_classes=len(class_names),
            task="classification" if targets.ndim == 1 else "multilabel",
            class_names=class_names,
            domain=domain[chosen],
            domain_names=silo_names,
            mean=half(images),
            std=half(images),
            subject=np.unique(patients, return_inverse=True)[1][chosen].astype(np.int64),
        )

    def _labels(self, table: "Table") -> tuple[list[str], np.ndarray]:
        """Return the class names in order, and targets: [n] int64, or [n, C] float32 for several labels per picture."""
        column = table.columns["label"]
        if isinstance(column, list):
            given = self.classes is None and self.label_separator is None
            require(
                given, "a list as dataset.columns.label names the classes: dataset.classes and label_separator are null"
            )
            return column, join_columns([table.cells(name) for name in column], column, str(table.path))
        if self.label_separator is not None and column is not None:
            return split_lists(table.cells(column, True), self.label_separator, self.classes, str(table.path))
        if self.classes is None:
            refuse_lists(table.values("label"), str(table.path))
        return numbered(table, "label", self.classes)

    def _pictures(self, path: Path, folder: Path, names: list[str], is_extra: bool) -> np.ndarray:
        """All pictures [n, channels, resize, resize] uint8, from the cache where nothing has changed."""
        files = found(path, folder, names)
        stats = [os.stat(file) for file in files]
        stamps = [(n, s.st_size, s.st_mtime_ns) for n, s in zip(names, stats)]
        key = (stamps, self.resize, self.color, self.window, is_extra, READER)

        def decode() -> dict[str, np.ndarray]:
            log.info("resizing %s pictures of %s once", f"{len(names):,}", path)
            return {"images": open_pictures(files, self.resize, self.color, self.window, str(path), is_extra)}

        return cached(self.data_dir, path.stem, key, decode)["images"]


class Table:
    """The rows of a CSV file, and what its columns are called."""

    def __init__(self, path: Path, columns: dict[str, str | list[str] | None]):
        self.path, self.columns = path, columns
        refuse_foreign(path, "dataset=image_table")
        require(path.is_file(), f"{path} is no file: dataset.path names a CSV file with a row per picture")
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.DictReader(file)
                self.rows = [(reader.line_num, {k: (v or "").strip() for k, v in row.items() if k}) for row in reader]
                self.header = list(reader.fieldnames or [])
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"{path} cannot be read as a CSV file ({error})") from error
        self._check()

    def _check(self) -> None:
        listed = [c for said in self.columns.values() for c in (said if isinstance(said, list) else [said]) if c]
        wanted = [name for said in listed for name in FIELD.findall(said) or [said]]
        missing = [name for name in wanted if name not in self.header]
        apart = len(self.header) == 1 and best_delimiter(self.header[0]) != ","
        require(
            not missing,
            f"{self.path} has no column {' or '.join(missing)}; its columns are {', '.join(self.header) or 'none'} "
            f"({'cells must be separated by commas' if apart else 'dataset.columns says which is which'})",
        )
        require(bool(self.rows), f"{self.path} lists no picture")
        seen: dict[str, int] = {}
        for (line, _), name in zip(self.rows, self.values("image")):
            require(name not in seen, f"{self.path} lists {name} twice, in lines {seen.get(name)} and {line}")
            seen[name] = line

    def values(self, what: str) -> list[str]:
        """A column as text; ConfigError for an empty cell.  Without one: the picture itself as patient, one silo."""
        said = self.columns[what]
        if said is None:
            return self.values("image") if what == "patient" else ["all"] * len(self.rows)
        assert isinstance(said, str)
        return self.cells(said)

    def cells(self, column: str, may_be_empty: bool = False) -> list[str]:
        """Return the cells of a column or of a pattern of columns; ConfigError for a disallowed empty cell."""
        if may_be_empty and column in self.header:
            return [row[column] for _, row in self.rows]
        return [self._cell(line, row, column) for line, row in self.rows]

    def _cell(self, line: int, row: Row, said: str) -> str:
        names = FIELD.findall(said)
        for name in names or [said]:
            require(bool(row.get(name)), f"{self.path}, line {line}: {name} is empty")
        return FIELD.sub(lambda m: row[m.group(1)], said) if names else row[said]

    def keep_silos(self, silos: list[str] | None) -> None:
        """Leave out the rows of other silos."""
        if silos is None:
            return
        silo_of = self.values("silo")
        absent = [silo for silo in silos if silo not in silo_of]
        require(not absent, f"{self.path} has no silo {', '.join(absent)}; it has {', '.join(sorted(set(silo_of)))}")
        kept = [row for row, silo in zip(self.rows, silo_of) if silo in silos]
        if len(kept) < len(self.rows):
            log.info("%s: %s of %s rows are of other silos", self.path, f"{len(self.rows) - len(kept):,}",
                     f"{len(self.rows):,}")  # fmt: skip
        self.rows = kept

    def parts(self) -> np.ndarray:
        """The published part of each row, [n] int8; all train where no column says."""
        if self.columns["split"] is None:
            return np.full(len(self.rows), TRAIN, np.int8)
        parts = self.values("split")
        odd = next((name for name in parts if name.lower() not in PARTS), None)
        require(odd is None, f"{self.path}: {self.columns['split']} is {odd}, not train, val or test")
        return np.array([PARTS[name.lower()] for name in parts], np.int8)


def found(table: Path, folder: Path, names: list[str]) -> list[Path]:
    """Return the file of each picture: at the path in the table, or by its name in a folder below.

    Raises:
        ConfigError: A picture is in no folder or in two.
    """
    files = [folder / name for name in names]
    absent = {name for name, file in zip(names, files, strict=True) if not file.is_file()}
    if not absent:
        return files
    below: dict[str, list[Path]] = {name: [] for name in absent}
    short = {Path(name).name for name in absent}
    for top, folders, held in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in (Path(top) / name for name in held if name in short):
            end = file.relative_to(folder).parts
            for name in {"/".join(end[i:]) for i in range(len(end))} & absent:
                below[name].append(file)
    missing = [name for name in names if name in absent and not below[name]]
    require(
        not missing,
        f"{len(missing):,} of the {len(names):,} pictures that {table} lists are not in {folder} (the first is "
        f"{(missing or [''])[0]}): dataset.folder says where they are",
    )
    twice = next((copies for copies in below.values() if len(copies) > 1), None)
    require(
        twice is None,
        f"{table} lists {(twice or [folder])[0].name}, which is there twice: {', '.join(map(str, (twice or [])[:2]))}",
    )
    return [below[name][0] if name in absent else file for name, file in zip(names, files, strict=True)]


def numbered(table: Table, what: str, names: list[str] | None) -> tuple[list[str], np.ndarray]:
    """(names in order, each row's number [n] int64) of the label or silo; names None: those found, sorted."""
    values = table.values(what)
    are_labels = what == "label" and names is None
    check_spelling(values if names is None else names, f"{table.path}: the {what}", are_labels)
    names = sorted(set(values)) if names is None else names
    odd = sorted(set(values) - set(names))
    require(
        not odd,
        f"{table.path} has the {what} {(odd or [''])[0]}, which is not among {', '.join(names)} (dataset.classes)",
    )
    number = {name: i for i, name in enumerate(names)}
    return names, np.array([number[name] for name in values], np.int64)


def subsample(targets: np.ndarray, domain: np.ndarray, negatives: list, silos: list[str], seed: int) -> np.ndarray:
    """Rows kept, ascending: of each silo, `negatives` pictures of class 0 for each other one, or all (null)."""
    require(
        len(negatives) == len(silos),
        f"dataset.negatives has {len(negatives)} entries for the {len(silos)} silos {', '.join(silos)}",
    )
    rng, kept = np.random.RandomState(seed), [np.flatnonzero(targets != 0)]
    for number, (ratio, silo) in enumerate(zip(negatives, silos)):
        zeros = np.flatnonzero((domain == number) & (targets == 0))
        if ratio is not None:
            wanted = round(ratio * int(((domain == number) & (targets != 0)).sum()))
            require(
                wanted <= len(zeros),
                f"dataset.negatives asks for {wanted:,} pictures of the first class in the silo {silo}, which has "
                f"{len(zeros):,}: lower its entry, or make it null to keep them all",
            )
            zeros = rng.permutation(zeros)[:wanted]
        kept.append(zeros)
    return np.sort(np.concatenate(kept))
