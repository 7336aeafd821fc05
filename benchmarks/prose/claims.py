"""A claim: a piece of a page's text, and the numbers in it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

NUMBER = r"(-?\d+(?:\.\d+)?)"


@dataclass(frozen=True)
class Claim:
    """`text`, which stands once in a page, however its lines are broken, with `numbers` for each `{}` in it."""

    text: str
    numbers: tuple[str, ...]

    @property
    def pattern(self) -> re.Pattern[str]:
        words = [re.escape(word).replace(r"\{\}", NUMBER) for word in self.text.split()]
        return re.compile(r"\s+".join(words))

    def match(self, page: str) -> re.Match[str]:
        """Where it stands. ValueError unless that is one place."""
        found = list(self.pattern.finditer(page))
        if len(found) != 1:
            raise ValueError(f"the page has {len(found)} times, not once: {self.text}")
        return found[0]

    def put_into(self, page: str) -> str:
        """The page with these numbers."""
        found = self.match(page)
        ends = [found.start(), *(place for group in range(1, len(self.numbers) + 1) for place in found.span(group))]
        kept = [page[begin:end] for begin, end in list(pairwise(ends))[::2]]
        return page[: found.start()] + "".join(map("".join, zip(kept, self.numbers, strict=True))) + page[ends[-1] :]


def with_claims(page: str, claims: Iterable[Claim]) -> str:
    """The page with the numbers of all claims."""
    for claim in claims:
        page = claim.put_into(page)
    return page


def percent(ratio: float) -> str:
    """How far a ratio is from 1, in whole per cent."""
    return f"{abs(100 * (ratio - 1)):.0f}"


def slower(gain: float | None) -> str:
    """By how many per cent Ditron is slower. gain: how many times as fast it is. ValueError if it is not slower."""
    return _said("slower", gain, gain is not None and gain < 1)


def faster(gain: float | None) -> str:
    """By how many per cent Ditron is faster. gain: how many times as fast it is. ValueError if it is not faster."""
    return _said("faster", gain, gain is not None and gain > 1)


def _said(text: str, gain: float | None, holds: bool) -> str:
    if gain is None or not holds:
        raise ValueError(f"the prose says {text}, and Ditron is {gain} times as fast: write the sentence anew")
    return percent(gain)


def numbers(values: Iterable[float], digits: int = 0, per: float = 1.0) -> tuple[str, ...]:
    """Returns values as a page has them. per: what they are divided by, such as 1000 for milliseconds."""
    return tuple(f"{value / per:.{digits}f}" for value in values)


def span(values: Iterable[float | None], digits: int = 2) -> tuple[str, str]:
    """The least and the most of those that there are."""
    known = [value for value in values if value is not None]
    return f"{min(known):.{digits}f}", f"{max(known):.{digits}f}"


def ends(values: Iterable[float | None]) -> tuple[float, float]:
    known = [value for value in values if value]
    return min(known), max(known)
