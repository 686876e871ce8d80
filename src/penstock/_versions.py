"""List the versions that penstock works with, and refuse others with one line.

The check at import, `penstock doctor`, the tests and docs/versions.md all use the table `SUPPORTED`. Importing this module runs
the check, and the package imports it before JAX and NumPy. It needs only the standard library of Python 3.8, as do
`_first_import` and `_stopping`, which are imported before it, so an old interpreter prints the message too.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from penstock.errors import UnsupportedVersionError

if TYPE_CHECKING:
    Version = tuple[int, ...]


@dataclass(frozen=True)
class Supported:
    """The versions of one library (or of Python) that penstock works with.

    Attributes:
      name: the name of the library in text.
      oldest: the first release that works, as (major, minor).
      below: the first release that is not known to work, as (major, minor).
      tested: the releases that the tests run on, oldest first.
      distribution: its name for pip; "" for Python.
    """

    name: str
    oldest: Version
    below: Version
    tested: tuple[str, ...]
    distribution: str = ""

    def __contains__(self, version: str) -> bool:
        return self.oldest <= numbers(version)[:2] < self.below

    def is_newer(self, version: str) -> bool:
        """Return whether a version is newer than all that are known to work."""
        return numbers(version)[:2] >= self.below

    @property
    def works(self) -> str:
        """Return the versions that work, as "JAX 0.10 to 0.12"."""
        major, minor = self.below
        last = f"{major}.{minor - 1}" if minor else f"{major - 1}.x"
        first = _dotted(self.oldest)
        return f"{self.name} {first}" if first == last else f"{self.name} {first} to {last}"

    @property
    def requirement(self) -> str:
        """Return the versions that work as a requirement for pip: "jax>=0.10,<0.13"."""
        return f"{self.distribution}>={_dotted(self.oldest)},<{_dotted(self.below)}"

    @property
    def install(self) -> str:
        """Return the command that installs a version that works."""
        if not self.distribution:
            return "make an environment of one of those, such as: python3.12 -m venv .venv"
        return f'pip install "{self.requirement}"'

    def refuse(self, found: str, why: str = "") -> UnsupportedVersionError:
        """Return the error with the version found, the versions that work, and the command that installs one."""
        return UnsupportedVersionError(
            f"penstock works with {self.works}, and this is {self.name} {found}{', ' + why if why else ''}: {self.install}"
        )


PYTHON = Supported("Python", oldest=(3, 11), below=(3, 14), tested=("3.11", "3.13"))
JAX = Supported("JAX", oldest=(0, 10), below=(0, 13), tested=("0.10.0", "0.12.0.1"), distribution="jax")
KERAS = Supported("Keras", oldest=(3, 15), below=(3, 17), tested=("3.15.1", "3.16.0.dev2026102704"), distribution="keras")
RAY = Supported("Ray", oldest=(2, 60), below=(3, 0), tested=("2.60.0",), distribution="ray[train]")
SUPPORTED = (PYTHON, JAX, KERAS, RAY)


def numbers(version: str) -> Version:
    """Return the numbers at the beginning of a version: (3, 16, 0) for "3.16.0.dev2026102704"."""
    release = re.split(r"[^\d.]", version, maxsplit=1)[0]
    return tuple(map(int, re.findall(r"\d+", release)))


def python_version() -> str:
    """Return the version of this interpreter, as "3.12.1"."""
    return _dotted(sys.version_info[:3])


def installed(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def keras_version() -> str | None:
    """Return the version of the package `keras` that would be imported, without importing it; None if there is none.

    `keras` and `keras-nightly` install the same package into the same folder. So the version is read from a file in that folder.
    """
    try:
        found = importlib.util.find_spec("keras")
    except ValueError:  # `sys.modules` has a module without a specification, as where imports are mocked
        return getattr(sys.modules["keras"], "__version__", None)
    for folder in (found.submodule_search_locations or ()) if found else ():
        for name in ("src/version.py", "version.py", "__init__.py"):
            path = Path(folder) / name
            version = re.search(r'^__version__ = "([^"]+)"', path.read_text(), re.MULTILINE) if path.is_file() else None
            if version:
                return version[1]
    return (installed("keras") or installed("keras-nightly")) if found else None


def _require_python_and_jax() -> None:
    """Refuse a Python or JAX that is too old, or a JAX that is not complete. `untested` warns of a newer one."""
    if sys.version_info[:2] < PYTHON.oldest:
        raise without_traceback(PYTHON.refuse(python_version()))
    jax = installed("jax")
    if jax is None:
        raise without_traceback(UnsupportedVersionError(f"penstock needs {JAX.works}, which is not installed: {JAX.install}"))
    if jax not in JAX and not JAX.is_newer(jax):
        raise without_traceback(JAX.refuse(jax))
    if installed("jaxlib") is None:
        reason = f'JAX {jax} needs jaxlib, which is not installed: pip install "jaxlib=={jax}"'
        raise without_traceback(UnsupportedVersionError(reason))


def untested() -> tuple[str, ...]:
    """Return a warning for each of Python and JAX that is newer than the versions that penstock was tested with."""
    found = ((PYTHON, python_version()), (JAX, installed("jax")))
    return tuple(
        f"{supported.name} {version} is newer than {supported.works}, which penstock is known to work with: {supported.install}"
        for supported, version in found
        if version is not None and supported.is_newer(version)
    )


def without_traceback(error: UnsupportedVersionError) -> UnsupportedVersionError:
    """Return an error that Python prints as one line if it is not caught."""
    if not isinstance(sys.excepthook, _OneLine):
        sys.excepthook = _OneLine(sys.excepthook)
    return error


class _OneLine:
    """An excepthook that prints an UnsupportedVersionError as one line, and passes all other errors to the previous hook."""

    def __init__(self, others: Any):
        self._others = others

    def __call__(self, kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(value, UnsupportedVersionError):
            print(value, file=sys.stderr)
        else:
            self._others(kind, value, traceback)


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


_require_python_and_jax()
