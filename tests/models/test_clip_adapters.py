"""Adapters in the text tower of a frozen CLIP: many clients, one client and open_clip's own blocks agree."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from prompts import COLUMNS, DIM, LENGTH, NAMES, features, prompt
from tiny import CPU, all_clients, close, compose, engine_on, equal, play, seeded, split_of
from torch import Tensor

from fedbench.adapters.base import Adapter
from fedbench.algorithms import _alignment as alignment
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedpia import FedPIA
from fedbench.config.conf_tree import group_options
from fedbench.core.options import ConfigError
from fedbench.engine.federation import Federation
from fedbench.engine.optim import SGD
from fedbench.models.clip_prompt import CLIPPrompt
from fedbench.nn.batched_operators import ForwardContext
from fedbench.nn.flat import FlatModel
from fedbench.simulation import build
from fedbench.simulation.instantiate import make
from fedbench.tasks.base import task_for

ADAPTERS = {
    "lora": ["adapter.rank=3"],
    "houlsby": ["adapter.width=5"],
    "pfeiffer": ["adapter.width=5"],
    "parallel": ["adapter.width=5"],
    "fusion": ["adapter.width=5"],
    "bias": [],
    "layernorm": [],
}
REFUSED = {
    "compacter": r"the layer blocks\.\d+\.\w+ \(\w+\) cannot be computed for several clients at once",
    "prompt": r"adapter\.places=\['blocks'\]: the model has no layer 'blocks' that this adapter can adapt",
}


def clip() -> CLIPPrompt:
    return CLIPPrompt((3, 32, 32), len(NAMES), NAMES, backbone="tiny-clip", pretrained=None, context=LENGTH)


def adapter(name: str) -> Adapter:
    cfg = compose(["algorithm=fedavg", f"adapter={name}", *ADAPTERS.get(name, [])])
    return make(cfg.adapter, key="adapter")


def adapted(name: str) -> FlatModel:
    module = seeded(clip, 0)
    torch.manual_seed(1)
    new: list[str] = adapter(name).insert(module)
    return FlatModel(module, {**COLUMNS, "adapter": new}, CPU)


def rows_of(model: FlatModel, k: int = 3) -> Tensor:
    g = torch.Generator().manual_seed(1)
    return model.init_row() + 0.05 * torch.randn(k, model.size, generator=g)


def images(k: int = 3) -> Tensor:
    return F.normalize(torch.randn(k, 5, DIM, generator=torch.Generator().manual_seed(2)), dim=-1)


def test_every_option_of_the_menu_is_tried() -> None:
    assert {*ADAPTERS, *REFUSED, "none"} == set(group_options("adapter"))


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_tower_cannot_compute_is_one_sentence(name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name]):
        model = adapted(name)
        model.forward(rows_of(model), images())


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_row_holds_prompt_and_adapter(name: str) -> None:
    model = adapted(name)
    assert {"shared", "own"} < set(model.spans)
    assert all(n in ("shared", "own") or n.startswith("blocks.") for n in model.spans)
    assert model.size == model.columns["prompt"].size + model.columns["adapter"].size


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapted_tower_begins_as_the_bare_one(name: str) -> None:
    model, bare, x = adapted(name), prompt(0), images(1)[0]
    close(model.predict(model.init_row(), x), bare.predict(bare.init_row(), x), 1e-5)


@pytest.mark.parametrize("name", ADAPTERS)
def test_many_clients_are_one_by_one(name: str) -> None:
    """Logits and gradients, with every number of the row drawn, of three clients at once and of each alone."""
    model = adapted(name)
    rows, x = rows_of(model), images()

    def run(rows: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        leaf = rows.clone().requires_grad_()
        logits = model.forward(leaf, x, ForwardContext(True))
        return logits, torch.autograd.grad(logits.square().sum(), leaf)[0]

    together = run(rows, x)
    for i in range(3):
        for a, b in zip(together, run(rows[i], x[i])):
            close(a[i], b, 2e-5 * float(b.detach().abs().max()))
    gradient = together[1]
    for n, (a, b) in model.spans.items():
        if not n.endswith((".qkv.bias", ".key.bias")):  # a bias of all keys moves no attention
            assert gradient[:, a:b].abs().max() > 0, n


def test_lora_is_what_open_clips_blocks_compute_with_the_product_in_their_weights() -> None:
    model, x = adapted("lora"), images(1)[0]
    row = rows_of(model, 1)[0]
    named = model.named(row)
    m: Any = model.module
    merged = copy.deepcopy(m.clip)
    for i, block in enumerate(merged.transformer.resblocks):
        layers = {"qkv": block.attn.in_proj_weight, "attn": block.attn.out_proj.weight}
        layers |= {"mlp.0": block.mlp[0].weight, "mlp.2": block.mlp[2].weight}
        for name, weight in layers.items():
            a, b = (named[f"blocks.{i}.{name}.lora_{f}.weight"] for f in "AB")
            with torch.no_grad():
                weight += (8.0 / 3) * b @ a
    close(model.predict(row, x), logits_of(merged, m, named, x), 1e-3)


def logits_of(clip: Any, m: Any, named: dict[str, Tensor], x: Tensor) -> Tensor:
    """Those of the prompt in a row, by open_clip's text tower as it is written.  # [B, C]"""
    P, logits = m.context(named), []
    for name in NAMES:
        tokens = m.tokenize([" ".join(["X"] * m.length) + f" {name.replace('_', ' ')}."])
        words = clip.token_embedding(tokens)[0]
        z = torch.cat([words[:1], P, words[1 + m.length :]])[None] + clip.positional_embedding
        z = clip.ln_final(clip.transformer(z, attn_mask=clip.attn_mask))
        text = F.normalize(z[0, tokens.argmax()] @ clip.text_projection, dim=-1)
        logits.append(m.scale * x @ text)
    return torch.stack(logits, -1).detach()


def test_pfeiffer_reads_what_open_clips_blocks_give() -> None:
    """y + A(y) behind every residual block."""
    model, x = adapted("pfeiffer"), images(1)[0]
    row = rows_of(model, 1)[0]
    named = model.named(row)
    m: Any = model.module
    clip = copy.deepcopy(m.clip)
    for i, block in enumerate(clip.transformer.resblocks):
        A = {n: named[f"blocks.{i}.end.adapter.{n}"] for n in ("down.weight", "down.bias", "up.weight", "up.bias")}

        def behind(module: Any, given: Any, y: Tensor, A: dict[str, Tensor] = A) -> Tensor:
            hidden = torch.relu(y @ A["down.weight"].T + A["down.bias"])
            return y + hidden @ A["up.weight"].T + A["up.bias"]

        block.register_forward_hook(behind)
    close(model.predict(row, x), logits_of(clip, m, named, x), 1e-3)


def test_houlsby_stands_behind_attention_and_mlp() -> None:
    model = adapted("houlsby")
    module: Any = model.module
    kinds = {n.partition(".adapter")[0].partition(".")[2] for n, _ in module.named_parameters() if ".adapter." in n}
    assert kinds == {f"{i}.{place}" for i in range(len(module.blocks)) for place in ("attn", "mlp")}


def test_a_tap_and_a_capture_reach_the_tower() -> None:
    model, x = adapted("lora"), images()
    rows = rows_of(model)
    plain = model.predict(rows, x)
    logits, seen = model.capture(rows, x, ["blocks.0.attn"])
    close(logits, plain, 1e-5)
    assert seen["blocks.0.attn"].shape[0] == 3
    model.add_hook("blocks.0.attn", lambda y, row: y * 2)
    assert not torch.allclose(model.predict(rows, x), plain, atol=1e-3)


def test_remembered_features_follow_prompt_and_adapter() -> None:
    model, x = adapted("lora"), images()
    rows = rows_of(model)
    with torch.no_grad():
        first = model.predict(rows, x).clone()
        equal(model.predict(rows[:2], x[:2]), first[:2])
        a, _ = model.spans["blocks.0.qkv.lora_B.weight"]
        rows[1, a] += 1.0
        again = model.predict(rows, x)
    equal(again[0], first[0])
    assert not torch.allclose(again[1], first[1], atol=1e-4)


def test_runs_of_one_process_share_the_backbone_and_not_what_learns() -> None:
    bare, model = prompt(0), adapted("layernorm")
    shared: Any = bare.module
    assert not any(p.requires_grad for p in shared.clip.parameters())
    assert any(p.requires_grad for n, p in model.module.named_parameters() if n.startswith("blocks."))
    own: Any = adapted("lora").module
    weight = own.blocks[0].qkv.base_layer.weight
    assert weight.data_ptr() == shared.clip.transformer.resblocks[0].attn.in_proj_weight.data_ptr()


@pytest.mark.parametrize("plan", ["loop", "threads"])
def test_rounds_of_fedavg_under_every_plan(plan: str) -> None:
    def deployed(plan: str) -> Tensor:
        x, y = features(64)
        split = split_of((7, 12, 4, 9))
        parts = {"train": split.train, "test": split.test, "val": split.val}
        federation = Federation(x, y, parts, task_for("classification")(), len(NAMES), list(NAMES))
        e = engine_on(federation, adapted("lora"), SGD(lr=0.05), plan=plan)
        method = FedAvg()
        play(e, method, 2)
        assert not torch.equal(method.w, e.model.init_row())
        return method.w

    close(deployed(plan), deployed("vmap"), 1e-5)


@pytest.mark.parametrize("method", ["pfedmoap", "fedotp", "pfedprompt", "zero_shot"])
def test_methods_that_compute_with_prompts_alone_say_so(method: str) -> None:
    x, y = features(64)
    split = split_of((7, 12, 4, 9))
    parts = {"train": split.train, "test": split.test, "val": split.val}
    federation = Federation(x, y, parts, task_for("classification")(), len(NAMES), list(NAMES))
    algorithm = build.algorithm(compose([f"algorithm={method}", "model=clip_prompt_tiny"]))
    with pytest.raises(
        ConfigError,
        match=r"only the model's prompt, and an adapter .* set adapter=none",
    ):
        algorithm.check(federation, adapted("lora"), SGD(lr=0.05))


def test_fedpia_matches_units_by_what_they_make_of_class_names() -> None:
    """The text tower reads no sample.  Of a client's own adapter in another order every unit comes back."""
    split = split_of((7, 12, 5))
    parts = {"train": split.train, "test": split.test, "val": split.val}
    x, y = features(48)
    federation = Federation(x, y, parts, task_for("classification")(), len(NAMES), list(NAMES))
    e = engine_on(federation, adapted("houlsby"), SGD(lr=0.05))
    method = FedPIA(samples=4)
    play(e, method, 2)
    own, rng = rows_of(e.model), np.random.default_rng(0)
    turned = own[:1].clone()
    for bottleneck in method.bottlenecks:
        alignment.renumber(
            e.model, turned, bottleneck, torch.from_numpy(rng.permutation(bottleneck.hidden_units.size))[None]
        )
    rows, everybody = own[:1].expand(3, -1).clone(), all_clients(e)
    equal(method.matched(everybody, method.shared.take(turned)[0], rows), method.shared.take(rows))
    assert (method.moved_client > 0).all()
    # by hand: the mean over tokens of each class, again and again
    bottleneck = method.bottlenecks[0]
    _, captured = e.model.capture(rows[0], x[:1], [bottleneck.prefix + bottleneck.hidden_units.layer])
    of_class = captured[bottleneck.prefix + bottleneck.hidden_units.layer][0].mean(1)  # [C, m]
    close(method.unit_activations(everybody, rows)[0][0], of_class.T.repeat(1, 4), 1e-5)
