"""A user's own npz file, and the reader of the two layouts that every array file here is in.

MedMNIST layout: ``{train,val,test}_images``, ``{train,val,test}_labels`` (val and test may be absent), and
``{train,val,test}_client`` if samples belong to natural clients.  Flat layout: ``X``, ``y``, and if wanted
``client`` [n] (any numbers or names) and ``split`` [n] (0, 1, 2 or train, val, test).  Both: ``classes``
[C] names, if wanted.

uint8 arrays of 3 or 4 dimensions are images ([n, H, W], [n, H, W, C] or [n, C, H, W]), scaled to
(x / 255 - 0.5) / 0.5; everything else is taken as float32 [n, ...] as it is.
"""

from pathlib import Path
from typing import Literal

import numpy as np

from fedbench.core.options import ConfigError, Count, require
from fedbench.data._files import cached, fingerprint, read_npz
from fedbench.data._images import channels_first, half, resize
from fedbench.data._names import check_spelling
from fedbench.data.base import TEST, TRAIN, VAL, Arrays

PARTS = {"train": TRAIN, "val": VAL, "test": TEST}


class Npz:
    """path: the file.  task: auto reads it off the labels: [n] classes, [n, C] multi-label, [n, H, W] masks;
    regression, numbers [n] or [n, R] to be predicted, must be named.

    resize: side in pixels to bring uint8 images to.
    """

    def __init__(
        self,
        data_dir: str,
        path: str | None = None,
        task: Literal["auto", "classification", "multilabel", "segmentation", "regression"] = "auto",
        resize: Count | None = None,
    ):
        self.data_dir, self.path, self.task, self.resize = data_dir, path, task, resize

    def load(self) -> Arrays:
        """Read the file; ConfigError where it is missing, damaged, of another layout, or carries a pickle."""
        require(self.path is not None, "dataset=npz needs dataset.path=<your file>.npz")
        return most_occur(load_file(Path(str(self.path)), self.data_dir, self.resize, self.task), str(self.path))


def load_file(path: Path, data_dir: str, size: int | None, task: str = "auto") -> Arrays:
    """A file of either layout as checked Arrays, uint8 images resized (and then cached)."""
    return resized(from_layout(read_npz(path), str(path), task), size, data_dir, path)


def most_occur(arrays: Arrays, name: str) -> Arrays:
    """The arrays; ConfigError where labels without names leave out most of the classes that they span."""
    if arrays.task == "multilabel" or arrays.class_names is not None:
        return arrays
    labels = np.unique(arrays.targets)
    shown = ", ".join(map(str, [*labels[:4], *(["..."] if len(labels) > 4 else [])]))
    require(
        2 * len(labels) >= arrays.num_classes,
        f"{name}: labels go up to {labels[-1]:,}, which makes {arrays.num_classes:,} classes, and only {len(labels):,} "
        f"of them occur ({shown}): number the classes from 0 on, or name all of them in an array `classes`",
    )
    return arrays


def resized(arrays: Arrays, size: int | None, data_dir: str, path: Path) -> Arrays:
    """Arrays of the file ``path`` with uint8 images brought to size x size, cached unless they have it already."""
    images = arrays.inputs
    if size is None or isinstance(images, dict) or images.dtype != np.uint8 or images.shape[2:] == (size, size):
        return arrays
    require(arrays.task != "segmentation", "dataset.resize does not resize segmentation masks")
    key = (fingerprint(path), size)
    arrays.inputs = cached(data_dir, path.stem, key, lambda: {"images": resize(images, size)})["images"]
    return arrays


def from_layout(file: dict[str, np.ndarray], name: str, task: str = "auto") -> Arrays:
    """Arrays from the contents of an npz of the MedMNIST or the flat layout; name is for the sentences."""
    flat = _join_parts(file, name) if "train_images" in file else file
    missing = [key for key in ("X", "y") if key not in flat]
    require(
        not missing,
        f"{name} lacks {' and '.join(missing)}: expected train_images and train_labels (and val_, test_), or "
        f"X and y; it has {', '.join(sorted(file)[:8]) or 'no arrays'}",
    )
    require_rows(flat, name)
    return from_columns(flat, _as_inputs(flat["X"], name), name, task)


def from_columns(flat: dict[str, np.ndarray], inputs: np.ndarray, name: str, task: str = "auto") -> Arrays:
    """Arrays from inputs and the other arrays of the flat layout."""
    y, names = _as_targets(flat["y"], name, task)
    kind = {1: "classification", 2: "multilabel", 3: "segmentation"}[y.ndim] if task == "auto" else task
    names = [str(c) for c in flat["classes"]] if "classes" in flat else names
    classes = _width(y) if y.dtype == np.float32 else max(len(names or ()), int(y.max(initial=0)) + 1)
    domain, clients = _as_domain(flat.get("client"))
    check_spelling(names or (), f"{name}: classes")
    check_spelling(clients or (), f"{name}: client")
    scale = half(inputs) if inputs.dtype == np.uint8 else None
    split = _as_split(flat.get("split"), len(y), name)
    try:
        return Arrays(inputs, y, split, classes, kind, names, domain, clients, scale, scale).check()
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _join_parts(file: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """The MedMNIST layout as the flat one: train, then val, then test."""
    columns: dict[str, list[np.ndarray]] = {"X": [], "y": [], "split": [], "client": []}
    for part, code in PARTS.items():
        images, labels = file.get(f"{part}_images"), file.get(f"{part}_labels")
        if images is None and labels is None:
            continue
        if images is None or labels is None:
            raise ConfigError(f"{name} has only one of {part}_images and {part}_labels")
        require(
            images.ndim > 0 and labels.ndim > 0 and len(images) == len(labels),
            f"{name}: {part}_images has {len(np.atleast_1d(images)):,} rows but {part}_labels has "
            f"{len(np.atleast_1d(labels)):,}",
        )
        columns["X"].append(images)
        columns["y"].append(labels)
        columns["split"].append(np.full(len(images), code, np.int8))
        if f"{part}_client" in file:
            columns["client"].append(file[f"{part}_client"])
    try:
        flat = {key: np.concatenate(values) for key, values in columns.items() if values}
    except ValueError as error:
        raise ConfigError(f"{name}: the train, val and test parts differ in shape ({error})") from error
    return {**flat, **({"classes": file["classes"]} if "classes" in file else {})}


def require_rows(flat: dict[str, np.ndarray], name: str) -> None:
    """Refuse arrays of the flat layout that have different numbers of rows."""
    rows = {key: len(np.atleast_1d(flat[key])) for key in ("X", "y", "client", "split") if key in flat}
    require(
        len(set(rows.values())) == 1,
        f"{name}: lengths differ: " + ", ".join(f"{key} has {n:,} rows" for key, n in rows.items()),
    )


def _as_inputs(x: np.ndarray, name: str) -> np.ndarray:
    require(x.dtype.kind in "fiub", f"{name}: inputs have dtype {x.dtype}, expected numbers")
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        return channels_first(x, f"{name}: images")
    return x.astype(np.float32)


def _width(y: np.ndarray) -> int:
    """How many numbers a target holds."""
    return 1 if y.ndim == 1 else y.shape[1]


def _as_targets(y: np.ndarray, name: str, task: str) -> tuple[np.ndarray, list[str] | None]:
    """Labels [n] int64, multi-hot rows [n, C] float32, masks [n, H, W] int64 or numbers [n, ...] float32; class names y
    holds."""
    if y.ndim == 2 and y.shape[1] == 1 and task != "multilabel":
        y = y[:, 0]
    dims = {"classification": (1,), "multilabel": (2,), "segmentation": (3,), "regression": (1, 2), "auto": (1, 2, 3)}
    require(
        y.ndim in dims[task],
        f"{name}: labels of shape {y.shape} do not fit dataset.task={task} (classification [n], multilabel "
        "[n, C], segmentation [n, H, W], regression [n] or [n, R])",
    )
    if task == "regression":
        require(y.dtype.kind in "fiub", f"{name}: labels have dtype {y.dtype}, expected numbers")
        return y.astype(np.float32), None
    if y.dtype.kind in "US":
        names, y = np.unique(y, return_inverse=True)
        return y.astype(np.int64), [str(c) for c in names]
    require(y.dtype.kind in "fiub", f"{name}: labels have dtype {y.dtype}, expected integers or names")
    if y.ndim == 2:
        require(bool(np.isin(y, (0, 1)).all()), f"{name}: multi-label rows must hold 0 and 1 only")
        return y.astype(np.float32), None
    require(
        bool(np.isfinite(y).all() and (y == np.floor(y)).all()),
        f"{name}: labels must be whole numbers, "
        "or dataset.task=regression says that they are to be predicted as numbers",
    )
    return y.astype(np.int64), None


def _as_domain(client: np.ndarray | None) -> tuple[np.ndarray | None, list[str] | None]:
    """Natural client of each sample as 0..D-1, and its names, in sorted order."""
    if client is None:
        return None, None
    names, domain = np.unique(client, return_inverse=True)
    return domain.reshape(-1).astype(np.int64), [str(c) for c in names]


def _as_split(split: np.ndarray | None, n: int, name: str) -> np.ndarray:
    if split is None:
        return np.zeros(n, np.int8)
    if split.dtype.kind in "US":
        codes = np.array([PARTS.get(str(s), -1) for s in split], np.int8)
        require(bool((codes >= 0).all()), f"{name}: split must name train, val or test")
        return codes
    require(
        bool(np.isin(split, (TRAIN, VAL, TEST)).all()),
        f"{name}: split must be 0 (train), 1 (val) or 2 (test)",
    )
    return split.astype(np.int8)
