"""The command on generated silos: what it writes is read by dataset.extra, and a second run writes the same."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedbench.algorithms.fedper import FedPer
from fedbench.commands import main as fedbench
from fedbench.core.options import ConfigError
from fedbench.data.base import EXTRA
from fedbench.data.images.image_folder import ImageFolder
from fedbench.synthesis.measures import neighbours
from fedbench.tools.synthesize import (
    Generator,
    Sampling,
    Training,
    images_of,
    main,
    models_of_run,
    sample_images,
    synthesize,
    train_generator,
)

QUICK = ["--steps", "3", "--ddim", "2", "--width", "8", "--batch", "4", "--share", "0.5"]


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """Two silos of two classes, 12 pictures each."""
    rng = np.random.default_rng(0)
    for silo in ("east", "west"):
        for label, low in (("ill", 0), ("well", 120)):
            folder = tmp_path / "real" / silo / label
            folder.mkdir(parents=True)
            for i in range(12):
                Image.fromarray(rng.integers(low, low + 100, (8, 8), dtype=np.uint8)).save(folder / f"{i}.png")
    return tmp_path / "real"


def words(real: Path, *more: str) -> list[str]:
    cache = f"dataset.data_dir={real.parent}"
    return ["dataset=image_folder", f"dataset.path={real}", "dataset.color=grey", "dataset.resize=8", cache,
            "partition=domain", *more]  # fmt: skip


@pytest.mark.slow
def test_what_is_written_is_read_as_extra_and_is_the_same_again(real: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert main([*words(real), *QUICK, "--out", str(tmp_path / name)]) == 0
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.png"))
    assert {p.parts[:2] for p in files} == {(s, c) for s in ("east", "west") for c in ("ill", "well")}
    assert all((tmp_path / "a" / p).read_bytes() == (tmp_path / "b" / p).read_bytes() for p in files)
    arrays = ImageFolder(str(tmp_path), str(real), 8, color="grey", extra=str(tmp_path / "a")).load()
    assert int((arrays.split == EXTRA).sum()) == len(files) > 0
    rows = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert [row["silo"] for row in rows] == ["east", "west"] and sum(int(r["synthesized"]) for r in rows) == len(files)
    assert all(np.isfinite(float(row[name])) for row in rows for name in ("fid", "fid_real", "fid_noise", "nearest"))
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_clients_learn_from_their_own_pictures_and_draws() -> None:
    training, sampling = Training(2, 4, 0.01, 8, 0.9), Sampling(2, 0.5, 0)
    images, labels = np.zeros((6, 1, 4, 4), np.uint8), np.array([0, 0, 0, 0, 1, 1])

    def made(images: np.ndarray, client: int, learner: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        learned = train_generator(images, labels, 3, training, 0, client if learner is None else learner)
        return sample_images(learned, labels, 3, (1, 4, 4), sampling, client)

    pictures, asked = made(images, 0)
    assert pictures.dtype == np.uint8 and pictures.shape == (3, 1, 4, 4) and asked.tolist() == [0, 0, 1]
    assert np.array_equal(pictures, made(images, 0)[0])
    for other in (made(images, 1), made(images, 0, 1), made(images, 1, 0), made(images + 255, 0)):
        assert not np.array_equal(pictures, other[0])


@pytest.fixture
def trained(real: Path, tmp_path: Path) -> Path:
    """A run of FedPer that learned to tell these silos' pictures from noise."""
    learning = ["algorithm=fedper", "task=denoising", "model=noise_predictor", "model.width=8", "rounds=2"]
    quick = ["sample_rate=1", "local.epochs=2", "optimizer=adam", "hardware=cpu", "tracking=disabled"]
    assert fedbench([*words(real), *learning, *quick, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    return tmp_path / "run"


@pytest.mark.slow
def test_clients_draw_from_what_they_deploy_after_a_run(trained: Path, tmp_path: Path) -> None:
    """Each has its own head, so that one start becomes other pictures; nothing else is drawn for the same command."""
    import torch

    from fedbench.tools.export import client_module, open_run

    few = ["--ddim", "2", "--share", "0.5"]
    for name in ("a", "b"):
        assert main(["--run", str(trained), *few, "--out", str(tmp_path / name)]) == 0
    rows = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert [(r["silo"], r["synthesized"]) for r in rows] == [("east", "10"), ("west", "9")] and "loss" not in rows[0]
    away = [[float(row[f"nearest{of}"]) for row in rows] for of in ("", "_others")]
    assert min(away[0] + away[1]) > 0 and away[0] != away[1] and float(rows[0]["closer_others"]) <= 1
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.png"))
    assert all((tmp_path / "a" / p).read_bytes() == (tmp_path / "b" / p).read_bytes() for p in files)
    sim = open_run(trained)
    schedule = sim.engine.task.schedule  # type: ignore[attr-defined]
    labels = sim.engine.federation.targets[sim.engine.federation.splits["train"][1]].numpy()
    learned = Generator(client_module(sim, 1), schedule, {})
    pictures, asked = sample_images(learned, labels, 2, (1, 8, 8), Sampling(2, 0.5, 0), 1)
    written = sorted((tmp_path / "a" / "west").rglob("*.png"))
    assert [p.parent.name for p in written] == [("ill", "well")[label] for label in asked]
    assert all(np.array_equal(np.asarray(Image.open(p)), x[0]) for p, x in zip(written, pictures))
    first = Generator(client_module(sim, 0), schedule, {})
    assert not np.array_equal(pictures, sample_images(first, labels, 2, (1, 8, 8), Sampling(2, 0.5, 0), 1)[0])
    assert torch.is_grad_enabled()


def test_a_method_that_predicts_with_more_is_refused(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FedPer, "predict", lambda self, model, rows, inputs: model.predict(rows, inputs))
    assert main(["--run", str(trained), "--out", str(tmp_path / "a")]) == 2
    assert "is a run of FedPer, which predicts with more than one model" in capsys.readouterr().err


def test_a_run_of_another_task_and_training_options_of_a_run_are_refused(
    real: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "e")]
    assert main(["--run", str(trained), "--steps", "5", *out]) == 2
    assert "--steps is an option of training, but --run" in capsys.readouterr().err
    other = ["algorithm=local", "model=logistic", "rounds=1", "hardware=cpu", "tracking=disabled"]
    assert fedbench([*words(real), *other, f"hydra.run.dir={tmp_path / 'other'}"]) == 0
    assert main(["--run", str(tmp_path / "other"), *out]) == 2
    assert "is a run of task=classification: choose a run of task=denoising" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--decay", "1"], "--decay must be in [0, 1), got 1.0"),
        (["--share", "0"], "--share must be above 0"),
        (["--share", "inf"], "--share must be above 0 and at most 1000"),
        (["--lr", "inf"], "--lr must be above 0 and finite"),
        (["--weights", "x.pth"], "--weights x.pth is for --network inception"),
        (["--lr", "0"], "--lr must be above 0"),
        (["--width", "12"], "multiple of 8"),
    ],
)
def test_values_out_of_range_are_refused(
    real: Path, tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words(real), *QUICK, "--out", str(tmp_path / "c"), *options]) == 2
    assert message in capsys.readouterr().err


def test_other_data_are_refused(real: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "d")]
    assert main(["dataset=digits", "partition.num_clients=2", *QUICK, *out]) == 2
    assert "does not consist of uint8 images with one class" in capsys.readouterr().err
    assert main([*words(real, f"dataset.extra={real}"), *QUICK, *out]) == 2
    assert "models are trained on real images only" in capsys.readouterr().err
    assert main([*words(real, "partition.clients_per_domain=2"), *QUICK, *out]) == 2
    assert "one client per site" in capsys.readouterr().err


def test_a_folder_with_pictures_in_it_is_kept(real: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words(real), *QUICK, "--out", str(real)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_client_learns_from_its_training_part_and_is_measured_against_it(
    real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else reaches `train_generator`; neighbours are looked for in the training part, beside test pictures."""
    from fedbench.synthesis import measures
    from fedbench.tools import synthesize as tool

    seen: list[np.ndarray] = []
    looked: list[tuple[np.ndarray, np.ndarray]] = []
    monkeypatch.setattr(
        tool, "train_generator", lambda images, *rest: seen.append(images) or train_generator(images, *rest)
    )
    monkeypatch.setattr(
        measures, "neighbours", lambda made, train, held: looked.append((train, held)) or neighbours(made, train, held)
    )
    source = tool.own_models(words(real), Training(1, 4, 0.01, 8, 0.9), 0)
    synthesize(source, Sampling(1, 0.5, 0), tmp_path / "x", "random", None)
    images, split = source.arrays.inputs, source.split
    assert isinstance(images, np.ndarray) and len(seen) == len(looked) == 2
    for client in (0, 1):
        assert np.array_equal(seen[client], images[split.train[client]])
        train, held = looked[client]
        assert np.array_equal(train, images[split.train[client]]) and np.array_equal(held, images[split.test[client]])


def test_others_are_all_other_clients_training_parts(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedbench.synthesis import measures

    looked: list[tuple[np.ndarray, np.ndarray]] = []
    monkeypatch.setattr(
        measures, "neighbours", lambda made, train, held: looked.append((train, held)) or neighbours(made, train, held)
    )
    source = models_of_run(trained, [])
    synthesize(source, Sampling(1, 0.5, 0), tmp_path / "x", "random", None)
    images, split = source.arrays.inputs, source.split
    assert isinstance(images, np.ndarray) and len(looked) == 4
    for client in (0, 1):
        others, held = looked[2 * client + 1]
        assert np.array_equal(others, images[split.train[1 - client]])
        assert np.array_equal(held, images[split.test[client]])


def test_seeds_and_steps_of_sampling_matter() -> None:
    images, labels = np.zeros((6, 1, 4, 4), np.uint8), np.zeros(6, np.int64)

    def made(learner: int = 0, sampler: int = 0, ddim: int = 2) -> np.ndarray:
        learned = train_generator(images, labels, 2, Training(2, 4, 0.01, 8, 0.9), learner, 0)
        return sample_images(learned, labels, 2, (1, 4, 4), Sampling(ddim, 1, sampler), 0)[0]

    assert np.array_equal(made(), made())
    assert not any(np.array_equal(made(), other) for other in (made(learner=1), made(sampler=1), made(ddim=3)))


def test_one_picture_at_least_is_drawn_of_a_class_that_is_there() -> None:
    labels = np.array([0, 1, 1, 1])
    learned = train_generator(np.zeros((4, 1, 4, 4), np.uint8), labels, 3, Training(1, 4, 0.01, 8, 0.9), 0, 0)
    assert sample_images(learned, labels, 3, (1, 4, 4), Sampling(1, 0.1, 0), 0)[1].tolist() == [0, 1]


def test_mixed_sites_and_names_that_are_paths_are_refused(
    real: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is trained: pictures of one silo would reach another."""
    out = ["--out", str(tmp_path / "d")]
    mixed = [word for word in words(real) if not word.startswith("partition")]
    assert main([*mixed, "partition=iid", "partition.num_clients=2", *QUICK, *out]) == 2
    assert "client 0 has images of 2 sites" in capsys.readouterr().err
    assert main([*words(real, "partition.clients_per_domain=2"), *QUICK, "--client", "0", *out]) == 2
    assert "clients 0 and 1 share site east" in capsys.readouterr().err
    assert main([*words(real), *QUICK, "--client", "1", "--client", "1", *out]) == 2
    assert "--client 1 is given twice" in capsys.readouterr().err
    assert main([*words(real), *QUICK, "--lr", "1e20", *out]) == 2
    assert "diverged with --lr 1e+20: set a smaller --lr" in capsys.readouterr().err
    arrays = ImageFolder(str(tmp_path), str(real), 8, color="grey").load()
    for name in ("../up", "", "..", "a/b", "a\\b"):
        with pytest.raises(ConfigError, match="cannot be the name of a folder in --out"):
            images_of(replace(arrays, class_names=["ill", name]))
    assert not (tmp_path / "d").exists() or not any((tmp_path / "d").rglob("*.png"))
