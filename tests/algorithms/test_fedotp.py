"""FedOTP: the plan against POT and its definition, invariants of the logits, and a round."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prompts import PROMPT, SIZES, prompts
from tiny import HEAD, all_clients, close, compose, deployed, engine, equal, mlp, play, ragged
from torch import Tensor

from fedbench.algorithms import _transport
from fedbench.algorithms.fedotp import FedOTP, similarities
from fedbench.config.check import check
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.optim import SGD
from fedbench.models.clip_prompt import CLIPPrompt
from fedbench.simulation import build, evaluate

COHORTS = ([0, 1, 3], [1, 2], [0, 3])
FINE = {"max_iter": 50_000, "thresh": 1e-10}


def cosines(*shape: int, seed: int = 0, spread: float = 0.1) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return 0.2 + spread * torch.randn(*shape, generator=g, dtype=torch.float64)


def by_pot(sim: Tensor, eps: float, mass: float) -> Tensor:
    """One problem [2, M]; POT's own stopping rule set below rounding."""
    import ot

    J, M = sim.shape
    T = ot.partial.entropic_partial_wasserstein(
        np.full(M, 1 / M),
        np.full(J, mass / J),
        1 - sim.double().numpy().T,
        reg=eps,
        m=mass - 1e-12,
        numItermax=100_000,
        stopThr=1e-15,
    )
    return torch.from_numpy(np.asarray(T).T)


def by_definition(sim: Tensor, eps: float, mass: float, steps: int) -> tuple[Tensor, Tensor]:
    """Plan and v after scaling iterations of one problem [2, M], as printed, in float64; the first u is 1."""
    (J, M), K, u = sim.shape, torch.exp((sim - 1) / eps), torch.ones(sim.shape[1], dtype=torch.float64)
    for _ in range(steps + 1):
        v = mass / J / (K @ u)
        kept, u = u, (1 / M / (v @ K)).clamp_max(1)
    return kept * K * v[:, None], v


# -- the plan --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mass", [0.8, 1.0])
@pytest.mark.parametrize("eps", [0.1, 0.01])
@pytest.mark.parametrize("M", [16, 49, pytest.param(196, marks=pytest.mark.slow)])
def test_the_plan_is_that_of_pot(M: int, eps: float, mass: float):
    sim = cosines(2, 2, 2, M, seed=M)
    wanted = torch.stack([torch.stack([by_pot(sim[a, :, i], eps, mass) for i in range(2)], 1) for a in range(2)])
    close(_transport.plan(sim, eps, mass, **FINE), wanted, 1e-9)
    found = _transport.plan(sim.float(), eps, mass, max_iter=20_000, thresh=1e-6)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 2, 7, 10, 11, 34])
def test_iterations_are_those_of_the_definition(steps: int):
    """In blocks, of which one step is taken in the log domain and the others scale; also with a last block of one."""
    sim = cosines(1, 2, 3, 16)
    found = _transport.plan(sim, 0.05, 0.9, steps, 0.0)
    close(found[0], torch.stack([by_definition(s, 0.05, 0.9, steps)[0] for s in sim[0].unbind(1)], 1), 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mass", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 10, 25])
def test_columns_are_exact_whenever_it_ends(steps: int, mass: float, dtype: torch.dtype):
    T = _transport.plan(cosines(2, 2, 5, 49).to(dtype), 0.02, mass, steps, 0.0)
    close(T.sum(-1), torch.full((2, 2, 5), mass / 2, dtype=dtype), 1e-6 if dtype == torch.float32 else 1e-13)
    assert (T >= 0).all()


@pytest.mark.parametrize("mass, M", [(0.8, 16), (0.8, 49), (1.0, 16)])
def test_rows_give_no_more_than_they_have(mass: float, M: int):
    T = _transport.plan(cosines(2, 2, 5, M), 0.02, mass, **FINE)
    assert T.sum(1).max() <= (1 + 1e-7) / M
    close(T.sum((1, 3)), torch.full((2, 5), mass, dtype=torch.float64), 1e-12)
    if mass == 1:
        close(T.sum(1), torch.full((2, 5, M), 1 / M, dtype=torch.float64), 1e-7)


def test_whole_mass_is_balanced_transport():
    import ot

    sim = cosines(1, 2, 1, 16)
    wanted = torch.from_numpy(
        ot.sinkhorn(
            np.full(16, 1 / 16), np.full(2, 0.5), 1 - sim[0, :, 0].numpy().T, 0.1, numItermax=100_000, stopThr=1e-14
        )
    ).T
    close(_transport.plan(sim, 0.1, 1.0, **FINE)[0, :, 0], wanted, 1e-9)


@pytest.mark.parametrize("mass", [0.8, 1.0])
def test_float32_survives_any_cosine_at_a_small_eps(mass: float):
    """exp(-(1 - sim) / eps) spans e^-200: 0 in float32.  Also for tokens that no prompt wants, and equal ones."""
    sim = 2 * torch.rand(4, 2, 25, 49, generator=torch.Generator().manual_seed(0)) - 1
    sim[0, :, 0, :], sim[0, :, 1, 1:], sim[0, :, 1, 0] = -1, -1, 1
    found = _transport.plan(sim, 0.01, mass)
    assert found.isfinite().all()
    close(found.sum(-1), torch.full((4, 2, 25), mass / 2), 1e-6)
    torch.testing.assert_close(found.double(), _transport.plan(sim.double(), 0.01, mass), rtol=0, atol=1e-4)


def test_every_problem_ends_when_its_own_v_has_come_to_rest():
    """After the first multiple of CHECK iterations of which the last moved no log v by thresh, beside whomever."""
    sim, ends = cosines(2, 2, 20, 16), []
    found = _transport.plan(sim, 0.05, 0.9, 80, 1e-2)
    for a in range(2):
        for i in range(20):
            for n in range(10, 90, 10):
                (_, before), (T, v) = (by_definition(sim[a, :, i], 0.05, 0.9, k) for k in (n - 1, n))
                if (v / before).log().abs().max() < 1e-2 or n == 80:
                    break
            ends.append(n)
            close(found[a, :, i], T, 1e-9)
    assert len(set(ends)) > 2


# -- logits ----------------------------------------------------------------------------------------------
def logits(sim: Tensor, **options: Any) -> Tensor:
    """[A, B, C] of sim [A, 2, C, B, M]."""
    return FedOTP(**options).transported(sim)


def let_plans_converge(monkeypatch: pytest.MonkeyPatch, max_iter: int = 2000, thresh: float = 1e-9) -> None:
    """Compute FedOTP's plans more exactly than it does."""
    monkeypatch.setattr(_transport, "plan", partial(_transport.plan, max_iter=max_iter, thresh=thresh))


@pytest.mark.parametrize("gamma", [0.8, 1.0])
@pytest.mark.parametrize("eps", [0.1, 0.01])
def test_logits_are_those_of_a_plan_of_limited_exactness(eps: float, gamma: float):
    """Of at most 100 iterations, which end when no log v changes by 0.001."""
    sim = cosines(2, 2, 3, 5, 16)
    plan = _transport.plan(sim, eps, gamma, 100, 1e-3)
    close(logits(sim, eps=eps, gamma=gamma), (plan * sim).sum((1, 4)).transpose(1, 2), 1e-12)


def test_without_a_choice_logits_are_the_mean(monkeypatch: pytest.MonkeyPatch):
    """eps to infinity: every token and prompt counts alike, gamma mean(sim)."""
    let_plans_converge(monkeypatch)
    sim = cosines(2, 2, 3, 5, 16)
    close(logits(sim, eps=1e6, gamma=0.7), 0.7 * sim.mean((1, 4)).transpose(1, 2), 1e-6)


def test_equal_prompts_share_equally(monkeypatch: pytest.MonkeyPatch):
    one = cosines(2, 1, 3, 5, 16)
    sim = one.expand(-1, 2, -1, -1, -1)
    T = _transport.plan(sim, 0.1, 0.8)
    close(T[:, 0], T[:, 1], 1e-12)
    let_plans_converge(monkeypatch, max_iter=50_000)
    close(logits(sim, gamma=1.0), one.mean(4)[:, 0].transpose(1, 2), 1e-6)


def test_order_of_tokens_and_of_prompts_does_not_matter(monkeypatch: pytest.MonkeyPatch):
    let_plans_converge(monkeypatch)
    sim = cosines(2, 2, 3, 5, 16)
    close(logits(sim[..., torch.randperm(16, generator=torch.Generator().manual_seed(0))]), logits(sim), 1e-12)
    close(logits(sim.flip(1)), logits(sim), 1e-12)


def test_the_gradient_of_the_logits_is_the_plan(monkeypatch: pytest.MonkeyPatch):
    let_plans_converge(monkeypatch)
    sim = cosines(2, 2, 3, 5, 16).requires_grad_()
    weight = torch.randn(2, 5, 3, dtype=torch.float64)
    (found,) = torch.autograd.grad((logits(sim, eps=0.05) * weight).sum(), sim)
    T = _transport.plan(sim.detach(), 0.05, 0.8)
    close(found, weight.permute(0, 2, 1)[:, None, ..., None] * T, 1e-12)
    assert not T.requires_grad


def naive(clip: CLIPPrompt, prompts: Tensor, tokens: Tensor, eps: float, gamma: float) -> Tensor:
    """s sum T* (F T^T) for one image and class after the other.  prompts [2, l, d], tokens [B, M, D] -> [B, C]"""
    T = torch.stack([clip.text_tower(p) for p in prompts])  # [2, C, D]
    out = torch.zeros(len(tokens), T.shape[1])
    for b, F in enumerate(tokens):
        for c in range(T.shape[1]):
            sim = F @ T[:, c].T  # [M, 2]
            out[b, c] = clip.scale * (by_pot(sim.detach().T, eps, gamma).T * sim).sum()
    return out


def test_predictions_and_gradients_are_those_of_single_problems(monkeypatch: pytest.MonkeyPatch):
    """Logits of three clients, and the gradient of one batch loss in p_g and p_l, with POT's plans as constants."""
    let_plans_converge(monkeypatch, thresh=1e-7)
    e = prompts(SGD(lr=0.1), tokens=6)
    a = play(e, FedOTP(gamma=0.7, eps=0.05), 1)
    rows, clip = deployed(e, a)[:3], e.model.module
    x = {n: v[:12].view(3, 4, *v.shape[1:]) for n, v in e.federation.inputs.items()}  # type: ignore
    y = e.federation.targets[:12].view(3, 4)
    for k in range(3):
        row = rows[k].clone().requires_grad_()
        named = e.model.named(row)
        alone = naive(clip, torch.stack([clip.context(named), named["local"]]), x["tokens"][k], 0.05, 0.7)
        (wanted,) = torch.autograd.grad(torch.nn.functional.cross_entropy(alone, y[k]), row)
        many = rows.clone().requires_grad_()
        found = a.predict(e.model, many, x)
        close(found[k], alone, 1e-4)
        (got,) = torch.autograd.grad(torch.nn.functional.cross_entropy(found[k], y[k]), many)
        close(got[k], wanted, 1e-3)
        assert (
            e.model.columns["prompt"].take(got[k]).abs().max() > 1e-3
            and e.model.columns["local"].take(got[k]).abs().max() > 1e-3
        )


def test_similarities_by_name():
    F, T = torch.randn(2, 5, 6, 8), torch.randn(2, 2, 3, 8)
    close(similarities(F, T), torch.einsum("kbmd,kjcd->kjcbm", F, T))


# -- a round ---------------------------------------------------------------------------------------------
def parts(e: Engine, rows: Tensor) -> tuple[Tensor, Tensor]:
    return e.model.columns["prompt"].take(rows), e.model.columns["local"].take(rows)


def test_the_two_prompts_are_drawn_independently():
    e, f, again = prompts(tokens=3, seed=1), prompts(tokens=3, seed=2), prompts(tokens=3, seed=1)
    rows = [play(x, FedOTP(), rounds=0).w for x in (e, f, again)]  # type: ignore
    p_g, p_l = parts(e, rows[0])
    assert abs(torch.corrcoef(torch.stack([p_g, p_l]))[0, 1]) < 0.2
    assert 0.017 < p_l.std() < 0.023 and abs(p_l.mean()) < 0.004
    assert not torch.equal(p_l, parts(f, rows[1])[1])
    equal(rows[2], rows[0])
    equal(p_g, prompts(tokens=3, seed=1).model.init_row())  # PromptFL's own start


def test_a_round_is_an_average_of_p_g_and_leaves_p_l_with_its_client():
    """Round 2 with clients 1 and 2, each trained alone from [p_g; p_l] by the same loss."""
    e = prompts(SGD(lr=0.1, momentum=0.9), tokens=5, batch_size=4, epochs=2)
    a = play(e, FedOTP(), 1)
    before, rows = a.w.clone(), deployed(e, a)
    trained = [Cohort(e, np.array([i]), 1).train(rows[i], loss=a.loss).theta for i in (1, 2)]
    p_g, p_l = parts(e, torch.cat(trained))
    play(e, a, 1, [[1, 2]], begin=1)
    after = deployed(e, a)
    mean = (SIZES[1] * p_g[0] + SIZES[2] * p_g[1]) / (SIZES[1] + SIZES[2])
    for i in range(4):
        close(parts(e, after[i])[0], mean, 1e-6)
        close(parts(e, after[i])[1], p_l[i - 1] if i in (1, 2) else parts(e, rows[i])[1], 1e-6)
    assert not torch.allclose(p_g[0], p_g[1], atol=1e-4)
    equal(parts(e, a.w)[1], parts(e, before)[1])  # the initial one stays


def test_everyone_trains_in_round_one():
    """Everybody's training, from the common start, makes p_g, and is paid for; later rounds are the cohort's."""
    e, f, trained = prompts(tokens=5), prompts(tokens=5), [0, 1, 2, 3]
    a = play(e, FedOTP(), rounds=0)
    cohort = Cohort(e, np.array(COHORTS[0]), 0)
    a.round(cohort)
    equal(a.w, play(f, FedOTP(), 1, [trained]).w)  # type: ignore
    assert e.rows.all["p_l"].touched().tolist() == trained
    assert cohort.cost.bytes_up == cohort.cost.bytes_down == len(trained) * 4 * PROMPT
    assert cohort.cost.samples == sum(SIZES[i] for i in trained)
    assert cohort.ids.tolist() == COHORTS[0]
    later = Cohort(e, np.array(COHORTS[1]), 1)
    a.round(later)
    assert later.cost.bytes_up == later.cost.bytes_down == 2 * 4 * PROMPT
    assert e.rows.all["p_l"].touched().tolist() == sorted({*trained, *COHORTS[1]})


def test_what_is_sent_of_a_whole_prompt_is_32_kib():
    e = prompts(tokens=5, sizes=[5], model={"context": 16})
    cohort = all_clients(e)
    play(e, FedOTP(), rounds=0).round(cohort)
    assert cohort.cost.bytes_up == 16 * 64 * 4  # 16 x 512: 32 KiB


def test_global_numbers_are_those_of_p_g_alone():
    e = prompts(SGD(lr=0.1), tokens=5, eval_batch=5)
    a = play(e, FedOTP(), 2)
    plain = prompts(tokens=5)
    p_g = parts(e, a.global_row())[0]
    wanted = evaluate.shared(p_g, plain, np.arange(4), 0)
    for name, value in evaluate.shared(a.global_row(), e, np.arange(4), 1).items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-5, err_msg=name)


def test_training_helps_and_pays_attention_to_tokens():
    """Personal accuracy rises, and what is learned depends on the tokens, not on the pooled feature."""
    e = prompts(SGD(lr=0.1, momentum=0.9), tokens=5, epochs=5)
    a = play(e, FedOTP(), rounds=0)
    before = evaluate.personal(a, e, np.arange(4), 0, False)["loss"].mean()
    play(e, a, 3, begin=1)
    assert evaluate.personal(a, e, np.arange(4), 3, False)["loss"].mean() < 0.9 * before
    rows = deployed(e, a)
    e.federation.inputs["image"].zero_()  # type: ignore
    equal(
        a.predict(e.model, rows[:1], {"tokens": e.federation.inputs["tokens"][None, :6]}),  # type: ignore
        a.predict(e.model, rows[:1], {n: x[None, :6] for n, x in e.federation.inputs.items()}),
    )  # type: ignore


# -- from a config ---------------------------------------------------------------------------------------
def test_from_images_on(tmp_path: Path):
    """The data set's images become features and tokens because the method reads tokens."""
    cfg = compose(
        [
            "algorithm=fedotp",
            "model=clip_prompt_tiny",
            "model.pretrained=null",
            "dataset=digits_clip",
            "partition=class_disjoint",
            "partition.shots=2",
            "partition.num_clients=10",
            "optimizer.lr=0.1",
            "dataset.subset=0.2",
            f"data_dir={tmp_path}",
            "sample_rate=1",
            "local.epochs=1",
        ]
    )
    arrays = build.data(cfg)
    split = build.partition(cfg, arrays)
    e = build.engine(cfg, arrays, split)
    a = play(e, build.algorithm(cfg), 1)
    assert {n: x.shape[1:] for n, x in e.federation.inputs.items()} == {"image": (64,), "tokens": (16, 64)}  # type: ignore
    assert e.model.size == 2 * 16 * 64
    assert np.isfinite(evaluate.personal(a, e, np.arange(10), 0, True)["loss"]).all()


@pytest.mark.parametrize(
    "option, said",
    [
        ("eps=0", r"algorithm.eps must be a number > 0, got 0"),
        ("eps=-1", r"algorithm.eps must be a number > 0, got -1"),
        ("gamma=1.5", r"algorithm.gamma must be a number in \(0, 1\], got 1.5"),
    ],
)
def test_wrong_options_are_one_sentence(option: str, said: str):
    with pytest.raises(ConfigError, match=said):
        check(compose(["algorithm=fedotp", "model=clip_prompt_tiny", f"algorithm.{option}"]))


def test_other_models_are_refused():
    with pytest.raises(ConfigError, match="algorithm=fedotp needs the parameter group 'prompt'"):
        play(engine(*ragged(), mlp(), columns=HEAD), FedOTP(), rounds=0)
