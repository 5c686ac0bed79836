"""Cross-validation within training parts: folds cover them once, test parts stay, and a report chooses the value."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny import compose

from fedbench.core.options import ConfigError
from fedbench.core.settings import config_hash, save_config, to_dict
from fedbench.core.split import Split
from fedbench.data.base import EXTRA, TRAIN, Arrays
from fedbench.partition._folds import hold_out_fold
from fedbench.partition.base import build_split
from fedbench.partition.iid import IID
from fedbench.report.choose import choose
from fedbench.report.runs import find_runs
from fedbench.simulation import build
from fedbench.simulation.simulator import run


def table(n: int = 100, **more: np.ndarray) -> Arrays:
    labels = np.arange(n) % 4 // 3  # three of 0 to one of 1
    return Arrays(np.zeros((n, 1), np.float32), labels, more.pop("split", np.zeros(n, np.int8)), 2, **more)


def folds_of(arrays: Arrays, split: Split, folds: int = 5) -> list[Split]:
    return [hold_out_fold(split, arrays, folds, f, 0) for f in range(folds)]


def test_every_training_sample_is_held_out_once() -> None:
    arrays = table()
    split = build_split(arrays, IID(), 3, 0)
    found = folds_of(arrays, split)
    for i in range(3):
        held = np.concatenate([s.val[i] for s in found])
        assert sorted(held) == sorted(split.train[i])
        for s in found:
            assert sorted([*s.train[i], *s.val[i]]) == sorted(split.train[i]) and s.test is split.test
            assert abs(len(s.val[i]) - len(split.train[i]) / 5) < 1
            ones = arrays.targets[split.train[i]].sum() / 5
            assert abs(arrays.targets[s.val[i]].sum() - ones) < 1, "stratified"
    assert hold_out_fold(replace(split, names=("a", "b", "c")), arrays, 5, 0, 0).names == ("a", "b", "c")
    assert len({s.hash for s in found}) == 5 and found[0].hash == hold_out_fold(split, arrays, 5, 0, 0).hash


def test_a_subject_stays_whole() -> None:
    arrays = table(subject=np.arange(100) // 4)
    assert arrays.subject is not None
    for s in folds_of(arrays, build_split(arrays, IID_BY_SUBJECT, 1, 0)):
        assert not set(arrays.subject[s.val.indices]) & set(arrays.subject[s.train.indices])
        assert len(s.val.indices)


IID_BY_SUBJECT = IID()  # one client: no subject is divided between clients


def test_extra_samples_are_always_trained_on() -> None:
    arrays = table(split=np.array([EXTRA, TRAIN] * 50, np.int8), domain=np.zeros(100, np.int64))
    split = build_split(arrays, IID(), 1, 0)
    extra = set(np.flatnonzero(arrays.split == EXTRA))
    for s in folds_of(arrays, split):
        assert extra <= set(s.train.indices) and len(s.val.indices)


def test_mistakes_are_one_sentence() -> None:
    arrays = table(20)
    split = build_split(arrays, IID(), 2, 0)
    with pytest.raises(ConfigError, match="fold=5 must be one of the 5 folds, 0 to 4"):
        hold_out_fold(split, arrays, 5, 5, 0)
    with pytest.raises(ConfigError, match=r"set dataset\.val_fraction=0"):
        hold_out_fold(build_split(arrays, IID(), 2, 0, val_fraction=0.2), arrays, 5, 0, 0)
    tiny = build_split(table(4), IID(), 2, 0, test_fraction=0.5)
    with pytest.raises(
        ConfigError, match=r"client 0 has 1 training sample\(s\), and all would be in its validation fold 0"
    ):
        hold_out_fold(tiny, table(4), 5, 0, 0)


def test_without_folds_a_run_has_the_hash_that_it_had() -> None:
    cfg, cut = compose(["dataset=digits"]), compose(["dataset=digits", "folds=5", "fold=1"])
    older = {key: value for key, value in to_dict(cfg).items() if key not in ("folds", "fold")}
    assert config_hash(cfg) == config_hash(older) != config_hash(cut)
    assert len({config_hash(compose(["folds=5", f"fold={f}"])) for f in range(3)}) == 3


def test_a_report_chooses_by_all_folds(tmp_path: Path) -> None:
    words = ["dataset=breast_cancer", "partition=iid", "partition.num_clients=3", "model=logistic", "algorithm=fedprox",
             "rounds=1", "folds=2", "hardware.device=cpu"]  # fmt: skip
    for mu in (0.01, 45.0):
        for fold in (0, 1):
            name = f"output_dir={tmp_path}"
            cfg = compose([*words, name, f"algorithm.mu={mu}", f"fold={fold}"])
            assert (build.partition(cfg, build.data(cfg)).val.sizes > 0).all()
            (tmp_path / f"{mu}-{fold}").mkdir()
            save_config(cfg, tmp_path / f"{mu}-{fold}" / "config.yaml")
            run(cfg, tmp_path / f"{mu}-{fold}")
    runs = find_runs([tmp_path])
    table = choose(runs, "algorithm.mu")
    assert "2 folds" in table.title
    assert any("by 2-fold cross-validation: algorithm.mu=0.01," in note for note in table.notes), table.notes
    with pytest.raises(ConfigError, match=r"no finished run of algorithm\.mu=45\.0 seed=0 fold=1"):
        choose([r for r in runs if not r.path.name.startswith("45.0-1")], "algorithm.mu")
