"""What a report says of bytes: megabytes in all, of what they would have been, and scores over them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from run_folders import BASE, make_run

from fedbench.report import drawing
from fedbench.report.command import main
from fedbench.report.figures import BYTES, draw_over_bytes, draw_sizes
from fedbench.report.runs import Run
from fedbench.report.scores import Options, megabytes
from fedbench.report.summary import Group, differing, group_runs, results, sent_table
from fedbench.report.table import Spread

ROUNDS = np.arange(1, 4)
CURVE = (0.0, 0.1, 0.2)


def with_bytes(path: Path, up: int, down: int, dense: int | None = None) -> Run:
    """A run that sent so many bytes in every round, in place of `dense` ones each way."""
    more = "" if dense is None else ",dense_down,dense_up"
    lines = [f"round,train_s,bytes_down,bytes_up{more}"]
    lines += [f"{r},1.0,{down},{up}" + ("" if dense is None else f",{dense},{dense}") for r in ROUNDS]
    (path / "costs.csv").write_text("\n".join([*lines, ""]))
    return Run(path)


def compressed(folder: Path, name: str, seed: int = 0, **options: object) -> Path:
    config = {"choices": {"compression": name}, "compression": {"_target_": name, "direction": "up", **options}}
    return make_run(folder, "fedavg", seed, CURVE, config=config)


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    plain = [with_bytes(compressed(tmp_path, "none", seed), 4_000_000, 2_000_000) for seed in (0, 1)]
    topk = [with_bytes(compressed(tmp_path, "topk", s), 400_000 + 80_000 * s, 2_000_000, 4_000_000) for s in (0, 1)]
    return [*plain, *topk]


def test_bytes_add_up(runs: list[Run]) -> None:
    assert megabytes(runs[0], BYTES["bytes"][0]).to_dict() == {1: 6, 2: 12, 3: 18}
    assert list(megabytes(runs[2], ("up",))) == pytest.approx([0.4, 0.8, 1.2])
    assert list(megabytes(runs[2], ("up",), "dense")) == [4, 8, 12]
    assert list(megabytes(runs[0], ("up",), "dense")) == [4, 8, 12]  # nothing was compressed


def test_a_table_says_what_was_sent(runs: list[Run]) -> None:
    groups, _ = group_runs(runs)
    options = Options(target=float(BASE.mean()) + 0.05)  # reached in round 2
    table = sent_table(groups, results(groups, runs, options), options)
    assert table is not None
    rows = {row["compression"]: row for row in table.rows}
    assert rows["none"]["mb_up"] == Spread(12.0, 0.0, 2, 2) and rows["none"]["part_up"].mean == 1
    assert rows["topk"]["mb_up"].mean == pytest.approx(1.32) and rows["topk"]["mb_up"].std == pytest.approx(0.12)
    assert rows["topk"]["part_up"].mean == pytest.approx(0.11) and rows["topk"]["part_down"].mean == 0.5
    assert rows["none"]["mb_to_target"].mean == 12 and rows["topk"]["mb_to_target"].mean == pytest.approx(4.88)
    plain, _ = group_runs(runs[:2])
    assert sent_table(plain, results(plain, runs[:2], options), options) is None


def test_the_report_prints_it_and_draws_scores_over_it(runs: list[Run], tmp_path: Path, capsys) -> None:
    for key in BYTES:
        assert main([str(tmp_path), "--figures", str(tmp_path / "figures"), "--against", key]) == 0
        out = capsys.readouterr().out
        (line,) = (line for line in out.split("what was sent")[1].splitlines() if "topk" in line)
        assert "1.32 ± 0.12" in line and "11.00 ± 1.00" in line and "50.00 ± 0.00" in line
        assert (tmp_path / "figures" / f"against_{key}_personal_accuracy.png").stat().st_size > 10_000
    assert len(list((tmp_path / "figures").glob("sizes_*.png"))) == 1


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list:
    """The figures that are drawn."""
    figures: list = []
    monkeypatch.setattr(drawing, "save", lambda figure, path: figures.append(figure) or path)
    return figures


def test_a_line_ends_at_what_was_sent_in_all(runs: list[Run], tmp_path: Path, drawn: list) -> None:
    draw_over_bytes(group_runs(runs)[0], Options(), "bytes_up", tmp_path / "x.png")
    (axes,) = drawn[0].axes
    assert (axes.get_xscale(), axes.get_title()) == ("log", "FedAvg")
    line = next(line for line in axes.lines if line.get_label() == "compression=topk (n=2)")
    assert line.get_xdata() == pytest.approx([0.44, 0.88, 1.32])
    assert line.get_ydata() == pytest.approx(100 * (BASE.mean() + np.array(CURVE)))


def test_sizes_over_rounds(runs: list[Run], tmp_path: Path, drawn: list) -> None:
    """Accumulated MB above, a round's share of its dense size below; what sent nothing has no line."""
    draw_sizes([group for group in group_runs(runs)[0] if "topk" in group.name], tmp_path / "x.png", "a setting")
    up, down, up_percent, down_percent = ([line.get_ydata() for line in axes.lines] for axes in drawn[0].axes)
    assert up == [pytest.approx([0.44, 0.88, 1.32])] and down == [pytest.approx([2, 4, 6])]
    assert up_percent == [pytest.approx([11.0] * 3)] and down_percent == [pytest.approx([50.0] * 3)]


def test_runs_that_sent_nothing_have_no_such_figure(tmp_path: Path, capsys) -> None:
    with_bytes(make_run(tmp_path, "local"), 0, 0)
    assert main([str(tmp_path), "--figures", str(tmp_path / "figures"), "--against", "bytes"]) == 2
    assert "--against bytes: no run has sent anything" in capsys.readouterr().err


def test_options_of_a_chosen_operator_tell_runs_apart(tmp_path: Path) -> None:
    runs = [compressed(tmp_path, "topk", share=s) for s in (0.1, 0.2)] + [compressed(tmp_path, "sign")]
    assert differing([Run(path) for path in runs]) == ["choices.compression", "compression.share"]
    groups, _ = group_runs([Run(path) for path in runs])
    options = ["compression=sign", "compression=topk share=0.1", "compression=topk share=0.2"]
    assert sorted(group.name for group in groups) == [f"FedAvg {option}" for option in options]
    assert all(isinstance(group, Group) and "compression" not in group.setting for group in groups)
