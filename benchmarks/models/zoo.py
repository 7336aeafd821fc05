"""What is measured: a model's layers, a form of tensor parallelism, a phase, and how many tokens at once.

    prefill    one forward of `batch` sequences of `tokens`, no gradients
    training   one forward and backward of the same
    decode     one forward of `batch` single tokens, inside a CUDA graph; without a cache, attention is next to nothing

The all-reduce form (`ar`) keeps norms and residuals on every rank; the sequence-parallel one (`sp`) divides them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ditron_inductor.demo_model import LlamaConfig

MODELS: dict[str, Callable[[int], LlamaConfig]] = {
    "llama3-8b": LlamaConfig.llama_8b,
    "llama3-70b": LlamaConfig.llama_70b,
    "tiny": lambda num_layers: LlamaConfig(num_layers=num_layers, max_seq_len=64),
}
"""By name, a model of so many layers, hidden states in and out."""
PHASES = ("prefill", "decode", "training")
FORMS = ("ar", "sp")
PREFILLS = ((2, 4096), (1, 8192), (1, 2048))
"""(batch, tokens of each)."""
DECODES = (1, 32, 128)
LAYERS = {"llama3-8b": 4, "llama3-70b": 2, "tiny": 1}


@dataclass(frozen=True)
class Cell:
    """One phase of one model."""

    model: str
    layers: int
    form: str
    phase: str
    batch: int
    tokens: int

    @property
    def shape(self) -> str:
        """As it stands in the results."""
        return f"model={self.model};layers={self.layers};form={self.form};batch={self.batch};tokens={self.tokens}"

    @property
    def text(self) -> str:
        """For progress and notes."""
        return f"{self.phase} {self.model} x {self.layers} layers, {self.form}, {self.batch} x {self.tokens}"

    @property
    def graph(self) -> bool:
        return self.phase == "decode"


def cells(
    models: Iterable[str], phases: Iterable[str], forms: Iterable[str], layers: int, batches: Iterable[int] = ()
) -> list[Cell]:
    """The cells of a run; layers: 0 for each model's own number. batches: those alone, if there are any."""
    found = []
    wanted = set(batches)
    for model in models:
        count = layers or LAYERS[model]
        for phase in phases:
            sizes = [(batch, 1) for batch in DECODES] if phase == "decode" else list(PREFILLS)
            if model == "tiny":
                sizes = [(2, 1 if phase == "decode" else 16)]
            for form in forms:
                if phase == "decode" and form == "sp":
                    continue
                found += [Cell(model, count, form, phase, *size) for size in sizes if not wanted or size[0] in wanted]
    return found
