"""The mutations of experts whose ids are clamped or marked, and of layers behind a graph break."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MARKED = "passes/graph/slots_elsewhere.py"
UNREAD = "tests/passes/test_slots_elsewhere.py"
STAYS = f"{UNREAD}::test_it_must_not_fire"
SERVED = "tests/test_serving.py::test_a_layer_behind_a_graph_break_is_not_taken_for_the_first_one"

ELSEWHERE: tuple[Mutation, ...] = (
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
        "passes/fuse/expert_projections.py",
        "while chosen is not None and experts.target in CLAMPS:",
        "while experts.target in CLAMPS:",
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
        "the layers behind a graph break need no guards",
        "ditron_inductor/serving.py",
        "return behind[0] == eval_frame.__file__",
        "return True",
        f"{SERVED}[_as_loop-True]",
    ),
    Mutation(
        "the layers of a module that is not compiled need no guards",
        "ditron_inductor/serving.py",
        "if not isinstance(one, eval_frame.OptimizedModule)}) > 1:",
        "if not isinstance(one, eval_frame.OptimizedModule)}) > 9:",
        f"{SERVED}[_layer_by_layer-False]",
    ),
)
