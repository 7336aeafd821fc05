"""cached_attention: one launch turns, stores and attends as torch does in five, and leaves everything else in place."""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from triton.compiler import ASTSource

from ditron_inductor.lowering.cached_attention import cached_kernel as lowering
from ditron_inductor.lowering.cached_attention.cached_kernel import cached_attention
from ditron_inductor.lowering.overlapping import overlap_for
from ditron_inductor.task.cached_attention import bounds
from ditron_inductor.task.cached_attention import cached_attention as reference
from ditron_inductor.task.decode_node import HIDDEN
from ditron_inductor.task.nodes import CachedAttention
from tests.cases import rare, sampled
from tests.lowering.assembly import Listing, resources
from tests.lowering.cross_compile import all_aligned, compile_for
from tests.rank_process import RankContext
from tests.ranks import RankPools


@dataclass(frozen=True)
class Case:
    """A call for B sequences with Hq query heads, in a cache of S tokens. tokens: the lengths of the sequences, as many
    as there are, or one for all. turned: 0, or the part of a head that the angles are for. own_angles: whether
    each sequence has its own. page: the tokens of a block, or 0.
    """

    B: int
    Hq: int
    Hkv: int
    S: int
    D: int
    mask: str = "lengths"
    tokens: tuple[int, ...] = (5,)
    tokens_first: bool = False
    appends: bool = False
    turned: int = 0
    own_angles: bool = False
    added: int = 0
    sinks: bool = False
    page: int = 0
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        flags = "-appends" * self.appends + f"-turned{self.turned}" * bool(self.turned) + "-own" * self.own_angles
        flags += "-tokens_first" * self.tokens_first + "-sinks" * self.sinks + f"-pages{self.page}" * bool(self.page)
        sizes = f"{self.B}x{self.Hq}of{self.Hkv}-{self.S}x{self.D}"
        return f"{sizes}-{self.mask}{'_'.join(map(str, self.tokens))}{flags}-{str(self.dtype)[6:]}"

    @property
    def node(self) -> CachedAttention:
        rotated = self.turned > 0
        parts = self.appends, rotated, self.added, self.sinks, self.page > 0
        return CachedAttention(0.25, self.mask, *parts, strategy="tile")


CASES = (
    Case(1, 4, 2, 64, 16, tokens=(37,), appends=True, turned=1),
    Case(3, 6, 2, 50, 32, tokens=(0, 17, 50), tokens_first=True),
    Case(2, 4, 4, 300, 16, "given", tokens=(299,), appends=True, turned=2, own_angles=True),
    Case(2, 8, 1, 33, 64, "all", tokens=(32,), appends=True),
    Case(2, 2, 1, 90, 16, tokens=(70, 89), added=1),
    Case(2, 4, 2, 300, 16, "bias", tokens=(131,), sinks=True, appends=True, turned=2),
    Case(3, 4, 2, 60, 16, tokens=(41, 59, 0), appends=True, turned=2, own_angles=True),
    Case(3, 4, 2, 60, 16, tokens=(41, 60, 0), page=4, tokens_first=True, turned=1),
    Case(2, 4, 2, 96, 16, "given", page=32),
    Case(2, 6, 2, 70, 16, "bias", tokens=(0,), sinks=True),
    Case(1, 130, 1, 20, 16, tokens=(0,), appends=True, turned=1),
    Case(2, 4, 2, 48, 16, "given", tokens=(7,), tokens_first=True),
    Case(1, 4, 2, 1, 16, "all", tokens=(0,)),
    Case(2, 4, 2, 200, 16, tokens=(0, 150), sinks=True),
    Case(2, 4, 2, 40, 16, tokens=(39,), appends=True, dtype=torch.float16, turned=2),
    Case(2, 4, 1, 30, 16, "bias", sinks=True, page=1, tokens_first=True, own_angles=True, turned=2),
    Case(2, 4, 1, 40, 32, "all", page=10),
    Case(2, 4, 2, 40, 16, "given", tokens=(39, 3), tokens_first=True, appends=True),
)
BF16 = torch.bfloat16
GPU_CASES = (
    Case(1, 16, 4, 256, 128, tokens=(255,), appends=True, turned=2, dtype=BF16),
    Case(1, 16, 4, 4096, 128, tokens=(4000,), appends=True, turned=2, dtype=BF16),
    Case(32, 16, 4, 1024, 128, tokens=(517,), appends=True, turned=1, own_angles=True, dtype=BF16),
    Case(5, 32, 8, 777, 64, "given", tokens=(400,), appends=True, turned=1, dtype=torch.float16),
    Case(3, 8, 8, 515, 256, tokens=(3, 515, 0), tokens_first=True, dtype=BF16),
    Case(2, 8, 1, 2000, 128, "all", tokens=(1999,), appends=True, dtype=BF16),
    Case(128, 4, 1, 300, 128, tokens=(299,), appends=True, turned=2, dtype=BF16),
    Case(3, 32, 4, 4096, 64, "bias", tokens=(3000,), sinks=True, appends=True, turned=2, dtype=BF16),
    Case(3, 32, 4, 130, 64, "bias", tokens=(129,), sinks=True, dtype=BF16),
    Case(3, 16, 4, 1024, 128, tokens=(1023, 0, 517), appends=True, turned=1, own_angles=True, dtype=BF16),
    Case(3, 16, 4, 4096, 128, tokens=(4096, 0, 517), page=16, tokens_first=True, turned=2, dtype=BF16),
    Case(32, 16, 4, 1280, 128, "given", page=256, turned=2, dtype=BF16),
    Case(4, 32, 4, 4096, 64, "bias", sinks=True, page=64, dtype=BF16),
    Case(2, 8, 8, 700, 256, tokens=(699,), page=1, tokens_first=True, dtype=torch.float16),
)


def operands(case: Case, device: torch.device, seed: int = 0) -> list[torch.Tensor]:
    """The operands of a call. Behind the lengths of a sequence the cache has what must not be used."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    caches = [drawn(case.B, case.S, case.Hkv, case.D) for _ in range(2)]
    given = [drawn(case.B, 2 * case.Hq, case.D)[:, ::2]]
    lengths = torch.tensor(case.tokens)
    if case.mask == "lengths":
        for cache in caches:
            for row, length in enumerate(lengths.expand(case.B).tolist()):
                cache[row, length + case.added :] = float("nan")
    caches = [cache.transpose(1, 2) for cache in caches]
    if not case.tokens_first:
        caches = [cache.contiguous() for cache in caches]
    given += caches
    if case.mask == "lengths":
        given.append(lengths)
    if case.mask == "given":
        shown = torch.rand(case.B, case.S, generator=generator) < 0.5
        # A sequence is shown some tokens in the middle, as by a window.
        shown[0, : case.S // 3] = shown[0, case.S // 2 :] = False
        given += [shown, *bounds(shown)]
    if case.mask == "bias":
        # As transformers hides tokens, and a sequence that sees none.
        bias = drawn(case.B, case.S).where(torch.rand(case.B, case.S, generator=generator) < 0.6, torch.finfo(BF16).min)
        bias[0] = torch.finfo(BF16).min
        given += [bias, *bounds(bias)]
    if case.mask in ("given", "bias"):
        # What a sequence must not see may be anything.
        hidden = ~given[3][-1] if case.mask == "given" else given[3][-1] < HIDDEN
        for cache, number in zip(given[1:3], ("nan", "inf"), strict=True):
            cache[-1, :, hidden] = float(number)
    if case.page:
        given[1:3] = in_blocks(given[1:3], case, generator)
    if case.sinks:
        given.append(drawn(case.Hq))
    if case.appends:
        given += [lengths.clone(), drawn(case.B, case.Hkv, case.D), drawn(case.B, case.Hkv + 1, case.D)[:, 1:]]
    if case.turned:
        angles = 6.3 * drawn(case.B if case.own_angles else 1, case.D // case.turned)
        given += [angles.cos(), angles.sin()]
    return [x.to(device) if not x.is_floating_point() else x.to(device, case.dtype) for x in given]


def in_blocks(caches: list[torch.Tensor], case: Case, generator: torch.Generator) -> list[torch.Tensor]:
    """Returns caches [B, Hkv, S, D] in blocks in any order, some of them counted from the end, and the block table."""
    count = case.B * case.S // case.page
    places = torch.randperm(count + 3, generator=generator)[:count]
    found = []
    for cache in caches:
        blocks = torch.full((count + 3, case.Hkv, case.page, case.D), float("nan"))
        if case.tokens_first:
            blocks = blocks.transpose(1, 2).contiguous().transpose(1, 2)
        blocks[places] = cache.reshape(case.B, case.Hkv, -1, case.page, case.D).transpose(1, 2).flatten(0, 1)
        found.append(blocks)
    table = torch.where(places % 3 == 0, places - count - 3, places).view(case.B, -1)
    return [*found, table if case.own_angles else table.int()]


def check(case: Case, given: list[torch.Tensor]) -> None:
    """The kernels compute what torch does in fp64, store the new token bit by bit, and write nothing else."""
    node = case.node
    # What is not attended to would make NaNs of torch's sums.
    exact = [x.double().nan_to_num() if x.is_floating_point() else x.clone() for x in given]
    before = [cache.clone() for cache in given[1:3]]
    wanted = reference(node, *node.split(exact))
    (out,) = cached_attention(node, given)
    limit = 32 * torch.finfo(case.dtype).eps
    torch.testing.assert_close(out.double(), wanted, rtol=limit, atol=limit)
    for cache, old, new in zip(given[1:3], before, exact[1:3], strict=True):
        changed = (cache != old) & ~(cache.isnan() & old.isnan())
        if not case.appends:
            assert not changed.any()
            continue
        there = torch.zeros_like(cache, dtype=torch.bool)
        for row, place in zip(there, torch.tensor(case.tokens).expand(case.B), strict=True):
            row[:, place] = True
        assert not (changed & ~there).any() and changed.any()
        torch.testing.assert_close(cache[there].double(), new[there], rtol=limit, atol=limit)


def _near(ctx: RankContext, case: Case) -> None:
    check(case, operands(case, ctx.device))


@pytest.mark.parametrize("case", [*CASES[:10], *rare(*CASES[10:])], ids=str)
def test_near_the_reference_in_the_interpreter(rank_pools: RankPools, case: Case) -> None:
    rank_pools.get("cpu", 1).run(_near, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *GPU_CASES], ids=str)
def test_near_the_reference_on_a_gpu(rank_pools: RankPools, case: Case) -> None:
    rank_pools.get("cuda", 1).run(_near, case, timeout=100)


def _no_numbers(ctx: RankContext) -> None:
    """With the new token alone, a query or a key that is no number leaves none, and one that is hidden 0."""
    case = Case(1, 4, 2, 64 if ctx.device.type == "cuda" else 16, 16, tokens=(0,), appends=True)
    for name, number in (("q", "nan"), ("key", "nan"), ("key", "inf"), ("value", "nan")):
        given = operands(case, ctx.device)
        place = [slot for slot, _ in case.node.slots()].index(name)
        given[place][:] = float(number)
        given[0].abs_()
        (out,) = cached_attention(case.node, given)
        assert out.isnan().all(), (name, number)
    sunk = replace(case, mask="bias", sinks=True)
    for name, number in (("bias", "nan"), ("sinks", "nan"), ("sinks", "inf")):
        given = operands(sunk, ctx.device)
        given[[slot for slot, _ in sunk.node.slots()].index(name)][:] = float(number)
        (out,) = cached_attention(sunk.node, given)
        assert out.isnan().all(), (name, number)
    given = operands(case, ctx.device)
    given[0].abs_()
    given[5][:] = float("-inf")
    (out,) = cached_attention(case.node, given)
    assert not out.any()


def test_what_is_no_number_stays_none(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 1).run(_no_numbers)


@pytest.mark.gpu
def test_what_is_no_number_stays_none_on_a_gpu(rank_pools: RankPools) -> None:
    rank_pools.get("cuda", 1).run(_no_numbers, timeout=100)


def _beyond(ctx: RankContext) -> None:
    """A place that the cache does not have is not written, and leaves no number."""
    case = Case(1, 4, 2, 40, 16, tokens=(3,), appends=True)
    given = operands(case, ctx.device)
    before = [cache.clone() for cache in given[1:3]]
    for name in ("lengths", "position"):
        given[[slot for slot, _ in case.node.slots()].index(name)].fill_(40)
    (out,) = cached_attention(case.node, given)
    assert out.isnan().all()
    assert all(torch.equal(old.nan_to_num(), new.nan_to_num()) for old, new in zip(before, given[1:3], strict=True))


def _no_such_block(ctx: RankContext) -> None:
    """A block that the caches do not have leaves no number where it is attended to, and does nothing elsewhere."""
    for page, own in ((4, False), (10, True), (32, False), (64, True), (1, True)):
        case = Case(2, 4, 2, 60 if page < 32 else 64, 16, tokens=(60, 17), page=page, own_angles=own)
        for number in (2 * 60 // page + 4, -(1 << 20), 1 << (40 if own else 20)):
            given = operands(case, ctx.device)
            # The second sequence is too short for this place, unless all of its tokens are in one block.
            given[3][: 2 if page < 64 else 1, 40 // page] = number
            (out,) = cached_attention(case.node, given)
            assert out[0].isnan().all() and not out[1].isnan().any(), (page, number)


def test_a_block_that_the_caches_do_not_have(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 1).run(_no_such_block)


@pytest.mark.gpu
def test_a_block_that_the_caches_do_not_have_on_a_gpu(rank_pools: RankPools) -> None:
    rank_pools.get("cuda", 1).run(_no_such_block, timeout=100)


def untouched(count: int, device: torch.device) -> torch.Tensor:
    """So many elements of float16. Of memory that is never touched, a host gives as much as one asks for."""
    if device.type == "cuda":
        return torch.empty(count, dtype=torch.float16, device=device)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, 2 * count, flags=private), dtype=torch.float16)


def _far(ctx: RankContext) -> None:
    for page in (4, 10, 32):
        case = Case(2, 4, 2, 320, 16, tokens=(310, 17), page=page, dtype=torch.float16)
        given = operands(case, ctx.device)
        for place in (1, 2):
            blocks = given[place]
            apart = (1 << 31) // (len(blocks) - 1) + 1
            room = untouched(apart * len(blocks), ctx.device)
            given[place] = room.as_strided(blocks.shape, (apart, *blocks.stride()[1:])).copy_(blocks)
        check(case, given)


def test_pages_that_lie_far_apart(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 1).run(_far)


@pytest.mark.gpu
def test_pages_that_lie_far_apart_on_a_gpu(rank_pools: RankPools) -> None:
    rank_pools.get("cuda", 1).run(_far, timeout=100)


def test_how_far_pages_may_lie_apart() -> None:
    """The last element has to be reached by 32 bits, whatever the strides of tokens and pages are."""
    most = (1 << 31) - 128
    assert not lowering.are_far(17, 16, 128, (most // 16, 0))
    assert lowering.are_far(17, 16, 128, (most // 16 + 8, 0))
    assert lowering.are_far(17, 16, 128, (128, 128), (most // 16 - 128, 256))
    assert not lowering.are_far(17, 16, 128, (128, 128), (most // 16 - 256, 256))
    assert lowering.are_far(1, 1 << 12, 128, (0, 1 << 20))


def test_no_place_beyond_the_cache_is_written(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 1).run(_beyond)


def _outside_of_the_bounds(ctx: RankContext) -> None:
    """Nothing outside of the bounds is read, except where a sink is so low that hidden tokens count too."""
    case = Case(2, 4, 2, 100, 16, "given", dtype=torch.float32)
    given = operands(case, ctx.device)
    shown, begin, end = given[3:]
    shown[:] = True
    begin[:], end[:] = torch.tensor([32, 0]), torch.tensor([50, 120])
    for cache in given[1:3]:
        cache.nan_to_num_(posinf=0.0)
        cache[0, :, :32] = cache[0, :, 50:] = float("nan")
    (out,) = cached_attention(case.node, given)
    assert not out.isnan().any()
    places = torch.arange(case.S, device=ctx.device)
    given[3] = (places >= begin[:, None]) & (places < end[:, None])
    check(case, given)
    case = replace(case, mask="bias", sinks=True)
    given = operands(case, ctx.device)
    for cache in given[1:3]:
        cache.nan_to_num_(posinf=0.0)
    given[3].fill_(-2e38)
    given[4:6] = bounds(given[3])
    given[6][1] = -2e38
    check(case, given)
    assert (given[4] == case.S).all() and not given[5].any()


def test_nothing_outside_of_the_bounds_is_read(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 1).run(_outside_of_the_bounds)


@pytest.mark.gpu
def test_nothing_outside_of_the_bounds_is_read_on_a_gpu(rank_pools: RankPools) -> None:
    rank_pools.get("cuda", 1).run(_outside_of_the_bounds, timeout=100)


def _views(ctx: RankContext) -> None:
    """Lengths and positions may be repeated, or stand apart; tokens may be too far apart for 32 bits."""
    case, alone = Case(3, 4, 2, 60, 16, tokens=(41, 41, 41), appends=True), Case(1, 1, 1, 4, 16, "all")
    with mock.patch.object(lowering, "by_library") as library:
        for seed in (0, 1):
            given = operands(case, ctx.device, seed)
            for place in (3, 4):
                x = given[place]
                given[place] = x[:, None].expand(3, 2).contiguous()[:, 0] if seed else x[:1].expand(3)
            check(case, given)
        assert not library.called
        q, *_ = operands(alone, ctx.device)
        far = torch.empty_strided((1, 1, 4, 16), (1, 1, 16, 1)).as_strided((1, 1, 1, 16), (1, 1, 1 << 28, 1))
        lowering.prepare(alone.node, *alone.node.split([q, far, far]), "tile")
        assert library.called


def test_views_of_lengths_and_positions(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 1).run(_views)


def _by_the_library(ctx: RankContext) -> None:
    """Other forms are torch's: its results are contiguous, and new tokens are written."""
    case = Case(2, 4, 2, 12, 24, tokens=(7,), appends=True, turned=1)
    given = [x.nan_to_num() if x.is_floating_point() else x for x in operands(case, ctx.device)]
    check(case, given)
    case = Case(2, 4, 2, 12, 16, "all")
    given = operands(case, ctx.device)
    given[0] = given[0].transpose(0, 1).contiguous().transpose(0, 1)
    node = replace(case.node, strategy="library")
    (out,) = cached_attention(node, given)
    assert out.is_contiguous()
    torch.testing.assert_close(out, cached_attention(case.node, given)[0])


def test_other_forms_go_to_the_library(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 1).run(_by_the_library)


def _replayed(ctx: RankContext) -> None:
    case = GPU_CASES[1]
    given = operands(case, ctx.device)
    cached_attention(case.node, given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (out,) = cached_attention(case.node, given)
    for at in range(3990, 4096, 21):
        for tensor, other in zip(given, operands(replace(case, tokens=(at,)), ctx.device, at), strict=True):
            tensor.copy_(other)
        graph.replay()
        exact = [x.double().nan_to_num() if x.is_floating_point() else x for x in given]
        limit = 32 * torch.finfo(case.dtype).eps
        torch.testing.assert_close(out.double(), reference(case.node, *case.node.split(exact)), rtol=limit, atol=limit)


@pytest.mark.gpu
def test_in_a_graph_it_follows_the_position(rank_pools: RankPools) -> None:
    rank_pools.get("cuda", 1).run(_replayed, timeout=100)


def compiled(target: str, kernel: Any, form: str) -> Any:
    """A kernel of a form of PARTS for 4 query heads of 128 elements that share a key head."""
    # On NVIDIA GPUs the next launch may begin early.
    asked = PARTS[form]._replace(OVERLAP=overlap_for(target, 1, "leads"))
    heads = lowering.deal(1, 16, 4)
    config = lowering.select_config(head_dim=128, dtype=BF16, interpreted=False).for_arch(target)
    how = lowering.How(
        *(heads.rows, heads.block_rows, heads.merged_rows, heads.parts, 128, 1, config.block_n),
        *(1, PAGES.get(form, 0), form == "far_pages", 0.125, 0.0, "ieee", False),
    )
    x = "*bf16"
    tensors = lowering.Tensors(x, x, x, "*i32", "*i64", "*i1", x, "*i32", "*i32", x, "*i64", *(x,) * 5, "*fp32")
    pair, triple = ("i32",) * 2, ("i32",) * 3
    strides = lowering.Strides(pair, triple, triple, "i32")
    structures = {"tensors": tensors, "sizes": lowering.Sizes("i32", "i32", strides, pair, pair, *("i32",) * 6)}
    signature: dict[str, Any] = dict.fromkeys(("heads", "kv_heads", "splits"), "i32")
    signature = {**structures, **signature, "HOW": "constexpr", "NODE": "constexpr", "AT_ONCE": "constexpr"}
    signature = {parameter.name: signature[parameter.name] for parameter in kernel.params}
    places = {name: place for place, name in enumerate(signature)}
    aligned = {key: one for name in structures for key, one in all_aligned(places[name], signature[name]).items()}
    known = {"HOW": how, "NODE": asked, "AT_ONCE": lowering.MERGED_AT_ONCE}
    source = ASTSource(kernel, signature, {(places[one],): known[one] for one in known if one in places}, aligned)
    return compile_for(target, source, {"num_warps": config.num_warps, "num_stages": config.num_stages})


PAGES = {"paged": 16, "far_pages": 16, "paged_marked": 16, "large_pages": 64}
"""The tokens of a block in the forms that have some."""
PARTS = {
    "appends": lowering.NodeParts(True, False, False, False, 0, True, 128, False, 0),
    "marked": lowering.NodeParts(False, True, False, False, 0, True, 64, True, 0),
    "reads": lowering.NodeParts(True, False, False, False, 1, False, 0, False, 0),
    "sinks": lowering.NodeParts(False, False, True, True, 0, True, 64, False, 0),
    "paged": lowering.NodeParts(True, False, False, False, 1, False, 128, False, 0),
    "far_pages": lowering.NodeParts(True, False, False, False, 1, False, 128, False, 0),
    "paged_marked": lowering.NodeParts(False, True, False, False, 0, False, 128, False, 0),
    "large_pages": lowering.NodeParts(True, False, False, False, 1, False, 128, False, 0),
}


@pytest.mark.parametrize("form", list(PARTS))
def test_it_compiles_for_nvidia(form: str) -> None:
    found = compiled("sm_90", lowering.cached_attention_kernel, form)
    text = found.asm["ptx"]
    # Nobody is waited for, and the cache comes 16 bytes at a time, several blocks ahead.
    assert not re.search(r"\b(atom|red)\b|ld\.acquire|st\.release", text)
    assert text.count("griddepcontrol.launch_dependents") == 1 and "griddepcontrol.wait" not in text
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global.*?0x([0-9a-f]+)", text)
    assert copies.count("10") >= 6
    needed = resources(text)
    assert needed.spilled_bytes == 0 and needed.registers * 128 * 2 <= 65536 and found.metadata.shared * 2 <= 227 << 10
    stores = [line for line in Listing(text).lines if "st.global" in line]
    assert (len(stores) > len([line for line in stores if "b32" in line])) or not PARTS[form].APPENDS


@pytest.mark.parametrize("form", sampled(PARTS, 3))
def test_it_compiles_for_amd(form: str) -> None:
    text = compiled("gfx942", lowering.cached_attention_kernel, form).asm["amdgcn"]
    assert "v_mfma_" in text and "global_atomic" not in text


def test_the_merging_kernel_compiles_for_amd() -> None:
    text = compiled("gfx942", lowering.merge_kernel, "appends").asm["amdgcn"]
    assert re.search(r"(global|buffer)_store", text)


def test_the_merging_kernel_spills_nothing() -> None:
    assert resources(compiled("sm_90", lowering.merge_kernel, "appends").asm["ptx"]).spilled_bytes == 0
