"""Decode attention over the local part of a cache: a rank's part (o, lse), and the merging of all ranks' parts.

Problem, algorithm. They are those of tile.py without the exchange. `library` runs these kernels before and after its
all-gather. Signal protocol. There is none. A local counter tells which split of a head is the last one. Limits. See
`Shape.problem`. `library` leaves anything else to torch.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ditron_inductor.device.streams import handle_for
from ditron_inductor.lowering.decode_attention.decode_config import (
    CROWDED_TOKENS,
    INTERPRETED_SPLITS,
    DecodeConfig,
    Heads,
    are_far,
    count_splits,
    deal,
    merged_splits,
    select_config,
)
from ditron_inductor.lowering.decode_attention.split_attention import (
    How,
    Sizes,
    Strides,
    Tensors,
    attend_ticket,
    merge_ranks,
    merge_splits,
    part_offsets,
    work_of,
)
from ditron_inductor.lowering.host.launch import dot_precision, round_up
from ditron_inductor.lowering.host.launcher import Arguments, Launcher, local_launcher
from ditron_inductor.task.nodes import HEAD_DIMS, FlashDecode
from ditron_inductor.task.torch_dtypes import ACTIVATION_DTYPES

MERGE_WARPS = 4


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns x with contiguous rows, perhaps a copy, because a rank must not choose another strategy for it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides_in_rows(x: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides of `in_rows(x)` except the last one."""
    if x.stride(-1) == 1:
        return tuple(x.stride()[:-1])
    return tuple(math.prod(x.shape[place + 1 :]) for place in range(x.dim() - 1))


@dataclass(frozen=True)
class DecodeOperands:
    """The tensors of a call; see `nodes.FlashDecode`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor | None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors as the kernels take them."""
        lengths = self.lengths.contiguous()
        # Without pages, kernels do not read the block table.
        pages = lengths if self.block_table is None else in_rows(self.block_table)
        return {
            "q": in_rows(self.q),
            "k": in_rows(self.k),
            "v": in_rows(self.v),
            "lengths": lengths,
            "block_table": pages,
        }


@dataclass(frozen=True)
class Shape:
    """What a launch needs to know of operands of one form. capacity: the tokens that a sequence's cache has room for.
    pages: the number of blocks of a paged cache. page: the tokens of one, 0 for a dense cache. problem: why our kernels
    cannot run, or ''.
    """

    batch: int
    query_heads: int
    kv_heads: int
    head_dim: int
    capacity: int
    pages: int
    page: int
    dtype: torch.dtype
    strides_q: tuple[int, ...]
    strides_k: tuple[int, ...]
    strides_v: tuple[int, ...]
    stride_pages: int
    scale: float
    softcap: float
    num_sms: int
    problem: str

    @functools.cached_property
    def heads(self) -> Heads:
        return deal(self.batch, self.query_heads, self.kv_heads)

    @property
    def rows(self) -> int:
        """The query heads of all sequences."""
        return self.batch * self.query_heads

    def config(self, interpreted: bool) -> DecodeConfig:
        heads = self.heads.heads
        return select_config(
            head_dim=self.head_dim,
            dtype=self.dtype,
            # Larger blocks have not been measured with pages.
            crowded=self.page == 0 and heads > self.num_sms and heads * self.capacity > CROWDED_TOKENS * self.num_sms,
            interpreted=interpreted,
        )

    def new_partials(self, x: torch.Tensor, splits: int) -> torch.Tensor:
        return torch.empty(self.rows * splits * (self.head_dim + 1), dtype=torch.float32, device=x.device)

    def how(self, config: DecodeConfig, splits: int, interpreted: bool) -> How:
        """Returns the compile-time values that the kernels have in common."""
        heads = self.heads
        pages, page = (self.pages, self.page) if self.page else (1, config.block_n)
        return How(
            ROWS=heads.rows,
            BLOCK_ROWS=heads.block_rows,
            MERGED_ROWS=heads.merged_rows,
            PARTS=heads.parts,
            HEAD_DIM=self.head_dim,
            MERGED_SPLITS=merged_splits(heads, self.head_dim, splits, interpreted),
            BLOCK_N=config.block_n,
            LEAST_BLOCKS=config.least_blocks,
            PAGE=self.page,
            FAR=are_far(pages, page, self.head_dim, self.strides_k[:2], self.strides_v[:2]),
            SCALE=self.scale,
            SOFTCAP=self.softcap,
            PRECISION=dot_precision(self.dtype),
            UPCAST=interpreted,
        )

    def constants(
        self, config: DecodeConfig, splits: int, interpreted: bool, area: int | None = None
    ) -> dict[str, Any]:
        """Returns the options, and the arguments except tensors, that the kernels with attention have in common. area:
        the elements of a rank's parts in a slot, None without a slot.
        """
        heads = self.heads
        strides = Strides(self.strides_q, self.strides_k, self.strides_v, self.stride_pages)
        return {
            "heads": heads.heads,
            "kv_heads": self.kv_heads,
            "splits": splits,
            "sizes": Sizes(self.capacity, self.pages, area, strides),
            "HOW": self.how(config, splits, interpreted),
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }


def shape_of(node: FlashDecode, given: DecodeOperands, num_sms: int) -> Shape:
    """Returns the Shape of the operands of a call, which `task.flash_decode.check_operands` has allowed."""
    batch, query_heads, head_dim = given.q.shape
    pages, page = given.block_table, given.k.shape[1]
    problem = ""
    if head_dim not in HEAD_DIMS:
        problem = f"heads have {head_dim} elements, not one of {', '.join(map(str, HEAD_DIMS))}"
    elif given.q.dtype not in ACTIVATION_DTYPES:
        problem = f"no kernel of ours takes {given.q.dtype}"
    return Shape(
        batch=batch,
        query_heads=query_heads,
        kv_heads=given.k.shape[2],
        head_dim=head_dim,
        capacity=page if pages is None else page * pages.shape[1],
        pages=given.k.shape[0],
        page=0 if pages is None else page,
        dtype=given.q.dtype,
        strides_q=strides_in_rows(given.q),
        strides_k=strides_in_rows(given.k),
        strides_v=strides_in_rows(given.v),
        stride_pages=0 if pages is None else strides_in_rows(pages)[0],
        scale=node.scale,
        softcap=node.softcap,
        num_sms=num_sms,
        problem=problem,
    )


@triton.jit(do_not_specialize=["heads", "kv_heads", "splits"])
def local_attention_kernel(tensors, counters, heads, kv_heads, splits, sizes, HOW: tl.constexpr):
    """Stores this rank's part in `tensors.out`: o [heads * ROWS, HEAD_DIM], lse [heads * ROWS]. See the module."""
    work = work_of(tensors, counters, heads, kv_heads, splits, sizes)
    head, used, last = attend_ticket(tl.program_id(0), None, work, sizes.strides, HOW)
    if last != 0:
        o, lse = merge_splits(tensors.partials, work.counts, head, used, HOW)
        at, inside, lse_at, there = part_offsets(head, heads, HOW)
        tl.store(tensors.out + at, o, mask=inside)
        tl.store(tensors.out + lse_at, lse, mask=there)


@triton.jit(do_not_specialize=["heads"])
def merge_ranks_kernel(parts, out, heads, area, WORLD: tl.constexpr, HOW: tl.constexpr):
    """Merges the gathered parts [WORLD, area] into out [heads * ROWS, HEAD_DIM]. It has a program for each head."""
    whole = tl.full((), 1, tl.int32)
    merge_ranks(parts, out, tl.program_id(0), heads, area, whole, WORLD, HOW)


@dataclass(frozen=True)
class LocalAttention:
    """The kernels without an exchange, for operands of one form on one device."""

    shape: Shape
    config: DecodeConfig
    interpreted: bool
    attention: Launcher
    merge: Launcher

    @functools.cached_property
    def splits(self) -> int:
        """The number of splits of every head."""
        heads = self.shape.heads.heads
        programs = INTERPRETED_SPLITS if self.interpreted else self.config.programs(heads, self.shape.num_sms)
        return count_splits(heads, self.shape.capacity, programs, self.config)

    @property
    def area(self) -> int:
        """The number of elements of a rank's parts, rounded up."""
        return round_up(self.shape.rows * (self.shape.head_dim + 1), 16)

    def part(self, given: DecodeOperands, counters: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the local part, fp32 [area]. counters: int32 zeros, one for each head; zeros again afterwards."""
        q, shape = given.q, self.shape
        splits = self.splits
        part = torch.empty(self.area, dtype=torch.float32, device=q.device)
        if counters is None:
            counters = torch.zeros(shape.heads.heads, dtype=torch.int32, device=q.device)
        partials = shape.new_partials(q, splits)

        def arguments() -> Arguments:
            values = shape.constants(self.config, splits, self.interpreted)
            return Arguments(programs=shape.heads.heads * splits, values=values)

        tensors = {"tensors": Tensors(**given.tensors(), out=part, partials=partials), "counters": counters}
        self.attention(handle_for(q), arguments, (), (), tensors)
        return part

    def merged(self, parts: torch.Tensor, world_size: int, q: torch.Tensor) -> torch.Tensor:
        """Returns the attention [B, Hq, D] merged from the parts [world_size * area] of all ranks."""
        heads = self.shape.heads
        out = torch.empty_like(q, memory_format=torch.contiguous_format)

        def arguments() -> Arguments:
            values = {
                "heads": heads.heads,
                "area": self.area,
                "WORLD": world_size,
                "HOW": self.shape.how(self.config, self.splits, self.interpreted),
                "num_warps": MERGE_WARPS,
            }
            return Arguments(programs=heads.heads, values=values)

        self.merge(handle_for(q), arguments, (), (), {"parts": parts, "out": out})
        return out


def make_local(shape: Shape, device: torch.device, arch: str, config: DecodeConfig | None = None) -> LocalAttention:
    """Returns the kernels for a shape without a problem, on a device of `arch`. config: None to choose it."""
    interpreted = device.type == "cpu"
    config = (config or shape.config(interpreted)).for_arch(arch)
    attention = local_launcher(local_attention_kernel, device)
    merge = local_launcher(merge_ranks_kernel, device)
    return LocalAttention(shape, config, interpreted, attention, merge)
