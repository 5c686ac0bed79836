"""The twelve 2D sets of MedMNIST v2 by flag, 28x28, with their published train, val and test parts.

Source: Yang et al., MedMNIST v2, Scientific Data 2023 (medmnist.com).
Licence: CC BY 4.0; DermaMNIST CC BY-NC 4.0.
Layout, in data_dir or in the folder of the medmnist package::

    pneumoniamnist.npz      train_images, train_labels, val_images, val_labels, test_images, test_labels

The medmnist package describes the sets: address and md5 of the files, classes, channels and numbers of images.
Set dataset.path to read a larger size (MedMNIST+).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedbench.core.options import ConfigError, require
from fedbench.data._files import download, md5_of
from fedbench.data.base import Arrays
from fedbench.data.images._published import DownloadedImages, Published


@dataclass
class MedMNIST(DownloadedImages):
    """A 2D set of MedMNIST.  chestmnist is multi-label; all others are classification, even the ordinal retinamnist.

    `path` is the npz.  Without it, <flag>.npz is read from data_dir or the folder of the medmnist package, or
    downloaded to data_dir.  `verify` also applies to files that exist.

    Args:
        flag: Name of the set.
    """

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
    ] = "pneumoniamnist"

    def load(self) -> Arrays:
        """Return the images in the file, which is downloaded if it does not exist.

        Raises:
            ConfigError: The file is another one, or cannot be downloaded.
        """
        sets, package_folder = _package()  # what the package medmnist says of each set, and the folder of its files
        info = sets[self.flag]
        # MD5 is of the file with 28 x 28 images; MD5_64, MD5_128 and MD5_224 are of files with larger ones
        larger = {int(key.removeprefix("MD5_")): md5 for key, md5 in info.items() if key.startswith("MD5_")}
        md5_by_side = {28: info["MD5"], **larger}
        file = self._file(package_folder)
        if file.is_file():
            require(
                not self.verify or md5_of(file) in md5_by_side.values(),
                f"{file} is not the published {self.flag}.npz (its md5 is neither {info['MD5']} nor that of a version "
                "with larger images): delete it to download it again, or use it as it is with dataset.verify=false",
            )
        elif self.path is None:
            url = info["url"] if self.mirror is None else f"{self.mirror.rstrip('/')}/{self.flag}.npz"
            download([url], file, info["MD5"] if self.verify else None, self.flag)
        task = "multilabel" if info["task"].startswith("multi-label") else "classification"
        classes = _names(info["label"])  # in lower case
        published = Published(
            name=self.flag,
            channels=info["n_channels"],
            sides=list(md5_by_side),
            classes=classes,
            counts=info["n_samples"],
        )
        return published.read(file, options=self, task=task)

    def _file(self, package_folder: str | None) -> Path:
        """Return the file to read, which is in data_dir if it must be downloaded.

        Args:
            package_folder: The folder where the medmnist package stores its files, or None.
        """
        if self.path is not None:
            return Path(self.path)
        name = f"{self.flag}.npz"
        in_package = Path(package_folder or "", name)
        in_data_dir = Path(self.data_dir, name)
        # a file in data_dir has priority over that of the package
        return in_package if package_folder and in_package.is_file() and not in_data_dir.is_file() else in_data_dir


def _package() -> tuple[dict[str, Any], str | None]:
    """Return what the package medmnist knows about its data sets.

    Returns:
        The description of each set by its flag, and the folder where the package stores files (None: unknown).

    Raises:
        ConfigError: The package is not installed.
    """
    try:
        from medmnist.info import DEFAULT_ROOT, INFO
    except ImportError as error:
        raise ConfigError("dataset=medmnist needs the medmnist package: run pip install medmnist") from error
    return INFO, DEFAULT_ROOT


def _names(labels: dict[str, str]) -> list[str]:
    """Return the class names of a set, shortened and in lower case.

    The digests of existing runs depend on these names.

    Args:
        labels: The names by their index as text, "0", "1" ..., in the medmnist package.
    """
    names = [label.partition("(")[0].lower() for _, label in sorted(labels.items(), key=lambda item: int(item[0]))]
    # without commas, and no names that are only numbers, which are grades
    replaced = {"normal, benign": "normal or benign", **{str(i): f"grade {i}" for i in range(len(names))}}
    return [replaced.get(name, name) for name in names]
