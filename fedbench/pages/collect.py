"""A page's data files from run folders: what every run was, what it reached, and its curves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedbench.config.conf_tree import conf_dirs
from fedbench.core.files import replace_text, typed_path
from fedbench.core.options import require
from fedbench.pages.page import DEFAULTS, Page, read_page, write_page
from fedbench.report import paper, scores
from fedbench.report.figures import client_gains
from fedbench.report.runs import Run, find_runs, rounds_of, sound
from fedbench.report.scores import Options
from fedbench.report.summary import Group, group_runs, left_out, notes, over_seeds, results

Row = dict[str, Any]
MAIN = "main"  # the part of a page that has one
RESULTS = "n last best worst global gain_last rounds_to_target seconds_to_target images_per_s"
SENT = "n last mb_up mb_down part_up part_down mb_to_target"
ABSOLUTE = re.compile(r"(?<=[=\[,])(?:/|[A-Za-z]:[\\/])(?:[^\s',\]]*[/\\])?([^\s',\]/\\]+)")  # a value: /data/x.npz


def write(folder: Path, sources: list[str], asked: Mapping[str, Any], config_dir: str | None = None) -> list[Path]:
    """Write a page's data files from folders of runs, and return the paths.

    Other parts, and what page.json and page.md have already, stay.

    Args:
        folder: The page's folder.
        sources: Folders of runs, or PART=FOLDER.
        asked: Values of page.json: title, metric, select, target, group (keys with commas), paper (printed tables).
        config_dir: A folder of your own options.
    """
    is_new = not (folder / "page.json").is_file()
    page = Page(folder, deepcopy(DEFAULTS)) if is_new else read_page(folder)
    about = page.about
    about |= {key: asked[key] for key in ("metric", "select", "target", "title") if key in asked}
    about["group"] = asked["group"].split(",") if "group" in asked else about["group"]
    about["papers"] = list(dict.fromkeys([*about["papers"], *asked.get("paper", [])]))
    about["title"] = about["title"] or page.name
    has_metric = "metric" in asked or not is_new
    words = [f"# {about['title']}", ""]
    for part, folders in _parts(sources, page).items():
        runs, damaged = sound(find_runs(folders, config_dir))
        require(not damaged, f"part {part}: {'; '.join(left_out(damaged, []))}")
        if not has_metric:
            about["metric"], has_metric = scores.primary_metric(runs), True
        words += _collect(page, part, runs, folders, config_dir)
    written = write_page(page)
    if not (folder / "page.md").is_file():
        replace_text(folder / "page.md", ["\n".join(words).rstrip("\n") + "\n"])
        written.append(folder / "page.md")
    return written


def _parts(sources: list[str], page: Page) -> dict[str, list[Path]]:
    """Return folders by part; those without a name are the page's only part."""
    parts: dict[str, list[Path]] = {}
    for source in sources:
        is_named = re.match(r"[\w-]+=", source) and not Path(source).exists()
        name, _, path = source.partition("=") if is_named else ("", "", source)
        parts.setdefault(name or (page.parts[0] if len(page.parts) == 1 else MAIN), []).append(typed_path(path))
    return parts


def _collect(page: Page, part: str, runs: list[Run], folders: list[Path], config_dir: str | None) -> list[str]:
    """Replace the rows of a part by those of these runs; return the lines that show them on a new page."""
    about = page.about
    options = Options(about["metric"], about["select"], about["target"], about["group"])
    scores.check_metric(options.metric, options.target, runs)
    about["percent"] = scores.is_fraction(options.metric)
    groups, repeated = group_runs(runs, options.group)
    wide = results(groups, runs, options)  # which orders the groups
    labels = list(dict.fromkeys(key for group in groups for key in group.labels))
    about["labels"] = {**about["labels"], part: labels or ["method"]}
    names = {run.path: _name(run, part, folders) for run in runs}
    finished = [(run, group) for group in groups for run in _by_seed(group)]
    rows = [_row(run, part, names[run.path], group.labels) | _scores(run, runs, options) for run, group in finished]
    rows += [_row(run, part, names[run.path], {"method": run.method}) for run in runs if not run.finished]
    page.runs = _replaced(page.runs, "part", [part], rows)
    old = [name for name in page.curves["run"].unique() if name.startswith(f"{part}/")] if len(page.curves) else []
    page.curves = _replaced(
        page.curves, "run", old, [row for run, _ in finished for row in _curve(run, names[run.path])]
    )
    page.gains = _replaced(page.gains, "part", [part], _gains(part, groups, runs, options))
    known = paper.experiments(conf_dirs(config_dir)) if about["papers"] else []
    for table in about["papers"]:
        page.cells = _replaced(page.cells, "table", [table], _cells(table, runs, known, options))
    commands = list(dict.fromkeys(_typed(run) for run in runs if run.summary.get("command")))
    about["commands"] = {**about["commands"], part: commands}
    return _first_words(page, part, wide.title, notes(groups, repeated, options)) if groups else []


def _replaced(frame: Any, key: str, values: list[str], rows: list[Row]) -> Any:
    """Return a table whose rows with these values of a key are replaced by new ones."""
    kept = frame[~frame[key].isin(values)] if len(frame) else frame
    return pd.concat([kept, pd.DataFrame(rows)], ignore_index=True) if len(kept) else pd.DataFrame(rows)


def _by_seed(group: Group) -> list[Run]:
    return sorted(group.runs, key=lambda run: (str(type(run.seed)), run.seed))


def _name(run: Run, part: str, folders: list[Path]) -> str:
    """Return the part, and the run's path below the folder that was named."""
    below = next((folder for folder in folders if run.path.is_relative_to(folder)), run.path.parent)
    inner = run.path.relative_to(below).as_posix()
    return f"{part}/{run.path.name if inner == '.' else inner}"


def _row(run: Run, part: str, name: str, labels: Mapping[str, Any]) -> Row:
    """Return a run's row of runs.csv, without its scores."""
    s, machine, software = run.summary, run.summary.get("machine"), run.summary.get("versions") or {}
    at = [f"{machine['processor']}, {machine['cores']} cores, {machine['gpu'] or 'no GPU'}"] if machine else []
    versions = [f"{name} {_short(software[key])}" for key, name in (("python", "Python"), ("torch", "torch"))
                if key in software]  # fmt: skip
    commit = f"{str(s['commit'])[:12]}{' and changes' if s.get('dirty') else ''}" if s.get("commit") else None
    return {
        "part": part, "run": name, **labels, "seed": run.seed, "n": 1, "status": s.get("status") or "no summary",
        "form": form_of(run), "rounds": rounds_of(run), "commit": commit,
        "machine": "; ".join([*at, *filter(None, [", ".join(versions)])]) or None,
        **({"tuned_at_end": 1} if run.tuned else {}),
    }  # fmt: skip


def form_of(run: Run) -> str:
    """Return reduced if an experiment of conf/experiment/reduced was chosen, else full."""
    names = str(run.choice("experiment") or "").split(",")
    return "reduced" if any(name.startswith("reduced/") for name in names) else "full"


def _scores(run: Run, runs: list[Run], options: Options) -> Row:
    found = scores.scores_of(run, options, runs)
    if not scores.is_compressed(run):
        found |= {"part_up": None, "part_down": None}
    found |= {name: float(run.metrics[name].iloc[-1]) for name in _recorded(run)}
    return {key: _number(value) for key, value in found.items() if key != "counted" or value}


def _recorded(run: Run) -> list[str]:
    """Return the metrics whose means over clients are kept: all but spreads, weighted means and worst tenths."""
    return [name for name in run.metrics if not name.endswith(("_std", "_weighted", "_worst"))]


def _curve(run: Run, name: str) -> list[Row]:
    """Return the rows of curves.csv of a run, numbers to six digits."""
    table = run.metrics[_recorded(run)].copy()
    table["mb_up"], table["mb_down"] = (scores.megabytes(run, (d,)).reindex(table.index) for d in ("up", "down"))
    seconds = run.costs.get("train_s", scores.curve(run, "train_s"))  # empty without costs.csv
    table["train_s"] = seconds.cumsum().reindex(table.index)
    return [{"run": name, "round": int(at), **{key: _number(float(value), 6) for key, value in row.items()}}
            for at, row in table.iterrows()]  # fmt: skip


def _gains(part: str, groups: list[Group], runs: list[Run], options: Options) -> list[Row]:
    """Return the rows of gains.csv: for each method and client the mean over seeds, its spread and their number."""
    rows = []
    for group in groups:
        for client, gains in enumerate(client_gains(group, runs, options).T):
            over = over_seeds(gains)
            rows.append({"part": part, "group": group.name, "client": client, "gain": _number(over.mean),
                         "gain_std": _number(over.std), "gain_n": over.count})  # fmt: skip
    return rows


def _cells(table: str, runs: list[Run], known: list[paper.Experiment], options: Options) -> list[Row]:
    """Return the rows of cells.csv: every cell of a printed table that can be measured."""
    rows = []
    for cell in paper.compare(table, runs, known, options.target):
        row = {"table": table, **{key: cell.row[key] for key in ("method", *paper.KEYS)}, "form": "not run"}
        if cell.ours.count:
            row |= {
                "form": "reduced" if cell.reduced else "full", "run_with": cell.overrides or None,
                "ours": _number(cell.ours.mean), "ours_std": _number(cell.ours.std), "ours_n": cell.ours.count,
                "ours_of": cell.ours.of, "sigma": _number(cell.sigma), "tuned_at_end": int(cell.tuned) or None,
                "counted": cell.clients,
            }  # fmt: skip
        rows.append(row)
    return rows


def _first_words(page: Page, part: str, title: str, remarks: list[str]) -> list[str]:
    """Return the lines of a new page.md for a part, and give page.json its figures."""
    runs, about = page.runs[page.runs["part"] == part], page.about
    end = "" if part == MAIN else f"_{part}"
    lower = scores.lower_is_better(about["metric"])
    order = f'part="{part}", order="{"" if lower else "-"}{about["select"]}"'
    extra = "".join(f" {key}" for key in ("counted", "best_val") if key in runs and runs[key].notna().any())
    tables = [f'{{{{ table("{RESULTS}{extra}", {order}, title="{title}") }}}}']
    if runs["part_up"].notna().any():
        tables.append(f'{{{{ table("{SENT}", {order}, title="what was sent, by all clients together") }}}}')
    tables += [f'{{{{ paper("{table}") }}}}' for table in about["papers"]]
    figures = {f"curves{end}": {"part": part, "alt": "over rounds"}}
    if len(page.gains) and (page.gains["part"] == part).any():
        figures[f"gains{end}"] = {"kind": "gains", "part": part, "alt": "gain over Local per client"}
    about["figures"] = {**figures, **about["figures"]}
    drawn = [f'{{{{ figure("{name}") }}}}' for name in figures]
    heading = [] if part == MAIN else [f"## {part}"]
    blocks = [
        *heading,
        f'{{{{ commands("{part}") }}}}',
        f'{{{{ ran("{part}") }}}}.',
        *tables,
        "  \n".join(remarks),
        *drawn,
    ]
    return [line for block in blocks for line in (block, "")]


def _typed(run: Run) -> str:
    """Return the command of a run, with names of files in place of this machine's paths."""
    return "uv run " + ABSOLUTE.sub(r"\1", run.summary["command"])


def _short(version: str) -> str:
    """Return 3.11 for 3.11.7, 2.15 for 2.15.0+cu132."""
    return ".".join(str(version).split("+")[0].split(".")[:2])


def _number(value: Any, digits: int = 10) -> Any:
    """Return a number as it is stored, None for NaN."""
    if not isinstance(value, float):
        return value
    return None if np.isnan(value) else float(f"{value:.{digits}g}")
