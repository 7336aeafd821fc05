"""A site's op as a compiled graph calls it: past torch's dispatcher, with its tensors only.

Inductor's code for a graph (see site_kernel.py) has, for every site,

    call_buf3 = site_call("matmul_all_reduce", True, "reduce_op=sum world_size=2 ..")
    ...
    buf3 = call_buf3(arg0_1, buf1)

All but the tensors is bound when the code is loaded, in whichever process that is. Where the shapes and strides of the
operands are fixed by the graph's guards and Inductor's layouts, a call by `tile` is recorded (recording.py), and done
again from its record (repeat.py). Every other call runs what the op runs.

The op itself is called while somebody may want to see it, or to take its place: a profiler, a mode, autograd, an
operand of another class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.device.meetings import Holder
from ditron_inductor.lowering.host.launcher import internals
from ditron_inductor.lowering.host.prepared import Prepared
from ditron_inductor.lowering.host.recording import Recorder, Scout, recording
from ditron_inductor.lowering.host.repeat import Repeated, record_of
from ditron_inductor.lowering.host.tracing import tracing
from ditron_inductor.task import schema
from ditron_inductor.task.watch import watch

MOST_ATTEMPTS = 4
"""Calls of a site that are recorded: some once for a graph's captures, some again when an operand lies elsewhere."""

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class SiteCall:
    """One site of one compiled graph. Called with the operands of its op, in their order.

    text: of the node. implementation: what the op runs. static: whether every call has operands of the same form, and
    there may be a record of one. repeated: what can be done again from a record. problem: why the last call that was
    recorded can not.
    """

    def __init__(self, kind: str, static: bool, text: str, implementation: Callable[..., Any]) -> None:
        self.op = schema.overload(kind)
        self.implementation = implementation
        self.text = text
        self.static = static
        self.repeated: list[Repeated] = []
        self.problem = ""
        self._prepared: Prepared | None = None
        self._attempts = 0

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if torch.autograd._profiler_enabled() or torch._C._len_torch_dispatch_stack() or torch.is_grad_enabled():
            return self.op(*self.arguments(tensors))
        for repeated in self.repeated:
            result = repeated(tensors)
            if result is not None:
                return result
        # One call is watched at a time, whichever thread it is on.
        if not self.static or not recording.lock.acquire(blocking=False):
            return self._run(tensors)
        try:
            return self._watched(tensors)
        finally:
            recording.lock.release()

    def _run(self, tensors: Sequence[torch.Tensor]) -> Any:
        op = self.implementation if are_plain(tensors) else self.op
        return op(*self.arguments(tensors))

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], str, None]:
        """The arguments of the op for a call with these operands. The graph has ordered the call: there is no token."""
        return list(tensors), self.text, None

    def _watched(self, tensors: Sequence[torch.Tensor]) -> Any:
        """A call that no record covers, recorded if later ones may be as this one."""
        prepared = self._prepared
        if prepared is None or not prepared.holds():
            # The first call, a group made again, a reset, a larger weight elsewhere.
            self.repeated, self._attempts = [], 0
            with Scout() as scout:
                result = self._run(tensors)
            self._prepared = scout.prepared
            # Without a lookup, as of `projections`, there is nothing whose end would be seen.
            self.static = scout.prepared is not None
            return result
        if self._attempts >= MOST_ATTEMPTS or not _can_be_recorded(prepared, tensors):
            return self._run(tensors)
        self._attempts += 1
        with Recorder(tensors) as recorder:
            result = self.implementation(*self.arguments(recorder.operands))
        record = record_of(recorder, result)
        if isinstance(record, str):
            self.problem = record
        else:
            self.repeated.append(Repeated(record))
        return result


def are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are tensors with memory of their own; of others, such as FakeTensors, the dispatcher knows more."""
    return all(type(x) in PLAIN for x in tensors)


def _can_be_recorded(prepared: Prepared, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether this call could be done again from a record."""
    if prepared.trial is not None:
        return False
    choice = prepared.now().choice
    if choice is None or choice[2].strategy != "tile" or watch.observer is not None or tracing.buffer is not None:
        return False
    found = internals()
    if found is None or found.settings() is None:
        return False
    if not are_plain(tensors) or any(x.numel() == 0 or x.device != tensors[0].device for x in tensors):
        return False
    assert not isinstance(prepared.workspace, Holder), "a call without a workspace runs by the library"
    return not prepared.workspace.shared.order.is_capturing()
