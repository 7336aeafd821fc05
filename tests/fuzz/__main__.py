"""`python -m tests.fuzz --seconds 600 --seed 1 --jobs 8`: random programs until the time is over.

Ends with 1 if a program failed, and with one line that counts everything in any case.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import sys
from collections.abc import Iterator, Sequence

from tests.fuzz.program import Place, Program

# Rank processes inherit all of these: a table that somebody measured here must not decide what runs, and a graph from
# a cache has not been through the passes.
ENVIRONMENT = {
    "DITRON_MEETING_S": "3",
    "DITRON_TABLE": "shipped",
    "DITRON_SUMMARY": "0",
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    # Many ranks compile at once: each in its own process.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    add = parser.add_argument
    add("--seed", type=int, default=0, help="what the programs are drawn from")
    add("--seconds", type=float, help="no program begins later (default: 60, unless their number is given)")
    add("--programs", type=int, help="how many, at most")
    add("--first", type=int, default=0, help="the number of the first program")
    add("--only", default="", help="the numbers of the programs, as 3,17,4: one pool runs them in this order")
    add("--world", type=int, default=2, help="ranks of a pool; they share GPUs where there are fewer")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    add("--jobs", type=int, default=1, help="pools of ranks beside each other")
    add("--divergent", type=float, help="how often the ranks of a program differ (default: 0.2, if interpreted 0)")
    add("--mixtures", type=float, default=Place.mixtures, help="how often a program has a layer of experts")
    add("--limit", type=float, help="seconds for one program (default: 120, on the CPU device 180)")
    add("--backend", choices=("ditron", "inductor"), default="ditron", help="what compiles them")
    add("--interpreted", action="store_true", help="run graphs op by op, without Inductor's code")
    add("--no-compare", action="store_true", help="do not repeat failures by Inductor alone")
    add("--show", action="store_true", help="print the programs, run nothing")
    given = parser.parse_args(argv)
    if given.divergent is None:
        given.divergent = 0.0 if given.interpreted else 0.2
    elif given.divergent and given.interpreted:
        # The call of the meeting is a part of Inductor's code.
        parser.error("--interpreted runs no meeting, so ranks may not differ: leave out --divergent, or --interpreted")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the arguments say; 1 if a program failed."""
    given = arguments(argv)
    import torch

    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    from tests.ranks import rank_environment

    backend, env = rank_environment(device, given.world)
    from tests.fuzz.generate import make_program
    from tests.ranks import RankPool

    place = Place(given.world, device, backend == "nccl", backend == "nccl", given.divergent, given.mixtures)
    count = given.programs if given.programs is not None else None
    numbers: Iterator[int] = itertools.count(given.first)
    if given.only:
        numbers = iter([int(one) for one in given.only.split(",")])
    elif count is not None:
        numbers = itertools.islice(numbers, count)
    programs = (make_program(given.seed, number, place) for number in numbers)
    if given.show:
        for program in itertools.islice(programs, 10 if count is None and not given.only else None):
            print(program, flush=True)
        return 0
    # All of it here, and for good: pools that start beside each other would undo each other's changes.
    os.environ.update(env | ENVIRONMENT)
    from tests.fuzz.execute import run_program
    from tests.fuzz.supervise import Fuzzer
    from tests.fuzz.verdict import Settings

    def command(program: Program, before: tuple[int, ...]) -> str:
        words = ["python", "-m", "tests.fuzz", "--seed", str(program.seed), "--world", str(given.world)]
        words += ["--device", device, "--divergent", str(given.divergent), "--mixtures", str(given.mixtures)]
        words += ["--interpreted"] * given.interpreted
        return shlex.join([*words, "--only", ",".join(map(str, (*before, program.index)))])

    # On the CPU device nothing is to be added, and ranks without an environment of their own start quicker.
    pool_env = ENVIRONMENT if device == "cuda" else None
    limit = given.limit or (180.0 if device == "cpu" else 120.0)
    seconds = given.seconds
    if seconds is None:
        seconds = 60.0 if count is None and not given.only else float("inf")
    fuzzer = Fuzzer(
        make_pool=lambda: RankPool(given.world, device, env=pool_env, group_timeout_s=4 * limit),
        execute=run_program,
        settings=Settings(given.backend, not given.interpreted, timeout_s=0.75 * limit),
        limit_s=limit,
        jobs=1 if given.only else given.jobs,
        compare=not given.no_compare,
        say=lambda text: print(text, flush=True),
        command=command,
    )
    summary = fuzzer.run(programs, seconds)
    print(fuzzer.text(summary), flush=True)
    return bool(summary.failures or summary.broken)


if __name__ == "__main__":
    sys.exit(main())
