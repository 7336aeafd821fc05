"""``python -m ditron_inductor demo``: a small tensor-parallel Llama through Ditron, checked against eager.

Every rank process compiles, runs forward and backward, and compares outputs and gradients with eager; rank 0 prints.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ditron_inductor.task.nodes import STRATEGIES
from ditron_inductor.tools.doctor import require
from ditron_inductor.tools.processes import Rank, device_for, exit_code, run_ranks

if TYPE_CHECKING:
    import torch

    from ditron_inductor.report.explain import Report
    from ditron_inductor.tools.demo_model import Llama, LlamaConfig

FORMS = {"sp": "tensor and sequence parallel", "ar": "tensor parallel with all-reduce"}
MARK = ">> "
DELETIONS = re.compile(r";  (\w+ = )+None$")
"""The text that torch.fx writes behind the last use of values. The text of a node may contain a semicolon too."""
GRAPHS = ("all", "forward", "none")
# Largest error relative to the largest value of the tensor. fp32: sums in another order. bf16: eight bits of mantissa.
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}


@dataclass(frozen=True)
class DemoSetup:
    """The programs that the demo runs. ``forms`` are keys of ``FORMS``; ``start`` is the parent's clock."""

    strategy: str
    forms: tuple[str, ...]
    graphs: str
    start: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2, help="rank processes to start, 2 or more (default 2)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if enough")
    parser.add_argument("--strategy", choices=STRATEGIES, default="tile", help="what runs the sites (default tile)")
    parser.add_argument("--form", choices=("both", *FORMS), default="both", help="sequence parallel, all-reduce, both")
    parser.add_argument(
        "--graphs", choices=GRAPHS, default="forward", help="rewritten graphs to print (default forward)"
    )
    parser.add_argument("--limit", type=float, default=600.0, help="seconds before the demo gives up (default 600)")


def main(arguments: argparse.Namespace) -> int:
    """Runs the demo and returns 0 if every comparison held on every rank. Raises MissingDependency."""
    require("python", "torch", "triton", "tabulate", "C++ compiler", needed_for="the demo")
    device_type, problem = device_for(arguments.ranks, arguments.device)
    if problem:
        print(f"demo: {problem}", file=sys.stderr)
        return 2
    if device_type == "cpu" and arguments.strategy == "tile":
        require("numpy", "shared memory", needed_for="the demo")
    where = f"{arguments.ranks} GPUs" if device_type == "cuda" else "the CPU, kernels in Triton's interpreter"
    print(f"Ditron demo: {arguments.ranks} ranks on {where}, strategy {arguments.strategy}", flush=True)
    forms = tuple(FORMS) if arguments.form == "both" else (arguments.form,)
    setup = DemoSetup(arguments.strategy, forms, arguments.graphs, time.monotonic())
    codes = run_ranks(_run_rank, setup, world_size=arguments.ranks, device_type=device_type, limit_s=arguments.limit)
    advice = ", and `--strategy library` runs the same graph without Ditron's kernels"
    failed = exit_code("demo", codes, advice)
    if not failed:
        print("demo: every output and gradient matches eager")
    return failed


def _run_rank(rank: Rank, setup: DemoSetup) -> bool:
    """Runs one rank. Returns True if all its comparisons held."""
    from torch.distributed.device_mesh import init_device_mesh

    from ditron_inductor.tools.demo_model import LlamaConfig

    device = rank.join()
    mesh = init_device_mesh(rank.device_type, (rank.world_size,))
    heads = 2 * rank.world_size
    small = LlamaConfig(16 * heads, 1, heads, rank.world_size, 32 * heads, vocab_size=96, max_seq_len=64)
    large = LlamaConfig(128 * heads, 2, heads, rank.world_size, 448 * heads, vocab_size=1024, max_seq_len=2048)
    config = small if rank.device_type == "cpu" else large
    matches = True
    for form in setup.forms:
        matches &= _run_form(rank, setup, form, config, device, mesh)
    return matches


def _run_form(rank: Rank, setup: DemoSetup, form: str, config: LlamaConfig, device: torch.device, mesh: Any) -> bool:
    """Returns whether eager and compiled forward and backward match on this rank, for equal weights and tokens."""
    import torch

    import ditron_inductor.backend  # noqa: F401  (the name "ditron", in a checkout that is not installed)
    from ditron_inductor.options import Options
    from ditron_inductor.report.explain import build_report, without_caches
    from ditron_inductor.task.site_records import collect_sites
    from ditron_inductor.tools.demo_model import Llama, tensor_parallel

    say = _Progress(rank.rank, setup.start)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    batch, seq_len = (2, 8 * rank.world_size) if device.type == "cpu" else (2, 1024)
    say.title(f"{FORMS[form]}: {config.num_layers} layer(s), dim {config.dim}, {batch} x {seq_len} tokens, {dtype}")
    torch.manual_seed(0)
    model = tensor_parallel(Llama(config).to(device, dtype), mesh, sequence_parallel=form == "sp")
    tokens = torch.randint(config.vocab_size, (batch, seq_len), device=device)

    say.step("eager forward and backward")
    want = _step(model, model, tokens)
    say.step("compiling with Ditron and running forward and backward")
    options: dict[str, Any] = {"ditron.strategy": setup.strategy}
    parsed, _ = Options.parse(options)
    torch._dynamo.reset()
    with collect_sites() as sink, without_caches():
        got = _step(model, torch.compile(model, backend="ditron", options=options), tokens)
    report = build_report(sink.graphs, parsed)
    say.graphs(report, setup.graphs)
    say.text(str(report))
    return _compare(rank, say, want, got, report, TOLERANCE[str(dtype).removeprefix("torch.")])


def _step(model: Llama, call: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the output and all gradients of a step with loss mean(logits^2), as local parts of DTensors."""
    model.zero_grad(set_to_none=True)
    logits = call(tokens)
    logits.float().square().mean().backward()
    values = {"output": logits.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} got no gradient"
        grad: Any = parameter.grad.detach().clone()
        # full_tensor() reduces pending sums, so that values and not their split are compared.
        values[f"grad {name}"] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return values


def _compare(
    rank: Rank,
    say: _Progress,
    want: dict[str, torch.Tensor],
    got: dict[str, torch.Tensor],
    report: Report,
    tolerance: float,
) -> bool:
    errors: dict[str, float] = {}
    for name, expected in want.items():
        scale = expected.abs().max().item() or 1.0
        error = (got[name].float() - expected.float()).abs().max().item() / scale
        # Comparisons with NaN are false, so a NaN has to be counted as a failure.
        errors[name] = error if error == error else float("inf")
    worst = max(errors, key=lambda name: errors[name])
    wrong = [name for name, error in errors.items() if error > tolerance]
    # Every rank has its own share of the work; one line of any rank is enough to fail.
    for name in wrong:
        sys.stderr.write(f"[rank {rank.rank}] {name}: error {errors[name]:.2e}, allowed {tolerance:.0e}\n")
    say.step(
        f"largest error against eager, of {len(errors)} tensors: {errors[worst]:.2e} in '{worst}' "
        f"(allowed {tolerance:.0e}, relative to the largest value)"
    )
    if not report.matched:
        sys.stderr.write(f"[rank {rank.rank}] no collective was matched: the demo shows nothing\n")
    return not wrong and bool(report.matched)


class _Progress:
    """Prints the progress of rank 0, with the seconds since it began; other ranks print nothing."""

    def __init__(self, rank: int, start: float) -> None:
        self.quiet = rank != 0
        self.start = start

    def text(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)

    def title(self, text: str) -> None:
        self.text(f"\n== {text}")

    def step(self, text: str) -> None:
        self.text(f"[{time.monotonic() - self.start:6.1f} s] {text}")

    def graphs(self, report: Report, which: str) -> None:
        for graph in report.graphs:
            shown = which == "all" or (which == "forward" and not graph.is_backward)
            lines = graph_lines(graph.graph_after)
            self.text(
                f"\n-- {'backward' if graph.is_backward else 'forward'} graph, {len(lines)} lines, Task nodes marked"
            )
            self.text("\n".join(line for line in lines if shown or line.startswith(MARK)))
        self.text("")


def graph_lines(graph: str) -> list[str]:
    """Returns the statements of a readable graph, without source comments and deletions, and with Task nodes marked."""
    lines = []
    for line in graph.splitlines():
        statement = DELETIONS.sub("", line).strip()
        if statement and not statement.startswith(("#", "class ", "def ")):
            mark = MARK if "torch.ops.ditron." in statement else " " * len(MARK)
            lines.append(mark + statement.replace("torch.ops.", ""))
    return lines
