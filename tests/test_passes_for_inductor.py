"""passes_for_inductor: Inductor itself, with our passes in its config, fuses and computes as the backend does."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.distributed import _functional_collectives as functional

import ditron_inductor
from benchmarks.tolerances import assert_near
from ditron_inductor.errors import InvalidOptionValue, UnknownOption
from ditron_inductor.pipeline import DitronPipeline, JointPipeline, UserPassThen
from ditron_inductor.report.explain import without_caches
from tests.ranks import RankContext, RankPools

LIBRARY = {"ditron.strategy": "library"}
PASSES = USER_PASS, JOINT_PASS, FIRST_PASS = (
    "post_grad_custom_pre_pass", "joint_custom_post_pass", "joint_custom_pre_pass",
)  # fmt: skip


def layer(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD
    return functional.reduce_scatter_tensor(functional.all_gather_tensor(x, 0, group) @ w @ v, "sum", 0, group)


def run_layer(ctx: RankContext) -> dict[str, int]:
    """Inductor by its name, with a dict in which the passes went through a pickle."""
    counters.clear()
    torch._dynamo.reset()
    operands = [torch.randn(shape) for shape in ((8, 16), (16, 32), (32, 16))]
    entries: dict[str, Any] = pickle.loads(pickle.dumps(ditron_inductor.passes_for_inductor(LIBRARY)))
    with without_caches():
        got = torch.compile(layer, backend="inductor", options=entries)(*operands)
    assert_near(got, layer(*operands), num_partials=ctx.world_size)
    return dict(counters["ditron"])


def test_inductor_fuses_and_matches_eager(rank_pools: RankPools) -> None:
    for counted in rank_pools.get("cpu", 2).run(run_layer, timeout=200.0):
        assert counted["all_gather_matmul"] == 1 and counted["matmul_reduce_scatter"] == 1


def test_entries_are_passes_and_what_was_given() -> None:
    entries = ditron_inductor.passes_for_inductor({"ditron.strategy": "library", "max_autotune": True})
    assert set(entries) == {*PASSES, "shape_padding", "max_autotune"}
    assert isinstance(entries[USER_PASS], DitronPipeline)
    assert isinstance(entries[JOINT_PASS], JointPipeline) and isinstance(entries[FIRST_PASS], JointPipeline)
    assert entries[USER_PASS].options.strategy == "library"
    assert set(ditron_inductor.passes_for_inductor()) == {*PASSES, "shape_padding"}
    assert entries["shape_padding"] is False


def user_pass(graph: fx.Graph) -> None: ...


def test_a_users_pass_comes_first() -> None:
    with inductor_config.patch({USER_PASS: user_pass}):
        value = ditron_inductor.passes_for_inductor()[USER_PASS]
    first = value.user_pass if isinstance(value, UserPassThen) else value[0]
    assert first is user_pass


def test_wrong_options() -> None:
    with pytest.raises(UnknownOption, match="max_autotunes"):
        ditron_inductor.passes_for_inductor({"max_autotunes": True})
    with pytest.raises(InvalidOptionValue, match=r"ditron\.strategy"):
        ditron_inductor.passes_for_inductor({"ditron.strategy": "fastest"})


def test_a_copy_is_the_same_to_the_caches() -> None:
    entries = ditron_inductor.passes_for_inductor(LIBRARY)
    for copied in (copy.deepcopy(entries), pickle.loads(pickle.dumps(entries))):
        assert [copied[key].uuid() for key in PASSES] == [entries[key].uuid() for key in PASSES]


def test_a_pickle_brings_the_ops_into_another_process() -> None:
    """A process that has imported nothing of ours can run a graph that these passes have made, or that is cached."""
    sent = pickle.dumps(ditron_inductor.passes_for_inductor(LIBRARY))
    program = "import pickle, sys, torch; pickle.load(sys.stdin.buffer); torch.ops.ditron.matmul_all_reduce.default"
    subprocess.run([sys.executable, "-c", program], input=sent, check=True, timeout=120)
