"""The benchmark of the host path runs without a GPU, for every op; its times are not looked at."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import host_attention
from ditron_inductor.task.nodes import KINDS, NODES

ROOT = Path(__file__).parents[1]


@pytest.mark.all_cases
@pytest.mark.timeout(200)
def test_every_op_has_its_stages() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.host", "--device", "cpu", "--rounds", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    header = next(line for line in lines if line.startswith("op "))
    for op in KINDS:
        row = next(line for line in lines if line.startswith(op))
        values = dict(zip(re.split(r"  +", header.strip()), row.split(), strict=True))
        whole, in_a_graph = float(values["whole op"]), float(values["in a graph"])
        assert 0 < in_a_graph and 0 < whole and float(values["by the JIT"]) > 0, row
    chunked = table_of(done.stdout, "each stage of `chunked`")
    assert chunked[0].split()[:3] == ["op", "dispatch", "launches"]
    rows_of_chunked = [re.split(r"  +", line.strip()) for line in chunked[2:]]
    found = {name: [float(value) for value in values[:7]] for name, *values in rows_of_chunked}
    # The parts of an all-reduce are no call of their own.
    assert [name for name, *values in rows_of_chunked if len(values) < 8] == ["matmul_all_reduce, parts"]
    with_chunks = [kind for kind in KINDS if "chunked" in NODES[kind].strategies]
    assert sorted(found) == sorted([*with_chunks, "matmul_all_reduce, parts"])
    for stages in found.values():
        *parts, whole = stages
        assert 0 < whole and abs(sum(parts) - whole) < 0.1
    calls = table_of(done.stdout, "of the host for a call")
    assert calls[0].split() == ["op", *host_attention.STRATEGIES]
    rows = {op: dict(zip(host_attention.STRATEGIES, us, strict=True)) for op, *us in map(str.split, calls[2:])}
    assert tuple(rows) == host_attention.KINDS
    for op, times in rows.items():
        has = {strategy for strategy, us in times.items() if us != "-" and float(us) > 0}
        assert has == {*NODES[op].strategies} and all(times[one] == "-" for one in {*times} - has), (op, times)


def table_of(text: str, title: str) -> list[str]:
    """The lines of a table, below its title."""
    return text[text.index(title) :].split("\n\n")[0].splitlines()[1:]


def test_a_single_rank_is_refused() -> None:
    from benchmarks import host

    assert host.main(["--ranks", "1"]) == 2


def test_no_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import host

    assert host.main(["--device", "cpu", "--rounds", "0"]) == 2
    assert "--rounds" in capsys.readouterr().err
