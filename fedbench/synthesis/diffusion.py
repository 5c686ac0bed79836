"""Denoising diffusion: the schedule, training with a running mean of the weights, and DDIM.

Ho et al., NeurIPS 2020 (the model and its training); Nichol and Dhariwal, ICML 2021 (the cosine schedule); Salimans and
Ho, ICLR 2022 (the model predicts velocity); Song et al., ICLR 2021 (DDIM, eta = 0: the start alone is drawn).
Pictures are in [-1, 1].
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedbench.synthesis.noise_predictor import NoisePredictor

Predictor = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Schedule:
    """signal [T]: alpha-bar, the share of a picture's variance that is left after step t; decreasing, in (0, 1)."""

    signal: Tensor

    @classmethod
    def cosine(cls, steps: int = 1000, offset: float = 0.008) -> Schedule:
        """alpha-bar of step t is the product of 1 - beta, no beta above 0.999."""
        at = torch.arange(steps + 1, dtype=torch.float64) / steps
        curve = torch.cos((at + offset) / (1 + offset) * math.pi / 2) ** 2  # [T + 1]
        beta = (1 - curve[1:] / curve[:-1]).clamp(max=0.999)
        return cls((1 - beta).cumprod(0).float())

    def noisy(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """A draw of q(x_t | x_0 = x): variance 1 - alpha-bar.  x, noise [B, ...], t [B].  # [B, ...]"""
        a = self.signal[t].view(-1, *[1] * (x.dim() - 1))
        return a.sqrt() * x + (1 - a).sqrt() * noise

    def velocity(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """sqrt(a) noise - sqrt(1 - a) x: what the model predicts, from which picture and noise follow at any t.
        A guess of the noise says nothing of the picture where a is near 0: sampling then starts with a wrong
        brightness, as it did here."""
        a = self.signal[t].view(-1, *[1] * (x.dim() - 1))
        return a.sqrt() * noise - (1 - a).sqrt() * x


def ddim(
    predict: Predictor, schedule: Schedule, start: Tensor, labels: Tensor, steps: int = 50, clip: bool = True
) -> Tensor:
    """Pictures from noise start [B, C, H, W] of classes labels [B], by `steps` of the schedule's, evenly spread.

    clip: keep each guess of the picture within [-1, 1].  # [B, C, H, W]
    """
    times = torch.linspace(len(schedule.signal) - 1, 0, steps).round().long()
    x = start
    for i, t in enumerate(times):
        a = schedule.signal[t]
        velocity = predict(x, t.expand(len(x)), labels)
        picture = a.sqrt() * x - (1 - a).sqrt() * velocity
        if clip:
            picture = picture.clamp(-1, 1)
        noise = (x - a.sqrt() * picture) / (1 - a).sqrt()
        after = schedule.signal[times[i + 1]] if i + 1 < len(times) else torch.tensor(1.0)
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

    All is drawn from the generator: first weights (through its seed), batches (with replacement), steps, noise.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
        model = NoisePredictor(tuple(images.shape[1:]), num_classes, width)
    kept = copy.deepcopy(model).requires_grad_(False)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr), []
    for step in range(steps):
        chosen = torch.randint(len(images), (batch,), generator=generator)
        t = torch.randint(len(schedule.signal), (batch,), generator=generator)
        x, noise = images[chosen], torch.randn(batch, *images.shape[1:], generator=generator)
        loss = (model(schedule.noisy(x, t, noise), t, labels[chosen]) - schedule.velocity(x, t, noise)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average(kept, model, decay, step)
        losses.append(float(loss.detach()))
    return kept, losses
