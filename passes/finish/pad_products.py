"""Matmuls whose rows do not begin at multiples of 16 bytes get padded operands, if a rule of their sizes says that it
pays.

    x [M, 4097], w [4097, N] -> mm [M, N]

becomes

    x -> constant_pad_nd [M, 4104]
    w -> constant_pad_nd [4104, N]  -> mm [M, N]

and, where the width of the result is not aligned either (N = 1023),

    w -> constant_pad_nd [4104, 1024] -> mm [M, 1024] -> slice [M, 1023]

docs/fusions.md says which products this pass takes, and why Inductor's own `shape_padding` is off. The pass runs behind
all fusions, where no other pass depends on it. It sees the products that no site took, and it looks at sizes, dtypes
and strides only. A padded operand is computed by the kernel that computes the operand itself, if only the product reads
it and Inductor generates it; otherwise it is a copy. In a matrix that lies column by column the columns are padded. A
size is padded only if elements are contiguous along it, so M is never padded for a plain `x @ w`.

The products of a site are padded along K too, which each rank contracts alone:

    matmul_all_reduce([a [M, 4097]], [b [4097, N]])  ->  matmul_all_reduce([pad(a)], [pad(b)])

What a site gathers is not padded, because another rank may have a collective there that no pass has fused.

It must not fire when
* the product is not on a GPU, or of another dtype than bf16, fp16 and fp32, or its operands differ in it;
* a size is dynamic, 0 or 1;
* the product belongs to a site, and padding K would leave an operand unaligned;
* an operand is contiguous neither along rows nor along columns, or there are gaps between the rows of a view;
* all rows begin at multiples of 16 bytes already;
* the rule finds that the copies cost more than the faster kernel saves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.launches import is_task
from ditron_inductor.task import alignment, schema
from ditron_inductor.task.alignment import ALIGNED_BYTES, RULE, ProductWork, Rule
from ditron_inductor.task.torch_dtypes import OPERAND_DTYPES

aten = torch.ops.aten

OPERANDS: dict[object, tuple[str, str]] = {
    aten.mm.default: ("self", "mat2"),
    aten.addmm.default: ("mat1", "mat2"),
    aten.bmm.default: ("self", "mat2"),
    aten.baddbmm.default: ("batch1", "batch2"),
}
BIASED: frozenset[object] = frozenset({aten.addmm.default, aten.baddbmm.default})
CONVERT = torch.ops.prims.convert_element_type.default
GPUS = ("cuda",)


@dataclass(frozen=True)
class MatrixForm:
    """The layout in memory of a matrix, or of a batch of matrices. by_rows: whether the elements of a row are adjacent;
    otherwise those of a column are. aligned: the largest number of bytes of which every row (or column) begins at a
    multiple. whole: whether rows (or columns) lie without gaps, so that longer ones would lie further apart.
    """

    by_rows: bool
    aligned: int
    whole: bool


@dataclass(frozen=True)
class Match:
    """A product lhs [.., M, K] @ rhs [.., K, N], and how much each of its sizes grows."""

    node: fx.Node
    lhs: fx.Node
    rhs: fx.Node
    bias: fx.Node | None
    m: int
    k: int
    n: int
    work: ProductWork


def find_unaligned(node: fx.Node, devices: tuple[str, ...] = GPUS) -> Match | None:
    """Proves that a node is a product that padding would align; None if it is not."""
    if node.target not in OPERANDS:
        return None
    bound = proofs.arguments(node)
    lhs, rhs = (bound[name] for name in OPERANDS[node.target])
    bias = bound["self"] if node.target in BIASED else None
    values = _paddable([lhs, rhs, node, *([bias] if node.target in BIASED else [])], devices)
    if values is None:
        return None
    a, b, out, *_ = values
    of_lhs, of_rhs, of_out = form(a), form(b), form(out)
    if of_lhs is None or of_rhs is None or of_out is None:
        return None
    M, K, N = a.shape[-2], a.shape[-1], b.shape[-1]
    missing = {name: alignment.missing(size, a.dtype) for name, size in (("m", M), ("k", K), ("n", N))}
    needed: set[str] = set()
    for operand, (along_rows, along_columns) in ((of_lhs, "km"), (of_rhs, "nk"), (of_out, "nm")):
        along = along_rows if operand.by_rows else along_columns
        if operand.aligned < ALIGNED_BYTES:
            if not operand.whole or not missing[along]:
                return None
            needed.add(along)
    if not needed:
        return None
    m, k, n = (missing[name] if name in needed else 0 for name in "mkn")
    operands = ([lhs] if m + k else []) + ([rhs] if k + n else [])
    copied = [_copied_bytes(operand, node) for operand in operands]
    if n and not rewriting.views_and_strides(node)[1]:
        copied.append(2 * _nbytes(out))
    work = ProductWork(
        speed=alignment.speed_of(a.dtype),
        flops=2 * out.numel() * K,
        moved_bytes=sum(map(_nbytes, (a, b, out))),
        operand_bytes=min(of_lhs.aligned, of_rhs.aligned),
        result_bytes=of_out.aligned,
        copied_bytes=sum(copied),
        launches=sum(map(bool, copied)) + (bias is not None and bool(m + n)),
    )
    return Match(node, lhs, rhs, bias, m, k, n, work)


@dataclass(frozen=True)
class SiteProduct:
    """A product a [.., K] @ b [K, N] of a site, and how much its K grows."""

    a: fx.Node
    b: fx.Node
    k: int
    work: ProductWork


def find_site_products(node: fx.Node, devices: tuple[str, ...] = GPUS) -> list[SiteProduct | None]:
    """Returns for each product that a site computes and then sends: itself if padding K would align it, else None."""
    if not is_task(node):
        return []
    given = schema.operands_from_call(node)
    return [_site_product(node, a, b, devices) for a, b in zip(given.get("a", ()), given.get("b", ()), strict=True)]


def _site_product(node: fx.Node, a: fx.Node, b: fx.Node, devices: tuple[str, ...]) -> SiteProduct | None:
    values = _paddable([a, b], devices)
    if values is None:
        return None
    lhs, rhs = values
    of_lhs, of_rhs = form(lhs), form(rhs)
    K, N = rhs.shape
    k = alignment.missing(K, rhs.dtype)
    if of_lhs is None or of_rhs is None or not k:
        return None
    operands = ((of_lhs, True), (of_rhs, False))
    unaligned = [(operand, along) for operand, along in operands if operand.aligned < ALIGNED_BYTES]
    # K is contiguous in `a` if it lies by rows, and in `b` if it lies by columns.
    if not unaligned or any(not operand.whole or operand.by_rows != along for operand, along in unaligned):
        return None
    copied = [_copied_bytes(a, node), _copied_bytes(b, node)]
    out_bytes = lhs.numel() // K * N * lhs.dtype.itemsize
    of_out = alignment.aligned_bytes(N * lhs.dtype.itemsize)
    work = ProductWork(
        speed=alignment.speed_of(lhs.dtype),
        flops=2 * lhs.numel() * N,
        moved_bytes=_nbytes(lhs) + _nbytes(rhs) + out_bytes,
        operand_bytes=min(of_lhs.aligned, of_rhs.aligned),
        result_bytes=of_out,
        copied_bytes=sum(copied),
        launches=sum(map(bool, copied)),
        padded_result_bytes=of_out,
    )
    return SiteProduct(a, b, k, work)


def _paddable(nodes: Sequence[Any], devices: tuple[str, ...]) -> list[torch.Tensor] | None:
    """Returns these tensors if they are of one dtype that is known here, of known sizes above 1, and on a GPU."""
    found = [value for node in nodes if (value := proofs.tensor(node)) is not None]
    if len(found) < len(nodes):
        return None
    alike = {(value.dtype, value.device) for value in found}
    static = all(isinstance(size, int) for value in found for size in (*value.shape, *_steps(value)))
    (dtype, device) = next(iter(alike))
    large = static and all(size > 1 for value in found[:3] for size in value.shape[-2:])
    filled = large and all(value.numel() for value in found)
    fits = filled and len(alike) == 1 and dtype in OPERAND_DTYPES and device.type in devices
    return found if fits else None


def _steps(value: torch.Tensor) -> tuple[Any, ...]:
    """Returns the offset of the tensor in its memory, and its strides."""
    return (value.storage_offset(), *value.stride())


def form(value: torch.Tensor) -> MatrixForm | None:
    """Returns the layout of a tensor [.., R, C] of known sizes; None if neither rows nor columns are contiguous."""
    rows, columns = value.stride()[-2:]
    if columns == 1:
        apart, length = rows, value.shape[-1]
    elif rows == 1:
        apart, length = columns, value.shape[-2]
    else:
        return None
    begins = (apart, *_steps(value)[:-2])
    aligned = alignment.aligned_bytes(*(int(begin) * value.dtype.itemsize for begin in begins))
    return MatrixForm(columns == 1, aligned, apart == length)


def _nbytes(value: torch.Tensor) -> int:
    return math.prod(value.shape) * value.dtype.itemsize


def _copied_bytes(operand: fx.Node, product: fx.Node) -> int:
    """Returns the bytes that are copied to pad an operand: 0 if one kernel writes the operand with its padding."""
    value = proofs.fake(operand)
    written_here = operand.op == "call_function" and list(operand.users) == [product] and _generated(operand)
    return 0 if written_here else 2 * _nbytes(value)


def _generated(node: fx.Node) -> bool:
    """Returns whether Inductor generates the kernel that computes a node, and could write its result anywhere."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target is CONVERT or torch.Tag.pointwise in node.target.tags
    return False


def rewrite(graph: fx.Graph, match: Match, padded: dict[Any, fx.Node]) -> None:
    """Pads the operands and cuts the result. padded: what was padded before, by tensor and lengths."""
    node, (m, k, n) = match.node, (match.m, match.k, match.n)
    with graph.inserting_before(node):
        lhs, rhs = _padded(graph, match.lhs, m, k, padded), _padded(graph, match.rhs, k, n, padded)
        operands = (lhs, rhs) if match.bias is None else (_padded_bias(graph, match, padded), lhs, rhs)
        product = graph.create_node(
            "call_function", node.target, (*operands, *node.args[len(operands) :]), node.kwargs, name="padded_product"
        )
        product.meta.update(rewriting.copied_meta(node))
        rewriting.recompute(product)
        result = product
        for dim, more in ((-2, m), (-1, n)):
            if more:
                value = result.meta["val"]
                args = (result, value.ndim + dim, 0, value.shape[dim] - more)
                result = rewriting.computed(graph, aten.slice.Tensor, args, product)
        if result.meta["val"].stride() != node.meta["val"].stride():
            result = rewriting.with_strides_of(graph, result, node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _padded(graph: fx.Graph, source: fx.Node, rows: int, columns: int, padded: dict[Any, fx.Node]) -> fx.Node:
    """Inserts a vector, a matrix or a batch of matrices with zeros below and to the right, in the same layout."""
    if not rows + columns:
        return source
    key = (source, rows, columns)
    if key not in padded:
        value = source.meta["val"]
        found = form(value) if value.ndim > 1 else None
        if found is None or found.by_rows:
            lengths = [0, columns, 0, rows][: 2 * value.ndim]
            made = rewriting.computed(graph, aten.constant_pad_nd.default, (source, lengths), source)
        else:
            lying = _swapped(graph, source)
            lying = rewriting.computed(graph, aten.constant_pad_nd.default, (lying, [0, rows, 0, columns]), lying)
            made = _swapped(graph, lying)
        padded[key] = made
    return padded[key]


def _swapped(graph: fx.Graph, source: fx.Node) -> fx.Node:
    """Inserts a view with rows and columns exchanged."""
    order = list(range(source.meta["val"].ndim))
    order[-2:] = order[:-3:-1]
    return rewriting.computed(graph, aten.permute.default, (source, order), source)


def _padded_bias(graph: fx.Graph, match: Match, padded: dict[Any, fx.Node]) -> fx.Node:
    """Inserts the bias of the padded product, padded along each dimension in which it is as long as the product."""
    bias = match.bias
    assert bias is not None
    shape = bias.meta["val"].shape
    columns = match.n if len(shape) and shape[-1] > 1 else 0
    rows = match.m if len(shape) > 1 and shape[-2] > 1 else 0
    return _padded(graph, bias, rows, columns, padded)


def rewrite_site(
    graph: fx.Graph, node: fx.Node, found: Sequence[SiteProduct | None], padded: dict[Any, fx.Node]
) -> None:
    """Pads K of these products of a site; the others stay. padded: as for `rewrite`."""
    operands = schema.operands_from_call(node)
    a, b = operands["a"], operands["b"]
    with graph.inserting_before(node):
        for index, product in enumerate(found):
            if product is not None:
                a[index] = _padded(graph, product.a, 0, product.k, padded)
                b[index] = _padded(graph, product.b, product.k, 0, padded)
    rewriting.change_task(node, schema.node_from_call(node.target, node.args), a=a, b=b)
    node.meta.pop("eager_input_vals", None)


def pad_by(graph: fx.Graph, rule: Rule, devices: tuple[str, ...] = GPUS) -> int:
    """Pads every product for which this pays by the rule, and returns how many."""
    padded: dict[Any, fx.Node] = {}
    count = 0
    for node in list(graph.nodes):
        found = find_site_products(node, devices)
        factors = [product if product and rule.pays(product.work) else None for product in found]
        if any(factors):
            rewrite_site(graph, node, factors, padded)
            count += sum(map(bool, factors))
        match = find_unaligned(node, devices)
        if match is not None and rule.pays(match.work):
            rewrite(graph, match, padded)
            count += 1
    return count


def pad_products(graph: fx.Graph, *, options: Options) -> int:
    """Pads every product of unaligned sizes for which it pays; returns how many."""
    return pad_by(graph, RULE)
