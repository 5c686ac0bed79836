"""Learning curves of five methods as they were: a numerical change shows here, whatever its cause.

Refresh, after a change that is meant, with  FEDBENCH_REFRESH_GOLDEN=1 pytest tests/test_golden.py  and say why in the
commit.  Losses are compared to 1e-4; an accuracy may differ by a few of the 453 test samples, which other processors'
rounding can turn.
"""

import csv
import json
import os
from pathlib import Path

import pytest
from tiny import compose

from fedbench.simulation.simulator import run

FOLDER = Path(__file__).parent / "golden"
METHODS = ("fedavg", "fedper", "ditto", "scaffold", "pgfed")
COLUMNS = ("train/loss", "personal/loss", "personal/accuracy", "global/loss", "global/accuracy")


def curve(name: str, folder: Path) -> dict[str, list[float]]:
    """Five rounds on digits, 10 clients by Dir(0.3), 4 a round."""
    momentum = 0.0 if name == "scaffold" else 0.9
    run(
        compose(
            [
                f"algorithm={name}",
                "dataset=digits",
                "partition=dirichlet",
                "partition.num_clients=10",
                "partition.alpha=0.3",
                "model=mlp",
                "model.hidden=[16]",
                "rounds=5",
                "clients_per_round=4",
                "local.epochs=1",
                "local.batch_size=10",
                "optimizer=sgd",
                "optimizer.lr=0.05",
                f"optimizer.momentum={momentum}",
                "tracking=disabled",
                "hardware.device=cpu",
                "hardware.executor=vmap",
                "checkpoint.every=0",
            ]
        ),
        folder,
    )
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return {c: [round(float(r[c]), 6) for r in rows] for c in COLUMNS if c in rows[0]}


@pytest.mark.parametrize("name", METHODS)
def test_the_curve_is_the_one_on_record(name: str, tmp_path: Path) -> None:
    found, path = curve(name, tmp_path), FOLDER / f"{name}.json"
    if os.environ.get("FEDBENCH_REFRESH_GOLDEN"):
        FOLDER.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
    golden = json.loads(path.read_text())
    assert found.keys() == golden.keys()
    for column, values in golden.items():
        assert found[column] == pytest.approx(values, abs=1e-4 if column.endswith("loss") else 5e-3), column
    assert golden["personal/loss"][-1] < golden["personal/loss"][0]
