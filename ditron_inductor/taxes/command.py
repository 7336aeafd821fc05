"""``python -m ditron_inductor taxes MODEL``: the tax report on layers of a model with random weights.

    python -m ditron_inductor taxes llama-8b --layers 4 --csv taxes.csv --png taxes.png
    python -m ditron_inductor taxes llama-tiny --device cpu         # that it works; times on the CPU mean nothing

One process per GPU. Nothing here imports torch before the command runs.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditron_inductor.errors import DitronError, MissingDependency
from ditron_inductor.task.nodes import STRATEGIES
from ditron_inductor.tools.doctor import require
from ditron_inductor.tools.processes import Rank, device_for, exit_code, run_ranks

if TYPE_CHECKING:
    import torch

    from ditron_inductor.tools.demo_model import Llama, LlamaConfig

TINY, LLAMA_8B, LLAMA_70B = "llama-tiny", "llama-8b", "llama-70b"
LAYERS = {TINY: 1, LLAMA_8B: 4, LLAMA_70B: 2}
"""The models, and how many of their layers run by default."""
PHASES = ("prefill", "decode", "training")
FORMS = {"sp": "tensor and sequence parallel", "ar": "tensor parallel with all-reduce"}
TOKENS = {"prefill": 4096, "decode": 1, "training": 4096}
TINY_TOKENS = 16
NEEDED_FOR = "the tax report"


@dataclass(frozen=True)
class TaxRequest:
    """The model that the ranks run, and the files that rank 0 writes, none for "". rounds: 0 for the default."""

    model: str
    layers: int
    phase: str
    form: str
    batch: int
    tokens: int
    strategy: str
    rounds: int
    graphs: bool
    csv: str
    png: str
    trace: str = ""
    timeline: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to run")
    what.add_argument("model", choices=LAYERS, help="layers of a Llama, hidden states in and out, random weights")
    what.add_argument("--layers", type=int, default=0, help="a few by default")
    what.add_argument("--phase", choices=PHASES, default="prefill", help="forward (default), one token, or training")
    what.add_argument("--form", choices=FORMS, default="", help="sequence parallel (default), or all-reduce (decode)")
    what.add_argument("--batch", type=int, default=2, help="sequences (default 2)")
    what.add_argument("--tokens", type=int, default=0, help="of each sequence (default 4096, decode 1, tiny 16)")
    what.add_argument("--strategy", choices=STRATEGIES, default="", help="of the fused sites (auto; on the CPU tile)")
    how = parser.add_argument_group("how")
    how.add_argument("--ranks", type=int, default=0, help="rank processes to start; one per GPU by default")
    how.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="cpu tries the command only")
    how.add_argument("--rounds", type=int, default=0, help="samples of each time")
    how.add_argument("--no-graphs", action="store_true", help="no CUDA graphs, and so no launch tax")
    how.add_argument("--limit", type=float, default=1200.0, help="seconds before it gives up (default 1200)")
    out = parser.add_argument_group("what to write, beside the table on stdout")
    out.add_argument("--csv", default="", metavar="FILE", help="the same as CSV")
    out.add_argument("--trace", default="", metavar="FILE", help="JSON for Perfetto: tiles and waits of every SM")
    out.add_argument("--timeline", default="", metavar="FILE", help="JSON for Perfetto: the kernels of CUDA graphs")
    out.add_argument("--png", default="", metavar="FILE", help="stacked bars; needs matplotlib")


def main(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit code. Raises MissingDependency."""
    require("python", "torch", "triton", "tabulate", "C++ compiler", needed_for=NEEDED_FOR)
    import torch

    ranks = arguments.ranks or max(2, torch.cuda.device_count())
    device_type, problem = device_for(ranks, arguments.device)
    problem = problem or problem_of(arguments, ranks, device_type)
    if problem:
        print(f"taxes: {problem}", file=sys.stderr)
        return 2
    if device_type == "cpu":
        require("numpy", "shared memory", needed_for=NEEDED_FOR)
    if arguments.png:
        from ditron_inductor.taxes.picture import pyplot

        # A missing package is found before anything is measured.
        pyplot()
    request = request_of(arguments, device_type)
    codes = run_ranks(rank_main, request, world_size=ranks, device_type=device_type, limit_s=arguments.limit)
    return exit_code("taxes", codes)


def request_of(arguments: argparse.Namespace, device_type: str) -> TaxRequest:
    """Returns the command line in the form in which the ranks get it."""
    decode = arguments.phase == "decode"
    tokens = TINY_TOKENS if arguments.model == TINY and not decode else TOKENS[arguments.phase]
    return TaxRequest(
        model=arguments.model,
        layers=arguments.layers or LAYERS[arguments.model],
        phase=arguments.phase,
        form=arguments.form or ("ar" if decode else "sp"),
        batch=arguments.batch,
        tokens=arguments.tokens or tokens,
        # On the CPU `auto` fuses nothing.
        strategy=arguments.strategy or ("auto" if device_type == "cuda" else "tile"),
        rounds=arguments.rounds,
        graphs=not arguments.no_graphs,
        csv=arguments.csv and str(Path(arguments.csv).resolve()),
        png=arguments.png and str(Path(arguments.png).resolve()),
        trace=arguments.trace and str(Path(arguments.trace).resolve()),
        timeline=arguments.timeline and str(Path(arguments.timeline).resolve()),
    )


def problem_of(arguments: argparse.Namespace, ranks: int, device_type: str) -> str:
    """Returns what is wrong with the command line; empty if nothing is."""
    request = request_of(arguments, device_type)
    if device_type == "cpu" and request.model != TINY:
        return f"the interpreter is too slow for {request.model}; with --device cpu the model is {TINY}"
    if min(request.layers, request.batch, request.tokens, request.rounds + 1) < 1:
        return "--layers, --batch, --tokens and --rounds have to be at least 1"
    if request.form == "sp" and request.tokens % ranks:
        return f"--tokens {request.tokens} does not divide over {ranks} ranks, as --form sp needs; use --form ar"
    heads = 2 * ranks if request.model == TINY else 8
    if heads % ranks:
        return f"{request.model} has {heads} heads of keys, which do not divide over {ranks} ranks"
    for path in (request.csv, request.png, request.trace, request.timeline):
        if path and not Path(path).parent.is_dir():
            return f"there is no folder {Path(path).parent} to write into"
    return ""


def rank_main(rank: Rank, request: TaxRequest) -> bool:
    """Runs one rank of the command; rank 0 prints and writes."""
    import torch

    from ditron_inductor.taxes import profile_taxes

    device = rank.join()
    model = _model(rank, request, device)
    x = torch.randn(request.batch, request.tokens, model.config.dim, generator=torch.Generator().manual_seed(2))
    x = x.to(device, next(model.parameters()).dtype)
    if request.form == "sp":
        x = x.chunk(rank.world_size, dim=1)[rank.rank].contiguous()
    options: dict[str, Any] = {"ditron.strategy": request.strategy}
    training = request.phase == "training"
    profiled = profile_taxes(
        model,
        options=options,
        backward=training,
        graphs=request.graphs,
        rounds=request.rounds or None,
        trace=bool(request.trace),
    )
    with torch.set_grad_enabled(training):
        report = profiled(x, request.tokens)
    if rank.rank == 0:
        print(f"{request.model}, {request.layers} layer(s), {FORMS[request.form]}, {request.phase}: "
              f"{request.batch} x {request.tokens} tokens, {x.dtype}")  # fmt: skip
        print(report)
        if request.csv:
            report.save_csv(request.csv)
            print(f"taxes: written to {request.csv}")
        if request.trace and report.trace is not None:
            report.save_trace(request.trace)
            print(f"taxes: trace of one step in {request.trace}, for https://ui.perfetto.dev")
        if request.timeline and report.captured:
            report.save_timeline(request.timeline)
            print(f"taxes: kernels of the CUDA graphs in {request.timeline}, for https://ui.perfetto.dev")
        if request.png:
            report.save_png(request.png)
            print(f"taxes: drawn in {request.png}")
    return True


def _model(rank: Rank, request: TaxRequest, device: torch.device) -> Llama:
    """Returns a model with equal weights on all ranks, which is then sharded over the ranks."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from ditron_inductor.tools.demo_model import Llama, tensor_parallel

    torch.manual_seed(0)
    with device:
        model = Llama(_config(request, rank.world_size)).to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    mesh = init_device_mesh(rank.device_type, (rank.world_size,))
    return tensor_parallel(model, mesh, sequence_parallel=request.form == "sp")


def _config(request: TaxRequest, ranks: int) -> LlamaConfig:
    from ditron_inductor.tools.demo_model import LlamaConfig

    if request.model == TINY:
        heads = 2 * ranks
        return LlamaConfig(16 * heads, request.layers, heads, heads, 32 * heads, max_seq_len=max(64, request.tokens))
    sizes = LlamaConfig.llama_8b if request.model == LLAMA_8B else LlamaConfig.llama_70b
    return sizes(request.layers, 0, max(8192, request.tokens))


def run(arguments: argparse.Namespace) -> int:
    try:
        return main(arguments)
    except (MissingDependency, DitronError) as error:
        print(f"taxes: {error}", file=sys.stderr)
        return 2
