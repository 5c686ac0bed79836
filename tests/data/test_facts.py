"""Readers of published data sets name source, licence and layout, and refuse files of another set."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from fedbench.config.conf_tree import group_options, target_of
from fedbench.core.options import ConfigError
from fedbench.data import _bundled
from fedbench.data.images.cifar import CIFAR10, CIFAR100
from fedbench.data.images.digits import Digits
from fedbench.data.images.mnist import MNIST

GENERATED = ("Clinical", "Synthetic", "SyntheticDialogue", "SyntheticMedVQA", "Tumours", "DigitsCLIP")
OF_THE_USER = ("ImageTable", "Npy", "Npz", "PFLlib", "TableCsv", "FedPIAMixed", "ImageFolder", "TextFiles", "TextCsv")
TARGETS = sorted({str(target_of("dataset", name)) for name in group_options("dataset")})
PUBLISHED = [target for target in TARGETS if target.rpartition(".")[2] not in (*GENERATED, *OF_THE_USER)]


@pytest.mark.parametrize("target", PUBLISHED)
def test_published_sets_name_source_licence_and_layout(target: str) -> None:
    words = str(importlib.import_module(target.rpartition(".")[0]).__doc__)
    assert all(any(f"\n{name}{end}" in words for end in (":", "s:")) for name in ("Source", "Licence"))
    assert "\nLayout" in words


@pytest.mark.parametrize(
    ("kind", "shape", "classes", "said"),
    [
        (CIFAR10, (28, 28), 10, r"is not cifar10: its inputs are uint8 \(1, 28, 28\), expected uint8 \(3, 32, 32\)"),
        (CIFAR10, (32, 32, 3), 100, "is not cifar10: it has 100 classes, and the set has 10"),
        (CIFAR100, (32, 32, 3), 10, "is not cifar100: only 10 of its 100 classes occur"),
        (MNIST, (32, 32, 3), 10, r"is not mnist: its inputs are uint8 \(3, 32, 32\)"),
    ],
)
def test_the_file_of_another_set_is_refused(
    tmp_path: Path, kind: type, shape: tuple[int, ...], classes: int, said: str
) -> None:
    labels = np.arange(2 * classes) % classes
    images = np.zeros((2 * classes, *shape), np.uint8)
    names = {f"{part}_{what}": v for part in ("train", "test") for what, v in (("images", images), ("labels", labels))}
    np.savez(tmp_path / "other.npz", **names)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=said):
        kind(str(tmp_path), str(tmp_path / "other.npz")).load()


def test_a_bundled_file_of_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bundled.np, "loadtxt", lambda *_, **__: np.zeros((1796, 65)))
    with pytest.raises(ConfigError, match=r"has shape \(1796, 65\), but \(1797, 65\) is expected"):
        Digits().load()
