"""The mutations of norms behind a reduction: where sums and products are rounded, and which forms are read."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

ROWS = "lowering/norms/rows.py"
BITS = "tests/lowering/test_norm_bits.py::test_the_norm_alone_has_the_bits_of_the_reference"
FORMS = "passes/graph/norm_forms.py"
SUMS = "passes/graph/reduced_sums.py"
LAYERS = "tests/passes/test_all_reduce_rms_norm.py"
TERMS = "tests/passes/test_added_terms.py::test_does_not_fire"
FOREIGN = "passes/graph/foreign_norms.py"
UNROUNDED = "tests/passes/test_unrounded_norms.py"
SCALED = "tests/passes/test_scaled_norms.py"
OPS = "tests/passes/test_foreign_norms.py"
DIVIDED = "lowering/matmul_all_reduce_rms_norm/divided_product.py"
IN_PARTS = "tests/lowering/test_divided_product.py"

NORMING: tuple[Mutation, ...] = (
    Mutation(
        "a rounding that is a result too is hidden",
        "passes/normalize/keep_roundings.py",
        "any(user.target is not CONVERT for user in node.users)",
        "all(user.target is not CONVERT for user in node.users)",
        "tests/passes/test_keep_roundings.py::test_others_stay",
    ),
    Mutation(
        "every sum is rounded before it is normalised",
        ROWS,
        "if not (UNROUNDED & FORM):",
        "if not (NO_NORM & FORM):",
        BITS,
    ),
    Mutation(
        "no sum is rounded before it is normalised",
        ROWS,
        "if not (UNROUNDED & FORM):",
        "if NO_NORM & FORM:",
        BITS,
    ),
    Mutation(
        "rows times a number are not rounded",
        ROWS,
        "value = (value * NORMS.FACTOR).to(dtype).to(tl.float32)",
        "value = value * NORMS.FACTOR",
        BITS,
    ),
    Mutation(
        "rows times a row are not rounded",
        ROWS,
        "value = (value * loaded[9].to(tl.float32)).to(dtype).to(tl.float32)",
        "value = value * loaded[9].to(tl.float32)",
        BITS,
    ),
    Mutation(
        "a GPU may round a product and a sum at once",
        ROWS,
        'if multiplied and "residual" in node.extras else {}',
        "if not multiplied else {}",
        "tests/lowering/test_norm_compile.py::test_which_kernels_round_products_by_themselves",
    ),
    Mutation(
        "an unrounded sum is taken for a rounded one",
        FORMS,
        "tail.round_first, terms is not None),",
        "tail.round_first),",
        f"{UNROUNDED}::test_every_form_has_the_same_bits",
    ),
    Mutation(
        "terms of two dtypes are one sum",
        FORMS,
        "return terms if fits and len({other.dtype for other in others if other is not None}) == 1 else None",
        "return terms if fits else None",
        f"{UNROUNDED}::test_another_addend_is_no_residual",
    ),
    Mutation(
        "an unrounded sum that is used elsewhere is fused",
        "passes/fuse/all_reduce_rms_norm.py",
        "        if not known.issuperset(found.total.users):\n            return ReasonCode.INTERMEDIATE_USED\n",
        "",
        f"{UNROUNDED}::test_does_not_fire",
    ),
    Mutation(
        "an unrounded sum that is used elsewhere goes into a gather",
        "passes/absorb/absorb_norms.py",
        "    if norm.terms is not None and not fused.issuperset(total.users):\n        return None\n",
        "",
        f"{UNROUNDED}::test_in_front_of_a_gather_an_unrounded_sum_that_is_used_stays",
    ),
    Mutation(
        "a bias behind the scale is added before it",
        SUMS,
        "and len(biases) < 2 and not behind:",
        "and len(biases) < 2:",
        f"{SCALED}::test_does_not_fire",
    ),
    Mutation(
        "any tensor scales rows",
        SUMS,
        "return factor if is_element or proofs.is_row(other, value.shape[-1]) else None",
        "return factor",
        f"{SCALED}::test_does_not_fire",
    ),
    Mutation(
        "a sum with the residual may be scaled",
        SUMS,
        "            if way.parted is not None and not behind:\n                return None\n",
        "",
        f"{SCALED}::test_does_not_fire",
    ),
    Mutation(
        "norms of other libraries are opened for nobody",
        FOREIGN,
        "if opened[norm.call] not in remaining:",
        "if opened[norm.call] is not None:",
        f"{OPS}::test_a_norm_that_no_fusion_takes_stays",
    ),
    Mutation(
        "a norm of a part of each row is opened",
        FOREIGN,
        " or bound[ABSENT] is not None:",
        ":",
        f"{OPS}::test_what_is_not_established_stays",
    ),
    Mutation(
        "a weight of any dtype is understood",
        FOREIGN,
        "return value.dtype in (rows.dtype, torch.float32)",
        "return value.is_floating_point()",
        f"{OPS}::test_what_is_not_established_stays",
    ),
    Mutation(
        "an op with more arguments is understood",
        FOREIGN,
        "if names == declared.arguments else None",
        "if names else None",
        f"{OPS}::test_another_schema_stays",
    ),
    Mutation(
        "passes are not pickled by name",
        "passes/graph/fusion.py",
        "def __reduce__(self)",
        "def reduced(self)",
        "tests/test_pipeline.py::test_a_stack_may_pickle_the_passes",
    ),
    Mutation(
        "the first part of a product counts for all",
        "lowering/all_reduce_rms_norm/norm_in_band.py",
        "pairs + (part * sizes.words + places)",
        "pairs + places",
        f"{IN_PARTS}::test_near_the_reference",
    ),
    Mutation(
        "the last part of a product goes beyond K",
        DIVIDED,
        "depth = tl.minimum(depths.part, depths.K - first)",
        "depth = depths.part",
        f"{IN_PARTS}::test_parts_are_those_of_the_product",
    ),
    Mutation(
        "repeated rows may have any reader",
        "passes/fuse/all_reduce_rms_norm.py",
        "return all(proofs.keeps_order(node) or (more and is_pointwise(node.target)) for node in copied)",
        "return bool(copied)",
        "tests/passes/test_norm_readers.py::test_rows_that_are_repeated_behind_the_norm",
    ),
    Mutation(
        "a power is no inverse root",
        "passes/graph/norm_forms.py",
        "bool(node.args[1] == -0.5)",
        "bool(node.args[1] == -1.5)",
        "tests/passes/test_all_reduce_rms_norm.py::test_reads_every_form[gemma4]",
    ),
    Mutation(
        "any mean may be subtracted in front of the one that a layer norm takes",
        FORMS,
        "and _mean_of(subtracted) is wide:",
        "and subtracted is not wide:",
        f"{LAYERS}::test_reads_only_the_mean_of_the_same_rows",
    ),
    Mutation(
        "whatever is made of repeated rows is another kernel's than the norm",
        "passes/fuse/all_reduce_rms_norm.py",
        "(more and is_pointwise(node.target))",
        "more",
        "tests/passes/test_norm_readers.py::test_rows_that_are_repeated_behind_the_norm[largest]",
    ),
    Mutation(
        "a term beside the residual is added to it however large it is",
        SUMS,
        "return plain and proofs.known(",
        "return plain or proofs.known(",
        f"{TERMS}[_many_bytes]",
    ),
    Mutation(
        "a term beside the residual may leave the range of float16",
        SUMS,
        "value.dtype in (torch.bfloat16, torch.float32) and in_rows",
        "in_rows",
        f"{TERMS}[_float16]",
    ),
    Mutation(
        "a term beside the residual may have any strides",
        SUMS,
        "all(map(proofs.row_major, (value, proofs.fake(residual))))",
        "True",
        f"{TERMS}[_other_strides]",
    ),
    Mutation(
        "a term in front of a norm is added behind it",
        SUMS,
        "if residual is None or way.post is not None or way.unrounded:",
        "if residual is None or way.unrounded:",
        f"{TERMS}[_in_front_of_a_norm]",
    ),
    Mutation(
        "a term is not scaled as the reduced rows are",
        SUMS,
        "if step.target is not aten.add.Tensor)",
        "if step.target not in (aten.add.Tensor, aten.mul.Tensor))",
        "tests/passes/test_added_terms.py::test_computes_the_same[granite]",
    ),
    Mutation(
        "a term may be computed from the reduced rows",
        "passes/fuse/all_reduce_rms_norm.py",
        "return [added.node, *given, *needed]",
        "return [*given, *needed]",
        f"{TERMS}[_depends]",
    ),
    Mutation(
        "sums in float16 move in front of a reduction",
        "passes/forms/move_sums.py",
        "(torch.bfloat16, torch.float32)",
        "(torch.bfloat16, torch.float16, torch.float32)",
        "tests/passes/test_move_sums.py::test_float16_stays",
    ),
    Mutation(
        "a sum of as many elements moves",
        "passes/forms/move_sums.py",
        "proofs.known(total.numel() < value.numel())",
        "proofs.known(total.numel() <= value.numel())",
        "tests/passes/test_move_sums.py::test_left_alone[nothing to add]",
    ),
    Mutation(
        "ranks do not compare what is summed behind a collective",
        "passes/finish/wire_facts.py",
        "if node.target is not SUM or",
        "if node.target is SUM or",
        "tests/passes/test_move_sums.py::test_ranks_with_other_sums_run_their_graphs_as_they_are",
    ),
)
