"""Markdown as HTML: headings get anchors, links of the repository become links of the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

from fedbench.core.options import ConfigError

WORDS = 40  # letters from which a cell of a table is kept wide on a narrow screen
FILES = (".svg", ".png", ".csv", ".json", ".ipynb")  # what is copied beside the pages


def slug(text: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


class Renderer:
    """pages: where a Markdown file of the repository is on the site, by its path.  exists: whether a path of the
    repository is a file.  copied: collects the files that pages show or link to."""

    def __init__(self, pages: Mapping[str, str], exists: Callable[[str], bool]):
        try:
            from markdown_it import MarkdownIt
        except ImportError as error:
            raise ConfigError("the site needs markdown-it-py: pip install markdown-it-py") from error
        self.pages, self.exists, self.copied = pages, exists, set[str]()
        self._parser = MarkdownIt("commonmark", {"html": True}).enable("table")

    def html(self, text: str, source: str) -> str:
        """The page that a Markdown file makes.  source: its path in the repository."""
        tokens = self._parser.parse(text)
        for i, token in enumerate(tokens):
            if token.type == "heading_open":
                token.attrSet("id", slug(re.sub(r"[`*]", "", tokens[i + 1].content)))
            if token.type == "td_open" and len(tokens[i + 1].content) >= WORDS:
                token.attrJoin("class", "words")
            for child in token.children or ():
                self._relink(child, token.children or [], source)
        return self._parser.renderer.render(tokens, self._parser.options, {})

    def _relink(self, token: Any, siblings: list[Any], source: str) -> None:
        name = {"link_open": "href", "image": "src"}.get(token.type)
        if name is None:
            return
        target = self.place(str(token.attrGet(name)), source)
        if target is not None:
            token.attrSet(name, target)
            return
        token.type, token.tag, token.hidden = "text", "", False  # a file that is not on the site: its name alone
        token.attrs = {}
        at = siblings.index(token)
        close = next((t for t in siblings[at:] if t.type == "link_close"), None)
        if close is not None:
            close.type, close.tag = "text", ""

    def place(self, link: str, source: str) -> str | None:
        """A link as it is on the site, relative to the page of its source; None where it leads to nothing there."""
        if re.match(r"[a-z]+:|#", link):
            return link
        path, _, anchor = link.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        for candidate in (path, f"{path}/README.md"):
            if candidate in self.pages:
                return relative(self.pages[candidate], self.pages[source]) + (f"#{anchor}" if anchor else "")
        if path.endswith(FILES) and self.exists(path):
            self.copied.add(path)
            return relative(path, self.pages[source])
        return None


def relative(target: str, page: str) -> str:
    """The link from one page of the site to another file of it."""
    return posixpath.relpath(target, str(PurePosixPath(page).parent))
