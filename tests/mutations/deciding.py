"""The mutations of what decides how a site runs (plan, tables, trials in place), and of the copies of a batch."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

HOST_TRIALS = "lowering/host/trials.py"
TRIAL = "ditron_inductor/task/trial.py"
DRIVER = "ditron_inductor/device/driver.py"
GATHER = "lowering/all_gather_matmul/chunked.py"
ON_RANKS = "tests/lowering/test_trials.py"
COPIES = "tests/device/test_driver.py"

DECIDING: tuple[Mutation, ...] = (
    Mutation(
        "each rank decides a trial by its own times",
        HOST_TRIALS,
        'workspace.largest(f"{self._label}: ns by {strategy} {where}", ns)',
        "ns",
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
        "if found.stage is Stage.ENDED and found.times is not None and shared",
        "if found.times is not None and shared",
        f"{ON_RANKS}::test_a_host_that_keeps_ahead_is_seen_to",
    ),
    Mutation(
        "a host is watched while other trials keep the device busy",
        HOST_TRIALS,
        "if any(other.stage is Stage.TIMING and other.is_alive(workspace) for other in trials):",
        "if False:",
        f"{ON_RANKS}::test_a_host_is_watched_when_nothing_is_timed",
    ),
    Mutation(
        "a trial that is refused holds up the others",
        HOST_TRIALS,
        "Stage.ENDED if refused else Stage.TIMING",
        "Stage.TIMING",
        f"{ON_RANKS}::test_a_trial_that_is_refused_holds_up_none",
    ),
    Mutation(
        "sites of a trial wait together",
        HOST_TRIALS,
        "if self._waits[site] > MOST_WAITS:",
        "if sum(self._waits.values()) > MOST_WAITS:",
        f"{ON_RANKS}::test_sites_wait_each_for_itself",
    ),
    Mutation(
        "a watch goes on where it was interrupted",
        HOST_TRIALS,
        "            self._calls.clear()\n            self._found_idle.clear()\n",
        "",
        f"{ON_RANKS}::test_a_watch_that_is_interrupted_begins_again",
    ),
    Mutation(
        "a trial that is dropped keeps its times",
        HOST_TRIALS,
        'return f"{self.name}, attempt {self.attempt}"',
        "return self.name",
        f"{ON_RANKS}::test_a_trial_that_is_dropped_measures_anew",
    ),
    Mutation(
        "a watched host begins ahead of the device",
        HOST_TRIALS,
        "streams.drain(workspace.device)",
        "pass",
        f"{ON_RANKS}::test_a_host_that_keeps_ahead_is_seen_to",
    ),
    Mutation(
        "each rank judges by its own device whether the host keeps ahead",
        HOST_TRIALS,
        'workspace.largest(f"{self._label}: ranks whose host is late", int(not trial.keeps_ahead(idle)))',
        "int(not trial.keeps_ahead(idle))",
        f"{ON_RANKS}::test_a_host_that_keeps_ahead_is_seen_to",
    ),
    Mutation(
        "a device that is idle more often changes nothing",
        TRIAL,
        "idle[True] <= min(idle[False], MOST_IDLE)",
        "idle[True] <= MOST_IDLE",
        "tests/task/test_trial.py::test_a_device_that_is_seen_idle_more_often_says_that_the_host_is_late",
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
        "max(self.device_us, self.host_share * self.host_us)",
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
)
