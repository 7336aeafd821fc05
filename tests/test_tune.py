"""tune: the command and the function measure on all ranks and write a table that later runs choose by."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ditron_inductor
from ditron_inductor.__main__ import main
from ditron_inductor.errors import InvalidOptionValue
from ditron_inductor.report.matmul_shapes import MODELS, WHOLE_ROWS, MatmulShape, given_shapes, model_shapes
from ditron_inductor.report.measure import SiteShape
from ditron_inductor.task import cost
from ditron_inductor.task.dtypes import PRECISIONS
from ditron_inductor.task.model_error import mean_error, model_error, report_text
from ditron_inductor.task.nodes import KINDS, NODES
from ditron_inductor.task.problem import Problem
from ditron_inductor.task.table import FOLDER, Entry, Table, shipped
from ditron_inductor.tune.tune_command import add_entries, entry_of_times, summary
from tests.ranks import RankContext, RankPools

# The first compilation on a fresh machine precompiles Inductor's C++ headers, once for all tests.
pytestmark = pytest.mark.timeout(300)
LIMIT_S = 250.0
ROOT = Path(__file__).parent.parent
RESULTS = [str(ROOT / "benchmarks" / "results" / f"{name}.csv") for name in ("gemm_collectives", "attention")]
ENTRY = Entry("GPU", 4, "bfloat16", "matmul_all_reduce", 64, 8192, 7168, 1, 100.0, None, 80.0, "abc", "2026-01-31")


def run_tune(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ditron_inductor", "tune", "--device", "cpu", "--ranks", "2", *arguments]
    # Multicast can take a shared host's GPUs out of service.
    environment = os.environ | {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def test_the_command_measures_on_all_ranks_and_writes_a_table(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "table.csv"
    add_entries(path, [ENTRY])
    done = run_tune("--m", "4", "--n", "24", "--k", "16", "--table", str(path), "--rounds", "1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    kept, *found = Table.parse(path.read_text()).entries
    assert kept == ENTRY, "what was there stays"
    assert [(entry.op, entry.m, entry.n, entry.k) for entry in found] == [(op, 4, 24, 16) for op in sorted(KINDS)]
    for entry in found:
        assert (entry.gpu, entry.world, entry.dtype, entry.graph) == ("cpu", 2, "float32", 0)
        assert {"library", "tile"} <= set(entry.us)
    assert f"{len(KINDS)}/{len(KINDS)}" in done.stderr, "the progress bar"
    assert "fastest" in done.stdout and str(path) in done.stdout


@pytest.mark.gpu
def test_the_command_on_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs, one for each rank: shared ones cannot be timed")
    path = tmp_path / "table.csv"
    sizes = ("--m", "64", "2048", "--n", "4096", "--k", "3584", "--table", str(path), "--rounds", "3")
    done = run_tune("--device", "cuda", *sizes)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = Table.parse(path.read_text()).entries
    assert [(entry.m, entry.graph) for entry in found] == len(KINDS) * [(64, 0), (64, 1), (2048, 0), (2048, 1)]
    for entry in found:
        assert (entry.gpu, entry.dtype) == (torch.cuda.get_device_name(), "bfloat16")
        assert set(entry.us) == set(NODES[entry.op].strategies), done.stdout[-4000:]


def test_a_file_that_is_no_table_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.csv"
    path.write_text("dear diary\n")
    assert main(["tune", "--device", "cpu", "--model", "llama-8b", "--table", str(path)]) == 2
    assert "notes.csv, line 1: the columns are dear diary" in capsys.readouterr().err
    assert path.read_text() == "dear diary\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--n", "8"], "--n has 1 sizes and --k has 0"),
        ([], "give --model, or --n and --k"),
        (["--n", "8", "--k", "0"], "at least 1"),
        (["--model", "llama-8b", "--ranks", "3"], "llama-8b do not divide over 3 ranks"),
        (["--ranks", "1"], "--ranks has to be at least 2"),
        (["--model", "llama-8b", "--table", "shipped"], "ditron.table"),
        (["--from-results", "none.csv"], "none.csv"),
    ],
)
def test_what_cannot_be_measured_is_said(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--device", "cpu", *arguments]) == 2
    assert named in capsys.readouterr().err


def test_a_models_sites() -> None:
    shapes = model_shapes("llama-70b", KINDS, (16, 4096), 4)
    assert shapes == [
        MatmulShape("all_gather_matmul", 4096, 2560, 8192),
        MatmulShape("all_gather_matmul", 4096, 14336, 8192),
        MatmulShape("matmul_reduce_scatter", 4096, 8192, 2048),
        MatmulShape("matmul_reduce_scatter", 4096, 8192, 7168),
        MatmulShape("matmul_all_reduce", 16, 8192, 2048),
        MatmulShape("matmul_all_reduce", 4096, 8192, 2048),
        MatmulShape("matmul_all_reduce", 16, 8192, 7168),
        MatmulShape("matmul_all_reduce", 4096, 8192, 7168),
        # The logits, once for the model.
        MatmulShape("matmul_all_gather", 16, 32064, 8192),
        MatmulShape("matmul_all_gather", 4096, 32064, 8192),
    ]
    for model in MODELS:
        assert model_shapes(model, KINDS, (256,), 2)


def test_rows_that_do_not_divide_are_for_ops_that_have_them_on_all_ranks() -> None:
    assert given_shapes(KINDS, (3,), (8,), (15,), 2) == [MatmulShape(op, 3, 8, 15) for op in WHOLE_ROWS]
    with pytest.raises(ValueError, match="3 rows do not divide over 2 ranks"):
        SiteShape.of_matmul("matmul_reduce_scatter", 3, 8, 16, torch.float32, 2)
    gather = SiteShape.of_matmul("all_gather_matmul", 8, 24, 16, torch.float32, 2)
    assert gather.shapes == {"shard": (4, 16), "weights": [(16, 24)]}
    assert (gather.sizes.m, gather.sizes.n, gather.sizes.k) == (8, 24, 16)


def test_a_line_has_what_was_measured() -> None:
    problem = Problem("matmul_reduce_scatter", 4, 8, 16, PRECISIONS[0], 4, slices=3)
    entry = entry_of_times(problem, {"library": 6.0, "tile": 5.0}, "GPU", graph=1)
    assert (entry.gpu, entry.world, entry.dtype, entry.op) == ("GPU", 4, PRECISIONS[0].operand.name, problem.kind)
    assert (entry.m, entry.n, entry.k, entry.graph, entry.slices) == (4, 8, 16, 1, 3)
    assert entry.us == {"library": 6.0, "tile": 5.0} and entry.commit.startswith("v")


def test_entries_are_added_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    add_entries(path, [ENTRY])
    assert add_entries(path, []).entries == Table.parse(path.read_text()).entries == (ENTRY,)
    assert [one.name for one in tmp_path.iterdir()] == ["table.csv"]


def test_the_summary_names_the_fastest_and_every_note_once() -> None:
    text = summary([ENTRY], ["chunked: it cannot run here", "chunked: it cannot run here"])
    assert "tile" in text and "1.25x" in text and "graph" in text
    assert text.count("no time: chunked: it cannot run here") == 1


# Without measuring.


def test_a_table_from_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--from-results", *RESULTS]) == 0
    text = capsys.readouterr().out
    assert text == Table(shipped().entries).text()
    path = tmp_path / "table.csv"
    path.write_text("what was there does not matter")
    assert main(["tune", "--from-results", *RESULTS, "--table", str(path)]) == 0
    assert path.read_text() == text and str(path) in capsys.readouterr().out


def test_the_models_error_is_reported_and_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--model-error"]) == 0
    text = capsys.readouterr().out
    assert "median" in text and "worst at" in text and "mean error: " in text
    assert main(["tune", "--model-error", "--from-results", *RESULTS]) == 0
    assert capsys.readouterr().out == text, "the shipped tables are made from the results"
    rows = model_error(shipped().entries)
    assert {(row.op, row.strategy) for row in rows} >= {(entry.op, "library") for entry in shipped().entries}
    assert sum(row.count for row in rows) == sum(len(entry.us) for entry in shipped().entries)
    assert 0 < mean_error(shipped().entries) < cost.MEAN_ERROR_BOUND


def test_nothing_is_said_about_gpus_that_the_model_does_not_know() -> None:
    assert model_error([ENTRY]) == [] and mean_error([ENTRY]) == 0.0
    assert "no measurement" in report_text([ENTRY])


def test_shipped_tables_are_one_for_each_gpu() -> None:
    for path in FOLDER.glob("*.csv"):
        assert len({entry.gpu for entry in Table.parse(path.read_text()).entries}) == 1


# A function's sites.


def _tuned(ctx: RankContext, folder: str) -> tuple[Any, str, str]:
    """The report of tune(fn), and what the plan says in a new group, where the table that was written is loaded."""
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as funcol

    from ditron_inductor.task.plan import decisions

    torch.manual_seed(ctx.rank)
    x, w = torch.randn(2, 4, 8), torch.randn(8, 6)

    def fn(x: torch.Tensor, w: torch.Tensor, name: str) -> torch.Tensor:
        return funcol.all_reduce(x @ w, "sum", name)

    path = str(Path(folder) / "table.csv")
    report = ditron_inductor.tune(fn, path=path)(x, w, ctx.group_name)
    dist.barrier()
    group = dist.new_group(list(range(ctx.world_size)))
    assert group is not None
    torch._dynamo.reset()
    torch.compile(fn, backend="ditron", options={"ditron.table": path})(x, w, group.group_name)
    choices = [choice for (name, _), (_, choice) in decisions._last.items() if name == group.group_name]
    return report, choices[0].source, choices[0].reason


def test_the_sites_of_a_function(rank_pools: RankPools, tmp_path: Path) -> None:
    results = rank_pools.get("cpu", 2).run(_tuned, str(tmp_path), timeout=LIMIT_S)
    (entry,) = Table.parse((tmp_path / "table.csv").read_text()).entries
    assert (entry.op, entry.m, entry.n, entry.k, entry.gpu) == ("matmul_all_reduce", 8, 6, 8, "cpu")
    for report, source, reason in results:
        assert report.matched[0].measured.us == pytest.approx(entry.us, abs=0.01)
        assert source == "table" and "your table" in reason


def test_a_table_has_to_be_a_file() -> None:
    with pytest.raises(InvalidOptionValue, match="ditron.table"):
        ditron_inductor.tune(lambda x: x, path="shipped")
