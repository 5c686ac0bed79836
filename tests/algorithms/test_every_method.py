"""What all methods keep on networks of two layers: conf/algorithm is listed, and options that change the path added.

tests/test_contract.py holds more of this, on the model and the optimizer that suit each method best.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import COHORTS, COHORTS_OF_FOUR, again, four_of_six, six_clients
from cases import METHODS, case, without_learning
from tiny import HEAD, PLANS, close, compose, deployed, engine, equal, every_second, mlp, play, ragged

from fedbench.algorithms.base import Algorithm
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.local import Local
from fedbench.core.options import ConfigError
from fedbench.core.split import Ragged, Split
from fedbench.engine.cohort import Cohort
from fedbench.engine.optim import SGD
from fedbench.nn.flat import FlatModel
from fedbench.simulation import build

OPTIONS: dict[str, list[str]] = {  # by method, what else its YAML may say
    "fedfomo": ["reference=trained models=2"],
    "fedamp": ["alpha_k=0.2"],
    "lg_fedavg": ["update=joint"],
    "apple": ["bandwidth=2"],
}
NAMES = [*METHODS, *(f"{name} {words}" for name, each in OPTIONS.items() for words in each)]


def first_word(name: Any) -> str:
    return str(getattr(name, "values", [name])[0]).split()[0]


# What the contract suite checks too, of methods as conf has them, is tested here by default with other options.
CHECKED = [n if " " in n else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]

# What these keep is trained, so that it stands still with the models.  Other methods also keep what clients tell each
# other of their models, losses or labels, learned or not.
STANDING = {
    *("local", "fedavg", "fedavg_local", "fedprox", "feddyn", "scaffold", "fedper", "fedrep", "lg_fedavg", "fedbabu"),
    *("fedrod", "ditto", "apfl", "apfl_adaptive", "pfedme", "per_fedavg", "per_fedavg_hf", "pgfed_exact"),
}
# Renumbering clients renumbers their rows, but for what is drawn by their numbers: batches, and options set below.
RENUMBERED = STANDING | {"fedfomo", "fedamp", "heurfedamp", "fedsld", "apple", "pgfed", "pgfed_mo", "pgfed_ce"}


@functools.cache
def config(name: str, *words: str):
    return compose([f"algorithm={name}", *(f"algorithm.{word}" for word in words)])


def method(name: str, learning: bool = True, **options: object) -> Algorithm:
    """A new one of "apple bandwidth=2"; skips those that need another model."""
    first, *words = name.split()
    suits = case(first)
    if suits.reason is not None or suits.overrides[0] != "model=mlp":
        pytest.skip(f"{first} runs on other models")
    cfg = config(first, *words).copy()
    for key, value in options.items():
        cfg.algorithm[key] = value
    if not learning:
        without_learning(cfg)
    return build.algorithm(cfg)


def momentum_of(name: str) -> SGD:
    """Kept from round to round, where the method allows momentum."""
    plain = "optimizer.momentum=0" in case(name.split()[0]).optimizer
    return SGD(lr=0.1) if plain else SGD(lr=0.1, momentum=0.9, reset="never")


@pytest.mark.parametrize("name", CHECKED)
def test_nothing_moves_at_learning_rate_zero(name: str) -> None:
    """Up to the rounding of a weighted mean of equal rows."""
    e = six_clients(SGD(lr=1e-30))  # not 0, by which SCAFFOLD divides
    whole = {"T_start": 1.0, "T_end": 1.0} if name == "fedkd" else {}  # nothing is truncated
    a = play(e, method(name, learning=False, **whole), rounds=0)
    start, server = deployed(e, a), {n: value.clone() for n, value in a.state_dict().items()}
    play(e, a, 2, COHORTS, begin=1)
    close(deployed(e, a), start, 1e-6)
    if a.global_row() is not None:
        close(a.global_row(), e.model.init_row(), 1e-6)
    if name.split()[0] in STANDING:
        close(a.state_dict(), server, 1e-6)
        for store in e.rows.all.values():
            close(store[np.arange(6)], store.default.expand(6, *store.default.shape), 1e-6)


@pytest.mark.parametrize("name", every_second(NAMES))
def test_only_the_cohort_changes_its_rows(name: str) -> None:
    e = six_clients(momentum_of(name))
    a = play(e, method(name), 1, [[1, 3]])
    of_clients = [store for name, store in e.rows.all.items() if not name.startswith("server/")]
    assert all(set(store.touched()) <= {1, 3} for store in of_clients)
    before = deployed(e, a)
    assert all(set(store.touched()) <= {1, 3} for store in of_clients)  # evaluation may train, without traces
    again(e, a, 1, [0, 3])
    if name.split()[0] in (
        "local",
        "fedavg_local",
        "ditto",
        "fedfomo",
        "fedamp",
        "heurfedamp",
        "apple",
        "pgfed",
        "pgfed_ce",
    ):
        equal(deployed(e, a)[[1, 2, 4, 5]], before[[1, 2, 4, 5]])  # nothing that is deployed is shared


@pytest.mark.parametrize("name", [name for name in CHECKED if first_word(name) in RENUMBERED])
def test_renumbering_clients_permutes_rows(name: str) -> None:
    """All samples of a client are one sample, since batches and what is held out are keyed by the client's number."""
    order = np.array([3, 0, 5, 1, 4, 2])
    arrays, split = ragged()
    first = np.repeat(split.train.offsets[:-1], split.train.sizes)
    arrays.inputs, arrays.targets = arrays.inputs[first], arrays.targets[first]  # type: ignore[index]
    arrays.split, runs = np.zeros(len(first), np.int8), []
    # drawn by number: which others are downloaded, and the cores, which are all one draw here
    options = {"apple": {"bandwidth": None}, "fedfomo": {"models": 6}}.get(name.split()[0], {})
    for ids in (np.arange(6), order):
        parts = Ragged.from_lists([split.train[i] for i in ids])
        optimizer = SGD(lr=0.1) if name == "scaffold" else SGD(lr=0.1, momentum=0.5)
        model = FlatModel(mlp(), HEAD, new_module=lambda *_: mlp())
        e = engine(arrays, Split(parts, split.val, parts), model, optimizer, epochs=2)
        a = play(e, method(name, **options), 3)
        runs.append((deployed(e, a, 1), a.global_row()))
    close(runs[1][0], runs[0][0][torch.from_numpy(order)], 2e-4)
    if runs[0][1] is not None:
        close(runs[1][1], runs[0][1], 2e-4)


@pytest.mark.parametrize(
    "name",
    [
        "feddyn",
        "apfl",
        "apfl_adaptive",
        "fedrep",
        "lg_fedavg",
        "fedbabu",
        "fedrod",
        "pfedme",
        "pgfed_exact",
        "fedavg",
        "fedprox",
        "fedper",
        "ditto",
        "scaffold",
        "pgfed",
    ],
)
def test_renumbering_clients_permutes_rows_trained_on_full_batches(name: str) -> None:
    """Samples differ here; these methods draw nothing else."""
    order = np.array([3, 0, 5, 1, 4, 2])
    arrays, split = ragged()
    other = Split(
        *(
            Ragged.from_lists([part[i] for i in order]) if part.sizes.any() else part
            for part in (split.train, split.val, split.test)
        )
    )
    runs = []
    for s in (split, other):
        optimizer = SGD(lr=0.1) if name == "scaffold" else SGD(lr=0.1, momentum=0.5)
        e = engine(arrays, s, mlp(), optimizer, columns=HEAD, batch_size=100, epochs=2)
        a = play(e, method(name), 2)
        runs.append((deployed(e, a, 1), a.global_row()))
    close(runs[1][0], runs[0][0][torch.from_numpy(order)], 2e-4)
    if runs[0][1] is not None:
        close(runs[1][1], runs[0][1], 2e-4)


@pytest.mark.parametrize("name", CHECKED)
def test_executors_agree(name: str) -> None:
    rows = {}
    for plan in PLANS:
        e = six_clients(momentum_of(name), plan=plan, epochs=2)
        rows[plan] = deployed(e, play(e, method(name), 3, COHORTS))
    for plan in PLANS:
        close(rows[plan], rows["loop"], 2e-5)


@pytest.mark.parametrize("name", CHECKED)
def test_resume_equals_no_interruption(name: str) -> None:
    cohorts = [*COHORTS, [1, 2, 3]]
    e, f = (six_clients(SGD(lr=0.1, momentum=0.0 if name == "scaffold" else 0.9)) for _ in range(2))
    a, b = play(e, method(name), 2, cohorts), play(f, method(name), rounds=0)
    b.load_state_dict(a.state_dict())
    f.rows.load_state_dict(e.rows.state_dict())
    for x, m in ((e, a), (f, b)):
        play(x, m, 2, cohorts[2:], begin=2)
    equal(deployed(f, b), deployed(e, a))
    equal(b.state_dict(), a.state_dict())


@pytest.mark.parametrize(
    "name, limit, options",
    [
        ("fedfomo", Local, {}),
        ("fedamp", Local, {"lam": 0.0, "alpha_k": 0.2}),
        ("heurfedamp", Local, {"lam": 0.0}),
        ("apple", Local, {"eta2": 0.0}),
        ("pgfed_ce", Local, {"mu": 0.0}),
        ("fedsld", FedAvg, {}),
    ],
)
def test_one_client_is_centralized_training(name: str, limit: type[Algorithm], options: dict) -> None:
    """Less what the method adds: APPLE's learned weight of its only core, PGFed's auxiliary risk, FedAMP's pull; full
    batches for FedSLD, whose weights are then 1; FedFomo trains on what it keeps and downloads its own model."""
    e, f = (
        six_clients(SGD(lr=0.1, momentum=0.9), sizes=[12], epochs=2, batch_size=100 if name == "fedsld" else 5)
        for _ in range(2)
    )
    a: Any = play(e, method(name, **options), rounds=0)
    if name == "apple":  # its only core starts where Local does
        a.exchange.cores = e.model.init_row()[None]
    f.federation.splits["train"] = e.federation.splits.get("remaining", f.federation.splits["train"])
    b = play(f, limit(), rounds=0)
    for r in range(3):
        again(e, a, r)
        again(f, b, r)
    close(deployed(e, a), deployed(f, b), 1e-6)


@pytest.mark.parametrize("name", ["fedper", "fedrep", "lg_fedavg", "fedbabu", "fedrod"])
def test_a_model_without_head_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"algorithm={name} needs the parameter group 'head'"):
        play(engine(*ragged(), mlp()), method(name))


@pytest.mark.parametrize("name", METHODS)
def test_a_refusal_names_the_option_and_not_the_class(name: str) -> None:
    """algorithm=lg_fedavg for LGFedAvg: the name of its file, which a second YAML's name (fedavg_local) begins with."""
    a = build.algorithm(config(name))
    option = type(a).__module__.rpartition(".")[2]
    assert option in METHODS and name.startswith(option)
    for group in a.requires:
        with pytest.raises(ConfigError, match=f"algorithm={option} needs the parameter group '{group}'"):
            a.check_settings(None, [], SGD(lr=0.1))


# -- communication ---------------------------------------------------------------------------------------
P, BASE, HEAD_SIZE = 163, 136, 27  # numbers of a row, 17 x 8 + 9 x 3, of its base and of its head
BYTES = {  # numbers per client, down and up, in the first round and in the second
    "feddyn": ((P, P), (P, P)),
    "apfl": ((P, P), (P, P)),
    "apfl_adaptive": ((P, P), (P, P)),
    "fedrep": ((BASE, BASE), (BASE, BASE)),
    "lg_fedavg": ((HEAD_SIZE, HEAD_SIZE), (HEAD_SIZE, HEAD_SIZE)),
    "lg_fedavg update=joint": ((HEAD_SIZE, HEAD_SIZE), (HEAD_SIZE, HEAD_SIZE)),
    "fedbabu": ((BASE, BASE), (BASE, BASE)),
    "per_fedavg": ((P, P), (P, P)),
    "per_fedavg_hf": ((P, P), (P, P)),
    "fedrod": ((P, P), (P, P)),
    "pfedme": ((P, P), (P, P)),
    "pgfed_exact": ((P, P), (P, P)),
    "fedfomo": ((0, P), (2 * P, P + 2)),  # M, no more than were uploaded, and as many weights back
    "fedfomo reference=trained models=2": ((0, P), (2 * P, P + 2)),
    "fedamp": ((P, P), (P, P)),
    "fedamp alpha_k=0.2": ((P, P), (P, P)),
    "heurfedamp": ((P, P), (P, P)),
    "fedsld": ((P + 9, P + 9), (P, P)),  # label counts and Pt, C numbers of all 6 clients, once
    "apple": ((5 * P, P), (5 * P, P)),
    "apple bandwidth=2": ((5 * P, P), (2 * P, P)),  # the first time all
    "pgfed_ce": ((P, 2 * P + 1), (2 * P, 2 * P + 1)),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_of_a_round(name: str) -> None:
    e = six_clients()
    a = play(e, method(name), rounds=0)
    for r, (down, up) in enumerate(BYTES[name]):
        cost = again(e, a, r, [1, 4]).cost
        assert (cost.bytes_down, cost.bytes_up) == (2 * 4 * down, 2 * 4 * up)


SENT = {
    "local": (0, 0),
    "fedavg": (P, P),
    "fedavg_local": (P, P),
    "fedprox": (P, P),
    "fedper": (BASE, BASE),
    "ditto": (P, P),
    "scaffold": (2 * P, 2 * P),
    "pgfed": (3 * P + 4, 2 * P + 1 + 4),
    "pgfed_mo": (3 * P + 4, 2 * P + 1 + 4),
}


@pytest.mark.parametrize("name", SENT)
def test_what_a_client_exchanges_in_a_round(name: str) -> None:
    """Numbers per sampled client from the second round on, by the table of the methods: PGFed gets w, its auxiliary
    gradient, gbar and K' coefficients c, and sends theta, g, c and K' coefficients a."""
    e = four_of_six(SGD(lr=0.1))
    algorithm = play(e, method(name), 1, COHORTS_OF_FOUR)
    assert (e.model.size, e.model.without("head").size) == (P, BASE)
    cohort = Cohort(e, np.array(COHORTS_OF_FOUR[1]), 1)
    algorithm.round(cohort)
    assert (cohort.cost.bytes_down / 16, cohort.cost.bytes_up / 16) == SENT[name]  # 4 clients x 4 bytes
