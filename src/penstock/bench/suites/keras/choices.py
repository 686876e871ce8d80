"""The flags of `penstock bench keras`."""

from __future__ import annotations

import argparse

from penstock.bench.model import Workload
from penstock.bench.suites.keras.workload import QUICK_TASKS, TASKS, workload_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size",
        choices=("small", "full"),
        default="small",
        help="of the models: small, for a CPU, or full, as they were published, for a GPU (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=[task.name for task in TASKS],
        metavar="WORKLOAD",
        help="run this workload; may be given several times",
    )


def choose(args: argparse.Namespace) -> tuple[Workload, ...]:
    """The workloads of the size, or those of them that are asked for.

    Raises:
      ValueError: one is asked for that has only one size, with `--size full`.
    """
    if args.only:
        return tuple(workload_of(task, args.size) for task in TASKS if task.name in args.only)
    tasks = QUICK_TASKS if args.quick else TASKS
    return tuple(workload_of(task, args.size) for task in tasks if args.size == "small" or task.full)
