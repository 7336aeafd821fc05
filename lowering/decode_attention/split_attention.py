"""Decode attention over one part of a cache, and the merging of parts, for all kernels of flash_decode.

A part is `o`, the attention of a query over some tokens, and `lse`, the base-2 logarithm of the sum of their
exponentials. Without tokens these are 0 and -inf. Parts are merged by the weights 2 ** (lse - largest lse), in fp32.

Work is divided into *tickets*: ticket = head * splits + split. Here a *head* is a piece of query heads that share a key
head (see `decode_config.deal`): batch = head // (kv_heads * PARTS), and head * ROWS is its first row of q [batch *
query heads, ..]. The number of splits and their tokens depend on the sequence's length, which is read on the device, so
a replayed CUDA graph is right. The program of the last split of a head merges the parts of all its splits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ditron_inductor.core.signals import arrive
from ditron_inductor.task.decode_node import HIDDEN

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(HIDDEN)
LOWEST = tl.constexpr(-2.3e38)
"""Its product with LOG2_E is a number of fp32."""
MOST_SHARED_ROWS = tl.constexpr(32)
"""Up to this many query heads, the warps of a program share all of them in a matrix product."""


class Counts(NamedTuple):
    """The numbers of heads, of key heads, of splits of a head, of tokens that a sequence's cache has room for, and of
    pages, if there are any.
    """

    heads: Any
    kv_heads: Any
    splits: Any
    capacity: Any
    pages: Any


class Work(NamedTuple):
    """Pointers to the queries, keys, values, lengths of the sequences, block table (if there are pages), parts of
    splits and local counters, one for each head; and the Counts.
    """

    q: Any
    k: Any
    v: Any
    lengths: Any
    block_table: Any
    partials: Any
    counters: Any
    counts: Any


class Tensors(NamedTuple):
    """The tensors of a kernel: pointers to the queries, keys, values, lengths and block table (see `Work`), to the
    output or the rank's part, and to memory for the parts of splits.
    """

    q: Any
    k: Any
    v: Any
    lengths: Any
    block_table: Any
    out: Any
    partials: Any


class Sizes(NamedTuple):
    """The tokens that a sequence's cache has room for, the number of pages (or of caches), the elements of a rank's
    parts in a slot, and the Strides.
    """

    capacity: Any
    pages: Any
    area: Any
    strides: Any


class Strides(NamedTuple):
    """The strides of q (batch, head), of keys and of values (batch or page, token, head), and of the table."""

    q: Any
    k: Any
    v: Any
    pages: Any


class How(NamedTuple):
    """Values that are known at compile time; see decode_config.py. PAGE: the tokens of a page, 0 for a dense cache.
    FAR: whether an element of the pages, or of a block of tokens, may be 2^31 elements or more behind the first one.
    SOFTCAP: 0 for none. UPCAST: see core/matmul.py.
    """

    ROWS: Any
    BLOCK_ROWS: Any
    MERGED_ROWS: Any
    PARTS: Any
    HEAD_DIM: Any
    MERGED_SPLITS: Any
    BLOCK_N: Any
    LEAST_BLOCKS: Any
    PAGE: Any
    FAR: Any
    SCALE: Any
    SOFTCAP: Any
    PRECISION: Any
    UPCAST: Any


@triton.jit
def work_of(tensors, counters, heads, kv_heads, splits, sizes):
    counts = Counts(heads, kv_heads, splits, sizes.capacity, sizes.pages)
    return Work(
        tensors.q, tensors.k, tensors.v, tensors.lengths, tensors.block_table, tensors.partials, counters, counts
    )


@triton.jit
def cut_splits(length, splits, BLOCK_N: tl.constexpr, LEAST_BLOCKS: tl.constexpr):
    """Returns (the number of splits of a sequence that have tokens, at least 1; the tokens of each but the last)."""
    blocks = tl.cdiv(length, BLOCK_N)
    per_split = tl.maximum(tl.cdiv(blocks, splits), LEAST_BLOCKS)
    return tl.maximum(tl.cdiv(blocks, per_split), 1), per_split * BLOCK_N


@triton.jit
def load_query(
    q, strides_q, batch, row, ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    SWAPPED: tl.constexpr = False,
):  # fmt: skip
    """Loads ROWS query heads from `row` on as [BLOCK_ROWS, HEAD_DIM], padded by zeros. strides_q: see Strides. SWAPPED:
    whether both halves of each head change places.
    """
    rows = tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, HEAD_DIM)
    if SWAPPED:
        dims = (dims + HEAD_DIM // 2) % HEAD_DIM
    q_at = q + batch.to(tl.int64) * strides_q[0] + (row + rows)[:, None] * strides_q[1] + dims[None, :]
    return tl.load(q_at, mask=(rows < ROWS)[:, None] & (dims >= 0)[None, :], other=0.0)


class TokenSpan(NamedTuple):
    """Tokens: the first BLOCK_N from `begin` on, from begin + step on, and so on, as far as they lie in front of `end`.
    """

    begin: Any
    end: Any
    step: Any


class NewToken(NamedTuple):
    """A token whose key and value, both [HEAD_DIM], are not read from the cache. place: what the cache holds there is
    not attended to. is_here: whether this program attends to the token. bias: what is added to its scores, to the base
    2.
    """

    key: Any
    value: Any
    place: Any
    is_here: Any
    bias: Any


@triton.jit
def scaled(scores, HOW: tl.constexpr):
    """Returns products of query and keys as scores to the base 2."""
    if HOW.SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (1 + exp(2 x))
        scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * HOW.SCALE / HOW.SOFTCAP * LOG2_E)))
        return scores * (HOW.SOFTCAP * LOG2_E)
    return scores * (HOW.SCALE * LOG2_E)


@triton.jit
def weight_of(score, most):
    """Returns 2 ** (score - most): 0 for a score of -inf, also if nothing is larger, and NaN for one that is NaN."""
    return tl.exp2(score - tl.where(most == float("-inf"), 0.0, most))


@triton.jit
def first_column(x, like):
    """Returns x [rows] as the first column of zeros of the shape of `like`."""
    return tl.where((tl.arange(0, like.shape[1]) == 0)[None, :], x[:, None], 0.0)


@triton.jit
def to_base_2(added):
    """Returns what is added to scores, for scores to the base 2. What is finite stays finite, and NaN stays NaN."""
    bounded = tl.where(added < LOWEST, LOWEST, tl.where(added > -LOWEST, -LOWEST, added))
    return tl.where(tl.abs(added) == float("inf"), added, bounded * LOG2_E)


@triton.jit
def is_usual(sinks):
    """Returns whether all sinks are far above what a bias makes of the scores that it hides."""
    return tl.min(sinks, 0) > LEAST


@triton.jit
def is_seen(added, sinks):
    """Returns whether a token counts, to whose scores this is added. Beside a sink that is a common number, one that is
    lowered to the least of bfloat16 or float32 has a weight of exactly 0, so its key and value need not be read.
    """
    return tl.where(added > LEAST, True, (added != added) | (is_usual(sinks) == 0))


@triton.jit
def load_pages(pages, columns, span, block, HOW: tl.constexpr):
    """Loads the pages of the tokens of a block of a TokenSpan: one for each, or one for all if the block is in a page.
    columns: of the tokens of the first block, in the table.
    """
    token = span.begin + block * span.step
    if HOW.PAGE % HOW.BLOCK_N == 0:
        columns = token // HOW.PAGE
    else:
        token += tl.arange(0, HOW.BLOCK_N)
        if HOW.BLOCK_N % HOW.PAGE == 0:
            # All blocks begin at the same place in a page.
            columns += block * span.step // HOW.PAGE
        else:
            columns = token // HOW.PAGE
    return tl.load(pages + columns, mask=token < span.end, other=0)


@triton.jit
def found_pages(pages, count, HOW: tl.constexpr):
    """Returns (where pages are among so many, which are counted from the end if negative; whether they are none)."""
    pages = tl.where(pages < 0, pages + count, pages)
    return pages.to(tl.int64 if HOW.FAR else tl.int32), (pages < 0) | (pages >= count)


@triton.jit
def attend(
    query, work, strides, batch, kv_head, span, HOW: tl.constexpr, token=None, shown=None, bias=None, sinks=None,
    READS_ALL: tl.constexpr = False,
):  # fmt: skip
    """Returns (o [BLOCK_ROWS, HEAD_DIM], lse [BLOCK_ROWS]), fp32, of `query` over the tokens of a TokenSpan. query: the
    result of `load_query`. token: a NewToken beside them, or None. shown: pointer to bools, which tokens are attended
    to, or None for all. bias: pointer to what is added to the scores, or None. sinks: (one more score of each row, to
    the base 2; whether this program counts it), or None. READS_ALL: whether keys and values of hidden tokens are read
    too, so that these loads do not wait for the marks. If such values are no numbers, then the result is none.
    """
    BLOCK_N: tl.constexpr = HOW.BLOCK_N
    BLOCK_ROWS: tl.constexpr = HOW.BLOCK_ROWS
    HEAD_DIM: tl.constexpr = HOW.HEAD_DIM
    dims = tl.arange(0, HEAD_DIM)
    tokens = tl.arange(0, BLOCK_N)
    if HOW.UPCAST:
        query = query.to(tl.float32)
    k_at = work.k + kv_head.to(tl.int64) * strides.k[2]
    v_at = work.v + kv_head.to(tl.int64) * strides.v[2]
    if HOW.PAGE == 0:
        k_at += batch.to(tl.int64) * strides.k[0]
        v_at += batch.to(tl.int64) * strides.v[0]
    else:
        pages = work.block_table + batch.to(tl.int64) * strides.pages
    inside = tokens
    if HOW.PAGE > 0 and BLOCK_N % HOW.PAGE == 0:
        inside = (span.begin + tokens) % HOW.PAGE
    if HOW.FAR:
        inside = inside.to(tl.int64)
    k_inside = inside[:, None] * strides.k[1] + dims[None, :]
    v_inside = inside[:, None] * strides.v[1] + dims[None, :]
    most = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    # If the warps share the rows, they add up the weights of a row once, behind the loop, and not for each block.
    APART: tl.constexpr = BLOCK_ROWS <= MOST_SHARED_ROWS
    total = tl.zeros((BLOCK_ROWS, BLOCK_N if APART else 1), dtype=tl.float32)
    acc = tl.zeros((BLOCK_ROWS, HEAD_DIM), dtype=tl.float32)
    if sinks is not None:
        sink = tl.where(sinks[1], sinks[0], float("-inf"))
        most = sink
        if token is None:
            total += first_column(weight_of(sink, most), total)
    if token is not None:
        # Behind the loop it takes up to 2 us more.
        score = scaled(tl.sum(query.to(tl.float32) * token.key.to(tl.float32)[None, :], axis=1), HOW)
        if bias is not None:
            score += token.bias
        score = tl.where(token.is_here, score, float("-inf"))
        most = tl.maximum(most, score)
        weight = weight_of(score, most)
        total += first_column(weight, total)
        if sinks is not None:
            total += first_column(weight_of(sink, most), total)
        acc += weight[:, None] * tl.where(token.is_here, token.value.to(tl.float32), 0.0)[None, :]
    marks = bias
    if shown is not None:
        # As bytes, or each would be turned into a bool at once, and so be waited for.
        marks = shown.to(tl.pointer_type(tl.int8))
    # The marks of a block, if there are any, are loaded one block before they are used.
    coming = tokens
    if marks is not None:
        coming = tl.load(marks + span.begin + tokens, mask=tokens < span.end - span.begin, other=0)
    # So are the pages.
    coming_pages = tokens
    columns = tokens
    gone = tokens < 0
    if HOW.PAGE > 0:
        columns = (span.begin + tokens) // HOW.PAGE
        coming_pages = load_pages(pages, columns, span, 0, HOW)
    # The rare case has to leave registers to the usual one.
    IS_RARE: tl.constexpr = (shown is not None or bias is not None) and not READS_ALL
    for block in tl.range(0, tl.cdiv(span.end - span.begin, span.step), num_stages=1 if IS_RARE else None):
        first = span.begin + block * span.step
        there = tokens < span.end - first
        if token is not None:
            there &= first + tokens != token.place
        read = there
        added = tl.zeros((BLOCK_N,), dtype=tl.float32)
        if marks is not None:
            here = coming
            following = first + span.step
            coming = tl.load(marks + following + tokens, mask=tokens < span.end - following, other=0)
            if bias is not None:
                added = here.to(tl.float32)
                there &= is_seen(added, sinks[0])
            else:
                there &= here != 0
        if not READS_ALL:
            read = there
        if HOW.PAGE == 0:
            k_rows = k_at + first.to(tl.int64) * strides.k[1] + k_inside
            v_rows = v_at + first.to(tl.int64) * strides.v[1] + v_inside
        else:
            page, lost = found_pages(coming_pages, work.counts.pages, HOW)
            coming_pages = load_pages(pages, columns, span, block + 1, HOW)
            gone |= lost & read
            read &= lost == 0
            k_page, v_page = page * strides.k[0], page * strides.v[0]
            if HOW.PAGE % BLOCK_N == 0:
                within = (first % HOW.PAGE).to(tl.int64)
                k_rows = k_at + (k_page + within * strides.k[1]) + k_inside
                v_rows = v_at + (v_page + within * strides.v[1]) + v_inside
            elif BLOCK_N % HOW.PAGE == 0:
                k_rows = k_at + (k_page[:, None] + k_inside)
                v_rows = v_at + (v_page[:, None] + v_inside)
            else:
                within = ((first + tokens) % HOW.PAGE).to(tl.int64)
                k_rows = k_at + (k_page + within * strides.k[1])[:, None] + dims[None, :]
                v_rows = v_at + (v_page + within * strides.v[1])[:, None] + dims[None, :]
        loaded = read[:, None] & (dims >= 0)[None, :]
        # What lies behind the last token may be NaN, and must not be multiplied.
        keys = tl.load(k_rows, mask=loaded, other=0.0)
        values = tl.load(v_rows, mask=loaded, other=0.0)
        if HOW.UPCAST:
            keys = keys.to(tl.float32)
            values = values.to(tl.float32)
        scores = tl.dot(query, tl.trans(keys), input_precision=HOW.PRECISION)
        scores = scaled(scores, HOW)
        if bias is not None:
            scores += to_base_2(added)[None, :]
        scores = tl.where(there[None, :], scores, float("-inf"))
        largest = tl.maximum(most, tl.max(scores, axis=1))
        known = largest
        if token is not None or shown is not None or bias is not None:
            # So far there may be no token at all.
            known = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp2(scores - known[:, None])
        kept = tl.exp2(most - known)
        if APART:
            total = total * kept[:, None] + weights
        else:
            total = total * kept[:, None] + tl.sum(weights, axis=1, keep_dims=True)
        acc = tl.dot(weights.to(values.dtype), values, acc * kept[:, None], input_precision=HOW.PRECISION)
        most = largest
    total = tl.sum(total, axis=1)
    if HOW.PAGE > 0:
        # A page that the caches do not have leaves no number.
        total = tl.where(tl.max(gone.to(tl.int32), 0) != 0, float("nan"), total)
    return normalised(acc, most, total)


@triton.jit
def normalised(acc, most, total):
    """Returns (o, lse) for sums with weights 2 ** (.. - most) that add up to `total`, which is 0 without tokens."""
    # The test is not `> 0`, because NaN has to stay NaN.
    some = total != 0.0
    total = tl.where(some, total, 1.0)
    return acc * (1.0 / total)[:, None], tl.where(some, most + tl.log2(total), float("-inf"))


@triton.jit
def store_part(o, lse, partials, counts, ticket, HOW: tl.constexpr):
    """Stores the part of a split in `partials`: o [head][split][ROWS, HEAD_DIM], then lse [head][split][ROWS]."""
    rows = tl.arange(0, HOW.BLOCK_ROWS)
    place = ticket.to(tl.int64) * HOW.ROWS + rows
    at = place[:, None] * HOW.HEAD_DIM + tl.arange(0, HOW.HEAD_DIM)[None, :]
    tl.store(partials + at, o, mask=(rows < HOW.ROWS)[:, None] & (at >= 0))
    lses = partials + (counts.heads * counts.splits).to(tl.int64) * (HOW.ROWS * HOW.HEAD_DIM)
    tl.store(lses + place, lse, mask=rows < HOW.ROWS)


@triton.jit
def attend_ticket(ticket, first_length, work, strides, HOW: tl.constexpr):
    """Attends to one split, and stores its part (see `store_part`).
    first_length: the length of the first sequence if it was loaded before the ticket was known, and otherwise None.
    (With a single sequence this saves the time of a load.) Returns (the head, the number of its splits, whether this
    was the last of them; then all parts are visible to this program).
    """
    head = ticket // work.counts.splits
    split = ticket % work.counts.splits
    batch = head // (work.counts.kv_heads * HOW.PARTS)
    kv_head = head // HOW.PARTS % work.counts.kv_heads
    row = (kv_head * HOW.PARTS + head % HOW.PARTS) * HOW.ROWS
    # This load is under way while the length is loaded.
    query = load_query(work.q, strides.q, batch, row, HOW.ROWS, HOW.BLOCK_ROWS, HOW.HEAD_DIM)
    if first_length is None:
        length = tl.load(work.lengths + batch)
    else:
        length = first_length
        if batch > 0:
            length = tl.load(work.lengths + batch)
    # A sequence is never longer than its cache, even if the tensor says so.
    length = tl.minimum(tl.maximum(length, 0), work.counts.capacity)
    used, per_split = cut_splits(length, work.counts.splits, HOW.BLOCK_N, HOW.LEAST_BLOCKS)
    last = tl.full((), 0, tl.int32)
    if split < used:
        begin = split * per_split
        span = TokenSpan(begin, tl.minimum(begin + per_split, length), HOW.BLOCK_N)
        o, lse = attend(query, work, strides, batch, kv_head, span, HOW)
        store_part(o, lse, work.partials, work.counts, ticket, HOW)
        # The counter is local to this GPU. The program of the last split acquires what the others have stored.
        last = arrive(work.counters + head, used).to(tl.int32)
    return head, used, last


@triton.jit
def merge_splits(partials, counts, head, used, HOW: tl.constexpr):
    """Returns (o [MERGED_ROWS, HEAD_DIM], lse [MERGED_ROWS]) merged from the `used` stored parts of a head."""
    HEAD_DIM: tl.constexpr = HOW.HEAD_DIM
    MERGED_ROWS: tl.constexpr = HOW.MERGED_ROWS
    MERGED_SPLITS: tl.constexpr = HOW.MERGED_SPLITS
    rows = tl.arange(0, MERGED_ROWS)
    dims = tl.arange(0, HEAD_DIM)
    there = rows < HOW.ROWS
    lses = partials + (counts.heads * counts.splits).to(tl.int64) * (HOW.ROWS * HEAD_DIM)
    most = tl.full((MERGED_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((MERGED_ROWS,), dtype=tl.float32)
    acc = tl.zeros((MERGED_ROWS, HEAD_DIM), dtype=tl.float32)
    for first in range(0, used, HOW.MERGED_SPLITS):
        # Parts are merged one after the other, as in `merge_ranks`, so no thread needs what another one has loaded. But
        # all loads are under way before the first result is used.
        place = (head * counts.splits + first).to(tl.int64) * HOW.ROWS + rows
        at = place[:, None] * HEAD_DIM + dims[None, :]
        found = ()
        os = ()
        for i in tl.static_range(MERGED_SPLITS):
            inside = there & (first + i < used)
            lse = tl.load(lses + place + i * HOW.ROWS, mask=inside, other=float("-inf"))
            o = tl.load(partials + at + i * HOW.ROWS * HEAD_DIM, mask=inside[:, None] & (at >= 0), other=0.0)
            found = found + (lse,)  # type: ignore[assignment]
            os = os + (o,)  # type: ignore[assignment]
        largest = most
        for i in tl.static_range(MERGED_SPLITS):
            largest = tl.maximum(largest, found[i])
        known = tl.where(largest == float("-inf"), 0.0, largest)
        kept = tl.exp2(most - known)
        total = total * kept
        acc = acc * kept[:, None]
        for i in tl.static_range(MERGED_SPLITS):
            weight = tl.exp2(found[i] - known)
            total += weight
            acc += weight[:, None] * os[i]
        most = largest
    return normalised(acc, most, total)


@triton.jit
def part_offsets(head, heads, HOW: tl.constexpr):
    """Returns the place of a head among a rank's parts, o [heads * ROWS, HEAD_DIM] and then lse [heads * ROWS]:
    (offsets of o [MERGED_ROWS, HEAD_DIM], mask, offsets of lse [MERGED_ROWS], mask). The offsets of o are those of the
    result too.
    """
    HEAD_DIM: tl.constexpr = HOW.HEAD_DIM
    ROWS: tl.constexpr = HOW.ROWS
    rows = tl.arange(0, HOW.MERGED_ROWS)
    place = head.to(tl.int64) * ROWS + rows
    at = place[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    there = rows < ROWS
    return at, there[:, None] & (at >= 0), heads.to(tl.int64) * (ROWS * HEAD_DIM) + place, there


@triton.jit
def merge_ranks(parts, out, head, heads, area, whole, WORLD: tl.constexpr, HOW: tl.constexpr):
    """Stores the attention of a head over the tokens of all ranks; NaN if `whole` is 0. parts: those of source s begin
    at s * area. They are merged in rank order, so equal parts give equal bits.
    """
    HEAD_DIM: tl.constexpr = HOW.HEAD_DIM
    MERGED_ROWS: tl.constexpr = HOW.MERGED_ROWS
    at, inside, lse_at, there = part_offsets(head, heads, HOW)
    missing = float("nan")
    lses = ()
    os = ()
    for source in tl.static_range(WORLD):
        base = parts + source * area.to(tl.int64)
        lses = lses + (tl.load(base + lse_at, mask=there & (whole != 0), other=missing),)  # type: ignore[assignment]
        os = os + (tl.load(base + at, mask=inside & (whole != 0), other=missing),)  # type: ignore[assignment]
    most = lses[0]  # type: ignore[misc]
    for source in tl.static_range(1, WORLD):
        most = tl.maximum(most, lses[source])
    known = tl.where(most == float("-inf"), 0.0, most)
    total = tl.zeros((MERGED_ROWS,), dtype=tl.float32)
    acc = tl.zeros((MERGED_ROWS, HEAD_DIM), dtype=tl.float32)
    for source in tl.static_range(WORLD):
        weight = tl.exp2(lses[source] - known)
        total += weight
        acc += weight[:, None] * os[source]
    o, _ = normalised(acc, most, total)
    o = tl.where(whole != 0, o, missing)
    tl.store(out + at, o.to(out.dtype.element_ty), mask=inside)
