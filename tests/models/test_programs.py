"""Programs as users write them, strategy `tile` on the CPU device: compiled and eager agree, with and without fusion.

Each is small, and there for one trap: chunks in another order, memory that is reused before a late wait, groups of one
size, inputs that are written to, sizes that change between calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.utils.checkpoint import checkpoint

from benchmarks.tolerances import MODEL_TOLERANCES, relative_error
from ditron_inductor.report.explain import without_caches
from ditron_inductor.task.site_records import collect_sites
from tests.cases import sampled
from tests.models.interpreted import code_generated, without_generated_code
from tests.ranks import RankContext, RankPools

TILE: dict[str, Any] = {"ditron.strategy": "tile"}
Tensors = Sequence[torch.Tensor]
Program = Callable[..., Tensors]


def world() -> Any:
    return dist.group.WORLD


def launch(name: str, x: Any, *args: Any) -> Any:
    """A collective of the default group that nobody has waited for."""
    return getattr(torch.ops._c10d_functional, name)(x, *args, world().group_name)


def wait(launched: Any) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(launched)


def gather(x: torch.Tensor, dim: int = 0, group: Any = None) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        x = x.contiguous()  # torch 2.11 takes nothing else in eager mode
    return functional.all_gather_tensor_autograd(x, dim, group or world())


def scatter(x: torch.Tensor, dim: int = 0, group: Any = None) -> torch.Tensor:
    return functional.reduce_scatter_tensor_autograd(x, "sum", dim, group or world())


def reduce(x: torch.Tensor, op: str = "sum", group: Any = None) -> torch.Tensor:
    return functional.all_reduce(x, op, group or world())


def wrong_chunks(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    """x [2, 4, 16]. Permuted, partial and finer chunks, and chunks of another dimension, of gathers and scatters."""
    size = dist.get_world_size()
    g = wait(launch("all_gather_into_tensor", x, size))
    y = x @ w
    gathered = [
        torch.cat(g.chunk(size)[::-1], 1) @ w,
        torch.cat(g.chunk(size)[1:], 1) @ w,
        torch.cat(g.chunk(2 * size), 1) @ w,
        torch.cat(g.chunk(size, 1)) @ w,
    ]
    operands = [torch.cat(y.chunk(size, 1)[::-1]), torch.cat(y.chunk(4, 1)), torch.cat(y.chunk(size, 2))]
    return [*gathered, *(wait(launch("reduce_scatter_tensor", one, "sum", size)) for one in operands)]


def lookalikes(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    """x [8, 16], w [16, 24]. Chunks that repeat, bits read as another dtype, operands of the gathered tensor's own, and
    intermediates that are written to or returned.
    """
    size = dist.get_world_size()
    whole, product = gather(x), x @ w
    chunks, rows = whole.chunk(size), product.chunk(size)
    bits = wait(launch("all_gather_into_tensor", x.bfloat16().view(torch.uint8), size))
    doubled = gather(x).mul_(2)
    scattered, returned = (x @ (w + 1)), (x @ (w + 2))
    results = [
        torch.cat([chunks[0]] * size) @ w,
        wait(launch("reduce_scatter_tensor", torch.cat([rows[0]] * size), "sum", size)),
        bits.view(torch.float16) @ w.half(),
        whole @ (whole.t() @ whole),
        doubled @ w,
        scatter(scattered),
        reduce(returned),
        returned,
    ]
    return [*results, scattered.add_(1)]


def reduce_ops(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    """One fused reduction, and others beside it that Inductor runs in place."""
    return [reduce(x @ w, op) for op in ("max", "min", "sum")] + [reduce((x @ w) * 0.3, "product")]


def late_waits(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    """Collectives of every form that are left alone and waited for last, with tensors of their size made in between."""
    size = dist.get_world_size()
    fused = reduce(x @ w)
    launched = [
        launch("all_reduce", (x @ (w + 1)).cumsum(0), "sum"),
        launch("all_reduce", x @ (w + 2), "max"),
        launch("all_gather_into_tensor", (x @ (w + 3)).tanh(), size),
        launch("reduce_scatter_tensor", (x @ (w + 4)).cumsum(0), "sum", size),
        launch("broadcast", x @ (w + 5), 0),
        *launch("all_reduce_coalesced", [x @ (w + 6), (x @ (w + 7)).cos()], "max"),
        *launch("all_gather_into_tensor_coalesced", [(x @ (w + 8)).sin(), (x @ (w + 9)).cos()], size),
    ]
    between = [reduce(x.sin() @ w), *(((x + i) @ w).relu().sum() for i in range(4))]
    return [fused, *between, *map(wait, launched)]


def mixed_order(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    """x [8, 16], w [16, 24], v [24, 16]. Fused sites and other collectives take turns, each fed by the one before."""
    a = reduce(x @ w)
    b = functional.broadcast(x * 2, 0, world())
    c = gather(b) @ w
    d = functional.all_to_all_single(c.contiguous(), None, None, world())
    e = scatter(d @ v)
    return [a, b, c, d, e, reduce(e.sum()), reduce(reduce(e, "max") @ w)]


def written_inputs(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    g = wait(launch("all_gather_into_tensor", x, dist.get_world_size()))
    y = g @ w
    g.mul_(2)
    x.add_(1)
    w.mul_(2)
    y.add_(3)
    z = x @ w
    dist.all_reduce(z.view(2, -1, 24))
    return [y, g, g @ w, z, z.add_(1)]


def operands(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    """x [8, 16], w [16, 24]. Strided and transposed operands, vectors, and reductions of views."""
    return [
        gather(x[::2]) @ w[:, ::2],
        gather(x[:, ::2]) @ w[::2],
        gather(w.t()) @ x.t(),
        reduce(x[0] @ w),
        reduce((x @ w).t()),
        reduce((x @ w).view(2, 4, 4, 6)).flatten(),
        reduce((x @ w)[2:6]),
        scatter(w.t() @ x.t()),
    ]


def gathered_returned(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    g = gather(x, 1)
    return [g @ w, g.transpose(1, 2), g[:, -1]]


def sums(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> Tensors:
    """x [4, 16], w [16, 24], v [24, 16], bias [16]. Sums that are scattered, in both directions."""
    g = gather(x)
    gate, up = g @ w, g @ w.flip(0)
    return [scatter(torch.addmm(bias, torch.tanh(gate) * up, v) + gate @ v.flip(1))]


def checkpointed(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return scatter(torch.relu(gather(x) @ w) @ w.t())

    y: Any = checkpoint(block, x, w, use_reentrant=False)
    z: Any = checkpoint(block, y, w, use_reentrant=False)
    return [z]


def broken_graph(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    a = gather(x) @ w
    torch._dynamo.graph_break()
    b = scatter(a @ w.t())
    return [b, scatter(gather(b) @ w)]


def gathered_weights(w: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> Tensors:
    """w [12, 16], v [16, 6], x [2, 5, 16]. Weights sharded along rows and along columns, one of them used twice."""
    rows, columns = gather(w), gather(v, 1)
    hidden = torch.tanh(x @ rows.t())
    return [hidden, x[0] @ rows.t(), (x @ columns).flatten(), (hidden @ gather(w)).transpose(0, 1)]


def scattered_columns(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    """x [2, 4, 16], w [16, 24]. The last dimension, of products of two and three dimensions."""
    return [scatter(x @ w, 2), torch.relu(scatter(x[0] @ w, 1)) @ w[:, :12].t()]


def contracted(x: torch.Tensor, g: torch.Tensor) -> Tensors:
    """x [2, 4, 16], g [2, 8, 24]. Gathered rows and gathered columns that matmuls contract: nothing is fused."""
    rows, columns = gather(x, 1), gather(g, 2)
    flat = g.flatten(0, 1)
    return [rows.flatten(0, 1).t() @ flat, columns @ flat.repeat(3, 1), rows.sin()]


def finished(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> Tensors:
    """x [4, 16], w [16, 48], v [24, 16], bias [16]. Gate and up in one weight; what follows reductions."""
    gate, up = (gather(x) @ w).chunk(2, -1)
    hidden = torch.nn.functional.silu(gate) * up
    scattered = x + scatter((hidden @ v) * bias.detach())
    reduced = torch.relu(reduce(hidden @ v.flip(0)) + bias)
    return [scattered, reduced @ w]


def written_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    """q [2, 6, 4, 8], k, v [2, 6, 2, 8]. Grouped heads, a soft cap, a mask of the rank's own; what follows is fused."""
    keys, values = gather(k, 1), gather(v, 1)
    scores = torch.einsum("bsghd,btgd->bghst", q.unflatten(2, (2, 2)), keys) / 3.0
    rows = torch.arange(6)[:, None] + 6 * dist.get_rank()
    scores = torch.where(rows >= torch.arange(keys.shape[1]), 2.0 * torch.tanh(scores / 2.0), -torch.inf)
    out = torch.einsum("bghst,btgd->bsghd", scores.softmax(-1), values).flatten(2)
    return [reduce(out @ q.flatten(0, 1).flatten(1)[:8].t()), out.relu()]


def trained(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, v: torch.Tensor) -> Tensors:
    """x [2, 4, 16], w [48, 16], bias [48], v [16, 24]. Gate and up in one weight stay one product."""
    gate, up = torch.nn.functional.linear(gather(x, 1), w, bias).chunk(2, -1)
    return [scatter((torch.nn.functional.silu(gate) * up) @ v.t(), 1)]


@dataclass(frozen=True)
class Case:
    """A program, the shapes of its inputs, whether gradients are compared too, what is fused forward, the epilogues
    that are absorbed there, and whether Inductor's code runs it: where memory is written to or used again.
    """

    program: Program
    shapes: tuple[tuple[int, ...], ...]
    grad: bool = False
    fused: tuple[str, ...] = ()
    epilogues: frozenset[str] = frozenset()
    generated: bool = False

    def __str__(self) -> str:
        return self.program.__name__


AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
XW = (8, 16), (16, 24)
FINISHED = frozenset({"silu(mm0) * mm1", "pre: mm0 * row(x0); full(x1) + mm0", "relu(mm0 + row(x0))"})
CASES = [
    Case(wrong_chunks, ((2, 4, 16), (16, 24))),
    Case(lookalikes, XW, generated=True),
    Case(reduce_ops, XW, fused=(AR,), generated=True),
    Case(late_waits, XW, fused=(AR, AR), generated=True),
    Case(mixed_order, (*XW, (24, 16)), fused=(AR, AG, RS, AR), generated=True),
    Case(written_inputs, XW, fused=(AG, AR), generated=True),
    Case(gathered_weights, ((12, 16), (16, 6), (2, 5, 16)), grad=True, fused=(AG, AG)),
    Case(scattered_columns, ((2, 4, 16), (16, 24)), fused=(RS, RS)),
    Case(operands, XW, fused=(AG, AG, AG, AR, AR, AR, RS)),
    Case(gathered_returned, ((2, 4, 16), (16, 24)), grad=True, fused=(AG,), generated=True),
    Case(contracted, ((2, 4, 16), (2, 8, 24)), grad=True),
    Case(sums, ((4, 16), (16, 24), (24, 16), (16,)), grad=True, fused=(AG, RS)),
    Case(finished, ((4, 16), (16, 48), (24, 16), (16,)), fused=(AG, RS, AR), epilogues=FINISHED, generated=True),
    Case(written_attention, ((2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8)), fused=("all_gather_attention", AR)),
    Case(trained, ((2, 4, 16), (48, 16), (48,), (16, 24)), grad=True, fused=(AG, RS)),
    Case(checkpointed, XW, grad=True, fused=(AG, RS, AG, RS), generated=True),
    Case(broken_graph, XW, grad=True, fused=(AG, RS, AG)),  # the last matmul is fused with its gather
]


def compare(ctx: RankContext, program: Program, call: Program, shapes: tuple[tuple[int, ...], ...], grad: bool) -> None:
    """AssertionError unless `call` gives, and writes to its inputs, what `program` does; gradients too, if wanted."""
    values = [torch.randn(shape, device=ctx.device) / shape[0] ** 0.5 for shape in shapes]
    ours, eager = ([value.clone().requires_grad_(grad) for value in values] for _ in range(2))
    got, wanted = list(call(*ours)), list(program(*eager))
    if grad:
        for outputs in (got, wanted):
            torch.stack([one.sin().sum() for one in outputs]).sum().backward()
        got += [one.grad for one in ours if one.grad is not None]
        wanted += [one.grad for one in eager if one.grad is not None]
    pairs = zip([*got, *ours], [*wanted, *eager], strict=True)
    errors = [relative_error(one.detach(), other.detach()) for one, other in pairs]
    assert max(errors) < MODEL_TOLERANCES[torch.float32], f"relative errors: {errors}"


def run_case(ctx: RankContext, case: Case) -> None:
    torch._dynamo.reset()
    with without_caches(), collect_sites() as sink, code_generated(case.generated):
        compiled = torch.compile(case.program, backend="ditron", options=TILE)
        for _ in range(2):
            compare(ctx, case.program, compiled, case.shapes, case.grad)
    fused = [site.kind for graph in sink.graphs if not graph.is_backward for site in graph.sites if site.matched]
    assert Counter(fused) == Counter(case.fused), fused
    assert {getattr(site.task, "epilogue", "") for graph in sink.graphs for site in graph.sites} >= case.epilogues


@pytest.mark.timeout(100)
@pytest.mark.parametrize("case", sampled(CASES), ids=str)
def test_program(rank_pools: RankPools, case: Case) -> None:
    rank_pools.get("cpu", 2).run(run_case, case, timeout=90)


def run_sizes(ctx: RankContext) -> None:
    """Batch and sequence change between calls; every graph is fused, the one with sizes read from its results too."""

    def program(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        h = gather(x, 1) @ w
        flat = scatter(h.reshape(-1, h.shape[-1]) @ w.t())
        return [scatter(torch.relu(h) @ w.t(), 1), flat.view(x.shape[1], x.shape[0], 16)]

    torch._dynamo.reset()
    with without_caches(), collect_sites() as sink, without_generated_code():
        compiled = torch.compile(program, backend="ditron", options=TILE, dynamic=True)
        for batch, length in ((2, 3), (1, 4), (3, 1)):
            compare(ctx, program, compiled, ((batch, length, 16), (16, 24)), True)
    alone = [site.reason for graph in sink.graphs if not graph.is_backward for site in graph.sites if not site.matched]
    assert not alone, alone


@pytest.mark.all_cases
@pytest.mark.timeout(100)
def test_sizes_that_change(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(run_sizes, timeout=90)


def run_one_compilation(ctx: RankContext) -> None:
    """Every fusion in every token dimension, with sizes that change: one graph serves them all."""

    def program(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
        hidden = gather(x, 1) @ w
        return [
            scatter(torch.relu(hidden) @ v, 1),
            scatter(hidden.flatten(0, 1) @ v),
            gather(x.flatten(0, 1)) @ w,
            reduce(x @ w),
            x @ gather(w.t()).t(),
            scatter(x @ w, 2),
        ]

    torch._dynamo.reset()
    with torch.no_grad(), without_caches(), collect_sites() as sink, without_generated_code():
        compiled = torch.compile(program, backend="ditron", options=TILE, dynamic=True)
        for batch, length in ((2, 3), (3, 8)):
            compare(ctx, program, compiled, ((batch, length, 16), (16, 24), (24, 16)), False)
    fused = [Counter(site.kind for site in graph.sites if site.matched) for graph in sink.graphs]
    assert fused == [Counter({AG: 3, RS: 3, AR: 1})], fused


@pytest.mark.timeout(100)
def test_one_compilation_serves_all_sizes(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(run_one_compilation, timeout=90)


def run_tokens(ctx: RankContext) -> None:
    """Each rank has its own tokens for one gathered weight, and as many as it likes, from call to call."""

    def program(w: torch.Tensor, x: torch.Tensor) -> Tensors:
        return [x @ gather(w).t()]

    torch._dynamo.reset()
    with without_caches(), collect_sites() as sink, without_generated_code():
        compiled = torch.compile(program, backend="ditron", options=TILE)
        for tokens in ((3, 3), (3, 5), (4, 5), (4, 9), (6, 2)):
            compare(ctx, program, compiled, ((12, 16), (tokens[ctx.rank], 16)), False)
    assert all(site.matched for graph in sink.graphs for site in graph.sites)


@pytest.mark.timeout(100)
def test_tokens_of_a_gathered_weight_are_those_of_one_rank(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(run_tokens, timeout=90)


def run_mesh(ctx: RankContext) -> None:
    """Rows and columns of a mesh are groups of one size: each site has to use its own."""
    groups = [[dist.new_group([0, 1]), dist.new_group([2, 3])], [dist.new_group([0, 2]), dist.new_group([1, 3])]]
    row, column = groups[0][ctx.rank // 2], groups[1][ctx.rank % 2]

    def program(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
        a, b = gather(x, 0, row) @ w, gather(x, 0, column) @ w
        return [a, b, scatter(torch.tanh(a) @ v, 0, column), scatter(torch.tanh(b) @ v, 0, row)]

    def reductions(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
        both = reduce(reduce(x @ w, "sum", row) @ v, "sum", column)
        return [both, reduce(x @ w, "sum", column), reduce(x @ w), reduce(x @ w, "max", row)]

    shapes = (4, 16), (16, 24), (24, 16)
    torch._dynamo.reset()
    with without_caches(), without_generated_code():
        compare(ctx, program, torch.compile(program, backend="ditron", options=TILE), shapes, True)
        compare(ctx, reductions, torch.compile(reductions, backend="ditron", options=TILE), shapes, False)


@pytest.mark.timeout(100)
def test_groups_of_a_mesh(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 4, label="mesh").run(run_mesh, timeout=90)


def run_options(ctx: RankContext) -> None:
    """Compilations of one function with different options live side by side."""

    def program(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        return [scatter(torch.relu(gather(x) @ w) @ w.t())]

    torch._dynamo.reset()
    options: list[dict[str, Any]] = [TILE, {"ditron.strategy": "library"}, {"ditron.fusions": [AG]}, TILE]
    with without_caches(), without_generated_code():
        compiled = [torch.compile(program, backend="ditron", options=one) for one in options]
        for call in [*compiled, *compiled]:
            compare(ctx, program, call, XW, True)


@pytest.mark.timeout(100)
def test_options_side_by_side(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(run_options, timeout=90)
