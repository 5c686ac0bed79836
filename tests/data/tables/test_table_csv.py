"""Tables: read from CSV files made by hand; filled, scaled and coded by the training parts of a split."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from tiny import CPU, compose

from fedbench.config.check import check
from fedbench.core.options import ConfigError
from fedbench.core.split import Ragged, Split
from fedbench.data.base import TEST, TRAIN, VAL, Arrays
from fedbench.data.tables._scales import deviation_ranges, warn_of_scales
from fedbench.data.tables._table import TableFit
from fedbench.data.tables.diabetes442 import Diabetes442
from fedbench.data.tables.table_csv import TableCsv
from fedbench.engine.federation import Federation
from fedbench.partition.base import build_split
from fedbench.partition.domain import Domain
from fedbench.partition.iid import IID
from fedbench.simulation import build
from fedbench.simulation.partition_files import partition_facts

PATIENTS = """\
id, age, sex, ward, pressure, label, hospital
p1, 30, f, a, 120, well, north
p2, 40, m, b, , ill, north
p3, , f, a, 140, well, south
p4, 60, , b, 160, ill, south
p5, 70, f, c, ?, ill, south
p6, 20, m, a, 100, well, north
"""
FIRST_FOUR = Split(
    Ragged.from_lists([np.array([0, 1]), np.array([2, 3])]),
    Ragged.from_lists([np.empty(0, np.int64)] * 2),
    Ragged.from_lists([np.array([5]), np.array([4])]),
)  # train: p1 p2 | p3 p4, test: p6 | p5


def written(folder: Path, text: str = PATIENTS) -> str:
    path = folder / "patients.csv"
    path.write_text(text)
    return str(path)


def patients(folder: Path, text: str = PATIENTS, **options: Any) -> Arrays:
    return TableCsv(written(folder, text), **{"ignore": ["id", "hospital"], **options}).load()


# -- reading -------------------------------------------------------------------------------------------------------
def test_columns_have_their_roles(tmp_path: Path) -> None:
    arrays = patients(tmp_path, ignore=[], columns={"client": "hospital", "patient": "id"})
    assert arrays.class_names == ["ill", "well"] and arrays.targets.tolist() == [1, 0, 1, 0, 0, 1]
    assert arrays.domain_names == ["north", "south"]
    assert arrays.domain is not None and arrays.domain.tolist() == [0, 0, 1, 1, 1, 0]
    assert arrays.subject is not None and arrays.subject.tolist() == [0, 1, 2, 3, 4, 5]
    assert arrays.inputs.shape == (6, 4) and not arrays.split.any()  # type: ignore
    assert patients(tmp_path, classes=["well", "ill"]).targets.tolist() == [0, 1, 0, 1, 1, 0]


def test_a_client_column_makes_the_clients(tmp_path: Path) -> None:
    arrays = patients(tmp_path, ignore=["id"], columns={"client": "hospital"})
    split = build_split(arrays, Domain(), None, 0, test_fraction=0.3)
    assert split.num_clients == 2
    assert sorted([*split.train[0], *split.test[0]]) == [0, 1, 5]


def test_a_split_column_says_the_published_parts(tmp_path: Path) -> None:
    text = "x,label,part\n1,a,train\n2,b,Test\n3,a,val\n"
    arrays = patients(tmp_path, text, ignore=[], columns={"split": "part"})
    assert arrays.split.tolist() == [TRAIN, TEST, VAL]


def test_labels_that_are_numbers_are_in_their_order(tmp_path: Path) -> None:
    assert patients(tmp_path, "x,label\n1,10\n2,9\n3,10\n", ignore=[]).class_names == ["9", "10"]


def test_numbers_can_be_targets(tmp_path: Path) -> None:
    options: Any = {"target": "number", "columns": {"label": "pressure"}, "ignore": ["id", "hospital", "label"]}
    arrays = patients(tmp_path, PATIENTS.replace(", ,", ", 130,").replace("?", "1e2"), **options)
    assert arrays.task == "regression" and arrays.num_classes == 1 and arrays.class_names is None
    assert arrays.targets.dtype == np.float32 and arrays.targets[4] == 100
    assert set(arrays.labels()) <= set(range(10)) and arrays.labels().argmax() == 3  # the largest pressure
    with pytest.raises(ConfigError, match="line 3: pressure is '', expected a value"):
        patients(tmp_path, **options)


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("a,label\n", {}, "has no rows"),
        ("a,label\n1,x\n2\n", {}, "line 3 has 1 cells, but the first line names 2 columns"),
        ("a,a,label\n1,2,x\n", {}, "two columns called 'a'"),
        ("a,class\n1,x\n", {}, "has no column label; its columns are a, class"),
        ("a,label\n1,x\n2,\n", {}, "line 3: label is ''"),
        ("a,label\n1,x\n2,y\n", {"ignore": ["b"]}, "no column b"),
        ("a,label\n1,x\n2,y\n", {"ignore": ["a"]}, "has no feature columns"),
        ("a,label\n1,x\n2,y\n", {"categorical": ["label"]}, "names label, which are not features"),
        ("a,b,label\n1,u,x\n2,v,y\n", {"categorical": ["a"]}, "not (line 2, 'u'"),
        ("a,label\n1,x\n2,y\n", {"classes": ["x"]}, "labels that are not in dataset.classes: y"),
        ("a,label\n1,x\n2,y\n", {"columns": {"hospital": "a"}}, "dataset.columns has the keys"),
        ("a,label\n1,x\n2,y\n", {"delimiter": ", "}, "one character"),
        ("a,label,s\n1,x,train\n2,y,dev\n", {"columns": {"split": "s"}}, "s is 'dev', expected train, val or test"),
        ("a,label\n1,x\n2,x\n", {}, "num_classes=1"),
        ("a,label\n" + "".join(f"{k}x,y\n" for k in range(30)), {}, "30 distinct texts in 30 rows"),
        ("a,label\n" + "".join(f"1,{k}.5\n" for k in range(90)), {}, "set dataset.target=number for a regression"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, text: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        patients(tmp_path, text, **{"ignore": [], **options})
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_column_is_what_most_of_its_cells_are(tmp_path: Path) -> None:
    """One `unknown`, `<5` or `inf` among numbers is refused with its line; it may be listed as missing."""
    rows = [f"{i},{5 * i % 7},{'ab'[i % 2]}\n" for i in range(30)]
    for odd in ("unknown", "<5", "inf", "1e999", "NaN?", "4_7", "1.000.000"):
        text = "x,y,label\n" + "".join([*rows[:7], f"{odd},1,a\n", *rows[7:]])
        with pytest.raises(ConfigError) as refusal:
            patients(tmp_path, text, ignore=[])
        assert f"30 of the 31 values of column x are numbers, 1 not (line 9, '{odd}')" in str(refusal.value)
        arrays = patients(tmp_path, text, ignore=[], missing=["", odd.upper()])
        assert arrays.fit.categories == (0, 0) and np.isnan(arrays.inputs[7, 0])  # type: ignore
    half = "x,label\n" + "".join(f"{'k' if i % 2 else ''}{i % 4},{'ab'[i % 2]}\n" for i in range(30))
    assert patients(tmp_path, half, ignore=[]).fit.categories == (4,)  # type: ignore


def test_many_categories_get_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "x,label\n" + "".join(f"{i % 25} mg,{'ab'[i % 2]}\n" for i in range(60))
    patients(tmp_path, text, ignore=[])
    (record,) = (r for r in caplog.records if r.levelname == "WARNING")
    assert "column x has 25 distinct texts, such as line 2, '0 mg'" in record.getMessage()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (range(30), "numbers the rows"),
        (range(29, -1, -1), "numbers the rows"),
        ([7 * i % 30 for i in range(30)], "numbers the rows"),  # sorted by something else
        ([f"{i}.0" for i in range(1, 31)], "numbers the rows"),
        ([1000 + i * i for i in range(30)], "has a different integer in each row"),
        ([i + 0.5 for i in range(30)], None),
        ([i % 29 for i in range(30)], None),
        (["", *range(1, 30)], None),
        (range(20), None),
    ],
)
def test_an_index_gets_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, values: Any, said: str | None
) -> None:
    patients(tmp_path, ",label\n" + "".join(f"{v},{'ab'[i % 2]}\n" for i, v in enumerate(values)), ignore=[])
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == (said is not None)
    assert said is None or (f"column '' {said}" in warnings[0] and "\"dataset.ignore=['']\"" in warnings[0])


def test_decimal_commas(tmp_path: Path) -> None:
    text = "x;y;label\n" + "".join(f"{i},5;1{i}.25;{'ab'[i % 2]}\n" for i in range(4))
    with pytest.raises(
        ConfigError, match=r"column x has numbers with a comma, as in line 2, '0,5': set dataset\.decimal=comma"
    ):
        patients(tmp_path, text, ignore=[], delimiter=";")
    read = patients(tmp_path, text, ignore=["y"], delimiter=";", decimal="comma")
    assert np.asarray(read.inputs)[:, 0].tolist() == [0.5, 1.5, 2.5, 3.5]
    with pytest.raises(ConfigError, match=r"column y has numbers with a point, as in line 2, '10\.25'"):
        patients(tmp_path, text, ignore=[], delimiter=";", decimal="comma")
    with pytest.raises(ConfigError, match=r"column x has numbers with a comma"):
        patients(tmp_path, text, ignore=["label"], delimiter=";", target="number", columns={"label": "x"})


@pytest.mark.parametrize(("mark", "written"), [(";", ";"), ("\t", "\\t"), ("|", "|")])
def test_another_delimiter_is_recognized(tmp_path: Path, mark: str, written: str) -> None:
    text = PATIENTS.replace(", ", mark)
    with pytest.raises(ConfigError) as refusal:
        patients(tmp_path, text)
    assert f"set \"dataset.delimiter='{written}'\", which separates its cells" in str(refusal.value)
    one = patients(tmp_path, text, delimiter=written)
    assert one.digest == patients(tmp_path, text, delimiter=mark).digest == patients(tmp_path).digest
    with pytest.raises(
        ConfigError, match=r"line 2 has 2 cells, but the first line names 1 columns: set .dataset.delimiter"
    ):
        patients(tmp_path, text.replace("30", "30,5"), ignore=[])


def test_rows_without_any_cell_are_none(tmp_path: Path) -> None:
    assert patients(tmp_path, PATIENTS + "\n,,,,,,\n , ,,,,,\n").digest == patients(tmp_path).digest


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set dataset\.path to"):
        TableCsv().load()
    with pytest.raises(ConfigError, match="does not exist or is a folder"):
        TableCsv(str(tmp_path / "none.csv")).load()


def test_the_digest_sees_what_is_missing(tmp_path: Path) -> None:
    digests = {patients(tmp_path, PATIENTS.replace("120", cell)).digest for cell in ("120", "", "0", "121")}
    assert len(digests) == 4
    assert patients(tmp_path).digest == patients(tmp_path, PATIENTS.replace("?", "NA")).digest


# -- filling, scaling, coding ----------------------------------------------------------------------------------------
def test_features_are_those_of_scikit_learn(tmp_path: Path) -> None:
    """Of p1 to p4; ward c is seen in a test part alone."""
    arrays = patients(tmp_path, indicator=True)
    assert arrays.fit is not None
    met = arrays.for_split(FIRST_FOUR)
    numbers = np.array([[30, 120], [40, np.nan], [np.nan, 140], [60, 160], [70, np.nan], [20, 100]])
    imputer = SimpleImputer().fit(numbers[:4])
    scaled = StandardScaler().fit(imputer.transform(numbers[:4])).transform(imputer.transform(numbers))
    words = np.array([["f", "a"], ["m", "b"], ["f", "a"], [None, "b"], ["f", "c"], ["m", "a"]], object)
    words = SimpleImputer(strategy="most_frequent", missing_values=None).fit(words[:4]).transform(words)
    coded = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(words[:4]).transform(words)
    assert isinstance(met.inputs, np.ndarray) and met.inputs.dtype == np.float32
    np.testing.assert_allclose(met.inputs[:, :2], scaled, rtol=1e-6)
    np.testing.assert_array_equal(met.inputs[:, 2:6], coded)  # f, m, a, b
    assert not met.inputs[:, 6].any()  # c: in no training part
    missing = [[0, 0, 0], [0, 0, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]  # of age, sex, pressure
    np.testing.assert_array_equal(met.inputs[:, 7:], missing)
    assert met.fit is None and met.for_split(FIRST_FOUR) is met


def test_another_split_has_other_statistics(tmp_path: Path) -> None:
    arrays = patients(tmp_path)
    other = Split(FIRST_FOUR.test, FIRST_FOUR.val, FIRST_FOUR.train)  # trained on p6 and p5
    one, two = (np.asarray(arrays.for_split(s).inputs) for s in (FIRST_FOUR, other))
    np.testing.assert_allclose(one[:4, 0].mean(), 0, atol=1e-6)
    np.testing.assert_allclose(two[[4, 5], 0], [1, -1], atol=1e-6)
    assert two[1, 1] == two[4, 1] == 0  # no pressure but p6's 100: the mean, and nothing to divide by
    assert two[3, 2:4].tolist() == [1, 0]  # f and m as often: the first


@pytest.mark.parametrize("scale_fit", ["train", "client"])
def test_a_constant_column_is_centered_whatever_its_value(tmp_path: Path, scale_fit: Any) -> None:
    """80.03 of 7 or 13 samples has a variance that is not exactly 0; 80.13 is seen in a test part."""
    rows = [f"{i % 3},80.03,{'ab'[i % 2]}\n" for i in range(14)]
    arrays = patients(tmp_path, "x,kvp,label\n" + "".join(rows), ignore=[], scale_fit=scale_fit)
    arrays.inputs[13, 1] = 80.13  # type: ignore
    nobody, train = Ragged.from_lists([np.empty(0, np.int64)] * 2), [np.arange(7), np.arange(7, 13)]
    split = Split(Ragged.from_lists(train), nobody, Ragged.from_lists([np.empty(0, np.int64), np.array([13])]))
    x = np.asarray(arrays.for_split(split).inputs)[:, 1]
    assert np.abs(x[:13]).max() < 1e-12
    assert abs(x[13] - 0.1) < 1e-6
    raw = arrays.for_split(split, normalize=False)
    assert [least > 0.5 for least, _ in deviation_ranges(raw, split).values()] == [True]  # of x alone


def test_constant_columns_are_those_of_scikit_learn() -> None:
    """300 columns, each of one value; the variance of most of them is not exactly 0."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        value, n = rng.normal(100, 50), int(rng.integers(5, 500))
        raw = np.c_[np.full(n, value), rng.standard_normal(n)]
        arrays = Arrays(raw, np.arange(n) % 2, np.zeros(n, np.int8), 2, fit=TableFit((0, 0)))
        nobody = Ragged.from_lists([np.empty(0, np.int64)])
        x = arrays.for_split(Split(Ragged.from_lists([np.arange(n)]), nobody, nobody)).inputs
        np.testing.assert_allclose(x, StandardScaler().fit_transform(raw), rtol=1e-6, atol=1e-9)
        assert np.abs(np.asarray(x)[:, 0]).max() < 1e-6


@pytest.mark.parametrize("scale", ["standard", "max_abs"])
def test_a_client_without_a_value_takes_the_filling_and_scale_of_all(tmp_path: Path, scale: Any) -> None:
    """The first client trains on rows 0 and 1, which have no y, the second on 2 and 3; y of 4 and 5 is 8."""
    text = "x,y,w,label\n1,,,a\n2,,,b\n3,2,v,a\n4,6,u,b\n5,8,v,a\n6,8,v,b\n"
    arrays = patients(tmp_path, text, ignore=["x"], scale_fit="client", scale=scale, categorical=["w"])
    y, u, v = np.asarray(arrays.for_split(FIRST_FOUR).inputs).T
    filled = 0 if scale == "standard" else 1  # the mean, 4, less 4, or by the client's largest number, also 4
    np.testing.assert_allclose(y[[0, 1]], filled)
    np.testing.assert_allclose(y[5], 4 if scale == "standard" else 1)  # the first client's: only centered, or clipped
    np.testing.assert_allclose(y[[2, 3]], [-1, 1] if scale == "standard" else [1 / 3, 1])
    assert u[[0, 1]].tolist() == [1, 1] and v[5] == 1  # of v and u, as often, the first


def test_statistics_of_everybody_or_of_each_client(tmp_path: Path) -> None:
    text = "x,y,label\n1,5,a\n3,,b\n10,7,a\n30,7,b\n20,9,a\n2,,b\n"
    made = {how: patients(tmp_path, text, ignore=[], scale_fit=how) for how in ("train", "all", "client")}
    x = {how: np.asarray(arrays.for_split(FIRST_FOUR).inputs) for how, arrays in made.items()}
    values = np.array([1, 3, 10, 30, 20, 2.0])
    np.testing.assert_allclose(x["train"][:, 0], (values - 11) / values[:4].std(), rtol=1e-6)
    np.testing.assert_allclose(x["all"][:, 0], (values - 11) / values.std(), rtol=1e-6)
    np.testing.assert_allclose(x["client"][:, 0], [-1, 1, -1, 1, 0, 0], atol=1e-6)
    assert x["client"][[1, 5], 1].tolist() == [0, 0]  # filled by the client's own 5
    np.testing.assert_allclose(x["client"][4, 1], 2)  # a constant is only centered


def test_listed_values_and_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedbench"):
        arrays = patients(tmp_path, categorical={"sex": ["m", "f", "x"], "ward": ["a", "b"]})
    assert "1 cells of column ward, such as 'c'" in caplog.text
    x = np.asarray(arrays.for_split(FIRST_FOUR).inputs)
    assert x[:, 2:].shape == (6, 5)
    assert x[4, 2:].tolist() == [0, 1, 0, 0, 0] and x[1, 2:].tolist() == [1, 0, 0, 0, 1]


def test_without_normalization_numbers_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arrays = patients(tmp_path, PATIENTS.replace("160", "160000"))
    raw = arrays.for_split(FIRST_FOUR, normalize=False)
    assert np.asarray(raw.inputs)[:2, 0].tolist() == [30, 40]
    with caplog.at_level(logging.WARNING, "fedbench"):
        caplog.clear()
        warn_of_scales(arrays.for_split(FIRST_FOUR), FIRST_FOUR)
        assert not caplog.records
        warn_of_scales(raw, FIRST_FOUR)
    (record,) = caplog.records
    assert "standard deviations from 0.43 to 6.5e+04" in record.getMessage()


def test_missing_values_that_are_filled_by_nothing_are_refused() -> None:
    """A source of one's own may have a fit that leaves NaN: the arrays are checked again."""
    arrays = Diabetes442().load()
    arrays.fit = lambda a, split, normalize: Arrays(np.full((442, 1), np.nan, np.float32), a.targets, a.split, 1,
                                                    task="regression")  # fmt: skip
    with pytest.raises(ConfigError, match="not finite"):
        arrays.for_split(build_split(arrays, IID(), 4, 0))


# -- two sets from scikit-learn ----------------------------------------------------------------------------------------
def test_breast_cancer_from_a_csv_file(tmp_path: Path) -> None:
    """Written as docs/formats.md does it; the same samples as those of dataset=breast_cancer."""
    data: Any = load_breast_cancer()
    table = np.column_stack([data.data.astype(str), data.target_names[data.target]])
    path = tmp_path / "breast_cancer.csv"
    np.savetxt(path, table, "%s", ",", header=",".join([*data.feature_names, "diagnosis"]), comments="")
    arrays = TableCsv(str(path), columns={"label": "diagnosis"}).load()
    assert arrays.class_names == ["benign", "malignant"] and (arrays.targets == 1 - data.target).all()
    split = build_split(arrays, IID(), 10, 1)
    f = Federation.build(arrays.for_split(split), split, CPU)
    x = f.inputs[torch.from_numpy(split.train.indices)]  # type: ignore
    torch.testing.assert_close(x.mean(0), torch.zeros(30), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std(0, correction=0), torch.ones(30), atol=1e-5, rtol=0)


def test_diabetes() -> None:
    arrays, known = Diabetes442().load(), load_diabetes(scaled=False)
    assert (arrays.inputs == known.data).all() and (arrays.targets == known.target).all()  # type: ignore
    split = build_split(arrays, IID(), 10, 1)
    x = np.asarray(arrays.for_split(split).inputs)[split.train.indices]
    counts = np.array(partition_facts(split, arrays)["label_counts"])  # of tenths of the targets' range
    assert counts.shape == (10, 10) and (counts.sum(1) == split.train.sizes).all()
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(x.std(0), 1, atol=1e-5)


@pytest.mark.parametrize("normalize", ["true", "false"])
def test_a_run_standardizes_by_its_own_split_and_warns_where_it_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, normalize: str
) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(5, [1, 1e4], (40, 2))
    text = "a,b,label\n" + "".join(f"{a},{b},{'yn'[int(a > 5)]}\n" for a, b in x)
    words = ["dataset=table_csv", f"dataset.path={written(tmp_path, text)}", "partition=iid", "model=logistic"]
    cfg = compose([*words, "partition.num_clients=4", "algorithm=local", f"dataset.normalize={normalize}"])
    check(cfg)
    arrays = build.data(cfg)
    split = build.partition(cfg, arrays)
    with caplog.at_level(logging.WARNING, "fedbench"):
        f = build.federation(cfg, arrays, split, CPU)
    trained = f.inputs[torch.from_numpy(split.train.indices)].numpy()  # type: ignore
    if normalize == "true":
        np.testing.assert_allclose(trained.mean(0), 0, atol=1e-5)
        np.testing.assert_allclose(trained.std(0), 1, atol=1e-5)
    else:
        np.testing.assert_allclose(trained, x[split.train.indices], rtol=1e-6)
    warned = [r for r in caplog.records if r.levelname == "WARNING"]
    assert len(warned) == (normalize == "false")
