"""Volumes of medical scanners: MetaImage files (.mhd and .raw) read without a library, NIfTI by nibabel."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedbench.core.options import ConfigError, require

TYPES = {
    **{"MET_CHAR": "i1", "MET_UCHAR": "u1", "MET_SHORT": "i2", "MET_USHORT": "u2", "MET_INT": "i4", "MET_UINT": "u4"},
    **{"MET_FLOAT": "f4", "MET_DOUBLE": "f8"},
}


class Volume(NamedTuple):
    """values [depth, height, width]; spacing in mm and the position of the first voxel's centre in mm, both x, y, z."""

    values: np.ndarray
    spacing: np.ndarray
    origin: np.ndarray

    def voxel(self, world: np.ndarray) -> np.ndarray:
        """The nearest voxel z, y, x of a position x, y, z in mm.  # [3] int64"""
        return np.rint((world - self.origin) / self.spacing)[::-1].astype(np.int64)


def read_mhd(path: Path) -> Volume:
    """A MetaImage of three dimensions whose axes are those of the world; ConfigError with one sentence otherwise.

    The header is lines of `Key = value`; ElementDataFile is the raw file beside it.
    """
    try:
        lines = path.read_text(encoding="latin-1").splitlines()
        header = {k.strip(): v.strip() for k, _, v in (line.partition("=") for line in lines if "=" in line)}
        shape = [int(n) for n in header["DimSize"].split()][::-1]
        raw = (path.parent / header["ElementDataFile"]).read_bytes()
        if header.get("CompressedData", "False") == "True":
            raw = zlib.decompress(raw)
        big = header.get("BinaryDataByteOrderMSB", header.get("ElementByteOrderMSB", "False")) == "True"
        values = np.frombuffer(raw, (">" if big else "<") + TYPES[header["ElementType"]])
        spacing = np.array([float(x) for x in header.get("ElementSpacing", "1 1 1").split()])
        origin = np.array([float(x) for x in header.get("Offset", header.get("Position", "0 0 0")).split()])
        matrix = np.array([float(x) for x in header.get("TransformMatrix", "1 0 0 0 1 0 0 0 1").split()])
    except (OSError, KeyError, ValueError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read as a MetaImage ({type(error).__name__}: {error})") from error
    require(
        len(shape) == 3 and values.size == np.prod(shape), f"{path}: {values.size:,} values for {shape[::-1]} voxels"
    )
    aligned = matrix.size == 9 and np.allclose(matrix.reshape(3, 3), np.eye(3))
    require(aligned, f"{path}: TransformMatrix turns or mirrors the axes, which is not read")
    return Volume(values.reshape(shape), spacing, origin)


def read_nifti(path: Path) -> np.ndarray:
    """The voxels of a .nii or .nii.gz file, [H, W, D] or [H, W, D, channels] float32; ConfigError where it is
    damaged."""
    try:
        import nibabel
        from nibabel.filebasedimages import ImageFileError
    except ImportError as error:
        raise ConfigError("NIfTI files are read by nibabel: pip install fedbench[medical]") from error
    try:
        return np.asarray(nibabel.load(path).dataobj, np.float32)  # type: ignore[attr-defined]
    except (OSError, EOFError, ValueError, ImageFileError) as error:
        raise ConfigError(f"{path} is no NIfTI file that can be read ({error})") from error
