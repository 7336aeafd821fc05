"""The strategy `chunked` when a rank is stopped, elsewhere, or so slow that peers give up: errors, never wrong data."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ditron_inductor.core import layout as words
from ditron_inductor.device import slot_layout, workspaces
from ditron_inductor.device.workspace import SharedWorkspace
from ditron_inductor.errors import DitronError
from ditron_inductor.lowering import transfers
from ditron_inductor.lowering.host.launcher import Bound
from tests.conftest import CPU_PLACES
from tests.lowering.failures import Failure, diverge, fails, hasty, reset_and_work, stop_a_rank
from tests.lowering.problems import CHUNKED_KINDS
from tests.rank_process import RankContext
from tests.ranks import RankPool

SHORT_S = 1.0
on_cpu = pytest.mark.parametrize("fragile_place", CPU_PLACES[:1], indirect=True)


# Exchanged rows wait and close as the gather does.
STOPPED = [kind for kind in CHUNKED_KINDS if kind != "all_to_all_matmul"]


@pytest.mark.parametrize("kind", STOPPED)
def test_a_stopped_rank(fragile_pool: RankPool, kind: str) -> None:
    stop_a_rank(fragile_pool, kind, "chunked")


@pytest.mark.parametrize("kind", STOPPED)
def test_a_rank_at_another_site(fragile_pool: RankPool, kind: str) -> None:
    diverge(fragile_pool, kind, "chunked")


def _shared(ctx: RankContext) -> SharedWorkspace:
    (found,) = workspaces.of_group(dist.distributed_c10d._resolve_process_group(ctx.group_name))
    return found


@dataclass(frozen=True)
class Slow:
    """How a call ended on a rank that held up its peers: its error, if any, and whether outputs were right, or NaN."""

    type_name: str
    message: str
    right: bool
    missing: bool


def _too_slow(ctx: RankContext, kind: str) -> Slow | Failure:
    """Rank 1 has copied nothing yet when rank 0 gives up on its credit and uses the slot again."""
    problem = hasty(ctx, "slow/0", kind, timeout_s=SHORT_S, strategy="chunked")
    # Products go into the own slot, whatever happens.
    other = hasty(ctx, "slow/1", "matmul_reduce_scatter", timeout_s=SHORT_S, strategy="chunked")
    expected = problem()
    problem.check(expected)
    other.check(other())
    dist.barrier()
    if ctx.rank == 0:
        problem()
        # As if the call for the next slot, which would fail here and now, were still queued, as on a GPU.
        _shared(ctx).calls += slot_layout.NUM_SLOTS - 1
        return fails(ctx, other)
    waiting = transfers.await_all if kind == "all_gather_matmul" else transfers.await_pieces
    last = transfers.close_slot if kind == "all_gather_matmul" else transfers.reduce_partials
    launch = Bound.__call__
    outputs: list[torch.Tensor] = []
    waited = False

    def late(self: Bound, stream: int, *tensors: Any) -> None:
        """The first wait, which comes before all copies, begins late."""
        nonlocal waited
        if self.kernel is waiting and not waited:
            waited = True
            time.sleep(SHORT_S * 6)
        launch(self, stream, *tensors)
        if self.kernel is last:
            outputs.extend(tensors[0 if kind == "all_gather_matmul" else 2])

    Bound.__call__ = late  # type: ignore[method-assign]
    try:
        problem()
        return Slow("", "", True, False)
    except DitronError as error:
        flat = [out.flatten() for out in outputs]
        wanted = [out.flatten() for out in expected]
        missing = [bool(out.isnan().all()) for out in flat]
        right = [torch.equal(out, want) for out, want in zip(flat, wanted, strict=True)]
        return Slow(type(error).__name__, str(error), all(right), all(missing))
    finally:
        assert waited
        Bound.__call__ = launch  # type: ignore[method-assign]


@on_cpu
@pytest.mark.parametrize("kind", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_a_reader_that_is_overtaken(fragile_pool: RankPool, kind: str) -> None:
    """Rank 0 overwrites what rank 1 has not read, and says so: rank 1 raises, and what it holds is NaN."""
    first, slow = fragile_pool.run(_too_slow, kind)
    assert first.type_name == "DitronTimeout" and "rank 1" in first.message, first
    assert slow.type_name == "DitronTimeout" and "rank 0" in slow.message, slow
    assert slow.missing and not slow.right, slow
    fragile_pool.run(reset_and_work, "chunked")


def _revoke_words(ctx: RankContext) -> list[int]:
    """The words with which peers revoked slots of this rank."""
    header = _shared(ctx).generations[-1].heap.local[: slot_layout.HEADER_BYTES].view(torch.int64)
    places = [
        slot * words.SLOT_WORDS.value + words.REVOKED_ROW.value * slot_layout.MAX_WORLD + source
        for slot in range(slot_layout.NUM_SLOTS)
        for source in range(ctx.world_size)
    ]
    return [int(header[place]) for place in places]


@on_cpu
def test_a_healthy_group_revokes_nothing(fragile_pool: RankPool) -> None:
    fragile_pool.run(reset_and_work, "chunked")
    assert not any(any(found) for found in fragile_pool.run(_revoke_words))
