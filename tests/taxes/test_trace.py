"""In-kernel time stamps: in no kernel that was not asked for them, bounded in number, drawn by rank and SM."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from ditron_inductor import lowering
from ditron_inductor.core import layout, trace
from ditron_inductor.lowering import config
from ditron_inductor.lowering.all_reduce_rms_norm.norm_kernel import all_reduce_rms_norm_kernel
from ditron_inductor.lowering.flash_decode.decode_in_band import flash_decode_in_band_kernel
from ditron_inductor.lowering.flash_decode.tile import flash_decode_kernel
from ditron_inductor.lowering.host.tracing import TraceBuffer, clock_of, takes_part
from ditron_inductor.lowering.matmul_all_gather import few_rows
from ditron_inductor.lowering.norms.stage_norm import stage_norm
from ditron_inductor.taxes.step_trace import LANES, Alignment, Event, RankTrace, Trace
from tests.lowering import (
    test_attention_compile,
    test_chunked_compile,
    test_decode_compile,
    test_in_band_compile,
    test_norm_compile,
)
from tests.lowering.cross_compile import CLOCKS, Case, compile_case

TRACED = {
    "all_gather_attention.tile.all_gather_attention_kernel",
    "norms.stage_norm.stage_norm",
    "all_gather_matmul.tile.all_gather_matmul_kernel",
    "all_reduce_rms_norm.norm_in_band.in_band_kernel",
    "all_reduce_rms_norm.norm_kernel.all_reduce_rms_norm_kernel",
    "all_to_all_matmul.tile.all_to_all_matmul_kernel",
    "flash_decode.decode_in_band.flash_decode_in_band_kernel",
    "flash_decode.tile.flash_decode_kernel",
    "matmul_all_gather.few_rows.matmul_all_gather_kernel",
    "matmul_all_gather.many_rows.matmul_all_gather_kernel",
    "all_reduce.all_reduce_kernel.all_reduce_kernel",
    "matmul_all_reduce.one_shot.matmul_all_reduce_kernel",
    "matmul_all_reduce.two_shot.matmul_all_reduce_kernel",
    "matmul_all_to_all.tile.matmul_all_to_all_kernel",
    "matmul_reduce_scatter.tile.matmul_reduce_scatter_kernel",
    "transfers.await_all",
    "transfers.await_pieces",
    "transfers.close_slot",
    "transfers.open_slot",
    "transfers.publish_pieces",
    "transfers.reduce_partials",
    "transfers.stage",
    "expert_sums.reduced_kernel.reduced_experts_kernel",
}
"""All kernels that have a slot, by where they are in `lowering`."""
PARAMETER = re.compile(r"\.param ")


Assembly = Callable[[int], str]
"""Of a kernel that reads this clock, or none where it is 0."""


def _of_matmul(case: Case) -> tuple[str, str, Assembly]:
    """(name, target, assembly)."""
    return str(case), case.target, lambda clock: compile_case(replace(case, trace=clock)).assembly


def _of_chunked(name: str, target: str) -> tuple[str, str, Assembly]:
    return f"{name}-{target}", target, lambda clock: test_chunked_compile.compiled(name, target, trace=clock)[0]


def _of(module: Any, kernel: Any, case: Any) -> tuple[str, str, Assembly]:
    """kernel: None where the module has one only."""
    name = "" if kernel is None else f"{kernel.fn.__name__}-"

    def assembly(clock: int) -> str:
        timed = replace(case, trace=clock)
        found = module.compiled(timed) if kernel is None else module.compiled(kernel, timed)
        return found.asm["ptx" if case.target.startswith("sm_") else "amdgcn"]

    return f"{module.__name__.split('.')[-1].removeprefix('test_')}-{name}{case}", case.target, assembly


_norm = partial(_of, test_norm_compile, all_reduce_rms_norm_kernel)
_decode = partial(_of, test_decode_compile, flash_decode_kernel)
_in_band = partial(_of, test_decode_compile, flash_decode_in_band_kernel)
_of_few_rows = few_rows.select_tiles(rows=64, dtype=torch.bfloat16, interpreted=False)

CASES = [
    _of_matmul(Case("matmul_reduce_scatter", "sm_90", config.DECODE, "bf16", descriptors=True)),
    _of_matmul(Case("matmul_reduce_scatter", "gfx950", config.DECODE, "bf16")),
    _of_matmul(Case("one_shot", "sm_90", config.FEW_ROWS[16], "bf16")),
    _of_chunked("await_pieces", "gfx942"),
    _of_chunked("reduce_partials", "sm_90"),
    _norm(test_norm_compile.Case("sm_90", True, 4096)),
]
# Compilers are slow, and these differ in nothing that they would trip over.
TRACED_CHUNKED = [name for name, (kernel, *_) in test_chunked_compile.KERNELS.items() if takes_part(kernel)]
MORE_CASES = [
    _decode(test_decode_compile.Case("sm_90", 128, one_each=True)),
    _of_chunked("await_pieces", "sm_90"),
    _of_matmul(Case("all_gather_matmul", "sm_90", config.DECODE, "bf16", descriptors=True)),
    _of_matmul(Case("all_gather_matmul", "gfx950", config.DECODE, "bf16")),
    _of_matmul(Case("two_shot", "sm_90", config.LARGE, "bf16", descriptors=True)),
    _of_matmul(Case("two_shot", "gfx942", config.LARGE, "bf16")),
    *(
        _of_chunked(name, "sm_90")
        for name in TRACED_CHUNKED
        if name not in ("await_pieces", "reduce_partials")
    ),
    *(_of_chunked(name, "gfx942") for name in TRACED_CHUNKED if name != "await_pieces"),
    *(
        _norm(test_norm_compile.Case(target, one_shot, 4096, slices=slices))
        for target in ("sm_90", "gfx942")
        for one_shot, slices in ((True, 1), (False, 1), (False, 4))
        if (target, one_shot) != ("sm_90", True)
    ),
    *(_of(test_norm_compile, stage_norm, test_norm_compile.Case(target, True, 4096)) for target in ("sm_90", "gfx942")),
    *(_of(test_in_band_compile, None, test_in_band_compile.Case(target, 4096)) for target in ("sm_90", "gfx942")),
    _decode(test_decode_compile.Case("sm_90", 128, group=8)),
    _decode(test_decode_compile.Case("sm_90", 128, attended=True)),
    _decode(test_decode_compile.Case("gfx942", 128, shared_flags=True)),
    *(_in_band(test_decode_compile.Case(target, 128)) for target in ("sm_90", "gfx942")),
    *(
        _of(test_attention_compile, None, case)
        for case in test_attention_compile.CASES
        if case.gathered and case.target in ("sm_90", "gfx942")
    ),
    *(
        _of_matmul(case)
        for target in ("sm_90", "gfx942")
        for case in (
            Case("gathered", target, config.LARGE, "bf16", descriptors=target == "sm_90"),
            Case("gathered_few", target, _of_few_rows, "bf16"),
            Case("scattered_columns", target, config.LARGE, "bf16", descriptors=target == "sm_90"),
            Case("scattered_rows", target, config.LARGE, "bf16", descriptors=target == "sm_90"),
        )
    ),
]


@pytest.mark.parametrize(
    ("target", "assembly"),
    [
        *(pytest.param(target, assembly, id=name) for name, target, assembly in CASES),
        *(
            pytest.param(target, assembly, id=name, marks=pytest.mark.all_cases)
            for name, target, assembly in MORE_CASES
        ),
    ],
)
def test_only_a_traced_kernel_reads_a_clock(target: str, assembly: Assembly) -> None:
    plain = assembly(0)
    assert not re.search(CLOCKS, plain)
    clock = clock_of(target)
    assert clock is not None
    traced = assembly(clock)
    # The way in and out of what is seen, at least, and where it was.
    on_nvidia = target.startswith("sm_")
    assert len(re.findall("globaltimer" if on_nvidia else "s_memrealtime", traced)) >= 2
    assert re.search("smid" if on_nvidia else "HW_REG_XCC_ID", traced)
    # Its launch is the same.
    assert len(PARAMETER.findall(plain)) == len(PARAMETER.findall(traced))


def test_a_traced_tile_takes_no_more_shared_memory() -> None:
    case = Case("matmul_reduce_scatter", "sm_90", config.DECODE, "bf16", descriptors=True)
    assert compile_case(case).shared_bytes == compile_case(replace(case, trace=1)).shared_bytes


def _kernels() -> dict[str, Any]:
    """All that are launched with a slot."""
    found = {}
    for module in pkgutil.walk_packages(lowering.__path__, f"{lowering.__name__}."):
        for name, kernel in vars(importlib.import_module(module.name)).items():
            if isinstance(kernel, JITFunction) and kernel.fn.__module__ == module.name:
                if {"pointers", "rank"} <= set(kernel.arg_names):
                    found[f"{module.name.removeprefix(f'{lowering.__name__}.')}.{name}"] = kernel
    return found


def test_who_takes_part() -> None:
    kernels = _kernels()
    assert set(kernels) == TRACED and all(takes_part(kernel) for kernel in kernels.values())
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


def test_launches_of_one_use_have_rows_of_their_own() -> None:
    """On one SM: a wait beside what tells the peers, and the program of that number of a larger launch."""
    send, total = int(trace.SEND.value), int(trace.SUM.value)
    events = (
        Event(WAIT, USE, 0, 3, 0, 1, 1000.0, 3000.0),
        Event(send, USE, 0, 3, 0, 1, 2000.0, 4000.0),
        Event(total, USE, 0, 3, 0, 0, 2500.0, 5000.0, 64),
    )
    taken = Trace((RankTrace(0, events, {SITE: "ab12/0:site"}, Alignment(), 0),))
    rows = [row["tid"] for row in taken.json()["traceEvents"] if row["ph"] == "X" and row["tid"]]
    assert len(set(rows)) == 3 and {row // LANES for row in rows} == {3}
    # One program waited for 2 us; nobody of the larger launch.
    assert taken.waited_us() == {"ab12/0:site": 2.0}
