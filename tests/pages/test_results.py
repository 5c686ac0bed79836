"""Every page of results/ is what its files say: its text and tables to the letter, its figures by their data."""

import json
import re

import pytest
from conftest import ROOT

from fedbench.pages import build

pytest.importorskip("jinja2", reason="pages need jinja2: pip install jinja2")
RESULTS = ROOT / "results"
PAGES = build.find_pages(RESULTS)


def test_every_folder_is_a_page() -> None:
    folders = sorted(path for path in RESULTS.iterdir() if path.is_dir())
    assert len(folders) > 20 and folders == PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_what_its_files_say(page) -> None:
    assert build.differences(build.make(page)) == []


def test_the_index_is_what_the_pages_say() -> None:
    assert build.differences(build.make_index(RESULTS)) == []


def test_the_table_of_the_gpu_is_its_json() -> None:
    """A CSV file that is shown as it stands, beside what the command wrote: each of its images/s is a row of that."""
    rows = json.loads((RESULTS / "benchmarks" / "gpu.json").read_text())["rows"]
    known = {f"{row['images_per_s']:,.0f}" for row in rows if row.get("images_per_s")}
    lines = (RESULTS / "benchmarks" / "gpu.csv").read_text().splitlines()[1:10]
    shown = {number for line in lines for number in re.findall(r"\d+,\d{3}", line.partition(",")[2])}
    assert len(shown) > 30 and shown <= known
