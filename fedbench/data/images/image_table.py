"""Pictures listed in a CSV file with their labels, patients and natural clients.

With partition=domain, each natural client (the column silo) is a client.  The pictures of a patient are never in both
training and test data (`Arrays.subject`).  Only listed pictures of the selected clients are decoded, and only once.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fedbench.core.options import ConfigError, Count, Seed, listed, require, require_distinct
from fedbench.data._depth import check_window
from fedbench.data._files import visible_files
from fedbench.data._images import decode_cached, half_per_channel
from fedbench.data._names import check_spelling, positions
from fedbench.data.base import TRAIN, Arrays
from fedbench.data.images._extra import extra_path, join_extra
from fedbench.data.images._label_lists import join_columns, refuse_lists, split_lists
from fedbench.data.images.image_folder import ImageFolder
from fedbench.data.tables._csv import CsvTable, split_codes

ROLES = {"image": "image", "label": "label", "patient": "patient", "silo": "silo", "split": None}  # default columns
FIELD = re.compile(r"\{([^{}]*)\}")  # the name of a column in braces
ADVICE = "set their names in dataset.columns; cells must be separated by commas"


@dataclass
class ImageTable:
    """Pictures listed in a CSV file.  roles: its columns of image, label, patient, silo (natural client) and split.

    Args:
        data_dir: Folder of the cache.
        path: The CSV file.
        folder: The folder of the picture paths.  None: the folder of the CSV file.  A picture that does not exist there
            is searched by name in the folders below.
        columns: The columns of image, label, patient, silo and split.  patient, silo and split may be None: a different
            patient in each picture, one natural client, no published split.  split contains train, val or test.  The
            image may combine columns: "{patient_id}_{image_id}.png".  The label may be a list of columns of 0 and 1,
            one for each class: a classification if each row has one 1, else multi-label.
        classes: Names in the order of their indices.  None: all in the table, sorted.  Other labels are ignored in
            lists, and refused otherwise.
        silos: Natural clients in order.  None: all in the table, sorted.  Rows of other clients are ignored.
        negatives: For each natural client, the ratio of pictures of the first class to all other pictures; pictures are
            sampled with `seed`.  None: all pictures.
        seed: Seed of the sampling.
        resize: Side in pixels.
        color: grey or rgb.
        extra: Pictures for training only: a CSV file with the columns image (relative to its folder), label and silo,
            or a folder silo/class/picture.
        label_separator: Text between the labels of a cell.  None: a cell is one label.
        window: [low, high], the values that become black and white in pictures of more than 8 bits.  None: the range of
            all pictures.
    """

    data_dir: str
    path: str | None = None
    folder: str | None = None
    columns: dict[str, str | list[str] | None] | None = None
    classes: list | None = None
    silos: list | None = None
    negatives: list | None = None
    seed: Seed = 0
    resize: Count = 224
    color: Literal["rgb", "grey"] = "grey"
    extra: str | None = None
    label_separator: str | None = None
    window: Sequence[float] | None = None

    def __post_init__(self) -> None:
        self._window = check_window(self.window)
        self.roles = {**ROLES, **(self.columns or {})}
        unknown = sorted(set(self.roles) - set(ROLES))
        require(
            not unknown,
            f"dataset.columns has the keys {', '.join(unknown)}, but only {', '.join(ROLES)} are allowed: remove "
            "the others",
        )
        for role, column in self.roles.items():
            is_list = isinstance(column, list)
            require(
                role == "label" or not is_list,
                f"dataset.columns.{role}={column} must be one column; only label may be a list: set it to one name",
            )
        require(
            self.label_separator != "",
            "dataset.label_separator is empty: set it to the text between two labels, such as '|', or to null for one "
            "label per picture",
        )
        self.classes = None if self.classes is None else [str(name) for name in self.classes]
        require_distinct(self.classes or (), "dataset.classes")
        self.silos = None if self.silos is None else [str(name) for name in self.silos]
        require_distinct(self.silos or (), "dataset.silos")

    def load(self) -> Arrays:
        """Return the listed pictures, decoded or from the cache, and further training pictures if ``extra`` is set.

        Raises:
            ConfigError: A file cannot be read, or does not fit the options.
        """
        require(
            self.path is not None, "dataset=image_table needs a file, but dataset.path is null: set dataset.path to one"
        )
        path = Path(str(self.path))
        extra = None if self.extra is None else extra_path(self.extra, may_be_table=True)
        arrays = self._read(path, Path(self.folder or path.parent)).check()
        return arrays if extra is None else join_extra(arrays, self._extra(extra), str(extra)).check()

    def _extra(self, path: Path) -> Arrays:
        """Return the pictures for training only (dataset.extra), decoded like the others.

        Args:
            path: A CSV file that lists them, or a folder silo/class/picture.
        """
        if path.is_dir():
            folder = ImageFolder(
                self.data_dir, str(path), self.resize, layout="domain", color=self.color, window=self._window
            )
            return folder.read(is_extra=True)
        columns: dict[str, str | list[str] | None] = {"patient": None}  # the other columns have their default names
        table = ImageTable(self.data_dir, columns=columns, resize=self.resize, color=self.color, window=self.window)
        return table._read(path, path.parent, is_extra=True)

    def _read(self, path: Path, folder: Path, is_extra: bool = False) -> Arrays:
        """Return the pictures that a table lists, without the final checks of `load`.

        Args:
            path: The CSV file.
            folder: The folder of the picture paths.
            is_extra: Whether these are the extra pictures of another set.  If they have more than 8 bits,
                dataset.window must be given, so that both sets are scaled equally.
        """
        # roles: the column of image, label, patient, silo (client site) and split; silos: the sites to read, None: all
        table = Table(path, self.roles, self.silos)
        class_names, targets = self._labels(table)
        silo_names, domain = name_indices(table, "silo", self.silos)
        patients = table.cells("patient")
        if self.roles["patient"] is not None:
            check_spelling(patients, f"{path}: the patient")
        samples = np.arange(len(targets))
        if self.negatives is not None:  # for each silo, the ratio of pictures of the first class to all others
            require(
                targets.ndim == 1,
                "dataset.negatives needs one label for each picture, but these are multi-label data: set "
                "dataset.negatives to null",
            )
            samples = sample_negatives(targets, domain, self.negatives, silo_names, self.seed)
        images = table.cells("image")
        names = [images[i] for i in samples]
        files = find_pictures(path, folder, names)
        pixels = decode_cached(self.data_dir, str(path), files, self.resize, self.color, self._window, is_extra)
        return Arrays(
            inputs=pixels,
            targets=targets[samples],
            split=table.split()[samples],
            num_classes=len(class_names),
            task="classification" if targets.ndim == 1 else "multilabel",
            class_names=class_names,
            domain=domain[samples],
            domain_names=silo_names,
            mean=half_per_channel(pixels),  # 0.5 each, which gives pixels in [-1, 1]
            std=half_per_channel(pixels),
            # the index of each picture's patient among the sorted patients
            subject=np.unique(patients, return_inverse=True)[1][samples].astype(np.int64),
        )

    def _labels(self, table: "Table") -> tuple[list[str], np.ndarray]:
        """Return the class names in the order of their indices, and the targets of all rows.

        The labels are in one column, as single labels or as lists, or in a column of 0 and 1 for each class.

        Args:
            table: The table of n rows.

        Returns:
            Class names [C], and targets: classes [n] int64, or multi-hot rows [n, C] float32.
        """
        column = table.roles["label"]
        where = str(table.path)
        if isinstance(column, list):
            require(
                self.classes is None and self.label_separator is None,
                f"dataset.columns.label={column} is a list, which names the classes: set dataset.classes and "
                "dataset.label_separator to null",
            )
            return column, join_columns([table.pattern(name) for name in column], column, where)  # pattern: the cells
        if self.label_separator is not None:
            return split_lists(table.columns[str(column)], self.label_separator, self.classes, where)
        if self.classes is None:
            refuse_lists(table.cells("label"), where)
        return name_indices(table, "label", self.classes)


class Table(CsvTable):
    """The CSV file of an image table.  roles: the column or columns of image, label, patient, silo and split.

    Args:
        path: The file.
        roles: The column or columns of image, label, patient, silo and split.
        silos: The natural clients whose rows are used; None: all.
    """

    def __init__(self, path: Path, roles: dict[str, str | list[str] | None], silos: list[str] | None):
        super().__init__(path, "dataset=image_table")
        self.roles = roles
        patterns = [c for column in roles.values() for c in (column if isinstance(column, list) else [column]) if c]
        self.require_columns([name for pattern in patterns for name in FIELD.findall(pattern) or [pattern]], ADVICE)
        lines: dict[str, int] = {}
        for line, name in zip(self.lines, self.cells("image")):
            require(
                name not in lines, f"{path} lists {name} twice, in lines {lines.get(name)} and {line}: remove a line"
            )
            lines[name] = line
        if silos is not None:
            self._select(silos)

    def _select(self, silos: list[str]) -> None:
        """Keep only the rows of the file whose cell in the column of natural clients is one of `silos`.

        Args:
            silos: Names of natural clients, such as hospitals.

        Raises:
            ConfigError: One of the names is in no row.
        """
        silo_of = self.cells("silo")
        absent = sorted(set(silos) - set(silo_of))
        require(
            not absent,
            f"{self.path} has no silo {', '.join(absent)}; it has {listed(sorted(set(silo_of)))}: set dataset.silos to "
            "some of these, or to null for all",
        )
        rows = [i for i, silo in enumerate(silo_of) if silo in silos]
        self.lines = [self.lines[i] for i in rows]
        self.columns = {name: [cells[i] for i in rows] for name, cells in self.columns.items()}

    def cells(self, role: str) -> list[str]:
        """Return the cells of the column that dataset.columns names for a role, [n].

        If dataset.columns has no column for the role, each picture is of another patient, and all are of one natural
        client.

        Args:
            role: image, label, patient, silo (natural client) or split.

        Raises:
            ConfigError: A cell is empty.
        """
        column = self.roles[role]
        if column is None:  # the path of the picture stands for its patient
            return self.cells("image") if role == "patient" else ["all"] * len(self)
        return self.pattern(str(column))  # the column, or a text with several columns in braces

    def pattern(self, pattern: str) -> list[str]:
        """Return the text of each row that a pattern of columns yields, [n].

        Args:
            pattern: The name of a column, or text with names of columns in braces, such as "{patient}_{image}.png".

        Raises:
            ConfigError: A cell is empty.
        """
        names = FIELD.findall(pattern) or [pattern]  # FIELD: a name in braces
        for name in names:
            for line, cell in zip(self.lines, self.columns[name]):
                require(
                    cell != "",
                    f"{self.path}, line {line}: {name} is empty, expected a value: fill the cell or remove the line",
                )
        if names == [pattern]:
            return self.columns[pattern]
        rows = [{name: self.columns[name][i] for name in names} for i in range(len(self))]
        return [FIELD.sub(lambda match, row=row: row[match[1]], pattern) for row in rows]

    def split(self) -> np.ndarray:
        """Return the published part of each row, TRAIN, VAL or TEST; TRAIN for all if no column has the role "split".

        # [n] int8
        """
        if self.roles["split"] is None:
            return np.full(len(self), TRAIN, np.int8)
        return split_codes(self.cells("split"), f"{self.path}: {self.roles['split']}")


def find_pictures(table: Path, folder: Path, names: list[str]) -> list[Path]:
    """Return the file of each picture: at its path in the folder, or else at this path in a folder below.

    Args:
        table: The CSV file, for messages.
        folder: The folder of the paths.
        names: The paths of the pictures in the table.

    Raises:
        ConfigError: A picture does not exist, or exists in two folders.
    """
    absent = {name for name in names if not (folder / name).is_file()}
    matches: dict[str, list[Path]] = {name: [] for name in absent}
    for file in visible_files(folder) if absent else ():
        parts = file.relative_to(folder).parts
        for start in range(len(parts)):  # the path below each of the folders around the file
            name = "/".join(parts[start:])
            if name in absent:
                matches[name].append(file)
    missing = [name for name in names if name in absent and not matches[name]]
    if missing:
        raise ConfigError(
            f"{len(missing):,} of the {len(names):,} pictures that {table} lists are not in {folder} (the first is "
            f"{missing[0]}): set dataset.folder to the folder of the pictures, or copy them there"
        )
    for name, files in matches.items():
        require(
            len(files) == 1,
            f"{table} lists {name}, which exists twice: {', '.join(map(str, files[:2]))}; write its path "
            "below dataset.folder into the table",
        )
    return [matches[name][0] if name in absent else folder / name for name in names]


def name_indices(table: Table, role: str, names: list[str] | None) -> tuple[list[str], np.ndarray]:
    """Return the names of the labels or natural clients, and the index of each row's name.

    Args:
        table: The table.
        role: label or silo (natural client).
        names: The names in order, from the options.  None: those in the table, sorted.

    Returns:
        The names in order, and indices [n] int64.

    Raises:
        ConfigError: A cell is not in `names`, or a name has two spellings.
    """
    cells = table.cells(role)
    check_spelling(names or cells, f"{table.path}: the {role}", are_labels=role == "label" and names is None)
    names = sorted(set(cells)) if names is None else names
    unknown = sorted(set(cells) - set(names))
    if unknown:  # only for labels: rows of unlisted natural clients have been left out before
        raise ConfigError(
            f"{table.path} has the {role} {unknown[0]}, which is not in dataset.classes: {', '.join(names)}; add it to "
            "dataset.classes, or correct the table"
        )
    return names, positions(cells, names)


def sample_negatives(
    targets: np.ndarray, domain: np.ndarray, negatives: list, silos: list[str], seed: int
) -> np.ndarray:
    """Sample pictures of class 0 (negatives) in each natural client, in a given ratio to its other pictures.

    Args:
        targets: Classes [n].
        domain: Natural clients [n].
        negatives: The ratio for each natural client; None for one that keeps all pictures.
        silos: The names of the natural clients ("silos").
        seed: Seed of the sampling.

    Returns:
        The sorted indices of the sampled pictures and of all pictures of other classes.

    Raises:
        ConfigError: There are too few pictures of class 0.
    """
    require(
        len(negatives) == len(silos),
        f"dataset.negatives has {len(negatives)} entries for the {len(silos)} silos {', '.join(silos)}: give one "
        "entry for each silo",
    )
    rng = np.random.RandomState(seed)
    samples = [np.flatnonzero(targets != 0)]
    for i, (ratio, silo) in enumerate(zip(negatives, silos)):
        zeros = np.flatnonzero((domain == i) & (targets == 0))
        if ratio is not None:
            count = round(ratio * int(((domain == i) & (targets != 0)).sum()))
            require(
                count <= len(zeros),
                f"dataset.negatives asks for {count:,} pictures of the first class in the silo {silo}, which has "
                f"{len(zeros):,}: lower its entry, or set it to null for all pictures",
            )
            zeros = rng.permutation(zeros)[:count]
        samples.append(zeros)
    return np.sort(np.concatenate(samples))
