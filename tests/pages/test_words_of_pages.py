"""Pages say things as reports do: printed names, daggers, columns that tell something, axes in words."""

from pathlib import Path

import pytest

from fedbench.core.options import ConfigError
from fedbench.pages import build
from fedbench.pages.figures import as_svg, make_drawing
from fedbench.pages.store import KEYS, Page, read_page, write_page
from fedbench.report.drawing import SPREAD, TUNED_HERE
from fedbench.report.words import TUNED

pytest.importorskip("jinja2", reason="pages need jinja2: pip install jinja2")
BASE = {"part": "main", "status": "finished", "form": "full", "n": 1}
TABLE = "pgfed_table1_cifar"
CELL = {"table": TABLE, "setting": "Dir(0.3); sample 25%", "dataset": "CIFAR10", "clients": 25,
        "metric": "mean_client_test_accuracy_pct", "form": "full", "run_with": None}  # fmt: skip


def make_page(folder: Path, seeds: int = 2, **about) -> Page:
    """PGFed and FedBABU, which fine-tunes at the end, of some seeds and three rounds; a cell of each."""
    runs, curves, gains = [], [], []
    for method, tuned in (("pgfed", None), ("fedbabu", 1)):
        for seed in range(seeds):
            run = f"{method}{seed}"
            last = 0.5 + 0.1 * seed
            runs.append(BASE | {"run": run, "method": method, "lam": 1, "seed": seed, "last": last,
                                "tuned_at_end": tuned})  # fmt: skip
            curves += [{"run": run, "round": t, "personal/accuracy": last * t / 3, "mb_up": 10.0**t} for t in (1, 2, 3)]
        own = {"part": "main", "group": method, "gain": 0.1, "gain_std": 0.01, "gain_n": 2}
        gains += [own | {"client": client} for client in (0, 1)]
    cells = [CELL | {"method": name, "ours": 70.0, "ours_std": 1.0, "ours_n": n, "sigma": 1.0, "tuned_at_end": tuned}
             for name, n, tuned in (("PGFed", 3, None), ("FedBABU", 2, 1))]  # fmt: skip
    figures = {"curves": {}, "sent": {"over": "mb_up", "where": {"method": "pgfed"}}, "gains": {"kind": "gains"}}
    tables = {"rows": {"columns": ["n", "last"], "title": "t"}, "paper": {"kind": "paper", "paper": TABLE}}
    shown = {"labels": {"main": ["method", "lam"]}, "papers": [TABLE], "figures": figures, "tables": tables}
    page = Page(folder, {**KEYS, "title": "t", **shown} | about, runs, curves, cells, gains)
    write_page(page)
    places = [*(f'{{{{ table("{name}") }}}}\n' for name in page.about["tables"]),
              *(f'{{{{ figure("{name}") }}}}' for name in page.about["figures"])]  # fmt: skip
    (folder / "page.md").write_text("\n".join(places) + "\n")
    return read_page(folder)


def test_tables_print_names_daggers_and_what_differs(tmp_path: Path) -> None:
    make_page(tmp_path)
    lines = build.make(tmp_path).text.removeprefix(build.MARK).splitlines()
    assert lines[:6] == [
        "**t, lam 1, n = 2**", "",
        "| method | last |", "| --- | ---: |",
        "| PGFed | 55.00 ± 5.00 |", "| FedBABU† | 55.00 ± 5.00 |",
    ]  # fmt: skip
    assert lines[7].rstrip() == TUNED


def test_a_printed_table_has_its_dagger_and_differences_from_three_seeds_on(tmp_path: Path) -> None:
    make_page(tmp_path)
    rows = [line for line in build.make(tmp_path).text.splitlines() if line.startswith("|")]
    shown = {row.split(" | ")[0]: row.split(" | ")[4] for row in rows if row.count("|") == 7}
    assert shown["| PGFed"] != "-" and shown["| FedBABU†"] == "-"


def test_a_column_that_a_printed_table_does_not_have_is_refused(tmp_path: Path) -> None:
    make_page(tmp_path, tables={"paper": {"kind": "paper", "paper": TABLE, "columns": ["method", "oars"]}})
    with pytest.raises(ConfigError, match="has no column oars; there are method"):
        build.make(tmp_path)


def test_a_curve_of_a_method_tuned_at_the_end(tmp_path: Path) -> None:
    page = make_page(tmp_path)
    drawing = make_drawing(page, "curves")
    assert [(line.name, line.tuned) for line in drawing.series] == [("PGFed (n=2)", False), ("FedBABU† (n=2)", True)]
    assert (drawing.title, drawing.xlabel, drawing.ylabel) == ("lam=1", "Round", "Accuracy, mean over clients (%)")
    assert drawing.series[0].std == pytest.approx([5 / 3, 10 / 3, 5])
    svg = as_svg(drawing)
    assert TUNED_HERE in svg and SPREAD in svg


def test_one_seed_has_no_spread(tmp_path: Path) -> None:
    page = make_page(tmp_path, seeds=1)
    drawing = make_drawing(page, "curves")
    assert [line.std for line in drawing.series] == [None, None] and SPREAD not in as_svg(drawing)


def test_curves_over_what_was_sent(tmp_path: Path) -> None:
    page = make_page(tmp_path)
    drawing = make_drawing(page, "sent")
    assert drawing.series[0].x == [10, 100, 1000] and drawing.xlabel == "MB sent up, all clients together"
    page.about["figures"]["sent"]["over"] = "mb"
    with pytest.raises(ConfigError, match="over one of round, mb_up, mb_down, train_s, not mb"):
        make_drawing(page, "sent")


def test_gains_say_their_spread_and_number(tmp_path: Path) -> None:
    drawing = make_drawing(make_page(tmp_path), "gains")
    assert [bars.name for bars in drawing.series] == ["PGFed (n=2)", "FedBABU (n=2)"]
    assert drawing.series[0].std == pytest.approx([1, 1])
    assert drawing.title == f"Accuracy of each client, last round (lines: {SPREAD})"
    assert drawing.ylabel == "Gain over Local (percentage points)"


def test_a_figure_against_a_label_takes_its_words(tmp_path: Path) -> None:
    page = make_page(tmp_path, figures={"lam": {"kind": "against", "key": "lam"}}, tables={})
    drawing = make_drawing(page, "lam")
    assert drawing.xlabel == "λ" and {line.name for line in drawing.series} == {"PGFed (n=2)", "FedBABU† (n=2)"}
    page.about["figures"]["lam"]["xlabel"] = "Weight"
    assert make_drawing(page, "lam").xlabel == "Weight"
