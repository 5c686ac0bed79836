"""Brain tumours of the Medical Segmentation Decathlon (Task01, 484 scans of BraTS), cut to one patch a scan.

`path` holds imagesTr/*.nii.gz, [H, W, D, 4] (FLAIR, T1, T1 with contrast agent, T2), and masks of the same names in
labelsTr/, where any part of a tumour is 1.  A patch is size x size pixels around the tumour, of the slice where the
tumour is largest, shifted to lie inside the scan, standardized over the voxels that are not 0 and cut at `clip`
deviations, which become 1.
mode=official is pFedNet's code: every modality is a sample of its own (its natural silo, for
partition=domain_counts) of three neighbouring slices as channels, standardized over the patch, with the mask of the
first slice.  Departs from that code: the centre is moved inwards where a neighbouring slice would be outside, where
the code fails, and no noise is added to test scans.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

from fedbench.core.constant import is_constant
from fedbench.core.options import Count, Positive, require
from fedbench.data._channels import lacking, picked
from fedbench.data._files import cached, fingerprint
from fedbench.data._volumes import read_nifti
from fedbench.data.base import Arrays

MODALITIES = ("flair", "t1", "t1c", "t2")
VERSION = 2  # of the patches in the cache: older ones are cut again


class BraTS17:
    """inputs [n, channels, size, size] float32 in [-1, 1]; targets [n, size, size], 0 or 1.

    mode: slice, or official, above.  channels: which modalities; None: all.  lack, lack_clients: data/_channels.py.
    """

    def __init__(
        self,
        data_dir: str,
        path: str | None = None,
        size: Count = 64,
        mode: Literal["slice", "official"] = "slice",
        channels: list[str] | None = None,
        lack: str | None = None,
        lack_clients: Count | None = 2,
        clip: Positive = 3.0,
    ):
        self.data_dir, self.path, self.size, self.mode, self.clip = data_dir, path, size, mode, clip
        self.channels = picked(channels, MODALITIES)
        self.names = [MODALITIES[m] for m in self.channels]
        official = mode == "official"
        require(not (official and lack), "dataset.lack needs modalities as channels, not dataset.mode=official")
        self.fit = lacking(lack, self.names, lack_clients)

    def load(self) -> Arrays:
        """Cut the patches, or read them from the cache; ConfigError where files are missing or damaged."""
        require(self.path is not None, "dataset=brats17 needs dataset.path=<the folder with imagesTr and labelsTr>")
        folder = Path(str(self.path))
        scans = sorted((folder / "imagesTr").glob("[!.]*.nii*"))
        require(bool(scans), f"{folder / 'imagesTr'} has no .nii or .nii.gz files")
        masks = [folder / "labelsTr" / scan.name for scan in scans]
        absent = next((mask for mask in masks if not mask.is_file()), None)
        require(absent is None, f"{absent} is not there: every scan has a mask of its name")
        options = (VERSION, self.size, self.mode, self.channels, self.clip)
        key = ([fingerprint(p) for p in (*scans, *masks)], options)
        cut = cached(self.data_dir, "brats17", key, lambda: self._cut(scans, masks))
        official = self.mode == "official"
        return Arrays(
            inputs=cut["inputs"],
            targets=cut["targets"],
            split=np.zeros(len(cut["inputs"]), np.int8),
            num_classes=2,
            task="segmentation",
            class_names=["background", "tumour"],
            domain=np.arange(len(cut["inputs"])) % len(self.channels) if official else None,
            domain_names=self.names if official else None,
            fit=self.fit,
        ).check()

    def _cut(self, scans: list[Path], masks: list[Path]) -> dict[str, np.ndarray]:
        inputs, targets = [], []
        for scan, mask in zip(scans, masks, strict=True):
            volume, tumour = read_nifti(scan), read_nifti(mask) > 0
            fits = volume.ndim == 4 and volume.shape == (*tumour.shape, len(MODALITIES))
            shapes = f"{volume.shape}, and its mask {tumour.shape}"
            require(fits, f"{scan} has shape {shapes}: expected [H, W, D, 4] and [H, W, D]")
            require(bool(tumour.any()), f"{mask} shows no tumour")
            is_large = min(tumour.shape[:2]) >= self.size
            require(is_large, f"dataset.size={self.size} is more than {scan} has, {tumour.shape}")
            x, y = (self._span(tumour.sum(axes), self.size) for axes in ((1, 2), (0, 2)))
            z = int(tumour.sum((0, 1)).argmax())
            make: Callable = self._neighbours if self.mode == "official" else self._slice
            for patch, target in make(volume[x, y][..., self.channels], tumour[x, y], z):
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
        return ((patch - inside.mean()) / inside.std() / self.clip).clip(-1, 1) * where
