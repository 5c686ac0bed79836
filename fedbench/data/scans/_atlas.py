"""Grey and white matter of an average head: axial slices of the MNI152 template, which the package nilearn brings.

Fonov et al., NeuroImage 54(1), 2011: 152 brains brought to one shape and averaged (nonlinear, symmetric, 2009a), here
in voxels of 1 mm.  Millimetres are MNI's: to the right, to the front and up, from the anterior commissure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.ndimage import gaussian_filter, map_coordinates

from fedbench.core.options import ConfigError

CENTRE = (0.0, -18.0)  # of a slice, mm to the right and to the front
REACH = 100.0  # mm from there to a slice's border: the brain is 140 wide and 175 long
LOWEST, HIGHEST = 0.0, 45.0  # mm: slices with ventricles, and those above them


@dataclass(frozen=True)
class Atlas:
    """maps [3, X, Y, Z] float32 in [0, 1]: shares of grey and of white matter, and whether it is brain; to_voxel
    [4, 4]: voxel indices of millimetres."""

    maps: np.ndarray
    to_voxel: np.ndarray

    def slice(self, height: float, at: np.ndarray) -> np.ndarray:
        """The maps at points `at` [2, S, S], down and right in units of REACH, of the slice `height` mm up.

        Seen from above with the front at the top, each pixel the mean of about its own area.  # [3, S, S]
        """
        right, front = CENTRE[0] + REACH * at[1], CENTRE[1] - REACH * at[0]
        mm = np.stack([right, front, np.full_like(right, height), np.ones_like(right)]).reshape(4, -1)
        x, y, z = (self.to_voxel @ mm)[:3]  # voxels
        level = int(np.clip(np.rint(z[0]), 0, self.maps.shape[3] - 1))
        pixel = 2 * REACH / len(right) * abs(self.to_voxel[0, 0])  # in voxels
        level_maps = gaussian_filter(self.maps[..., level], (0, 0.4 * pixel, 0.4 * pixel))
        shares = [map_coordinates(m, [x, y], order=1) for m in level_maps]
        return np.stack(shares).reshape(3, *right.shape)


def mni152() -> Atlas:
    """The template; ConfigError where nilearn is missing."""
    try:
        from nilearn import datasets  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError(
            "dataset.anatomy=mni152 takes the template that nilearn brings, which cannot be imported here: "
            "pip install nilearn"
        ) from error
    grey, white, head = (
        load(resolution=1)
        for load in (datasets.load_mni152_gm_template, datasets.load_mni152_wm_template, datasets.load_mni152_template)
    )
    maps = [np.asarray(image.dataobj, np.float32) for image in (grey, white, head)]
    maps[2] = (maps[2] > 0).astype(np.float32)  # it is 0 outside of the brain
    return Atlas(np.stack(maps).clip(0, 1), np.linalg.inv(head.affine))
