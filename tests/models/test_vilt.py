"""ViLT: transformers' numbers, what is masked, position embeddings of other grids, weights of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import close, equal
from torch import Tensor

from fedbench.core.options import ConfigError
from fedbench.models.vilt import ViLT, interpolate_positions
from fedbench.nn.flat import FlatModel

SHAPE = {"image": (3, 16, 24), "text": (6,)}
SQUARE = {"image": (3, 32, 32), "text": (8,)}
CONFIG = {
    "vocab_size": 64,
    "max_position_embeddings": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 32,
    "patch_size": 8,
}


def vilt(shape: Any = SHAPE, classes: int = 5, **options: Any) -> ViLT:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ViLT(shape, classes, **options).eval()


def samples(shape: Any = SHAPE, n: int = 3) -> dict[str, Tensor]:
    """The first text without padding, the second with two tokens alone."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(1, 64, (n, *shape["text"]), generator=generator)
    text[1, 2:] = 0
    return {"image": torch.randn(n, *shape["image"], generator=generator), "text": text}


# -- transformers ----------------------------------------------------------------------------------------
@pytest.fixture
def theirs() -> Any:
    """A ViltModel whose numbers are all random, so that each of them matters."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "ViltModel"):
        pytest.skip("this transformers has no ViltModel")
    model = transformers.ViltModel(transformers.ViltConfig(**CONFIG)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.4, generator=generator)
    return model


@pytest.mark.parametrize("side", [32, 48])
def test_pooled_as_transformers(theirs: Any, tmp_path: Path, side: int) -> None:
    """Of random weights, square images of the weights' size and of another, and texts with padding."""
    theirs.save_pretrained(tmp_path)
    shape = {"image": (3, side, side), "text": (8,)}
    own, x = vilt(shape, weights=str(tmp_path)), samples(shape)
    with torch.no_grad():
        expected = theirs(
            input_ids=x["text"],
            attention_mask=(x["text"] != 0).long(),
            pixel_values=x["image"],
            pixel_mask=torch.ones(3, side, side),
        ).pooler_output
        close(own.pooled(x), expected, 1e-5)
    assert (expected[0] - expected[2]).abs().max() > 0.03  # samples matter
    assert sum(p.numel() for n, p in own.named_parameters() if n[:5] != "head.") - (side == 48) * 20 * 32 == sum(
        p.numel() for p in theirs.parameters()
    )


def test_pytorch_model_bin_is_read_where_there_are_no_safetensors(theirs: Any, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path)
    wanted = vilt(SQUARE, weights=str(tmp_path)).state_dict()
    torch.save({f"vilt.{name}": t for name, t in theirs.state_dict().items()}, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    found = vilt(SQUARE, weights=str(tmp_path)).state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    torch.save({"a": Path("an object")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin cannot be read"):  # weights_only
        vilt(SQUARE, weights=str(tmp_path))
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match=r"a folder with model\.safetensors or pytorch_model\.bin"):
        vilt(SQUARE, weights=str(tmp_path))


def test_shorter_texts_take_the_first_positions(theirs: Any, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path)
    short = vilt({**SQUARE, "text": (5,)}, weights=str(tmp_path))
    full, x = vilt(SQUARE, weights=str(tmp_path)), samples({**SQUARE, "text": (5,)})
    close(short.pooled(x), full.pooled({**x, "text": F.pad(x["text"], (0, 3))}), 1e-5)


def test_weights_that_do_not_fit(theirs: Any, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path)
    (tmp_path / "empty").mkdir()

    def refused(words: str, shape: Any = SQUARE, folder: Path = tmp_path, **options: Any) -> None:
        with pytest.raises(ConfigError, match=words) as caught:
            vilt(shape, weights=str(folder), **options)
        assert "\n" not in str(caught.value)

    refused("must be a file, or a folder with config.json", folder=tmp_path / "nowhere")
    refused("must be a file, or a folder with config.json", folder=tmp_path / "empty")
    refused(r"has 2 blocks with 4 heads, but model.depth=3 and model.heads=4", depth=3)
    refused(r"but model.depth=2 and model.heads=8", heads=8)
    refused(r"text.word.weight has shape \(64, 32\) in the file, but \(65, 32\)", vocab=65)
    refused(r"text.position has shape \(8, 32\) in the file, but \(9, 32\)", {**SQUARE, "text": (9,)})
    refused(
        r"image.patches.weight has shape \(32, 3, 8, 8\) in the file, but \(32, 1, 8, 8\)",
        {**SQUARE, "image": (1, 32, 32)},
    )
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    refused("cannot be read")


def test_weights_of_another_network(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4, "num_hidden_layers": 2}')
    safetensors.save_file({"embeddings.cls_token": torch.zeros(1, 1, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"is not of this ViLT: it lacks text_modality, image_modality, text\.position"
    ):
        vilt(SQUARE, weights=str(tmp_path))


def test_weights_of_a_model_with_a_head(theirs: Any, tmp_path: Path) -> None:
    """As dandelin/vilt-b32-mlm: names begin with vilt., and there is a head that is left out."""
    safetensors = pytest.importorskip("safetensors.torch")
    theirs.save_pretrained(tmp_path)
    bare, x = vilt(SQUARE, weights=str(tmp_path)), samples(SQUARE)
    stored = {f"vilt.{name}": t.contiguous() for name, t in theirs.state_dict().items()}
    safetensors.save_file({**stored, "mlm_score.bias": torch.zeros(64)}, tmp_path / "model.safetensors")
    equal(vilt(SQUARE, weights=str(tmp_path)).pooled(x), bare.pooled(x))


# -- position embeddings ---------------------------------------------------------------------------------
def test_positions_of_another_grid_by_hand() -> None:
    """Corners stay, what lies between is between; the class token's is not touched."""
    table = torch.tensor([[9.0], [0.0], [1.0], [2.0], [3.0]])  # of 2 x 2 patches
    assert interpolate_positions(table, (3, 3)).flatten().tolist() == [9, 0, 0.5, 1, 1, 1.5, 2, 2, 2.5, 3]
    equal(interpolate_positions(table, (2, 2)), table)


# -- what is computed ------------------------------------------------------------------------------------
def test_padding_is_not_seen() -> None:
    """Whatever [PAD] is embedded as, a shorter text has the same outputs; every other token matters."""
    model, x = vilt(), samples()
    before = model(x)
    with torch.no_grad():
        model.text.word.weight[0] += 3.0
    equal(model(x), before)
    for j in range(2):
        changed = {**x, "text": x["text"].index_fill(1, torch.tensor([j]), 7)}
        assert (model(changed) - before).abs().amax(1).min() > 1e-4


def test_grey_images_are_shown_in_all_channels() -> None:
    grey = {**SHAPE, "image": (1, 16, 24)}
    model, x = vilt(grey, channels=3), samples(grey)
    assert model.image.patches.in_channels == 3
    equal(model(x), vilt(SHAPE)({**x, "image": x["image"].expand(-1, 3, -1, -1)}))


def test_the_head_of_feddat() -> None:
    """768 -> 1536 -> norm, GELU -> 100: 1,337,956 parameters."""
    with torch.device("meta"):
        model = ViLT(SQUARE, 100, patch=8, width=768, depth=1, heads=12, head="mlp")
    assert sum(p.numel() for p in model.head.parameters()) == 1_337_956
    small = vilt(head="mlp")
    assert small(samples()).shape == (3, 5)


def test_a_program_as_the_module_and_mapped() -> None:
    """Three clients at once: the traced program, and torch.vmap."""
    model = FlatModel(vilt())
    assert model.traced_graph is not None and not model.uses_vmap and model.manual_backward is None
    rows = model.init_row() + 0.1 * torch.randn(3, model.size, generator=torch.Generator().manual_seed(2))
    x = {name: torch.stack([t, t.flip(0), t.roll(1, 0)]) for name, t in samples().items()}
    found = model.forward(rows, x)
    model.forward_pass.traced_graph = None
    close(found, model.forward(rows, x), 1e-5)
    module = vilt()
    for i in range(3):
        module.load_state_dict(model.state_dict(rows[i]))
        close(found[i], module({name: t[i] for name, t in x.items()}), 1e-5)


def test_layers_can_be_captured_and_tapped() -> None:
    model, x = FlatModel(vilt()), samples()
    logits, found = model.capture(model.init_row(), x, ["blocks.*.attn", "blocks.*.ffn.mlp"])
    assert {name: tuple(t.shape) for name, t in found.items()} == {
        f"blocks.{i}.{layer}": (3, 13, 32) for i in range(2) for layer in ("attn", "ffn.mlp")
    }
    assert model.traced_graph is not None and model.traced_graph.named_outputs >= found.keys()
    model.add_hook("blocks.1.ffn.mlp", lambda y, row: 0 * y)
    assert (model.forward(model.init_row(), x) - logits).abs().max() > 1e-3


# -- what is refused -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "shape, options, words",
    [
        ((3, 16, 16), {}, r"needs images and texts by name, .* but the data set gives \(3, 16, 16\)"),
        ({"image": (3, 16, 16)}, {}, r"gives \{'image': \(3, 16, 16\)\}"),
        ({**SHAPE, "image": (3, 20, 24)}, {}, "model.patch=8 must divide the height 20 and the width 24"),
        (SHAPE, {"heads": 5}, "model.heads=5 must divide model.width=32"),
        (SHAPE, {"channels": 1}, "model.channels=1, but the data set's images have 3 channels"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(shape: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        vilt(shape, **options)


def test_weights_of_a_run_of_ones_own(tmp_path: Path) -> None:
    """What fedbench export writes, of another number of answers and another size of images."""
    before, file = vilt({**SQUARE, "image": (3, 48, 48)}, classes=9), tmp_path / "client0.pt"
    torch.save(before.state_dict(), file)
    after, x = vilt({**SQUARE, "image": (3, 48, 48)}, weights=str(file)), samples({**SQUARE, "image": (3, 48, 48)})
    equal(after.pooled(x), before.pooled(x))
    assert vilt(SQUARE, weights=str(file)).image.position.shape == (17, 32)
    with pytest.raises(ConfigError, match=r"is of a larger ViLT: it also has blocks\.1\."):
        vilt({**SQUARE, "image": (3, 48, 48)}, weights=str(file), depth=1)
    with pytest.raises(ConfigError, match=r"is not of this ViLT: it lacks blocks\.2\."):
        vilt(SQUARE, weights=str(file), depth=3)
