"""The norm in front of a gather, written into this rank's slot. `chunked` uses it in place of `transfers.stage`.

Problem. The shard is norm(x + residual), and the peers read it from this rank's slot. A kernel of its own would write
the norm to memory, where `stage` would read it again. Algorithm. A program normalises whole rows in registers (see
norms/rows.py) and stores them in the slot. The sum, and what is saved for a backward, go to memory as usual. Signal
protocol. It is that of `transfers.stage`: the slot is written with the credits of all peers, and the last program
publishes row PIECE_ROWS. The tensors in memory are right whatever the peers do. Limits. There are at most
nodes.MOST_NORM_COLUMNS columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ditron_inductor.core.signals import arrive, credits_due, data, healthy, publish_all, settle, use_of, words_of
from ditron_inductor.core.timed import timed_credits
from ditron_inductor.core.trace import SEND, event, now
from ditron_inductor.lowering.norms.rows import extras, normalised
from ditron_inductor.lowering.transfers import PIECE_ROWS


class How(NamedTuple):
    """Compile-time values: ranks, whether the norm is an output too, rows of a tile, places of a row."""

    WORLD: Any
    COPY: Any
    ROWS: Any
    BLOCK: Any


@triton.jit(do_not_specialize=["M", "rank"])
def stage_norm(
    x, given, outputs, pointers, rank, M, N, HOW: tl.constexpr, NORMS: tl.constexpr,
    TRACE: tl.constexpr = 0,
):  # fmt: skip
    """Normalises x [M, N], contiguous, into the start of this rank's slot, and then publishes row PIECE_ROWS to all
    peers. given, outputs: see `rows.extras` and `rows.normalised`. The first output, the norm, is stored only if COPY,
    and then even after a failure.
    """
    use = use_of(words_of(pointers, rank))
    alive = healthy(use)
    # This program has not waited for anything yet, so the peers get their credits in any case.
    if tl.program_id(0) == 0:
        settle(credits_due(use, alive), use, HOW.WORLD)
    ok = alive & timed_credits(use, tl.program_id(0), HOW.WORLD, TRACE)
    sending = now(TRACE)
    mine = data(use, use.rank, x.dtype.element_ty)
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
    event(use, sending, tl.program_id(0), use.rank, SEND, TRACE)
