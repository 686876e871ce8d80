"""The command `penstock`: parse the arguments, and run the command that they name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import penstock
from penstock._doctor import command as examination
from penstock._launcher import command as starting
from penstock._launcher import within
from penstock._launcher.settings import choose
from penstock.bench import command
from penstock.bench.comparing import command as comparing
from penstock.bench.suites import is_file
from penstock.recipes import digits, text
from penstock.shard import command as planning
from penstock.train.launch import command as launching

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction["_Parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
      argv: the arguments, without the name of the program; None takes those of the process.

    Returns:
      The exit status of the command; 130 after Ctrl-C.

    Raises:
      SystemExit: 0 after --help and --version, 2 for arguments that no command takes.
    """
    the_program = argv is None
    argv = sys.argv[1:] if argv is None else argv
    args = _parser(argv).parse_args(argv)
    if the_program and argv[:1] == ["train"]:
        within.apply(choose())  # what `penstock run` sets for others
    try:
        return args.run(args)
    except KeyboardInterrupt as interrupt:
        print(f"penstock: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """An argument parser that keeps line breaks in descriptions, and reports an error in one line without the usage."""

    def __init__(self, **settings: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def _parser(argv: Sequence[str]) -> _Parser:
    parser = _Parser(
        prog="penstock",
        description=(
            "Train with JAX: run an example, plan which device holds what, start several processes, measure, or look at the\n"
            "environment."
        ),
        epilog="example:\n  penstock train digits",
    )
    parser.add_argument("--version", action="version", version=f"penstock {penstock.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    _add_train(commands)
    _add(commands, "plan", "find which device holds what", planning)
    _add(commands, "launch", "run a script as several processes on this machine", launching)
    _add(commands, "run", "start a program with the settings that make its steps fastest", starting)
    _add(commands, "compare", "say which of two functions or commands is faster, and how certain that is", comparing)
    _add_bench(commands, argv[1:] if argv[:1] == ["bench"] else None)
    _add(commands, "doctor", "look at versions, devices and known faults, and say what to do", examination)
    return parser


def _add_train(commands: _Commands) -> None:
    train = commands.add_parser(
        "train",
        help="run a complete training",
        description='Run a complete training, from files to a plot. It needs: pip install "penstock[train]"',
        epilog="example:\n  penstock train digits --steps 200 --out runs/short",
    )
    recipes = train.add_subparsers(title="recipes", metavar="recipe", required=True)
    _add(recipes, "digits", "a small Vision Transformer on 8x8 handwritten digits; about half a minute on two CPU cores", digits)
    _add(recipes, "text", "a small language model on the bytes of a text; about a minute on two CPU cores", text)


def _add(commands: _Commands, name: str, about: str, module: ModuleType) -> None:
    """Add the command of a module that has DESCRIPTION, EPILOG, add_arguments and run."""
    parser = commands.add_parser(name, help=about, description=module.DESCRIPTION, epilog=module.EPILOG)
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)


def _add_bench(commands: _Commands, argv: Sequence[str] | None) -> None:
    """Add the command `bench`. Its suites look for GPUs, so their arguments are added only if it is used.

    Args:
      commands: where it is added.
      argv: the arguments after `bench`; None if another command is used.
    """
    bench = commands.add_parser(
        "bench",
        help="measure, so that it can be believed",
        description=(
            "Measure input pipelines and training steps against each other, each in processes of its own, and print how\n"
            'they compare and how certain that is. Some suites need: pip install "penstock[bench]"'
        ),
        epilog="example:\n  penstock bench feed --quick",
    )
    if argv is not None:
        try:
            command.add_arguments(bench, next((word for word in argv[:1] if is_file(word)), None))
        except ValueError as error:
            bench.exit(2, f"{bench.prog}: error: {error}\n")
    bench.set_defaults(run=command.run)
