"""The shapes that are measured: given on a command line, or those of the layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ditron_inductor.task.exchange import GATHERED_OPERAND, GATHERED_PRODUCT, REDUCED_PRODUCT
from ditron_inductor.task.nodes import MATMULS, TASKS

TOKENS = (1, 16, 64, 256, 1024, 2048, 4096, 8192)
"""Rows that are measured by default: decoding, and prefill of a few sizes."""
WHOLE_ROWS = tuple(node.kind for node in MATMULS if node.exchange in (REDUCED_PRODUCT, GATHERED_PRODUCT))
"""Ops whose rows all ranks have, any number of them."""
# Fewer rows are not gathered or scattered in sequence parallelism.
LEAST_SCATTERED = 128


@dataclass(frozen=True)
class MatmulShape:
    """One op on one rank's matmul [m, k] @ [k, n]; m counts all gathered or unscattered rows, k all contracted ones."""

    op: str
    m: int
    n: int
    k: int


def divides(op: str, m: int, world_size: int) -> bool:
    """Returns whether what the ranks have parts of divides over them."""
    return op in WHOLE_ROWS or m % world_size == 0


@dataclass(frozen=True)
class LayerWidths:
    """The widths of a transformer: of the model, all queries, all keys (or values), feed-forward, vocabulary."""

    dim: int
    query_dim: int
    key_dim: int
    hidden_dim: int
    vocabulary: int

    def widths(self, op: str, part: str, world_size: int) -> tuple[int, int]:
        """Returns (N, K) of one rank's matmul; `part` is one of `PARTS`. All-gathers feed the projections of attention
        (queries, keys and values in one) and of the feed-forward (gate and up in one). The matmuls behind these are
        reduced. A gather behind a matmul is that of the logits, whatever the part.
        """
        exchange = TASKS[op].exchange
        if exchange == GATHERED_PRODUCT:
            return self.vocabulary // world_size, self.dim
        if exchange == GATHERED_OPERAND:
            wide = 2 * self.hidden_dim if part == "mlp" else self.query_dim + 2 * self.key_dim
            return wide // world_size, self.dim
        return self.dim, (self.hidden_dim if part == "mlp" else self.query_dim) // world_size


PARTS = ("attention", "mlp")
MODELS: dict[str, LayerWidths] = {
    "llama-70b": LayerWidths(8192, 8192, 1024, 28672, 128256),
    "llama-8b": LayerWidths(4096, 4096, 1024, 14336, 128256),
    "qwen3-32b": LayerWidths(5120, 8192, 1024, 25600, 151936),
    "llama-405b": LayerWidths(16384, 16384, 1024, 53248, 128256),
}
"""The layers of models by name, in the order in which benchmarks measure them."""


def model_shapes(model: str, ops: Sequence[str], tokens: Sequence[int], world_size: int) -> list[MatmulShape]:
    """The forward sites of a layer of `model`. ValueError where a width does not divide over the ranks."""
    layer = MODELS[model]
    divided = (layer.query_dim, layer.key_dim, layer.hidden_dim, layer.vocabulary)
    if any(width % world_size for width in divided):
        raise ValueError(f"the widths {divided} of {model} do not divide over {world_size} ranks")
    shapes = (
        MatmulShape(op, m, n, k)
        for op in ops
        for n, k in (layer.widths(op, part, world_size) for part in PARTS)
        for m in tokens
        if op in WHOLE_ROWS or (m >= LEAST_SCATTERED and m % world_size == 0)
    )
    return list(dict.fromkeys(shapes))


def given_shapes(
    ops: Sequence[str], tokens: Sequence[int], columns: Sequence[int], depths: Sequence[int], world_size: int
) -> list[MatmulShape]:
    """Every op at every m of `tokens` with every pair (n, k) of `columns` and `depths`; without those whose tokens do
    not divide over the ranks. ValueError where the two lists are not of one length, or a size is not positive.
    """
    if len(columns) != len(depths):
        raise ValueError(f"--n has {len(columns)} sizes and --k has {len(depths)}: they go in pairs")
    if any(size < 1 for size in (*tokens, *columns, *depths)):
        raise ValueError("sizes have to be at least 1")
    return [
        MatmulShape(op, m, n, k)
        for op in ops
        for n, k in zip(columns, depths, strict=True)
        for m in tokens
        if divides(op, m, world_size)
    ]
