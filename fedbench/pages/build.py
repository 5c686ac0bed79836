"""README.md and figures of a page, made from page.md, page.json and the CSV files, or compared with them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path

from fedbench.core.files import replace_text
from fedbench.core.options import require
from fedbench.pages.figures import Drawing, as_svg, is_of, make_drawing
from fedbench.pages.page import TABLES, Page, read_page
from fedbench.pages.template import render, stored

DATA = ("README.md", "page.json", "page.md", *(f"{name}.csv" for name in TABLES))
MARK = "<!-- Written by python -m fedbench pages build from page.md, page.json and the CSV files: change those. -->\n"


@dataclass
class Built:
    """The text and the figures that a page should have."""

    folder: Path
    text: str
    drawings: dict[str, Drawing] = field(default_factory=dict)


def find_pages(root: Path) -> list[Path]:
    """Return the folders below root that are pages, by name."""
    return sorted(path.parent for path in root.glob("*/page.json"))


def make(folder: Path) -> Built:
    """Return a page as its files have it, or the index of a folder of pages.

    Raises:
        ConfigError: The files do not fit together.
    """
    stored.cache_clear()
    path = folder / "page.md"
    require(path.is_file(), f"{folder} has no page.md: the words of the page, with calls such as {{{{ table(...) }}}}")
    template = path.read_text(encoding="utf-8")
    is_index = not (folder / "page.json").is_file()
    page = Page(folder, {}) if is_index else read_page(folder)
    text = MARK + render(template, page, folder if is_index else folder.resolve().parent, str(path))
    drawings = {} if is_index else {name: make_drawing(page, name) for name in page.about["figures"]}
    if not is_index:
        _check_files(page, template)
    return Built(folder, text, drawings)


def _check_files(page: Page, template: str) -> None:
    """Refuse files that the page does not show, and figures and pictures that are not shown or not there."""
    about = page.about
    idle = [name for name in (*about["figures"], *about["pictures"]) if f'("{name}")' not in template]
    require(not idle, f"{page.folder}: page.json has {', '.join(idle)}, which page.md does not show")
    gone = sorted(name for name in (*about["pictures"], *about["files"]) if not (page.folder / name).is_file())
    require(not gone, f"{page.folder}: page.json names {', '.join(gone)}, which is not there")
    named = {*DATA, *about["pictures"], *about["files"], *(f"{name}.svg" for name in about["figures"])}
    idle = sorted(p.name for p in page.folder.iterdir() if p.name not in named and f'csv("{p.name}"' not in template)
    require(not idle, f"{page.folder} holds {', '.join(idle)}, which neither page.json nor page.md names")


def write(built: Built) -> list[Path]:
    """Write the files that differ and return their paths."""
    written = []
    if _read(built.folder / "README.md") != built.text:
        replace_text(built.folder / "README.md", [built.text])
        written.append(built.folder / "README.md")
    for name, drawing in built.drawings.items():
        path = built.folder / f"{name}.svg"
        if not is_of(path, drawing):
            replace_text(path, [as_svg(drawing)])
            written.append(path)
    return written


def differences(built: Built) -> list[str]:
    """Return the differences between a page and its files, line by line."""
    path = built.folder / "README.md"
    lines = difflib.unified_diff(_read(path).splitlines(), built.text.splitlines(), str(path), "built", "", "", 0, "")
    old = [path for name, of in built.drawings.items() if not is_of(path := built.folder / f"{name}.svg", of)]
    return [*lines, *(f"{path} is not drawn of these data" for path in old)]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
