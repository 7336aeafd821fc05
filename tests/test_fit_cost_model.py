"""The fit of the cost model: it finds what made the times, keeps what they do not tell, and writes what it found."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.fit_cost_model import SOURCE, error_text, fit, loss, number_text, write
from benchmarks.plan import COMMAND, DOCS_PAGE, measured_entries, table_path, tables, with_report
from benchmarks.records import ATTENTION, GEMM_COLLECTIVES
from ditron_inductor.task import cost
from ditron_inductor.task.model_error import problem_of, relative_error, report_text
from ditron_inductor.task.nodes import KINDS
from ditron_inductor.task.table import FOLDER, Entry, shipped

SIZES = [(m, n, k) for m in (16, 256, 2048, 8192) for n, k in ((8192, 7168), (4096, 3584))]


def entries(on: cost.Hardware, *, chunked: bool = True) -> list[Entry]:
    """Times that the model itself makes, on a group of four."""
    made = []
    for op in KINDS:
        for m, n, k in SIZES:
            blank = Entry("NVIDIA H200", 4, "bfloat16", op, m, n, k, 0, 1.0, 1.0, 1.0, "", "")
            us = cost.predict(problem_of(blank), on)
            chunked_us = us.get("chunked") if chunked else None
            times = {"library_us": us["library"], "chunked_us": chunked_us, "tile_us": us.get("tile")}
            made.append(dataclasses.replace(blank, **times))
    return made


def test_it_finds_numbers_that_make_the_times() -> None:
    truth = dataclasses.replace(cost.H200, matmul_flops=600e12, collective_us=22.0, chunk_us=5.0, tile_efficiency=0.9)
    made = entries(truth)
    found = fit(made, cost.H200)
    assert loss(made, found, cost.H200) < 0.2 * loss(made, cost.H200, cost.H200)
    for entry in made:
        for strategy in entry.us:
            assert abs(relative_error(entry, strategy, found)) < 0.08


def test_what_the_times_do_not_tell_stays() -> None:
    truth = dataclasses.replace(cost.H200, collective_us=22.0)
    found = fit(entries(truth, chunked=False), cost.H200)
    for name in ("pair_gain", "matmul_flops_fp32", "copy_bytes_per_s", "chunk_us", "chunk_efficiency"):
        assert getattr(found, name) == getattr(cost.H200, name)


def test_no_matmul_of_ours_is_faster_than_the_librarys() -> None:
    made = [dataclasses.replace(entry, tile_us=entry.us["tile"] / 2) for entry in entries(cost.H200)]
    assert fit(made, cost.H200).tile_efficiency <= 1.0


def test_numbers_have_three_digits() -> None:
    assert [number_text(value) for value in (727.31e12, 4.161e12, 238.4e9, 15.62, 4.0)] == [
        "727e12",
        "4.16e12",
        "238e9",
        "15.6",
        "4.0",
    ]


def test_the_source_is_written_as_it_stands() -> None:
    source = SOURCE.read_text()
    for on in cost.KNOWN:
        assert write(on, source) == source
    changed = write(dataclasses.replace(cost.H200, chunk_us=99.0), source)
    assert "    chunk_us=99.0,\n" in changed and len(changed.splitlines()) == len(source.splitlines())


def test_what_is_shipped_is_made_from_the_results() -> None:
    texts = tables(measured_entries([str(GEMM_COLLECTIVES), str(ATTENTION)]))
    assert {path: path.read_text() for path in FOLDER.glob("*.csv")} == texts, f"run {COMMAND}"


def test_the_page_shows_the_models_error() -> None:
    report = report_text(shipped().entries, "github")
    page = DOCS_PAGE.read_text()
    assert with_report(page, report) == page, f"run {COMMAND}"
    assert with_report(with_report(page, "other"), report) == page
    with pytest.raises(ValueError, match="no part between"):
        with_report("# Tuning", report)


def test_a_table_has_the_name_of_its_gpu() -> None:
    assert table_path("NVIDIA H100 80GB HBM3").name == "nvidia_h100_80gb_hbm3.csv"


def test_a_fit_is_told_in_numbers() -> None:
    assert error_text(entries(cost.H200), cost.H200).startswith("all_gather_matmul chunked 0.0 %, ")
