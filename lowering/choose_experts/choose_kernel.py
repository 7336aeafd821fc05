"""choose_experts: the experts that each of a few tokens takes, and their weights, from the router's product on.

Problem. A router multiplies a few tokens with a narrow weight, takes the softmax of what comes of it, chooses the
largest values and divides them by their sum. These are five launches of the library and of Inductor, each of which ends
before it has filled the GPU. Algorithm. There are two. The first one is a product in parts of K (see
`divided_product_kernel`), so that many programs read the router. In the second one each program has a token: it adds up
the parts, rounds, and computes the scores. A key is the bits of a score as an integer, changed so that integers are
ordered as the scores are, and behind them the place, counted from the right. So no two keys are equal, the largest key
is that of the next expert, and of equal scores the left one is chosen. Nothing is communicated, and no program waits.
Limits. There are few tokens of 16-bit elements, and K of the router is contiguous. Anything else is computed by the
library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ditron_inductor.device.streams import handle_for
from ditron_inductor.lowering.host.launcher import Arguments, local_launcher
from ditron_inductor.lowering.host.local_calls import LocalCalls, facts_of
from ditron_inductor.lowering.matmul_all_reduce_rms_norm.divided_product import DTYPES, MOST_ROWS, product_in_parts
from ditron_inductor.task import reference, schema
from ditron_inductor.task.nodes import ChooseExperts

MOST_EXPERTS = 1024
"""The most experts whose scores a program holds."""
WARPS = 1
MOST_AT_ONCE, MOST_LOADED = 32, 2048
"""The most parts, and the most elements of parts, that a program loads at once."""
Runner = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], list[torch.Tensor]]
"""A function of (x, router, bias or None)."""


class Sizes(NamedTuple):
    """The tokens, and the parts of their product."""

    T: Any
    parts: Any


class How(NamedTuple):
    """What is known at compile time: the experts, those of a token, the powers of two that are not below them, the
    parts that are loaded at once, whether experts are chosen by the softmax, whether that is divided by its sum, and
    whether there is a bias.
    """

    E: Any
    TOP_K: Any
    BLOCK_E: Any
    BLOCK_K: Any
    AT_ONCE: Any
    SOFTMAX: Any
    NORMALISED: Any
    HAS_BIAS: Any


@triton.jit
def choose_kernel(parts, bias, values, experts, sizes, HOW: tl.constexpr):
    """See the module and the node. parts is [parts, T, E] in fp32, bias [E] has the dtype of the logits, or is anything
    of this dtype if there is none. values and experts are [T, TOP_K].
    """
    E: tl.constexpr = HOW.E
    TOP_K: tl.constexpr = HOW.TOP_K
    BLOCK_E: tl.constexpr = HOW.BLOCK_E
    BLOCK_K: tl.constexpr = HOW.BLOCK_K
    AT_ONCE: tl.constexpr = HOW.AT_ONCE
    token = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK_E)
    inside = places < E
    total = tl.zeros((BLOCK_E,), dtype=tl.float32)
    at_once = tl.arange(0, AT_ONCE)
    for first in range(0, sizes.parts, AT_ONCE):
        part = first + at_once
        there = (part < sizes.parts)[:, None] & inside[None, :]
        rows = tl.load(parts + (part * sizes.T + token)[:, None] * E + places[None, :], mask=there, other=0.0)
        total += tl.sum(rows, 0)
    if HOW.HAS_BIAS:
        total += tl.load(bias + places, mask=inside, other=0.0).to(tl.float32)
    logits = total.to(bias.dtype.element_ty).to(tl.float32)
    if HOW.SOFTMAX:
        # A logit that is no number, or inf, makes all scores of the token NaNs, and so do logits of -inf alone.
        terms = tl.where(inside, tl.exp(logits - tl.max(tl.where(inside, logits, float("-inf")), 0)), 0.0)
        scores = terms / tl.sum(terms, 0)
    else:
        scores = logits
    bits = tl.where(scores == scores, scores.to(tl.int32, bitcast=True), 0x7FFFFFFF)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(tl.int64) << 32) | (BLOCK_E - 1 - places).to(tl.int64)
    # The least key that there is belongs to no score.
    LEAST: tl.constexpr = -(1 << 63)
    keys = tl.where(inside, keys, LEAST)
    slots = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), dtype=tl.int64)
    for step in tl.static_range(TOP_K):
        largest = tl.max(keys, 0)
        keys = tl.where(keys == largest, LEAST, keys)
        chosen = tl.where(slots == step, largest, chosen)
    back = (chosen >> 32).to(tl.int32)
    value = (back ^ ((back >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    there = slots < TOP_K
    if HOW.NORMALISED:
        value = value / tl.sum(tl.where(there, value, 0.0), 0)
    at = token * TOP_K + slots
    tl.store(values + at, value.to(values.dtype.element_ty), mask=there)
    tl.store(experts + at, BLOCK_E - 1 - (chosen & 0xFFFFFFFF), mask=there)


def prepare(
    node: ChooseExperts, x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None, strategy: str
) -> Runner:
    """Returns what chooses the experts for operands of these forms: the kernels if they can run, and otherwise the
    library. In the interpreter, which is slow, the kernels run only if `tile` is forced.
    """
    if x.device.type == "cpu" and strategy != "tile":
        return by_library(node)
    (T, K), E = x.shape, router.shape[1]
    fits = 0 < T <= MOST_ROWS and K > 0 and node.top_k <= E <= MOST_EXPERTS and x.dtype in DTYPES
    lies = x.is_contiguous() and router.stride(0) == 1 and (bias is None or bias.is_contiguous())
    if not fits or not lies or facts_of(x.device).tile_problem:
        return by_library(node)
    product = product_in_parts(x, T, E)
    has = node.scores == "softmax", node.normalised, node.has_bias
    block = triton.next_power_of_2(E)
    at_once = min(MOST_AT_ONCE, max(1, MOST_LOADED // block))
    how = How(E, node.top_k, block, triton.next_power_of_2(node.top_k), at_once, *has)
    arguments = Arguments(T, {"sizes": Sizes(T, product.parts), "HOW": how, "num_warps": WARPS})
    launcher = local_launcher(choose_kernel, x.device)
    outputs = node.outputs({"x": x.shape, "router": router.shape})

    def run(x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None) -> list[torch.Tensor]:
        values, experts = schema.memory(x, outputs)
        tensors = {
            "parts": product.multiply(x, router),
            "bias": x if bias is None else bias,
            "values": values,
            "experts": experts,
        }
        launcher(handle_for(x), lambda: arguments, (), (), tensors)
        return [values, experts]

    return run


def by_library(node: ChooseExperts) -> Runner:
    """Returns what multiplies, computes all scores and sorts them."""
    return lambda *operands: [*reference.chosen(node.top_k, node.scores, node.normalised, *operands)]


choose_experts: LocalCalls[ChooseExperts] = LocalCalls(prepare)
"""Returns [values, experts], each [T, top_k] and contiguous. operands: as `ChooseExperts` describes them."""
