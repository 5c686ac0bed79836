"""The commands that pages of results print are commands still: cells of every sweep compose, and are checked."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from conftest import ROOT

from fedbench.app.compose import Composer
from fedbench.app.help import SUBCOMMANDS
from fedbench.config.check import check
from fedbench.config.choices import with_choices

PROSE = re.compile(r"\[(?:and so on|the same|a run|both)[^\]]*\]")
SWEPT_ALIKE = re.compile(r"^seed=")  # a cell's seed changes nothing that is checked
OF_THE_LAUNCHER = re.compile(r"^hydra/|^hydra\.launcher")


def commands() -> dict[str, list[str]]:
    """The words after `python -m fedbench`, by page, part and number."""
    found = {}
    for path in sorted((ROOT / "results").glob("*/page.json")):
        for part, lines in json.loads(path.read_text())["commands"].items():
            for i, line in enumerate(lines):
                words = re.match(r"uv run python -m fedbench (.*)", line.replace("\\\n", " "), re.DOTALL)
                if words and words[1].split()[0] not in SUBCOMMANDS and "[the same]" not in line:
                    found[f"{path.parent.name}/{part}/{i}"] = shlex.split(PROSE.sub("", words[1]), comments=True)
    return found


COMMANDS = commands()


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 40 and sum(words[0] == "-m" for words in COMMANDS.values()) > 30


def experiment(cell: list[str]) -> str:
    return next((word for word in cell if word.startswith("+experiment=")), "")


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if i % 3 else ()) for i, n in enumerate(COMMANDS)]
)
def test_every_value_of_a_sweep_composes(name: str, every: bool, composer: Composer) -> None:
    """Each value of each key, beside the first values of the others; two rows of each table, whose other rows are
    composed by tests/test_experiments.py.  Without -m slow: the first and the last run of each command."""
    words = [word for word in COMMANDS[name] if word != "-m" and not OF_THE_LAUNCHER.match(word)]
    words = [re.sub(r",.*", "", word) if SWEPT_ALIKE.match(word) else word for word in words]
    swept = COMMANDS[name][0] == "-m"
    if swept:
        composer.refuse_repeated(words)
        cells = composer.run_overrides(composer.expand(words))
    else:
        cells = [words]
    assert cells
    alone = [cell for cell in cells if sum(map(str.__ne__, cell, cells[0])) <= 1]
    other_rows = [cell for cell in alone if experiment(cell) != experiment(cells[0])]
    checked = [cell for cell in alone if cell not in other_rows[1:]]
    for cell in checked if every else [checked[0], *checked[1:][-1:]]:
        full = composer.compose(cell)
        check(with_choices(full, full.hydra))
