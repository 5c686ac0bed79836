"""LUNA16: a square patch of a CT slice for each candidate, nodule or not, from the challenge's files.

Source: Setio et al., Medical Image Analysis 2017 (luna16.grand-challenge.org).
Licence: CC BY 4.0; the scans are those of LIDC-IDRI, CC BY 3.0.
Layout of dataset.path::

    candidates.csv, or candidates_V2.csv     seriesuid, coordX, coordY, coordZ (mm), class
    subset0/{seriesuid}.mhd and .raw         in any folder

Folders of masks (seg-lungs-LUNA16) are ignored.  Scans are turned to one orientation, because some of the published
ones are mirrored.

pFedNet uses 32 x 32 patches; its code stores them as pictures and normalizes by ImageNet's statistics.  Here Hounsfield
units are mapped from `window` to [-1, 1].  A patch is cut from the slice nearest to the candidate, and is -1 beyond the
border of the scan.

One candidate in 400 is a nodule.  `balance` uses all of them and equally many others at random, as the paper's tables
imply.  Candidates without a scan are ignored, so that some of the ten subsets are sufficient.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedbench.core.options import ConfigError, Count, Seed, require
from fedbench.data._files import cached, fingerprint, visible_files
from fedbench.data.base import Arrays
from fedbench.data.scans._volumes import Volume, read_mhd

MASKS = re.compile(r"^seg|mask", re.IGNORECASE)  # folders without scans
TABLES = ("candidates.csv", "candidates_V2.csv")
CHANNELS = 3
COLUMNS = ("seriesuid", "coordX", "coordY", "coordZ", "class")


@dataclass
class Luna16:
    """Patches of CT scans: inputs [n, 3, size, size] float32 in [-1, 1], targets 0 or 1 (a nodule).

    The three channels are equal, for models of colour images.

    Args:
        data_dir: Folder of the cache.
        path: Folder with the table of candidates and the scans.
        window: Hounsfield units that become -1 and 1.  None: -1000 and 400.
        size: Side of a patch in pixels.
        balance: Whether to use equally many nodules and others.
        by_patient: Whether all patches of a scan are in one part, training or test.
        seed: Seed of the selection of others.
    """

    data_dir: str
    path: str | None = None
    window: list[float] | None = None
    size: Count = 32
    balance: bool = True
    by_patient: bool = False
    seed: Seed = 0

    def __post_init__(self) -> None:
        self._window = [-1000.0, 400.0] if self.window is None else list(self.window)
        is_valid = len(self._window) == 2 and self._window[0] < self._window[1]
        require(
            is_valid,
            f"dataset.window={self._window} is no range: set it to [low, high] with low < high, the Hounsfield units "
            "that become -1 and 1, or to null for [-1000, 400]",
        )

    def load(self) -> Arrays:
        """Return the patches, cut from the scans or read from the cache.

        Raises:
            ConfigError: Files do not exist or are damaged.
        """
        require(
            self.path is not None,
            "dataset=luna16 needs a folder, but dataset.path is null: set dataset.path to the one with candidates.csv "
            "and the scans",
        )
        folder = Path(str(self.path))
        table = next((folder / name for name in TABLES if (folder / name).is_file()), None)
        if table is None:
            raise ConfigError(
                f"dataset.path={folder} must contain {' or '.join(TABLES)}, and neither exists: copy the challenge's "
                "file there"
            )
        scans = _scans(folder)
        options = (self._window, self.size, self.balance, self.seed)
        key = (fingerprint(table), [fingerprint(path) for path in scans.values()], options)
        patches = cached(self.data_dir, "luna16", key, lambda: self._cut(table, scans))
        return Arrays(
            inputs=np.repeat(patches["patches"][:, None], CHANNELS, 1),  # [n, 3, size, size], equal channels
            targets=patches["targets"],
            split=np.zeros(len(patches["targets"]), np.int8),  # 0, training: there is no published split
            num_classes=2,
            class_names=["other", "nodule"],
            subject=patches["scan"] if self.by_patient else None,
        ).check()

    def _cut(self, table: Path, scans: dict[str, Path]) -> dict[str, np.ndarray]:
        """Return the patches of the selected candidates.  With the option balance, both classes have equally many.

        Args:
            table: The CSV file of candidates.
            scans: The .mhd file of each scan by its name, the seriesuid.

        Returns:
            "patches" [n, size, size] float32, "targets" [n] int64, and "scan", the index of each patch's scan [n]
            int64.
        """
        names, positions, labels = _candidates(table, scans)
        used = np.arange(len(labels))
        if self.balance:
            rng = np.random.RandomState(self.seed)
            members = [np.flatnonzero(labels == c) for c in (0, 1)]
            count = min(map(len, members))
            require(
                count > 0,
                f"{table}: only candidates of one class have a scan in {table.parent}: add scans, "
                "or set dataset.balance=false",
            )
            used = np.sort(np.concatenate([rng.permutation(candidates)[:count] for candidates in members]))
        names, positions, labels = names[used], positions[used], labels[used]
        uids, scan = np.unique(names, return_inverse=True)
        patches = np.empty((len(used), self.size, self.size), np.float32)
        for s, uid in enumerate(uids):  # each scan is read once
            volume = read_mhd(scans[uid])
            require(
                volume.values.dtype.itemsize > 1,
                f"{scans[uid]} has 8-bit values, so it is a mask and not a scan: move it out of the folder",
            )
            for i in np.flatnonzero(scan == s):
                patches[i] = self._patch(volume, positions[i], uid)
        return {"patches": patches, "targets": labels, "scan": scan.astype(np.int64)}

    def _patch(self, volume: Volume, position: np.ndarray, uid: str) -> np.ndarray:
        """Return the square around a candidate, with values in [-1, 1].  # [size, size]

        ``_window`` has the values of the scan (Hounsfield units) that become -1 and 1.  Pixels outside of the scan are
        -1.

        Args:
            volume: The scan.
            position: Position of the candidate (x, y, z) in mm, [3].
            uid: Name of the scan, for messages.
        """
        z, y, x = volume.voxel(position)
        is_inside = all(0 <= v < n for v, n in zip((z, y, x), volume.values.shape))
        require(
            is_inside,
            f"scan {uid}: the candidate at {position.tolist()} mm is outside of its scan: correct its row in the table",
        )
        half, (low, high) = self.size // 2, self._window
        scaled = ((volume.values[z].astype(np.float32) - low) / (high - low) * 2 - 1).clip(-1, 1)
        padded = np.pad(scaled, self.size, constant_values=-1)  # by `size` pixels on each side
        top, left = y + self.size - half, x + self.size - half
        return padded[top : top + self.size, left : left + self.size]


def _scans(folder: Path) -> dict[str, Path]:
    """Return the .mhd file of each scan below a folder by its name, that of the file without .mhd.

    Files in folders of segmentations or masks, such as "seg-lungs", are left out.

    Raises:
        ConfigError: Two files have the same name.
    """
    scans: dict[str, Path] = {}
    for path in visible_files(folder):
        folders = path.relative_to(folder).parts[:-1]
        if path.suffix == ".mhd" and not any(map(MASKS.search, folders)):
            first = scans.setdefault(path.stem, path)
            require(first is path, f"{first} and {path} are two files of one scan: remove one of them")
    return scans


def _candidates(table: Path, scans: dict[str, Path]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all candidates of a table that have a scan.

    Args:
        table: The CSV file of candidates.
        scans: The .mhd file of each scan by its name.

    Returns:
        The names of their scans [n], positions (x, y, z) in mm [n, 3], and classes [n] int64, 1 for a nodule.
    """
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            # COLUMNS: seriesuid (the name of the scan), coordX, coordY, coordZ, class
            rows = [[row[c] for c in COLUMNS] for row in csv.DictReader(file) if row["seriesuid"] in scans]
        positions = np.array([[float(v) for v in row[1:4]] for row in rows])
        labels = np.array([int(row[4]) for row in rows], np.int64)
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{table} must have the columns {', '.join(COLUMNS)}, with numbers except for seriesuid ({error}): use the "
            "challenge's file"
        ) from error
    require(len(rows) > 0, f"{table}: no candidate has a scan <seriesuid>.mhd in {table.parent}: copy scans there")
    require(
        set(labels.tolist()) <= {0, 1},
        f"{table}: class must be 0 (other) or 1 (nodule), but is also {sorted(set(labels.tolist()) - {0, 1})[:3]}: "
        "correct the table",
    )
    return np.array([row[0] for row in rows]), positions, labels
