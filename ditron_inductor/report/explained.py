"""One collective of a report: what ran there and why, and the cells of its row. Equal ones share a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ditron_inductor.task.site_records import SiteRecord

if TYPE_CHECKING:
    from ditron_inductor.report.measure import Timings
    from ditron_inductor.task.plan import PlanRequest

NOTHING = "-"


@dataclass(frozen=True)
class ExplainedSite:
    """One collective of one compiled graph.

    direction: ``forward``, ``backward``, or ``graph`` if the compiler does not say. record: what the passes saw and
    did, see ``SiteRecord``. strategy: the strategy that runs here; ``-`` for a collective that was left alone, or a
    site that has not run. predicted_us: the cost model's microseconds for one call by this strategy, None if it has
    none. reason: why this strategy was chosen, or why the collective was left alone. source: what decided, see
    ``task.plan.Choice``; empty for a collective that was left alone. predictions: the cost model's microseconds by
    strategy. measured: the measured microseconds by strategy, the maximum over ranks; None if nothing was timed.
    request: the question that the plan was asked, None if nothing ran. tried_us: the microseconds by strategy that a
    trial decided by last; empty without a trial.
    """

    direction: str
    record: SiteRecord
    strategy: str
    predicted_us: float | None
    reason: str
    source: str = ""
    predictions: Mapping[str, float] = field(default_factory=dict)
    measured: Timings | None = None
    request: PlanRequest | None = None
    tried_us: Mapping[str, float] = field(default_factory=dict)

    @property
    def fused(self) -> bool:
        """Whether it runs fused, and not by the library."""
        return self.strategy not in (NOTHING, "library")

    def row(self) -> dict[str, str]:
        """What a report shows of this site, by column. Times are in microseconds."""
        record = self.record
        return {
            "graph": self.direction,
            "collective": record.kind,
            "pattern": record.pattern,
            "operands": " ".join(record.shapes),
            "dtype": record.dtype.removeprefix("torch."),
            "group": record.group_name if record.world_size is None else f"{record.group_name} (x{record.world_size})",
            "moved": NOTHING if record.bytes_moved is None else bytes_text(record.bytes_moved),
            "runs by": self.strategy if record.matched else "left alone",
            "decided by": self.source or NOTHING,
            "predicted": times_text(self.predictions),
            "measured": times_text(self.tried_us if self.measured is None else self.measured.us),
            "why": self.reason,
        }


def equal_sites(sites: Sequence[ExplainedSite]) -> list[list[ExplainedSite]]:
    """Returns the sites in the order of their first ones, those together of which a report shows the same."""
    found: dict[Any, list[ExplainedSite]] = {}
    for site in sites:
        outside = tuple((one.what, one.code, one.node.op) for one in site.record.outside)
        found.setdefault((*site.row().values(), site.record.reason_code, outside), []).append(site)
    return list(found.values())


def times_text(times: Mapping[str, float]) -> str:
    """'library 20, tile 12 us', or '-' for no times."""
    return ", ".join(f"{name} {us:.0f}" for name, us in times.items()) + " us" if times else NOTHING


def bytes_text(count: int) -> str:
    """1536 -> '1.5 KiB'."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if size == int(size) else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("the loop returns at its last unit")
