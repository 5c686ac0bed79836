"""Figures: the file that they become, lines with their spread, the last point of a method tuned at the end."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from run_folders import make_run

from fedbench.core.options import ConfigError
from fedbench.report import drawing, figures
from fedbench.report.command import main
from fedbench.report.drawing import (
    SPREAD,
    TUNED_LEGEND,
    Series,
    add_legend,
    draw_line,
    figure_files,
    line_style,
    pyplot,
    save,
)
from fedbench.report.figures_command import main as figures_main
from fedbench.report.runs import find_runs
from fedbench.report.scores import Options
from fedbench.report.summary import group_runs

pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install matplotlib")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Local, PGFed and FedBABU (which fine-tunes at the end) over three seeds."""
    folder = tmp_path / "sweep"
    for seed in range(3):
        make_run(folder, "local", seed)
        make_run(folder, "pgfed", seed, (0.0, 0.1 + 0.01 * seed, 0.05))
        make_run(folder, "fedbabu", seed, (-0.2, -0.1, 0.1 + 0.02 * seed), summary={"tuned_at_end": True})
    return folder


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list:
    """The figures that are drawn."""
    figures: list = []
    monkeypatch.setattr(drawing, "save", lambda figure, path: figures.append(figure) or path)
    return figures


@pytest.mark.parametrize(("suffix", "begin"), [(".svg", b"<?xml"), (".pdf", b"%PDF"), (".png", b"\x89PNG")])
def test_the_suffix_says_what_a_figure_is(tmp_path: Path, suffix: str, begin: bytes) -> None:
    figure = pyplot().figure()
    save(figure, tmp_path / f"mine{suffix}")
    assert (tmp_path / f"mine{suffix}").read_bytes().startswith(begin)
    pyplot().close(figure)


@pytest.mark.slow
def test_both_commands_take_a_suffix(sweep: Path, tmp_path: Path, capsys) -> None:
    assert main([str(sweep), "--figures", str(tmp_path / "figures" / "mine.pdf")]) == 0
    found = sorted((tmp_path / "figures").iterdir())
    assert [path.name.split("_")[:2] for path in found] == [["mine", "curves"], ["mine", "gains"]]
    assert all(path.suffix == ".pdf" and path.read_bytes().startswith(b"%PDF") for path in found)
    assert figures_main([str(sweep), "--out", str(tmp_path / "more" / "my.pdf")]) == 0
    assert {path.suffix for path in (tmp_path / "more").iterdir()} == {".pdf"}


def test_another_suffix_is_refused(sweep: Path, tmp_path: Path, capsys) -> None:
    for command, flag in ((main, "--figures"), (figures_main, "--out")):
        assert command([str(sweep), flag, str(tmp_path / "x.jpg")]) == 2
        said = capsys.readouterr().err
        assert (
            said.count("\n") == 1 and "the name of a figure must end in .png, .pdf, .svg; a name without suffix" in said
        )
    assert not (tmp_path / "x.jpg").exists()
    (tmp_path / "v1.2").mkdir()
    assert figure_files("--figures", tmp_path / "v1.2").path("a") == tmp_path / "v1.2" / "a.png"
    figure = pyplot().figure()
    with pytest.raises(ConfigError, match=r"end in .png, .pdf, .svg"):
        save(figure, tmp_path / "a.gif")
    pyplot().close(figure)


def test_the_last_point_of_a_method_tuned_at_the_end_stands_apart(sweep: Path, tmp_path: Path, drawn: list) -> None:
    groups, _ = group_runs(find_runs([sweep]))
    figures.draw_curves(groups, Options(), tmp_path / "x.png", "a setting")
    axes = drawn[0].axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    assert lines["FedBABU† (n=3)"].get_xdata().tolist() == [1, 2]
    assert lines["PGFed (n=3)"].get_xdata().tolist() == [1, 2, 3]
    (apart,) = (line for line in axes.lines if line.get_markerfacecolor() == "white")
    assert apart.get_xdata().tolist() == [3] and apart.get_ydata() == pytest.approx([100 * (0.65 + 0.12)])
    (bars,) = axes.containers
    ends = bars.lines[2][0].get_segments()[0][:, 1]
    assert np.diff(ends) == pytest.approx(2 * 100 * np.std([0, 0.02, 0.04]))
    words = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert words[-2:] == [SPREAD, TUNED_LEGEND] and "target (70%)" in words
    assert axes.get_xlabel() == "Round" and axes.get_ylabel() == "Accuracy, mean over clients (%)"


def test_a_single_run_has_no_spread(tmp_path: Path, drawn: list) -> None:
    make_run(tmp_path / "runs", "pgfed")
    figures.draw_curves(group_runs(find_runs([tmp_path / "runs"]))[0], Options(), tmp_path / "x.png", "")
    assert not drawn[0].axes[0].collections
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["PGFed (n=1)", "target (70%)"]


def test_gains_of_clients_have_their_spread_over_seeds(sweep: Path, tmp_path: Path, drawn: list) -> None:
    """local's last is .05 above its base: fedbabu's .1, .12, .14 give gains of .05, .07, .09."""
    runs = find_runs([sweep])
    groups, _ = group_runs(runs)
    gains = {g.name: each for g in groups if len(each := figures.client_gains(g, runs, Options()))}
    assert {name: each.shape for name, each in gains.items()} == {"FedBABU†": (3, 4), "PGFed": (3, 4)}
    np.testing.assert_allclose(gains["FedBABU†"].std(0), np.std([5, 7, 9]) / 100)
    figures.draw_gains(gains, Options(), tmp_path / "x.png", "a setting")
    titles = {axes.get_title(loc="left") for axes in drawn[0].axes}
    assert "FedBABU†: mean +7.00 (n=3)" in titles and f"(lines: {SPREAD})" in drawn[0].get_suptitle()
    assert TUNED_LEGEND in drawn[0].get_suptitle()
    segments = drawn[0].axes[[a.get_title(loc="left")[:7] for a in drawn[0].axes].index("FedBABU")].containers[0]
    assert np.diff(segments.lines[2][0].get_segments()[0][:, 1]) == pytest.approx(2 * np.std([5, 7, 9]))


def test_lines_that_coincide_are_both_seen() -> None:
    """Of two neighbours one is dashed and lies above: the other shows between its dashes."""
    for i in range(15):
        solid, dashed = sorted((line_style(i), line_style(i + 1)), key=lambda how: how["zorder"])
        assert (solid["linestyle"], dashed["linestyle"]) in (("-", "--"), (":", "-."), (":", "--"))
    assert len({tuple(line_style(i).values())[:2] for i in range(16)}) == 16


def test_names_in_a_vector_figure_can_be_searched(tmp_path: Path) -> None:
    figure, axes = pyplot().subplots()
    draw_line(axes, 0, Series("PGFed", [1, 2, 3], [1.0, 2.0, 3.0], [0.1, 0.1, 0.1]), gid="mine")
    add_legend(figure, axes)
    path = save(figure, tmp_path / "x.svg")
    texts = [node.text for node in ET.parse(path).iter() if node.tag.endswith("text")]
    assert "PGFed" in texts and SPREAD in texts
    assert re.search(r'id="mine"', path.read_text()) and drawing.SUFFIXES == (".png", ".pdf", ".svg")
