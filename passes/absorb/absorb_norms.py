"""The norm in front of an `all_gather_matmul` becomes its prologue, together with the residual sum in front of the
norm.

Before:

    x, residual -> add -> float -> pow 2, mean, + eps, rsqrt -> mul -> bfloat16 -> mul by weight -> reshape
                -> any other use of the sum
    reshape, weights -> ditron.all_gather_matmul

After:

    x, weights, residual, weight -> ditron.all_gather_matmul(.., norm="rms") -> getitem 0 ..
                                                                             -> getitem -2, the sum

So the result of the norm is written directly where peers read it. A sum in fp32 that is normalised before it is rounded
(see `norm_forms`) is handled in the same way: the node returns the rounded one.

A norm that is absorbed is removed from Inductor's kernels. It must not fire when
* the result, or a value inside the norm, is used by anything else. Exceptions are the means and inverse deviations of
  the rows, and the scaled rows, if a backward saves them: the node returns those;
* the tensor that is normalised is not in memory anyhow, and is not the sum of two tensors of one shape that are. Then
  Inductor computes it in the kernel of the norm, and would have to write it for the node;
* a view between the norm and the gather changes rows, or the sizes of one are dynamic;
* rows are longer than `nodes.MOST_NORM_COLUMNS`, or of a dynamic length;
* there are fewer than LEAST_ROWS rows in all, or a dynamic number of them, or another strategy than `chunked` is
  forced. Only `chunked` saves the copy; for `tile` and `library` the norm is a launch in front, as it was. If `chunked`
  is forced, any number of rows will do.

The pass looks only at the side of the shard, which is equal on all ranks, and not at the columns of the weights.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.absorb.absorb_epilogues import is_stored
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.norm_forms import FoundNorm, find_norm, rsqrt_before
from ditron_inductor.passes.graph.reasons import ReasonCode
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import MOST_NORM_COLUMNS, SHARD_SAVED, ShardNorm, WithPrologue
from ditron_inductor.task.verify import task_calls

log = logging.getLogger(__name__)

aten = torch.ops.aten

FEW_ROWS = "few_rows"
COMPUTED = "computed_with_the_norm"
LEAST_ROWS = 2048
"""The least rows of all ranks together: from here on the plan begins to choose `chunked`, for wide weights."""


@dataclass(frozen=True)
class Match:
    """A call whose shard is a view of `norm`'s result, by `views`, the result excluded. x: what the node takes;
    residual: what it adds to that, or None where x is what is normalised.
    """

    call: fx.Node
    norm: FoundNorm
    views: tuple[fx.Node, ...]
    x: fx.Node
    residual: fx.Node | None

    @property
    def prologue(self) -> ShardNorm:
        given = {"residual": self.residual, "weight": self.norm.weight, "shift": self.norm.shift}
        extras = tuple(name for name, operand in given.items() if operand is not None)
        return ShardNorm(self.norm.norm, extras, tuple(name for name in SHARD_SAVED if name in self.norm.saved))


def find_prologue(call: fx.Node, task: WithPrologue, options: Options) -> Match | str | None:
    """Finds the norm that is absorbed with a gain; a `ReasonCode` or a reason of those here; None without a norm."""
    operands = schema.operands_from_call(call)
    shard = operands["shard"]
    assert isinstance(shard, fx.Node)
    *views, result = proofs.views_up(shard)
    rsqrt = None if task.prologue is not None else rsqrt_before(result)
    if rsqrt is None:
        return None
    norm = find_norm(rsqrt)
    if isinstance(norm, ReasonCode):
        return norm
    if norm.result is not result:
        return ReasonCode.NORM_FORM
    others = [*operands["weights"], *operands.get("extras", ())]
    if any(len(node.users) != 1 for node in (*views, result)) or shard in others:
        return ReasonCode.INTERMEDIATE_USED
    value, rows = proofs.fake(shard), proofs.fake(norm.x)
    if not proofs.known_equal(value.shape[-1], rows.shape[-1]):
        return ReasonCode.LAYOUT
    if not proofs.known(value.shape[-1] <= MOST_NORM_COLUMNS):
        return ReasonCode.NORM_WIDTH
    if views and not all(isinstance(size, int) for size in (*value.shape, *rows.shape)):
        return ReasonCode.SHAPE_UNPROVEN
    if not pays(value.shape, task, options):
        return FEW_ROWS
    order = {node: index for index, node in enumerate(call.graph.nodes)}
    inner = set(norm.inner)
    # The node returns the saved values, so their users have to come later.
    if any(order[user] < order[call] for saved in norm.saved.values() for user in saved.users if user not in inner):
        return ReasonCode.NORM_USED
    terms = _terms(norm, call, order)
    if terms is None and norm.terms is None and _is_kept(norm.x, call):
        return Match(call, norm, tuple(views), norm.x, None)
    return COMPUTED if terms is None else Match(call, norm, tuple(views), *terms)


def pays(shape: Any, task: WithPrologue, options: Options) -> bool:
    """Whether a shard of this shape is likely to be staged by `chunked`; equal on all ranks."""
    if options.strategy != "auto":
        return options.strategy == "chunked"
    static = all(isinstance(size, int) for size in shape[:-1])
    return static and task.world_size * math.prod(shape[:-1]) >= LEAST_ROWS


def _terms(norm: FoundNorm, call: fx.Node, order: dict[fx.Node, int]) -> tuple[fx.Node, fx.Node] | None:
    """The two tensors that what is normalised is a plain sum of, if the node can add them and return the sum."""
    total = norm.x
    value, result = proofs.tensor(total), proofs.tensor(norm.result)
    if total.target is not aten.add.Tensor or total.kwargs.get("alpha", 1) != 1 or value is None or result is None:
        return None
    left, right = total.args if norm.terms is None else norm.terms
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return None
    for term in (left, right):
        addend = proofs.tensor(term)
        fits = addend is not None and addend.dtype == result.dtype and proofs.same_shape(addend.shape, value.shape)
        if addend is None or not fits or not proofs.row_major(addend) or not _is_kept(term, call):
            return None
    # Users of the sum get it from the node, so they have to come later.
    fused = {*_fused(norm), *norm.totals} if norm.terms is not None else _fused(norm)
    if norm.terms is not None and not fused.issuperset(total.users):
        return None
    is_late = all(user in fused or order[user] > order[call] for node in norm.totals for user in node.users)
    return (left, right) if is_late and proofs.row_major(value) else None


def _fused(norm: FoundNorm) -> set[fx.Node]:
    """The nodes that go with the norm, what it normalises excluded."""
    fused = set(norm.inner)
    if norm.wide is not norm.x and fused.issuperset(norm.wide.users):
        fused.add(norm.wide)
    return fused


def _is_kept(node: fx.Node, call: fx.Node) -> bool:
    """Whether a tensor is in memory when the node runs, itself or for a reader of it that waits for the node."""
    source = proofs.views_up(node)[-1]
    return is_stored(source) or any(proofs.depends_on(user, {call}) for user in source.users)


def rewrite(graph: fx.Graph, match: Match) -> fx.Node:
    """Replaces the call by one with the prologue, and returns that."""
    call, norm, prologue = match.call, match.norm, match.prologue
    operands = schema.operands_from_call(call)
    shape = tuple(operands["shard"].meta["val"].shape)
    old = call.meta["val"]
    without = len(old) - 1
    names = prologue.returned
    like = match.x.meta["val"]
    values = [_returned(like, shape, name) for name in names]
    with graph.inserting_before(call):
        operands["shard"] = rewriting.shaped(graph, match.x, shape, "rows")
        operands |= {"residual": match.residual, "weight": norm.weight, "shift": norm.shift}
        task = replace(schema.node_from_call(call.target, call.args), prologue=prologue)
        everything = [*old[:without], *values, old[without]]
        token = call.args[schema.TOKEN]
        new = rewriting.call_task(graph, task, operands, call, everything, token)
        for user in list(call.users):
            index = user.args[1]
            assert isinstance(index, int)
            place = index if index < without else index + len(values)
            user.replace_all_uses_with(rewriting.output(graph, new, place, user))
        replaced = {"total": norm.totals, **{name: [node] for name, node in norm.saved.items()}}
        fused = {*_fused(norm), norm.x}
        for number, name in enumerate(names):
            for node in replaced[name]:
                users = [user for user in node.users if user not in fused]
                if users:
                    made = rewriting.output(graph, new, without + number, node)
                    made = rewriting.shaped(graph, made, tuple(node.meta["val"].shape), "rows")
                    for user in users:
                        user.replace_input_with(node, made)
    widened = [] if norm.terms is None else [*norm.totals, *norm.x.all_input_nodes]
    rewriting.erase_unused(graph, [*call.users, call, *match.views, *norm.inner, norm.wide, norm.x, *widened])
    return new


def _returned(like: torch.Tensor, shape: tuple[Any, ...], name: str) -> torch.Tensor:
    """The fake value of an output that the prologue makes, for a shard of this shape."""
    sizes = (*shape[:-1], 1) if name in ("mean", "rstd") else shape
    dtype = None if name == "total" else torch.float32
    return rewriting.fake_like(like, sizes, rewriting.contiguous_strides(sizes), dtype)


def absorb_norms(graph: fx.Graph, *, options: Options) -> int:
    """Gives every gather the norm that provably makes its shard, where that gains; returns how many got one."""
    count = 0
    for call, task in task_calls(graph):
        if not isinstance(task, WithPrologue):
            continue
        match = find_prologue(call, task, options)
        if isinstance(match, str):
            log.debug("the norm in front of %s is left to the compiler: %s", call, match)
        elif match is not None:
            rewrite(graph, match)
            count += 1
    return count
