"""Compressed runs that are killed and resumed, or shared by two processes, are those of one that nothing befell.

The module is its own driver: `python test_compressed_processes.py FOLDER METHOD,OPERATOR ...`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from cases import assert_same, case, run_rounds, set_up, state_of, tensors
from compressed import ON_CLIP, TWO, all_pairs, sampled, simulated, without_compression
from forked import assert_killed, run_driver, save_of_two
from tiny import once

from fedbench.channel import compression as channel
from fedbench.engine.ranks import Ranks
from fedbench.simulation import checkpoint
from fedbench.simulation.run_state import Simulation

pytestmark = pytest.mark.slow  # processes; tests/engine/test_ranks.py has some for every run of the tests
ROUNDS = 4
PAIRS = sampled(all_pairs(), slow_methods=ON_CLIP)


def name_of(method: str, compressor: str) -> str:
    return f"{method},{compressor}"


# -- in other processes ----------------------------------------------------------------------------------
def killed(folder: Path, name: str) -> None:
    """Play with a checkpoint after every round, and die in the middle of the third one's first upload."""
    sim = simulated(*name.split(","))
    for done in (1, 2):
        checkpoint.save(folder, run_rounds(sim, done).state())
    if sim.engine.compression is not None:
        sim.engine.compression.upload = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    run_rounds(sim, 3)
    os.kill(os.getpid(), signal.SIGKILL)  # of a method that uploads nothing


def drive(folder: Path, names: list[str]) -> None:
    """All that other processes are needed for."""
    torch.set_num_threads(1)
    channel.TINY = TWO
    for name in names:
        simulated(*name.split(","))  # what is composed and chosen for it is there for all children
    for name in names:
        (folder / name).mkdir()
        assert_killed(killed, folder / name, name)
    save_of_two(folder, lambda together: {name: shared(name, together) for name in names})


def shared(name: str, together: Ranks | None) -> dict[str, torch.Tensor]:
    sim = simulated(*name.split(","), plan="loop")
    sim.engine.executor.ranks = together or Ranks()
    return state_of(run_rounds(sim, 2))


# -- what came of it -------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the driver left what it found of the pairs that are tested."""
    chosen = {item.callspec.id: item.callspec.params for item in request.session.items if item.path == request.path}
    names = sorted({name_of(**p) for p in chosen.values() if not case(p["method"]).reason})
    return once(tmp_path_factory, "compressed", lambda folder: run_driver(__file__, folder, *names, timeout=1800))


@pytest.fixture(autouse=True)
def all_messages_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "TINY", TWO)


@pytest.mark.parametrize("method, compressor", PAIRS)
def test_a_killed_run_goes_on_to_the_same_bytes(method: str, compressor: str, found: Path) -> None:
    def went_on(sim: Simulation) -> Simulation:
        sim.load(checkpoint.load(found / name_of(method, compressor)))
        assert sim.done == 2
        return run_rounds(sim, ROUNDS)

    again, whole = went_on(set_up(simulated(method, compressor))), run_rounds(simulated(method, compressor), ROUNDS)
    assert_same(without_compression(state_of(again)), without_compression(state_of(whole)))
    assert_same(tensors(again.state()["rows"]), tensors(whole.state()["rows"]))


@pytest.mark.parametrize("method, compressor", PAIRS)
def test_two_processes_have_the_rows_of_one(method: str, compressor: str, found: Path) -> None:
    expected = shared(name_of(method, compressor), None)
    for rank in range(2):
        assert_same(torch.load(found / f"{rank}.pt", weights_only=False)[name_of(method, compressor)], expected)


if __name__ == "__main__":
    drive(Path(sys.argv[1]), sys.argv[2:])
