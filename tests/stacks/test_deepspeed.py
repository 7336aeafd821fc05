"""A Llama that DeepSpeed cuts by itself (AutoTP), compiled: it computes what it does in eager mode, and is fused."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

from benchmarks.tolerances import MODEL_TOLERANCES, relative_error
from tests.ranks import RankContext, RankPools

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("deepspeed", "transformers")),
    reason="needs DeepSpeed: make test-stacks",
)


def run_model(ctx: RankContext) -> Counter[str]:
    """What the passes counted while the compiled model computed what the eager one does."""
    rank = str(ctx.rank)
    environment = {"DS_ACCELERATOR": "cpu", "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(ctx.world_size)}
    with mock.patch.dict(os.environ, environment):
        import deepspeed
        from transformers import LlamaConfig, LlamaForCausalLM

        # DeepSpeed's own kernel for shared memory takes minutes to build where cores are few, and ends the process on
        # some CPUs, in eager mode as well.
        with mock.patch("deepspeed.comm.torch.build_shm_op", return_value=None):
            deepspeed.init_distributed("gloo")
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(1)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 96}
        whole = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)).eval()
        tokens = torch.randint(96, (2, 8), generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            wanted = whole(tokens).logits
            parallel = {"tp_size": ctx.world_size}
            engine = deepspeed.init_inference(whole, tensor_parallel=parallel, dtype=torch.float32)
            got = torch.compile(engine.module, backend="ditron")(tokens).logits
    assert relative_error(got, wanted) < MODEL_TOLERANCES[torch.float32]
    return Counter(counters["ditron"])


def test_inference(rank_pools: RankPools) -> None:
    for counted in rank_pools.get("cpu", 2, label="deepspeed").run(run_model, timeout=200.0):
        # The layer's two, and that of the head, which DeepSpeed cuts along its input.
        assert counted["matmul_all_reduce"] == 3 and counted["all_reduce_rms_norm"] >= 1
