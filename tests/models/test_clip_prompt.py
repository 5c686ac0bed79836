"""The prompt on a frozen CLIP: text features against open_clip's own, image features, and what the federation holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from tiny import CPU, arrays_of, compose, engine_on, split_of
from torch import Tensor

from fedbench.core.options import ConfigError
from fedbench.core.rng import RowRandom
from fedbench.data.base import TEST, TRAIN
from fedbench.data.images import digits_clip
from fedbench.engine.cohort import Cohort
from fedbench.models import clip as towers
from fedbench.models import clip_prompt, tiny_clip
from fedbench.models.clip_prompt import CLIPPrompt
from fedbench.simulation import build, evaluate

NAMES = ["dog", "ice cream", "grand_piano", "maple leaf"]
BACKBONES = ["tiny-clip", "RN50-quickgelu", "ViT-B-16-quickgelu"]


@pytest.fixture(scope="module", params=BACKBONES)
def loaded(request: pytest.FixtureRequest) -> Any:
    return towers.load(request.param, None)


def words(clip: Any, tokenize: Any, text: str) -> Tensor:
    tokens = tokenize([text])
    return clip.token_embedding(tokens[0, 1 : int(tokens.argmax())])


def by_open_clip(clip: Any, tokenize: Any, texts: list[str]) -> Tensor:
    with torch.no_grad():
        return F.normalize(clip.encode_text(tokenize(texts)), dim=-1)


def test_text_features_are_those_of_encode_text(loaded: Any):
    clip, tokenize = loaded
    tower = towers.TextTower(clip, tokenize, NAMES, 4)
    found = tower(words(clip, tokenize, "a photo of a"))
    wanted = by_open_clip(clip, tokenize, ["a photo of a {}.".format(n.replace("_", " ")) for n in NAMES])
    assert tower.total < 12  # nothing behind the last EOT is computed
    assert (found - wanted).abs().max() < 1e-6


def test_tokens_come_with_the_pooled_feature_itself(loaded: Any):
    tower = towers.ImageTower(loaded[0])
    x = torch.randn(2, 3, tower.size, tower.size, generator=torch.Generator().manual_seed(0))
    pooled, tokens = tower.with_tokens(x)
    torch.testing.assert_close(pooled, tower.pooled(x), rtol=0, atol=1e-6)
    patches = {32: 16, 224: 49 if hasattr(loaded[0].visual, "attnpool") else 196}[tower.size]
    assert tokens.shape == (2, patches, pooled.shape[1])


def test_every_patch_token_is_projected_as_the_class_token_is(loaded: Any):
    """The row of the pooled feature among all rows: ask for the tokens of a tower whose class token is a patch's."""
    clip = loaded[0]
    if hasattr(clip.visual, "attnpool"):
        x = torch.randn(1, 3, 224, 224)
        tokens = towers.ImageTower(clip).with_tokens(x)[1]
        assert not torch.allclose(tokens[0, 0], tokens[0, 1])
        return
    visual, size = clip.visual, towers.ImageTower(clip).size
    x = torch.randn(1, 3, size, size)
    after = visual.ln_post(visual.transformer(visual._embeds(x)))  # [1, 1 + M, width]
    torch.testing.assert_close(towers.ImageTower(clip).with_tokens(x)[1], after[:, 1:] @ visual.proj)


def module(**options: Any) -> CLIPPrompt:
    torch.manual_seed(0)
    return CLIPPrompt((3, 8, 8), len(NAMES), NAMES, backbone="tiny-clip", pretrained=None, context=5, **options)


def naive(m: CLIPPrompt, P: Tensor) -> Tensor:
    """Text features one class after the other, all 32 positions, by open_clip's own blocks.  P [l, d] -> [C, D]"""
    clip, rows = m.clip, []
    for name in NAMES:
        tokens = m.tokenize([" ".join(["X"] * m.length) + f" {name.replace('_', ' ')}."])
        x = clip.token_embedding(tokens)[0]
        x = torch.cat([x[:1], P, x[1 + m.length :]])[None] + clip.positional_embedding
        x = clip.ln_final(clip.transformer(x, attn_mask=clip.attn_mask))
        rows.append(x[0, tokens.argmax()] @ clip.text_projection)
    return F.normalize(torch.stack(rows), dim=-1)


def test_gradients_of_the_shared_prefix_are_those_of_the_plain_tower():
    m = module()
    P = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).mul_(0.1).requires_grad_()
    target = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    (mine,) = torch.autograd.grad((m.text(P) * target).sum(), P)
    (plain,) = torch.autograd.grad((naive(m, P) * target).sum(), P)
    torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5)


def test_contexts_side_by_side_are_contexts_one_by_one():
    m, P = module(), 0.1 * torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1))
    with torch.enable_grad():
        together = m.text(P.clone().requires_grad_())
        for one, row in zip(P, together):
            torch.testing.assert_close(m.text(one.clone().requires_grad_()), row, rtol=1e-5, atol=1e-6)


def test_remembered_text_features_follow_the_prompts():
    m, P = module(), 0.1 * torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1))
    first = m.text(P).clone()
    assert m.text(P[:2]) is not None and torch.equal(m.text(P[:2]), first[:2])
    P[1] += 0.1  # in place, as training does
    again = m.text(P)
    assert torch.equal(again[0], first[0])
    assert not torch.allclose(again[1], first[1])
    torch.testing.assert_close(again[1], naive(m, P[1]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(m.text(P[2]), naive(m, P[2]), rtol=1e-4, atol=1e-5)


def test_logits_are_scaled_cosines():
    m = module()
    x = F.normalize(torch.randn(6, 64, generator=torch.Generator().manual_seed(0)), dim=-1)
    T = m.text(torch.cat([m.shared, m.own]).detach())
    torch.testing.assert_close(m(x), m.scale * x @ T.T)
    assert m.scale == pytest.approx(1 / 0.07, rel=1e-4)


def test_a_context_of_words_starts_as_the_plain_template():
    m = module(init="a photo of a")
    assert m.length == 4
    x = F.normalize(torch.randn(6, 64, generator=torch.Generator().manual_seed(0)), dim=-1)
    torch.testing.assert_close(m(x), m.scale * x @ m.templated("a photo of a {}.").T, rtol=1e-4, atol=1e-5)


def test_a_template_needs_a_place_for_the_name():
    with pytest.raises(ConfigError, match=r"algorithm.template='a photo' has no place for the class name: write \{\}"):
        module().templated("a photo")


def test_shared_tokens_are_the_first_ones():
    assert [(m.shared.shape[0], m.own.shape[0]) for m in (module(), module(shared=5), module(shared=0))] == [
        (2, 3),
        (5, 0),
        (0, 5),
    ]
    with pytest.raises(ConfigError, match=r"model.shared=6 must be at most 5"):
        module(shared=6)


def test_a_context_too_long_for_the_backbone_is_refused():
    with pytest.raises(ConfigError, match=r"model.context=40.*has 45 tokens, but model.backbone reads 32"):
        CLIPPrompt((3, 8, 8), 4, NAMES, backbone="tiny-clip", pretrained=None, context=40)


@pytest.mark.parametrize(
    ("backbone", "pretrained", "said"),
    [
        ("RN51", None, "model.backbone=RN51 is not a model of open_clip"),
        ("RN50", "openai", "use RN50-quickgelu"),
        ("ViT-B-16-quickgelu", "laion2b_s34b_b88k", "neither a file nor weights of open_clip"),
        ("ViT-B-16", "here/there.pt", "model.pretrained=here/there.pt is neither a file nor weights"),
    ],
)
def test_wrong_weights_are_one_sentence(backbone: str, pretrained: str | None, said: str):
    with pytest.raises(ConfigError, match=said):
        towers.load(backbone, pretrained)


def test_a_checkpoint_file_of_another_model_is_refused(tmp_path: Path):
    torch.save({"weight": torch.zeros(2)}, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match="could not be loaded"):
        towers.load("tiny-clip", str(tmp_path / "x.pt"))


def test_a_checkpoint_file_is_read(tmp_path: Path):
    clip, _ = towers.load("tiny-clip", None)
    state = {n: t + 1 if n == "logit_scale" else t for n, t in clip.state_dict().items()}
    torch.save(state, tmp_path / "x.pt")
    torch.testing.assert_close(towers.load("tiny-clip", str(tmp_path / "x.pt"))[0].logit_scale, clip.logit_scale + 1)


# -- images -------------------------------------------------------------------------------------------------
SIZES = (6, 9, 5)


def config(tmp_path: Path, *overrides: str) -> DictConfig:
    return compose(
        [
            "model=clip_prompt_tiny",
            "model.pretrained=null",
            "model.context=4",
            "algorithm=fedavg",
            f"data_dir={tmp_path}",
            "local.batch_size=4",
            "optimizer.lr=0.1",
            *overrides,
        ]
    )


def pictures(dtype: Any = np.uint8, side: tuple = (40, 40)) -> Any:
    rng = np.random.default_rng(0)
    n = 2 * sum(SIZES)
    x = rng.integers(0, 256, (n, 3, *side)).astype(np.uint8)
    x = x if dtype is np.uint8 else (x / 255).astype(dtype)
    y = np.arange(n) % 3
    for image, label in zip(x, y):
        image[label, 10:30] = image.max()  # something to learn
    return arrays_of(x, y.astype(np.int64), 3, class_names=["red", "green", "blue"], mean=(0.5,) * 3, std=(0.2,) * 3)


def test_the_federation_holds_features_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cfg, arrays, split = config(tmp_path), pictures(), split_of(SIZES)
    f = build.federation(cfg, arrays, split, CPU)
    assert isinstance(f.inputs, Tensor) and f.inputs.shape == (40, 64)
    torch.testing.assert_close(f.inputs.norm(dim=1), torch.ones(40))
    clip, _ = towers.load("tiny-clip", None)
    x = F.interpolate(torch.from_numpy(arrays.inputs[3:4]).float() / 255, (32, 32), mode="bicubic", antialias=True)
    x = (x.clamp(0, 1) - torch.tensor(clip_prompt.CLIP_MEAN).view(3, 1, 1)) / torch.tensor(clip_prompt.CLIP_STD).view(
        3, 1, 1
    )
    torch.testing.assert_close(f.inputs[3:4], F.normalize(clip.encode_image(x), dim=-1), rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(CLIPPrompt, "encode", lambda *_: pytest.fail("encoded again"))
    assert torch.equal(build.federation(cfg, arrays, split, CPU).inputs, f.inputs)  # type: ignore
    arrays.inputs[3, 0, 0, 0] ^= 255
    with pytest.raises(pytest.fail.Exception):
        build.federation(cfg, arrays, split, CPU)


def test_official_scaling_is_the_sets_own_and_before_the_resize(tmp_path: Path):
    arrays = pictures()
    arrays.published_scaling = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    f = build.federation(config(tmp_path, "model.norm=official"), arrays, split_of(SIZES), CPU)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in arrays.published_scaling)
    x = (torch.from_numpy(arrays.inputs[:1]).float() / 255 - mean) / std
    x = F.interpolate(x, (32, 32), mode="bilinear", align_corners=False)
    wanted = F.normalize(towers.load("tiny-clip", None)[0].encode_image(x), dim=-1)
    torch.testing.assert_close(f.inputs[:1], wanted, rtol=1e-4, atol=1e-5)  # type: ignore
    with pytest.raises(ConfigError, match=r"model.norm=official needs uint8 images"):
        build.federation(config(tmp_path, "model.norm=official"), pictures(np.float32), split_of(SIZES), CPU)


def test_pictures_that_are_not_square_lose_their_long_ends():
    m = module()
    wide = torch.randint(0, 256, (2, 3, 32, 48), dtype=torch.uint8)
    torch.testing.assert_close(m.fit(wide), m.fit(wide[..., 8:40]))


def test_a_crop_of_everything_is_the_picture_and_flips_are_flips():
    m, x = module(), torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    whole = torch.tensor([[1.0, 0.5, 0.0, 0.0, 0.9], [1.0, 0.5, 0.0, 0.0, 0.1]])
    found = m.cropped(x, whole)
    torch.testing.assert_close(found[0], m.fit(x)[0])
    torch.testing.assert_close(found[1], m.fit(x)[1].flip(-1))


def test_crops_have_the_area_that_was_drawn():
    m = module()
    ramp = torch.arange(64).repeat(64, 1).expand(1, 3, 64, 64).to(torch.uint8)  # value = column
    small = m.cropped(ramp, torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.9]]))
    values = small[0, 0] * clip_prompt.CLIP_STD[0] + clip_prompt.CLIP_MEAN[0]
    assert 255 * (values.max() - values.min()) == pytest.approx(64 * 0.08**0.5, abs=2)  # 18 columns


def views(tmp_path: Path, augment: str) -> tuple[Any, Any]:
    cfg = config(tmp_path, f"model.augment={augment}", "model.views=3", "local.epochs=1")
    return cfg, build.federation(cfg, pictures(), split_of(SIZES), CPU)


def test_cached_views_are_drawn_for_training_only(tmp_path: Path):
    _, f = views(tmp_path, "cached_views")
    plain = build.federation(config(tmp_path), pictures(), split_of(SIZES), CPU)
    index = torch.tensor([[0, 1, 2, 3]])
    torch.testing.assert_close(f.gather(index)[0], plain.gather(index)[0])
    raw, y = f.gather(index, training=True)
    drawn = torch.cat([f.augment(raw, y, RowRandom(torch.tensor([key])))[0] for key in range(40)])  # type: ignore
    assert not (drawn[:, 0] == plain.inputs[0]).all(1).any()  # type: ignore
    assert len(drawn[:, 0].unique(dim=0)) == len(drawn[:, 3].unique(dim=0)) == 3
    again, same = f.augment(raw, y, RowRandom(torch.tensor([7])))  # type: ignore
    assert same is y
    assert torch.equal(again[0], drawn[7])


def test_live_views_differ_at_every_visit_and_evaluation_does_not(tmp_path: Path):
    _, f = views(tmp_path, "live")
    plain = build.federation(config(tmp_path), pictures(), split_of(SIZES), CPU)
    index = torch.tensor([[0, 1, 2, 3]])
    torch.testing.assert_close(f.gather(index)[0], plain.gather(index)[0])
    raw, y = f.gather(index, training=True)
    a, b, c = (f.augment(raw, y, RowRandom(torch.tensor([key])))[0] for key in (1, 1, 2))  # type: ignore
    assert torch.equal(a, b) and not torch.allclose(a, c)
    torch.testing.assert_close(a.norm(dim=-1), torch.ones(1, 4))


@pytest.mark.parametrize("augment", ["none", "cached_views", "live"])
def test_training_moves_the_prompt_and_never_the_backbone(tmp_path: Path, augment: str):
    cfg, f = views(tmp_path, augment)
    before = {n: t.clone() for n, t in towers.load("tiny-clip", None)[0].state_dict().items()}
    model = build.model(cfg, f)
    assert model.size == 4 * 64 and model.trained.size == model.size
    assert model.columns["prompt"].size == model.size and model.columns["base"].size == model.size // 2
    e = engine_on(f, model, build.make(cfg.optimizer), batch_size=4, epochs=4)
    w = model.init_row()
    out = Cohort(e, np.arange(3), 0).train(w)
    assert (out.theta != w).all()
    cohort = Cohort(e, np.arange(3), 0)
    assert (cohort.loss(out.theta, "train") < cohort.loss(w, "train")).all()
    after = towers.load("tiny-clip", None)[0].state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before)


def test_images_are_needed(tmp_path: Path):
    x = np.zeros((40, 5), np.float32)
    with pytest.raises(ConfigError, match="model=clip_prompt needs images"):
        build.federation(config(tmp_path), arrays_of(x, np.arange(40) % 3, 3), split_of(SIZES), CPU)


def test_augmentation_before_the_tower_is_refused(tmp_path: Path):
    cfg = config(tmp_path, "dataset.augment={flip: true}")
    with pytest.raises(ConfigError, match=r"dataset.augment must be null, because model=.* has a frozen encoder"):
        build.federation(cfg, pictures(), split_of(SIZES), CPU)


def test_a_layer_that_a_prompt_lacks_is_named(tmp_path: Path):
    cfg = config(tmp_path)
    model = build.model(cfg, build.federation(cfg, pictures(), split_of(SIZES), CPU))
    with pytest.raises(ConfigError, match="never calls a layer named 'head'"):
        model.features(model.init_row(), torch.zeros(2, 64))


# -- the stand-in -------------------------------------------------------------------------------------------
def test_digits_are_drawn_in_colours_and_styles():
    grey, label = digits_clip.digits()
    assert grey.shape == (1797, 32, 32) and grey.min() == 0 and grey.max() == 1
    assert np.bincount(label).min() > 170
    at, rng = np.zeros(5, int), np.random.default_rng(0)
    x = digits_clip.render(grey[at], at + 1, np.arange(5), rng) * digits_clip.STD + digits_clip.MEAN  # green
    np.testing.assert_allclose(x[0, 1], grey[0], atol=1e-6)
    np.testing.assert_allclose(x[0, 0], 0.2 * grey[0], atol=1e-6)
    assert (x[1] - x[0]).std() == pytest.approx(digits_clip.NOISE, rel=0.1)
    np.testing.assert_allclose(x[2], 1 - x[0], atol=1e-6)
    np.testing.assert_allclose(x[3], 0.3 * x[0] + 0.35, atol=1e-6)
    np.testing.assert_allclose(x[4], np.rot90(x[0], axes=(1, 2)), atol=1e-6)


def test_no_digit_is_in_both_parts():
    clean = digits_clip.DigitsCLIP("clean").load()
    grey = np.asarray(clean.inputs).max(1).reshape(len(clean), -1)  # colour taken away
    parts = [set(map(bytes, np.ascontiguousarray(grey[clean.split == part]))) for part in (TRAIN, TEST)]
    assert len(clean) == 2691 and not parts[0] & parts[1]
    pretraining = digits_clip.digits()[0][: digits_clip.PRETRAINING]
    assert not set(map(bytes, (pretraining.reshape(900, -1) - digits_clip.MEAN) / np.float32(digits_clip.STD))) & (
        parts[0] | parts[1]
    )


def test_all_styles_are_silos():
    every = digits_clip.DigitsCLIP("all").load()
    assert every.num_classes == 30 and len(every) == 5 * 2691
    assert every.domain_names == list(digits_clip.STYLES) and np.bincount(every.domain).tolist() == [2691] * 5


def test_pre_training_is_kept_and_a_damaged_file_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiny_clip, "STEPS", 2)
    train, calls = tiny_clip._train, []
    monkeypatch.setattr(tiny_clip, "_train", lambda *a: calls.append(train(*a, steps=2)))

    def fresh(seed: int = 0) -> dict:
        tiny_clip.pretrain.cache_clear()
        return tiny_clip.pretrain(str(tmp_path), seed)[0].state_dict()

    first, again = fresh(), fresh()
    assert len(calls) == 1 and all(torch.equal(first[n], again[n]) for n in first)
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(file.read_bytes()[:1000])
    third = fresh()
    assert len(calls) == 2 and all(torch.allclose(first[n], third[n], atol=1e-5) for n in first)
    assert not torch.equal(fresh(1)["visual.proj"], first["visual.proj"])
    tiny_clip.pretrain.cache_clear()


def test_captions_name_what_is_seen():
    rng = np.random.default_rng(0)
    said = [tiny_clip.caption("noisy", "red", "two", rng) for _ in range(400)]
    full = sum(all(w in s for w in ("noisy", "red", "two")) for s in said)
    assert 160 < full < 240 and all("noisy" in s or s == "a photo of a red two." for s in said)
    assert any("red" not in s for s in said) and any("two" not in s for s in said)


# -- the real architectures ---------------------------------------------------------------------------------
FAMILY = ["local", "fedavg", "fedprox", "fedper", "fedamp", "pfedprompt", "fedotp", "pfedmoap", "zero_shot"]


@pytest.mark.slow
@pytest.mark.parametrize("backbone", BACKBONES[1:])
def test_the_family_plays_on_the_real_architectures(backbone: str, tmp_path: Path):
    """Random weights, ten images, two rounds: finite scores, a prompt of 16 x 512 numbers (32 KiB) each way, and
    K + 1 prompts down to a client of pFedMoAP's second round."""
    for method in FAMILY:
        cfg = compose(
            [
                f"algorithm={method}",
                "model=clip_prompt",
                f"model.backbone={backbone}",
                f"data_dir={tmp_path}",
                "model.pretrained=null",
                "local.batch_size=4",
                "local.epochs=1",
                "optimizer.lr=0.002",
            ]
        )
        f = build.federation(cfg, pictures(side=(64, 64)), split_of((2, 4, 3)), CPU)
        e = engine_on(f, build.model(cfg, f), build.make(cfg.optimizer), batch_size=4, epochs=1, rounds=2)
        a = build.algorithm(cfg)
        a.check(f, e.model, e.optimizer)
        a.setup(f, e.model, e.rows)
        cohorts = [Cohort(e, np.arange(3), r) for r in range(2)]
        for cohort in cohorts:
            a.round(cohort)
        scores = evaluate.personal(a, e, np.arange(3), 1, True)
        assert np.isfinite(scores["loss"]).all(), method
        down, up = ([getattr(c.cost, part) / 3 / 32768 for c in cohorts] for part in ("bytes_down", "bytes_up"))
        nothing, half = [0, 0], [0.5, 0.5]
        assert (down, up) == {
            "local": (nothing, nothing),
            "zero_shot": (nothing, nothing),
            "fedper": (half, half),
            "pfedmoap": ([1, 3], [1, 1]),
        }.get(method, ([1, 1], [1, 1])), method


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", FAMILY)
def test_the_family_on_a_gpu(method: str, tmp_path: Path):
    """The backbone is shared by all of a process: it moves to the GPU once, and models are built after that."""
    cfg = config(tmp_path, f"algorithm={method}", "model.init='a photo'", "hardware.executor=vmap", "rounds=2")
    arrays, split = pictures(), split_of(SIZES)
    for device in ("cuda", "cpu"):
        cfg.hardware.device = device
        e = build.engine(cfg, arrays, split)
        a = build.algorithm(cfg)
        a.setup(e.federation, e.model, e.rows)
        for r in range(2):
            a.round(Cohort(e, np.arange(3), r))
        assert np.isfinite(evaluate.personal(a, e, np.arange(3), 1, True)["loss"]).all()
