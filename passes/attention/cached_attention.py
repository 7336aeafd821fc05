"""Attention of a decode step to a rank's own cache, with what stands before it, becomes `ditron::cached_attention`.

Before, for one token of each sequence, as a decoding layer has it between its projections:

    q [B, Hq, 1, D] -> turned by angles (see rotary.py)
    k [B, Hkv, 1, D] -> turned -> index_put(keys [B, Hkv, S, D], [None, None, position]) -> copy_ into keys
    v [B, Hkv, 1, D]           -> index_put(values, [None, None, position]) -> copy_ into values
    arange(S) <= position -> where(.., 0, -inf) = mask
    turned q, written keys, written values, mask -> one of torch's attention ops -> getitem 0 = out [B, Hq, 1, D]

After:

    q, keys, values, position, k, v, cos, sin -> ditron.cached_attention -> getitem 0 = out
    out -> after_(keys), after_(values)

Each of the parts may be missing: without a rotary embedding nothing is turned, and a cache that is written elsewhere
is only read. The mask may be one of lengths (`arange(S) < lengths`), any mask that is the same for all heads, or none.
Keys and values may be repeated for the query heads that share them; then the cache itself is read. Attention with sinks
may be written out (see sunk_attention.py).

Nothing is communicated, so ranks need not agree on it. It must not fire when
* the graph holds no Task node with a collective: it is left to Inductor, as for `projections`;
* the tensors are not on a GPU, or heads have another size than those of `HEAD_DIMS`;
* there is more than one query for each sequence, a size is dynamic, or the log-sum-exp is used;
* the mask differs between heads, or, without sinks, holds numbers that are added to the scores; with dropout, or
  `is_causal`.

A cache is written by the call only if it is an input of the graph that nothing else reads or writes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.attention.attention_parts import SDPA
from ditron_inductor.passes.attention.mask_bounds import MaskOperands
from ditron_inductor.passes.attention.roots import VIEWS, chain_to
from ditron_inductor.passes.attention.rotary import Rotation, read_rotation
from ditron_inductor.passes.attention.softmax_algebra import Atoms
from ditron_inductor.passes.attention.step_attention import StepAttention, read_step
from ditron_inductor.passes.attention.sunk_attention import read_sunk
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.launches import takes_local
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import HEAD_DIMS, CachedAttention
from ditron_inductor.task.torch_dtypes import ACTIVATION_DTYPES

aten = torch.ops.aten

PATTERN = CachedAttention.kind
GPUS = ("cuda",)
SOFTMAX = (aten.amax.default, aten._softmax.default)
"""A softmax that is written out begins with the largest of its scores."""


@dataclass(frozen=True)
class CacheWrite:
    """A cache in which `new` [B, Hkv, 1, D] is put at `position`, and which `copy` then makes the caller's."""

    cache: fx.Node
    position: fx.Node
    new: fx.Node
    copy: fx.Node


@dataclass(frozen=True)
class Match:
    """An attention, its caches [B, Hkv, S, D], and what precedes it. written: the writes of the caches, which are those
    before them, if the call makes them. turned: the Rotations of the query and of the new key.
    """

    attention: StepAttention
    keys: fx.Node
    values: fx.Node
    written: tuple[CacheWrite, CacheWrite] | None = None
    turned: tuple[Rotation, ...] = ()


def find_attention(node: fx.Node, devices: tuple[str, ...]) -> Match | None:
    """Proves that a node is an attention of one query for each sequence; None if it is not."""
    attention = read_step(node) or read_sunk(node)
    if attention is None or attention.sizes[3] != 1 or attention.sizes[5] not in HEAD_DIMS:
        return None
    given = [proofs.fake(one) for one in (attention.query, attention.keys, attention.values)]
    right = given[0].device.type in devices and given[0].dtype in ACTIVATION_DTYPES
    alike = all(one.dtype == given[0].dtype for one in given) and given[1].shape == given[2].shape
    in_rows = all(proofs.known_equal(one.stride(-1), 1) for one in given[1:])
    if not right or not alike or not in_rows:
        return None
    return _with_rotations(_with_writes(Match(attention, attention.keys, attention.values)))


def _with_writes(match: Match) -> Match:
    """Returns a match with the writes of its caches, if the call can make them."""
    keys, values = (_read_write(cache, match.attention) for cache in (match.keys, match.values))
    if keys is None or values is None or keys.cache is values.cache:
        return match
    at = keys.position
    if _whole(at) is not _whole(values.position):
        return match
    choice = match.attention.choice
    if choice.lengths is not None and not _follows(choice.lengths, choice.more, at):
        return match
    return replace(match, keys=keys.cache, values=values.cache, written=(keys, values))


def _follows(lengths: fx.Node, more: int, position: fx.Node) -> bool:
    """Returns whether lengths + more is a position plus 1."""
    if more == 0 and lengths.target is aten.add.Tensor and lengths.args[1] == 1 and not lengths.kwargs:
        lengths, more = proofs.operand(lengths), 1
    return more == 1 and _whole(lengths) is _whole(position)


def _read_write(put: fx.Node, attention: StepAttention) -> CacheWrite | None:
    """Returns how a cache is written before the call reads it; None if the call cannot do that."""
    if put.target is not aten.index_put.default:
        return None
    bound = proofs.arguments(put)
    cache, indices, new = bound["self"], bound["indices"], bound["values"]
    B, _, _, _, S, D = attention.sizes
    if bound["accumulate"] or len(indices) != 3 or indices[0] is not None or indices[1] is not None:
        return None
    position, place, value = indices[2], proofs.tensor(indices[2]), proofs.tensor(new)
    stored, written = proofs.tensor(cache), proofs.fake(put)
    if place is None or value is None or stored is None or place.device != written.device:
        return None
    shapes = (place, (1,)), (value, (B, written.shape[1], 1, D)), (stored, (B, written.shape[1], S, D))
    if place.dtype != torch.int64 or not all(proofs.same_shape(tuple(one.shape), shape) for one, shape in shapes):
        return None
    copies = [user for user in put.users if user.target is aten.copy_.default]
    if len(copies) != 1 or cache.op != "placeholder" or value.dtype != stored.dtype or stored.stride(-1) != 1:
        return None
    (copy,) = copies
    ours = copy.args[:2] == (cache, put) and not copy.users and set(cache.users) == {put, copy}
    others = [user for user in put.users if user is not copy and not _leads_to(user, attention.readers)]
    if not ours or others or set(proofs.writers(cache)) != {copy}:
        return None
    return CacheWrite(cache, position, new, copy)


def _leads_to(node: fx.Node, readers: tuple[fx.Node, ...]) -> bool:
    """Returns whether a node is one of the readers, or a view or copy that only they read."""
    if node in readers:
        return True
    return node.target in VIEWS and bool(node.users) and all(_leads_to(user, readers) for user in node.users)


def _whole(node: fx.Node) -> fx.Node:
    """Returns the numbers of which a tensor of one number is a view, or a wider copy."""
    return chain_to(Atoms(), node)[0].node


def _with_rotations(match: Match) -> Match:
    """Returns a match with the rotary embedding of its query, and of its new key, if the call can make them."""
    B, D = match.attention.sizes[0], match.attention.sizes[5]
    query, found = match.attention.query, []
    for node in (query, *(() if match.written is None else (match.written[0].new,))):
        rotation = read_rotation(proofs.views_up(node)[-1])
        if rotation is None:
            return match
        value, (cos, sin) = proofs.fake(rotation.x), rotation.angles
        if (value.shape[0], value.shape[-1], value.dtype) != (B, D, proofs.fake(node).dtype) or cos[1:] != sin[1:]:
            return match
        found.append(rotation)
    here = all(proofs.fake(one).device == proofs.fake(query).device for one in (found[0].cos, found[0].sin))
    return replace(match, turned=tuple(found)) if here and len({one.angles for one in found}) == 1 else match


def rewrite(graph: fx.Graph, match: Match, masks: MaskOperands, options: Options) -> fx.Node:
    """Replaces the match by one op call and returns that call."""
    attention, choice, result = match.attention, match.attention.choice, match.attention.result
    B, _, _, _, S, D = attention.sizes
    heads = proofs.fake(attention.query).shape[1]
    appends, rotated, sinks = match.written is not None, bool(match.turned), attention.sinks
    more = 0 if appends else choice.more
    task = CachedAttention(
        attention.scale, choice.mask, appends, rotated, more, sinks is not None, options.strategy
    )
    news = [] if match.written is None else [one.new for one in match.written]
    heads_of = [attention.query, *news]
    for index, rotation in enumerate(match.turned):
        heads_of[index] = rotation.x
    like, wanted = proofs.fake(attention.query), tuple(proofs.fake(result).shape)
    out = rewriting.fake_like(like, (B, heads, D), rewriting.contiguous_strides((B, heads, D)))
    with graph.inserting_before(result):
        q, *new = (rewriting.shaped(graph, node, (B, -1, D)) for node in heads_of)
        operands: dict[str, fx.Node | None] = {"q": q, "keys": match.keys, "values": match.values}
        if choice.lengths is not None:
            lengths = choice.lengths if match.written is None else match.written[0].position
            operands["lengths"] = rewriting.shaped(graph, lengths, (proofs.fake(lengths).numel(),))
        operands |= masks.of(choice, S)
        if sinks is not None:
            operands["sinks"] = sinks
        if match.written is not None:
            operands |= {"position": match.written[0].position, "key": new[0], "value": new[1]}
        if rotated:
            tables = zip(("cos", "sin"), match.turned[0].angles, strict=True)
            operands |= {name: rewriting.shaped(graph, root, (rows, columns)) for name, (root, rows, columns) in tables}
        made = rewriting.call_task(graph, task, operands, result, [out])
        attended = rewriting.output(graph, made, 0, result)
        for written in match.written or ():
            graph.call_function(schema.overload("after_"), (written.cache, attended))
        replacement = rewriting.shaped(graph, attended, wanted)
    result.replace_all_uses_with(replacement)
    for written in match.written or ():
        graph.erase_node(written.copy)
    return made


def left_alone(graph: fx.Graph, devices: tuple[str, ...]) -> list[fx.Node]:
    """Returns what attends with one query for each sequence and is no call of ours, on these types of devices: torch's
    attention ops, and the softmax of attention that is written out.
    """
    found = []
    for target in (*SDPA, *SOFTMAX):
        for node in graph.find_nodes(op="call_function", target=target):
            read = proofs.fake(proofs.operand(node))
            one_query = read.ndim == 4 and proofs.known_equal(read.shape[2], 1)
            over_tokens = target in SDPA or node.args[1] in (-1, 3, [-1], [3])
            several = one_query and not proofs.known_equal(read.shape[3], 1)
            if several and over_tokens and read.device.type in devices:
                found.append(node)
    return found


def attend_within(graph: fx.Graph, options: Options, devices: tuple[str, ...]) -> int:
    """Puts a call in the place of every such attention on these types of devices; returns how many."""
    if not takes_local(graph, PATTERN, options):
        return 0
    replaced, masks = [], MaskOperands(graph)
    for node in list(graph.nodes):
        if (match := find_attention(node, devices)) is not None:
            rewrite(graph, match, masks, options)
            replaced.append(match.attention.result)
    needed = proofs.reached(replaced, lambda node: node.all_input_nodes)
    rewriting.erase_unused(graph, [node for node in needed if node.op == "call_function"])
    return len(replaced)


def cached_attention(graph: fx.Graph, *, options: Options) -> int:
    """Puts a call in the place of every attention of a decode step to a rank's own cache on a GPU; returns how many."""
    return attend_within(graph, options, GPUS)
