"""The bytes that a node's epilogue moves, which the plan's cost model needs besides the node's sizes.

`m` and `n` are the rows and columns of the product, `dtype` is that of the node. The results are equal on all ranks.
"""

from __future__ import annotations

import torch

from ditron_inductor.task.epilogue import Epilogue, ProductTerm
from ditron_inductor.task.exchange import SCATTERED_PRODUCT
from ditron_inductor.task.nodes import SharedOperand, TaskNode, WithEpilogue
from ditron_inductor.task.torch_dtypes import NAMES


def epilogue_bytes(node: TaskNode, m: int, n: int, dtype: torch.dtype) -> int:
    """Returns the bytes that a kernel for the epilogue would read and write, with weights of equal width."""
    epilogue = node.parsed if isinstance(node, WithEpilogue) else None
    if epilogue is None:
        return 0
    if isinstance(node, SharedOperand):
        return m * n * dtype.itemsize * epilogue.passes(NAMES[dtype]) // node.num_weights
    if epilogue.behind is None:
        return 0
    # Behind a reduction there is no matmul that could add a bias.
    rows = m // node.world_size if node.exchange == SCATTERED_PRODUCT else m
    return rows * n * dtype.itemsize * epilogue.passes(NAMES[dtype], biases=False)


def pair_bytes(node: TaskNode, m: int, n: int, dtype: torch.dtype) -> int:
    """Returns the bytes that an epilogue moves which combines two products of a gather (see `Problem.pair_bytes`)."""
    if not isinstance(node, SharedOperand):
        return 0
    epilogue = node.parsed
    if epilogue is None or all(len(group.products) < 2 for group in epilogue.groups()):
        return 0
    stored = sum(isinstance(output, ProductTerm) for output in epilogue.outputs)
    return m * n * dtype.itemsize * (epilogue.passes(NAMES[dtype]) + stored) // node.num_weights


def pre_bytes(node: TaskNode, m: int, n: int, dtype: torch.dtype) -> int:
    """Returns the bytes that an elementwise kernel would read and write to prepare the product for its reduction."""
    node = node.without_norm
    epilogue = node.parsed if isinstance(node, WithEpilogue) else None
    if epilogue is None or epilogue.pre is None:
        return 0
    return m * n * dtype.itemsize * Epilogue((epilogue.pre,)).passes(NAMES[dtype], biases=False)
