"""A rank of vLLM's engine on the CPU, with a vLLM that has been built for GPUs.

    RANK=0 WORLD_SIZE=2 VLLM_TARGET_DEVICE=cpu .. python -m tests.stacks.vllm_on_cpu folder float32 pieces library

The arguments and the environment are those of `tests.models.run_vllm`; `tests/test_vllm.py` has the latter in full.
vLLM's wheel has all that its engine needs on a CPU but the kernels in C++. What stands in for them is written with
torch here: attention to the cache, the writes into it, and the choice of the likeliest token. A vLLM that has been
built for CPUs keeps its own.
"""

from __future__ import annotations

import os
import runpy
from typing import Any

import torch
from torch.nn import functional

from tests.models import run_vllm


def write_into_cache(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Each token's key and value, of [tokens, heads, width], go into its slot of caches of [blocks, heads, block,
    width]. Tokens that only fill a batch have a negative slot.
    """
    tokens = (slots >= 0).nonzero().flatten()
    blocks, places = slots[tokens] // key_cache.shape[2], slots[tokens] % key_cache.shape[2]
    key_cache[blocks, :, places] = key[tokens]
    value_cache[blocks, :, places] = value[tokens]


def attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    block_table: torch.Tensor,
) -> None:
    """Causal attention of each request's tokens, which lie behind each other in `query`, to its blocks of the cache."""
    for number, length in enumerate(lengths.tolist()):
        start, end = starts[number : number + 2].tolist()
        mine = block_table[number, : -(-length // key_cache.shape[2])]
        # [blocks, heads, block, width] -> [heads, length, width]
        keys, values = (cache[mine].transpose(0, 1).flatten(1, 2)[:, :length] for cache in (key_cache, value_cache))
        seen = torch.ones(end - start, length, dtype=torch.bool).tril(length - (end - start))
        attended = functional.scaled_dot_product_attention(
            query[start:end].transpose(0, 1)[None].float(),
            keys[None].float(),
            values[None].float(),
            attn_mask=seen,
            scale=scale,
            enable_gqa=True,
        )
        output[start:end] = attended[0].transpose(0, 1)


def kernels() -> dict[str, tuple[str, Any]]:
    """By the name of vLLM's op: its schema, and what stands in for it."""

    def cached(*arguments: Any) -> None:
        write_into_cache(*arguments[:5])

    def attended(*arguments: Any) -> None:
        causal, slopes, window, table, cap, _, sinks = arguments[7:14]
        assert causal and slopes is None and window == -1 and cap == 0 and sinks is None
        attend(*arguments[:7], table)

    return {
        "init_cpu_memory_env": ("(int[] nodes) -> ()", lambda nodes: None),
        "get_scheduler_metadata": (
            "(int requests, int heads, int kv_heads, int width, Tensor lengths, ScalarType dtype, Tensor starts, "
            "bool causal, int window, str isa, bool split, Tensor? dynamic, str cache_dtype) -> Tensor",
            lambda *arguments: torch.empty(0),
        ),
        "cpu_attn_reshape_and_cache": (
            "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots, str isa, "
            "float k_scale, float v_scale, str cache_dtype) -> ()",
            cached,
        ),
        "cpu_attention_with_kv_cache": (
            "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor(a!) output, Tensor starts, Tensor lengths, "
            "float scale, bool causal, Tensor? slopes, int window, Tensor table, float cap, Tensor plan, "
            "Tensor? sinks, Tensor? dynamic, float k_scale, float v_scale, str cache_dtype) -> ()",
            attended,
        ),
        "greedy_argmax": ("(Tensor logits) -> Tensor", lambda logits: logits.argmax(-1)),
        # vLLM draws tokens at random when it warms up, whatever it is asked for later.
        "fused_gumbel_argmax": ("(Tensor logits, Tensor seeds) -> Tensor", lambda logits, seeds: logits.argmax(-1)),
    }


def stand_in() -> torch.library.Library:
    """Registers the kernels that vLLM has not. They are registered for as long as the result lives."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    library = torch.library.Library("_C", "FRAGMENT")
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        from vllm.model_executor.layers import utils

        for name, (schema, kernel) in kernels().items():
            library.define(name + schema)
            library.impl(name, kernel, "CompositeExplicitAutograd")
        # On some CPUs small linear layers have a kernel of their own; without it they are matmuls.
        utils.check_cpu_sgl_kernel = lambda *_: False
    return library


if __name__ == "__main__":
    os.environ.update(run_vllm.ENVIRONMENT)
    library = stand_in()
    runpy.run_path(run_vllm.__file__, run_name="__main__")
