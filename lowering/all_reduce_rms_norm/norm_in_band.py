"""The kernel of all_reduce_rms_norm for a few KB: one shot, in band.

Problem. With few rows most of the time goes into the release behind the data, the polls of a flag, the reading of the
data behind the flag, and the one SM that stores a whole row to all peers. Algorithm. It is that of norm_kernel.py in
one shot, but the words that are sent are their own signals (see core/in_band.py). All of x is cut into chunks of words,
whatever the rows, and a program stores each chunk to all peers. Other programs wait for whole rows, add them up and
normalise them. Sums are in rank order, in fp32, and rounded once, so the bits are those of norm_kernel.py. Signal
protocol. Each program has one task, given by its number, so that it can load x while everything else is requested.
Program 0 gives the credits that are due, and signs. The next programs send and set zeros back, and the last ones wait.
No program waits for another program of its launch, or for credits. Programs start in the order of their numbers; and in
any order, there are fewer programs that wait than SMs, so that others always find one. The programs that read this
rank's x are not those that store the outputs, so no output may share memory with x. If x is what the experts of each
token return, senders and readers add up its rows when they load them: that takes less time than a launch in front of
this one. So they do with the parts of a product of few rows, in fp32. Limits. Each of at most MOST_RANKS ranks sends at
most MOST_BYTES, all of them together fill at most an area, and a row has whole words of 32 bits. There is one shot only
(see norm_kernel.cut). All devices of the group have to be able to send in band (device/capabilities.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ditron_inductor.core.in_band import (
    LINE,
    MOST_RANKS,
    answer,
    area,
    ask,
    begin,
    clear_before,
    close_in_band,
    decode,
    encode,
    halves,
    heap_of,
    heaps_of_peers,
    joined,
    wait_in_band,
)
from ditron_inductor.core.layout import IN_BAND_BYTES
from ditron_inductor.core.overlap import let_next_begin, wait_for_last
from ditron_inductor.core.signals import granted, leave, with_epoch, words_of
from ditron_inductor.core.trace import SEND, TILE, WAIT, event, now
from ditron_inductor.lowering.host.launch import Launch, ceil_div, round_up
from ditron_inductor.lowering.host.launcher import Arguments
from ditron_inductor.lowering.norms.add_norm import Outputs
from ditron_inductor.lowering.norms.rows import (
    all_outputs,
    allocate,
    block_of,
    constants_of,
    extras,
    finish,
    pointers,
    warps_of,
)
from ditron_inductor.lowering.overlapping import launch_options, overlap_for
from ditron_inductor.task.nodes import ReductionWithNorm

MOST_BYTES = 1 << 20
"""The most bytes that a rank sends to each peer. With 2 MB on two H100s, slots are 2 us faster."""
FEW_BYTES = 256 << 10
"""Up to so many, there are no more programs than SMs, and more than that two for each SM."""
MOST_ELEMENTS = 8192
"""The most elements of a tile of several rows."""
LEAST_CHUNK = 256
"""The fewest words that a program sends to each peer."""

INTERPRETED_MOST_BYTES = 512
INTERPRETED_FEW_BYTES = 256
INTERPRETED_LEAST_CHUNK = 16
INTERPRETED_SMS = 8
"""The limits of the interpreter are low, so that small problems have several programs, in band or not."""


class How(NamedTuple):
    """Values that are known at compile time: the number of ranks, whether to take the mean, the rows of a reader, the
    places of a row in elements and in words, the words that a sender sends, the threads of a program, the number of
    rows of x that are added up for each row that is sent, 0 if x itself is sent, whether a tensor is added to them, the
    number of parts that are added up instead of x, 0 if x is read, and the OVERLAP of the launch (core/overlap.py).
    """

    WORLD: Any
    AVERAGE: Any
    ROWS: Any
    BLOCK: Any
    BLOCK_WORDS: Any
    CHUNK: Any
    THREADS: Any
    TOP_K: Any
    HAS_ADDED: Any
    PARTS: Any
    OVERLAP: Any


class SentColumns(NamedTuple):
    """The columns N of a row, its words, and the words of a source in an area."""

    N: Any
    width: Any
    stride: Any


class Sent(NamedTuple):
    """The sizes of what is reduced, [M, N]: its words, those of a row and of a source in an area; and the senders."""

    M: Any
    N: Any
    words: Any
    width: Any
    stride: Any
    senders: Any


@triton.jit
def words_at(pointer, places, inside):
    """Returns words of a tensor whose size is a multiple of 32 bits, 0 where `inside` is false."""
    return tl.load(pointer.to(tl.pointer_type(tl.uint32), bitcast=True) + places, mask=inside, other=0)


@triton.jit
def reduced_words(sources, row, lane, places, inside, sizes, HOW: tl.constexpr):
    """Returns the words at `places` of what this rank reduces, those `lane` of the rows `row`; 0 where `inside` is
    false. sources: pointers to x, and, if HOW.TOP_K is not 0, to the factors of its rows and to what is added, and, if
    HOW.PARTS is not 0, to parts of x in fp32, one behind the other, whose sum is sent instead. Senders and readers call
    this for the same words and have to get equal bits, so no product may be rounded in one and not in the other.
    """
    TOP_K: tl.constexpr = HOW.TOP_K
    PARTS: tl.constexpr = HOW.PARTS
    x = sources[0]
    dtype: tl.constexpr = x.dtype.element_ty
    if PARTS > 0:
        lower = tl.zeros(inside.shape, dtype=tl.float32)
        upper = lower
        # The two elements of each word, in one access.
        pairs = sources[3].to(tl.pointer_type(tl.uint64), bitcast=True)
        for part in tl.static_range(PARTS):
            both = tl.load(pairs + (part * sizes.words + places), mask=inside, other=0)
            lower += both.to(tl.uint32).to(tl.float32, bitcast=True)
            upper += (both >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
        result = joined(lower, upper, dtype)
    elif TOP_K == 0:
        result = words_at(x, places, inside)
    else:
        lower = tl.zeros(inside.shape, dtype=tl.float32)
        upper = lower
        for j in tl.static_range(TOP_K):
            slot = row * TOP_K + j
            factor = tl.load(sources[1] + slot, mask=row < sizes.M, other=0.0).to(tl.float32)
            low, high = halves(words_at(x, slot * sizes.width + lane, inside), dtype)
            lower = tl.fma(low, factor, lower)
            upper = tl.fma(high, factor, upper)
        if HOW.HAS_ADDED:
            low, high = halves(words_at(sources[2], places, inside), dtype)
            lower += low
            upper += high
        result = joined(lower, upper, dtype)
    return result


@triton.jit
def send(protocol, asked, sources, own, heaps, sizes, number, HOW: tl.constexpr, TRACE: tl.constexpr):
    """Sends a chunk of the words that this rank reduces to all peers, sets zeros back, and returns the result of
    `leave`. sources: see `reduced_words`. heaps: those of rank + 1, ..
    """
    WORLD: tl.constexpr = HOW.WORLD
    began = now(TRACE)
    first = number * HOW.CHUNK
    places = first + tl.arange(0, HOW.CHUNK)
    row = places // sizes.width
    there = places < sizes.words
    sent = encode(reduced_words(sources, row, places - row * sizes.width, places, there, sizes, HOW))
    known = answer(asked)
    use = with_epoch(protocol, known.epoch)
    if known.ok != 0:
        for i in tl.static_range(WORLD - 1):
            tl.store(area(heaps[i], known.number) + (use.rank * sizes.stride + places), sent, mask=there)
    left = leave(use, known.number + known.lines, known.due, HOW.THREADS, True)
    clear_before(own, known, number, sizes.senders, 4 * HOW.THREADS)
    event(use, began, number, use.rank, SEND, TRACE)
    return left


@triton.jit
def reduce(
    protocol, asked, sources, given, outputs, own, sizes, piece, HOW: tl.constexpr, NORMS: tl.constexpr,
    TRACE: tl.constexpr,
):  # fmt: skip
    """Reduces and normalises the rows of `piece`, and returns the result of `leave`."""
    BLOCK: tl.constexpr = HOW.BLOCK
    ROWS: tl.constexpr = HOW.ROWS
    WORLD: tl.constexpr = HOW.WORLD
    began = now(TRACE)
    dtype: tl.constexpr = sources[0].dtype.element_ty
    rows = (piece * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    lanes = tl.arange(0, HOW.BLOCK_WORDS)[None, :]
    places = rows * sizes.width + lanes
    there = (rows < sizes.M) & (lanes < sizes.width)
    mine = encode(reduced_words(sources, rows, lanes, places, there, sizes, HOW))
    at = rows.to(tl.int64) * sizes.N + cols
    inside = (rows < sizes.M) & (cols < sizes.N)
    loaded = extras(given, at, cols, inside, sizes.N, NORMS.FORM)
    known = answer(asked)
    use = with_epoch(protocol, known.epoch)
    ok = known.ok
    left = leave(use, known.number + known.lines, known.due, HOW.THREADS, True)
    theirs = (mine,) * WORLD
    waited = now(TRACE)
    if ok != 0:
        theirs, ok = wait_in_band(use, known, mine, places, there, sizes.stride, own, piece, WORLD, HOW.THREADS)
    event(use, waited, piece, use.rank, WAIT, TRACE)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for i in tl.static_range(WORLD):
        total += decode(theirs[i], dtype)
    if HOW.AVERAGE:
        total = total / WORLD
    result = tl.where(ok != 0, total, float("nan")).to(dtype)
    finish(result, loaded, outputs, rows, at, inside, sizes.M, sizes.N, NORMS)
    event(use, began, piece, use.rank, TILE, TRACE)
    return left


@triton.jit(do_not_specialize=["M", "words", "senders", "rank"])
def in_band_kernel(
    sources, given, outputs, pointers, rank, M, columns, words, senders,
    HOW: tl.constexpr, NORMS: tl.constexpr, TRACE: tl.constexpr = 0,
):  # fmt: skip
    """See the module. sources: see `reduced_words`; x is [M, N], or [M * TOP_K, N], contiguous. For the other sizes see
    `Sent`. given, outputs: see `rows.extras` and `rows.finish`. There is program 0, then `senders` programs, then a
    program for each ROWS rows.
    """
    let_next_begin(HOW.OVERLAP)
    wait_for_last(HOW.OVERLAP)
    WORLD: tl.constexpr = HOW.WORLD
    program = tl.program_id(0)
    # Ask for everything before the first answer is needed.
    protocol = words_of(pointers, rank)
    asked = ask(protocol, HOW.THREADS)
    own, heaps = heap_of(protocol, protocol.rank), heaps_of_peers(protocol, WORLD)
    sizes = Sent(M, columns.N, words, columns.width, columns.stride, senders)
    if program <= senders:
        if program == 0:
            left = begin(asked, protocol, WORLD, HOW.THREADS)
        else:
            left = send(protocol, asked, sources, own, heaps, sizes, program - 1, HOW, TRACE)
    else:
        piece = program - 1 - senders
        left = reduce(protocol, asked, sources, given, outputs, own, sizes, piece, HOW, NORMS, TRACE)
    known = answer(asked)
    use = with_epoch(protocol, known.epoch)
    close_in_band(granted(left, HOW.THREADS), use, known.number, WORLD * columns.stride)


@dataclass(frozen=True)
class Shares:
    """How the work is divided: `senders` programs send `chunk` words each, and `readers` programs have `rows` rows
    each. stride: the words from one source to the next in an area.
    """

    rows: int
    readers: int
    chunk: int
    senders: int
    stride: int

    @property
    def programs(self) -> int:
        return 1 + self.senders + self.readers


def shares(
    M: int,
    N: int,
    itemsize: int,
    world_size: int,
    *,
    num_sms: int,
    most_bytes: int = MOST_BYTES,
    few_bytes: int = FEW_BYTES,
    least_chunk: int = LEAST_CHUNK,
) -> Shares | None:
    """Returns the Shares of M rows of N elements, of which at most half of the programs are readers; None if the rows
    do not fit, or have more than `most_bytes` bytes. few_bytes: see FEW_BYTES.
    """
    nbytes = M * N * itemsize
    stride = round_up(ceil_div(nbytes, 4), LINE.value)
    fits = nbytes <= most_bytes and world_size <= MOST_RANKS and world_size * stride * 4 <= IN_BAND_BYTES.value
    if not fits or N * itemsize % 4 != 0 or num_sms < 4:
        return None
    programs = num_sms if nbytes <= few_bytes else 2 * num_sms
    rows = 1
    while ceil_div(M, rows) > min(programs // 2, num_sms - 1):
        rows *= 2
    if rows > 1 and rows * block_of(N) > MOST_ELEMENTS:
        return None
    readers, chunk = ceil_div(M, rows), least_chunk
    while 1 + readers + ceil_div(nbytes // 4, chunk) > programs:
        chunk *= 2
    return Shares(rows, readers, chunk, ceil_div(nbytes // 4, chunk), stride)


def shares_of(launch: Launch, M: int, N: int, itemsize: int) -> Shares | None:
    """Returns `shares` for the devices of a group, equal on all ranks; None if nothing is sent in band."""
    if not launch.workspace.capabilities.in_band:
        return None
    world_size = launch.workspace.world_size
    if not launch.interpreted:
        return shares(M, N, itemsize, world_size, num_sms=launch.num_sms)
    return shares(
        M,
        N,
        itemsize,
        world_size,
        num_sms=INTERPRETED_SMS,
        most_bytes=INTERPRETED_MOST_BYTES,
        few_bytes=INTERPRETED_FEW_BYTES,
        least_chunk=INTERPRETED_LEAST_CHUNK,
    )


def all_reduce_rms_norm(
    node: ReductionWithNorm,
    launch: Launch,
    M: int,
    N: int,
    dealt: Shares,
    x: torch.Tensor,
    given: tuple[torch.Tensor | None, ...],
    factors: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
    parts: torch.Tensor | None = None,
) -> Outputs:
    """Returns the Outputs for x [.., N], contiguous, with M rows; see the module. factors: if it is there, the factors
    [M * top_k] of the rows of x [M * top_k, N], whose sums, with `added` [M, N], are reduced. parts: if it is there,
    fp32 [parts, M, N], whose sum is reduced; x, of 16-bit elements, is then memory for the total.
    """
    x = in_words(x)
    # Nobody reads x then.
    outputs = allocate(node, x if factors is None else x[:M], {} if parts is None else {"total": x})

    def arguments() -> Arguments:
        block = block_of(N)
        num_warps = warps_of(dealt.rows * block)
        overlap = overlap_for(launch.workspace.capabilities.arch, M, node.policy.overlap)
        return Arguments(
            programs=dealt.programs,
            values=dict(
                M=M,
                columns=SentColumns(N, N * x.element_size() // 4, dealt.stride),
                words=M * N * x.element_size() // 4,
                senders=dealt.senders,
                rank=launch.rank,
                HOW=How(
                    WORLD=node.world_size,
                    AVERAGE=node.reduce_op == "avg",
                    ROWS=dealt.rows,
                    BLOCK=block,
                    BLOCK_WORDS=block * x.element_size() // 4,
                    CHUNK=dealt.chunk,
                    THREADS=launch.threads(num_warps),
                    TOP_K=0 if factors is None else len(factors) // M,
                    HAS_ADDED=added is not None,
                    PARTS=0 if parts is None else len(parts),
                    OVERLAP=overlap,
                ),
                **constants_of(node, stores_reduced=True),
                num_warps=num_warps,
                **launch_options(overlap),
            ),
        )

    slots = x if factors is None else factors.contiguous(), x if added is None else in_words(added.contiguous())
    sources = x, *slots, x if parts is None else parts
    tensors = {"sources": sources, "given": pointers(given, x), "outputs": all_outputs(node, outputs)}
    launch.run(in_band_kernel, 0, arguments, tensors)
    return outputs


def in_words(x: torch.Tensor) -> torch.Tensor:
    """Returns x, or a copy of it, at an address from which the kernel can read words."""
    return x if x.data_ptr() % 4 == 0 else x.clone()
