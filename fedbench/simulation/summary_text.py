"""The closing screen of a run: what ran, what came out, what to do next.  Imports nothing heavy."""

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

NOT_THE_SAME = ("algorithm", "seed", "hydra", "name")  # keys in which compared runs differ


def ending(summary: dict[str, Any], run_dir: Path) -> None:
    """Print the closing screen of a run from its summary: what ran, what came out, what to do next."""
    path = Path(run_dir)
    typeable = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    print("\n" + "\n".join(ending_lines(summary, typeable)), flush=True)


def ending_line(summary: dict[str, Any], run_dir: Path) -> str:
    """Return one line about a finished cell of a sweep."""
    name = primary_of(summary)
    shown = last_and_best(summary["last"], summary.get("best_val") or {"values": {}}, f"personal/{name}")
    count = clients_of(summary, summary["last"], f"personal/{name}")
    words = [f"{shown[0]} last", *([f"{shown[1]} best by validation"] if summary.get("best_val") else [])]
    over = f" ({count} clients)" if count else ""
    return f"{run_dir.name}: mean personalized {name} {', '.join(words)}{over}"


def ending_lines(summary: dict[str, Any], run_dir: Path) -> list[str]:
    """The lines of the closing screen."""
    s, cost = summary, summary["cost"]
    last, best, name = s["last"], s["best"] or {"round": s["rounds"], "values": s["last"]}, primary_of(s)
    table = [
        ("", "last", "best"),
        ("round", str(s["rounds"]), str(best["round"])),
        (f"mean personalized {name}", *last_and_best(last, best, f"personal/{name}")),
        *_client_row(s, last, best["values"], f"personal/{name}"),
        ("  spread over clients (std)", *last_and_best(last, best, f"personal/{name}_std")),
        ("  worst tenth of the clients", *last_and_best(last, best, f"personal/{name}_worst")),
        (f"global {name}", *last_and_best(last, best, f"global/{name}")),
    ]
    width = max(len(row[0]) for row in table)
    shown = [f"  {label:<{width}}  {a:>8}  {b:>8}" for label, a, b in table]
    shown[-1] += global_note(s)
    return [
        f"{s['name']} on {s['dataset']}, {s['partition']} partition: {s['num_clients']} clients, "
        f"{s['cohort']} a round, {s['rounds']} rounds, model {s['model']}, seed {s['seed']}",
        *shown,
        *new_client_lines(s.get("new_clients"), name),
        *privacy_lines(s.get("privacy")),
        f"  {cost['images_per_s']:,.0f} images/s of local training, {duration(cost['total_s'])} in all; "
        f"{sent(cost, 'down')}, {sent(cost, 'up')}",
        f"  a client's round: {kib(cost['bytes_down'], s)} down, {kib(cost['bytes_up'], s)} up, on average",
        f"files: {run_dir}  (metrics.csv, clients.csv, costs.csv, summary.json, checkpoint.pt)",
        "next:",
        *next_lines(s, run_dir),
    ]


def sent(cost: dict[str, float], direction: str) -> str:
    """The megabytes that all clients together sent or were sent, and what compression made them of."""
    size, dense = cost[f"bytes_{direction}"], cost.get(f"dense_{direction}")
    of_dense = f" ({100 * size / dense:,.1f}% of uncompressed)" if dense and dense != size else ""
    return f"{size / 1e6:,.1f} MB {direction}{of_dense}"


def last_and_best(last: dict[str, float], best: dict[str, Any], name: str) -> tuple[str, str]:
    """A metric at the last and at the best round, as text."""
    values = (last.get(name), best["values"].get(name))
    return tuple("-" if v is None or math.isnan(v) else f"{v:.4f}" for v in values)  # type: ignore[return-value]


def clients_of(summary: dict[str, Any], values: dict[str, float], metric: str) -> str:
    """Return how many clients are in a mean, as "3 of 6"; "" if all are."""
    from fedbench.tasks.scores import COUNT  # NumPy

    everybody = summary.get("num_clients")
    counted = values.get(f"{metric}{COUNT}", summary.get("evaluated_clients", everybody))
    return "" if counted == everybody else f"{counted:.0f} of {everybody}"


def _client_row(
    summary: dict[str, Any], last: dict[str, float], best: dict[str, float], metric: str
) -> list[tuple[str, str, str]]:
    """Return the line of the final screen with the number of clients in the means, if some are left out."""
    counted = [clients_of(summary, values, metric) for values in (last, best)]
    return [("  clients in these means", counted[0] or "all", counted[1] or "all")] if any(counted) else []


def kib(total: int, s: dict[str, Any]) -> str:
    """Bytes of a run as those of one client in one round."""
    return f"{total / max(1, s['rounds'] * s['cohort']) / 1024:,.1f} KiB"


def global_note(summary: dict[str, Any]) -> str:
    """What the row of the global score needs said."""
    if f"global/{primary_of(summary)}" not in summary["last"]:
        return "  none: this method has no global model"
    same = summary.get("personal_is_global")
    return "  personal equals global: all clients use one model" if same else ""


def new_client_lines(result: dict[str, Any] | None, primary: str = "accuracy") -> list[str]:
    """What clients that took no part reached with the global model, if there are any."""
    if not result:
        return []
    over = f" over {result['counted']} of them" if "counted" in result else ""
    return [
        f"  {result['count']} new clients: mean {primary}{over} {result['epoch0']:.4f} as they start, "
        f"{result['best']:.4f} at best, after {result['best_epoch']} of {result['epochs']} epochs of their own"
    ]


def privacy_lines(privacy: dict[str, Any] | None) -> list[str]:
    """What the noise on uploads came to, and what it promises, if there was any."""
    if not privacy:
        return []
    releases = f"a client uploaded {privacy['releases']} tensors at most"
    epsilon = privacy["epsilon_spent"]
    total = f", (epsilon, delta) = ({epsilon:.4g}, {privacy['delta']:g}) in all" if epsilon is not None else ""
    first, *rest = clauses(privacy["guarantee"])
    return [f"  privacy: {releases}{total}; {first}", *(f"    {clause}" for clause in rest)]


def clauses(sentence: str) -> list[str]:
    """A long sentence in lines: its parts between semicolons."""
    *parts, last = sentence.split("; ")
    return [*(f"{part};" for part in parts), last]


def next_lines(summary: dict[str, Any], run_dir: Path) -> list[str]:
    """The commands worth typing after this run, each with its reason; what was run by a class's name is no option."""
    algorithm, dataset, classes = summary["algorithm"], summary["dataset"], summary.get("classes") or {}
    runs = run_dir.parents[2] if run_dir.parts[-3:-1] == (algorithm, dataset) else run_dir.parent
    methods = ",".join(dict.fromkeys(["local", "fedavg", *([] if "algorithm" in classes else [algorithm])]))
    folder, words = typed(run_dir)
    same = [word for word in words if re.split(r"[.=]", word.lstrip("+~"))[0] not in NOT_THE_SAME]
    if not words and dataset != "digits":  # in other hands than the command line's
        same = [f"dataset={dataset}"]
    own = [] if folder is None else ["--config-dir", folder]
    sweep = shlex.join(["python", "-m", "fedbench", *own, "-m", f"algorithm={methods}", "seed=0,1,2", *same])
    commands = {
        f"python -m fedbench report {shlex.quote(str(runs))}": "tables of your runs",
        **({} if "dataset" in classes and not words else {sweep: "compare methods over seeds"}),
        "python -m fedbench --help": "methods, data sets, options",
    }
    lines = [suggested(command) for command in commands]
    width = min(max(map(len, lines)), 72)
    return [f"  {command:<{width}}  {why}" for command, why in zip(lines, commands.values(), strict=True)]


def typed(run_dir: Path) -> tuple[str | None, list[str]]:
    """Return the --config-dir and the overrides of a run's command."""
    return config_dir_of(run_dir), [str(word) for word in _yaml(run_dir / ".hydra" / "overrides.yaml") or ()]


def _yaml(path: Path) -> Any:
    """What a YAML file holds, as it stands; None where there is none."""
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None


def duration(seconds: float) -> str:
    """12 s, 3:05 or 2:03:45."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
