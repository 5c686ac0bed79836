"""Causal language models of transformers: equal logits, LoRA of attention, exports to peft, what is refused."""

from __future__ import annotations

import copy
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from language import LENGTH, VOCAB, LanguageCase, language
from tiny import CPU, all_clients, close, compose
from torch import Tensor, nn

from fedbench.adapters.lora import LoRA, LoRALinear, LoRATransposedLinear
from fedbench.commands import main
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort
from fedbench.engine.federation import Federation
from fedbench.models.hf_causal import HFCausal
from fedbench.nn.flat import FlatModel
from fedbench.testing import algorithm
from fedbench.testing._federation import engine_on
from fedbench.tools import _export_formats
from fedbench.tools.export import client_module, open_run, predictions, save_peft

pytestmark = pytest.mark.skipif(not all(map(find_spec, ("transformers", "peft"))), reason="needs transformers and peft")
SHAPE = {"text": (LENGTH,)}
LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "num_key_value_heads": 2},  # grouped queries
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2},
}
KINDS = tuple(SIZES)
ATTENTION = ["adapter=lora", "adapter.places=[attention]", "adapter.train=[]"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny random network of each kind, as save_pretrained writes it, of 96 tokens and up to 64 positions."""
    from transformers import AutoConfig, AutoModelForCausalLM

    found = {}
    for kind in KINDS:
        found[kind] = tmp_path_factory.mktemp(kind)
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, vocab_size=96, max_position_embeddings=64, **SIZES[kind])
        AutoModelForCausalLM.from_config(config).save_pretrained(found[kind])
    return found


def tokens(rows: int = 3) -> Tensor:
    return torch.randint(VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str, folders: dict[str, Path]) -> None:
    """Of the data set's tokens only; all weights are read, and nothing is random."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folders[kind]).eval()
    ours = HFCausal(SHAPE, VOCAB, weights=str(folders[kind])).eval()
    close(ours({"text": tokens()}).detach(), theirs(input_ids=tokens()).logits[..., :VOCAB].detach(), 1e-5)
    assert all(p.dtype == torch.float32 for p in ours.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_clients_at_once_are_each_one(kind: str, folders: dict[str, Path]) -> None:
    """With LoRA of the attention: only its columns are in rows, and a round gives the same rows however computed."""
    arrays, split = language((5, 3, 4), (0, 0, 0))
    rows = []
    for plan in ("loop", "vmap"):
        federation = Federation.build(arrays, split, CPU)
        federation.task.setup(federation)
        torch.manual_seed(0)
        module = HFCausal(SHAPE, VOCAB, weights=str(folders[kind]))
        added = LoRA(["attention"], rank=2, train=[]).insert(module)
        model = FlatModel(module, {"base": ["network.*"], "adapter": added})
        assert model.size == model.columns["adapter"].size == sum(model.module.get_parameter(n).numel() for n in added)
        engine = engine_on(federation, model, plan=plan, batch_size=2)
        rows.append(all_clients(engine).train(model.init_row()).theta)
        assert (rows[-1] - model.init_row()).abs().amax(1).all()
    close(rows[0], rows[1], 1e-5)


def test_attention_stands_for_its_projections(folders: dict[str, Path]) -> None:
    """llama has q, k, v and o; GPT-2 has one layer for q, k and v, and one for the output."""
    expected = {"llama": (("q_proj", "k_proj", "v_proj", "o_proj"), LoRALinear)}
    expected["gpt2"] = (("c_attn", "c_proj"), LoRATransposedLinear)
    for kind, (names, layer) in expected.items():
        module = HFCausal(SHAPE, VOCAB, weights=str(folders[kind]))
        LoRA(["attention"], train=[]).insert(module)
        adapted = [name for name, m in module.named_modules() if isinstance(m, layer)]
        assert sorted(name.rpartition(".")[2] for name in adapted) == sorted(names * 2)
        assert all(".attn." in name or ".self_attn." in name for name in adapted)
    module = HFCausal(SHAPE, VOCAB, weights=str(folders["llama"]))
    LoRA(["*.q_proj", "*.v_proj"], train=[]).insert(module)
    assert sum(isinstance(m, LoRALinear) for m in module.modules()) == 4


def test_lora_of_gpt2_by_hand_and_merged(folders: dict[str, Path]) -> None:
    """y = x W + b + 2 B A x for alpha / r = 2, and the same from one layer with the product in its weight."""
    module = HFCausal(SHAPE, VOCAB, weights=str(folders["gpt2"])).eval()
    plain: Any = module.network.transformer.h[0].attn.c_attn
    weight, bias = plain.weight.clone(), plain.bias.clone()
    bare = copy.deepcopy(module)
    LoRA(["attention"], rank=3, alpha=6.0, train=[]).insert(module)
    for p in module.parameters():
        if p.requires_grad:
            nn.init.normal_(p)
    layer: Any = module.network.transformer.h[0].attn.c_attn
    x = torch.randn(5, 16)
    close(layer(x).detach(), (x @ weight + bias + 2 * x @ layer.lora_A.weight.t() @ layer.lora_B.weight.t()).detach())
    expected = module({"text": tokens()}).detach()
    assert not torch.allclose(bare({"text": tokens()}), expected)
    _export_formats.merge(module, bare, "adapter=lora")
    close(bare({"text": tokens()}).detach(), expected, 1e-4)


CHECKS = ("resume", "executor_threads", "executor_pairs", "padding_is_ignored", "only_the_cohort_changes")


@pytest.mark.parametrize("check", CHECKS)
def test_a_method_keeps_its_contract(check: str) -> None:
    size = "{" + ",".join(f"{k}:{v}" for k, v in {**LLAMA, "num_hidden_layers": 1}.items()) + "}"
    case = LanguageCase("ditto", ["model=hf_causal", "model.name=llama", f"model.options={size}", *ATTENTION])
    outcome = algorithm.SUITE.outcome(check, case)
    assert outcome.status == "passed", outcome.message


@pytest.mark.parametrize("sync", ["flora", "fedex"])
def test_rules_that_change_frozen_weights_add_the_mean_product(sync: str) -> None:
    """GPT-2's weights are [in, out]: what a server's row and the new frozen weight stand for is the mean of B A."""
    size = "{" + ",".join(f"{k}:{v}" for k, v in SIZES["gpt2"].items()) + "}"
    words = ["model=hf_causal", "model.name=gpt2", f"model.options={size}", *ATTENTION, f"adapter.sync={sync}"]
    sim = LanguageCase("fedavg", [*words, "optimizer.momentum=0"]).simulation()
    model, name = sim.engine.model, "network.transformer.h.0.attn.c_attn"
    layer: Any = model.module.get_submodule(name)
    before = layer.base_layer.weight.detach().clone()
    uploads = model.init_row() + 0.3 * torch.randn(3, model.size, generator=torch.Generator().manual_seed(1))
    cohort, weights = Cohort(sim.engine, np.arange(3), 0), torch.tensor([0.5, 0.3, 0.2])
    cohort.broadcast(w=model.init_row())
    row = cohort.mean(uploads, weights, updates="w")

    def product(rows: Tensor) -> Tensor:
        named = model.named(rows)
        return named[f"{name}.lora_B.weight"] @ named[f"{name}.lora_A.weight"]  # [..., out, in]

    added = (layer.base_layer.weight - before).t() / layer.scale
    assert added.abs().max() > 0.01
    close(added + product(row), (weights[:, None, None] * product(uploads)).sum(0), 1e-5)


# -- runs and exports ------------------------------------------------------------------------------------
def finished(run: Path, weights: Path, *words: str) -> Path:
    data = ["dataset=shakespeare_lm", "dataset.length=12", "dataset.min_tokens=9000", "dataset.subset=0.05"]
    model = ["model=hf_causal", f"model.weights={weights}", *ATTENTION, "adapter.rank=2", "adapter.alpha=6"]
    quick = ["rounds=1", "sample_rate=1", "tracking=disabled", "hardware.executor=vmap", f"hydra.run.dir={run}"]
    assert main([*data, "partition=domain", "algorithm=local", "optimizer.lr=0.5", *model, *quick, *words]) == 0
    return run


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_adapter_in_peft_has_the_logits_of_the_run(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """On the network of the folder, by the libraries alone; another client's adapter has others."""
    import peft
    from transformers import AutoModelForCausalLM

    run = finished(tmp_path / "run", folders[kind])
    save_peft(run, 2, tmp_path / "adapter")
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["task_type"], config["base_model_name_or_path"]) == ("CAUSAL_LM", str(folders[kind]))
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folders[kind]), tmp_path / "adapter")
    assert type(adapted) is peft.PeftModelForCausalLM
    found, federation = predictions(run), open_run(run).engine.federation
    samples: Any = federation.gather(torch.from_numpy(federation.splits["test"][2]))[0]
    logits = adapted.eval()(input_ids=samples["text"]).logits[..., :80].detach().numpy()
    close(torch.from_numpy(logits), torch.from_numpy(found["logits"][found["client"] == 2]), 1e-5)
    bare = AutoModelForCausalLM.from_pretrained(folders[kind]).eval()(input_ids=samples["text"]).logits[..., :80]
    assert np.abs(logits - bare.detach().numpy()).max() > 1e-3
    merged = client_module(open_run(run), 2, merged=True)
    close(merged(samples).detach(), torch.from_numpy(logits), 1e-4)


# -- what is refused -------------------------------------------------------------------------------------
def test_what_it_cannot_read_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    def refused(words: str, shape: Any = SHAPE, classes: int = VOCAB, **options: Any) -> None:
        with pytest.raises(ConfigError, match=words) as error:
            HFCausal(shape, classes, **options)
        assert "\n" not in str(error.value)

    llama = str(folders["llama"])
    refused("needs either model.weights, a folder of transformers, or model.name")
    refused("needs either model.weights", weights=llama, name="llama")
    refused("omit model.options", weights=llama, options={"hidden_size": 3})
    refused(r"model.weights=.*llama\d+ has 96 tokens, but the data set has 97", classes=97, weights=llama)
    refused(r"reads at most 64 tokens, but dataset.length=65", {"text": (65,)}, weights=llama)
    refused(r"needs one input, text \[T\] of tokens", (1, 8, 8), weights=llama)
    refused(r"model.weights=.*gone is not a folder. Set a folder that", weights=str(tmp_path / "gone"))
    refused("is a folder without config.json", weights=str(tmp_path))
    refused("model.name=gpt7 is not a network of transformers for causal language models", name="gpt7")
    refused("model.name=llama cannot be built: .* Change model.options", name="llama", options={"hidden_size": "x"})
    (tmp_path / "config.json").write_text((folders["llama"] / "config.json").read_text())
    refused(r"model.weights=.* cannot be read: .* Set a folder that", weights=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    refused(r"model.weights=.* cannot be read: ", weights=str(tmp_path))


def test_incomplete_weights_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(folders["llama"] / "model.safetensors")
    del state["model.norm.weight"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folders["llama"] / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"lacks the weights model.norm.weight. Set a folder"):
        HFCausal(SHAPE, VOCAB, weights=str(tmp_path))


def test_an_adapter_without_a_place_is_refused(folders: dict[str, Path]) -> None:
    """The head of GPT-2 is its embedding, and is named otherwise: train must say so."""
    cfg = compose(["model=hf_causal", f"model.weights={folders['gpt2']}", "adapter=lora"])
    module = HFCausal(SHAPE, VOCAB, weights=str(folders["gpt2"]))
    with pytest.raises(ConfigError, match=r"no parameter of the model matches 'head.\*'. Remove it"):
        LoRA(list(cfg.adapter.places), train=list(cfg.adapter.train)).insert(module)
