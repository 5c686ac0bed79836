"""Volumes and LUNA16's patches, from a folder made here."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest

from fedbench.core.options import ConfigError
from fedbench.data._volumes import read_mhd
from fedbench.data.luna16 import Luna16

SPACING, ORIGIN = (0.5, 0.5, 2.0), (-10.0, -20.0, -30.0)


def written(path: Path, values: np.ndarray, packed: bool = False, **more: str) -> Path:
    depth, height, width = values.shape
    raw = values.astype("<i2").tobytes()
    path.with_suffix(".raw").write_bytes(zlib.compress(raw) if packed else raw)
    header = {"ObjectType": "Image", "NDims": "3", "CompressedData": str(packed), "Offset": " ".join(map(str, ORIGIN)),
              "ElementSpacing": " ".join(map(str, SPACING)), "DimSize": f"{width} {height} {depth}",
              "ElementType": "MET_SHORT", "ElementDataFile": path.with_suffix(".raw").name} | more  # fmt: skip
    path.write_text("".join(f"{k} = {v}\n" for k, v in header.items()))
    return path


def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    lines = ["seriesuid,coordX,coordY,coordZ,class"]
    for uid in ("a", "b"):
        (tmp_path / "subset0").mkdir(exist_ok=True)
        written(tmp_path / "subset0" / f"{uid}.mhd", rng.integers(-1200, 600, (5, 40, 50)))
        lines += [f"{uid},{-10 + 0.5 * x},{-20 + 0.5 * y},{-30 + 2 * z},{c}"
                  for z, y, x, c in ((2, 20, 25, 1), (1, 3, 4, 0), (4, 39, 49, 0), (0, 20, 20, 0))]  # fmt: skip
    (tmp_path / "candidates.csv").write_text("\n".join([*lines, "absent,0,0,0,1"]) + "\n")
    return tmp_path


@pytest.mark.parametrize("packed", [False, True])
def test_a_metaimage(tmp_path: Path, packed: bool) -> None:
    values = np.arange(24).reshape(2, 3, 4) - 12
    volume = read_mhd(written(tmp_path / "v.mhd", values, packed))
    np.testing.assert_array_equal(volume.values, values)
    assert volume.voxel(np.array([-9.0, -19.6, -28.1])).tolist() == [1, 1, 2]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"DimSize": "4 3 9"}, "24 values for"),
        ({"ElementType": "MET_OTHER"}, "cannot be read as a MetaImage"),
        ({"ElementDataFile": "none.raw"}, "cannot be read as a MetaImage"),
        ({"TransformMatrix": "-1 0 0 0 1 0 0 0 1"}, "turns or mirrors"),
    ],
)
def test_a_metaimage_that_does_not_fit(tmp_path: Path, more: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_mhd(written(tmp_path / "v.mhd", np.zeros((2, 3, 4)), **more))


def test_patches_are_cut_around_candidates(tmp_path: Path) -> None:
    where = folder(tmp_path)
    arrays = Luna16(str(tmp_path / "d"), str(where), size=8, balance=False, by_patient=True).load()
    x = np.asarray(arrays.inputs)
    assert x.shape == (8, 3, 8, 8) and arrays.targets.tolist() == [1, 0, 0, 0] * 2
    assert arrays.subject is not None and arrays.subject.tolist() == [0] * 4 + [1] * 4
    scan = read_mhd(where / "subset0" / "a.mhd").values
    wanted = ((scan[2, 16:24, 21:29].clip(-1000, 400) + 1000) / 700 - 1).astype(np.float32)
    np.testing.assert_allclose(x[0, 1], wanted, atol=1e-6)
    assert (x[1, 0, 0] == -1).all() and (x[1, 0, 1:] != -1).any(), "row -1 is beyond the border"


def test_others_are_drawn_and_the_patches_cached(tmp_path: Path) -> None:
    where = folder(tmp_path)
    first = Luna16(str(tmp_path / "d"), str(where)).load()
    assert np.bincount(first.targets).tolist() == [2, 2]
    assert len(list((tmp_path / "d" / "cache").glob("luna16-*.npz"))) == 1
    assert Luna16(str(tmp_path / "d"), str(where)).load().digest == first.digest


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs dataset\.path"):
        Luna16(str(tmp_path)).load()
    with pytest.raises(ConfigError, match="is not there"):
        Luna16(str(tmp_path), str(tmp_path)).load()
    with pytest.raises(ConfigError, match="the lower first"):
        Luna16(str(tmp_path), window=[1, 0])
    (tmp_path / "candidates.csv").write_text("seriesuid,coordX\na,1\n")
    with pytest.raises(ConfigError, match="no scan of a candidate"):
        Luna16(str(tmp_path), str(tmp_path)).load()
