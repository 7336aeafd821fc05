"""`python -m benchmarks.models.account`: the account of the kernels of cells of `benchmarks.models`, in CUDA graphs.

    python -m benchmarks.models.account --models llama3-8b --phases decode --forms kv --batches 1 --out accounts

`ditron taxes` has layers of a Llama without a cache; this has every model and form that is measured. docs/taxes.md says
what an account is. Rank 0 prints each one, and writes it to a file of the folder --out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.launch import command
from benchmarks.models.zoo import FORMS, MODELS, PHASES, TINY, Cell, Selection, tiny

if TYPE_CHECKING:
    import torch

MODULE = "benchmarks.models.account"
BUDGET_S = 500.0


@dataclass(frozen=True)
class AccountRequest:
    """The cells, and the folder that rank 0 writes to, none for "". rounds: samples of each time, 0 for the default."""

    cells: tuple[Cell, ...]
    device: str
    budget_s: float
    rounds: int
    out: str


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=(__doc__ or "").splitlines()[0])
    result.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["llama3-8b"])
    result.add_argument("--phases", nargs="+", choices=PHASES, default=["decode"])
    result.add_argument("--forms", nargs="+", choices=FORMS, default=["kv"])
    result.add_argument("--batches", nargs="+", type=int, default=[1], help="sequences (default 1)")
    result.add_argument("--layers", type=int, default=0, help="of each model; its usual number by default")
    result.add_argument("--world", type=int, default=0, help="ranks; by default one for each GPU")
    result.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: toy sizes, to try the program")
    result.add_argument("--rounds", type=int, default=0, help="samples of each time")
    result.add_argument("--budget", type=float, default=BUDGET_S, help="seconds, after which the ranks are ended")
    result.add_argument("--out", default="", metavar="FOLDER", help="where a CSV of each cell is written")
    return result


def run(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    options = parser().parse_args(arguments)
    selection = Selection(
        models=tuple(options.models),
        phases=tuple(options.phases),
        forms=tuple(options.forms),
        layers=options.layers,
        batches=tuple(options.batches),
        full=True,
    )
    cells = selection.cells()
    if not cells:
        print(f"{MODULE}: no cell has these models, phases, forms and batches", file=sys.stderr)
        return 2
    if options.out and not Path(options.out).is_dir():
        print(f"{MODULE}: --out {options.out} is no folder", file=sys.stderr)
        return 2
    cells = tiny(cells) if options.device == "cpu" else cells
    out = options.out and str(Path(options.out).resolve())
    request = AccountRequest(tuple(cells), options.device, options.budget, options.rounds, out)
    return command(MODULE, request, options.world)


def main(request: AccountRequest, device: torch.device, begun: float) -> bool:
    """Run as a rank of the default group, on `device`; see `launch.main_of`."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks.models import forms
    from ditron_inductor import profile_taxes

    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.set_default_dtype(dtype)
    # On the CPU `auto` fuses nothing.
    options = {"ditron.strategy": "auto" if on_gpu else "tile"}
    for cell in request.cells:
        arch = MODELS[cell.model] if on_gpu else MODELS[cell.model].like(TINY)
        torch.manual_seed(0)
        with device:
            model = forms.build(arch, cell, mesh)
        given = forms.inputs(arch, cell, mesh.get_rank(), mesh.size(), device, dtype)
        training = cell.phase == "training"
        profiled = profile_taxes(model, options=options, backward=training, rounds=request.rounds or None)
        with torch.set_grad_enabled(training):
            report = profiled(*given)
        if mesh.get_rank() == 0:
            print(f"\n{cell.text}, {mesh.size()} ranks, {dtype}\n{report}", flush=True)
            if request.out:
                report.save_csv(Path(request.out) / f"{cell.text.replace(', ', '_').replace(' ', '_')}.csv")
        del model, profiled
    return True


if __name__ == "__main__":
    sys.exit(run())
