"""Inductor writes the call of a site through its `SiteCall` (see site_call.py) instead of the op.

Except for this text it is the fallback kernel that Inductor makes for any op that is not its own: the same buffers,
layouts, dependencies, checks of sizes. Where the generated code is not Python (`cpp_wrapper`, AOTInductor, FX), it
calls the op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.codegen.wrapper import PythonWrapperCodegen, SubgraphPythonWrapperCodegen
from torch._inductor.lowering import fallback_handler, make_fallback, register_lowering
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree

from ditron_inductor.task.nodes import COMPILED_BY_US
from ditron_inductor.task.schema import NODE, SCHEMAS, TOKEN, overload

IMPORT = "from ditron_inductor.runtime import site_call"
WRAPPERS = (PythonWrapperCodegen, SubgraphPythonWrapperCodegen)
"""The classes that write Python. Classes that write something else are derived from these."""


class SiteKernel(ir.FallbackKernel):
    """The call of one site. call_name: its SiteCall in the generated code, empty if the code calls the op."""

    call_name: str = ""
    inputs: Sequence[Any]
    op_overload: Any

    def codegen(self, wrapper: Any) -> None:
        """Writes the SiteCall in front of the graph's function, and the call into it."""
        if type(wrapper) in WRAPPERS and not V.graph.aot_mode:
            self.call_name = f"call_{self.get_name()}"
            kind = self.op_overload._schema.name.rpartition("::")[2]
            static = all(is_static(x) for x in self.inputs)
            wrapper.add_import_once(IMPORT)
            wrapper.header.writeline(f"{self.call_name} = site_call({kind!r}, {static!r}, {self._node()!r})")
        super().codegen(wrapper)

    def get_kernel_name(self) -> str:
        name: str = self.call_name or super().get_kernel_name()
        return name

    def codegen_args(self) -> list[str]:
        """Returns the arguments: all tensors but the token, which orders calls in the graph and is done with here."""
        if not self.call_name:
            arguments: list[str] = super().codegen_args()
            return arguments
        given, _ = self.unflatten_args(list(range(len(self.inputs))), [None] * len(self.constant_args))
        token = given[TOKEN]
        return [x.codegen_reference() for index, x in enumerate(self.inputs) if index != token]

    def _node(self) -> str:
        given, _ = self.unflatten_args([None] * len(self.inputs), self.constant_args)
        text: str = given[NODE]
        return text


def is_static(x: Any) -> bool:
    """Returns whether sizes and strides of a buffer are numbers."""
    return all(getattr(number, "is_Integer", isinstance(number, int)) for number in (*x.get_size(), *x.get_stride()))


def declare(kinds: Sequence[str]) -> None:
    """Declares to Inductor that its graphs call our ops as they are, and those of `kinds` without the dispatcher."""
    from torch._inductor.lowering import lowerings

    for name in SCHEMAS:
        op = overload(name)
        if op not in lowerings:
            # The op's tags say what strides it requires.
            make_fallback(op, warn=False)
        if name in kinds:
            register_lowering(op, type_promotion_kind=None)(_handler(op))


def _handler(op: torch._ops.OpOverload) -> Any:
    plain = fallback_handler(op)

    def handler(*args: Any, **kwargs: Any) -> Any:
        if COMPILED_BY_US not in V.current_node.meta:
            return plain(*args, **kwargs)
        outputs = SiteKernel.create(op, *args, **kwargs)
        return pytree.tree_map(lambda x: ir.TensorBox.create(x) if isinstance(x, ir.IRNode) else x, outputs)

    handler._is_fallback_handler = True  # type: ignore[attr-defined]
    return handler
