"""Read run folders.  Files are read when they are first used.

A run may have been killed, or its disk may be damaged: `readable` separates intact run folders from damaged ones.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from fedbench.config.conf_tree import conf_dirs, label_of
from fedbench.core.files import read_json
from fedbench.core.nested import flatten
from fedbench.core.options import ConfigError, require
from fedbench.core.settings import update_stored
from fedbench.report.table import DataFrame, pandas
from fedbench.tasks.scores import Direction, register_directions

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
SKIPPED_FOLDERS = (".hydra", "wandb")
STARTED_FILES = {"metrics.csv", "error.txt", "status.json"}  # with a config.yaml: a run without summary.json
# Types of values in summary.json; every value may be missing or null.
SUMMARY_TYPES = (
    (int | float, "a number", ("seed", "rounds", "rounds_done", "num_clients", "cohort")),
    (str, "text", ("status", "name", "algorithm", "dataset", "partition", "model", "experiment", "partition_hash",
                   "finished")),
    (dict, "a mapping", ("cost", "last", "best", "best_val", "new_clients", "privacy", "task")),
)  # fmt: skip
SUMMARY_NUMBERS = (("cost", "images_per_s"), ("best", "round"), ("best_val", "round"), ("new_clients", "best"))


class Run:
    """A run folder; its attributes are the contents of the files in it, such as ``summary`` of summary.json.

    Args:
        path: The folder.
        conf: The folders of options (conf) in which the methods and data sets of the run are looked up; None for those
            of fedbench.

    Attributes:
        path: The folder.
        conf: The argument ``conf``.
        summary: The content of summary.json; empty if it is missing or damaged.
        clients_error: What is wrong with clients.csv, after `clients` failed to read it; None otherwise.
    """

    def __init__(self, path: Path, conf: tuple[Path, ...] | None = None) -> None:
        self.path = path
        self.conf = conf
        self.summary = read_json(path / "summary.json")
        self.clients_error: str | None = None
        self._task = self.summary.get("task") if isinstance(self.summary.get("task"), dict) else {}
        self._declare_scores()

    def _declare_scores(self) -> None:
        """Declare the scores of the run's task, so that `fedbench.tasks.scores.direction` knows which are better.

        Tasks of users are not imported for a report; summary.json has the directions of their scores.
        """
        scores = self._task.get("scores")  # _task: the entry "task" of summary.json
        for name, meaning in scores.items() if isinstance(scores, dict) else ():
            if isinstance(meaning, dict) and meaning.keys() == set(Direction._fields):
                register_directions({name: Direction(**meaning)})

    @property
    def primary(self) -> str:
        """The primary metric of the run's task, a column of metrics.csv such as "personal/accuracy"."""
        return f"personal/{self._task.get('primary', 'accuracy')}"

    @property
    def finished(self) -> bool:
        """Whether the run is finished: not running, paused or failed."""
        return self.summary.get("status") == "finished"

    @property
    def tuned(self) -> bool:
        """Whether clients fine-tuned their models after the last round, and had not done so in the rounds before."""
        return bool(self.summary.get("tuned_at_end"))

    @property
    def seed(self) -> Any:
        """The seed, an integer; None if the run has no summary.json."""
        return self.summary.get("seed")

    def choice(self, group: str) -> str | None:
        """Return the chosen option of a config group: "mnist" for "dataset".  None if the run does not record it."""
        chosen = (self.config.get("choices") or {}).get(group)
        return self.summary.get(group) if chosen is None else chosen

    @property
    def method(self) -> str:
        """The name of the run if the user gave one, else its algorithm, with "+ft" if it is fine-tuned."""
        name = self.summary.get("name")  # by default the algorithm's, followed by "+ft" if the run is fine-tuned
        option = self.summary.get("algorithm")
        if name is not None and name not in (option, f"{option}+ft"):
            return str(name)
        return f"{self.choice('algorithm')}{'+ft' if name and name != option else ''}"

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, nested; empty without config.yaml.

        Its mapping ``choices`` has the chosen option of each config group, such as algorithm: fedavg.  If a run of an
        earlier release has another class than that option, ``choices`` gets the name of the class instead.

        Raises:
            ConfigError: The file is damaged.
        """
        path = self.path / "config.yaml"
        values = read_yaml(path) if path.is_file() else {}
        require(isinstance(values, dict), f"{path} is damaged: it is not a mapping")
        update_stored(values)  # in place: keys and classes of earlier releases get their current names
        choices = values.get("choices")
        for group, options in values.items() if isinstance(choices, dict) else ():
            if group in choices and isinstance(options, dict):
                choices[group] = label_of(group, choices[group], options.get("_target_"), self.conf)
        return values

    @cached_property
    def flat_config(self) -> dict[str, Any]:
        """The resolved configuration as a dict from dotted key to value."""
        return flatten(self.config, drop_empty=True)

    @cached_property
    def metrics(self) -> DataFrame:
        """The table metrics.csv, indexed by round; empty without the file.  ConfigError if it is damaged."""
        return read_table(self.path / "metrics.csv", "round")

    @cached_property
    def costs(self) -> DataFrame:
        """The table costs.csv, indexed by round; empty without the file.  ConfigError if it is damaged."""
        return read_table(self.path / "costs.csv", "round")

    @cached_property
    def partition(self) -> dict[str, Any]:
        """The content of partition.json, a dict; {} without the file.

        Keys are, for example, train (number of training samples of each client, a list [N]), label_counts [N, C],
        class_names [C] and names (of clients, [N]).
        """
        return read_json(self.path / "partition.json")

    def clients(self, metric: str) -> DataFrame:
        """Return a metric by round and client [rounds, clients], a column of clients.csv.

        It is empty if there is no such column, or if the file cannot be read; then `clients_error` says why.
        """
        path = self.path / "clients.csv"
        try:
            table = read_table(path)
            if metric in table:
                return table.pivot(index="round", columns="client", values=metric)
            if not path.is_file():
                self.clients_error = f"{path.name} is missing"
        except (ConfigError, KeyError, ValueError, OSError) as error:
            self.clients_error = f"{path.name} is damaged: {first_line(error).removeprefix(f'{path} is damaged: ')}"
        return pandas().DataFrame()


def find_runs(folders: Iterable[str | Path], config_dir: str | None = None) -> list[Run]:
    """Return the runs in or below folders, sorted by path.

    A folder with a summary.json is a run, and so is one with a config.yaml and another file of a run that has begun.

    Args:
        folders: Paths of run folders, or of folders with runs at any depth.
        config_dir: A folder with the user's own options, in which methods and data sets of the runs are looked up.

    Raises:
        ConfigError: A folder does not exist, or there is no run.
    """
    paths: set[Path] = set()
    folders = [Path(folder).expanduser() for folder in folders]
    for folder in folders:
        require(folder.is_dir(), f"{folder} is not a folder; give folders that contain runs")
        for parent, subfolders, files in os.walk(folder):
            subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
            if "summary.json" in files or ("config.yaml" in files and STARTED_FILES & set(files)):
                paths.add(Path(parent))
    require(
        bool(paths),
        f"no runs found in {' or '.join(map(str, folders))}: a run is a folder with a summary.json "
        "(python -m fedbench makes one); give folders that contain such folders",
    )
    conf = tuple(conf_dirs(config_dir)) if config_dir else None
    return [Run(path, conf) for path in sorted(paths)]


def readable(runs: list[Run]) -> tuple[list[Run], dict[Path, str]]:
    """Return the intact runs, and the damage of each other run by its path.

    Raises:
        ConfigError: pandas is not installed.
    """
    pandas()
    damaged = {run.path: reason for run in runs if (reason := damage_of(run))}
    return [run for run in runs if run.path not in damaged], damaged


def damage_of(run: Run) -> str | None:
    """Return what is damaged in a run folder; None if it is intact.

    clients.csv, which is large, is not checked before `Run.clients` reads it.
    """
    try:
        _check_summary(run)
        for name in ("config.yaml", "metrics.csv", "costs.csv") if run.finished else ():
            require((run.path / name).is_file(), f"the file {name} is missing: restore it, or start the run again")
        for name in ("choices", "paper"):
            value = run.config.get(name)
            require(isinstance(value, dict | None), f"config.yaml is damaged: {name} is {value!r}, not a mapping")
        choices = (run.config.get("choices") or {}).values()
        require(
            all(isinstance(c, str | None) for c in choices),
            "config.yaml is damaged, as a value of choices is not text: restore it, or start the run again",
        )
        require(
            isinstance(overrides_of(run), list),
            "overrides.yaml is damaged, as it is not a list: restore it, or start the run again",
        )
        done, rounds = rounds_of(run), run.summary.get("rounds")
        require(
            not run.finished or rounds is None or done >= rounds,
            f"its tables end at round {done} of {rounds}: run it again",
        )
    except (ConfigError, OSError) as error:
        return first_line(error).replace(f"{run.path}{os.sep}", "")
    return None


def _check_summary(run: Run) -> None:
    """Raise ConfigError if summary.json exists but is not readable JSON, or has values of wrong types."""
    summary = run.summary
    require(
        bool(summary) or not (run.path / "summary.json").is_file(),
        "summary.json cannot be read, because it is damaged: restore it from a copy, or start the run again",
    )
    for types, expected, keys in SUMMARY_TYPES:  # (allowed types, these in words, keys)
        for key in keys:
            value = summary.get(key)
            is_valid = isinstance(value, types | None) and not isinstance(value, bool)
            require(is_valid, f"summary.json is damaged: {key} must be {expected}, got {value!r}")
    for section, key in SUMMARY_NUMBERS:  # numbers in nested mappings, such as best.round
        value = (summary.get(section) or {}).get(key)
        is_valid = isinstance(value, int | float | None)
        require(is_valid, f"summary.json is damaged: {section}.{key} must be a number, got {value!r}")


def rounds_of(run: Run) -> int:
    """Return the number of rounds that a run has done: the largest one in summary.json, costs.csv and metrics.csv.

    summary.json alone is not up to date during a run.
    """
    rounds = [max(table.index, default=0) for table in (run.costs, run.metrics)]
    return int(max(run.summary.get("rounds_done") or 0, *rounds))


def overrides_of(run: Run) -> list[str]:
    """Return the overrides that started the run, such as ["algorithm=fedper", "seed=1"]; [] if they are not stored."""
    path = run.path / ".hydra" / "overrides.yaml"
    return (read_yaml(path) or []) if path.is_file() else []


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if it has no message."""
    return (str(error) or type(error).__name__).splitlines()[0]


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file; {} if it is empty.

    Raises:
        ConfigError: The file is damaged.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), LOADER) or {}
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {first_line(error)}") from error


def read_table(path: Path, index: str | None = None) -> DataFrame:
    """Return a CSV file as a DataFrame; empty if the file does not exist.

    All columns must be numbers, except for a text column ``name``.  An incomplete last line of a killed run is ignored.

    Args:
        path: The file.
        index: The column that becomes the index; None for the number of the row.

    Raises:
        ConfigError: The file is damaged.
    """
    pd = pandas()
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        text = text[: text.rfind("\n") + 1]  # without the incomplete last line
        if not text:
            return pd.DataFrame()
        lines = text.split("\n")[:-1]
        width = lines[0].count(",")  # pandas fills short lines with NaN
        bad = next((i for i, line in enumerate(lines, 1) if line.count(",") != width and '"' not in line), None)
        require(bad is None, f"line {bad} does not have {width + 1} cells, as the first line has")
        exact = {"float_precision": "round_trip"} if pd.__version__ < "3.1" else {}  # the default since 3.1
        table = pd.read_csv(io.StringIO(text), keep_default_na=False, na_values=["", "nan"], **exact)
        for name, dtype in table.dtypes.items():
            if dtype.kind not in "iuf" and name != "name":
                table[name] = pd.to_numeric(table[name])
        return table if index is None else table.set_index(index)
    except (ConfigError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} is damaged: {first_line(error)}") from error
