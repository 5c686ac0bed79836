"""Pictures told from noise: what a class-conditional diffusion model learns by, under any method.

Ho et al., NeurIPS 2020 (the model and its training); Nichol and Dhariwal, ICML 2021 (the cosine schedule); Salimans and
Ho, ICLR 2022 (the model predicts velocity).  `python -m fedbench synthesize --run` draws from what was learned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedbench.core.options import Count, require
from fedbench.core.rng import RowRandom
from fedbench.tasks.base import Shape, Task, Training
from fedbench.tasks.classification import check_labels


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
        """A draw of q(x_t | x_0 = x): variance 1 - alpha-bar.  x, noise [..., C, H, W], t [...].  # [..., C, H, W]"""
        a = self._at(t)
        return a.sqrt() * x + (1 - a).sqrt() * noise

    def velocity(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """sqrt(a) noise - sqrt(1 - a) x: what the model predicts, from which picture and noise follow at any t.
        A guess of the noise says nothing of the picture where a is near 0: sampling then starts with a wrong
        brightness, as it did here."""
        a = self._at(t)
        return a.sqrt() * noise - (1 - a).sqrt() * x

    def to(self, device: torch.device | str) -> Schedule:
        """The same on a device."""
        return Schedule(self.signal.to(device))

    def _at(self, t: Tensor) -> Tensor:
        return self.signal[t][..., None, None, None]


class Denoising(Task):
    """The mean squared error of velocity; pictures are scaled to [-1, 1], whatever dataset.normalize says.

    The model is given {"image": a noisy picture [..., C, H, W], "step": how noisy, [...] of 0 to steps - 1, "label":
    its class, one-hot [..., classes]} and answers with a velocity [..., C, H, W].  Step and noise are drawn anew for
    each training batch; in evaluations they are the same for a sample at all times.  steps: T, of the schedule.
    """

    kind = "denoising"
    draws = True

    def __init__(self, steps: Count = 1000):
        self.signal = Schedule.cosine(steps).signal  # [T]
        self.channels = 1
        self.black, self.white = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)  # as pictures have them  [C, 1, 1]

    def for_targets(self, kind: str) -> Task:
        """Itself, for pictures with one class each."""
        require(
            kind in ("classification", self.kind),
            f"task=denoising is for pictures with one class each, and the data set's targets are of {kind}: "
            "choose task=auto",
        )
        return self

    def check(self, targets: np.ndarray, num_classes: int) -> None:
        """Refuse all but int64 [n] from 0 to classes - 1."""
        check_labels(targets, num_classes, 1, self.kind)

    def labels(self, targets: np.ndarray, num_classes: int) -> np.ndarray:
        """The targets."""
        return targets

    def class_counts(self, y: Tensor, num_classes: int) -> Tensor:
        """Of pictures' classes y [n].  # [n, classes]"""
        return F.one_hot(y, num_classes)

    def class_totals(self, y: Tensor, num_classes: int) -> Tensor:
        """Return the number of pictures of each class.  # [classes]"""
        return torch.bincount(y, minlength=num_classes)

    def setup(self, federation: Training) -> None:
        """Learn which numbers black and white are in the inputs; refuse inputs that are no pictures."""
        inputs, device = federation.inputs, federation.device
        found = f"{inputs.dtype} {[*inputs.shape[1:]]}" if hasattr(inputs, "dtype") else f"inputs {', '.join(inputs)}"
        require(
            found.startswith("torch.uint8") and len(inputs.shape) == 4,
            f"task=denoising learns from pictures, uint8 [channels, height, width]; the data set has {found}",
        )
        self.channels = int(inputs.shape[1])
        levels = torch.tensor([0, 255], dtype=torch.uint8, device=device)
        shown = federation.normalized(levels.view(2, 1, 1, 1).repeat(1, self.channels, 1, 1))  # [2, C, 1, 1]
        self.black, self.white = shown
        self.signal = self.signal.to(device)

    @property
    def schedule(self) -> Schedule:
        """By which noise is added."""
        return Schedule(self.signal)

    def input_shape(self, shape: Shape, num_classes: int) -> Shape:
        """Of one sample, as `drawn` gives it."""
        return {"image": shape, "step": (), "label": (num_classes,)}

    def drawn(self, x: Tensor, y: Tensor, random: RowRandom, num_classes: int) -> tuple[dict[str, Tensor], Tensor]:
        """Noisy pictures and their velocities, of pictures x [k, B, C, H, W] of classes y [k, B]."""
        picture = (x - self.black) / (self.white - self.black) * 2 - 1
        t = (random.uniform(x.shape[1]) * len(self.schedule.signal)).long()  # [k, B]
        noise = random.normal(*x.shape[1:])  # [k, B, C, H, W]
        told = {"image": self.schedule.noisy(picture, t, noise), "step": t, "label": F.one_hot(y, num_classes).float()}
        return told, self.schedule.velocity(picture, t, noise)

    def outputs(self, num_classes: int) -> int:
        """C, the channels of a picture."""
        return self.channels

    def output_shape(self, y: Tensor, outputs: int) -> tuple[int, ...]:
        """That of velocities y [B, C, H, W]."""
        return tuple(y.shape)

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        """Mean over a picture's numbers; logits, y [..., B, C, H, W].  # [..., B]"""
        return (logits - y).square().flatten(-3).mean(-1)
