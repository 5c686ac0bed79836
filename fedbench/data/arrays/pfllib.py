"""A folder that PFLlib's generators wrote, with its clients and their training and test data.

Layout of dataset.path::

    train/0.npz, train/1.npz, ...      each with one array `data`, a dict of x (inputs [n, ...]) and y (classes [n])
    test/0.npz, test/1.npz, ...
    config.json

Images have their channels first and are already scaled.  Use dataset.split=published and partition=domain, so that
client i is that of the folder.

The files are pickles.  They are read by a reader that builds only arrays (`_pickled.py`).  With
dataset.trust=<name of the folder> NumPy reads them, and they may run code.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.core.files import read_json
from fedbench.core.options import require
from fedbench.data._foreign import refuse_foreign
from fedbench.data._names import check_spelling
from fedbench.data._pickled import read_object
from fedbench.data.base import TEST, TRAIN, Arrays

FOLDERS = {"train": TRAIN, "test": TEST}


@dataclass
class PFLlib:
    """The data of a folder of PFLlib.

    Args:
        path: The folder with train/ and test/.
        trust: The name of the folder (without its parents), if you trust its files, which may then run code.  None:
            they are read by a reader that builds only arrays.
    """

    path: str | None = None
    trust: str | None = None

    def load(self) -> Arrays:
        """Return the data of all clients, with their published training and test parts.

        Raises:
            ConfigError: The folder has another layout, or a file contains more than arrays.
        """
        require(
            self.path is not None,
            "dataset=pfllib needs a folder that PFLlib wrote, but dataset.path is null: set dataset.path to one with "
            "train/ and test/",
        )
        folder = Path(str(self.path))
        clients = self._clients(folder)
        inputs, targets, split, domain = [], [], [], []
        for i, client in enumerate(clients):
            for part, code in FOLDERS.items():  # train and test, and their codes in split
                x, y = self._read(folder / part / f"{client}.npz", folder)
                if len(x):  # an empty file does not tell the shape of a sample
                    inputs.append(x)
                targets.append(y)
                split.append(np.full(len(y), code, np.int8))
                domain.append(np.full(len(y), i, np.int64))
        shapes = {x.shape[1:] for x in inputs}
        require(
            len(shapes) == 1,
            f"dataset.path={folder}: all samples must have one shape, but those of the clients have "
            f"{', '.join(sorted(map(str, shapes))) or 'none, as all files are empty'}: write the files again "
            "by PFLlib's generator",
        )
        labels = np.concatenate(targets)
        declared = read_json(folder / "config.json").get("num_classes")  # None without the file
        return Arrays(
            inputs=np.concatenate(inputs),
            targets=labels,
            split=np.concatenate(split),
            num_classes=max(int(labels.max(initial=0)) + 1, declared if isinstance(declared, int) else 0),
            domain=np.concatenate(domain),
            domain_names=clients,
        ).check()

    def _clients(self, folder: Path) -> list[str]:
        """Return the names of the clients' files, without suffix, in numeric order: "0", "1", ...

        Args:
            folder: The folder with train/ and test/.

        Raises:
            ConfigError: train/ has no such files, or test/ has files of other clients.
        """
        names = {
            part: {file.stem for file in (folder / part).glob("*.npz") if file.stem.isdecimal()} for part in FOLDERS
        }
        if not names["train"]:
            refuse_foreign(folder, "dataset=pfllib")  # such as a folder of Parquet files, which the error names
        unpaired = sorted(names["train"] ^ names["test"], key=int)
        require(
            bool(names["train"]) and not unpaired,
            f"dataset.path={folder} is not a folder of PFLlib: train/ has {len(names['train'])} and test/ has "
            f"{len(names['test'])} files of clients (0.npz, 1.npz, ...), which must be the same"
            + (f"; {unpaired[0]}.npz is only in one of them" if unpaired else "")
            + ": set dataset.path to the folder that contains train/ and test/, or complete it",
        )
        check_spelling(names["train"], f"dataset.path={folder}: the clients' files")
        return sorted(names["train"], key=int)

    def _read(self, path: Path, folder: Path) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs [n, ...] float32 and the classes [n] int64 of one client in one part.

        Args:
            path: The file of the client in train/ or test/.
            folder: The folder with train/ and test/, whose name dataset.trust must be to trust the file.

        Raises:
            ConfigError: The file cannot be read, or contains something else.
        """
        option, folder_name = f"dataset.path={self.path}", folder.resolve().name
        data = read_object(path, "data", option, f"dataset.trust={folder_name}", trusted=self.trust == folder_name)
        require(
            isinstance(data, dict) and {"x", "y"} <= data.keys(),
            f"{option}: {path} must contain an array `data`, a dict of x (inputs) and y (classes): write it again by "
            "PFLlib's generator",
        )
        x, y = _numbers(data["x"]), _numbers(data["y"])
        require(
            x.ndim > 0 and y.ndim == 1 and len(x) == len(y) and bool((y == np.floor(y)).all()),
            f"{option}: {path} must contain numbers x [n, ...], all of one shape, and integers y [n]: write it again "
            "by PFLlib's generator",
        )
        return x.astype(np.float32), y.astype(np.int64)


def _numbers(values: Any) -> np.ndarray:
    """Return values (nested lists or an array) as an array of numbers.

    Values that are not numbers, or that have no common shape, give an array of shape (), which callers refuse.
    """
    try:
        array = np.asarray(values)
    except ValueError:
        return np.empty(())
    return array if array.dtype.kind in "fiub" else np.empty(())
