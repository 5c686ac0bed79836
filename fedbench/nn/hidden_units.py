"""Hidden units that can be reordered without changing the function of a network.

W2 s(W1 h + b1) + b2 with m hidden units and an elementwise nonlinearity s is the same function for all m! orders of the
rows of W1, the entries of b1 and the columns of W2.

Letters: m hidden units, k clients, d weights that lead to a unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

# Which axes of parameters are reordered with hidden units.  By the name of a parameter: the shape to which it is
# reshaped first, and the axis of the hidden units in this shape.
UnitAxes = dict[str, tuple[tuple[int, ...], int]]


@dataclass(frozen=True)
class HiddenUnits:
    """The m hidden units of a module, such as an adapter with the layers down and up.

    Names are relative to the module.

    Attributes:
        size: Number of hidden units, m.
        axes: The parameters to reorder.
        parameter_names: Names of all parameters of the bottleneck.  No other module uses them.
        layer: Name of the layer whose output, before the nonlinearity, is the units' values, in blocks of m.
        incoming_weights: incoming_weights(named, prefix) returns the weights that lead to each unit.  # [k, m, d]
        num_blocks: Number of blocks.
    """

    size: int
    axes: UnitAxes
    parameter_names: tuple[str, ...]
    layer: str
    incoming_weights: Callable[[Mapping[str, Tensor], str], Tensor]
    num_blocks: int = 1


@runtime_checkable
class HasHiddenUnits(Protocol):
    """A module with hidden units."""

    def hidden_units(self) -> HiddenUnits | None:
        """Return the hidden units of this module, and which axes of its parameters belong to them.

        None if reordering the units would change the function that the module computes.
        """
        ...


@runtime_checkable
class HiddenUnitLayer(Protocol):
    """A layer other than nn.Linear that can be before or after hidden units."""

    def output_units(self) -> tuple[int, int, UnitAxes]:
        """Return the output units of this layer.

        Returns:
            The number of units m; the number of blocks of m numbers in the output, each with one number per unit (such
            as the positions of flattened maps); and the parameters to reorder with the units: by their names in this
            layer, the shape to which they are reshaped first, and the axis of the units.
        """
        ...

    def input_units(self) -> UnitAxes:
        """Return the axes of this layer's parameters that are reordered with the hidden units of its input.

        A dict from name of the parameter to (shape to which it is reshaped first, axis in this shape).
        """
        ...

    def incoming_weights(self, named: Mapping[str, Tensor], prefix: str) -> Tensor:
        """Return the weights that lead to each output unit, concatenated if a unit has several rows (blocks).

        Each gate of a recurrent layer, for example, has a row of weights for every unit.

        Args:
            named: Parameters of k clients, by name.  # [k, ...] each
            prefix: Prefix of the names of this layer's parameters.

        Returns:
            The weights of m units.  # [k, m, d], where d is the number of inputs times the number of blocks
        """
        ...


def hidden_units_between(down: nn.Module, up: nn.Module, prefix: str) -> HiddenUnits | None:
    """Return the hidden units between two layers of a bottleneck.

    Args:
        down: The layer before the units, with the name prefix.down.
        up: The layer after the units, with the name prefix.up.
        prefix: Name of the bottleneck in its module.

    Returns:
        The hidden units, or None if one of the layers is neither nn.Linear nor a `HiddenUnitLayer`.
    """
    output, input_axes = _output_units(down), _input_units(up)
    if output is None or input_axes is None:
        return None
    size, num_blocks, output_axes = output  # m units, blocks of m numbers in the output, and axes of parameters
    # from name of a parameter to (shape to which it is reshaped first, axis of the units)
    axes = {f"{prefix}.down.{name}": axis for name, axis in output_axes.items()}
    axes |= {f"{prefix}.up.{name}": axis for name, axis in input_axes.items()}
    parameter_names = [
        f"{prefix}.{layer_name}.{name}"
        for layer_name, layer in (("down", down), ("up", up))
        for name, _ in layer.named_parameters(recurse=False)
    ]

    def incoming_weights(named: Mapping[str, Tensor], module_prefix: str) -> Tensor:
        """Return the weights that lead to each of the m hidden units.

        Args:
            named: Parameters of k clients, by their names in the model.  # [k, ...] each
            module_prefix: What the names of this module's parameters begin with in the model; "" if it is the model.

        Returns:
            The weights.  # [k, m, d]
        """
        if isinstance(down, HiddenUnitLayer):
            return down.incoming_weights(named, f"{module_prefix}{prefix}.down.")
        return named[f"{module_prefix}{prefix}.down.weight"]

    return HiddenUnits(
        size=size,
        axes=axes,
        parameter_names=tuple(parameter_names),
        layer=f"{prefix}.down",
        incoming_weights=incoming_weights,
        num_blocks=num_blocks,
    )


def _output_units(layer: nn.Module) -> tuple[int, int, UnitAxes] | None:
    """Return the output units of a layer: their number, the number of blocks, and the axes to reorder.

    It is the result of `HiddenUnitLayer.output_units`, or the equal information for nn.Linear.  None: another layer.
    """
    if isinstance(layer, HiddenUnitLayer):
        return layer.output_units()
    if type(layer) is not nn.Linear:
        return None
    bias: UnitAxes = {} if layer.bias is None else {"bias": ((layer.out_features,), 0)}
    return layer.out_features, 1, {"weight": (tuple(layer.weight.shape), 0), **bias}


def _input_units(layer: nn.Module) -> UnitAxes | None:
    """Return the axes of a layer that are reordered with its input units.

    It is the result of `HiddenUnitLayer.input_units`, or the equal information for nn.Linear.  None: another layer.
    """
    if isinstance(layer, HiddenUnitLayer):
        return layer.input_units()
    # by parameter: its shape and the axis of the units; axis 1 of a linear layer's weight [outputs, inputs]
    return {"weight": (tuple(layer.weight.shape), 1)} if type(layer) is nn.Linear else None
