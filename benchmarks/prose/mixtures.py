"""The claims of docs/guide/mixture_of_experts.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.expert_floors import LEAST, is_judged, reading_us, short_name
from benchmarks.models.request import CONTESTANTS, OURS
from benchmarks.models.tables import Contest, contests
from benchmarks.prose.claims import Claim, numbers, span
from benchmarks.prose.picked import Results, pick, time_of
from benchmarks.records import Row

GPT, MIXTRAL, NARROW, WIDE, DEEPSEEK = "gpt-oss-120b", "mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3"
Cells = dict[tuple[str, str, int], Contest]
"""By GPU, model and number of tokens."""
WAYS = (
    ("Qwen3 30B | 2 x 4096", NARROW, 2, 4096),
    ("Qwen3 30B | 1 x 2048", NARROW, 1, 2048),
    ("Qwen3 235B | 2 x 4096", WIDE, 2, 4096),
    ("Qwen3 235B | 1 x 2048", WIDE, 1, 2048),
    ("GPT-OSS 120B | 2 x 4096", GPT, 2, 4096),
    ("Mixtral 8x7B | 2 x 4096", MIXTRAL, 2, 4096),
)
"""The lines of the table of ways to experts."""


def mixtures(results: Results) -> list[Claim]:
    """Returns the claims of docs/guide/mixture_of_experts.md."""
    judged = [one for one in contests(results.models) if is_judged(one)]
    cells = {(short_name(one), one.model, int(one.sizes["batch"])): one for one in judged}
    return [*floors_missed(cells), *over_reading(cells, results), *ways(results.models)]


def over(one: Contest) -> float:
    """How many times as long as reading a step takes."""
    return time_of(one) / reading_us(one)


def theirs(one: Contest) -> float:
    """How many times as long as reading the best rival takes."""
    return over(one) * (one.best_gain or 0.0)


def asked(one: Contest) -> float:
    """How many times the time of reading the floor over the best rival asks for."""
    return theirs(one) / LEAST[int(one.sizes["batch"])]


def per_layer(one: Contest, us: float) -> float:
    return us / int(one.sizes["layers"])


def missed(cells: Iterable[Contest]) -> list[Contest]:
    """Returns these cells. ValueError if the floor over the best rival is reached in one of them."""
    found = list(cells)
    for one in found:
        if asked(one) >= over(one):
            raise ValueError(f"the prose says that {one.label} misses a floor that it reaches: write the sentence anew")
    return found


def floors_missed(cells: Cells) -> list[Claim]:
    """Returns the claims on cells that miss the floor over the best rival."""
    alone = [one for (gpu, _, tokens), one in cells.items() if (gpu, tokens) == ("H100", 1)]
    single = missed(cells["H200", model, 1] for model in (MIXTRAL, DEEPSEEK))
    smaller = missed(cells["H100", *cell] for cell in ((DEEPSEEK, 8), (DEEPSEEK, 32), (WIDE, 32)))
    larger = ((DEEPSEEK, 8), (DEEPSEEK, 32), (WIDE, 32), (MIXTRAL, 32), (GPT, 32))
    many = missed(cells["H200", *cell] for cell in larger)
    eight = missed(cells["H200", model, 8] for model in (GPT, MIXTRAL, WIDE))
    return [
        Claim("Without it the best rivals take {} to {} times as long as Ditron on H100s", span(map(untuned, alone))),
        Claim(
            "the floor would ask for {} and {} times the time of reading, and Ditron takes {} and {} times as long",
            numbers([*map(asked, single), *map(over, single)], 2),
        ),
        Claim(
            "would ask for {}, {} and {} times the time of reading on H100s, and for {}, {}, {}, {} and {} on H200s",
            numbers([*map(asked, smaller), *map(asked, many)], 2),
        ),
        Claim(
            "Ditron takes {}, {} and {} times as long, and {}, {}, {}, {} and {}",
            numbers([*map(over, smaller), *map(over, many)], 2),
        ),
        Claim("The rival in Triton takes {}, {} and {} times as long as reading", numbers(map(theirs, eight), 2)),
        Claim(
            "The floor would ask for {}, {} and {} times, and Ditron takes {}, {} and {} times as long",
            numbers([*map(asked, eight), *map(over, eight)], 2),
        ),
    ]


def untuned(one: Contest) -> float | None:
    """How many times as long as Ditron the best rival without max-autotune takes."""
    names = [name for name in CONTESTANTS if name not in OURS and not name.startswith("max_autotune")]
    return min((gain for name in names if (gain := one.gain(name))), default=None)


def over_reading(cells: Cells, results: Results) -> list[Claim]:
    """Returns the claims on cells that miss the floor over reading."""
    read = [
        per_layer(one, reading_us(one))
        for one in (cells[gpu, model, 1] for model in (NARROW, GPT) for gpu in ("H200", "H100"))
    ]
    widest = cells["H200", WIDE, 1]
    shape = "model=qwen3-30b-a3b;T={};W=2;routing=uniform"
    few, many = (pick(results.moe, "expert_projections", shape.format(tokens), world=1) for tokens in (8, 32))
    step, row = cells["H200", NARROW, 8], cells["H100", NARROW, 1]
    rest = per_layer(step, time_of(step)) - time_of(few)
    routed = next(one for one in results.routers if one.contestant == "ditron" and one.shape == row.rows[0].shape)
    return [
        Claim(
            "A layer reads for {} or {}, {} or {}, and {} us", numbers([*read, per_layer(widest, reading_us(widest))])
        ),
        Claim(
            "a layer of Qwen3 30B takes {} us on H100s instead of {}.",
            numbers([per_layer(row, routed.p50_us or 0.0), per_layer(row, time_of(row))]),
        ),
        Claim("The experts of a layer take {} us [by themselves]", numbers([time_of(few)])),
        Claim("where reading them takes {}; the other {} us of a layer are two", numbers([few.limit_us or 0.0, rest])),
        Claim(
            "are read in two launches, at {} times the time of", numbers([time_of(many) / (many.limit_us or 1.0)], 2)
        ),
    ]


def ways(models: Sequence[Row]) -> list[Claim]:
    """Returns a claim for each line of the table of ways to experts, in milliseconds."""
    found = []
    for name, model, batch, tokens in WAYS:
        shape = f"model={model};layers=2;form=sp;batch={batch};tokens={tokens}"
        one = pick(models, "prefill", shape, "f6dbd8fe", gpu="H100", graph=0)
        us = [time_of(one, contestant) for contestant in ("dispatched", "inductor", "ditron")]
        found.append(Claim(f"| {name} | {{}} | {{}} | {{}} |", numbers(us, 2, 1e3)))
    return found
