"""What results/ has of a method: the groups of runs of every page that are the method's, and what tells them apart."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedbench.config.conf_tree import group_options, read_option
from fedbench.pages.page import Group, Page, groups_of, read_page
from fedbench.report import paper
from fedbench.report.table import Column, show
from fedbench.report.words import METHOD, metric_in_words, printed


@dataclass(frozen=True)
class Result:
    """Runs that differ in their seed only.

    page: its folder's name.  title: what the page is about.  setting: what else tells the runs apart on that page.
    metric: in words.  form: full or reduced.  n: how many runs.  last, best: mean ± standard deviation over them; last
    says where the page has neither.
    """

    page: str
    title: str
    setting: str
    metric: str
    form: str
    n: int
    last: str
    best: str


def results_of(root: Path, options: Iterable[str]) -> dict[str, list[Result]]:
    """By option of algorithm=, what the pages of results/ have of it, each once."""
    found: dict[str, list[Result]] = {option: [] for option in options}
    names = rows_of_papers(root / "conf")
    names |= {key(name): option for option in found for name in (printed(option), option)}
    for folder in sorted(path.parent for path in (root / "results").glob("*/runs.csv")):
        page = read_page(folder)
        shown = set()  # a page may have the same runs in two parts
        for part in page.parts:
            for group in groups_of(page, part):
                label = next((str(group.labels[name]) for name in METHOD if group.labels.get(name)), "")
                option = option_of(label, names)
                if option is not None:
                    result = _result(page, part, group, label, option)
                    found[option] += [result] if (seen := (label, result.last, result.best)) not in shown else []
                    shown.add(seen)
    return found


def rows_of_papers(conf: Path) -> dict[str, str]:
    """Return the option of algorithm= of each printed row (CoOp: local), by the `key` of the row's name.

    Where one name is another method in another paper (PromptFL), most experiments decide.
    """
    found: dict[str, Counter[str]] = {}
    for name in group_options("experiment", [conf]):
        row = (read_option(f"experiment/{name}", [conf]).get("paper") or {}).get("method")
        option = _algorithm(f"experiment/{name}", conf)
        if isinstance(row, str) and option is not None:
            found.setdefault(key(row), Counter()).update([option])
    return {row: options.most_common(1)[0][0] for row, options in found.items()}


def experiments_by_algorithm(conf: Path) -> dict[str, list[str]]:
    """Return the rows of printed tables that run each option of algorithm=."""
    found: dict[str, list[str]] = {}
    for experiment in paper.experiments([conf]):
        option = _algorithm(f"experiment/{experiment.name}", conf)
        if option is not None and experiment.methods:
            found.setdefault(option, []).append(experiment.name)
    return found


def _algorithm(name: str, conf: Path) -> str | None:
    """Return what an experiment, or one that it includes, chooses as algorithm; None where none does."""
    chosen = None
    for entry in read_option(name, [conf]).get("defaults") or []:
        if isinstance(entry, dict):
            chosen = entry.get("override /algorithm", chosen)
        elif entry.startswith("/experiment/"):
            chosen = _algorithm(entry[1:], conf) or chosen
    return chosen


def option_of(label: str, names: Mapping[str, str]) -> str | None:
    """The option that a label names: pgfed for "PGFed" and "PGFed, bounded", fedper for "Prompt+FedPer"; None for none.

    names: options by the `key` of their names.
    """
    words = re.split(r"[^\w]+", label)
    return next((names[name] for name in map(key, [label, *words]) if name in names), None)


def key(name: str) -> str:
    """A method's name without the differences of spelling: FedAvg-local, fedavg_local."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _result(page: Page, part: str, group: Group, label: str, option: str) -> Result:
    metric, scale = str(page.about["metric"]), page.scale
    of_part = [part] if part != page.parts[0] else []
    of_label = [] if key(label) == key(option) else [printed(label)]
    others = [f"{name.rpartition('.')[2]}={value}" for name, value in group.labels.items()
              if name not in METHOD and value is not None]  # fmt: skip
    last, best = (show(group.spread(name), Column(name, name, scale=scale, none="")) for name in ("last", "best"))
    last = last or best or "other scores: see the page"
    forms = sorted(group.rows["form"].unique())
    words = ", ".join([*of_part, *of_label, *others])
    title = str(page.about["title"])
    return Result(page.name, title, words, metric_in_words(metric), ", ".join(forms), group.n, last, best)
