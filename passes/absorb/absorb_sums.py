"""The weighted sum of what a decode step's experts return for each token goes into the reduction with a norm behind it.

    products [S, N] -> mul(.., factors [S, 1]) -> reshape [T, k, N] -> sum over k [T, N] -> [cast] -> [add(.., added)]
    -> views -> ditron.all_reduce_rms_norm(x, ..) -> getitem 0 [.., N], ..    other sums: see graph/slot_readings.py
    =>  products [S, N], reshape(factors) [S], [added] -> ditron.all_reduce_rms_norm(top_k=k) -> getitem 0 [T, N], ..
    -> reshape [.., N]

The kernel adds up the rows when it loads them, so the compiler has no kernel to make for the sum. What is rounded
between the products and the collective is added in fp32 there, and rounded once. The call stands where it stood, so the
order of collectives does not change. What is sent is the same, so a rank may have no such sum.

It must not fire when
* the products are no tensor in memory anyway, and no call of experts can compute what is behind its matmul, such as
  biases: what makes them and the sum would be one kernel of the compiler;
* the products do not lie row after row, or what is added does not: each call would copy them;
* the terms, the sum, or a view of it in front of the call, are used elsewhere, or by the call as another operand: the
  compiler would compute it once more;
* the sum is one of integers or of fp64, or rounded to another dtype than that of the products;
* what is scaled, added up or reduced has rows of another length than the products: its rows would not be slots;
* there are more than MOST_EXPERT_TOKENS tokens, or a dynamic number: the rows of many are not sent in band, and then
  the sum has a kernel of its own;
* something writes into an operand, or into what it is a view or a slice of: the call would read it later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.absorb.absorb_epilogues import fits_an_epilogue, is_stored
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.all_to_all import written
from ditron_inductor.passes.graph.slot_readings import Reading, casts, readings
from ditron_inductor.passes.graph.slot_sums import Ending, ending_of, ending_with, times
from ditron_inductor.task import schema
from ditron_inductor.task.expert_nodes import ProductsOfExperts
from ditron_inductor.task.nodes import MOST_EXPERT_TOKENS, ReductionWithNorm
from ditron_inductor.task.torch_dtypes import ACTIVATION_DTYPES
from ditron_inductor.task.verify import task_calls

aten = torch.ops.aten


@dataclass(frozen=True)
class SlotSum:
    """A sum over the slots of each token. products: a tensor [S, N], or views of one. factors: a number for each row of
    it. reading: how the terms are added up. ending: what follows that. steps: the nodes from behind the products to the
    result.
    """

    products: fx.Node
    factors: fx.Node
    reading: Reading
    ending: Ending
    steps: tuple[fx.Node, ...]

    @property
    def added(self) -> fx.Node | None:
        """What is added to the sum."""
        return self.ending.added

    @property
    def result(self) -> fx.Node:
        """The sum, with what is added to it, rounded."""
        return self.ending.result


def find_sum_of_slots(call: fx.Node) -> SlotSum | None:
    """Proves that what `call`, of an all_reduce_rms_norm, reduces is a sum as drawn above; None if it is not."""
    operands = schema.operands_from_call(call)
    x = operands.pop("x")
    *views, source = proofs.views_up(x)
    terms = ending_with(source, _terms)
    if terms is None or not (is_stored(terms.products) or fits_an_epilogue(terms.products, {*terms.steps})):
        return None
    products, reduced = proofs.fake(terms.products), proofs.fake(x)
    N = products.shape[-1]
    # Terms in rows of another length are not those of slots.
    lengths = (terms.reading.sizes[2], *reduced.shape[-1:])
    if len(lengths) != 2 or not all(proofs.known_equal(length, N) for length in lengths):
        return None
    T = terms.reading.sizes[0]
    few = isinstance(T, int) and T <= MOST_EXPERT_TOKENS and all(isinstance(size, int) for size in reduced.shape)
    if not few or reduced.dtype != products.dtype or products.dtype not in ACTIVATION_DTYPES:
        return None
    steps = (*terms.steps, *views)
    if {*steps} & {*operands.values()} or proofs.other_user(steps, {*steps, call}) is not None:
        return None
    rows = [one for one in (terms.products, terms.added) if one is not None]
    if not all(proofs.row_major(proofs.fake(one)) for one in rows):
        return None
    return terms if written((*rows, terms.factors)) is None else None


def _terms(total: fx.Node) -> SlotSum | None:
    """Reads `total` as a sum of scaled products of slots; None if it is none."""
    if proofs.tensor(total) is None or proofs.fake(total).dtype not in ACTIVATION_DTYPES:
        # The node adds in fp32, so this would not be the sum of integers or of fp64.
        return None
    for reading in readings(total):
        weighted = _scaled_by_row(reading) if reading.weights is None else (reading.rows, reading.weights, ())
        if weighted is None or proofs.fake(weighted[1]).dtype not in ACTIVATION_DTYPES:
            continue
        products, factors, steps = weighted
        if reading.top_k == 1 and reading.unrolled and not _is_of_experts(products):
            continue
        ending = ending_of(total, proofs.fake(products).dtype, reading.base)
        behind = dict.fromkeys((*steps, *reading.steps, total, *ending.steps))
        return SlotSum(products, factors, reading, ending, tuple(behind))
    return None


def _is_of_experts(products: fx.Node) -> bool:
    """Returns whether a call of experts makes the products. Those of one slot for each token look like any others."""
    source = proofs.views_up(products)[-1]
    return source.target is getitem and isinstance(schema.node_of(proofs.operand(source)), ProductsOfExperts)


def _scaled_by_row(reading: Reading) -> tuple[fx.Node, fx.Node, tuple[fx.Node, ...]] | None:
    """Returns (products, a factor for each row of them, the nodes behind the products) if the rows of a sum are such
    products; else None.
    """
    *views, scaled = proofs.views_up(reading.rows)
    rounded = [scaled] if casts(scaled) else []
    scaled = proofs.operand(scaled) if rounded else scaled
    factors = [factor for factor in scaled.args if isinstance(factor, fx.Node)]
    if scaled.target is not aten.mul.Tensor or len(factors) != 2:
        return None
    for factor, scale in (factors, factors[::-1]):
        wide = [factor] if casts(factor) else []
        products = proofs.operand(factor) if wide else factor
        if _is_column(scale, scaled) and proofs.alike(factor, scaled) and not _is_column(factor, scaled):
            return products, scale, tuple(dict.fromkeys((*wide, scaled, *rounded, *views)))
    return None


def _is_column(scale: fx.Node, scaled: fx.Node) -> bool:
    """Returns whether a factor has one number for each row of a product."""
    value, product = proofs.tensor(scale), proofs.fake(scaled)
    if value is None or value.dtype not in ACTIVATION_DTYPES:
        return False
    return proofs.same_shape(tuple(value.shape), (*product.shape[:-1], 1))


def rewrite(graph: fx.Graph, call: fx.Node, task: Any, terms: SlotSum) -> None:
    """Gives the call the products in the place of their sum."""
    operands = schema.operands_from_call(call)
    x = operands["x"]
    T, top_k, N = terms.reading.sizes
    task = replace(task, top_k=top_k, has_added=terms.added is not None)
    with graph.inserting_before(call):
        operands["x"] = rewriting.shaped(graph, terms.products, (T * top_k, N))
        factors = rewriting.shaped(graph, terms.factors, (T * top_k,))
        operands["factors"] = times(graph, factors, terms.ending.factor)
        if terms.added is not None:
            operands["added"] = rewriting.shaped(graph, terms.added, (T, N))
        outputs = [rewriting.norm_output(proofs.fake(x), name, (T, N)) for name in task.returned]
        made = rewriting.call_task(graph, task, operands, call, [*outputs, call.meta["val"][-1]])
    for user in list(call.users):
        assert user.target is getitem, user
        index = user.args[1]
        assert isinstance(index, int)
        with graph.inserting_before(user):
            result = rewriting.output(graph, made, index, user)
            user.replace_all_uses_with(rewriting.shaped(graph, result, tuple(proofs.fake(user).shape)))
        graph.erase_node(user)
    rewriting.erase_unused(graph, [call, *proofs.views_up(x)[:-1], *terms.steps])


def absorb_sums(graph: fx.Graph, *, options: Options) -> int:
    """Gives every reduction with a norm the sum of slots that provably makes what it reduces; returns how many."""
    count = 0
    for call, task in task_calls(graph):
        node: Any = task
        sums = isinstance(task, ReductionWithNorm) and task.sums_slots and not node.top_k
        terms = find_sum_of_slots(call) if sums else None
        if terms is not None:
            rewrite(graph, call, task, terms)
            count += 1
    return count
