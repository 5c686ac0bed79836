"""LUNA16: a square patch of a CT slice for each candidate, nodule or not, from the challenge's files.

Source: Setio et al., Medical Image Analysis 2017 (luna16.grand-challenge.org).
Licence: CC BY 4.0; the scans are those of LIDC-IDRI, CC BY 3.0.
Layout of dataset.path::

    candidates.csv, or candidates_V2.csv     seriesuid, coordX, coordY, coordZ (mm), class
    subset0/{seriesuid}.mhd and .raw         in any folder

Folders of masks (seg-lungs-LUNA16) are left out.  Scans are turned to one
orientation, since some of the published ones are stored mirrored.

pFedNet gives 32 x 32 patches; its code stores them as pictures and normalizes by ImageNet's statistics, which is not
done here: Hounsfield units are mapped from `window` to [-1, 1].  Patches are cut of the slice nearest to the candidate;
beyond its border a patch is -1.

Positives are few, one in 400: `balance` keeps all of them and as many others at random, as the paper's tables imply.
Candidates whose scan is not there are left out, so that some of the ten subsets will do.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np

from fedbench.core.options import ConfigError, Count, Seed, require
from fedbench.data._files import cached, fingerprint
from fedbench.data.base import Arrays
from fedbench.data.scans._volumes import Volume, read_mhd

MASKS = re.compile(r"^seg|mask", re.IGNORECASE)  # folders that hold no scans
TABLES = ("candidates.csv", "candidates_V2.csv")
CHANNELS = 3
COLUMNS = ("seriesuid", "coordX", "coordY", "coordZ", "class")


class Luna16:
    """inputs [n, 3, size, size] float32 in [-1, 1]; targets 0 or 1 (a nodule); a scan is a subject.

    The three channels are copies, for models of colour images.

    Args:
        data_dir: Folder of the cache.
        path: Folder with the table of candidates and the scans.
        window: Hounsfield units that become -1 and 1.
        size: Pixels a side.
        balance: Whether to draw as many others as nodules.
        by_patient: Whether a scan is never both trained and tested on.
        seed: Seed of the draw.
    """

    def __init__(
        self,
        data_dir: str,
        path: str | None = None,
        window: list[float] | None = None,
        size: Count = 32,
        balance: bool = True,
        by_patient: bool = False,
        seed: Seed = 0,
    ):
        self.data_dir, self.path = data_dir, path
        self.window = [-1000.0, 400.0] if window is None else list(window)
        fine = len(self.window) == 2 and self.window[0] < self.window[1]
        require(fine, f"dataset.window={self.window} must be two numbers, the lower first")
        self.size, self.balance, self.by_patient, self.seed = size, balance, by_patient, seed

    def load(self) -> Arrays:
        """Cut the patches, or read them from the cache; ConfigError where files are missing or damaged."""
        require(self.path is not None, "dataset=luna16 needs dataset.path=<the folder with candidates.csv and scans>")
        folder = Path(str(self.path))
        table = next((path for name in TABLES if (path := folder / name).is_file()), None)
        if table is None:
            raise ConfigError(f"dataset.path={folder} must hold {' or '.join(TABLES)}, and neither is there")
        scans = _scans(folder)
        options = (self.window, self.size, self.balance, self.seed)
        key = (fingerprint(table), [fingerprint(p) for p in scans.values()], options)
        kept = cached(self.data_dir, "luna16", key, lambda: self._cut(table, scans))
        patches = np.repeat(kept["patches"][:, None], CHANNELS, 1)  # [n, 3, size, size]
        return Arrays(
            inputs=patches,
            targets=kept["targets"],
            split=np.zeros(len(patches), np.int8),
            num_classes=2,
            class_names=["other", "nodule"],
            subject=kept["scan"] if self.by_patient else None,
        ).check()

    def _cut(self, table: Path, scans: dict[str, Path]) -> dict[str, np.ndarray]:
        """patches [n, size, size] float32, targets [n], scan [n]."""
        names, at, label = _candidates(table, scans)
        kept = np.arange(len(label))
        if self.balance:
            rng = np.random.RandomState(self.seed)
            both = [np.flatnonzero(label == c) for c in (0, 1)]
            least = min(map(len, both))
            require(least > 0, f"{table}: candidates of one class alone have their scan below {table.parent}")
            kept = np.sort(np.concatenate([rng.permutation(members)[:least] for members in both]))
        names, at, label = names[kept], at[kept], label[kept]
        uids, scan = np.unique(names, return_inverse=True)
        patches = np.empty((len(kept), self.size, self.size), np.float32)
        for s, uid in enumerate(uids):  # a scan is read once
            volume = read_mhd(scans[uid])
            is_deep = volume.values.dtype.itemsize > 1
            require(
                is_deep, f"{scans[uid]} holds 8-bit numbers, so it is a mask and no scan: move it out of the folder"
            )
            for i in np.flatnonzero(scan == s):
                patches[i] = self._patch(volume, at[i], uid)
        return {"patches": patches, "targets": label, "scan": scan.astype(np.int64)}

    def _patch(self, volume: Volume, world: np.ndarray, uid: str) -> np.ndarray:
        """The square around a position in mm, scaled.  # [size, size]"""
        z, y, x = volume.voxel(world)
        inside = all(0 <= v < n for v, n in zip((z, y, x), volume.values.shape))
        require(inside, f"{uid}: the candidate at {world.tolist()} mm is outside of its scan")
        half, (low, high) = self.size // 2, self.window
        scaled = ((volume.values[z].astype(np.float32) - low) / (high - low) * 2 - 1).clip(-1, 1)
        padded = np.pad(scaled, self.size, constant_values=-1)
        top, left = y + self.size - half, x + self.size - half
        return padded[top : top + self.size, left : left + self.size]


def _scans(folder: Path) -> dict[str, Path]:
    """Find the scans below a folder by their names; ConfigError if two have one name."""
    scans: dict[str, Path] = {}
    for path in sorted(folder.rglob("*.mhd")):
        parts = path.relative_to(folder).parts
        if any(part.startswith(".") or MASKS.search(part) for part in parts[:-1]):
            continue
        first = scans.setdefault(path.stem, path)
        require(first is path, f"{first} and {path} are two files of one scan: remove one of them")
    return scans


def _candidates(table: Path, scans: dict[str, Path]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of candidates whose scan is there: its name [n], position in mm [n, 3] and class [n]."""
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            rows = [[row[c] for c in COLUMNS] for row in csv.DictReader(file) if row["seriesuid"] in scans]
        at = np.array([[float(v) for v in row[1:4]] for row in rows])
        label = np.array([int(row[4]) for row in rows], np.int64)
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{table} must have the columns {', '.join(COLUMNS)}, of numbers ({error})") from error
    require(len(rows) > 0, f"{table}: no scan of a candidate, <seriesuid>.mhd, is below {table.parent}")
    require(set(label.tolist()) <= {0, 1}, f"{table}: class must be 0 or 1")
    return np.array([row[0] for row in rows]), at, label
