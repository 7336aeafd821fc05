"""Matmuls of kinds that no fusion takes yet are named as such, and reasons without a matmul say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers quantized_decomposed
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.finish.review_left_alone import review_left_alone
from ditron_inductor.passes.graph.other_matmuls import MATMULS, other_matmul
from ditron_inductor.passes.graph.reasons import LEFT_ALONE, Reason
from tests.passes.graphs import WORLD_SIZE, all_gather, all_reduce, c10d, fuse, group_name, reduce_scatter, traced
from tests.passes.titan import ADD_OF_TITAN

pytestmark = pytest.mark.usefixtures("group")

aten = torch.ops.aten
decomposed: Any = torch.ops.quantized_decomposed
FP8 = torch.float8_e4m3fn
X = torch.empty(16, 32)
A = torch.empty(64, 32)
W = torch.empty(32, 48)
ONE = torch.empty(())
SLOTS = torch.zeros(128, dtype=torch.int64)


def left_alone(fn: Callable[..., Any], *args: torch.Tensor) -> list[Reason]:
    """Why the collectives of `fn` are left alone, in graph order."""
    module = traced(fn, *args)
    assert fuse(module) == 0
    return review(module)


def review(module: fx.GraphModule) -> list[Reason]:
    review_left_alone(module.graph, options=Options())
    return [node.meta[LEFT_ALONE] for node in module.graph.nodes if LEFT_ALONE in node.meta]


def column_major(w: torch.Tensor, dtype: torch.dtype = FP8) -> torch.Tensor:
    return w.t().to(dtype).contiguous().t()


def fp8(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    one = a.new_ones((), dtype=torch.float32)
    return aten._scaled_mm(a, w, one, one, out_dtype=torch.bfloat16)


def gather_fp8(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return fp8(all_gather(x.to(FP8).view(torch.uint8)).view(FP8), column_major(w))


def gather_then_fp8(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    gathered = all_gather(x).float()
    return fp8((gathered * scale).clamp(-448, 448).to(FP8), column_major(w))


def gathered_fp8_weight(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return fp8(x.to(FP8), all_gather(w.t().to(FP8).contiguous()).t())


def normed_then_fp8(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    gathered = all_gather(x)
    normed = gathered * scale * scale.exp()
    return fp8(normed.to(FP8), column_major(w))


def int8(a: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (aten._int_mm(a.to(torch.int8), w.to(torch.int8)).float() * scale * scale).bfloat16()


def dequantized(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    quantized = decomposed.quantize_per_tensor(x, 0.1, 0, -128, 127, torch.int8)
    return decomposed.dequantize_per_tensor(all_gather(quantized), 0.1, 0, -128, 127, torch.int8) @ w


def dequantized_by_hand(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (all_gather(x.to(torch.int8)).float() * scale) @ w


def grouped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    offsets = torch.arange(1, 3, device=x.device, dtype=torch.int32) * 32
    return aten._grouped_mm(all_gather(x.bfloat16()), torch.stack([w, w]).bfloat16(), offsets)


def routed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The product of each slot, of which every row of x has two, sorted by expert."""
    S = 2 * x.shape[0]
    order = torch.arange(S - 1, -1, -1, device=x.device)
    ends = torch.arange(1, 3, device=x.device, dtype=torch.int32) * (S // 2)
    return aten._grouped_mm(x.bfloat16()[order // 2], torch.stack([w, w]).bfloat16(), ends) * 0.5


def summed_by_inverse(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = routed(x, w)
    inverse = torch.arange(out.shape[0] - 1, -1, -1, device=x.device)
    return out[inverse].view(-1, 2, out.shape[1]).float().sum(1).bfloat16()


def summed_by_scatter(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = routed(x, w)
    rows = torch.arange(out.shape[0] - 1, -1, -1, device=x.device) // 2
    return out.new_zeros(x.shape[0], out.shape[1]).scatter_add(0, rows[:, None].expand_as(out), out)


def summed_by_titan(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = routed(x, w).float()
    rows = torch.arange(out.shape[0] - 1, -1, -1, device=x.device) // 2
    return ADD_OF_TITAN(out.new_zeros(x.shape[0], out.shape[1]), rows[:, None].expand_as(out), out)


def to_experts(x: torch.Tensor) -> torch.Tensor:
    sizes = [x.shape[0] // 2, x.shape[0] // 2, 0, 0]
    return c10d.wait_tensor(c10d.all_to_all_single(x, sizes, sizes, group_name()))


def sorted_to_experts(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rows of two slots for each token, by their experts."""
    return to_experts(x[ids.sort()[1] // 2]).sin()


def from_experts_in_order(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).index_put((ids.sort()[1],), to_experts(x.sin()))


def counted_at_experts(x: torch.Tensor, counts: torch.Tensor, received: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of the graph in front of which, and behind which, sizes are read from the device."""
    return to_experts(x), torch.searchsorted(counts.cumsum(0), torch.arange(received), right=True)


def counted_by_rank(
    x: torch.Tensor, counts: torch.Tensor, ranks: int = WORLD_SIZE
) -> tuple[torch.Tensor, torch.Tensor]:
    """As above, of equal sizes, with the experts of the rows: those of this rank, for each rank that sends."""
    experts = torch.arange(len(counts) // ranks).repeat(ranks)
    found = torch.searchsorted(counts.cumsum(0), torch.arange(x.shape[0]), right=True)
    return to_all(x), experts[found.clamp(max=len(counts) - 1)]


def documents(x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of the document of each token of a sequence."""
    return to_all(x), torch.searchsorted(lengths.cumsum(0), torch.arange(x.shape[0]), right=True)


def columns_to_experts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Each rank has some columns of all rows, and then all columns of some rows."""
    T, part = x.shape[0] // WORLD_SIZE, x.shape[1]
    return routed(to_all(x).view(WORLD_SIZE, T, part).transpose(0, 1).reshape(T, WORLD_SIZE * part), w)


def weights_to_experts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Experts change their ranks."""
    ends = torch.arange(1, WORLD_SIZE + 1, dtype=torch.int32) * (x.shape[0] // WORLD_SIZE)
    return aten._grouped_mm(x.bfloat16(), to_all(torch.stack([w] * WORLD_SIZE).bfloat16()), ends)


def capacity(x: torch.Tensor, w: torch.Tensor, multiply: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Two experts on each rank, which take as many tokens from all ranks."""
    slots = to_all(x.view(2 * WORLD_SIZE, -1, x.shape[1])).view(WORLD_SIZE, 2, -1, x.shape[1])
    return multiply(slots.transpose(0, 1).reshape(2, -1, x.shape[1]), torch.stack([w, w]))


def by_groups(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    ends = torch.arange(1, 3, dtype=torch.int32) * x.shape[1]
    return aten._grouped_mm(x.bfloat16().flatten(0, 1), w.bfloat16(), ends)


def one_by_one(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[0] @ w[0].sin(), x[1] @ w[1].sin()])


def to_all(x: torch.Tensor) -> torch.Tensor:
    sizes = [x.shape[0] // WORLD_SIZE] * WORLD_SIZE
    return c10d.wait_tensor(c10d.all_to_all_single(x, sizes, sizes, group_name()))


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], str, str]] = {
    "gather fp8": (gather_fp8, (X, W), "fp8_matmul", "_scaled_mm"),
    "gather, then to fp8": (gather_then_fp8, (X, W, ONE), "fp8_matmul", "_scaled_mm"),
    "gathered fp8 weight": (gathered_fp8_weight, (A, X.t().contiguous()), "fp8_matmul", "_scaled_mm"),
    "scatter of fp8": (
        lambda a, w: reduce_scatter(fp8(a.to(FP8), column_major(w))),
        (A, W),
        "fp8_matmul",
        "_scaled_mm",
    ),
    "reduce of fp8": (lambda a, w: all_reduce(fp8(a.to(FP8), column_major(w))), (A, W), "fp8_matmul", "_scaled_mm"),
    "a norm between": (normed_then_fp8, (X, W, ONE), "no_matmul", ""),
    "reduce of int8": (lambda a, w, s: all_reduce(int8(a, w, s)), (A, W, ONE), "quantized_matmul", "_int_mm"),
    "gather, then int8": (lambda x, w, s: int8(all_gather(x), w, s), (X, W, ONE), "quantized_matmul", "_int_mm"),
    "dequantised": (dequantized, (X, W), "quantized_matmul", "dequantize_per_tensor"),
    "dequantised by hand": (dequantized_by_hand, (X, W, ONE), "quantized_matmul", "_to_copy"),
    "grouped": (grouped, (X, W), "grouped_matmul", "_grouped_mm"),
    "gather, then routed": (lambda x, w: routed(all_gather(x), w), (X, W), "grouped_matmul", "_grouped_mm"),
    "routed, by inverse": (lambda a, w: all_reduce(summed_by_inverse(a, w)), (A, W), "few_tokens", "_to_copy"),
    "routed, scattered": (
        lambda a, w: reduce_scatter(summed_by_scatter(a, w)),
        (A, W),
        "few_tokens",
        "scatter_add",
    ),
    "routed, by TorchTitan": (
        lambda a, w: reduce_scatter(summed_by_titan(a, w)),
        (A, W),
        "grouped_matmul",
        "_grouped_mm",
    ),
    "to experts": (lambda a, w: routed(to_experts(a), w), (A, W), "tokens_exchanged", "_grouped_mm"),
    "from experts": (lambda a, w: to_experts(routed(a, w)), (A, W), "tokens_exchanged", "_grouped_mm"),
    "sorted, to experts": (sorted_to_experts, (A, SLOTS), "tokens_exchanged", "index"),
    "from experts, in order": (from_experts_in_order, (A, SLOTS[:64]), "tokens_exchanged", "index_put"),
    "counted at experts": (
        lambda a, c: counted_at_experts(a, c, 64),
        (A, SLOTS[:8]),
        "tokens_exchanged",
        "searchsorted",
    ),
    "counted by rank": (
        lambda a, c: counted_by_rank(a, c, WORLD_SIZE),
        (A, SLOTS[:8]),
        "tokens_exchanged",
        "searchsorted",
    ),
    "counted otherwise": (lambda a, c: counted_by_rank(a, c, 2), (A, SLOTS[:8]), "no_matmul", ""),
    "documents are counted": (documents, (A, SLOTS[:8]), "no_matmul", ""),
    "as many, to experts": (lambda a, w: routed(to_all(a), w), (A, W), "tokens_exchanged", "_grouped_mm"),
    "as many, from experts": (lambda a, w: to_all(routed(a, w)), (A, W), "tokens_exchanged", "_grouped_mm"),
    "as many, sorted": (lambda a, ids: to_all(a[ids.sort()[1] // 2]).sin(), (A, SLOTS), "tokens_exchanged", "index"),
    "columns, to experts": (columns_to_experts, (A[:, :8], W), "grouped_matmul", "_grouped_mm"),
    "columns, sorted": (
        lambda a, ids: columns_to_experts(a, torch.empty(32, 48))[ids.sort()[1]],
        (A[:, :8], SLOTS[:32]),
        "grouped_matmul",
        "_grouped_mm",
    ),
    "weights, to experts": (weights_to_experts, (A, W), "grouped_matmul", "_grouped_mm"),
    "a capacity": (lambda a, w: capacity(a, w, torch.bmm), (A, W), "rows_exchanged", "bmm"),
    "a capacity, grouped": (lambda a, w: capacity(a, w, by_groups), (A, W), "tokens_exchanged", "_grouped_mm"),
    "a capacity, one by one": (lambda a, w: capacity(a, w, one_by_one), (A, W), "rows_exchanged", "mm"),
    "fewer are counted": (lambda a, c: counted_at_experts(a, c, 32), (A, SLOTS[:8]), "no_matmul", ""),
    "picked, to others": (lambda a, rows: to_experts(a[rows]).sin(), (A, SLOTS), "no_matmul", ""),
    "sorted numbers": (lambda a, ids: to_experts(ids[ids.sort()[1]]), (A, SLOTS), "no_matmul", ""),
    "to others": (lambda a: to_experts(a).sin(), (A,), "no_matmul", ""),
    "a sum of fp8": (
        lambda a, w: all_reduce(fp8(a.to(FP8), column_major(w)).float().sum(1)),
        (A, W),
        "no_matmul",
        "",
    ),
    "max of a matmul": (lambda a, w: all_reduce(a @ w, "max"), (A, W), "reduce_op", "all_reduce"),
    "max of a maximum": (lambda a, w: all_reduce((a @ w).amax(), "max"), (A, W), "no_matmul", ""),
    "max, then a matmul": (lambda a, w: all_reduce(a.exp(), "max") @ w, (A, W), "no_matmul", ""),
    "to all, then a matmul": (lambda a, w: to_all(a) @ w, (A, W), "rows_exchanged", "mm"),
    "matmul, then to all": (lambda a, w: to_all(a @ w), (A, W), "rows_exchanged", "mm"),
    "to all": (lambda a: to_all(a).sin(), (A,), "no_matmul", ""),
}


@pytest.mark.parametrize(("fn", "args", "code", "op"), CASES.values(), ids=CASES)
def test_the_reason_and_its_node(fn: Callable[..., Any], args: tuple[torch.Tensor, ...], code: str, op: str) -> None:
    (reason,) = left_alone(fn, *args)
    assert reason.code == code, reason
    assert not op or reason.culprit.op.split(".")[1] == op, reason.culprit


@pytest.mark.parametrize("backward", [False, True])
def test_the_grouped_matmul_of_transformers(backward: bool) -> None:
    """In fp32, whose gradients are two results of one op."""
    pytest.importorskip("transformers.integrations.moe")
    ops: Any = torch.ops.transformers

    def fn(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        slots = torch.arange(2 * a.shape[0], device=a.device).flip(0)
        rows, weights = a[slots // 2], torch.stack([w, w])
        ends = torch.tensor([a.shape[0], 2 * a.shape[0]], dtype=torch.int32)
        out = ops.grouped_mm_fallback(rows, weights, ends)
        if backward:
            out = ops.grouped_mm_fallback_backward(rows, weights, ends, out)[0]
        return all_reduce(out[slots].view(a.shape[0], 2, -1).sum(1))

    (reason,) = left_alone(fn, A, W)
    op = "grouped_mm_fallback" + "_backward" * backward
    assert reason.code == "grouped_matmul" and reason.culprit.op.split(".")[1] == op


def test_every_name_is_read() -> None:
    """Where this torch has the op; a name that no version has would never be noticed."""
    pytest.importorskip("transformers.integrations.moe")
    graph = fx.Graph()
    for name in MATMULS:
        namespace, _, op = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), op, None)
        assert packet is not None, name
        for overload in packet.overloads():
            assert other_matmul(graph.call_function(getattr(packet, overload))) is MATMULS[name]
    assert other_matmul(graph.call_function(aten.mm.default)) is None
    assert other_matmul(graph.placeholder("x")) is None


def test_plain_matmuls_beside_one_keep_their_reason() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> list[torch.Tensor]:
        batches = all_gather(x).view(4, 16, 32)
        return [torch.bmm(batches, torch.stack([w] * 4)), int8(batches.view(64, 32), w, s)]

    (reason,) = left_alone(fn, X, W, ONE)
    assert reason.code == "batched_matmul"


def test_a_matmul_that_is_fused_with_another_collective() -> None:
    module = traced(lambda x, w: all_reduce((all_gather(x) @ w).sin()), X, W)
    assert fuse(module) == 1
    (reason,) = review(module)
    assert (reason.code, reason.culprit.op) == ("already_fused", "operator.getitem")


def test_a_dequantised_weight_is_an_operand_like_any_other() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return all_gather(x) @ (w.to(torch.int8).float() * scale)

    module = traced(fn, X, W, ONE)
    assert fuse(module) == 1
