"""Check options against the constructor of their class, by a pydantic model built from its signature.

The annotations are the schema.  An option without an annotation has the type of its default.  An error message has the
key, the value and what is allowed.
"""

from __future__ import annotations

import inspect
import math
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import DocInfo, Ge, Gt, Le, Lt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WrapValidator, create_model
from pydantic.fields import FieldInfo

from fedbench.config.conf_tree import nearest
from fedbench.config.find_target import find_target
from fedbench.core.options import LARGEST, ConfigError, require
from fedbench.core.removed import refuse_removed
from fedbench.core.settings import show

CONVERSIONS = {"_convert_": ("none", "partial", "object", "all"), "_recursive_": (True, False)}  # Hydra's keys
INSTANTIATE_KEYS = {"_target_", *CONVERSIONS}


def _number(value: Any) -> Any:
    """Return a value unchanged, but raise ValueError, which pydantic reports, for NaN and integers beyond int64."""
    if value != value or (isinstance(value, int) and abs(value) > LARGEST):
        raise ValueError
    return value


LIST, MAPPING = (list, "a list"), (dict, "a mapping")
BASIC: dict[Any, tuple[Any, str]] = {
    int: (int, "a whole number"),
    float: (Annotated[float, BeforeValidator(_number)], "a number"),
    bool: (bool, "true or false"),
    str: (str, "text"),
    None: (None, "null"),
    types.NoneType: (None, "null"),
    **dict.fromkeys((list, tuple, Sequence, Iterable, typing.Sequence, typing.Iterable), LIST),
    **dict.fromkeys((dict, Mapping, typing.Mapping), MAPPING),
}


def check_target(
    key: str,
    values: Mapping[str, Any],
    owner: str | None = None,
    hidden: Collection[str] = (),
    reserved: type | None = None,
) -> None:
    """Check a mapping with ``_target_`` against the signature of that target.

    Args:
        key: The dotted key of the mapping.
        values: The mapping.
        owner: What has the options, for messages.  Default: the last name of the target.
        hidden: Parameters that are not options, because code passes them.
        reserved: A dataclass with further keys that the mapping may have; None for no further keys.

    Raises:
        ConfigError: The target cannot be imported, or an option is invalid.
    """
    target = values.get("_target_")
    require(
        isinstance(target, str),
        f"{key}._target_ must be the path of a class, such as package.module.Class, got {show(target)}",
    )
    for name, allowed in CONVERSIONS.items():  # Hydra's keys _convert_ and _recursive_, with their allowed values
        require(
            name not in values or any(values[name] is one or values[name] == one for one in allowed),
            f"{key}.{name} must be one of {', '.join(map(show, allowed))}, got {show(values.get(name))}",
        )
    refuse_removed(key, values)  # options of earlier releases, with a message that says what replaces them
    model = model_of(key, str(target), hidden, reserved)
    check_options(key, values, model, owner or str(target).rsplit(".")[-1])


def model_of(key: str, target: str, hidden: Collection[str] = (), reserved: type | None = None) -> type[BaseModel]:
    """Return a pydantic model of the options of a mapping with ``_target_``.

    Args:
        key: The dotted key of the mapping.
        target: Its value of ``_target_``.
        hidden: Parameters that are not options, because code passes them.
        reserved: A dataclass with further keys that the mapping may have; None for no further keys.

    Raises:
        ConfigError: The target cannot be imported.
    """
    model = options_of(find_target(target, f"{key}._target_"))
    return _adjusted(model, tuple(hidden), reserved) if hidden or reserved else model


def check_options(key: str, values: Mapping[str, Any], model: type[BaseModel], owner: str) -> None:
    """Check that options are known, complete and of the right types.

    Args:
        key: The dotted key of the options; "" at the top level.
        values: The options.
        model: The pydantic model.
        owner: What has the options, for messages.

    Raises:
        ConfigError: An option is unknown, missing or invalid.
    """
    prefix = f"{key}." if key else ""
    # without the keys of hydra.utils.instantiate, such as _target_
    options = {str(name): value for name, value in values.items() if name not in INSTANTIATE_KEYS}
    try:
        model.model_validate(options)
    except ValidationError as error:
        # pydantic's errors: "loc" is the path of the wrong value, whose first entry is the option
        unknown = [e for e in error.errors() if e["type"] == "extra_forbidden" and len(e["loc"]) == 1]
        first = (unknown or error.errors())[0]  # an unknown option is reported before an invalid value
        name = str(first["loc"][0])
        fields = fields_of(model)
        if unknown:
            sentence = f"{prefix}{name} is unknown:{_takes(name, list(fields), prefix, owner)}"
        elif name not in options:
            sentence = f"{prefix}{name} must be given: {fields[name].description}"
        else:
            sentence = _misfit(f"{prefix}{name}", options[name], fields[name])
        raise ConfigError(sentence) from None
    for name, value in options.items():  # classes with options of their own (_target_) inside of a value
        _check_inner(f"{prefix}{name}", value)


def _check_inner(key: str, value: Any) -> None:
    """Check the options of each mapping with ``_target_`` inside a value.

    Args:
        key: The dotted key of the value.
        value: The value.

    Raises:
        ConfigError: An option is invalid.
    """
    if _is_target(value):
        check_target(key, value)
        return
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, item in pairs:
        _check_inner(f"{key}.{name}", item)


def nested_model(field: FieldInfo) -> type[BaseModel] | None:
    """Return the pydantic model of a field whose values are mappings with declared keys, such as the option local.

    None for fields with other values, such as numbers.
    """
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _misfit(key: str, value: Any, field: FieldInfo) -> str:
    """Return the error message for an invalid value.

    If the value is a mapping of declared keys, ConfigError is raised for the invalid key inside of it instead.

    Args:
        key: The dotted key.
        value: The value.
        field: The field with the allowed type and its description.
    """
    inner = nested_model(field)
    if inner is not None and isinstance(value, Mapping):
        check_options(key, value, inner, key)
    hint = nearest(value, choices_of(field.annotation)) if isinstance(value, str) else ""
    excess = ""
    if isinstance(value, float) and math.isinf(value):
        excess = ", which is not finite"
    elif isinstance(value, int) and abs(value) > LARGEST:
        excess = ", which is too large"
    return f"{key} must be {field.description}, got {show(value)}{excess}{';' if hint else ''}{hint}"


def _takes(name: str, options: list[str], prefix: str, owner: str) -> str:
    """Return the end of a message about an unknown option: similar options, and all that its owner takes.

    Args:
        name: The unknown option.
        options: The valid options.
        prefix: The dotted key before the names of options, with a point.
        owner: What has the options, such as "algorithm=pgfed".
    """
    return f"{nearest(name, options, prefix)} {owner} takes {', '.join(sorted(options)) or 'no options'}"


def choices_of(annotation: Any) -> Iterator[str]:
    """Yield the items of all Literals in a type as text: "a" and "b" for Literal["a", "b"] | None."""
    for arg in get_args(annotation):
        if get_origin(annotation) is Literal:
            yield str(arg)
        else:
            yield from choices_of(arg)


def bounds_of(field: FieldInfo) -> dict[str, float]:
    """Return the bounds of the numbers that a field allows: "ge", "gt", "le" and "lt"; {} if there are none.

    The bounds that every number has, infinity and the largest int64, are left out.
    """
    bounds: dict[str, float] = {}
    # bounds are in the metadata of Annotated types, which may be inside of others, as in list[Positive] | None
    to_visit: list[Any] = [*field.metadata, field.annotation]
    while to_visit:
        part = to_visit.pop()
        to_visit += [*getattr(part, "__metadata__", ()), *(() if get_origin(part) is Literal else get_args(part))]
        if isinstance(part, Ge | Gt | Le | Lt):
            bounds |= {name: value for name, value in asdict(part).items() if value not in (math.inf, LARGEST)}
    return bounds


def _is_target(value: Any) -> bool:
    """Return whether a value is a mapping with ``_target_``, from which Hydra builds an object."""
    return isinstance(value, Mapping) and "_target_" in value


# -- models ----------------------------------------------------------------------------------------------
def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return {option: its field} of a pydantic model that `options_of` has made."""
    return {str(field.alias): field for field in model.model_fields.values()}


@cache
def options_of(target: Callable[..., Any]) -> type[BaseModel]:
    """Return a pydantic model of the parameters of a class or function.

    If a constructor has ``**kwargs``, the parameters of the base class are included.  If a function or the last base
    class has them, any other option is allowed.

    Args:
        target: The class or function.
    """
    fields, is_open = _of_class(target) if isinstance(target, type) else _of_function(target)
    return _model(fields, is_open, target.__doc__)


@cache
def _adjusted(model: type[BaseModel], hidden: tuple[str, ...], reserved: type | None) -> type[BaseModel]:
    """Return a pydantic model with other fields.

    Args:
        model: The model.
        hidden: The options to remove.
        reserved: A dataclass whose fields are added; None to add none.
    """
    fields = {name: field for name, field in fields_of(model).items() if name not in hidden}
    if reserved is not None:
        fields |= fields_of(options_of(reserved))
    return _model(fields, model.model_config.get("extra") == "allow")


def _model(fields: Mapping[str, FieldInfo], is_open: bool, docstring: str | None = None) -> type[BaseModel]:
    """Return a pydantic model of options.

    Its fields are named option_<name>, with the options as aliases, because an option may have a name that pydantic
    uses itself.

    Args:
        fields: From the name of an option to its field.
        is_open: Whether other options are allowed.
        docstring: The docstring of the class with these options.
    """
    config = ConfigDict(strict=True, extra="allow" if is_open else "forbid")
    named: dict[str, Any] = {f"option_{name}": (field.annotation, field) for name, field in fields.items()}
    return create_model("Options", __config__=config, __doc__=docstring, **named)


def _of_class(target: type) -> tuple[dict[str, FieldInfo], bool]:
    """Return a pydantic field for each parameter of a class's constructor, and whether it accepts other options.

    If the constructor has ``**kwargs``, the fields of the next base class are added.

    Args:
        target: The class.

    Returns:
        The fields by option, and True if options without a field are allowed.
    """
    fields: dict[str, FieldInfo] = {}
    is_open = False
    for base in target.__mro__[:-1]:  # the class and its bases, without object
        if "__init__" in vars(base):
            # the __init__ of a dataclass has no module of its own in which the names of annotations are defined
            scope = _scope(target) if "__dataclass_fields__" in vars(base) else None
            own_fields, is_open = _of_function(vars(base)["__init__"], scope, skip=1)  # skip self
            fields = {**own_fields, **fields}
            if not is_open:
                return fields, False
        elif "__new__" in vars(base) and base not in (typing.Generic, typing.Protocol):
            is_open = True  # a compiled class
    return fields, is_open


def _of_function(
    function: Callable[..., Any], scope: dict[str, Any] | None = None, skip: int = 0
) -> tuple[dict[str, FieldInfo], bool]:
    """Return a pydantic field for each parameter of a function, and whether it has ``**kwargs`` for other options.

    Args:
        function: The function.
        scope: The names with which annotations are evaluated; None for the globals of the function.
        skip: The number of first parameters to leave out, 1 for self.
    """
    try:
        parameters = [*inspect.signature(function).parameters.values()][skip:]
    except (ValueError, TypeError):  # a compiled function
        return {}, True
    names: dict[str, Any] = getattr(inspect.unwrap(function), "__globals__", {}) if scope is None else scope
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return {p.name: _field(p, names) for p in named}, is_open


def _scope(target: type) -> dict[str, Any]:
    """Return {name: object} of the global names in the modules of a dataclass and its base classes.

    The annotations of its fields are evaluated with these names.
    """
    modules = [sys.modules.get(base.__module__) for base in reversed(target.__mro__)]
    return {name: value for module in modules if module for name, value in vars(module).items()}


def _field(parameter: inspect.Parameter, scope: dict[str, Any]) -> FieldInfo:
    """Return the pydantic field of a parameter, with the type of its annotation, or of its default if it has none.

    A mapping with ``_target_`` is accepted for any type, because the object is built from it later.

    Args:
        parameter: The parameter.
        scope: The names with which its annotation is evaluated.
    """
    annotation = parameter.annotation
    if annotation is parameter.empty:  # BASIC: from type to (the type to check, its name in messages)
        kind, description = BASIC.get(type(parameter.default), (Any, "any value"))
        if parameter.default is None:  # which does not tell the type of other values
            kind, description = Any, "any value"
    else:
        kind, description = _kind(_evaluated(annotation, scope))
    kind: Any = Annotated[kind, WrapValidator(lambda value, check: value if _is_target(value) else check(value))]
    default = ... if parameter.default is parameter.empty else None  # ...: required; None: any default, never used
    return FieldInfo.from_annotated_attribute(kind, Field(default, alias=parameter.name, description=description))


def _evaluated(annotation: Any, scope: dict[str, Any]) -> Any:
    """Return the type that an annotation names; Any if it uses a name that is imported only for type checking.

    Args:
        annotation: The annotation, which may be text.
        scope: The global names that it may use.
    """
    holder = types.SimpleNamespace(__annotations__={"option": annotation})  # get_type_hints takes objects only
    try:
        return typing.get_type_hints(holder, scope, include_extras=True)["option"]
    except (NameError, AttributeError, TypeError, SyntaxError):  # a name that is imported for type checkers only
        return Any


def _kind(annotation: Any) -> tuple[Any, str]:
    """Return the type with which pydantic checks an annotation, and its description for messages.

    Returns:
        (int, "a whole number") for int; (Any, "any value") for types that are not checked.
    """
    annotation = getattr(annotation, "__value__", annotation)  # of a type alias (type X = ...)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is None and isinstance(annotation, type) and is_dataclass(annotation):
        model = options_of(annotation)
        return model, f"a group of keys ({', '.join(fields_of(model))})"
    if origin is Annotated:
        kind, description = _kind(args[0])
        notes = [note.documentation for note in args[1:] if isinstance(note, DocInfo)]
        return Annotated[kind, *args[1:]], " ".join([description, *notes])
    if origin is Literal:
        return annotation, f"{'one of ' if len(args) > 1 else ''}{', '.join(map(str, args))}"
    if origin in (Union, types.UnionType):
        kinds = sorted(map(_kind, args), key=lambda kind: kind[0] is None)  # null is last in messages
        union = Union[tuple(kind for kind, _ in kinds)]  # noqa: UP007
        return union, " or ".join(dict.fromkeys(description for _, description in kinds))
    if origin is tuple and Ellipsis not in args:
        kinds = [_kind(arg) for arg in args]
        items = Annotated[tuple[tuple(kind for kind, _ in kinds)], Field(strict=False)]  # YAML has only lists
        return items, f"a list of {len(args)}: {', '.join(description for _, description in kinds)}"
    # BASIC: from type to (the type to check, its name in messages); LIST and MAPPING are its entries of list and dict
    basic = BASIC.get(origin or annotation, (Any, "any value"))
    if basic is LIST and args:
        kind, description = _kind(args[0])
        return list[kind], "a list" if kind is Any else f"a list, each entry {description}"
    if basic is MAPPING and args:
        kind, description = _kind(args[1])
        return dict[Any, kind], "a mapping" if kind is Any else f"a mapping of names to {description}"
    return basic
