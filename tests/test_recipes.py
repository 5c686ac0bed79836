"""The files of classes of one's own that docs/ shows, written into a folder as they stand: their commands run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import COHORTS, six_clients
from conftest import ROOT
from test_commands import commands
from test_docs import files
from tiny import close, deployed, play

from fedbench import commands as programs
from fedbench.algorithms.ditto import Ditto
from fedbench.algorithms.fedavg import FedAvg
from fedbench.core.split import Ragged

PAGES = [
    ROOT / "docs" / f"{name}.md"
    for name in ("own_methods", "extending", "own_data", "own_loss", "compressors", "rules", "adapters")
]
FILES = {path: source for page in PAGES for path, source in files(page.read_text()).items()}
FEWER = ["rounds=1", "local.epochs=1", "hardware.executor=vmap", "tracking=disabled"]
OWN = [
    command
    for page in PAGES
    for command in commands(page)
    if "--config-dir" in command and "fedbench report" not in command
]


@pytest.fixture(autouse=True)
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files of the page; the modules in it are forgotten afterwards."""
    for path, source in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    yield tmp_path
    for path in FILES:
        sys.modules.pop(path.removesuffix(".py"), None)


def own(module: str) -> Any:
    return __import__(module)


def test_the_pages_show_two_files_of_each_kind() -> None:
    kinds = {path.split("/")[1] for path in FILES if path.startswith("conf/")}
    kinds_of_options = {"algorithm", "dataset", "model", "partition", "task", "compression", "aggregator", "adapter"}
    assert kinds == kinds_of_options | {"attack"}
    classes = [path for path in FILES if path.startswith("my_")]
    assert len(FILES) == 2 * len(classes) == 2 * len(kinds) + 4 and len(OWN) == 12


@pytest.mark.parametrize("command", OWN)
def test_its_commands_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With one round; what `check` says of the classes is in tests/testing and in the slow run of all commands."""
    words = command.removeprefix("uv run python -m fedbench ").split()
    words = [word for word in words if word.split("=")[0] != "rounds"] + FEWER
    assert programs.main(words) == 0, capsys.readouterr().err


def test_the_method_is_its_equation() -> None:
    """At beta = 0 it is FedAvg; else it ends its first round where FedAvg does, and its second half of that step on."""
    method, e = own("my_methods").ServerMomentum, six_clients(epochs=2)
    close(play(e, method(0.0), 3, COHORTS).w, play(e, FedAvg(), 3, COHORTS).w, 1e-6)
    one, both = play(e, method(0.5), 1, COHORTS), play(e, method(0.5), 2, COHORTS)
    close(one.w, play(e, FedAvg(), 1, COHORTS).w, 1e-6)
    close(both.w, play(e, FedAvg(), 2, COHORTS).w - 0.5 * one.v, 1e-6)
    assert float(one.v.abs().max()) > 1e-3


def test_the_personalized_method_is_ditto() -> None:
    rows = []
    for method in (own("my_personal").Near, Ditto):
        e = six_clients(epochs=2)
        algorithm = play(e, method(0.5), 3, COHORTS)
        rows.append((algorithm.w, deployed(e, algorithm)))
    for shown, ditto in zip(*rows, strict=True):
        close(shown, ditto, 1e-6)


def test_the_metric_counts_the_two_most_probable_classes() -> None:
    """Samples of class 0 whose logits rank it first, second and third; the second client has none."""
    logits = torch.tensor([[3.0, 2.0, 1.0], [2.0, 3.0, 1.0], [1.0, 2.0, 3.0]])
    tally = {"logits": logits, "y": torch.zeros(3, dtype=torch.int64)}
    found = own("my_metrics").WithTop2().scores(tally, np.array([0, 3, 3]))["top2"]
    assert found[0] == pytest.approx(2 / 3) and np.isnan(found[1])


def test_the_data_are_what_the_page_says() -> None:
    arrays = own("my_data").Sites(n=800, sites=4, noise=0).load()
    angle = (
        np.arctan2(arrays.inputs[:, 1], arrays.inputs[:, 0]) - np.pi / 2 * arrays.targets - np.pi * arrays.domain / 4
    )
    assert np.allclose(np.cos(angle), 1) and arrays.num_domains == 4


def test_the_partition_is_what_the_page_says() -> None:
    [found] = own("my_partitions").Zipf(1.0).assign(np.zeros(1100, int), [np.arange(1100)], 3, np.random.RandomState(0))
    assert isinstance(found, Ragged) and found.sizes.tolist() == [600, 300, 200]
    assert sorted(found.indices) == list(range(1100))
