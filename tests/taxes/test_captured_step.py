"""The account of a step in a CUDA graph: how kernels are divided over replays and parts, and what the report says."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ditron_inductor.taxes.captured_step import (
    COLLECTIVES,
    EXCHANGING,
    IDLE,
    INDUCTORS,
    LOCAL,
    OTHERS,
    PARTS,
    CapturedStep,
    TimedKernel,
    ditron_kernels,
    divided,
    median_step,
    shares,
)
from ditron_inductor.taxes.profile import profile_taxes
from ditron_inductor.taxes.report import TaxReport
from tests.ranks import RankContext, RankPools
from tests.taxes.test_command import made_up

NONE: frozenset[str] = frozenset()


def step(us: float, *kernels: TimedKernel) -> CapturedStep:
    return CapturedStep(us, kernels, frozenset({"matmul_all_reduce_kernel"}), frozenset({"add_norm_kernel"}))


def captured_report() -> TaxReport:
    """The made-up report, with one replay of each contestant; the steps in a CUDA graph take 210, 200 and 142 us."""
    before = [TimedKernel("nvjet_gemm", 0.0, 90.0, 7), TimedKernel("ncclDevKernel_AllReduce", 92.0, 60.0, 7)]
    captured = {
        "inductor": step(212.0, *before, TimedKernel("triton_red_fused_norm", 160.0, 40.0, 7)),
        "unfused": step(202.0, *before, TimedKernel("add_norm_kernel", 160.0, 30.0, 7)),
        "fused": step(
            144.0, TimedKernel("matmul_all_reduce_kernel", 0.0, 110.0, 7), TimedKernel("add_norm_kernel", 111, 30.0, 7)
        ),
    }
    return replace(made_up(), captured=captured, bytes_per_us=4e6, parameter_bytes=288_000_000)


def test_every_kernel_belongs_to_a_part_and_the_parts_add_up() -> None:
    captured = captured_report().captured
    parts = {form: each.parts() for form, each in captured.items()}
    assert parts["inductor"] == {
        COLLECTIVES: 60.0, EXCHANGING: 0.0, LOCAL: 0.0, INDUCTORS: 40.0, OTHERS: 90.0, IDLE: 22.0,
    }  # fmt: skip
    assert (parts["fused"][EXCHANGING], parts["fused"][LOCAL], parts["fused"][IDLE]) == (110.0, 30.0, 4.0)
    for form, each in captured.items():
        assert set(parts[form]) == set(PARTS) and sum(parts[form].values()) == pytest.approx(each.us)


def test_kernels_that_run_at_once_share_the_time() -> None:
    kernels = [
        TimedKernel("a", 0.0, 10.0, 1),
        TimedKernel("b", 4.0, 4.0, 2),
        TimedKernel("b", 6.0, 6.0, 3),
        TimedKernel("c", 6.0, 0.0, 1),
    ]
    # Until 4 a alone; until 6 both; until 8 a and twice b; until 10 both; until 12 b alone.
    assert shares(kernels) == pytest.approx({"a": 4 + 1 + 2 / 3 + 1, "b": 1 + 4 / 3 + 1 + 2})


def test_replays_are_told_apart() -> None:
    times = [0.0, 100.0, 190.0, 285.0]
    kernels = [TimedKernel(name, time + at, 5.0, 7) for time in times for name, at in (("a", 10.0), ("b", 20.0))]
    parts = divided(kernels[::-1], 4)
    assert [[kernel.name for kernel in part] for part in parts] == [["a", "b"]] * 4
    found = median_step(parts, NONE, NONE)
    # The replays take 100, 90 and 95 us; nothing says when the last one ends.
    assert found.us == 95.0
    assert found.kernels == (TimedKernel("a", 0.0, 5.0, 7), TimedKernel("b", 10.0, 5.0, 7))


@pytest.mark.parametrize("names", ["", "abc", "abac"])
def test_replays_that_differ_are_refused(names: str) -> None:
    with pytest.raises(ValueError, match=f"saw {len(names)} kernels in 2 replays"):
        divided([TimedKernel(name, float(at), 1.0, 7) for at, name in enumerate(names)], 2)


def test_only_kernels_with_a_workspace_exchange() -> None:
    import ditron_inductor.lowering.norms.add_norm
    import ditron_inductor.lowering.register  # noqa: F401

    exchanging, local = ditron_kernels()
    assert {"matmul_all_reduce_kernel", "flash_decode_kernel"} <= exchanging
    assert "add_norm_kernel" in local and not exchanging & local


def test_the_report_says_where_a_captured_step_spends_its_time(tmp_path: Path) -> None:
    report = captured_report()
    text = report.text()
    assert "in a CUDA graph: the fused step is 68 us shorter than Inductor's" in text
    assert "by its kernels and what is between them, 68 us shorter, 100 % of it" in text
    assert "275 MiB" in text and "takes 72 us: the fused step takes 2.00 times as long" in text
    rows = [row for row in csv.DictReader(io.StringIO(report.csv_text())) if row["row"] in ("part", "kernel")]
    found = {(row["form"], row["kind"], row["pattern"]): (row["calls"], row["graph_us"]) for row in rows}
    assert found["fused", IDLE, ""] == ("", "4.000")
    assert found["inductor", COLLECTIVES, "ncclDevKernel_AllReduce"] == ("1", "60.000")
    report.save_timeline(tmp_path / "timeline.json")
    spans = [row for row in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] if row["ph"] == "X"]
    assert [row["name"] for row in spans if row["cat"] == EXCHANGING] == ["matmul_all_reduce_kernel"]
    assert "by its kernels" not in made_up().text()
    with pytest.raises(ValueError, match="no CUDA graph"):
        made_up().save_timeline(tmp_path / "none.json")


def _profiled(ctx: RankContext) -> TaxReport:
    """Three layers of a decode step, whose matmuls are followed by all-reduces."""
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as funcol

    import ditron_inductor.backend  # noqa: F401  (the name, in a checkout that is not installed)

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList(torch.randn(4096, 4096) / 64 for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.weights:
                x = funcol.all_reduce(torch.nn.functional.linear(x, weight), "sum", dist.group.WORLD).relu()
            return x

    torch.manual_seed(ctx.rank)
    layers = Layers().to(ctx.device, torch.bfloat16)
    with torch.no_grad():
        return profile_taxes(layers, rounds=5)(torch.randn(4, 4096).to(ctx.device, torch.bfloat16))


@pytest.mark.gpu
def test_kernels_explain_a_step_on_gpus(rank_pools: RankPools) -> None:
    report, other = rank_pools.get("cuda", 2).run(_profiled, timeout=200.0)
    assert report.csv_text() == other.csv_text()
    assert set(report.captured) == {"inductor", "unfused", "fused"}, report.notes
    for form, captured in report.captured.items():
        parts = captured.parts()
        assert sum(parts.values()) == pytest.approx(captured.us) and min(parts.values()) >= 0
        assert (parts[EXCHANGING] > 0) == (form == "fused"), parts
        assert (parts[COLLECTIVES] > 0) == (form != "fused"), parts
    assert report.parameter_bytes == 3 * 4096 * 4096 * 2
