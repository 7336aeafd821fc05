"""all_reduce -> + bias -> + residual -> norm becomes one `ditron::all_reduce_rms_norm`; with a matmul in front, one
`ditron::matmul_all_reduce_rms_norm`.

Before, with any number of order-keeping views in between:

    a, b -> ditron.matmul_all_reduce -> (+ bias [N]) -> (+ residual) = total [B, S, N] -> norm -> mm, ..
                                                                       total -> ..

After, with the same views behind the call:

    a, b, bias, residual, weight, shift -> ditron.matmul_all_reduce_rms_norm -> getitem 0 -> mm, ..
                                                                                getitem 1 -> ..

docs/fusions.md says what the node may hold besides: a second norm of the sum, a norm in front of the residual with or
without one behind, a second bias, a factor of the rows, and what the backward saves. Two norms that share their scaled
rows, as in training, are fused together or not at all. The residual may be added in fp32, with the norm of the sum
before it is rounded (vLLM): the node then rounds the total that others use, and nothing else may use the unrounded one.
Norms that are one op of another library are read too (see `foreign_norms`). An epilogue that `prepare_products` has put
in front of the reduction stays there.

The pass runs behind `matmul_all_reduce`. An all-reduce that is still in the graph then becomes the node without a
matmul. The call takes the place of the all-reduce or of its node, and what it needs in addition is moved in front of
it, so the order of collectives does not change. The norm may be an RMS norm or a layer norm (see `norms`).

It must not fire when
* something that the call needs is computed from the sum, or cannot be moved in front of it;
* an elementwise op uses the reduced tensor before bias and residual are added; or a sum before the last one, or a value
  of whole rows inside the norm, is used elsewhere: the compiler would compute it once more;
* the norm feeds an elementwise op, which the compiler computes in the kernel of the norm, or more than two norms of one
  sum share its scaled rows, which the compiler computes in one kernel: with the node there would be another kernel;
* the rows of the norm are not those of the reduced tensor, or are longer than one program takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import ALL_REDUCE, is_collective, read_collective
from ditron_inductor.passes.graph.foreign_norms import open_where
from ditron_inductor.passes.graph.launches import is_task
from ditron_inductor.passes.graph.norm_forms import FoundNorm, find_norm, find_two_norms, is_rsqrt, normalised
from ditron_inductor.passes.graph.reasons import ReasonCode, leave_alone
from ditron_inductor.passes.graph.reduced_sums import Sum, find_sum
from ditron_inductor.passes.graph.row_regions import is_pointwise
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import (
    EXTRAS,
    MOST_NORM_COLUMNS,
    NO_NORM,
    SAVED,
    AllReduceRmsNorm,
    MatmulAllReduceRmsNorm,
    Norm,
    ReductionWithNorm,
)

aten = torch.ops.aten

PATTERN = AllReduceRmsNorm.kind


@dataclass(frozen=True)
class Match:
    """A sum and the norm of it. norm: None if the norm in front of the residual is the only one. other: a second norm
    of the sum, of the same form.
    """

    sum: Sum
    norm: FoundNorm | None
    other: FoundNorm | None = None

    @property
    def behind(self) -> tuple[FoundNorm, ...]:
        return tuple(norm for norm in (self.norm, self.other) if norm is not None)

    @property
    def norms(self) -> tuple[FoundNorm, ...]:
        return (*self.behind, *(() if self.sum.post is None else (self.sum.post,)))

    @property
    def extras(self) -> dict[str, fx.Node | None]:
        """The operands of the node besides the reduced tensor, by their names in `nodes.EXTRAS`."""
        found: dict[str, fx.Node | None] = dict(zip(("bias", "second_bias"), self.sum.biases, strict=False))
        found |= {
            "residual": self.sum.residual,
            "scale": self.sum.scale if isinstance(self.sum.scale, fx.Node) else None,
        }
        for prefix, norm in (("post_", self.sum.post), ("", self.norm), ("other_", self.other)):
            if norm is not None:
                found |= {f"{prefix}weight": norm.weight, f"{prefix}shift": norm.shift}
        return {name: found.get(name) for name in EXTRAS}

    @property
    def needed(self) -> list[fx.Node]:
        """What is computed before the node."""
        needed = [extra for extra in self.extras.values() if extra is not None]
        added = self.sum.added
        if added is None:
            return needed
        # With it the sizes of views, and the scale.
        given = [source for step in added.steps for source in step.all_input_nodes if source not in self.sum.between]
        return [added.node, *given, *needed]

    @property
    def saved(self) -> dict[str, fx.Node]:
        """The values of the match that other nodes use too, by the names in `nodes.SAVED` and in their order."""
        found, post = self.sum, self.sum.post
        nodes = {} if self.norm is None else dict(self.norm.saved)
        nodes |= {} if self.other is None else {"other": self.other.result}
        nodes |= {} if post is None else {f"post_{name}": node for name, node in post.saved.items()}
        if any(_others(found, node) for node in found.between[: found.kept]):
            nodes["reduced"] = found.reduced
        return {name: nodes[name] for name in SAVED if name in nodes}


def prove(found: Sum, rsqrt: fx.Node) -> Match | ReasonCode:
    """The match of a sum and the norm that `rsqrt` belongs to, or why there is none."""
    if found.launch.target is ALL_REDUCE and isinstance(collective := read_collective(found.launch), ReasonCode):
        return collective
    pair = find_two_norms(rsqrt)
    if pair is not None:
        return _proved(Match(found, *pair), pair[0].x)
    norm = find_norm(rsqrt)
    if isinstance(norm, ReasonCode):
        return norm
    for other in _equal_norms(norm, rsqrt):
        both = _proved(Match(found, norm, other), norm.x)
        if isinstance(both, Match):
            return both
    return _proved(Match(found, norm), norm.x)


def _equal_norms(norm: FoundNorm, rsqrt: fx.Node) -> Iterator[FoundNorm]:
    """Other norms of the same rows and of the same form, of which nothing is saved."""
    for other in rsqrts(rsqrt.graph):
        found = find_norm(other) if other is not rsqrt and normalised(other) is norm.x else None
        if isinstance(found, FoundNorm) and found.norm == norm.norm and not found.saved:
            yield found


def _proved(match: Match, rows: fx.Node) -> Match | ReasonCode:
    """The match, whose norms are of `rows`, if all of it is proved."""
    code = _rejected(match, rows)
    if code is not None:
        return code
    for norm in match.behind:
        if any(not _is_final(user) for view in proofs.views_down(norm.result) for user in view.users):
            return ReasonCode.NORM_SHARED if _is_shared(norm) else ReasonCode.NORM_CONSUMER
    return _hoisted(match)


def _is_shared(norm: FoundNorm) -> bool:
    """Returns whether more norms are made of the same scaled rows: what one does with its weight is none of the
    others'. The compiler finds the common part of them in training, where it removes equal subexpressions.
    """
    if norm.weight is not None or norm.shift is not None:
        return False
    columns = norm.result.meta["val"].shape[-1]
    scaled = [user for user in norm.result.users if user.target is aten.mul.Tensor]
    rows = {node for user in scaled for node in user.all_input_nodes if node is not norm.result}
    return sum((value := proofs.tensor(row)) is not None and proofs.is_row(value, columns) for row in rows) > 1


def _find_post_norm(rsqrt: fx.Node) -> Found | None:
    """The norm of `rsqrt` if it is of reduced rows, with a residual behind it and no other norm; else None."""
    norm = find_norm(rsqrt)
    added = None if isinstance(norm, ReasonCode) else proofs.sole_user(list(proofs.views_down(norm.result))[-1])
    if added is None or added.target is not aten.add.Tensor:
        return None
    found = find_sum(added)
    if found is None or found.post is None or rsqrt not in found.post.inner:
        return None
    code = _rejected(match := Match(found, None), found.total)
    # Otherwise the compiler computes the sum with what follows, and need not write it.
    if code is None and not any(_is_final(user) for view in proofs.views_down(found.total) for user in view.users):
        code = ReasonCode.NORM_CONSUMER
    return found.launch, code or _hoisted(match)


def _rejected(match: Match, rows: fx.Node) -> ReasonCode | None:
    """Proves everything except what stands behind the node, whose sum is `rows`. Returns None if it is proved."""
    found = match.sum
    if found.launch.target is ALL_REDUCE and isinstance(collective := read_collective(found.launch), ReasonCode):
        return collective
    reduced, total = proofs.fake(found.reduced), proofs.fake(rows)
    normed = [total] if found.post is None else [total, found.post.x.meta["val"]]
    if reduced.ndim == 0 or not all(proofs.known_equal(reduced.shape[-1], value.shape[-1]) for value in normed):
        return ReasonCode.LAYOUT
    if reduced.dtype != found.dtype:
        return ReasonCode.CAST_BETWEEN
    if not proofs.known(total.shape[-1] <= MOST_NORM_COLUMNS):
        return ReasonCode.NORM_WIDTH
    if any(found.launch < extra and proofs.depends_on(extra, {found.launch}) for extra in match.needed):
        return ReasonCode.OPERAND_DEPENDS
    for index, node in enumerate(found.between):
        others = _others(found, node)
        if others and (index >= found.kept or not all(map(_is_kept, others))):
            return ReasonCode.INTERMEDIATE_USED
    if found.unrounded:
        known = {*found.totals, *(inside for norm in match.behind for inside in norm.inner)}
        if not known.issuperset(found.total.users):
            return ReasonCode.INTERMEDIATE_USED
    as_sum = [found.reduced, *(norm.result for norm in match.behind)]
    if any(saved not in as_sum and _rows_shape(found, saved) is None for saved in match.saved.values()):
        return ReasonCode.SHAPE_UNPROVEN
    return None


def _hoisted(match: Match) -> Match | ReasonCode:
    """The match, if what it needs can be computed before the reduction."""
    late = not all(rewriting.can_hoist(extra, match.sum.launch) for extra in match.needed)
    return ReasonCode.OPERAND_LATE if late else match


def rewrite(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    """Replaces the match by one op call and returns that call."""
    found, saved = match.sum, match.saved
    launch = found.launch
    results = {name: norm.result for name, norm in zip(("normed", "other"), match.behind, strict=False)}
    for extra in match.needed:
        rewriting.hoist(extra, launch)
    task, operands = _task(match, options)
    like: torch.Tensor = found.reduced.meta["val"]
    outputs = [rewriting.norm_output(like, name, like.shape) for name in task.returned]
    with graph.inserting_before(launch):
        call = rewriting.call_task(
            graph,
            task,
            {**operands, **match.extras, "scale": _scale_row(graph, match), "residual": _residual(graph, match)},
            launch,
            [*outputs, rewriting.new_token(like)],
        )
        origins = {"total": found.reduced, **saved, **results}
        made = {name: rewriting.output(graph, call, index, origins[name]) for index, name in enumerate(task.returned)}
    of_rows = {name: node for name, node in saved.items() if name not in ("reduced", "other")}
    shapes = {name: _rows_shape(found, node) for name, node in of_rows.items()}
    for name, result in results.items():
        with graph.inserting_before(result):
            normed = _replayed(graph, made[name], (*found.views, *found.views_behind))
        result.replace_all_uses_with(normed)
    totals = found.totals
    with graph.inserting_before(found.total if found.between else launch):
        rounded = _replayed(graph, made["total"], found.views) if totals else None
    for total in totals:
        assert rounded is not None
        total.replace_all_uses_with(rounded)
    if "reduced" in saved:
        found.reduced.replace_all_uses_with(made["reduced"])
    inner = {inside for each in match.norms for inside in each.inner}
    for name, node in of_rows.items():
        with graph.inserting_before(node):
            rows = _as_rows(graph, made[name], node, shapes[name])
        for user in [user for user in node.users if user not in inner]:
            user.replace_input_with(node, rows)
    rewriting.erase_unused(graph, [*_replaced(match), *totals])
    return call


def all_reduce_rms_norm(graph: fx.Graph, *, options: Options) -> int:
    """Fuses every all-reduce with the norm behind it, if proved; returns how many were. Others may get a reason."""
    open_where(graph, lambda copy: _fuse_all(copy, options))
    return _fuse_all(graph, options)


def _fuse_all(graph: fx.Graph, options: Options) -> int:
    # A sum with a norm behind it is fused with that norm, so such norms are looked for first.
    count = sum(_fuse(graph, rsqrt, find_norm_behind, options) for rsqrt in rsqrts(graph))
    return count + sum(_fuse(graph, rsqrt, _find_post_norm, options) for rsqrt in rsqrts(graph))


def rsqrts(graph: fx.Graph) -> list[fx.Node]:
    """Returns every inverse root of a graph, in its order."""
    return [node for node in graph.nodes if is_rsqrt(node)]


Found = tuple[fx.Node, Match | ReasonCode]
"""The node that reduces, and a match or the reason why there is none."""


def find_norm_behind(rsqrt: fx.Node) -> Found | None:
    """The norm that `rsqrt` belongs to, behind a sum; None if it is not."""
    rows = normalised(rsqrt)
    found = None if rows is None else find_sum(rows)
    return None if found is None else (found.launch, prove(found, rsqrt))


def _fuse(graph: fx.Graph, rsqrt: fx.Node, find: Callable[[fx.Node], Found | None], options: Options) -> bool:
    """Fuses what is found at `rsqrt`, and returns whether it did."""
    found = find(rsqrt)
    if found is None:
        return False
    launch, match = found
    if isinstance(match, Match) and PATTERN not in options.fusions:
        match = ReasonCode.DISABLED
    if isinstance(match, ReasonCode):
        # A reduction that is fused with its matmul is no site that was left alone; and of another one, what a user
        # could change is said for the matmul beside it.
        if launch.target is ALL_REDUCE and not match.changeable:
            leave_alone(launch, PATTERN, match)
        return False
    rewrite(graph, match, options)
    return True


def _others(found: Sum, node: fx.Node) -> list[fx.Node]:
    """Returns the nodes that use one of `between` and are not fused."""
    fused = {*found.between, found.total}
    if found.post is not None:
        fused |= {*found.post.inner}
        fused |= {found.post.wide} if fused.issuperset(found.post.wide.users) else set()
    return [user for user in node.users if user not in fused]


def _is_kept(user: fx.Node) -> bool:
    """Returns whether what uses the reduced tensor too takes it from memory, or is a view."""
    return all(map(_is_kept, user.users)) if proofs.keeps_order(user) else _is_final(user)


PICKS = frozenset({aten.index.Tensor, aten.index_select.default})
"""Ops that pick rows in another number and order, as for the experts they are sent to, in an own kernel."""


REPEATS = frozenset({aten.expand.default, aten.repeat.default})


def _is_foreign(user: fx.Node) -> bool:
    """Returns whether nobody but its author knows what an op does: the compiler gives it tensors."""
    return isinstance(user.target, torch._ops.OpOverload) and user.target.namespace not in ("aten", "prims")


def _is_final(user: fx.Node) -> bool:
    """Returns whether the compiler computes `user` apart from what it reads."""
    if user.op == "output" or user.target in proofs.MATMULS or is_task(user) or _is_foreign(user):
        return True
    if user.target in proofs.TRANSPOSES:
        return all(_is_final(behind) for behind in user.users)
    return proofs.keeps_order(user) or is_collective(user) or user.target in PICKS or _is_repeated_for_matmuls(user)


def _is_repeated_for_matmuls(user: fx.Node) -> bool:
    """Returns whether an op repeats rows, as for each expert of a token, and matmuls alone read them: these get a copy.
    They may be scaled before, if there are more of them, as for the experts of Llama 4: the compiler does that in
    another kernel than the norm. Other readers may take the repetition back, and the compiler then computes them with
    the norm.
    """
    if user.target not in REPEATS:
        return False
    onward = proofs.reached([user], lambda node: [reader for reader in node.users if not proofs.is_matmul(reader)])
    more = proofs.known(proofs.fake(user).numel() > proofs.fake(proofs.operand(user)).numel())
    copied = [node for node in onward if node is not user and node.target is not aten.clone.default]
    return all(proofs.keeps_order(node) or (more and is_pointwise(node.target)) for node in copied)


def _task(match: Match, options: Options) -> tuple[ReductionWithNorm, dict[str, Any]]:
    """The node, and its operands but for those of the norm."""
    found, norm = match.sum, match.norm
    last = Norm(NO_NORM, 0.0) if norm is None else norm.norm
    extras = tuple(name for name, extra in match.extras.items() if extra is not None)
    behind = None if found.post is None else found.post.norm, tuple(match.saved)
    policy, site = rewriting.policy(options), rewriting.UNNAMED_SITE
    factor = found.scale if isinstance(found.scale, float) else 1.0
    if found.launch.target is ALL_REDUCE:
        collective = read_collective(found.launch)
        assert not isinstance(collective, ReasonCode) and collective.reduce_op is not None
        group = collective.world_size, collective.group_name
        task = AllReduceRmsNorm(collective.reduce_op, last, extras, *group, site, policy, *behind, factor=factor)
        return task, {"x": collective.operand}
    reduction = schema.node_from_call(found.launch.target, found.launch.args)
    post, saved = behind
    fused = MatmulAllReduceRmsNorm.behind(reduction, last, extras, post=post, saved=saved, factor=factor)
    operands = schema.operands_from_call(found.launch)
    return fused, {**operands, "product_bias": operands.pop("bias", None)}


def _residual(graph: fx.Graph, match: Match) -> fx.Node | None:
    """The residual, to which the match's other tensor is added."""
    residual, added = match.sum.residual, match.sum.added
    if residual is None or added is None:
        return residual
    term = added.node
    for step in added.steps:
        value: torch.Tensor = step.meta["val"]
        if step.target is aten.mul.Tensor:
            factors = tuple(term if factor in match.sum.between else factor for factor in step.args)
            term = rewriting.call(graph, aten.mul.Tensor, factors, term, tuple(value.shape))
        else:
            term = _replayed(graph, term, (step,))
    return rewriting.call(graph, aten.add.Tensor, (term, residual), residual, tuple(residual.meta["val"].shape))


def _scale_row(graph: fx.Graph, match: Match) -> fx.Node | None:
    """The scale as a row: one element is repeated."""
    scale = match.extras["scale"]
    if scale is None:
        return None
    columns = match.sum.reduced.meta["val"].shape[-1]
    value: torch.Tensor = scale.meta["val"]
    if proofs.is_row(value, columns):
        return scale
    row = scale
    for target, args, stride in ((aten.reshape.default, [1], 1), (aten.expand.default, [columns], 0)):
        row = rewriting.call(graph, target, (row, args), scale, args, (stride,), name="scale")
    return row


def _rows_shape(found: Sum, node: fx.Node) -> list[Any] | None:
    """The shape of what is saved as arguments of a reshape of the node's output; None if that is not known. Dynamic
    sizes are taken from the last view on the way, whose sizes are the same except for the last dimension.
    """
    value, reduced = proofs.fake(node), proofs.fake(found.reduced)
    if all(isinstance(length, int) for length in value.shape):
        return list(value.shape)
    views = [*found.views, *found.views_behind]
    if not views:
        return [] if proofs.same_shape(value.shape[:-1], reduced.shape[:-1]) else None
    last = proofs.tensor(views[-1])
    reshaped = views[-1].target in rewriting.VIEWS or views[-1].target is aten.reshape.default
    if not reshaped or last is None or not proofs.same_shape(value.shape[:-1], last.shape[:-1]):
        return None
    sizes = views[-1].args[1]
    assert isinstance(sizes, (list, tuple))
    return [*sizes[:-1], value.shape[-1]] if isinstance(value.shape[-1], int) else None


def _as_rows(graph: fx.Graph, source: fx.Node, like: fx.Node, sizes: list[Any] | None) -> fx.Node:
    """Returns a saved value in the shape that it had."""
    assert sizes is not None
    value, wanted = source.meta["val"], like.meta["val"]
    if not sizes or proofs.same_shape(value.shape, wanted.shape):
        return source
    args = (source, sizes)
    return rewriting.call(graph, aten.reshape.default, args, like, wanted.shape, dtype=value.dtype, name="saved")


def _replaced(match: Match) -> list[fx.Node]:
    """Returns all nodes of the match. Each of them is removed if nothing else uses it."""
    found = match.sum
    norms = [node for norm in match.norms for node in (*norm.inner, norm.wide)]
    casts = found.total.all_input_nodes if found.unrounded else []
    return [*norms, *found.views_behind, found.total, *casts, *found.between, found.reduced, found.launch]


def _replayed(graph: fx.Graph, node: fx.Node, views: tuple[fx.Node, ...]) -> fx.Node:
    """Inserts the same views of `node` at the insertion point of the graph, and returns the last one."""
    for view in views:
        assert isinstance(view.target, torch._ops.OpOverload)
        copy = graph.create_node("call_function", view.target, (node, *view.args[1:]), dict(view.kwargs), name="rows")
        copy.meta.update(rewriting.copied_meta(view))
        node = copy
    return node
