"""Robust runs with compression, adapters and dropouts: killed and resumed, on two processes, and on other executors.

The module is its own driver: `python test_processes.py FOLDER` runs what needs other processes.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from cases import Case, assert_same, case, run_rounds, set_up, state_of, tensors
from forked import assert_killed, run_driver, save_of_two
from tiny import once

from fedbench.engine.cohort import Cohort
from fedbench.engine.ranks import Ranks
from fedbench.simulation import checkpoint
from fedbench.simulation.run_state import Simulation

LORA = ["model=vit_tiny", "model.patch=2", "model.width=8", "model.heads=2", "model.depth=1", "adapter=lora"]
METHODS = {  # a method with means, and one with means and sums; with adapters, and with compression both ways
    "fedavg": Case("fedavg", [*LORA, "adapter.rank=2", "optimizer.momentum=0.9", "optimizer.reset=never"]),
    "scaffold": case("scaffold").on(
        [*case("scaffold").overrides, "compression=topk", "compression.direction=both", "compression.share=0.3"]
    ),
}
RULES = {
    "mean": ["aggregator=mean"],
    "median": ["aggregator=median"],
    "krum": ["aggregator=krum", "aggregator.pre=nnm", "aggregator.neighbors=n-f-1"],
    "bucketing": ["aggregator=geometric_median", "aggregator.pre=bucketing", "aggregator.f=0"],
    "centered_clipping": ["aggregator=centered_clipping"],
}
PAIRS = [(method, rule) for method in METHODS for rule in RULES if rule != "mean"]
COHORTS = ([0, 1, 3, 5], [1, 2, 4], [0, 2, 4, 5], [3, 5])  # two clients drop out in round 4, and one in round 2
ROUNDS = len(COHORTS)


def simulated(method: str, rule: str, plan: str = "vmap") -> Simulation:
    of = METHODS[method]
    return of.on([*of.overrides, *RULES[rule]]).simulation(plan)


# -- in other processes ------------------------------------------------------------------------------------
def killed(folder: Path, method: str, rule: str) -> None:
    """Save a checkpoint after each of two rounds, and die in the third one, when the server combines uploads."""
    sim = simulated(method, rule)
    for done in (1, 2):
        checkpoint.save(folder, run_rounds(sim, done, COHORTS).state())
    Cohort.mean = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, return-value]
    run_rounds(sim, 3, COHORTS)


def shared(method: str, rule: str, processes: Ranks | None) -> dict[str, torch.Tensor]:
    """Return all states after a run whose clients these processes share."""
    sim = simulated(method, rule, "loop")
    sim.engine.executor.ranks = processes or Ranks()
    return state_of(run_rounds(sim, ROUNDS, COHORTS))


def drive(folder: Path) -> None:
    torch.set_num_threads(1)
    for pair in PAIRS:
        simulated(*pair)  # composes the configuration once for all children
        (folder / "-".join(pair)).mkdir()
        assert_killed(killed, folder / "-".join(pair), *pair)
    save_of_two(folder, lambda both: {pair: shared(*pair, both) for pair in PAIRS})


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with what the driver saved."""
    return once(tmp_path_factory, "robust", lambda folder: run_driver(__file__, folder))


# -- tests -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method, rule", PAIRS)
def test_a_killed_run_resumes_to_the_same_bytes(method: str, rule: str, found: Path) -> None:
    sim = set_up(simulated(method, rule))
    sim.load(checkpoint.load(found / f"{method}-{rule}"))
    assert sim.done == 2
    resumed, whole = run_rounds(sim, ROUNDS, COHORTS), run_rounds(simulated(method, rule), ROUNDS, COHORTS)
    assert_same(state_of(resumed), state_of(whole))
    assert_same(tensors(resumed.state()["rows"]), tensors(whole.state()["rows"]))


@pytest.mark.parametrize("method, rule", PAIRS)
def test_two_processes_have_the_rows_of_one(method: str, rule: str, found: Path) -> None:
    expected = shared(method, rule, None)
    for rank in range(2):
        assert_same(torch.load(found / f"{rank}.pt", weights_only=False)[method, rule], expected)


@pytest.mark.parametrize("method, rule", PAIRS)
def test_rules_change_the_run_and_executors_do_not(method: str, rule: str) -> None:
    """Up to rounding.  Rounding can change what topk sends, so executors are compared without compression."""
    uncompressed = METHODS[method].on([w for w in METHODS[method].overrides if not w.startswith("compression")])
    of = uncompressed.on([*uncompressed.overrides, *RULES[rule]])
    vmap, loop, threads = (
        state_of(run_rounds(of.simulation(plan), ROUNDS, COHORTS)) for plan in ("vmap", "loop", "threads")
    )
    for other in (loop, threads):
        for name, t in vmap.items():
            torch.testing.assert_close(other[name], t, rtol=1e-4, atol=1e-5)
    robust = run_rounds(simulated(method, rule), ROUNDS, COHORTS)
    plain = state_of(run_rounds(simulated(method, "mean"), ROUNDS, COHORTS))
    server = [name for name in plain if name.startswith("/algorithm")]
    assert all(not torch.equal(plain[name], state_of(robust)[name]) for name in server) and server
    assert robust.engine.compression is None or robust.engine.compression.acted


if __name__ == "__main__":
    drive(Path(sys.argv[1]))
