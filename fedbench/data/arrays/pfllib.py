"""A folder that PFLlib's generators wrote: the clients, their training and their test parts as they are.

Layout of dataset.path::

    train/0.npz, train/1.npz, ...      each with one array `data`, a dict of x (inputs [n, ...]) and y (classes [n])
    test/0.npz, test/1.npz, ...
    config.json

Images have channels first and are scaled already.  For dataset.split=published and
partition=domain, so that client i is that of the folder.

Such a file is a pickle.  It is read by a reader that builds arrays and nothing else (_pickled.py).  With
dataset.trust=<name of the folder> it may hold anything, and run code.
"""

from __future__ import annotations

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


class PFLlib:
    """path: the folder that has train/ and test/.  trust: its name, where its files may hold anything."""

    def __init__(self, path: str | None = None, trust: str | None = None):
        self.path, self.trust = path, trust

    def load(self) -> Arrays:
        """Read all clients; ConfigError where the folder is none of PFLlib's, or a file holds more than arrays."""
        require(self.path is not None, "dataset=pfllib needs dataset.path=<a folder with train/ and test/ of PFLlib>")
        folder = Path(str(self.path))
        names = {part: {f.stem for f in (folder / part).glob("*.npz") if f.stem.isdecimal()} for part in FOLDERS}
        if not names["train"]:
            refuse_foreign(folder, "dataset=pfllib")
        odd = sorted(names["train"] ^ names["test"], key=int)
        require(
            bool(names["train"]) and not odd,
            f"dataset.path={folder} is no folder of PFLlib: train/ has {len(names['train'])} and test/ has "
            f"{len(names['test'])} clients' files (0.npz, 1.npz, ...), which must be the same ones"
            + (f"; {odd[0]}.npz is in one of them alone" if odd else ""),
        )
        check_spelling(names["train"], f"dataset.path={folder}: the clients' files")
        x, y, part, client = [], [], [], []
        clients = sorted(names["train"], key=int)
        for i, name in enumerate(clients):
            for which, code in FOLDERS.items():
                inputs, labels = self._read(folder / which / f"{name}.npz", folder)
                x.append(inputs)
                y.append(labels)
                part.append(np.full(len(labels), code, np.int8))
                client.append(np.full(len(labels), i, np.int64))
        shapes = {inputs.shape[1:] for inputs in x if len(inputs)}
        require(len(shapes) == 1, f"dataset.path={folder}: clients' samples differ in shape ({_shown(shapes)})")
        targets = np.concatenate(y)
        said = read_json(folder / "config.json").get("num_classes")
        classes = max(int(targets.max(initial=0)) + 1, said if isinstance(said, int) else 0)
        return Arrays(
            np.concatenate([inputs for inputs in x if len(inputs)]),
            targets,
            np.concatenate(part),
            classes,
            domain=np.concatenate(client),
            domain_names=clients,
        ).check()

    def _read(self, path: Path, folder: Path) -> tuple[np.ndarray, np.ndarray]:
        """Inputs [n, ...] float32 and classes [n] int64 of one file."""
        key, name = f"dataset.path={self.path}", folder.resolve().name
        found = read_object(path, "data", key, f"dataset.trust={name}", trusted=self.trust == name)
        require(isinstance(found, dict) and {"x", "y"} <= found.keys(), f"{key}: {path} has no data of x and y")
        x, y = _numbers(found["x"]), _numbers(found["y"])
        require(
            x.ndim > 0 and y.ndim == 1 and len(x) == len(y) and bool((y == np.floor(y)).all()),
            f"{key}: {path} must hold x [n, ...] of numbers, all of one shape, and y [n] of whole numbers",
        )
        return x.astype(np.float32), y.astype(np.int64)


def _numbers(values: Any) -> np.ndarray:
    """Values as an array, which has no dimension where they are no numbers or differ in length."""
    try:
        found = np.asarray(values)
    except ValueError:
        return np.empty(())
    return found if found.dtype.kind in "fiub" else np.empty(())


def _shown(shapes: set[tuple[int, ...]]) -> str:
    return ", ".join(sorted(map(str, shapes)))
