"""`python -m benchmarks.ops.cached_attention`: the attention of a decode step to a rank's own cache.

It needs one GPU: nothing is communicated. From the products Q, K and V of one token of each sequence: the rotary
embedding, the write of the cache, and attention to all tokens up to the new one. Contestants, interleaved, inside CUDA
graphs; each call has a cache of its own, as each layer has:

    inductor            torch's attention with `enable_gqa`, and Inductor's kernels in front of it
    repeated            the same with repeated heads and a mask from outside, as transformers writes it
    flex                torch's flex_attention, whose mask is computed in its kernel
    ditron              cached_attention, by lengths
    ditron:mask         the same by a mask of bools and its bounds, as it is in models of transformers

Of a paged cache, whose blocks lie in any order, `inductor` gathers each sequence's blocks before it attends, and `flex`
has a block mask of the blocks, which is made in advance. Inductor writes the new token, for `ditron` too.
With sinks, which no attention op of torch takes, `inductor` gives them to a key of zeros in the last place of the
cache, as a mask for each head; `repeated` writes the attention out, as transformers does for GPT-OSS; and `flex` scales
the result by its log-sum-exp. The limit is the time in which a copy reads the tokens that are attended to.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from benchmarks import paged
from benchmarks.ops import command
from benchmarks.ops.expert_cells import BUDGET_S, LIMIT_S, bytes_per_s, end_cell
from benchmarks.records import RESULTS, Row
from benchmarks.session import Session
from benchmarks.timing import interleaved
from benchmarks.tolerances import relative_error
from ditron_inductor.lowering.cached_attention.cached_kernel import cached_attention
from ditron_inductor.report.explain import without_caches
from ditron_inductor.report.timing import GRAPH_CALLS
from ditron_inductor.task import schema
from ditron_inductor.task.cached_attention import bounds as bounds_of
from ditron_inductor.task.cached_attention import cached_attention as reference
from ditron_inductor.task.nodes import CachedAttention
from ditron_inductor.tools.demo_model import rotate

MODULE = "benchmarks.ops.cached_attention"
RECORDED = RESULTS / "decode.csv"
TOLERANCE = 2e-2
SHOWN = ("inductor", "repeated", "flex", "ditron", "ditron:mask")
Attend = Callable[..., torch.Tensor]


class Shape(NamedTuple):
    """B sequences with Hq query heads and Hkv key heads of D elements, in caches with room for S tokens, of which the
    new one is at `position`; it is not the last one if there are `sinks`. page: the tokens of a block of caches in
    blocks, or 0.
    """

    B: int
    Hq: int
    Hkv: int
    D: int
    S: int
    position: int
    sinks: bool = False
    page: int = 0

    def __str__(self) -> str:
        sizes = (f"{name}={value}" for name, value in self._asdict().items() if name not in ("sinks", "page"))
        return ";".join([*sizes, *["sinks=1"] * self.sinks, *[f"page={self.page}"] * (self.page > 0)])

    @property
    def contestants(self) -> tuple[str, ...]:
        """Who takes part on a GPU."""
        left_out = ("repeated", "ditron:mask") if self.page else ("ditron:mask",) if self.sinks else ()
        return tuple(name for name in SHOWN if name not in left_out)


OF_8B, OF_70B, OF_OPT, OF_GPT_OSS = (16, 4, 128), (32, 4, 128), (8, 8, 128), (32, 4, 64)
"""A rank of two of Llama 8B and 70B, one with as many heads of keys as of queries, and one of two of GPT-OSS."""
SHAPES = {
    "zoo": tuple(
        Shape(B, *OF_8B, S, position)
        for B, S, position in (
            *((1, 256, 255), (1, 1024, 1000), (1, 4096, 200), (1, 4096, 4095), (1, 65536, 65535), (4, 4096, 4095)),
            *((32, 256, 255), (32, 4096, 2048), (32, 4096, 4095), (128, 1024, 1023)),
        )
    ),
    "heads": tuple(
        Shape(B, *heads, S, S - 1) for heads in (OF_70B, OF_OPT) for B, S in ((1, 256), (1, 4096), (32, 256))
    ),
    "odd": (Shape(3, 12, 2, 64, 1111, 777), Shape(7, 16, 16, 256, 900, 899), Shape(2, 40, 8, 128, 3000, 1)),
    "sinks": tuple(
        Shape(B, *OF_GPT_OSS, S, position, True)
        for B, S, position in (
            *((1, 256, 254), (1, 4096, 200), (1, 4096, 4094), (1, 65536, 65534)),
            *((8, 4096, 4094), (32, 1024, 1022), (32, 4096, 2048)),
        )
    ),
    "paged": tuple(
        Shape(B, *OF_8B, S, position, page=page)
        for B, S, position, page in (
            *((1, 1024, 1000, 16), (1, 4096, 4095, 16), (1, 65536, 65535, 16), (8, 4096, 2048, 16)),
            *((32, 1024, 700, 16), (32, 4096, 4095, 16), (32, 4096, 4095, 64), (32, 4096, 4095, 256)),
            *((4, 4096, 4095, 1), (128, 1024, 1023, 16)),
        )
    ),
    "tiny": (
        *(Shape(2, 4, 2, 16, 40, 30), Shape(2, 4, 2, 16, 40, 30, True)),
        Shape(2, 4, 2, 16, 40, 30, page=8),
    ),
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = command.parser(MODULE, SHAPES, ["zoo", "heads", "odd", "sinks", "paged"], world=1, limit_s=LIMIT_S)
    result.add_argument("--budget", type=float, default=BUDGET_S, help="seconds, after which no cell is begun")
    return result


def attend_in_torch(shape: Shape, form: str) -> Attend:
    """The decode step of a layer as a contestant writes it. It returns [B, Hq, 1, D]."""
    group, scale = shape.Hq // shape.Hkv, shape.D**-0.5

    def repeated(cache: torch.Tensor) -> torch.Tensor:
        B, heads, S, D = cache.shape
        return cache[:, :, None].expand(B, heads, group, S, D).reshape(B, heads * group, S, D)

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
        cos: torch.Tensor, sin: torch.Tensor, position: torch.Tensor, shown: torch.Tensor, bias: torch.Tensor,
        sinks: torch.Tensor, *_: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        q, k, v = (one.unflatten(-1, (-1, shape.D))[:, :, None] for one in (q, k, v))
        keys.index_copy_(2, position, rotate(k, cos, sin))
        values.index_copy_(2, position, v)
        q = rotate(q, cos, sin)
        if form == "flex":

            def hidden(score: torch.Tensor, b: object, h: object, row: object, token: torch.Tensor) -> torch.Tensor:
                return torch.where(token <= position[0], score, -float("inf"))

            how = {"score_mod": hidden, "scale": scale, "enable_gqa": True}
            if shape.sinks:
                out, lse = flex_attention(q, keys, values, return_lse=True, **how)
                return out * torch.sigmoid(lse - sinks[:, None])[..., None].to(out.dtype)
            out = flex_attention(q, keys, values, **how)
            assert isinstance(out, torch.Tensor)
            return out
        if form == "repeated" and shape.sinks:
            scores = q @ repeated(keys).transpose(2, 3) * scale + bias
            both = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(shape.B, -1, 1, -1)], -1)
            both = both - both.max(-1, keepdim=True).values
            return both.softmax(-1, dtype=both.dtype)[..., :-1] @ repeated(values)
        if form == "repeated":
            return F.scaled_dot_product_attention(q, repeated(keys), repeated(values), shown, scale=scale)
        mask = (torch.arange(keys.shape[2], device=q.device) <= position)[None, None, None]
        if shape.sinks:
            numbers = torch.where(mask, 0.0, -float("inf")).expand(1, shape.Hq, 1, -1)
            mask = torch.cat([numbers[..., :-1], sinks.view(1, -1, 1, 1)], -1).to(q.dtype)
        return F.scaled_dot_product_attention(q, keys, values, mask, scale=scale, enable_gqa=True)

    return attend


def attend_in_blocks(shape: Shape, form: str, strategy: str) -> Attend:
    """The decode step of a layer with caches in blocks, as a contestant writes it. strategy: of our call."""
    scale, page = shape.D**-0.5, shape.page
    node = CachedAttention(scale, "lengths", rotated=True, added=1, paged=True, strategy=strategy)
    call, text = schema.overload(node.kind), node.text()

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
        cos: torch.Tensor, sin: torch.Tensor, position: torch.Tensor, *rest: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        table, columns = rest[-2:]
        q, k, v = (one.unflatten(-1, (-1, shape.D))[:, :, None] for one in (q, k, v))
        for cache, new in ((keys, rotate(k, cos, sin)), (values, v)):
            paged.append(cache, new[:, :, 0], table, position)
        if form == "ditron":
            given = [q[:, :, 0], keys.transpose(1, 2), values.transpose(1, 2), table, position, cos, sin]
            out: torch.Tensor = call(given, text, None)[0]
            return out[:, :, None]
        q = rotate(q, cos, sin)
        if form == "inductor":
            gathered = (paged.gathered(cache, table) for cache in (keys, values))
            mask = (torch.arange(shape.S, device=q.device) <= position)[None, None, None]
            return F.scaled_dot_product_attention(q, *gathered, mask, scale=scale, enable_gqa=True)

        def is_seen(b: torch.Tensor, h: torch.Tensor, row: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
            column = columns[b, token // page]
            return (column >= 0) & (column * page + token % page <= position[0])

        count = (position // page + 1).to(torch.int32).expand(shape.B, 1, 1)
        seen = BlockMask.from_kv_blocks(
            count, table[:, None, None], BLOCK_SIZE=(128, page), mask_mod=is_seen, seq_lengths=(1, len(keys) * page)
        )
        flat = (cache.flatten(0, 1).transpose(0, 1)[None] for cache in (keys, values))
        found = flex_attention(q, *flat, block_mask=seen, scale=scale, enable_gqa=True)
        assert isinstance(found, torch.Tensor)
        return found

    return attend


def drawn(shape: Shape, device: torch.device, calls: int) -> list[tuple[torch.Tensor, ...]]:
    """The operands of the calls: products, caches, angles, the position, the mask of the tokens up to it as bools and
    as numbers, and sinks. The last place of a cache holds zeros if there are sinks. With blocks, of which the caches
    have one for each that the sequences have room for, in any order, also the block table, and which column of it a
    sequence has a block in, or -1.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def normal(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, device=device, dtype=dtype).normal_(generator=generator)

    B, Hq, Hkv, D, S, at, has_sinks, page = shape
    angles, position = 6.3 * normal(1, D // 2), torch.tensor([at], device=device)
    shown = (torch.arange(S, device=device) <= position).expand(B, 1, 1, S).contiguous()
    bias = torch.zeros(shown.shape, dtype=dtype, device=device).masked_fill_(~shown, torch.finfo(dtype).min)
    rest = [angles.cos(), angles.sin(), position, shown, bias, normal(Hq)]
    sizes: tuple[int, ...] = (B, Hkv, S, D)
    if page:
        sizes = (B * S // page, page, Hkv, D)
        table = torch.randperm(sizes[0], generator=generator, device=device, dtype=torch.int32).view(B, -1)
        columns = torch.full((B, sizes[0]), -1, dtype=torch.int32, device=device)
        columns.scatter_(1, table.long(), torch.arange(S // page, dtype=torch.int32, device=device).expand(B, -1))
        rest += [table, columns]
    widths = (Hq * D, Hkv * D, Hkv * D)
    found = [(*(normal(B, width) for width in widths), normal(*sizes), normal(*sizes), *rest) for _ in range(calls)]
    for cache in (cache for given in found for cache in given[3:5] if has_sinks):
        cache[:, :, -1] = 0.0
    return found


def exact(shape: Shape, given: Sequence[torch.Tensor]) -> torch.Tensor:
    """The attention [B, Hq, 1, D] in fp32, of caches that the contestants have written."""
    q, keys, values, cos, sin, sinks = (given[index].float() for index in (0, 3, 4, 5, 6, 10))
    last = shape.position + 1
    if shape.page:
        keys, values = (paged.gathered(cache, given[11]) for cache in (keys, values))
    caches = keys[:, :, :last], values[:, :, :last]
    operands = [q.unflatten(-1, (-1, shape.D)), *caches, *[sinks] * shape.sinks, cos, sin]
    node = CachedAttention(shape.D**-0.5, "all", rotated=True, sinks=shape.sinks)
    return reference(node, *node.split(operands))[:, :, None]


def contestants(
    session: Session, shape: Shape, operands: list[tuple[torch.Tensor, ...]]
) -> dict[str, Callable[[int], torch.Tensor]]:
    """The contestants whose results are right, captured where there is a GPU."""
    first, cuda = operands[0], operands[0][0].is_cuda
    # The layers of a model share them.
    bounds = {name: bounds_of(first[index][:, 0, 0]) for name, index in (("given", 8), ("bias", 9))}
    strategy = "auto" if cuda else "tile"

    def ours(
        mask: str,
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
        cos: torch.Tensor, sin: torch.Tensor, position: torch.Tensor, shown: torch.Tensor, bias: torch.Tensor,
        sinks: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        q, k, v = (one.unflatten(-1, (-1, shape.D)) for one in (q, k, v))
        node = CachedAttention(shape.D**-0.5, mask, appends=True, rotated=True, sinks=shape.sinks, strategy=strategy)
        choice = {
            "lengths": [position],
            "given": [shown[:, 0, 0], *bounds["given"]],
            "bias": [bias[:, 0, 0], *bounds["bias"], sinks],
        }[mask]
        return cached_attention(node, [q, keys, values, *choice, position, k, v, cos, sin])[0][:, :, None]

    def checked(name: str) -> Callable[[int], torch.Tensor]:
        mask = "bias" if shape.sinks else "given" if name == "ditron:mask" else "lengths"
        attend = attend_in_blocks(shape, name, strategy) if shape.page else attend_in_torch(shape, name)
        compiled = shape.page or not name.startswith("ditron")
        run = torch.compile(attend, dynamic=False) if compiled else functools.partial(ours, mask)
        for cache in first[3:5]:
            if shape.page:
                cache[first[11][:, shape.position // shape.page], shape.position % shape.page] = float("nan")
            else:
                cache[:, :, shape.position] = float("nan")
        found = run(*first)
        error = relative_error(found.float(), exact(shape, first))
        assert error < TOLERANCE, f"{name} is not near: {error:.1e}"
        return lambda index: run(*operands[index % len(operands)])

    with without_caches():
        names = [name for name in shape.contestants if cuda or name != "flex"]
        calls = session.right(names, checked)
    return session.replays(calls, GRAPH_CALLS) if cuda else calls


def measure(session: Session, options: argparse.Namespace) -> list[Row]:
    """All cells for which there is time; rank 0 writes and prints."""
    rows: list[Row] = []
    lines = []
    device = session.clock.device
    per_call = GRAPH_CALLS if device.type == "cuda" else 1
    copied = bytes_per_s(device)
    for shape in (shape for name in options.shapes for shape in SHAPES[name]):
        if session.seconds() > options.budget:
            session.say(f"no time for {shape}")
            continue
        torch.compiler.reset()
        calls = contestants(session, shape, drawn(shape, device, per_call))
        times = interleaved(session.clock, calls, per_call, options.rounds)
        nbytes = 4 * shape.B * shape.Hkv * shape.D * (shape.position + 1)
        rows += session.rows_of(
            times, bench="decode", op="cached_attention", shape=str(shape), graph=device.type == "cuda",
            limit_us=nbytes / copied * 1e6, commit=options.commit,
        )  # fmt: skip
        us = {name: each.p50_us for name, each in times.items()}
        best = min((us[name] for name in us if not name.startswith("ditron")), default=float("nan"))
        ratio = best / us["ditron"] if "ditron" in us else float("nan")
        lines.append([str(shape), *(f"{us[name]:.1f}" if name in us else "-" for name in SHOWN), f"{ratio:.2f}"])
        session.say("  ".join(lines[-1]))
        del calls
        end_cell(session, options, rows)
    if session.rank == 0 and lines:
        print(tabulate(lines, ["cell", *SHOWN, "best/ditron"], disable_numparse=True), flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return command.start_alone(MODULE, parser().parse_args(arguments), RECORDED)


if __name__ == "__main__":
    sys.exit(main())
