"""What the benchmarks of experts have in common: the experts of models, routing, the cells of a run, and its table."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.models.experts import SKEW, activated
from benchmarks.records import Row, merge_csv
from benchmarks.session import Session
from benchmarks.timing import Times

BUDGET_S, LIMIT_S = 240.0, 480.0
TOLERANCE = 2e-2
"""Of the norm of the difference from fp64, over the norm: products and terms are rounded to bfloat16."""


@dataclass(frozen=True)
class Experts:
    """The routed experts of a model: its width D, the width F of an expert, E experts, k of them for each token.
    biased: as those of GPT-OSS, each with a bias, and with weights that lie row by row.
    """

    D: int
    F: int
    E: int
    k: int
    biased: bool = False


MODELS = {
    "mixtral-8x7b": Experts(4096, 14336, 8, 2),
    "qwen3-30b-a3b": Experts(2048, 768, 128, 8),
    "qwen3-235b-a22b": Experts(4096, 1536, 128, 8),
    "deepseek-v3": Experts(7168, 2048, 256, 8),
}
BIASED_MODELS = {"gpt-oss-120b": Experts(2880, 2880, 128, 4, biased=True)}
TINY = {"tiny": Experts(64, 96, 8, 2)}
BIASED_TINY = {"tiny-biased": Experts(64, 96, 8, 2, biased=True)}


def routed(
    T: int, sizes: Experts, routing: str, device: torch.device, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weights and experts of T tokens, [T, k] each, the heaviest expert of a token first."""
    scores = torch.empty(T, sizes.E, device=device).normal_(generator=generator)
    if routing == "skewed":
        scores += torch.empty(sizes.E, device=device).normal_(generator=generator) * SKEW
    weights, experts = scores.softmax(-1).topk(sizes.k)
    return weights, experts


def exactly_activated(
    rows: torch.Tensor, ends: torch.Tensor, gate_up: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns gate and up of rows [S, D] that are sorted by expert, activated, [S, F], from products in fp64. ends: of
    each expert's rows. gate_up: [E, D, 2 F]; bias: [E, 2 F], of experts as those of GPT-OSS.
    """
    begins, results = [0, *ends.tolist()[:-1]], []
    for expert, (begin, end) in enumerate(zip(begins, ends.tolist(), strict=True)):
        both = rows[begin:end].double() @ gate_up[expert].double()
        both = both if bias is None else both + bias[expert].double()
        results.append(activated(both, bias is not None).float())
    return torch.cat(results)


def bytes_per_s(device: torch.device) -> float:
    """How fast this GPU reads and writes in a copy of 2 GiB, its best of five; a number of any size without a GPU."""
    if device.type != "cuda":
        return 1e9
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target, best = torch.empty_like(source), 0.0
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best = max(best, 2 * source.numel() / begin.elapsed_time(end) * 1e3)
    return best


def add_cells(
    result: argparse.ArgumentParser,
    *,
    models: list[str],
    tokens: list[int],
    choices: Mapping[str, Experts] = MODELS | TINY,
) -> None:
    """The options that choose cells of experts, with these models and numbers of tokens by default."""
    result.add_argument("--models", nargs="+", choices=sorted(choices), default=models)
    result.add_argument("--tokens", nargs="+", type=int, default=tokens)
    result.add_argument("--routing", nargs="+", choices=("uniform", "skewed"), default=["uniform"])
    result.add_argument("--budget", type=float, default=BUDGET_S, help="seconds, after which no cell is begun")


def end_cell(session: Session, options: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Writes the rows so far, and forgets what was compiled for a cell."""
    if session.rank == 0 and options.out:
        merge_csv(Path(options.out), rows)
    torch.compiler.reset()


def texts_of(times: Mapping[str, Times], names: Sequence[str], limit_us: float) -> list[str]:
    """The times of these contestants, that of `ditron` over the limit, and the fastest other one over it."""
    us = {name: each.p50_us for name, each in times.items()}
    mine = us.get("ditron", float("nan"))
    best = min((value for name, value in us.items() if name != "ditron"), default=float("nan"))
    texts = [f"{us[name]:.1f}" if name in us else "-" for name in names]
    return [*texts, f"{mine / limit_us:.2f}", f"{best / mine:.2f}"]


def print_cells(session: Session, heads: Sequence[str], lines: Sequence[Sequence[str]], rate: float) -> None:
    """The table of a run, if it has a line. rate: bytes that a copy reads and writes in a second."""
    if session.rank == 0 and lines:
        print(f"a copy moves {rate / 1e12:.2f} TB/s; microseconds")
        print(tabulate(lines, heads, disable_numparse=True), flush=True)
