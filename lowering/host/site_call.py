"""A site's op as a compiled graph calls it: with its tensors only, and not through torch's dispatcher.

For every site, Inductor's code for a graph (see codegen/site_kernel.py) has

    call_buf3 = site_call("matmul_all_reduce", True, "reduce_op=sum world_size=2 ..")
    ...
    buf3 = call_buf3(arg0_1, buf1)

Everything but the tensors is bound when a process loads the code. If the graph's guards and Inductor's layouts fix the
shapes and strides of the operands, a call by `tile` is recorded (recording.py), and later calls repeat the record
(repeat.py), those that a trial times (trials.py) too. Every other call runs the op's implementation.

The op itself is called if something has to see it or to replace it: a profiler, a mode, autograd, or an operand of a
subclass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_inductor.device.meetings import Holder
from ditron_inductor.lowering.host.launcher import internals
from ditron_inductor.lowering.host.prepared import Prepared
from ditron_inductor.lowering.host.recording import Recorder, Scout, recording
from ditron_inductor.lowering.host.repeat import Repeated, record_of
from ditron_inductor.lowering.host.tracing import tracing
from ditron_inductor.lowering.host.trials import SiteTrial
from ditron_inductor.task import schema
from ditron_inductor.task.watch import watch

MOST_ATTEMPTS = 4
"""The most calls of a site that are recorded. There may be several: for captures, and for other alignments."""

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class SiteCall:
    """One site of one compiled graph. It is called with the operands of its op, in their order. text: the node's text.
    implementation: what the op runs. static: whether every call has operands of the same form, so that calls may be
    recorded. `repeated` has the recorded calls, and `problem` says why the last call that was recorded cannot be
    repeated.
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
        self._of_trial: Repeated | None = None

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if torch.autograd._profiler_enabled() or torch._C._len_torch_dispatch_stack() or torch.is_grad_enabled():
            return self.op(*self.arguments(tensors))
        for repeated in self.repeated:
            result = repeated(tensors)
            if result is not None:
                return result
        # Only one call is watched at a time, on all threads together.
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
        """Returns the arguments of the op. There is no token, because the generated code has ordered the call."""
        return list(tensors), self.text, None

    def _watched(self, tensors: Sequence[torch.Tensor]) -> Any:
        """A call that no record covers, recorded if later ones may be as this one."""
        prepared = self._prepared
        if prepared is None or not prepared.holds():
            # This is the first call, or the group was made again or reset, or a rank has got a larger weight.
            self.repeated, self._attempts, self._of_trial = [], 0, None
            with Scout() as scout:
                result = self._run(tensors)
            self._prepared = scout.prepared
            # A call that looks nothing up, such as one of `projections`, is not recorded: nothing would end the record.
            self.static = scout.prepared is not None
            return result
        if prepared.trial is not None:
            can = _can_be_recorded(prepared, tensors)
            return self._tried(prepared.trial, tensors) if can else self._run(tensors)
        choice = prepared.now().choice
        may = self._attempts < MOST_ATTEMPTS and choice is not None and choice[2].strategy == "tile"
        if not may or not _can_be_recorded(prepared, tensors):
            return self._run(tensors)
        self._attempts += 1
        result, repeated = self._recorded(tensors)
        if repeated is not None:
            self.repeated.append(repeated)
        return result

    def _tried(self, trial: SiteTrial, tensors: Sequence[torch.Tensor]) -> Any:
        """A call of a trial. So that `tile` is timed as later calls run, an untimed call is recorded, or, if there is
        none that can be, a timed one; the other calls repeat the record.
        """
        repeated, (strategy, is_timed) = self._of_trial, trial.upcoming() or ("", False)
        may = strategy == "tile" and repeated is None and self._attempts < MOST_ATTEMPTS
        if may and (not is_timed or trial.skips()):
            self._attempts += 1
            result, self._of_trial = self._recorded(tensors)
            return result
        addresses = None if repeated is None else repeated.addresses(tensors)
        if repeated is None or addresses is None:
            return self._run(tensors)
        chosen = trial.repeating("tile", functools.partial(repeated.start, addresses))
        return self._run(tensors) if chosen is None else chosen.noted()()

    def _recorded(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Repeated | None]:
        """Returns (the results of a call, what repeats it, or None where `problem` says why nothing can)."""
        with Recorder(tensors) as recorder:
            result = self.implementation(*self.arguments(recorder.operands))
        record = record_of(recorder, result)
        if isinstance(record, str) or record.chosen.choice is None or record.chosen.choice[2].strategy != "tile":
            self.problem = record if isinstance(record, str) else "another strategy"
            return result, None
        return result, Repeated(record)


def are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Returns whether all are plain tensors. Subclasses, such as FakeTensor, have to go through the dispatcher."""
    return all(type(x) in PLAIN for x in tensors)


def _can_be_recorded(prepared: Prepared, tensors: Sequence[torch.Tensor]) -> bool:
    """Returns whether this call could be repeated from a record if it runs by `tile`."""
    if watch.observer is not None or tracing.buffer is not None or isinstance(prepared.workspace, Holder):
        return False
    found = internals()
    if found is None or found.settings() is None:
        return False
    if not are_plain(tensors) or any(x.numel() == 0 or x.device != tensors[0].device for x in tensors):
        return False
    return not prepared.workspace.shared.order.is_capturing()
