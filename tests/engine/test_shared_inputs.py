"""An input that several samples share, such as an image with nine questions, is stored once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import CPU, all_clients, engine, equal, seeded
from torch import Tensor, nn

from fedbench.core.options import ConfigError
from fedbench.core.split import Split
from fedbench.data.base import Arrays
from fedbench.data.synthetic import Synthetic
from fedbench.engine.federation import Federation
from fedbench.partition.base import build_split
from fedbench.partition.iid import IID


def asked(n: int = 90) -> tuple[Arrays, Split]:
    arrays = Synthetic("questions", n=n, num_classes=3).load()
    return arrays, build_split(arrays, IID(), 5, 0)


class Answers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.question = nn.Linear(64, 3), nn.Linear(6, 3)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.image(x["image"].flatten(1)) + self.question(x["question"].float() / 16)


def test_images_are_stored_once() -> None:
    """90 questions about 10 images need a ninth of the memory of copies, also on the device."""
    arrays, split = asked()
    copies = arrays.expanded()
    assert copies.inputs["image"].nbytes == 9 * arrays.inputs["image"].nbytes  # type: ignore
    assert arrays.nbytes == copies.nbytes - 80 * 64 * 4
    f = Federation.build(arrays, split, CPU)
    assert isinstance(f.inputs, dict) and len(f.inputs["image"]) == 10 and len(f.inputs["question"]) == 90
    assert f.input_shape == {"image": (1, 8, 8), "question": (6,)}
    assert copies.expanded() is copies and copies.shared is None


def test_each_sample_has_its_entry() -> None:
    arrays, split = asked()
    one, many = (Federation.build(a, split, CPU) for a in (arrays, arrays.expanded()))
    index = torch.tensor([[0, 8, 9], [89, 45, 0]])
    for got, wanted in zip(one.gather(index), many.gather(index)):
        if isinstance(got, dict):
            assert got.keys() == wanted.keys() and all(torch.equal(got[k], wanted[k]) for k in got)
        else:
            equal(got, wanted)
    x = one.select_clients(np.array([3])).gather(torch.tensor([89]))[0]
    assert np.array_equal(x["image"][0], arrays.inputs["image"][9])  # type: ignore


def test_results_equal_those_of_copies() -> None:
    arrays, split = asked()
    found = []
    for a in (arrays, arrays.expanded()):
        e = engine(a, split, seeded(Answers))
        rows = all_clients(e).train(e.model.init_row()).theta
        found.append((rows, torch.cat(all_clients(e).forward(rows))))
    equal(found[0][0], found[1][0])
    equal(found[0][1], found[1][1])


def test_a_single_input_can_be_shared() -> None:
    arrays, split = asked()
    image, entry = arrays.inputs["image"], arrays.shared["image"]  # type: ignore
    alone = replace(arrays, inputs=image, shared={"inputs": entry}).check()
    assert alone.input_shape == (1, 8, 8) and alone.expanded().inputs.shape == (90, 1, 8, 8)  # type: ignore
    x, _ = Federation.build(alone, split, CPU).gather(torch.arange(90))
    equal(x, torch.from_numpy(image[entry]))


def test_the_digest_depends_on_the_entries() -> None:
    arrays, _ = asked()
    other = arrays.shared["image"].copy()  # type: ignore
    other[0] = 1
    assert arrays.digest != replace(arrays, shared={"image": other}).digest != arrays.expanded().digest


@pytest.mark.parametrize(
    ("shared", "said"),
    [
        (
            {"picture": np.zeros(90, np.int64)},
            "shared has the keys picture, but only the inputs image, question are allowed",
        ),
        ({"image": np.full(90, 10)}, "must have int64 indices from 0 to 9"),
        ({"image": np.full(90, -1)}, "must have int64 indices from 0 to 9"),
        ({"image": np.zeros(90)}, "must have int64 indices"),
        ({"image": np.zeros(89, np.int64)}, "90 targets but 89 rows of image"),
        (None, "90 targets but 10 rows of image"),
    ],
)
def test_wrong_entries_are_refused(shared: dict[str, np.ndarray] | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(asked()[0], shared=shared).check()
