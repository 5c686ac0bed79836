"""The generated pages of the site, as Markdown from the templates in docs/_templates."""

from __future__ import annotations

from pathlib import Path

from fedbench.site.methods import methods
from fedbench.site.tables import printed_tables


def generated(root: Path) -> dict[str, str]:
    """Return the text of each page, by its path below docs/generated."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(root / "docs" / "_templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = lambda text: text.replace("|", r"\|")
    known, tables = methods(root), printed_tables(root)
    pages = {
        "methods/index.md": environment.get_template("methods.md").render(methods=known),
        "tables/index.md": environment.get_template("tables.md").render(tables=tables),
    }
    pages |= {f"methods/{of.name}.md": environment.get_template("method.md").render(method=of) for of in known}
    return pages | {f"tables/{of.name}.md": environment.get_template("table.md").render(table=of) for of in tables}
