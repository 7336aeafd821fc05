"""What a process needs before a graph of ours runs in it: the Task ops, their kernels, and a table of strategies.

The code that Inductor writes imports its calls of sites from here. A process that found this code in a cache may have
imported nothing else of ours.
"""

from __future__ import annotations

import functools

from ditron_inductor import dtensor_parts, user_table
from ditron_inductor.device import workspaces
from ditron_inductor.lowering.host.site_call import SiteCall
from ditron_inductor.lowering.register import implementations, register
from ditron_inductor.options import Options
from ditron_inductor.summary import summary


@functools.cache
def prepare() -> None:
    """Declares the ops and binds their kernels, once. Groups take their strategies from the table that the environment
    names, until `use` is called. In a process that runs only graphs from a cache, nothing else names a table. From here
    on torch 2.11 takes the parts out of DTensors as fast as later versions do.
    """
    register()
    dtensor_parts.install()
    workspaces.use_table(lambda: user_table.read(Options.current().table))


def use(options: Options) -> None:
    """What runs from now on follows these options, as far as they act when a model runs: groups that are first used
    take their strategies from their table, and the summary line is logged if they ask for it. Raises InvalidOptionValue
    and InvalidTable, as `user_table.read` does.
    """
    prepare()
    workspaces.use_table(user_table.read(options.table))
    summary.wanted = options.summary


def site_call(kind: str, static: bool, text: str) -> SiteCall:
    """Returns the object that the code of a compiled graph calls for one site (see lowering/host/site_call.py)."""
    prepare()
    return SiteCall(kind, static, text, implementations()[kind])
