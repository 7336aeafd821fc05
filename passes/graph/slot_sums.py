"""What stands around the sum over the experts of each token: casts, and a tensor that is added to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
DETERMINISTIC = "torchtitan::deterministic_scatter_add"
"""The op that adds up slots in TorchTitan 0.3. It is known by name, as TorchTitan may be missing."""


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
