"""FedRoD: steps by hand, its limits, and refusals."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from by_hand import COHORTS, OnlyHead, products, six_clients
from tiny import (
    HEAD,
    arrays_of,
    close,
    deployed,
    engine,
    equal,
    mlp,
    play,
    ragged,
    split_of,
)
from torch import nn

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedrod import FedRoD
from fedbench.core.options import ConfigError
from fedbench.core.split import Split
from fedbench.engine.optim import SGD


def rod_by_hand(x: np.ndarray, y: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Generic and personal head [2] after full-batch steps of size 1 from 0, for two classes and inputs [n]."""

    def softmax(z: np.ndarray) -> np.ndarray:
        e = np.exp(z - z.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    hot = np.eye(2)[y]
    h, g = np.zeros(2), np.zeros(2)
    for _ in range(steps):
        generic = softmax(x[:, None] * h + np.log(hot.mean(0))) - hot
        own = softmax(x[:, None] * h + x[:, None] * g) - hot
        h, g = h - (generic * x[:, None]).mean(0), g - (own * x[:, None]).mean(0)
    return h, g


class HeadsAlone(FedRoD):
    """Both heads by hand, on models that are all head."""

    has_base = False


@pytest.mark.parametrize("steps", [1, 3])
def test_fedrod_by_hand(steps: int) -> None:
    """Client 0: x = 1 thrice in class 0, x = 2 once in class 1.  From zero heads the generic softmax is pi =
    (3/4, 1/4), so W_0 loses mean(x) 3/4 - 3/4 = 0.1875; the personal one is (1/2, 1/2): g_0 loses 0.625 - 0.75.
    Client 1: x = 1 once, x = 2 thrice.  The server's W is the mean; a client deploys W x + g x."""
    data = [(np.array([1, 1, 1, 2.0]), np.array([0, 0, 0, 1])), (np.array([1, 2, 2, 2.0]), np.array([0, 1, 1, 1]))]
    h, g = (np.stack(v) for v in zip(*(rod_by_hand(x, y, steps) for x, y in data)))
    if steps == 1:
        np.testing.assert_allclose(h[0], [-0.1875, 0.1875])
        np.testing.assert_allclose(g[0], [0.125, -0.125])
    x, y = (np.concatenate([d[i] for d in data]) for i in (0, 1))
    split = split_of([4, 4])
    arrays = arrays_of(x.astype(np.float32)[:, None], y, 2)
    e = engine(
        arrays,
        Split(split.train, split.val, split.train),
        OnlyHead(1, 2),
        SGD(lr=1.0),
        columns=HEAD,
        batch_size=4,
        epochs=steps,
    )
    a = play(e, HeadsAlone())
    close(a.shared.take(a.global_row()), torch.from_numpy(h.mean(0)).float())
    close(a.g[np.arange(2)], torch.from_numpy(g).float())
    logits = a.predict(e.model, deployed(e, a), torch.tensor([[[2.0]], [[2.0]]]))
    close(logits[:, 0], torch.from_numpy(2 * (h.mean(0) + g)).float())


def balanced() -> tuple:
    arrays, _ = ragged()
    arrays.targets = np.arange(len(arrays.targets)) % 3
    return arrays, split_of([9, 21, 12, 3, 18, 6])


def test_fedrod_is_fedavg_where_classes_are_equally_frequent() -> None:
    e, other = (engine(*balanced(), mlp(), SGD(lr=0.1), columns=HEAD, epochs=2) for _ in range(2))
    a, b = play(e, FedRoD(), 3, COHORTS), play(other, FedAvg(), 3, COHORTS)
    close(a.shared.take(a.w), b.w, 1e-6)


def test_fedrod_personal_heads_touch_nothing_shared() -> None:
    """Other personal heads, the same u and h; and with one of zeros a client deploys the generic model."""
    e, other = six_clients(epochs=2), six_clients(epochs=2)
    a, b = play(e, FedRoD(), rounds=0), play(other, FedRoD(), rounds=0)
    b.g[np.arange(6)] = torch.linspace(-1, 1, 6 * b.personal.size).view(6, -1)
    play(e, a, 2, begin=1), play(other, b, 2, begin=1)
    equal(a.w, b.w)
    assert (a.g[np.arange(6)] != b.g[np.arange(6)]).all()
    a.g[np.arange(6)] = torch.zeros(6, a.personal.size)
    x = torch.linspace(-1, 1, 6 * 4 * 16).view(6, 4, 1, 4, 4)
    equal(a.predict(e.model, deployed(e, a), x), e.model.predict(a.w.expand(6, -1).clone(), x))


def test_fedrod_absent_classes_leave_the_generic_head_alone() -> None:
    """Client 0 has classes 0 and 1 only: its generic softmax is over these, its personal one over all three."""
    arrays, split = ragged()
    own = split.train[0]
    arrays.targets[own] = np.arange(len(own)) % 2
    e = engine(arrays, split, mlp(), SGD(lr=0.1), columns=HEAD)
    a = play(e, FedRoD(), 1, [[0]])
    init, now = (e.model.named(r) for r in (e.model.init_row(), a.w))
    equal(now["head.weight"][2], init["head.weight"][2])
    assert (now["head.weight"][:2] != init["head.weight"][:2]).any()
    mine = e.model.named(a.personal.put(a.w, a.g[np.array([0])]))["head2.weight"][0]
    assert torch.isfinite(a.w).all() and (mine[2] != init["head.weight"][2]).any()


class Pixelwise(nn.Module):
    """A linear layer of every pixel, all of it the head; weight [C, F]."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.body, self.head = nn.Identity(), nn.Conv2d(*weight.T.shape, 1)
        self.head.weight.data, self.head.bias.data = weight[..., None, None], torch.tensor([0.1, -0.2, 0.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def test_fedrod_of_masks_is_fedrod_of_their_pixels() -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(7, 2, 3, 4, generator=g), torch.randint(3, (7, 3, 4), generator=g)
    y[:4][y[:4] == 2] = 0  # client 0 has no pixel of class 2
    masks, pixels = (split_of([4 * n, 3 * n]) for n in (1, 12))
    weight = torch.randn(3, 2, generator=g)
    conv, linear = Pixelwise(weight), nn.Sequential(OrderedDict(body=nn.Identity(), head=nn.Linear(2, 3)))
    linear.head.load_state_dict(
        {name: t.flatten(1) if t.dim() > 1 else t for name, t in conv.head.state_dict().items()}
    )
    of_masks, of_pixels = (
        play(
            engine(
                arrays_of(a.numpy(), b.numpy(), 3, task="segmentation" if b.dim() > 1 else "classification"),
                split,
                module,
                SGD(lr=0.5),
                columns=HEAD,
                batch_size=48,
            ),
            HeadsAlone(),
            3,
        )
        for a, b, split, module in (
            (x, y, masks, conv),
            (x.movedim(1, -1).reshape(-1, 2), y.flatten(), pixels, linear),
        )
    )
    close(of_masks.w, of_pixels.w, 1e-6), close(of_masks.g[np.arange(2)], of_pixels.g[np.arange(2)], 1e-6)
    assert of_masks.counts[0, 2] == 0 < of_masks.counts[1, 2]


def test_fedrod_refuses_what_has_no_class_counts_or_linear_head() -> None:
    with pytest.raises(ConfigError, match="needs one class per sample or pixel, not task=squares"):
        play(products([1, 2], SGD(lr=0.1)), FedRoD())
    deep = mlp()
    deep.head = nn.Sequential(nn.Linear(8, 3))
    with pytest.raises(ConfigError, match="named head must be a linear layer"):
        play(engine(*ragged(), deep, columns=HEAD), FedRoD())
