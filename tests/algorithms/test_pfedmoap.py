"""pFedMoAP on a random tiny CLIP and random features: the gate's algebra, the pool, one update against torch.optim,
who deploys what, what travels."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from tiny import all_clients, arrays_of, close, compose, deployed, engine_on, equal, play, seeded, split_of
from torch import Tensor

from fedbench.algorithms._finetune import FineTuned
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.pfedmoap import PFedMoAP
from fedbench.channel.privacy import Privacy
from fedbench.config.check import check
from fedbench.core.options import ConfigError
from fedbench.data._files import read_npz
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.federation import Federation
from fedbench.engine.optim import SGD
from fedbench.models.clip_prompt import CLIPPrompt
from fedbench.nn.flat import FlatModel
from fedbench.report.figures_command import main
from fedbench.simulation import evaluate, simulator

NAMES = ["red", "blue circle", "dog", "green tree", "ice"]
SIZES = (7, 12, 5, 9, 4, 8)
C, D, LENGTH = len(NAMES), 64, 4
PROMPT = 4 * LENGTH * 64  # bytes of one prompt


def world(sizes: Sequence[int] = SIZES, plan: str = "vmap", seed: int = 0, **options: Any) -> Engine:
    """Features around a mean for each class, a random CLIP whose logits are 20 times a cosine."""
    rng, split = np.random.default_rng(seed), split_of(sizes, [3] * len(sizes))
    n = sum(len(r.indices) for r in (split.train, split.test))
    y = rng.integers(0, C, n)
    x = rng.normal(size=(C, D))[y] + 0.5 * rng.normal(size=(n, D))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    clip = seeded(lambda: CLIPPrompt((D,), C, NAMES, backbone="tiny-clip", pretrained=None, context=LENGTH))
    clip.scale = 20.0
    model = FlatModel(clip, {"base": ["shared"], "head": ["own"], "prompt": ["shared", "own"]})
    options = {"optimizer": SGD(0.5, momentum=0.9, weight_decay=0.01), "batch_size": 20, "epochs": 2} | options
    return engine_on(Federation.build(arrays_of(x, y, C), split), model, plan=plan, **options)


def played(rounds: int = 2, cohorts: Any = None, **options: Any) -> tuple[Engine, PFedMoAP]:
    e = world()
    method = PFedMoAP(**options)
    play(e, method, rounds, cohorts)
    return e, method


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ready(**options: Any) -> tuple[FlatModel, PFedMoAP]:
    """A method that has played no round, and its model."""
    e = world()
    return e.model, play(e, PFedMoAP(**options), 0)  # type: ignore[return-value]


def some_gates(method: PFedMoAP) -> Tensor:
    """Three rows with P_g and random gates."""
    return method.gate_columns.put(method.w, draws(3, method.gate_columns.size) / 8)


def mixed(
    model: FlatModel, method: PFedMoAP, X: Tensor, image: Tensor, count: int | None = None
) -> tuple[Tensor, Tensor]:
    """T_MoE [C, D] and weights [E] of the first of some_gates on image [D]; X [E, C, D]: the local expert's text, then
    the others'."""
    p = model.named(some_gates(method)[:1])
    many = torch.tensor([[len(X) - 1 if count is None else count]])
    T, a = method.mix(p, image[None, None], X[None, 0], X[None, 1:], many)
    return T[0, 0], a[0, 0]


def unit(*shape: int, seed: int = 0) -> Tensor:
    return F.normalize(draws(*shape, seed=seed), dim=-1)


# -- the gate --------------------------------------------------------------------------------------------
def test_the_attention_gate_does_not_care_for_the_order_of_experts():
    """Not even for the local one's place: what stands first among X is an expert like the others."""
    (model, method), image = ready(), unit(D)
    X = unit(6, C, D, seed=1)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    T, a = mixed(model, method, X, image)
    T2, a2 = mixed(model, method, X[order], image)
    close(T2, T)
    close(a2, a[order])
    assert a.std() > 1e-3


def test_attention_is_a_share_and_missing_experts_have_none():
    (model, method), X = ready(), unit(6, C, D, seed=1)
    T, a = mixed(model, method, X, unit(D), count=2)
    close(a.sum(), torch.tensor(1.0))
    assert (a[3:] == 0).all() and (a[:3] > 0.01).all()
    other = torch.cat([X[:3], unit(3, C, D, seed=5)])
    equal(mixed(model, method, other, unit(D), count=2)[0], T)


def test_experts_twice_count_as_once():
    (model, method), X = ready(num_experts=3), unit(3, C, D, seed=1)
    T, a = mixed(model, method, X, unit(D))
    method.num_others = 5
    T2, a2 = mixed(model, method, torch.cat([X, X]), unit(D))
    close(T2, T)
    close(a2[:3] + a2[3:], a)


def test_the_local_expert_alone_is_the_same_for_every_image():
    (model, method), text = ready(num_experts=1), unit(1, C, D, seed=1)
    (T, a), (T2, _) = (mixed(model, method, text, unit(D, seed=s)) for s in (2, 3))
    equal(T, T2)
    equal(a, torch.ones(1))


def by_hand(gate: dict[str, Tensor], image: Tensor, X: Tensor, pooled: int = 1) -> tuple[Tensor, Tensor]:
    """T_MoE [B, C, .] and weights [B, E] on images [B, D] and experts X [E, C, D]: head by head, slices of the width,
    w_h = softmax(10 <q_h, k_h>); or, linear, softmax(W pool(I) + b)."""
    if "gate.weight" in gate:
        w = F.linear(image[:, ::pooled], gate["gate.weight"], gate["gate.bias"])[:, : len(X)].softmax(1)
        return torch.einsum("be,ecd->bcd", w, X), w

    def layer(name: str, x: Tensor) -> Tensor:
        return F.linear(x, gate[f"gate.{name}.weight"], gate[f"gate.{name}.bias"])

    X = X[..., ::pooled]
    q, key, value = layer("query", image[:, ::pooled]), layer("key", X), layer("value", X)
    heads, shares = [], torch.zeros(len(image), len(X))
    for part in torch.arange(X.shape[2]).chunk(8):
        w = (10 * torch.einsum("bd,ecd->bec", q[:, part], key[..., part])).softmax(1)
        heads.append(torch.einsum("bec,ecd->bcd", w, value[..., part]))
        shares = shares + w.mean(2) / 8
    return layer("out", torch.cat(heads, 2)), shares


@pytest.mark.parametrize("gating", ["attention", "linear"])
def test_the_gate_by_hand(gating: str):
    """Experts that are missing lose their share to the others; for the linear gate they have places."""
    (model, method), image, X = ready(gating=gating), unit(D), unit(6, C, D, seed=1)
    gate = {n: t[0] for n, t in model.named(some_gates(method)).items()}
    for count in (5, 2):
        (T, a), (T2, a2) = mixed(model, method, X, image, count), by_hand(gate, image[None], X[: count + 1])
        close(T, T2[0])
        close(a[: count + 1], a2[0])
    turned = mixed(model, method, X.flip(0), image)[0]
    assert torch.allclose(turned, mixed(model, method, X, image)[0], atol=1e-5) == (gating == "attention")


def test_the_size_of_the_gate():
    """Table 9: 4 (d^2 + d)."""
    sizes = {
        width: sum(p.numel() for p in gate.parameters())
        for width in (32, 64, 128, 256, 512, 1024)
        if (gate := of_width(width).new_gate())
    }
    assert sizes == {32: 4224, 64: 16640, 128: 66048, 256: 263168, 512: 1050624, 1024: 4198400}
    assert ready(d_feature=16)[1].gate_columns.size == 4 * (16 * 16 + 16)
    assert ready(gating="linear", num_experts=3, d_feature=16)[1].gate_columns.size == 3 * 17
    assert PFedMoAP().width(1024) == 128 and PFedMoAP().width(64) == 64 and PFedMoAP(d_feature=32).width(1024) == 32


def of_width(width: int) -> PFedMoAP:
    method = PFedMoAP()
    method.d = width
    return method


def test_pooling_takes_every_nth_coordinate():
    z = torch.arange(64.0).expand(2, 64)
    equal(ready(d_feature=16)[1].pooled(z), z[:, ::4])


@pytest.mark.parametrize("gating", ["attention", "linear"])
def test_logits_by_hand(gating: str):
    """s <pool(I), T_MoE> + lam s <I, T_L>; the linear gate compares in all D coordinates."""
    model, method = ready(gating=gating, d_feature=16, lam=0.3)
    rows, images, width = some_gates(method), unit(3, 7, D), 16 if gating == "attention" else D
    experts, count = unit(3, 5, C, width, seed=1), torch.tensor([[5], [2], [-1]])
    found = method.logits(model, rows, images, experts, count)
    local = model.predict(rows, images)
    text = method.clip.text(method.clip.context(model.named(rows)))
    T = method.mix(model.named(rows), images, text, experts, count)[0]
    compared = images[..., ::4] if gating == "attention" else images
    product = torch.einsum("kbd,kbcd->kbc", compared, T)
    close(found[:2], (20 * product + 0.3 * local)[:2])
    close(found[2], local[2])


def test_without_the_gates_output_only_the_own_prompt_speaks():
    """W_o = 0, b_o = 0: lam times PromptFL's logits exactly; a large lam: its choice of class."""
    (model, method), images = ready(), unit(3, 7, D)
    rows, experts = some_gates(method), unit(3, 5, C, D, seed=1)
    rows = method.prompt_columns.put(rows, draws(3, method.prompt_columns.size, seed=4))
    count = torch.full((3, 1), 5)
    local = model.predict(rows, images)
    method.lam = 1e5
    equal(method.logits(model, rows, images, experts, count).argmax(-1), local.argmax(-1))
    method.lam = 0.5
    assert (method.logits(model, rows, images, experts, count) - 0.5 * local).abs().max() > 1
    for name in ("gate.out.weight", "gate.out.bias"):
        model.named(rows)[name].zero_()
    equal(method.logits(model, rows, images, experts, count), 0.5 * local)


# -- one update against torch.optim ----------------------------------------------------------------------
@pytest.mark.parametrize("gating", ["attention", "linear"])
@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_a_round_is_sgd_on_prompt_and_gate_at_two_rates(gating: str, lam: float):
    """Round 2, client by client: the loss through both terms (lam = 0: the prompt learns through the gate), experts
    fixed; the schedule halves the prompt's rate, not the gate's."""
    e = world(optimizer=SGD(0.5, momentum=0.9, weight_decay=0.01, schedule={"name": "exponential", "gamma": 0.5}))
    method = PFedMoAP(num_experts=4, lam=lam, gate_lr=0.3, gating=gating, d_feature=32)
    play(e, method, 1)
    clip, prompt, gate = method.clip, method.prompt_columns, method.gate_columns
    w, first_gate, pool = method.w, method.gate[np.arange(6)], method.pool.whole()
    experts = clip.text(pool.view(6, LENGTH, 64))
    play(e, method, 1, begin=1)
    equal(first_gate, gate.take(w).expand(6, -1))
    for i in range(6):
        near = ((pool - pool[i]).square().sum(1) + 1e9 * (torch.arange(6) == i)).argsort()[:3]
        P, g = prompt.take(w).clone().requires_grad_(), gate.take(w).clone().requires_grad_()
        own = torch.optim.SGD(
            [{"params": [P], "lr": 0.25}, {"params": [g], "lr": 0.3}], momentum=0.9, weight_decay=0.01
        )
        samples = torch.from_numpy(e.federation.splits["train"][i])
        x, y = e.federation.inputs[samples], e.federation.targets[samples]
        for _ in range(2):  # full batches
            T = clip.text(P.view(1, LENGTH, 64))
            named = {n: t[0] for n, t in e.model.named(torch.cat([P, g])[None]).items()}
            T_MoE = by_hand(named, x, torch.cat([T, experts[near]]), pooled=2)[0]
            shown = x[:, ::2] if gating == "attention" else x
            logits = 20 * torch.einsum("bd,bcd->bc", shown, T_MoE) + lam * 20 * x @ T[0].T
            own.zero_grad()
            F.cross_entropy(logits, y).backward()
            own.step()
        close(method.prompt[np.array([i])][0], P.detach(), 2e-5)
        close(method.gate[np.array([i])][0], g.detach(), 2e-5)
        assert (P - prompt.take(w)).abs().max() > 1e-3 and (g - gate.take(w)).abs().max() > 1e-3
    close(prompt.take(method.w), torch.tensor(SIZES) / sum(SIZES) @ method.prompt.whole())


def test_round_one_is_promptfl():
    """Bit for bit: local prompts, which enter the pool, and their average; no gate is trained."""
    method, other = played(1)[1], world()
    average = play(other, FedAvg(), 1)
    equal(method.prompt_columns.take(method.w), average.w)
    equal(method.pool.whole(), all_clients(other).train(other.model.init_row()).theta)
    equal(method.pool.whole(), method.prompt.whole())
    assert not method.gate.has(np.arange(6)).any()


def test_a_first_timer_beside_others_trains_the_prompt_alone():
    e, method = played(1, [[0, 1, 2]])
    w, start = method.prompt_columns.take(method.w), method.w
    play(e, method, 1, [[1, 2, 4]], begin=1)
    alone = Cohort(e, np.array([4]), 1).train(start, columns=method.prompt_columns).theta
    close(method.prompt[np.array([4])], method.prompt_columns.take(alone), 1e-6)
    assert method.gate.touched().tolist() == [1, 2] and method.prompt.touched().tolist() == [0, 1, 2, 4]
    assert not torch.allclose(method.prompt[np.array([1])][0], w, atol=1e-3)
    close(method.prompt_columns.take(method.w), torch.tensor([12, 5, 4]) / 21 @ method.prompt[np.array([1, 2, 4])])


def test_alone_in_the_pool_there_is_nothing_to_mix():
    """The only client so far comes again: PromptFL; with num_experts = 1 its gate mixes the own expert."""
    method = played(2, [[3], [3]])[1]
    again = play(other := world(), FedAvg(), 2, [[3], [3]])
    close(method.prompt_columns.take(method.w), again.w, 1e-6)
    assert other.federation.num_clients == 6 and not len(method.gate.touched())
    assert played(2, [[3], [3]], num_experts=1)[1].gate.touched().tolist() == [3]


def test_the_order_of_the_cohort_changes_nothing():
    cohorts = [[0, 1, 3, 5], [1, 2, 3, 4], [0, 2, 4, 5]]
    one, other = played(3, cohorts)[1], played(3, [c[::-1] for c in cohorts])[1]
    for name in ("prompt", "gate", "pool", "text"):
        close(getattr(one, name).whole(), getattr(other, name).whole(), 1e-4)
    close(one.w, other.w, 1e-4)


# -- pool and experts ------------------------------------------------------------------------------------
def test_the_pool_is_refreshed_for_the_cohort_alone():
    e, method = played(1, [[0, 1, 3]])
    seen = {0, 1, 3}
    for r, ids in enumerate([[1, 2], [0, 2, 5]], 1):
        before = {n: getattr(method, n).whole() for n in ("pool", "text", "prompt", "gate")}
        play(e, method, 1, [ids], begin=r)
        seen |= set(ids)
        assert set(method.pool.touched().tolist()) == seen == set(method.text.touched().tolist())
        others = np.setdiff1d(np.arange(6), ids)
        for name, rows in before.items():
            equal(getattr(method, name)[others], rows[others])
        assert (method.pool[np.array(ids)] != before["pool"][ids]).any(1).all()
        close(method.text[np.array(ids)], method.clip.text(method.pool[np.array(ids)].view(-1, LENGTH, 64)), 1e-6)


def test_text_features_of_many_prompts_are_those_of_each(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fedbench.algorithms.pfedmoap.ENCODED_AT_ONCE", 4)
    method = played(1)[1]
    close(method.text.whole(), method.clip.text(method.pool.whole().view(6, LENGTH, 64)), 1e-6)


def test_experts_are_the_nearest_others_of_the_round_before():
    """By brute force; in a pool of 4, a client has 3 others."""
    for num_experts, cohorts in ((3, [[0, 1, 2, 3, 4, 5], [0, 2, 5]]), (6, [[0, 2, 3, 5], [0, 2, 5]])):
        e, method = played(1, cohorts[:1], num_experts=num_experts)
        pool, text, members = method.pool.whole(), method.text.whole(), method.pool.touched().tolist()
        play(e, method, 1, cohorts[1:], begin=1)
        for at, i in enumerate(cohorts[1]):
            by_distance = sorted((float((pool[i] - pool[j]).norm()), j) for j in members if j != i)
            Q = [j for _, j in by_distance[: num_experts - 1]]
            assert int(method.count[at]) == len(Q) == min(num_experts - 1, len(members) - 1) and i not in Q
            equal(method.experts[at, : len(Q)], text[Q])
            assert not method.experts.requires_grad


def test_ties_go_to_the_lower_id():
    e, method = played(1)
    method.pool[np.arange(6)] = torch.tensor([0.0, 1, -1, 1, 5, -1])[:, None].expand(6, LENGTH * 64)
    Q = method.choose(Cohort(e, np.array([0, 3]), 1), np.arange(6), 4)
    assert Q.tolist() == [[1, 2, 3, 5], [1, 0, 2, 5]]


def test_random_experts_are_drawn_anew_for_each_client_and_round():
    e, method = played(1, choice="random", num_experts=4)
    drawn = [method.choose(Cohort(e, np.arange(6), r), np.arange(6), 3) for r in range(40)]
    equal(drawn[0], method.choose(Cohort(e, np.arange(6), 0), np.arange(6), 3))
    some = method.choose(Cohort(e, np.array([1, 4]), 0), np.arange(6), 3)
    equal(some, drawn[0][[1, 4]])  # keyed by the client
    often = torch.stack([torch.bincount(torch.stack(drawn)[:, i].flatten(), minlength=6) for i in range(6)])
    assert (often.diagonal() == 0).all() and all(len(set(q)) == 3 for Q in drawn for q in Q.tolist())
    assert often[~torch.eye(6, dtype=torch.bool)].min() >= 12  # of 40, 24 on average


# -- what is deployed --------------------------------------------------------------------------------------
def test_who_deploys_what():
    """After cohorts 0 1 2 3, 0 1 2, 0 4: 0 as it trained, 4 a prompt without a gate; 1 and 2 what they stored, with
    experts of the pool as it is now; 3, there but once, its prompt alone; 5, never, P_g."""
    e, method = played(2, [[0, 1, 2, 3], [0, 1, 2]], num_experts=3)
    text_before, pool_before = method.text.whole(), method.pool.whole()
    play(e, method, 1, [[0, 4]], begin=2)
    bag = deployed(e, method, 2)
    assert bag["count"][:, 0].tolist() == [2, 2, 2, -1, -1, -1]
    prompts = method.prompt_columns.take(bag["theta"])
    equal(prompts[:5], method.prompt.whole()[:5])
    equal(prompts[5], method.prompt_columns.take(method.w))
    equal(method.gate_columns.take(bag["theta"]), method.gate.whole())

    def nearest(i: int, pool: Tensor, members: list[int]) -> list[int]:
        return sorted((j for j in members if j != i), key=lambda j: float((pool[i] - pool[j]).norm()))[:2]

    equal(bag["experts"][0], text_before[nearest(0, pool_before, [0, 1, 2, 3])])
    assert (method.pool.whole()[0] != pool_before[0]).any()
    for i in (1, 2):
        equal(bag["experts"][i], method.text.whole()[nearest(i, method.pool.whole(), [0, 1, 2, 3, 4])])
    some = method.personalized(Cohort(e, np.array([1, 4]), 2, "evaluation"), True)
    close(some, {n: v[[1, 4]] for n, v in bag.items()}, 1e-6)
    x = unit(6, 4, D)
    found, local = method.predict(e.model, bag, x), e.model.predict(bag["theta"], x)
    close(found[3:], local[3:], 1e-6)
    assert ((found - local)[:3].abs().amax((1, 2)) > 0.01).all()
    equal(method.global_row(), method.w)


def test_evaluation_scores_the_mixture_in_batches():
    e, method = played(2)
    scores = evaluate.personal(method, e, np.arange(6), 1, True)
    bag, part = deployed(e, method, 1), e.federation.splits["test"]
    for i in range(6):
        own, samples = {n: v[i : i + 1] for n, v in bag.items()}, torch.from_numpy(part[i])
        logits = method.predict(e.model, own, e.federation.inputs[samples][None])[0]
        close(torch.tensor(scores["loss"][i]), F.cross_entropy(logits, e.federation.targets[samples]).double(), 1e-5)


# -- what travels ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("aggregate", [False, True])
def test_bytes(aggregate: bool):
    """P_g to all, K others' prompts to those who have an entry, prompts back: nothing of the gate, unless it is
    averaged, and then to and from those who use it."""
    e, method = played(0, num_experts=3, aggregate_gate=aggregate)
    gate = 4 * method.gate_columns.size * aggregate
    expected = [
        (3 * PROMPT, 3 * PROMPT),
        (3 * PROMPT + 2 * (2 * PROMPT + gate), 3 * PROMPT + 2 * gate),
        (2 * PROMPT + 1 * (2 * PROMPT + gate), 2 * PROMPT + 1 * gate),
    ]
    for r, ids in enumerate([[0, 1, 2], [1, 2, 3], [1, 5]]):
        cohort = Cohort(e, np.array(ids), r)
        method.round(cohort)
        assert (cohort.cost.bytes_down, cohort.cost.bytes_up) == expected[r]


def test_an_averaged_gate_is_where_all_start():
    e, method = played(2, [[0, 1, 2], [1, 2, 3]], aggregate_gate=True)
    gate = method.gate_columns.take(method.w)
    close(gate, torch.tensor([12, 5]) / 17 @ method.gate[np.array([1, 2])])
    e, method.gate_lr = replace(e, optimizer=SGD(1e-30)), 1e-30
    play(e, method, 1, [[0, 1, 3]], begin=2)
    equal(method.gate[np.array([0, 1, 3])], gate.expand(3, -1))


def test_a_gate_of_ones_own_is_where_a_client_goes_on():
    e, method = played(2)
    own = method.gate.whole()
    e, method.gate_lr = replace(e, optimizer=SGD(1e-30)), 1e-30
    play(e, method, 1, begin=2)
    equal(method.gate.whole(), own)
    assert (own[0] != own[1]).any()
    equal(method.gate_columns.take(method.w), method.gate.default)


# -- privacy ---------------------------------------------------------------------------------------------
def in_private(epsilon: float, clip: float | None, rounds: int, **options: Any) -> PFedMoAP:
    e = world()
    e = replace(e, privacy=Privacy(e.rows, epsilon, 0.05, clip))
    return play(e, PFedMoAP(**options), rounds)  # type: ignore[return-value]


def test_without_noise_and_clip_privacy_changes_nothing():
    one, other = played(3)[1], in_private(math.inf, None, 3)
    equal(other.state_dict(), one.state_dict())
    for name in ("prompt", "gate", "pool", "text"):
        equal(getattr(other, name).whole(), getattr(one, name).whole())


def test_noise_is_on_what_is_uploaded_and_nowhere_else():
    """sigma = C sqrt(2 ln 25) / epsilon on the pool and so on P_g and on the experts; a client keeps its prompt."""
    method = in_private(25, 1.0, 1)
    noise = method.pool.whole() - method.prompt.whole()
    assert abs(float(noise.std()) / 0.10149 - 1) < 0.06 and abs(float(noise.mean())) < 0.01
    close(method.prompt_columns.take(method.w), torch.tensor(SIZES) / sum(SIZES) @ method.pool.whole())
    close(method.text.whole(), method.clip.text(method.pool.whole().view(6, LENGTH, 64)), 1e-6)


@pytest.mark.parametrize("aggregate", [False, True])
def test_the_gate_is_clipped_only_if_it_is_sent(aggregate: bool):
    """Round 2, one step, under a clip at 1e-6: the prompt stays where it is, the gate as far as it goes without."""
    moved = []
    for clip in (None, 1e-6):
        e = world()
        method = play(e, PFedMoAP(aggregate_gate=aggregate), 1)
        e = replace(e, privacy=Privacy(e.rows, math.inf, 0.05, clip), epochs=1, optimizer=SGD(0.5))
        w = method.w
        play(e, method, 1, begin=1)
        moved.append(
            [
                float((rows.whole() - columns.take(w)).norm(dim=1).min())
                for rows, columns in ((method.prompt, method.prompt_columns), (method.gate, method.gate_columns))
            ]
        )
    (prompt, gate), (prompt_clipped, gate_clipped) = moved
    assert prompt_clipped < 1e-6 < 1e-3 < prompt and gate > 1e-3
    assert gate_clipped < 1e-6 if aggregate else gate_clipped == gate


# -- what figures show -------------------------------------------------------------------------------------
def test_contributions_by_hand():
    """Clients' own test images; a client that never trained a gate has none."""
    e, method = played(2, [[0, 1, 2, 4], [0, 1, 4, 5]], num_experts=4)
    found = method.contributions(all_clients(e, 1, "evaluation"))
    assert found.shape == (6, 4) and found[[2, 3, 5]].isnan().all()
    bag = deployed(e, method, 1)
    for i in (0, 1, 4):
        x = e.federation.inputs[torch.from_numpy(e.federation.splits["test"][i])]
        p = e.model.named(bag["theta"][i : i + 1])
        text = method.clip.text(method.clip.context(p))
        a = torch.stack(
            [
                method.mix(p, one[None, None], text, bag["experts"][i : i + 1], bag["count"][i : i + 1])[1][0, 0]
                for one in x
            ]
        )  # [n_i, 4]
        wanted = torch.cat([a[:, :1], a[:, 1:].sort(1, descending=True).values], 1).mean(0)
        close(found[i], wanted)
        assert abs(float(found[i].sum()) - 1) < 1e-5
    tuned = FineTuned(method, 1, None, "end", "all")
    equal(tuned.measured(all_clients(e, 1, "evaluation"))["experts"][0], found[0])


def test_a_client_without_test_images_has_no_contributions():
    e = world()
    e.federation.splits["test"] = split_of(SIZES, [3, 0, 3, 3, 3, 3]).test
    found = play(e, PFedMoAP(), 2).contributions(all_clients(e, 1, "evaluation"))
    assert found[1].isnan().all() and found[[0, 2, 3, 4, 5]].isfinite().all()


def test_a_run_says_its_bytes_and_draws_its_experts(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Prompts of 4 x 64 numbers, 5 clients: the figure is of the last round, beside the run's other files."""
    cfg = OmegaConf.create(
        check(
            compose(
                [
                    "algorithm=pfedmoap",
                    "model=clip_prompt_tiny",
                    "model.pretrained=null",
                    "model.context=4",
                    "dataset=digits_clip",
                    "dataset.subset=0.2",
                    "partition=class_disjoint",
                    "partition.num_clients=5",
                    "partition.shots=2",
                    "sample_rate=1",
                    "rounds=2",
                    "local.epochs=1",
                    f"data_dir={tmp_path}",
                    "hardware=cpu",
                    "hardware.executor=vmap",
                    "tracking=disabled",
                ]
            )
        )
    )
    OmegaConf.save(cfg, tmp_path / "config.yaml")
    simulator.run(cfg, tmp_path)
    costs = [line.split(",") for line in (tmp_path / "costs.csv").read_text().splitlines()]
    down, up = (costs[0].index(n) for n in ("bytes_down", "bytes_up"))
    assert [(int(c[down]), int(c[up])) for c in costs[1:]] == [(5 * PROMPT, 5 * PROMPT), (25 * PROMPT, 5 * PROMPT)]
    assert json.loads((tmp_path / "summary.json").read_text())["last"]["personal/accuracy"] >= 0
    stored = read_npz(tmp_path / "measured.npz")
    assert stored["client"].tolist() == [0, 1, 2, 3, 4] and stored["experts"].shape == (5, 5)
    np.testing.assert_allclose(stored["experts"].sum(1), 1, rtol=1e-5)
    assert main([str(tmp_path), "--out", str(tmp_path / "drawn")]) == 0
    assert (tmp_path / "drawn" / "experts.png").stat().st_size > 5000
    assert "experts.png" in capsys.readouterr().out


# -- mistakes ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_experts": 7}, "algorithm.num_experts=7 .* at most 6"),
        ({"d_feature": 48}, "algorithm.d_feature=48 must divide the 64"),
        ({"d_feature": 128}, "algorithm.d_feature=128 must divide the 64"),
        ({"d_feature": 4}, "algorithm.heads=8 must divide .* algorithm.d_feature=4"),
        ({"heads": 7}, "algorithm.heads=7 must divide"),
    ],
)
def test_what_cannot_be_is_refused(options: dict, said: str):
    with pytest.raises(ConfigError, match=said):
        play(world(), PFedMoAP(**options), 0)


def test_without_a_number_of_experts_there_are_as_many_as_clients_up_to_ten():
    many = play(world([4] * 12), PFedMoAP(), 0)
    assert (ready()[1].num_others, ready(num_experts=6)[1].num_others, many.num_others) == (5, 5, 9)
    play(world(), PFedMoAP(gating="linear", d_feature=4), 0)  # heads are the attention's


def test_other_models_are_refused():
    e = replace(world(), model=FlatModel(seeded(lambda: torch.nn.Linear(D, C)), {"prompt": ["weight"]}))
    with pytest.raises(ConfigError, match="algorithm=pfedmoap mixes text features, so it needs model=clip_prompt"):
        play(e, PFedMoAP(), 0)
