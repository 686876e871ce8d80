"""Run the launcher on a script, and return what it did."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import penstock

PACKAGE = Path(penstock.__file__).parent

BARE = f"""
import signal, sys, types
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts its background commands without Ctrl-C
for name, path in (("penstock", {str(PACKAGE)!r}), ("penstock.train", {str(PACKAGE / "train")!r}), ("penstock._jax", "")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
"""
"""The beginning of a script that imports parts of penstock which do not need JAX, without JAX, which takes more than a second."""

_LAUNCHER = (
    BARE
    + """
import argparse
from penstock.train.launch import launch_command
parser = argparse.ArgumentParser()
launch_command.add_arguments(parser)
sys.exit(launch_command.run(parser.parse_args()))
"""
)


@dataclass
class Launched:
    """The exit code of a launcher, and the lines that it wrote."""

    code: int
    out: str
    err: str

    def lines(self, rank: int) -> list[str]:
        """Return the lines of a rank on stdout, without the prefix."""
        return [line.removeprefix(f"[{rank}] ") for line in self.out.split("\n") if line.startswith(f"[{rank}] ")]


def start(folder: Path, script: str, *options: str, count: int = 2, arguments: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """Start a launcher with a script."""
    file = folder / "script.py"
    file.write_text(textwrap.dedent(script))
    command = [sys.executable, "-c", _LAUNCHER, "-n", str(count), *options, str(file), *arguments]
    environment = os.environ | {"PYTHONWARNINGS": "error"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


def finish(launcher: subprocess.Popen[bytes]) -> Launched:
    """Wait for a launcher."""
    try:
        out, err = launcher.communicate(timeout=200)
    finally:
        launcher.kill()
    return Launched(launcher.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


def launch(folder: Path, script: str, *options: str, count: int = 2, arguments: tuple[str, ...] = ()) -> Launched:
    """Run a launcher with a script to its end."""
    return finish(start(folder, script, *options, count=count, arguments=arguments))


def read_until(launcher: subprocess.Popen[bytes], text: str, times: int = 1) -> None:
    """Read lines of a launcher's stdout until a text has come so often. Fail if it ends before."""
    assert launcher.stdout is not None
    while times:
        line = launcher.stdout.readline()
        assert line, f"it ended before {text!r}"
        times -= text in line.decode()


def ended(process: int) -> bool:
    """Return whether a process is gone; one that nobody has waited for counts as gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True
