"""TorchTitan as the guide says it: its parser, its override hook and its blocks, compiled, against eager, on 2 ranks.

`causal` below is an override, too: FlexAttention has no backward on the CPU, and without it TorchTitan takes the name
of any backend.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.distributed.tensor import DTensor

from benchmarks.tolerances import MODEL_TOLERANCES, relative_error
from tests.models.interpreted import without_generated_code
from tests.ranks import RankContext, RankPool, RankPools

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("torchtitan") is None, reason="needs TorchTitan: pip install torchtitan==0.3.0"
    ),
]
PAGE = Path(__file__).parent.parent / "docs" / "guide" / "other_stacks.md"
LENGTH = 32
GATHERS_AND_SCATTERS = {"all_gather_matmul": 4, "matmul_reduce_scatter": 4}
REDUCTIONS = {"matmul_all_reduce": 4}


def module_of_the_guide() -> types.ModuleType:
    """The program with the override, as the module that it is a file of."""
    found = re.search(r'^```python title="(\w+)\.py"\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    module = types.ModuleType(found[1])
    exec(compile(found[2], str(PAGE), "exec"), vars(module))
    return module


@contextlib.contextmanager
def overrides(ctx: RankContext) -> Iterator[None]:
    """The guide's override and `causal`, which can be imported in the block; torch's config as before behind it."""
    from torchtitan.config.override import clear_overrides, derive, override
    from torchtitan.distributed import parallel_dims
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    guide, own = module_of_the_guide(), types.ModuleType("own_overrides")

    def causal(config: Any) -> Any:
        return derive(config, ScaledDotProductAttention.Config)

    causal.__module__ = own.__name__
    own.causal = override(target=FlexAttention.Config)(causal)  # type: ignore[attr-defined]
    with (
        mock.patch.object(parallel_dims, "device_type", ctx.device.type),
        torch._dynamo.config.patch(capture_scalar_outputs=False, skip_fwd_side_effects_in_bwd_under_checkpoint=False),
        inductor_config.patch(post_grad_custom_pre_pass=None, joint_custom_post_pass=None),
    ):
        sys.modules |= {guide.__name__: guide, own.__name__: own}
        try:
            yield
        finally:
            clear_overrides()
            del sys.modules[guide.__name__], sys.modules[own.__name__]


def configured(*arguments: str, world_size: int) -> Any:
    """TorchTitan's config of a small Llama 3 with one layer and tensor parallelism, as its trainer has it."""
    from torchtitan.config import ConfigManager
    from torchtitan.config.override import apply_overrides

    given = ["--module", "llama3", "--config", "llama3_debugmodel", f"--training.seq_len={LENGTH}", *arguments]
    given += [f"--parallelism.tensor_parallel_degree={world_size}", "--training.mixed_precision_param=float32"]
    config = ConfigManager().parse_args(given)
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    config.model_spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    return config


def built(config: Any, compile_config: Any, device: torch.device) -> tuple[Any, Any]:
    """The model, cut and compiled as the trainer does it, and the context that the trainer runs it in."""
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.protocols.module import Module

    dims = ParallelDims.from_config(config.parallelism, config.parallelism.tensor_parallel_degree)
    utils.set_spmd_backend(config.parallelism.spmd_backend)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model = config.model_spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=compile_config,
        ac_config=None,
        dump_folder="",
    )
    model.to_empty(device=device)
    with mock.patch.object(Module, "_init_self_parameters"):  # its fused QKV is drawn whole, which wants FSDP
        model.init_states()
    return model, utils.get_spmd_context(parallel_dims=dims)


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def randomize(model: Any) -> None:
    """The rank's parts of the weights, at random; a norm's, which are whole on all ranks, near 1."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            part = local(parameter)
            drawn = torch.randn(part.shape, generator=generator).to(part)
            part.copy_(1 + 0.1 * drawn if part.ndim == 1 else 0.05 * drawn)


def step(model: Any, context: Any, train: bool, device: torch.device) -> dict[str, torch.Tensor]:
    """The outputs of a step, and the gradients."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 2048, (2, LENGTH), generator=generator).to(device)
    positions = torch.arange(LENGTH, device=device).repeat(2, 1)
    masks = None if train else model.get_attention_masks(positions)
    with context(), torch.set_grad_enabled(train):
        out = model(tokens, positions=positions, attention_masks=masks)
        if train:
            out.square().mean().backward()
    gradients = {name: local(one.grad) for name, one in model.named_parameters() if one.grad is not None}
    return {"output": local(out).detach(), **gradients}


def run_llama(ctx: RankContext, arguments: list[str], train: bool, skip_fsdp: bool) -> Counter[str]:
    """What the passes counted while a compiled model computed what an eager one does."""
    from torchtitan.config import CompileConfig
    from torchtitan.models.llama3 import parallelize

    torch._dynamo.reset()
    with overrides(ctx), contextlib.ExitStack() as stack:
        if skip_fsdp:
            stack.enter_context(mock.patch.object(parallelize, "apply_fsdp_to_decoder"))
        if ctx.device.type == "cpu":
            stack.enter_context(without_generated_code())
        config = configured(*arguments, world_size=ctx.world_size)
        results = []
        for compile_config in (CompileConfig(), config.compile):
            model, context = built(config, compile_config, ctx.device)
            randomize(model)
            counters.clear()
            results.append(step(model, context, train, ctx.device))
        assert len(results[0]) == (10 if train else 0) + 1
        wanted, got = results
        for name, value in wanted.items():
            assert relative_error(got[name], value) < MODEL_TOLERANCES[torch.float32], name
    return Counter(counters["ditron"])


COMPILED = ["--compile.enable", "--compile.components", "model"]
HOOK = [*COMPILED, "--override.imports", "my_run.ditron", "own_overrides.causal"]
NAMED = [*COMPILED, "--compile.backend", "ditron", "--override.imports", "own_overrides.causal"]
PARTIAL = ["--parallelism.spmd_backend", "partial_dtensor"]
WITHOUT_SP = ["--parallelism.no-enable-sequence-parallel"]


def own_ranks(rank_pools: RankPools) -> RankPool:
    """Processes for these tests alone: TorchTitan changes torch when it is imported."""
    return rank_pools.get("cpu", 2, label="torchtitan")


@pytest.mark.parametrize(
    ("arguments", "skip_fsdp", "fused"),
    [
        pytest.param([*HOOK, *PARTIAL], False, GATHERS_AND_SCATTERS, id="override"),
        pytest.param([*NAMED, *PARTIAL], False, GATHERS_AND_SCATTERS, id="name"),
        pytest.param(NAMED, True, GATHERS_AND_SCATTERS, id="name-spmd_types"),
        pytest.param([*NAMED, *WITHOUT_SP], True, REDUCTIONS, id="name-spmd_types-reductions"),
    ],
)
def test_training(rank_pools: RankPools, arguments: list[str], skip_fsdp: bool, fused: dict[str, int]) -> None:
    for counted in own_ranks(rank_pools).run(run_llama, arguments, True, skip_fsdp, timeout=250.0):
        assert {name: counted[name] for name in fused} == fused


def test_flex_attention(rank_pools: RankPools) -> None:
    """The model as it is, in inference: what its block compiles, FlexAttention in it, is fused too."""
    arguments = [*COMPILED, "--override.imports", "my_run.ditron"]
    for counted in own_ranks(rank_pools).run(run_llama, arguments, False, True, timeout=250.0):
        assert counted["all_gather_matmul"] == counted["matmul_reduce_scatter"] == 2


def test_the_name_is_refused_beside_flex_attention() -> None:
    from torchtitan.distributed.compile import _maybe_regional_inductor_backend
    from torchtitan.models.common.attention import FlexAttention

    model = FlexAttention.Config().build()
    with pytest.raises(ValueError, match="'ditron'"):
        _maybe_regional_inductor_backend(model, "ditron")


def test_options_follow_the_name() -> None:
    with overrides(RankContext(0, 2, torch.device("cpu"), seed=0)):
        configured(*COMPILED, "--override.imports", 'my_run.ditron={"ditron.strategy": "tile"}', world_size=2)
        assert inductor_config.post_grad_custom_pre_pass.options.strategy == "tile"
