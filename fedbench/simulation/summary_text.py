"""Print the results of a finished run: scores, cost and useful next commands.

Imports only light modules, because sweeps import it in every process.
"""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from fedbench.core.suggest import suggested
from fedbench.simulation.result import primary_of
from fedbench.simulation.run_folder import config_dir_of

MOST_ATTACKERS = 20  # that are listed
COMPARED_KEYS = ("algorithm", "seed", "hydra", "name", "checkpoint")  # keys in which compared runs differ


def ending(summary: dict[str, Any], run_dir: Path) -> None:
    """Print the results of a finished run.

    Args:
        summary: The content of summary.json.
        run_dir: The run folder.
    """
    path = Path(run_dir)
    short_path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    print("\n" + "\n".join(ending_lines(summary, short_path)), flush=True)


def ending_line(summary: dict[str, Any], run_dir: Path) -> str:
    """Return one line with the scores of a finished run of a sweep.

    Args:
        summary: The content of summary.json.
        run_dir: The run folder.
    """
    name = primary_of(summary)
    last, best = last_and_best(summary["last"], summary.get("best_val") or {"values": {}}, f"personal/{name}")
    scores = f"{last} last, {best} best by validation" if summary.get("best_val") else f"{last} last"
    count = clients_of(summary, summary["last"], f"personal/{name}")
    over = f" ({count} clients)" if count else ""
    return f"{run_dir.name}: mean personalized {name} {scores}{over}"


def ending_lines(summary: dict[str, Any], run_dir: Path) -> list[str]:
    """Return the lines that `ending` prints: setting, table of scores, cost, files and next commands.

    Args:
        summary: The content of summary.json.
        run_dir: The run folder.
    """
    cost, last, name = summary["cost"], summary["last"], primary_of(summary)
    best = summary["best"] or {"round": summary["rounds"], "values": last}
    table = [
        ("", "last", "best"),
        ("round", str(summary["rounds_done"]), str(best["round"])),
        (f"mean personalized {name}", *last_and_best(last, best, f"personal/{name}")),
        *_client_row(summary, last, best["values"], f"personal/{name}"),
        ("  spread over clients (std)", *last_and_best(last, best, f"personal/{name}_std")),
        ("  worst tenth of the clients", *last_and_best(last, best, f"personal/{name}_worst")),
        (f"global {name}", *last_and_best(last, best, f"global/{name}")),
    ]
    width = max(len(row[0]) for row in table)
    shown = [f"  {label:<{width}}  {of_last:>8}  {of_best:>8}" for label, of_last, of_best in table]
    shown[-1] += global_note(summary)  # beside the score of the global model
    return [
        "{name} on {dataset}, {partition} partition: {num_clients} clients, {cohort} per round, {rounds} rounds, "
        "model {model}, seed {seed}".format_map(summary),
        *shown,
        *new_client_lines(summary.get("new_clients"), name),
        *privacy_lines(summary.get("privacy")),
        *attack_lines(summary),
        f"  {cost['images_per_s']:,.0f} images/s of local training, {duration(cost['total_s'])} in total; "
        f"{megabytes(cost, 'down')}, {megabytes(cost, 'up')}",
        f"  mean per client and round: {kib(cost['bytes_down'], summary)} down, {kib(cost['bytes_up'], summary)} up",
        f"files: {run_dir}  (metrics.csv, clients.csv, costs.csv, summary.json, checkpoint.pt)",
        *pause_lines(summary, run_dir),
        "next:",
        *next_lines(summary, run_dir),
    ]


def pause_lines(summary: dict[str, Any], run_dir: Path) -> list[str]:
    """Return a line with the command that resumes a run paused by checkpoint.pause_after; [] for a finished run."""
    if summary.get("status") != "paused":
        return []
    command = suggested(f"python -m fedbench resume={shlex.quote(str(run_dir))}")
    return [f"paused after round {summary['rounds_done']} of {summary['rounds']}; to go on: {command}"]


def megabytes(cost: dict[str, float], direction: str) -> str:
    """Return the megabytes that all clients sent or received, as in "1.5 MB up (10.0% of uncompressed)".

    Args:
        cost: The entry "cost" of summary.json.
        direction: "up" or "down".
    """
    size, dense = cost[f"bytes_{direction}"], cost.get(f"dense_{direction}")
    of_dense = f" ({100 * size / dense:,.1f}% of uncompressed)" if dense and dense != size else ""
    return f"{size / 1e6:,.1f} MB {direction}{of_dense}"


def last_and_best(last: dict[str, float], best: dict[str, Any], name: str) -> tuple[str, str]:
    """Return a metric of the last and of the best round as text with 4 decimals, "-" if it is undefined.

    Args:
        last: Metrics of the last evaluation, by name.
        best: The entry of the best round in summary.json, whose "values" are metrics by name.
        name: The metric.
    """
    values = (last.get(name), best["values"].get(name))
    return tuple("-" if v is None or math.isnan(v) else f"{v:.4f}" for v in values)  # type: ignore[return-value]


def clients_of(summary: dict[str, Any], values: dict[str, float], metric: str) -> str:
    """Return the number of clients in a mean, as in "3 of 6"; "" if it includes all clients.

    Args:
        summary: The content of summary.json.
        values: Metrics of an evaluation, by name.
        metric: The metric.
    """
    from fedbench.tasks.scores import COUNT_SUFFIX  # here, because it imports NumPy

    num_clients = summary.get("num_clients")
    num_averaged = values.get(f"{metric}{COUNT_SUFFIX}", summary.get("evaluated_clients", num_clients))
    return "" if num_averaged == num_clients else f"{num_averaged:.0f} of {num_clients}"


def _client_row(
    summary: dict[str, Any], last: dict[str, float], best: dict[str, float], metric: str
) -> list[tuple[str, str, str]]:
    """Return a table row (label, last, best) with the numbers of clients in the means, in a list; [] for all clients.

    Args:
        summary: The content of summary.json.
        last: Metrics of the last evaluation, by name.
        best: Metrics of the best evaluation, by name.
        metric: The metric whose clients are counted.
    """
    counts = [clients_of(summary, values, metric) for values in (last, best)]  # "3 of 6", or "" for all clients
    return [("  clients in these means", counts[0] or "all", counts[1] or "all")] if any(counts) else []


def kib(total: int, summary: dict[str, Any]) -> str:
    """Return the bytes of a run per sampled client and round as text, in KiB.

    Args:
        total: The bytes of all clients and rounds.
        summary: The content of summary.json.
    """
    return f"{total / max(1, summary['rounds_done'] * summary['cohort']) / 1024:,.1f} KiB"


def global_note(summary: dict[str, Any]) -> str:
    """Return the note that is printed beside the score of the global model; "" if there is nothing to say.

    It says that the method has no global model, or that all clients use it, so that personal and global scores are
    equal.

    Args:
        summary: The content of summary.json.
    """
    if f"global/{primary_of(summary)}" not in summary["last"]:
        return "  none: this method has no global model"
    same = summary.get("personal_is_global")
    return "  personal equals global: all clients use the global model" if same else ""


def new_client_lines(result: dict[str, Any] | None, primary: str = "accuracy") -> list[str]:
    """Return a list with one line about the scores of the new clients; [] if the run has none.

    Args:
        result: The entry "new_clients" of summary.json, or None.
        primary: The name of the score.
    """
    if not result:
        return []
    over = f" over {result['counted']} of them" if "counted" in result else ""  # if the score is undefined for some
    return [
        f"  {result['count']} new clients: mean {primary}{over} {result['epoch0']:.4f} before adaptation, "
        f"{result['best']:.4f} at best, after {result['best_epoch']} of {result['epochs']} local epochs"
    ]


def privacy_lines(privacy: dict[str, Any] | None) -> list[str]:
    """Return lines about the privacy of uploads: number of uploads, total epsilon, guarantee; [] without privacy.

    Args:
        privacy: The entry "privacy" of summary.json, or None.
    """
    if not privacy:
        return []
    if privacy.get("mode") == "central":
        first, *rest = clauses(privacy["guarantee"])
        return [f"  privacy: {first}", *(f"    {clause}" for clause in rest)]
    releases = f"at most {privacy['releases']} tensors uploaded per client"
    epsilon = privacy["epsilon_spent"]
    total = f", (epsilon, delta) = ({epsilon:.4g}, {privacy['delta']:g}) in total" if epsilon is not None else ""
    first, *rest = clauses(privacy["guarantee"])
    return [f"  privacy: {releases}{total}; {first}", *(f"    {clause}" for clause in rest)]


def attack_lines(summary: dict[str, Any]) -> list[str]:
    """Return lines about the attackers and the success of a backdoor; [] if all clients are honest.

    Args:
        summary: The content of summary.json.
    """
    from fedbench.tasks.scores import ATTACK_SUCCESS  # here, because it imports NumPy

    attack, last = summary.get("attack"), summary["last"]
    if not attack:
        return []
    rates = {scope: last.get(f"{scope}/{ATTACK_SUCCESS}") for scope in ("personal", "global")}
    parts = [f"{rate:.4f} of the {scope} models" for scope, rate in rates.items() if rate is not None]
    success = [f"  attack success rate: {', '.join(parts)}"] if parts else []
    return [f"  {attack_line(attack['name'], list(attack['attackers']), summary['num_clients'])}", *success]


def attack_line(name: str, attackers: list[int], num_clients: int) -> str:
    """Return a line about the attackers and the scored clients.

    Args:
        name: The attack.
        attackers: The attackers.
        num_clients: The number of training clients.
    """
    shown = ", ".join(map(str, attackers[:MOST_ATTACKERS])) + (", ..." if len(attackers) > MOST_ATTACKERS else "")
    noun = "attackers, clients" if len(attackers) != 1 else "attacker, client"
    honest = num_clients - len(attackers)
    return f"attack {name}: {len(attackers)} {noun} {shown}; scores of the {honest} honest clients"


def clauses(sentence: str) -> list[str]:
    """Split a sentence after each semicolon: "a; b" becomes ["a;", "b"]."""
    *parts, last = sentence.split("; ")
    return [*(f"{part};" for part in parts), last]


def next_lines(summary: dict[str, Any], run_dir: Path) -> list[str]:
    """Return useful next commands, each with its purpose.

    A method or data set of the user's own (`algorithm._target_=my.Method`) is left out of the suggested sweep.

    Args:
        summary: The content of summary.json.
        run_dir: The run folder.
    """
    algorithm, dataset, classes = summary["algorithm"], summary["dataset"], summary.get("classes") or {}
    # by default, the folder of a run is output_dir/ALGORITHM/DATASET/TIME
    runs = run_dir.parents[2] if run_dir.parts[-3:-1] == (algorithm, dataset) else run_dir.parent
    methods = ",".join(dict.fromkeys(["local", "fedavg", *([] if "algorithm" in classes else [algorithm])]))
    config_dir, overrides = command_of(run_dir)
    # overrides that the suggested sweep repeats: all but those of keys in which its runs differ
    shared = [text for text in overrides if re.split(r"[.=]", text.lstrip("+~"))[0] not in COMPARED_KEYS]
    if not overrides and dataset != "digits":  # a run from Python
        shared = [f"dataset={dataset}"]
    flags = [] if config_dir is None else ["--config-dir", config_dir]
    sweep = shlex.join(["python", "-m", "fedbench", *flags, "-m", f"algorithm={methods}", "seed=0,1,2", *shared])
    commands = {
        f"python -m fedbench report {shlex.quote(str(runs))}": "tables of your runs",
        **({} if "dataset" in classes and not overrides else {sweep: "compare methods over seeds"}),
        "python -m fedbench --help": "methods, data sets, options",
    }
    lines = [suggested(command) for command in commands]
    width = min(max(map(len, lines)), 72)  # of the column of commands
    return [f"  {command:<{width}}  {why}" for command, why in zip(lines, commands.values(), strict=True)]


def command_of(run_dir: Path) -> tuple[str | None, list[str]]:
    """Return the arguments of the command that started a run, from its folder .hydra.

    Args:
        run_dir: The run folder.

    Returns:
        The value of --config-dir, None without it; and the overrides, such as "rounds=2".  Without .hydra: (None, []).
    """
    return config_dir_of(run_dir), [str(text) for text in _yaml(run_dir / ".hydra" / "overrides.yaml") or ()]


def _yaml(path: Path) -> Any:
    """Return the content of a YAML file; None if the file does not exist."""
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None


def duration(seconds: float) -> str:
    """Format seconds as "12 s", "3:05" or "2:03:45"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
