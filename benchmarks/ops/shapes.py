"""What is measured: cells of an op, a shape and a mode, in named sets, the most important ones first.

The widths are those of tensor-parallel layers over `world_size` ranks (`Layer.widths`):

    all_gather_matmul            [M, hidden] x [hidden, N]   N: gate and up in one, or queries, keys and values in one
    matmul_reduce_scatter        [M, K] x [K, hidden]        K: the down projection's input, or the attention's output
    matmul_all_reduce            the same
    matmul_all_gather            [M, hidden] x [hidden, N]   N: the vocabulary

Not those of the pair around an attention whose sequence and heads change places: M counts the tokens of all ranks, and
each of them has all of the weight.

    matmul_all_to_all            [M/W, hidden] x [hidden, N]     N: queries, keys and values in one
    all_to_all_matmul            [M/W, K] x [K, hidden]          K: the attention's output
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from ditron_inductor.report.matmul_shapes import MODELS, WHOLE_ROWS
from ditron_inductor.task.exchange import EXCHANGED_PRODUCT, GATHERED_PRODUCT, REDUCED_PRODUCT, SCATTERED_PRODUCT
from ditron_inductor.task.nodes import KINDS, TASKS, ULYSSES_KINDS, matmul_of

PREFILL = (8192, 4096, 2048)
DECODE = (1, 16, 64, 128, 256)
LOGITS = ((1, True), (16, True), (64, True), (512, False), (2048, False))
"""(tokens, inside a CUDA graph) of the anchors of `matmul_all_gather`."""
GRAPH_ROW = (2048, 4096)
"""(tokens, hidden size) of the anchor that is measured inside a CUDA graph as well: in eager mode the host counts."""
LARGEST_GRAPH_M = 2048
"""`sweep` measures up to so many rows inside CUDA graphs, and from there on in eager mode."""
LONG = (8192, 16384, 32768, 65536)
"""Tokens of the anchors of the pair around an attention; the first two also inside a CUDA graph."""
LLAMAS = ("llama-70b", "llama-8b")
"""The models of `anchors`, `sweep` and `decode`."""


@dataclass(frozen=True)
class Cell:
    """One op on [M, K] x [K, N] over all ranks' rows; `graph`: timed inside a CUDA graph.

    priority: cells of low ones come first. source: where the shape is from, for people. depths: the K of products that
    are added up, K in all; empty for one.
    """

    op: str
    M: int
    N: int
    K: int
    graph: bool = False
    dtype: str = "bfloat16"
    priority: int = field(default=0, compare=False)
    source: str = field(default="", compare=False)
    depths: tuple[int, ...] = ()

    @property
    def shape(self) -> str:
        """The shape as it stands in the results."""
        products = f";products={len(self.depths)}" if self.depths else ""
        return f"M={self.M};N={self.N};K={self.K}{products}"

    @property
    def text(self) -> str:
        """The cell as text, for progress and notes."""
        return f"{self.op} {self.shape} {self.dtype} {'graph' if self.graph else 'eager'}"


def _cell(
    op: str, model: str, part: str, world_size: int, tokens: int, *, graph: bool = False, priority: int = 0
) -> Cell:
    N, K = MODELS[model].widths(op, part, world_size)
    return Cell(op, tokens, N, K, graph, priority=priority, source=f"{model} {part}")


def anchors(op: str, world_size: int) -> list[Cell]:
    """The MLPs of two Llama models: six rows of prefill, the smallest also in a graph, and (all-reduce) decode; their
    logits for a few tokens and for some.
    """
    if TASKS[op].exchange == GATHERED_PRODUCT:
        return _logits(world_size)
    if op in ULYSSES_KINDS:
        return _around_attention(op)
    reduces = TASKS[op].exchange == REDUCED_PRODUCT
    cells = []
    for model in LLAMAS:
        for tokens in PREFILL:
            row = _cell(op, model, "mlp", world_size, tokens, priority=int(reduces))
            cells.append(row)
            if not reduces and (tokens, MODELS[model].dim) == GRAPH_ROW:
                cells.append(replace(row, graph=True))
    return [*cells, *(_decode(world_size, DECODE) if reduces else [])]


def _decode(world_size: int, tokens: Iterable[int]) -> list[Cell]:
    op = matmul_of(REDUCED_PRODUCT)
    return [
        _cell(op, model, "mlp", world_size, each, graph=True, priority=2 * place)
        for place, model in enumerate(LLAMAS)
        for each in tokens
    ]


def _logits(world_size: int) -> list[Cell]:
    op = matmul_of(GATHERED_PRODUCT)
    return [
        _cell(op, model, "logits", world_size, tokens, graph=graph, priority=2 * place)
        for place, model in enumerate(LLAMAS)
        for tokens, graph in LOGITS
    ]


def _around_attention(op: str) -> list[Cell]:
    cells = []
    for model in LLAMAS:
        layer = MODELS[model]
        N, K = layer.dim, layer.query_dim
        if TASKS[op].exchange == EXCHANGED_PRODUCT:
            N, K = layer.query_dim + 2 * layer.key_dim, layer.dim
        for place, tokens in enumerate(LONG):
            row = Cell(op, tokens, N, K, priority=place, source=f"{model} attention, all heads")
            cells += [row, replace(row, graph=True)] if place < 2 else [row]
    return cells


def decode(op: str, world_size: int) -> list[Cell]:
    """All-reduce of a few tokens, and their logits, inside CUDA graphs; nothing for the other ops."""
    if TASKS[op].exchange == GATHERED_PRODUCT:
        return [cell for cell in _logits(world_size) if cell.graph]
    return _decode(world_size, (1, 2, 4, 8, 16, 32, 64, 128, 256)) if TASKS[op].exchange == REDUCED_PRODUCT else []


def zoo(op: str, world_size: int) -> list[Cell]:
    """Attention and MLP of four models, prefill and (all-reduce) decode, without what `anchors` has."""
    known = set(anchors(op, world_size))
    cells = []
    for model in MODELS:
        for part in ("logits",) if TASKS[op].exchange == GATHERED_PRODUCT else ("mlp", "attention"):
            for tokens in (8192, 2048):
                cells.append(_cell(op, model, part, world_size, tokens, priority=int(tokens == 2048)))
            if TASKS[op].exchange == REDUCED_PRODUCT:
                cells += [_cell(op, model, part, world_size, each, graph=True, priority=2) for each in (16, 128)]
    return [cell for cell in cells if cell not in known]


def sweep(op: str, world_size: int) -> list[Cell]:
    """M from 1 (or one row a rank) to 16384 by powers of two for the MLPs of two models, coarse steps first."""
    smallest = 1 if op in WHOLE_ROWS else world_size
    cells = []
    for step in range(15):
        tokens = 1 << step
        priority = next(place for place, stride in enumerate((4, 2, 1)) if step % stride == 0)
        for model in LLAMAS:
            if tokens >= smallest:
                graph = tokens <= LARGEST_GRAPH_M
                cells.append(_cell(op, model, "mlp", world_size, tokens, graph=graph, priority=priority))
    return cells


def host(op: str, world_size: int) -> list[Cell]:
    """A problem so small that a call costs what the host needs for it."""
    return [Cell(op, 256, 256, 256, source="host cost")]


def sums(op: str, world_size: int) -> list[Cell]:
    """The input gradients of queries, keys and values, and of gate and up, added up and scattered."""
    if TASKS[op].exchange != SCATTERED_PRODUCT:
        return []
    cells = []
    for model in LLAMAS:
        layer = MODELS[model]
        parts = {
            "attention": (layer.query_dim, layer.key_dim, layer.key_dim),
            "mlp": (layer.hidden_dim, layer.hidden_dim),
        }
        for part, widths in parts.items():
            depths = tuple(width // world_size for width in widths)
            for tokens in PREFILL:
                source = f"{model} {part} backward"
                cells.append(Cell(op, tokens, layer.dim, sum(depths), source=source, depths=depths))
    return cells


def tiny(op: str, world_size: int) -> list[Cell]:
    """A small shape, to try the program itself with, also on a CPU; for a reduce-scatter also as a sum."""
    one = Cell(op, 4 * world_size, 24, 24, source="tiny")
    return [one, replace(one, depths=(16, 8))] if TASKS[op].exchange == SCATTERED_PRODUCT else [one]


SETS: dict[str, Callable[[str, int], list[Cell]]] = {
    "anchors": anchors,
    "zoo": zoo,
    "sweep": sweep,
    "decode": decode,
    "host": host,
    "sums": sums,
    "tiny": tiny,
}
OF_ULYSSES = ("anchors", "tiny")
"""The sets that the pair around an attention is in."""
GRAPH_MODES: dict[str, tuple[bool, ...]] = {"eager": (False,), "graph": (True,), "both": (False, True)}


@dataclass(frozen=True)
class Selection:
    """Which cells of which sets; `rows` keeps those with these M, `sources` those whose source has one of the texts."""

    ops: tuple[str, ...] = KINDS
    sets: tuple[str, ...] = ("anchors",)
    graph: str = "as_listed"
    rows: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()

    def cells(self, world_size: int, device_type: str) -> list[Cell]:
        """Returns the cells in the order in which they run: by priority, and both modes of a shape one after the other.
        """
        listed = [
            cell
            for name in self.sets
            for op in self.ops
            if op not in ULYSSES_KINDS or name in OF_ULYSSES
            for cell in SETS[name](op, world_size)
        ]
        wanted = [
            cell
            for cell in listed
            if (not self.rows or cell.M in self.rows)
            and (not self.sources or any(text in cell.source for text in self.sources))
        ]
        wanted.sort(key=lambda cell: cell.priority)
        if device_type != "cuda":
            wanted = [replace(cell, graph=False) for cell in wanted]
        elif self.graph != "as_listed":
            wanted = [replace(cell, graph=graph) for cell in wanted for graph in GRAPH_MODES[self.graph]]
        return list(dict.fromkeys(wanted))
