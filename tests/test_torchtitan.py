"""TorchTitan as the guide says it: parser, override hook, blocks and trainer, against eager, on 2 ranks.

`own_overrides.causal` is an override, too: FlexAttention has no backward on the CPU, and without it TorchTitan takes
the name of any backend.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import subprocess
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
from ditron_inductor.task.site_records import collect_sites
from tests.cases import rare
from tests.models.interpreted import without_generated_code
from tests.ranks import RankContext, RankPool, RankPools
from tests.stacks.titan_on_cpu import causal_override, write_assets

VERSION = next((one.version for one in importlib.metadata.distributions(name="torchtitan")), "none")
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not VERSION.startswith("0.3."),
        reason=f"needs TorchTitan 0.3 (here: {VERSION}): pip install torchtitan==0.3.0",
    ),
]
ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "guide" / "other_stacks.md"
LLAMA, MIXTURE = ("llama3", "llama3_debugmodel"), ("qwen3", "qwen3_moe_debug")
OF_EXPERTS = "ditron_inductor.torchtitan"
LENGTH = 32
GATHERS_AND_SCATTERS = {"all_gather_matmul": 4, "matmul_reduce_scatter": 4}
REDUCTIONS = {"matmul_all_reduce": 4}


def program_of_the_guide() -> tuple[str, str]:
    """The name and the text of the module with the override."""
    found = re.search(r'^```python title="(\w+)\.py"\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1], found[2]


def module_of_the_guide() -> types.ModuleType:
    name, text = program_of_the_guide()
    module = types.ModuleType(name)
    exec(compile(text, str(PAGE), "exec"), vars(module))
    return module


def command_of_the_guide() -> list[str]:
    """The arguments of TorchTitan in the command that trains."""
    found = re.search(
        r"^    torchrun --nproc-per-node 8 -m torchtitan\.train ((?:.*\\\n)*.*)$", PAGE.read_text(), re.MULTILINE
    )
    assert found is not None
    return found[1].replace("\\\n", " ").split()


@contextlib.contextmanager
def overrides(ctx: RankContext) -> Iterator[None]:
    """The guide's override and `causal`, which can be imported in the block; torch's config as before behind it."""
    from torchtitan.config.override import clear_overrides
    from torchtitan.distributed import parallel_dims

    guide, own = module_of_the_guide(), causal_override()
    with (
        mock.patch.object(parallel_dims, "device_type", ctx.device.type),
        torch._dynamo.config.patch(capture_scalar_outputs=False, skip_fwd_side_effects_in_bwd_under_checkpoint=False),
        inductor_config.patch(post_grad_custom_pre_pass=None, joint_custom_pre_pass=None, joint_custom_post_pass=None),
    ):
        sys.modules |= {guide.__name__: guide, own.__name__: own}
        try:
            yield
        finally:
            clear_overrides()
            # The next import registers its override again.
            sys.modules.pop(OF_EXPERTS, None)
            del sys.modules[guide.__name__], sys.modules[own.__name__]


def configured(*arguments: str, world_size: int, model: tuple[str, str] = LLAMA) -> Any:
    """TorchTitan's config of a small model with one layer and tensor parallelism, as its trainer has it."""
    from torchtitan.config import ConfigManager
    from torchtitan.config.override import apply_overrides

    given = ["--module", model[0], "--config", model[1], f"--training.seq_len={LENGTH}", *arguments]
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


def step(model: Any, context: Any, train: bool, device: torch.device, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """The outputs of a step, and the gradients."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 2048, (2, length), generator=generator).to(device)
    positions = torch.arange(length, device=device).repeat(2, 1)
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


def train_mixture(
    ctx: RankContext, arguments: list[str], length: int, override: str = ""
) -> tuple[Counter[str], set[str]]:
    """What the passes counted while a compiled layer with experts computed what an eager one does, in bfloat16, and the
    reasons of the collectives that were left alone. override: of the compiled layer alone, behind those of `arguments`.
    """
    from torchtitan.config import CompileConfig
    from torchtitan.models.qwen3 import parallelize

    torch._dynamo.reset()
    with overrides(ctx), contextlib.ExitStack() as stack:
        for name in [name for name in vars(parallelize) if name.startswith("apply_fsdp")]:
            stack.enter_context(mock.patch.object(parallelize, name))
        if ctx.device.type == "cpu":
            stack.enter_context(without_generated_code())
        arguments = [f"--training.seq_len={length}", *arguments]
        config = configured(*arguments, world_size=ctx.world_size, model=MIXTURE)
        eager, results = (config, CompileConfig()), []
        if override:
            config = configured(*arguments, override, world_size=ctx.world_size, model=MIXTURE)
        with collect_sites() as sink:
            for chosen, compile_config in (eager, (config, config.compile)):
                model, context = built(chosen, compile_config, ctx.device)
                model = model.bfloat16()
                randomize(model)
                counters.clear()
                results.append(step(model, context, True, ctx.device, length))
        wanted, got = results
        assert len(wanted) == 14
        for name, value in wanted.items():
            assert relative_error(got[name], value) < MODEL_TOLERANCES[torch.bfloat16], name
        left = {site.reason_code for graph in sink.graphs for site in graph.sites if not site.matched}
    return Counter(counters["ditron"]), left


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


EXCHANGE = ["--training.disable_cuda_graphs", "--parallelism.expert_parallel_degree"]


@pytest.mark.parametrize("world_size", [2, *rare(4)])
def test_a_mixture_trains(rank_pools: RankPools, world_size: int) -> None:
    """Experts that are cut by their width, behind a gather and in front of a reduce-scatter."""
    pool = rank_pools.get("cpu", world_size, label="torchtitan")
    fused = {"all_gather_matmul": 3, "matmul_reduce_scatter": 2, "grouped_matmul_reduce_scatter": 2}
    for counted, left in pool.run(train_mixture, [*NAMED, *PARTIAL], 512, timeout=250.0):
        assert {name: counted[name] for name in fused} == fused
        # Gradients: of the sums over the experts, of the router's weights, and with a residual added.
        assert {"grouped_matmul", "no_matmul"} <= left <= {"grouped_matmul", "no_matmul", "bias"}


@pytest.mark.parametrize("world_size", [2, *rare(4)])
def test_experts_on_several_ranks_train(rank_pools: RankPools, world_size: int) -> None:
    """Tokens go to the ranks of their experts, by sizes that the program reads."""
    pool = rank_pools.get("cpu", world_size, label="torchtitan")
    arguments = [*NAMED, *PARTIAL, *EXCHANGE, str(world_size)]
    for counted, left in pool.run(train_mixture, arguments, LENGTH, timeout=250.0):
        assert counted["all_gather_matmul"] == counted["matmul_reduce_scatter"] == 2
        # The counts of the tokens are exchanged, too.
        assert left == {"tokens_exchanged", "no_matmul"}


GATHERED = f"{OF_EXPERTS}.gathered_experts"


@pytest.mark.parametrize(
    ("world_size", "arguments", "override"),
    [
        pytest.param(2, [*PARTIAL, *NAMED], GATHERED, id="partial_dtensor"),
        # Of `spmd_types` Gloo cannot run the all-to-alls with which TorchTitan's own dispatcher is eager.
        pytest.param(2, [*NAMED, GATHERED], "", id="spmd_types"),
        pytest.param(4, [*PARTIAL, *NAMED], GATHERED, id="partial_dtensor-4", marks=pytest.mark.all_cases),
    ],
)
def test_experts_on_several_ranks_train_in_static_shapes(
    rank_pools: RankPools, world_size: int, arguments: list[str], override: str
) -> None:
    """By the dispatcher of `ditron_inductor.torchtitan`: no size is read from the device."""
    pool = rank_pools.get("cpu", world_size, label="torchtitan")
    arguments = [*EXCHANGE, str(world_size), *arguments]
    fused = {"all_gather_matmul": 2, "matmul_reduce_scatter": 2, "grouped_matmul_reduce_scatter": 2}
    for counted, left in pool.run(train_mixture, arguments, 512, override, timeout=250.0):
        assert {name: counted[name] for name in fused} == fused
        # The gathered tokens, ids and weights, and what is gathered in the backward.
        assert left == {"grouped_matmul", "no_matmul"}


ROUTINGS = {
    "random": lambda W, T, K, E: torch.rand(T, E).topk(K).indices,
    "one expert": lambda W, T, K, E: torch.tensor([E - 1, *range(K - 1)]).repeat(T, 1),
    "the experts of rank 0": lambda W, T, K, E: torch.rand(T, E // W).topk(K).indices,
}


def dispatch(ctx: RankContext, routing: str, num_local: int, top_k: int) -> None:
    """Experts that multiply rows by their number reach all tokens, and gradients come back. What is behind the rows of
    a rank's experts is no number.
    """
    from torch.distributed.device_mesh import init_device_mesh

    from ditron_inductor.torchtitan import GatheredTokenDispatcher

    W, T, E = ctx.world_size, 6, num_local * ctx.world_size
    torch.manual_seed(ctx.rank)
    ids = ROUTINGS[routing](W, T, top_k, E)
    x, scores = torch.randn(T, 4, requires_grad=True), torch.rand(T, top_k, requires_grad=True)
    dispatcher = GatheredTokenDispatcher(GatheredTokenDispatcher.Config(num_experts=E, top_k=top_k))
    dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (W,)))
    rows, held, slots = dispatcher.dispatch(x, scores, ids, torch.zeros(E))
    assert rows.shape == (W * T * top_k, 4) and held.shape == (num_local,)
    numbers = torch.arange(1, num_local + 1).repeat_interleave(held.long()) + ctx.rank * num_local
    factors = torch.full((len(rows),), torch.nan)
    factors[: len(numbers)] = numbers.float()
    out = dispatcher.combine(rows * factors.unsqueeze(1), slots, x)
    wanted = (x.unsqueeze(1) * (ids + 1).unsqueeze(2) * scores.unsqueeze(2)).sum(1)
    weights = torch.randn(T, 4)
    got = torch.autograd.grad((out * weights).sum(), (x, scores))
    for one, other in zip(
        (out, *got), (wanted, *torch.autograd.grad((wanted * weights).sum(), (x, scores))), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("num_local", "top_k"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_token_reaches_its_experts(rank_pools: RankPools, routing: str, num_local: int, top_k: int) -> None:
    own_ranks(rank_pools).run(dispatch, routing, num_local, top_k)


def test_one_rank_dispatches_as_torchtitan_does() -> None:
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    from ditron_inductor.torchtitan import GatheredTokenDispatcher

    given = torch.randn(5, 4), torch.rand(5, 2), torch.rand(5, 3).topk(2).indices, torch.tensor([4, 3, 3])
    results = []
    for kind in (GatheredTokenDispatcher, LocalTokenDispatcher):
        dispatcher = kind(kind.Config(num_experts=3, top_k=2))
        rows, held, slots = dispatcher.dispatch(*given)
        results.append([rows, held, dispatcher.combine(rows.sin(), slots, given[0])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


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


def trained(folder: Path, arguments: list[str]) -> tuple[list[float], Counter[str]]:
    """The losses of ten steps of TorchTitan's trainer on two CPU ranks, and what Ditron counted on rank 0."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--local-addr", "127.0.0.1"]
    # TorchTitan itself may be on the path only.
    path = os.pathsep.join([str(ROOT), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-m", "tests.stacks.titan_on_cpu", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    # Both ranks write the same lines, with colours.
    text = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)
    losses = dict(re.findall(r"step: +(\d+) +loss: +([\d.]+)", text))
    assert list(losses) == [str(number) for number in range(1, 11)]
    counted = re.search(r"^counted: (.*)$", text, re.MULTILINE)
    assert counted is not None
    return [float(loss) for loss in losses.values()], Counter(json.loads(counted[1]))


@pytest.mark.timeout(600)
def test_ten_steps_by_the_command_of_the_guide(tmp_path: Path) -> None:
    """TorchTitan's trainer, from its parser to the end of the run, on a small model and on the CPU."""
    name, text = program_of_the_guide()
    (tmp_path / f"{name}.py").write_text(text)
    small = [*write_assets(tmp_path), "--training.steps", "10", "--training.seq_len", "64"]
    small += ["--training.local_batch_size", "2", "--metrics.log_freq", "1", "--debug.seed", "0"]
    command = " ".join(command_of_the_guide())
    for was, becomes in {
        "--config llama3_8b": " ".join(["--config llama3_debugmodel", *small]),
        "--parallelism.tensor_parallel_degree 8": "--parallelism.tensor_parallel_degree 2",
        "--override.imports my_run.ditron": "--override.imports my_run.ditron own_overrides.causal",
    }.items():
        assert was in command
        command = command.replace(was, becomes)
    got, counted = trained(tmp_path, command.split())
    wanted, _ = trained(tmp_path, command.replace("--compile.enable", "").split())
    assert got == pytest.approx(wanted, rel=2e-3)
    assert wanted[-1] < 0.5 * wanted[0]
    assert all(counted[pattern] >= number for pattern, number in GATHERS_AND_SCATTERS.items())
