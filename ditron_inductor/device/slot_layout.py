"""Host side of the word layout in `ditron_inductor.core.layout`: sizes and offsets as plain integers."""

from __future__ import annotations

from ditron_inductor.core import layout as words

NUM_SLOTS: int = words.NUM_SLOTS.value
MAX_WORLD: int = words.MAX_WORLD.value
MAX_CHUNKS: int = words.MAX_CHUNKS.value
HEADER_BYTES: int = words.HEADER_BYTES.value
CTL_WORDS: int = words.CTL_WORDS.value
COUNTERS: int = words.COUNTERS.value
RECORD_WORDS: int = words.RECORD_WORDS.value
EPOCH_MASK: int = words.EPOCH_MASK.value
SITE_MASK: int = (1 << words.SITE_BITS.value) - 1

assert NUM_SLOTS * words.SLOT_WORDS.value == words.IN_BAND_SITES.value
assert (words.IN_BAND_SITES.value + words.IN_BAND_AREAS.value * MAX_WORLD) * 8 <= words.IN_BAND_DATA.value
assert words.IN_BAND_DATA.value + words.IN_BAND_AREAS.value * words.IN_BAND_BYTES.value == HEADER_BYTES
assert words.IN_BAND_LINES.value < words.SLOT_CTL.value
assert (MAX_CHUNKS + 1) * MAX_WORLD == words.SLOT_WORDS.value
assert words.REVOKED_ROW.value < MAX_CHUNKS == words.CREDIT_ROW.value
assert words.SLOT_CTL.value + NUM_SLOTS * words.SLOT_CTL_STRIDE.value == CTL_WORDS


def heap_bytes(slot_bytes: int) -> int:
    """Bytes of one rank's symmetric heap with slots of `slot_bytes`."""
    return HEADER_BYTES + NUM_SLOTS * slot_bytes


def data_offset(slot: int, slot_bytes: int) -> int:
    """Bytes from the heap's base to the data of `slot`."""
    return HEADER_BYTES + slot * slot_bytes


def slot_word(slot: int, word: int) -> int:
    """Index into `ctl` of a slot's control word (`EPOCH`, `DATA_OFFSET`, `SEND_TICKET`, `TILE_TICKET`, `DONE`)."""
    return words.SLOT_CTL.value + slot * words.SLOT_CTL_STRIDE.value + word


def is_behind(seen: int, epoch: int) -> bool:
    """Returns whether the epoch `seen` is before `epoch`, modulo the number of epochs, as kernels compare them."""
    return (seen - epoch) & EPOCH_MASK > EPOCH_MASK >> 1


def unpack(word: int) -> tuple[int, int]:
    """Returns (site hash, epoch) of a flag or credit word."""
    return word >> words.EPOCH_BITS.value & SITE_MASK, word & EPOCH_MASK
