"""The rivals that the benchmarks write themselves: that they are right, and refuse what they cannot run."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx

from benchmarks.models.by_hand import fused_refusal
from benchmarks.models.contestants import COMPILERS
from benchmarks.models.experts import activated
from benchmarks.models.zoo import MODELS
from benchmarks.rivals import registered, symmetric
from benchmarks.rivals.fused_experts import FEW_SLOTS, fused_experts, rows_of_blocks, sorted_slots
from benchmarks.rivals.one_shot_norm import MOST_BYTES, MOST_COLUMNS, MOST_PROGRAMS, OneShotNorm
from benchmarks.tolerances import assert_near
from tests.cases import rare
from tests.models.interpreted import code_generated
from tests.rank_process import RankContext
from tests.ranks import RankPools

EPS = 1e-5


def _one_shot_norm(ctx: RankContext, shapes: list[tuple[int, int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    assert dist.group.WORLD is not None
    kernel = OneShotNorm(dist.group.WORLD, ctx.device, 1 << 16)
    same = torch.Generator().manual_seed(0)
    own = torch.Generator().manual_seed(1 + dist.get_rank())
    found = []
    for number, (rows, columns) in enumerate(shapes):
        residual, weight = torch.randn(rows, columns, generator=same), torch.randn(columns, generator=same)
        x = kernel.operand((rows, columns), torch.float32)
        x.copy_(torch.randn(rows, columns, generator=own))
        summed = x.clone()
        dist.all_reduce(summed)
        total = summed.double() + residual.double()
        normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight.double()
        # x may be written again as soon as a call has ended.
        got = kernel(x, residual, weight, EPS)
        x.fill_(float("nan"))
        assert_near(got[1], total, num_partials=dist.get_world_size(), what=f"total of call {number}")
        assert_near(got[0], normed, num_partials=dist.get_world_size(), what=f"norm of call {number}")
        found.append(got)
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.all_cases)])
def test_an_all_reduce_with_its_norm_is_right_and_equal_on_all_ranks(rank_pools: RankPools, world_size: int) -> None:
    shapes = [(3, 40), (1, 64), (MOST_PROGRAMS + 3, 8), (3, 40)]
    first, *others = rank_pools.get("cpu", world_size).run(_one_shot_norm, shapes, timeout=90)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))


def test_what_one_shot_is_not_for_is_refused() -> None:
    assert OneShotNorm.refusal(128, 8192, 2) == ""
    assert "not for more than 8 MiB" in OneShotNorm.refusal(MOST_BYTES // 16384 + 1, 8192, 2)
    assert "not for more than 16384 columns" in OneShotNorm.refusal(1, MOST_COLUMNS + 1, 2)


Of = tuple[str, str]
"""A model with its form, and a contestant."""


def _models(
    ctx: RankContext,
    model: str,
    *forms: str,
    names: tuple[str, ...] = ("eager", "registered", "symm_mem", "one_shot_norm"),
    generated: bool = True,
) -> tuple[set[Of], dict[Of, str]]:
    """Those that were timed, and the reasons of the others. generated: with Inductor's own code."""
    import time

    from benchmarks.models.request import Request
    from benchmarks.models.run import Run
    from benchmarks.models.zoo import MODELS, TINY, Selection, tiny

    cells = tiny(Selection(models=(model,), phases=("prefill",), forms=forms).cells())
    # The interpreter takes its time for every program, and the kernel has one for every token.
    cells = [replace(cell, batch=1, tokens=4) for cell in cells]
    architectures = {name: MODELS[name].like(TINY) for name in MODELS}
    run = Run(Request(tuple(cells), "cpu", architectures, names, rounds=2), ctx.device, time.monotonic())
    # What is timed is not looked at.
    with mock.patch("benchmarks.models.run.STEPS", 1), code_generated(generated):
        run.run()
    timed = {(row.sizes["model"] + " " + row.sizes["form"], row.contestant) for row in run.rows if row.p50_us}
    place = {fact: f"{fact.sizes['model']} {fact.sizes['form']}" for fact in run.facts}
    return timed, {(place[fact], fact.contestant): fact.why for fact in run.facts if fact.why}


def _quickly(ctx: RankContext, model: str, form: str, generated: bool) -> tuple[set[Of], dict[Of, str]]:
    return _models(ctx, model, form, generated=generated)


@pytest.mark.parametrize(
    ("model", "generated"), [("llama3-8b", False), *rare(("llama3-8b", True), ("qwen3-30b-a3b", True))]
)
def test_rivals_of_whole_models_are_right_or_say_why_not(rank_pools: RankPools, model: str, generated: bool) -> None:
    timed, reasons = rank_pools.get("cpu", 2).run(_quickly, model, "ar", generated, timeout=200)[0]
    assert timed == {(f"{model} ar", name) for name in ("eager", "symm_mem", "one_shot_norm")}, reasons
    assert all("which needs GPUs" in why for (_, name), why in reasons.items() if name == "registered")


def _by_hand(ctx: RankContext, model: str, names: tuple[str, ...]) -> set[Of]:
    """Those that are right in eager mode."""
    with mock.patch("benchmarks.models.contestants._inductor", lambda module: module):
        return _models(ctx, model, "ar", names=names)[0]


def test_layers_by_hand_reduce_what_experts_return_once(rank_pools: RankPools) -> None:
    model, names = "qwen3-30b-a3b", ("eager", "one_shot_norm", "grouped", "fused", "one_shot_fused")
    timed = rank_pools.get("cpu", 2).run(_by_hand, model, names, timeout=200)[0]
    assert timed == {(f"{model} ar", name) for name in names}


def test_experts_with_biases_in_the_kernel_of_serving_engines(rank_pools: RankPools) -> None:
    model, names = "gpt-oss-120b", ("eager", "fused")
    timed = rank_pools.get("cpu", 2).run(_by_hand, model, names, timeout=200)[0]
    assert timed == {(f"{model} ar", name) for name in names}


def _fused_experts(ctx: RankContext, sizes: tuple[int, ...], layout: str) -> None:
    """Compared with each token's experts, one by one."""
    T, E, top_k, D, F = sizes
    x, scale = torch.randn(T, D), torch.rand(T, top_k)
    # Some experts have no token.
    experts = (torch.rand(T, E) + torch.arange(E) % 2).topk(top_k)[1]
    gate_up, down = torch.randn(E, D, 2 * F) * D**-0.5, torch.randn(E, F, D) * F**-0.5
    biases = (torch.randn(E, 2 * F), torch.randn(E, D)) if layout == "biased" else None
    if biases is None:
        gate_up, down = gate_up.mT.contiguous().mT, down.mT.contiguous().mT
    activate = functools.partial(activated, biased=biases is not None)
    wanted = torch.zeros(T, D, dtype=torch.float64)
    for token, place in itertools.product(range(T), range(top_k)):
        expert = int(experts[token, place])
        first, second = (0.0, 0.0) if biases is None else (biases[0][expert], biases[1][expert])
        hidden = activate(x[token].double() @ gate_up[expert].double() + first)
        wanted[token] += scale[token, place] * (hidden @ down[expert].double() + second)
    assert_near(fused_experts(x, experts, scale, gate_up, down, activate, biases), wanted, what=f"{sizes}")


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        ((1, 8, 3, 16, 8), "plain"),
        ((5, 4, 2, 40, 24), "biased"),
        ((70, 5, 2, 16, 8), "plain"),
        ((FEW_SLOTS // 2 + 9, 6, 2, 24, 16), "biased"),
        *rare(((700, 3, 2, 16, 16), "plain")),
    ],
)
def test_the_kernel_of_serving_engines_is_right(rank_pools: RankPools, sizes: tuple[int, ...], layout: str) -> None:
    rank_pools.get("cpu", 2).run(_fused_experts, sizes, layout, timeout=90)


@pytest.mark.parametrize("S", [7, FEW_SLOTS + 1])
def test_slots_are_sorted_by_expert_in_blocks(rank_pools: RankPools, S: int) -> None:
    order, blocks = rank_pools.get("cpu", 2).run(_sorted_slots, S, timeout=60)[0]
    assert order.sort()[0][:S].tolist() == list(range(S)) and set(order.sort()[0][S:].tolist()) == {S}
    experts = (torch.arange(S) * 7) % 5
    for expert, some in zip(blocks.tolist(), order.view(-1, 16), strict=True):
        of_slots = {int(experts[slot]) for slot in some.tolist() if slot < S}
        assert of_slots == ({expert} if expert >= 0 else set())


def _sorted_slots(ctx: RankContext, S: int) -> tuple[torch.Tensor, torch.Tensor]:
    return sorted_slots((torch.arange(S) * 7) % 5, 8, 16)


def test_longer_blocks_are_for_experts_with_more_slots() -> None:
    assert [rows_of_blocks(slots, 8) for slots in (1, 128, 129, 512, 513, 10000)] == [16, 16, 64, 64, 128, 128]


def test_experts_in_that_kernel_are_refused_where_there_is_no_backward() -> None:
    llama, mixtral = MODELS["llama3-8b"], MODELS["mixtral-8x7b"]
    assert "this model has none" in fused_refusal(llama, "prefill")
    assert "no backward" in fused_refusal(mixtral, "training") and fused_refusal(mixtral, "decode") == ""


def _dispatched(ctx: RankContext, model: str) -> tuple[set[Of], dict[Of, str]]:
    """Those that are right in eager mode."""
    with mock.patch("benchmarks.models.contestants.Layer.compile"):
        return _models(ctx, model, "sp", names=("eager", "dispatched"))


@pytest.mark.parametrize("model", ["gpt-oss-120b", *rare("qwen3-30b-a3b", "deepseek-v3", "hunyuan-a13b")])
def test_tokens_that_are_sent_to_their_experts(rank_pools: RankPools, model: str) -> None:
    timed, reasons = rank_pools.get("cpu", 2).run(_dispatched, model, timeout=200)[0]
    assert timed == {(f"{model} sp", "eager"), (f"{model} sp", "dispatched")}, reasons


@pytest.mark.all_cases
def test_tokens_are_sent_by_code_of_inductors(rank_pools: RankPools) -> None:
    # A compilation must not change those before and behind it.
    model, names = "qwen3-30b-a3b", ("eager", "inductor", "dispatched", "overlap")
    timed, reasons = rank_pools.get("cpu", 2).run(_sp_models, model, names, timeout=200)[0]
    assert timed == {(f"{model} sp", name) for name in names}, reasons


def _sp_models(ctx: RankContext, model: str, names: tuple[str, ...]) -> tuple[set[Of], dict[Of, str]]:
    return _models(ctx, model, "sp", names=names)


@pytest.mark.all_cases
def test_rivals_of_another_form_say_why_not(rank_pools: RankPools) -> None:
    timed, reasons = rank_pools.get("cpu", 2).run(_models, "llama3-8b", "sp", timeout=200)[0]
    assert timed == {("llama3-8b sp", "eager")}, reasons
    assert "which needs GPUs" in reasons["llama3-8b sp", "registered"]
    assert "this form has none" in reasons["llama3-8b sp", "symm_mem"]
    assert "forwards with all-reduces" in reasons["llama3-8b sp", "one_shot_norm"]


@pytest.mark.all_cases
def test_rivals_of_a_model_that_norms_before_it_adds(rank_pools: RankPools) -> None:
    timed, reasons = rank_pools.get("cpu", 2).run(_models, "gemma3-27b", "ar", timeout=200)[0]
    assert timed == {("gemma3-27b ar", "eager"), ("gemma3-27b ar", "symm_mem")}, reasons
    assert "an RMS norm right behind it" in reasons["gemma3-27b ar", "one_shot_norm"]


def test_every_sum_over_ranks_is_reduced_by_hand() -> None:
    functional = torch.ops._c10d_functional
    graph = fx.Graph()
    x = graph.placeholder("x")
    for reduce_op in ("sum", "max"):
        x = graph.call_function(functional.all_reduce.default, (x, reduce_op, "0"))
        x = graph.call_function(functional.wait_tensor.default, (x,))
    graph.output(x)
    symmetric.ByHand()(graph)
    graph.lint()
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    by_hand = torch.ops.ditron_benchmarks.symmetric_all_reduce.default
    assert targets == [by_hand, functional.all_reduce.default, functional.wait_tensor.default]


def test_a_torch_without_a_selection_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "AUTO_SELECT", "_collective.no_such_choice")
    assert f"torch {torch.__version__} has no _collective.no_such_choice" in symmetric.auto_select_refusal()
    with pytest.raises(ValueError, match="has no _collective"):
        COMPILERS["auto_select"](torch.nn.Linear(1, 1))


def test_the_tuned_selection_has_the_options_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    if symmetric.auto_select_refusal():
        pytest.skip(symmetric.auto_select_refusal())
    given = {}
    monkeypatch.setattr(torch, "compile", lambda model, **settings: given.update(settings["options"]))
    COMPILERS["max_autotune_select"](torch.nn.Linear(1, 1))
    assert given[symmetric.AUTO_SELECT] and given["max_autotune"] and given["coordinate_descent_tuning"]


def test_models_of_one_process_have_different_symmetric_buffers() -> None:
    """Inductor draws their identities from `random`, and Dynamo restores its state after every compilation."""
    if symmetric.auto_select_refusal():
        pytest.skip(symmetric.auto_select_refusal())
    before = random.getstate()
    drawn = set()
    for _ in range(3):
        random.setstate(before)
        COMPILERS["auto_select"](torch.nn.Linear(1, 1))
        drawn.add(random.random())
    random.setstate(before)
    assert len(drawn) == 3


class _Backend:
    """One that registers pools, as NCCL's does."""

    mem_allocator = "its allocator"

    def __init__(self) -> None:
        self.pools: list[object] = []

    def register_mem_pool(self, pool: object) -> None:
        self.pools.append(pool)


class _Group:
    def __init__(self, backend: object) -> None:
        self._backend = backend

    def _get_backend(self, device: torch.device) -> object:
        return self._backend


def test_a_pool_is_registered_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[object] = []
    backend, cuda = _Backend(), torch.device("cuda")

    @contextlib.contextmanager
    def used(pool: object, device: torch.device) -> Iterator[None]:
        happened.append((pool, device, list(backend.pools)))
        yield
        happened.append("left")

    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"a pool of {allocator}")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", used)
    monkeypatch.setattr(registered.torch, "zeros", lambda *size, device: size)
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: happened.append("communicator"))
    pool = registered.RegisteredPool(_Group(backend), cuda)  # type: ignore[arg-type]
    assert pool.calling(lambda x, *, y: happened.append(x + y) or x + y)(1, y=2) == 3
    name = "a pool of its allocator"
    assert happened == ["communicator", (name, cuda, [name]), 3, "left"]


def test_where_nothing_can_be_registered_that_is_said() -> None:
    assert "needs GPUs" in registered.refusal(_Group(_Backend()), torch.device("cpu"))  # type: ignore[arg-type]
    assert registered.refusal(_Group(_Backend()), torch.device("cuda")) == ""  # type: ignore[arg-type]
    assert "cannot register a memory pool" in registered.refusal(_Group(object()), torch.device("cuda"))  # type: ignore[arg-type]


def test_the_kernel_compiles_for_gpus() -> None:
    world_sizes = (2, 8)
    code = textwrap.dedent(f"""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from benchmarks.rivals.one_shot_norm import _one_shot_norm
        tensors = dict.fromkeys(("residual", "weight", "total", "normed"), "*bf16")
        sizes = dict.fromkeys(("M", "N", "rank"), "i32")
        for world_size in {world_sizes}:
            known = {{"EPS": 1e-5, "WORLD": world_size, "BLOCK": 8192}}
            signature = {{"data": "*i64", "flags": "*i64", **tensors, **sizes, **dict.fromkeys(known, "constexpr")}}
            source = ASTSource(_one_shot_norm, signature, constexprs=known)
            built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={{"num_warps": 16}})
            print(*(built.asm["ptx"].count(f"atom.global.{{order}}.sys.cas") for order in ("release", "acquire")))
    """)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    # A signal to every rank and a wait for it, at the beginning and at the end.
    assert done.stdout.splitlines() == [f"{2 * world_size} {2 * world_size}" for world_size in world_sizes]
