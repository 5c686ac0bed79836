"""A model whose parameters are a row: one model is a row [P], the models of k clients are rows [k, P].

Letters: k clients, P length of a row, B batch size, C classes, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbench.core import rng
from fedbench.core.options import ConfigError, require
from fedbench.core.private_torch import BatchNorm
from fedbench.nn.batched_operators import ForwardContext, OutputHook
from fedbench.nn.columns import Columns
from fedbench.nn.forward import ForwardPass, Inputs
from fedbench.nn.freezing import freeze_parameters, is_frozen_by_name
from fedbench.nn.manual_backward import ManualBackward
from fedbench.nn.row_layout import RowLayout, check_patterns
from fedbench.nn.traced_graph import TracedGraph, missing_layer_message


class FlatModel(RowLayout):
    """A module, the layout of its rows [P], and its forward pass (`forward_pass`) with rows as parameters.

    Frozen parameters and integer counters are not in rows.

    Args:
        module: The module.
        columns: For each group of columns, patterns of parameter names (fnmatch).  "type:*Norm*" matches all
            parameters of modules whose class name matches *Norm*.
        device: The compute device.
        new_module: new_module(*purpose, j) returns the module with its j-th independent initialization for a purpose.
            `init_rows` needs it.
        seed: The run's seed, for `seeded`.
        freeze: Patterns of parameters and buffers that are not in rows.  Layers with a matching weight stay in
            evaluation mode.

    Attributes:
        module: The module, in evaluation mode.
        device: The compute device.
        forward_pass: Computes the module with given parameters.
        has_dropout: Whether a forward pass in training mode may need keys for dropout.
        batch_statistics: Whether the module computes statistics of a batch (BatchNorm), so that batches must not be
            padded.

    Raises:
        ConfigError: A batch norm has no running statistics with a momentum, or a pattern matches nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        columns: Mapping[str, Sequence[str]] | None = None,
        device: torch.device | str = "cpu",
        new_module: Callable[..., nn.Module] | None = None,
        seed: int = 0,
        freeze: Sequence[str] = (),
    ):
        self.module, self.device = module.to(device).eval(), torch.device(device)
        self._new_module, self._seed, self._freeze = new_module, seed, list(freeze)
        self._patterns = {name: list(patterns) for name, patterns in (columns or {}).items()}
        self._extras: dict[str, Tensor] = {}
        self._eval_layers = freeze_parameters(module, self._freeze)
        self.forward_pass = ForwardPass(module, self._eval_layers, self.device)
        self.has_dropout = self.uses_vmap or any(isinstance(m, nn.Dropout) for m in module.modules())
        self._set_layout()
        norms = {name: layer for name, layer in module.named_modules() if isinstance(layer, BatchNorm)}
        require(
            all(m.track_running_stats and m.momentum is not None for m in norms.values()),
            "the model has a batch norm without running statistics or without momentum, which is not supported: "
            "construct it with track_running_stats=True and a momentum, such as PyTorch's default 0.1",
        )
        self.batch_statistics = bool(norms.keys() - self._eval_layers) or bool(self.buffer_names)

    # -- layout ------------------------------------------------------------------------------------------
    def _set_layout(self) -> None:
        """Determine from the module and the added columns which tensors are in rows, in which order, and which are not.

        It is called again whenever columns or groups are added.  It reads the option model.freeze (`_freeze`), the
        names of layers that stay in evaluation mode because of it (`_eval_layers`), the tensors that methods added
        (`_extras`), and the patterns of the column groups by name of the group (`_patterns`).
        """
        module = self.module
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        saved = module.state_dict()  # buffers that are not in it are constants, such as causal masks
        statistics = {n: b for n, b in module.named_buffers() if b.is_floating_point() and n in saved}
        frozen_statistics = {
            n for n in statistics if n.rpartition(".")[0] in self._eval_layers or is_frozen_by_name(n, self._freeze)
        }
        buffers = {n: b for n, b in statistics.items() if n not in frozen_statistics}
        # Set all attributes of the layout (`RowLayout`).  The order in rows: parameters, tensors that methods added
        # (`extend`), running statistics.
        super().__init__(dict(trained), self._extras, buffers)
        frozen = {n: p.detach() for n, p in module.named_parameters() if not p.requires_grad}
        graph_names = self.traced_graph.shapes.keys() if self.traced_graph is not None else set()
        used_buffers = frozen_statistics | graph_names  # of the buffers outside of rows, those that a pass needs
        frozen |= {n: b for n, b in module.named_buffers() if n in used_buffers and n not in buffers}
        self.forward_pass.frozen = frozen
        self.group_columns(self._patterns, self._class_of)  # sets `columns`
        modules = [name for name, _ in module.named_modules()]
        check_patterns(self._patterns, [*self.spans, *frozen], self._class_of, modules, list(self.spans))

    def _class_of(self, name: str) -> str:
        """Return the class name of a tensor's layer, such as "Linear" for "head.weight"; "" if a method added it."""
        return "" if name in self._extras else type(self.module.get_submodule(name.rpartition(".")[0])).__name__

    def extend(self, **extras: str | Tensor | nn.Module) -> None:
        """Add columns to rows.  Each argument becomes a column group of its name.

        Args:
            **extras: The initial values, by name: "copy:prefix" for a copy of the parameters whose names begin with
                prefix, a module for its parameters, or a tensor.  extend(head2="copy:head") adds head2.weight and
                head2.bias.
        """
        for name, source in extras.items():
            if isinstance(source, Tensor):
                self._extras[name] = source.detach().clone().to(self.device)
            else:
                owner, prefix = self.module, ""  # the parameters of owner whose names begin with prefix are copied
                if isinstance(source, nn.Module):
                    owner = source
                else:
                    prefix = source.removeprefix("copy:") + "."
                self._extras |= {
                    f"{name}.{n.removeprefix(prefix)}": p.detach().clone().to(self.device)
                    for n, p in owner.named_parameters()
                    if n.startswith(prefix)
                }
            self._patterns[name] = [name] if isinstance(source, Tensor) else [f"{name}.*"]
        self._set_layout()

    def add_group(self, name: str, patterns: Sequence[str]) -> Columns:
        """Add a column group, which may be empty.

        Args:
            name: Name of the group.
            patterns: Patterns of parameter names (fnmatch), or "type:*Norm*" for all tensors of modules whose class
                name matches *Norm*.

        Returns:
            The columns of the group.
        """
        self._patterns[name] = list(patterns)
        self._set_layout()
        return self.columns[name]

    def seeded(self, make: Callable[[], Any], *purpose: int | str) -> Any:
        """Return make(), computed with torch's global random numbers seeded by the run's seed and the purpose.

        Args:
            make: A function that uses random numbers, for example to initialize a module.
            *purpose: Parts of the key, which separate different uses.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.key(self._seed, *purpose) >> 1)  # a seed must be below 2^63
            return make()

    def init_rows(self, keys: int | np.ndarray, *purpose: str | int) -> Tensor:
        """Return independent initializations.  Pretrained weights and added columns are the same in all rows.

        Args:
            keys: How many rows to return, or an integer key for each, such as client ids [k].
            *purpose: Use of the rows.  Rows of different uses are independent.

        Returns:
            The rows.  # [k, P]
        """
        if self._new_module is None:
            raise ValueError(
                "init_rows needs a function that returns new modules, but this FlatModel has none: pass it as the "
                "argument new_module of FlatModel"
            )
        row_keys = range(keys) if isinstance(keys, int) else keys.tolist()
        out = self.init_row().repeat(len(row_keys), 1)
        for row, row_key in zip(out, row_keys):
            module = self._new_module(*purpose, row_key)  # initialized by random numbers of this key
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            for name, (start, stop) in self.spans.items():  # added columns are not in the module, and keep their values
                row[start:stop] = tensors.get(name, row[start:stop]).detach().reshape(-1)
        return out

    # -- single layers -----------------------------------------------------------------------------------
    def add_hook(self, name: str, hook: OutputHook) -> None:
        """Change the output of a layer from now on.

        Args:
            name: Name of the layer.
            hook: hook(output, params) returns a tensor of the shape of the output [B, ...].  params are the client's
                parameters by name, including those that a method added.  Gradients reach them.  The hook is written
                for one client.  torch.vmap computes it for several.

        Raises:
            ConfigError: The model has no such layer.
        """
        self.forward_pass.add_hook(name, hook)

    @property
    def has_hooks(self) -> bool:
        """Whether `add_hook` has added a hook, which changes the output of a layer."""
        return self.forward_pass.has_hooks

    def capture(self, rows: Tensor, inputs: Inputs, layers: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the logits, and the outputs of layers in evaluation mode.

        Args:
            rows: The parameters of one model [P], or of one model per client [k, P].
            inputs: The inputs.  # [B, ...], or [k, B, ...] for rows [k, P]
            layers: Patterns of layer names (fnmatch).

        Returns:
            The logits, and the outputs by layer name.  If a layer is called more than once, its last output.
                # [B, ...] or [k, B, ...] each

        Raises:
            ConfigError: A pattern matches no layer that the forward pass calls.
        """
        return self.forward_pass.capture(self.named(rows), inputs, batched=rows.dim() == 2, patterns=layers)

    # -- forward -----------------------------------------------------------------------------------------
    @property
    def traced_graph(self) -> TracedGraph | None:
        """The operations of the module as a graph, which can be computed for several clients at once.

        None if torch.fx cannot trace the module, an operation is not supported, or it has its own batched forward pass.
        """
        return self.forward_pass.traced_graph

    @property
    def manual_backward(self) -> ManualBackward | None:
        """A forward and backward pass of the module without autograd, which is faster for small steps.

        None if the module is not a sequence of linear, convolution, ReLU, pooling and flatten layers, or has hooks.
        """
        return self.forward_pass.manual_backward

    @property
    def uses_vmap(self) -> bool:
        """Whether torch.vmap computes several clients: the module has no traced graph and no batched forward pass."""
        return self.forward_pass.uses_vmap

    @property
    def autocast(self) -> bool:
        """Whether forward passes compute matrix products in bfloat16; assign True or False for all later passes."""
        return self.forward_pass.autocast

    @autocast.setter
    def autocast(self, value: bool) -> None:
        self.forward_pass.autocast = value

    def forward(
        self, rows: Tensor, inputs: Inputs, context: ForwardContext | None = None, until: str | None = None
    ) -> Tensor:
        """Return the logits, or the input of a layer.

        Args:
            rows: The parameters of one model [P], or of one model per client [k, P].
            inputs: The inputs.  # [B, ...], or [k, B, ...] for rows [k, P]
            context: Options of the pass.  Default: evaluation mode.
            until: Name of a layer.  Its input is returned instead of the logits.

        Returns:
            The logits [B, C] or [k, B, C], or the input of the layer `until`.
        """
        is_batched = rows.dim() == 2
        return self.apply(self.named(rows), inputs, is_batched, context or ForwardContext(), until)

    def apply(
        self,
        params: dict[str, Tensor],
        inputs: Inputs,
        batched: bool,
        context: ForwardContext,
        until: str | None = None,
    ) -> Tensor:
        """Return the logits, or the input of the layer named `until`, for parameters by name.

        Args:
            params: Parameters and running statistics by name.  # [k, ...] each if batched
            inputs: The inputs.  # [k, B, ...] if batched, else [B, ...]
            batched: Whether to compute k clients at once.
            context: Options of the pass, and its other results.
            until: Name of a layer; None for the whole model.
        """
        return self.forward_pass.apply(params, inputs, batched, context, until)

    def predict(self, rows: Tensor, inputs: Inputs) -> Tensor:
        """Return the logits in evaluation mode.

        Args:
            rows: The parameters of one model [P], or of one model per client [k, P].
            inputs: The inputs.  # [B, ...], or [k, B, ...] for rows [k, P]

        Returns:
            The logits.  # [B, C] or [k, B, C]
        """
        return self.forward_pass.predict(self.named(rows), inputs, batched=rows.dim() == 2)

    def features(self, rows: Tensor, inputs: Inputs, context: ForwardContext | None = None) -> Tensor:
        """Return the features, which are the input of the module named head.

        Args:
            rows: The parameters of one model [P], or of one model per client [k, P].
            inputs: The inputs.  # [B, ...], or [k, B, ...] for rows [k, P]
            context: Options of the pass.  Default: evaluation mode.

        Returns:
            The features.  # [B, F] or [k, B, F]; for segmentation [..., F, H, W]
        """
        return self.forward(rows, inputs, context, until="head")

    def head(self, rows: Tensor, features: Tensor, name: str = "head") -> Tensor:
        """Apply the head, or an added copy of it, to features.

        Args:
            rows: The parameters of one model [P], or of one model per client [k, P].
            features: The features, as `features` returns them.  # [B, F] or [k, B, F]; [..., F, H, W]
            name: Name of the head: a linear layer, or a convolution with kernel size 1.

        Returns:
            The output of the head.  # [B, C] or [k, B, C]; [..., C, H, W]

        Raises:
            ConfigError: The model has no layer of this name.
        """
        named = self.named(rows)  # parameters by name  [*shape] or [k, *shape] each
        if f"{name}.weight" not in named:
            raise ConfigError(missing_layer_message(name))
        weight, bias = named[f"{name}.weight"], named.get(f"{name}.bias")
        is_convolution = weight.dim() > rows.dim() + 1  # [..., C, F, 1, 1]
        image_size = features.shape[-2:]
        if is_convolution:  # a linear layer over the channels of each pixel
            weight = weight[..., 0, 0]
            features = features.movedim(-3, -1).flatten(-4, -2)  # [..., B H W, F]
        batch_shape = features.shape[1:-1]
        if rows.dim() == 2 and len(batch_shape) > 1:  # [k, B, T, F], for each token of a text
            features = features.flatten(1, -2)
        with self.forward_pass.precision():
            out = (features @ weight.transpose(-1, -2)).to(features.dtype)
        out = out if bias is None else out + bias.unsqueeze(-2)
        if is_convolution:
            return out.unflatten(-2, (-1, *image_size)).movedim(-1, -3)
        return out if out.dim() == len(batch_shape) + 2 else out.unflatten(1, batch_shape)
