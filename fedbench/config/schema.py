"""What a constructor takes, read from its source, and whether a config's values fit.

A YAML file's ``_target_`` names a class or function.  Its annotations are the schema: a mistyped option is
refused in milliseconds, before torch or the user's own module is imported, and nothing that a config names is
executed to find out.  Options without annotation take the type of their default; targets whose source cannot
be read are left unchecked.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedbench.config.conf_tree import nearest
from fedbench.config.source import Definition, Module, decorators, last_word, locate, lookup, words
from fedbench.core.options import LARGEST, RANGES, require
from fedbench.core.settings import show

CONVERSIONS = {"_convert_": ("none", "partial", "object", "all"), "_recursive_": (True, False)}  # Hydra's own keys
INSTANTIATE_KEYS = {"_target_", *CONVERSIONS}


@dataclass(frozen=True)
class Kind:
    """What a value may be: in words for a sentence, and as a test.

    choices: the names of a Literal.  fields: the options of a dataclass, for a nested mapping.
    """

    words: str
    fits: Callable[[Any], bool]
    choices: tuple[str, ...] = ()
    fields: Signature | None = None


@dataclass(frozen=True)
class Signature:
    """The options of a target, name -> (kind, required); ``open`` ones take any other name as well."""

    options: dict[str, tuple[Kind, bool]] = field(default_factory=dict)
    open: bool = False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


ANY = Kind("any value", lambda _: True)
NULL = Kind("null", lambda v: v is None)
LIST = Kind("a list", lambda v: isinstance(v, list | tuple))
MAPPING = Kind("a mapping", lambda v: isinstance(v, Mapping))
BASIC = {
    "int": Kind("a whole number", _is_whole),
    "float": Kind("a number", _is_number),
    "bool": Kind("true or false", lambda v: isinstance(v, bool)),
    "str": Kind("text", lambda v: isinstance(v, str)),
    "None": NULL,
    **dict.fromkeys(("list", "List", "tuple", "Tuple", "Sequence", "Iterable"), LIST),
    **dict.fromkeys(("dict", "Dict", "Mapping"), MAPPING),
}


def check_target(
    key: str,
    values: Mapping[str, Any],
    adjust: Callable[[Signature], Signature] | None = None,
    owner: str | None = None,
) -> None:
    """Check a mapping with ``_target_`` against that target's signature, changed by ``adjust``.

    Raises ConfigError with one sentence, in which ``owner`` is who takes the options.
    """
    target = values.get("_target_")
    require(isinstance(target, str), f"{key}._target_ must name the class to build, got {show(target)}")
    for name, allowed in CONVERSIONS.items():
        require(
            name not in values or any(values[name] is one or values[name] == one for one in allowed),
            f"{key}.{name} must be one of {', '.join(map(show, allowed))}, got {show(values.get(name))}",
        )
    signature = signature_of(str(target), f"{key}._target_")
    name = owner or str(target).rsplit(".")[-1]
    check_options(key, values, adjust(signature) if adjust else signature, name)


def check_options(key: str, values: Mapping[str, Any], signature: Signature, owner: str) -> None:
    """Refuse unknown, missing and ill-typed options of ``owner``, whose keys are written ``key.<name>``."""
    prefix = f"{key}." if key else ""
    for name in values:
        known = name in signature.options or name in INSTANTIATE_KEYS or signature.open
        require(known, f"{prefix}{name} is unknown:{_takes(str(name), signature, prefix, owner)}")
    for name, (kind, required) in signature.options.items():
        if name in values:
            check_value(f"{prefix}{name}", values[name], kind)
        else:
            require(not required, f"{prefix}{name} must be given: {kind.words}")


def check_value(key: str, value: Any, kind: Kind) -> None:
    """Refuse a value that does not fit, naming key, value and what is allowed."""
    if isinstance(value, Mapping) and "_target_" in value:
        return check_target(key, value)
    for i, entry in enumerate(value if isinstance(value, list | tuple) else ()):
        if isinstance(entry, Mapping) and "_target_" in entry:
            check_target(f"{key}.{i}", entry)
    if isinstance(value, Mapping) and kind.fields is not None:
        return check_options(key, value, kind.fields, key)
    hint = nearest(value, kind.choices) if isinstance(value, str) else ""
    excess = f", which is {_excess(value)}" if _excess(value) else ""
    require(kind.fits(value), f"{key} must be {kind.words}, got {show(value)}{excess}{';' if hint else ''}{hint}")


def _excess(value: Any) -> str:
    """What is wrong with a number that is within its range but for its size."""
    if not _is_number(value) or abs(value) <= LARGEST:
        return ""
    return "too large" if isinstance(value, int) else "not finite" if math.isinf(value) else ""


def _takes(name: str, signature: Signature, prefix: str, owner: str) -> str:
    listed = ", ".join(sorted(signature.options)) or "no options"
    return f"{nearest(name, signature.options, prefix)} {owner} takes {listed}"


def signature_of(target: str, key: str = "_target_") -> Signature:
    """The signature of a dotted path, from source; ConfigError when there is no such thing.

    A target that exists but cannot be read comes back open: nothing is known about its options.
    """
    return _signature(locate(target, key))


def _signature(definition: Definition | None) -> Signature:
    if definition is None:
        return Signature(open=True)
    if isinstance(definition.node, ast.FunctionDef):
        return _of_function(definition.module, definition.node, definition.bound)
    if isinstance(definition.node, ast.ClassDef):
        return _of_class(definition.module, definition.node)
    return Signature(open=True)


def _of_function(module: Module, node: ast.FunctionDef, bound: bool) -> Signature:
    args = [*node.args.posonlyargs, *node.args.args]
    none: list[ast.expr | None] = [None]
    defaults = [*none * (len(args) - len(node.args.defaults)), *node.args.defaults, *node.args.kw_defaults]
    pairs = list(zip([*args, *node.args.kwonlyargs], defaults))[bound:]
    options = {a.arg: (_kind(a.annotation, module, default), default is None) for a, default in pairs}
    return Signature(options, open=node.args.kwarg is not None)


def _of_class(module: Module, node: ast.ClassDef) -> Signature:
    init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    constructor = _of_function(module, init, bound=True) if init else None
    if constructor and not (constructor.open and node.bases):
        return constructor
    bases = _of_bases(module, node)
    if constructor:  # **kwargs of a subclass go to its base: those are known too
        return Signature({**bases.options, **constructor.options}, bases.open)
    if "dataclass" in decorators(node):
        return Signature({**bases.options, **_of_fields(module, node)}, bases.open)
    return bases


def _of_bases(module: Module, node: ast.ClassDef) -> Signature:
    """The signature inherited: that of the first base which has one; open when a base cannot be read."""
    for base in node.bases:
        path = words(base)
        if path in (["object"], ["ABC"], ["Protocol"]) or isinstance(base, ast.Subscript):
            continue
        definition = lookup(module, path) if path else None
        signature = _signature(definition if isinstance(definition, Definition) else None)
        if signature.options or signature.open:
            return signature
    return Signature()


def _of_fields(module: Module, node: ast.ClassDef) -> dict[str, tuple[Kind, bool]]:
    """The fields of a dataclass, in order; those with init=False are no options."""
    options = {}
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        made = item.value.keywords if isinstance(item.value, ast.Call) else []
        hidden = any(word.arg == "init" and ast.unparse(word.value) == "False" for word in made)
        if not hidden and "ClassVar" not in ast.unparse(item.annotation):
            options[item.target.id] = (_kind(item.annotation, module), item.value is None)
    return options


def _kind(node: ast.AST | None, module: Module, default: ast.expr | None = None) -> Kind:
    """An annotation, or where there is none the type of the default, as a Kind."""
    if node is None:
        return _kind_of_default(default)
    if isinstance(node, ast.Constant):
        return _kind_of_constant(node, module)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _either([_kind(node.left, module), _kind(node.right, module)])
    if isinstance(node, ast.Subscript):
        return _kind_of_subscript(node, module)
    return _kind_of_name(node, module)


def _kind_of_default(default: ast.expr | None) -> Kind:
    try:
        value = ast.literal_eval(default) if default is not None else None
    except ValueError:
        return ANY
    return ANY if value is None else BASIC.get(type(value).__name__, ANY)


def _kind_of_constant(node: ast.Constant, module: Module) -> Kind:
    if isinstance(node.value, str):  # "Forward | reference"
        return _kind(ast.parse(node.value, mode="eval").body, module)
    return NULL if node.value is None else ANY


def _kind_of_name(node: ast.AST, module: Module) -> Kind:
    """A built-in word, an alias or a dataclass definition through the module's imports; else anything."""
    word, path = last_word(node), words(node)
    if word in BASIC:
        return BASIC[word]
    definition = lookup(module, path) if path else None
    if not isinstance(definition, Definition) or definition.node is node:
        return ANY
    if isinstance(definition.node, ast.ClassDef):
        return _kind_of_class(definition.module, definition.node)
    return _kind(definition.node, definition.module)


def _kind_of_class(module: Module, node: ast.ClassDef) -> Kind:
    if "dataclass" not in decorators(node):
        return ANY
    fields = Signature(_of_fields(module, node))
    return replace(MAPPING, words=f"a group of keys ({', '.join(fields.options)})", fields=fields)


def _kind_of_subscript(node: ast.Subscript, module: Module) -> Kind:
    word, inner = last_word(node.value), node.slice
    parts = list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]
    if word == "Literal":
        return _one_of([p.value for p in parts if isinstance(p, ast.Constant)])
    if word == "Annotated":
        return _within(_kind(parts[0], module), parts[1:])
    kinds = [_kind(p, module) for p in parts]
    if word in ("Optional", "Union"):
        return _either([*kinds, *([NULL] if word == "Optional" else [])])
    if word in ("tuple", "Tuple") and "..." not in map(ast.unparse, parts):
        return _fixed(kinds)
    if BASIC.get(word) is LIST:
        return _each(LIST, kinds[0], "a list, each entry {}", lambda v: v)
    if BASIC.get(word) is MAPPING and len(kinds) == 2:
        return _each(MAPPING, kinds[1], "a mapping of names to {}", lambda v: v.values())
    return BASIC.get(word, ANY)


def _one_of(values: list[Any]) -> Kind:
    def fits(value: Any) -> bool:
        return any(value == other and type(value) is type(other) for other in values)

    names = tuple(str(v) for v in values)
    return Kind(f"one of {', '.join(names)}" if len(names) > 1 else "".join(names), fits, choices=names)


def _within(kind: Kind, notes: list[ast.expr]) -> Kind:
    """Annotated[float, ">= 0"]: notes that are names of RANGES narrow the kind, others are ignored."""
    for note in notes:
        text = note.value if isinstance(note, ast.Constant) else None
        if isinstance(text, str) and text in RANGES:
            kind = _narrowed(kind, text)
    return kind


def _narrowed(kind: Kind, text: str) -> Kind:
    return replace(kind, words=f"{kind.words} {text}", fits=lambda v: kind.fits(v) and RANGES[text](v))


def _either(kinds: list[Kind]) -> Kind:
    last = sorted(kinds, key=lambda k: k is NULL)  # null is said last
    allowed = " or ".join(dict.fromkeys(k.words for k in last))
    choices = tuple(c for k in last for c in k.choices)
    fields = next((k.fields for k in last if k.fields), None)
    return Kind(allowed, lambda v: any(k.fits(v) for k in last), choices, fields)


def _each(outer: Kind, inner: Kind, text: str, items: Callable[[Any], Any]) -> Kind:
    """A list or mapping whose entries are all of one kind."""
    if inner is ANY:
        return outer
    return Kind(text.format(inner.words), lambda v: outer.fits(v) and all(map(inner.fits, items(v))))


def _fixed(kinds: list[Kind]) -> Kind:
    def fits(value: Any) -> bool:
        return LIST.fits(value) and len(value) == len(kinds) and all(k.fits(v) for k, v in zip(kinds, value))

    return Kind(f"a list of {len(kinds)}: {', '.join(k.words for k in kinds)}", fits)
