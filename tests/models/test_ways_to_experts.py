"""Whole models whose experts are on other ranks train: by the exchange that `transformers` has by default, which cuts
the program into several graphs, and by static shapes, in one graph for ranks with tokens of their own.
"""

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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.tolerances import MODEL_TOLERANCES, relative_error
from ditron_inductor.expert_parallel import register_with_transformers
from ditron_inductor.report.explain import without_caches
from ditron_inductor.task.plan import decisions
from ditron_inductor.task.site_records import collect_sites
from tests.cases import rare
from tests.models.hugging_face import ARCHITECTURES, Architecture
from tests.models.interpreted import interpreted
from tests.models.run_hugging_face import Setup, inputs_of, run_model, step_of
from tests.models.settled import settle
from tests.models.test_experts import FOUR, NARROW
from tests.rank_process import RankContext
from tests.ranks import RankPools

fuse = importlib.import_module("ditron_inductor.passes.fuse.grouped_matmul_all_reduce")
pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers before 5.23")
pytestmark = pytest.mark.timeout(300)
SCATTERED = "grouped_matmul_reduce_scatter"


def exchanged(ctx: RankContext, name: str) -> tuple[int, Counter[str]]:
    """(The graphs of a training step by the default way to experts, and what became of their collectives), after a
    comparison with eager, whose loss and gradients are those of the whole model.
    """
    from transformers.distributed import DistributedConfig

    torch._dynamo.reset()
    architecture, setup = ARCHITECTURES[name], Setup(name, "ep", train=True, sizes=replace(FOUR, dtype=torch.float32))
    whole, part = (architecture.make(1, setup.sizes, ctx.device) for _ in range(2))
    wanted_way = DistributedConfig(tp_size=ctx.world_size, ep_size=ctx.world_size)
    assert wanted_way.ep_implementation == "auto"
    config, _, mesh = part.prepare_distribute_model(wanted_way)
    part.lm_head.weight = nn.Parameter(part.lm_head.weight.detach().clone())
    model = part.maybe_distribute_model(part, config, mesh)
    model.tie_weights()
    given = settle(whole, inputs_of(ctx, setup, 0), setup.sizes.vocabulary)
    with collect_sites() as sink, without_caches():
        call = torch.compile(model, backend=interpreted({"ditron.strategy": "library"}))
        exact, eager, got = (step_of(setup, *each, given) for each in ((whole, whole), (model, model), (model, call)))
    for key, value in exact.items():
        assert relative_error(eager[key], value) <= MODEL_TOLERANCES[torch.float32], f"eager: {key}"
        assert relative_error(got[key], eager[key]) <= MODEL_TOLERANCES[torch.float32], f"compiled: {key}"
    sites = [site for graph in sink.graphs for site in graph.sites]
    return len(sink.graphs), Counter(one.kind if one.matched else f"{one.kind}: {one.reason_code}" for one in sites)


@pytest.mark.parametrize(
    ("name", "world_size", "fused"),
    [
        # Of GPT-OSS nothing but the logits and the experts is cut.
        *rare(("mixtral", 2, 3), ("mixtral", 4, 3), ("qwen3_moe", 2, 3), ("deepseek_v3", 2, 3), ("gpt_oss", 2, 1)),
    ],
)
def test_default_of_transformers(rank_pools: RankPools, name: str, world_size: int, fused: int) -> None:
    for graphs, sites in rank_pools.get("cpu", world_size).run(exchanged, name, timeout=250):
        assert graphs > 2, "it asks the device for sizes"
        # Tokens go to their experts and back, in both directions; the fifth exchange has their numbers.
        left = {site: count for site, count in sites.items() if site.startswith("all_to_all_single")}
        assert left == {"all_to_all_single: tokens_exchanged": 4, "all_to_all_single: no_matmul": 1}
        assert sites["matmul_all_reduce"] + sites["matmul_all_reduce_rms_norm"] == fused


def own_rows(named: dict[str, Any]) -> dict[str, Any]:
    """This rank's sequences of a batch."""
    return {name: one.chunk(dist.get_world_size())[dist.get_rank()] for name, one in named.items()}


def cut_apart(architecture: Architecture, model: Any, ctx: RankContext, form: str) -> Any:
    """In the place of `Architecture.cut`: a rank has some of the experts and sequences, and all other weights."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    register_with_transformers()
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size, 1), mesh_dim_names=("ep", "tp"))
    plan = model._expand_parallel_plan(model.ep_plan)
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan, "ditron")
    # Dynamo would make a graph of its own of a hook.
    forward = model.forward
    model.forward = lambda **named: forward(**own_rows(named))
    return model


def assert_cut_right(ctx: RankContext, setup: Setup) -> None:
    """In float32 and eager mode the gradients are those of the whole model: of the experts from all sequences, and of
    other weights from the rank's own.
    """
    architecture, sizes = ARCHITECTURES[setup.name], replace(setup.sizes, dtype=torch.float32)
    whole, part = (architecture.make(setup.num_layers, sizes, ctx.device) for _ in range(2))
    model = cut_apart(architecture, part, ctx, setup.form)
    given = settle(whole, inputs_of(ctx, setup, 0), sizes.vocabulary)
    wanted, got = step_of(setup, whole, whole, own_rows(given)), step_of(setup, model, model, given)
    split = {name for name, one in model.named_parameters() if isinstance(one, DTensor)}
    assert split and split == {name for name in wanted if ".experts." in name}
    for name, value in wanted.items():
        if name in split:
            dist.all_reduce(value)
        error = relative_error(got[name], value)
        assert error <= MODEL_TOLERANCES[torch.float32], f"{name}: {error:.1e}"


def apart(ctx: RankContext, setup: Setup) -> tuple[Counter[str], Counter[str], set[str]]:
    """(What became of the collectives of the forward, of the backward, the strategies that ran), after a comparison
    with eager.
    """
    assert_cut_right(ctx, setup)
    decisions._last.clear()
    with mock.patch.object(Architecture, "cut", cut_apart), mock.patch.object(fuse, "LEAST_TOKENS", 64):
        sites = run_model(ctx, setup)
    return sites["forward"], sites["backward"], {choice.strategy for _, choice in decisions._last.values()}


@pytest.mark.parametrize(
    ("name", "strategy", "world_size"),
    [
        ("mixtral", "library", 2),
        *rare(
            ("mixtral", "tile", 2),
            ("qwen3_moe", "tile", 2),
            ("deepseek_v3", "tile", 2),
            ("gpt_oss", "tile", 2),
            ("mixtral", "tile", 4),
            ("qwen3_moe", "tile", 4),
        ),
    ],
)
def test_ranks_with_tokens_of_their_own(rank_pools: RankPools, name: str, strategy: str, world_size: int) -> None:
    sizes = FOUR if world_size == 4 else replace(NARROW, heads=4)
    setup = Setup(name, "apart", train=True, sizes=sizes, strategy=strategy, batch=4, seq_len=20)
    for forward, backward, strategies in rank_pools.get("cpu", world_size).run(apart, setup, timeout=250):
        assert strategies == {strategy}
        # Tokens, the experts that they take, and their weights; these have gradients too, which nothing multiplies.
        gathered = {SCATTERED: 1, "all_gather_into_tensor: grouped_matmul": 1}
        assert forward == gathered | {"all_gather_into_tensor: no_matmul": 2}
        assert backward == gathered | {"reduce_scatter_tensor: no_matmul": 1}
