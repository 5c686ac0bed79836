"""``python -m fedbench tune``: choose the options of methods by validation, with equally many trials (choices) each."""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from fedbench.app.compose import Composer
from fedbench.app.trials import RunLauncher
from fedbench.config.conf_tree import GROUPS
from fedbench.core.command import Arguments, add_config_dir, add_json, arguments, command
from fedbench.core.files import read_json, replace_text
from fedbench.core.json_output import output_on_stderr, print_json
from fedbench.core.options import ConfigError, require
from fedbench.core.suggest import suggested
from fedbench.report import scores
from fedbench.report.display import for_readers
from fedbench.report.runs import Run
from fedbench.report.table import FORMATS, MACHINE_FORMATS, as_object, pandas, render
from fedbench.report.tuning import SELECTIONS, choice_table, choose, studies, validation_score
from fedbench.simulation.processes import under_torchrun
from fedbench.simulation.status import STATUS_FILE
from fedbench.tune.search import SEARCHES, Proposer, Values, promoted, proposer, rungs
from fedbench.tune.space import default_point, search_space

LEDGER = "trials.csv"
CHOSEN = "chosen"  # folder of the runs with the chosen values and the test seeds
TEST_SEEDS = 5  # by default
COLUMNS = ("algorithm", "dataset", "partition", "model", "trial", "overrides", "seeds", "rounds", "score", "state")
EXAMPLES = """examples:
  python -m fedbench tune algorithm=fedavg,fedper,pgfed dataset.val_fraction=0.2 --trials 20
  python -m fedbench tune algorithm=fedprox algorithm.mu=0.001,0.01,0.1,1 dataset.val_fraction=0.2 --search grid
  python -m fedbench tune algorithm=ditto 'algorithm.lam=tag(log,interval(0.01,10))' rounds=81 --halving 3
  python -m fedbench tune algorithm=fedavg,pgfed dataset=digits,mnist seed=0,1,2 hydra/launcher=joblib

What is tried for each option is declared in its YAML file (# search: ...), or given in the command: several values, or
an interval.  Options with one value in the command are fixed.  Groups with several options (algorithm=a,b) are searched
one after the other.  Trials are compared by the validation score, as a mean over the seeds.  Then the best values are
run with new seeds.  The same command resumes a search that was stopped.
"""


@dataclass
class Trial:
    """One choice of values of a method.

    Attributes:
        values: The values in Hydra's grammar, by config key.
        folders: The run folders, one per seed; empty before the first run.
        score: The mean validation score over seeds; NaN before the first run and after a failure.
        rounds: The round of the score.
        state: "finished", "stopped" (by successive halving) or "failed".
    """

    values: Values
    folders: list[Path] = field(default_factory=list)
    score: float = math.nan
    rounds: int = 0
    state: str = "stopped"


@dataclass
class Search:
    """The search of one method in one setting (data set, partition and so on).

    Attributes:
        overrides: The overrides of all its runs, without the searched values and the seed.
        chosen: The chosen algorithm, data set, partition and model, by config group.
        proposer: Proposes its trials.
        rungs: The rounds after which trials are compared, ascending.  The last is the number of rounds of a run.
        keys: The searched config keys.
        trials: The trials so far.
    """

    overrides: list[str]
    chosen: dict[str, str]
    proposer: Proposer
    rungs: list[int]
    keys: list[str]
    trials: list[Trial] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The options of algorithm and dataset as text, such as "fedper on digits"."""
        return f"{self.chosen['algorithm']} on {self.chosen['dataset']}"


@dataclass
class Plan:
    """What a command does: its searches, the seeds, and the launchers of its runs.

    Attributes:
        args: The parsed command line.
        launcher: Starts the runs of trials.
        chosen_launcher: Starts the runs with the chosen values and the test seeds.
        searches: The searches, one per method and setting.
        seeds: The seeds of the trials.
        test_seeds: The seeds with which the chosen values are run.
    """

    args: argparse.Namespace
    launcher: RunLauncher
    chosen_launcher: RunLauncher
    searches: list[Search]
    seeds: list[int]
    test_seeds: list[int]


def parser() -> Arguments:
    """Return the parser of ``fedbench tune``: its flags, and overrides such as algorithm=fedavg,ditto."""
    p = arguments(
        "tune", "Choose options of methods by their validation scores, with equal numbers of trials.", EXAMPLES
    )
    p.add_argument("overrides", nargs="*", help="overrides of a sweep, such as algorithm=fedavg,pgfed seed=0,1,2")
    p.add_argument("--trials", type=int, default=20, help="trials of each method (default: %(default)s)")
    p.add_argument(
        "--search",
        choices=SEARCHES,
        default="tpe",
        help="tpe and random draw values by Optuna; grid tries all listed values (default: %(default)s)",
    )
    p.add_argument(
        "--halving",
        type=int,
        metavar="FACTOR",
        help="stop trials early: the best one of FACTOR trials goes on to FACTOR times as many rounds",
    )
    p.add_argument(
        "--test-seeds",
        metavar="SEEDS",
        help="seeds with which the chosen values are run, separated by commas; none: do not run them "
        f"(default: {TEST_SEEDS} seeds after those of the trials)",
    )
    p.add_argument("--metric", help="a column of metrics.csv, personal/... (default: the primary metric of the runs)")
    p.add_argument(
        "--select",
        choices=SELECTIONS,
        default="last",
        help="the round of the validation score: the last, or the best one of each run (default: %(default)s)",
    )
    p.add_argument("--format", choices=[*FORMATS], help="format of the table (default: text)")
    add_json(p)
    add_config_dir(p)
    return p


@command
def main(argv: list[str]) -> int:
    """Run the command line and return the exit status: 0, or 1 if all trials of a method failed.

    Progress goes to standard error, and the table to standard output.

    Args:
        argv: The words after ``python -m fedbench tune``.
    """
    args = parser().parse_intermixed_args(argv)
    check_arguments(args)
    with output_on_stderr():
        plan = make_plan(args, f"python -m fedbench tune {shlex.join(argv)}")
        for search in plan.searches:
            run_search(search, plan)
        best = [best_trial(search, plan) for search in plan.searches]  # None if all trials of a search failed
        tested = run_chosen(plan, best)  # folders of the runs of the best trials with the test seeds
    failed = [search.name for search, trial in zip(plan.searches, best) if trial is None]
    show_results(plan, tested, status=int(bool(failed)))
    folder = plan.launcher.folder
    if failed:
        print(f"fedbench: all trials of {', '.join(failed)} failed: error.txt in {folder}/* says why", file=sys.stderr)
    again = suggested(f"python -m fedbench report {shlex.quote(str(folder))} --choose")
    print(f"all trials: {folder / LEDGER}; the table again: {again}", file=sys.stderr)  # LEDGER: trials.csv
    return int(bool(failed))


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigError if the value of a flag of ``fedbench tune`` is invalid, or torchrun started the command."""
    require(
        not (args.json and args.format), f"--json and --format {args.format} are two formats: leave out one of them"
    )
    require(args.trials > 0, f"--trials is {args.trials}: give a number of at least 1")
    require(args.halving is None or args.halving > 1, f"--halving is {args.halving}: give a factor of at least 2")
    require(
        not under_torchrun(),
        "tune starts its runs itself: use it without torchrun; hydra/launcher=joblib runs several at once",
    )
    require(
        args.metric is None or args.metric.startswith("personal/"),
        f"--metric is {args.metric}: give a metric that begins with personal/, because only these have validation "
        "scores",
    )


# -- plan ------------------------------------------------------------------------------------------------
def make_plan(args: argparse.Namespace, command: str) -> Plan:
    """Read the overrides of the command, and check the configuration of every search before any run begins.

    Args:
        args: The parsed command line.
        command: The command as typed, for summary.json.

    Raises:
        ConfigError: The command has a mistake.
    """
    composer = Composer(args.config_dir)  # composes configurations of the YAML files and overrides
    overrides = composer.expand(args.overrides)  # with all names that a glob(pattern) matches
    composer.refuse_repeated(overrides)
    parsed = composer.parse(overrides)  # an Override has key_or_group, and its text input_line
    seed_texts = [str(o.input_line).partition("=")[2] for o in parsed if o.key_or_group == "seed"]  # one or none
    seeds = seeds_of(seed_texts[0] if seed_texts else "0,1,2", "seed")
    test_seeds = test_seeds_of(args.test_seeds, seeds)
    parsed = [o for o in parsed if o.key_or_group != "seed"]
    swept = [o for o in parsed if o.is_sweep_override()]  # several values, or an interval
    # several options of a group, such as methods or data sets: a search each; other swept keys: what it searches over
    groups = [str(o.input_line) for o in swept if o.key_or_group in GROUPS]
    searched = [o for o in swept if o.key_or_group not in GROUPS]
    fixed = [str(o.input_line) for o in parsed if not o.is_sweep_override()]
    keys = [*(o.key_or_group for o in swept), "seed"]  # the names of run folders begin with their values
    launcher = RunLauncher(composer, fixed, searched=keys, command=command)
    chosen_launcher = RunLauncher(composer, fixed, searched=keys, command=command, subfolder=CHOSEN)
    # only the launchers use Hydra's own keys, such as hydra/launcher=joblib
    fixed = [text for text in fixed if not text.lstrip("+").startswith(("hydra.", "hydra/"))]
    searches = [
        make_search(args, composer, launcher, [*fixed, *setting], searched, seed=seeds[0])
        for setting in composer.run_overrides(groups)  # each combination, such as [algorithm=fedavg, dataset=digits]
    ]
    for override in searched:
        require(
            any(override.key_or_group in search.keys for search in searches),
            f"{override.input_line}: no method of this command has the option {override.key_or_group}; see "
            "python -m fedbench --help algorithm=<method>",
        )
    return Plan(args, launcher, chosen_launcher, searches, seeds, test_seeds)


def make_search(
    args: argparse.Namespace,
    composer: Composer,
    launcher: RunLauncher,
    overrides: list[str],
    searched: Sequence[Override],
    seed: int,
) -> Search:
    """Return the search of one method in one setting (data set, partition and so on).

    Its default configuration is checked first.

    Args:
        args: The parsed command line.
        composer: Composes the configurations.
        launcher: Checks the configuration.
        overrides: The overrides of all its runs, without the searched values and the seed.
        searched: The overrides of the command with several values or an interval.  They replace what the YAML files
            declare for the search.
        seed: A seed of the trials, for the check.

    Raises:
        ConfigError: The configuration is invalid or has no validation samples.
    """
    run = [*overrides, f"seed={seed}"]
    launcher.check(run)
    composed = launcher.compose(run)
    require(
        bool(composed.dataset.get("val_fraction")) or composed.folds is not None,
        "tune compares validation scores, and dataset.val_fraction is 0, so there are none: set it, for example to 0.2",
    )
    fixed_keys = {text.lstrip("+").partition("=")[0] for text in overrides}
    space = search_space(composed, searched, composer, fixed=fixed_keys)  # from config key to the values to try
    stops = rungs(composed.rounds, args.trials, args.halving, composed.eval.every)  # rounds at which bad trials end
    names = ("algorithm", "dataset", "partition", "model")
    chosen = {group: str(composed.hydra.runtime.choices[group]) for group in names}
    proposals = proposer(args.search, space, default_point(space, composed), args.trials)
    return Search(overrides, chosen=chosen, proposer=proposals, rungs=stops, keys=list(space))


def seeds_of(text: str, name: str) -> list[int]:
    """Return the seeds in a text such as "0,1,2".

    Args:
        text: The seeds, separated by commas.
        name: The option or flag, for the message.

    Raises:
        ConfigError: The text does not have different integers from 0.
    """
    numbers = [part.strip() for part in text.split(",")]
    is_valid = all(part.isdecimal() for part in numbers) and len(set(numbers)) == len(numbers)
    require(is_valid, f"{name}={text}: give different integers from 0, separated by commas, as in {name}=0,1,2")
    return [int(part) for part in numbers]


def test_seeds_of(text: str | None, seeds: Sequence[int]) -> list[int]:
    """Return the seeds with which the chosen values are run: by default TEST_SEEDS ones after those of the trials.

    Args:
        text: The value of --test-seeds; None for the default.
        seeds: The seeds of the trials.

    Raises:
        ConfigError: A seed is also one of the trials, or the text is invalid.
    """
    if text is None:
        return list(range(max(seeds) + 1, max(seeds) + 1 + TEST_SEEDS))
    test_seeds = [] if text == "none" else seeds_of(text, "--test-seeds")
    both = sorted(set(seeds) & set(test_seeds))
    if both:
        raise ConfigError(
            f"--test-seeds={text}: seed {both[0]} is also a seed of the trials; give other seeds, so that test scores "
            "are of runs that had no part in the choice"
        )
    return test_seeds


# -- search ----------------------------------------------------------------------------------------------
def run_search(search: Search, plan: Plan) -> None:
    """Run the trials of a search, and those that successive halving promotes up to the last round.

    Args:
        search: The search of one method.  Its trials are added to it.
        plan: The command's flags (args), seeds and launchers.
    """
    factor, total = plan.args.halving, plan.args.trials  # factor: None without successive halving
    at_once = 1 if plan.args.search == "tpe" else total  # the next trial of tpe depends on the scores before
    # propose(n) returns the values of at most n trials, and none when the search has no more
    while batch := [Trial(values) for values in search.proposer.propose(min(at_once, total - len(search.trials)))]:
        search.trials += batch
        run_trials(search, batch, search.rungs[0], plan)  # up to the first round after which trials are compared
        # sign_of: -1 if lower scores are better, else 1
        search.proposer.observe([sign_of(plan, search) * trial.score for trial in batch])
    remaining = search.trials
    for rounds in search.rungs[1:]:  # without halving, there is one rung only: the last round
        best_first = promoted([sign_of(plan, search) * trial.score for trial in remaining], factor)  # their indices
        remaining = [remaining[i] for i in best_first]
        if remaining:
            run_trials(search, remaining, rounds, plan)


def run_trials(search: Search, trials: Sequence[Trial], rounds: int, plan: Plan) -> None:
    """Run trials with all seeds up to a round, and update their scores and the ledger.

    Args:
        search: The search over the options of one method.
        trials: Some of its trials.
        rounds: The round, one of `search.rungs`, the rounds after which trials are compared.
        plan: The seeds of the trials, and a launcher that starts runs and returns their folders.
    """
    pause = [f"checkpoint.pause_after={rounds}"] if rounds < search.rungs[-1] else []  # a later call continues the run
    runs = [[*run_overrides(search, trial, seed), *pause] for trial in trials for seed in plan.seeds]
    folders = plan.launcher(runs)  # in the order of runs: all seeds of the first trial, then of the second
    for k, trial in enumerate(trials):
        trial.folders = folders[k * len(plan.seeds) : (k + 1) * len(plan.seeds)]
        trial.rounds = rounds
        trial.score = score_of(trial, plan)
        trial.state = "failed" if math.isnan(trial.score) else "finished" if rounds == search.rungs[-1] else "stopped"
        values = " ".join(f"{key}={value}" for key, value in trial.values.items()) or "default values"
        print(
            f"{search.name}, trial {search.trials.index(trial) + 1} of {plan.args.trials}: {values}: "
            f"validation score {trial.score:.4f} after round {rounds}",
            flush=True,
        )
    write_ledger(plan)


def run_overrides(search: Search, trial: Trial, seed: int) -> list[str]:
    """Return the overrides of one run, such as ["algorithm=fedprox", "algorithm.mu=0.1", "seed=0"].

    Args:
        search: The search of a method, whose overrides come first.
        trial: One of its trials, whose values of the searched options follow.
        seed: The seed of the run.
    """
    return [*search.overrides, *(f"{key}={value}" for key, value in trial.values.items()), f"seed={seed}"]


def score_of(trial: Trial, plan: Plan) -> float:
    """Return the mean validation score of a trial over seeds, up to its round; NaN if a run failed.

    With --select last, it is the score after the trial's last round; with best, that of the best round of each run.
    """
    runs = [Run(folder) for folder in trial.folders]
    # paused: successive halving stopped the run, to continue it later if its trial is promoted
    if any(read_json(run.path / STATUS_FILE).get("status") not in ("finished", "paused") for run in runs):
        return math.nan
    metric = plan.args.metric or scores.primary_metric(runs)
    return statistics.mean(validation_score(run, metric, plan.args.select, trial.rounds) for run in runs)


def sign_of(plan: Plan, search: Search) -> int:
    """Return 1 if larger values of the compared metric are better, else -1.

    The metric is that of --metric, or the primary one of the search's runs.
    """
    run = Run(search.trials[0].folders[0])
    return -1 if scores.lower_is_better(plan.args.metric or run.primary) else 1


def best_trial(search: Search, plan: Plan) -> Trial | None:
    """Return the trial of a search with the best validation score, averaged over seeds; None if all trials failed.

    It is the trial that ``fedbench report --choose`` shows.

    Args:
        search: The search of one method.
        plan: The command's flags: --metric is compared, at the round that --select gives.
    """
    runs = [Run(folder) for trial in search.trials for folder in trial.folders]
    metric = plan.args.metric or (runs[0].primary if runs else "")
    # study: the trials of one method in one setting; choice: its best trial.  There are several studies if fine-tuning
    # was searched, because a method with and without it counts as two.
    choices = [choice for study in studies(runs) if (choice := choose(study, metric, plan.args.select)) is not None]
    if not choices:
        return None
    sign = sign_of(plan, search)
    chosen = max(choices, key=lambda choice: sign * choice.validation.mean)
    folder = next(iter(chosen.trial.runs.values())).path  # of any run of the chosen trial, to find it in this search
    return next(trial for trial in search.trials if folder in trial.folders)


def ledger(plan: Plan) -> list[dict[str, Any]]:
    """Return the rows of trials.csv: one dict from column (`COLUMNS`) to value for each trial of each search.

    A failed trial has a row with score NaN and state "failed".  A trial that did not reach the last round has state
    "stopped", with the round and the score that it reached.  They are 0 and NaN if it has not run yet.
    """
    return [
        {
            **search.chosen,  # algorithm, dataset, partition and model
            "trial": number,
            "overrides": [f"{key}={value}" for key, value in trial.values.items()],
            "seeds": plan.seeds,
            "rounds": trial.rounds,
            "score": trial.score,
            "state": trial.state,
        }
        for search in plan.searches
        for number, trial in enumerate(search.trials, 1)
    ]


def write_ledger(plan: Plan) -> None:
    """Write trials.csv, a table of all trials so far (`ledger`), next to the folders of their runs.

    A cell with a list, such as the seeds, has its items separated by spaces.
    """
    table = pandas().DataFrame(ledger(plan), columns=COLUMNS)
    for name in ("overrides", "seeds"):
        table[name] = [" ".join(map(str, items)) for items in table[name]]
    replace_text(plan.launcher.folder / LEDGER, [table.to_csv(index=False, lineterminator="\n")])


# -- results ---------------------------------------------------------------------------------------------
def run_chosen(plan: Plan, best: list[Trial | None]) -> list[Path]:
    """Run the best trial of each search with the test seeds, and return the folders of these runs.

    Args:
        plan: The command's searches, test seeds, and the launcher of these runs.  Without test seeds, none is started.
        best: The best trial of each search; None if all its trials failed.
    """
    chosen = [(search, trial) for search, trial in zip(plan.searches, best) if trial is not None]
    runs = [run_overrides(search, trial, seed) for search, trial in chosen for seed in plan.test_seeds]
    if runs:
        print(f"running the chosen values of {len(chosen)} searches with {len(plan.test_seeds)} test seeds", flush=True)
    return plan.chosen_launcher(runs) if runs else []


def show_results(plan: Plan, tested: list[Path], status: int) -> None:
    """Print the table of chosen values with their validation and test scores, or with --json an object.

    Args:
        plan: The command's flags (args), searches with their trials, and launcher.
        tested: The folders of the runs with the test seeds.
        status: The exit status, for JSON.
    """
    folders = [folder for search in plan.searches for trial in search.trials for folder in trial.folders]
    runs = [Run(folder) for folder in dict.fromkeys([*folders, *tested])]  # without repeated folders
    finished = [run for run in runs if run.finished]
    tables = []  # one, or none if no run has finished
    if finished:
        tables = [choice_table(runs, plan.args.metric or scores.primary_metric(finished), plan.args.select)]
    if plan.args.json:
        facts = {"folder": plan.launcher.folder, "exit_code": status, "trials": ledger(plan)}
        print_json("tune", {**facts, **as_object(tables)})
        return
    if plan.args.format not in MACHINE_FORMATS:  # csv and json keep redundant columns
        tables = [for_readers(table, ["method"]) for table in tables]
    print(render(tables, plan.args.format or "text"), end="")
