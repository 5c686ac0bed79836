"""Zero-shot CLIP: text features of the templates, independent of partition and seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from prompts import NAMES, SIZES, prompts
from tiny import all_clients, close, play, split_of

from fedbench.algorithms.zero_shot import ZeroShot
from fedbench.core.options import ConfigError
from fedbench.core.split import Split
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.models import clip as towers
from fedbench.simulation import evaluate


def logits(e: Engine, a: ZeroShot) -> list[torch.Tensor]:
    cohort = all_clients(e, mode="evaluation")
    return cohort.forward(a.personalized(cohort, True), a.predict, "test")


@pytest.mark.parametrize(
    "template, sentence", [(None, "a photo of a {}."), ("dataset", "a {} in a bowl."), ("{}!", "{}!")]
)
def test_predictions_are_those_of_encode_text(template: str | None, sentence: str):
    e = prompts(model={"template": "a {} in a bowl."})
    clip, tokenize = towers.load("tiny-clip", None)
    texts = tokenize([sentence.format(name.replace("_", " ")) for name in NAMES])
    T = F.normalize(clip.encode_text(texts), dim=-1)
    for i, found in enumerate(logits(e, play(e, ZeroShot(template), rounds=0))):  # type: ignore
        x = e.federation.inputs[torch.from_numpy(e.federation.splits["test"][i])]  # type: ignore
        close(found, clip.logit_scale.exp() * x @ T.T, 1e-4)


def test_nothing_is_trained_and_nothing_is_sent():
    e = prompts()
    a = play(e, ZeroShot(), rounds=0)
    before, cohort = logits(e, a), all_clients(e)  # type: ignore
    a.round(cohort)
    for found, was in zip(logits(e, a), before):  # type: ignore
        assert torch.equal(found, was)
    cost = cohort.cost
    assert (cost.bytes_down, cost.bytes_up, cost.steps, cost.samples) == (0, 0, 0, 0)


def test_it_depends_on_neither_partition_nor_seed():
    """Another cut of the same samples: the same logits, so means over clients differ and the pooled loss does not."""
    split = split_of(SIZES)
    swapped = Split(split.train.select([3, 2, 1, 0]), split.val, split.test.select([3, 2, 1, 0]))
    e, f, g = prompts(), prompts(split=swapped), prompts(seed=5)
    found = [evaluate.personal(play(x, ZeroShot(), rounds=0), x, np.arange(4), 0, True)["loss"] for x in (e, f, g)]
    np.testing.assert_allclose(found[1], found[0][::-1], rtol=1e-6)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-6)
    joined = prompts(sizes=(sum(SIZES),), split=split_of((sum(SIZES),)))
    pooled = evaluate.personal(play(joined, ZeroShot(), rounds=0), joined, np.arange(1), 0, True)["loss"]
    np.testing.assert_allclose(pooled, [np.average(found[0], weights=SIZES)], rtol=1e-5)
    assert abs(found[0].mean() - pooled[0]) > 1e-3


def test_global_numbers_are_the_personal_ones():
    """The initial row, which is no part of the method, is never scored."""
    a, e = ZeroShot(), prompts()
    play(e, a, rounds=0)
    found, same = evaluate.personal_and_global(a, e, np.arange(4), 0, True)
    assert same and found["global"] is found["personal"]
    row: Any = a.global_row()
    assert not np.allclose(found["global"]["loss"], evaluate.shared(row, e, np.arange(4), 0)["loss"])


def test_state_is_saved_with_the_sentence():
    e, f = prompts(), prompts()
    a, b = play(e, ZeroShot("a photo of a red {}."), rounds=0), play(f, ZeroShot(), rounds=0)
    b.load_state_dict(a.state_dict())
    assert torch.equal(b.text, a.text)  # type: ignore


def test_a_sentence_needs_a_place_for_the_name():
    with pytest.raises(ConfigError, match=r"algorithm.template='a photo' has no place for the class name"):
        play(prompts(), ZeroShot("a photo"), rounds=0)


def test_some_clients_of_many():
    e = prompts()
    a = play(e, ZeroShot(), rounds=0)
    some = Cohort(e, np.array([1, 3]), 0, "evaluation").forward(a.global_row(), a.predict, "test")
    for found, wanted in zip(some, [logits(e, a)[i] for i in (1, 3)]):  # type: ignore
        close(found, wanted)
