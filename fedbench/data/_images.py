"""Image arrays: one layout ([n, channels, height, width] uint8), resizing, and reading picture files."""

import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedbench.core.options import ConfigError, require
from fedbench.data._files import cached_array, log

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
BLOCK = 256  # pictures decoded at a time
LINES = 10  # of progress, while a set is decoded


def channels_first(images: np.ndarray, name: str) -> np.ndarray:
    """uint8 images [n, H, W], [n, H, W, C] or [n, C, H, W] as [n, C, H, W], C of 1, 3 or 4."""
    if images.ndim == 3:
        return images[:, None]
    require(images.ndim == 4, f"{name} has shape {images.shape}, expected images [n, H, W] or [n, H, W, C]")
    if images.shape[-1] in (1, 3, 4):
        return np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    require(images.shape[1] in (1, 3, 4), f"{name} has shape {images.shape}: neither end is 1, 3 or 4 channels")
    return images


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


def open_pictures(paths: list[Path], side: int, color: str) -> np.ndarray:
    """Picture files as [n, channels, side, side] uint8: the whole picture made square; color: rgb or grey."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes outside the interpreter lock
        decoded = pool.map(lambda path: open_picture(path, side, color), paths)
        return fill(decoded, len(paths), (3 if color == "rgb" else 1, side, side))


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
    key = ([(f, s.st_size, s.st_mtime_ns) for f, s in zip(files, stats)], side, "centre squares")
    paths = [root / file for file in files]
    return cached_array(data_dir, name, key, (len(files), 3, side, side), lambda: _decoded(name, paths, side))


def _decoded(name: str, paths: list[Path], side: int) -> Iterator[np.ndarray]:
    """The pictures, BLOCK at a time [<= BLOCK, 3, side, side], with a line of progress now and then."""
    n, began, told = len(paths), time.monotonic(), 0
    log.info("%s: decoding %s pictures once", name, f"{n:,}")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, n, BLOCK):
            some = paths[start : start + BLOCK]
            yield np.stack(list(pool.map(lambda path: open_picture(path, side, "rgb", squeeze=False), some)))
            done = start + len(some)
            if done < n and done * LINES // n > told:
                told = done * LINES // n
                left = (time.monotonic() - began) / done * (n - done)
                log.info("%s: %s of %s pictures, %.0f s left", name, f"{done:,}", f"{n:,}", left)


def open_picture(path: Path | IO[bytes], side: int, color: str, squeeze: bool = True) -> np.ndarray:
    """One picture file as [channels, side, side] uint8; ConfigError where it cannot be read.

    squeeze: the whole picture is made square; else its centre square is taken, bicubic.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            eight = _eight_bits(image).convert("RGB" if color == "rgb" else "L")
            square = eight.resize((side, side), Image.Resampling.BILINEAR) if squeeze else _centre(eight, side)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ConfigError(f"{path} cannot be read as a picture ({error})") from error
    pixels = np.asarray(square)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _centre(image: Any, side: int) -> Any:
    """torchvision's Resize(side, bicubic) and CenterCrop(side), rounded as it rounds."""
    from PIL import Image

    short = min(image.size)
    width, height = (int(side * length / short) for length in image.size)
    left, top = round((width - side) / 2), round((height - side) / 2)
    whole = image.resize((width, height), Image.Resampling.BICUBIC)
    return whole.crop((left, top, left + side, top + side))


def _eight_bits(image: Any) -> Any:
    """A 16-bit grey picture (a mammogram's PNG) by its high byte; Pillow would cut everything off above 255."""
    from PIL import Image

    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.clip(np.asarray(image), 0, 65535).astype(np.uint16) >> 8).astype(np.uint8))
