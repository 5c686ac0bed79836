"""model.weights of vit_tiny and gpt_tiny: the model of one run is the frozen network of another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedbench.__main__ import main
from fedbench.core.options import ConfigError
from fedbench.models.gpt_tiny import GPTTiny
from fedbench.models.vit_tiny import ViTTiny
from fedbench.tools.export import client_state

VIT = ["model=vit_tiny", "model.patch=4", "model.width=8", "model.heads=2", "model.depth=1"]
GPT = ["model=gpt_tiny", "model.width=8", "model.heads=2", "model.depth=1", "dataset=shakespeare_lm"]
GPT += ["partition=domain", "dataset.length=8", "dataset.subset=0.02"]
RUN = ["algorithm=fedavg", "rounds=1", "clients_per_round=2", "tracking=disabled", "hardware.executor=vmap"]


def vit(num_classes: int, **options: Any) -> ViTTiny:
    return ViTTiny((1, 8, 8), num_classes, patch=4, width=8, heads=2, depth=1, **options)


def gpt(**options: Any) -> GPTTiny:
    return GPTTiny({"text": (8,)}, 80, width=8, heads=2, depth=1, **options)


def test_vit_tiny_reads_all_but_the_head(tmp_path: Path) -> None:
    torch.manual_seed(0)
    stored = vit(10).state_dict()
    torch.save(stored, tmp_path / "vit.pt")
    loaded = vit(3, weights=str(tmp_path / "vit.pt")).state_dict()
    assert loaded["head.weight"].shape == (3, 8)
    assert loaded.keys() == stored.keys()
    for name, value in stored.items():
        assert name.startswith("head.") or torch.equal(loaded[name], value), name


def test_gpt_tiny_reads_the_output_layer_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    stored = gpt().state_dict()
    torch.save(stored, tmp_path / "gpt.pt")
    loaded = gpt(weights=str(tmp_path / "gpt.pt")).state_dict()
    assert loaded.keys() == stored.keys()
    for name, value in stored.items():
        assert torch.equal(loaded[name], value), name


@pytest.mark.parametrize("options", [VIT, GPT], ids=["vit_tiny", "gpt_tiny"])
def test_lora_keeps_the_weights_of_an_exported_model(tmp_path: Path, options: list[str]) -> None:
    """LoRA in the model of a first run: the frozen weights of the second run are those of the first."""
    first, second, file = tmp_path / "first", tmp_path / "second", tmp_path / "model.pt"
    assert main([*options, *RUN, f"hydra.run.dir={first}"]) == 0
    assert main(["export", str(first), "--client", "0", "--out", str(file)]) == 0
    adapter = ["adapter=lora", "adapter.rank=2", "adapter.places=[blocks.*]", f"model.weights={file}", "seed=1"]
    assert main([*options, *RUN, *adapter, f"hydra.run.dir={second}"]) == 0
    before, after = torch.load(file, weights_only=True), client_state(second, 0)
    frozen = {name.replace(".base_layer.", "."): value for name, value in after.items()}
    for name, value in before.items():
        assert name.startswith("head.") or torch.equal(frozen[name], value), name
    assert any(".lora_B." in name and value.abs().sum() > 0 for name, value in after.items())


def test_files_of_other_sizes_are_refused(tmp_path: Path) -> None:
    torch.save(gpt().state_dict(), tmp_path / "gpt.pt")
    with pytest.raises(ConfigError, match=r"gpt\.pt is not of this network: .* Set the options of model to those of"):
        vit(3, weights=str(tmp_path / "gpt.pt"))
    with pytest.raises(ConfigError, match=r"model\.weights=nowhere\.pt does not exist"):
        gpt(weights="nowhere.pt")
