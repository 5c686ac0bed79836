"""The twelve 2D sets of MedMNIST v2 by flag, 28x28, with their published train, val and test parts.

Source: Yang et al., MedMNIST v2, Scientific Data 2023 (medmnist.com).
Licence: CC BY 4.0; DermaMNIST CC BY-NC 4.0.
Layout, in data_dir or in the folder of the medmnist package::

    pneumoniamnist.npz      train_images, train_labels, val_images, val_labels, test_images, test_labels

The medmnist package supplies the facts of a set: address and md5 of its files, classes, channels and numbers of images.
Set dataset.path to read a larger size (MedMNIST+).
"""

from pathlib import Path
from typing import Any, Literal

from fedbench.core.options import ConfigError, Count, require
from fedbench.data._files import download, md5_of
from fedbench.data._published import Published
from fedbench.data.arrays.npz import load_known
from fedbench.data.base import Arrays


class MedMNIST:
    """A 2D set of MedMNIST.  chestmnist is multi-label; all others are classification, even the ordinal retinamnist.

    Args:
        flag: Name of the set.
        path: Its npz.  None: <flag>.npz in data_dir or in the folder of the medmnist package, else a download to
            data_dir.
        verify: Refuse a file, found or downloaded, whose md5 is not a published one.
        resize: Side in pixels.
        mirror: Address of a folder to download from instead.
    """

    def __init__(
        self,
        data_dir: str,
        flag: Literal[
            "bloodmnist",
            "breastmnist",
            "chestmnist",
            "dermamnist",
            "octmnist",
            "organamnist",
            "organcmnist",
            "organsmnist",
            "pathmnist",
            "pneumoniamnist",
            "retinamnist",
            "tissuemnist",
        ] = "pneumoniamnist",
        path: str | None = None,
        resize: Count | None = None,
        mirror: str | None = None,
        verify: bool = True,
    ):
        self.data_dir, self.flag, self.path, self.resize = Path(data_dir), flag, path, resize
        self.mirror, self.verify = mirror, verify

    def load(self) -> Arrays:
        """Read, or download; ConfigError where the file is another one or cannot be had."""
        sets, root = _package()
        info = sets[self.flag]
        larger = {int(k.removeprefix("MD5_")): md5 for k, md5 in info.items() if k.startswith("MD5_")}
        sides = {28: info["MD5"], **larger}
        known = Published(self.flag, info["n_channels"], list(sides), _names(info["label"]), info["n_samples"])
        file = self._file(root)
        if file.is_file():
            require(
                not self.verify or md5_of(file) in sides.values(),
                f"{file} is not the published {self.flag}.npz (its md5 is not {info['MD5']}, nor a larger "
                "size's): delete it to download it again, or use it as it is with dataset.verify=false",
            )
        elif self.path is None:
            url = info["url"] if self.mirror is None else f"{self.mirror.rstrip('/')}/{self.flag}.npz"
            download([url], file, info["MD5"] if self.verify else None, self.flag)
        task = "multilabel" if info["task"].startswith("multi-label") else "classification"
        return load_known(file, str(self.data_dir), self.resize, known, task)

    def _file(self, root: str | None) -> Path:
        """Return the file to read, or the target of the download.  root: the folder of the medmnist package."""
        if self.path is not None:
            return Path(self.path)
        file, kept = self.data_dir / f"{self.flag}.npz", Path(root or "") / f"{self.flag}.npz"
        return kept if root and kept.is_file() and not file.is_file() else file


def _package() -> tuple[dict[str, Any], str | None]:
    """Return the set descriptions of the medmnist package, and the folder of its files."""
    try:
        from medmnist.info import DEFAULT_ROOT, INFO
    except ImportError as error:
        raise ConfigError("the sets of MedMNIST need the medmnist package: pip install medmnist") from error
    return INFO, DEFAULT_ROOT


def _names(labels: dict[str, str]) -> list[str]:
    """Return the class names, shortened and in lower case, as in the digest of the data."""
    plain = [label.partition("(")[0].lower() for _, label in sorted(labels.items(), key=lambda item: int(item[0]))]
    other = {"normal, benign": "normal or benign", **{str(i): f"grade {i}" for i in range(len(plain))}}
    return [other.get(name, name) for name in plain]
