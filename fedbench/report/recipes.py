"""How each metric that the papers print is computed from a run of ours, in the unit they print.

The round: ``last`` where the authors' code takes it (FedBABU, whose models are fine-tuned after the last
round; the pFedMoAP, pFedNet and FedPIA tables), else ``best``, the maximum over rounds on the test sets, as the
PFL papers print; a run's ``paper.select`` says otherwise.  ``last3`` is what pFedNet's released analysis prints: mean
and standard deviation (ddof 1) over the last three evaluated rounds of one run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from fedbench.core.files import read_json
from fedbench.report import scores
from fedbench.report.runs import Run
from fedbench.report.table import Series

ACCURACY = "personal/accuracy"
LAST_ROUND = ("pfedmoap", "pfednet", "fedpia")  # tables, by the beginning of their names
NAN = float("nan")


@dataclass(frozen=True)
class Question:
    """A printed cell to be measured: its table and CSV row, all runs (for Local), the accuracy to reach."""

    table: str
    row: dict[str, str]
    runs: tuple[Run, ...] = ()
    target: float = 0.7


@dataclass(frozen=True)
class Answer:
    """A run's value for a cell; ``spread``: a std over clients or rounds, where the papers print that beside it;
    ``clients``: over how many clients a mean is ("3 of 6"), where these are not all."""

    value: float
    spread: float | None = None
    clients: str = ""


Recipe = Callable[[Run, Question], Answer]


def select(run: Run, question: Question) -> str:
    """last, best, best_val or last3: the round or rounds whose value the table prints."""
    selection = (run.config.get("paper") or {}).get("select")
    last = question.table.startswith(LAST_ROUND) or run.choice("algorithm") == "fedbabu"
    return selection or ("last" if last else "best")


def mean(column: str) -> Recipe:
    """Percent: a column of metrics.csv at the selected round, or a domain's mean of it at that round."""

    def recipe(run: Run, question: Question) -> Answer:
        which, domain = select(run, question), domain_of(question.row)
        if which == "last3" and domain is None:
            return last_three(run, column)
        at = scores.selected_round(run, column, "last" if which == "last3" else which)
        if domain is None:
            return Answer(100 * scores.value_at(run, column, at), clients=scores.clients_at(run, column, at))
        values, members = run.clients(column), clients_of(run, domain)
        if at not in values.index or not members:
            return Answer(NAN)
        return _mean(values.loc[at].reindex(members))

    return recipe


def _mean(values: Series) -> Answer:
    """Percent: the mean over clients [N], its std, and over how many it is if some have no value."""
    known, total = values.count(), len(values)
    return Answer(100 * float(values.mean()), clients="" if known in (0, total) else f"{known} of {total}")


def last_three(run: Run, column: str) -> Answer:
    """Percent: mean and standard deviation (ddof 1) over the last three evaluated rounds, or as many as there are."""
    values = 100 * scores.curve(run, column)[-3:]
    return Answer(float(values.mean()), float(values.std()) if len(values) > 1 else None)


def own_best(metric: str, client: int) -> Recipe:
    """Percent: a metric of one client (from 1) at its own best round."""

    def recipe(run: Run, question: Question) -> Answer:
        values = run.clients(metric)
        return Answer(100 * scores.best_of(values[[client - 1]], metric)[0] if client - 1 in values else NAN)

    return recipe


def gain(metric: str, client: int | None = None) -> Recipe:
    """Points over Local, each client at its own best round: the mean over clients, or one (from 1)."""

    def recipe(run: Run, question: Question) -> Answer:
        each = scores.gains(run, scores.local_of(run, list(question.runs)), metric, "own_best")
        if client is not None:
            return Answer(100 * float(each.get(client - 1, NAN)))
        return replace(_mean(each), spread=100 * float(each.std(ddof=0)) if len(each) else None)

    return recipe


def rounds_to_target(run: Run, question: Question) -> Answer:
    """The first round whose mean accuracy reaches the target."""
    return Answer(scores.rounds_to(run, ACCURACY, question.target))


def new_clients(run: Run, question: Question) -> Answer:
    """Percent: the mean accuracy of the clients that took no part, at the best of the epochs they adapted."""
    value = (run.summary.get("new_clients") or {}).get("best")
    return Answer(NAN if value is None else 100 * float(value))


def images_per_s(run: Run, question: Question) -> Answer:
    """Training images per second of local training and server step."""
    value = (run.summary.get("cost") or {}).get("images_per_s")
    return Answer(NAN if value is None else float(value))


BY_CLIENT: dict[str, Recipe] = {  # FedPIA's, whose columns are clients
    **{name: mean(f"personal/{name}") for name in ("accuracy", "accuracy_open", "accuracy_closed")},
    "f1": mean("personal/micro_f1"),  # the paper says F1
}
RECIPES: dict[str, Recipe] = {
    "mean_client_test_accuracy_pct": mean(ACCURACY),
    "BMCTA_pct": mean(ACCURACY),
    "BTA_pct": mean(f"{ACCURACY}_weighted"),
    "mean_accuracy_pct": mean(ACCURACY),
    "mean_auc_pct": mean("personal/auc"),
    "mean_auc_gain (std over clients)": gain("personal/auc"),
    "individual_gain_over_local_pct_points (std over clients)": gain(ACCURACY),
    "best_mean_client_test_accuracy_pct_on_20_new_clients": new_clients,
    "rounds_to_target": rounds_to_target,
    "images_per_s": images_per_s,
    "test_accuracy_percent": mean(f"{ACCURACY}_weighted"),
    "iou_percent": mean("personal/dice_iou_weighted"),
    "label_iou_percent": mean("personal/label_iou_weighted"),
    **BY_CLIENT,
    **{f"client{k}_auc_pct": own_best("personal/auc", k) for k in range(1, 5)},
    **{f"client{k}_auc_gain": gain("personal/auc", k) for k in range(1, 5)},
}

# Computed from the other methods' cells of the same column: (what it needs, own and others' means -> value).
RELATIVE: dict[str, tuple[str, Callable[[float, dict[str, float]], float]]] = {
    "relative_speed_pct": ("images_per_s", lambda own, others: 100 * own / others.get("FedAvg", NAN)),
    "speedup_x_vs_slowest": ("rounds_to_target", lambda own, others: max(others.values(), default=NAN) / own),
}


def is_measured(metric: str) -> bool:
    """Whether a run can answer a printed metric; the rest are facts about data and settings."""
    return metric in RECIPES or metric in RELATIVE


def domain_of(row: dict[str, str]) -> str | None:
    """The domain or client a cell is about, None for the mean over all clients."""
    match = re.search(r"domain=([^;]+)", row.get("setting", ""))
    name = match.group(1) if match else row["dataset"].partition("/")[2]
    if not match and not name and row["metric"] in BY_CLIENT:
        name = row["dataset"]
    plain = simplified(name)
    return None if plain in ("", "all", "allmean", "average", "mean") or plain.endswith("overall") else name


def clients_of(run: Run, domain: str) -> list[int]:
    """Clients whose domain, in partition.json's ``domains`` [N], is this one; FedPIA's c3_oct is the third one's."""
    names = read_json(run.path / "partition.json").get("domains")
    names = [simplified(str(name)) for name in names] if isinstance(names, list) else []
    numbered = re.match(r"c(\d+)_", domain)
    if numbered:
        wanted = [*dict.fromkeys(names)][int(numbered[1]) - 1 : int(numbered[1])]
    else:
        wanted = [simplified(domain)]
    return [client for client, name in enumerate(names) if name in wanted]


def simplified(name: str) -> str:
    """Letters and digits in lower case: "Real World" is Real_World."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
