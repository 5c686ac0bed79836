"""Arrays larger than memory: a folder of .npy files, of which the inputs are read where they lie.

X.npy [n, channels, height, width] uint8 (images, scaled to (x / 255 - 0.5) / 0.5) or [n, ...] float32 (taken as they
are); y.npy, and if wanted client.npy, split.npy and classes.npy, as in the flat layout of an npz (npz.py), which are
read into memory.  ``numpy.lib.format.open_memmap`` writes such an X.npy a part at a time.
"""

from pathlib import Path
from typing import Literal

import numpy as np

from fedbench.core.options import ConfigError, require
from fedbench.data._files import DAMAGE
from fedbench.data._foreign import refuse_foreign
from fedbench.data._images import channel_axis
from fedbench.data.arrays.npz import from_columns, most_occur, require_rows
from fedbench.data.base import Arrays

COLUMNS = ("y", "client", "split", "classes")


class Npy:
    """path: the folder.  task: auto reads it off the labels: [n] classes, [n, C] multi-label, [n, H, W] masks."""

    def __init__(
        self,
        path: str | None = None,
        task: Literal["auto", "classification", "multilabel", "segmentation"] = "auto",
    ):
        self.path, self.task = path, task

    def load(self) -> Arrays:
        """Read the files, but for X.npy; ConfigError where one is missing, damaged, or of another layout."""
        require(self.path is not None, "dataset=npy needs dataset.path=<a folder with X.npy and y.npy>")
        folder = Path(str(self.path))
        refuse_foreign(folder, "dataset=npy")
        inputs = read_npy(folder / "X.npy", mapped=True)
        flat = {"y": read_npy(folder / "y.npy")}
        flat |= {c: read_npy(folder / f"{c}.npy") for c in COLUMNS[1:] if (folder / f"{c}.npy").exists()}
        require_rows({"X": inputs, **flat}, str(folder))
        fits = inputs.dtype == np.float32 or (inputs.dtype == np.uint8 and inputs.ndim == 4)
        layout = "expected uint8 [n, channels, height, width] or float32 [n, ...], in C order"
        require(
            fits and inputs.flags.c_contiguous,
            f"{folder / 'X.npy'} is {inputs.dtype} {inputs.shape}, {layout}: it is read where it lies",
        )
        last = inputs.ndim == 4 and channel_axis(inputs.shape, str(folder / "X.npy")) == 3
        require(not last, f"{folder / 'X.npy'} is {inputs.dtype} {inputs.shape}, with its channels last; {layout}")
        channels = inputs.shape[1] if inputs.dtype == np.uint8 else 1
        require(channels <= 4, f"{folder / 'X.npy'}: images of shape {inputs.shape[1:]} have {channels} channels")
        return most_occur(from_columns(flat, inputs, str(folder), self.task), str(folder))


def read_npy(path: Path, mapped: bool = False) -> np.ndarray:
    """A .npy file; mapped: left on disk until it is looked at, and never written to.  ConfigError where it is none."""
    require(path.is_file(), f"{path} is not there (dataset.path names the folder of X.npy and y.npy)")
    try:
        found = np.load(
            path, mmap_mode="r", allow_pickle=False
        )  # refuses a header that claims more than the file holds
        return found if mapped else np.array(found)
    except DAMAGE as error:
        raise ConfigError(f"{path} is damaged or no .npy file of numbers") from error
