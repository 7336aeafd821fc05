"""What is measured: a model's layers, how they are cut over the ranks, a phase, and how many tokens at once.

prefill    one forward of `batch` sequences of `tokens`, no gradients; inside a CUDA graph as well, if asked for
training   one forward and backward of the same, with the gradients of all weights
decode     one forward of `batch` single tokens, inside a CUDA graph; without a cache, attention is next to nothing

ar    tensor parallelism with all-reduces: norms and residuals are on every rank
sp    tensor parallelism with gathers and scatters: norms and residuals are divided along the sequence
cp    context parallelism: the sequence is divided, the weights are on every rank, attention reads all ranks' keys
kv    decode with a KV cache of `cache` tokens that is divided along the sequence: attention's weights are on every
      rank, the feed-forward is cut as in `ar`
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from benchmarks.models import by_hand, dispatched
from benchmarks.models.architecture import Architecture
from benchmarks.models.experts import SKEW
from benchmarks.rivals.registered import IN_GRAPHS

PHASES = ("prefill", "decode", "training")
FORMS = ("ar", "sp", "cp", "kv")

ROUTED = "experts are chosen by drawn scores, uniformly, so that no rounding changes them"
MODELS: dict[str, Architecture] = {
    "llama3-8b": Architecture(hidden=4096, heads=32, kv_heads=8, inner=14336, depth=32),
    "llama3-70b": Architecture(hidden=8192, heads=64, kv_heads=8, inner=28672, depth=80),
    "qwen3-32b": Architecture(
        hidden=5120, heads=64, kv_heads=8, inner=25600, depth=64, qk_norm=True, theta=1e6, eps=1e-6
    ),
    "gemma3-27b": Architecture(
        hidden=5376,
        heads=32,
        kv_heads=16,
        inner=21504,
        depth=62,
        activation="gelu_tanh",
        norm="gemma",
        qk_norm=True,
        sandwich=True,
        theta=1e6,
        scale=168.0**-0.5,
        eps=1e-6,
        note="every layer attends to the whole sequence; in the model five of six see 1024 tokens only",
    ),
    "gpt-oss-120b-dense": Architecture(
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        inner=4 * 2880,
        depth=36,
        bias=True,
        theta=150000.0,
        note="a dense approximation: one feed-forward as wide as the four experts that a token takes, without router, "
        "sinks and sliding windows, SwiGLU unclamped",
    ),
    "gpt-oss-120b": Architecture(
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        inner=2880,
        depth=36,
        bias=True,
        theta=150000.0,
        experts=128,
        top_k=4,
        note=f"{ROUTED}; attention has no sinks, and every layer sees the whole sequence, although every second one "
        "of the model has a window of 128 tokens; positions have no YaRN",
    ),
    "mixtral-8x7b": Architecture(
        hidden=4096,
        heads=32,
        kv_heads=8,
        inner=14336,
        depth=32,
        theta=1e6,
        experts=8,
        top_k=2,
        note=ROUTED,
    ),
    "qwen3-30b-a3b": Architecture(
        hidden=2048,
        heads=32,
        kv_heads=4,
        inner=768,
        depth=48,
        qk_norm=True,
        theta=1e6,
        eps=1e-6,
        experts=128,
        top_k=8,
        note=ROUTED,
    ),
    "qwen3-235b-a22b": Architecture(
        hidden=4096,
        heads=64,
        kv_heads=4,
        inner=1536,
        depth=94,
        qk_norm=True,
        theta=1e6,
        eps=1e-6,
        experts=128,
        top_k=8,
        note=ROUTED,
    ),
    "deepseek-v3": Architecture(
        hidden=7168,
        heads=128,
        kv_heads=128,
        inner=2048,
        depth=61,
        theta=10000.0,
        eps=1e-6,
        experts=256,
        top_k=8,
        shared=2048,
        query_latent=1536,
        key_latent=512,
        rotary_dim=64,
        note=f"{ROUTED}; the model takes those of four of eight groups, by a sigmoid with "
        "a correction, and scales their sum; its positions have YaRN, its weights are FP8, and three layers are dense",
    ),
    "hunyuan-a13b": Architecture(
        hidden=4096,
        heads=32,
        kv_heads=8,
        inner=3072,
        depth=32,
        qk_norm=True,
        theta=10000.0,
        experts=64,
        top_k=8,
        whole_shared=3072,
        note=f"{ROUTED}; attention is cut, which the plan of `transformers` leaves whole, as it does the expert of all "
        "tokens; queries and keys have their norms in front of positions, the model has them behind",
    ),
    "opt-30b": Architecture(
        hidden=7168,
        heads=56,
        kv_heads=56,
        inner=28672,
        depth=48,
        activation="relu",
        gated=False,
        norm="layer",
        bias=True,
        theta=0.0,
    ),
}
"""By name. Sizes are those of the published configurations; `benchmarks.models.configs` reads others."""
OF_ENGINES = ("llama3-8b", "qwen3-32b", "qwen3-30b-a3b")
AS_VLLM = (
    "layers as vLLM writes them: a norm reads the sum of residual and branch before it is rounded, queries, keys and "
    "values are one projection, gate and up another"
)
MODELS |= {
    f"{name}-vllm": replace(MODELS[name], engine=True, note="; ".join(filter(None, (AS_VLLM, MODELS[name].note))))
    for name in OF_ENGINES
}
OF_SKEWED = ("mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-120b", "deepseek-v3")
MODELS["gpt-oss-120b-sinks"] = replace(
    MODELS["gpt-oss-120b"],
    sinks=True,
    window=128,
    note=f"{ROUTED}; attention has the model's sinks, and windows in every second layer; positions have no YaRN",
)
MODELS |= {
    f"{name}-skewed": replace(
        MODELS[name], skew=SKEW, note="experts are chosen by drawn scores, of which a few experts have the highest ones"
    )
    for name in OF_SKEWED
}


def position(model: str) -> int:
    """Returns the position of a model in the zoo; others are behind."""
    return list(MODELS).index(model) if model in MODELS else len(MODELS)


TINY = Architecture(hidden=64, heads=4, kv_heads=2, head_dim=16, inner=96, depth=1)
LAYERS = {"llama3-8b": 4, "deepseek-v3": 1}
"""Layers that are measured; two of all others. One of DeepSeek has 23 GB of weights, and 45 GB in fp32, as which it is
compared.
"""

PREFILLS = ((2, 4096), (1, 2048), (1, 8192), (1, 512), (4, 1024), (1, 32768))
"""(batch, tokens of each), the most important ones first."""
BATCHED = {
    "sp": ((8, 512), (16, 256), (7, 510), (32, 128), (4, 1024), (13, 334), (64, 128)),
    "ar": ((8, 512), (16, 256), (7, 509), (32, 128), (4, 1024), (13, 333), (64, 128)),
}
"""Of `--batched`, by form: many short sequences, as in serving and in fine-tuning, some of which have a length that is
a multiple of nothing but, in `sp`, of two ranks.
"""
DECODES = (1, 32, 128, 8, 256)
TRAININGS = ((1, 4096), (2, 4096), (1, 2048))
CONTEXTS = ((1, 32768), (1, 65536))
"""Tokens of all ranks."""
CACHES = (
    *((1, 65536), (8, 65536), (1, 262144), (32, 16384), (1, 4096)),
    *((32, 4096), (128, 4096), (32, 65536)),
)
"""(batch, tokens of all ranks)."""
LONG = ("llama3-8b", "llama3-70b")
"""The models of `cp` and `kv`."""
MAIN = {"prefill": 2, "decode": 3, "training": 1, "cp": 1, "kv": 2}
"""How many sizes of each list a run has that does not ask for all."""
QUICK = (
    ("llama3-8b", "ar", "decode", 1, 1, 0),
    ("llama3-8b", "sp", "prefill", 2, 4096, 0),
    ("qwen3-32b", "ar", "decode", 32, 1, 0),
    ("llama3-8b", "sp", "training", 1, 4096, 0),
    ("opt-30b", "ar", "prefill", 1, 2048, 0),
    ("llama3-8b", "kv", "decode", 1, 1, 65536),
    ("gemma3-27b", "ar", "decode", 1, 1, 0),
    ("llama3-8b", "cp", "prefill", 1, 32768, 0),
    ("gpt-oss-120b-dense", "ar", "decode", 1, 1, 0),
    ("llama3-70b", "sp", "prefill", 1, 2048, 0),
)
"""The cells of `--quick`, with two layers each: (model, form, phase, batch, tokens, cache)."""
QUICK_LAYERS = 2
TINY_TOKENS, TINY_CACHE = 16, 32


@dataclass(frozen=True)
class Cell:
    """One phase of one model. cache: tokens of each sequence in the KV caches of all ranks, 0 without."""

    model: str
    layers: int
    form: str
    phase: str
    batch: int
    tokens: int
    cache: int = 0

    @property
    def shape(self) -> str:
        """The cell as the results name it."""
        shape = f"model={self.model};layers={self.layers};form={self.form};batch={self.batch};tokens={self.tokens}"
        return f"{shape};cache={self.cache}" if self.cache else shape

    @property
    def text(self) -> str:
        """For progress and notes."""
        cache = f", cache {self.cache}" if self.cache else ""
        return f"{self.phase} {self.model} x {self.layers} layers, {self.form}, {self.batch} x {self.tokens}{cache}"

    @property
    def graph(self) -> bool:
        return self.phase == "decode"

    def left_out(self, contestant: str, arch: Architecture) -> str:
        """Why a contestant is not run, empty where it is. arch: of the model."""
        if contestant == "async_tp" and self.form != "sp":
            return "async TP fuses gathers and scatters next to matmuls, and this form has none"
        if contestant in ("max_autotune_select", "auto_select", "symm_mem") and self.form not in ("ar", "kv"):
            return "it replaces all-reduces, and this form has none"
        if contestant == "registered" and self.graph:
            return IN_GRAPHS
        if contestant == "one_shot_norm":
            return by_hand.refusal(arch, self.form, self.phase, self.batch * self.tokens)
        if contestant == "grouped":
            return by_hand.grouped_refusal(arch, self.form, self.phase, self.batch * self.tokens)
        if contestant == "fused":
            return by_hand.fused_refusal(arch, self.phase)
        if contestant == "one_shot_fused":
            problem = by_hand.refusal(arch, self.form, self.phase, self.batch * self.tokens)
            return by_hand.fused_refusal(arch, self.phase) or problem
        if contestant == "dispatched":
            return dispatched.refusal(arch, self.form, self.phase)
        return ""


@dataclass(frozen=True)
class Selection:
    """Which cells a run has. layers: 0 for each model's own number. batches, tokens: those alone, if there are any.
    full: all sizes, not the most important ones. batched: prefill of BATCHED instead of all else, two layers each.
    """

    models: tuple[str, ...] = tuple(MODELS)
    phases: tuple[str, ...] = PHASES
    forms: tuple[str, ...] = FORMS
    layers: int = 0
    batches: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    full: bool = False
    batched: bool = False

    def cells(self) -> list[Cell]:
        """The most important sizes of all models first."""
        numbered = [(number, cell) for model in self.models for number, cell in self._of(model)]
        return [cell for _, cell in sorted(numbered, key=lambda pair: pair[0])]

    def _wants(self, batch: int, tokens: int) -> bool:
        return (not self.batches or batch in self.batches) and (not self.tokens or tokens in self.tokens)

    def _of(self, model: str) -> Iterable[tuple[int, Cell]]:
        layers = self.layers or (2 if self.batched else LAYERS.get(model, 2))
        engine = model in MODELS and MODELS[model].engine
        forms = tuple(form for form in self.forms if form == "ar" or not engine)
        if self.batched:
            sized = [(form, *size) for form, sizes in BATCHED.items() if form in forms for size in sizes]
            for number, (form, batch, tokens) in enumerate(sized):
                if self._wants(batch, tokens):
                    yield number, Cell(model, layers, form, "prefill", batch, tokens)
            return
        lists: dict[tuple[str, str], list[tuple[int, int, int]]] = {
            ("decode", "ar"): [(batch, 1, 0) for batch in DECODES],
            ("prefill", "sp"): [(*size, 0) for size in PREFILLS],
            ("prefill", "ar"): [(*size, 0) for size in PREFILLS],
            ("training", "sp"): [(*size, 0) for size in TRAININGS],
            ("training", "ar"): [(*size, 0) for size in TRAININGS],
        }
        if model not in MODELS or model in LONG:
            lists["prefill", "cp"] = [(*size, 0) for size in CONTEXTS]
            lists["decode", "kv"] = [(batch, 1, cache) for batch, cache in CACHES]
        for (phase, form), sizes in lists.items():
            if phase not in self.phases or form not in forms or (engine and phase == "training"):
                continue
            asked = [size for size in sizes if self._wants(size[0], size[1])]
            narrowed = self.batches or self.tokens
            taken = asked if self.full or narrowed else asked[: MAIN[form if form in MAIN else phase]]
            for number, (batch, tokens, cache) in enumerate(taken):
                yield number, Cell(model, layers, form, phase, batch, tokens, cache)


def quick() -> list[Cell]:
    """The cells of `--quick`."""
    return [
        Cell(model, QUICK_LAYERS, form, phase, batch, tokens, cache)
        for model, form, phase, batch, tokens, cache in QUICK
    ]


def tiny(cells: Iterable[Cell]) -> list[Cell]:
    """Returns the cells at toy size, each kind once, for the CPU device."""
    small = [
        replace(
            cell,
            layers=1,
            batch=2,
            tokens=1 if cell.phase == "decode" else TINY_TOKENS,
            cache=TINY_CACHE if cell.cache else 0,
        )
        for cell in cells
    ]
    return list(dict.fromkeys(small))
