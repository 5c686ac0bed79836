"""gpt_tiny: GPT-2 of transformers with the same weights, its initialization, causality, and methods on it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from cases import METHODS_BY_SPEED
from language import VOCAB as SMALL_VOCAB
from language import LanguageCase
from tiny import close, compose, seeded
from torch import Tensor, nn

from fedbench.core.options import ConfigError
from fedbench.models.gpt_tiny import GPTTiny
from fedbench.nn.flat import FlatModel
from fedbench.simulation import build, evaluate
from fedbench.testing import algorithm
from fedbench.testing._cases import run_rounds

LENGTH, VOCAB = 7, 11
SMALL = ["model=gpt_tiny", "model.width=8", "model.heads=2", "model.depth=1"]


def small(**options: Any) -> GPTTiny:
    return seeded(lambda: GPTTiny({"text": (LENGTH,)}, VOCAB, width=12, depth=3, heads=2, **options)).eval()


def tokens(rows: int = 4) -> Tensor:
    return torch.randint(VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(0))


def in_gpt2(ours: GPTTiny) -> dict[str, Tensor]:
    """The parameters of gpt_tiny under the names and in the shapes of transformers' GPT-2."""
    inner = {"norm1": "ln_1", "norm2": "ln_2", "attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj"}
    inner |= {"mlp.0": "mlp.c_fc", "mlp.2": "mlp.c_proj"}
    state = {"lm_head.weight": ours.head.weight, "transformer.wte.weight": ours.head.weight}
    state |= {"transformer.wpe.weight": ours.position}
    state |= {f"transformer.ln_f.{kind}": getattr(ours.norm, kind) for kind in ("weight", "bias")}
    for i, block in enumerate(ours.blocks):
        for name, theirs in inner.items():
            layer: Any = block.get_submodule(name)
            is_linear = isinstance(layer, nn.Linear)
            state[f"transformer.h.{i}.{theirs}.weight"] = layer.weight.t() if is_linear else layer.weight
            state[f"transformer.h.{i}.{theirs}.bias"] = layer.bias
    return state


def test_it_is_gpt2() -> None:
    """Logits, and gradients of a loss, of transformers' GPT2LMHeadModel with the same weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=12, n_layer=3, n_head=2, attn_implementation="eager"
    )
    theirs, ours = transformers.GPT2LMHeadModel(config).eval(), small()
    with torch.no_grad():
        for parameter in ours.parameters():  # no bias is 0, and no scale is 1
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    result = theirs.load_state_dict(in_gpt2(ours), strict=False)
    assert not result.unexpected_keys and not result.missing_keys
    x = tokens()
    logits = ours({"text": x})
    expected = theirs(input_ids=x).logits
    close(logits.detach(), expected.detach(), 1e-5)
    expected.logsumexp(-1).sum().backward()
    logits.logsumexp(-1).sum().backward()
    tied = theirs.get_parameter("lm_head.weight").grad
    assert tied is not None and ours.head.weight.grad is not None
    close(ours.head.weight.grad, tied, 1e-4)
    close(ours.position.grad, theirs.get_parameter("transformer.wpe.weight").grad, 1e-4)


def test_a_position_sees_no_later_token() -> None:
    x, module = tokens(1), small()
    for i in range(LENGTH):
        other = x.clone()
        other[0, i] = (other[0, i] + 1) % VOCAB
        same = torch.isclose(module({"text": other}), module({"text": x})).all(-1)[0]
        assert same.tolist() == [position < i for position in range(LENGTH)]


def test_sizes_and_initial_values() -> None:
    """A block has 12 width^2 + 13 width numbers; the residual layers start smaller by sqrt(2 depth)."""
    module = seeded(lambda: GPTTiny({"text": (64,)}, 80, width=64, depth=8))
    assert sum(p.numel() for p in module.parameters()) == 80 * 64 + 64 * 64 + 8 * (12 * 64**2 + 13 * 64) + 2 * 64
    block: Any = module.blocks[0]
    for weight, std in ((module.head.weight, 0.02), (block.attn.qkv.weight, 0.02), (block.attn.proj.weight, 0.005)):
        assert float(weight.detach().std()) == pytest.approx(std, rel=0.05)
    assert not block.attn.qkv.bias.any() and not block.mlp[2].bias.any()


def test_the_groups_of_columns_are_all_columns() -> None:
    cfg = compose(["model=gpt_tiny"]).model
    model = FlatModel(small(), {group: list(names) for group, names in cfg.columns.items()})
    base, head = model.columns["base"], model.columns["head"]
    assert head.size == 12 * VOCAB and base.size + head.size == model.size and (base & head).size == 0


def test_the_head_is_applied_to_the_features_of_each_token() -> None:
    model = FlatModel(small())
    rows = model.init_row() + 0.1 * torch.randn(3, model.size)
    x = {"text": torch.stack([tokens(), tokens().flip(0), tokens().flip(1)])}
    z = model.features(rows, x)
    assert z.shape == (3, 4, LENGTH, 12)
    close(model.head(rows, z).detach(), model.predict(rows, x).detach(), 1e-5)
    close(model.head(rows[1], z[1]).detach(), model.predict(rows, x)[1].detach(), 1e-5)


def test_what_it_cannot_read_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs one input, text \[T\] of tokens, but .* inputs \[1, 8, 8\]: choose"):
        GPTTiny((1, 8, 8), 10)
    with pytest.raises(ConfigError, match=r"model.heads=5 must divide model.width=12"):
        GPTTiny({"text": (4,)}, 10, width=12, heads=5)
    cfg = compose(["dataset=shakespeare", "dataset.stride=400", "partition=domain", *SMALL, "algorithm=fedavg"])
    arrays = build.data(cfg)
    with pytest.raises(ConfigError, match=r"returns \[5, 80, 80\], expected \[5, 80\] .* choose a model for this task"):
        build.engine(cfg, arrays, build.partition(cfg, arrays))
    other = compose(
        ["dataset=shakespeare_lm", "dataset.length=20", "partition=domain", "model=gru", "algorithm=fedavg"]
    )
    arrays = build.data(other)
    with pytest.raises(ConfigError, match=r"returns \[5, 80\], expected \[5, 20, 80\] for 5 samples of 80 classes"):
        build.engine(other, arrays, build.partition(other, arrays))


# -- methods ---------------------------------------------------------------------------------------------
CHECKS = (  # those of methods that do not bring their own data
    *("a_seed_repeats", "no_global_generator", "resume", "only_the_cohort_changes", "evaluation_changes_nothing"),
    *("nothing_moves_without_learning", "executor_loop", "executor_threads", "executor_pairs", "padding_is_ignored"),
    *("state_on_disk", "no_closure_over_the_cohort", "cohorts_of_one"),
)


@pytest.fixture(scope="module")
def case() -> LanguageCase:
    return LanguageCase("fedper", [*SMALL, "model.dropout=0.1"])


@pytest.mark.parametrize("check", CHECKS)
def test_a_method_keeps_its_contract(check: str, case: LanguageCase) -> None:
    """With a personal head, dropout, and momentum that is kept."""
    outcome = algorithm.SUITE.outcome(check, case)
    assert outcome.status == "passed", outcome.message


REFUSED = re.compile(
    r"needs (one class|the parameter group)|distills the classes of a sample|this model has none|a layer named"
)


@pytest.mark.parametrize("method", METHODS_BY_SPEED)
def test_every_method_trains_it_or_refuses_it_in_a_sentence(method: str) -> None:
    try:
        sim = run_rounds(LanguageCase(method, [*SMALL, "optimizer.momentum=0"]).simulation(), 2)
    except ConfigError as refused:
        assert "\n" not in str(refused)
        if method in ("fedcp", "feddbe"):
            assert "needs one vector of features per sample, and with task=next_token there is one" in str(refused)
        else:
            assert REFUSED.search(str(refused)), refused
        return
    scores = evaluate.personal(sim.algorithm, sim.engine, np.arange(6), 1, True)
    assert np.isfinite(scores["perplexity"]).all() and np.median(scores["perplexity"]) < 1.5 * SMALL_VOCAB
    assert method not in ("fedcp", "feddbe", "feddat", "fedrod")
