"""The reduction of what experts return in a decode step: near the fp64 reference by each strategy, with a norm and
without one, whatever the routing.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.tolerances import assert_near
from ditron_inductor import reset
from ditron_inductor.errors import DitronTimeout
from tests.cases import rare
from tests.lowering.expert_problems import FORMS, Case, ExpertsProblem, assert_right, call, given_to, wanted
from tests.lowering.stress import check_in_poisoned_slots, delay
from tests.rank_process import RankContext
from tests.ranks import RankPool

BF16 = torch.bfloat16
STRATEGIES = ("tile", "chunked", "library")

CPU = (
    # One token, whose slots have experts of their own.
    Case(1, 3, 8, 70, 96),
    Case(1, 1, 4, 32, 40, torch.float16, added=True),
    # Fewer slots than experts, and more; some experts are taken by nobody.
    Case(3, 2, 16, 41, 72, scale_dtype=BF16),
    Case(17, 3, 7, 64, 33, added=True),
    # Each expert has one step of K, and one expert has all tokens.
    Case(6, 1, 5, 16, 64, routing="one"),
    Case(5, 2, 3, 40, 48, torch.float32, columns=False),
    Case(64, 2, 4, 24, 32, routing="one"),
    Case(8, 4, 4, 33, 40),
)
CUDA = (
    Case(1, 8, 128, 384, 2048),
    Case(1, 2, 8, 7168, 4096, added=True),
    Case(8, 8, 128, 384, 2048, scale_dtype=BF16),
    Case(32, 8, 128, 768, 4096),
    Case(16, 2, 8, 3584, 4096, routing="one"),
    Case(64, 8, 256, 512, 7168, added=True),
    Case(33, 5, 11, 1000, 1333, torch.float16),
    Case(9, 4, 32, 200, 1032, torch.float32, columns=False),
    Case(7, 1, 16, 96, 2880, routing="same"),
    Case(2, 10, 512, 256, 2048),
)
CASES = {"cpu": CPU, "cuda": CUDA}


def near_the_reference(ctx: RankContext, case: Case, form: str, strategy: str) -> None:
    for seed in range(3):
        given = given_to(ctx, case, form, seed)
        assert_right(ctx, case, form, given, call(ctx, case, form, strategy, given))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("number", range(len(CUDA)))
@pytest.mark.parametrize("form", FORMS)
def test_near_the_reference(pool: RankPool, form: str, number: int, strategy: str) -> None:
    cases = CASES[pool.device_type]
    if number >= len(cases):
        pytest.skip("there are fewer cases here")
    pool.run(near_the_reference, cases[number], form, strategy)


def other_layouts(ctx: RankContext, form: str) -> None:
    """One rank has operands that lie in another way. It takes part all the same."""
    case = CASES[ctx.device.type][2]
    given = given_to(ctx, case, form)
    if ctx.rank == 1:
        given["x"] = given["x"].mT.contiguous().mT
        given["matrices"] = given["matrices"].contiguous()
        for name in ("experts", "factors"):
            given[name] = given[name].repeat_interleave(2)[::2]
    assert_right(ctx, case, form, given, call(ctx, case, form, "tile", given, " across"))


@pytest.mark.parametrize("form", FORMS)
def test_a_rank_with_another_layout_takes_part(pool: RankPool, form: str) -> None:
    pool.run(other_layouts, form)


def infinite_elsewhere(ctx: RankContext) -> None:
    """Weights that a token does not take are no part of its sum, even if they are infinite."""
    case = CASES[ctx.device.type][2]
    given = given_to(ctx, case, "alone")
    # Another token takes the expert.
    bad = int(given["experts"][-1])
    tokens = (given["experts"].view(-1, case.top_k) == bad).any(1)
    given["matrices"] = given["matrices"].clone()
    given["matrices"][bad] = float("inf")
    (out,) = call(ctx, case, "alone", "tile", given, " infinite")
    everywhere = [torch.empty_like(tokens) for _ in range(ctx.world_size)]
    dist.all_gather(everywhere, tokens)
    spoilt = torch.stack(everywhere).any(0)
    assert out[~spoilt].isfinite().all() and not out[spoilt].isfinite().any()


def test_an_infinite_expert_spoils_its_own_tokens_alone(pool: RankPool) -> None:
    pool.run(infinite_elsewhere)


def late_and_often(ctx: RankContext, form: str, number: int, late: int) -> None:
    """Calls back to back, one rank of which begins some of them late, without a wait in between."""
    case = CASES[ctx.device.type][number]
    inputs = [given_to(ctx, case, form, seed) for seed in range(2)]
    expected = [wanted(ctx, case, form, given) for given in inputs]
    dist.barrier()
    outs = []
    for turn in range(7 if ctx.device.type == "cpu" else 200):
        if ctx.rank == late and turn < 3:
            delay(ctx, 20.0)
        outs.append(call(ctx, case, form, "tile", inputs[turn % 2], " often"))
    for turn, found in enumerate(outs):
        for out, want in zip(found, expected[turn % 2], strict=True):
            assert_near(out, want, num_partials=ctx.world_size)
        assert all(torch.equal(out, first) for out, first in zip(found, outs[turn % 2], strict=True)), "the same bits"


@pytest.mark.parametrize(("form", "number"), [("normed", 0), ("alone", 2), *rare(("alone", 0), ("normed", 2))])
def test_a_late_rank_and_calls_back_to_back(pool: RankPool, form: str, number: int) -> None:
    pool.run(late_and_often, form, number, 1)


def one_rank_does_not_come(ctx: RankContext) -> str:
    """The error of rank 0 while its peers do nothing. After a reset all go on."""
    case = CASES[ctx.device.type][2]
    given = given_to(ctx, case, "alone")
    once: dict[str, Any] = {"name": " alone", "timeout_s": 2.0}
    call(ctx, case, "alone", "tile", given, **once)
    dist.barrier()
    message = ""
    if ctx.rank == 0:
        with pytest.raises(DitronTimeout) as error:
            # On a GPU the next call raises.
            for _ in range(20):
                call(ctx, case, "alone", "tile", given, **once)
                time.sleep(1.0)
        message = str(error.value)
    dist.barrier()
    reset()
    assert_right(ctx, case, "alone", given, call(ctx, case, "alone", "tile", given, **once))
    return message


def test_a_rank_that_does_not_come_is_named(fragile_pool: RankPool) -> None:
    message, *_ = fragile_pool.run(one_rank_does_not_come)
    assert "decode/alone" in message and "rank" in message


def captured(ctx: RankContext, form: str, number: int) -> None:
    case = CASES[ctx.device.type][number]
    given = given_to(ctx, case, form)
    call(ctx, case, form, "tile", given, " captured")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [call(ctx, case, form, "tile", given, " captured") for _ in range(3)]
    for seed in range(1, 4):
        for name, value in given_to(ctx, case, form, seed).items():
            given[name].copy_(value)
        graph.replay()
        for found in outs:
            assert_right(ctx, case, form, given, found)


@pytest.mark.parametrize("number", range(len(CUDA)))
@pytest.mark.parametrize("form", FORMS)
def test_a_replay_takes_other_routing(gpu_pool: RankPool, form: str, number: int) -> None:
    gpu_pool.run(captured, form, number)


def poisoned(ctx: RankContext, form: str, number: int) -> None:
    check_in_poisoned_slots(ctx, ExpertsProblem(ctx, CASES[ctx.device.type][number], form, " poisoned"))


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("form", FORMS)
def test_poisoned_buffers(pool: RankPool, form: str, number: int) -> None:
    pool.run(poisoned, form, number)
