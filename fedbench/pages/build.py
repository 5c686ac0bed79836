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
        drawings: The data of the figures by name.
    """

    folder: Path
    text: str
    drawings: dict[str, Drawing] = field(default_factory=dict)


def find_pages(root: Path) -> list[Path]:
    """Return the subfolders of root that contain a file page.json, sorted by name."""
    return sorted(path.parent for path in root.glob("*/page.json"))


def build_page(folder: Path) -> BuiltPage:
    """Generate a page; or, in a folder with page.md but without page.json, the index of the pages below it.

    Raises:
        ConfigError: A file is missing or damaged, or page.md, page.json and the folder name different files.
    """
    cached_page.cache_clear()  # the files may have changed since they were read
    path = folder / "page.md"
    require(path.is_file(), f"{folder} has no page.md: write one, with calls such as {{{{ table(...) }}}}")
    template = path.read_text(encoding="utf-8")
    if not (folder / "page.json").is_file():
        root = folder  # of all pages
        return BuiltPage(folder, MARK + render(template, Page(folder, {}), root, str(path)))
    page, root = read_page(folder), folder.resolve().parent
    text = MARK + render(template, page, root, str(path))  # MARK: a comment that the file is generated
    drawings = {name: make_drawing(page, name) for name in page.about["figures"]}
    _check_files(page, template)
    return BuiltPage(folder, text, drawings)


def _check_files(page: Page, template: str) -> None:
    """Check that the files of a page, page.json and page.md agree.

    Args:
        page: The page.
        template: The text of page.md.

    Raises:
        ConfigError: page.md does not show a figure or picture, a file is missing, or a file is named nowhere.
    """
    about = page.about
    unused = [name for name in (*about["figures"], *about["pictures"]) if f'("{name}")' not in template]
    require(
        not unused,
        f"{page.folder}: page.json has {', '.join(unused)}, which page.md does not show: add "
        '{{ figure("...") }} or {{ picture("...") }}, or remove the entry',
    )
    named = [*about["pictures"], *about["files"]]
    missing = sorted(name for name in named if not (page.folder / name).is_file())
    require(
        not missing,
        f"{page.folder}: page.json names {', '.join(missing)}, but the folder has no such file: add it, or remove the "
        "entry",
    )
    expected = {*PAGE_FILES, *named, *(f"{name}.svg" for name in about["figures"])}
    files = sorted(path.name for path in page.folder.iterdir() if path.name != "__pycache__")  # made by Python
    unnamed = [name for name in files if name not in expected and f'csv("{name}"' not in template]
    require(
        not unnamed,
        f"{page.folder} contains {', '.join(unnamed)}, which neither page.json nor page.md names: delete it, or add it "
        'to "files" in page.json',
    )


def write(built: BuiltPage) -> list[Path]:
    """Write README.md and figures of a generated page, each only if its file differs.

    Returns:
        The paths of the files that were written.
    """
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
    """Return how a generated page differs from its files, as lines of text.

    Returns:
        A unified diff of README.md, and a line for each figure whose file shows other data; [] without differences.
    """
    path = built.folder / "README.md"
    lines = difflib.unified_diff(
        _read(path).splitlines(), built.text.splitlines(), fromfile=str(path), tofile="built", n=0, lineterm=""
    )  # n: the number of equal lines that are shown around a difference
    return [*lines, *(f"{path} does not show these data" for path in _outdated(built))]


def _outdated(built: BuiltPage) -> dict[Path, Drawing]:
    """Return the figures to draw again: those whose SVG file is missing or was drawn from other data.

    Returns:
        From the path of each SVG file to the content of the figure; {} if all are current.
    """
    paths = {built.folder / f"{name}.svg": drawing for name, drawing in built.drawings.items()}
    return {path: drawing for path, drawing in paths.items() if not is_current(path, drawing)}


def _read(path: Path) -> str:
    """Return the text of a file; "" if the file does not exist."""
    return path.read_text(encoding="utf-8") if path.is_file() else ""
