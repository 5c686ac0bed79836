"""Draws are functions of their key: not of order, of who else draws, or of the batch's width."""

import numpy as np
import pytest
import torch
from tiny import global_state, untouched

from fedbench.core import rng


def test_keys_differ_by_every_part_and_by_type() -> None:
    keys = [rng.key(*parts) for parts in [(0, "a"), (1, "a"), (0, "b"), (0, "a", 0), ("0", "a"), (0, "a", 1), ("0a",)]]
    assert len(set(keys)) == len(keys)
    assert all(0 <= k < 1 << 64 for k in keys)


def test_keys_are_pinned() -> None:
    """A run of last year draws the same today."""
    assert rng.key(0, "init") == rng.key(np.int64(0), "init") == 9132692244921426797
    assert rng.generator(0, "cohort", 3).integers(1000, size=3).tolist() == [877, 137, 730]
    assert torch.rand(1, generator=rng.torch_generator(0, "x")).item() == pytest.approx(0.5052504, abs=1e-6)
    position, _ = rng.batches(rng.key(0, "batches", "local", 0), np.array([2, 5]), np.array([5, 7]), 3, epochs=1)
    assert position.tolist() == [[[3, 1, 4], [3, 0, 2]], [[2, 0, 0], [1, 6, 5]], [[0, 0, 0], [4, 0, 0]]]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("how", [{"epochs": 1}, {"epochs": 3}, {"steps": 1}, {"steps": 5}, {"steps": 11}])
def test_lengths_are_those_of_the_batches(how: dict, drop_last: bool) -> None:
    """Known without drawing: how many steps every client has, and how many samples they serve."""
    sizes = np.array([7, 21, 12, 4, 0, 1, 10])
    _, counts = rng.batches(3, np.arange(7), sizes, 5, drop_last=drop_last, **how)
    steps, samples = rng.lengths(sizes, 5, drop_last=drop_last, **how)
    assert steps.tolist() == (counts > 0).sum(0).tolist() and samples.tolist() == counts.sum(0).tolist()


def test_row_draws_are_pinned() -> None:
    keys = torch.from_numpy(rng.client_keys(rng.key(0, "noise", 1), np.array([0, 5])))
    random = rng.RowRandom(keys)
    assert (random.uniform(3) * 2**24).tolist() == [[10966864, 891112, 3889936], [16471293, 8596768, 10971933]]
    normal = torch.tensor([[-0.914310396, 0.054729931], [-1.141252637, 0.251689881]])
    assert torch.allclose(random.normal(2), normal, atol=1e-6)


def test_generators_do_not_touch_global_state() -> None:
    before = global_state()
    rng.generator(1, "x").normal(size=5)
    torch.rand(3, generator=rng.torch_generator(1, "x"))
    rng.batches(5, np.arange(3), np.array([4, 5, 6]), 2, epochs=2)
    assert untouched(before)


def test_row_random_depends_on_the_row_key_and_the_call() -> None:
    keys = torch.from_numpy(rng.client_keys(7, np.array([3, 1, 2])))
    all_rows, alone = rng.RowRandom(keys), rng.RowRandom(keys[1:2])
    first, second = all_rows.uniform(4, 2), all_rows.normal(3)
    assert torch.equal(first[1:2], alone.uniform(4, 2))
    assert torch.equal(second[1:2], alone.normal(3))
    assert not torch.equal(first, rng.RowRandom(keys + 1).uniform(4, 2))
    again = rng.RowRandom(keys)
    assert not torch.equal(again.uniform(4, 2), again.uniform(4, 2))


def test_the_draws_of_a_key_have_no_number_in_common() -> None:
    """A second draw is no shifted copy of the first: sums of clients' noise would otherwise be correlated."""
    random = rng.RowRandom(torch.from_numpy(rng.client_keys(7, np.arange(3))))
    draws = [random.uniform(500).numpy() for _ in range(20)]
    for client in range(3):
        found = np.concatenate([d[client] for d in draws])
        assert len(np.unique(found)) > 0.999 * len(found)  # 24 random bits: 3 of 10,000 meet by chance


def test_a_wider_draw_starts_with_the_narrower_one() -> None:
    """Dropout on a padded batch: the real samples meet the same mask whatever the padding."""
    keys = torch.from_numpy(rng.client_keys(7, np.arange(2)))
    assert torch.equal(rng.RowRandom(keys).uniform(5, 3)[:, :4], rng.RowRandom(keys).uniform(4, 3))


def test_row_random_is_uniform_and_normal() -> None:
    random = rng.RowRandom(torch.from_numpy(rng.client_keys(1, np.arange(20))))
    u, z = random.uniform(10_000), random.normal(10_000)
    assert u.min() >= 0 and u.max() < 1
    assert u.mean().item() == pytest.approx(0.5, abs=0.005) and u.var().item() == pytest.approx(1 / 12, abs=0.002)
    assert z.mean().item() == pytest.approx(0, abs=0.01) and z.std().item() == pytest.approx(1, abs=0.01)
    assert torch.isfinite(z).all()
    correlation = np.corrcoef(u.numpy()) - np.eye(20)
    assert abs(correlation).max() < 0.05


def steps_of(position: np.ndarray, counts: np.ndarray, i: int) -> list[list[int]]:
    """The batches of client i, padding removed."""
    return [position[t, i, : counts[t, i]].tolist() for t in range(len(counts)) if counts[t, i]]


SIZES = np.array([7, 21, 12, 4, 1, 0, 10])


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_visits_every_sample_once(drop_last: bool) -> None:
    position, counts = rng.batches(3, np.arange(7), SIZES, 10, epochs=3, drop_last=drop_last)
    for i, n in enumerate(SIZES):
        own = min(10, n)
        per_epoch = 0 if n == 0 else n // own if drop_last else -(-n // own)
        batches = steps_of(position, counts, i)
        assert len(batches) == 3 * per_epoch
        for e in range(3):
            seen = [s for b in batches[e * per_epoch : (e + 1) * per_epoch] for s in b]
            assert len(set(seen)) == len(seen) == (per_epoch * own if drop_last else n)
            assert all(0 <= s < n for s in seen)
        assert all(len(b) == own for b in batches) or not drop_last


def test_counts_are_a_prefix_in_time_and_padding_is_zero() -> None:
    position, counts = rng.batches(3, np.arange(7), SIZES, 10, epochs=2)
    assert position.shape == (6, 7, 10) and counts.shape == (6, 7)
    assert ((np.diff((counts > 0).astype(int), axis=0)) <= 0).all()
    assert (position[np.arange(10) >= counts[..., None]] == 0).all()


def test_batches_of_a_client_do_not_depend_on_the_others() -> None:
    whole, counts = rng.batches(3, np.arange(7), SIZES, 10, epochs=2)
    for i in (0, 3, 4):
        own, own_counts = rng.batches(3, np.array([i]), SIZES[[i]], 10, epochs=2)
        assert steps_of(own, own_counts, 0) == steps_of(whole, counts, i)


def test_epochs_are_shuffled_anew_and_by_key() -> None:
    def first_two(base: int) -> tuple[list, list]:
        position, counts = rng.batches(base, np.array([5]), np.array([20]), 20, epochs=2)
        return tuple(steps_of(position, counts, 0))

    one, two = first_two(1)
    assert one != two and sorted(one) == sorted(two)
    assert (one, two) == first_two(1) and one != first_two(2)[0]


def test_a_number_of_steps_runs_over_epochs() -> None:
    position, counts = rng.batches(3, np.arange(7), SIZES, 10, steps=5)
    by_epoch, epoch_counts = rng.batches(3, np.arange(7), SIZES, 10, epochs=5)
    for i, n in enumerate(SIZES):
        batches = steps_of(position, counts, i)
        assert len(batches) == (5 if n else 0)
        assert batches == steps_of(by_epoch, epoch_counts, i)[:5]


def test_nothing_to_do() -> None:
    for sizes, work in [
        (np.zeros(2, int), {"epochs": 3}),
        (np.array([3, 4]), {"epochs": 0}),
        (np.array([3, 4]), {"steps": 0}),
        (np.zeros(0, int), {"epochs": 1}),
    ]:
        position, counts = rng.batches(1, np.arange(len(sizes)), sizes, 10, **work)
        assert counts.sum() == 0 and len(position) == 0


def test_shuffles_are_uniform() -> None:
    """Which of 4 samples comes first, over 4,000 clients."""
    position, _ = rng.batches(9, np.arange(4000), np.full(4000, 4), 1, epochs=1)
    share = np.bincount(position[0, :, 0], minlength=4) / 4000
    assert abs(share - 0.25).max() < 0.03
