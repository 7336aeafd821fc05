"""cached_attention: attention of one query per sequence over a cache that this rank has whole.

Problem. Between the projections and the attention of a decode step there are launches that do next to nothing: one
turns the query, one turns the key and stores it, one stores the value, one writes a mask. Algorithm. There are two
kernels. In the first one each program attends to a piece of a sequence's cache for the query heads that share a key
head (see decode_attention/split_attention.py). It turns these heads as it loads them. The program of the first piece
turns the new key as well, stores key and value, and adds their token to its sums, so nobody reads them from the cache.
It also adds the sinks, which are scores of no token.
In the second kernel each program merges the pieces of a query head. If there is one piece, the first kernel stores the
result. Nothing is communicated, and no program waits. Limits. Heads have one of `HEAD_DIMS` elements. Anything else is
computed by torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ditron_inductor.core.overlap import let_next_begin
from ditron_inductor.device.streams import handle_for
from ditron_inductor.lowering.decode_attention.decode_config import (
    INTERPRETED_SPLITS,
    are_far,
    count_splits,
    deal,
    select_config,
)
from ditron_inductor.lowering.decode_attention.split_attention import (
    Counts,
    How,
    NewToken,
    Strides,
    TokenSpan,
    Work,
    attend,
    cut_splits,
    is_usual,
    load_query,
    store_part,
    to_base_2,
)
from ditron_inductor.lowering.host.launch import dot_precision
from ditron_inductor.lowering.host.launcher import Arguments, local_launcher
from ditron_inductor.lowering.host.local_calls import LocalCalls, facts_of
from ditron_inductor.lowering.overlapping import overlap_for
from ditron_inductor.task import cached_attention as reference
from ditron_inductor.task.nodes import HEAD_DIMS, CachedAttention
from ditron_inductor.task.torch_dtypes import ACTIVATION_DTYPES

BLOCKS_OF_ONE_SPLIT = 4
"""A cache of so few blocks is not split: on an H200 256 tokens take 6.2 us in one split, and 6.8 in two."""
MERGE_WARPS = 4
MOST_APART = (1 << 31) - 1
"""The most elements between the first and the last token that are loaded together, in 32 bits."""
MERGED_AT_ONCE, INTERPRETED_AT_ONCE = 32, 2
"""The most splits that are loaded together."""
Runner = Callable[..., list[torch.Tensor]]
"""A function of the operands that `CachedAttention.split` returns."""


class Tensors(NamedTuple):
    """Pointers to the operands of the node in their order there, to the result and to memory for the parts of splits.
    k and v are the caches; new_k and new_v are of the new token. What the node does not have is any pointer.
    """

    q: Any
    k: Any
    v: Any
    block_table: Any
    lengths: Any
    shown: Any
    bias: Any
    begin: Any
    end: Any
    sinks: Any
    position: Any
    new_k: Any
    new_v: Any
    cos: Any
    sin: Any
    out: Any
    partials: Any


class Sizes(NamedTuple):
    """The tokens that a sequence's cache has room for, and the number of caches, or of blocks; the Strides of query and
    caches; those of the new key and value (batch, head); and the distances between the sequences' rows of angles,
    lengths, masks, biases, first and last tokens, and positions, 0 if they have them in common.
    """

    capacity: Any
    pages: Any
    strides: Any
    new_k: Any
    new_v: Any
    angles: Any
    lengths: Any
    shown: Any
    bias: Any
    bounds: Any
    position: Any


class NodeParts(NamedTuple):
    """What a node asks for: whether tokens are counted, are marked, have a bias; whether there are sinks; a number to
    add to the lengths; whether a token is appended, the angles of a row (0 if nothing is turned), whether there is one
    split, and the OVERLAP of the launches (core/overlap.py).
    """

    COUNTED: Any
    MARKED: Any
    BIASED: Any
    SINKS: Any
    ADDED: Any
    APPENDS: Any
    ANGLES: Any
    ONE_SPLIT: Any
    OVERLAP: Any


@triton.jit
def tokens_of(tensors, batch, sizes, HOW: tl.constexpr, NODE: tl.constexpr):
    """Returns (the first token of a sequence that may be attended to; how many of them stand behind each other)."""
    begin = 0
    length = sizes.capacity
    # A sequence is never longer than its cache, even if a tensor says so.
    if NODE.COUNTED:
        # The largest number of its dtype may stand for no limit, so nothing is added to it.
        length = tl.minimum(tl.load(tensors.lengths + batch * sizes.lengths).to(tl.int64), sizes.capacity)
        length = tl.minimum(tl.maximum(length + NODE.ADDED, 0), sizes.capacity).to(tl.int32)
    if NODE.MARKED or NODE.BIASED:
        # From a multiple of 16 on, marks can be loaded together. A block of tokens that lies in a page stays in it.
        ALIGNED: tl.constexpr = HOW.BLOCK_N if HOW.PAGE > 0 and HOW.PAGE % HOW.BLOCK_N == 0 else 16
        begin = tl.maximum(tl.load(tensors.begin + batch * sizes.bounds), 0) // ALIGNED * ALIGNED
        end = tl.minimum(tl.load(tensors.end + batch * sizes.bounds), sizes.capacity)
        length = tl.maximum(end - begin, 0)
    return begin, length


@triton.jit
def angles_of(tensors, batch, sizes, HEAD_DIM: tl.constexpr, NODE: tl.constexpr):
    """Returns (cosines, sines) of a sequence's angles [HEAD_DIM]; the sines of the first half are negated."""
    dims = tl.arange(0, HEAD_DIM)
    at = batch.to(tl.int64) * sizes.angles + dims % NODE.ANGLES
    sin = tl.load(tensors.sin + at).to(tl.float32)
    return tl.load(tensors.cos + at).to(tl.float32), tl.where(dims < HEAD_DIM // 2, -sin, sin)


@triton.jit
def turned_query(tensors, batch, row, sizes, HOW: tl.constexpr, NODE: tl.constexpr):
    """Loads ROWS query heads from `row` on as [BLOCK_ROWS, HEAD_DIM], padded by zeros, and turns them."""
    ROWS: tl.constexpr = HOW.ROWS
    BLOCK_ROWS: tl.constexpr = HOW.BLOCK_ROWS
    HEAD_DIM: tl.constexpr = HOW.HEAD_DIM
    query = load_query(tensors.q, sizes.strides.q, batch, row, ROWS, BLOCK_ROWS, HEAD_DIM)
    if NODE.ANGLES > 0:
        swapped = load_query(tensors.q, sizes.strides.q, batch, row, ROWS, BLOCK_ROWS, HEAD_DIM, True)
        cos, sin = angles_of(tensors, batch, sizes, HEAD_DIM, NODE)
        turned = query.to(tl.float32) * cos[None, :] + swapped.to(tl.float32) * sin[None, :]
        query = turned.to(tensors.q.dtype.element_ty)
    return query


@triton.jit
def new_token(tensors, batch, kv_head, split, part, sizes, HOW: tl.constexpr, NODE: tl.constexpr):
    """Returns the NewToken of a sequence. The program of the first split and the first part of a key head stores it."""
    HEAD_DIM: tl.constexpr = HOW.HEAD_DIM
    dims = tl.arange(0, HEAD_DIM)
    given = tl.load(tensors.position + batch * sizes.position)
    place = tl.where(given < 0, given + sizes.capacity, given)
    exists = (place >= 0) & (place < sizes.capacity)
    is_here = split == 0
    if NODE.COUNTED:
        is_here &= given >= 0
    if NODE.MARKED:
        is_here &= tl.load(tensors.shown + batch.to(tl.int64) * sizes.shown + place, mask=exists, other=1) != 0
    bias = 0.0
    if NODE.BIASED:
        bias_at = tensors.bias + batch.to(tl.int64) * sizes.bias + place
        bias = to_base_2(tl.load(bias_at, mask=exists, other=0.0).to(tl.float32))
    key_at = tensors.new_k + batch.to(tl.int64) * sizes.new_k[0] + kv_head * sizes.new_k[1]
    value_at = tensors.new_v + batch.to(tl.int64) * sizes.new_v[0] + kv_head * sizes.new_v[1]
    key = tl.load(key_at + dims)
    value = tl.load(value_at + dims)
    if NODE.ANGLES > 0:
        swapped = tl.load(key_at + (dims + HEAD_DIM // 2) % HEAD_DIM).to(tl.float32)
        cos, sin = angles_of(tensors, batch, sizes, HEAD_DIM, NODE)
        key = (key.to(tl.float32) * cos + swapped * sin).to(tensors.k.dtype.element_ty)
    stores = (split == 0) & (part == 0) & exists & (dims >= 0)
    k, v = sizes.strides.k, sizes.strides.v
    first = batch.to(tl.int64)
    tl.store(tensors.k + first * k[0] + place * k[1] + kv_head.to(tl.int64) * k[2] + dims, key, mask=stores)
    tl.store(tensors.v + first * v[0] + place * v[1] + kv_head.to(tl.int64) * v[2] + dims, value, mask=stores)
    # If the cache has no such place, nothing is written, and the result is no number.
    value = tl.where(exists, value.to(tl.float32), float("nan"))
    return NewToken(key, value, place, is_here, bias)


@triton.jit
def sinks_of(tensors, row, split, HOW: tl.constexpr):
    """Returns (the sinks of ROWS query heads from `row` on, to the base 2; whether this split counts them)."""
    rows = tl.arange(0, HOW.BLOCK_ROWS)
    sinks = tl.load(tensors.sinks + row + rows, mask=rows < HOW.ROWS, other=0.0).to(tl.float32)
    return to_base_2(sinks), split == 0


@triton.jit
def span_beside(sinks, span, split, used, capacity, HOW: tl.constexpr):
    """Returns the TokenSpan of a split: `span`, or blocks of the whole cache if one of the sinks is so low that tokens
    that a bias hides have weights too. sinks: the result of `sinks_of`.
    """
    usual = is_usual(sinks[0])
    begin = tl.where(usual, span.begin, split * HOW.BLOCK_N)
    return TokenSpan(begin, tl.where(usual, span.end, capacity), tl.where(usual, span.step, used * HOW.BLOCK_N))


@triton.jit(do_not_specialize=["heads", "kv_heads", "splits"])
def cached_attention_kernel(tensors, heads, kv_heads, splits, sizes, HOW: tl.constexpr, NODE: tl.constexpr):
    """Attends to one split of one piece of query heads; see the module."""
    let_next_begin(NODE.OVERLAP)
    head = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    part = head % HOW.PARTS
    batch = head // (kv_heads * HOW.PARTS)
    kv_head = head // HOW.PARTS % kv_heads
    row = (kv_head * HOW.PARTS + part) * HOW.ROWS
    query = turned_query(tensors, batch, row, sizes, HOW, NODE)
    token = new_token(tensors, batch, kv_head, split, part, sizes, HOW, NODE) if NODE.APPENDS else None
    begin, length = tokens_of(tensors, batch, sizes, HOW, NODE)
    used, per_split = cut_splits(length, splits, HOW.BLOCK_N, HOW.LEAST_BLOCKS)
    counts = Counts(heads, kv_heads, splits, sizes.capacity, sizes.pages)
    work = Work(tensors.q, tensors.k, tensors.v, None, tensors.block_table, tensors.partials, None, counts)
    if split < used:
        first = begin + split * per_split
        span = TokenSpan(first, tl.minimum(first + per_split, begin + length), HOW.BLOCK_N)
        shown = tensors.shown + batch.to(tl.int64) * sizes.shown if NODE.MARKED else None
        bias = tensors.bias + batch.to(tl.int64) * sizes.bias if NODE.BIASED else None
        sinks = sinks_of(tensors, row, split, HOW) if NODE.SINKS else None
        if NODE.BIASED:
            span = span_beside(sinks, span, split, used, sizes.capacity, HOW)
        hides: tl.constexpr = NODE.MARKED or NODE.BIASED
        o, lse = attend(query, work, sizes.strides, batch, kv_head, span, HOW, token, shown, bias, sinks, hides)
        if hides:
            if tl.max(tl.max((o != o).to(tl.int32), 1), 0) != 0:
                # Hidden tokens may have values that are no numbers: once more, without them.
                o, lse = attend(query, work, sizes.strides, batch, kv_head, span, HOW, token, shown, bias, sinks)
        if NODE.ONE_SPLIT:
            rows = tl.arange(0, HOW.BLOCK_ROWS)
            at = (head.to(tl.int64) * HOW.ROWS + rows)[:, None] * HOW.HEAD_DIM + tl.arange(0, HOW.HEAD_DIM)[None, :]
            inside = (rows < HOW.ROWS)[:, None] & (at >= 0)
            tl.store(tensors.out + at, o.to(tensors.out.dtype.element_ty), mask=inside)
        else:
            store_part(o, lse, tensors.partials, counts, tl.program_id(0), HOW)


@triton.jit(do_not_specialize=["heads", "kv_heads", "splits"])
def merge_kernel(
    tensors, heads, kv_heads, splits, sizes, HOW: tl.constexpr, NODE: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    """Merges the splits of one query head, AT_ONCE together."""
    let_next_begin(NODE.OVERLAP)
    HEAD_DIM: tl.constexpr = HOW.HEAD_DIM
    ROWS: tl.constexpr = HOW.ROWS
    head = tl.program_id(0) // ROWS
    _, length = tokens_of(tensors, head // (kv_heads * HOW.PARTS), sizes, HOW, NODE)
    used, _ = cut_splits(length, splits, HOW.BLOCK_N, HOW.LEAST_BLOCKS)
    lses = tensors.partials + (heads * splits).to(tl.int64) * (ROWS * HEAD_DIM)
    dims = tl.arange(0, HEAD_DIM)
    most = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((HEAD_DIM,), dtype=tl.float32)
    for first in range(0, used, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        there = split < used
        place = (head * splits + split).to(tl.int64) * ROWS + tl.program_id(0) % ROWS
        lse = tl.load(lses + place, mask=there, other=float("-inf"))
        at = place[:, None] * HEAD_DIM + dims[None, :]
        o = tl.load(tensors.partials + at, mask=there[:, None] & (at >= 0), other=0.0)
        largest = tl.maximum(most, tl.max(lse, 0))
        known = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp2(lse - known)
        kept = tl.exp2(most - known)
        total = total * kept + tl.sum(weights, 0)
        acc = acc * kept + tl.sum(weights[:, None] * o, 0)
        most = largest
    # The test is not `> 0`, because NaN has to stay NaN.
    out = acc / tl.where(total != 0.0, total, 1.0)
    tl.store(tensors.out + tl.program_id(0).to(tl.int64) * HEAD_DIM + dims, out.to(tensors.out.dtype.element_ty))


def rows_apart(x: torch.Tensor | None) -> int:
    """Returns the distance of the rows of different sequences, 0 if they have one in common."""
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


def prepare(node: CachedAttention, *operands: Any) -> Runner:
    """Returns what attends for operands of these forms: the kernels if they can run, and otherwise torch. In the
    interpreter, which is slow, the kernels run only if `tile` is forced.
    """
    *given, strategy = operands
    q, keys, values, table, lengths, shown, bias, begin, _, sinks, position, key, value, cos, sin = given
    device = q.device
    B, query_heads, head_dim = q.shape
    pages, kv_heads, page = keys.shape[:3]
    capacity = page if table is None else page * table.shape[1]
    right = head_dim in HEAD_DIMS and q.dtype in ACTIVATION_DTYPES and capacity > 0 and pages > 0 and B > 0
    # Of lengths and positions each is loaded by itself.
    rows = [x for x in given if x is not None and x is not lengths and x is not position]
    in_rows = all(x.shape[-1] == 1 or x.stride(-1) == 1 for x in rows)
    if strategy == "library" or (device.type == "cpu" and strategy != "tile") or not right or not in_rows:
        return by_library(node)
    facts = facts_of(device)
    if facts.tile_problem or rows_apart(cos) != rows_apart(sin):
        return by_library(node)
    interpreted = device.type == "cpu"
    heads = deal(B, query_heads, kv_heads)
    config = select_config(head_dim=head_dim, dtype=q.dtype, interpreted=interpreted)
    config = replace(config, least_blocks=1).for_arch(facts.arch)
    if config.block_n * max(keys.stride(2), values.stride(2)) > MOST_APART:
        return by_library(node)
    programs = INTERPRETED_SPLITS if interpreted else config.programs(heads.heads, facts.num_sms)
    splits = count_splits(heads.heads, capacity, programs, config)
    if capacity <= config.block_n * (1 if interpreted else BLOCKS_OF_ONE_SPLIT):
        splits = 1
    how = How(
        ROWS=heads.rows,
        BLOCK_ROWS=heads.block_rows,
        MERGED_ROWS=heads.merged_rows,
        PARTS=heads.parts,
        HEAD_DIM=head_dim,
        MERGED_SPLITS=1,
        BLOCK_N=config.block_n,
        LEAST_BLOCKS=config.least_blocks,
        PAGE=page if node.paged else 0,
        FAR=node.paged and are_far(pages, page, head_dim, keys.stride()[::2], values.stride()[::2]),
        SCALE=node.scale,
        SOFTCAP=0.0,
        PRECISION=dot_precision(q.dtype),
        UPCAST=interpreted,
    )
    angles = cos.shape[1] if node.rotated else 0
    asked = (node.mask == "lengths", node.mask == "given", node.mask == "bias", node.sinks, node.added, node.appends)
    # It lets the next launch begin, but does not follow: on the SMs that are free first it would have two programs, and
    # on others none, and a layer of 8B takes 1 to 3 us longer so on an H200.
    parts = NodeParts(*asked, angles, splits == 1, overlap_for(facts.arch, B, node.overlap))

    def strides(x: torch.Tensor | None, *dims: int) -> tuple[int, ...]:
        return tuple(0 if x is None else x.stride(dim) for dim in dims)

    sizes = Sizes(
        capacity,
        pages,
        Strides(strides(q, 0, 1), strides(keys, 0, 2, 1), strides(values, 0, 2, 1), rows_apart(table)),
        strides(key, 0, 1),
        strides(value, 0, 1),
        rows_apart(cos),
        rows_apart(lengths),
        rows_apart(shown),
        rows_apart(bias),
        rows_apart(begin),
        rows_apart(position),
    )
    fixed = {"heads": heads.heads, "kv_heads": kv_heads, "splits": splits, "sizes": sizes, "HOW": how, "NODE": parts}
    launches = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    attending = Arguments(heads.heads * splits, {**fixed, **launches})
    at_once = min(triton.next_power_of_2(splits), INTERPRETED_AT_ONCE if interpreted else MERGED_AT_ONCE)
    merging = Arguments(B * query_heads, {**fixed, "AT_ONCE": at_once, "num_warps": MERGE_WARPS})
    attention, merge = (local_launcher(kernel, device) for kernel in (cached_attention_kernel, merge_kernel))
    elements = 1 if splits == 1 else B * query_heads * splits * (head_dim + 1)

    def run(*given: torch.Tensor | None) -> list[torch.Tensor]:
        q = given[0]
        assert q is not None
        out = torch.empty(B, query_heads, head_dim, dtype=q.dtype, device=device)
        partials = torch.empty(elements, dtype=torch.float32, device=device)
        tensors = {"tensors": Tensors._make([*(q if x is None else x for x in given), out, partials])}
        attention(handle_for(q), lambda: attending, (), (), tensors)
        if splits > 1:
            merge(handle_for(q), lambda: merging, (), (), tensors)
        return [out]

    return run


def by_library(node: CachedAttention) -> Runner:
    """Returns what attends by torch."""
    return lambda *given: [reference.cached_attention(node, *given)]


cached_attention: LocalCalls[CachedAttention] = LocalCalls(prepare)
"""Returns [out], [B, Hq, D] and contiguous, and writes the new token. operands: as `CachedAttention` describes them."""
