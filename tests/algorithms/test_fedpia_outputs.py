"""FedPIA with combine=output_sum: outputs of two adapters are added, so the order of units has no effect."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bottlenecks import ADAPTERS, SMALL, engine, federation, spread, summed
from cases import COHORTS, assert_same, run_rounds, set_up, state_of
from contract import skipped
from tiny import all_clients, close, compose, deployed, engine_on, equal, every_second, play
from torch import Tensor

from fedbench.algorithms import _alignment as alignment
from fedbench.algorithms.fedpia import FedPIA
from fedbench.channel import compression as channel
from fedbench.channel.privacy import Privacy
from fedbench.core.options import ConfigError
from fedbench.core.round_context import RoundContext
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.optim import SGD
from fedbench.simulation import build, checkpoint
from fedbench.simulation.build_model import model as build_model
from fedbench.testing import algorithm
from fedbench.testing._cases import continue_rounds

TWINS = [f"{name}, twins" for name in ADAPTERS]
EVERYBODY = np.arange(3)


def begun(e: Engine, **options: Any) -> FedPIA:
    """Adapters, second ones and heads of all clients drawn, and the server's."""
    a = play(e, FedPIA(combine="output_sum", **options), 0)
    rows = spread(e.model, 4)
    a.personal[EVERYBODY], a.G = rows[:3], a.shared.take(rows[3])
    return a


def renumbered(e: Engine, a: FedPIA, rows: Tensor) -> Tensor:
    """The units of the first bottlenecks of rows [K, P] in other orders."""
    rows, rng = rows.clone(), np.random.default_rng(0)
    for bottleneck in a.bottlenecks:
        orders = np.stack(
            [
                np.roll(np.arange(bottleneck.hidden_units.size), rng.integers(1, bottleneck.hidden_units.size))
                for _ in rows
            ]
        )
        alignment.renumber(e.model, rows, bottleneck, torch.from_numpy(orders))
    return rows


# -- what a client computes ------------------------------------------------------------------------------
@pytest.mark.parametrize("adapter", TWINS)
def test_a_batch_by_hand(adapter: str) -> None:
    """One full batch under plain SGD: w and the head learn in f(x; (w + G) / 2), G stands still."""
    e = engine(adapter, sizes=(8,), batch_size=100)
    a, model = play(e, FedPIA(combine="output_sum", client="identity"), 0), e.model
    rows = spread(model, 2)
    a.personal[np.arange(1)], a.G = rows[:1], a.shared.take(rows[1])
    G, loose = a.G.clone(), (a.first | a.second | model.columns["head"]).rest(model.size)
    x, y = e.federation.gather(torch.from_numpy(e.federation.splits["train"][0]))
    start = a.second.put(rows[0], a.first.take(rows[1]))
    leaf = loose.put(start, loose.take(rows[1])).requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(model.forward(leaf, x), y.long()), leaf)
    learns = a.second.rest(model.size)
    wanted = learns.put(leaf.detach(), learns.take(leaf.detach() - 0.1 * g))
    a.round(Cohort(e, np.arange(1), 0))
    close(a.personal[np.arange(1)][0], wanted, 1e-5)
    equal(a.second.take(a.personal[np.arange(1)][0]), a.first.take(a.shared.put(rows[0], G)))
    close(a.G, a.shared.take(wanted), 1e-5)
    assert g.abs().max() > 1e-3 and a.shared.size == a.first.size + loose.size


@pytest.mark.parametrize("adapter", TWINS)
def test_the_order_of_the_servers_units_changes_no_loss(adapter: str) -> None:
    """Nor anything else that a client computes, keeps and uploads; added as weights, it does."""
    e = engine(adapter)
    a = begun(e)
    own = a.personal[EVERYBODY]
    G = a.shared.put(own, a.G)  # as each client's adapter
    other = renumbered(e, a, G)

    def found(rows: Tensor) -> Tensor:
        out, w = a.integrate(all_clients(e), own, a.shared.take(rows))
        return torch.cat([out.loss[:, None], out.loss_sum, w, e.model.columns["head"].take(out.theta)], 1)

    assert (G - other).abs().max() > 0.1
    close(found(G), found(other), 1e-5)
    a.combine = "weight_frozen"
    assert (found(G) - found(other)).abs().max() > 1e-2


def test_matching_at_the_clients_changes_nothing() -> None:
    """Units move from starts of their own; scores, uploads and the server's adapter are those without matching."""
    runs = []
    for client in ("align", "identity"):
        e = engine("houlsby, twins")
        a = play(e, FedPIA(combine="output_sum", client=client, init="per_client"), 3)  # type: ignore[arg-type]
        x = torch.randn(3, 5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
        runs.append((a, a.uploaded[EVERYBODY], a.G, e.model.forward(deployed(e, a), x)))
    (aligned, *found), (plain, *wanted) = runs
    for one, other in zip(found, wanted):
        close(one, other, 1e-4)
    assert (aligned.moved_client > 0).any() and not plain.moved_client.any()


def test_each_adapter_is_matched_by_what_it_gives_alone() -> None:
    """G is the client's own adapter in another order: renumbered, it is the client's own, whatever is beside it."""
    e = engine("houlsby, twins")
    a = play(e, FedPIA(combine="output_sum", samples=4), 0)
    own = spread(e.model, 3)[:1].expand(3, -1).clone()
    G = a.shared.take(renumbered(e, a, own[:1]))[0]
    equal(a.matched(all_clients(e), G, own), a.shared.take(own))
    assert (a.moved_client > 0).all()
    other, costs = a.shared.take(spread(e.model, 4)[3]), []
    for beside in (own, spread(e.model, 5)[2:]):  # what a client had in its second bottlenecks
        a.matched(all_clients(e), other, a.second.put(own, a.second.take(beside)))
        costs.append(a.cost_client)
    equal(*costs)


# -- what is kept, sent and deployed ---------------------------------------------------------------------
def test_one_adapter_travels_and_two_are_deployed() -> None:
    e = engine("houlsby, twins")
    a = begun(e, client="identity")
    G, cohort = a.G.clone(), all_clients(e)
    sent: list[Tensor] = []
    upload = cohort.upload
    cohort.upload = lambda **given: sent.append(given["w"]) or upload(**given)  # type: ignore[method-assign]
    a.round(cohort)
    rows = deployed(e, a)
    equal(a.shared.take(rows), sent[0])
    equal(a.second.take(rows), a.first.take(a.shared.put(rows[0], G)).expand(3, -1))
    assert sent[0].shape[1] == len(a.G) == e.model.size - len(a.second) - len(e.model.columns["head"])
    assert cohort.cost.bytes_up == cohort.cost.bytes_down == 3 * 4 * len(a.G)


@pytest.mark.parametrize("init", ["common", "per_client"])
def test_who_never_took_part_and_newcomers_have_the_servers_adapter_alone(init: Any) -> None:
    e = engine("houlsby, twins")
    a = play(e, FedPIA(combine="output_sum", init=init), 2, [[0, 1], [0, 1]])
    rows = deployed(e, a)
    equal(rows[:2], a.personal[np.arange(2)])
    for row in (rows[2], a.initial_row_for_new_clients([])):
        equal(a.shared.take(row), a.G)
        equal(a.second.take(row), a.first.take(row))
    equal(a.head.take(a.initial_row_for_new_clients([])), a.head.take(e.model.init_row()))


def test_starts_of_their_own_are_trained_beside_themselves_at_first() -> None:
    e = engine("houlsby, twins")
    a = play(e, FedPIA(combine="output_sum", init="per_client"), 0)
    start = a.personal[EVERYBODY]
    a.round(all_clients(e))
    kept = a.personal[EVERYBODY]
    equal(a.second.take(kept), a.first.take(start))
    assert (a.first.take(kept) != a.first.take(start)).any(1).all() and (start[0] != start[1]).any()


def test_what_is_in_no_bottleneck_goes_on_from_the_servers() -> None:
    """It has no second one beside it, and is averaged as in FedPer."""
    of = federation()
    words = ["adapter=houlsby", "adapter.width=6", "adapter.twin=true", "adapter.train=[head.*,norm.*]"]
    model = build_model(compose(["algorithm=fedavg", *SMALL, *words]), of)
    e = engine_on(of, model, SGD(lr=1e-12), batch_size=5, epochs=1)
    a = begun(e)
    norm = model.columns["adapter"].rest(model.size) & a.shared
    assert len(norm) == 16
    a.round(all_clients(e))
    close(norm.take(a.personal[EVERYBODY]), norm.take(a.shared.put(model.init_row(), a.G)).expand(3, -1))
    assert (a.first.take(a.personal[EVERYBODY])[0] != a.first.take(a.personal[EVERYBODY])[1]).any()


# -- what the house keeps --------------------------------------------------------------------------------
@pytest.mark.parametrize("check", every_second(algorithm.SUITE.checks))
def test_it_keeps_what_every_method_keeps(check: str) -> None:
    outcome = algorithm.SUITE.outcome(check, summed())
    known = ("algorithm", check, "fedpia") in skipped()
    assert outcome.status == ("skipped" if known else "passed"), outcome.message


@pytest.mark.parametrize("calibration", ["paper", "analytic"])
def test_privacy_acts_on_what_travels(calibration: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Every number of an upload is noisy, in the loop as all at once, and a resume repeats the noise."""

    def private(plan: str = "vmap") -> Any:
        sim = summed().simulation(plan, **{"optimizer.momentum": 0})
        sim.engine = replace(sim.engine, privacy=Privacy(sim.engine.rows, 25, 0.05, 1.0, calibration))
        build.check_method(sim.engine, sim.algorithm)
        sim.algorithm.setup(sim.engine.federation, sim.engine.model, sim.engine.rows)
        return sim

    clean: list[Tensor] = []
    real = Privacy.release

    def release(self: Privacy, context: RoundContext, name: str, value: Tensor, *more: Any) -> Tensor:
        clean.append(value)
        return real(self, context, name, value, *more)

    with monkeypatch.context() as patch:
        patch.setattr(Privacy, "release", release)
        first = continue_rounds(private(), 2)
    seen, a = first.algorithm.uploaded[np.array(COHORTS[1])], first.algorithm
    assert seen.shape == clean[-1].shape == (4, len(a.G)) and (seen != clean[-1]).all()
    assert_same(state_of(continue_rounds(private("loop"), 2)), state_of(first), 1e-4)
    again = private()
    checkpoint.save(tmp_path, first.state())
    again.load(checkpoint.load(tmp_path))
    assert_same(state_of(continue_rounds(again, 4)), state_of(continue_rounds(private(), 4)))


@pytest.mark.parametrize("operator", every_second(["sign", "topk", "qsgd"]))
def test_compressed_runs_go_on_to_the_same_bytes(operator: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(channel, "TINY", 2)
    compressed = summed().on([*summed().overrides, f"compression={operator}", "compression.direction=both"])

    def run() -> Any:
        return compressed.simulation()

    whole, first, second = run_rounds(run(), 4), run_rounds(run(), 2), set_up(run())
    checkpoint.save(tmp_path, first.state())
    second.load(checkpoint.load(tmp_path))
    assert_same(state_of(run_rounds(second, 4)), state_of(whole))
    sent = SimpleNamespace(plain=0, compressed=0)
    for name, sim in (("plain", set_up(summed().simulation())), ("compressed", set_up(run()))):
        cohort = Cohort(sim.engine, np.array(COHORTS[0]), 0)
        sim.algorithm.round(cohort)
        setattr(sent, name, cohort.cost.bytes_up)
    assert 0 < sent.compressed < sent.plain


# -- what is refused -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"client": "none"}, "needs a personal adapter, which algorithm.client=none does not have"),
        ({"lam": 0.3}, r"algorithm\.lam=0\.3 must be 0\.5 with algorithm\.combine=output_sum"),
    ],
)
def test_options_that_do_not_fit(options: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        FedPIA(combine="output_sum", **options)


def test_single_bottlenecks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs two adapters in each layer.* set adapter\.twin=true"):
        play(engine(), FedPIA(combine="output_sum"))
