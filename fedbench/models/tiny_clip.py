"""A CLIP with 3.4 million parameters that is pre-trained on this machine, for tests and examples without downloads.

Images are coloured digits in five styles, from the pre-training part of data/images/digits_clip.py.  Captions name
style, colour and digit, or some of them.  Incomplete and repeated captions leave room for prompts to improve on
zero-shot.  Symmetric contrastive loss (Radford et al., 2021), AdamW, one-cycle schedule.
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
from fedbench.data._files import written_atomically
from fedbench.data.images import digits_clip
from fedbench.models import clip as towers

log = logging.getLogger(__name__)
TINY = "tiny-clip"
STEPS, BATCH, PEAK_LR, WEIGHT_DECAY, WARM_UP = 800, 128, 2e-3, 0.05, 0.1
LARGEST_SCALE = math.log(100)  # maximum of logit_scale, as in CLIP


@functools.lru_cache(maxsize=2)
def pretrain(data_dir: str, seed: int) -> tuple[Any, Any]:
    """Return the pre-trained tiny-clip, from a file in data_dir/cache if it can be read, and its tokenizer.

    Args:
        data_dir: Folder of data.
        seed: Seed of the weights, which also depend on the arithmetic of the machine.

    Returns:
        The model, frozen and in evaluation mode, and its tokenizer.
    """
    _, tokenize = towers.load(TINY, pretrained=None)  # towers: models/clip.py; only the tokenizer is needed
    config = Path(towers.__file__).with_name("tiny-clip.json").read_text()
    # The name of the file has a hash of all that determines the weights, so that a change of them pre-trains again.
    recipe = (config, STEPS, BATCH, PEAK_LR, WEIGHT_DECAY, WARM_UP, digits_clip.PRETRAINING, digits_clip.NOISE, seed)
    path = Path(data_dir) / "cache" / f"tiny-clip-{hashlib.sha256(repr(recipe).encode()).hexdigest()[:16]}.pt"
    clip = _build(seed)
    if path.is_file():
        try:
            clip.load_state_dict(read_weights(path))
            return towers.frozen(clip), tokenize
        except (ValueError, RuntimeError) as error:  # the file is damaged or of another model
            log.warning("%s cannot be read (%s), so tiny-clip is pre-trained again", path, error)
    log.info("pre-training tiny-clip on digits (once, about two minutes); the weights are stored in %s", path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for steps this small, threads cost more than they save
    _train(clip, tokenize, seed)
    torch.set_num_threads(threads)
    with written_atomically(path) as partial:
        torch.save(clip.state_dict(), partial)
    return towers.frozen(clip), tokenize


def _build(seed: int) -> Any:
    """Return an open_clip model of the configuration tiny-clip, with random weights that the seed determines."""
    import open_clip

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return open_clip.create_model(TINY, pretrained=None)


def _train(clip: Any, tokenize: Any, seed: int, steps: int = STEPS) -> None:
    """Pre-train a model in place on random batches of digits and captions.

    Args:
        clip: The model.
        tokenize: Its tokenizer.
        seed: Seed of images and captions.
        steps: Number of batches.
    """
    from tqdm import tqdm

    rng = np.random.default_rng([seed, 2])  # 2 separates these numbers from other uses of the seed
    grey, label = (part[: digits_clip.PRETRAINING] for part in digits_clip.digits())
    optimizer = torch.optim.AdamW(clip.parameters(), lr=PEAK_LR, weight_decay=WEIGHT_DECAY)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=steps, pct_start=WARM_UP)
    clip.train()
    for _ in tqdm(range(steps), desc="pre-training tiny-clip", unit="step"):
        # Indices of a random digit, of one of 3 colours and of one of 5 styles for each image.
        sample, colour, style = (rng.integers(number, size=BATCH) for number in (len(label), 3, 5))
        images = torch.from_numpy(digits_clip.render(grey[sample], colour, style, rng))
        captions = [
            caption(digits_clip.STYLES[s], digits_clip.COLOURS[c], digits_clip.DIGITS[d], rng)
            for s, c, d in zip(style, colour, label[sample])
        ]
        x = clip.encode_image(images, normalize=True)  # [B, D]
        t = clip.encode_text(tokenize(captions), normalize=True)  # [B, D]
        logits = clip.logit_scale.exp() * x @ t.T  # [B, B]
        target = torch.arange(BATCH)
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        cycle.step()
        with torch.no_grad():
            clip.logit_scale.clamp_(max=LARGEST_SCALE)  # log(100), as in CLIP


def caption(style: str, colour: str, digit: str, rng: np.random.Generator) -> str:
    """Return a random caption of an image.

    Half of the captions are complete, 15% do not name the style, 15% the colour, 20% the digit.

    Args:
        style: Name of the style, such as "noisy".
        colour: Name of the colour, such as "red".
        digit: The digit as a word, such as "three".
        rng: Random number generator.
    """
    draw = rng.random()
    if draw < 0.5:
        article = ("a ", "")[rng.integers(2)]
        medium = ("", "photo of a ", "picture of the ")[rng.integers(3)]
        return f"{article}{style} {medium}{colour} {digit}"
    if draw < 0.65:
        return f"a photo of a {colour} {digit}."
    return f"a {style} {digit}" if draw < 0.8 else f"a {style} {colour}"
