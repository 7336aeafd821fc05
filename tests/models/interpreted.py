"""Ditron without Inductor's code generation: for tests of large models, whose graphs take seconds to compile for a CPU.

Dynamo, autograd, decompositions, the partitioner, Inductor's passes and all of ours are the real ones, and our ops run
their kernels. Only what Inductor does with the finished graph, its lowering, scheduling and C++, is left out: the
graph's ops are called one after another.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch._inductor.config
from functorch.compile import make_boxed_func
from torch import fx
from torch._inductor import compile_fx as inductor
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes import post_grad
from torch._inductor.virtualized import V
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from ditron_inductor import backend
from ditron_inductor.options import Options
from ditron_inductor.pipeline import BEFORE_JOINT, DitronPipeline, JointPipeline


def interpreted(options: dict[str, Any], *, run_fused: bool = True) -> Callable[..., Any]:
    """A backend for `torch.compile` that runs the graphs which `backend="ditron"` with `options` hands to Inductor.

    Without `run_fused` it makes them too, and runs what they were before: for a process group without other ranks.
    """

    def run_backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        inner_compile = functools.partial(run_passes, run_fused)
        parsed = Options.parse(options)[0]
        patches = {
            "joint_custom_pre_pass": JointPipeline(parsed, passes=BEFORE_JOINT),
            "joint_custom_post_pass": JointPipeline(parsed),
            "post_grad_custom_pre_pass": DitronPipeline(parsed),
        }
        return compile_fx(gm, example_inputs, inner_compile=inner_compile, config_patches=patches)

    return run_backend


@contextlib.contextmanager
def without_generated_code() -> Iterator[None]:
    """In the block `backend="ditron"` itself, whatever its options, is as `interpreted`, and Inductor by its name
    generates no code either: for programs that name them.
    """
    quick = functools.partial(compile_fx, inner_compile=functools.partial(run_passes, True))
    with mock.patch.object(backend, "compile_fx", quick), mock.patch.object(inductor, "compile_fx", quick):
        yield


def code_generated(wanted: bool) -> contextlib.AbstractContextManager[None]:
    """`without_generated_code`, unless it is `wanted`: by tests of Inductor's own code, and of how it uses memory."""
    return contextlib.nullcontext() if wanted else without_generated_code()


def run_passes(run_fused: bool, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
    """What `compile_fx` calls with a finished graph: the passes on it, and then a call of its ops one by one."""
    post_grad.view_to_reshape(gm)
    fake_mode = torch._guards.detect_fake_mode(example_inputs)
    assert fake_mode is not None
    with torch.no_grad():
        FakeTensorProp(gm, mode=fake_mode).propagate_dont_convert_inputs(*example_inputs)
    before = fx.Graph()
    before.output(before.graph_copy(gm.graph, {}))
    unfused = fx.GraphModule(gm, before)
    with V.set_fake_mode(fake_mode):
        post_grad.post_grad_passes(gm, bool(options.get("is_inference")))
    gm.recompile()
    return make_boxed_func(gm.forward if run_fused else unfused.forward)
