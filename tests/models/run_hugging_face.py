"""One model of `transformers` inside a rank: eager against compiled, and what the compiler did with its collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from benchmarks.tolerances import MODEL_TOLERANCES, narrow_limit
from ditron_inductor.backend import ditron
from ditron_inductor.report.explain import without_caches
from ditron_inductor.task.site_records import GraphRecord, collect_sites
from tests.models.hugging_face import ARCHITECTURES, Sizes
from tests.models.interpreted import interpreted
from tests.models.settled import settle
from tests.rank_process import RankContext

# A gradient that is zero but for rounding (a key's bias shifts all of a query's scores alike) is compared with this
# part of the largest one.
FLOOR = 1e-3


@dataclass(frozen=True)
class Setup:
    """A model, its form (one of FORMS), whether it trains, and how it is compiled.

    dynamic: its batch and length are symbols, and change between the calls. inductor: through the real backend to
    the end, else without code generation.
    """

    name: str
    form: str
    train: bool = False
    num_layers: int = 1
    dynamic: bool = False
    inductor: bool = False
    strategy: str = "tile"
    sizes: Sizes = Sizes()
    batch: int = 2
    seq_len: int = 8

    def __str__(self) -> str:
        extra = "-dynamic" * self.dynamic + "-inductor" * self.inductor
        return f"{self.name}-{self.form}-{'training' if self.train else 'inference'}{extra}"


def run_model(ctx: RankContext, setup: Setup) -> dict[str, Counter[str]]:
    """The sites of each graph by direction, after everything that the model computes was compared with eager.

    A fused site is counted by its kind, one that was left alone as `collective: reason code`.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    architecture = ARCHITECTURES[setup.name]
    whole, part = (architecture.make(setup.num_layers, setup.sizes, ctx.device) for _ in range(2))
    rounds = setup.sizes.dtype is not torch.float32
    model = architecture.cut(part, ctx, setup.form)
    with collect_sites() as sink, without_caches(), torch.set_grad_enabled(setup.train):
        call = compiled_model(setup, model)
        for index in range(3 if setup.dynamic else 2):
            given = inputs_of(ctx, setup, index)
            if rounds and architecture.chooses:
                given = settle(whole.float(), given, setup.sizes.vocabulary)
            # Under dynamic=True torch would make a symbol of the eps of norms too, which are then left alone.
            with torch._dynamo.config.patch(error_on_recompile=index > 0, specialize_float=True):
                wanted, got = step_of(setup, model, model, given), step_of(setup, model, call, given)
            if rounds:
                exact = architecture.make(setup.num_layers, setup.sizes, ctx.device).float()
                exact = architecture.cut(exact, ctx, setup.form)
                _assert_as_near(got, wanted, step_of(setup, exact, exact, given), setup.sizes.dtype)
                continue
            _assert_near(got, wanted, setup.sizes.dtype, "compiled against eager")
            if index == 0:
                uncut = {"logits": whole(**given).logits}
                _assert_near({"logits": wanted["logits"]}, uncut, setup.sizes.dtype, "cut against whole")
    return _site_counts(sink.graphs)


def count_sites(ctx: RankContext, setup: Setup) -> dict[str, Counter[str]]:
    """As `run_model` returns them, computing nothing: `ctx` may be a rank of a group of which no other exists."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    architecture = ARCHITECTURES[setup.name]
    model = architecture.cut(architecture.make(setup.num_layers, setup.sizes, ctx.device), ctx, setup.form)
    with collect_sites() as sink, without_caches(), torch.set_grad_enabled(setup.train):
        call = torch.compile(model, backend=interpreted({}, run_fused=False), fullgraph=True)
        step_of(setup, model, call, inputs_of(ctx, setup, 0))
    return _site_counts(sink.graphs)


def compiled_model(setup: Setup, model: Any) -> Callable[..., Any]:
    options: dict[str, Any] = {"ditron.strategy": setup.strategy}
    dynamic = True if setup.dynamic else None
    if setup.inductor:
        return torch.compile(model, backend=ditron, fullgraph=True, dynamic=dynamic, options=options)
    return torch.compile(model, backend=interpreted(options), fullgraph=True, dynamic=dynamic)


def inputs_of(ctx: RankContext, setup: Setup, index: int) -> dict[str, Any]:
    """The arguments of call number `index`, the same on all ranks."""
    batch, seq_len = setup.batch, setup.seq_len
    if setup.dynamic:
        # DTensor itself wants sizes that are multiples of the number of ranks.
        batch, seq_len = batch + ctx.world_size * index, seq_len + 2 * ctx.world_size * index
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, setup.sizes.vocabulary, (batch, seq_len), generator=generator).to(ctx.device)
    given: dict[str, Any] = {"input_ids": tokens}
    if setup.train:
        given["labels"] = tokens
    if setup.form == "sp" and not ARCHITECTURES[setup.name].plain:
        # The models would take both from the hidden states, of which a rank holds only a part.
        given["position_ids"] = torch.arange(seq_len, device=ctx.device)[None]
        mask = torch.ones(batch, 1, seq_len, seq_len, dtype=torch.bool, device=ctx.device)
        given["attention_mask"] = mask.tril()
    return given


def step_of(setup: Setup, model: Any, call: Callable[..., Any], given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What one call computes: the logits, in training the loss and all gradients too."""
    out = call(**given)
    values = {"logits": out.logits.detach()}
    if not setup.train:
        return values
    model.zero_grad(set_to_none=True)
    out.loss.backward()
    values["loss"] = out.loss.detach()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        # Pending sums are a matter of layout, their value is what has to match.
        values[name] = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
    return values


def _errors(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """The norm of every difference, over that of the wanted value."""
    floor = FLOOR * max(float(value.norm()) for value in wanted.values())
    return {name: float((got[name] - value).norm()) / max(float(value.norm()), floor) for name, value in wanted.items()}


def _assert_near(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], dtype: torch.dtype, what: str) -> None:
    """AssertionError naming every tensor of `got` that is too far from `wanted`."""
    tolerance = MODEL_TOLERANCES[dtype]
    wrong = {name: f"{error:.1e}" for name, error in _errors(got, wanted).items() if not error <= tolerance}
    assert not wrong, f"{what}: relative errors above {tolerance:.0e}: {wrong}"


def _assert_as_near(
    got: dict[str, torch.Tensor], eager: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], dtype: torch.dtype
) -> None:
    """AssertionError naming every tensor of `got` that is further from `exact` than eager's rounding explains."""
    rounded = _errors(eager, exact)
    limits = {name: narrow_limit(dtype, error) for name, error in rounded.items()}
    errors = _errors(got, exact)
    wrong = {
        name: f"{errors[name]:.1e}, eager {rounded[name]:.1e}" for name in errors if not errors[name] <= limits[name]
    }
    assert not wrong, f"compiled: relative errors beyond those of eager: {wrong}"


def _site_counts(graphs: list[GraphRecord]) -> dict[str, Counter[str]]:
    """By direction; AssertionError where torch's counters say otherwise."""
    fused = sum(site.matched for graph in graphs for site in graph.sites)
    counters = torch._dynamo.utils.counters["ditron"]
    assert counters["name_sites"] == fused, f"{dict(counters)} against {fused}"
    counts: dict[str, Counter[str]] = {}
    for graph in graphs:
        direction = "backward" if graph.is_backward else "forward"
        assert direction not in counts, "more than one graph of a direction: the model was compiled again"
        counts[direction] = Counter(
            site.kind if site.matched else f"{site.kind}: {site.reason_code}" for site in graph.sites
        )
    return counts
