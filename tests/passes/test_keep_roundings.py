"""keep_roundings: conversions through a narrower dtype are hidden from Inductor's passes for joint graphs, and shown."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor.pattern_matcher import CallFunction, KeywordArg, Match, PatternMatcherPass, register_graph_pattern

from ditron_inductor.options import Options
from ditron_inductor.passes.normalize import keep_roundings
from ditron_inductor.passes.normalize.keep_roundings import CONVERT, HIDDEN, hide_roundings, show_roundings
from tests.passes.graphs import all_reduce, text, traced

pytestmark = pytest.mark.usefixtures("group")
BF16, FP32 = torch.bfloat16, torch.float32
OPTIONS = Options()


@pytest.fixture(autouse=True)
def _removing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_roundings, "KEPT_BY_TORCH", False)


def convert(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out: torch.Tensor = torch.ops.prims.convert_element_type.default(x, dtype)
    return out


def layers(x: torch.Tensor, residual: torch.Tensor) -> Any:
    """Two sums in fp32, of which the first is rounded for the second one only."""
    wide = convert(all_reduce(x), FP32) + convert(residual, FP32)
    wide = convert(x, FP32) + convert(convert(wide, BF16), FP32)
    return convert(wide, BF16), wide


def without_roundings(graph: fx.Graph) -> int:
    """What torch before 2.13 makes of two conversions in a row. Returns how many times it did."""
    patterns = PatternMatcherPass()

    @register_graph_pattern(
        CallFunction(CONVERT, CallFunction(CONVERT, KeywordArg("x"), KeywordArg("_narrow")), KeywordArg("dtype")),
        pass_dict=patterns,
    )
    def _(match: Match, x: fx.Node, _narrow: torch.dtype, dtype: torch.dtype) -> None:
        last = match.output_node()
        with match.graph.inserting_before(last):
            direct = match.graph.call_function(CONVERT, (x, dtype))
        direct.meta.update(last.meta)
        last.replace_all_uses_with(direct)
        match.erase_nodes()

    return int(patterns.apply(graph))


def module_of(fn: Any = layers) -> fx.GraphModule:
    return traced(fn, *(torch.randn(4, 8, dtype=BF16) for _ in range(2)))


def test_hidden_ones_outlive_a_pass_that_removes_them() -> None:
    assert without_roundings(module_of().graph) == 1
    module = module_of()
    before = text(module.graph)
    assert hide_roundings(module.graph, options=OPTIONS) == 1
    assert [node.meta["val"].dtype for node in module.graph.find_nodes(op="call_function", target=HIDDEN)] == [BF16]
    assert without_roundings(module.graph) == 0
    assert show_roundings(module.graph, options=OPTIONS) == 1
    assert text(module.graph) == before
    assert show_roundings(module.graph, options=OPTIONS) == 0


def test_what_is_hidden_computes_the_same() -> None:
    module = module_of(lambda x, y: convert(convert(convert(x, FP32) + convert(y, FP32), BF16), FP32) + all_reduce(x))
    operands = [torch.randn(4, 8, dtype=BF16) for _ in range(2)]
    before = module(*operands)
    assert hide_roundings(module.graph, options=OPTIONS) == 1
    module.recompile()
    assert torch.equal(module(*operands), before)


def test_others_stay() -> None:
    """A conversion of which something else is made, one of 16 bits, a result, and a graph without collectives."""

    def others(x: torch.Tensor, y: torch.Tensor) -> Any:
        wide = convert(all_reduce(x), FP32)
        used = convert(wide * 2, BF16)
        summed = convert(wide * 3, BF16)
        again = convert(convert(y, torch.float16), FP32)
        return convert(used, FP32), used.t(), convert(summed, FP32), summed.sum(dtype=FP32), again, convert(wide + 1, BF16)

    def alone(x: torch.Tensor, y: torch.Tensor) -> Any:
        return convert(convert(convert(x, FP32) + 1, BF16), FP32)

    for fn in (others, alone):
        module = module_of(fn)
        before = text(module.graph)
        assert hide_roundings(module.graph, options=OPTIONS) == 0 and text(module.graph) == before


def test_a_torch_that_keeps_them_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_roundings, "KEPT_BY_TORCH", True)
    assert hide_roundings(module_of().graph, options=OPTIONS) == 0
