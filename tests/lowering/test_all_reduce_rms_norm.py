"""all_reduce_rms_norm, with a matmul and without: sums to the bit, norms near fp64, the same bytes on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed import _functional_collectives as functional

from benchmarks.tolerances import assert_near
from ditron_inductor.backend import ditron
from ditron_inductor.options import Options
from ditron_inductor.report.explain import build_report, without_caches
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import EXTRAS, NORM_KINDS, Norm
from ditron_inductor.task.site_records import collect_sites
from tests.conftest import Place
from tests.lowering import calls
from tests.lowering.calls import Site
from tests.lowering.failures import (
    Failure,
    call_without_the_last,
    check_left_waiting,
    lose_a_rank_of,
    nan_once_poisoned,
    reset,
    stop,
)
from tests.lowering.problems import SMALL, Problem, Size
from tests.lowering.stress import call_in_poisoned_slots, call_in_random_order, replay_with_new_operands
from tests.rank_process import RankContext
from tests.ranks import RankPool, RankPools

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Handshakes are bounded by it too, so it leaves time to ranks on a busy machine.
TIMEOUT_S = 5.0
LLAMA = Norm("rms", 1e-6, round_first=True)
VLLM = replace(LLAMA, unrounded=True)
GEMMA = Norm("rms", 1e-6, plus_one=True)
RMS = Norm("rms", 1e-5)
LAYER = Norm("layer", 1e-5)
ALONE = Norm("none", 0.0)


@dataclass(frozen=True)
class Case:
    """x [.., N], or the product of [.., k] and [k, N]; reduced, and normalised with these extras."""

    shape: tuple[int, ...]
    norm: Norm = LLAMA
    extras: str = "residual weight"
    dtype: torch.dtype = BF16
    reduce_op: str = "sum"
    k: int = 0
    wide: bool = False
    """Weight and shift are fp32, whatever the dtype."""
    post: Norm | None = None
    saved: str = ""
    scaled: bool = False
    """Each rank scales the rows of its product."""
    factor: float = 1.0
    """Of the reduced rows."""

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        norm = f"{self.post.form}-" if self.post else ""
        norm += f"{self.factor}-" * (self.factor != 1.0)
        norm += self.norm.form + "+1" * self.norm.plus_one + "r" * self.norm.round_first + "u" * self.norm.unrounded
        norm = "scaled-" * self.scaled + norm
        return f"{shape}-{norm}-{self.extras.replace(' ', '+')}-{str(self.dtype)[6:]}-{self.reduce_op}{self.k or ''}"


CASES = (
    Case((1, 64)),
    Case((4, 48), GEMMA, dtype=FP16),
    Case((3, 40), LAYER, "bias residual weight shift", dtype=FP32, reduce_op="avg"),
    # Nothing is a multiple of anything; pieces of several rows and tiles.
    Case((13, 37), RMS, "weight"),
    Case((2, 9, 21), LAYER, "residual shift", dtype=FP16, wide=True),
    # What others use is rounded, and the norm is that of the sum before.
    Case((67, 33), VLLM, "bias residual", dtype=FP16, saved="reduced scaled"),
    Case((5, 131), LAYER, "", reduce_op="avg"),
    Case((1, 1), RMS, "residual weight"),
    Case((29,), RMS, "residual weight", dtype=FP32, factor=0.22),
    Case((5, 38), LAYER, "bias second_bias residual weight", dtype=FP16, saved="reduced mean rstd scaled"),
    Case((7, 35), LLAMA, "post_weight residual weight", FP16, post=GEMMA, saved="reduced post_rstd rstd"),
    Case((13, 37), ALONE, "post_weight residual", FP16, post=LLAMA, saved="reduced post_rstd"),
    Case((3, 24), RMS, "bias post_weight post_shift residual weight", post=LAYER, saved="post_mean post_rstd"),
    # Two norms of one sum.
    Case((5, 26), LAYER, "bias residual weight shift other_weight other_shift", FP16, saved="mean rstd other"),
    Case((14, 24), GEMMA, "residual weight other_weight scale", FP16, saved="other"),
    # Small enough to be sent in band.
    Case((3, 24), VLLM, "residual weight", FP16, saved="reduced scaled", factor=0.3),
)

# One row in slices; on 4 ranks in two shots, more slices than owners.
IN_SLICES = (
    Case((2, 70), LAYER, "bias residual weight other_weight", FP16, saved="reduced mean rstd scaled other"),
    Case((4, 66), RMS, "second_bias residual weight scale", FP32, "avg", saved="rstd"),
    Case((3, 129), LLAMA, "post_weight residual weight", FP16, post=GEMMA, saved="reduced post_rstd rstd"),
    Case((2, 66), VLLM, "residual weight", FP16, saved="reduced scaled"),
)


def make(ctx: RankContext, case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Operands that differ between ranks, and extras that do not."""
    *leading, n = case.shape
    if case.k:
        operands = [calls.operand(ctx, [*leading, case.k], case.dtype), calls.weight(ctx, case.k, n, case.dtype)]
    else:
        operands = [calls.operand(ctx, case.shape, case.dtype)]
    dtype = FP32 if case.wide else case.dtype
    shapes = {"bias": ([n], case.dtype), "second_bias": ([n], case.dtype), "residual": (case.shape, case.dtype)}
    given = [_shared(ctx, *shapes.get(name, ([n], dtype))) if name in case.extras.split() else None for name in EXTRAS]
    return operands, given


def _shared(ctx: RankContext, shape: list[int] | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random, and the same on all ranks."""
    x = calls.operand(ctx, shape, dtype)
    dist.broadcast(x, 0)
    return x


def _sum_in_rank_order(ctx: RankContext, x: torch.Tensor, case: Case) -> torch.Tensor:
    everyone = [torch.empty_like(x) for _ in range(ctx.world_size)]
    dist.all_gather(everyone, x.contiguous())
    total = torch.zeros(x.shape, device=x.device)
    for one in everyone:
        total += one.float()
    return (total / ctx.world_size if case.reduce_op == "avg" else total).to(case.dtype)


def _unrounded(reduced: torch.Tensor, given: list[torch.Tensor | None], case: Case) -> torch.Tensor:
    """The last sum before it is rounded, in fp64."""
    named = dict(zip(EXTRAS, given, strict=True))
    residual = named["residual"]
    assert residual is not None and case.post is None
    named["residual"] = None
    _, added = reference.add_norm(reduced, list(named.values()), RMS, factor=case.factor)
    return added.double() + residual.double().view(added.shape)


def check(ctx: RankContext, case: Case, site: Site) -> None:
    """Call, and compare everything that can be known about the result. Collective."""
    operands, given = make(ctx, case)
    scales = calls.operand(ctx, [*case.shape[:-1], 1], case.dtype) if case.scaled else None
    before = [one.clone() for one in (*operands, *given) if one is not None]
    names = case.saved.split()
    norms = case.norm, case.reduce_op, case.post, names
    outputs = calls.all_reduce_rms_norm(ctx, site, operands, given, *norms, scales, case.factor)
    normed = None if case.norm == ALONE else outputs.pop(0)
    total, *saved = outputs
    for out in (total,) if normed is None else (normed, total):
        assert out.dtype == case.dtype and out.shape == case.shape
    for out in outputs if normed is None else (normed, *outputs):
        assert out.is_contiguous()
        calls.assert_replicated(ctx, out)
    # The interpreter cuts off what does not fit into bfloat16.
    rounds = case.dtype != BF16 or ctx.device.type == "cuda"
    if rounds and not case.k and site.strategy != "library":
        reduced = _sum_in_rank_order(ctx, operands[0], case)
        wanted = None if case.post else reference.add_norm(reduced, given, case.norm, factor=case.factor)[1]
        assert wanted is None or torch.equal(total, wanted), f"{case}: not the rounded sum in rank order"
        assert "reduced" not in names or torch.equal(saved[0], reduced)
    exact = [None if one is None else one.double() for one in given]
    x = operands[0].double() if not case.k else operands[0].double() @ operands[1].double()
    x = x if scales is None else x * scales.double()
    of_group = {"reduce_op": case.reduce_op, **site.group(ctx)}
    post = None if case.post is None else replace(case.post, round_first=False)
    early = [name for name in names if name == "reduced" or name.startswith("post_")]
    behind = RMS if normed is None else case.norm
    before_norm = {"norm": behind, "post": post, "saved": early, "factor": case.factor}
    _, summed, *before_sum = reference.all_reduce_rms_norm(x, exact, **before_norm, **of_group)
    assert_near(total, summed, num_partials=4)
    no_rounding = replace(behind, round_first=False, unrounded=False)
    alone = [one if "weight" in name or "shift" in name else None for name, one in zip(EXTRAS, exact, strict=True)]
    late = names[len(early) :]
    rows = total.double() if not behind.unrounded else _unrounded(saved[0], given, case)
    wide, _, *behind_sum = reference.add_norm(rows, alone, no_rounding, None, late)
    if normed is not None:
        assert_near(normed, wide, num_partials=2)
    for name, got, want in zip(names, saved, [*before_sum, *behind_sum], strict=True):
        assert got.dtype == (case.dtype if name in ("reduced", "other") else FP32) and got.shape == want.shape, name
        # What is computed of rows that were rounded once is near to what is of exact ones.
        near = got if name == "reduced" or name in late else got.to(case.dtype)
        assert_near(near, want, num_partials=4, what=f"{case}: {name}")
    after = [one for one in (*operands, *given) if one is not None]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True)), "an input changed"


def _check_all(ctx: RankContext, cases: tuple[Case, ...], strategy: str, label: str) -> None:
    for index, case in enumerate(cases):
        check(ctx, case, Site(f"norm/{index}:{label}", strategy))


@pytest.mark.parametrize("strategy", ["tile", "library"])
def test_matches_reference(pool: RankPool, strategy: str) -> None:
    # Four processes that poll take the cores from those that work.
    cases = CASES[::6] if (pool.device_type, pool.world_size) == ("cpu", 4) else CASES
    pool.run(_check_all, (*cases, *IN_SLICES), strategy, "alone", timeout=100)


PRODUCTS = (
    Case((4, 40), LLAMA, "residual weight", k=24, scaled=True),
    Case((2, 3, 33), LAYER, "bias residual weight shift", dtype=FP16, k=17, reduce_op="avg"),
    Case((70, 36), GEMMA, "residual weight", dtype=FP32, k=20, scaled=True),
    # One row is normalised in the launch of its matmul.
    Case((1, 38), VLLM, "residual weight scale", FP16, k=24, saved="reduced scaled"),
    Case((1, 36), LLAMA, "second_bias post_weight residual weight", FP16, "sum", 20, False, GEMMA, "rstd", True),
    Case((9, 36), LAYER, "residual weight", dtype=FP16, k=20, saved="reduced mean scaled"),
    Case((9, 34), LAYER, "bias residual weight shift other_weight other_shift", FP16, k=18, saved="other"),
    Case((1, 34), LAYER, "residual weight other_weight", FP16, k=18, saved="rstd other"),
    Case((70, 36), ALONE, "post_weight residual", FP32, k=20, post=RMS),
    Case((1, 40), ALONE, "residual", FP16, k=24, post=LAYER),
)


@pytest.mark.parametrize("strategy", ["chunked", "tile", "library"])
def test_products_match_reference(pool: RankPool, strategy: str) -> None:
    pool.run(_check_all, PRODUCTS, strategy, "product", timeout=100)


# In one shot, not in band, and on three ranks in two; products that are reduced by the same kernel, and by another one
# in front.
SIZES = {"cpu": (Size(0, 24, 33), Size(4, 24, 150)), "cuda": (Size(0, 512, 4096), Size(4, 512, 16383))}


def _problems(ctx: RankContext, label: str, timeout_s: float = calls.TIMEOUT_S) -> list[Problem]:
    small, large = SIZES[ctx.device.type]
    kinds = [(0, small, "tile"), (0, large, "tile"), (1, large, "chunked"), (1, small, "tile")]
    return [
        Problem(ctx, NORM_KINDS[index], size, site=Site(f"{label}/{place}:{strategy}", strategy, timeout_s), dtype=FP16)
        for place, (index, size, strategy) in enumerate(kinds)
    ]


def _among_others(ctx: RankContext, count: int) -> None:
    """Slots, flags and credits are shared, and ranks come late."""
    other = Problem(ctx, "matmul_reduce_scatter", SMALL[ctx.device.type], site=Site("among/9:other"), dtype=FP16)
    call_in_random_order(ctx, [*_problems(ctx, "among"), other], count)


def test_among_other_launches(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 3).run(_among_others, 4, timeout=100)


def test_among_other_launches_on_gpus(gpu_pool: RankPool) -> None:
    gpu_pool.run(_among_others, 500, timeout=100)


def _replayed(ctx: RankContext) -> None:
    replay_with_new_operands(ctx, _problems(ctx, "replayed"))


def test_replayed_in_a_graph(gpu_pool: RankPool) -> None:
    gpu_pool.run(_replayed, timeout=100)


def _poisoned_slots(ctx: RankContext) -> None:
    for index, size in enumerate(SIZES[ctx.device.type]):
        call_in_poisoned_slots(ctx, NORM_KINDS[0], size, Site(f"poison/{index}:norm"))


def test_poisoned_buffers(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 3).run(_poisoned_slots)


def test_poisoned_buffers_on_gpus(gpu_pool: RankPool) -> None:
    gpu_pool.run(_poisoned_slots)


def _poisoned_launch(ctx: RankContext) -> bool:
    return nan_once_poisoned(ctx, _problems(ctx, "failed"))


def _late(ctx: RankContext, index: int) -> Failure | None:
    return call_without_the_last(ctx, _problems(ctx, "late", TIMEOUT_S)[index])


def _reset_and_work(ctx: RankContext) -> None:
    reset(ctx)
    for problem in _problems(ctx, "works"):
        problem.check(problem())


@pytest.fixture
def fragile_place() -> Place:
    """In place of the one of all files: three ranks are the fewest that take two shots."""
    return Place("cpu", 3)


def test_a_poisoned_launch_is_nan(fragile_pool: RankPool) -> None:
    assert all(fragile_pool.run(_poisoned_launch))
    fragile_pool.run(_reset_and_work)


def test_a_rank_that_comes_too_late(fragile_pool: RankPool) -> None:
    check_left_waiting(fragile_pool.run(_late, 1, timeout=100), "late/1")
    fragile_pool.run(_reset_and_work)


def _stopped(ctx: RankContext, index: int, victim: int, signal_number: int) -> Failure | None:
    return lose_a_rank_of(ctx, _problems(ctx, "stopped", TIMEOUT_S)[index], victim, signal_number)


@pytest.mark.parametrize("index", [0, 1])
def test_a_stopped_rank(fragile_pool: RankPool, index: int) -> None:
    stop(fragile_pool, _stopped, index, site=f"stopped/{index}")
    fragile_pool.run(_reset_and_work)


def _compiled(ctx: RankContext) -> tuple[dict[str, int], list[str]]:
    """The two halves of a layer in inference, through the compiler; which nodes there are, and what ran them."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(1)
    group = dist.group.WORLD
    n = 48
    llama = torch.rand(n, device=ctx.device).to(FP16)
    layer = torch.nn.LayerNorm(n, device=ctx.device, dtype=FP16)

    def rms(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return llama * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def fn(x: torch.Tensor, embedded: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = functional.all_reduce(embedded, "sum", group)
        second = functional.all_reduce(rms(first) @ w, "sum", group) + x
        return layer(second) @ w, second

    torch.manual_seed(ctx.rank)
    embedded = torch.randn(2, 5, n, device=ctx.device).to(FP16)
    torch.manual_seed(2)
    x = torch.randn(2, 5, n, device=ctx.device).to(FP16)
    w = (torch.randn(n, n, device=ctx.device) / 7).to(FP16)
    strategies = []
    with torch.no_grad(), collect_sites() as sink, without_caches():
        wanted = fn(x, embedded, w)
        for strategy in ("library", "tile"):
            torch._dynamo.reset()
            compiled = torch.compile(fn, backend=ditron, fullgraph=True, options={"ditron.strategy": strategy})
            for _ in range(3):
                for got, want in zip(compiled(x, embedded, w), wanted, strict=True):
                    assert_near(got, want.double(), num_partials=8, what=strategy)
                    calls.assert_replicated(ctx, got)
    for site in build_report(sink.graphs, Options()).sites:
        strategies.append(f"{site.record.pattern}: {site.strategy}")
    return dict(counters["ditron"]), strategies


def test_compiled_is_eager(rank_pools: RankPools) -> None:
    for counted, sites in rank_pools.get("cpu", 2).run(_compiled, timeout=200):
        assert counted["all_reduce_rms_norm"] == 4 and counted["matmul_all_reduce"] == 2
        assert sites == [
            f"{pattern}: {strategy}"
            for strategy in ("library", "tile")
            for pattern in ("all_reduce(sum) -> rms norm", "matmul -> all_reduce(sum) + residual -> layer norm")
        ]
