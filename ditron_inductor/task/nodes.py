"""The node kinds of the Task level: frozen dataclasses that know their fields, their legality and their text.

A node holds everything that a site needs at run time, except its tensors: a cached graph skips every pass, so
nothing may be looked up elsewhere. `verify()` raises `InvalidTaskNode` naming the field. `text()` is one line
that never changes for equal nodes: tests and `explain` compare and print it.
"""

from __future__ import annotations

from ditron_inductor.task.all_gather_attention import AllGatherAttention as AllGatherAttention
from ditron_inductor.task.all_gather_attention import AttentionReduceScatter as AttentionReduceScatter
from ditron_inductor.task.decode_node import FlashDecode as FlashDecode
from ditron_inductor.task.matmul_nodes import MAX_PRODUCTS as MAX_PRODUCTS
from ditron_inductor.task.matmul_nodes import MOST_PROJECTED_ROWS as MOST_PROJECTED_ROWS
from ditron_inductor.task.matmul_nodes import REDUCE_OPS as REDUCE_OPS
from ditron_inductor.task.matmul_nodes import AllGatherMatmul as AllGatherMatmul
from ditron_inductor.task.matmul_nodes import AllToAllMatmul as AllToAllMatmul
from ditron_inductor.task.matmul_nodes import MatmulAllGather as MatmulAllGather
from ditron_inductor.task.matmul_nodes import MatmulAllReduce as MatmulAllReduce
from ditron_inductor.task.matmul_nodes import MatmulAllToAll as MatmulAllToAll
from ditron_inductor.task.matmul_nodes import MatmulReduceScatter as MatmulReduceScatter
from ditron_inductor.task.matmul_nodes import Projections as Projections
from ditron_inductor.task.matmul_nodes import SummedMatmul as SummedMatmul
from ditron_inductor.task.matmul_nodes import WithEpilogue as WithEpilogue
from ditron_inductor.task.node import Node
from ditron_inductor.task.norm_nodes import AllReduceRmsNorm as AllReduceRmsNorm
from ditron_inductor.task.norm_nodes import MatmulAllReduceRmsNorm as MatmulAllReduceRmsNorm
from ditron_inductor.task.norm_nodes import ReductionWithNorm as ReductionWithNorm
from ditron_inductor.task.norms import AS_SUM as AS_SUM
from ditron_inductor.task.norms import EXTRAS as EXTRAS
from ditron_inductor.task.norms import MOST_NORM_COLUMNS as MOST_NORM_COLUMNS
from ditron_inductor.task.norms import NO_NORM as NO_NORM
from ditron_inductor.task.norms import NORMS as NORMS
from ditron_inductor.task.norms import SAVED as SAVED
from ditron_inductor.task.norms import SHARD_EXTRAS as SHARD_EXTRAS
from ditron_inductor.task.norms import SHARD_SAVED as SHARD_SAVED
from ditron_inductor.task.norms import Norm as Norm
from ditron_inductor.task.norms import ShardNorm as ShardNorm
from ditron_inductor.task.norms import by_names as by_names
from ditron_inductor.task.norms import norm_returns as norm_returns
from ditron_inductor.task.policy import STRATEGIES as STRATEGIES
from ditron_inductor.task.policy import Policy as Policy

MatmulNode = AllGatherMatmul | MatmulReduceScatter | MatmulAllReduce | MatmulAllGather
NormNode = AllReduceRmsNorm | MatmulAllReduceRmsNorm
UlyssesNode = MatmulAllToAll | AllToAllMatmul
AttentionNode = AllGatherAttention | AttentionReduceScatter
TaskNode = MatmulNode | NormNode | UlyssesNode | FlashDecode | AttentionNode
KINDS: tuple[str, ...] = (
    AllGatherMatmul.kind,
    MatmulReduceScatter.kind,
    MatmulAllReduce.kind,
    MatmulAllGather.kind,
)
"""The kinds that fuse a collective with matmuls alone. Tables and benchmarks of matmuls know these."""
NORM_KINDS: tuple[str, ...] = (AllReduceRmsNorm.kind, MatmulAllReduceRmsNorm.kind)
ULYSSES_KINDS: tuple[str, ...] = (MatmulAllToAll.kind, AllToAllMatmul.kind)
ATTENTION_KINDS: tuple[str, ...] = (AllGatherAttention.kind, AttentionReduceScatter.kind)
PLANNED_KINDS: tuple[str, ...] = (*KINDS, AllReduceRmsNorm.kind, *ULYSSES_KINDS, *ATTENTION_KINDS)
"""The kinds that have times of their own in tables. A norm behind a matmul costs all strategies the same."""
TASK_KINDS: tuple[str, ...] = (*KINDS, *NORM_KINDS, *ULYSSES_KINDS, FlashDecode.kind, *ATTENTION_KINDS)
"""All kinds of Task nodes."""
DELETED_KINDS: dict[str, str] = {
    "all_gather_contract": "deleted, as it was no faster than the library: 0.995 of its speed, the mean of 12 rows",
}
"""Kinds that were deleted, with the reason, for users who still ask for one (see docs/deleted.md)."""
NODES: dict[str, type[Node]] = {
    node.kind: node
    for node in (
        AllGatherMatmul,
        MatmulReduceScatter,
        MatmulAllReduce,
        MatmulAllGather,
        AllReduceRmsNorm,
        MatmulAllReduceRmsNorm,
        MatmulAllToAll,
        AllToAllMatmul,
        FlashDecode,
        AllGatherAttention,
        AttentionReduceScatter,
        Projections,
    )
}
"""The declarations by kind: those of all Task nodes, and of `projections`, which is no site."""
COMPILED_BY_US = "ditron_compiled_by_us"
"""The key in a graph node's `meta` which says that our passes take part in its compilation, so that they are a part of
the key under which its code is cached.
"""
