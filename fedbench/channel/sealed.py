"""Uploads of a run with central privacy, which only a private mean or sum can open."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from fedbench.core.options import RunError
from fedbench.core.round_context import RoundContext

_UNARY = ("neg", "pos", "abs", "invert", "bool", "float", "int", "complex", "index", "round", "len", "iter", "reversed")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne", "contains", "getitem", "setitem", "array")
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_OPERATORS = (*_UNARY, *_COMPARISONS, *(f"{side}{name}" for name in _BINARY for side in ("", "r", "i")))


class Sealed:
    """One uploaded tensor, of which a method can read nothing.

    Every operation raises RunError.  Only `opened` returns the rows, which `CentralPrivacy.release` calls.

    Args:
        rows: One row per client.  # [K, ...]
        name: The name of the upload.
        context: The clients and the round.
        center: The tensor that the server sent to all and from which the rows were trained; None: 0.  # [...]
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, rows: Tensor, name: str, context: RoundContext, center: Tensor | None = None):
        self.__dict__.update(_rows=rows, _name=name, _context=context, _center=center)

    def __repr__(self) -> str:
        return f"Sealed({self._name!r})"

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):  # copy and pickle ask for such names
            raise AttributeError(attribute)
        refuse(self._name, f"reads its attribute {attribute!r}")

    def __setattr__(self, attribute: str, value: Any) -> NoReturn:
        refuse(self._name, f"changes its attribute {attribute!r}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Raise RunError instead of computing a function of torch that has a sealed upload among its arguments.

        Args:
            function: The function, for the message.
            types: Unused.
            args: Its positional arguments; a sealed upload may also be in a list or tuple.
            kwargs: Its keyword arguments, or None.
        """
        values = [*args, *(kwargs or {}).values()]
        values += [item for value in values if isinstance(value, list | tuple) for item in value]
        name = next(value._name for value in values if isinstance(value, Sealed))
        refuse(name, f"computes torch's {getattr(function, '__name__', function)} of it")


def _refusing(operator: str) -> Any:
    """Return a method of `Sealed` for an operator, such as "add" for __add__, which always raises RunError."""

    def method(self: Sealed, *args: Any) -> NoReturn:
        refuse(self._name, f"applies the operator {operator!r} to it")

    return method


for _name in _OPERATORS:
    setattr(Sealed, f"__{_name}__", _refusing(_name))


def opened(sealed: Sealed) -> tuple[Tensor, str, RoundContext, Tensor | None]:
    """Return the content of a sealed upload.  Only private means and sums, and error messages, may call this.

    Returns:
        The arguments of `Sealed`: rows [K, ...], name, context, and center [...] or None.
    """
    content = vars(sealed)
    return content["_rows"], content["_name"], content["_context"], content["_center"]


def refuse(name: str, use: str) -> NoReturn:
    """Raise RunError, because a method uses an upload in a way that central privacy does not cover.

    Args:
        name: The name of the upload.
        use: What the method does with it, as in "adds it".
    """
    raise RunError(
        f"privacy=central does not cover this method's upload {name!r}: the server {use}, but only uniform means and "
        "sums over a round's clients get noise. Choose a method that averages its uploads, such as fedavg, fedper or "
        "ditto, or privacy=local"
    )


def find_sealed(value: Any) -> str | None:
    """Return the name of the first sealed upload in nested lists, tuples, dicts and SimpleNamespaces; None if none."""
    if isinstance(value, Sealed):
        _, name, _, _ = opened(value)
        return name
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next((name for item in value if (name := find_sealed(item))), None)
    # uploads and results of training are namespaces: their attributes
    return find_sealed(vars(value)) if type(value).__name__ == "SimpleNamespace" else None
