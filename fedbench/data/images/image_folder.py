"""Images in folders: class/picture, domain/class/picture, or train, val, test/class/picture.

dataset=officehome is one of them: Office-Home (Venkateswara et al., CVPR 2017), for research that is not commercial.
Layout of dataset.path, one of::

    {class}/{picture}
    {domain}/{class}/{picture}
    train/{class}/{picture}, val/..., test/...

Pictures are brought to one size once (whole picture, no crop, as PGFed's Office-Home code does) and kept in
data_dir/cache under a hash of the listing, so that a changed, added or removed picture is seen.  Classes and
domains are numbered in the order of their names.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from fedbench.core.options import ConfigError, Count, listed, require
from fedbench.data._depth import check_window
from fedbench.data._files import cached, fingerprint, is_hidden, log
from fedbench.data._foreign import refuse_foreign
from fedbench.data._images import READER, half, open_pictures
from fedbench.data._names import check_spelling
from fedbench.data.base import TEST, TRAIN, VAL, Arrays
from fedbench.data.images._extra import extra_path, join_extra

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
PARTS = {"train": TRAIN, "val": VAL, "valid": VAL, "validation": VAL, "test": TEST}


class ImageFolder:
    """Pictures in folders named by class, domain or split.

    Args:
        path: The folder.
        resize: Side in pixels; all pictures become square.
        color: rgb or grey.
        layout: class (class/picture), domain (domain/class/picture) or split (train, val, test/class/picture).  auto
            detects it from the depth and the names.
        extra: A folder domain/class/picture with pictures for training only.
        window: [low, high], the values that become black and white in pictures of more than 8 bits.  None: the range of
            all pictures.
    """

    def __init__(
        self,
        data_dir: str,
        path: str | None = None,
        resize: Count = 32,
        layout: Literal["auto", "class", "domain", "split"] = "auto",
        color: Literal["rgb", "grey"] = "rgb",
        extra: str | None = None,
        window: Sequence[float] | None = None,
    ):
        self.data_dir, self.path, self.resize = data_dir, path, resize
        self.window = check_window(window)
        self.layout, self.extra = layout, extra
        self.color: Literal["rgb", "grey"] = color

    def load(self) -> Arrays:
        """List the pictures, read or make the cache; ConfigError where a picture or the layout is broken."""
        if self.extra is None:
            return self.read().check()
        path = extra_path(self.extra)  # fails before the slow decoding of pictures
        arrays = self.read().check()
        extra = ImageFolder(self.data_dir, str(path), self.resize, "domain", self.color, None, self.window).read(True)
        return join_extra(arrays, extra, self.extra).check()

    def read(self, is_extra: bool = False) -> Arrays:
        """Read the folder without the checks of `load` and without extra pictures.

        Args:
            is_extra: Whether the folder is the one of extra pictures.
        """
        require(self.path is not None, "dataset=image_folder needs dataset.path=<folder of pictures>")
        root = Path(str(self.path))
        require(root.is_dir(), f"dataset.path={root} is not a folder")
        files = sorted(_pictures(root))
        if not files:
            refuse_foreign(root, "dataset=image_folder")
        require(bool(files), f"{root} holds no pictures ({', '.join(sorted(SUFFIXES))}) below its folders")
        tops, kinds = self._read_layout([f.split("/") for f in files], root)
        key = self._key(root, files, is_extra)
        images = cached(self.data_dir, root.resolve().name, key, lambda: self._decode(root, files, is_extra))["images"]
        check_spelling(kinds, f"{root}: the class folders")
        class_names, targets = np.unique(kinds, return_inverse=True)
        arrays = Arrays(
            inputs=images,
            targets=targets.astype(np.int64),
            split=np.zeros(len(files), np.int8),
            num_classes=len(class_names),
            class_names=class_names.tolist(),
            mean=half(images),
            std=half(images),
        )
        return _with_tops(arrays, tops)

    def _read_layout(self, parts: list[list[str]], root: Path) -> tuple[list[str] | None, list[str]]:
        """The top folder of each picture (None where there is none) and its class folder."""
        depth = {len(p) for p in parts}
        wanted = {"class": {2}, "domain": {3}, "split": {3}, "auto": depth}[self.layout]
        odd = next(("/".join(p) for p in parts if len(p) not in wanted & {2, 3}), None)
        if odd is not None or len(depth) != 1:
            raise ConfigError(
                f"{root} is not laid out as class/picture, domain/class/picture or (train, val, test)/class/"
                f"picture (dataset.layout={self.layout}; e.g. {odd or '/'.join(parts[0])})"
            )
        if depth == {2}:
            return None, [p[0] for p in parts]
        tops = [p[0] for p in parts]
        require(
            self.layout != "split" or set(tops) <= set(PARTS),
            f"{root} has the folders {', '.join(sorted(set(tops)))}; layout=split wants train, val, test",
        )
        return tops, [p[1] for p in parts]

    def _key(self, root: Path, files: list[str], is_extra: bool) -> object:
        listing = [(f, *fingerprint(root / f)[1:]) for f in files]
        return listing, self.resize, self.color, self.window, is_extra, READER

    def _decode(self, root: Path, files: list[str], is_extra: bool) -> dict[str, np.ndarray]:
        log.info("resizing the %s pictures of %s once", f"{len(files):,}", root)
        paths = [root / file for file in files]
        return {"images": open_pictures(paths, self.resize, self.color, self.window, str(root), is_extra)}


def _pictures(root: Path) -> list[str]:
    """Return the paths of all pictures below root, relative, with forward slashes; warn of folders without pictures.

    Hidden files and folders are ignored: .ipynb_checkpoints, macOS' ._files and __MACOSX.
    """
    files, empty = [], []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if not is_hidden(name)]
        base = Path(folder).relative_to(root)
        found = [(base / n).as_posix() for n in names if Path(n).suffix.lower() in SUFFIXES and not is_hidden(n)]
        files += found
        if not found and not below:
            empty.append(base.as_posix())
    if empty and files:
        log.warning("%s has folders without pictures, which become no classes: %s", root, listed(sorted(empty)))
    return files


def _with_tops(arrays: Arrays, tops: list[str] | None) -> Arrays:
    """The top folders become the published split if they are named so, else natural silos."""
    if tops is None:
        return arrays
    if set(tops) <= set(PARTS):
        arrays.split = np.array([PARTS[t] for t in tops], np.int8)
        return arrays
    check_spelling(tops, "the folders of natural silos")
    names, domain = np.unique(tops, return_inverse=True)
    arrays.domain, arrays.domain_names = domain.astype(np.int64), names.tolist()
    return arrays
