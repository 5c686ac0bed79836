"""Networks of torchvision, timm and transformers: heads, weights, what is refused; the table of docs/backbones.md."""

from __future__ import annotations

import copy
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CPU, all_clients, close, compose, equal, ragged
from torch import Tensor

from fedbench.adapters.bottleneck import Bottleneck
from fedbench.adapters.lora import LoRA
from fedbench.adapters.prompt import Prompt
from fedbench.core.options import ConfigError
from fedbench.engine.federation import Federation
from fedbench.engine.optim import SGD
from fedbench.models._backbone import Backbone
from fedbench.models.hf_models import HFModel
from fedbench.models.timm_models import TimmModel
from fedbench.models.torchvision_models import TorchvisionModel
from fedbench.nn.flat import FlatModel
from fedbench.simulation import build
from fedbench.simulation.instantiate import make
from fedbench.testing._federation import engine_on
from fedbench.tools import _export_formats

# torch.vmap says so of adaptive pooling, once in a process: slower, not wrong
pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.skipif(not all(map(find_spec, ("torchvision", "timm"))), reason="needs torchvision and timm"),
]
PAGE = Path(__file__).parents[2] / "docs" / "backbones.md"
LIBRARIES: dict[str, type[Backbone]] = {"torchvision": TorchvisionModel, "timm": TimmModel, "hf": HFModel}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 8}
FEW = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
# of transformers' models, what makes them small
OPTIONS: dict[str, dict[str, Any]] = {
    "vit": SMALL,
    "deit": SMALL,
    "beit": SMALL,
    "dinov2": {**SMALL, "mlp_ratio": 2},
    "swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "patch_size": 4, "window_size": 4},
    "convnext": FEW,
    "resnet": {**FEW, "embedding_size": 8, "layer_type": "basic"},
    "mobilenet_v2": {"depth_multiplier": 0.35},
}
LORA = LoRA(["body.*"], rank=2, convolutions=True)
ADAPTERS = {  # as the columns of the table
    name: [f"adapter={name}"] for name in ("none", "lora", "houlsby", "pfeiffer", "parallel", "compacter", "fusion")
}
ADAPTERS["lora"] += ["adapter.places=[body.*]", "adapter.rank=2", "adapter.convolutions=true"]
ADAPTERS |= {name: [f"adapter={name}"] for name in ("bias", "layernorm")}
LARGER = {"alexnet", "mobilenet_v2"}  # of torchvision: 64 pixels, 32 are too few for their strides


def network(library: str, name: str, side: int = 32, channels: int = 3, **more: Any) -> Backbone:
    options = OPTIONS[name] if library == "hf" and "weights" not in more else {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LIBRARIES[library]((channels, side, side), 3, name=name, **{"options": options, **more})  # type: ignore


def rows_of_page() -> dict[tuple[str, str], dict[str, str]]:
    """By library and name, what the table in docs/backbones.md has for each adapter."""
    lines = re.findall(r"^\| (torchvision|timm|hf) \| `(\w+)` \| (.+) \|$", PAGE.read_text(), re.M)
    return {(library, name): dict(zip(ADAPTERS, cells.split(" | "), strict=True)) for library, name, cells in lines}


def outcome(library: str, name: str, adapter: str) -> str:
    """A round of FedAvg with two clients: how many numbers a row has, or "refused"."""
    side = 64 if library == "torchvision" and name in LARGER else 32
    federation = Federation.build(*ragged(sizes=(4, 2), shape=(3, side, side)), CPU)
    try:
        module = network(library, name, side)
        make(compose(["algorithm=fedavg", *ADAPTERS[adapter]]).adapter, key="adapter").insert(module)
    except ConfigError as error:
        assert "\n" not in str(error) and str(error).startswith(("model.name=", "adapter."))
        return "refused"
    model = FlatModel(module, {"base": ["body.*"], "head": ["head.*"]})
    first = model.init_row()
    engine = engine_on(federation, model, SGD(lr=0.001), plan="vmap", batch_size=2, epochs=1)
    w = all_clients(engine).train(first).theta.mean(0)
    assert w.isfinite().all() and not torch.equal(w, first)
    return f"{model.size:,}"


def table() -> str:
    """Print the table of docs/backbones.md: python tests/models/test_backbones.py, with PYTHONPATH=tests."""
    lines = [["library", "model.name", *ADAPTERS], ["---", "---", *["---:"] * len(ADAPTERS)]]
    lines += [[lib, f"`{name}`", *(outcome(lib, name, a) for a in ADAPTERS)] for lib, name in rows_of_page()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def test_the_table_has_what_was_promised() -> None:
    rows = rows_of_page()
    hf = {key: row for key, row in rows.items() if key[0] == "hf"}
    assert len(hf) == 8 and len(rows) == 28
    for adapter in ("none", "lora"):
        assert sum(row[adapter] != "refused" for key, row in rows.items() if key not in hf) >= 17
        assert sum(row[adapter] != "refused" for row in hf.values()) >= 6
    transformers = {("torchvision", "vit_b_32"), ("torchvision", "swin_t"), ("timm", "vit_tiny_patch16_224")}
    transformers |= {("timm", "deit_tiny_patch16_224"), *(("hf", n) for n in ("vit", "deit", "beit", "dinov2", "swin"))}
    assert all("refused" not in rows[key].values() for key in transformers)


@pytest.mark.slow
@pytest.mark.parametrize("library, name", rows_of_page())
def test_networks_train_as_the_table_says(library: str, name: str) -> None:
    expected = rows_of_page()[library, name]
    assert {adapter: outcome(library, name, adapter) for adapter in ADAPTERS} == expected


@pytest.mark.parametrize(
    "library, name, adapter",
    [
        ("torchvision", "mobilenet_v3_small", "lora"),
        ("timm", "vit_tiny_patch16_224", "lora"),
        ("timm", "vit_tiny_patch16_224", "houlsby"),
        ("hf", "swin", "compacter"),
        ("hf", "vit", "pfeiffer"),
    ],
)
def test_small_ones_of_the_table(library: str, name: str, adapter: str) -> None:
    assert outcome(library, name, adapter) == rows_of_page()[library, name][adapter]


# -- where adapters go -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["vit", "deit", "beit", "dinov2", "swin"])
def test_houlsby_adapts_attention_and_mlp(name: str) -> None:
    """Two layers of 16 numbers, an adapter of width 16 behind each sublayer: 4 (2 * 16 * 16 + 32) + 51 of the head."""
    small = {**SMALL, "hidden_size": 16, "intermediate_size": 32}
    options = {"options": small} if name != "swin" else {}
    module = network("hf", name, channels=1, **options)
    bare = copy.deepcopy(module).eval()
    new = Bottleneck(["attention", "mlp"], 16).insert(module)
    sublayers = {n.split(".adapter.")[0].rpartition(".")[2] for n in new}
    assert sublayers == {"attention", "mlp"}
    if name != "swin":
        assert sum(module.get_parameter(n).numel() for n in new) == 2_227 - 51
    x = torch.randn(2, 1, 32, 32)
    close(module.eval()(x), bare(x), 1e-6)


def test_pfeiffer_is_behind_the_block_of_transformers() -> None:
    """y + A(y) of what a layer of transformers' ViT gives, by a hook on the layer."""
    module = network("hf", "vit").eval()
    Bottleneck(["block"], 4, "relu", init="normal").insert(module)
    adapted: Any = module.get_submodule("body.vit.layers.0")
    seen: dict[str, Tensor] = {}
    adapted.base_layer.register_forward_hook(lambda m, i, out: seen.update(y=out))
    adapted.register_forward_hook(lambda m, i, out: seen.update(out=out))
    module(torch.randn(2, 3, 32, 32))
    close(seen["out"], seen["y"] + adapted.adapter(seen["y"]), 1e-6)


def torchvision_vit() -> Backbone:
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    return Backbone(lambda: VisionTransformer(16, 8, 2, 2, 8, 16), "model.name=vit", (3, 16, 16), 3, 3)


def test_lora_reaches_torchvisions_attention() -> None:
    """The joint matrix and the output's have products, beside those of the mlp; the merged model computes the same."""
    module, x = torchvision_vit(), torch.randn(2, 3, 16, 16)
    bare = copy.deepcopy(module).eval()
    new = LoRA(rank=2, alpha=6).insert(module)
    layers = 2 * (2 * (8 + 24) + 2 * (8 + 8) + 2 * 2 * (8 + 16))
    assert sum(module.get_parameter(n).numel() for n in new) == layers
    close(module.eval()(x), bare(x), 1e-6)
    for n in new:
        torch.nn.init.normal_(module.get_parameter(n), std=0.1)
    attention: Any = module.get_submodule("body.encoder.layers.encoder_layer_0.self_attention")
    y = torch.randn(2, 5, 8)
    weight = attention.base_layer.in_proj_weight + 3 * attention.lora_B.weight @ attention.lora_A.weight
    plain: Any = bare.get_submodule("body.encoder.layers.encoder_layer_0.self_attention")
    out = attention.base_layer.out_proj
    with torch.no_grad():
        plain.in_proj_weight.copy_(weight)
        plain.out_proj.weight.copy_(out.base_layer.weight + 3 * out.lora_B.weight @ out.lora_A.weight)
    close(attention(y, y, y)[0], plain(y, y, y)[0], 1e-5)
    close(attention.merged()(y, y, y)[0], plain(y, y, y)[0], 1e-5)


def test_attention_is_not_for_peft() -> None:
    """peft 0.21 merges the output's product twice, so that its files would give another model."""
    module, adapter = torchvision_vit(), LoRA(rank=2)
    adapter.insert(module)
    learned = [n for n, p in module.named_parameters() if p.requires_grad]
    with pytest.raises(ConfigError, match=r"self_attention is an .* \(version 0\.21 adds .*: export with --merged"):
        _export_formats.peft_files(module, torchvision_vit(), adapter, "adapter=lora", learned)


@pytest.mark.parametrize("adapter", ["lora", "houlsby", "pfeiffer", "parallel", "compacter", "fusion"])
def test_many_clients_of_torchvisions_vit_are_each_one(adapter: str) -> None:
    module = torchvision_vit()
    make(compose(["algorithm=fedavg", *ADAPTERS[adapter]]).adapter, key="adapter").insert(module)
    model = FlatModel(module, {})
    rows = model.init_row() + 0.1 * torch.randn(3, model.size, generator=torch.Generator().manual_seed(0))
    x = torch.randn(3, 2, 3, 16, 16)
    for i, many in enumerate(model.predict(rows, x)):
        close(many, model.predict(rows[i], x[i]), 1e-4)


def test_prompts_in_timms_blocks() -> None:
    """They call their blocks with a mask, too."""
    module = network("timm", "vit_tiny_patch16_224")
    Prompt(["body.blocks.0"], tokens=2, tap="input").insert(module)
    assert module(torch.randn(2, 3, 32, 32)).shape == (2, 3)


@pytest.mark.parametrize("library, name", [("torchvision", "swin_t"), ("timm", "resnet10t"), ("hf", "vit")])
def test_clients_are_the_same_alone_and_together(library: str, name: str) -> None:
    """Logits of three clients, in evaluation mode; swin_t's attention reads the weights of LoRA's layers."""
    if library == "hf":
        pytest.importorskip("transformers")
    module = network(library, name)
    adapter = LORA
    adapter.insert(module)
    model = FlatModel(module, {"base": ["body.*"], "head": ["head.*"]})
    rows = model.init_row() + 0.02 * torch.randn(2, model.trained.size).new_ones(2, model.size)
    rows[1, : model.trained.size] += 0.01 * torch.randn(model.trained.size)
    x = torch.randn(2, 3, 3, 32, 32)
    many = model.predict(rows, x)
    for i in range(2):
        one = model.predict(rows[i], x[i])
        close(many[i], one, 1e-4 * max(1.0, float(one.abs().max())))
    assert model.columns["head"].size == module.head.in_features * 3 + 3


@pytest.mark.parametrize("library, name", [("torchvision", "swin_t"), ("hf", "swin")])
def test_stochastic_depth_is_off(library: str, name: str) -> None:
    """Whatever a library calls its class: in training two passes are the same."""
    if library == "hf":
        pytest.importorskip("transformers")
    module, x = network(library, name).train(), torch.randn(4, 3, 32, 32)
    equal(module(x), module(x))


def test_captured_outputs_are_not_written_over() -> None:
    """torchvision's ReLU would write into what the norm before it gave."""
    model = FlatModel(network("torchvision", "resnet18"), {})
    _, captured = model.capture(model.init_row(), torch.randn(2, 3, 32, 32), ["body.layer1.0.bn1"])
    assert (captured["body.layer1.0.bn1"] < 0).any()


def test_merged_lora_is_what_a_reader_of_weights_sees() -> None:
    layer = torch.nn.Linear(5, 4)
    adapted: Any = LoRA(["*"], rank=2, alpha=6).adapt(layer, "layer")
    torch.nn.init.normal_(adapted.lora_B.weight)
    x = torch.randn(3, 5)
    close(torch.nn.functional.linear(x, adapted.weight, adapted.bias), adapted(x), 1e-5)
    close(adapted.merged()(x), adapted(x), 1e-5)


@pytest.mark.parametrize("stride, padding, dilation", [(1, 1, 1), (2, 0, 1), (1, 2, 2)])
def test_lora_of_convolutions(stride: int, padding: int, dilation: int) -> None:
    """Nothing changes at first; then it is the convolution by W + (alpha / r) B A, and in peft's shapes."""
    layer, x = torch.nn.Conv2d(3, 5, 3, stride, padding, dilation), torch.randn(2, 3, 9, 9)
    adapted: Any = LoRA(["*"], rank=2, alpha=6, convolutions=True).adapt(layer, "layer")
    equal(adapted(x), layer(x))
    torch.nn.init.normal_(adapted.lora_B.weight)
    product = torch.einsum("or,rikl->oikl", adapted.lora_B.weight[:, :, 0, 0], adapted.lora_A.weight)
    expected = torch.nn.functional.conv2d(x, layer.weight + 3 * product, layer.bias, stride, padding, dilation)
    close(adapted(x), expected, 1e-4)
    close(adapted.merged()(x), expected, 1e-4)
    assert adapted.stride == layer.stride  # code around may ask
    assert LoRA(["*"]).adapt(layer, "layer") is None
    assert LoRA(["*"], convolutions=True).adapt(torch.nn.Conv2d(4, 4, 3, groups=2), "layer") is None


# -- weights ---------------------------------------------------------------------------------------------
def same_body(a: Backbone, b: Backbone) -> None:
    for (name, s), t in zip(a.body.state_dict().items(), b.body.state_dict().values()):
        assert torch.equal(s, t), name


@pytest.mark.parametrize("library, name", [("torchvision", "shufflenet_v2_x0_5"), ("timm", "resnet10t")])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_weights_of_a_file(library: str, name: str, suffix: str, tmp_path: Path) -> None:
    """As the library itself stores them, with a classifier for other classes, which is left out."""
    import timm
    import torchvision
    from safetensors.torch import save_file

    torch.manual_seed(1)
    whole = timm.create_model(name) if library == "timm" else torchvision.models.get_model(name, weights=None)
    file, state = tmp_path / f"w{suffix}", whole.state_dict()
    save_file(state, file) if suffix == ".safetensors" else torch.save(state, file)
    loaded = network(library, name, channels=1, weights=str(file))
    for key, t in loaded.body.state_dict().items():
        assert torch.equal(t, state[key]), key
    assert loaded(torch.randn(2, 1, 32, 32)).shape == (2, 3)
    torch.save({**state, "odd": torch.ones(1)}, tmp_path / "odd.pt")
    with pytest.raises(ConfigError, match=r"model\.weights=.*odd\.pt is not of this network: .* in odd"):
        network(library, name, weights=str(tmp_path / "odd.pt"))
    with pytest.raises(ConfigError, match=r"model\.weights=nowhere\.pt does not exist"):
        network(library, name, weights="nowhere.pt")
    (tmp_path / "torn.pt").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=r"torn\.pt cannot be read"):
        network(library, name, weights=str(tmp_path / "torn.pt"))


def test_weights_of_a_folder(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(**SMALL, image_size=32, num_labels=7)
    torch.manual_seed(1)
    whole = transformers.ViTForImageClassification(config)
    whole.save_pretrained(tmp_path / "vit")
    loaded: Any = network("hf", "vit", weights=str(tmp_path / "vit"))
    x: Tensor = torch.randn(2, 3, 32, 32)
    features = whole.vit(pixel_values=x).last_hidden_state[:, 0]
    close(loaded.eval()(x), loaded.head(features), 1e-5)
    file = tmp_path / "vit" / "model.safetensors"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "config.json").write_bytes((tmp_path / "vit" / "config.json").read_bytes())
    torch.save(load_file(file), tmp_path / "bin" / "pytorch_model.bin")
    close(network("hf", "vit", weights=str(tmp_path / "bin")).body(x), loaded.body(x), 1e-6)
    state = {n: t for n, t in load_file(file).items() if not n.endswith("layernorm.bias")}
    save_file(state, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"is not of this network: it lacks .*layernorm\.bias"):
        network("hf", "vit", weights=str(tmp_path / "vit"))
    with pytest.raises(ConfigError, match=r"model\.weights=none is not a folder: set a folder that save_pretrained"):
        network("hf", "vit", weights="none")


# -- by the command line, and what is refused ------------------------------------------------------------
def test_methods_have_their_columns() -> None:
    cfg = compose(["algorithm=fedper", "model=timm", "model.name=resnet10t"])
    federation = Federation.build(*ragged(shape=(1, 32, 32)), CPU)
    model = build.model(cfg, federation)
    assert model.columns["base"].size + model.columns["head"].size == model.size
    equal(model.init_row(), build.model(cfg, federation).init_row())


@pytest.mark.parametrize(
    "library, name, words",
    [
        (
            "torchvision",
            "resnet19",
            r"model\.name=resnet19 is not a network of torchvision\.models: choose one that it has, such as resnet",
        ),
        (
            "timm",
            "vit_tny_patch16_224",
            r"model\.name=vit_tny_patch16_224 is not a network of timm: choose one that it has, such as vit_tiny",
        ),
        ("torchvision", "squeezenet1_0", r"model\.name=squeezenet1_0 has no linear layer"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(library: str, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        network(library, name)


def test_sizes_that_do_not_fit_are_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"model\.name=vit_b_32 cannot be built for images \(3, 40, 40\)"):
        network("torchvision", "vit_b_32", side=40)
    with pytest.raises(ConfigError, match=r"model\.name=alexnet cannot compute images \(3, 32, 32\)"):
        network("torchvision", "alexnet")
    with pytest.raises(
        ConfigError, match=r"model\.name=resnet18 needs images .* with 1 or 3 channels, .* \(2, 32, 32\)"
    ):
        network("torchvision", "resnet18", channels=2)
    with pytest.raises(ConfigError, match=r"model\.name=resnet18 cannot be built .*colour"):
        network("torchvision", "resnet18", options={"colour": 3})
    with pytest.raises(ConfigError, match=r"model\.options=\{'hidden_size': 32\} .* omit model\.options"):
        HFModel((3, 32, 32), 2, weights="some", options={"hidden_size": 32})


if __name__ == "__main__":
    print(table())
