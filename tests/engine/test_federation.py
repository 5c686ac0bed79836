"""The data of a federation: normalization, augmentation, held-out samples, class masks and several inputs."""

import numpy as np
import pytest
import torch
from tiny import CPU, PLANS, all_clients, arrays_of, close, engine, equal, mlp, ragged, split_of
from torch import Tensor, nn

from fedbench.core.options import ConfigError
from fedbench.core.rng import RowRandom, client_keys
from fedbench.engine.batch import Batch
from fedbench.engine.federation import Augment, Federation
from fedbench.engine.step import Step
from fedbench.engine.training import LocalTraining

SIZES = (5, 3, 4)


def images(**more) -> Federation:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (24, 2, 4, 4)).astype(np.uint8)
    options = {k: more.pop(k) for k in ("normalize", "augment") if k in more}
    return Federation.build(arrays_of(x, rng.integers(0, 3, 24), 3, **more), split_of(SIZES), CPU, **options)


def test_properties() -> None:
    f = images()
    assert f.num_clients == 3 and f.num_samples.tolist() == list(SIZES) and f.input_shape == (2, 4, 4)
    counts = f.label_counts
    assert counts.shape == (3, 3) and counts.sum(1).tolist() == list(SIZES)
    for i in range(3):
        own = f.targets[torch.from_numpy(f.splits["train"][i])]
        assert counts[i].tolist() == [(own == c).sum().item() for c in range(3)]
    assert f.counts("test").sum() == 12 and f.domains is None and f.class_mask is None


def test_images_are_stored_as_bytes_and_normalized_in_batches() -> None:
    mean, std = (0.4, 0.6), (0.2, 0.5)
    f = images(mean=mean, std=std)
    assert f.inputs.dtype == torch.uint8
    index = torch.tensor([[0, 5, 7], [23, 1, 1]])
    x, y = f.gather(index)
    raw = f.inputs[index].double() / 255
    expected = (raw - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    close(x, expected.float())
    equal(y, f.targets[index])
    plain, _ = images(mean=mean, std=std, normalize=False).gather(index)
    close(plain, raw.float())
    close(images().gather(index)[0], raw.float())
    before = f.inputs.clone()
    f.gather(index)[0].zero_()
    equal(f.inputs, before)


def test_float_features_are_not_normalized() -> None:
    arrays, split = ragged(shape=(6,))
    f = Federation.build(arrays, split, CPU)
    equal(f.gather(torch.tensor([3, 4]))[0], torch.from_numpy(arrays.inputs[[3, 4]]))


def test_several_inputs() -> None:
    rng = np.random.default_rng(0)
    x = {
        "image": rng.integers(0, 256, (24, 1, 4, 4)).astype(np.uint8),
        "tokens": rng.integers(0, 9, (24, 5)),
        "age": rng.normal(size=(24, 1)).astype(np.float32),
    }
    f = Federation.build(arrays_of(x, rng.integers(0, 3, 24), 3, mean=(0.5,), std=(0.25,)), split_of(SIZES), CPU)
    assert f.input_shape == {"image": (1, 4, 4), "tokens": (5,), "age": (1,)}
    got, _ = f.gather(torch.tensor([[2, 3]]))
    close(got["image"], (torch.from_numpy(x["image"][[[2, 3]]]).float() / 255 - 0.5) / 0.25)
    equal(got["tokens"], torch.from_numpy(x["tokens"][[[2, 3]]]))
    equal(got["age"], torch.from_numpy(x["age"][[[2, 3]]]))


# -- augmentation ----------------------------------------------------------------------------------------
def random(ids: list[int], key: int = 1) -> RowRandom:
    return RowRandom(torch.from_numpy(client_keys(key, np.array(ids))))


def test_flips_are_flips_of_half_the_samples() -> None:
    x = torch.randn(3, 400, 2, 4, 5)
    out, _ = Augment(flip=True)(x, torch.zeros(3, 400), random([0, 1, 2]))
    flipped = (out == x.flip(-1)).flatten(2).all(-1)
    same = (out == x).flatten(2).all(-1)
    assert (flipped ^ same).all() and abs(flipped.float().mean(1) - 0.5).max() < 0.1


def test_crops_are_windows_of_the_padded_image() -> None:
    x = torch.rand(2, 50, 1, 6, 5) + 1
    out, _ = Augment(crop=2)(x, torch.zeros(2, 50), random([0, 1]))
    assert out.shape == x.shape
    padded = torch.nn.functional.pad(x, (2,) * 4)
    places = set()
    for k in range(2):
        for b in range(50):
            found = [
                (r, c)
                for r in range(5)
                for c in range(5)
                if torch.equal(out[k, b], padded[k, b, :, r : r + 6, c : c + 5])
            ]
            assert len(found) == 1
            places |= set(found)
    assert len(places) > 20  # of 25


def test_augmentation_depends_on_the_key_of_the_client() -> None:
    x = torch.randn(3, 8, 1, 6, 6)

    def both(x: Tensor, random: RowRandom) -> Tensor:
        return Augment(flip=True, crop=1)(x, torch.zeros(x.shape[:2]), random)[0]

    whole = both(x, random([4, 7, 9]))
    equal(whole[1:2], both(x[1:2], random([7])))
    equal(whole[:, :5], both(x[:, :5], random([4, 7, 9])))  # padding of the batch does not matter
    assert not torch.equal(whole, both(x, random([4, 7, 9], key=2)))


@pytest.mark.parametrize("plan", PLANS)
def test_training_augments_by_client_step_and_round_and_evaluation_does_not(plan: str) -> None:
    arrays, split = ragged(shape=(1, 6, 6))
    e = engine(arrays, split, mlp(36), plan=plan, augment={"flip": True, "crop": 1})
    whole = engine(arrays, split, mlp(36), augment={"flip": True, "crop": 1})
    plain = engine(arrays, split, mlp(36))
    start = e.model.init_row()
    out = all_clients(e).train(start)
    close(out.theta, all_clients(whole).train(start).theta)
    assert not torch.allclose(out.theta, all_clients(plain).train(start).theta, atol=1e-4)
    close(all_clients(e).gradient(start)[0], all_clients(plain).gradient(start)[0])
    close(torch.cat(all_clients(e).forward(start)), torch.cat(all_clients(plain).forward(start)))


def test_augmentation_differs_between_steps_and_rounds() -> None:
    arrays, split = ragged(sizes=(6, 6), shape=(1, 6, 6))
    arrays.inputs[:] = arrays.inputs[0]  # one image: batches differ by its crops alone
    e = engine(arrays, split, mlp(36), augment={"crop": 2}, batch_size=6)
    seen: list[Tensor] = []
    for r in (0, 0, 1):
        all_clients(e, r).train(
            e.model.init_row(), step=lambda s, b: seen.append(b.x.clone()), how=LocalTraining(steps=2)
        )
    equal(torch.stack(seen[0:2]), torch.stack(seen[2:4]))
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[4])
    assert not torch.equal(seen[0][0], seen[0][1])


def test_masks_are_augmented_as_their_images() -> None:
    """A mask of bright pixels is also correct for the flipped and cropped image."""
    x = torch.randn(3, 40, 2, 6, 5)
    y = (x[:, :, 0] > 0).long()  # [k, B, H, W]
    for augment in (Augment(flip=True), Augment(crop=2), Augment(flip=True, crop=2)):
        moved, masks = augment(x, y, random([0, 1, 2]))
        assert masks.dtype == y.dtype and not torch.equal(masks, y)
        equal(masks, (moved[:, :, 0] > 0).long())  # an image is padded with 0
        equal(augment(x, y[:, :, 0, 0], random([0, 1, 2]))[0], moved)
        for other in (y[:, :, 0, 0], y[:, :, 0], y[..., :4]):  # a label, several of them, what is no mask
            assert augment(x, other, random([0, 1, 2]))[1] is other
    x, y = torch.randn(1, 200, 1, 4, 4), torch.ones(1, 200, 4, 4, dtype=torch.long)
    assert Augment(crop=1, outside=-1)(x, y, random([0]))[1].unique().tolist() == [-1, 1]


@pytest.mark.parametrize("num_classes", [255, 256])
def test_pixels_without_a_class_stay_without_one(num_classes: int) -> None:
    """Masks are stored as uint8, where -1 is 255, unless 255 is a class."""
    arrays, split = ragged(shape=(1, 6, 6))
    arrays.targets = np.where(arrays.inputs[:, 0] > 0, -1, 3).astype(np.int64)
    arrays.task, arrays.num_classes = "segmentation", num_classes
    targets = Federation.build(arrays, split, CPU).targets
    assert (targets.dtype == torch.uint8) == (num_classes == 255)
    equal(((targets >= 0) & (targets < num_classes)), torch.from_numpy(arrays.targets == 3))


@pytest.mark.parametrize("plan", PLANS)
def test_training_uses_augmented_masks(plan: str) -> None:
    arrays, split = ragged(shape=(1, 6, 6))
    arrays.targets = (arrays.inputs[:, 0] > 0).astype(np.int64)
    arrays.task = "segmentation"
    e = engine(arrays, split, nn.Conv2d(1, 3, 3, padding=1), plan=plan, augment={"flip": True, "crop": 1})
    seen: list[tuple[Tensor, Tensor]] = []

    def step(s: Step, batch: Batch) -> None:
        seen.append((batch.x.clone(), batch.y.clone()))
        s.descend(s.grad(batch))

    all_clients(e).train(e.model.init_row(), step=step)
    assert seen and all(torch.equal(y, (x[:, :, 0] > 0).long()) for x, y in seen)
    whole = torch.cat([x.flatten(0, 1) for x, _ in seen])
    assert (whole[:, 0, 0] == 0).all(-1).any()  # some were cropped


def test_wrong_options_of_augmentation_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"dataset.augment has no option rotate: set only flip .* and crop"):
        images(augment={"rotate": 3})
    arrays, split = ragged(shape=(6,))
    with pytest.raises(ConfigError, match=r"dataset.augment needs images"):
        Federation.build(arrays, split, CPU, augment={"flip": True})


# -- holding out -----------------------------------------------------------------------------------------
def test_a_fraction_is_held_out() -> None:
    arrays, split = ragged(sizes=(10, 3, 2, 1), test=(1,) * 4)
    f, again, other = (Federation.build(arrays, split, CPU) for _ in range(3))
    f.hold_out(0.2), again.hold_out(0.2), other.hold_out(0.2, seed=1)
    assert f.splits["held_out"].sizes.tolist() == [2, 1, 1, 0] and f.splits["remaining"].sizes.tolist() == [8, 2, 1, 1]
    for i in range(4):
        both = np.concatenate([f.splits["remaining"][i], f.splits["held_out"][i]])
        assert sorted(both) == split.train[i].tolist() == f.splits["train"][i].tolist()
        assert (f.splits["held_out"][i] == again.splits["held_out"][i]).all()
    assert (f.splits["held_out"].indices != other.splits["held_out"].indices).any()
    f.hold_out(0.5, "half", "other half")
    assert f.splits["other half"].sizes.tolist() == [5, 1, 1, 0] and f.splits["held_out"].sizes.tolist() == [2, 1, 1, 0]


def test_held_out_samples_are_a_split() -> None:
    arrays, split = ragged(sizes=(10, 3, 6))
    e = engine(arrays, split, mlp())
    e.federation.hold_out(0.4)
    cohort, start = all_clients(e), e.model.init_row()
    out = cohort.train(start, how=LocalTraining(split="remaining", batch_size=10, epochs=1))
    g, f = cohort.gradient(start, "remaining")
    close(out.theta, start - 0.1 * g)
    close(out.loss, f)
    whole = cohort.loss(start)
    share = torch.tensor([0.6, 2 / 3, 4 / 6])
    close(share * f + (1 - share) * cohort.loss(start, "held_out"), whole)


# -- class masks and domains -----------------------------------------------------------------------------
def test_domains_and_class_masks_of_clients() -> None:
    arrays, split = ragged(sizes=(4, 4, 4), classes=4)
    arrays.domain = np.array([2, 2, 2, 2, 0, 0, 0, 0, 1, 1, 1, 1] * 2)
    arrays.domain_names = ["a", "b", "c"]
    arrays.class_mask = np.array([[1, 1, 0, 0], [0, 1, 1, 1], [1, 0, 0, 1]], bool)
    f = Federation.build(arrays, split, CPU)
    assert f.domains.tolist() == [2, 0, 1] and f.domain_names == ["a", "b", "c"]
    assert f.class_mask.tolist() == arrays.class_mask[[2, 0, 1]].tolist()
