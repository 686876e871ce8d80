"""The command `penstock launch`: check the command line, run the ranks, and restart them up to `--restarts` times."""

from __future__ import annotations

import argparse
import importlib.machinery
import math
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from penstock.train.launch.ranks import Launch, Output, run_attempt, signal_pipe

DESCRIPTION = """\
Run a script as several processes (ranks) on this machine, which join by ps.distributed(). Each line of their output begins with
the rank. If one fails, all end, and its exit status is kept. Ctrl-C and SIGTERM go to all of them."""
EPILOG = """\
example:
  penstock launch -n 2 --devices-per-process 4 train.py --steps 1000
  penstock launch -n 8 --restarts 3 --stall 300 -m my_package.train --resume

Options after the script or the module are its own."""
MOST = 256
"""The most ranks: each has two pipes, and `select` watches up to 1,024 descriptors."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `penstock launch`."""
    parser.usage = "penstock launch -n N [options] (SCRIPT | -m MODULE) [ARGUMENTS …]"
    parser.add_argument("-n", "--processes", type=_whole(1, MOST), metavar="N", required=True, help="number of processes")
    parser.add_argument(
        "--devices-per-process",
        type=_whole(1),
        metavar="M",
        help="GPUs of each process, or virtual devices where there are only CPUs (default: 1)",
    )
    parser.add_argument(
        "--restarts",
        type=_whole(0),
        default=0,
        metavar="K",
        help="after a failure, start all processes again, at most K times (default: 0)",
    )
    parser.add_argument(
        "--stall",
        type=_seconds,
        metavar="SECONDS",
        help="fail if a process makes no step for so long, and print where the one at fault is",
    )
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="time between SIGTERM and SIGKILL when all have to end (default: 10)",
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show the lines in which gloo says that it is connected, too"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENTS …]", help="the script with its arguments")


def run(args: argparse.Namespace) -> int:
    """Run the processes.

    Returns:
      The exit status: 0 if all processes exited with 0; 2 for a script that is not there; 124 after a stall; else the status of
      the process that failed first, which is 128 + n if signal n ended it.
    """
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    problem = _problem(command, args.module)
    if problem:
        print(f"penstock launch: error: {problem}; see penstock launch --help", file=sys.stderr)
        return 2
    launch = Launch(
        command=[sys.executable, *(["-m"] if args.module else []), *command],
        count=args.processes,
        devices=args.devices_per_process,
        restarts=args.restarts,
        stall=args.stall,
        grace=args.grace,
        verbose=args.verbose,
    )
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    _open_standard_streams()
    with signal_pipe() as signals:
        output, port = Output(), _free_port()
        for attempt in range(launch.restarts + 1):
            ending = run_attempt(launch, port, output, signals)
            if not ending.code or ending.signalled or attempt == launch.restarts:
                break
            port = _free_port()
            output.say(f"all processes start again after {ending.why}: restart {attempt + 1} of {launch.restarts}, port {port}")
    return ending.code


def _problem(command: list[str], module: bool) -> str:
    """Return why a command cannot be started; "" if it can."""
    if os.name != "posix":
        return "it needs Linux or macOS"
    if not command:
        return "a script is missing, or -m with a module"
    if command[0].startswith("-"):
        return f"{command[0]} is no option of it, or has no place after {'-m' if module else '--'}: the script is missing"
    if module:
        # Only the top-level package is looked for, because looking further would import it.
        paths = [os.getcwd(), *sys.path]
        found = importlib.machinery.PathFinder.find_spec(command[0].partition(".")[0], paths)
        return "" if found else f"there is no module {command[0]!r}"
    script = Path(command[0])
    if script.is_dir():
        return "" if (script / "__main__.py").exists() else f"{command[0]!r} is a folder without __main__.py"
    return "" if script.exists() else f"there is no script {command[0]!r}"


def _open_standard_streams() -> None:
    """Open descriptors 0 to 2 on the null device if they are closed. Otherwise, the next pipes would get their numbers."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _whole(least: int, most: float = math.inf) -> Callable[[str], int]:
    limits = f">= {least}" if most == math.inf else f"from {least} to {most}"

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text}: needs an integer {limits}")
        return number

    return parse


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: needs seconds > 0")
    return seconds
