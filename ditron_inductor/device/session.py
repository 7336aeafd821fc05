"""Meetings of all ranks of a group on the host, through its c10d store. They are bounded in time and name the missing
ranks.

Only the control plane uses them: a group's first use, new options, growth, reset. The store outlives groups and may
hold keys of an earlier group of the same name, of ranks that died, or of a meeting that half of the ranks gave up. So a
meeting never trusts a key because it is there:

* `meet` draws a fresh random nonce per rank and ends only when every rank has shown every other that it knows the
  other's nonce. Keys that an earlier group left in the store cannot know it. The nonces together name the `Session`.
* `Session.all_gather` works on keys under that name, which nobody used before, which all ranks count in the same
  sequence.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from typing import Any

import torch.distributed as dist

from ditron_inductor.device.groups import Group
from ditron_inductor.errors import DitronDiverged, DitronHandshakeError

FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.02


class _Waiting:
    """The deadline and the growing pauses of one meeting, and its JSON values in the group's store. A store that cannot
    be reached is a handshake error, not a socket error.
    """

    def __init__(self, group: Group, purpose: str, timeout_s: float) -> None:
        self.group = group
        self.purpose = purpose
        self.began = time.monotonic()
        self.deadline = self.began + timeout_s
        self.pause_s = FIRST_PAUSE_S

    def pause(self, missing: list[int]) -> None:
        """Sleeps a little. Raises DitronHandshakeError, which names the `missing` group ranks, when the time is up."""
        if time.monotonic() >= self.deadline:
            raise self.error(_names(self.group, missing))
        time.sleep(self.pause_s)
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)

    def error(self, missing: str) -> DitronHandshakeError:
        """Returns the error that says how long the meeting has lasted, which a busy machine or a lost store may make
        longer or shorter than its limit.
        """
        return DitronHandshakeError(
            group_name=self.group.name,
            rank=self.group.rank,
            seconds=time.monotonic() - self.began,
            purpose=self.purpose,
            missing=missing,
        )

    def put(self, key: str, value: Any) -> None:
        try:
            self.group.store.set(key, json.dumps(value))
        except dist.DistError as exc:
            raise self._unreachable(exc) from exc

    def look(self, key: str) -> Any:
        """Returns the value of `key`, or None if there is none yet. It never blocks."""
        store = self.group.store
        try:
            return json.loads(store.get(key)) if store.check([key]) else None
        except dist.DistError as exc:
            raise self._unreachable(exc) from exc

    def _unreachable(self, exc: Exception) -> DitronHandshakeError:
        reason = str(exc).splitlines()[0]
        return self.error(f"the store of the group, which lives in another rank's process ({reason})")


def _names(group: Group, ranks: list[int]) -> str:
    names = []
    for rank in ranks:
        same = group.global_ranks[rank] == rank
        names.append(f"rank {rank}" if same else f"rank {rank} (global rank {group.global_ranks[rank]})")
    return ", ".join(names)


class Session:
    """All ranks of `group`, which met under `name`. Every rank makes the same `all_gather` calls in the same order."""

    def __init__(self, group: Group, name: str) -> None:
        self.group = group
        self.name = name
        self._sequence = 0

    def next_place(self) -> str:
        """Returns the name of the next `all_gather`, which is equal on all ranks and used only once."""
        return f"{self.name}/{self._sequence}"

    def all_gather(self, purpose: str, value: Any, timeout_s: float) -> list[Any]:
        """The JSON `value` of every rank, by group rank; returns only when all have come.

        `purpose` completes the phrase "waited to ..". Raises DitronHandshakeError, which names the ranks that did not
        come within `timeout_s`, and DitronDiverged if a rank came for another purpose. After either error the session
        cannot be used any more.
        """
        waiting = _Waiting(self.group, purpose, timeout_s)
        place = self.next_place()
        self._sequence += 1
        waiting.put(f"{place}/{self.group.rank}", {"purpose": purpose, "value": value})
        answers: dict[int, Any] = {}
        while True:
            for rank in range(self.group.world_size):
                if rank in answers:
                    continue
                answer = waiting.look(f"{place}/{rank}")
                if answer is None:
                    continue
                if answer["purpose"] != purpose:
                    raise DitronDiverged(rank=self.group.rank, site=purpose, peer=rank, peer_site=answer["purpose"])
                answers[rank] = answer["value"]
            missing = [rank for rank in range(self.group.world_size) if rank not in answers]
            if not missing:
                return [answers[rank] for rank in range(self.group.world_size)]
            waiting.pause(missing)


def meet(group: Group, topic: str, purpose: str, timeout_s: float) -> Session:
    """Brings all ranks of `group` together and opens a session that no earlier meeting has used.

    It works whatever the ranks did before. Each call starts from a new nonce, and a rank that gave up and comes back is
    met under its newest nonce. Raises DitronHandshakeError, which names the ranks that did not answer within
    `timeout_s`.
    """
    waiting = _Waiting(group, purpose, timeout_s)
    nonce = uuid.uuid4().hex
    ranks = range(group.world_size)
    posted: dict[str, Any] = {"nonce": nonce, "seen": [""] * group.world_size, "name": ""}
    waiting.put(f"{topic}/{group.rank}", posted)
    while True:
        hellos = [posted if rank == group.rank else waiting.look(f"{topic}/{rank}") for rank in ranks]
        seen = [nonce if rank == group.rank else hello["nonce"] if hello else "" for rank, hello in enumerate(hellos)]
        strangers = [
            rank
            for rank, hello in enumerate(hellos)
            if rank != group.rank and (hello is None or hello["seen"][group.rank] != nonce)
        ]
        name = "" if strangers else hashlib.blake2b("".join(seen).encode(), digest_size=12).hexdigest()
        update = {"nonce": nonce, "seen": seen, "name": name}
        if update != posted:
            posted = update
            waiting.put(f"{topic}/{group.rank}", posted)
            hellos[group.rank] = posted
        undecided = [rank for rank, hello in enumerate(hellos) if hello is None or not name or hello["name"] != name]
        if not undecided:
            break
        waiting.pause(strangers or undecided)
    session = Session(group, name)
    # Nobody may start the next meeting on this topic, which overwrites its answer here, before all have read it.
    session.all_gather(purpose, None, timeout_s)
    return session
