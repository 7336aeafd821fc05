"""The text of a Task node: one codec for all kinds, which reads and writes the fields of a frozen dataclass.

A field is written as `name=value`, and fields are separated by one blank each, in the order of the declaration:

    gather_dim=1 world_size=4 group_name=tp site=be5e4ea9/0:all_gather_matmul num_weights=2 epilogue='silu(mm0) * mm1'

A value that equals the field's default is left out. A flag (`bool`) is written as its name alone if it is set, and left
out if it is not. Strings are bare where that is unambiguous and quoted as in Python otherwise; a tuple of names is
joined by `+`, and `()` if it is empty; a structure is its own text in parentheses. If a field is marked by `inlined`,
the fields of its structure are written among those of the node.

Equal nodes have equal texts, `decode(type(node), encode(node)) == node`, and no other text stands for that node:
`encode(decode(kind, text)) == text`, or `decode` raises.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import operator
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

NAME = re.compile(r"\s*(?P<name>\w+)(?P<given>=)?")
QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
BARE = re.compile(r"[^\s'\"=()+]+")
NUMBER = re.compile(r"[^\s'\"=()]+")
INLINED: Mapping[str, bool] = {"inlined": True}
"""The metadata of a field whose structure's own fields stand among those of the node."""


class _Field(NamedTuple):
    """A field that a text may name. kind: its type if it is not None: bool, int, float, str, tuple, or a frozen
    dataclass. default: its value if the text does not name it; MISSING if the text has to name it. inside: (the field,
    the class) of the inlined structure that declares it, or None.
    """

    kind: Any
    default: Any
    inside: tuple[str, Any] | None


@functools.cache
def encode(value: Any) -> str:
    """The text of a frozen dataclass, the same object for equal ones."""
    return " ".join(_parts(value))


def decode(cls: type[T], text: str) -> T:
    """Returns the dataclass of this text, the same object every time. Raises ValueError if `encode` would not write
    this text; the error names the class, and the field if a field is wrong.
    """
    # mypy takes classes for unhashable: they have an `__hash__` of their instances.
    made: Any = cls
    found: T = _decoded(made, text)
    return found


@functools.cache
def _decoded(cls: Any, text: str) -> Any:
    found, end = _read_fields(cls, text, 0)
    if text[end:].strip():
        raise ValueError(f"{cls.__name__}: unexpected {text[end:]!r} at the end of {text!r}")
    written = encode(found)
    if written != text:
        raise ValueError(f"{cls.__name__}: {text!r} has to be written {written!r}")
    return found


@functools.cache
def _declared(cls: Any) -> dict[str, _Field]:
    """The fields that a text of the class may name, by name."""
    hints = typing.get_type_hints(cls)
    found: dict[str, _Field] = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        (kind,) = (option for option in options if option is not types.NoneType)
        if field.metadata == INLINED:
            own = {name: declared._replace(inside=(field.name, kind)) for name, declared in _declared(kind).items()}
        else:
            # A flag that is not set is not written either, whatever its default.
            default = False if kind is bool else field.default
            own = {field.name: _Field(tuple if hint == tuple[str, ...] else kind, default, None)}
        assert not found.keys() & own.keys(), f"{cls.__name__} has two fields of one name: {own.keys()}"
        found |= own
    return found


def _parts(value: Any) -> Iterator[str]:
    cls: Any = type(value)
    for name, field in _declared(cls).items():
        item = getattr(value if field.inside is None else getattr(value, field.inside[0]), name)
        if field.kind is bool:
            if item:
                yield name
        elif item != field.default:
            yield f"{name}={_written(field.kind, item)}"


def _written(kind: Any, item: Any) -> str:
    # Write by the declared type: in a field of floats 1 is written as 1.0, which it equals, and -0.0 as 0.0.
    if kind is int:
        return repr(operator.index(item))
    if kind is float:
        return repr(float(item) + 0.0)
    if kind is str:
        return item if BARE.fullmatch(item) and item.isprintable() else repr(item)
    if kind is tuple:
        return "+".join(_written(str, element) for element in item) or "()"
    assert type(item) is kind, f"{item!r} is no {kind.__name__}"
    return f"({encode(item)})"


def _read_fields(cls: Any, text: str, place: int) -> tuple[Any, int]:
    """Returns (the structure whose fields begin at a place, where they end)."""
    declared = _declared(cls)
    given: dict[str, Any] = {}
    while (match := NAME.match(text, place)) is not None:
        name, place = match["name"], match.end()
        if name not in declared:
            raise ValueError(f"{cls.__name__} has no field {name!r}: {text!r}")
        if name in given:
            raise ValueError(f"{cls.__name__}: the field {name!r} stands there twice: {text!r}")
        kind = declared[name].kind
        if kind is bool:
            if match["given"]:
                raise ValueError(f"{cls.__name__}: the field {name!r} is a flag, which has no value: {text!r}")
            given[name] = True
        elif not match["given"]:
            raise ValueError(f"{cls.__name__}: the field {name!r} has no value: {text!r}")
        else:
            try:
                given[name], place = _read_value(kind, text, place)
            except ValueError as error:
                raise ValueError(f"{cls.__name__}: the field {name!r}: {error}") from error
    structures: dict[tuple[str, Any], dict[str, Any]] = {}
    for name, field in declared.items():
        value = given.get(name, field.default)
        if value is dataclasses.MISSING:
            raise ValueError(f"{cls.__name__}: the field {name!r} is missing: {text!r}")
        structures.setdefault(field.inside or ("", cls), {})[name] = value
    own = structures.pop(("", cls), {})
    return cls(**own, **{name: kind(**values) for (name, kind), values in structures.items()}), place


def _read_value(kind: Any, text: str, place: int) -> tuple[Any, int]:
    """Returns (the value that begins at a place, where it ends)."""
    if kind is str:
        return _read_word(text, place)
    if kind is tuple:
        return _read_words(text, place)
    if kind in (int, float):
        match = NUMBER.match(text, place)
        if match is None:
            raise ValueError(f"no value in {text[place:]!r}")
        try:
            return kind(match[0]), match.end()
        except ValueError as error:
            raise ValueError(f"{match[0]!r} is no {kind.__name__}") from error
    if text[place : place + 1] != "(":
        raise ValueError(f"no {kind.__name__} in parentheses in {text[place:]!r}")
    found, place = _read_fields(kind, text, place + 1)
    if text[place : place + 1] != ")":
        raise ValueError(f"no closing parenthesis of a {kind.__name__} in {text[place:]!r}")
    return found, place + 1


def _read_words(text: str, place: int) -> tuple[tuple[str, ...], int]:
    if text.startswith("()", place):
        return (), place + 2
    words = []
    while True:
        word, place = _read_word(text, place)
        words.append(word)
        if text[place : place + 1] != "+":
            return tuple(words), place
        place += 1


def _read_word(text: str, place: int) -> tuple[str, int]:
    quoted = QUOTED.match(text, place)
    if quoted is not None:
        try:
            return str(ast.literal_eval(quoted[0])), quoted.end()
        except SyntaxError as error:
            raise ValueError(f"{quoted[0]} is no string: {error}") from error
    bare = BARE.match(text, place)
    if bare is None:
        raise ValueError(f"no value in {text[place:]!r}")
    return bare[0], bare.end()
