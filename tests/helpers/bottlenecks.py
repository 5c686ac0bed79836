"""Small transformers with bottleneck adapters that do something, on ragged clients."""

from __future__ import annotations

import copy
import functools
import zlib
from typing import Any

import torch
from tiny import CPU, compose, engine_on, ragged
from torch import Tensor

from fedbench.algorithms import _alignment as alignment
from fedbench.engine.engine import Engine
from fedbench.engine.federation import Federation
from fedbench.engine.optim import SGD
from fedbench.nn.flat import FlatModel
from fedbench.simulation import build_model as build
from fedbench.testing._cases import OPTIMIZERS, Case
from fedbench.testing._cases import PAIRED as PAIRED_OVERRIDES

ADAPTERS = {
    "houlsby": ["adapter=houlsby"],
    "pfeiffer": ["adapter=pfeiffer"],
    "parallel": ["adapter=parallel"],
    "compacter": ["adapter=compacter", "adapter.n=2"],
}
TWINS = {f"{name}, twins": [*words, "adapter.twin=true"] for name, words in ADAPTERS.items()}
SMALL = ["model=vit_tiny", "model.patch=2", "model.width=8", "model.heads=2", "model.depth=2"]


@functools.cache
def federation(sizes: tuple[int, ...] = (7, 21, 12)) -> Federation:
    return Federation.build(*ragged(sizes=sizes), CPU)


def model_of(adapter: str = "houlsby", of: Federation | None = None) -> FlatModel:
    """Its up layers are drawn too, so that units differ in what they do."""
    overrides = ["algorithm=fedavg", *SMALL, *(ADAPTERS | TWINS)[adapter], "adapter.width=6"]
    model = build.model(compose(overrides), of or federation())
    g = torch.Generator().manual_seed(3)
    for name, parameter in model.module.named_parameters():
        if _is_drawn(name):
            parameter.data = 0.5 * torch.randn(parameter.shape, generator=g)

    def again(*key: Any) -> Any:
        module = copy.deepcopy(model.module)
        own = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()) if key else 3)
        for name, parameter in module.named_parameters():
            if _is_drawn(name):
                parameter.data = 0.5 * torch.randn(parameter.shape, generator=own)
        return module

    return FlatModel(model.module, {"head": ["head.*"], "adapter": ["*.adapter.*", "*.twin.*"]}, CPU, again)


def _is_drawn(name: str) -> bool:
    return ".adapter." in name or ".twin." in name


def engine(adapter: str = "houlsby", sizes: tuple[int, ...] = (7, 21, 12), **options: Any) -> Engine:
    of = federation(sizes)
    return engine_on(of, model_of(adapter, of), SGD(lr=0.1), **{"batch_size": 5, "epochs": 1, **options})


def summed(**options: Any) -> Case:
    """FedPIA with outputs that are added, as the contract suite plays a method."""
    optimizer = OPTIMIZERS[0]
    return Case("fedpia", [*PAIRED_OVERRIDES, *optimizer], optimizer, target={"combine": "output_sum", **options})


def spread(model: FlatModel, k: int, size: float = 0.3) -> Tensor:
    return model.init_row() + size * torch.randn(k, model.size, generator=torch.Generator().manual_seed(1))


def bottlenecks_of(model: FlatModel) -> list[alignment.Site]:
    return alignment.bottlenecks_of(model, model.without("head"))
