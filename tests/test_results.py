"""Results: rows in their file, comparisons and targets made of them, and the pages and pictures that show them."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import (
    decode_floors,
    deleted,
    expert_floors,
    figures,
    floors,
    gathered_floors,
    reduced_floors,
    report,
    sources,
    without_table,
)
from benchmarks.comparison import comparisons, geometric_mean, means, ratios_table, times_table
from benchmarks.models.summary import means_table, phases_part, readme_part
from benchmarks.ops import targets
from benchmarks.ops.contest import CONTESTANTS
from benchmarks.ops.shapes import SETS, Cell
from benchmarks.records import COLUMNS, Row, merge_csv, newest, read_csv, runs

ROW = Row(
    bench="gemm_collectives",
    op="all_gather_matmul",
    contestant="nccl",
    shape="M=8;N=8;K=8",
    dtype="bfloat16",
    world=4,
    graph=0,
    p20_us=9.0,
    p50_us=10.0,
    p80_us=11.0,
    skew_pct=1.5,
    limit_us=8.0,
    gpu="NVIDIA H200",
    torch="2",
    triton="3",
    commit="abc",
    date="2026-01-01",
)


def rows_of(cell: Cell, world: int = 4, limit: float = 80.0, **us: float | None) -> list[Row]:
    """The rows of one cell: a time for each contestant, with `_` for `:` in its name, None for one that failed."""
    names = {name.replace(":", "_"): name for name in CONTESTANTS}
    same = dataclasses.replace(
        ROW, op=cell.op, shape=cell.shape, graph=int(cell.graph), world=world, limit_us=limit, skew_pct=1.5
    )
    return [dataclasses.replace(same, contestant=names[name], p50_us=each) for name, each in us.items()]


def anchor(op: str, row: tuple[int, int], graph: bool = False, world: int = 4) -> Cell:
    cells = SETS["anchors"](op, world)
    hidden = [cell.K if op == "all_gather_matmul" else cell.N for cell in cells]
    return next(c for c, width in zip(cells, hidden, strict=True) if (c.M, width) == row and c.graph == graph)


def verdicts(*rows: Row) -> dict[str, bool | None]:
    (cell,) = comparisons(rows)
    return {target.text: target.holds for target in targets.row_targets(cell)}


def test_columns_are_fixed() -> None:
    wanted = "bench,op,contestant,shape,dtype,world,graph,p20_us,p50_us,p80_us,skew_pct,limit_us,gpu,torch,triton"
    assert ",".join(COLUMNS) == f"{wanted},commit,date"


def test_a_newer_run_stands_behind_the_older_one(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    failed = dataclasses.replace(ROW, contestant="ditron", p20_us=None, p50_us=None, p80_us=None, skew_pct=None)
    other = dataclasses.replace(ROW, shape="M=16;N=8;K=8")
    merge_csv(path, [ROW, failed, other])
    assert read_csv(path) == [ROW, failed, other]
    newer = dataclasses.replace(ROW, p50_us=7.0, commit="def", date="2026-02-01")
    merge_csv(path, [newer])
    assert read_csv(path) == [ROW, failed, newer, other]
    assert newest(read_csv(path)) == [newer, other]


def test_a_gain_of_a_kernel_never_grows_because_a_rival_was_left_out() -> None:
    def run(commit: str, **times: float) -> list[Row]:
        return [dataclasses.replace(ROW, contestant=name, p50_us=us, commit=commit) for name, us in times.items()]

    old = run("old", nccl=100.0, max_autotune=80.0, ditron=60.0)
    (cell,) = comparisons([*old, *run("new", nccl=99.0, ditron=58.0)])
    assert (cell.best_rival, cell.rows["ditron"].commit) == ("max_autotune", "old")
    (cell,) = comparisons([*old, *run("new", nccl=99.0, max_autotune=90.0, ditron=58.0)])
    assert cell.rows["ditron"].commit == "new"


def test_runs_are_written_once(tmp_path: Path) -> None:
    """A benchmark writes all its rows after every cell."""
    path = tmp_path / "results.csv"
    first = [dataclasses.replace(ROW, p50_us=10.001), dataclasses.replace(ROW, contestant="ditron", p50_us=8.0)]
    again = [dataclasses.replace(row, p50_us=9.0) for row in first]
    for rows in (first, [*first, *again], [*first, *again]):
        merge_csv(path, rows)
    written = read_csv(path)
    assert [row.p50_us for row in written] == [10.0, 8.0, 9.0, 9.0]
    assert runs(written) == [written[:2], written[2:]] and newest(written) == written[2:]


def test_other_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="columns"):
        read_csv(path)


def test_comparison() -> None:
    rows = rows_of(Cell("all_gather_matmul", 8, 8, 8), nccl=120.0, async_tp=90.0, ditron=100.0, ditron_tile=None)
    (cell,) = comparisons(rows)
    assert cell.ratio("nccl", "ditron") == 1.2
    assert cell.ratio("limit", "ditron") == 0.8
    assert cell.ratio("ditron", ("nccl", "async_tp")) == pytest.approx(100 / 90)
    assert cell.ratio("limit", "ditron:tile") is None and cell.ratio("gemm", "ditron") is None
    times, ratios = (
        times_table([cell]).splitlines(),
        ratios_table([cell], {0: ("limit / auto >= 0.9", "NO")}).splitlines(),
    )
    assert times[2].split()[-6:] == ["80.0", "120.0", "90.0", "100.0", "failed", "abc"]
    assert ratios[2].split()[-13:] == ["1.20", "~", "0.90", "~", "0.80", "-", "1.5", *"limit / auto >= 0.9 NO".split()]


def test_a_ratio_of_op_rows_has_a_mark_where_samples_overlap() -> None:
    rows = rows_of(Cell("all_gather_matmul", 8, 8, 8), nccl=120.0, async_tp=90.0, ditron=100.0)
    apart = [dataclasses.replace(row, p20_us=(row.p50_us or 0) - 6, p80_us=(row.p50_us or 0) + 6) for row in rows]
    (cell,) = comparisons(apart)
    assert cell.best_rival == "async_tp"
    assert [cell.ratio_text(name) for name in ("nccl", "async_tp", "gemm")] == ["1.20", "0.90 ~", "-"]


def test_comparisons_are_ordered() -> None:
    cells = [cell for op in ("matmul_all_reduce", "all_gather_matmul") for cell in reversed(SETS["anchors"](op, 4))]
    found = comparisons([row for cell in cells for row in rows_of(cell, nccl=1.0)])
    assert [(cell.op, cell.M, cell.hidden, cell.graph) for cell in found][:7] == [
        ("all_gather_matmul", M, hidden, 0) for hidden in (8192, 4096) for M in (8192, 4096, 2048)
    ] + [("all_gather_matmul", 2048, 4096, 1)]
    assert [cell.M for cell in found][-5:] == [256, 128, 64, 16, 1]


def test_means() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([2.0, None]) is None and geometric_mean([]) is None
    rows = [
        *rows_of(Cell("matmul_all_reduce", 1, 8, 8), nccl=2.0, ditron=1.0),
        *rows_of(Cell("matmul_all_reduce", 2, 8, 8), nccl=8.0, ditron=1.0),
    ]
    assert means(comparisons(rows)) == [("matmul_all_reduce", "nccl", 2, pytest.approx(4.0))]


def test_prefill_targets() -> None:
    cell = anchor("all_gather_matmul", (8192, 8192))
    rows = rows_of(cell, limit=92.0, nccl=120.0, async_tp=99.0, ditron=100.0)
    assert verdicts(*rows) == {"limit / auto >= 0.92": True, "auto / best of NCCL and async TP <= 1.02": True}
    rows = rows_of(cell, limit=91.0, nccl=120.0, async_tp=95.0, ditron=100.0)
    assert set(verdicts(*rows).values()) == {False}
    rows = rows_of(anchor("matmul_reduce_scatter", (4096, 8192)), limit=93.0, nccl=120.0, ditron=100.0)
    assert verdicts(*rows)["limit / auto >= 0.93"] is True
    rows = rows_of(anchor("matmul_all_reduce", (4096, 8192)), nccl=115.0, ditron=100.0)
    assert verdicts(*rows)["NCCL + cuBLAS / auto >= 1.15"] is True


def test_the_row_that_is_measured_both_ways_has_its_target_in_the_graph() -> None:
    for graph in (False, True):
        rows = rows_of(anchor("all_gather_matmul", (2048, 4096), graph), nccl=120.0, ditron=100.0)
        assert ("limit / auto >= 0.75" in verdicts(*rows)) == graph


def test_decode_targets() -> None:
    for tokens, bound in ((16, 0.85), (64, 0.8)):
        cell = anchor("matmul_all_reduce", (tokens, 8192), graph=True)
        rows = rows_of(cell, nccl=100.0, symm_mem_one_shot=90.0, symm_mem_two_shot=88.0, ditron=80.0)
        found = verdicts(*rows)
        assert found[f"auto / NCCL + cuBLAS <= {bound:g}"] is True
        assert found["auto / better symm_mem <= 0.92"] is True
        rows = rows_of(cell, nccl=100.0, symm_mem_one_shot=90.0, symm_mem_two_shot=80.0, ditron=81.0)
        assert verdicts(*rows)["auto / better symm_mem <= 0.92"] is False
        assert verdicts(*rows)[f"auto / NCCL + cuBLAS <= {bound:g}"] is (bound == 0.85)


def test_host_target_is_that_of_tile() -> None:
    rows = rows_of(SETS["host"]("matmul_all_reduce", 4)[0], nccl=41.0, ditron=41.0, ditron_tile=39.0)
    assert verdicts(*rows) == {"us per call of tile <= 40": True}


def test_on_other_machines_only_never_slower_is_a_target() -> None:
    never = {"auto / best of NCCL and async TP <= 1.02": True}
    cell = anchor("all_gather_matmul", (8192, 8192), world=2)
    assert verdicts(*rows_of(cell, world=2, nccl=100.0, ditron=100.0)) == never
    cell = anchor("all_gather_matmul", (8192, 8192))
    other = [dataclasses.replace(row, gpu="NVIDIA B200") for row in rows_of(cell, nccl=100.0, ditron=100.0)]
    assert verdicts(*other) == never
    assert verdicts(*rows_of(Cell("all_gather_matmul", 8192, 8, 8), nccl=1.0, ditron=9.0)) == {}


def test_mean_targets_need_all_six_rows() -> None:
    cells = [cell for cell in SETS["anchors"]("all_gather_matmul", 4)]
    rows = [row for cell in cells for row in rows_of(cell, nccl=116.0, ditron=100.0)]
    ((op, target),) = targets.mean_targets(comparisons(rows))
    assert (op, target.holds, target.verdict) == ("all_gather_matmul", True, "PASS 1.160")
    ((_, target),) = targets.mean_targets(comparisons(rows[2:]))
    assert (target.holds, target.verdict) == (None, "not measured")
    failed = dataclasses.replace(rows[1], p50_us=None)
    ((_, target),) = targets.mean_targets(comparisons([rows[0], failed, *rows[2:]]))
    assert target.holds is None


def test_target_column_and_summary() -> None:
    rows = rows_of(anchor("all_gather_matmul", (8192, 8192)), limit=92.0, nccl=120.0, async_tp=90.0, ditron=100.0)
    cells = comparisons(rows)
    assert targets.column(cells) == {0: ("limit / auto >= 0.92", "NO")}
    lines = targets.summary(cells)
    assert [line[3] for line in lines] == ["not measured", "PASS 0.920", "FAIL 1.111"]
    failed = rows_of(anchor("all_gather_matmul", (8192, 8192)), nccl=120.0, ditron=None)
    assert targets.column(comparisons(failed)) == {0: ("limit / auto >= 0.92", "-")}


def synthetic() -> list[Row]:
    rows = []
    for op in ("all_gather_matmul", "matmul_all_reduce"):
        for cell in SETS["sweep"](op, 4):
            us = 10.0 + cell.M / 20
            times = {"gemm": us, "nccl": 1.5 * us, "ditron": 1.2 * us, "ditron_tile": 1.3 * us, "ditron_chunked": None}
            rows += rows_of(cell, limit=us, **times)
    return rows


def test_panels() -> None:
    drawn = figures.panels(comparisons(synthetic()), "matmul_all_reduce")
    assert [panel.title for panel in drawn] == ["N=8192, K=7168, 4 ranks", "N=4096, K=3584, 4 ranks"]
    lines = {(line.contestant, line.graph): line for line in drawn[0].speed_up}
    assert set(lines) == {("ditron", 0), ("ditron", 1), ("ditron:tile", 0), ("ditron:tile", 1)}
    assert lines["ditron", 1].M == tuple(1 << step for step in range(12))
    assert lines["ditron", 1].values == pytest.approx([1.25] * 12)
    of_limit = {line.contestant: line.values for line in drawn[0].of_limit if not line.graph}
    assert of_limit["nccl"] == pytest.approx([1 / 1.5] * 3)
    few = [row for row in synthetic() if row.shape.startswith(("M=1;", "M=4;"))]
    assert figures.panels(comparisons(few), "matmul_all_reduce") == []


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra 'bench'")
    results = tmp_path / "gemm_collectives.csv"
    merge_csv(results, synthetic())
    assert figures.main(["--results", str(results), "--models", str(tmp_path / "none.csv")]) == 0
    for op in ("all_gather_matmul", "matmul_all_reduce"):
        assert figures.picture_path(results, op).read_bytes().startswith(b"\x89PNG")
    assert not figures.picture_path(results, "matmul_reduce_scatter").exists()


def test_report_writes_merges_and_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = report.stale
    # Other pages are those of this repository, of which another test says whether they are up to date.
    monkeypatch.setattr(report, "stale", lambda pages: [path for path in stale(pages) if tmp_path in path.parents])
    results, docs, new = tmp_path / "gemm_collectives.csv", tmp_path / "docs.md", tmp_path / "new.csv"
    docs.write_text(f"before\n\n{report.BEGIN}\nwas here\n{report.END}\n\nafter\n")
    merge_csv(new, rows_of(anchor("all_gather_matmul", (8192, 8192)), nccl=1234.0, async_tp=1100.0, ditron=1000.0))
    # The fingerprints of all commits are made from git where this file lacks them, which takes half a minute.
    shutil.copy(sources.SOURCES, tmp_path)
    arguments = ["--results", str(results), "--docs", str(docs)]
    assert report.main([*arguments, "--check"]) == 1
    assert "run python -m benchmarks.report" in capsys.readouterr().err
    assert report.main([*arguments, "--merge", str(new)]) == 0
    assert report.main([*arguments, "--check"]) == 0
    text = docs.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "was here" not in text
    assert "| 8192 x 14336 x 8192 | eager" in text and "1.23 over NCCL + cuBLAS" in text
    assert "PASS" in results.with_suffix(".md").read_text()


def test_a_mean_says_how_many_rows_it_has() -> None:
    cells = [anchor("matmul_reduce_scatter", (M, 8192)) for M in (8192, 4096)]
    rows = rows_of(cells[0], nccl=120.0, async_tp=110.0, ditron=100.0) + rows_of(cells[1], nccl=120.0, ditron=100.0)
    assert "1.20 over NCCL + cuBLAS (2 rows), 1.10 over async TP (1 row)." in report.docs_part(rows)


def test_every_clear_loss_is_shown() -> None:
    lost, close = anchor("matmul_all_reduce", (8192, 8192)), anchor("matmul_all_reduce", (2048, 4096))

    def narrow(rows: list[Row], by: float = 1.0) -> list[Row]:
        return [dataclasses.replace(row, p20_us=row.p50_us - by, p80_us=row.p50_us + by) for row in rows if row.p50_us]

    won = narrow(rows_of(close, symm_mem_two_shot=99.0, ditron=100.0), 0.1)
    assert "In 0 of 1 cells" in report.docs_part(won)
    of_lost = narrow(rows_of(lost, nccl=110.0, symm_mem_two_shot=90.0, ditron=100.0, ditron_tile=80.0))
    text = report.docs_part([*won, *of_lost])
    assert "In 1 of 2 cells" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| 4x H200 ")]
    cells = [cell.strip() for cell in line.split("|")[1:-2]]
    assert cells[:1] + cells[2:] == ["4x H200", "8192 x 8192 x 7168", "eager", "two-shot", "0.90", "1.12"]
    assert "In 0 of 1 cells" in report.docs_part(narrow(of_lost, 20.0))


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="no markers"):
        report.with_part("nothing", "part")


def test_the_table_of_models_has_means_and_the_lowest_ratio() -> None:
    shape = "model=big;layers=2;form=sp;batch={};tokens=8"
    rows = [
        dataclasses.replace(ROW, bench="models", op="prefill", contestant=name, shape=shape.format(batch), p50_us=us)
        for batch, times in ((1, {"inductor": 20.0, "async_tp": 9.0}), (2, {"inductor": 80.0, "async_tp": None}))
        for name, us in {"ditron": 10.0, **times}.items()
    ]
    # Clear of what the others have.
    rows[3:] = [dataclasses.replace(row, p80_us=9.5) if row.contestant == "ditron" else row for row in rows[3:]]
    rows[3:] = [dataclasses.replace(row, p20_us=70.0) if row.contestant == "inductor" else row for row in rows[3:]]
    alone = dataclasses.replace(rows[0], op="decode")
    table, conditions = (part.splitlines() for part in readme_part([*rows, alone], []).split("\n\n"))
    assert [cell.strip() for cell in table[2].split("|")[1:-1]] == [
        *("prefill", "4x H200", f"{(0.9 * 8) ** 0.5:.2f}", "4.00", "0.90 ~", "2", "1")
    ]
    assert means_table(rows, by_model=True).splitlines()[-1].split("|")[3].strip() == "big"
    assert len(table) == 3 and "bfloat16, torch 2, Triton 3, 2026-01-01" in conditions[0]
    assert "this holds for 1 of 2 cells" in conditions[2] and "2 of them" in conditions[3]
    assert conditions[4] == "Inside CUDA graphs: none."
    elsewhere = [dataclasses.replace(row, gpu="NVIDIA H100") for row in rows[:2]]
    lines = readme_part([*rows, *elsewhere], []).splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:4]] == ["4x H100", "4x H200"]
    assert readme_part([], []) == phases_part([], []) == "Nothing has been measured yet."


def test_committed_pages_are_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making them needs no matplotlib, nor does the import of what makes them."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outdated = [str(path.relative_to(report.ROOT)) for path in report.stale(report.generated())]
    assert not outdated, f"run {report.COMMAND} and commit {', '.join(outdated)}"
    code = "import sys; sys.modules['matplotlib'] = None; import benchmarks.report"
    subprocess.run([sys.executable, "-c", code], cwd=report.ROOT, check=True)


def test_the_readme_names_every_set_and_contestant() -> None:
    text = (report.ROOT / "benchmarks" / "README.md").read_text()
    for name in (*SETS, *(name for name in CONTESTANTS if name != "gloo")):
        assert f"`{name}`" in text, name


def _timed(op: str, gpu: str, date: str, **us: float) -> list[Row]:
    cell = dataclasses.replace(ROW, op=op, gpu=gpu, date=date)
    return [dataclasses.replace(cell, contestant=name, p50_us=each) for name, each in us.items()]


def test_floors_are_those_of_the_newest_runs_of_each_gpu() -> None:
    rows = [
        *_timed("one", "NVIDIA H100", "2026-01-01", nccl=10.0, ditron=10.0),
        *_timed("one", "NVIDIA H100", "2026-01-02", nccl=12.0, async_tp=30.0, ditron=10.0),
        *_timed("one", "NVIDIA H200", "2026-01-01", async_tp=8.0, ditron=10.0),
        *_timed("other", "NVIDIA H200", "2026-01-01", nccl=1.0, ditron=10.0),
        *_timed("one", "cpu", "2026-01-01", nccl=1.0, ditron=10.0),
    ]
    found = floors.Floor("what", "the best", 1.1, ("nccl", "async_tp"), lambda row: row.op == "one", every=True)
    assert found.lines(rows) == [
        ["what", "the best", "H100", "1.10, each", "1.20", "1.20", "1", "yes", "2026-01-02"],
        ["what", "the best", "H200", "1.10, each", "0.80", "0.80", "1", "no", "2026-01-01"],
    ]
    assert dataclasses.replace(found, rivals=("registered",)).lines(rows) == []


def _decoded(shape: str, date: str = "2026-01-01", **us: float) -> list[Row]:
    cell = dataclasses.replace(ROW, bench="models", op="decode", shape=shape, world=2, graph=1, date=date)
    rows = [dataclasses.replace(cell, contestant=name, p50_us=each) for name, each in us.items()]
    return [dataclasses.replace(row, gpu="NVIDIA H100 80GB HBM3") for row in rows]


def test_floors_of_decode_are_over_the_weights_and_the_cache_of_a_rank() -> None:
    """A layer of Llama 8B has 218 million weights, 42 of them in attention. With a cache every rank has those."""
    cached = 2 * 4 * (65536 * 8 * 128 + 4096 * (128 * 80 + 14336 * 3 / 2))
    alone = 2 * 4 * 4096 * (128 * 80 + 14336 * 3) / 2
    plain = "model=llama3-8b;layers=4;form=ar;batch=1;tokens=1"
    rows = [
        *_decoded(plain, ditron=1.0),
        *_decoded(plain, "2026-01-02", ditron=1.36 * alone / 2.98e6, symm_mem=1.91 * alone / 2.98e6),
        *_decoded("model=llama3-8b;layers=4;form=kv;batch=8;tokens=1;cache=65536", ditron=700.0),
        *_decoded("model=llama3-8b;layers=4;form=kv;batch=1;tokens=1;cache=65536", ditron=1.35 * cached / 2.98e6),
        *_decoded(plain.replace("batch=1", "batch=8"), ditron=400.0),
        *_decoded(plain.replace("layers=4", "layers=2"), ditron=200.0),
    ]
    faster = dataclasses.replace(rows[0], gpu="NVIDIA H200", p50_us=1.36 * alone / 4.4e6)
    other, first, second, third = decode_floors.lines([*rows, faster, dataclasses.replace(faster, gpu="NVIDIA B200")])
    over = ["293", "1.36", "1.35", "no", "1.40", "1.40", "yes", "1.91", "-"]
    assert first == ["H100", "llama3-8b x 4", "ar", "1 x 1", "398", *over, "abc"]
    assert (other[0], *other[5:8]) == ("H200", "198", "1.36", "1.35")
    assert second[3:9] == ["1 x 1, cache 65536", "714", "529", "1.35", "1.35", "yes"]
    assert second[9:] == ["-", "1.40", "-", "-", "-", "abc"]
    assert (third[3], third[7]) == ("8 x 1, cache 65536", "1.35")
    assert decode_floors.FLOORS["llama3-70b"].most_of(64) == 1.15


def test_floors_of_experts_are_over_the_experts_that_are_read() -> None:
    """A token takes 8 of 128 experts of Qwen3 30B, whose width is 768, and two tokens 15.5 different ones of them."""
    read = 2 * 2 / 2.98e6 * (2048 * (128 * 2 * 36 + 8 * 768 * 3) / 2 + 2048 * 128)
    plain = "model=qwen3-30b-a3b;layers=2;form=ar;batch=1;tokens=1"
    rows = [
        *_decoded(plain, ditron=1.6 * read, inductor=8 * read, grouped=2.39 * read),
        *_decoded(plain.replace("batch=1", "batch=2"), ditron=1.0, inductor=2.0),
        *_decoded(plain.replace("qwen3-30b-a3b", "qwen3-30b-a3b-vllm"), ditron=1.0, inductor=2.0),
        *_decoded(plain.replace("qwen3-30b-a3b", "llama3-8b"), ditron=1.0, inductor=2.0),
        *_decoded(plain.replace("form=ar", "form=kv"), ditron=1.0, inductor=2.0),
    ]
    faster = [dataclasses.replace(row, gpu="NVIDIA H200") for row in rows[:2]]
    other, (_, *line) = expert_floors.lines([*rows, *faster, dataclasses.replace(rows[0], gpu="NVIDIA B200")])
    assert other[:3] == ["H200", "qwen3-30b-a3b x 2", "1"] and other[5] == f"{read * 2.98 / 4.4:.0f}"
    assert line[:4] == ["qwen3-30b-a3b x 2", "1", "8", f"{1.6 * read:.0f}"]
    assert line[4:8] == [f"{read:.0f}", "1.60", "1.60", "yes"]
    assert line[8:] == ["one-shot + norm, grouped experts", "1.49", "1.50", "no", "2.39", "abc"]
    over_copies = [expert_floors.lines(_decoded(plain, ditron=1.0, inductor=gain))[0][-5:-2] for gain in (4.0, 1.2)]
    assert over_copies == [["4.00", "1.50", "-"], ["1.20", "1.50", "no"]]
    assert expert_floors.experts_read(expert_floors.ARCHITECTURES["qwen3-30b-a3b"], 2) == 15.5


def test_reduced_experts_are_compared_with_floors_and_limits() -> None:
    shape = "model=mixtral-8x7b;T=2048;routing=uniform"
    of_cell = {"op": "grouped_matmul_all_reduce", "shape": shape, "gpu": "NVIDIA H200", "world": 2, "limit_us": 80.0}
    times = {"inductor": 120.0, "triton:sorted": 110.0, "ditron:library": 105.0, "ditron:tile": 99.0, "ditron": 100.0}
    rows = [dataclasses.replace(ROW, contestant=name, p50_us=us, **of_cell) for name, us in times.items()]
    two = [dataclasses.replace(row, shape=f"{shape};products=2") for row in rows]
    line, of_two = reduced_floors.lines([*two, *rows])
    assert line[:-1] == [
        *("mixtral-8x7b", "2048", "uniform", "1", "all-reduce", "80", "tuned Triton and NCCL", "110", "105", "99"),
        *("100", "1.10", "1.10", "yes", "1.38"),
    ]
    assert (of_two[3], of_two[11:14]) == ("2", ["1.10", "-", "-"])
    skewed = [dataclasses.replace(row, shape=shape.replace("uniform", "skewed")) for row in rows]
    assert reduced_floors.lines(skewed)[0][12] == "-"
    assert reduced_floors.lines(rows[-1:]) == []
    (line,) = reduced_floors.lines([dataclasses.replace(row, limit_us=None) for row in rows])
    assert (line[5], line[-2]) == ("-", "-")


def test_gathered_experts_are_compared_with_floors_and_limits() -> None:
    shape = "model=mixtral-8x7b;T=8192;B=2"
    of_cell = {"op": "gathered_experts", "shape": shape, "gpu": "NVIDIA H200", "world": 2, "limit_us": 80.0, "graph": 1}
    times = {"gemm": 80.0, "inductor": 120.0, "overlap": 104.0, "max_autotune": 103.4, "ditron": 100.0}
    rows = [dataclasses.replace(ROW, contestant=name, p50_us=us, **of_cell) for name, us in times.items()]
    skewed = [dataclasses.replace(row, shape=f"{shape};routing=skewed") for row in rows]
    alone = [dataclasses.replace(row, graph=0, limit_us=None) for row in rows]
    older = [dataclasses.replace(row, gpu="NVIDIA H100 80GB HBM3") for row in rows]
    first, second, third, last = gathered_floors.lines([*older, *alone, *skewed, *rows])
    assert first[:-1] == [
        *("H200", "mixtral-8x7b", "8192", "2", "uniform", "yes", "80", "max-autotune", "103", "100"),
        *("1.03", "1.03", "yes", "1.29"),
    ]
    assert (second[4], second[10:13]) == ("skewed", ["1.03", "-", "-"])
    assert (third[5:7], third[12:14]) == (["no", "-"], ["yes", "-"])
    assert last[0] == "H100"
    slower = [dataclasses.replace(row, p50_us=101.0) if row.contestant == "ditron" else row for row in rows]
    assert gathered_floors.lines(slower)[0][12] == "no"
    # Without a rival there is nothing to compare; nor is there where `ditron` was something else.
    assert gathered_floors.lines(rows[-1:]) == []
    assert gathered_floors.lines([dataclasses.replace(row, commit=deleted.ROUTED) for row in rows]) == []


def test_with_and_without_the_table_is_of_one_run() -> None:
    shape = "model=llama3-8b;layers=2;form=sp;batch=8;tokens=512"

    def ran(commit: str, **us: float) -> list[Row]:
        names = {"untabled": "ditron:untabled"}
        same = dataclasses.replace(ROW, bench="models", op="prefill", shape=shape, gpu="NVIDIA H200", commit=commit)
        return [dataclasses.replace(same, contestant=names.get(name, name), p50_us=each) for name, each in us.items()]

    rows = [*ran("a", ditron=3000.0, untabled=3300.0, inductor=4000.0), *ran("b", ditron=2000.0, inductor=4000.0)]
    (line,) = without_table.lines(rows)
    assert line[2:] == ["llama3-8b x 2", "sp", "8 x 512", "3.00", "3.30", "1.100", "Inductor", "4.00", "a"]
    assert without_table.lines(rows[3:]) == []
