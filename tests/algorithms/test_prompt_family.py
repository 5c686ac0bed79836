"""Ordinary methods on a prompt are prompt learning: CoOp, PromptFL, its fine-tuned, proximal and split forms.

What each keeps, and that methods which know nothing of prompts run on one by configuration alone.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prompts import LENGTH, PROMPT, prompts
from tiny import SIZES, all_clients, close, compose, deployed, engine, equal, play, ragged
from torch import nn

from fedbench.algorithms._finetune import FineTuned
from fedbench.algorithms.fedamp import FedAMP
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedper import FedPer
from fedbench.algorithms.fedprox import FedProx
from fedbench.algorithms.local import Local
from fedbench.config.check import check
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.optim import SGD
from fedbench.engine.training import LocalTraining
from fedbench.simulation import build, evaluate

COHORTS = ([0, 1, 3], [1, 2], [0, 3])
FULL = {"batch_size": 100}  # one batch holds all of a client: its order does not matter


def momentum(**options: Any) -> Engine:
    return prompts(SGD(lr=0.1, momentum=0.9), **options)


def sent(e: Engine, a: Any, round: int = 0) -> tuple[float, float]:
    """Numbers that a client of a round receives and sends."""
    cohort = all_clients(e, round)
    a.round(cohort)
    return cohort.cost.bytes_down / 16, cohort.cost.bytes_up / 16


# -- CoOp ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("plan", ["vmap", "loop"])
def test_coop_of_a_client_knows_no_other(plan: str):
    """Its prompt is the same, bit for bit, beside clients with other images, and trained alone."""
    e, f, g = (momentum(epochs=3, plan=plan) for _ in range(3))
    others = np.concatenate([f.federation.splits["train"][i] for i in (0, 1, 3)])
    f.federation.inputs[torch.from_numpy(others)] *= -1  # type: ignore
    first, second = deployed(e, play(e, Local(), 1)), deployed(f, play(f, Local(), 1))
    equal(second[2], first[2])
    assert all(not torch.allclose(second[i], first[i], atol=1e-3) for i in (0, 1, 3))
    close(deployed(g, play(g, Local(), 1, [[2]]))[2], first[2], 1e-5)


def test_coop_starts_everybody_from_one_prompt_and_sends_nothing():
    e = momentum()
    a = play(e, Local(), rounds=0)
    equal(deployed(e, a), e.model.init_row().expand(4, -1).contiguous())
    assert sent(e, a) == (0, 0)


# -- PromptFL --------------------------------------------------------------------------------------------
def test_promptfl_sends_one_prompt_each_way():
    e = momentum()
    assert sent(e, play(e, FedAvg(), rounds=0)) == (PROMPT, PROMPT)


def test_promptfl_of_one_client_is_local_training():
    e, f = momentum(epochs=2), momentum(epochs=2)
    close(play(e, FedAvg(), 1, [[2]]).global_row(), deployed(f, play(f, Local(), 1, [[2]]))[2], 1e-6)


def test_promptfl_does_not_number_its_clients():
    e, f = momentum(**FULL), momentum(**FULL)
    order = [2, 0, 3, 1]
    for name, part in f.federation.splits.items():
        f.federation.splits[name] = part.select(order)
    f.federation.num_samples = f.federation.num_samples[order]
    close(play(f, FedAvg(), 2).global_row(), play(e, FedAvg(), 2).global_row(), 1e-5)


def test_promptfl_without_learning_stays():
    e = prompts(SGD(lr=0.0, momentum=0.9))
    close(play(e, FedAvg(), 2, COHORTS).global_row(), e.model.init_row(), 1e-6)


def test_promptfl_of_identical_clients_is_each_of_them():
    e, f = (momentum(sizes=(6, 6, 6), **FULL) for _ in range(2))
    for x in (e, f):
        for i in (1, 2):
            x.federation.inputs[6 * i : 6 * i + 6] = x.federation.inputs[:6]  # type: ignore
            x.federation.targets[6 * i : 6 * i + 6] = x.federation.targets[:6]
    rows = deployed(f, play(f, Local(), 1))
    for row in rows:
        close(play(e, FedAvg(), 1).global_row(), row, 1e-5)


def test_promptfl_is_scored_on_clients_that_never_took_part():
    e = momentum()
    a = play(e, FedAvg(), 1, [[1]])
    scores = evaluate.personal(a, e, np.arange(4), 0, True)["loss"]
    start = evaluate.shared(e.model.init_row(), e, np.arange(4), 0)["loss"]
    assert scores.shape == (4,) and (scores != start).all()


# -- PromptFL + FT ---------------------------------------------------------------------------------------
def tuned(epochs: int, when: str = "end") -> FineTuned:
    return FineTuned(FedAvg(), epochs, None, when, "all")


def test_no_epochs_of_tuning_is_promptfl():
    e, f = momentum(), momentum()
    equal(deployed(e, play(e, tuned(0), 2)), play(f, FedAvg(), 2).global_row().expand(4, -1).contiguous())  # type: ignore
    assert isinstance(build.algorithm(compose(["algorithm=fedavg", "finetune.epochs=0"])), FedAvg)


def test_tuning_after_a_round_gives_the_next_rounds_local_prompts():
    """With everybody in a round and full batches, since a round and an evaluation shuffle by different keys."""
    e, f = momentum(epochs=5, **FULL), momentum(epochs=5, **FULL)
    found = deployed(e, play(e, tuned(5), 2), 1)
    b = play(f, FedAvg(deploy="local"), 3)
    close(found, deployed(f, b, 2), 1e-5)
    assert not torch.allclose(found, e.model.init_row().expand(4, -1), atol=1e-3)


def test_tuned_prompts_never_return():
    e, f = momentum(), momentum()
    a, b = play(e, tuned(3, "evaluation"), 1), play(f, FedAvg(), 1)
    first, again = deployed(e, a, 0, False), deployed(e, a, 0, False)
    equal(first, again)
    assert not torch.allclose(first, a.global_row().expand(4, -1), atol=1e-3)  # type: ignore
    play(e, a, 1, begin=1)
    play(f, b, 1, begin=1)
    equal(a.global_row(), b.global_row())


@pytest.mark.parametrize(
    "when, final, trained", [("end", False, False), ("end", True, True), ("evaluation", False, True)]
)
def test_when_prompts_are_tuned(when: str, final: bool, trained: bool):
    e = momentum()
    a = play(e, tuned(2, when), 1)
    rows = deployed(e, a, 0, final)
    assert (not torch.allclose(rows, a.global_row().expand(4, -1), atol=1e-4)) == trained


# -- Prompt + FedProx ------------------------------------------------------------------------------------
def test_a_proximal_term_of_no_weight_is_promptfl():
    e, f = momentum(epochs=2), momentum(epochs=2)
    equal(play(e, FedProx(mu=0.0), 2, COHORTS).global_row(), play(f, FedAvg(), 2, COHORTS).global_row())


def test_a_heavy_proximal_term_keeps_the_prompt():
    """lr mu = 0.9: a client rests where mu (P - P_i) is its gradient, which mu to infinity leaves at P."""
    for mu in (9e3, 9e4):
        e = prompts(SGD(lr=0.9 / mu), epochs=10, **FULL)
        P = e.model.init_row()
        wanted = all_clients(e).weights @ all_clients(e).gradient(P)[0] / mu
        moved = P - play(e, FedProx(mu=mu), 1).global_row()  # type: ignore
        assert (moved - wanted).norm() < 600 / mu * wanted.norm()


def test_the_first_proximal_gradient_is_zero():
    e, f, g, h = (prompts(SGD(lr=0.1), epochs=n, **FULL) for n in (1, 1, 2, 2))
    close(play(e, FedProx(mu=5.0), 1).global_row(), play(f, FedAvg(), 1).global_row(), 1e-7)
    assert not torch.allclose(play(g, FedProx(mu=5.0), 1).global_row(), play(h, FedAvg(), 1).global_row(), atol=1e-4)


def test_the_released_proximal_term_has_no_gradient():
    e, f, g = (momentum(epochs=3) for _ in range(3))
    plain = play(f, FedAvg(), 2, COHORTS).global_row()
    equal(play(e, FedProx(mu=0.5, official_noop=True), 2, COHORTS).global_row(), plain)
    assert not torch.allclose(play(g, FedProx(mu=0.5), 2, COHORTS).global_row(), plain, atol=1e-4)


# -- Prompt + FedPer -------------------------------------------------------------------------------------
def test_all_tokens_shared_is_promptfl():
    e, f = (momentum(epochs=2, model={"shared": LENGTH}) for _ in range(2))
    a, b = play(e, FedPer(), 2, COHORTS), play(f, FedAvg(), 2, COHORTS)
    equal(deployed(e, a), b.global_row().expand(4, -1).contiguous())  # type: ignore
    assert sent(e, a, 2) == (PROMPT, PROMPT)


class FedPerWithoutBase(FedPer):
    """FedPer where nothing is shared, which is refused otherwise."""

    has_base = False


def test_no_token_shared_is_local_training_resumed_every_round():
    e, f = (momentum(epochs=2, model={"shared": 0}) for _ in range(2))
    a, b = play(e, FedPerWithoutBase(), 3, COHORTS), play(f, Local(), 3, COHORTS)
    equal(deployed(e, a), deployed(f, b))
    assert sent(e, a, 3) == (0, 0)


def test_half_of_the_tokens_shared():
    """The new shared half and everybody's own half, the first one for a client that was never sampled."""
    e = momentum(epochs=2)
    a = play(e, FedPer(), 1, [[0, 1, 3]])
    named, start = e.model.named(deployed(e, a)), e.model.named(e.model.init_row())
    assert named["shared"].shape == (4, LENGTH // 2, 64)
    for i in range(4):
        equal(named["shared"][i], named["shared"][0])
    equal(named["own"][2], start["own"])
    assert all(not torch.allclose(named["own"][i], named["own"][j], atol=1e-4) for i, j in ((0, 1), (1, 3), (0, 2)))
    assert sent(e, a, 1) == (PROMPT / 2, PROMPT / 2)


# -- Prompt + FedAMP -------------------------------------------------------------------------------------
def test_prompts_that_attract_each_other():
    """sigma auto and the cap 0.9: every mixture has at least a tenth of the client's own prompt, and a client that is
    not sampled keeps its prompt and stays in the others' mixtures."""
    e = momentum(epochs=2)
    a = play(e, FedAMP(sigma="auto", cap=0.9), 1)
    before = deployed(e, a)
    u = a.cloud(Cohort(e, np.array([0, 1]), 1), before[:2], 1.0)
    a.w[np.array([3])] = before[[3]] + 0.05
    assert all(
        not torch.allclose(x, y, atol=1e-4) for x, y in zip(a.cloud(Cohort(e, np.array([0, 1]), 1), before[:2], 1.0), u)
    )
    away = torch.stack([u[i] - before[i] for i in range(2)])
    mixed = torch.linalg.lstsq(before.T, u.T).solution.T  # [2, 4] weights
    close(mixed @ before, u, 1e-3)
    close(mixed.sum(1), torch.ones(2), 1e-2)
    assert (mixed > -1e-3).all() and (mixed[[0, 1], [0, 1]] > 0.1 - 1e-3).all() and away.abs().max() > 1e-4
    play(e, a, 1, [[0, 1]], begin=1)
    equal(deployed(e, a)[2], before[2])


# -- by configuration alone ------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


SELDOM = [
    ["local"],
    ["fedprox", "algorithm.mu=0.5"],
    ["fedamp", "algorithm.sigma=auto", "algorithm.cap=0.9"],
    *([name] for name in ("pgfed_mo", "apple", "ditto", "fedotp")),
]


@pytest.mark.parametrize(
    "method",
    [
        ["fedavg", "finetune.epochs=3", "finetune.when=end"],
        ["fedper"],
        ["pgfed"],
        *(pytest.param(words, marks=pytest.mark.slow) for words in SELDOM),
        ["pfedprompt"],
        ["zero_shot"],
    ],
    ids=lambda m: m[0],
)
def test_methods_run_on_a_prompt(method: list[str], data_dir: Path):
    """Images to scores, every client's prompt learning from its own classes except where nothing learns."""
    cfg = compose(
        [
            f"algorithm={method[0]}",
            *method[1:],
            "model=clip_prompt_tiny",
            "model.pretrained=null",
            "model.context=4",
            "dataset=digits_clip",
            "dataset.subset=0.3",
            "partition=class_disjoint",
            "partition.num_clients=5",
            "partition.shots=4",
            "sample_rate=1",
            "local.epochs=2",
            "local.batch_size=8",
            "optimizer.lr=0.1",
            "optimizer.momentum=0.9",
            f"data_dir={data_dir}",
            "hardware.executor=vmap",
            "rounds=2",
        ]
    )
    check(cfg)
    arrays = build.data(cfg)
    e = build.engine(cfg, arrays, build.partition(cfg, arrays))
    a = build.algorithm(cfg)
    play(e, a, rounds=0)
    before = evaluate.personal(a, e, np.arange(5), 0, False)["loss"]
    play(e, a, 2, begin=1)
    after = evaluate.personal(a, e, np.arange(5), 2, True)["loss"]
    if method[0] == "zero_shot":
        np.testing.assert_array_equal(after, before)
    else:
        assert np.isfinite(after).all() and after.mean() < before.mean() - 0.05


# -- fine-tuning what is deployed ------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fedotp", "pfedmoap", "fedrod"])
def test_fine_tuning_is_of_the_logits_that_are_deployed(method: str):
    """The loss of the method's own logits falls on every client, further than training of the plain loss brings it, and
    a personal prompt or gate in the row learns too."""
    names = {"fedotp": "local", "pfedmoap": "gate", "fedrod": "head"}
    if method == "fedrod":
        arrays, split = ragged(SIZES[:4])
        body = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU())
        e = engine(
            arrays,
            split,
            nn.Sequential(OrderedDict(body=body, head=nn.Linear(6, 3))),
            SGD(lr=0.1),
            columns={"base": ["body.*"], "head": ["head.*"]},
            batch_size=100,
        )
    else:
        e = prompts(SGD(lr=0.1), tokens=5 if method == "fedotp" else 0, batch_size=100)
    a = build.algorithm(compose([f"algorithm={method}"]))
    play(e, a, 3)
    tuned = FineTuned(a, 10, None, "evaluation", "all")
    cohort = Cohort(e, np.arange(4), 2, "evaluation")
    before, after = (evaluate.personal(b, e, np.arange(4), 2, True, "train")["loss"] for b in (a, tuned))
    assert (after < before).all()
    start, end = a.personalized(cohort, True), tuned.personalized(cohort, True)
    start, end = (found["theta"] if isinstance(found, dict) else found for found in (start, end))
    plain = cohort.train(start, how=LocalTraining(epochs=10, key="finetune")).theta
    assert not torch.allclose(plain, end)
    columns = e.model.columns[names[method]]
    assert (columns.take(end) != columns.take(start)).any(-1).all()
