"""FedPIA: alignment of units, rounds by hand, and its limits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bottlenecks import SMALL, bottlenecks_of, engine, federation, model_of, spread
from tiny import all_clients, close, compose, deployed, engine_on, equal, play
from torch import Tensor

from fedbench.algorithms import _alignment as alignment
from fedbench.algorithms.fedper import FedPer
from fedbench.algorithms.fedpia import FedPIA
from fedbench.algorithms.local import Local
from fedbench.channel.compression import Compression
from fedbench.compression.topk import TopK
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.optim import SGD
from fedbench.simulation import build_model as build


# -- the server ------------------------------------------------------------------------------------------
def merged(method: FedPIA, up: Tensor, **options: Any) -> Tensor:
    e = engine(**options)
    play(e, method, rounds=0)
    return method.merged(all_clients(e), up)


def uploads(e: Engine, size: float = 0.3) -> Tensor:
    return e.model.without("head").take(spread(e.model, len(e.federation.num_samples), size))


def test_equal_clients_are_their_mean_whatever_gamma() -> None:
    e = engine()
    one = uploads(e)[:1].expand(3, -1)
    for gamma in (0.0, 1.0, 100.0):
        close(merged(FedPIA(gamma=gamma), one), one[0], 1e-4)


def test_near_clients_at_gamma_zero_are_the_uniform_mean() -> None:
    e = engine()
    up = uploads(e, size=1e-3)
    method = FedPIA(gamma=0.0)
    close(merged(method, up, client_weights="uniform"), up.mean(0), 1e-6)
    assert not method.moved_server.any()
    equal(merged(FedPIA(server="average"), up), all_clients(e).weights @ up)


def test_the_anchor_follows_the_runs_weights() -> None:
    """It is the uniform mean in a run with client_weights=uniform."""
    e = engine(client_weights="uniform")
    up, method = uploads(e), FedPIA(server="average")
    play(e, method, rounds=0)
    close(method.merged(all_clients(e), up), up.mean(0), 1e-6)


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_weights_by_distance_by_hand(weights: str) -> None:
    """Of every bottleneck q by the distance of its own parameters; large gamma picks the nearest client."""
    e = engine(client_weights=weights)
    up = uploads(e, size=0.02)
    method = FedPIA(gamma=2.0)
    G, a = merged(method, up, client_weights=weights), e.model.without("head")
    rows, got = (a.put(e.model.init_row(), t) for t in (up, G))
    anchor = rows.mean(0) if weights == "uniform" else all_clients(e).weights @ rows
    assert not method.moved_server.any() and torch.allclose(method.q.sum(0), torch.ones(4))
    for s, bottleneck in enumerate(method.bottlenecks):
        names = [bottleneck.prefix + n for n in bottleneck.hidden_units.parameter_names]
        w = torch.cat([torch.stack([e.model.named(r)[n].flatten() for r in rows]) for n in names], 1)
        mean = torch.cat([e.model.named(anchor)[n].flatten() for n in names])
        q = torch.softmax(-2.0 * (w - mean).norm(dim=1), 0)
        close(method.q[:, s], q, 1e-5)
        close(torch.cat([e.model.named(got)[n].flatten() for n in names]), q @ w, 1e-5)
    nearest = FedPIA(gamma=1e6)
    merged(nearest, up, client_weights="uniform")
    assert (nearest.q.amax(0) == 1).all()


def test_the_order_of_one_clients_units_does_not_matter() -> None:
    """Two clients of three are twins in other orders: averages are those of equal orders, without alignment not."""
    e = engine(sizes=(10, 10, 10))
    model, a = e.model, e.model.without("head")
    up = a.take(model.init_row()).expand(3, -1) + 0.01 * uploads(e)
    rows = a.put(model.init_row().expand(3, -1), up)
    for bottleneck in bottlenecks_of(model):
        place = torch.arange(bottleneck.hidden_units.size).expand(3, -1).clone()
        place[1] = place[1].flip(0)
        alignment.renumber(model, rows, bottleneck, place)
    turned = a.take(rows)
    method = FedPIA(gamma=0.0)
    x, head = torch.randn(8, 1, 4, 4), model.init_row()

    def answers(row: Tensor) -> Tensor:
        return model.forward(a.put(head, row), x)

    matched, plain = (merged(m, turned, sizes=(10, 10, 10)) for m in (method, FedPIA(server="average")))
    assert method.moved_server[1] == 1 and not method.moved_server[[0, 2]].any()
    wanted = answers(up.mean(0))
    assert (answers(matched) - wanted).abs().max() < 0.1 * (answers(plain) - wanted).abs().max()


# -- rounds ----------------------------------------------------------------------------------------------
def test_without_any_matching_it_is_fedper_bit_for_bit() -> None:
    cohorts = [[0, 1], [1, 2], [0, 1, 2]]
    e, other = engine(), engine()
    a, b = play(e, FedPIA(server="average", client="none"), 3, cohorts), play(other, FedPer(), 3, cohorts)
    equal(a.G, b.u)
    equal(deployed(e, a), deployed(other, b))


def test_one_client_is_local_at_a_smaller_rate() -> None:
    """(1 - lam)^2 of the adapter's, all of the head's, under plain SGD."""
    lam = 0.3
    e, other = engine(sizes=(20,)), engine(sizes=(20,))
    a = play(e, FedPIA(lam=lam), 3)
    shared = e.model.without("head")
    b = play(other, Local(), 0)
    row = b.theta[np.arange(1)]

    def slower(s: Any, batch: Any) -> None:
        g = s.grad(batch)
        s.descend(shared.put(g, (1 - lam) ** 2 * shared.take(g)))

    for r in range(3):
        row = Cohort(other, np.arange(1), r).train(row, step=slower).theta
    close(a.personal[np.arange(1)], row, 1e-5)
    assert not a.moved_client.any() and not a.moved_server.any()
    close(a.G, shared.take(row)[0], 1e-5)


def test_lam_zero_is_local_and_an_upload() -> None:
    e, other = engine(), engine()
    a, b = play(e, FedPIA(lam=0.0, client="identity"), 2), play(other, Local(), 2)
    equal(deployed(e, a), deployed(other, b))


def test_starts_of_their_own_are_trained_alone_at_first() -> None:
    for client in ("align", "none"):
        e, other = engine(), engine()
        a = play(e, FedPIA(init="per_client", client=client), 0)  # type: ignore[arg-type]
        start = a.personal[np.arange(3)].clone()
        a.round(all_clients(e))
        equal(a.personal[np.arange(3)], all_clients(other).train(start).theta)


def test_first_and_last_losses_by_hand() -> None:
    """Clients of four, two and no steps."""
    a = play(engine(), FedPIA(), 0)
    sums = torch.tensor([[1.0, 3, 6, 10], [2.0, 5, 0, 0], [0.0, 0, 0, 0]])
    a._note_losses(SimpleNamespace(ids=np.arange(3), num_steps=np.array([4, 2, 0])), sums)  # type: ignore[arg-type]
    assert a.first_loss.tolist() == [1, 2, 0] and a.last_loss.tolist() == [4, 3, 0]


@pytest.mark.parametrize("init", ["common", "per_client"])
def test_who_never_took_part_deploys_the_servers_adapter(init: Any) -> None:
    e = engine()
    a = play(e, FedPIA(init=init), 2, [[0, 1], [0, 1]])
    rows = deployed(e, a)
    equal(rows[:2], a.personal[np.arange(2)])
    equal(a.shared.take(rows[2]), a.G)


def test_what_compression_leaves_out_of_an_adapter_is_made_up_for_once() -> None:
    """Clients whose adapters stand still: the server's mean comes to be theirs, though a quarter is sent at a time."""
    of = federation()
    e = engine_on(of, model_of(of=of), SGD(lr=1e-12), batch_size=5, epochs=1)
    e = replace(e, compression=Compression(TopK(0.25, error_feedback=True), e.rows, e.model, e.seed))
    a = play(e, FedPIA(lam=0.0, server="average", client="identity"), 0)
    rows = spread(e.model, 3)
    a.personal[np.arange(3)] = rows
    for r in range(6):
        a.round(all_clients(e, r))
    close(a.G, all_clients(e).weights @ a.shared.take(rows), 1e-5)


def test_nothing_moves_at_the_server_from_a_common_start() -> None:
    e = engine()
    a = play(e, FedPIA(), 3)
    assert not a.moved_server.any() and (a.cost_server[:, 0] > 0).all()
    equal(a.cost_server[:, 0], a.cost_server[:, 1])
    names = {"moved_server", "moved_client", "cost_server", "cost_client", "first_loss", "last_loss", "q", "size_of_G"}
    assert a.matrices().keys() == names and (a.first_loss > 0).all() and (a.q > 0).all()


def test_units_move_from_starts_of_their_own() -> None:
    e = engine()
    a = play(e, FedPIA(init="per_client"), 2)
    assert (a.moved_server > 0).any() and (a.cost_server[:, 1] <= a.cost_server[:, 0] + 1e-6).all()
    assert (a.cost_client[:, 1] <= a.cost_client[:, 0] + 1e-6).all() and (a.moved_client > 0).any()
    rows = e.model.without("head").take(play(engine(), FedPIA(init="per_client"), 0).personal[np.arange(3)])
    assert not torch.equal(rows[0], rows[1])


@pytest.mark.parametrize("cost", ["activation", "weight"])
def test_a_clients_permuted_adapter_comes_back_by_its_activations(cost: Any) -> None:
    """G is the client's own adapter in another order: renumbered, it is the client's own."""
    e = engine()
    a = play(e, FedPIA(samples=4, cost=cost), 0)
    own = spread(e.model, 3)
    turned, rng = own[:1].clone(), np.random.default_rng(0)
    for bottleneck in a.bottlenecks:
        alignment.renumber(
            e.model, turned, bottleneck, torch.from_numpy(rng.permutation(bottleneck.hidden_units.size))[None]
        )
    rows = own[:1].expand(3, -1).clone()
    equal(a.matched(all_clients(e), a.shared.take(turned)[0], rows), a.shared.take(rows))
    assert (a.moved_client > 0).all()


def test_activations_by_hand() -> None:
    e = engine()
    a = play(e, FedPIA(samples=100), 0)
    rows, cohort = spread(e.model, 3), all_clients(e)
    for i in range(3):
        x, _ = e.federation.gather(torch.from_numpy(e.federation.splits["train"][i]))
        layers = [s.prefix + s.hidden_units.layer for s in a.bottlenecks]
        _, captured = e.model.capture(rows[i], x, layers)
        for layer, values in zip(layers, a.unit_activations(cohort, rows)):
            n = len(x)
            mean = captured[layer].mean(1)  # over tokens  [n, m]
            got = values[i][:, :n]
            close(got.sort(1).values, mean.T.sort(1).values, 1e-5)
            assert not values[i][:, n:].any()


def test_so_many_samples_are_drawn_anew_in_each_round() -> None:
    e = engine()
    a = play(e, FedPIA(samples=3), 0)
    rows = spread(e.model, 3)
    first, again, later = (a.unit_activations(all_clients(e, r), rows)[0] for r in (0, 0, 1))
    assert first.shape == (3, 6, 3)
    equal(first, again)
    assert (first != later).any()


@pytest.mark.parametrize("cost", ["activation", "weight"])
def test_what_alignment_costs_by_hand(cost: Any) -> None:
    """Before anything is renumbered: distances of what describes a unit of G and of the client, their mean."""
    e = engine()
    a = play(e, FedPIA(samples=4, cost=cost), 0)
    rows, cohort = spread(e.model, 4), all_clients(e)
    own, G = rows[:3], a.shared.take(rows[3])
    a.matched(cohort, G, own)
    theirs = a.shared.put(own, G)
    if cost == "activation":
        pairs = zip(a.unit_activations(cohort, theirs), a.unit_activations(cohort, own))
    else:
        pairs = ((alignment.incoming(e.model, r, s) for r in (theirs, own)) for s in a.bottlenecks)
    wanted = torch.stack([(x - y).norm(dim=2).mean(1) for x, y in pairs], 1).mean(1)
    close(a.cost_client[:, 0], wanted, 1e-4)


def test_a_client_without_training_samples_has_zeros() -> None:
    """Its rounds go on, too: it keeps its own adapter and weighs nothing."""
    e = engine(sizes=(7, 0, 5))
    a = play(e, FedPIA(), 0)
    assert isinstance(a, FedPIA)
    for bottleneck, values in zip(a.bottlenecks, a.unit_activations(all_clients(e), spread(e.model, 3)), strict=True):
        assert values.shape == (3, bottleneck.hidden_units.size, bottleneck.hidden_units.num_blocks * 7)
        assert not values[1].any() and values[0].any() and values[2].any()
    play(e, a, 2, begin=1)
    assert a.G.isfinite().all()
    equal(a.first_loss[1], torch.tensor(0.0))


def test_newcomers_start_from_the_servers_adapter() -> None:
    e = engine()
    a = play(e, FedPIA(), 2)
    row = a.initial_row_for_new_clients([])
    equal(a.shared.take(row), a.G)
    equal(a.head.take(row), a.head.take(e.model.init_row()))


def test_adapters_without_units_are_refused() -> None:
    of = federation()
    lora = build.model(compose(["algorithm=fedavg", *SMALL, "adapter=lora"]), of)
    with pytest.raises(ConfigError, match="the hidden units of bottlenecks, and this model has none"):
        play(engine_on(of, lora, SGD(lr=0.1)), FedPIA())
