"""Programs whose ranks differ beside their collectives, inside a rank: through Ditron, against eager.

Each function is `program(rank, x, w, b)` for x [M, K], w [K, N] and b [N] of this rank, in the default group. All are
legal: every rank runs the same collectives in the same order.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives

Program = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], Any]


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    return collectives.all_reduce(x, "sum", dist.group.WORLD)


def all_gather(x: torch.Tensor) -> torch.Tensor:
    return collectives.all_gather_tensor(x, 0, dist.group.WORLD)


def reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    return collectives.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD)


def gather_sequences(x: torch.Tensor) -> torch.Tensor:
    """Gathers along dimension 1. Torch's function for it breaks the graph in torch 2.11."""
    return torch.cat(all_gather(x).chunk(dist.get_world_size()), 1)


def reduce_sequences(x: torch.Tensor) -> torch.Tensor:
    return collectives.reduce_scatter_tensor(x, "sum", 1, dist.group.WORLD)


def bias_before(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return all_reduce(x @ w + b if rank == 0 else x @ w)


def residual_behind(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = all_reduce(x @ w)
    return y + b if rank == 0 else y


def epilogue_behind(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = all_gather(x) @ w
    return torch.nn.functional.silu(y) if rank == 0 else y


def another_weight(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    full = all_gather(x)
    return (full @ w, full @ (w * 2)) if rank == 0 else full @ w


def statistic_of_gathered(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    full = all_gather(x)
    return (full @ w, full.abs().max()) if rank == 0 else full @ w


def statistic_of_product(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    product = x @ w
    y = all_reduce(product)
    return (y, product.abs().max()) if rank == 0 else y


def nothing_to_multiply(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return all_reduce(x.new_zeros(x.shape[0], w.shape[1]) if rank == 1 else x @ w)


def norm_on_one(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = all_reduce(x @ w) + b
    return torch.nn.functional.rms_norm(y, (y.shape[-1],)) if rank == 0 else y


def graph_break(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = all_reduce(x @ w)
    if rank == 0:
        torch._dynamo.graph_break()
    return reduce_scatter(torch.relu(y) @ w.t())


@torch._dynamo.disable
def _eagerly(x: torch.Tensor) -> torch.Tensor:
    return all_reduce(x) + 0


def eager_region(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = _eagerly(x @ w) if rank == 1 else all_reduce(x @ w)
    z = all_reduce(torch.relu(y) @ w.t())
    return reduce_scatter(z @ w)


def reader_between_sums(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    first = all_reduce(x @ w)
    second = all_reduce((x + 1) @ w)
    total = first + second
    return (total, first.sum()) if rank == 0 else total


def reader_of_region(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    y = all_reduce(x @ w) + b
    z = torch.nn.functional.rms_norm(y, (y.shape[-1],))
    out = all_reduce(torch.relu(z @ w.t()) @ w) + y
    return (out, z.abs().max()) if rank == 0 else out


def late_statistic(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, call: int = 0) -> Any:
    product = x @ w
    y = all_reduce(product)
    return (y, product.abs().max()) if rank == 0 and call == 2 else y


def nothing_this_time(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, call: int = 0) -> torch.Tensor:
    return all_reduce(x.new_zeros(x.shape[0], w.shape[1]) if rank == 1 and call == 1 else x @ w)


def nothing_to_scatter(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, call: int = 0) -> torch.Tensor:
    return reduce_scatter(x.new_zeros(x.shape[0], w.shape[1]) if rank == 1 and call == 1 else x @ w)


def gathered_not_multiplied(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, call: int = 0) -> Any:
    full = all_gather(x)
    return full.abs().max() if rank == 1 and call == 1 else full @ w


def norm_this_time(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, call: int = 0) -> torch.Tensor:
    y = all_reduce(x @ w) + b
    return torch.nn.functional.rms_norm(y, (y.shape[-1],)) if rank == 0 and call == 1 else y


def no_norm_this_time(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, call: int = 0) -> torch.Tensor:
    y = all_reduce(x @ w) + b
    return y if rank == 0 and call == 1 else torch.nn.functional.rms_norm(y, (y.shape[-1],))


def _half_as_many_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """As many elements as x @ w has."""
    return x[: x.shape[0] // 2] @ torch.cat([w, w], 1)


def other_columns_this_time(
    rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, call: int = 0
) -> torch.Tensor:
    return all_reduce(_half_as_many_rows(x, w) if rank == 1 and call == 1 else x @ w).reshape(-1)


def other_columns_not_normed_this_time(
    rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, call: int = 0
) -> torch.Tensor:
    others = rank == 1 and call == 1
    y = all_reduce(_half_as_many_rows(x, w) if others else x @ w)
    return y if others else torch.nn.functional.rms_norm(y + b, (y.shape[-1],))


def other_columns_scattered_this_time(
    rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, call: int = 0
) -> torch.Tensor:
    return reduce_scatter(_half_as_many_rows(x, w) if rank == 1 and call == 1 else x @ w).reshape(-1)


def other_columns_gathered_this_time(
    rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, call: int = 0
) -> torch.Tensor:
    columns = x.shape[1] // 2 if rank == 1 and call == 1 else x.shape[1]
    return all_gather(x.reshape(-1, columns)) @ w[:columns]


def other_sequences_this_time(
    rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, call: int = 0
) -> torch.Tensor:
    """Of as many tokens, on one rank."""
    rows = x.view(4 if rank == 1 and call == 1 else 2, -1, x.shape[1])
    return reduce_sequences(torch.relu(gather_sequences(rows) @ w) @ w.t())


def all_have_other_columns_this_time(
    rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, call: int = 0
) -> torch.Tensor:
    return all_reduce(_half_as_many_rows(x, w) if call == 1 else x @ w).reshape(-1)


def slots_not_normed_this_time(
    rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, call: int = 0
) -> torch.Tensor:
    """The others have a sum of slots in the launch that reduces it."""
    y = all_reduce(((x @ w) * x[:, :1]).view(-1, 2, b.shape[0]).sum(1)) + b
    return y if rank == 1 and call == 1 else torch.nn.functional.rms_norm(y, (y.shape[-1],))


def tokens_of_one_rank(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, call: int = 0) -> torch.Tensor:
    tokens = x.shape[0] - (call if rank == 1 else 0)
    return all_reduce(x[:tokens].t() @ x[:tokens])


def two_weights_contracted(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return all_reduce(x @ w if rank == 0 else x[:, : x.shape[1] // 2] @ w[: x.shape[1] // 2] + x @ w)


def sizes_of_one_rank(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, call: int = 0) -> torch.Tensor:
    """Rank 0 has a symbol for the rows, and compiles once. Rank 1 compiles for each number of rows."""
    return all_reduce(x[: 4 + call] @ w)


def other_columns(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As many elements on each rank, in rows of other lengths."""
    return all_reduce(x @ w if rank == 0 else x[: x.shape[0] // 2] @ torch.cat([w, w], 1)).reshape(-1)


def logs_where_columns_differ(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, call: int = 0) -> Any:
    """In the first call ranks have rows of other lengths, and in the second one they are alike. In the third one they
    have those of the first, and rank 0 returns what it reduces.
    """
    times = 4 if call == 1 else rank + 1
    product = x[: x.shape[0] // times] @ torch.cat([w] * times, 1)
    y = all_reduce(product).reshape(-1)
    return (y, product.abs().max()) if rank == 0 and call == 2 else y


def gathered_in_other_columns(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return all_gather(x) @ w if rank == 0 else all_gather(x.reshape(-1, x.shape[1] // 2)) @ w[: x.shape[1] // 2]


def scattered_in_other_columns(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return reduce_scatter(x @ w if rank == 0 else x[: x.shape[0] // 2] @ torch.cat([w, w], 1)).reshape(-1)


def _scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return all_reduce(x @ w * 2) * 1.0


def _added(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return all_reduce(x @ w) + 1


def other_branch(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What runs is chosen inside the graph, by each rank for itself."""
    if not torch.compiler.is_compiling():
        return _added(x, w) if rank == 0 else _scaled(x, w)
    result: torch.Tensor = torch.cond(torch.full((), rank, device=x.device) == 0, _added, _scaled, (x, w))
    return result


def _of_sequences(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of two sequences, gathered, multiplied twice and scattered; also the gathered ones."""
    whole = gather_sequences(x.view(2, -1, x.shape[1]))
    return reduce_sequences(torch.relu(whole @ w) @ w.t()), whole


def statistic_of_sequences(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    """Rank 0 needs the tokens in their order."""
    out, whole = _of_sequences(x, w)
    return (out, whole.norm(dim=(1, 2))) if rank == 0 else out


def statistic_of_sequences_this_time(
    rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, call: int = 0
) -> Any:
    out, whole = _of_sequences(x, w)
    return (out, whole.norm(dim=(1, 2))) if rank == 0 and call == 1 else out


def other_sequences(rank: int, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, call: int = 0) -> Any:
    """As many tokens on all ranks, but of more sequences."""
    rows = torch.nn.functional.rms_norm(x.view(4 if call == 1 else 2, -1, x.shape[1]), (x.shape[1],))
    return reduce_sequences(torch.relu(gather_sequences(rows) @ w) @ w.t())



def _by_name(*programs: Program) -> dict[str, Program]:
    return {program.__name__: program for program in programs}


PROGRAMS = _by_name(
    other_sequences,
    logs_where_columns_differ,
    bias_before,
    residual_behind,
    epilogue_behind,
    another_weight,
    statistic_of_gathered,
    statistic_of_product,
    statistic_of_sequences,
    nothing_to_multiply,
    norm_on_one,
    graph_break,
    eager_region,
    reader_between_sums,
    reader_of_region,
    two_weights_contracted,
    tokens_of_one_rank,
    other_columns,
    gathered_in_other_columns,
    scattered_in_other_columns,
    sizes_of_one_rank,
    other_branch,
)
LATE = _by_name(
    late_statistic,
    nothing_this_time,
    nothing_to_scatter,
    gathered_not_multiplied,
    norm_this_time,
    no_norm_this_time,
    slots_not_normed_this_time,
    statistic_of_sequences_this_time,
    other_columns_this_time,
)
"""Programs whose ranks begin alike, and differ in one later call."""
RESHAPED = _by_name(
    other_columns_not_normed_this_time,
    other_columns_scattered_this_time,
    other_columns_gathered_this_time,
    other_sequences_this_time,
    all_have_other_columns_this_time,
)
"""More of these, in which as many elements have another shape then."""


def check(ctx: Any, name: str, options: dict[str, Any], calls: int = 3, late_s: float = 0.0) -> dict[str, int]:
    """Run a program `calls` times by Ditron and eagerly; returns how often each strategy runs a site. late_s: seconds
    for which rank 1 stops before its second call.
    """
    from torch._dynamo.utils import counters

    from ditron_inductor.task.plan import decisions

    torch._dynamo.reset()
    counters.clear()
    rank = dist.get_rank()
    program: Any = {**PROGRAMS, **LATE, **RESHAPED}[name]
    by_call = "call" in inspect.signature(program).parameters
    # True: sizes are symbols. False: they are numbers, and each new one is compiled for.
    dynamic = {sizes_of_one_rank: rank == 0, other_sequences: False}.get(program)
    compiled = torch.compile(program, backend="ditron", options=options, dynamic=dynamic)
    generator = torch.Generator().manual_seed(rank)
    decisions._last.clear()
    rows = 4 * dist.get_world_size()
    for call in range(calls):
        shapes = (rows, 16), (16, 8), (8,)
        x, w, b = (torch.randn(*shape, generator=generator).to(ctx.device) for shape in shapes)
        arguments = (rank, x, w, b, call) if by_call else (rank, x, w, b)
        expected = program(*arguments)
        if call == 1 and rank == 1:
            time.sleep(late_s)
        found = compiled(*arguments)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    strategies: dict[str, int] = {}
    for _, choice in decisions._last.values():
        strategies[choice.strategy] = strategies.get(choice.strategy, 0) + 1
    return strategies
