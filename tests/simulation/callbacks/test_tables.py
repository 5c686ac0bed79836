"""The tables of a run are exact and survive a crash."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tiny import on_disk_first

from fedbench.report.runs import Run, read_table
from fedbench.simulation.callbacks.tables import Tables
from fedbench.simulation.csv_table import read_rows
from fedbench.simulation.summary import write_summary


def opened(folder: Path, done: int = 0) -> Tables:
    tables = Tables()
    tables.open(folder, done)
    return tables


@contextmanager
def writing(folder: Path, done: int = 0) -> Iterator[Tables]:
    tables = opened(folder, done)
    try:
        yield tables
    finally:
        tables.close()


def write(tables: Tables, rounds: range) -> None:
    for t in rounds:
        tables.add_metrics(t, {"train/loss": 1 / t, "personal/accuracy": t / 8, "personal/auc": float("nan")})
        tables.add_clients(t, {"n_train": np.array([5, 6]), "personal/accuracy": np.array([t / 3, np.nan])})
        tables.add_costs(t, {"steps": np.int64(4), "train_s": 0.25, "peak_memory_mb": None})


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / f"{name}.csv").read_bytes() for name in ("metrics", "clients", "costs")}


def test_files_say_exactly_what_was_given(tmp_path):
    with writing(tmp_path) as tables:
        write(tables, range(1, 3))
        assert (tmp_path / "metrics.csv").read_text().count("\n") == 3  # flushed before the run ends
    written = {name: content.decode().splitlines() for name, content in files(tmp_path).items()}
    assert written["metrics"] == [
        "round,train/loss,personal/accuracy,personal/auc",
        "1,1.0,0.125,nan",
        "2,0.5,0.25,nan",
    ]
    assert written["clients"][:3] == [
        "round,client,n_train,personal/accuracy",
        "1,0,5,0.3333333333333333",
        "1,1,6,nan",
    ]
    assert written["costs"][1] == "1,4,0.25,"


def test_client_ids_are_kept_where_given(tmp_path):
    with writing(tmp_path) as tables:
        tables.add_clients(1, {"client": np.array([7, 9]), "personal/accuracy": np.array([0.5, 1.0])})
    assert (tmp_path / "clients.csv").read_text().splitlines()[1:] == ["1,7,0.5", "1,9,1.0"]


NAMES = np.array(["north, old", 'say "x"', "#3"])


def test_names_are_cells_that_every_reader_takes(tmp_path):
    with writing(tmp_path) as tables:
        tables.add_clients(1, {"client": np.arange(3), "name": NAMES, "personal/accuracy": np.array([0.5, 1.0, 0.1])})
    path = tmp_path / "clients.csv"
    assert path.read_text().splitlines()[1:] == ['1,0,"north, old",0.5', '1,1,"say ""x""",1.0', "1,2,#3,0.1"]
    assert [row["name"] for row in read_rows(path)] == NAMES.tolist()
    assert read_table(path)["name"].tolist() == NAMES.tolist()
    (tmp_path / "summary.json").write_text("{}")
    values = Run(tmp_path).clients("personal/accuracy")
    assert values.to_dict("index") == {1: {0: 0.5, 1: 1.0, 2: 0.1}}


def test_a_table_begun_without_names_goes_on_without(tmp_path):
    """As those of runs of older versions."""
    columns = {"client": np.arange(3), "personal/accuracy": np.array([0.5, 1.0, 0.1])}
    with writing(tmp_path) as tables:
        tables.add_clients(1, columns)
    with writing(tmp_path, 1) as tables:
        tables.add_clients(2, {**columns, "name": NAMES})
    lines = (tmp_path / "clients.csv").read_text().splitlines()
    assert lines[0] == "round,client,personal/accuracy" and lines[4:] == ["2,0,0.5", "2,1,1.0", "2,2,0.1"]


@pytest.mark.parametrize("damage", ["", "\n3,0.1", "\n"])
def test_resumed_files_are_byte_for_byte_those_of_an_uninterrupted_run(tmp_path, damage):
    """The crash came after round 4 was written, the checkpoint was of round 2; a last line may be cut off."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder, rounds in ((whole, range(1, 7)), (broken, range(1, 5))):
        folder.mkdir()
        with writing(folder) as tables:
            write(tables, rounds)
    for name in ("metrics", "clients"):
        path = broken / f"{name}.csv"
        path.write_bytes(path.read_bytes()[:-1] + damage.encode())
    with writing(broken, 2) as tables:
        write(tables, range(3, 7))
    assert files(broken) == files(whole)
    assert not list(broken.glob("*.part"))


@pytest.mark.parametrize("kept", [1, 2, 9])
def test_truncation_keeps_rounds_up_to_the_checkpoint(tmp_path, kept):
    with writing(tmp_path) as tables:
        write(tables, range(1, 5))
    opened(tmp_path, kept).close()
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["round", *(str(t) for t in range(1, min(kept, 4) + 1))]


def test_new_run_in_a_used_folder_starts_afresh(tmp_path):
    for _ in range(2):
        with writing(tmp_path) as tables:
            write(tables, range(1, 2))
    assert (tmp_path / "metrics.csv").read_text().count("\n") == 2


@pytest.mark.parametrize("resume_round", [0, 1])
def test_unknown_column_is_refused(tmp_path, resume_round):
    opened(tmp_path).add_metrics(1, {"personal/accuracy": 0.5, "personal/auc": 0.5})
    if resume_round == 0:
        (tmp_path / "metrics.csv").unlink()
    tables = opened(tmp_path, resume_round)
    tables.add_metrics(
        2, {"personal/accuracy": 0.5, "personal/auc": 1.0} if resume_round == 0 else {"personal/auc": 1.0}
    )
    with pytest.raises(ValueError, match=r"metrics.csv has no column global/accuracy"):
        tables.add_metrics(3, {"global/accuracy": 0.5})


def test_a_count_that_the_first_row_has_not_is_left_to_the_summary(tmp_path):
    """The header is fixed, also of a run that began before there were counts."""
    with writing(tmp_path) as tables:
        tables.add_metrics(1, {"personal/loss": 0.5, "personal/auc": 0.9, "personal/auc_clients": 3})
        tables.add_metrics(2, {"personal/loss": 0.5, "personal/loss_clients": 2, "personal/auc": 0.8})
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines == ["round,personal/loss,personal/auc,personal/auc_clients", "1,0.5,0.9,3", "2,0.5,0.8,"]


def test_summary_is_json_without_numpy_or_nan(tmp_path):
    write_summary(tmp_path, {"a": np.float32(0.5), "b": float("nan"), "c": np.arange(2), "d": {"e": (Path("x"), None)}})
    read = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert read == {"a": 0.5, "b": None, "c": [0, 1], "d": {"e": ["x", None]}}


def test_the_files_that_are_replaced_are_on_the_disk_first(tmp_path, monkeypatch):
    with on_disk_first(monkeypatch) as names:
        with writing(tmp_path) as tables:
            for number in range(2):
                write_summary(tmp_path, {"a": number})
                tables.add_metrics(number + 1, {"x": 0.5})
        with writing(tmp_path, 1):  # rows beyond the checkpoint are cut off
            pass
    assert names.count("summary.json") == 2 and names.count("metrics.csv") == 1


def test_failed_write_of_the_summary_leaves_the_old_one(tmp_path):
    write_summary(tmp_path, {"a": 1})
    with pytest.raises(TypeError):
        write_summary(tmp_path, {"a": object()})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"a": 1}
