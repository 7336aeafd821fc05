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
Keys and values may be repeated for the query heads that share them; then the cache itself is read. Sequences may have
positions of their own, and caches their tokens in front of their heads (see cache_writes.py). If caches are gathered by
a block table, the call reads the blocks where they are (see cache_blocks.py), and they are written in the graph.
Attention with sinks may be written out (see sunk_attention.py).

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
from ditron_inductor.passes.attention.cache_blocks import Blocks, read_blocks
from ditron_inductor.passes.attention.cache_writes import CacheWrite, read_write, whole
from ditron_inductor.passes.attention.mask_bounds import MaskOperands
from ditron_inductor.passes.attention.rotary import Rotation, read_rotation
from ditron_inductor.passes.attention.step_attention import StepAttention, read_step
from ditron_inductor.passes.attention.sunk_attention import read_sunk
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.launches import takes_local
from ditron_inductor.passes.graph.same_values import same_value
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import HEAD_DIMS, CachedAttention
from ditron_inductor.task.torch_dtypes import ACTIVATION_DTYPES

aten = torch.ops.aten

PATTERN = CachedAttention.kind
GPUS = ("cuda",)
SOFTMAX = (aten.amax.default, aten._softmax.default)
"""A softmax that is written out begins with the largest of its scores."""


@dataclass(frozen=True)
class Match:
    """An attention and what precedes it. written: the writes of its caches, if the call makes them. blocks: the blocks
    of its caches, if they are paged. turned: the Rotations of the query and of the new key.
    """

    attention: StepAttention
    written: tuple[CacheWrite, CacheWrite] | None = None
    blocks: tuple[Blocks, Blocks] | None = None
    turned: tuple[Rotation, ...] = ()

    def caches(self, graph: fx.Graph) -> dict[str, fx.Node | None]:
        """Inserts the views of the caches that the call takes, and returns them by their names there."""
        found: dict[str, fx.Node | None] = {"keys": self.attention.keys, "values": self.attention.values}
        if self.written is not None:
            for name, written in zip(found, self.written, strict=True):
                found[name] = written.insert_view(graph)
        if self.blocks is not None:
            for name, one in zip(found, self.blocks, strict=True):
                found[name] = one.view.insert(graph, one.cache)
            table = rewriting.shaped(graph, self.blocks[0].table, self.blocks[0].shape)
            rows = proofs.row_major(proofs.fake(table))
            found["block_table"] = table if rows else rewriting.row_major_copy(graph, table, table)
        return found


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
    return _with_rotations(_with_writes(_with_blocks(Match(attention))))


def _with_blocks(match: Match) -> Match:
    """Returns a match with the blocks of its caches, if they are gathered by one table."""
    keys, values = (read_blocks(cache) for cache in (match.attention.keys, match.attention.values))
    if keys is None or values is None or keys.shape != values.shape or keys.view.shape != values.view.shape:
        return match
    return replace(match, blocks=(keys, values)) if same_value(keys.table, values.table) else match


def _with_writes(match: Match) -> Match:
    """Returns a match with the writes of its caches, if the call can make them."""
    attention = match.attention
    keys, values = (read_write(cache, attention) for cache in (attention.keys, attention.values))
    if keys is None or values is None or keys.cache is values.cache:
        return match
    if not _same_places(keys.position, values.position):
        return match
    choice = attention.choice
    if choice.lengths is not None and not _follows(choice.lengths, choice.more, keys.position):
        return match
    return replace(match, written=(keys, values))


def _same_places(left: fx.Node, right: fx.Node) -> bool:
    """Returns whether two vectors, or numbers, are the same one, perhaps in other shapes or repeated."""
    first, other = whole(left), whole(right)
    return first is not None and other is not None and same_value(first.node, other.node)


def _follows(lengths: fx.Node, more: int, position: fx.Node) -> bool:
    """Returns whether lengths + more are positions plus 1."""
    if more == 0 and lengths.target is aten.add.Tensor and lengths.args[1] == 1 and not lengths.kwargs:
        lengths, more = proofs.operand(lengths), 1
    return more == 1 and _same_places(lengths, position)


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
        attention.scale, choice.mask, appends, rotated, more, sinks is not None, match.blocks is not None,
        options.strategy,
    )  # fmt: skip
    news = [] if match.written is None else [one.new for one in match.written]
    heads_of = [attention.query, *news]
    for index, rotation in enumerate(match.turned):
        heads_of[index] = rotation.x
    like, wanted = proofs.fake(attention.query), tuple(proofs.fake(result).shape)
    out = rewriting.fake_like(like, (B, heads, D), rewriting.contiguous_strides((B, heads, D)))
    with graph.inserting_before(result):
        q, *new = (rewriting.shaped(graph, node, (B, -1, D)) for node in heads_of)
        operands: dict[str, fx.Node | None] = {"q": q, **match.caches(graph)}
        if choice.lengths is not None:
            lengths = choice.lengths if match.written is None else match.written[0].position
            operands["lengths"] = _as_vector(graph, lengths)
        operands |= masks.of(choice, S)
        if sinks is not None:
            operands["sinks"] = sinks
        if match.written is not None:
            position = _as_vector(graph, match.written[0].position)
            operands |= {"position": position, "key": new[0], "value": new[1]}
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


def _as_vector(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return rewriting.shaped(graph, node, (proofs.fake(node).numel(),))


def left_alone(graph: fx.Graph, devices: tuple[str, ...]) -> list[fx.Node]:
    """Returns what attends with one query for each sequence and is no call of ours, on these types of devices: torch's
    attention ops, and the softmax of attention that is written out.
    """
    found = []
    for target in (*SDPA, *SOFTMAX):
        for node in graph.find_nodes(op="call_function", target=target):
            read = proofs.fake(proofs.operand(node))
            one_query = read.ndim == 4 and proofs.known_equal(read.shape[2], 1)
            over_tokens = target in SDPA or proofs.arguments(node)["dim"] in (-1, 3, [-1], [3])
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
