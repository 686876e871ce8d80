"""Describe separate interpreters, for variants that need other package versions than penstock's environment has."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_FOLDER = "PENSTOCK_BENCH_ENVIRONMENTS"


@dataclass(frozen=True)
class Environment:
    """A virtual environment that a user creates with `command`; penstock itself is not installed in it.

    Attributes:
      name: the name of its folder, in `$PENSTOCK_BENCH_ENVIRONMENTS` or else in `~/.cache/penstock/environments`.
      packages: arguments for `pip install`.
    """

    name: str
    packages: tuple[str, ...]

    @property
    def folder(self) -> Path:
        base = os.environ.get(_FOLDER)
        return (Path(base) if base else Path.home() / ".cache/penstock/environments") / self.name

    @property
    def python(self) -> Path:
        return self.folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")

    @property
    def command(self) -> str:
        """Return the shell command that creates the environment."""
        folder = shlex.quote(str(self.folder))
        return f"python -m venv {folder} && {shlex.quote(str(self.python))} -m pip install {' '.join(self.packages)}"

    def lacks(self, modules: tuple[str, ...]) -> bool:
        """Tell whether the environment does not exist, or does not have one of the modules."""
        look = "import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))"
        try:
            found = subprocess.run([self.python, "-c", look, *modules], capture_output=True, timeout=60, check=False)
        except (OSError, subprocess.SubprocessError):
            return True
        return found.returncode != 0
