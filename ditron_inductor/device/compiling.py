"""Which ranks are compiling a graph right now: a meeting waits longer for these.

Ranks end the first compilation of a large model at different times, because one of them finds in a cache what another
one has to compile: with 32 layers on two ranks they were more than ten seconds apart. So a rank says in the store of
the default group that it compiles, under its global rank, and takes this back at the end, whether it succeeded or not.
The mark of a rank that died stays, so nobody waits longer than `LONGEST_S` because of one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch.distributed import distributed_c10d

LONGEST_S = 120.0
"""How long a rank waits because of such marks, beside its usual limit."""
MARK = "compiling"


class UnderWay:
    """How many graphs this process is compiling."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()

    def add(self, more: int) -> None:
        """Counts one more or one less, and tells the peers where that begins or ends it."""
        with self._lock:
            self._count += more
            if self._count == max(more, 0):
                _say(MARK if more > 0 else "")


_under_way = UnderWay()


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Tells the peers that this rank compiles a graph. Without a default group nobody is told. If its store cannot be
    reached, the meeting says so.
    """
    _under_way.add(1)
    try:
        yield
    finally:
        _under_way.add(-1)


def is_compiling(global_ranks: Sequence[int]) -> bool:
    """Returns whether one of these ranks has said that it compiles, and has not taken it back."""
    store = _marks()
    keys = [str(rank) for rank in global_ranks]
    return store is not None and any(store.check([key]) and store.get(key).decode() == MARK for key in keys)


def _marks() -> dist.Store | None:
    if not dist.is_initialized():
        return None
    return dist.PrefixStore("ditron/compiling", distributed_c10d._get_default_store())


def _say(mark: str) -> None:
    store = _marks()
    if store is not None:
        with contextlib.suppress(dist.DistError):
            store.set(str(dist.get_rank()), mark)
