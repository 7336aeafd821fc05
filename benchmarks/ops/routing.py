"""`python -m benchmarks.ops.routing`: how the experts of each token are chosen, from the router's logits.

It needs one GPU: nothing is communicated. Contestants, interleaved, inside CUDA graphs:

    inductor            torch's topk, and Inductor's kernels around it
    ditron              the same with `unroll_topk`, by which Inductor chooses in one of its kernels
    ditron:choose       choose_experts, of whole routers

With `--products` the router's product is measured too, of up to 64 tokens; its rows have the op `router`.

Routers: `softmax` of all logits, the largest k, whose weights are divided by their sum (Qwen3, Mixtral); `chosen`, the
largest k logits, and their softmax (GPT-OSS); `groups`, experts in groups, the best half of the groups, and in these
the largest k (DeepSeek V3, whose logits are fp32; those of the others are bf16).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

from benchmarks.ops import command
from benchmarks.ops.expert_cells import BUDGET_S, LIMIT_S, TOLERANCE, end_cell
from benchmarks.records import RESULTS, Row
from benchmarks.session import Session
from benchmarks.timing import interleaved
from ditron_inductor.lowering.choose_experts.choose_kernel import choose_experts
from ditron_inductor.options import Options
from ditron_inductor.passes.finish.unroll_topk import unroll_topk
from ditron_inductor.pipeline import DitronPipeline
from ditron_inductor.report.explain import without_caches
from ditron_inductor.report.timing import GRAPH_CALLS
from ditron_inductor.task.expert_nodes import ChooseExperts

MODULE = "benchmarks.ops.routing"
RECORDED = RESULTS / "moe.csv"
CHOOSE = "ditron:choose"
SHOWN = ("inductor", "ditron", CHOOSE)
MOST_TOKENS = 64
"""The most tokens of a whole router."""
GROUPS = 8
Chosen = tuple[torch.Tensor, torch.Tensor]


class Router(NamedTuple):
    """form: a key of `FORMS`. Of E experts each token, with K elements, takes k. task: the node of `choose_experts`."""

    form: str
    E: int
    k: int
    K: int
    task: ChooseExperts | None = None


ROUTERS = {
    "mixtral-8x7b": Router("softmax", 8, 2, 4096, ChooseExperts(2, "softmax", True)),
    "qwen3-30b-a3b": Router("softmax", 128, 8, 2048, ChooseExperts(8, "softmax", True)),
    "gpt-oss-120b": Router("chosen", 128, 4, 2880, ChooseExperts(4, "logits")),
    "deepseek-v3": Router("groups", 256, 8, 7168),
    "qwen3-next": Router("softmax", 512, 10, 2048, ChooseExperts(10, "softmax", True)),
}


def softmax(logits: torch.Tensor, k: int) -> Chosen:
    weights, experts = torch.topk(logits.float().softmax(-1), k)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), experts


def chosen(logits: torch.Tensor, k: int) -> Chosen:
    values, experts = torch.topk(logits, k)
    return values.softmax(-1), experts


def groups(logits: torch.Tensor, k: int) -> Chosen:
    scores = logits.float().sigmoid()
    parts = scores.unflatten(-1, (GROUPS, -1))
    best = parts.topk(2)[0].sum(-1)
    taken = torch.zeros_like(best).scatter_(1, best.topk(GROUPS // 2, sorted=False)[1], 1).bool()
    inside = parts.masked_fill(~taken.unsqueeze(-1), 0.0).flatten(1)
    experts = inside.topk(k, sorted=False)[1]
    weights = scores.gather(1, experts)
    return (weights / (weights.sum(-1, keepdim=True) + 1e-20)).to(logits.dtype), experts


FORMS: dict[str, Callable[[torch.Tensor, int], Chosen]] = {"softmax": softmax, "chosen": chosen, "groups": groups}


def spread(logits: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Returns each token's weight of every expert [T, E], 0 of those that it does not take."""
    return torch.zeros_like(logits).scatter(-1, experts, weights)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    result.add_argument("--models", nargs="+", choices=sorted(ROUTERS), default=list(ROUTERS))
    result.add_argument("--tokens", nargs="+", type=int, default=[1, 32, 1024, 8192])
    result.add_argument("--products", action="store_true", help="whole routers of few tokens, with their products")
    result.add_argument("--budget", type=float, default=BUDGET_S, help="seconds, after which no cell is begun")
    command.add_common(result, world=1, limit_s=LIMIT_S)
    return result


def contestants(
    session: Session, router: Router, operands: Sequence[tuple[torch.Tensor, ...]]
) -> dict[str, Callable[[int], Chosen]]:
    """The contestants that choose the same experts, captured where there is a GPU. operands: for each call, the logits
    [T, E], or the tokens [T, K] and the router's weight [E, K].
    """
    own = DitronPipeline(Options(), passes=(unroll_topk,))
    options: dict[str, dict[str, Any]] = {"inductor": {}, "ditron": {"post_grad_custom_pre_pass": own}}
    first = operands[0]
    task = router.task if len(first) == 2 else None

    def route(*given: torch.Tensor) -> Chosen:
        return FORMS[router.form](given[0] @ given[1].t() if len(given) == 2 else given[0], router.k)

    def choose(x: torch.Tensor, weight: torch.Tensor) -> Chosen:
        values, experts = choose_experts(task, [x, weight.t()])
        return (values if router.form == "softmax" else values.softmax(-1)), experts

    wanted = route(*first)
    like = torch.empty(len(first[0]), router.E, device=first[0].device)

    def checked(name: str) -> Callable[[int], Chosen]:
        run = choose if name == CHOOSE else torch.compile(route, dynamic=False, options=options[name])
        got, exact = (spread(like, weights.float(), experts) for weights, experts in (run(*first), wanted))
        torch.testing.assert_close(got, exact, rtol=TOLERANCE, atol=TOLERANCE * float(exact.max()))
        return lambda index: run(*operands[index % len(operands)])

    with without_caches():
        calls = session.right([*options, *[CHOOSE] * (task is not None)], checked)
    return session.replays(calls, GRAPH_CALLS) if like.is_cuda else calls


def drawn(router: Router, T: int, products: bool, device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    """The operands of the calls. Each call has a router of its own, as each layer has."""
    generator = torch.Generator(device=device).manual_seed(0)
    dtype = torch.float32 if router.form == "groups" else torch.bfloat16

    def normal(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, device=device, dtype=dtype).normal_(generator=generator)

    if not products:
        return [(normal(T, router.E),)]
    x = normal(T, router.K)
    return [(x, normal(router.E, router.K) / router.K**0.5) for _ in range(GRAPH_CALLS)]


def measure(session: Session, options: argparse.Namespace) -> list[Row]:
    """All cells for which there is time; rank 0 writes and prints."""
    rows: list[Row] = []
    lines = []
    device = session.clock.device
    per_call = GRAPH_CALLS if device.type == "cuda" else 1
    for model, T in itertools.product(options.models, options.tokens):
        router = ROUTERS[model]
        shape = f"T={T};E={router.E};k={router.k};router={router.form}" + f";K={router.K}" * options.products
        if options.products and T > MOST_TOKENS:
            session.say(f"{shape}: whole routers have up to {MOST_TOKENS} tokens")
            continue
        if session.seconds() > options.budget:
            session.say(f"no time for {shape}")
            continue
        calls = contestants(session, router, drawn(router, T, options.products, device))
        times = interleaved(session.clock, calls, per_call, options.rounds)
        rows += session.rows_of(
            times, bench="routing", op="router" if options.products else "topk", shape=shape,
            graph=device.type == "cuda", limit_us=None, commit=options.commit,
        )  # fmt: skip
        us = {name: each.p50_us for name, each in times.items()}
        ratio = us["inductor"] / us["ditron"] if {"inductor", "ditron"} <= set(us) else float("nan")
        lines.append([model, shape, *(f"{us[name]:.1f}" if name in us else "-" for name in SHOWN), f"{ratio:.2f}"])
        session.say("  ".join(lines[-1]))
        end_cell(session, options, rows)
    if session.rank == 0 and lines:
        print(tabulate(lines, ["model", "cell", *SHOWN, "inductor/ditron"], disable_numparse=True), flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return command.start_alone(MODULE, parser().parse_args(arguments), RECORDED)


if __name__ == "__main__":
    sys.exit(main())
