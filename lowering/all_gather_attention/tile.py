"""all_gather_attention, strategy `tile`: out = attention of q to the gathered k and v, in one launch.

Problem. Every rank holds queries, and the keys and values of a part of the sequence. Its queries attend to all keys.
Algorithm. There are two queues of work. The *send* queue pushes the rank's own keys and values, piece by piece, into
the slot of every peer whose mask shows them: to rank + 1 first, because that rank needs them first. SENDERS programs
begin with this queue. The *tile* queue has a block of queries of one head for each ticket, with the last rows first. A
tile attends to the own keys, which need no wait, then to those of rank - 1, rank - 2, ..., without what the mask hides,
by online softmax in registers. A program that comes to a remote source first helps to empty the send queue. So every
send precedes every wait, and a launch completes even with one resident program. If the node returns the gathered
tensors, the last tickets copy them out of the slot. Signal protocol. Flag rows KEYS and VALUES of a peer are each
written once per launch, by the last program that pushed a piece of them to this peer. A program waits for both, once
for each source. A push waits for the credits of all peers for the slot's previous use; the next launch gives the
credits of this use. A rank whose mask hides a source does not wait for it, and only the credits hold it back. Limits.
Keys and values have the same head size, at most 256.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ditron_inductor.core.attention import LOG2_E, Keys, Seen, State, attend, attended
from ditron_inductor.core.signals import (
    credits_due,
    data,
    finish,
    healthy,
    settle,
    take_send,
    take_tile,
    use_of,
    wait,
    wait_credits,
    words_of,
)
from ditron_inductor.core.trace import COPY, SEND, TILE, WAIT, event, now
from ditron_inductor.lowering.attention.block_parts import stacked, with_rows
from ditron_inductor.lowering.gathers import SENDERS, send_queue, sent_piece
from ditron_inductor.lowering.host.launch import Launch, ceil_div, dot_precision, round_up
from ditron_inductor.lowering.host.launcher import Arguments
from ditron_inductor.task.attention_masks import GIVEN, MAX_HEAD_DIM, Mask
from ditron_inductor.task.node import Output
from ditron_inductor.task.nodes import AllGatherAttention
from ditron_inductor.task.schema import memory

KEYS = tl.constexpr(0)
VALUES = tl.constexpr(1)

FULL = tl.constexpr(0)
CAUSAL = tl.constexpr(1)
ZIGZAG = tl.constexpr(2)
ZIGZAG_KEYS = tl.constexpr(3)
NUMBERS = {"full": FULL, "causal": CAUSAL, "zigzag_keys": ZIGZAG_KEYS, "causal_offset": CAUSAL, "zigzag": ZIGZAG}


class How(NamedTuple):
    """Values that are known at compile time: the number of ranks, the mask, the number of jumps of `positions`, whether
    there is a window, whether the gathered tensors are returned, the numbers of heads, the How of core/attention.py,
    the rows BLOCK_M of a tile, and the steps of the send queue.
    """

    WORLD: Any
    MASK: Any
    JUMPS: Any
    WINDOWED: Any
    RETURN_GATHERED: Any
    HEADS: Any
    KEY_HEADS: Any
    D: Any
    BLOCK_D: Any
    BLOCK_M: Any
    BLOCK_N: Any
    SOFTCAP: Any
    PRECISION: Any
    UPCAST: Any
    SEND_BLOCK: Any
    SEND_STEPS: Any
    SENDERS: Any


class Tensors(NamedTuple):
    """Pointers to q [batches, HEADS, queries, D] with contiguous D, and to kv [2, batches, keys, KEY_HEADS, D],
    contiguous. out has the memory of [batches, queries, HEADS, D]; lse is [batches, HEADS, queries]; gathered_k and
    gathered_v are [batches, WORLD * keys, KEY_HEADS, D], if they are returned.
    """

    q: Any
    kv: Any
    out: Any
    lse: Any
    gathered_k: Any
    gathered_v: Any


class Sizes(NamedTuple):
    """The strides of q, `jump_rows` and `jumps` of `positions`, and the factor of the scores, times log2(e)."""

    stride_qb: Any
    stride_qh: Any
    stride_qm: Any
    jump_rows: Any
    jumps: Any
    scale: Any


@triton.jit
def positions(
    rows, place_0, jump_rows, jumps, rank, keys, WORLD: tl.constexpr, MASK: tl.constexpr, JUMPS: tl.constexpr
):
    """Returns the positions of the `rows` of the queries. The first row is at `place_0`; from each of the JUMPS rows
    `jump_rows` on, positions are larger by the jump that belongs to it.
    """
    if MASK == ZIGZAG:
        half = keys // 2
        return rows + tl.where(rows < half, rank, 2 * WORLD - 2 - rank) * half
    else:
        places = rows + place_0
        for i in tl.static_range(JUMPS):
            places += tl.where(rows >= jump_rows[i], jumps[i], 0)
        return places


@triton.jit
def seen_keys(places, source, keys, WORLD: tl.constexpr, MASK: tl.constexpr):
    """Returns how many keys of `source` are not behind each of the positions `places`. These are its first keys."""
    if MASK == FULL:
        return places * 0 + keys
    elif MASK == CAUSAL:
        return tl.minimum(tl.maximum(places + 1 - source * keys, 0), keys)
    else:
        half = keys // 2
        early = tl.minimum(tl.maximum(places + 1 - source * half, 0), half)
        return early + tl.minimum(tl.maximum(places + 1 - (2 * WORLD - 1 - source) * half, 0), half)


@triton.jit
def push_pieces(use, ticket, num_sends, kv, counters, numel, HOW: tl.constexpr, TRACE: tl.constexpr):
    """Pushes piece `ticket` of this rank's keys or values [numel] to its peer, then takes the next ticket, until none
    is left. num_sends: the tickets of the queue, 0 if the workspace was poisoned before this program began.
    """
    PIECE_NUMEL: tl.constexpr = HOW.SEND_BLOCK * HOW.SEND_STEPS
    pieces = tl.cdiv(numel, PIECE_NUMEL).to(tl.int32)
    while ticket < num_sends:
        began = now(TRACE)
        target = (use.rank + 1 + ticket // (2 * pieces)) % HOW.WORLD
        part = ticket // pieces % 2
        inside = (ticket % pieces).to(tl.int64) * PIECE_NUMEL
        first = part.to(tl.int64) * numel + inside
        place = data(use, target, kv.dtype.element_ty) + use.rank.to(tl.int64) * 2 * numel + first
        if wait_credits(use, HOW.WORLD) != 0:
            for i in range(HOW.SEND_STEPS):
                offsets = i * HOW.SEND_BLOCK + tl.arange(0, HOW.SEND_BLOCK)
                wanted = inside + offsets < numel
                tl.store(place + offsets, tl.load(kv + first + offsets, mask=wanted), mask=wanted)
            # All keys are one chunk, and all values another.
            sent_piece(use, counters, target, part, pieces)
        event(use, began, part, target, SEND, TRACE)
        ticket = take_send(use)


@triton.jit
def source_of(use, kv, source, numel):
    """Returns a pointer to the keys of `source`, in `kv` or in this rank's slot. The values lie behind them."""
    received = data(use, use.rank, kv.dtype.element_ty) + source.to(tl.int64) * 2 * numel
    return tl.where(source == use.rank, kv, received)


@triton.jit
def received_all(use, source, TRACE: tl.constexpr):
    """Waits for the keys and values of `source`. Returns 1 if they are there, and 0 after a failure."""
    began = now(TRACE)
    # Acquire: everything is visible that the source pushed before it published these words.
    ok = wait(use, KEYS, source)
    ok = ok & wait(use, VALUES, source)
    event(use, began, VALUES, source, WAIT, TRACE)
    return ok


@triton.jit(do_not_specialize=["num_targets", "batches", "queries", "keys", "place_0", "window", "rank"])
def all_gather_attention_kernel(
    tensors, pointers, rank, batches, queries, keys, sizes, place_0, window, num_targets,
    HOW: tl.constexpr, TRACE: tl.constexpr = 0,
):  # fmt: skip
    """See the module. place_0: see `positions`. window: the keys that a row sees at most, if WINDOWED. num_targets: the
    number of peers that get this rank's keys.
    """
    kv = tensors.kv
    BLOCK_D: tl.constexpr = HOW.BLOCK_D
    BLOCK_M: tl.constexpr = HOW.BLOCK_M
    D: tl.constexpr = HOW.D
    KEY_HEADS: tl.constexpr = HOW.KEY_HEADS
    use = use_of(words_of(pointers, rank))
    alive = healthy(use)
    numel = batches.to(tl.int64) * keys * (KEY_HEADS * D)
    pieces = tl.cdiv(numel, HOW.SEND_BLOCK * HOW.SEND_STEPS).to(tl.int32)
    num_sends = tl.where(alive != 0, num_targets * 2 * pieces, 0)
    # `drained` is 1 when this program has found the send queue empty.
    drained = (tl.program_id(0) < HOW.SENDERS).to(tl.int32)
    if tl.program_id(0) < HOW.SENDERS:
        ticket = take_send(use)
        if ticket == 0:
            settle(credits_due(use, alive), use, HOW.WORLD)
        push_pieces(use, ticket, num_sends, kv, pointers.counters, numel, HOW, TRACE)
    ok = alive
    # `there` has one bit for each source whose keys and values are there.
    there = tl.full((), 0, tl.int32)
    num_m = tl.cdiv(queries, BLOCK_M)
    num_tiles = num_m * batches * HOW.HEADS
    offs_d = tl.arange(0, BLOCK_D)
    ticket = take_tile(use)
    while ticket < num_tiles:
        began = now(TRACE)
        # Begin with the last rows, which see the most keys.
        row = (num_m - 1 - ticket // (batches * HOW.HEADS)) * BLOCK_M
        head = ticket % (batches * HOW.HEADS)
        batch = (head // HOW.HEADS).to(tl.int64)
        head = head % HOW.HEADS
        offs_m = row + tl.arange(0, BLOCK_M)
        rows = tl.minimum(offs_m, queries - 1)
        places = positions(rows, place_0, sizes.jump_rows, sizes.jumps, rank, keys, HOW.WORLD, HOW.MASK, HOW.JUMPS)
        q_head = tensors.q + batch * sizes.stride_qb + head.to(tl.int64) * sizes.stride_qh
        q_rows = q_head + rows.to(tl.int64)[:, None] * sizes.stride_qm
        query = tl.load(q_rows + offs_d[None, :], mask=(offs_d < D)[None, :], other=0.0)
        # The offset of the first key of the head.
        inner = batch * keys * (KEY_HEADS * D) + head * KEY_HEADS // HOW.HEADS * D
        state = State(
            tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32),
            tl.full((BLOCK_M,), float("-inf"), tl.float32),
            tl.zeros((BLOCK_M,), dtype=tl.float32),
        )
        for step in range(HOW.WORLD):
            source = (rank + HOW.WORLD - step) % HOW.WORLD
            seen = seen_keys(places, source, keys, HOW.WORLD, HOW.MASK)
            first_seen = seen
            last = tl.max(seen, axis=0)
            if HOW.WINDOWED:
                # The keys in front of the window come first, because the keys of a rank are in the order of their
                # positions, whatever the mask.
                first_seen = seen_keys(places - window, source, keys, HOW.WORLD, HOW.MASK)
                # If a tile has rows on both sides of a zigzag, there may be keys between that no row sees.
                last = tl.where(tl.max(seen - first_seen, axis=0) > 0, last, 0)
            if last > 0:
                if (source != rank) & (((there >> source) & 1) == 0):
                    if drained == 0:
                        # Sends come before waits.
                        push_pieces(
                            use, take_send(use), num_sends, kv, pointers.counters, numel, HOW, TRACE,
                        )  # fmt: skip
                        drained = drained | 1
                    ok = ok & received_all(use, source, TRACE)
                    there = there | (1 << source)
                if ok == 0:
                    # The data must not be read after a failure.
                    last = last * 0
                base = source_of(use, kv, source, numel) + inner
                of_source = Keys(base, base + numel, KEY_HEADS * D)
                rows_see = Seen(first_seen, seen)
                begin = last * 0
                if HOW.WINDOWED:
                    begin = tl.minimum(tl.min(first_seen, axis=0), last)
                    # This lies behind the first key of the last row.
                    edge = begin + tl.cdiv(tl.max(first_seen, axis=0) - begin, HOW.BLOCK_N) * HOW.BLOCK_N
                    edge = tl.minimum(edge, last)
                    state = attend(state, query, of_source, begin, edge, rows_see, sizes.scale, HOW, True, True)
                    begin = edge
                whole = tl.maximum(tl.minimum(tl.min(seen, axis=0), last) - begin, 0)
                whole = begin + whole // HOW.BLOCK_N * HOW.BLOCK_N
                state = attend(state, query, of_source, begin, whole, rows_see, sizes.scale, HOW, False, False)
                state = attend(state, query, of_source, whole, last, rows_see, sizes.scale, HOW, True, HOW.WINDOWED)
        values, sums = attended(state)
        values = tl.where(ok != 0, values, float("nan"))
        sums = tl.where(ok != 0, sums, float("nan"))
        inside = offs_m < queries
        places = ((batch * queries + offs_m) * HOW.HEADS + head)[:, None] * D + offs_d[None, :]
        values = values.to(tensors.out.dtype.element_ty)
        tl.store(tensors.out + places, values, mask=inside[:, None] & (offs_d < D)[None, :])
        tl.store(tensors.lse + (batch * HOW.HEADS + head) * queries + offs_m, sums, mask=inside)
        event(use, began, ticket, rank, TILE, TRACE)
        ticket = take_tile(use)
    if HOW.RETURN_GATHERED:
        copies = HOW.WORLD * batches * 2
        ticket -= num_tiles
        run = keys * (KEY_HEADS * D)
        blocks = tl.cdiv(run, HOW.SEND_BLOCK)
        while ticket < copies * blocks:
            copying = now(TRACE)
            part = ticket // blocks
            source = (rank + HOW.WORLD - part // (batches * 2)) % HOW.WORLD
            batch = part % batches
            which = part // batches % 2
            if (source != rank) & (((there >> source) & 1) == 0):
                if drained == 0:
                    push_pieces(
                        use, take_send(use), num_sends, kv, pointers.counters, numel, HOW, TRACE,
                    )  # fmt: skip
                    drained = drained | 1
                ok = ok & received_all(use, source, TRACE)
                there = there | (1 << source)
            offsets = ticket % blocks * HOW.SEND_BLOCK + tl.arange(0, HOW.SEND_BLOCK)
            start = source_of(use, kv, source, numel) + which * numel + batch.to(tl.int64) * run
            piece = tl.load(start + offsets, mask=(offsets < run) & (ok != 0), other=float("nan"))
            gathered = tl.where(which == 0, tensors.gathered_k, tensors.gathered_v)
            place = gathered + (batch.to(tl.int64) * HOW.WORLD + source) * run
            tl.store(place + offsets, piece, mask=offsets < run)
            event(use, copying, ticket, source, COPY, TRACE)
            ticket = take_tile(use) - num_tiles
    finish(use)


@dataclass(frozen=True)
class AttentionConfig:
    """A tile of `block_m` queries, computed in steps of `block_n` keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def for_arch(self, arch: str) -> AttentionConfig:
        """Returns this Config, on AMD GPUs with the smaller steps and the one stage that fit in their shared memory."""
        return replace(self, block_n=min(self.block_n, 32), num_stages=1) if arch.startswith("gfx") else self


INTERPRETER = AttentionConfig(32, 32, 4, 1)
CONFIGS = {
    64: AttentionConfig(128, 128, 8, 3),
    128: AttentionConfig(128, 128, 8, 2),
    256: AttentionConfig(128, 32, 8, 2),
}
"""The tiles by the head size, rounded up to a power of two."""
FEW = {64: AttentionConfig(64, 128, 4, 3), 128: AttentionConfig(64, 64, 4, 3), 256: AttentionConfig(64, 32, 8, 3)}
"""The tiles for so few queries that larger tiles would leave SMs idle."""
FP32 = {64: AttentionConfig(64, 32, 8, 2), 128: AttentionConfig(32, 32, 4, 2), 256: AttentionConfig(32, 32, 8, 1)}


def select_config(head_dim: int, tiles: int, dtype: torch.dtype, num_sms: int, *, interpreted: bool) -> AttentionConfig:
    """Returns the tile shape, which may differ between ranks. tiles: the number of blocks of 128 queries."""
    if interpreted:
        return INTERPRETER
    size = max(64, triton.next_power_of_2(head_dim))
    if dtype == torch.float32:
        return FP32[size]
    return FEW[size] if tiles < num_sms else CONFIGS[size]


@dataclass(frozen=True)
class Geometry:
    """What calls with operands of one form have in common. `nbytes`, of the slot, is equal on all ranks."""

    config: AttentionConfig
    nbytes: int


def obstacle(node: AllGatherAttention, q: torch.Tensor) -> str:
    """Returns why the strategy cannot run for these queries, or ''. It is equal on all ranks."""
    if node.scale <= 0.0:
        return f"its online softmax takes a positive scale, not {node.scale:g}"
    if q.shape[3] > MAX_HEAD_DIM:
        return f"heads of {q.shape[3]} do not fit in the registers of a tile, {MAX_HEAD_DIM} do"
    if node.mask.kind == GIVEN:
        return "its kernel adds no bias to the scores"
    return ""


def geometry(node: AllGatherAttention, launch: Launch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Geometry:
    B, heads, queries, D = q.shape
    tiles = B * heads * ceil_div(queries, 128)
    config = select_config(D, tiles, q.dtype, launch.num_sms, interpreted=launch.interpreted)
    nbytes = round_up(node.world_size * 2 * k.numel() * k.element_size(), 256)
    return Geometry(config.for_arch(launch.workspace.capabilities.arch), nbytes)


def num_targets(node: AllGatherAttention, rank: int, keys: int) -> int:
    """Returns how many peers get this rank's keys: the next ones that see them, or all if that is not known."""
    world, mask = node.world_size, node.mask
    if node.return_gathered or mask.kind != "causal_offset":
        return world - 1
    behind = world - 1 - rank
    return min(behind, ceil_div(mask.window - 1, max(keys, 1))) if mask.window else behind


def kernel_window(mask: Mask, rank: int, world_size: int, queries: int) -> int:
    """Returns the window of a rank's rows, 0 if it hides nothing from them, so that it fits in 32 bits."""
    return mask.within(max(run.start + run.count for run in mask.positions(rank, world_size, queries))).window


def all_gather_attention(
    node: AllGatherAttention,
    launch: Launch,
    sizes: Geometry,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> list[torch.Tensor]:
    """Returns [out, lse, (gathered k, gathered v)] for q [B, Hq, Sq, D], k and v [B, Hkv, S, D]; see the module."""
    q = with_rows(q)
    B, heads, queries, D = q.shape
    key_heads, keys = k.shape[1], k.shape[2]
    world, config = node.world_size, sizes.config
    kv = stacked(k, v)
    (out,) = memory(q, [Output((B, heads, queries, D), sequence_first=True)])
    lse = torch.empty(B, heads, queries, dtype=torch.float32, device=q.device)
    # These are two tensors, because outputs of an op must not share memory.
    gathered = [kv.new_empty(B, world * keys, key_heads, D) if node.return_gathered else kv for _ in range(2)]
    jumps = node.mask.row_jumps()

    def arguments() -> Arguments:
        window = kernel_window(node.mask, launch.rank, world, queries)
        work = B * heads * ceil_div(queries, config.block_m)
        programs = launch.num_sms if node.return_gathered else min(max(work, SENDERS), launch.num_sms)
        values: dict[str, Any] = {
            "batches": B,
            "queries": queries,
            "keys": keys,
            "sizes": Sizes(
                q.stride(0),
                q.stride(1),
                q.stride(2),
                jump_rows=tuple(row for row, _ in jumps) or (0,),
                jumps=tuple(jump for _, jump in jumps) or (0,),
                scale=node.scale * LOG2_E.value,
            ),
            "rank": launch.rank,
            "place_0": node.mask.positions(launch.rank, world, queries)[0].start,
            "window": window,
            "num_targets": num_targets(node, launch.rank, keys),
            "HOW": How(
                WORLD=world,
                MASK=NUMBERS[node.mask.kind].value,
                JUMPS=len(jumps),
                WINDOWED=window > 0,
                SOFTCAP=node.softcap,
                RETURN_GATHERED=node.return_gathered,
                HEADS=heads,
                KEY_HEADS=key_heads,
                D=D,
                BLOCK_M=config.block_m,
                BLOCK_N=config.block_n,
                BLOCK_D=max(16, triton.next_power_of_2(D)),
                PRECISION=dot_precision(q.dtype),
                UPCAST=launch.interpreted,
                SENDERS=SENDERS,
                **send_queue(launch),
            ),
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }
        return Arguments(programs=max(1, programs), values=values)

    tensors = {"tensors": Tensors(q, kv, out, lse, *gathered)}
    launch.run(all_gather_attention_kernel, sizes.nbytes, arguments, tensors)
    if not node.return_gathered:
        return [out, lse]
    return [out, lse, *(x.transpose(1, 2) for x in gathered)]
