"""A page's data files from run folders: what every run was, what it reached, and its curves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.config.conf_tree import conf_dirs
from fedbench.core.files import replace_text, typed_path
from fedbench.core.options import require
from fedbench.pages.store import KEYS, Page, Row, read_page, write_page
from fedbench.report import paper, scores
from fedbench.report.figures import client_gains
from fedbench.report.runs import Run, find_runs, rounds_of, sound
from fedbench.report.sent import DIRECTIONS, is_compressed, megabytes, sent_until
from fedbench.report.summary import Group, Options, group_runs, left_out, notes, over_seeds, results

MAIN = "main"  # the part of a page that has one
SCORES = ["n", "counted", "last", "best", "best_val", "worst", "global"]
SCORES += ["rounds_to_target", "seconds_to_target", "images_per_s"]
SOMETIMES = ("best_val", "counted")  # columns that a new table has only if a run has a value
GAINS = ["n", "gain_last", "gain_best_mean", "gain_own_best", "gain_better"]
SENT = ["n", "last", "mb_up", "mb_down", "part_up", "part_down", "mb_to_target"]
ABSOLUTE = re.compile(r"(?<=[=\[,])(?:/|[A-Za-z]:[\\/])(?:[^\s',\]]*[/\\])?([^\s',\]/\\]+)")  # a value: /data/x.npz


def write(folder: Path, sources: list[str], asked: Mapping[str, Any], config_dir: str | None = None) -> list[Path]:
    """Write a page's data files from folders of runs (``PART=FOLDER`` or one folder); returns the paths.

    What a page says already stays: its title, tables, figures, text, and the rows of all other parts.
    asked: title, metric, select, target, group (config keys with commas), paper (names of printed tables).
    config_dir: a folder of your own options, whose experiments may answer printed tables.
    """
    is_new = not (folder / "page.json").is_file()
    page = Page(folder, deepcopy(KEYS)) if is_new else read_page(folder)
    page.about = {**page.about, **{key: asked[key] for key in ("metric", "select", "target", "title") if key in asked}}
    page.about["group"] = asked["group"].split(",") if "group" in asked else page.about["group"]
    page.about["papers"] = list(dict.fromkeys([*page.about["papers"], *asked.get("paper", [])]))
    page.about["title"] = page.about["title"] or page.name
    parts = _parts(sources, page)
    own_metric = "metric" in asked or not is_new
    for part, folders in parts.items():
        runs, damaged = sound(find_runs(folders, config_dir))
        require(not damaged, f"part {part}: {'; '.join(left_out(damaged, []))}")
        if not own_metric:
            page.about["metric"], own_metric = scores.primary_metric(runs), True
        _collect(page, part, runs, folders, config_dir)
    written = write_page(page)
    text = folder / "page.md"
    if not text.is_file():
        replace_text(text, [first_text(page)])
        written.append(text)
    return written


def _parts(sources: list[str], page: Page) -> dict[str, list[Path]]:
    """Folders by part; those without a name are the only part of the page."""
    parts: dict[str, list[Path]] = {}
    for source in sources:
        name, _, path = (
            source.rpartition("=") if re.match(r"[\w-]+=", source) and not Path(source).exists() else ("", "", source)
        )
        parts.setdefault(name or (page.parts[0] if len(page.parts) == 1 else MAIN), []).append(typed_path(path))
    return parts


def _collect(page: Page, part: str, runs: list[Run], folders: list[Path], config_dir: str | None) -> None:
    """Replace the rows of a part by those of these runs; give it tables and figures where the page has none."""
    options = Options(page.about["metric"], page.about["select"], page.about["target"], page.about["group"])
    scores.check_metric(options.metric, runs)
    page.about["percent"] = scores.is_fraction(options.metric)
    groups, repeated = group_runs(runs, options.group)
    wide = results(groups, runs, options)  # which orders the groups
    labels = list(dict.fromkeys(key for group in groups for key in group.labels))
    page.about["labels"] = {**page.about["labels"], part: labels or ["method"]}
    names = {run.path: _name(run, part, folders) for run in runs}
    rows = [_row(run, part, names, group.labels, runs, options) for group in groups for run in _by_seed(group)]
    rows += [_row(run, part, names, {"method": run.method}, runs, options) for run in runs if not run.finished]
    page.runs = [*(row for row in page.runs if row["part"] != part), *rows]
    finished = [run for group in groups for run in _by_seed(group)]
    gone = {name for name in page.curve_of if name.startswith(f"{part}/")}
    curves = [row for run in finished for row in _curve(run, names[run.path])]
    page.curves = [*(row for row in page.curves if row["run"] not in gone), *curves]
    page.gains = [*(row for row in page.gains if row["part"] != part), *_gains(page, part, groups, runs, options)]
    known = paper.experiments(conf_dirs(config_dir)) if page.about["papers"] else []
    for table in page.about["papers"]:
        page.cells = [*(row for row in page.cells if row["table"] != table), *_cells(table, runs, known, options)]
    commands = list(dict.fromkeys(_typed(run) for run in runs if run.summary.get("command")))
    page.about["commands"] = {**page.about["commands"], part: commands}
    if groups:
        _show(page, part, wide.title, notes(groups, repeated, options))
    page.__dict__.pop("parts", None)  # cached, of the rows before
    page.__dict__.pop("curve_of", None)


def _by_seed(group: Group) -> list[Run]:
    return sorted(group.runs, key=lambda run: (str(type(run.seed)), run.seed))


def _name(run: Run, part: str, folders: list[Path]) -> str:
    """The part, and where the run lies below the folder that was named."""
    below = next((folder for folder in folders if run.path.is_relative_to(folder)), run.path.parent)
    inner = run.path.relative_to(below).as_posix()
    return f"{part}/{run.path.name if inner == '.' else inner}"


def _row(
    run: Run, part: str, names: Mapping[Path, str], labels: Mapping[str, Any], runs: list[Run], options: Options
) -> Row:
    """A run's row of runs.csv."""
    s, machine = run.summary, run.summary.get("machine") or {}
    at = (
        f"{machine.get('processor')}, {machine.get('cores')} cores, {machine.get('gpu') or 'no GPU'}"
        if machine
        else None
    )
    software = s.get("versions") or {}
    versions = [f"{name.capitalize() if name == 'python' else name} {_short(software[name])}"
                for name in ("python", "torch") if name in software]  # fmt: skip
    commit = f"{str(s['commit'])[:12]}{' and changes' if s.get('dirty') else ''}" if s.get("commit") else None
    row: Row = {
        "part": part, "run": names[run.path], **labels, "seed": run.seed, "n": 1,
        "status": s.get("status") or "no summary", "form": form_of(run), "rounds": rounds_of(run),
        "commit": commit, "machine": "; ".join(filter(None, [at, ", ".join(versions)])) or None,
    }  # fmt: skip
    row |= {"tuned_at_end": 1} if run.tuned else {}
    return row | (_scores(run, runs, options) if run.finished else {})


def form_of(run: Run) -> str:
    """reduced where an experiment file of conf/experiment/reduced was beside the run's own, full otherwise."""
    names = str(run.choice("experiment") or "").split(",")
    return "reduced" if any(name.startswith("reduced/") for name in names) else "full"


def _scores(run: Run, runs: list[Run], options: Options) -> Row:
    metric, cost = options.metric, run.summary.get("cost") or {}
    rounds = {name: scores.selected_round(run, metric, name) for name in scores.SELECTIONS}
    chosen = rounds[options.select]
    to_target = scores.rounds_to(run, metric, options.target)
    found: Row = {name: scores.value_at(run, metric, at) for name, at in rounds.items()}
    found["best_round"] = None if rounds["best"] is None else int(rounds["best"])
    if counted := scores.clients_at(run, metric, chosen):
        found["counted"] = counted
    found["worst"] = scores.value_at(run, f"{metric}_worst", chosen)
    found["global"] = scores.value_at(run, metric.replace("personal/", "global/"), chosen)
    found["rounds_to_target"] = to_target
    found["seconds_to_target"] = scores.seconds_to(run, to_target)
    found |= {key: cost.get(key) for key in ("images_per_s", "train_s")}
    for d in ("up", "down"):
        sent, dense = (_last(megabytes(run, (d,), kind)[1]) for kind in ("bytes", "dense"))
        found[f"bytes_{d}"] = 1e6 * sent
        found[f"part_{d}"] = sent / dense if is_compressed(run) and dense else None
    found["bytes_to_target"] = 1e6 * sent_until(run, to_target, DIRECTIONS["bytes"])
    local = scores.local_of(run, runs)
    gained = scores.gains(run, local, metric) if local is not None and local is not run else {}
    for name, gain in sorted(gained.items()):
        found |= {f"gain_{name}": gain.mean, f"gain_{name}_clients": gain.std}
    if "own_best" in gained:
        found["gain_better"] = gained["own_best"].better
    for name in _recorded(run):
        found[name] = float(run.metrics[name][-1])
    return {key: _number(value) for key, value in found.items()}


def _recorded(run: Run) -> list[str]:
    """The metrics whose means over clients are kept: all but spreads, weighted means and worst tenths."""
    plain = [name for name in run.metrics if name != "round" and not name.endswith(("_std", "_weighted", "_worst"))]
    return plain


def _curve(run: Run, name: str) -> list[Row]:
    """The rows of curves.csv of a run, numbers to six digits."""
    sent = {d: dict(zip(*megabytes(run, (d,)))) for d in ("up", "down")}
    seconds = dict(zip(run.costs.get("round", []), np.cumsum(run.costs.get("train_s", []))))
    rows = []
    for i, at in enumerate(run.metrics["round"]):
        row: Row = {"run": name, "round": int(at)}
        row |= {metric: _number(float(run.metrics[metric][i]), 6) for metric in _recorded(run)}
        row |= {f"mb_{d}": _number(float(sent[d].get(at, float("nan"))), 6) for d in sent}
        rows.append(row | {"train_s": _number(float(seconds.get(at, float("nan"))), 6)})
    return rows


def _gains(page: Page, part: str, groups: list[Group], runs: list[Run], options: Options) -> list[Row]:
    """The rows of gains.csv: a method and client, the mean over seeds, its spread and their number."""
    rows = []
    for group in groups:
        for client, gains in enumerate(client_gains(group, runs, options).T):
            over = over_seeds(gains)
            rows.append({"part": part, "group": group.name, "client": client, "gain": _number(over.mean),
                         "gain_std": _number(over.std), "gain_n": over.count})  # fmt: skip
    return rows


def _cells(table: str, runs: list[Run], known: list[paper.Experiment], options: Options) -> list[Row]:
    """The rows of cells.csv: every cell of a printed table that can be measured."""
    rows = []
    for cell in paper.compare(table, runs, known, options.target):
        form = "not run" if not cell.ours.count else "reduced" if cell.reduced else "full"
        ran = form != "not run"
        rows.append({
            "table": table, **{key: cell.row[key] for key in ("method", *paper.KEYS)}, "form": form,
            "run_with": cell.overrides or None, "ours": _number(cell.ours.mean) if ran else None,
            "ours_std": _number(cell.ours.std) if ran else None, "ours_n": cell.ours.count if ran else None,
            **({"ours_of": cell.ours.of} if ran and cell.ours.of != cell.ours.count else {}),
            "sigma": _number(cell.sigma) if ran else None,
            **({"tuned_at_end": 1} if cell.tuned else {}),
            **({"counted": cell.clients} if cell.clients else {}),
        })  # fmt: skip
    return rows


def _show(page: Page, part: str, title: str, notes: list[str]) -> None:
    """Tables and figures of a part that has none: results, gains and what was sent, curves and clients' gains."""
    tables, figures, rows = page.about["tables"], page.about["figures"], page.runs
    mine = [row for row in rows if row["part"] == part]
    if not any(spec.get("part", part) == part for spec in tables.values()):
        end = "" if part == MAIN else f"_{part}"
        columns = [key for key in SCORES if key not in SOMETIMES or any(row.get(key) is not None for row in mine)]
        order = {"order": [f"-{page.about['select']}" if not scores.lower_is_better(page.about["metric"])
                           else page.about["select"]]}  # fmt: skip
        new = {f"results{end}": {"part": part, "title": title, "columns": columns, **order, "notes": notes}}
        if any(row.get("gain_last") is not None for row in mine):
            words = f"{page.about['metric']}: gain over Local, mean ± std over clients"
            new[f"gains{end}"] = {"part": part, "title": words, "columns": GAINS, "has": "gain_last", **order}
        if any(row.get("part_up") is not None for row in mine):
            words = "what was sent, by all clients together"
            new[f"sent{end}"] = {"part": part, "title": words, "columns": SENT, **order}
        for table in page.about["papers"]:
            new |= {f"paper_{table}": {"kind": "paper", "paper": table}}
        page.about["tables"] = {**tables, **new}
        drawn = {f"curves{end}": {"part": part, "alt": "over rounds"}}
        if any(row["part"] == part for row in page.gains):
            drawn[f"gains{end}"] = {"kind": "gains", "part": part, "alt": "gain over Local per client"}
        page.about["figures"] = {**figures, **drawn}


def first_text(page: Page) -> str:
    """A page.md that shows everything, to be written on."""
    lines = [f"# {page.about['title']}", ""]
    for part in page.parts:
        if len(page.parts) > 1:
            lines += [f"## {part}", ""]
        lines += [f'{{{{ commands("{part}") }}}}', "", f'{{{{ ran("{part}") }}}}.', ""]
        for name, spec in page.about["tables"].items():
            if spec.get("part", page.parts[0]) == part:
                lines += [f'{{{{ table("{name}") }}}}', ""]
                lines += [f'{{{{ notes("{name}") }}}}', ""] if spec.get("notes") else []
        lines += [x for name, spec in page.about["figures"].items() if spec.get("part", part) == part
                  for x in (f'{{{{ figure("{name}") }}}}', "")]  # fmt: skip
    return "\n".join(lines).rstrip("\n") + "\n"


def _typed(run: Run) -> str:
    """The command of a run, without the places of this machine: what a path names, not where it lay."""
    return "uv run " + ABSOLUTE.sub(r"\1", run.summary["command"])


def _short(version: str) -> str:
    """3.11 of 3.11.7, 2.15 of 2.15.0+cu132."""
    return ".".join(str(version).split("+")[0].split(".")[:2])


def _last(values: np.ndarray) -> float:
    return float(values[-1]) if len(values) else float("nan")


def _number(value: Any, digits: int = 10) -> Any:
    """A number as it is stored; None for one that is not."""
    if not isinstance(value, float):
        return value
    return None if np.isnan(value) else float(f"{value:.{digits}g}")
