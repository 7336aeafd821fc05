"""What stands around the sum over the experts of each token: casts, a tensor that is added to it, rows of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs
from ditron_inductor.passes.graph.sorts import sorted_slots

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
DETERMINISTIC = "torchtitan::deterministic_scatter_add"
"""The op that adds up slots in TorchTitan 0.3. It is known by name, as TorchTitan may be missing."""
LEAST_TOKENS = 512
"""The fewest tokens whose experts go into a node with the reduction of their sum."""
SCATTERS = ("aten::scatter_add", "aten::index_add", "aten::index_put", DETERMINISTIC)


class EndsWith(Protocol):
    """A sum over slots. result: the node that it ends with."""

    @property
    def result(self) -> fx.Node: ...


S = TypeVar("S", bound=EndsWith)


def casts(node: fx.Node) -> bool:
    """Returns whether a node casts one floating-point dtype to another."""
    return node.target is CAST and all(one.dtype.is_floating_point for one in map(proofs.fake, (node, node.args[0])))


def rounded_to(total: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Returns the only user of a sum if that casts it to `dtype`, else the sum."""
    user = proofs.sole_user(total)
    casts = user is not None and user.target is CAST and proofs.fake(user).dtype == dtype
    return user if user is not None and casts else total


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
    """Yields the nodes that may add up slots, if `source` ends with that: itself, what it casts, and what it adds."""
    yield source
    if source.target is CAST:
        yield proofs.operand(source)
    if source.target is aten.add.Tensor:
        for term in source.args:
            if isinstance(term, fx.Node):
                yield from candidates(proofs.views_up(term)[-1])


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


def slots_of(index: fx.Node) -> tuple[fx.Node, int] | None:
    """Returns (the indices of a sort of all slots, k) if `index` has their quotients by k, for rows or elements."""
    rows = rows_of(index) if index.target is aten.expand.default else proofs.views_up(index)[-1]
    return None if rows is None else sorted_slots(rows)


def adds_sorted_slots(node: fx.Node) -> bool:
    """Returns whether a node adds to the rows of the tokens that a sort of all slots names."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.name not in SCATTERS:
        return False
    index = added_at(node)
    return isinstance(index, fx.Node) and slots_of(index) is not None
