"""Draws a program from a seed and an index: first how it runs, then its phrases, each a collective with what is beside
it.

A program grows line by line, and the shape of every value is known, so that each program is legal: what Inductor runs,
Ditron has to run. Tokens are a symbol, `M`, for sizes may change from call to call; all other sizes are numbers.
`phrases` has the phrases.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.fuzz.layers import layers
from tests.fuzz.maker import Maker
from tests.fuzz.mixtures import mixture
from tests.fuzz.phrases import CHAINED, FIRST, PHRASES, routed
from tests.fuzz.program import Call, Place, Program

# Of one program. Most have few: compiling takes the longest.
NUM_COLLECTIVES = (1, 1, 2, 2, 3, 4, 6)
STRATEGIES = ("auto", "auto", "library", "chunked", "tile", "tile")
DTYPES = {"cuda": ("bfloat16", "bfloat16", "bfloat16", "float16", "float32"), "cpu": ("float32", "bfloat16", "float16")}
# Tokens of a rank: aligned ones, and what no tile divides.
TOKENS = {
    "cuda": (1, 2, 3, 5, 8, 16, 31, 64, 100, 128, 191, 256, 333, 512, 777, 1024),
    "cpu": (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 33),
}
MANY_CALLS = 30
ROUTED = 0.2
"""How many programs end with a router."""
LAYERED = 0.3
"""How many have layers behind all else but the router."""
KEPT, RENEWED = 0.7, 0.3
"""How many programs that torch captures have static inputs, and in how many calls these are new on a rank."""
SLEEPS_S = (0.001, 0.01, 0.05)
SPINS = (100_000, 2_000_000, 30_000_000)


@dataclass
class Run:
    """How a program runs, as far as it is decided before its text. own_tokens: each rank has its own L."""

    rng: random.Random
    place: Place
    dtype: str = "float32"
    dynamic: str = ""
    capture: str = ""
    trained: bool = False
    differs: bool = False
    own_tokens: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def draw(rng: random.Random, place: Place) -> Run:
        run = Run(rng, place)
        run.dtype = rng.choice(DTYPES[place.device_type])
        run.differs = rng.random() < place.divergent
        run.own_tokens = run.differs and rng.random() < 0.5
        run.dynamic = rng.choice(("", "", "", "mark", "all"))
        run.trained = rng.random() < 0.3
        if place.captures and not run.dynamic and rng.random() < 0.3:
            run.capture = rng.choice(("hand", "hand", "trees"))
            run.trained &= run.capture == "trees"
        run.options = {"ditron.strategy": rng.choice(STRATEGIES)}
        parallel = rng.choice(("auto", "auto", "on", "off"))
        if parallel != "auto":
            run.options["ditron.sequence_parallel"] = parallel
            # Nothing is drawn for it, so that the programs of a seed stay what they were.
            run.options["ditron.trials"] = run.options["ditron.strategy"] == "auto"
        return run

    def sizes(self) -> list[tuple[dict[str, int], ...]]:
        """What M is, and L, which ranks that differ have of their own, by rank and for each set of sizes."""
        tokens = TOKENS[self.place.device_type]
        # torch makes a constant of a size that is 1.
        allowed = [one for one in tokens if one > 1 or self.dynamic != "mark"]
        found = []
        for _ in range(self.rng.choice((2, 3)) if self.dynamic else 1):
            M, L = self.rng.choice(allowed), self.rng.choice(allowed)
            own = [self.rng.choice(allowed) for _ in range(self.place.world_size)] if self.own_tokens else [L]
            found.append(tuple({"M": M, "L": own[rank % len(own)]} for rank in range(self.place.world_size)))
        return found

    def calls(self, num_sizes: int) -> tuple[Call, ...]:
        """Each set of sizes twice, or tens of calls; now and then a rank comes late."""
        rng, size = self.rng, self.place.world_size
        count = MANY_CALLS if rng.random() < 0.1 else max(2, 2 * num_sizes - 1)
        delays = rng.random() < 0.4
        calls = []
        for turn in range(count + 4 * (self.capture == "trees")):
            sleeps, spins = [0.0] * size, [0] * size
            if delays and rng.random() < 0.5:
                late = rng.randrange(size)
                if self.place.device_type == "cuda" and rng.random() < 0.5:
                    spins[late] = rng.choice(SPINS)
                else:
                    sleeps[late] = rng.choice(SLEEPS_S)
            calls.append(Call(turn % num_sizes, rng.randrange(2), tuple(sleeps), tuple(spins)))
        return tuple(calls)


def renewed(rng: random.Random, calls: Sequence[Call], world_size: int) -> tuple[Call, ...]:
    """The calls of a program of which most have static inputs, which are renewed on some ranks behind the first."""
    if rng.random() >= KEPT:
        return tuple(calls)
    found = [calls[0]]
    for call in calls[1:]:
        ranks = [rank for rank in range(world_size) if rng.random() < RENEWED]
        found.append(replace(call, renewed=tuple(ranks)))
    return tuple(found)


def make_program(seed: int, index: int, place: Place) -> Program:
    """The program of these numbers: the same one each time, in every process."""
    rng = random.Random(f"{seed}/{index}")
    run = Run.draw(rng, place)
    sizes = run.sizes()
    # Drawn from numbers of their own, so that the programs of a seed stay what they were.
    names = ("mixture", "router", "layers")
    mixing, routing, layering = (random.Random(f"{seed}/{index}/{name}") for name in names)
    mixed = mixing.random() < place.mixtures
    if mixed and mixing.random() < 0.7:
        run.dtype = "bfloat16"
    maker = Maker(
        rng,
        place,
        dtype=run.dtype,
        trained=run.trained,
        captured=bool(run.capture),
        parallel=run.options.get("ditron.sequence_parallel") != "off",
        differs=run.differs,
    )
    wanted = rng.choice(NUM_COLLECTIVES)
    if mixed:
        # The layer itself takes long to compile.
        wanted = min(wanted, mixing.choice((0, 1, 1, 2)))
    while maker.collectives < wanted:
        phrase = rng.choice(FIRST if not maker.lines else CHAINED if run.differs else PHRASES)
        phrase(maker)
    if mixed:
        mixture(maker, mixing)
    if layering.random() < LAYERED:
        layers(maker, layering)
    if routing.random() < ROUTED:
        routed(maker, routing)
    maker.finish()
    if run.dynamic == "mark" and maker.breaks:
        # What is marked as dynamic must not meet what the part before, which knew its sizes, has left.
        run.dynamic = "all"
    calls = run.calls(len(sizes))
    if run.capture == "trees" and not run.trained:
        calls = renewed(random.Random(f"{seed}/{index}/static inputs"), calls, place.world_size)
    return Program(
        seed=seed,
        index=index,
        place=place,
        source=maker.source(),
        inputs=tuple(maker.inputs),
        dtype=run.dtype,
        options=tuple(sorted(run.options.items())),
        sizes=tuple(sizes),
        calls=calls,
        dynamic=run.dynamic,
        capture=run.capture,
        trained=run.trained,
        differs=tuple(maker.differences) + ("each has its own L",) * (run.own_tokens and maker.uses("L")),
        depth=maker.depth,
    )
