"""Tokens whose experts no rounding changes, so that two computations of a mixture can be compared number by number.

A token whose second and third expert have nearly equal scores gets one of them in one dtype and the other in another,
and all numbers behind that differ. Such a token is replaced by another one, until there is none.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

NOISE = 0.02
"""The noise on what a router reads, relative to each number; bfloat16 rounds by at most 0.004."""
DRAWS, ROUNDS = 8, 60


def settle(model: nn.Module, given: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """Returns `given` with other tokens in the place of those whose experts noise would change.

    model: the whole model in fp32, whose router modules return the ids of the experts last. given: the same on all
    ranks, as what is returned. AssertionError if there are such tokens after ROUNDS replacements.
    """
    tokens = given["input_ids"].clone()
    generator = torch.Generator().manual_seed(0)
    others = {name: value for name, value in given.items() if name not in ("input_ids", "labels")}
    for _ in range(ROUNDS):
        doubtful = _doubtful(model, tokens, others)
        if not bool(doubtful.any()):
            # Ranks may compute in another order.
            dist.broadcast(tokens, 0)
            return given | {name: tokens for name in ("input_ids", "labels") if name in given}
        drawn = torch.randint(0, vocabulary, tokens.shape, generator=generator).to(tokens.device)
        tokens = torch.where(doubtful, drawn, tokens)
    raise AssertionError(f"{int(doubtful.sum())} tokens take other experts with noise after {ROUNDS} replacements")


def _doubtful(model: nn.Module, tokens: torch.Tensor, others: dict[str, Any]) -> torch.Tensor:
    """Returns for each token whether noise changes its experts in any layer."""
    found = torch.zeros(tokens.numel(), dtype=torch.bool, device=tokens.device)
    generator = torch.Generator(tokens.device).manual_seed(1)

    def look(router: nn.Module, args: tuple[Any, ...], out: tuple[torch.Tensor, ...]) -> None:
        (rows,) = args
        for _ in range(DRAWS):
            noise = torch.randn(rows.shape, generator=generator, device=rows.device)
            ids = router.forward(rows * (1 + NOISE * noise))[-1]
            found.logical_or_((ids.sort(-1)[0] != out[-1].sort(-1)[0]).any(-1))

    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    assert routers, f"{type(model).__name__} has no router that is known"
    hooks = [router.register_forward_hook(look) for router in routers]
    with torch.no_grad():
        model(input_ids=tokens, **others)
    for hook in hooks:
        hook.remove()
    return found.view(tokens.shape)
