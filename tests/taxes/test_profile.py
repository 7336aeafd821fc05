"""profile_taxes on the CPU device: every site has its accounts, which add up, and nobody watches afterwards."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

import ditron_inductor
from ditron_inductor.errors import InvalidOptionValue, NoDefaultGroup
from ditron_inductor.task.policy import shared_site
from ditron_inductor.taxes.accounts import Account
from ditron_inductor.taxes.report import TaxReport
from ditron_inductor.taxes.step_trace import NAMES
from tests.ranks import RankContext, RankPools

LIMIT_S = 200.0
PARTS = ("compute_us", "bulk_synchronous_us", "locality_us", "other_us")


def _profiled(ctx: RankContext) -> tuple[TaxReport, bool]:
    """A gather, two matmuls and a scatter, and a gather that nothing fuses; whether somebody still watches."""
    import ditron_inductor.backend  # noqa: F401  (the name, in a checkout that is not installed)
    from ditron_inductor.task.watch import watch

    up, down = torch.randn(16, 8), torch.randn(8, 16)

    def layer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Nothing between them that a C++ compiler would have to be started for.
        product = (funcol.all_gather_tensor(x, 0, dist.group.WORLD) @ up) @ down
        scattered = funcol.reduce_scatter_tensor(product, "sum", 0, dist.group.WORLD)
        return scattered, funcol.all_gather_tensor(up, 0, dist.group.WORLD)

    torch._dynamo.reset()
    profiled = ditron_inductor.profile_taxes(layer, options={"ditron.strategy": "tile"}, rounds=1, trace=True)
    return profiled(torch.randn(8, 16)), watch.observer is not None


@pytest.mark.timeout(240)
def test_every_site_has_its_accounts(rank_pools: RankPools) -> None:
    (report, watched), (other, _) = rank_pools.get("cpu", 2).run(_profiled, timeout=LIMIT_S)
    assert report.csv_text() == other.csv_text() and not watched
    assert [site.record.kind for site in report.sites] == ["all_gather_matmul", "matmul_reduce_scatter"]
    for site in report.sites:
        assert site.unfused is not None and site.fused is not None and site.locality
        assert (site.unfused.strategy, site.fused.strategy) == ("library", "tile")
        assert site.unfused.calls == site.fused.calls == 1
        assert site.unfused.bulk_synchronous_us > 0 and site.unfused.locality_us > 0
        for account in (site.unfused, site.fused):
            assert sum(getattr(account, part) for part in PARTS) == pytest.approx(account.us)
            assert min(account.compute_us, account.bulk_synchronous_us, account.locality_us) >= 0
            # There are no CUDA graphs here.
            assert account.launch_us is None
    assert [record.kind for record in report.left_alone] == ["all_gather_into_tensor"]
    assert set(report.steps) == {"inductor", "unfused", "fused"}
    assert all(step.eager_us > 0 and step.graph_us is None for step in report.steps.values())
    text = report.text()
    for part in (
        "say nothing about speed",
        "all_gather(dim 0) -> matmul",
        "step, eager",
        "1 collectives were left alone",
    ):
        assert part in text
    _check_csv(report)
    _check_trace(report)


def _check_trace(report: TaxReport) -> None:
    """Every tile of both kernels is there, on both ranks, and a wait for the peer lies inside a tile of its program."""
    assert report.trace is not None and not report.trace.dropped
    # A rank's gather makes the tiles of two shards, its scatter those of two owners.
    for rank in report.trace.ranks:
        for site in report.sites:
            name = shared_site(site.record.site)
            assert site.fused is not None and site.fused.in_kernel_us is not None and site.fused.in_kernel_us > 0
            found = [event for event in rank.events if rank.site(event).startswith(f"{name} ")]
            tiles = [event for event in found if NAMES[event.kind] == "tile"]
            waits = [event for event in found if NAMES[event.kind] == "wait"]
            assert len({event.use for event in found}) == 1
            assert {event.peer for event in tiles} == {0, 1}
            assert len({(event.peer, event.detail) for event in tiles}) == len(tiles)
            assert waits
            for wait in waits:
                assert any(
                    tile.program == wait.program and tile.begin_ns <= wait.begin_ns <= wait.end_ns <= tile.end_ns
                    for tile in tiles
                )
    spans = [row for row in report.trace.json()["traceEvents"] if row["ph"] == "X"]
    assert {row["pid"] for row in spans} == {0, 1}
    assert min(row["ts"] for row in spans) == 0 and min(row["dur"] for row in spans) >= 0


def _check_csv(report: TaxReport) -> None:
    rows = list(csv.DictReader(io.StringIO(report.csv_text())))
    assert [(row["row"], row["form"]) for row in rows] == [("site", "unfused"), ("site", "fused")] * 2 + [
        ("step", form) for form in ("inductor", "unfused", "fused")
    ]
    fused: Account | None = report.sites[0].fused
    assert fused is not None and float(rows[1]["us"]) == pytest.approx(fused.us, abs=1e-3)
    assert float(rows[-1]["bulk_synchronous_us"]) == pytest.approx(
        report.total("fused", "bulk_synchronous_us"), abs=1e-3
    )


def test_what_cannot_be_profiled_is_named() -> None:
    def nothing(x: Any) -> Any:
        return x

    with pytest.raises(InvalidOptionValue, match="triton.cudagraphs"):
        ditron_inductor.profile_taxes(nothing, options={"triton.cudagraphs": True})
    with pytest.raises(NoDefaultGroup, match="init_process_group"):
        ditron_inductor.profile_taxes(nothing)(torch.ones(1))
