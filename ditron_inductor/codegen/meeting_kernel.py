"""Inductor writes the meeting of a graph (ditron_inductor/graph_meeting.py) in front of everything that the graph does.

The pass pipeline puts one call of `ditron.meet` into each graph that holds collectives. The call computes nothing. When
Inductor generates its code, it adds its lines to the head of the graph's function. Code that is not Python
(`cpp_wrapper`, AOTInductor, FX) and subgraphs have no such head: they do not meet, and their sites run as if all ranks
had agreed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.codegen.wrapper import PythonWrapperCodegen, SubgraphPythonWrapperCodegen
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V
from torch.fx.node import has_side_effect
from torch.utils._ordered_set import OrderedSet

from ditron_inductor.task.schema import overload

IMPORT = "from ditron_inductor.graph_meeting import graph_meeting"
MEETING = "ditron_meeting"
"""The key in the metadata of the node that holds the arguments of `graph_meeting`."""


class MeetingKernel(ir.ExternKernel):
    """The meeting of the graph that is being compiled. arguments: those of `graph_meeting`."""

    def __init__(self, device: torch.device, arguments: tuple[Any, ...]) -> None:
        super().__init__(None, ir.NoneLayout(device=device), [])
        self.arguments = arguments

    def should_allocate(self) -> bool:
        return False

    def has_side_effects(self) -> bool:
        return True

    def get_reads(self) -> Any:
        return OrderedSet()

    def codegen(self, wrapper: Any) -> None:
        """Writes the lines of the meeting into the head of the graph's function."""
        name = self.get_name()
        if isinstance(wrapper, PythonWrapperCodegen) and not V.graph.cpp_wrapper:
            # At this place the wrapper frees buffers that are not read any more.
            wrapper.writeline(f"{name} = None")
        top = outermost(wrapper)
        if top is None or V.graph.aot_mode:
            return
        top.add_import_once(IMPORT)
        top.header.writeline(f"meeting_{name} = graph_meeting({', '.join(map(repr, self.arguments))})")
        strides = ", ".join(_strides(top, graph_output) for graph_output in V.graph.graph_outputs)
        with top.prefix.indent(top.get_wrapper_call_indent()):
            top.prefix.writeline(f"other = meeting_{name}()")
            top.prefix.writeline("if other is not None:")
            with top.prefix.indent():
                inputs = ", ".join(V.graph.graph_input_names)
                top.prefix.writeline(f"return other([{inputs}], [{strides}])")


def outermost(wrapper: Any) -> PythonWrapperCodegen | None:
    """Returns the object that writes the function of the whole graph in Python; None if there is no such function."""
    while isinstance(wrapper, SubgraphPythonWrapperCodegen) and wrapper.partition_signatures is not None:
        wrapper = wrapper.parent_wrapper
    return wrapper if type(wrapper) is PythonWrapperCodegen else None


def _strides(wrapper: PythonWrapperCodegen, output: Any) -> str:
    """Returns an output's strides as they are written in the graph's function; None if the output is not a tensor."""
    if not isinstance(output, (ir.TensorBox, ir.StorageBox, ir.BaseView, ir.Buffer)):
        return "None"
    known = {symbol for value in V.graph.graph_inputs.values() for symbol in _symbols(value)}
    strides = output.get_stride()
    if any(getattr(stride, "free_symbols", set()) - known for stride in strides):
        return "None"
    return str(wrapper.codegen_python_shape_tuple(strides))


def _symbols(value: Any) -> set[Any]:
    if isinstance(value, ir.TensorBox):
        sizes = (*value.get_size(), *value.get_stride())
        return {symbol for size in sizes for symbol in getattr(size, "free_symbols", ())}
    return set(getattr(value, "free_symbols", ()))


def declare_meeting() -> None:
    """Declares the op to Inductor and FX."""
    op = overload("meet")
    has_side_effect(op)

    def lower(key: str) -> None:
        tensors = [given for given in V.graph.graph_inputs.values() if isinstance(given, ir.TensorBox)]
        device = (tensors[0].get_device() if tensors else None) or torch.device("cpu")
        kernel = MeetingKernel(device, V.current_node.meta[MEETING])
        V.graph.register_buffer(kernel, set_name=True)
        V.graph.register_operation(kernel)

    register_lowering(op, type_promotion_kind=None)(lower)
