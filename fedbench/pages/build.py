"""Write README.md and the figures of a page from page.md, page.json and the CSV files, or compare them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path

from fedbench.core.files import replace_text
from fedbench.core.options import require
from fedbench.pages.figures import Drawing, as_svg, is_current, make_drawing
from fedbench.pages.page import TABLES, Page, read_page
from fedbench.pages.template import cached_page, render

PAGE_FILES = ("README.md", "page.json", "page.md", *(f"{name}.csv" for name in TABLES))
MARK = "<!-- Written by python -m fedbench pages build from page.md, page.json and the CSV files: change those. -->\n"


@dataclass
class BuiltPage:
    """The generated text and figures of a page.

    Attributes:
        folder: The folder of the page.
        text: The text of README.md.
        drawings: The figures by name.
    """

    folder: Path
    text: str
    drawings: dict[str, Drawing] = field(default_factory=dict)


def find_pages(root: Path) -> list[Path]:
    """Return the folders of the pages in a folder, sorted by name."""
    return sorted(path.parent for path in root.glob("*/page.json"))


def build_page(folder: Path) -> BuiltPage:
    """Generate a page, or the index of a folder of pages.

    Raises:
        ConfigError: A file is missing or damaged, or the files do not agree.
    """
    cached_page.cache_clear()
    path = folder / "page.md"
    require(path.is_file(), f"{folder} has no page.md: write one, with calls such as {{{{ table(...) }}}}")
    template = path.read_text(encoding="utf-8")
    if not (folder / "page.json").is_file():
        return BuiltPage(folder, MARK + render(template, Page(folder, {}), folder, str(path)))
    page = read_page(folder)
    text = MARK + render(template, page, folder.resolve().parent, str(path))
    drawings = {name: make_drawing(page, name) for name in page.about["figures"]}
    _check_files(page, template)
    return BuiltPage(folder, text, drawings)


def _check_files(page: Page, template: str) -> None:
    """Check that the page shows all of its files, figures and pictures, and that they exist."""
    about = page.about
    unused = [name for name in (*about["figures"], *about["pictures"]) if f'("{name}")' not in template]
    require(not unused, f"{page.folder}: page.json has {', '.join(unused)}, which page.md does not show")
    named = [*about["pictures"], *about["files"]]
    missing = sorted(name for name in named if not (page.folder / name).is_file())
    require(not missing, f"{page.folder}: page.json names {', '.join(missing)}, which is not there")
    expected = {*PAGE_FILES, *named, *(f"{name}.svg" for name in about["figures"])}
    files = sorted(path.name for path in page.folder.iterdir())
    unused = [name for name in files if name not in expected and f'csv("{name}"' not in template]
    require(not unused, f"{page.folder} contains {', '.join(unused)}, which neither page.json nor page.md names")


def write(built: BuiltPage) -> list[Path]:
    """Write the files that differ and return their paths."""
    written = []
    path = built.folder / "README.md"
    if _read(path) != built.text:
        replace_text(path, [built.text])
        written.append(path)
    for path, drawing in _outdated(built).items():
        replace_text(path, [as_svg(drawing)])
        written.append(path)
    return written


def differences(built: BuiltPage) -> list[str]:
    """Return the differences between a page and its files, line by line."""
    path = built.folder / "README.md"
    lines = difflib.unified_diff(_read(path).splitlines(), built.text.splitlines(), str(path), "built", "", "", 0, "")
    return [*lines, *(f"{path} does not show these data" for path in _outdated(built))]


def _outdated(built: BuiltPage) -> dict[Path, Drawing]:
    """Return the figures whose files do not show their data, by path."""
    paths = {built.folder / f"{name}.svg": drawing for name, drawing in built.drawings.items()}
    return {path: drawing for path, drawing in paths.items() if not is_current(path, drawing)}


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
