"""Denoising diffusion outside of a federation: training with a running mean of the weights, and DDIM.

Song et al., ICLR 2021 (DDIM, eta = 0: the start alone is drawn); the rest is of fedbench/tasks/denoising.py.
Pictures are in [-1, 1].
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.models.noise_predictor import NoisePredictor
from fedbench.tasks.denoising import Schedule

Predictor = Callable[[dict[str, Tensor]], Tensor]  # of "image", "step" and "label", a velocity


def ddim(
    predict: Predictor, schedule: Schedule, start: Tensor, label: Tensor, steps: int = 50, clip: bool = True
) -> Tensor:
    """Pictures from noise start [B, C, H, W], by `steps` of the schedule's, evenly spread.

    label: their classes, one-hot [B, classes].  clip: keep each guess of the picture within [-1, 1].  # [B, C, H, W]
    """
    times = torch.linspace(len(schedule.alpha_bar) - 1, 0, steps).round().long()
    x = start
    for i, t in enumerate(times):
        a = schedule.alpha_bar[t]
        velocity = predict({"image": x, "step": t.expand(len(x)), "label": label})
        picture = a.sqrt() * x - (1 - a).sqrt() * velocity
        if clip:
            picture = picture.clamp(-1, 1)
        noise = (x - a.sqrt() * picture) / (1 - a).sqrt()
        after = schedule.alpha_bar[times[i + 1]] if i + 1 < len(times) else torch.tensor(1.0)
        x = after.sqrt() * picture + (1 - after).sqrt() * noise
    return x


def average(kept: nn.Module, model: nn.Module, decay: float, step: int) -> None:
    """kept = d kept + (1 - d) model, d = min(decay, step / (step + 10)): early weights are soon forgotten."""
    d = min(decay, step / (step + 10))
    with torch.no_grad():
        for mine, new in zip(kept.parameters(), model.parameters()):
            mine.lerp_(new, 1 - d)


def train(
    images: Tensor,
    labels: Tensor,
    num_classes: int,
    schedule: Schedule,
    *,
    steps: int,
    width: int,
    batch: int,
    lr: float,
    decay: float,
    generator: torch.Generator,
) -> tuple[NoisePredictor, list[float]]:
    """The running mean of the weights of a predictor trained on images [n, C, H, W] in [-1, 1], and each step's loss.

    Adam's rate falls from lr to 0 along a cosine: with a constant one, Frechet distances were 1.4 times as large.
    All is drawn from the generator: first weights (through its seed), batches (with replacement), steps, noise.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
        model = NoisePredictor({"image": tuple(images.shape[1:]), "step": (), "label": (num_classes,)}, width)
    one_hot = F.one_hot(labels, num_classes).float()  # [n, classes]
    kept = copy.deepcopy(model).requires_grad_(False)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr), []
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        chosen = torch.randint(len(images), (batch,), generator=generator)
        t = torch.randint(len(schedule.alpha_bar), (batch,), generator=generator)
        x, noise = images[chosen], torch.randn(batch, *images.shape[1:], generator=generator)
        told = {"image": schedule.add_noise(x, t, noise), "step": t, "label": one_hot[chosen]}
        loss = (model(told) - schedule.velocity(x, t, noise)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        average(kept, model, decay, step)
        losses.append(float(loss.detach()))
    return kept, losses
