"""The first matmuls of a mixture of experts with many tokens become one `ditron::grouped_projections` each.

Before, with the rows of x once for each expert that a token takes, sorted by expert:

    x [T, K] -> index(x, [rows [S]]) [S, K] -> _grouped_mm(.., weight [E, K, N], offs=ends [E]) [S, N]

After:

    x, rows, ends, [weight] -> ditron.grouped_projections -> getitem 0 [S, N]

The rows are not copied (see lowering/grouped_projections/grouped_kernel.py). For gate and up in one weight see
split_weights.py.

With expert parallelism, masks of the slots of other ranks' experts in front of a grouped matmul are removed first, as
it does not read these rows (see graph/rows_behind.py).

Nothing is communicated, so ranks need not agree on it. It must not fire when
* the graph holds no Task node with a collective: it is left to Inductor, as for `projections`;
* something else reads the copied rows too, as a backward does, or another matmul that stays: they are then made anyway;
* the matmul has a bias, or another dtype for its result;
* K of x, or both dimensions of the matrices, are not contiguous;
* it is predicted to be slower than the library (see task/grouped_cost.py), unless the strategy `tile` is forced;
* something writes into x, the rows, the ends or the weight, or into what one of them is a view of;
* the dtype is none of bfloat16, float16 and float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.all_to_all import written
from ditron_inductor.passes.graph.launches import takes_local
from ditron_inductor.passes.graph.rows_behind import drop_masks
from ditron_inductor.task import grouped_cost
from ditron_inductor.task.nodes import GroupedProjections
from ditron_inductor.task.torch_dtypes import OPERAND_DTYPES

aten = torch.ops.aten
MANY_SLOTS = 1 << 20


@dataclass(frozen=True)
class Match:
    """A grouped matmul of the rows `rows` of x."""

    grouped: fx.Node
    copied: fx.Node
    x: fx.Node
    rows: fx.Node
    ends: fx.Node
    weight: fx.Node


def find_grouped_projections(grouped: fx.Node) -> Match | None:
    """Proves that a grouped matmul is one of copied rows, as drawn above; None if it is not. Others may read the copied
    rows too.
    """
    bound = proofs.arguments(grouped)
    copied, weight, ends = (bound[name] for name in ("self", "mat2", "offs"))
    if bound["bias"] is not None or bound["out_dtype"] is not None or not isinstance(ends, fx.Node):
        return None
    indexed = proofs.indexed_rows(copied)
    if indexed is None:
        return None
    x, rows = indexed
    value, matrices, places = proofs.fake(x), proofs.fake(weight), proofs.fake(rows)
    dims = value.ndim == 2 and matrices.ndim == 3 and places.ndim == 1 and places.dtype == torch.int64
    if not dims or proofs.fake(ends).dtype != torch.int32 or value.dtype not in OPERAND_DTYPES:
        return None
    lies = proofs.known_equal(value.stride(1), 1) and any(proofs.known_equal(one, 1) for one in matrices.stride()[1:])
    if not lies or written((x, rows, ends, weight)) is not None:
        return None
    return Match(grouped, copied, x, rows, ends, weight)


def library_wins(matches: Sequence[Match]) -> bool:
    """Returns whether the library is predicted to be faster for all matmuls of the same rows, which it copies once. If
    a number of slots is known only at run time, it counts as a very large one, with which the library is at its best.
    """
    (S, K), shapes = proofs.fake(matches[0].copied).shape, [proofs.fake(match.weight).shape for match in matches]
    sizes = [K, *(size for shape in shapes for size in shape)]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return True
    E, N = shapes[0][0], sum(shape[2] for shape in shapes)
    S = S if isinstance(S, int) else E * MANY_SLOTS
    return grouped_cost.library_wins(S=S, E=E, K=K, N=N)


def rewrite(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    """Replaces the product by one op call and returns that call."""
    task = GroupedProjections(1, strategy=options.strategy)
    operands = {"x": match.x, "rows": match.rows, "ends": match.ends, "weights": [match.weight]}
    call = rewriting.replace_by_call(graph, task, operands, match.grouped)
    rewriting.erase_unused(graph, [match.grouped, match.copied])
    return call


def grouped_projections(graph: fx.Graph, *, options: Options) -> int:
    """Makes one call of each grouped matmul and of the rows that are copied for it, and returns how many."""
    if not takes_local(graph, GroupedProjections.kind, options):
        return 0
    drop_masks(graph)
    found: dict[fx.Node, list[Match]] = {}
    for node in graph.find_nodes(op="call_function", target=proofs.GROUPED):
        match = find_grouped_projections(node)
        if match is not None:
            found.setdefault(match.copied, []).append(match)
    # Where anything else reads the rows, they are copied anyway.
    sharing = [matches for copied, matches in found.items() if len(matches) == len(copied.users)]
    if options.strategy != "tile":
        sharing = [matches for matches in sharing if not library_wins(matches)]
    taken = [match for matches in sharing for match in matches]
    for match in taken:
        rewrite(graph, match, options)
    return len(taken)
