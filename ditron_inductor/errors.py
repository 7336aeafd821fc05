"""Every error that Ditron raises on purpose: one class with one message template each.

A class takes its facts as keyword arguments, which fill the template and can be read as ``error.fields``. Errors about
what the user wrote are also ``ValueError``; errors of a run are also ``RuntimeError``.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar


class DitronError(Exception):
    """The base class of all errors. ``message`` is the template; its placeholders are the keyword arguments."""

    message: ClassVar[str]

    def __init__(self, **fields: Any) -> None:
        self.fields: dict[str, Any] = fields
        super().__init__(self.message.format(**fields))

    def __reduce__(self) -> tuple[Any, ...]:
        """Keeps the fields when the error is sent from a rank process to its parent."""
        return functools.partial(type(self), **self.fields), ()


# Errors about what the user wrote.


class UnknownOption(DitronError, ValueError):
    message = "unknown option '{key}'. {valid}"


class InvalidOptionValue(DitronError, ValueError):
    message = "option '{key}' = {value!r} is not valid: {allowed}"


class InvalidOperands(DitronError, ValueError):
    """An operand is not one that the op takes. ``found`` and ``expected`` describe the tensor: shape, dtype, device."""

    message = "{op}: {tensor} is {found}, not {expected}"


class InvalidTable(DitronError, ValueError):
    message = "{source}, line {line}: {problem}"


class StrategyUnavailable(DitronError, ValueError):
    message = "strategy '{strategy}' is forced (option 'ditron.strategy') but cannot run at {site}: {reason}. {remedy}"


class DitronNotFused(DitronError, ValueError):
    """A collective that could be fused was left alone, and ``ditron.strict`` is set. ``sites`` names each collective,
    the node that stopped its fusion, the reason, and what to change.
    """

    message = "{count} collectives beside matmuls are not fused, and the option 'ditron.strict' asks for it:{sites}"


class DitronOptionsMismatch(DitronError, ValueError):
    """The ranks of a group have different options. ``differences`` names each option, its values and their ranks."""

    message = (
        "the ranks of group '{group_name}' run Ditron with different settings: {differences}. Give all of them the same"
    )


class MissingDependency(DitronError, RuntimeError):
    message = "{name} is needed for {needed_for}: {found}. To do: {remedy}"


# Errors that the compiler finds in a graph: mistakes of Ditron itself or of a pass that ran before it.


class InvalidTaskNode(DitronError, ValueError):
    message = "{node}: field '{field}' {problem}"


class InvalidEpilogue(DitronError, ValueError):
    message = "the epilogue '{text}' {problem}"


class GraphVerificationError(DitronError, RuntimeError):
    message = "the graph is not valid after {where}: {problem}"


# Errors of a run.


class DitronRunsUnfused(DitronError, RuntimeError):
    """A fused site can run only by the library, and ``ditron.strict`` is ``"run"``. ``reason`` is the obstacle."""

    message = "{site} can run only by the library, unfused, and the option 'ditron.strict' = 'run' forbids it: {reason}"


class DitronTimeout(DitronError, RuntimeError):
    """A bounded wait for a peer's signal expired. ``expected`` and ``seen`` describe the flag: epoch and site.
    ``absent`` is a sentence about other ranks that have not come, or nothing.
    """

    message = (
        "rank {rank} waited {seconds:.1f} s at site '{site}' for rank {peer} (chunk {chunk}): "
        "expected {expected}, saw {seen}. That rank is dead, stopped or late, runs another program, runs this part "
        "of it eagerly, or waits for such a rank itself. {absent}"
        "Call ditron_inductor.reset(group) on all ranks to go on"
    )


class DitronDiverged(DitronError, RuntimeError):
    """Two ranks of one group were at different sites at the same point of the group's call order."""

    message = (
        "rank {rank} was at site '{site}' while rank {peer} was at site '{peer_site}': "
        "the ranks run different programs, or run them in different orders. "
        "Call ditron_inductor.reset(group) on all ranks to go on"
    )


class DitronStaleGraph(DitronError, RuntimeError):
    """A graph was compiled for a group of another size. ``compiled`` and ``found`` are numbers of ranks."""

    message = (
        "group '{group_name}' has {found} ranks, and a graph that is to run in it was compiled for {compiled}. "
        "Compile it again: call torch.compiler.reset(), and clear the compiler's cache if the graph came from there"
    )


class DitronNotReplicated(DitronError, RuntimeError):
    """A tensor that has to be the same on all ranks is not. ``tensor`` describes the first tensor that differs."""

    message = (
        "rank {rank} of group '{group_name}' has another {tensor} than rank {peer} at {site}: the work between two "
        "all-reduces was divided among the ranks, which takes its inputs to be the same on all of them. "
        "Make them so, or compile with the option 'ditron.sequence_parallel' = 'off'"
    )


class DitronPoisoned(DitronError, RuntimeError):
    message = (
        "group '{group_name}' failed earlier ({cause}) and cannot be used "
        "until all its ranks call ditron_inductor.reset(group)"
    )


class NoDefaultGroup(DitronError, RuntimeError):
    message = "{what} needs torch.distributed.init_process_group first: it runs on all ranks of the default group"


class DitronCaptureError(DitronError, RuntimeError):
    message = "{site} cannot be captured in a CUDA graph yet: {problem}. Run it once before the capture begins"


class DitronInterpreterBusy(DitronError, RuntimeError):
    message = (
        "kernel '{kernel}' cannot be launched on the CPU device while another thread of this process runs one: "
        "Triton's interpreter has no place for two. Call Ditron from one thread, or set the option 'ditron.strategy' "
        "to 'library'"
    )


class DitronHandshakeError(DitronError, RuntimeError):
    """Some ranks did not come to an exchange on the host in time. ``missing`` names them."""

    message = (
        "group '{group_name}': rank {rank} waited {seconds:.1f} s to {purpose}, and did not hear from: {missing}. "
        "All ranks of a group have to reach its first Ditron call"
    )


class WorkspaceError(DitronError, RuntimeError):
    message = "the workspace of group '{group_name}' {problem}. {remedy}"
