"""A CLIP of 3.4 million numbers, pre-trained here in about two minutes: the offline stand-in.

Images are coloured digits in five styles (data/images/digits_clip.py, the part that no downstream task sees). Captions
say style, colour and digit, or only some of them: incomplete captions and duplicates in a batch are deliberate. They
keep zero-shot below its ceiling.  Symmetric contrastive loss (Radford et al., 2021), AdamW, one cycle.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fedbench.core.weights import read_weights
from fedbench.data._files import whole
from fedbench.data.images import digits_clip
from fedbench.models import clip as towers

log = logging.getLogger(__name__)
TINY = "tiny-clip"
STEPS, BATCH, PEAK_LR, WEIGHT_DECAY, WARM_UP = 800, 128, 2e-3, 0.05, 0.1
LARGEST_SCALE = math.log(100)


@functools.lru_cache(maxsize=2)
def pretrain(data_dir: str, seed: int) -> tuple[Any, Any]:
    """tiny-clip trained on the pre-training digits, from data_dir/cache or anew, and its tokenizer.

    The weights are a function of the seed (and of the machine's arithmetic).  A file that cannot be read is made again.
    """
    _, tokenize = towers.load(TINY, None)
    config = Path(towers.__file__).with_name("tiny-clip.json").read_text()
    recipe = (config, STEPS, BATCH, PEAK_LR, WEIGHT_DECAY, WARM_UP, digits_clip.PRETRAINING, digits_clip.NOISE, seed)
    path = Path(data_dir) / "cache" / f"tiny-clip-{hashlib.sha256(repr(recipe).encode()).hexdigest()[:16]}.pt"
    clip = _new(seed)
    if path.is_file():
        try:
            clip.load_state_dict(read_weights(path))
            return towers.frozen(clip), tokenize
        except (ValueError, RuntimeError) as error:  # the file is damaged or of another model
            log.warning("pre-training again: %s cannot be read (%s)", path, error)
    log.info("pre-training tiny-clip on digits, once: about two minutes, kept in %s", path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # steps this small wait for spinning threads when anything else runs
    _train(clip, tokenize, seed)
    torch.set_num_threads(threads)
    with whole(path) as partial:
        torch.save(clip.state_dict(), partial)
    return towers.frozen(clip), tokenize


def _new(seed: int) -> Any:
    import open_clip

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return open_clip.create_model(TINY, pretrained=None)


def _train(clip: Any, tokenize: Any, seed: int, steps: int = STEPS) -> None:
    from tqdm import tqdm

    rng = np.random.default_rng([seed, 2])
    grey, label = (part[: digits_clip.PRETRAINING] for part in digits_clip.digits())
    optimizer = torch.optim.AdamW(clip.parameters(), lr=PEAK_LR, weight_decay=WEIGHT_DECAY)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=steps, pct_start=WARM_UP)
    clip.train()
    for _ in tqdm(range(steps), desc="pre-training tiny-clip", unit="step"):
        at, colour, style = (rng.integers(most, size=BATCH) for most in (len(label), 3, 5))
        images = torch.from_numpy(digits_clip.draw(grey[at], colour, style, rng))
        texts = tokenize(
            [
                caption(digits_clip.STYLES[s], digits_clip.COLOURS[c], digits_clip.DIGITS[d], rng)
                for s, c, d in zip(style, colour, label[at])
            ]
        )
        x, t = clip.encode_image(images, normalize=True), clip.encode_text(texts, normalize=True)  # [B, D]
        logits, caption_of = clip.logit_scale.exp() * x @ t.T, torch.arange(BATCH)
        loss = (F.cross_entropy(logits, caption_of) + F.cross_entropy(logits.T, caption_of)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        cycle.step()
        with torch.no_grad():
            clip.logit_scale.clamp_(max=LARGEST_SCALE)


def caption(style: str, colour: str, digit: str, rng: np.random.Generator) -> str:
    """Half of the captions are full, 15% a plain photo, 15% without the colour, 20% without the digit."""
    kind = rng.random()
    if kind < 0.5:
        start, what = ("a ", "")[rng.integers(2)], ("", "photo of a ", "picture of the ")[rng.integers(3)]
        return f"{start}{style} {what}{colour} {digit}"
    if kind < 0.65:
        return f"a photo of a {colour} {digit}."
    return f"a {style} {digit}" if kind < 0.8 else f"a {style} {colour}"
