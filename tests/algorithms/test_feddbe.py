"""FedDBE: a step by hand, and its limits."""

from collections import OrderedDict

import numpy as np
import torch
from by_hand import COHORTS, six_clients
from tiny import HEAD, arrays_of, close, engine, equal, play, split_of
from torch import Tensor, nn

from fedbench.algorithms.base import FlatModel
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.feddbe import FedDBE
from fedbench.core.split import Split
from fedbench.engine.engine import Engine
from fedbench.engine.optim import SGD

SIZES = (4, 2)
LR, M, KAPPA = 0.5, 0.4, 3.0


def linear(seed: int = 0) -> nn.Module:
    """x [2] -> features [3] -> logits [2], both linear."""
    g = torch.Generator().manual_seed(seed)
    module = nn.Sequential(OrderedDict(body=nn.Linear(2, 3, bias=False), head=nn.Linear(3, 2)))
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=g)
    return module


def two_clients() -> Engine:
    g = np.random.default_rng(0)
    x, y, split = g.standard_normal((6, 2)).astype(np.float32), np.array([0, 1, 1, 0, 1, 0]), split_of(SIZES)
    return engine(
        arrays_of(x, y, 2),
        Split(split.train, split.val, split.train),
        linear(),
        SGD(lr=LR),
        columns=HEAD,
        batch_size=10,
        epochs=1,
    )


def test_feddbe_pulls_the_mean_of_features_by_hand() -> None:
    """For one full-batch step from W, of features W x, r_i = m W xbar_i and g = sum n_i r_i / n.  The term's gradient
    in W is m kappa / F (r_i - g) xbar_i^T, so the difference to kappa = 0 is -lr times its weighted mean."""
    with_pull, without = two_clients(), two_clients()
    a, b = play(with_pull, FedDBE(KAPPA, M)), play(without, FedDBE(0.0, M))
    W = linear().body.weight.detach()  # [3, 2]
    means = torch.stack([x.mean(0) for x in torch.as_tensor(with_pull.federation.inputs).split(SIZES)])  # [2, 2]
    p = torch.tensor(SIZES) / sum(SIZES)
    r = M * means @ W.T  # [2, 3]
    g = p @ r
    close(a.g, g)
    pull = M * KAPPA / 3 * torch.einsum("k,kf,kx->fx", p, r - g, means)
    moved = (with_pull.model.named(a.w)[n] - without.model.named(b.w)[n] for n in ("body.weight", "head.weight"))
    close(next(moved), -LR * pull)
    close(next(moved), torch.zeros(2, 3))
    close(a.c.whole(), b.c.whole())  # the term does not depend on c_i


class Unshifted(FedDBE):
    """FedDBE whose features are not shifted."""

    def shifted_logits(self, model: FlatModel, rows: Tensor, z: Tensor) -> Tensor:
        return model.head(rows, z)


def test_feddbe_without_pull_and_shift_is_fedavg() -> None:
    e, other = (six_clients(SGD(lr=0.1, momentum=0.9, reset="never"), epochs=2) for _ in range(2))
    a, b = play(e, Unshifted(kappa=0.0), 3, COHORTS), play(other, FedAvg(), 3, COHORTS)
    close(a.shared.take(a.w), b.w, 1e-6)
    equal(a.c.whole(), torch.zeros(6, 8))


def test_feddbe_shift_is_a_bias_of_the_head() -> None:
    """The gradient in c_i is W^T times that in the head's bias, for one step from equal weights."""
    e = two_clients()
    a = play(e, FedDBE(0.0, M), 1, [[0]])
    moved, start = e.model.named(a.w), e.model.named(e.model.init_row())
    close(a.c.whole()[0], start["head.weight"].T @ (moved["head.bias"] - start["head.bias"]))
    equal(a.c.whole()[1], torch.zeros(3))  # never sampled


class Pixelwise(nn.Module):
    """The network `linear` on every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(2, 3, 1, bias=False), nn.Conv2d(3, 2, 1)
        for name, t in linear().state_dict().items():
            self.get_parameter(name).data = t[..., None, None].clone() if t.dim() > 1 else t.clone()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_feddbe_of_masks_is_feddbe_of_their_pixels() -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(7, 2, 3, 4, generator=g), torch.randint(2, (7, 3, 4), generator=g)
    masks, pixels = (split_of([4 * n, 3 * n]) for n in (1, 12))
    of_masks, of_pixels = (
        play(
            engine(
                arrays_of(a.numpy(), b.numpy(), 2, task="segmentation" if b.dim() > 1 else "classification"),
                split,
                module,
                SGD(lr=0.5),
                columns=HEAD,
                batch_size=48,
            ),
            FedDBE(KAPPA, M),
            3,
        )
        for a, b, split, module in (
            (x, y, masks, Pixelwise()),
            (x.movedim(1, -1).reshape(-1, 2), y.flatten(), pixels, linear()),
        )
    )
    close(of_masks.w, of_pixels.w, 1e-5), close(of_masks.c.whole(), of_pixels.c.whole(), 1e-5)
