"""Reading what the compiler made: instructions, loops, and what comes before what on every way through a kernel."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Dialect:
    """How one vendor's assembly says it.

    Regular expressions: an acquire and a release at system scope, a barrier of the whole program, a store of data, the
    multiply-accumulate of a tile, and an access of 16 bytes (load, store) to memory of the GPU or a peer.
    """

    acquire: str
    release: str
    barrier: str
    store: str
    dot: str
    wide_load: str
    wide_store: str


NVIDIA = Dialect(
    acquire=r"(ld|atom)\.global\.(sys\.acquire|acquire\.sys)\.",
    release=r"atom\.global\.(sys\.release|release\.sys)\.exch\.b64",
    barrier=r"bar\.sync",
    store=r"\bst\.global\.",
    dot=r"wgmma\.mma_async|tcgen05\.mma|\bmma\.sync",
    wide_load=r"ld\.global\.v4\.b32",
    wide_store=r"st\.global\.v4\.b32",
)
AMD = Dialect(
    acquire=r"buffer_inv sc0 sc1",
    release=r"buffer_wbl2 sc0 sc1",
    barrier=r"s_barrier",
    store=r"\b(global|flat|buffer)_store_",
    dot=r"v_mfma_",
    wide_load=r"(global|buffer)_load_dwordx4",
    wide_store=r"(global|buffer)_store_dwordx4",
)

LABEL = re.compile(r"([.$]L\w+):")
BRANCH = re.compile(r"\b(?:bra|bra\.uni|s_branch|s_cbranch\w*)\s+([.$]L\w+)")
END = re.compile(r"(bra|bra\.uni|ret|s_branch|s_endpgm)\b")


def dialect_of(target: str) -> Dialect:
    """The assembly of "sm_90", "gfx942", .."""
    return NVIDIA if target.startswith("sm_") else AMD


class Listing:
    """The labels and instructions of a kernel, in the order of its file."""

    def __init__(self, assembly: str) -> None:
        lines = (re.split(r"//|;\s*$|\s;\s", line)[0].strip() for line in assembly.splitlines())
        self.lines = [line for line in lines if line and (LABEL.match(line) or line[0] not in ".;{}()$")]

    @cached_property
    def _labels(self) -> dict[str, int]:
        found = ((LABEL.match(line), place) for place, line in enumerate(self.lines))
        return {match.group(1): place for match, place in found if match}

    @cached_property
    def _branches(self) -> list[tuple[int, int]]:
        """(place of a branch, place of the label that it goes to)."""
        found = ((place, BRANCH.search(line)) for place, line in enumerate(self.lines))
        return [(place, self._labels[match.group(1)]) for place, match in found if match]

    def places(self, pattern: str) -> list[int]:
        """Where `pattern` is found."""
        return [place for place, line in enumerate(self.lines) if re.search(pattern, line)]

    def has_barrier_before(self, place: int, barrier: str, store: str) -> bool:
        """Whether, on every way back from `place`, a barrier of the whole program comes before any store of data."""
        seen: set[int] = set()
        ways = [place - 1]
        while ways:
            at = ways.pop()
            while at not in seen:
                seen.add(at)
                if at < 0 or re.search(store, self.lines[at]):
                    return False
                if re.search(barrier, self.lines[at]):
                    break
                if LABEL.match(self.lines[at]):
                    ways += [source for source, to in self._branches if to == at]
                    before = next((line for line in reversed(self.lines[:at]) if not LABEL.match(line)), "")
                    if END.match(before):
                        break
                at -= 1
        return True

    def loops(self, pattern: str) -> list[tuple[int, int]]:
        """(first place, last place) of the innermost loops that contain `pattern`, in order."""
        found = [
            (to, source)
            for source, to in self._branches
            if to < source and any(re.search(pattern, line) for line in self.lines[to:source])
        ]
        inner = [a for a in found if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in found)]
        return sorted(inner)


@dataclass(frozen=True)
class Resources:
    """What ptxas gives each thread of a kernel, and the bytes that did not fit and go to memory instead."""

    registers: int
    spilled_bytes: int


@cache
def _assembled(ptx: str) -> tuple[str, bytes]:
    """(report, machine code) for sm_90, by the assembler that Triton brings along."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file, tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        file.write(ptx)
        file.flush()
        command = [str(TOOLS / "ptxas"), "-v", "-arch=sm_90a", file.name, "-o", cubin.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        return report, Path(cubin.name).read_bytes()


def resources(ptx: str) -> Resources:
    """Of a kernel for sm_90."""
    report, _ = _assembled(ptx)
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    registers = re.findall(r"Used (\d+) registers", report)
    return Resources(max(map(int, registers)), sum(map(int, spilled)))


@cache
def machine_code(ptx: str) -> tuple[str, ...]:
    """The instructions of a kernel on sm_90, without their addresses, in the order of its file."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(_assembled(ptx)[1])
        cubin.flush()
        command = [str(TOOLS / "nvdisasm"), "-c", cubin.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return tuple(re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", text, re.MULTILINE))
