"""The mutations of what decides how a site runs (plan, tables, trials in place), of the copies of a batch, and of
slots, rings and strategies where ranks capture alone.
"""

from __future__ import annotations

from tests.mutations.mutation import Mutation

HOST_TRIALS = "lowering/host/trials.py"
SITE_CALL = "lowering/host/site_call.py"
RECORDS = "tests/lowering/test_site_call.py::test_a_record_does_what_the_op_does"
TRIAL = "ditron_inductor/task/trial.py"
DRIVER = "ditron_inductor/device/driver.py"
GATHER = "lowering/all_gather_matmul/chunked.py"
ON_RANKS = "tests/lowering/test_trials.py"
COPIES = "tests/device/test_driver.py"
WORKSPACE = "ditron_inductor/device/workspace.py"
TURNS = "tests/device/test_turns.py"
SLOW = "tests/models/test_slow_compilations.py"
REPLAYED = "tests/lowering/test_trials.py::test_a_graph_that_torch_captures_tries_nothing"

DECIDING: tuple[Mutation, ...] = (
    Mutation(
        "each rank decides a trial by its own times",
        HOST_TRIALS,
        'found = workspace.largest_of(f"{self.name}, number {self.number}.{self.looks}: ns by strategy", own)',
        "found = own",
        f"{ON_RANKS}::test_every_strategy_has_its_calls_and_the_slowest_rank_decides",
    ),
    Mutation(
        "a trial goes on where a rank wants the same bits",
        HOST_TRIALS,
        "return None if known.refused else known",
        "return known",
        f"{ON_RANKS}::test_one_rank_that_wants_the_same_bits_is_enough",
    ),
    Mutation(
        "a reset does not end a trial",
        HOST_TRIALS,
        "if known is None or known.begun is not workspace.agreed(name):",
        "if known is None:",
        f"{ON_RANKS}::test_a_reset_begins_again",
    ),
    Mutation(
        "a trial that goes on is saved",
        HOST_TRIALS,
        "if found.times is not None and shared",
        "if shared",
        f"{ON_RANKS}::test_what_was_decided_can_be_saved",
    ),
    Mutation(
        "a trial that is dropped keeps its times",
        HOST_TRIALS,
        "{self.name}, number {self.number}.{self.looks}: ns by",
        "{self.name}, {self.looks}: ns by",
        f"{ON_RANKS}::test_a_trial_that_is_dropped_measures_anew",
    ),
    Mutation(
        "a trial times tile as its first calls run",
        SITE_CALL,
        "addresses = None if repeated is None else repeated.addresses(tensors)",
        "addresses = None",
        RECORDS,
    ),
    Mutation(
        "a call by another strategy repeats a record",
        HOST_TRIALS,
        "upcoming is not None and upcoming[0] == strategy else None",
        "upcoming is not None else None",
        RECORDS,
    ),
    Mutation(
        "a second look follows the first one at once",
        HOST_TRIALS,
        " - trial.CALLS_BETWEEN * self.looks",
        "",
        f"{ON_RANKS}::test_what_is_near_is_decided_again",
    ),
    Mutation(
        "a second look forgets the first one",
        HOST_TRIALS,
        "times if self.times is None else trial.later(self.times, times)",
        "times",
        f"{ON_RANKS}::test_what_is_near_is_decided_again",
    ),
    Mutation(
        "a trial looks again for ever",
        HOST_TRIALS,
        "if self.looks == 0 else ()",
        "if True else ()",
        f"{ON_RANKS}::test_what_is_near_is_decided_again",
    ),
    Mutation(
        "a second look takes what was fast on a cool GPU",
        TRIAL,
        "time.device_us * max(device, 1.0)",
        "time.device_us",
        f"{ON_RANKS}::test_a_gpu_that_is_warm_later_favours_nobody",
    ),
    Mutation(
        "nobody is asked for the same bits before a second look",
        HOST_TRIALS,
        "if asks and workspace.largest(",
        "if False and workspace.largest(",
        f"{ON_RANKS}::test_who_wants_the_same_bits_later_gets_no_second_look",
    ),
    Mutation(
        "a capture finds what it needed before the last look",
        "lowering/host/prepare.py",
        'f"{launch.site_text} by {captured.choice[2].strategy}"',
        "launch.site_text",
        f"{ON_RANKS}::test_a_capture_finds_what_it_needs_after_each_look",
    ),
    Mutation(
        "a rank that is watched does not meet the others",
        HOST_TRIALS,
        "elif is_timed and watch.observer is not None:\n            meet(self._workspace)",
        "elif is_timed and watch.observer is not None:",
        RECORDS,
    ),
    Mutation(
        "calls in which the device waited for the host count",
        HOST_TRIALS,
        "for sample, scale in clean or samples]",
        "for sample, scale in samples]",
        f"{ON_RANKS}::test_calls_in_which_the_device_waited_for_the_host_do_not_count",
    ),
    Mutation(
        "a rank that records does not meet the others",
        HOST_TRIALS,
        "return False\n        meet(self._workspace)",
        "return False",
        RECORDS,
    ),
    Mutation(
        "a call that no record holds is recorded again and again",
        SITE_CALL,
        "repeated is None and self._attempts < MOST_ATTEMPTS\n",
        "repeated is None\n",
        RECORDS,
    ),
    Mutation(
        "the host counts inside CUDA graphs",
        TRIAL,
        "for name, found in times.items() if found.is_of_device}",
        "for name, found in times.items()}",
        "tests/task/test_trial.py::test_a_table_gets_the_times_of_the_products_alone",
    ),
    Mutation(
        "launches may take as long as their kernels",
        TRIAL,
        "max(self.device_us, HOST_SHARE * self.host_us)",
        "max(self.device_us, self.host_us)",
        "tests/task/test_trial.py::test_launches_that_take_as_long_as_their_kernels_leave_no_time_for_the_rest_of_a_step",
    ),
    Mutation(
        "the timed calls of a strategy follow each other",
        TRIAL,
        "return tried[-1 - place if turn % 2 else place], True",
        "return tried[(calls - untimed) // (CALLS - UNTIMED)], True",
        "tests/task/test_trial.py::test_a_clock_that_slows_down_favours_nobody",
    ),
    Mutation(
        "what the own table has is tried again",
        TRIAL,
        "if eager.settled or",
        "if",
        "tests/task/test_trial.py::test_what_the_own_table_has_is_not_tried_again",
    ),
    Mutation(
        "times of one sequence stand for a batch",
        "ditron_inductor/task/plan.py",
        "time * (sliced[strategy] / plain[strategy])",
        "time",
        "tests/task/test_plan.py::test_times_of_one_sequence_are_corrected_for_a_batch",
    ),
    Mutation(
        "the runs of a copy follow each other in the target",
        DRIVER,
        "dstPitch=pitch",
        "dstPitch=nbytes",
        f"{COPIES}::test_runs_are_one_copy",
    ),
    Mutation(
        "the runs of a copy begin a pitch apart at the source",
        DRIVER,
        "ctypes.memmove(target + run * pitch, source + run * nbytes, nbytes)",
        "ctypes.memmove(target + run * pitch, source + run * pitch, nbytes)",
        f"{COPIES}::test_copies_of_the_cpu_go_where_they_should",
    ),
    Mutation(
        "a batch takes a copy for each sequence",
        GATHER,
        "found.append(Transfer(source * run, staged, run, outer, world * run))",
        "found += [Transfer((i * world + source) * run, staged + i * run, run) for i in range(outer)]",
        "tests/lowering/test_chunked.py::test_a_batch_takes_one_copy_from_each_peer",
    ),
    Mutation(
        "a site's slot is counted",
        WORKSPACE,
        "(self._next_turn() if turn is None else turn)",
        "self._next_turn()",
        f"{TURNS}::test_a_site_of_a_compiled_graph_keeps_its_slot",
    ),
    Mutation(
        "captured calls count as others do",
        WORKSPACE,
        "if not self.order.capturing:",
        "if True:",
        f"{TURNS}::test_a_rank_that_captures_alone",
    ),
    Mutation(
        "a capture counts on where the last one ended",
        WORKSPACE,
        "if capture != self.order.capture:",
        "if False:",
        f"{TURNS}::test_captured_calls_count_within_their_capture",
    ),
    Mutation(
        "calls take the newest ring",
        WORKSPACE,
        "for ring in self.generations:\n            if nbytes",
        "for ring in self.generations[-1:]:\n            if nbytes",
        f"{TURNS}::test_a_call_takes_the_oldest_ring_that_fits",
    ),
    Mutation(
        "nodes do not give their numbers to calls",
        "lowering/host/planning.py",
        "text, number_of(node.site))",
        "text, None)",
        f"{TURNS}::test_a_node_of_a_graph_gives_its_number_to_its_calls",
    ),
    Mutation(
        "warm-ups try strategies",
        "passes/finish/name_sites.py",
        "task.policy.trials and not replayed",
        "task.policy.trials",
        REPLAYED,
    ),
    Mutation(
        "warm-ups run as eager calls do",
        "lowering/host/trials.py",
        "if node.policy.replayed:",
        "if False:",
        REPLAYED,
    ),
    Mutation(
        "a graph does not say that it is captured",
        "ditron_inductor/device/facts.py",
        "return self.options.get(CUDAGRAPHS) == repr(True)",
        "return False",
        REPLAYED,
    ),
    Mutation(
        "replicas are compared again whatever is captured",
        "ditron_inductor/device/replicas.py",
        "(again and count & (count - 1) == 0)",
        "count & (count - 1) == 0",
        "tests/device/test_replicas.py::test_ranks_compare_once_what_torch_captures",
    ),
    Mutation(
        "ranks may not differ in what torch captures",
        "ditron_inductor/device/facts.py",
        "for name in held if name != CUDAGRAPHS}",
        "for name in held}",
        "tests/device/test_facts.py::test_ranks_may_differ_in_what_torch_captures",
    ),
    Mutation(
        "a graph comes from the cache of a program with other lines",
        "ditron_inductor/pipeline.py",
        "parts.append(self.lines)",
        "pass",
        "tests/test_fx_cache.py::test_a_graph_of_other_lines_is_not_taken_from_the_cache",
    ),
    Mutation(
        "nodes that ranks cut by other sizes run together",
        "ditron_inductor/device/facts.py",
        "elif not all(may_be_equal(first, other) for first, other in combinations(sizes, 2)):",
        "elif False:",
        "tests/models/test_divergent.py::test_local_facts_keep_the_fusion_and_others_give_it_up[cpu-statistic_of_sequences]",
    ),
    Mutation(
        "a graph of other sequences takes its peers to run the old one",
        "ditron_inductor/device/agreements.py",
        "if other.form == facts.form and _all_have(_has_shapes, facts, other, agreed):",
        "if other.form == facts.form:",
        "tests/models/test_divergent.py::test_all_ranks_have_as_many_tokens_of_other_sequences[cpu]",
    ),
    Mutation(
        "sites of graphs for other shapes have the same key",
        "ditron_inductor/device/facts.py",
        "[self.program, self.sizes, self.form, launches]",
        "[self.program, self.sizes, self.form]",
        "tests/device/test_facts.py::test_graphs_of_other_shapes_have_other_keys",
    ),
    Mutation(
        "a group goes on that agreed differently before",
        "ditron_inductor/device/agreements.py",
        "if found and all(one == found[0] for one in found) and _can_follow(group, found[0]):",
        "if found and _can_follow(group, found[0]):",
        "tests/device/test_agreements.py::test_it_has_to_be_the_same_for_all_sizes",
    ),
    Mutation(
        "a group goes on whose agreement the graph cannot follow",
        "ditron_inductor/device/agreements.py",
        "if found and all(one == found[0] for one in found) and _can_follow(group, found[0]):",
        "if found and all(one == found[0] for one in found):",
        "tests/device/test_agreements.py::test_nothing_goes_on_that_the_graph_cannot_follow",
    ),
    Mutation(
        "a replica that changes alone has nobody to meet",
        "ditron_inductor/device/meetings.py",
        "if self._missing(found) and not self._leave_apart(found):",
        "if self._missing(found):",
        "tests/models/test_replicas.py::test_replicas_have_tokens_of_their_own[one replica changes-False]",
    ),
    Mutation(
        "the groups of a graph are in the order of their names",
        "passes/finish/wire_facts.py",
        "return [(launch.wire, launch.place) for launch in launches], launches[0].order, group.name",
        "return [], 0, group.name",
        "tests/models/test_replicas.py::test_one_rank_logs_a_product_from_a_call_on[one replica changes-1]",
    ),
    Mutation(
        "a rank that compiles is not waited for",
        "ditron_inductor/device/meetings.py",
        "if time.monotonic() >= self.deadline and not self._has_more_time():",
        "if time.monotonic() >= self.deadline:",
        f"{SLOW}::test_ranks_wait_for_one_that_compiles",
    ),
    Mutation(
        "a rank that has just compiled is not waited for",
        "ditron_inductor/device/meetings.py",
        "or not (compiling or compiled != self.compiled)",
        "or not compiling",
        f"{SLOW}::test_the_time_begins_anew",
    ),
    Mutation(
        "a rank that compiles is waited for without a bound",
        "ditron_inductor/device/meetings.py",
        "if now >= last or not (",
        "if not (",
        f"{SLOW}::test_they_do_not_wait_for_ever",
    ),
    Mutation(
        "a rank that records a CUDA graph counts as one that compiles",
        "ditron_inductor/device/compilations.py",
        "if args.callback_trigger in TRIGGERS:",
        "if True:",
        f"{SLOW}::test_compilations_are_counted",
    ),
    Mutation(
        "a collective of another shape is sent as it is",
        "passes/finish/conform.py",
        "return sizes if known else []",
        "return []",
        "tests/models/test_divergent.py::test_a_rank_that_differs_later_runs_what_was_agreed[cpu-other_columns_this_time]",
    ),
)
