"""The tax report: what the three taxes of bulk-synchronous execution cost a compiled function, without fusion and with
it.

    report = ditron_inductor.profile_taxes(model)(tokens)   # on all ranks of the default group
    print(report)

docs/taxes.md says how each of them is estimated and where the estimates end. Nothing here imports torch before
``profile_taxes`` is used.
"""

from __future__ import annotations

from ditron_inductor.taxes.profile import profile_taxes

__all__ = ["profile_taxes"]
