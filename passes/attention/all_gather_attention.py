"""all_gather of keys and values -> attention becomes one `ditron::all_gather_attention`.

Before: keys and values are gathered along the sequence, in one gather (stacked) or two. Their dimensions may be in any
order that views bring to [B, H, S, D]; here they are [B, S, H, D], and go through split, getitem and cat:

    k [B, S, H, D] -> all_gather_into_tensor -> wait -> split -> getitem x W -> cat [B, W*S, H, D] -> permute -> keys
    v [B, S, H, D] -> all_gather_into_tensor -> wait -> split -> getitem x W -> cat [B, W*S, H, D] -> permute -> values
    _scaled_dot_product_flash_attention(q, keys, values) -> getitem 0: out

After:

    q, k -> permute, v -> permute -> ditron.all_gather_attention -> getitem 0: out [B, H, S, D]

If the backward, or anything behind the attention, needs the gathered keys and values, the node returns them. The call
takes the place of the attention. docs/attention.md says which forms of attention and which masks are read. The
positions of a rank's queries are constants of its graph alone. Every rank fuses, whatever its constants, and the call
has them as `offset` and `jumps`. A mask of which nothing is proved, or a bias of floats, is passed on as a tensor, the
`bias` of the call, whose mask is then `given`.

Calls of `ops.all_gather_attention` are in the graph already: they get the options of the compilation here.

It must not fire when
* there is dropout, a mask or bias of other sizes or dtypes, or queries whose heads do not divide among those of the
  keys;
* the chunks are not all of the W equal chunks, once, in order; or a part of the gathered sequence is taken;
* the gathered tensor, or a view on the way, is used before the attention, or by what its queries or its bias are
  computed from;
* attention is written out, and its scores or probabilities are used elsewhere, as by a backward that is written out;
* keys and values come from different groups, or only one of them is gathered;
* the dtype is none of bfloat16, float16 and float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import getitem

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.attention.attention_calls import (
    FORWARD,
    SEQUENCE,
    AttentionCall,
    follow,
    operands,
    read_attention,
    replay,
    replayable,
    scaled,
    unrepeated,
    views_above,
)
from ditron_inductor.passes.attention.shown_masks import all_see
from ditron_inductor.passes.attention.written_attention import Written, find_written, prove
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import ALL_GATHER, Collective, collectives, read_collective
from ditron_inductor.passes.graph.gathered import Gathered, gathered_tensor
from ditron_inductor.passes.graph.reasons import ReasonCode, Refused, leave_alone, refused
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import ATTENTION_KINDS, AllGatherAttention

aten = torch.ops.aten

PATTERN = AllGatherAttention.kind
SWAPPED = [0, 2, 1, 3]


@dataclass(frozen=True)
class Source:
    """Keys or values: views of a gathered tensor. chain: [the gathered tensor, .., the attention's operand]; repeats:
    the nodes from there to the attention, if every head is repeated.
    """

    collective: Collective
    gathered: Gathered
    chain: tuple[fx.Node, ...]
    repeats: tuple[fx.Node, ...] = ()

    @property
    def operand(self) -> fx.Node:
        return self.chain[-1]

    @property
    def steps(self) -> tuple[fx.Node, ...]:
        splits = [node.args[0] for node in self.chain if node.target is getitem]
        return *self.gathered.steps, *(part for part in splits if isinstance(part, fx.Node)), *self.chain, *self.repeats

    @property
    def may_be_used(self) -> tuple[fx.Node, ...]:
        """The nodes whose values the outputs of the Task node hold too."""
        first, *views = self.chain
        swaps = len(views) == 1 and views[0].target in proofs.TRANSPOSES and proofs.permutation(views[0]) == SWAPPED
        return (first, self.operand) if swaps else (self.operand,)


@dataclass(frozen=True)
class Match:
    """Attention and its gathered keys and values; return_gathered: they are used elsewhere too."""

    attention: AttentionCall
    keys: Source
    values: Source
    return_gathered: bool


def find_match(attention: AttentionCall, gathers: dict[fx.Node, tuple[Collective, Gathered]]) -> Match | Refused:
    """Proves that an attention reads gathered keys and values as drawn above, or says why not."""
    node, written = attention.node, attention.written
    sources = [find_source(operand, gathers) for operand in (attention.k, attention.v)]
    for source in sources:
        if refused(source):
            return source
    keys, values = (source for source in sources if isinstance(source, Source))
    alike = proofs.same_shape(keys.operand.meta["val"].shape, values.operand.meta["val"].shape)
    if not alike or keys.collective.group_name != values.collective.group_name:
        return ReasonCode.ATTENTION_FORM.at(node)
    of_ranks = attention.of_ranks(keys.collective.world_size)
    if refused(of_ranks):
        return of_ranks.at(node)
    attention = of_ranks
    steps = list(dict.fromkeys((*keys.steps, *values.steps)))
    known = {node, *steps}
    if written is not None:
        steps += written.views
        known |= {*written.views, *written.between}
        other = proofs.other_user(written.between, known)
        if other is not None:
            return ReasonCode.ATTENTION_WEIGHTS_USED.at(other)
    order = {each: index for index, each in enumerate(node.graph.nodes)}
    may_be_used = (*keys.may_be_used, *values.may_be_used)
    used = []
    for step in steps:
        others = [user for user in step.users if user not in known]
        late = step in may_be_used and all(order[user] > order[node] for user in others)
        if others and not late:
            return ReasonCode.INTERMEDIATE_USED.at(others[0])
        used += others
    return Match(attention, keys, values, bool(used))


def find_source(operand: fx.Node, gathers: dict[fx.Node, tuple[Collective, Gathered]]) -> Source | Refused:
    """Proves that a tensor [B, H, W*S, D] is gathered along its sequence."""
    operand, repeats = unrepeated(operand)
    chain = views_above(operand, list(gathers))
    if chain is None:
        return ReasonCode.ATTENTION_FORM.at(operand)
    collective, gathered = gathers[chain[0]]
    world = collective.world_size
    if follow(chain, gathered.dim, world) != SEQUENCE:
        parts = [view for view in chain[1:] if view.target in proofs.SLICES]
        return ReasonCode.ATTENTION_PARTS.at(parts[0]) if parts else ReasonCode.LAYOUT.at(operand)
    if not replayable(chain, gathered.dim, world):
        return ReasonCode.SHAPE_UNPROVEN.at(operand)
    return Source(collective, gathered, tuple(chain), repeats)


def find_gathers(graph: fx.Graph) -> dict[fx.Node, tuple[Collective, Gathered]]:
    """Returns the gathers along any dimension, by the node that holds the gathered tensor."""
    found = {}
    for node in collectives(graph, ALL_GATHER):
        collective = read_collective(node)
        if isinstance(collective, Collective):
            gathered = gathered_tensor(collective)
            if isinstance(gathered, Gathered):
                found[gathered.node] = collective, gathered
    return found


def rewrite(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    """Replaces the match by one op call and returns that call."""
    attention, keys, values = match.attention, match.keys, match.values
    node = attention.node
    collective = keys.collective
    site = rewriting.site_fields(collective.world_size, collective.group_name, options)
    task = AllGatherAttention(*attention.of_scores, return_gathered=match.return_gathered, **site)
    with graph.inserting_before(node):
        locals_ = [
            replay(graph, tensor.chain, tensor.gathered.dim, collective.world_size, tensor.collective.operand)
            for tensor in (keys, values)
        ]
        operands = {"q": attention.q, "k": locals_[0], "v": locals_[1], "bias": attention.bias}
        fakes = schema.call(task, **rewriting.values_of(operands))
        call = rewriting.call_task(graph, task, operands, node, fakes)
        if attention.written is not None:
            _replace_written(graph, call, attention)
        else:
            for user in [user for user in node.users if user.target is getitem]:
                user.replace_all_uses_with(_output(graph, call, attention, user))
                graph.erase_node(user)
        if match.return_gathered:
            for index, source in enumerate((keys, values), 2):
                _hand_on(graph, call, index, source, node)
    # Erase these nodes only now, because nodes were inserted beside them.
    written = () if attention.written is None else (*attention.written.between, *attention.written.views)
    rewriting.erase_unused(graph, [*keys.steps, *values.steps, *written, node])
    return call


def _replace_written(graph: fx.Graph, call: fx.Node, attention: AttentionCall) -> None:
    """Replaces the result of attention that is written out by the result of the call."""
    node, written = attention.node, attention.written
    assert written is not None
    new = written.moved.insert(graph, rewriting.output(graph, call, 0, node))
    if new.meta["val"].dtype != node.meta["val"].dtype:
        narrow, dtype = new, node.meta["val"].dtype
        new = graph.call_function(torch.ops.prims.convert_element_type.default, (narrow, dtype))
        new.meta = {**rewriting.copied_meta(node), "val": narrow.meta["val"].to(dtype)}
    node.replace_all_uses_with(new)


def _output(graph: fx.Graph, call: fx.Node, attention: AttentionCall, old: fx.Node) -> fx.Node:
    """Returns what replaces one of the outputs of the kernel."""
    index = old.args[1]
    assert isinstance(index, int)
    if index > 1:
        # Outputs that a kernel has for dropout: nothing reads them, as there is no dropout.
        value = proofs.tensor(old)
        return old if value is None else rewriting.zeros(graph, old, value.shape)
    new = rewriting.output(graph, call, index, old)
    # Whether every row sees a key is known of this rank alone: what follows is no collective.
    sees_everywhere = all_see(attention.mask, attention.q.meta["val"].shape[2], attention.k.meta["val"].shape[2])
    if index == 1 and attention.kernel.unseen != -math.inf and not sees_everywhere:
        new = _finite(graph, new)
    if index == 1 and attention.kernel.base != math.e:
        new = scaled(graph, new, 1.0 / math.log(attention.kernel.base))
    if index == 1 and attention.kernel.multiple > 1 and old.users:
        padding = [0, attention.lse_shape[2] - new.meta["val"].shape[2]]
        return rewriting.computed(graph, aten.constant_pad_nd.default, (new, padding, math.inf), new)
    if index == 1 and attention.kernel.lse:
        return rewriting.computed(graph, aten.unsqueeze.default, (new, -1), new)
    return new


def _finite(graph: fx.Graph, lse: fx.Node) -> fx.Node:
    """Inserts logarithms that are 0 for a row that sees nothing, as the library has them. With -inf the library's
    backward, which may be left alone, would give NaN gradients everywhere.
    """
    hidden = rewriting.computed(graph, aten.eq.Scalar, (lse, -math.inf), lse)
    zeros = rewriting.zeros(graph, lse, lse.meta["val"].shape)
    return rewriting.computed(graph, aten.where.self, (hidden, zeros, lse), lse)


def _hand_on(graph: fx.Graph, call: fx.Node, index: int, source: Source, attention: fx.Node) -> None:
    """Replaces other uses of the gathered keys or values by those that the call returns."""
    operand, first = source.operand, source.chain[0]
    known = (attention, call, *source.steps)
    of_operand, of_first = ([user for user in tensor.users if user not in known] for tensor in (operand, first))
    if not of_operand and not of_first:
        return
    whole = rewriting.output(graph, call, index, operand)
    for user in of_operand:
        user.replace_input_with(operand, whole)
    if first is operand or not of_first:
        return
    swapped = rewriting.computed(graph, aten.permute.default, (whole, SWAPPED), first)
    for user in of_first:
        user.replace_input_with(first, swapped)


def all_gather_attention(graph: fx.Graph, *, options: Options) -> int:
    """Fuses every attention with provable gathers; returns how many. Gathers of others get a reason."""
    _adopt(graph, options)
    count = 0
    for node in [node for node in graph.nodes if node.op == "call_function" and node.target in FORWARD]:
        gathers = find_gathers(graph)
        if not gathers:
            break
        attention = read_attention(node)
        match = attention.at(node) if refused(attention) else find_match(attention, gathers)
        if isinstance(match, Match) and not usable(match.attention):
            match = ReasonCode.ATTENTION_FORM.at(node)
        if isinstance(match, Match) and PATTERN not in options.fusions:
            match = ReasonCode.DISABLED
        if refused(match):
            for collective in _fed_by(node, gathers):
                leave_alone(collective.node, PATTERN, match.at(node))
            continue
        rewrite(graph, match, options)
        count += 1
    gathers = find_gathers(graph)
    for written in find_written(graph, gathers):
        gathers = find_gathers(graph)
        count += _fuse_written(graph, written, gathers, options)
    return count


def _fuse_written(
    graph: fx.Graph, written: Written, gathers: dict[fx.Node, tuple[Collective, Gathered]], options: Options
) -> int:
    before = set(graph.nodes)
    attention = prove(graph, written, gathers)
    match = attention if refused(attention) else find_match(attention, gathers)
    if isinstance(match, Match) and PATTERN not in options.fusions:
        match = ReasonCode.DISABLED
    if not refused(match):
        rewrite(graph, match, options)
        return 1
    why = match.at(written.node)
    # Views that the proof inserted.
    inserted = set(graph.nodes) - before
    rewriting.erase_unused(graph, inserted)
    for gathered in written.gathered:
        leave_alone(gathers[gathered][0].node, PATTERN, why.code.at(written.node) if why.node in inserted else why)
    return 0


def usable(attention: AttentionCall) -> bool:
    """Returns whether whatever is used of the kernel's outputs can be replaced."""
    q = attention.q.meta["val"]
    for user in attention.node.users:
        if user.target is not getitem:
            return False
        value = proofs.tensor(user)
        if user.args[1] == 1 and user.users:
            if value is None or not proofs.same_shape(tuple(value.shape), attention.lse_shape):
                return False
            if attention.kernel.multiple > 1 and not isinstance(q.shape[2], int):
                return False
        elif user.args[1] not in (0, 1) and user.users and value is None:
            return False
    return True


def _fed_by(node: fx.Node, gathers: dict[fx.Node, tuple[Collective, Gathered]]) -> list[Collective]:
    """The gathers that the keys and values of an attention are views of."""
    chains = [views_above(unrepeated(operand)[0], list(gathers)) for operand in operands(node)[1:]]
    return [gathers[chain[0]][0] for chain in chains if chain is not None]


def _adopt(graph: fx.Graph, options: Options) -> None:
    """Gives the options of the compilation to the calls that the user's program makes by our function."""
    targets = {schema.overload(kind) for kind in ATTENTION_KINDS}
    policy = rewriting.policy(options)
    for node in [node for node in graph.nodes if node.op == "call_function" and node.target in targets]:
        task = schema.node_from_call(node.target, node.args)
        if task.site == rewriting.UNNAMED_SITE and task.policy.strategy == "auto":
            rewriting.change_task(node, replace(task, policy=policy))
