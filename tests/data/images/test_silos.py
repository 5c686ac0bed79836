"""Silos of pictures: a CSV file and a folder, cut by patient; extra pictures for training only."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image
from silo_files import PATIENTS, SILOS, make_extra, make_table, overrides, picture, write_csv
from tiny import compose

from fedbench.config.check import check
from fedbench.core.options import ConfigError
from fedbench.core.split import Ragged, Split
from fedbench.data.base import EXTRA, Arrays
from fedbench.data.images.image_folder import ImageFolder
from fedbench.data.images.image_table import ImageTable
from fedbench.partition._subjects import rarest_label, split_by_subject
from fedbench.partition.base import build_split
from fedbench.partition.dirichlet import Dirichlet
from fedbench.partition.domain import Domain
from fedbench.simulation import build, simulator
from fedbench.tools.partitions import main as show_partition


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return make_table(tmp_path)[0]


def load(path: Path, **options) -> Arrays:
    given = {"resize": 8, "classes": ["normal", "cancer"], **options}
    return ImageTable(str(path.parent / "data"), str(path), **given).load()


def sentence(path: Path, **options) -> str:
    with pytest.raises(ConfigError) as refusal:
        load(path, **options)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def patients_of(arrays: Arrays, ragged: Ragged) -> set[int]:
    return set(arrays.subject[ragged.indices].tolist())


# -- the table -------------------------------------------------------------------------------------------
def test_the_table_says_what_is_what(tmp_path: Path) -> None:
    path, rows = make_table(tmp_path)
    arrays = load(path)
    assert arrays.inputs.shape == (len(rows), 1, 8, 8) and arrays.inputs.dtype == np.uint8
    assert [arrays.class_names[k] for k in arrays.targets] == [r["label"] for r in rows]
    assert [arrays.domain_names[k] for k in arrays.domain] == [r["silo"] for r in rows]
    by_subject = {s: {r["patient"] for r, t in zip(rows, arrays.subject) if t == s} for s in arrays.subject}
    assert all(len(patients) == 1 for patients in by_subject.values()) and len(by_subject) == sum(PATIENTS.values())
    for i in (0, len(rows) - 1):
        assert (arrays.inputs[i] == np.asarray(Image.open(tmp_path / rows[i]["image"]))[0, 0]).all()


def test_columns_may_have_other_names_and_be_put_together(tmp_path: Path) -> None:
    """The competition's train.csv: pictures are <patient_id>_<image_id>.png; silos are machines, in the order asked."""
    rows = [{"site_id": 1, "patient_id": p, "image_id": 70 + p, "cancer": p % 2, "machine_id": m}
            for p, m in enumerate([49, 21, 49, 48, 48, 21, 93, 93])]  # fmt: skip
    for r in rows:
        picture(tmp_path / "pictures" / f"{r['patient_id']}_{r['image_id']}.png", r["patient_id"])
    path = write_csv(tmp_path / "train.csv", rows)
    columns = {"image": "{patient_id}_{image_id}.png", "label": "cancer", "patient": "patient_id", "silo": "machine_id"}
    arrays = load(path, folder=str(tmp_path / "pictures"), columns=columns, classes=[0, 1], silos=[48, 49, 21])
    assert arrays.domain_names == ["48", "49", "21"] and arrays.domain.tolist() == [1, 2, 1, 0, 0, 2]
    assert arrays.inputs[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5] and arrays.targets.tolist() == [0, 1, 0, 1, 0, 1]


def test_a_table_without_patients_silos_or_parts(tmp_path: Path) -> None:
    path, rows = make_table(tmp_path)
    arrays = load(path, columns={"patient": None, "silo": None})
    assert len(set(arrays.subject.tolist())) == len(rows) and arrays.num_domains == 1
    parts = ["train", "Test", "val"]
    write_csv(path, [r | {"part": parts[int(r["patient"][1:]) % 3]} for r in rows])
    arrays = load(path, columns={"split": "part"})
    split = build_split(arrays, Domain(), None, 0, "published")
    assert np.bincount(arrays.split).all() and len(split.val.indices) == (arrays.split == 1).sum()


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (lambda rows: "picture", {}, "no column image; its columns are picture, label, patient, silo"),
        (lambda rows: rows[3].update(label=""), {}, "table.csv, line 5: label is empty"),
        (lambda rows: rows[3].update(label="odd"), {}, "the label odd, which is not in dataset.classes: normal"),
        (lambda rows: rows[3].update(image=rows[1]["image"]), {}, "A0_1.png twice, in lines 3 and 5"),
        (lambda rows: rows[3].update(image="no.png"), {}, "1 of the 146 pictures"),
        (lambda rows: rows[3].update(image="no.png"), {}, "the first is no.png): set dataset.folder"),
        (lambda rows: rows.clear(), {}, "has no rows"),
        (lambda rows: None, {"silos": ["A", "Z"]}, "has no silo Z; it has A, B, C"),
        (
            lambda rows: None,
            {"columns": {"ill": "label"}},
            "has the keys ill, but only image, label, patient, silo, split are allowed",
        ),
        (lambda rows: None, {"columns": {"split": "silo"}}, "silo is 'A', expected train, val or test"),
        (lambda rows: None, {"negatives": [4, 6]}, "dataset.negatives has 2 entries for the 3 silos A, B, C"),
        (lambda rows: None, {"negatives": [4, 99, 1]}, "asks for 297 pictures of the first class in the silo B"),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path: Path, change, options: dict, words: str) -> None:
    path, rows = make_table(tmp_path)
    names = ["image", "label", "patient", "silo"]
    lines = [[change(rows) or "image", *names[1:]], *([row[name] for name in names] for row in rows)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    assert words in sentence(path, **options)


def test_what_is_missing_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set dataset\.path to"):
        ImageTable(str(tmp_path)).load()
    assert "does not exist or is a folder" in sentence(tmp_path / "no.csv")
    (tmp_path / "bad.csv").write_bytes(b"\xff\xfe\x00image")
    assert "cannot be read as a CSV file" in sentence(tmp_path / "bad.csv")
    path, rows = make_table(tmp_path)
    (tmp_path / rows[0]["image"]).write_bytes(b"no picture")
    assert "cannot be read as a picture" in sentence(path)


def test_negatives_are_subsampled_by_silo(tmp_path: Path) -> None:
    """Exactly so many pictures of the first class per other one, the same for a seed; null keeps a silo whole."""
    path, _ = make_table(tmp_path)
    options = {"negatives": [2, 4, None]}
    arrays, again, other = load(path, **options), load(path, **options), load(path, seed=1, **options)
    whole = load(path)
    counts, all_of = (np.array([np.bincount(a.targets[a.domain == d]) for d in range(3)]) for a in (arrays, whole))
    assert counts[:, 1].tolist() == all_of[:, 1].tolist() == [5, 3, 4]
    assert counts[:, 0].tolist() == [10, 12, all_of[2, 0]]
    np.testing.assert_array_equal(arrays.inputs, again.inputs)
    assert not np.array_equal(arrays.subject, other.subject)


# -- cuts by patient -------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("partition", [Domain(), Dirichlet(alpha=0.5, min_size=20)])
def test_no_patient_is_in_two_parts(table: Path, partition, seed: int) -> None:
    arrays = load(table)
    split = build_split(arrays, partition, 3, seed, "merged", 0.15, 0.2)
    parts = [patients_of(arrays, getattr(split, part)) for part in ("train", "val", "test")]
    assert not parts[0] & parts[1] and not parts[0] & parts[2] and not parts[1] & parts[2]
    assert sum(len(getattr(split, p).indices) for p in ("train", "val", "test")) == len(arrays)


@pytest.mark.parametrize("seed", range(5))
def test_the_cut_is_of_the_size_and_the_labels_asked_for(table: Path, seed: int) -> None:
    arrays = load(table)
    split = build_split(arrays, Domain(), None, seed, "merged", 0.15)
    for client in range(3):
        train, test = split.train[client], split.test[client]
        assert (arrays.domain[np.r_[train, test]] == client).all()
        assert abs(len(test) - 0.15 * (len(test) + len(train))) <= 4  # a patient has up to 4 pictures
        assert set(arrays.targets[train]) == set(arrays.targets[test]) == {0, 1}


def test_the_same_seed_cuts_alike(table: Path) -> None:
    arrays = load(table)
    hashes = {seed: build_split(arrays, Domain(), None, seed, "merged", 0.15).hash for seed in (0, 1)}
    assert hashes[0] != hashes[1] == build_split(arrays, Domain(), None, 1, "merged", 0.15).hash


def test_a_stratum_is_named_by_the_rarest_label_of_its_subject() -> None:
    labels, of = np.array([0, 1, 0, 0, 2, 2, 0]), np.array([0, 0, 1, 1, 2, 2, 2])
    assert rarest_label(labels, of, 3).tolist() == [1, 0, 2]


def test_large_and_shared_subjects() -> None:
    """A subject of 8 of 10 samples is never split; one that two clients share goes to one side in both."""
    rng, labels = np.random.RandomState(0), np.zeros(20, np.int64)
    subject = np.array([0] * 8 + [1, 2] + [1] * 3 + [3] * 3 + [4] * 4)
    for _ in range(10):
        off, kept = split_by_subject([np.arange(10), np.arange(10, 20)], 0.3, labels, subject, rng)
        assert all(len(a) and len(b) for a, b in zip(off, kept))
        assert not set(subject[np.concatenate(off)]) & set(subject[np.concatenate(kept)])


def test_a_client_with_one_patient_is_refused(table: Path) -> None:
    arrays = load(table)
    arrays.subject[arrays.domain == 1] = 0
    with pytest.raises(ConfigError, match="would have no test samples"):
        build_split(arrays, Domain(), None, 0, "merged", 0.15)


@pytest.mark.parametrize("how", ["stratified", "published"])
def test_other_splits_that_divide_a_patient_are_refused(table: Path, how: str) -> None:
    arrays = load(table)
    arrays.split = (np.arange(len(arrays)) % 4 == 0).astype(np.int8) * 2
    with pytest.raises(ConfigError, match=r"subjects \(patients\) have samples in both.*use dataset\.split=merged"):
        build_split(arrays, Domain(), None, 0, how, 0.15)


# -- extra pictures --------------------------------------------------------------------------------------


def test_extra_pictures_are_for_training_only(tmp_path: Path) -> None:
    """All of them train at their silo's client; everything else is drawn as without them."""
    path, _ = make_table(tmp_path)
    plain = build_split(load(path), Domain(), None, 3, "merged", 0.15, 0.1)
    arrays = load(path, extra=str(make_extra(tmp_path / "more", {"A": 6, "C": 3})))
    split = build_split(arrays, Domain(), None, 3, "merged", 0.15, 0.1)
    extra = np.flatnonzero(arrays.split == EXTRA)
    for part in ("val", "test"):
        np.testing.assert_array_equal(getattr(split, part).indices, getattr(plain, part).indices)
    for client, count in enumerate((6, 0, 3)):
        own = len(plain.train[client])
        np.testing.assert_array_equal(split.train[client][:own], plain.train[client])
        added = split.train[client][own:]
        assert len(added) == count and set(added) <= set(extra) and (arrays.targets[added] == 1).all()
        assert (arrays.domain[added] == client).all()


def test_extra_pictures_from_a_table_and_beside_a_folder(tmp_path: Path) -> None:
    path, _ = make_table(tmp_path)
    make_extra(tmp_path / "more", {"B": 4})
    rows = [{"image": f"B/cancer/{i}.png", "label": "cancer", "silo": "B"} for i in range(4)]
    arrays = load(path, extra=str(write_csv(tmp_path / "more" / "list.csv", rows)))
    assert (arrays.split == EXTRA).sum() == 4 and (arrays.domain[-4:] == 1).all()
    for silo in SILOS:
        make_extra(tmp_path / "own", {silo: 5}, "normal")
        make_extra(tmp_path / "own", {silo: 5}, "cancer")
    folder = ImageFolder(str(tmp_path / "data"), str(tmp_path / "own"), 8, extra=str(tmp_path / "more")).load()
    split = build_split(folder, Domain(), None, 0, "merged", 0.2)
    assert split.train.sizes.tolist() == [8, 12, 8] and split.test.sizes.tolist() == [2, 2, 2]


def test_several_clients_of_a_silo_share_what_is_extra(tmp_path: Path) -> None:
    path, _ = make_table(tmp_path)
    arrays = load(path, extra=str(make_extra(tmp_path / "more", {"A": 7})), columns={"patient": None})
    split = build_split(arrays, Domain(clients_per_domain=2), None, 0, "merged", 0.15)
    held = [(arrays.split[split.train[i]] == EXTRA).sum() for i in range(6)]
    assert held == [4, 3, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("silos", "label", "words"),
    [({"Z": 1}, "cancer", "has the silo (natural client) Z, but the data set has A, B, C"),
     ({"A": 1}, "odd", "has the class odd, but the data set has normal, cancer")],
)  # fmt: skip
def test_extra_pictures_of_nobody_are_refused(tmp_path: Path, silos: dict, label: str, words: str) -> None:
    path, _ = make_table(tmp_path)
    assert words in sentence(path, extra=str(make_extra(tmp_path / "more", silos, label)))


def test_a_missing_extra_is_named_by_its_option(tmp_path: Path) -> None:
    path, _ = make_table(tmp_path)
    assert sentence(path, extra="gone").startswith("dataset.extra=gone does not exist: set it to a folder")
    make_extra(tmp_path / "own", {"A": 5})
    with pytest.raises(ConfigError, match=r"^dataset\.extra=gone does not exist"):
        ImageFolder(str(tmp_path / "data"), str(tmp_path / "own"), 8, extra="gone").load()


# -- runs ------------------------------------------------------------------------------------------------


def test_a_run_over_silos_counts_extra_pictures_apart(tmp_path: Path, capsys) -> None:
    make_table(tmp_path)
    make_extra(tmp_path / "more", {"A": 6, "C": 3})
    asked = overrides(tmp_path, f"dataset.extra={tmp_path}/more", "dataset.negatives=[2,4,null]")
    short = ["rounds=1", "sample_rate=1.0", "hardware=cpu", "tracking=disabled", "hardware.executor=vmap"]
    cfg = OmegaConf.create(check(compose([*asked, *short, "model=logistic", "algorithm=fedavg"])))
    (tmp_path / "run").mkdir()
    summary = simulator.run(cfg, tmp_path / "run")
    facts = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert facts["extra"] == [6, 0, 3] and facts["domains"] == list(SILOS) and summary["status"] == "finished"
    assert np.sum(facts["label_counts"], 1).tolist() == facts["train"] and facts["class_names"] == ["normal", "cancer"]
    assert 0 < summary["last"]["personal/auc"] <= 1
    assert Split.load(tmp_path / "run" / "partition.npz").hash == facts["hash"]
    assert show_partition(asked) == 0
    shown = capsys.readouterr().out
    assert "extra" in shown and f"train {sum(facts['train']) - 9}, extra 9, test {sum(facts['test'])}" in shown


@pytest.mark.parametrize("name", ["rsna_machines", "rsna_cbis_cmmd"])
def test_the_case_study_on_generated_pictures(name: str, tmp_path: Path) -> None:
    """The same layout and silos as the real sets, a few patients each: clients, order and normals per cancer."""
    cfg = compose([f"dataset={name}", "partition=domain", f"data_dir={tmp_path}", "dataset.resize=8"])
    d, rows, machines = cfg.dataset, [], name == "rsna_machines"
    for silo in d.silos:
        for p in range(30):
            number, sick = f"{silo}-{p}", p < 3
            rows.append(
                {"patient_id": number, "image_id": p, "cancer": int(sick), "machine_id": silo}
                if machines
                else {"image": f"{number}_{p}.png", "label": d.classes[sick], "patient": number, "silo": silo}
            )
            picture(Path(d.folder or Path(d.path).parent) / f"{number}_{p}.png", p)
    write_csv(Path(d.path), rows)
    arrays = build.data(OmegaConf.create(check(cfg)))
    normals = [int(((arrays.domain == i) & (arrays.targets == 0)).sum()) for i in range(4)]
    assert normals == ([12, 18, 18, 24] if machines else [12, 18, 27, 27])
    split = build.partition(cfg, arrays)
    assert split.num_clients == 4 and [arrays.domain_names[i] for i in range(4)] == list(d.silos)
