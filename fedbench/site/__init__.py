"""A Sphinx extension: pages of methods and printed tables, and equations as MathML, which needs no network.

docs/conf.py names it.  The pages are written to docs/generated before Sphinx reads its sources.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

NAVIGATION = {"README": "navigation.md", "results/README": "navigation_results.md"}  # templates, by page


def setup(app: Any) -> dict[str, bool]:
    """Register the extension."""
    app.connect("builder-inited", write_pages)
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-docstring", escape_stars, priority=1)  # before napoleon
    app.add_html_math_renderer("mathml", inline_renderers=(inline_math, None), block_renderers=(block_math, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write_pages(app: Any) -> None:
    """Write the generated pages that are not as they should be, and remove those of methods that are gone."""
    from fedbench.site.generate import generated

    folder = Path(app.srcdir) / "docs" / "generated"
    pages = generated(Path(app.srcdir))
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for path in folder.glob("*/*.md"):
        if path.relative_to(folder).as_posix() not in pages:
            path.unlink()


def add_navigation(app: Any, docname: str, source: list[str]) -> None:
    """Append the table of contents, which a code host does not show, to README.md and results/README.md."""
    if docname in NAVIGATION:
        source[0] += (Path(app.confdir) / "_templates" / NAVIGATION[docname]).read_text(encoding="utf-8")


def escape_stars(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Escape the stars of ``*shape`` and ``**values``, which are no emphasis, outside of code."""
    text = "\n".join(lines)
    lines[:] = re.sub(r"(``.*?``|`[^`]*`)|\*", lambda found: found[1] or r"\*", text, flags=re.DOTALL).split("\n")


def inline_math(translator: Any, node: Any) -> None:
    """Write an equation in a line of text."""
    _write(translator, node, as_block=False)


def block_math(translator: Any, node: Any) -> None:
    """Write a displayed equation."""
    _write(translator, node, as_block=True)


def _write(translator: Any, node: Any, as_block: bool) -> None:
    from docutils.nodes import SkipNode
    from docutils.utils.math.latex2mathml import tex2mathml

    translator.body.append(tex2mathml(node.astext(), as_block=as_block))
    raise SkipNode
