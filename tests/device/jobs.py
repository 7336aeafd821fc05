"""What rank processes run in the tests of workspaces, on the CPU and on GPUs."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from ditron_inductor.core.layout import MAX_WORLD
from ditron_inductor.core.signals import (
    Words,
    credits_due,
    data,
    finish,
    healthy,
    publish,
    settle,
    use_of,
    wait,
    wait_credits,
)
from ditron_inductor.device import AgreedOptions, Registry, Workspace, reset, ring, slot_layout
from ditron_inductor.errors import DitronError
from tests.rank_process import RankContext

LIMIT_S = 20.0
SHORT_S = 1.0
OPTIONS = AgreedOptions(strategy="tile", workspace_limit=1 << 26, timeout_s=LIMIT_S)
SHORT = AgreedOptions(strategy="tile", workspace_limit=1 << 26, timeout_s=SHORT_S)


@triton.jit(do_not_specialize=["rank", "slot", "site"])
def ping_kernel(table, ctl, out, rank, slot, site, WORLD: tl.constexpr, SILENT: tl.constexpr):
    """out[source] = 1000 * source + epoch, sent by `source` through this rank's slot; own entry -1, failed ones -2.

    SILENT: send nothing, as a rank does that is not there.
    """
    use = use_of(Words(table, ctl, rank, slot, site))
    tl.store(out + rank, -1)
    if SILENT:
        return
    settle(credits_due(use, healthy(use)), use, WORLD)
    credited = wait_credits(use, WORLD)
    for i in range(1, WORLD):
        target = (rank + i) % WORLD
        if credited != 0:
            tl.store(data(use, target, tl.int64) + rank, 1000 * rank + use.epoch)
            publish(use, target, 0)
    for i in range(1, WORLD):
        source = (rank + i) % WORLD
        value = tl.full((), -2, tl.int64)
        if wait(use, 0, source) != 0:
            value = tl.load(data(use, rank, tl.int64) + source)
        tl.store(out + source, value)
    finish(use)


def ping(
    workspace: Workspace, site: str = "test/0:ping", nbytes: int = 8 * MAX_WORLD.value, silent: bool = False
) -> Any:
    """One call of the ping kernel: int64 [world_size] on the device."""
    out = torch.full((workspace.world_size,), -3, dtype=torch.int64, device=workspace.device)
    with workspace.call(site, nbytes) as call:
        ping_kernel[(1,)](
            call.table, call.ctl, out, workspace.rank, call.slot, call.site, workspace.world_size, silent, num_warps=1
        )
    return out


def expected(workspace: Workspace, epoch: int) -> list[int]:
    """What a ping at `epoch` returns when every rank took part."""
    return [-1 if source == workspace.rank else 1000 * source + epoch for source in range(workspace.world_size)]


def message(error: BaseException) -> tuple[str, str]:
    return type(error).__name__, str(error)


def caught(fn: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Class name and text of the Ditron error that `fn` raises."""
    try:
        fn(*args, **kwargs)
    except DitronError as error:
        return message(error)
    raise AssertionError(f"{fn} raised nothing")


def opened(ctx: RankContext, options: AgreedOptions = OPTIONS) -> tuple[Registry, Workspace]:
    registry = Registry(first_timeout_s=0.0)
    return registry, registry.get(ctx.group_name, ctx.device, options)


def values_cross(ctx: RankContext, num_calls: int) -> None:
    """Slots alternate, the epoch of a slot counts its uses, and every value comes from the right rank and use."""
    _, workspace = opened(ctx)
    assert (workspace.rank, workspace.world_size, workspace.device) == (ctx.rank, ctx.world_size, ctx.device)
    assert workspace.capabilities.tile_available
    for call in range(num_calls):
        if call % 5 == ctx.rank:
            time.sleep(0.02)
        assert ping(workspace).tolist() == expected(workspace, call // 2 + 1)


def grows(ctx: RankContext) -> list[int]:
    """Growth keeps nothing of the old ring, and values still cross; the bytes held after each step."""
    _, workspace = opened(ctx)
    held = []
    for nbytes in (100, 600_000, 3_000_000, 700_000):
        calls = [ping(workspace, nbytes=nbytes).tolist() for _ in range(4)]
        held.append(workspace.nbytes)
        with workspace.call("test/1:look", nbytes) as call:
            assert call.slot_bytes >= nbytes
        with workspace.call("test/1:look", nbytes):
            pass
        assert calls[0][ctx.rank] == -1 and all(-2 not in values and -3 not in values for values in calls)
    return held


def grows_beyond_the_limit(ctx: RankContext) -> tuple[str, str]:
    """A call that needs too much raises on all ranks, and the workspace goes on."""
    _, workspace = opened(ctx)
    ping(workspace)
    error = caught(ping, workspace, nbytes=1 << 26)
    ping(workspace)
    return error


def keeps_within_the_limit(ctx: RankContext) -> tuple[list[int], list[int], tuple[str, str]]:
    """A ring that rank 0's graph holds stays on all ranks; the most bytes that were there at each growth, what is held
    after each, and the error of one that would exceed the limit.
    """
    limit = slot_layout.HEADER_BYTES * 3 + 19_000_000
    _, workspace = opened(ctx, AgreedOptions("tile", limit, LIMIT_S))
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    shared, most, held, make_heap = workspace.shared, [], [], ring.make_heap
    alive.update(generation.heap for generation in shared.generations)

    def make_counted(device: torch.device, nbytes: int) -> Any:
        gc.collect()
        heap = make_heap(device, nbytes)
        alive.add(heap)
        most.append(sum(one.local.numel() for one in alive))
        return heap

    ring.make_heap = make_counted
    assert workspace.largest("columns", 3) == 3
    try:
        for nbytes in (1_000_000, 2_000_000, 6_000_000):
            agreed, more = workspace.agreed("columns"), workspace.footprint(7_000_000)
            assert workspace.footprint(nbytes) <= limit and more <= limit
            ping(workspace, nbytes=nbytes)
            # What is prepared with one answer does not outlive it.
            same = (workspace.footprint(7_000_000) > limit) == (more > limit)
            assert workspace.agreed("columns") == agreed and (workspace.agreed("columns") is agreed) == same
            assert same == (nbytes < 6_000_000)
            shared.generations[-1].captured |= ctx.rank == 0 and nbytes == 2_000_000
            assert workspace.footprint(nbytes) <= workspace.nbytes
            held.append(workspace.nbytes)
        assert limit // 2 < slot_layout.heap_bytes(7_000_000) < limit < workspace.footprint(7_000_000)
        error = caught(ping, workspace, nbytes=7_000_000)
        ping(workspace, nbytes=6_000_000)
    finally:
        ring.make_heap = make_heap
    assert all(nbytes <= limit for nbytes in most)
    return most, held, error


def grows_apart(ctx: RankContext) -> tuple[str, str]:
    _, workspace = opened(ctx)
    return caught(ping, workspace, nbytes=1_000_000 * (1 + ctx.rank))


def differs_in_options(ctx: RankContext) -> tuple[str, str]:
    options = AgreedOptions("tile", 1 << (20 + ctx.rank), LIMIT_S)
    return caught(Registry(first_timeout_s=0.0).get, ctx.group_name, ctx.device, options)


def differs_in_later_options(ctx: RankContext) -> tuple[str, str]:
    registry, workspace = opened(ctx)
    error = caught(registry.get, ctx.group_name, ctx.device, AgreedOptions("auto", 1 << 26, 20.0 + ctx.rank))
    ping(workspace)
    return error


def one_rank_stays_away(ctx: RankContext) -> tuple[str, str]:
    """The last rank does not come; afterwards all come, and it works."""
    absent = ctx.rank == ctx.world_size - 1
    error = ("", "") if absent else caught(Registry(first_timeout_s=0.0).get, ctx.group_name, ctx.device, SHORT)
    dist.barrier()
    values_cross(ctx, 2)
    return error


def hasty(ctx: RankContext, registry: Registry) -> Workspace:
    """The same workspace for calls that are to fail: with a short limit, which a busy machine may exceed."""
    return registry.get(ctx.group_name, ctx.device, SHORT)


def recovers(ctx: RankContext, registry: Registry, workspace: Workspace) -> None:
    """After a reset everything starts from the beginning."""
    reset(registry=registry, timeout_s=LIMIT_S)
    for call in range(3):
        assert ping(workspace).tolist() == expected(workspace, call // 2 + 1)


def one_rank_stays_silent(ctx: RankContext) -> list[tuple[str, str]]:
    """The last rank sends nothing: the others time out, are poisoned, and work again after a reset."""
    registry, workspace = opened(ctx)
    short = hasty(ctx, registry)
    for call in range(3):
        assert ping(workspace).tolist() == expected(workspace, call // 2 + 1)
    absent = ctx.rank == ctx.world_size - 1
    errors = []
    if absent:
        ping(short, silent=True)
    else:
        errors.append(caught(ping_and_check, short))
        errors.append(caught(ping, workspace))
    recovers(ctx, registry, workspace)
    return errors


def ping_and_check(workspace: Workspace, site: str = "test/0:ping") -> None:
    """A ping that fails: its error comes with it on the CPU, once the device has run it on a GPU."""
    out = ping(workspace, site)
    if workspace.device.type == "cuda":
        assert (out.cpu() == -2).any()
        workspace.check()


def ranks_diverge(ctx: RankContext) -> tuple[str, str]:
    """Every rank is at a site of its own."""
    registry, workspace = opened(ctx)
    short = hasty(ctx, registry)
    ping(workspace)
    ping(workspace)
    error = caught(ping_and_check, short, site=f"test/{ctx.rank}:site")
    recovers(ctx, registry, workspace)
    return error


def fails_half_way(ctx: RankContext) -> None:
    """Some ranks raise in the middle of a call, others made it, others never began: reset brings all together."""
    registry, workspace = opened(ctx)
    short = hasty(ctx, registry)
    ping(workspace)
    if ctx.rank == 0:
        try:
            with workspace.call("test/0:ping", 8):
                raise ValueError("in the middle")
        except ValueError:
            pass
        assert caught(ping, workspace)[0] == "DitronPoisoned"
    elif ctx.rank == 1:
        caught(ping_and_check, short)
    recovers(ctx, registry, workspace)


def half_of_a_growth(ctx: RankContext) -> tuple[str, str]:
    """Rank 0 grows alone and gives up; a reset makes growth possible again."""
    registry, workspace = opened(ctx)
    short = hasty(ctx, registry)
    ping(workspace)
    error = caught(ping, short, nbytes=1_000_000) if ctx.rank == 0 else ("", "")
    dist.barrier()
    if ctx.rank == 0:
        assert caught(ping, workspace)[0] == "DitronPoisoned"
    reset(registry=registry, timeout_s=LIMIT_S)
    assert ping(workspace, nbytes=1_000_000).tolist() == expected(workspace, 1)
    return error


def reset_without_the_last(ctx: RankContext) -> tuple[str, str]:
    """A reset that one rank does not join names it and leaves the group in need of one; the next, with all, works."""
    registry, workspace = opened(ctx)
    ping(workspace)
    error = ("", "")
    if ctx.rank != ctx.world_size - 1:
        error = caught(reset, registry=registry, timeout_s=SHORT_S)
        assert caught(ping, workspace)[0] == "DitronPoisoned"
    dist.barrier()
    reset(registry=registry, timeout_s=LIMIT_S)
    assert ping(workspace).tolist() == expected(workspace, 1)
    return error


def reset_where_one_rank_has_nothing(ctx: RankContext) -> None:
    """A rank without the workspace joins the reset; the others drop theirs, and all make a new one."""
    registry, workspace = opened(ctx)
    if ctx.rank == 0:
        registry = Registry(first_timeout_s=0.0)
    reset(registry=registry, timeout_s=LIMIT_S)
    again = registry.get(ctx.group_name, ctx.device, OPTIONS)
    assert ping(again).tolist() == expected(again, 1)
    if ctx.rank != 0:
        assert again is not workspace and workspace.nbytes == 0


def groups_of_one_name(ctx: RankContext, folder: str) -> list[str]:
    """A group that is destroyed and made again gets a new workspace, and the old one's memory goes with the group."""
    registry = Registry(first_timeout_s=0.0)
    names, workspaces = [], []
    for life in range(3):
        dist.destroy_process_group()
        gc.collect()
        assert all(old.nbytes == 0 for old in workspaces) and not registry._shared
        store = dist.FileStore(f"{folder}/{life}", ctx.world_size)
        dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.world_size)
        workspace = registry.get(ctx.group_name, ctx.device, OPTIONS)
        for call in range(3):
            assert ping(workspace).tolist() == expected(workspace, call // 2 + 1)
        assert registry.get(ctx.group_name, ctx.device, OPTIONS) is workspace
        assert workspace.nbytes > 0 and workspace not in workspaces
        names.append(ctx.group_name)
        workspaces.append(workspace)
    return names


def a_group_ends_while_another_of_its_name_begins(ctx: RankContext, folder: str) -> None:
    """Somebody still holds the old group object when the name comes to mean another group."""
    registry, old = opened(ctx)
    ping(old)
    kept = dist.distributed_c10d._get_default_group()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/again", ctx.world_size), rank=ctx.rank, world_size=ctx.world_size
    )
    assert ctx.group_name == kept.group_name
    new = registry.get(ctx.group_name, ctx.device, OPTIONS)
    assert new is not old and old.nbytes == 0
    assert ping(new).tolist() == expected(new, 1)


def subgroups_side_by_side(ctx: RankContext) -> None:
    """Two halves and the whole: three groups, each with a workspace of its own."""
    registry, whole = opened(ctx)
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    half = registry.get(halves[ctx.rank // 2].group_name, ctx.device, OPTIONS)
    assert half.world_size == 2 and half.rank == ctx.rank % 2
    for call in range(4):
        assert ping(half).tolist() == expected(half, call // 2 + 1)
        assert ping(whole).tolist() == expected(whole, call // 2 + 1)


def a_rank_is_killed(ctx: RankContext) -> tuple[str, str]:
    """The last rank dies between two calls; the others time out with its number."""
    registry, workspace = opened(ctx)
    short = hasty(ctx, registry)
    ping(workspace)
    if ctx.rank == ctx.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return caught(ping_and_check, short)


def several_limits(ctx: RankContext) -> tuple[str, str]:
    """A call waits as long as its own options say, not as an earlier call's."""
    registry, patient = opened(ctx)
    short = hasty(ctx, registry)
    ping(patient)
    ping(patient)
    if ctx.rank == 0:
        time.sleep(3 * SHORT_S)
        ping(patient)
        return "", ""
    ping(patient)
    return caught(ping_and_check, short)


def inference_mode_does_not_matter(ctx: RankContext) -> None:
    """Made and grown in inference mode, used and reset outside, and the other way round."""
    with torch.inference_mode():
        registry, workspace = opened(ctx)
        ping(workspace)
        ping(workspace, nbytes=1_000_000)
    recovers(ctx, registry, workspace)
    with torch.inference_mode():
        short = hasty(ctx, registry)
        ping(short)
        recovers(ctx, registry, workspace)
    ping(short)


def heap_descriptors() -> int:
    """How many of this process's descriptors and mappings are heaps."""
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    links = [os.readlink(path) for path in paths if os.path.lexists(path)]
    return sum("ditron-heap" in link for link in links)


def releases_everything(ctx: RankContext) -> tuple[int, int]:
    before = heap_descriptors()  # Of other workspaces that this process has.
    registry, workspace = opened(ctx)
    ping(workspace)
    during = heap_descriptors() - before
    for shared in registry.of_group(dist.distributed_c10d._get_default_group()):
        registry.release(shared)
    del workspace
    gc.collect()
    return during, heap_descriptors() - before
