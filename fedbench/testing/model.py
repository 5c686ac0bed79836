"""Checks of a model: a row computes what the module does, in each way in which several clients can be computed.

There are four ways: a traced graph, a manual backward pass, a batched forward pass of the module itself, and
torch.vmap.  A model is tried in the ways that it supports.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from fedbench.core.inputs import map_inputs, wrap_inputs
from fedbench.core.options import ConfigError
from fedbench.core.split import Split
from fedbench.data.base import Arrays
from fedbench.engine.engine import Engine
from fedbench.engine.federation import Federation, Inputs
from fedbench.engine.optim import SGD
from fedbench.nn.batched_operators import ForwardContext
from fedbench.nn.flat import FlatModel
from fedbench.nn.forward import BatchedModule
from fedbench.simulation import autotune, build
from fedbench.simulation.build_model import model as build_model
from fedbench.simulation.output_checks import check_outputs
from fedbench.testing import _probes as probes
from fedbench.testing._cases import composed
from fedbench.testing._federation import CPU, PLANS, Shape, all_clients, engine_on, ragged
from fedbench.testing._suite import Broken, Report, Skipped, Suite
from fedbench.testing._targets import Target, described, path_of

# of images, of a table, of images and texts by name, and of texts alone, tried in this order
IMAGES = (1, 4, 4), (1, 16, 16), (3, 16, 16), (3, 32, 32)
SHAPES = (*IMAGES, (6,), {"image": (1, 16, 16), "text": (8,)}, {"text": (8,)})
SIZES = (8, 4, 12)  # whole batches, since batch norms have no statistics of one sample
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
K, B = 3, 5  # clients, samples of a batch


@dataclass
class ModelCase:
    """A model as a run would build it: cfg, its data, and the federation that holds them."""

    cfg: DictConfig
    federation: Federation

    def flat(self, seed: int = 0) -> FlatModel:
        """The model, initialized by this seed."""
        cfg = self.cfg.copy()
        cfg.seed = seed
        return build_model(cfg, self.federation)

    @functools.cached_property
    def model(self) -> FlatModel:
        """The model, seed 0."""
        return self.flat()

    def engine(self, plan: str = "vmap", model: FlatModel | None = None) -> Engine:
        """Three clients of 4 to 12 samples, by this plan."""
        optimizer = SGD(lr=0.01, momentum=0.9)
        return engine_on(self.federation, model or self.flat(), optimizer, plan=plan, batch_size=4, eval_batch=4)

    @functools.cached_property
    def alone(self) -> str:
        """Why it is computed for one client at a time; "" where it is not."""
        try:
            autotune.usable_plans(self.engine("vmap"), [PLANS["vmap"]])
            return ""
        except ConfigError as refused:
            return str(refused)

    @property
    def plans(self) -> tuple[str, ...]:
        """The names of the plans that it can be computed by."""
        return ("loop", "threads") if self.alone else ("loop", "threads", "vmap", "pairs")

    def require_many(self) -> None:
        """Skipped for a model that is computed for one client at a time."""
        if self.alone:
            raise Skipped(f"it is computed for one client at a time: {self.alone}")

    @functools.cached_property
    def rows(self) -> Tensor:
        """Three clients' rows, near the initialization.  # [K, P]"""
        generator = torch.Generator().manual_seed(1)
        rows, learns = self.model.init_row().repeat(K, 1), self.model.trained.size
        rows[:, :learns] += 0.1 * torch.randn(K, learns, generator=generator)
        return rows

    @functools.cached_property
    def batch(self) -> tuple[Inputs, Tensor]:
        """Five samples for each of three clients, as an evaluation sees them.  # [K, B, ...], [K, B]"""
        index = torch.from_numpy(self.federation.splits["train"].indices[: K * B]).view(K, B)
        return self.federation.gather(index)

    @property
    def way(self) -> str:
        """How several clients are computed at once, for reports."""
        if isinstance(self.model.module, BatchedModule):
            return "its own batched forward pass"
        if self.model.uses_vmap:
            return "torch.vmap"
        return "a traced graph" + (" with a manual backward pass" if self.model.manual_backward is not None else "")


SUITE: Suite[ModelCase] = Suite("model")


def check_model(
    target: Target,
    options: Mapping[str, Any] | None = None,
    *,
    columns: Mapping[str, Sequence[str]] | None = None,
    input_shape: tuple[int, ...] | None = None,
    num_classes: int = 3,
    only: Iterable[str] | None = None,
) -> Report:
    """Check a model: a module's class, its dotted path, or the name of an option of conf/model.

    options: of its constructor.  columns: its column groups, as in YAML.  input_shape: of a sample, default: the first
    image that it can compute.  only: the names of some checks.  ConfigError where it cannot be built or computed.
    """
    case = case_for(target, options, columns, input_shape, num_classes)
    shape = case.federation.input_shape
    words = f"{K} clients of {min(SIZES)} to {max(SIZES)} samples {shape}; {case.way}"
    return SUITE.run(path_of(target), words, case, only)


def case_for(
    target: Target,
    options: Mapping[str, Any] | None = None,
    columns: Mapping[str, Sequence[str]] | None = None,
    input_shape: tuple[int, ...] | None = None,
    num_classes: int = 3,
) -> ModelCase:
    """The model on the first shape of inputs that it can compute; ConfigError where there is none."""
    values = described("model", target, options)
    if columns is not None:
        values["columns"] = {name: list(patterns) for name, patterns in columns.items()}
    cfg = composed("algorithm=fedavg", "model=mlp").copy()
    cfg.model = OmegaConf.create(values)
    reasons = []
    for shape in SHAPES if input_shape is None else (input_shape,):
        for arrays, split in _examples(shape, num_classes):
            try:
                case = ModelCase(cfg, build.federation(cfg, arrays, split, CPU))
                check_outputs(case.model, case.federation, path_of(target))
                return case
            except ConfigError as refused:
                reasons.append(refused)
    tried = "" if input_shape else f" (tried inputs of {', '.join(map(str, SHAPES))}: say input_shape)"
    raise ConfigError(f"{reasons[0]}{tried}")


def _examples(shape: Shape, num_classes: int) -> Iterator[tuple[Arrays, Split]]:
    """Samples of this shape with a class each; images also with a class for every pixel, and to be told from noise."""
    arrays, split = ragged(SIZES, shape, num_classes)
    yield arrays, split
    if arrays.images is not None:
        masks = np.digitize(arrays.images.mean(1), np.linspace(-0.5, 0.5, num_classes - 1))  # [n, H, W]
        yield replace(arrays, targets=masks.astype(np.int64), task="segmentation"), split
        yield replace(arrays, inputs=(arrays.images * 40 + 128).clip(0, 255).astype(np.uint8), task="denoising"), split


def _apart(a: Tensor, b: Tensor) -> float:
    """Return the largest distance of two tensors relative to the maximum of b; infinity for NaN."""
    if not (a.isfinite().all() and b.isfinite().all()):
        return math.inf
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-6))


def _inputs(x: Inputs, which: Any) -> Inputs:
    return map_inputs(lambda t: t[which], x)


def _logits(model: FlatModel, rows: Tensor, x: Inputs, train: bool = False, keys: Tensor | None = None) -> Tensor:
    """Of rows [k, P] on x [k, B, ...], whose buffers may move.  # [k, B, C]"""
    named = {name: value.clone() for name, value in model.named(rows).items()}
    with torch.no_grad():
        return model.apply(named, x, True, ForwardContext(train, keys)).detach()


def _plain(model: FlatModel, row: Tensor) -> nn.Module:
    """A copy of the module itself with the numbers of a row."""
    if isinstance(model.module, BatchedModule):
        raise Skipped("the module computes rows itself, so that there is no plain module to compare with")
    module = copy.deepcopy(model.module)
    module.load_state_dict(model.state_dict(row), strict=False)
    return module


# -- a row is the module ---------------------------------------------------------------------------------
@SUITE.check
def one_client_is_the_module(case: ModelCase) -> None:
    """A row predicts what the module with its numbers does."""
    model, rows, (x, _) = case.model, case.rows, case.batch
    for i in range(K):
        module, mine = _plain(model, rows[i]), _inputs(x, i)
        with torch.no_grad():
            out = module.eval()(mine)
            expected = out[0] if isinstance(out, tuple) else out
        away = max(_apart(_logits(model, rows[i : i + 1], _inputs(x, slice(i, i + 1)))[0], expected),
                   _apart(model.predict(rows[i], mine), expected))  # fmt: skip
        if away > 1e-4:
            raise Broken(f"a row's logits are {away:.2g} away from the module's: what its forward pass reads must be "
                         "parameters and buffers of its own")  # fmt: skip
    if model.buffer_names:
        _same_buffers(model, rows[:1], _inputs(x, slice(0, 1)))


def _same_buffers(model: FlatModel, row: Tensor, x: Inputs) -> None:
    module = _plain(model, row[0]).train()
    named = {name: value.clone() for name, value in model.named(row).items()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        module(_inputs(x, 0))
        model.apply(named, x, True, ForwardContext(True, torch.tensor([1])))
    after = dict(module.named_buffers())
    for name in model.buffer_names:
        if _apart(named[name][0], after[name]) > 1e-4 and not model.has_dropout:
            raise Broken(f"the buffer {name} is not what a training pass of the module leaves: update it in place")


@SUITE.check
def samples_are_independent(case: ModelCase) -> None:
    """A sample's logits do not depend on the others of its batch (BatchNorm apart)."""
    model, rows, (x, _) = case.model, case.rows[:1], case.batch
    mine = _inputs(x, slice(0, 1))
    other = _inputs(x, slice(1, 2))
    both = map_inputs(lambda a, b: torch.cat([a[:, :2], b[:, 2:]], 1), mine, other)
    for train in (False, True):
        if train and model.batch_statistics:
            continue
        keys = torch.tensor([7]) if train else None
        away = _apart(_logits(model, rows, both, train, keys)[:, :2], _logits(model, rows, mine, train, keys)[:, :2])
        if away > 1e-4:
            raise Broken(
                f"in {'training' if train else 'evaluation'} a sample's logits move by {away:.2g} when the others of "
                "its batch change, so that padding would show: use no statistics over the batch but BatchNorm's"
            )


# -- many clients ----------------------------------------------------------------------------------------
@SUITE.check
def many_clients_are_each_one(case: ModelCase) -> None:
    """Clients computed at once have the logits that each has alone."""
    case.require_many()
    model, rows, (x, _) = case.model, case.rows, case.batch
    keys = torch.tensor([5, 6, 7])
    for train in (False, True):
        many = _logits(model, rows, x, train, keys if train else None)
        alone = torch.cat([
            _logits(model, rows[i : i + 1], _inputs(x, slice(i, i + 1)), train, keys[i : i + 1] if train else None)
            for i in range(K)
        ])  # fmt: skip
        away = _apart(many, alone)
        if away > 1e-4:
            how = "training" if train else "evaluation"
            raise Broken(f"in {how} the logits of three clients at once are {away:.2g} away from each one's own")


@SUITE.check
def gradients_agree(case: ModelCase) -> None:
    """The gradient is plain autograd's, whichever way the model is computed."""
    rows = case.rows
    expected = torch.stack([_gradient_of_the_module(case, rows[i], i) for i in range(K)])
    for name, model in _ways(case).items():
        for plan in ("loop", "vmap"):
            if plan not in case.plans:
                continue
            found = all_clients(case.engine(plan, model)).gradient(rows)[0][:, : model.trained.size]
            away = _apart(found, expected)
            if away > 1e-3:
                how = "one client at a time" if plan == "loop" else f"{K} clients at once"
                raise Broken(f"the gradient is {away:.2g} away from plain autograd's when computed {name}, {how}")


def _gradient_of_the_module(case: ModelCase, row: Tensor, i: int) -> Tensor:
    """Of the mean loss over client i's training samples, by autograd on the module.  # [trained]"""
    index = torch.from_numpy(case.federation.splits["train"][i])
    x, y = case.federation.gather(index)
    loss = case.federation.task.loss
    if isinstance(case.model.module, BatchedModule):
        leaf = row.detach().clone().requires_grad_()
        loss(case.model.forward(leaf, x), y).mean().backward()
        assert leaf.grad is not None
        return leaf.grad[: case.model.trained.size]
    module = _plain(case.model, row).eval()
    out = module(x)
    terms = (loss(out[0], y) + out[1]) if isinstance(out, tuple) else loss(out, y)  # with an extra loss [B]
    terms.mean().backward()
    parameters = dict(module.named_parameters())
    trained = [n for n in case.model.spans if n in parameters]
    return torch.cat([_or_zero(parameters[n]).flatten() for n in trained])


def _or_zero(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _ways(case: ModelCase) -> dict[str, FlatModel]:
    """The model as it is computed, and mapped: a layer with a hook is not traced."""
    ways = {"as it is": case.flat()}
    if case.model.traced_graph is not None:
        module = copy.deepcopy(case.model.module)
        next(m for m in module.modules() if not list(m.children())).register_forward_hook(lambda *call: None)
        ways["by torch.vmap"] = FlatModel(module)
    return ways


@SUITE.check
def training_agrees(case: ModelCase) -> None:
    """A round of training gives the same rows by every plan."""
    row = case.model.init_row()
    trained = {plan: all_clients(case.engine(plan)).train(row).theta for plan in case.plans}
    for plan, rows in trained.items():
        away = _apart(rows, trained["loop"])
        if away > 2e-3:
            raise Broken(f"rows trained by the plan {plan} are {away:.2g} away from those of one client at a time")


# -- draws -----------------------------------------------------------------------------------------------
@SUITE.check
def draws_are_keyed(case: ModelCase) -> None:
    """What a pass draws (dropout) is keyed by client, not the global generators'."""
    model, (x, _) = case.model, case.batch
    row, same = case.rows[:1], _inputs(x, slice(0, 1))
    with probes.other_generators(1):
        before = probes.global_generators()
        first, other, again = (_logits(model, row, same, True, torch.tensor([key])) for key in (5, 6, 5))
        moved = probes.moved_generators(before)
    with probes.other_generators(2):
        later = _logits(model, row, same, True, torch.tensor([5]))
    if moved or not (torch.equal(first, again) and torch.equal(first, later)):
        raise Broken(
            "a training pass draws from a global generator: use nn.Dropout, or torch's dropout, bernoulli_, uniform_, "
            "normal_, rand and randn, which are keyed by client; and nothing of NumPy's or Python's"
        )
    drops = any(isinstance(m, DROPOUTS) and m.p > 0 for m in model.module.modules())
    if drops and torch.equal(first, other):
        raise Broken("two clients have the same dropout masks: the module's dropout is not reached")
    if not torch.equal(_logits(model, row, same), _logits(model, row, same)):
        raise Broken("an evaluation draws: two passes over the same samples differ")


@SUITE.check
def initialization_is_keyed(case: ModelCase) -> None:
    """The same seed builds the same model."""
    if not torch.equal(case.flat(3).init_row(), case.flat(3).init_row()):
        raise Broken("the same seed gives other initial numbers: draw them by torch, in the constructor")


# -- columns ---------------------------------------------------------------------------------------------
@SUITE.check
def columns_are_respected(case: ModelCase) -> None:
    """Training of a column group moves its columns, and no others."""
    groups = {name: c & case.model.trained for name, c in case.model.columns.items()}
    groups = {name: columns for name, columns in groups.items() if 0 < columns.size < case.model.trained.size}
    if not groups:
        raise Skipped("it declares no group of some of its columns")
    for name, columns in groups.items():
        engine = case.engine("loop")
        row = case.model.init_row()
        moved = (all_clients(engine).train(row, columns=columns).theta - row).abs().amax(0)  # [P]
        learns = case.model.trained.rest(case.model.size)  # buffers
        if bool(columns.put(learns.put(moved, torch.zeros(learns.size)), torch.zeros(columns.size)).any()):
            raise Broken(f"training of columns {name!r} moves others too")
        if not bool(columns.take(moved).any()):
            raise Broken(f"training of columns {name!r} moves none of them: its outputs do not depend on them")


@SUITE.check
def features_enter_the_head(case: ModelCase) -> None:
    """Features, and the layer named head on them, give the logits."""
    model, rows, (x, _) = case.model, case.rows, case.batch
    if not isinstance(dict(model.module.named_modules()).get("head"), nn.Linear):
        raise Skipped("it has no linear layer named head: methods with heads of their own refuse it")
    one = _inputs(x, slice(0, 1))
    logits = model.head(rows[:1], model.features(rows[:1], one))
    away = _apart(logits.detach(), _logits(model, rows[:1], one))
    if away > 1e-4:
        raise Broken(f"head(features) is {away:.2g} away from the logits: nothing may come after the layer head")


@SUITE.check
def inputs_are_unchanged(case: ModelCase) -> None:
    """A pass leaves its inputs as they were."""
    x = case.batch[0]
    before = copy.deepcopy(x)
    for train in (False, True):
        _logits(case.model, case.rows[:1], _inputs(x, slice(0, 1)), train, torch.tensor([1]) if train else None)
    if not all(wrap_inputs(map_inputs(torch.equal, x, before)).values()):
        raise Broken("the forward pass changes its inputs in place: begin with a copy, or avoid inplace operations")
