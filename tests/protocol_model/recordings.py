"""Programs of calls that ranks run while their events are recorded: every kernel of the protocol, in small.

Every function here runs in a rank process and returns its events.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import ditron_inductor
from ditron_inductor.core.layout import POISON
from ditron_inductor.device import workspaces
from ditron_inductor.errors import DitronDiverged, DitronTimeout
from ditron_inductor.lowering.register import register
from tests.lowering import test_all_gather_attention as attention
from tests.lowering import test_all_reduce_rms_norm as norms
from tests.lowering import test_reduced_experts as experts
from tests.lowering.calls import Site, all_reduce_rms_norm
from tests.lowering.decode_problems import Decode, DecodeProblem
from tests.lowering.failures import TIMEOUT_S
from tests.lowering.problems import CHUNKED_KINDS, CUT_KINDS, FEW_ROWS, KINDS, NORM_KINDS, TILE_KINDS, Problem, Size
from tests.protocol_model.recorder import Event, recorded
from tests.rank_process import RankContext

SMALL = Size(32, 16, 24)
LARGE = Size(64, 16, 36)
"""Of which an all-reduce takes two shots."""
FULL, CAUSAL = attention.Case("full", 20, 20, heads=2), attention.Case("causal_offset", 20, 20, heads=2)
DECODES = (Decode(1, 4, 1, 32, 50, torch.bfloat16), Decode(3, 6, 2, 16, 37, page=8), Decode(2, 3, 3, 16, 33))
MIXTURE = experts.Layer(21, 3, 5, 96, added=True)
"""Of two chunks of columns."""
Step = Callable[[], Any]


def steps_of(ctx: RankContext, name: str) -> list[Step]:
    """The calls of one program."""
    return {
        "tile": lambda: problems(ctx, "tile", TILE_KINDS),
        "chunked": lambda: problems(ctx, "chunked", (*CHUNKED_KINDS, NORM_KINDS[1])),
        "two shots": lambda: two_shots(ctx),
        "norms": lambda: norms_of(ctx),
        "attention": lambda: attentions(ctx),
        "experts": lambda: experts_of(ctx),
        "experts reduced": lambda: experts_of(ctx)[:1],
        "decode": lambda: [
            DecodeProblem(ctx, case, site=Site(f"model/{place}:flash_decode", "tile"))
            for place, case in enumerate(DECODES)
        ],
        "waiting": lambda: [
            *problems(ctx, "tile", (*KINDS, FEW_ROWS)),
            attentions(ctx)[1],
            DecodeProblem(ctx, DECODES[1], site=Site("model/9:flash_decode", "tile")),
            *problems(ctx, "chunked", CUT_KINDS),
            *experts_of(ctx),
        ],
        "gather": lambda: problems(ctx, "tile", KINDS[:1]),
        "two shots large": lambda: two_shots(ctx)[:1],
        "two shots small": lambda: two_shots(ctx)[1:2],
        "in band": lambda: norms_of(ctx)[-1:],
        "pull": lambda: problems(ctx, "chunked", KINDS[1:2]),
    }[name]()


def problems(ctx: RankContext, strategy: str, kinds: tuple[str, ...], size: Size = SMALL, **of_site: Any) -> list[Step]:
    """A call of each kind."""
    return [
        Problem(ctx, kind, size, site=Site(f"model/{strategy}{place}:{kind}", strategy, **of_site))
        for place, kind in enumerate(kinds)
    ]


def two_shots(ctx: RankContext) -> list[Step]:
    """Sums whose owners push them to all: of large products, of small ones, and again by copies."""
    kind = "matmul_all_reduce"
    large = Problem(ctx, kind, LARGE, site=Site(f"model/two:{kind}"))
    small = Problem(ctx, kind, Size(6, 16, 40), site=Site(f"model/small:{kind}", "chunked"))
    pulled = Problem(ctx, kind, LARGE, site=Site(f"model/pulled:{kind}", "chunked"))
    return [large, small, pulled]


def norms_of(ctx: RankContext) -> list[Step]:
    """Rows in one shot, in two and in slices, and in band."""
    shapes = (13, 37), (67, 33), (3, 129), (4, 48)
    found: list[Step] = []
    for place, shape in enumerate(shapes):
        case = norms.Case(shape, norms.RMS, "weight")
        operands, extras = norms.make(ctx, case)
        site = Site(f"model/{place}:all_reduce_rms_norm")
        found.append(lambda case=case, a=operands, e=extras, site=site: all_reduce_rms_norm(ctx, site, a, e, case.norm))
    return found


def experts_of(ctx: RankContext) -> list[Step]:
    """The reductions behind experts, to all ranks and to the owners of the tokens."""
    found: list[Step] = []
    for kind in (experts.WHOLE, experts.SCATTERED):
        case = replace(MIXTURE, tokens=24, added=False) if kind is experts.SCATTERED else MIXTURE
        site, given = Site(f"model/{len(found)}:{kind.kind}"), experts.given_to(ctx, case)
        fields = experts.fields_of(kind, case)
        found.append(lambda kind=kind, site=site, fields=fields, given=given: site.call(ctx, kind, fields, **given))
    return found


def attentions(ctx: RankContext) -> list[Step]:
    """Whose keys all ranks see, or only later ones, pushed and pulled."""
    register()
    found: list[Step] = []
    for place, (case, strategy) in enumerate(((FULL, "tile"), (CAUSAL, "tile"), (FULL, "chunked"))):
        kind = "causal" if case is CAUSAL else "all_gather_attention"
        site = Site(f"model/{strategy}{place}:{kind}", strategy)
        operands = case.operands(ctx)
        found.append(lambda site=site, case=case, operands=operands: attention.forward(ctx, site, case, operands))
    return found


def run(ctx: RankContext, name: str, turns: int = 2) -> list[Event]:
    """A reset, and then the calls of a program, and all of them again."""
    steps = steps_of(ctx, name)
    # So that there is a group to be reset.
    steps_of(ctx, "pull")[0]()
    with recorded() as events:
        ditron_inductor.reset(dist.group.WORLD)
        for step in steps * turns:
            step()
    return events


def begin_and_grow(ctx: RankContext) -> list[Event]:
    """The first call of a group, one that needs larger slots, a reset, and the first one again."""
    group = dist.new_group(list(range(ctx.world_size))).group_name
    with recorded() as events:
        (small,) = problems(ctx, "tile", KINDS[:1], group_name=group)
        (large,) = problems(ctx, "chunked", KINDS[:1], Size(4096, 72, 8), group_name=group)
        for step in (small, large, small):
            step()
        ditron_inductor.reset(group)
        small()
    return events


def late(ctx: RankContext, strategy: str) -> list[Event]:
    """In turn each rank comes late to a call."""
    steps = problems(ctx, strategy, KINDS if strategy == "tile" else CUT_KINDS)
    for step in steps:
        step()
    with recorded() as events:
        ditron_inductor.reset(dist.group.WORLD)
        for turn, step in enumerate(steps * 2):
            if turn % ctx.world_size == ctx.rank:
                time.sleep(0.05)
            step()
    return events


def replay(ctx: RankContext, name: str) -> list[Event]:
    """Calls that all take the same slot, as those of a replayed graph, and in turn each rank comes late: then the
    credits are missing when the others begin.
    """
    steps = steps_of(ctx, name)
    for step in steps:
        step()
    (shared,) = workspaces.of_group(dist.distributed_c10d._resolve_process_group(ctx.group_name))
    with recorded() as events:
        ditron_inductor.reset(dist.group.WORLD)
        for turn, step in enumerate(steps * 3):
            shared.calls = 0
            if turn % ctx.world_size == ctx.rank:
                time.sleep(0.05)
            step()
    return events


def poison_and_reset(ctx: RankContext) -> list[Event]:
    """Calls on a workspace that a kernel has poisoned, before the host knows of it; and after the reset."""
    steps = problems(ctx, "tile", KINDS)
    for step in steps:
        step()
    (shared,) = workspaces.of_group(dist.distributed_c10d._resolve_process_group(ctx.group_name))
    with recorded() as events:
        ditron_inductor.reset(dist.group.WORLD)
        steps[0]()
        dist.barrier()
        shared.generations[-1].ctl[POISON.value] = 1
        for step in steps:
            assert all(bool(out.isnan().all()) for out in step())
        # What tiles of a failed launch have counted.
        shared.generations[-1].counters.fill_(1)
        ditron_inductor.reset(dist.group.WORLD)
        for step in steps:
            step()
    return events


def fail_and_reset(ctx: RankContext, strategy: str) -> list[Event]:
    """The last rank raises in front of its second call, the others wait in vain; then all reset and go on."""
    first, second = problems(ctx, strategy, KINDS[:2], timeout_s=TIMEOUT_S)
    for step in (first, second):
        step()
    with recorded() as events:
        ditron_inductor.reset(dist.group.WORLD)
        first()
        if ctx.rank < ctx.world_size - 1:
            try:
                first()
                raise AssertionError("a rank did not come, and nobody raised")
            except DitronTimeout:
                pass
        ditron_inductor.reset(dist.group.WORLD)
        for step in (first, second, first):
            step()
    return events


def diverge_and_reset(ctx: RankContext) -> list[Event]:
    """Rank 0 runs another site than the others; then all reset and run the same."""
    steps = problems(ctx, "tile", (KINDS[0],) * 2, timeout_s=TIMEOUT_S)
    for step in steps:
        step()
    with recorded() as events:
        ditron_inductor.reset(dist.group.WORLD)
        for step in steps:
            step()
        try:
            steps[ctx.rank == 0]()
            raise AssertionError("two sites met, and nobody raised")
        except (DitronDiverged, DitronTimeout):
            # One may give up before the other one has come.
            pass
        ditron_inductor.reset(dist.group.WORLD)
        for step in steps:
            step()
    return events


def in_two_groups(ctx: RankContext) -> list[Event]:
    """Ranks 0 and 1 are a group, and so are 1 and 2."""
    groups = [dist.new_group([first, first + 1]) for first in range(2)]
    mine = [group for first, group in enumerate(groups) if first <= ctx.rank <= first + 1]
    with recorded() as events:
        steps = [
            problems(ctx, strategy, KINDS[:2], group_name=group.group_name, world_size=2)
            for group, strategy in zip(mine, ("tile", "chunked")[ctx.rank == 2 :], strict=False)
        ]
        for turn in range(4):
            for of_group in steps:
                of_group[turn % 2]()
    return events
