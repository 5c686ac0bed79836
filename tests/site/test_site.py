"""The site: generated pages of methods and printed tables, equations, and the build by Sphinx."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from fedbench.config.conf_tree import group_options
from fedbench.site import escape_stars
from fedbench.site.generate import generate_pages
from fedbench.site.methods import ReleasedCode, departures, read_methods
from fedbench.site.results import normalized, option_of, results_of, rows_of_tables
from fedbench.site.tables import FORMS, printed_tables

pytest.importorskip("jinja2", reason="needs jinja2: pip install jinja2")
pytest.importorskip("pandas", reason="needs pandas: pip install pandas")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return generate_pages(ROOT)


def test_there_is_a_page_for_every_method_and_every_printed_table(pages: dict[str, str]) -> None:
    assert {f"methods/{name}.md" for name in ("index", *group_options("algorithm"))} == {
        name for name in pages if name.startswith("methods/")
    }
    assert len([name for name in pages if name.startswith("tables/")]) > 30


def test_the_page_of_a_method_has_what_its_files_have(pages: dict[str, str]) -> None:
    text = pages["methods/pgfed.md"]
    for part in (
        "## Departures\n\nDeparts from the paper",
        "**ljaiverson/pgfed** (b1d70f7) round by round, to 2e-7",
        "| `algorithm.eta2` | `0.01` | learning rate of their",
        "fedbench/algorithms/pgfed.py",
        "+experiment=pgfed_table1_cifar/pgfed`",
    ):
        assert part in text
    assert "Reduces to" not in text[text.index("## Departures") : text.index("## Options")]
    by_name = {method.name: method for method in read_methods(ROOT)}
    assert by_name["fedpia"].released is None
    assert by_name["apple"].released == ReleasedCode("ljaiverson/pFL-APPLE", "8078196", "3e-8")


def test_the_page_of_a_table_has_its_cells_and_commands(pages: dict[str, str]) -> None:
    text = pages["tables/pgfed_table1_cifar.md"]
    assert "| Local | CIFAR10 | 25 | 72.40 ± 0.45 | 72.49 ± 0.32 | +0.09 | [full]" in text
    assert "16 of 84 cells were run as printed, 3 in a reduced setting, 65 not at all" in text
    assert "`python -m fedbench +experiment=pgfed_table1_cifar/pgfed`" in text


def test_the_page_of_json_keys_has_the_keys_of_every_schema(pages: dict[str, str]) -> None:
    text = pages["json/index.md"]
    assert text.count("| `schema` | string |") == len(list((ROOT / "fedbench" / "schemas").glob("*.json")))
    assert "| `runs` | array of objects | the runs; each has the keys of a run except `schema` |" in text


def test_every_released_code_is_on_the_page_of_its_method() -> None:
    """No difference is larger than the test of docs/released.md allows."""
    released = [method.released for method in read_methods(ROOT) if method.released]
    assert len(released) == 19 and all(0 < float(of.difference) <= 3e-6 for of in released)


def test_results_of_a_method_are_one_row_for_each_setting() -> None:
    """Means are over seeds, never over settings; what a page has in two parts is shown once."""
    found = results_of(ROOT, group_options("algorithm"), rows_of_tables(ROOT / "conf"))
    rows = {(of["page"], of["setting"]): (of["n"], of["last"]) for of in found["pgfed"]}
    assert rows["default", ""] == (5, "90.83 ± 1.97")
    assert rows["compression", "compression=qsgd"] == (3, "95.26 ± 2.59")
    assert ("pgfed_table1_cifar_full", "PGFed, bounded") in rows and len(found["pgfed"]) == len(rows)
    assert len([of for of in found["pgfed"] if of["page"] == "pgfed_table1_cifar_full"]) == 2
    assert {of["metric"] for of in found["apple"] if of["page"] == "pneumonia_silos"} == {"AUC, mean over clients"}
    assert ("prompt_methods", "Prompt+FedPer") in {(of["page"], of["setting"]) for of in found["fedper"]}
    assert not any(of["page"] == "default" for of in found["pgfed_mo"])
    by_row = {(of["page"], of["setting"]) for option in ("local", "fedavg", "zero_shot") for of in found[option]}
    assert {("prompt_methods", row) for row in ("CoOp", "PromptFL", "ZS-CLIP")} <= by_row  # as experiments name them
    assert all(of["last"] for results in found.values() for of in results)


def test_every_printed_cell_has_its_form() -> None:
    """Full before reduced; a cell that both pages answer counts once, as full."""
    tables = {table.name: table for table in printed_tables(ROOT)}
    assert {form for table in tables.values() for form in table.forms} == set(FORMS)
    table = tables["pgfed_table1_cifar"]
    assert table.forms == {"full": 16, "reduced": 3, "not run": 65} and table.labels == ["method", "dataset", "clients"]
    local = [row for row in table.rows if row["labels"] == ["Local", "CIFAR10", "25"]]
    assert [(row["form"], row["page"]) for row in local] == [
        ("full", "pgfed_table1_cifar_full"),
        ("reduced", "pgfed_table1_cifar"),
    ]
    assert local[1]["run_with"] == "reduced/ten_rounds"
    [far] = [row for row in table.rows if row["labels"] == ["PGFed", "CIFAR100", "100"]]
    assert (far["form"], far["ours"], far["page"]) == ("not run", "", "")


@pytest.mark.parametrize(
    ("label", "option"),
    [
        ("PGFed, bounded", "pgfed"), ("PGFedMo", "pgfed_mo"), ("fedavg+ft", "fedavg"), ("FedAvg-local", "fedavg_local"),
        ("APPLE (mu!=0)", "apple"), ("Prompt+FedPer", "fedper"), ("CoOp", None), ("", None),
    ],
)  # fmt: skip
def test_a_label_names_a_method(label: str, option: str | None) -> None:
    names = {normalized(name): name for name in ("pgfed", "pgfed_mo", "fedavg", "fedavg_local", "apple", "fedper")}
    assert option_of(label, names) == option


def test_departures_end_where_something_else_begins() -> None:
    text = "A method.\nDeparts from the paper: a,\n  b.\nReduces to: c.\n\nDeparts: d.\n\nMore."
    assert departures(text) == "Departs from the paper: a, b. Departs: d."
    inside = "Someone, 2020, Algorithm 1.  Departs from the paper: a\nand b.   Reduces to: c."
    assert departures(inside) == "Departs from the paper: a and b."
    assert departures("X: y.  A reconstruction.\n\nMore.").startswith("A reconstruction: the paper's own")


def test_stars_outside_of_code_are_escaped() -> None:
    lines = ["inputs [*shape], ``f(1,", "**{})`` and `*x`"]
    escape_stars(None, "", "", None, None, lines)
    assert lines == [r"inputs [\*shape], ``f(1,", "**{})`` and `*x`"]


def test_every_page_of_docs_is_in_the_navigation() -> None:
    lines = (ROOT / "docs" / "_templates" / "navigation.md").read_text().split("\n")
    assert {f"docs/{path.stem}" for path in (ROOT / "docs").glob("*.md")} <= set(lines)


def test_equations_can_be_drawn() -> None:
    """Every method has its section in docs/equations_*.md, and the MathML writer knows every command in it."""
    assert not [method.name for method in read_methods(ROOT) if "$$" not in method.equations]
    assert {"fedavg": "equations_global", "pgfed": "equations_pgfed"}.items() <= {
        method.name: method.page for method in read_methods(ROOT)
    }.items()
    latex2mathml = pytest.importorskip("docutils.utils.math.latex2mathml", reason="needs docutils: pip install sphinx")
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("equations*.md")))
    equations = re.findall(r"\$\$(.+?)\$\$", text) + re.findall(r"(?<!\$)\$([^$\n]+)\$(?!\$)", text)
    assert len(equations) > 80
    for equation in equations:
        assert latex2mathml.tex2mathml(equation, as_block=True).startswith("<math")


@pytest.mark.slow  # a minute
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Sphinx checks the links; pages need no network; equations are MathML; the notebook has its outputs."""
    for module in ("sphinx", "myst_nb", "furo"):
        pytest.importorskip(module, reason="needs the extra docs")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-c", "docs", ".", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    html = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    assert not [
        name for name, text in html.items() if re.search(r'(?:src|href)="https?://[^"]+\.(?:js|css|woff2?)"', text)
    ]
    assert "<math" in html["docs/equations_global.html"]
    assert 'id="departures"' in html["docs/generated/methods/pgfed.html"]
    assert "fedbench.engine.cohort.Cohort.broadcast" in html["docs/api.html"]
    assert "cell_output" in html["docs/notebook.html"] and "README.html" in html["index.html"]
