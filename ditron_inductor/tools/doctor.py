"""``python -m ditron_inductor doctor``: which parts of Ditron can run on this machine, and what to do about the others.

It works without torch, Triton or a GPU: a missing part is a finding, not a crash. The interpreter is checked in a
process of its own, because Triton reads TRITON_INTERPRET once, when it is imported.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ditron_inductor.errors import MissingDependency
from ditron_inductor.version import VERSION

OLDEST_PYTHON = (3, 11)
TORCH_RANGE = ((2, 11), (2, 14))
OLDEST_TRITON = (3, 6)
SOFTWARE = ("", "", "found", "to do")
INTERPRETER_CHECK = "from ditron_inductor.device.capabilities import interpreter_problem as p; print('problem:' + p())"


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``remedy`` is empty if nothing has to be done."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""

    def row(self) -> tuple[str, str, str, str]:
        return self.name, "ok" if self.ok else "no", self.detail, self.remedy


@dataclass(frozen=True)
class Gpus:
    """The GPUs that torch can use, with one row of text each, and the links between them."""

    rows: tuple[tuple[str, ...], ...]
    peer_access: Finding | None
    symmetric_memory: Finding | None

    @property
    def count(self) -> int:
        return len(self.rows)


def main() -> int:
    """Prints the report. Returns the exit code, which is 0 if any part of Ditron can run, and otherwise 1."""
    software = check_software()
    gpus = check_gpus() if _by_name(software)["torch"].ok else Gpus((), None, None)
    interpreter = check_interpreter(software)
    verdicts = judge(software, gpus, interpreter)
    _print_table("Software", [finding.row() for finding in [*software, interpreter]])
    if gpus.rows:
        _print_table("GPUs", gpus.rows, headers=("gpu", "name", "capability", "memory", "SMs"))
        links = [finding.row() for finding in (gpus.peer_access, gpus.symmetric_memory) if finding is not None]
        if links:
            _print_table("Between the GPUs", links)
        print(topology_text() or "nvidia-smi topo -m gave no link table", end="\n\n")
    else:
        print("GPUs: none that torch can use\n")
    _print_table("What can run here", [verdict.row() for verdict in verdicts], headers=("what", "", "detail", "to do"))
    return 0 if any(verdict.ok for verdict in verdicts) else 1


def check_software() -> list[Finding]:
    """Checks Python, the packages, the compilers and shared memory."""
    python_ok = sys.version_info >= OLDEST_PYTHON
    oldest = ".".join(map(str, OLDEST_PYTHON))
    findings = [
        Finding("ditron", True, VERSION),
        Finding(
            "python", python_ok, platform.python_version(), "" if python_ok else f"install Python {oldest} or newer"
        ),
        _package("torch", lambda v: TORCH_RANGE[0] <= v < TORCH_RANGE[1], "install torch>=2.11,<2.14"),
        _package("triton", lambda v: v >= OLDEST_TRITON, "install triton>=3.6 (Linux); nothing of Ditron runs without"),
        _package("tabulate", lambda v: True, "pip install tabulate"),
        _package("tqdm", lambda v: True, "pip install tqdm; the command tune shows with it how far it is"),
        _package("numpy", lambda v: True, "pip install numpy; Triton's interpreter needs it"),
        check_compiler(),
    ]
    shared = Path("/dev/shm")
    if shared.is_dir() and os.access(shared, os.W_OK):
        findings.append(Finding("shared memory", True, f"{shutil.disk_usage(shared).free >> 20} MiB free in {shared}"))
    else:
        findings.append(Finding("shared memory", False, f"{shared} is not writable", "mount it; CPU ranks meet there"))
    return findings


def require(*names: str, needed_for: str) -> None:
    """Raises MissingDependency for the first of the findings ``names`` that is not fine."""
    for finding in check_software():
        if finding.name in names and not finding.ok:
            raise MissingDependency(
                name=finding.name, needed_for=needed_for, found=finding.detail, remedy=finding.remedy
            )


def check_compiler() -> Finding:
    """Checks for Python.h, which Inductor and Triton's launchers need, and their C++ and C compilers."""
    candidates = [name for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++") if name]
    path = next((found for found in map(shutil.which, candidates) if found), None)
    if path is None:
        remedy = "install one (Debian, Ubuntu: apt-get install g++) or set CXX"
        return Finding("C++ compiler", False, "none found", remedy)
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return Finding("C++ compiler", False, f"{path}, but Python.h is missing", "apt-get install python3-dev")
    return Finding("C++ compiler", True, path)


def check_interpreter(software: Sequence[Finding]) -> Finding:
    """Returns whether Triton's interpreter runs Ditron's kernels, tried in a process with TRITON_INTERPRET=1."""
    name = "interpreter"
    found = _by_name(software)
    missing = [package for package in ("torch", "triton", "numpy") if not found[package].ok]
    if missing:
        return Finding(name, False, f"needs {', '.join(missing)}", "pip install 'ditron-inductor[cpu]'")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", INTERPRETER_CHECK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    answer = re.search(r"^problem:(.*)$", done.stdout, re.MULTILINE)
    if answer is None:
        last_line = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        return Finding(name, False, last_line, "reinstall: pip install 'ditron-inductor[cpu]'")
    if answer.group(1):
        # Another Triton would take the place of the one that belongs to this torch; another numpy harms nothing.
        remedy = "pip install 'numpy<2.4'" if "numpy" in answer.group(1) else "pip install 'ditron-inductor[cpu]'"
        return Finding(name, False, answer.group(1), remedy)
    return Finding(name, True, "runs the kernels on the CPU when a process starts with TRITON_INTERPRET=1")


def check_gpus() -> Gpus:
    """Checks the GPUs that torch sees, whether each can access the others' memory, and torch's symmetric memory."""
    import torch
    import torch.distributed as dist

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    rows = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        rows.append((str(index), properties.name, capability, memory, str(properties.multi_processor_count)))
    if count < 2:
        return Gpus(tuple(rows), None, None)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [f"{a}->{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    peers = Finding("peer access", True, "all to all")
    if apart:
        remedy = "tile needs peer access: check the links, the IOMMU and the container's settings"
        peers = Finding("peer access", False, f"missing: {', '.join(apart)}", remedy)
    available = dist.is_available() and dist.is_nccl_available()
    backend = None
    if available:
        from torch.distributed import _symmetric_memory as symmetric_memory

        backend = symmetric_memory.get_backend(torch.device("cuda", 0))
    symmetric = Finding(
        "symmetric memory",
        backend is not None,
        f"backend {backend}" if backend is not None else "not in this build of torch",
        "" if backend is not None else "install a CUDA build of torch for Linux",
    )
    return Gpus(tuple(rows), peers, symmetric)


def judge(software: Sequence[Finding], gpus: Gpus, interpreter: Finding) -> list[Finding]:
    """Returns the conclusions: each way of running Ditron, possible or not, and the first thing to do if not."""
    found = _by_name(software)
    base = [found[name] for name in ("python", "torch", "triton", "tabulate")]
    on_cpu = [*base, found["C++ compiler"]]
    in_interpreter = [*on_cpu, found["shared memory"], interpreter]
    gpu_problem = Finding("GPUs", False, f"{gpus.count} found, 2 are needed", "run on a machine with two GPUs or more")
    on_gpu = [*base, found["C++ compiler"]] + ([gpu_problem] if gpus.count < 2 else [])
    links = [finding for finding in (gpus.peer_access, gpus.symmetric_memory) if finding is not None]
    return [
        _verdict("CPU, strategy library", on_cpu, "the graph rewrite, with torch's own collectives"),
        _verdict("CPU, strategy tile", in_interpreter, "for tests and the demo, not for speed"),
        _verdict("GPUs, strategy library", on_gpu, "NCCL and the library's matmuls"),
        _verdict("GPUs, strategy tile", [*on_gpu, *links], "the fused kernels"),
    ]


def topology_text() -> str:
    """Returns the link table of ``nvidia-smi topo -m``, or an empty string."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    done = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=60, check=False)
    # The header is underlined with escape codes; the legend below the table is left out.
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    lines = [line for line in plain.splitlines() if re.match(r"\s*(GPU|NIC)\d", line)]
    return "\n".join(lines) if done.returncode == 0 else ""


def _verdict(name: str, needs: Sequence[Finding], detail: str) -> Finding:
    missing = next((finding for finding in needs if not finding.ok), None)
    if missing is None:
        return Finding(name, True, detail)
    return Finding(name, False, f"{missing.name}: {missing.detail}", missing.remedy)


def _package(name: str, fits: Callable[[tuple[int, ...]], bool], remedy: str) -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, "not installed", remedy)
    ok = fits(tuple(int(part) for part in re.findall(r"\d+", version)[:2]))
    return Finding(name, ok, version, "" if ok else remedy)


def _by_name(findings: Sequence[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def _print_table(title: str, rows: Sequence[Sequence[str]], headers: Sequence[str] = SOFTWARE) -> None:
    """Prints a table of at least one row, whose rows have as many cells as there are headers."""
    try:
        from tabulate import tabulate
    except ImportError:
        # The doctor has to be able to say that tabulate is missing.
        text = "\n".join("  ".join(row) for row in rows)
    else:
        text = tabulate(rows, headers=headers, disable_numparse=True, maxcolwidths=[None, None, 60, 60][: len(headers)])
    print(f"{title}\n{text}\n", flush=True)
