"""BraTS from NIfTI files, on a generated folder: which patch is cut, how it is scaled, and what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbench.core import digests
from fedbench.core.options import ConfigError
from fedbench.data.scans import _volumes
from fedbench.data.scans.brats17 import BraTS17

nibabel: Any = pytest.importorskip("nibabel", reason="NIfTI files are read by nibabel")
SHAPE = (40, 36, 6)


def write(folder: Path, name: str, volume: np.ndarray, mask: np.ndarray) -> None:
    for kind, values in (("imagesTr", volume), ("labelsTr", mask)):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(values.astype(np.float32), np.eye(4)), folder / kind / f"{name}.nii.gz")


def scan(seed: int, at: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Noise in a box of the volume, 0 around it; a tumour of 5 x 5 in slice at[2], of 3 x 3 in the next one below."""
    g = np.random.default_rng(seed)
    volume, mask = np.zeros((*SHAPE, 4)), np.zeros(SHAPE)
    volume[4:36, 4:32] = g.normal(100, 20, (32, 28, 6, 4))
    x, y, z = at
    mask[x - 2 : x + 3, y - 2 : y + 3, z] = 2
    mask[x - 1 : x + 2, y - 1 : y + 2, z - 1] = 4
    return volume, mask


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, at in enumerate([(20, 18, 3), (6, 30, 4), (30, 10, 5)]):
        write(tmp_path / "task", f"BRATS_{number:03}", *scan(number, at))
    return tmp_path / "task"


def data(folder: Path, **options: Any) -> BraTS17:
    return BraTS17(str(folder.parent), str(folder), **{"size": 16, **options})


def test_a_patch_of_the_slice_with_most_tumour(folder: Path) -> None:
    arrays = data(folder).load()
    assert arrays.inputs.shape == (3, 4, 16, 16) and arrays.targets.shape == (3, 16, 16)
    assert (arrays.targets.sum((1, 2)) == 25).all() and arrays.num_classes == 2
    first = arrays.targets[0]
    assert first[7:12, 7:12].all()  # most tumour from row 19 on: the patch begins at 11, and 18 is its row 7


def test_a_patch_lies_inside_the_scan(folder: Path) -> None:
    """The second tumour is at 4 to 8 and 28 to 32 of 40 x 36: the patch begins at 0 and at 20."""
    mask = data(folder).load().targets[1]
    assert mask[4:9, 8:13].all()


def test_each_modality_is_standardized_over_the_brain(folder: Path) -> None:
    volume, _ = scan(0, (20, 18, 3))
    patch = volume[11:27, 9:25, 3].transpose(2, 0, 1)
    found = data(folder).load().inputs[0]
    brain = (patch != 0).any(0)
    for p, f in zip(patch, found):
        z = (p - p[brain].mean()) / p[brain].std()
        np.testing.assert_allclose(f, (z / 3).clip(-1, 1) * brain, atol=1e-5)
    edge = data(folder).load().inputs[1]
    assert (edge[:, :4] == 0).all() and np.abs(edge).max() <= 1  # outside the brain


def test_the_released_codes_samples(folder: Path) -> None:
    """Three slices of a modality as channels, the mask of the first; the last slice's tumour is moved inwards."""
    arrays = data(folder, mode="official").load()
    assert arrays.inputs.shape == (12, 3, 16, 16) and arrays.domain_names == ["flair", "t1", "t1c", "t2"]
    assert arrays.domain is not None and arrays.domain.tolist() == [0, 1, 2, 3] * 3
    assert arrays.targets[:4].sum((1, 2)).tolist() == [9] * 4  # slice z - 1
    assert arrays.targets[8:].sum((1, 2)).tolist() == [0] * 4  # slices 3 to 5, the tumour being in 5 and 4
    volume, _ = scan(0, (20, 18, 3))
    patch = volume[11:27, 9:25, 2:5, 1].transpose(2, 0, 1)
    np.testing.assert_allclose(arrays.inputs[1], ((patch - patch.mean()) / patch.std() / 3).clip(-1, 1), atol=1e-5)


def test_a_modality_without_contrast_is_zero(folder: Path) -> None:
    """Its float32 mean is not its value exactly, and would leave 1 or -1 everywhere."""
    volume, mask = scan(3, (20, 18, 3))
    brain = volume[..., 0] != 0
    volume[brain, 1] = 80.1
    write(folder, "BRATS_003", volume, mask)
    found = data(folder).load().inputs[3]
    assert (found[1] == 0).all() and [float(abs(f).max()) for f in found[[0, 2, 3]]] == pytest.approx(
        [0.8] * 3, abs=0.3
    )
    official = data(folder, mode="official").load().inputs
    assert (official[13] == 0).all() and (official[12] != 0).any()


def test_clients_may_lack_a_channel(folder: Path) -> None:
    arrays = data(folder, lack="t1").load()
    assert arrays.fit is not None and arrays.fit.channel == 1 and arrays.fit.clients == 2  # type: ignore[attr-defined]


def test_patches_are_cut_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = data(folder).load()
    monkeypatch.setattr(BraTS17, "_cut", lambda *_: pytest.fail("cut again"))
    np.testing.assert_array_equal(data(folder).load().inputs, first.inputs)


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    for change, words in (
        ({"path": None}, r"set dataset\.path to"),
        ({"path": str(tmp_path / "none")}, r"none has no scans: set it to a folder with imagesTr and labelsTr"),
        ({"size": 39}, r"dataset\.size=39 must be at most"),
        ({"mode": "official", "lack": "t1"}, r"dataset\.lack=t1 needs modalities"),
    ):
        with pytest.raises(ConfigError, match=words):
            BraTS17(**{"data_dir": str(tmp_path), "path": str(folder), "size": 16, **change}).load()
    (folder / "labelsTr" / "BRATS_001.nii.gz").write_bytes(b"no volume")
    with pytest.raises(ConfigError, match="cannot be read as a NIfTI file"):
        data(folder).load()
    (folder / "labelsTr" / "BRATS_001.nii.gz").unlink()
    with pytest.raises(ConfigError, match=r"BRATS_001\.nii\.gz does not exist"):
        data(folder).load()


def save(path: Path, values: np.ndarray, affine: np.ndarray, dtype: Any = np.float32) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values.astype(dtype), affine), path)


def turned(values: np.ndarray, axcodes: str, affine: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The same voxels of the same places, stored along other axes."""
    image = nibabel.Nifti1Image(values, np.eye(4) if affine is None else affine)
    wanted = nibabel.orientations.axcodes2ornt(tuple(axcodes))
    now = nibabel.orientations.io_orientation(image.affine)
    found = image.as_reoriented(nibabel.orientations.ornt_transform(now, wanted))
    return np.asarray(found.dataobj), found.affine


def test_the_first_start_has_the_digest_of_the_second(folder: Path) -> None:
    """Masks stored in column order, as nibabel gives them, are cut and then read from the cache."""
    first, second = data(folder).load(), data(folder).load()
    assert first.digest == second.digest


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_digest_does_not_depend_on_the_order_in_memory(order: Any) -> None:
    masks = np.random.default_rng(0).integers(0, 2, (3, 8, 9), np.uint8)
    found = digests.digest(digests.Widened(np.asarray(masks, order=order)[:, ::-1], np.int64))
    assert found == digests.digest(masks[:, ::-1].astype(np.int64))


@pytest.mark.parametrize("stored", [("LPS", "RAS"), ("RAS", "LAS"), ("SPR", "PIL")])
def test_orientation_is_read_from_the_affine(folder: Path, stored: tuple[str, str]) -> None:
    """The same scan and mask, each stored along other axes, give the same patch."""
    wanted = data(folder).load()
    for number, at in enumerate([(20, 18, 3), (6, 30, 4), (30, 10, 5)]):
        for kind, values, axcodes in zip(("imagesTr", "labelsTr"), scan(number, at), stored, strict=True):
            voxels, affine = turned(values, axcodes)
            save(folder / kind / f"BRATS_{number:03}.nii.gz", voxels, affine)
    found = data(folder).load()
    np.testing.assert_array_equal(found.inputs, wanted.inputs)
    np.testing.assert_array_equal(found.targets, wanted.targets)


@pytest.mark.parametrize(
    ("affine", "words"),
    [
        (np.diag([1, 1, 2.0, 1]), "are up to 5 mm apart"),
        (np.eye(4) + np.outer([1, 0, 0, 0], [0, 0, 0, 2.0]), "are up to 2 mm apart"),
        (np.diag([1.01, 1, 1, 1]), "mm apart"),
        (np.diag([np.nan, 1, 1, 1]), "cannot be read as a NIfTI file"),
    ],
)
def test_a_mask_elsewhere_in_space_is_refused(folder: Path, affine: np.ndarray, words: str) -> None:
    _, mask = scan(1, (6, 30, 4))
    image = nibabel.Nifti1Image(mask.astype(np.float32), np.eye(4))
    image.header.set_sform(affine, 1)
    image.header.set_qform(None, 0)
    path = folder / "labelsTr" / "BRATS_001.nii.gz"
    path.write_bytes(
        gzip.compress(bytes(image.header.binaryblock) + b"\0" * 4 + image.get_fdata(dtype=np.float32).tobytes("F"))
    )
    with pytest.raises(ConfigError, match=words):
        data(folder).load()


def test_an_affine_rounded_by_another_program_is_no_other_space(folder: Path) -> None:
    wanted = data(folder).load()
    _, mask = scan(1, (6, 30, 4))
    save(folder / "labelsTr" / "BRATS_001.nii.gz", mask, np.diag([1.0001, 1, 1, 1]))
    np.testing.assert_array_equal(data(folder).load().targets, wanted.targets)


def test_the_layout_of_brats_2017(folder: Path, tmp_path: Path) -> None:
    """HGG and LGG, a folder for each scan and a file for each modality, give the patches of the Decathlon's files."""
    root = tmp_path / "MICCAI_BraTS17_Data_Training"
    affine = np.array([[-1.0, 0, 0, 0], [0, -1, 0, 35], [0, 0, 1, 0], [0, 0, 0, 1]])
    for number, (at, grade) in enumerate(
        zip([(20, 18, 3), (6, 30, 4), (30, 10, 5)], ["HGG", "LGG", "HGG"], strict=True)
    ):
        volume, mask = scan(number, at)
        name = f"Brats17_CBICA_A{number}_1"
        for m, modality in enumerate(("flair", "t1", "t1ce", "t2")):
            save(root / grade / name / f"{name}_{modality}.nii.gz", volume[::-1, ::-1, :, m], affine)
        save(root / grade / name / f"{name}_seg.nii.gz", mask[::-1, ::-1], affine, np.uint8)
    found, wanted = data(root).load(), data(folder).load()
    order = [0, 2, 1]  # HGG comes before LGG
    np.testing.assert_allclose(found.inputs, wanted.inputs[order], atol=1e-6)
    np.testing.assert_array_equal(found.targets, wanted.targets[order])
    (root / "LGG" / "Brats17_CBICA_A1_1" / "Brats17_CBICA_A1_1_t1ce.nii.gz").unlink()
    with pytest.raises(ConfigError, match=r"A1_1_t1ce\.nii\.gz does not exist"):
        data(root).load()


def test_two_files_of_one_scan_are_refused(folder: Path) -> None:
    for kind in ("imagesTr", "labelsTr"):
        path = folder / kind / "BRATS_001.nii.gz"
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
    with pytest.raises(ConfigError, match=r"BRATS_001\.nii and .*BRATS_001\.nii\.gz are two files of one scan"):
        data(folder).load()


def test_a_wrong_checksum_is_refused(folder: Path) -> None:
    path = folder / "imagesTr" / "BRATS_002.nii.gz"
    held = bytearray(path.read_bytes())
    held[-8] ^= 1  # the CRC, before the length
    path.write_bytes(held)
    with pytest.raises(ConfigError, match=r"BRATS_002\.nii\.gz cannot be read as a NIfTI file \(CRC"):
        data(folder).load()


@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_a_header_of_too_many_voxels_is_refused(folder: Path, ending: str) -> None:
    header = nibabel.Nifti1Header()
    header.set_data_shape((32767, 32767, 32767))
    header.set_data_dtype(np.float32)
    header["magic"], header["vox_offset"] = b"n+1", 352
    held = header.binaryblock + b"\0" * 1000
    path = folder / "imagesTr" / "BRATS_000.nii.gz"
    path.unlink()
    path.with_name(f"BRATS_000{ending}").write_bytes(gzip.compress(held) if ending == ".nii.gz" else held)
    (folder / "labelsTr" / "BRATS_000.nii.gz").rename(folder / "labelsTr" / f"BRATS_000{ending}")
    with pytest.raises(ConfigError, match=r"its header announces 140,724,603,847,004 bytes, but the file has only"):
        data(folder).load()


def test_what_does_not_fit_in_memory_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_volumes, "_checked", lambda *_: (_ for _ in ()).throw(MemoryError("1 TiB")))
    with pytest.raises(ConfigError, match=r"does not fit in memory \(1 TiB\)"):
        data(folder).load()
