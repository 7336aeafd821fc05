"""The claims of docs/four_gpus.md."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.comparison import fastest_ratio
from benchmarks.floors import OF_ATTENTION
from benchmarks.models.tables import Contest, contests, limited
from benchmarks.ops.targets import SYMM_MEM
from benchmarks.prose.claims import Claim, faster, numbers, slower
from benchmarks.prose.picked import COPY, Results, pick, time_of
from benchmarks.records import Row

WORLD = 4
GPUS = ("H200", "H100")
TOKENS = (8192, 16384)
HEADS = (32, 64)


def four_gpus(results: Results) -> list[Claim]:
    """Returns the claims of docs/four_gpus.md."""
    return [*reductions(results.gemm), *prompts(results.models), *attention(results.attention)]


def reductions(gemm: Sequence[Row]) -> list[Claim]:
    """Returns the claims on all-reduces of few rows."""
    few, more = (
        pick(gemm, "matmul_all_reduce", f"M={rows};N=4096;K=3584", world=WORLD) for rows in (64, 128)
    )  # fmt: skip
    row = pick(gemm, "matmul_all_reduce", "M=1;N=8192;K=7168", world=WORLD)
    reading = 2 * 8192 * 7168 / COPY["H200"]
    times = [time_of(one, name) for name in ("ditron", TWO_SHOT) for one in (few, more)]
    product = time_of(few, "gemm")
    behind = [time_of(few, name) - product for name in ("ditron", TWO_SHOT)]
    lost = [fastest_ratio(one.rows, SYMM_MEM, ("ditron",)) for one in (few, more)]
    return [
        Claim("rows of 4096 x 3584 Ditron takes {} and {} us, torch's kernel {} and {} us.", numbers(times, 1)),
        Claim("These two are lost by {} and {} %.", tuple(map(slower, lost))),
        Claim(
            "({} us with 64 rows), so that the reduction behind it takes {} us against {}.",
            numbers([product, *behind], 1),
        ),
        Claim(
            "x [7168, 8192] takes {} us, against {} us, of which reading the weight takes {} us",
            numbers([time_of(row), time_of(row, TWO_SHOT)], 1) + numbers([reading]),
        ),
        Claim("so it is {} % faster", (faster(row.gain(TWO_SHOT)),)),
    ]


TWO_SHOT = "symm_mem:two_shot"


def prompts(models: Sequence[Row]) -> list[Claim]:
    """Returns the claims on prompts of 2 x 4096 tokens beside the share of one rank alone."""
    known = [one for one in contests(limited(models)) if one.where[1] == WORLD and one.phase == "prefill"]
    narrow, wide = ([one for one in known if one.model == model] for model in ("llama3-8b", "llama3-70b"))
    text = (
        "one rank's share alone takes {} to {} ms in four layers of Llama 8B on H100s, Ditron {} to {} ms and "
        "Inductor {} to {} ms; in two layers of 70B they are {}, {} to {}, and {} ms"
    )
    (share, *_), ours, (theirs, *_) = _ends_of(wide)
    return [Claim(text, numbers([us for both in _ends_of(narrow) for us in both] + [share, *ours, theirs], 1, 1e3))]


def _ends_of(cells: Sequence[Contest]) -> list[tuple[float, float]]:
    """Returns the least and the most microseconds of the limit, of Ditron and of Inductor."""
    found = [
        [one.limit_us or 0.0 for one in cells],
        *([time_of(one, name) for one in cells] for name in ("ditron", "inductor")),
    ]
    return [(min(values), max(values)) for values in found]


def attention(rows: Sequence[Row]) -> list[Claim]:
    """Returns the claims on causal attention and on decode attention."""

    def causal(tokens: int, heads: int, gpu: str) -> Contest:
        shape = f"tokens={tokens};heads={heads};key_heads=8;head_dim=128;mask=causal_offset"
        return pick(rows, "all_gather_attention", shape, gpu=gpu, world=WORLD, graph=0)

    long, wide, narrow = causal(16384, 64, "H200"), causal(8192, 64, "H100"), causal(8192, 32, "H200")
    picked = [causal(8192, heads, gpu) for gpu in GPUS for heads in HEADS]
    gains = [fastest_ratio(one.rows, OF_ATTENTION, ("ditron:",)) for one in picked]
    ends = sorted(gain for gain in gains if gain is not None)
    read = pick(rows, "flash_decode", "B=32;T=65536;Hq=32;Hkv=8;D=128", "f812519", world=WORLD)
    rival = min(us for name in OF_ATTENTION if (us := long.us(name)))
    return [
        Claim(
            "the attention alone takes {} us, the best rival {} us and Ditron {} us",
            numbers([time_of(long, "local"), rival, time_of(long)]),
        ),
        Claim(
            "for 64 heads ({} us), where `chunked` takes {} us",
            numbers([time_of(wide), time_of(wide, "ditron:chunked")]),
        ),
        Claim(
            "picks `chunked` ({} us), where `tile` takes {} us",
            numbers([time_of(narrow), time_of(narrow, "ditron:tile")]),
        ),
        Claim("The best strategy of each cell is {} to {} % faster", (faster(ends[0]), faster(ends[-1]))),
        Claim("reading the cache takes {} us of {} us on", numbers([time_of(read, "read"), time_of(read)])),
    ]
