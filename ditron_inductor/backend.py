"""The entry point of `torch.compile(model, backend="ditron")`: options in, Inductor out.

Importing this module declares the Task ops and binds their kernels. That has to happen on import: a graph that comes
from a cache calls them without any pass having run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo
import torch._inductor
import torch._inductor.config
from torch import fx
from torch._inductor.compile_fx import compile_fx
from torch._logging import warning_once

from ditron_inductor import runtime
from ditron_inductor.device.compilations import compilations
from ditron_inductor.errors import InvalidOptionValue
from ditron_inductor.options import Options
from ditron_inductor.passes.finish.wire_facts import lines_of
from ditron_inductor.passes.graph.collectives import group_sizes
from ditron_inductor.pipeline import BEFORE_JOINT, DitronPipeline, JointPipeline, with_user_passes
from ditron_inductor.recompilations import warn_of_many

log = logging.getLogger(__name__)

NAME = "ditron"
USER_PASS_OPTION = "post_grad_custom_pre_pass"
FIRST_PASS_OPTION = "joint_custom_pre_pass"
JOINT_PASS_OPTION = "joint_custom_post_pass"
# By these a rank would decide alone, by the clock, what our passes see: docs/rank_decisions.md. No option changes them.
DECIDED_FOR_ALL: dict[str, Any] = {"shape_padding": False}

runtime.prepare()
compilations.watch()


def ditron(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles `gm` with Inductor after fusing its collectives with its matmuls, forward and backward. mode: a mode of
    Inductor (`torch._inductor.list_mode_options`). options: Inductor's keys, and Ditron's under `ditron.`. A
    `joint_custom_pre_pass`, `joint_custom_post_pass` or `post_grad_custom_pre_pass` of the user, from `options` or from
    Inductor's config, runs before ours. Raises UnknownOption, InvalidOptionValue and InvalidTable, which are also
    ValueErrors. `torch.compile` calls this for its first graph and raises BackendCompilerFailed, whose
    `inner_exception` is one of these.
    """
    warn_of_many()
    has_peers = any(size > 1 for size in group_sizes().values())
    patches = {**_mode_patches(mode), **_passes(options, lines_of(gm) if has_peers else "")}
    with compilations.announced():
        compiled: Any = compile_fx(gm, example_inputs, config_patches=patches)
    return compiled


def passes_for_inductor(options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the entries of Inductor's config with which it fuses as `backend="ditron"` does. It is for a stack that
    calls Inductor itself and takes its config as a dict: `torch.compile(model, backend="inductor",
    options=passes_for_inductor())`.

    options: Inductor's keys, and Ditron's under `ditron.`. Inductor's keys are returned unchanged, except those in
    `DECIDED_FOR_ALL`. A `joint_custom_pre_pass`, `joint_custom_post_pass` or `post_grad_custom_pre_pass` of the user,
    from `options` or from Inductor's config, runs before ours. Each call makes new passes. They may be
    pickled, and they import the ops and kernels of Ditron in another process. Raises UnknownOption, InvalidOptionValue
    and InvalidTable, which are also ValueErrors.
    """
    return _passes(options, "")


def _passes(options: Mapping[str, Any] | None, lines: str) -> dict[str, Any]:
    """Returns the result of `passes_for_inductor` for a graph of these lines of the program."""
    ditron_options, entries = Options.parse(options)
    runtime.use(ditron_options)
    compilations.watch()
    pipelines = {
        FIRST_PASS_OPTION: JointPipeline(ditron_options, passes=BEFORE_JOINT),
        JOINT_PASS_OPTION: JointPipeline(ditron_options),
        USER_PASS_OPTION: DitronPipeline(ditron_options, lines=lines),
    }
    for option, pipeline in pipelines.items():
        user_passes = entries.pop(option, getattr(torch._inductor.config, option))
        entries[option] = with_user_passes(user_passes, pipeline)
    for option, value in DECIDED_FOR_ALL.items():
        if entries.get(option, value) != value:
            warning_once(log, REPLACED, option, entries[option], value)
    return {**entries, **DECIDED_FOR_ALL}


REPLACED = (
    "the option %s=%s is taken as %s: by it each rank would decide alone, by the clock, what it compiles, and ranks "
    "that compile different graphs wait for each other; ditron pads unaligned matmuls itself (pad_products)"
)


def _mode_patches(mode: str | None) -> dict[str, Any]:
    modes: dict[str, dict[str, Any]] = torch._inductor.list_mode_options()
    if mode is None:
        return {}
    if mode not in modes:
        raise InvalidOptionValue(key="mode", value=mode, allowed=f"one of {', '.join(modes)}")
    return dict(modes[mode])


# For a checkout that is not installed, in which torch finds no entry point.
if NAME not in torch._dynamo.list_backends():
    torch._dynamo.register_backend(ditron, name=NAME)
