"""What a plan has to know of a node beyond its sizes: what its epilogue moves, and how often the library multiplies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ditron_inductor.task.epilogue import Epilogue, ProductTerm
from ditron_inductor.task.nodes import (
    AllGatherMatmul,
    MatmulAllReduceRmsNorm,
    MatmulReduceScatter,
    TaskNode,
    WithEpilogue,
)
from ditron_inductor.task.torch_dtypes import NAMES

APART = 2
"""A product of rows that do not lie together takes the host as long as so many others."""


def epilogue_bytes(node: TaskNode, m: int, n: int, dtype: torch.dtype) -> int:
    """What the epilogue's own kernel would read and write, all weights taken as equally wide; equal on all ranks."""
    epilogue = node.parsed if isinstance(node, WithEpilogue) else None
    if epilogue is None:
        return 0
    if isinstance(node, AllGatherMatmul):
        return m * n * dtype.itemsize * epilogue.passes(NAMES[dtype]) // node.num_weights
    if epilogue.behind is None:
        return 0
    # After the reduction no matmul adds a bias.
    rows = m // node.world_size if isinstance(node, MatmulReduceScatter) else m
    return rows * n * dtype.itemsize * epilogue.passes(NAMES[dtype], biases=False)


def pair_bytes(node: TaskNode, m: int, n: int, dtype: torch.dtype) -> int:
    """What an epilogue that joins two products of a gather moves, see `cost.Problem`; equal on all ranks."""
    if not isinstance(node, AllGatherMatmul):
        return 0
    epilogue = node.parsed
    if epilogue is None or all(len(group.products) < 2 for group in epilogue.groups()):
        return 0
    stored = sum(isinstance(output, ProductTerm) for output in epilogue.outputs)
    return m * n * dtype.itemsize * (epilogue.passes(NAMES[dtype]) + stored) // node.num_weights


def pre_bytes(node: TaskNode, m: int, n: int, dtype: torch.dtype) -> int:
    """What a kernel of its own would read and write of the product before it is reduced."""
    node = node.reduction if isinstance(node, MatmulAllReduceRmsNorm) else node
    epilogue = node.parsed if isinstance(node, WithEpilogue) else None
    if epilogue is None or epilogue.pre is None:
        return 0
    return m * n * dtype.itemsize * Epilogue((epilogue.pre,)).passes(NAMES[dtype], biases=False)


def more_products(node: TaskNode, shape: Sequence[int]) -> int:
    """Of a gather by `chunked`: one for each weight and source, of rows that lie apart where it is not along the first
    dimension that has any.
    """
    if not isinstance(node, AllGatherMatmul):
        return 0
    apart = math.prod(shape[: node.gather_dim]) > 1
    return node.world_size * (node.num_weights * (APART if apart else 1) - 1)
