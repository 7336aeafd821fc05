"""all_reduce -> + bias -> + residual -> norm becomes one `ditron::all_reduce_rms_norm`; with a matmul in front, one
`ditron::matmul_all_reduce_rms_norm`.

Before, with any number of order-keeping views in between:

    a, b -> ditron.matmul_all_reduce -> (+ bias [N]) -> (+ residual) = total [B, S, N] -> norm -> mm, ..
                                                                       total -> ..

After, with the same views behind the call:

    a, b, bias, residual, weight, shift -> ditron.matmul_all_reduce_rms_norm -> getitem 0 -> mm, ..
                                                                                getitem 1 -> ..

Runs behind `matmul_all_reduce`, so what has become of the all-reduce is known: one that is still there gives the node
without a matmul. The call stands where that stood, and what it needs in addition is moved in front of it; the
order of collectives does not change. The norm may be of the RMS or the layer kind: see `norms`.

It must not fire when
* something that the call needs is computed from the sum, or cannot be moved in front of it;
* the reduced tensor is used before bias and residual are added, or a value inside the norm is used elsewhere, as when a
  backward wants it: the compiler would compute it once more;
* the norm feeds an op on elements: the compiler computes the two together, and the node would make them two;
* the rows of the norm are not those of the reduced tensor, or are longer than one program takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes import proofs, rewriting
from ditron_inductor.passes.collectives import ALL_REDUCE, WAIT, is_collective, read_collective
from ditron_inductor.passes.norms import FoundNorm, find_norm, normalised
from ditron_inductor.passes.order_collectives import is_task
from ditron_inductor.passes.reasons import ReasonCode, leave_alone
from ditron_inductor.task import ops
from ditron_inductor.task.nodes import (
    MOST_NORM_COLUMNS,
    AllReduceRmsNorm,
    MatmulAllReduce,
    MatmulAllReduceRmsNorm,
    NormNode,
)

aten = torch.ops.aten

PATTERN = AllReduceRmsNorm.kind


@dataclass(frozen=True)
class Sum:
    """`total` = reduced + bias + residual. launch: what reduces. between: from `reduced` to the total, without it,
    each used by the next only if there is a next. views: those among them, and behind the total up to `rows`.
    """

    launch: fx.Node
    reduced: fx.Node
    bias: fx.Node | None
    residual: fx.Node | None
    total: fx.Node
    between: tuple[fx.Node, ...]
    views: tuple[fx.Node, ...]
    views_behind: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Match:
    """A sum and the norm of it."""

    sum: Sum
    norm: FoundNorm


def find_sum(rows: fx.Node) -> Sum | None:
    """What the rows are, if an all-reduce is what they come from."""
    *views_behind, total = _views(rows)
    for way in _ways(total):
        *between, reduced = way.nodes
        between = [reduced, *between[:0:-1]] if between else []
        launch = reduced.args[0]
        assert isinstance(launch, fx.Node)
        bias = residual = None
        for add, other in way.steps:
            value, added = proofs.tensor(add), proofs.tensor(other)
            if value is None or added is None or added.dtype != value.dtype:
                break
            if proofs.same_shape(added.shape, value.shape) and residual is None and bias is None:
                residual = other
            elif proofs.is_row(added, value.shape[-1]) and bias is None:
                bias = other
            else:
                break
        else:
            views = [node for node in between[1:] if proofs.keeps_order(node)]
            return Sum(launch, reduced, bias, residual, total, tuple(between), tuple(views), tuple(views_behind[::-1]))
    return None


def prove(found: Sum, rsqrt: fx.Node) -> Match | ReasonCode:
    """The match of a sum and the norm that `rsqrt` belongs to, or why there is none."""
    if found.launch.target is ALL_REDUCE:
        collective = read_collective(found.launch)
        if isinstance(collective, ReasonCode):
            return collective
    norm = find_norm(rsqrt)
    if isinstance(norm, ReasonCode):
        return norm
    reduced, total = proofs.tensor(found.reduced), proofs.tensor(norm.x)
    assert reduced is not None and total is not None
    if reduced.ndim == 0 or not proofs.known_equal(reduced.shape[-1], total.shape[-1]):
        return ReasonCode.LAYOUT
    if reduced.dtype != total.dtype:
        return ReasonCode.CAST_BETWEEN
    if not proofs.known(total.shape[-1] <= MOST_NORM_COLUMNS):
        return ReasonCode.NORM_WIDTH
    needed = [one for one in (found.bias, found.residual, norm.weight, norm.shift) if one is not None]
    if any(found.launch < one and proofs.depends_on(one, {found.launch}) for one in needed):
        return ReasonCode.OPERAND_DEPENDS
    if found.between and any(proofs.sole_user(node) is None for node in found.between):
        return ReasonCode.INTERMEDIATE_USED
    if any(not _is_final(user) for view in proofs.views_down(norm.result) for user in view.users):
        return ReasonCode.NORM_CONSUMER
    if not all(rewriting.can_hoist(one, found.launch) for one in needed):
        return ReasonCode.OPERAND_LATE
    return Match(found, norm)


def rewrite(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    """Replaces the match by one op call and returns that call."""
    found, norm = match.sum, match.norm
    launch = found.launch
    extras = (found.bias, found.residual, norm.weight, norm.shift)
    for one in extras:
        if one is not None:
            rewriting.hoist(one, launch)
    task, operands = _task(match, options)
    like: torch.Tensor = found.reduced.meta["val"]
    values = (_contiguous(like), _contiguous(like), rewriting.new_token(like))
    with graph.inserting_before(launch):
        call = rewriting.call_task(
            graph,
            task,
            (*operands, *extras),
            (task.reduce_op, *ops.norm_args(norm.norm)),
            rewriting.copied_meta(launch),
            values,
        )
        normed = rewriting.output(graph, call, 0, rewriting.copied_meta(norm.result))
        total = rewriting.output(graph, call, 1, rewriting.copied_meta(found.reduced))
    result = norm.result
    with graph.inserting_before(result):
        result.replace_all_uses_with(_replayed(graph, normed, (*found.views, *found.views_behind)))
    with graph.inserting_before(found.total if found.between else launch):
        found.total.replace_all_uses_with(_replayed(graph, total, found.views))
    replaced = [*norm.inner, norm.wide, *found.views_behind, found.total, *found.between, found.reduced, launch]
    rewriting.erase_unused(graph, replaced)
    return call


def all_reduce_rms_norm(graph: fx.Graph, *, options: Options) -> int:
    """Fuses every all-reduce with the norm behind it, if proved; returns how many were. Others may get a reason."""
    count = 0
    for rsqrt in graph.find_nodes(op="call_function", target=aten.rsqrt.default):
        rows = normalised(rsqrt)
        found = None if rows is None else find_sum(rows)
        if found is None:
            continue
        match: Match | ReasonCode = prove(found, rsqrt)
        if isinstance(match, Match) and PATTERN not in options.fusions:
            match = ReasonCode.DISABLED
        if isinstance(match, ReasonCode):
            # A reduction that is fused with its matmul is no site that was left alone; and of another one, what a user
            # could change is said for the matmul beside it.
            if found.launch.target is ALL_REDUCE and not match.changeable:
                leave_alone(found.launch, PATTERN, match)
            continue
        rewrite(graph, match, options)
        count += 1
    return count


@dataclass(frozen=True)
class _Way:
    """From a total up to `nodes[-1]`, the total first: steps are its (sum, other term), in this order."""

    nodes: tuple[fx.Node, ...]
    steps: tuple[tuple[fx.Node, fx.Node], ...] = ()


def _ways(total: fx.Node) -> list[_Way]:
    """All ways to a reduced tensor, through at most two sums; to the latest reduction first."""
    found, pending = [], [_Way((total,))]
    while pending:
        way = pending.pop()
        nodes = (*way.nodes[:-1], *_views(way.nodes[-1]))
        top = nodes[-1]
        if _is_reduced(top):
            found.append(_Way(nodes, way.steps))
        elif top.target is aten.add.Tensor and top.kwargs.get("alpha", 1) == 1 and len(way.steps) < 2:
            left, right = top.args
            if isinstance(left, fx.Node) and isinstance(right, fx.Node) and left is not right:
                pending.append(_Way((*nodes, left), (*way.steps, (top, right))))
                pending.append(_Way((*nodes, right), (*way.steps, (top, left))))
    order = {node: index for index, node in enumerate(total.graph.nodes)} if len(found) > 1 else {}
    return sorted(found, key=lambda way: order.get(way.nodes[-1], 0), reverse=True)


def _views(node: fx.Node) -> list[fx.Node]:
    """As `proofs.views_up`, but not beyond a reduced tensor."""
    chain = [node]
    while not _is_reduced(chain[-1]) and proofs.keeps_order(chain[-1]):
        source = chain[-1].args[0]
        assert isinstance(source, fx.Node)
        chain.append(source)
    return chain


def _is_reduced(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return False
    if node.target is WAIT:
        return source.target is ALL_REDUCE
    return source.target is ops.overload(MatmulAllReduce.kind) and node.target is getitem and node.args[1:] == (0,)


def _is_final(user: fx.Node) -> bool:
    """Whether the compiler computes `user` apart from what it reads."""
    if user.op == "output" or user.target in proofs.MATMULS or is_task(user):
        return True
    if user.target in proofs.TRANSPOSES:
        return all(_is_final(behind) for behind in user.users)
    return proofs.keeps_order(user) or is_collective(user)


def _task(match: Match, options: Options) -> tuple[NormNode, tuple[Any, ...]]:
    """The node, and its operands."""
    found, norm = match.sum, match.norm
    given = {"bias": found.bias, "residual": found.residual, "weight": norm.weight, "shift": norm.shift}
    extras = tuple(name for name, one in given.items() if one is not None)
    policy, site = rewriting.policy(options), rewriting.UNNAMED_SITE
    if found.launch.target is ALL_REDUCE:
        collective = read_collective(found.launch)
        assert not isinstance(collective, ReasonCode) and collective.reduce_op is not None
        group = collective.world_size, collective.group_name
        return AllReduceRmsNorm(collective.reduce_op, norm.norm, extras, *group, site, policy), (collective.operand,)
    reduction = ops.node_from_call(found.launch.target, found.launch.args)
    assert isinstance(reduction, MatmulAllReduce)
    group = reduction.world_size, reduction.group_name
    products = reduction.num_products, reduction.has_bias
    task = MatmulAllReduceRmsNorm(reduction.reduce_op, norm.norm, extras, *group, site, policy, *products)
    return task, tuple(ops.argument_of(found.launch.target, found.launch.args, name) for name in ("a", "b", "bias"))


def _contiguous(like: torch.Tensor) -> torch.Tensor:
    strides: list[Any] = []
    expected: Any = 1
    for length in reversed(like.shape):
        strides.insert(0, expected)
        expected = expected * length
    return rewriting.fake_like(like, tuple(like.shape), tuple(strides))


def _replayed(graph: fx.Graph, node: fx.Node, views: tuple[fx.Node, ...]) -> fx.Node:
    """The same views of `node`, at the graph's insertion point."""
    for view in views:
        assert isinstance(view.target, torch._ops.OpOverload)
        copy = graph.create_node("call_function", view.target, (node, *view.args[1:]), dict(view.kwargs), name="rows")
        copy.meta.update(rewriting.copied_meta(view))
        node = copy
    return node
