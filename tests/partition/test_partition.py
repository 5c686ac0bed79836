"""Partitions: nothing lost or doubled, the same bytes for a seed, the papers' draws, refusals."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tiny import calls

from fedbench.core.options import ConfigError
from fedbench.core.split import Ragged, Split
from fedbench.data.base import TEST, TRAIN, VAL, Arrays
from fedbench.data.images.digits import Digits
from fedbench.data.synthetic import Synthetic
from fedbench.partition import dirichlet
from fedbench.partition.base import build_split
from fedbench.partition.class_disjoint import ClassDisjoint
from fedbench.partition.dirichlet import Dirichlet
from fedbench.partition.domain import Domain
from fedbench.partition.iid import IID
from fedbench.partition.pachinko import CIFAR100, Pachinko
from fedbench.partition.pathological import Pathological
from fedbench.partition.practical import Practical
from fedbench.tools.partitions import counts, main

CONF = Path(__file__).parents[2] / "conf" / "partition"
UNDERSAMPLING = ("delta", "delta_luna16", "domain_counts")  # what is over is left out
# Options that make a file of conf/partition fit 1,797 digits; the files of 100 clients ask for more.
SMALLER = {
    "dirichlet_pgfed": {"num_clients": 15},
    "practical": {"num_clients": 4},
    "delta_luna16": {
        "_target_": "fedbench.partition.delta.Delta",  # whose counts may be others
        "counts": [[26, 13], [26, 13], [20, 20], [13, 26], [13, 26]],
    },
    "dirichlet_prompt": {"num_clients": 10, "min_test": 1},
    "domain_officehome": {"min_size": 30},
    "file": {"path": str(Path(__file__).with_name("owners.npy"))},
    "pachinko": {"num_clients": 10, "coarse": [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]},
}
# sha256 of the split of digits (four silos: sample number modulo 4; every fifth sample published as test).
PINNED = {
    "class_disjoint": "546a59f914861629f04652b26c032c1dfd14a9f8f4fc703160b1714c159d47c4",
    "delta": "9fce33e8b1645ec6df3e895efff3a882beb425a6872d7c2769f3aaf2054c92e1",
    "delta_luna16": "2cd16933bb1a231daeb363ec4aa9096d9f0ed470e2d7e180dd170f03c1175342",
    "dirichlet": "3fcca9dac32835830bd3947c51f421b6758594476206f62279ae71c5d2122343",
    "dirichlet_pgfed": "67c4400a8f50e8d3cec9546e9c3527d793197072bcc052363c5a1b31583fbab7",
    "dirichlet_prompt": "ec075f9a954e96bde3970143534a771c6b3c316dd0681c35846cfbf46b940b49",
    "dirichlet_rarest": "3ab2ef258d452d2e7f8c76cec958e00a7d498b29e64eae9496c7ce4d5be1eb01",
    "domain": "2446009712d030519f3e3224ff0e36392c1e07cc48240759631f55c5cd6632ee",
    "domain_counts": "4208571ae7453eee8338e722b78fad19c27f0c5d652f4d15b73594d3292e2f45",
    "domain_dirichlet": "34e70301371f7969ed7944a93b3042447dca448150e5688e8d822d5514ac5eec",
    "domain_officehome": "f95238b691a028fd53eee81c29d03b8697f0ed2bd698b5f2b14f1b5aa5003414",
    "file": "015565ca33be6b24cbe06ca4b1c476abe978b60864ce8a341ff8067d123c0d4a",
    "iid": "3bd744b8ab892c66c58c392e758656b750b87fedb5083b1fb8b0ef5b25439a21",
    "pachinko": "cdd4d0de244ae6873419e0436f925584b879a601f9dd15c8670191ced9088846",
    "pathological": "395b941a5476445e9353f7f1d714704281474cdd2234c815fe88db4a98889724",
    "practical": "4e447e7503b121fd1feb142aac79c39575659341a0fa00d682b0069a9ff440f8",
}


@pytest.fixture(scope="module")
def digits() -> Arrays:
    """scikit-learn's digits with four client sites and every fifth sample published as test."""
    arrays = Digits().load()
    arrays.domain = np.arange(len(arrays)) % 4
    arrays.split[::5] = TEST
    return arrays


def partition_of(name: str) -> tuple[object, int | None, int]:
    """The partition, number of clients and seed of conf/partition/<name>.yaml."""
    values = {**OmegaConf.load(CONF / f"{name}.yaml"), **SMALLER.get(name, {})}
    num_clients, seed = values.pop("num_clients"), values.pop("seed")
    return instantiate(values, _convert_="all"), num_clients, seed


def labelled(*per_class: int) -> Arrays:
    """A data set without content: so many samples of class 0, of class 1 ..."""
    y = np.repeat(np.arange(len(per_class)), per_class)
    return Arrays(np.zeros((len(y), 1), np.float32), y, np.zeros(len(y), np.int8), len(per_class))


def all_indices(split: Split) -> np.ndarray:
    return np.concatenate([split.train.indices, split.val.indices, split.test.indices])


def shares(arrays: Arrays, lists: Ragged) -> np.ndarray:
    """Samples of each class that each client has, [N, C]."""
    return np.stack([np.bincount(arrays.targets[lists[i]], minlength=arrays.num_classes) for i in range(len(lists))])


# --- Ragged and Split ---------------------------------------------------------------------------------------


def test_ragged_keeps_lists_with_empty_ones():
    lists = [np.array([4, 1]), np.array([], np.int64), np.array([7])]
    ragged = Ragged.from_lists(lists)
    assert len(ragged) == 3
    assert ragged.sizes.tolist() == [2, 0, 1]
    assert all((ragged[i] == lists[i]).all() for i in range(3))
    assert ragged[-1].tolist() == [7]
    assert ragged.owners().tolist() == [0, 0, 2]
    assert ragged.ranks().tolist() == [0, 1, 0]
    with pytest.raises(IndexError):
        ragged[3]


def test_ragged_from_owners_keeps_the_order_within_a_client():
    ragged = Ragged.from_owners(np.array([5, 6, 7, 8]), np.array([1, 0, 1, 0]), 3)
    assert [ragged[i].tolist() for i in range(3)] == [[6, 8], [5, 7], []]


def test_split_is_saved_and_loaded_whole(tmp_path: Path, digits: Arrays):
    split = build_split(digits, Dirichlet(), 20, 1, val_fraction=0.15)
    split.save(tmp_path / "p.npz")
    again = Split.load(tmp_path / "p.npz")
    assert again.hash == split.hash
    assert (again.val.indices == split.val.indices).all()
    assert [p.name for p in tmp_path.iterdir()] == ["p.npz"]


def test_split_refuses_damaged_files_and_pickles(tmp_path: Path, digits: Arrays):
    path = tmp_path / "p.npz"
    build_split(digits, IID(), 20, 1).save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="not a partition"):
        Split.load(path)
    np.savez(path, train_indices=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ConfigError, match="not a partition"):
        Split.load(path)
    with pytest.raises(ConfigError, match="not a partition"):
        Split.load(tmp_path / "absent.npz")


# --- every partition ----------------------------------------------------------------------------------------


def test_every_partition_file_is_pinned():
    assert {p.stem for p in CONF.glob("*.yaml")} == set(PINNED)


@pytest.mark.parametrize("name", sorted(PINNED))
@pytest.mark.parametrize("how", ["merged", "published"])
def test_disjoint_complete_and_nobody_empty(name: str, how: str, digits: Arrays):
    method, num_clients, seed = partition_of(name)
    split = build_split(digits, method, num_clients, seed, split=how)
    used = all_indices(split)
    assert len(np.unique(used)) == len(used)
    assert (split.train.sizes > 0).all() and (split.test.sizes > 0).all()
    if how == "published":
        assert (digits.split[split.train.indices] == TRAIN).all()
        assert (digits.split[split.test.indices] == TEST).all()
    # Cutting by floor(share * n) leaves out less than one sample per client, class and pool; floor(n / N) per client.
    left = len(digits) - len(used)
    cut = {"pathological": 2 * digits.num_classes, "practical": 2 * digits.num_classes, "pachinko": 1}
    assert left == 0 or name in UNDERSAMPLING or 0 < left < cut.get(name, 0) * split.num_clients


@pytest.mark.parametrize("name", sorted(PINNED))
def test_same_seed_same_bytes(name: str, digits: Arrays):
    method, num_clients, seed = partition_of(name)
    split = build_split(digits, method, num_clients, seed)
    assert split.hash == PINNED[name]
    assert build_split(digits, method, num_clients, seed).hash == split.hash
    assert build_split(digits, method, num_clients, seed + 1).hash != split.hash


@pytest.mark.parametrize(
    "name", sorted(set(PINNED) - {"iid", "file", "pachinko", *UNDERSAMPLING, *(n for n in PINNED if "domain" in n)})
)
def test_train_and_test_shares_are_alike(name: str, digits: Arrays):
    """A client that holds a share of a class in train holds it in test too, up to rounding."""
    method, num_clients, seed = partition_of(name)
    split = build_split(digits, method, num_clients, seed, split="published")
    train, test = shares(digits, split.train), shares(digits, split.test)
    expected = train / np.maximum(train.sum(0), 1) * test.sum(0)
    # Both counts are rounded: one sample of the train pool is worth a quarter of one of the test pool.
    assert np.abs(expected - test).max() < 3


def test_global_generators_are_left_alone(digits: Arrays):
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    build_split(digits, Dirichlet(), 20, 1)
    build_split(digits, ClassDisjoint(), 10, 1)
    assert (np.random.get_state()[1] == state).all()  # noqa: NPY002


# --- the papers' draws --------------------------------------------------------------------------------------


def test_dirichlet_repeats_the_papers_script(digits: Arrays):
    """protocols.md 3.1 written as it is told, with lists, and scikit-learn's own 75/25 cut."""
    from sklearn.model_selection import train_test_split

    n_clients, alpha, y, rng = 25, 0.3, digits.targets, np.random.RandomState(1)
    held: list[list[int]] = [[]]
    while min(map(len, held)) < 40:
        held = [[] for _ in range(n_clients)]
        for c in range(10):
            members = np.flatnonzero(y == c)
            rng.shuffle(members)
            p = rng.dirichlet([alpha] * n_clients)
            p = np.array([0.0 if len(h) >= len(y) / n_clients else q for q, h in zip(p, held)])
            cuts = (np.cumsum(p / p.sum()) * len(members)).astype(int)[:-1]
            for h, part in zip(held, np.split(members, cuts)):
                h.extend(part)
    expected = [train_test_split(np.array(h), train_size=0.75, random_state=rng) for h in held]
    split = build_split(digits, Dirichlet(0.3, 40), n_clients, 1)
    for i, (train, test) in enumerate(expected):
        assert split.train[i].tolist() == train.tolist()
        assert split.test[i].tolist() == test.tolist()


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.5])
def test_dirichlet_cap(alpha: float, digits: Arrays):
    """Nobody receives a class while holding n / N samples (classes come in order), rounding apart."""
    split = build_split(digits, Dirichlet(alpha), 20, 3)
    table, _ = counts(digits, split)
    before = np.cumsum(table, 1) - table
    over = before >= len(digits) / 20
    assert over.any() and (table[:-1][over[:-1]] == 0).all()
    assert (table[-1][over[-1]] <= 1).all()  # the last client takes what the floor leaves
    free = build_split(digits, Dirichlet(alpha, min_size=2, cap=False), 10, 3)
    table, _ = counts(digits, free)
    before = np.cumsum(table, 1) - table
    assert (table[before >= len(digits) / 10] > 0).any()


class Shares(np.random.RandomState):
    """A generator whose Dirichlet draws are given."""

    def __init__(self, *shares: list[float]):
        super().__init__(0)
        self.shares = list(shares)

    def dirichlet(self, alpha, size=None):
        return np.array(self.shares.pop(0))


def test_who_holds_just_the_even_share_gets_nothing_more():
    arrays = labelled(10, 10)
    pool = np.arange(20)
    split = Dirichlet(0.1, min_size=10).assign(arrays.targets, [pool], 2, Shares([1.0, 0.0], [0.5, 0.5]))
    assert [set(arrays.targets[split[0][i]]) for i in range(2)] == [{0}, {1}]


def test_dirichlet_minima_hold_in_both_pools(digits: Arrays):
    split = build_split(digits, Dirichlet(0.5, min_size=20, min_test=5), 20, 0, split="published")
    assert split.train.sizes.min() >= 20
    assert split.test.sizes.min() >= 5


def test_dirichlet_is_skewed_by_alpha(digits: Arrays):
    def largest(alpha: float) -> float:
        table, _ = counts(digits, build_split(digits, Dirichlet(alpha), 10, 0))
        return float((table.max(1) / table.sum(1)).mean())

    assert largest(0.05) > 0.6 > 0.3 > largest(100.0)


def assert_shares(split: Split, arrays: Arrays, share: np.ndarray, rng: np.random.RandomState) -> None:
    """Training and then test samples are shuffled class by class, and divided by share [C, N] as in APPLE's code."""
    for part, lists in ((TRAIN, split.train), (TEST, split.test)):
        expected: list[list[int]] = [[] for _ in range(share.shape[1])]
        for c, class_share in enumerate(share):
            members = np.flatnonzero((arrays.targets == c) & (arrays.split == part))
            rng.shuffle(members)
            pieces = np.split(members, np.cumsum((class_share * len(members)).astype(int)))
            for samples, piece in zip(expected, pieces):
                samples.extend(piece)
        assert [lists[i].tolist() for i in range(len(lists))] == expected


def test_pathological_repeats_apples_code(digits: Arrays):
    """protocols.md 3.2: classes from permutations, shares per class, then train and test shuffles."""
    rng = np.random.RandomState(42)
    order = np.concatenate([rng.permutation(10) for _ in range(24 // 10 + 1)])[:24]
    share = np.zeros((10, 12))
    for i, c in enumerate(order):
        share[c, i // 2] = 1
    for c in range(10):
        holders = np.flatnonzero(share[c])
        drawn = [rng.rand() for _ in holders]
        share[c, holders] = np.array(drawn) / np.sum(drawn)
    split = build_split(digits, Pathological(2), 12, 42, split="published")
    assert_shares(split, digits, share, rng)


def test_pathological_classes_per_client():
    arrays = labelled(*[400] * 9)
    for seed in range(20):
        table, _ = counts(arrays, build_split(arrays, Pathological(2), 12, seed))
        assert ((table > 0).sum(1) <= 2).all()
        assert table.any(0).all()


@pytest.mark.parametrize(("num_classes", "each"), [(9, 2), (11, 2), (10, 3), (5, 5), (4, 3)])
def test_pathological_distinct(num_classes: int, each: int):
    for seed in range(50):
        held = Pathological(each, distinct=True)._draw_classes(num_classes, 12, np.random.RandomState(seed))
        assert held.shape == (12, each)
        assert all(len(set(row)) == each for row in held)
        assert np.ptp(np.bincount(held.ravel())) <= 1  # still whole permutations: evenly dealt


def test_pathological_may_deal_a_class_twice_as_the_papers_code_does():
    arrays = labelled(*[400] * 9)
    single = [(counts(arrays, build_split(arrays, Pathological(2), 12, s))[0] > 0).sum(1).min() == 1 for s in range(20)]
    assert any(single)


def test_pathological_without_holders_leaves_classes_out():
    arrays = labelled(*[50] * 10)
    table, _ = counts(arrays, build_split(arrays, Pathological(2), 3, 0))
    assert (table.sum(0) > 0).sum() == 6


def test_practical_shards():
    """Of each class one client has 80%, one 10% and ten 1%; the same in train and test."""
    arrays = labelled(*[10_000] * 10)
    arrays.split[::5] = TEST
    split = build_split(arrays, Practical(), 12, 42, split="published")
    train, test = shares(arrays, split.train), shares(arrays, split.test)
    assert (np.sort(train, 0) == np.array([80] * 10 + [800, 6400])[:, None]).all()
    assert (test * 4 == train).all()
    assert len({tuple(column) for column in train.T}) > 1


def test_practical_repeats_apples_code():
    """protocols.md 3.3: one vector, shuffled on and on, class by class; then the train and the test cuts."""
    arrays = labelled(*[600] * 5)
    arrays.split[::6] = TEST
    rng, vector, share = np.random.RandomState(42), np.array([0.01] * 10 + [0.1, 0.8]), []
    for _ in range(5):
        rng.shuffle(vector)
        share.append(vector.copy())
    split = build_split(arrays, Practical(), 12, 42, split="published")
    assert_shares(split, arrays, np.array(share), rng)


def test_practical_for_other_numbers_of_clients():
    arrays = labelled(*[1000] * 4)
    table, _ = counts(arrays, build_split(arrays, Practical(), 7, 0))
    assert (np.sort(table, 0) == np.array([20] * 5 + [100, 800])[:, None]).all()
    table, _ = counts(arrays, build_split(arrays, Practical([0.2, 0.3, 0.5]), 3, 0))
    assert (np.sort(table, 0) == np.array([200, 300, 500])[:, None]).all()


@pytest.mark.parametrize(
    ("num_classes", "num_clients", "sizes"),
    [
        (102, 10, [10] * 9 + [12]),
        (37, 10, [4] * 9 + [1]),
        (101, 10, [10] * 9 + [11]),
        (47, 10, [5] * 9 + [2]),
    ],
)
def test_class_disjoint_sizes_of_the_papers(num_classes: int, num_clients: int, sizes: list[int]):
    """protocols_prompt.md 3: Flowers, Pets, Food and DTD over ten clients."""
    arrays = labelled(*[8] * num_classes)
    table, _ = counts(arrays, build_split(arrays, ClassDisjoint(), num_clients, 0))
    assert (table > 0).sum(1).tolist() == sizes
    assert ((table > 0).sum(0) == 1).all()


def test_class_disjoint_shots_are_nested():
    arrays = labelled(*[30, 30, 3, 30])
    arrays.split[::3] = TEST
    methods = (ClassDisjoint(shots=k, short_classes="keep") for k in (1, 2, 4, 8, 16))
    splits = [build_split(arrays, method, 2, 0, split="published") for method in methods]
    for few, more in itertools.pairwise(splits):
        assert set(few.train.indices) < set(more.train.indices)
        assert few.test.indices.tolist() == more.test.indices.tolist()
    assert shares(arrays, splits[2].train).sum(0).tolist() == [4, 4, 2, 4]
    assert shares(arrays, splits[2].test).sum() == (arrays.split == TEST).sum()


def test_class_disjoint_shots_that_are_not_there_are_refused():
    arrays = labelled(*[30, 30, 3, 30])
    arrays.split[::3] = TEST
    with pytest.raises(ConfigError, match=r"shots=4 .* 1 of 4 classes .*class 2, with 2.*short_classes=keep"):
        build_split(arrays, ClassDisjoint(shots=4), 2, 0, split="published")
    split = build_split(arrays, ClassDisjoint(shots=2), 2, 0, split="published")
    assert shares(arrays, split.train).sum(0).tolist() == [2, 2, 2, 2]


def labels_of_cifar(num_classes: int) -> Arrays:
    """CIFAR without its images: 50,000 train and 10,000 test samples, classes evenly."""
    arrays = labelled(*[60_000 // num_classes] * num_classes)
    arrays.split[np.arange(60_000) % 6 == 0] = TEST
    return arrays


@pytest.mark.parametrize("num_classes", [10, 100])
def test_dirichlet_serves_the_papers_hundred_clients_of_cifar(num_classes: int):
    values = OmegaConf.load(CONF / "dirichlet_prompt.yaml")
    method = Dirichlet(values.alpha, values.min_size, values.min_test)
    for seed in range(3):
        split = build_split(labels_of_cifar(num_classes), method, values.num_clients, seed, split="published")
        assert split.train.sizes.sum() == 50_000 and split.test.sizes.sum() == 10_000
        assert split.train.sizes.min() >= 10 and split.test.sizes.min() >= 10


@pytest.mark.parametrize("sizes", [(958, 1123, 157, 295), (2629, 3283, 3091, 5000, 6081, 2767)])
def test_domain_dirichlet_serves_the_papers_domains(sizes: tuple[int, ...]):
    """Office-Caltech10 and DomainNet-10 by size: 5 clients per domain, at least 2 train and 2 test samples each."""
    method, num_clients, seed = partition_of("domain_dirichlet")
    n = sum(sizes)
    arrays = Arrays(np.zeros((n, 1), np.float32), np.arange(n) % 10, np.zeros(n, np.int8), 10)
    arrays.domain, arrays.split[::5] = np.repeat(np.arange(len(sizes)), sizes), TEST
    split = build_split(arrays, method, num_clients, seed, split="published")
    assert split.num_clients == 5 * len(sizes)
    assert split.train.sizes.min() >= 2 and split.test.sizes.min() >= 2
    assert all(set(arrays.domain[split.train[i]]) == {i // 5} for i in range(split.num_clients))


def test_pachinko_gives_everyone_as_much_and_uses_all():
    arrays = labels_of_cifar(100)
    split = build_split(arrays, Pachinko(), 100, 12345, split="published")
    assert (split.train.sizes + split.test.sizes == 600).all()
    assert (arrays.split[split.train.indices] == TRAIN).all() and (arrays.split[split.test.indices] == TEST).all()
    assert len(np.unique(all_indices(split))) == 60_000
    assert 440 < split.train.sizes.min() < split.train.sizes.max() < 560  # a sixth is test, by chance
    merged = build_split(arrays, Pachinko(), 100, 12345, test_fraction=0.25)
    assert (merged.train.sizes == 450).all() and (merged.test.sizes == 150).all()


def test_pachinko_is_skewed_by_superclass():
    """alpha decides how many of the 20 superclasses a client has, beta how evenly it has their classes."""
    arrays, parent = labels_of_cifar(100), np.array(CIFAR100)

    def held(alpha: float, beta: float) -> tuple[float, float]:
        split = build_split(arrays, Pachinko(alpha, beta), 100, 0, split="published")
        fine = shares(arrays, split.train)[:30].astype(float)  # [30, C]: nothing has run out yet
        groups = np.stack([fine[:, parent == g] for g in range(20)], 1)  # [30, 20, 5]
        many = groups.sum(2) > 15
        within = groups.max(2)[many] / groups.sum(2)[many]
        return float((groups.sum(2).max(1) / fine.sum(1)).mean()), float(within.mean())

    assert held(0.1, 10)[0] > 0.4 > 0.1 > held(100, 10)[0]
    assert held(0.1, 0.1)[1] > 0.6 > 0.45 > held(0.1, 10)[1] > 0.3 > held(0.1, 10_000)[1]


def test_pachinko_follows_the_tree_when_a_class_runs_out():
    """Superclass 0 has classes 0 and 1, superclass 1 class 2.  Class 0 is gone after 10 samples: its superclass keeps
    its half of the draws, so class 1 doubles, which would be 2:1 for class 2 if all classes shared what is freed."""
    parent, left = np.array([0, 0, 1]), np.array([10, 10**6, 10**6])
    drawn = Pachinko(1e6, 1e6)._draw_classes(20_000, left, parent, np.random.RandomState(0))
    assert np.bincount(drawn)[0] == 10
    assert np.bincount(drawn)[1] == pytest.approx(10_000, rel=0.03)
    assert left.tolist() == [10, 10**6, 10**6]
    tail = drawn[np.flatnonzero(drawn == 0)[-1] + 1 :]
    assert np.bincount(tail, minlength=3)[1:].min() > 9_000


def test_pachinko_survives_a_tiny_alpha():
    """Dir(alpha) is then a single superclass, which is exhausted again and again."""
    split = build_split(labels_of_cifar(100), Pachinko(1e-9), 100, 0, split="published")
    assert (split.train.sizes + split.test.sizes == 600).all()


def test_pachinko_superclasses_of_cifar_100():
    """The table against the superclasses as CIFAR-100's page lists them."""
    from fedbench.data.images.cifar import CIFAR100 as Source

    names = Source.classes.split()
    assert len(names) == len(CIFAR100) == 100 and np.bincount(CIFAR100).tolist() == [5] * 20
    for coarse, fine in {
        0: "beaver dolphin otter seal whale",
        1: "aquarium_fish flatfish ray shark trout",
        2: "orchid poppy rose sunflower tulip",
        3: "bottle bowl can cup plate",
        4: "apple mushroom orange pear sweet_pepper",
        5: "clock keyboard lamp telephone television",
        6: "bed chair couch table wardrobe",
        7: "bee beetle butterfly caterpillar cockroach",
        8: "bear leopard lion tiger wolf",
        9: "bridge castle house road skyscraper",
        10: "cloud forest mountain plain sea",
        11: "camel cattle chimpanzee elephant kangaroo",
        12: "fox porcupine possum raccoon skunk",
        13: "crab lobster snail spider worm",
        14: "baby boy girl man woman",
        15: "crocodile dinosaur lizard snake turtle",
        16: "hamster mouse rabbit shrew squirrel",
        17: "maple_tree oak_tree palm_tree pine_tree willow_tree",
        18: "bicycle bus motorcycle pickup_truck train",
        19: "lawn_mower rocket streetcar tank tractor",
    }.items():
        assert [name for name, c in zip(names, CIFAR100) if c == coarse] == fine.split()


def test_domain_makes_every_silo_a_client(digits: Arrays):
    split = build_split(digits, Domain(), None, 0, split="published")
    assert split.num_clients == 4
    assert all((digits.domain[split.train[i]] == i).all() for i in range(4))
    assert len(all_indices(split)) == len(digits)


@pytest.mark.parametrize("alpha", [None, 0.3])
def test_domain_with_several_clients_each_is_domain_major(alpha: float | None, digits: Arrays):
    split = build_split(digits, Domain(3, alpha), None, 0)
    owners = [set(digits.domain[np.concatenate([split.train[i], split.test[i]])]) for i in range(12)]
    assert owners == [{i // 3} for i in range(12)]
    assert len(all_indices(split)) == len(digits)


def test_iid_sizes_differ_by_one(digits: Arrays):
    split = build_split(digits, IID(), 7, 0)
    sizes = split.train.sizes + split.test.sizes
    assert sizes.max() - sizes.min() <= 1


# --- cuts ---------------------------------------------------------------------------------------------------


def test_merged_cut_floors_the_training_part():
    arrays = labelled(10, 11)
    split = build_split(arrays, IID(), 3, 0)  # seven samples each
    assert split.train.sizes.tolist() == [5, 5, 5]
    split = build_split(arrays, IID(), 3, 0, test_fraction=0.9)
    assert split.train.sizes.tolist() == [1, 1, 1]


@pytest.mark.parametrize("size, fraction, kept", [(20, 0.9, 2), (50, 0.9, 5), (10, 0.7, 3), (20, 0.8, 4), (21, 0.9, 2)])
def test_a_cut_is_not_one_sample_short_by_rounding(size: int, fraction: float, kept: int):
    """(1 - 0.9) * 20 is 1.9999999999999996 in floating point."""
    split = build_split(labelled(size, size), IID(), 2, 0, test_fraction=fraction)
    assert split.train.sizes.tolist() == [kept, kept]


def test_validation_part_is_cut_from_train(digits: Arrays):
    plain = build_split(digits, Practical(), 4, 42, split="published")
    split = build_split(digits, Practical(), 4, 42, split="published", val_fraction=0.15)
    assert (split.train.sizes == np.floor(0.85 * plain.train.sizes + 1e-9)).all()
    assert (split.val.sizes + split.train.sizes == plain.train.sizes).all()
    assert split.test.indices.tolist() == plain.test.indices.tolist()  # drawn before the validation part
    assert all(set(split.val[i]) <= set(plain.train[i]) for i in range(4))


def test_published_validation_part(digits: Arrays):
    arrays = Arrays(digits.inputs, digits.targets, digits.split.copy(), 10)
    arrays.split[1::10] = VAL
    split = build_split(arrays, Dirichlet(1.0), 10, 0, split="published")
    assert (arrays.split[split.val.indices] == VAL).all()
    assert len(split.val.indices) == (arrays.split == VAL).sum()
    cut = build_split(arrays, Dirichlet(1.0), 10, 0, split="published", val_fraction=0.2)
    assert set(cut.train.indices) | set(cut.val.indices) == set(np.flatnonzero(arrays.split != TEST))
    many = build_split(arrays, IID(), 200, 0, split="published")  # 143 validation samples
    assert many.val.sizes.min() == 0 and many.val.sizes.sum() == (arrays.split == VAL).sum()
    merged = build_split(arrays, Dirichlet(1.0), 10, 0)
    assert len(merged.val.indices) == 0 and len(all_indices(merged)) == len(arrays)


def test_stratified_keeps_proportions_in_both_pools(digits: Arrays):
    split = build_split(digits, Practical(), 4, 42, split="stratified", test_fraction=0.2)
    assert abs(len(split.test.indices) / len(all_indices(split)) - 0.2) < 0.02
    train, test = shares(digits, split.train), shares(digits, split.test)
    assert np.abs(train.sum(0) / 4 - test.sum(0)).max() < 8


@pytest.mark.parametrize("split", ["merged", "published"])
def test_a_subset_keeps_classes_silos_and_parts(split: str, digits: Arrays):
    result = build_split(digits, IID(), 5, 3, split, subset=0.1)
    used = np.concatenate([result.train.indices, result.test.indices])
    kinds = [digits.labels(), digits.domain, *([digits.split] if split == "published" else [])]
    _, kind, there = np.unique(np.stack(kinds), axis=1, return_inverse=True, return_counts=True)
    kept = np.bincount(kind.reshape(-1)[used], minlength=len(there))
    assert np.array_equal(kept, np.maximum(1, np.round(0.1 * there)))
    again, other = (build_split(digits, IID(), 5, seed, split, subset=0.1) for seed in (3, 4))
    assert again.hash == result.hash
    assert set(other.train.indices) != set(result.train.indices)
    whole = build_split(digits, IID(), 5, 3, split)
    assert build_split(digits, IID(), 5, 3, split, subset=1.0).hash == whole.hash


def test_a_tiny_subset_keeps_every_class(digits: Arrays):
    result = build_split(digits, IID(), 2, 0, subset=0.001)
    assert len(np.unique(digits.labels()[np.concatenate([result.train.indices, result.test.indices])])) == 10


@pytest.mark.parametrize("kind", ["multilabel", "segmentation", "dict"])
def test_other_targets_are_partitioned_by_their_label(kind: str):
    arrays = Synthetic(kind).load()
    table, names = counts(arrays, build_split(arrays, Dirichlet(0.1), 5, 0))
    assert table.sum() == len(arrays) and len(names) == table.shape[1]
    assert (table.max(1) / table.sum(1)).mean() > 0.45


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "num_clients", "options", "message"),
    [
        (IID(), 1798, {}, "1,798 must be at most the number of samples, 1,797"),
        (IID(), 1000, {}, "too few for training and testing: lower partition.num_clients"),
        (IID(), 400, {"split": "published"}, "at most the number of test samples, 360"),
        (IID(), 0, {}, "must be >= 1"),
        (IID(), None, {}, "set it to a number >= 1"),
        (IID(), 10, {"test_fraction": 0.0}, "test_fraction=0.0"),
        (IID(), 10, {"val_fraction": 1.0}, "val_fraction=1.0"),
        (IID(), 10, {"split": "official"}, "'official' is unknown: set it to one of"),
        (Dirichlet(0.1, 100), 20, {}, "need 2,000 samples, but there are 1,797"),
        (Dirichlet(0.1, 1, 20), 20, {"split": "published"}, "need 400 samples, but there are 360"),
        (Dirichlet(1e-4), 20, {}, "alpha=0.0001 for 20 clients"),
        (Dirichlet(1e-300), 20, {}, "the smallest client had at most 0"),
        (Pathological(11), 5, {}, "classes_per_client=11 must be at most 10,"),
        (Pathological(1), 1797, {}, "fewer than 2 samples"),
        (Practical(), 2, {}, "at least 3"),
        (Practical([0.5, 0.5]), 3, {}, "2 values for partition.num_clients=3"),
        (Practical([0.9, 0.3]), 2, {}, "sum of at most 1"),
        (ClassDisjoint(), 11, {}, "is not possible with 10 classes"),
        (ClassDisjoint(), 6, {}, "is not possible with 10 classes"),
        (ClassDisjoint(shots=4), 5, {}, "set dataset.split=published"),
        (ClassDisjoint(shots=200), 5, {"split": "published"}, "10 of 10 classes"),
        (Pachinko(), 5, {}, "superclasses of CIFAR-100, but the data set has 10 classes instead of 100"),
        (Pachinko(coarse=[0, 1]), 5, {}, "of the 10 classes, but it has 2"),
        (Pachinko(coarse=[-1] * 10), 5, {}, "whole numbers >= 0"),
        (Domain(), 5, {}, "4 client sites"),
        (Domain(5, 1e-4), None, {}, "client site 0: no Dirichlet partition"),
    ],
)
def test_impossible_requests_are_refused_at_once(method, num_clients, options, message: str, digits: Arrays):
    def build():
        with pytest.raises(ConfigError) as refusal:
            build_split(digits, method, num_clients, 0, **options)
        messages.append(str(refusal.value))

    messages: list[str] = []
    assert calls(build) < 400_000  # 280,000 at most, for 2,000 draws
    assert message in messages[0]
    assert "\n" not in messages[0]


def test_domain_needs_silos_and_published_needs_a_test_part():
    with pytest.raises(ConfigError, match="client sites"):
        build_split(labelled(9, 9), Domain(), None, 0)
    with pytest.raises(ConfigError, match="no published test part"):
        build_split(labelled(9, 9), IID(), 2, 0, split="published")


def test_a_client_without_test_samples_is_refused():
    arrays = labelled(40, 40)
    arrays.split[:8] = TEST  # class 0 only
    with pytest.raises(ConfigError, match=r"1 of 2 clients .* no test samples"):
        build_split(arrays, ClassDisjoint(), 2, 0, split="published")


def test_a_partition_that_doubles_a_sample_is_caught(digits: Arrays):
    class Wrong:
        def assign(self, labels, pools, num_clients, rng, domain=None):
            return [[np.arange(10)] * num_clients]

    with pytest.raises(
        ConfigError, match=r"10 samples to more than one client or part, for example sample 0 to client 0"
    ):
        build_split(digits, Wrong(), 3, 0)


def test_retries_end_by_the_work_done(monkeypatch: pytest.MonkeyPatch):
    """Many clients: far fewer redraws than max_tries, so seconds and not hours."""
    monkeypatch.setattr(dirichlet, "MAX_WORK", 10_000_000)
    arrays = labelled(*[3000] * 10)
    with pytest.raises(ConfigError, match="in 18 tries"):  # 10 million // (30,000 + 5 * 10 * 10,000)
        build_split(arrays, Dirichlet(0.1, min_size=2), 10_000, 0)


@pytest.mark.slow
def test_a_million_clients_take_seconds():
    n = 2_000_000
    arrays = Arrays(np.zeros((n, 1), np.float32), np.arange(n) % 10, np.zeros(n, np.int8), 10)
    split = build_split(arrays, IID(), 1_000_000, 0)
    assert (split.train.sizes == 1).all() and (split.test.sizes == 1).all()
    assert split.train.select([999_999, 0]).sizes.tolist() == [1, 1]


# --- the command --------------------------------------------------------------------------------------------


def test_command_prints_table_hash_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    figure, saved = tmp_path / "sub" / "p.png", tmp_path / "p.npz"
    status = main(["partition.num_clients=5", "--figure", str(figure), "partition.alpha=1", "--out", str(saved)])
    printed = capsys.readouterr().out
    assert status == 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert f"hash {Split.load(saved).hash}" in printed
    assert "5 clients, 1,797 samples" in printed


def test_command_reports_mistakes_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").touch()
    for words in (
        ["partition.num_clients=9999"],
        ["partition.alpha=0"],
        ["--out", str(tmp_path / "file" / "p.npz")],
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith("fedbench: ") and error.count("\n") == 1


def test_importing_data_and_partitions_is_light():
    code = (
        "import sys, fedbench.data.base, fedbench.partition.base, fedbench.partition.dirichlet\n"
        "print([m for m in ('torch', 'sklearn', 'matplotlib', 'PIL', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
