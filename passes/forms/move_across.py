"""Ops beside a collective move to its other side, if fewer bytes are then sent or a fusion can take the collective.

A widening cast moves behind a gather, which copies elements: the same bits, half the bytes. The pass does this:

    x bf16 -> to fp32 -> all_gather -> wait -> split .. cat      x -> all_gather -> wait -> split .. cat -> to fp32

A sum behind an all-reduce moves in front of it, see `move_sums`.

Scalar factors, and views of an all-reduce's operand that move elements, move behind the reduction. `try_forms` does
this, for a reduction that a fusion takes then:

    mm -> * 0.5 -> reduce_scatter -> wait                        mm -> reduce_scatter -> wait -> * 0.5
    mm -> * 0.5 -> transpose -> all_reduce -> wait               mm -> all_reduce -> wait -> * 0.5 -> transpose -> clone

docs/algebra.md says what of this is exact. A sum of products may leave the range of float16, so in float16 factors stay
in front.

It must not fire when
* the cast narrows (see `move_casts`), a part of the gathered tensor is taken (then one rank may have padded its shard,
  behind the cast), or a fusion takes the gather as it is;
* the collective is a reduction and the op is a cast: the reduction would add up other numbers, and a narrow sum is less
  exact;
* the factor is a tensor, which may differ between ranks, or is not a finite number;
* anything that moves is used elsewhere too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.forms import move_sums
from ditron_inductor.passes.forms.move_casts import CASTS, as_dtype, cast_alike
from ditron_inductor.passes.fuse.fusions import takes
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Collective,
    collectives,
    read_collective,
)
from ditron_inductor.passes.graph.reasons import refused
from ditron_inductor.passes.normalize.share_gathers import Match as Gather
from ditron_inductor.passes.normalize.share_gathers import find_whole_gather
from ditron_inductor.task.exchange import GATHERED_OPERAND

aten = torch.ops.aten

FACTORS: frozenset[object] = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar})
SENT_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
"""What every library gathers; some gather no numbers of 8 bits."""
FACTOR_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Match:
    """A reduction, and what moves behind it: factors and views in a row, the innermost first."""

    collective: Collective
    moved: tuple[fx.Node, ...]


def find_moved(node: fx.Node) -> Match | None:
    """Proves that the ops between a matmul and its reduction, if any, could stand behind the reduction, or None."""
    if node.op != "call_function" or node.target not in (ALL_REDUCE, REDUCE_SCATTER):
        return None
    collective = read_collective(node)
    if refused(collective):
        return None
    source, users = collective.operand, {node}
    if node.target is REDUCE_SCATTER and source.target is aten.cat.default:
        chunks = proofs.regrouped(source, collective.world_size)
        if refused(chunks) or proofs.sole_user(source) is None:
            return None
        source, users = chunks.source, set(chunks.between)
    chain, innermost = _chain_up(source, transposes=node.target is ALL_REDUCE)
    needed = [step for step in chain if not proofs.keeps_order(step)]
    alone = all(proofs.sole_user(step) is not None for step in (*chain[1:], innermost)) and set(source.users) <= users
    if not needed or not alone or not (innermost.target in proofs.MATMULS or innermost.target is aten.add.Tensor):
        return None
    # A scatter cuts what the views make, so these stay in front of it.
    return Match(collective, tuple(reversed(chain if node.target is ALL_REDUCE else needed)))


def _chain_up(node: fx.Node, *, transposes: bool) -> tuple[list[fx.Node], fx.Node]:
    """The views and factors from `node` up, and what they are applied to."""
    chain: list[fx.Node] = []
    while proofs.keeps_order(node) or is_factor(node) or (transposes and node.target in proofs.TRANSPOSES):
        chain.append(node)
        node = proofs.operand(node)
    return chain, node


def is_factor(node: fx.Node) -> bool:
    """Returns whether a node multiplies a tensor with a number, and nothing else."""
    source, result = proofs.tensor(node.args[0]) if node.args else None, proofs.tensor(node)
    if source is None or result is None or result.dtype not in FACTOR_DTYPES or source.dtype != result.dtype:
        return False
    if node.target is aten.neg.default:
        return True
    if node.target not in FACTORS or node.kwargs:
        return False
    factor = node.args[1]
    return isinstance(factor, (int, float)) and math.isfinite(factor) and factor != 0


def rewrite(graph: fx.Graph, match: Match) -> None:
    """Moves factors and views behind the reduction."""
    node, wait = match.collective.node, match.collective.wait
    if node.target is REDUCE_SCATTER:
        _rewrite_scatter(graph, match)
        return
    first, last = match.moved[0], match.moved[-1]
    source = proofs.operand(first)
    value = source.meta["val"]
    node.update_arg(0, source)
    wait.replace_all_uses_with(last)
    first.update_arg(0, wait)
    for changed in (node, wait):
        shape = tuple(value.shape)
        changed.meta["val"] = rewriting.fake_like(value, shape, rewriting.contiguous_strides(shape))
        changed.meta.pop("eager_input_vals", None)
    behind = wait
    for step in match.moved:
        behind.append(step)
        behind = step
    if any(step.target in proofs.TRANSPOSES and not proofs.keeps_order(step) for step in match.moved):
        _copy_row_major(graph, last)


def _copy_row_major(graph: fx.Graph, node: fx.Node) -> None:
    """Inserts a row-major copy. A collective returns a row-major tensor, so what replaces it has to do the same."""
    users = list(node.users)
    with graph.inserting_before(node.next):
        copy = rewriting.row_major_copy(graph, node, node)
    for user in users:
        user.replace_input_with(node, copy)


def _rewrite_scatter(graph: fx.Graph, match: Match) -> None:
    wait = match.collective.wait
    users, result = list(wait.users), wait
    for factor in match.moved:
        source = proofs.operand(factor)
        with graph.inserting_before(result.next):
            target: Any = factor.target
            args = (result, *factor.args[1:])
            result = rewriting.call(graph, target, args, wait, tuple(wait.meta["val"].shape))
        factor.replace_all_uses_with(source)
        graph.erase_node(factor)
    for user in users:
        user.replace_input_with(wait, result)


def find_widened(node: fx.Node) -> Gather | None:
    """Proves that a gather's operand is a widening cast, which could stand behind it; None if it is not."""
    collective = read_collective(node)
    if refused(collective) or takes(node, lambda kind: kind.exchange == GATHERED_OPERAND):
        return None
    cast = collective.operand
    if cast.target not in CASTS or set(cast.kwargs) - {"dtype"}:
        return None
    source, result = proofs.fake(cast.args[0]), proofs.fake(cast)
    floating = source.dtype in SENT_DTYPES and result.is_floating_point() and source.device == result.device
    return find_whole_gather(node) if floating and source.dtype.itemsize < result.dtype.itemsize else None


def rewrite_widened(graph: fx.Graph, match: Gather) -> None:
    """Gathers the operand of the cast, and casts the gathered tensor. A cast back to the first dtype is removed."""
    gathered, cast = match.gathered, match.collective.operand
    source = proofs.operand(cast)
    dtype = source.meta["val"].dtype
    users = list(gathered.users)
    match.collective.node.update_arg(0, source)
    for step in match.steps:
        step.meta["val"] = as_dtype(step.meta["val"], dtype)
        step.meta.pop("eager_input_vals", None)
    with graph.inserting_before(gathered.next):
        wide = cast_alike(graph, cast, gathered)
    for user in users:
        user.replace_input_with(gathered, wide)
    for user in [user for user in wide.users if _casts_to(user, dtype)]:
        # The caller would get one piece of memory twice.
        if proofs.is_returned(user) and proofs.is_returned(gathered):
            continue
        user.replace_all_uses_with(gathered)
        graph.erase_node(user)
    rewriting.erase_unused(graph, [wide, cast])


def _casts_to(node: fx.Node, dtype: torch.dtype) -> bool:
    """Returns whether a node casts to this dtype, and does nothing else."""
    return node.target in CASTS and not set(node.kwargs) - {"dtype"} and proofs.fake(node).dtype == dtype


def move_across(graph: fx.Graph, *, options: Options) -> int:
    """Moves widening casts behind gathers, and sums in front of all-reduces; returns how many."""
    if not options.fusions:
        return 0
    count = 0
    for node in collectives(graph, ALL_REDUCE):
        summed = move_sums.find_summed(node)
        if summed is not None:
            move_sums.rewrite(graph, summed)
            count += 1
    for node in collectives(graph, ALL_GATHER):
        match = find_widened(node)
        if match is not None:
            rewrite_widened(graph, match)
            count += 1
    return count
