"""Arrays larger than memory: a folder of .npy files whose inputs stay on disk.

X.npy has images [n, channels, height, width] uint8, normalized to (x / 255 - 0.5) / 0.5, or unscaled inputs [n, ...]
float32.  y.npy, and optionally client.npy, split.npy and classes.npy, are as in the flat layout of `npz.py`.  They are
read into memory.  ``numpy.lib.format.open_memmap`` writes an X.npy in blocks.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fedbench.core.options import ConfigError, require
from fedbench.data._files import DAMAGE
from fedbench.data._foreign import refuse_foreign
from fedbench.data._images import CHANNELS, channel_axis
from fedbench.data.arrays.npz import check_labels_occur, from_columns, require_equal_lengths
from fedbench.data.base import Arrays

OPTIONAL = ("client", "split", "classes")


@dataclass
class Npy:
    """Arrays from a folder of .npy files.

    Args:
        path: The folder.
        task: auto infers it from the labels: [n] classes, [n, C] multi-label, [n, H, W] masks.
    """

    path: str | None = None
    task: Literal["auto", "classification", "multilabel", "segmentation"] = "auto"

    def load(self) -> Arrays:
        """Return the data set: X.npy mapped from disk, and the other files read into memory.

        The files are inputs X and labels y, and optionally split, client and classes.

        Raises:
            ConfigError: A file does not exist, is damaged, or has another layout.
        """
        require(
            self.path is not None,
            "dataset=npy needs a folder, but dataset.path is null: set dataset.path to one with X.npy and y.npy",
        )
        folder = Path(str(self.path))
        refuse_foreign(folder, "dataset=npy")  # such as a folder of Parquet files, which the error names
        inputs = map_npy(folder / "X.npy")
        columns = {"y": np.array(map_npy(folder / "y.npy"))}
        for name in OPTIONAL:  # split, client and classes
            if (folder / f"{name}.npy").exists():
                columns[name] = np.array(map_npy(folder / f"{name}.npy"))
        require_equal_lengths({"X": inputs, **columns}, str(folder))
        self._check_inputs(inputs, folder / "X.npy")
        return check_labels_occur(from_columns(columns, inputs, str(folder), self.task), str(folder))

    def _check_inputs(self, inputs: np.ndarray, path: Path) -> None:
        """Check the array in X.npy: float32, or uint8 images [n, channels, height, width] with 1 to 4 channels.

        Args:
            inputs: The array, mapped from disk.
            path: The file, for messages.

        Raises:
            ConfigError: It has another dtype or shape, has its channels last, or is not in C order.
        """
        fits = inputs.dtype == np.float32 or (inputs.dtype == np.uint8 and inputs.ndim == 4)
        is_channels_last = inputs.ndim == 4 and channel_axis(inputs.shape, str(path)) == 3
        require(
            fits and inputs.flags.c_contiguous and not is_channels_last,
            f"{path} is {inputs.dtype} {inputs.shape}{', with its channels last' if is_channels_last else ''}: "
            "write uint8 images [n, channels, height, width] or float32 inputs [n, ...], in C order",
        )
        channels = inputs.shape[1] if inputs.dtype == np.uint8 else 1
        require(
            channels <= max(CHANNELS),
            f"{path}: images of shape {inputs.shape[1:]} have {channels} channels, expected 1 to 4: write other inputs "
            "as float32",
        )


def map_npy(path: Path) -> np.ndarray:
    """Return the read-only array of a .npy file, whose values stay on disk until they are used.

    Args:
        path: The file.

    Raises:
        ConfigError: The file does not exist or is damaged.
    """
    require(path.is_file(), f"{path} does not exist: set dataset.path to a folder with X.npy and y.npy")
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)  # refuses a header that claims more than the file has
    except DAMAGE as error:
        raise ConfigError(f"{path} is damaged or not a .npy file of numbers: write it again by numpy.save") from error
