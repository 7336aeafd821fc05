"""The place of each word of the signal protocol: offsets shared by the kernels (as `tl.constexpr`) and the host.

Two memories hold protocol words:

* the *header* of the symmetric heap, one per rank, mapped by all ranks: for every slot a table of flags, and one row of
  credits. A word is in row `chunk`, column `source rank`; it has one writer, the source, and lies in the waiter's
  memory. The areas for data that is sent in band follow. They are used in turn and have no slot: see core/in_band.py.
* the *control words* `ctl`, an int64 tensor that only its own rank reads and writes: epoch, tickets and the count of
  finished programs of each slot, the use whose credits are due, the poison word, the poll limit and the address of the
  failure record.

A flag or credit is one 64-bit word, `site << EPOCH_BITS | epoch`: 23 bits of site hash, so that it stays positive, and
40 bits of epoch, so that a word which no site touched for years is still in the past.
"""

from __future__ import annotations

import triton.language as tl

NUM_SLOTS = tl.constexpr(2)
"""The number of equal data slots of a workspace. Calls take turns, so credits have nearly always come back."""

MAX_WORLD = tl.constexpr(16)
"""The columns of a flag row. 16 words are 128 bytes, so no two rows share a cache line."""

MAX_CHUNKS = tl.constexpr(1024)
"""The flag rows of a slot. A launch numbers the chunks of all its phases below this."""

RESULT_ROW = tl.constexpr(512)
"""The first flag row of results, for a launch that sends partial results and, after they are added up, results."""

REVOKED_ROW = tl.constexpr(1023)
"""The flag row in which a rank tells that it overwrites its slot without the reader's credit, by the (site, epoch) of
that use. It is used only if library products write directly into the slot.
"""

CREDIT_ROW = tl.constexpr(1024)
"""The row after the last flag row holds the credits: word `peer` says which epoch that peer has finished with."""

SLOT_WORDS = tl.constexpr(16 * 1025)
"""64-bit words of header for each slot: (MAX_CHUNKS flag rows + 1 credit row) * MAX_WORLD."""

IN_BAND_AREAS = tl.constexpr(4)
"""The areas: for this use in band, the one before, and the next. A power of two, as a remainder by 3 is slow."""

IN_BAND_SITES = tl.constexpr(2 * 16 * 1025)
"""The place of the sites of uses in band, in 64-bit words: for each area one word of every source."""

IN_BAND_DATA = tl.constexpr(266240)
"""Bytes of the heap before the first area: what comes before it, rounded up to 4096."""

IN_BAND_BYTES = tl.constexpr(2 << 20)
"""The bytes of an area."""

HEADER_BYTES = tl.constexpr(266240 + 4 * (2 << 20))
"""Bytes of the heap before the first data slot."""

EPOCH_BITS = tl.constexpr(40)
EPOCH_MASK = tl.constexpr((1 << 40) - 1)
WRAP_SHIFT = tl.constexpr(64 - 40)
"""Shifting a difference of epochs left by this puts its sign bit in the place of the sign bit of int64."""
SITE_BITS = tl.constexpr(23)

# Control words: offsets into `ctl`. Words that programs hammer stand 128 bytes apart.
POISON = tl.constexpr(0)
"""0, or the code of the failure that made this workspace unusable until it is reset."""

POLL_LIMIT = tl.constexpr(1)
"""Polls of one word before a wait expires."""

RECORD = tl.constexpr(2)
"""Address of the failure record, in memory that both the device and the host can read."""

DUE = tl.constexpr(3)
"""The use that ended last, as (slot + 1) << EPOCH_BITS | epoch, or 0. The next launch gives its credits."""

TRACE_BUFFER = tl.constexpr(4)
"""Address of the buffer of events while kernels are traced, else 0; see core/trace.py."""

IN_BAND_USES = tl.constexpr(5)
"""Uses in band that have ended on this rank."""

IN_BAND_LINES = tl.constexpr(6)
"""Lines of 128 bytes at the beginning of an area that may have been written in the last of them."""

SLOT_CTL = tl.constexpr(16)
"""First control word of slot 0."""

SLOT_CTL_STRIDE = tl.constexpr(64)
"""Control words of each slot."""

EPOCH = tl.constexpr(0)
"""Uses of the slot that have ended on this rank."""

DATA_OFFSET = tl.constexpr(1)
"""Bytes from the heap's base to the slot's data."""

OPENED = tl.constexpr(2)
"""The last epoch in which this rank was free to fill its slot, for library products, which cannot wait."""

SEND_TICKET = tl.constexpr(16)
TILE_TICKET = tl.constexpr(32)
"""The next piece of work of each of the two queues of a launch; 0 between launches."""

DONE = tl.constexpr(48)
"""The number of programs of the running launch that draw no more tickets; 0 between launches."""

CTL_WORDS = tl.constexpr(16 + 2 * 64)

COUNTERS = tl.constexpr(1024 * 16)
"""int32 tile counters, one for each (chunk, destination); 0 between launches."""

# The failure record: int64 words, STATE written last.
STATE = tl.constexpr(0)
RECORD_RANK = tl.constexpr(1)
RECORD_PEER = tl.constexpr(2)
RECORD_CHUNK = tl.constexpr(3)
RECORD_SLOT = tl.constexpr(4)
RECORD_EXPECTED = tl.constexpr(5)
RECORD_SEEN = tl.constexpr(6)
RECORD_WORDS = tl.constexpr(16)

TIMEOUT = tl.constexpr(1)
"""STATE and POISON code: a wait expired."""

DIVERGED = tl.constexpr(2)
"""STATE and POISON code: the right epoch, another site's hash."""

# The buffer of events of traced kernels: int64 words, two and then EVENT_WORDS for each event.
EVENTS_COUNT = tl.constexpr(0)
"""The number of events so far, including those that found no place."""

EVENTS_CAPACITY = tl.constexpr(1)
"""The number of events that the buffer can hold."""

EVENTS = tl.constexpr(8)
"""The first word of the first event."""

EVENT_WORDS = tl.constexpr(8)
EVENT_BEGIN = tl.constexpr(0)
EVENT_END = tl.constexpr(1)
EVENT_KIND = tl.constexpr(2)
EVENT_USE = tl.constexpr(3)
"""The site and the epoch, as in a flag word."""

EVENT_PROGRAM = tl.constexpr(4)
"""The program, and above EVENT_PROGRAM_BITS the number of programs of its launch."""

EVENT_SM = tl.constexpr(5)
EVENT_DETAIL = tl.constexpr(6)
EVENT_PEER = tl.constexpr(7)
EVENT_PROGRAM_BITS = tl.constexpr(32)
