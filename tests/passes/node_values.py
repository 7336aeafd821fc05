"""What the Task nodes of all ranks compute, from the operands of all ranks together, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.task import flash_decode as attention
from ditron_inductor.task import reference, reference_attention, schema
from ditron_inductor.task.cached_attention import cached_attention
from ditron_inductor.task.epilogue import Epilogue
from ditron_inductor.task.epilogue_torch import evaluate, without_tables
from ditron_inductor.task.nodes import EXTRAS, LOCAL_KINDS, NODES, SHARD_EXTRAS
from ditron_inductor.task.reference import sum_of_products


class Call:
    """The call of a node on one rank: the node, and its operands by name as attributes."""

    def __init__(self, kind: str, arguments: Sequence[Any]) -> None:
        self.node: Any = schema.parsed(kind, arguments[schema.NODE])
        self.given: dict[str, Any] = self.node.named(arguments[schema.OPERANDS])

    def __getattr__(self, name: str) -> Any:
        return self.given[name]


def reduced(values: list[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction of the values of all ranks."""
    if op == "max":
        return torch.stack(values).amax(0)
    total = torch.stack(values).sum(0)
    return total / len(values) if op == "avg" else total


def evaluate_nodes(kind: str, arguments: list[Any]) -> list[Any]:
    """The results of the ranks. arguments: of the op, by rank."""
    results = _BY_KIND[kind]([Call(kind, one) for one in arguments])
    if kind in LOCAL_KINDS:
        return results
    return [[*one, torch.empty(1)] for one in results]


def _all_gather_matmul(calls: list[Call]) -> list[Any]:
    shards = []
    for call in calls:
        prologue = call.node.prologue
        extras = [call.given.get(name) for name in SHARD_EXTRAS]
        shards.append((call.shard, ()) if prologue is None else reference.norm_shard(call.shard, extras, prologue))
    gathered = torch.cat([shard for shard, _ in shards], calls[0].node.gather_dim)
    results = []
    for call, (_, returned) in zip(calls, shards, strict=True):
        outputs = _after_epilogue(call, [gathered.flatten(0, -2) @ weight for weight in call.weights])
        results.append([*outputs, *[gathered] * call.node.return_gathered, *returned])
    return results


def _projections(calls: list[Call]) -> list[Any]:
    return [_after_epilogue(call, [call.x @ weight for weight in call.weights]) for call in calls]


def _expert_projections(calls: list[Call]) -> list[Any]:
    results = []
    for call in calls:
        rows = call.x.repeat_interleave(call.node.top_k, 0) if call.node.by_token else call.x
        there = call.experts.clamp(max=len(call.weights[0]) - 1)
        products = [torch.einsum("sk,skn->sn", rows, weight[there]) for weight in call.weights]
        if call.node.interleaved:
            products = [products[0][:, half::2] for half in range(2)]
        if call.node.parsed is not None:
            epilogue, extras = without_tables(call.node.parsed, call.given.get("extras", ()), there)
            products = evaluate(epilogue, products, extras)
        results.append([out.masked_fill((call.experts != there).unsqueeze(1), 0.0) for out in products])
    return results


def _grouped_projections(calls: list[Call]) -> list[Any]:
    results = []
    for call in calls:
        products = [torch._grouped_mm(call.x[call.rows], weight.contiguous(), offs=call.ends) for weight in call.weights]
        if call.node.interleaved:
            products = [products[0][:, half::2] for half in range(2)]
        if call.node.parsed is not None:
            epilogue, extras = without_tables(call.node.parsed, call.given.get("extras", ()), _experts_of_rows(call))
            products = evaluate(epilogue, products, extras)
        results.append(products)
    return results


def _experts_of_rows(call: Call) -> torch.Tensor:
    """The expert of each row of a grouped matmul."""
    rows = torch.arange(len(call.given["rows"] if "rows" in call.given else call.x))
    return torch.searchsorted(call.ends, rows, right=True).clamp(max=len(call.ends) - 1)


def _combine_experts(calls: list[Call]) -> list[Any]:
    biases = [(call.bias, call.experts) if call.node.has_bias else () for call in calls]
    return [[_summed(call, call.products, *biased)] for call, biased in zip(calls, biases, strict=True)]


def _choose_experts(calls: list[Call]) -> list[Any]:
    results = []
    for call in calls:
        node, operands = call.node, list(call.given.values())
        results.append([*reference.chosen(node.top_k, node.scores, node.normalised, *node.split(operands))])
    return results


def _cached_attention(calls: list[Call]) -> list[Any]:
    operands = [call.node.split(list(call.given.values())) for call in calls]
    return [[cached_attention(call.node, *given)] for call, given in zip(calls, operands, strict=True)]


def _summed(call: Call, products: torch.Tensor, *biased: torch.Tensor) -> torch.Tensor:
    """The weighted sum of the slots of each token."""
    optional = (call.given.get(name) for name in ("absent", "added"))
    return reference.combined(call.node.top_k, products, call.places, call.scale, *optional, *biased)


def _products_of_experts(call: Call) -> torch.Tensor:
    """The products of all slots, with their biases."""
    products = torch._grouped_mm(call.x, call.weight, offs=call.ends)
    if call.node.has_second:
        products = products + torch._grouped_mm(call.second_x, call.second_weight, offs=call.ends)
    if not call.node.has_bias:
        return products
    return products + call.bias[_experts_of_rows(call)]


def _summed_experts(calls: list[Call]) -> list[torch.Tensor]:
    return [_summed(call, _products_of_experts(call)) for call in calls]


def _kept_products(call: Call) -> list[torch.Tensor]:
    return [_products_of_experts(call)] * call.node.returns_products


def _grouped_matmul_all_reduce(calls: list[Call]) -> list[Any]:
    total = reduced(_summed_experts(calls), calls[0].node.reduce_op)
    return [[total, *_kept_products(call)] for call in calls]


def _grouped_matmul_reduce_scatter(calls: list[Call]) -> list[Any]:
    node = calls[0].node
    total = reduced(_summed_experts(calls), node.reduce_op)
    chunks = total.unflatten(0, (node.outer, node.world_size, -1)).unbind(1)
    return [[chunk.flatten(0, 1), *_kept_products(call)] for chunk, call in zip(chunks, calls, strict=True)]


def _after_epilogue(call: Call, products: list[torch.Tensor]) -> list[torch.Tensor]:
    parsed = call.node.parsed
    return products if parsed is None else evaluate(parsed, products, call.given.get("extras", ()))


def _matmul_reduce_scatter(calls: list[Call]) -> list[Any]:
    node = calls[0].node
    chunks = reduced([_sent(call) for call in calls], node.reduce_op).chunk(len(calls), node.scatter_dim)
    return [_finished(chunk, call) for chunk, call in zip(chunks, calls, strict=True)]


def _matmul_all_reduce(calls: list[Call]) -> list[Any]:
    total = reduced([_sent(call) for call in calls], calls[0].node.reduce_op)
    return [_finished(total, call) for call in calls]


def _sent(call: Call, bias: str = "bias") -> torch.Tensor:
    """What a rank reduces."""
    total = sum_of_products(call.a, call.b, call.given.get(bias))
    parsed = getattr(call.node, "reduction", call.node).parsed
    if parsed is None or parsed.pre is None:
        return total
    return evaluate(Epilogue((parsed.pre,)), [total.flatten(0, -2)], call.given.get("extras", ()))[0].view(total.shape)


def _finished(value: torch.Tensor, call: Call) -> list[torch.Tensor]:
    """The outputs of a reduction."""
    return [output.view(value.shape) for output in _after_epilogue(call, [value.flatten(0, -2)])]


def _all_reduce_rms_norm(calls: list[Call]) -> list[Any]:
    rows = [
        reference.combined(call.node.top_k, call.x, None, call.factors, None, call.given.get("added"))
        if call.node.top_k
        else call.x
        for call in calls
    ]
    return _normalised(calls, reduced(rows, calls[0].node.reduce_op))


def _matmul_all_reduce_rms_norm(calls: list[Call]) -> list[Any]:
    return _normalised(calls, reduced([_sent(call, "product_bias") for call in calls], calls[0].node.reduce_op))


def _normalised(calls: list[Call], value: torch.Tensor) -> list[Any]:
    found = []
    for call in calls:
        extras = [call.given.get(name) for name in EXTRAS]
        node = call.node
        found.append(reference.add_norm(value, extras, node.norm, node.post, node.saved, node.factor))
    return found


def _product(call: Call) -> torch.Tensor:
    return sum_of_products(call.a, call.b, call.given.get("bias"))


def _matmul_all_gather(calls: list[Call]) -> list[Any]:
    products = [_product(call) for call in calls]
    return [[torch.cat(products, calls[0].node.gather_dim)] for _ in calls]


def _matmul_all_to_all(calls: list[Call]) -> list[Any]:
    node, count = calls[0].node, len(calls)
    runs = [_product(call).unflatten(-1, (node.parts, count, -1)) for call in calls]
    return [[torch.cat([one[..., rank, :].flatten(-2) for one in runs], node.gather_dim)] for rank in range(count)]


def _all_to_all_matmul(calls: list[Call]) -> list[Any]:
    node = calls[0].node
    sent = [call.x.unflatten(-1, (node.parts, -1)).chunk(len(calls), node.scatter_dim) for call in calls]
    results = []
    for rank, call in enumerate(calls):
        received = torch.stack([chunks[rank] for chunks in sent], -2).flatten(-3)
        results.append([received.flatten(0, -2) @ call.weight, *[received] * node.return_received])
    return results


def _flash_decode(calls: list[Call]) -> list[Any]:
    parts = [
        attention.local_attention(
            call.q,
            call.k,
            call.v,
            call.lengths,
            call.given.get("block_table"),
            scale=call.node.scale,
            softcap=call.node.softcap,
        )
        for call in calls
    ]
    merged = attention.merge(*zip(*parts, strict=True)).to(calls[0].q.dtype)
    return [[merged] for _ in calls]


def _scores(call: Call, rank: int, world_size: int, keys: int) -> dict[str, Any]:
    seen = reference_attention.visible(call.node.mask, rank, world_size, call.q.shape[2], keys, call.q.device)
    return dict(seen=seen, scale=call.node.scale, softcap=call.node.softcap, bias=call.given.get("bias"))


def _all_gather_attention(calls: list[Call]) -> list[Any]:
    keys, values = (torch.cat([call.given[name] for call in calls], 2) for name in ("k", "v"))
    results = []
    for rank, call in enumerate(calls):
        outputs = reference_attention.attend(call.q, keys, values, **_scores(call, rank, len(calls), call.k.shape[2]))
        results.append([*outputs, *[keys, values] * call.node.return_gathered])
    return results


def _attention_reduce_scatter(calls: list[Call]) -> list[Any]:
    found = []
    for rank, call in enumerate(calls):
        given = _scores(call, rank, len(calls), call.k.shape[2] // len(calls))
        found.append(
            reference_attention.attend_backward(call.grad_out, call.q, call.k, call.v, call.out, call.lse, **given)
        )
    parts = [reduced([one[index] for one in found], "sum").chunk(len(calls), 2) for index in (1, 2)]
    return [[one[0], parts[0][rank], parts[1][rank]] for rank, one in enumerate(found)]


_BY_KIND: dict[str, Callable[[list[Call]], list[Any]]] = {kind: globals()[f"_{kind}"] for kind in NODES}
