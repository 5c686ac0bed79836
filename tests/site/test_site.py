"""The site: every page there, every link inside of it leads somewhere, what is asked for is two clicks away."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import ROOT

from fedbench.config.conf_tree import group_options
from fedbench.core.options import ConfigError
from fedbench.pages.store import FORMS
from fedbench.site.build import build, faults, markdown_pages
from fedbench.site.command import main
from fedbench.site.markdown import Renderer, slug
from fedbench.site.methods import Released, departures, methods
from fedbench.site.printed import printed_tables
from fedbench.site.results import key, option_of, results_of

pytest.importorskip("markdown_it", reason="needs markdown-it-py: pip install markdown-it-py")
pytest.importorskip("jinja2", reason="needs jinja2: pip install jinja2")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    assert build(out) == len(list(out.rglob("*.html")))
    return out


def links(page: Path) -> set[str]:
    return set(re.findall(r'href="([^"#]+\.html)', page.read_text()))


def test_every_link_leads_somewhere(site: Path) -> None:
    assert faults(site) == []
    assert not re.search(r'(?:src|href)="https?://[^"]+\.(?:js|css|woff2?)"', (site / "index.html").read_text())


def test_every_method_and_every_page_of_results_is_there(site: Path) -> None:
    known = {f"{name}.html" for name in group_options("algorithm")}
    assert links(site / "methods" / "index.html") >= known
    pages = {path.parent.name for path in (ROOT / "results").glob("*/README.md")}
    assert len(pages) > 20 and links(site / "results" / "index.html") >= {f"{name}/index.html" for name in pages}
    assert all((site / place).is_file() for place in markdown_pages(ROOT).values())


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        ("index.html", None, "uv run python -m fedbench"),  # how to start
        ("methods/index.html", "methods/pgfed.html", 'id="departures"'),
        ("results/index.html", "results/pgfed_table1_cifar_full/index.html", "79.3"),  # a cell
        ("tables/index.html", "tables/pgfed_table1_cifar.html", "72.49 ± 0.32"),  # the same beside print
        ("tables/index.html", "tables/pfedmoap_table1_clip.html", "+experiment=pfedmoap_table1_clip/"),  # not run
        ("docs/extending.html", None, "conf/algorithm/server_momentum.yaml"),  # how to add a method
        ("docs/architecture.html", None, "federation.svg"),  # the idea
        ("docs/speed.html", None, "PFLlib, FedAvg"),  # how fast beside PFLlib
    ],
)
def test_what_is_asked_for_is_two_clicks_away(site: Path, first: str, second: str | None, shown: str) -> None:
    assert first == "index.html" or first in links(site / "index.html")
    if second is not None:
        assert second.removeprefix(f"{Path(first).parent}/") in links(site / first)
    assert shown in (site / (second or first)).read_text()


def test_a_methods_page_says_what_its_files_say(site: Path) -> None:
    text = (site / "methods" / "pgfed.html").read_text()
    for part in (
        "the coefficient of the mean gradient is 1 / K&#39;, of the last cohort",
        "<strong>ljaiverson/pgfed</strong> (b1d70f7), round by round, to 2e-7",
        '<code>algorithm.eta2</code></td><td><code>0.01</code></td><td class="words">learning rate of their',
        "fedbench/algorithms/pgfed.py",
    ):
        assert part in text
    assert "Reduces to" not in text[text.index('id="departures"') : text.index('id="options"')]
    by_name = {method.name: method for method in methods(ROOT)}
    assert by_name["fedpia"].released is None
    assert by_name["apple"].released == Released("ljaiverson/pFL-APPLE", "8078196", "3e-8")


def test_the_released_code_is_told_of_every_method_that_is_held_against_it() -> None:
    """docs/released.md names them all, and no difference is larger than the test of them allows."""
    told = {method.name: method.released for method in methods(ROOT) if method.released}
    assert len(told) == 19 and all(0 < float(of.apart) <= 3e-6 for of in told.values())


def test_results_of_a_method_are_one_row_for_each_setting() -> None:
    """Means over seeds, never over settings; what a page has in two parts is shown once."""
    found = results_of(ROOT, group_options("algorithm"))
    rows = {(of.page, of.setting): (of.n, of.last) for of in found["pgfed"]}
    assert rows["default", ""] == (5, "90.83 ± 1.97")
    assert rows["compression", "compression=qsgd"] == (3, "95.26 ± 2.59")
    assert ("pgfed_table1_cifar_full", "PGFed, bounded") in rows and len(found["pgfed"]) == len(rows)
    assert len([of for of in found["pgfed"] if of.page == "pgfed_table1_cifar_full"]) == 2
    assert {of.metric for of in found["apple"] if of.page == "pneumonia_silos"} == {"AUC, mean over clients"}
    assert ("prompt_methods", "Prompt+FedPer") in {(of.page, of.setting) for of in found["fedper"]}
    assert not any(of.page == "default" for of in found["pgfed_mo"])
    by_row = {(of.page, of.setting) for option in ("local", "fedavg", "zero_shot") for of in found[option]}
    assert {("prompt_methods", row) for row in ("CoOp", "PromptFL", "ZS-CLIP")} <= by_row  # as experiments name them
    assert all(of.last for results in found.values() for of in results)


def test_every_printed_cell_has_its_form() -> None:
    """Full before reduced; a cell that both pages answer counts once, as full."""
    tables = {table.name: table for table in printed_tables(ROOT)}
    assert len(tables) > 30 and {form for table in tables.values() for form in table.forms} == set(FORMS)
    table = tables["pgfed_table1_cifar"]
    assert table.forms == {"full": 4, "reduced": 10, "not run": 70} and table.heads == ["method", "dataset", "clients"]
    local = [row for row in table.rows if row.labels == ["Local", "CIFAR10", "25"]]
    assert [(row.form, row.page) for row in local] == [
        ("full", "pgfed_table1_cifar_full"),
        ("reduced", "pgfed_table1_cifar"),
    ]
    assert (local[0].printed, local[0].ours, local[0].difference) == ("72.40 ± 0.45", "72.49 ± 0.32", "+0.09")
    assert local[1].run_with == "reduced/ten_rounds"
    [far] = [row for row in table.rows if row.labels == ["PGFed", "CIFAR100", "100"]]
    assert (far.form, far.ours, far.page) == ("not run", "", "")
    assert table.commands[0].startswith("80 of 84 cells are not run")


@pytest.mark.parametrize(
    ("label", "option"),
    [
        ("PGFed, bounded", "pgfed"), ("PGFedMo", "pgfed_mo"), ("fedavg+ft", "fedavg"), ("FedAvg-local", "fedavg_local"),
        ("APPLE (mu!=0)", "apple"), ("Prompt+FedPer", "fedper"), ("CoOp", None), ("", None),
    ],
)  # fmt: skip
def test_a_label_names_a_method(label: str, option: str | None) -> None:
    names = {key(name): name for name in ("pgfed", "pgfed_mo", "fedavg", "fedavg_local", "apple", "fedper")}
    assert option_of(label, names) == option


def test_departures_end_where_something_else_begins() -> None:
    text = "A method.\nDeparts from the paper: a,\n  b.\nReduces to: c.\n\nDeparts: d.\n\nMore."
    assert departures(text) == "Departs from the paper: a, b. Departs: d."
    inside = "Someone, 2020, Algorithm 1.  Departs from the paper: a\nand b.   Reduces to: c."
    assert departures(inside) == "Departs from the paper: a and b."
    assert departures("X: y.  A reconstruction.\n\nMore.").startswith("A reconstruction: the paper's own")


def test_links_of_the_repository_become_links_of_the_site() -> None:
    """To pages by their place, to figures as copies; what is not on the site is its name alone."""
    pages = {"README.md": "index.html", "docs/a.md": "docs/a.html", "results/p/README.md": "results/p/index.html"}
    renderer = Renderer(pages, {"results/p/x.svg"}.__contains__)
    html = renderer.html(
        "# A `b` c\n\n[p](../results/p/) [r](../README.md#a-b) [code](../x.py) ![f](../results/p/x.svg)", "docs/a.md"
    )
    assert '<h1 id="a-b-c">' in html and 'href="../results/p/index.html"' in html and 'href="../index.html#a-b"' in html
    assert "x.py" not in html and ">code<" not in html and "code" in html
    assert 'src="../results/p/x.svg"' in html and renderer.copied == {"results/p/x.svg"}
    assert slug("FL-bench's (old) way") == "fl-benchs-old-way"


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#there"></a><a href="b.html#gone"></a><img src="c.png"><a href="#x"></a>'
    )
    (tmp_path / "b.html").write_text('<p id="there"></p><a href="https://example.org/none"></a>')
    assert faults(tmp_path) == ["a.html: b.html#gone", "a.html: c.png", "a.html: #x"]


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "new")]) == 0
    assert re.match(r"\d\d+ pages: \S+index\.html\n", capsys.readouterr().out)
    (tmp_path / "file").touch()
    assert main(["--out", str(tmp_path / "file")]) == 2 and "is no folder" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="is no checkout of fedbench"):
        build(tmp_path / "x", root=tmp_path)
