"""The contract of callbacks: they watch a run, and change nothing in it.

A callback is tried in runs of FedAvg on digits, with four clients and three rounds.
"""

from __future__ import annotations

import copy
import functools
import json
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig
from torch import Tensor

from fedbench.core.options import require
from fedbench.simulation import checkpoint, simulator
from fedbench.simulation.callbacks.base import Callback, Status
from fedbench.simulation.callbacks.checkpoint import Checkpoint
from fedbench.simulation.callbacks.tables import Tables
from fedbench.simulation.instantiate import make
from fedbench.simulation.run_state import Simulation
from fedbench.simulation.stop_signals import StopSignals
from fedbench.testing._cases import composed
from fedbench.testing._suite import Broken, Report, Suite
from fedbench.testing._targets import Target, described, path_of

ROUNDS = 3
RUN = (
    *("algorithm=fedavg", "dataset=digits", "model=logistic", "partition=iid", "partition.num_clients=4"),
    *(f"rounds={ROUNDS}", "clients_per_round=2", "local.epochs=1", "local.batch_size=64", "eval.every=2"),
    *("hardware.device=cpu", "hardware.executor=vmap", "tracking=disabled"),
)
PLAIN = (bool, int, float, str, list, dict, tuple, set, type(None))
HOOK = "callbacks.checked"


class StopAfter(StopSignals):
    """Ask for a stop after a round, as a signal would."""

    def __init__(self, sim: Simulation, round: int):
        self.sim, self.round = sim, round

    def requested(self) -> bool:
        """Return whether the round is done."""
        return self.sim.done >= self.round


class Watched(Callback):
    """Pass hooks on, and keep the states that the callback returns."""

    name = HOOK

    def __init__(self, callback: Callback):
        self.callback, self.states = callback, []

    def on_start(self, run: Simulation, saved: str | None) -> None:
        """Pass the start on."""
        self.callback.on_start(run, None if saved is None else json.loads(saved))

    def on_evaluation(self, run: Simulation, metrics: Mapping[str, float], clients: Mapping[str, np.ndarray]) -> None:
        """Pass the scores on."""
        self.callback.on_evaluation(run, metrics, clients)

    def on_round_end(self, run: Simulation, costs: Mapping[str, float]) -> None:
        """Pass the costs on."""
        self.callback.on_round_end(run, costs)

    def on_checkpoint(self, run: Simulation) -> str | None:
        """Keep the state, and return it as JSON."""
        self.states.append(copy.deepcopy(state := self.callback.on_checkpoint(run)))
        try:
            return None if state is None else json.dumps(state)
        except (TypeError, ValueError):
            return None  # reported by state_is_json

    def on_end(self, run: Simulation, status: Status, summary: Mapping[str, Any]) -> None:
        """Pass the end on."""
        self.callback.on_end(run, status, summary)


@dataclass
class Played:
    """A finished run: its folder's tables, its last scores, its trained state, its callback."""

    tables: dict[str, bytes]
    summary: dict[str, Any]
    state: dict[str, Tensor]
    watched: Watched | None


@dataclass
class CallbackCase:
    """A callback, and folders for runs."""

    values: dict[str, Any]
    scratch: tempfile.TemporaryDirectory = field(default_factory=tempfile.TemporaryDirectory)

    def make(self) -> Callback:
        """Return a new callback."""
        return make(self.values, key="callbacks")

    def folder(self) -> Path:
        """Return a new, empty folder."""
        return Path(tempfile.mkdtemp(dir=self.scratch.name))

    def cfg(self) -> DictConfig:
        """Return the configuration of a run."""
        cfg = composed(*RUN).copy()
        cfg.output_dir = self.scratch.name
        cfg.callbacks = {"checked": self.values}
        return cfg

    def play(self, folder: Path, upto: int = ROUNDS, watch: bool = True) -> Played:
        """Run, or resume, up to a round, which is interrupted unless it is the last one."""
        saved = checkpoint.load(folder) if (folder / checkpoint.NAME).is_file() else None
        sim = simulator.prepare(self.cfg(), folder, saved, write=True)
        watched = Watched(self.make()) if watch else None
        others = [Tables(), *([] if watched is None else [watched])]
        callbacks = [*others, Checkpoint(1, others)]
        status: Status = "finished"
        for callback in callbacks:
            callback.on_start(sim, (saved or {}).get(callback.name))
        try:
            simulator.run_rounds(sim, callbacks, StopAfter(sim, upto), time.monotonic())
        except KeyboardInterrupt:
            status = "interrupted"
        summary = simulator.end(sim, callbacks, status)
        tables = {name: (folder / name).read_bytes() for name in ("metrics.csv", "clients.csv")}
        return Played(tables, summary, sim.algorithm.state_dict(), watched)

    @functools.cached_property
    def without(self) -> Played:
        """A run without the callback."""
        return self.play(self.folder(), watch=False)

    @functools.cached_property
    def whole(self) -> tuple[Played, Played]:
        """Two runs with the callback."""
        return self.play(self.folder()), self.play(self.folder())

    @functools.cached_property
    def resumed(self) -> Played:
        """A run that was interrupted after its second round."""
        folder = self.folder()
        self.play(folder, upto=2)
        return self.play(folder)


SUITE: Suite[CallbackCase] = Suite("callback")


def check_callback(
    target: Target, options: Mapping[str, Any] | None = None, *, only: Iterable[str] | None = None
) -> Report:
    """Check a callback.

    Args:
        target: Its class, the dotted path of the class, or an option of conf/callbacks.
        options: Options of its constructor.
        only: Names of checks.  Default: all.

    Raises:
        ConfigError: The callback cannot be built.
    """
    setting = f"in runs of {ROUNDS} rounds with 4 clients, evaluated every second round"
    return SUITE.run(path_of(target), setting, case_for(target, options), only)


def case_for(target: Target, options: Mapping[str, Any] | None = None) -> CallbackCase:
    """Return the callback's case; ConfigError if it cannot be built, or is none."""
    case = CallbackCase(described("callbacks", target, options))
    words = f"{path_of(target)} is no callback (a subclass of fedbench.simulation.callbacks.base.Callback)"
    require(isinstance(case.make(), Callback), words)
    return case


@SUITE.check
def hooks_succeed(case: CallbackCase) -> None:
    """Every hook returns in a run of three rounds."""
    assert case.whole


@SUITE.check
def results_stay(case: CallbackCase) -> None:
    """Tables, last scores and the trained state are bit for bit those of a run without the callback."""
    played, other = case.whole[0], case.without
    for name, content in other.tables.items():
        if played.tables.get(name) != content:
            raise Broken(f"{name} differs from that of a run without the callback: hooks must not change the run")
    for key in ("last", "best"):
        if json.dumps(played.summary[key], default=str) != json.dumps(other.summary[key], default=str):
            raise Broken(f"the scores in {key} of summary.json differ: copy metrics before changing them")
    for name, value in other.state.items():
        if not played.state[name].equal(value):
            raise Broken(f"the server's state {name} differs: hooks must not write to run.algorithm")


@SUITE.check
def state_is_json(case: CallbackCase) -> None:
    """The state for the checkpoint is numbers, text, lists and dicts of them, so that nothing is pickled."""
    watched = case.whole[0].watched
    for state in watched.states if watched else ():
        try:
            same = json.loads(json.dumps(state)) == state
        except (TypeError, ValueError) as error:
            raise Broken(f"on_checkpoint returns what JSON cannot hold: {error}") from None
        if not same:
            raise Broken("on_checkpoint returns what JSON changes, such as a tuple or a dict with numbers as keys")


@SUITE.check
def resume(case: CallbackCase) -> None:
    """After an interruption the state goes on as if there had been none."""
    (first, second), resumed = case.whole, case.resumed
    if resumed.tables != case.without.tables:
        raise Broken("the tables of a resumed run differ from those of an uninterrupted one")
    a, b, c = (_final(played) for played in (first, second, resumed))
    for name in a:
        if a[name] == b.get(name) != c.get(name):
            raise Broken(
                f"{name} is {c.get(name)!r} after a resume, and {a[name]!r} without an interruption: return it in "
                "on_checkpoint, and take it from saved in on_start (or name it with an underscore)"
            )


def _final(played: Played) -> dict[str, Any]:
    """Return the last state, and the plain attributes without an underscore."""
    watched = played.watched
    if watched is None:
        return {}
    plain = {f"self.{k}": v for k, v in vars(watched.callback).items() if k[0] != "_" and isinstance(v, PLAIN)}
    return {"the state of on_checkpoint": watched.states[-1], **plain}


@SUITE.check
def an_early_end_is_no_error(case: CallbackCase) -> None:
    """A run may fail before its first evaluation, and on_end returns."""
    folder = case.folder()
    sim = simulator.prepare(case.cfg(), folder, None)
    callback = case.make()
    callback.on_start(sim, None)
    simulator.end(sim, [callback], "failed")


@SUITE.check
def scores_that_are_not_finite(case: CallbackCase) -> None:
    """A score may be NaN or infinite, and a cost may be missing."""
    folder = case.folder()
    sim = simulator.prepare(case.cfg(), folder, None)
    callback = case.make()
    callback.on_start(sim, None)
    sim.done = 1
    nan, inf = float("nan"), float("inf")
    columns = {"client": np.arange(4), "personal/accuracy": np.array([0.5, nan, nan, 1.0]), "personal/loss": [inf] * 4}
    clients = {name: np.asarray(values) for name, values in columns.items()}
    callback.on_evaluation(sim, {"train/loss": inf, "personal/accuracy": nan, "personal/loss": inf}, clients)
    callback.on_round_end(sim, {"steps": 0, "train_s": 0.0, "images_per_s": 0.0, "peak_memory_mb": None})  # type: ignore[dict-item]
    callback.on_checkpoint(sim)
    simulator.end(sim, [callback], "finished")
