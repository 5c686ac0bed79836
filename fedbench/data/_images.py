"""Image arrays [n, C, H, W] uint8 (C channels, height, width): layout, resizing, and decoding of n picture files."""

import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image, ImageOps

from fedbench.core.cores import cores
from fedbench.core.options import ConfigError, require
from fedbench.data._depth import Range, Window, common_window, to_eight_bits
from fedbench.data._files import cached, cached_array, log

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
CHANNELS = (1, 3, 4)  # of a picture
BLOCK = 256  # pictures decoded at a time
READER = "upright, windowed"  # version of the picture reader, part of the cache keys
ORIENTATION = 0x0112  # EXIF tag
PROGRESS_LINES = 10  # log lines while a data set is decoded


def channel_axis(shape: tuple[int, ...], name: str) -> int:
    """Return the axis of the channels of pictures: 1 for arrays [n, C, H, W] and 3 for [n, H, W, C].

    Height and width are equal in most arrays: if axes 2 and 3 are equal, or 1 and 2, the other axis holds the channels.
    If neither or both pairs are equal, the channels are the axis of 1, 3 or 4 entries.  An array that no rule decides
    counts as [n, C, H, W], with a warning if axis 3 may hold the channels as well.

    Args:
        shape: The shape of the array.
        name: Its name, for messages.
    """
    first, last = shape[1] in CHANNELS, shape[3] in CHANNELS  # whether axis 1, or axis 3, may be the channels
    square_if_first = shape[2] == shape[3]
    square_if_last = shape[1] == shape[2]
    if square_if_first != square_if_last and (first or last):
        return 1 if square_if_first else 3
    if last and not first:
        log.info("%s of shape %s are read as [n, H, W, C]", name, shape)
        return 3
    if first and last:
        log.warning(
            "%s has shape %s, in which axis 1 or axis 3 may be the channels: it is read as [n, C, H, W]", name, shape
        )
    return 1


def channels_first(images: np.ndarray, name: str) -> np.ndarray:
    """Return pictures as [n, C, H, W], a view of the same array.

    Args:
        images: Pictures [n, H, W] (which get one channel), [n, H, W, C] or [n, C, H, W].
        name: Name of the array, for messages.

    Raises:
        ConfigError: The array has another number of dimensions.
    """
    if images.ndim == 3:
        return images[:, None]
    require(
        images.ndim == 4,
        f"{name} has shape {images.shape}, but pictures need [samples, height, width], [samples, height, width, "
        "channels] or [samples, channels, height, width]: save the array in one of these shapes",
    )
    return images if channel_axis(images.shape, name) == 1 else images.transpose(0, 3, 1, 2)


def half_per_channel(images: np.ndarray) -> tuple[float, ...]:
    """Return 0.5 for each channel of images [n, C, H, W].

    The papers use it as mean and as standard deviation of pixels x / 255, which gives values in [-1, 1].
    """
    return (0.5,) * images.shape[1]


def resize(images: np.ndarray, size: int | None) -> np.ndarray:
    """Resize pictures, bilinear and antialiased like torchvision's Resize.

    Args:
        images: Pictures, [n, C, H, W] uint8.
        size: Height and width of the result, in pixels.  None: do not resize.

    Returns:
        Pictures, [n, C, size, size] uint8.
    """
    if size is None or images.shape[2:] == (size, size):
        return images

    def resize_one(image: np.ndarray) -> np.ndarray:
        """Return one picture [C, H, W] uint8 resized to [C, size, size], where size is the argument of `resize`."""
        is_rgb = len(image) == 3  # one call for three planes: faster, and the same numbers
        planes = [np.ascontiguousarray(image.transpose(1, 2, 0))] if is_rgb else list(image)
        pictures = (Image.fromarray(plane).resize((size, size), Image.Resampling.BILINEAR) for plane in planes)
        resized = [np.asarray(picture) for picture in pictures]
        return resized[0].transpose(2, 0, 1) if is_rgb else np.stack(resized)  # [C, size, size]

    # copied into one array one by one, so that the resized pictures are not in memory twice
    return fill(map(resize_one, images), len(images), (images.shape[1], size, size))


def fill(images: Iterable[np.ndarray], n: int, shape: tuple[int, ...]) -> np.ndarray:
    """Copy images into one array, one after the other, so that the memory need not hold them twice.

    Args:
        images: n arrays of the same shape.
        n: The number of images.
        shape: The shape of one image.

    Returns:
        The images, [n, *shape] uint8.
    """
    out = np.empty((n, *shape), np.uint8)
    for i, image in enumerate(images):
        out[i] = image
    return out


def decode(
    files: Sequence[Any],
    side: int,
    color: str,
    window: Window | None,
    opened: Callable[[Any], Path | IO[bytes]] = lambda file: file,
    crop: bool = False,
) -> Iterator[np.ndarray]:
    """Yield pictures [channels, side, side] uint8 in the order of their files, decoded by several threads.

    Args:
        files: The pictures, as paths or as whatever ``opened`` receives.
        side: Height and width of the result, in pixels.
        color: rgb or grey.
        window: Values (low, high) that become black and white in pictures of more than 8 bits.
        opened: Function from one of `files` to an object that Pillow opens.
        crop: Whether to use the centre square instead of the whole picture, distorted to a square.
    """
    with ThreadPoolExecutor(cores()) as pool:  # Pillow decodes outside the interpreter lock
        for start in range(0, len(files), BLOCK):  # not all files at once, which would fill the memory
            block = files[start : start + BLOCK]
            yield from pool.map(lambda file: open_picture(opened(file), side, color, window, crop), block)


def decode_cached(
    data_dir: str,
    source: str,
    files: Sequence[Path],
    side: int,
    color: str,
    window: Window | None,
    is_extra: bool = False,
) -> np.ndarray:
    """Return picture files as [n, channels, side, side] uint8, from the cache if no file has changed.

    Args:
        data_dir: Folder of the cache.
        source: The folder or table of the data set, for messages and the name of the cache.
        files: The pictures.
        side: Height and width of the result, in pixels.  Whole pictures become square, whatever their shape.
        color: rgb or grey.
        window: The option dataset.window: values of black and white in pictures of more than 8 bits.  None: the range
            of these pictures.
        is_extra: Whether the pictures complement another set, which must be scaled by the same window.  Its range is
            not known here, so that ``window`` must be given if there are pictures of more than 8 bits.

    Raises:
        ConfigError: A picture cannot be read, or needs a window.
    """

    def decode_all() -> dict[str, np.ndarray]:
        """Return the decoded pictures [n, channels, side, side] under the name "images", the content of the cache.

        The other variables are the arguments of `decode_cached`.  is_extra: whether they complement another set.
        """
        log.info("resizing the %s pictures of %s once", f"{len(files):,}", source)
        used = window_of(files, window, source)  # differs from window only if it is None and pictures have > 8 bits
        require(
            not is_extra or used == window,
            f"the extra pictures in {source} have more than 8 bits: set dataset.window=[low, high] to the pixel values "
            "that become black and white in these and in all other pictures of the data set",
        )
        channels = 3 if color == "rgb" else 1
        return {"images": fill(decode(files, side, color, used), len(files), (channels, side, side))}

    # READER is the version of this decoder; _stamps has the path, size and time of each file
    key = (_stamps(files), side, color, window, is_extra, READER)
    return cached(data_dir, Path(source).resolve().stem, key, decode_all)["images"]


def _stamps(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Return (path, size in bytes, modification time in ns) of each file, a cache key that changes with them."""
    stats = [file.stat() for file in files]
    return [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in zip(files, stats)]


def window_of(
    files: Sequence[Any],
    window: Window | None,
    name: str,
    opened: Callable[[Any], Path | IO[bytes]] = lambda file: file,
) -> Window | None:
    """Return the values of black and white by which `open_picture` scales pictures of more than 8 bits.

    Args:
        files: The pictures of the data set.
        window: The option dataset.window.  None: the range of all pictures.
        name: Name of the data set, for messages.
        opened: Function from one of `files` to an object that Pillow opens.

    Returns:
        The window, or None if no picture has more than 8 bits.
    """
    with ThreadPoolExecutor(cores()) as pool:
        # only of pictures with more than 8 bits: _deep_range returns None for others
        ranges = [r for r in pool.map(lambda file: _deep_range(opened(file)), files) if r is not None]
    if window is None:
        return common_window(ranges, name) if ranges else None
    if not ranges:
        log.warning(
            "dataset.window=%s has no effect, because no picture of %s has more than 8 bits per pixel: set it to null",
            list(window), name,
        )  # fmt: skip
    return window


def centre_squares(data_dir: str, name: str, root: Path, files: list[str], side: int) -> np.ndarray:
    """Return the centre squares of picture files as CLIP uses them, decoded once and mapped from disk.

    Args:
        data_dir: Folder of the cache.
        name: Name of the data set.
        root: Folder of the pictures.
        files: Their paths in it.
        side: Length in pixels of the short side after resizing (bicubic), and of the square.

    Returns:
        Pictures, [n, 3, side, side] uint8, in the order of the files.

    Raises:
        ConfigError: A picture does not exist or cannot be read.
    """
    paths = [root / file for file in files]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise ConfigError(
            f"{len(missing):,} of the {len(files):,} pictures of {name} are not in {root} (the first is {missing[0]}): "
            "copy them there, or set data_dir or dataset.path to a complete folder"
        )

    def decode_with_progress() -> Iterator[np.ndarray]:
        """Yield the decoded pictures [3, side, side] in order, and log about ten times how many are done.

        The other variables are the arguments of `centre_squares`; paths are those of the files.
        """
        n, start = len(files), time.monotonic()
        log.info("%s: decoding %s pictures once", name, f"{n:,}")
        interval = max(1, n // PROGRESS_LINES)
        window = window_of(paths, window=None, name=name)  # None: black and white by the range of all pictures
        for i, picture in enumerate(decode(paths, side, "rgb", window, crop=True)):
            if i and i % interval == 0:
                left = (time.monotonic() - start) / i * (n - i)
                log.info("%s: %s of %s pictures, %.0f s left", name, f"{i:,}", f"{n:,}", left)
            yield picture

    # _stamps has the path, size and time of each file; READER is the version of the decoder
    key = (_stamps(paths), side, "centre squares", READER)
    return cached_array(data_dir, name, key, (len(files), 3, side, side), decode_with_progress)


def open_picture(
    path: Path | IO[bytes], side: int, color: str, window: Window | None = None, crop: bool = False
) -> np.ndarray:
    """Read one picture file, upright, as [channels, side, side] uint8.

    Args:
        path: The file.
        side: Height and width of the result, in pixels.
        color: rgb or grey.
        window: Values of black and white in pictures of more than 8 bits, equal for a data set (`window_of`).
        crop: Whether to use the centre square (bicubic) instead of the whole picture, distorted to a square (bilinear).

    Raises:
        ConfigError: The file cannot be read.
    """
    with _opened(path) as image:
        _check_color(image, window, path)  # before the pixels are loaded
        picture = _eight_bits(_upright(image), window, path).convert("RGB" if color == "rgb" else "L")
        square = _centre_square(picture, side) if crop else picture.resize((side, side), Image.Resampling.BILINEAR)
    pixels = np.asarray(square)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


@contextmanager
def _opened(path: Path | IO[bytes]) -> Iterator[Any]:
    """Open a picture file by Pillow for the duration of the block, and yield the image.

    Raises:
        ConfigError: The file is damaged or no picture, or has several pages.
    """
    try:
        with Image.open(path) as image:
            pages = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)  # MPO: a photograph and its preview
            require(pages == 1, f"{path} has {pages} pages, but must have one: save each page as a picture")
            yield image
    except ConfigError:
        raise
    except (OSError, ValueError, SyntaxError, MemoryError, Image.DecompressionBombError) as error:
        raise ConfigError(
            f"{path} cannot be read as a picture ({error or type(error).__name__}): replace or remove the file"
        ) from error


def _upright(image: Any) -> Any:
    """Return an image of Pillow turned upright by its EXIF orientation; unchanged if it has no (intact) EXIF data."""
    try:
        is_turned = image.getexif().get(ORIENTATION, 1) != 1
    except (ValueError, KeyError, SyntaxError, struct.error):  # damaged EXIF data
        return image
    return ImageOps.exif_transpose(image) if is_turned else image


def _centre_square(image: Any, side: int) -> Any:
    """Return the centre square [side, side] of a picture, as torchvision's Resize(side, bicubic) and CenterCrop(side).

    Rounding is that of torchvision, too.

    Args:
        image: An image of Pillow.
        side: Length in pixels of the short side after resizing, and of the square.
    """
    short = min(image.size)
    width, height = (int(side * length / short) for length in image.size)
    left, top = round((width - side) / 2), round((height - side) / 2)
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    return resized.crop((left, top, left + side, top + side))


def _is_deep_color(image: Any) -> bool:
    """Return whether an image of Pillow is in color with 16 bits per channel, of which Pillow reads the upper 8."""
    # A tile is a block of the file; its last entry names the coding of the pixels, such as RGB;16B.
    return image.mode in ("RGB", "RGBA", "LA", "CMYK") and any(";16" in str(tile[3]) for tile in image.tile)


def _deep_range(path: Path | IO[bytes]) -> Range | None:
    """Return the range of the pixel values of a file with more than 8 bits per pixel or color.

    None for a file of 8 bits; then only its header is read.
    """
    with _opened(path) as image:
        # Pillow drops the lower 8 of 16 bits per color.  They are set to ones, so that the range contains all values.
        if _is_deep_color(image):
            return Range.of(np.asarray(image).astype(np.uint16) << 8 | 255, str(path))
        is_deep_grey = image.mode.startswith(("I", "F"))  # Pillow's modes of integer and float pixels
        return Range.of(np.asarray(image), str(path)) if is_deep_grey else None


def _check_color(image: Any, window: Window | None, path: Any) -> None:
    """Refuse a picture of 16 bits per color unless the window of its data set is (0, 65536).

    Pillow reads only the upper 8 of the 16 bits, which is the right scaling for this window alone.

    Args:
        image: The picture, an image of Pillow.
        window: The pixel values of the data set that become black and white, or None.
        path: The file, for the message.

    Raises:
        ConfigError: The picture has 16 bits per color, and the window is another one.
    """
    require(
        window == (0, 1 << 16) or not _is_deep_color(image),
        f"{path} has 16 bits per color, of which only the upper 8 can be read.  This needs the range [0, 65536] from "
        f"black to white, but that of the data set is {list(window or ())}: save the picture with 8 bits or in grey, "
        "or set dataset.window=[0, 65536]",
    )


def _eight_bits(image: Any, window: Window | None, path: Any) -> Any:
    """Return a picture with 8 bits per pixel: one of more bits scaled by the window of its data set, others unchanged.

    Pillow's own conversion would clip values above 255.

    Args:
        image: The picture, an object of Pillow.
        window: Values of black and white in pictures of more than 8 bits.  None: the data set has no such pictures.
        path: The file, for messages.

    Raises:
        ConfigError: The picture has more than 8 bits, and there is no window.
    """
    if not image.mode.startswith(("I", "F")):  # Pillow's modes of integer and float pixels, with more than 8 bits
        return image
    if window is None:
        raise ConfigError(
            f"{path} has more than 8 bits per pixel: set dataset.window=[low, high] to the pixel values that become "
            "black and white"
        )
    return Image.fromarray(to_eight_bits(np.asarray(image), window))
