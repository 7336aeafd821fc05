"""Attention of one tile of queries to a run of keys, by online softmax in fp32; the loop over keys stays pipelined.

The state of a tile is (acc, most, total): the sum of exp2(s - most) * v, the largest s so far, and the sum of exp2(s -
most). Here s is the product of a query and a key times scale * log2(e), after the soft cap if there is one. Every wait
stands before the call. UPCAST: multiply in fp32, for the interpreter, whose dot takes bf16 for integers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class State(NamedTuple):
    """The running sums of a tile of queries (see the module)."""

    acc: Any
    most: Any
    total: Any


class Keys(NamedTuple):
    """Pointers to the first key and to its value, and the stride in elements to the next one."""

    k: Any
    v: Any
    stride: Any


class Seen(NamedTuple):
    """The first key that each row sees, if there is a window, and the key behind the last one that it sees."""

    first: Any
    end: Any


class How(NamedTuple):
    """Values that are known at compile time: D elements of a head, the sizes of a block in D and of a step in keys, the
    soft cap of the scores or 0, the precision of `tl.dot`, and UPCAST.
    """

    D: Any
    BLOCK_D: Any
    BLOCK_N: Any
    SOFTCAP: Any
    PRECISION: Any
    UPCAST: Any


@triton.jit
def softcapped(s, SOFTCAP: tl.constexpr):
    """Returns SOFTCAP * tanh(x / SOFTCAP) for x = s / log2(e), in the unit of s, by exp2, which all GPUs have."""
    # tanh(y) = 1 - 2 / (1 + exp(2 y)): near 0 it is off by a rounding of 1, and scores count by their differences.
    return (1.0 - 2.0 / (1.0 + tl.exp2(s * (2.0 / SOFTCAP)))) * (SOFTCAP * LOG2_E)


@triton.jit
def attend(state, q, keys, begin, end, seen, scale, HOW: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr):
    """Returns the state after keys begin, .., end - 1. q is [BLOCK_M, BLOCK_D]. scale: log2(e) times the scale of the
    softmax, positive. HOW: a `How`. MASKED: row i sees only keys below seen.end[i]. WINDOWED: it sees only keys from
    seen.first[i] on. Without either, rows see all keys, and end - begin is a multiple of BLOCK_N.
    """
    acc, most, total = state
    offs_d = tl.arange(0, HOW.BLOCK_D)
    whole: tl.constexpr = HOW.BLOCK_D == HOW.D
    within = tl.arange(0, HOW.BLOCK_N) * keys.stride
    unit = scale
    if HOW.SOFTCAP > 0:
        unit = 1.0
    for first in range(begin, end, HOW.BLOCK_N):
        offs_n = first + tl.arange(0, HOW.BLOCK_N)
        start = tl.cast(first, tl.int64) * keys.stride
        k_places = keys.k + start + within[None, :] + offs_d[:, None]
        v_places = keys.v + start + within[:, None] + offs_d[None, :]
        if MASKED:
            inside = offs_n < end
            key = tl.load(k_places, mask=inside[None, :] & (offs_d < HOW.D)[:, None], other=0.0)
            value = tl.load(v_places, mask=inside[:, None] & (offs_d < HOW.D)[None, :], other=0.0)
        elif whole:
            key = tl.load(k_places)
            value = tl.load(v_places)
        else:
            key = tl.load(k_places, mask=(offs_d < HOW.D)[:, None], other=0.0)
            value = tl.load(v_places, mask=(offs_d < HOW.D)[None, :], other=0.0)
        if HOW.UPCAST:
            s = tl.dot(q.to(tl.float32), key.to(tl.float32), input_precision=HOW.PRECISION)
        else:
            s = tl.dot(q, key, input_precision=HOW.PRECISION)
        if HOW.SOFTCAP > 0:
            s = softcapped(s * scale, HOW.SOFTCAP)
        if MASKED:
            s = tl.where(offs_n[None, :] < seen.end[:, None], s, float("-inf"))
            if WINDOWED:
                s = tl.where(offs_n[None, :] >= seen.first[:, None], s, float("-inf"))
        highest = tl.maximum(most, tl.max(s, axis=1) * unit)
        # No key has been seen so far, so any finite number will do.
        base = tl.where(highest == float("-inf"), 0.0, highest) if MASKED else highest
        p = tl.exp2(s * unit - base[:, None])
        factor = tl.exp2(most - base)
        total = total * factor + tl.sum(p, axis=1)
        acc = acc * factor[:, None]
        p = p.to(value.dtype)
        if HOW.UPCAST:
            acc += tl.dot(p.to(tl.float32), value.to(tl.float32), input_precision=HOW.PRECISION)
        else:
            acc = tl.dot(p, value, acc, input_precision=HOW.PRECISION)
        most = highest
    return State(acc, most, total)


@triton.jit
def attended(state):
    """Returns (the tile's rows, the logarithms of their sums); these are 0 and -inf for a row that saw nothing."""
    empty = state.total == 0.0
    rows = state.acc / tl.where(empty, 1.0, state.total)[:, None]
    return rows, (state.most + tl.log2(state.total)) * LN_2
