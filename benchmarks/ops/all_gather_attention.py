"""`python -m benchmarks.ops.all_gather_attention`: causal attention to keys and values sharded along the sequence.

Every rank has `tokens` / W of one sequence, as queries, keys and values. Contestants, all of a shape in one run:

    local       the same attention to keys and values that are here already, nothing communicated: the limit
    sdpa        NCCL's all-gather of both in one launch, then the best of the library's attention kernels
    ring        torch's ring context parallel, by all-to-all or all-gather and by either of the kernels, whichever is
                fastest
    inductor    with a soft cap, in the place of `ring`: the all-gather, and attention that is written out
    ditron, ditron:tile, ditron:chunked, ditron:library     the op, as its trial chooses, and forced

`sdpa` is what a program calls: FlashAttention's mask that is aligned at the end of the keys. `sdpa:blocks` is what our
`library` runs, cuDNN's full and causal blocks with one kernel that merges them; for the other masks it is `sdpa` too.
With a soft cap, which no kernel of the library has, blocks are plain operations, and there is no limit. With a bias
`sdpa` is `scaled_dot_product_attention`, which chooses its kernel itself. A contestant is timed only if its result is
right on all ranks. Rows go into benchmarks/results/attention.csv.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from benchmarks.launch import measure_on_ranks, num_ranks
from benchmarks.ops import command
from benchmarks.ops.biases import BIASES
from benchmarks.records import ATTENTION, Row, by_cell, head_commit, merge_csv

if TYPE_CHECKING:
    import torch

    from benchmarks.session import Session

MODULE = "benchmarks.ops.all_gather_attention"
OP = "all_gather_attention"
LINK_BYTES_PER_S = 450e9
SAMPLED_ROWS = 32
MOST_ERROR = 1.0e-2
"""Of a result against the fp32 reference, in norm: a few roundings to bfloat16."""
LEAST_GAIN = {8192: 1.15, 16384: 1.08}
"""Of ours over `sdpa`, by tokens; elsewhere none is asked for, but no loss beyond SLOWER either."""
LEAST_OVER_RING = 1.05
RING_TOKENS = range(8192, 32768 + 1)
LEAST_LIMIT = 0.88
SLOWER = 1.02

HEADS = {"llama-8b": (32, 8), "llama-70b": (64, 8)}
TOKENS = (8192, 16384, 32768, 65536, 131072)


@dataclass(frozen=True)
class Cell:
    """Attention over `tokens` tokens in all. For masks see task/attention_masks.py, and biases.py for the mask `given`.
    """

    tokens: int
    heads: int
    key_heads: int
    head_dim: int = 128
    mask: str = "causal_offset"
    window: int = 0
    softcap: float = 0.0
    bias: str = ""

    @property
    def shape(self) -> str:
        sizes = f"tokens={self.tokens};heads={self.heads};key_heads={self.key_heads};head_dim={self.head_dim}"
        window = f";window={self.window}" if self.window else ""
        bias = f";bias={self.bias}" if self.bias else ""
        return f"{sizes};mask={self.mask}{window}{bias}" + (f";softcap={self.softcap:g}" if self.softcap else "")

    def bias_of(self, rank: int, world: int, device: torch.device) -> torch.Tensor | None:
        """Returns the bias that a rank adds to the scores of all heads and keys; None for no bias."""
        if not self.bias:
            return None
        length = self.tokens // world
        return BIASES[self.bias](rank, length, world * length, self.heads, device)


def anchors(mask: str) -> list[Cell]:
    """Prefill of two Llama models."""
    return [Cell(tokens, *heads, mask=mask) for tokens in TOKENS for heads in HEADS.values()]


BLOCKS = "sdpa:blocks"
SETS: dict[str, Callable[[], list[Cell]]] = {
    "anchors": lambda: anchors("causal_offset"),
    "zigzag": lambda: anchors("zigzag"),
    "full": lambda: anchors("full"),
    # Gemma 2, Mistral.
    "window": lambda: [Cell(tokens, 32, 8, window=window) for tokens in TOKENS[:4] for window in (1024, 4096)],
    # Gemma 2 9B and 27B.
    "softcap": lambda: [
        Cell(tokens, *heads, window=window, softcap=50.0)
        for tokens in TOKENS[:2]
        for heads in ((16, 8, 256), (32, 16, 128))
        for window in (0, 4096)
    ],
    "bias": lambda: [Cell(tokens, 32, 8, mask="given", bias=bias) for tokens in TOKENS[:2] for bias in BIASES],
    "few": lambda: [Cell(8192, 32, 8), Cell(8192, 64, 8), Cell(16384, 32, 8), Cell(32768, 32, 8)],
    "tiny": lambda: [
        Cell(64, 2, 1, 16, softcap=2.0),
        Cell(64, 2, 1, 16, "zigzag", 24),
        Cell(64, 2, 1, 16, "given", bias="alibi"),
    ],
}


@dataclass(frozen=True)
class Request:
    """The request of one run. only: the contestants that run, or empty for all of them."""

    cells: tuple[Cell, ...]
    device: str
    rounds: int
    out: str
    commit: str
    only: tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """Operands of a cell on this rank, and what is expected of `rows` of the result, in fp32."""

    cell: Cell
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None
    rows: torch.Tensor
    expected: torch.Tensor

    @property
    def scale(self) -> float:
        return float(self.cell.head_dim**-0.5)

    def check(self, out: torch.Tensor) -> None:
        """Raises AssertionError for a result [1, heads, tokens / W, head_dim] that is not near what is expected."""
        assert out.shape == self.q.shape and out.dtype == self.q.dtype, f"{out.shape} {out.dtype}"
        error = (out[:, :, self.rows].float() - self.expected).norm() / self.expected.norm()
        assert float(error) <= MOST_ERROR, f"the result is off by {float(error):.1e} of its norm"


def make_problem(session: Session, cell: Cell, device: Any, group_name: str) -> Problem:
    """Random operands, with the memory of a projection's output [tokens, heads, head_dim]."""
    import torch

    from benchmarks.ops.contest import sampled_rows
    from ditron_inductor.task import reference, reference_attention
    from ditron_inductor.task.attention_masks import Mask

    world, rank = session.world_size, session.rank
    length = cell.tokens // world
    generator = torch.Generator(device).manual_seed(1 + rank)

    def draw(heads: int) -> torch.Tensor:
        drawn = torch.randn(1, length, heads, cell.head_dim, generator=generator, device=device)
        return drawn.to(torch.bfloat16).transpose(1, 2)

    q, k, v = draw(cell.heads), draw(cell.key_heads), draw(cell.key_heads)
    group = {"gather_dim": 2, "world_size": world, "group_name": group_name}
    keys, values = (reference.all_gather(one.contiguous(), **group).float() for one in (k, v))
    rows = sampled_rows(length, device)[:: 1 if length < SAMPLED_ROWS else 2]
    seen = reference_attention.visible(Mask(cell.mask, cell.window), rank, world, length, length, device, rows)
    bias = cell.bias_of(rank, world, device)
    scores: dict[str, float] = {"scale": cell.head_dim**-0.5, "softcap": cell.softcap}
    of_rows = None if bias is None else bias[:, :, rows]
    expected, _ = reference_attention.attend(q[:, :, rows].float(), keys, values, seen=seen, bias=of_rows, **scores)
    return Problem(cell, q, k, v, bias, rows, expected)


def contestants(session: Session, problem: Problem, group_name: str) -> dict[str, Any]:
    """Calls by name, each of which returns the result."""
    import torch

    from benchmarks.ops.contest import TIMEOUT_S, WORKSPACE_LIMIT, in_turns
    from ditron_inductor.lowering.all_gather_attention import library
    from ditron_inductor.lowering.attention import local_attention
    from ditron_inductor.lowering.attention.block_parts import canonical, joined
    from ditron_inductor.lowering.attention.merge import Merge
    from ditron_inductor.task import attention_masks, reference_attention
    from ditron_inductor.task.nodes import AllGatherAttention
    from ditron_inductor.task.policy import Policy

    cell, q, k, v, bias, scale = problem.cell, problem.q, problem.k, problem.v, problem.bias, problem.scale
    world, rank, cuda = session.world_size, session.rank, problem.q.is_cuda
    node = AllGatherAttention(
        attention_masks.Mask(cell.mask, cell.window), scale, cell.softcap, world, group_name, "benchmark", Policy()
    )
    blocks = library.make(node, q, k, v)
    found: dict[str, Any] = {BLOCKS: lambda i: blocks(q, k, v, bias)[0]}
    group = torch.distributed.distributed_c10d._resolve_process_group(group_name)
    gathered = library.gather(k, v, group)
    if cuda:
        blocks_of_mask = attention_masks.blocks(node.mask, rank, world, q.shape[2], k.shape[2])
        spans = joined(sorted(blocks_of_mask, key=lambda one: one.source))
        run = local_attention.choose(q, k, v, cell.softcap, biased=bias is not None)
        merge = Merge(q, [span.rows for span in spans])

        def attention(i: int) -> torch.Tensor:
            partials = []
            for span in spans:
                seen = span.seen(bias, k.shape[2])
                partials.append(run.forward(span.queries(q), span.of(gathered[0]), span.of(gathered[1]), seen, scale))
            return merge(torch.cuda.current_stream().cuda_stream, partials)[0]

        found = {"local": attention, **found}
        if cell.softcap:
            found["inductor"] = _written(problem, node, group)
        elif bias is not None:
            found["sdpa:chosen"] = _chosen(q, k, v, bias, scale, group)
        elif cell.mask == "causal_offset":
            found["sdpa:aligned"] = _aligned(q, k, v, scale, rank, group, cell.window)
        found |= {} if cell.softcap else _rings(problem, group)
    else:
        seen = reference_attention.visible(
            attention_masks.Mask(cell.mask, cell.window), rank, world, q.shape[2], k.shape[2], q.device
        )
        keys, values = canonical(gathered[0]), canonical(gathered[1])
        given: dict[str, Any] = {"seen": seen, "scale": scale, "softcap": cell.softcap, "bias": bias}
        found["local"] = lambda i: reference_attention.attend(q, keys, values, **given)[0].to(q.dtype)

    def ours(strategy: str) -> Any:
        policy = Policy(strategy, WORKSPACE_LIMIT, TIMEOUT_S, trials=strategy == "auto")
        site = replace(node, site=f"benchmark/{cell.shape}:{node.kind}:{strategy}", policy=policy)
        return in_turns(site, [{"q": q, "k": k, "v": v, "bias": bias}], 0)

    found["ditron"] = ours("auto")
    return found | {f"ditron:{strategy}": ours(strategy) for strategy in ("tile", "chunked", "library")}


def _aligned(q: Any, k: Any, v: Any, scale: float, rank: int, group: Any, window: int) -> Any:
    """FlashAttention's causal mask is aligned at the end of the keys: the keys behind are left out."""
    import torch

    from ditron_inductor.lowering.all_gather_attention import library

    keep = (rank + 1) * k.shape[2]
    band = {"window_size_left": window - 1, "window_size_right": 0} if window else {}

    def call(i: int) -> torch.Tensor:
        gathered = library.gather(k, v, group)
        keys, values = (one.flatten(0, 2)[None, :keep] for one in gathered)
        found = torch.ops.aten._flash_attention_forward(
            q.transpose(1, 2), keys, values, None, None, q.shape[2], keep, 0.0, True, False, scale=scale, **band
        )
        return found[0].transpose(1, 2)

    return call


def _chosen(q: Any, k: Any, v: Any, bias: Any, scale: float, group: Any) -> Any:
    """A gather, and torch's attention with the kernel that torch chooses."""
    import torch

    from ditron_inductor.lowering.all_gather_attention import library
    from ditron_inductor.lowering.attention.block_parts import canonical

    def call(i: int) -> torch.Tensor:
        keys, values = map(canonical, library.gather(k, v, group))
        return torch.nn.functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=bias, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )

    return call


def _rings(problem: Problem, group: Any) -> dict[str, Any]:
    """torch's ring attention in its forms; nothing for masks that it does not know."""
    import torch
    from torch.distributed.tensor.experimental import _attention

    try:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring
    except ImportError:
        ring = _attention  # type: ignore[assignment]
    cell, q, k, v = problem.cell, problem.q, problem.k, problem.v
    if cell.mask not in ("causal_offset", "zigzag") or cell.window:
        return {}
    aten = torch.ops.aten
    kernels: dict[str, tuple[Any, dict[str, Any]]] = {
        "cudnn": (aten._scaled_dot_product_cudnn_attention, {"attn_bias": None, "compute_log_sumexp": True}),
        "flash": (aten._scaled_dot_product_flash_attention, {}),
    }

    def call(i: int, *, method: str, kernel: str) -> torch.Tensor:
        ring._cp_options.enable_load_balance = cell.mask == "zigzag"
        ring._cp_options.rotate_method = getattr(ring._RotateMethod, method)
        op, given = kernels[kernel]
        found = ring._templated_ring_attention(
            group, 2, op, q, k, v, is_causal=True, scale=problem.scale, dropout_p=0.0, **given
        )
        # Its sums are in fp32.
        return found[0].to(q.dtype)

    return {
        f"ring:{method}:{kernel}": functools.partial(call, method=method, kernel=kernel)
        for method in ("ALL_TO_ALL", "ALL_GATHER")
        for kernel in kernels
    }


def _written(problem: Problem, node: Any, group: Any) -> Callable[[int], torch.Tensor]:
    """Returns a call of what a program has with a soft cap: a gather, and attention that is written out and compiled by
    Inductor.
    """
    import torch

    from ditron_inductor.lowering.all_gather_attention import library
    from ditron_inductor.lowering.attention.block_parts import canonical
    from ditron_inductor.task import reference_attention

    q, k, v, softcap = problem.q, problem.k, problem.v, problem.cell.softcap
    seen = reference_attention.visible(node.mask, group.rank(), group.size(), q.shape[2], k.shape[2], q.device)
    times = q.shape[1] // k.shape[1]

    def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        keys, values = (one.repeat_interleave(times, 1) for one in (keys, values))
        scores = softcap * torch.tanh(q @ keys.mT * problem.scale / softcap)
        return scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=torch.float32).to(q.dtype) @ values

    compiled = torch.compile(attend)

    def call(i: int) -> torch.Tensor:
        keys, values = map(canonical, library.gather(k, v, group))
        return compiled(q, keys, values, seen)

    return call


def received_bytes(cell: Cell, world: int) -> int:
    """Returns the bytes that the rank with the most to receive receives."""
    return 2 * (world - 1) * cell.tokens // world * cell.key_heads * cell.head_dim * 2


def run_cell(session: Session, request: Request, cell: Cell, group_name: str) -> list[Row]:
    """Times of the contestants whose results are right, as rows."""
    problem = make_problem(session, cell, session.clock.device, group_name)
    calls = contestants(session, problem, group_name)
    return timed(session, request, cell, OP, calls, problem.check)


def timed(
    session: Session, request: Request, cell: Cell, op: str, calls: dict[str, Any], check: Callable[[Any], None]
) -> list[Row]:
    """Rows of the calls for whose results `check` raises nothing. `local` is the limit, with the links; of the forms of
    a baseline the fastest counts.
    """
    from benchmarks.timing import interleaved

    session.say(cell.shape)
    if request.only:
        calls = {name: call for name, call in calls.items() if name.partition(":")[0] in ("local", *request.only)
                 or name in request.only}  # fmt: skip

    def checked(name: str) -> Any:
        call = session.after_trial(name, calls[name])
        check(call(0))
        return call

    ready = session.right(calls, checked)
    times = interleaved(session.clock, ready, 1, request.rounds)
    for kind in ("sdpa", "ring"):
        forms = sorted((name for name in times if name.startswith(kind)), key=lambda name: times[name].p50_us)
        if len(forms) > 1:
            session.say("    " + "  ".join(f"{name} {times[name].p50_us:.1f}" for name in forms))
        # Calls by blocks are no form that a program has by itself: they stand for themselves.
        for name in sorted(forms, key=lambda name: name == BLOCKS):
            times.setdefault(kind, times[name])
            if name != BLOCKS:
                del times[name]
    limit = None
    if session.clock.device.type == "cuda" and "local" in times and not cell.softcap:
        limit = max(times["local"].p50_us, received_bytes(cell, session.world_size) / LINK_BYTES_PER_S * 1e6)
    order = ["local", "sdpa", BLOCKS, "ring", "inductor", *(name for name in times if name.startswith("ditron"))]
    return session.rows_of(
        {name: times[name] for name in order if name in times},
        bench="attention",
        op=op,
        shape=cell.shape,
        graph=False,
        limit_us=limit,
        commit=request.commit,
    )


def verdict(rows: Sequence[Row]) -> str:
    """Says whether the rows of one cell reach the targets of this op. The text is empty without a baseline."""
    us = {row.contestant: row.p50_us for row in rows if row.p50_us}
    if "ditron" not in us or "sdpa" not in us:
        return ""
    tokens = int(rows[0].sizes["tokens"])
    gain = us["sdpa"] / us["ditron"]
    holds = gain >= LEAST_GAIN.get(tokens, 1 / SLOWER)
    text = f"sdpa/ditron {gain:.2f}"
    if "ring" in us:
        over = us["ring"] / us["ditron"]
        holds &= over >= (LEAST_OVER_RING if tokens in RING_TOKENS else 1 / SLOWER)
        text += f", ring/ditron {over:.2f}"
    if rows[0].limit_us is not None:
        part = rows[0].limit_us / us["ditron"]
        holds &= part >= LEAST_LIMIT
        text += f", limit/ditron {part:.2f}"
    return f"{text} {'PASS' if holds else 'FAIL'}"


Verdict = Callable[[Sequence[Row]], str]


def table(rows: Sequence[Row], verdict: Verdict) -> str:
    """Microseconds, one line for each cell, and what `verdict` says of it."""
    names = list(dict.fromkeys(row.contestant for row in rows))
    lines = []
    for of_cell in by_cell(rows):
        us = {row.contestant: f"{row.p50_us:.1f}" for row in of_cell}
        lines.append([of_cell[0].shape, *[us.get(name, "-") for name in names], verdict(of_cell)])
    return tabulate(lines, ["shape", *names, "targets"], disable_numparse=True)


def measure(session: Session, request: Request) -> list[Row]:
    """All cells, on one rank."""
    return measure_by(session, request, run_cell, verdict)


def measure_by(
    session: Session, request: Request, run: Callable[[Session, Request, Cell, str], list[Row]], verdict: Verdict
) -> list[Row]:
    """All cells, each by `run`; the rows go where the request wants them, the table is printed."""
    rows: list[Row] = []
    for cell in request.cells:
        rows += run(session, request, cell, session.group_name)
        if session.rank == 0 and request.out:
            merge_csv(Path(request.out), rows)
    if session.rank == 0:
        print(table(rows, verdict), flush=True)
    return rows


def parser(module: str = MODULE) -> argparse.ArgumentParser:
    """The command line."""
    result = command.parser(module, SETS, ["anchors"], world=0, limit_s=540.0)
    result.add_argument("--tokens", nargs="+", type=int, default=[], help="only shapes of so many tokens")
    result.add_argument("--heads", nargs="+", type=int, default=[], help="only shapes of so many heads")
    result.add_argument("--only", nargs="+", default=[], help="sdpa, ring, ditron, ditron:tile, ...; all by default")
    return result


def request_of(options: argparse.Namespace) -> Request:
    """The command line as the ranks get it."""
    cells = tuple(
        cell
        for name in options.shapes
        for cell in SETS[name]()
        if (not options.tokens or cell.tokens in options.tokens) and (not options.heads or cell.heads in options.heads)
    )
    out, commit = command.out_of(options, ATTENTION), options.commit or head_commit()
    return Request(cells, options.device, options.rounds, out, commit, tuple(options.only))


def main(arguments: Sequence[str] | None = None, module: str = MODULE) -> int:
    """The command of a module."""
    options = parser(module).parse_args(arguments)
    world = num_ranks(module, options.world, options.device)
    if not world:
        return 2
    return measure_on_ranks(module, request_of(options), world, options.device, options.limit)


if __name__ == "__main__":
    sys.exit(main())
