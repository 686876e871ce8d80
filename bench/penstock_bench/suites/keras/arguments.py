"""Declare the flags of `penstock bench keras`, and return the workloads that they choose."""

from __future__ import annotations

import argparse

from penstock_bench.arguments import add_only
from penstock_bench.model import Workload
from penstock_bench.suites.keras.workload import QUICK_TASKS, TASKS, workload_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser of `penstock bench keras` its own arguments."""
    parser.add_argument(
        "--size",
        choices=("small", "full"),
        default="small",
        help="of the models: small, for a CPU, or full, as they were published, for a GPU (default: %(default)s)",
    )
    add_only(parser, [task.name for task in TASKS])


def choose(args: argparse.Namespace) -> tuple[Workload, ...]:
    """Return the workloads of the chosen size: all, or those that the arguments name.

    Raises:
      ValueError: a workload with only one size is asked for, with `--size full`.
    """
    if args.only:
        return tuple(workload_of(task, args.size) for task in TASKS if task.name in args.only)
    tasks = QUICK_TASKS if args.quick else TASKS
    return tuple(workload_of(task, args.size) for task in tasks if args.size == "small" or task.full)
