"""Mixtures of experts train under tensor parallelism by hand, without DTensor: they are fused, and equal to eager."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.tolerances import MODEL_TOLERANCES, relative_error
from ditron_inductor.task.plan import decisions
from tests.cases import rare
from tests.fuzz.words import Copied, Reduced
from tests.models.hugging_face import ARCHITECTURES, Architecture
from tests.models.run_hugging_face import Setup, inputs_of, run_model, step_of
from tests.models.settled import settle
from tests.models.test_experts import FOUR, MIXED, NARROW, REDUCED
from tests.rank_process import RankContext
from tests.ranks import RankPools

fuse = importlib.import_module("ditron_inductor.passes.fuse.grouped_matmul_all_reduce")
pytest.importorskip("transformers", reason="the models are those of the extra 'models'")
CUT = {
    "q_proj.weight": (0, 1),
    "k_proj.weight": (0, 1),
    "v_proj.weight": (0, 1),
    "o_proj.weight": (1, 1),
    "gate_up_proj": (1, 2),
    "down_proj": (2, 1),
}
"""By the end of a parameter's name: the dimension that is cut, and how many weights lie one behind the other there."""
OF_HEADS = ("q_norm.weight", "k_norm.weight")
"""Parameters that are whole, whose gradients a rank has of its own heads alone."""


def part_of(ctx: RankContext, name: str, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter or of its gradient: the whole if it is not cut."""
    for end, (dim, count) in CUT.items():
        if name.endswith(end):
            return torch.cat([one.chunk(ctx.world_size, dim)[ctx.rank] for one in whole.chunk(count, dim)], dim)
    return whole


def copied(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The operands of a module, whose gradients are summed over the ranks."""

    def copy(operand: torch.Tensor) -> Any:
        return Copied.apply(operand, dist.group.WORLD) if operand.is_floating_point() else operand

    hidden = {name: copy(one) for name, one in named.items() if name == "hidden_states"}
    return tuple(map(copy, args)), named | hidden


def reduced(module: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> Any:
    """What a module returns, summed over the ranks."""
    return Reduced.apply(out, dist.group.WORLD, "sum")


def cut_by_hand(architecture: Architecture, model: Any, ctx: RankContext, form: str) -> Any:
    """In the place of `Architecture.cut`: a rank has some heads, and a part of the width of every expert."""
    for name, whole in list(model.named_parameters()):
        owner, _, own = name.rpartition(".")
        part = part_of(ctx, name, whole.detach())
        if part.shape != whole.shape:
            setattr(model.get_submodule(owner), own, nn.Parameter(part.contiguous()))
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp.experts):
            module.register_forward_pre_hook(copied, with_kwargs=True)
        for module in (layer.self_attn.o_proj, layer.mlp.experts):
            module.register_forward_hook(reduced)
    return model


def assert_cut_right(ctx: RankContext, setup: Setup) -> None:
    """In float32 and eager mode the loss and the gradients are those of the whole model."""
    architecture, sizes = ARCHITECTURES[setup.name], replace(setup.sizes, dtype=torch.float32)
    whole, part = (architecture.make(setup.num_layers, sizes, ctx.device) for _ in range(2))
    model = cut_by_hand(architecture, part, ctx, setup.form)
    given = settle(whole, inputs_of(ctx, setup, 0), sizes.vocabulary)
    wanted, got = (step_of(setup, one, one, given) for one in (whole, model))
    for name, value in wanted.items():
        if name.endswith(OF_HEADS):
            dist.all_reduce(got[name])
        error = relative_error(got[name], part_of(ctx, name, value))
        assert error <= MODEL_TOLERANCES[torch.float32], f"{name}: {error:.1e}"


def trained(ctx: RankContext, setup: Setup) -> tuple[tuple[int, int], Counter[str], set[str]]:
    """(The reductions in the forward and in the backward that became a node with the sum and the matmul in front of
    them, the collectives that were left alone, the strategies that ran), after a comparison with eager.
    """
    assert_cut_right(ctx, setup)
    decisions._last.clear()
    with mock.patch.object(Architecture, "cut", cut_by_hand), mock.patch.object(fuse, "LEAST_TOKENS", 64):
        sites = run_model(ctx, setup)
    left = Counter({name: count for one in sites.values() for name, count in one.items() if ": " in name})
    strategies = {choice.strategy for _, choice in decisions._last.values()}
    return (sites["forward"][REDUCED], sites["backward"][REDUCED]), left, strategies


def check(rank_pools: RankPools, setup: Setup, device_type: str, world_size: int) -> None:
    # The weights of the slots have gradients too, which nothing multiplies.
    wanted = (1, 1), Counter({"all_reduce: no_matmul": 1}), {setup.strategy}
    assert rank_pools.get(device_type, world_size).run(trained, setup, timeout=200) == [wanted] * world_size


@pytest.mark.timeout(220)
@pytest.mark.parametrize(
    ("name", "strategy", "world_size"),
    [
        *rare(
            ("mixtral", "tile", 2),
            ("qwen3_moe", "tile", 2),
            ("mixtral", "library", 2),
            ("mixtral", "tile", 4),
            ("qwen3_moe", "tile", 4),
        ),
    ],
)
def test_training(rank_pools: RankPools, name: str, strategy: str, world_size: int) -> None:
    sizes = FOUR if world_size == 4 else NARROW
    setup = Setup(name, "by hand", train=True, sizes=sizes, strategy=strategy, batch=5, seq_len=15)
    check(rank_pools, setup, "cpu", world_size)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_training_on_gpus(rank_pools: RankPools, name: str) -> None:
    setup = Setup(name, "by hand", train=True, sizes=MIXED, inductor=True, seq_len=256)
    check(rank_pools, setup, "cuda", 2)
