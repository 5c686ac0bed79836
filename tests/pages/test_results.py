"""Every page of results/ is what its files say: its text and tables to the letter, its figures by their data."""

import json
import re
from pathlib import Path

import pytest
from conftest import ROOT

from fedbench.pages import build

pytest.importorskip("jinja2", reason="pages need jinja2: pip install jinja2")
RESULTS = ROOT / "results"
CALL = re.compile(r"{{.*?}}|{%.*?%}", re.DOTALL)
NO_NUMBER = re.compile(
    r"```.*?```|`[^`\n]*`|^(?: {4}|\t)[^\n]*$|\]\([^)\n]*\)|<!--.*?-->|https?://\S+"
    r"|\b(?:Tables?|Figures?|Tasks?|Sections?|Algorithms?|Equations?) \d+(?:(?:,| to| and) \d+)*",
    re.DOTALL | re.MULTILINE,
)
NUMBER = re.compile(r"(?<![A-Za-z0-9_.])(?<![A-Za-z0-9_][-/.])\d(?:[\d.,]*\d)?")
PAGES = build.find_pages(RESULTS)


def test_every_folder_is_a_page() -> None:
    folders = sorted(path for path in RESULTS.iterdir() if path.is_dir())
    assert len(folders) > 20 and folders == PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_what_its_files_say(page) -> None:
    assert build.differences(build.build_page(page)) == []


def test_the_index_is_what_the_pages_say() -> None:
    assert build.differences(build.build_page(RESULTS)) == []


@pytest.mark.parametrize("page", [*PAGES, RESULTS], ids=lambda page: page.name)
def test_no_number_is_typed(page) -> None:
    """Numbers of page.md come from files, but for those of typed_numbers.txt: settings, and what no file has.

    Code, links and names (CIFAR-10, Table 1) are no numbers.
    """
    typed = dict(line.split(":") for line in (Path(__file__).parent / "typed_numbers.txt").read_text().splitlines())
    assert numbers_of((page / "page.md").read_text()) == typed.get(page.name, "").split()


def numbers_of(template: str) -> list[str]:
    return NUMBER.findall(NO_NUMBER.sub("", CALL.sub("", template)))


def test_numbers_are_found() -> None:
    assert numbers_of("PGFed has 90.8, seed 0.") == ["90.8", "0"]
    assert numbers_of("CIFAR-10, H100, Tables 1 and 2, `rounds=50`, [x](y/2.md), {{ value(1) | digits(1) }}") == []
    assert numbers_of("    rounds=3\n```\nrounds=3\n```\n| PGFed | 81.02 |") == ["81.02"]


def test_the_table_of_the_gpu_is_its_json() -> None:
    """A CSV file that is shown as it stands, beside what the command wrote: each of its images/s is a row of that."""
    rows = json.loads((RESULTS / "benchmarks" / "gpu.json").read_text())["rows"]
    known = {f"{row['images_per_s']:,.0f}" for row in rows if row.get("images_per_s")}
    lines = (RESULTS / "benchmarks" / "gpu.csv").read_text().splitlines()[1:10]
    shown = {number for line in lines for number in re.findall(r"\d+,\d{3}", line.partition(",")[2])}
    assert len(shown) > 30 and shown <= known
