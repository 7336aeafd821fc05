"""Why a collective was left alone: one code per reason, each with a sentence that says what the user could change.

A function that is asked about one node returns the bare `ReasonCode`, which is about that node. A function that looks
further returns `code.at(node)`, a `Refusal`, which names the node that stopped the fusion. `refused` distinguishes both
from a match. A pass records the reason on the collective's node, `node.meta["ditron_left_alone"]`, where `explain`
reads it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import fx

from ditron_inductor.passes.graph.culprits import describe
from ditron_inductor.task.attention_masks import MAX_HEAD_DIM
from ditron_inductor.task.nodes import ATTENTION_KINDS
from ditron_inductor.task.site_records import NodeRecord

if TYPE_CHECKING:
    from typing_extensions import TypeIs

LEFT_ALONE = "ditron_left_alone"
# The reason that remained when batched matmuls beside the collective were tried as plain ones.
TRIED = "ditron_tried"


class ReasonCode(enum.StrEnum):
    """Every reason for not fusing a collective. `_TEXTS` says what each is, and what the user could change."""

    ALREADY_FUSED = "already_fused"
    DECODE_FORM = "decode_form"
    DECODE_MERGE = "decode_merge"
    ATTENTION_BIAS_GRADIENT = "attention_bias_gradient"
    ATTENTION_DROPOUT = "attention_dropout"
    ATTENTION_FORM = "attention_form"
    ATTENTION_HEAD_DIM = "attention_head_dim"
    ATTENTION_MASK = "attention_mask"
    ATTENTION_PARTS = "attention_parts"
    ATTENTION_SOFTCAP = "attention_softcap"
    ATTENTION_WEIGHTS_USED = "attention_weights_used"
    ATTENTION_WRITTEN_OUT = "attention_written_out"
    BATCHED_MATMUL = "batched_matmul"
    BIAS = "bias"
    CAST_BETWEEN = "cast_between"
    CHUNKS_PARTIAL = "chunks_partial"
    CHUNKS_PERMUTED = "chunks_permuted"
    DISABLED = "disabled"
    DTYPE = "dtype"
    DYNAMIC_TOKENS = "dynamic_tokens"
    EXPERTS_SUM = "experts_sum"
    EXPERT_BIAS = "expert_bias"
    EXPERT_ENDS = "expert_ends"
    FEW_TOKENS = "few_tokens"
    FLEX_BLOCK_MASK = "flex_block_mask"
    FLEX_GRADIENT = "flex_gradient"
    FLEX_SCORE_MOD = "flex_score_mod"
    FP8_MATMUL = "fp8_matmul"
    GROUPED_MATMUL = "grouped_matmul"
    GROUP_UNKNOWN = "group_unknown"
    INTERMEDIATE_USED = "intermediate_used"
    LAST_DIM = "last_dim"
    LAYOUT = "layout"
    MIXED_DTYPES = "mixed_dtypes"
    NO_GAIN = "no_gain"
    NO_MATMUL = "no_matmul"
    NORM_CONSUMER = "norm_consumer"
    NORM_FORM = "norm_form"
    NORM_SHARED = "norm_shared"
    NORM_USED = "norm_used"
    NORM_WIDTH = "norm_width"
    OPERAND_DEPENDS = "operand_depends"
    OPERAND_LATE = "operand_late"
    POINTWISE_BETWEEN = "pointwise_between"
    PRODUCTS_COMBINED = "products_combined"
    QUANTIZED_MATMUL = "quantized_matmul"
    REDUCE_OP = "reduce_op"
    ROWS_CONTRACTED = "rows_contracted"
    ROWS_EXCHANGED = "rows_exchanged"
    SHAPE_UNPROVEN = "shape_unproven"
    SUM_OF_MATMULS = "sum_of_matmuls"
    TOKENS_EXCHANGED = "tokens_exchanged"
    UNEQUAL_SPLITS = "unequal_splits"
    UNEVEN_SHARDS = "uneven_shards"
    UNSUPPORTED_COLLECTIVE = "unsupported_collective"
    WAIT_FORM = "wait_form"
    WORLD_SIZE = "world_size"
    WORLD_SIZE_ONE = "world_size_one"

    @property
    def changeable(self) -> bool:
        """Whether the user could have the collective fused by a change: `ditron.strict` raises for these reasons."""
        return self not in _NOTHING_TO_CHANGE

    def at(self, node: fx.Node) -> Refusal:
        return Refusal(self, node)


_NOTHING_TO_CHANGE = frozenset(
    {
        ReasonCode.ALREADY_FUSED,
        ReasonCode.ATTENTION_HEAD_DIM,
        ReasonCode.DISABLED,
        ReasonCode.FEW_TOKENS,
        ReasonCode.GROUPED_MATMUL,
        ReasonCode.NO_GAIN,
        ReasonCode.NO_MATMUL,
        ReasonCode.NORM_CONSUMER,
        ReasonCode.NORM_FORM,
        ReasonCode.NORM_SHARED,
        ReasonCode.NORM_USED,
        ReasonCode.NORM_WIDTH,
        ReasonCode.ROWS_CONTRACTED,
        ReasonCode.ROWS_EXCHANGED,
        ReasonCode.WORLD_SIZE_ONE,
    }
)


@dataclass(frozen=True)
class Refusal:
    """A reason, and the node that prevents the fusion."""

    code: ReasonCode
    node: fx.Node

    def at(self, node: fx.Node) -> Refusal:
        """Returns the refusal itself: it names a node already, which is nearer to the cause than `node`."""
        return self


Refused = ReasonCode | Refusal


def refused(found: object) -> TypeIs[Refused]:
    """Returns whether a search came back with a reason, and not with a match."""
    return isinstance(found, (ReasonCode, Refusal))


SUM_OF_SLOTS = (
    "torch._grouped_mm of rows in the order of a sort, times one weight for each, indexed by the inverse permutation, "
    "viewed as [tokens, slots, columns], summed over the slots and cast to the dtype of the products; or added, in "
    "that dtype, by index_add, scatter_add or index_put to the tokens that the sort names"
)
"""How what experts return is added up where a fusion takes it."""
_TEXTS: dict[ReasonCode, str] = {
    ReasonCode.ALREADY_FUSED: (
        "the matmul beside it is fused with another collective already; nothing to change: a matmul overlaps one"
    ),
    ReasonCode.DECODE_FORM: (
        "it gathers a part of an attention that is not of the form of flash_decode: one query per sequence over caches "
        "of keys and values of its dtype, static sizes, and no mask but arange(tokens) < lengths; write it so, or call "
        "ditron_inductor.ops.flash_decode"
    ),
    ReasonCode.DECODE_MERGE: (
        "it gathers a part of an attention, and what follows is not proved to merge the outputs of all ranks by the "
        "weights exp(log-sum-exp), or uses the parts otherwise; gather both along the first dimension, and use the "
        "parts for softmax(lse) * o, summed over the ranks, alone"
    ),
    ReasonCode.ATTENTION_BIAS_GRADIENT: (
        "the bias of the attention beside it gets a gradient, which no kernel for it computes; detach the bias, if it "
        "is not trained"
    ),
    ReasonCode.ATTENTION_DROPOUT: (
        "the attention beside it has dropout, whose random numbers would fall on other keys; use none to have it fused"
    ),
    ReasonCode.ATTENTION_FORM: (
        "the attention beside it is of a form that is not known: gather keys and values of one group, both along the "
        "sequence, with heads of one size, into scaled_dot_product_attention with a positive scale; or use "
        "ditron_inductor.ops.all_gather_attention"
    ),
    ReasonCode.ATTENTION_HEAD_DIM: (
        f"the attention beside it has heads of more than {MAX_HEAD_DIM} elements, which no fast kernel takes: fused, "
        "all scores would lie in memory; nothing to change"
    ),
    ReasonCode.ATTENTION_MASK: (
        "the attention beside it has a mask or bias that is not proved to be causal, or a causal window, and cannot be "
        "handed on as a tensor: use one of bool, bfloat16, float16 or float32 that can be broadcast to [batch, heads, "
        "queries, keys of all ranks]; in attention that is written out, add it, or hide by -inf"
    ),
    ReasonCode.ATTENTION_PARTS: (
        "attention reads parts of it, or passes them on, one rank's after the other, and other ones on every rank: "
        "ring attention, as torch's context_parallel has it; call ditron_inductor.ops.all_gather_attention instead, "
        "with mask='zigzag' for the order of its load balancer, or attend to the whole of what is gathered"
    ),
    ReasonCode.ATTENTION_SOFTCAP: (
        "the attention beside it is written out, with a tanh that is not proved to be a soft cap: use a number for the "
        "cap, cap * tanh(scores / cap) once, in front of the mask; or ditron_inductor.ops.all_gather_attention"
    ),
    ReasonCode.ATTENTION_WEIGHTS_USED: (
        "the attention beside it is written out, and its scores or probabilities are used elsewhere too: returned, or "
        "saved for a backward, which is fused with scaled_dot_product_attention or "
        "ditron_inductor.ops.all_gather_attention only; use one of these, or checkpoint the attention, or no gradients"
    ),
    ReasonCode.ATTENTION_WRITTEN_OUT: (
        "the attention beside it is written out, and this op of it is not proved to be part of matmul, scale, mask, "
        "softmax over the keys, matmul; use scaled_dot_product_attention (attn_implementation='sdpa' of Hugging Face's "
        "models), or ditron_inductor.ops.all_gather_attention"
    ),
    ReasonCode.BATCHED_MATMUL: (
        "its neighbour is a batched matmul; use one 2-D weight for all batches (nn.Linear, x @ w) instead of bmm"
    ),
    ReasonCode.BIAS: (
        "something is added to the matmul's result (a residual, another gradient, a column; behind a "
        "gather any bias); add it after the collective"
    ),
    ReasonCode.CAST_BETWEEN: (
        "a dtype conversion stands between it and the matmul, or attention; communicate in the dtype of that, cast "
        "outside"
    ),
    ReasonCode.CHUNKS_PARTIAL: (
        "the chunks around it are not one equal chunk per rank; split the dimension into exactly world_size chunks"
    ),
    ReasonCode.CHUNKS_PERMUTED: (
        "the chunks around it are not in the order of the ranks; keep that order, and permute the result if need be"
    ),
    ReasonCode.DISABLED: "the option ditron.fusions leaves this fusion out; add it there to have it",
    ReasonCode.DTYPE: "the dtype is not bfloat16, float16 or float32; use one of these for the matmul",
    ReasonCode.DYNAMIC_TOKENS: (
        "it reduces what routed experts return for a dynamic number of tokens; mark that number static, or compile "
        "with dynamic=False"
    ),
    ReasonCode.EXPERTS_SUM: (
        "it reduces what routed experts return, and this op is none of the form of their sum that is taken; write it "
        f"as {SUM_OF_SLOTS}"
    ),
    ReasonCode.EXPERT_BIAS: (
        "it reduces what routed experts return, with biases that are not proved to be those of the rows' experts; "
        "index a table with as many biases as experts by the sorted ids that torch.sort returns, as transformers does"
    ),
    ReasonCode.EXPERT_ENDS: (
        "it reduces what routed experts return, with biases that are indexed by sorted ids, and these ends of the rows "
        "of each expert are not proved to count the same ids; make them by torch.histc(ids, experts, 0, experts - 1) "
        "and cumsum, as transformers does"
    ),
    ReasonCode.FEW_TOKENS: (
        "it reduces what routed experts return for few tokens, whose matmul is too short to hide it; nothing to "
        "change: a norm behind an all-reduce, if there is one, takes the sum with it"
    ),
    ReasonCode.FLEX_BLOCK_MASK: (
        "FlexAttention beside it has a block mask that is not proved to be causal, or a causal window: call "
        "create_block_mask inside the compiled function, with a mask_mod that compares q_idx and kv_idx, and lengths "
        "that are multiples of its blocks; or use ditron_inductor.ops.all_gather_attention"
    ),
    ReasonCode.FLEX_GRADIENT: (
        "FlexAttention beside it returns the largest scores, or logarithms of sums that have a gradient, or those of "
        "its backend FLASH; use its output alone, and another backend, or ditron_inductor.ops.all_gather_attention"
    ),
    ReasonCode.FLEX_SCORE_MOD: (
        "FlexAttention beside it has a score_mod that does more than hide scores by the numbers of query and key, and "
        "cap them; only those without one, or with torch.where(condition, score, -inf), with cap * tanh(score / cap) "
        "in the place of the score or without, are fused"
    ),
    ReasonCode.FP8_MATMUL: "FP8 matmuls are not fused yet; keep that layer in bfloat16 to have it fused",
    ReasonCode.GROUPED_MATMUL: (
        "it stands beside matmuls of routed experts, and does not reduce the sum of each token's slots in "
        "a forward, or no kernel multiplies as they do; nothing to change"
    ),
    ReasonCode.GROUP_UNKNOWN: "this process knows no group of the name in the graph; pass a live process group",
    ReasonCode.INTERMEDIATE_USED: (
        "a tensor between it and the matmul is used elsewhere too; use the collective's result there instead"
    ),
    ReasonCode.LAST_DIM: (
        "the matmul keeps the last dimension, which it gathers, and contracts several others; give it a matrix, or "
        "gather one of the others"
    ),
    ReasonCode.LAYOUT: (
        "a view between it and the matmul moves rows or changes the last dimension (a transpose, a split into heads); "
        "apply such views on the other side of the collective"
    ),
    ReasonCode.MIXED_DTYPES: "the matmul mixes dtypes; give both operands and the result the same dtype",
    ReasonCode.NO_GAIN: (
        "the matmul contracts the gathered dimension, and fused with the gather it was measured as no faster than the "
        "library: 0.995 of its speed, the mean of 12 rows (docs/deleted.md); nothing to change"
    ),
    ReasonCode.NO_MATMUL: "no matmul stands next to it; nothing to change unless one could be moved there",
    ReasonCode.NORM_CONSUMER: (
        "an op on the elements follows the norm behind it, and the compiler makes them one kernel; nothing to change"
    ),
    ReasonCode.NORM_FORM: (
        "the norm behind it is not of a form that is known; use that of nn.RMSNorm, nn.LayerNorm, Llama or Gemma, "
        "with a constant eps (it is none under dynamic=True; mark dimensions as dynamic instead)"
    ),
    ReasonCode.NORM_SHARED: (
        "more than two norms of the same rows, or two of different forms, follow it and share their scaled rows, and "
        "the compiler makes them in one kernel; nothing to change"
    ),
    ReasonCode.NORM_USED: (
        "a value of whole rows inside the norm behind it is used elsewhere, and a kernel of its own would compute it "
        "anew; a backward may use the reduced tensor, the scaled rows, their means and inverse deviations"
    ),
    ReasonCode.NORM_WIDTH: (
        "the rows of the norm behind it are longer than 16384 elements, or of a dynamic length; nothing to change"
    ),
    ReasonCode.OPERAND_DEPENDS: (
        "another operand is computed from the collective's result; make it independent of that"
    ),
    ReasonCode.OPERAND_LATE: (
        "another operand of the matmul, or attention, is computed after the gathered tensor is first used, behind an "
        "op that has to stay there (a collective, a random op, a side effect); compute it earlier"
    ),
    ReasonCode.POINTWISE_BETWEEN: (
        "an op stands between it and the matmul that no kernel has a text for, or whose other operand is not of the "
        "product's rows and columns; apply it to an operand, or after the collective"
    ),
    ReasonCode.PRODUCTS_COMBINED: (
        "it reduces several matmuls that are scaled, or combined otherwise than by a plain sum; scale their first "
        "operands instead, or the result"
    ),
    ReasonCode.QUANTIZED_MATMUL: (
        "quantised matmuls, and dequantisation in front of a matmul, are not fused yet; keep that layer in bfloat16 to "
        "have it fused"
    ),
    ReasonCode.REDUCE_OP: "it reduces with an op other than sum and avg; only these two are fused",
    ReasonCode.ROWS_CONTRACTED: (
        "what it brings is the second operand of a matmul, or transposed (a weight's gradient alone); nothing to change"
    ),
    ReasonCode.ROWS_EXCHANGED: (
        "it exchanges rows of the matmul (as tokens for experts), and not columns for rows; nothing to change"
    ),
    ReasonCode.SHAPE_UNPROVEN: (
        "sizes that have to be equal could not be proved so; mark the dimensions static, or relate them by torch._check"
    ),
    ReasonCode.SUM_OF_MATMULS: (
        "it reduces a sum of more than eight matmuls, of matmuls that differ in shape, or of the batches of a bmm; "
        "concatenate their operands along the contracted dimension"
    ),
    ReasonCode.TOKENS_EXCHANGED: (
        "it sends tokens, or their gradients, to the ranks of their experts, or back: whole rows, mostly in numbers "
        "that their routing decides, which no fusion takes; gather the tokens instead, by ditron_inductor.ops.experts "
        "or one of its ways into transformers and TorchTitan"
    ),
    ReasonCode.UNEQUAL_SPLITS: (
        "its splits are not proved to be equal; send as much to every rank, and leave the split sizes out"
    ),
    ReasonCode.UNEVEN_SHARDS: (
        "a part is cut off or padded, as where the sharded dimension does not divide by the number of ranks; pad that "
        "to a multiple, or cut after the matmul"
    ),
    ReasonCode.UNSUPPORTED_COLLECTIVE: (
        "no fusion covers it; use all_gather_into_tensor, reduce_scatter_tensor or all_reduce on one tensor"
    ),
    ReasonCode.WAIT_FORM: "its result is not waited for exactly once; wait for it once, where it is first used",
    ReasonCode.WORLD_SIZE: "the graph has another group size than the process group; compile again for this group",
    ReasonCode.WORLD_SIZE_ONE: "its group has one rank, so nothing is sent; nothing to change",
}


@dataclass(frozen=True)
class Reason:
    """Why a collective was left alone: the pattern tried, a `ReasonCode` and its text, and the node that stopped it."""

    pattern: str
    code: str
    text: str
    culprit: NodeRecord


def leave_alone(collective: fx.Node, pattern: str, why: Refused) -> None:
    """Records on the collective's node why it was not fused. A bare code is about the collective itself."""
    refusal = why.at(collective)
    known = collective.meta.get(LEFT_ALONE)
    if refusal.code is ReasonCode.NO_MATMUL and known is not None and known.pattern in ATTENTION_KINDS:
        # The earlier reason says more than that no matmul is there.
        return
    reason = Reason(pattern, refusal.code.value, _TEXTS[refusal.code], describe(refusal.node))
    tried = collective.meta.get(TRIED) if refusal.code is ReasonCode.BATCHED_MATMUL else None
    if tried is not None:
        # What was tried may have stopped at a node that only the copy has: here that is the batched matmul.
        here = any(node.name == tried.culprit.name for node in collective.graph.nodes)
        reason = tried if here else replace(tried, culprit=reason.culprit)
    collective.meta[LEFT_ALONE] = reason


def leave_unless_known(collective: fx.Node, pattern: str, why: Refused) -> None:
    """Does what `leave_alone` does, unless another fusion has said more than that no matmul is there."""
    known, code = collective.meta.get(LEFT_ALONE), why.at(collective).code
    if known is None or (known.code == ReasonCode.NO_MATMUL.value and code is not ReasonCode.NO_MATMUL):
        leave_alone(collective, pattern, why)
