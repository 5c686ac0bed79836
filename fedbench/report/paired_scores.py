"""Scores of methods in each setting (data set, partition, model), and their differences for the same seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedbench.core.options import require
from fedbench.report import scores
from fedbench.report.runs import Run
from fedbench.report.scores import Options
from fedbench.report.summary import Group, sort_key
from fedbench.report.table import DataFrame, Series, pandas


@dataclass(frozen=True)
class Setting:
    """The scores of the compared methods in a setting: a data set, a partition, a model and so on.

    Attributes:
        description: Its data set, partition, model and others, such as "digits, dirichlet, mlp".
        groups: The runs of each method.
        means: The means over clients at the selected round [S, K], by seed and method.  They are NaN for a method that
            has no run of the seed, or no score.
        clients: The scores of clients at the selected round, by method and seed; empty if the run has none.
    """

    description: str
    groups: dict[str, Group]
    means: DataFrame
    clients: dict[tuple[str, Any], Series]


@dataclass(frozen=True)
class Difference:
    """The differences of two methods in a setting, the first minus the second.

    Attributes:
        setting: The setting.
        method: The first method.
        against: The second method.
        means: The differences of means over clients, by seed [S].
        clients: The differences of clients [S, N], NaN for clients without a score; [S, 0] if a run has no scores of
            clients.
    """

    setting: Setting
    method: str
    against: str
    means: Series
    clients: DataFrame

    @property
    def groups(self) -> tuple[Group, Group]:
        """The runs of ``method`` and the runs of ``against`` in this setting, as (method, against)."""
        return self.setting.groups[self.method], self.setting.groups[self.against]

    @property
    def has_same_clients(self) -> bool:
        """Whether there are scores of single clients, and the partition of the data is the same for all seeds."""
        runs = [run for run in self.groups[0].runs if run.seed in self.means.index]
        return self.clients.size > 0 and len({run.summary.get("partition_hash") for run in runs}) == 1


def read_settings(methods: dict[str, dict[str, Group]], options: Options) -> list[Setting]:
    """Return the scores of methods in each setting, sorted by setting.

    Args:
        methods: From the name of a method, and then from the description of a setting, to the group to compare.
        options: The metric, and the round at which it is taken: last, best or best_val.

    Raises:
        ConfigError: Runs of one setting and seed have different partitions.
    """
    descriptions = {d: group.setting for groups in methods.values() for d, group in groups.items()}
    settings = []
    for description in sorted(descriptions, key=lambda d: [sort_key(value) for value in descriptions[d].values()]):
        groups = {name: by_setting[description] for name, by_setting in methods.items() if description in by_setting}
        check_partitions(list(groups.values()))
        means: dict[str, dict[Any, float]] = {}  # by method and seed
        clients = {}  # by method and seed: the scores of clients in the selected round, empty if they are not recorded
        for name, group in groups.items():
            means[name] = {}
            for run in group.runs:
                round = scores.selected_round(run, options.metric, options.select)
                means[name][run.seed] = scores.value_at(run, options.metric, round)
                values = run.clients(options.metric)
                clients[name, run.seed] = values.loc[round] if round in values.index else pandas().Series(dtype=float)
        settings.append(Setting(description, groups, pandas().DataFrame(means).sort_index(), clients))
    return settings


def check_partitions(groups: list[Group]) -> None:
    """Check that the runs of a setting with the same seed have the same clients and data.

    Raises:
        ConfigError: They do not.
    """
    first: dict[Any, Run] = {}
    for run in (run for group in groups for run in group.runs):
        other = first.setdefault(run.seed, run)
        for key in ("partition_hash", "data_hash"):
            hashes = [source.summary.get(key) for source in (other, run)]
            require(
                # runs of early releases have no hash of the data
                hashes[0] == hashes[1] or (key == "data_hash" and None in hashes),
                f"--compare: {other.path} and {run.path} have seed {run.seed}, but a different {key} in summary.json, "
                "so that their clients are not the same: run both on the same data with the same partition options",
            )


def differences_of(setting: Setting, pairs: list[tuple[str, str]]) -> list[Difference]:
    """Return the differences of pairs of methods that have a score of the same seed in a setting.

    Args:
        setting: The scores of the methods in one setting (data set, partition, model and so on).
        pairs: Pairs of names of methods.  A difference is the first method minus the second.
    """
    differences = []
    for method, against in pairs:
        if {method, against} <= setting.groups.keys():
            means = (setting.means[method] - setting.means[against]).dropna()
            by_seed = {seed: setting.clients[method, seed] - setting.clients[against, seed] for seed in means.index}
            clients = pandas().DataFrame(by_seed, dtype=float).T  # [S, N]
            if clients.isna().all(axis=1).any():  # a run has no scores of clients
                clients = clients.iloc[:, :0]
            if len(means):
                differences.append(Difference(setting, method, against, means, clients))
    return differences
