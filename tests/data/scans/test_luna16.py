"""Volumes and LUNA16's patches, from a folder made here."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest

from fedbench.core.options import ConfigError
from fedbench.data.scans._volumes import read_mhd
from fedbench.data.scans.luna16 import Luna16

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
        ({"DimSize": "4 3 9"}, "imply 216 bytes, but v.raw has 48"),
        ({"DimSize": "32767 32767 32767"}, r"imply 70,362,301,923,326 bytes, but v.raw has 48"),
        ({"DimSize": "4 -3 -2"}, "DimSize must be three numbers"),
        ({"DimSize": "24"}, "DimSize must be three numbers"),
        ({"ElementSpacing": "1 0 1"}, "ElementSpacing must be three numbers > 0"),
        ({"Offset": "1 0"}, "and Offset three numbers"),
        ({"ElementType": "MET_OTHER"}, "cannot be read as a MetaImage"),
        ({"ElementDataFile": "none.raw"}, "cannot be read as a MetaImage"),
        ({"TransformMatrix": "2 0 0 0 1 0 0 0 1"}, "three perpendicular directions of length 1"),
        ({"TransformMatrix": "1 0 0 1"}, "three perpendicular directions of length 1"),
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
    with pytest.raises(ConfigError, match=r"set dataset\.path to"):
        Luna16(str(tmp_path)).load()
    with pytest.raises(ConfigError, match=r"candidates\.csv or candidates_V2\.csv, and neither exists"):
        Luna16(str(tmp_path), str(tmp_path)).load()
    with pytest.raises(ConfigError, match="with low < high"):
        Luna16(str(tmp_path), window=[1, 0])
    (tmp_path / "candidates.csv").write_text("seriesuid,coordX\na,1\n")
    with pytest.raises(ConfigError, match="no candidate has a scan"):
        Luna16(str(tmp_path), str(tmp_path)).load()


STORED = [  # axes of the values z, y, x as stored; the TransformMatrix, a row for each of x, y, z
    (lambda v: v[:, ::-1, ::-1], "-1 0 0 0 -1 0 0 0 1", (24.5 - 10, 19.5 - 20, -30)),  # LUNA16's mirrored scans
    (lambda v: v[::-1], "1 0 0 0 1 0 0 0 -1", (-10, -20, 8 - 30)),
    (lambda v: v.transpose(0, 2, 1)[:, ::-1], "0 1 0 -1 0 0 0 0 1", (24.5 - 10, -20, -30)),  # turned by 90 degrees
]


@pytest.mark.parametrize(("stored", "matrix", "offset"), STORED)
def test_a_scan_gives_the_same_patches_however_it_is_stored(tmp_path: Path, stored, matrix: str, offset: tuple) -> None:
    where = folder(tmp_path)
    wanted = Luna16(str(tmp_path / "d"), str(where), size=8, balance=False).load()
    path = where / "subset0" / "a.mhd"
    plain = read_mhd(path)
    written(path, stored(plain.values), TransformMatrix=matrix, Offset=" ".join(map(str, offset)))
    found = Luna16(str(tmp_path / "d"), str(where), size=8, balance=False).load()
    np.testing.assert_array_equal(found.inputs, wanted.inputs)
    at = np.array([-10 + 0.5 * 25, -20 + 0.5 * 20, -30 + 2 * 2.0])
    volume = read_mhd(path)
    assert volume.values[tuple(volume.voxel(at))] == plain.values[2, 20, 25]


def test_an_oblique_scan_is_read(tmp_path: Path) -> None:
    """Turned by 30 degrees about z; the position of voxel 3, 2, 1 by hand: origin + direction (spacing x index)."""
    c, s = np.cos(np.pi / 6), np.sin(np.pi / 6)
    rows = np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]])  # a row for each axis
    values = np.arange(24).reshape(2, 3, 4)
    volume = read_mhd(written(tmp_path / "v.mhd", values, TransformMatrix=" ".join(map(str, rows.ravel()))))
    at = np.array(ORIGIN) + rows.T @ (np.array(SPACING) * [3, 2, 1])
    assert volume.values[tuple(volume.voxel(at))] == values[1, 2, 3]


def test_candidates_keep_the_order_of_their_table(tmp_path: Path) -> None:
    """Scans alternate, and each sample is the patch, label and scan of its row, with and without a draw."""
    places = [("b", 1, 5, 6, 1), ("a", 0, 7, 8, 0), ("b", 2, 9, 10, 0), ("a", 3, 11, 12, 1), ("b", 4, 13, 14, 1)]
    folder(tmp_path)
    lines = [f"{uid},{-10 + 0.5 * x},{-20 + 0.5 * y},{-30 + 2 * z},{c}" for uid, z, y, x, c in places]
    (tmp_path / "candidates.csv").write_text("\n".join(["seriesuid,coordX,coordY,coordZ,class", *lines]) + "\n")
    scans = {uid: read_mhd(tmp_path / "subset0" / f"{uid}.mhd").values for uid in "ab"}
    centres = [((np.clip(scans[uid][z, y, x], -1000, 400) + 1000) / 700 - 1) for uid, z, y, x, _ in places]
    found = Luna16(str(tmp_path / "d"), str(tmp_path), size=8, balance=False, by_patient=True).load()
    np.testing.assert_allclose(np.asarray(found.inputs)[:, 0, 4, 4], centres, atol=1e-6)
    assert found.targets.tolist() == [1, 0, 0, 1, 1] and found.subject is not None
    assert found.subject.tolist() == [1, 0, 1, 0, 1]
    drawn = Luna16(str(tmp_path / "d"), str(tmp_path), size=8, by_patient=True).load()
    rows = [int(np.abs(np.array(centres) - v).argmin()) for v in np.asarray(drawn.inputs)[:, 0, 4, 4]]
    assert rows == sorted(rows) and len(rows) == 4
    assert drawn.targets.tolist() == [places[row][4] for row in rows]


def test_masks_are_no_scans(tmp_path: Path) -> None:
    where = folder(tmp_path)
    wanted = Luna16(str(tmp_path / "d"), str(where), size=8).load()
    for name in ("seg-lungs-LUNA16", "lung_masks", ".cache"):
        (where / name).mkdir()
        written(where / name / "a.mhd", np.full((5, 40, 50), 3))
    np.testing.assert_array_equal(Luna16(str(tmp_path / "d"), str(where), size=8).load().inputs, wanted.inputs)
    (where / "subset1").mkdir()
    written(where / "subset1" / "a.mhd", np.zeros((5, 40, 50)))
    with pytest.raises(ConfigError, match=r"subset0/a\.mhd and .*subset1/a\.mhd are two files of one scan"):
        Luna16(str(tmp_path / "d"), str(where)).load()


def test_eight_bits_are_a_mask(tmp_path: Path) -> None:
    where = folder(tmp_path)
    path = written(where / "subset0" / "a.mhd", np.zeros((5, 40, 50)), ElementType="MET_UCHAR")
    path.with_suffix(".raw").write_bytes(bytes(5 * 40 * 50))
    with pytest.raises(ConfigError, match=r"a\.mhd has 8-bit values, so it is a mask and not a scan"):
        Luna16(str(tmp_path / "d"), str(where), size=8, balance=False).load()


def test_a_packed_scan_is_not_unpacked_beyond_its_size(tmp_path: Path) -> None:
    path = written(tmp_path / "v.mhd", np.zeros((2, 3, 4)), packed=True)
    path.with_suffix(".raw").write_bytes(zlib.compress(bytes(10_000_000)))
    with pytest.raises(ConfigError, match=r"v\.raw has another size after unpacking"):
        read_mhd(path)
