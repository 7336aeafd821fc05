"""Values to choose from, and how a choice is checked."""

from __future__ import annotations

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.finish.unroll_topk import Bounds, unroll_within


def chosen(x: torch.Tensor, k: int) -> torch.Tensor:
    """The places of the k largest values; of equal values the left ones, as torch's topk chooses them on GPUs."""
    return torch.sort(x.cpu(), dim=-1, descending=True, stable=True)[1][..., :k].to(x.device)


def unroll_anywhere(graph: fx.Graph, *, options: Options) -> int:
    """The pass, on the CPU device too."""
    return unroll_within(graph, Bounds(("cpu", "cuda")))


def unroll_parts(graph: fx.Graph, *, options: Options) -> int:
    """The same, and more values than 8 are cut into parts."""
    return unroll_within(graph, Bounds(("cpu", "cuda"), 512, 8))


def specials(dtype: torch.dtype) -> torch.Tensor:
    """Rows with many equal values, with NaNs of both signs, with infinities, with -inf alone, and with denormals."""
    torch.manual_seed(0)
    x = torch.randn(64, 24)
    x[:16] = torch.randint(0, 3, (16, 24)).float()
    x[1] = -torch.inf
    x[2, 1:] = -torch.inf
    x[3, 4], x[3, 9], x[4] = torch.nan, -torch.nan, torch.nan
    x[5, 3], x[5, 7], x[5, 8] = torch.inf, torch.nan, torch.inf
    x = x.to(dtype)
    x[6] = x[6].abs().round() * (torch.finfo(dtype).tiny / 4)
    x[7] = -x[6]
    return x


def check(found: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, k: int) -> None:
    """The places are those of a stable sort, and the values those at the places, bit for bit."""
    values, places = found
    assert values.dtype == x.dtype and values.is_contiguous() and places.is_contiguous()
    torch.testing.assert_close(places, chosen(x, k), rtol=0, atol=0)
    wanted = x.gather(-1, places)
    torch.testing.assert_close(values, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(values.signbit() | values.isnan(), wanted.signbit() | wanted.isnan())
    torch.testing.assert_close(values, torch.topk(x, k)[0], rtol=0, atol=0, equal_nan=True)
