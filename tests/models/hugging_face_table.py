"""The table `hugging_face_sites.txt`: what becomes of the collectives of each model, form and graph.

A line is `model form graph sites`; sites are counted as multiples of the number of layers L, a fused one by its kind,
one that is left alone as `collective: reason code`. `python -m tests.models.hugging_face_table` measures and writes it
anew (minutes), after a change to what is fused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from tests.models.hugging_face import ARCHITECTURES, FORMS
from tests.models.run_hugging_face import Setup, count_sites
from tests.passes.graphs import fake_group
from tests.rank_process import RankContext

PATH = Path(__file__).with_name("hugging_face_sites.txt")
WORLD_SIZE = 2
Key = tuple[str, str, str]


def cases(num_layers: int) -> list[Setup]:
    """Every model in every form that it has, in inference and in training."""
    return [
        Setup(name, form, train, num_layers)
        for name, architecture in ARCHITECTURES.items()
        for form in FORMS
        if architecture.has(form)
        for train in (False, True)
    ]


def read() -> dict[Key, str]:
    """The table's text by model, form and graph (`inference`, `forward`, `backward`)."""
    rows = [line.split(maxsplit=3) for line in PATH.read_text().splitlines()]
    return {(name, form, graph): sites for name, form, graph, sites in rows}


def key(setup: Setup, direction: str) -> Key:
    """The row of one of the graphs of a run."""
    return setup.name, setup.form, direction if setup.train else "inference"


def parse(text: str, num_layers: int) -> Counter[str]:
    """`2L+1 matmul_all_reduce, 1 all_reduce: no_matmul` with this many layers."""
    counts: Counter[str] = Counter()
    for part in text.split(", "):
        number, name = part.split(" ", 1)
        layers, with_layers, rest = number.rpartition("L")
        counts[name] = num_layers * int(layers or 1) * bool(with_layers) + int(rest or 0)
    return counts


def text(one_layer: Mapping[str, int], two_layers: Mapping[str, int]) -> str:
    """What `parse` reads, from the counts with one and with two layers; fused sites first."""
    parts = []
    for name in sorted({*one_layer, *two_layers}, key=lambda name: (":" in name, name)):
        per_layer = two_layers.get(name, 0) - one_layer.get(name, 0)
        rest = one_layer.get(name, 0) - per_layer
        layers = f"{per_layer if per_layer != 1 else ''}L" if per_layer else ""
        parts.append(f"{layers}{f'{rest:+d}' if rest and layers else rest or ''} {name}")
    return ", ".join(parts)


def measure(setups: Iterable[Setup]) -> dict[Key, Counter[str]]:
    """The sites of every graph, from this process alone: what is fused is the same on all ranks."""
    found: dict[Key, Counter[str]] = {}
    with fake_group(WORLD_SIZE):
        ctx = RankContext(0, WORLD_SIZE, torch.device("cpu"), seed=0)
        for setup in setups:
            found |= {key(setup, direction): sites for direction, sites in count_sites(ctx, setup).items()}
    return found


def main() -> None:
    one_layer, two_layers = measure(cases(1)), measure(cases(2))
    rows = [(*where, text(counts, two_layers[where])) for where, counts in one_layer.items()]
    PATH.write_text("".join(f"{name:11} {form} {graph:9} {sites}\n" for name, form, graph, sites in rows))


if __name__ == "__main__":
    main()
