"""Generated stand-ins for private tables, and pFedNet's scaling of tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import compose

from fedbench.core.options import ConfigError
from fedbench.core.split import Ragged, Split
from fedbench.data.base import Arrays
from fedbench.data.tables._table import TableFit
from fedbench.data.tables.clinical import Clinical
from fedbench.data.tables.table_csv import TableCsv
from fedbench.partition.base import build_split
from fedbench.partition.iid import IID
from fedbench.simulation import build

RAW = np.array([[2.0, -8, 0], [np.nan, 4, 0], [-4, 2, 0], [1, np.nan, 0], [8, 1, 3]])
SPLIT = Split(
    Ragged.from_lists([np.array([0, 1]), np.array([2])]),
    Ragged.from_lists([np.empty(0, np.int64)] * 2),
    Ragged.from_lists([np.array([3]), np.array([4])]),
)  # train: 0 1 | 2, test: 3 | 4


def features(normalize: bool = True, **options: Any) -> np.ndarray:
    fit = TableFit((0, 0, 0), scale="max_abs", fill="zero", **options)
    arrays = Arrays(RAW, np.array([0, 1, 0, 1, 0]), np.zeros(5, np.int8), 2, fit=fit).check()
    return np.asarray(arrays.for_split(SPLIT, normalize).inputs)


def test_max_abs_of_the_training_parts() -> None:
    """Largest values 4 and 8, and a column without any; 8 in a test part is clipped to 1, a missing number is 0."""
    np.testing.assert_allclose(
        features(), [[0.5, -1, 0], [0, 0.5, 0], [-1, 0.25, 0], [0.25, 0, 0], [1, 0.125, 1]], rtol=1e-6
    )


def test_max_abs_of_all_and_of_each_client() -> None:
    np.testing.assert_allclose(features(scale_fit="all")[:, 0], [0.25, 0, -0.5, 0.125, 1])
    own = features(scale_fit="client")
    np.testing.assert_allclose(own[:, 0], [1, 0, -1, 0.5, 1])
    np.testing.assert_allclose(own[:, 1], [-1, 0.5, 1, 0, 0.5])


def test_a_constant_is_the_last_feature() -> None:
    assert features(constant=True).shape == (5, 4) and (features(constant=True)[:, 3] == 1).all()


def test_unscaled_numbers_are_only_filled() -> None:
    np.testing.assert_array_equal(features(normalize=False), np.nan_to_num(RAW).astype(np.float32))


def test_a_csv_file_is_scaled_so(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("label,a\n-1,2\n1,-4\n1,\n-1,1\n")
    arrays = TableCsv(str(path), scale="max_abs", fill="zero", scale_fit="all", constant=True).load()
    assert arrays.targets.tolist() == [0, 1, 1, 0] and arrays.class_names == ["-1", "1"]
    met = arrays.for_split(build_split(arrays, IID(), 1, 0))
    np.testing.assert_allclose(met.inputs, [[0.5, 1], [-1, 1], [0, 1], [0.25, 1]])


@pytest.mark.parametrize(
    ("name", "shape", "positive", "tested"),
    [("chd", (716, 58), 51, 20), ("diabetes", (31476, 63), 2005, 815), ("covid", (2402, 77), 100, 40)],
)
def test_stand_ins_have_the_sizes_of_the_paper(name: str, shape: tuple, positive: int, tested: int) -> None:
    """And, balanced, about as many are tested on as the accuracies of its tables say."""
    cfg = compose([f"dataset=synthetic_{name}", "partition=delta", "partition.delta=1"])
    arrays = build.load(cfg)
    assert np.asarray(arrays.inputs).shape == shape and np.bincount(arrays.targets)[1] == positive
    assert 0.015 < np.isnan(np.asarray(arrays.inputs)).mean() < 0.025
    split = build.partition(cfg, arrays)
    assert abs(split.test.sizes.sum() - tested) <= 15
    met = np.asarray(arrays.for_split(split).inputs)
    assert met.dtype == np.float32 and np.abs(met).max() == 1


def test_classes_can_be_told_apart_but_not_perfectly() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_score

    arrays = Clinical(2000, 20, 1000).load()
    score = cross_val_score(LogisticRegression(), np.nan_to_num(arrays.inputs), arrays.targets, cv=3).mean()
    assert 0.6 < score < 0.95, score


def test_the_table_depends_on_the_seed_alone() -> None:
    assert Clinical().load().digest == Clinical().load().digest != Clinical(seed=1).load().digest


def test_mistakes_are_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"dataset\.positive=9 must be less than dataset\.n=9"):
        Clinical(9, positive=9)
    with pytest.raises(ConfigError, match=r"dataset\.features=4 must be at least 12"):
        Clinical(features=4)
