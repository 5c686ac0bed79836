"""ALBEF: the released code's layers as timm and transformers compute them, its names, what is masked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import close, equal
from torch import Tensor

from fedbench.core.options import ConfigError
from fedbench.models.albef import ALBEF
from fedbench.nn.flat import FlatModel

SHAPE = {"image": (3, 32, 32), "text": (6,)}
POSITIONS = 10  # of texts, in the weights
DEPTH, FUSION, WIDTH, HEADS = 3, 1, 32, 4


def albef(shape: Any = SHAPE, classes: int = 5, **options: Any) -> ALBEF:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ALBEF(shape, classes, **{"depth": DEPTH, "fusion_layer": FUSION, **options}).eval()


def samples(shape: Any = SHAPE, n: int = 3) -> dict[str, Tensor]:
    """The first text without padding, the second with two tokens alone."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(1, 64, (n, *shape["text"]), generator=generator)
    text[1, 2:] = 0
    return {"image": torch.randn(n, *shape["image"], generator=generator), "text": text}


# -- timm and transformers -------------------------------------------------------------------------------
class Theirs:
    """An image tower of timm, an embedding and layers of BERT, as in the released code, all numbers random."""

    def __init__(self) -> None:
        timm = pytest.importorskip("timm")
        transformers = pytest.importorskip("transformers")
        bert = pytest.importorskip("transformers.models.bert.modeling_bert")
        self.image = timm.models.VisionTransformer(
            img_size=32, patch_size=8, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS, num_classes=0, global_pool=""
        ).eval()
        sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 4 * WIDTH, "vocab_size": 64}
        config = transformers.BertConfig(**sizes, max_position_embeddings=POSITIONS, attn_implementation="eager")
        self.embeddings = bert.BertEmbeddings(config).eval()
        looking = transformers.BertConfig(**config.to_dict())
        looking.is_decoder = looking.add_cross_attention = True
        looking._attn_implementation = config._attn_implementation = "eager"
        self.layers = torch.nn.ModuleList(
            bert.BertLayer(looking if i >= FUSION else config) for i in range(DEPTH)
        ).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for module in (self.image, self.embeddings, self.layers):
                for p in module.parameters():
                    p.normal_(0, 0.3, generator=generator)

    def __call__(self, x: dict[str, Tensor]) -> Tensor:
        """The first token behind the last layer."""
        image, words = self.image(x["image"]), self.embeddings(x["text"])
        hidden = torch.where(x["text"] != 0, 0.0, torch.finfo(torch.float32).min)[:, None, None]
        for i, layer in enumerate(self.layers):
            seen = {"encoder_hidden_states": image} if i >= FUSION else {}
            out = layer(words, hidden, **seen)
            words = out[0] if isinstance(out, tuple) else out
        return words[:, 0]

    def state(self, bert: str = "text_encoder.bert.") -> dict[str, Tensor]:
        """By the released code's names, with what else lies in a checkpoint of its pretraining."""
        state = {f"visual_encoder.{name}": t for name, t in self.image.state_dict().items()}
        state |= {f"{bert}embeddings.{name}": t for name, t in self.embeddings.state_dict().items()}
        state |= {f"{bert}encoder.layer.{name}": t for name, t in self.layers.state_dict().items()}
        state |= {name.replace("encoder.", "encoder_m.", 1): 0 * t for name, t in state.items()}
        return state | {
            "temp": torch.ones(()),
            "image_queue": torch.zeros(4, 9),
            "text_encoder.cls.bias": torch.zeros(64),
        }


@pytest.fixture(scope="module")
def theirs() -> Theirs:
    return Theirs()


@pytest.mark.parametrize("bert", ["text_encoder.bert.", "text_encoder."])
def test_fused_as_the_released_layers(theirs: Theirs, tmp_path: Path, bert: str) -> None:
    """Of random weights by the names of a checkpoint, with those of its VQA too, and texts with padding."""
    torch.save({"model": theirs.state(bert), "epoch": 29}, tmp_path / "ALBEF.pth")
    own, x = albef(weights=str(tmp_path / "ALBEF.pth")), samples()
    with torch.no_grad():
        expected = theirs(x)
        close(own.fused(x), expected, 1e-5)
    assert (expected[0] - expected[2]).abs().max() > 0.03  # samples matter


def test_positions_of_other_sizes(theirs: Theirs, tmp_path: Path) -> None:
    """Images' by bicubic interpolation, as the released code; texts' first ones.  A bare state dict is read."""
    torch.save(theirs.state(), tmp_path / "model.pth")
    larger = albef({**SHAPE, "image": (3, 48, 48)}, weights=str(tmp_path / "model.pth"))
    table = theirs.image.pos_embed.detach()[0]  # [1 + 16, d]
    square = table[1:].T.reshape(1, WIDTH, 4, 4)
    wanted = torch.nn.functional.interpolate(square, (6, 6), mode="bicubic", align_corners=False)
    close(larger.image.embed.position[1:], wanted[0].flatten(1).T, 1e-5)
    equal(larger.image.embed.position[0], table[0])
    equal(larger.words.position, theirs.embeddings.position_embeddings.weight[:6].detach())


def test_weights_that_do_not_fit(theirs: Theirs, tmp_path: Path) -> None:
    file = tmp_path / "model.pth"
    torch.save(theirs.state(), file)

    def refused(words: str, shape: Any = SHAPE, path: Path = file, **options: Any) -> None:
        with pytest.raises(ConfigError, match=words) as caught:
            albef(shape, weights=str(path), **options)
        assert "\n" not in str(caught.value)

    refused("does not exist", path=tmp_path / "nowhere.pth")
    refused(r"is not of this ALBEF: it lacks blocks\.0\.cross\.query\.weight", fusion_layer=0)
    refused(r"is not of this ALBEF: it lacks image\.blocks\.3", depth=4)
    refused(r"is of a larger ALBEF: it also has blocks\.1\.cross", fusion_layer=2)
    refused(r"words.word.weight has shape \(64, 32\) in the file, but \(65, 32\)", vocab=65)
    refused(r"words.position has shape \(10, 32\) in the file, but \(11, 32\)", {**SHAPE, "text": (11,)})
    (tmp_path / "nothing.pth").write_bytes(b"nothing")
    refused("cannot be read", path=tmp_path / "nothing.pth")


def test_weights_of_a_run_of_ones_own(tmp_path: Path) -> None:
    before = albef(classes=9)
    torch.save(before.state_dict(), tmp_path / "client0.pt")
    equal(albef(weights=str(tmp_path / "client0.pt")).fused(samples()), before.fused(samples()))


# -- what is computed ------------------------------------------------------------------------------------
def test_numbers_of_albef_b16() -> None:
    """ViT-B/16 on 577 tokens (timm's without its classifier), BERT-base without its pooler and 512 - 40 positions, and
    six looks at the image."""
    with torch.device("meta"):
        shape = {"image": (3, 384, 384), "text": (40,)}
        model = ALBEF(shape, 7, patch=16, width=768, depth=12, fusion_layer=6, heads=12, vocab=30_522)
    image = sum(p.numel() for p in model.image.parameters())
    look = 4 * (768 * 768 + 768) + 2 * 768
    bert = 109_482_240 - (768 * 768 + 768) - (512 - 40) * 768
    text = sum(p.numel() for name in ("words", "blocks") for p in model.get_submodule(name).parameters())
    assert (image, text) == (86_090_496, bert + 6 * look)
    assert image + text == 208_803_072


def test_padding_is_not_seen_and_all_else_is() -> None:
    model, x = albef(), samples()
    before = model(x)
    with torch.no_grad():
        model.words.word.weight[0] += 3.0
    equal(model(x), before)
    for j in range(2):
        changed = {**x, "text": x["text"].index_fill(1, torch.tensor([j]), 7)}
        assert (model(changed) - before).abs().amax(1).min() > 1e-4
    for row in (0, 24):
        image = x["image"].clone()
        image[:, :, row : row + 8, :8] += 1
        assert (model({**x, "image": image}) - before).abs().amax(1).min() > 1e-5


def test_grey_images_are_shown_in_all_channels() -> None:
    grey = {**SHAPE, "image": (1, 32, 32)}
    model, x = albef(grey, channels=3), samples(grey)
    equal(model(x), albef()({**x, "image": x["image"].expand(-1, 3, -1, -1)}))


def test_a_program_as_the_module_and_mapped() -> None:
    """Three clients at once: the traced program, and torch.vmap."""
    model = FlatModel(albef())
    assert model.traced_graph is not None and not model.uses_vmap and model.manual_backward is None
    rows = model.init_row() + 0.1 * torch.randn(3, model.size, generator=torch.Generator().manual_seed(2))
    x = {name: torch.stack([t, t.flip(0), t.roll(1, 0)]) for name, t in samples().items()}
    found = model.forward(rows, x)
    model.forward_pass.traced_graph = None
    close(found, model.forward(rows, x), 1e-5)
    module = albef()
    for i in range(3):
        module.load_state_dict(model.state_dict(rows[i]))
        close(found[i], module({name: t[i] for name, t in x.items()}), 1e-5)


# -- what is refused -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "shape, options, words",
    [
        ((3, 16, 16), {}, r"model=albef needs images and texts by name, .* but the data set gives \(3, 16, 16\)"),
        (SHAPE, {"heads": 5}, "model.heads=5 must divide model.width=32"),
        (SHAPE, {"channels": 1}, "model.channels=1, but the data set's images have 3 channels"),
        (SHAPE, {"fusion_layer": 3}, "model.fusion_layer=3 must be below model.depth=3, because only"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(shape: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        albef(shape, **options)
