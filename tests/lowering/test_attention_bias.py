"""What is done to a bias before the library's kernels get it, and after: on any device; the calls, on tensors
without memory."""

from __future__ import annotations

import math

import pytest
import torch

from ditron_inductor.lowering.attention import local_attention
from ditron_inductor.lowering.attention.block_parts import Span

B, HEADS, ROWS, KEYS = 2, 4, 5, 12
LEAST = torch.finfo(torch.float16).min


def biases() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    full = torch.randn(B, HEADS, ROWS, 2 * KEYS).half()
    full[0, :, 1] = -math.inf
    return {
        "all pairs": full[..., KEYS:],
        "aligned": torch.randn(B, HEADS, ROWS, 16).half()[..., :KEYS],
        "not contiguous": full.mT.contiguous().mT[..., :KEYS],
        "bool": full[:, :1, :, :KEYS] > 0,
        "float32": torch.randn(ROWS, KEYS),
        "padding": torch.arange(KEYS) < torch.tensor([3, 0]).view(2, 1, 1, 1),
        "repeated": torch.randn(B, 1, 1, KEYS).half().expand(B, HEADS, ROWS, KEYS),
        "rows": torch.randn(HEADS, ROWS, 1).half(),
        "keys": torch.randn(KEYS).half(),
        "one": torch.tensor(3.0),
    }


@pytest.mark.parametrize("hidden", [-math.inf, LEAST])
@pytest.mark.parametrize("name", biases())
def test_it_lies_as_kernels_want_it(name: str, hidden: float) -> None:
    bias, q = biases()[name], torch.zeros(B, HEADS, ROWS, 64, dtype=torch.float16)
    found = local_attention._laid_out(bias, q, KEYS, hidden)
    wanted = torch.zeros(bias.shape).masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else bias
    wanted = wanted.half().expand(B, HEADS, ROWS, KEYS)
    assert torch.equal(found, wanted.masked_fill(wanted == -math.inf, hidden))
    assert found.stride(3) == 1 and all(stride % local_attention.BIAS_ALIGNMENT == 0 for stride in found.stride()[:3])
    assert found.data_ptr() % 16 == 0
    assert (found.data_ptr() == bias.data_ptr()) == (name == "aligned" and hidden == -math.inf)
    if name == "repeated":
        assert found.untyped_storage().nbytes() == B * 16 * 2


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("hides", [False, True])
def test_large_numbers_are_kept_from_kernels(given: torch.dtype, wanted: torch.dtype, hides: bool) -> None:
    """As masks have them at the end of a dtype's range, beside what rounds to it: -inf or near 0 is left."""
    bias = torch.randn(B, HEADS, ROWS, KEYS).to(given)
    least = torch.finfo(given).min
    bias[..., 0, 3:] = least
    bias[..., 1, :] = least
    bias[..., 2, :] = -3.0e4
    bias[..., 3, ::2], bias[..., 3, 1::2] = -math.inf, least
    bias[..., 4, :] = -math.inf
    near, base = local_attention.anchored(bias, wanted, hides)
    q = torch.zeros(B, HEADS, ROWS, 64, dtype=wanted)
    hidden = local_attention.CUDNN_HIDDEN[wanted]
    laid = local_attention._laid_out(near, q, KEYS, hidden)
    assert not laid.isinf().any()
    far = least <= -local_attention.REACH
    unseen = near.amax(-1) == -math.inf
    if far and hides:
        # The least number of all hides all of a row.
        assert unseen[..., 1].all() and unseen[..., 3].all()
        near, base, bias = (one[..., [0, 2, 4], :] for one in (near, base.unsqueeze(-1), bias))
        assert torch.equal(near.amax(-1) == -math.inf, torch.tensor([False, False, True]).expand(B, HEADS, 3))
        base = base.squeeze(-1)
    else:
        assert torch.equal(unseen, torch.arange(ROWS).eq(4).expand(B, HEADS, ROWS))
        rows = torch.where(near == -math.inf, -1.0e39, near.double()).softmax(-1)
        torch.testing.assert_close(rows[..., 1, :], torch.full((B, HEADS, KEYS), 1 / KEYS, dtype=torch.float64))
        torch.testing.assert_close(rows[..., 3, 1::2], torch.full((B, HEADS, KEYS // 2), 2 / KEYS, dtype=torch.float64))
        assert far == bool((near.isfinite() & (near.abs() > 6.0e4)).any())
    # Their common part is said apart.
    kept, wanted_sum = near != -math.inf, bias.double().clamp_min(torch.finfo(wanted).min)
    torch.testing.assert_close(
        (near.double() + base.double().unsqueeze(-1))[kept], wanted_sum[kept], rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("wanted", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_that_leave_scores_no_digits_stay(wanted: torch.dtype, hides: bool) -> None:
    """Eager adds scores to them, and nothing is left of these; the mean of all values is then no matter of digits."""
    bias = torch.tensor([[-1.0e9, -1.0e9, -math.inf], [-1.0e6, -1.0e6, -1.0e6], [0.0, -1.0e9, 1.0]])
    near, base = local_attention.anchored(bias, wanted, hides)
    least = torch.finfo(wanted).min
    assert base.tolist() == [0.0, -1.0e6, 0.0]
    assert near[0].tolist() == [max(-1.0e9, least), max(-1.0e9, least), -math.inf]
    assert near[1].tolist() == [0.0] * 3
    assert near[2].tolist() == [0.0, -math.inf if wanted == torch.float16 else -1.0e9, 1.0]


@pytest.mark.parametrize("name", biases())
def test_rows_that_see_nothing(name: str) -> None:
    bias = biases()[name]
    added = bias.float().log() if bias.dtype == torch.bool else bias
    unseen = (added.expand(B, HEADS, ROWS, KEYS) == -math.inf).all(-1)
    out, lse = torch.full((B, HEADS, ROWS, 64), math.nan), torch.full((B, HEADS, ROWS), math.nan)
    out, lse = local_attention._hidden_rows(out, lse, bias)
    assert torch.equal(unseen, lse == -math.inf) and torch.equal(unseen, (out == 0.0).all(-1))
    assert unseen.any() == (name in ("all pairs", "not contiguous", "bool", "padding")) or name == "bool"


def test_keys_of_a_span() -> None:
    bias = torch.randn(3, 4 * KEYS)
    for source, count in ((0, 4), (1, 2), (3, 1)):
        span = Span(source, count, 0, 3, 0, KEYS, causal=False)
        seen = span.seen(bias, KEYS)
        assert seen.bias is not None and torch.equal(seen.bias, bias[:, source * KEYS : (source + count) * KEYS])
        assert span.seen(bias[:, :1], KEYS).bias is not None and span.seen(None, KEYS) == local_attention.ShownBlock()
        for whole in (bias[:, :1], torch.tensor(1.0)):
            assert span.seen(whole, KEYS).bias is whole


@pytest.mark.parametrize("run", [local_attention.EFFICIENT, local_attention.CUDNN_BIASED], ids=lambda run: run.name)
@pytest.mark.parametrize("key_heads", [1, 4])
def test_calls_of_kernels_fit_their_schemas(run: local_attention.Local, key_heads: int) -> None:
    q = torch.empty(B, HEADS, ROWS, 64, dtype=torch.float16, device="meta")
    k, v = (torch.empty(B, key_heads, KEYS, 64, dtype=torch.float16, device="meta") for _ in range(2))
    seen = local_attention.ShownBlock(bias=torch.empty(B, 1, ROWS, KEYS, dtype=torch.bool, device="meta"))
    out, lse = run.forward(q, k, v, seen, 0.125)
    assert out.shape == q.shape and lse.shape == q.shape[:-1]
    grads = run.backward((out, q, k, v, out, lse.contiguous()), seen, 0.125)
    assert [one.shape for one in grads] == [q.shape, k.shape, v.shape]


DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("given", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES)
def test_the_least_numbers_of_all_dtypes_stay_finite(given: torch.dtype, wanted: torch.dtype) -> None:
    bias = torch.full((2, KEYS), torch.finfo(given).min, dtype=given)
    bias[0, 0] = -math.inf
    near, _ = local_attention.anchored(bias, wanted)
    assert torch.equal(near.to(wanted).isinf(), bias.isinf())
