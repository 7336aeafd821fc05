"""``ditron demo | tune | taxes | doctor | bench | report``, or ``python -m ditron_inductor`` with the same."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ditron_inductor.errors import MissingDependency
from ditron_inductor.taxes import command as taxes
from ditron_inductor.tools import bench, demo, doctor, issue_archive
from ditron_inductor.tune.tune_command import add_arguments as add_tune_arguments
from ditron_inductor.tune.tune_command import main as tune_main


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run the command; returns its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["bench"]:
        # Its programs read the rest themselves.
        return bench.main(given[1:])
    parser = argparse.ArgumentParser(prog="ditron", description="Ditron, a backend of torch.compile")
    commands = parser.add_subparsers(dest="command", required=True)
    demo.add_arguments(commands.add_parser("demo", help="run a small tensor-parallel Llama and compare it with eager"))
    add_tune_arguments(commands.add_parser("tune", help="measure the strategies at your shapes, for later runs"))
    taxes.add_arguments(commands.add_parser("taxes", help="what the three taxes cost a model, unfused and fused"))
    commands.add_parser("doctor", help="what of Ditron can run on this machine, and what to do about the rest")
    issue_archive.add_arguments(commands.add_parser("report", help="pack what an issue needs into one archive"))
    commands.add_parser("bench", help="the benchmarks: ops, models, host or generation, with their own options")
    arguments = parser.parse_args(given)
    if arguments.command == "doctor":
        return doctor.main()
    if arguments.command == "report":
        return issue_archive.main(arguments)
    if arguments.command == "tune":
        return tune_main(arguments)
    if arguments.command == "taxes":
        return taxes.run(arguments)
    try:
        return demo.main(arguments)
    except MissingDependency as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
