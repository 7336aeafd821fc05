"""The benchmark of whole models: its cells, its tables and page, ranks that die, and a run on the CPU device."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.models import charts, pages
from benchmarks.models.__main__ import listing, main, parser, request_of
from benchmarks.models.experts import Experts
from benchmarks.models.facts import ALL, Fact, merge_facts, path_of, read_facts
from benchmarks.models.request import Barred, Request
from benchmarks.models.summary import phases_part, readme_part
from benchmarks.models.supervise import after_failure, supervise
from benchmarks.models.tables import (
    contests,
    limits_part,
    newest_contests,
    newest_shown,
    report,
    targets,
    times_table,
)
from benchmarks.models.zoo import DECODES, FORMS, MODELS, PHASES, PREFILLS, QUICK, TINY, Cell, Selection, tiny
from benchmarks.records import Row, merge_csv, newest, read_csv
from benchmarks.session import tried_text
from ditron_inductor.task.dtypes import PRECISIONS
from ditron_inductor.task.plan import PlanRequest
from ditron_inductor.task.problem import Problem
from ditron_inductor.task.trial import Times
from tests.rank_process import RankContext
from tests.ranks import RankPools


def test_cells_of_a_model() -> None:
    found = Selection(models=("qwen3-32b",), phases=("prefill", "decode"), full=True).cells()
    assert len(found) == 2 * len(PREFILLS) + len(DECODES)
    assert {cell.form for cell in found if cell.graph} == {"ar"}
    tokens = [cell.batch * cell.tokens for cell in found if cell.phase == "prefill"]
    assert min(tokens) == 512 and max(tokens) == 32768
    assert {1, 128} <= {cell.batch for cell in found if cell.phase == "decode"}
    of_eight = Selection(models=("llama3-70b",), forms=("ar",), phases=("decode",), batches=(8,))
    assert [cell.batch for cell in of_eight.cells()] == [8]


def test_skewed_routing_has_popular_experts() -> None:
    def largest(model: str) -> float:
        arch = MODELS[model]
        torch.manual_seed(0)
        scores = Experts(16, 8, arch.experts, arch.top_k, skew=arch.skew).scores
        assert scores is not None
        counts = scores[:4096].topk(arch.top_k).indices.flatten().bincount(minlength=arch.experts)
        return float(counts.max() / counts.sum() * arch.experts)

    for name in ("mixtral-8x7b", "qwen3-30b-a3b"):
        assert largest(name) < 1.2 and largest(f"{name}-skewed") > 2.0


def test_every_kind_of_cell_comes_before_further_sizes() -> None:
    cells = Selection().cells()
    kinds = {(cell.model, cell.phase, cell.form) for cell in cells}
    assert {(cell.model, cell.phase, cell.form) for cell in cells[: len(kinds)]} == kinds
    assert {model for model, _, _ in kinds} == set(MODELS) and {form for _, _, form in kinds} == set(FORMS)


def test_only_complete_runs_on_gpus_go_into_the_results() -> None:
    assert request_of(parser().parse_args([])).out.endswith("models.csv")
    assert request_of(parser().parse_args(["--contestants", "eager", "ditron"])).out == ""
    on_cpu = request_of(parser().parse_args(["--device", "cpu"]))
    assert on_cpu.out == "" and "async_tp" not in on_cpu.contestants
    assert {cell.layers for cell in on_cpu.cells} == {1}
    assert all(one.hidden == TINY.hidden for one in on_cpu.architectures.values())


def test_quick_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    quick = request_of(parser().parse_args(["--quick"]))
    assert len(quick.cells) == len(QUICK) and quick.budget_s < 240
    assert {cell.phase for cell in quick.cells} == {"prefill", "decode", "training"}
    assert main(["--quick", "--phases", "decode", "--world", "2", "--list"]) == 0
    assert "decode llama3-8b x 2 layers, kv, 1 x 1, cache 65536" in capsys.readouterr().out
    seconds = int(re.findall(r"about (\d+) s;", listing(quick, 2))[0])
    assert 30 < seconds < 240


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rounds", "1"]) == 2 and "1 is less than 2" in capsys.readouterr().err
    assert main(["--batches", "3"]) == 2 and "no cell has" in capsys.readouterr().err
    assert main(["--config", "/nowhere"]) == 2 and "--config" in capsys.readouterr().err


def row(contestant: str, p50_us: float | None, op: str = "prefill", **changed: Any) -> Row:
    cell = Cell(**{"model": "llama3-8b", "layers": 4, "form": "sp", "phase": op, "batch": 1, "tokens": 2048, **changed})
    times = (p50_us and 0.99 * p50_us, p50_us, p50_us and 1.01 * p50_us, None, None)
    return Row("models", op, contestant, cell.shape, "bfloat16", 2, int(cell.graph), *times, "gpu", "t", "t", "c", "d")


def fact(of: Row, compile_s: float | None = None, why: str = "", contestant: str = "") -> Fact:
    place = (of.op, of.shape, of.dtype, of.world, of.graph, of.gpu, contestant or of.contestant)
    return Fact(*place, compile_s, None, None, "", why, of.commit, of.date)


ROWS = [row("eager", 9000.0), row("inductor", 3000.0), row("async_tp", None), row("ditron", 2000.0)]


def test_the_table_compares_with_the_best_of_the_others() -> None:
    line = times_table(ROWS).splitlines()[-1].split()
    assert line[-8:] == ["1.50", "9.000", "3.000", "failed", "2.000", "-", "2.0", "c"]
    level = [*ROWS[:3], replace(ROWS[3], p80_us=2990.0)]
    assert times_table(level).splitlines()[-1].split()[-9:-6] == ["1.50", "~", "9.000"], "the samples overlap"


def test_a_gain_never_grows_because_a_rival_was_left_out() -> None:
    def run(commit: str, **times: float) -> list[Row]:
        return [replace(row(name, us), commit=commit) for name, us in times.items()]

    old = run("old", inductor=100.0, max_autotune=80.0, ditron=60.0)
    rivals = [one.best_gain for one in contests([*old, *run("new", inductor=99.0, symm_mem=95.0, ditron=58.0)])]
    assert rivals == [80.0 / 60.0]
    assert {one.commit for one in newest_shown([*old, *run("new", inductor=99.0, ditron=58.0)])} == {"old"}
    # The rival that is missing was not the best one, or one that ran is better over Inductor; or it ran again since.
    for new in (
        run("new", inductor=99.0, symm_mem=70.0, ditron=58.0),
        run("new", inductor=99.0, max_autotune=90.0, ditron=58.0),
    ):
        assert {one.commit for one in newest_shown([*old, *new])} == {"new"}
    third = run("third", inductor=98.0, max_autotune=90.0, ditron=57.0)
    fourth = run("fourth", inductor=98.0, symm_mem=70.0, ditron=57.0)
    assert {one.commit for one in newest_shown([*old, *third, *fourth])} == {"fourth"}
    assert [one.rows[0].commit for one in newest_contests([*old, *run("new", inductor=99.0, ditron=58.0)])] == ["new"]


def test_how_much_of_what_there_is_to_gain() -> None:
    limited = [replace(one, limit_us=1500.0) for one in ROWS]
    assert times_table(limited).splitlines()[-1].split()[-3] == "1.500"
    later = [replace(one, commit="later", p50_us=1000.0) for one in ROWS]
    others = [row("inductor", 9.0, batch=2), row("ditron", 1.0, batch=2)]
    line = limits_part([*limited, *others, *later]).splitlines()[-1]
    assert line.replace(" ", "") == "|prefill|llama3-8b|2|1|1.50|2.00|0.75|"


def test_targets() -> None:
    decode = [row("inductor", 1400.0, "decode", tokens=1), row("ditron", 1000.0, "decode", tokens=1)]
    facts = [fact(ROWS[1], 10.0), fact(ROWS[3], 13.0)]
    found = {one.text.split(",")[0]: one.verdict for one in targets([*ROWS, *decode], facts)}
    assert found["decode of 8B"] == "PASS 1.400" and found["decode of 70B"] == "not measured"
    assert found["first call"] == "FAIL 1.300" and found["better of Inductor and async TP / Ditron"] == "PASS 1.400"


def test_prefill_in_graphs_is_a_phase_of_its_own() -> None:
    captured = [replace(one, graph=1) for one in (row("inductor", 1300.0), row("ditron", 1000.0))]
    found = [one.verdict for one in targets([*ROWS, *captured], [])]
    assert found[:3] == ["PASS 1.500", "PASS 1.300", "not measured"]
    (chart,) = charts.charts(captured)
    assert charts.png_path(Path("models.csv"), chart).name == "models_prefill_in_cuda_graphs_2xgpu.png"
    assert times_table(captured).splitlines()[-1].startswith("prefill in CUDA graphs")
    assert "| prefill, CUDA graphs | 2x" in phases_part(captured, [])
    assert "Inside CUDA graphs: 1 of prefill." in readme_part([*captured, *ROWS], [])


def test_rivals_that_copy_weights_of_experts_are_in_no_mean_of_the_best() -> None:
    decode = {"op": "decode", "model": "gpt-oss-120b", "form": "ar", "layers": 2, "tokens": 1}
    weak = [row(name, us, batch=32, **decode) for name, us in (("ditron", 100.0), ("inductor", 400.0))]
    strong = [row(name, us, **decode) for name, us in (("ditron", 100.0), ("inductor", 200.0), ("fused", 120.0))]
    assert "| -                     | 4.00 " in phases_part(weak, [])
    both = phases_part([*weak, *strong], [])
    assert "| 1.20                  | 2.83 " in both and "In 1 decode cell of experts no rival ran" in both
    assert "no rival ran" not in phases_part(strong, [])


def test_a_page_needs_nothing_else_and_says_why_a_number_is_missing(tmp_path: Path) -> None:
    why = "differs from eager: <output> by 3.0e-01"
    results = tmp_path / "models.csv"
    merge_csv(results, ROWS)
    skipped = replace(fact(row("eager", None, tokens=512), why="skipped: no time left"), contestant=ALL)
    merge_facts(path_of(results), [fact(ROWS[2], why=why), fact(ROWS[3], 4.0), skipped])
    text = pages.page(read_csv(results), read_facts(path_of(results)))
    assert not re.findall(r"(?:src|href)=|https?://|@import|url\(", text)
    assert "differs from eager: &lt;output&gt;" in text and "<output>" not in text
    assert "1 x 512: all: skipped: no time left" in text
    assert "<svg" in text and ">failed</td>" in text and "a dense approximation" in text
    assert why in report(ROWS, read_facts(path_of(results)))


def test_rows_that_were_measured_elsewhere_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, other = tmp_path / "models.csv", tmp_path / "other.csv"
    merge_csv(results, [row("ditron", 1.0)])
    merge_csv(other, ROWS)
    merge_facts(path_of(other), [fact(ROWS[3], 4.0)])
    assert main(["--out", str(results), "--merge", str(other)]) == 0
    assert read_csv(results)[0].p50_us == 1.0 and sorted(newest(read_csv(results)), key=str) == sorted(ROWS, key=str)
    assert read_facts(path_of(results)) == [fact(ROWS[3], 4.0)]
    assert "models.html" in capsys.readouterr().out and (tmp_path / "models.html").exists()
    assert main(["--out", str(results), "--merge", str(tmp_path / "none.csv")]) == 2


def test_bars_are_over_the_best_rival(tmp_path: Path) -> None:
    (chart,) = charts.charts(ROWS)
    assert chart.bars == (charts.Bars("llama3-8b, sp, 1 x 2048", (("inductor", 1.0), ("ditron", 1.5))),)
    assert charts.charts([row("ditron", 1.0)]) == []
    pytest.importorskip("matplotlib", reason="pictures need the extra 'bench'")
    charts.png(chart, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_a_skipped_cell_keeps_what_is_known(tmp_path: Path) -> None:
    path = tmp_path / "facts.csv"
    measured, skipped = fact(ROWS[3], 4.0), replace(fact(ROWS[3], why="skipped"), contestant=ALL)
    merge_facts(path, [skipped])
    assert read_facts(path) == [skipped]
    merge_facts(path, [measured])
    merge_facts(path, [skipped])
    assert read_facts(path) == [measured]
    again = replace(measured, compile_s=5.0)
    merge_facts(path, [again])
    assert read_facts(path) == [measured, again] and newest(read_facts(path)) == [again]


REQUEST = Request(cells=tuple(Selection().cells()), device="cuda")


def test_what_ended_the_ranks_is_left_out() -> None:
    assert after_failure(REQUEST, "") is None
    again = after_failure(REQUEST, '[0, ""]\n[3, "inductor"]\n[3, "async_tp"]\n')
    assert again is not None and again.first == 3
    assert [(one.cell, one.contestant) for one in again.barred] == [(3, "async_tp")]
    twice = after_failure(again, '[4, "async_tp"]\n')
    assert twice is not None and (twice.barred[-1].cell, twice.barred[-1].contestant) == (None, "async_tp")
    limit = after_failure(REQUEST, '[3, "limit"]\n')
    assert limit is not None and [(one.cell, one.contestant) for one in limit.barred] == [(3, "limit")]
    for alone in ("", "timing", "eager"):
        again = after_failure(REQUEST, json.dumps([5, alone]))
        assert again is not None and [(one.cell, one.contestant) for one in again.barred] == [(5, "")]
    assert after_failure(REQUEST, json.dumps([len(REQUEST.cells), ""])) is None


def test_ranks_that_die_are_started_again() -> None:
    seen: list[Request] = []

    def start(module: str, request: Request, world_size: int) -> int:
        seen.append(request)
        Path(request.journal).write_text(json.dumps([7, "ditron" if len(seen) == 1 else "timing"]))
        return int(len(seen) < 3)

    assert supervise(REQUEST, 2, start) == 0
    assert [request.first for request in seen] == [0, 7, 7]
    assert [(one.cell, one.contestant) for one in seen[2].barred] == [(7, "ditron"), (7, "")]
    assert supervise(replace(REQUEST, budget_s=1.0), 2, lambda *given: 1) == 1


RUN = {"prefill sp": "opt-30b", "training ar": "gemma3-27b", "decode kv": "llama3-8b"}
"""Kinds of cells and models. A compilation takes seconds, that of a training step most: it has none here."""


def _run(ctx: RankContext, request: Request) -> tuple[list[Row], list[Fact], list[Row], set[str], list[str]]:
    """Rows, facts, the rows of a second run, the phases with a limit, and what is fused in programs of parts."""
    import time

    import torch

    from benchmarks.models.gate import Parts
    from benchmarks.models.run import Run, sites_text
    from ditron_inductor.task import trial
    from ditron_inductor.task.site_records import collect_sites
    from tests.models.interpreted import interpreted

    def ditron(model: Any) -> Callable[..., Any]:
        backend = interpreted({"ditron.strategy": "library"})
        return torch.compile(model, backend=backend, fullgraph=True, dynamic=False)

    def wrong(model: Any) -> Callable[..., Any]:
        return lambda *given: model(*given) * 1.001

    def broken(model: Any) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            raise RuntimeError("no kernel for this")

        return call

    steps: list[int] = []
    of_parts: list[str] = []

    def trying(model: Any) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            steps.append(len(steps))
            if not isinstance(model, Parts):
                return compiled(*given)
            with collect_sites() as sink:
                found = compiled(*given)
            of_parts.append(sites_text(sink))
            return found

        compiled = ditron(model)
        return call

    compilers = {"eager": lambda model: model, "ditron": trying, "inductor": wrong, "async_tp": broken}
    compilers["ditron:planned"] = lambda model: model
    run = Run(request, ctx.device, time.monotonic(), compilers)
    # What is timed is not looked at.
    with mock.patch("benchmarks.models.run.STEPS", 1):
        run.run()
    assert len(steps) > trial.ALL_CALLS * (len(request.cells) - 1), "trials end before anything is timed"
    again = Run(replace(request, missing=True, limit=False), ctx.device, time.monotonic(), compilers)
    again.run()
    # What has no limit yet is missing where that is wanted.
    again.request = replace(again.request, limit=True)
    limited = {op for op, _ in again._present()}
    return run.rows, run.facts, again.rows, limited, of_parts


def test_runs_on_the_cpu_device(rank_pools: RankPools, tmp_path: Path) -> None:
    cells = {f"{cell.phase} {cell.form}": cell for cell in tiny(Selection(models=("llama3-8b",)).cells())}
    chosen = tuple(replace(cells[kind], model=model) for kind, model in RUN.items())
    architectures = {name: one.like(TINY) for name, one in MODELS.items()}
    barred = tuple(Barred(number, name, "the ranks ended in it") for number, name in ((1, "ditron"), (0, "limit")))
    out = str(tmp_path / "models.csv")
    names = ("eager", "inductor", "async_tp", "ditron", "ditron:planned")
    request = Request(chosen, "cpu", architectures, names, rounds=2, out=out, barred=barred, limit=True)
    rows, facts, again, present, of_parts = rank_pools.get("cpu", 2).run(_run, request, timeout=200)[0]
    assert again == [], "cells that the results have were measured again"
    written = read_csv(Path(request.out))
    assert {row.contestant for row in written} == set(names), rows
    limited = {cell.phase for cell in chosen} - {chosen[0].phase}
    assert {row.op for row in written if row.limit_us} == limited == present, [
        row for row in facts if row.contestant == "limit"
    ]
    reasons = {(fact.op, fact.contestant): fact.why for fact in facts}
    of_limit = {op: why for (op, contestant), why in reasons.items() if contestant == "limit"}
    assert of_limit == {chosen[0].phase: "the ranks ended in it"}, reasons
    right = {(fact.op, fact.contestant) for fact in facts if not fact.why}
    always = {(op, name) for op in PHASES for name in ("eager", "ditron:planned")}
    assert right == always | {("prefill", "ditron"), ("decode", "ditron")}, reasons
    assert {(row.op, row.contestant) for row in rows if row.p50_us} == right
    for phase in ("prefill", "training"):
        assert re.search(r"rank 0: differs from fp64: output by [1-9]\.\de-03, eager by", reasons[phase, "inductor"])
    assert "input's gradient by" in reasons["training", "inductor"]
    assert reasons["prefill", "async_tp"] == "rank 0: RuntimeError: no kernel for this"
    assert reasons["training", "ditron"] == "the ranks ended in it"
    assert "this form has none" in reasons["decode", "async_tp"]
    fused = {fact.op: fact.fused for fact in facts if fact.contestant == "ditron"}
    assert "all_gather_matmul" in fused["prefill"] and "flash_decode" in fused["decode"], fused
    assert of_parts == [fused["prefill"], fused["decode"]], "the parts are of the program that is timed"
    assert "left alone" not in "".join(of_parts)


def test_the_table_is_taken_away_from_one_contestant_alone() -> None:
    from benchmarks.trying import trying
    from ditron_inductor.task.plan import choose

    problem = Problem("all_gather_matmul", 8192, 3072, 4096, PRECISIONS[0], 2)
    on_gpu = PlanRequest(problem, "site", "auto", 1 << 30, "cuda", "NVIDIA H200")
    sources = [choose(on_gpu).source]
    for name in ("ditron:untabled", "ditron"):
        with trying(name):
            sources.append(choose(on_gpu).source)
    assert sources == ["table", "model", "table"]


def test_the_times_of_a_trial_are_told() -> None:
    problem = Problem("all_gather_matmul", 4342, 3072, 4096, PRECISIONS[0], 2, slices=13)
    request = PlanRequest(problem, "site", "auto", 1 << 30, "cuda", "a GPU")
    assert tried_text(request, {"tile": Times(300.4, 60.0), "library": Times(261.0, 140.2)}) == (
        "tried: all_gather_matmul 4342 x 3072 x 4096 in 13 slices, us on the device / on the host: "
        "library 261/140, tile 300/60"
    )


def _shares(ctx: RankContext, cells: list[Cell]) -> list[tuple[list[int], list[int], tuple[int, ...], tuple[int, ...]]]:
    """Of each cell: how many weights a rank has among the others and alone, and the shapes of what it computes."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks.models import alone, forms
    from benchmarks.models.contestants import whole

    mesh, found = init_device_mesh("cpu", (ctx.world_size,)), []
    for cell in cells:
        arch = MODELS[cell.model].like(TINY)
        among, own = forms.build(arch, cell, mesh), alone.build(arch, cell, ctx.world_size, ctx.rank)
        given = forms.inputs(arch, cell, ctx.rank, ctx.world_size, ctx.device, torch.float32)
        with torch.no_grad():
            shapes = tuple(whole(among(*given)).shape), tuple(own(*given).shape)
        sizes = [getattr(one, "to_local", lambda one=one: one)().numel() for one in among.parameters()]
        found.append((sizes, [one.numel() for one in own.parameters()], *shapes))
    return found


def test_the_limit_is_that_of_a_rank_s_share(rank_pools: RankPools) -> None:
    kinds = {f"{cell.phase} {cell.form}": cell for cell in tiny(Selection(models=("llama3-8b",)).cells())}
    assert {kind.split()[1] for kind in kinds} == set(FORMS)
    for among, alone, wanted, found in rank_pools.get("cpu", 2).run(_shares, list(kinds.values()))[1]:
        assert among == alone and wanted == found


def _experts(ctx: RankContext, model: str) -> None:
    """A mixture's feed-forward, by each of its ways and cut over the ranks, is what it is as a whole."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks.models.experts import FEW_TOKENS, Experts

    mesh = init_device_mesh("cpu", (ctx.world_size,))
    arch = MODELS[model].like(TINY)
    for dtype, tokens in ((torch.float32, 8), (torch.bfloat16, FEW_TOKENS), (torch.bfloat16, FEW_TOKENS + 2)):
        for scatters in (False, True):
            torch.manual_seed(0)
            part = Experts(arch.hidden, arch.inner, arch.experts, arch.top_k, arch.shared, arch.bias).to(dtype)
            whole = copy.deepcopy(part).double()
            whole.plain = True
            part.cut(mesh, scatters)
            x = torch.randn(1, tokens, arch.hidden).to(dtype).requires_grad_()
            exact = x.detach().double().requires_grad_()
            wanted, got = whole(exact), part(x)
            weight = torch.randn_like(wanted)
            wanted.backward(weight)
            if scatters:
                wanted, weight = (one.chunk(ctx.world_size, 1)[ctx.rank] for one in (wanted, weight))
            got.backward(weight.to(dtype))
            assert x.grad is not None and exact.grad is not None
            for mine, right in ((got, wanted), (x.grad, exact.grad)):
                error = float((mine - right).norm() / right.norm())
                assert error < (1e-5 if dtype == torch.float32 else 2e-2), (dtype, tokens, scatters, error)


@pytest.mark.parametrize("model", ["deepseek-v3", "gpt-oss-120b"])
def test_experts_are_cut_over_the_ranks(rank_pools: RankPools, model: str) -> None:
    rank_pools.get("cpu", 2).run(_experts, model)


def _latent(ctx: RankContext) -> None:
    """Latent attention whose heads are cut over the ranks has the gradients that it has as a whole."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks.models.architecture import Decoder
    from benchmarks.models.forms import cut
    from ditron_inductor.tools.demo_model import rotary_table

    mesh = init_device_mesh("cpu", (ctx.world_size,))
    arch = MODELS["deepseek-v3"].like(TINY)
    for form in ("ar", "sp"):
        torch.manual_seed(0)
        whole = Decoder(arch, 1)
        part = cut(copy.deepcopy(whole), form, mesh)
        exact = torch.randn(1, 8, arch.hidden)
        weight, positions = torch.randn_like(exact), rotary_table(8, arch.rotated, arch.theta)

        def own(x: torch.Tensor, scattered: bool = form == "sp") -> torch.Tensor:
            return x.chunk(ctx.world_size, 1)[ctx.rank] if scattered else x

        x = own(exact).clone().requires_grad_()
        exact.requires_grad_()
        whole(exact, *positions).backward(weight)
        part(x, *positions).backward(own(weight))
        assert x.grad is not None and exact.grad is not None
        pairs = {"x": (x.grad, own(exact.grad))}
        for name in ("q_a_proj", "kv_a_proj"):
            layers = (model.layers[0].self_attn.get_submodule(name) for model in (part, whole))
            pairs[name] = tuple(layer.weight.grad for layer in layers)  # type: ignore[assignment]
        for name, (mine, right) in pairs.items():
            error = float((mine - right).norm() / right.norm())
            assert error < 1e-5, (form, name, error)


def test_latent_attention_has_whole_gradients(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(_latent)


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-32b"])
def test_layers_of_engines_compute_the_same(name: str) -> None:
    import torch

    from benchmarks.models.architecture import Decoder, EngineDecoder
    from ditron_inductor.tools.demo_model import rotary_table

    arch = MODELS[name].like(TINY)
    torch.manual_seed(0)
    plain, engine = Decoder(arch, 2), EngineDecoder(replace(arch, engine=True), 2)
    weights = plain.state_dict()
    for packed, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.packed_proj", ("gate", "up"))):
        owner = packed.rpartition(".")[0]
        for layer in ("layers.0", "layers.1"):
            rows = [weights.pop(f"{layer}.{owner}.{part}_proj.weight") for part in parts]
            weights[f"{layer}.{packed}.weight"] = torch.cat(rows)
    engine.load_state_dict(weights)
    given = torch.randn(2, 8, arch.hidden), *rotary_table(8, arch.head_dim, arch.theta)
    seen: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    with torch.no_grad():
        out, wanted = (model(*given, seen=each) for model, each in zip((engine, plain), seen, strict=True))
    torch.testing.assert_close([out, *seen[0]], [wanted, *seen[1]], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="vLLM"):
        replace(MODELS["gemma3-27b"], engine=True)


def test_engines_are_measured_in_forwards_with_all_reduces() -> None:
    for batched in (False, True):
        cells = Selection(models=("qwen3-32b-vllm",), full=True, batched=batched).cells()
        assert cells and {cell.form for cell in cells} == {"ar"} and "training" not in {cell.phase for cell in cells}


HUGGING_FACE = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 24, "layer_types": ["full_attention"]},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {
        "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
    },
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0},
}
RENAMED = {
    "self_attn.out_proj": "self_attn.o_proj",
    "mlp.gate": "mlp.router",
    "fc1": "mlp.up_proj",
    "fc2": "mlp.down_proj",
    "self_attn_layer_norm": "input_layernorm",
    "pre_feedforward_layernorm": "feedforward_innorm",
    "post_feedforward_layernorm": "feedforward_outnorm",
}


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_layers_compute_what_those_of_transformers_do(kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra 'models'")
    import torch

    from benchmarks.models.architecture import Decoder
    from benchmarks.models.configs import of_config
    from ditron_inductor.tools.demo_model import rotary_table

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(
        kind, **sizes, num_key_value_heads=2, vocab_size=32, max_position_embeddings=64, **HUGGING_FACE[kind]
    )
    torch.manual_seed(0)
    theirs = transformers.AutoModel.from_config(config).eval()
    for parameter in theirs.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    arch = of_config(config)
    ours = Decoder(arch, 1)
    # Behind attention, where there are norms behind the feed-forward too; else in front of the feed-forward.
    names = RENAMED | {"post_attention_layernorm": "attention_outnorm" if arch.sandwich else "feedforward_innorm"}
    stack = theirs.decoder if kind == "opt" else theirs
    weights = {}
    for name, value in stack.state_dict().items():
        if "embed" in name:
            continue
        if kind == "opt":
            name = re.sub(r"^(layers\.\d+\.)final_layer_norm", r"\1feedforward_innorm", name)
            name = re.sub(r"^final_layer_norm", "norm", name)
        for old, new in names.items():
            name = re.sub(rf"(?<=\.){re.escape(old)}(?=\.)", new, name)
        weights[name.replace(".experts.", ".")] = value
    ours.load_state_dict(weights)
    for layer in ours.layers:
        # Here the router chooses.
        layer.mlp.scores = None
    x = torch.randn(2, 8, 64)
    with torch.no_grad():
        if kind == "opt":
            # Its positions are added to the tokens' embeddings, in front of the layers.
            position = stack.embed_positions(torch.ones(2, 8), past_key_values_length=0)
            wanted, given = stack(inputs_embeds=x).last_hidden_state, (x + position, None, None)
        else:
            wanted = theirs(inputs_embeds=x).last_hidden_state
            given = (x, *rotary_table(8, arch.head_dim, arch.theta))
        torch.testing.assert_close(ours(*given), wanted, rtol=1e-4, atol=1e-4)
