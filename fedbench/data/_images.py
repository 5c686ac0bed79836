"""Image arrays: one layout ([n, channels, height, width] uint8), resizing, and reading picture files."""

import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedbench.core.cores import cores
from fedbench.core.options import ConfigError, require
from fedbench.data._depth import Span, Window, common_window, to_eight_bits
from fedbench.data._files import cached_array, log

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
CHANNELS = (1, 3, 4)  # of a picture
BLOCK = 256  # pictures decoded at a time
READER = "upright, windowed"  # version of the picture reader, part of the cache keys
ORIENTATION = 0x0112  # EXIF tag
LINES = 10  # of progress, while a set is decoded


def channel_axis(shape: tuple[int, ...], name: str) -> int:
    """Return 1 for arrays [n, C, H, W] and 3 for [n, H, W, C].

    Height and width are equal in most arrays: if axes 2 and 3 are equal, or 1 and 2, the other axis holds the channels.
    If neither or both pairs are equal, the channels are the axis of 1, 3 or 4 entries.  An array that no rule decides
    counts as [n, C, H, W], with a warning if axis 3 may hold the channels as well.
    """
    first, last = shape[1] in CHANNELS, shape[3] in CHANNELS
    square = shape[2] == shape[3], shape[1] == shape[2]  # if axis 1 is dropped, if axis 3 is dropped
    if square[0] != square[1] and (first or last):
        return 1 if square[0] else 3
    if last and not first:
        log.info("%s of shape %s are read as [n, H, W, C]", name, shape)
        return 3
    if first and last:
        log.warning(
            "%s has shape %s, in which axis 1 or axis 3 may be the channels: it is read as [n, C, H, W]", name, shape
        )
    return 1


def channels_first(images: np.ndarray, name: str) -> np.ndarray:
    """Return pictures [n, H, W], [n, H, W, C] or [n, C, H, W] as [n, C, H, W]."""
    if images.ndim == 3:
        return images[:, None]
    require(images.ndim == 4, f"{name} has shape {images.shape}, expected images [n, H, W] or [n, H, W, C]")
    return images if channel_axis(images.shape, name) == 1 else images.transpose(0, 3, 1, 2)


def half(images: np.ndarray) -> tuple[float, ...]:
    """The papers' mean and their std, one per channel of [n, C, H, W]: (x / 255 - 0.5) / 0.5."""
    return (0.5,) * images.shape[1]


def resize(images: np.ndarray, size: int | None) -> np.ndarray:
    """[n, C, H, W] uint8 to [n, C, size, size], bilinear, antialiased (torchvision's Resize)."""
    if size is None or images.shape[2:] == (size, size):
        return images
    from PIL import Image

    def one(image: np.ndarray) -> np.ndarray:
        if len(image) == 3:  # one call for three planes: twice as fast, the same numbers
            whole = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
            return np.asarray(whole.resize((size, size), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
        planes = [Image.fromarray(plane).resize((size, size), Image.Resampling.BILINEAR) for plane in image]
        return np.stack([np.asarray(plane) for plane in planes])  # [C, size, size]

    return fill(map(one, images), len(images), (images.shape[1], size, size))


def fill(images: Iterable[np.ndarray], n: int, shape: tuple[int, ...]) -> np.ndarray:
    """n images, one after the other, in one array [n, *shape] uint8."""
    out = np.empty((n, *shape), np.uint8)
    for i, image in enumerate(images):
        out[i] = image
    return out


def open_pictures(
    paths: Sequence[Path],
    side: int,
    color: str,
    window: Window | None = None,
    name: str = "the data set",
    is_extra: bool = False,
) -> np.ndarray:
    """Read picture files as [n, channels, side, side] uint8, with whole pictures made square.

    Args:
        paths: The files.
        side: Pixels.
        color: rgb or grey.
        name: Name of the set, for messages.
        window: Values that become 0 and 255 in pictures of more than 8 bits.  None: see `window_of`.
        is_extra: Whether the pictures complement another set.  Its range is not theirs, so that pictures of more than 8
            bits need a window.
    """
    found = window_of(paths, window, name)
    require(
        not is_extra or found == window,
        f"{name} has pictures of more than 8 bits: set dataset.window=[low, high], by which they are scaled as those "
        "of the data set are",
    )
    window = found
    with ThreadPoolExecutor(cores()) as pool:  # Pillow decodes outside the interpreter lock
        decoded = pool.map(lambda path: open_picture(path, side, color, window), paths)
        return fill(decoded, len(paths), (3 if color == "rgb" else 1, side, side))


def window_of(
    files: Sequence[Any], window: Window | None, name: str, opened: Callable[[Any], Path | IO[bytes]] | None = None
) -> Window | None:
    """Return the window by which `open_picture` scales pictures of more than 8 bits.

    Args:
        files: The pictures of the set.
        window: The window of the options.  None: the range of all pictures.
        name: Name of the set, for messages.
        opened: Function from one of `files` to the object that Pillow opens.

    Returns:
        The window, or None if no picture has more than 8 bits.
    """
    with ThreadPoolExecutor(cores()) as pool:
        found = pool.map(lambda file: _span(opened(file) if opened else file), files)
        spans = [span for span in found if span is not None]
    if window is None:
        return common_window(spans, name) if spans else None
    if not spans:
        log.warning("dataset.window changes nothing: no picture of %s has more than 8 bits", name)
    return window


def centre_squares(data_dir: str, name: str, root: Path, files: list[str], side: int) -> np.ndarray:
    """Picture files below root as CLIP sees them [n, 3, side, side] uint8, decoded once and left on disk.

    The short side becomes `side` (bicubic), of the long one the middle is kept.
    """
    missing = [file for file in files if not (root / file).is_file()]
    require(
        not missing,
        f"{len(missing):,} of the {len(files):,} pictures of {name} are not in {root} (the first is "
        f"{(missing or [''])[0]}): it is incomplete, or not the folder that was meant",
    )
    stats = [os.stat(root / file) for file in files]
    key = ([(f, s.st_size, s.st_mtime_ns) for f, s in zip(files, stats)], side, "centre squares", READER)
    paths = [root / file for file in files]
    return cached_array(data_dir, name, key, (len(files), 3, side, side), lambda: _decoded(name, paths, side))


def _decoded(name: str, paths: list[Path], side: int) -> Iterator[np.ndarray]:
    """The pictures, BLOCK at a time [<= BLOCK, 3, side, side], with a line of progress now and then."""
    n, began, told = len(paths), time.monotonic(), 0
    log.info("%s: decoding %s pictures once", name, f"{n:,}")
    window = window_of(paths, None, name)
    with ThreadPoolExecutor(cores()) as pool:
        for start in range(0, n, BLOCK):
            some = paths[start : start + BLOCK]
            yield np.stack(list(pool.map(lambda path: open_picture(path, side, "rgb", window, squeeze=False), some)))
            done = start + len(some)
            if done < n and done * LINES // n > told:
                told = done * LINES // n
                left = (time.monotonic() - began) / done * (n - done)
                log.info("%s: %s of %s pictures, %.0f s left", name, f"{done:,}", f"{n:,}", left)


def open_picture(
    path: Path | IO[bytes], side: int, color: str, window: Window | None = None, squeeze: bool = True
) -> np.ndarray:
    """Read one picture file, upright, as [channels, side, side] uint8.

    Args:
        path: The file.
        side: Pixels.
        color: rgb or grey.
        window: Window of the set (`window_of`), for pictures of more than 8 bits.
        squeeze: Whether the whole picture is made square.  Otherwise its centre square is taken (bicubic).

    Raises:
        ConfigError: The file cannot be read.
    """
    with _opened(path) as image:
        _check_color(image, window, path)  # before the pixels are loaded
        eight = _eight_bits(_upright(image), window, path).convert("RGB" if color == "rgb" else "L")
        square = eight.resize((side, side), _pillow().Resampling.BILINEAR) if squeeze else _centre(eight, side)
    pixels = np.asarray(square)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


@contextmanager
def _opened(path: Path | IO[bytes]) -> Iterator[Any]:
    """Open a picture file of one page with Pillow; ConfigError if it is not such a file."""
    Image = _pillow()
    try:
        with Image.open(path) as image:
            pages = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)  # MPO: a photograph and its preview
            require(pages == 1, f"{path} holds {pages} pages, of which one would be read: save each as a picture")
            yield image
    except ConfigError:
        raise
    except (OSError, ValueError, SyntaxError, MemoryError, Image.DecompressionBombError) as error:
        raise ConfigError(f"{path} cannot be read as a picture ({error or type(error).__name__})") from error


def _pillow() -> Any:
    from PIL import Image

    return Image


def _upright(image: Any) -> Any:
    """Return the picture turned and mirrored by its EXIF orientation."""
    from PIL import ImageOps

    try:
        turned = image.getexif().get(ORIENTATION, 1) != 1
    except (ValueError, KeyError, SyntaxError, struct.error):  # damaged EXIF data
        return image
    return ImageOps.exif_transpose(image) if turned else image


def _centre(image: Any, side: int) -> Any:
    """torchvision's Resize(side, bicubic) and CenterCrop(side), rounded as it rounds."""
    from PIL import Image

    short = min(image.size)
    width, height = (int(side * length / short) for length in image.size)
    left, top = round((width - side) / 2), round((height - side) / 2)
    whole = image.resize((width, height), Image.Resampling.BICUBIC)
    return whole.crop((left, top, left + side, top + side))


def _is_deep_color(image: Any) -> bool:
    """Return whether Pillow reads only the upper 8 of 16 bits of each color (raw modes such as RGB;16B and LA;16B)."""
    return image.mode in ("RGB", "RGBA", "LA", "CMYK") and any(";16" in str(tile[3]) for tile in image.tile)


def _span(path: Path | IO[bytes]) -> Span | None:
    """Return the span of a picture of more than 8 bits, else None; most files are not decoded."""
    with _opened(path) as image:
        if _is_deep_color(image):
            return Span.of(np.asarray(image).astype(np.uint16) << 8 | 255, str(path))
        return Span.of(np.asarray(image), str(path)) if image.mode.startswith(("I", "F")) else None


def _check_color(image: Any, window: Window | None, path: Any) -> None:
    """Refuse 16 bits per color unless the values fill their range."""
    require(
        window == (0, 1 << 16) or not _is_deep_color(image),
        f"{path} has 16 bits of each color, of which only the upper 8 can be read, and the range of its set is "
        f"{list(window or ())}: save it with 8 bits, or in grey",
    )


def _eight_bits(image: Any, window: Window | None, path: Any) -> Any:
    """Scale a picture of more than 8 bits by the window of its set; Pillow would clip at 255."""
    if not image.mode.startswith(("I", "F")):
        return image
    if window is None:
        raise ConfigError(f"{path} has more than 8 bits, and its set has no range to scale it by")
    return _pillow().fromarray(to_eight_bits(np.asarray(image), window))
