"""All pages of the site, written into one folder; and the links that lead nowhere."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import fedbench
from fedbench.core.options import require
from fedbench.site.api import reference
from fedbench.site.markdown import Renderer, relative
from fedbench.site.methods import methods
from fedbench.site.printed import printed_tables

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = Path(__file__).parent / "templates"
NAVIGATION = (
    ("Start", "index.html"),
    ("Methods", "methods/index.html"),
    ("Running", "docs/running.html"),
    ("Recipes", "docs/extending.html"),
    ("Results", "results/index.html"),
    ("Tables", "tables/index.html"),
    ("Speed", "docs/speed.html"),
    ("Migration", "docs/migration.html"),
    ("Concepts", "docs/architecture.html"),
    ("API", "api.html"),
    ("All pages", "pages.html"),
)
HEADINGS = {  # of all pages, by folder
    "docs": "Guides",
    "methods": "Methods",
    "results": "Results",
    "tables": "Tables of papers",
    "": "Beside them",
}


def markdown_pages(root: Path) -> dict[str, str]:
    """Where each Markdown file of the repository is on the site.  {path: page}"""
    pages = {"README.md": "index.html", "CONTRIBUTING.md": "contributing.html", "CHANGELOG.md": "changelog.html"}
    for path in sorted((root / "docs").glob("*.md")):
        pages[f"docs/{path.name}"] = f"docs/{path.stem}.html"
    for path in [root / "results" / "README.md", *sorted((root / "results").glob("*/README.md"))]:
        name = path.relative_to(root).as_posix()
        pages[name] = name.replace("README.md", "index.html")
    return pages


def build(out: Path, root: Path = ROOT) -> int:
    """Write the site; returns the number of pages.  ConfigError where this is no checkout, or out is a file."""
    require((root / "docs" / "methods.md").is_file(), f"{root} is no checkout of fedbench: the site is built from one")
    require(not out.exists() or out.is_dir(), f"--out {out} is no folder")
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    env = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    places = markdown_pages(root)
    renderer = Renderer(places, lambda path: (root / path).is_file())
    known = methods(root)
    pages: dict[str, tuple[str, dict[str, Any]]] = {}  # by place: template and what it shows
    for source, place in places.items():
        text = (root / source).read_text(encoding="utf-8")
        pages[place] = ("text.html", {"title": _title(text), "body": renderer.html(text, source)})
    pages["methods/index.html"] = ("methods.html", {"title": "Methods", "methods": known})
    for method in known:
        pages[f"methods/{method.name}.html"] = ("method.html", {"title": method.printed, "method": method})
    tables = printed_tables(root)
    pages["tables/index.html"] = ("tables.html", {"title": "The papers' tables", "tables": tables})
    for table in tables:
        pages[f"tables/{table.name}.html"] = ("table.html", {"title": table.name, "table": table})
    pages["api.html"] = ("api.html", {"title": "API", "reference": reference(root / "fedbench")})
    titles: dict[str, list[tuple[str, str]]] = {heading: [] for heading in HEADINGS.values()}
    for place, (_, given) in pages.items():
        titles[HEADINGS.get(place.split("/")[0], HEADINGS[""])].append((given["title"], place))
    pages["pages.html"] = ("pages.html", {"title": "All pages", "titles": titles})
    for place, (template, given) in pages.items():
        path = out / place
        path.parent.mkdir(parents=True, exist_ok=True)
        to = _links_from(place)
        text = env.get_template(template).render(
            **given, to=to, navigation=NAVIGATION, here=place, version=fedbench.__version__
        )
        path.write_text(text, encoding="utf-8")
    for name in renderer.copied:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, out / name)
    for name in ("style.css", "sort.js"):
        shutil.copyfile(TEMPLATES / name, out / name)
    return len(pages)


def _links_from(place: str) -> Any:
    return lambda target: relative(target, place)


def _title(text: str) -> str:
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    return found[1].replace("`", "") if found else "fedbench"


class _Links(HTMLParser):
    """What a page links to, and the anchors that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [value for name in ("href", "src") if (value := given.get(name))]
        self.anchors |= {value for name in ("id", "name") if (value := given.get(name))}


def faults(out: Path) -> list[str]:
    """Links inside of the site that lead to no file or no anchor of it, as `page: link`."""
    read = {path.resolve(): _read(path) for path in sorted(out.rglob("*.html"))}
    found = []
    for page, of in read.items():
        for link in of.links:
            if re.match(r"(https?|mailto):", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            gone = not target.is_file() or (anchor and target in read and anchor not in read[target].anchors)
            if gone:
                found.append(f"{page.relative_to(out.resolve())}: {link}")
    return found


def _read(path: Path) -> _Links:
    links = _Links()
    links.feed(path.read_text(encoding="utf-8"))
    return links
