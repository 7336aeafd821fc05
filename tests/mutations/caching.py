"""The mutations of attention to a rank's own cache."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

KERNEL = "lowering/cached_attention/cached_kernel.py"
ATTEND = "lowering/decode_attention/split_attention.py"
NEAR = "tests/lowering/test_cached_attention.py::test_near_the_reference_in_the_interpreter"
APPENDED = f"{NEAR}[1x4of2-64x16-lengths37-appends-turned1-float32]"
MARKED = f"{NEAR}[2x4of4-300x16-given299-appends-turned2-own-float32]"
PASS = "passes/attention/cached_attention.py"
ROTARY = "passes/attention/rotary.py"
TESTS = "tests/passes/test_cached_attention.py"
BY_GRAPH = f"{TESTS}::test_what_others_need_is_written_by_the_graph"

CACHING: tuple[Mutation, ...] = (
    Mutation(
        "what the cache held at the place of the new token is attended to",
        ATTEND,
        "there &= first + tokens != token.place",
        "there &= first + tokens >= 0",
        MARKED,
    ),
    Mutation("every program adds the new token", KERNEL, "is_here = split == 0", "is_here = split >= 0", APPENDED),
    Mutation("nobody stores the new token", KERNEL, "stores = (split == 0)", "stores = (split < 0)", APPENDED),
    Mutation(
        "angles of the first sequence turn all",
        KERNEL,
        "        rows_apart(cos),",
        "        0,",
        MARKED,
    ),
    Mutation(
        "a cache that is read before is written by the call",
        PASS,
        " and set(cache.users) == {put, copy}",
        "",
        f"{BY_GRAPH}[_read_before]",
    ),
    Mutation(
        "a written cache that others read is written by the call",
        PASS,
        "if not ours or others or set",
        "if not ours or set",
        f"{TESTS}::test_every_form[caches_that_are_read_elsewhere]",
    ),
    Mutation(
        "the mask need not be that of the position",
        PASS,
        "not _follows(choice.lengths, choice.more, at)",
        "False",
        f"{TESTS}::test_every_form[another_mask_than_that_of_the_position]",
    ),
    Mutation(
        "key and value may be written at two places",
        PASS,
        "if _whole(at) is not _whole(values.position):",
        "if False:",
        f"{BY_GRAPH}[_at_two_places]",
    ),
    Mutation(
        "differences of turned halves are sums",
        ROTARY,
        "if SUMS[node.target] < 0:",
        "if False:",
        f"{TESTS}::test_other_turns_are_left_in_the_graph",
    ),
    Mutation(
        "angles may differ between heads",
        ROTARY,
        "return ones and proofs.known_equal(value.shape[-1], columns)",
        "return len(value.shape) > 0",
        f"{TESTS}::test_other_turns_are_left_in_the_graph",
    ),
    Mutation(
        "a finite number hides scores from any op",
        "passes/attention/attention_parts.py",
        "return read_mask(self.added, HIDING.get(self.node.target, (-math.inf,)))",
        "return read_mask(self.added, (-math.inf, -65536.0))",
        f"{TESTS}::test_the_number_that_hides_scores_from_cudnn[efficient--65536.0]",
    ),
)
