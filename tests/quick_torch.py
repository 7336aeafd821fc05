"""Makes torch compile quicker for tests, by leaving out work that decides nothing.

At every compilation Dynamo measures how long its guards take, with a flush of the caches, for a line in its log. Every
change of the default process group makes it forget which functions it may trace, a table of thousands of rows that do
not depend on groups. And pytest adds a handler to torch's log of structured traces, so that torch writes the text of
each trace for nobody. Together this is a quarter of the time of the tests of passes.

Every group of gloo has a thread that looks a hundred times a second for what has arrived. Ranks that serve many tests
make many groups, and their threads took a sixth of the time of two cores in the end. One thread can serve all groups.
"""

from __future__ import annotations

import functools
from datetime import timedelta

import torch._dynamo.guards
import torch._dynamo.trace_rules
import torch._logging._internal
import torch.distributed
from torch.distributed import ProcessGroupGloo, Store, distributed_c10d


def make_torch_quick() -> None:
    """Leaves that out in this process, for as long as it lives."""
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    # Once more now, since what it may trace of torch.distributed is known as soon as that is imported.
    torch._dynamo.trace_rules.clear_lru_cache()
    torch._dynamo.trace_rules.clear_lru_cache = lambda: None
    log = torch._logging._internal.trace_log
    log.handlers.clear()
    log.addHandler = lambda _: None  # type: ignore[method-assign]
    distributed_c10d.ProcessGroupGloo = OneThread  # type: ignore[misc]


@functools.cache
def _gloo_device() -> ProcessGroupGloo.Device:
    return ProcessGroupGloo.create_default_device()


class OneThread(ProcessGroupGloo):
    """A group of gloo, served by the thread of all groups of this process."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        options = ProcessGroupGloo._Options()
        options._devices = [_gloo_device()]
        options._timeout = timeout
        super().__init__(store, rank, size, options)
