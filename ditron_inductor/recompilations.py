"""A rank whose peers rely on its compiled graphs stays with compiled graphs.

Beyond `torch._dynamo.config.recompile_limit` torch runs a function eagerly, for each value that it has not compiled.
If one rank alone reaches the limit, its peers go on with what all ranks agreed on: they wait for tiles that do not
come, or add what a pass merged to what this rank did not merge. No check can tell them in time, because their kernels
are queued by then. So from the first agreement on torch's limit is its `accumulated_recompile_limit`.
"""

from __future__ import annotations

import logging

import torch._dynamo.config as config
from torch._guards import CompileContext

log = logging.getLogger(__name__)
_limit_of_torch: int | None = None
MANY = (
    "a function has been compiled %d times, and is compiled again. Torch alone would run it eagerly (recompile_limit), "
    "but the other ranks rely on its compiled graphs. TORCH_LOGS=recompiles says why it is compiled again; "
    "torch._dynamo.mark_dynamic makes one graph serve all values of a size; the option ditron.fusions=[] leaves the "
    "collectives as they are, and torch's limit too"
)


def keep_compiled() -> None:
    """Raises the limit, if torch would run a function eagerly beyond it. Called when ranks have agreed on a graph."""
    global _limit_of_torch
    limit = config.accumulated_recompile_limit
    if config.recompile_limit < limit and not config.fail_on_recompile_limit_hit:
        _limit_of_torch, config.recompile_limit = config.recompile_limit, limit


def warn_of_many() -> None:
    """Warns if the function that is being compiled has just passed the limit that was raised."""
    number = CompileContext.current_compile_id()
    if number is not None and _limit_of_torch is not None and number.frame_compile_id == _limit_of_torch:
        log.warning(MANY, _limit_of_torch)
