"""What stands around the sum over the experts of each token: casts, factors, a tensor that is added, rows of tokens.

A number by which the sum is multiplied, as DeepSeek's `routed_scaling_factor`, becomes a part of the factors of the
slots. These are then fp32, and the sum is no longer rounded in front of the number, so nothing is less exact for
products in bf16 or fp16. For those in fp32 a factor is rounded where the sum was. A very large or small number might
take a factor out of the range of fp32, so it stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.slot_readings import CAST, casts
from ditron_inductor.passes.graph.sorts import is_order, sorted_slots

aten = torch.ops.aten
DETERMINISTIC = "torchtitan::deterministic_scatter_add"
"""The op that adds up slots in TorchTitan 0.3. It is known by name, as TorchTitan may be missing."""
LEAST_TOKENS = 512
"""The fewest tokens whose experts go into a node with the reduction of their sum."""
SCATTERS = ("aten::scatter_add", "aten::index_add", "aten::index_put", DETERMINISTIC)


LEAST_FACTOR = 2.0**-16
"""The smallest number that becomes a part of the factors of slots; the largest is its inverse."""
FACTORS: frozenset[object] = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar})


class EndsWith(Protocol):
    """A sum over slots. result: the node that it ends with."""

    @property
    def result(self) -> fx.Node: ...


S = TypeVar("S", bound=EndsWith)


@dataclass(frozen=True)
class Ending:
    """What follows a sum. result: the node that the sum ends with. factor: the number by which it is multiplied. added:
    what is added behind that, or what the sum begins with; None if there is nothing. views: those on the way. steps:
    the nodes from behind the sum to the result.
    """

    result: fx.Node
    factor: float
    added: fx.Node | None
    views: tuple[fx.Node, ...]
    steps: tuple[fx.Node, ...]


def ending_of(total: fx.Node, dtype: torch.dtype, base: fx.Node | None) -> Ending:
    """Returns what follows a sum, up to where it is rounded to `dtype` for the last time, and the addition of another
    tensor. What begins with `base` is neither rounded nor multiplied behind that: so would be the base.
    """
    if base is not None:
        return Ending(total, 1.0, base, (), ())
    chain, factor = [total], 1.0
    last, multiplied = 0, 1.0
    while (user := proofs.sole_user(chain[-1])) is not None:
        number = number_of(user)
        if number is not None and LEAST_FACTOR <= abs(factor * number) <= 1 / LEAST_FACTOR:
            factor *= number
        elif not (casts(user) and proofs.fake(user).dtype in (dtype, torch.float32)) and not proofs.keeps_order(user):
            break
        chain.append(user)
        if proofs.fake(user).dtype == dtype and not proofs.keeps_order(user):
            last, multiplied = len(chain) - 1, factor
    chain = chain[: last + 1]
    result, views, added = added_to(chain[-1])
    steps = tuple(dict.fromkeys((*chain[1:], *views, result)))
    between = tuple(step for step in chain[1:] if proofs.keeps_order(step))
    return Ending(result, multiplied, added, (*between, *views), tuple(step for step in steps if step is not total))


def number_of(node: fx.Node) -> float | None:
    """Returns the number by which a node multiplies a tensor of floating-point numbers, in their dtype; None if it does
    not.
    """
    if node.target not in FACTORS or node.kwargs or len(node.args) != 2:
        return None
    source, number = proofs.tensor(node.args[0]), node.args[1]
    if source is None or not source.dtype.is_floating_point or proofs.fake(node).dtype != source.dtype:
        return None
    if not isinstance(number, (int, float)) or not math.isfinite(number) or not number:
        return None
    return float(number) if node.target in (aten.mul.Tensor, aten.mul.Scalar) else 1.0 / number


def times(graph: fx.Graph, scale: fx.Node, factor: float) -> fx.Node:
    """Returns the factors of slots, multiplied by a number in fp32, in which the nodes of their sums multiply."""
    if factor == 1.0:
        return scale
    shape, wide = proofs.fake(scale).shape, torch.float32
    if proofs.fake(scale).dtype != wide:
        scale = rewriting.call(graph, CAST, (scale, wide), scale, shape, dtype=wide)
    return rewriting.call(graph, aten.mul.Tensor, (scale, factor), scale, shape)


def added_to(total: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...], fx.Node | None]:
    """Returns (the only sum of `total`, or of views of it, with another tensor of its shape and dtype; these views;
    that tensor), or (total, no views, None).
    """
    chain = [total]
    while (user := proofs.sole_user(chain[-1])) is not None and proofs.keeps_order(user):
        chain.append(user)
    terms = [] if user is None else [term for term in user.args if isinstance(term, fx.Node) and term is not chain[-1]]
    if user is None or user.target is not aten.add.Tensor or user.kwargs or len(terms) != 1:
        return total, (), None
    fits = proofs.alike(chain[-1], terms[0]) and proofs.fake(terms[0]).dtype == proofs.fake(total).dtype
    return (user, tuple(chain[1:]), terms[0]) if fits else (total, (), None)


def candidates(source: fx.Node) -> Iterator[fx.Node]:
    """Yields the nodes that may add up slots, if `source` ends with that: itself, what it casts or multiplies by
    a number, and what it adds.
    """
    open_, seen = [source], set[fx.Node]()
    while open_:
        node = open_.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        before: list[fx.Node] = []
        if node.target is CAST or number_of(node) is not None:
            before = [proofs.operand(node)]
        elif node.target is aten.add.Tensor:
            before = [term for term in node.args if isinstance(term, fx.Node)]
        open_ += [proofs.views_up(term)[-1] for term in reversed(before)]


def ending_with(source: fx.Node, find: Callable[[fx.Node], S | None]) -> S | None:
    """Returns the first sum that `find` reads in one of the `candidates`, and that ends with `source`; None if there is
    none.
    """
    found = (find(total) for total in candidates(source))
    return next((one for one in found if one is not None and one.result is source), None)


def added_at(scatter: fx.Node) -> object:
    """Returns the numbers of the rows, or elements, to which one of `SCATTERS` adds; None if it adds to none."""
    bound = proofs.arguments(scatter)
    if "indices" in bound and bound["accumulate"] and len(bound["indices"]) == 1:
        return bound["indices"][0]
    return bound.get("index")


def rows_of(index: object) -> fx.Node | None:
    """Returns what an index of elements [S, N] has in all columns of a row; None if they may differ."""
    if not isinstance(index, fx.Node) or index.target is not aten.expand.default:
        return None
    rows = proofs.operand(index)
    column = proofs.fake(rows).ndim > 0 and proofs.known_equal(proofs.fake(rows).shape[-1], 1)
    return proofs.views_up(rows)[-1] if column else None


def slots_of(index: fx.Node, *, single: bool) -> tuple[fx.Node, int] | None:
    """Returns (the indices of a sort of all slots, k) if `index` has their quotients by k, for rows or elements.
    single: these indices themselves count as their quotients by 1.
    """
    rows = rows_of(index) if index.target is aten.expand.default else proofs.views_up(index)[-1]
    if single and rows is not None and is_order(rows):
        return rows, 1
    return None if rows is None else sorted_slots(rows)


def adds_sorted_slots(node: fx.Node) -> bool:
    """Returns whether a node adds to the rows of the tokens that a sort of all slots names."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.name not in SCATTERS:
        return False
    index = added_at(node)
    return isinstance(index, fx.Node) and slots_of(index, single=True) is not None
