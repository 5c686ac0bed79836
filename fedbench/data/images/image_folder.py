"""Pictures in folders: class/picture, domain/class/picture, or train, val, test/class/picture.

dataset=officehome reads Office-Home (Venkateswara et al., CVPR 2017; non-commercial research).
Layout of dataset.path, one of::

    {class}/{picture}
    {domain}/{class}/{picture}
    train/{class}/{picture}, val/..., test/...

Whole pictures are resized once, without a crop, as in PGFed's Office-Home code.  The cache in data_dir/cache depends on
names, sizes and times of the files.  Classes and domains are sorted by name.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fedbench.core.options import ConfigError, Count, listed, require
from fedbench.data._depth import check_window
from fedbench.data._files import is_hidden, log
from fedbench.data._foreign import refuse_foreign
from fedbench.data._images import decode_cached, half_per_channel
from fedbench.data._names import check_spelling
from fedbench.data.base import PARTS, VAL, Arrays
from fedbench.data.images._extra import extra_path, join_extra

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
SPLIT_FOLDERS = {**PARTS, "valid": VAL, "validation": VAL}


@dataclass
class ImageFolder:
    """Pictures in folders named by class, domain or split.

    Args:
        data_dir: Folder of the cache.
        path: The folder.
        resize: Side in pixels; all pictures become square.
        layout: class (class/picture), domain (domain/class/picture) or split (train, val, test/class/picture).  auto
            infers it from the depth and the names.
        color: rgb or grey.
        extra: A folder domain/class/picture with pictures for training only.
        window: [low, high], the values that become black and white in pictures of more than 8 bits.  None: the range of
            all pictures.
    """

    data_dir: str
    path: str | None = None
    resize: Count = 32
    layout: Literal["auto", "class", "domain", "split"] = "auto"
    color: Literal["rgb", "grey"] = "rgb"
    extra: str | None = None
    window: Sequence[float] | None = None

    def __post_init__(self) -> None:
        self._window = check_window(self.window)

    def load(self) -> Arrays:
        """Return all pictures, decoded or from the cache, and the extra ones if ``extra`` is set.

        Raises:
            ConfigError: The folder has another layout, or a picture cannot be read.
        """
        if self.extra is None:
            return self.read().check()
        path = extra_path(self.extra)  # fails before the slow decoding of pictures
        arrays = self.read().check()
        extra = ImageFolder(
            self.data_dir, str(path), self.resize, layout="domain", color=self.color, window=self._window
        )  # window: the values of black and white in pictures of more than 8 bits
        return join_extra(arrays, extra.read(is_extra=True), self.extra).check()

    def read(self, is_extra: bool = False) -> Arrays:
        """Return the pictures of the folder without the final checks of `load` and without extra pictures.

        Args:
            is_extra: Whether these are the extra pictures of another set.  If they have more than 8 bits,
                dataset.window must be given, so that both sets are scaled equally.
        """
        require(
            self.path is not None,
            "dataset=image_folder needs a folder, but dataset.path is null: set dataset.path to that of the pictures",
        )
        root = Path(str(self.path))
        require(root.is_dir(), f"dataset.path={root} is not a folder: set it to the folder of the pictures")
        files = sorted(_list_pictures(root))
        if not files:
            refuse_foreign(root, "dataset=image_folder")  # such as a folder of Parquet files, which the error names
        require(
            bool(files),
            f"dataset.path={root} has no pictures ({', '.join(sorted(SUFFIXES))}) in its folders: set it to a folder "
            "of class/picture",
        )
        # tops: the domain or split folder of each picture, or None; classes: its class folder
        tops, classes = self._read_layout([file.split("/") for file in files], root, is_extra)
        paths = [root / file for file in files]
        images = decode_cached(self.data_dir, str(root), paths, self.resize, self.color, self._window, is_extra)
        check_spelling(classes, f"{root}: the class folders")
        class_names, targets = np.unique(classes, return_inverse=True)
        arrays = Arrays(
            inputs=images,
            targets=targets.astype(np.int64),
            split=np.zeros(len(files), np.int8),  # 0, training; replaced below if the folders are train, val and test
            num_classes=len(class_names),
            class_names=class_names.tolist(),
            mean=half_per_channel(images),  # 0.5 each, which gives pixels in [-1, 1]
            std=half_per_channel(images),
        )
        # train, val and test, and their codes
        if tops is not None and self.layout != "domain" and set(tops) <= set(SPLIT_FOLDERS):
            arrays.split = np.array([SPLIT_FOLDERS[top] for top in tops], np.int8)
        elif tops is not None:
            check_spelling(tops, f"{root}: the domain folders")
            names, domain = np.unique(tops, return_inverse=True)
            arrays.domain, arrays.domain_names = domain.astype(np.int64), names.tolist()
        return arrays

    def _read_layout(self, parts: list[list[str]], root: Path, is_extra: bool) -> tuple[list[str] | None, list[str]]:
        """Return the domain or split folder and the class folder of each picture.

        Args:
            parts: The parts of each picture's path below root, such as ["cat", "1.jpg"].
            root: The folder, for messages.
            is_extra: Whether it is the folder of ``extra``, whose layout is not an option.

        Returns:
            The names of the domain or split folders, None for class/picture.  And the names of the class folders.

        Raises:
            ConfigError: The paths do not fit dataset.layout.
        """
        depths = {len(path) for path in parts}
        allowed = {"class": {2}, "domain": {3}, "split": {3}, "auto": {2, 3}}[self.layout]
        if len(depths) != 1 or not depths <= allowed:
            example = next((path for path in parts if len(path) not in allowed), parts[0])
            forms = {
                "class": "class/picture",
                "domain": "domain/class/picture",
                "split": "(train, val, test)/class/picture",
            }
            expected = forms.get(self.layout) or ", or all of the form ".join(forms.values())
            reason, remedy = f"dataset.layout={self.layout}", "move the pictures, or change dataset.layout"
            if is_extra:
                reason, remedy = f"dataset.extra={root}", "move the pictures"
            raise ConfigError(
                f"{root} contains {'/'.join(example)}, but all pictures must be in folders of the form {expected} "
                f"({reason}): {remedy}"
            )
        if depths == {2}:
            return None, [path[0] for path in parts]
        tops = [path[0] for path in parts]
        require(
            self.layout != "split" or set(tops) <= set(SPLIT_FOLDERS),
            f"{root} has the folders {', '.join(sorted(set(tops)))}, but dataset.layout=split needs train, val and "
            "test: rename them, or set dataset.layout=domain",
        )
        return tops, [path[1] for path in parts]


def _list_pictures(root: Path) -> list[str]:
    """Return the relative paths of all pictures below root, and warn of folders without pictures.

    Files and folders whose names start with "." and those named "__MACOSX" are ignored.
    """
    files, empty = [], []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if not is_hidden(name)]
        base = Path(folder).relative_to(root)
        pictures = [name for name in names if Path(name).suffix.lower() in SUFFIXES and not is_hidden(name)]
        files += [(base / name).as_posix() for name in pictures]
        if not pictures and not below:
            empty.append(base.as_posix())
    if empty and files:
        log.warning("%s has folders without pictures, which are not classes: %s", root, listed(sorted(empty)))
    return files
