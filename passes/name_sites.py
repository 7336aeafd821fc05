"""Gives every Task node its site: the name that flags carry, that errors print and that all ranks agree on.

    matmul_all_reduce(.., site="")  ->  matmul_all_reduce(.., site="3f9c01ab/2:matmul_all_reduce")

A site is `region/index:kind`. The region is a hash of the graph's chain of launches, and of nothing else: kinds,
dimensions, reduce ops, dtypes, world sizes. Those are equal on all ranks. Shapes are not part of it (one rank may
compile a graph with a symbol where another has a number, and DTensor shards unevenly), nor are group names (the ranks
of a tensor-parallel group are in different data-parallel groups), nor anything of nodes that are no launch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes import rewriting
from ditron_inductor.passes.order_collectives import Match, find_chain
from ditron_inductor.passes.proofs import arguments
from ditron_inductor.task.all_gather_attention import AllGatherAttention, AttentionReduceScatter
from ditron_inductor.task.nodes import (
    AllGatherContract,
    AllGatherMatmul,
    AllReduceRmsNorm,
    AllToAllMatmul,
    AttentionNode,
    FlashDecode,
    MatmulAllGather,
    MatmulAllReduce,
    MatmulAllReduceRmsNorm,
    MatmulAllToAll,
    MatmulReduceScatter,
    NormNode,
    ShardNorm,
    TaskNode,
    WithEpilogue,
)
from ditron_inductor.task.ops import node_from_call

SITE_ARGUMENT = "site"


def find_sites(graph: fx.Graph) -> tuple[str, list[fx.Node]]:
    """(region, the Task nodes in graph order)."""
    chain = find_chain(graph)
    return region_of(chain), [match.node for match in chain if match.is_task]


def region_of(chain: Sequence[Match]) -> str:
    """Eight hex digits over the facts of the launches that are equal on all ranks."""
    facts = "\n".join(_facts(match) for match in chain)
    return hashlib.sha256(facts.encode()).hexdigest()[:8]


def rewrite(node: fx.Node, site: str) -> None:
    """Write `site` into the arguments of a Task node."""
    rewriting.set_argument(node, SITE_ARGUMENT, site)


def name_sites(graph: fx.Graph, *, options: Options) -> int:
    """Name all sites of `graph`; returns how many names changed."""
    region, nodes = find_sites(graph)
    changed = 0
    for index, node in enumerate(nodes):
        task = node_from_call(node.target, node.args)
        site = f"{region}/{index}:{task.kind}"
        if task.site != site:
            rewrite(node, site)
            changed += 1
    return changed


def _facts(match: Match) -> str:
    target = match.node.target
    assert isinstance(target, torch._ops.OpOverload)
    dtype = _dtype(match.node)
    if not match.is_task:
        return f"{target} {arguments(match.node).get('reduce_op', '')} {dtype}"
    return f"{_task_facts(node_from_call(target, match.node.args))} {dtype}"


def _task_facts(task: TaskNode) -> str:
    match task:
        case AllGatherMatmul():
            own = f"{task.gather_dim} {task.num_weights} {task.return_gathered}{_epilogue_facts(task)}"
            own += f" {_norm_facts(task.prologue)}" if task.prologue is not None else ""
        case MatmulReduceScatter():
            own = f"{task.scatter_dim} {task.reduce_op} {task.num_products} {task.has_bias}{_epilogue_facts(task)}"
        case MatmulAllReduce():
            own = f"{task.reduce_op} {task.num_products} {task.has_bias}{_epilogue_facts(task)}"
        case AllReduceRmsNorm():
            own = f"{task.reduce_op} {_norm_facts(task)}"
        case MatmulAllReduceRmsNorm():
            products = f"{task.num_products} {task.has_bias}{_epilogue_facts(task)}"
            own = f"{task.reduce_op} {products} {_norm_facts(task)}"
        case MatmulAllGather():
            own = f"{task.gather_dim} {task.num_products} {task.has_bias}"
        case FlashDecode():
            own = f"{task.scale} {task.softcap} {task.paged}"
        case AllGatherAttention():
            # An offset is one rank's alone.
            own = f"{task.mask.name} {task.scale:g}{_softcap_facts(task)} {task.return_gathered}"
        case AttentionReduceScatter():
            own = f"{task.mask.name} {task.scale:g}{_softcap_facts(task)}"
        case AllGatherContract():
            own = f"{task.gather_dim} {task.gathered_first} {task.num_factors} {task.return_gathered}"
        case MatmulAllToAll():
            own = f"{task.gather_dim} {task.parts} {task.num_products} {task.has_bias}"
        case AllToAllMatmul():
            own = f"{task.scatter_dim} {task.parts} {task.return_received}"
    return f"{task.kind} {own} {task.world_size}"


def _softcap_facts(task: AttentionNode) -> str:
    """It decides which strategies are fast."""
    return f" {task.softcap:g}" if task.softcap else ""


def _epilogue_facts(task: WithEpilogue | MatmulAllReduceRmsNorm) -> str:
    """An epilogue decides, with the sizes, which strategy runs."""
    return f" {task.epilogue}" if task.epilogue else ""


def _norm_facts(task: NormNode | ShardNorm) -> str:
    """Without what is saved, which concerns no other rank."""
    post = "" if task.post is None else f" {task.post.text()}"
    return f"{task.norm.text()}{post} {'+'.join(task.extras)}"


def _dtype(node: fx.Node) -> str:
    for given in node.all_input_nodes:
        value = given.meta.get("val")
        if isinstance(value, torch.Tensor):
            return str(value.dtype)
    return ""
