"""What Ditron did with a graph, in files, if torch writes its own debug folder (`TORCH_COMPILE_DEBUG=1`).

Torch has a folder for each graph that it compiles: `<root>/run_<time>-pid_<pid>/torchinductor/<graph>/`. In it, each
call of the passes makes a folder `ditron_0`, `ditron_1`, ..., whose files docs/report_an_issue.md lists.

`python -m ditron_inductor report` packs these files for an issue.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from pathlib import Path

import torch
import torch._inductor.config
import torch.distributed as dist
import triton
from torch._inductor.debug import DebugContext
from torch._inductor.virtualized import V

from ditron_inductor.declared_options import VARIABLE_PREFIX
from ditron_inductor.options import Options
from ditron_inductor.task.site_records import GraphRecord, SiteRecord
from ditron_inductor.version import VERSION

FOLDER = "ditron_"
FACTS, BEFORE, AFTER, SITES = "facts.json", "graph_before.txt", "graph_after.txt", "sites.txt"


class DebugFolder:
    """The folder of one call of the passes. The facts and the graph in front of the passes are written at once. within:
    the folder in which it is made. digest: the hash of the sources, which tells a changed checkout from a release.
    """

    def __init__(self, within: Path, graph_before: str, options: Options, digest: str) -> None:
        number = sum(path.name.startswith(FOLDER) for path in within.iterdir())
        self.path = within / f"{FOLDER}{number}"
        self.path.mkdir()
        (self.path / FACTS).write_text(json.dumps(facts(options, digest), indent=2) + "\n")
        (self.path / BEFORE).write_text(graph_before)

    def add(self, record: GraphRecord) -> None:
        """Writes what the passes made of the graph."""
        (self.path / AFTER).write_text(record.graph_after)
        (self.path / SITES).write_text("\n".join(map(site_text, record.sites)) or "the graph holds no collective\n")


def torch_folder() -> Path | None:
    """Returns torch's debug folder of the graph that is being compiled, or None if torch writes none."""
    context = V.debug
    if not torch._inductor.config.trace.enabled or not isinstance(context, DebugContext):
        return None
    return Path(context.filename(""))


def facts(options: Options, digest: str) -> dict[str, object]:
    """Returns what a reader has to know of the process."""
    cuda = torch.cuda.is_available()
    return {
        "versions": {
            "ditron_inductor": f"{VERSION}, sources {digest[:12]}",
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "devices": torch.cuda.device_count() if cuda else 0,
        "rank": dist.get_rank() if dist.is_initialized() else 0,
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "options": dataclasses.asdict(options),
        "environment": {key: value for key, value in os.environ.items() if key.startswith(VARIABLE_PREFIX)},
    }


def site_text(site: SiteRecord) -> str:
    """Returns a paragraph on a collective: a line for its node, and a line for each fact that is known."""
    culprit = site.culprit
    shown = [
        ("became" if site.matched else "left alone", site.text if site.matched else site.reason_code),
        ("because", site.reason),
        ("stopped by", culprit.text() if culprit is not None and culprit.name != site.node else ""),
        ("site", site.site),
        ("pattern", site.pattern),
        ("group", f"{site.group_name} of {site.world_size} ranks"),
        ("operands", f"{', '.join(site.shapes)} {site.dtype} on {site.device_type}"),
        ("strategy", site.strategy),
        ("line", site.line),
        *((f"{item.what}, outside", f"{item.code}: {item.text}, {item.node.text()}") for item in site.outside),
    ]
    return "\n".join([site.node, *(f"    {name}: {value}" for name, value in shown if value)]) + "\n"
