"""The declaration of a node kind's kernels, which stands in the op.py of the folder that is named after the kind."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ditron_inductor.task.node import Node

Runner = Callable[..., Any]
"""A function of (node, launch, the strategy's geometry, *node.split(operands)), which runs a call."""
Library = Callable[[Any, Sequence[torch.Tensor]], Callable[..., Any]]
"""A function of (node, operands of a call). It returns the library's function of node.split(operands)."""


def bound(reference: Callable[..., Any], node: Node) -> Callable[..., Any]:
    """Returns a function of task/reference.py with its required keyword arguments from the fields of a node."""
    parameters = inspect.signature(reference).parameters.values()
    wanted = [param.name for param in parameters if param.kind is param.KEYWORD_ONLY and param.default is param.empty]
    return functools.partial(reference, **{name: getattr(node, name) for name in wanted})


def by_reference(reference: Callable[..., Any]) -> Library:
    """Returns the Library that calls a function of task/reference.py."""
    return lambda node, operands: bound(reference, node)


@dataclass(frozen=True)
class Tile:
    """The strategy `tile`. `geometry` lays out a call; it is a function of (node, launch, communicated tensor, n)."""

    geometry: Callable[..., Any]
    run: Runner


@dataclass(frozen=True)
class Chunked:
    """The strategy `chunked`.

    Attributes:
        geometry: lays out a call; a function of (node, launch, communicated tensor, n, k).
        run: runs a call.
        in_band: a function of the geometry, or of None if no call can run. It returns whether a call ends with a norm
            kernel that sends in band.
    """

    geometry: Callable[..., Any]
    run: Runner
    in_band: Callable[[Any], bool] = lambda geometry: False


@dataclass(frozen=True)
class Lowering:
    """How a node kind that multiplies or normalises runs: by which strategies. None is a strategy that it lacks."""

    node: type[Node]
    library: Library
    tile: Tile | None = None
    chunked: Chunked | None = None
