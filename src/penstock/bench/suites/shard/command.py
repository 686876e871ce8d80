"""`penstock bench shard`: its arguments, and running it with them."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from penstock._doctor.jaxlib_faults import warn_of_known_faults
from penstock.bench import files, machine
from penstock.bench.interrupt import ended_like_ctrl_c
from penstock.bench.process import run_variant
from penstock.bench.suites.shard.case import Case, Training, case_from_json, training_from_json
from penstock.bench.suites.shard.report import Report, as_json, as_markdown, print_report
from penstock.bench.suites.shard.task import HARDWARE, MESHES, Task
from penstock.bench.suites.shard.workload import FOUND, MODULE, PLANS, TRAINING, workload_of

_QUICK_MODELS, _QUICK_MESHES = ("mlp", "gpt2"), ("2x4",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser of `penstock bench shard` its arguments."""
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
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all scores, and what they say")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write the tables, with every baseline")
    parser.epilog = "example:\n  penstock bench shard --only gpt2 --mesh 2x4 --markdown plans.md"


def run(args: argparse.Namespace) -> int:
    """Plan, score, and print the report; its files are there after each model and mesh.

    Returns:
      0, also where a target was missed; 1 if something failed that is no missed target; 2 for arguments or files that cannot
      be used; 130 after Ctrl-C, with what was found until then.
    """
    try:
        tasks = _tasks(args)
        files.check({"--json": args.json, "--markdown": args.markdown})
    except ValueError as error:
        print(f"penstock bench shard: error: {error}", file=sys.stderr)
        return 2
    warn_of_known_faults()
    console = Console()
    training = args.train if args.train is not None else not args.quick
    begin, described = time.perf_counter(), machine.describe()
    cases: list[Case] = []

    def so_far(partial: str | None) -> Report:
        made = Report(args.hardware, tuple(cases), described, time.perf_counter() - begin, partial)
        if args.json:
            files.replace(args.json, as_json(made))
        if args.markdown:
            files.replace(args.markdown, as_markdown(made))
        return made

    def count() -> str:
        return f"{len(cases)} of {len(tasks)} models and meshes"

    interrupted = False
    so_far(f"not finished, {count()}")
    with ended_like_ctrl_c(), console.status("") as status:
        try:
            for case in _found(tasks, training, lambda text: status.update(escape(text))):
                cases.append(case)
                so_far(f"not finished, {count()}")
        except KeyboardInterrupt:
            interrupted = True
    print_report(console, so_far(f"interrupted after {count()}" if interrupted else None))
    if interrupted:
        return 130
    return 1 if any(_failed(case) for case in cases) else 0


def _tasks(args: argparse.Namespace) -> list[Task]:
    """What to plan for.

    Raises:
      ValueError: there is no such model, or no such hardware.
    """
    from penstock.bench.suites.shard.zoo import ZOO
    from penstock.shard.mesh.hardware import hardware

    hardware(args.hardware)
    if unknown := [name for name in args.only or () if name not in ZOO]:
        raise ValueError(f"--only {unknown[0]}: is not in the zoo; choose from {', '.join(ZOO)}")
    models = args.only or (_QUICK_MODELS if args.quick else ZOO)
    meshes = args.mesh or (_QUICK_MESHES if args.quick else MESHES)
    return [Task(model, mesh, args.hardware) for model in models for mesh in meshes]


def _found(tasks: list[Task], training: bool, say: Callable[[str], None]) -> Iterator[Case]:
    """Each task in processes of its own: their compilers may die, and JAX is never started in this one."""
    for number, task in enumerate(tasks, 1):
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            say(f"{number} of {len(tasks)}, {task.model} on {task.mesh}: plans and baselines")
            case = _plan(task, Path(folder))
            if training and any(plan.score for plan in case.plans):
                say(f"{number} of {len(tasks)}, {task.model} on {task.mesh}: training")
                case = replace(case, training=_train(task, Path(folder)))
        yield replace(case, seconds=time.perf_counter() - begin)


def _plan(task: Task, folder: Path) -> Case:
    workload = workload_of(task)
    ended = run_variant(MODULE, workload, workload.variant(PLANS), "full", folder)
    if ended.reason or ended.result is None:
        return Case(task.model, task.mesh, failure=ended.reason or "ended without a result")
    return case_from_json(ended.result["details"][FOUND])


def _train(task: Task, folder: Path) -> Training:
    workload = workload_of(task)
    ended = run_variant(MODULE, workload, workload.variant(TRAINING), "full", folder)
    if ended.reason or ended.result is None:
        return Training(reason=ended.reason or "ended without a result")
    return training_from_json(ended.result["details"][FOUND])


def _failed(case: Case) -> bool:
    """Whether there was an error: a plan that is refused or worse than it should be is none."""
    plans = any(plan.score is None and not plan.refused for plan in case.plans)
    return bool(case.failure) or plans or bool(case.training and case.training.reason)
