"""What tables and figures say: printed names, words for metrics and keys, columns that tell something, daggers."""

from pathlib import Path

import pytest
from run_folders import make_run

from fedbench.config.conf_tree import group_options, printed_name
from fedbench.report import scores
from fedbench.report.command import main
from fedbench.report.display import (
    TUNED_NOTE,
    client_metric_title,
    drop_redundant,
    key_title,
    legend_name,
    legend_names,
    method_name,
    metric_axis_label,
    metric_title,
)
from fedbench.report.runs import find_runs
from fedbench.report.summary import group_runs
from fedbench.report.table import Column, Spread, Table, render

TUNED_RUN = {"tuned_at_end": True}


@pytest.mark.parametrize("option", group_options("algorithm"))
def test_every_method_has_a_printed_name(option: str) -> None:
    """It is the option in other letters; no paper prints one in small letters alone."""
    name = printed_name("algorithm", option)
    assert name and method_name(option) == name
    assert name != name.lower() and name.replace("-", "").lower() == option.replace("_", "")


@pytest.mark.parametrize(("said", "shown"), [
    ("pgfed", "PGFed"), ("pgfed_ce", "PGFed-CE"), ("pfednet", "pFedNet"), ("fedavg+ft", "FedAvg+FT"),
    ("MyMethod", "MyMethod"), ("my_package.Mine", "my_package.Mine"), ("APPLE (mu=0)", "APPLE (mu=0)"),
    ("fedavg+mine", "fedavg+mine"), ("../dataset/mnist", "../dataset/mnist"), ("", ""),
])  # fmt: skip
def test_names_of_methods(said: str, shown: str) -> None:
    assert method_name(said) == shown


def test_a_name_of_another_option_is_none(tmp_path: Path) -> None:
    """A comment that begins with other words, as of a file in a --config-dir, is no name."""
    (tmp_path / "algorithm").mkdir()
    for option, comment in (("mine", "# Ours: it learns"), ("other", "# Other: it learns")):
        (tmp_path / "algorithm" / f"{option}.yaml").write_text(f"{comment}\n_target_: a.B\n")
    assert printed_name("algorithm", "mine", [tmp_path]) is None
    assert printed_name("algorithm", "other", [tmp_path]) == "Other"


def test_lines_of_a_legend() -> None:
    assert legend_name({"method": "pgfed", "algorithm.mu": 0.1, "alpha": None}) == "PGFed mu=0.1"
    assert legend_name({"method": "fedbabu", "mu": 1}, tuned=True) == "FedBABU† mu=1"


@pytest.mark.parametrize(("metric", "words"), [
    ("personal/accuracy", "Accuracy, mean over clients (%)"),
    ("global/auc", "AUC, global model, mean over clients (%)"),
    ("personal/accuracy_worst", "Accuracy, worst tenth of clients (%)"),
    ("personal/label_iou_weighted", "Label IoU, weighted by samples (%)"),
    ("train/loss", "Loss, training, mean over clients"),
])  # fmt: skip
def test_axes_are_words(metric: str, words: str) -> None:
    assert metric_axis_label(metric) == words
    assert metric_title(metric) == words.removesuffix(" (%)")
    assert scores.is_fraction(metric) == words.endswith("(%)")


def test_keys_are_words() -> None:
    keys = ("algorithm.num_experts", "optimizer.lr", "algorithm.lam", "partition.shots")
    assert [key_title(key) for key in keys] == ["Number of experts", "Learning rate", "λ", "Shots"]
    assert client_metric_title("personal/auc") == "AUC of each client"


def table(*rows: dict) -> Table:
    columns = [Column(key, key, missing="") for key in rows[0]]
    return Table("t", columns, list(rows))


def keys(tidied: Table) -> list[str]:
    return [column.key for column in tidied.columns]


def test_what_is_the_same_everywhere_is_said_once() -> None:
    """A label and n that do not differ go into the title; a measured number stays, and so does a label that differs."""
    same = {"method": "pgfed", "alpha": 0.3, "n": 3, "never": None}
    tidied = drop_redundant(
        table({**same, "mu": 1, "last": 0.5}, {**same, "mu": 2, "last": 0.5}), ["method", "alpha", "mu"]
    )
    assert keys(tidied) == ["mu", "last"] and tidied.title == "t, pgfed, alpha 0.30, n = 3"


def test_equal_measured_numbers_stay() -> None:
    spread = Spread(0.5, 0.1, 3, 3)
    rows = [{"method": name, "last": spread, "difference": 0.0} for name in "ab"]
    assert keys(drop_redundant(table(*rows), ["method"])) == ["method", "last", "difference"]
    none = [{"method": name, "last": Spread(float("nan"), None, 0, 3), "tau": float("nan")} for name in "ab"]
    assert keys(drop_redundant(table(*none), ["method"])) == ["method"]


def test_a_label_that_repeats_the_first_one_goes() -> None:
    rows = [{"method": f"pFedMoAP, eps {eps}", "eps": eps, "shots": 5 - eps} for eps in (1, 2)]
    assert keys(drop_redundant(table(*rows), ["method", "eps", "shots"])) == ["method", "shots"]
    assert keys(drop_redundant(table(*rows), ["method"])) == [
        "method",
        "eps",
        "shots",
    ]  # a score that equals a word of it


def test_a_single_row_and_a_column_that_names_it_stay() -> None:
    row = {"method": "pgfed", "n": 3}
    assert keys(drop_redundant(table(row), ["method"])) == ["method", "n"]
    assert keys(drop_redundant(table(row, row), ["method"])) == ["method"]


def test_a_method_that_is_tuned_at_the_end_has_a_dagger(tmp_path: Path, capsys) -> None:
    """In every form that people read, with what it means; a CSV keeps the option's name."""
    make_run(tmp_path / "runs", "fedbabu", summary=TUNED_RUN)
    make_run(tmp_path / "runs", "pgfed")
    shown = {}
    for form in ("text", "markdown", "latex", "csv"):
        assert main([str(tmp_path / "runs"), "--format", form]) == 0
        shown[form] = capsys.readouterr().out
    assert "FedBABU†" in shown["text"] and "| FedBABU† |" in shown["markdown"] and "PGFed†" not in shown["text"]
    assert TUNED_NOTE in shown["text"] and TUNED_NOTE in shown["markdown"]
    below = shown["latex"].partition(r"\end{tabular}")[2].partition(r"\end{table}")[0]
    assert r"FedBABU$^\dagger$ &" in shown["latex"] and r"$^\dagger$ fine-tuned after the last round" in below
    assert shown["latex"].count("fine-tuned after") == 1
    assert "fedbabu," in shown["csv"] and "†" not in shown["csv"]
    (group,) = (g for g in group_runs(find_runs([tmp_path / "runs"]))[0] if g.tuned)
    assert group.name == "FedBABU†"


def test_without_a_dagger_nothing_is_said_of_it(tmp_path: Path, capsys) -> None:
    make_run(tmp_path, "fedbabu")  # finetune_epochs=0
    make_run(tmp_path, "pgfed")
    assert main([str(tmp_path)]) == 0
    assert "†" not in capsys.readouterr().out


def test_words_are_for_readers_alone() -> None:
    said = Table(
        "", [Column("method", "method", display=str.upper)], [{"method": "a"}, {"method": None}, {"method": 1}]
    )
    assert render([said], "text") == "method\n     A\n     -\n     1\n"
    assert render([said], "csv").split() == ["method", "a", '""', "1"]


def test_what_all_lines_share_is_their_title() -> None:
    labels = [{"method": "apple", "compression": name, "share": None} for name in ("topk", "sign")]
    assert legend_names(labels, [False, False]) == (["compression=topk", "compression=sign"], "APPLE")
    assert legend_names(labels, [True, False])[0] == ["APPLE† compression=topk", "APPLE compression=sign"]
    assert legend_names(labels[:1], [False]) == (["APPLE compression=topk"], "")
    same = [{"method": "apple"}, {"method": "apple"}]
    assert legend_names(same, [False, False]) == (["APPLE", "APPLE"], "")
