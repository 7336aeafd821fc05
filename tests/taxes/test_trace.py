"""In-kernel time stamps: in no kernel that was not asked for them, bounded in number, drawn by rank and SM."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ditron_inductor.core import layout, trace
from ditron_inductor.lowering import config
from ditron_inductor.lowering.tracing import TraceBuffer, clock_of, takes_part
from ditron_inductor.taxes.trace import LANES, Alignment, Event, RankTrace, Trace
from tests.lowering.cross_compile import CLOCKS, KERNELS, Case, compile_case

TRACED = ("all_gather_matmul", "matmul_reduce_scatter", "one_shot", "two_shot")
PARAMETER = re.compile(r"\.param ")


CASES = [
    Case("matmul_reduce_scatter", "sm_90", config.DECODE, "bf16", descriptors=True),
    Case("matmul_reduce_scatter", "gfx950", config.DECODE, "bf16"),
    Case("one_shot", "sm_90", config.FEW_ROWS[16], "bf16"),
    # Compilers are slow, and these differ in nothing that they would trip over.
    pytest.param(
        Case("all_gather_matmul", "sm_90", config.DECODE, "bf16", descriptors=True), marks=pytest.mark.all_cases
    ),
    pytest.param(Case("all_gather_matmul", "gfx950", config.DECODE, "bf16"), marks=pytest.mark.all_cases),
    pytest.param(Case("two_shot", "sm_90", config.LARGE, "bf16", descriptors=True), marks=pytest.mark.all_cases),
    pytest.param(Case("two_shot", "gfx942", config.LARGE, "bf16"), marks=pytest.mark.all_cases),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_only_a_traced_kernel_reads_a_clock(case: Case) -> None:
    plain = compile_case(case)
    assert not re.search(CLOCKS, plain.assembly)
    clock = clock_of(case.target)
    assert clock is not None
    traced = compile_case(replace(case, trace=clock))
    # The way in and out of a tile and of a wait, at least, and where they were.
    on_nvidia = case.target.startswith("sm_")
    assert len(re.findall("globaltimer" if on_nvidia else "s_memrealtime", traced.assembly)) >= 4
    assert re.search("smid" if on_nvidia else "HW_REG_XCC_ID", traced.assembly)
    # Its launch is the same: arguments and shared memory.
    assert len(PARAMETER.findall(plain.assembly)) == len(PARAMETER.findall(traced.assembly))
    assert plain.shared_bytes == traced.shared_bytes


def test_who_takes_part() -> None:
    assert {name for name, kernel in KERNELS.items() if takes_part(kernel)} == set(TRACED)
    assert clock_of("gfx1100") is None and clock_of("interpreter") == trace.INTERPRETED.value


def test_a_full_buffer_counts_what_it_has_no_place_for() -> None:
    buffer = TraceBuffer(torch.device("cpu"), 2)
    words = buffer.words
    words[layout.EVENTS_COUNT.value] = 5
    words[layout.EVENTS.value :] = torch.arange(2 * layout.EVENT_WORDS.value)
    events, dropped = buffer.take()
    assert dropped == 3 and events.tolist() == [list(range(8)), list(range(8, 16))]
    buffer.clear()
    events, dropped = buffer.take()
    assert dropped == 0 and not len(events) and int(words[layout.EVENTS_CAPACITY.value]) == 2


SITE = 7
USE = SITE << layout.EPOCH_BITS.value | 3
TILE, WAIT, CREDITS = (int(kind.value) for kind in (trace.TILE, trace.WAIT, trace.CREDITS))


def made_up() -> Trace:
    """Two ranks; on the first one two programs share an SM."""
    events = (
        Event(TILE, USE, 0, 5, 11, 1, 1000.0, 5000.0, 2),
        Event(WAIT, USE, 0, 5, 2, 1, 1500.0, 2500.0, 2),
        Event(CREDITS, USE, 0, 5, 11, 0, 2500.0, 3500.0, 2),
        Event(TILE, USE, 132, 5, 12, 1, 1000.0, 4000.0, 2),
    )
    late = (Event(TILE, USE, 0, 0, 11, 0, 3000.0, 6000.0),)
    sites = {SITE: "ab12/0:all_gather_matmul all_gather_matmul[8x16] bfloat16"}
    return Trace(
        (RankTrace(0, events, sites, Alignment(error_ns=4000.0), 0), RankTrace(1, late, sites, Alignment(), 9))
    )


def test_the_ranks_are_merged_by_sm(tmp_path: Path) -> None:
    made_up().save(tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())
    rows = found["traceEvents"]
    names = {(row["pid"], row["tid"]): row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    first = 1 + 5 * LANES
    assert names == {
        (0, 0): "sites",
        (0, first): "SM 5",
        (0, first + 1): "SM 5, program 2",
        (1, 0): "sites",
        (1, 1): "SM 0",
    }
    spans = [(row["name"], row["pid"], row["tid"], row["ts"], row["dur"]) for row in rows if row["ph"] == "X"]
    assert spans == [
        ("tile", 0, first, 0.0, 4.0),
        ("wait", 0, first, 0.5, 1.0),
        ("wait for credits", 0, first, 1.5, 1.0),
        ("tile", 0, first + 1, 0.0, 3.0),
        ("ab12/0:all_gather_matmul", 0, 0, 0.0, 4.0),
        ("tile", 1, 1, 2.0, 3.0),
        ("ab12/0:all_gather_matmul", 1, 0, 2.0, 3.0),
    ]
    assert found["otherData"]["ranks are aligned to within us"] == {"0": 4.0, "1": 0.0}
    assert found["otherData"]["events dropped"] == {"0": 0, "1": 9}


def test_a_site_waits_as_long_as_its_programs_do_on_average() -> None:
    # Two programs, one of which waited twice for a microsecond; on the other rank none.
    assert made_up().waited_us() == {"ab12/0:all_gather_matmul": 1.0}
