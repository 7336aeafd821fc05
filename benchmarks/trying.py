"""Contestants of ours that begin with trials, one of them without the tables that ship with the package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

UNTABLED = "ditron:untabled"
TRYING = ("ditron", UNTABLED)


@contextmanager
def trying(name: str) -> Iterator[None]:
    """Inside the block the contestant `name` tries anew what another has tried before, if it is one of `TRYING`. So it
    is to plan and to end its trials there. `UNTABLED` finds no shipped table. The block is for all ranks alike.
    """
    # Only ranks need torch.
    from ditron_inductor.lowering.host import trials
    from ditron_inductor.task import table
    from ditron_inductor.task.plan import choose

    if name in TRYING:
        trials.begin_again()
    if name != UNTABLED:
        yield
        return
    choose.cache_clear()
    try:
        with mock.patch.object(table, "shipped", table.Table):
            yield
    finally:
        choose.cache_clear()
