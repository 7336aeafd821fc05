"""The claims of docs/guide/serving.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.models.tables import Contest
from benchmarks.prose.claims import Claim, numbers
from benchmarks.prose.picked import COPY, Results, pick, time_of
from benchmarks.records import Row

LAYERS, HIDDEN, WORDS, KEY_HEADS, HEAD_DIM, RANKS = 32, 4096, 128256, 8, 128, 2
"""Of Llama 3 8B."""
HEAD_BYTES = 2 * HIDDEN * WORDS / RANKS
UNCHECKED = ("ditron:local", "inductor:local")
LOCAL, THEIRS = UNCHECKED


@dataclass(frozen=True)
class Step:
    """A step of the whole model, `commit`, beside `layers` layers that were measured at the commit `of_layers`."""

    batch: int
    gpu: str
    layers: int
    of_layers: str
    commit: str


STEPS = (
    Step(1, "H100", 2, "92af0ec", "ebd8836"),
    Step(1, "H100", 4, "15b2415c", "ebd8836"),
    Step(32, "H100", 4, "15b2415c", "a93dce8"),
    Step(1, "H200", 4, "850121e6", "850121e6"),
    Step(32, "H200", 4, "850121e6", "850121e6"),
    Step(1, "H200", 4, "850121e6", "85a5e447"),
    Step(32, "H200", 4, "850121e6", "85a5e447"),
    Step(1, "H200", 4, "a5f078ff", "a5f078ff"),
    Step(32, "H200", 4, "a5f078ff", "a5f078ff"),
)
"""The lines of the table of parts, in order."""
COUNTS = {2: "two", 4: "four"}


def serving(results: Results) -> list[Claim]:
    """Returns the claims of docs/guide/serving.md."""
    return [
        *checks(results.generated),
        *parts(results.models, results.generated),
        *long_caches(results.generated),
        paged(results.decode),
    ]


def whole(
    generated: Sequence[Row], batch: int, run: int | str = -1, gpu: str = "H200", end: str = "256", layers: int = LAYERS
) -> Contest:
    """Returns a run of Llama 8B as `benchmarks.generation` measures it. end: the end of the cell's shape, which begins
    with the number of tokens.
    """
    return pick(generated, "generate", f"model=llama3-8b;layers={layers};batch={batch};tokens={end}", run, gpu=gpu)


def checks(generated: Sequence[Row]) -> list[Claim]:
    """Returns the claims on steps with and without checks on H100s, and on a token of `transformers` before Ditron
    took parameters out of DTensors.
    """

    def times(one: Contest) -> tuple[str, ...]:
        eager = numbers([time_of(one, "eager")], 0, 1e3)
        return eager + numbers([time_of(one, name) for name in ("inductor", "ditron", THEIRS, LOCAL)], 1, 1e3)

    shape = "model=llama3-8b;layers=32;batch=1;cache=4096;tokens=96"
    before = pick(generated, "transformers_generate", shape, "0a44f8fe")
    many = "took {} ms in eager mode, {} ms by Inductor and {} ms by Ditron; without checks, {} and {} ms."
    alone = "With one sequence it took {} ms, {} and {} ms; without checks, {} and {} ms."
    token = "took {} us with Ditron, and {} with Inductor (commit 0a44f8fe)"
    return [
        Claim(many, times(whole(generated, 32, "a93dce8", "H100"))),
        Claim(alone, times(whole(generated, 1, "ebd8836", "H100"))),
        Claim(token, numbers([time_of(before), time_of(before, "inductor")])),
    ]


def read_us(batch: int, gpu: str) -> tuple[float, float]:
    """Returns how long reading takes of the head, and of caches of 256 tokens, at the speed of a copy."""
    cache = 2 * 2 * LAYERS * KEY_HEADS * HEAD_DIM * 256 * batch / RANKS
    return HEAD_BYTES / COPY[gpu], cache / COPY[gpu]


def parts(models: Sequence[Row], generated: Sequence[Row]) -> list[Claim]:
    """Returns a claim for each line of the table of parts, and those on the newest steps."""
    found, beyond = [], []
    for step in STEPS:
        shape = f"model=llama3-8b;layers={step.layers};form=ar;batch={step.batch};tokens=1"
        layers = time_of(pick(models, "decode", shape, step.of_layers, gpu=step.gpu))
        times, read = LAYERS // step.layers, read_us(step.batch, step.gpu)
        total, us = times * layers + sum(read), time_of(whole(generated, step.batch, step.commit, step.gpu), LOCAL)
        place = f"| {step.batch}{', H200s' * (step.gpu == 'H200')} |"
        known, shown = f"{times} x {{}} ({COUNTS[step.layers]} layers, commit {step.of_layers})", numbers([layers], 1)
        if "H200" in step.gpu and step.of_layers != step.commit:
            known, shown = "the same", ()
        text = f"{place} {known} | {{}} | {{}} | {{}} | {{}} (commit {step.commit}) | {{}} |"
        found.append(Claim(text, (*shown, *numbers([*read, total, us]), *numbers([us / total], 2))))
        beyond += [(us - total) / LAYERS] * ((step.gpu, step.commit) == ("H200", "850121e6"))
    newest = [time_of(whole(generated, batch), name) for batch in (1, 32) for name in UNCHECKED]
    text = "a step takes {} ms, where Inductor takes {} ms, and with 32 sequences {} ms, where Inductor takes {} ms"
    return [
        *found,
        Claim("On H200s this took {} us more for each layer", numbers([statistics.mean(beyond)])),
        Claim(text, numbers(newest, 1, 1e3)),
    ]


def long_caches(generated: Sequence[Row]) -> list[Claim]:
    """Returns the claims on steps of 8 layers with caches of 4096 and of 1024 tokens."""

    def us(name: str, batch: int, end: str) -> float:
        return time_of(whole(generated, batch, end=end, layers=8), name)

    longer = "takes {} us with one sequence and {} us with 32 on two H200s, where Inductor takes {} and {} us"
    alone = (
        "one sequence takes {} us, and {} us if the cache is in blocks of 16 tokens (`--page 16`), where Inductor "
        "takes {} and {};"
    )
    many = "32 sequences with a static cache take {} us, and Inductor {}"
    return [
        Claim(longer, numbers([us(name, batch, "4096") for name in UNCHECKED for batch in (1, 32)])),
        Claim(alone, numbers([us(name, 1, end) for name in UNCHECKED for end in ("1024", "1024;page=16")])),
        Claim(many, numbers([us(name, 32, "1024") for name in UNCHECKED])),
    ]


def paged(decode: Sequence[Row]) -> Claim:
    """Returns the claim on attention to caches in blocks."""

    def call(end: str = "") -> Contest:
        shape = f"B=32;Hq=16;Hkv=4;D=128;S=4096;position=4095{end}"
        return pick(decode, "cached_attention", shape, world=1)

    text = (
        "in blocks of 16 it takes {} us for each layer on an H200, in blocks of 64 it takes {}, and without blocks {}; "
        "gathering the blocks and torch's attention take {}"
    )
    ours = [time_of(call(end)) for end in (";page=16", ";page=64", "")]
    return Claim(text, numbers([*ours, time_of(call(";page=16"), "inductor")]))
