"""The schedule against closed forms, DDIM with a perfect predictor, the running mean by hand, keyed training."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from fedbench.core.options import ConfigError
from fedbench.models.noise_predictor import NoisePredictor, sinusoidal_embedding
from fedbench.synthesis.diffusion import ddim, train, update_average
from fedbench.tasks.denoising import Schedule


def test_the_schedule_is_the_cosine_while_no_step_is_capped() -> None:
    """alpha-bar_t = cos^2((t/T + s)/(1 + s) pi/2) / cos^2(s/(1 + s) pi/2); the last beta is capped at 0.999."""
    alpha_bar, s = Schedule.cosine(100).alpha_bar, 0.008
    assert alpha_bar.shape == (100,) and bool((alpha_bar[1:] < alpha_bar[:-1]).all()) and 0 < alpha_bar[-1] < 1e-3
    for t in (1, 40, 90):
        expected = (math.cos((t / 100 + s) / (1 + s) * math.pi / 2) / math.cos(s / (1 + s) * math.pi / 2)) ** 2
        assert float(alpha_bar[t - 1]) == pytest.approx(expected, rel=1e-5)
    assert float(alpha_bar[-1] / alpha_bar[-2]) == pytest.approx(0.001, rel=1e-3)


def test_a_noisy_image_has_the_closed_forms_mean_and_variance() -> None:
    """q(x_t | x_0) = N(sqrt(a) x_0, 1 - a)."""
    schedule = Schedule.cosine(10)
    noise = torch.randn(2, 1, 300, 300, generator=torch.Generator().manual_seed(0))
    sampled = schedule.add_noise(torch.full_like(noise, 0.5), torch.tensor([2, 7]), noise)
    for x, t in zip(sampled, (2, 7)):
        a = float(schedule.alpha_bar[t])
        assert float(x.mean()) == pytest.approx(0.5 * a**0.5, abs=0.02)
        assert float(x.var()) == pytest.approx(1 - a, rel=0.02)


@pytest.mark.parametrize("steps", [1, 4, 50])
@pytest.mark.parametrize("clip", [True, False])
def test_ddim_with_the_true_noise_gives_the_image_back(steps: int, clip: bool) -> None:
    schedule, generator = Schedule.cosine(200), torch.Generator().manual_seed(1)
    x = torch.rand(3, 1, 4, 4, generator=generator) * 1.8 - 0.9
    noise = torch.randn(x.shape, generator=generator)
    start = schedule.add_noise(x, torch.full((3,), 199), noise)

    def true_velocity(inputs: dict[str, Tensor]) -> Tensor:
        a = schedule.alpha_bar[inputs["step"]].view(-1, 1, 1, 1)
        return (a.sqrt() * inputs["image"] - x) / (1 - a).sqrt()  # velocity, of noisy = sqrt(a) x + sqrt(1 - a) noise

    sampled = ddim(true_velocity, schedule, start, torch.zeros(3, 2), steps, clip)
    torch.testing.assert_close(sampled, x, atol=2e-2 if steps == 1 else 1e-4, rtol=0)


def test_ddim_clips_its_predictions() -> None:
    schedule, start = Schedule.cosine(50), torch.full((1, 1, 2, 2), 2.0)

    def silent(inputs: dict[str, Tensor]) -> Tensor:
        return -inputs["image"]  # of 2, which guesses images above 1

    label = torch.zeros(1, 2)
    assert float(ddim(silent, schedule, start, label, 5).abs().max()) <= 1
    assert float(ddim(silent, schedule, start, label, 5, clip=False).abs().max()) > 1


def test_ddim_continues_from_the_clipped_prediction() -> None:
    """Song et al., equation 12 at eta 0, with a clipped prediction: the noise is that of the clipped image."""
    schedule, start = Schedule.cosine(50), torch.full((1, 1, 2, 2), 1.5)

    def guess(inputs: dict[str, Tensor]) -> Tensor:
        return -0.5 * inputs["image"]

    x, times = start, [49, 24, 0]
    for t, after in zip(times, [24, 0, None]):
        a = schedule.alpha_bar[t]
        image = (a.sqrt() * x + (1 - a).sqrt() * 0.5 * x).clamp(-1, 1)
        noise = (x - a.sqrt() * image) / (1 - a).sqrt()
        b = torch.tensor(1.0) if after is None else schedule.alpha_bar[after]
        x = b.sqrt() * image + (1 - b).sqrt() * noise
    torch.testing.assert_close(ddim(guess, schedule, start, torch.zeros(1, 2), 3), x)


def test_the_first_step_of_training_by_hand() -> None:
    """The loss of velocity at drawn steps, of images and classes drawn with replacement, by the generator's draws."""
    images = torch.rand(5, 1, 4, 4, generator=torch.Generator().manual_seed(1)) * 2 - 1
    labels, schedule = torch.tensor([0, 1, 2, 1, 0]), Schedule.cosine(30)
    how = {"steps": 1, "width": 8, "batch": 3, "lr": 0.01, "decay": 0.5}
    average, [loss] = train(images, labels, 3, schedule, generator=torch.Generator().manual_seed(7), **how)  # type: ignore
    g = torch.Generator().manual_seed(7)
    torch.manual_seed(int(torch.randint(2**62, (1,), generator=g)))
    model = NoisePredictor({"image": (1, 4, 4), "step": (), "label": (3,)}, 8)
    samples, t = torch.randint(5, (3,), generator=g), torch.randint(30, (3,), generator=g)
    noise = torch.randn(3, 1, 4, 4, generator=g)
    a = schedule.alpha_bar[t].view(-1, 1, 1, 1)
    noisy = a.sqrt() * images[samples] + (1 - a).sqrt() * noise
    label = torch.eye(3)[labels[samples]]
    expected = a.sqrt() * noise - (1 - a).sqrt() * images[samples]
    by_hand = (model({"image": noisy, "step": t, "label": label}) - expected).square().mean()
    assert loss == pytest.approx(float(by_hand.detach()), rel=1e-5)
    by_hand.backward()
    torch.optim.Adam(model.parameters(), 0.01).step()
    assert all(torch.allclose(p, q) for p, q in zip(model.parameters(), average.parameters()))  # decay 0 at step 0


def test_the_running_mean_by_hand() -> None:
    """Decay min(0.5, t/(t+10)): 0 at step 0, 1/6 at step 2, 0.5 from step 10 on."""
    model = nn.Linear(1, 1, bias=False)
    average = copy.deepcopy(model)
    for value, step, expected in ((6.0, 0, 6.0), (12.0, 2, 11.0), (1.0, 90, 6.0)):
        nn.init.constant_(model.weight, value)
        update_average(average, model, 0.5, step)
        assert float(average.weight.detach()) == pytest.approx(expected)


def test_the_predictor_reads_step_and_class_and_refuses_odd_sides() -> None:
    torch.manual_seed(0)
    model, x = NoisePredictor({"image": (1, 8, 8), "step": (), "label": (2,)}, 8), torch.randn(1, 1, 8, 8)
    inputs = {"image": x, "step": torch.tensor([3]), "label": torch.tensor([[1.0, 0.0]])}
    base = model(inputs)
    assert base.shape == x.shape
    for other in ({"step": inputs["step"] + 500}, {"label": inputs["label"].flip(1)}):
        assert not torch.allclose(base, model(inputs | other))
    with pytest.raises(ConfigError, match=r"sides divisible by 4, but the images have \[9, 8\]"):
        NoisePredictor({"image": (1, 9, 8), "step": (), "label": (2,)}, 8)
    with pytest.raises(ConfigError, match=r"model\.width=12 must be a multiple of 8"):
        NoisePredictor({"image": (1, 8, 8), "step": (), "label": (2,)}, 12)


def test_embeddings_begin_with_the_step_in_radians() -> None:
    out = sinusoidal_embedding(torch.tensor([0, 2]), 4)
    expected = [math.sin(2), math.sin(0.02), math.cos(2), math.cos(0.02)]
    torch.testing.assert_close(out, torch.tensor([[0.0, 0.0, 1.0, 1.0], expected]))


def trained(seed: int, steps: int) -> tuple[list[float], NoisePredictor]:
    x = torch.linspace(-1, 1, 4)[:, None, None, None].expand(4, 1, 4, 4)
    model, losses = train(
        x, torch.tensor([0, 0, 1, 1]), 2, Schedule.cosine(50), steps=steps, width=8, batch=16, lr=0.01, decay=0.9,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    return losses, model


def test_training_learns_and_is_a_function_of_the_generator_alone() -> None:
    losses, model = trained(0, 10)
    torch.manual_seed(99)
    again, same = trained(0, 10)
    assert losses == again and losses != trained(1, 10)[0]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters()))
    losses, _ = trained(0, 100)
    assert sum(losses[-20:]) < 0.6 * sum(losses[:20])
