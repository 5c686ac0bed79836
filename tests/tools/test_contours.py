"""Outlines of segmentations: predictions of each run on the same test samples, and mistakes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from fedbench.commands import main as fedbench
from fedbench.tools.contours import main, segmentations_of, select_samples, with_unique_names

SCANS = [
    "dataset=tumours",
    "dataset.n=24",
    "dataset.size=16",
    "task=segmentation",
    "model=unet",
    "model.width=2",
    "model.norm=group",
]
FEW = [*SCANS, "partition=iid", "partition.num_clients=3", "sample_rate=1.0", "rounds=1", "local.epochs=1"]
OFF = ["tracking=disabled", "hardware=cpu", "hardware.executor=vmap"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("contours")
    for name, more in {
        "avg": ["algorithm=fedavg"],
        "rod": ["algorithm=fedrod"],
        "two": ["algorithm=fedavg", "seed=1"],
    }.items():
        assert fedbench([*FEW, *OFF, *more, f"hydra.run.dir={root / name}"]) == 0
    return [root / name for name in ("avg", "rod", "two")]


def test_predictions_have_the_accuracy_of_the_run(runs: list[Path]) -> None:
    one = segmentations_of(runs[1], channel=2)
    assert one.name == "FedRoD" and one.image.shape == one.truth.shape == one.predicted.shape == (6, 16, 16)
    rows = list(csv.DictReader((runs[1] / "clients.csv").read_text().splitlines()))
    for client in range(3):
        mine = one.client == client
        assert (one.truth == one.predicted)[mine].mean() == pytest.approx(float(rows[client]["personal/accuracy"]))


def test_samples_are_of_clients_in_turn(runs: list[Path]) -> None:
    one = segmentations_of(runs[0])
    assert (
        one.client[select_samples(one, 3)].tolist() == [0, 1, 2]
        and len(select_samples(one, 5)) == 5
        and len(select_samples(one, 99)) == 6
    )
    area = (one.truth > 0).sum((1, 2))
    for at in select_samples(one, 3):
        mine = area[one.client == one.client[at]]
        assert area[at] == mine.min()  # of two, the one behind the middle


@pytest.mark.slow
def test_the_figure(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for end in ("png", "svg"):
        assert main([*map(str, runs), "--out", str(tmp_path / f"all.{end}"), "--pictures", "4"]) == 0
        assert (tmp_path / f"all.{end}").stat().st_size > 10_000
    assert "all.svg" in capsys.readouterr().out
    names = [run.name for run in with_unique_names([segmentations_of(run) for run in runs], runs)]
    assert names == ["FedAvg (avg)", "FedRoD", "FedAvg (two)"]


def test_mistakes_are_one_sentence(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, classes = tmp_path / "other", tmp_path / "classes"
    assert fedbench([*FEW, *OFF, "algorithm=fedavg", "partition.seed=7", f"hydra.run.dir={other}"]) == 0
    assert fedbench([*OFF, "rounds=1", "algorithm=fedavg", "model=logistic", f"hydra.run.dir={classes}"]) == 0
    capsys.readouterr()
    for options, message in (
        ([str(runs[0]), str(other)], "name runs with the same data set, partition and partition.seed"),
        ([str(classes)], "a run of task=classification"),
        ([str(runs[0]), "--channel", "4"], "choose a channel from 0 to 3"),
        ([str(runs[0]), "--pictures", "0"], "--pictures must be at least 1, got 0"),
        ([str(runs[0]), "--out", str(tmp_path / "a.txt")], "write a file name that ends in .png, .pdf or .svg"),
        ([str(tmp_path)], "fedbench: "),
    ):
        assert main(options) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
