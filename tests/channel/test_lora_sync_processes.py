"""Rules that combine LoRA factors, of images and of texts: killed and resumed, on two processes, on other executors.

The module is its own driver: `python test_lora_sync_processes.py FOLDER MODEL` runs what needs other processes.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, assert_same, run_rounds, set_up, state_of, tensors
from forked import assert_killed, run_driver, save_of_two
from language import LanguageCase
from tiny import once

from fedbench.engine.cohort import Cohort
from fedbench.engine.ranks import Ranks
from fedbench.simulation import checkpoint
from fedbench.simulation.run_state import Simulation

LORA = ["model.width=8", "model.heads=2", "model.depth=1", "adapter=lora", "adapter.alpha=6"]
OPTIMIZER = ["optimizer.lr=0.02", "optimizer.momentum=0.9"]
CASES = {
    "vit_tiny": Case("fedavg", [*LORA, *OPTIMIZER, "model=vit_tiny", "model.patch=2"]),
    "gpt_tiny": LanguageCase("fedavg", [*LORA, *OPTIMIZER, "model=gpt_tiny"]),
}
RANKS = {
    "average": 2,
    "ffa": 2,
    "fedsa": 2,
    "flora": [1, 2, 3, 1, 2, 3],
    "flex": [1, 2, 3, 1, 2, 3],
    "het": 2,
    "fedex": 2,
}
PAIRS = [
    pytest.param(model, sync, marks=[pytest.mark.slow] if model == "vit_tiny" else [])
    for model in CASES
    for sync in RANKS
]
COHORTS = ([0, 1, 3, 5], [1, 2, 4], [0, 2, 4, 5], [3, 5])  # two clients drop out in round 4, and one in round 2
ROUNDS = len(COHORTS)


def simulated(model: str, sync: str, plan: str = "vmap") -> Simulation:
    of = CASES[model]
    rank = f"adapter.rank={RANKS[sync]}".replace(" ", "")
    # momentum that is kept belongs to the factors of earlier rounds, which flora and flex replace
    kept = "round" if sync in ("flora", "flex") else "never"
    return of.on([*of.overrides, f"adapter.sync={sync}", rank, f"optimizer.reset={kept}"]).simulation(plan)


# -- in other processes ------------------------------------------------------------------------------------
def killed(folder: Path, model: str, sync: str) -> None:
    """Save a checkpoint after each of two rounds, and die in the third one, after the server combined the uploads."""
    sim = simulated(model, sync)
    for done in (1, 2):
        checkpoint.save(folder, run_rounds(sim, done, COHORTS).state())
    mean = Cohort.mean

    def last(*args: Any, **options: Any) -> None:
        mean(*args, **options)  # what the rule has changed until now is lost
        os.kill(os.getpid(), signal.SIGKILL)

    Cohort.mean = last  # type: ignore[method-assign, assignment]
    run_rounds(sim, 3, COHORTS)


def shared(model: str, sync: str, processes: Ranks | None) -> dict[str, torch.Tensor]:
    """Return all states after a run whose clients these processes share."""
    sim = simulated(model, sync, "loop")
    sim.engine.executor.ranks = processes or Ranks()
    return state_of(run_rounds(sim, ROUNDS, COHORTS))


def drive(folder: Path, model: str) -> None:
    torch.set_num_threads(1)
    for sync in RANKS:
        simulated(model, sync)  # composes the configuration once for all children
        (folder / sync).mkdir()
        assert_killed(killed, folder / sync, model, sync)
    save_of_two(folder, lambda both: {sync: shared(model, sync, both) for sync in RANKS})


@pytest.fixture
def found(tmp_path_factory: pytest.TempPathFactory, model: str) -> Path:
    """Return the folder with what the driver saved for a model."""
    return once(tmp_path_factory, f"lora_sync_{model}", lambda folder: run_driver(__file__, folder, model))


# -- tests -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model, sync", PAIRS)
def test_a_killed_run_resumes_to_the_same_bytes(model: str, sync: str, found: Path) -> None:
    sim = set_up(simulated(model, sync))
    sim.load(checkpoint.load(found / sync))
    assert sim.done == 2
    resumed, whole = run_rounds(sim, ROUNDS, COHORTS), run_rounds(simulated(model, sync), ROUNDS, COHORTS)
    assert_same(state_of(resumed), state_of(whole))
    assert_same(tensors(resumed.state()["rows"]), tensors(whole.state()["rows"]))
    frozen = [dict(s.engine.model.module.named_parameters()) for s in (resumed, whole)]
    assert_same(*[{name: p.detach() for name, p in each.items() if ".base_layer." in name} for each in frozen])


@pytest.mark.parametrize("model, sync", PAIRS)
def test_two_processes_have_the_rows_of_one(model: str, sync: str, found: Path) -> None:
    expected = shared(model, sync, None)
    for rank in range(2):
        assert_same(torch.load(found / f"{rank}.pt", weights_only=False)[sync], expected)


@pytest.mark.slow
@pytest.mark.parametrize("model, sync", PAIRS)
def test_executors_agree(model: str, sync: str) -> None:
    """Up to rounding."""
    vmap, loop, threads = (
        state_of(run_rounds(simulated(model, sync, plan), ROUNDS, COHORTS)) for plan in ("vmap", "loop", "threads")
    )
    for other in (loop, threads):
        assert_same(other, vmap, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", CASES)
def test_rules_differ(model: str) -> None:
    """So that no rule of this module is another one by mistake."""
    rows: list[Any] = [run_rounds(simulated(model, sync), 2, COHORTS).algorithm for sync in RANKS]
    assert not any(torch.equal(a.w, b.w) for i, a in enumerate(rows) for b in rows[:i] if a.w.shape == b.w.shape)


if __name__ == "__main__":
    drive(Path(sys.argv[1]), sys.argv[2])
