"""Kernels are told how many threads their programs have, which is what blocks with a place for each are made for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from ditron_inductor.lowering.all_reduce import all_reduce_kernel as reduction
from ditron_inductor.lowering.all_reduce_rms_norm import norm_kernel as norm
from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.lowering.host.launcher import Arguments
from ditron_inductor.task.nodes import EXTRAS, AllReduceRmsNorm, MatmulAllReduce, Norm, Policy
from tests.lowering.recording import make_launch

SITE = 4, "0", "threads", Policy("tile", 1 << 30, 30.0)


def reduce_and_norm(launch: Launch) -> None:
    node = AllReduceRmsNorm("sum", Norm("rms", 1e-6, round_first=True), ("weight",), *SITE)
    x, weight = torch.randn(64, 4096).bfloat16(), torch.ones(4096).bfloat16()
    given = tuple(weight if name == "weight" else None for name in EXTRAS)
    norm.all_reduce_rms_norm(node, launch, norm.geometry(node, launch, x, 4096), x, given)


def multiply_and_reduce(launch: Launch) -> None:
    node = MatmulAllReduce("sum", *SITE)
    a, b = torch.randn(64, 16).bfloat16(), torch.randn(16, 4096).bfloat16()
    sizes = reduction.geometry(node, launch, a, 4096)
    reduction.reduced_sum(node, launch, sizes, [a], [b])


@pytest.mark.parametrize("call", [reduce_and_norm, multiply_and_reduce])
@pytest.mark.parametrize(("arch", "warp"), [("sm_90", 32), ("gfx942", 64)])
def test_threads_are_those_of_the_warps(call: Any, arch: str, warp: int) -> None:
    launch = make_launch(None, None)
    shared: Any = launch.workspace.shared
    shared.capabilities = SimpleNamespace(num_sms=132, arch=arch, in_band=False)
    given: list[Arguments] = []

    def run(self: Launch, kernel: Any, nbytes: int, arguments: Any, tensors: Any) -> None:
        given.append(arguments())

    with mock.patch.multiple(Launch, run=run, interpreted=False):
        call(launch)
    (arguments,) = given
    # In whichever structure of what is known at compile time.
    (threads,) = {value.THREADS for value in arguments.values.values() if hasattr(value, "THREADS")}
    warps = arguments.values["num_warps"]
    assert warps > 1 and threads == warp * warps
