"""Sketches by hand, and networks built from them."""

import numpy as np
import pytest
import torch
from by_hand import six_clients
from tiny import Point, all_clients, arrays_of, close, engine, engine_on, equal, mlp, split_of, targets_federation

from fedbench.algorithms._similarity import knn, nearest, of_edges, sdwd, sdwd_pairwise, sketches
from fedbench.engine.cohort import Cohort


def of_images(e, client: int) -> torch.Tensor:
    return e.federation.inputs[torch.from_numpy(e.federation.splits["train"][client])]  # [n, c, h, w]


def two_channels():
    """Images [2, 3, 4]; a client's test images differ from its training images by far."""
    x = np.random.default_rng(0).normal(size=(20, 2, 3, 4)).astype(np.float32)
    split = split_of([3, 5], test=[2, 10])
    x[8:] += 100
    return engine(arrays_of(x, np.arange(20) % 3, 3), split, mlp(24))


# -- sketches --------------------------------------------------------------------------------------------
def test_label_histograms_are_shares_of_the_client() -> None:
    e = six_clients()
    counts = torch.from_numpy(e.federation.label_counts).float()
    close(sketches(all_clients(e), "label_hist", 1), counts / counts.sum(1, keepdim=True))
    equal(sketches(Cohort(e, np.array([1, 4]), 0), "label_hist", 1), sketches(all_clients(e), "label_hist", 1)[[1, 4]])


def test_sketches_of_images() -> None:
    """Means over training samples, and second moments of pixels about the mean of all of them."""
    e = two_channels()
    cohort = all_clients(e)
    means, images, moments = (sketches(cohort, kind, None) for kind in ("feature_mean", "sample_mean", "second_moment"))
    assert means.shape == (2, 24) and images.shape == (2, 12) and moments.shape == (2, 144)
    for i in range(2):
        x = of_images(e, i)
        close(means[i], x.mean(0).flatten())
        close(images[i], x.mean((0, 1)).flatten())
        pixels = (x - x.mean()).reshape(-1, 12)
        close(moments[i].view(12, 12), sum(torch.outer(p, p) for p in pixels) / len(pixels), 1e-4)


def test_so_many_samples_are_drawn_by_key() -> None:
    e = six_clients()
    cohort = all_clients(e)
    some = sketches(cohort, "feature_mean", 2)
    equal(some, sketches(cohort, "feature_mean", 2))
    x = of_images(e, 1).flatten(1)
    pairs = (x[:, None] + x[None]) / 2
    assert float((pairs - some[1]).abs().sum(-1).min()) < 1e-5
    assert not torch.allclose(some, sketches(cohort, "feature_mean", None))
    assert not torch.allclose(some, sketches(all_clients(six_clients(seed=1)), "feature_mean", 2))


def test_inputs_that_are_no_images() -> None:
    e = engine_on(targets_federation([np.ones((2, 2)), np.ones((3, 2))], inputs=[[1, 3], [1, 2, 6]]), Point([0, 0]))
    for kind in ("feature_mean", "sample_mean"):
        close(sketches(all_clients(e), kind, None), torch.tensor([[2.0], [3.0]]))
    close(sketches(all_clients(e), "second_moment", None), torch.tensor([[1.0], [14 / 3]]))


# -- networks --------------------------------------------------------------------------------------------
LINE = torch.tensor([[0.0], [1.0], [3.0], [7.0], [7.5]])
COMPLETE = ~torch.eye(5, dtype=torch.bool)


def edges(adjacency: torch.Tensor) -> list[list[int]]:
    assert torch.equal(adjacency, adjacency.T)
    return adjacency.triu().nonzero().tolist()


def test_nearest_neighbours() -> None:
    """Lists of one on a line: 0 has 1, 1 has 0, 2 has 1, 3 has 4, 4 has 3."""
    assert edges(knn(LINE, 1, "l2")) == [[0, 1], [1, 2], [3, 4]]
    assert nearest(torch.tensor([[6.0], [2.0]]), LINE, 2, "l1").tolist() == [[3, 4], [1, 2]]


def test_the_lower_of_equally_near_clients_comes_first() -> None:
    same = torch.ones(5, 3)
    assert nearest(same, same, 2, "l2", themselves=True).tolist() == [[1, 2], [0, 2], [0, 1], [0, 1], [0, 1]]


def test_metrics_differ() -> None:
    """From 0: (3, 0) is at 3 and 3, (2, 2) at 4 and 2.8."""
    S = torch.tensor([[0.0, 0.0], [3.0, 0.0], [2.0, 2.0]])
    assert nearest(S[:1], S[1:], 1, "l1").item() == 0 and nearest(S[:1], S[1:], 1, "l2").item() == 1


@pytest.mark.parametrize("k", [4, 5, 100])
def test_as_many_neighbours_as_others_are_everybody(k: int) -> None:
    equal(knn(LINE, k, "l2"), COMPLETE)


def test_one_client_has_no_neighbours() -> None:
    assert not edges(knn(LINE[:1], 3, "l2"))


def test_listed_edges_count_once() -> None:
    assert edges(of_edges(4, [(2, 0), (0, 2), (3, 2)])) == [[0, 2], [2, 3]]


# -- differences of weights ------------------------------------------------------------------------------
def test_standard_deviation_of_weights_difference() -> None:
    """Of 0, 2 in one coordinate and 1, 1 in the other; clients that agree, permuted, and one alone."""
    z = torch.tensor([[0.0, 1.0], [2.0, 1.0]])
    close(sdwd(z), torch.tensor([1.0, 0.0]))
    close(sdwd_pairwise(z, COMPLETE[:2, :2]), torch.tensor([2.0, 0.0]))
    z = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 3)))
    close(sdwd(z[[3, 1, 0, 4, 2]]), sdwd(z))
    close(sdwd(z), torch.tensor(z.numpy().std(0)))
    equal(sdwd(z[:1]), torch.zeros(3).double())
    equal(sdwd_pairwise(z, torch.zeros(5, 5, dtype=torch.bool)), torch.zeros(3).double())
    equal(sdwd_pairwise(z[:1].expand(5, -1), COMPLETE), torch.zeros(3).double())
