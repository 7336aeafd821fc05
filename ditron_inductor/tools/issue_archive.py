"""``python -m ditron_inductor report``: packs what a reader of an issue needs into one archive.

The archive has the doctor's output, the versions of what is installed and, if there is a debug folder of torch with
files of Ditron, those files of the newest run, with the code that Inductor generated for the same graphs. All ranks of
the run that wrote below the same folder are packed. A run writes them with ``TORCH_COMPILE_DEBUG=1``.

The command works without torch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import os
import platform
import zipfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ditron_inductor.tools import doctor
from ditron_inductor.version import VERSION

PACKAGES = ("torch", "triton", "numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cublas-cu12", "nvidia-cublas")
"""The installed packages whose versions are named, beside those that the doctor looks at."""
RUNS, GRAPHS = "run_*", "torchinductor/*/ditron_*"
FACTS, GENERATED_CODE = "facts.json", "output_code.py"
HOW_TO_DEBUG = (
    "it holds no graphs, because there is no debug folder of Ditron in {root}. To make one, run the model with "
    "TORCH_COMPILE_DEBUG=1 and TORCHINDUCTOR_FORCE_DISABLE_CACHES=1, then report again, in the folder of that run or "
    "with --debug-dir"
)
LOOK_AT_IT = "it shows your model's graphs and lines of your program: look at it before you publish it"


@dataclass(frozen=True)
class DebugRun:
    """What one process wrote: torch's folder for it, Ditron's folders in there, its rank, and the number of ranks."""

    folder: Path
    graphs: tuple[Path, ...]
    rank: int
    world_size: int

    def files(self) -> list[Path]:
        """Returns Ditron's files, and the code that Inductor generated for the same graphs."""
        codes = dict.fromkeys(graph.parent / GENERATED_CODE for graph in self.graphs)
        ours = [path for graph in self.graphs for path in sorted(graph.iterdir())]
        return ours + [path for path in codes if path.is_file()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug-dir", type=Path, help="torch's debug folder; by default where torch writes it")
    parser.add_argument("--output", type=Path, help="the archive; by default ditron_report_<time>.zip in this folder")


def main(arguments: argparse.Namespace) -> int:
    """Writes the archive, and prints where it is. Returns the exit code."""
    root = arguments.debug_dir or default_root()
    path = arguments.output or Path(f"ditron_report_{datetime.now():%Y_%m_%d_%H_%M_%S}.zip")
    runs = newest_runs(root)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        doctor.main()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("versions.txt", versions_text())
        archive.writestr("doctor.txt", printed.getvalue())
        for run in runs:
            for file in run.files():
                archive.write(file, Path(f"rank_{run.rank}") / file.relative_to(run.folder.parent))
    print(f"report: written to {path}: {LOOK_AT_IT if runs else HOW_TO_DEBUG.format(root=root)}")
    for run in runs:
        print(f"  rank {run.rank} of {run.world_size}, graphs: {len(run.graphs)}, {run.folder}")
    return 0


def default_root() -> Path:
    """Returns the folder in which torch makes a debug folder for each process, where no program has set another."""
    return Path(os.environ.get("TORCH_COMPILE_DEBUG_DIR") or Path.cwd()) / "torch_compile_debug"


def newest_runs(root: Path) -> list[DebugRun]:
    """Returns the newest run below `root`, with its other ranks: the newest folder of each rank of as many ranks."""
    newest: dict[int, DebugRun] = {}
    # The names begin with the time.
    for folder in sorted(root.glob(RUNS), reverse=True):
        run = read_run(folder)
        if run is not None and all(run.world_size == other.world_size for other in newest.values()):
            newest.setdefault(run.rank, run)
    return [newest[rank] for rank in sorted(newest)]


def read_run(folder: Path) -> DebugRun | None:
    """Returns what is in torch's folder of one process; None if Ditron wrote nothing there."""
    graphs = tuple(sorted(path.parent for path in folder.glob(f"{GRAPHS}/{FACTS}")))
    if not graphs:
        return None
    facts = json.loads((graphs[-1] / FACTS).read_text())
    return DebugRun(folder, graphs, facts["rank"], facts["world_size"])


def versions_text() -> str:
    """Returns a line for each package that is installed, and for the platform."""
    lines = [f"ditron_inductor {VERSION}", f"python {platform.python_version()}", platform.platform()]
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            lines.append(f"{name} {importlib.metadata.version(name)}")
    return "\n".join(lines) + "\n"
