"""The five picture sets of the prompt papers: torchvision's own classes read folders laid out as it leaves them."""

import csv
import functools
import hashlib
import http.server
import itertools
import json
import logging
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import compose

from fedbench.config.check import check
from fedbench.core.options import ConfigError
from fedbench.core.split import Split
from fedbench.data import _images as images
from fedbench.data._files import cached_array
from fedbench.data._images import CLIP_MEAN, CLIP_STD, centre_squares, open_picture
from fedbench.data.base import TEST, TRAIN, VAL, Arrays
from fedbench.data.images.clip_sets import DTD, Caltech101, Flowers102, Food101, OxfordPets, PictureSet, split_by_class
from fedbench.partition.base import build_split
from fedbench.partition.class_disjoint import ClassDisjoint

torchvision = pytest.importorskip("torchvision")
SETS = [Flowers102, OxfordPets, Food101, Caltech101, DTD]
TABLE = Path(__file__).parents[3] / "fedbench" / "papers" / "pfedmoap_table5_datasets.csv"
BREEDS = ["Abyssinian", "american_bulldog", "Bengal", "yorkshire_terrier"]

# Pictures of each class, in the order of the labels: facts of the published sets.
CALTECH = (
    "435 200 798 55 800 42 42 47 54 46 33 128 98 43 85 91 50 43 123 47 59 62 107 47 69 73 70 50 51 57 67 52 65 68 75 "
    "64 53 64 85 67 67 45 34 34 51 99 100 42 54 88 80 31 64 86 114 61 81 78 41 66 43 40 87 32 76 55 35 39 47 38 45 53 "
    "34 57 82 59 49 40 63 39 84 57 35 64 45 86 59 64 35 85 49 86 75 239 37 59 34 56 39 60"
)
FLOWERS = (
    "40 60 40 56 65 45 40 85 46 45 87 87 49 48 49 41 85 82 49 56 40 59 91 42 41 41 40 66 78 85 52 45 46 40 43 75 108 "
    "56 41 67 127 59 130 93 40 196 67 71 49 92 258 85 93 61 71 109 67 114 67 109 50 55 54 52 102 61 42 54 54 62 78 96 "
    "194 171 120 107 251 137 41 105 166 112 131 86 63 58 63 154 184 82 76 66 46 162 128 91 66 82 63 49 58 48"
)
COUNTS = {
    "Flowers102": [int(n) for n in FLOWERS.split()],
    "Caltech101": [int(n) for n in CALTECH.split()],
    "Food101": [1000] * 101,
    "DTD": [120] * 47,
}


def table5(name: str) -> dict[str, int]:
    """Sizes as the paper prints them."""
    with TABLE.open(encoding="utf-8") as file:
        return {row["metric"]: int(row["mean"]) for row in csv.DictReader(file) if row["dataset"] == name}


# --- folders as torchvision leaves them -----------------------------------------------------------------------


def picture(path: Path, shade: int, size: tuple[int, int] = (12, 10)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade % 256, shade // 256, 7)).save(path, quality=95)


def flowers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten pictures of each of 102 classes, the labels scattered; torchvision's md5 made those of these files."""
    from scipy.io import savemat
    from torchvision.datasets import Flowers102 as Kind

    folder, number = root / "flowers-102", np.arange(1, 1021)
    label = number % 102 + 1
    for i in number:
        picture(folder / "jpg" / f"image_{i:05d}.jpg", int(label[i - 1]))
    savemat(folder / "imagelabels.mat", {"labels": label[None].astype(np.uint8)})
    parts = {"trnid": number[:102], "valid": number[102:204], "tstid": number[204:]}
    savemat(folder / "setid.mat", {name: part[None].astype(np.uint16) for name, part in parts.items()})
    known = {
        key: (file, hashlib.md5((folder / file).read_bytes()).hexdigest())
        for key, file in (("label", "imagelabels.mat"), ("setid", "setid.mat"))
    }
    monkeypatch.setattr(Kind, "_file_dict", {**Kind._file_dict, **known})


def pets(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four breeds: 10 trainval and 5 test pictures of each."""
    folder = root / "oxford-iiit-pet"
    (folder / "annotations").mkdir(parents=True)
    for part, numbers in (("trainval", range(1, 11)), ("test", range(100, 105))):
        lines = []
        for y, breed in enumerate(BREEDS, 1):
            for k in numbers:
                picture(folder / "images" / f"{breed}_{k}.jpg", y)
                lines.append(f"{breed}_{k} {y} {1 if breed[0].isupper() else 2} 1\n")
        (folder / "annotations" / f"{part}.txt").write_text("".join(lines))


def food(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three dishes: 15 train and 5 test pictures of each."""
    folder = root / "food-101"
    (folder / "meta").mkdir(parents=True)
    dishes = ["apple_pie", "baby_back_ribs", "waffles"]
    for part, numbers in (("train", range(15)), ("test", range(15, 20))):
        listed = {dish: [f"{dish}/{k}" for k in numbers] for dish in dishes}
        (folder / "meta" / f"{part}.json").write_text(json.dumps(listed))
        for y, dish in enumerate(dishes, 1):
            for k in numbers:
                picture(folder / "images" / dish / f"{k}.jpg", y)


def caltech(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six categories of 11 pictures, and the two that are dropped."""
    kept = ["Faces", "Leopards", "Motorbikes", "accordion", "airplanes", "yin_yang"]
    for y, name in enumerate([*kept, "BACKGROUND_Google", "Faces_easy"], 1):
        for k in range(1, 12):
            picture(root / "caltech101" / "101_ObjectCategories" / name / f"image_{k:04d}.jpg", y)


def dtd(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three textures of 12 pictures, 4 in each published part."""
    folder = root / "dtd" / "dtd"
    (folder / "labels").mkdir(parents=True)
    for j, part in enumerate(("train", "val", "test")):
        lines = []
        for y, texture in enumerate(("banded", "polka-dotted", "zigzagged"), 1):
            for k in range(4 * j, 4 * j + 4):
                picture(folder / "images" / texture / f"{texture}_{k:04d}.jpg", y)
                lines.append(f"{texture}/{texture}_{k:04d}.jpg\n")
        (folder / "labels" / f"{part}1.txt").write_text("".join(lines))


MADE = {Flowers102: flowers, OxfordPets: pets, Food101: food, Caltech101: caltech, DTD: dtd}
# Train, val and test pictures per class, by round(0.5 n) and round(0.2 n), or of trainval 80/20.
SIZES = {Flowers102: (5, 2, 3), OxfordPets: (8, 2, 5), Food101: (10, 4, 6), Caltech101: (6, 2, 3), DTD: (6, 2, 4)}
NAMES = {
    OxfordPets: ["abyssinian", "american bulldog", "bengal", "yorkshire terrier"],
    Food101: ["apple pie", "baby back ribs", "waffles"],
    Caltech101: ["face", "leopard", "motorbike", "accordion", "airplane", "yin yang"],
    DTD: ["banded", "polka-dotted", "zigzagged"],
}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No address is found."""

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", fail)


def sentence(source: PictureSet) -> str:
    """What a user would read, checked to be one line."""
    with pytest.raises(ConfigError) as refusal:
        source.load()
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def part_of(arrays: Arrays) -> list[tuple[int, ...]]:
    """Train, val and test samples of each class."""
    counts = [np.bincount(arrays.targets[arrays.split == p], minlength=arrays.num_classes) for p in (TRAIN, VAL, TEST)]
    return [tuple(row) for row in np.stack(counts, 1).tolist()]


@pytest.mark.parametrize("kind", SETS)
def test_torchvisions_folder_is_read_and_split_anew(kind: type[PictureSet], tmp_path, monkeypatch, caplog, offline):
    MADE[kind](tmp_path, monkeypatch)
    caplog.set_level(logging.INFO)
    arrays = kind(str(tmp_path), resize=8).load()
    assert arrays.inputs.shape == (len(arrays), 3, 8, 8) and arrays.inputs.dtype == np.uint8
    assert set(part_of(arrays)) == {SIZES[kind]}
    # The shade of a picture is its label: pictures, labels and parts belong together.
    assert np.abs(arrays.inputs[:, 0, 4, 4].astype(int) - (arrays.targets + 1)).max() <= 2
    if kind in NAMES:
        assert arrays.class_names == NAMES[kind]
    assert arrays.template == kind.template and arrays.template.count("{}") == 1
    assert arrays.mean == (0.48145466, 0.4578275, 0.40821073)
    assert f"made with dataset.seed=0, because {kind.split_name}" in caplog.text


def test_flowers_labels_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torchvision's names without the question mark, and those of cat_to_name.json (from 1) where it is."""
    flowers(tmp_path, monkeypatch)
    arrays = Flowers102(str(tmp_path), resize=4).load()
    assert arrays.class_names[0] == "pink primrose" and arrays.class_names[59] == "pink-yellow dahlia"
    path = tmp_path / "flowers-102" / "cat_to_name.json"
    path.write_text(json.dumps({str(i): f"flower_{i}" for i in range(1, 103)}))
    assert Flowers102(str(tmp_path), resize=4).load().class_names[59] == "flower 60"
    path.write_text('{"1": "rose"}')
    assert "does not name each of the classes 1 to 102" in sentence(Flowers102(str(tmp_path)))
    path.write_text("{")
    assert "cannot be read as JSON" in sentence(Flowers102(str(tmp_path)))


def test_pets_keep_the_published_test_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pets(tmp_path, monkeypatch)
    data = OxfordPets(str(tmp_path), resize=4)
    found = data._split_by_rule()
    test = {file for file, part in zip(found.files, found.split) if part == TEST}
    assert test == {f"{breed}_{k}.jpg" for breed in BREEDS for k in range(100, 105)}
    other = OxfordPets(str(tmp_path), seed=1, resize=4)._split_by_rule()
    assert ((other.split == TEST) == (found.split == TEST)).all() and (other.split != found.split).any()


def test_seed_draws_the_split_but_not_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dtd(tmp_path, monkeypatch)
    first, second = DTD(str(tmp_path), resize=4).load(), DTD(str(tmp_path), seed=1, resize=4).load()
    assert (first.split != second.split).any() and part_of(first) == part_of(second)
    assert (DTD(str(tmp_path), resize=4).load().split == first.split).all()
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_split_does_not_depend_on_torchvisions_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its parts are pooled before anything is drawn: exchanging two of them changes nothing."""
    dtd(tmp_path, monkeypatch)
    first, folder = DTD(str(tmp_path))._split_by_rule(), tmp_path / "dtd" / "dtd" / "labels"
    train, test = ((folder / f"{part}1.txt").read_text() for part in ("train", "test"))
    (folder / "train1.txt").write_text(test)
    (folder / "test1.txt").write_text(train)
    again = DTD(str(tmp_path))._split_by_rule()
    assert again.files == first.files and (again.split == first.split).all()


def test_published_split_never_trains_on_val(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    food(tmp_path, monkeypatch)
    arrays = Food101(str(tmp_path), resize=4).load()
    split = build_split(arrays, ClassDisjoint(shots=8), 3, 0, split="published")
    assert (arrays.split[split.train.indices] == TRAIN).all() and split.train.sizes.tolist() == [8] * 3
    assert (arrays.split[split.val.indices] == VAL).all() and (arrays.split[split.test.indices] == TEST).all()


# --- CoOp's split files -----------------------------------------------------------------------------------------


def coop(path: Path, files: list[str], names: list[str]) -> dict[str, list]:
    """A split file of these pictures, whose k-th of three go to train, val and test."""
    labels = sorted(set(names))
    rows = [[file, labels.index(name), name] for file, name in zip(files, names)]
    told = {part: rows[j::3] for j, part in enumerate(("train", "val", "test"))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told))
    return told


@pytest.mark.parametrize("beside", [True, False])
def test_coops_split_is_used_where_it_is(beside: bool, tmp_path: Path, monkeypatch, caplog, offline: None):
    dtd(tmp_path, monkeypatch)
    names = [n for n in ("banded", "polka-dotted", "zigzagged") for _ in range(12)]
    files = [f"{n}/{n}_{k % 12:04d}.jpg" for k, n in enumerate(names)]
    path = tmp_path / ("dtd/split_zhou_DescribableTextures.json" if beside else "mine.json")
    told = coop(path, files, names)
    caplog.set_level(logging.INFO)
    arrays = DTD(str(tmp_path), split_file=None if beside else str(path), resize=4).load()
    assert f"(the split: {path})" in caplog.text and "12 train, 12 val, 12 test" in caplog.text
    order = sorted(files)
    for part, code in (("train", TRAIN), ("val", VAL), ("test", TEST)):
        assert {order[i] for i in np.flatnonzero(arrays.split == code)} == {row[0] for row in told[part]}
    assert np.abs(arrays.inputs[:, 0, 2, 2].astype(int) - (arrays.targets + 1)).max() <= 2
    assert arrays.class_names == ["banded", "polka-dotted", "zigzagged"]


@pytest.mark.parametrize("kind", SETS)
def test_coops_own_folders_are_read_without_torchvisions(kind: type[PictureSet], tmp_path: Path, offline: None):
    """data_dir may be CoOp's $DATA: its folders and its split file, nothing of torchvision's."""
    folder = tmp_path / kind.folders[1]
    names = [name for name in ("great_pyrenees", "wallflower") for _ in range(6)]
    files = [f"{name}_{k}.jpg" for k, name in enumerate(names)]
    for file in files:
        picture(folder / file, 50)
    coop(folder.parent / kind.split_name, files, names)
    arrays = kind(str(tmp_path), resize=4).load()
    assert part_of(arrays) == [(2, 2, 2), (2, 2, 2)] and arrays.class_names == ["great pyrenees", "wallflower"]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ("[1, 2]", "is not one of CoOp's splits"),
        ('{"train": [], "val": []}', "is not one of CoOp's splits"),
        ('{"train": [["a.jpg", 0]], "val": [], "test": []}', "is not one of CoOp's splits"),
        ('{"train": [], "val": [], "test": []}', "must have exactly one class name"),
        ('{"train": [["a.jpg", 1, "x"]], "val": [], "test": []}', "must have exactly one class name"),
        ('{"train": [["a.jpg", 0, "x"]], "val": [], "test": [["b.jpg", 0, "y"]]}', "must have exactly one class name"),
        ('{"train": [["a.jpg", 0, "x"]], "val": [], "test": [["a.jpg", 0, "x"]]}', "lists the picture a.jpg twice"),
        ('{"train": [["a.jpg", 0, "x"], ["b.jpg", 1, "y"]], "val": [], "test": [["c.jpg", 0, "x"]]}',
         "1 of the 2 classes of dtd have no test pictures"),
        ('{"train": [["a.jpg", 0, "x"]], "val": [], "test": [["no.jpg", 0, "x"]]}', "1 of the 2 pictures of dtd"),
        ("{", "cannot be read as JSON"),
    ],
)  # fmt: skip
def test_split_files_that_do_not_fit(told: str, words: str, tmp_path: Path):
    for name in "abc":
        picture(tmp_path / "dtd" / "images" / f"{name}.jpg", 1)
    (tmp_path / "s.json").write_text(told)
    assert words in sentence(DTD(str(tmp_path), split_file=str(tmp_path / "s.json"), resize=4))


def test_a_missing_split_file_is_one_sentence(tmp_path: Path):
    said = sentence(DTD(str(tmp_path), split_file=str(tmp_path / "no.json")))
    assert "dataset.split_file=" in said and "split_zhou_DescribableTextures.json" in said


# --- what may be wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SETS)
def test_without_network_the_sentence_says_where(kind: type[PictureSet], tmp_path: Path, offline: None):
    said = sentence(kind(str(tmp_path / "data")))
    assert f"{kind.name} is not in " in said and "could not be downloaded (<urlopen error" in said
    assert f"torchvision.datasets.{kind.kind}" in said


@pytest.mark.parametrize("kind", SETS)
def test_a_folder_laid_out_otherwise_is_one_sentence(kind: type[PictureSet], tmp_path: Path, offline: None):
    """The pictures are there, but nothing that says what they are of, or something that says something else."""
    picture(tmp_path / kind.folders[0] / "some" / "1.jpg", 1)
    for folder in ("meta", "annotations"):  # for those that look for no more than folders
        (tmp_path / kind.folders[0]).parent.joinpath(folder).mkdir()
    said = sentence(kind(str(tmp_path)))
    assert f"does not have the layout of torchvision's {kind.kind}" in said


def test_a_class_without_pictures_and_a_lost_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    caltech(tmp_path, monkeypatch)
    folder = tmp_path / "caltech101" / "101_ObjectCategories"
    (folder / "empty").mkdir()
    assert "1 of the 7 classes of caltech101 have no train pictures" in sentence(Caltech101(str(tmp_path)))
    (folder / "empty").rmdir()
    (folder / "Faces" / "image_0004.jpg").rename(folder / "Faces" / "image_0099.jpg")
    assert "1 of the 66 pictures" in (said := sentence(Caltech101(str(tmp_path)))) and "Faces/image_0004.jpg" in said


def test_parts_with_other_classes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torchvision numbers the classes of each part by themselves: labels would not belong together."""
    dtd(tmp_path, monkeypatch)
    path = tmp_path / "dtd" / "dtd" / "labels" / "val1.txt"
    path.write_text("".join(path.read_text().splitlines(True)[4:]))
    assert "the parts train and val have different classes" in sentence(DTD(str(tmp_path)))


def test_without_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "torchvision", None)
    assert "pip install torchvision" in sentence(DTD(str(tmp_path)))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Address and folder of a file server on this machine."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}", folder
        running.shutdown()
        thread.join()


def test_torchvision_downloads_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: tuple[str, Path]
):
    """torchvision's own download, from a server of this process: an archive as the published one is laid out."""
    from torchvision.datasets import DTD as Kind

    address, folder = served
    dtd(tmp_path / "there", monkeypatch)
    with tarfile.open(folder / "dtd-r1.0.1.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "there" / "dtd" / "dtd", "dtd")
    monkeypatch.setattr(Kind, "_URL", f"{address}/dtd-r1.0.1.tar.gz")
    assert "File not found or corrupted" in sentence(DTD(str(tmp_path / "data"), resize=4))  # another md5
    content = (folder / "dtd-r1.0.1.tar.gz").read_bytes()
    monkeypatch.setattr(Kind, "_MD5", hashlib.md5(content).hexdigest())
    arrays = DTD(str(tmp_path / "data"), resize=4).load()
    assert set(part_of(arrays)) == {SIZES[DTD]}


# --- the papers' numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_sizes_of_table_5(name: str):
    """pFedMoAP, table 5, from the published number of pictures of each class (halves to even matter)."""
    labels = np.repeat(np.arange(len(COUNTS[name])), COUNTS[name])
    part, printed = split_by_class(labels, 0), table5(name)
    assert len(COUNTS[name]) == printed["n_classes"]
    assert (part == TRAIN).sum() == printed["train_size"] and (part == TEST).sum() == printed["test_size"]
    assert np.bincount(labels[part == TRAIN]).min() >= 16  # the papers' 16 shots are there in every class


def test_sizes_of_table_5_of_pets():
    """Trainval: 100 of each breed but five."""
    trainval, printed = [100] * 32 + [96, 93, 96, 99, 96], table5("OxfordPets")
    labels = np.repeat(np.arange(37), trainval)
    names = np.array(["trainval"] * len(labels) + ["test"] * 3669)
    part = OxfordPets("d").assign(np.concatenate([labels, np.arange(3669) % 37]), names)
    assert [(part == code).sum() for code in (TRAIN, VAL, TEST)] == [2944, 736, 3669]
    assert (printed["train_size"], printed["test_size"]) == (2944, 3669)


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("Flowers102", [10] * 9 + [12]),
        ("Food101", [10] * 9 + [11]),
        ("Caltech101", [10] * 10),
        ("DTD", [5] * 9 + [2]),
    ],
)
def test_the_papers_clients(name: str, held: list[int]):
    """Ten clients of disjoint classes with 16 shots of each, nested in 1, 2, 4, 8 and 16; all test pictures."""
    labels = np.repeat(np.arange(len(COUNTS[name])), COUNTS[name])
    arrays = Arrays(np.zeros((len(labels), 1), np.float32), labels, split_by_class(labels, 0), len(COUNTS[name]))

    def drawn(shots: int) -> Split:
        return build_split(arrays, ClassDisjoint(shots=shots), 10, 2023, split="published")

    splits = [drawn(shots) for shots in (1, 2, 4, 8, 16)]
    for fewer, more in itertools.pairwise(splits):
        assert set(fewer.train.indices) < set(more.train.indices)
    assert splits[-1].train.sizes.tolist() == [16 * k for k in held]
    assert splits[-1].test.sizes.sum() == table5(name)["test_size"]
    for i in range(10):
        mine = set(labels[splits[-1].train[i]])
        assert len(mine) == held[i] and set(labels[splits[-1].test[i]]) == mine


# --- pictures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(300, 200), (201, 333), (224, 224), (97, 50), (40, 41), (500, 51)])
def test_centre_squares_are_torchvisions_eval_transform(size: tuple[int, int], tmp_path: Path):
    from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize

    pixels = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "p.png")
    wanted = Compose([Resize(64, InterpolationMode.BICUBIC), CenterCrop(64)])(Image.fromarray(pixels))
    found = centre_squares(str(tmp_path), "x", tmp_path, ["p.png"], 64)
    assert (found[0] == np.asarray(wanted).transpose(2, 0, 1)).all()


def test_pictures_are_decoded_once_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(images, "BLOCK", 3)
    caplog.set_level(logging.INFO)
    files = [f"{k}.png" for k in range(10)]
    for k, file in enumerate(files):
        picture(tmp_path / file, 20 * k)
    seen: list[int] = []

    def spy(path: Path, *args: Any, **kwargs: Any) -> np.ndarray:
        seen.append(int(path.stem))
        return open_picture(path, *args, **kwargs)

    monkeypatch.setattr(images, "open_picture", spy)
    found = centre_squares(str(tmp_path / "data"), "x", tmp_path, files, 8)
    assert found[:, 0, 0, 0].tolist() == [20 * k for k in range(10)] and sorted(seen) == list(range(10))
    assert isinstance(found, np.memmap) and found.flags.writeable
    assert "decoding 10 pictures once" in caplog.text and "3 of 10 pictures" in caplog.text
    again = centre_squares(str(tmp_path / "data"), "x", tmp_path, files, 8)
    assert len(seen) == 10 and (again == found).all()
    again[:] = 0  # stays in memory
    assert (centre_squares(str(tmp_path / "data"), "x", tmp_path, files, 8) == found).all()
    picture(tmp_path / "3.png", 255, (30, 30))
    assert centre_squares(str(tmp_path / "data"), "x", tmp_path, files, 8)[3, 0, 0, 0] == 255


def test_a_picture_that_is_none_is_one_sentence_and_leaves_no_cache(tmp_path: Path):
    picture(tmp_path / "0.png", 1)
    (tmp_path / "1.png").write_bytes(b"\x89PNG no more")
    with pytest.raises(ConfigError, match=r"1\.png cannot be read as a picture"):
        centre_squares(str(tmp_path / "data"), "x", tmp_path, ["0.png", "1.png"], 8)
    assert not list((tmp_path / "data" / "cache").iterdir())


def test_cached_array_is_made_again_where_it_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    made: list[int] = []

    def blocks() -> Iterator[np.ndarray]:
        made.append(1)
        yield np.arange(6, dtype=np.uint8).reshape(2, 3)
        yield np.arange(6, 9, dtype=np.uint8).reshape(1, 3)

    def read() -> np.ndarray:
        return cached_array(str(tmp_path), "x", 1, (3, 3), blocks)

    assert read().ravel().tolist() == list(range(9)) and len(made) == 1
    file = next((tmp_path / "cache").iterdir())
    file.write_bytes(file.read_bytes()[:-4])
    assert read().ravel().tolist() == list(range(9)) and len(made) == 2
    np.save(file, np.zeros((2, 2), np.uint8))
    assert read().ravel().tolist() == list(range(9)) and len(made) == 3
    assert caplog.text.count("making the cache again") == 2


def test_no_room_for_the_pictures_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def read(data_dir: Path) -> np.ndarray:
        return cached_array(str(data_dir), "x", 1, (10**6, 3, 224, 224), lambda: pytest.fail("nothing is decoded"))

    monkeypatch.setattr("shutil.disk_usage", lambda path: __import__("types").SimpleNamespace(free=5 * 10**9))
    with pytest.raises(ConfigError, match=r"5\.0 GB are free.*need 150\.5 GB"):
        read(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written .*set data_dir"):
        read(tmp_path / "file")


# --- a run ---------------------------------------------------------------------------------------------------------


def test_a_run_on_the_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From the command line's words to a federation of scaled pictures."""
    from fedbench.simulation import build

    food(tmp_path, monkeypatch)
    words = [f"data_dir={tmp_path}", "dataset=food101", "dataset.resize=8", "model=logistic", "algorithm=local"]
    few = ["partition=class_disjoint", "partition.num_clients=3", "partition.shots=4"]
    cfg = compose([*words, *few, "hardware.device=cpu", "hardware.executor=loop"])
    check(cfg)
    arrays = build.data(cfg)
    split = build.partition(cfg, arrays)
    federation = build.engine(cfg, arrays, split).federation
    assert federation.num_samples.tolist() == [4, 4, 4] and federation.template == "a photo of {}, a type of food."
    at = split.train.indices[:2]
    x, y = federation.gather(torch.from_numpy(at))
    scaled = (arrays.inputs[at] / 255 - np.array(CLIP_MEAN)[:, None, None]) / np.array(CLIP_STD)[:, None, None]
    assert np.allclose(x.numpy(), scaled, atol=1e-5) and y.tolist() == arrays.targets[at].tolist()
