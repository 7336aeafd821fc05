"""What a plan has to know of a node beyond its sizes: what its epilogue moves."""

from __future__ import annotations

import torch

from ditron_inductor.task.epilogue import Epilogue, ProductTerm
from ditron_inductor.task.exchange import SCATTERED_PRODUCT
from ditron_inductor.task.nodes import SharedOperand, TaskNode, WithEpilogue
from ditron_inductor.task.torch_dtypes import NAMES


def epilogue_bytes(node: TaskNode, m: int, n: int, dtype: torch.dtype) -> int:
    """What the epilogue's own kernel would read and write, all weights taken as equally wide; equal on all ranks."""
    epilogue = node.parsed if isinstance(node, WithEpilogue) else None
    if epilogue is None:
        return 0
    if isinstance(node, SharedOperand):
        return m * n * dtype.itemsize * epilogue.passes(NAMES[dtype]) // node.num_weights
    if epilogue.behind is None:
        return 0
    # After the reduction no matmul adds a bias.
    rows = m // node.world_size if node.exchange == SCATTERED_PRODUCT else m
    return rows * n * dtype.itemsize * epilogue.passes(NAMES[dtype], biases=False)


def pair_bytes(node: TaskNode, m: int, n: int, dtype: torch.dtype) -> int:
    """What an epilogue that joins two products of a gather moves, see `cost.Problem`; equal on all ranks."""
    if not isinstance(node, SharedOperand):
        return 0
    epilogue = node.parsed
    if epilogue is None or all(len(group.products) < 2 for group in epilogue.groups()):
        return 0
    stored = sum(isinstance(output, ProductTerm) for output in epilogue.outputs)
    return m * n * dtype.itemsize * (epilogue.passes(NAMES[dtype]) + stored) // node.num_weights


def pre_bytes(node: TaskNode, m: int, n: int, dtype: torch.dtype) -> int:
    """What a kernel of its own would read and write of the product before it is reduced."""
    node = node.without_norm
    epilogue = node.parsed if isinstance(node, WithEpilogue) else None
    if epilogue is None or epilogue.pre is None:
        return 0
    return m * n * dtype.itemsize * Epilogue((epilogue.pre,)).passes(NAMES[dtype], biases=False)
