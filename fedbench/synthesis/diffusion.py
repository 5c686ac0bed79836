"""Denoising diffusion outside of a federation: training with a moving average of the weights, and sampling by DDIM.

Images have values in [-1, 1].  fedbench/tasks/denoising.py defines the noise schedule and the velocity.

References:
    Song et al., ICLR 2021 (DDIM, eta = 0: only the initial noise is random).
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.models.noise_predictor import NoisePredictor
from fedbench.tasks.denoising import Schedule

# From a dict of noisy "image" [B, C, H, W], "step" [B] and one-hot "label" [B, classes] to a velocity [B, C, H, W].
Predictor = Callable[[dict[str, Tensor]], Tensor]


def ddim(
    predict: Predictor, schedule: Schedule, start: Tensor, label: Tensor, steps: int = 50, clip: bool = True
) -> Tensor:
    """Sample images by DDIM (Song et al., ICLR 2021), without noise but the initial one.

    Args:
        predict: The function that predicts the velocity sqrt(alpha_bar) noise - sqrt(1 - alpha_bar) image, from which
            image and noise follow.
        schedule: The noise schedule: alpha_bar [T] is the fraction of the image's variance after each step.
        start: The initial noise [B, C, H, W].
        label: The one-hot classes [B, classes].
        steps: The number of steps, spread evenly over the schedule.
        clip: Whether to clip the predicted images to [-1, 1] in each step.

    Returns:
        Images [B, C, H, W].
    """
    times = torch.linspace(len(schedule.alpha_bar) - 1, 0, steps).round().long()  # from the noisiest step T - 1 to 0
    x = start  # the noisy images, from pure noise to images without noise
    for i, t in enumerate(times):
        alpha_bar = schedule.alpha_bar[t]
        velocity = predict({"image": x, "step": t.expand(len(x)), "label": label})
        image = alpha_bar.sqrt() * x - (1 - alpha_bar).sqrt() * velocity
        if clip:
            image = image.clamp(-1, 1)
        noise = (x - alpha_bar.sqrt() * image) / (1 - alpha_bar).sqrt()
        # 1 after the last step: no noise is left
        next_alpha_bar = schedule.alpha_bar[times[i + 1]] if i + 1 < len(times) else torch.tensor(1.0)
        x = next_alpha_bar.sqrt() * image + (1 - next_alpha_bar).sqrt() * noise  # equation 12 with sigma = 0
    return x


def update_average(average: nn.Module, model: nn.Module, decay: float, step: int) -> None:
    """Update a moving average of parameters in place.

    Args:
        average: The module with the average.
        model: The module with the current parameters.
        decay: The decay of late steps.  In early steps it is step / (step + 10), if that is smaller, so that initial
            weights have little influence.
        step: The index of the training step, from 0.
    """
    current_decay = min(decay, step / (step + 10))
    with torch.no_grad():
        for mean, current in zip(average.parameters(), model.parameters()):
            mean.lerp_(current, 1 - current_decay)  # current_decay * mean + (1 - current_decay) * current


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
    """Train a model that predicts velocities, by Adam with a cosine schedule of the learning rate.

    Args:
        images: The training images [n, C, H, W] in [-1, 1].
        labels: Their classes [n].
        num_classes: The number of classes, the width of the one-hot labels.
        schedule: The noise schedule.
        steps: The number of training steps.
        width: The channels of the model's first level.
        batch: The number of images per step, sampled with replacement.
        lr: The initial learning rate.
        decay: The decay of the moving average of the weights.
        generator: The generator of all random numbers: weights, batches, noise steps and noise.

    Returns:
        The model with the moving average of the weights, and the mean squared error of the velocity in each step.
    """
    with torch.random.fork_rng(devices=[]):  # modules draw weights from the global generator, which is restored
        torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
        model = NoisePredictor({"image": tuple(images.shape[1:]), "step": (), "label": (num_classes,)}, width)
    one_hot = F.one_hot(labels, num_classes).float()  # [n, classes]
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    learning_rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for step in range(steps):
        samples = torch.randint(len(images), (batch,), generator=generator)
        t = torch.randint(len(schedule.alpha_bar), (batch,), generator=generator)
        x, noise = images[samples], torch.randn(batch, *images.shape[1:], generator=generator)
        inputs = {"image": schedule.add_noise(x, t, noise), "step": t, "label": one_hot[samples]}
        loss = (model(inputs) - schedule.velocity(x, t, noise)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learning_rate.step()
        update_average(average, model, decay, step)
        losses.append(float(loss.detach()))
    return average, losses
