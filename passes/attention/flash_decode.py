"""Decode attention, the gathers of its parts, and their merging become one `ditron::flash_decode`.

Before, for one query per sequence and a cache that is sharded along the tokens, in any equivalent form (see
`softmax_algebra`):

    q [B, Hq, D], k [B, S, Hkv, D] -> scores * scale -> (where arange(S) < lengths) -> softmax -> @ v = o [B, Hq, D]
                                                                                    -> logsumexp = lse [B, Hq]
    o -> all_gather_into_tensor, lse -> all_gather_into_tensor
      -> softmax of all ranks' lse, * all ranks' o -> sum over the ranks = out [B, Hq, D]

docs/attention.md lists the forms. After:

    q, k, v, lengths -> ditron.flash_decode -> getitem 0 = out

The proof has three steps. First, o is exactly sum(exp(c x) v) / sum(exp(c x)), and lse is the logarithm of the same
sum, over scores x of the same product. Second, the same holds for what is computed from the two gathered tensors.
Third, the dimensions of query, keys and values have the roles that the node gives them. The call takes the place of the
first of the two gathers.

It must not fire when
* the parts of other ranks, or anything computed from them, are used elsewhere;
* a size is dynamic, or the result is wanted in another dtype than that of the query, before it is rounded;
* there is another mask than that of lengths, dropout, or causal order among several queries.

The mask may compare the tokens' places in the whole cache, arange(rank * S, (rank + 1) * S). Each rank then reduces the
lengths by its own first place, so the call is the same on all ranks.

All sizes except S, the form of the mask, and the ops have to be the same on all ranks, as those of one program are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.attention.attention_parts import GatheredParts, PartAlgebra, Ranks, Scores, calls_of_parts
from ditron_inductor.passes.attention.roots import Moved, Root
from ditron_inductor.passes.attention.softmax_algebra import Axes, Symbol, Unknown, static_shape
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import ALL_GATHER, Collective, collectives, read_collective
from ditron_inductor.passes.graph.reasons import ReasonCode, Refused, leave_alone, refused
from ditron_inductor.task.nodes import FlashDecode
from ditron_inductor.task.torch_dtypes import ACTIVATION_DTYPES

aten = torch.ops.aten
prims = torch.ops.prims

PATTERN = FlashDecode.kind


@dataclass(frozen=True)
class Match:
    """The operands as [B, Hq, D] and [B, S, Hkv, D] (see `_Operand`). merged: the result, which the call replaces.
    gathers: those of o and of lse, or one gather of both.
    """

    gathers: tuple[Collective, ...]
    merged: fx.Node
    q: _Operand
    k: _Operand
    v: _Operand
    lengths: tuple[fx.Node, int] | None
    scale: float


@dataclass(frozen=True)
class _Operand:
    """A tensor, and the views that give it its dimensions."""

    node: fx.Node
    views: Moved


def find_parts(attention: PartAlgebra, gathers: Sequence[Collective]) -> list[GatheredParts]:
    """Finds the gathers of o and lse of the same attention."""
    outputs: list[tuple[Symbol, fx.Node, Collective]] = []
    sums: dict[Symbol, tuple[fx.Node, Collective]] = {}
    found: list[GatheredParts] = []
    for gather in gathers:
        members = _joined(gather.operand)
        read = [_read_part(attention, member) for member in members or [gather.operand]]
        if members is not None:
            if read[0] == (True, read[1][1]) and read[1][0] is False and read[1][1] is not None:
                found.append(GatheredParts(members[0], members[1], (gather,)))
            continue
        ((is_output, total),) = read
        if total is not None and is_output:
            outputs.append((total, gather.operand, gather))
        elif total is not None:
            sums[total] = gather.operand, gather
    for total, output, gather in outputs:
        if total in sums:
            logsum, other = sums[total]
            found.append(GatheredParts(output, logsum, (gather, other)))
    return found


def _joined(node: fx.Node) -> list[fx.Node] | None:
    """Two tensors side by side in the last dimension, the second one a column; None for any other node."""
    if node.target is not aten.cat.default:
        return None
    bound, value = proofs.arguments(node), proofs.tensor(node)
    members = bound["tensors"]
    if value is None or value.ndim < 2 or bound["dim"] % value.ndim != value.ndim - 1 or len(members) != 2:
        return None
    column = proofs.tensor(members[1])
    return list(members) if column is not None and proofs.known_equal(column.shape[-1], 1) else None


def _read_part(attention: PartAlgebra, node: fx.Node) -> tuple[bool, Symbol | None]:
    """Returns (whether a tensor is an attention's output, not its log-sum-exp; the sum of its weights, or None)."""
    try:
        value = attention.algebra.value(node)
    except Unknown:
        return False, None
    powers = dict(value.power)
    total = next((symbol for symbol in powers if symbol[0] == "Z"), None)
    if total is None:
        return False, None
    if value.is_log:
        return False, total if powers == {total: 1.0} else None
    output = next((symbol for symbol in powers if symbol[0] == "N" and symbol[1:3] == total[1:]), None)
    return True, total if output is not None and powers == {output: 1.0, total: -1.0} else None


def prove(attention: PartAlgebra, parts: GatheredParts) -> Match | Refused:
    """The match of gathered parts, or why there is none."""
    if len({(gather.group_name, gather.world_size) for gather in parts.gathers}) > 1:
        return ReasonCode.DECODE_MERGE
    try:
        ranks = attention.gather(parts)
    except Unknown as unknown:
        return ReasonCode.DECODE_FORM.at(unknown.node)
    merged = _find_merged(attention, ranks, parts)
    if refused(merged):
        return merged
    operands = _operands(attention, parts, merged)
    if operands is None:
        return ReasonCode.DECODE_FORM
    q, k, v, lengths, scale = operands
    dtypes = {proofs.tensor(root.node).dtype for root in (q, k, v)}  # type: ignore[union-attr]
    if len(dtypes) > 1:
        return ReasonCode.MIXED_DTYPES
    (dtype,) = dtypes
    if dtype not in ACTIVATION_DTYPES:
        return ReasonCode.DTYPE
    if not proofs.wanted_in(merged, dtype):
        return ReasonCode.CAST_BETWEEN.at(merged)
    if lengths is not None and proofs.fake(lengths[0]).device != proofs.fake(q.node).device:
        # A number on the host may be compared with a range on a GPU.
        return ReasonCode.DECODE_FORM.at(lengths[0])
    launch = _first(parts.gathers)
    needed = [root.node for root in (q, k, v)] + ([lengths[0]] if lengths else [])
    if not all(rewriting.can_hoist(operand, launch) for operand in needed):
        return ReasonCode.OPERAND_LATE
    return Match(parts.gathers, merged, q, k, v, lengths, scale)


def _find_merged(attention: PartAlgebra, ranks: Ranks, parts: GatheredParts) -> fx.Node | Refused:
    """Returns the node that merges all parts. Nothing else uses the parts."""
    total: Symbol = ("Z", 1.0, ranks)
    wanted = {("N", 1.0, ranks, ranks): 1.0, total: -1.0}
    reached = {gather.wait for gather in parts.gathers}
    merged: fx.Node | None = None
    for node in parts.output.graph.nodes:
        if node in reached or not reached.intersection(node.all_input_nodes):
            continue
        if merged is None:
            try:
                value = attention.algebra.value(node)
            except Unknown:
                value = None
            if value is not None and not value.is_log and dict(value.power) == wanted:
                merged = node
                continue
        reached.add(node)
    if merged is None:
        return ReasonCode.DECODE_MERGE
    needed = set(proofs.ancestors(merged))
    other = next((node for node in reached if node not in needed), None)
    return merged if other is None else ReasonCode.DECODE_MERGE.at(other)


def _operands(
    attention: PartAlgebra, parts: GatheredParts, merged: fx.Node
) -> tuple[_Operand, _Operand, _Operand, tuple[fx.Node, int] | None, float] | None:
    """Returns q, k, v, lengths and scale if every dimension has its role."""
    atoms = attention.atoms
    part = attention.algebra.value(parts.output)
    _, scale, origin, values = next(symbol for symbol in part.power if symbol[0] == "N")
    assert isinstance(origin, Scores) and isinstance(values, Root)
    query, dim = sum(atoms.of(origin.query.axes), ()), atoms.flat(origin.dim)
    tokens = atoms.flat((origin.atom,))
    keys = set(sum(atoms.of(origin.keys.axes), ())) - set(dim) - set(tokens)
    shared = [atom for atom in query if atom in keys]
    if len(dim) != 1 or len(tokens) != 1 or len(shared) != len(keys) or len(shared) > 2:
        return None
    lengths = origin.lengths
    batch, heads = (shared[:1], shared[1:])
    if lengths is not None:
        of_lengths = sum(atoms.of(lengths[1]), ())
        if of_lengths not in ((), tuple(batch)) or (len(shared) == 2 and not of_lengths):
            return None
        if not of_lengths:
            batch, heads = [], shared
    group = [atom for atom in query if atom not in (*shared, *dim)]
    if query != (*shared, *group, *dim):
        return None
    result = sum(atoms.of(attention.algebra.value(merged).axes), ())
    wide = [atom for atom in sum(atoms.of(values.axes), ()) if atom not in (*shared, *tokens)]
    if len(wide) != 1 or result != (*shared, *group, *wide) or atoms.size(wide[0]) != atoms.size(dim[0]):
        return None

    def size(of: Sequence[int]) -> int:
        return math.prod(atoms.size(atom) for atom in of)

    B, Hkv, G, D, S = size(batch), size(heads), size(group), size(dim), size(tokens)
    q = _operand(origin.query, tuple(range(len(origin.query.axes))), (B, Hkv * G, D))
    caches = []
    for root, last in ((origin.keys, dim), (values, wide)):
        dims = _placed(atoms.of(root.axes), (tuple(batch), tokens, tuple(heads), tuple(last)))
        if dims is None:
            return None
        caches.append(_operand(root, dims, (B, S, Hkv, D)))
    return q, caches[0], caches[1], None if lengths is None else (lengths[0], lengths[2]), scale


def _operand(root: Root, dims: tuple[int, ...], shape: tuple[int, ...]) -> _Operand:
    """Returns a tensor with its dimensions in the order `dims`, and then of this shape."""
    return _Operand(root.node, Moved(static_shape(root.node), dims, shape))


def _placed(axes: Axes, wanted: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Returns the dimensions of these axes in this order, then those of size 1, which change no stride there."""
    present = [axis for axis in wanted if axis]
    ones = [dim for dim, axis in enumerate(axes) if not axis]
    if len(present) + len(ones) != len(axes) or any(axes.count(axis) != 1 for axis in present):
        return None
    return (*(axes.index(axis) for axis in present), *ones)


def _first(gathers: Sequence[Collective]) -> fx.Node:
    return min(gather.node for gather in gathers)


def rewrite(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    """Replaces the match by one op call and returns that call."""
    group, launch = match.gathers[0], _first(match.gathers)
    for operand in (match.q.node, match.k.node, match.v.node, *((match.lengths[0],) if match.lengths else ())):
        rewriting.hoist(operand, launch)
    shape = match.q.views.shape
    site, policy = rewriting.UNNAMED_SITE, rewriting.policy(options)
    task = FlashDecode(match.scale, 0.0, group.world_size, group.group_name, site, policy)
    like: torch.Tensor = match.q.node.meta["val"]
    out = rewriting.fake_like(like, shape, rewriting.contiguous_strides(shape))
    with graph.inserting_before(launch):
        given = zip("qkv", (match.q, match.k, match.v), strict=True)
        operands = {name: operand.views.insert(graph, operand.node) for name, operand in given}
        operands["lengths"] = _inserted_lengths(graph, match, shape[0])
        values = (out, rewriting.new_token(like))
        call = rewriting.call_task(graph, task, operands, match.merged, values)
        result = rewriting.output(graph, call, 0, match.merged)
    merged: torch.Tensor = match.merged.meta["val"]
    with graph.inserting_before(match.merged):
        result = rewriting.computed(graph, aten.reshape.default, (result, list(merged.shape)), match.merged)
        if merged.dtype != like.dtype:
            result = rewriting.computed(graph, prims.convert_element_type.default, (result, merged.dtype), match.merged)
    match.merged.replace_all_uses_with(result)
    rewriting.erase_unused(graph, [node for node in proofs.ancestors(match.merged) if node.op == "call_function"])
    return call


def _inserted_lengths(graph: fx.Graph, match: Match, batch: int) -> fx.Node:
    """Inserts the lengths, int32 [B], from 0 to the size of the cache: those that the mask compares with, or
    the size.
    """
    origin = match.q.node
    if match.lengths is None:
        device = origin.meta["val"].device
        kept = {"dtype": torch.int32, "device": device, "pin_memory": False}
        args = ([batch], match.k.views.shape[1])
        node = rewriting.call(graph, aten.full.default, args, origin, (batch,), dtype=torch.int32)
        node.kwargs = kept
        return node
    node, more = match.lengths
    if tuple(node.meta["val"].shape) != (batch,):
        node = rewriting.computed(graph, aten.reshape.default, (node, [batch]), node)
    dtype = node.meta["val"].dtype
    if more or dtype != torch.int32:
        # The mask compares whole numbers of 64 bits, of which the program may have the largest ones as "no limit".
        node = rewriting.computed(graph, prims.convert_element_type.default, (node, torch.int64), node)
        # Inductor has no lowering for `clamp`, and nothing is decomposed any more.
        node = rewriting.computed(graph, aten.clamp_min.default, (node, -more), node)
        node = rewriting.computed(graph, aten.clamp_max.default, (node, match.k.views.shape[1] - more), node)
        node = rewriting.computed(graph, aten.add.Tensor, (node, more), node) if more else node
        node = rewriting.computed(graph, prims.convert_element_type.default, (node, torch.int32), node)
    return node


def _leave_others_alone(gathers: Sequence[Collective]) -> None:
    """Gives a reason to the gathers of the output and the log-sum-exp of a call of torch's whose form is not proved."""
    calls = {gather.node: calls_of_parts(gather.operand) for gather in gathers}
    summed = {call for outputs in calls.values() for call, index in outputs if index == 1}
    for gather in gathers:
        call = next((call for call, _ in calls[gather.node] if call in summed), None)
        if call is not None:
            leave_alone(gather.node, PATTERN, ReasonCode.DECODE_FORM.at(call))


def _prove_again(parts: GatheredParts) -> Match | Refused:
    """Does what `prove` does after other matches were rewritten: the queries may be the result of one of them."""
    attention = PartAlgebra()
    gathers = [read_collective(gather.node) for gather in parts.gathers]
    found = find_parts(attention, [gather for gather in gathers if isinstance(gather, Collective)])
    return prove(attention, found[0]) if len(found) == 1 else ReasonCode.DECODE_FORM


def flash_decode(graph: fx.Graph, *, options: Options) -> int:
    """Fuses every provable decode attention with the gathers of its parts; returns how many. Others get a reason."""
    found = [read_collective(node) for node in collectives(graph, ALL_GATHER)]
    gathers = [gather for gather in found if isinstance(gather, Collective)]
    attention = PartAlgebra()
    count = 0
    all_parts = find_parts(attention, gathers)
    proved = {gather.node for parts in all_parts for gather in parts.gathers}
    _leave_others_alone([gather for gather in gathers if gather.node not in proved])
    for parts in all_parts:
        match = prove(attention, parts) if count == 0 else _prove_again(parts)
        if not refused(match) and PATTERN not in options.fusions:
            match = ReasonCode.DISABLED
        if refused(match):
            for gather in parts.gathers:
                leave_alone(gather.node, PATTERN, match)
            continue
        rewrite(graph, match, options)
        count += 1
    return count
