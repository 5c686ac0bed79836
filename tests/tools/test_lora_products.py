"""scripts/lora_products.py: the distance by hand, and that of a run."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import script_files
import torch
from conftest import ROOT

from fedbench.core.options import ConfigError

RUN = ["model=mlp", "model.hidden=[8]", "adapter=lora", "adapter.rank=2", "partition.num_clients=3", "rounds=2"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return script_files.load(ROOT / "scripts" / "lora_products.py")


def test_the_distance_by_hand(script: ModuleType) -> None:
    """Rank 1, weights 1/4 and 3/4, B_i A_i = (1)(1) and (2)(3): the mean product is 1/4 + 18/4 = 19/4.

    The means are A = 10/4 and B = 7/4, so B A = 70/16, and the distance is (76/16 - 70/16) / (76/16) = 6/76.
    """
    A, B = torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([[[1.0]], [[2.0]]])
    assert script.distance(A, B, torch.tensor([0.25, 0.75])) == pytest.approx(6 / 76)
    assert script.distance(A[:1].expand(2, 1, 1), B, torch.tensor([0.25, 0.75])) == pytest.approx(0)  # as under ffa


def test_a_run(script: ModuleType, tmp_path: Path) -> None:
    table = script.measure([*RUN, "sample_rate=1", "hardware.executor=vmap"])
    assert list(table["round"]) == [1, 2] and set(table["layer"]) == {"body.1"}
    assert (table["distance"] > 0).all() and (table["distance"] < 1.5).all()
    script.draw(table, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "overrides, message",
    [(RUN, "1 of 3 clients take part in a round: add sample_rate=1"), (["rounds=1"], "rounds=1 .* has no LoRA")],
)
def test_what_it_cannot_measure(script: ModuleType, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        script.measure([*overrides, "hardware.executor=vmap"])
