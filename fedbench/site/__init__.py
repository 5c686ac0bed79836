"""A Sphinx extension that generates pages of methods, printed tables and JSON keys, and writes equations as MathML.

The pages are written to docs/generated before Sphinx reads its sources.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

NAVIGATION = {"README": "navigation.md", "results/README": "navigation_results.md"}  # the template of each page


def setup(app: Any) -> dict[str, bool]:
    """Register the functions of this module with Sphinx, which calls this function.

    Args:
        app: The Sphinx application.

    Returns:
        Sphinx may read and write pages in parallel.
    """
    app.connect("builder-inited", write_pages)
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-docstring", escape_stars, priority=1)  # before the extension napoleon adds stars
    inline, block = (partial(write_math, as_block=as_block) for as_block in (False, True))
    # a renderer is a function for the beginning of an equation, and one for its end, which is not needed
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write_pages(app: Any) -> None:
    """Write the generated pages to docs/generated, each only if its text changed, and delete outdated ones.

    Args:
        app: The Sphinx application.
    """
    from fedbench.site.generate import generate_pages

    folder = Path(app.srcdir) / "docs" / "generated"
    pages = generate_pages(Path(app.srcdir))
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for path in folder.glob("*/*.md"):
        if path.relative_to(folder).as_posix() not in pages:
            path.unlink()


def add_navigation(app: Any, docname: str, source: list[str]) -> None:
    """Append the table of contents of the site to the text of README.md and results/README.md.

    Args:
        app: The Sphinx application.
        docname: The path of the page without suffix.
        source: A list with the text of the page, changed in place as Sphinx expects.
    """
    if docname in NAVIGATION:  # from docname to the template
        source[0] += (Path(app.confdir) / "_templates" / NAVIGATION[docname]).read_text(encoding="utf-8")


def escape_stars(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Escape stars outside of code, such as those of ``*shape`` and ``**values``, which do not mark emphasis.

    The arguments are those of Sphinx's event autodoc-process-docstring.  Only ``lines``, the docstring, is used, and
    changed in place.
    """
    text = "\n".join(lines)
    lines[:] = re.sub(r"(``.*?``|`[^`]*`)|\*", lambda match: match[1] or r"\*", text, flags=re.DOTALL).split("\n")


def write_math(translator: Any, node: Any, as_block: bool) -> None:
    """Write an equation as MathML.

    Args:
        translator: The HTML translator of Sphinx.
        node: The equation.
        as_block: Whether the equation is displayed, not inside a line of text.

    Raises:
        SkipNode: Always, which tells Sphinx that the equation is written.
    """
    from docutils.nodes import SkipNode
    from docutils.utils.math.latex2mathml import tex2mathml

    translator.body.append(tex2mathml(node.astext(), as_block=as_block))
    raise SkipNode
