"""The norm in front of a gather, written straight into the own slot: what `chunked` stages with.

Problem. The shard is norm(x + residual), and peers are to read it from this rank's slot. As a kernel of its own the
norm would write it to memory, for `stage` to read it again.
Algorithm. A program normalises whole rows in registers, as norms/rows.py does, and stores them in the
slot; the sum, and what is saved for a backward, go to memory as everywhere.
Signal protocol. That of `transfers.stage`: the credits of all peers before the slot is written, row PIECE_ROWS
published by the last program. What goes to memory is this rank's own, and right whatever its peers do.
Limits. nodes.MOST_NORM_COLUMNS columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ditron_inductor.core.signals import Words, arrive, credits_due, data, healthy, publish_all, settle, use_of
from ditron_inductor.core.timed import timed_credits
from ditron_inductor.core.trace import SEND, event, now
from ditron_inductor.lowering.norms.rows import extras, normalised
from ditron_inductor.lowering.transfers import PIECE_ROWS


class How(NamedTuple):
    """What is known at compile time: ranks, whether the norm is stored as an output too, rows of a tile, places of
    one.
    """

    WORLD: Any
    COPY: Any
    ROWS: Any
    BLOCK: Any


@triton.jit(do_not_specialize=["M", "rank", "slot", "site"])
def stage_norm(
    x, given, outputs, pointers, M, N, rank, slot, site, HOW: tl.constexpr, NORMS: tl.constexpr,
    TRACE: tl.constexpr = 0,
):  # fmt: skip
    """Normalise x [M, N], contiguous, into the start of the own slot, then publish row PIECE_ROWS to all peers.

    given, outputs: as by `rows.extras` and `rows.normalised`; the first output, the norm, is stored if COPY only,
    whatever happens.
    """
    use = use_of(Words(pointers.table, pointers.ctl, rank, slot, site))
    alive = healthy(use)
    # It waits for nothing before that, so peers always get theirs.
    if tl.program_id(0) == 0:
        settle(credits_due(use, alive), use, HOW.WORLD)
    ok = alive & timed_credits(use, tl.program_id(0), HOW.WORLD, TRACE)
    sending = now(TRACE)
    mine = data(use, rank, x.dtype.element_ty)
    cols = tl.arange(0, HOW.BLOCK)[None, :]
    step = tl.num_programs(0) * HOW.ROWS
    first = tl.program_id(0) * HOW.ROWS
    for _ in range((M - 1) // step + 1):
        rows = first + tl.arange(0, HOW.ROWS)[:, None]
        first += step
        inside = (rows < M) & (cols < N)
        at = rows.to(tl.int64) * N + cols
        value = tl.load(x + at, mask=inside, other=0.0)
        loaded = extras(given, at, cols, inside, N, NORMS.FORM)
        normed = normalised(value, loaded, outputs, rows, at, inside, M, N, NORMS)
        if HOW.COPY:
            tl.store(outputs[0] + at, normed, mask=inside)
        tl.store(mine + at, normed, mask=inside & (ok != 0))
    if ok != 0:
        # A program without its credits does not arrive, so the shard is never published.
        if arrive(pointers.counters, tl.num_programs(0)):
            publish_all(use, PIECE_ROWS, HOW.WORLD)
    event(use, sending, tl.program_id(0), rank, SEND, TRACE)
