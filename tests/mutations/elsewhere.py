"""The mutations of experts whose ids are clamped or marked, of the guards of a served step, and of what passes must not
take for granted: factors, replicated inputs, results, lengths.
"""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MARKED = "passes/graph/slots_elsewhere.py"
UNREAD = "tests/passes/test_slots_elsewhere.py"
STAYS = f"{UNREAD}::test_it_must_not_fire"
SERVING, SERVED = "ditron_inductor/serving.py", "tests/test_serving.py"

ACROSS = "tests/passes/test_move_across.py"
COMBINED = "passes/fuse/combine_experts.py"
WEIGHTED = "tests/passes/test_weighted_slots.py"
COUNTED = "tests/passes/test_expert_counts.py"
READINGS, READ = "passes/graph/slot_readings.py", "tests/passes/test_slot_readings.py"
ENDINGS = "passes/graph/slot_sums.py"
LEFT, ALONE = "passes/finish/left_experts.py", "tests/passes/test_left_experts.py"

ELSEWHERE: tuple[Mutation, ...] = (
    Mutation(
        "few tokens are said to need another form",
        LEFT,
        "if tokens < LEAST_TOKENS:",
        "if tokens < 0:",
        f"{ALONE}::test_the_op_that_is_none_of_the_form_is_named",
    ),
    Mutation(
        "rows in the order of the experts are said to be those of tokens",
        LEFT,
        "if picked and other_matmul(node)",
        "if other_matmul(node)",
        f"{ALONE}::test_products_of_which_nothing_is_known",
    ),
    Mutation(
        "a factor behind the sum is taken for a part of it",
        LEFT,
        "fits = not added and number_of(node) is not None",
        "fits = True",
        f"{ALONE}::test_the_op_that_is_none_of_the_form_is_named",
    ),
    Mutation(
        "a batched matmul is not searched for copied weights",
        LEFT,
        "((picked and added) or _copies_weights(node))",
        "picked and added",
        f"{ALONE}::test_experts_whose_weights_are_copied",
    ),
    Mutation(
        "nothing is said of gradients of tokens from batched experts",
        "passes/finish/review_left_alone.py",
        "    return ReasonCode.BATCHED_MATMUL.at(experts.matmul)",
        "    return None",
        f"{ALONE}::test_gradients_of_tokens_that_lie_in_batches",
    ),
    Mutation(
        "a reduction with its norm hides why it has no experts",
        "passes/finish/outside.py",
        "if not without or reason is None or reason.pattern not in options.fusions:",
        "if True:",
        f"{ALONE}::test_a_reduction_with_its_norm_says_so_too",
    ),
    Mutation(
        "rows in any order are said to be tokens on their way to experts",
        "passes/graph/token_exchanges.py",
        "return is_order(source) or sorted_slots(source) is not None",
        "return True",
        "tests/passes/test_review_left_alone.py::test_the_reason_and_its_node[picked, to others]",
    ),
    Mutation(
        "counts of other rows are said to be those of what an all-to-all brings",
        "passes/graph/token_exchanges.py",
        "if counted and proofs.same_shape(tuple(proofs.fake(numbers).shape), (received.shape[0],)):",
        "if counted:",
        "tests/passes/test_review_left_alone.py::test_the_reason_and_its_node[fewer are counted]",
    ),
    Mutation(
        "columns that become rows are said to be tokens",
        "passes/graph/token_exchanges.py",
        "return value.dtype.is_floating_point and value.ndim > 0 and proofs.known_equal(value.shape[-1], width)",
        "return value.dtype.is_floating_point and value.ndim > 0",
        "tests/passes/test_review_left_alone.py::test_the_reason_and_its_node[columns, to experts]",
    ),
    Mutation(
        "documents that are counted are said to be tokens for experts",
        "passes/graph/token_exchanges.py",
        "if unequal or _names_experts(search, num_ranks):",
        "if True:",
        "tests/passes/test_review_left_alone.py::test_the_reason_and_its_node[documents are counted]",
    ),
    Mutation(
        "the gradient of any exchange is said to be one of tokens",
        "passes/normalize/mark_exchanges.py",
        "if functions and all(shows_tokens(one) is not None for one in functions):",
        "if functions:",
        "tests/passes/test_mark_exchanges.py::test_the_gradient_of_another_exchange_is_not_marked",
    ),
    Mutation(
        "ends that count nothing known are said to be biases of other experts",
        "passes/fuse/grouped_matmul_all_reduce.py",
        "return ReasonCode.EXPERT_ENDS.at(ends)",
        "return ReasonCode.EXPERT_BIAS.at(ends)",
        "tests/passes/test_expert_biases.py::test_it_must_not_fire[counted from one]",
    ),
    Mutation(
        "ranks do not compare factors that are whole numbers",
        "passes/finish/wire_facts.py",
        "(int, float) if node.target in FACTORS else float",
        "float",
        f"{ACROSS}::test_ranks_with_other_factors_run_their_graphs_as_they_are",
    ),
    Mutation(
        "what is summed over the ranks is taken for replicated",
        "passes/graph/row_regions.py",
        "return any(found.intersection(region.roots) for found in operands)",
        "return False",
        "tests/passes/test_sequence_parallel.py::test_left_alone[of_its_roots]",
    ),
    Mutation(
        "two results are one piece of memory",
        "passes/normalize/normalize_collectives.py",
        "return proofs.is_returned(node) and proofs.is_returned(other)",
        "return False",
        "tests/passes/test_normalize_collectives.py::test_equal_tensors_that_are_both_returned_stay_two",
    ),
    Mutation(
        "a length without a limit wraps",
        "passes/attention/flash_decode.py",
        "(node, torch.int64), node)",
        "(node, torch.int32), node)",
        "tests/passes/test_flash_decode.py::test_a_length_may_be_as_large_as_its_numbers",
    ),
    Mutation(
        "slots elsewhere may have weights that are not 0",
        MARKED,
        "if mask.target is aten.ge.Scalar and mask.args[1] == num_experts:",
        "if mask.target is aten.ge.Scalar:",
        f"{STAYS}[weights that are 0 for other ids]",
    ),
    Mutation(
        "zeros of slots elsewhere may be divided by each other",
        MARKED,
        "aten.where.self, aten.bmm.default}) - QUOTIENTS",
        "aten.where.self, aten.bmm.default})",
        f"{UNREAD}::test_rows_that_something_else_reads_are_computed[quotients of rows]",
    ),
    Mutation(
        "weights may be 0 in the slots of another rank",
        MARKED,
        "return parts is not None and mask is parts[0]",
        "return parts is not None",
        f"{STAYS}[weights of another rank]",
    ),
    Mutation(
        "a router may mark slots elsewhere by any number",
        MARKED,
        "if chosen.target is not aten.where.self or not proofs.is_full(chosen.args[1], -1):",
        "if chosen.target is not aten.where.self:",
        f"{STAYS}[marked by another number]",
    ),
    Mutation(
        "a router may take remainders by another number",
        MARKED,
        "own.target not in REMAINDERS or own.args[1] != num_experts:",
        "own.target not in REMAINDERS:",
        f"{STAYS}[remainders by another number, of the router]",
    ),
    Mutation(
        "experts may be clamped to fewer",
        "passes/graph/expert_rows.py",
        "if kept is None or kept[1].least > 0 or kept[1].most < num_experts - 1:",
        "if kept is None:",
        "tests/passes/test_expert_projections.py::test_choices_may_be_clamped_to_all_experts",
    ),
    Mutation(
        "a remainder is never negative",
        "passes/graph/expert_rows.py",
        "return Range(min(max(self.least, -most), 0), max(min(self.most, most), 0))",
        "return Range(0, max(min(self.most, most), 0))",
        "tests/passes/test_grouped_projections.py::test_slots_that_the_router_marks_are_elsewhere_too",
    ),
    Mutation(
        "experts that copy weights have no note",
        "passes/fuse/expert_projections.py",
        "elif expert_rows.copies_weights(bmm):",
        "elif False:",
        "tests/passes/test_outside.py::test_experts_whose_weights_are_copied",
    ),
    Mutation(
        "no module is checked",
        SERVING,
        "found.append(of_inputs or kind not in seen)",
        "found.append(of_inputs)",
        f"{SERVED}::test_a_layer_is_not_taken_for_the_first_one[_as_module-True]",
    ),
    Mutation(
        "every layer is checked",
        SERVING,
        'INDEX.sub("[]", guard.name)',
        "guard.name",
        f"{SERVED}::test_what_is_checked_does_not_grow_with_the_layers",
    ),
    Mutation(
        "any places are those of slots with factors of their own",
        COMBINED,
        "if weights is not None and not sorts and not is_permutation(index):",
        "if False:",
        f"{WEIGHTED}::test_it_must_not_fire[of_any_places]",
    ),
    Mutation(
        "a place has the factor of another slot",
        COMBINED,
        "scale = _put(graph, match.index, by_slot, _length(graph, match.index))",
        "scale = rewriting.call(graph, aten.index.Tensor, (by_slot, [match.index]), by_slot, (S,))",
        f"{WEIGHTED}::test_it_becomes_one_call[behind_the_index]",
    ),
    Mutation(
        "rows that are written to some slots are written to all",
        COMBINED,
        "whole = not sorts or (is_order(index) and proofs.alike(taken, rows))",
        "whole = True",
        f"{WEIGHTED}::test_it_must_not_fire[written_to_some]",
    ),
    Mutation(
        "ends may be searched for in ids that do not ascend",
        "passes/graph/expert_rows.py",
        "(not count.ascending and _flat(count.numbers) is ids)",
        "(_flat(count.numbers) is ids)",
        f"{COUNTED}::test_what_is_no_count_of_them[not sorted]",
    ),
    Mutation(
        "a bin of two numbers counts one",
        "passes/graph/expert_rows.py",
        "(count.most is None or found.most <= count.most)",
        "True",
        f"{COUNTED}::test_ids_of_other_ranks_are_counted_nowhere",
    ),
    Mutation(
        "a slot may be added twice, and another one not at all",
        READINGS,
        "sorted(slot.number for slot in slots) != list(range(k))",
        "len(slots) != k",
        f"{READ}::test_it_must_not_fire[not_all_slots]",
    ),
    Mutation(
        "slots that are added one by one have the weights of others",
        READINGS,
        "whole and dim == slots and found == number",
        "whole and dim == slots",
        f"{READ}::test_it_must_not_fire[weights_of_other_slots]",
    ),
    Mutation(
        "the weights of slots may be of several tensors",
        READINGS,
        "slot.rows is rows and slot.weights is weights for",
        "slot.rows is rows for",
        f"{READ}::test_it_must_not_fire[weights_of_other_choices]",
    ),
    Mutation(
        "slots may be subtracted",
        READINGS,
        "or node.kwargs or len(terms) != 2",
        "or len(terms) != 2",
        f"{READ}::test_it_must_not_fire[a_slot_subtracted]",
    ),
    Mutation(
        "what is behind two other tensors is added to one",
        READINGS,
        "if not slots or len(others) > 1:",
        "if not slots:",
        f"{READ}::test_it_must_not_fire[onto_two_others]",
    ),
    Mutation(
        "rows may be those of tokens in another order",
        READINGS,
        "return (source, steps) if dims == sorted(dims) else None",
        "return source, steps",
        f"{READ}::test_it_must_not_fire[of_tokens_in_another_order]",
    ),
    Mutation(
        "a loop forgets what it began with",
        ENDINGS,
        "    if base is not None:",
        "    if False:",
        f"{READ}::test_it_becomes_one_node[one_by_one_onto_another]",
    ),
    Mutation(
        "a number behind a sum is forgotten",
        ENDINGS,
        "    if factor == 1.0:",
        "    if True:",
        f"{READ}::test_it_becomes_one_node[multiplied]",
    ),
    Mutation(
        "any number becomes a part of the factors of slots",
        ENDINGS,
        "if number is not None and LEAST_FACTOR <= abs(factor * number) <= 1 / LEAST_FACTOR:",
        "if number is not None:",
        f"{READ}::test_it_must_not_fire[very_large]",
    ),
    Mutation(
        "the weighted sum of one token's slots is a matmul",
        "passes/normalize/fold_batches.py",
        "if source is None or weighs_products(node):",
        "if source is None:",
        f"{READ}::test_a_decode_step_adds_them_up_in_its_reduction[1-few_by_einsum]",
    ),
    Mutation(
        "copies of matrices may lie in any order",
        "passes/fuse/expert_projections.py",
        "if fits and self.dims ==",
        "if fits or self.dims ==",
        "tests/passes/test_einsum_experts.py::test_it_must_not_fire[columns_of_all_experts]",
    ),
    Mutation(
        "the weights of other rows are those of one call",
        "passes/fuse/expert_projections.py",
        "rows = match.rows is other.rows and",
        "rows =",
        "tests/passes/test_einsum_experts.py::test_the_weights_of_other_rows_are_another_call",
    ),
    Mutation(
        "a product with a number for each row is that of an expert",
        "passes/absorb/absorb_sums.py",
        " and reading.unrolled and not _is_of_experts(products):",
        " and False:",
        "tests/passes/test_top_one.py::test_a_scaled_matmul_is_no_expert",
    ),
    Mutation(
        "one slot of each token has the weight of another",
        COMBINED,
        "if weights is not None and not sorts and not is_permutation(index):",
        "if weights is not None and not sorts and reading.top_k > 1 and not is_permutation(index):",
        "tests/passes/test_top_one.py::test_it_must_not_fire[scaled_at_other_places]",
    ),
    Mutation(
        "the weights of tokens with one slot may be those of columns",
        READINGS,
        "and proofs.same_shape((*scale,), (*shape[:-1], 1)) and",
        "and",
        "tests/passes/test_top_one.py::test_it_must_not_fire[scaled_by_columns]",
    ),
)
