"""Expert parallelism in operations of static shapes, so that training and CUDA graphs need no sizes from the device.

Each rank has some of the experts as a whole, and its own tokens. An all-to-all sends every token to the ranks of its
experts, and how many these are is known on the device alone: a program that asks for the numbers is cut into pieces by
`torch.compile`, and cannot be captured. Here all ranks gather all tokens, each computes what its experts contribute,
and the contributions are added up and scattered. Within one host this moves about as many bytes as an all-to-all does
if a token has at least as many experts as there are ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

from ditron_inductor.errors import InvalidOperands

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""The experts of this rank: (rows [M, D], local numbers of experts [M, K], weights [M, K]) -> weighted sums [M, D]."""


def experts(
    compute: Compute,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    num_local: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The weighted sum of what its experts return for each of this rank's tokens. It is differentiable.

    compute: called once, with the tokens of all ranks: rows [W * T, D], the numbers of experts among those of this
        rank, int64 [W * T, K], and weights [W * T, K]. The experts of other ranks have the number `num_local` and the
        weight 0: it computes nothing for them, or something finite. Returns [W * T, D].
    x: [T, D], as many tokens on every rank, which may be none; gradients reach it and the weights from the experts of
        all ranks. T is not compared between the ranks: with different numbers gloo ends the process, and NCCL may hang
        or return wrong rows. Pad to the longest, with the weight 0.
    ids: int64 [T, K], numbers among the experts of all ranks. Rank r has those from r * num_local. What is negative, or
        num_local * W and more, is nobody's expert and adds nothing: only the device knows the numbers, so they are not
        checked.
    weights: [T, K].
    num_local: the number of experts of a rank, the same on all ranks.
    group: the ranks among which the experts are divided; None is the default group.

    Returns [T, D], in the dtype of what `compute` returns. Raises InvalidOperands (ValueError) naming the tensor; in a
    function that is compiled as one graph it is torch's error that says so.
    """
    _check(x, ids, weights)
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError("experts: no group is given, and torch.distributed is not initialised")
    rows, chosen, factors = tokens_of_all(x, ids, weights, num_local, found)
    partial = compute(rows, chosen, factors)
    if partial.shape != rows.shape:
        expected = f"{tuple(rows.shape)}, the shape of its rows"
        raise InvalidOperands(
            op="experts", tensor="what compute returns", found=str(tuple(partial.shape)), expected=expected
        )
    return summed_part(partial, found)


def tokens_of_all(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, num_local: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns what the experts of this rank get in `experts`, the tokens of all ranks: (rows, numbers, weights)."""
    rows, chosen, factors = (_gathered(one, group) for one in (x, ids, weights))
    absent = chosen // num_local != dist.get_rank(group)
    # A remainder shows the compiler that no number is negative, so that it may take biases of experts by these numbers.
    local = torch.where(absent, num_local, chosen % num_local)
    return rows, local, factors.masked_fill(absent, 0.0)


def _check(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Raises InvalidOperands for tensors that do not fit each other."""
    if x.ndim != 2:
        raise InvalidOperands(op="experts", tensor="x", found=f"{x.ndim} dimensions", expected="[tokens, width]")
    for name, one in (("ids", ids), ("weights", weights)):
        if one.ndim != 2 or one.shape[0] != x.shape[0] or one.shape != ids.shape:
            expected = f"[{x.shape[0]} tokens, experts of each], ids and weights alike"
            raise InvalidOperands(op="experts", tensor=name, found=str(tuple(one.shape)), expected=expected)
    if ids.dtype != torch.int64:
        raise InvalidOperands(op="experts", tensor="ids", found=str(ids.dtype), expected="int64")


def _gathered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[n, ..] of each rank as [W * n, ..]; gradients are added up over the ranks."""
    # Torch 2.13 has new names for both collectives.
    gather: Any = getattr(funcol, "all_gather_single_autograd", funcol.all_gather_tensor_autograd)
    return _waited(gather(x.contiguous(), 0, group))


def summed_part(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[W * n, ..] of each rank, added up, as the [n, ..] of this rank."""
    scatter: Any = getattr(funcol, "reduce_scatter_single_autograd", funcol.reduce_scatter_tensor_autograd)
    return _waited(scatter(x.contiguous(), "sum", 0, group))


def _waited(x: torch.Tensor) -> torch.Tensor:
    """In eager mode a collective returns a wrapper that has no memory yet, and kernels beside torch's read memory."""
    return x if torch.compiler.is_compiling() else funcol.wait_tensor(x)


def register_with_transformers(name: str = "ditron") -> None:
    """Makes `experts` a way for `transformers` to reach the experts of other ranks. A model takes it by
    ``DistributedConfig(ep_size=.., ep_implementation=name)``. Ranks that hold the same tokens (`ep_size == tp_size`)
    reduce what their experts return, as the `all_reduce` of `transformers` does. Needs transformers 5.23 or later.
    """
    from transformers.distributed.expert_parallel import AllReduceEP, EPImplementation, EPImplementationInterface

    class StaticEP(EPImplementation):  # type: ignore[misc]
        """The experts of an `ep_dispatch_experts` module, by operations of static shapes."""

        def __init__(self, module: Any, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(module, ep_mesh, tp_mesh)
            self.num_local: int = module.num_experts
            self.reduced = AllReduceEP(module, ep_mesh, tp_mesh) if self.shares_batch else None

        def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            if self.reduced is not None:
                return self.reduced(x, ids, weights)
            # The ranks of a tensor parallel group hold the same tokens: each takes its part of them.
            parts = [_part_of(one, self.tp_mesh) for one in (x, ids, weights)]
            found = experts(self.experts_forward, *parts, num_local=self.num_local, group=self.ep_mesh.get_group())
            return found if self.tp_mesh.size() == 1 else _whole(found, self.tp_mesh)[: x.shape[0]]

    EPImplementationInterface.register(name, StaticEP)


def _part_of(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """This rank's rows of what all ranks of a mesh hold, and of zeros behind it, so that all have as many."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if mesh.size() == 1:
        return x
    x = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % mesh.size()))
    shared = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return shared.redistribute(mesh, [Shard(0)]).to_local()


def _whole(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The rows of all ranks of a mesh, of which each holds equal parts."""
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(x, mesh, [Shard(0)], run_check=False).full_tensor()
