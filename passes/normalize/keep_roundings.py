"""Keeps that a value in fp32 is rounded before it is widened again, which torch before 2.13 leaves out.

Serving engines add a residual in fp32, and round what the next layer adds:

    add(x, residual) = wide -> convert(bf16) -> convert(fp32) -> add(.., y)
                          \\-> norm -> mm

Before 2.13 Inductor makes of both conversions one, of fp32 to fp32, and so the sum of one layer is the residual of the
next one in fp32. Then `all_reduce_rms_norm` finds no node for it, because a node rounds the sum that it writes. And the
residual is not what the program says. From 2.13 on Inductor keeps conversions through a narrower dtype.

`hide_roundings` runs in front of the passes of a joint graph, and gives such a conversion another op, of which these
know nothing. `show_roundings` runs behind them, and gives it its own op back. Graphs without collectives stay as they
are.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.torch_version import TorchVersion

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs
from ditron_inductor.passes.graph.collectives import is_collective
from ditron_inductor.passes.normalize.vllm_collectives import is_vllm_collective

CONVERT = torch.ops.prims.convert_element_type.default
HIDDEN = torch.ops.aten._to_copy.default
MARK = "ditron_rounding"
KEPT_BY_TORCH = TorchVersion(torch.__version__) >= "2.13"


def hide_roundings(graph: fx.Graph, *, options: Options) -> int:
    """Hides every conversion of fp32 to a narrower dtype which is only converted back. Returns how many."""
    if KEPT_BY_TORCH or not any(is_collective(node) or is_vllm_collective(node) for node in graph.nodes):
        return 0
    hidden = [node for node in graph.find_nodes(op="call_function", target=CONVERT) if _is_lost(node)]
    for node in hidden:
        source, dtype = node.args
        node.target, node.args, node.kwargs = HIDDEN, (source,), {"dtype": dtype}
        node.meta[MARK] = True
    return len(hidden)


def show_roundings(graph: fx.Graph, *, options: Options) -> int:
    """Undoes `hide_roundings`. Returns how many conversions it found."""
    shown = [node for node in graph.find_nodes(op="call_function", target=HIDDEN) if node.meta.pop(MARK, False)]
    for node in shown:
        node.target, node.args, node.kwargs = CONVERT, (*node.args, node.kwargs["dtype"]), {}
    return len(shown)


def _is_lost(node: fx.Node) -> bool:
    if proofs.fake(node).dtype not in (torch.bfloat16, torch.float16):
        return False
    if any(user.target is not CONVERT for user in node.users):
        return False
    return {proofs.fake(each).dtype for each in (proofs.operand(node), *node.users)} == {torch.float32}
