"""CLIP's weights from files: OpenAI's TorchScript archive, and open_clip's state dicts."""

from __future__ import annotations

import json
import pickle
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedbench.core.options import ConfigError
from fedbench.models import _torchscript
from fedbench.models import clip as towers
from fedbench.models._torchscript import is_torchscript, read_torchscript

open_clip: Any = pytest.importorskip("open_clip", reason="CLIP is open_clip's")
NAME, DEEPER, RESNET = "test-clip-quickgelu", "test-deeper-quickgelu", "test-resnet-quickgelu"
CONFIG = {
    "embed_dim": 16,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 16, "layers": 2, "width": 64, "patch_size": 8},
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2},
}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("configs")
    deeper = {"vision_cfg": CONFIG["vision_cfg"] | {"layers": 3}}  # type: ignore[operator]
    resnet = {"vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None}}
    for name, more in (
        (NAME, {}),
        (NAME.removesuffix("-quickgelu"), {"quick_gelu": False}),
        (DEEPER, deeper),
        (RESNET, resnet),
    ):
        (folder / f"{name}.json").write_text(json.dumps(CONFIG | more))
    open_clip.add_model_config(folder)
    return NAME


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Models are remembered by their file's name."""
    towers.load.cache_clear()
    yield
    towers.load.cache_clear()


class Sizes(nn.Module):
    """A CLIP with the three numbers that OpenAI's archives hold beside the weights."""

    def __init__(self, clip: nn.Module):
        super().__init__()
        for name, module in clip.named_children():
            self.add_module(name, module)
        for name, value in clip.named_parameters(recurse=False):
            self.register_parameter(name, nn.Parameter(value.detach()))
        for name, size in (("input_resolution", 16), ("context_length", 32), ("vocab_size", 49408)):
            self.register_buffer(name, torch.tensor(size))
        self.register_buffer("attn_mask", clip.attn_mask)

    def forward(self, image: Tensor) -> Tensor:
        return self.visual(image)


def archive(path: Path, backbone: str, seed: int = 3) -> dict[str, Tensor]:
    """Write OpenAI's form of a model, in half precision; returns what it holds in float32."""
    torch.manual_seed(seed)
    clip = open_clip.create_model(backbone, pretrained=None)
    side = towers.ImageTower(clip).size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        traced = torch.jit.trace(Sizes(clip).eval(), torch.zeros(1, 3, side, side), check_trace=False)
        traced.half()
        torch.jit.save(traced, str(path))
    return {name: t.half().float() for name, t in clip.state_dict().items()}


@pytest.mark.parametrize("name", [NAME, RESNET])
@pytest.mark.usefixtures("backbone")
def test_openais_file_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = archive(tmp_path / "ViT-B-16.pt", name)
    caplog.clear()
    monkeypatch.setattr(torch.jit, "load", lambda *_, **__: pytest.fail("its program is loaded"))
    found = towers.load(name, str(tmp_path / "ViT-B-16.pt"))[0].state_dict()
    assert found.keys() == wanted.keys() and "No pretrained weights" not in caplog.text
    assert all(torch.equal(found[key].float(), wanted[key]) for key in wanted)
    assert found["text_projection"].dtype == torch.float32


def test_its_activation_is_quick_gelu(backbone: str, tmp_path: Path) -> None:
    archive(tmp_path / "ViT-B-16.pt", backbone)
    plain = backbone.removesuffix("-quickgelu")
    words = rf"was trained with QuickGELU, but model\.backbone={plain} is without it, .*: use {backbone}$"
    with pytest.raises(ConfigError, match=words):
        towers.load(plain, str(tmp_path / "ViT-B-16.pt"))


def test_another_models_file_is_one_sentence(backbone: str, tmp_path: Path) -> None:
    archive(tmp_path / "ViT-B-16.pt", backbone)
    with pytest.raises(ConfigError, match=r"could not be loaded \(Error\(s\) in loading .*: Missing key"):
        towers.load(DEEPER, str(tmp_path / "ViT-B-16.pt"))


@pytest.mark.parametrize("name", ["open_clip_pytorch_model.bin", "open_clip_model.safetensors"])
def test_open_clips_files_are_read(backbone: str, tmp_path: Path, name: str) -> None:
    torch.manual_seed(5)
    wanted = open_clip.create_model(backbone, pretrained=None).state_dict()
    if name.endswith(".bin"):
        torch.save(wanted, tmp_path / name)
    else:
        from safetensors.torch import save_file

        save_file({k: t.clone() for k, t in wanted.items()}, str(tmp_path / name))
    clip, _ = towers.load(backbone, str(tmp_path / name))
    assert all(torch.equal(t, wanted[k]) for k, t in clip.state_dict().items())


class Evil:
    def __reduce__(self) -> tuple:
        return print, ("code of the file ran",)


def rewritten(path: Path, change: Any) -> Path:
    """The archive with other members: change(name, data) returns the data, None leaves a member out."""
    with zipfile.ZipFile(path) as old:
        members = [(name, change(name, old.read(name))) for name in old.namelist()]
    other = path.with_name("other.pt")
    with zipfile.ZipFile(other, "w") as new:
        for name, data in members:
            if data is not None:
                new.writestr(name, data)
    return other


def test_an_archive_that_would_run_code_is_refused(
    backbone: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive(tmp_path / "a.pt", backbone)
    evil = rewritten(tmp_path / "a.pt", lambda n, d: pickle.dumps(Evil(), 2) if n.endswith("/data.pkl") else d)
    with pytest.raises(ConfigError, match=r"it names __builtin__\.print, which weights do not need"):
        towers.load(backbone, str(evil))
    assert "code of the file ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda n, d: d[:-2] if n.endswith("/data/3") else d, r"data/3 does not have"),
        (lambda n, d: None if n.endswith("/data/3") else d, "There is no item named"),
        (
            lambda n, d: d[:100] if n.endswith("/data.pkl") else d,
            r"could not be loaded \(the archive cannot be read \(ValueError: ",
        ),
        (
            lambda n, d: pickle.dumps({"a": 1}, 2) if n.endswith("/data.pkl") else d,
            r"data\.pkl does not contain a module",
        ),
    ],
)
def test_a_damaged_archive_is_one_sentence(backbone: str, tmp_path: Path, change: Any, words: str) -> None:
    archive(tmp_path / "a.pt", backbone)
    with pytest.raises(ConfigError, match=words):
        towers.load(backbone, str(rewritten(tmp_path / "a.pt", change)))


def test_tensors_share_storages_and_strides(tmp_path: Path) -> None:
    """Views, scripted modules and attributes of other kinds are read as torch.jit.load reads them."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.arange(12.0).reshape(3, 4)
            self.register_buffer("turned", whole.t())
            self.register_buffer("part", whole[1:, ::2])
            self.register_buffer("none", torch.zeros(0, 3))
            self.register_buffer("flags", torch.tensor([True, False]))
            self.sizes, self.inner = [1, 2], nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + len(self.sizes)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(Parts()), str(tmp_path / "p.pt"))
        wanted = torch.jit.load(str(tmp_path / "p.pt")).state_dict()
    assert is_torchscript(tmp_path / "p.pt")
    found = read_torchscript(tmp_path / "p.pt")
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    torch.save({"a": torch.zeros(2)}, tmp_path / "plain.pt")
    assert not is_torchscript(tmp_path / "plain.pt") and not is_torchscript(tmp_path / "absent.pt")


@pytest.mark.parametrize("way", ["itself", "through another"])
def test_modules_that_contain_each_other_are_refused(way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without tensors, too; the reader must end."""
    root, inner = _torchscript._Module(), _torchscript._Module()
    root.attributes["inner"] = inner
    inner.attributes["again"] = inner if way == "itself" else root
    monkeypatch.setattr(_torchscript._Recorder, "load", lambda self: root)
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", b"(l." * 10)
    with zipfile.ZipFile(tmp_path / "a.pt") as archive, pytest.raises(ValueError, match="modules contain each other"):
        _torchscript._Archive(archive).tensors()
