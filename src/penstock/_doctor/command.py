"""The command `penstock doctor`: print the report."""

from __future__ import annotations

import argparse

from penstock._doctor import doctor

DESCRIPTION = """\
Look at versions, devices, known faults of this jaxlib, memory, threads and optional programs, and say what to do about each.
It takes a few seconds and changes nothing. Exit status 1: something gives wrong results or cannot work."""
EPILOG = "example:\n  penstock doctor --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `penstock doctor`."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the report.

    Returns:
      The exit status: 0, or 1 if something is wrong.
    """
    report = doctor()
    print(report.to_json() if args.json else report)
    return 0 if report.ok else 1
