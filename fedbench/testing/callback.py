"""Checks of callbacks, which must not change the run that they observe.

The runs train FedAvg on digits, with four clients and three rounds.
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
from torch import Tensor

from fedbench.simulation import checkpoint, simulator
from fedbench.simulation.callbacks.base import Callback, Status
from fedbench.simulation.callbacks.checkpoint import Checkpoint
from fedbench.simulation.callbacks.tables import Tables
from fedbench.simulation.instantiate import make
from fedbench.simulation.run_state import Simulation
from fedbench.simulation.stop_signals import StopSignals
from fedbench.testing._cases import composed
from fedbench.testing._suite import Report, Suite
from fedbench.testing._targets import Target, described, path_of

ROUNDS = 3
RUN = (
    *("algorithm=fedavg", "dataset=digits", "model=logistic", "partition=iid", "partition.num_clients=4"),
    *(f"rounds={ROUNDS}", "clients_per_round=2", "local.epochs=1", "local.batch_size=64", "eval.every=2"),
    *("hardware.device=cpu", "hardware.executor=vmap", "tracking=disabled"),
)
COMPARABLE = bool | int | float | str | list | dict | tuple | set | None  # types of attributes that are compared


class StopAfter(StopSignals):
    """Request that a run stops after a round, as a signal of the operating system does."""

    def __init__(self, sim: Simulation, round: int):
        self.sim, self.round = sim, round

    def requested(self) -> bool:
        """Return whether the run shall stop: True when at least ``self.round`` rounds are done."""
        return self.sim.done >= self.round


class Recorded(Callback):
    """Call another callback, and record the states that it returns for checkpoints."""

    name = "callbacks.checked"

    def __init__(self, callback: Callback):
        self.callback, self.states = callback, []
        self.on_evaluation = callback.on_evaluation  # type: ignore[method-assign]
        self.on_round_end = callback.on_round_end  # type: ignore[method-assign]
        self.on_end = callback.on_end  # type: ignore[method-assign]

    def on_start(self, run: Simulation, saved: str | None) -> None:
        """Call on_start of the callback.

        Args:
            run: The run.
            saved: The state that the callback returned for a checkpoint, as JSON; None for a new run.
        """
        self.callback.on_start(run, None if saved is None else json.loads(saved))

    def on_checkpoint(self, run: Simulation) -> str | None:
        """Call on_checkpoint of the callback, and append its state to `states`.

        Returns:
            The state as JSON.  None: the callback has no state, or JSON cannot represent it.
        """
        state = self.callback.on_checkpoint(run)
        self.states.append(copy.deepcopy(state))
        try:
            return None if state is None else json.dumps(state)
        except (TypeError, ValueError):
            return None  # the check state_is_json fails


@dataclass
class Results:
    """The results of a run.

    Attributes:
        tables: The content of metrics.csv and clients.csv by name.
        summary: The content of summary.json.
        state: The state of the method.
        recorded: The callback, with the states that it returned for checkpoints.
    """

    tables: dict[str, bytes]
    summary: dict[str, Any]
    state: dict[str, Tensor]
    recorded: Recorded

    def attributes(self) -> dict[str, Any]:
        """Return values that an interruption must not change, by a name for messages.

        They are the callback's last state for checkpoints, and its public attributes of the types `COMPARABLE`.
        """
        values = vars(self.recorded.callback).items()
        public = {f"self.{name}": v for name, v in values if not name.startswith("_") and isinstance(v, COMPARABLE)}
        return {"the state of on_checkpoint": self.recorded.states[-1], **public}


@dataclass
class CallbackCase:
    """A callback, given by `_target_` and options, and a folder for runs."""

    values: dict[str, Any]
    scratch: tempfile.TemporaryDirectory = field(default_factory=tempfile.TemporaryDirectory)

    def make(self) -> Callback:
        """Return a new object of the callback's class."""
        return make(self.values, key="callbacks")

    def folder(self) -> Path:
        """Make a new, empty folder for a run, and return its path.  It is deleted together with this object."""
        return Path(tempfile.mkdtemp(dir=self.scratch.name))

    def prepare(self, folder: Path, saved: dict[str, Any] | None = None, write: bool = False) -> Simulation:
        """Return a run before its first round, or at the round of a checkpoint.

        Args:
            folder: The run folder.
            saved: The content of a checkpoint; None for a new run.
            write: Whether the files of the run folder, such as config.yaml, are written.
        """
        cfg = composed(*RUN).copy()
        cfg.output_dir = self.scratch.name  # the temporary folder of all runs
        cfg.callbacks = {"checked": self.values}
        return simulator.prepare(cfg, folder, saved, write=write)

    def run(self, folder: Path, callback: Callback, stop: int = ROUNDS) -> Results:
        """Start a run with a callback, or resume it if its folder has a checkpoint, and return its results.

        Args:
            folder: The run folder.
            callback: The callback.
            stop: The number of rounds after which the run is interrupted, unless it is finished then.
        """
        saved = checkpoint.load(folder) if (folder / checkpoint.NAME).is_file() else None
        sim = self.prepare(folder, saved, write=True)
        tables, recorded = Tables(), Recorded(callback)  # Tables writes metrics.csv and clients.csv
        callbacks = [tables, recorded, Checkpoint(every=1, others=[tables, recorded])]
        status: Status = "finished"
        for started in callbacks:  # with the state that `on_checkpoint` returned, if the run is resumed
            started.on_start(sim, (saved or {}).get(started.name))
        try:
            simulator.run_rounds(sim, callbacks, StopAfter(sim, stop), time.monotonic())
        except KeyboardInterrupt:
            status = "interrupted"
        summary = simulator.end(sim, callbacks, status)
        contents = {name: (folder / name).read_bytes() for name in ("metrics.csv", "clients.csv")}
        return Results(contents, summary, sim.algorithm.state_dict(), recorded)

    @functools.cached_property
    def without_callback(self) -> Results:
        """The results of a complete run without the callback, with the same seed as the runs with it."""
        return self.run(self.folder(), Callback())

    @functools.cached_property
    def two_uninterrupted(self) -> tuple[Results, Results]:
        """The results of two complete runs with the callback and the same seed.

        What differs between them, such as a time, is not reproducible and thus not compared with other runs.
        """
        return self.run(self.folder(), self.make()), self.run(self.folder(), self.make())

    @functools.cached_property
    def resumed(self) -> Results:
        """The results of a complete run with the callback that was interrupted after round 2 and then resumed."""
        folder = self.folder()
        self.run(folder, self.make(), stop=2)
        return self.run(folder, self.make())

    def started(self) -> tuple[Callback, Simulation]:
        """Return a new callback and a run before its first round, after the callback's hook on_start was called."""
        callback, sim = self.make(), self.prepare(self.folder())
        callback.on_start(sim, None)
        return callback, sim


SUITE: Suite[CallbackCase] = Suite("callback")


def check_callback(
    target: Target, options: Mapping[str, Any] | None = None, *, only: Iterable[str] | None = None
) -> Report:
    """Check a callback.

    Args:
        target: Its class, its dotted path, or an option of conf/callbacks.
        options: Arguments of its constructor.
        only: The names of the checks to run; None runs all.

    Returns:
        The result of every check.

    Raises:
        ConfigError: The callback cannot be built.
    """
    # setting: the runs, for the heading of the report
    setting = f"in runs of {ROUNDS} rounds with 4 clients, evaluated every second round"
    return SUITE.run(path_of(target), setting, case_for(target, options), only)


def case_for(target: Target, options: Mapping[str, Any] | None = None) -> CallbackCase:
    """Return the case that the checks receive: the callback, with a folder for its runs.

    Args:
        target: Its class, its dotted path, or an option of conf/callbacks.
        options: Arguments of its constructor.

    Raises:
        ConfigError: It cannot be built, or is not a Callback.
    """
    values = described("callbacks", target, options, Callback)  # `_target_` and the options
    return CallbackCase(values)


@SUITE.check
def hooks_succeed(case: CallbackCase) -> None:
    """No hook raises an exception in a run of three rounds."""
    assert len(case.two_uninterrupted) == 2  # reading this attribute runs them


@SUITE.check
def results_stay(case: CallbackCase) -> None:
    """Tables, scores and the state of the method equal those of a run without the callback, bit for bit.

    Remedy: hooks must not write to `run`, and must copy metrics before changing them.
    """
    results, expected = case.two_uninterrupted[0], case.without_callback
    for name, content in expected.tables.items():
        assert results.tables.get(name) == content, f"{name} differs from that of a run without the callback"
    for key in ("last", "best"):
        found, wanted = (json.dumps(run.summary[key], default=str) for run in (results, expected))
        assert found == wanted, f"the scores in {key} of summary.json differ from those of a run without the callback"
    for name, value in expected.state.items():
        assert results.state[name].equal(value), (
            f"the server's state {name} differs from that of a run without the callback"
        )


@SUITE.check
def state_is_json(case: CallbackCase) -> None:
    """The state for checkpoints consists of numbers, text, lists and dicts, which JSON can represent.

    Remedy: return numbers, text, lists and dicts with text as keys from `on_checkpoint`.
    """
    for state in case.two_uninterrupted[0].recorded.states:  # what on_checkpoint returned in a complete run
        try:
            restored = json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise AssertionError(f"on_checkpoint returns a value that JSON cannot represent ({error})") from None
        assert restored == state, "on_checkpoint returns a value that JSON changes, such as a tuple"


@SUITE.check
def resume(case: CallbackCase) -> None:
    """A resumed run gives the same tables, and the callback has the same state as without interruption.

    Remedy: return state in `on_checkpoint` and restore it in `on_start`, or begin the names of attributes with an
    underscore.
    """
    tables = case.without_callback.tables  # of an uninterrupted run: the content of metrics.csv and clients.csv
    assert case.resumed.tables == tables, "the tables of a resumed run differ from an uninterrupted one"
    # attributes of the callback at the end of two equal uninterrupted runs, and of a resumed one
    first, second = (results.attributes() for results in case.two_uninterrupted)
    resumed = case.resumed.attributes()
    for name, value in first.items():
        is_repeatable = value == second.get(name)  # unlike times, for example
        found = f"{name} is {resumed.get(name)!r} after resuming, and {value!r} without an interruption"
        assert not is_repeatable or resumed.get(name) == value, found


@SUITE.check
def an_early_end_is_no_error(case: CallbackCase) -> None:
    """The hook on_end raises no exception if a run fails before its first evaluation, when there are no scores.

    Remedy: look for scores in the summary before you read them.
    """
    callback, sim = case.started()
    simulator.end(sim, [callback], "failed")


@SUITE.check
def scores_that_are_not_finite(case: CallbackCase) -> None:
    """Hooks accept scores that are NaN or infinite, and costs that are None.

    Remedy: test values for NaN, infinity and None before you format or compare them.
    """
    callback, sim = case.started()
    sim.done = 1
    nan, inf = float("nan"), float("inf")
    clients = {
        "client": np.arange(4),
        "personal/accuracy": np.array([0.5, nan, nan, 1.0]),
        "personal/loss": np.full(4, inf),
    }
    callback.on_evaluation(sim, {"train/loss": inf, "personal/accuracy": nan, "personal/loss": inf}, clients)
    callback.on_round_end(sim, {"steps": 0, "train_s": 0.0, "images_per_s": 0.0, "peak_memory_mb": None})  # type: ignore[dict-item]
    callback.on_checkpoint(sim)
    simulator.end(sim, [callback], "finished")
