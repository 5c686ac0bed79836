"""The lines of a run are few, and a terminal and a notebook are redrawn."""

import io
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest

from fedbench.simulation.callbacks.progress import Progress


def opened(total: int, start: int = 0) -> Progress:
    progress = Progress()
    progress.open(total, start)
    return progress


@contextmanager
def showing(total: int, start: int = 0) -> Iterator[Progress]:
    progress = opened(total, start)
    try:
        yield progress
    finally:
        progress.close()


@pytest.mark.parametrize(("rounds", "lines"), [(1, 1), (5, 5), (20, 20), (150, 20), (1000, 21)])
def test_few_lines_without_a_terminal(capsys, rounds, lines):
    with showing(rounds) as progress:
        for t in range(1, rounds + 1):
            progress.update(t, math.nan if t == 1 else 0.5, 1234.5)
    printed = capsys.readouterr().out.splitlines()
    assert lines <= len(printed) <= lines + 1
    assert printed[0].split()[:4] == ["round", f"{1}/{rounds}", "accuracy", "-"]
    assert printed[-1].split()[1] == f"{rounds}/{rounds}"
    assert "1,234 images/s" in printed[-1]


def test_resumed_run_says_where_it_goes_on(capsys):
    progress = opened(100, 57)
    progress.update(58, float("nan"), 10.0)
    assert capsys.readouterr().out.split("\n")[0].startswith("round  58/100  accuracy      -")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with showing(10, 2) as progress:
        progress.update(3, 0.5, 1000.0)
    shown = sys.stdout.getvalue()
    for part in (" 3/10", "accuracy 0.5000", "1,000 images/s"):
        assert part in shown


def test_the_bar_of_a_cell_vanishes_and_needs_a_terminal(monkeypatch, capsys):
    progress = Progress(transient=True)
    progress.open(10)
    progress.update(1, 0.5, 1000.0)
    progress.close()
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    progress.open(10)
    progress.update(1, 0.5, 1000.0)
    progress.close()
    assert " 1/10" in sys.stdout.getvalue() and sys.stdout.getvalue().endswith("\x1b[1A\x1b[2K")


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
    monkeypatch.setattr("fedbench.simulation.callbacks.progress.REDRAWN", 0.0)
    with showing(50) as progress:
        for t in range(1, 51):
            progress.update(t, 0.01 * t, 1000.0)
    assert sys.stdout.getvalue() == ""
    (states,) = displays
    assert [state.split()[1] for state in states] == [f"{t}/50" for t in range(1, 51)]
    assert states[-1].startswith("round 50/50  accuracy 0.5000      1,000 images/s")


def test_a_notebook_is_not_flooded(monkeypatch):
    displays = in_a_notebook(monkeypatch)
    monkeypatch.setattr("fedbench.simulation.callbacks.progress.REDRAWN", 1000.0)
    progress = opened(1000)
    for t in range(1, 1001):
        progress.update(t, 0.5, 1000.0)
    assert [[state.split()[1] for state in states] for states in displays] == [["1/1000", "1000/1000"]]


@pytest.mark.parametrize("where", ["file", "ipython on a terminal"])
def test_nothing_is_redrawn_outside_of_a_notebook(monkeypatch, where):
    """Not where a cell writes to a file, nor in a shell without a kernel."""
    displays = in_a_notebook(monkeypatch)
    if where == "file":
        monkeypatch.setattr(sys, "stdout", io.StringIO())
    else:
        monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: SimpleNamespace())
    progress = opened(3)
    for t in (1, 2, 3):
        progress.update(t, 0.5, 1000.0)
    assert not displays and sys.stdout.getvalue().count("\n") == 3
