"""A dimension that moves to the front, is scattered there, and moves back, is scattered in its own place.

    x [B, S, N] -> permute [S, B, N] -> clone -> reduce_scatter -> wait [S/W, B, N] -> permute [B, S/W, N]

becomes the form that DTensor writes and the fusions read:

    x [B, S, N] -> split .. cat [W*B, S/W, N] -> reduce_scatter -> wait [B, S/W, N]

Readers that use the result without moving it back get a permute of it. This is a view if they accept any strides;
otherwise a copy follows. The same numbers are added up, in the same order. `try_forms` applies this to a scatter that a
fusion then takes.

It must not fire when
* the other dimensions change their order too;
* the dimension has a dynamic size, or does not divide by W;
* anything between the matmul and the collective is used elsewhere too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ditron_inductor.passes.forms.move_across import is_factor
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import REDUCE_SCATTER, Collective, read_collective
from ditron_inductor.passes.graph.reasons import refused

aten = torch.ops.aten


@dataclass(frozen=True)
class Match:
    """`source` is the operand of the permute. `between` are the nodes from there to the collective, without both, the
    innermost last. `dim` is the dimension that moves to the front.
    """

    collective: Collective
    source: fx.Node
    between: tuple[fx.Node, ...]
    dim: int


def find_moved(node: fx.Node) -> Match | None:
    """Proves that a scatter of dimension 0 scatters another dimension of a matmul's result or of a sum, or None."""
    if node.op != "call_function" or node.target is not REDUCE_SCATTER:
        return None
    collective = read_collective(node)
    if refused(collective):
        return None
    between = [collective.operand]
    while between[-1].target is aten.clone.default:
        between.extend(between[-1].all_input_nodes)
    permute = between[-1]
    value, result = proofs.tensor(permute), proofs.tensor(collective.wait)
    if permute.target not in proofs.TRANSPOSES or value is None or result is None or value.ndim != result.ndim:
        return None
    dim, *others = proofs.permutation(permute)
    if dim == 0 or others != sorted(others) or not _divides(value.shape[0], collective.world_size):
        return None
    source = proofs.operand(permute)
    alone = all(proofs.sole_user(step) is not None for step in (*between, source))
    return Match(collective, source, tuple(between), dim) if alone and _is_computed(source) else None


def _divides(length: object, world_size: int) -> bool:
    return isinstance(length, int) and length % world_size == 0


def _is_computed(node: fx.Node) -> bool:
    """Returns whether a matmul or a sum stands behind views and factors: else no fusion takes the scatter."""
    while proofs.keeps_order(node) or is_factor(node):
        node = proofs.operand(node)
    return node.target in proofs.MATMULS or node.target is aten.add.Tensor


def rewrite(graph: fx.Graph, match: Match) -> None:
    """Scatters the dimension in its own place."""
    collective, dim = match.collective, match.dim
    node, wait, world_size = collective.node, collective.wait, collective.world_size
    views, takes_any = rewriting.views_and_strides(wait)
    shape = list(match.source.meta["val"].shape)
    shape[dim] //= world_size
    with graph.inserting_before(node):
        operand = rewriting.regrouped(graph, match.source, dim, 0, world_size, match.source)
    node.update_arg(0, operand)
    users, old = list(wait.users), wait.meta["val"]
    for moved in (node, wait):
        moved.meta["val"] = rewriting.fake_like(old, tuple(shape), rewriting.contiguous_strides(shape))
        moved.meta.pop("eager_input_vals", None)
    _hand_out(graph, match, users, old, views if takes_any else None)
    rewriting.erase_unused(graph, match.between)


def _hand_out(
    graph: fx.Graph, match: Match, users: list[fx.Node], old: torch.Tensor, views: list[fx.Node] | None
) -> None:
    """Gives the users the result with the dimension in front: as `views` of it or, for None, row-major as before."""
    wait, ndim = match.collective.wait, old.ndim
    order = [match.dim, *(dim for dim in range(ndim) if dim != match.dim)]
    back = [order.index(dim) for dim in range(ndim)]
    strides = wait.meta["val"].stride()
    with graph.inserting_before(wait.next):
        permuted = [strides[dim] for dim in order]
        front = rewriting.call(graph, aten.permute.default, (wait, order), wait, old.shape, permuted)
    last = front
    if views is None:
        with graph.inserting_before(front.next):
            last = rewriting.row_major_copy(graph, front, wait)
    for user in users:
        if views is not None and user.target in proofs.TRANSPOSES and proofs.permutation(user) == back:
            user.replace_all_uses_with(wait)
            graph.erase_node(user)
            continue
        user.replace_input_with(wait, last)
    rewriting.reshape_views(view for view in views or () if view is not wait)
    rewriting.erase_unused(graph, [front])
