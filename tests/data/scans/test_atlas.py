"""Slices of a template's brain: where a pixel comes from, and scans drawn over a small head that stands for MNI152."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from fedbench.core.options import ConfigError
from fedbench.data.base import Arrays
from fedbench.data.scans import _atlas
from fedbench.data.scans.tumours import FLUID, GREY, WHITE, Tumours, atlas_anatomy, coordinates

AFFINE = np.array([[4.0, 0, 0, -98], [0, 4, 0, -134], [0, 0, 4, -72], [0, 0, 0, 1]])  # of voxels of 4 mm
INSTALLED = importlib.util.find_spec("nilearn") is not None


def head() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Grey matter, white matter and the brain of ellipsoids, with fluid between two halves.  # [50, 59, 48] each"""
    x, y, z = np.einsum("ij,jxyz->ixyz", AFFINE[:3], np.stack([*np.indices((50, 59, 48)), np.ones((50, 59, 48))]))
    radius = np.sqrt((x / 68) ** 2 + ((y + 18) / 86) ** 2 + (z / 75) ** 2)
    fluid = (np.abs(x) < 6) & (np.abs(y) < 20)
    white, grey = (radius < 0.75) & ~fluid, (radius >= 0.75) & (radius < 0.95)
    return grey.astype(float), white.astype(float), (radius < 1) * 0.8


@pytest.fixture(params=["a small head", "nilearn"])
def template(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `import nilearn` gives."""
    if request.param == "nilearn":
        if not INSTALLED:
            pytest.skip("nilearn, whose template this draws, is not installed")
        return request.param
    nilearn, datasets = ModuleType("nilearn"), ModuleType("nilearn.datasets")
    for name, values in zip(("gm_template", "wm_template", "template"), head(), strict=True):
        image = SimpleNamespace(dataobj=values, affine=AFFINE)
        setattr(datasets, f"load_mni152_{name}", lambda resolution, image=image: image)
    nilearn.datasets = datasets  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nilearn", nilearn)
    monkeypatch.setitem(sys.modules, "nilearn.datasets", datasets)
    return request.param


def scans(arrays: Arrays) -> np.ndarray:
    return np.asarray(arrays.inputs)


def test_a_pixel_comes_from_its_millimetres() -> None:
    """Of maps that are the place itself, in hundreds of mm: right, front and up; where blurring changes nothing."""
    x, y, z = np.einsum("ij,jxyz->ixyz", AFFINE[:3], np.stack([*np.indices((50, 59, 48)), np.ones((50, 59, 48))]))
    atlas = _atlas.Atlas(np.stack([x, y, z]).astype(np.float32) / 100, np.linalg.inv(AFFINE))
    at = 0.5 * coordinates(32)
    right, front, up = atlas.slice(20.0, at)
    np.testing.assert_allclose(right, at[1], atol=1e-3)
    np.testing.assert_allclose(front, -0.18 - at[0], atol=1e-3)
    np.testing.assert_allclose(up, 0.2, atol=1e-6)


def test_a_head_is_drawn_as_it_lies(template: str) -> None:
    """Fluid, grey and white matter of one slice, without a patient's own shape."""
    grey, white, brain = _atlas.mni152().slice(20.0, coordinates(64))
    assert 0.25 < (brain > 0.5).mean() < 0.5
    assert (grey + white)[brain < 0.1].max() < 0.4
    inside = brain > 0.5
    assert 0.2 < (white > 0.6)[inside].mean() < 0.8 and (grey > 0.6)[inside].mean() > 0.1
    rows, columns = np.nonzero(inside)
    assert np.ptp(rows) > 1.15 * np.ptp(columns), "a head is longer than wide"
    np.testing.assert_allclose(white, white[:, ::-1], atol=0.05)


def test_patients_differ_and_are_their_numbers(template: str) -> None:
    arrays = Tumours(n=8, anatomy="mni152").load()
    x = scans(arrays)
    assert x.shape == (8, 4, 64, 64) and x.dtype == np.float32 and x.min() >= -1 and x.max() <= 1
    np.testing.assert_array_equal(x[:3], scans(Tumours(n=3, anatomy="mni152").load()))
    assert not np.array_equal(x[:3], scans(Tumours(n=3).load())), "it is not the generated anatomy"
    brain = (x != 0).any(1)
    assert arrays.targets.any((1, 2)).all() and not arrays.targets[~brain].any()
    assert 0.2 < brain.mean() < 0.8 and not any(np.array_equal(brain[0], other) for other in brain[1:])


def test_tissues_have_their_values() -> None:
    """Of an atlas with grey matter in front, white in the middle and fluid behind, before tumour, bias and noise."""
    front = np.broadcast_to((np.arange(59) * 4 - 134)[:, None], (50, 59, 48))  # mm
    atlas = _atlas.Atlas(
        np.stack([front > 15, (front <= 15) & (front > -50), front < 1000]).astype(np.float32), np.linalg.inv(AFFINE)
    )
    drawn = [atlas_anatomy(np.random.default_rng(i), 64, atlas) for i in range(8)]
    for rows, value in (((4, 12), GREY), ((29, 35), WHITE), ((52, 60), FLUID)):
        patients = np.stack([np.median(tissue[:, slice(*rows), 16:48], (1, 2)) for tissue, _ in drawn])  # [8, 4]
        np.testing.assert_allclose(patients.mean(0), value, rtol=0.06)
        assert (patients.std(0) > 0.01 * value).all(), "patients differ"


def test_outside_of_the_brain_is_nothing(template: str) -> None:
    atlas = _atlas.mni152()
    for i in range(5):
        tissue, brain = atlas_anatomy(np.random.default_rng(i), 64, atlas)
        assert not tissue[:, ~brain].any() and (tissue[:, brain] > 0).all()


def test_small_scans_work(template: str) -> None:
    assert Tumours(n=20, size=16, anatomy="mni152", sites=2).load().targets.max() == 1


def test_where_nilearn_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nilearn", None)
    with pytest.raises(ConfigError, match=r"dataset\.anatomy=mni152 needs nilearn, .*pip install nilearn"):
        Tumours(anatomy="mni152").load()
    assert len(Tumours(n=1).load()) == 1
