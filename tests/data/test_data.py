"""Data sources: the readers against small files made by hand, downloads against a server of this process."""

import functools
import gzip
import hashlib
import http.server
import io
import os
import pickle
import struct
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hydra.utils import instantiate
from PIL import Image
from tiny import compose

from fedbench.config.check import check
from fedbench.config.conf_tree import group_options
from fedbench.core.options import ConfigError
from fedbench.data import _files as files
from fedbench.data import synthetic
from fedbench.data._files import cached, read_npz
from fedbench.data._images import resize
from fedbench.data.arrays.npz import Npz
from fedbench.data.base import Arrays
from fedbench.data.images.cifar import CIFAR10, CIFAR100
from fedbench.data.images.digits import Digits
from fedbench.data.images.image_folder import ImageFolder
from fedbench.data.images.medmnist import MedMNIST
from fedbench.data.images.mnist import MNIST, FashionMNIST
from fedbench.data.synthetic import Synthetic
from fedbench.data.tables.breast_cancer import BreastCancer

RNG = np.random.default_rng(0)
RESERVED = ("split", "test_fraction", "val_fraction", "subset", "normalize", "augment")


def images(n: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, 256, (n, *shape), dtype=np.uint8)


def sentence(source: object) -> str:
    """What a user would read, checked to be one line."""
    with pytest.raises(ConfigError) as refusal:
        source.load()
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Address and folder of a file server on this machine."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}", folder
        running.shutdown()
        thread.join()


# --- Arrays -------------------------------------------------------------------------------------------------


def plain(**changes: object) -> Arrays:
    values = {
        "inputs": np.zeros((6, 1, 4, 4), np.uint8),
        "targets": np.arange(6) % 3,
        "split": np.zeros(6, np.int8),
        "num_classes": 3,
    }
    return Arrays(**{**values, **changes})


def test_arrays_that_fit_pass():
    plain(mean=(0.5,), std=(0.5,), class_names=["a", "b", "c"], domain=np.arange(6) % 2).check()
    plain(inputs={"image": np.zeros((6, 2), np.float32), "question": np.zeros((6, 3), np.int64)}).check()
    plain(targets=np.ones((6, 3), np.float32), task="multilabel").check()
    for dtype in (np.int64, np.uint8):
        plain(targets=np.full((6, 4, 4), 255, dtype), task="segmentation").check()  # of no class


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inputs": np.zeros((5, 1, 4, 4), np.uint8)}, "6 targets but 5 rows of inputs"),
        ({"inputs": {"image": np.zeros((6, 2), np.float32), "words": np.zeros((7, 2), np.int64)}}, "7 rows of words"),
        ({"split": np.zeros(7, np.int8)}, "7 rows of split"),
        ({"split": np.full(6, 4, np.int8)}, "Arrays.split has"),
        ({"domain": np.zeros(3, np.int64)}, "3 rows of domain"),
        ({"inputs": np.zeros((6, 4, 4), np.uint8)}, "expected images"),
        ({"inputs": np.zeros((6, 4))}, "float64"),
        ({"inputs": np.full((6, 4), np.nan, np.float32)}, "not finite"),
        ({"targets": np.arange(6)}, "labels span 0 to 5, expected 0 to 2"),
        ({"targets": np.zeros(6, np.int32)}, "int32"),
        ({"targets": np.zeros((6, 2), np.int64)}, "expected 1 dimension"),
        ({"targets": np.full((6, 4, 4), 3, np.uint8), "task": "segmentation"}, "labels span 3 to 3, expected 0 to 2"),
        ({"targets": np.zeros((6, 4, 4), np.int32), "task": "segmentation"}, "int32, expected uint8 or int64"),
        ({"targets": np.zeros((6, 2), np.float32), "task": "multilabel"}, "expected float32 [n, 3]"),
        ({"targets": np.zeros(0, np.int64)}, "no samples"),
        ({"num_classes": 1, "targets": np.zeros(6, np.int64)}, "at least 2"),
        ({"task": "ranking"}, "the data set's task is 'ranking', but must be one of classification"),
        ({"task": "regression"}, "expected float32 [n, "),
        ({"class_names": ["a"]}, "1 class names for 3 classes"),
        ({"mean": (0.5,) * 3}, "mean has 3 entries but the images have 1 channels"),
        ({"mean": (0.5,), "std": (0.0,)}, "images are divided by it"),
        ({"class_mask": np.ones((2, 3), bool)}, "class_mask has a row for each natural client"),
        ({"class_mask": np.ones((1, 3), bool), "domain": np.arange(6) % 2}, "must be bool with shape [2, 3]"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict, words: str):
    with pytest.raises(ConfigError) as refusal:
        plain(**changes).check()
    assert words in str(refusal.value)


def test_labels_that_partitions_look_at():
    hot = np.array([[0, 1, 1], [0, 0, 0], [1, 0, 0]], np.float32)
    multi = plain(targets=hot, inputs=np.zeros((3, 1), np.float32), split=np.zeros(3, np.int8), task="multilabel")
    assert multi.labels().tolist() == [1, 3, 0]
    masks = np.zeros((3, 2, 2), np.int64)
    masks[0, 0] = (1, 2)
    masks[1, :] = ((2, 2), (1, 0))
    segmented = plain(
        targets=masks, inputs=np.zeros((3, 1), np.float32), split=np.zeros(3, np.int8), task="segmentation"
    )
    assert segmented.labels().tolist() == [1, 2, 0]


# --- bundled and generated ----------------------------------------------------------------------------------


def test_digits():
    arrays = Digits().load()
    assert arrays.inputs.shape == (1797, 1, 8, 8) and arrays.inputs.dtype == np.float32
    assert arrays.inputs.min() == 0 and arrays.inputs.max() == 1
    assert arrays.num_classes == 10 and not arrays.split.any()


def test_breast_cancer_is_standardized():
    arrays = BreastCancer().load()
    assert arrays.inputs.shape == (569, 30)
    assert np.allclose(arrays.inputs.mean(0), 0, atol=1e-5) and np.allclose(arrays.inputs.std(0), 1, atol=1e-5)
    assert np.bincount(arrays.targets).tolist() == [212, 357]


@pytest.mark.parametrize("kind", ["linear", "images", "multilabel", "segmentation", "dict", "questions", "classmask"])
def test_synthetic_kinds_follow_their_options(kind: str):
    options = {"kind": kind, "n": 120, "num_classes": 5, "num_domains": 3}
    one, two, other = Synthetic(**options).load(), Synthetic(**options).load(), Synthetic(**options, seed=1).load()
    assert len(one) == 120 and one.num_classes == 5 and one.num_domains == 3
    assert (one.targets == two.targets).all() and not np.array_equal(one.targets, other.targets)
    parts = one.inputs if isinstance(one.inputs, dict) else {"x": one.inputs}
    again = two.inputs if isinstance(two.inputs, dict) else {"x": two.inputs}
    assert all((parts[k] == again[k]).all() for k in parts)


def test_synthetic_shapes_and_masks(monkeypatch: pytest.MonkeyPatch):
    arrays = Synthetic("dict").load()
    assert arrays.inputs["image"].shape == (600, 1, 8, 8) and arrays.inputs["image"].dtype == np.float32
    assert arrays.inputs["question"].shape == (600, 6) and arrays.inputs["question"].dtype == np.int64
    assert Synthetic("images", shape=[3, 16, 12]).load().inputs.shape == (600, 3, 16, 12)
    masked = Synthetic("classmask", num_domains=3).load()
    assert masked.class_mask[masked.domain, masked.targets].all()
    assert len({tuple(row) for row in masked.class_mask}) == 3
    monkeypatch.setattr(synthetic, "NOISE", 0)
    masks = Synthetic("segmentation").load()
    assert ((masks.inputs[:, 0] > 0) == (masks.targets > 0)).all()


def test_generated_masks_are_small_and_have_the_digest_that_int64_ones_had():
    """More than are generated at a time; the digest is that of masks that were int64 and generated all at once."""
    arrays = Synthetic("segmentation", n=3000, shape=[3, 16, 20]).load()
    assert arrays.targets.dtype == np.uint8
    assert arrays.digest == "10d2ba86ec22e8eb46815a7e669c430e8554471c072c19de8722e60636f656eb"
    assert replace(arrays, targets=arrays.targets.astype(np.int64)).digest == arrays.digest
    assert Synthetic("segmentation", n=20, num_classes=300).load().targets.dtype == np.int64


def test_synthetic_is_learnable():
    """A linear fit beats chance by far; the dict kind cannot be answered from the picture alone."""
    arrays = Synthetic("linear").load()
    x, y = np.c_[arrays.inputs, np.ones(600)], np.eye(4)[arrays.targets]
    weights = np.linalg.lstsq(x[:300], y[:300], rcond=None)[0]
    assert ((x[300:] @ weights).argmax(1) == arrays.targets[300:]).mean() > 0.6
    asked = Synthetic("dict", n=4000).load()
    pictures = asked.inputs["image"].reshape(4000, -1)
    fit = np.linalg.lstsq(pictures, np.eye(4)[asked.targets], rcond=None)[0]
    assert ((pictures @ fit).argmax(1) == asked.targets).mean() < 0.5


def test_synthetic_refuses_what_does_not_fit():
    with pytest.raises(ConfigError, match="num_domains=0 is too small"):
        Synthetic("classmask")
    with pytest.raises(ConfigError, match=r"\[channels, height, width\]"):
        Synthetic("images", shape=[20])


# --- npz ----------------------------------------------------------------------------------------------------


def save(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def parts(n_train: int = 12, n_val: int = 0, n_test: int = 6, *shape: int) -> dict[str, np.ndarray]:
    """The contents of a file of the MedMNIST layout."""
    file = {}
    for part, n in (("train", n_train), ("val", n_val), ("test", n_test)):
        if n:
            file[f"{part}_images"] = images(n, *(shape or (8, 8)))
            file[f"{part}_labels"] = (np.arange(n) % 3)[:, None].astype(np.uint8)
    return file


def load(path: Path, **options: object) -> Arrays:
    return Npz(str(path.parent / "data"), str(path), **options).load()


def test_npz_in_medmnist_layout(tmp_path: Path):
    file = parts(12, 3, 6)
    arrays = load(save(tmp_path / "a.npz", **file))
    assert arrays.inputs.shape == (21, 1, 8, 8) and arrays.inputs.dtype == np.uint8
    assert (arrays.inputs[12:15, 0] == file["val_images"]).all()
    assert np.bincount(arrays.split).tolist() == [12, 3, 6]
    assert arrays.num_classes == 3 and arrays.mean == (0.5,) and arrays.std == (0.5,)


def test_npz_colour_layouts(tmp_path: Path):
    last = parts(4, 0, 2, 8, 8, 3)
    first = {k: v.transpose(0, 3, 1, 2) if v.ndim == 4 else v for k, v in last.items()}
    a, b = load(save(tmp_path / "a.npz", **last)), load(save(tmp_path / "b.npz", **first))
    assert a.inputs.shape == (6, 3, 8, 8) and (a.inputs == b.inputs).all() and a.mean == (0.5,) * 3


def test_npz_flat_layout_with_clients_and_split(tmp_path: Path):
    file = {
        "X": RNG.standard_normal((6, 5)),
        "y": np.array(["cat", "dog", "cat", "dog", "cat", "cat"]),
        "client": np.array(["b", "a", "b", "c", "a", "a"]),
        "split": np.array(["train", "train", "val", "test", "test", "train"]),
    }
    arrays = load(save(tmp_path / "a.npz", **file))
    assert arrays.inputs.dtype == np.float32 and arrays.mean is None
    assert arrays.class_names == ["cat", "dog"] and arrays.targets.tolist() == [0, 1, 0, 1, 0, 0]
    assert arrays.domain_names == ["a", "b", "c"] and arrays.domain.tolist() == [1, 0, 1, 2, 0, 0]
    assert arrays.split.tolist() == [0, 0, 1, 2, 2, 0]


def test_npz_whose_first_feature_numbers_the_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As pandas' index does where a frame was written with it."""
    x = np.random.default_rng(0).standard_normal((30, 3))
    load(save(tmp_path / "a.npz", X=x, y=np.arange(30) % 2))
    assert "numbers the rows" not in caplog.text
    load(save(tmp_path / "b.npz", X=np.c_[np.arange(30), x], y=np.arange(30) % 2))
    assert "b.npz: the first column of X numbers the rows" in caplog.text


def test_npz_tasks_are_read_off_the_labels(tmp_path: Path):
    hot = (RNG.random((6, 4)) > 0.5).astype(np.int64)
    assert load(save(tmp_path / "a.npz", X=images(6, 8, 8), y=hot)).task == "multilabel"
    masks = RNG.integers(0, 3, (6, 8, 8))
    assert load(save(tmp_path / "b.npz", X=images(6, 8, 8), y=masks)).task == "segmentation"
    named = save(tmp_path / "c.npz", X=images(6, 8, 8), y=np.arange(6) % 2, classes=np.array(["a", "b", "c"]))
    assert load(named).num_classes == 3


def test_npz_resize_is_cached(tmp_path: Path):
    path = save(tmp_path / "a.npz", **parts())
    arrays = load(path, resize=5)
    assert arrays.inputs.shape == (18, 1, 5, 5)
    cache = list((tmp_path / "data" / "cache").iterdir())
    assert len(cache) == 1
    assert (load(path, resize=5).inputs == arrays.inputs).all()
    save(path, **parts())  # another file of the same name
    assert (load(path, resize=5).inputs != arrays.inputs).any()


def test_npz_of_broken_files_is_one_sentence(tmp_path: Path):
    whole = save(tmp_path / "whole.npz", **parts())
    for cut in (0, 10, 400, os.path.getsize(whole) // 2, os.path.getsize(whole) - 40):
        path = tmp_path / "cut.npz"
        path.write_bytes(whole.read_bytes()[:cut])
        assert "damaged" in sentence(Npz("d", str(path)))
    flipped = bytearray(whole.read_bytes())
    flipped[len(flipped) // 2] ^= 255
    path.write_bytes(flipped)
    assert "damaged" in sentence(Npz("d", str(path)))
    assert "does not exist" in sentence(Npz("d", str(tmp_path / "absent.npz")))
    assert "set dataset.path to" in sentence(Npz("d"))
    path.write_text("name,value")
    assert (
        sentence(Npz("d", str(path)))
        == f"{path} is damaged or not an npz file: write it again by numpy.savez, or download it again"
    )
    np.save(tmp_path / "single.npy", np.zeros(3))
    assert "single array" in sentence(Npz("d", str(tmp_path / "single.npy")))


@pytest.mark.parametrize("name, packed", [("huge.npz", True), ("huge.npy", False)])
def test_npz_whose_header_claims_more_than_there_is(tmp_path: Path, name: str, packed: bool) -> None:
    """3.6 TiB in a file of some hundred bytes: refused before NumPy asks for that memory."""
    member = io.BytesIO()
    np.lib.format.write_array_header_1_0(member, {"descr": "<f8", "fortran_order": False, "shape": (500_000_000_000,)})
    member.write(bytes(64))
    path = tmp_path / name
    path.write_bytes(member.getvalue())
    if packed:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("train_images.npy", member.getvalue())
            archive.writestr("train_labels.npy", member.getvalue())
    said = sentence(Npz("d", str(path)))
    assert "damaged or not an npz file" in said
    assert not packed or "train_images announces 4,000,000,000,000 bytes, but the file contains 64" in said


def test_npz_that_does_not_fit_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "a.npz", X=np.zeros((4, 3)), y=np.arange(4))

    def full(*args: object) -> None:
        raise MemoryError("Unable to allocate 3.64 TiB")

    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", full)
    assert "does not fit in memory (Unable to allocate 3.64 TiB)" in sentence(Npz("d", str(tmp_path / "a.npz")))


def test_npz_of_classes_that_hardly_occur(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """3,001 outputs for 4 classes: said, unless the file names them or most of them occur."""
    path = tmp_path / "a.npz"

    def load(labels: object, **more: object) -> Arrays:
        np.savez(path, X=np.zeros((4, 3), np.float32), y=np.array(labels), **more)
        return Npz("d", str(path)).load()

    with pytest.raises(
        ConfigError, match=r"largest label is 3,000, which implies 3,001 classes, .* \(0, 5, 10, 3000\)"
    ):
        load([0, 5, 10, 3000])
    with pytest.raises(ConfigError, match="256 classes, and only 2 of them occur"):
        load(np.array([0, 255, 0, 255]))
    with pytest.raises(ConfigError, match=r"labels start at 1 \(1, 2, 3, 4\), and class 0 does not occur: "):
        load([1, 2, 3, 4])
    with pytest.raises(ConfigError, match=r"labels start at 1 \(1, 2\)"):
        load(np.array([1, 2] * 8).reshape(4, 2, 2))  # masks
    assert load([0, 1, 2, 7]).num_classes == 8
    assert "only 4 of 8 classes occur (0, 1, 2, 7)" in caplog.text
    assert load([1, 2, 3, 4], classes=np.array(list("abcde"))).num_classes == 5
    assert load([0, 1, 2, 9], classes=np.array(list("abcdefghij"))).num_classes == 10


def test_npz_never_runs_a_pickle(tmp_path: Path):
    class Trap:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "sprung"),)

    inside = save(tmp_path / "inside.npz", X=np.array([Trap()], dtype=object), y=np.zeros(1))
    bare = tmp_path / "bare.npz"
    bare.write_bytes(pickle.dumps(Trap()))
    for path in (inside, bare):
        assert "pickled Python objects" in sentence(Npz("d", str(path)))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({"X": images(6, 8, 8), "y": np.zeros(5)}, "X has 6 rows, y has 5 rows"),
        ({"X": images(6, 8, 8), "y": np.arange(6), "client": np.arange(4)}, "client has 4 rows"),
        ({**parts(), "train_labels": np.zeros((11, 1))}, "train_images has 12 rows, train_labels has 11 rows"),
        ({**parts(), "val_images": images(3, 8, 8)}, "only one of val_images and val_labels"),
        ({**parts(), "test_images": images(6, 9, 9)}, "have samples of different shapes"),
        ({"images": images(6, 8, 8)}, "lacks X and y"),
        ({"X": images(6, 8, 8), "y": np.arange(6) - 1}, "labels span -1 to 4"),
        ({"X": images(6, 8, 8), "y": np.arange(6) / 2}, "must be integers"),
        ({"X": images(6, 8, 8), "y": np.arange(6) * 1e30}, "must be integers"),
        ({"X": images(6, 8, 8), "y": np.array([0, 1, 0, 1, 0, np.nan])}, "must be integers"),
        ({"X": images(6, 8, 8), "y": np.arange(12).reshape(6, 2)}, "only 0 and 1"),
        ({"X": images(6, 8, 8), "y": np.zeros(6)}, "at least 2"),
        ({"X": images(6, 8, 8), "y": np.arange(6), "split": np.full(6, 7)}, "the array split contains 7, but may"),
        ({"X": np.array(["a"] * 6), "y": np.arange(6)}, "expected numbers"),
        ({"X": np.float32(3), "y": np.arange(6)}, "X has 1 rows, y has 6 rows"),
    ],
)
def test_npz_contents_that_do_not_fit(tmp_path: Path, file: dict, words: str):
    assert words in sentence(Npz("d", str(save(tmp_path / "a.npz", **file))))


def test_npz_task_must_fit(tmp_path: Path):
    path = save(tmp_path / "a.npz", **parts())
    assert "do not fit dataset.task=segmentation" in sentence(Npz("d", str(path), task="segmentation"))


# --- MNIST --------------------------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def idx_files(folder: Path) -> dict[str, np.ndarray]:
    """The four files of MNIST, small, gzipped; returns what they hold."""
    folder.mkdir(parents=True, exist_ok=True)
    held = {}
    for part, name, n in (("train", "train", 20), ("test", "t10k", 10)):
        held[f"{part}_images"], held[f"{part}_labels"] = images(n, 28, 28), np.arange(n, dtype=np.uint8) % 10
        (folder / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(held[f"{part}_images"])))
        (folder / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(held[f"{part}_labels"])))
    return held


def test_mnist_is_downloaded_once_and_converted(tmp_path: Path, server: tuple[str, Path]):
    address, folder = server
    held = idx_files(folder)
    source = MNIST(str(tmp_path / "data"), mirror=address, verify=False)
    arrays = source.load()
    assert (arrays.inputs[:20, 0] == held["train_images"]).all()
    assert arrays.targets.tolist() == [*held["train_labels"], *held["test_labels"]]
    assert np.bincount(arrays.split).tolist() == [20, 0, 10]
    for file in folder.iterdir():
        file.unlink()
    assert (source.load().inputs == arrays.inputs).all()
    assert not list((tmp_path / "data").rglob("*.partial"))


def test_download_with_another_md5_is_refused(tmp_path: Path, server: tuple[str, Path]):
    address, folder = server
    idx_files(folder)
    said = sentence(MNIST(str(tmp_path / "data"), mirror=address))
    assert "md5" in said and "train-images-idx3-ubyte.gz" in said and str(tmp_path / "data") in said
    assert not list((tmp_path / "data").rglob("*ubyte*"))


def test_download_with_the_published_md5(tmp_path: Path, server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch):
    address, folder = server
    idx_files(folder)
    names = {"train_images": "train-images-idx3", "train_labels": "train-labels-idx1"}
    names |= {"test_images": "t10k-images-idx3", "test_labels": "t10k-labels-idx1"}
    sums = {k: hashlib.md5((folder / f"{v}-ubyte.gz").read_bytes()).hexdigest() for k, v in names.items()}
    monkeypatch.setattr(FashionMNIST, "md5", sums)
    arrays = FashionMNIST(str(tmp_path / "data"), mirror=address).load()
    assert len(arrays) == 30 and arrays.class_names[9] == "Ankle boot"


def test_without_network_the_sentence_says_what_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real, asked = files._download_one, []
    monkeypatch.setattr(files, "_download_one", lambda url, *rest: (asked.append(url), real(url, *rest)))
    nowhere = "http://127.0.0.1:9"  # the discard port: nobody answers
    for source, file in (
        (MNIST(str(tmp_path), mirror=nowhere), "train-images-idx3-ubyte.gz"),
        (CIFAR10(str(tmp_path), mirror=nowhere), "cifar-10-binary.tar.gz"),
        (CIFAR100(str(tmp_path), mirror=nowhere), "cifar-100-binary.tar.gz"),
        (MedMNIST(str(tmp_path), flag="pathmnist", mirror=nowhere), "pathmnist.npz"),
    ):
        said = sentence(source)
        assert f"put {file} from {nowhere}/" in said and str(tmp_path) in said
    assert len(asked) == 4  # the first file of each, once


def test_a_missing_file_on_the_server_is_one_sentence(tmp_path: Path, server: tuple[str, Path]):
    assert "HTTP Error 404" in sentence(CIFAR10(str(tmp_path), mirror=server[0]))


def test_mnist_reads_a_folder_of_plain_or_torchvision_files(tmp_path: Path):
    raw = tmp_path / "MNIST" / "raw"
    idx_files(raw)
    for file in raw.iterdir():
        (raw / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
        file.unlink()
    assert len(MNIST(str(tmp_path)).load()) == 30
    assert len(MNIST("elsewhere", str(raw)).load()) == 30
    assert MNIST(str(tmp_path / "new"), str(raw), resize=14).load().inputs.shape == (30, 1, 14, 14)


def test_mnist_damage_is_one_sentence(tmp_path: Path):
    idx_files(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    content = path.read_bytes()
    for broken in (content[:-500], b"no gzip", gzip.compress(b"\0\0\x09\x01\0\0\0\1\0"), gzip.compress(b"")):
        path.write_bytes(broken)
        assert "damaged or not an idx file" in sentence(MNIST("d", str(tmp_path)))
    path.unlink()
    assert "does not contain train-images" in sentence(MNIST("d", str(tmp_path)))
    assert "does not exist" in sentence(MNIST("d", str(tmp_path / "absent.npz")))


def test_mnist_of_the_shared_file(tmp_path: Path, shared_data: Path):
    arrays = MNIST(str(tmp_path), str(shared_data / "mnist.npz")).load()
    assert arrays.inputs.shape == (70000, 1, 28, 28)
    assert np.bincount(arrays.split).tolist() == [60000, 0, 10000]
    assert arrays.targets[arrays.split == 2][:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert MNIST(str(shared_data)).load().inputs[-1].tobytes() == arrays.inputs[-1].tobytes()  # found in data_dir


# --- CIFAR --------------------------------------------------------------------------------------------------


def cifar_archive(path: Path, label_bytes: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """A small archive of the binary version; returns the images and (last) labels in published order."""
    folder, names, meta = (
        ("cifar-10-batches-bin", [f"data_batch_{i}.bin" for i in range(1, 6)], "batches.meta.txt")
        if label_bytes == 1
        else ("cifar-100-binary", ["train.bin"], "fine_label_names.txt")
    )
    all_images, all_labels = [], []
    with tarfile.open(path, "w:gz") as archive:

        def add(name: str, content: bytes) -> None:
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))

        for name in [*names, "test_batch.bin" if label_bytes == 1 else "test.bin"]:
            n, count = (4, 10) if label_bytes == 1 else (50, 100)
            pictures, labels = images(n, 3, 32, 32), RNG.permutation(count)[: n * label_bytes].reshape(n, -1)
            labels = labels.astype(np.uint8)
            all_images.append(pictures)
            all_labels.append(labels[:, -1])
            add(name, np.concatenate([labels, pictures.reshape(n, -1)], 1).tobytes())
        add(meta, "\n".join((CIFAR10 if label_bytes == 1 else CIFAR100).classes.split()).encode())
    return np.concatenate(all_images), np.concatenate(all_labels)


@pytest.mark.parametrize(("source", "label_bytes"), [(CIFAR10, 1), (CIFAR100, 2)])
def test_cifar_is_downloaded_and_converted(source, label_bytes: int, tmp_path: Path, server: tuple[str, Path]):
    address, folder = server
    pictures, labels = cifar_archive(folder / source.archive, label_bytes)
    cifar = source(str(tmp_path / "data"), mirror=address, verify=False)
    arrays = cifar.load()
    assert (arrays.inputs == pictures).all() and (arrays.targets == labels).all()
    last = 4 if label_bytes == 1 else 50
    assert (arrays.split[-last:] == 2).all() and not arrays.split[:-last].any()
    assert arrays.num_classes == len(source.classes.split()) and arrays.class_names == source.classes.split()
    assert (tmp_path / "data" / f"{source.name}.npz").is_file()
    (folder / source.archive).unlink()
    again = cifar.load()
    assert (again.inputs == pictures).all() and again.class_names == arrays.class_names


def test_cifar_md5_is_checked(tmp_path: Path, server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch):
    address, folder = server
    cifar_archive(folder / CIFAR10.archive)
    assert f"that of the published file is {CIFAR10.md5}" in sentence(CIFAR10(str(tmp_path), mirror=address))
    good = hashlib.md5((folder / CIFAR10.archive).read_bytes()).hexdigest()
    monkeypatch.setattr(CIFAR10, "md5", good)
    assert len(CIFAR10(str(tmp_path), mirror=address).load()) == 24


def test_cifar_from_the_archive_its_folder_and_resized(tmp_path: Path):
    archive = tmp_path / CIFAR10.archive
    pictures, _ = cifar_archive(archive)
    assert (CIFAR10("d", str(archive)).load().inputs == pictures).all()
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    small = CIFAR10(str(tmp_path / "data"), str(tmp_path / CIFAR10.folder), resize=28).load()
    assert (small.inputs == resize(pictures, 28)).all()


@pytest.mark.parametrize("source", [CIFAR10, CIFAR100])
def test_cifar_names_and_statistics(source, tmp_path: Path):
    """Files without names get the data set's; the pixels' own statistics are an option."""
    file = parts(60, 0, 6, 32, 32, 3)
    file["train_labels"] = np.arange(60) % len(source.classes.split())
    path = save(tmp_path / "c.npz", **{**file, "test_labels": np.arange(6)})
    arrays = source("d", str(path)).load()
    assert len(arrays.class_names) == len(source.classes.split()) == len(set(arrays.class_names))
    assert arrays.class_names[0] in ("airplane", "apple") and arrays.mean == (0.5,) * 3
    own = source("d", str(path), statistics="own").load()
    assert (own.mean, own.std) == source.train_statistics


def test_cifar_damage_is_one_sentence(tmp_path: Path):
    archive = tmp_path / CIFAR10.archive
    cifar_archive(archive)
    content = archive.read_bytes()
    for broken in (content[: len(content) // 2], b"no archive", b""):
        archive.write_bytes(broken)
        assert "damaged" in sentence(CIFAR10("d", str(archive)))
    assert "does not exist" in sentence(CIFAR10("d", str(tmp_path / "absent")))


def jpeg_file(path: Path, n: int = 12, side: int = 32) -> np.ndarray:
    """A file of JPEG streams, every third one a test image; returns the decoded images in file order."""
    streams, decoded = [], []
    for picture in images(n, side, side, 3):
        buffer = io.BytesIO()
        Image.fromarray(picture).save(buffer, "JPEG")
        streams.append(np.frombuffer(buffer.getvalue(), np.uint8))
        decoded.append(np.asarray(Image.open(buffer)).transpose(2, 0, 1))
    save(
        path,
        jpeg=np.concatenate(streams),
        offset=np.cumsum([0] + [len(s) for s in streams]),
        label=(np.arange(n) % 10).astype(np.uint8),
        is_test=np.arange(n) % 3 == 0,
        classes=np.array(CIFAR10.classes.split()),
    )
    return np.stack(decoded)


def test_cifar_from_jpeg_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "cifar10_jpeg.npz"
    decoded = jpeg_file(path)
    order = np.argsort(np.arange(12) % 3 == 0, kind="stable")  # train first
    arrays = CIFAR10(str(tmp_path)).load()  # found in data_dir by its name
    assert (arrays.inputs == decoded[order]).all()
    assert arrays.targets.tolist() == (np.arange(12) % 10)[order].tolist()
    assert arrays.split.tolist() == [0] * 8 + [2] * 4 and arrays.class_names[1] == "automobile"
    monkeypatch.setattr(Image, "open", None)
    assert (CIFAR10(str(tmp_path), str(path)).load().inputs == arrays.inputs).all()


def test_cifar_jpeg_damage_is_one_sentence(tmp_path: Path):
    path = tmp_path / "j.npz"
    jpeg_file(path)
    file = read_npz(path)
    save(path, **{**file, "jpeg": np.zeros_like(file["jpeg"])})
    assert "image 0 cannot be decoded" in sentence(CIFAR10(str(tmp_path), str(path)))
    save(path, **{**file, "offset": file["offset"][:-1]})
    assert "must have" in sentence(CIFAR10(str(tmp_path), str(path)))
    jpeg_file(path, side=16)
    assert "image 0 cannot be decoded (it has 16 x 16 pixels, " in sentence(CIFAR10(str(tmp_path), str(path)))


def test_cifar_of_the_shared_file(tmp_path: Path, shared_data: Path):
    """The first 3,000 images of the real file (the whole is a slow test)."""
    with np.load(shared_data / "cifar10_jpeg.npz") as file:
        cut = {k: file[k][:3000] for k in ("label", "is_test")} | {"classes": file["classes"]}
        cut["offset"] = file["offset"][:3001]
        cut["jpeg"] = file["jpeg"][: cut["offset"][-1]]
    arrays = CIFAR10(str(tmp_path), str(save(tmp_path / "cut.npz", **cut))).load()
    assert arrays.inputs.shape == (3000, 3, 32, 32) and arrays.class_names[0] == "airplane"
    assert 100 < arrays.inputs.mean() < 140 and arrays.inputs.std() > 50


@pytest.mark.slow
def test_cifar_of_the_whole_shared_file(tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch):
    """60,000 images are decoded once, and come from the cache then."""
    source = CIFAR10(str(tmp_path), str(shared_data / "cifar10_jpeg.npz"))
    arrays = source.load()
    assert np.bincount(arrays.targets[arrays.split == 2]).tolist() == [1000] * 10
    assert np.bincount(arrays.targets[arrays.split == 0]).tolist() == [5000] * 10
    monkeypatch.setattr(Image, "open", lambda *_: pytest.fail("decoded again"))
    again = source.load()
    assert (again.inputs[::997] == arrays.inputs[::997]).all()


# --- MedMNIST -----------------------------------------------------------------------------------------------


needs_medmnist = pytest.mark.skipif(find_spec("medmnist") is None, reason="needs the medmnist package")


@needs_medmnist
def test_medmnist_from_the_server_and_from_data_dir(tmp_path: Path, server: tuple[str, Path]):
    address, folder = server
    file = parts(12, 3, 6, 28, 28, 3)
    file["train_labels"] = np.arange(12) % 9
    file |= {f"{part}_labels": file[f"{part}_labels"][:, 0] for part in ("val", "test")}
    save(folder / "pathmnist.npz", **file)
    strict = MedMNIST(str(tmp_path), flag="pathmnist", mirror=address)
    assert "md5" in sentence(strict)
    source = MedMNIST(str(tmp_path), flag="pathmnist", mirror=address, verify=False)
    arrays = source.load()
    assert arrays.num_classes == 9 and arrays.class_names[0] == "adipose"
    assert arrays.inputs.shape == (21, 3, 28, 28)
    assert "verify=false" in sentence(strict)  # the file is there now, but not the published one
    grey = {key: value[..., 0] if value.ndim == 4 else value for key, value in file.items()}
    save(tmp_path / "breastmnist.npz", **grey)
    assert "9 classes, and the set has 2" in sentence(MedMNIST(str(tmp_path), flag="breastmnist", verify=False))


@needs_medmnist
def test_chestmnist_is_multilabel(tmp_path: Path):
    file = parts(6, 2, 4, 28, 28)
    for part, n in (("train", 6), ("val", 2), ("test", 4)):
        file[f"{part}_labels"] = RNG.integers(0, 2, (n, 14), dtype=np.uint8)
    save(tmp_path / "chestmnist.npz", **file)
    arrays = MedMNIST(str(tmp_path), flag="chestmnist", verify=False).load()
    assert arrays.task == "multilabel" and arrays.targets.shape == (12, 14)
    assert arrays.targets.dtype == np.float32


@needs_medmnist
def test_medmnist_of_the_shared_file(tmp_path: Path, shared_data: Path):
    """The shared file has fewer training images than the published one, so it must be asked for."""
    path = str(shared_data / "pneumoniamnist.npz")
    assert "verify=false" in sentence(MedMNIST(str(tmp_path), path, flag="pneumoniamnist"))
    arrays = MedMNIST(str(tmp_path), path, flag="pneumoniamnist", verify=False).load()
    assert np.bincount(arrays.split).tolist() == [3882, 524, 624]
    assert arrays.class_names == ["normal", "pneumonia"]


# --- image folders ------------------------------------------------------------------------------------------


def pictures(root: Path, folders: list[str], n: int = 3, mode: str = "RGB") -> None:
    for i, folder in enumerate(folders):
        (root / folder).mkdir(parents=True)
        for k in range(n):
            size = (20 + i, 30 + k)
            Image.new(mode, size, 40 * i + k if mode == "L" else (40 * i, k, 7)).save(root / folder / f"{k}.png")


def test_image_folder_of_classes(tmp_path: Path):
    root = tmp_path / "pets"
    pictures(root, ["dog", "cat"])
    (root / "readme.txt").touch()
    arrays = ImageFolder(str(tmp_path / "data"), str(root), resize=16).load()
    assert arrays.inputs.shape == (6, 3, 16, 16) and arrays.class_names == ["cat", "dog"]
    assert arrays.targets.tolist() == [0, 0, 0, 1, 1, 1]
    assert arrays.inputs[0, :, 0, 0].tolist() == [40, 0, 7] and arrays.inputs[3, :, 0, 0].tolist() == [0, 0, 7]
    assert arrays.domain is None and not arrays.split.any()


def test_image_folder_of_domains_in_grey(tmp_path: Path):
    root = tmp_path / "office"
    pictures(root, ["art/bike", "art/mug", "real/bike", "real/mug"], mode="L")
    arrays = ImageFolder(str(tmp_path / "data"), str(root), resize=8, color="grey").load()
    assert arrays.inputs.shape == (12, 1, 8, 8)
    assert arrays.domain_names == ["art", "real"] and arrays.class_names == ["bike", "mug"]
    assert (
        arrays.domain.tolist() == [0] * 6 + [1] * 6 and arrays.targets.tolist() == [0] * 3 + [1] * 3 + [0] * 3 + [1] * 3
    )


def test_image_folder_of_a_published_split(tmp_path: Path):
    root = tmp_path / "set"
    pictures(root, ["train/a", "train/b", "test/a", "test/b"])
    arrays = ImageFolder(str(tmp_path / "data"), str(root)).load()
    assert np.bincount(arrays.split).tolist() == [6, 0, 6] and arrays.domain is None
    domains = ImageFolder(str(tmp_path / "data"), str(root), layout="domain").load()  # natural clients of these names
    assert domains.domain_names == ["test", "train"] and not domains.split.any()


def test_image_folder_cache_follows_the_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = tmp_path / "pets"
    pictures(root, ["dog", "cat"])
    source = ImageFolder(str(tmp_path / "data"), str(root))
    first = source.load()
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", None)
        assert (source.load().inputs == first.inputs).all()
    Image.new("RGB", (40, 40), (255, 255, 255)).save(root / "cat" / "0.png")
    assert (source.load().inputs[0] == 255).all()


def test_image_folder_mistakes_are_one_sentence(tmp_path: Path):
    data, root = str(tmp_path / "data"), tmp_path / "pets"
    assert "set dataset.path to" in sentence(ImageFolder(data))
    assert "is not a folder" in sentence(ImageFolder(data, str(root)))
    root.mkdir()
    assert "has no pictures" in sentence(ImageFolder(data, str(root)))
    pictures(root, ["dog", "cat"])
    assert "contains cat/0.png" in (problem := sentence(ImageFolder(data, str(root), layout="domain")))
    assert problem.endswith("(dataset.layout=domain): move the pictures, or change dataset.layout")
    own = tmp_path / "own"
    pictures(own, ["art/dog", "art/cat"])
    problem = sentence(ImageFolder(data, str(own), extra=str(root)))
    assert problem.endswith(f"(dataset.extra={root}): move the pictures")
    pictures(root, ["art/mug"])
    assert "must be in folders of the form class/picture, or all of the form domain" in sentence(
        ImageFolder(data, str(root))
    )
    other = tmp_path / "other"
    pictures(other, ["a", "b"])
    (other / "b" / "1.png").write_bytes(b"\x89PNG no more")
    assert "b/1.png cannot be read as a picture" in sentence(ImageFolder(data, str(other)))
    single = tmp_path / "single"
    pictures(single, ["only"])
    assert "at least 2" in sentence(ImageFolder(data, str(single)))


# --- caches and files of the conf folder ---------------------------------------------------------------------


def test_a_damaged_cache_is_made_again(tmp_path: Path):
    made = []

    def make() -> dict[str, np.ndarray]:
        made.append(1)
        return {"a": np.arange(5)}

    assert cached(str(tmp_path), "x", 1, make)["a"].tolist() == [0, 1, 2, 3, 4]
    file = next((tmp_path / "cache").iterdir())
    file.write_bytes(file.read_bytes()[:30])
    assert cached(str(tmp_path), "x", 1, make)["a"].tolist() == [0, 1, 2, 3, 4]
    assert cached(str(tmp_path), "x", 1, make)["a"].tolist() == [0, 1, 2, 3, 4]
    assert len(made) == 2


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").touch()
    assert cached(str(tmp_path / "file"), "x", 1, lambda: {"a": np.arange(2)})["a"].tolist() == [0, 1]
    assert "every start converts them again" in caplog.text


@pytest.mark.parametrize("name", group_options("dataset"))
def test_every_dataset_file_builds_its_source(name: str):
    cfg = compose([f"dataset={name}"])
    values = check(cfg)["dataset"]
    options = {key: values.pop(key) for key in RESERVED}
    assert callable(instantiate(values).load)
    assert options["split"] in ("merged", "published", "stratified")
