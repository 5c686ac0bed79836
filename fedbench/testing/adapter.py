"""What every adapter keeps: a frozen backbone, and one result whichever way many clients are computed.

An adapter is tried in a small vision transformer: two blocks with linear layers `attn.qkv`, `attn.proj`, `mlp.0` and
`mlp.2`, layer norms, and a head.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from fedbench.adapters.base import Adapter
from fedbench.core.options import require
from fedbench.engine.federation import Federation
from fedbench.engine.optim import SGD
from fedbench.nn.batched_operators import ForwardContext
from fedbench.nn.flat import FlatModel
from fedbench.simulation.build_model import model as build_model
from fedbench.simulation.instantiate import make
from fedbench.testing._cases import TINY, composed
from fedbench.testing._federation import CPU, all_clients, engine_on, ragged
from fedbench.testing._suite import Broken, Report, Skipped, Suite
from fedbench.testing._targets import Target, described, path_of

K, B = 3, 5  # clients, samples of a batch
MODEL = ("model=vit_tiny", *TINY["vit_tiny"], "model.depth=2")
CLOSE = 1e-4  # of the largest number


@dataclass
class AdapterCase:
    """An adapter, and three clients with images."""

    values: dict[str, Any]

    @functools.cached_property
    def federation(self) -> Federation:
        """Three clients of 4 to 12 samples."""
        return Federation.build(*ragged(sizes=(8, 4, 12)), CPU)

    def cfg(self, seed: int = 0) -> DictConfig:
        """A run's configuration."""
        cfg = composed("algorithm=fedavg", *MODEL).copy()
        cfg.adapter, cfg.seed = self.values, seed
        return cfg

    def flat(self, seed: int = 0) -> FlatModel:
        """A new adapted model."""
        return build_model(self.cfg(seed), self.federation)

    @functools.cached_property
    def bare(self) -> FlatModel:
        """The model without it."""
        return build_model(composed("algorithm=fedavg", *MODEL), self.federation)

    def mapped(self) -> FlatModel:
        """A new one, computed by torch.vmap: a layer with a hook is in no program."""
        module = self.flat().module
        module.get_submodule("embed").register_forward_hook(lambda *_: None)
        return FlatModel(module, {})

    def trained(self, plan: str) -> tuple[FlatModel, Tensor]:
        """A new one, and what two epochs from its first row make of it for each client.  # [K, P]"""
        model = self.flat()
        engine = engine_on(self.federation, model, SGD(lr=0.1, momentum=0.9), plan=plan, batch_size=4, epochs=2)
        return model, all_clients(engine).train(model.init_row()).theta

    def inputs(self) -> Tensor:
        """Five images for each client.  # [K, B, ...]"""
        index = torch.from_numpy(self.federation.splits["train"].indices[: K * B]).view(K, B)
        images, _ = self.federation.gather(index)
        assert isinstance(images, Tensor)
        return images


SUITE: Suite[AdapterCase] = Suite("adapter")


def check_adapter(
    target: Target, options: Mapping[str, Any] | None = None, *, only: Iterable[str] | None = None
) -> Report:
    """Check an adapter: its class, its dotted path, or the name of an option of conf/adapter.

    options: of its constructor.  only: the names of some checks.  ConfigError where it cannot be built, or finds no
    layer that it can adapt.
    """
    case = case_for(target, options)
    return SUITE.run(path_of(target), f"in a small vision transformer, for {K} clients of 4 to 12 images", case, only)


def case_for(target: Target, options: Mapping[str, Any] | None = None) -> AdapterCase:
    """The adapter; ConfigError where it cannot be built, is none, or adapts nothing."""
    case = AdapterCase(described("adapter", target, options))
    words = f"{path_of(target)} is no adapter (a subclass of fedbench.adapters.base.Adapter)"
    require(isinstance(make(case.values, key="adapter"), Adapter), words)
    case.flat()
    return case


def rows_of(model: FlatModel) -> Tensor:
    """Three clients' rows, away from the initialization.  # [K, P]"""
    generator = torch.Generator().manual_seed(1)
    return model.init_row() + 0.3 * torch.randn(K, model.size, generator=generator)


def _computed(model: FlatModel, rows: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and gradients of rows [k, P] on inputs [k, B, ...], in training mode."""
    leaf = rows.clone().requires_grad_()
    logits = model.apply(model.named(leaf), x, True, ForwardContext(True))
    return logits.detach(), torch.autograd.grad(logits.square().sum(), leaf)[0]


def _away(a: Tensor, b: Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-12))


# -- what learns -----------------------------------------------------------------------------------------
@SUITE.check
def a_row_holds_what_learns(case: AdapterCase) -> None:
    """All that is added learns, and of the model's own parameters those alone that it says."""
    adapter, module = make(case.values, key="adapter"), copy.deepcopy(case.bare.module)
    new, parameters = adapter.insert(module), dict(module.named_parameters())
    if not new:
        raise Skipped("it adds nothing")
    idle = [name for name in new if not parameters[name].requires_grad]
    if idle:
        raise Broken(f"{idle[0]} is new and does not learn: what `adapt` adds must require a gradient")
    said = [name for name in parameters if any(fnmatch.fnmatch(name, pattern) for pattern in adapter.train)]
    others = [name for name, p in parameters.items() if p.requires_grad and name not in {*new, *said}]
    if others:
        raise Broken(f"{others[0]} is the model's own and learns: leave `insert` to the base class, which freezes all")


@SUITE.check
def the_backbone_stays(case: AdapterCase) -> None:
    """Training changes nothing outside the row."""
    model = case.flat()
    before = {n: t.clone() for n, t in model.module.state_dict().items()}
    model, _ = case.trained("vmap")
    after = model.module.state_dict()
    changed = [n for n, t in before.items() if not torch.equal(t, after[n])]
    if changed:
        raise Broken(f"{changed[0]} is not what it was before training: write to nothing in `forward`")


@SUITE.check
def what_is_added_learns(case: AdapterCase) -> None:
    """Every parameter of the column group adapter moves in two epochs."""
    model, theta = case.trained("vmap")
    if "adapter" not in model.columns:
        raise Skipped("it adds nothing")
    start = model.init_row()
    spans = [(n, a, b) for n, (a, b) in model.spans.items() if model.columns["adapter"].overlaps(a, b)]
    still = [n for n, a, b in spans if torch.equal(theta[:, a:b], start[a:b].expand(K, -1))]
    if still:
        raise Broken(f"{still[0]} has no gradient: is it used in `forward`, and not detached?")


# -- how it begins ---------------------------------------------------------------------------------------
@SUITE.check
def outputs_are_the_models_at_first(case: AdapterCase) -> None:
    """Where it says that it is neutral, a model that was just adapted computes what it did before."""
    if not make(case.values, key="adapter").neutral:
        raise Skipped("it does not say that it is neutral")
    model, x = case.flat(), case.inputs()[0]
    away = _away(model.predict(model.init_row(), x), case.bare.predict(case.bare.init_row(), x))
    if away > CLOSE:
        raise Broken(
            f"`neutral` is set, and at first the logits are {away:.2g} of the largest one away from the bare model's: "
            "begin with zeros in the last layer, or set neutral = False"
        )


@SUITE.check
def draws_are_keyed(case: AdapterCase) -> None:
    """Initial values depend on the seed alone."""
    torch.manual_seed(1)
    first = case.flat()
    torch.manual_seed(2)
    second = case.flat()
    for (name, a), b in zip(first.module.state_dict().items(), second.module.state_dict().values()):
        if not torch.equal(a, b):
            raise Broken(
                f"{name} begins otherwise when the model is made again: draw from torch's generator in `adapt`"
            )


# -- ways through the model ------------------------------------------------------------------------------
@SUITE.check
def clients_are_independent(case: AdapterCase) -> None:
    """Logits and gradients of a client are the same alone and among three."""
    model, x = case.flat(), case.inputs()
    _agree(case, "alone", lambda i: _computed(model, rows_of(model)[i : i + 1], x[i : i + 1]))


@SUITE.check
def mapped_over_clients(case: AdapterCase) -> None:
    """Logits and gradients are the same when the module is mapped over clients by torch.vmap."""
    mapped, x = case.mapped(), case.inputs()
    found = _computed(mapped, rows_of(mapped), x)
    _agree(case, "mapped by torch.vmap", lambda i: (found[0][i : i + 1], found[1][i : i + 1]))


def _agree(case: AdapterCase, how: str, one: Callable[[int], tuple[Tensor, Tensor]]) -> None:
    """Broken unless the model, for three clients at once, gives what one(i) gives of client i."""
    model, x = case.flat(), case.inputs()
    many = _computed(model, rows_of(model), x)
    for i in range(K):
        for what, a, b in zip(("logits", "gradients"), many, one(i)):
            if _away(a[i : i + 1], b) > CLOSE:
                raise Broken(
                    f"a client's {what} are others {how} than among {K}, by {_away(a[i : i + 1], b):.2g} of the "
                    "largest: let `forward` compute each sample from itself and the layer's parameters"
                )


@SUITE.check
def plans_agree(case: AdapterCase) -> None:
    """Trained rows are the same by the loop, in threads, and all at once."""
    _, expected = case.trained("loop")
    for plan in ("threads", "vmap"):
        away = _away(case.trained(plan)[1], expected)
        if away > CLOSE:
            raise Broken(f"rows trained by executor={plan} are {away:.2g} of the largest number away from the loop's")
