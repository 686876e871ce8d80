"""The command `penstock`: parse the arguments, and run the command that they name."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import penstock
from penstock import run_command
from penstock.environment import doctor as examination
from penstock.recipes import digits, text
from penstock.shard import plan_command
from penstock.train.launch import launch_command

# The commands that the distribution penstock-bench adds, by entry points of the group `penstock.commands`.
_BENCH_COMMANDS = {
    "compare": "say which of two functions or commands is faster, and how certain that is",
    "bench": "measure, so that it can be believed",
}

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction["_Parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
      argv: the arguments, without the name of the program; None takes the process's own.

    Returns:
      The exit status of the command; 130 after Ctrl-C.

    Raises:
      SystemExit: 0 after --help and --version, 2 for arguments that no command takes.
    """
    is_program = argv is None
    argv = sys.argv[1:] if argv is None else argv
    args = _parser(argv).parse_args(argv)
    if is_program and argv[:1] == ["train"]:
        run_command.apply(run_command.choose())  # what `penstock run` sets for others
    try:
        return args.run(args)
    except KeyboardInterrupt as interrupt:
        print(f"penstock: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """An argument parser that keeps line breaks in descriptions, and reports an error in one line without the usage."""

    def __init__(self, **settings: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def parse_known_args(self, *args: Any, **settings: Any) -> Any:
        """Refuse what is left here, in the words of the command that does not know it, and not in those of `penstock`."""
        parsed, left = super().parse_known_args(*args, **settings)
        if left:
            near = difflib.get_close_matches(left[0].partition("=")[0], self._option_string_actions, n=1)
            self.error(f"unrecognized arguments: {' '.join(left)}{f'; did you mean {near[0]}' if near else ''}")
        return parsed, left

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
    _add(commands, "plan", "find which device holds what", plan_command)
    _add(commands, "launch", "run a script as several processes on this machine", launch_command)
    _add(commands, "run", "start a program with the settings that make its steps fastest", run_command)
    for name, about in _BENCH_COMMANDS.items():
        _add_bench_command(commands, name, about, argv)
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


def _add(commands: _Commands, name: str, about: str, module: ModuleType, *argv: Sequence[str]) -> None:
    """Add the command of a module that has DESCRIPTION, EPILOG, add_arguments and run.

    A module whose options depend on the arguments after the name gets these as `argv`.
    """
    parser = commands.add_parser(name, help=about, description=module.DESCRIPTION, epilog=module.EPILOG)
    module.add_arguments(parser, *argv)
    parser.set_defaults(run=module.run)


def _add_bench_command(commands: _Commands, name: str, about: str, argv: Sequence[str]) -> None:
    """Add a command of penstock-bench. Its module is imported only if `argv` uses it: suites look for GPUs."""
    if argv[:1] != [name]:
        commands.add_parser(name, help=about)
        return
    found = next(iter(entry_points(group="penstock.commands", name=name)), None)
    if found is None:
        reason = "needs penstock-bench, which is not installed; in a clone of the repository: pip install -e bench"
        print(f"penstock {name}: error: {reason}", file=sys.stderr)
        raise SystemExit(2)
    _add(commands, name, about, found.load(), argv[1:])
