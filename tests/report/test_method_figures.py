"""The papers' figures: matrices kept over the rounds, regressions by hand, and pictures that are drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tiny import compose

from fedbench.algorithms._finetune import FineTuned
from fedbench.algorithms.base import Algorithm
from fedbench.config.check import check
from fedbench.data._files import read_npz
from fedbench.report import drawing
from fedbench.report import method_figures as draw
from fedbench.report.figures_command import main
from fedbench.report.runs import Run
from fedbench.simulation import new_clients, simulator
from fedbench.simulation.callbacks import matrices
from fedbench.simulation.callbacks.matrices import MatrixLog

SMALL = ["hardware=cpu", "hardware.executor=vmap", "tracking=disabled", "rounds=4", "partition.num_clients=6",
         "local.epochs=1", "model=logistic"]  # fmt: skip


def run(folder: Path, *overrides: str, resume: bool = False) -> dict:
    folder.mkdir(parents=True, exist_ok=True)
    cfg = OmegaConf.create(check(compose([*SMALL, *overrides])))
    OmegaConf.save(cfg, folder / "config.yaml")
    return simulator.run(cfg, folder, resume)


# -- what is recorded ------------------------------------------------------------------------------------
class Counter(Algorithm):
    """Its matrix says how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def matrices(self) -> dict[str, torch.Tensor]:
        self.asked += 1
        return {"m": torch.full((3, 3), float(self.asked))}


def rounds_kept(tmp_path: Path, rounds: int, every: int, room: int, monkeypatch) -> list[int]:
    monkeypatch.setattr(matrices, "BUDGET", 4 * 9 * room)
    kept = MatrixLog(tmp_path, Counter(), 3, rounds, every)
    for r in range(0, rounds + 1):
        if r % every == 0 or r == rounds:
            kept.note(r)
    kept.save()
    return read_npz(tmp_path / matrices.FILE)["rounds"].tolist() if kept.active else []


@pytest.mark.parametrize(
    ("rounds", "every", "room", "expected"),
    [
        (4, 1, 100, [0, 1, 2, 3, 4]),
        (10, 3, 100, [0, 3, 6, 9, 10]),
        (100, 1, 6, [0, 25, 50, 75, 100]),
        (101, 10, 6, [0, 30, 60, 90, 101]),
        (50, 1, 2, [0, 50]),
        (50, 1, 1, []),
    ],
)
def test_as_many_rounds_as_fit_are_kept(tmp_path: Path, rounds, every, room, expected, monkeypatch) -> None:
    assert rounds_kept(tmp_path, rounds, every, room, monkeypatch) == expected


def test_large_federations_are_not_even_asked(tmp_path: Path) -> None:
    method = Counter()
    assert not MatrixLog(tmp_path, method, 100_000, 10, 1).active and method.asked == 0
    assert not MatrixLog(tmp_path, Algorithm(), 3, 10, 1).active


def test_methods_say_what_they_learned(tmp_path: Path) -> None:
    """APPLE's d starts at the clients' shares of the data; entries of PGFed's A that no cohort touched stay."""
    run(tmp_path / "apple", "algorithm=apple", "sample_rate=1.0")
    stored = read_npz(tmp_path / "apple" / matrices.FILE)
    sizes = np.array(json.loads((tmp_path / "apple" / "partition.json").read_text())["train"])
    assert stored["d"].shape == (5, 6, 6) and stored["rounds"].tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(stored["d"][0], np.broadcast_to(sizes / sizes.sum(), (6, 6)), rtol=1e-6)
    checkpoint = torch.load(tmp_path / "apple" / "checkpoint.pt", weights_only=True)
    np.testing.assert_array_equal(stored["d"][-1], checkpoint["rows"]["d"]["rows"].numpy())
    run(tmp_path / "pgfed", "algorithm=pgfed", "clients_per_round=2", "rounds=2")
    delta, _ = draw.change_in_a(Run(tmp_path / "pgfed"))
    assert 0 < (delta != 0).sum() <= 4  # two clients, and the two of the round before
    assert FineTuned(Counter(), 1, None, "end", "all").matrices()["m"].shape == (3, 3)


PIA = ("algorithm=fedpia", "model=mlp", "adapter=houlsby", "adapter.places=[body.*]", "adapter.width=4")


@pytest.mark.parametrize("method", [("algorithm=pgfed",), PIA])  # FedPIA's have a number without axes among them
def test_a_resumed_run_has_the_matrices_of_all_its_rounds(method: tuple, tmp_path: Path, monkeypatch) -> None:
    options = (*method, "checkpoint.every=2")
    run(tmp_path / "whole", *options)
    play, played = simulator.run_round, []

    def stop(sim, *rest):
        if len(played) == 3:
            raise KeyboardInterrupt
        played.append(1)
        return play(sim, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(simulator, "run_round", stop)
        run(tmp_path / "run", *options)
    assert read_npz(tmp_path / "run" / matrices.FILE)["rounds"].tolist() == [0, 1, 2]
    run(tmp_path / "run", *options, resume=True)
    a, b = (read_npz(tmp_path / name / matrices.FILE) for name in ("whole", "run"))
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


# -- regressions -----------------------------------------------------------------------------------------
def test_a_line_by_hand_and_numpys() -> None:
    line = draw.regression(np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0]))
    assert (line.slope, line.intercept, line.r) == pytest.approx((2, 0, 1)) and str(line) == "slope 2, r 1.000"
    x, y = np.random.default_rng(0).normal(size=(2, 20))
    line = draw.regression(x, y)
    assert (line.slope, line.intercept) == pytest.approx(tuple(np.polyfit(x, y, 1)))
    assert line.r == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert np.isnan(draw.regression(np.ones(3), y[:3]).slope) and np.isnan(draw.regression(x, np.ones(20)).r)


def made(folder: Path, before: np.ndarray, after: np.ndarray, sizes: list[int]) -> Run:
    np.savez(folder / matrices.FILE, rounds=np.array([0, 9]), A=np.stack([before, after]))
    (folder / "partition.json").write_text(json.dumps({"train": sizes}))
    return Run(folder)


def test_the_change_in_a_is_regressed_by_columns_and_rows(tmp_path: Path) -> None:
    """dA_ij = 2 n_j - 3 n_i: slopes 2 of the column means and -3 of the row means; a new client's size is ignored."""
    n = np.array([1.0, 4.0, 2.0])
    after = 0.5 + 2 * n[None, :] - 3 * n[:, None]
    columns, rows = draw.regressions(made(tmp_path, np.full((3, 3), 0.5), after, [1, 4, 2, 100]))
    assert (columns.slope, columns.r) == pytest.approx((2, 1)) and (rows.slope, rows.r) == pytest.approx((-3, -1))


# -- pictures --------------------------------------------------------------------------------------------
def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_the_command_draws_every_figure(tmp_path: Path, capsys) -> None:
    new = ("new_clients.count=2", "new_clients.epochs=2")
    run(tmp_path / "runs" / "a", "algorithm=pgfed", *new)
    run(tmp_path / "runs" / "b", "algorithm=apple", "sample_rate=1.0", *new)
    run(tmp_path / "runs" / "c", "algorithm=pfednet", "partition.alpha=1.0")
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "drawn"), "--rounds", "0,3"]) == 0
    found = {p.name for p in (tmp_path / "drawn").iterdir()}
    setting = "digits_dirichlet_logistic"
    own = {f"{r}_{kind}.png" for r in "abc" for kind in ("run", "labels")}
    methods = {"a_A_change.png", "b_d.png", "b_d_paths.png", "c_sdwd.png"}
    assert found == own | methods | {f"curves_{setting}_personal_accuracy.png", f"new_clients_{setting}.png"}
    assert all(is_picture(p) for p in (tmp_path / "drawn").iterdir())
    columns, rows = draw.regressions(Run(tmp_path / "runs" / "a"))
    assert f"mean of column j against n_j: {columns}; mean of row i against n_i: {rows}" in capsys.readouterr().out
    assert len(draw.adaptation(Run(tmp_path / "runs" / "b"))) == 3


def test_losses_inside_rounds_are_the_recorded_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients' means; nothing of round 0; rounds that do not follow each other are not joined."""
    first = np.array([[9.0, 9], [4, 6], [3, 4], [2, 2]])
    np.savez(tmp_path / matrices.FILE, rounds=np.array([0, 1, 2, 4]), first_loss=first, last_loss=first - 1)
    losses = draw.losses_inside_rounds(Run(tmp_path))
    assert losses.index.tolist() == [1, 2, 4] and losses.to_numpy().tolist() == [[5, 4], [3.5, 2.5], [2, 1]]
    group = SimpleNamespace(name="fedpia", runs=[Run(tmp_path)])
    seen, save = [], drawing.save
    monkeypatch.setattr(drawing, "save", lambda figure, path: save(seen.append(figure) or figure, path))
    draw.draw_inside_rounds([group], tmp_path / "inside.png")
    line = seen[0].axes[0].lines[0]
    np.testing.assert_array_equal(line.get_xdata(), [0, 1, 1, 2, np.nan, np.nan, 3, 4])
    np.testing.assert_array_equal(line.get_ydata(), [5, 4, 3.5, 2.5, np.nan, np.nan, 2, 1])
    assert line.get_label() == "fedpia (n=1), mean step -0.5" and is_picture(tmp_path / "inside.png")
    draw.draw_inside_rounds([SimpleNamespace(name="fedpia", runs=group.runs * 2)], tmp_path / "two.png")
    assert [len(figure.axes[0].collections) for figure in seen] == [0, 1]  # a band where there are several seeds


def test_a_single_run_is_drawn_into_its_folder(tmp_path: Path) -> None:
    run(tmp_path / "run", "algorithm=fedavg")
    assert main([str(tmp_path / "run")]) == 0
    assert {"run.png", "labels.png"} <= {p.name for p in (tmp_path / "run" / "figures").iterdir()}
    assert not draw.matrices(Run(tmp_path / "run")) and not len(draw.adaptation(Run(tmp_path / "run")))


def test_many_clients_and_classes_are_drawn_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    one = made(tmp_path, np.zeros((50, 50)), rng.normal(size=(50, 50)), [7] * 50)  # equal sizes: no line
    np.savez(tmp_path / matrices.FILE, **draw.matrices(one), d=rng.normal(size=(2, 50, 50)))
    assert is_picture(draw.draw_change(one, tmp_path / "a.png"))
    assert is_picture(draw.draw_relationships(one, tmp_path / "d.png"))  # labels are not recorded
    (tmp_path / "partition.json").write_text(json.dumps({"label_counts": np.ones((50, 30), int).tolist()}))
    one = Run(tmp_path)
    assert is_picture(draw.draw_relationships(one, tmp_path / "d.png"))
    assert is_picture(draw.draw_labels(one, tmp_path / "labels.png"))
    assert is_picture(draw.draw_paths(one, tmp_path / "paths.png"))


def test_the_nearest_recorded_rounds_are_shown() -> None:
    rounds = np.array([0, 10, 20, 30, 40])
    assert draw.recorded_positions(rounds, None) == [0, 2, 4]
    assert draw.recorded_positions(rounds, [1, 12, 99, 39]) == [0, 1, 4]
    assert draw.recorded_positions(np.array([0]), None) == [0]


def test_rounds_that_nobody_recorded_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beyond the last one, and where no run has relationships."""
    run(tmp_path / "plain", "algorithm=fedavg")
    assert main([str(tmp_path / "plain"), "--rounds", "0"]) == 2
    assert "recorded none: leave it out" in capsys.readouterr().err
    run(tmp_path / "apple", "algorithm=apple")
    assert main([str(tmp_path / "apple"), "--rounds", "0,999"]) == 2
    assert "--rounds 0,999: the last recorded round is" in capsys.readouterr().err
    assert not (tmp_path / "apple" / "figures").exists()


@pytest.mark.parametrize(("words", "said"), [
    (["nowhere"], "nowhere is not a folder"),
    (["."], "no runs found in"),
    ([".", "--rounds", "a"], "--rounds a must be integers >= 0"),
])  # fmt: skip
def test_mistakes_are_one_sentence(tmp_path: Path, monkeypatch, capsys, words: list[str], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_the_command_is_light_until_it_draws() -> None:
    code = "import sys, fedbench.report.figures_command; print({'torch', 'matplotlib', 'pandas'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_new_clients_file_is_the_one_that_is_read() -> None:
    assert draw.NEW_CLIENTS == new_clients.FILE and draw.MATRICES == matrices.FILE


def test_a_run_says_whether_it_was_tuned_at_the_end(tmp_path: Path) -> None:
    at_end = ("finetune.epochs=1", "finetune.when=end")
    run(tmp_path / "a", "algorithm=fedbabu", "model=mlp")
    run(tmp_path / "b", "algorithm=fedavg", *at_end)
    run(tmp_path / "c", "algorithm=fedavg", at_end[0])
    assert [Run(tmp_path / name).tuned for name in "abc"] == [True, True, False]
