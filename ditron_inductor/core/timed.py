"""The waits of kernels, each with an event of its time (see trace.py): rows of flags, and credits."""

from __future__ import annotations

import triton
import triton.language as tl

from ditron_inductor.core.signals import may_send, wait, wait_all, wait_credits
from ditron_inductor.core.trace import CREDITS, WAIT, event, now


@triton.jit
def timed_wait(use, row, source, TRACE: tl.constexpr):
    """`wait` for the flag `row` of `source`."""
    began = now(TRACE)
    ok = wait(use, row, source)
    event(use, began, row, source, WAIT, TRACE)
    return ok


@triton.jit
def timed_wait_all(use, row, WORLD: tl.constexpr, TRACE: tl.constexpr):
    """`wait_all` for the flags `row`."""
    began = now(TRACE)
    ok = wait_all(use, row, WORLD)
    event(use, began, row, use.rank, WAIT, TRACE)
    return ok


@triton.jit
def timed_credits(use, ticket, WORLD: tl.constexpr, TRACE: tl.constexpr):
    """`wait_credits`, before the push of `ticket`. Then nobody reads the data of the slot's previous use any more."""
    began = now(TRACE)
    ok = wait_credits(use, WORLD)
    event(use, began, ticket, use.rank, CREDITS, TRACE)
    return ok


@triton.jit
def first_credits(ok, alive, use, ticket, WORLD: tl.constexpr, TRACE: tl.constexpr):
    """Returns `ok`, or, if that is -1 as this program has not asked yet, whether it is `alive` and has its credits."""
    if ok < 0:
        ok = alive & timed_credits(use, ticket, WORLD, TRACE)
    return ok


@triton.jit
def timed_may_send(asked, due, use, ticket, WORLD: tl.constexpr, THREADS: tl.constexpr, TRACE: tl.constexpr):
    """Does `may_send` for the piece `ticket`, where `ask_to_send` returned `asked`. due: `last_use`."""
    began = now(TRACE)
    ok = may_send(asked, tl.where(ticket == 0, due, 0), use, WORLD, THREADS)
    event(use, began, ticket, use.rank, CREDITS, TRACE)
    return ok
