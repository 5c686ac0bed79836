"""Collect run folders into the data files of a page."""

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
from fedbench.report.runs import Run, find_runs, readable, rounds_of
from fedbench.report.scores import Options
from fedbench.report.summary import SENT_KEYS, Group, group_runs, notes, over_seeds, results

Row = dict[str, Any]
MAIN = "main"  # the name of the only part of a page; a part is the runs of one or more folders, with own tables
RESULTS = "n last best worst global gain_last rounds_to_target seconds_to_target images_per_s"
ABSOLUTE = re.compile(r"(?<=[=\[,])(?:/|[A-Za-z]:[\\/])(?:[^\s',\]]*[/\\])?([^\s',\]/\\]+)")  # a value: /data/x.npz


def write(folder: Path, sources: list[str], about: Mapping[str, Any], config_dir: str | None = None) -> list[Path]:
    """Write the data files of a page from run folders.

    The rows of the given parts are replaced.  Other parts, and an existing page.md, are kept.

    Args:
        folder: The folder of the page.
        sources: Folders with runs in or below them, or PART=FOLDER.
        about: Values of page.json that replace those of the page: title, metric, select, target, group (keys separated
            by commas); and paper, a list of printed tables that are added.
        config_dir: A folder with the user's own options.

    Returns:
        The paths of the written files.

    Raises:
        ConfigError: There are no runs, or a run is damaged.
    """
    is_new = not (folder / "page.json").is_file()
    page = Page(folder, deepcopy(DEFAULTS)) if is_new else read_page(folder)
    page.about |= {key: about[key] for key in ("metric", "select", "target", "title") if key in about}
    if "group" in about:
        page.about["group"] = about["group"].split(",")
    page.about["papers"] = list(dict.fromkeys([*page.about["papers"], *about.get("paper", [])]))
    page.about["title"] = page.about["title"] or page.name
    has_metric = "metric" in about or not is_new  # else it is the primary metric of the runs of the first part
    text = [f"# {page.about['title']}", ""]  # the lines of a new page.md
    for part, folders in _parts(sources, page).items():
        runs, damaged = readable(find_runs(folders, config_dir))
        require(
            not damaged,
            f"the part {part} of the page has damaged runs "
            f"({'; '.join(f'{path}: {why}' for path, why in damaged.items())}): remove their folders, or run them "
            "again",
        )
        if not has_metric:
            page.about["metric"] = scores.primary_metric(runs)
            has_metric = True
        text += _collect(page, part, runs, folders, config_dir)  # replaces the rows of the part
    written = write_page(page)
    path = folder / "page.md"
    if not path.is_file():
        replace_text(path, ["\n".join(text).rstrip("\n") + "\n"])
        written.append(path)
    return written


def _parts(sources: list[str], page: Page) -> dict[str, list[Path]]:
    """Return the folders of each part of a page: runs of one or more folders that get tables of their own.

    Args:
        sources: PART=FOLDER, or a folder.  Folders without a part belong to the only part of the page, or to "main" if
            the page has none or several.
        page: The page.
    """
    parts: dict[str, list[Path]] = {}
    for source in sources:
        part, path = page.parts[0] if len(page.parts) == 1 else MAIN, source
        if re.match(r"[\w-]+=", source) and not Path(source).exists():
            part, _, path = source.partition("=")
        parts.setdefault(part, []).append(typed_path(path))
    return parts


def _collect(page: Page, part: str, runs: list[Run], folders: list[Path], config_dir: str | None) -> list[str]:
    """Replace the rows of a part of a page, in all of its tables, by those of runs.

    Args:
        page: The page; changed in place.
        part: The name of the part, a set of the page's runs with tables of its own.
        runs: The runs of the part.
        folders: The folders in which the runs were found, relative to which runs are named.
        config_dir: A folder with the user's own options.

    Returns:
        The lines about the part for a new page.md.

    Raises:
        ConfigError: No run is finished.
    """
    about = page.about
    options = Options(about["metric"], about["select"], about["target"], about["group"])
    scores.check_metric(options.metric, options.target, runs)
    about["percent"] = scores.is_fraction(options.metric)
    groups, repeated = group_runs(runs, options.group)  # repeated: the number of runs that later ones replace
    require(
        bool(groups),
        f"no run in {', '.join(map(str, folders))} is finished, so part {part} has no results: resume the runs, or "
        "name another folder",
    )
    table = results(groups, runs, options)  # also sorts the groups in place, so that the best method is first
    labels = list(dict.fromkeys(key for group in groups for key in group.labels))
    about["labels"] = {**about["labels"], part: labels or ["method"]}
    names = {run.path: _run_name(run, part, folders) for run in runs}
    rows, curves = [], []
    for group in groups:
        # by type first, because a seed that is no number cannot be compared with numbers
        for run in sorted(group.runs, key=lambda run: (str(type(run.seed)), run.seed)):
            rows.append(_run_row(run, part, names[run.path], group.labels) | _score_row(run, runs, options))
            curves += _curve_rows(run, names[run.path])
    rows += [_run_row(run, part, names[run.path], {"method": run.method}) for run in runs if not run.finished]
    page.runs = _replace(page.runs, "part", [part], rows)
    # curves.csv has no column for the part, but the name of a run begins with it
    old_names = [name for name in page.curves["run"] if name.startswith(f"{part}/")] if len(page.curves) else []
    page.curves = _replace(page.curves, "run", old_names, curves)
    page.gains = _replace(page.gains, "part", [part], _gain_rows(part, groups, runs, options))
    available = paper.experiments(conf_dirs(config_dir)) if about["papers"] else []
    for name in about["papers"]:
        cells = paper.compare(name, runs, available, options.target)
        page.cells = _replace(page.cells, "table", [name], [_cell_row(name, cell) for cell in cells])
    commands = list(dict.fromkeys(_command(run) for run in runs if run.summary.get("command")))
    about["commands"] = {**about["commands"], part: commands}
    return _template_lines(page, part, table.title, notes(groups, repeated, options))


def _replace(frame: Any, key: str, values: list[str], rows: list[Row]) -> Any:
    """Return a table with new rows, after the other rows, instead of those that have certain values in a column.

    Args:
        frame: A DataFrame; may be empty and without columns.
        key: The column whose values decide which rows are replaced.
        values: The values of rows that are replaced.
        rows: The new rows.
    """
    other_rows = frame[~frame[key].isin(values)] if len(frame) else frame
    return pd.concat([other_rows, pd.DataFrame(rows)], ignore_index=True) if len(other_rows) else pd.DataFrame(rows)


def _run_name(run: Run, part: str, folders: list[Path]) -> str:
    """Return the name of a run in the tables of a page: the part, a slash, and its path below a folder.

    Args:
        run: The run.
        part: The name of the part, a set of the page's runs with tables of its own.
        folders: The folders of the command line, in one of which the run is.
    """
    parent = next((folder for folder in folders if run.path.is_relative_to(folder)), run.path.parent)
    path = run.path.relative_to(parent).as_posix()
    return f"{part}/{run.path.name if path == '.' else path}"


def _run_row(run: Run, part: str, name: str, labels: Mapping[str, Any]) -> Row:
    """Return the row of a run in runs.csv without its scores: names, labels, status, rounds, commit and machine.

    Args:
        run: The run.
        part: The part of the page.
        name: The name of the run in the page.
        labels: The method and what else distinguishes its group of runs, from column to value.
    """
    summary = run.summary
    machine, software = summary.get("machine"), summary.get("versions") or {}
    computer = [f"{machine['processor']}, {machine['cores']} cores, {machine['gpu'] or 'no GPU'}"] if machine else []
    titles = {"python": "Python", "torch": "torch"}
    versions = ", ".join(f"{titles[key]} {_short_version(software[key])}" for key in titles if key in software)
    commit = str(summary["commit"])[:12] if summary.get("commit") else None
    row = {"part": part, "run": name, **labels, "seed": run.seed, "n": 1}  # n: number of runs
    # form: "full", or "reduced" for a smaller setting than that of the paper
    row |= {"status": summary.get("status") or "no summary", "form": form_of(run), "rounds": rounds_of(run)}
    row["commit"] = f"{commit} and changes" if commit and summary.get("dirty") else commit
    row["machine"] = "; ".join(filter(None, [*computer, versions])) or None
    return row | ({"tuned_at_end": 1} if run.tuned else {})


def form_of(run: Run) -> str:
    """Return "reduced" if a run uses one of the smaller settings in conf/experiment/reduced, else "full"."""
    names = str(run.choice("experiment") or "").split(",")
    return "reduced" if any(name.startswith("reduced/") for name in names) else "full"


def _score_row(run: Run, runs: list[Run], options: Options) -> Row:
    """Return the scores of a run in runs.csv: those of reports, and its recorded metrics at the last evaluated round.

    Args:
        run: The run.
        runs: The runs among which that of Local (algorithm=local) is searched, for the gain over it.
        options: The metric, the selected round and the target.
    """
    row = scores.scores_of(run, options, runs)
    if not scores.is_compressed(run):  # the fractions of the uncompressed size would be 1
        row |= {"part_up": None, "part_down": None}
    row |= {name: float(run.metrics[name].iloc[-1]) for name in _recorded(run)}
    # counted, the number of clients in the mean, is left out if all clients are
    return {key: _rounded(value) for key, value in row.items() if key != "counted" or value}


def _recorded(run: Run) -> list[str]:
    """Return the columns of metrics.csv that are plain means over clients.

    Weighted means, standard deviations and means of the worst tenth of the clients are omitted.
    """
    return [name for name in run.metrics if not name.endswith(("_std", "_weighted", "_worst"))]


def _curve_rows(run: Run, name: str) -> list[Row]:
    """Return the rows of a run in curves.csv, one per evaluated round.

    They contain metrics, cumulative MB, and cumulative seconds of training, rounded to six significant digits.

    Args:
        run: The run.
        name: The name of the run in the page.
    """
    table = run.metrics[_recorded(run)].copy()  # the columns that are plain means over clients
    for direction in ("up", "down"):
        table[f"mb_{direction}"] = scores.megabytes(run, (direction,)).reindex(table.index)
    seconds = run.costs.get("train_s", pd.Series(dtype=float))
    table["train_s"] = seconds.cumsum().reindex(table.index)
    return [{"run": name, "round": int(round), **{key: _rounded(float(value), digits=6) for key, value in row.items()}}
            for round, row in table.iterrows()]  # fmt: skip


def _gain_rows(part: str, groups: list[Group], runs: list[Run], options: Options) -> list[Row]:
    """Return the rows of gains.csv: each method's gain over Local (algorithm=local) for each client.

    A gain is the mean over seeds, with its standard deviation and the number of seeds.

    Args:
        part: The part of the page.
        groups: Groups of runs that differ only in the seed.
        runs: The runs among which the runs of Local are searched.
        options: The metric and the selected round.
    """
    rows = []
    for group in groups:
        for client, gains in enumerate(client_gains(group, runs, options).T):  # [S] for each client
            gain = over_seeds(gains)
            rows.append({"part": part, "group": group.name, "client": client, "gain": _rounded(gain.mean),
                         "gain_std": _rounded(gain.std), "gain_n": gain.count})  # fmt: skip
    return rows


def _cell_row(table: str, cell: paper.Cell) -> Row:
    """Return the row of cells.csv for a cell of a paper's table, with our value if it was run.

    Its columns are those that identify the cell, and "form": "full", "reduced" (a smaller setting) or "not run".  If it
    was run, "run_with" (overrides), our mean and standard deviation, "ours_n" of "ours_of" runs with a defined value,
    "sigma" (standard deviation over seeds), "tuned_at_end" (1 if our value is after fine-tuning) and "counted" (clients
    in the mean, empty for all) follow.

    Args:
        table: The name of the paper's table.
        cell: The printed value, with our value.
    """
    row = {"table": table, **{key: cell.row[key] for key in ("method", *paper.KEYS)}, "form": "not run"}
    if not cell.ours.count:
        return row
    return row | {
        "form": "reduced" if cell.reduced else "full", "run_with": cell.overrides or None,
        "ours": _rounded(cell.ours.mean), "ours_std": _rounded(cell.ours.std), "ours_n": cell.ours.count,
        "ours_of": cell.ours.total, "sigma": _rounded(cell.std_over_seeds), "tuned_at_end": int(cell.tuned) or None,
        "counted": cell.clients,
    }  # fmt: skip


def _template_lines(page: Page, part: str, title: str, explanations: list[str]) -> list[str]:
    """Return the lines of a new page.md for a part, and add the figures that they show to the page's page.json.

    Args:
        page: The page; its figures are changed in place.
        part: The name of the part, a set of the page's runs with tables of its own.
        title: The title of the table of results.
        explanations: The lines below the tables.

    Returns:
        Markdown with calls of `PageFunctions`, such as {{ ran("main") }}, with an empty line after each block.
    """
    about = page.about  # the content of page.json
    runs = page.runs[page.runs["part"] == part]
    # MAIN: the name of the only part of a page, which needs no heading and no suffix
    suffix = "" if part == MAIN else f"_{part}"
    sign = "" if scores.lower_is_better(about["metric"]) else "-"  # the best group is first
    arguments = f'part="{part}", order="{sign}{about["select"]}"'
    # further columns of the table, if any run has a value
    extra = [key for key in ("counted", "best_val") if key in runs and runs[key].notna().any()]
    blocks = [] if part == MAIN else [f"## {part}"]
    blocks += [f'{{{{ commands("{part}") }}}}', f'{{{{ ran("{part}") }}}}.']
    blocks.append(f'{{{{ table("{" ".join([RESULTS, *extra])}", {arguments}, title="{title}") }}}}')
    if runs["part_up"].notna().any():  # some run compressed uploads or downloads
        keys = " ".join(SENT_KEYS)
        blocks.append(f'{{{{ table("{keys}", {arguments}, title="what was sent, by all clients together") }}}}')
    blocks += [f'{{{{ paper("{table}") }}}}' for table in about["papers"]]
    blocks.append("  \n".join(explanations))
    figures = {f"curves{suffix}": {"part": part, "alt": "over rounds"}}
    if len(page.gains) and (page.gains["part"] == part).any():
        figures[f"gains{suffix}"] = {"kind": "gains", "part": part, "alt": "gain over Local per client"}
    about["figures"] = {**figures, **about["figures"]}
    blocks += [f'{{{{ figure("{name}") }}}}' for name in figures]
    return [line for block in blocks for line in (block, "")]


def _command(run: Run) -> str:
    """Return the command that started a run, as in a repository.

    Absolute paths are shortened to file names, because other machines have other folders.
    """
    return "uv run " + ABSOLUTE.sub(r"\1", run.summary["command"])


def _short_version(version: str) -> str:
    """Return the major and minor version of a version number: 3.11 for 3.11.7, 2.15 for 2.15.0+cu132."""
    return ".".join(str(version).split("+")[0].split(".")[:2])


def _rounded(value: Any, digits: int = 10) -> Any:
    """Return a float rounded to ``digits`` significant digits, or None for NaN.  Other types are returned unchanged."""
    if not isinstance(value, float):
        return value
    return None if np.isnan(value) else float(f"{value:.{digits}g}")
