"""Generated brain scans of four modalities, each with a tumour and its mask: a substitute for BraTS without files.

A scan is one skull-stripped slice: an ellipse of grey matter, white matter with a folded boundary, two ventricles and
surrounding fluid, deformed by a smooth random field.  Tissues have the contrast of FLAIR, T1, T1 with contrast agent
and T2 (in the order of the Medical Segmentation Decathlon's first task).  A tumour has a core, a rim that only T1c
shows well, and oedema that FLAIR and T2 show.  Its outline is a random Fourier series, and it is blended into the
tissue by a random factor.  Small spots, bright in FLAIR and T2 or (vessels) in T1c, are not tumours.
The scan is blurred, multiplied by a bias field per modality, made noisy, and standardized inside the brain.
With anatomy=mni152, the ellipse is replaced by a slice of the MNI152 template, deformed for each scan (_atlas.py).

The tissue values are chosen, not measured: scores on this set do not predict scores on patients.

Letters: n scans, S pixels a side, M modalities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from scipy.ndimage import gaussian_filter

from fedbench.core.constant import deviation
from fedbench.core.options import Count, NonNegativeInt, require
from fedbench.data.base import Arrays
from fedbench.data.scans import _atlas
from fedbench.data.scans._channels import missing_channel

MODALITIES = ("flair", "t1", "t1c", "t2")
# Brightness of each tissue in each modality.
#                        flair  t1    t1c   t2
FLUID = np.array(       [0.20, 0.25, 0.25, 1.00])  # fmt: skip
GREY = np.array(        [0.62, 0.65, 0.68, 0.62])  # fmt: skip
WHITE = np.array(       [0.50, 0.95, 0.98, 0.42])  # fmt: skip
CORE = np.array(        [0.60, 0.35, 0.35, 0.90])  # fmt: skip
RIM = np.array(         [0.80, 0.60, 1.30, 0.75])  # fmt: skip
OEDEMA = np.array(      [0.95, 0.62, 0.65, 0.85])  # fmt: skip
SPOT = np.array(        [0.95, 0.80, 0.82, 0.85])  # in white matter, not a tumour  # fmt: skip
VESSEL = np.array(      [0.50, 0.80, 1.25, 0.40])  # fmt: skip
NOISE = 0.1  # standard deviation, where white matter in T1 is 0.95
CONTRAST = 0.45  # smallest factor by which a tumour is blended in
CLIP = 3.0  # standard deviations that become 1


@dataclass
class Tumours:
    """Generated tumours: inputs [n, 4, S, S] float32 in [-1, 1], 0 outside the brain; targets [n, S, S], 1 in a tumour.

    Args:
        n: Number of scans.
        size: S, the side of the slice in pixels.
        lack: A modality that is missing at the first clients (`_channels.py`): flair, t1, t1c or t2.  None: none.
        lack_clients: How many clients lack it.  None: all.
        sites: Number of hospitals, the natural clients.  Scanners differ in contrast and noise, tumours in size.
        seed: Seed of the generator.
        anatomy: generated, or mni152, which needs nilearn.
    """

    n: Count = 400
    size: Count = 64
    lack: str | None = None
    lack_clients: Count | None = 2
    sites: NonNegativeInt = 0
    seed: NonNegativeInt = 0
    anatomy: Literal["generated", "mni152"] = "generated"

    def __post_init__(self) -> None:
        require(self.size >= 16, f"dataset.size={self.size} is too small: set it to at least 16 pixels")
        self._fit = missing_channel(self.lack, MODALITIES, self.lack_clients)

    def load(self) -> Arrays:
        """Return the generated scans and the masks of their tumours.

        Raises:
            ConfigError: nilearn is not installed.
        """
        atlas = _atlas.mni152() if self.anatomy == "mni152" else None
        scans = np.empty((self.n, len(MODALITIES), self.size, self.size), np.float32)
        masks = np.empty((self.n, self.size, self.size), np.uint8)
        for i in range(self.n):
            site = i % self.sites if self.sites else None
            scans[i], tissues = self._scan(np.random.default_rng([self.seed, i]), site, atlas)
            masks[i] = tissues > 0
        return Arrays(
            inputs=scans,
            targets=masks,
            split=np.zeros(self.n, np.int8),  # 0, training: there is no published split
            num_classes=2,
            task="segmentation",
            class_names=["background", "tumour"],
            domain=np.arange(self.n) % self.sites if self.sites else None,
            domain_names=[f"site {s}" for s in range(self.sites)] if self.sites else None,
            fit=self._fit,  # sets a missing modality to 0
        ).check()

    def _scan(
        self, rng: np.random.Generator, site: int | None, atlas: _atlas.Atlas | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Generate one scan: an anatomy with a tumour, seen by the scanner of its hospital.

        Args:
            rng: Random numbers of this scan.
            site: Its hospital.  None: there are no hospitals.
            atlas: The MNI152 template.  None: the anatomy is generated.

        Returns:
            The standardized scan [4, S, S] in [-1, 1], and its tumour [S, S] uint8: 0 none, 1 core, 2 rim, 3 oedema.
        """
        scanner = sample_scanner(self.seed, site)
        if atlas is None:
            tissue, brain = generated_anatomy(rng, self.size)
        else:
            tissue, brain = atlas_anatomy(rng, self.size, atlas)
        # the brain without its border: at 0.95, almost all pixels around are in the brain too
        inner = gaussian_filter(brain.astype(float), self.size / 32) > 0.95
        tumour = sample_tumour(rng, inner, scanner.tumour_size)  # [S, S]
        factor = rng.uniform(CONTRAST, 1)  # 1: the tissue is replaced by tumour; CONTRAST: the smallest factor
        for kind, value in ((1, CORE), (2, RIM), (3, OEDEMA)):  # value: brightness in each modality, [4]
            where = tumour == kind  # [S, S]
            tissue[:, where] += factor * (value[:, None] - tissue[:, where])
        white_noise = rng.standard_normal((4, self.size, self.size))
        bias = np.stack([smooth(field, self.size / 4) for field in white_noise])  # [4, S, S], of unit deviation
        blurred = gaussian_filter(tissue, (0, 0.6, 0.6)).clip(0)  # by 0.6 pixels in both directions
        # the bias field, an uneven brightness that changes slowly over the scan by about 12%
        scan = scanner.gain[:, None, None] * blurred**scanner.gamma * np.exp(0.12 * bias)
        scan = scan + scanner.noise * NOISE * rng.standard_normal(scan.shape)
        inside = scan[:, brain]  # [4, pixels]
        # deviation: the standard deviation along axis 1, or 1 if values are constant
        standardized = (scan - inside.mean(1)[:, None, None]) / deviation(inside, 1)[:, None, None]
        return (standardized / CLIP).clip(-1, 1) * brain, tumour  # CLIP (3) standard deviations become 1


class Scanner(NamedTuple):
    """The properties of a hospital's scans.

    Attributes:
        gain: Factor of each modality [4].
        gamma: Exponent of the contrast.
        noise: Factor of the noise.
        tumour_size: Factor of the radius of tumours.
    """

    gain: np.ndarray
    gamma: float
    noise: float
    tumour_size: float


def sample_scanner(seed: int, site: int | None) -> Scanner:
    """Return the properties of a hospital's scans, drawn at random by seed and hospital.

    Args:
        seed: Seed of the data set.
        site: The hospital.  None: there are no hospitals, and all factors are 1.
    """
    if site is None:
        return Scanner(gain=np.ones(4), gamma=1.0, noise=1.0, tumour_size=1.0)
    rng = np.random.default_rng([seed, 1 << 31, site])  # 1 << 31 differs from all indices of scans
    return Scanner(
        gain=rng.uniform(0.7, 1.3, 4),
        gamma=rng.uniform(0.6, 1.6),
        noise=rng.uniform(0.6, 1.8),
        tumour_size=rng.uniform(0.75, 1.3),
    )


def smooth(field: np.ndarray, sigma: float) -> np.ndarray:
    """Turn white noise into a smooth random field.

    Args:
        field: White noise, [S, S].
        sigma: Width of the Gaussian filter in pixels.

    Returns:
        The filtered field with standard deviation 1, [S, S].
    """
    smoothed = gaussian_filter(field, sigma)
    return smoothed / smoothed.std()


def coordinates(size: int) -> np.ndarray:
    """Return the coordinates (down, right) of the centres of S x S pixels, from -1 to 1 over the image.  # [2, S, S]"""
    line = (np.arange(size) + 0.5) / size * 2 - 1
    return np.stack(np.meshgrid(line, line, indexing="ij"))


def ellipse(
    points: np.ndarray, centre: tuple[float, float], axes: tuple[float, float], turn: float = 0.0
) -> np.ndarray:
    """Return the distance of each point from the centre of an ellipse, in units of its half axes.

    Args:
        points: Coordinates (down, right) of the points, [2, S, S].
        centre: The centre, down and right.
        axes: The half axes.
        turn: The angle in radians by which the ellipse is rotated.

    Returns:
        Distances, [S, S], below 1 inside of the ellipse.
    """
    y, x = points[0] - centre[0], points[1] - centre[1]
    cos, sin = np.cos(turn), np.sin(turn)
    return np.hypot((cos * y + sin * x) / axes[0], (cos * x - sin * y) / axes[1])


def generated_anatomy(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Generate a slice of a brain without a tumour, from ellipses with folded boundaries.

    Lengths are in units of half the side of the slice.  They are chosen so that the slice resembles a brain.

    Args:
        rng: Random numbers.
        size: S, the side of the slice in pixels.

    Returns:
        Tissue values of each modality [4, S, S], and the mask of the brain [S, S] bool.
    """
    points = coordinates(size)  # [2, S, S], down and right, from -1 to 1
    bend = np.stack([smooth(f, size / 8) for f in rng.standard_normal((2, size, size))])  # a random deformation
    points = points + 0.03 * bend + rng.uniform(-0.05, 0.05, (2, 1, 1))
    tall, wide, turn = rng.uniform(0.82, 0.94), rng.uniform(0.66, 0.78), rng.uniform(-0.2, 0.2)
    radius = ellipse(points, (0, 0), (tall, wide), turn)
    brain = radius < 1
    # Grey matter ends at 0.93 of the radius and white matter at 0.76, both with folds.
    angle = np.arctan2(points[0], points[1])
    folds = 0.05 * np.sin(rng.integers(9, 14) * angle + rng.uniform(0, 7))  # 9 to 13 folds of the boundaries
    folds = folds + 0.03 * smooth(rng.standard_normal((size, size)), size / 32)
    grey, white = radius < 0.93 + folds / 2, radius < 0.76 + folds
    width, distance = rng.uniform(0.7, 1.5), rng.uniform(0.11, 0.16)  # of the ventricles
    fluid = np.zeros_like(brain)
    for side in (-1, 1):  # the left and the right ventricle, an ellipse each
        lean = side * rng.uniform(0.1, 0.35) + turn
        fluid |= ellipse(points, (-0.02, side * distance), (0.3 * rng.uniform(0.8, 1.2), 0.06 * width), lean) < 1
    fluid |= (np.abs(points[1]) < 0.02) & (np.abs(points[0]) > 0.45)  # the fissure
    # GREY, WHITE, FLUID: brightness of grey matter, white matter and fluid in each modality, [4]
    tissue = np.where(grey, GREY[:, None, None], FLUID[:, None, None])
    tissue = np.where(white, WHITE[:, None, None], tissue)
    tissue = np.where(fluid, FLUID[:, None, None], tissue)
    return add_spots(rng, points, tissue, white & ~fluid) * brain, brain


def atlas_anatomy(rng: np.random.Generator, size: int, atlas: _atlas.Atlas) -> tuple[np.ndarray, np.ndarray]:
    """Return a slice of the atlas without a tumour, mirrored, rotated, stretched and deformed at random.

    The size of the ventricles is random, too.  Lengths are in units of half the side of the slice.

    Args:
        rng: Random numbers.
        size: S, the side of the slice in pixels.
        atlas: The MNI152 template.

    Returns:
        Tissue values of each modality [4, S, S], and the mask of the brain [S, S] bool.
    """
    points = coordinates(size)  # [2, S, S], down and right, from -1 to 1
    bend = np.stack([smooth(f, size / 8) for f in rng.standard_normal((2, size, size))])  # a random deformation
    y, x = points + 0.03 * bend + rng.uniform(-0.05, 0.05, (2, 1, 1))
    turn, tall, wide = rng.uniform(-0.2, 0.2), rng.uniform(0.92, 1.08), rng.uniform(0.92, 1.08)
    y, x = (np.cos(turn) * y + np.sin(turn) * x) / tall, (np.cos(turn) * x - np.sin(turn) * y) / wide
    x = x * rng.choice((-1, 1))
    # wider or narrower in the middle, where the ventricles are
    x = x * (1 - rng.uniform(-0.4, 0.4) * np.exp(-(x**2 + (y - 0.05) ** 2) / 0.25**2))
    grey, white, inside = atlas.slice(rng.uniform(_atlas.LOWEST, _atlas.HIGHEST), np.stack([y, x]))  # [S, S] each
    share = np.stack([grey, white, (1 - grey - white).clip(0)]) ** 2  # sharper borders than in the mean of heads
    # brightness of grey matter, white matter and fluid in each modality, of this patient  [3, 4]
    values = np.stack([GREY, WHITE, FLUID]) * rng.normal(1, 0.04, (3, 4))
    tissue = np.tensordot(values.T, share / share.sum(0), 1)  # [4, S, S]
    brain = inside > 0.5
    # spots are in pixels of mostly white matter
    return add_spots(rng, points, tissue, brain & (white > 0.7 * white.max())) * brain, brain


def add_spots(rng: np.random.Generator, points: np.ndarray, tissue: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Return tissue [4, S, S] with small bright spots and vessels at some points of a mask.

    Args:
        rng: Random numbers.
        points: Coordinates (down, right) of the pixels, [2, S, S].
        tissue: Brightness of each modality, [4, S, S].
        where: The mask of pixels that may be centres, [S, S] bool.
    """
    rows, columns = np.nonzero(where)
    for value, end in ((SPOT, 6), (VESSEL, 5)):  # up to 5 spots and 4 vessels; value: brightness in each modality, [4]
        for k in rng.integers(len(rows), size=rng.integers(0, end)):  # k: a pixel of the mask
            centre = (points[0][rows[k], columns[k]], points[1][rows[k], columns[k]])
            spot = ellipse(points, centre, axes=tuple(rng.uniform(0.025, 0.07, 2)), turn=rng.uniform(0, 3)) < 1
            tissue = np.where(spot, value[:, None, None], tissue)
    return tissue


def sample_tumour(rng: np.random.Generator, inside: np.ndarray, scale: float) -> np.ndarray:
    """Return a random tumour [S, S] uint8: 0 none, 1 core, 2 rim, 3 oedema.  It is never empty.

    Args:
        rng: Random numbers.
        inside: The mask of allowed pixels [S, S].
        scale: Factor of the tumour's radius, which is log-normal, 5% to 26% of the side of the image.
    """
    size = len(inside)
    points, (rows, columns) = coordinates(size), np.nonzero(inside)
    k = rng.integers(len(rows))  # the pixel at the tumour's centre
    y, x = points[0] - points[0][rows[k], columns[k]], points[1] - points[1][rows[k], columns[k]]
    radius = scale * np.clip(rng.lognormal(np.log(0.29), 0.35), 0.1, 0.52)  # in coordinates, where the side is 2
    angle, outline = np.arctan2(y, x), np.ones_like(x)
    for order in range(1, 6):  # a random Fourier series around the centre
        outline = outline + rng.normal(0, 0.28 / order) * np.cos(order * angle + rng.uniform(0, 2 * np.pi))
    ragged = 0.08 * smooth(rng.standard_normal((size, size)), size / 32)
    distance = np.hypot(y, x) / (radius * outline.clip(0.35)) + ragged  # 1 at the outline; clip: it stays positive
    rim = rng.uniform(0.45, 0.8)  # where the rim ends and the oedema begins, as a fraction of the radius
    core = rim * rng.uniform(0.3, 0.85)  # where the core ends
    mask = np.select([distance < core, distance < rim, distance < 1], [1, 2, 3], 0) * inside
    mask[rows[k], columns[k]] = 1  # so that it is not empty
    return mask.astype(np.uint8)
