"""``fedbench paper``: the list of tables, one table beside runs, and runs of its rows."""

from pathlib import Path

import pytest
from run_folders import make_run

from fedbench.app import launch
from fedbench.report.paper_command import chosen_rows, main

TABLE = "pgfed_table1_cifar"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory without runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_of(folder: Path, method: str, accuracy: float) -> None:
    about = {"table": TABLE, "dataset": "CIFAR10", "clients": 25, "method": method}
    name = method.lower()
    config = {"paper": about, "choices": {"experiment": f"{TABLE}/{name}"}}
    make_run(folder, name, 0, (0.0, accuracy, 0.0), config=config)


def test_the_list_has_every_table_with_its_rows_and_the_cells_that_were_run(here: Path, capsys) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[0] == TABLE and line.split()[-1] == "14" for line in lines if line)
    run_of(here / "runs", "PGFed", 0.5)
    assert main([]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{TABLE} "))
    assert line.endswith("1 of 84")


def test_rows_that_were_run_come_first_and_the_others_are_a_line_a_column(here: Path, capsys) -> None:
    run_of(here / "runs", "PGFed", 0.5)
    run_of(here / "runs", "FedPer", 0.4)
    assert main([TABLE]) == 0
    text = capsys.readouterr().out
    shown = text[: text.index("Not run, with")]
    assert "PGFed " in shown and "FedPer" in shown and "FedRep" not in shown
    assert text.count("CIFAR100, 50 (dataset=cifar100 partition.num_clients=50): Local 26.05 ± 0.34, FedAvg 26.06") == 1
    ranking = text[text.index("Kendall") :].splitlines()
    assert "order kept" in ranking[1] and "yes" in ranking[2]
    assert f"  PGFed: python -m fedbench +experiment={TABLE}/pgfed\n" in text.replace("uv run ", "")
    assert main([TABLE, "--all"]) == 0
    assert capsys.readouterr().out.count("not run") >= 82


def test_rows_go_by_printed_and_by_short_names() -> None:
    assert chosen_rows(TABLE, "PGFed,per_fedavg", None) == [f"{TABLE}/pgfed", f"{TABLE}/per_fedavg"]
    assert len(chosen_rows(TABLE, None, None)) == 14
    assert chosen_rows("pgfed_organamnist", "FedRoD", None) == [f"pgfed_organamnist/{n}/fedrod" for n in (100, 25, 50)]


def test_run_is_the_sweep_of_these_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(launch, "launch", lambda argv: asked.append(argv) or 0)
    assert main([TABLE, "--run", "--rows", "PGFed,FedPer", "--reduced", "ten_rounds", "seed=0,1,2", "rounds=3"]) == 0
    rows = ",".join(f"[{TABLE}/{row},reduced/ten_rounds]" for row in ("pgfed", "fedper"))
    assert asked == [["-m", f"+experiment={rows}", "seed=0,1,2", "rounds=3"]]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([TABLE[:-1]], f"table {TABLE[:-1]}: no such table; the nearest are {TABLE}"),
        ([TABLE, "--run", "--rows", "PGFedd"], f"PGFedd is not a row of {TABLE}: did you mean PGFed"),
        (
            [TABLE, "--run", "--reduced", "ten_round"],
            "ten_round is not a reduced setting: did you mean ten_rounds?",
        ),
        ([TABLE, "seed=0"], "seed=0 is for runs of a table's rows: add --run"),
        ([TABLE, "--rows", "PGFed"], "--rows is for runs of a table's rows: add --run"),
        (["--run"], "--run needs the name of a table"),
    ],
)
def test_mistakes(words: list[str], sentence: str, here: Path, capsys) -> None:
    assert main(words) == 2
    assert sentence in capsys.readouterr().err
