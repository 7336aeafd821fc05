"""What a node kind declares of its kernels, in the op.py of the folder that is named after the kind."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ditron_inductor.task.node import Node

Runner = Callable[..., Any]
"""A function of (node, launch, its own geometry, what `split` makes of the operands)."""
Library = Callable[[Any, Sequence[torch.Tensor]], Callable[..., Any]]
"""A function of a node and the operands of a call, which returns what runs such calls by the library: a function of
what `split` makes of the operands."""


def bound(reference: Callable[..., Any], node: Node) -> Callable[..., Any]:
    """A function of task/reference.py for a node, whose fields are its keyword arguments; those with a default stay."""
    keywords = [one for one in inspect.signature(reference).parameters.values() if one.kind is one.KEYWORD_ONLY]
    wanted = [one.name for one in keywords if one.default is one.empty]
    return functools.partial(reference, **{name: getattr(node, name) for name in wanted})


def by_reference(reference: Callable[..., Any]) -> Library:
    """The library's matmuls and collectives by a function of task/reference.py."""
    return lambda node, operands: bound(reference, node)


@dataclass(frozen=True)
class Tile:
    """The strategy `tile`: geometry lays out a call, as a function of (node, launch, communicated tensor, n)."""

    geometry: Callable[..., Any]
    run: Runner


@dataclass(frozen=True)
class Chunked:
    """The strategy `chunked`.

    geometry: a function of (node, launch, communicated tensor, n, k). in_band: whether with such a geometry, or None, a
    call ends with a norm kernel that sends in band.
    """

    geometry: Callable[..., Any]
    run: Runner
    in_band: Callable[[Any], bool] = lambda geometry: False


@dataclass(frozen=True)
class Lowering:
    """How a node kind of matmuls, or of a norm, runs: its declaration, and those of the strategies that it has."""

    node: type[Node]
    library: Library
    tile: Tile | None = None
    chunked: Chunked | None = None
