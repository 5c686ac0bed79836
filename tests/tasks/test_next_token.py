"""Next tokens: losses of tokens with equal weights, perplexity by hand, masks and padding, whole runs."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from language import LENGTH, VOCAB, language
from tiny import CPU, all_clients, close, seeded

from fedbench.algorithms.fedper import FedPer
from fedbench.commands import main
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort
from fedbench.engine.federation import Federation
from fedbench.models.gpt_tiny import GPTTiny
from fedbench.tasks.base import task_for
from fedbench.tasks.next_token import NextToken
from fedbench.testing._federation import engine_on

P = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]])  # probabilities of three tokens, at two kinds of positions
Y = torch.tensor([[0, 1, -1, -1], [1, -1, -1, -1], [0, 0, 1, 2], [-1, -1, -1, -1]])  # [n, T]
KIND = torch.tensor([[0, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1], [1, 1, 1, 1]])
# tokens with a target: sample 0: 1/2, 3/4; sample 1: 1/4; sample 2: 1/8, 1/2, 1/4, 1/8; sample 3: none
LOSSES = [-np.log(0.5 * 0.75), -np.log(0.25), -np.log(0.125 * 0.5 * 0.25 * 0.125), 0.0]


def training_data(targets: torch.Tensor, train: np.ndarray) -> Any:
    """What `setup` reads."""
    return SimpleNamespace(targets=targets, splits={"train": SimpleNamespace(indices=train)})


def test_every_token_has_the_same_weight() -> None:
    """Samples 0 and 1 train: 3 target tokens, 1.5 on average."""
    task = NextToken()
    task.setup(training_data(Y, np.array([0, 1])))
    assert task.tokens_per_sample == 1.5
    logits = P.log()[KIND]  # [n, T, C]
    close(task.loss(logits, Y), torch.tensor(LOSSES).float() / 1.5)
    close(task.loss(logits + 5, Y), torch.tensor(LOSSES).float() / 1.5)
    leaf = logits.clone().requires_grad_()
    task.loss(leaf, Y).sum().backward()
    assert leaf.grad is not None and not leaf.grad[Y == -1].any() and bool(leaf.grad[Y != -1].abs().sum(-1).all())


def test_perplexity_is_of_all_tokens_of_a_client() -> None:
    """Client 0 has samples 0 and 1, client 1 sample 2, client 2 sample 3 without targets, client 3 none."""
    task, offsets = NextToken(), np.array([0, 2, 3, 4, 4])
    statistics = {k: v[0] for k, v in task.sample_statistics(P.log()[KIND][None], Y[None]).items()}
    scores = task.scores(statistics, offsets)
    expected = [(1 / (0.5 * 0.75 * 0.25)) ** (1 / 3), (8 * 2 * 4 * 8) ** (1 / 4), np.nan, np.nan]
    np.testing.assert_allclose(scores["perplexity"], expected, rtol=1e-6)
    mean_of_samples = np.exp([LOSSES[0] / 2, LOSSES[1]]).mean()
    assert abs(scores["perplexity"][0] - mean_of_samples) > 0.5
    # the most probable token: sample 0: 0 and 1, both correct; sample 1: 0, wrong; sample 2: 1 0 0 1, one correct
    np.testing.assert_allclose(scores["accuracy"], [2 / 3, 1 / 4, np.nan, np.nan])
    np.testing.assert_allclose(scores["loss"], [(LOSSES[0] + LOSSES[1]) / 2, LOSSES[2], 0, np.nan], rtol=1e-6)


def test_tokens_that_a_client_does_not_have_are_never_predicted() -> None:
    task = NextToken()
    logits, y = torch.zeros(2, 1, 2, 3), torch.tensor([[[0, 1]], [[0, 2]]])
    logits[..., 1] = 9
    mask = torch.tensor([[True, True, True], [True, False, True]])
    loss = task.loss(logits, y, mask)
    close(loss[1], torch.tensor([2 * np.log(2)]).float())
    assert float(loss[0]) > 8
    assert task.sample_statistics(logits, y, mask)["correct"].tolist() == [[1], [1]]


def test_a_perplexity_that_is_too_large_is_infinite() -> None:
    scores = NextToken().scores(
        {name: torch.tensor([1e6]) for name in ("loss", "token_loss", "correct")} | {"tokens": torch.tensor([2])},
        np.array([0, 1]),
    )
    assert scores["perplexity"].tolist() == [float("inf")]


def test_targets_that_are_no_tokens_are_refused() -> None:
    task = NextToken()
    task.check(np.array([[0, -1], [2, 1]]), 3)
    for targets, words in (
        (np.array([0, 1]), r"dtype int64 and shape \(2,\), expected int64 \[samples, tokens\]"),
        (np.zeros((2, 2), np.float32), "dtype float32"),
        (np.array([[0, 3]]), r"span 0 to 3, expected -1 \(no target\) to 2"),
        (np.array([[-1, -1]]), "span -1 to -1"),
        (np.array([[0, -2]]), "span -2 to 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            task.check(targets, 3)
    with pytest.raises(ConfigError, match="no training sample has a target token"):
        task.setup(training_data(Y, np.array([3])))
    assert task_for("next_token") is NextToken


def test_padding_and_prompts_change_nothing() -> None:
    """Other tokens behind the last target, in all clients, train the same rows."""
    rows = []
    for filler in (0, 5):
        arrays, split = language()
        text = arrays.parts()["text"]
        is_behind = (arrays.targets[:, ::-1] == -1).cumprod(1)[:, ::-1] == 1  # [n, T]
        arrays.inputs = {"text": np.where(is_behind, filler, text)}
        built = Federation.build(arrays, split, CPU)
        built.task.setup(built)
        module = seeded(lambda: GPTTiny({"text": (LENGTH,)}, VOCAB, width=8, heads=2, depth=1))
        engine = engine_on(built, module, batch_size=4)
        rows.append(all_clients(engine).train(engine.model.init_row()).theta)
    close(rows[0], rows[1])


# -- runs ------------------------------------------------------------------------------------------------
WORDS = [
    *("dataset=shakespeare_lm", "dataset.length=16", "dataset.min_tokens=6000", "dataset.subset=0.2"),
    *("partition=domain", "tracking=disabled", "sample_rate=0.5"),
    *("model=gpt_tiny", "model.width=16", "model.depth=1", "optimizer=adam", "optimizer.lr=0.01", "local.epochs=1"),
]


def finished(folder: Path, *words: str) -> Path:
    assert main([*WORDS, *words, "hardware.executor=vmap", f"hydra.run.dir={folder}"]) == 0
    return folder


def test_a_run_learns_roles_and_records_perplexities(tmp_path: Path) -> None:
    """auto chooses the task; personal and global perplexities are in the tables, with the clients' own in one."""
    run = finished(tmp_path / "run", "algorithm=ditto", "rounds=4")
    summary = json.loads((run / "summary.json").read_text())
    with open(run / "metrics.csv") as file:
        rounds = list(csv.DictReader(file))
    first, last = (float(rounds[i]["personal/perplexity"]) for i in (0, -1))
    assert 1 < last < 0.9 * first < 80
    assert {"global/perplexity", "personal/perplexity_worst", "personal/accuracy"} <= rounds[0].keys()
    assert summary["last"]["personal/perplexity"] == pytest.approx(last)
    with open(run / "clients.csv") as file:
        values = [float(row["personal/perplexity"]) for row in csv.DictReader(file) if row["round"] == "4"]
    assert np.mean(values) == pytest.approx(last, rel=1e-6)


@pytest.mark.parametrize(
    "words",
    [
        ["compression=topk", "compression.share=0.2", "system.dropout=0.3"],
        ["new_clients.count=2", "new_clients.epochs=1"],
        ["privacy.epsilon=50", "privacy.clip=1"],
    ],
)
def test_other_parts_of_a_run_work(tmp_path: Path, words: list[str]) -> None:
    run = finished(tmp_path / "run", "algorithm=fedavg", "rounds=1", *words)
    assert np.isfinite(json.loads((run / "summary.json").read_text())["last"]["personal/perplexity"])


@pytest.mark.slow
def test_a_killed_run_with_compression_resumes_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["algorithm=fedper", "rounds=3", "compression=topk", "compression.share=0.2", "model.dropout=0.1"]
    whole, original = finished(tmp_path / "whole", *words), FedPer.round

    def interrupted(self: FedPer, cohort: Cohort) -> None:
        if cohort.round == 2:
            raise KeyboardInterrupt
        original(self, cohort)

    with monkeypatch.context() as patch:
        patch.setattr(FedPer, "round", interrupted)
        assert main([*WORDS, *words, "hardware.executor=vmap", f"hydra.run.dir={tmp_path / 'stopped'}"]) == 130
    assert main([f"resume={tmp_path / 'stopped'}"]) == 0
    for name in ("metrics.csv", "clients.csv"):
        assert (tmp_path / "stopped" / name).read_bytes() == (whole / name).read_bytes()
