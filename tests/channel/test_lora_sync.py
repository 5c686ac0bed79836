"""Rules that combine LoRA factors: their equations by hand, what they send, and runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from cases import assert_same, case, run_rounds, set_up, state_of
from tiny import CPU, close, equal
from torch import Tensor, nn

from fedbench.adapters.lora import LoRA
from fedbench.channel.lora_sync import COMBINATIONS, LoraSync
from fedbench.commands import main
from fedbench.core.options import ConfigError
from fedbench.core.round_context import RoundContext
from fedbench.core.rows import RowStore
from fedbench.core.settings import config_hash, to_dict
from fedbench.engine.cohort import Cohort
from fedbench.nn.flat import FlatModel
from fedbench.simulation import build, evaluate
from fedbench.simulation.run_state import Simulation
from fedbench.tools.export import client_state, open_run, predictions

TINY = ["model=vit_tiny", "model.patch=2", "model.width=8", "model.heads=2", "model.depth=1", "adapter=lora"]
METHODS = ["fedavg", "fedprox", "ditto", "pgfed", "fedper"]
LAYER = "blocks.0.attn.qkv"  # 8 -> 24


def simulation(sync: str, method: str = "fedavg", rank: object = 2, *more: str, plan: str = "vmap") -> Simulation:
    words = [*TINY, f"adapter.sync={sync}", f"adapter.rank={rank}".replace(" ", ""), *more]
    return case(method).on([*words, *case(method).optimizer]).simulation(plan)


def spread(sim: Simulation, k: int = 3, seed: int = 1) -> Tensor:
    """Return uploads of k clients.  # [k, P]"""
    model = sim.engine.model
    return model.init_row() + 0.3 * torch.randn(k, model.size, generator=torch.Generator().manual_seed(seed))


def factors(sim: Simulation, rows: Tensor, layer: str = LAYER) -> tuple[Tensor, Tensor]:
    """Return A [..., R, in] and B [..., out, R] of a layer."""
    named = sim.engine.model.named(rows)
    return named[f"{layer}.lora_A.weight"], named[f"{layer}.lora_B.weight"]


def combined(sim: Simulation, uploads: Tensor, weights: Tensor, round: int = 0) -> Tensor:
    cohort = Cohort(sim.engine, np.arange(len(uploads)), round)
    cohort.broadcast(w=sim.engine.model.init_row())
    return cohort.mean(uploads, weights, updates="w")


def product(sim: Simulation, row: Tensor, layer: str = LAYER) -> Tensor:
    """Return the change of a layer's weight that a server's row stands for, without alpha / r.  # [out, in]"""
    A, B = factors(sim, row, layer)
    return B @ A


def mean_product(sim: Simulation, uploads: Tensor, weights: Tensor) -> Tensor:
    A, B = factors(sim, uploads)
    return (weights[:, None, None] * (B @ A)).sum(0)


WEIGHTS = torch.tensor([0.5, 0.3, 0.2])


# -- equations -------------------------------------------------------------------------------------------
def test_flex_is_the_best_approximation_of_its_rank() -> None:
    """Eckart and Young: the error of the best one is the norm of the remaining singular values."""
    sim = simulation("flex")
    uploads = spread(sim)
    row, dense = combined(sim, uploads, WEIGHTS), mean_product(sim, uploads, WEIGHTS)
    S = torch.linalg.svdvals(dense)
    assert S[2] > 0.1 * S[0]  # three products of rank 2 do not fit
    close((dense - product(sim, row)).norm(), S[2:].norm(), 1e-5)
    A, B = factors(sim, row)
    close(A @ A.T, torch.eye(2), 1e-5)
    close(B.norm(dim=0), S[:2], 1e-5)
    close((dense - B[:, :1] @ A[:1]).norm(), S[1:].norm(), 1e-5)  # as a client of rank 1 receives it


def test_flex_of_a_layer_smaller_than_the_rank() -> None:
    sim = simulation("flex", "fedavg", 12)
    uploads = spread(sim)
    close(product(sim, combined(sim, uploads, WEIGHTS)), mean_product(sim, uploads, WEIGHTS), 1e-5)
    assert not factors(sim, combined(sim, uploads, WEIGHTS))[0][8:].any()


def test_het_weighs_by_the_norm_of_the_product() -> None:
    sim = simulation("het")
    uploads = spread(sim)
    A, B = factors(sim, uploads)
    p = (B @ A).flatten(1).norm(dim=1)
    p = p / p.sum()
    new_A, new_B = factors(sim, combined(sim, uploads, WEIGHTS))
    close(new_A, (p[:, None, None] * A).sum(0), 1e-5)
    close(new_B, (p[:, None, None] * B).sum(0), 1e-5)
    for name, values in sim.engine.model.named(uploads).items():  # views
        if "lora_B" in name:
            values.zero_()
    close(combined(sim, uploads, WEIGHTS), WEIGHTS @ uploads, 1e-6)  # without a norm, as average


@pytest.mark.parametrize("sync", COMBINATIONS)
def test_other_columns_get_their_mean(sync: str) -> None:
    sim = simulation(sync)
    uploads, head = spread(sim), sim.engine.model.columns["head"]
    equal(head.take(combined(sim, uploads, WEIGHTS)), head.take(WEIGHTS @ uploads))


def test_ffa_trains_and_sends_b_alone() -> None:
    """With A frozen, a layer's change is linear in B, and the mean of products is the product of means."""
    sim = set_up(simulation("ffa"))
    model, layer = sim.engine.model, sim.engine.model.module.get_submodule(LAYER)
    A = layer.lora_A.weight.detach().clone()
    assert A.any() and not any("lora_A" in name for name in model.spans)
    cohort = Cohort(sim.engine, np.arange(4), 0)
    sim.algorithm.round(cohort)
    numbers = model.columns["head"].size + 2 * (24 + 8 + 16 + 8)  # B of 8 -> 24, 8 -> 8, 8 -> 16 and 16 -> 8
    assert cohort.cost.bytes_up == cohort.cost.bytes_down == 4 * 4 * numbers
    equal(layer.lora_A.weight, A)
    rows, x = spread(sim, 2)[:, : model.size], torch.randn(5, 8)

    def change(B: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"lora_B.weight": B}, x) - layer.base_layer(x)

    B = model.named(rows)[f"{LAYER}.lora_B.weight"]
    close(change(0.3 * B[0] + 2 * B[1]), 0.3 * change(B[0]) + 2 * change(B[1]), 1e-5)


@pytest.mark.parametrize("sync", ["flora", "fedex"])
def test_backbone_and_adapter_are_the_mean_of_the_products(sync: str) -> None:
    sim = simulation(sync)
    uploads = spread(sim)
    row = combined(sim, uploads, WEIGHTS)
    close(effective(sim, row), mean_product(sim, uploads, WEIGHTS), 1e-6)
    A, B = factors(sim, row)
    if sync == "fedex":
        equal((A, B)[0], torch.einsum("k,kri->ri", WEIGHTS, factors(sim, uploads)[0]))
        assert (product(sim, row) - mean_product(sim, uploads, WEIGHTS)).norm() > 0.1
        return
    assert not B.any() and not torch.equal(A, factors(sim, sim.engine.model.init_row())[0])
    assert 0.9 / 8**0.5 < A.abs().max() <= 1 / 8**0.5  # uniform, as PyTorch's layers with 8 inputs
    equal(combined(simulation(sync), uploads, WEIGHTS), row)  # its draw depends on seed, round and layer
    other_layer = factors(sim, row, "blocks.0.attn.proj")[0]
    other_round = factors(sim, combined(sim, uploads, WEIGHTS, round=1))[0]
    other_seed = factors(sim, combined(simulation(sync, "fedavg", 2, "seed=1"), uploads, WEIGHTS))[0]
    assert not any(torch.equal(A, other) for other in (other_layer, other_round, other_seed))


@pytest.mark.parametrize("sync", ["flora", "fedex"])
@pytest.mark.parametrize("mode", ["evaluation", "trial"])
def test_only_rounds_change_the_backbone_and_what_clients_have(sync: str, mode: Any) -> None:
    sim = run_rounds(simulation(sync), 1)
    before, layer = state_of(sim), sim.engine.model.module.get_parameter(f"{LAYER}.base_layer.weight")
    weight = layer.detach().clone()
    cohort = Cohort(sim.engine, np.array([0, 2, 4]), 1, mode)
    cohort.broadcast(w=sim.algorithm.w)
    cohort.mean(spread(sim), WEIGHTS, updates="w")
    equal(layer.detach(), weight)
    assert_same(state_of(sim), before)


def test_what_is_added_accumulates_and_follows_the_state() -> None:
    sim = simulation("fedex")
    before = sim.engine.rows.state_dict()["lora_sync/backbone"]
    before = {name: value.clone() for name, value in before.items()}
    first, second = spread(sim), spread(sim, seed=2)
    row = combined(sim, first, WEIGHTS)
    after_one = effective(sim, row) - product(sim, row)
    row = combined(sim, second, WEIGHTS)
    lacking = mean_product(sim, second, WEIGHTS) - product(sim, row)
    close(effective(sim, row) - product(sim, row), after_one + lacking, 1e-5)
    sim.engine.rows.all["lora_sync/backbone"].load_state_dict(before)  # as a resume does, or stop.patience
    Cohort(sim.engine, np.arange(2), 0, "evaluation")
    assert not (effective(sim, row) - product(sim, row)).any()


class Both(nn.Module):
    """A convolution with its rank in another place, and PyTorch's attention, whose weight is a joint one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.attn = nn.Conv2d(2, 4, 3, padding=1), nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.conv(x).flatten(2).mT  # [B, T, 4]
        return self.head(self.attn(tokens, tokens, tokens, need_weights=False)[0].mean(1))


@pytest.mark.parametrize("sync", ["flora", "fedex"])
def test_convolutions_and_attention_have_the_mean_of_the_products(sync: Any) -> None:
    """The merged weights of the server's model are the means of the clients' merged weights."""
    module = Both()
    names = LoRA(rank=2, alpha=6.0, convolutions=True, sync=sync).insert(module)
    model = FlatModel(module, {"adapter": names})
    rule = LoraSync(sync, model, RowStore(3, CPU, 1 << 20, 1 << 20))
    uploads = model.init_row() + 0.3 * torch.randn(3, model.size, generator=torch.Generator().manual_seed(1))

    def merged(row: Tensor) -> list[Tensor]:
        module.load_state_dict(model.state_dict(row), strict=False)
        conv, attn = (layer.merged() for layer in (module.conv, module.attn))  # type: ignore[operator]
        return [conv.weight.clone(), attn.in_proj_weight.clone(), attn.out_proj.weight.clone()]

    expected = [sum(p * w for p, w in zip(WEIGHTS, layers)) for layers in zip(*map(merged, uploads))]
    ids, counts = np.arange(3), np.ones(3, np.int64)
    context = RoundContext(ids=ids, num_samples=counts, client_weights=counts.astype(float), num_clients=3, round=0,
                           mode="round", seed=0, device=CPU)  # fmt: skip
    found = merged(rule.combine(context, WEIGHTS @ uploads, uploads, WEIGHTS))
    assert len(found) == 3
    for a, b in zip(found, expected):
        close(a, b, 2e-6)


@pytest.mark.parametrize("sync", ["flora", "fedex"])
def test_personal_layers_keep_their_weights(sync: str) -> None:
    """FedPer's head may contain adapted layers, which it does not send."""
    words = ["model.columns.head=['head.*','blocks.0.mlp.*']"]
    sim = run_rounds(simulation(sync, "fedper", 2, *words), 2)
    personal = "blocks.0.mlp.0"
    module, initial = (s.engine.model.module for s in (sim, simulation("average")))
    changed = {
        name: not torch.equal(module.get_parameter(name), weight)
        for name, weight in initial.named_parameters()
        if "base_layer.weight" in name
    }
    sim.engine.rows.all["lora_sync/received"][np.arange(1)] = torch.zeros(1, 1, dtype=torch.float64)
    cohort = Cohort(sim.engine, np.arange(1), 2)  # client 0, as if it had missed all rounds
    cohort.broadcast(u=sim.algorithm.u)
    factors_in_u, dense = 2 * ((8 + 24) + (8 + 8)), 24 * 8 + 8 * 8
    expected = len(sim.algorithm.u) - (factors_in_u if sync == "flora" else 0) + dense
    assert cohort.cost.bytes_down == 4 * expected
    assert changed == {name: ".mlp." not in name for name in changed} and f"{personal}.base_layer.weight" in changed


def test_fedsa_keeps_b_with_the_client() -> None:
    sim = set_up(simulation("fedsa"))
    model, ids = sim.engine.model, np.array([0, 2, 3])
    theta = Cohort(sim.engine, ids, 0, "trial").train(sim.algorithm.w).theta
    cohort = Cohort(sim.engine, ids, 0)
    sim.algorithm.round(cohort)
    A, B = factors(sim, sim.algorithm.w)
    close(A, torch.einsum("k,kri->ri", cohort.weights, factors(sim, theta)[0]), 1e-6)
    assert not B.any()
    numbers = model.columns["head"].size + 2 * (8 + 8 + 8 + 16)  # A of 8 -> 24, 8 -> 8, 8 -> 16 and 16 -> 8
    assert cohort.cost.bytes_up == cohort.cost.bytes_down == 4 * 3 * numbers
    ((_, rows),) = evaluate.deployed(sim.algorithm, sim.engine, np.arange(6), 0, False)
    own = factors(sim, rows)[1]
    close(own[[0, 2, 3]], factors(sim, theta)[1], 1e-6)
    assert not own[[1, 4, 5]].any()  # of clients that never trained
    equal(factors(sim, sim.engine.lora_sync.with_personal(ids, sim.algorithm.w))[1], own[ids])  # type: ignore[union-attr]
    start = Cohort(sim.engine, ids, 1, "trial")
    spy: list[Tensor] = []
    start.train(sim.algorithm.w, step=lambda s, batch: spy.append(s.theta.clone()))
    assert {tuple(b.flatten().tolist()) for b in factors(sim, spy[0])[1]} == {
        tuple(b.flatten().tolist()) for b in own[[0, 2, 3]]
    }
    start.train(sim.algorithm.w)
    ((_, after_trial),) = evaluate.deployed(sim.algorithm, sim.engine, np.arange(6), 1, False)
    equal(after_trial, rows)


DENSE = 24 * 8 + 8 * 8 + 16 * 8 + 8 * 16  # numbers of all adapted weights
PAIRS = 2 * ((8 + 24) + (8 + 8) + (8 + 16) + (16 + 8))  # numbers of all factors of rank 2


@pytest.mark.parametrize("sync", ["flora", "fedex"])
def test_what_changes_the_backbone_is_sent_down(sync: str) -> None:
    sim = set_up(simulation(sync))
    head = sim.engine.model.columns["head"].size

    def costs(*ids: int, round: int) -> tuple[int, int]:
        cohort = Cohort(sim.engine, np.array(ids), round)
        sim.algorithm.round(cohort)
        return cohort.cost.bytes_down // 4, cohort.cost.bytes_up // 4

    of_row = head if sync == "flora" else head + PAIRS
    per_round = 2 * PAIRS  # two clients' stacked factors
    assert costs(0, 1, round=0) == (2 * of_row, 2 * (head + PAIRS))
    assert costs(0, 1, round=1) == (2 * (of_row + per_round), 2 * (head + PAIRS))
    # client 2 missed two rounds, and gets the stacked factors of both, or the sum as dense matrices
    assert costs(0, 2, round=2)[0] == (of_row + per_round) + (of_row + min(2 * per_round, DENSE))


def test_a_residual_is_sent_as_factors_or_dense_layer_by_layer() -> None:
    """Stacked factors of five clients of rank 1 are fewer numbers than a matrix, except in the layer 8 -> 8."""
    sim, ids = set_up(simulation("fedex", "fedavg", 1)), np.arange(5)
    sim.algorithm.round(Cohort(sim.engine, ids, 0))
    cohort = Cohort(sim.engine, ids, 1)
    cohort.broadcast(w=sim.algorithm.w)
    residual = 5 * (8 + 24) + 8 * 8 + 5 * (8 + 16) + 5 * (16 + 8)
    assert cohort.cost.bytes_down == 4 * 5 * (len(sim.algorithm.w) + residual)


# -- agreement -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sync", COMBINATIONS)
def test_with_one_client_rules_agree(sync: str) -> None:
    sim = simulation(sync)
    uploads = spread(sim, 1)
    close(effective(sim, combined(sim, uploads, torch.ones(1))), product(sim, uploads[0]), 1e-5)


@pytest.mark.parametrize("sync", [sync for sync in COMBINATIONS if sync != "het"])
def test_with_equal_a_rules_agree(sync: str) -> None:
    """All but het, which has other weights."""
    sim = simulation(sync)
    uploads = with_equal_a(sim, spread(sim))
    expected = product(sim, WEIGHTS @ uploads)
    close(expected, mean_product(sim, uploads, WEIGHTS), 1e-5)
    close(effective(sim, combined(sim, uploads, WEIGHTS)), expected, 1e-5)


def test_het_agrees_with_equal_a_and_equal_norms() -> None:
    sim = simulation("het")
    uploads = with_equal_a(sim, spread(sim))
    B = sim.engine.model.named(uploads)[f"{LAYER}.lora_B.weight"]
    B /= (B @ factors(sim, uploads)[0]).flatten(1).norm(dim=1)[:, None, None]  # in place, in uploads
    even = torch.full((3,), 1 / 3)
    close(product(sim, combined(sim, uploads, even)), product(sim, even @ uploads), 1e-5)


def with_equal_a(sim: Simulation, uploads: Tensor) -> Tensor:
    for name, values in sim.engine.model.named(uploads).items():  # views
        if "lora_A" in name:
            values[:] = values[:1].clone()
    return uploads


def effective(sim: Simulation, row: Tensor, layer: str = LAYER) -> Tensor:
    """Return what is added to the initial weight of a layer, divided by alpha / r."""
    module: Any = sim.engine.model.module.get_submodule(layer)
    initial: Any = simulation("average").engine.model.module.get_submodule(layer)
    return (module.base_layer.weight - initial.base_layer.weight) / module.scale + product(sim, row, layer)


# -- with ranks of clients -------------------------------------------------------------------------------
@pytest.mark.parametrize("sync", ["ffa", "fedsa", "flora", "flex", "het"])
def test_each_client_gets_its_rank(sync: str) -> None:
    sim, ids = set_up(simulation(sync, "fedavg", [1, 4, 2, 3, 4, 1])), np.array([0, 1, 3])
    model = sim.engine.model
    per_rank = (0 if sync == "fedsa" else 24 + 8 + 16 + 8) + (0 if sync == "ffa" else 8 + 8 + 8 + 16)
    cohort = Cohort(sim.engine, ids, 0)
    sim.algorithm.round(cohort)
    head = 4 * 3 * model.columns["head"].size
    assert cohort.cost.bytes_up == head + 4 * (1 + 4 + 3) * per_rank
    assert cohort.cost.bytes_down == (head if sync == "flora" else cohort.cost.bytes_up)
    theta = Cohort(sim.engine, ids, 1).train(sim.algorithm.w).theta
    B = model.named(theta)[f"{LAYER}.lora_B.weight"]
    assert [int(b.any(0).sum()) for b in B] == [1, 4, 3]


# -- methods and executors -------------------------------------------------------------------------------
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sync", ["ffa", "fedsa", *COMBINATIONS])
def test_methods_under_every_plan(sync: str, method: str) -> None:
    if allowed(sync, method):
        vmap, loop = (state_of(run_rounds(simulation(sync, method, plan=plan), 2)) for plan in ("vmap", "loop"))
        assert_same(loop, vmap, 2e-5)


def allowed(sync: str, method: str) -> bool:
    return sync in ("ffa", "flex", "het") or method not in ("ditto", "pgfed")


def test_average_is_a_mean_and_has_the_hash_of_runs_before() -> None:
    sim = simulation("average")
    uploads = spread(sim)
    assert sim.engine.lora_sync is None
    equal(combined(sim, uploads, WEIGHTS), WEIGHTS @ uploads)
    stored: Any = to_dict(sim.cfg)
    del stored["adapter"]["sync"]
    assert config_hash(stored) == config_hash(sim.cfg) != config_hash(simulation("flex").cfg)


# -- runs ------------------------------------------------------------------------------------------------
def finished(folder: Path, *words: str) -> Path:
    quick = ["rounds=3", "tracking=disabled", "hardware.executor=vmap", "hardware.threads=1", "optimizer.lr=0.2"]
    given = {word.partition("=")[0] for word in words}
    method = [] if "algorithm" in given else ["algorithm=fedavg"]
    assert main([*method, *TINY, "adapter.rank=2", f"hydra.run.dir={folder}", *quick, *words]) == 0
    return folder


@pytest.mark.parametrize("sync", ["ffa", *(pytest.param(s, marks=pytest.mark.slow) for s in ("fedsa", *COMBINATIONS))])
def test_a_run_resumes_to_equal_bytes_and_exports_what_it_measured(sync: str, tmp_path: Path) -> None:
    words = [f"adapter.sync={sync}", "system.dropout=0.2"]
    whole = finished(tmp_path / "whole", *words)
    parts = finished(tmp_path / "parts", *words, "checkpoint.pause_after=2")
    assert main([f"resume={parts}"]) == 0
    states = [torch.load(folder / "checkpoint.pt") for folder in (whole, parts)]
    equal(states[0]["algorithm"], states[1]["algorithm"])
    equal(states[0]["rows"], states[1]["rows"])
    assert (whole / "clients.csv").read_bytes() == (parts / "clients.csv").read_bytes()
    check_export(whole, tmp_path)


def check_export(run: Path, folder: Path) -> None:
    """The model merged, and that of peft, have the run's logits."""
    from fedbench.models.vit_tiny import ViTTiny
    from fedbench.tools.export import save_peft

    peft, files = pytest.importorskip("peft"), pytest.importorskip("safetensors.torch")
    found, federation = predictions(run), open_run(run).engine.federation
    measured = torch.from_numpy(found["logits"][found["client"] == 4])
    x, _ = federation.gather(torch.from_numpy(federation.splits["test"][4]))
    module = ViTTiny((1, 8, 8), 10, patch=2, width=8, depth=1, heads=2).eval()
    module.load_state_dict(client_state(run, 4, merged=True))
    close(module(x), measured, 1e-5)
    save_peft(run, 4, folder / "peft")
    module.load_state_dict(files.load_file(folder / "peft/base_model.safetensors"))
    close(peft.PeftModel.from_pretrained(module, folder / "peft").eval()(x), measured, 1e-5)


@pytest.mark.parametrize("sync", ["ffa", *COMBINATIONS])
def test_uploads_may_be_compressed(sync: str, tmp_path: Path) -> None:
    memory = ["compression.error_feedback=false"] if sync in ("flora", "flex") else []
    run = finished(tmp_path / "run", f"adapter.sync={sync}", "compression=topk", *memory)
    assert np.isfinite(predictions(run)["logits"]).all()


@pytest.mark.parametrize(
    "words, message",
    [
        (["adapter.sync=flex", "algorithm=scaffold", "optimizer.momentum=0"], "which Scaffold does not take once in a"),
        (["adapter.sync=het", "algorithm=moon"], "which Moon does not take once in a round"),
        (["adapter.sync=flex", "server=adam"], "and so do server and aggregator: use server=average aggregator=mean"),
        (["adapter.sync=het", "aggregator=median"], "and so do server and aggregator"),
        (
            ["adapter.sync=fedex", "algorithm=ditto"],
            "changes the frozen weights, and the method keeps models of clients (v)",
        ),
        (
            ["adapter.sync=flora", "algorithm=pgfed"],
            "changes the frozen weights, and the method keeps models of clients",
        ),
        (
            ["adapter.sync=fedsa", "algorithm=ditto"],
            "keeps B with the client, and the method keeps models of clients (v)",
        ),
        (["adapter.sync=fedsa", "compression=topk"], "does not send whole models both ways, which compression needs"),
        (["adapter.sync=fedex", "compression=topk", "compression.direction=both"], "or compression.direction=up"),
        (["adapter.sync=flora", "compression=topk"], "use compression.error_feedback=false and optimizer.reset=round"),
        (["adapter.sync=flora", "optimizer.reset=never"], "use compression.error_feedback=false and optimizer.reset="),
        (["adapter.sync=flex", "compression=topk"], "use compression.error_feedback=false and optimizer.reset=round"),
        (["adapter.sync=flex", "optimizer.reset=never"], "adapter.sync=flex replaces the factors by others in each"),
        (["adapter.sync=fedex", f"adapter.rank=[{','.join('12' * 10)}]"], "fedex is exact only if all clients have"),
        (["adapter.sync=fedsa", "finetune.epochs=1"], "use finetune.epochs=0"),
        (["adapter.sync=mean"], "adapter.sync"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {word.partition("=")[0] for word in words}
    method = [] if "algorithm" in given else ["algorithm=fedavg"]
    rank = [] if "adapter.rank" in given else ["adapter.rank=2"]
    options = [*rank, "rounds=1", "tracking=disabled", f"hydra.run.dir={tmp_path / 'run'}"]
    assert main([*method, *TINY, *options, *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("fedbench: ") == 1


class Tower(nn.Module):
    """A model whose frozen layers the runs of a process share."""

    def expose(self) -> list[str]:
        return []


def test_frozen_weights_that_runs_share_are_not_changed() -> None:
    sim, shared = simulation("fedex"), SimpleNamespace(module=Tower())
    with pytest.raises(ConfigError, match="changes frozen weights, and those of model=vit_tiny are shared between"):
        build.lora_sync(sim.cfg, shared, sim.engine.rows)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("words", [["fedsa"], ["flora", "adapter.rank=[1,2,3,4,5,6]"], ["fedex"]])
def test_two_processes_have_the_results_of_one(words: list[str], tmp_path: Path) -> None:
    sync, *more = words
    options = ["algorithm=fedavg", "model=mlp", "adapter=lora", f"adapter.sync={sync}", *more, "rounds=3"]
    options += ["partition.num_clients=6", "clients_per_round=4", "tracking=disabled", "hardware.executor=loop"]
    assert main([*options, f"hydra.run.dir={tmp_path / 'one'}"]) == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "fedbench", *options]
    subprocess.run([*command, "hardware=ddp", f"hydra.run.dir={tmp_path / 'two'}"], check=True)
    one, two = (pd.read_csv(tmp_path / name / "clients.csv")["personal/loss"] for name in ("one", "two"))
    np.testing.assert_allclose(one, two, atol=1e-6)
    costs = [pd.read_csv(tmp_path / name / "costs.csv")["bytes_down"].tolist() for name in ("one", "two")]
    assert costs[0] == costs[1]
