"""LoRA with one rank per client: what a client has, trains, sends and exports."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import assert_same, case, run_rounds, set_up, state_of
from tiny import close, equal
from torch import Tensor

from fedbench.commands import main
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort
from fedbench.models.vit_tiny import ViTTiny
from fedbench.simulation import build, evaluate
from fedbench.simulation.run_state import Simulation
from fedbench.tools.export import client_state, open_run, predictions, save_peft

TINY = ["model=vit_tiny", "model.patch=2", "model.width=8", "model.heads=2", "model.depth=1"]
RANKS = [1, 4, 2, 3, 4, 1]
METHODS = ["fedavg", "fedprox", "scaffold", "ditto", "pgfed", "fedper", "local"]


def simulation(method: str, rank: object = RANKS, *more: str, plan: str = "vmap", alpha: float = 8.0) -> Simulation:
    words = [*TINY, "adapter=lora", f"adapter.rank={rank}".replace(" ", ""), f"adapter.alpha={alpha}", *more]
    return case(method).on([*words, *([] if "optimizer=adam" in more else case(method).optimizer)]).simulation(plan)


def above(sim: Simulation, ids: np.ndarray) -> Tensor:
    """Return by hand which columns are above the rank of each client.  # [K, P] bool"""
    model = sim.engine.model
    out = torch.zeros(len(ids), model.size, dtype=torch.bool)
    for name, (start, stop) in model.spans.items():
        block = out[:, start:stop].view(len(ids), *model.shapes[name])
        for row, i in zip(block, ids):
            if "lora_A" in name:
                row[RANKS[i] :] = True
            elif "lora_B" in name:
                row[:, RANKS[i] :] = True
    return out


def spread(sim: Simulation) -> Tensor:
    model = sim.engine.model
    return model.init_row() + 0.3 * torch.randn(model.size, generator=torch.Generator().manual_seed(1))


# -- a client's model ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "optimizer", [[], ["optimizer.momentum=0.9", "optimizer.weight_decay=0.1"], ["optimizer=adam"]]
)
def test_a_client_trains_its_truncation_alone(optimizer: list[str]) -> None:
    sim = set_up(simulation("fedavg", RANKS, *optimizer))
    ids = np.arange(6)
    w, mask = spread(sim), above(sim, ids)
    pull = {"extra_grad": lambda s: s.theta - w}  # of a proximal term, which pulls all columns
    out = Cohort(sim.engine, ids, 0, "trial").train(w, **pull).theta
    assert not out[mask].any() and (out != torch.where(mask, 0, w))[~mask].float().mean() > 0.99
    elsewhere = torch.where(mask, torch.randn(6, len(w)), w)  # other values where a client has no columns
    equal(Cohort(sim.engine, ids, 0, "trial").train(elsewhere, **pull).theta, out)


@pytest.mark.parametrize("client", [0, 2, 3])
def test_it_is_a_model_of_this_rank(client: int) -> None:
    """A run in which all have rank r_i, with alpha / r = alpha / max_i r_i, trains the same."""
    sim, rank = set_up(simulation("fedavg")), RANKS[client]
    small = set_up(simulation("fedavg", rank, alpha=8.0 * rank / 4))
    w = spread(sim)
    named = sim.engine.model.named(w)
    cut = {n: t[:rank] if "lora_A" in n else t[:, :rank] if "lora_B" in n else t for n, t in named.items()}
    start = torch.cat([t.reshape(-1) for t in cut.values()])
    small.engine.model.module.load_state_dict(sim.engine.model.module.state_dict() | cut)
    ids = np.array([client])
    found, expected = (Cohort(s.engine, ids, 0).train(x).theta[0] for s, x in ((sim, w), (small, start)))
    for name, value in small.engine.model.named(expected).items():
        full = sim.engine.model.named(found)[name]
        close(full[:rank] if "lora_A" in name else full[:, :rank] if "lora_B" in name else full, value, 1e-5)


# -- what is sent ----------------------------------------------------------------------------------------
def numbers(rank: int) -> int:
    """By hand: a head 8 -> 10 (the classes of the case), products on 8 -> 24, 8 -> 8, 8 -> 16 and 16 -> 8."""
    return rank * ((8 + 24) + (8 + 8) + 2 * (8 + 16))


def test_bytes_are_those_of_each_clients_rank() -> None:
    sim, ids = set_up(simulation("fedavg")), np.array([0, 1, 3])
    head = sim.engine.model.columns["head"].size
    cohort = Cohort(sim.engine, ids, 0)
    sim.algorithm.round(cohort)
    expected = 4 * sum(head + numbers(RANKS[i]) for i in ids)
    assert cohort.cost.bytes_down == cohort.cost.bytes_up == expected
    single = set_up(simulation("fedavg", 4))
    whole = Cohort(single.engine, ids, 0)
    single.algorithm.round(whole)
    assert whole.cost.bytes_up == 4 * 3 * (head + numbers(4))


def test_the_server_averages_with_zeros() -> None:
    sim, ids = set_up(simulation("fedavg")), np.array([0, 1, 3])
    sim.algorithm.w = w = spread(sim)
    theta = Cohort(sim.engine, ids, 0, "trial").train(w).theta
    cohort = Cohort(sim.engine, ids, 0)
    sim.algorithm.round(cohort)
    equal(sim.algorithm.w, cohort.weights @ torch.where(above(sim, ids), 0, theta))


def test_of_differences_columns_above_the_rank_do_not_change() -> None:
    sim, ids = set_up(simulation("scaffold")), np.array([0, 2])
    sim.algorithm.x = x = spread(sim)
    sim.algorithm.round(Cohort(sim.engine, ids, 0))
    of_none = above(sim, ids).all(0)
    assert of_none.any() and torch.equal(sim.algorithm.x[of_none], x[of_none])
    assert not sim.algorithm.c[of_none].any()


def test_noise_is_not_added_to_what_is_not_sent() -> None:
    sim, ids = simulation("fedavg"), np.array([0, 2])
    privacy = build.privacy(case("fedavg").config(**{"privacy.epsilon": 1.0, "privacy.clip": 1.0}), sim.engine.rows)
    object.__setattr__(sim.engine, "privacy", privacy)
    set_up(sim)
    sim.algorithm.round(Cohort(sim.engine, ids, 0))
    of_none = above(sim, ids).all(0)
    assert not sim.algorithm.w[of_none].any() and sim.algorithm.w[~of_none].all()


def test_equal_ranks_are_a_single_number() -> None:
    found, expected = (state_of(run_rounds(simulation("pgfed", rank), 2)) for rank in ([2] * 6, 2))
    assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)


# -- methods ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", METHODS)
def test_methods_under_every_plan_deploy_each_clients_rank(method: str) -> None:
    sims = {plan: run_rounds(simulation(method, plan=plan), 2) for plan in ("vmap", "loop", "threads")}
    for plan in ("loop", "threads"):
        assert_same(state_of(sims[plan]), state_of(sims["vmap"]), 1e-5)
    sim, ids = sims["vmap"], np.arange(6)
    ((_, rows),) = evaluate.deployed(sim.algorithm, sim.engine, ids, 1, True)
    mask = above(sim, ids)
    assert rows.shape == mask.shape and not rows[mask].any() and rows[~mask].any()


@pytest.mark.parametrize(
    "words, message",
    [
        (["adapter.rank=[1,2]"], r"adapter\.rank lists 2 ranks, and there are 20 clients to train: list one per"),
        (["adapter.rank=[0,2]"], r"adapter\.rank"),
        (["adapter=compacter", "adapter.rank=[1,2]"], r"adapter\.rank"),
        ([f"adapter.rank={[1, 2] * 10}", "algorithm=moon"], "Moon is not among the methods that support them"),
        ([f"adapter.rank={[1, 2] * 10}", "compression=topk"], "a compressor needs messages of one length"),
        (
            [f"adapter.rank={[1, 2] * 10}", "aggregator=median"],
            "would read the columns that a client lacks as uploads of 0",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {word.partition("=")[0] for word in words}
    defaults = [word for word in ("adapter=lora", "algorithm=fedavg") if word.partition("=")[0] not in given]
    words = [word.replace(" ", "") for word in words]
    status = main([*TINY, *defaults, *words, "rounds=1", "tracking=disabled", f"hydra.run.dir={tmp_path / 'run'}"])
    error = capsys.readouterr().err
    assert status == 2 and error.count("fedbench: ") == 1
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(error)


# -- runs ------------------------------------------------------------------------------------------------
def finished(folder: Path, *words: str, method: str = "fedavg") -> Path:
    ranks = ",".join(map(str, itertools.islice(itertools.cycle([1, 2, 3]), 20)))
    quick = ["rounds=3", "tracking=disabled", "hardware.executor=vmap", "hardware.threads=1", "optimizer.lr=0.2"]
    options = [*TINY, "adapter=lora", f"adapter.rank=[{ranks}]", f"hydra.run.dir={folder}"]
    assert main([f"algorithm={method}", *options, *quick, *words]) == 0
    return folder


def test_a_paused_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    whole = finished(tmp_path / "whole", "system.dropout=0.2")
    parts = finished(tmp_path / "parts", "system.dropout=0.2", "checkpoint.pause_after=1")
    assert main([f"resume={parts}"]) == 0
    states = [torch.load(folder / "checkpoint.pt")["algorithm"] for folder in (whole, parts)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    first, second = ((folder / "clients.csv").read_bytes() for folder in (whole, parts))
    assert first == second


def test_an_export_has_the_clients_rank(tmp_path: Path) -> None:
    peft, files = pytest.importorskip("peft"), pytest.importorskip("safetensors.torch")
    run, client = finished(tmp_path / "run"), 4
    found, federation = predictions(run), open_run(run).engine.federation
    measured = torch.from_numpy(found["logits"][found["client"] == client])
    x, _ = federation.gather(torch.from_numpy(federation.splits["test"][client]))
    state = client_state(run, client)
    assert state["blocks.0.attn.qkv.lora_A.weight"].shape == (2, 8)
    assert state["blocks.0.attn.qkv.lora_B.weight"].shape == (24, 2)
    module = ViTTiny((1, 8, 8), 10, patch=2, width=8, depth=1, heads=2).eval()
    module.load_state_dict(client_state(run, client, merged=True))
    close(module(x), measured, 1e-5)
    save_peft(run, client, tmp_path / "peft")
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert config["r"] == 2 and config["lora_alpha"] == pytest.approx(8.0 * 2 / 3)
    module.load_state_dict(files.load_file(tmp_path / "peft/base_model.safetensors"))
    close(peft.PeftModel.from_pretrained(module, tmp_path / "peft").eval()(x), measured, 1e-5)


def test_costs_depend_on_who_takes_part(tmp_path: Path) -> None:
    with (finished(tmp_path / "run") / "costs.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert all(line["bytes_up"] == line["bytes_down"] for line in lines)
    assert len({line["bytes_up"] for line in lines}) > 1  # other clients have other ranks
