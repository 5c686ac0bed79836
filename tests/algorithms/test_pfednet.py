"""pFedNet: rounds by hand, its limits, and transmitted messages."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import COHORTS, Normed, again, four_of_six, products, six_clients
from tiny import (
    HEAD,
    Point,
    all_clients,
    close,
    deployed,
    engine,
    engine_on,
    equal,
    play,
    ragged,
    seeded,
    targets_federation,
)

from fedbench.algorithms import _similarity as similarity
from fedbench.algorithms._fusion import Network, fuse
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedrep import FedRep
from fedbench.algorithms.local import Local
from fedbench.algorithms.pfednet import PFedNet, ordered
from fedbench.channel.privacy import Privacy
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.optim import SGD
from fedbench.engine.training import LocalTraining
from fedbench.nn.flat import FlatModel
from fedbench.simulation import new_clients
from fedbench.testing.algorithm import check_algorithm

FULL: dict[str, Any] = {"batch_size": 100}
COMPLETE = [list(edge) for edge in itertools.combinations(range(6), 2)]


def normed(columns: dict | None = None, **options: Any):
    arrays, split = ragged((8, 20, 12, 4, 18, 10))  # no batch of one
    model = FlatModel(seeded(Normed, 0), columns or HEAD)
    return engine(arrays, split, model, SGD(lr=0.1), **{**FULL, **options})  # type: ignore[arg-type]


class HeadFirst(PFedNet):
    """pFedNet with its phases in FedRep's order."""

    def x_phase(self, cohort: Cohort, theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return super().x_phase(cohort, super().z_phase(cohort, theta), x)

    def z_phase(self, cohort: Cohort, theta: torch.Tensor) -> torch.Tensor:
        return theta


# -- by hand ---------------------------------------------------------------------------------------------
def test_a_round_by_hand() -> None:
    """u = 1, h = 2, lr 0.1, c = (3, 5).  x: u = 1 + 0.1 (1 x 2, 3 x 2) = (1.2, 1.6), of mean 1.4.  z, at it:
    h = 2 + 0.1 x 1.4 (0.2, 2.2) = (2.028, 2.308); both move tau = 2 x 0.1 x 0.5 = 0.1 towards each other."""
    e = products([3, 5], SGD(lr=0.1))
    a = play(e, PFedNet(lam=0.5))
    close(deployed(e, a), torch.tensor([[1.4, 2.128], [1.4, 2.208]]))
    assert a.x.item() == pytest.approx(1.4)


def test_the_printed_step_by_hand() -> None:
    """V = 2 + (0.028, 0.308) / 2 = (2.014, 2.154), tau = 0.1 x 0.5 = 0.05: (2.064, 2.104)."""
    e = products([3, 5], SGD(lr=0.1))
    a = play(e, PFedNet(lam=0.5, z_step="paper"))
    close(deployed(e, a), torch.tensor([[1.4, 2.064], [1.4, 2.104]]))


def test_gradients_by_hand() -> None:
    """Clients of 1 and 3 samples count alike.  I = 2: u = 1 + 0.1 x mean(2, 6) = 1.4, then 1.4 + 0.1 x mean of 2 x
    (0.2, 2.2) = 1.64; J = 2 with the printed step, tau = 0.1 x 0.1: h = 2 + 0.05 x 1.64 x (3 - 3.28, 5 - 3.28)."""
    federation = products([3, 5, 5, 5], SGD(lr=0.1)).federation
    two = [np.array([0]), np.array([1, 2, 3])]
    part = type(federation.splits["train"]).from_lists(two)
    e = products([3, 5, 5, 5], SGD(lr=0.1), **FULL)
    e.federation.splits |= {"train": part, "test": part}
    e.federation.__post_init__()
    a = PFedNet(lam=0.1, mode="gradient", x_steps=2, z_steps=2)
    e.rows.num_clients = e.rows.most = 2
    play(e, a)
    h = torch.tensor([2.0, 2.0])
    for _ in range(2):
        h = h + 0.05 * 1.64 * (torch.tensor([3.0, 5.0]) - 1.64 * h)
        h = h + torch.tensor([0.01, -0.01]) if h[1] - h[0] > 0.02 else h.mean().expand(2)
    close(a.x, torch.tensor([1.64]))
    close(a.Z[:, 0], h)
    one = PFedNet(lam=0.1, mode="gradient")
    e.rows.all.clear()
    cohort = again(e, play(e, one, 0), 0)
    assert cohort.cost.steps == 2 * 2


# -- limits ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [six_clients, four_of_six, normed])
@pytest.mark.parametrize("options", [FULL, {"batch_size": 4}])
def test_without_a_penalty_it_is_fedrep(make: Any, options: dict) -> None:
    a, b = make(epochs=2, **options), make(epochs=2, **options)
    ours = play(a, HeadFirst(lam=0), 3, COHORTS)
    theirs = play(b, FedRep(head_epochs=2), 3, COHORTS)
    close(deployed(a, ours), deployed(b, theirs), 1e-6)
    close(ours.x, theirs.u, 1e-6)


@pytest.mark.parametrize("options", [{"edges": COMPLETE}, {"k": 5}])
def test_with_a_large_penalty_all_agree(options: dict) -> None:
    e = six_clients()
    a = play(e, PFedNet(lam=1e6, **options), 2, COHORTS)
    equal(a.Z, a.Z[:1].expand(6, -1))
    equal(deployed(e, a), deployed(e, a)[:1].expand(6, -1))
    assert not torch.allclose(a.Z[0], e.model.columns["head"].take(e.model.init_row()), atol=1e-3)


def test_without_personal_columns_it_is_fedavg() -> None:
    a, b = four_of_six(columns={"head": []}), four_of_six(columns={"head": []})
    ours, theirs = play(a, PFedNet(), 3, COHORTS), play(b, FedAvg(), 3, COHORTS)
    close(deployed(a, ours), deployed(b, theirs), 1e-6)
    assert ours.sketch_of is None and ours.matrices() == {}


@pytest.mark.parametrize("personal, columns", [("all", None), ("head", {"head": ["body.*", "head.*"]})])
def test_without_shared_columns_it_is_network_lasso(personal: str, columns: dict | None) -> None:
    """No x-phase; without a penalty Local, with a large one and 1 / N FedAvg of everybody, in two rounds."""
    e, f, g = (six_clients(columns=columns, **FULL) for _ in range(3))
    a = play(e, PFedNet(lam=0, personal=personal), 2)
    cohort = again(e, a, 2)
    numbers = 4 * 6 * e.model.size
    assert (cohort.cost.bytes_down, cohort.cost.bytes_up) == (numbers, numbers)
    assert cohort.cost.steps == 6
    close(deployed(e, a), deployed(f, play(f, Local(), 3)), 1e-6)
    h = six_clients(columns=columns, **FULL)
    g = replace(g, client_weights="uniform")
    fused = play(h, PFedNet(lam=1e6, personal=personal), 2)
    close(deployed(h, fused), deployed(g, play(g, FedAvg(), 2)), 1e-6)
    assert not torch.allclose(deployed(h, fused), deployed(e, a))


@pytest.mark.parametrize("lam", [0.0, 0.01, 1.0, 1e6])
def test_equal_clients_stay_equal(lam: float) -> None:
    e = products([3, 3, 3, 3, 3], SGD(lr=0.1))
    a = play(e, PFedNet(lam=lam), 3)
    close(a.Z, a.Z[:1].expand(5, -1), 1e-12)


def test_one_client_and_no_edge() -> None:
    e, f = products([3], SGD(lr=0.1)), products([3], SGD(lr=0.1))
    close(deployed(e, play(e, HeadFirst(lam=1), 2)), deployed(f, play(f, FedRep(), 2)), 1e-6)
    e, f = six_clients(), six_clients()
    linked, apart = (deployed(g, play(g, PFedNet(lam=lam, edges=[[0, 1]]))) for g, lam in ((e, 1), (f, 0)))
    assert torch.isfinite(linked).all() and not torch.allclose(linked[:2], apart[:2])
    close(linked[2:], apart[2:], 1e-6)


# -- the Z-step ------------------------------------------------------------------------------------------
def ways(e, a: PFedNet) -> torch.Tensor:
    """dZ of the first round, x first."""
    theta = all_clients(e).train(e.model.init_row(), columns=a.shared).theta
    x = all_clients(e).weights @ a.shared.take(theta)
    start = a.shared.put(e.model.init_row(), x)
    end = all_clients(e).train(start, columns=a.fused, how=LocalTraining(key="head")).theta
    return a.fused.take(start) - a.fused.take(end)


@pytest.mark.parametrize("norm", ["l1", "l2", "linf"])
@pytest.mark.parametrize(
    "options, edges",
    [({"edges": [[0, 1], [1, 2], [3, 4], [2, 5]]}, [[0, 1], [1, 2], [3, 4], [2, 5]]), ({"k": 5}, COMPLETE)],
    ids=["edges", "k"],
)
def test_the_step_is_the_fusion_of_what_clients_trained(norm: Any, options: dict, edges: list) -> None:
    e = six_clients(columns={"head": ["body.1.bias", "head.*"]}, **FULL)
    a = play(e, PFedNet(lam=0.002, norm=norm, **options))
    V = a.fused.take(e.model.init_row()) - ways(e, a)
    net, tau = Network(similarity.of_edges(6, edges)), 6 * 0.1 * 0.002  # a step a round, of rate 0.1
    close(a.Z, fuse(V, net, tau, norm).Z, 1e-5)
    assert a.iterations.item() > 0


@pytest.mark.parametrize("z_step, rates", [("full", [0.1, 0.3]), ("single", [0.2, 0.2])])
def test_clients_with_rates_of_their_own(z_step: Any, rates: list) -> None:
    """Each is drawn by N lr_i lam; by the mean rate in a single step."""
    e = products([3, 5], SGD(lr=[0.1, 0.3]))
    a = play(e, PFedNet(lam=0.1, z_step=z_step))
    u = 1 + (0.1 * 2 + 0.3 * 6) / 2
    h = torch.tensor([2 + 0.1 * u * (3 - 2 * u), 2 + 0.3 * u * (5 - 2 * u)])
    close(a.Z[:, 0], h + 2 * 0.1 * torch.tensor(rates) * torch.sign(h.flip(0) - h))


# -- the convex minimizer --------------------------------------------------------------------------------
EDGES = [[0, 1], [1, 2], [2, 3]]
INPUTS, TARGETS = (0.8, 1.0, 1.2, 1.1), np.array([[2.0, 1.0, 0.0], [-1.0, 0.0, 3.0], [0.0, 4.0, 1.0], [1.0, -2.0, 2.0]])
LAM = 0.1  # no two clients merge


def least_squares(optimizer: SGD, steps: Any) -> Engine:
    """f_i = 0.5 ||a_i z_i - y_i||^2, a sample each, so many steps a round."""
    federation = targets_federation([y[None] for y in TARGETS], inputs=[np.array([a]) for a in INPUTS])
    return engine_on(federation, Point([0.0] * 3), optimizer, batch_size=1, epochs=steps)


def minimizer(lam: float) -> torch.Tensor:
    """Of 1/4 sum_i f_i + lam sum over edges of ||z_i - z_j||, by Newton's method."""
    a2, B = np.square(INPUTS)[:, None], np.eye(4)[[0, 1, 2]] - np.eye(4)[[1, 2, 3]]
    z = TARGETS / np.array(INPUTS)[:, None]
    for _ in range(50):
        apart = B @ z
        length = np.linalg.norm(apart, axis=1)[:, None]
        unit = apart / length
        slope = (a2 * z - np.array(INPUTS)[:, None] * TARGETS) / 4 + lam * B.T @ unit
        curvature = np.kron(np.diag(a2[:, 0]) / 4, np.eye(3))
        for b, u, n in zip(B, unit, length[:, 0]):
            curvature += lam / n * np.kron(np.outer(b, b), np.eye(3) - np.outer(u, u))
        z = z - np.linalg.solve(curvature, slope.ravel()).reshape(4, 3)
    assert np.abs(slope).max() < 1e-12 and length.min() > 0.5
    return torch.from_numpy(z).float()


def off(e: Engine, begin: float = 0.0, rounds: int = 20, cohorts: Any = None, **options: Any) -> float:
    """How far Z is from the minimizer after rounds that start from the one at lam = begin, in parts of how far the
    penalty moves it."""
    a = play(e, PFedNet(**{"lam": LAM, "personal": "all", "edges": EDGES, **options}), 0)
    a.Z = minimizer(begin)
    e.rows.all["z"][np.arange(4)] = a.Z
    a.holds[:] = True
    for r in range(rounds):
        again(e, a, r, None if cohorts is None else cohorts[r % len(cohorts)])
    return float((a.Z - minimizer(LAM)).norm() / (minimizer(0) - minimizer(LAM)).norm())


@pytest.mark.parametrize("steps", [1, 2, 5, 20])
@pytest.mark.parametrize("momentum, nesterov", [(0, False), (0.9, False), (0.9, True)])
def test_the_minimizer_stays(steps: int, momentum: float, nesterov: bool) -> None:
    """Of the objective at lam itself.  Exactly for one step; for more the rates add up to 0.1 here, which is about how
    much a gradient changes in a round."""
    unit = float(SGD(1.0, momentum=momentum, nesterov=nesterov).reach(steps).sum())
    e = least_squares(SGD(lr=0.1 / unit, momentum=momentum, nesterov=nesterov), steps)
    assert off(e, begin=LAM) < (1e-4 if steps == 1 else 0.08)


def test_the_minimizer_stays_with_the_printed_step() -> None:
    assert off(least_squares(SGD(lr=0.1), 1), begin=LAM, z_step="paper") < 1e-4
    assert off(least_squares(SGD(lr=0.01), 10), begin=LAM, z_step="paper") < 0.08


def test_the_minimizer_is_reached() -> None:
    assert off(least_squares(SGD(lr=0.5), 1), rounds=60) < 1e-4
    assert off(least_squares(SGD(lr=0.02), 5), rounds=50) < 0.08
    assert off(least_squares(SGD(lr=0.01, momentum=0.9, reset="never"), 1), rounds=60) < 0.08
    assert off(least_squares(SGD(lr=0.02), 5), rounds=30, z_step="single") > 0.5


def test_the_single_step_divides_lam_by_their_number() -> None:
    assert off(least_squares(SGD(lr=0.02), 5), begin=LAM, z_step="single", lam=5 * LAM) < 0.08


def test_clients_of_different_numbers_of_steps_share_one_objective() -> None:
    e = least_squares(SGD(lr=[0.005, 0.02, 0.01, 0.005]), np.array([20, 5, 5, 10]))
    assert off(e, begin=LAM, rounds=40) < 0.08


def test_absent_clients_do_not_make_the_penalty_weigh_more() -> None:
    """Half of the clients in turn."""
    turns = [[0, 2], [1, 3], [0, 1], [2, 3], [0, 3], [1, 2]]
    assert off(least_squares(SGD(lr=0.01), np.array([4, 2, 2, 4])), begin=LAM, rounds=90, cohorts=turns) < 0.08


def test_the_rates_of_a_schedule_by_steps_add_up() -> None:
    """0.1 (1 + 3/4 + 1/2 + 1/4) in the one round of four steps, with momentum (1, 1.5, 1.75, 1.875) times that."""
    schedule = {"name": "linear", "per": "step"}
    for momentum, reach in ((0.0, [1, 1, 1, 1]), (0.5, [1, 1.5, 1.75, 1.875])):
        e = replace(least_squares(SGD(lr=0.1, momentum=momentum, schedule=schedule), 4), rounds=1)
        sums = all_clients(e).rate_sums()
        np.testing.assert_allclose(sums, 0.1 * np.dot(reach, [1, 3 / 4, 1 / 2, 1 / 4]))


# -- messages --------------------------------------------------------------------------------------------
BASE, D2 = 136, 27


def test_bytes_of_a_round() -> None:
    """x once more, and the sketches of all, in the first round; then d1 + d2 both ways; (x_t, z_t) for late ones."""
    e = six_clients()
    a = play(e, PFedNet(), 0)
    first = again(e, a, 0, [1, 4]).cost
    assert (first.bytes_down, first.bytes_up) == (4 * 2 * (2 * BASE + D2), 4 * (2 * (BASE + D2) + 6 * 3))
    second = again(e, a, 1, [1, 4]).cost
    assert (second.bytes_down, second.bytes_up) == (4 * 2 * (BASE + D2), 4 * 2 * (BASE + D2))
    third = again(e, a, 2, [0, 4]).cost
    assert third.bytes_down == 4 * 3 * (BASE + D2)
    back = again(e, a, 3, [1, 4]).cost  # client 1 missed a round: what it holds is old
    assert back.bytes_down == 4 * 3 * (BASE + D2)


def test_absent_clients_are_drawn_along_and_told_later() -> None:
    e = six_clients()
    a = play(e, PFedNet(lam=0.5, edges=[[0, 1], [1, 2]]), 1, [[0, 1]])
    init = e.model.columns["head"].take(e.model.init_row())
    assert not torch.allclose(a.Z[2], init, atol=1e-3)
    equal(a.Z[3:], init.expand(3, -1))
    equal(e.rows.all["z"][np.array([2])][0], init)
    cohort = Cohort(e, np.array([1, 2]), 1)
    theta = a.begin(cohort)
    equal(a.fused.take(theta), a.Z[[1, 2]])
    equal(a.shared.take(theta), a.x.expand(2, -1))
    equal(deployed(e, a)[2], a.fused.put(a.shared.put(e.model.init_row(), a.x), a.Z[2]))


def test_a_client_that_missed_a_round_starts_from_the_newest_model() -> None:
    e = six_clients()
    a = play(e, PFedNet(lam=0.5), 2, [[0, 1], [1, 2]])
    assert a.holds.tolist() == [False, True, True, False, False, False]
    theta = a.begin(Cohort(e, np.array([0, 1]), 2))
    equal(a.shared.take(theta), a.x.expand(2, -1))
    equal(a.fused.take(theta), a.Z[:2])
    assert not torch.equal(a.Z[0], a.fused.take(e.rows.all["z"][np.array([0])][0]))  # it moved without the client


def test_the_server_sees_what_was_uploaded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads of nothing leave x and Z where they are."""
    e, real = six_clients(), Cohort.upload

    def nothing(self: Cohort, **tensors: Any) -> Any:
        out = real(self, **tensors)
        for name in ("dx", "dz"):
            if hasattr(out, name):
                setattr(out, name, torch.zeros_like(getattr(out, name)))
        return out

    monkeypatch.setattr(Cohort, "upload", nothing)
    a = play(e, PFedNet(), 2)
    w = e.model.init_row()
    equal(a.x, a.shared.take(w))
    close(a.Z, a.fused.take(w).expand(6, -1), 1e-7)


def test_running_statistics_of_z_stay_with_their_client() -> None:
    """BatchNorm among the personal columns: its weights are fused, its statistics never sent."""
    e = normed({"head": ["body.2.*", "head.*"]})
    a = play(e, PFedNet(lam=1e6, edges=COMPLETE), 0)
    cohort = again(e, a, 0)
    buffers = sum(b - a for name, (a, b) in e.model.spans.items() if name in e.model.buffer_names)
    assert buffers == 12 and a.fused.size == a.columns.size - buffers
    assert cohort.cost.bytes_up == 4 * 6 * (e.model.size - buffers)
    rows = deployed(e, a)
    equal(a.fused.take(rows), a.fused.take(rows)[:1].expand(6, -1))
    statistics = rows[:, -buffers:]
    assert not torch.allclose(statistics[0], statistics[1])
    assert not torch.allclose(statistics[0], e.model.init_row()[-buffers:])


def test_compression_knows_what_is_fused() -> None:
    """The trained columns of a group that has running statistics as well: their parameters, without statistics."""
    e = normed({"head": ["body.2.*", "head.*"]})
    layout = e.model.message_layout(play(e, PFedNet(), 0).fused.size)
    assert layout is not None and layout.parameters == 6 + 6 + 18 + 3
    assert list(layout.spans) == ["body.2.weight", "body.2.bias", "head.weight", "head.bias"]


def test_running_statistics_of_x_are_averaged() -> None:
    e = normed()
    a = play(e, PFedNet())
    theta = all_clients(e).train(e.model.init_row(), columns=a.shared).theta
    close(deployed(e, a)[:, -12:], (all_clients(e).weights @ theta[:, -12:]).expand(6, -1))


# -- the network -----------------------------------------------------------------------------------------
def test_the_network_is_made_once_of_all_clients() -> None:
    e = six_clients()
    a = play(e, PFedNet(k=2), 0)
    assert not a.adjacency.any()
    again(e, a, 0, [0, 1])
    shares = similarity.sketches(all_clients(e), "label_hist", None)
    equal(a.adjacency, similarity.knn(shares, 2, "l2"))
    before, sent = a.adjacency, a.sketch_of
    again(e, a, 1, [2, 3])
    assert a.adjacency is before and a.sketch_of is sent


@pytest.mark.parametrize("sketch", ["feature_mean", "second_moment"])
def test_other_sketches(sketch: Any) -> None:
    e = six_clients()
    a = play(e, PFedNet(k=2, samples=4, sketch=sketch))
    told = similarity.sketches(Cohort(e, np.arange(6), 0), sketch, 4)
    equal(a.sketch_of, told)
    equal(a.adjacency, similarity.knn(told, 2, "l1"))


def test_new_clients_start_from_their_neighbours() -> None:
    """Six train, of whom the last two are new too, by their data: their nearest ones are themselves, at distance 0."""
    e = six_clients()
    e = replace(e, with_new_clients=e.federation)
    a = play(e, PFedNet(k=2), 2)
    newcomers = Cohort(e, np.array([4, 5]), 1, "new clients")
    rows = a.initial_rows_for_new_clients(newcomers, [])
    near = similarity.nearest(a.sketch_of[4:], a.sketch_of, 2, "l2")
    assert near[:, 0].tolist() == [4, 5]
    close(a.fused.take(rows), (a.Z[near[:, 0]] + a.Z[near[:, 1]]) / 2)
    equal(a.shared.take(rows), a.x.expand(2, -1))
    close(a.fused.take(a.initial_row_for_new_clients([])), a.Z.mean(0))
    f = six_clients()
    everybody = play(f, PFedNet(edges=COMPLETE))
    equal(everybody.initial_rows_for_new_clients(newcomers, []), everybody.initial_row_for_new_clients([]))


def test_each_new_client_adapts_its_own_row() -> None:
    e = six_clients()
    a = play(e, PFedNet(k=1), 2)
    e = replace(e, with_new_clients=e.federation, federation=e.federation.select_clients(np.arange(4)))
    rows = new_clients.starting_rows(a, e)
    assert rows.shape == (2, e.model.size) and not torch.equal(rows[0], rows[1])
    ids, curves = new_clients.adapt(e, rows, 1, 0.1, 0.0)
    assert ids.tolist() == [4, 5]
    for i in range(2):
        alone = new_clients.adapt(e, rows[i], 1, 0.1, 0.0)[1]
        np.testing.assert_allclose(curves["accuracy"][:, i], alone["accuracy"][:, i])


def test_what_new_clients_tell_is_released_too() -> None:
    """Their sketches get noise, and stand in no count of the clients of the rounds."""
    e = six_clients()
    a = play(e, PFedNet(k=1))
    e.rows.num_clients = 4
    e = replace(
        e,
        with_new_clients=e.federation,
        federation=e.federation.select_clients(np.arange(4)),
        privacy=Privacy(e.rows, 1.0, 0.05, 1.0, "analytic"),
    )
    uploads: list[torch.Tensor] = []
    upload = a.upload_sketches
    a.upload_sketches = lambda clients: uploads.append(upload(clients)) or uploads[-1]  # type: ignore[method-assign]
    assert torch.isfinite(new_clients.starting_rows(a, e)).all()
    assert uploads[0].shape == (2, 3) and not torch.allclose(uploads[0], a.sketch_of[4:], atol=1e-2)
    assert not e.privacy.releases.used


# -- what is recorded ------------------------------------------------------------------------------------
def test_what_figures_show() -> None:
    e = six_clients()
    a = play(e, PFedNet(), 2)
    shown = a.matrices()
    assert shown["iterations"].item() == a.iterations.item() > 0
    equal(shown["network"], a.adjacency)
    close(shown["sdwd"], a.Z.std(0, correction=0).sort().values)
    assert shown["sdwd_pairwise"].shape == (27,)
    values = torch.from_numpy(np.random.default_rng(0).normal(size=5000))
    some = ordered(values, 1001)
    assert len(some) == 1001 and some[0] == values.min() and some[-1] == values.max()
    close(some[500], values.sort().values[2500])


# -- what is refused -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"x_steps": 2}, "algorithm.x_steps=2 needs algorithm.mode=gradient"),
        ({"z_steps": 2}, "algorithm.z_steps=2 needs algorithm.mode=gradient"),
        ({"edges": [[0, 6]]}, r"algorithm.edges contains \[0, 6\].*from 0 to 5"),
        ({"edges": [[1, 1]]}, r"algorithm.edges contains \[1, 1\]"),
        ({"edges": [[0, 1, 2]]}, r"algorithm.edges contains \[0, 1, 2\]"),
        ({"personal": "tail"}, "algorithm=pfednet needs the parameter group 'tail'"),
    ],
)
def test_options_that_do_not_fit(options: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        play(six_clients(), PFedNet(**options))


def test_gradients_need_plain_sgd() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.mode=gradient needs plain SGD"):
        play(six_clients(SGD(lr=0.1, momentum=0.9)), PFedNet(mode="gradient"))


def test_labels_are_compared_where_there_are_some() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.sketch=label_hist compares"):
        play(products([3, 5], SGD(lr=0.1)), PFedNet(sketch="label_hist"))


def test_memory_is_asked_for_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbench.algorithms.pfednet.free_memory", lambda device: 4 << 10)
    with pytest.raises(ConfigError, match="algorithm=pfednet stores z of all clients at the server: 6 times 27"):
        play(six_clients(), PFedNet())


# -- the contract under other options --------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "gradient", "x_steps": 2, "z_steps": 2},
        {"norm": "l1", "lam": 0.1},
        {"personal": "all", "edges": [[0, 1], [0, 2], [0, 3]], "z_step": "single"},
        {"sketch": "second_moment", "norm": "linf", "lam": 0.1},
    ],
)
def test_other_options_keep_what_methods_keep(options: dict) -> None:
    checks = ["executor_pairs", "resume", "only_the_cohort_changes", "nothing_bypasses_upload"]
    report = check_algorithm("pfednet", options, only=checks)
    assert [outcome.status for outcome in report.outcomes] == ["passed"] * len(checks), str(report)
