"""FedLC: its limits, and classes that a client does not have."""

import numpy as np
import pytest
import torch
from by_hand import LR, points
from tiny import HEAD, arrays_of, close, engine, equal, mlp, play, split_of
from torch import nn

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedlc import FedLC
from fedbench.core.options import ConfigError
from fedbench.engine.engine import Engine
from fedbench.engine.optim import SGD


def with_labels(*labels: list[int], epochs: int = 2) -> Engine:
    """Clients with these labels, of 3 classes, for training and testing."""
    y = np.array([c for own in labels for c in own])
    draw = np.random.default_rng(0)
    sizes = [len(own) for own in labels]
    split = split_of(sizes, [0] * len(sizes))
    x = draw.normal(size=(len(y), 4, 4)).astype(np.float32)
    return engine(arrays_of(x, y, 3), split, mlp(), SGD(lr=LR), columns=HEAD, epochs=epochs)


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_fedlc_with_balanced_classes_is_fedavg(tau: float) -> None:
    labels = [0, 1, 2, 0, 1, 2], [2, 1, 0]
    close(play(with_labels(*labels), FedLC(tau), 2).w, play(with_labels(*labels), FedAvg(), 2).w, 1e-6)


def test_fedlc_with_tau_0_is_fedavg_if_clients_have_all_classes() -> None:
    labels = [0, 0, 0, 1, 1, 2], [2, 1, 0, 2]
    close(play(with_labels(*labels), FedLC(0.0), 2).w, play(with_labels(*labels), FedAvg(), 2).w, 1e-6)
    assert (play(with_labels(*labels), FedLC(), 2).w - play(with_labels(*labels), FedAvg(), 2).w).abs().max() > 1e-3


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_fedlc_leaves_the_head_of_an_absent_class_alone(tau: float) -> None:
    e = with_labels([0, 2, 2, 0, 2])
    w = play(e, FedLC(tau)).w
    before, after = (e.model.named(row)["head.weight"] for row in (e.model.init_row(), w))
    equal(after[1], before[1])
    assert (after[[0, 2]] != before[[0, 2]]).any(1).all()


def test_fedlc_by_hand() -> None:
    """One step: the head's bias moves by lr (y - softmax(l - tau n^(-1/4))), with n = (3, 1, 1)."""
    e = with_labels([0, 0, 0, 1, 2], epochs=1)
    algorithm, start = play(e, FedLC(0.7)), e.model.init_row()
    x, y = e.federation.gather(torch.arange(5))
    n = torch.tensor([3.0, 1.0, 1.0])
    p = (e.model.predict(start, x) - 0.7 * n**-0.25).softmax(1)
    want = e.model.named(start)["head.bias"] + LR * (torch.eye(3)[y] - p).mean(0)
    close(e.model.named(algorithm.w)["head.bias"], want, 1e-6)


def test_fedlc_refuses_targets_that_are_no_classes() -> None:
    with pytest.raises(ConfigError, match="algorithm=fedlc needs one class per sample or pixel"):
        play(points([[1.0]]), FedLC())


def test_fedlc_of_masks_is_fedlc_of_their_pixels() -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 2, 3, 4, generator=g), torch.randint(2, (4, 3, 4), generator=g)  # no pixel of class 2
    linear, conv = nn.Linear(2, 3), nn.Conv2d(2, 3, 1)
    conv.load_state_dict({"weight": linear.weight[..., None, None], "bias": linear.bias})
    masks = engine(arrays_of(x.numpy(), y.numpy(), 3, task="segmentation"), split_of([4]), conv, SGD(lr=0.5))
    flat = arrays_of(x.movedim(1, -1).reshape(-1, 2).numpy(), y.flatten().numpy(), 3)
    pixels = engine(flat, split_of([48]), linear, SGD(lr=0.5), batch_size=48)
    close(play(masks, FedLC(), 3).w, play(pixels, FedLC(), 3).w, 1e-6)
