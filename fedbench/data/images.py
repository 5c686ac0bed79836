"""Image arrays: one layout ([n, channels, height, width] uint8), resizing, and reading picture files."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.options import ConfigError, require


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


def open_picture(path: Path, side: int, color: str) -> np.ndarray:
    """One picture file as [channels, side, side] uint8; ConfigError where it cannot be read."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            eight = _eight_bits(image).convert("RGB" if color == "rgb" else "L")
            square = eight.resize((side, side), Image.Resampling.BILINEAR)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ConfigError(f"{path} cannot be read as a picture ({error})") from error
    pixels = np.asarray(square)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _eight_bits(image: Any) -> Any:
    """A 16-bit grey picture (a mammogram's PNG) by its high byte; Pillow would cut everything off above 255."""
    from PIL import Image

    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.clip(np.asarray(image), 0, 65535).astype(np.uint16) >> 8).astype(np.uint8))
