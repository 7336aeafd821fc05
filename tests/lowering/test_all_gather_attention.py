"""all_gather_attention and its backward, all strategies: near the fp64 reference for every mask, ranks late, calls
repeated."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from benchmarks.tolerances import TOLERANCES
from ditron_inductor import ops
from ditron_inductor.errors import InvalidTaskNode
from ditron_inductor.lowering.all_gather_attention import tile
from ditron_inductor.lowering.attention import local_attention
from ditron_inductor.task import cost, reference, reference_attention
from ditron_inductor.task.attention_masks import (
    MASKS,
    PLACED,
    UNPLACED,
    Mask,
    attention_sizes,
    blocks,
    mask_problem,
    visible_part,
)
from ditron_inductor.task.dtypes import PRECISIONS
from ditron_inductor.task.nodes import AllGatherAttention, AttentionReduceScatter
from ditron_inductor.task.plan import PlanRequest, decisions
from ditron_inductor.task.policy import Policy
from ditron_inductor.task.problem import Problem
from ditron_inductor.task.schema import overload
from tests.cases import rare
from tests.lowering.attention_biases import BIASES, as_seen
from tests.lowering.calls import Site
from tests.rank_process import RankContext
from tests.ranks import RankPool, RankPools

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """q [B, heads, queries, D], k and v [B, key_heads, keys, D] of every rank. layout: which of heads and sequence is
    outside in memory; `slice`: the sequence, and between the heads of one row and the next one are others.
    """

    kind: str
    queries: int
    keys: int
    heads: int = 4
    key_heads: int = 2
    D: int = 16
    B: int = 1
    dtype: torch.dtype = BF16
    layout: str = "sequence"
    gathered: bool = False
    window: int = 0
    # Of rank 0, of rank 1, ...
    offset: int = 0
    stride: int = 0
    jumps: tuple[str, ...] = ()
    softcap: float = 0.0
    # A name of BIASES.
    bias: str = ""

    def mask(self, rank: int) -> Mask:
        jumps = self.jumps[rank] if rank < len(self.jumps) else ""
        return Mask(self.kind, self.window, self.offset + rank * self.stride, jumps)

    def fields(self, rank: int) -> dict[str, Any]:
        """The fields that both nodes have on a rank."""
        return {"mask": self.mask(rank), "scale": self.D**-0.5, "softcap": self.softcap}

    def __str__(self) -> str:
        sizes = f"{self.B}x{self.heads}.{self.key_heads}x{self.queries}.{self.keys}x{self.D}"
        mask = self.kind + f".{self.window}" * (self.window > 0) + "-capped" * (self.softcap > 0)
        jumps = "-jumps" * bool(self.jumps)
        mask += f"-{self.bias}" * bool(self.bias)
        return f"{mask}-{sizes}-{str(self.dtype)[6:]}-{self.layout}{'-gathered' * self.gathered}{jumps}"

    def draw(self, ctx: RankContext, heads: int, length: int) -> torch.Tensor:
        if self.layout == "heads":
            return torch.randn(self.B, heads, length, self.D, device=ctx.device).to(self.dtype)
        around = 1 if self.layout == "slice" else 0
        x = torch.randn(self.B, length, around + heads + around, self.D, device=ctx.device).to(self.dtype)
        return x[:, :, around : around + heads].transpose(1, 2)

    def operands(self, ctx: RankContext) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = self.draw(ctx, self.heads, self.queries)
        return q, self.draw(ctx, self.key_heads, self.keys), self.draw(ctx, self.key_heads, self.keys)

    def drawn_bias(self, ctx: RankContext) -> torch.Tensor | None:
        if not self.bias:
            return None
        shape = self.B, self.heads, self.queries, ctx.world_size * self.keys
        bias: torch.Tensor = BIASES[self.bias](ctx, *shape)
        return bias if bias.dtype == torch.bool else bias.to(self.dtype)


CASES = (
    Case("full", 20, 20, gathered=True),
    Case("causal_offset", 35, 35),
    Case("zigzag", 36, 36, B=2, dtype=FP16, layout="heads", gathered=True),
    Case("causal", 40, 20, dtype=FP32),
    Case("full", 7, 19, heads=3, key_heads=1, dtype=FP32),
    Case("causal_offset", 17, 17, D=24, B=2, dtype=FP32, gathered=True),
    Case("zigzag", 34, 34, heads=2, D=64, dtype=FP32),
    Case("causal", 9, 20, heads=2, layout="heads"),
    Case("causal_offset", 1, 1, dtype=FP32),
    Case("full", 0, 12, dtype=FP32, gathered=True),
    Case("causal_offset", 40, 40, heads=2, window=9, gathered=True),
    Case("causal_offset", 40, 40, heads=2, window=47, dtype=FP32),
    Case("zigzag", 68, 68, heads=2, window=21, dtype=FP32),
    # The first rows of rank 0 and the last ones of rank 1 see nothing.
    Case("causal", 37, 20, heads=2, window=19, dtype=FP32, offset=-5, stride=33),
    # The rows of the zig-zag order itself, of which the last rank's do not jump; and others.
    Case("zigzag_keys", 36, 36, heads=2, stride=18, jumps=("18+36",)),
    Case("zigzag_keys", 36, 36, heads=2, window=15, dtype=FP32, gathered=True, stride=18, jumps=("18+36",)),
    Case("zigzag_keys", 37, 20, heads=2, window=11, dtype=FP32, offset=-2, stride=9, jumps=("3+9 20-11", "8+1")),
    Case("causal", 37, 20, heads=2, dtype=FP32, offset=4, stride=3, jumps=("9+5 33-30", "1+1")),
    # Scores of up to 4 times what the cap lets through.
    Case("causal_offset", 40, 40, dtype=FP32, softcap=0.7, gathered=True),
    Case("zigzag", 36, 36, heads=2, D=64, window=21, softcap=2.0),
)
BIASED = (
    Case("given", 20, 20, bias="alibi", gathered=True),
    Case("given", 20, 20, B=2, dtype=FP32, bias="lowest"),
    Case("given", 20, 20, dtype=FP16, bias="lowest"),
    Case("given", 20, 20, dtype=FP32, bias="least"),
    Case("given", 37, 19, B=3, dtype=FP32, bias="documents"),
    Case("given", 24, 24, B=2, dtype=FP16, layout="heads", bias="padding"),
    Case("given", 9, 20, heads=3, key_heads=1, dtype=FP32, bias="steep"),
    Case("given", 17, 13, B=2, dtype=FP32, bias="unaligned", softcap=1.5),
    Case("given", 8, 12, heads=2, dtype=FP32, bias="rows"),
    Case("given", 7, 12, heads=2, dtype=FP32, bias="keys"),
    Case("given", 8, 8, dtype=FP32, bias="nothing"),
    Case("given", 0, 8, dtype=FP32, bias="keys"),
)


def forward(
    ctx: RankContext,
    site: Site,
    case: Case,
    operands: tuple[torch.Tensor, ...],
    gathered: bool = False,
    bias: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """[out, lse, (gathered k, gathered v)] of the op."""
    q, k, v = operands
    fields = {**case.fields(ctx.rank), "return_gathered": gathered}
    return site.call(ctx, AllGatherAttention, fields, q=q, k=k, v=v, bias=bias)


def expected(
    ctx: RankContext, site: Site, case: Case, operands: tuple[torch.Tensor, ...], bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse) in fp64, and the gathered k and v, bit for bit."""
    q, k, v = operands
    keys, values = (reference.all_gather(one.contiguous(), gather_dim=2, **site.group(ctx)) for one in (k, v))
    seen = reference_attention.visible(case.mask(ctx.rank), ctx.rank, ctx.world_size, case.queries, case.keys, q.device)
    operands = q.double(), keys.double(), values.double()
    out, lse = reference_attention.attend(*operands, seen=seen, scale=case.D**-0.5, softcap=case.softcap, bias=bias)
    return out, lse, keys, values


def assert_close(got: torch.Tensor, wanted: torch.Tensor, roundings: int, what: str) -> None:
    """Within so many of the dtype's tolerances."""
    rtol, atol = TOLERANCES[got.dtype]
    assert got.shape == wanted.shape, f"{what}: {got.shape}, not {wanted.shape}"
    torch.testing.assert_close(
        got.double(), wanted, rtol=roundings * rtol, atol=roundings * atol, msg=lambda text: f"{what}: {text}"
    )


def _check(ctx: RankContext, case: Case, strategy: str) -> None:
    site = Site(strategy=strategy, name=f"attention/0:{strategy}")
    operands, bias = case.operands(ctx), case.drawn_bias(ctx)
    before = [one.clone() for one in operands]
    out, lse, *gathered = forward(ctx, site, case, operands, case.gathered, bias)
    wanted, sums, keys, values = expected(ctx, site, case, operands, as_seen(bias))
    assert out.dtype == case.dtype and out.transpose(1, 2).is_contiguous() and lse.is_contiguous()
    # The parts are rounded before they are merged.
    assert_close(out, wanted, 3, "out")
    torch.testing.assert_close(lse.double(), sums, rtol=1e-4, atol=1e-2 if case.dtype == BF16 else 2e-3)
    assert len(gathered) == 2 * case.gathered
    assert all(torch.equal(*pair) for pair in zip(gathered, (keys, values), strict=False)), "not the shards' bits"
    assert all(one.transpose(1, 2).is_contiguous() for one in gathered)
    assert all(map(torch.equal, operands, before)), "an input changed"


@pytest.mark.parametrize("strategy", ["tile", "chunked", "library"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(pool: RankPool, case: Case, strategy: str) -> None:
    pool.run(_check, case, strategy)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("strategy", ["chunked", "library"])
@pytest.mark.parametrize("case", BIASED, ids=str)
def test_a_bias_matches_reference(rank_pools: RankPools, case: Case, strategy: str, world_size: int) -> None:
    rank_pools.get("cpu", world_size).run(_check, case, strategy)


def _check_gradients(ctx: RankContext, case: Case) -> None:
    site = Site(strategy="auto", name="attention/1:auto")
    (q, k, v), bias = case.operands(ctx), case.drawn_bias(ctx)
    grad = case.draw(ctx, case.heads, case.queries)
    _, _, keys, values = expected(ctx, site, case, (q, k, v))
    seen = reference_attention.visible(case.mask(ctx.rank), ctx.rank, ctx.world_size, case.queries, case.keys, q.device)
    exact = [one.double().requires_grad_() for one in (q, keys, values)]
    scores = {"scale": case.D**-0.5, "softcap": case.softcap}
    out, lse = reference_attention.attend(*exact, seen=seen, bias=as_seen(bias), **scores)
    out.backward(grad.double())
    wanted = [exact[0].grad]
    for one in exact[1:]:
        assert one.grad is not None
        wanted.append(reference.reduce_scatter(one.grad, scatter_dim=2, reduce_op="sum", **site.group(ctx)))
    given = grad, q, keys, values, out.detach().to(case.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    operands = dict(zip(("grad_out", "q", "k", "v", "out"), given, strict=True))
    operands |= {"lse": lse.detach().float()} | ({} if bias is None else {"bias": bias})
    found = site.call(ctx, AttentionReduceScatter, case.fields(ctx.rank), **operands)
    for name, got, want in zip(("q", "k", "v"), found, wanted, strict=True):
        assert got.dtype == case.dtype and got.transpose(1, 2).is_contiguous()
        assert want is not None
        assert_close(got, want, 3 + ctx.world_size, f"gradient of {name}")


def _uneven(ctx: RankContext) -> list[PlanRequest]:
    """The requests of both directions, with a bias and other queries on each rank."""
    case = Case("given", 20 - 13 * ctx.rank, 12, dtype=FP32, bias="unaligned")
    sites = [Site(strategy="chunked", name=f"uneven/{direction}") for direction in range(2)]
    (q, k, v), bias = case.operands(ctx), case.drawn_bias(ctx)
    assert bias is not None
    out, lse, *gathered = forward(ctx, sites[0], case, (q, k, v), True, bias)
    keys, values = gathered
    operands = {"grad_out": out, "q": q, "k": keys, "v": values, "out": out, "lse": lse, "bias": bias}
    sites[1].call(ctx, AttentionReduceScatter, case.fields(ctx.rank), **operands)
    found = [decisions.last(ctx.group_name, site.name) for site in sites]
    return [last[0] for last in found if last is not None]


def test_the_plan_is_the_same_beside_biases_of_uneven_queries(rank_pools: RankPools) -> None:
    of_ranks = rank_pools.get("cpu", 2).run(_uneven)
    assert of_ranks[0] == of_ranks[1]
    assert [request.problem.bias_bytes for request in of_ranks[0]] == [4 * 20 * 24 * 4] * 2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_match_reference(pool: RankPool, case: Case) -> None:
    pool.run(_check_gradients, case)


@pytest.mark.parametrize("world_size", [2, 4])
# Beside large numbers the logarithms of sums that a backward gets have few digits left, the library's own too.
@pytest.mark.parametrize("case", [case for case in BIASED if case.bias not in ("lowest", "least")], ids=str)
def test_gradients_beside_a_bias(rank_pools: RankPools, case: Case, world_size: int) -> None:
    rank_pools.get("cpu", world_size).run(_check_gradients, case)


GPU_CASES = (
    Case("causal_offset", 1024, 1024, heads=8, D=128),
    Case("zigzag", 1030, 1030, heads=8, key_heads=8, D=64, dtype=FP16),
    Case("full", 777, 555, heads=4, key_heads=1, D=128, gathered=True),
    Case("causal", 2048, 1024, heads=4, D=128, layout="heads"),
    Case("causal_offset", 513, 513, heads=4, D=256, B=2, gathered=True),
    Case("zigzag", 256, 256, heads=4, D=64, dtype=FP32),
    Case("causal_offset", 1024, 1024, heads=8, D=128, window=700),
    Case("zigzag", 1030, 1030, heads=4, D=64, window=300, gathered=True),
    Case("causal", 777, 512, heads=4, D=128, window=600, offset=3, stride=400),
    Case("zigzag_keys", 1030, 1030, heads=4, D=64, stride=515, jumps=("515+1030",)),
    Case("causal_offset", 1024, 1024, heads=8, D=256, softcap=1.5),
    Case("zigzag", 512, 512, heads=4, D=128, window=300, dtype=FP16, softcap=0.5, gathered=True),
)


GPU_BIASED = (
    Case("given", 1024, 1024, heads=8, D=128, bias="alibi"),
    Case("given", 777, 555, heads=4, key_heads=1, D=64, B=2, dtype=FP16, bias="documents", gathered=True),
    Case("given", 512, 512, heads=8, D=128, B=3, bias="padding"),
    Case("given", 513, 511, heads=4, D=64, B=2, bias="unaligned"),
    Case("given", 300, 256, heads=4, D=64, dtype=FP32, bias="documents"),
    Case("given", 256, 256, heads=4, D=256, bias="steep"),
    Case("given", 256, 256, heads=4, D=64, bias="lowest"),
    Case("given", 256, 256, heads=4, D=128, bias="least", gathered=True),
    Case("given", 256, 128, heads=4, D=128, bias="rows"),
    Case("given", 256, 128, heads=4, D=128, B=2, bias="nothing"),
)


@pytest.mark.parametrize("strategy", ["chunked", "library"])
@pytest.mark.parametrize("large_case", GPU_BIASED, ids=str)
def test_a_bias_matches_reference_at_size(gpu_pool: RankPool, large_case: Case, strategy: str) -> None:
    gpu_pool.run(_check, large_case, strategy)


@pytest.mark.parametrize("large_case", GPU_BIASED, ids=str)
def test_gradients_beside_a_bias_at_size(gpu_pool: RankPool, large_case: Case) -> None:
    gpu_pool.run(_check_gradients, large_case)


def _check_kernels(ctx: RankContext, case: Case) -> None:
    """Both kernels of the library that add a bias, whichever is chosen, of this rank's keys alone."""
    bias = case.drawn_bias(ctx)
    assert bias is not None
    q, k, v = case.operands(ctx)
    bias = bias if bias.shape[-1] == 1 else bias[..., : case.keys]
    grad = case.draw(ctx, case.heads, case.queries)
    exact = [one.double().requires_grad_() for one in (q, k, v)]
    wanted, sums = reference_attention.attend(*exact, seen=None, scale=case.D**-0.5, bias=as_seen(bias))
    wanted.backward(grad.double())
    seen = local_attention.ShownBlock(bias=bias)
    # Of rows that all of them hide the other kernel makes the mean of all values, as torch's own operations do.
    kernels = [local_attention.CUDNN_BIASED]
    kernels += [] if case.bias == "least" else [local_attention.EFFICIENT]
    for run in kernels[case.dtype == FP32 :]:
        out, lse = run.forward(q, k, v, seen, case.D**-0.5)
        assert_close(out, wanted.detach(), 2, f"out by {run.name}")
        torch.testing.assert_close(lse.double(), sums.detach(), rtol=1e-4, atol=1e-2)
        found = run.backward((grad, q, k, v, out, lse.contiguous()), seen, case.D**-0.5)
        for name, got, one in zip(("q", "k", "v"), found, exact, strict=True):
            assert one.grad is not None
            # A key that most rows look at has a gradient of as many terms, and as much to round.
            size = one.grad.abs().amax(-1, keepdim=True).clamp_min(1.0)
            assert_close((got / size).to(got.dtype), one.grad / size, 4, f"gradient of {name} by {run.name}")


@pytest.mark.parametrize("large_case", GPU_BIASED, ids=str)
def test_kernels_that_add_a_bias(gpu_pool: RankPool, large_case: Case) -> None:
    gpu_pool.run(_check_kernels, large_case)


@pytest.mark.parametrize("strategy", ["tile", "chunked", "library"])
@pytest.mark.parametrize("large_case", GPU_CASES, ids=str)
def test_matches_reference_at_size(gpu_pool: RankPool, large_case: Case, strategy: str) -> None:
    gpu_pool.run(_check, large_case, strategy)


@pytest.mark.parametrize("large_case", GPU_CASES, ids=str)
def test_gradients_match_reference_at_size(gpu_pool: RankPool, large_case: Case) -> None:
    gpu_pool.run(_check_gradients, large_case)


def _repeat(ctx: RankContext, strategy: str, late_rank: int, count: int) -> None:
    """Calls in both slots, with new operands each time, after one rank was late; what a mask hides waits for nobody."""
    site = Site(strategy=strategy, name=f"attention/2:{strategy}")
    if ctx.rank == late_rank:
        time.sleep(1.0)
    cases = [Case("causal_offset", 18, 18), Case("full", 18, 18, gathered=True), Case("causal_offset", 18, 18)]
    problems = [(case, case.operands(ctx)) for case in cases * count]
    results = [forward(ctx, site, case, operands, case.gathered) for case, operands in problems]
    for (case, operands), result in zip(problems, results, strict=True):
        wanted, _, keys, _ = expected(ctx, site, case, operands)
        assert_close(result[0], wanted, 3, str(case))
        assert not case.gathered or torch.equal(result[2], keys)


@pytest.mark.parametrize("late_rank", [0, 1])
@pytest.mark.parametrize("strategy", ["tile", "chunked"])
def test_a_rank_is_late_and_calls_repeat(pool: RankPool, strategy: str, late_rank: int) -> None:
    pool.run(_repeat, strategy, late_rank, 2 if pool.device_type == "cpu" else 20)


def _replay(ctx: RankContext, strategy: str) -> None:
    """A captured call reads new operands in the same memory, every time, between calls that are not captured."""
    site = Site(strategy=strategy, name=f"attention/5:{strategy}")
    case = Case("causal_offset", 256, 256, D=64)
    operands = case.operands(ctx)
    for _ in range(2):
        forward(ctx, site, case, operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward(ctx, site, case, operands)[0]
    for turn in range(6):
        for one in operands:
            one.normal_()
        graph.replay()
        wanted = expected(ctx, site, case, operands)[0]
        assert_close(out, wanted, 3, f"replay {turn}")
        assert_close(forward(ctx, site, case, operands)[0], wanted, 3, f"call {turn}")


@pytest.mark.parametrize("strategy", ["tile", "chunked"])
def test_captured_calls_are_replayed(gpu_pool: RankPool, strategy: str) -> None:
    gpu_pool.run(_replay, strategy)


def _refuse(ctx: RankContext) -> None:
    site = Site(name="attention/3")
    q, k, v = Case("full", 4, 4).operands(ctx)
    op: Any = forward
    for case, operands, message in (
        (Case("zigzag", 3, 3), (q[:, :, :3], k[:, :, :3], v[:, :, :3]), "two equal chunks"),
        (Case("causal_offset", 4, 3), (q, k[:, :, :3], v[:, :, :3]), "as many queries as keys"),
        (Case("full", 4, 4), (q[:, :3], k, v), "3 heads of queries cannot share 2"),
        (Case("full", 4, 4), (q, k, v[:, :, :3]), "have to be alike"),
        (Case("full", 4, 4), (q, k.float(), v), "k is torch.float32"),
        (Case("full", 4, 4), (q[0], k, v), "q has 3 dimensions"),
    ):
        try:
            op(ctx, site, case, operands)
        except ValueError as error:
            assert message in str(error) and "attention/3" in str(error), error
        else:
            raise AssertionError(f"nothing was raised about: {message}")
    for kind, bias, message in (
        ("given", None, "no bias beside the mask 'given'"),
        ("full", torch.zeros(4, 8), "a bias beside the mask 'full'"),
        ("given", torch.zeros(4, 4), "bias is [4, 4], which cannot be broadcast to [1, 4, 4, 8]"),
        ("given", torch.zeros(1, 1, 1, 4, 8), "cannot be broadcast"),
        ("given", torch.zeros(4, 8, dtype=torch.int64), "bias is torch.int64"),
    ):
        fields = Case(kind, 4, 4).fields(ctx.rank)
        text = site.node(ctx, AllGatherAttention, **fields).text()
        given = [q, k, v] if bias is None else [q, k, v, bias]
        with pytest.raises(ValueError, match="attention/3") as raised:
            overload("all_gather_attention")(given, text, None)
        assert message in str(raised.value), raised.value
    node = AllGatherAttention(Mask("given"), 0.25, 0.0, 2, "0", "", Policy())
    assert "no bias" in tile.obstacle(node, q) and not tile.obstacle(replace(node, mask=Mask("full")), q)
    with pytest.raises(ValueError, match="bias wants a gradient"):
        ops.all_gather_attention(q, k, v, mask="given", bias=torch.zeros(4, 8, requires_grad=True))


def test_operands_that_do_not_fit_are_named(rank_pools: Any) -> None:
    rank_pools.get("cpu", 2).run(_refuse)


def _idle_windows(ctx: RankContext) -> None:
    """Windows as long as the sequence, and longer than 32 and 64 bits count: the bits of attention without one."""
    for kind, windows in (("causal", (2**31 - 30, 2**31)), ("causal_offset", (40, 2**40)), ("zigzag", (2**31 - 1,))):
        case = Case(kind, 20, 20, heads=2, dtype=FP32)
        operands = case.operands(ctx)
        for strategy in ("tile", "chunked"):
            site = Site(strategy=strategy, name=f"attention/6:{strategy}")
            wanted = forward(ctx, site, case, operands)
            for window in windows:
                found = forward(ctx, site, replace(case, window=window), operands)
                assert all(map(torch.equal, found, wanted)), (kind, strategy, window)
    given = [one.requires_grad_() for one in operands]
    found = [ops.all_gather_attention(*given, mask="zigzag", window=window) for window in (0, 2**70)]
    grads = [torch.autograd.grad(one.sum(), given) for one in found]
    assert torch.equal(*found) and all(map(torch.equal, *grads))
    with pytest.raises(InvalidTaskNode, match="window"):
        ops.all_gather_attention(*operands, mask="full", window=2**70)


def test_a_window_may_be_longer_than_the_sequence(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(_idle_windows)


@pytest.mark.parametrize(
    ("mask", "rank", "positions"),
    [
        (Mask("causal"), 1, 20),
        (Mask("causal", offset=7), 1, 27),
        (Mask("causal", offset=-3), 1, 17),
        (Mask("causal_offset"), 0, 20),
        (Mask("causal_offset"), 1, 40),
        (Mask("zigzag"), 0, 40),
        (Mask("zigzag"), 1, 30),
    ],
    ids=str,
)
def test_the_kernel_has_a_window_only_where_it_hides_keys(mask: Mask, rank: int, positions: int) -> None:
    """Of 20 rows, and the keys of two ranks: those in front of the last row, `positions` with its own."""

    def hidden(window: int) -> int:
        seen = reference_attention.visible(replace(mask, window=window), rank, 2, 20, 20, torch.device("cpu"))
        assert seen is not None
        return int((~seen).sum())

    windows = (positions - 1, positions, positions + 1, 2**31, 2**63 - 1)
    found = [tile.kernel_window(replace(mask, window=window), rank, 2, 20) for window in windows]
    assert found == [positions - 1, 0, 0, 0, 0]
    assert hidden(positions - 1) > hidden(positions) == hidden(2**31) == hidden(0)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("world_size", [*rare(2), 4])
def test_blocks_cover_what_a_mask_shows_once(kind: str, world_size: int) -> None:
    windows = (0,) if kind in UNPLACED else (0, 1, 2, 5, 9, 100)
    places = [(offset, jumps) for offset in (-3, 0, 4, 7, 40) for jumps in ("", "3+6", "1+1 3-4 4+2")]
    places = places if kind in PLACED else [(0, "")]
    for queries, keys in ((6, 6), (12, 6), (7, 3), (4, 8)):
        for mask in (Mask(kind, window, *place) for window in windows for place in places):
            if mask_problem(mask, queries, keys):
                continue
            everything = queries * world_size * keys
            most = 0
            for rank in range(world_size):
                covered = torch.zeros(queries, world_size * keys, dtype=torch.int64)
                for block in blocks(mask, rank, world_size, queries, keys):
                    assert not block.causal or block.rows == block.keys
                    assert block.lower is None or block.rows <= block.keys
                    shape = torch.zeros(block.rows, block.keys), torch.zeros(block.keys, 1)
                    shown = local_attention.ShownBlock(block.causal, block.lower)
                    part = local_attention._visible(*(one[None, None] for one in shape), shown)
                    part = torch.ones_like(shape[0], dtype=torch.bool) if part is None else part
                    assert part.any(1).all() and part.sum() == block.pairs
                    first = block.source * keys + block.first_key
                    covered[block.first_row : block.last_row, first : first + block.keys] += part
                seen = reference_attention.visible(mask, rank, world_size, queries, keys, torch.device("cpu"))
                wanted = torch.ones_like(covered) if seen is None else seen.long()
                assert torch.equal(covered, wanted), (mask, rank)
                most = max(most, int(wanted.sum()))
            part_seen = visible_part(mask, world_size, queries, keys)
            assert kind in PLACED or part_seen == most / everything


def test_an_offset_decides_nothing_for_all_ranks() -> None:
    for kind in PLACED:
        masks = [Mask(kind, 3, offset, jumps) for offset in (0, 3, 6) for jumps in ("", "3+6")]
        assert len({visible_part(mask, 2, 6, 6) for mask in masks}) == 1
        assert len({visible_part(mask, 2, 4, 6) for mask in masks}) == 1
        assert len({mask.name for mask in masks}) == 1
    node = AllGatherAttention(Mask("causal", 3, 4, "3+6"), 1.0, 0.0, 2, "0", "", Policy())
    assert "offset=4 jumps='3+6'" in node.text() and "offset" not in node.mask.name


def test_rows_of_the_zigzag_order_have_its_blocks() -> None:
    for world_size in (2, 3, 4):
        for rank in range(world_size):
            first, second = (one.start for one in Mask("zigzag").positions(rank, world_size, 6))
            jumps = f"3+{second - first - 3}" if second > first + 3 else ""
            sizes = rank, world_size, 6, 6
            assert blocks(Mask("zigzag_keys", 0, first, jumps), *sizes) == blocks(Mask("zigzag"), *sizes)


@pytest.mark.parametrize("jumps", ["3", "0+3", "3+0", "4+1 3+1", "3+1, 4+1", "3+1 3+2"])
def test_jumps_that_are_none(jumps: str) -> None:
    with pytest.raises(InvalidTaskNode, match="jumps"):
        Mask("causal", 0, 0, jumps).verify("")
    with pytest.raises(InvalidTaskNode, match="jumps"):
        Mask("zigzag", 0, 0, "3+1").verify("")


def test_a_soft_cap_is_named_and_legal_and_our_kernels() -> None:
    """The library's kernels have none: what stands for them is so slow that the plan takes `tile`."""
    node = AllGatherAttention(Mask("causal_offset"), 0.0625, 50.0, 2, "0", "", Policy())
    plain = replace(node, softcap=0.0)
    assert "softcap=50.0" in node.text() and "softcap=0.0" in plain.text()
    for softcap in (-1.0, math.inf, math.nan):
        with pytest.raises(InvalidTaskNode, match="softcap"):
            replace(node, softcap=softcap).verify()
    q = torch.empty(1, 16, 4, 256)
    run = local_attention.choose(q, q, q, node.softcap)
    sizes = attention_sizes(node.mask, 2, 1, 16, 8192, 256, 8, 8192)
    problem = Problem(node.kind, *sizes, PRECISIONS[0], 2, library_speed=run.speed_with(node.mask))
    predicted = cost.predict(problem, cost.H200)
    assert min(predicted, key=predicted.__getitem__) == "tile"


def test_a_soft_cap_is_part_of_the_name_of_its_site() -> None:
    node = AllGatherAttention(Mask("causal_offset"), 0.0625, 50.0, 2, "0", "", Policy())
    facts = {replace(node, softcap=softcap).wire for softcap in (0.0, 30.0, 50.0)}
    assert len(facts) == 3
