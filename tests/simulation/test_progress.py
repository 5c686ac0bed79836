"""The lines of a run are few, and its ending says what ran, what came out and what to do next."""

import io
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from fedbench.simulation.progress import Progress, duration, ending, ending_line


def summary(**changes) -> dict:
    values = {
        "personal/accuracy": 0.9,
        "personal/accuracy_std": 0.05,
        "personal/accuracy_worst": 0.8,
        "personal/auc": float("nan"),
        "global/accuracy": 0.7,
    }
    base = {
        "name": "pgfed+ft",
        "algorithm": "pgfed",
        "dataset": "digits",
        "partition": "dirichlet",
        "model": "mlp",
        "seed": 3,
        "rounds": 30,
        "num_clients": 20,
        "cohort": 5,
        "last": values,
        "best": {"metric": "personal/accuracy", "round": 21, "values": values | {"personal/accuracy": 0.95}},
        "cost": {"images_per_s": 12345.6, "total_s": 75.2, "bytes_down": 2.5e6, "bytes_up": 1.25e6},
    }
    return base | changes


@pytest.mark.parametrize(("rounds", "lines"), [(1, 1), (5, 5), (20, 20), (150, 20), (1000, 21)])
def test_few_lines_without_a_terminal(capsys, rounds, lines):
    with Progress(rounds) as progress:
        for t in range(1, rounds + 1):
            progress.update(t, None if t == 1 else 0.5, 1234.5)
    printed = capsys.readouterr().out.splitlines()
    assert lines <= len(printed) <= lines + 1
    assert printed[0].split()[:4] == ["round", f"{1}/{rounds}", "accuracy", "-"]
    assert printed[-1].split()[1] == f"{rounds}/{rounds}"
    assert "1,234 images/s" in printed[-1]


def test_resumed_run_says_where_it_goes_on(capsys):
    progress = Progress(100, 57)
    progress.update(58, float("nan"), 10.0)
    progress.note("checkpoint saved")
    assert capsys.readouterr().out.split("\n")[0].startswith("round  58/100  accuracy      -")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with Progress(10, 2) as progress:
        progress.update(3, 0.5, 1000.0)
        progress.note("[a note]")
    shown = sys.stdout.getvalue()
    for part in (" 3/10", "accuracy 0.5000", "1,000 images/s", "[a note]"):
        assert part in shown


class Handle:
    """What IPython's display returns: the states that a display has had."""

    def __init__(self, states: list[str]) -> None:
        self.states = states

    def update(self, data: dict[str, str], raw: bool) -> None:
        assert raw
        self.states.append(data["text/plain"])


def in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A kernel of IPython's, as far as progress sees it: what its displays showed; standard output is its own."""
    shown: list[list[str]] = []

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        assert raw and display_id
        shown.append([data["text/plain"]])
        return Handle(shown[-1])

    ipython, module = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})
    monkeypatch.setattr(sys, "stdout", stream())
    return shown


def test_one_line_that_changes_in_a_notebook(monkeypatch):
    displays = in_a_notebook(monkeypatch)
    monkeypatch.setattr("fedbench.simulation.progress.REDRAWN", 0.0)
    with Progress(50) as progress:
        for t in range(1, 51):
            progress.update(t, 0.01 * t, 1000.0)
        progress.note("a note")
    assert sys.stdout.getvalue() == "a note\n"
    (states,) = displays
    assert [state.split()[1] for state in states] == [f"{t}/50" for t in range(1, 51)]
    assert states[-1].startswith("round 50/50  accuracy 0.5000      1,000 images/s")


def test_a_notebook_is_not_flooded(monkeypatch):
    displays = in_a_notebook(monkeypatch)
    monkeypatch.setattr("fedbench.simulation.progress.REDRAWN", 1000.0)
    progress = Progress(1000)
    for t in range(1, 1001):
        progress.update(t, 0.5, 1000.0)
    assert [[state.split()[1] for state in states] for states in displays] == [["1/1000", "1000/1000"]]


def test_each_of_several_runs_has_its_line_in_a_notebook(monkeypatch):
    displays = in_a_notebook(monkeypatch)
    runs = [Progress(2, label="seed=0"), Progress(2, label="seed=1")]
    for t in (1, 2):
        for run in runs:
            run.update(t, 0.5, 1000.0)
    assert [states[-1].split()[:3] for states in displays] == [["seed=0", "round", "2/2"], ["seed=1", "round", "2/2"]]


@pytest.mark.parametrize("where", ["file", "ipython on a terminal"])
def test_nothing_is_redrawn_outside_of_a_notebook(monkeypatch, where):
    """Not where a cell writes to a file, nor in a shell without a kernel."""
    displays = in_a_notebook(monkeypatch)
    if where == "file":
        monkeypatch.setattr(sys, "stdout", io.StringIO())
    else:
        monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: SimpleNamespace())
    progress = Progress(3)
    for t in (1, 2, 3):
        progress.update(t, 0.5, 1000.0)
    assert not displays and sys.stdout.getvalue().count("\n") == 3


def test_importing_progress_does_not_import_rich():
    code = "import sys, fedbench.simulation.progress; assert not {'rich', 'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_ending_says_what_compression_made_of_the_bytes(capsys):
    cost = summary()["cost"]
    ending(summary(cost=cost | {"dense_down": 2.5e6, "dense_up": 10e6}), Path("runs/pgfed/digits/2026-01-01"))
    assert "2.5 MB down, 1.2 MB up (12.5% of uncompressed)" in capsys.readouterr().out


def test_ending(capsys):
    ending(summary(), Path("runs/pgfed/digits/2026-01-01"))
    text = capsys.readouterr().out
    for part in (
        "pgfed+ft on digits, dirichlet partition: 20 clients, 5 a round, 30 rounds, model mlp, seed 3",
        "12,346 images/s",
        "1:15 in all",
        "2.5 MB down, 1.2 MB up",
        "a client's round: 16.3 KiB down, 8.1 KiB up",
        "runs/pgfed/digits/2026-01-01",
        "python -m fedbench report runs ",
        "algorithm=local,fedavg,pgfed",
    ):
        assert part in text
    rows = {line[:30].strip(): line[30:].split() for line in text.splitlines()}
    assert rows["mean personalized accuracy"] == ["0.9000", "0.9500"]
    assert rows["worst tenth of the clients"] == ["0.8000", "0.8000"]
    assert rows["global accuracy"] == ["0.7000", "0.7000"]
    assert rows["round"] == ["30", "21"]


def test_the_ending_says_over_how_many_clients_a_mean_is(capsys):
    values = summary()["last"] | {"personal/accuracy_clients": 3}
    few = summary(last=values, num_clients=6, evaluated_clients=5)
    ending(few, Path("run"))
    rows = {line[:30].strip(): line[30:].split() for line in capsys.readouterr().out.splitlines()}
    assert rows["clients in these means"] == ["3", "of", "6", "5", "of", "6"]
    assert ending_line(few, Path("sweeps/cell")) == "cell: mean personalized accuracy 0.9000 last (3 of 6 clients)"
    best = summary(best_val={"round": 2, "values": {"personal/accuracy": 0.85}})
    assert ending_line(best, Path("c")) == "c: mean personalized accuracy 0.9000 last, 0.8500 best by validation"


def test_paths_are_as_short_as_can_be_typed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ending(summary(), tmp_path / "runs" / "pgfed" / "digits" / "now")
    assert "files: runs/pgfed/digits/now " in capsys.readouterr().out


def test_ending_without_a_global_model(capsys):
    values = {"personal/accuracy": 0.9}
    ending(summary(last=values, best=None), Path("elsewhere/cell"))
    text = capsys.readouterr().out
    assert "none: this method has no global model" in text
    assert "report elsewhere " in text


def test_a_class_of_ones_own_is_no_option_to_type(capsys):
    ending(summary(algorithm="Mine", classes={"algorithm": "my.Mine"}), Path("runs/Mine/digits/now"))
    text = capsys.readouterr().out
    assert "algorithm=local,fedavg seed=0,1,2" in text and "report runs " in text
    ending(summary(dataset="Mine", classes={"dataset": "my.Mine"}), Path("runs/pgfed/Mine/now"))
    assert "-m algorithm" not in capsys.readouterr().out


@pytest.mark.parametrize("same", [True, False])
def test_ending_where_personal_equals_global(capsys, same):
    ending(summary(personal_is_global=same), Path("runs"))
    assert ("personal equals global" in capsys.readouterr().out) == same


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (3725, "1:02:05")])
def test_duration(seconds, text):
    assert duration(seconds) == text
