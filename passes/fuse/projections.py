"""Matmuls of one tensor with few rows become one `ditron::projections`: the Q, K and V of a decode step, gate and up.

A matmul that shares its tensor with no other becomes one too, if it has one row and a large weight. Examples are the
output projection where every rank has all of it, as beside a divided cache, and a matmul behind a latent space.

Before (inference graphs hold one view of the tensor for each consumer):

    x [B, 1, K] -> reshape [B, K] -> mm(reshape, weight_0 [K, N_0]) [B, N_0]
                -> reshape [B, K] -> mm(reshape, weight_1 [K, N_1]) [B, N_1]

After:

    x -> reshape [B, K], [weight_0, weight_1] -> ditron.projections -> getitem 0 [B, N_0]
                                                                    -> getitem 1 [B, N_1]

One launch reads all weights (see lowering/projections/projections_kernel.py).

A bias (`addmm`) is added behind the call, where it may become part of the call's epilogue (absorb_epilogues.py), as the
gate and up projections' silu(gate) * up does.

Nothing is communicated, so ranks need not agree on it. It must not fire when
* the graph holds no Task node with a collective: it does not belong to a tensor-parallel model, and is left to
  Inductor;
* the number of rows is dynamic, or more than `MOST_PROJECTED_ROWS`;
* it is more than `FEW_PROJECTED_ROWS`, and there are more than `MOST_PRODUCTS` products of a row and a column: the
  library fills the GPU with each of such matmuls;
* a matmul is alone, and has several rows, or a weight of fewer than `FEWEST_ALONE` elements, as that of a router
  (see choose_experts.py): the library's launch is as good;
* a weight is not in the layout of `nn.Linear`, with the contracted dimension contiguous;
* a weight cannot be computed before the first of the products, or is computed from one of them;
* the dtype is none of bfloat16, float16 and float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.biases import Matmul, read_matmul, with_bias
from ditron_inductor.passes.graph.launches import takes_local
from ditron_inductor.task.nodes import FEW_PROJECTED_ROWS, FEWEST_ALONE, MOST_PROJECTED_ROWS, Projections

PATTERN = Projections.kind
MOST_PRODUCTS = MOST_PROJECTED_ROWS * 5120
"""As measured on an H100, see docs/kernels/projections.md."""
MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@dataclass(frozen=True)
class Match:
    """Matmuls in graph order whose first operands are views [rows, K] of one tensor."""

    matmuls: tuple[fx.Node, ...]

    @property
    def x(self) -> fx.Node:
        return _operands(self.matmuls[0])[0]

    @property
    def weights(self) -> list[fx.Node]:
        return [_operands(mm)[1] for mm in self.matmuls]


def find_projections(graph: fx.Graph) -> list[Match]:
    """The groups of matmuls that share their first operand and may be computed together, where it pays."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    for mm in graph.nodes:
        if mm.target in MATMULS and _is_candidate(mm):
            groups.setdefault(proofs.views_up(_operands(mm)[0])[-1], []).append(mm)
    together = [group for found in groups.values() for group in _together(found)]
    return [Match(tuple(group)) for group in together if _pays(group)]


def _pays(group: list[fx.Node]) -> bool:
    if len(group) == 1:
        x, weight = map(proofs.fake, _operands(group[0]))
        return x.shape[0] == 1 and proofs.known(weight.numel() >= FEWEST_ALONE)
    rows, columns = group[0].meta["val"].shape[0], sum(mm.meta["val"].shape[1] for mm in group)
    return rows <= FEW_PROJECTED_ROWS or proofs.known(rows * columns <= MOST_PRODUCTS)


def _operands(mm: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Returns (rows, weight) of a matmul that was proved."""
    matmul = read_matmul(mm)
    assert isinstance(matmul, Matmul) and isinstance(matmul.rows, fx.Node) and isinstance(matmul.weight, fx.Node)
    return matmul.rows, matmul.weight


def _is_candidate(mm: fx.Node) -> bool:
    matmul = read_matmul(mm)
    if not isinstance(matmul, Matmul):
        return False
    x, weight = proofs.fake(matmul.rows), proofs.fake(matmul.weight)
    few = isinstance(x.shape[0], int) and 0 < x.shape[0] <= MOST_PROJECTED_ROWS
    return few and proofs.known_equal(weight.stride(0), 1) and proofs.row_major(x)


def _together(matmuls: list[fx.Node]) -> Iterator[list[fx.Node]]:
    """Yields the matmuls of one source in groups of one shape whose weights are known when the first one runs."""
    left = matmuls
    while left:
        first, group = left[0], [left[0]]
        others: list[fx.Node] = []
        operand = proofs.fake(_operands(first)[0])
        for mm in left[1:]:
            rows, weight = _operands(mm)
            value = proofs.fake(rows)
            # `first` cannot be hoisted before itself, so a weight computed from a product is late, too.
            fits = proofs.same_shape(value.shape, operand.shape) and not proofs.depends_on(weight, set(group))
            (group if fits and rewriting.can_hoist(weight, first) else others).append(mm)
        yield group
        left = others


def rewrite(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    """Replaces the matmuls by one op call at the first of them, and returns that call."""
    first = match.matmuls[0]
    for weight in match.weights:
        rewriting.hoist(weight, first)
    task = Projections(len(match.weights), strategy=options.strategy)
    with graph.inserting_before(first):
        values = [mm.meta["val"] for mm in match.matmuls]
        operands = {"x": match.x, "weights": match.weights}
        call = rewriting.call_task(graph, task, operands, first, values)
        outputs = [rewriting.output(graph, call, index, mm) for index, mm in enumerate(match.matmuls)]
    views = [view for mm in match.matmuls for view in proofs.views_up(_operands(mm)[0])[:-1]]
    for mm, output in zip(match.matmuls, outputs, strict=True):
        mm.replace_all_uses_with(with_bias(output, mm))
    rewriting.erase_unused(graph, [*match.matmuls, *views])
    return call


def projections(graph: fx.Graph, *, options: Options) -> int:
    """Puts matmuls of one tensor with few rows together, and returns the number of calls that replace them."""
    if not takes_local(graph, PATTERN, options):
        return 0
    count = 0
    for match in find_projections(graph):
        # A weight may be computed from the products of another match, which stay at the place of that match's call.
        if all(rewriting.can_hoist(weight, match.matmuls[0]) for weight in match.weights):
            rewrite(graph, match, options)
            count += 1
    return count
