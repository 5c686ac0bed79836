"""The forms of results/variants by hand, and the numbers of docs/variants.md, which are those of the page."""

import re

import numpy as np
import pytest
import script_files
import torch
from by_hand import COHORTS, six_clients
from conftest import ROOT
from tiny import (
    HEAD,
    Affine,
    Point,
    arrays_of,
    close,
    engine,
    engine_on,
    equal,
    mlp,
    play,
    split_of,
    targets_federation,
)

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedavgm import FedAvgM
from fedbench.algorithms.fedbn import FedBN
from fedbench.algorithms.fedlc import FedLC
from fedbench.engine.engine import Engine
from fedbench.engine.optim import SGD
from fedbench.nn.flat import FlatModel

FOLDER = ROOT / "results" / "variants"


forms = script_files.load(FOLDER / "forms.py")


def test_fluke_drops_the_first_change_and_then_has_momentum() -> None:
    one, other = six_clients(), six_clients()
    method = play(one, forms.FlukeFedAvgM(0.5), 1, COHORTS)
    equal(method.w, one.model.init_row())
    play(one, method, 2, COHORTS[1:], begin=1)
    close(method.w, play(other, play(other, FedAvgM(0.5), 0), 2, COHORTS[1:], begin=1).w, 1e-6)


@pytest.mark.parametrize("form, w", [("FlukeFedNova", 2.75), ("FlowerFedNova", 2.2)])
def test_fednova_of_models_by_hand(form: str, w: float) -> None:
    """Losses theta . y from w = 2: 2 steps of gradient 1 and 6 steps of gradient -1, at lr 0.1; p = 1/4, 3/4.

    theta = 1.8, 2.6 and tau_eff = 5.  fluke: the weights p tau_eff / a are 5/8 each.  Flower: p / a is 1/8 each, which
    becomes 1/2 by the division by the sum.
    """
    targets = [np.full((2, 1), 1.0), np.full((6, 1), -1.0)]
    e = engine_on(targets_federation(targets, Affine()), Point([2.0]), SGD(0.1), batch_size=1)
    close(play(e, getattr(forms, form)(), 1).w, torch.tensor([w]))


def test_pooled_counts_that_are_balanced_are_fedavg() -> None:
    def one_class_each() -> Engine:
        x, y = np.random.default_rng(0).normal(size=(9, 16)).astype(np.float32), np.repeat([0, 1, 2], 3)
        return engine(arrays_of(x, y, 3), split_of([3, 3, 3], [0, 0, 0]), mlp(), SGD(lr=0.1), columns=HEAD, epochs=2)

    pooled, own, average = (play(one_class_each(), m, 2).w for m in (forms.PFLlibFedLC(), FedLC(), FedAvg()))
    close(pooled, average, 1e-6)
    assert float((own - average).abs().max()) > 1e-3


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_heads_are_mixed_one_after_the_other(order: list[int]) -> None:
    """The list of heads is replaced in place, as by a server whose uploads are references."""
    generator = torch.Generator().manual_seed(0)
    a, heads = torch.rand(3, 3, generator=generator), torch.rand(3, 4, generator=generator)
    listed = [heads[client] for client in order]
    for i in range(3):
        listed[i] = sum(a[i, j] * listed[j] for j in range(3))
    mixed = forms.mixed_in_turn(a, torch.tensor(order)) @ heads
    close(mixed[order], torch.stack(listed), 1e-6)


@pytest.mark.parametrize("form", ["AliasedFedPAC", "PFLlibFedPAC"])
def test_forms_of_fedpac_run(form: str) -> None:
    e = six_clients()
    assert torch.isfinite(play(e, getattr(forms, form)(), 3, COHORTS).h.whole()).all()


def test_the_server_continues_from_the_head_of_client_0() -> None:
    e = six_clients()
    method = play(e, forms.PFLlibFedGH(head_lr=1e-30), 1, [[1, 2]])
    equal(method.h, method.head.take(e.model.init_row()))
    play(e, method, 1, [[3, 0]], begin=1)
    equal(method.h, method.head.take(method.theta[np.array([0])])[0])


def test_names_miss_the_norms_of_shortcuts() -> None:
    model = FlatModel(forms.NormedShortcuts((1, 8, 8), 10))
    row = torch.zeros(model.size)
    by_type, by_name = FedBN().personal_columns(model), forms.FedBNByName().personal_columns(model)
    row = by_name.put(by_type.put(row, torch.ones(by_type.size)), torch.zeros(by_name.size))
    missed = {name for name, values in model.named(row).items() if values.any()}
    assert missed == {f"body.{i}.short.1.{name}" for i in (4, 5) for name in ("weight", "bias")}


def numbers_by_case(path: str) -> dict[str, list[str]]:
    """The numbers with a spread in each row of a case, such as "FedNova, fluke"."""
    rows = re.findall(r"^\| ([^|]+, [^|]+?) \|(.*)\|$", (ROOT / path).read_text(), re.MULTILINE)
    found = {case: re.findall(r"-?\d+\.\d+ ± \d+\.\d+", rest) for case, rest in rows}
    return {case: numbers for case, numbers in found.items() if numbers}


def test_the_numbers_in_the_docs_are_those_of_the_page() -> None:
    shown = numbers_by_case("docs/variants.md")
    assert len(shown) > 15 and all(len(numbers) == 3 for numbers in shown.values())
    assert shown == numbers_by_case("results/variants/README.md")
