"""Training of class-conditional diffusion models of images, by any federated method.

`python -m fedbench synthesize --run` samples images from the trained models.

References:
    Ho et al., NeurIPS 2020: the diffusion model and its training.
    Nichol and Dhariwal, ICML 2021: the cosine schedule.
    Salimans and Ho, ICLR 2022: prediction of the velocity.
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
from fedbench.tasks.base import Shape, Task, TrainingData
from fedbench.tasks.classification import check_labels


@dataclass(frozen=True)
class Schedule:
    """Noise schedule: alpha_bar [T], the fraction of an image's variance that remains after each of T steps.

    Attributes:
        alpha_bar: Fraction of the image's variance that remains after step t, decreasing in (0, 1), [T].
    """

    alpha_bar: Tensor

    @classmethod
    def cosine(cls, steps: int = 1000, offset: float = 0.008) -> Schedule:
        """Return the cosine schedule of Nichol and Dhariwal, ICML 2021, equation 17.

        Its betas, beta_t = 1 - alpha_bar_t / alpha_bar_(t - 1), are limited to 0.999 as in the paper.

        Args:
            steps: T.
            offset: s in the paper, which prevents very small betas in the first steps.
        """
        time = torch.arange(steps + 1, dtype=torch.float64) / steps  # [T + 1], t / T from 0 to 1
        curve = torch.cos((time + offset) / (1 + offset) * math.pi / 2) ** 2  # [T + 1], alpha_bar up to a factor
        beta = (1 - curve[1:] / curve[:-1]).clamp(max=0.999)  # [T]
        return cls(alpha_bar=(1 - beta).cumprod(0).float())

    def add_noise(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Return noisy images, x_t of q(x_t | x_0 = x) in Ho et al., NeurIPS 2020, equation 4.

        Args:
            x: Images, [..., C, H, W].
            t: Steps, [...].
            noise: Standard normal noise, [..., C, H, W].

        Returns:
            sqrt(alpha_bar_t) x + sqrt(1 - alpha_bar_t) noise, [..., C, H, W].
        """
        alpha_bar = self._alpha_bar_at(t)
        return alpha_bar.sqrt() * x + (1 - alpha_bar).sqrt() * noise

    def velocity(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Return the target of the model, the velocity of Salimans and Ho, ICLR 2022.

        The velocity determines image and noise at every t.  Predicted noise would not determine the image where
        alpha_bar is close to 0.

        Args:
            x: Images, [..., C, H, W].
            t: Steps, [...].
            noise: Standard normal noise, [..., C, H, W].

        Returns:
            sqrt(alpha_bar_t) noise - sqrt(1 - alpha_bar_t) x, [..., C, H, W].
        """
        alpha_bar = self._alpha_bar_at(t)
        return alpha_bar.sqrt() * noise - (1 - alpha_bar).sqrt() * x

    def to(self, device: torch.device | str) -> Schedule:
        """Return a schedule with the same alpha_bar [T] on another device."""
        return Schedule(self.alpha_bar.to(device))

    def _alpha_bar_at(self, t: Tensor) -> Tensor:
        """Return alpha_bar[t] for steps t [...], 0 to T - 1, with three axes to multiply images.  # [..., 1, 1, 1]"""
        return self.alpha_bar[t][..., None, None, None]


class Denoising(Task):
    """Mean squared error of the predicted velocity of noisy images.  alpha_bar [T]: the schedule of the noise.

    The model receives {"image": noisy image [..., C, H, W], "step": [...] from 0 to steps - 1, "label": one-hot class
    [..., classes]} and returns a velocity [..., C, H, W].  Images are scaled to [-1, 1], also with dataset.normalize.
    Steps and noise are new for each training batch.  In evaluations, a sample always has the same step and noise.

    Args:
        steps: T, the number of steps of the schedule.
    """

    kind = "denoising"
    has_stochastic_inputs = True

    def __init__(self, steps: Count = 1000):
        self.alpha_bar = Schedule.cosine(steps).alpha_bar  # [T]
        self.channels = 1
        self.black = torch.zeros(1, 1, 1)  # in the normalized inputs, [C, 1, 1]
        self.white = torch.ones(1, 1, 1)  # in the normalized inputs, [C, 1, 1]

    def for_targets(self, kind: str) -> Task:
        """Return this task if the data set has one class per sample (kind "classification" or "denoising").

        Raises:
            ConfigError: The targets are of another kind.
        """
        require(
            kind in ("classification", self.kind),
            f"task=denoising is for images with one class each, but the targets of the data set are of {kind}: "
            f"set task={kind} or task=auto, or choose another data set",
        )
        return self

    def check(self, targets: np.ndarray, num_classes: int) -> None:
        """Raise ConfigError unless targets are int64 labels [n] from 0 to num_classes - 1."""
        check_labels(targets, num_classes, self.kind)

    def labels(self, targets: np.ndarray, num_classes: int) -> np.ndarray:
        """Return the targets [n] int64 unchanged: they are the class labels.  num_classes is not used."""
        return targets

    def class_counts(self, y: Tensor, num_classes: int) -> Tensor:
        """Return a row for each class y[i] of n images: 1 in its column, 0 in the others.  # [n, num_classes] int64"""
        return F.one_hot(y, num_classes)

    def class_totals(self, y: Tensor, num_classes: int) -> Tensor:
        """Return how many of the images with the classes y [n] have each class.  # [num_classes] int64"""
        return torch.bincount(y, minlength=num_classes)

    def setup(self, federation: TrainingData) -> None:
        """Determine the normalized values of black and white pixels, from which images are scaled to [-1, 1].

        Training data may be standardized (dataset.normalize), so that these values differ by channel.  They are set as
        ``black`` and ``white``, [channels, 1, 1] each.

        Raises:
            ConfigError: The inputs are not images.
        """
        inputs, device = federation.inputs, federation.device
        if isinstance(inputs, Tensor):
            found = f"samples of dtype {inputs.dtype} and shape {[*inputs.shape[1:]]}"
        else:
            found = f"the inputs {', '.join(inputs)}"
        require(
            isinstance(inputs, Tensor) and inputs.dtype == torch.uint8 and inputs.ndim == 4,
            f"task=denoising needs images, uint8 [channels, height, width], but the data set has {found}: choose a "
            "data set of images, such as dataset=mnist",
        )
        self.channels = int(inputs.shape[1])
        levels = torch.tensor([0, 255], dtype=torch.uint8, device=device)  # of stored images
        self.black, self.white = federation.normalized(levels.view(2, 1, 1, 1).repeat(1, self.channels, 1, 1))
        self.alpha_bar = self.alpha_bar.to(device)

    @property
    def schedule(self) -> Schedule:
        """The noise schedule, on the CPU before `setup` and on the device of the training data after it."""
        return Schedule(self.alpha_bar)

    def input_shape(self, shape: Shape, num_classes: int) -> Shape:
        """Return the shapes of the model's inputs by name, for one image of the given shape [channels, H, W].

        They are {"image": shape, "step": (), "label": (num_classes,)}."""
        return {"image": shape, "step": (), "label": (num_classes,)}

    def stochastic_inputs(
        self, x: Tensor, y: Tensor, random: RowRandom, num_classes: int
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Add random noise to images at random steps t of the diffusion.

        Args:
            x: Normalized images of k clients, [k, B, C, H, W].
            y: Their classes, [k, B].
            random: A generator for each of k.  In training, they are keyed by client and step.  In evaluations, by
                sample (k = n, B = 1).
            num_classes: The number of classes.

        Returns:
            The inputs of the model by name: image (the noisy one) [k, B, C, H, W], step [k, B] and label (one-hot)
            [k, B, classes].  And the velocities that it must predict, [k, B, C, H, W].
        """
        image = (x - self.black) / (self.white - self.black) * 2 - 1  # black and white pixels become -1 and 1
        t = (random.uniform(x.shape[1]) * len(self.alpha_bar)).long()  # [k, B], from 0 to the number of steps - 1
        noise = random.normal(*x.shape[1:])  # [k, B, C, H, W]
        label = F.one_hot(y, num_classes).float()
        inputs = {"image": self.schedule.add_noise(image, t, noise), "step": t, "label": label}
        # velocity: sqrt(alpha_bar) noise - sqrt(1 - alpha_bar) image
        return inputs, self.schedule.velocity(image, t, noise)

    def outputs(self, num_classes: int) -> int:
        """Return the number of channels of an image: the model predicts an image.  num_classes is not used."""
        return self.channels

    def output_shape(self, y: Tensor, outputs: int) -> tuple[int, ...]:
        """Return the shape of the model's outputs for a batch, which is that of the velocities y [B, C, H, W]."""
        return tuple(y.shape)

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        """Return the mean squared error of each image.

        Args:
            logits: Predicted velocities, [..., B, C, H, W].
            y: Velocities, [..., B, C, H, W].
            class_mask: Not used: the classes are inputs of the model.

        Returns:
            Errors, [..., B].
        """
        return (logits - y).square().flatten(-3).mean(-1)
