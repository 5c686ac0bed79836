"""A module's forward pass as a traced graph, which can be computed for the parameters of several clients at once.

`trace` records the operations of a module by torch.fx.  A `TracedGraph` computes its layers by batched operators
(batched_operators.py).  Functions of tensors are called with shifted axes, because tensors of several clients have an
additional first axis.  A module with any other operation is not traced.  `ForwardPass` then uses torch.vmap, which is
slower and supports more modules.

Letters: k clients, B batch size.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedbench.core.error_text import is_raised_here
from fedbench.core.options import ConfigError
from fedbench.core.private_torch import has_hooks
from fedbench.nn.batched_operators import OPERATORS, ForwardContext, Params, has_default_options

ELEMENTWISE = {
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
ELEMENTWISE_METHODS = {"relu", "tanh", "sigmoid", "add", "mul", "sub", "div", "abs", "square"}
# operations with arguments that are axes, and the positions of these arguments.  Axis 0, the batch, must not be among
# the axes.
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
AXIS_KEYWORDS = {"dim", "start_dim", "end_dim"}
OTHER_KEYWORDS = {"keepdim", "sizes", "chunks", "dtype"}  # of the same operations
ATTENTION = F.scaled_dot_product_attention


class _Tracer(fx.Tracer):
    """Records the graph, and the names of the modules whose output each node is.

    Only outputs that the module itself computed, and does not use again, are recorded.  A hook on such an output
    changes nothing else.

    Attributes:
        output_of: Names of the modules whose output a node is, the innermost module first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.output_of: dict[fx.Node, list[str]] = {}

    def call_module(self, m: nn.Module, forward: Any, args: tuple, kwargs: dict) -> Any:
        """Trace a call of a module, and add its name to `output_of` at the node of its output.

        Args:
            m: The module.
            forward: Its forward function.
            args: The arguments of the call.
            kwargs: The keyword arguments of the call.

        Returns:
            The output of the traced call.
        """
        name = self.path_of_module(m)  # its dotted name
        num_nodes_before = len(self.graph.nodes)
        out = super().call_module(m, forward, args, kwargs)
        # only one tensor, which the module computed itself (a new node) and did not use again: a hook may change it
        if isinstance(out, fx.Proxy) and not out.node.users and out.node in list(self.graph.nodes)[num_nodes_before:]:
            self.output_of.setdefault(out.node, []).append(name)
        return out

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in OPERATORS or (
            super().is_leaf_module(m, module_qualified_name) and not isinstance(m, nn.Sequential)
        )


class TracedGraph:
    """The traced operations (`nodes`, of torch.fx) of a module, whose name in a larger module is `prefix`, if any.

    Args:
        module: The module.
        graph: Its graph.
        output_of: Names of the modules whose output a node is.
        prefix: Prefix of the names of parameters and layers, if the module is part of a larger one.

    Attributes:
        modules: The modules by name.
        nodes: The operations, in order.
        inputs: The nodes of the inputs.
        output: The node of the output, or a tuple of nodes.
        shapes: Shapes of the parameters and buffers that functions of tensors use, by name.
        last_uses: For each node, the nodes whose values are not needed after it.
        output_of: Names of the modules whose output a node is, with the prefix.
        named_outputs: All names in output_of.
    """

    def __init__(self, module: nn.Module, graph: fx.Graph, output_of: dict[fx.Node, list[str]], prefix: str = ""):
        self.prefix = prefix
        self.modules = dict(module.named_modules())
        self.nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.output: Any = next(node for node in graph.nodes if node.op == "output").args[0]
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        used_names = [str(node.target) for node in self.nodes if node.op == "get_attr"]
        self.shapes = {name: tensors[name].shape for name in used_names if name in tensors}
        outputs = self.output if isinstance(self.output, tuple) else (self.output,)
        last_user = {used: node for node in self.nodes for used in node.all_input_nodes if used not in outputs}
        self.last_uses: dict[fx.Node, list[fx.Node]] = {node: [] for node in self.nodes}
        for used, node in last_user.items():
            self.last_uses[node].append(used)
        self.output_of = {node: [prefix + name for name in names] for node, names in output_of.items()}
        self.named_outputs = {name for names in self.output_of.values() for name in names}

    def run(
        self, params: Params, inputs: tuple[Any, ...], batched: bool, context: ForwardContext, until: str | None = None
    ) -> Any:
        """Compute the output of the module.

        Args:
            params: Parameters and buffers by name.  If batched, [k, ...] each, except for frozen ones.
            inputs: The inputs of the module.  If batched, [k, B, ...] each, else [B, ...].
            batched: Whether to compute k clients at once.
            context: Options of the pass, and its other results.
            until: Name of a layer.  Its input is returned instead of the output of the module.

        Returns:
            The output: a tensor, or a tuple of logits and additional loss.

        Raises:
            ConfigError: The module never calls the layer `until`.
        """
        values: dict[fx.Node, Any] = dict(zip(self.inputs, inputs))
        for node in self.nodes:
            if node.op == "call_module" and node.target == until:
                return values[node.args[0]]  # type: ignore[index]
            values[node] = self._compute(node, values, params, batched, context)
            if context.observes_layers:
                for name in self.output_of.get(node, ()):  # the layers whose output this node is
                    values[node] = context.process_output(name, values[node], params, batched)
            for used in self.last_uses[node]:  # frees memory as early as possible
                del values[used]
        if until is not None:
            raise ConfigError(missing_layer_message(until))
        if isinstance(self.output, tuple):
            return tuple(values[node] for node in self.output)
        return values[self.output]

    def _compute(
        self, node: fx.Node, values: dict[fx.Node, Tensor], params: Params, batched: bool, context: ForwardContext
    ) -> Tensor:
        """Return the value of a node.

        Args:
            node: The node.
            values: The values of earlier nodes.  # [k, B, ...] or [B, ...] each
            params: Parameters and buffers by name.  If batched, [k, ...] each, except for frozen ones.
            batched: Whether k clients are computed at once.
            context: Options of the pass.
        """
        if node.op == "call_module":
            module = self.modules[str(node.target)]
            name = self.prefix + str(node.target)  # in the larger module, to which params belong
            x = values[node.args[0]]  # type: ignore[index]
            return OPERATORS[type(module)](module, name, params, x, batched, context)
        if node.op == "get_attr":
            return params[self.prefix + str(node.target)]
        args = [_argument_value(a, values) for a in node.args]
        kwargs = dict(node.kwargs)
        if batched:
            args, kwargs = self._batched_arguments(node, args, kwargs, context)
        # scaled_dot_product_attention, whose fused kernels accept only one batch axis
        if node.target is ATTENTION and batched:
            return ATTENTION(*(t.flatten(0, 1) for t in args), **kwargs).unflatten(0, args[0].shape[:2])
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _batched_arguments(self, node: fx.Node, args: list, kwargs: dict, context: ForwardContext) -> tuple[list, dict]:
        """Return the arguments of a function for tensors with an additional first axis k.

        Args:
            node: The node that calls the function.
            args: Its arguments, with the values of nodes.
            kwargs: Its keyword arguments.
            context: Options of the pass.

        Returns:
            The arguments and keyword arguments, with shifted axes, indices and shapes of parameters.
        """
        if node.target in AXES:  # positions of the arguments that are axes, by function
            args = [_shift_axis(a) if i in AXES[node.target] else a for i, a in enumerate(args)]
            return args, {key: _shift_axis(a) if key in AXIS_KEYWORDS else a for key, a in kwargs.items()}
        if node.target is operator.getitem and isinstance(args[1], tuple):  # x[i, j] -> x[:, i, j]
            return [args[0], (slice(None), *args[1])], kwargs
        for i, a in enumerate(node.args):
            if isinstance(a, fx.Node) and a.op == "get_attr" and self.prefix + str(a.target) not in context.frozen:
                # a parameter [k, *shape] needs axes of length 1 to be broadcast against [k, B, ..., *shape]
                other_dims = [t.dim() for j, t in enumerate(args) if j != i and isinstance(t, Tensor)]
                shape = self.shapes[str(a.target)]
                args[i] = args[i].view(len(args[i]), *(1,) * (max(other_dims) - 1 - len(shape)), *shape)
        return args, kwargs


def missing_layer_message(name: str) -> str:
    """Return the error message for a model that never calls the layer `name`, which a method needs."""
    return (
        f"the model never calls a layer named {name!r}, whose input or output the method needs: give this name to the "
        "model's last linear layer, or use another model or method"
    )


def trace(module: nn.Module, prefix: str = "") -> TracedGraph | None:
    """Trace a module.

    Args:
        module: The module.
        prefix: Prefix of the names of its parameters and layers, if the module is part of a larger one.

    Returns:
        Its graph, or None if the module has an operation that cannot be computed for several clients at once.
    """
    if len(list(module.named_parameters())) < len(list(module.named_parameters(remove_duplicate=False))):
        return None  # tied parameters are one tensor of a row, but two names in the graph
    if has_hooks(module):
        return None  # the graph does not contain hooks, such as those of spectral normalization
    try:
        module_copy = copy.deepcopy(module, {id(p): p for p in module.parameters()})  # tracing may change buffers
        training_graph = _Tracer().trace(module_copy.train())
        tracer = _Tracer()
        graph = tracer.trace(module_copy.eval())
    except Exception as error:  # the module's code can raise anything when it runs on fx proxies
        if is_raised_here(error, __file__):
            raise  # an error of _Tracer
        return None
    if str(training_graph) != str(graph):
        return None  # a graph cannot depend on the training mode
    traced = TracedGraph(module, graph, tracer.output_of, prefix)
    outputs = traced.output if isinstance(traced.output, tuple) else (traced.output,)
    if not all(isinstance(node, fx.Node) for node in outputs):
        return None
    return traced if all(_is_supported(node, traced) for node in traced.nodes) else None


def _is_supported(node: fx.Node, graph: TracedGraph) -> bool:
    """Return whether `TracedGraph.run` can compute a node for several clients at once.

    It knows the functions in ELEMENTWISE, ELEMENTWISE_METHODS and AXES, and the layers in OPERATORS.

    Args:
        node: The node, an operation of torch.fx.
        graph: The graph to which it belongs.
    """
    if node.op == "call_module":
        has_one_input = len(node.args) == 1 and not node.kwargs
        return has_one_input and _is_supported_layer(graph.modules[str(node.target)])
    if node.op == "get_attr":  # a parameter or buffer must be the argument of elementwise operations with a result
        is_elementwise = all(
            user.target in ELEMENTWISE and any(_is_result(a) for a in user.args) for user in node.users
        )
        return is_elementwise and str(node.target) in graph.shapes
    if any(isinstance(a, fx.Node) for a in node.kwargs.values()):
        return False
    if node.target in AXES:  # functions with arguments that are axes
        return _has_constant_axes(node)
    if node.target is operator.getitem:
        return _is_supported_index(node)
    if node.target is ATTENTION:  # query, key, value and optionally a mask
        has_tensors = all(isinstance(a, fx.Node) for a in node.args)
        return len(node.args) in (3, 4) and has_tensors and not node.kwargs.get("dropout_p")
    if node.op == "call_function":
        return node.target in ELEMENTWISE
    return node.op == "call_method" and node.target in ELEMENTWISE_METHODS


def _is_supported_layer(module: nn.Module) -> bool:
    """Return whether a layer can be computed for several clients at once by OPERATORS.

    It can if its class is there, and the operator supports its options: only padding by zeros, for example.
    """
    if type(module) not in OPERATORS:
        return False
    if isinstance(module, nn.Flatten):  # the default: all axes after the batch
        return (module.start_dim, module.end_dim) == (1, -1)
    if isinstance(module, nn.Conv2d):  # padding of zeros, by numbers instead of "same" or "valid"
        return module.padding_mode == "zeros" and not isinstance(module.padding, str)
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):  # momentum None: means over all batches need a counter
        return module.momentum is not None
    return not isinstance(module, nn.Embedding) or has_default_options(module)


def _is_supported_index(node: fx.Node) -> bool:
    """Return whether an indexing operation can be computed with an additional first axis of clients.

    It can if it selects one of several tensors, or keeps all samples of the batch (index `:`) and has constant bounds.
    """
    indexed, index = node.args
    if isinstance(index, str):  # one of several inputs by name
        return isinstance(indexed, fx.Node) and indexed.op == "placeholder"
    # chunk and unbind return several tensors, of which an integer selects one
    is_sequence = isinstance(indexed, fx.Node) and indexed.target in ("chunk", "unbind")
    if not isinstance(index, tuple):
        return is_sequence and isinstance(index, int)
    bounds = [n for i in index for n in ((i.start, i.stop, i.step) if isinstance(i, slice) else (i,))]
    keeps_batch = isinstance(index[0], slice) and index[0] == slice(None)
    has_constant_bounds = all(n is None or isinstance(n, int) for n in bounds)  # no results of operations
    return keeps_batch and not is_sequence and has_constant_bounds


def _has_constant_axes(node: fx.Node) -> bool:
    """Return whether an operation with arguments that are axes can get one more axis in front.

    It can if all its axes are integers in the graph, none is the batch axis 0, and no keyword argument is unknown.

    Args:
        node: The operation, a key of AXES such as softmax.
    """
    # AXES: positions of the arguments of an operation that are axes
    values = [a for i, a in enumerate(node.args) if i in AXES[node.target]]
    values += [a for key, a in node.kwargs.items() if key in AXIS_KEYWORDS]
    axes = [a for value in values for a in (value if isinstance(value, tuple | list) else (value,))]
    has_known_keywords = node.kwargs.keys() <= AXIS_KEYWORDS | OTHER_KEYWORDS
    return has_known_keywords and bool(axes) and all(isinstance(a, int) and a != 0 for a in axes)


def _shift_axis(axis: Any) -> Any:
    """Return an axis, or a list of them, for tensors with one more axis in front.

    Negative axes and arguments that are no axes stay the same.
    """
    if isinstance(axis, tuple | list):
        return [_shift_axis(a) for a in axis]
    return axis + 1 if isinstance(axis, int) and axis > 0 else axis


def _argument_value(argument: Any, values: dict[fx.Node, Tensor]) -> Any:
    """Return an argument of an operation in which nodes are replaced by their computed values.

    Args:
        argument: A node, a constant, or a list or tuple of these.
        values: The computed values of nodes.
    """
    if isinstance(argument, fx.Node):
        return values[argument]
    if isinstance(argument, list | tuple):
        items = [_argument_value(item, values) for item in argument]
        return tuple(items) if isinstance(argument, tuple) else items
    return argument


def _is_result(argument: Any) -> bool:
    """Return whether an argument is a computed value: an input of the graph, or the result of an operation in it."""
    return isinstance(argument, fx.Node) and argument.op != "get_attr"  # get_attr reads a parameter or buffer
