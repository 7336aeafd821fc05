"""The states of the protocol model: one `Rank` per rank (host, device words, symmetric memory) and its script.

Weak memory. A plain store may become visible to a peer at once, or as late as the next release of its program. No
control flow depends on data, so the two extremes are enough: a read that sees too new a value also sees it when every
store is visible at once, one that sees too old a value also sees it when every store waits for a release. Data is
therefore kept twice (`early`, `late`) and every read checks both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ditron_inductor.core.layout import IN_BAND_AREAS

SLOTS = 2
TILES = 2


class Violation(Exception):
    """An invariant does not hold; the text says which."""


class Call(NamedTuple):
    """A launch: eager (slot by call count), or replayed (`slot`, and in `baked` the epoch that held at its capture)."""

    kind: str
    site: str
    slot: int | None = None
    baked: int | None = None
    may_fail: bool = False


class Capture(NamedTuple):
    """A CUDA graph with so many calls is captured: nothing runs."""

    calls: int


class Reset(NamedTuple):
    """`reset(group)`: a collective call."""


class Grow(NamedTuple):
    """The slots become larger: new memory for all ranks, a collective act in front of a call. Calls are counted on."""


class Meet(NamedTuple):
    """The ranks meet for a site, once and before its first call; has_node: this one could run it by a fused kernel.

    All fuse it if all have a node, and else none does: then its calls go to the library, and are not seen here.
    """

    site: str
    has_node: bool = True


class Raised(NamedTuple):
    """The rank raises in user code instead of calling, and goes on with its next Reset, if there is one."""


class Poisoned(NamedTuple):
    """A wait of the rank has failed in a launch of no concern here, and its host does not know it yet."""


Event = Call | Capture | Reset | Grow | Meet | Raised | Poisoned


@dataclass(frozen=True)
class Scenario:
    """One exploration: a script per rank, and how the machine runs it.

    `programs`: resident programs per launch, of all launches together where they overlap. `start`, `modulus`: first
    epoch, and where epochs wrap.
    `impatient`: a wait of a call that may fail can expire while its peer is only slow, not just when all are stuck.
    `mortal`: this rank may stop for good between any two steps. `fine`: one memory operation per step.
    `areas`: that launches in band take in turn. `tiles`: of a launch, for each destination where it has several; of
    early.py the parts of a row.
    """

    scripts: tuple[tuple[Event, ...], ...]
    programs: int = 1
    start: int = 0
    modulus: int = 16
    fine: bool = False
    impatient: bool = False
    areas: int = IN_BAND_AREAS.value
    mortal: int | None = None
    tiles: int = TILES

    @property
    def world(self) -> int:
        return len(self.scripts)


class Program(NamedTuple):
    """A resident program at operation `op` of work item `item`."""

    item: int  # -1: it has not started
    op: int = 0
    read: tuple[int, ...] = ()  # sources read by the item, in order
    value: Any = None  # what its writes carry, after a "sum"
    pending: tuple[tuple[int, int, Any], ...] = ()  # stores that no release has ordered yet: destination, word, data
    alive: bool = True  # the workspace was healthy when it started; else its items do nothing
    words: tuple[Any, ...] = ()  # epoch, use and due, if it has read others than its launch (early.py)
    counted: bool | None = None  # whether it was counted last, where it has counted itself (early.py)


class Launch(NamedTuple):
    epoch: int
    slot: int
    next_item: int
    programs: tuple[Program, ...]  # sorted: programs are interchangeable
    use: int = 0  # number of this use in band
    suspect: str = ""  # what was wrong with the first wrong data that was pulled
    due: tuple[int, int] | None = None  # of the rank, as its programs read it when they start
    closed: bool = False  # all programs are counted
    ended: bool = False  # all programs have ended, although a launch in front of it is still in flight


class Word(NamedTuple):
    """A flag or a credit."""

    site: str | None
    epoch: int
    writer: int | None = None


class Memory(NamedTuple):
    """What launches of early.py use of their rank's own memory: the event that has stored each part."""

    rows: tuple[tuple[int, ...], ...]  # [turn][part]
    sums: tuple[tuple[int, ...], ...]  # [turn][part]
    weights: tuple[int, ...]  # [part]
    done: tuple[int, ...]  # [slot] programs that have counted themselves


class Rank(NamedTuple):
    flags: tuple[Word, ...]  # [slot][region][source], written by the source
    credits: tuple[Word, ...]  # [slot][peer], written by the peer
    early: tuple[Any, ...]  # [slot][region][source] data, every store visible at once
    late: tuple[Any, ...]  # the same, every store held back until a release
    epochs: tuple[int, ...]  # [slot]
    arrived: tuple[int, ...]  # [destination] tiles counted
    used: tuple[int, ...]  # [slot] the event that used the slot last: for the checks only
    due: tuple[int, int] | None = None  # (slot, epoch) of the use that was closed last
    uses: int = 0  # in band, that have ended
    band: tuple[Any, ...] = ()  # [area][source] data in band, None for zero
    signs: tuple[Word, ...] = ()  # [area][source], written by the source
    event: int = 0  # position in the script
    calls: int = 0  # eager and captured calls
    barriers: int = 0  # host barriers entered
    phase: int = 0  # of a reset, a growth or a meeting
    posts: tuple[tuple[str, bool], ...] = ()  # (site, has a node), as this rank has told the others
    met: tuple[tuple[str, bool], ...] = ()  # (site, fused), as this rank has learnt it
    verdicts: tuple[tuple[str, bool], ...] = ()  # (site, fused) in the store of the group: rank 0 stands for it
    launch: Launch | None = None
    behind: tuple[Launch, ...] = ()  # launches that have begun although `launch` has not ended, in their order
    front: tuple[Launch, ...] = ()  # those in front of `launch`, while the step of one from `behind` is taken
    memory: Memory | None = None
    poisoned: bool = False
    record: tuple[str, int, int] | None = None  # the first failure: kind, event, peer
    dead: bool = False


State = tuple[Rank, ...]


def put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    """`values` with `value` at `index`."""
    return (*values[:index], value, *values[index + 1 :])
