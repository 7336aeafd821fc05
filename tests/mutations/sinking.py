"""The mutations of attention with sinks, and of ranks that count collectives differently."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

KERNEL = "lowering/cached_attention/cached_kernel.py"
ATTEND = "lowering/decode_attention/split_attention.py"
NEAR = "tests/lowering/test_cached_attention.py::test_near_the_reference_in_the_interpreter"
APPENDED = f"{NEAR}[2x4of2-300x16-bias131-appends-turned2-sinks-float32]"
OUTSIDE = "tests/lowering/test_cached_attention.py::test_nothing_outside_of_the_bounds_is_read"
READ = f"{NEAR}[2x6of2-70x16-bias0-sinks-float32]"
PASS = "passes/attention/sunk_attention.py"
TESTS = "tests/passes/test_sunk_attention.py"
NEVER = f"{TESTS}::test_it_must_not_fire"
LOG = "ditron_inductor/device/meeting_log.py"
COUNTS = "tests/models/test_divergent.py::test_ranks_that_count_differently_meet_when_they_are_idle"

SINKING: tuple[Mutation, ...] = (
    Mutation("every split adds the sinks", KERNEL, "(sinks), split == 0", "(sinks), split >= 0", READ),
    Mutation("the new token has no bias", ATTEND, "score += token.bias", "score += 0.0", APPENDED),
    Mutation(
        "tokens in front of all that are shown are read",
        KERNEL,
        "tl.maximum(tl.load(tensors.begin + batch * sizes.bounds), 0) // ALIGNED * ALIGNED",
        "batch * 0",
        OUTSIDE,
    ),
    Mutation(
        "tokens behind all that are shown are read",
        KERNEL,
        "tl.minimum(tl.load(tensors.end + batch * sizes.bounds), sizes.capacity)",
        "sizes.capacity",
        OUTSIDE,
    ),
    Mutation(
        "values of hidden tokens stay in the sum",
        KERNEL,
        "if tl.max(tl.max((o != o).to(tl.int32), 1), 0) != 0:",
        "if split < 0:",
        APPENDED,
    ),
    Mutation("a low sink has bounds too", KERNEL, "usual = is_usual(sinks[0])", "usual = split == split", OUTSIDE),
    Mutation(
        "what is shown and what is hidden have the same bounds",
        "passes/attention/mask_bounds.py",
        "tokens), choice.kept",
        "tokens), True",
        "tests/passes/test_cached_attention.py::test_layers_share_the_bounds_of_a_mask",
    ),
    Mutation(
        "the last token that is shown is behind the bounds",
        "passes/attention/mask_bounds.py",
        "begin=begin) for begin in (0, 1))",
        "begin=begin) for begin in (0, 0))",
        "tests/passes/test_cached_attention.py::test_layers_share_the_bounds_of_a_mask",
    ),
    Mutation(
        "any column may be left out",
        PASS,
        "not last or part.start != 0 or",
        "not last or",
        f"{NEVER}[another_column_is_left_out]",
    ),
    Mutation(
        "sinks may belong to other heads",
        PASS,
        "if self.atoms.of(root.axes) != (self.atoms.flat(heads),):",
        "if False:",
        f"{NEVER}[sinks_of_other_heads]",
    ),
    Mutation(
        "scores may be scaled with their sinks",
        PASS,
        'if value.power != {outputs[0]: 1.0, ("Z", 1.0, kept.whole): -1.0} or count != 1.0:',
        "if False:",
        f"{NEVER}[sinks_that_are_scaled]",
    ),
    Mutation(
        "the positions of idle ranks decide",
        LOG,
        "if own.idle and found.position != own.position:",
        "if False:",
        f"{COUNTS}[True]",
    ),
    Mutation(
        "ranks that are not idle meet wherever they are",
        "ditron_inductor/device/meetings.py",
        "and is_idle(limit_s / 4)",
        "",
        f"{COUNTS}[False]",
    ),
)
