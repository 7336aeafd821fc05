"""One line is logged about what was matched and what ran fused, when the first graph that holds collectives has run.

    ditron: 2 of 3 collectives of the first graph matched (1 all_gather_matmul, 1 matmul_reduce_scatter); 1 ran fused
    (1 tile), 1 by library (..), left alone: 1 bias; ditron_inductor.explain(model)(*inputs) says where and why

docs/explain.md says what the numbers mean and when the line comes. What ran is read from the plan's decisions once all
sites of the graph have run, and not guessed. The generated code of a graph begins this (see graph_meeting.py), so a
graph from a cache is counted too. The line is a warning, because warnings are shown even if logging is not configured;
torch's own hints are warnings too.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping

import torch.distributed as dist

from ditron_inductor.device.facts import GraphFacts
from ditron_inductor.options import Options
from ditron_inductor.task.plan import decisions
from ditron_inductor.task.policy import shared_site

log = logging.getLogger(__name__)

Ran = tuple[str, str]
"""What a site ran by: the strategy, empty if it has not run, and why if that is `library`."""
CHOSEN = "measured or predicted to be no slower"
"""Why the plan takes `library` where it could take another strategy. The reason itself has the times of one site."""
NOT_RUN: Ran = ("", "")


def ran_by(strategy: str, source: str, reason: str) -> Ran:
    """What the plan decided, by the fields of its `Choice`, without the times that each site has of its own."""
    if strategy != "library":
        return strategy, ""
    return "library", CHOSEN if source in ("table", "model", "trial") else reason


def ran_text(ran: Iterable[Ran]) -> str:
    """Returns how many sites ran fused, how many by `library`, and why: `2 ran fused (2 tile), 1 by library (..)`."""
    counts = Counter(ran)
    fused: Counter[str] = Counter()
    library: Counter[str] = Counter()
    for (strategy, why), count in counts.items():
        if strategy == "library":
            library[why] += count
        elif strategy:
            fused[strategy] += count
    text = f"{fused.total()} ran fused" + (f" ({counts_text(fused)})" if fused else "")
    if library:
        whys = library.most_common()
        reasons = whys[0][0] if len(whys) == 1 else "; ".join(f"{count}: {why}" for why, count in whys)
        text += f", {library.total()} by library ({reasons})"
    return text + (f", {counts[NOT_RUN]} not at all" if counts[NOT_RUN] else "")


def counts_text(counts: Counter[str]) -> str:
    """`2 tile, 1 chunked`, the largest number first."""
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


class Summary:
    """Counts the collectives of the graphs of a process that have run: those that were matched, by kind, what these ran
    by, and those left alone, by reason. The counts are used for the text of the log only. wanted: the option
    `ditron.summary` of the model that was compiled last; None until then, when the environment decides.
    """

    def __init__(self) -> None:
        self.wanted: bool | None = None
        self._lock = threading.Lock()
        self._graphs = 0
        self._matched: Counter[str] = Counter()
        self._ran: Counter[Ran] = Counter()
        self._left: Counter[str] = Counter()

    def begin(self, facts: GraphFacts, left_alone: Mapping[str, int], plain: str) -> FirstRun | None:
        """The first execution of a graph begins: it is counted when all its sites have run. Returns None if there is
        nothing to wait for. left_alone: the number of its collectives that were left alone, by reason. plain: why the
        graph runs as Inductor alone would run it; empty if it does not.
        """
        wanted = Options.current().summary if self.wanted is None else self.wanted
        if not wanted:
            return None
        sites = [(group.name, launch.site) for group in facts.groups for launch in group.after if launch.site]
        run = FirstRun(self, sites, left_alone, plain)
        if plain or not sites:
            run.end()
            return None
        decisions.when_noted(sites, run.end)
        return run

    def add(self, matched: Counter[str], ran: Counter[Ran], left_alone: Mapping[str, int]) -> None:
        """Counts a graph that has run, and logs the totals: the first time as a warning."""
        with self._lock:
            self._graphs += 1
            self._matched += matched
            self._ran += ran
            self._left.update(left_alone)
            level = logging.WARNING if self._graphs == 1 else logging.DEBUG
            text = self.text()
        if not dist.is_initialized() or dist.get_rank() == 0:
            log.log(level, "%s", text)

    def text(self) -> str:
        matched, left = self._matched.total(), self._left.total()
        graphs = "the first graph" if self._graphs == 1 else f"{self._graphs} graphs"
        text = f"ditron: {matched} of {matched + left} collectives of {graphs} matched"
        if matched:
            text += f" ({counts_text(self._matched)}); {ran_text(self._ran.elements())}"
        if left:
            text += f", left alone: {counts_text(self._left)}"
        fused = not left and all(strategy not in ("", "library") for strategy, _ in self._ran)
        return text if fused else f"{text}; ditron_inductor.explain(model)(*inputs) says where and why"


class FirstRun:
    """The first execution of one graph. sites: by group and name; for the others see `Summary.begin`."""

    def __init__(
        self, counted_by: Summary, sites: list[tuple[str, str]], left_alone: Mapping[str, int], plain: str
    ) -> None:
        self._summary: Summary | None = counted_by
        self._sites = sites
        self._left_alone = left_alone
        self._plain = plain

    def end(self) -> None:
        """Counts the graph, once: when all its sites have run, or else when it is called again."""
        counted_by, self._summary = self._summary, None
        if counted_by is not None:
            kinds = Counter(shared_site(site).rpartition(":")[2] for _, site in self._sites)
            counted_by.add(kinds, Counter(self._ran(*site) for site in self._sites), self._left_alone)

    def _ran(self, group_name: str, site: str) -> Ran:
        if self._plain:
            return "library", self._plain
        last = decisions.last(group_name, site)
        return NOT_RUN if last is None else ran_by(last[1].strategy, last[1].source, last[1].reason)


summary = Summary()
"""The summary of this process."""
