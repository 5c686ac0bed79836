"""Federations of image features, and the prompt on a random tiny CLIP that learns from them: no image is encoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tiny import CPU, engine_on, seeded, split_of
from torch import Tensor

from fedbench.core.split import Split
from fedbench.engine.engine import Engine
from fedbench.engine.federation import Federation, Inputs
from fedbench.engine.optim import SGD, Optimizer
from fedbench.models.clip_prompt import CLIPPrompt
from fedbench.nn.flat import FlatModel
from fedbench.tasks.base import task_for

SIZES = (7, 12, 4, 9)
NAMES = ("red apple", "green_pear", "plum", "fig")
COLUMNS = {"base": ["shared"], "head": ["own"], "prompt": ["shared", "own"]}
LENGTH, WIDTH, DIM = 4, 64, 64  # l, d, D
PROMPT = LENGTH * WIDTH


def features(n: int, tokens: int = 0, seed: int = 0) -> tuple[Inputs, Tensor]:
    """n image features near one of four directions [n, D], with tokens [n, M, D] around them, and labels [n]."""
    g = torch.Generator().manual_seed(seed)
    centres, y = torch.randn(len(NAMES), DIM, generator=g), torch.randint(len(NAMES), (n,), generator=g)
    image = F.normalize(centres[y] + 0.7 * torch.randn(n, DIM, generator=g), dim=-1)
    if not tokens:
        return image, y
    each = image[:, None] + 0.1 * torch.randn(n, tokens, DIM, generator=g)
    return {"image": image, "tokens": F.normalize(each, dim=-1)}, y


def prompt(seed: int = 0, **options: Any) -> FlatModel:
    def make() -> CLIPPrompt:
        return CLIPPrompt(
            (3, 32, 32), len(NAMES), NAMES, backbone="tiny-clip", pretrained=None, **{"context": LENGTH, **options}
        )

    return FlatModel(seeded(make, seed), COLUMNS, CPU, lambda j: seeded(make, 100 * seed + j + 1), seed)


def prompts(
    optimizer: Optimizer | None = None,
    sizes: Sequence[int] = SIZES,
    tokens: int = 0,
    split: Split | None = None,
    model: dict | None = None,
    data_seed: int = 0,
    **options: Any,
) -> Engine:
    """Clients with that many samples for training and as many for testing; options: of engine_on, seed among them."""
    split = split_of(sizes) if split is None else split
    x, y = features(2 * sum(sizes), tokens, data_seed)
    parts = {"train": split.train, "test": split.test, "val": split.val}
    federation = Federation(x, y, parts, task_for("classification")(), len(NAMES), list(NAMES))
    return engine_on(federation, prompt(options.get("seed", 0), **(model or {})), optimizer or SGD(lr=0.05), **options)


def sub(e: Engine, ids: Sequence[int], **options: Any) -> Engine:
    """An engine on some of the clients, numbered anew."""
    federation = e.federation.select_clients(np.asarray(ids))
    return engine_on(federation, prompt(e.seed), e.optimizer, seed=e.seed, **options)
