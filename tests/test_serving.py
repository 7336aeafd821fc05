"""`ditron_inductor.serving`: a served model computes what its DTensor model does, and its sites are fused as before."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.tolerances import MODEL_TOLERANCES, narrow_limit, relative_error
from benchmarks.transformers_generation import compiled_by, cut_over, fed_logits
from ditron_inductor import serving
from ditron_inductor.passes.attention import cached_attention
from ditron_inductor.task.plan import decisions
from ditron_inductor.tools.demo_model import Llama, LlamaConfig, tensor_parallel
from tests.cases import rare
from tests.models.hugging_face import ARCHITECTURES, Sizes
from tests.models.interpreted import without_generated_code
from tests.ranks import RankContext, RankPools

LAYERS = 1


def served(ctx: RankContext, sequence_parallel: bool) -> dict[str, int]:
    """What was fused, of a Llama whose step computed what the DTensor model does, before and after a weight changed."""
    torch._dynamo.reset()
    counters.clear()
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    torch.manual_seed(0)
    model = Llama(LlamaConfig(num_layers=LAYERS)).to(ctx.device)
    tensor_parallel(model, mesh, sequence_parallel=sequence_parallel)
    names = [name for name, _ in model.named_parameters()]
    hidden = torch.randn(2, 8 // (ctx.world_size if sequence_parallel else 1), 64, device=ctx.device)
    arguments = (hidden, 8) if sequence_parallel else (hidden,)
    with torch.no_grad(), without_generated_code():
        wanted = model(*arguments)
        step = serving.compile_step(model, cudagraphs=False)
        torch.testing.assert_close(step(*arguments), wanted, rtol=1e-4, atol=1e-4)
        assert [name for name, _ in model.named_parameters()] == names
        assert not any(isinstance(one, DTensor) or one.requires_grad for one in model.parameters())
        assert isinstance(model.layers[0].attention.wq.weight, DTensor)
        # Eager mode reads the same parts.
        torch.testing.assert_close(model(*arguments), wanted)
        # A weight that is written into is the step's, too; the last norm's is whole in either form.
        model._modules["norm"]._parameters["weight"].mul_(2.0)
        torch.testing.assert_close(step(*arguments), 2 * wanted, rtol=1e-4, atol=1e-4)
    return dict(counters["ditron"])


@pytest.mark.parametrize(
    ("sequence_parallel", "kinds"),
    [*rare((False, {"all_reduce_rms_norm": 2 * LAYERS})), (True, {"all_gather_matmul": 2 * LAYERS})],
)
def test_a_step_is_that_of_the_model(rank_pools: RankPools, sequence_parallel: bool, kinds: dict[str, int]) -> None:
    for counted in rank_pools.get("cpu", 2).run(served, sequence_parallel, timeout=200.0):
        assert {kind: counted[kind] for kind in kinds} == kinds


def test_options() -> None:
    assert "triton.cudagraphs" not in serving.options(cudagraphs=False)
    found = serving.options(cudagraphs=True, **{"ditron.strategy": "tile"})
    assert found["triton.cudagraphs"] is True and found["ditron.strategy"] == "tile"
    assert found["guard_filter_fn"] is serving.guards_to_keep


class Numbered(nn.Module):
    """A layer that knows its place, and may break a graph."""

    def __init__(self, place: int, breaks: bool) -> None:
        super().__init__()
        self.place, self.breaks = place, breaks
        self.weight = nn.Parameter(torch.full((4,), 2.0 + place))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.place

    def before(self, module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        """A hook."""
        return (self(*args),)


class Stack(nn.Module):
    """Some of these layers."""

    def __init__(self, breaks: bool, first: int = 0, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Numbered(first + place, breaks) for place in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Nested(nn.Module):
    """A module within one of its own class, behind a graph break."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.inner: nn.Module = Nested(place - 1) if place else nn.Identity()
        self.place = place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.place
        torch._dynamo.graph_break()
        return self.inner(x)


def _as_module(model: nn.Module, compile_it: Any) -> Any:
    return compile_it(model)


def _as_call(model: nn.Module, compile_it: Any) -> Any:
    return compile_it(model.__call__)


def _as_forward(model: Any, compile_it: Any) -> Any:
    model.forward = compile_it(model.forward)
    return model


def _as_function(model: nn.Module, compile_it: Any) -> Any:
    return compile_it(lambda x: model(x))


def _as_loop(model: Any, compile_it: Any) -> Any:
    def layers(x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = layer(x)
        return x

    return compile_it(layers)


def _layer_by_layer(model: Any, compile_it: Any) -> Any:
    for index, layer in enumerate(model.layers):
        model.layers[index] = compile_it(layer)
    return model


def _forward_by_forward(model: Any, compile_it: Any) -> Any:
    steps = [compile_it(layer.forward) for layer in model.layers]
    return lambda x: functools.reduce(lambda y, step: step(y), steps, x)


WAYS = (_as_module, _as_call, _as_forward, _as_function, _as_loop, _layer_by_layer, _forward_by_forward)
FEW_GUARDS = {"backend": "eager", "options": {"guard_filter_fn": serving.guards_to_keep}}


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_layer_is_not_taken_for_the_first_one(way: Callable[..., Any], breaks: bool) -> None:
    torch._dynamo.reset()
    model, x = Stack(breaks), torch.ones(2, 4)
    wanted = model(x)
    with torch.no_grad():
        step = way(model, functools.partial(torch.compile, **FEW_GUARDS))
        assert torch.equal(step(x), wanted)
        assert torch.equal(step(x), wanted)


@pytest.mark.parametrize("other", [{"first": 5}, {"layers": 2}, {"layers": 4}], ids=str)
def test_a_model_is_not_taken_for_another_one_of_its_class(other: dict[str, int]) -> None:
    torch._dynamo.reset()
    models, x = (Stack(False), Stack(False, **other)), torch.ones(2, 4)
    steps = [torch.compile(model, **FEW_GUARDS) for model in models]
    with torch.no_grad():
        for step, model in zip(steps * 2, models * 2, strict=True):
            assert torch.equal(step(x), model(x))


def test_a_module_is_not_taken_for_the_one_around_it() -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(Nested(3), **FEW_GUARDS)(torch.zeros(4)), torch.full((4,), 6.0))


def test_a_hook_is_not_taken_for_the_one_of_another_module() -> None:
    torch._dynamo.reset()
    model, hooks = Numbered(0, False), [Numbered(place, False) for place in (1, 10)]
    for hook in hooks:
        model.register_forward_pre_hook(hook.before)
    with torch.no_grad():
        wanted = model(torch.ones(4))
        assert torch.equal(torch.compile(model, **FEW_GUARDS)(torch.ones(4)), wanted)


def test_what_is_checked_does_not_grow_with_the_layers() -> None:
    def checked(layers: int) -> int:
        torch._dynamo.reset()
        found: list[bool] = []

        def keep(guards: Any) -> list[bool]:
            found.extend(serving.guards_to_keep(guards))
            return found

        with torch.no_grad():
            torch.compile(Stack(False, layers=layers), backend="eager", options={"guard_filter_fn": keep})(
                torch.ones(4)
            )
        return sum(found)

    assert checked(3) == checked(30)


@dataclass(frozen=True)
class Generation:
    """A model of `transformers` in one of its forms, the cache of its keys and values, how its experts compute, and the
    strategy that is forced.
    """

    name: str
    form: str = "hf"
    cache: str = "static"
    experts: str = "grouped_mm"
    strategy: str = "auto"

    def __str__(self) -> str:
        return f"{self.name}-{self.form}-{self.cache}" + f"-{self.experts}" * (self.experts != "grouped_mm")

    def compiled(self, cudagraphs: bool) -> dict[str, Any]:
        """Arguments of `generate` with a static cache and compiled steps."""
        how = compiled_by("ditron", cudagraphs=cudagraphs)
        how["compile_config"].options["ditron.strategy"] = self.strategy
        return how


@contextlib.contextmanager
def from_one_folder(ctx: RankContext, case: Generation, sizes: Sizes) -> Iterator[Callable[[torch.dtype], Any]]:
    """A function that loads the same sharded model in a dtype, as its users do, on every rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = ARCHITECTURES[case.name]
    own = {name: value(sizes) for name, value in architecture.from_sizes.items()}
    config = AutoConfig.for_model(architecture.model_type, **(sizes.config(LAYERS) | architecture.config | own))
    with tempfile.TemporaryDirectory() as mine:
        folder = [mine]
        dist.broadcast_object_list(folder, device=ctx.device)
        torch.manual_seed(0)
        if ctx.rank == 0:
            AutoModelForCausalLM.from_config(config).to(sizes.dtype).save_pretrained(folder[0])
        dist.barrier()
        distributed = cut_over(ctx.world_size, experts_apart=case.form == "ep")

        def load(dtype: torch.dtype) -> Any:
            model = AutoModelForCausalLM.from_pretrained(folder[0], dtype=dtype, distributed_config=distributed)
            if architecture.chooses:
                model.set_experts_implementation(case.experts)
            return model.eval()

        yield load


FOUR = Sizes(kv_heads=4, experts=8)
"""On four ranks every one has a head of keys, and two experts as a whole."""


def generated(ctx: RankContext, case: Generation, count: int = 4) -> dict[str, int]:
    """What was fused while the compiled model's `generate` made as many tokens, those of eager mode, by its logits."""
    torch._dynamo.reset()
    cuda = ctx.device.type == "cuda"
    code = contextlib.nullcontext() if cuda else without_generated_code()
    here = mock.patch.object(cached_attention, "GPUS", ("cpu", "cuda"))
    sizes = FOUR if ctx.world_size == 4 else Sizes()
    with from_one_folder(ctx, case, sizes) as load, code, here:
        model = load(torch.float32)
        tokens = torch.arange(1, 17, device=ctx.device).view(2, -1)
        how = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        how |= {"return_dict_in_generate": True, "output_logits": True}
        wanted = model.generate(tokens, **how, disable_compile=True)
        with pytest.raises(ValueError, match="was replaced"):
            serving.local_parameters(model)
        counters.clear()
        if case.cache == "static":
            got = model.generate(tokens, **how, **case.compiled(cuda))
        else:
            options = serving.options(cudagraphs=False, **{"ditron.strategy": case.strategy})
            model.forward = torch.compile(model.forward, backend="ditron", options=options)
            got = model.generate(tokens, **how)
    assert got.sequences.shape == (2, 8 + count) and torch.equal(got.sequences, wanted.sequences)
    error = relative_error(torch.stack(got.logits), torch.stack(wanted.logits))
    assert error <= MODEL_TOLERANCES[torch.float32], f"{case}: {error:.1e}"
    return dict(counters["ditron"])


def as_near_as_eager(ctx: RankContext, case: Generation, sizes: Sizes, count: int) -> dict[str, int]:
    """What was fused, and how many sites ran fused, in steps of which none is further from the model in float32 than
    eager's rounding explains.
    """
    torch._dynamo.reset()
    cuda = ctx.device.type == "cuda"
    code = contextlib.nullcontext() if cuda else without_generated_code()
    here = mock.patch.object(cached_attention, "GPUS", ("cpu", "cuda"))
    with from_one_folder(ctx, case, sizes) as load, code, here:
        generator = torch.Generator().manual_seed(5)
        # The first tokens of a vocabulary may end a sequence.
        drawn = torch.randint(8, sizes.vocabulary, (2, 8 + count), generator=generator).to(ctx.device)
        tokens, fed = drawn.split((8, count), dim=1)
        exact = fed_logits(load(torch.float32), tokens, fed, disable_compile=True)
        model = load(sizes.dtype)
        eager = fed_logits(model, tokens, fed, disable_compile=True)
        counters.clear()
        decisions._last.clear()
        found = fed_logits(model, tokens, fed, **case.compiled(cuda))
        for step in range(count):
            limit = narrow_limit(sizes.dtype, relative_error(eager[step], exact[step]))
            error = relative_error(found[step], exact[step])
            assert error <= limit, f"step {step}: {error:.1e}, at most {limit:.1e}"
    dist.barrier()
    return {**counters["ditron"], "ran": len(decisions._last)}


needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: the extra 'models'"
)


@needs_transformers
def test_generate_with_a_static_cache(rank_pools: RankPools) -> None:
    for fused in rank_pools.get("cpu", 2, label="accelerate").run(generated, Generation("llama"), timeout=200.0):
        assert fused["name_sites"] == 2 + 2 * LAYERS and fused["cached_attention"] == LAYERS


MIXTURES = {
    "mixtral": ("hf", 1, (4, 3), 2, 1),
    "qwen3_moe": ("hf", 1, (4, None), 2, 1),
    "deepseek_v3": ("hf", 1, (3, 2), 2, 0),
    "gpt_oss": ("ep", 2, (2, 1), 2, 1),
}
"""With a static cache, which sees each step in a graph: the form, the graphs, and in each graph the sites, the matmuls
of experts of few tokens, and the attentions to a cache. Latent attention is none of these. The second number of sites
is that of transformers before 5.23, which keeps embeddings whole, and makes a graph of each linear layer of Qwen3.
"""


@needs_transformers
@pytest.mark.parametrize(
    "case",
    [
        *(Generation(name, MIXTURES[name][0], "static", "batched_mm") for name in ("mixtral", "gpt_oss")),
        *rare(
            *(Generation(name, MIXTURES[name][0], "static", "batched_mm") for name in ("qwen3_moe", "deepseek_v3")),
            *(Generation(name, MIXTURES[name][0], "static") for name in MIXTURES),
            *(
                Generation(name, MIXTURES[name][0], "dynamic", how)
                for name in MIXTURES
                for how in ("grouped_mm", "batched_mm")
            ),
        ),
    ],
    ids=str,
)
def test_generate_of_a_mixture(rank_pools: RankPools, case: Generation) -> None:
    check_fused(case, rank_pools.get("cpu", 2, label="accelerate").run(generated, case, timeout=200.0))


@pytest.mark.gpu
@needs_transformers
@pytest.mark.parametrize(
    "case",
    [
        *(Generation(name, form, "static", "batched_mm") for name, (form, *_) in MIXTURES.items()),
        *(Generation(name, MIXTURES[name][0], "dynamic", "batched_mm") for name in ("mixtral", "gpt_oss")),
    ],
    ids=str,
)
def test_generate_of_a_mixture_on_gpus(rank_pools: RankPools, case: Generation) -> None:
    check_fused(case, rank_pools.get("cuda", 2).run(generated, case, timeout=200.0))


def check_fused(case: Generation, by_rank: list[dict[str, int]]) -> None:
    """AssertionError unless each rank has fused what it should, in the graphs of `generate`."""
    version = importlib.metadata.version("transformers")
    _, graphs, releases, projections, attentions = MIXTURES[case.name]
    sites = releases[tuple(map(int, version.split(".")[:2])) < (5, 23)]
    if sites is None:
        pytest.skip(f"transformers {version} compiles each linear layer of {case.name} to a graph of its own")
    projections = projections if case.experts == "batched_mm" else 0
    for fused in by_rank:
        found = fused["name_sites"], fused["expert_projections"], fused["cached_attention"]
        if case.cache == "static":
            assert found == (graphs * sites, graphs * projections, graphs * attentions)
        else:
            # The prompt is compiled too, and the steps again once the length is a symbol.
            assert found[0] > sites and (found[1] > projections) is (case.experts == "batched_mm")


@needs_transformers
@pytest.mark.parametrize("name", [*rare("llama", "qwen3", "mixtral")])
def test_steps_in_bfloat16(rank_pools: RankPools, name: str) -> None:
    case, sizes = Generation(name, experts="batched_mm"), Sizes(dtype=torch.bfloat16)
    pool = rank_pools.get("cpu", 2, label="accelerate")
    for fused in pool.run(as_near_as_eager, case, sizes, 4, timeout=200.0):
        assert fused["cached_attention"] == LAYERS and fused["ran"] >= 2 * LAYERS


@pytest.mark.gpu
@needs_transformers
@pytest.mark.parametrize("name, count", [("llama", 24), ("llama", 21), ("qwen3", 21), ("mixtral", 21)])
def test_steps_in_cuda_graphs(rank_pools: RankPools, name: str, count: int) -> None:
    """With 29 tokens in a cache torch pads the rows of the mask."""
    sizes = Sizes(hidden=512, heads=8, kv_heads=4, inner=1024, vocabulary=256, longest=128, dtype=torch.bfloat16)
    case = Generation(name, experts="batched_mm")
    for fused in rank_pools.get("cuda", 2).run(as_near_as_eager, case, sizes, count, timeout=200.0):
        assert fused["cached_attention"] == LAYERS and fused["ran"] >= 2 * LAYERS
