"""Time stamps in kernels: when a program began and ended a tile, a wait or a send, and on which SM.

A kernel has them only if its `TRACE` names a clock; the default, `OFF`, compiles to nothing at all. The events of a
launch go to a buffer of bounded size, whose address is in the control words. Once the buffer is full, events are
counted but not kept.

A kernel takes part with a parameter `TRACE: tl.constexpr = 0`, a `began = now(TRACE)` in front of what is to be seen,
and an `event(..)` behind it; `Launch` and `ChunkedExchange` do the rest. Events of one program may be nested, but may
not overlap otherwise.
"""

from __future__ import annotations

import time

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from ditron_inductor.core.layout import (
    EVENT_BEGIN,
    EVENT_DETAIL,
    EVENT_END,
    EVENT_KIND,
    EVENT_PEER,
    EVENT_PROGRAM,
    EVENT_PROGRAM_BITS,
    EVENT_SM,
    EVENT_USE,
    EVENT_WORDS,
    EVENTS,
    EVENTS_CAPACITY,
    EVENTS_COUNT,
    TRACE_BUFFER,
)
from ditron_inductor.core.signals import word

OFF = tl.constexpr(0)
NVIDIA = tl.constexpr(1)
"""`%globaltimer`, in nanoseconds."""
AMD = tl.constexpr(2)
"""`s_memrealtime`, in ticks of a constant clock."""
INTERPRETED = tl.constexpr(3)
"""The host's monotonic clock, in nanoseconds."""

TILE = tl.constexpr(1)
WAIT = tl.constexpr(2)
CREDITS = tl.constexpr(3)
SEND = tl.constexpr(4)
COPY = tl.constexpr(5)
SUM = tl.constexpr(6)
END = tl.constexpr(7)


@triton.jit
def host_clock():
    """The host's clock, in the interpreter only: compiled code does not call it."""
    return 0


if not isinstance(host_clock, JITFunction):
    # The interpreter calls every function that it reaches.
    host_clock = time.perf_counter_ns


@triton.jit
def now(TRACE: tl.constexpr):
    """Returns the time by the clock of TRACE; 0 if that is OFF."""
    if TRACE == NVIDIA:
        clock = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    elif TRACE == AMD:
        clock = tl.inline_asm_elementwise(
            "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
        )
    elif TRACE == INTERPRETED:
        clock = tl.full((), host_clock(), tl.int64)
    else:
        clock = tl.full((), 0, tl.int64)
    return clock


@triton.jit
def multiprocessor(TRACE: tl.constexpr):
    """Returns the number of this program's SM: die, shader engine and compute unit on AMD, a program's number else."""
    if TRACE == NVIDIA:
        number = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    elif TRACE == AMD:
        # HW_ID: 8 bits of compute unit, shader array and shader engine; XCC_ID: the die.
        inside = tl.inline_asm_elementwise(
            "s_getreg_b32 $0, hwreg(HW_REG_HW_ID, 8, 8)", "=s", [], dtype=tl.int32, is_pure=False, pack=1
        )
        die = tl.inline_asm_elementwise(
            "s_getreg_b32 $0, hwreg(HW_REG_XCC_ID, 0, 4)", "=s", [], dtype=tl.int32, is_pure=False, pack=1
        )
        number = die * 256 + inside
    else:
        number = tl.program_id(0)
    return number


@triton.jit
def event(use, began, detail, peer, KIND: tl.constexpr, TRACE: tl.constexpr):
    """Records an event of KIND in a use of a slot, which `began` at that time and ends now. detail: the number of the
    tile, chunk or piece. peer: a rank. Does nothing if TRACE is OFF, or if the control words name no buffer.
    """
    if TRACE != OFF:
        ended = now(TRACE)
        address = tl.load(use.ctl + TRACE_BUFFER)
        if address != 0:
            buffer = address.to(tl.pointer_type(tl.int64))
            index = tl.atomic_add(buffer + EVENTS_COUNT, 1, sem="relaxed", scope="gpu")
            if index < tl.load(buffer + EVENTS_CAPACITY):
                row = buffer + EVENTS + index * EVENT_WORDS
                tl.store(row + EVENT_BEGIN, began)
                tl.store(row + EVENT_END, ended)
                tl.store(row + EVENT_KIND, tl.full((), KIND, tl.int64))
                tl.store(row + EVENT_USE, word(use.site, use.epoch))
                programs = tl.num_programs(0).to(tl.int64) << EVENT_PROGRAM_BITS
                tl.store(row + EVENT_PROGRAM, programs | tl.program_id(0).to(tl.int64))
                tl.store(row + EVENT_SM, multiprocessor(TRACE).to(tl.int64))
                tl.store(row + EVENT_DETAIL, tl.full((), 0, tl.int64) + detail)
                tl.store(row + EVENT_PEER, tl.full((), 0, tl.int64) + peer)


@triton.jit
def read_clock(out, TRACE: tl.constexpr):
    """out: one int64, the time."""
    tl.store(out, now(TRACE))
