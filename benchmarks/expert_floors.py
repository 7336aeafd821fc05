"""How near a decode step of a mixture of experts is to the speed of reading: the table of the guide on experts.

The newest rows of every mixture on two H200s and on two H100s, inside CUDA graphs. A step reads the weights of
attention and of the router, and of those experts that some token takes. Experts are drawn with the same probability, so
their number is the one to be expected; models with skewed routing have no line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate

from benchmarks.decode_floors import BYTES_PER_US, answer, short_name, was_measured
from benchmarks.models.architecture import Architecture
from benchmarks.models.facts import Fact, path_of, read_facts
from benchmarks.models.request import TITLES
from benchmarks.models.tables import Contest, commit_of, contests, number
from benchmarks.models.zoo import MODELS as ARCHITECTURES
from benchmarks.models.zoo import position
from benchmarks.records import MODELS, Row, newest, read_csv

LEAST = {1: 1.5, 8: 1.3, 32: 1.2}
"""By the number of tokens, how many times as fast as the best rival a step is to be."""
MOST = 1.6
"""How many times as long as reading a step may take."""
HEADERS = (
    *("GPU", "layers", "tokens", "experts read", "Ditron, us", "reading, us", "Ditron / reading", "at most", "reached"),
    *("best rival", "best rival / Ditron", "at least", "reached", "rival / reading", "commit"),
)


def experts_read(arch: Architecture, tokens: int) -> float:
    """How many experts of a layer some of the tokens takes, in the mean."""
    return arch.experts * (1 - (1 - arch.top_k / arch.experts) ** tokens)


def reading_us(one: Contest) -> float:
    """How long a rank reads, at the speed of a copy: weights of two bytes an element."""
    arch, tokens, ranks = ARCHITECTURES[one.model], int(one.sizes["batch"]), one.where[1]
    elements = sum(arch.layer_weights(experts_read(arch, tokens))) / ranks + arch.hidden * arch.experts
    elements += arch.whole_weights
    return 2 * int(one.sizes["layers"]) * elements / BYTES_PER_US[one.where[0]]


def is_judged(one: Contest) -> bool:
    """Whether it is a cell that floors were set for."""
    arch = ARCHITECTURES[one.model]
    known = one.routed and not arch.engine and not arch.skew
    here = one.phase == "decode" and was_measured(one) and one.sizes["form"] == "ar"
    return bool(known and here and int(one.sizes["batch"]) in LEAST and one.best_gain)


def line(one: Contest, facts: Sequence[Fact]) -> list[str]:
    """The line of a cell. A floor is reached if it is by the numbers that stand in the line; over rivals that only copy
    weights, nobody knows.
    """
    tokens, us, reading = int(one.sizes["batch"]), one.us("ditron") or 0.0, reading_us(one)
    best, gain, over = one.best_other, one.best_gain or 0.0, us / reading
    rival = TITLES[best.contestant] if best else "-"
    enough = round(gain, 2) >= LEAST[tokens]
    reached = "-" if enough and one.only_copies else answer(enough)
    return [
        *(short_name(one), f"{one.model} x {one.sizes['layers']}", str(tokens)),
        number(experts_read(ARCHITECTURES[one.model], tokens), 0),
        *(f"{us:.0f}", f"{reading:.0f}", f"{over:.2f}", f"{MOST:.2f}", answer(round(over, 2) <= MOST)),
        *(rival, f"{gain:.2f}", f"{LEAST[tokens]:.2f}", reached, f"{gain * over:.2f}", commit_of(one, facts)),
    ]


def lines(rows: Iterable[Row], facts: Sequence[Fact] = ()) -> list[list[str]]:
    """A line for each cell, by GPUs, models and tokens."""

    def place(one: Contest) -> tuple[int, int, int]:
        return list(BYTES_PER_US).index(one.where[0]), position(one.model), int(one.sizes["batch"])

    return [line(one, facts) for one in sorted(filter(is_judged, contests(rows)), key=place)]


def part() -> str:
    """The table."""
    found = lines(read_csv(MODELS), newest(read_facts(path_of(MODELS))))
    return tabulate(found, HEADERS, "github", disable_numparse=True)
