"""`python -m benchmarks.generation`: tokens per second of a whole model that generates with a static or paged KV cache.

The embedding, all layers and the head of a model of the zoo, with random weights, cut by DTensor's plan with
all-reduces. A step maps the last tokens to the next ones, greedily. The contestants run one after the other, each
without what Dynamo has compiled for the one before, and the logits of a step of each are first compared with eager's.
`:local` are steps as `ditron_inductor.serving` makes them, for Inductor too. `--device cpu` runs a tiny model on the
interpreter: that everything works, nothing about speed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from benchmarks import paged
from benchmarks.launch import measure_on_ranks, num_ranks
from benchmarks.models.architecture import Architecture, Decoder
from benchmarks.models.forms import cut
from benchmarks.models.zoo import MODELS, TINY
from benchmarks.ops import command
from benchmarks.records import GENERATION, head_commit, merge_csv
from benchmarks.session import Session
from benchmarks.timing import Times, synchronize
from benchmarks.tolerances import MODEL_TOLERANCES, relative_error
from ditron_inductor import serving
from ditron_inductor.tools.demo_model import rotary_table

MODULE = "benchmarks.generation"
VOCABULARY = {"cuda": 128256, "cpu": 96}
Step = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(tokens [B, 1], position [1]) -> (next tokens [B, 1], logits)."""
CONTESTANTS = ("eager", "inductor", "ditron", "inductor:local", "ditron:local")


class StaticCache(nn.Module):
    """Attention of one token of each sequence to all before it, on a rank's heads."""

    def __init__(self, arch: Architecture, batch: int, length: int, world_size: int) -> None:
        super().__init__()
        shape = (batch, arch.kv_heads // world_size, length, arch.head_dim)
        self.scale = arch.scale
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.keys.index_copy_(2, self.position, k)
        self.values.index_copy_(2, self.position, v)
        return self.attended(q, self.keys, self.values)

    def attended(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        seen = torch.arange(keys.shape[2], device=q.device) <= self.position
        mask = seen[None, None, None, :]
        return F.scaled_dot_product_attention(q, keys, values, mask, scale=self.scale, enable_gqa=True)


class PagedCache(StaticCache):
    """Attention to a cache in blocks of `page` tokens. Each sequence has those that a table names, which stand in an
    order by chance, as after other sequences have come and gone.
    """

    def __init__(self, arch: Architecture, batch: int, length: int, world_size: int, page: int) -> None:
        super().__init__(arch, batch, 1, world_size)
        columns = -(-length // page)
        shape = (batch * columns, page, arch.kv_heads // world_size, arch.head_dim)
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))
        self.register_buffer("table", torch.randperm(batch * columns, dtype=torch.int32).view(batch, columns))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for cache, new in ((self.keys, k), (self.values, v)):
            paged.append(cache, new[:, :, 0], self.table, self.position)
        return self.attended(q, *(paged.gathered(cache, self.table) for cache in (self.keys, self.values)))


class Model(nn.Module):
    """Tokens to the next tokens. The position is one buffer, which all caches share. page: 0 for static caches."""

    def __init__(
        self, arch: Architecture, layers: int, batch: int, length: int, vocabulary: int, ranks: int, page: int = 0
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, arch.hidden)
        sizes = arch, batch, length, ranks
        self.decoder = Decoder(arch, layers, lambda: PagedCache(*sizes, page) if page else StaticCache(*sizes))
        self.head = nn.Linear(arch.hidden, vocabulary, bias=False)
        cos, sin = rotary_table(length, arch.head_dim, arch.theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.decoder.layers:
            layer.self_attn.core.position.copy_(position)
        hidden = self.decoder(self.embedding(tokens), self.cos[position], self.sin[position])
        logits = self.head(hidden)
        return logits.argmax(-1), logits


def generate(step: Step, first: torch.Tensor, count: int) -> torch.Tensor:
    """Generates `count` tokens behind `first`; the logits of the last step."""
    tokens, logits, position = first, first, torch.zeros(1, dtype=torch.long, device=first.device)
    for _ in range(count):
        torch.compiler.cudagraph_mark_step_begin()
        tokens, logits = step(tokens, position)
        # A replay writes its outputs into the same memory.
        tokens = tokens.clone()
        position += 1
    return logits


def step_of(name: str, model: Model, device: torch.device) -> Step:
    """The step of a contestant. Those with local parameters change the model, and come last."""
    torch.compiler.reset()
    if name == "eager":
        return model
    backend, _, local = name.partition(":")
    if local:
        return torch.compile(serving.local_parameters(model), backend=backend, options=serving.options())
    return torch.compile(model, backend=backend, mode="reduce-overhead" if device.type == "cuda" else "default")


def rounds_of(session: Session, step: Step, first: torch.Tensor, tokens: int, rounds: int) -> Times:
    """The times of a step, in rounds of `tokens` steps, of the slowest rank in each round."""
    us = []
    for _ in range(rounds):
        synchronize(session.clock)
        begun = time.perf_counter()
        generate(step, first, tokens)
        synchronize(session.clock)
        us.append(max(session.agree(time.perf_counter() - begun)) / tokens * 1e6)
    deciles = statistics.quantiles(us, n=10)
    return Times(deciles[1], deciles[4], deciles[7], 0.0)


def measure(session: Session, options: argparse.Namespace) -> None:
    """All batch sizes, on this rank; rank 0 prints, and writes rows."""
    device, ranks = session.clock.device, session.world_size
    dtype = dtype_on(device)
    arch = MODELS[options.model] if device.type == "cuda" else MODELS[options.model].like(TINY)
    mesh, lines = init_device_mesh(device.type, (ranks,)), []
    for batch in options.batches:
        torch.manual_seed(1)
        with device:
            sizes = (options.layers or arch.depth, batch, options.tokens, VOCABULARY[device.type], ranks)
            model = Model(arch, *sizes, options.page).to(dtype).requires_grad_(False)
        cut(model.decoder, "ar", mesh)
        parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
        first = torch.arange(1, batch + 1, device=device).view(batch, 1) % VOCABULARY[device.type]
        times: dict[str, Times] = {}
        with torch.no_grad():
            wanted = generate(model, first, 1).clone()
            for name in (name for name in CONTESTANTS if name in options.contestants):
                step = step_of(name, model, device)
                for _ in range(3):
                    logits = generate(step, first, 1)
                error = relative_error(logits, wanted)
                assert error < MODEL_TOLERANCES[dtype], f"{name} differs from eager: {error:.1e}"
                times[name] = rounds_of(session, step, first, options.tokens, options.rounds)
                session.say(f"batch {batch}: {name}: {times[name].p50_us:.0f} us a step, {session.seconds():.0f} s")
        shape = f"model={options.model};layers={sizes[0]};batch={batch};tokens={options.tokens}"
        shape += f";page={options.page}" * (options.page > 0)
        record(session, options, "generate", shape, times)
        rates = [f"{batch * 1e6 / times[name].p50_us:.0f}" if name in times else "-" for name in CONTESTANTS]
        lines.append([options.model, batch, sizes[0], *rates])
    if session.rank == 0:
        where = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU device, which says nothing of speed"
        print(f"tokens per second, {options.tokens} tokens, {ranks} ranks, {where}, torch {torch.__version__}")
        print(tabulate(lines, ["model", "batch", "layers", *CONTESTANTS], "github", disable_numparse=True), flush=True)


def parser(
    module: str, text: str, models: Sequence[str], contestants: Sequence[str], tokens: str
) -> argparse.ArgumentParser:
    """What the commands that generate have in common. text: the docstring of the module. tokens: help on `--tokens`."""
    result = argparse.ArgumentParser(prog=f"python -m {module}", description=text.partition("\n")[0])
    result.add_argument("--model", choices=models, default="llama3-8b")
    result.add_argument("--layers", type=int, default=0, help="layers; all of the model by default")
    result.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    result.add_argument("--tokens", type=int, default=256, help=tokens)
    result.add_argument("--rounds", type=int, default=5, help="of each contestant, at least two")
    result.add_argument("--contestants", nargs="+", choices=contestants, default=list(contestants))
    result.add_argument("--out", default=None, help="CSV to merge the rows into, '' for none; the committed results")
    result.add_argument("--commit", default="", help="what stands in the column commit; git's HEAD by default")
    result.add_argument("--world", type=int, default=0, help="ranks; all GPUs by default")
    result.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program, not speed")
    result.add_argument("--limit", type=float, default=560.0, help="seconds, after which the ranks are ended")
    return result


def start(module: str, options: argparse.Namespace) -> int:
    """Runs `measure` of a module on ranks; the exit code."""
    options.out = command.out_of(options, GENERATION)
    world = num_ranks(module, options.world, options.device)
    return measure_on_ranks(module, options, world, options.device, options.limit) if world else 2


def record(session: Session, options: argparse.Namespace, op: str, shape: str, times: dict[str, Times]) -> None:
    """Writes a row for each contestant, from rank 0."""
    dtype = dtype_on(session.clock.device)
    rows = session.rows_of(
        times,
        bench="generation",
        op=op,
        shape=shape,
        graph=session.clock.device.type == "cuda",
        limit_us=None,
        commit=options.commit or head_commit(),
        dtype=str(dtype).removeprefix("torch."),
    )
    if session.rank == 0 and options.out:
        merge_csv(Path(options.out), rows)


def dtype_on(device: torch.device) -> torch.dtype:
    """The dtype that is measured."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    models = [name for name, one in MODELS.items() if one.theta and not one.experts]
    tokens = "of each sequence, which is the size of the cache"
    given = parser(MODULE, __doc__, models, CONTESTANTS, tokens)
    given.add_argument("--page", type=int, default=0, help="tokens of a block of paged caches; static ones by default")
    return start(MODULE, given.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
