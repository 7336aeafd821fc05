"""Which strategy runs a site: a pure function of facts that all ranks of the group share.

Two ranks that choose differently wait for each other forever, so every field of a `PlanRequest` has to be equal
on all ranks. Of the sizes, those of the tensor that is communicated are (m and k of an all-gather, m and n of
the reductions). The third one, n or k, is a dimension of this rank's weight alone: equal where the weight is
sharded evenly, and otherwise not. Whoever builds the request sees to it that all ranks put in the same number.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ditron_inductor.errors import StrategyUnavailable
from ditron_inductor.task import cost

DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class PlanRequest:
    """Everything that the choice for one call depends on.

    Attributes:
        site: the site's name, for messages.
        kind: the node kind, as in `nodes.KINDS`.
        m, n, k: the matmul [m, k] @ [k, n] of one rank; m counts all gathered or unscattered rows, n the
        columns of all weights. strategy: what the user asked for, `auto` to leave it to the plan.
        workspace_bytes, workspace_limit: symmetric memory that `tile` needs here, and may use. device_type,
        device_name: `cuda` or `cpu`, and the name that the driver gives the GPU. tile_available, tile_reason:
        whether every rank can run the tile kernels, and if not, why not.
    """

    site: str
    kind: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    world_size: int
    strategy: str
    workspace_bytes: int
    workspace_limit: int
    device_type: str
    device_name: str
    tile_available: bool
    tile_reason: str


@dataclass(frozen=True)
class Choice:
    """The strategy that runs, `library` or `tile`, and a sentence saying why."""

    strategy: str
    reason: str


@functools.lru_cache(maxsize=4096)
def choose(request: PlanRequest) -> Choice:
    """The strategy for one call.

    Raises `StrategyUnavailable` if `tile` is forced and cannot run here; `auto` takes `library` then.
    """
    if request.strategy == "library":
        return Choice("library", "forced by the option ditron.strategy")
    obstacle = _obstacle(request)
    if request.strategy == "tile":
        if obstacle is not None:
            reason, remedy = obstacle
            raise StrategyUnavailable(strategy="tile", site=request.site, reason=reason, remedy=remedy)
        return Choice("tile", "forced by the option ditron.strategy")
    if obstacle is not None:
        return Choice("library", obstacle[0])
    if request.device_type == "cpu":
        return Choice("library", "on the CPU the tile kernels run in an interpreter, for tests only")
    if 0 in (request.m, request.n, request.k):
        return Choice("library", "there is nothing to compute")
    problem = cost.Problem(request.kind, request.m, request.n, request.k, request.dtype.itemsize, request.world_size)
    predicted = cost.predict(problem, cost.hardware(request.device_name))
    best = "tile" if predicted["tile"] < cost.GAIN * predicted["library"] else "library"
    return Choice(best, f"predicted: library {predicted['library']:.0f} us, tile {predicted['tile']:.0f} us")


def _obstacle(request: PlanRequest) -> tuple[str, str] | None:
    """Why `tile` cannot run this call, and what to do about it; None if it can."""
    instead = "Use 'auto' or 'library'"
    if request.dtype not in DTYPES:
        return f"no tile kernel takes {request.dtype}", f"{instead}, or compute in bfloat16, float16 or float32"
    if not request.tile_available:
        return request.tile_reason, instead
    if request.workspace_bytes > request.workspace_limit:
        return (
            f"it needs {request.workspace_bytes} bytes of workspace, and the limit is {request.workspace_limit}",
            f"{instead}, or raise the option 'ditron.workspace_limit'",
        )
    return None


class Decisions:
    """The last choice of every site in this process, kept for `explain`: what ran, and from which request.

    The only writer is the binding of the ops; nothing reads it to decide anything.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], tuple[PlanRequest, Choice]] = {}

    def note(self, group_name: str, request: PlanRequest, choice: Choice) -> None:
        """Remember `choice` as the last one of the request's site in a group."""
        self._last[group_name, request.site] = (request, choice)

    def last(self, group_name: str, site: str) -> tuple[PlanRequest, Choice] | None:
        """The last request and choice of a site, or None if it never ran here."""
        return self._last.get((group_name, site))


decisions = Decisions()
"""Those of this process."""
