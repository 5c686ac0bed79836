"""Checks of adapters in a small vision transformer; K = 3 clients have B = 5 images and a row of P parameters each.

The backbone must be frozen, and results must not depend on how clients are computed.  The model has two blocks, whose
layers are `attn.qkv`, `attn.proj`, `mlp.0`, `mlp.2` and layer norms, and a head.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import SkipTest

import torch
from omegaconf import DictConfig
from torch import Tensor

from fedbench.adapters.base import Adapter
from fedbench.core.options import listed
from fedbench.engine.federation import Federation
from fedbench.engine.optim import SGD
from fedbench.nn.batched_operators import ForwardContext
from fedbench.nn.flat import FlatModel
from fedbench.simulation.build_model import model as build_model
from fedbench.simulation.instantiate import make
from fedbench.testing._cases import TINY, assert_close, composed
from fedbench.testing._federation import CPU, all_clients, engine_on, ragged
from fedbench.testing._suite import Report, Suite
from fedbench.testing._targets import Target, described, path_of

K, B = 3, 5  # clients, samples of a batch
MODEL = ("model=vit_tiny", *TINY["vit_tiny"], "model.depth=2")
TOLERANCE = 1e-4  # relative to the largest value


@dataclass
class AdapterCase:
    """An adapter to check: the path of its class (`_target_`) and its options, and three clients with images."""

    values: dict[str, Any]

    @functools.cached_property
    def federation(self) -> Federation:
        """A federation of three clients, with 8, 4 and 12 images to train on."""
        return Federation.build(*ragged(sizes=(8, 4, 12)), CPU)

    @functools.cached_property
    def cfg(self) -> DictConfig:
        """The configuration of a run of FedAvg that trains the small vision transformer with the adapter."""
        cfg = composed("algorithm=fedavg", *MODEL).copy()
        cfg.adapter = self.values
        return cfg

    def adapter(self) -> Adapter:
        """Return a new object of the adapter's class."""
        return make(self.values, key="adapter")

    def flat(self) -> FlatModel:
        """Return a new model with the adapter; its flat vector contains only the parameters that are trained."""
        return build_model(self.cfg, self.federation)

    @functools.cached_property
    def bare(self) -> FlatModel:
        """The same model without the adapter, so that all of its parameters are trained."""
        return build_model(composed("algorithm=fedavg", *MODEL), self.federation)

    def train(self, plan: str) -> tuple[FlatModel, Tensor]:
        """Train a new model for two epochs.

        Args:
            plan: How clients are computed, a name in `PLANS`, such as "vmap" (all at once) or "loop" (one by one).

        Returns:
            The model, and the clients' rows [K, P].
        """
        model = self.flat()
        engine = engine_on(self.federation, model, SGD(lr=0.1, momentum=0.9), plan=plan, batch_size=4, epochs=2)
        return model, all_clients(engine).train(model.init_row()).theta

    def inputs(self) -> Tensor:
        """Return five training images of each of the three clients.  # [K, B, channels, H, W]"""
        index = torch.from_numpy(self.federation.splits["train"].indices[: K * B]).view(K, B)
        images, _ = self.federation.gather(index)
        assert isinstance(images, Tensor)
        return images

    @functools.cached_property
    def together(self) -> tuple[Tensor, Tensor]:
        """The logits [K, B, C] and gradients [K, P] of K clients with the parameters of `rows_of`, computed at once."""
        model = self.flat()
        return _logits_and_gradients(model, rows_of(model), self.inputs())


SUITE: Suite[AdapterCase] = Suite("adapter")


def check_adapter(
    target: Target, options: Mapping[str, Any] | None = None, *, only: Iterable[str] | None = None
) -> Report:
    """Check an adapter.

    Args:
        target: Its class, its dotted path, or an option of conf/adapter.
        options: Arguments of its constructor.
        only: The names of the checks to run; None runs all.

    Returns:
        The result of every check.

    Raises:
        ConfigError: The adapter cannot be built, or finds no layer to adapt.
    """
    # setting: model and clients, for the heading of the report
    setting = f"in a small vision transformer, for {K} clients of 4 to 12 images"
    return SUITE.run(path_of(target), setting, case_for(target, options), only)


def case_for(target: Target, options: Mapping[str, Any] | None = None) -> AdapterCase:
    """Return the case that the checks receive: the adapter, with a small model and a few clients.

    Args:
        target: Its class, its dotted path, or an option of conf/adapter.
        options: Arguments of its constructor.

    Raises:
        ConfigError: It cannot be built, is not an Adapter, or adapts no layer.
    """
    case = AdapterCase(described("adapter", target, options, Adapter))
    case.flat()  # for its errors: it builds the adapted model
    return case


def rows_of(model: FlatModel) -> Tensor:
    """Return one row for each of three clients, random numbers around the initial row.  # [K, P]

    At the initial row itself, an adapter may have no effect.
    """
    generator = torch.Generator().manual_seed(1)
    return model.init_row() + 0.3 * torch.randn(K, model.size, generator=generator)


def _logits_and_gradients(model: FlatModel, rows: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of a model in training mode, and the gradients of the sum of their squares.

    Args:
        model: The model.
        rows: A row for each client [k, P].
        x: The inputs of each client [k, B, ...].

    Returns:
        The logits [k, B, C] and the gradients with respect to the rows [k, P].
    """
    leaf = rows.clone().requires_grad_()
    logits = model.apply(model.named(leaf), x, batched=True, context=ForwardContext(train=True))
    return logits.detach(), torch.autograd.grad(logits.square().sum(), leaf)[0]


# -- training --------------------------------------------------------------------------------------------
@SUITE.check
def a_row_holds_what_learns(case: AdapterCase) -> None:
    """All parameters of the adapter are trained, and of the model only those that `train` names.

    Remedy: parameters that `adapt` adds must require a gradient.  Do not override `insert`, which freezes the model.
    """
    adapter, module = case.adapter(), copy.deepcopy(case.bare.module)
    new, parameters = adapter.insert(module), dict(module.named_parameters())  # new: names of added parameters
    if not new:
        raise SkipTest("it adds nothing")
    frozen = [name for name in new if not parameters[name].requires_grad]
    assert not frozen, f"new parameters that are not trained: {listed(frozen)}"
    named = {name for name in parameters if any(fnmatch.fnmatch(name, pattern) for pattern in adapter.train)}
    others = [name for name, p in parameters.items() if p.requires_grad and name not in {*new, *named}]
    assert not others, f"trained parameters of the model that `train` does not name: {listed(others)}"


@SUITE.check
def the_backbone_stays(case: AdapterCase) -> None:
    """Training changes only the row.

    Remedy: do not write to parameters and buffers in `forward`.
    """
    before = {name: t.clone() for name, t in case.flat().module.state_dict().items()}
    model, _ = case.train("vmap")
    changed = [name for name, t in model.module.state_dict().items() if not torch.equal(t, before[name])]
    assert not changed, f"training changes {listed(changed)}"


@SUITE.check
def what_is_added_learns(case: AdapterCase) -> None:
    """Two epochs change every parameter of the column group adapter.

    Remedy: use every parameter in `forward`, and do not detach it.
    """
    model, theta = case.train("vmap")
    if "adapter" not in model.columns:
        raise SkipTest("it adds nothing")
    start, columns = model.init_row(), model.columns["adapter"]
    # (first, stop): the columns of a parameter in a row
    spans = {name: (first, stop) for name, (first, stop) in model.spans.items() if columns.overlaps(first, stop)}
    unchanged = [name for name, (a, b) in spans.items() if torch.equal(theta[:, a:b], start[a:b].expand(K, -1))]
    assert not unchanged, f"parameters that do not change: {listed(unchanged)}"


# -- initialization --------------------------------------------------------------------------------------
@SUITE.check
def outputs_are_the_models_at_first(case: AdapterCase) -> None:
    """If the attribute `neutral` is set, the initial adapter does not change the outputs of the model.

    Remedy: initialize the last layer with zeros, or set neutral = False.
    """
    if not case.adapter().neutral:
        raise SkipTest("its attribute `neutral` is false")
    model, x = case.flat(), case.inputs()[0]
    adapted, bare = model.predict(model.init_row(), x), case.bare.predict(case.bare.init_row(), x)
    assert_close(adapted, bare, TOLERANCE, "`neutral` is set, but the initial logits and those of the model")


@SUITE.check
def draws_are_keyed(case: AdapterCase) -> None:
    """Initial values depend on the seed of the run only.

    Remedy: use torch's random numbers in `adapt`.
    """
    torch.manual_seed(1)
    first = case.flat().module.state_dict()
    torch.manual_seed(2)
    second = case.flat().module.state_dict()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, f"other initial values in a second model: {listed(different)}"


# -- execution -------------------------------------------------------------------------------------------
@SUITE.check
def clients_are_independent(case: AdapterCase) -> None:
    """Logits and gradients of a client are the same alone and with other clients.

    Remedy: compute each sample in `forward` from itself and the parameters of the layer.
    """
    model, x = case.flat(), case.inputs()
    rows = rows_of(model)
    for i in range(K):
        _compare_with_together(case, _logits_and_gradients(model, rows[i : i + 1], x[i : i + 1]), i, "computed alone")


@SUITE.check
def mapped_over_clients(case: AdapterCase) -> None:
    """Logits and gradients are the same if the module is mapped over clients by torch.vmap.

    Remedy: compute each sample in `forward` from itself and the parameters of the layer.
    """
    module = case.flat().module
    # A module with a hook is not traced to operations on all clients, so that FlatModel maps it by torch.vmap.
    module.get_submodule("embed").register_forward_hook(lambda *_: None)
    mapped = FlatModel(module)
    logits, gradients = _logits_and_gradients(mapped, rows_of(mapped), case.inputs())
    for i in range(K):
        _compare_with_together(case, (logits[i : i + 1], gradients[i : i + 1]), i, "mapped by torch.vmap")


def _compare_with_together(case: AdapterCase, found: tuple[Tensor, Tensor], i: int, condition: str) -> None:
    """Assert that logits and gradients of client i equal those that are computed for all clients together.

    Args:
        case: The adapter to check, with three clients.
        found: The logits [1, B, C] and gradients [1, P] of client i.
        i: The index of the client.
        condition: How they were computed, such as "computed alone", for the message.
    """
    for name, together, values in zip(("logits", "gradients"), case.together, found):
        names = f"the {name} of a client {condition} and with {K - 1} other clients"
        assert_close(together[i : i + 1], values, TOLERANCE, names)


@SUITE.check
def plans_agree(case: AdapterCase) -> None:
    """Trained rows are the same for one client at a time, in threads, and for all clients at once.

    Remedy: compute each sample in `forward` from itself and the parameters of the layer.
    """
    _, expected = case.train("loop")
    for plan in ("threads", "vmap"):
        assert_close(case.train(plan)[1], expected, TOLERANCE, f"rows trained by executor={plan} and executor=loop")
