"""Models of `transformers` whose tokens do not spread over the experts: they are fused, and equal to eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ditron_inductor.task.plan import decisions
from tests.cases import rare
from tests.models import test_experts as experts
from tests.models.hugging_face import ARCHITECTURES, Architecture
from tests.models.run_hugging_face import Setup, inputs_of
from tests.models.test_experts import FOUR, MIXED, NARROW
from tests.rank_process import RankContext
from tests.ranks import RankPools

BIASES = ("bias", "e_score_correction_bias")
"""What a router adds to its scores before it chooses, by the names in models."""
LIKED, LOUD = 4.0, 4.0
"""What is added to the score of an expert that is liked, which is more than scores differ; and a factor on what all
experts return, so that it shows in the logits.
"""


def routers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


def made_with(liked: Sequence[int]) -> Callable[..., Any]:
    """`Architecture.make` with routers that choose these experts for all tokens."""
    make = Architecture.make

    def made(architecture: Architecture, *args: Any) -> Any:
        model = make(architecture, *args)
        for router in routers(model):
            (bias,) = [getattr(router, name) for name in BIASES if hasattr(router, name)]
            bias.data[list(liked)] += LIKED
        for name, parameter in model.named_parameters():
            if name.endswith("experts.down_proj"):
                parameter.data.mul_(LOUD)
        return model

    return made


def chosen(ctx: RankContext, setup: Setup) -> torch.Tensor:
    """[tokens of all layers, k]: the experts."""
    found: list[torch.Tensor] = []
    model = ARCHITECTURES[setup.name].make(setup.num_layers, setup.sizes, ctx.device)
    for router in routers(model):
        router.register_forward_hook(lambda module, args, out: found.append(out[-1]))
    with torch.no_grad():
        model(**inputs_of(ctx, setup, 0))
    return torch.cat(found)


def compared(ctx: RankContext, setup: Setup, liked: Sequence[int], run: Callable[..., Any]) -> tuple[Any, set[str]]:
    """(What `run` counts where all tokens choose the experts `liked`, or some if these are many; the strategies)."""
    decisions._last.clear()
    with mock.patch.object(Architecture, "make", made_with(liked)):
        counts = run(ctx, setup)
        ids = chosen(ctx, setup)
    taken = torch.isin(ids, torch.tensor(liked, device=ids.device)).sum(-1)
    assert bool((taken == min(len(liked), ids.shape[-1])).all())
    return counts, {choice.strategy for _, choice in decisions._last.values()}


HOT, ELSEWHERE = (1,), (0, 1)
"""An expert that all tokens choose; and the two of rank 0: all tokens choose both, and none of another rank."""


@pytest.mark.timeout(220)
@pytest.mark.parametrize(
    ("name", "form", "liked", "world_size"),
    [
        ("gpt_oss", "ep", ELSEWHERE, 2),
        *rare(
            ("gpt_oss", "ep", HOT, 2),
            ("deepseek_v3", "hf", HOT, 2),
            ("deepseek_v3", "ep", ELSEWHERE, 2),
            ("deepseek_v3", "hf", HOT, 4),
            ("gpt_oss", "ep", ELSEWHERE, 4),
        ),
    ],
)
def test_a_prompt(rank_pools: RankPools, name: str, form: str, liked: Sequence[int], world_size: int) -> None:
    setup = Setup(name, form, sizes=FOUR if world_size == 4 else NARROW, batch=5, seq_len=16)
    found = rank_pools.get("cpu", world_size).run(compared, setup, liked, experts._reduced, timeout=200)
    assert found == [(setup.num_layers, {"tile"})] * world_size


@pytest.mark.timeout(220)
@pytest.mark.all_cases
@pytest.mark.parametrize("run", [experts._decoded, experts._unsorted])
@pytest.mark.parametrize(
    ("name", "form", "liked"),
    [
        ("gpt_oss", "ep", HOT),
        ("gpt_oss", "ep", ELSEWHERE),
        ("deepseek_v3", "hf", HOT),
        ("deepseek_v3", "ep", ELSEWHERE),
    ],
)
def test_a_few_tokens(
    rank_pools: RankPools, name: str, form: str, liked: Sequence[int], run: Callable[..., Any]
) -> None:
    setup = Setup(name, form, sizes=NARROW, batch=3, seq_len=1)
    found = rank_pools.get("cpu", 2).run(compared, setup, liked, run, timeout=200)
    for (projected, normed, _), strategies in found:
        assert projected == 2 * setup.num_layers and normed >= setup.num_layers and strategies == {"tile"}


@pytest.mark.gpu
@pytest.mark.parametrize("liked", [HOT, range(MIXED.experts // 2)], ids=["hot", "elsewhere"])
def test_on_gpus(rank_pools: RankPools, liked: Sequence[int]) -> None:
    pool = rank_pools.get("cuda", 2)
    setup = Setup("gpt_oss", "ep", sizes=MIXED, inductor=True, batch=3, seq_len=1)
    for (projected, normed, _), strategies in pool.run(compared, setup, liked, experts._decoded, timeout=200):
        assert projected == 2 * setup.num_layers and normed >= setup.num_layers and strategies == {"tile"}
    found = pool.run(compared, replace(setup, batch=2, seq_len=256), liked, experts._reduced, timeout=200)
    assert found == [(setup.num_layers, {"tile"})] * 2
