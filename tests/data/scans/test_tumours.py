"""Generated scans: what they hold, how hard they are, and the channels that clients lack."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import CPU, compose

from fedbench.core.options import ConfigError
from fedbench.data.base import Arrays
from fedbench.data.scans import tumours
from fedbench.data.scans._channels import MissingChannel
from fedbench.data.scans.tumours import MODALITIES, Tumours
from fedbench.partition.base import build_split
from fedbench.partition.iid import IID
from fedbench.simulation import build

FEW = Tumours(n=60).load()


def scans(arrays: Arrays) -> np.ndarray:
    return np.asarray(arrays.inputs)


def label_iou(predicted: np.ndarray, truth: np.ndarray) -> float:
    return float((predicted & truth).sum() / (predicted | truth).sum())


def test_shapes_and_ranges() -> None:
    x = scans(FEW)
    assert x.shape == (60, 4, 64, 64) and x.dtype == np.float32 and x.min() >= -1 and x.max() <= 1
    assert FEW.task == "segmentation" and FEW.targets.dtype == np.uint8 and set(np.unique(FEW.targets)) == {0, 1}
    assert FEW.targets.any((1, 2)).all(), "every scan has a tumour"
    outside = (x == 0).all(1)  # [n, S, S]
    assert not FEW.targets[outside].any(), "tumours are inside the brain"
    assert 0.2 < outside.mean() < 0.8


def test_a_scan_is_standardized_inside_the_brain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tumours, "CLIP", 50.0)
    x = scans(Tumours(n=3).load()) * 50
    for scan in x:
        brain = (scan != 0).any(0)
        np.testing.assert_allclose(scan[:, brain].mean(1), 0, atol=1e-4)
        np.testing.assert_allclose(scan[:, brain].std(1), 1, atol=1e-4)


def test_a_scan_depends_on_the_seed_and_its_number_alone() -> None:
    np.testing.assert_array_equal(scans(Tumours(n=3).load()), scans(FEW)[:3])
    assert Tumours(n=3).load().digest == Tumours(n=3).load().digest != Tumours(n=3, seed=1).load().digest


def test_no_constant_mask_and_no_threshold_is_good() -> None:
    truth = FEW.targets > 0
    share = truth.mean(0)
    constant = max(label_iou(np.broadcast_to(share >= t, truth.shape), truth) for t in np.unique(share)[1:])
    grey = {m: max(label_iou(scans(FEW)[:, c] > t, truth) for t in np.linspace(-0.9, 0.9, 37))
            for c, m in enumerate(MODALITIES)}  # fmt: skip
    assert constant < 0.3 and max(grey.values()) < 0.5, (constant, grey)


def test_modalities_show_tumours_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tumours, "CONTRAST", 1.0)
    drawn = [Tumours()._scan(np.random.default_rng([0, i]), None, None) for i in range(40)]
    x, parts = (np.stack(column) for column in zip(*drawn, strict=True))
    brain = (x != 0).any(1)

    def bright(channel: str, part: int) -> float:
        return float(x[:, MODALITIES.index(channel)][parts == part].mean())

    rest = {m: float(x[:, c][brain & (parts == 0)].mean()) for c, m in enumerate(MODALITIES)}
    assert bright("flair", 3) > rest["flair"] + 0.2 and bright("t2", 3) > rest["t2"]
    assert bright("t1c", 2) > rest["t1c"] + 0.2 and bright("t1", 2) < rest["t1"], "the agent shows the rim"
    assert bright("t1", 1) < rest["t1"] - 0.2


def test_sites_differ() -> None:
    arrays = Tumours(n=6, sites=3).load()
    assert arrays.domain is not None and arrays.domain.tolist() == [0, 1, 2, 0, 1, 2]
    assert not np.array_equal(scans(arrays)[0], scans(FEW)[0])


def test_the_first_clients_lack_a_channel() -> None:
    arrays = Tumours(n=40, lack="t1").load()
    split = build_split(arrays, IID(), 4, 0, test_fraction=0.2, val_fraction=0.2)
    met, x = scans(arrays.for_split(split)), scans(arrays)
    for part in (split.train, split.val, split.test):
        for i in range(4):
            own = met[part[i]]
            assert own[:, 1].any() == (i >= 2), i
            np.testing.assert_array_equal(np.delete(own, 1, 1), np.delete(x[part[i]], 1, 1))
    assert x[:, 1].any((1, 2)).all(), "the stored scans keep it"


def test_all_clients_may_lack_it() -> None:
    arrays = Tumours(n=12, lack="t2", lack_clients=None).load()
    split = build_split(arrays, IID(), 3, 0)
    assert not scans(arrays.for_split(split))[:, 3].any()


def test_more_clients_than_there_are_cannot_lack_it() -> None:
    split = build_split(FEW, IID(), 3, 0)
    with pytest.raises(ConfigError, match=r"dataset\.lack_clients=4 must be at most the number of clients, 3"):
        MissingChannel(0, 4)(FEW, split, True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lack": "t3"}, "is no modality: set it to flair, t1, t1c, t2, or null"),
        ({"size": 8}, "at least 16"),
    ],
)
def test_mistakes_are_one_sentence(options: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Tumours(**options)


def test_a_run_meets_the_channels_that_are_left() -> None:
    cfg = compose(["dataset=tumours", "dataset.n=20", "dataset.lack=flair", "partition=iid", "partition.num_clients=4"])
    arrays = build.data(cfg)
    federation = build.federation(cfg, arrays, build.partition(cfg, arrays), CPU)
    assert federation.num_clients == 4 and federation.num_classes == 2
