"""Masks that a graph computes: what is read of one is what the graph computes, in the ways that programs write them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from ditron_inductor.passes.attention.masks import UnknownMask
from ditron_inductor.passes.attention.shown_masks import read_mask
from ditron_inductor.task.attention_masks import Mask
from ditron_inductor.task.reference_attention import visible

ROWS, KEYS = 6, 24
RANKS, HALF = KEYS // ROWS, ROWS // 2
LEAST = torch.finfo(torch.float32).min


def read(form: Callable[..., torch.Tensor], *args: torch.Tensor) -> Mask:
    """In the ops that the compiler leaves of a mask."""
    graph = make_fx(lambda *given: form(*given), decomposition_table=select_decomp_table(), tracing_mode="fake")(
        *args
    ).graph
    (node,) = graph.find_nodes(op="output")[0].args
    shown = read_mask(node, ROWS, KEYS)
    assert shown.ranks == (RANKS if shown.mask.kind == "zigzag_keys" else 0)
    return shown.mask


def ahead(offset: int) -> torch.Tensor:
    return torch.arange(ROWS)[:, None] + offset - torch.arange(KEYS)


def compared(offset: int, window: int) -> torch.Tensor:
    found = ahead(offset)
    return (found >= 0) & (found < window)


def banned(offset: int, window: int) -> torch.Tensor:
    """Of the positions of a rank, what is not seen."""
    rows, keys = torch.arange(offset, offset + ROWS), torch.arange(KEYS)
    hidden = (keys[None] > rows[:, None]) | (keys[None] <= rows[:, None] - window)
    return torch.zeros(ROWS, KEYS).masked_fill(hidden, -math.inf)


def triangles(offset: int, window: int) -> torch.Tensor:
    whole = torch.ones(KEYS, KEYS, dtype=torch.bool).tril().triu(1 - window)
    return whole[offset : offset + ROWS].expand(2, 1, ROWS, KEYS)


def summed(offset: int, window: int) -> torch.Tensor:
    late, early = (torch.full((KEYS, KEYS), LEAST) for _ in range(2))
    return (late.triu(1) + early.tril(-window))[None, None, offset : offset + ROWS]


def multiplied(offset: int, window: int) -> torch.Tensor:
    found = torch.full((ROWS, KEYS), LEAST)
    return found * ~compared(offset, window)


def in_floats(offset: int, window: int) -> torch.Tensor:
    both = torch.tril(torch.ones(KEYS, KEYS)) * torch.triu(torch.ones(KEYS, KEYS), 1 - window)
    return both[offset : offset + ROWS] == 1


def gathered(offset: int, window: int) -> torch.Tensor:
    """As Hugging Face writes one: positions by index, and sequences told apart by jumps of the position, of which there
    are none.
    """
    positions = torch.arange(KEYS)[None].expand(2, -1)
    jumps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    sequence = (jumps != 1).cumsum(-1)
    batch = torch.arange(2)[:, None, None, None]
    rows = (torch.arange(ROWS) + offset)[None, None, :, None]
    keys = torch.arange(KEYS)[None, None, None, :]
    row, key = positions[batch, rows], positions[batch, keys]
    seen = torch.ones((), dtype=torch.bool) & (key > row - window) & (key <= row)
    return seen & (sequence[batch, rows] == sequence[batch, keys])


def padded(offset: int, window: int) -> torch.Tensor:
    """As the memory-efficient kernel takes one: with memory for a multiple of 8 keys."""
    seen = torch.where(compared(offset, window), 0.0, -math.inf)
    return torch.constant_pad_nd(seen, [0, 8])[:, :KEYS].unsqueeze(0).expand(2, ROWS, KEYS)


FORMS = (compared, banned, triangles, summed, multiplied, in_floats, gathered, padded)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize(("offset", "window"), [(0, 1), (6, 4), (18, 100)])
def test_windows_are_read(form: Callable[..., torch.Tensor], offset: int, window: int) -> None:
    mask = read(lambda: form(offset, window))
    assert (mask.kind, mask.offset) == ("causal", offset)
    assert mask.window == window
    made = form(offset, window)
    seen = visible(mask, 0, 1, ROWS, KEYS, torch.device("cpu"))
    assert seen is not None
    assert torch.equal(made if made.dtype == torch.bool else made == 0, seen.expand_as(made))


def test_long_windows() -> None:
    """A bound beyond 64 bits hides nothing: the window is as long as an op's argument can be."""
    assert read(lambda: compared(6, 2**40)) == Mask("causal", 2**40, 6)

    def form() -> torch.Tensor:
        return (ahead(6) >= 0) & (torch.arange(ROWS)[:, None] - 2**62 < torch.arange(KEYS) + 2**62 + 5)

    assert read(form) == Mask("causal", 2**63 - 1, 6)


@pytest.mark.parametrize(
    "form",
    [
        lambda: ahead(6) >= 0,
        lambda: ~(ahead(6) < 0),
        lambda: torch.where(ahead(6).int() > -1, 0.0, -math.inf).to(torch.bfloat16),
        lambda: torch.ones(ROWS, KEYS).tril(6).bool(),
        lambda: (ahead(6) >= 0) & (ahead(6) > -3),
        # Gemma's number; the least one of another dtype.
        lambda: torch.where(ahead(6) >= 0, 0.0, -2.3819763e38),
        lambda: torch.where(ahead(6) >= 0, 0.0, torch.finfo(torch.bfloat16).min),
        lambda: (torch.arange(KEYS).neg() + 6 + torch.arange(ROWS).view(ROWS, 1)).ge(0),
    ],
)
def test_no_window(form: Callable[[], torch.Tensor]) -> None:
    assert read(form) == Mask("causal", 0, 6)


def test_everything_is_seen() -> None:
    for form in (lambda: torch.zeros(ROWS, KEYS), lambda: torch.ones(ROWS, KEYS, dtype=torch.bool)):
        assert read(form) == Mask("full")


def of_chunks(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions of a rank's rows, and of all keys, in zig-zag order."""
    chunks = torch.arange(KEYS).chunk(2 * RANKS)
    own = [torch.cat((chunks[one], chunks[2 * RANKS - 1 - one])) for one in range(RANKS)]
    return own[rank], torch.cat(own)


def of_ranges(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    starts = [(one * HALF, (2 * RANKS - 1 - one) * HALF) for one in range(RANKS)]
    own = [torch.cat([torch.arange(HALF, dtype=torch.int32) + start for start in both]) for both in starts]
    return own[rank], torch.stack(own).flatten()


def chosen(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    row, key = torch.arange(ROWS), torch.arange(KEYS)
    source, inside = key // ROWS, key % ROWS
    rows = torch.where(row < HALF, rank * HALF + row, (2 * RANKS - 2 - rank) * HALF + row)
    return rows, torch.where(inside < HALF, source, 2 * RANKS - 2 - source) * HALF + inside


def started(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    row = torch.arange(ROWS)
    return row + torch.where(row >= HALF, 2 * RANKS - 2 - rank, rank) * HALF, of_chunks(rank)[1]


def looked_up(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys = of_chunks(rank)[1]
    return keys[rank * ROWS + torch.arange(ROWS)], keys


@pytest.mark.parametrize("window", [0, 1, 5, 100])
@pytest.mark.parametrize("form", [of_chunks, of_ranges, chosen, started, looked_up])
def test_zigzag(form: Callable[[int], tuple[torch.Tensor, torch.Tensor]], window: int) -> None:
    """The ranks differ in where their rows stand alone."""

    def seen(rank: int) -> torch.Tensor:
        rows, keys = form(rank)
        ahead = rows[:, None] >= keys
        return ahead & (rows[:, None] - keys < window) if window else ahead

    for rank in range(RANKS):
        mask = read(functools.partial(seen, rank))
        jumps = f"{HALF}+{2 * (RANKS - 1 - rank) * HALF}" if rank < RANKS - 1 else ""
        assert mask == Mask("zigzag_keys", window, rank * HALF, jumps)
        mask.verify("")
        shown = visible(mask, rank, RANKS, ROWS, KEYS // RANKS, torch.device("cpu"))
        assert shown is not None and torch.equal(shown, seen(rank))


def test_rows_anywhere() -> None:
    """Rows that jump beside keys that do not, and keys in zig-zag order beside rows that do not, or often."""

    def form(starts: tuple[int, ...], zigzag: bool) -> torch.Tensor:
        rows = torch.cat([torch.arange(start, start + 2) for start in starts])
        return rows[:, None] >= (of_chunks(0)[1] if zigzag else torch.arange(KEYS))

    for starts, jumps in (((3, 18, 5), "2+13 4-15"), ((7, 9, 11), ""), ((4, 6, 0), "4-8")):
        for zigzag in (False, True):
            mask = read(functools.partial(form, starts, zigzag))
            assert mask == Mask("zigzag_keys" if zigzag else "causal", 0, starts[0], jumps)
            seen = visible(mask, 2, RANKS, ROWS, KEYS // RANKS, torch.device("cpu"))
            assert seen is not None and torch.equal(seen, form(starts, zigzag))


@pytest.mark.parametrize(
    "keys",
    [
        lambda: of_chunks(0)[1].flip(0),
        lambda: torch.cat(torch.arange(KEYS).chunk(RANKS)[::-1]),
        lambda: torch.cat((torch.arange(4), of_chunks(0)[1][4:])),
        lambda: torch.arange(KEYS).view(ROWS, RANKS).t().flatten(),
        lambda: of_chunks(0)[1] // 2,
        lambda: of_chunks(0)[1] % 20,
    ],
)
def test_other_orders_of_keys(keys: Callable[[], torch.Tensor]) -> None:

    def form(rank: int) -> torch.Tensor:
        return of_chunks(rank)[0][:, None] >= keys()

    for rank in (0, RANKS - 1):
        with pytest.raises(UnknownMask):
            read(functools.partial(form, rank))


@pytest.mark.parametrize(
    "form",
    [
        # A prefix; a window that is not causal; blocks; other rows; nothing; too small a number; a bias that counts.
        lambda: (ahead(6) >= 0) | (torch.arange(KEYS) < 2),
        lambda: ahead(6) < 5,
        lambda: (ahead(6) >= 0) & (torch.arange(ROWS)[:, None] // 2 == torch.arange(KEYS) // 2),
        lambda: (ahead(6) >= 0) & (torch.arange(ROWS)[:, None] > 0),
        lambda: torch.zeros(ROWS, KEYS, dtype=torch.bool),
        lambda: (ahead(6) >= 0) & (ahead(6) < 0),
        lambda: torch.where(ahead(6) >= 0, 0.0, -1.0),
        lambda: torch.where(ahead(6) >= 0, 0.0, -1e9),
        lambda: torch.where(ahead(6) >= 0, 0.0, -60000.0).half(),
        lambda: torch.where(ahead(6) >= 0, 1.0, -math.inf),
        lambda: ahead(6).float(),
        lambda: torch.where(2 * torch.arange(ROWS)[:, None] >= torch.arange(KEYS), 0.0, -math.inf),
        # Integers that wrap, or are cut off; numbers that are not what they were.
        lambda: (ahead(6) >= 0) & (6 + torch.arange(ROWS)[:, None] < torch.arange(KEYS) + 2**63 - 1),
        lambda: (torch.arange(ROWS)[:, None] + 2**32 + 6).int() >= torch.arange(KEYS),
        lambda: torch.arange(ROWS, dtype=torch.uint8)[:, None] + 6 - torch.arange(KEYS, dtype=torch.uint8) >= 0,
        lambda: (ahead(6) >= 0) & (torch.arange(KEYS, dtype=torch.int32) * 2**30 >= 0),
        lambda: torch.where(ahead(6) >= 0, 0.1, -1.0).to(torch.bfloat16) != 0.1,
        # Infinity times 0; the padding, with the keys moved.
        lambda: torch.full((ROWS, KEYS), -math.inf) * (ahead(6) < 0),
        lambda: torch.constant_pad_nd(torch.where(ahead(6) >= 0, 0.0, -math.inf), [0, 8])[:, 8:],
        # Rows that see nothing, by a finite number: they see everything.
        lambda: torch.where(ahead(-2) >= 0, 0.0, LEAST),
        lambda: torch.rand(ROWS, KEYS) > 0.5,
    ],
)
def test_unknown(form: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(UnknownMask):
        read(form)


@pytest.mark.parametrize(
    "form",
    [
        # The last rows, which nobody needs; chunks and the one in front; causal blocks beside a causal mask.
        lambda row, key: (row >= key) & (row < KEYS - 2),
        lambda row, key: (row >= key) & (row // ROWS - key // ROWS < 2),
        lambda row, key: (row >= key) & (row // ROWS >= key // ROWS),
        # Strictly causal: the first row of all sees nothing, and by a finite number everything.
        lambda row, key: torch.where(row > key, 0.0, LEAST),
    ],
)
def test_what_one_rank_cannot_prove_none_does(form: Callable[..., torch.Tensor]) -> None:
    """It holds on some ranks, and those would wait for the others."""

    def seen(rank: int) -> torch.Tensor:
        return form(rank * ROWS + torch.arange(ROWS)[:, None], torch.arange(KEYS))

    for rank in range(RANKS):
        with pytest.raises(UnknownMask):
            read(functools.partial(seen, rank))


def test_an_input_is_named() -> None:
    with pytest.raises(UnknownMask) as raised:
        read(lambda given: (ahead(6) >= 0) & given[:, :KEYS], torch.ones(ROWS, 2 * KEYS, dtype=torch.bool))
    assert raised.value.node.op == "placeholder"
