"""The first question of a compiled graph's code: may the graph run as it was rewritten?

Inductor's code for a graph that holds collectives (see ditron_inductor/codegen/meeting_kernel.py) begins with

    meeting_buf0 = graph_meeting("..", "..", 20.0, {"no_matmul": 1})
    ...
    def call(self, args):
        arg0_1, arg1_1 = args
        other = meeting_buf0()
        if other is not None:
            return other([arg0_1, arg1_1], ((8, 1), None))

The first call meets the peers (device/meetings.py); later calls look up what was decided. The first execution of a
graph is counted by the summary (summary.py).
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ditron_inductor import runtime
from ditron_inductor.codegen.plain_graph import PlainGraph, restrided
from ditron_inductor.device import groups
from ditron_inductor.device.agreements import Decision
from ditron_inductor.device.facts import GraphFacts
from ditron_inductor.device.meetings import check_world_sizes, meetings
from ditron_inductor.errors import DitronCaptureError, DitronDiverged, DitronRunsUnfused
from ditron_inductor.options import STRICT_RUN, Options
from ditron_inductor.pipeline import ConformPipeline
from ditron_inductor.recompilations import keep_compiled
from ditron_inductor.summary import FirstRun, summary
from ditron_inductor.task.policy import shared_site

logger = logging.getLogger(__name__)

# A process that found the code of a graph in a cache may have imported nothing else of ours.
runtime.prepare()

MOST_ATTEMPTS = 2
"""The most meetings to which a rank may fail to come. After these a graph runs as Inductor alone would run it."""

Other = Callable[[list[Any], Sequence[Any]], tuple[Any, ...]]
"""A function of the graph's inputs and of the strides that its outputs have to have."""


class GraphMeeting:
    """The meeting of one compiled graph with its peers. facts: the text of its GraphFacts. plain: the text of the graph
    before our passes, see plain_graph.py. limit_s: seconds to wait for a rank that does not come. left_alone: the
    number of its collectives that were left alone, by reason.
    """

    def __init__(self, facts: str, plain: str, limit_s: float, left_alone: Mapping[str, int]) -> None:
        self.facts = GraphFacts.parse(facts)
        self.limit_s = limit_s
        self.left_alone = left_alone
        self.decision: Decision | None = None
        self._text = plain
        self._plain = PlainGraph(plain) if plain else None
        self._other: Other | None = None
        self._version = self._life = -1
        self._groups: list[Any] = []
        self._attempts = 0
        self._is_counted = False
        self._first_run: FirstRun | None = None
        self._lock = threading.Lock()

    def __call__(self) -> Other | None:
        """Returns None if the graph runs as it was rewritten, and otherwise what runs in its place. Raises what
        `Meetings.meet` raises; DitronCaptureError if a graph that waits for its peers is captured before it has run;
        DitronRunsUnfused if the graph runs as Inductor alone would run it, and the option `ditron.strict` forbids that;
        and RuntimeError if a group does not exist any more.
        """
        if self._first_run is not None:
            # The first execution has ended, whether all sites have run or not.
            self._first_run.end()
            self._first_run = None
        if self._version == meetings.version and self._is_current():
            return self._other
        with self._lock:
            return self._decide()

    def _is_current(self) -> bool:
        return all(groups.find(name) is group for name, group in self._groups)

    def _decide(self) -> Other | None:
        if not self.facts.groups:
            # All its collectives are of groups of one rank, or of groups that are not known: nobody has to come.
            self._count("")
            self._version = meetings.version
            return None
        if self._life != meetings.life or not self._is_current():
            self._attempts = 0
        self._life = meetings.life
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        check_world_sizes(self.facts)
        decision = meetings.known(self.facts)
        if decision is None and capturing:
            decision = self._captured()
            if decision is None:
                return None
        elif decision is None and self._attempts >= MOST_ATTEMPTS and self.decision is not None:
            decision = self.decision
        elif decision is None:
            decision = meetings.meet(self.facts, self.limit_s)
            if not decision.final:
                self._attempts += 1
                logger.warning("a graph runs without fusion: %s", decision.plain)
            elif self._attempts and not decision.plain:
                logger.warning("a graph runs with fusion from now on: its ranks have met")
        # A graph that conforms to an agreement has been compiled for it.
        if decision.conform is None or decision != self.decision:
            self._other = self._in_place(decision)
        self.decision = decision
        meetings.note_plain(self.facts, decision.plain)
        if decision.plain:
            self._refuse_plain(decision.plain)
        elif decision.conform is not None or not self.facts.is_bare:
            keep_compiled()
        if decision.conform is None:
            self._count(decision.plain)
        if decision.final or self._attempts >= MOST_ATTEMPTS:
            self._version = meetings.version
        self._groups = [(group.name, groups.find(group.name)) for group in self.facts.groups]
        return self._other

    def _refuse_plain(self, reason: str) -> None:
        options = Options.of_shared(self.facts.options)
        sites = [shared_site(launch.site) for group in self.facts.groups for launch in group.after if launch.site]
        if sites and options.strict == STRICT_RUN and options.strategy != "library":
            meetings.stopped(self.facts)
            raise DitronRunsUnfused(site=", ".join(sites), reason=reason)

    def _count(self, plain: str) -> None:
        """Lets the summary count the graph when it runs for the first time."""
        if not self._is_counted:
            self._is_counted = True
            self._first_run = summary.begin(self.facts, self.left_alone, plain)

    def _captured(self) -> Decision | None:
        """Returns the decision for a graph that is captured undecided; None if nobody waits for this rank."""
        if self.facts.is_bare:
            return None
        if self._attempts:
            return Decision(plain="its peers had not come before it was captured")
        raise DitronCaptureError(site="a graph", problem="its ranks have not compared it")

    def _in_place(self, decision: Decision) -> Other | None:
        if not decision.plain and decision.conform is None:
            return None
        if self._plain is None:
            # Without the graph as it was before the passes there is no right way to run.
            name = self.facts.groups[0].name
            rank = groups.resolve(name).rank
            raise DitronDiverged(
                rank=rank, site="a graph", peer="another", peer_site=f"a graph unlike it: {decision.plain}"
            )
        if decision.conform is not None:
            rewrite = ConformPipeline(decision.conform, self.facts)
            return functools.partial(_run, PlainGraph(self._text, rewrite))
        compile_it = decision.final or self._attempts >= MOST_ATTEMPTS
        return functools.partial(_run, self._plain if compile_it else self._plain.interpret)


def _run(plain: Callable[[Sequence[Any]], Sequence[Any]], inputs: list[Any], strides: Sequence[Any]) -> tuple[Any, ...]:
    with torch.no_grad():
        return restrided(plain(inputs), strides)


def graph_meeting(facts: str, plain: str, limit_s: float, left_alone: Mapping[str, int]) -> GraphMeeting:
    """Returns the meeting of a compiled graph. The code of the graph calls this when it is loaded."""
    return GraphMeeting(facts, plain, limit_s, left_alone)
