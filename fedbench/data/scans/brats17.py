"""Brain tumours of BraTS: one patch of each scan, from either published layout.

Sources: Menze et al., BraTS, IEEE TMI 2015; Antonelli et al., Medical Segmentation Decathlon, Nature Communications
2022 (medicaldecathlon.com).
Licences: the Decathlon CC BY-SA 4.0; BraTS 2017 is given to registered users.
Layout of dataset.path, one of::

    imagesTr/{scan}.nii.gz                  [H, W, D, 4]: FLAIR, T1, T1 with contrast agent, T2   (Task01, 484 scans)
    labelsTr/{scan}.nii.gz                  mask

    HGG/{scan}/{scan}_flair.nii.gz          [H, W, D], and _t1, _t1ce, _t2   (BraTS 2017, 285 scans, and later years)
    HGG/{scan}/{scan}_seg.nii.gz            mask
    LGG/...

Scans are turned to one orientation (right, front, top).  All tissues of a tumour are 1 in the mask.  A patch has
size x size pixels around the tumour, in the slice where the tumour is largest, shifted to lie inside the scan.  It is
standardized over the nonzero voxels and clipped at 3 standard deviations, which become 1.
mode=official is pFedNet's code: each modality is a sample of its natural client, for partition=domain_counts.  Its
channels are three neighbouring slices, standardized over the patch, with the mask of the first slice.
Departs from that code: scans are turned to one orientation; the centre is moved inwards if a neighbouring slice would
be outside, where the code fails; no noise is added to test scans.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from fedbench.core.constant import is_constant
from fedbench.core.options import Count, require
from fedbench.data._files import cached, fingerprint, visible_files
from fedbench.data.base import Arrays
from fedbench.data.scans._channels import missing_channel
from fedbench.data.scans._volumes import read_nifti, require_one_space

MODALITIES = ("flair", "t1", "t1c", "t2")
CLIP = 3.0  # standard deviations that become 1
VERSION = 3  # of the cached patches; patches of older versions are cut again
SUFFIXES = ("flair", "t1", "t1ce", "t2")  # names of the modalities in BraTS
LAYOUTS = "imagesTr and labelsTr (the Decathlon's Task01), or HGG and LGG with files *_seg.nii.gz (BraTS 2017)"
Patch = tuple[np.ndarray, np.ndarray]  # input [channels, size, size], mask [size, size]


class Scan(NamedTuple):
    """The files of a scan: its images, one file or one per modality, and its mask of the tumour.

    Attributes:
        images: One file of all modalities, or one for each.
        mask: The mask of the tumour.
    """

    images: list[Path]
    mask: Path

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the voxels of the four modalities and the tumour mask.

        Returns:
            Voxels [H, W, D, 4] float32, and the mask [H, W, D] bool.

        Raises:
            ConfigError: A file is damaged, or the files have different shapes or positions.
        """
        images = [read_nifti(path) for path in self.images]  # one file of all modalities, or one for each
        mask = read_nifti(self.mask)
        ndim, expected = (4, "[H, W, D, 4]") if len(images) == 1 else (3, "[H, W, D]")
        for path, image in zip(self.images, images):
            shape = image.voxels.shape
            fits = len(shape) == ndim and (ndim == 3 or shape[3] == len(MODALITIES))
            require(fits, f"{path} has shape {shape}, expected {expected}: use the published file, or remove the scan")
        require(
            mask.voxels.ndim == 3,
            f"{self.mask} has shape {mask.voxels.shape}, expected [H, W, D]: use the published file, or remove it",
        )
        for path, image in zip(self.images, images):
            require_one_space(path, image, self.mask, mask)
        voxels = images[0].voxels if len(images) == 1 else np.stack([image.voxels for image in images], -1)
        return voxels, mask.voxels > 0


@dataclass
class BraTS17:
    """Brain tumours: inputs [n, channels, size, size] float32 in [-1, 1], targets [n, size, size], 0 or 1.

    Args:
        data_dir: Folder of the cache.
        path: Folder of the data set.
        size: Side of a patch in pixels.
        mode: slice (modalities are channels) or official (see the module).
        lack: A modality that is missing at the first clients (`_channels.py`): flair, t1, t1c or t2.  None: none.
        lack_clients: How many clients lack it.  None: all.
    """

    data_dir: str
    path: str | None = None
    size: Count = 64
    mode: Literal["slice", "official"] = "slice"
    lack: str | None = None
    lack_clients: Count | None = 2

    def __post_init__(self) -> None:
        require(
            self.mode == "slice" or self.lack is None,
            f"dataset.lack={self.lack} needs modalities as channels, which dataset.mode={self.mode} does not have: set "
            "dataset.mode=slice or dataset.lack=null",
        )
        self._fit = missing_channel(self.lack, MODALITIES, self.lack_clients)

    def load(self) -> Arrays:
        """Return the patches, cut from the scans or read from the cache.

        Raises:
            ConfigError: Files do not exist, are damaged, or do not match.
        """
        require(
            self.path is not None,
            f"dataset=brats17 needs a folder, but dataset.path is null: set dataset.path to one with {LAYOUTS}",
        )
        scans = _scans(Path(str(self.path)))
        # what the cached patches depend on.  VERSION: of their format; [0, 1, 2, 3]: all channels, without which older
        # caches would not be found; CLIP: how many standard deviations become 1
        options = (VERSION, self.size, self.mode, [0, 1, 2, 3], CLIP)
        files = [fingerprint(path) for scan in scans for path in (*scan.images, scan.mask)]
        patches = cached(self.data_dir, "brats17", (files, options), lambda: self._cut(scans))
        n = len(patches["inputs"])
        is_official = self.mode == "official"  # each modality of a scan is a sample of its natural client
        return Arrays(
            inputs=patches["inputs"],
            targets=patches["targets"],
            split=np.zeros(n, np.int8),  # 0, training: there is no published split
            num_classes=2,
            task="segmentation",
            class_names=["background", "tumour"],
            domain=np.arange(n) % len(MODALITIES) if is_official else None,
            domain_names=list(MODALITIES) if is_official else None,
            fit=self._fit,  # sets a missing modality to 0 once the samples are divided over clients, or None
        ).check()

    def _cut(self, scans: list[Scan]) -> dict[str, np.ndarray]:
        """Read all scans and cut their patches.

        A patch is around the row and the column with the most tumour, in the slice with the largest tumour area.

        Args:
            scans: The files of each scan.

        Returns:
            "inputs" [n, channels, size, size] float32 in [-1, 1], and "targets" [n, size, size] uint8, 1 in the tumour.
        """
        patches: list[Patch] = []
        for scan in scans:
            volume, tumour = scan.read()
            require(bool(tumour.any()), f"{scan.mask} marks no tumour: remove the files of this scan")
            require(
                min(tumour.shape[:2]) >= self.size,
                f"dataset.size={self.size} must be at most the height and width of {scan.mask}, which has "
                f"{tumour.shape} voxels: lower dataset.size",
            )
            # the slices x (rows) and y (columns) of the patch, by the number of tumour voxels in each row and column
            x, y = (self._span(tumour.sum(axes), self.size) for axes in ((1, 2), (0, 2)))
            z = int(tumour.sum((0, 1)).argmax())  # the slice with the largest tumour area
            require(
                self.mode != "official" or volume.shape[2] >= 3,
                f"{scan.mask} has {volume.shape[2]} slices, but dataset.mode=official needs at least three: remove the "
                "scan, or set dataset.mode=slice",
            )
            make = self._neighbouring_slices if self.mode == "official" else self._slice
            patches += make(volume[x, y], tumour[x, y], z)
        inputs = np.stack([patch for patch, _ in patches]).astype(np.float32)
        return {"inputs": inputs, "targets": np.stack([mask for _, mask in patches]).astype(np.uint8)}

    @staticmethod
    def _span(areas: np.ndarray, size: int) -> slice:
        """Return the range of voxel indices of a patch along one axis.

        Args:
            areas: Tumour voxels in each plane across the axis.
            size: Side of a patch in pixels.

        Returns:
            `size` voxels around the plane with the most tumour, moved so that all are inside the scan.
        """
        start = min(max(int(areas.argmax()) - size // 2, 0), len(areas) - size)
        return slice(start, start + size)

    def _slice(self, volume: np.ndarray, tumour: np.ndarray, z: int) -> list[Patch]:
        """Return one sample, all modalities of slice z (dataset.mode=slice).

        Args:
            volume: Voxels of the patch's rows and columns, [size, size, D, 4].
            tumour: Their mask, [size, size, D] bool.
            z: The index of the slice along the axis of D.
        """
        patch = volume[:, :, z].transpose(2, 0, 1)  # [channels, size, size]
        brain = (patch != 0).any(0)
        return [(np.stack([self._standardize(channel, brain) for channel in patch]), tumour[:, :, z])]

    def _neighbouring_slices(self, volume: np.ndarray, tumour: np.ndarray, z: int) -> list[Patch]:
        """Return a sample for each modality, as pFedNet's code (dataset.mode=official).

        Its channels are the slices z - 1 to z + 1, and its mask is that of slice z - 1.

        Args:
            volume: Voxels of the patch's rows and columns, [size, size, D, 4].
            tumour: Their mask, [size, size, D] bool.
            z: The slice.  The nearest one with two neighbours is used, so that D must be at least 3.
        """
        z = min(max(z, 1), volume.shape[2] - 2)
        slices = volume[:, :, z - 1 : z + 2].transpose(3, 2, 0, 1)  # [channels, 3, size, size]
        everywhere = np.ones(slices.shape[1:], bool)  # standardize over all voxels of the patch
        return [(self._standardize(modality, everywhere), tumour[:, :, z - 1]) for modality in slices]

    def _standardize(self, patch: np.ndarray, where: np.ndarray) -> np.ndarray:
        """Standardize a patch, clip it at CLIP (3) standard deviations, and scale it to [-1, 1].

        Args:
            patch: Values.
            where: Mask of the same shape: voxels that are standardized.  All others become 0.

        Returns:
            The patch; 0 everywhere if its values are constant.
        """
        inside = patch[where]
        if not len(inside) or is_constant(inside.mean(dtype=np.float64), inside.var(dtype=np.float64), len(inside)):
            return np.zeros_like(patch)
        return ((patch - inside.mean()) / inside.std() / CLIP).clip(-1, 1) * where


def _scans(folder: Path) -> list[Scan]:
    """Return the files of all scans in a folder of either layout (see LAYOUTS), sorted by path.

    Raises:
        ConfigError: There are no scans, a file of a scan is absent, or two scans have the same name.
    """
    files = [path for path in visible_files(folder) if path.name.endswith((".nii", ".nii.gz"))]
    images = [path for path in files if path.parent == folder / "imagesTr"]
    if images:
        scans = [Scan([image], folder / "labelsTr" / image.name) for image in images]
    else:
        scans = [_brats_scan(path) for path in files if "_seg.nii" in path.name]
    require(bool(scans), f"dataset.path={folder} has no scans: set it to a folder with {LAYOUTS}")
    masks: dict[str, Path] = {}
    for scan in scans:
        for path in (*scan.images, scan.mask):
            require(
                path.is_file(),
                f"{path} does not exist: each scan needs a mask and its modalities, so add the file or remove the scan",
            )
        name = scan.mask.name.partition(".nii")[0]
        require(name not in masks, f"{masks.get(name)} and {scan.mask} are two files of one scan: remove one of them")
        masks[name] = scan.mask
    return scans


def _brats_scan(mask: Path) -> Scan:
    """Return the scan of a mask file <scan>_seg.nii.gz: the paths of its modalities, <scan>_flair.nii.gz and so on.

    They are in the order of SUFFIXES.
    """
    scan, _, ending = mask.name.rpartition("_seg")
    return Scan([mask.with_name(f"{scan}_{name}{ending}") for name in SUFFIXES], mask)
