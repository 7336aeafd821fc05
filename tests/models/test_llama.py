"""A small Llama on the CPU device, and layers of Llama 8B on GPUs, through `backend="ditron"` with strategy `tile`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ditron_inductor.tools.demo_model import LlamaConfig
from tests.cases import rare
from tests.models.llama import STRATEGY, Setup, check_inference, check_training
from tests.ranks import RankPool, RankPools, run_ranks

SMALL = LlamaConfig(dim=32, num_layers=1, num_heads=4, num_kv_heads=2, hidden_dim=64, max_seq_len=64)
CPU_SETUPS = [
    Setup(SMALL, sequence_parallel=True, batch=2, seq_len=16, dtype=torch.float32),
    # A gather along the sequence with batch 1 reaches the compiler as a view, not as split and cat.
    Setup(SMALL, sequence_parallel=True, batch=1, seq_len=12, dtype=torch.float32),
    Setup(SMALL, sequence_parallel=False, batch=2, seq_len=7, dtype=torch.float32),
]

LAYERS = LlamaConfig.llama_8b(num_layers=4)
GPU_SETUPS = [
    Setup(LAYERS, sequence_parallel=True, batch=2, seq_len=1024, dtype=torch.bfloat16),
    Setup(LAYERS, sequence_parallel=False, batch=1, seq_len=2048, dtype=torch.bfloat16),
]
# torch.compile takes a mode or options; these are what the mode `reduce-overhead` sets, with our strategy forced.
CUDA_GRAPHS = {STRATEGY: "tile", "triton.cudagraphs": True}
FEW_LAYERS = LlamaConfig.llama_8b(num_layers=2)
GRAPH_SETUPS = [
    Setup(FEW_LAYERS, sequence_parallel=True, batch=1, seq_len=2048, dtype=torch.bfloat16, options=CUDA_GRAPHS),
    Setup(FEW_LAYERS, sequence_parallel=False, batch=2, seq_len=512, dtype=torch.bfloat16, options=CUDA_GRAPHS),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("setup", [CPU_SETUPS[0], *rare(*CPU_SETUPS[1:])], ids=str)
def test_small_llama_trains_as_eager(rank_pools: RankPools, setup: Setup) -> None:
    rank_pools.get("cpu", 2).run(check_training, setup, 1, setup is CPU_SETUPS[0], timeout=280)


@pytest.mark.timeout(300)
def test_sequences_of_a_prompt_lie_by_rank(rank_pools: RankPools) -> None:
    """Between the gather and the scatter of the feed-forward; attention needs each sequence's tokens in order."""
    for counts in rank_pools.get("cpu", 2).run(check_inference, replace(CPU_SETUPS[0], batch=3), 2, timeout=280):
        assert counts["rows_by_rank"] == SMALL.num_layers
        assert counts["all_gather_matmul"] == counts["matmul_reduce_scatter"] == 2 * SMALL.num_layers


@pytest.mark.timeout(300)
def test_sequences_of_a_prompt_lie_by_rank_on_gpus(gpu_pool: RankPool) -> None:
    setup = replace(GPU_SETUPS[0], batch=13, seq_len=336)
    assert all(counts["rows_by_rank"] for counts in gpu_pool.run(check_inference, setup, timeout=250))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("setup", GPU_SETUPS, ids=str)
def test_llama_8b_layers_train_as_eager(gpu_pool: RankPool, setup: Setup) -> None:
    gpu_pool.run(check_training, setup, 2, timeout=250)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("setup", GRAPH_SETUPS, ids=str)
def test_llama_8b_layers_train_in_cuda_graphs(gpu_pool: RankPool, setup: Setup) -> None:
    # One step warms up, one is captured, the others are replayed.
    gpu_pool.run(check_training, setup, 4, timeout=250)


@pytest.mark.timeout(300)
def test_llama_8b_layers_decode_with_reduce_overhead(gpu_pool: RankPool) -> None:
    setup = replace(GRAPH_SETUPS[1], batch=8, seq_len=1, mode="reduce-overhead", options={})
    # In new processes: nothing that is made at the first use may stay in the graph's pool.
    run_ranks(check_inference, gpu_pool.world_size, setup, 5, device="cuda", timeout=250)
