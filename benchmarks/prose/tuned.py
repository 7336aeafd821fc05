"""The claims of docs/tuning.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from benchmarks.comparison import Comparison, comparisons
from benchmarks.models.tables import contests
from benchmarks.prose.claims import Claim, ends, faster, numbers, percent
from benchmarks.prose.picked import TWO_H200S, Results, pick, time_of
from benchmarks.records import Row, grouped
from benchmarks.trying import UNTABLED

ONE_LOOK, TWO_LOOKS, APART = "48475490", "8ba5d0a5", "5218235d"
"""The commits of the runs of 2048 rows by trials of one look and of two, and of those of 8192 rows."""
REMOVED = (
    ("Llama 8B x 4, sequence parallel", "llama3-8b", 4, "sp"),
    ("Llama 8B x 4, all-reduces", "llama3-8b", 4, "ar"),
    ("Llama 70B x 2, sequence parallel", "llama3-70b", 2, "sp"),
    ("Qwen3 32B x 2, sequence parallel", "qwen3-32b", 2, "sp"),
)
"""The lines of the table of prompts on H100s."""
REDUCE, SCATTER = "matmul_all_reduce", "matmul_reduce_scatter"
HARD, NARROW, WIDE = "2048 x 5120 x 12800", "2048 x 4096 x 2048", "2048 x 16384 x 26624"
CLOSE = 0.02
NEAR = (0.98, 1.01)
"""Between these a time without the table over that with it is no difference."""
Cells = dict[tuple[str, str], Comparison]
"""By op and shape."""


def tuning(results: Results) -> list[Claim]:
    """Returns the claims of docs/tuning.md."""
    return [
        *without_table(results.removed),
        *looks(*(_at(results.gemm, commit) for commit in (ONE_LOOK, TWO_LOOKS))),
        *later(results),
        *experts(results.moe),
    ]


def _at(gemm: Iterable[Row], commit: str) -> Cells:
    """Returns the matmuls that were measured at a commit with 2048 rows or more."""
    found = comparisons(row for row in gemm if row.commit == commit)
    return {(cell.op, cell.shape): cell for cell in found if cell.M >= 2048}


def ratio(cell: Comparison, below: str = "ditron") -> float:
    """Time of the best rival / time of Ditron."""
    found = cell.ratio(cell.best_rival, below)
    assert found is not None
    return found


def us(cell: Comparison, name: str = "ditron") -> float:
    found = cell.us(name)
    assert found is not None
    return found


def without_table(removed: Sequence[Row]) -> list[Claim]:
    """Returns a claim for each line of the table of prompts with the shipped table and without it."""
    found = []
    for name, model, layers, form in REMOVED:
        shape = f"model={model};layers={layers};form={form};batch=2;tokens=4096"
        runs = [pick(removed, "prefill", shape, run, gpu="H100", graph=0) for run in (0, 1)]
        pairs = zip(runs, ("ditron", UNTABLED), strict=True)
        times = [time_of(one, contestant) for one, ours in pairs for contestant in (ours, "inductor")]
        found.append(Claim(f"| {name} | {{}}, {{}} | {{}}, {{}} |", numbers(times, 2, 1e3)))
    return found


def looks(one: Cells, two: Cells) -> list[Claim]:
    """Returns the claims on trials of one look and of two, with 2048 rows."""

    def both(op: str, shape: str) -> tuple[str, ...]:
        return numbers([ratio(cells[op, shape]) for cells in (one, two)], 2)

    tables = {key: us(cell, UNTABLED) / us(cell) for key, cell in two.items()}
    near = [value for value in tables.values() if NEAR[0] <= round(value, 2) <= NEAR[1]]
    others = [key for key in two if key not in SHOWN]
    changes = {key: ratio(two[key]) / ratio(one[key]) for key in others}
    (apart,) = (key for key in others if abs(changes[key] - 1) > CLOSE)
    most = max((changes[key] for key in others if key != apart), key=lambda change: abs(change - 1))
    hard, wide, narrow = two[REDUCE, HARD], two[SCATTER, WIDE], two[SCATTER, NARROW]
    wide_once, narrow_once = one[SCATTER, WIDE], one[SCATTER, NARROW]
    large = [us(one[REDUCE, WIDE]), us(one[REDUCE, WIDE], UNTABLED), us(two[REDUCE, WIDE])]
    return [
        Claim(f"| all-reduce, {HARD} | two-shot | {{}} | {{}} |", both(REDUCE, HARD)),
        Claim(
            f"| all-reduce, {NARROW} | two-shot | {{}}~ | {{}} | by one look {{}} us with the table, and {{}} without",
            (*both(REDUCE, NARROW), *numbers([us(one[REDUCE, NARROW], name) for name in ("ditron", UNTABLED)])),
        ),
        Claim(f"| all-reduce, {WIDE} | two-shot | {{}}~ | {{}} |", both(REDUCE, WIDE)),
        Claim("{} us with the table and {} without it; two looks take {}", numbers(large)),
        Claim(
            f"| reduce-scatter, {WIDE} | async TP | {{}} without the table, {{}} with it | {{}} |",
            numbers([ratio(wide_once, UNTABLED), ratio(wide_once), ratio(wide)], 2),
        ),
        Claim(f"| reduce-scatter, {NARROW} | NCCL | {{}} | {{}} |", both(SCATTER, NARROW)),
        Claim("both times, {} and {} us: in the later run", numbers([us(narrow_once), us(narrow)])),
        Claim(
            "with it was {} to {} in {} of {} cells by two looks",
            (*numbers(ends(near), 2), str(len(near)), str(len(tables))),
        ),
        Claim(
            "{} in the host's cell and {} in the larger reduce-scatter",
            numbers([tables[SCATTER, NARROW], tables[SCATTER, WIDE]], 2),
        ),
        Claim(
            "The ratios of the other {} cells differ by {} % at most, but for one reduce-scatter ({} and {})",
            (str(len(others)), percent(most), *both(*apart)),
        ),
        Claim("so `library` runs, at {} us, where two-shot takes {}", numbers([us(hard), us(hard, hard.best_rival)])),
    ]


SHOWN = {(REDUCE, HARD), (REDUCE, NARROW), (REDUCE, WIDE), (SCATTER, WIDE), (SCATTER, NARROW)}
"""The cells that the table of looks has."""


def later(results: Results) -> list[Claim]:
    """Returns the claims on runs with 8192 rows, on a slow moment of the host, on captures and on whole layers."""
    cells = [cell for cell in _at(results.gemm, APART).values() if cell.M == 8192 and not cell.graph]
    alone = {cell: {row.contestant: row for row in rows} for cell, rows in grouped(results.removed).items()}
    same = []
    for cell in cells:
        rows = alone[next(iter(cell.rows.values())).cell]
        theirs, ours = rows["nccl"].p50_us or 0.0, rows[UNTABLED].p50_us or 1.0
        same.append(abs(us(cell, "nccl") / us(cell) / (theirs / ours) - 1) <= CLOSE)
    slow, now = (_at(results.gemm, commit)[SCATTER, HARD] for commit in (APART, TWO_LOOKS))
    captured = pick(results.gemm, REDUCE, "M=128;N=4096;K=7168", "a5f078ff")
    times = [time_of(captured), time_of(captured, UNTABLED)]
    whole = [gain for one in contests(results.models) if one.where == TWO_H200S and (gain := one.best_gain)]
    return [
        Claim("within 2 % in {} of {} cells", (str(sum(same)), str(len(same)))),
        Claim(
            "took {} us so, at {} of its best rival, and takes {} now, at {}",
            (*numbers([us(slow)]), *numbers([ratio(slow)], 2), *numbers([us(now)]), *numbers([ratio(now)], 2)),
        ),
        Claim("that takes {} in a CUDA graph", numbers(times[:1])),
        Claim("and captures ran by the library, with {}.", numbers(times[1:])),
        Claim(
            "no cell is below {}](model_cells.md) of its best rival", numbers([math.floor(100 * min(whole))], 2, 100)
        ),
    ]


def experts(moe: Sequence[Row]) -> list[Claim]:
    """Returns the claims on experts of Mixtral, whose trials kept `library`."""
    shape, tile, library = "model=mixtral-8x7b;T=8192;routing=uniform", "ditron:tile", "ditron:library"
    runs = {
        (op, commit): pick(moe, f"grouped_{op}", shape, commit, graph=0)
        for op, commit in (
            *((op, commit) for op in (REDUCE, SCATTER) for commit in ("060e53b", "ff2ab660")),
            *((REDUCE, TWO_LOOKS), (SCATTER, "237c5b29")),
        )
    }
    first = [runs[op, "060e53b"] for op in (REDUCE, SCATTER)]
    gains = [time_of(one) / time_of(one, tile) for one in first]
    found = [Claim("in which `tile` was {} and {} % faster", tuple(map(faster, gains)))]
    texts = (
        (REDUCE, "ff2ab660", "kept `library` by one look ({} us, where `tile` took {})", tile),
        (REDUCE, TWO_LOOKS, "takes `tile` by two: {} us, where `library` takes {} in the same run", library),
        (SCATTER, "ff2ab660", "kept `library` by one look ({} us, `tile` {})", tile),
        (SCATTER, "237c5b29", "it takes `tile` too: {} us, where `library` takes {}.", library),
    )
    for op, commit, text, other in texts:
        one = runs[op, commit]
        found.append(Claim(text, numbers([time_of(one), time_of(one, other)])))
    return found
