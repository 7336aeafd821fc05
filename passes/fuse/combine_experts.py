"""What a mixture's experts return -> weighted sum for each token becomes `ditron::combine_experts`.

Before, with T tokens that take k experts each, in S = T * k slots sorted by expert, as `transformers` writes it:

    _grouped_mm(..) [S, N] -> mul(.., unsqueeze(scale [S], -1)) -> index(.., [places [S]]) -> reshape [T, k, N]
    -> sum over k -> [cast] -> [add(.., added)]

After:

    _grouped_mm(..), places, reshape(scale) [S], [added] -> ditron.combine_experts -> getitem 0 [T, N]

Inductor writes the scaled terms of all slots, in fp32 where the scale is in fp32, before it reads them by their places.
The node reads each product once and writes only the sums (see lowering/combine_experts/combine_kernel.py). Whatever
made `places` and `scale`, each token gets the sum of the slots that they name. What is rounded on the way to the sum is
not rounded in the node, which adds in fp32, as Inductor's kernel does. A collective behind the sum is fused or left
alone as it was before.

Nothing is communicated, so ranks need not agree on it. It must not fire when
* the graph holds no Task node with a collective: it is left to Inductor, as for `projections`;
* anything between the grouped matmul and the sum is used elsewhere;
* the slots of a token are not side by side behind the index, or the rows are not as many as the slots;
* the sum has another dtype than the products, or the result has other strides than row-major ones;
* something writes into an operand, which the call would read later.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.all_to_all import written
from ditron_inductor.passes.graph.launches import takes_local
from ditron_inductor.task.nodes import CombineExperts
from ditron_inductor.task.torch_dtypes import ACTIVATION_DTYPES

aten = torch.ops.aten
GROUPED = aten._grouped_mm.default
CAST = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class Match:
    """A weighted sum of slots. grouped: the matmul. places: [S]. scale: [S, 1]. added: in any shape of T * N elements,
    or None. views: those between the sum [T, N] and `result`, which is replaced. steps: the nodes from behind the
    matmul to the result.
    """

    grouped: fx.Node
    places: fx.Node
    scale: fx.Node
    top_k: int
    added: fx.Node | None
    views: tuple[fx.Node, ...]
    result: fx.Node
    steps: tuple[fx.Node, ...]


def find_combine_experts(total: fx.Node) -> Match | None:
    """Proves that the sum `total` is one of the slots of each token, as drawn above; None if it is not."""
    terms, bound = proofs.operand(total), proofs.arguments(total)
    shape = proofs.fake(terms).shape
    dims = [dim % 3 for dim in bound["dim"] or ()]
    if len(shape) != 3 or dims != [1] or bound["keepdim"] or not isinstance(shape[1], int) or shape[1] < 1:
        return None
    *views, taken = proofs.views_up(terms)
    scaled = taken.args[0] if taken.target is aten.index.Tensor else None
    indices = taken.args[1] if scaled is not None else None
    if not isinstance(scaled, fx.Node) or not isinstance(indices, (list, tuple)) or len(indices) != 1:
        return None
    places, factors = indices[0], [factor for factor in scaled.args if isinstance(factor, fx.Node)]
    if scaled.target is not aten.mul.Tensor or len(factors) != 2 or not isinstance(places, fx.Node):
        return None
    grouped, scale = factors if factors[0].target is GROUPED else factors[::-1]
    if grouped.target is not GROUPED or not _fits(grouped, places, scale, shape):
        return None
    steps = (scaled, taken, *views, total)
    if proofs.other_user(steps[:-1], {*steps}) is not None:
        return None
    product, rounded = proofs.fake(grouped), _cast(total, proofs.fake(grouped).dtype)
    # A sum of another kind of numbers would not be what is added up here.
    if not proofs.fake(total).dtype.is_floating_point or proofs.fake(rounded).dtype != product.dtype:
        return None
    result, behind, added = _added(rounded)
    value = proofs.fake(result)
    if not proofs.same_shape(value.stride(), rewriting.contiguous_strides(value.shape)):
        return None
    operands = (grouped, places, scale, *((added,) if added is not None else ()))
    if written(operands) is not None:
        return None
    return Match(grouped, places, scale, shape[1], added, behind, result, (*steps, rounded, *behind, result))


def _fits(grouped: fx.Node, places: fx.Node, scale: fx.Node, shape: torch.Size) -> bool:
    """Returns whether the operands of a sum of terms [T, k, N] are those of its slots."""
    T, top_k, N = shape
    place, factor = proofs.fake(places), proofs.tensor(scale)
    if factor is None or place.dtype != torch.int64 or factor.dtype not in ACTIVATION_DTYPES:
        return False
    expected = ((place, (T * top_k,)), (proofs.fake(grouped), (T * top_k, N)), (factor, (T * top_k, 1)))
    return all(proofs.same_shape(tuple(value.shape), of_slots) for value, of_slots in expected)


def _cast(total: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Returns the only user of a sum if that casts it to `dtype`, else the sum."""
    user = proofs.sole_user(total)
    casts = user is not None and user.target is CAST and proofs.fake(user).dtype == dtype
    return user if user is not None and casts else total


def _added(total: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...], fx.Node | None]:
    """Returns (the only sum of `total`, or of views of it, with another tensor of its shape and dtype; these views;
    that tensor), or (total, no views, None).
    """
    chain = [total]
    while (user := proofs.sole_user(chain[-1])) is not None and proofs.keeps_order(user):
        chain.append(user)
    terms = [] if user is None else [term for term in user.args if isinstance(term, fx.Node) and term is not chain[-1]]
    if user is None or user.target is not aten.add.Tensor or user.kwargs or len(terms) != 1:
        return total, (), None
    fits = proofs.alike(chain[-1], terms[0]) and proofs.fake(terms[0]).dtype == proofs.fake(total).dtype
    return (user, tuple(chain[1:]), terms[0]) if fits else (total, (), None)


def rewrite(graph: fx.Graph, match: Match, options: Options) -> None:
    """Replaces a sum by one op call."""
    like, result = proofs.fake(match.grouped), match.result
    (S,), N = proofs.fake(match.places).shape, like.shape[1]
    shape = (S // match.top_k, N)
    task = CombineExperts(match.top_k, match.added is not None, options.strategy)
    with graph.inserting_before(result):
        scale = rewriting.call(graph, aten.reshape.default, (match.scale, [-1]), match.scale, (S,))
        operands = {"products": match.grouped, "places": match.places, "scale": scale}
        if match.added is not None:
            rows = (match.added, [-1, N])
            operands["added"] = rewriting.call(graph, aten.reshape.default, rows, match.added, shape)
        made = rewriting.fake_like(like, shape, rewriting.contiguous_strides(shape))
        call = rewriting.call_task(graph, task, operands, result, [made])
        output = rewriting.output(graph, call, 0, result)
        for view in match.views:
            output = rewriting.call(
                graph, view.target, (output, *view.args[1:]), view, proofs.fake(view).shape, proofs.fake(view).stride()
            )
    result.replace_all_uses_with(output)
    rewriting.erase_unused(graph, match.steps)


def combine_experts(graph: fx.Graph, *, options: Options) -> int:
    """Makes one call of each weighted sum of what experts return, and returns how many."""
    if not takes_local(graph, CombineExperts.kind, options):
        return 0
    made = 0
    # One after the other: what is added to a sum may be another one.
    for total in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        match = find_combine_experts(total)
        if match is not None:
            rewrite(graph, match, options)
            made += 1
    return made
