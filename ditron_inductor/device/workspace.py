"""The workspace of a process group on a device: the memory and words that a call of a Task node gets, and the order of
calls.

One workspace serves all sites of its group. Calls take its slots in turn. The slot of a call follows from the number of
calls before it, which is equal on all ranks, and the slot's epoch is in device memory. The host does what a kernel
cannot do: it makes the slots large enough, orders calls on different streams, and raises errors that an earlier kernel
found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import TypeVar

import torch

from ditron_inductor.device import slot_layout
from ditron_inductor.device.absence import Look
from ditron_inductor.device.calibrate import PollRates
from ditron_inductor.device.capabilities import Capabilities
from ditron_inductor.device.groups import Group
from ditron_inductor.device.handshake import AgreedOptions, HandshakeResult, agree_options
from ditron_inductor.device.lanes import Lane, make_lane
from ditron_inductor.device.ring import FIRST_SLOT_BYTES, Generation, make_generation, ring_bytes, slot_size
from ditron_inductor.device.scratch import Scratch
from ditron_inductor.device.session import Session
from ditron_inductor.device.sites import SiteNames
from ditron_inductor.device.streams import CallOrder, StreamOrder
from ditron_inductor.device.watchdog import Health
from ditron_inductor.errors import DitronCaptureError, DitronDiverged, DitronHandshakeError, WorkspaceError

T = TypeVar("T")


class SharedWorkspace:
    """The state that all options of one (group, device) share: memory, sites, health, call order and call count.

    `name` is the same on all ranks and used only once. `timeouts`: the limits, in seconds, that calls have. `largest`:
    the sizes that the ranks told each other, as (own size, largest size) by subject. `at_release`: called once, with
    the workspace, when it is released.
    """

    def __init__(
        self, session: Session, device: torch.device, agreement: HandshakeResult, rates: PollRates, timeout_s: float
    ) -> None:
        self.name = session.name
        self.session = session
        self.group: Group = session.group
        self.device = device
        self.capabilities: Capabilities = agreement.capabilities
        self.table: str = agreement.table
        self.rates = rates
        self.sites = SiteNames(self.group, session.name)
        self.health = Health(self.group, self.sites, device)
        self._look = Look(device)
        self.order: CallOrder = StreamOrder(device) if device.type == "cuda" else CallOrder()
        self.lane: Lane = make_lane(device, self.order)
        self.generations: list[Generation] = []
        self.lost: list[Generation] = []
        self.calls = 0
        # The capture of the last captured call, and how many calls it had.
        self._capture = (0, 0)
        self.released = False
        self.timeouts: set[float] = {timeout_s}
        self.largest: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._sites_seen: set[str] = set()
        self._sites_begun: set[str] = set()
        self._in_call = False
        self._exceeds: dict[tuple[int, int], bool] = {}
        self.scratch = Scratch(device)
        self.at_release: set[Callable[[SharedWorkspace], None]] = set()

    def begin(
        self, site: str, nbytes: int, limit: int, timeout_s: float, first_timeout_s: float, turn: int | None = None
    ) -> tuple[Generation, int, int]:
        """Takes a slot for one use (see Workspace.call). Returns (its ring, the slot, the number of `site`).

        An exception is noted as one in the call, except DitronCaptureError and WorkspaceError. The order holds nothing
        that an exception would have to give back: a stream that has entered is the last one, and waited for all calls
        before.
        """
        if self._in_call:
            # An exception, such as an interrupt, came where it could not be noted, so the peers are a call ahead or
            # behind.
            self.health.fail(RuntimeError("a call before this one neither ended nor failed"))
        if self.health.failed():
            self.check()
        # From here on this rank counts as being in the call, because its peers go through with theirs.
        self._in_call = True
        try:
            number = self.sites.number(site)
            generation = self._ring_for(nbytes) or self.grow(site, nbytes, limit, first_timeout_s)
            if self.order.enter():
                generation.captured = True
            elif site not in self._sites_begun:
                # A peer may compile its kernel before it answers.
                self._sites_begun.add(site)
                timeout_s = first_timeout_s
            # A graph that is replayed sets its own limit again, so with several limits in use none can be relied on.
            unsure = generation.captured and len(self.timeouts) > 1
            if generation.timeout_s != timeout_s or unsure:
                generation.set_poll_limit(self.rates.limit(self.device, timeout_s), timeout_s)
            self.health.begin(timeout_s)
            slot = (self._next_turn() if turn is None else turn) % slot_layout.NUM_SLOTS
        except (DitronCaptureError, WorkspaceError):
            # These refuse a call of which nothing has happened: on all ranks, or until this rank makes it again.
            self._in_call = False
            raise
        except BaseException as exc:
            self.fail(exc)
            raise
        return generation, slot, number

    def _ring_for(self, nbytes: int) -> Generation | None:
        """Returns the oldest ring whose slots have `nbytes`, or None. A ring that a graph holds is kept, so a rank that
        captures a graph again takes the ring that the graphs of the others hold, whatever has grown since.
        """
        for ring in self.generations:
            if nbytes <= ring.slot_bytes:
                return ring
        return None

    def _next_turn(self) -> int:
        """Counts a call that has no turn of its own, within its capture if it is captured: one rank may capture its
        graphs again while the others replay theirs.
        """
        if not self.order.capturing:
            self.calls += 1
            return self.calls - 1
        capture, calls = self._capture
        if capture != self.order.capture:
            capture, calls = self.order.capture, 0
        self._capture = capture, calls + 1
        return calls

    def fail(self, cause: BaseException) -> None:
        """Notes an exception in the use that began last, after which this rank's calls are out of step with those of
        the others.
        """
        self.health.fail(cause)
        self._in_call = False

    def check(self) -> None:
        """Raises the error that an earlier kernel found, if there is one."""
        self.health.check(functools.partial(self._look.not_begun, self.generations + self.lost, self.group))

    def end(self) -> None:
        """Ends the use that began last, whose work is on its stream."""
        self._in_call = False
        self.order.leave()
        if self.health.failed():
            self.check()

    def is_first(self, text: str) -> bool:
        """Returns whether this is asked for the first time about a site with certain sizes, since the last reset.

        All ranks ask at the same calls, if `text` holds nothing that they do not share.
        """
        first = text not in self._sites_seen
        self._sites_seen.add(text)
        return first

    def make_first_ring(self, limit: int, timeout_s: float) -> None:
        """Finds out whether the ranks can map each other's memory. If they cannot, the capabilities say so from now on.
        """
        if slot_layout.heap_bytes(FIRST_SLOT_BYTES) > limit:
            return
        try:
            self._add_generation(FIRST_SLOT_BYTES, timeout_s, "the group's first call")
        except WorkspaceError as exc:
            self.capabilities = self.capabilities.without_peer_access(f"the workspace {exc.fields['problem']}")

    def grow(self, site: str, nbytes: int, limit: int, timeout_s: float) -> Generation:
        """Makes slots of at least `nbytes`. Collective.

        Raises DitronCaptureError, WorkspaceError (on all ranks), DitronHandshakeError and DitronDiverged.
        """
        assert not self.released, "a workspace is got anew for every call, not kept"
        if not self.capabilities.tile_available:
            raise WorkspaceError(
                group_name=self.group.name,
                problem=f"cannot serve site '{site}': {self.capabilities.tile_reason}",
                remedy="Set the option 'ditron.strategy' to 'library' or 'auto'",
            )
        slot_bytes = slot_size(nbytes, limit - self.held())
        if slot_bytes is None:
            raise WorkspaceError(
                group_name=self.group.name,
                problem=f"would take {self.footprint(nbytes, limit)} bytes at site '{site}', {limit} are allowed",
                remedy="Raise the option 'ditron.workspace_limit', or let the site run by 'library'",
            )
        if self.order.is_capturing():
            raise DitronCaptureError(site=f"site '{site}'", problem=f"its workspace has to grow to {nbytes} bytes")
        try:
            return self._add_generation(slot_bytes, timeout_s, f"site '{site}'")
        except WorkspaceError:
            raise
        except BaseException as exc:
            self.health.fail(exc)
            raise

    def _add_generation(self, slot_bytes: int, timeout_s: float, why: str) -> Generation:
        self.synchronize()
        # Raise an error that a kernel found just now, because the next ring must not hide it.
        if self.health.failed():
            self.check()
        # The ring is made once and used in any mode. An inference tensor could not be reset outside inference mode.
        with torch.inference_mode(False), torch.no_grad():
            generation = make_generation(self.session, self.device, slot_bytes, timeout_s, why)
            generation.zero(self.health.record)
            generation.set_poll_limit(self.rates.limit(self.device, timeout_s), timeout_s)
        self.synchronize()
        # A peer may write into the new heap as soon as it goes on: only after every rank has zeroed its own.
        captured = [old.name for old in self.generations if old.captured]
        by_rank = self.session.all_gather(f"begin to use the memory for {why}", captured, timeout_s)
        # All ranks keep a ring that a graph of any rank holds, so that all count the same for the next growth.
        names = {name for names in by_rank for name in names}
        self.generations = [old for old in self.generations if old.name in names] + [generation]
        self._choose_anew()
        return generation

    def held(self) -> int:
        """The bytes of the rings that calls may use, which are equal on all ranks."""
        return sum(slot_layout.heap_bytes(generation.slot_bytes) for generation in self.generations)

    def footprint(self, nbytes: int, limit: int) -> int:
        """Returns the bytes that the group takes while it has slots for calls of `nbytes`, to be compared with `limit`.
        They are equal on all ranks.

        If the slots have to grow, the existing rings count too: they exist until the new ring is made, and rings that a
        captured graph holds stay.
        """
        found = ring_bytes(nbytes) + (0 if self._ring_for(nbytes) is not None else self.held())
        self._exceeds[nbytes, limit] = found > limit
        return found

    def _choose_anew(self) -> None:
        """Forgets what calls have chosen, on all ranks at the same growth, if `footprint` would now lead to another
        choice. Otherwise one rank might ask again alone.
        """
        before = dict(self._exceeds)
        for nbytes, limit in before:
            self.footprint(nbytes, limit)
        if self._exceeds != before:
            # Make new objects with the same sizes: the ranks need not agree again, but prepared calls become invalid.
            self.largest = {what: (own, most) for what, (own, most) in self.largest.items()}
            self._sites_seen = set()

    def restart(self, session: Session, rings: set[str]) -> None:
        """Sets everything back to zero, and keeps the `rings` that all ranks have. No kernel of any rank may be
        running.
        """
        kept = [generation for generation in self.generations if generation.name in rings]
        # A graph may still hold a ring that other ranks do not have. Its memory stays, but no call takes it.
        self.lost += [generation for generation in self.generations if generation.captured and generation not in kept]
        self.generations = kept
        self.session = session
        self.calls = 0
        self.largest = {}
        self._sites_seen = set()
        self._sites_begun = set()
        self._in_call = False
        self._exceeds = {}
        with torch.inference_mode(False), torch.no_grad():
            for generation in kept:
                timeout_s = generation.timeout_s
                generation.zero(self.health.record)
                generation.set_poll_limit(self.rates.limit(self.device, timeout_s), timeout_s)
        self.synchronize()
        self.health.clear()

    def release(self) -> None:
        """Frees the memory. Peers that still map this rank's heap keep their mappings."""
        self.released = True
        self.generations = []
        self.lost = []
        self.scratch.release()
        callbacks, self.at_release = self.at_release, set()
        for callback in callbacks:
            callback(self)

    def synchronize(self) -> None:
        """Waits until no kernel of this rank runs any more. This is bounded, because the waits of kernels are."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def nbytes(self) -> int:
        """The bytes of symmetric memory that this rank holds."""
        return self.held() + sum(slot_layout.heap_bytes(generation.slot_bytes) for generation in self.lost)


class Workspace:
    """The workspace of (group, device) as a site with `options` uses it. Get it from `device.workspaces.get`. shared:
    what it has in common with the group's workspaces for other options.
    """

    def __init__(
        self, shared: SharedWorkspace, options: AgreedOptions, timeout_s: float, first_timeout_s: float = 0.0
    ) -> None:
        self.shared = shared
        self.options = options
        self.timeout_s = timeout_s
        self.first_timeout_s = max(timeout_s, first_timeout_s)

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the group."""
        return self.shared.capabilities

    @property
    def group(self) -> Group:
        return self.shared.group

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.shared.group.rank

    @property
    def world_size(self) -> int:
        return self.shared.group.world_size

    @property
    def device(self) -> torch.device:
        return self.shared.device

    @property
    def table(self) -> str:
        """The text of the table of measured choices that all ranks use, which is rank 0's."""
        return self.shared.table

    @property
    def nbytes(self) -> int:
        """The bytes of symmetric memory that this rank holds for the group, including rings that are kept for captured
        graphs.
        """
        return self.shared.nbytes()

    def footprint(self, nbytes: int) -> int:
        """Returns the bytes that count against the option 'ditron.workspace_limit' for calls of `nbytes`, including
        what the group holds.
        """
        return self.shared.footprint(nbytes, self.options.workspace_limit)

    def largest(self, what: str, size: int) -> int:
        """Returns what `largest_of` does for a single size."""
        return self.largest_of(what, (size,))[0]

    def largest_of(self, what: str, sizes: Sequence[int]) -> tuple[int, ...]:
        """Returns the largest of each of `sizes` on any rank, for sizes that may differ between ranks, such as uneven
        shards. The ranks agree on them at the first use of `what`, a text that is equal on all ranks; this use is
        collective. A later change of the sizes has no effect, because they may have changed on this rank alone.
        """
        known = self.agreed(what)
        if known is None:
            try:
                found = agree_options(self.shared.session, self.options, self.first_timeout_s, what, sizes)
            except (DitronHandshakeError, DitronDiverged) as exc:
                self.shared.health.fail(exc)
                raise
            known = (tuple(sizes), tuple(max(each) for each in zip(*found, strict=True)))
            self.shared.largest[what] = known
        return known[1]

    def agreed(self, what: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Returns (own sizes, largest sizes) of `what`, as the ranks last agreed. It is a new object after every
        agreement.
        """
        return self.shared.largest.get(what)

    def is_current(self) -> bool:
        """Returns whether `workspaces.get` would still return it: neither was it released, nor its group replaced.

        Raises RuntimeError when there is no group of its name any more.
        """
        return not self.shared.released and self.shared.group.is_current()

    def check(self) -> None:
        """Raises the error that an earlier kernel found, as the next call would."""
        if self.shared.health.failed():
            self.shared.check()

    def call(self, site: str, nbytes: int, turn: int | None = None) -> Call:
        """One use of a slot with at least `nbytes` of data, for one kernel launch: `with ws.call(...) as call: launch`.

        All ranks make the same calls in the same order. turn: a number of the call that is equal on all ranks, which
        decides the slot; None to count the calls here, if no rank makes a call that another one only replays. Entering
        raises DitronTimeout or DitronDiverged if an earlier kernel failed, and then DitronPoisoned until the reset. It
        raises DitronCaptureError and WorkspaceError if the slots are too small and cannot grow. After an exception
        inside the block the workspace needs a reset.
        """
        limits = self.options.workspace_limit, self.timeout_s, self.first_timeout_s
        return Call(self.shared, (site, nbytes, *limits, turn))


class Call:
    """One use of one slot, valid inside its `with` block.

    slot: the slot to use. site: the site's number in flag words. generation: the ring that has the slot, and the words
    of the protocol. stream: handle of the current stream.
    """

    slot: int
    site: int
    generation: Generation
    stream: int

    def __init__(self, shared: SharedWorkspace, begin: tuple[str, int, int, float, float, int | None]) -> None:
        self._shared = shared
        self._begin = begin

    def __enter__(self) -> Call:
        shared = self._shared
        self.generation, self.slot, self.site = shared.begin(*self._begin)
        self.stream = shared.order.stream
        return self

    @property
    def table(self) -> torch.Tensor:
        """int64 [world_size], the address in this process of every rank's heap."""
        return self.generation.table

    @property
    def ctl(self) -> torch.Tensor:
        """int64 [CTL_WORDS], see core/layout.py."""
        return self.generation.ctl

    @property
    def counters(self) -> torch.Tensor:
        """int32 [COUNTERS]."""
        return self.generation.counters

    @property
    def slot_bytes(self) -> int:
        """Size of the slot."""
        return self.generation.slot_bytes

    def data(self, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns the data of the slot in the heap of `rank`, flat. Data of other ranks may be read, under the
        protocol, but never written.
        """
        return self.generation.data(self.slot, rank, dtype)

    def kept(self, owner: Hashable, make: Callable[[Call], T]) -> T:
        """Returns what `make` computes from this call's slot and site alone. `owner` gets the same object again in
        later calls with the same slot and site, as long as the ring exists.
        """
        key = owner, self.slot, self.site
        found: T | None = self.generation.kept.get(key)
        if found is None:
            # The tensor is made once and used in any mode, like the ring itself.
            with torch.inference_mode(False), torch.no_grad():
                found = self.generation.keep(key, make(self))
        return found

    def fork(self) -> Lane:
        """Returns a lane: further streams, for transfers beside the work on the current stream (see device/lanes.py).
        """
        return self._shared.lane

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if value is not None:
            self._shared.fail(value)
            return
        self._shared.end()
