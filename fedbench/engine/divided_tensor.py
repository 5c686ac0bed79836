"""Tensors [K, ...] of which each process has the rows of its own clients (hardware.rows=sharded).

`cohort.train`, `cohort.gradient` and reads of client states return such tensors.  Methods use them as other tensors:

- What treats rows separately, such as rows - w or a selection of columns, is computed for the local rows only.
- A sum over the rows, or a product weights @ rows, is one all_reduce.
- Any other operation first exchanges the rows.  It is correct, but each process then receives the rows of the others.

All processes compute the same operations in the same order, because a sum or an exchange needs all of them.

Letters: K rows, k local rows, which are those of this process's clients, P numbers of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.core.private_torch import tensor_without_memory
from fedbench.engine.ranks import Ranks

# What is known of a tensor without its numbers.
METADATA = {
    *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.element_size, Tensor.is_floating_point, Tensor.__len__),
    *(torch.is_floating_point, Tensor.is_contiguous),
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "is_cuda", "nbytes", "itemsize")),
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn", "layout", "is_sparse")),
}


class DividedTensor(Tensor):
    """A tensor [K, ...] of which this process has the rows of its own clients, until an operation needs all rows.

    Args:
        local: The rows of this process, in the order of their positions.  # [k, ...]
        owners: The rank that has each row.  # [K]
        ranks: The processes of the run.
        derived: If `local` is a view of the rows of another divided tensor: that tensor, and the function that makes
            the view.  Once all rows of that tensor are here, this one is a view of them.
    """

    local: Tensor
    owners: np.ndarray
    ranks: Ranks
    _derived: tuple[DividedTensor, Callable[[Tensor], Tensor]] | None
    _whole: Tensor | None

    def __new__(cls, local: Tensor, owners: np.ndarray, ranks: Ranks, derived: Any = None) -> DividedTensor:
        """Create the tensor [K, ...] from this process's rows `local`; K is the length of `owners`.

        It has the shape, type and device of all rows, but no memory of its own.  The arguments are those of the class.
        """
        out = tensor_without_memory(cls, (len(owners), *local.shape[1:]), like=local)
        out.local, out.owners, out.ranks = local, owners, ranks
        out._derived, out._whole = derived, None
        return out

    @property
    def mine(self) -> np.ndarray:
        """The positions, from 0 to K - 1, of this process's k rows among all K rows, ascending.  # [k] int64"""
        return np.flatnonzero(self.owners == self.ranks.rank)

    @property
    def is_whole(self) -> bool:
        """Whether this process has all K rows, because an earlier `whole` exchanged them."""
        return self._whole is not None or (self._derived is not None and self._derived[0].is_whole)

    def whole(self) -> Tensor:
        """Return all rows, as a tensor without division.  The first call exchanges them.  # [K, ...]

        Raises:
            RuntimeError: It is called within Ranks.undistributed, and another process has some of the rows.
        """
        if self._whole is None:
            if self._derived is not None:  # this is a view of another divided tensor
                parent, view = self._derived
                self._whole = view(parent.whole())
            else:
                self._whole = self._exchanged()
            self.local = self._derived = None  # type: ignore[assignment]
        return self._whole

    def _exchanged(self) -> Tensor:
        """Send this process's rows to all processes, receive theirs, and return all rows.  # [K, ...]

        All processes must call this together.
        """
        _require_local(self, self.owners)
        rows = self.local.new_zeros(len(self.owners), *self.local.shape[1:])
        rows[_index(self.mine, rows)] = self.local
        positions_by_rank = [np.flatnonzero(self.owners == rank) for rank in range(self.ranks.world_size)]
        self.ranks.exchange(positions_by_rank, {f"rows {[*rows.shape]}": rows})
        return rows

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute a function of torch with divided tensors among its arguments.

        If OPERATIONS has the function and it can do without other rows, it is computed for the local rows.  Otherwise,
        the processes first exchange all rows of the arguments.

        Args:
            func: The function, such as torch.add or Tensor.__getitem__.
            types: Classes of the arguments, unused.
            args: Positional arguments.
            kwargs: Keyword arguments, or None.

        Returns:
            The result of func(*args, **kwargs): a divided tensor, or a usual one after an exchange or a sum over rows.
        """
        kwargs = kwargs or {}
        if func in METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        operation = OPERATIONS.get(getattr(func, "__name__", ""))
        if operation is not None and args:
            result = operation(func, _simplified(args), _simplified(kwargs))
            if result is not NotImplemented:
                return result
        return func(*_all_rows(args), **_all_rows(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"internal error: {func} reached the memory of rows that other processes have")


def divided(local: Tensor, ids: np.ndarray, ranks: Ranks) -> DividedTensor:
    """Return the rows of the clients ids [K] as a tensor [K, ...] that the processes `ranks` divide.

    `local` [k, ...] are the rows of those clients that this process owns, in the order of ids.
    """
    return DividedTensor(local, ranks.owner(ids), ranks)


def local_rows(values: Tensor, owners: np.ndarray, ranks: Ranks) -> Tensor:
    """Return this process's rows of a tensor.

    Args:
        values: A tensor, divided or not.  # [K, ...]
        owners: The rank that needs each row.  # [K]
        ranks: The processes of the run.

    Returns:
        The rows at the positions where owners is this process's rank.  # [k, ...]
    """
    if isinstance(values, DividedTensor):
        if not values.is_whole and np.array_equal(values.owners, owners):
            return values.local
        values = values.whole()
    return values[_index(np.flatnonzero(owners == ranks.rank), values)]


# -- operations on local rows ------------------------------------------------------------------------------
# func, args and kwargs are a function of torch and its arguments, of which divided tensors without all rows are left.
# The result is NotImplemented if the function needs all rows, or if no argument that matters is divided.
def _row_by_row(func: Callable, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute a function of numbers, which broadcasts its arguments, for the local rows.

    func is a function of torch, and args and kwargs are its arguments; x.local [k, ...] are this process's rows of a
    divided tensor x [K, ...].  Return what func returns, or NotImplemented if func needs all rows.
    """
    if any(isinstance(value, Tensor) for value in kwargs.values()):
        return NotImplemented
    divided_args = [value for value in args if isinstance(value, DividedTensor)]
    if not divided_args:
        return NotImplemented
    # of each argument, the part for the local rows; None if it needs all rows
    selected = [_selected(value, divided_args[0], divided_args[0].dim()) for value in args]
    result = NotImplemented if _none_of(selected) else func(*selected, **kwargs)
    return _like(divided_args[0], result) if isinstance(result, Tensor) else NotImplemented  # where(x) has a tuple


def _copied(func: Callable, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute a copy of the local rows, perhaps with another type.

    func is a function of torch, and args and kwargs are its arguments; x.local [k, ...] are this process's rows of a
    divided tensor x [K, ...].  Return what func returns, or NotImplemented if func needs all rows.
    """
    x = args[0]
    if not isinstance(x, DividedTensor):
        return NotImplemented
    # x.to(other) takes the type and the device of another tensor
    others = [value.local if isinstance(value, DividedTensor) else value for value in args[1:]]
    local = func(x.local, *others, **kwargs)
    # a conversion to its own type returns x itself; whether contiguous() does depends on the number of local rows
    return x if local is x.local and func.__name__ != "contiguous" else _like(x, local)


def _columns_or_rows(func: Callable, args: Any, kwargs: dict[str, Any]) -> Any:
    """Select columns of the local rows, x[..., columns], or rows by their positions, x[positions].

    func is a function of torch, and args and kwargs are its arguments; x.local [k, ...] are this process's rows of a
    divided tensor x [K, ...].  Return what func returns, or NotImplemented if func needs all rows.
    """
    x, index = args
    if not isinstance(x, DividedTensor):
        return NotImplemented
    if _selects_columns(index, x.dim()):
        if any(isinstance(item, Tensor | np.ndarray | list) for item in index):
            return _like(x, x.local[index])
        return _view(x, lambda rows: rows[index])
    positions = _positions(index, len(x.owners))  # of the selected rows; None if the index is no list of rows
    if positions is None:
        return NotImplemented
    _require_local(x, x.owners[positions])  # owners: the rank that has each row
    mine = positions[x.owners[positions] == x.ranks.rank]  # those of this process, looked up among its rows
    selected = x.local[_index(np.searchsorted(x.mine, mine), x.local)]
    return DividedTensor(selected, x.owners[positions], x.ranks) if x.ranks.is_distributed else selected


def _assign(func: Callable, args: Any, kwargs: dict[str, Any]) -> Any:
    """Replace columns of the local rows, x[..., columns] = values, or rows by their positions, x[positions] = values.

    func is a function of torch, and args and kwargs are its arguments; x.local [k, ...] are this process's rows of a
    divided tensor x [K, ...].  Return what func returns, or NotImplemented if func needs all rows.
    """
    x, index, values = args
    if not isinstance(x, DividedTensor):
        return NotImplemented
    if _selects_columns(index, x.dim()):
        values = _selected(values, x, x[index].dim())  # the part for the local rows; None if all rows are needed
        if values is None:
            return NotImplemented
        x.local[index] = values
        return None
    positions = _positions(index, len(x.owners))  # of the replaced rows; None if the index is no list of rows
    if positions is None:
        return NotImplemented
    owners = x.owners[positions]  # the rank that has each of these rows
    _require_local(x, owners)
    # of those that this process has: where they are among its rows
    where = _index(np.searchsorted(x.mine, positions[owners == x.ranks.rank]), x.local)
    has_rows = isinstance(values, Tensor) and values.dim() == x.dim() and len(values) == len(positions)
    x.local[where] = local_rows(values, owners, x.ranks) if has_rows else values
    return None


def _joined(func: Callable, args: Any, kwargs: dict[str, Any]) -> Any:
    """Join tensors along another axis than that of rows: torch.cat or torch.stack.

    func is a function of torch, and args and kwargs are its arguments; x.local [k, ...] are this process's rows of a
    divided tensor x [K, ...].  Return what func returns, or NotImplemented if func needs all rows.
    """
    tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    divided_args = [value for value in tensors if isinstance(value, DividedTensor)]
    # dim 0, or the equal negative one, would join along the axis of rows; stack has one more axis
    if not divided_args or dim in (0, -divided_args[0].dim() - (func is torch.stack)) or "out" in kwargs:
        return NotImplemented
    if any(len(value) != len(divided_args[0]) or value.dim() != divided_args[0].dim() for value in tensors):
        return NotImplemented
    selected = [_selected(value, divided_args[0], divided_args[0].dim()) for value in tensors]
    return NotImplemented if _none_of(selected) else _like(divided_args[0], func(selected, dim=dim))


def _reduced(func: Callable, args: Any, kwargs: dict[str, Any]) -> Any:
    """Reduce each local row, or sum over all rows by an all_reduce.

    func is a function of torch, and args and kwargs are its arguments; x.local [k, ...] are this process's rows of a
    divided tensor x [K, ...].  Return what func returns, or NotImplemented if func needs all rows.
    """
    x = args[0]
    position = 2 if func.__name__ == "norm" else 1  # of the argument dim
    dim = kwargs.get("dim", args[position] if len(args) > position else None)
    if not isinstance(x, DividedTensor) or dim is None or any(isinstance(value, Tensor) for value in args[1:]):
        return NotImplemented
    axes = {axis % x.dim() for axis in (dim if isinstance(dim, tuple | list) else (dim,))}  # without negative ones
    if 0 not in axes:  # the axis of rows stays
        return _like(x, func(x.local, *args[1:], **kwargs))
    if func.__name__ != "sum" or len(axes) > 1 or not x.is_floating_point() or not x.ranks.is_distributed:
        return NotImplemented
    return x.ranks.sum("sum over rows", func(x.local, *args[1:], **kwargs))


def _flag(func: Callable, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return whether all numbers of all rows are True, or any of them; with an axis, for each local row.

    func is a function of torch, and args and kwargs are its arguments; x.local [k, ...] are this process's rows of a
    divided tensor x [K, ...].  Return what func returns, or NotImplemented if func needs all rows.
    """
    x = args[0]
    if len(args) > 1 or kwargs:
        return _reduced(func, args, kwargs)
    if not isinstance(x, DividedTensor) or not x.ranks.is_distributed:
        return NotImplemented
    wants_all = func.__name__ == "all"
    # one local number can decide: False for `all`, True for `any`
    is_decided_here = not bool(x.local.all()) if wants_all else bool(x.local.any())
    is_decided = bool(x.ranks.synchronize("flag", int(is_decided_here)))  # by any process
    return torch.tensor(not is_decided if wants_all else is_decided, device=x.device)


def _equal(func: Callable, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return whether two tensors have the same shape and equal numbers.

    func is a function of torch, and args and kwargs are its arguments; x.local [k, ...] are this process's rows of a
    divided tensor x [K, ...].  Return what func returns, or NotImplemented if func needs all rows.
    """
    a, b = args
    x = a if isinstance(a, DividedTensor) else b
    if a.shape != b.shape:
        return False
    other = _selected(b if x is a else a, x, x.dim()) if isinstance(x, DividedTensor) else None
    if other is None or not x.ranks.is_distributed:
        return NotImplemented
    differs_here = not torch.equal(x.local, other)
    return not x.ranks.synchronize("comparison of rows", int(differs_here))  # 1 if rows differ in any process


def _product(func: Callable, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute weights @ rows by an all_reduce, or rows @ matrix for the local rows.

    func is a function of torch, and args and kwargs are its arguments; x.local [k, ...] are this process's rows of a
    divided tensor x [K, ...].  Return what func returns, or NotImplemented if func needs all rows.
    """
    a, b = args
    if isinstance(a, DividedTensor) and a.dim() > 1:
        return NotImplemented if isinstance(b, DividedTensor) else _like(a, a.local @ b)
    if not isinstance(b, DividedTensor) or b.dim() > 2 or not b.is_floating_point() or not b.ranks.is_distributed:
        return NotImplemented
    if a.dim() > 1 and 2 * len(a) > len(b):  # an all_reduce moves twice as many bytes as an exchange of its result
        return NotImplemented
    weights = local_rows(a, b.owners, b.ranks) if a.dim() == 1 else a[..., _index(b.mine, a)]
    return b.ranks.sum("sum over rows", weights @ b.local)


def _reshaped(func: Callable, args: Any, kwargs: dict[str, Any]) -> Any:
    """Change the shape of each local row: x.reshape(K, ...), x.view(K, ...) or x.expand(K, ...).

    func is a function of torch, and args and kwargs are its arguments; x.local [k, ...] are this process's rows of a
    divided tensor x [K, ...].  Return what func returns, or NotImplemented if func needs all rows.
    """
    x, *shape = args
    if not isinstance(x, DividedTensor) or kwargs:
        return NotImplemented
    shape = [*shape[0]] if len(shape) == 1 and not isinstance(shape[0], int) else shape  # (a, b) or ((a, b),)
    # -1 for the axis of rows stands for K if the other axes keep their total size, or in expand
    if shape[:1] == [-1] and (func.__name__ == "expand" or math.prod(shape[1:]) == math.prod(x.shape[1:])):
        shape = [len(x.owners), *shape[1:]]
    keeps_rows = shape[:1] == [len(x.owners)]
    if not keeps_rows or (func.__name__ == "expand" and len(shape) != x.dim()):
        return NotImplemented
    if -1 in shape[1:] and func.__name__ != "expand":  # torch infers no size of an empty tensor
        given = math.prod(size for size in shape[1:] if size != -1)
        shape = [size if size != -1 else math.prod(x.shape[1:]) // max(given, 1) for size in shape]
    if func.__name__ == "reshape":  # a view or a copy
        return _like(x, func(x.local, len(x.local), *shape[1:]))
    return _view(x, lambda rows: func(rows, len(rows), *shape[1:]))


def _expanded_as(func: Callable, args: Any, kwargs: dict[str, Any]) -> Any:
    """Expand a tensor that is not divided to the shape of a divided one.

    func is a function of torch, and args and kwargs are its arguments; x.local [k, ...] are this process's rows of a
    divided tensor x [K, ...].  Return what func returns, or NotImplemented if func needs all rows.
    """
    x, other = args
    return NotImplemented if isinstance(x, DividedTensor) else x.expand(other.shape)


def _along_columns(func: Callable, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute a function of local rows that changes an axis behind that of rows, which is its first argument.

    func is a function of torch, and args and kwargs are its arguments; x.local [k, ...] are this process's rows of a
    divided tensor x [K, ...].  Return what func returns, or NotImplemented if func needs all rows.
    """
    axis = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("start_dim", 0))
    x = args[0]
    num_axes = x.dim() + (func.__name__ == "unsqueeze")  # of the result of unsqueeze, else of x
    if not isinstance(x, DividedTensor) or not isinstance(axis, int) or axis % num_axes == 0:
        return NotImplemented
    if func.__name__ == "flatten":  # a view or a copy
        return _like(x, func(x.local, *args[1:], **kwargs))
    return _view(x, lambda rows: func(rows, *args[1:], **kwargs))


def _detached(func: Callable, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return a view of the local rows without their history of gradients.

    func is a function of torch, and args and kwargs are its arguments; x.local [k, ...] are this process's rows of a
    divided tensor x [K, ...].  Return what func returns, or NotImplemented if func needs all rows.
    """
    return _view(args[0], func) if isinstance(args[0], DividedTensor) else NotImplemented


def _empty(func: Callable, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return a new tensor, not divided, which needs only the type, device or shape of x.

    func is a function of torch, and args and kwargs are its arguments; x.local [k, ...] are this process's rows of a
    divided tensor x [K, ...].  Return what func returns, or NotImplemented if func needs all rows.
    """
    x = args[0]
    if not isinstance(x, DividedTensor):
        return NotImplemented
    if not func.__name__.endswith("_like"):
        return func(x.local, *args[1:], **kwargs)
    return getattr(torch, func.__name__.removesuffix("_like"))(
        *(x.shape, *args[1:]), **{"dtype": x.dtype, "device": x.device, **kwargs}
    )


_ELEMENTWISE = (
    *("add", "sub", "rsub", "mul", "div", "true_divide", "neg", "abs", "pow", "square", "sqrt", "exp", "log", "sign"),
    *("__radd__", "__rsub__", "__rmul__", "__rdiv__", "__rtruediv__", "__and__", "__or__", "logical_and", "logical_or"),
    *("eq", "ne", "lt", "le", "gt", "ge", "isfinite", "isnan", "where", "clamp", "clamp_min", "clamp_max"),
    *("minimum", "maximum"),
)
OPERATIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    **dict.fromkeys(_ELEMENTWISE, _row_by_row),
    **dict.fromkeys(("clone", "contiguous", "float", "double", "bool", "to"), _copied),
    "detach": _detached,
    **dict.fromkeys(("cat", "stack"), _joined),
    **dict.fromkeys(("sum", "mean", "norm", "amax", "amin", "linalg_vector_norm"), _reduced),
    **dict.fromkeys(("matmul", "__matmul__", "__rmatmul__", "mv", "mm"), _product),
    **dict.fromkeys(("reshape", "view", "expand"), _reshaped),
    "expand_as": _expanded_as,
    **dict.fromkeys(("flatten", "unflatten", "unsqueeze", "squeeze"), _along_columns),
    **dict.fromkeys(("new_empty", "new_zeros", "empty_like", "zeros_like", "ones_like"), _empty),
    **dict.fromkeys(("all", "any"), _flag),
    "equal": _equal,
    "__getitem__": _columns_or_rows,
    "__setitem__": _assign,
}


# -- helpers ---------------------------------------------------------------------------------------------
def _like(x: DividedTensor, local: Tensor) -> DividedTensor:
    """Return a tensor [K, ...] divided between processes as x is; `local` [k, ...] are the rows of this process."""
    return DividedTensor(local, x.owners, x.ranks)


def _view(x: DividedTensor, view: Callable[[Tensor], Tensor]) -> DividedTensor:
    """Return view(x) as a divided tensor that shares the memory of x.

    Args:
        x: The divided tensor.
        view: From rows [k, ...] or [K, ...] to a view of them, computed for each row by itself.
    """
    # (x, view): how to compute all rows of the result, once an operation needs them
    return DividedTensor(view(x.local), x.owners, x.ranks, (x, view))  # type: ignore[call-arg]


def _selected(value: Any, x: DividedTensor, dim: int) -> Any:
    """Return the part of an argument that belongs to the local rows of x.

    Args:
        value: The argument: a tensor, or something else.
        x: A divided tensor.
        dim: Number of dimensions of the result.

    Returns:
        The part; None if the argument needs all rows, because its rows are not those of x.
    """
    if isinstance(value, DividedTensor):
        return value.local if value.dim() == dim and np.array_equal(value.owners, x.owners) else None
    if not isinstance(value, Tensor) or value.dim() < dim:
        return value
    if value.dim() > dim or len(value) not in (1, len(x.owners)):
        return None
    return value[_index(x.mine, value)] if len(value) == len(x.owners) else value


def _none_of(selected: list[Any]) -> bool:
    """Return whether any argument is None, by which `_selected` marks an argument that needs all rows."""
    return any(value is None for value in selected)


def _selects_columns(index: Any, dim: int) -> bool:
    """Return whether x[index] keeps the axis of rows whole, as x[:, ...] and x[..., columns] do.

    Args:
        index: The index.
        dim: Number of dimensions of x.
    """
    if not isinstance(index, tuple) or not index or any(isinstance(item, DividedTensor) for item in index):
        return False
    if index[0] is Ellipsis:
        others = [item for item in index[1:] if item is not None]
        return len(others) < dim and all(isinstance(item, int | slice) for item in others)
    return isinstance(index[0], slice) and index[0] == slice(None)


def _positions(index: Any, count: int) -> np.ndarray | None:
    """Return the positions of the rows that x[index] selects, ascending or not; None if it is no list of rows.

    Args:
        index: The index.
        count: Number of rows of x, K.
    """
    if isinstance(index, DividedTensor) or not isinstance(index, Tensor | np.ndarray | list):
        return None
    positions = index.cpu().numpy() if isinstance(index, Tensor) else np.asarray(index)
    if positions.ndim != 1:
        return None
    if positions.dtype == bool:
        return np.flatnonzero(positions)
    return positions % count if positions.dtype == np.int64 and count else None


def _require_local(x: DividedTensor, owners: np.ndarray) -> None:
    """Raise RuntimeError if rows of other processes are needed where nothing can be exchanged.

    Args:
        x: The tensor.
        owners: The ranks that have the needed rows.  # [k]
    """
    if not x.ranks.is_distributed and (owners != x.ranks.rank).any():
        raise RuntimeError(
            f"this process does not have all rows of a tensor {[*x.shape]}, because hardware.rows=sharded: use only "
            "the rows of the step's own clients in a step or in a function of samples, or read them before"
        )


def _index(positions: np.ndarray, like: Tensor) -> Tensor:
    """Return positions [k] int64 as a tensor on the device of `like`."""
    return torch.from_numpy(positions).to(like.device)


def _simplified(values: Any) -> Any:
    """Replace each divided tensor in (nested) arguments by its K rows, if this process already has all of them."""
    return _mapped(values, lambda x: x.whole() if x.is_whole else x)


def _all_rows(values: Any) -> Any:
    """Replace each divided tensor in (nested) arguments by its K rows, received from other processes if missing."""
    return _mapped(values, DividedTensor.whole)


def _mapped(values: Any, replace: Callable[[DividedTensor], Any]) -> Any:
    """Return nested tuples, lists and dicts with each divided tensor x replaced by `replace(x)`, all else unchanged."""
    if isinstance(values, DividedTensor):
        return replace(values)
    if type(values) in (tuple, list):
        return type(values)(_mapped(value, replace) for value in values)
    return {key: _mapped(value, replace) for key, value in values.items()} if type(values) is dict else values
