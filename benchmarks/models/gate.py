"""Whether a contestant is right: every part of every layer, compared with a model in a wider dtype.

The *reference* is the cell's model with the same weights in fp32 (fp64 where the contestants compute in fp32), in eager
mode, with attention in plain operations. A forward is compared twice. The program that is timed is compared by its
output. A second program of the same contestant returns what the layers pass on as well, and each of these parts is
compared by itself:

    attention            what the attention of a layer computes, in front of its projection
    attention's sum      what the projection adds to the residual, all ranks' partial results in it
    feed-forward's sum   what the feed-forward adds, likewise
    residual             what the next layer reads

Of a training step the output and the gradient of every weight are compared, which are as many parts.

The *distance* of a part is its largest difference in any row, over the root mean square of the reference's rows. So a
tile that is missing counts as much in a large tensor as in a small one. The gradient of a weight is one row. Eager mode
in the contestants' dtype has a distance too, which is nothing but rounding. A contestant is right if each of its parts
is at most `LEEWAY` times as far from the reference as eager mode is, and at most `MOST` in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.models.architecture import Decoder
from benchmarks.models.attention import AttentionCore
from benchmarks.models.contestants import Step, whole
from benchmarks.models.experts import Experts

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
LEEWAY = 4.0
"""Contestants round elsewhere than eager mode does: before sums over ranks, in attention's blocks, in epilogues."""
MOST: dict[torch.dtype, float] = {torch.bfloat16: 0.5, torch.float16: 0.1, torch.float32: 1e-3}
"""How far anything but a weight's gradient may be, eager mode too: beyond that it is not rounding. Without a rank's
partial results a sum over four ranks is 0.5 off in the mean of its rows, and attention that is zero is 1 off.
"""
LEAST = 2.0
"""Times the dtype's epsilon: so far every contestant may be."""
FLOOR = 1e-3
"""A gradient that is zero but for rounding is compared with this part of the largest one."""
PARTS = 3
"""Tensors that a layer passes on."""


class Parts(nn.Module):
    """A model that returns its output and what its layers pass on."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, *operands: Any) -> tuple[torch.Tensor, ...]:
        seen: list[torch.Tensor] = []
        out = self.model(*operands, seen=seen)
        return out, *seen


def parts_step(call: Callable[..., Any], operands: tuple[Any, ...]) -> Step:
    """One forward of a compiled `Parts`, by the names of its parts."""

    def step() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            out, *seen = call(*operands)
        return {"output": out} | named(operands[0], seen)

    return step


def named(x: torch.Tensor, seen: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parts of all layers. x: what the first layer reads."""
    found, before = {}, _wide(x)
    for layer in range(len(seen) // PARTS):
        attention, middle, after = (_wide(one) for one in seen[PARTS * layer : PARTS * (layer + 1)])
        of_layer = {
            "attention": attention,
            "attention's sum": middle - before,
            "feed-forward's sum": after - middle,
            "residual": after,
        }
        found |= {f"{name} of layer {layer}": value for name, value in of_layer.items()}
        before = after
    return found


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(WIDER.get(x.dtype, x.dtype))


def copied(wide: Decoder, model: nn.Module) -> Decoder:
    """`wide`, a model of the same form in a wider dtype, with the weights and caches of `model`, as a reference."""
    with torch.no_grad():
        for mine, given in (
            *zip(wide.parameters(), model.parameters(), strict=True),
            *zip(wide.buffers(), model.buffers(), strict=True),
        ):
            _local(mine).copy_(_local(given))
    for part in wide.modules():
        if isinstance(part, AttentionCore | Experts):
            part.plain = True
    return wide


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def collected(step: Step) -> dict[str, torch.Tensor]:
    """What a step computes, in the host's memory, so that it does not count as a contestant's. Collective."""
    return {name: whole(value.detach()).cpu() for name, value in step().items()}


def distance(got: torch.Tensor, wanted: torch.Tensor, floor: float = 0.0) -> float:
    """The largest norm of a row of the difference over the root mean square of the norms of `wanted`'s rows, or over
    `floor` if that is more. Infinite where `got` holds a NaN.
    """
    rows = wanted.to(got.device)
    difference = (got.to(rows.dtype) - rows).norm(dim=-1).max()
    typical = float(rows.norm()) / (rows.numel() / rows.shape[-1]) ** 0.5
    error = float(difference) / max(typical, floor, 1e-30)
    return error if error == error else float("inf")


class Gate:
    """What contestants are compared with on this rank. wanted: the reference's parts; eager: those of eager mode.

    agree: hands every rank's value to all of them; what eager mode is off by is that of the worst rank. Making one is
    collective.
    """

    def __init__(
        self,
        wanted: Mapping[str, torch.Tensor],
        eager: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        agree: Callable[[Any], list[Any]],
    ) -> None:
        self.wanted = wanted
        self.floor = FLOOR * max((float(wanted[name].norm()) for name in wanted if _is_gradient(name)), default=0.0)
        mine = {name: self._distance(name, whole(eager[name])) for name in wanted}
        everyone = agree(mine)
        self.eager = {name: max(of_rank[name] for of_rank in everyone) for name in wanted}
        self._dtype = dtype

    def _distance(self, name: str, got: torch.Tensor) -> float:
        if _is_gradient(name):
            return distance(got.flatten(), self.wanted[name].flatten(), self.floor)
        return distance(got, self.wanted[name])

    def of_eager(self) -> str:
        """Why eager mode's distances are no measure, empty where they are."""
        values = {name: error for name, error in self.eager.items() if not _is_gradient(name)}
        worst = max(values, key=lambda name: values[name])
        far = not values[worst] <= MOST[self._dtype]
        return f"differs from {_name(self._dtype)}: {worst} by {values[worst]:.1e}" if far else ""

    def tolerance(self, name: str) -> float:
        """Returns how far a part may be from the reference, relative to its size."""
        rounding = max(LEEWAY * self.eager[name], LEAST * torch.finfo(self._dtype).eps)
        # A gradient that vanishes is nothing but rounding.
        return rounding if _is_gradient(name) else min(rounding, MOST[self._dtype])

    def problem(self, got: Mapping[str, torch.Tensor]) -> str:
        """Which of these parts are wrong, empty if none is. Collective."""
        wrong = []
        for name, value in got.items():
            error = self._distance(name, whole(value))
            if not error <= self.tolerance(name):
                wrong.append(f"{name} by {error:.1e}, eager by {self.eager[name]:.1e}")
        more = ", .." if len(wrong) > 3 else ""
        return f"differs from {_name(self._dtype)}: {'; '.join(wrong[:3])}{more}" if wrong else ""


def _is_gradient(name: str) -> bool:
    """Returns whether a part is the gradient of a weight."""
    return name.startswith("gradient of")


def _name(dtype: torch.dtype) -> str:
    """Returns the short name of the reference's dtype."""
    return str(WIDER[dtype]).removeprefix("torch.").replace("float", "fp")
