"""The claims of docs/guide/other_stacks.md."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.models.tables import contests
from benchmarks.prose.claims import Claim, span
from benchmarks.records import Row


def engines(models: Sequence[Row]) -> list[Claim]:
    """Returns the claims of docs/guide/other_stacks.md, on layers as vLLM writes them."""
    found = [one for one in contests(models) if one.model.endswith("-vllm")]

    def gains(gpu: str, phase: str, mixture: bool | None = None, over: str = "") -> tuple[str, ...]:
        those = [one for one in found if gpu in one.where[0] and one.phase == phase]
        those = [one for one in those if mixture is None or one.routed is mixture]
        return span(one.gain(over) if over else one.best_gain for one in those)

    return [
        Claim("decode is {} to {} times as fast as by the best rival", gains("H100", "decode", False)),
        Claim(
            "{} to {} times as fast as with one kernel for an all-reduce and its norm",
            gains("H100", "decode", False, "one_shot_norm"),
        ),
        Claim("those of a mixture of experts {} to {} times", gains("H100", "decode", True)),
        Claim("Prefill is {} to {} times as fast", gains("H100", "prefill")),
        Claim("dense models wins by factors of {} to {}", gains("H200", "decode", False)),
        Claim("and that of the mixture by {} to {}", gains("H200", "decode", True)),
    ]
