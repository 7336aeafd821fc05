"""Backward of attention -> reduce_scatter of the gradients of keys and values becomes one
`ditron::attention_reduce_scatter`.

Before, as autograd writes the backward of gathered keys and values (here as [B, S, H, D]):

    _scaled_dot_product_flash_attention_backward(grad, q, keys, values, out, lse, ..) -> getitem 1, getitem 2
    getitem 1 [B, H, W*S, D] -> permute -> slice x W -> cat -> reduce_scatter_tensor -> wait [B, S, H, D]
    getitem 2 [B, H, W*S, D] -> permute -> slice x W -> cat -> reduce_scatter_tensor -> wait [B, S, H, D]

After:

    grad, q, keys, values, out, lse -> ditron.attention_reduce_scatter -> getitem 0: the gradient of q
                                                                       -> getitem 1 -> permute [B, S, H, D]
                                                                       -> getitem 2 -> permute [B, S, H, D]

The call takes the place of the backward. Its op is one of `attention_calls.BACKWARD`, and its mask as in
all_gather_attention.

It must not fire when
* there is dropout, a mask or bias of other sizes or dtypes, or the gradient of a bias is used;
* the two gradients are not both scattered along the sequence, in W equal chunks, all of them, in order, summed up, over
  one group; or are used elsewhere too;
* the dtype is none of bfloat16, float16 and float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import getitem

from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.attention.attention_calls import (
    BACKWARD,
    SEQUENCE,
    AttentionCall,
    backward_operands,
    follow,
    read_attention,
    replay,
    replayable,
    scaled,
    views_above,
)
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import REDUCE_SCATTER, Collective, collectives, read_collective
from ditron_inductor.passes.graph.fusion import Fusion
from ditron_inductor.passes.graph.reasons import ReasonCode, Refused, leave_alone, refused
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import AttentionReduceScatter


@dataclass(frozen=True)
class Scattered:
    """A gradient that is scattered. chain: [the kernel's output, .., the tensor that is scattered along a dimension];
    between: the nodes from there to the collective.
    """

    collective: Collective
    chain: tuple[fx.Node, ...]
    between: tuple[fx.Node, ...]

    @property
    def steps(self) -> tuple[fx.Node, ...]:
        return *self.chain, *self.between, self.collective.node, self.collective.wait


@dataclass(frozen=True)
class Match:
    """A backward of attention and its scattered gradients, of keys and of values."""

    attention: AttentionCall
    keys: Scattered
    values: Scattered


def find_attention_reduce_scatter(node: fx.Node) -> Match | Refused:
    """Proves that the backward `node` feeds two reduce-scatters as drawn above, or says why not."""
    attention = read_attention(node)
    if refused(attention):
        return attention.at(node)
    outputs = {user.args[1]: user for user in node.users if user.target is getitem}
    if len(outputs) != len(node.users) or not set(outputs) <= {0, 1, 2, 3}:
        return ReasonCode.ATTENTION_FORM.at(node)
    if 3 in outputs and outputs[3].users:
        return ReasonCode.ATTENTION_BIAS_GRADIENT.at(outputs[3])
    found: list[Scattered] = []
    for index in (1, 2):
        if index not in outputs:
            return ReasonCode.ATTENTION_FORM.at(node)
        scattered = find_scattered(outputs[index])
        if refused(scattered):
            return scattered
        found.append(scattered)
    keys, values = found
    if keys.collective.group_name != values.collective.group_name:
        return ReasonCode.ATTENTION_FORM.at(node)
    of_ranks = attention.of_ranks(keys.collective.world_size)
    if refused(of_ranks):
        return of_ranks.at(node)
    lse = proofs.tensor(backward_operands(node)[2])
    if lse is None or not proofs.same_shape(tuple(lse.shape), attention.lse_shape):
        return ReasonCode.ATTENTION_FORM.at(node)
    if attention.kernel.multiple > 1 and not isinstance(attention.q.meta["val"].shape[2], int):
        return ReasonCode.ATTENTION_FORM.at(node)
    return Match(of_ranks, keys, values)


def find_scattered(gradient: fx.Node) -> Scattered | Refused:
    """Proves that a gradient [B, H, W*S, D] is only used by one reduce-scatter along its sequence."""
    graph = gradient.graph
    for node in collectives(graph, REDUCE_SCATTER):
        collective = read_collective(node)
        if not isinstance(collective, Collective):
            continue
        operand, between, dim = collective.operand, tuple[fx.Node, ...](), 0
        views = proofs.views_up(operand)
        cat = next((view for view in views if view.target is rewriting.aten.cat.default), None)
        if cat is not None:
            chunks = proofs.regrouped(cat, collective.world_size)
            if refused(chunks) or chunks.cat_dim != 0 or cat is not operand:
                continue
            operand, between, dim = chunks.source, (*chunks.between, cat), chunks.split_dim
        chain = views_above(operand, [gradient])
        if chain is None:
            continue
        if collective.reduce_op != "sum":
            return ReasonCode.REDUCE_OP.at(node)
        if follow(chain, SEQUENCE, collective.world_size) != dim:
            return ReasonCode.LAYOUT.at(operand)
        if not replayable(chain, SEQUENCE, collective.world_size):
            return ReasonCode.SHAPE_UNPROVEN.at(operand)
        steps = {*chain, *between, node}
        other = proofs.other_user([*chain, *between], steps)
        if other is not None:
            return ReasonCode.INTERMEDIATE_USED.at(other)
        return Scattered(collective, tuple(chain), between)
    return ReasonCode.ATTENTION_FORM.at(gradient)


def rewrite(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    """Replaces the match by one op call and returns that call."""
    attention, node = match.attention, match.attention.node
    collective = match.keys.collective
    world = collective.world_size
    site = rewriting.site_fields(world, collective.group_name, options)
    task = AttentionReduceScatter(*attention.of_scores, **site)
    gradient, out, lse = backward_operands(node)
    with graph.inserting_before(node):
        if attention.kernel.lse:
            lse = rewriting.computed(graph, rewriting.aten.squeeze.dim, (lse, -1), lse)
        if attention.kernel.multiple > 1:
            rows = attention.q.meta["val"].shape[2]
            lse = rewriting.computed(graph, rewriting.aten.slice.Tensor, (lse, 2, 0, rows), lse)
        if attention.kernel.base != math.e:
            lse = scaled(graph, lse, math.log(attention.kernel.base))
        operands = {
            "grad_out": gradient,
            "q": attention.q,
            "k": attention.k,
            "v": attention.v,
            "out": out,
            "lse": lse,
            "bias": attention.bias,
        }
        values = schema.call(task, **rewriting.values_of(operands))
        call = rewriting.call_task(graph, task, operands, node, values)
        for user in [user for user in node.users if user.args[1] == 0]:
            user.replace_all_uses_with(rewriting.output(graph, call, 0, user))
            graph.erase_node(user)
        for index, scattered in enumerate((match.keys, match.values), 1):
            part = rewriting.output(graph, call, index, scattered.chain[0])
            local = replay(graph, scattered.chain, SEQUENCE, world, part)
            scattered.collective.wait.replace_all_uses_with(local)
    unused = [user for user in node.users if not user.users]
    rewriting.erase_unused(graph, [*match.keys.steps, *match.values.steps, *unused, node])
    return call


def _leave(backward: fx.Node, pattern: str, why: Refused) -> None:
    """Gives a reason to the reduce-scatters of what is put together from the gradients of keys and values."""
    for node in collectives(backward.graph, REDUCE_SCATTER):
        operand = proofs.arguments(node)["input"]
        pieces = operand.args[0] if operand.target is rewriting.aten.cat.default else [operand]
        part = proofs.piece(pieces[0]) if isinstance(pieces[0], fx.Node) else None
        first = pieces[0] if part is None else part.source
        outputs = [user for user in backward.users if user.target is getitem and user.args[1] in (1, 2)]
        if views_above(first, outputs) is not None:
            leave_alone(node, pattern, why.at(backward))


attention_reduce_scatter = Fusion(
    AttentionReduceScatter, tuple(BACKWARD), find_attention_reduce_scatter, rewrite, _leave
)
"""Fuses every backward of attention with provable reduce-scatters. The reduce-scatters of others get a reason."""
