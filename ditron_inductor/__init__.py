"""Ditron: a torch.compile backend that runs collectives and matmuls as one distributed kernel.

``torch.compile(model, backend="ditron")`` needs no import. This module adds ``config``, ``explain``, ``tune``,
``profile_taxes``, ``passes_for_inductor``, ``reset``, ``save_trials`` and ``Options``. It imports neither torch nor
triton itself, so ``python -m ditron_inductor doctor`` works where one is missing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ditron_inductor import config
from ditron_inductor.options import Options
from ditron_inductor.report.explain import explain
from ditron_inductor.taxes import profile_taxes
from ditron_inductor.tune.tune_command import tune
from ditron_inductor.version import VERSION

if TYPE_CHECKING:
    from ditron_inductor.backend import ditron, passes_for_inductor
    from ditron_inductor.device.reset import reset
    from ditron_inductor.tune.saved_trials import save_trials

__version__ = VERSION
__all__ = [
    "Options", "config", "ditron", "explain", "passes_for_inductor", "profile_taxes", "reset", "save_trials", "tune",
]  # fmt: skip


_MODULES = {
    "ditron": "backend",
    "passes_for_inductor": "backend",
    "reset": "device.reset",
    "save_trials": "tune.saved_trials",
}
"""The modules of the names that import torch, which are therefore imported when they are used."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
