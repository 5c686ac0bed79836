"""Every page of results/ is what its files say: its text and tables to the letter, its figures by their data."""

import pytest
from conftest import ROOT

from fedbench.pages import build

pytest.importorskip("jinja2", reason="pages need jinja2: pip install 'fedbench[report]'")
PAGES = build.find_pages(ROOT / "results")


def test_pages_are_found() -> None:
    assert {"default", "seven"} <= {page.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_what_its_files_say(page) -> None:
    assert build.differences(build.make(page)) == []
