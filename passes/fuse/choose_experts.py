"""A router's product, the scores of all experts and the choice among them become one `ditron::choose_experts`.

    x [T, K] -> mm(router [K, E]) or addmm(bias [E], ..) -> logits [T, E]
    logits -> float32 -> amax, sub, exp, sum, div (softmax) -> topk(k) -> getitem 0 [T, k], getitem 1 [T, k]
    getitem 0 -> sum(-1), div

becomes

    [x, router] -> ditron.choose_experts -> getitem 0 [T, k], getitem 1 [T, k]

The softmax may be missing, if experts are chosen by their logits, and so may the division by the sum. Two launches take
the place of five (see lowering/choose_experts/choose_kernel.py).

Nothing is communicated, so ranks need not agree on it. It must not fire when
* the graph holds no Task node with a collective: it is left to Inductor, as for `projections`;
* the tensors are not on a GPU: elsewhere torch's `topk` chooses among equal values in another order;
* the number of tokens, of experts or of chosen ones is dynamic, or more than `MOST_TOKENS`, `MOST_EXPERTS` or
  `MOST_CHOSEN`, beyond which nothing was measured;
* the logits or the scores are used elsewhere too, such as by a loss of the router, or are computed otherwise;
* the router does not have the layout of `nn.Linear`, with the contracted dimension contiguous, or rows have gaps;
* the dtype is neither bfloat16 nor float16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import getitem

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.biases import Matmul, read_matmul
from ditron_inductor.passes.graph.launches import takes_local
from ditron_inductor.task.nodes import ChooseExperts
from ditron_inductor.task.torch_dtypes import OUTPUT_DTYPES

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default

PATTERN = ChooseExperts.kind
GPUS = ("cuda",)
MOST_TOKENS = 64
"""More tokens have not been measured."""
MOST_EXPERTS = 512
MOST_CHOSEN = 16
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ChoiceBounds:
    """Where it may fire: the types of devices, and the most tokens."""

    devices: tuple[str, ...] = GPUS
    most_tokens: int = MOST_TOKENS


@dataclass(frozen=True)
class Match:
    """A choice of experts. values, experts: what the node returns stands in their place, None for what nobody reads.
    inner: the nodes between the product and these.
    """

    product: fx.Node
    matmul: Matmul
    task: ChooseExperts
    values: fx.Node | None
    experts: fx.Node | None
    inner: tuple[fx.Node, ...]


def find_choice(node: fx.Node, bounds: ChoiceBounds) -> Match | None:
    """Proves that a node is the topk of a router's scores; None if it is not."""
    if node.target is not aten.topk.default:
        return None
    bound = proofs.arguments(node)
    scores, k = bound["self"], bound["k"]
    value = proofs.tensor(scores)
    last = value is not None and value.ndim == 2 and bound["dim"] in (-1, 1) and bound["largest"]
    if not last or not isinstance(k, int) or not 0 < k <= MOST_CHOSEN:
        return None
    softmax = softmax_of(scores)
    logits, below = (scores, ()) if softmax is None else softmax
    matmul = read_matmul(logits)
    if not isinstance(matmul, Matmul) or not _is_taken(logits, matmul, bounds, k):
        return None
    outputs = {user.args[1]: user for user in node.users if user.target is getitem}
    if not outputs or len(outputs) < len(node.users) or proofs.other_user([*below, logits], [node, *below]) is not None:
        return None
    values, above = outputs.get(0), tuple[fx.Node, ...]()
    divided = None if softmax is None or values is None else normalised(values)
    if divided is not None and values is not None:
        values, above = divided[0], (values, divided[1])
    task = ChooseExperts(k, "logits" if softmax is None else "softmax", divided is not None, matmul.bias is not None)
    return Match(logits, matmul, task, values, outputs.get(1), (node, *below, *above))


def _is_taken(logits: fx.Node, matmul: Matmul, bounds: ChoiceBounds, k: int) -> bool:
    """Returns whether the product has sizes, a dtype and a layout that the kernels take."""
    x, router = proofs.fake(matmul.rows), proofs.fake(matmul.weight)
    (T, E), K = proofs.fake(logits).shape, x.shape[1]
    known = all(isinstance(size, int) for size in (T, E, K))
    few = known and 0 < T <= bounds.most_tokens and k <= E <= MOST_EXPERTS and K > 0
    right = x.device.type in bounds.devices and x.dtype in DTYPES
    return bool(few and right and proofs.known_equal(router.stride(0), 1) and proofs.row_major(x))


def softmax_of(scores: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """Returns the logits [T, E] whose softmax in fp32 along the last dimension `scores` is, and the nodes that compute
    it; None if it is no softmax.
    """
    if scores.target is not aten.div.Tensor:
        return None
    exp = proofs.operand(scores)
    total = _reduction(scores.args[1], aten.sum.dim_IntList, exp)
    if total is None or exp.target is not aten.exp.default:
        return None
    below = proofs.operand(exp)
    if below.target is not aten.sub.Tensor or below.kwargs:
        return None
    wide = proofs.operand(below)
    largest = _reduction(below.args[1], aten.amax.default, wide)
    if largest is None or wide.target is not CONVERT or wide.args[1] is not torch.float32:
        return None
    return proofs.operand(wide), (scores, exp, total, below, largest, wide)


def _reduction(node: object, target: object, source: fx.Node) -> fx.Node | None:
    """Returns a node if it is a sum or the largest value of `source` along its last dimension, which it keeps."""
    if not isinstance(node, fx.Node) or node.target is not target:
        return None
    bound = proofs.arguments(node)
    last = proofs.over_last(bound["dim"], bound["keepdim"], source)
    return node if last and bound["self"] is source and bound.get("dtype") is None else None


def normalised(values: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Returns the node that divides `values` by their sum, and the sum; None if they are used otherwise."""
    division = next((user for user in values.users if user.target is aten.div.Tensor), None)
    if division is None:
        return None
    total = _reduction(division.args[1], aten.sum.dim_IntList, values)
    if total is None or proofs.other_user([values, total], [division, total]) is not None:
        return None
    return division, total


def rewrite(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    """Puts a call in the place of the product and of the choice, and returns it."""
    x, task = proofs.fake(match.matmul.rows), replace(match.task, strategy=options.strategy)
    shapes = {"x": x.shape, "router": proofs.fake(match.matmul.weight).shape}
    made = [
        rewriting.fake_like(x, one.shape, rewriting.contiguous_strides(one.shape), OUTPUT_DTYPES.get(one.dtype))
        for one in task.outputs(shapes)
    ]
    # At the place of the product, so that nothing is written into its operands meanwhile.
    with graph.inserting_before(match.product):
        bias = None if match.matmul.bias is None else rewriting.row(graph, match.matmul.bias)
        operands = {"x": match.matmul.rows, "router": match.matmul.weight, "bias": bias}
        call = rewriting.call_task(graph, task, operands, match.product, made)
        for index, old in enumerate((match.values, match.experts)):
            if old is not None:
                old.replace_all_uses_with(rewriting.output(graph, call, index, old))
    replaced = [node for node in (match.values, match.experts) if node is not None]
    rewriting.erase_unused(graph, [*replaced, *match.inner, match.product])
    return call


def choose_within(graph: fx.Graph, options: Options, bounds: ChoiceBounds) -> int:
    """Puts a call in the place of every choice within these bounds; returns how many."""
    if not takes_local(graph, PATTERN, options):
        return 0
    count = 0
    for node in list(graph.nodes):
        if (match := find_choice(node, bounds)) is not None:
            rewrite(graph, match, options)
            count += 1
    return count


def choose_experts(graph: fx.Graph, *, options: Options) -> int:
    """Puts a call in the place of every choice of the experts of a few tokens on a GPU; returns how many."""
    return choose_within(graph, options, ChoiceBounds())
