"""Prepares a call of `flash_decode`, as lowering/host/prepare.py does for the other ops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ditron_inductor.lowering.flash_decode import library, tile
from ditron_inductor.lowering.flash_decode.local_decode import DecodeOperands, shape_of
from ditron_inductor.lowering.host.chosen import Chosen
from ditron_inductor.lowering.host.planning import launch_of, name_of, plan_request, requirement
from ditron_inductor.lowering.host.prepare import begun
from ditron_inductor.lowering.host.prepared import Prepared, PreparedCalls
from ditron_inductor.lowering.host.trials import choose_both
from ditron_inductor.task import flash_decode as task
from ditron_inductor.task.nodes import FlashDecode
from ditron_inductor.task.problem import Problem, Requirement
from ditron_inductor.task.torch_dtypes import precision_of

Runner = Callable[..., torch.Tensor]


def prepare(
    calls: PreparedCalls, key: Hashable, node: FlashDecode, operands: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    """Returns what runs a call, kept under `key`. The query alone decides, as caches differ between ranks."""
    given = DecodeOperands(*node.split(operands))
    node.verify()
    task.check_operands(given.q, given.k, given.v, given.lengths, given.block_table)
    device, (batch, query_heads, head_dim) = given.q.device, given.q.shape
    sizes = batch, query_heads, given.k.shape[2], head_dim
    launch = launch_of(node, device, given.q.dtype, sizes)
    workspace = launch.workspace
    capabilities = workspace.capabilities
    shape = shape_of(node, given, capabilities.num_sms)
    runners: dict[str, Runner] = {"library": _of_tensors(library.make(node, shape, device, capabilities.arch))}
    eager = captured = Chosen(runners["library"])
    trial = None
    if shape.rows * shape.head_dim > 0:
        reason = capabilities.tile_reason or tile.obstacle(shape)
        wants = Requirement(reason=reason)
        if not reason:
            geometry = tile.geometry(node, launch, shape)
            wants = requirement(launch, geometry.nbytes)
            runners["tile"] = _of_tensors(functools.partial(tile.flash_decode, node, launch, geometry, shape))
        precision = precision_of(shape.dtype)
        problem = Problem(node.kind, shape.rows, shape.head_dim, 1, precision, node.world_size, captured=False)
        request = plan_request(launch, node, problem, tile=wants)
        eager, captured, trial = choose_both(workspace, node, sizes, request, runners)
    name = name_of(node)
    return begun(calls, key, Prepared(workspace, eager, captured, name, workspace.agreed(name), trial), launch)


def _of_tensors(run: Callable[[DecodeOperands], torch.Tensor]) -> Runner:
    """Returns `run` as a function of the tensors of a call."""
    return lambda *tensors: run(DecodeOperands(*tensors))
