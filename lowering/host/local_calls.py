"""Keeps what the calls of a node that communicates nothing have in common: no workspace, and no plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch

from ditron_inductor.device.capabilities import RankFacts, probe
from ditron_inductor.lowering.host.launch import is_tf32_allowed
from ditron_inductor.lowering.host.prepared import MOST_CALLS, form

N = TypeVar("N", bound=Any)


@functools.cache
def facts_of(device: torch.device) -> RankFacts:
    """Returns the facts of a device of this process, among them why kernels cannot run on it."""
    return probe(device)


class LocalCalls(Generic[N]):
    """The results of `prepare`, by the node and the forms of the operands. prepare: a function of the node, its
    operands as `node.split` returns them, and the node's strategy. It returns the function of such operands that runs
    these calls.
    """

    def __init__(self, prepare: Callable[..., Callable[..., list[torch.Tensor]]]) -> None:
        self._prepare = prepare
        self._known: dict[Hashable, Callable[..., list[torch.Tensor]]] = {}

    def __call__(self, node: N, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the outputs of a call. Raises `InvalidTaskNode` if the epilogue does not fit."""
        key = is_tf32_allowed(), node, *[form(operand) for operand in operands]
        given = node.split(operands)
        run = self._known.get(key)
        if run is None:
            if len(self._known) >= MOST_CALLS:
                self._known.clear()
            run = self._known[key] = self._prepare(node, *given, node.strategy)
        return run(*given)
