"""A node as a reader of `explain` finds it: in the graph by its name, in the model by its line."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import torch
from torch import fx

from ditron_inductor.task.site_records import NodeRecord

# A frame as Python prints it: the code is missing where the source is not at hand.
FRAME = re.compile(
    r'^ *File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)\n(?: {4,}(?P<code>.*\S))?', re.MULTILINE
)


def describe(node: fx.Node) -> NodeRecord:
    """Name, op, value and source line of a node, in words that stay when the graph changes."""
    if node.op == "output":
        return NodeRecord(node.name, "the graph's output", "", "")
    # As a printed graph has it: `aten.addmm.default`, `operator.getitem`.
    op = str(node._pretty_print_target(node.target)).removeprefix("torch.ops.")
    op = op if node.op == "call_function" else node.op
    return NodeRecord(node.name, op, _value_text(node.meta.get("val")), user_line(node.meta.get("stack_trace") or ""))


def user_line(stack_trace: str) -> str:
    """The innermost frame that is not torch's or ours, as `model.py:12 in forward: return self.down(x)`. Where all
    frames are torch's (a backward that autograd wrote), the innermost one; empty without a trace.
    """
    frames = list(FRAME.finditer(stack_trace))
    if not frames:
        return ""
    users = [frame for frame in frames if not frame["file"].startswith(_libraries())]
    frame = (users or frames)[-1]
    code = f": {frame['code']}" if frame["code"] else ""
    return f"{frame['file']}:{frame['line']} in {frame['function']}{code}"


@cache
def _libraries() -> tuple[str, ...]:
    """The folders whose frames no user wrote."""
    assert torch.__file__ is not None
    # By the name of the module, which is found through a link: `ditron_inductor/passes/graph`.
    return f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/"


def _value_text(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"[{', '.join(map(str, value.shape))}] {str(value.dtype).removeprefix('torch.')}"
    return f"{len(value)} values" if isinstance(value, (list, tuple)) else ""
