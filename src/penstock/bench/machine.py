"""What the numbers were measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import penstock

_PACKAGES = ("jax", "jaxlib", "numpy", "grain", "torch", "tensorflow-cpu", "tensorflow", "datasets", "pyarrow", "psutil")


def describe() -> dict[str, Any]:
    """CPU, memory, versions and load of this machine, as JSON holds it; None for what cannot be known."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "penstock": penstock.__version__,
        "commit": _commit(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit that penstock is at, with "+changes" where its files differ from it; None if it is no checkout."""
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None  # installed somewhere inside of another project's repository
    commit = _git("rev-parse", "HEAD")
    return commit and commit + ("+changes" if _git("status", "--porcelain", "--", ".") else "")


def _git(*args: str) -> str | None:
    folder = Path(penstock.__file__).parent
    try:
        done = subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
