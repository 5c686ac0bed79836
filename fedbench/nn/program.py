"""A module's forward pass on many parameter sets at once, written natively where that is known to pay.

`Program` is a module traced by torch.fx into a list of operations: layers, which batched_operators.py computes for one
or for many parameter sets, and functions of tensors, which are the same for both but for the axis k in front.  A module
that uses anything outside these tables is not traced: `FlatModel` then maps it with torch.vmap, slower but as general.

Letters: k parameter sets (clients), B batch.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedbench.core.error_text import is_raised_here
from fedbench.core.options import ConfigError, require
from fedbench.core.private_torch import has_hooks
from fedbench.nn.batched_operators import OPERATORS, ForwardContext, Params, is_plain_table

POINTWISE = {
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.neg,
    operator.ne,
    operator.gt,
    torch.zeros_like,
    torch.ones_like,
    torch.add,
    torch.sub,
    torch.mul,
    torch.div,
    torch.abs,
    torch.relu,
    torch.tanh,
    torch.sigmoid,
    F.relu,
    F.gelu,
    F.silu,
    F.tanh,
    F.sigmoid,
    F.leaky_relu,
    F.elu,
    F.softplus,
}
POINTWISE_METHODS = {"relu", "tanh", "sigmoid", "add", "mul", "sub", "div", "abs", "square"}
# operations on axes, and which of their arguments, from 0, these are.  For many clients an axis that is counted from
# the front is one further back; the batch's own, 0, is none that they may touch.
AXES: dict[Any, tuple[int, ...]] = {
    "transpose": (1, 2),
    "flatten": (1, 2),
    "unflatten": (1,),
    "mean": (1,),
    "chunk": (2,),
    "unbind": (1,),
    "softmax": (1,),
    torch.cat: (1,),
    torch.flatten: (1, 2),
    torch.mean: (1,),
    torch.softmax: (1,),
    F.softmax: (1,),
}
NAMED_AXES = {"dim", "start_dim", "end_dim"}  # likewise, as keywords; others that these operations may be given:
OTHER_KEYWORDS = {"keepdim", "sizes", "chunks", "dtype"}
ATTENTION = F.scaled_dot_product_attention


class _Tracer(fx.Tracer):
    """Remembers which node each module's output is: only where that was made within it and nothing there reads it, so
    that what changes it changes what the module gives and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[fx.Node, list[str]] = {}  # the innermost module first

    def call_module(self, m: nn.Module, forward: Any, args: tuple, kwargs: dict) -> Any:
        name, before = self.path_of_module(m), len(self.graph.nodes)
        out = super().call_module(m, forward, args, kwargs)
        if isinstance(out, fx.Proxy) and not out.node.users and out.node in list(self.graph.nodes)[before:]:
            self.outputs.setdefault(out.node, []).append(name)
        return out

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in OPERATORS or (
            super().is_leaf_module(m, module_qualified_name) and not isinstance(m, nn.Sequential)
        )


class Program:
    """The traced operations of a module.  `run` evaluates them for one or for many parameter sets.

    outputs: which modules' outputs a node is.  prefix: of the module's own name, where it is a layer of a larger one.
    """

    def __init__(self, module: nn.Module, graph: fx.Graph, outputs: dict[fx.Node, list[str]], prefix: str = ""):
        self.prefix = prefix
        self.modules = dict(module.named_modules())
        self.nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.output: Any = next(node for node in graph.nodes if node.op == "output").args[0]
        kept = self.output if isinstance(self.output, tuple) else (self.output,)
        last = {read: node for node in self.nodes for read in node.all_input_nodes if read not in kept}
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        read = [str(node.target) for node in self.nodes if node.op == "get_attr"]
        self.shapes = {name: tensors[name].shape for name in read if name in tensors}
        self.used_up = {node: [read for read, reader in last.items() if reader is node] for node in self.nodes}
        self.outputs = {node: [prefix + name for name in names] for node, names in outputs.items()}
        self.named = {name for names in self.outputs.values() for name in names}

    def run(
        self, params: Params, inputs: tuple[Any, ...], many: bool, context: ForwardContext, until: str | None = None
    ) -> Any:
        """inputs [k, B, ...] (or a dict of such) and params [k, ...] each if many, else without k; until: stop before
        that module.

        What the module returns: a tensor, or two (its logits and its extra loss).
        """
        env: dict[fx.Node, Any] = dict(zip(self.inputs, inputs))
        for node in self.nodes:
            if node.op == "call_module" and node.target == until:
                return env[node.args[0]]  # type: ignore[index]
            env[node] = self._compute(node, env, params, many, context)
            if context.looks:
                for name in self.outputs.get(node, ()):
                    env[node] = context.passed(name, env[node], params, many)
            for read in self.used_up[node]:  # an evaluation of masks would hold every layer's images at once
                del env[read]
        if until is not None:
            raise ConfigError(never_called(until))
        return tuple(env[node] for node in self.output) if isinstance(self.output, tuple) else env[self.output]

    def _compute(
        self, node: fx.Node, env: dict[fx.Node, Tensor], params: Params, many: bool, context: ForwardContext
    ) -> Tensor:
        """What a node makes of the results so far."""
        if node.op == "call_module":
            module = self.modules[str(node.target)]
            name = self.prefix + str(node.target)
            return OPERATORS[type(module)](module, name, params, env[node.args[0]], many, context)  # type: ignore[index]
        if node.op == "get_attr":
            return params[self.prefix + str(node.target)]
        args, kwargs = [_value(a, env) for a in node.args], dict(node.kwargs)
        if many:
            args, kwargs = self._for_many(node, args, kwargs, context)
        if node.target is ATTENTION and many:  # of five axes torch takes no fused form
            return ATTENTION(*(t.flatten(0, 1) for t in args), **kwargs).unflatten(0, args[0].shape[:2])
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _for_many(self, node: fx.Node, args: list, kwargs: dict, context: ForwardContext) -> tuple[list, dict]:
        """An operation's arguments where every tensor has an axis k in front."""
        if node.target in AXES:
            args = [_further(a) if i in AXES[node.target] else a for i, a in enumerate(args)]
            return args, {key: _further(a) if key in NAMED_AXES else a for key, a in kwargs.items()}
        if node.target is operator.getitem and isinstance(args[1], tuple):
            return [args[0], (slice(None), *args[1])], kwargs
        for i, a in enumerate(node.args):  # a client's own parameter meets a batch: [k, ..., *shape], 1 in between
            if isinstance(a, fx.Node) and a.op == "get_attr" and self.prefix + str(a.target) not in context.frozen:
                others = [t.dim() for j, t in enumerate(args) if j != i and isinstance(t, Tensor)]
                shape = self.shapes[str(a.target)]
                args[i] = args[i].view(len(args[i]), *(1,) * (max(others) - 1 - len(shape)), *shape)
        return args, kwargs


def never_called(name: str) -> str:
    """The sentence for a model that has no layer of that name in its forward pass."""
    return (
        f"the model never calls a layer named {name!r}: methods that work on features need the last linear layer "
        "under that name"
    )


class Layers:
    """The layers of a module that computes many clients by itself (`forward.Batched`).

    Each is computed by its operator, or as a traced graph if it is made of others, so that adapters, taps and captures
    reach them.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self._programs: dict[str, Program | None] = {}

    def apply(self, name: str, x: Tensor, params: Params, many: bool, context: ForwardContext) -> Tensor:
        """The layer of that name on x, [k, ...] with params [k, ...] each if many, but for the frozen ones."""
        layer = self.module.get_submodule(name)
        if type(layer) in OPERATORS:
            y = OPERATORS[type(layer)](layer, name, params, x, many, context)
            return context.passed(name, y, params, many) if context.looks else y
        if name not in self._programs:
            self._trace(name)
        program = self._programs[name]
        require(program is not None, f"the layer {name} does more than fedbench can compute for many clients at once")
        y = program.run(params, (x,), many, context)  # type: ignore[union-attr]
        return context.passed(name, y, params, many) if context.looks else y

    def trace_all(self) -> None:
        """Trace every layer now: torch.fx must not do so while threads call modules."""
        for name, layer in self.module.named_modules():
            if name and type(layer) not in OPERATORS:
                self._trace(name)

    def _trace(self, name: str) -> None:
        self._programs[name] = trace(self.module.get_submodule(name), f"{name}.")


def layers_of(module: nn.Module) -> Layers | None:
    """The `Layers` by which a module that computes many clients by itself calls its layers, if it has them."""
    held = [v for value in vars(module).values() for v in (value if isinstance(value, tuple) else (value,))]
    return next((v for v in held if isinstance(v, Layers)), None)


def trace(module: nn.Module, prefix: str = "") -> Program | None:
    """The module as a Program, or None when it does anything the table does not know.  prefix: see Program."""
    if len(list(module.named_parameters())) < len(list(module.named_parameters(remove_duplicate=False))):
        return None  # tied parameters have one name in the row, two in the layers
    if has_hooks(module):
        return None  # code around a layer, spectral normalization for one, is in no graph
    try:
        twin = copy.deepcopy(module, {id(p): p for p in module.parameters()})  # tracing may write into buffers
        in_training, tracer = _Tracer().trace(twin.train()), _Tracer()
        graph = tracer.trace(twin.eval())
    except Exception as error:  # of any kind: the module's code runs on fx's proxies
        if is_raised_here(error, __file__):
            raise  # a mistake of _Tracer
        return None
    if str(in_training) != str(graph):
        return None  # it asks whether it is in training, which a graph cannot
    program = Program(module, graph, tracer.outputs, prefix)
    given = program.output if isinstance(program.output, tuple) else (program.output,)
    known = all(_known(node, program) for node in program.nodes) and all(isinstance(node, fx.Node) for node in given)
    return program if known else None


def _known(node: fx.Node, program: Program) -> bool:
    if node.op == "call_module":
        module = program.modules[str(node.target)]
        plain = not isinstance(module, nn.Flatten) or (module.start_dim, module.end_dim) == (1, -1)
        images = not isinstance(module, nn.Conv2d) or (
            module.padding_mode == "zeros" and not isinstance(module.padding, str)
        )
        running = not isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) or module.momentum is not None
        table = not isinstance(module, nn.Embedding) or is_plain_table(module)
        only_input = len(node.args) == 1 and not node.kwargs
        return type(module) in OPERATORS and plain and images and running and table and only_input
    if node.op == "get_attr":  # a parameter or a buffer that meets a batch in a pointwise operation
        meets = all(user.target in POINTWISE and any(_is_result(a) for a in user.args) for user in node.users)
        return meets and str(node.target) in program.shapes
    if any(isinstance(a, fx.Node) for a in node.kwargs.values()):
        return False
    if node.target in AXES:
        return _axes_are_known(node)
    if node.target is operator.getitem:
        of, index = node.args
        if isinstance(index, str):  # one of several inputs by name
            return isinstance(of, fx.Node) and of.op == "placeholder"
        of_several = isinstance(of, fx.Node) and of.target in ("chunk", "unbind")
        if not isinstance(index, tuple):
            return of_several and isinstance(index, int)
        numbers = [n for i in index for n in ((i.start, i.stop, i.step) if isinstance(i, slice) else (i,))]
        whole_batch = isinstance(index[0], slice) and index[0] == slice(None)
        return whole_batch and not of_several and all(n is None or isinstance(n, int) for n in numbers)
    if node.target is ATTENTION:  # of queries, keys and values, and maybe a mask that is computed
        tensors = all(isinstance(a, fx.Node) for a in node.args)
        return len(node.args) in (3, 4) and tensors and not node.kwargs.get("dropout_p")
    if node.op == "call_function":
        return node.target in POINTWISE
    return node.op == "call_method" and node.target in POINTWISE_METHODS


def _axes_are_known(node: fx.Node) -> bool:
    """Whether an operation's axes are plain numbers other than the batch's, of images and rows as they are."""
    values = [a for i, a in enumerate(node.args) if i in AXES[node.target]]
    values += [a for key, a in node.kwargs.items() if key in NAMED_AXES]
    flat = [a for value in values for a in (value if isinstance(value, tuple | list) else (value,))]
    plain = node.kwargs.keys() <= NAMED_AXES | OTHER_KEYWORDS
    return plain and bool(flat) and all(isinstance(a, int) and a != 0 for a in flat)


def _further(axis: Any) -> Any:
    """An axis, or a list of them, with one more in front."""
    if isinstance(axis, tuple | list):
        return [_further(a) for a in axis]
    return axis + 1 if isinstance(axis, int) and axis > 0 else axis


def _value(a: Any, env: dict[fx.Node, Tensor]) -> Any:
    """What an argument stands for: a result so far, a list of such or of numbers, or itself."""
    if isinstance(a, fx.Node):
        return env[a]
    if isinstance(a, list | tuple):
        return (tuple if isinstance(a, tuple) else list)(_value(part, env) for part in a)
    return a


def _is_result(a: Any) -> bool:
    return isinstance(a, fx.Node) and a.op != "get_attr"
