"""What is taken out of a run with an adapter computes what the run measured, without fedbench's engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_adapter import Rescale, Scaled
from tiny import close
from torch import Tensor, nn

from fedbench.adapters.base import Adapter
from fedbench.adapters.bottleneck import Bottleneck
from fedbench.adapters.lora import LoRA
from fedbench.adapters.none import NoAdapter
from fedbench.adapters.parameters import Parameters
from fedbench.commands import main
from fedbench.core.options import ConfigError
from fedbench.models.vit_tiny import ViTTiny
from fedbench.tools import _export_formats, export, export_command
from fedbench.tools.export import client_state, open_run, predictions, save_peft

CLIENT, RANK, ALPHA = 7, 3, 6.0  # a product that counts twice
TINY = ["model=vit_tiny", "model.patch=2", "model.width=8", "model.heads=2", "model.depth=2"]


def vit() -> nn.Module:
    """The plain class, drawn otherwise each time."""
    return ViTTiny((1, 8, 8), 10, patch=2, width=8, depth=2, heads=2).eval()


def finished(root: Path, *words: str, method: str = "fedper") -> Path:
    quick = ["rounds=2", "tracking=disabled", "hardware.executor=vmap", f"output_dir={root}"]
    assert main([f"algorithm={method}", *words, *quick]) == 0
    return next(root.glob("*/*/*/summary.json")).parent


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(
        tmp_path_factory.mktemp("lora"), *TINY, "adapter=lora", f"adapter.rank={RANK}", f"adapter.alpha={ALPHA}"
    )


@pytest.fixture(scope="module")
def images(run_dir: Path) -> Tensor:
    """The client's test images.  # [n, 1, 8, 8]"""
    federation = open_run(run_dir).engine.federation
    x, _ = federation.gather(torch.from_numpy(federation.splits["test"][CLIENT]))
    assert isinstance(x, Tensor)
    return x


@pytest.fixture(scope="module")
def measured(run_dir: Path) -> Tensor:
    """Its logits, by the run.  # [n, 10]"""
    found = predictions(run_dir)
    return torch.from_numpy(found["logits"][found["client"] == CLIENT])


def command(*words: object) -> int:
    return export_command.main([*map(str, words)])


# -- plain PyTorch ---------------------------------------------------------------------------------------
def test_an_adapted_model_in_plain_pytorch_computes_what_the_run_measured(run_dir, images, measured):
    """The frozen backbone, which was drawn, is in the file."""
    module = vit()
    LoRA(rank=RANK, alpha=ALPHA).insert(module)
    module.load_state_dict(client_state(run_dir, CLIENT))
    close(module(images), measured, 1e-5)


def test_two_adapters_whose_outputs_are_added_are_both_in_the_file(tmp_path) -> None:
    """FedPIA's, of a client that took part: its own, and the server's as it was matched to it."""
    words = [
        "algorithm.combine=output_sum",
        "adapter=houlsby",
        "adapter.twin=true",
        "sample_rate=1",
        "optimizer.lr=0.1",
    ]
    run = finished(tmp_path, *TINY, *words, method="fedpia")
    sim, found = open_run(run), predictions(run)
    images, _ = sim.engine.federation.gather(torch.from_numpy(sim.engine.federation.splits["test"][CLIENT]))
    module = vit()
    Bottleneck(["*.attn", "*.mlp"], twin=True).insert(module)
    module.load_state_dict(client_state(run, CLIENT))
    close(module(images), torch.from_numpy(found["logits"][found["client"] == CLIENT]), 1e-5)
    network = module.get_submodule("blocks.0.mlp")
    assert (network.adapter.up.weight != network.twin.up.weight).any()


def test_a_merged_model_loads_into_the_bare_class(run_dir, images, measured, tmp_path, monkeypatch, capsys):
    assert command(run_dir, "--client", CLIENT, "--merged", "--out", tmp_path / "bare.pt") == 0
    state, module = torch.load(tmp_path / "bare.pt"), vit()
    module.load_state_dict(state)
    close(module(images), measured, 1e-5)
    assert f"bare.pt: state_dict of client {CLIENT}, {sum(t.numel() for t in state.values()):,} values" in (
        capsys.readouterr().out
    )


def test_peft_reads_the_folder(run_dir, images, measured, tmp_path, monkeypatch, capsys):
    peft, files = pytest.importorskip("peft"), pytest.importorskip("safetensors.torch")
    folder = tmp_path / "new" / "folder"
    assert command(run_dir, "--client", CLIENT, "--peft", folder) == 0
    assert f"{folder}: client {CLIENT} for peft" in capsys.readouterr().out
    module = vit()
    module.load_state_dict(files.load_file(folder / "base_model.safetensors"))
    model = peft.PeftModel.from_pretrained(module, folder).eval()
    close(model(images), measured, 1e-5)
    close(model.merge_and_unload()(images), measured, 1e-5)
    says = json.loads((folder / "adapter_config.json").read_text())
    assert (says["r"], says["lora_alpha"], says["modules_to_save"]) == (RANK, ALPHA, ["head"])


def test_what_peft_stores_is_found_where_names_end_alike(tmp_path):
    """`head` is saved, and no `ahead` is; `0` is adapted, and no `body.0` is."""
    peft, files = pytest.importorskip("peft"), pytest.importorskip("safetensors.torch")

    def made() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4), nn.Linear(4, 2))
        for old, new in (("1", "body"), ("2", "ahead"), ("3", "head")):
            model.add_module(new, model.get_submodule(old))
            delattr(model, old)
        return model

    bare, adapted = made(), made()
    adapted.load_state_dict(bare.state_dict())
    adapter = LoRA(["0"], rank=2)
    adapter.insert(adapted)
    redraw(adapted)
    learned = [n for n, p in adapted.named_parameters() if p.requires_grad]
    config, tensors = _export_formats.peft_files(adapted, bare, adapter, "adapter=lora", learned)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    files.save_file(tensors, tmp_path / "adapter_model.safetensors")
    x = torch.randn(5, 4)
    model = peft.PeftModel.from_pretrained(bare, tmp_path)
    close(model(x), adapted(x), 1e-5)
    assert not any("body" in name for name, _ in model.named_parameters() if "lora" in name)


def test_a_run_without_an_adapter_keeps_its_files(tmp_path):
    """Of its row alone; a merged one is whole, with the counters of batch norms."""
    run = finished(tmp_path, "model=resnet", "model.widths=[2,4]")
    model = open_run(run).engine.model
    kept, merged = client_state(run, CLIENT), client_state(run, CLIENT, merged=True)
    assert list(kept) == list(model.spans) and merged.keys() == model.module.state_dict().keys() > kept.keys()
    assert all(torch.equal(kept[name], merged[name]) for name in kept)
    with pytest.raises(ConfigError, match="adapter=none is not an adapter of peft"):
        save_peft(run, CLIENT, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


# -- merging ---------------------------------------------------------------------------------------------
def redraw(module: nn.Module) -> None:
    """Numbers by which adapters act."""
    generator = torch.Generator().manual_seed(1)
    for p in module.parameters():
        if p.requires_grad:
            p.data += 0.3 * torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize(
    "adapter",
    [LoRA(rank=2), LoRA(["*.qkv"]), Rescale(), Parameters(["*.bias"]), Parameters(["type:LayerNorm"]), NoAdapter()],
    ids=lambda adapter: type(adapter).__name__,
)
def test_a_merged_model_computes_the_same(adapter: Adapter) -> None:
    adapted, bare, x = vit(), vit(), torch.randn(3, 1, 8, 8)
    adapter.insert(adapted)
    redraw(adapted)
    expected = adapted(x)
    _export_formats.merge(adapted, bare, "adapter=mine")
    close(bare(x), expected, 1e-5)


class Unsure(Scaled):
    """Merges nothing by these options."""

    def merged(self) -> Any:
        return None


class Bent(Scaled):
    """Merges into a layer of another shape."""

    def merged(self) -> nn.Linear:
        return nn.Linear(2, 3)


class Grown(Rescale):
    """Puts a number beside the layers, too."""

    def insert(self, model: nn.Module) -> list[str]:
        names = super().insert(model)
        model.register_parameter("temperature", nn.Parameter(torch.ones(1)))
        return [*names, "temperature"]


def with_layer(layer: type[nn.Module]) -> Rescale:
    adapter = Rescale()
    adapter.layer = layer
    return adapter


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (
            Bottleneck(["*.attn", "*.mlp"]),
            "no plain layer computes what Behind computes at blocks.0.attn. Export",
        ),
        (
            Bottleneck(["*.mlp"], tap="input"),
            "no plain layer computes what Alongside computes at blocks.0.mlp",
        ),
        (with_layer(Unsure), "no plain layer computes what Unsure computes at blocks.0.attn.qkv"),
        (with_layer(Bent), r"blocks.0.attn.proj.bias is \[3\], but \[8\] in the model without the adapter"),
        (Grown(), r"temperature is \[1\], but missing in the model without the adapter"),
    ],
)
def test_what_cannot_be_merged_is_one_sentence(adapter: Adapter, message: str) -> None:
    adapted = vit()
    adapter.insert(adapted)
    with pytest.raises(ConfigError, match=f"adapter=mine cannot be merged into the model: .*{message}"):
        _export_formats.merge(adapted, vit(), "adapter=mine")


# -- what peft cannot hold -------------------------------------------------------------------------------
def files_of(adapter: Adapter) -> object:
    adapted = vit()
    adapter.insert(adapted)
    learned = [n for n, p in adapted.named_parameters() if p.requires_grad]
    return _export_formats.peft_files(adapted, vit(), adapter, "adapter=mine", learned)


@pytest.mark.parametrize(
    ("train", "name"),
    [("*.bias", "blocks.0.attn.qkv.base_layer.bias"), ("position", "position")],
)
def test_trained_parameters_of_adapted_modules_are_not_for_peft(train: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"adapter.train=\['{train}'\]: {name} is trained, but".replace("*", r"\*")):
        files_of(LoRA(["blocks.*"], train=[train]))


def test_modules_are_saved_whole_and_without_adapted_layers() -> None:
    assert _export_formats._modules_to_save([], ["a.weight", "a.b.weight", "ab.bias"], LoRA()) == ["a", "ab"]
    with pytest.raises(ConfigError, match=r"a\.weight is trained, but"):
        _export_formats._modules_to_save(["a.b"], ["a.weight"], LoRA())


def test_layers_of_other_kinds_are_no_lora_for_peft() -> None:
    assert LoRA().peft_config({"a": Scaled(nn.Linear(2, 3))}) is None


def test_what_was_inserted_is_told_by_its_outermost_module() -> None:
    """Its own layers may be named as those that it holds."""
    bare, adapted = vit(), vit()
    adapted.blocks[0].mlp = nn.ModuleDict({"0": nn.Identity(), "base_layer": adapted.blocks[0].mlp})
    assert list(_export_formats.adapted_layers(adapted, bare)) == ["blocks.0.mlp"]


def test_norms_that_learn_are_saved_whole() -> None:
    config, tensors = files_of(LoRA(["blocks.0.*"], train=["head.*", "blocks.1.norm1.weight"]))  # type: ignore[misc]
    assert set(config["modules_to_save"]) == {"head", "blocks.1.norm1"}
    assert {n for n in tensors if "lora" not in n} == {
        f"base_model.model.{layer}.{what}" for layer in ("head", "blocks.1.norm1") for what in ("weight", "bias")
    }


@pytest.mark.parametrize("adapter", [Bottleneck(["*.mlp"]), Rescale(), Parameters(["*.bias"]), NoAdapter()])
def test_other_adapters_are_not_for_peft(adapter: Adapter) -> None:
    with pytest.raises(
        ConfigError, match="adapter=mine is not an adapter of peft: omit --peft, or export a run of adapter=lora"
    ):
        files_of(adapter)


def test_an_adapter_that_cannot_be_merged_is_named_by_the_command(tmp_path, monkeypatch, capsys):
    run = finished(tmp_path, *TINY, "adapter=houlsby")
    module, x = vit(), torch.randn(2, 1, 8, 8)
    Bottleneck(["*.attn", "*.mlp"]).insert(module)
    module.load_state_dict(client_state(run, 0))
    assert np.isfinite(module(x).detach().numpy()).all()
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    for options, message in (
        (["--merged"], "adapter=houlsby cannot be merged"),
        (["--peft", "folder"], "adapter=houlsby is not an adapter of peft"),
    ):
        assert command(run, "--client", 0, *options) == 2
        out, error = capsys.readouterr()
        assert message in error and len(error.splitlines()) == 1 and out == ""
    assert not Path("client0.pt").exists()


def test_files_for_peft_need_safetensors(run_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ConfigError, match="--peft needs the package safetensors"):
        save_peft(run_dir, CLIENT, tmp_path / "folder")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--merged"], "--merged exports the model of one client"),
        (["--peft", "folder"], "--peft folder exports one client"),
        (["--client", "0", "--peft", "folder", "--merged"], "not allowed with argument"),
        (["--client", "0", "--peft", "folder", "--out", "x.pt"], "--out x.pt and --peft folder exclude each other"),
        (["--client", "0", "--peft", "file"], "--peft file cannot be made: File exists"),
        (["--client", "0", "--peft", ""], "--peft must name a folder"),
    ],
)
def test_contradicting_options_are_one_sentence(options, message, run_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    monkeypatch.setattr(export, "open_run", None)  # they are refused before the work
    assert command(run_dir, *options) == 2
    assert message in capsys.readouterr().err
    assert {path.name for path in Path().iterdir()} == {"file"}
