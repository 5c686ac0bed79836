"""README.md and figures have the numbers of a page's files; what does not fit together is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedbench.core.options import ConfigError
from fedbench.pages import build
from fedbench.pages.figures import as_svg, digest, make_drawing
from fedbench.pages.page import DEFAULTS, Page, read_page, write_page
from fedbench.report.display import TUNED_NOTE
from fedbench.report.drawing import SPREAD, TUNED_LEGEND, HeatMaps

pytest.importorskip("jinja2", reason="pages need jinja2: pip install jinja2")
BASE = {"part": "main", "status": "finished", "form": "full", "n": 1}
TABLE = '{{ table("n last rounds_to_target", order="-last") }}\n'
PAPER = "pgfed_table1_cifar"
CELL = {"table": PAPER, "setting": "Dir(0.3); sample 25%", "dataset": "CIFAR10", "clients": 25,
        "metric": "mean_client_test_accuracy_pct", "form": "full", "run_with": None}  # fmt: skip


def make_page(folder: Path, text: str, **about) -> Path:
    """Write a page of two methods with two seeds each, and of one of which only a summary of three runs is left."""
    runs, curves = [], []
    for i, (method, last) in enumerate((("a", (0.5, 0.75)), ("b", (0.25, 0.5)))):
        for seed, value in enumerate(last):
            runs.append(BASE | {"run": f"{method}{seed}", "method": method, "lam": i, "seed": seed, "last": value})
            curves += [{"run": f"{method}{seed}", "round": t, "personal/accuracy": value * t / 2} for t in (1, 2)]
    old = {"method": "old", "lam": 9, "seed": "0 to 2", "n": 3, "last": 0.9, "last_std": 0.0125}
    runs.append(BASE | old | {"rounds_to_target": 7.0, "rounds_to_target_n": 2})
    write_page(Page(folder, {**DEFAULTS, "title": "t", **about}, pd.DataFrame(runs), pd.DataFrame(curves)))
    (folder / "page.md").write_text(text)
    return folder


def text_of(folder: Path) -> str:
    return build.build_page(folder).text.removeprefix(build.MARK)


def test_runs_are_averaged_and_summaries_are_taken_as_they_are(tmp_path) -> None:
    assert text_of(make_page(tmp_path, TABLE)).splitlines() == [
        "| method | n | last | rounds to 70% |",
        "| --- | ---: | ---: | ---: |",
        "| old | 3 | 90.00 ± 1.25 | 7.0 (2 of 3) |",
        "| a | 2 | 62.50 ± 12.50 | never |",  # population std of 0.5 and 0.75
        "| b | 2 | 37.50 ± 12.50 | never |",
    ]


@pytest.mark.parametrize("call, shown", [
    ('value("last", "a") | digits(1)', "62.5"),
    ('value("last", "a", seed=1) | digits(0)', "75"),
    ('spread("last", "old") | digits(2)', "90.00 ± 1.25"),
    ('std("last", method="b") | digits(1)', "12.5"),
    ('each("last", "a")', "50.00, 75.00"),
    ('(value("last", "b") - value("last", "a")) | signed(1)', "-25.0"),
    ('paired("last", "a", "b") | digits(2)', "25.00 ± 0.00"),
    ('curve(1, "a") | digits(2)', "31.25"),
    ('curve_spread(1, "a") | digits(2)', "31.25 ± 6.25"),
    ('value("last", lam=9) | digits(1)', "90.0"),
    ('printed("PGFed") | digits(2)', "81.02"),
    ('printed_spread("PGFed") | digits(2)', "81.02 ± 0.41"),
    ('printed_spread("mine") | digits(2, none="none")', "none"),
    ('groups(order="-last") | map(attribute="name") | join(" ")', "old a b"),
])  # fmt: skip
def test_calls_of_a_template(tmp_path, call, shown) -> None:
    cells = {"printed": {"table": PAPER, "dataset": "CIFAR10", "clients": 25}}
    folder = make_page(tmp_path, "It is {{ " + call + " }}.\n", cells=cells)
    assert text_of(folder) == f"It is {shown}.\n"


@pytest.mark.parametrize("words, why", [
    ('{{ value("last", "c") | digits(1) }}', "c matches 0 groups of part main"),
    ('{{ value("last", seed=1) | digits(1) }}', "seed=1 matches 2 groups of part main"),
    ('{{ value("best", "a") | digits(1) }}', "has no number best"),
    ("{{ picture }", "page.md, line"),
    ("{% if nothing %}x{% endif %}", "'nothing' is undefined"),
    ('{{ paired("last", "a", "old") | digits(1) }}', "a and old have no seed in common"),
    ('{{ figure("empty") }}', "there is nothing to draw"),
    ('{{ figure("against") }}', "needs numbers under its key"),
    ('{{ picture("gone.png") }}', "page.json names gone.png"),
    ('{{ table("n", part="x") }}', "has no part x"),
    ('{{ paper("pgfed_table1_cifar", columns="method oars") }}', "has no column oars; there are method"),
    ('{{ csv("gone.csv") }}', "but there is no such file"),
    ('{{ table("lost") }}', "no column lost; name some of n"),
])  # fmt: skip
def test_what_the_files_do_not_have_is_refused(tmp_path, words, why) -> None:
    figures = {"empty": {"where": {"method": "old"}}, "against": {"kind": "against", "key": "method"}}
    about = {"figures": {key: value for key, value in figures.items() if key in words}}
    about |= {"pictures": {"gone.png": {"alt": "old"}}} if "gone.png" in words else {}
    folder = make_page(tmp_path, words + "\n", **about)
    (folder / "cells.csv").write_text(pd.DataFrame([CELL | FEDAVG]).to_csv(index=False))
    with pytest.raises(ConfigError, match=re.escape(why)):
        build.build_page(folder)


FEDAVG = {"method": "FedAvg", "ours": 70.0, "ours_std": 1.0, "ours_n": 3, "sigma": 1.0}


def test_a_change_of_a_file_is_found(tmp_path) -> None:
    figures = {"curves": {"kind": "curves"}, "over": {"kind": "against", "key": "lam"}}
    text = TABLE + '{{ figure("curves") }}\n{{ figure("over") }}\n'
    folder = make_page(tmp_path, text, figures=figures, labels={"main": ["method", "lam"]})
    assert sorted(path.name for path in build.write(build.build_page(folder))) == [
        "README.md",
        "curves.svg",
        "over.svg",
    ]
    assert build.differences(build.build_page(folder)) == [] and build.write(build.build_page(folder)) == []

    page = read_page(folder)
    page.runs.loc[0, "last"] = 0.51
    write_page(page)
    found = "\n".join(build.differences(build.build_page(folder)))
    assert "63.00 ± 12.00" in found and "over.svg does not show these data" in found and "curves.svg" not in found
    page.runs.loc[0, "last"], page.curves.loc[0, "personal/accuracy"] = 0.5, 0.2
    write_page(page)
    assert build.differences(build.build_page(folder)) == [f"{folder / 'curves.svg'} does not show these data"]
    (folder / "README.md").write_text((folder / "README.md").read_text().replace("62.50", "62.51"))
    assert any("62.51" in line for line in build.differences(build.build_page(folder)))


def test_a_figure_draws_its_data(tmp_path) -> None:
    """The points of a line in the SVG file are an affine image of rounds and means."""
    page = read_page(make_page(tmp_path, "", figures={"curves": {"kind": "curves"}}))
    later = page.curves.assign(round=page.curves["round"] + 3)
    later["personal/accuracy"] += 0.1 * (later["round"] == 5)
    page.curves = pd.concat([page.curves, later])
    drawing = make_drawing(page, "curves")
    svg = as_svg(drawing)
    assert svg == as_svg(drawing) and digest(drawing) in svg
    assert len(drawing.series) == 2  # of the summary there are no curves
    for i, line in enumerate(drawing.series):
        path = re.search(rf'<g id="series_{i}">\s*<path d="([^"]+)"', svg)
        assert path is not None
        points = np.array([[float(x) for x in p.split()] for p in re.findall(r"[ML] ([-\d. ]+)", path.group(1))])
        for drawn, meant in ((points[:, 0], line.x), (points[:, 1], line.y)):
            assert np.corrcoef(drawn, meant)[0, 1] ** 2 == pytest.approx(1)


@pytest.mark.parametrize("change, why", [
    (lambda folder, about: (folder / "old.png").write_text(""), "contains old.png"),
    (lambda folder, about: about.update(figures={"idle": {}}), "has idle, which page.md does not show"),
    (lambda folder, about: about.update(titel="x"), "unknown keys titel; there are title"),
    (lambda folder, about: about.update(files=["gone.json"]), "names gone.json"),
    (lambda folder, about: about.update(labels={"main": ["lost"]}), "has no column lost"),
    (lambda folder, about: (folder / "page.md").unlink(), "has no page.md"),
    (lambda folder, about: (folder / "runs.csv").write_text("a,b\n1,2,3\n"), "runs.csv is damaged"),
])  # fmt: skip
def test_what_does_not_fit_together_is_refused(tmp_path, change, why) -> None:
    folder = make_page(tmp_path, TABLE)
    build.build_page(folder)
    about = json.loads((folder / "page.json").read_text())
    change(folder, about)
    (folder / "page.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match=re.escape(why)):
        build.build_page(folder)


@pytest.mark.parametrize("row, why", [
    ({"form": "fully"}, "must be one of full, reduced, not run, got fully"),
    ({"method": "old", "last": 0.5}, "a summary of several runs beside other rows"),
    ({}, None),
])  # fmt: skip
def test_further_rows(tmp_path, row, why) -> None:
    """Rows without meaning are refused; groups without a number come last."""
    page = read_page(make_page(tmp_path, TABLE))
    page.runs = pd.concat([pd.DataFrame([BASE | {"run": "x", "method": "c", "seed": 0} | row]), page.runs])
    write_page(page)
    if why is None:
        assert [line.split(" | ")[0] for line in text_of(tmp_path).splitlines()[2:]] == ["| old", "| a", "| b", "| c"]
    else:
        with pytest.raises(ConfigError, match=re.escape(why)):
            build.build_page(tmp_path)


def test_a_curve_is_of_the_rounds_that_all_seeds_have(tmp_path) -> None:
    page = read_page(make_page(tmp_path, "", figures={"curves": {"kind": "curves"}}))
    page.curves.loc[1, "personal/accuracy"] = None  # of method a, seed 0, round 2
    a, b = make_drawing(page, "curves").series
    assert (a.x, b.x) == ([1], [1, 2])


def test_cells_of_a_printed_table(tmp_path) -> None:
    text = f'{{{{ coverage("{PAPER}") }}}}\n{{{{ ours("FedAvg", "printed") | digits(1) }}}}\n'
    folder = make_page(tmp_path, text, cells={"printed": {"table": PAPER, "dataset": "CIFAR10", "clients": 25}})
    (folder / "cells.csv").write_text(pd.DataFrame([CELL | FEDAVG]).to_csv(index=False))
    assert text_of(folder) == "83 of 84 cells are not run.\n70.0\n"
    (folder / "cells.csv").write_text(pd.DataFrame([CELL | FEDAVG | {"method": "FedAvgg"}]).to_csv(index=False))
    with pytest.raises(ConfigError, match=re.escape("has no cell ('FedAvgg'")):
        build.build_page(folder)


def test_a_csv_file_is_shown_as_it_stands(tmp_path) -> None:
    folder = make_page(tmp_path, '{{ csv("speed.csv") }}\n')
    (folder / "speed.csv").write_text('what,ratio,ratio\nloop,0.80,"1,024 (1 to 2)"\nvmap,,**3**\n')
    assert text_of(folder).splitlines() == [
        "| what | ratio | ratio |",
        "| --- | ---: | ---: |",
        "| loop | 0.80 | 1,024 (1 to 2) |",
        "| vmap |  | **3** |",
    ]


def test_the_index_names_every_page(tmp_path) -> None:
    make_page(tmp_path / "one", TABLE, summary='a: {{ value("last", "a") | digits(1) }}')
    (tmp_path / "page.md").write_text('{{ index("one") }}\n\n{{ page("one").value("last", "b") | digits(1) }}\n')
    text = build.build_page(tmp_path).text
    assert "| [one](one/README.md) | a: 62.5 | full | 2; 3 |  |" in text and text.endswith("\n37.5\n")
    make_page(tmp_path / "two", '{{ page("one").value("last", "a") | digits(1) }}')
    (tmp_path / "one" / "runs.csv").write_text((tmp_path / "one" / "runs.csv").read_text().replace("0.75", "0.85"))
    assert build.build_page(tmp_path / "two").text.endswith("67.5")  # what is stored is read again
    with pytest.raises(ConfigError, match="has the page two, which"):
        build.build_page(tmp_path)


# -- words of tables and figures ------------------------------------------------------------------------------
def make_tuned(folder: Path, seeds: int = 2, **about) -> Page:
    """PGFed, and FedBABU, which fine-tunes at the end, of some seeds and three rounds; a cell of each."""
    runs, curves, gains = [], [], []
    for method, tuned in (("pgfed", None), ("fedbabu", 1)):
        for seed in range(seeds):
            run, last = f"{method}{seed}", 0.5 + 0.1 * seed
            runs.append(BASE | {"run": run, "method": method, "lam": 1, "seed": seed, "last": last,
                                "tuned_at_end": tuned})  # fmt: skip
            curves += [{"run": run, "round": t, "personal/accuracy": last * t / 3, "mb_up": 10.0**t} for t in (1, 2, 3)]
        gain = {"part": "main", "group": method, "gain": 0.1, "gain_std": 0.01, "gain_n": 2}
        gains += [gain | {"client": client} for client in (0, 1)]
    cells = [CELL | {"method": name, "ours": 70.0, "ours_std": 1.0, "ours_n": n, "sigma": 1.0, "tuned_at_end": tuned}
             for name, n, tuned in (("PGFed", 3, None), ("FedBABU", 2, 1))]  # fmt: skip
    figures = {"curves": {}, "sent": {"over": "mb_up", "where": {"method": "pgfed"}}, "gains": {"kind": "gains"}}
    shown = {"title": "t", "labels": {"main": ["method", "lam"]}, "papers": [PAPER], "figures": figures}
    write_page(Page(folder, {**DEFAULTS, **shown, **about}, *map(pd.DataFrame, (runs, curves, cells, gains))))
    tables = ['{{ table("n last", title="t") }}\n', f'{{{{ paper("{PAPER}") }}}}\n']
    drawn = [f'{{{{ figure("{name}") }}}}' for name in about.get("figures", figures)]
    (folder / "page.md").write_text("\n".join([*tables, *drawn]) + "\n")
    return read_page(folder)


def test_tables_print_names_daggers_and_what_differs(tmp_path: Path) -> None:
    make_tuned(tmp_path)
    lines = text_of(tmp_path).splitlines()
    assert lines[:6] == [
        "**t, lam 1, n = 2**", "",
        "| method | last |", "| --- | ---: |",
        "| PGFed | 55.00 ± 5.00 |", "| FedBABU† | 55.00 ± 5.00 |",
    ]  # fmt: skip
    assert lines[7].rstrip() == TUNED_NOTE


def test_a_printed_table_has_its_dagger_and_differences_from_three_seeds_on(tmp_path: Path) -> None:
    make_tuned(tmp_path)
    rows = [line for line in text_of(tmp_path).splitlines() if line.startswith("|")]
    shown = {row.split(" | ")[0]: row.split(" | ")[4] for row in rows if row.count("|") == 7}
    assert shown["| PGFed"] != "-" and shown["| FedBABU†"] == "-"


def test_a_curve_of_a_method_tuned_at_the_end(tmp_path: Path) -> None:
    drawing = make_drawing(make_tuned(tmp_path), "curves")
    assert [(line.name, line.tuned) for line in drawing.series] == [("PGFed (n=2)", False), ("FedBABU† (n=2)", True)]
    assert (drawing.title, drawing.xlabel, drawing.ylabel) == ("lam=1", "Round", "Accuracy, mean over clients (%)")
    assert drawing.series[0].std == pytest.approx([5 / 3, 10 / 3, 5])
    svg = as_svg(drawing)
    assert TUNED_LEGEND in svg and SPREAD in svg


def test_one_seed_has_no_spread(tmp_path: Path) -> None:
    drawing = make_drawing(make_tuned(tmp_path, seeds=1), "curves")
    assert [line.std for line in drawing.series] == [None, None] and SPREAD not in as_svg(drawing)


def test_curves_over_what_was_sent(tmp_path: Path) -> None:
    page = make_tuned(tmp_path)
    drawing = make_drawing(page, "sent")
    assert drawing.series[0].x == [10, 100, 1000] and drawing.xlabel == "MB sent up, all clients together"
    page.about["figures"]["sent"]["over"] = "mb"
    with pytest.raises(ConfigError, match="must be one of round, mb_up, mb_down, train_s, got mb"):
        make_drawing(page, "sent")


def test_gains_say_their_spread_and_number(tmp_path: Path) -> None:
    drawing = make_drawing(make_tuned(tmp_path), "gains")
    assert [bars.name for bars in drawing.series] == ["PGFed (n=2)", "FedBABU (n=2)"]
    assert drawing.series[0].std == pytest.approx([1, 1])
    assert drawing.title == f"Accuracy of each client, last round (lines: {SPREAD})"
    assert drawing.ylabel == "Gain over Local (percentage points)"


def test_a_figure_against_a_label_takes_its_words(tmp_path: Path) -> None:
    page = make_tuned(tmp_path, figures={"lam": {"kind": "against", "key": "lam"}})
    drawing = make_drawing(page, "lam")
    assert drawing.xlabel == "λ" and {line.name for line in drawing.series} == {"PGFed (n=2)", "FedBABU† (n=2)"}
    page.about["figures"]["lam"]["xlabel"] = "Weight"
    assert make_drawing(page, "lam").xlabel == "Weight"


def test_heat_maps_show_a_score_by_three_labels(tmp_path: Path) -> None:
    """A panel per seed; a cell without runs is NaN, and is shown as a hyphen."""
    spec = {"kind": "heat", "rows": "method", "columns": "lam", "panels": "seed", "where": {"method": ["b", "a"]}}
    page = read_page(make_page(tmp_path, "", figures={"heat": spec}, labels={"main": ["method", "lam", "seed"]}))
    drawing = make_drawing(page, "heat")
    assert isinstance(drawing, HeatMaps)
    assert drawing.rows == ("b", "a") and drawing.columns == ("0", "1")
    assert [series.name for series in drawing.series] == ["0", "1"]
    shown = np.array([series.y for series in drawing.series])  # [panels, rows * columns]
    np.testing.assert_array_equal(shown, [[np.nan, 25, 50, np.nan], [np.nan, 50, 75, np.nan]])
    svg = as_svg(drawing)
    assert svg == as_svg(drawing) and digest(drawing) in svg
    cells = re.findall(r">(\d+|-)</text>", svg)
    assert {"25", "50", "75", "-"} <= set(cells) and cells.count("-") == 4
    page.about["figures"]["heat"]["panels"] = "method"
    with pytest.raises(ConfigError, match="several groups of runs have a, a and 0: add values"):
        make_drawing(page, "heat")
