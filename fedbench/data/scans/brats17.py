"""Brain tumours of BraTS, cut to one patch a scan, from either form in which the scans are published.

Sources: Menze et al., BraTS, IEEE TMI 2015; Antonelli et al., Medical Segmentation Decathlon, Nature Communications
2022 (medicaldecathlon.com).
Licences: the Decathlon CC BY-SA 4.0; BraTS 2017 is given to registered users.
Layout of dataset.path, one of::

    imagesTr/{scan}.nii.gz                  [H, W, D, 4]: FLAIR, T1, T1 with contrast agent, T2   (Task01, 484 scans)
    labelsTr/{scan}.nii.gz                  mask

    HGG/{scan}/{scan}_flair.nii.gz          [H, W, D], and _t1, _t1ce, _t2   (BraTS 2017, 285 scans, and later years)
    HGG/{scan}/{scan}_seg.nii.gz            mask
    LGG/...

Scans are turned to one orientation (right, front, top) before they are cut.  Any part of a tumour is 1 in the mask.  A
patch has size x size pixels around the tumour, in the slice where the tumour is largest, shifted to lie inside the
scan.  It is standardized over the voxels that are not 0 and clipped at 3 deviations, which become 1.
mode=official is pFedNet's code: every modality is a sample of its natural silo, for partition=domain_counts.  Its
channels are three neighbouring slices, standardized over the patch, with the mask of the first slice.
Departs from that code: scans are turned to one orientation; the centre is moved inwards where a neighbouring slice
would be outside and the code fails; no noise is added to test scans.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from fedbench.core.constant import is_constant
from fedbench.core.options import Count, require
from fedbench.data._files import cached, fingerprint
from fedbench.data.base import Arrays
from fedbench.data.scans._channels import lacking
from fedbench.data.scans._volumes import read_nifti, require_one_space

MODALITIES = ("flair", "t1", "t1c", "t2")
CLIP = 3.0  # standard deviations that become 1
VERSION = 3  # of the cached patches; patches of older versions are cut again
FILES = ("flair", "t1", "t1ce", "t2")  # names of the modalities in BraTS
LAYOUTS = "imagesTr and labelsTr (the Decathlon's Task01), or HGG and LGG with files *_seg.nii.gz (BraTS 2017)"


class Scan(NamedTuple):
    """The files of a scan.  images: one of all modalities, or one for each."""

    images: list[Path]
    mask: Path

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the voxels [H, W, D, 4] float32 and the tumour mask [H, W, D] bool, after a check that they match."""
        read = [read_nifti(path) for path in self.images]
        mask = read_nifti(self.mask)
        expected = [("[H, W, D, 4]", 4)] if len(read) == 1 else [("[H, W, D]", 3)] * len(read)
        for path, image, (words, ndim) in zip(self.images, read, expected, strict=True):
            fits = image.voxels.ndim == ndim and (ndim == 3 or image.voxels.shape[3] == len(MODALITIES))
            require(fits, f"{path} has shape {image.voxels.shape}: expected {words}")
        require(mask.voxels.ndim == 3, f"{self.mask} has shape {mask.voxels.shape}: expected [H, W, D]")
        for path, image in zip(self.images, read, strict=True):
            require_one_space(path, image, self.mask, mask)
        volume = read[0].voxels if len(read) == 1 else np.stack([image.voxels for image in read], -1)
        return volume, mask.voxels > 0


class BraTS17:
    """inputs [n, channels, size, size] float32 in [-1, 1]; targets [n, size, size], 0 or 1.

    mode: slice, or official, above.  lack, lack_clients: see data/scans/_channels.py.
    """

    def __init__(
        self,
        data_dir: str,
        path: str | None = None,
        size: Count = 64,
        mode: Literal["slice", "official"] = "slice",
        lack: str | None = None,
        lack_clients: Count | None = 2,
    ):
        self.data_dir, self.path, self.size, self.mode = data_dir, path, size, mode
        whole = mode == "slice" or lack is None
        require(whole, "dataset.lack needs modalities as channels, not dataset.mode=official")
        self.fit = lacking(lack, MODALITIES, lack_clients)

    def load(self) -> Arrays:
        """Cut the patches, or read them from the cache; ConfigError where files are missing or damaged."""
        require(self.path is not None, f"dataset=brats17 needs dataset.path=<a folder that holds {LAYOUTS}>")
        scans = _scans(Path(str(self.path)))
        options = (VERSION, self.size, self.mode, [0, 1, 2, 3], CLIP)  # older versions could select channels
        files = [fingerprint(path) for scan in scans for path in (*scan.images, scan.mask)]
        cut = cached(self.data_dir, "brats17", (files, options), lambda: self._cut(scans))
        official = self.mode == "official"
        return Arrays(
            inputs=cut["inputs"],
            targets=cut["targets"],
            split=np.zeros(len(cut["inputs"]), np.int8),
            num_classes=2,
            task="segmentation",
            class_names=["background", "tumour"],
            domain=np.arange(len(cut["inputs"])) % len(MODALITIES) if official else None,
            domain_names=list(MODALITIES) if official else None,
            fit=self.fit,
        ).check()

    def _cut(self, scans: list[Scan]) -> dict[str, np.ndarray]:
        inputs, targets = [], []
        for scan in scans:
            volume, tumour = scan.read()
            require(bool(tumour.any()), f"{scan.mask} shows no tumour")
            is_large = min(tumour.shape[:2]) >= self.size
            require(is_large, f"dataset.size={self.size} is more than {scan.mask} has, {tumour.shape}")
            x, y = (self._span(tumour.sum(axes), self.size) for axes in ((1, 2), (0, 2)))
            z = int(tumour.sum((0, 1)).argmax())
            make: Callable = self._neighbours if self.mode == "official" else self._slice
            for patch, target in make(volume[x, y], tumour[x, y], z):
                inputs.append(patch)
                targets.append(target)
        return {"inputs": np.stack(inputs).astype(np.float32), "targets": np.stack(targets).astype(np.uint8)}

    @staticmethod
    def _span(areas: np.ndarray, size: int) -> slice:
        """So many voxels around the one of most tumour, inside the scan."""
        start = min(max(int(areas.argmax()) - size // 2, 0), len(areas) - size)
        return slice(start, start + size)

    def _slice(self, volume: np.ndarray, tumour: np.ndarray, z: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """One sample: all modalities of slice z."""
        patch = volume[:, :, z].transpose(2, 0, 1)  # [channels, size, size]
        brain = (patch != 0).any(0)
        return [(np.stack([self._standardized(p, brain) for p in patch]), tumour[:, :, z])]

    def _neighbours(self, volume: np.ndarray, tumour: np.ndarray, z: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """A sample for each modality: slices z - 1 to z + 1, and the mask of the first one."""
        require(volume.shape[2] >= 3, "dataset.mode=official needs scans of three slices or more")
        z = min(max(z, 1), volume.shape[2] - 2)
        slices = volume[:, :, z - 1 : z + 2].transpose(3, 2, 0, 1)  # [channels, 3, size, size]
        everywhere = np.ones(slices.shape[1:], bool)
        return [(self._standardized(s, everywhere), tumour[:, :, z - 1]) for s in slices]

    def _standardized(self, patch: np.ndarray, where: np.ndarray) -> np.ndarray:
        """Mean 0 and deviation 1 over the voxels there, the others 0, cut and scaled to [-1, 1]."""
        inside = patch[where]
        if not len(inside) or is_constant(inside.mean(dtype=np.float64), inside.var(dtype=np.float64), len(inside)):
            return np.zeros_like(patch)
        return ((patch - inside.mean()) / inside.std() / CLIP).clip(-1, 1) * where


def _scans(folder: Path) -> list[Scan]:
    """List the scans of a folder of either layout, sorted; ConfigError if a file is absent or duplicated."""
    images = _visible(folder, "imagesTr/*.nii*")
    if images:
        scans = [Scan([image], folder / "labelsTr" / image.name) for image in images]
    else:
        scans = [_brats(mask) for mask in _visible(folder, "**/*_seg.nii*")]
    require(bool(scans), f"dataset.path={folder} holds no scans: expected {LAYOUTS}")
    seen: dict[str, Path] = {}
    for scan in scans:
        absent = next((path for path in (*scan.images, scan.mask) if not path.is_file()), None)
        require(absent is None, f"{absent} is not there: every scan has its modalities and a mask")
        name = scan.mask.name.partition(".nii")[0]
        require(name not in seen, f"{seen.get(name)} and {scan.mask} are two files of one scan: remove one of them")
        seen[name] = scan.mask
    return scans


def _visible(folder: Path, pattern: str) -> list[Path]:
    """Return the files that match a pattern, sorted, without hidden files and those in hidden folders."""
    found = sorted(folder.glob(pattern))
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def _brats(mask: Path) -> Scan:
    """Return the files of the scan of a mask <scan>_seg.nii.gz."""
    scan, _, ending = mask.name.rpartition("_seg")
    return Scan([mask.with_name(f"{scan}_{name}{ending}") for name in FILES], mask)
