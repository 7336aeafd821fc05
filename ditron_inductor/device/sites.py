"""Names of sites as the 23-bit numbers that travel in flag words, equal on all ranks, and back."""

from __future__ import annotations

import hashlib
import time

import torch.distributed as dist

from ditron_inductor.device import slot_layout
from ditron_inductor.device.groups import Group
from ditron_inductor.errors import WorkspaceError

LOOKUP_TIMEOUT_S = 0.5


class SiteNames:
    """The numbers of the sites of one workspace. A site's number is a hash of its text. If two texts share a hash, the
    text that reached the store first keeps the number, and the other text takes its next hash. The store decides once,
    so all ranks agree without a meeting.
    """

    def __init__(self, group: Group, session_name: str) -> None:
        self._group = group
        self._store = group.store
        self._prefix = f"{session_name}/site"
        self._numbers: dict[str, int] = {}
        self._texts: dict[int, str] = {0: "(no call yet)"}

    def number(self, text: str) -> int:
        """Returns the number of site `text`, which is odd and in 3..2**23-1, see signals.Pointers. The site's first
        call needs one round trip to the store.
        """
        known = self._numbers.get(text)
        return known if known is not None else self._register(text)

    def _register(self, text: str) -> int:
        for attempt in range(64):
            digest = hashlib.blake2b(f"{attempt}:{text}".encode(), digest_size=8).digest()
            number = int.from_bytes(digest, "little") & slot_layout.SITE_MASK | 1
            if number == 1:
                continue
            try:
                owner = self._store.compare_set(f"{self._prefix}/{number}", "", text).decode()
            except dist.DistError as exc:
                raise WorkspaceError(
                    group_name=self._group.name,
                    problem=f"cannot take up site '{text}': the store of the group cannot be reached",
                    remedy="The process that hosts the store, usually rank 0, has probably ended",
                ) from exc
            self._texts[number] = owner
            if owner == text:
                self._numbers[text] = number
                return number
        raise AssertionError("64 site hashes in a row were taken")

    def text(self, number: int, timeout_s: float = LOOKUP_TIMEOUT_S) -> str:
        """Returns the text of a site of any rank, and never fails: a number that no rank posted in time stays one."""
        deadline = time.monotonic() + timeout_s
        key = f"{self._prefix}/{number}"
        while number not in self._texts:
            try:
                if self._store.check([key]):
                    self._texts[number] = self._store.get(key).decode()
                    break
            except RuntimeError:
                return f"#{number:06x} (its name is lost with the store)"
            if time.monotonic() >= deadline:
                return f"#{number:06x} (posted by no rank)"
            time.sleep(0.01)
        return self._texts[number]
