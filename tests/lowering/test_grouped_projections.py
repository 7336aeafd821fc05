"""grouped_projections: near the fp64 reference by the kernel and by the library, with and without an epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl

from benchmarks.tolerances import assert_near
from ditron_inductor.lowering.epilogues import elements_at
from ditron_inductor.lowering.grouped_projections import grouped_kernel as lowering
from ditron_inductor.task.epilogue import parse
from ditron_inductor.task.epilogue_torch import evaluate, without_tables
from ditron_inductor.task.nodes import GroupedProjections
from tests.cases import rare
from tests.lowering.assembly import dialect_of, resources
from tests.lowering.cross_compile import NUM_WEIGHTS, compile_case
from tests.lowering.cross_compile import Case as Compilation
from tests.rank_process import RankContext
from tests.ranks import RankPools

SWIGLU = "cast(silu(mm0), bf16) * mm1"
OF_TABLES = "cast(minimum(cast(mm0 + even(x0), bf16), 0.7), bf16) * cast(mm1 + odd(x1), bf16)"


@dataclass(frozen=True)
class Case:
    """`tokens` that take `top_k` of `experts`, whose weights are [k, n] for each of `columns`.

    routing: `random`; `one`, where all tokens take the same expert; `first` and `last`, where no token takes another
    one. across: the columns of the weights are contiguous. behind: so many slots lie behind the last end. pitch: more
    elements than k from row to row. interleaved: both weights are the columns of one, in turns.
    """

    tokens: int
    top_k: int
    experts: int
    k: int
    columns: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    epilogue: str = ""
    routing: str = "random"
    across: bool = False
    behind: int = 0
    pitch: int = 0
    interleaved: bool = False

    def __str__(self) -> str:
        widths = "-".join(map(str, self.columns))
        name = f"{self.tokens}x{self.top_k}of{self.experts}-{self.k}-{widths}-{str(self.dtype)[6:]}-{self.routing}"
        optional = "-interleaved" * self.interleaved
        optional += f"-behind{self.behind}" * bool(self.behind) + f"-pitch{self.pitch}" * bool(self.pitch)
        return name + "-epilogue" * bool(self.epilogue) + "-across" * self.across + optional


CASES = (
    Case(30, 2, 5, 40, (40, 48)),
    Case(21, 3, 7, 48, (40,), torch.float32, behind=9),
    Case(19, 2, 3, 40, (40, 40), epilogue=SWIGLU, across=True),
    Case(11, 4, 6, 72, (56, 56, 24), torch.float16, epilogue=f"{SWIGLU}; mm2 + row(x0)", pitch=8),
    # One hot expert, the first or the last one, and experts without slots between others.
    Case(40, 1, 8, 32, (40,), routing="one"),
    Case(33, 1, 4, 40, (24,), routing="first", across=True),
    Case(33, 2, 4, 40, (24, 24), epilogue="mm0 * column(x0); mm1 + full(x1)", routing="last"),
    # Fewer slots than experts.
    Case(1, 2, 16, 48, (40, 40), epilogue=SWIGLU),
    Case(1, 1, 1, 40, (16,), behind=1),
    # As GPT-OSS has them: gate and up in turns, with biases of the experts.
    Case(23, 2, 5, 40, (40, 40), epilogue=OF_TABLES, across=True, interleaved=True),
    Case(37, 3, 4, 48, (24, 24), epilogue=OF_TABLES, interleaved=True, behind=7),
    Case(9, 2, 3, 40, (24, 24), interleaved=True),
    Case(29, 2, 6, 40, (40,), epilogue="mm0 + expert(x0)"),
    # Rows of half a weight that begin between multiples of 16 bytes, which torch's matmul does not take.
    Case(25, 2, 3, 40, (36, 36), epilogue=SWIGLU, across=True),
)
LARGE_CASES = (
    Case(2048, 8, 128, 2048, (384, 384), epilogue=SWIGLU),
    Case(2048, 2, 8, 4096, (7168, 7168), epilogue=SWIGLU),
    Case(128, 8, 128, 2048, (384, 384), epilogue=SWIGLU),
    Case(1000, 5, 11, 1000, (336, 328), torch.float16, behind=77),
    Case(512, 4, 32, 512, (384, 40), torch.float32),
    Case(1024, 4, 64, 2880, (5760,), across=True, behind=1000),
    Case(2000, 4, 64, 2880, (2880, 2880), epilogue=SWIGLU, across=True, routing="one"),
)


def operands(
    case: Case, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Returns (x, rows, ends, weights, extra tensors)."""
    generator = torch.Generator().manual_seed(0)
    S = case.tokens * case.top_k

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, case.dtype)

    weights = [draw(case.experts, n, case.k, scale=case.k**-0.5).mT for n in case.columns]
    weights = [torch.stack(weights, -1).flatten(-2)] if case.interleaved else weights
    weights = [weight.contiguous() if case.across else weight.mT.contiguous().mT for weight in weights]
    extras = [draw(case.columns[-1])] if "row(x0)" in case.epilogue else []
    if "column(x0)" in case.epilogue:
        extras = [draw(S, 1), draw(S, case.columns[1])]
    if "even(" in case.epilogue or "expert(" in case.epilogue:
        extras = [draw(case.experts, case.columns[0] * (1 + case.interleaved))] * (1 + case.interleaved)
    ids = torch.randint(0, case.experts, (S,), generator=generator)
    ids = {"one": ids * 0 + case.experts // 2, "first": ids * 0, "last": ids * 0 + case.experts - 1}.get(
        case.routing, ids
    )
    order = ids.sort(stable=True).indices
    ends = torch.bincount(ids, minlength=case.experts).cumsum(0).clamp(max=S - case.behind)
    rows = (order // case.top_k).to(device)
    # Rows may count from the end.
    rows[::3] -= case.tokens
    x = draw(case.tokens, case.k + case.pitch, scale=0.5)[:, : case.k]
    return x, rows, ends.to(device, torch.int32), weights, extras


def wanted(
    case: Case,
    x: torch.Tensor,
    rows: torch.Tensor,
    ends: torch.Tensor,
    weights: Sequence[torch.Tensor],
    extras: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """The outputs up to the last end, in fp64."""
    taken, begins = x.double()[rows], [0, *ends.tolist()[:-1]]
    weights = [weights[0][..., half::2] for half in range(2)] if case.interleaved else weights
    products = [
        torch.cat([taken[begin:end] @ weight[e].double() for e, (begin, end) in enumerate(zip(begins, ends.tolist()))])  # noqa: B905
        for weight in weights
    ]
    if case.epilogue:
        of_slots = lowering.experts_of_rows(ends, len(products[0]))
        epilogue, extras = without_tables(parse(case.epilogue), extras, of_slots)
        kept = [one[: len(products[0])] if one.ndim > 1 else one for one in extras]
        products = evaluate(epilogue, [one.to(case.dtype) for one in products], kept)
    return products


def check(case: Case, device: torch.device) -> None:
    given = operands(case, device)
    node = GroupedProjections(len(case.columns), len(given[-1]), case.epilogue, interleaved=case.interleaved)
    right = wanted(case, *given)
    by_kernel = lowering.prepare(node, *given, "tile")
    runs = [by_kernel, by_kernel]
    # On a GPU torch's grouped matmul is one of bfloat16.
    runs += [lowering.by_library(node, given[0], given[-1])] if given[0].dtype == torch.bfloat16 else []
    for run in runs:
        for out, value in zip(run(*given), right, strict=True):
            assert out.shape[0] == case.tokens * case.top_k and out.is_contiguous()
            assert_near(out[: len(value)], value, num_partials=3 if case.epilogue else 1, what=str(case))


def _check_in_rank(ctx: RankContext, case: Case) -> None:
    check(case, ctx.device)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_near_the_reference_in_the_interpreter(rank_pools: RankPools, case: Case) -> None:
    rank_pools.get("cpu", 2).run(_check_in_rank, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", (*CASES, *LARGE_CASES), ids=str)
def test_near_the_reference_on_a_gpu(case: Case) -> None:
    check(case, torch.device("cuda", 0))


@triton.jit
def _tiles_kernel(slots, found, sizes, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """Stores what `tile_of_slots` finds for each slot of each tile: [tiles, BLOCK_M, (expert, slot, row, whether)]."""
    number = tl.program_id(0)
    expert, places, row, there = lowering.tile_of_slots(number, slots, sizes, BLOCK_M, EXPERTS)
    at = found + (number * BLOCK_M + tl.arange(0, BLOCK_M)) * 4
    tl.store(at, tl.zeros((BLOCK_M,), tl.int64) + expert)
    tl.store(at + 1, places)
    tl.store(at + 2, row)
    tl.store(at + 3, there.to(tl.int64))


def _tiles(ctx: RankContext, ends: list[int], rows: list[int], T: int, tiles: int) -> list[tuple[int, int, int]]:
    """(The expert, the slot and the row of x) of every slot that a tile has."""
    E, block = len(ends), 4
    found = torch.zeros(tiles, block, 4, dtype=torch.int64, device=ctx.device)
    slots = torch.tensor(rows, device=ctx.device), torch.tensor(ends, dtype=torch.int32, device=ctx.device)
    sizes = lowering.Sizes(T, len(rows), E, 1, 1, 1, 1, (1,))
    _tiles_kernel[(tiles,)](slots, found, sizes, block, triton.next_power_of_2(E))
    return [(expert, slot, row) for expert, slot, row, there in found.flatten(0, 1).tolist() if there]


@pytest.mark.parametrize("ends", [[3, 3, 10], [0, 5, 5, 6, 12], [12], [0, 0, 0], [4, 8, 12, 12, 40]], ids=str)
def test_every_slot_is_in_one_tile(rank_pools: RankPools, ends: list[int]) -> None:
    """And no slot behind the last end, or beyond all slots, or whose row does not exist."""
    rows = [0, 1, 2, 3, 4, -1, 5, 2, 7, -9, 8, 1]
    (found, *_) = rank_pools.get("cpu", 2).run(_tiles, ends, rows, 8, 3 + len(ends))
    expert_of = [expert for expert, (a, b) in enumerate(pairwise([0, *ends])) for _ in range(min(b, 12) - min(a, 12))]
    named = [(expert, slot, row + 8 * (row < 0)) for slot, (expert, row) in enumerate(zip(expert_of, rows))]  # noqa: B905
    assert sorted(found, key=lambda one: one[1]) == [one for one in named if 0 <= one[2] < 8]


@triton.jit
def _places_kernel(slots, found, sizes, N, number, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """Stores the places of the first columns of the slots of a tile in an output with N columns."""
    _, places, _, there = lowering.tile_of_slots(number, slots, sizes, BLOCK_M, EXPERTS)
    columns = tl.arange(0, 1)
    elements = elements_at(places, columns, there[:, None], (columns < N)[None, :], N)
    tl.store(found + tl.arange(0, BLOCK_M)[:, None], elements.places)


def _places(ctx: RankContext, S: int, N: int) -> list[int]:
    found = torch.zeros(4, dtype=torch.int64, device=ctx.device)
    rows, ends = torch.zeros(S, dtype=torch.int64), torch.tensor([S - 4, S], dtype=torch.int32)
    sizes = lowering.Sizes(1, S, 2, 1, 1, 1, 1, (1,))
    _places_kernel[(1,)]((rows, ends), found, sizes, N, S // 4 - 1, 4, 2)
    return found.tolist()


def test_outputs_may_have_more_elements_than_32_bits_count(rank_pools: RankPools) -> None:
    """As those of a prompt of 128 Ki tokens, which take two experts each."""
    S, N = 1 << 18, 14336
    (found, *_) = rank_pools.get("cpu", 2).run(_places, S, N)
    assert found == [slot * N for slot in range(S - 4, S)] and found[0] > 1 << 31


def _no_memory_beyond(ctx: RankContext) -> None:
    """Rows and ends beyond what there is touch no other memory."""
    case = CASES[0]
    x, rows, ends, weights, extras = operands(case, ctx.device)
    node = GroupedProjections(len(weights))
    right = wanted(case, x, rows, ends, weights, extras)
    broken = rows.clone()
    broken[4], broken[17] = case.tokens, -case.tokens - 1
    beyond = ends.clone()
    beyond[-1] += 1 << 20
    run = lowering.prepare(node, x, rows, ends, weights, extras, "tile")
    kept = torch.ones(len(rows), dtype=torch.bool, device=ctx.device)
    kept[4] = kept[17] = False
    for out, value in zip(run(x, broken, beyond, weights, extras), right, strict=True):
        assert_near(out[kept], value[kept], what="the other rows")


def test_what_lies_beyond_is_not_touched(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(_no_memory_beyond)


@pytest.mark.gpu
def test_in_a_graph_it_follows_its_operands() -> None:
    case = LARGE_CASES[0]
    given = operands(case, torch.device("cuda", 0))
    node = GroupedProjections(len(case.columns), 0, case.epilogue)
    x, rows, ends, weights, _ = given
    call = [x, rows, ends, *weights]
    lowering.grouped_projections(node, call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = lowering.grouped_projections(node, call)
    for seed in range(3):
        torch.manual_seed(seed)
        x.normal_(std=0.5)
        ids = torch.randint(0, case.experts, (len(rows),), device="cuda")
        rows.copy_(ids.sort(stable=True).indices // case.top_k)
        ends.copy_(torch.bincount(ids, minlength=case.experts).cumsum(0))
        graph.replay()
        (value,) = wanted(case, *given)
        assert_near(outs[0], value, num_partials=3)


def test_other_layouts_and_no_tokens_go_to_the_library() -> None:
    case = Case(5, 2, 4, 16, (8, 8))
    x, rows, ends, weights, extras = operands(case, torch.device("cpu"))
    node = GroupedProjections(2)
    apart = x.repeat_interleave(2, 1)[:, ::2]
    assert apart.stride(1) == 2
    for out, value in zip(
        lowering.prepare(node, apart, rows, ends, weights, extras, "tile")(apart, rows, ends, weights, extras),
        wanted(case, x, rows, ends, weights, extras),
        strict=True,
    ):
        assert_near(out, value)
    none = rows[:0], ends * 0
    outs = lowering.prepare(node, x, *none, weights, extras, "tile")(x, *none, weights, extras)
    assert [out.shape for out in outs] == [(0, 8), (0, 8)]


@pytest.mark.parametrize("slots", [128, *rare(64)])
@pytest.mark.parametrize(
    ("target", "epilogue", "across"),
    [
        ("sm_90", SWIGLU, False),
        ("sm_90", "", True),
        ("gfx942", SWIGLU, False),
        ("sm_90", OF_TABLES, True),
        *rare(("sm_90", SWIGLU, True), ("sm_90", "", False), ("gfx942", "", True)),
        *rare(("sm_90", OF_TABLES, False), ("gfx942", OF_TABLES, True)),
    ],
    ids=lambda value: {"": "plain", SWIGLU: "epilogue", OF_TABLES: "interleaved"}.get(value, str(value)),
)
def test_compiles_for_gpus(target: str, epilogue: str, across: bool, slots: int) -> None:
    numbers = {"slots": slots * 128, "experts": 128, "dtype": torch.bfloat16}
    tile = lowering.config_for(**numbers, interpreted=False)
    assert tile.block_m == slots
    case = Compilation("grouped", target, tile, "bf16", epilogue=epilogue, elsewhere=across)
    compiled = compile_case(replace(case, interleaved=epilogue == OF_TABLES))
    assert len(compiled.listing.loops(dialect_of(target).dot)) >= (1 if epilogue else NUM_WEIGHTS)
    if target == "sm_90":
        # Several steps of K under way at once, and nothing in memory of its own.
        step_bytes = 2 * tile.block_k * (tile.block_m + tile.block_n)
        assert compiled.shared_bytes >= (tile.num_stages - 1) * step_bytes
        assert resources(compiled.assembly).spilled_bytes == 0
