"""The node kinds of the Task level: frozen dataclasses that know their fields, their legality and their text.

A node holds everything that a site needs at run time, except its tensors: a cached graph skips every pass, so
nothing may be looked up elsewhere. `verify()` raises `InvalidTaskNode` naming the field. `text()` is one line
that never changes for equal nodes: tests and `explain` compare and print it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ditron_inductor.task.attention_nodes import AllGatherAttention as AllGatherAttention
from ditron_inductor.task.attention_nodes import AttentionNode as AttentionNode
from ditron_inductor.task.attention_nodes import AttentionReduceScatter as AttentionReduceScatter
from ditron_inductor.task.decode_node import HEAD_DIMS as HEAD_DIMS
from ditron_inductor.task.decode_node import CachedAttention as CachedAttention
from ditron_inductor.task.decode_node import FlashDecode as FlashDecode
from ditron_inductor.task.exchange import Exchange
from ditron_inductor.task.expert_nodes import MOST_EXPERT_TOKENS as MOST_EXPERT_TOKENS
from ditron_inductor.task.expert_nodes import MOST_ORDERED_TOKENS as MOST_ORDERED_TOKENS
from ditron_inductor.task.expert_nodes import ChooseExperts as ChooseExperts
from ditron_inductor.task.expert_nodes import CombineExperts as CombineExperts
from ditron_inductor.task.expert_nodes import ExpertProjections as ExpertProjections
from ditron_inductor.task.expert_nodes import GroupedMatmulAllReduce as GroupedMatmulAllReduce
from ditron_inductor.task.expert_nodes import GroupedMatmulReduceScatter as GroupedMatmulReduceScatter
from ditron_inductor.task.expert_nodes import GroupedProjections as GroupedProjections
from ditron_inductor.task.expert_nodes import ProductsOfExperts as ProductsOfExperts
from ditron_inductor.task.expert_nodes import ReducedExperts as ReducedExperts
from ditron_inductor.task.expert_nodes import most_expert_tokens as most_expert_tokens
from ditron_inductor.task.matmul_nodes import FEW_PROJECTED_ROWS as FEW_PROJECTED_ROWS
from ditron_inductor.task.matmul_nodes import FEWEST_ALONE as FEWEST_ALONE
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
from ditron_inductor.task.matmul_nodes import ReducedSum as ReducedSum
from ditron_inductor.task.matmul_nodes import SharedOperand as SharedOperand
from ditron_inductor.task.matmul_nodes import SummedMatmul as SummedMatmul
from ditron_inductor.task.matmul_nodes import WithEpilogue as WithEpilogue
from ditron_inductor.task.matmul_nodes import WithPrologue as WithPrologue
from ditron_inductor.task.node import Node
from ditron_inductor.task.node import TaskNode as TaskNode
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

MEASURED_WORK = ("matmul", "norm", "attention", "attention_backward")
"""What is measured by its sizes; how much a decode reads is on the device alone."""
DECLARED: tuple[type[Node], ...] = (
    AllGatherMatmul,
    MatmulReduceScatter,
    MatmulAllReduce,
    MatmulAllGather,
    AllReduceRmsNorm,
    MatmulAllReduceRmsNorm,
    MatmulAllToAll,
    AllToAllMatmul,
    FlashDecode,
    CachedAttention,
    Projections,
    ExpertProjections,
    GroupedProjections,
    CombineExperts,
    ChooseExperts,
    GroupedMatmulAllReduce,
    GroupedMatmulReduceScatter,
    AllGatherAttention,
    AttentionReduceScatter,
)
"""All declarations, in the order in which pages and tables have them."""
NODES: Mapping[str, type[Node]] = {node.kind: node for node in DECLARED}
TASKS: Mapping[str, type[TaskNode]] = {node.kind: node for node in DECLARED if issubclass(node, TaskNode)}
"""The kinds that communicate."""
TASK_KINDS: tuple[str, ...] = tuple(TASKS)
LOCAL_KINDS: tuple[str, ...] = tuple(kind for kind in NODES if kind not in TASKS)
"""The kinds that communicate nothing."""
FUSIONS: tuple[str, ...] = tuple(node.kind for node in DECLARED if not node.planned_as)
"""The kinds that a user can ask for, or leave out."""
PLANNED_KINDS: tuple[str, ...] = tuple(
    node.kind for node in TASKS.values() if not node.planned_as and node.computes in MEASURED_WORK
)
"""The kinds with times of their own in tables. With a matmul, a norm costs all strategies the same."""
NORM_KINDS: tuple[str, ...] = tuple(node.kind for node in TASKS.values() if issubclass(node, ReductionWithNorm))
ATTENTION_KINDS: tuple[str, ...] = tuple(node.kind for node in TASKS.values() if issubclass(node, AttentionNode))
MATMULS: tuple[type[TaskNode], ...] = tuple(
    node for node in TASKS.values() if node.computes == "matmul" and not node.planned_as
)
"""Collectives with matmuls alone."""
ULYSSES_KINDS: tuple[str, ...] = tuple(node.kind for node in MATMULS if node.exchange.wire == "all_to_all")
KINDS: tuple[str, ...] = tuple(node.kind for node in MATMULS if node.exchange.wire != "all_to_all")
"""What tables and benchmarks of matmuls know."""
DELETED_KINDS: dict[str, str] = {
    "all_gather_contract": "deleted, as it was no faster than the library: 0.995 of its speed, the mean of 12 rows",
    "experts_all_reduce": "deleted, as it was slower than the calls that it stood for",
}
"""Kinds that there were, and what became of them, for whoever still asks for one; see docs/deleted.md."""
COMPILED_BY_US = "ditron_compiled_by_us"
"""Key of a graph node's `meta`: our passes are part of what compiles it, hence of the key under which it is cached."""


def matmul_of(exchange: Exchange) -> str:
    """The kind of matmuls alone with this exchange; of several the first one."""
    return next(node.kind for node in MATMULS if node.exchange == exchange)
