"""The mutations of experts that few tokens take, and of graphs that end before their peers expect it."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

EXPERTS = "lowering/expert_projections/experts_kernel.py"
FINDER = "passes/fuse/expert_projections.py"
MEETINGS = "ditron_inductor/device/meetings.py"
FOUND = "tests/passes/test_expert_projections.py"
ELSEWHERE = "passes/graph/slots_elsewhere.py"
UNREAD = "tests/passes/test_slots_elsewhere.py"
COMBINE = "lowering/expert_sums/combine_kernel.py"
KERNEL = "lowering/expert_sums/reduced_kernel.py"
SUMMED = "tests/lowering/test_combine_experts.py"
REDUCED = "tests/lowering/test_reduced_experts.py"
COMPUTED = "tests/lowering/test_expert_projections.py::test_near_the_reference_in_the_interpreter"
REFUSED = "tests/test_strict.py"
SORTS = "passes/graph/sorts.py"
ROWS = "passes/graph/expert_rows.py"
PROJECTED = "passes/fuse/grouped_projections.py"
TAKEN = "tests/passes/test_grouped_projections.py"
TILED = "lowering/grouped_projections/grouped_kernel.py"
GROUPED_ROWS = "tests/lowering/test_grouped_projections.py::test_near_the_reference_in_the_interpreter"
ABSORB = "passes/absorb/absorb_sums.py"
ABSORBED = "tests/passes/test_absorb_sums.py"
IN_BAND = "lowering/all_reduce_rms_norm/norm_in_band.py"
ADDED_UP = "tests/lowering/test_summed_experts.py::test_near_the_reference"
UNROLLED = "passes/finish/unroll_topk.py"
UNROLL_TESTS = "tests/passes/test_unroll_topk.py"
CHOOSER = "passes/fuse/choose_experts.py"
CHOSEN = "tests/passes/test_choose_experts.py"
CHOICE = "lowering/choose_experts/choose_kernel.py"
CHOICES = "tests/lowering/test_choose_experts.py"
BIASED = "tests/passes/test_expert_biases.py::test_it_must_not_fire"

ROUTING: tuple[Mutation, ...] = (
    Mutation(
        "a mask behind the weights is forgotten",
        "passes/fuse/combine_experts.py",
        "if late is None else (late, kept)",
        "if late is None else (None, kept)",
        "tests/passes/test_combine_experts.py::test_masked_rows_are_marked[masked_behind_the_weights]",
    ),
    Mutation(
        "experts may be numbered beyond the weights",
        ROWS,
        "return top_k if 0 < top_k and (of_ranks or choices <= num_experts) else None",
        "return top_k if 0 < top_k else None",
        f"{FOUND}::test_more_scores_than_experts_prove_nothing",
    ),
    Mutation(
        "copied weights may have another reader",
        FINDER,
        " or proofs.sole_user(copied) is not bmm:",
        ":",
        f"{FOUND}::test_copies_with_another_reader_stay",
    ),
    Mutation(
        "an expert multiplies all tokens",
        EXPERTS,
        "tl.sum(hits.to(tl.int32), 1) > 0",
        "tokens < sizes.T",
        COMPUTED,
    ),
    Mutation(
        "rows of slots are those of tokens",
        EXPERTS,
        "numbers = tokens if HOW.BY_TOKEN else places",
        "numbers = tokens",
        COMPUTED,
    ),
    Mutation(
        "what is made of the zeros of slots elsewhere is 0 too",
        "passes/absorb/absorb_epilogues.py",
        " and chain.zeros.isdisjoint(node.all_input_nodes):",
        ":",
        f"{UNREAD}::test_what_is_made_of_weighted_slots_stays_outside[added]",
    ),
    Mutation(
        "rows that are copied all the same are taken where they lie",
        PROJECTED,
        "for copied, matches in found.items() if len(matches) == len(copied.users)]",
        "for matches in found.values()]",
        f"{TAKEN}::test_it_must_not_fire[rows_kept]",
    ),
    Mutation(
        "ends that change are read late",
        PROJECTED,
        "if not lies or written((x, rows, ends, weight)) is not None:",
        "if not lies:",
        f"{TAKEN}::test_rows_that_are_written_to_stay",
    ),
    Mutation(
        "a tile goes on into the slots of the next expert",
        TILED,
        "end = tl.sum(tl.where(mine, last, 0))",
        "end = sizes.S",
        "tests/lowering/test_grouped_projections.py::test_every_slot_is_in_one_tile",
    ),
    Mutation(
        "experts without slots have a tile",
        TILED,
        "tiles = (counts + (BLOCK_M - 1)) // BLOCK_M",
        "tiles = tl.maximum((counts + (BLOCK_M - 1)) // BLOCK_M, 1)",
        GROUPED_ROWS,
    ),
    Mutation(
        "rows beyond x are read",
        TILED,
        "inside & (row >= 0) & (row < sizes.T)",
        "inside & (row < sizes.T)",
        "tests/lowering/test_grouped_projections.py::test_every_slot_is_in_one_tile",
    ),
    Mutation(
        "sums of halves of a product are sums of slots",
        ABSORB,
        "if not all(shape and proofs.known_equal(shape[-1], N) for shape in shapes):",
        "if not all(shapes):",
        f"{ABSORBED}::test_it_must_not_fire[factors_of_halves]",
    ),
    Mutation(
        "terms that a reduction adds up are left unmade for others",
        ABSORB,
        " or proofs.other_user(steps, {*steps, call}) is not None:",
        ":",
        f"{ABSORBED}::test_it_must_not_fire[terms_used]",
    ),
    Mutation(
        "what the compiler makes in one kernel with its sum is taken apart",
        ABSORB,
        "if terms is None or not (is_stored(terms.products) or fits_an_epilogue(terms.products, {*terms.steps})):",
        "if terms is None:",
        f"{ABSORBED}::test_products_that_are_no_tensor_in_memory_stay",
    ),
    Mutation(
        "biases of experts go into an epilogue although something else reads the products",
        "passes/absorb/absorb_epilogues.py",
        "return left <= readers",
        "return True",
        f"{ABSORBED}::test_it_must_not_fire[product_used]",
    ),
    Mutation(
        "a prompt's experts never stay with the library",
        PROJECTED,
        'if options.strategy != "tile":',
        "if False:",
        f"{TAKEN}::test_what_the_library_does_faster_stays_unless_the_kernel_is_forced[auto-0]",
    ),
    Mutation(
        "masks of rows that something else reads are removed",
        "passes/graph/rows_behind.py",
        "return same and are_read_by_row(node, lambda user, read: ends_before(user, read, ids, num_experts))",
        "return same",
        f"{TAKEN}::test_masks_of_rows_that_are_read_stay[masked_and_returned]",
    ),
    Mutation(
        "masks of rows in front of the last end are removed",
        "passes/graph/rows_behind.py",
        'return reads == ["self"] and expert_rows.are_experts_of_rows(ids, bound["offs"], num_experts)',
        'return reads == ["self"]',
        f"{TAKEN}::test_masks_of_rows_that_are_read_stay[rows_of_others]",
    ),
    Mutation(
        "biases of whatever experts are those of the slots of a prompt",
        "passes/absorb/expert_tables.py",
        'same = expert_rows.are_experts_of_rows(named, schema.operand(call, "ends"), num_experts)',
        "same = True",
        f"{TAKEN}::test_biases_of_other_experts_stay",
    ),
    Mutation(
        "a number of slots that is not known counts as none",
        PROJECTED,
        "S = S if isinstance(S, int) else E * MANY_SLOTS",
        "S = S if isinstance(S, int) else 0",
        f"{TAKEN}::test_with_a_dynamic_number_of_tokens_the_library_is_at_its_best",
    ),
    Mutation(
        "what a reduction adds may be written to before",
        ABSORB,
        "return terms if written((*rows, terms.factors)) is None",
        "return terms if True",
        f"{ABSORBED}::test_operands_that_are_written_to_stay",
    ),
    Mutation(
        "what a reduction adds may be a slice of what is written to before",
        "passes/graph/all_to_all.py",
        "while node.target in rewriting.MOVES:",
        "while proofs.keeps_order(node):",
        f"{ABSORBED}::test_products_whose_whole_is_written_to_stay",
    ),
    Mutation(
        "a sum that a reduction also takes as its residual is made twice",
        ABSORB,
        "if {*steps} & {*operands.values()} or ",
        "if ",
        f"{ABSORBED}::test_a_sum_that_the_call_has_as_its_residual_too_stays",
    ),
    Mutation(
        "products that each call would copy are summed in a reduction",
        ABSORB,
        "if not all(proofs.row_major(proofs.fake(one)) for one in rows):",
        "if False:",
        f"{ABSORBED}::test_it_must_not_fire[of_columns]",
    ),
    Mutation(
        "sums of fp64 are made in fp32",
        ABSORB,
        "if proofs.fake(total).dtype not in ACTIVATION_DTYPES:",
        "if not proofs.fake(total).dtype.is_floating_point:",
        f"{ABSORBED}::test_it_must_not_fire[in_fp64]",
    ),
    Mutation(
        "a collective whose peers normalise it adds up slots that it does not have",
        "passes/finish/conform.py",
        "if issubclass(declared, ReducedExperts) else {}",
        "if 'top_k' in {field.name for field in fields(declared)} else {}",
        "tests/models/test_divergent.py::test_a_rank_that_differs_later_runs_what_was_agreed[cpu-slots_not_normed_this_time]",
    ),
    Mutation(
        "factors of a sum of slots may have two dimensions",
        "ditron_inductor/task/rules.py",
        "yield scale.ndim == 1,",
        "yield True,",
        "tests/task/test_verify.py::test_operands_of_a_sum_of_slots_fit",
    ),
    Mutation(
        "any number of tokens is summed in a reduction",
        ABSORB,
        "isinstance(T, int) and T <= MOST_EXPERT_TOKENS and all(",
        "isinstance(T, int) and all(",
        f"{ABSORBED}::test_few_tokens_only[65]",
    ),
    Mutation(
        "a token has the slots of the token before",
        IN_BAND,
        "slot = row * TOP_K + j",
        "slot = tl.maximum(row - 1, 0) * TOP_K + j",
        ADDED_UP,
    ),
    Mutation(
        "what is added to a sum of experts is left out",
        IN_BAND,
        "            lower += low\n            upper += high\n",
        "            lower += low\n",
        ADDED_UP,
    ),
    Mutation(
        "the ends of experts may be sums of several dimensions",
        ROWS,
        " or proofs.fake(sums).ndim != 1:",
        ":",
        f"{BIASED}[counts summed up in two parts]",
    ),
    Mutation(
        "slots elsewhere may have weights that are not 0",
        ELSEWHERE,
        " or mask.args[1] != num_experts:",
        ":",
        f"{UNREAD}::test_it_must_not_fire[weights that are 0 for other ids]",
    ),
    Mutation(
        "zeros of slots elsewhere may be divided by each other",
        ELSEWHERE,
        "aten.where.self, aten.bmm.default}) - QUOTIENTS",
        "aten.where.self, aten.bmm.default})",
        f"{UNREAD}::test_rows_that_something_else_reads_are_computed[quotients of rows]",
    ),
    Mutation(
        "rows of a table may be those of other experts",
        "passes/absorb/expert_tables.py",
        "same = expert_rows.unclamped(named, num_experts) is proofs.views_up(like)[-1]",
        "same = expert_rows.unclamped(named, num_experts) is not None",
        "tests/passes/test_split_columns.py::test_it_must_not_fire[biases of other experts]",
    ),
    Mutation(
        "up is gate",
        "lowering/epilogues.py",
        '(at.expert * at.width + at.columns) * 2 + 1"',
        '(at.expert * at.width + at.columns) * 2"',
        COMPUTED,
    ),
    Mutation(
        "products of absent slots are read",
        COMBINE,
        "            there = there & (tl.load(absent",
        "            there = there | (tl.load(absent",
        f"{SUMMED}::test_near_the_reference_in_the_interpreter",
    ),
    Mutation(
        "a reduction reads products of absent slots",
        KERNEL,
        "            there = there & (tl.load(slots.absent",
        "            there = there | (tl.load(slots.absent",
        f"{REDUCED}::test_near_the_reference",
    ),
    Mutation(
        "all experts have the biases of the first one",
        KERNEL,
        "bias + expert.to(tl.int64) * N + offs_n",
        "bias + offs_n",
        f"{REDUCED}::test_near_the_reference",
    ),
    Mutation(
        "the sum of a product and its bias is not rounded",
        COMBINE,
        "(product.to(tl.float32) + row.to(tl.float32)).to(product.dtype)",
        "product.to(tl.float32) + row.to(tl.float32)",
        f"{SUMMED}::test_a_product_with_its_bias_is_rounded",
    ),
    Mutation(
        "ids of experts may be negative",
        ROWS,
        "return found.least >= 0 and found.most",
        "return found.most",
        f"{BIASED}[negative ids]",
    ),
    Mutation(
        "the experts of biases may be other ones",
        ROWS,
        "(_sorted(counted) or _flat(counted)) is ids",
        "(_sorted(counted) or _flat(counted)) is not None",
        f"{BIASED}[ends of other ids]",
    ),
    Mutation(
        "biases may be those of fewer experts",
        ROWS,
        " or kept[1].most < num_experts - 1:",
        ":",
        f"{BIASED}[clamped to fewer]",
    ),
    Mutation(
        "an input of a backward is known by its metadata alone",
        SORTS,
        "return node.meta.get(SORTED) == node.name",
        "return SORTED in node.meta",
        "tests/passes/test_mark_sorts.py::test_inputs_are_known_by_their_marks",
    ),
    Mutation(
        "a graph that was refused counts as running",
        "ditron_inductor/graph_meeting.py",
        "            meetings.stopped(self.facts)\n",
        "",
        f"{REFUSED}::test_a_graph_that_raised_is_left_behind_by_all_ranks",
    ),
    Mutation(
        "a rank at the limit of recompilations becomes eager",
        "ditron_inductor/graph_meeting.py",
        "            keep_compiled()\n",
        "            pass\n",
        "tests/models/test_recompile_limit.py::test_a_rank_at_the_limit_stays_compiled",
    ),
    Mutation(
        "who gives up for good does not say so",
        MEETINGS,
        "CLOSED_FOR_GOOD if why.for_good else CLOSED)",
        "CLOSED)",
        f"{REFUSED}::test_a_rank_that_gives_up_for_good_tells_its_peers",
    ),
    Mutation(
        "slots are scaled by their place",
        COMBINE,
        "tl.load(scale + place, mask",
        "tl.load(scale + tokens * TOP_K + j, mask",
        f"{SUMMED}::test_near_the_reference_in_the_interpreter",
    ),
    Mutation(
        "places beyond the products are read",
        COMBINE,
        "there = (place >= 0) & (place < S)",
        "there = place >= 0",
        f"{SUMMED}::test_places_count_from_the_end_and_never_leave_the_products",
    ),
    Mutation(
        "sums may be over tokens",
        "passes/fuse/combine_experts.py",
        " or dims != [1]",
        "",
        "tests/passes/test_combine_experts.py::test_it_must_not_fire[slots_of_others]",
    ),
    Mutation(
        "terms that are read elsewhere are left unmade",
        "passes/fuse/combine_experts.py",
        "proofs.other_user(inner, {*inner, last}) is not None",
        "proofs.other_user(inner, {*inner, last}) is inner",
        "tests/passes/test_combine_experts.py::test_it_must_not_fire[used_elsewhere]",
    ),
    Mutation(
        "tokens need not have as many slots as they take experts",
        SORTS,
        "node.target is operator.getitem and node.args[1] == 1 and",
        "node.target is operator.getitem and",
        "tests/passes/test_combine_experts.py::test_it_must_not_fire[to_ranked_values]",
    ),
    Mutation(
        "rows may be added to a part of the columns",
        "passes/fuse/combine_experts.py",
        "if not fits or not _fits(",
        "if not _fits(",
        "tests/passes/test_combine_experts.py::test_it_must_not_fire[to_some_columns]",
    ),
    Mutation(
        "the first tile of an expert is the last one of another",
        KERNEL,
        "tl.where(tiles_up_to <= tile, tiles_up_to",
        "tl.where(tiles_up_to < tile, tiles_up_to",
        f"{REDUCED}::test_near_the_reference",
    ),
    Mutation(
        "products are summed before they are made",
        KERNEL,
        "made = alive & timed_wait(use, chunk, rank, TRACE)",
        "made = alive",
        "tests/lowering/test_reduced_compile.py::test_waits_and_releases_are_there",
    ),
    Mutation(
        "the sums of peers are added before they come",
        KERNEL,
        "whole = alive & timed_wait_all(use, chunk, WORLD, TRACE)",
        "whole = alive",
        f"{REDUCED}::test_a_late_rank_and_calls_back_to_back",
    ),
    Mutation(
        "a sum that is read elsewhere is reduced with it",
        "passes/fuse/grouped_matmul_all_reduce.py",
        "if other is None else",
        "if other is not node else",
        "tests/passes/test_grouped_matmul_all_reduce.py::test_it_must_not_fire",
    ),
    Mutation(
        "the sequences of a batch are one run of tokens",
        KERNEL,
        "inner // sizes.run * (sizes.run * WORLD) + block.owner * sizes.run + inner % sizes.run",
        "block.owner * sizes.owned + inner",
        f"{REDUCED}::test_near_the_reference",
    ),
    Mutation(
        "counters of several parts are not zero after the last arrival",
        "ditron_inductor/core/signals.py",
        "total - parts\n    if last:\n        tl.atomic_xchg(counter, 0,",
        "total - parts\n    if last:\n        tl.atomic_xchg(counter, 1,",
        f"{REDUCED}::test_near_the_reference",
    ),
    Mutation(
        "parts of a stage are not counted in the next one",
        KERNEL,
        "if products_done.row != stage:",
        "if products_done.row < 0:",
        f"{REDUCED}::test_near_the_reference",
    ),
    Mutation(
        "a program that goes on to other sums keeps what it has not counted",
        KERNEL,
        "sums_done = Done(target, flag_row, tl.full((), 0, tl.int32))",
        "sums_done = Done(target, flag_row, sums_done.parts)",
        f"{REDUCED}::test_near_the_reference",
    ),
    Mutation(
        "products that are read elsewhere are not made",
        "passes/fuse/grouped_matmul_all_reduce.py",
        'user is reader or (user.op == "output" and row_major)',
        "True",
        "tests/passes/test_grouped_matmul_all_reduce.py::test_it_must_not_fire[products_read_elsewhere]",
    ),
    Mutation(
        "an exchange of tokens with their experts has no matmul beside it",
        "passes/finish/review_left_alone.py",
        "if is_beside_matmul(node) or _routed_matmul(node) is not None else",
        "if is_beside_matmul(node) else",
        "tests/passes/test_review_left_alone.py::test_the_reason_and_its_node[to experts]",
    ),
    Mutation(
        "equal values are chosen from the right",
        UNROLLED,
        "begin=self.size - 1, step=-1)",
        "begin=0, step=1)",
        f"{UNROLL_TESTS}::test_chooses_what_topk_chooses",
    ),
    Mutation(
        "a NaN is as large as its bits are",
        UNROLLED,
        "ordered = self.op(aten.where.self, nan, self._number(self.most, self.narrow), ordered)",
        "ordered = self.op(aten.where.self, nan, ordered, ordered)",
        f"{UNROLL_TESTS}::test_chooses_what_topk_chooses",
    ),
    Mutation(
        "negative values are in the order of their bits",
        UNROLLED,
        "self.op(aten.bitwise_and.Scalar, sign, self.most))",
        "self.op(aten.bitwise_and.Scalar, sign, 0))",
        f"{UNROLL_TESTS}::test_chooses_what_topk_chooses",
    ),
    Mutation(
        "a topk is unrolled on the CPU device",
        UNROLLED,
        'GPUS = ("cuda",)',
        'GPUS = ("cuda", "cpu")',
        f"{UNROLL_TESTS}::test_not_on_the_cpu_device",
    ),
    Mutation(
        "a topk is unrolled though Inductor would reduce in loops",
        UNROLLED,
        "or not _in_one_kernel():",
        "or not isinstance(_in_one_kernel(), bool):",
        f"{UNROLL_TESTS}::test_inductor_may_be_told_to_loop",
    ),
    Mutation(
        "a part may be wider than what is reduced without a loop",
        UNROLLED,
        "if size <= parts * bounds.width and not size % parts",
        "if not size % parts",
        f"{UNROLL_TESTS}::test_parts",
    ),
    Mutation(
        "a chain may be longer than one kernel",
        UNROLLED,
        "if k * (1 + math.ceil(parts / 3)) > MOST_STEPS:",
        "if not MOST_STEPS:",
        f"{UNROLL_TESTS}::test_one_kernel_has_room_for_the_chain",
    ),
    Mutation(
        "a bias keeps its dimensions",
        CHOOSER,
        "rewriting.row(graph, match.matmul.bias)",
        "match.matmul.bias",
        f"{CHOSEN}::test_every_form_of_a_router",
    ),
    Mutation(
        "scores that are read elsewhere are left unmade",
        CHOOSER,
        "or proofs.other_user([*below, logits], [node, *below]) is not None",
        "",
        f"{CHOSEN}::test_it_must_not_fire[scores_are_returned]",
    ),
    Mutation(
        "a choice may be of the smallest scores",
        CHOOSER,
        'and bound["largest"]',
        "",
        f"{CHOSEN}::test_it_must_not_fire[the_smallest]",
    ),
    Mutation(
        "a softmax may be over tokens",
        CHOOSER,
        "return node if last and bound",
        "return node if bound",
        f"{CHOSEN}::test_it_must_not_fire[a_softmax_over_tokens]",
    ),
    Mutation(
        "values that are used elsewhere are divided inside",
        CHOOSER,
        "or proofs.other_user([values, total], [division, total]) is not None",
        "",
        f"{CHOSEN}::test_values_that_are_used_elsewhere_are_not_divided_inside",
    ),
    Mutation(
        "a NaN is as large as its bits",
        CHOICE,
        "tl.where(scores == scores, scores.to(tl.int32, bitcast=True), 0x7FFFFFFF)",
        "scores.to(tl.int32, bitcast=True)",
        f"{CHOICES}::test_special_scores_are_chosen_as_by_a_sort",
    ),
    Mutation(
        "logits are not rounded before they are compared",
        CHOICE,
        "total.to(bias.dtype.element_ty).to(tl.float32)",
        "total",
        f"{CHOICES}::test_logits_are_rounded",
    ),
    Mutation(
        "one part of the product is left out",
        CHOICE,
        "there = (part < sizes.parts)",
        "there = (part < sizes.parts - 1)",
        f"{CHOICES}::test_near_the_reference_in_the_interpreter",
    ),
    Mutation(
        "columns that no expert has are added to the softmax",
        CHOICE,
        'float("-inf")), 0)), 0.0)',
        'float("-inf")), 0)), 1.0)',
        f"{CHOICES}::test_near_the_reference_in_the_interpreter",
    ),
)
