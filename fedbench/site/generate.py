"""Generate the pages of methods, printed tables and JSON keys from the templates in docs/_templates."""

from __future__ import annotations

from pathlib import Path

from fedbench.site.methods import read_methods
from fedbench.site.schemas import read_schemas
from fedbench.site.tables import printed_tables


def generate_pages(root: Path) -> dict[str, str]:
    """Return the Markdown text of each generated page, by its path below docs/generated.

    Args:
        root: The root of the repository.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(root / "docs" / "_templates")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["cell"] = lambda text: text.replace("|", r"\|")  # a bare | would end the cell of a table
    methods, tables = read_methods(root), printed_tables(root)
    pages = {
        "methods/index.md": environment.get_template("methods.md").render(methods=methods),
        "tables/index.md": environment.get_template("tables.md").render(tables=tables),
        "json/index.md": environment.get_template("json.md").render(schemas=read_schemas()),
    }
    for method in methods:
        pages[f"methods/{method.name}.md"] = environment.get_template("method.md").render(method=method)
    for table in tables:
        pages[f"tables/{table.name}.md"] = environment.get_template("table.md").render(table=table)
    return pages
