"""The accounts of a site and of a step, which say which part of their time each of the taxes takes.

The parts of a site's time add up to it:

    us = compute + bulk synchronous + locality + other

docs/taxes.md says how each of them is made. `other` is negative, or 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ditron_inductor.task.site_records import SiteRecord
from ditron_inductor.taxes.intermediates import Intermediates

if TYPE_CHECKING:
    from ditron_inductor.taxes.probe import Spent

UNFUSED, FUSED, INDUCTOR = "unfused", "fused", "inductor"


@dataclass(frozen=True)
class Account:
    """Microseconds of one site in one step, all its calls together, the largest of any rank. launch_us: how much more
    its calls cost in eager mode than in a CUDA graph, each call alone; None without CUDA graphs. It is not a part of
    `us`. in_kernel_us: the time that a program of its kernels waited, by its own time stamps, if these were asked for.
    """

    strategy: str
    calls: int
    us: float
    compute_us: float
    bulk_synchronous_us: float
    locality_us: float
    other_us: float
    launch_us: float | None = None
    in_kernel_us: float | None = None

    @property
    def taxes_us(self) -> float:
        """The sum of the taxes bulk synchronous and locality."""
        return self.bulk_synchronous_us + self.locality_us


@dataclass(frozen=True)
class SiteTaxes:
    """One fused site. direction: as in `explain`. locality: whether its kind has an estimate of the locality tax;
    otherwise this tax is 0, and its time is in the others. unfused: None if the unfused graph has no such site.
    """

    direction: str
    record: SiteRecord
    locality: bool
    unfused: Account | None
    fused: Account | None

    def with_launches(self, unfused_us: float | None, fused_us: float | None) -> SiteTaxes:
        """Returns the site with the launch tax, given that of one call of each form; the site has several calls."""

        def priced(account: Account | None, us: float | None) -> Account | None:
            return account if account is None or us is None else replace(account, launch_us=us * account.calls)

        return replace(self, unfused=priced(self.unfused, unfused_us), fused=priced(self.fused, fused_us))

    def with_waits(self, us: float | None) -> SiteTaxes:
        """Returns the site with the time that a program of the fused kernels waited in a step, if that was traced."""
        fused = self.fused
        return self if fused is None or us is None else replace(self, fused=replace(fused, in_kernel_us=us))


@dataclass(frozen=True)
class StepTimes:
    """Microseconds of a whole step, the largest of any rank. graph_us: the time in a CUDA graph, None without one."""

    eager_us: float
    graph_us: float | None = None

    @property
    def device_us(self) -> float:
        """The time of a step without the host's part, as far as that is known, in microseconds."""
        return self.eager_us if self.graph_us is None else min(self.eager_us, self.graph_us)

    @property
    def launch_us(self) -> float | None:
        return None if self.graph_us is None else max(0.0, self.eager_us - self.graph_us)


@dataclass(frozen=True)
class Explained:
    """By how much the fused step is shorter, and how the accounts explain it: by saved taxes, and by other savings."""

    measured_us: float
    taxes_us: float
    other_us: float

    @property
    def part(self) -> float | None:
        """The explained part of the measured gain; None if nothing was gained."""
        return self.taxes_us / self.measured_us if self.measured_us > 0 else None


def unfused_account(spent: Spent, bytes_: Intermediates | None, bytes_per_us: float) -> Account:
    """Returns the account of calls by `library`, or of calls whose collectives can be timed."""
    inside, beside = (0.0, 0.0) if bytes_ is None else (bytes_.inside / bytes_per_us, bytes_.beside / bytes_per_us)
    # No estimate takes more than there is.
    inside = min(inside * spent.calls, spent.waited_us)
    beside = min(beside * spent.calls, max(0.0, spent.us - spent.waited_us))
    return Account(
        strategy=spent.strategy,
        calls=spent.calls,
        us=spent.us,
        compute_us=max(0.0, spent.us - spent.waited_us - beside),
        bulk_synchronous_us=spent.waited_us - inside,
        locality_us=inside + beside,
        # The largest wait and the largest time may be of two ranks.
        other_us=min(0.0, spent.us - spent.waited_us),
    )


def fused_account(spent: Spent, bytes_: Intermediates | None, bytes_per_us: float, unfused: Account | None) -> Account:
    """Returns the account of calls by any strategy (see the module)."""
    if spent.strategy == "library" or unfused is None:
        return unfused_account(spent, bytes_, bytes_per_us)
    compute = unfused.compute_us / unfused.calls * spent.calls
    locality = 0.0 if bytes_ is None else bytes_.fused / bytes_per_us * spent.calls
    locality = min(locality, max(0.0, spent.us - compute)) if spent.us > compute else 0.0
    left = spent.us - compute - locality
    return Account(
        strategy=spent.strategy,
        calls=spent.calls,
        us=spent.us,
        compute_us=compute,
        bulk_synchronous_us=max(0.0, left),
        locality_us=locality,
        other_us=min(0.0, left),
    )


def explained(
    sites: list[SiteTaxes] | tuple[SiteTaxes, ...], steps: Mapping[str, StepTimes], graph: bool
) -> Explained | None:
    """Returns the gain of the fused step over the unfused one, both in CUDA graphs if `graph`; None if not timed."""
    times = {name: step.graph_us if graph else step.eager_us for name, step in steps.items()}
    before, after = times.get(UNFUSED), times.get(FUSED)
    if before is None or after is None:
        return None
    pairs = [(site.unfused, site.fused) for site in sites if site.unfused is not None and site.fused is not None]
    saved = sum(old.taxes_us - new.taxes_us for old, new in pairs)
    launches = [steps[name].launch_us for name in (UNFUSED, FUSED)]
    if not graph and launches[0] is not None and launches[1] is not None:
        saved += launches[0] - launches[1]
    other = sum((old.us - old.taxes_us) - (new.us - new.taxes_us) for old, new in pairs)
    return Explained(before - after, saved, other)
