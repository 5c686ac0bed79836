"""An npz file of the user, and the reader of two layouts of array files.

MedMNIST layout: ``{train,val,test}_images``, ``{train,val,test}_labels`` (val and test are optional), and
``{train,val,test}_client`` if samples belong to natural clients.  Flat layout: ``X``, ``y``, and optionally
``client`` [n] (any numbers or names) and ``split`` [n] (0, 1, 2 or train, val, test).  Either may have ``classes``
[C], the names.

Integers of 3 or 4 dimensions are images ([n, H, W], [n, H, W, C] or [n, C, H, W]).  They are scaled to 8 bits by
their range or by ``window``, and normalized to (x / 255 - 0.5) / 0.5.  All other inputs are not scaled: they become
float32 [n, ...], with the channels of [n, H, W, C] first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fedbench.core.options import LARGEST, ConfigError, Count, error_prefix, require
from fedbench.data._depth import Range, Window, check_window, common_window, to_eight_bits
from fedbench.data._files import cached, fingerprint, log, read_npz
from fedbench.data._foreign import refuse_foreign
from fedbench.data._images import CHANNELS, channel_axis, channels_first, fill, half_per_channel, resize
from fedbench.data._names import check_spelling
from fedbench.data.base import PARTS, TEST, TRAIN, VAL, Arrays
from fedbench.data.tables._table import warn_of_row_numbers

NO_CLASS = 255  # label of mask pixels without a class
# Dimensions of the labels that each dataset.task allows, and the task that "auto" infers from the dimensions.
DIMENSIONS = {"classification": (1,), "multilabel": (2,), "segmentation": (3,), "regression": (1, 2), "auto": (1, 2, 3)}
KINDS = {1: "classification", 2: "multilabel", 3: "segmentation"}


@dataclass
class Npz:
    """A data set of the user in an npz file.

    Args:
        data_dir: Folder of the cache.
        path: The file.
        task: auto infers it from the labels: [n] classes, [n, C] multi-label, [n, H, W] masks.  Rows [n, C] with one 1
            each are classes.  regression, with targets [n] or [n, R], is never inferred.
        resize: Side in pixels of the resized images.  None: images are not resized.
        window: [low, high], the values that become black and white in images of more than 8 bits.  None: integers are
            scaled by the range of all images, and floats are not scaled.
    """

    data_dir: str
    path: str | None = None
    task: Literal["auto", "classification", "multilabel", "segmentation", "regression"] = "auto"
    resize: Count | None = None
    window: Sequence[float] | None = None

    def __post_init__(self) -> None:
        self._window = check_window(self.window)

    def load(self) -> Arrays:
        """Return the data set in the file, with resized images if ``resize`` is set.

        Raises:
            ConfigError: The file does not exist, is damaged, has another layout, or contains a pickle.
        """
        require(
            self.path is not None,
            "dataset=npz needs a file, but dataset.path is null: set dataset.path to your .npz file",
        )
        path = Path(str(self.path))
        refuse_foreign(path, "dataset=npz")  # such as a Parquet file, which the error names
        # _window: the option window, pixel values that become black and white in images of more than 8 bits, or None
        arrays = check_labels_occur(from_layout(read_npz(path), str(path), self.task, self._window), str(path))
        if isinstance(arrays.inputs, np.ndarray) and arrays.inputs.ndim == 2:  # a table, whose rows may be numbered
            warn_of_row_numbers(arrays.inputs[:, 0], f"{path}: the first column of X", "remove it from X")
        return resized(arrays, self.resize, self.data_dir, path, self._window)


def check_labels_occur(arrays: Arrays, name: str) -> Arrays:
    """Return the arrays unchanged, and log a warning if some classes from 0 to the largest label do not occur.

    Only classes without names are checked.

    Args:
        arrays: The arrays.
        name: The file, for messages.

    Raises:
        ConfigError: Class 0 does not occur, or more than half of the classes do not.
    """
    if arrays.task not in ("classification", "segmentation") or arrays.class_names is not None:
        return arrays
    labels, classes = np.unique(arrays.targets), arrays.num_classes
    labels = labels[(labels >= 0) & (labels < classes)]  # without the label of pixels that have no class
    shown = ", ".join(map(str, labels[:4])) + (", ..." if len(labels) > 4 else "")
    advice = "number the classes from 0, or name all of them, from 0 on, in an array `classes`"
    require(
        2 * len(labels) >= classes,
        f"{name}: the largest label is {labels[-1]:,}, which implies {classes:,} classes, and only {len(labels):,} "
        f"of them occur ({shown}): {advice}",
    )
    require(labels[0] == 0, f"{name}: labels start at {labels[0]} ({shown}), and class 0 does not occur: {advice}")
    if len(labels) < classes:
        log.warning(
            "%s: only %s of %s classes occur (%s): if this is not intended, %s",
            name,
            len(labels),
            classes,
            shown,
            advice,
        )
    return arrays


def resized(arrays: Arrays, size: int | None, data_dir: str, path: Path, window: Window | None = None) -> Arrays:
    """Return the arrays with uint8 images resized to size x size, from the cache if the file has not changed.

    Args:
        arrays: The arrays of the file, whose inputs are replaced.
        size: Height and width of the result, in pixels.  None: do not resize.
        data_dir: Folder of the cache.
        path: The file that the arrays were read from.
        window: The option dataset.window by which the images were scaled, which the cache depends on.

    Returns:
        The same object.  Other inputs than uint8 images are not resized.
    """
    images = arrays.images  # the inputs [n, C, H, W], or None
    if size is None or images is None or images.dtype != np.uint8 or images.shape[2:] == (size, size):
        return arrays
    require(
        arrays.task != "segmentation",
        f"dataset.resize={size} would resize the images, but not their segmentation masks: set it to null, and resize "
        "both in the file",
    )
    key = (fingerprint(path), size, window)
    arrays.inputs = cached(data_dir, path.stem, key, lambda: {"images": resize(images, size)})["images"]
    return arrays


def from_layout(file: dict[str, np.ndarray], name: str, task: str = "auto", window: Window | None = None) -> Arrays:
    """Return the checked data set of the arrays in a file.

    Args:
        file: The arrays by their names: train_images, train_labels, ... (MedMNIST layout), or X, y, ... (flat layout).
        name: The file, for messages.
        task: The option dataset.task: the kind of labels, such as "classification".  "auto": inferred from their shape.
        window: The option dataset.window: values (low, high) that become black and white in images of more than 8 bits.

    Raises:
        ConfigError: An array is absent, or does not fit the others or the options.
    """
    flat = _join_parts(file, name) if "train_images" in file else file
    missing = [key for key in ("X", "y") if key not in flat]
    require(
        not missing,
        f"{name} lacks {' and '.join(missing)}; it has {', '.join(sorted(file)[:8]) or 'no arrays'}: name the arrays X "
        "(inputs) and y (labels), or train_images and train_labels (and val_, test_)",
    )
    require_equal_lengths(flat, name)
    return from_columns(flat, _as_inputs(flat["X"], name, window), name, task)


def from_columns(flat: dict[str, np.ndarray], inputs: np.ndarray, name: str, task: str = "auto") -> Arrays:
    """Return the checked data set of inputs and the other arrays in a file.

    Args:
        flat: y, and optionally client, split and classes, by name.
        inputs: The inputs, [n, ...].
        name: The file, for messages.
        task: The option dataset.task: the kind of labels, such as "classification".  "auto": inferred from their shape.
    """
    labels = flat["y"]
    num_columns = 0  # of one-hot labels
    if task in ("auto", "classification") and _is_one_hot(labels):
        num_columns = labels.shape[1]
        log.info("%s: each row of labels has a single 1, so it is one of %s classes", name, num_columns)
        labels = labels.argmax(1)
    y, class_names = _as_targets(labels, name, task)  # names: None unless the labels are text
    kind = KINDS[y.ndim] if task == "auto" else task  # labels [n]: classes, [n, C]: multi-label, [n, H, W]: masks
    if "classes" in flat:
        class_names = [str(c) for c in _as_text(flat["classes"])]
    at_least = max(len(class_names or ()), num_columns)  # classes, even if the last ones do not occur
    if y.dtype == np.float32:
        num_classes = 1 if y.ndim == 1 else y.shape[1]
    else:
        highest = _highest_class(y, at_least, name) if kind == "segmentation" else int(y.max(initial=0))
        num_classes = max(at_least, highest + 1)
    domain = client_names = None
    if "client" in flat:
        names, indices = np.unique(flat["client"], return_inverse=True)
        domain = indices.reshape(-1).astype(np.int64)  # [n], also if the array client is [n, 1]
        client_names = [str(c) for c in names]
    check_spelling(class_names or (), f"{name}: classes")
    check_spelling(client_names or (), f"{name}: client")
    split = _as_split(flat.get("split"), len(y), name)
    scale = half_per_channel(inputs) if inputs.dtype == np.uint8 else None  # 0.5, which gives pixels in [-1, 1]
    with error_prefix(name):
        return Arrays(
            inputs=inputs,
            targets=y,
            split=split,
            num_classes=num_classes,
            task=kind,
            class_names=class_names,
            domain=domain,
            domain_names=client_names,
            mean=scale,
            std=scale,
        ).check()


def _is_one_hot(y: np.ndarray) -> bool:
    """Return whether labels are one-hot rows [n, C], C > 1: each row has a single 1 and is 0 elsewhere."""
    if y.ndim != 2 or y.shape[1] < 2 or y.dtype.kind not in "fiub":
        return False
    return bool(np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all())


def _highest_class(y: np.ndarray, num_named: int, name: str) -> int:
    """Return the highest class in masks.

    Args:
        y: Masks, [n, H, W] int64.
        num_named: The number of classes with names.  Unless it is more than 255, the label 255 means no class.
        name: The file, for messages.
    """
    if int(y.max(initial=0)) != NO_CLASS or num_named > NO_CLASS:
        return int(y.max(initial=0))
    labels = y[y != NO_CLASS]
    require(
        bool(labels.any()),
        f"{name}: masks contain only 0 and 255, and 255 is the label of pixels without a class: divide them by 255 "
        "to have the classes 0 and 1",
    )
    log.info("%s: pixels with the label 255 have no class and are excluded from losses and scores", name)
    return int(labels.max())


def _join_parts(file: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Join the arrays of the training, validation and test part in this order: train_images, ... become X, and so on.

    Args:
        file: The arrays by their names in the MedMNIST layout, such as train_images and train_labels.
        name: The file, for messages.

    Returns:
        X, y, split, and client and classes if the file has them, by name (flat layout).

    Raises:
        ConfigError: The arrays of a part are incomplete, or do not fit those of the others.
    """
    columns: dict[str, list[np.ndarray]] = {"X": [], "y": [], "split": [], "client": []}
    for part, code in PARTS.items():  # train, val and test, and their codes in split
        images, labels = file.get(f"{part}_images"), file.get(f"{part}_labels")
        if images is None and labels is None:
            continue
        if images is None or labels is None:
            raise ConfigError(f"{name} has only one of {part}_images and {part}_labels: add or remove one of them")
        require_equal_lengths({f"{part}_images": images, f"{part}_labels": labels}, name)
        columns["X"].append(images)
        columns["y"].append(labels)
        columns["split"].append(np.full(len(images), code, np.int8))
        if f"{part}_client" in file:
            columns["client"].append(file[f"{part}_client"])
    try:
        flat = {key: np.concatenate(values) for key, values in columns.items() if values}
    except ValueError as error:
        raise ConfigError(
            f"{name}: the arrays of train, val and test have samples of different shapes ({error}): give all samples "
            "one shape"
        ) from error
    return flat | ({"classes": file["classes"]} if "classes" in file else {})


def require_equal_lengths(arrays: dict[str, np.ndarray], name: str) -> None:
    """Raise ConfigError if arrays, apart from the class names, have different lengths.

    Args:
        arrays: The arrays by their names.
        name: The file, for the message.
    """
    lengths = {key: len(np.atleast_1d(array)) for key, array in arrays.items() if key != "classes"}
    require(
        len(set(lengths.values())) == 1,
        f"{name}: all arrays must have the same length, but "
        + ", ".join(f"{key} has {n:,} rows" for key, n in lengths.items())
        + ": write one row for each sample",
    )


def _as_inputs(x: np.ndarray, name: str, window: Window | None) -> np.ndarray:
    """Return inputs as uint8 images [n, C, H, W], or as float32 [n, ...] if they are not images.

    Args:
        x: The inputs in the file, [n, ...].
        name: The file, for messages.
        window: The option dataset.window: values (low, high) that become black and white in images of more than 8 bits.
            If given, the inputs are images.
    """
    require(x.dtype.kind in "fiub", f"{name}: inputs have dtype {x.dtype}, expected numbers: convert them")
    if window is None and not _are_images(x):
        x = channels_first(x, f"{name}: inputs") if x.ndim == 4 else x
        return np.ascontiguousarray(x, np.float32)
    images = channels_first(x, f"{name}: images")
    require(
        images.shape[1] in CHANNELS,
        f"{name}: images have shape {x.shape}, but axis 1 or the last one must have 1, 3 or 4 channels: write other "
        "inputs as float32",
    )
    if x.dtype == np.uint8:
        if window is not None:
            raise ConfigError(
                f"dataset.window={list(window)} is for images of more than 8 bits, but those in {name} have 8 bits: "
                "set dataset.window to null"
            )
        return np.ascontiguousarray(images)
    used = window or common_window([Range.of(image, name) for image in images], name)
    return fill((to_eight_bits(image, used) for image in images), len(images), images.shape[1:])


def _are_images(x: np.ndarray) -> bool:
    """Return whether inputs are images: integers of 3 or 4 dimensions.

    Signed integers of 3 dimensions must be square, and those of 4 dimensions must have 1, 3 or 4 channels.  Others are
    signals, which are not scaled.
    """
    if x.dtype.kind not in "iu" or x.ndim not in (3, 4) or not x.size:
        return False
    if x.dtype.kind == "u":
        return True
    return x.shape[1] == x.shape[2] if x.ndim == 3 else x.shape[channel_axis(x.shape, "inputs")] in CHANNELS


def _as_text(names: np.ndarray) -> np.ndarray:
    """Return an array of names as text: bytes are decoded as UTF-8 (invalid ones become U+FFFD), others unchanged."""
    return np.char.decode(names, "utf-8", "replace") if names.dtype.kind == "S" else names


def _as_targets(y: np.ndarray, name: str, task: str) -> tuple[np.ndarray, list[str] | None]:
    """Return targets and the names of their classes.

    Args:
        y: The labels in the file, [n, ...].
        name: The file, for messages.
        task: The option dataset.task: the kind of labels, such as "classification".  "auto": inferred from their shape.

    Returns:
        Labels [n] int64, multi-hot rows [n, C] float32, masks [n, H, W] int64 or numbers [n, ...] float32.  And the
        class names in the order of their indices, None unless the labels in the file are text.
    """
    if y.ndim == 2 and y.shape[1] == 1 and task != "multilabel":  # MedMNIST stores labels as [n, 1]
        y = y[:, 0]
    require(
        y.ndim in DIMENSIONS[task],  # the numbers of dimensions that the labels of a task may have
        f"{name}: labels of shape {y.shape} do not fit dataset.task={task} (classification [n], multilabel "
        "[n, C], segmentation [n, H, W], regression [n] or [n, R]): set the task of this shape, or reshape the labels",
    )
    if y.dtype.kind in "US" and task != "regression":
        names, indices = np.unique(_as_text(y), return_inverse=True)
        return indices.astype(np.int64), [str(c) for c in names]
    expected = "numbers" if task == "regression" else "integers or names"
    require(y.dtype.kind in "fiub", f"{name}: labels have dtype {y.dtype}, expected {expected}: convert them")
    if task == "regression":
        return y.astype(np.float32), None
    if y.ndim == 2:
        require(
            bool(np.isin(y, (0, 1)).all()),
            f"{name}: multi-label rows must contain only 0 and 1, but the labels are from {y.min()} to {y.max()}: "
            "correct them, or set dataset.task=regression if they are numbers to predict",
        )
        return y.astype(np.float32), None
    require(
        bool((np.abs(y) < LARGEST).all() and (y == np.floor(y)).all()),  # LARGEST: the largest allowed integer
        f"{name}: labels must be integers, but some have fractions or are too large: correct them, or set "
        "dataset.task=regression if they are numbers to predict",
    )
    return y.astype(np.int64), None


def _as_split(split: np.ndarray | None, n: int, name: str) -> np.ndarray:
    """Return the published part of each sample: 0 train, 1 val, 2 test; all 0 if the file has none.  # [n] int8

    Args:
        split: The array ``split`` of the file, numbers or names of parts.  None: the file has none.
        n: The number of samples.
        name: The file, for messages.
    """
    if split is None:
        return np.zeros(n, np.int8)
    codes = split
    if split.dtype.kind in "US":
        codes = np.array([PARTS.get(str(part), -1) for part in split], np.int8)
    wrong = split[~np.isin(codes, (TRAIN, VAL, TEST))]
    if len(wrong):
        raise ConfigError(
            f"{name}: the array split contains {wrong[0]}, but may contain only 0 (train), 1 (val) and 2 (test), or "
            "these names: replace all other values"
        )
    return codes.astype(np.int8)
