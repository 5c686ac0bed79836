"""Checks of models, on B = 5 samples of each of K = 3 clients, whose parameters are the rows of a matrix [K, P].

It does so however many clients are computed at once.  A model is computed by a traced graph, by a manual backward
pass, by a batched forward pass of the module, or by torch.vmap.  The checks use each way that the model allows.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import SkipTest

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
from fedbench.tasks.next_token import IGNORED
from fedbench.testing import _probes as probes
from fedbench.testing._cases import assert_close, composed
from fedbench.testing._federation import CPU, PLANS, VOCAB, Shape, all_clients, engine_on, ragged
from fedbench.testing._suite import Report, Suite
from fedbench.testing._targets import Target, described, path_of

IMAGES = (1, 4, 4), (1, 16, 16), (3, 16, 16), (3, 32, 32)
TEXTS = {"text": (8,)}, {"text": (8,), "mask": (8,)}
SHAPES = (*IMAGES, (6,), {"image": (1, 16, 16), "text": (8,)}, *TEXTS)  # tried in this order
SIZES = (8, 4, 12)  # multiples of the batch size: batch norm needs more than one sample
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
K, B = 3, 5  # clients, samples of a batch


@dataclass
class ModelCase:
    """A model to check, and three clients with samples.

    Attributes:
        cfg: The configuration of a run with the model.
        federation: Three clients with 4 to 12 samples.
    """

    cfg: DictConfig
    federation: Federation

    def flat(self, seed: int = 0) -> FlatModel:
        """Return a new model with the initial parameters of a run with this seed."""
        cfg = self.cfg.copy()
        cfg.seed = seed
        return build_model(cfg, self.federation)

    @functools.cached_property
    def model(self) -> FlatModel:
        """The model, initialized with seed 0.  All checks share it, so they must not change it."""
        return self.flat()

    def engine(self, plan: str, model: FlatModel | None = None) -> Engine:
        """Return an engine that trains a model.

        Args:
            plan: How clients are computed, a name in `PLANS`, such as "vmap" (all at once) or "loop" (one by one).
            model: The model; None for a new one.
        """
        optimizer = SGD(lr=0.01, momentum=0.9)
        return engine_on(self.federation, model or self.flat(), optimizer, plan=plan, batch_size=4, eval_batch=4)

    @functools.cached_property
    def reason_for_loop(self) -> str:
        """Why the model must compute one client at a time, as a sentence; "" if it can compute several at once."""
        try:
            autotune.usable_plans(self.engine("vmap"), [PLANS["vmap"]])
            return ""
        except ConfigError as refused:
            return str(refused)

    @property
    def plans(self) -> tuple[str, ...]:
        """The ways in which the model can compute several clients, keys of `PLANS` such as "loop" and "vmap"."""
        return ("loop", "threads") if self.reason_for_loop else ("loop", "threads", "vmap", "pairs")

    @functools.cached_property
    def rows(self) -> Tensor:
        """Parameters of K clients: the initial ones, with random noise on the trained ones.  # [K, P]"""
        generator = torch.Generator().manual_seed(1)
        rows, trained = self.model.init_row().repeat(K, 1), self.model.trained.size  # trained columns come first
        rows[:, :trained] += 0.1 * torch.randn(K, trained, generator=generator)
        return rows

    @functools.cached_property
    def x(self) -> Inputs:
        """The inputs of five training samples of each of three clients, without augmentation.  # [K, B, ...]"""
        index = torch.from_numpy(self.federation.splits["train"].indices[: K * B]).view(K, B)
        return self.federation.gather(index)[0]

    def logits(self, which: slice, train: bool = False, keys: Tensor | None = None, x: Inputs | None = None) -> Tensor:
        """Return the logits of some clients on their samples, without changing buffers of their rows.

        Args:
            which: The positions of the clients in the rows, a slice.
            train: Whether the model is in training mode.
            keys: The random keys of all clients [K], for dropout.
            x: Inputs [k, B, ...] instead of the clients' own.

        Returns:
            Logits [k, B, C].
        """
        named = {name: value.clone() for name, value in self.model.named(self.rows[which]).items()}
        context = ForwardContext(train, None if keys is None else keys[which])
        with torch.no_grad():
            inputs = _select(self.x, which) if x is None else x
            return self.model.apply(named, inputs, batched=True, context=context).detach()

    def module(self, row: Tensor) -> nn.Module:
        """Return a copy of the module with the values of a row [P].

        Raises:
            SkipTest: The module computes the rows of several clients itself, so it has no forward pass for one.
        """
        if isinstance(self.model.module, BatchedModule):
            raise SkipTest("the module computes rows itself, so there is no module of one client")
        module = copy.deepcopy(self.model.module)
        module.load_state_dict(self.model.state_dict(row), strict=False)
        return module

    @property
    def way(self) -> str:
        """How the model computes several clients at once, in words for reports, such as "torch.vmap"."""
        if isinstance(self.model.module, BatchedModule):
            return "its own batched forward pass"
        if self.model.uses_vmap:
            return "torch.vmap"
        # a graph of operations on all clients, made by tracing the module
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
    """Check a model.

    Args:
        target: The class of a module, its dotted path, or an option of conf/model.
        options: Arguments of its constructor.
        columns: Its column groups, as in YAML: patterns of parameter names by the name of the group.
        input_shape: The shape of a sample; None for the first one of `SHAPES` that the model accepts.
        num_classes: The number of classes.
        only: The names of the checks to run; None runs all.

    Returns:
        The result of every check.

    Raises:
        ConfigError: The model cannot be built, or accepts no inputs.
    """
    case = case_for(target, options, columns, input_shape, num_classes)
    shape = case.federation.input_shape
    # setting: the samples, for the heading of the report; way: how clients are computed at once, such as by torch.vmap
    setting = f"{K} clients of {min(SIZES)} to {max(SIZES)} samples {shape}; {case.way}"
    return SUITE.run(path_of(target), setting, case, only)


def case_for(
    target: Target,
    options: Mapping[str, Any] | None = None,
    columns: Mapping[str, Sequence[str]] | None = None,
    input_shape: tuple[int, ...] | None = None,
    num_classes: int = 3,
) -> ModelCase:
    """Return the model with the first inputs that it accepts.

    Args:
        target: The class of a module, its dotted path, or an option of conf/model.
        options: Arguments of its constructor.
        columns: Its column groups: patterns of parameter names by the name of the group.
        input_shape: The shape of a sample; None for the first one of `SHAPES` that the model accepts.
        num_classes: The number of classes.

    Raises:
        ConfigError: The model cannot be built, or accepts no inputs.
    """
    values = described("model", target, options)
    if columns is not None:
        values["columns"] = {name: list(patterns) for name, patterns in columns.items()}
    cfg = composed("algorithm=fedavg", "model=mlp").copy()
    cfg.model = OmegaConf.create(values)
    reasons = []
    for shape in SHAPES if input_shape is None else (input_shape,):
        for arrays, split in _examples(shape, num_classes):  # for classification, segmentation and denoising
            try:
                case = ModelCase(cfg, build.federation(cfg, arrays, split, CPU))
                check_outputs(case.model, case.federation, path_of(target))
                return case
            except ConfigError as refused:
                reasons.append(refused)
    if input_shape is not None:
        raise reasons[0]
    raise ConfigError(
        f"{path_of(target)} accepts none of the example inputs, of the shapes {', '.join(map(str, SHAPES))} "
        f"({reasons[0]}): pass the shape of a sample by --input, or by the argument input_shape of check_model"
    )


def _examples(shape: Shape, num_classes: int) -> Iterator[tuple[Arrays, Split]]:
    """Yield data sets with samples of a shape, and their splits over clients.

    The first one is for classification.  For images, others for segmentation and denoising follow, and for texts one
    for the prediction of the next token.

    Args:
        shape: The shape of a sample, or of each named input.
        num_classes: The number of classes.
    """
    arrays, split = ragged(SIZES, shape, num_classes)
    yield arrays, split
    if arrays.images is not None:
        masks = np.digitize(arrays.images.mean(1), np.linspace(-0.5, 0.5, num_classes - 1))  # [n, H, W]
        yield replace(arrays, targets=masks.astype(np.int64), task="segmentation"), split
        yield replace(arrays, inputs=(arrays.images * 40 + 128).clip(0, 255).astype(np.uint8), task="denoising"), split
    if isinstance(shape, dict) and shape.keys() == {"text"}:
        text = arrays.parts()["text"]  # padded by 0, which is no target
        following = np.where(text > 0, text, IGNORED)[:, 1:]
        targets = np.pad(following, ((0, 0), (0, 1)), constant_values=IGNORED)
        yield replace(arrays, targets=targets, num_classes=VOCAB, task="next_token"), split


def _select(x: Inputs, which: Any) -> Inputs:
    """Return t[which] for each tensor t of the inputs, whose first axis is the clients.

    Args:
        x: A tensor [K, ...] or a dict of them.
        which: An index, slice or tensor of indices.
    """
    return map_inputs(lambda t: t[which], x)


def _only(i: int) -> slice:
    """Return slice(i, i + 1), by which t[_only(i)] is client i of a tensor t [K, ...], as [1, ...]."""
    return slice(i, i + 1)


# -- rows ------------------------------------------------------------------------------------------------
@SUITE.check
def one_client_is_the_module(case: ModelCase) -> None:
    """A row (all parameters of a client as a vector) predicts the outputs of the module with these parameters.

    Remedy: `forward` must read only parameters and buffers of the module, and update buffers in place.
    """
    for i in range(K):
        module, x = case.module(case.rows[i]), _select(case.x, i)  # with the parameters and the batch of client i
        with torch.no_grad():
            out = module.eval()(x)
        expected = out[0] if isinstance(out, tuple) else out
        for found in (case.logits(_only(i))[0], case.model.predict(case.rows[i], x)):
            assert_close(found, expected, 1e-4, "the logits of a row and of the module")
    if case.model.has_dropout:
        return
    module, named = (
        case.module(case.rows[0]).train(),
        {n: v.clone() for n, v in case.model.named(case.rows[:1]).items()},
    )
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        module(_select(case.x, 0))
        # one client (k = 1) in training mode, with the random key 1
        context = ForwardContext(train=True, keys=torch.tensor([1]))
        case.model.apply(named, _select(case.x, _only(0)), batched=True, context=context)
    buffers = dict(module.named_buffers())
    for name in case.model.buffer_names:
        assert_close(named[name][0], buffers[name], 1e-4, f"the buffers {name} of a trained row and module")


@SUITE.check
def samples_are_independent(case: ModelCase) -> None:
    """The logits of a sample do not depend on other samples of its batch, except by batch normalization.

    Remedy: use no batch statistics except those of BatchNorm: other samples may be padding.
    """
    one, keys = _only(0), torch.tensor([7])  # a random key, for dropout
    # a batch of the first two samples of client 0, and other samples of client 1
    mixed = map_inputs(lambda a, b: torch.cat([a[:, :2], b[:, 2:]], 1), _select(case.x, one), _select(case.x, _only(1)))
    for mode, train in (("evaluation", False), ("training", True)):
        if train and case.model.batch_statistics:
            continue
        # None: client 0's own batch
        found, expected = (case.logits(one, train, keys if train else None, x)[:, :2] for x in (mixed, None))
        assert_close(found, expected, 1e-4, f"in {mode} the logits of a sample in two batches")


# -- several clients -------------------------------------------------------------------------------------
@SUITE.check
def many_clients_are_each_one(case: ModelCase) -> None:
    """The logits of several clients computed at once are those of each client alone.

    Remedy: compute each client with its own parameters.
    """
    if case.reason_for_loop:
        raise SkipTest(f"one client at a time is computed: {case.reason_for_loop}")
    for mode, train in (("evaluation", False), ("training", True)):
        keys = torch.tensor([5, 6, 7]) if train else None
        separate = torch.cat([case.logits(_only(i), train, keys) for i in range(K)])
        together = case.logits(slice(K), train, keys)
        assert_close(together, separate, 1e-4, f"in {mode} the logits of {K} clients computed at once and one by one")


@SUITE.check
def gradients_agree(case: ModelCase) -> None:
    """The gradient is that of autograd, however the model is computed.

    Remedy: compute outputs by differentiable operations of torch, from parameters that are not detached.
    """
    expected = torch.stack([_autograd_gradient(case, case.rows[i], i) for i in range(K)])
    models = {"as it is": case.flat()}
    if case.model.traced_graph is not None:
        module = copy.deepcopy(case.model.module)
        layer = next(m for m in module.modules() if not list(m.children()))
        layer.register_forward_hook(lambda *call: None)  # modules with hooks are not traced
        models["by torch.vmap"] = FlatModel(module)
    # The plan "vmap" trains K clients at once, in a traced graph or by torch.vmap; "loop" trains each by itself.
    for name, model in models.items():
        for plan, clients in {"loop": "one client at a time", "vmap": f"{K} clients at once"}.items():
            if plan not in case.plans:
                continue
            gradient, _ = all_clients(case.engine(plan, model)).gradient(case.rows)  # [K, P], and the losses
            gradient = gradient[:, : model.trained.size]  # without running statistics, which come last
            names = f"the gradients of the model computed {name}, {clients}, and of autograd"
            assert_close(gradient, expected, 1e-3, names)


def _autograd_gradient(case: ModelCase, row: Tensor, i: int) -> Tensor:
    """Return the gradient of the mean loss over the training samples of client i, computed by autograd.

    Args:
        case: The model to check, with three clients.
        row: The row of the client [P].
        i: The index of the client.

    Returns:
        The gradient with respect to the trained columns, which come first in a row.
    """
    x, y = case.federation.gather(torch.from_numpy(case.federation.splits["train"][i]))
    loss = case.federation.task.loss
    if isinstance(case.model.module, BatchedModule):
        leaf = row.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(case.model.forward(leaf, x), y).mean(), leaf)
        return gradient[: case.model.trained.size]
    module = case.module(row).eval()
    out = module(x)
    losses = loss(out[0], y) + out[1] if isinstance(out, tuple) else loss(out, y)  # with an additional loss [B]
    parameters = dict(module.named_parameters())
    trained = [parameters[name] for name in case.model.spans if name in parameters]
    gradients = torch.autograd.grad(losses.mean(), trained, allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


@SUITE.check
def training_agrees(case: ModelCase) -> None:
    """A round of training gives the same rows with every executor.

    Remedy: compute each sample from itself and the parameters, and keep no state in the module except buffers.
    """
    row = case.model.init_row()
    trained = {plan: all_clients(case.engine(plan)).train(row).theta for plan in case.plans}
    for plan, rows in trained.items():
        assert_close(rows, trained["loop"], 2e-3, f"rows trained by the plan {plan} and one client at a time")


# -- random numbers --------------------------------------------------------------------------------------
@SUITE.check
def draws_are_keyed(case: ModelCase) -> None:
    """Random numbers of a forward pass, as in dropout, are keyed by client; no global random generator is used.

    Remedy: use nn.Dropout, or dropout, bernoulli_, uniform_, normal_, rand and randn of torch, in training only.  Do
    not use NumPy or Python.
    """
    one = _only(0)
    with probes.other_global_seed(1):
        states = probes.global_random_states()
        first, other, again = (case.logits(one, train=True, keys=torch.tensor([key])) for key in (5, 6, 5))
        used = probes.generators_used_since(states)
    with probes.other_global_seed(2):
        later = case.logits(one, train=True, keys=torch.tensor([5]))
    is_keyed = not used and torch.equal(first, again) and torch.equal(first, later)
    assert is_keyed, "a forward pass in training uses a global random generator"
    has_dropout = any(isinstance(m, DROPOUTS) and m.p > 0 for m in case.model.module.modules())
    assert not has_dropout or not torch.equal(first, other), "two clients have equal dropout masks"
    assert torch.equal(case.logits(one), case.logits(one)), "two evaluations of the same samples differ"


@SUITE.check
def initialization_is_keyed(case: ModelCase) -> None:
    """Equal seeds give equal initial values.

    Remedy: use torch's random numbers in the constructor.
    """
    first, second = case.flat(3).init_row(), case.flat(3).init_row()
    assert torch.equal(first, second), "the same seed gives other initial values"


# -- columns ---------------------------------------------------------------------------------------------
@SUITE.check
def columns_are_respected(case: ModelCase) -> None:
    """Training of a column group changes its columns, and no others.

    Remedy: use every parameter of the group in `forward`.
    """
    # columns: the positions of a group's parameters in a row, by the name of the group
    groups = {name: columns & case.model.trained for name, columns in case.model.columns.items()}
    groups = {name: columns for name, columns in groups.items() if 0 < columns.size < case.model.trained.size}
    if not groups:
        raise SkipTest("it declares no column group that is a subset of its columns")
    # buffers: the columns of running statistics, which also change
    row, buffers = case.model.init_row(), case.model.trained.rest(case.model.size)
    for name, columns in groups.items():
        theta = all_clients(case.engine("loop")).train(row, columns=columns).theta
        change = (theta - row).abs().amax(0)  # [P]
        others = (columns | buffers).rest(case.model.size)
        assert not others.take(change).any(), f"training of columns {name!r} changes other columns"
        assert columns.take(change).any(), f"training of columns {name!r} changes none of them"


@SUITE.check
def features_enter_the_head(case: ModelCase) -> None:
    """The layer named head, applied to the features, gives the logits.

    Remedy: return the outputs of the layer head.
    """
    if not isinstance(dict(case.model.module.named_modules()).get("head"), nn.Linear):
        raise SkipTest("it has no linear layer named head, so methods that need one refuse it")
    row, x = case.rows[:1], _select(case.x, _only(0))
    logits = case.model.head(row, case.model.features(row, x))
    assert_close(logits.detach(), case.logits(_only(0)), 1e-4, "head(features) and the logits")


@SUITE.check
def inputs_are_unchanged(case: ModelCase) -> None:
    """A forward pass does not change its inputs.

    Remedy: copy them, or avoid in-place operations.
    """
    before = copy.deepcopy(case.x)
    case.logits(_only(0))
    case.logits(_only(0), train=True, keys=torch.tensor([1]))
    are_equal = all(wrap_inputs(map_inputs(torch.equal, case.x, before)).values())
    assert are_equal, "the forward pass changes its inputs in place"
