"""The kernel of sums and norm has the bits of the reference, where these do not depend on the order of any sum."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from ditron_inductor.lowering.norms.add_norm import make_add_norm
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import EXTRAS, AllReduceRmsNorm, Norm, Policy
from tests.rank_process import RankContext
from tests.ranks import RankPools

ROWS = 200
COLUMNS = 2
"""A sum of two squares is the same in either order."""
NORMS = (Norm("rms", 1e-6, round_first=True), Norm("rms", 1e-6, plus_one=True), Norm("layer", 1e-5))
SCALES = ((1.0, ()), (0.22, ()), (1.0, ("scale",)))
SAVED = ("scaled", "other")


def nodes() -> list[AllReduceRmsNorm]:
    """Every norm, rounded and not, behind every scale, with a norm in front and without."""
    found = []
    for norm, unrounded, (factor, scale), post in itertools.product(NORMS, (False, True), SCALES, (None, NORMS[1])):
        extras = ("bias", *("post_weight",) * (post is not None), "residual", "weight", "other_weight", *scale)
        norm = replace(norm, unrounded=unrounded)
        found.append(AllReduceRmsNorm("sum", norm, extras, 2, "0", "r/0", Policy(), post, SAVED, factor=factor))
    return found


def _check(ctx: RankContext) -> set[bool]:
    generator = torch.Generator().manual_seed(0)
    differs = set()
    for node, dtype in itertools.product(nodes(), (torch.float16, torch.float32)):
        node.verify()

        def drawn(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        shapes = {name: (ROWS, COLUMNS) if name == "residual" else (COLUMNS,) for name in node.extras}
        given = tuple(drawn(*shapes[name]) if name in shapes else None for name in EXTRAS)
        rows = drawn(ROWS, COLUMNS)
        of_rows = rows, given, node.norm, node.post, node.saved, node.factor
        wanted = reference.add_norm(*of_rows)
        got = make_add_norm(node, [ROWS, COLUMNS], ctx.device)(rows.clone(), given)
        for name, one, other in zip(node.returned, got, wanted, strict=True):
            assert torch.equal(one, other), f"{name} of {node.text()} in {dtype}"
        # A layer norm of two numbers is 1 and -1, or nearly so.
        if node.norm.unrounded and node.norm.form == "rms":
            otherwise = reference.add_norm(rows, given, replace(node.norm, unrounded=False), *of_rows[3:])
            differs.add(torch.equal(otherwise[0], wanted[0]) is (dtype == torch.float32))
    return differs


def test_the_norm_alone_has_the_bits_of_the_reference(rank_pools: RankPools) -> None:
    """It matters in 16 bits whether the sum is rounded before it is normalised, and only there."""
    assert rank_pools.get("cpu", 2).run(_check, timeout=100) == [{True}, {True}]
