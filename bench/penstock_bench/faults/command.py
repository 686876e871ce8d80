"""Run `penstock bench faults`: print a table and write reports. The exit status says whether something was lost."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import penstock
from penstock._atomic_write import replace
from penstock.train.manifest import NAME
from penstock_bench import machine
from penstock_bench.faults.scenarios import Bench, Outcome
from penstock_bench.writable import check_writable

DESCRIPTION = f"""\
Break a small training on purpose, continue it until it ends, and compare it with one that nobody broke: its parameters
bit for bit, and the number of each record that each step has seen.

  kills      SIGKILL at random moments: import, compilation, a step, a read, a save
  signals    SIGTERM at random moments: status 0, and a line that says how to continue
  damaged    the newest checkpoint is truncated, has flipped bits, or lacks a file, its arrays or its {NAME}
  devices    killed, and continued on 8, 4, 2 and 1 devices (parameters within 1e-5)
  processes  killed, and continued in 1, 2 and 1 processes (parameters within 1e-5)
  losses     undisturbed, in 2 processes with 4 devices: the losses of 1 with 8 (within 1e-6)
  disk       the disk is full during a save (needs the right to mount a tmpfs)
  keras      model.fit with pk.Checkpoint, killed in the middle of epochs

The status is 1 if something was lost. The folder of a run that failed is kept."""

EPILOG = "example:\n  penstock bench faults --only kills --count 10"

_COUNTS = {"kills": 100, "signals": 50, "damaged": 20, "devices": 3, "processes": 4, "losses": 1, "disk": 3, "keras": 20}
_QUICK = {"kills": 10, "signals": 5, "damaged": 5, "devices": 3, "processes": 2, "losses": 1, "disk": 1, "keras": 3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `penstock bench faults`."""
    parser.add_argument(
        "--only", action="append", choices=list(_COUNTS), metavar="SCENARIO", help="run this one; may be repeated"
    )
    parser.add_argument("--count", type=int, metavar="N", help="how often to break the training in each scenario")
    parser.add_argument("--quick", action="store_true", help="fewer times: a few minutes")
    parser.add_argument("--seed", type=int, metavar="N", help="of the random moments (default: another one each time)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the report as Markdown")


def run(args: argparse.Namespace) -> int:
    """Run the scenarios and print the table.

    Returns:
      0 if nothing was lost, 1 if something was, 2 for arguments that cannot be used.
    """
    try:
        if args.count is not None and args.count < 1:
            raise ValueError(f"--count {args.count}: needs an integer >= 1")
        check_writable({"--json": args.json, "--markdown": args.markdown})
    except ValueError as error:
        print(f"penstock bench faults: error: {error}", file=sys.stderr)
        return 2
    seed = secrets.randbits(32) if args.seed is None else args.seed
    counts = _QUICK if args.quick else _COUNTS
    folder = Path(tempfile.mkdtemp(prefix="penstock-faults-"))
    console = Console()
    outcomes: list[Outcome] = []
    with console.status("an undisturbed training") as status:
        bench = Bench(folder, seed, status.update)
        for name in args.only or list(_COUNTS):
            outcomes.append(_scenario(bench, name, args.count or counts[name]))
            _print_last(console, outcomes)
            _write(args, seed, outcomes)
    failed = any(outcome.failures for outcome in outcomes)
    if failed:
        console.print(f"seed {seed}; the folders of the runs: {folder}", highlight=False)
    else:
        bench.remove()
    return 1 if failed else 0


def _scenario(bench: Bench, name: str, count: int) -> Outcome:
    run: Callable[[int], Outcome] = getattr(bench, name)
    return run(count)


def _print_last(console: Console, outcomes: Sequence[Outcome]) -> None:
    outcome = outcomes[-1]
    counts = f"{outcome.good} of {outcome.tried} as they should be, {outcome.seconds:.0f} s"
    console.print(f"[bold]{outcome.name}[/]: {counts}", highlight=False)
    for line in [_phases(outcome), *outcome.notes]:
        if line:
            console.print(f"  {line}", markup=False, highlight=False)
    for line in outcome.failures:
        console.print(f"  failed: {line}", markup=False, highlight=False)


def _phases(outcome: Outcome) -> str:
    return ", ".join(f"{phase} {count}" for phase, count in outcome.phases.most_common())


def _write(args: argparse.Namespace, seed: int, outcomes: Sequence[Outcome]) -> None:
    if args.json:
        document: dict[str, Any] = {
            "penstock": penstock.__version__,
            "jax": jax.__version__,
            "machine": machine.describe(),
            "seed": seed,
            "scenarios": [{**vars(outcome), "phases": dict(outcome.phases)} for outcome in outcomes],
        }
        replace(args.json, json.dumps(document, indent=1, default=str))
    if args.markdown:
        rows = [
            f"| {o.name} | {o.tried} | {o.good} | {_phases(o)} | {'; '.join(o.notes)} | {o.seconds:.0f} s |" for o in outcomes
        ]
        head = "| what was done | times | as it should be | when | notes | time |\n|---|---|---|---|---|---|\n"
        failures = [f"- {o.name}: {line}" for o in outcomes for line in o.failures]
        text = f"# Faults\n\nJAX {jax.__version__}, seed {seed}.\n\n{head}" + "\n".join(rows) + "\n\n" + "\n".join(failures)
        replace(args.markdown, text.rstrip() + "\n")
