"""The measured table: its text, its errors, and what it says about shapes that were measured, close, or neither."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ditron_inductor.errors import InvalidTable
from ditron_inductor.task.nodes import ULYSSES_KINDS
from ditron_inductor.task.results import read_results
from ditron_inductor.task.table import FOLDER, LAST_BUCKET, PLAIN_COLUMNS, Entry, Measured, Table, bucket, shipped

ENTRY = Entry("GPU", 4, "bfloat16", "matmul_all_reduce", 4096, 8192, 7168, 0, 100.0, 90.0, 80.0, "abc", "2026-01-31")
HEADER = ",".join(PLAIN_COLUMNS)


def entry(**changes: object) -> Entry:
    return dataclasses.replace(ENTRY, **changes)  # type: ignore[arg-type]


def look(table: Table, m: int, n: int = 8192, k: int = 7168, graph: bool = False) -> Measured | None:
    return table.lookup(gpu="GPU", world=4, dtype="bfloat16", op="matmul_all_reduce", m=m, n=n, k=k, graph=graph)


def tile(table: Table, m: int, n: int = 8192, k: int = 7168) -> float | None:
    measured = look(table, m, n, k)
    return None if measured is None else measured.ratio["tile"]


def test_text_is_sorted_and_reads_back() -> None:
    table = Table([entry(m=64, chunked_us=None), ENTRY, entry(world=2)])
    lines = table.text().splitlines()
    assert lines[0] == HEADER
    assert lines[1:] == [
        "GPU,2,bfloat16,matmul_all_reduce,4096,8192,7168,0,100.00,90.00,80.00,abc,2026-01-31",
        "GPU,4,bfloat16,matmul_all_reduce,64,8192,7168,0,100.00,,80.00,abc,2026-01-31",
        "GPU,4,bfloat16,matmul_all_reduce,4096,8192,7168,0,100.00,90.00,80.00,abc,2026-01-31",
    ]
    assert Table.parse("# made by hand\n\n" + table.text()).entries == table.entries
    assert Table.parse("").entries == () and Table().text() == HEADER + "\n"


def test_slices_are_a_column_where_some_line_has_several() -> None:
    table = Table([ENTRY, entry(slices=7, tile_us=50.0)])
    text = table.text()
    assert text.splitlines()[0] == f"{HEADER},slices"
    assert [line.rsplit(",", 1)[1] for line in text.splitlines()[1:]] == ["1", "7"]
    assert Table.parse(text).entries == table.entries
    with pytest.raises(InvalidTable, match="line 3: slices is 0, less than 1"):
        Table.parse(text.replace(",7\n", ",0\n"))


def test_calls_of_so_many_slices_count_and_else_those_of_one() -> None:
    table = Table([ENTRY, entry(slices=7, tile_us=50.0)])
    sizes = {"gpu": "GPU", "world": 4, "dtype": "bfloat16", "op": "matmul_all_reduce", "n": 8192, "k": 7168}
    for slices, measured_slices, ratio in ((1, 1, 0.8), (7, 7, 0.5), (8, 1, 0.8)):
        found = table.lookup(**sizes, m=4096, graph=False, slices=slices)  # type: ignore[arg-type]
        assert found is not None and (found.slices, found.ratio["tile"]) == (measured_slices, ratio)
    assert Table([entry(slices=7)]).lookup(**sizes, m=4096, graph=False) is None  # type: ignore[arg-type]


def test_newer_entries_replace_older_ones() -> None:
    table = Table([ENTRY, entry(m=64)]).merged([entry(tile_us=70.0, date="2026-02-01")])
    assert [(one.m, one.tile_us) for one in table.entries] == [(64, 80.0), (4096, 70.0)]


LINE = "GPU,4,bfloat16,matmul_all_reduce,4096,8192,7168,0,100.00,90.00,80.00,abc,2026-01-31"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("gpu,world\n", "line 1: the columns are gpu,world, not gpu,world,dtype"),
        (f"{HEADER}\n{LINE},extra\n", "line 2: it has 14 fields, not 13"),
        (f"{HEADER}\n{LINE}\n{LINE.replace('4096', 'many')}\n", "line 3: m is 'many', not a whole number"),
        (f"{HEADER}\n{LINE.replace('90.00', 'fast')}\n", "line 2: chunked_us is 'fast', not microseconds"),
        (f"{HEADER}\n{LINE.replace('100.00', '')}\n", "line 2: library_us is '', not microseconds"),
        (f"{HEADER}\n{LINE.replace('80.00', '-1')}\n", "line 2: tile_us is -1.0, not a time"),
        (f"{HEADER}\n{LINE.replace('80.00', 'nan')}\n", "tile_us is nan"),
        (f"{HEADER}\n{LINE.replace('matmul_all_reduce', 'all_reduce')}\n", "op is 'all_reduce', not one of all_gather"),
        (f"{HEADER}\n{LINE.replace('GPU,4', 'GPU,1')}\n", "world is 1"),
        (f"{HEADER}\n{LINE.replace('7168,0', '7168,2')}\n", "graph is 2"),
        (f"{HEADER}\n{LINE.replace('4096', '0')}\n", "m is 0"),
        (f"{HEADER}\n{LINE.replace('GPU', '')}\n", "gpu is empty"),
        (f"{HEADER}\n{LINE.replace('80.00', '1e-320')}\n", "line 2: tile_us is 1e-320, not a time"),
        (f"{HEADER}\n{LINE.replace('100.00', '0.004')}\n", "line 2: library_us is 0.004, not a time"),
        (f"{HEADER}\n{LINE.replace('80.00', '1e300')}\n", "line 2: tile_us is 1e+300, not a time"),
        (f"{HEADER}\n{LINE.replace('GPU', 'G' * 200_000)}\n", "line 2: field larger than field limit"),
        (f"{HEADER}\n{LINE.replace('4096', '1' * 5000)}\n", "line 2: m is '1111"),
        (f"{HEADER}\n{LINE.replace('4096', '1' * 4000)}\n", "line 2: m is more than"),
        (f"{HEADER}\n{LINE.replace('4096', '-' + '1' * 4000)}\n", "line 2: m is -1111"),
        (f"{HEADER}\n{LINE.replace('matmul_all_reduce', 'a' * 5000)}\n", "line 2: op is 'aaaa"),
        ("a" * 5000, "line 1: the columns are aaaa"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, named: str) -> None:
    with pytest.raises(InvalidTable) as error:
        Table.parse(text, "mine.csv")
    assert str(error.value).startswith("mine.csv, line ") and named in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_end_in_any_way(end: str) -> None:
    assert Table.parse(end.join([HEADER, LINE, ""])).entries == (ENTRY,)
    with pytest.raises(InvalidTable, match="line 3: it has 1 fields"):
        Table.parse(end.join([HEADER, LINE, "odd", LINE]))


CELLS = st.sampled_from(["GPU", "4", "bfloat16", "matmul_all_reduce", "4096", "0", "1", "-1", "1e-320", "nan", "inf", "1e308", "100.0",
                         "", "#", '"', "\r", "\0", "1" * 400]) | st.text(max_size=6)  # fmt: skip


@st.composite
def lines(draw: st.DrawFn) -> str:
    """A line of a table with a few of its cells changed, or of anything."""
    cells = LINE.split(",") if draw(st.booleans()) else draw(st.lists(CELLS, max_size=14))
    for _ in range(draw(st.integers(0, 2)) if cells else 0):
        cells[draw(st.integers(0, len(cells) - 1))] = draw(CELLS)
    return ",".join(cells)


@given(st.lists(lines(), max_size=4), st.booleans(), st.sampled_from(["\n", "\r\n", "\r"]))
@settings(max_examples=300, deadline=None)
def test_a_text_of_any_kind_is_a_table_or_refused(rows: list[str], headed: bool, end: str) -> None:
    try:
        table = Table.parse(end.join([HEADER, *rows] if headed else rows), "mine.csv")
    except InvalidTable as error:
        assert str(error).startswith("mine.csv, line ")
        return
    again = Table.parse(table.text())
    assert again.text() == table.text() and len(again.entries) == len(table.entries)
    for m in (1, 4096, 1 << 40):
        look(table, m)


@given(st.lists(CELLS, max_size=20))
@settings(max_examples=100, deadline=None)
def test_results_of_any_kind_are_read_or_refused(cells: list[str]) -> None:
    header, *rows = RESULTS.splitlines()
    changed = [",".join([*cells, *row.split(",")[len(cells) :]]) for row in rows]
    for lines in ([header, *rows[:2], *changed], [",".join(cells), *rows], [header, *changed]):
        try:
            read_results("\n".join(lines), "mine.csv")
        except InvalidTable as error:
            assert str(error).startswith("mine.csv, line ")


def test_buckets_are_half_octaves_and_the_last_one_is_open() -> None:
    assert [bucket(m) for m in (1, 2, 3, 4, 16, 1024, 4096)] == [0, 2, 3, 4, 8, 20, 24]
    # sqrt(2) * 4096 = 5792.6; the bucket ends half way, at 2^(12 + 1/4) = 4870.99.
    assert (bucket(4870), bucket(4871), bucket(5793)) == (24, 25, 25)
    assert bucket(16384) == bucket(1 << 20) == LAST_BUCKET


def test_what_was_measured_is_exact() -> None:
    table = Table([ENTRY, entry(m=4097, tile_us=130.0)])
    measured = look(table, 4096)
    assert measured is not None and measured.exact
    assert measured.ratio == {"library": 1.0, "chunked": 0.9, "tile": 0.8}
    assert measured.text == "library 100 us, chunked 90 us, tile 80 us"


@pytest.mark.parametrize("other", [{"gpu": "other"}, {"world": 2}, {"dtype": "float16"}, {"op": "all_gather_matmul"}])
def test_other_machines_and_ops_say_nothing(other: dict[str, object]) -> None:
    assert look(Table([entry(**other)]), 4096) is None


def test_rows_of_one_bucket_count_as_their_worst() -> None:
    table = Table([ENTRY, entry(m=4200, tile_us=110.0)])
    measured = look(table, 4100)
    assert measured is not None and not measured.exact
    assert measured.ratio["tile"] == 1.1


def test_between_two_buckets() -> None:
    table = Table([entry(m=1024, tile_us=100.0), entry(m=4096, tile_us=80.0)])
    assert tile(table, 2048) == pytest.approx(0.9)
    apart = Table([entry(m=256, tile_us=100.0), entry(m=4096, tile_us=80.0)])
    assert tile(apart, 2048) == 1.0, "far apart, the worse one"
    assert tile(Table([entry(m=1), entry(m=4096)]), 64) is None, "too far apart"


def test_outside_of_all_buckets() -> None:
    assert tile(Table([ENTRY]), 8192) == 0.8
    assert tile(Table([ENTRY]), 2048) == 0.8
    assert tile(Table([ENTRY]), 16384) is None and tile(Table([ENTRY]), 1024) is None
    assert tile(Table([entry(m=16384)]), 1 << 20) == 0.8


def test_the_nearest_weight_within_half_an_octave() -> None:
    table = Table([entry(n=4096, k=3584, tile_us=50.0), ENTRY])
    assert tile(table, 4096, 7168, 7168) == 0.8
    assert tile(table, 4096, 4096, 4096) == 0.5
    assert tile(table, 4096, 8192, 3584) is None
    wide, narrow = entry(n=10000), entry(n=9000, tile_us=60.0)
    assert tile(Table([wide, narrow]), 4096, n=9400) == 0.6


def test_a_weight_that_says_nothing_gives_way_to_the_next() -> None:
    table = Table([entry(n=8000, m=16), entry(n=7000, tile_us=60.0)])
    assert tile(table, 4096) == 0.6


def test_each_mode_has_its_own_times() -> None:
    table = Table([ENTRY, entry(graph=1, tile_us=None, chunked_us=120.0)])
    for m in (4096, 4097):
        eager, captured = look(table, m), look(table, m, graph=True)
        assert eager is not None and eager.ratio == {"library": 1.0, "chunked": 0.9, "tile": 0.8}
        assert captured is not None and captured.ratio == {"library": 1.0, "chunked": 1.2}


def test_the_other_mode_counts_where_nothing_else_was_measured() -> None:
    eager, captured = Table([ENTRY]), Table([entry(graph=1)])
    for m in (4096, 4097):
        assert look(eager, m, graph=True) == look(eager, m) is not None
        assert look(captured, m) == look(captured, m, graph=True) is not None


RESULTS = """bench,op,contestant,shape,dtype,world,graph,p20_us,p50_us,p80_us,skew_pct,limit_us,gpu,torch,triton,commit,date
g,matmul_all_reduce,ditron:library,M=4096;N=8192;K=7168,bfloat16,4,0,99,100,101,1,,GPU,2.11,3.6,abc,2026-01-31
g,matmul_all_reduce,ditron:chunked,M=4096;N=8192;K=7168,bfloat16,4,0,89,90,91,1,,GPU,2.11,3.6,abc,2026-01-31
g,matmul_all_reduce,ditron:tile,M=4096;N=8192;K=7168,bfloat16,4,0,79,80,81,1,,GPU,2.11,3.6,abc,2026-01-31
g,matmul_all_reduce,ditron,M=4096;N=8192;K=7168,bfloat16,4,0,79,80,81,1,,GPU,2.11,3.6,abc,2026-01-31
g,matmul_all_reduce,nccl,M=4096;N=8192;K=7168,bfloat16,4,0,79,80,81,1,,GPU,2.11,3.6,abc,2026-01-31
"""


def test_results_become_entries() -> None:
    assert read_results(RESULTS) == [ENTRY]


def test_the_library_itself_stands_for_the_strategy_library() -> None:
    lines = RESULTS.splitlines()
    del lines[1]
    assert read_results("\n".join(lines)) == [entry(library_us=80.0)]


def test_results_of_another_run_or_a_failure_are_left_out() -> None:
    lines = RESULTS.splitlines()
    lines[2] = lines[2].replace("89,90,91", ",,")
    assert read_results("\n".join(lines)) == [entry(chunked_us=None)]
    lines[3] = lines[3].replace("abc", "def")
    assert read_results("\n".join(lines)) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [("GPU", "G" * 200_000), (",4,0,", ",zero,0,"), ("M=4096;N=8192", "M;N"), (",99,100,", ",99,1e-320,")],
)
def test_broken_results_are_named(old: str, new: str) -> None:
    assert old in RESULTS
    with pytest.raises(InvalidTable, match="gemm.csv, line"):
        read_results(RESULTS.replace(old, new), "gemm.csv")


def test_results_of_no_ranks() -> None:
    text = RESULTS.replace("matmul_all_reduce", ULYSSES_KINDS[0]).replace("bfloat16,4", "bfloat16,0")
    with pytest.raises(InvalidTable, match="gemm.csv, line"):
        read_results(text, "gemm.csv")


def test_results_with_another_shape_are_left_out_and_a_bad_one_is_named() -> None:
    assert read_results(RESULTS.replace("K=7168", "K=7168;B=2")) == []
    with pytest.raises(InvalidTable, match="gemm.csv, line 2: .*'many'"):
        read_results(RESULTS.replace("M=4096", "M=many"), "gemm.csv")
    with pytest.raises(InvalidTable, match="the columns p50_us are missing"):
        read_results(RESULTS.replace("p50_us", "median"))


def test_the_shipped_tables_read_back_and_are_in_their_written_form() -> None:
    paths = sorted(FOLDER.glob("*.csv"))
    assert paths
    for path in paths:
        text = path.read_text()
        assert Table.parse(text, path.name).text() == text
    assert len(shipped().entries) == sum(len(path.read_text().splitlines()) - 1 for path in paths)
