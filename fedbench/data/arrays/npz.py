"""An npz file of the user, and the reader of the two layouts of array files.

MedMNIST layout: ``{train,val,test}_images``, ``{train,val,test}_labels`` (val and test may be absent), and
``{train,val,test}_client`` if samples belong to natural clients.  Flat layout: ``X``, ``y``, and optionally
``client`` [n] (any numbers or names) and ``split`` [n] (0, 1, 2 or train, val, test).  Both: optionally ``classes``
[C] names.

Integers of 3 or 4 dimensions are images ([n, H, W], [n, H, W, C] or [n, C, H, W]).  They are brought to 8 bits by
their range or by ``window`` and scaled to (x / 255 - 0.5) / 0.5.  All other inputs are taken unscaled as float32
[n, ...], with the channels of [n, H, W, C] put first.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from fedbench.core.options import LARGEST, ConfigError, Count, require
from fedbench.data._depth import Span, Window, check_window, common_window, to_eight_bits
from fedbench.data._files import cached, fingerprint, log, read_npz
from fedbench.data._foreign import refuse_foreign
from fedbench.data._images import CHANNELS, channel_axis, channels_first, fill, half, resize
from fedbench.data._names import check_spelling
from fedbench.data._published import Published
from fedbench.data.base import PARTS, TEST, TRAIN, VAL, Arrays
from fedbench.data.tables._table import warn_of_row_numbers

NO_CLASS = 255  # label of mask pixels without a class


class Npz:
    """Arrays from an npz file.

    Args:
        path: The file.
        task: auto detects it from the labels: [n] classes, [n, C] multi-label, [n, H, W] masks.  Rows [n, C] with one 1
            each are classes.  regression, with numbers [n] or [n, R] to be predicted, must be set.
        resize: Side in pixels of the resized images.
        window: [low, high], the values that become black and white in images of more than 8 bits.  None: the range of
            all images; floats are not scaled.
    """

    def __init__(
        self,
        data_dir: str,
        path: str | None = None,
        task: Literal["auto", "classification", "multilabel", "segmentation", "regression"] = "auto",
        resize: Count | None = None,
        window: Sequence[float] | None = None,
    ):
        self.data_dir, self.path, self.task, self.resize = data_dir, path, task, resize
        self.window = check_window(window)

    def load(self) -> Arrays:
        """Read the file; ConfigError where it is missing, damaged, of another layout, or carries a pickle."""
        require(self.path is not None, "dataset=npz needs dataset.path=<your file>.npz")
        path = Path(str(self.path))
        refuse_foreign(path, "dataset=npz")
        arrays = most_occur(from_layout(read_npz(path), str(path), self.task, self.window), str(path))
        if isinstance(arrays.inputs, np.ndarray) and arrays.inputs.ndim == 2:
            warn_of_row_numbers(arrays.inputs[:, 0], f"{path}: the first column of X", "leave it out of X")
        return resized(arrays, self.resize, self.data_dir, path, self.window)


def load_known(path: Path, data_dir: str, size: int | None, known: Published, task: str = "classification") -> Arrays:
    """Read a known set from a file of either layout, checked, with images resized (and then cached)."""
    return resized(known.check(from_layout(read_npz(path), str(path), task), str(path)), size, data_dir, path)


def most_occur(arrays: Arrays, name: str) -> Arrays:
    """Return the arrays, with a warning if labels without names skip some classes of their range.

    Raises:
        ConfigError: Labels without names do not start at 0, or skip most classes of their range.
    """
    if arrays.task not in ("classification", "segmentation") or arrays.class_names is not None:
        return arrays
    labels, classes = np.unique(arrays.targets), arrays.num_classes
    labels = labels[(labels >= 0) & (labels < classes)]
    shown = ", ".join(map(str, [*labels[:4], *(["..."] if len(labels) > 4 else [])]))
    advice = "number the classes from 0 on, or name all of them, from 0 on, in an array `classes`"
    require(
        2 * len(labels) >= classes,
        f"{name}: labels go up to {labels[-1]:,}, which makes {classes:,} classes, and only {len(labels):,} "
        f"of them occur ({shown}): {advice}",
    )
    require(labels[0] == 0, f"{name}: labels start at {labels[0]} ({shown}), and class 0 never occurs: {advice}")
    if len(labels) < classes:
        log.warning("%s: of %s classes only %s occur (%s)", name, classes, len(labels), shown)
    return arrays


def resized(arrays: Arrays, size: int | None, data_dir: str, path: Path, window: Window | None = None) -> Arrays:
    """Arrays of the file ``path`` with uint8 images brought to size x size, cached unless they have it already."""
    images = arrays.images
    if size is None or images is None or images.dtype != np.uint8 or images.shape[2:] == (size, size):
        return arrays
    require(arrays.task != "segmentation", "dataset.resize does not resize segmentation masks")
    key = (fingerprint(path), size, window)
    arrays.inputs = cached(data_dir, path.stem, key, lambda: {"images": resize(images, size)})["images"]
    return arrays


def from_layout(file: dict[str, np.ndarray], name: str, task: str = "auto", window: Window | None = None) -> Arrays:
    """Arrays from the contents of an npz of the MedMNIST or the flat layout; name is for the sentences."""
    flat = _join_parts(file, name) if "train_images" in file else file
    missing = [key for key in ("X", "y") if key not in flat]
    require(
        not missing,
        f"{name} lacks {' and '.join(missing)}: expected train_images and train_labels (and val_, test_), or "
        f"X and y; it has {', '.join(sorted(file)[:8]) or 'no arrays'}",
    )
    require_rows(flat, name)
    return from_columns(flat, _as_inputs(flat["X"], name, window), name, task)


def from_columns(flat: dict[str, np.ndarray], inputs: np.ndarray, name: str, task: str = "auto") -> Arrays:
    """Arrays from inputs and the other arrays of the flat layout."""
    one_hot = task in ("auto", "classification") and _is_one_hot(flat["y"])
    if one_hot:
        log.info("%s: each row of labels holds a single 1, so it is one of %s classes", name, flat["y"].shape[1])
    y, names = _as_targets(flat["y"].argmax(1) if one_hot else flat["y"], name, task)
    kind = {1: "classification", 2: "multilabel", 3: "segmentation"}[y.ndim] if task == "auto" else task
    names = [str(c) for c in _as_text(flat["classes"])] if "classes" in flat else names
    least = max(len(names or ()), flat["y"].shape[1] if one_hot else 0)
    if y.dtype == np.float32:
        classes = _width(y)
    else:
        highest = _highest_label(y, least, name) if kind == "segmentation" else int(y.max(initial=0))
        classes = max(least, highest + 1)
    domain, clients = _as_domain(flat.get("client"))
    check_spelling(names or (), f"{name}: classes")
    check_spelling(clients or (), f"{name}: client")
    scale = half(inputs) if inputs.dtype == np.uint8 else None
    split = _as_split(flat.get("split"), len(y), name)
    try:
        return Arrays(inputs, y, split, classes, kind, names, domain, clients, scale, scale).check()
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _is_one_hot(y: np.ndarray) -> bool:
    """Return whether each row of y [n, C], C > 1, holds one 1 and otherwise 0."""
    return (
        y.ndim == 2
        and y.shape[1] > 1
        and y.dtype.kind in "fiub"
        and bool(np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all())
    )


def _highest_label(y: np.ndarray, named: int, name: str) -> int:
    """Return the highest class in masks; 255 means no class unless there are more than 255 classes."""
    if int(y.max(initial=0)) != NO_CLASS or named > NO_CLASS:
        return int(y.max(initial=0))
    inside = y[y != NO_CLASS]
    require(
        bool(inside.any()),
        f"{name}: masks hold 0 and 255 alone, and 255 is the label of pixels of no class: divide them by 255",
    )
    log.info("%s: pixels labelled 255 are of no class: they are in no loss and in no score", name)
    return int(inside.max())


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


def _as_inputs(x: np.ndarray, name: str, window: Window | None) -> np.ndarray:
    require(x.dtype.kind in "fiub", f"{name}: inputs have dtype {x.dtype}, expected numbers")
    if window is None and not _is_pictures(x):
        x = channels_first(x, f"{name}: inputs") if x.ndim == 4 else x
        return np.ascontiguousarray(x, np.float32)
    images = channels_first(x, f"{name}: images")
    require(images.shape[1] in CHANNELS, f"{name}: images has shape {x.shape}: neither end is 1, 3 or 4 channels")
    if x.dtype == np.uint8:
        require(window is None, f"dataset.window is for images of more than 8 bits, and {name} has none: leave it out")
        return np.ascontiguousarray(images)
    used = window or common_window([Span.of(image, name) for image in images], name)
    return fill((to_eight_bits(image, used) for image in images), len(images), images.shape[1:])


def _is_pictures(x: np.ndarray) -> bool:
    """Return whether inputs are scaled as pictures: integers of 3 or 4 dimensions, if signed, square or in color.

    Signed integers of other shapes are signals and are not scaled.
    """
    if x.dtype.kind not in "iu" or x.ndim not in (3, 4) or not x.size:
        return False
    if x.dtype.kind == "u":
        return True
    return x.shape[1] == x.shape[2] if x.ndim == 3 else x.shape[channel_axis(x.shape, "inputs")] in CHANNELS


def _width(y: np.ndarray) -> int:
    """How many numbers a target holds."""
    return 1 if y.ndim == 1 else y.shape[1]


def _as_text(names: np.ndarray) -> np.ndarray:
    """Return names as text, decoded if they are bytes."""
    return np.char.decode(names, "utf-8", "replace") if names.dtype.kind == "S" else names


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
        names, y = np.unique(_as_text(y), return_inverse=True)
        return y.astype(np.int64), [str(c) for c in names]
    require(y.dtype.kind in "fiub", f"{name}: labels have dtype {y.dtype}, expected integers or names")
    if y.ndim == 2:
        require(bool(np.isin(y, (0, 1)).all()), f"{name}: multi-label rows must hold 0 and 1 only")
        return y.astype(np.float32), None
    require(
        bool((np.abs(y) < LARGEST).all() and (y == np.floor(y)).all()),
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
