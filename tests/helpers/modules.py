"""Modules for each way of computing gradients: manual backward pass, traced graph and torch.vmap."""

import numpy as np
import torch
from tiny import all_clients, engine, mlp, ragged, seeded
from torch import Tensor, nn

from fedbench.engine.engine import Engine
from fedbench.engine.executor import Plan
from fedbench.engine.optim import SGD
from fedbench.models.fedavg_cnn import FedAvgCNN
from fedbench.models.resnet import ResNet


class Odd(nn.Module):
    """A module that cannot be traced.  One parameter is a scalar, as CLIP's temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(16)), nn.Linear(16, 3)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.temperature * self.head((x.view(x.shape[0], -1) * self.scale).exp().log1p())


class Counting(nn.Module):
    """A module with a float buffer: the number of samples that it has processed."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Flatten(), nn.Linear(16, 3)
        self.register_buffer("num_samples", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_samples += len(x)
        return self.head(self.body(x))


class Twice(nn.Module):
    """A module that applies a layer twice, so that its gradient is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(16, 16), nn.Linear(16, 3)
        self.flat, self.relu = nn.Flatten(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.inner(self.relu(self.inner(self.flat(x))))))


def hooked() -> nn.Module:
    """Return a module with a forward hook."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    module[1].register_forward_hook(lambda layer, inputs, output: 2 * output)
    return module


MODELS = {
    "linear": (mlp, (1, 4, 4)),
    "convolutions": (lambda: FedAvgCNN((1, 16, 16), 3, 8), (1, 16, 16)),
    "layer norm": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)),
        (1, 4, 4),
    ),
    "batch norm": (lambda: ResNet((1, 4, 4), 3, [4], "batch"), (1, 4, 4)),
    "group norm": (lambda: ResNet((1, 4, 4), 3, [4], "group"), (1, 4, 4)),
    "vmap only": (Odd, (1, 4, 4)),
    "shared layer": (Twice, (1, 4, 4)),
    "hooks": (hooked, (1, 4, 4)),
    "float buffer": (Counting, (1, 4, 4)),
}


def make(model: str = "layer norm", plan: str | Plan = "vmap", **options) -> Engine:
    arrays, split = ragged(shape=MODELS[model][1])
    return engine(
        arrays,
        split,
        seeded(MODELS[model][0]),
        SGD(lr=0.1, momentum=0.9, reset="never"),
        plan=plan,
        **{"eval_batch": 8, **options},
    )


def work(e: Engine) -> dict[str, torch.Tensor]:
    """Train two rounds with momentum that clients keep, and compute all results over full splits."""
    for r in range(2):
        out = all_clients(e, r).train(
            e.model.init_row(),
            who=torch.arange(6.0, device=e.device)[:, None],
            extra_grad=lambda s: 0.01 * s.state.who * s.theta,
        )
    cohort = all_clients(e, 1)
    g, f = cohort.gradient(out.theta)
    return {
        "theta": out.theta,
        "loss": out.loss,
        "who": out.who,
        "g": g,
        "f": f,
        "candidates": cohort.loss(torch.stack([out.theta, out.theta + 0.1], 1)),
        "logits": torch.cat(cohort.forward(out.theta)),
        "momentum": e.rows.all["optimizer/theta/momentum"][np.arange(6)],
    }
