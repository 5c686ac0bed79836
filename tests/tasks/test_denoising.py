"""Pictures told from noise: what is drawn against closed forms, whose draws they are, a run against torch, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedbench.algorithms.fedrod import FedRoD
from fedbench.api.commands import run
from fedbench.core.options import ConfigError
from fedbench.core.rng import RowRandom
from fedbench.data.base import Arrays
from fedbench.engine import batch
from fedbench.engine.batch import BatchLoader
from fedbench.engine.federation import Federation
from fedbench.models.noise_predictor import NoisePredictor
from fedbench.tasks.classification import Classification
from fedbench.tasks.denoising import Denoising, Schedule
from fedbench.testing._federation import all_clients, engine_on, seeded, split_of

N, SHAPE = 12, (2, 4, 4)


def pictures(**more: Any) -> Arrays:
    """12 pictures of two channels and three classes."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (N, *SHAPE), dtype=np.uint8)
    return Arrays(images, np.arange(N) % 3, np.zeros(N, np.int8), 3, **more)


def federation(arrays: Arrays | None = None, **options: Any) -> Federation:
    """Two clients of three training and three test pictures."""
    built = Federation.build(arrays or pictures(), split_of((3, 3)), task=Denoising(20), **options)
    built.task.setup(built)
    return built


def undone(told: dict[str, Tensor], velocity: Tensor) -> tuple[Tensor, Tensor]:
    """Picture and noise, of a noisy picture and its velocity: a rotation back."""
    a = Schedule.cosine(20).alpha_bar[told["step"]][..., None, None, None]
    x = told["image"]
    return a.sqrt() * x - (1 - a).sqrt() * velocity, (1 - a).sqrt() * x + a.sqrt() * velocity


@pytest.mark.parametrize("normalize", [True, False])
def test_what_is_drawn_holds_the_picture_its_class_and_standard_noise(normalize: bool) -> None:
    """However the data set is normalized, pictures are in [-1, 1]."""
    data = federation(pictures(mean=(0.3, 0.5), std=(0.2, 0.1)), normalize=normalize)
    x, y = data.gather(torch.arange(N)[None].expand(400, N), training=True)
    told, velocity = data.stochastic_inputs(x, y, RowRandom(torch.arange(400)))
    picture, noise = undone(told, velocity)
    wanted = torch.from_numpy(pictures().inputs).float() / 127.5 - 1  # type: ignore[arg-type]
    torch.testing.assert_close(picture, wanted.expand_as(picture), atol=2e-5, rtol=0)
    assert float(noise.mean()) == pytest.approx(0, abs=0.01) and float(noise.std()) == pytest.approx(1, abs=0.01)
    assert torch.equal(told["label"].argmax(-1)[0], torch.arange(N) % 3) and bool((told["label"].sum(-1) == 1).all())
    counts = told["step"].flatten().bincount(minlength=20)
    assert len(counts) == 20 and int(counts.min()) > 150  # 240 expected of each


def test_an_evaluation_draws_a_sample_alike_at_all_times_and_places() -> None:
    data = federation()
    whole, velocity = data.gather(torch.arange(N))
    some, part = data.gather(torch.tensor([[7, 2], [2, 0]]))
    assert torch.equal(part[0, 0], velocity[7]) and torch.equal(part[1, 0], part[0, 1])
    assert all(torch.equal(some[name][1], whole[name][[2, 0]]) for name in whole)  # type: ignore[index, call-overload]
    noise = undone(whole, velocity)[1]  # type: ignore[arg-type]
    assert float((noise[0] - noise[3]).abs().max()) > 0.1


def test_a_training_batch_is_drawn_by_client_and_step() -> None:
    """The same sample at two steps is another; a client alone has what it has among others."""
    data = federation()
    index, counts = np.array([[[0, 1], [3, 4]], [[0, 1], [3, 4]]]), np.full((2, 2), 2)
    both = BatchLoader(data, np.array([0, 1]), index, counts, random_key=5)
    alone = BatchLoader(data, np.array([1]), index[:, 1:], counts[:, 1:], random_key=5)
    first, second = both(0, 2), both(1, 2)
    noise = [undone(step.x, step.y)[1] for step in (first, second)]  # type: ignore[arg-type]
    assert float((noise[0] - noise[1]).abs().min()) > 0 and float((noise[0][0] - noise[0][1]).abs().max()) > 0.1
    assert torch.equal(first.y[1], alone(0, 1).y[0]) and torch.equal(second.y[1], alone(1, 1).y[0])
    assert not torch.equal(first.y, second.y)
    assert torch.equal(first.x["image"][1], alone(0, 1).x["image"][0])  # type: ignore[index, call-overload]
    evaluated = BatchLoader(data, np.array([0]), index[:, :1], counts[:, :1])
    assert torch.equal(evaluated(0, 1).y[0], data.gather(torch.tensor([0, 1]))[1])


def test_blocks_of_steps_change_no_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's noise is its own, whether it is loaded with the one before or alone."""
    data, index, counts = federation(), np.array([[[0, 1]], [[0, 1]], [[0, 1]]]), np.full((3, 1), 2)
    together = BatchLoader(data, np.array([0]), index, counts, random_key=5)
    at_once = [together(t, 1).y for t in range(3)]
    monkeypatch.setattr(batch, "BLOCK_BYTES", 1)
    alone = BatchLoader(data, np.array([0]), index, counts, random_key=5)
    assert all(torch.equal(alone(t, 1).y, at_once[t]) for t in range(3))


def test_pictures_are_augmented_before_noise_is_added() -> None:
    """Each is itself or its mirror image, without noise in between."""
    data = federation(augment={"flip": True})
    x, y = data.gather(torch.arange(N)[None], training=True)
    picture, _ = undone(*data.stochastic_inputs(x, y, RowRandom(torch.arange(1))))  # type: ignore[arg-type]
    wanted = torch.from_numpy(pictures().inputs).float() / 127.5 - 1  # type: ignore[arg-type]
    same, mirrored = ((picture[0] - w).abs().amax((1, 2, 3)) < 1e-4 for w in (wanted, wanted.flip(-1)))
    assert bool((same | mirrored).all()) and 0 < int(mirrored.sum()) < N


def test_the_loss_is_the_mean_squared_error_of_a_picture() -> None:
    z, y = torch.randn(3, 5, *SHAPE), torch.randn(3, 5, *SHAPE)
    torch.testing.assert_close(Denoising().loss(z, y), ((z - y) ** 2).mean((2, 3, 4)))


@pytest.mark.parametrize("plan", ["loop", "threads", "vmap"])
def test_a_local_step_is_torchs_own(plan: str) -> None:
    """One step of SGD on a client's only batch, by plain autograd."""
    data = federation()
    module = seeded(lambda: NoisePredictor(data.input_shape, 8))
    engine, batches = engine_on(data, module, plan=plan, batch_size=3), []
    row = engine.model.init_row()

    def loss(step: Any, rows: Tensor, batch: Any) -> Tensor:
        batches.append(batch)
        return step.task_loss(step.forward(rows, batch), batch)

    all_clients(engine_on(data, module, plan="vmap", batch_size=3)).train(row, loss=loss)
    (batch,) = batches
    nn.functional.mse_loss(module({name: x[1] for name, x in batch.x.items()}), batch.y[1]).backward()
    wanted = {name: (p - 0.1 * p.grad).detach() for name, p in module.named_parameters()}  # type: ignore[operator]
    trained = engine.model.state_dict(all_clients(engine).train(row).theta[1])
    for name, value in trained.items():
        torch.testing.assert_close(value, wanted[name], atol=1e-6, rtol=1e-4)


def test_other_data_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"task=denoising is for images with one class each, .* of regression: set"):
        Denoising().for_targets("regression")
    arrays = Arrays(np.zeros((N, 5), np.float32), np.arange(N) % 3, np.zeros(N, np.int8), 3)
    with pytest.raises(ConfigError, match=r"needs images, .* has samples of dtype torch.float32 and shape \[5\]"):
        federation(arrays)
    with pytest.raises(ConfigError, match="which task=denoising computes from images, but its inputs are"):
        NoisePredictor((1, 8, 8))


def test_classes_of_the_menu_go_on_as_they_were() -> None:
    """A task that draws nothing is given what the federation holds."""
    data = Federation.build(pictures(), split_of((3, 3)), task=Classification())
    x, y = data.gather(torch.arange(4))
    assert not data.has_stochastic_inputs and isinstance(x, Tensor) and torch.equal(y, torch.arange(4) % 3)


def words(tmp_path: Path, algorithm: str) -> list[str]:
    """Of a run on grey pictures, two clients."""
    np.savez(tmp_path / "x.npz", X=pictures().inputs[:, 0], y=pictures().targets)
    return [f"algorithm={algorithm}", "task=denoising", "model=noise_predictor", "model.width=8", "dataset=npz",
            f"dataset.path={tmp_path / 'x.npz'}", "partition=iid", "partition.num_clients=2", "sample_rate=1",
            "local.epochs=1", "local.batch_size=2", "hardware=cpu", "tracking=disabled"]  # fmt: skip


def test_a_model_that_reads_something_else_is_told_what_it_is_given(tmp_path: Path) -> None:
    given = [*words(tmp_path, "fedavg")[:2], "model=mlp", *words(tmp_path, "fedavg")[4:]]
    with pytest.raises(ConfigError, match=r"choose a model for the random inputs \(image, step, label\)"):
        run(*given, "rounds=1", f"hydra.run.dir={tmp_path / 'run'}")


@pytest.mark.parametrize("algorithm", ["apple", "fedrep", "pfednet", "pgfed"])
def test_methods_train_generators(tmp_path: Path, algorithm: str) -> None:
    """Weighted models, a personal way up, a graph by what inputs look like, gradients of others."""
    done = run(
        *words(tmp_path, algorithm), "rounds=2", "hardware.executor=threads", f"hydra.run.dir={tmp_path / 'run'}"
    )
    assert np.isfinite(done.summary["last"]["personal/loss"]) and done.status == "finished"


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_run_goes_on_with_the_same_draws(tmp_path: Path, executor: str) -> None:
    """Two rounds, and one that is resumed for another: the same bytes; SCAFFOLD keeps state besides."""
    same = [*words(tmp_path, "scaffold"), f"hardware.executor={executor}"]
    run(*same, "rounds=2", f"hydra.run.dir={tmp_path / 'whole'}")
    run(*same, "rounds=1", f"hydra.run.dir={tmp_path / 'part'}")
    run(f"resume={tmp_path / 'part'}", "rounds=2")
    for name in ("metrics.csv", "clients.csv"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "part" / name).read_bytes()


def test_a_method_that_weighs_classes_of_outputs_is_refused() -> None:
    module = seeded(lambda: NoisePredictor({"image": SHAPE, "step": (), "label": (3,)}, 8))
    engine = engine_on(federation(), module, columns={"base": ["first.*"], "head": ["last.*"]})
    with pytest.raises(ConfigError, match=r"fedrod needs one class.*not task=denoising"):
        FedRoD().check(engine.federation, engine.model, engine.optimizer)
