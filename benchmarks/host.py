"""`python -m benchmarks.host`: what one fused op costs the host, stage by stage, and beside its baselines.

On GPUs: the ops at 256 x 256 x 256, eager, issued back to back. `wall` is the time per call until the last one
has run, `issue` until it was issued; medians of interleaved rounds, of the slowest rank. Without GPUs (`--device cpu`)
the compiled kernels are stand-ins that do nothing: the Python part of the path, without the driver.

Stages of `tile`: the dispatcher (an op of the same schema that does nothing), the lookup of what is kept for the call,
the outputs, the token, the slot (its begin and end), the arguments of the launch, and the driver with Triton's
launcher. `in a graph`: the same call as the code of a compiled graph makes it (`docs/host_path.md`). `by the JIT`: the
whole op when every launch goes through Triton's JIT.

Stages of `chunked`: the dispatcher, lookup and token together, then what a call no longer costs when its launches do
nothing, then its products, its copies, and its events; what is left is Python. The all-reduce of so small a product is
one kernel behind it, so there is a row for one in parts too.

Ops around attention (`benchmarks/host_attention.py`) have no stages: without GPUs a table of whole calls, by strategy.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from tabulate import tabulate

from benchmarks import host_attention
from benchmarks.host_calls import Bench, Call, fields_of_site
from ditron_inductor.task.exchange import (
    GATHERED_OPERAND,
    GATHERED_PRODUCT,
    REDUCED_PRODUCT,
    SCATTERED_PRODUCT,
    Exchange,
)
from ditron_inductor.task.nodes import KINDS, TASKS
from ditron_inductor.tools.processes import Rank, device_for, failures_text, run_ranks

OPS = (*KINDS, *host_attention.KINDS)
SIZE = 256
CALLS = 200
CHUNKED_CALLS = 40
"""In a row: less than the 1024 launches that a driver queues before the host has to wait."""
WHOLE_CALLS = 4
"""Without GPUs, where strategies of the library compute."""
LIMIT_S = 300.0
WORKSPACE_LIMIT = 1 << 28
TIMEOUT_S = 30.0
# Multicast can take a shared host's GPUs out of service; no contestant uses it, nor NVLS in NCCL.
ENVIRONMENT = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}


TILE = "microseconds of the host for each stage of `tile`"
CHUNKED = "microseconds of the host for each stage of `chunked`"
CALL = "microseconds of the host for a call"
BACK_TO_BACK = "microseconds per call, issued back to back"
TITLES = (TILE, CHUNKED, CALL, BACK_TO_BACK)


def benches(device: Any, rank: int, world_size: int) -> list[Bench]:
    """The ops, the whole product SIZE x SIZE x SIZE on each rank."""
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD
    assert group is not None
    name = group.group_name
    torch.manual_seed(rank)
    shard = torch.randn(SIZE // world_size, SIZE, device=device).bfloat16()
    a = torch.randn(SIZE, SIZE, device=device).bfloat16()
    b = torch.randn(SIZE, SIZE, device=device).bfloat16().t()

    def gathered_matmul() -> torch.Tensor:
        whole = shard.new_empty(SIZE, SIZE)
        dist.all_gather_into_tensor(whole, shard)
        return whole @ b

    def scattered_matmul() -> torch.Tensor:
        out = a.new_empty(SIZE // world_size, SIZE)
        dist.reduce_scatter_tensor(out, a @ b)
        return out

    def reduced_matmul() -> torch.Tensor:
        out = a @ b
        dist.all_reduce(out)
        return out

    def product_gathered() -> torch.Tensor:
        whole = a.new_empty(world_size * SIZE, SIZE)
        dist.all_gather_into_tensor(whole, a @ b)
        return torch.cat(whole.chunk(world_size), 1)

    fused: dict[Exchange, Call] = {}
    if device.type == "cuda":
        import torch.distributed._symmetric_memory as symm_mem

        # Async TP silently does nothing without this deprecated call.
        symm_mem.enable_symm_mem_for_group(name)
        fused[GATHERED_OPERAND] = lambda: torch.ops.symm_mem.fused_all_gather_matmul(shard, [b], 0, name)
        fused[SCATTERED_PRODUCT] = lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, name)
    has_gloo_scatter = device.type == "cuda"
    baselines: dict[Exchange, dict[str, Call]] = {
        GATHERED_OPERAND: {"library": gathered_matmul},
        SCATTERED_PRODUCT: {"library": scattered_matmul} if has_gloo_scatter else {},
        REDUCED_PRODUCT: {"library": reduced_matmul},
        GATHERED_PRODUCT: {"library": product_gathered},
    }
    tensors = {"shard": shard, "weights": [b], "a": [a], "b": [b]}
    found = []
    for node in (TASKS[kind].plain(SIZE, SIZE, SIZE, world_size)[0] for kind in KINDS):
        calls = baselines[node.exchange] | ({"async_tp": fused[node.exchange]} if node.exchange in fused else {})
        found.append(
            Bench(
                replace(node, **fields_of_site(node.kind, world_size, name, (WORKSPACE_LIMIT, TIMEOUT_S))),
                {slot: tensors[slot] for slot, _ in node.slots()},
                calls,
            )
        )
    return found


@dataclass(frozen=True)
class Timer:
    """Times calls by the least of some rounds, in microseconds of a call."""

    rounds: int

    def best_us(self, call: Call) -> float:
        """Returns the shortest time of a call that leaves nothing on the device."""
        call()
        least = float("inf")
        for _ in range(self.rounds):
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            least = min(least, (time.perf_counter() - begin) / CALLS)
        return least * 1e6

    def issue_us(self, call: Call, synchronize: Callable[[], None], calls: int = CALLS) -> float:
        """Until a call is issued, the device idle before every round."""
        least = float("inf")
        for _ in range(self.rounds):
            synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            least = min(least, (time.perf_counter() - begin) / calls)
        synchronize()
        return least * 1e6


def stages(bench: Bench, timer: Timer) -> dict[str, float]:
    """Microseconds of every stage of the op under `tile`."""
    import torch

    from ditron_inductor.lowering import register
    from ditron_inductor.lowering.host import launcher as launcher_module
    from ditron_inductor.task import schema

    arguments = bench.arguments("tile")
    operands, text, _ = arguments
    x = operands[0]
    whole = bench.op("tile")
    result = whole()
    assert isinstance(result, list)
    shapes = [tuple(out.shape) for out in result[:-1]]
    nothing = torch.library.Library("ditron_host", "FRAGMENT")
    nothing.define(bench.kind + schema.SCHEMAS[bench.kind])
    nothing.impl(bench.kind, lambda *args: result, "CompositeExplicitAutograd")
    empty_op = getattr(torch.ops.ditron_host, bench.kind).default
    _, node, found = register.lookup(bench.kind, text, operands)
    assert found is not None
    launch = found.args[1]  # type: ignore[attr-defined]
    tensors = node.split(operands)
    shared = launch.workspace.shared

    def look_up() -> None:
        _, known, _ = register.lookup(bench.kind, text, operands)
        known.split(operands)

    def slot() -> None:
        shared.begin(launch.site_text, 1, WORKSPACE_LIMIT, TIMEOUT_S, TIMEOUT_S)
        shared.end()

    def new_outputs() -> None:
        for shape in shapes:
            x.new_empty(shape)

    measured = {
        "dispatcher": timer.best_us(lambda: empty_op(*arguments)),
        "lookup": timer.best_us(look_up),
        "outputs": timer.best_us(new_outputs),
        "token": timer.best_us(lambda: schema.new_token(x)),
        # All ranks take as many slots; without a launch these stay as they were.
        "slot": timer.best_us(slot),
    }
    launched = timer.issue_us(lambda: found(*tensors), shared.synchronize)
    runs = []
    for launcher in launch.launchers.values():
        for ready in launcher.ready.values():
            runs.append((ready, ready.run))
            object.__setattr__(ready, "run", lambda *args: None)
    prepared = timer.best_us(lambda: found(*tensors))
    for ready, run in runs:
        object.__setattr__(ready, "run", run)
    measured["arguments"] = prepared - measured["outputs"] - measured["slot"]
    measured["driver"] = launched - prepared
    measured["whole op"] = timer.issue_us(whole, shared.synchronize)
    with torch.no_grad():
        measured["in a graph"] = timer.issue_us(bench.in_a_graph("tile"), shared.synchronize)
    known, launcher_module.internals = launcher_module.internals, lambda: None
    measured["by the JIT"] = timer.issue_us(whole, shared.synchronize)
    launcher_module.internals = known
    return measured


def chunked_stages(bench: Bench, timer: Timer) -> dict[str, dict[str, float]]:
    """Microseconds of every stage of the op under `chunked`, by the name of a row."""
    import torch

    from ditron_inductor.lowering import register
    from ditron_inductor.lowering.all_reduce import chunked as reduce_chunked

    operands, text, _ = bench.arguments("chunked")
    whole = bench.op("chunked")
    whole()
    _, node, found = register.lookup(bench.kind, text, operands)
    assert found is not None
    _, launch, sizes = found.args  # type: ignore[attr-defined]
    tensors = node.split(operands)
    issued = timer.issue_us(whole, launch.workspace.shared.synchronize, CHUNKED_CALLS)
    rows = {bench.kind: stages_of_call(lambda: found(*tensors), launch, sizes, timer)}
    dispatch = max(0.0, issued - rows[bench.kind]["call"])
    if bench.node.exchange == REDUCED_PRODUCT:
        a, b = operands
        parts = reduce_chunked.parts_geometry(node, launch, a, b.shape[1], b.shape[0])
        in_parts = functools.partial(reduce_chunked.reduced_sum, node, launch, parts, *tensors)
        rows[f"{bench.kind}, parts"] = stages_of_call(in_parts, launch, parts, timer)
    for row in rows.values():
        row["whole op"] = dispatch + row.pop("call")
    synchronize = launch.workspace.shared.synchronize
    with torch.no_grad():
        rows[bench.kind]["in a graph"] = timer.issue_us(bench.in_a_graph("chunked"), synchronize, CHUNKED_CALLS)
    return {name: {"dispatch": dispatch} | row for name, row in rows.items()}


def stages_of_call(call: Call, launch: Any, sizes: Any, timer: Timer) -> dict[str, float]:
    """Returns the time of a call of `chunked`, what its launches, products, copies and events take of it, and what is
    left for Python.
    """
    import torch

    from ditron_inductor.device import driver

    for _ in range(4):
        call()
    shared = launch.workspace.shared
    lane = shared.lane
    kernels = getattr(sizes, "kernels", None)
    launchers = [*launch.launchers.values(), *(kernels.launchers.values() if kernels is not None else ())]
    mark = SimpleNamespace(wait=lambda stream: None)
    # (object, attribute, what it becomes) for each stage; the next one is measured without those before it.
    changes: dict[str, list[tuple[Any, str, Any]]] = {
        "launches": [(ready, "run", lambda *args: None) for launcher in launchers for ready in launcher.ready.values()],
        "products": [(torch, "mm", lambda a, b, out: None)],
        "copies": [(driver, "host_copy", lambda *args: None)],
        "events": [],
    }
    if lane.side != 0:
        changes["copies"] = [(lane, "_copy", lambda *args: None)]
        changes["events"] = [(lane, "_record", lambda stream: mark)]
    measured = {"call": timer.issue_us(call, shared.synchronize, CHUNKED_CALLS)}
    before, undo = measured["call"], []
    for stage, replaced in changes.items():
        for owner, name, value in replaced:
            undo.append((owner, name, getattr(owner, name)))
            object.__setattr__(owner, name, value)
        after = timer.issue_us(call, shared.synchronize, CHUNKED_CALLS)
        measured[stage] = before - after
        before = after
    for owner, name, value in undo:
        object.__setattr__(owner, name, value)
    return measured | {"Python": before}


def whole_calls(bench: Bench, device: Any, timer: Timer) -> dict[str, float]:
    """Microseconds until a call is issued, by strategy."""
    from ditron_inductor.device import AgreedOptions, workspaces

    shared = workspaces.get(bench.node.group_name, device, AgreedOptions("tile", WORKSPACE_LIMIT, TIMEOUT_S)).shared
    has = bench.node.strategies
    calls = {strategy: bench.op(strategy) for strategy in host_attention.STRATEGIES if strategy in has}
    for call in calls.values():
        call()
    return {name: timer.issue_us(call, shared.synchronize, WHOLE_CALLS) for name, call in calls.items()}


def contest(bench: Bench, device: Any, rounds: int) -> dict[str, tuple[float, float]]:
    """(wall, issue) microseconds per call of every contestant, interleaved; the larger median of all ranks."""
    import torch
    import torch.distributed as dist

    contestants = {f"ditron:{name}": bench.op(name) for name in bench.node.strategies} | bench.baselines
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for call in contestants.values():
        for _ in range(10):
            call()
    for _ in range(rounds):
        for name, call in contestants.items():
            torch.cuda.synchronize()
            dist.barrier(device_ids=[device.index])
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            issued = time.perf_counter()
            torch.cuda.synchronize()
            ended = time.perf_counter()
            samples[name].append(((ended - begin) / CALLS * 1e6, (issued - begin) / CALLS * 1e6))
    medians = [[statistics.median(column) for column in zip(*taken, strict=True)] for taken in samples.values()]
    packed = torch.tensor(medians, dtype=torch.float64, device=device)
    dist.all_reduce(packed, op=dist.ReduceOp.MAX)
    return {name: (row[0], row[1]) for name, row in zip(samples, packed.tolist(), strict=True)}


def stand_in_for_kernels(device: Any) -> None:
    """Let the CPU device launch as a GPU would, with kernels that do nothing."""
    import torch.distributed as dist
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import CompiledKernel, make_backend
    from triton.runtime.jit import JITFunction

    from ditron_inductor.device import AgreedOptions, workspaces

    class Nothing(CompiledKernel):
        def __init__(self) -> None:
            self.module = None
            self.function = self.packed_metadata = None
            self.metadata = SimpleNamespace(global_scratch_size=0)
            self._run = lambda *args: None

    backend = make_backend(GPUTarget("cuda", 90, 32))

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Nothing:
        self.device_caches[None] = ({}, {}, None, backend, None)
        return Nothing()

    JITFunction.run = run
    assert dist.group.WORLD is not None
    options = AgreedOptions("tile", WORKSPACE_LIMIT, TIMEOUT_S)
    shared = workspaces.get(dist.group.WORLD.group_name, device, options).shared
    shared.capabilities = replace(
        shared.capabilities, tile_available=True, tile_reason="", arch="sm_90", num_sms=132, peer_access=True
    )
    shared.rates = SimpleNamespace(limit=lambda device, timeout_s: 1 << 20)  # type: ignore[assignment]
    shared.make_first_ring(WORKSPACE_LIMIT, TIMEOUT_S)


def main_of_rank(rank: Rank, options: argparse.Namespace) -> bool:
    """Runs the benchmark on one rank."""
    # Read when kernels are decorated: the path to be measured is that of compiled ones.
    os.environ.pop("TRITON_INTERPRET", None)
    device = rank.join()
    import torch
    import torch.distributed as dist
    import triton

    from ditron_inductor.lowering.register import register

    register()
    if device.type == "cpu":
        stand_in_for_kernels(device)
    tables: dict[str, list[dict[str, str]]] = {title: [] for title in TITLES}

    def add(title: str, names: dict[str, str], measured: dict[str, float], digits: int = 2) -> None:
        tables[title].append(names | {column: f"{us:.{digits}f}" for column, us in measured.items()})

    limits, timer = (WORKSPACE_LIMIT, TIMEOUT_S), Timer(options.rounds)
    attention = host_attention.attention_benches(device, rank.rank, rank.world_size, limits)
    for bench in [*benches(device, rank.rank, rank.world_size), *attention]:
        if bench.kind not in options.ops:
            continue
        if bench.kind in KINDS:
            if "tile" in bench.node.strategies:
                add(TILE, {"op": bench.kind}, stages(bench, timer))
            if "chunked" in bench.node.strategies:
                for name, measured in chunked_stages(bench, timer).items():
                    add(CHUNKED, {"op": name}, measured)
        elif device.type == "cpu":
            calls = whole_calls(bench, device, timer)
            add(CALL, {"op": bench.kind} | {one: "-" for one in host_attention.STRATEGIES if one not in calls}, calls)
        if device.type == "cuda":
            for name, (wall, issue) in contest(bench, device, options.rounds).items():
                of = {"op": bench.kind, "contestant": name}
                add(BACK_TO_BACK, of, {"wall": wall, "issue": issue}, digits=1)
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
    if rank.rank == 0:
        where = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU: the kernels are stand-ins"
        print(
            f"{SIZE}^3, bf16, {rank.world_size} ranks, torch {torch.__version__}, triton {triton.__version__}; {where}"
        )
        for title, rows in tables.items():
            if rows:
                print(f"\n{title}\n{tabulate(rows, headers='keys', disable_numparse=True)}")
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--rounds", type=int, default=15, help="of every time")
    options = parser.parse_args(arguments)
    device_type, problem = device_for(options.ranks, options.device)
    if options.rounds < 1:
        problem = "--rounds has to be at least 1"
    if problem:
        print(f"benchmarks.host: {problem}", file=sys.stderr)
        return 2
    os.environ.update(ENVIRONMENT)
    codes = run_ranks(main_of_rank, options, world_size=options.ranks, device_type=device_type, limit_s=LIMIT_S)
    if any(code != 0 for code in codes):
        print(f"benchmarks.host: {failures_text(codes)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
