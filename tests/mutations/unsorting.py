"""The mutations of experts whose slots are not sorted any more."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

PLACES = "passes/graph/place_order.py"
SORTED_EXPERTS = "passes/fuse/sorted_experts.py"
UNSORTED = "tests/passes/test_sorted_experts.py"
STAYS = f"{UNSORTED}::test_a_mask_that_the_call_does_not_have_stays"

UNSORTING: tuple[Mutation, ...] = (
    Mutation(
        "a number of each slot is taken for one of all places",
        PLACES,
        "return given.ndim < value.ndim or bool(proofs.known_equal(given.shape[0], 1))",
        "return True",
        f"{UNSORTED}::test_where_the_order_matters_it_stays[a_number_for_each_place]",
    ),
    Mutation(
        "the ends may be those of other ids",
        PLACES,
        'return ids if expert_rows.are_experts_of_rows(ids, bound["offs"], num_experts) else None',
        "return ids",
        f"{UNSORTED}::test_where_the_order_matters_it_stays[ends_of_other_ids]",
    ),
    Mutation(
        "what is brought into the order again counts as brought back",
        PLACES,
        "if named is Kind.PLACES and indexed in",
        "if named in (Kind.PLACES, Kind.SLOTS) and indexed in",
        f"{UNSORTED}::test_where_the_order_matters_it_stays[back_by_the_slots]",
    ),
    Mutation(
        "rows may be put over each other",
        PLACES,
        "(adds or kinds[named] is Kind.SLOTS)",
        "True",
        f"{UNSORTED}::test_where_the_order_matters_it_stays[put_without_its_slot]",
    ),
    Mutation(
        "slots of any number of tokens are left unsorted",
        SORTED_EXPERTS,
        "not 0 < S <= most_expert_tokens(strategy, top_k, num_experts) * top_k",
        "not 0 < S",
        f"{UNSORTED}::test_with_many_slots_of_an_expert_torch_is_faster[97-0]",
    ),
    Mutation(
        "weights of slots are read after they were written",
        SORTED_EXPERTS,
        " or not _are_kept(sort, kinds)",
        "",
        f"{UNSORTED}::test_weights_that_are_written_meanwhile",
    ),
    Mutation(
        "weights are copied where no kernel runs",
        SORTED_EXPERTS,
        "runs = strategy == \"tile\" or proofs",
        "runs = True or proofs",
        f"{UNSORTED}::test_it_can_be_left_out[on_the_CPU_device]",
    ),
    Mutation(
        "rows of tokens may have gaps",
        SORTED_EXPERTS,
        "whole and proofs.row_major(x)",
        "whole",
        f"{UNSORTED}::test_a_token_whose_row_has_gaps_is_copied",
    ),
    Mutation(
        "experts of other ranks are computed",
        SORTED_EXPERTS,
        "make(match.top_k, tokens is not None, match.has_absent)",
        "make(match.top_k, tokens is not None, False)",
        f"{UNSORTED}::test_experts_of_other_ranks",
    ),
    Mutation(
        "what is returned may share memory with an input",
        SORTED_EXPERTS,
        'user.op == "output" or ',
        "",
        f"{UNSORTED}::test_what_is_returned_shares_no_memory",
    ),
    Mutation(
        "tokens are more rows than take experts",
        SORTED_EXPERTS,
        "return indexed[0] if whole and",
        "return indexed[0] if",
        f"{UNSORTED}::test_more_rows_than_tokens_that_take_experts",
    ),
    Mutation(
        "masks of rows that a call computes are a part of it",
        "passes/graph/rows_behind.py",
        "return rows if of_call and proofs.fake(weights[0]).shape[0] == num_experts else None",
        "return rows if of_call else None",
        f"{STAYS}[more_rows]",
    ),
    Mutation(
        "masks by whatever ids are a part of a call",
        "passes/graph/rows_behind.py",
        "of_call = proofs.views_up(ids)[-1] is proofs.views_up(experts)[-1] and proofs.alike(ids, experts)",
        "of_call = proofs.alike(ids, experts)",
        f"{STAYS}[rows_of_other_ids]",
    ),
    Mutation(
        "what is made of masked rows is 0 in the slots elsewhere",
        "passes/absorb/absorb_epilogues.py",
        "            chain.values[node] = chain.values[rows]\n            chain.zeros.add(node)\n",
        "            chain.values[node] = chain.values[rows]\n",
        f"{STAYS}[in_front_of_something_that_makes_no_zeros]",
    ),
    Mutation(
        "masks in another dtype are a part of a call",
        "passes/graph/rows_behind.py",
        "if proofs.fake(rows).dtype != proofs.fake(node).dtype:",
        "if False:",
        f"{STAYS}[in_another_dtype]",
    ),
    Mutation(
        "experts of many slots are not left to torch",
        "ditron_inductor/task/expert_nodes.py",
        "few = MOST_SLOTS_OF_AN_EXPERT * num_experts // top_k",
        "few = MOST_ORDERED_TOKENS",
        f"{UNSORTED}::test_with_many_slots_of_an_expert_torch_is_faster[97-0]",
    ),
    Mutation(
        "zeros to which a backward adds rows are saved for it",
        "passes/normalize/recompute_zeros.py",
        "CheckpointPolicy.MUST_RECOMPUTE",
        "CheckpointPolicy.PREFER_SAVE",
        "tests/passes/test_recompute_zeros.py::test_the_backward_makes_its_zeros",
    ),
    Mutation(
        "a number of tokens is taken for the weight of a slot",
        "passes/graph/slot_readings.py",
        "isinstance(factor, fx.Node) and proofs.tensor(factor) is not None]",
        "isinstance(factor, fx.Node)]",
        "tests/passes/test_top_one.py::test_a_number_of_tokens_is_no_weight",
    ),
)
