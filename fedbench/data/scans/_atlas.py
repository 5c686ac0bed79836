"""Grey and white matter of an average head: axial slices of the MNI152 template in the package nilearn.

Fonov et al., NeuroImage 54(1), 2011: the average of 152 registered brains (nonlinear, symmetric, 2009a), here in voxels
of 1 mm.  Positions are MNI's: mm to the right, to the front and up from the anterior commissure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.ndimage import gaussian_filter, map_coordinates

from fedbench.core.options import ConfigError

CENTRE = (0.0, -18.0)  # of a slice, mm to the right and to the front
REACH = 100.0  # mm from the centre to the border of a slice: the brain is 140 mm wide and 175 mm long
LOWEST, HIGHEST = 0.0, 45.0  # mm, the range of used slices: those with ventricles, and those above them


@dataclass(frozen=True)
class Atlas:
    """The MNI152 template: maps [3, X, Y, Z] of grey matter, white matter and brain, and the matrix from mm to voxels.

    Attributes:
        maps: For each voxel the fractions of grey and of white matter, and 1 in the brain, else 0, [3, X, Y, Z]
            float32.
        to_voxel: Matrix from positions in mm to voxel indices [4, 4].
    """

    maps: np.ndarray
    to_voxel: np.ndarray

    def slice(self, height: float, points: np.ndarray) -> np.ndarray:
        """Return the three tissue maps in a horizontal slice, seen from above with the front at the top.

        Each pixel is about the mean of its area.

        Args:
            height: Position of the slice in mm.
            points: Coordinates of the pixels, down and right of CENTRE (the middle of a slice, right and front in mm)
                in units of REACH (100 mm), from -1 to 1, [2, S, S].

        Returns:
            The fractions of grey matter, of white matter and of the brain in each pixel, [3, S, S].
        """
        right, front = CENTRE[0] + REACH * points[1], CENTRE[1] - REACH * points[0]
        # positions [4, pixels], with a 1 for the shift in the matrix
        mm = np.stack([right, front, np.full_like(right, height), np.ones_like(right)]).reshape(4, -1)
        x, y, z = (self.to_voxel @ mm)[:3]  # voxels
        level = int(np.clip(np.rint(z[0]), 0, self.maps.shape[3] - 1))  # the nearest slice; z is equal for all pixels
        pixel = 2 * REACH / len(right) * abs(self.to_voxel[0, 0])  # in voxels, which are cubes
        # blurred by about the width of a pixel, which stands for the mean of its area
        level_maps = gaussian_filter(self.maps[..., level], (0, 0.4 * pixel, 0.4 * pixel))
        # Linear interpolation (order=1) between voxels.
        return np.stack([map_coordinates(m, [x, y], order=1) for m in level_maps]).reshape(3, *right.shape)


def mni152() -> Atlas:
    """Return the MNI152 template that nilearn contains, in voxels of 1 mm; raise ConfigError if nilearn is missing."""
    try:
        from nilearn import datasets  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError(
            "dataset.anatomy=mni152 needs nilearn, which has the template: run pip install nilearn"
        ) from error
    grey = datasets.load_mni152_gm_template(resolution=1)
    white = datasets.load_mni152_wm_template(resolution=1)
    head = datasets.load_mni152_template(resolution=1)
    maps = [np.asarray(image.dataobj, np.float32) for image in (grey, white, head)]
    maps[2] = (maps[2] > 0).astype(np.float32)  # 1 in the brain: the template is 0 outside of it
    return Atlas(np.stack(maps).clip(0, 1), to_voxel=np.linalg.inv(head.affine))  # affine: from voxels to mm
