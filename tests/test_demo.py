"""The demo: what it prints, that it compares, and that its model is right."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch

from ditron_inductor.tools import demo
from ditron_inductor.tools.demo_model import Llama, LlamaConfig, tensor_parallel
from tests.ranks import RankContext, RankPools


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "ditron_inductor", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)


# CI runs `make demo`, which is this in both forms.
@pytest.mark.all_cases
@pytest.mark.timeout(300)
def test_two_cpu_ranks_match_eager() -> None:
    done = run_demo("--device", "cpu", "--form", "sp")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    parts = "eager forward and backward", ">> ", "ditron.all_gather_matmul", "largest error", "collectives matched"
    for part in parts:
        assert part in done.stdout
    assert "every output and gradient matches eager" in done.stdout


def test_one_rank_is_refused() -> None:
    done = run_demo("--ranks", "1")
    assert done.returncode == 2 and "at least 2" in done.stderr


def test_missing_gpus_are_named() -> None:
    gpus = torch.cuda.device_count()
    done = run_demo("--device", "cuda", "--ranks", str(gpus + 2))
    assert done.returncode == 2 and f"{gpus} found" in done.stderr and "--device cpu" in done.stderr


def test_a_failing_rank_fails_the_demo_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "run_ranks", lambda *args, **kwargs: [0, 1])
    arguments = ["demo", "--device", "cpu", "--limit", "5"]
    from ditron_inductor.__main__ import main

    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "rank 1 (exit code 1)" in error and "doctor" in error and "--strategy library" in error


def test_a_missing_tool_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ditron_inductor.__main__ import main

    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert main(["demo"]) == 2
    error = capsys.readouterr().err
    assert "C++ compiler is needed for the demo: none found" in error and "g++" in error


def test_graph_lines_mark_task_nodes() -> None:
    graph = """class GraphModule(torch.nn.Module):
    def forward(self, x: "f32[2]"):
        # File: model.py:1 in forward, code: y = x
        a: "f32[2]" = torch.ops.aten.neg.default(x);  x = None
        b = torch.ops.ditron.matmul_all_reduce.default([a, a], "epilogue='pre: silu(mm0); mm0'", None);  a = y = None
        return (b,)
"""
    assert demo.graph_lines(graph) == [
        '   a: "f32[2]" = aten.neg.default(x)',
        """>> b = ditron.matmul_all_reduce.default([a, a], "epilogue='pre: silu(mm0); mm0'", None)""",
        "   return (b,)",
    ]


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="num_kv_heads"):
        LlamaConfig(num_heads=4, num_kv_heads=3)
    with pytest.raises(ValueError, match="even multiple"):
        LlamaConfig(dim=60, num_heads=4)


def test_the_8b_layer_has_its_published_size() -> None:
    with torch.device("meta"):
        model = Llama(LlamaConfig.llama_8b(num_layers=32, vocab_size=128256))
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_030_261_248


def _parallel_matches_single(ctx: RankContext, vocab_size: int, sequence_parallel: bool) -> float:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    torch.manual_seed(0)
    single = Llama(LlamaConfig(num_kv_heads=4, vocab_size=vocab_size))
    x = torch.randint(vocab_size, (2, 16)) if vocab_size else torch.randn(2, 16, single.config.dim)
    want = single(x)
    model = tensor_parallel(copy.deepcopy(single), mesh, sequence_parallel=sequence_parallel)
    if sequence_parallel and not vocab_size:
        x, want = (value.chunk(ctx.world_size, dim=1)[ctx.rank] for value in (x, want))
    got = model(x, 16)
    got.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return (got - want).abs().max().item()


@pytest.mark.parametrize("vocab_size", [0, 32])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_parallel_model_computes_what_the_single_one_does(
    rank_pools: RankPools, vocab_size: int, sequence_parallel: bool
) -> None:
    for error in rank_pools.get("cpu", 2).run(_parallel_matches_single, vocab_size, sequence_parallel):
        assert error < 2e-6
