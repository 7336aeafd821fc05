"""`python -m benchmarks.ops.combine_experts`: the weighted sum of what its experts return for each token, inside a CUDA
graph.

It needs one GPU: nothing is communicated. A call takes the products [T * k, D] of the second matmul of the experts,
sorted by expert, and the places and weights of the slots of T tokens. It returns the sums [T, D]. Contestants,
interleaved:

    inductor           a product, an index and a sum, as `transformers` writes it
    max_autotune       the same with mode="max-autotune-no-cudagraphs"
    embedding_bag      torch's `embedding_bag` of the products with weights, whose weights have to be bfloat16
    ditron             one call of `combine_experts`

With `--form scatter` a call takes the slots in their sorted order in place of the places, and adds the products to the
rows of their tokens, as TorchTitan writes it. Then `inductor` and `max_autotune` compile `scatter_add`,
`deterministic` is `scatter_add` by torch's deterministic algorithm, as in TorchTitan 0.3, and `ditron` makes the places
first.

The limit is the time to read the products and to write the sums, at the speed of a copy on this GPU, which is measured
first.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import embedding_bag

from benchmarks.ops import command
from benchmarks.ops.chains import copies_of
from benchmarks.ops.expert_cells import (
    LIMIT_S,
    MODELS,
    TINY,
    TOLERANCE,
    add_cells,
    bytes_per_s,
    end_cell,
    print_cells,
    routed,
    texts_of,
)
from benchmarks.records import MOE, Row
from benchmarks.session import Session
from benchmarks.timing import interleaved
from benchmarks.tolerances import relative_error
from ditron_inductor.report.timing import GRAPH_CALLS
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import CombineExperts

MODULE = "benchmarks.ops.combine_experts"
NAMES = ("inductor", "max_autotune", "embedding_bag", "deterministic", "ditron")
HEADS = ["cell", "limit", *NAMES, "ditron/limit", "best other/ditron"]
FORMS = ("index", "scatter")
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""products [S, D], the places of the slots of the tokens or the slots in sorted order [S], scale [S]."""


def drawn(model: str, T: int, routing: str, form: str, device: torch.device, seed: int) -> Operands:
    """Random operands."""
    sizes, generator = (MODELS | TINY)[model], torch.Generator(device=device).manual_seed(seed)
    weights, experts = routed(T, sizes, routing, device, generator)
    order = experts.reshape(-1).argsort()
    products = torch.empty(T * sizes.k, sizes.D, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    return products, order.argsort() if form == "index" else order, weights.reshape(-1)[order]


def by_sum(top_k: int) -> Callable[..., torch.Tensor]:
    """The sum as `transformers` writes it."""

    def layer(products: torch.Tensor, places: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        terms = (products * scale.unsqueeze(-1))[places]
        return terms.view(-1, top_k, products.shape[1]).sum(1).to(products.dtype)

    return layer


def by_bags(top_k: int) -> Callable[..., torch.Tensor]:
    """The sum as one of bags, whose weights are in the order of the tokens."""

    def layer(products: torch.Tensor, places: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        bags = places.view(-1, top_k)
        return embedding_bag(bags, products, mode="sum", per_sample_weights=scale[bags].to(products.dtype))

    return layer


def scaled(products: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The terms that TorchTitan adds up."""
    factors = scale.unsqueeze(-1)
    return (products.to(factors.dtype) * factors).to(products.dtype)


def by_scatter(top_k: int, terms_of: Callable[..., torch.Tensor] = scaled) -> Callable[..., torch.Tensor]:
    """The sum as TorchTitan writes it."""

    def layer(products: torch.Tensor, order: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        index = (order // top_k).unsqueeze(-1).expand_as(products)
        zeros = products.new_zeros(len(order) // top_k, products.shape[1])
        return zeros.scatter_add(0, index, terms_of(products, scale))

    return layer


def deterministic(layer: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The layer by torch's deterministic algorithms."""

    def call(*operands: torch.Tensor) -> torch.Tensor:
        torch.use_deterministic_algorithms(True)
        try:
            return layer(*operands)
        finally:
            torch.use_deterministic_algorithms(False)

    return call


def contestants(
    session: Session, top_k: int, form: str, given: Sequence[Operands]
) -> dict[str, Callable[[int], object]]:
    """The contestants whose results are right, captured on a GPU."""
    node, on_gpu = CombineExperts(top_k), session.clock.device.type == "cuda"

    @functools.partial(torch.compile, dynamic=False)
    def inverse(order: torch.Tensor) -> torch.Tensor:
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        return places

    def ours(products: torch.Tensor, index: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        index = index if form == "index" else inverse(index)
        out: torch.Tensor = schema.call(node, products=products, places=index, scale=scale)[0]
        return out

    tuned = {"mode": "max-autotune-no-cudagraphs"} if on_gpu else {}
    written = (by_sum if form == "index" else by_scatter)(top_k)
    layers = {
        "inductor": torch.compile(written, dynamic=False),
        "max_autotune": torch.compile(written, dynamic=False, **tuned),
        "ditron": ours,
    }
    if form == "index":
        layers["embedding_bag"] = by_bags(top_k)
    else:
        layers["deterministic"] = deterministic(by_scatter(top_k, torch.compile(scaled, dynamic=False)))
    wanted = written(*(one.double() if one.is_floating_point() else one for one in given[0]))

    def checked(name: str) -> Callable[[int], object]:
        error = relative_error(layers[name](*given[0]), wanted)
        if not error <= TOLERANCE:
            raise AssertionError(f"{name} is {error:.1e} from fp64")
        return lambda i: layers[name](*given[i % len(given)])

    calls = session.right(layers, checked)
    return session.replays(calls, GRAPH_CALLS) if on_gpu else calls


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    add_cells(result, models=list(MODELS), tokens=[8192, 2048, 512, 32])
    result.add_argument("--form", choices=FORMS, default=FORMS[0], help="how the sum is written")
    command.add_common(result, world=1, limit_s=LIMIT_S)
    result.set_defaults(rounds=9)
    return result


def measure(session: Session, options: argparse.Namespace) -> list[Row]:
    """All cells for which there is time; rank 0 writes and prints."""
    rows: list[Row] = []
    lines = []
    device = session.clock.device
    rate = bytes_per_s(device)
    for model, T, routing in itertools.product(options.models, options.tokens, options.routing):
        shape = f"model={model};T={T};routing={routing}" + f";form={options.form}" * (options.form != FORMS[0])
        if session.seconds() > options.budget:
            session.say(f"no time for {shape}")
            continue
        sizes = (MODELS | TINY)[model]
        nbytes = T * (sizes.k + 1) * sizes.D * 2
        given = [drawn(model, T, routing, options.form, device, seed) for seed in range(copies_of(device, nbytes))]
        calls = contestants(session, sizes.k, options.form, given)
        times = interleaved(session.clock, calls, GRAPH_CALLS if device.type == "cuda" else 1, options.rounds)
        limit_us = nbytes / rate * 1e6
        rows += session.rows_of(
            times, bench="moe", op=CombineExperts.kind, shape=shape, graph=device.type == "cuda", limit_us=limit_us,
            commit=options.commit,
        )  # fmt: skip
        lines.append([shape, f"{limit_us:.1f}", *texts_of(times, NAMES, limit_us)])
        session.say("  ".join(lines[-1]))
        del given, calls
        end_cell(session, options, rows)
    print_cells(session, HEADS, lines, rate)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return command.start_alone(MODULE, parser().parse_args(arguments), MOE)


if __name__ == "__main__":
    sys.exit(main())
