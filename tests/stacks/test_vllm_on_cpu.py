"""What stands in for vLLM's kernels computes plain attention of each request. vLLM itself is not needed for this."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.stacks.vllm_on_cpu import attend, write_into_cache

HEADS, KV_HEADS, WIDTH, BLOCK = 4, 2, 8, 4


@pytest.mark.parametrize("num_new", [(6, 3), (1, 1), (2, 1)])
def test_attention_to_a_cache_in_blocks(num_new: tuple[int, int]) -> None:
    """Two requests of 6 and 3 tokens, whose blocks are not in order, and the last tokens of which ask."""
    lengths, table = torch.tensor([6, 3]), torch.tensor([[5, 2], [3, 0]])
    torch.manual_seed(1)
    keys, values = torch.randn(2, 9, KV_HEADS, WIDTH)
    queries = torch.randn(9, HEADS, WIDTH)
    key_cache, value_cache = torch.full((2, 6, KV_HEADS, BLOCK, WIDTH), float("nan"))
    where = [table[row, place // BLOCK] * BLOCK + place % BLOCK for row in (0, 1) for place in range(int(lengths[row]))]
    for part in (slice(0, 4), slice(4, 9)):
        # A batch may be filled up with tokens that have no slot.
        slots = torch.tensor([*where[part], -1])
        write_into_cache(*(torch.cat([x[part], x[:1]]) for x in (keys, values)), key_cache, value_cache, slots)

    wanted, asking = [], []
    for new, (start, end) in zip(num_new, ((0, 6), (6, 9)), strict=True):
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (queries, keys, values))
        every = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        wanted.append(every[0].transpose(0, 1)[-new:])
        asking.append(queries[end - new : end])
    got = torch.empty(sum(num_new), HEADS, WIDTH)
    starts = torch.tensor([0, num_new[0], sum(num_new)])
    attend(torch.cat(asking), key_cache, value_cache, got, starts, lengths, WIDTH**-0.5, table)
    torch.testing.assert_close(got, torch.cat(wanted))
