"""A tensor-parallel Llama inside a rank: one step in eager, one through Ditron, and what the compiler did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.tolerances import MODEL_TOLERANCES, relative_error
from ditron_inductor.backend import ditron
from ditron_inductor.options import Options
from ditron_inductor.report.explain import build_report, without_caches
from ditron_inductor.task.site_records import collect_sites
from ditron_inductor.tools.demo_model import Llama, LlamaConfig, tensor_parallel
from tests.models.interpreted import code_generated
from tests.rank_process import RankContext

STRATEGY = "ditron.strategy"


@dataclass(frozen=True)
class Setup:
    """A model without a vocabulary (hidden states in and out), its form, and the whole batch it runs on.

    Every collective of such a model's forward graph stands beside a matmul.
    """

    config: LlamaConfig
    sequence_parallel: bool
    batch: int
    seq_len: int
    dtype: torch.dtype
    options: dict[str, Any] = field(default_factory=lambda: {STRATEGY: "tile"})
    mode: str | None = None

    def __str__(self) -> str:
        form = "sp" if self.sequence_parallel else "ar"
        return f"{form}-{self.batch}x{self.seq_len}-{str(self.dtype)[6:]}" + (f"-{self.mode}" if self.mode else "")


def build(ctx: RankContext, setup: Setup) -> Llama:
    """The model with the same weights on all ranks, cut over all of them."""
    torch.manual_seed(1)
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    with ctx.device:
        model = Llama(setup.config).to(setup.dtype)
    return tensor_parallel(model, mesh, sequence_parallel=setup.sequence_parallel)


def inputs(ctx: RankContext, setup: Setup, seed: int = 2) -> torch.Tensor:
    """Random hidden states: this rank's part of the sequence, or all of it without sequence parallelism."""
    torch.manual_seed(seed)
    x = torch.randn(setup.batch, setup.seq_len, setup.config.dim).to(ctx.device, setup.dtype)
    return x.chunk(ctx.world_size, dim=1)[ctx.rank].contiguous() if setup.sequence_parallel else x


def compiled(setup: Setup, model: Llama) -> Callable[..., Any]:
    """The model through Ditron."""
    kwargs: dict[str, Any] = {"options": setup.options} if setup.mode is None else {"mode": setup.mode}
    return torch.compile(model, backend=ditron, fullgraph=True, **kwargs)


def step(setup: Setup, model: Llama, call: Callable[..., Any], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output and all gradients of one step, as this rank holds them."""
    model.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    out = call(x, setup.seq_len)
    out.backward(torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype))
    assert x.grad is not None
    values = {"output": out.detach().clone(), "input's gradient": x.grad}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        gradient = parameter.grad
        # Pending sums are a matter of layout, their value is what has to match.
        values[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return values


def assert_matches(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """AssertionError naming every tensor that is too far from eager's."""
    errors = {name: relative_error(got[name], wanted[name]) for name in wanted}
    wrong = {name: f"{error:.1e}" for name, error in errors.items() if error > MODEL_TOLERANCES[dtype]}
    assert not wrong, f"relative errors above {MODEL_TOLERANCES[dtype]:.0e}: {wrong}"


def expected_forward(setup: Setup) -> Counter[str]:
    """The fused sites of the forward graph: gather and scatter, or a reduction, around attention and around the MLP."""
    count = 2 * setup.config.num_layers
    if setup.sequence_parallel:
        return Counter(all_gather_matmul=count, matmul_reduce_scatter=count)
    # A norm follows each of them.
    return Counter(matmul_all_reduce_rms_norm=count)


def check_training(ctx: RankContext, setup: Setup, steps: int = 1, generated: bool = True) -> str:
    """Outputs and gradients match eager, and every collective of the forward graph is fused. Returns the report.

    generated: by Inductor's code, which takes its time on a CPU; else op by op.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build(ctx, setup)
    with collect_sites() as sink, without_caches(), code_generated(generated):
        call = compiled(setup, model)
        for index in range(steps):
            x = inputs(ctx, setup, seed=2 + index)
            wanted = step(setup, model, model, x)
            assert_matches(step(setup, model, call, x), wanted, setup.dtype)
    report = build_report(sink.graphs, Options.parse(setup.options)[0])
    forward = [site for site in report.sites if site.direction == "forward"]
    left_alone = [site for site in forward if not site.record.matched]
    assert not left_alone, f"left alone in the forward graph:\n{report}"
    assert Counter(site.record.kind for site in forward) == expected_forward(setup), str(report)
    counters = torch._dynamo.utils.counters["ditron"]
    fused = Counter(site.record.kind for site in report.matched)
    # Two passes make such a node.
    normed = fused.pop("matmul_all_reduce_rms_norm", 0)
    fused += Counter(matmul_all_reduce=normed, all_reduce_rms_norm=normed)
    assert {kind: counters[kind] for kind in fused} == dict(fused), f"{dict(counters)} against {dict(fused)}"
    return str(report)


def check_inference(ctx: RankContext, setup: Setup, calls: int = 3) -> Counter[str]:
    """Outputs of a graph without gradients match eager, call after call with new inputs; what the passes rewrote."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build(ctx, setup)
    call = compiled(setup, model)
    with torch.no_grad():
        for index in range(calls):
            x = inputs(ctx, setup, seed=2 + index)
            wanted = {"output": model(x, setup.seq_len)}
            assert_matches({"output": call(x, setup.seq_len)}, wanted, setup.dtype)
    return Counter(torch._dynamo.utils.counters["ditron"])
