"""Declare the arguments of `penstock bench shard`, and return the workloads that they choose."""

from __future__ import annotations

import argparse

from penstock.bench.model import Workload
from penstock.bench.suites.shard.task import HARDWARE, MESHES, Task
from penstock.bench.suites.shard.workload import plans_workload, training_workload

_QUICK_MODELS, _QUICK_MESHES = ("mlp", "gpt2"), ("2x4",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser of `penstock bench shard` its own arguments."""
    parser.add_argument(
        "--only", action="append", metavar="MODEL", help="plan for this model of the zoo; may be given several times"
    )
    parser.add_argument(
        "--mesh",
        action="append",
        choices=list(MESHES),
        metavar="MESH",
        help=f"plan for this mesh, of {', '.join(MESHES)}; may be given several times",
    )
    parser.add_argument("--hardware", default=HARDWARE, help="whose peaks, links and memory count (default: %(default)s)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{' and '.join(_QUICK_MODELS)} on {', '.join(_QUICK_MESHES)}, unless --only and --mesh say otherwise; no training",
    )
    parser.add_argument(
        "--train",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="train three steps under the plan, and on one device (default: unless --quick)",
    )
    parser.epilog = "example:\n  penstock bench shard --only gpt2 --mesh 2x4 --html plans.html"


def choose(args: argparse.Namespace) -> tuple[Workload, ...]:
    """Return the workload of the plans, and that of the training under them.

    Raises:
      ValueError: there is no such model, or no such hardware.
    """
    from penstock.bench.suites.shard.zoo import ZOO
    from penstock.shard.mesh.lookup import find_hardware

    find_hardware(args.hardware)
    if unknown := [name for name in args.only or () if name not in ZOO]:
        raise ValueError(f"--only {unknown[0]}: is not in the zoo; choose from {', '.join(ZOO)}")
    models = dict.fromkeys(args.only or (_QUICK_MODELS if args.quick else ZOO))
    meshes = dict.fromkeys(args.mesh or (_QUICK_MESHES if args.quick else MESHES))
    tasks = [Task(model, mesh, args.hardware) for model in models for mesh in meshes]
    train = args.train if args.train is not None else not args.quick
    return (plans_workload(tasks), training_workload(tasks)) if train else (plans_workload(tasks),)
