"""The mutations of what measures and reports: timing, the gate of whole models, the files of results."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TIMING = "benchmarks/timing.py"
GATE = "benchmarks/models/gate.py"
RECORDS = "benchmarks/records.py"
INTERLEAVED = "tests/test_interleaved.py"
TOLERANCES = "tests/test_gate.py::test_tolerances_come_from_eager_s_distance"

MEASURING: tuple[Mutation, ...] = (
    Mutation(
        "a row is the fastest rank's",
        TIMING,
        "slowest, fastest = by_median[-1], by_median[0]",
        "slowest, fastest = by_median[0], by_median[-1]",
        f"{INTERLEAVED}::test_the_slowest_rank_counts",
    ),
    Mutation(
        "all rounds have one order",
        TIMING,
        "            shuffle.shuffle(order)\n",
        "",
        f"{INTERLEAVED}::test_every_round_has_a_new_order_which_all_ranks_have",
    ),
    Mutation(
        "each rank has its own order",
        TIMING,
        "shuffle = random.Random(0)",
        "shuffle = random.Random(dist.get_rank())",
        f"{INTERLEAVED}::test_every_round_has_a_new_order_which_all_ranks_have",
    ),
    Mutation(
        "rounds end when one rank has settled",
        TIMING,
        "unsettled, elapsed = clock.largest([error, time.monotonic() - begun])",
        "unsettled, elapsed = error, time.monotonic() - begun",
        f"{INTERLEAVED}::test_rounds_end_when_all_ranks_have_settled",
    ),
    Mutation(
        "garbage is collected in samples",
        TIMING,
        "    gc.disable()\n",
        "",
        f"{INTERLEAVED}::test_no_garbage_is_collected_in_a_sample",
    ),
    Mutation(
        "the parts of layers are not compared",
        "benchmarks/models/run.py",
        'if not problem and cell.phase != "training":',
        'if not problem and cell.phase == "none":',
        "tests/test_gate.py::test_a_fault_in_one_part_fails_the_row",
    ),
    Mutation(
        "the mean row of a part counts",
        GATE,
        "difference = (got.to(rows.dtype) - rows).norm(dim=-1).max()",
        "difference = (got.to(rows.dtype) - rows).norm(dim=-1).mean()",
        "tests/test_gate.py::test_the_worst_row_counts",
    ),
    Mutation(
        "eager's distance is that of the best rank",
        GATE,
        "max(of_rank[name] for of_rank in everyone)",
        "min(of_rank[name] for of_rank in everyone)",
        TOLERANCES,
    ),
    Mutation(
        "nothing bounds a tolerance",
        GATE,
        "return rounding if _is_gradient(name) else min(rounding, MOST[self._dtype])",
        "return rounding",
        TOLERANCES,
    ),
    Mutation(
        "the scores of attention are nearly equal",
        "benchmarks/models/forms.py",
        "PEAK = 3.0",
        "PEAK = 0.03",
        "tests/test_gate.py::test_attention_has_weight",
    ),
    Mutation(
        "a newer run takes the place of the older one",
        RECORDS,
        "cells[cell] = [*cells.get(cell, []), *ordered]",
        "cells[cell] = ordered",
        "tests/test_results.py::test_a_newer_run_stands_behind_the_older_one",
    ),
    Mutation(
        "reports take the oldest run",
        RECORDS,
        "runs(lines)[-1]",
        "runs(lines)[0]",
        "tests/test_results.py::test_a_newer_run_stands_behind_the_older_one",
    ),
    Mutation(
        "a mean says how many rows there are, not how many it has",
        "benchmarks/report.py",
        """number = f"{len(ratios)} row{'s' * (len(ratios) > 1)}\"""",
        """number = f"{len(here)} row{'s' * (len(here) > 1)}\"""",
        "tests/test_results.py::test_a_mean_says_how_many_rows_it_has",
    ),
    Mutation(
        "what a timing has spoilt keeps its time",
        "benchmarks/models/run.py",
        "                del times[name]\n",
        "",
        "tests/test_gate.py::test_a_fault_that_comes_with_the_timing_fails_the_row",
    ),
)
