"""The choice of experts by `unroll_topk`, compiled by Inductor: that it is what topk chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from ditron_inductor.options import Options
from ditron_inductor.passes.finish.unroll_topk import INTEGERS
from ditron_inductor.pipeline import DitronPipeline
from ditron_inductor.report.explain import without_caches
from tests.passes.choices import check, specials, unroll_anywhere, unroll_parts


def compiled(fn: Callable[..., Any], unroll: Callable[..., int] = unroll_anywhere) -> Callable[..., Any]:
    """`fn` by Inductor with this pass alone."""
    ours = DitronPipeline(Options(), passes=(unroll,))
    return torch.compile(fn, dynamic=False, options={"post_grad_custom_pre_pass": ours})


def _sums_are_read_as_stored(device: str) -> None:
    """A sum of bf16 is rounded before it is compared, although Inductor has more digits of it in a register."""
    torch.manual_seed(1)
    x, y = (torch.randn(64, 40, device=device).to(torch.bfloat16) for _ in range(2))
    with without_caches():
        found = compiled(lambda x, y: torch.topk(x + y, 4))(x, y)
    check(found, x + y, 4)


def test_sums_are_read_as_stored() -> None:
    _sums_are_read_as_stored("cpu")


def router(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As in Qwen3 with 24 experts, of which 4 are chosen."""
    weights, places = torch.topk(logits.float().softmax(-1), 4)
    return weights / weights.sum(-1, keepdim=True), places


def groups(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As in DeepSeek V3 with 24 experts in 4 groups, of which 2 are chosen, and in these 4 experts. The logits are as
    exact as there, so sums of two scores do not lie so close that a kernel's rounding decides.
    """
    scores = logits.sigmoid()
    best = torch.topk(scores.view(-1, 4, 6), 2)[0].sum(-1)
    taken = torch.zeros_like(best).scatter_(1, torch.topk(best, 2, sorted=False)[1], 1)
    inside = taken.bool().repeat_interleave(6, dim=-1)
    places = torch.topk(scores.masked_fill(~inside, -torch.inf), 4, sorted=False)[1]
    return scores.gather(1, places), places


def _by_inductor(device: str) -> None:
    torch.manual_seed(2)
    for fn in (router, groups):
        for rows, unroll in ((1, unroll_anywhere), (5, unroll_parts), (300, unroll_anywhere)):
            logits = torch.randn(rows, 24, device=device)
            logits = logits if fn is groups else logits.to(torch.bfloat16)
            with without_caches():
                (weights, places), code = run_and_get_code(compiled(fn, unroll), logits)
            wanted, wanted_places = fn(logits)
            # torch leaves the order of equal values open, and on the CPU device also which of them are chosen.
            torch.testing.assert_close(weights.sort(-1)[0], wanted.sort(-1)[0])
            scores = logits.float().softmax(-1) if fn is router else logits.sigmoid()
            found = scores.gather(-1, places)
            torch.testing.assert_close(weights, found / found.sum(-1, keepdim=True) if fn is router else found)
            assert (places.sort(-1)[0].diff(dim=-1) > 0).all()
            if device == "cuda":
                assert torch.equal(places.sort(-1)[0], wanted_places.sort(-1)[0])
                assert "triton_per_" in code[0] and "triton_red_" not in code[0]


def test_by_inductor() -> None:
    _by_inductor("cpu")


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Compiled by Inductor, without loops: as topk itself, which chooses equal values from the left too."""
    _sums_are_read_as_stored("cuda")
    _by_inductor("cuda")
    for dtype, unroll, k in zip(INTEGERS, (unroll_anywhere, unroll_parts, unroll_anywhere), (8, 4, 16), strict=True):
        x = specials(dtype).cuda()
        with without_caches():
            found = compiled(lambda x, k=k: torch.topk(x, k), unroll)(x)
        check(found, x, k)
        assert torch.equal(found[1].sort(-1)[0], torch.topk(x, k)[1].sort(-1)[0]), (dtype, k)
