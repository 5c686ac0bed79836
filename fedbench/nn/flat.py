"""nn.Module <-> row vector: a model with P numbers is a row [P], a cohort of k models is [k, P].

The row is [trained | extras | buffers].  Trained: the module's parameters that require a gradient, in order.
Extras: columns a method adds (`extend`).  Buffers: float buffers such as BatchNorm's running statistics; they
travel and are averaged, and are never differentiated.  Integer counters and frozen parameters stay outside the
row, held once.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from fedbench.core import rng
from fedbench.core.options import ConfigError, listed, require
from fedbench.core.private_torch import BatchNorm
from fedbench.nn.chain import Chain, LowChain
from fedbench.nn.columns import Columns, require_group
from fedbench.nn.program import layers_of, never_called, trace
from fedbench.nn.rules import LOW, ForwardContext, Tap
from fedbench.nn.vmapped import VmappedModule


class FlatModel:
    """A module seen as rows.  size: P; trained: the columns that learn; columns: named groups.

    columns: {group: [pattern, ...]}, patterns of parameter names (fnmatch), or "type:*Norm*" for all parameters
    of modules of such a class.  A pattern that matches nothing is refused.  draw(*purpose, j): the module as it is
    initialized by the j-th independent draw for a purpose, for methods whose clients do not start from one point.
    seed: of what `keyed` draws.  freeze: patterns of parameters and buffers that stay outside the row; layers whose
    parameters they would match stay in evaluation mode.

    autocast can be set at any time: forward and backward in bfloat16, while rows, logits, features and gradients stay
    float32.
    """

    def __init__(
        self,
        module: nn.Module,
        columns: Mapping[str, Sequence[str]] | None = None,
        device: torch.device | str = "cpu",
        draw: Callable[..., nn.Module] | None = None,
        seed: int = 0,
        freeze: Sequence[str] = (),
    ):
        self.module = module.to(device).eval()
        self._draw, self._seed, self._freeze = draw, seed, list(freeze)
        self.device = torch.device(device)
        self._freeze_parameters()
        self._taps: dict[str, Tap] = {}
        self._vmapped = VmappedModule(module, self._resting)
        self._extras: dict[str, Tensor] = {}
        self._patterns = {name: list(patterns) for name, patterns in (columns or {}).items()}
        self._batched = isinstance(module, Batched)  # asking is slow
        self.program = None if self._batched else trace(module)
        if layers := layers_of(module):
            layers.trace_all()
        self.autocast = False
        self._chain, self._low_chain = Chain.of(self.program), LowChain.of(self.program)
        self.mapped = self.program is None and not self._batched
        self.has_dropout = self.mapped or any(isinstance(m, nn.Dropout) for m in module.modules())
        self._lay_out()
        norms = [m for m in module.modules() if isinstance(m, BatchNorm)]
        require(
            all(m.track_running_stats and m.momentum is not None for m in norms),
            "the model's batch norm must keep running statistics with a momentum (track_running_stats=True and "
            "momentum=0.1, PyTorch's defaults): a cumulative mean needs a counter, which is no part of a row",
        )
        learning = [m for n, m in module.named_modules() if isinstance(m, BatchNorm) and n not in self._resting]
        self.batch_statistics = bool(learning) or bool(self.buffer_names)  # padding shows: exact batches

    def _freeze_parameters(self) -> None:
        names = {n for n, _ in (*self.module.named_parameters(), *self.module.named_buffers())}
        for pattern in self._freeze:
            require(
                any(fnmatch.fnmatch(n, pattern) for n in names),
                f"model.freeze={self._freeze}: the pattern {pattern!r} matches none of the model's parameters: "
                f"{listed(n for n, _ in self.module.named_parameters())}",
            )
        for name, p in self.module.named_parameters():
            if self._is_frozen_by_name(name):
                p.requires_grad_(False)
        require(
            any(p.requires_grad for p in self.module.parameters()) or not self._freeze,
            f"model.freeze={self._freeze} leaves no parameter to train",
        )
        self._resting = {
            name
            for name, m in self.module.named_modules()
            if is_frozen_norm(m) or (name and self._is_frozen_by_name(f"{name}.weight"))
        }

    def _is_frozen_by_name(self, name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in self._freeze)

    # -- layout ------------------------------------------------------------------------------------------
    def _lay_out(self) -> None:
        """Decide which number of a row is which: trained, extras, buffers."""
        trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        saved = self.module.state_dict()  # a buffer that is not saved is a constant (a causal mask)
        statistics = {n: b for n, b in self.module.named_buffers() if b.is_floating_point() and n in saved}
        fixed = {n for n in statistics if n.rpartition(".")[0] in self._resting or self._is_frozen_by_name(n)}
        buffers = {n: b for n, b in statistics.items() if n not in fixed}
        self._initial = {**trained, **self._extras, **buffers}
        self.shapes = {n: t.shape for n, t in self._initial.items()}
        self.sizes = [t.numel() for t in self._initial.values()]
        self.size = sum(self.sizes)
        self._learns = sum(t.numel() for t in {**trained, **self._extras}.values())
        self.buffer_names = list(buffers)
        ends = torch.tensor(self.sizes).cumsum(0).tolist()
        self.spans = {n: (end - size, end) for n, end, size in zip(self.shapes, ends, self.sizes)}
        self.trained, self.all = Columns([(0, self._learns)]), Columns([(0, self.size)])
        self.columns = {
            group: Columns(span for n, span in self.spans.items() if self._chosen(n, patterns))
            for group, patterns in self._patterns.items()
        }
        self._frozen = {n: p.detach() for n, p in self.module.named_parameters() if not p.requires_grad}
        read = fixed | (self.program.shapes.keys() if self.program is not None else set())  # constants, too
        self._frozen |= {n: b for n, b in self.module.named_buffers() if n in read and n not in buffers}
        self._refuse_dead_patterns()

    def _chosen(self, name: str, patterns: Sequence[str]) -> bool:
        owner = type(self.module.get_submodule(name.rpartition(".")[0])).__name__ if name not in self._extras else ""
        return any(
            fnmatch.fnmatch(owner, p[5:]) if p.startswith("type:") else fnmatch.fnmatch(name, p) for p in patterns
        )

    def _refuse_dead_patterns(self) -> None:
        modules = dict(self.module.named_modules())
        for group, patterns in self._patterns.items():
            for pattern in patterns:
                # a group may be frozen, as a whole or in part
                matches = any(self._chosen(n, [pattern]) for n in {**self.spans, **self._frozen})
                # a body without parameters (a logistic model's) is a legitimate empty group
                empty = pattern.endswith(".*") and pattern[:-2] in modules
                require(
                    matches or empty or pattern.startswith(("*", "type:")),
                    f"model.columns.{group}: the pattern {pattern!r} matches no parameter; "
                    f"the parameters are {listed(self.spans)}",
                )

    def without(self, name: str) -> Columns:
        """Every column, buffers included, that is not in the group: without("head") is the base."""
        return self.columns[name].rest(self.size)

    def group(self, name: str, needed_by: str) -> Columns:
        """columns[name], or one sentence saying that this model declares no such group."""
        require_group(name, needed_by, self.columns)
        return self.columns[name]

    def extend(self, **extras: str | Tensor | nn.Module) -> None:
        """Add columns: name="copy:prefix" copies the parameters under prefix, a module gives its own, a tensor is taken
        as it is.

        extend(head2="copy:head") adds head2.weight and head2.bias.  They belong to the group of the same name.
        """
        for name, source in extras.items():
            if isinstance(source, Tensor):
                self._extras[name] = source.detach().clone().to(self.device)
            else:
                owner, prefix = (
                    (source, "") if isinstance(source, nn.Module) else (self.module, source.removeprefix("copy:") + ".")
                )
                self._extras |= {
                    f"{name}.{n.removeprefix(prefix)}": p.detach().clone().to(self.device)
                    for n, p in owner.named_parameters()
                    if n.startswith(prefix)
                }
            self._patterns[name] = [name] if isinstance(source, Tensor) else [f"{name}.*"]
        self._lay_out()

    @property
    def extended(self) -> bool:
        """Whether a method added columns, which the module's own forward pass does not use."""
        return bool(self._extras)

    def keyed(self, make: Callable[[], Any], *purpose: int | str) -> Any:
        """make() under torch's global generator seeded by (the run's seed, purpose): initial values of what a method
        adds."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.key(self._seed, *purpose) >> 1)
            return make()

    def init_row(self) -> Tensor:
        """The module's own initialization as a row.  # [P]"""
        return torch.cat([t.detach().reshape(-1).float() for t in self._initial.values()])

    def init_rows(self, numbers: int | np.ndarray, *purpose: str | int) -> Tensor:
        """Return independent initializations; pretrained weights and extras are equal in all.  # [k, P]

        Args:
            numbers: How many rows, or the numbers [k] that key them, such as client ids.
            *purpose: Use of the rows.  Rows of different uses are independent.
        """
        if self._draw is None:
            raise ValueError("independent initializations need FlatModel(..., draw=)")
        which = range(numbers) if isinstance(numbers, int) else numbers.tolist()
        out = self.init_row().repeat(len(which), 1)
        for row, module in zip(out, (self._draw(*purpose, number) for number in which)):
            drawn = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            for name, (a, b) in self.spans.items():
                row[a:b] = drawn.get(name, row[a:b]).detach().reshape(-1)
        return out

    def parameter_spans(self, width: int) -> list[tuple[int, int]]:
        """The columns of each parameter in rows of this width: the model's, or, of another width, one for all."""
        return list(self.spans.values()) if width == self.size else [(0, width)]

    def named(self, rows: Tensor) -> dict[str, Tensor]:
        """Views of rows [..., P] by parameter name, each [..., *shape]."""
        lead = rows.shape[:-1]
        parts = rows.split(self.sizes, dim=-1)
        return {n: part.view((*lead, *shape)) for (n, shape), part in zip(self.shapes.items(), parts)}

    def state_dict(self, row: Tensor) -> dict[str, Tensor]:
        """A row [P] as the module's state_dict, for plain PyTorch: module.load_state_dict(..., strict=False)."""
        return {n: t.clone() for n, t in self.named(row).items() if n not in self._extras}

    # -- single layers -----------------------------------------------------------------------------------
    def tap(self, name: str, change: Tap) -> None:
        """From now on, what the layer `name` gives is change(output [B, ...], row), of the same shape.

        row: the client's parameters by name, with those that a method added; gradients reach them.  change is written
        for one client, and computed for many by torch.vmap.  ConfigError where the model has no such layer.
        """
        self._require_layers(name)
        self._taps[name] = change

    @property
    def tapped(self) -> bool:
        """Whether any layer's output is changed."""
        return bool(self._taps)

    def capture(
        self, rows: Tensor, inputs: Tensor | dict[str, Tensor], places: Sequence[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits, as `forward` gives them, and by name what the layers at the places gave, [B, ...] or [k, B, ...].

        places: patterns of layers' names (fnmatch).  Of a layer that is called more than once, its last output.
        """
        context = ForwardContext(wanted=self._require_layers(*places))
        logits = self.forward(rows, inputs, context)
        missing = sorted(set(context.wanted) - context.captured.keys())
        require(not missing, f"the model never calls a layer named {(missing or [''])[0]!r}, which is to be captured")
        return logits, context.captured

    def _require_layers(self, *places: str) -> list[str]:
        """The names of the layers at the places, each of which must have some."""
        names = [name for name, _ in self.module.named_modules() if name]
        for place in places:
            require(
                bool(fnmatch.filter(names, place)),
                f"the model has no layer named {place!r}; its layers are {listed(names)}",
            )
        return [name for name in names if any(fnmatch.fnmatch(name, place) for place in places)]

    # -- forward -----------------------------------------------------------------------------------------
    @property
    def chain(self) -> Chain | None:
        """The model's written-out gradient, or None where there is none."""
        if self._taps:
            return None
        return self._low_chain if self.autocast else self._chain

    def _precision(self) -> AbstractContextManager:
        # no cache of casts: it would keep tensors of one CUDA graph for the next
        return torch.autocast(self.device.type, LOW, cache_enabled=False) if self.autocast else nullcontext()

    def forward(
        self,
        rows: Tensor,
        inputs: Tensor | dict[str, Tensor],
        context: ForwardContext | None = None,
        until: str | None = None,
    ) -> Tensor:
        """Logits of row [P] on [B, ...], or of rows [k, P] on [k, B, ...].  until="head": the features before it."""
        return self.apply(self.named(rows), inputs, rows.dim() == 2, context or ForwardContext(), until)

    def predict(self, rows: Tensor, inputs: Tensor | dict[str, Tensor]) -> Tensor:
        """Logits in evaluation mode: [B, ...] of row [P], [k, B, ...] of rows [k, P]."""
        if self.chain is None or torch.is_grad_enabled() or not isinstance(inputs, Tensor):
            return self.forward(rows, inputs)
        many = rows.dim() == 2 and len(rows) > 1  # one client: the plain kernels
        row, x = (rows[0], inputs[0]) if rows.dim() == 2 and not many else (rows, inputs)
        logits = self.chain.predict(self.complete(self.named(row), many), x, many)
        return logits.unsqueeze(0) if rows.dim() == 2 and not many else logits

    def features(
        self, rows: Tensor, inputs: Tensor | dict[str, Tensor], context: ForwardContext | None = None
    ) -> Tensor:
        """What enters the module named head: [B, F] or [k, B, F], of a segmentation [..., F, H, W]."""
        return self.forward(rows, inputs, context, until="head")

    def head(self, rows: Tensor, features: Tensor, name: str = "head") -> Tensor:
        """The layer `name` (head, or an extra copy of it) of row [P] or rows [k, P] on features: a linear one, or a
        convolution of single pixels, which is a linear layer over channels."""
        named = self.named(rows)
        if f"{name}.weight" not in named:
            raise ConfigError(never_called(name))
        weight, bias = named[f"{name}.weight"], named.get(f"{name}.bias")
        if pixels := weight.dim() > rows.dim() + 1:  # [..., C, F, 1, 1]
            weight, features = weight[..., 0, 0], features.movedim(-3, -1)  # [..., B, H, W, F]
            places = features.shape[-3:-1]
            features = features.flatten(-4, -2)  # [..., B H W, F]
        with self._precision():
            out = (features @ weight.transpose(-1, -2)).to(features.dtype)
        out = out if bias is None else out + bias.unsqueeze(-2)
        return out.unflatten(-2, (-1, *places)).movedim(-1, -3) if pixels else out  # type: ignore[possibly-unbound]

    def apply(
        self,
        params: dict[str, Tensor],
        inputs: Tensor | dict[str, Tensor],
        many: bool,
        context: ForwardContext,
        until: str | None = None,
    ) -> Tensor:
        """forward on named parameters; float buffers among them are updated in place when context.train.

        The context is left what the pass captured, and the extra losses of a module that returns them.
        """
        if self._frozen or self._taps:
            context = replace(context, frozen=self._frozen, resting=self._resting, taps=self._taps)
        with self._precision():
            out = self._apply(params, inputs, many, context, until)
        if isinstance(out, tuple):
            out, extra = out
            context.extra_losses.append(extra.float() if self.autocast else extra)
        return out.float() if self.autocast else out

    def _apply(
        self,
        params: dict[str, Tensor],
        inputs: Tensor | dict[str, Tensor],
        many: bool,
        context: ForwardContext,
        until: str | None,
    ) -> Any:
        if many and len(next(iter(params.values()))) == 1:  # one client: the plain kernels
            single = {n: p.squeeze(0) for n, p in params.items()}  # p[0] would copy gradients into zeros
            out = self._apply(single, _first(inputs), False, context, until)
            context.captured.update({n: t[None] for n, t in context.captured.items()})
            return tuple(t[None] for t in out) if isinstance(out, tuple) else out[None]
        if self._batched:
            module: Any = self.module
            return module.run(params | self._frozen, (inputs,), many, context, until)
        shown = self.program is not None and self.program.named >= {*context.taps, *context.wanted}
        if self.program is not None and shown:
            return self.program.run(params | self._frozen, (inputs,), many, context, until)
        return self._vmapped.run(params, inputs, many, context, until)

    def complete(self, params: dict[str, Tensor], many: bool) -> dict[str, Tensor]:
        """params, [k, ...] each if many, and the frozen ones, which are in no row."""
        if not many or not self._frozen:
            return params | self._frozen
        k = len(next(iter(params.values())))
        return params | {n: p.expand(k, *p.shape) for n, p in self._frozen.items()}


@runtime_checkable
class Batched(Protocol):
    """A module that writes its own forward pass for many parameter sets at once (a prompt: one pass of the frozen tower
    for all clients): params by name, [k, ...] each if many, of which it ignores what it does not know."""

    def run(
        self, params: dict[str, Tensor], inputs: tuple, many: bool, context: ForwardContext, until: str | None = None
    ) -> Tensor:
        """Logits [k, B, C] if many, else [B, C]; until: the name of a layer whose input is returned instead.

        Frozen parameters are among params without an axis k (context.frozen).  `program.Layers` computes single layers.
        """
        ...


def is_frozen_norm(m: nn.Module) -> bool:
    """Whether a batch norm's parameters are all frozen: then its statistics are as well, and it stays in evaluation
    mode."""
    parameters = list(m.parameters(recurse=False))
    return isinstance(m, BatchNorm) and bool(parameters) and not any(p.requires_grad for p in parameters)


def _first(inputs: Tensor | dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
    return {n: x[0] for n, x in inputs.items()} if isinstance(inputs, dict) else inputs[0]
