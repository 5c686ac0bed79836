"""README.md says what the files say: any other number, file or word of page.json is refused or found."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from fedbench.core.options import ConfigError
from fedbench.pages import build
from fedbench.pages.figures import as_svg, make_drawing
from fedbench.pages.store import KEYS, Page, as_csv, as_json, cell, read_page, write_page

pytest.importorskip("jinja2", reason="pages need jinja2: pip install jinja2")
BASE = {"part": "main", "status": "finished", "form": "full"}


def make_page(folder: Path, text: str, **about) -> Path:
    """A page of two methods with two seeds each, and of one method of which only a summary of three is left."""
    table = {"rows": {"columns": ["n", "last", "rounds_to_target"], "order": ["-last"]}}
    runs, curves = [], []
    for method, last in (("a", (0.5, 0.75)), ("b", (0.25, 0.5))):
        for seed, value in enumerate(last):
            run = f"{method}{seed}"
            runs.append(
                BASE | {"run": run, "method": method, "lam": len(runs) // 2, "seed": seed, "n": 1, "last": value}
            )
            curves += [{"run": run, "round": t, "personal/accuracy": value * t / 2} for t in (1, 2)]
    old = {"run": None, "method": "old", "lam": 9, "seed": "0 to 2", "n": 3, "last": 0.9, "last_std": 0.0125}
    runs.append(BASE | old | {"rounds_to_target": 7.0, "rounds_to_target_n": 2})
    page = Page(folder, {**KEYS, "title": "t", "tables": table} | about, runs, curves)
    write_page(page)
    (folder / "page.md").write_text(text)
    return folder


def text_of(folder: Path) -> str:
    return build.make(folder).text.removeprefix(build.MARK)


def test_runs_are_averaged_and_summaries_are_taken_as_they_are(tmp_path) -> None:
    lines = text_of(make_page(tmp_path, '{{ table("rows") }}\n')).splitlines()
    assert lines == [
        "| method | n | last | rounds to 70% |",
        "| --- | ---: | ---: | ---: |",
        "| old | 3 | 90.00 ± 1.25 | 7.0 (2 of 3) |",
        "| a | 2 | 62.50 ± 12.50 | never |",  # population std of 0.5 and 0.75
        "| b | 2 | 37.50 ± 12.50 | never |",
    ]


@pytest.mark.parametrize("place, shown", [
    ('value("last", "a") | digits(1)', "62.5"),
    ('value("last", "a", seed=1) | digits(0)', "75"),
    ('spread("last", "old") | digits(2)', "90.00 ± 1.25"),
    ('std("last", method="b") | digits(1)', "12.5"),
    ('(value("last", "b") - value("last", "a")) | signed(1)', "-25.0"),
    ('paired("last", "a", "b") | digits(2)', "25.00 ± 0.00"),
    ('curve(1, "a") | digits(2)', "31.25"),
    ('value("last", lam=9) | digits(1)', "90.0"),
    ('n("old")', "3"),
    ('printed("PGFed", "print") | digits(2)', "81.02"),
])  # fmt: skip
def test_places(tmp_path, place, shown) -> None:
    asked = {"table": "pgfed_table1_cifar", "dataset": "CIFAR10", "clients": 25, "method": "$method"}
    columns = {"print": {"printed": asked}}
    folder = make_page(tmp_path, '{{ table("rows") }}\n\nIt is {{ ' + place + " }}.\n", columns=columns)
    assert text_of(folder).splitlines()[-1] == f"It is {shown}."


@pytest.mark.parametrize("words, why", [
    ("PGFed has 90.8.", "the number 90.8"),
    ("Seeds 0 and so on", "the number 0"),
    ("From a-3 to x", None),
    ("CIFAR-10, H100, ViT-B/32, Tables 1 and 2, `rounds=50`, [x](y/2.md)", None),
    ("    uv run python -m fedbench rounds=3", None),
    ('{% said "setting" %}50 rounds{% endsaid %}', None),
    ('{% said "guess" %}50 rounds{% endsaid %}', "why is one of setting"),
    ("{{ 90.8 }}", "gives 90.8"),
    ('{{ "90.8" }}', "gives '90.8'"),
    ('{{ value("last", "a") }}', "digits"),
    ("| a | b |\n| --- | --- |", "a table typed by hand"),
    ('{{ value("last", "c") | digits(1) }}', "0 groups of part main are c"),
    ('{{ value("last", seed=1) | digits(1) }}', "2 groups of part main are seed=1"),
    ('{{ value("lost", "a") | digits(1) }}', "defines no such column"),
    ('{{ value("best", "a") | digits(1) }}', "has no number best"),
    ("{{ picture }", "page.md, line"),
    ("{% if nothing %}x{% endif %}", "'nothing' is undefined"),
    ('{{ paired("last", "a", "old") | digits(1) }}', "a and old have no seed in common"),
    ('{{ picture("old.png") }}', "why says what it was drawn from"),
    ('{{ figure("empty") }}', "there is nothing to draw"),
    ('{{ figure("against") }}', "has no number there"),
    ('{{ table("row") }}', "has no table row"),
])  # fmt: skip
def test_numbers_are_places_or_marked(tmp_path, words, why) -> None:
    figures = {"empty": {"where": {"method": "old"}}, "against": {"kind": "against", "key": "method"}}
    pictures = {"old.png": {"alt": "old"}}
    text = '{{ table("rows") }}\n\n' + words + "\n"
    asked = {
        "figures": {k: v for k, v in figures.items() if k in words},
        "pictures": pictures if "old" in words else {},
    }
    folder = make_page(tmp_path, text, **asked)
    if why is None:
        assert "{" not in text_of(folder).splitlines()[-1]
    else:
        with pytest.raises(ConfigError, match=re.escape(why)):
            build.make(folder)


def test_what_is_said_by_hand_is_counted(tmp_path) -> None:
    words = '{% said "setting" %}5 of 10, {{ value("last", "a") | digits(1) }}, CIFAR-10{% endsaid %}'
    built = build.make(make_page(tmp_path, '{{ table("rows") }}\n' + words + "\n"))
    assert built.said == {"setting": 2} and built.places == 1


def test_a_change_of_a_file_is_found(tmp_path) -> None:
    figures = {"curves": {"kind": "curves"}, "over": {"kind": "against", "key": "lam"}}
    text = '{{ table("rows") }}\n{{ figure("curves") }}\n{{ figure("over") }}\n'
    folder = make_page(tmp_path, text, figures=figures, labels={"main": ["method", "lam"]})
    assert sorted(path.name for path in build.write(build.make(folder))) == ["README.md", "curves.svg", "over.svg"]
    assert build.differences(build.make(folder)) == [] and build.write(build.make(folder)) == []

    page = read_page(folder)
    page.runs[0]["last"] = 0.51
    write_page(page)
    found = "\n".join(build.differences(build.make(folder)))
    assert "63.00 ± 12.00" in found and "over.svg is not drawn of these data" in found and "curves.svg" not in found
    page.runs[0]["last"], page.curves[0]["personal/accuracy"] = 0.5, 0.2
    write_page(page)
    assert build.differences(build.make(folder)) == [f"{folder / 'curves.svg'} is not drawn of these data"]
    (folder / "README.md").write_text((folder / "README.md").read_text().replace("62.50", "62.51"))
    assert any("62.51" in line for line in build.differences(build.make(folder)))


def test_a_figure_draws_its_data(tmp_path) -> None:
    """The points of a line in the SVG file are an affine image of rounds and means."""
    folder = make_page(tmp_path, "", figures={"curves": {"kind": "curves"}}, tables={})
    page = read_page(folder)
    page.curves = [{**row, "round": t, "personal/accuracy": row["personal/accuracy"] + 0.1 * (t == 5)}
                   for row in page.curves for t in (row["round"], row["round"] + 3)]  # fmt: skip
    drawing = make_drawing(page, "curves")
    svg = as_svg(drawing)
    assert svg == as_svg(drawing) and drawing.digest in svg
    assert len(drawing.series) == 2  # of the summary there are no curves
    for i, line in enumerate(drawing.series):
        path = re.search(rf'<g id="series_{i}">\s*<path d="([^"]+)"', svg)
        assert path is not None
        points = np.array([[float(x) for x in p.split()] for p in re.findall(r"[ML] ([-\d. ]+)", path.group(1))])
        for drawn, meant in ((points[:, 0], line.x), (points[:, 1], line.y)):
            assert np.corrcoef(drawn, meant)[0, 1] ** 2 == pytest.approx(1)


@pytest.mark.parametrize("change, why", [
    (lambda folder, about: (folder / "old.png").write_text(""), "holds old.png"),
    (lambda folder, about: about["tables"].update(idle={"columns": ["n"]}), "has tables idle"),
    (lambda folder, about: about.update(titel="x"), "no key titel; the nearest are title"),
    (lambda folder, about: about.update(papers="x"), "papers must be a list"),
    (lambda folder, about: about["tables"]["rows"].update(kind="row"), "kind is 'row'"),
    (lambda folder, about: about["tables"]["rows"].update(colums=[]), "no key colums"),
    (lambda folder, about: about["tables"]["rows"].update(part="x"), "has no part 'x'"),
    (lambda folder, about: about.update(files=["gone.json"]), "names gone.json"),
    (lambda folder, about: (folder / "page.md").unlink(), "has no page.md"),
])  # fmt: skip
def test_what_does_not_fit_together_is_refused(tmp_path, change, why) -> None:
    folder = make_page(tmp_path, '{{ table("rows") }}\n')
    build.make(folder)
    about = json.loads((folder / "page.json").read_text())
    change(folder, about)
    (folder / "page.json").write_text(as_json(about))
    with pytest.raises(ConfigError, match=re.escape(why)):
        build.make(folder)


@pytest.mark.parametrize("row, why", [
    ({"form": "fully"}, "form is 'fully'; it is one of full, reduced, not run"),
    ({"n": 1.5}, "n counts runs, got 1.5"),
    ({"part": None}, "line 7 has no part"),
    ({"method": "old", "lam": 9, "last": 0.5}, "a summary of several runs beside other rows"),
])  # fmt: skip
def test_rows_that_mean_nothing_are_refused(tmp_path, row, why) -> None:
    folder = make_page(tmp_path, '{{ table("rows") }}\n')
    page = read_page(folder)
    page.runs.append(BASE | {"run": "x", "method": "c", "seed": 0, "n": 1} | row)
    (folder / "runs.csv").write_text(as_csv(page.runs))
    with pytest.raises(ConfigError, match=re.escape(why)):
        build.make(folder)


def test_what_has_no_number_comes_last(tmp_path) -> None:
    folder = make_page(tmp_path, '{{ table("rows") }}\n')
    page = read_page(folder)
    page.runs.insert(0, BASE | {"run": "x", "method": "c", "seed": 0, "n": 1})
    write_page(page)
    assert [line.split(" | ")[0] for line in text_of(folder).splitlines()[2:]] == ["| old", "| a", "| b", "| c"]


def test_a_curve_is_of_the_rounds_that_all_seeds_have(tmp_path) -> None:
    page = read_page(make_page(tmp_path, "", figures={"curves": {"kind": "curves"}}, tables={}))
    page.curves[1]["personal/accuracy"] = None  # of method a, seed 0, round 2
    a, b = make_drawing(page, "curves").series
    assert (a.x, b.x) == ([1], [1, 2])


def test_files_that_are_cut_off_are_refused(tmp_path) -> None:
    tables = {"speed": {"kind": "csv", "file": "speed.csv"}}
    folder = make_page(tmp_path, '{{ table("speed") }}\n', tables=tables)
    (folder / "speed.csv").write_text("a,b\n1,2\n3\n")
    with pytest.raises(ConfigError, match="line 3"):
        build.make(folder)
    runs = (folder / "runs.csv").read_text()
    (folder / "runs.csv").write_text(runs.rstrip("\n").rpartition(",")[0] + "\n")
    with pytest.raises(ConfigError, match="line 6 has not"):
        build.make(folder)


@pytest.mark.parametrize("change, why", [
    ({"form": "full"}, "full or reduced, and ours, or not run"),
    ({"method": "FedAvgg"}, "has no cell ('FedAvgg'"),
])  # fmt: skip
def test_cells_that_mean_nothing_are_refused(tmp_path, change, why) -> None:
    folder = make_page(tmp_path, '{{ coverage("pgfed_table1_cifar") }}\n', tables={})
    row = {"table": "pgfed_table1_cifar", "method": "FedAvg", "setting": "Dir(0.3); sample 25%", "dataset": "CIFAR10"}
    row |= {"clients": 25, "metric": "mean_client_test_accuracy_pct", "form": "not run", "run_with": None, "ours": None}
    row |= {"ours_std": None, "ours_n": None, "sigma": None}
    (folder / "cells.csv").write_text(as_csv([row]))
    assert text_of(folder) == "84 of 84 cells are not run.\n"
    (folder / "cells.csv").write_text(as_csv([row | change]))
    with pytest.raises(ConfigError, match=re.escape(why)):
        build.make(folder)


def test_a_curve_without_a_run_is_refused(tmp_path) -> None:
    folder = make_page(tmp_path, "")
    (folder / "curves.csv").write_text("run,round,personal/accuracy\nz,1,0.5\n")
    with pytest.raises(ConfigError, match=r"runs\.csv has no run z"):
        read_page(folder)


def test_texts_differences_and_rounds(tmp_path) -> None:
    """Columns of page.json that are made of others, and a table of rounds with scores below."""
    asked = {"table": "pgfed_table1_cifar", "dataset": "CIFAR10", "clients": 25, "method": "$method"}
    columns = {"print": {"printed": asked}, "both": {"title": "both", "text": ["{last} ({print})", "{last}"]}}
    less = {"key": "last", "title": "less", "less": asked, "none": ""}
    each = {"key": "last", "title": "each", "each": True, "digits": 0}
    tables = {
        "rows": {"columns": ["both", less, each], "where": {"method": ["PGFed", "a"]}},
        "rounds": {"kind": "rounds", "rounds": [1, 2], "columns": [{"title": "A", "where": {"method": "a"}}],
                   "below": [{"title": "in the end", "key": "last"}]},
    }  # fmt: skip
    folder = make_page(tmp_path, '{{ table("rows") }}\n\n{{ table("rounds") }}\n', columns=columns, tables=tables)
    page = read_page(folder)
    page.runs[2] |= {"method": "PGFed", "last": 0.8}
    page.runs[3] |= {"method": "PGFed", "last": 0.84}
    write_page(page)
    lines = text_of(folder).splitlines()
    assert lines[2:4] == [
        "| a | 62.50 ± 12.50 |  | 50, 75 |",
        "| PGFed | 82.00 ± 2.00 (81.02 ± 0.41) | +0.98 | 80, 84 |",
    ]
    assert lines[7:] == ["| 1 | 31.25 ± 6.25 |", "| 2 | 62.50 ± 12.50 |", "| in the end | 62.50 ± 12.50 |"]


def test_a_csv_file_is_shown_as_it_stands(tmp_path) -> None:
    tables = {"speed": {"kind": "csv", "file": "speed.csv"}}
    folder = make_page(tmp_path, '{{ table("speed") }}\n', tables=tables)
    (folder / "speed.csv").write_text('what,ratio,ratio\nloop,0.80,"1,024 (1 to 2)"\nvmap,,**3**\n')
    assert text_of(folder).splitlines() == [
        "| what | ratio | ratio |",
        "| --- | ---: | ---: |",
        "| loop | 0.80 | 1,024 (1 to 2) |",
        "| vmap |  | **3** |",
    ]


def test_the_index_names_every_page(tmp_path) -> None:
    make_page(tmp_path / "one", '{{ table("rows") }}\n', summary='a: {{ value("last", "a") | digits(1) }}')
    (tmp_path / "page.md").write_text('{{ index("one") }}\n\n{{ page("one").value("last", "b") | digits(1) }}\n')
    text = build.make_index(tmp_path).text
    assert "| [one](one/README.md) | a: 62.5 | full | 2; 3 |  |" in text and text.endswith("\n37.5\n")
    make_page(tmp_path / "two", '{{ page("one").value("last", "a") | digits(1) }}', tables={})
    (tmp_path / "one" / "runs.csv").write_text((tmp_path / "one" / "runs.csv").read_text().replace("0.75", "0.85"))
    assert build.make(tmp_path / "two").text.endswith("67.5")
    (tmp_path / "one" / "runs.csv").write_text((tmp_path / "one" / "runs.csv").read_text().replace("0.85", "0.95"))
    with pytest.raises(ConfigError, match="differ in two"):
        build.make_index(tmp_path)
    (tmp_path / "page.md").write_text('{{ page("one").value("last", "a") | digits(1) }}\n')
    assert build.make_index(tmp_path).text.endswith("\n72.5\n")


def test_cells_of_csv_files() -> None:
    assert [cell(text) for text in ("", "3", "-0.5", "1e-3", "nan", "0 to 2")] == [
        None,
        3,
        -0.5,
        0.001,
        "nan",
        "0 to 2",
    ]
