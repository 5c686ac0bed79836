"""Methods with each rule that combines LoRA factors: the table of the docs, refusals, and one client."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import assert_same, case, run_rounds, set_up, state_of
from conftest import ROOT
from tiny import close
from torch import Tensor

from fedbench.commands import main
from fedbench.core.options import ConfigError
from fedbench.simulation import build, evaluate
from fedbench.simulation.run_state import Simulation

TINY = ["model=vit_tiny", "model.patch=2", "model.width=8", "model.heads=2", "model.depth=1", "adapter=lora"]
RULES = ["average", "ffa", "fedsa", "flora", "flex", "het", "fedex"]
METHODS = ["fedavg", "fedprox", "fedper", "ditto", "pgfed", "scaffold"]


def table() -> dict[tuple[str, str], bool]:
    """Return whether a method works with a rule, by method and rule, as docs/federated_adapters.md says."""
    text = (ROOT / "docs/federated_adapters.md").read_text()
    lines = text.split("| `algorithm=` | ")[1].split("\n\n")[0].splitlines()
    head, _, *rows = [[cell.strip(" `") for cell in line.strip("| ").split("|")] for line in lines]
    methods = {cells[0].rpartition("`")[2]: cells[1:] for cells in rows}  # "all others, such as `scaffold"
    return {(method, rule): cells[head.index(rule)] == "yes" for method, cells in methods.items() for rule in head}


ALLOWED = table()
WORKING = [pair for pair, allowed in ALLOWED.items() if allowed]


def simulation(method: str, sync: str, *more: str) -> Simulation:
    words = [*TINY, "adapter.rank=2", "adapter.alpha=6", f"adapter.sync={sync}", "optimizer.momentum=0", *more]
    return case(method).on(words).simulation()


def test_the_table_has_all_methods_and_rules() -> None:
    assert list(ALLOWED) == list(product(METHODS, RULES))
    assert 30 < len(WORKING) < len(ALLOWED)


@pytest.mark.parametrize("method, sync", ALLOWED)
def test_what_the_table_refuses_is_refused_before_the_first_round(method: str, sync: str) -> None:
    sim, refused = simulation(method, sync), False
    try:
        build.check_method(sim.engine, sim.algorithm)
        build.check_states(set_up(sim).engine)
    except ConfigError as error:
        refused = True
        assert str(error).startswith(f"adapter.sync={sync} ") and ": use algorithm=fedavg, fedprox" in str(error)
    assert refused != ALLOWED[method, sync]


@pytest.mark.slow
@pytest.mark.parametrize("method, sync", ALLOWED)
def test_two_rounds_of_a_run(method: str, sync: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"algorithm={method}", *TINY, f"adapter.sync={sync}", "optimizer.momentum=0", "rounds=2", "sample_rate=1"]
    quick = ["partition.num_clients=4", "dataset.subset=0.3", "tracking=disabled", "hardware.executor=vmap"]
    code = main([*words, *quick, f"hydra.run.dir={tmp_path / 'run'}"])
    error = capsys.readouterr().err
    assert (code, (tmp_path / "run/metrics.csv").exists()) == ((0, True) if ALLOWED[method, sync] else (2, False))
    assert error.count("fedbench: ") == (0 if ALLOWED[method, sync] else 1)


# -- one client ------------------------------------------------------------------------------------------
def logits(sim: Simulation, of_server: bool = False) -> Tensor:
    """Return the logits of the model that client 1 uses, or of the server's, on its test samples.  # [n, 10]"""
    ((_, deployed),) = evaluate.deployed(sim.algorithm, sim.engine, np.array([1]), sim.done - 1, False)
    row = sim.algorithm.global_row() if of_server else deployed[0] if deployed.dim() == 2 else deployed
    federation = sim.engine.federation
    x, _ = federation.gather(torch.from_numpy(federation.splits["test"][1]))
    assert isinstance(row, Tensor) and isinstance(x, Tensor)
    return sim.engine.model.predict(row[None], x[None])[0]


def after(method: str, sync: str, rounds: int) -> Simulation:
    return run_rounds(simulation(method, sync), rounds, [[1]] * rounds)


@pytest.mark.parametrize("method, sync", [pair for pair in WORKING if pair[1] not in ("average", "ffa")])
@pytest.mark.slow
def test_with_one_client_all_rules_have_the_model_of_average(method: str, sync: str) -> None:
    """A mean over one client is that client's model.  ffa trains other parameters, so it is compared below.

    From the second round on, flora and flex train other factors of the same product, and the proximal term of fedprox
    reads those of fedsa.
    """
    same_factors = sync in ("het", "fedex") or (sync == "fedsa" and method != "fedprox")
    for rounds in (1, 2) if same_factors else (1,):
        average, other = after(method, "average", rounds), after(method, sync, rounds)
        close(logits(other), logits(average), 1e-5)
        if sync != "fedsa" and method != "fedper":  # which have no complete model of the server
            close(logits(other, True), logits(average, True), 1e-5)
        assert (logits(average) - logits(set_up(simulation(method, "average")))).abs().max() > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_ffa_is_average_with_every_a_frozen(method: str) -> None:
    ffa = run_rounds(simulation(method, "ffa"), 2)
    frozen = run_rounds(simulation(method, "average", "model.freeze=['*.lora_A.*']"), 2)
    assert_same(state_of(ffa), state_of(frozen))
    assert not any("lora_A" in name for name in frozen.engine.model.spans)
