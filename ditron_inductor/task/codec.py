"""The text of a Task node: one codec for all kinds, which reads and writes the fields of a frozen dataclass.

A field is written as `name=value`, and fields are separated by blanks, in the order of the declaration:

    gather_dim=1 world_size=4 group_name=tp site=be5e4ea9/0:all_gather_matmul num_weights=2 epilogue='silu(mm0) * mm1'

A value that equals the field's default is left out. A flag (`bool`) is its name alone where it is set, and is left out
where it is not. Strings are bare where that is unambiguous and quoted as in Python otherwise; a tuple of names is
joined by `+`; a structure is its own text in parentheses. The fields of a structure that is marked by `inlined` stand
among those of the node. Equal nodes have equal texts, and `decode(type(node), encode(node)) == node`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

BARE = re.compile(r"[^\s'\"=()+]+")
TOKEN = re.compile(r"\s*(?P<name>\w+)(?P<given>=)?")
VALUE = re.compile(r"(?P<quoted>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(?P<bare>[^\s'\"()]*)")
INLINED: Mapping[str, bool] = {"inlined": True}
"""The metadata of a field whose structure's own fields stand among those of the node."""


def encode(value: Any) -> str:
    """The text of a frozen dataclass."""
    return " ".join(_parts(value))


@functools.cache
def _decoded(cls: Any, text: str) -> Any:
    found, end = _fields(cls, text, 0)
    if text[end:].strip():
        raise ValueError(f"{cls.__name__}: unexpected {text[end:]!r}")
    return found


def decode(cls: type[T], text: str) -> T:
    """The dataclass of this text, the same object every time. Raises ValueError where the text is not one of `encode`,
    naming the field.
    """
    # mypy takes classes for unhashable: they have an `__hash__` of their instances.
    made: Any = cls
    found: T = _decoded(made, text)
    return found


def _parts(value: Any) -> Iterator[str]:
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if field.metadata == INLINED:
            yield from _parts(item)
        elif isinstance(item, bool):
            if item:
                yield field.name
        elif item is not None and item != field.default:
            yield f"{field.name}={_written(item)}"


def _written(item: Any) -> str:
    if isinstance(item, str):
        return item if BARE.fullmatch(item) else repr(item)
    if isinstance(item, tuple):
        return "+".join(item)
    return f"({encode(item)})" if dataclasses.is_dataclass(item) else repr(item)


@functools.cache
def _declared(cls: Any) -> dict[str, tuple[Any, Any]]:
    """The fields that a text of the class may name: by name, the field's type and the class that declares it."""
    hints = typing.get_type_hints(cls)
    found: dict[str, tuple[Any, Any]] = {}
    for field in dataclasses.fields(cls):
        if field.metadata == INLINED:
            inner = hints[field.name]
            found |= {name: (hint, (field.name, inner)) for name, (hint, _) in _declared(inner).items()}
        else:
            found[field.name] = hints[field.name], None
    return found


def _fields(cls: Any, text: str, place: int) -> tuple[Any, int]:
    """(the structure whose fields begin at a place, where they end)."""
    declared = _declared(cls)
    given: dict[str, Any] = {}
    inner: dict[tuple[str, type], dict[str, Any]] = {}
    for field in dataclasses.fields(cls):
        if field.metadata == INLINED:
            inner[field.name, typing.get_type_hints(cls)[field.name]] = {}
    while (token := TOKEN.match(text, place)) is not None:
        name = token["name"]
        if name not in declared:
            raise ValueError(f"{cls.__name__} has no field {name!r}")
        hint, owner = declared[name]
        place = token.end()
        if token["given"]:
            value, place = _value(hint, text, place)
        elif hint is bool:
            value = True
        else:
            raise ValueError(f"{cls.__name__}: the field {name!r} has no value")
        (given if owner is None else inner[owner])[name] = value
    given |= {name: structure(**values) for (name, structure), values in inner.items()}
    for field in dataclasses.fields(cls):
        if field.name not in given and declared.get(field.name, (None,))[0] is bool:
            given[field.name] = False
    try:
        return cls(**given), place
    except TypeError as error:
        raise ValueError(f"{cls.__name__}: {error}") from error


def _value(hint: Any, text: str, place: int) -> tuple[Any, int]:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    (kind,) = (option for option in options if option is not type(None))
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        if text[place : place + 1] != "(":
            raise ValueError(f"{kind.__name__}: no structure in {text[place:]!r}")
        found, place = _fields(kind, text, place + 1)
        if text[place : place + 1] != ")":
            raise ValueError(f"{kind.__name__}: no end in {text[place:]!r}")
        return found, place + 1
    match = VALUE.match(text, place)
    assert match is not None
    word = str(ast.literal_eval(match["quoted"])) if match["quoted"] else match["bare"]
    if typing.get_origin(kind) is tuple:
        return tuple(word.split("+")) if word else (), match.end()
    return kind(word), match.end()
