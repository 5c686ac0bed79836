"""Attacks on data: only the attackers' training samples change, and triggered test samples are those of the others."""

from typing import Any

import numpy as np
import pytest

from fedbench.attacks.base import Attack, Poisoned
from fedbench.config.conf_tree import read_option
from fedbench.core.options import ConfigError
from fedbench.core.split import Ragged, Split
from fedbench.data.base import Arrays
from fedbench.simulation.instantiate import make

N, C, CLIENTS = 60, 5, 6
ATTACKERS = np.array([1, 4])
HONEST = np.array([0, 2, 3, 5])
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 200, (N, 2, 5, 6)).astype(np.uint8)
ARRAYS = Arrays(IMAGES, np.arange(N) % C, np.zeros(N, np.int8), C, domain=np.arange(N) // 10, subject=np.arange(N))
LISTS = np.split(RNG.permutation(N), CLIENTS)
SPLIT = Split(*(Ragged.from_lists([x[part] for x in LISTS]) for part in (slice(6), slice(6, 7), slice(7, None))))


def attack(name: str, **options: Any) -> Attack:
    return make({**read_option(f"attack/{name}"), **options}, key="attack")


def poisoned(name: str, arrays: Arrays = ARRAYS, split: Split = SPLIT, seed: int = 0, **options: Any) -> Poisoned:
    found = attack(name, **options).poison(arrays, split, ATTACKERS, seed)
    found.arrays.check()
    return found


def images_of(arrays: Arrays) -> np.ndarray:
    images = arrays.expanded().images
    assert images is not None
    return images


def require_clean_but_for_attackers(p: Poisoned, arrays: Arrays = ARRAYS) -> None:
    """Assert that the samples of the data set are the same, and so are all lists but the attackers' training ones."""
    n = len(arrays)
    for name in ("targets", "split", "domain", "subject"):
        assert np.array_equal(getattr(p.arrays, name)[:n], getattr(arrays, name))
    assert np.array_equal(images_of(p.arrays)[:n], images_of(arrays))
    assert p.split.val is SPLIT.val and p.split.test is SPLIT.test
    for client in range(CLIENTS):
        before, after = SPLIT.train[client], p.split.train[client]
        assert len(before) == len(after)
        assert np.array_equal(before, after) == (client not in ATTACKERS)


def test_label_flip_turns_labels_around() -> None:
    p = poisoned("label_flip")
    require_clean_but_for_attackers(p)
    for client in ATTACKERS:
        before, after = SPLIT.train[client], p.split.train[client]
        assert np.array_equal(p.arrays.targets[after], C - 1 - ARRAYS.targets[before])
        assert np.array_equal(images_of(p.arrays)[after], IMAGES[before])
        assert np.array_equal(p.arrays.domain[after], ARRAYS.domain[before])  # type: ignore[index]
        assert (after >= N).all()
    assert p.triggered is None and p.used is p.split
    assert p.arrays.parts()["inputs"] is IMAGES  # the copies share the images


def test_label_flip_of_a_pair() -> None:
    p = poisoned("label_flip", pair=[3, 0])
    before, after = (np.concatenate([s.train[i] for i in ATTACKERS]) for s in (SPLIT, p.split))
    old, new = ARRAYS.targets[before], p.arrays.targets[after]
    assert (new[old == 3] == 0).all() and (old == 3).any()
    assert np.array_equal(new[old != 3], old[old != 3]) and np.array_equal(before[old != 3], after[old != 3])


def test_a_sample_of_two_clients_changes_for_the_attacker_only() -> None:
    """Client 0 has the training samples of attacker 1 too, and tests on them."""
    lists = [SPLIT.train[1], *(SPLIT.train[i] for i in range(1, CLIENTS))]
    split = Split(Ragged.from_lists(lists), SPLIT.val, Ragged.from_lists(lists))
    p = poisoned("label_flip", split=split)
    assert np.array_equal(p.split.train[0], lists[0]) and np.array_equal(p.split.test[0], lists[0])
    assert np.array_equal(p.arrays.targets[lists[0]], ARRAYS.targets[lists[0]])


@pytest.mark.parametrize("share, count", [(0.5, 3), (1.0, 6), (0.1, 1)])
def test_backdoor_poisons_a_fraction_of_the_training_samples(share: float, count: int) -> None:
    p = poisoned("backdoor", poisoned=share, target=2, size=3)
    require_clean_but_for_attackers(p)
    images = images_of(p.arrays)
    for client in ATTACKERS:
        before, after = SPLIT.train[client], p.split.train[client]
        changed = after != before
        assert changed.sum() == count
        assert (p.arrays.targets[after[changed]] == 2).all()
        assert (images[after[changed]][:, :, -3:, -3:] == 255).all()
        expected = IMAGES[before[changed]].copy()
        expected[:, :, -3:, -3:] = 255
        assert np.array_equal(images[after[changed]], expected)
    others = poisoned("backdoor", poisoned=0.5, seed=1), poisoned("backdoor", poisoned=0.5)
    assert not np.array_equal(others[0].split.train.indices < N, others[1].split.train.indices < N)


def test_triggered_samples_are_the_honest_clients_test_samples_of_other_classes() -> None:
    p = poisoned("backdoor", target=2)
    assert p.triggered is not None
    for client in range(CLIENTS):
        clean = SPLIT.test[client]
        clean = clean[ARRAYS.targets[clean] != 2] if client in HONEST else clean[:0]
        found = p.triggered[client]
        expected = IMAGES[clean].copy()
        expected[:, :, -2:, -2:] = 255
        assert np.array_equal(images_of(p.arrays)[found], expected)
        assert (p.arrays.targets[found] == 2).all()
        assert np.array_equal(p.used.test[client], np.concatenate([SPLIT.test[client], found]))


def test_triggers_of_float_and_of_shared_images() -> None:
    """The trigger has the largest value of all images.  Shared images are copied first."""
    floats = Arrays(IMAGES[:20] / np.float32(199), ARRAYS.targets, ARRAYS.split, C, domain=ARRAYS.domain)
    floats.shared = {"inputs": np.arange(N) % 20}
    floats.subject = ARRAYS.subject
    p = poisoned("backdoor", floats)
    require_clean_but_for_attackers(p, floats)
    after = p.split.train[1][p.split.train[1] >= N]
    assert (images_of(p.arrays)[after][:, :, -2:, -2:] == floats.images.max()).all()  # type: ignore[union-attr]
    labels = poisoned("label_flip", floats)
    require_clean_but_for_attackers(labels, floats)
    assert len(labels.arrays.parts()["inputs"]) == 20


FEATURES = Arrays(np.zeros((N, 7), np.float32), ARRAYS.targets, ARRAYS.split, C)
NUMBERS = Arrays(IMAGES, np.zeros(N, np.float32), ARRAYS.split, 1, task="regression")


@pytest.mark.parametrize(
    "name, arrays, options, message",
    [
        ("label_flip", NUMBERS, {}, "attack=label_flip changes classes, but the targets .* of the kind regression"),
        ("backdoor", NUMBERS, {}, "attack=backdoor changes classes, but the targets"),
        ("backdoor", FEATURES, {}, "attack=backdoor puts its trigger into images, but this data set has no"),
        ("backdoor", ARRAYS, {"target": 5}, r"attack\.target=5 must be a class of the data set: set 0 to 4"),
        ("backdoor", ARRAYS, {"size": 6}, r"attack\.size=6 is larger than the images, which have 5 x 6 pixels"),
        ("label_flip", ARRAYS, {"pair": [1, 5]}, r"attack\.pair=\[1, 5\]: choose two of the classes 0 to 4"),
        ("label_flip", ARRAYS, {"pair": [1]}, r"attack\.pair=\[1\] must be two different classes"),
    ],
)
def test_other_data_are_refused(name: str, arrays: Arrays, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attack(name, **options).poison(arrays, SPLIT, ATTACKERS, 0)
