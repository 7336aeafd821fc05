"""A narrowing cast of a gathered tensor moves in front of the gather.

    x fp32 -> all_gather_into_tensor -> wait -> split .. cat -> to bf16 -> mm

becomes

    x fp32 -> to bf16 -> all_gather_into_tensor -> wait -> split .. cat -> mm

A gather, and the ops that move its chunks, copy elements, so a cast in front gives the same bits, and half as many
bytes are sent. `try_forms` does this for a gather that a fusion then takes.

It must not fire when
* the gathered tensor is used in its own dtype too, or cast to two dtypes;
* the cast widens: before the gather it would double what is sent;
* the collective is a reduction, which would add up other numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import ALL_GATHER, Collective, read_collective

aten = torch.ops.aten

CASTS: frozenset[object] = frozenset({torch.ops.prims.convert_element_type.default, aten._to_copy.default})
COPIES: frozenset[object] = proofs.MAY_KEEP_ORDER | proofs.SLICES | {aten.cat.default}


@dataclass(frozen=True)
class Match:
    """A gather whose result, moved by `between` only, is used by `casts` alone, all of them to one dtype."""

    collective: Collective
    between: tuple[fx.Node, ...]
    casts: tuple[fx.Node, ...]


def find_narrowed(node: fx.Node) -> Match | None:
    """Proves that all uses of a gather are one narrowing cast; None if they are not, or the node is no gather."""
    if node.op != "call_function" or node.target is not ALL_GATHER:
        return None
    collective = read_collective(node)
    if not isinstance(collective, Collective):
        return None
    between = {node: None, collective.wait: None}
    pending, casts = [collective.wait], dict[fx.Node, None]()
    while pending:
        for user in pending.pop().users:
            if user.target in COPIES and user not in between:
                between[user] = None
                pending.append(user)
            elif user.target in CASTS:
                casts[user] = None
            elif user.target not in COPIES:
                return None
    operand = proofs.fake(collective.operand)
    # A cat with another tensor: that one would have to be cast as well.
    cats = [step for step in between if step.target is aten.cat.default]
    mixed = any(source not in between for cat in cats for source in cat.all_input_nodes)
    if not casts or mixed or not all(_narrows(cast, operand.dtype) for cast in casts):
        return None
    dtypes = {cast.meta["val"].dtype for cast in casts}
    return Match(collective, tuple(between), tuple(casts)) if len(dtypes) == 1 else None


def _narrows(cast: fx.Node, dtype: torch.dtype) -> bool:
    """Returns whether a node makes fewer bytes of each floating-point element, and changes nothing else."""
    source, result = proofs.tensor(cast.args[0]), proofs.tensor(cast)
    if source is None or result is None or source.device != result.device or set(cast.kwargs) - {"dtype"}:
        return False
    return source.dtype == dtype and result.is_floating_point() and result.dtype.itemsize < dtype.itemsize


def rewrite(graph: fx.Graph, match: Match) -> fx.Node:
    """Casts the operand instead of the gathered tensor; returns the gather."""
    node, operand, cast = match.collective.node, match.collective.operand, match.casts[0]
    rest = (cast.target, cast.args[1:], cast.kwargs)
    # Gathers of one tensor share its cast, so that equal ones stay equal.
    known = [user for user in operand.users if user < node and (user.target, user.args[1:], user.kwargs) == rest]
    if known:
        narrow = known[0]
    else:
        with graph.inserting_before(node):
            narrow = cast_alike(graph, cast, operand)
    node.update_arg(0, narrow)
    for step in match.between:
        step.meta["val"] = as_dtype(step.meta["val"], cast.meta["val"].dtype)
        step.meta.pop("eager_input_vals", None)
    for cast_node in match.casts:
        cast_node.replace_all_uses_with(proofs.operand(cast_node))
        graph.erase_node(cast_node)
    return node


def cast_alike(graph: fx.Graph, cast: fx.Node, x: fx.Node) -> fx.Node:
    """Inserts the same cast of another tensor."""
    target: Any = cast.target
    result = graph.call_function(target, (x, *cast.args[1:]), cast.kwargs)
    result.meta.update(rewriting.copied_meta(cast))
    result.meta["val"] = as_dtype(x.meta["val"], cast.meta["val"].dtype)
    return result


def as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """A fake tensor, or several, in another dtype."""
    if isinstance(value, (list, tuple)):
        return type(value)(as_dtype(item, dtype) for item in value)
    return rewriting.fake_like(value, value.shape, value.stride(), dtype)
