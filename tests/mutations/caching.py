"""The mutations of attention to a rank's own cache."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

KERNEL = "lowering/cached_attention/cached_kernel.py"
ATTEND = "lowering/decode_attention/split_attention.py"
NEAR = "tests/lowering/test_cached_attention.py::test_near_the_reference_in_the_interpreter"
APPENDED = f"{NEAR}[1x4of2-64x16-lengths37-appends-turned1-float32]"
MARKED = f"{NEAR}[2x4of4-300x16-given299-appends-turned2-own-float32]"
PASS = "passes/attention/cached_attention.py"
WRITES = "passes/attention/cache_writes.py"
ROTARY = "passes/attention/rotary.py"
TESTS = "tests/passes/test_cached_attention.py"
CACHES = "tests/passes/test_cache_forms.py"
BLOCKS = "passes/attention/cache_blocks.py"
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
        WRITES,
        " and set(cache.users) == {put, copy}",
        "",
        f"{BY_GRAPH}[_read_before]",
    ),
    Mutation(
        "a written cache that others read is written by the call",
        WRITES,
        "if not ours or others or set",
        "if not ours or set",
        f"{TESTS}::test_every_form[caches_that_are_read_elsewhere]",
    ),
    Mutation(
        "the mask need not be that of the position",
        PASS,
        "not _follows(choice.lengths, choice.more, keys.position)",
        "False",
        f"{TESTS}::test_every_form[another_mask_than_that_of_the_position]",
    ),
    Mutation(
        "key and value may be written at two places",
        PASS,
        "if not _same_places(keys.position, values.position):",
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
    Mutation(
        "negative blocks are not counted from the end",
        ATTEND,
        "pages = tl.where(pages < 0, pages + count, pages)",
        "pages = pages + 0",
        f"{NEAR}[3x4of2-60x16-lengths41_60_0-turned1-tokens_first-pages4-float32]",
    ),
    Mutation(
        "a block that the caches do not have is another one",
        ATTEND,
        "gone |= lost & read",
        "pass",
        "tests/lowering/test_cached_attention.py::test_a_block_that_the_caches_do_not_have",
    ),
    Mutation(
        "blocks of pages begin at the first place of one",
        ATTEND,
        "inside = (span.begin + tokens) % HOW.PAGE",
        "inside = tokens",
        "tests/lowering/test_cached_attention.py::test_near_the_reference_in_the_interpreter",
    ),
    Mutation(
        "all blocks have the pages of the first",
        ATTEND,
        "columns += block * span.step // HOW.PAGE",
        "columns += 0",
        "tests/lowering/test_cached_attention.py::test_pages_that_lie_far_apart",
    ),
    Mutation(
        "all pages are reached by 32 bits",
        ATTEND,
        "pages.to(tl.int64 if HOW.FAR else tl.int32)",
        "pages.to(tl.int32)",
        "tests/lowering/test_cached_attention.py::test_pages_that_lie_far_apart",
    ),
    Mutation(
        "tokens of a page may lie anywhere",
        "lowering/decode_attention/decode_config.py",
        "(page - 1) * token + head_dim",
        "head_dim",
        "tests/lowering/test_cached_attention.py::test_how_far_pages_may_lie_apart",
    ),
    Mutation(
        "all sequences have the position of the first",
        KERNEL,
        "tl.load(tensors.position + batch * sizes.position)",
        "tl.load(tensors.position)",
        f"{NEAR}[3x4of2-60x16-lengths41_59_0-appends-turned2-own-float32]",
    ),
    Mutation(
        "the rows of a block table may be any sequences",
        BLOCKS,
        "if batch + columns != found or view is None or",
        "if view is None or",
        f"{CACHES}::test_what_is_no_cache_in_blocks_is_gathered_by_the_graph[across]",
    ),
    Mutation(
        "keys and values may be in other blocks",
        PASS,
        "if same_value(keys.table, values.table) else match",
        "if keys is not None else match",
        f"{CACHES}::test_values_in_another_order_are_gathered_by_the_graph[of_other_blocks]",
    ),
    Mutation(
        "blocks may be copied",
        BLOCKS,
        "return in_rows and not joins and (cache.is_contiguous() or not divides)",
        "return in_rows or joins or divides",
        f"{CACHES}::test_what_is_no_cache_in_blocks_is_gathered_by_the_graph[copied]",
    ),
    Mutation(
        "tokens may be written to the cache of another sequence",
        WRITES,
        " and _counts(sequences, B)",
        "",
        f"{CACHES}::test_what_is_written_elsewhere_is_written_by_the_graph[other_sequences]",
    ),
    Mutation(
        "the lengths may be those of other sequences",
        PASS,
        "return more == 1 and _same_places(lengths, position)",
        "return more == 1",
        f"{CACHES}::test_positions_and_lengths_of_other_sequences",
    ),
    Mutation(
        "blocks that would be computed are read in memory",
        BLOCKS,
        " and _is_in_memory(cache) else None",
        " else None",
        f"{CACHES}::test_what_is_no_cache_in_blocks_is_gathered_by_the_graph[computed]",
    ),
    Mutation(
        "the token of one sequence is written by the graph",
        WRITES,
        "proofs.same_shape(_behind_ones(value.shape), _behind_ones(wanted))",
        "proofs.same_shape(tuple(value.shape), tuple(wanted))",
        "tests/models/test_cache_forms.py::test_steps_are_those_of_eager_mode[heads_first-1]",
    ),
)
