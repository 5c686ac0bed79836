"""Arrays as people save them: channels last, labels as rows, masks with a void label; files taken for known sets."""

from __future__ import annotations

import pickle
import tarfile
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from fedbench.core.options import ConfigError
from fedbench.data._images import channel_axis
from fedbench.data.arrays.npz import Npz
from fedbench.data.base import Arrays
from fedbench.data.images.cifar import CIFAR10, CIFAR100
from fedbench.data.images.medmnist import MedMNIST
from fedbench.data.images.mnist import MNIST, FashionMNIST
from fedbench.tasks.segmentation import Segmentation

RNG = np.random.default_rng(0)
N, SIDE = 12, 6
LABELS = np.arange(N) % 3
COLORED = RNG.integers(0, 256, (N, SIDE, SIDE, 3), dtype=np.uint8)


def read(tmp_path: Path, task: str = "auto", **arrays: np.ndarray) -> Arrays:
    np.savez(tmp_path / "a.npz", **arrays)
    return Npz(str(tmp_path), str(tmp_path / "a.npz"), task).load()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64, np.float32, np.float64, np.float16])
def test_axes_are_turned_by_one_rule_for_all_dtypes(tmp_path: Path, dtype: type) -> None:
    x = (COLORED.astype(np.uint16) * 257 if dtype in (np.uint16, np.int64) else COLORED).astype(dtype)
    last, first = read(tmp_path, X=x, y=LABELS), read(tmp_path, X=x.transpose(0, 3, 1, 2), y=LABELS)
    assert last.digest == first.digest and last.inputs.flags.c_contiguous
    assert (last.inputs == COLORED.transpose(0, 3, 1, 2)).all()
    assert last.inputs.dtype == (np.uint8 if np.issubdtype(dtype, np.integer) else np.float32)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((9, 28, 28, 3), 3), ((9, 3, 28, 28), 1), ((9, 1, 5, 7), 1), ((9, 5, 7, 4), 3),
        ((9, 4, 4, 1), 3), ((9, 1, 4, 4), 1), ((9, 3, 3, 1), 3),  # both ends: the square decides
        ((9, 64, 4, 4), 1), ((9, 512, 1, 1), 1), ((9, 256, 3, 3), 1), ((9, 28, 28, 1), 3),  # feature maps
        ((9, 9, 2, 128), 1), ((9, 16, 16, 16), 1),  # neither end
        ((9, 3, 128, 1), 1), ((9, 3, 3, 3), 1), ((9, 4, 5, 1), 1), ((9, 1, 100, 3), 1),  # either end: as documented
    ],
)  # fmt: skip
def test_which_axis_is_the_channels(shape: tuple[int, ...], axis: int) -> None:
    assert channel_axis(shape, "X") == axis


@pytest.mark.parametrize("shape", [(9, 1, 100, 3), (9, 3, 3, 3), (9, 4, 5, 1)])
def test_axes_that_no_rule_decides_get_a_warning(shape: tuple[int, ...], caplog: pytest.LogCaptureFixture) -> None:
    channel_axis(shape, "X")
    assert "axis 1 or axis 3 may be the channels: it is read as [n, C, H, W]" in caplog.text


def test_signed_signals_stay_numbers(tmp_path: Path) -> None:
    signals = RNG.integers(-900, 800, (N, 12, 100)).astype(np.int16)
    arrays = read(tmp_path, X=signals, y=LABELS)
    assert arrays.inputs.dtype == np.float32 and (arrays.inputs == signals).all()
    scans = RNG.integers(-1000, 3000, (N, SIDE, SIDE)).astype(np.int16)
    assert read(tmp_path, X=scans, y=LABELS).inputs.dtype == np.uint8


def test_rows_with_a_single_one_are_classes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fedbench.data")
    rows = np.eye(4)[LABELS]  # the last class never occurs
    for dtype in (np.uint8, np.float32, bool):
        for task in ("auto", "classification"):
            arrays = read(tmp_path, task, X=COLORED, y=rows.astype(dtype))
            assert arrays.task == "classification" and arrays.num_classes == 4 and (arrays.targets == LABELS).all()
    assert "each row of labels has a single 1, so it is one of 4 classes" in caplog.text
    assert read(tmp_path, "multilabel", X=COLORED, y=rows).targets.shape == (N, 4)
    rows[0] = 0
    assert read(tmp_path, X=COLORED, y=rows).task == "multilabel"
    with pytest.raises(ConfigError, match=r"do not fit dataset\.task=classification"):
        read(tmp_path, "classification", X=COLORED, y=rows)
    names = read(tmp_path, X=COLORED, y=np.array([b"red", b"green", b"blue"])[LABELS]).class_names
    assert names == ["blue", "green", "red"]


# --- masks --------------------------------------------------------------------------------------------------


def masks() -> np.ndarray:
    """Two classes, the first column of no class."""
    y = RNG.integers(0, 2, (N, SIDE, SIDE)).astype(np.uint8)
    y[:, :, 0] = 255
    return y


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_label_255_in_masks_is_no_class(tmp_path: Path, named: bool, dtype: type) -> None:
    names = {"classes": np.array(["tissue", "tumour"])} if named else {}
    arrays = read(tmp_path, X=COLORED, y=masks().astype(dtype), **names)
    assert arrays.task == "segmentation" and arrays.num_classes == 2
    many = np.arange(N * SIDE * SIDE).reshape(N, SIDE, SIDE)  # 432 classes, of which 255 is one
    assert read(tmp_path, X=COLORED, y=many).num_classes == N * SIDE * SIDE


def test_pixels_labelled_255_are_in_no_loss_and_in_no_score() -> None:
    """The loss and scores are those of masks cut to the labelled pixels, whatever is predicted beside them."""
    y = torch.from_numpy(masks()).long()[None]  # [1, N, H, W]
    z = torch.randn(1, N, 2, SIDE, SIDE)
    for loss in ("ce", "dice", "dice_ce"):
        task = Segmentation(loss)
        whole, cut = task.sample_statistics(z, y), task.sample_statistics(z[..., 1:], y[..., 1:])
        for name in whole:
            assert torch.allclose(whole[name], cut[name], atol=1e-6), name
        changed = z.clone()
        changed[..., 0] += 100 * torch.randn(1, N, 2, SIDE)
        assert torch.equal(task.sample_statistics(changed, y)["loss"], whole["loss"])
        leaf = z.clone().requires_grad_()
        task.loss(leaf, y).sum().backward()
        assert not leaf.grad[..., 0].any() and leaf.grad[..., 1:].any()


@pytest.mark.parametrize("names", [{}, {"classes": np.array(["tissue", "tumour"])}])
def test_masks_of_0_and_255_alone_are_refused(tmp_path: Path, names: dict) -> None:
    y = np.where(masks() == 1, 255, 0)
    with pytest.raises(ConfigError, match=r"masks contain only 0 and 255, .* divide them by 255"):
        read(tmp_path, X=COLORED, y=y, **names)


# --- known sets ---------------------------------------------------------------------------------------------


def known_file(path: Path, n: int, *shape: int, classes: int = 10, **more: np.ndarray) -> str:
    images = RNG.integers(0, 256, (n, *shape), dtype=np.uint8)
    np.savez(path, train_images=images, train_labels=np.arange(n) % classes, **more)
    return str(path)


@pytest.mark.parametrize(
    ("source", "shape", "words"),
    [
        (CIFAR10, (28, 28), "is not cifar10: its inputs are uint8 (1, 28, 28), expected uint8 (3, 32, 32)"),
        (CIFAR100, (32, 32, 3), "is not cifar100: only 10 of its 100 classes occur (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)"),
        (MNIST, (32, 32), "is not mnist: its inputs are uint8 (1, 32, 32), expected uint8 (1, 28, 28)"),
        (FashionMNIST, (28, 28, 3), "is not fashion_mnist: its inputs are uint8 (3, 28, 28)"),
    ],
)
def test_another_file_is_not_taken_for_a_known_set(tmp_path: Path, source: type, shape: tuple, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        source(str(tmp_path), known_file(tmp_path / "a.npz", 40, *shape)).load()
    assert words in str(refused.value) and "use dataset=npz to read an npz of your own" in str(refused.value)


def test_more_samples_classes_or_other_names_are_no_known_set(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    for file, words in (
        ({"n": 22, "classes": 11}, "it has 11 classes, and the set has 10"),
        ({"n": 70_001}, "it has 70,001 images, and the set has 70,000"),
        ({"n": 60_001, "test_images": np.zeros((9, 28, 28), np.uint8), "test_labels": np.arange(9)},
         "it has 60,001 train images, and the set has 60,000"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            MNIST(str(tmp_path), known_file(path, file.pop("n"), 28, 28, **file)).load()
    with np.load(known_file(tmp_path / "b.npz", 20, 32, 32, 3)) as held:
        arrays = dict(held)
    digits = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])
    np.savez(path, **arrays, classes=digits)  # SVHN, say
    with pytest.raises(ConfigError, match="it names the class eight, expected airplane, automobile"):
        CIFAR10(str(tmp_path), str(path)).load()
    names = np.array(["plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]).astype(bytes)
    np.savez(path, **arrays, classes=names)
    assert CIFAR10(str(tmp_path), str(path)).load().class_names[:3] == ["plane", "car", "bird"]  # type: ignore[index]
    floats = {**arrays, "train_images": arrays["train_images"].astype(np.float32)}
    np.savez(path, **floats)
    with pytest.raises(ConfigError, match=r"its inputs are float32 \(3, 32, 32\), expected uint8"):
        CIFAR10(str(tmp_path), str(path)).load()
    known_file(tmp_path / "pathmnist.npz", 20, 28, 28, classes=9)
    with pytest.raises(
        ConfigError, match=r"is not pathmnist: its inputs are uint8 \(1, 28, 28\), expected uint8 \(3, 28"
    ):
        MedMNIST(str(tmp_path), flag="pathmnist", verify=False).load()


def test_a_part_of_a_known_set_is_read_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    test = {"test_images": np.zeros((10, 28, 28), np.uint8), "test_labels": np.arange(10)}
    arrays = MNIST(str(tmp_path), known_file(tmp_path / "a.npz", 60, 28, 28, classes=9, **test)).load()
    assert arrays.num_classes == 10 and arrays.class_names[9] == "9"
    assert "a.npz is a part of mnist: 60 of 60,000 train images, 10 of 10,000 test images" in caplog.text
    MNIST(str(tmp_path), known_file(tmp_path / "b.npz", 60, 28, 28, classes=9)).load()
    assert "b.npz: only 9 of the 10 classes of mnist occur" in caplog.text


def python_version(source: type, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """CIFAR as torchvision stores it; images and labels in published order."""
    folder.mkdir(parents=True)
    count, n = len(source.classes.split()), len(source.classes.split())
    images, labels = [], []
    for name in chain(*source.python_members.values()):
        pixels, numbers = RNG.integers(0, 256, (n, 3 * 32 * 32), dtype=np.uint8), RNG.permutation(count)
        images.append(pixels)
        labels.append(numbers)
        content = {
            "batch_label": name,
            source.python_labels_key: numbers.tolist(),
            "data": pixels,
            "filenames": ["a.png"] * n,
        }
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))  # as Python 2 wrote them
    file, key = source.python_names_file, source.python_names_key
    (folder / file).write_bytes(pickle.dumps({key: source.classes.split()}, protocol=2))
    return np.concatenate(images).reshape(-1, 3, 32, 32), np.concatenate(labels)


@pytest.mark.parametrize("source", [CIFAR10, CIFAR100])
def test_cifar_as_torchvision_stores_it(source: type, tmp_path: Path) -> None:
    folder = tmp_path / "data" / source.python_folder
    images, labels = python_version(source, folder)
    archive = tmp_path / source.python_archive
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, source.python_folder)
    for path in (str(folder), str(archive), None):
        arrays = source(str(tmp_path / "data"), path).load()
        assert (arrays.inputs == images).all() and (arrays.targets == labels).all()
        tests = len(source.classes.split())
        assert (arrays.split[-tests:] == 2).all() and not arrays.split[:-tests].any()
        assert arrays.class_names == source.classes.split()


def test_pickles_of_cifar_run_nothing(tmp_path: Path) -> None:
    folder = tmp_path / CIFAR10.python_folder
    python_version(CIFAR10, folder)

    class Trap:
        def __reduce__(self) -> tuple:
            return Path.mkdir, (tmp_path / "sprung",)

    for content in (pickle.dumps(Trap()), b"\x80\x04nonsense", pickle.dumps({"data": [1], "labels": [1]}), b""):
        (folder / "data_batch_3").write_bytes(content)
        with pytest.raises(ConfigError, match="is damaged or not cifar10 as published"):
            CIFAR10(str(tmp_path), str(folder)).load()
    assert not (tmp_path / "sprung").exists()
    (tmp_path / "empty.tar.gz").write_bytes(b"")
    with pytest.raises(ConfigError, match="is damaged or not cifar10 as published"):
        CIFAR10(str(tmp_path), str(tmp_path / "empty.tar.gz")).load()
