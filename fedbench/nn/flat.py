"""A model as rows: a module with P numbers is a row [P], a cohort of k models is [k, P]."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbench.core import rng
from fedbench.core.options import ConfigError, require
from fedbench.core.private_torch import BatchNorm
from fedbench.nn.batched_operators import ForwardContext, Tap
from fedbench.nn.chain import Chain
from fedbench.nn.columns import Columns
from fedbench.nn.forward import ForwardPass, Inputs
from fedbench.nn.freezing import freeze as _freeze
from fedbench.nn.freezing import is_frozen_by_name
from fedbench.nn.program import Program, never_called
from fedbench.nn.row_layout import RowLayout, refuse_dead_patterns


class FlatModel(RowLayout):
    """A module, the layout of its rows, and its forward pass on rows.

    Frozen parameters and integer counters are in no row.

    Args:
        module: The module.
        columns: Groups of columns: patterns of parameter names (fnmatch), or "type:*Norm*" for all parameters of
            modules of such a class.
        device: The device that computes.
        draw: draw(*purpose, j) returns the module with its j-th independent initialization for a purpose, for methods
            whose clients do not start from one point.
        seed: The run's seed, for `keyed`.
        freeze: Patterns of parameters and buffers that stay outside the row.  Layers whose parameters they would match
            stay in evaluation mode.

    Attributes:
        forward_pass: Computes the module with given parameters.
        has_dropout: Whether a forward pass in training mode may need keys for dropout.
        batch_statistics: Whether batches must not be padded, because the module takes statistics over them.
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
        self.module, self.device = module.to(device).eval(), torch.device(device)
        self._draw, self._seed, self._freeze = draw, seed, list(freeze)
        self._patterns = {name: list(patterns) for name, patterns in (columns or {}).items()}
        self._extras: dict[str, Tensor] = {}
        self._eval_layers = _freeze(module, self._freeze)
        self.forward_pass = ForwardPass(module, self._eval_layers, self.device)
        self.has_dropout = self.mapped or any(isinstance(m, nn.Dropout) for m in module.modules())
        self._lay_out()
        norms = {n: m for n, m in module.named_modules() if isinstance(m, BatchNorm)}
        require(
            all(m.track_running_stats and m.momentum is not None for m in norms.values()),
            "the model's batch norm must keep running statistics with a momentum (track_running_stats=True and "
            "momentum=0.1, PyTorch's defaults): a cumulative mean needs a counter, which is no part of a row",
        )
        self.batch_statistics = bool(norms.keys() - self._eval_layers) or bool(self.buffer_names)

    # -- layout ------------------------------------------------------------------------------------------
    def _lay_out(self) -> None:
        """Sort the module's tensors into trained, extras, buffers and frozen ones."""
        module = self.module
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        saved = module.state_dict()  # a buffer that is not saved is a constant (a causal mask)
        statistics = {n: b for n, b in module.named_buffers() if b.is_floating_point() and n in saved}
        fixed = {n for n in statistics if n.rpartition(".")[0] in self._eval_layers or self._is_frozen_by_name(n)}
        buffers = {n: b for n, b in statistics.items() if n not in fixed}
        super().__init__(dict(trained), self._extras, buffers)
        frozen = {n: p.detach() for n, p in module.named_parameters() if not p.requires_grad}
        read = fixed | (self.program.shapes.keys() if self.program is not None else set())  # constants, too
        frozen |= {n: b for n, b in module.named_buffers() if n in read and n not in buffers}
        self.forward_pass.frozen = frozen
        self.group_columns(self._patterns, self._class_of)
        modules = [name for name, _ in module.named_modules()]
        refuse_dead_patterns(self._patterns, [*self.spans, *frozen], self._class_of, modules, list(self.spans))

    def _is_frozen_by_name(self, name: str) -> bool:
        return is_frozen_by_name(name, self._freeze)

    def _class_of(self, name: str) -> str:
        """Return the class name of the module that a tensor belongs to, or "" for a column that a method added."""
        return "" if name in self._extras else type(self.module.get_submodule(name.rpartition(".")[0])).__name__

    def extend(self, **extras: str | Tensor | nn.Module) -> None:
        """Add columns, which form a group of the same name.

        Args:
            **extras: By name, "copy:prefix" to copy the parameters under prefix, a module for its parameters, or a
                tensor.  extend(head2="copy:head") adds head2.weight and head2.bias.
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

    def add_group(self, name: str, patterns: Sequence[str]) -> Columns:
        """Add a column group, which may be empty.

        Args:
            name: The name of the group.
            patterns: Patterns of parameter names (fnmatch), or "type:*Norm*" for all tensors of such modules.

        Returns:
            The columns of the group.
        """
        self._patterns[name] = list(patterns)
        self._lay_out()
        return self.columns[name]

    def keyed(self, make: Callable[[], Any], *purpose: int | str) -> Any:
        """Return make() under torch's global generator, seeded by the run's seed and the purpose."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.key(self._seed, *purpose) >> 1)
            return make()

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

    # -- single layers -----------------------------------------------------------------------------------
    def tap(self, name: str, change: Tap) -> None:
        """Change the output of a layer from now on.

        Args:
            name: The layer.
            change: change(output, row) returns a tensor of the shape of the output [B, ...].  row: the client's
                parameters by name, those that a method added included; gradients reach them.  It is written for one
                client, and computed for many by torch.vmap.

        Raises:
            ConfigError: The model has no such layer.
        """
        self.forward_pass.tap(name, change)

    @property
    def tapped(self) -> bool:
        """Whether the output of any layer is changed."""
        return self.forward_pass.tapped

    def capture(self, rows: Tensor, inputs: Inputs, places: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the logits and, by name, the outputs of layers [B, ...] or [k, B, ...].

        places: patterns of layers' names (fnmatch).  Of a layer that is called more than once, its last output.
        """
        return self.forward_pass.capture(self.named(rows), inputs, rows.dim() == 2, places)

    # -- forward -----------------------------------------------------------------------------------------
    @property
    def program(self) -> Program | None:
        """The module's traced graph, or None."""
        return self.forward_pass.program

    @property
    def chain(self) -> Chain | None:
        """The model's written-out gradient, or None."""
        return self.forward_pass.chain

    @property
    def mapped(self) -> bool:
        """Whether torch.vmap computes many clients."""
        return self.forward_pass.mapped

    @property
    def autocast(self) -> bool:
        """Whether to compute in bfloat16.  It can be set at any time."""
        return self.forward_pass.autocast

    @autocast.setter
    def autocast(self, value: bool) -> None:
        self.forward_pass.autocast = value

    def forward(
        self, rows: Tensor, inputs: Inputs, context: ForwardContext | None = None, until: str | None = None
    ) -> Tensor:
        """Return the logits of row [P] on [B, ...], or of rows [k, P] on [k, B, ...].  until="head": its input."""
        return self.apply(self.named(rows), inputs, rows.dim() == 2, context or ForwardContext(), until)

    def apply(
        self, params: dict[str, Tensor], inputs: Inputs, many: bool, context: ForwardContext, until: str | None = None
    ) -> Tensor:
        """Return the logits with named parameters.  See `ForwardPass.apply`."""
        return self.forward_pass.apply(params, inputs, many, context, until)

    def predict(self, rows: Tensor, inputs: Inputs) -> Tensor:
        """Return the logits in evaluation mode: [B, ...] of row [P], [k, B, ...] of rows [k, P]."""
        return self.forward_pass.predict(self.named(rows), inputs, rows.dim() == 2)

    def features(self, rows: Tensor, inputs: Inputs, context: ForwardContext | None = None) -> Tensor:
        """Return the input of the module named head: [B, F] or [k, B, F], of a segmentation [..., F, H, W]."""
        return self.forward(rows, inputs, context, until="head")

    def head(self, rows: Tensor, features: Tensor, name: str = "head") -> Tensor:
        """Apply the layer `name` (head, or an extra copy of it) of row [P] or rows [k, P] to features.

        It is a linear layer, or a convolution of single pixels, which is a linear layer over channels.
        """
        named = self.named(rows)
        if f"{name}.weight" not in named:
            raise ConfigError(never_called(name))
        weight, bias = named[f"{name}.weight"], named.get(f"{name}.bias")
        if pixels := weight.dim() > rows.dim() + 1:  # [..., C, F, 1, 1]
            weight, features = weight[..., 0, 0], features.movedim(-3, -1)  # [..., B, H, W, F]
            places = features.shape[-3:-1]
            features = features.flatten(-4, -2)  # [..., B H W, F]
        with self.forward_pass.precision():
            out = (features @ weight.transpose(-1, -2)).to(features.dtype)
        out = out if bias is None else out + bias.unsqueeze(-2)
        return out.unflatten(-2, (-1, *places)).movedim(-1, -3) if pixels else out  # type: ignore[possibly-unbound]
