"""How near a decode step is to the speed of reading its weights: the table of docs/taxes.md.

The newest rows of Llama 8B and 70B on two H200s and on two H100s, inside CUDA graphs. What a step reads at least are
the weights of a rank and its part of the KV cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from benchmarks.models.estimate import bytes_read
from benchmarks.models.facts import Fact, path_of, read_facts
from benchmarks.models.request import TITLES
from benchmarks.models.tables import Contest, commit_of, newest_contests, number
from benchmarks.models.zoo import LAYERS as LAYERS_OF
from benchmarks.models.zoo import MODELS as ARCHITECTURES
from benchmarks.models.zoo import Cell
from benchmarks.records import MODELS, Row, newest, read_csv

BYTES_PER_US = {"NVIDIA H200": 4.4e6, "NVIDIA H100 80GB HBM3": 2.98e6}
"""Bytes that a GPU reads in a microsecond. For an H200 this is what the floors were set with, and for an H100 the speed
of a copy within its memory, as the report of taxes has measured it.
"""
WORLD = 2
SYMM_MEM, TUNED = "symm_mem", "max_autotune"


@dataclass(frozen=True)
class Floor:
    """What decode of a model was to reach. most: by batch, how many times as long as reading a step may take. least:
    how many times as fast it is to be as with torch's symmetric-memory all-reduces.
    """

    most: dict[int, float]
    least: float

    def most_of(self, batch: int) -> float:
        """The bound of a batch; of one that has none, that of the next smaller batch, which is stricter."""
        return self.most[max(known for known in self.most if known <= batch)]


FLOORS = {
    "llama3-8b": Floor({1: 1.35, 32: 1.5, 128: 1.9}, 1.4),
    "llama3-70b": Floor({1: 1.12, 32: 1.15, 128: 1.35}, 1.15),
}
HEADERS = (
    *("GPU", "layers", "form", "tokens", "Ditron, us", "reading, us", "Ditron / reading", "at most", "reached"),
    *(f"{TITLES[SYMM_MEM]} / Ditron", "at least", "reached", f"{TITLES[SYMM_MEM]} / reading"),
    *(f"{TITLES[TUNED]} / Ditron", "commit"),
)


def reading_us(one: Contest) -> float:
    """How long reading the weights and the cache takes at the speed of a copy."""
    names = ("layers", "batch", "tokens", "cache")
    layers, batch, tokens, cache = (int(one.sizes.get(name, 0)) for name in names)
    cell = Cell(one.model, layers, one.sizes["form"], "decode", batch, tokens, cache)
    return bytes_read(cell, ARCHITECTURES[one.model], one.where[1]) / BYTES_PER_US[one.where[0]]


def was_measured(one: Contest) -> bool:
    """Whether it is from as many GPUs as the floors are for, whose speed is known."""
    return one.where[0] in BYTES_PER_US and one.where[1] == WORLD


def is_judged(one: Contest) -> bool:
    """Whether it is a cell that floors were set for: without a KV cache only batches that have one of their own."""
    if one.phase != "decode" or not was_measured(one) or one.model not in FLOORS or not one.us("ditron"):
        return False
    measured = one.sizes["layers"] == str(LAYERS_OF.get(one.model, 2))
    return measured and ("cache" in one.sizes or int(one.sizes["batch"]) in FLOORS[one.model].most)


def line(one: Contest, facts: Sequence[Fact]) -> list[str]:
    """The line of a cell. A floor is reached if it is by the numbers that stand in the line."""
    floor, reading, us = FLOORS[one.model], reading_us(one), one.us("ditron") or 0.0
    most, over, gain = floor.most_of(int(one.sizes["batch"])), us / reading, one.gain(SYMM_MEM)
    theirs = one.us(SYMM_MEM)
    kept = "-" if gain is None else answer(round(gain, 2) >= floor.least)
    return [
        *(short_name(one), f"{one.model} x {one.sizes['layers']}", one.sizes["form"], one.tokens),
        *(f"{us:.0f}", f"{reading:.0f}"),
        *(f"{over:.2f}", f"{most:.2f}", answer(round(over, 2) <= most)),
        *(number(gain, 2), f"{floor.least:.2f}", kept, number(theirs and theirs / reading, 2)),
        *(number(one.gain(TUNED), 2), commit_of(one, facts)),
    ]


def short_name(one: Contest) -> str:
    """The GPU of a cell, such as `H200`."""
    return one.where[0].split()[1]


def answer(reached: bool) -> str:
    """What a table says of a floor."""
    return "yes" if reached else "no"


def lines(rows: Iterable[Row], facts: Sequence[Fact] = ()) -> list[list[str]]:
    """A line for each cell: by GPUs, without a cache first, small models and batches first."""

    def place(one: Contest) -> tuple[int, bool, int, int, int]:
        sizes, gpu = one.sizes, list(BYTES_PER_US).index(one.where[0])
        return gpu, "cache" in sizes, list(FLOORS).index(one.model), int(sizes["batch"]), int(sizes.get("cache", 0))

    return [line(one, facts) for one in sorted(filter(is_judged, newest_contests(rows)), key=place)]


def part() -> str:
    """The table."""
    found = lines(read_csv(MODELS), newest(read_facts(path_of(MODELS))))
    return tabulate(found, HEADERS, "github", disable_numparse=True)
