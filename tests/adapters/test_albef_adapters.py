"""Adapters in ALBEF: in both towers, before and after the cross-attention to the image."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from cases import assert_same, case, run_rounds, state_of
from tiny import CPU, close, compose, equal, every_second, ragged
from torch import Tensor

from fedbench.adapters.base import Adapter
from fedbench.adapters.prompt import Prompt
from fedbench.engine.federation import Federation
from fedbench.models.albef import ALBEF
from fedbench.nn.flat import FlatModel
from fedbench.simulation import build
from fedbench.simulation.build_model import RESERVED
from fedbench.simulation.instantiate import make

TINY = ["model=albef_tiny", "model.width=8", "model.heads=2"]
NAMED = {"image": (1, 16, 16), "text": (8,)}
SITE = 74_544  # a bottleneck of 48 beside 768 numbers
# (words, numbers on ALBEF of ViT-B/16 beside the head)
TABLE = [
    ("houlsby adapter.width=48", 4 * 12 * SITE),
    ("pfeiffer adapter.width=48", 2 * 12 * SITE),
    ("parallel adapter.width=48", 2 * 12 * SITE),
    ("compacter", 4 * 12 * 2_376 + 4**3),
    ("fusion adapter.adapters=5 adapter.width=48", 2 * 12 * (1_771_008 + 5 * SITE)),
    ("lora adapter.rank=16 adapter.places=[*.query,*.value]", 2 * (12 + 12 + 6) * 16 * 2 * 768),
    ("prompt adapter.places=[optional:text,image] adapter.tap=output", 5 * 768),
]
ADAPTED = [
    "adapter=houlsby adapter.width=4",
    "adapter=pfeiffer adapter.width=4",
    "adapter=compacter adapter.width=8",
    "adapter=fusion adapter.width=4",
    "adapter=lora adapter.rank=2 adapter.places=[*.query,*.value]",
    "adapter=bias",
    "adapter=prompt adapter.places=[image] adapter.tap=output",
    "adapter=prompt adapter.places=[words] adapter.tap=output adapter.tokens=2",
]


def adapter_of(words: str) -> Adapter:
    return make(compose(["algorithm=fedavg", *words.split()]).adapter, key="adapter")


@functools.cache
def federation() -> tuple[Any, Any]:
    return ragged(sizes=(7, 21, 12, 4, 16, 9), val=(3,) * 6, shape=NAMED)


def adapted(words: str) -> FlatModel:
    cfg = compose(["algorithm=fedavg", *TINY, *words.split()])
    return build.model(cfg, Federation.build(*federation(), CPU))


def batch(n: int = 5) -> dict[str, Tensor]:
    x, _ = Federation.build(*federation(), CPU).gather(torch.arange(n))
    assert isinstance(x, dict)
    return x


@pytest.mark.parametrize("said, numbers", TABLE)
def test_numbers_on_albef_b16(said: str, numbers: int) -> None:
    with torch.device("meta"):
        shape = {"image": (3, 384, 384), "text": (40,)}
        model = make(compose(["model=albef_b16"]).model, RESERVED, key="model", input_shape=shape, num_classes=7)
        adapter_of(f"adapter={said}").insert(model)
    learns = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad and not n.startswith("head.")}
    assert sum(learns.values()) == numbers
    assert sum(p.numel() for n, p in model.named_parameters() if n[:5] != "head.") - numbers == 208_803_072


@pytest.mark.parametrize("words", ADAPTED)
def test_what_learns_acts(words: str) -> None:
    """Every parameter of the row has a gradient, but a bias of all keys; all clients at once are each one."""
    model, x = adapted(words), batch()
    rows = model.init_row() + 0.3 * torch.randn(3, model.size, generator=torch.Generator().manual_seed(0))
    rows.requires_grad_()
    many = {name: torch.stack([t, t.flip(0), t.roll(2, 0)]) for name, t in x.items()}
    logits = model.forward(rows, many)
    grad = torch.autograd.grad(logits.square().sum(), rows)[0]
    idle = [n for n, (a, b) in model.spans.items() if not bool(grad[:, a:b].any()) and not n.endswith("key.bias")]
    assert not idle and model.uses_vmap == ("compacter" in words)
    for i in range(3):
        close(logits[i], model.forward(rows[i], {name: t[i] for name, t in many.items()}), 1e-5)


@functools.cache
def played(words: str, plan: str) -> dict[str, Tensor]:
    of, (arrays, split) = case("fedper"), federation()
    return state_of(run_rounds(of.on([*TINY, *words.split(), *of.optimizer]).simulation(plan, split, arrays), 2))


@pytest.mark.parametrize("words", every_second(ADAPTED))
def test_plans_agree(words: str) -> None:
    assert_same(played(words, "loop"), played(words, "vmap"), 1e-5)


def test_prompts_by_hand() -> None:
    """Behind the image's class token, where words look; behind the text's first one, seen whatever is padding."""
    torch.manual_seed(0)
    shown, asked, bare = (ALBEF(NAMED, 3, width=8, heads=2) for _ in range(3))
    for model in (shown, asked):
        model.load_state_dict(bare.state_dict())
    Prompt(["image"], tokens=3).insert(shown)
    Prompt(["words"], tokens=2).insert(asked)
    x = batch(2)
    x["text"][0, 3:] = 0
    visible, image, words = x["text"] != 0, bare.image(x["image"]), bare.words(x["text"])

    def last(words: Tensor, visible: Tensor, image: Tensor) -> Tensor:
        words = bare.blocks[0](words, visible[:, None, None])
        return bare.blocks[1](words, visible[:, None, None], image)[:, 0]

    more = torch.cat([image[:, :1], shown.image.prompts.expand(2, -1, -1), image[:, 1:]], 1)
    close(shown.fused(x), last(words, visible, more), 1e-5)
    more = torch.cat([words[:, :1], asked.words.prompts.expand(2, -1, -1), words[:, 1:]], 1)
    close(asked.fused(x), last(more, torch.cat([torch.ones(2, 2) > 0, visible], 1), image), 1e-5)
    equal(bare.fused(x), last(words, visible, image))
