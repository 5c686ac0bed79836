"""pFedPrompt: the effect of the clients' training features, and its invariants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from prompts import NAMES, SIZES, features, prompt, prompts
from tiny import all_clients, close, deployed, engine_on, equal, play
from torch import Tensor

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.pfedprompt import PFedPrompt
from fedbench.core.options import ConfigError
from fedbench.core.rng import RowRandom
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.federation import Federation
from fedbench.engine.optim import SGD
from fedbench.simulation import evaluate
from fedbench.tasks.base import task_for

C = len(NAMES)


def ready(e: Engine, **options: Any) -> PFedPrompt:
    return play(e, PFedPrompt(**options), rounds=0)  # type: ignore


def queries(n: int = 5, seed: int = 9) -> Tensor:
    return features(n, seed=seed)[0][None]  # type: ignore


def answers(e: Engine, a: PFedPrompt, g: Tensor, keys: Tensor, labels: list[int]) -> Tensor:
    """Logits [B, C] of one client with this memory."""
    bag = {
        "theta": a.w.expand(1, -1),
        "keys": keys[None],
        "labels": torch.tensor([labels]),
        "number": torch.arange(len(labels))[None],
    }
    return a.predict(e.model, bag, g)[0]


def own(e: Engine, client: int) -> tuple[Tensor, Tensor]:
    index = torch.from_numpy(e.federation.splits["train"][client])
    return e.federation.inputs[index], e.federation.targets[index]  # type: ignore


# -- what the memory adds --------------------------------------------------------------------------------
def test_without_weight_it_predicts_as_promptfl():
    e, f = prompts(SGD(lr=0.1, momentum=0.9)), prompts(SGD(lr=0.1, momentum=0.9))
    a, b = play(e, PFedPrompt(alpha=0.0), 2), play(f, FedAvg(), 2)
    equal(a.global_row(), b.global_row())
    for name, value in evaluate.personal(a, e, np.arange(4), 2, True).items():
        np.testing.assert_allclose(value, evaluate.personal(b, f, np.arange(4), 2, True)[name], rtol=1e-5, err_msg=name)


def test_a_key_adds_to_its_own_class_alone():
    """Adding one changes the logits of its label by (s / 100) alpha exp(-beta (1 - cosine)) and no other logit."""
    e = prompts()
    a, g, (keys, labels) = ready(e, alpha=2.0, beta=3.0), queries(), own(e, 1)
    less = answers(e, a, g, keys[:-1], labels[:-1].tolist())
    more = answers(e, a, g, keys, labels.tolist())
    label = int(labels[-1])
    others = [c for c in range(C) if c != label]
    close(more[:, others], less[:, others], 1e-6)
    wanted = e.model.module.scale / 100 * 2.0 * torch.exp(-3.0 * (1 - g[0] @ keys[-1]))
    close((more - less)[:, label], wanted, 1e-5)


def test_a_stored_image_gets_the_whole_bonus_and_any_other_less():
    e = prompts()
    a, g = ready(e, alpha=1.5), queries()
    plain = e.model.predict(a.w, g[0])
    bonus = (answers(e, a, g, g[0, :1], [2]) - plain)[:, 2]
    scale = e.model.module.scale / 100
    close(bonus[0], torch.tensor(1.5 * scale), 1e-5)
    assert (bonus[1:] < 0.99 * 1.5 * scale).all() and (bonus[1:] > 0).all()


def test_a_class_that_a_client_lacks_gets_no_bonus():
    e = prompts()
    e.federation.targets[torch.from_numpy(e.federation.splits["train"][1])] = torch.arange(12) % 2
    a = ready(e)
    x, rows = queries().expand(4, -1, -1), a.w.expand(4, -1)
    bonus = a.predict(e.model, deployed(e, a) | {"theta": rows}, x) - e.model.predict(rows, x)
    has = torch.from_numpy(e.federation.label_counts > 0)  # [4, C]
    assert has[1].tolist() == [True, True, False, False] and has.any(0).all()
    for i in range(4):
        close(bonus[i][:, ~has[i]], torch.zeros(5, int((~has[i]).sum())), 2e-6)
        assert (bonus[i][:, has[i]] > 1e-4).all()


def test_every_client_looks_up_its_own_images_only():
    """Scores of ragged clients side by side are those of each alone, with its own images and no padding."""
    e = prompts(SGD(lr=0.1), eval_batch=4)
    a = play(e, PFedPrompt(alpha=20.0), 1)
    found = Cohort(e, np.arange(4), 1, "evaluation").forward(deployed(e, a), a.predict, "test")
    plain = Cohort(e, np.arange(4), 1, "evaluation").forward(a.w, None, "test")
    for i in range(4):
        keys, labels = own(e, i)
        test = torch.from_numpy(e.federation.splits["test"][i])
        wanted = answers(e, a, e.federation.inputs[test][None], keys, labels.tolist())  # type: ignore
        close(found[i], wanted, 1e-4)
        assert not torch.allclose(found[i], plain[i], atol=1e-2)


def test_a_heavy_memory_names_only_classes_that_the_client_has():
    e = prompts(sizes=(8, 8))
    for i in range(2):
        for split in ("train", "test"):
            e.federation.targets[e.federation.splits[split][i]] = torch.arange(8) % 2 + 2 * i
    a = ready(e, alpha=1e4)
    guesses = Cohort(e, np.arange(2), 0, "evaluation").forward(deployed(e, a), a.predict, "test")
    assert all((guess.argmax(1) // 2 == i).all() for i, guess in enumerate(guesses))


# -- what it leaves alone --------------------------------------------------------------------------------
def test_the_memory_is_never_sent():
    e, f = prompts(), prompts()
    mine, theirs = all_clients(e), all_clients(f)
    ready(e).round(mine)
    play(f, FedAvg(), rounds=0).round(theirs)
    assert (mine.cost.bytes_up, mine.cost.bytes_down) == (theirs.cost.bytes_up, theirs.cost.bytes_down)
    assert mine.cost.bytes_up == 4 * 4 * 64 * 4


def test_training_is_promptfls():
    e, f = prompts(), prompts()
    a, b = play(e, PFedPrompt(alpha=5.0), 2), play(f, FedAvg(), 2)
    equal(a.global_row(), b.global_row())
    equal(deployed(e, a)["theta"], a.global_row())


def test_numbers_of_the_whole_are_the_prompts_alone():
    e = prompts()
    a = ready(e, alpha=50.0)
    plain = evaluate.shared(e.model.init_row(), e, np.arange(4), 0)
    np.testing.assert_array_equal(evaluate.shared(a.global_row(), e, np.arange(4), 0)["loss"], plain["loss"])
    assert not np.allclose(evaluate.personal(a, e, np.arange(4), 0, True)["loss"], plain["loss"])


def test_keys_are_what_an_evaluation_sees():
    """Training augments images; the stored features are of the original ones."""
    e = prompts()
    e.federation.augment = lambda x, y, random: (F.normalize(x + random.normal(*x.shape[1:]), dim=-1), y)
    a = ready(e)
    bag = a.training_features(all_clients(e))
    for i in range(4):
        keys, labels = own(e, i)
        equal(bag["keys"][i, : len(keys)], keys)
        equal(bag["labels"][i, : len(keys)], labels)
        assert bag["number"][i].tolist() == [*e.federation.splits["train"][i]] + [-1] * (max(SIZES) - len(keys))
    assert isinstance(e.federation.augment(queries(), torch.zeros(4), RowRandom(torch.tensor([1])))[0], Tensor)


def test_it_needs_single_labels():
    x, y = features(8)
    parts = prompts(sizes=(2, 2)).federation.splits
    many = Federation(x, F.one_hot(y, C).float(), parts, task_for("multilabel")(), C)
    with pytest.raises(ConfigError, match="algorithm=pfedprompt needs one class per sample, not task=multilabel"):
        ready(engine_on(many, prompt()))
