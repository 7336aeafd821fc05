"""Each benchmark of one op runs once, at toy size, on ranks of the CPU device: that it works, nothing about speed."""

from __future__ import annotations

import dataclasses
import importlib
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.ops import all_gather_attention, attention_reduce_scatter, chains, gather_norm, swiglu
from benchmarks.ops.biases import BIASES
from benchmarks.records import Row, read_csv
from tests.cases import rare
from tests.models.interpreted import code_generated
from tests.rank_process import RankContext
from tests.ranks import RankPools

TOY = ["--m", "16", "--models", "llama-8b", "--device", "cpu", "--rounds", "2", "--shrink", "128"]
OURS = {"ditron", "ditron:tile", "ditron:library"}


def _measure(ctx: RankContext, module: str, request: Any, generated: bool) -> Any:
    from benchmarks.session import Session

    with code_generated(generated):
        return importlib.import_module(module).measure(Session(ctx.device, time.monotonic()), request)


def _run(rank_pools: RankPools, module: str, request: Any, generated: bool = True) -> Any:
    """The rows of a run. generated: with Inductor's own code where it compiles."""
    return rank_pools.get("cpu", 2).run(_measure, module, request, generated, timeout=90)[0]


def _tiny(module: str) -> Any:
    """A request for the set `tiny`, as the command makes it."""
    benchmark = importlib.import_module(module)
    return benchmark.request_of(benchmark.parser().parse_args(["--shapes", "tiny", "--device", "cpu", "--rounds", "2"]))


def test_all_reduce_rms_norm(rank_pools: RankPools) -> None:
    rows = _run(rank_pools, "benchmarks.ops.all_reduce_rms_norm", _tiny("benchmarks.ops.all_reduce_rms_norm"))
    alone = {row.contestant for row in rows if row.op == "all_reduce_rms_norm"}
    behind = {row.contestant for row in rows if row.op == "matmul_all_reduce_rms_norm"}
    assert alone == OURS | {"gloo", "one_shot_norm"} and behind == alone | {"ditron:split", "ditron:chunked"}
    assert all(row.p50_us for row in rows)


def test_cached_attention(rank_pools: RankPools) -> None:
    module = "benchmarks.ops.cached_attention"
    tiny = ["--device", "cpu", "--shapes", "tiny", "--rounds", "2", "--out", "", "--commit", "0"]
    rows = _run(rank_pools, module, importlib.import_module(module).parser().parse_args(tiny))
    assert {row.contestant for row in rows} == {"inductor", "repeated", "ditron", "ditron:mask"}
    assert all(row.p50_us for row in rows)


@pytest.mark.parametrize(("form", "rival"), [("index", "embedding_bag"), ("scatter", "deterministic")])
def test_combine_experts(rank_pools: RankPools, form: str, rival: str) -> None:
    module = "benchmarks.ops.combine_experts"
    tiny = ["--device", "cpu", "--models", "tiny", "--tokens", "6", "--rounds", "2", "--out", "", "--commit", "0"]
    rows = _run(rank_pools, module, importlib.import_module(module).parser().parse_args([*tiny, "--form", form]))
    wanted = {"inductor", "max_autotune", rival, "ditron"}
    assert {row.contestant for row in rows} == wanted and all(row.p50_us for row in rows)


@pytest.mark.parametrize("more", [["tiny-biased"], *rare(["tiny", "--scatter"], ["tiny", "--second"])], ids=str)
def test_reduced_experts(rank_pools: RankPools, more: list[str]) -> None:
    module = "benchmarks.ops.reduced_experts"
    tiny = ["--device", "cpu", "--tokens", "18", "--rounds", "2", "--out", "", "--commit", "0", "--models"]
    request = importlib.import_module(module).parser().parse_args([*tiny, *more])
    rows = _run(rank_pools, module, request, generated="--scatter" in more)
    wanted = {"gemm", "inductor", "max_autotune", "ditron", "ditron:library", "ditron:tile"}
    assert {row.contestant for row in rows} == wanted and all(row.p50_us for row in rows)


def test_grouped_projections(rank_pools: RankPools) -> None:
    module = "benchmarks.ops.grouped_projections"
    tiny = ["--device", "cpu", "--models", "tiny", "--tokens", "66", "--rounds", "2", "--out", "", "--commit", "0"]
    rows = _run(rank_pools, module, importlib.import_module(module).parser().parse_args(tiny))
    wanted = {"gemm", "inductor", "max_autotune", "ditron", "ditron:product"}
    assert {row.contestant for row in rows} == wanted and all(row.p50_us for row in rows)


def test_projections(rank_pools: RankPools) -> None:
    module = "benchmarks.ops.projections"
    tiny = ["--device", "cpu", "--models", "tiny", "--ranks", "2", "--rows", "3", "--rounds", "2", "--out", ""]
    tiny += ["--parts", "attention", "mlp", "output"]
    options = importlib.import_module(module).parser().parse_args([*tiny, "--commit", "0"])
    rows = _run(rank_pools, module, options)
    assert {row.shape for row in rows} == {"M=3;N=32+16+16;K=64", "M=3;N=48+48;K=64", "M=3;N=64;K=32"}
    wanted = {"inductor", "max_autotune", "concatenated", "ditron"}
    assert {row.contestant for row in rows} == wanted and all(row.p50_us for row in rows)


def test_routing(rank_pools: RankPools) -> None:
    module = "benchmarks.ops.routing"
    few = ["--device", "cpu", "--models", "mixtral-8x7b", "deepseek-v3", "--tokens", "3", "--rounds", "2", "--out", ""]
    rows = _run(rank_pools, module, importlib.import_module(module).parser().parse_args([*few, "--commit", "0"]))
    assert {row.shape.split(";")[1] for row in rows} == {"E=8", "E=256"}
    assert {row.contestant for row in rows} == {"inductor", "ditron"} and all(row.p50_us for row in rows)
    options = importlib.import_module(module).parser().parse_args([*few, "--commit", "0", "--products"])
    of_mixtral = [row for row in _run(rank_pools, module, options) if row.sizes["E"] == "8"]
    assert {row.contestant for row in of_mixtral if row.p50_us} == {"inductor", "ditron", "ditron:choose"}
    assert {row.op for row in of_mixtral} == {"router"}


@pytest.mark.all_cases
@pytest.mark.parametrize(("model", "routing"), [("tiny", "skewed"), ("tiny-biased", "uniform")])
def test_gathered_experts(rank_pools: RankPools, model: str, routing: str) -> None:
    module = "benchmarks.ops.gathered_experts"
    tiny = ["--device", "cpu", "--models", model, "--tokens", "2048", "--batches", "2", "--rounds", "2", "--out", ""]
    options = importlib.import_module(module).parser().parse_args([*tiny, "--commit", "0", "--routing", routing])
    rows = _run(rank_pools, module, options)
    assert all((row.sizes.get("routing") == "skewed") == (routing == "skewed") for row in rows)
    wanted = {"gemm", "inductor", "ditron"}
    assert {row.contestant for row in rows} == wanted and all(row.p50_us for row in rows)


def test_summed_experts(rank_pools: RankPools) -> None:
    module = "benchmarks.ops.summed_experts"
    tiny = ["--device", "cpu", "--models", "tiny", "--tokens", "3", "--rounds", "2", "--out", "", "--commit", "0"]
    rows = _run(rank_pools, module, importlib.import_module(module).parser().parse_args(tiny), generated=False)
    assert {row.contestant for row in rows} == OURS | {"gloo", "ditron:apart"} and all(row.p50_us for row in rows)


def test_flash_decode(rank_pools: RankPools) -> None:
    rows = _run(rank_pools, "benchmarks.ops.flash_decode", _tiny("benchmarks.ops.flash_decode"))
    assert {row.contestant for row in rows} == OURS | {"gloo"} and all(row.p50_us for row in rows)


def test_all_gather_attention(rank_pools: RankPools) -> None:
    rows = _run(rank_pools, "benchmarks.ops.all_gather_attention", _tiny("benchmarks.ops.all_gather_attention"))
    wanted = OURS | {"ditron:chunked", "local", "sdpa", "sdpa:blocks"}
    assert {row.sizes["mask"] for row in rows} == {"causal_offset", "zigzag", "given"}
    assert {row.contestant for row in rows} == wanted and all(row.p50_us for row in rows)
    biased = [row for row in rows if "bias" in row.sizes]
    # A `tile` kernel takes no bias.
    assert {row.contestant for row in biased} == wanted - {"ditron:tile"}
    assert {row.sizes["bias"] for row in biased} == {"alibi"}


@pytest.mark.parametrize("rank", [0, 1])
def test_biases_hide_what_is_ahead(rank: int) -> None:
    """And documents hide each other: of 16 tokens, 4 in each."""
    given = rank, 8, 16, 2, torch.device("cpu")
    seen = BIASES["documents"](*given)
    slopes = BIASES["alibi"](*given)
    assert seen.shape == (1, 1, 8, 16) and slopes.shape == (1, 2, 8, 16)
    for row in range(8):
        place = 8 * rank + row
        assert seen[0, 0, row].nonzero().flatten().tolist() == list(range(place // 4 * 4, place + 1))
        assert slopes[0, :, row].isfinite().sum(-1).tolist() == [place + 1] * 2 and slopes[0, 0, row, place] == 0.0
        assert place == 0 or slopes[0, :, row, place - 1].tolist() == [-(2.0**-4), -(2.0**-8)]


@pytest.mark.all_cases
def test_attention_reduce_scatter(rank_pools: RankPools) -> None:
    rows = _run(rank_pools, attention_reduce_scatter.MODULE, _tiny(attention_reduce_scatter.MODULE))
    wanted = {"ditron", "local", "sdpa", "sdpa:blocks"}
    assert {row.op for row in rows} == {"attention_reduce_scatter"}
    assert {row.sizes["mask"] for row in rows} == {"causal_offset", "zigzag", "given"}
    assert {row.contestant for row in rows} == wanted and all(row.p50_us for row in rows)
    assert attention_reduce_scatter.verdict(rows).startswith("sdpa/ditron ")


def test_a_bias_has_the_keys_of_all_ranks() -> None:
    """Also where the tokens do not divide."""
    for cell in (cell for cell in all_gather_attention.SETS["tiny"]() if cell.bias):
        bias = cell.bias_of(2, 3, torch.device("cpu"))
        assert bias is not None and bias.shape[2:] == (21, 63)


def test_a_wrong_gradient_is_not_timed() -> None:
    cell = attention_reduce_scatter.Cell(tokens=16, heads=4, key_heads=2, head_dim=8)
    right = [torch.randn(1, heads, 8, 8).bfloat16() for heads in (4, 2, 2)]
    rows = torch.tensor([0, 3, 7])
    expected = tuple(one[:, :, rows].float() for one in right)
    problem = attention_reduce_scatter.Problem(cell, (right[0],) * 6, None, rows, expected)
    problem.check(right)
    # `local` has the first one alone.
    problem.check(right[:1])
    for place, name in enumerate("qkv"):
        wrong = [one.clone() for one in right]
        wrong[place][:, 0, 3] *= -1
        with pytest.raises(AssertionError, match=f"the gradient of {name} is off"):
            problem.check(wrong)


def test_verdict_of_the_backward() -> None:
    def verdict(**us: float) -> str:
        times = {name: (1.0, each, 1.0, 0.0, 90.0) for name, each in us.items()}
        where = ("tokens=8", "bfloat16", 2, 0)
        rows = [Row("attention", "-", name, *where, *each, *["-"] * 5) for name, each in times.items()]
        return attention_reduce_scatter.verdict(rows)

    assert verdict(sdpa=100.0, ditron=101.0) == "sdpa/ditron 0.99, limit/ditron 0.89 PASS"
    assert verdict(sdpa=100.0, ditron=103.0) == "sdpa/ditron 0.97, limit/ditron 0.87 FAIL"
    assert verdict(ditron=100.0) == ""


@pytest.mark.parametrize("chain", [swiglu, gather_norm])
def test_chains(rank_pools: RankPools, chain: Any, tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    rows = _run(rank_pools, chain.MODULE, chain.parser().parse_args([*TOY, "--out", str(out), "--commit", "c"]))
    assert {row.contestant for row in rows} == {"gemm", "gloo", "ditron:split", "ditron", "ditron:library"}
    assert all(row.p50_us for row in rows)
    # What is written is all of a cell.
    assert read_csv(out) == [dataclasses.replace(row, **_as_written(row)) for row in rows]


def _as_written(row: Row) -> dict[str, float]:
    """The times of a row, as many digits as a file has."""
    times = {name: getattr(row, name) for name in ("p20_us", "p50_us", "p80_us", "skew_pct")}
    return {name: float(f"{us:.2f}") for name, us in times.items()}


def test_a_wrong_chain_is_not_timed(rank_pools: RankPools) -> None:
    assert rank_pools.get("cpu", 2).run(_right_names, timeout=90)[0] == ["gemm", "gloo", "right"]


def _right_names(ctx: RankContext) -> list[str]:
    from benchmarks.session import Session

    x = torch.ones(4)
    calls: dict[str, chains.Call] = {name: lambda i: [x] for name in ("gemm", "gloo", "right")}
    calls["wrong"] = lambda i: [x + ctx.rank]
    chain = chains.Chain("swiglu", "M=4", 4, 1, calls, "site")
    return list(chains.right_calls(Session(ctx.device, time.monotonic()), chain))
