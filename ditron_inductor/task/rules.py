"""The rules for the operands of each node kind, as data, in the order in which they are checked.

A rule is a condition, which may be symbolic, and the text of the error if it does not hold. `RULES` has the rules by
class of declaration. A call obeys the rules of all classes that its node is an instance of, the most general class
first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ditron_inductor.task import nodes
from ditron_inductor.task.attention_masks import ALIGNED
from ditron_inductor.task.epilogue import EXPERT_KINDS, extras_of, products
from ditron_inductor.task.epilogue_torch import extra_shape
from ditron_inductor.task.expert_nodes import SECOND
from ditron_inductor.task.node import Node
from ditron_inductor.task.torch_dtypes import ACTIVATION_DTYPES, BIAS_DTYPES, OPERAND_DTYPES

Given = Mapping[str, Any]
"""The fake tensors of a call's operands by name: a tensor, or a list of them."""
Rules = Iterator[tuple[Any, str]]
"""Pairs of a condition, or several of which one has to hold or be unknown, and a text of what is wrong if not."""


def rules_of(node: Node, given: Given) -> Rules:
    """Returns all rules for a call of a node with these operands."""
    for declared in reversed(type(node).__mro__):
        if declared in RULES:
            yield from RULES[declared](node, given)


def _every_operand(node: Node, given: Given) -> Rules:
    tensors = [tensor for value in given.values() for tensor in (value if isinstance(value, list) else [value])]
    for value in tensors:
        yield value.device == tensors[0].device, f"mixes {tensors[0].device} and {value.device}"


def _same_dtype(values: list[torch.Tensor]) -> Rules:
    for value in values:
        yield value.dtype == values[0].dtype, f"mixes {values[0].dtype} and {value.dtype}"


def _matmul(rows: list[torch.Tensor], weights: list[torch.Tensor]) -> Rules:
    """Yields the rules for rows and weights that kernels take."""
    first = rows[0]
    yield first.ndim >= 2, f"has a first operand with {first.ndim} dimensions, not 2 or more"
    yield first.dtype in OPERAND_DTYPES, f"has dtype {first.dtype}, which no kernel takes"
    yield from _same_dtype([*rows, *weights])
    for weight in weights:
        yield weight.ndim == 2, f"has a weight with {weight.ndim} dimensions, not 2"


def _fit(rows: list[torch.Tensor], weights: list[torch.Tensor], factor: int = 1) -> Rules:
    """Yields the rules that the weights are [K, N_i] for rows [.., K / factor]."""
    for left, weight in zip(rows, weights, strict=True):
        yield weight.shape[0] == left.shape[-1] * factor, "multiplies shapes that do not fit"


def _summed(node: nodes.SummedMatmul, given: Given) -> Rules:
    """Yields the rules of a sum: all terms have one shape, except a bias, which is a row of it."""
    rows, weights = given["a"], given["b"]
    yield from _matmul(rows, weights)
    yield from _sum(rows, weights, given.get("bias"), takes_column=node.takes_column)
    yield from _fit(rows, weights)


def _sum(
    rows: list[torch.Tensor], weights: list[torch.Tensor], bias: torch.Tensor | None, *, takes_column: bool = False
) -> Rules:
    leading, columns = rows[0].shape[:-1], weights[0].shape[1]
    for left, weight in zip(rows, weights, strict=True):
        yield left.ndim == rows[0].ndim, "adds products of different shapes"
        for size, other in zip((*left.shape[:-1], weight.shape[1]), (*leading, columns), strict=True):
            yield size == other, "adds products of different shapes"
    if bias is None:
        return
    yield from _same_dtype([rows[0], bias])
    if takes_column and rows[0].ndim == 2 and bias.ndim == 2:
        yield bias.shape[1] == 1, "has a bias that is no row"
        yield bias.shape[0] == leading[0], "has a bias that is no row"
    else:
        yield bias.ndim == 1, "has a bias that is no row"
        yield bias.shape[0] == columns, "has a bias that is no row"


def _gathered(node: nodes.AllGatherMatmul, given: Given) -> Rules:
    shard, weights = given["shard"], given["weights"]
    yield from _matmul([shard] * len(weights), weights)
    yield from _fit([shard] * len(weights), weights)
    yield node.gather_dim < shard.ndim - 1, f"gathers dimension {node.gather_dim} of {shard.ndim}"
    rows = node.world_size * math.prod(shard.shape[:-1])
    yield from _epilogue(node, given, rows, [weight.shape[1] for weight in weights])
    if node.prologue is not None:
        yield from _norm_operands(node.prologue, given, shard, shard.shape[-1])
        if "residual" in given:
            yield given["residual"].numel() == shard.numel(), "adds a residual of another size"


def _received(node: nodes.AllToAllMatmul, given: Given) -> Rules:
    x = given["x"]
    yield from _matmul([x], [given["weight"]])
    yield from _fit([x], [given["weight"]], node.world_size)
    yield node.scatter_dim < x.ndim - 1, f"scatters dimension {node.scatter_dim} of {x.ndim}"
    yield x.shape[node.scatter_dim] % node.world_size == 0, NOT_DIVIDED
    yield x.shape[-1] % node.parts == 0, f"has columns that do not divide into {node.parts} parts"


def _scattered(node: nodes.MatmulReduceScatter, given: Given) -> Rules:
    first = given["a"][0]
    yield node.scatter_dim < first.ndim - 1, f"scatters dimension {node.scatter_dim} of {first.ndim}"
    yield first.shape[node.scatter_dim] % node.world_size == 0, NOT_DIVIDED


def _reduced(node: nodes.ReducedSum, given: Given) -> Rules:
    whole = (*given["a"][0].shape[:-1], given["b"][0].shape[1])
    *kept, columns = node.exchanged(whole)
    yield from _epilogue(node, given, math.prod(kept), [columns], math.prod(whole[:-1]))


def _product_gathered(node: nodes.MatmulAllGather, given: Given) -> Rules:
    first = given["a"][0]
    yield node.gather_dim < first.ndim, f"gathers dimension {node.gather_dim} of {first.ndim}"


def _projected(node: nodes.Projections, given: Given) -> Rules:
    x, weights = given["x"], given["weights"]
    yield from _matmul([x] * len(weights), weights)
    yield from _fit([x] * len(weights), weights)
    yield from _epilogue(node, given, x.shape[0], [weight.shape[1] for weight in weights])


def _experts(node: nodes.ExpertProjections, given: Given) -> Rules:
    x, experts, weights = given["x"], given["experts"], given["weights"]
    yield x.ndim == 2, f"has a first operand with {x.ndim} dimensions, not 2"
    yield x.dtype in OPERAND_DTYPES, f"has dtype {x.dtype}, which no kernel takes"
    yield from _same_dtype([x, *weights])
    yield experts.dtype == torch.int64 and experts.ndim == 1, "has experts that are no int64 vector"
    yield experts.shape[0] % node.top_k == 0, f"has slots that are no multiple of {node.top_k}"
    slots = x.shape[0] * (node.top_k if node.by_token else 1)
    yield experts.shape[0] == slots, "has rows that do not fit the slots"
    for weight in weights:
        yield weight.ndim == 3, f"has a weight with {weight.ndim} dimensions, not 3"
        yield weight.shape[0] == weights[0].shape[0], "has weights of different numbers of experts"
        yield weight.shape[1] == x.shape[1], "multiplies shapes that do not fit"
        yield not node.interleaved or weight.shape[2] % 2 == 0, "has two products of an odd number of columns"
    widths = node.widths([tuple(weight.shape) for weight in weights])
    yield from _epilogue(node, given, experts.shape[0], widths, experts=weights[0].shape[0])


def _grouped(node: nodes.GroupedProjections, given: Given) -> Rules:
    x, rows, ends, weights = given["x"], given["rows"], given["ends"], given["weights"]
    yield x.ndim == 2, f"has a first operand with {x.ndim} dimensions, not 2"
    yield x.dtype in OPERAND_DTYPES, f"has dtype {x.dtype}, which no kernel takes"
    yield from _same_dtype([x, *weights])
    yield rows.dtype == torch.int64 and rows.ndim == 1, "has rows that are no int64 vector"
    yield ends.dtype == torch.int32 and ends.ndim == 1, "has ends that are no int32 vector"
    for weight in weights:
        yield weight.ndim == 3, f"has a weight with {weight.ndim} dimensions, not 3"
        yield weight.shape[0] == ends.shape[0], "has ends that do not fit the experts"
        yield weight.shape[1] == x.shape[1], "multiplies shapes that do not fit"
        yield not node.interleaved or weight.shape[2] % 2 == 0, "has two products of an odd number of columns"
    widths = node.widths([tuple(weight.shape) for weight in weights])
    yield from _epilogue(node, given, rows.shape[0], widths, experts=ends.shape[0])


def _chosen(node: nodes.ChooseExperts, given: Given) -> Rules:
    x, router = given["x"], given["router"]
    yield from _matmul([x], [router])
    yield from _fit([x], [router])
    yield x.ndim == 2, f"has a first operand with {x.ndim} dimensions, not 2"
    yield router.shape[1] >= node.top_k, f"chooses {node.top_k} of fewer experts"
    if "bias" in given:
        bias = given["bias"]
        yield bias.dtype == x.dtype and bias.ndim == 1, "has a bias of another dtype or of other dimensions"
        yield bias.shape[0] == router.shape[1], "has a bias that does not fit the experts"


def _combined(node: nodes.CombineExperts, given: Given) -> Rules:
    products = given["products"]
    yield from _slots_summed(node.top_k, given, products.shape, products.dtype)
    if node.has_bias:
        experts = given["experts"]
        yield experts.dtype == torch.int64 and experts.ndim == 1, "has experts that are no int64 vector"
        yield experts.shape[0] == products.shape[0], "has experts that do not fit the slots"
        yield from _biases_fit(given["bias"], products)


def _biases_fit(bias: torch.Tensor, products: torch.Tensor) -> Rules:
    """Yields the rules for biases of experts that are added to tensors with these columns and dtype."""
    yield bias.ndim == 2 and bias.dtype == products.dtype, "has biases of another dtype or of other dimensions"
    yield bias.shape[-1] == products.shape[-1], "has biases that do not fit the columns"


def _slots_summed(top_k: int, given: Given, shape: Sequence[Any], dtype: torch.dtype) -> Rules:
    """Yields the rules for the sum of products of this shape and dtype."""
    scale = given["scale"]
    yield len(shape) == 2, f"has products with {len(shape)} dimensions, not 2"
    yield dtype in ACTIVATION_DTYPES, f"has dtype {dtype}, which no kernel takes"
    if "places" in given:
        places = given["places"]
        yield places.dtype == torch.int64 and places.ndim == 1, "has places that are no int64 vector"
        yield places.shape[0] % top_k == 0, f"has places that are no multiple of {top_k}"
        yield places.shape[0] == shape[0], "has rows that do not fit the slots"
    yield shape[0] % top_k == 0, f"has slots that are no multiple of {top_k}"
    yield scale.dtype in ACTIVATION_DTYPES, f"has a scale of {scale.dtype}"
    yield scale.ndim == 1, "has a scale that is no vector"
    yield scale.shape[0] == shape[0], "has a scale that does not fit the slots"
    if "absent" in given:
        absent = given["absent"]
        yield absent.dtype == torch.bool and absent.ndim == 1, "has marks of absent slots that are no bool vector"
        yield absent.shape[0] == shape[0], "has marks of absent slots that do not fit the slots"
    if "added" in given:
        yield given["added"].dtype == dtype, "has operands of different dtypes"
        yield given["added"].ndim == 2, "adds what does not fit"
        for size, other in zip(given["added"].shape, (shape[0] // top_k, shape[1]), strict=True):
            yield size == other, "adds what does not fit"


def _experts_reduced(node: nodes.ReducedExperts, given: Given) -> Rules:
    x, weight, ends = given["x"], given["weight"], given["ends"]
    yield x.ndim == 2 and weight.ndim == 3, f"multiplies operands of {x.ndim} and {weight.ndim} dimensions, not 2 and 3"
    yield from _same_dtype([x, weight])
    yield weight.shape[1] == x.shape[1], "multiplies shapes that do not fit"
    for name, first in zip(SECOND * node.has_second, (x, weight), strict=False):
        yield given[name].dtype == first.dtype, "has operands of different dtypes"
        yield given[name].shape == first.shape, f"has a {name} that does not fit the first one"
    yield ends.dtype == torch.int32 and ends.ndim == 1, "has ends that are no int32 vector"
    yield ends.shape[0] == weight.shape[0], "has ends that do not fit the experts"
    if node.has_bias:
        yield from _biases_fit(given["bias"], weight)
        yield given["bias"].shape[0] == weight.shape[0], "has biases that do not fit the experts"
    yield from _slots_summed(node.top_k, given, (x.shape[0], weight.shape[2]), x.dtype)


def _experts_scattered(node: nodes.GroupedMatmulReduceScatter, given: Given) -> Rules:
    T, parts = given["places"].shape[0] // node.top_k, node.outer * node.world_size
    yield T % parts == 0, f"scatters {T} tokens over {node.world_size} ranks in {node.outer} runs"


def _columns_exchanged(node: nodes.MatmulAllToAll, given: Given) -> Rules:
    first, columns = given["a"][0], given["b"][0].shape[1]
    yield node.gather_dim < first.ndim - 1, f"gathers dimension {node.gather_dim} of {first.ndim}"
    divides = columns % (node.parts * node.world_size) == 0
    yield divides, "scatters columns that do not divide by the number of ranks"


def _rows_reduced(node: nodes.AllReduceRmsNorm, given: Given) -> Rules:
    x = given["x"]
    yield x.ndim >= 1, "reduces and normalises a scalar"
    yield x.dtype in ACTIVATION_DTYPES, f"has dtype {x.dtype}, which no kernel takes"
    if node.top_k:
        yield x.ndim == 2, f"sums products of {x.ndim} dimensions, not 2"
        yield from _slots_summed(node.top_k, {**given, "scale": given["factors"]}, x.shape, x.dtype)
    yield from _norm_operands(node, given, x, x.shape[-1])


def _sum_reduced(node: nodes.MatmulAllReduceRmsNorm, given: Given) -> Rules:
    yield from rules_of(node.reduction, node.of_reduction(given))
    yield from _norm_operands(node, given, given["a"][0], given["b"][0].shape[1])


def _epilogue(
    node: nodes.WithEpilogue, given: Given, rows: Any, widths: list[Any], whole: Any = 0, *, experts: Any = 0
) -> Rules:
    """Yields the rules for products that are combined and extras beside so many `rows`. whole: the rows reduced.
    experts: the rows of tables of experts.
    """
    epilogue = node.parsed
    if epilogue is None:
        return
    for group in epilogue.groups():
        for index in group.products:
            yield widths[index] == widths[group.products[0]], "combines products of different widths"
    parts = [(output, rows) for output in epilogue.outputs]
    parts += [] if epilogue.pre is None else [(epilogue.pre, whole)]
    for part, length in parts:
        shape = (length, widths[min(products(part))])
        for extra in extras_of([part]):
            value = given["extras"][extra.index]
            yield value.dtype in ACTIVATION_DTYPES, f"has an extra tensor of {value.dtype}"
            if extra.kind in EXPERT_KINDS:
                columns = shape[1] * (1 if extra.kind == "expert" else 2)
                fits = value.ndim == 2 and value.shape[0] == experts and value.shape[1] == columns
            else:
                fits = value.numel() == math.prod(extra_shape(extra.kind, shape))
            yield fits, f"has an extra tensor that is no {extra.kind}: x{extra.index}"


def _norm_operands(
    norm: nodes.ReductionWithNorm | nodes.ShardNorm, given: Given, first: torch.Tensor, columns: Any
) -> Rules:
    """Yields the rules for the tensors of a norm over rows of so many columns."""
    for name in norm.extras:
        value = given[name]
        if name == "residual":
            yield from _same_dtype([first, value])
            yield value.shape[-1] == columns, "adds a residual whose rows do not fit"
        else:
            yield value.dtype in ACTIVATION_DTYPES, f"has dtype {value.dtype}, which no kernel takes"
            yield value.numel() == columns, f"has a {name} that does not fit"


def _decoded(node: nodes.FlashDecode, given: Given) -> Rules:
    q, k, v, lengths = (given[name] for name in ("q", "k", "v", "lengths"))
    yield (q.ndim, k.ndim, v.ndim) == (3, 4, 4), "has a query or a cache of other dimensions"
    yield q.dtype in ACTIVATION_DTYPES, f"has dtype {q.dtype}, which no kernel takes"
    yield from _same_dtype([q, k, v])
    for value in (k, v):
        yield value.shape[3] == q.shape[2], "has keys or values of another head size"
    yield q.shape[1] % k.shape[2] == 0, "has heads that cannot share the keys evenly"
    yield lengths.dtype == torch.int32 and lengths.ndim == 1, "has lengths that are no int32 vector"
    yield lengths.shape[0] == q.shape[0], "has lengths of another number of sequences"
    if not node.paged:
        yield k.shape[0] == q.shape[0], "has a cache of another number of sequences"


def _cached(node: nodes.CachedAttention, given: Given) -> Rules:
    q, keys, values = (given[name] for name in ("q", "keys", "values"))
    yield (q.ndim, keys.ndim, values.ndim) == (3, 4, 4), "has a query or a cache of other dimensions"
    yield q.dtype in ACTIVATION_DTYPES, f"has dtype {q.dtype}, which no kernel takes"
    yield from _same_dtype([q, keys, values])
    yield keys.shape == values.shape, "has keys and values of different shapes"
    tokens = keys.shape[2]
    if node.paged:
        table = given["block_table"]
        right = table.dtype in (torch.int32, torch.int64) and table.ndim == 2
        yield right, "has a block table that is no integer matrix"
        yield table.shape[0] == q.shape[0], "has a block table of another number of sequences"
        tokens = tokens * table.shape[1]
    else:
        yield keys.shape[0] == q.shape[0], "has a cache of another number of sequences"
    yield keys.shape[3] == q.shape[2], "has keys or values of another head size"
    yield q.shape[1] % keys.shape[1] == 0, "has heads that cannot share the keys evenly"
    if "lengths" in given:
        lengths = given["lengths"]
        right = lengths.dtype in (torch.int32, torch.int64) and lengths.ndim == 1
        yield right, "has lengths that are no integer vector"
        yield (lengths.shape[0] == 1, lengths.shape[0] == q.shape[0]), "has lengths of another number of sequences"
    if "shown" in given:
        shown = given["shown"]
        yield shown.dtype == torch.bool and shown.ndim == 2, "has a mask that is no bool matrix"
        yield (shown.shape[0] == 1, shown.shape[0] == q.shape[0]), "has a mask of another number of sequences"
        yield shown.shape[1] == tokens, "has a mask of another number of tokens"
    if "bias" in given:
        bias = given["bias"]
        yield bias.dtype in ACTIVATION_DTYPES and bias.ndim == 2, f"has a bias of {bias.dtype}, or no matrix"
        yield (bias.shape[0] == 1, bias.shape[0] == q.shape[0]), "has a bias of another number of sequences"
        yield bias.shape[1] == tokens, "has a bias of another number of tokens"
    if node.sinks:
        sinks = given["sinks"]
        yield sinks.dtype in ACTIVATION_DTYPES and sinks.ndim == 1, f"has sinks of {sinks.dtype}, or no vector"
        yield sinks.shape[0] == q.shape[1], "has sinks of another number of heads"
    if node.appends:
        position, new = given["position"], (q.shape[0], keys.shape[1], q.shape[2])
        right = position.dtype == torch.int64 and position.ndim == 1
        yield right, "has positions that are no int64 vector"
        yield (position.shape[0] == 1, position.shape[0] == q.shape[0]), "has positions of another number of sequences"
        for value in (given["key"], given["value"]):
            yield value.dtype == q.dtype and tuple(value.shape) == new, "has a new token that does not fit the cache"
    if node.rotated:
        for value in (given["cos"], given["sin"]):
            yield value.dtype in ACTIVATION_DTYPES and value.ndim == 2, "has angles of another dtype or form"
            yield (value.shape[0] == 1, value.shape[0] == q.shape[0]), "has angles of another number of sequences"
            yield (value.shape[1] == q.shape[2], value.shape[1] * 2 == q.shape[2]), "has angles of another head size"
        yield given["cos"].shape == given["sin"].shape, "has sines and cosines of different shapes"
        yield q.shape[2] % 2 == 0, "turns heads of an odd size"


def _attended(node: nodes.AttentionNode, given: Given) -> Rules:
    """Queries, keys and values that fit together, and what a backward has beside them."""
    q, k, *others = (given[name] for name in ("q", "k", "v", "grad_out", "out") if name in given)
    for value in (q, k, *others):
        yield value.ndim == 4, f"has an operand with {value.ndim} dimensions, not 4"
        yield value.dtype in ACTIVATION_DTYPES, f"has dtype {value.dtype}, which no kernel takes"
    yield from _same_dtype([q, k, *others])
    for value, like in zip(others, (k, q, q), strict=False):
        for size, other in zip(value.shape, like.shape, strict=True):
            yield size == other, "has keys and values, or queries and their gradients, of different shapes"
    yield q.shape[0] == k.shape[0], "does not fit"
    yield q.shape[3] == k.shape[3], "does not fit"
    yield q.shape[1] % k.shape[1] == 0, "has heads of queries that do not divide among those of keys"
    shards = node.world_size if node.takes_gathered else 1
    yield k.shape[2] % shards == 0, "scatters keys that do not divide by the number of ranks"
    yield from _scores(node, given, k.shape[2] // shards)


def _scores(node: nodes.AttentionNode, given: Given, keys: Any) -> Rules:
    """keys: of one rank. A bias can be broadcast to the scores of all keys; whether there is one, the mask says."""
    q = given["q"]
    if node.mask.kind in ALIGNED:
        yield q.shape[2] == keys, f"has the mask '{node.mask.kind}', but not as many queries as keys"
    if "bias" not in given:
        return
    bias, scores = given["bias"], (*q.shape[:3], keys * node.world_size)
    yield bias.dtype in BIAS_DTYPES, f"has a bias of {bias.dtype}"
    yield bias.ndim <= 4, NO_BIAS
    for size, other in zip(reversed(bias.shape), reversed(scores), strict=False):
        yield (size == 1, size == other), NO_BIAS


NOT_DIVIDED = "scatters a dimension that does not divide by the number of ranks"
NO_BIAS = "has a bias that is no tensor of queries and keys"
RULES: Mapping[type, Callable[[Any, Given], Rules]] = {
    Node: _every_operand,
    nodes.SummedMatmul: _summed,
    nodes.ReducedSum: _reduced,
    nodes.AllGatherMatmul: _gathered,
    nodes.AllToAllMatmul: _received,
    nodes.MatmulReduceScatter: _scattered,
    nodes.MatmulAllGather: _product_gathered,
    nodes.MatmulAllToAll: _columns_exchanged,
    nodes.Projections: _projected,
    nodes.ExpertProjections: _experts,
    nodes.GroupedProjections: _grouped,
    nodes.CombineExperts: _combined,
    nodes.ChooseExperts: _chosen,
    nodes.ReducedExperts: _experts_reduced,
    nodes.GroupedMatmulReduceScatter: _experts_scattered,
    nodes.AllReduceRmsNorm: _rows_reduced,
    nodes.MatmulAllReduceRmsNorm: _sum_reduced,
    nodes.FlashDecode: _decoded,
    nodes.CachedAttention: _cached,
    nodes.AttentionNode: _attended,
}
