"""Generated brain scans of four modalities with a tumour each, and its mask: a stand-in for BraTS that needs no file.

A scan is one slice, skull-stripped: an ellipse of grey matter, white matter with a folded boundary, two ventricles and
fluid around, all bent by a smooth random field.  Tissues have the contrast that they have in FLAIR, T1, T1 with
contrast agent and T2 (in the order of the Medical Segmentation Decathlon's first task).  A tumour has a core, a rim
that only T1c shows well, and oedema that FLAIR and T2 show; its outline is a random Fourier series, and it is blended
into the tissue by a factor of its own.  Small spots, bright in FLAIR and T2 or (vessels) in T1c, are no tumour.
Everything is blurred, multiplied by a bias field per modality and made noisy, then standardized inside the brain.
With anatomy=mni152 a slice of the MNI152 template, bent for each scan, is in the ellipse's place (_atlas.py).

The tissue values are chosen, not measured: scores on this set say nothing of scores on patients.

Letters: n scans, S pixels a side, M modalities.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from scipy.ndimage import gaussian_filter

from fedbench.core.constant import deviation
from fedbench.core.options import Count, NonNegativeInt, require
from fedbench.data.base import Arrays
from fedbench.data.scans import _atlas
from fedbench.data.scans._channels import lacking

MODALITIES = ("flair", "t1", "t1c", "t2")
#                        flair  t1    t1c   t2
FLUID = np.array(       [0.20, 0.25, 0.25, 1.00])  # fmt: skip
GREY = np.array(        [0.62, 0.65, 0.68, 0.62])  # fmt: skip
WHITE = np.array(       [0.50, 0.95, 0.98, 0.42])  # fmt: skip
CORE = np.array(        [0.60, 0.35, 0.35, 0.90])  # fmt: skip
RIM = np.array(         [0.80, 0.60, 1.30, 0.75])  # fmt: skip
OEDEMA = np.array(      [0.95, 0.62, 0.65, 0.85])  # fmt: skip
SPOT = np.array(        [0.95, 0.80, 0.82, 0.85])  # of white matter, no tumour  # fmt: skip
VESSEL = np.array(      [0.50, 0.80, 1.25, 0.40])  # fmt: skip
NOISE = 0.1  # standard deviation, where white matter in T1 is 0.95
CONTRAST = 0.45  # least factor by which a tumour is blended in
CLIP = 3.0  # standard deviations that become 1


class Tumours:
    """inputs [n, 4, S, S] float32 in [-1, 1], 0 outside the brain; targets [n, S, S] uint8, 1 in a tumour.

    Args:
        n: Number of scans.
        size: S.
        lack: Modality that is missing at the first clients, see data/scans/_channels.py.
        lack_clients: How many clients miss it; None: all.
        sites: Hospitals as natural silos.  Their scanners differ in contrast, noise and bias, their tumours in size.
        seed: Seed of all draws.
        anatomy: Source of the tissue; mni152 needs nilearn.
    """

    def __init__(
        self,
        n: Count = 400,
        size: Count = 64,
        lack: str | None = None,
        lack_clients: Count | None = 2,
        sites: NonNegativeInt = 0,
        seed: NonNegativeInt = 0,
        anatomy: Literal["generated", "mni152"] = "generated",
    ):
        require(size >= 16, f"dataset.size={size} must be at least 16 pixels")
        self.n, self.size, self.sites, self.seed, self.anatomy = n, size, sites, seed, anatomy
        self.fit = lacking(lack, MODALITIES, lack_clients)

    def load(self) -> Arrays:
        """Generate the set; ConfigError where its anatomy is not installed."""
        atlas = _atlas.mni152() if self.anatomy == "mni152" else None
        scans = np.empty((self.n, len(MODALITIES), self.size, self.size), np.float32)
        masks = np.empty((self.n, self.size, self.size), np.uint8)
        for i in range(self.n):
            site = i % self.sites if self.sites else None
            scans[i], parts = self._scan(np.random.default_rng([self.seed, i]), site, atlas)
            masks[i] = parts > 0
        return Arrays(
            inputs=scans,
            targets=masks,
            split=np.zeros(self.n, np.int8),
            num_classes=2,
            task="segmentation",
            class_names=["background", "tumour"],
            domain=np.arange(self.n) % self.sites if self.sites else None,
            domain_names=[f"site {s}" for s in range(self.sites)] if self.sites else None,
            fit=self.fit,
        ).check()

    def _scan(
        self, rng: np.random.Generator, site: int | None, atlas: _atlas.Atlas | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return one standardized scan [4, S, S] and its tumour [S, S]: 1 core, 2 rim, 3 oedema."""
        gain, gamma, noisier, larger = scanner(self.seed, site)
        tissue, brain = anatomy(rng, self.size) if atlas is None else real_anatomy(rng, self.size, atlas)
        inner = gaussian_filter(brain.astype(float), self.size / 32) > 0.95
        parts = tumour(rng, inner, larger)  # [S, S]
        factor = rng.uniform(CONTRAST, 1)
        for part, value in ((1, CORE), (2, RIM), (3, OEDEMA)):
            where = parts == part
            tissue[:, where] += factor * (value[:, None] - tissue[:, where])
        field = rng.standard_normal((4, self.size, self.size))
        field = np.stack([smooth(f, self.size / 4) for f in field])  # [4, S, S], of unit deviation
        scan = gain[:, None, None] * gaussian_filter(tissue, (0, 0.6, 0.6)).clip(0) ** gamma * np.exp(0.12 * field)
        scan = scan + noisier * NOISE * rng.standard_normal(scan.shape)
        inside = scan[:, brain]  # [4, pixels]
        z = (scan - inside.mean(1)[:, None, None]) / deviation(inside, 1)[:, None, None]
        return (z / CLIP).clip(-1, 1) * brain, parts


def scanner(seed: int, site: int | None) -> tuple[np.ndarray, float, float, float]:
    """A site's gain per modality [4], gamma, factor of the noise and factor of the tumours' size; all 1 for none."""
    if site is None:
        return np.ones(4), 1.0, 1.0, 1.0
    rng = np.random.default_rng([seed, 1 << 31, site])
    return rng.uniform(0.7, 1.3, 4), rng.uniform(0.6, 1.6), rng.uniform(0.6, 1.8), rng.uniform(0.75, 1.3)


def smooth(field: np.ndarray, sigma: float) -> np.ndarray:
    """White noise [S, S] made smooth, with unit deviation."""
    field = gaussian_filter(field, sigma)
    return field / field.std()


def coordinates(size: int) -> np.ndarray:
    """Of the pixels' centres, down and right, from -1 to 1.  # [2, S, S]"""
    line = (np.arange(size) + 0.5) / size * 2 - 1
    return np.stack(np.meshgrid(line, line, indexing="ij"))


def ellipse(at: np.ndarray, centre: tuple[float, float], axes: tuple[float, float], turn: float = 0.0) -> np.ndarray:
    """Below 1 inside: distance from the centre in units of the half axes.  at [2, S, S].  # [S, S]"""
    y, x = at[0] - centre[0], at[1] - centre[1]
    c, s = np.cos(turn), np.sin(turn)
    return np.hypot((c * y + s * x) / axes[0], (c * x - s * y) / axes[1])


def anatomy(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Tissue values without a tumour [4, S, S], and where the brain is [S, S] bool."""
    at = coordinates(size)
    bend = np.stack([smooth(f, size / 8) for f in rng.standard_normal((2, size, size))])
    at = at + 0.03 * bend + rng.uniform(-0.05, 0.05, (2, 1, 1))
    tall, wide, turn = rng.uniform(0.82, 0.94), rng.uniform(0.66, 0.78), rng.uniform(-0.2, 0.2)
    radius = ellipse(at, (0, 0), (tall, wide), turn)
    brain = radius < 1
    angle = np.arctan2(at[0], at[1])
    folds = 0.05 * np.sin(rng.integers(9, 14) * angle + rng.uniform(0, 7)) + 0.03 * smooth(
        rng.standard_normal((size, size)), size / 32
    )
    grey, white = radius < 0.93 + folds / 2, radius < 0.76 + folds
    open_, apart = rng.uniform(0.7, 1.5), rng.uniform(0.11, 0.16)  # of the ventricles
    fluid = np.zeros_like(brain)
    for side in (-1, 1):
        lean = side * rng.uniform(0.1, 0.35) + turn
        fluid |= ellipse(at, (-0.02, side * apart), (0.3 * rng.uniform(0.8, 1.2), 0.06 * open_), lean) < 1
    fluid |= (np.abs(at[1]) < 0.02) & (np.abs(at[0]) > 0.45)  # the fissure
    tissue = np.where(grey, GREY[:, None, None], FLUID[:, None, None])
    tissue = np.where(white, WHITE[:, None, None], tissue)
    tissue = np.where(fluid, FLUID[:, None, None], tissue)
    return with_spots(rng, at, tissue, white & ~fluid) * brain, brain


def real_anatomy(rng: np.random.Generator, size: int, atlas: _atlas.Atlas) -> tuple[np.ndarray, np.ndarray]:
    """The same of a slice of the atlas, mirrored, turned, stretched and bent, with ventricles of another width."""
    at = coordinates(size)
    bend = np.stack([smooth(f, size / 8) for f in rng.standard_normal((2, size, size))])
    y, x = at + 0.03 * bend + rng.uniform(-0.05, 0.05, (2, 1, 1))
    turn, tall, wide = rng.uniform(-0.2, 0.2), rng.uniform(0.92, 1.08), rng.uniform(0.92, 1.08)
    y, x = (np.cos(turn) * y + np.sin(turn) * x) / tall, (np.cos(turn) * x - np.sin(turn) * y) / wide
    x = x * rng.choice((-1, 1))
    x = x * (1 - rng.uniform(-0.4, 0.4) * np.exp(-(x**2 + (y - 0.05) ** 2) / 0.25**2))  # > 0: wider in the middle
    grey, white, inside = atlas.slice(rng.uniform(_atlas.LOWEST, _atlas.HIGHEST), np.stack([y, x]))  # [S, S] each
    share = np.stack([grey, white, (1 - grey - white).clip(0)]) ** 2  # one head has sharper borders than their mean
    values = np.stack([GREY, WHITE, FLUID]) * rng.normal(1, 0.04, (3, 4))  # of this patient  [3, 4]
    tissue = np.tensordot(values.T, share / share.sum(0), 1)  # [4, S, S]
    brain = inside > 0.5
    return with_spots(rng, at, tissue, brain & (white > 0.7 * white.max())) * brain, brain


def with_spots(rng: np.random.Generator, at: np.ndarray, tissue: np.ndarray, where: np.ndarray) -> np.ndarray:
    """tissue [4, S, S] with small bright spots and vessels around some points of `where` [S, S].  at [2, S, S]."""
    rows, columns = np.nonzero(where)
    for value, most in ((SPOT, 6), (VESSEL, 5)):
        for k in rng.integers(len(rows), size=rng.integers(0, most)):
            centre = (at[0][rows[k], columns[k]], at[1][rows[k], columns[k]])
            spot = ellipse(at, centre, tuple(rng.uniform(0.025, 0.07, 2)), rng.uniform(0, 3)) < 1
            tissue = np.where(spot, value[:, None, None], tissue)
    return tissue


def tumour(rng: np.random.Generator, inside: np.ndarray, larger: float) -> np.ndarray:
    """A tumour where `inside` [S, S] allows: 0 none, 1 core, 2 rim, 3 oedema.  # [S, S] uint8

    Its radius is log-normal, 5 to 26 pixels in a hundred of the side times `larger`; it is never empty.
    """
    size = len(inside)
    at, (rows, columns) = coordinates(size), np.nonzero(inside)
    k = rng.integers(len(rows))
    y, x = at[0] - at[0][rows[k], columns[k]], at[1] - at[1][rows[k], columns[k]]
    radius = larger * np.clip(rng.lognormal(np.log(0.29), 0.35), 0.1, 0.52)
    angle, outline = np.arctan2(y, x), np.ones_like(x)
    for order in range(1, 6):
        outline = outline + rng.normal(0, 0.28 / order) * np.cos(order * angle + rng.uniform(0, 2 * np.pi))
    ragged = 0.08 * smooth(rng.standard_normal((size, size)), size / 32)
    r = np.hypot(y, x) / (radius * outline.clip(0.35)) + ragged
    rim = rng.uniform(0.45, 0.8)
    core = rim * rng.uniform(0.3, 0.85)
    mask = np.select([r < core, r < rim, r < 1], [1, 2, 3], 0) * inside
    mask[rows[k], columns[k]] = 1
    return mask.astype(np.uint8)
