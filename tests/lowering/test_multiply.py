"""Products of the library, written where they belong: what `chunked` strategies are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ditron_inductor.lowering import chunked_exchange
from ditron_inductor.lowering.chunked_exchange import BIASED_BATCHES, multiply

M, K, N = 5, 8, 6


class Called(TorchDispatchMode):
    """The names of the products that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.names += [name] * name.endswith("mm")
        return func(*args, **(kwargs or {}))


Added = Callable[[torch.Tensor], torch.Tensor | None]


def nothing(out: torch.Tensor) -> torch.Tensor | None:
    return None


def row(out: torch.Tensor) -> torch.Tensor | None:
    return torch.arange(1.0, N + 1.0)


def itself(out: torch.Tensor) -> torch.Tensor | None:
    return out


def test_small_batches_get_their_bias_at_once() -> None:
    out = torch.empty(2, M, N)
    with Called() as called:
        multiply(torch.randn(2, M, K), torch.randn(K, N), out, torch.ones(N))
    assert called.names == ["baddbmm"]


@pytest.mark.parametrize(
    ("outer", "added", "expected"),
    [
        (0, nothing, ["mm"]),
        (0, row, ["addmm"]),
        (0, itself, ["addmm"]),
        (3, nothing, ["bmm"]),
        (3, itself, ["baddbmm"]),
        # Else the library would copy the row to all of the output first.
        (1, row, ["addmm"]),
        (BIASED_BATCHES, row, ["addmm"] * BIASED_BATCHES),
        (BIASED_BATCHES + 1, row, ["baddbmm"]),
    ],
)
def test_products_with_what_is_added(
    monkeypatch: pytest.MonkeyPatch, outer: int, added: Added, expected: list[str]
) -> None:
    monkeypatch.setattr(chunked_exchange, "BIASED_OPERATIONS", 0.0)
    leading = (outer,) if outer else ()
    torch.manual_seed(outer)
    # Rows that others lie beside, as those of a rank in a gathered tensor.
    a = torch.randn(*leading, 2 * M, K)[..., :M, :]
    b, memory = torch.randn(K, N), torch.randn(*leading, 3 * M, N)
    out, rest = memory[..., M : 2 * M, :], memory.clone()
    term = added(out)
    wanted = a @ b + (0.0 if term is None else term)
    with Called() as called:
        multiply(a, b, out, term)
    assert called.names == expected
    torch.testing.assert_close(out, wanted)
    rest[..., M : 2 * M, :] = out
    assert torch.equal(memory, rest), "more than the output was written"
