"""The speed of the library's attention, from which the ranks choose a strategy: the same on all of them."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.backends.cuda import SDPAParams

from ditron_inductor.lowering.attention import local_attention


def takes(params: SDPAParams) -> bool:
    """As the library's kernels do: nothing that is empty, and rows as they lie in memory."""
    return bool(params.query.shape[2] > 0 and params.query.stride(3) == 1)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("flash", [False, True])
def test_a_rank_without_queries_plans_like_the_others(
    monkeypatch: pytest.MonkeyPatch, flash: bool, biased: bool
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", takes)
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda params: flash and takes(params))
    with FakeTensorMode():
        full, empty, k = (torch.empty(1, 8, rows, 128, dtype=torch.bfloat16, device="cuda") for rows in (5, 0, 16))
        runs = [local_attention.choose(q, k, k, biased=biased) for q in (full, empty)]
    assert [run.name for run in runs] == ["cudnn with a bias" if biased else "cudnn", "math"]
    assert len({(run.speed, run.windowed_speed) for run in runs}) == 1
