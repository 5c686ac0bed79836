"""Office-Caltech10 and DomainNet-10: FedBN's lists, folders, and the papers' wrong pairing."""

import csv
import io
import logging
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import compose

from fedbench.config.check import check
from fedbench.core.options import ConfigError
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.data.images.domain_sets import DomainNet10, DomainSet, OfficeCaltech10, read_list, split_domains
from fedbench.partition.base import build_split
from fedbench.partition.domain import Domain
from fedbench.partition.iid import IID
from fedbench.simulation import build

SETS = [OfficeCaltech10, DomainNet10]
TABLE = Path(__file__).parents[3] / "fedbench" / "papers" / "pfedmoap_table5_datasets.csv"
EACH = 10  # pictures of a class in a domain


def picture(path: Path, kind: DomainSet | type[DomainSet], domain: str, name: str, k: int) -> None:
    """Red tells the domain, green the class, blue the number."""
    shades = (20 * kind.domains.index(domain), 20 * kind.classes.index(name), 10 * k)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (9, 7), shades).save(path)


def folders(root: Path, kind: type[DomainSet]) -> None:
    for domain in kind.domains:
        for name in kind.classes:
            for k in range(EACH):
                picture(root / domain / name / f"{k}.png", kind, domain, name, k)


def lists(root: Path, kind: type[DomainSet], protocol: int = 4, prefix: str | None = None) -> dict[str, list[str]]:
    """FedBN's package: pictures and, in a random order, lists of their paths, which begin with the folder's name."""
    folders(root, kind)
    told, rng = {}, np.random.default_rng(0)
    for domain in kind.domains:
        rows = [(f"{domain}/{name}/{k}.png", name) for name in kind.classes for k in range(EACH)]
        rows = [rows[i] for i in rng.permutation(len(rows))]
        for part, some in (("train", rows[:80]), ("test", rows[80:])):
            start = f"{root.name}/" if prefix is None else prefix
            paths, names = np.array([start + f for f, _ in some]), np.array([n for _, n in some])
            (root / f"{domain}_{part}.pkl").write_bytes(pickle.dumps((paths, names), protocol))
            told[f"{domain}_{part}"] = [f for f, _ in some]
    return told


def sentence(source: DomainSet) -> str:
    """What a user would read, checked to be one line."""
    with pytest.raises(ConfigError) as refusal:
        source.load()
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def coded(arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Domain and class that each image shows."""
    colours = np.asarray(arrays.inputs)[:, :, 2, 2].astype(int)
    return (colours[:, 0] + 10) // 20, (colours[:, 1] + 10) // 20


# --- layouts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SETS)
def test_folders_are_cut_by_domain_and_class(kind: type[DomainSet], tmp_path: Path):
    folders(tmp_path / kind.folder, kind)
    (tmp_path / kind.folder / kind.domains[0] / "zeppelin").mkdir()  # of the other classes there are
    arrays = kind(str(tmp_path), resize=4).load()
    domain, label = coded(arrays)
    assert (arrays.domain == domain).all() and (arrays.targets == label).all()
    assert arrays.domain_names == list(kind.domains)
    for d in range(len(kind.domains)):
        for part, count in ((TRAIN, 8), (TEST, 2)):
            mine = arrays.targets[(arrays.domain == d) & (arrays.split == part)]
            assert np.bincount(mine).tolist() == [count] * 10
    other = kind(str(tmp_path), seed=1, resize=4).load()
    assert (other.split != arrays.split).any() and arrays.inputs.filename == other.inputs.filename


def test_class_names_and_their_order(tmp_path: Path):
    folders(tmp_path / "office_caltech_10", OfficeCaltech10)
    arrays = OfficeCaltech10(str(tmp_path), resize=4).load()
    assert arrays.class_names[0] == "back pack" and arrays.class_names[5] == "laptop computer"
    assert arrays.template == "a photo of a {}."
    assert DomainNet10.classes[3] == "ice_cream" and DomainNet10.classes[8] == "wine_glass"
    assert DomainNet10.domains == ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
    assert OfficeCaltech10.domains == ("amazon", "caltech", "dslr", "webcam")


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", SETS)
def test_fedbns_lists(kind: type[DomainSet], protocol: int, tmp_path: Path):
    root = tmp_path / kind.folder
    told = lists(root, kind, protocol)
    arrays = kind(str(tmp_path), resize=4).load()
    domain, label = coded(arrays)
    assert (arrays.domain == domain).all() and (arrays.targets == label).all()
    for d, name in enumerate(kind.domains):
        for part, code in (("train", TRAIN), ("test", TEST)):
            mine = np.flatnonzero((arrays.domain == d) & (arrays.split == code))
            numbers = [int(Path(f).stem) for f in told[f"{name}_{part}"]]
            assert ((arrays.inputs[mine, 2, 2, 2] + 5) // 10).tolist() == numbers  # in the list's order


@pytest.mark.parametrize("kind", SETS)
def test_lists_elsewhere_and_with_other_paths(kind: type[DomainSet], tmp_path: Path):
    lists(tmp_path / "mine", kind, prefix="")
    arrays = kind(str(tmp_path / "data"), str(tmp_path / "mine"), resize=4).load()
    assert (arrays.targets == coded(arrays)[1]).all()


def test_lists_of_objects_are_read(tmp_path: Path):
    """np.load's unpickling gives arrays of Python strings, or one array of both."""
    for told in ((["a.png", "b.png"], ["bike", "mug"]), np.array([["a.png", "b.png"], ["bike", "mug"]], dtype=object),
                 (np.array(["a.png", "b.png"], dtype=object), [np.str_("bike"), np.str_("mug")])):  # fmt: skip
        (tmp_path / "l.pkl").write_bytes(pickle.dumps(told))
        assert read_list(tmp_path / "l.pkl") == (["a.png", "b.png"], ["bike", "mug"])


def test_lists_of_older_numpy_are_read(tmp_path: Path):
    """numpy 1 called its modules numpy.core, numpy 2 calls them numpy._core."""
    content = pickle.dumps((np.array(["a.png"]), np.array(["bike"])), 0)
    assert b"numpy._core" in content or b"numpy.core" in content
    for name in (b"numpy.core", b"numpy._core"):
        renamed = content.replace(b"numpy._core", b"numpy.core").replace(b"numpy.core", name)
        (tmp_path / "l.pkl").write_bytes(renamed)
        assert read_list(tmp_path / "l.pkl") == (["a.png"], ["bike"])


class Evil:
    def __init__(self, function: object, *args: object):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


@pytest.mark.parametrize("function", [os.system, eval, exec, io.open, np.load, np.save, pickle.loads])
def test_lists_never_run_anything(function: object, tmp_path: Path):
    flag = tmp_path / "ran"
    for protocol in range(6):
        (tmp_path / "l.pkl").write_bytes(pickle.dumps((Evil(function, f"open({str(flag)!r}, 'w')"), ["mug"]), protocol))
        with pytest.raises(ConfigError, match=r"l\.pkl is not a pickled pair .*it contains"):
            read_list(tmp_path / "l.pkl")
    assert not flag.exists()


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SETS)
def test_what_is_missing_is_one_sentence(kind: type[DomainSet], tmp_path: Path):
    source, root = kind(str(tmp_path), resize=4), tmp_path / kind.folder
    assert f"{root} does not exist" in (said := sentence(source)) and "dataset.path" in said
    root.mkdir()
    picture(root / "train" / "mug" / "1.png", OfficeCaltech10, "amazon", "mug", 1)
    said = sentence(source)
    assert f"has neither FedBN's lists ({kind.domains[0]}_train.pkl ...) nor the folder" in said
    assert f"{kind.domains[0]}/{kind.classes[0]}" in said
    folders(root, kind)
    for file in (root / kind.domains[1] / kind.classes[2]).iterdir():
        file.unlink()
    assert f"no pictures of the class {kind.classes[2]} in {kind.domains[1]}" in sentence(source)


def test_lists_that_do_not_fit_are_one_sentence(tmp_path: Path):
    root = tmp_path / "office_caltech_10"
    lists(root, OfficeCaltech10)
    source, path = OfficeCaltech10(str(tmp_path), resize=4), root / "dslr_test.pkl"
    content = path.read_bytes()
    path.unlink()
    assert "has some of FedBN's lists, but not dslr_test.pkl" in sentence(source)
    for told, words in [
        (pickle.dumps((["office_caltech_10/dslr/mug/0.png"], ["Mug"])), "the class Mug, which is not one of"),
        (pickle.dumps((["a", "b"], ["mug"])), "lists 2 pictures and 1 class names"),
        (pickle.dumps(([], [])), "lists 0 pictures"),
        (pickle.dumps(7), "is not a pickled pair"),
        (content[: len(content) // 2], "is not a pickled pair"),
        (b"", "is not a pickled pair"),
        (pickle.dumps((["no.png"], ["mug"])), "1 of the 381 pictures of office_caltech_10 are not in"),
    ]:
        path.write_bytes(told)
        assert words in sentence(source)


def test_a_class_of_one_picture_cannot_be_cut(tmp_path: Path):
    folders(tmp_path / "office_caltech_10", OfficeCaltech10)
    for k in range(1, EACH):
        (tmp_path / "office_caltech_10" / "amazon" / "mug" / f"{k}.png").unlink()
    assert "cannot be split into train and test" in sentence(OfficeCaltech10(str(tmp_path), resize=4))


# --- the papers' numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sizes", "test"),
    [
        ("Office-Caltech10", (958, 1123, 157, 295), [192, 225, 32, 59]),
        ("DomainNet", (2629, 3283, 3091, 5000, 6081, 2767), [526, 657, 619, 1000, 1217, 554]),
    ],
)
def test_sizes_of_table_5(name: str, sizes: tuple[int, ...], test: list[int]):
    """pFedMoAP, table 5, from the domains' sizes."""
    with TABLE.open(encoding="utf-8") as file:
        printed = {row["metric"]: int(row["mean"]) for row in csv.DictReader(file) if row["dataset"] == name}
    domain = np.repeat(np.arange(len(sizes)), sizes)
    part, order = split_domains(np.arange(len(domain)) % 10, domain, 0)
    assert np.bincount(domain[part == TEST]).tolist() == test and sum(test) == printed["test_size"]
    assert (part == TRAIN).sum() == printed["train_size"]
    assert sorted(order) == list(range(len(domain)))


# --- pairing --------------------------------------------------------------------------------------------------------


def dealt(kind: type[DomainSet], tmp_path: Path, pairing: str, layout=folders) -> tuple[Arrays, Arrays, object]:
    """The arrays as loaded, as the clients meet them, and the split: five clients of each domain."""
    layout(tmp_path / kind.folder, kind)
    arrays = kind(str(tmp_path), resize=4, label_pairing=pairing).load()
    split = build_split(arrays, Domain(5, 0.3), None, 0, split="published")
    return arrays, arrays.for_split(split).expanded(), split


def test_correct_pairing_is_the_default(tmp_path: Path):
    arrays, met, _ = dealt(OfficeCaltech10, tmp_path, "correct")
    assert met is arrays and (met.targets == coded(met)[1]).all()
    assert OfficeCaltech10(str(tmp_path), resize=4).load().fit is None


@pytest.mark.parametrize("layout", [folders, lists])
@pytest.mark.parametrize("kind", SETS)
def test_official_bug_shows_the_top_of_the_domains_list(kind: type[DomainSet], layout, tmp_path: Path):
    """Labels are the client's own, images the first n of its domain's list: the same for all its clients."""
    arrays, met, split = dealt(kind, tmp_path, "official_bug", layout)
    assert (met.targets == arrays.targets).all() and (met.split == arrays.split).all()
    domain, label = coded(met)
    for part, code in ((split.train, TRAIN), (split.test, TEST)):
        for d in range(len(kind.domains)):
            mine = [part[i] for i in range(5 * d, 5 * d + 5)]
            longest = met.inputs[max(mine, key=len)]
            for own in mine:
                assert (domain[own] == d).all()
                assert (met.inputs[own] == longest[: len(own)]).all()  # one list for all, from its top
            if layout is lists:  # which is FedBN's
                whole = np.flatnonzero((arrays.domain == d) & (arrays.split == code))
                assert (longest == arrays.inputs[whole[: len(longest)]]).all()
    right = (label == met.targets).mean()
    assert right < 0.35 and (coded(arrays)[1] == arrays.targets).all()


def test_official_bug_permutes_class_names(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    arrays, met, _ = dealt(OfficeCaltech10, tmp_path, "official_bug")
    names = [name.replace("_", " ") for name in OfficeCaltech10.classes]
    assert met.class_names != names and sorted(met.class_names) == names
    assert "do not match" in caplog.text
    other = OfficeCaltech10(str(tmp_path), resize=4, seed=1, label_pairing="official_bug").load()
    assert other.class_names != arrays.class_names


def test_official_bug_under_any_partition(tmp_path: Path):
    """Where a client has samples of several domains, each domain's images come from the top of its own list."""
    arrays, _, _ = dealt(OfficeCaltech10, tmp_path, "official_bug", lists)
    split = build_split(arrays, IID(), 3, 0, test_fraction=0.3)
    rows = arrays.for_split(split).shared["inputs"]
    for part in (split.train, split.test):
        for i in range(3):
            for d in range(4):
                for code in (TRAIN, TEST):
                    own = [s for s in part[i] if arrays.domain[s] == d and arrays.split[s] == code]
                    listed = np.flatnonzero((arrays.domain == d) & (arrays.split == code))
                    assert rows[own].tolist() == listed[: len(own)].tolist()


def test_official_bug_reaches_the_federation(tmp_path: Path):
    """From the command line's words: a client trains on the images that the mistake gives it."""
    lists(tmp_path / "office_caltech_10", OfficeCaltech10)
    words = [f"data_dir={tmp_path}", "dataset=office_caltech10", "dataset.resize=4", "partition=domain_dirichlet"]
    cfg = compose([*words, "dataset.label_pairing=official_bug", "model=logistic", "algorithm=local",
                   "dataset.normalize=false", "hardware.device=cpu", "hardware.executor=loop"])  # fmt: skip
    check(cfg)
    arrays = build.data(cfg)
    split = build.partition(cfg, arrays)
    federation = build.engine(cfg, arrays, split).federation
    assert federation.num_clients == 20
    own = split.train[7]
    shown, labels = federation.gather(torch.from_numpy(own))
    top = np.flatnonzero((arrays.domain == 1) & (arrays.split == TRAIN))[: len(own)]
    assert np.allclose(shown.numpy() * 255, arrays.inputs[top], atol=0.01)
    assert labels.tolist() == arrays.targets[own].tolist()
