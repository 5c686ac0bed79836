"""Find run folders and read them; everything is read at its first use.

A run may have been killed, or its disk may be bad: ``sound`` separates intact run folders from damaged ones.
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
SKIPPED = (".hydra", "wandb")
EMPTY = ["", "nan"]  # cells without a number
BEGUN = {"metrics.csv", "error.txt", "status.json"}  # beside a config.yaml: a run, or what a kill left of one
# what a summary may hold under these keys, where it has them; null everywhere
NUMBERS = ("seed", "rounds", "rounds_done", "num_clients", "cohort")
TEXTS = ("status", "name", "algorithm", "dataset", "partition", "model", "experiment", "partition_hash", "finished")
MAPPINGS = ("cost", "last", "best", "best_val", "new_clients", "privacy", "task")


class Run:
    """A run folder.

    Attributes:
        path: The folder.
        conf: The conf folders whose options name the run's parts; None: fedbench's.
        summary: The content of summary.json; empty if it is missing or damaged.
    """

    def __init__(self, path: Path, conf: tuple[Path, ...] | None = None) -> None:
        self.path, self.conf = path, conf
        self.summary = read_json(path / "summary.json")
        self.left_out: str | None = None  # why the run's clients are not reported, if they cannot be read
        self._declare_scores()

    def _declare_scores(self) -> None:
        """Make known what the scores of the run's own task mean."""
        told = self.summary.get("task")
        scores = told.get("scores") if isinstance(told, dict) else None
        for name, meaning in scores.items() if isinstance(scores, dict) else ():
            if isinstance(meaning, dict) and meaning.keys() == set(Direction._fields):
                register_directions({name: Direction(**meaning)})

    @property
    def primary(self) -> str:
        """The score that the run went by, a column of metrics.csv."""
        told = self.summary.get("task")
        return f"personal/{told['primary']}" if isinstance(told, dict) and "primary" in told else "personal/accuracy"

    @property
    def finished(self) -> bool:
        """Whether the summary says that the run is finished."""
        return self.summary.get("status") == "finished"

    @property
    def tuned(self) -> bool:
        """Whether its clients fine-tuned what they deploy, after the last round only."""
        return bool(self.summary.get("tuned_at_end"))

    @property
    def seed(self) -> Any:
        """The run's seed; None where there is no summary."""
        return self.summary.get("seed")

    def choice(self, group: str) -> str | None:
        """The option chosen in a config group: choice("dataset")."""
        chosen = (self.config.get("choices") or {}).get(group)
        return self.summary.get(group) if chosen is None else chosen

    @property
    def method(self) -> str:
        """What the run is called: its name, else the algorithm chosen, or the class that was run in its place."""
        name, option = self.summary.get("name"), self.summary.get("algorithm")
        given = name is not None and name not in (option, f"{option}+ft")
        return str(name) if given else f"{self.choice('algorithm')}{'+ft' if name != option and name else ''}"

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, nested; empty where there is none.

        A choice whose option has another class than the run built (as runs were once stored) is that class's name.
        """
        path = self.path / "config.yaml"
        values = read_yaml(path) if path.is_file() else {}
        require(isinstance(values, dict), f"{path} is damaged: it is no mapping")
        update_stored(values)
        chosen = values.get("choices")
        for group, built in values.items() if isinstance(chosen, dict) else ():
            if group in chosen and isinstance(built, dict):
                chosen[group] = label_of(group, chosen[group], built.get("_target_"), self.conf)
        return values

    @cached_property
    def flat_config(self) -> dict[str, Any]:
        """The resolved configuration by dotted names."""
        return flatten(self.config, drop_empty=True)

    @cached_property
    def metrics(self) -> DataFrame:
        """metrics.csv by round."""
        return read_table(self.path / "metrics.csv", "round")

    @cached_property
    def costs(self) -> DataFrame:
        """costs.csv by round."""
        return read_table(self.path / "costs.csv", "round")

    @cached_property
    def client_names(self) -> list[str] | None:
        """Return the names of the clients by number, if they have names."""
        return read_json(self.path / "partition.json").get("names")

    def clients(self, metric: str) -> DataFrame:
        """Return a column of clients.csv, a row for each round and a column for each client; empty without it."""
        path = self.path / "clients.csv"
        try:
            table = read_table(path)
            if metric in table:
                return table.pivot(index="round", columns="client", values=metric)
            self.left_out = self.left_out or (None if path.is_file() else f"{path.name} is missing")
        except (ConfigError, KeyError, ValueError, OSError) as error:
            self.left_out = f"{path.name} is damaged: {_first(error).removeprefix(f'{path} is damaged: ')}"
        return pandas().DataFrame()


def find_runs(folders: Iterable[str | Path], config_dir: str | None = None) -> list[Run]:
    """Return the runs in or below the folders, sorted by path.

    Args:
        folders: Folders to search.
        config_dir: A folder of your own options, whose names are used too.

    Raises:
        ConfigError: There is no run.
    """
    paths: set[Path] = set()
    folders = [Path(folder).expanduser() for folder in folders]
    for folder in folders:
        require(folder.is_dir(), f"{folder} is not a folder; give folders that contain runs")
        for here, inside, files in os.walk(folder):
            inside[:] = [name for name in inside if name not in SKIPPED]
            if "summary.json" in files or ("config.yaml" in files and BEGUN & set(files)):
                paths.add(Path(here))
    where = " or ".join(map(str, folders))
    require(
        bool(paths),
        f"no runs found in {where}: a run is a folder with a summary.json (python -m fedbench makes one)",
    )
    conf = tuple(conf_dirs(config_dir)) if config_dir else None
    return [Run(path, conf) for path in sorted(paths)]


def sound(runs: list[Run]) -> tuple[list[Run], dict[Path, str]]:
    """The runs that can be read, and of the others what is damaged: path -> a few words."""
    pandas()  # without it no run can be read
    damaged = {run.path: why for run in runs if (why := fault(run))}
    return [run for run in runs if run.path not in damaged], damaged


def fault(run: Run) -> str | None:
    """What is damaged in a run's directory, in a few words; clients.csv is looked at when it is asked for."""
    try:
        _check_summary(run)
        for name in ("config.yaml", "metrics.csv", "costs.csv") if run.finished else ():
            require((run.path / name).is_file(), f"{name} is missing")
        chosen, about = run.config.get("choices"), run.config.get("paper")
        for name, value in (("choices", chosen), ("paper", about)):
            require(isinstance(value, dict | None), f"config.yaml is damaged: {name} is {value!r}")
        require(
            all(isinstance(value, str | None) for value in (chosen or {}).values()),
            "config.yaml is damaged: choices are not names",
        )
        given = run.path / ".hydra" / "overrides.yaml"
        require(not given.is_file() or isinstance(read_yaml(given) or [], list), f"{given.name} is damaged")
        done, rounds = rounds_of(run), run.summary.get("rounds")
        require(not run.finished or rounds is None or done >= rounds, f"its tables end at round {done} of {rounds}")
    except (ConfigError, OSError) as error:
        return _first(error).replace(f"{run.path}{os.sep}", "")
    return None


def rounds_of(run: Run) -> int:
    """Return the rounds that a run's files hold; its summary is written when it begins and when it ends."""
    return int(max(run.summary.get("rounds_done") or 0, *(max(t.index, default=0) for t in (run.costs, run.metrics))))


def _check_summary(run: Run) -> None:
    path = run.path / "summary.json"
    require(bool(run.summary) or not path.is_file(), "summary.json cannot be read")
    s = run.summary
    for kind, keys, words in ((int | float, NUMBERS, "a number"), (str, TEXTS, "text"), (dict, MAPPINGS, "a mapping")):
        for key in keys:
            fits = isinstance(s.get(key), kind | None) and not isinstance(s.get(key), bool)
            require(fits, f"summary.json is damaged: {key} must be {words}, got {s.get(key)!r}")
    for where, key in (("cost", "images_per_s"), ("best", "round"), ("best_val", "round"), ("new_clients", "best")):
        value = (s.get(where) or {}).get(key)
        require(
            isinstance(value, int | float | None),
            f"summary.json is damaged: {where}.{key} must be a number, got {value!r}",
        )


def _first(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def read_yaml(path: Path) -> Any:
    """What a YAML file holds, {} where it is empty; ConfigError where it is damaged."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), LOADER) or {}
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {_first(error)}") from error


def read_table(path: Path, index: str | None = None) -> DataFrame:
    """Return a CSV file of numbers, and perhaps names of clients; empty if there is none.

    A last line cut by a kill is left out.

    Raises:
        ConfigError: The file is damaged.
    """
    pd = pandas()
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        text = text[: text.rfind("\n") + 1]
        if not text:
            return pd.DataFrame()
        lines = [(line.count(","), '"' in line) for line in text.split("\n")[:-1]]
        odd = next((i for i, (n, quoted) in enumerate(lines, 1) if n != lines[0][0] and not quoted), None)
        require(odd is None, f"line {odd} has not {lines[0][0] + 1} cells")
        exact = {"float_precision": "round_trip"} if pd.__version__ < "3.1" else {}  # later versions always are
        table = pd.read_csv(io.StringIO(text), keep_default_na=False, na_values=EMPTY, **exact)
        for name, kind in table.dtypes.items():
            if kind.kind not in "iuf" and name != "name":
                table[name] = pd.to_numeric(table[name])
        return table if index is None else table.set_index(index)
    except (ConfigError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} is damaged: {_first(error)}") from error
