"""A random program as data: its source, the sizes and inputs of every call, and how it is compiled and run.

All of it follows from a seed, an index and the place where it runs, so that a failure can be repeated by its numbers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CACHE = "cache"
"""The names of inputs that a program writes into begin like this."""
# The value of every symbol for one rank.
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Place:
    """What decides which programs can be drawn: ranks, device, and what the device's collectives can do.

    captures: collectives may be captured in CUDA graphs. averages: they reduce by "avg" too. divergent: the probability
    that the ranks of a program differ. mixtures: that it has a layer of experts. groups: names of process groups, and
    how many ranks each has.
    """

    world_size: int
    device_type: str
    captures: bool
    averages: bool
    divergent: float
    mixtures: float = 0.2

    @property
    def groups(self) -> dict[str, int]:
        """A is all ranks. B is all of them again; with four ranks or more, B and C are rows and columns of a mesh."""
        if self.world_size >= 4 and self.world_size % 2 == 0:
            return {"A": self.world_size, "B": 2, "C": self.world_size // 2}
        return {"A": self.world_size, "B": self.world_size}

    def members(self, name: str, rank: int) -> list[int]:
        """The ranks of the group of that name that `rank` is in."""
        size = self.groups[name]
        if size == self.world_size:
            return list(range(size))
        if name == "B":
            return [rank - rank % 2, rank - rank % 2 + 1]
        return list(range(rank % 2, self.world_size, 2))

    def overlap(self, name: str, other: str) -> bool:
        """Whether two ranks can be in both of these groups."""
        return {name, other} != {"B", "C"} or self.groups["B"] == self.world_size


@dataclass(frozen=True)
class Size:
    """`factor` times a symbol, or `factor` alone."""

    factor: int
    symbol: str = ""

    def __str__(self) -> str:
        if not self.symbol:
            return str(self.factor)
        return self.symbol if self.factor == 1 else f"{self.factor}*{self.symbol}"

    def __mul__(self, by: int) -> Size:
        return Size(self.factor * by, self.symbol)

    def __floordiv__(self, by: int) -> Size:
        assert self.factor % by == 0
        return Size(self.factor // by, self.symbol)

    def value(self, sizes: Sizes) -> int:
        """The number that it stands for."""
        return self.factor * (sizes[self.symbol] if self.symbol else 1)


Shape = tuple[Size, ...]


@dataclass(frozen=True)
class Input:
    """An argument of the program, in its dtype: N(0, std^2) entries, the same on all ranks if `shared`."""

    name: str
    shape: Shape
    shared: bool
    std: float

    def __str__(self) -> str:
        shared = ", the same on all ranks" if self.shared else ""
        return f"{self.name} [{', '.join(map(str, self.shape))}]{shared}"


@dataclass(frozen=True)
class Call:
    """One call: which of the program's sizes, which values of the inputs, and what each rank does before it.

    sleeps: seconds on the host. spins: cycles of the rank's stream. Both by rank. renewed: the ranks on which static
    inputs have new addresses from this call on, so that torch captures the graph again there.
    """

    sizes: int
    values: int
    sleeps: tuple[float, ...]
    spins: tuple[int, ...]
    renewed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Program:
    """A program and how it runs.

    source: a module whose function `program` takes the inputs in order and returns a list of tensors. depth: how many
    roundings follow each other, for the tolerance. sizes: by rank, for every entry. dynamic: "" for none, "mark" for
    `mark_dynamic` of the dimensions with symbols, "all" for `torch.compile(dynamic=True)`. capture: "", "hand" or
    "trees" (what `mode="reduce-overhead"` does). differs: how its ranks differ, empty where they do not.
    """

    seed: int
    index: int
    place: Place
    source: str
    inputs: tuple[Input, ...]
    dtype: str
    options: tuple[tuple[str, Any], ...]
    sizes: tuple[tuple[dict[str, int], ...], ...]
    calls: tuple[Call, ...]
    dynamic: str
    capture: str
    trained: bool
    differs: tuple[str, ...]
    depth: int

    def __str__(self) -> str:
        options = ", ".join(f"{key.removeprefix('ditron.')}={value}" for key, value in self.options)
        how = [self.dtype, options, "forward and backward" if self.trained else "forward"]
        how += [{"": "", "mark": "mark_dynamic", "all": "dynamic=True"}[self.dynamic]]
        how += [{"": "", "hand": "captured by hand", "trees": "cudagraphs"}[self.capture]]
        lines = [
            f"# program {self.index} of seed {self.seed}, {self.place.world_size} ranks on {self.place.device_type}",
            f"# {'; '.join(part for part in how if part)}",
            *[f"# ranks differ: {one}" for one in self.differs],
            *[f"# {one}" for one in self.inputs],
            *[f"# sizes {index}: {self._sizes_text(one)}" for index, one in enumerate(self.sizes)],
            *[f"# call {self._call_text(call)}" for call in self.calls[:8]],
            *([f"# and {len(self.calls) - 8} calls more"] if len(self.calls) > 8 else []),
        ]
        return "\n".join([*lines, self.source])

    @property
    def keeps_inputs(self) -> bool:
        """Whether its inputs are static: their addresses are a part of what torch captures."""
        return any(call.renewed for call in self.calls)

    def _sizes_text(self, by_rank: tuple[dict[str, int], ...]) -> str:
        values = {name: [sizes[name] for sizes in by_rank] for name in by_rank[0]}
        return ", ".join(f"{name}={found[0] if len(set(found)) == 1 else found}" for name, found in values.items())

    def _call_text(self, call: Call) -> str:
        text = f"of sizes {call.sizes}, values {call.values}"
        if any(call.sleeps):
            text += f", after sleeps of {list(call.sleeps)} s"
        if call.renewed:
            text += f", with new static inputs on ranks {list(call.renewed)}"
        return text + (f", after spins of {list(call.spins)} cycles" if any(call.spins) else "")

    def arguments(self, sizes: int, values: int, rank: int) -> list[Any]:
        """The inputs of one call on one rank, on the CPU in float32, to be rounded to the program's dtype."""
        import torch

        found = []
        for number, one in enumerate(self.inputs):
            shape = [size.value(self.sizes[sizes][rank]) for size in one.shape]
            key = f"{self.seed}/{self.index}/{sizes}/{values}/{number}/{'all' if one.shared else rank}"
            generator = torch.Generator().manual_seed(random.Random(key).getrandbits(48))
            found.append(torch.randn(shape, generator=generator) * one.std)
        return found
