"""vLLM's own ops and group coordinator on 2 ranks: its collectives are fused, and compute what they do in eager mode.

`tests/passes/test_vllm_collectives.py` has the cases, with ops of the same names and schemas.
"""

from __future__ import annotations

import importlib.util
import pickle
from collections import Counter

import pytest
import torch
from torch._dynamo.utils import counters

import ditron_inductor
from benchmarks.tolerances import assert_near
from tests.models.interpreted import without_generated_code
from tests.ranks import RankContext, RankPools

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: pip install vllm==0.32.0")


def run_layer(ctx: RankContext) -> Counter[str]:
    """What the passes counted while a compiled function computed what the eager one does."""
    from vllm.distributed.parallel_state import GroupCoordinator

    torch._dynamo.reset()
    counters.clear()
    group = GroupCoordinator(
        [list(range(ctx.world_size))], ctx.rank, "gloo", use_device_communicator=True, group_name="tp"
    )
    group.use_custom_op_call = True  # as on a GPU

    def layer(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        hidden = group.all_gather(x, 0) @ w
        return [group.reduce_scatter(hidden @ v, 0), group.all_reduce(x @ w), group.all_gather(x @ w)]

    operands = [torch.randn(shape) for shape in ((8, 16), (16, 32), (32, 16))]
    with torch.no_grad(), without_generated_code():
        got = torch.compile(layer, options=ditron_inductor.passes_for_inductor(), fullgraph=True)(*operands)
        for one, other in zip(got, layer(*operands), strict=True):
            assert_near(one, other, num_partials=ctx.world_size)
    return Counter(counters["ditron"])


def test_vllms_ops_are_fused(rank_pools: RankPools) -> None:
    kinds = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_gather"
    for counted in rank_pools.get("cpu", 2).run(run_layer, timeout=200.0):
        assert {kind: counted[kind] for kind in kinds} == dict.fromkeys(kinds, 1)


def test_its_config_takes_the_passes() -> None:
    from vllm.config import CompilationConfig

    config, other = (
        CompilationConfig(inductor_compile_config=ditron_inductor.passes_for_inductor({"ditron.strategy": strategy}))
        for strategy in ("library", "tile")
    )
    assert config.compute_hash() == pickle.loads(pickle.dumps(config)).compute_hash() != other.compute_hash()
