"""The tax report as a picture: for every site, and for the whole step, a stacked bar without fusion and one with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ditron_inductor.errors import MissingDependency
from ditron_inductor.taxes.accounts import FUSED, UNFUSED, Account, SiteTaxes, StepTimes

PARTS = {
    "compute": ("compute_us", "#bdbdbd"),
    "locality": ("locality_us", "#7570b3"),
    "bulk synchronous": ("bulk_synchronous_us", "#d95f02"),
}
LAUNCH, REST = ("launch", "#1b9e77"), ("rest of the step", "#e6e6e6")
WIDTH, MOST_SITES = 0.38, 24
"""The width of a bar, and the number of sites that are drawn: those that take longest without fusion."""


def pyplot() -> Any:
    """Returns matplotlib's pyplot, set up to draw to files. Raises MissingDependency."""
    try:
        import matplotlib
    except ImportError as error:
        remedy = "pip install 'ditron-inductor[bench]'"
        raise MissingDependency(name="matplotlib", needed_for="a picture", found="none found", remedy=remedy) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(path: str | Path, all_sites: Sequence[SiteTaxes], steps: Mapping[str, StepTimes], title: str) -> None:
    """Writes the picture to `path`, in the format of its suffix. Raises MissingDependency."""
    plot = pyplot()
    sites = sorted(all_sites, key=lambda site: 0.0 if site.unfused is None else -site.unfused.us)[:MOST_SITES]
    figure, (left, right) = plot.subplots(
        1, 2, figsize=(5.0 + 0.55 * len(sites), 5.0), width_ratios=[max(2, len(sites)), 2.2], layout="constrained"
    )
    for index, site in enumerate(sites):
        for account, place in ((site.unfused, index - WIDTH / 2), (site.fused, index + WIDTH / 2)):
            if account is not None:
                _stack(left, place, _parts([account]))
    names = [f"{site.record.site.partition(':')[0]}\n{site.record.kind.replace('_', ' ')}" for site in sites]
    left.set_xticks(range(len(sites)), names, rotation=60, ha="right", fontsize=7)
    left.set_title("by site: unfused left, fused right", fontsize=9)
    left.set_ylabel("us in a step, largest of any rank")
    for place, form in enumerate((UNFUSED, FUSED)):
        _stack(right, place, _step_parts([getattr(site, form) for site in all_sites], steps[form]))
    right.set_xticks(range(2), [UNFUSED, FUSED])
    right.set_title("whole step, eager", fontsize=9)
    colours = {name: colour for name, (_, colour) in PARTS.items()} | dict((LAUNCH, REST))
    handles = [plot.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    right.legend(handles, colours, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.08))
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
    plot.close(figure)


def _parts(accounts: Sequence[Account | None]) -> list[tuple[float, str]]:
    """Returns the parts of a bar as (us, colour), from below, that these accounts have together."""
    found = [account for account in accounts if account is not None]
    parts = [(sum(getattr(account, field) for account in found), colour) for field, colour in PARTS.values()]
    # The kernel computes faster by this time. It is subtracted, so that the stack is as high as the time.
    parts[0] = max(0.0, parts[0][0] + sum(account.other_us for account in found)), parts[0][1]
    return parts


def _step_parts(accounts: Sequence[Account | None], step: StepTimes) -> list[tuple[float, str]]:
    """Returns the parts of the bar of a step. The last part is the time that no account has."""
    parts = _parts(accounts)
    if step.launch_us is not None:
        parts.append((step.launch_us, LAUNCH[1]))
    return [*parts, (max(0.0, step.eager_us - sum(us for us, _ in parts)), REST[1])]


def _stack(axes: Any, place: float, parts: list[tuple[float, str]]) -> None:
    bottom = 0.0
    for us, colour in parts:
        axes.bar(place, us, WIDTH, bottom=bottom, color=colour, edgecolor="white", linewidth=0.4)
        bottom += us
