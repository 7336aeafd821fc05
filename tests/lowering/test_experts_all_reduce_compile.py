"""The launch that sums over experts and reduces, for every GPU family: waits and releases, registers, loads ahead."""

from __future__ import annotations

import re

import pytest

from ditron_inductor.lowering.config import FEW_ROWS, Config
from ditron_inductor.lowering.experts_all_reduce.expert_sum_config import EXPERT_SUMS, select_expert_sum_config
from tests.lowering.assembly import Listing, dialect_of, resources
from tests.lowering.cross_compile import FAMILIES, Case, compile_case


def config_of(rows: int, columns: int, depth: int, dtype: str = "bf16") -> Config:
    import torch

    kinds = {"bf16": torch.bfloat16, "fp32": torch.float32}
    return select_expert_sum_config(
        rows=rows, columns=columns, depth=depth, dtype=kinds[dtype], interpreted=False, num_sms=132
    )


def case_of(target: str, tokens: int, columns: int, depth: int = 768, dtype: str = "bf16", norm: bool = False) -> Case:
    config = config_of(tokens, columns, depth, dtype)
    return Case(
        "experts_one_shot", target, config, dtype, even_k=depth % config.block_k == 0, norm=norm, tokens=tokens
    )


CASES = [
    *((tokens, columns) for tokens in (1, 16) for columns in (2048, 4096, 7168)),
    *(pytest.param(tokens, 4096, marks=pytest.mark.all_cases) for tokens in (32, 64)),
]


@pytest.mark.parametrize("target", FAMILIES)
@pytest.mark.parametrize(("tokens", "columns"), CASES)
def test_waits_and_releases_are_there(target: str, tokens: int, columns: int) -> None:
    listing, dialect = Listing(compile_case(case_of(target, tokens, columns)).assembly), dialect_of(target)
    # The credits and the peers' sums, each read twice.
    assert len(listing.places(dialect.acquire)) >= 4
    releases = listing.places(dialect.release)
    assert len(releases) >= 2
    for place in releases:
        assert listing.has_barrier_before(place, dialect.barrier, dialect.store), (place, listing.lines[place])


@pytest.mark.parametrize(("tokens", "columns"), [*CASES, (64, 7168)])
def test_the_next_expert_is_loaded_while_one_is_multiplied(tokens: int, columns: int) -> None:
    """One loop has the steps of all experts: where it multiplies, loads of later steps are under way."""
    case = case_of("sm_90", tokens, columns)
    found = compile_case(case)
    (multiplying,) = [loop for loop in loops_of(found.ttgir) if "warp_group_dot " in loop or "tt.dot " in loop]
    assert multiplying.count("async_copy_global_to_local") == 2, "both operands are loaded ahead"
    (left,) = re.findall(r"async_wait .*\{num = (\d+)", multiplying)
    assert int(left) == 2 * (case.config.num_stages - 2)
    assert resources(found.assembly).spilled_bytes <= 32


def loops_of(ttgir: str) -> list[str]:
    """The bodies of the innermost loops over numbers."""
    lines, found = ttgir.splitlines(), []
    for begin, line in enumerate(lines):
        if "scf.for " in line:
            indent = len(line) - len(line.lstrip())
            end = next(i for i in range(begin + 1, len(lines)) if lines[i].startswith(" " * indent + "}"))
            found.append("\n".join(lines[begin:end]))
    return found


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_with_a_norm_and_in_fp32(target: str) -> None:
    for case in (case_of(target, 1, 4096, norm=True), case_of(target, 8, 4096, depth=200, dtype="fp32")):
        text = compile_case(case).assembly
        assert Listing(text).places(dialect_of(target).release)
        if target == "sm_90":
            assert resources(text).spilled_bytes < 100


def test_tiles_are_as_wide_as_sms_have_work() -> None:
    for columns, width in ((1024, 16), (2048, 16), (4096, 32), (7168, 64), (8192, 64)):
        found = config_of(1, columns, 768)
        assert found.block_n == width and found.block_m == min(FEW_ROWS)
        assert found.validate() == found
    assert config_of(33, 2048, 768).block_n == 32 and config_of(33, 2048, 768).block_m == 64
    assert [config_of(1, 4096, depth).block_k for depth in (768, 384, 192, 200, 7168)] == [256, 128, 64, 128, 256]
    # What is under way at once fits into the memory of an SM, for all programs that it has.
    for columns in (2048, 4096, 7168):
        for depth in (64, 200, 384, 768):
            found = config_of(64, columns, depth)
            nbytes = (found.block_n + found.block_m) * found.block_k * 2 * found.num_stages
            assert nbytes * found.programs_per_sm <= 227 * 1024, found
    assert set(EXPERT_SUMS) == {16, 32, 64}
