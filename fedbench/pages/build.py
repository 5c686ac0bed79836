"""README.md and figures of pages, from page.md, page.json and the CSV files; or what of them is not as these say."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path

from fedbench.core.files import replace_text
from fedbench.core.options import require
from fedbench.pages.figures import Drawing, as_svg, is_of, make_drawing
from fedbench.pages.places import Places, render, said_by_hand, stored
from fedbench.pages.store import Page, read_page

DATA = ("README.md", "page.json", "page.md", "runs.csv", "curves.csv", "cells.csv", "gains.csv")
MARK = "<!-- Written by python -m fedbench pages build from page.md, page.json and the CSV files: change those. -->\n"


@dataclass
class Built:
    """What a page should be: its text, its figures; and what became of its numbers."""

    folder: Path
    text: str
    drawings: dict[str, Drawing] = field(default_factory=dict)
    places: int = 0
    said: dict[str, int] = field(default_factory=dict)

    def summary(self) -> str:
        """One line: what is generated, and what is said by hand."""
        by_hand = ", ".join(f"{count} {why}" for why, count in self.said.items()) or "none"
        generated = f"{len(self.drawings)} figures, {self.places} numbers in the text"
        return f"{self.folder}: {generated} from files; said by hand: {by_hand}"


def find_pages(root: Path) -> list[Path]:
    """The folders below root that are pages, by name."""
    return sorted(path.parent for path in root.glob("*/page.json"))


def make(folder: Path) -> Built:
    """A page as its files say it; ConfigError where they do not fit together."""
    stored.cache_clear()
    template = _template(folder)
    page = read_page(folder)
    places = Places(page, folder.resolve().parent)
    text = MARK + render(template, places, str(folder / "page.md"))
    _check_used(page, places.used)
    drawings = {name: make_drawing(page, name) for name in page.about["figures"]}
    _check_files(page)
    return Built(folder, text, drawings, places.count, said_by_hand(template))


def make_index(root: Path) -> Built:
    """The README of the folder of pages, whose template may ask all of them."""
    stored.cache_clear()
    template = _template(root)
    places = Places(Page(root, {}), root)
    return Built(root, MARK + render(template, places, str(root / "page.md")), {}, places.count, said_by_hand(template))


def write(built: Built) -> list[Path]:
    """Write what is not as it should be; returns the paths."""
    written = []
    if read(built.folder / "README.md") != built.text:
        replace_text(built.folder / "README.md", [built.text])
        written.append(built.folder / "README.md")
    for name, drawing in built.drawings.items():
        path = built.folder / f"{name}.svg"
        if not is_of(path, drawing):
            replace_text(path, [as_svg(drawing)])
            written.append(path)
    return written


def differences(built: Built) -> list[str]:
    """What of a page's files is not as it should be, line by line; none where nothing is."""
    path = built.folder / "README.md"
    lines = difflib.unified_diff(read(path).splitlines(), built.text.splitlines(), str(path), "built", "", "", 0, "")
    old = [
        f"{name}.svg" for name, drawing in built.drawings.items() if not is_of(built.folder / f"{name}.svg", drawing)
    ]
    return [*lines, *(f"{built.folder / name} is not drawn of these data" for name in old)]


def read(path: Path) -> str:
    """A text file, its line ends as Python reads them; empty where there is none."""
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _template(folder: Path) -> str:
    path = folder / "page.md"
    require(path.is_file(), f"{folder} has no page.md: the words of the page, with places such as {{{{ table(...) }}}}")
    return path.read_text(encoding="utf-8")


def _check_used(page: Page, used: set[str]) -> None:
    """Refuse what page.json defines and page.md does not show."""
    kinds = {"table": "tables", "figure": "figures", "picture": "pictures", "commands": "commands"}
    for word, key in kinds.items():
        idle = [name for name in page.about[key] if f"{word} {name}" not in used]
        require(not idle, f"{page.folder}: page.json has {key} {', '.join(idle)}, which page.md does not show")


def _check_files(page: Page) -> None:
    """Refuse files that nothing shows or names, and names without their file."""
    tables = (spec.get("file") for spec in page.about["tables"].values())
    named = {*page.about["pictures"], *page.about["files"], *filter(None, tables)}
    gone = sorted(name for name in named if not (page.folder / name).is_file())
    require(not gone, f"{page.folder}: page.json names {', '.join(gone)}, which is not there")
    drawn = {f"{name}.svg" for name in page.about["figures"]}
    idle = sorted(path.name for path in page.folder.iterdir() if path.name not in {*DATA, *named, *drawn})
    require(not idle, f"{page.folder} holds {', '.join(idle)}, which page.json does not name")
