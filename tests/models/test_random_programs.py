"""Random programs, strategy `tile` on ranks of the CPU device: compiled and eager mode give, and write, the same.

The programs are those of the tests of passes, by seeds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.tolerances import relative_error
from ditron_inductor.report.explain import without_caches
from ditron_inductor.task.site_records import collect_sites
from tests.cases import rare
from tests.passes.make_programs import make_program, seeded
from tests.passes.programs import Program
from tests.ranks import RankContext, RankPools

TILE: dict[str, Any] = {"ditron.strategy": "tile"}
GROUP_SIZES = {2: {"world": 2, "again": 2}, 4: {"world": 4, "row": 2, "column": 2}}
# Roundings that a compiled program does without may add up.
TOLERANCES = {torch.float32: 2.0e-5, torch.bfloat16: 5.0e-2}


def groups_of(ctx: RankContext) -> dict[str, tuple[str, int]]:
    """Name and size of the groups that this rank is in, made once: twice all ranks, or rows and columns of a mesh."""
    if "random_programs" not in ctx.shared:
        if ctx.world_size == 2:
            made = {"again": dist.new_group([0, 1])}
        else:
            rows, columns = ([dist.new_group(ranks) for ranks in one] for one in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
            made = {"row": rows[ctx.rank // 2], "column": columns[ctx.rank % 2]}
        names = {name: str(group.group_name) for name, group in made.items()} | {"world": ctx.group_name}
        sizes = GROUP_SIZES[ctx.world_size]
        ctx.shared["random_programs"] = {name: (names[name], size) for name, size in sizes.items()}
    return ctx.shared["random_programs"]


def compare(ctx: RankContext, program: Program) -> list[str]:
    """AssertionError unless both modes agree, twice; returns the kinds of the fused sites."""
    groups = groups_of(ctx)
    torch._dynamo.reset()
    tolerance = max(TOLERANCES[dtype] for dtype in program.dtypes)
    with torch.no_grad(), without_caches(), collect_sites() as sink:
        compiled = torch.compile(program.function(groups), backend="ditron", options=TILE, dynamic=False)
        for call in range(2):
            ours, eager = (program.arguments(seed=10 * call + ctx.rank) for _ in range(2))
            got, wanted = compiled(*ours), program.function(groups, eager=True)(*eager)
            for index, (one, other) in enumerate(zip([*got, *ours], [*wanted, *eager], strict=True)):
                assert one.shape == other.shape and one.dtype == other.dtype
                error = relative_error(one, other)
                assert error < tolerance, f"value {index} of call {call}: relative error {error}\n{program}"
    return [site.kind for graph in sink.graphs for site in graph.sites if site.matched]


# World size and seed of programs with a site that is fused; together they have all kinds.
FUSED = [(2, 5), (2, 9), (2, 16), (4, 7), *rare((2, 7), (2, 15), (4, 18))]


@pytest.mark.timeout(100)
@pytest.mark.parametrize(("world_size", "seed"), FUSED)
def test_program(rank_pools: RankPools, world_size: int, seed: int) -> None:
    program = make_program(seeded(seed), GROUP_SIZES[world_size])
    # Four ranks serve few tests of whole programs: they are those that are forked for meshes.
    pool = rank_pools.get("cpu", world_size, label="mesh" if world_size == 4 else "")
    for kinds in pool.run(compare, program, timeout=90):
        assert kinds, f"nothing was fused:\n{program}"
