"""Read volumes of medical scanners: MetaImage files (.mhd and .raw), and NIfTI files by nibabel.

Volumes are reoriented, so that their axes are those of the scanner's space.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbench.core.options import ConfigError, require
from fedbench.data._files import DAMAGE

TYPES = {  # NumPy's code for each ElementType of a MetaImage
    "MET_CHAR": "i1",
    "MET_UCHAR": "u1",
    "MET_SHORT": "i2",
    "MET_USHORT": "u2",
    "MET_INT": "i4",
    "MET_UINT": "u4",
    "MET_FLOAT": "f4",
    "MET_DOUBLE": "f8",
}
DEFLATED = 1032  # maximum compression ratio of gzip and zlib
BLOCK = 1 << 20  # bytes read at a time
TOLERANCE = 0.1  # voxels, the largest distance between the corners of two volumes in one space


class Volume(NamedTuple):
    """A scan whose axes are those of the world, the coordinate system of the scanner (nearly, if it is oblique).

    Attributes:
        values: Values of the voxels, [depth, height, width].
        spacing: Distances of neighbouring voxels in mm, in the order x, y, z, [3].
        origin: Position of the centre of the first voxel in mm, x, y, z, [3].
        direction: Directions of the voxels' axes x, y, z in the world, one in each column, [3, 3].  The identity unless
            the scan is oblique.
    """

    values: np.ndarray
    spacing: np.ndarray
    origin: np.ndarray
    direction: np.ndarray

    def voxel(self, world: np.ndarray) -> np.ndarray:
        """Return the index (z, y, x) [3] int64 of the voxel nearest to (x, y, z) in mm, which may be outside."""
        return np.rint(np.linalg.solve(self.direction, world - self.origin) / self.spacing)[::-1].astype(np.int64)


def read_mhd(path: Path) -> Volume:
    """Read a three-dimensional MetaImage, and reorient it to the axes of the world.

    The header has lines `Key = value`; ElementDataFile is the raw file in the same folder.  Rows of TransformMatrix are
    the directions of the axes, as ITK writes them.

    Args:
        path: The header, *.mhd.

    Raises:
        ConfigError: The header or the raw file is damaged, or they do not match.
    """
    try:
        lines = path.read_text(encoding="latin-1").splitlines()
        header = {k.strip(): v.strip() for k, _, v in (line.partition("=") for line in lines if "=" in line)}
        shape = [int(n) for n in header["DimSize"].split()][::-1]
        is_big_endian = header.get("BinaryDataByteOrderMSB", header.get("ElementByteOrderMSB", "False")) == "True"
        dtype = np.dtype((">" if is_big_endian else "<") + TYPES[header["ElementType"]])
        spacing = np.array([float(x) for x in header.get("ElementSpacing", "1 1 1").split()])
        origin = np.array([float(x) for x in header.get("Offset", header.get("Position", "0 0 0")).split()])
        matrix = np.array([float(x) for x in header.get("TransformMatrix", "1 0 0 0 1 0 0 0 1").split()])
        require(
            len(shape) == 3 and min(shape) > 0,
            f"{path}: DimSize must be three numbers >= 1, not {shape[::-1]}: replace the file by a three-dimensional "
            "scan",
        )
        is_packed = header.get("CompressedData", "False") == "True"
        raw = _raw(path.parent / header["ElementDataFile"], math.prod(shape) * dtype.itemsize, is_packed)
        values = np.frombuffer(raw, dtype).reshape(shape)
    except ConfigError:
        raise
    except (*DAMAGE, MemoryError) as error:
        raise ConfigError(
            f"{path} cannot be read as a MetaImage ({type(error).__name__}: {error}): replace the file"
        ) from error
    fits = spacing.size == origin.size == 3 and bool((spacing > 0).all() and np.isfinite([spacing, origin]).all())
    require(
        fits,
        f"{path}: ElementSpacing must be three numbers > 0, and Offset three numbers, got {spacing.tolist()} and "
        f"{origin.tolist()}: correct the header",
    )
    direction = matrix.reshape(3, 3).T if matrix.size == 9 else np.zeros((3, 3))
    is_rotation = np.allclose(direction.T @ direction, np.eye(3), atol=1e-3)
    require(
        is_rotation,
        f"{path}: the rows of TransformMatrix must be three perpendicular directions of length 1, got "
        f"{matrix.tolist()}: correct the header",
    )
    return _reoriented(values, spacing, origin, direction)


def _raw(path: Path, size: int, is_packed: bool) -> bytes:
    """Return the bytes of a raw file.

    Args:
        path: The file.
        size: The expected number of bytes, after unpacking.
        is_packed: Whether the file is compressed by zlib.

    Raises:
        ValueError: The file has another size.  This is found before more than ``size`` + 1 bytes are in memory.
    """
    actual = path.stat().st_size
    if actual != size and not (is_packed and size <= actual * DEFLATED):  # the largest possible compression ratio
        raise ValueError(
            f"DimSize and ElementType imply {size:,} bytes, but {path.name} has {actual:,} bytes; use its own header"
        )
    raw = path.read_bytes()
    if is_packed:
        raw = zlib.decompressobj().decompress(raw, size + 1)
        if len(raw) != size:
            raise ValueError(
                f"DimSize and ElementType imply {size:,} bytes, but {path.name} has another size after "
                "unpacking; use its own header"
            )
    return raw


def _reoriented(values: np.ndarray, spacing: np.ndarray, origin: np.ndarray, direction: np.ndarray) -> Volume:
    """Permute and reverse the axes of a scan, so that each is the nearest axis of the world in its direction.

    Args:
        values: Values of the voxels, [z, y, x].
        spacing: Distances of neighbouring voxels in mm along x, y, z, [3].
        origin: Position of the first voxel in mm, [3].
        direction: Directions of the voxels' axes x, y, z, one in each column, [3, 3].

    Returns:
        The same scan, with spacing, origin and direction for the new axes.
    """
    order = [int(i) for i in np.abs(direction).argmax(1)]  # for x, y, z of the world, the nearest axis of the voxels
    if sorted(order) != [0, 1, 2]:  # one axis is equally near to two others: keep the order of the file
        order = [0, 1, 2]
    xyz = values.transpose(2, 1, 0).transpose(order)
    spacing, direction, origin = spacing[order], direction[:, order], origin.copy()
    for axis in range(3):
        if direction[axis, axis] < 0:  # reverse the axis: its last voxel becomes the first
            origin += direction[:, axis] * spacing[axis] * (xyz.shape[axis] - 1)
            direction[:, axis] *= -1
            xyz = np.flip(xyz, axis)
    return Volume(xyz.transpose(2, 1, 0), spacing, origin, direction)


class Nifti(NamedTuple):
    """A scan in the closest canonical orientation: axes to the right, front and top (nearly, if it is oblique).

    Attributes:
        voxels: Values of the voxels, [H, W, D] or [H, W, D, channels] float32.
        affine: Matrix from indices of voxels to positions in mm, [4, 4].
    """

    voxels: np.ndarray
    affine: np.ndarray


def read_nifti(path: Path) -> Nifti:
    """Read a .nii or .nii.gz file in the closest canonical orientation (nibabel.as_closest_canonical).

    Args:
        path: The file.

    Raises:
        ConfigError: The file is damaged, has a wrong checksum, or has fewer voxels than its header claims.
    """
    try:
        import nibabel
        from nibabel.filebasedimages import ImageFileError
        from nibabel.orientations import OrientationError
        from nibabel.spatialimages import HeaderDataError
    except ImportError as error:
        raise ConfigError("NIfTI files are read by the package nibabel: run pip install nibabel") from error
    try:
        image: Any = nibabel.as_closest_canonical(_checked(path, nibabel.load(path)))
        return Nifti(np.asarray(image.dataobj, np.float32), np.asarray(image.affine))
    except MemoryError as error:
        raise ConfigError(f"{path} does not fit in memory ({error}): use a smaller scan, or more memory") from error
    except (*DAMAGE, ImageFileError, HeaderDataError, OrientationError) as error:
        raise ConfigError(f"{path} cannot be read as a NIfTI file ({error}): replace the file") from error


def _checked(path: Path, image: Any) -> Any:
    """Return an image of nibabel after a check of its file, which is then in memory if it is gzipped.

    Args:
        path: The file, .nii or .nii.gz.
        image: The image that nibabel.load returned, whose voxels are not read yet.

    Raises:
        ValueError: The header claims more bytes than the file can have.
        OSError: The checksum of a gzip file is wrong.
    """
    header, is_packed = image.header, path.suffix == ".gz"
    claimed = math.prod(image.shape) * header.get_data_dtype().itemsize + int(image.dataobj.offset)
    actual = path.stat().st_size
    if claimed > actual * (DEFLATED if is_packed else 1):  # DEFLATED: the largest possible compression ratio
        raise ValueError(f"its header announces {claimed:,} bytes, but the file has only {actual:,}; download it again")
    if not is_packed:
        return image
    with gzip.open(path) as file:
        data = file.read(claimed)
        while file.read(BLOCK):  # the checksum is verified at the end of the file
            pass
    return type(image).from_bytes(data)


def require_one_space(first_path: Path, first: Nifti, second_path: Path, second: Nifti) -> None:
    """Raise ConfigError if the voxels of two files differ in shape, spacing or position.

    Args:
        first_path: The first file.
        first: Its content.
        second_path: The second file.
        second: Its content.
    """
    shapes = first.voxels.shape[:3], second.voxels.shape[:3]
    require(
        shapes[0] == shapes[1],
        f"{first_path} has {shapes[0]} voxels and {second_path} {shapes[1]}: resample one of them to the other",
    )
    # [4, 8]: indices of the eight corner voxels, with a 1 for the shift in the affine matrix
    corners = np.array(np.meshgrid(*[(0, n - 1) for n in shapes[0]], [1], indexing="ij")).reshape(4, 8)
    distance = float(np.linalg.norm(((first.affine - second.affine) @ corners)[:3], axis=0).max())  # mm
    smallest = float(np.linalg.norm(first.affine[:3, :3], axis=0).min())  # smallest distance of voxels, mm
    require(
        distance <= TOLERANCE * smallest,  # a tenth of a voxel
        f"{first_path} and {second_path} are up to {distance:.3g} mm apart in the scanner's space (their affines "
        "differ): resample one of them to the other",
    )
