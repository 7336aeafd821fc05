"""The mutations of experts that few tokens take, and of graphs that end before their peers expect it."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

EXPERTS = "lowering/expert_projections/experts_kernel.py"
FINDER = "passes/fuse/expert_projections.py"
MEETINGS = "ditron_inductor/device/meetings.py"
FOUND = "tests/passes/test_expert_projections.py"
REDUCED = "tests/lowering/test_grouped_matmul_all_reduce.py"
COMPUTED = "tests/lowering/test_expert_projections.py::test_near_the_reference_in_the_interpreter"
REFUSED = "tests/test_strict.py"

ROUTING: tuple[Mutation, ...] = (
    Mutation(
        "experts may be numbered beyond the weights",
        FINDER,
        "return top_k if 0 < top_k and choices <= num_experts else None",
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
        "results go to the columns of another part",
        "lowering/all_reduce/chunked.py",
        "offset = (begin - part * sizes.M) * across + part * width",
        "offset = (begin - part * sizes.M) * across",
        f"{REDUCED}::test_near_the_reference[cpu2-0-chunked]",
    ),
    Mutation(
        "all parts have the products of the first one",
        "lowering/grouped_matmul_all_reduce/chunked.py",
        "if part != self._part:",
        "if self._part < 0:",
        f"{REDUCED}::test_near_the_reference[cpu2-0-chunked]",
    ),
    Mutation(
        "slots are scaled by their place",
        "lowering/grouped_matmul_all_reduce/combine.py",
        "tl.load(scale + place, mask",
        "tl.load(scale + tokens * TOP_K + j, mask",
        f"{REDUCED}::test_sums_of_a_run_of_tokens[cpu2-3]",
    ),
    Mutation(
        "sums may be over tokens",
        "passes/fuse/grouped_matmul_all_reduce.py",
        """if len(shape) != 3 or [dim % 3 for dim in proofs.arguments(total)["dim"]] != [1] or""",
        "if len(shape) != 3 or",
        "tests/passes/test_grouped_matmul_all_reduce.py::test_it_must_not_fire[sums_over_tokens]",
    ),
    Mutation(
        "what is returned too is fused away",
        "passes/fuse/grouped_matmul_all_reduce.py",
        "if other is not None:",
        "if other is steps:",
        "tests/passes/test_grouped_matmul_all_reduce.py::test_it_must_not_fire[used_elsewhere]",
    ),
)
