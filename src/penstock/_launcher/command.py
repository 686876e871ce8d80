"""The command `penstock run`: start a program with the settings that make its steps fastest."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock._early import ENVIRONMENT
from penstock._launcher.settings import Choice, choose

DESCRIPTION = """\
Start a program with the settings of the C library's allocator and of XLA with which training with JAX was fastest where we
measured it, and change nothing else. On a CPU, a step gets its memory from the system anew each time without them. Variables
that you have set stay as they are. It prints what it sets and why, and becomes the program, which keeps its process id."""
EPILOG = """\
example:
  penstock run -- python train.py --steps 1000
  penstock run --show"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `penstock run`."""
    parser.usage = "penstock run [--show] [--quiet] -- PROGRAM [ARGUMENTS …]"
    parser.add_argument("--show", action="store_true", help="print the settings as shell commands, and start nothing")
    parser.add_argument("--quiet", action="store_true", help="do not print what is set")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="the program and its arguments")


def run(args: argparse.Namespace) -> int:
    """Replace this process by the program, or print the settings.

    Returns:
      0 after --show; 2 without a program; 127 if there is no such program, and 126 if it cannot be started, as shells do. Else it
      does not return, except on Windows, where it returns the status of the program.
    """
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    choice = choose(os.environ, *program[:1])
    if args.show:
        print("\n".join(shell_lines(choice)))
        return 0
    if not program:
        print("penstock run: error: no program to start; penstock run -- python train.py", file=sys.stderr)
        return 2
    if shutil.which(program[0]) is None:
        return _no_program(program)
    if not args.quiet:
        print("\n".join(f"penstock run: {line}" for line in said(choice)), file=sys.stderr, flush=True)
    return _become(program, choice)


def said(choice: Choice) -> list[str]:
    """Return lines that say what is set and why, and what is left as it is."""
    return [*(f"{setting.name}={setting.value} ({setting.why})" for setting in choice.settings), *choice.left]


def shell_lines(choice: Choice) -> list[str]:
    """Return the settings as commands of a shell."""
    exports = (f"export {setting.name}={shlex.quote(setting.value)}  # {setting.why}" for setting in choice.settings)
    return [*exports, *(f"# {line}" for line in choice.left)]


def _no_program(program: Sequence[str]) -> int:
    """Say why the program cannot be started, and return the status that shells return."""
    name, there = program[0], Path(program[0]).exists()
    hint = f"; penstock run -- python {shlex.join(program)}" if name.endswith(".py") else ""
    reason = "cannot be executed" if there else "is not a program on the search path"
    print(f"penstock run: error: {name} {reason}{hint}", file=sys.stderr)
    return 126 if there else 127


def _become(program: Sequence[str], choice: Choice) -> int:
    """Replace this process by the program. On Windows, where no process can be replaced, start it and wait for it."""
    sys.stdout.flush()
    environment = {**ENVIRONMENT, **choice.variables}
    try:
        if os.name == "nt":
            return subprocess.call(list(program), env=environment)
        for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and the program would inherit that
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        os.execvpe(program[0], list(program), environment)
    except FileNotFoundError:  # `which` has found the program
        print(
            f"penstock run: error: {program[0]} cannot be started: the interpreter in its first line is missing", file=sys.stderr
        )
        return 126
    except OSError as error:
        print(f"penstock run: error: {program[0]} cannot be started: {error.strerror}", file=sys.stderr)
        return 126
