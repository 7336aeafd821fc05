"""The gate of whole-model rows: faults that a comparison of whole outputs lets pass fail the row."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from benchmarks import timing
from benchmarks.models import forms
from benchmarks.models.attention import plain_attention
from benchmarks.models.facts import Fact
from benchmarks.models.gate import LEAST, LEEWAY, MOST, Gate, Parts, distance, named
from benchmarks.models.request import Request
from benchmarks.models.zoo import MODELS, TINY, Cell, Selection, tiny
from tests.cases import rare
from tests.rank_process import RankContext
from tests.ranks import RankPools

FAULTS = (
    *(("prefill ar", fault) for fault in ("zeroed", "queries", "head", "o_proj", "down_proj")),
    *(("prefill sp", fault) for fault in ("zeroed", "queries", "o_proj", "down_proj")),
    *(("prefill cp", fault) for fault in ("zeroed", "queries", "head")),
    *(("decode kv", fault) for fault in ("zeroed", "queries", "cache", "down_proj")),
    *(("training ar", fault) for fault in ("zeroed", "queries", "head", "o_proj", "down_proj")),
)
"""Kinds of cells and what is wrong with a contestant. zeroed: attention is zero. queries: the queries are. head: so is
one head of one token of one rank. cache: half of each rank's cache is not read. o_proj, down_proj: a rank's partial
result of that product is missing in the sum.
"""
PARTIAL = ("o_proj", "down_proj")


@contextlib.contextmanager
def _broken(model: torch.nn.Module, fault: str, rank: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, part in model.named_modules():
            if name.endswith("core") and fault in _CORES:
                wrong = functools.partial(_CORES[fault], part.forward, rank)
                stack.enter_context(mock.patch.object(part, "forward", wrong))
            if fault in PARTIAL and name.endswith(fault) and rank == 1:
                handle = part.register_forward_pre_hook(lambda _, given: tuple(one * 0 for one in given))
                stack.callback(handle.remove)
        if fault == "cache":
            stack.enter_context(mock.patch.object(forms, "attend", functools.partial(_to_half, forms.attend)))
        yield


def _to_half(whole: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Any:
    return whole(q, *(one[:, :, : one.shape[2] // 2] for one in (k, v)), *rest)


def _without_a_head(whole: Callable[..., torch.Tensor], rank: int, *heads: torch.Tensor) -> torch.Tensor:
    found = whole(*heads)
    kept = torch.ones_like(found)
    kept[0, 0, -1] = float(rank != 1)
    return found * kept


_CORES: dict[str, Callable[..., torch.Tensor]] = {
    "zeroed": lambda whole, rank, q, k, v: whole(q, k, v) * 0,
    "queries": lambda whole, rank, q, k, v: whole(q * 0, k, v),
    "head": _without_a_head,
}


def _cells() -> dict[str, Cell]:
    found = {f"{cell.phase} {cell.form}": cell for cell in tiny(Selection(models=("llama3-8b",)).cells())}
    return {kind: replace(cell, layers=2) for kind, cell in found.items()}


def _verdicts(ctx: RankContext, kind: str, faults: list[str]) -> dict[str, tuple[str, bool]]:
    """By fault, what is wrong with the contestant that has it, and whether it would be timed."""
    from benchmarks.models.run import Run

    def compiler(fault: str, model: Any) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            with _broken(model, fault, ctx.rank):
                found = model(*given)
            if fault == "part" and isinstance(model, Parts):
                out, attention, *rest = found
                return out, attention * 0, *rest
            return found

        return call

    found, cell = {}, _cells()[kind]
    request = Request((cell,), "cpu", {"llama3-8b": MODELS["llama3-8b"].like(TINY)})
    eager = {"eager": lambda model: model}
    run = Run(request, ctx.device, time.monotonic(), eager)
    # As on a GPU, with its roundings.
    run.dtype = torch.bfloat16
    model, given = run.model(cell), run.inputs(cell)
    gate = run.gate(cell, model, given)
    assert not gate.of_eager()
    for fault in ["", *faults]:
        run.compilers = eager | {"inductor": functools.partial(compiler, fault)}
        ready: dict[str, Any] = {}
        found[fault] = run.prepare(cell, "inductor", model, given, gate, ready), "inductor" in ready
    return found


@pytest.mark.parametrize("kind", dict.fromkeys(kind for kind, _ in FAULTS))
def test_faults_fail_the_row(kind: str, rank_pools: RankPools) -> None:
    faults = [fault for of, fault in FAULTS if of == kind]
    verdicts = rank_pools.get("cpu", 2).run(_verdicts, kind, faults, timeout=200)[0]
    assert verdicts.pop("") == ("", True), "a contestant without a fault is right"
    assert {fault: timed for fault, (_, timed) in verdicts.items()} == dict.fromkeys(faults, False), verdicts
    assert all("differs from fp32" in why for why, _ in verdicts.values()), verdicts


def test_a_fault_in_one_part_fails_the_row(rank_pools: RankPools) -> None:
    why, timed = rank_pools.get("cpu", 2).run(_verdicts, "prefill ar", ["part"], timeout=200)[0]["part"]
    assert "attention of layer 0 by" in why and "output" not in why and ";" not in why and not timed


def _only_in_replays(ctx: RankContext) -> tuple[str, bool]:
    """What is wrong with a contestant one part of which is not written when it is replayed, and whether it is timed."""
    from benchmarks.models.run import Run

    cell, replays = _cells()["decode ar"], [False]

    def compiler(model: Any) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            found = model(*given)
            if not (replays[0] and isinstance(model, Parts)):
                return found
            out, attention, *rest = found
            return out, attention * 0, *rest

        return call

    def capture(call: Callable[[int], Any]) -> tuple[Any, Any, str]:
        replays[0] = True
        found = call(0)
        replays[0] = False
        return call, found, ""

    request = Request((cell,), "cpu", {"llama3-8b": MODELS["llama3-8b"].like(TINY)})
    run = Run(request, ctx.device, time.monotonic(), {"eager": lambda model: model})
    run.dtype = torch.bfloat16
    model, given = run.model(cell), run.inputs(cell)
    gate = run.gate(cell, model, given)
    run.compilers = {"eager": lambda model: model, "inductor": compiler}
    ready: dict[str, Any] = {}
    with mock.patch.object(run, "captures", lambda cell: True), mock.patch.object(run, "capture", capture):
        return run.prepare(cell, "inductor", model, given, gate, ready), "inductor" in ready


def test_a_fault_in_a_part_of_a_replay_fails_the_row(rank_pools: RankPools) -> None:
    why, timed = rank_pools.get("cpu", 2).run(_only_in_replays, timeout=200)[0]
    assert why.startswith("in a replay: ") and "attention of layer 0 by" in why and not timed


def _only_when_timed(ctx: RankContext, raises: bool) -> tuple[list[tuple[str, float | None]], list[Fact]]:
    """The times of contestants and what is known of them. One is wrong from its second step on, or it raises once it
    was timed, and so does every contestant until the first one's failure has been cleared up.
    """
    from benchmarks.models import run as benchmark
    from benchmarks.models.run import Run

    cell, steps, timed, broken = _cells()["prefill ar"], [0], [False], [True]

    def compiler(name: str, model: Any) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            if isinstance(model, Parts):
                return model(*given)
            if raises and timed[0] and broken[0] and name != "eager":
                raise RuntimeError("the device has failed")
            # A first call, and one that shows that nothing compiles any more, come before the timing.
            steps[0] += name == "inductor"
            return model(*given) * (0.5 if name == "inductor" and not raises and steps[0] > 2 else 1.0)

        return call

    def interleaved(*given: Any) -> Any:
        found = timing.interleaved(*given)
        timed[0] = True
        return found

    def clear_up(name: str) -> None:
        broken[0] = False

    names = ("eager", "inductor", "overlap")
    request = Request((cell,), "cpu", {"llama3-8b": MODELS["llama3-8b"].like(TINY)}, names, rounds=2)
    run = Run(request, ctx.device, time.monotonic(), {name: functools.partial(compiler, name) for name in names})
    with (
        mock.patch.object(benchmark, "STEPS", 1),
        mock.patch.object(benchmark, "interleaved", interleaved),
        mock.patch.object(run, "after_failure", clear_up),
    ):
        run.run()
    assert timed[0]
    return [(row.contestant, row.p50_us) for row in run.rows], run.facts


@pytest.mark.parametrize("raises", [False, *rare(True)], ids=["wrong", "raises"])
def test_a_fault_that_comes_with_the_timing_fails_the_row(raises: bool, rank_pools: RankPools) -> None:
    rows, facts = rank_pools.get("cpu", 2).run(_only_when_timed, raises, timeout=200)[0]
    us = dict(rows)
    assert us["eager"] and us["overlap"] and us["inductor"] is None, rows
    assert [fact.contestant for fact in facts] == ["eager", "inductor", "overlap"], "one of each, as tables take them"
    why = "RuntimeError: the device has failed" if raises else "differs from fp64: output by"
    assert facts[1].why.startswith(f"after the timing: rank 0: {why}") and facts[1].compile_s, facts[1]
    assert not facts[0].why and not facts[2].why


def _fused(ctx: RankContext, cell: Cell) -> list[str]:
    """What Ditron fuses in the program that is timed, and in the one that returns the parts."""
    from benchmarks.models.contestants import in_form
    from benchmarks.models.run import sites_text
    from ditron_inductor.report.explain import without_caches
    from ditron_inductor.task.site_records import collect_sites
    from tests.models.interpreted import interpreted

    def ditron(model: Any) -> Callable[..., Any]:
        backend = interpreted({"ditron.strategy": "library"})
        return torch.compile(model, backend=backend, fullgraph=True, dynamic=False)

    arch, found = MODELS[cell.model].like(TINY), []
    model = forms.build(arch, cell, init_device_mesh("cpu", (ctx.world_size,)))
    given = forms.inputs(arch, cell, ctx.rank, ctx.world_size, ctx.device, torch.float32)
    for program in (model, Parts(model)):
        torch._dynamo.reset()
        with without_caches(), collect_sites() as sink, torch.no_grad():
            in_form("ditron", ditron, program)(*given)
        found.append(sites_text(sink))
    return found


@pytest.mark.parametrize("kind", rare("prefill sp", "decode ar", "decode kv"))
def test_the_parts_are_of_the_program_that_is_timed(kind: str, rank_pools: RankPools) -> None:
    """Of two layers; `test_runs_on_the_cpu_device` of test_model_benchmarks.py has one, in two of these kinds."""
    timed, with_parts = rank_pools.get("cpu", 2).run(_fused, _cells()[kind], timeout=200)[0]
    assert timed == with_parts and "left alone" not in timed


@pytest.mark.parametrize("model", MODELS)
def test_attention_has_weight(model: str) -> None:
    """In the output too: of the program that is timed nothing else is seen."""
    arch, cell = MODELS[model].like(replace(TINY, hidden=128, head_dim=32)), Cell(model, 2, "ar", "prefill", 1, 256)
    layers = forms.decoder(arch, cell, 1, 0, forms.ContextAttention, forms.ShardedCache)
    given, wrong = forms.inputs(arch, cell, 0, 1, torch.device("cpu"), torch.float32), []
    with torch.no_grad():
        wanted = layers(*given)
        for fault in ("zeroed", "queries"):
            with _broken(layers, fault, 0):
                wrong.append(float((layers(*given) - wanted).norm() / wanted.norm()))
    assert min(wrong) > 0.1, wrong


@pytest.mark.parametrize("first", [None, 0, 3])
def test_plain_attention_is_torch_s(first: int | None) -> None:
    q, k, v = (torch.randn(2, heads, 5, 8, dtype=torch.float64) for heads in (4, 2, 2))
    queries = q[:, :, : 5 - (first or 0)]
    seen = None if first is None else torch.ones(5, 5, dtype=torch.bool).tril()[first:]
    wanted = F.scaled_dot_product_attention(queries, k, v, attn_mask=seen, scale=0.3, enable_gqa=True)
    with mock.patch("benchmarks.models.attention.QUERIES", 2):
        torch.testing.assert_close(plain_attention(queries, k, v, 0.3, first), wanted)


def test_the_worst_row_counts() -> None:
    wanted = torch.ones(100, 4)
    got = wanted.clone()
    got[7] = 0
    assert distance(got, wanted) == pytest.approx(1.0) and distance(wanted, wanted) == 0.0
    assert distance(got, wanted * 0, floor=2.0) == pytest.approx(1.0)
    got[7, 0] = float("nan")
    assert distance(got, wanted) == float("inf")


def test_what_a_layer_adds_is_a_part() -> None:
    x = torch.ones(1, 2)
    found = named(x, [x, x + 2, x + 5, x, x + 5, x + 6])
    assert found["attention's sum of layer 0"].tolist() == [[2.0, 2.0]]
    assert found["feed-forward's sum of layer 0"].tolist() == [[3.0, 3.0]]
    assert found["attention's sum of layer 1"].tolist() == [[0.0, 0.0]]
    assert found["residual of layer 1"].tolist() == [[7.0, 7.0]] and found["residual of layer 1"].dtype == torch.float64


def _gate(off: float, of_peer: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> Gate:
    wanted = {"output": torch.ones(4, 4), "gradient of w": torch.ones(4, 4), "gradient of b": torch.zeros(4)}
    eager = {name: value + off for name, value in wanted.items()}
    return Gate(wanted, eager, dtype, lambda mine: [mine, {name: of_peer for name in mine}])


def test_tolerances_come_from_eager_s_distance() -> None:
    assert _gate(0.01).tolerance("output") == pytest.approx(LEEWAY * 0.01, rel=1e-4)
    assert _gate(0.01, 0.02).tolerance("output") == pytest.approx(LEEWAY * 0.02), "the worst rank's"
    assert _gate(0.0).tolerance("output") == LEAST * torch.finfo(torch.bfloat16).eps
    assert _gate(0.4).tolerance("output") == MOST[torch.bfloat16]
    assert _gate(0.4).tolerance("gradient of b") > 1.0, "it vanishes"
    gate = _gate(0.01)
    right = {name: value + 0.03 for name, value in gate.wanted.items()}
    assert gate.problem(right) == ""
    assert "output by 5.0e-02" in gate.problem(right | {"output": torch.full((4, 4), 1.05)})


def test_eager_mode_has_to_be_right_itself() -> None:
    assert _gate(0.3).of_eager() == ""
    assert _gate(0.6).of_eager() == "differs from fp32: output by 6.0e-01"
