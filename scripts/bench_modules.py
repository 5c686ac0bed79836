"""Networks that are not models of fedbench: recurrent ones, Transformers, those of timm and torchvision.

Each is trained as its authors wrote it, by a bare loop and by the executor that hardware.executor=auto chooses.  The
flat MLP is compared with the same layers after an nn.Flatten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from bench_work import SEED, Workload, digits, images, split_of
from torch import Tensor, nn

from fedbench.data.base import Arrays
from fedbench.models.resnet import ResNet
from fedbench.nn.flat import FlatModel


class Rows(nn.Module):
    """A classifier of digits [B, 1, 8, 8], read as sequences of their eight rows.

    The head gets the last output of a recurrent layer, or the mean of the outputs of an encoder.
    """

    def __init__(self, body: nn.Module, width: int, inputs: int = 8):
        super().__init__()
        self.embed = nn.Identity() if isinstance(body, nn.RNNBase) else nn.Linear(inputs, width)
        self.body, self.head = body, nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.body(self.embed(x.flatten(1, 2)))  # recurrent layers also return their last state
        return self.head(outputs[0][:, -1] if isinstance(outputs, tuple) else outputs.mean(1))


def encoder(width: int, layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.1, batch_first=True)
    return Rows(nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), width)


def vit() -> nn.Module:
    import timm

    return timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=64, depth=4, num_heads=4
    )


def resnet18() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=10)


def layers(*first: nn.Module) -> nn.Module:
    return nn.Sequential(*first, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def scaled(flat: bool = False) -> Arrays:
    """Return the digits with pixels from 0 to 1, as images [n, 1, 8, 8], or as vectors [n, 64] if ``flat``."""
    arrays = digits()
    x = np.asarray(arrays.inputs, np.float32) / 16
    return replace(arrays, inputs=x.reshape(len(x), -1) if flat else x)


def pictures() -> Arrays:
    return images(None, 400)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Arrays], int, int]] = {
    # (function that makes the module, function that returns the data, number of clients, samples of each)
    "flat mlp": (layers, lambda: scaled(flat=True), 10, 100),
    "mlp behind Flatten": (lambda: layers(nn.Flatten()), scaled, 10, 100),
    "lstm, 64 wide": (lambda: Rows(nn.LSTM(8, 64, batch_first=True), 64), scaled, 10, 100),
    "gru, 64 wide": (lambda: Rows(nn.GRU(8, 64, batch_first=True), 64), scaled, 10, 100),
    "transformer, 64 wide, 2 layers, dropout": (lambda: encoder(64, 2), scaled, 10, 60),
    "vit of timm, 64 wide, 4 blocks": (vit, scaled, 10, 60),
    "resnet with group norm": (lambda: ResNet((1, 8, 8), 10, [16, 32], "group"), scaled, 10, 60),
    "resnet18 of torchvision": (resnet18, pictures, 4, 80),
}


class Network(Workload):
    """The workload of a network of NETWORKS.  All clients take part in each round, with batches of 10."""

    def __init__(self, name: str, rounds: int = 8):
        self.make, data, clients, samples = NETWORKS[name]
        arrays = data()
        own = np.random.default_rng(SEED).integers(0, len(arrays.targets), (clients, samples))
        super().__init__(
            name,
            arrays,
            split_of(list(own), [o[:2] for o in own]),
            [list(range(clients))] * rounds,
            {"batch_size": 10, "epochs": 1, "lr": 0.01},
            "mlp",
        )

    def module(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.make()

    def flat(self, device: torch.device | str = "cpu") -> FlatModel:
        return FlatModel(self.module(), {}, device)

    def cut(self, samples: int) -> Any:
        self.split = super().cut(samples).split
        return self
