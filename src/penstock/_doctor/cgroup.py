"""The limits of memory and CPU time that cgroups, of version 1 or 2, set to this process.

The files of its own cgroup and of all cgroups that contain it go in, the lowest limits come out. The files are described in
Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/ of the Linux kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 62  # version 1 writes the largest multiple of a page where there is no limit


@dataclass(frozen=True)
class Limits:
    """Limits of memory and CPU time.

    Attributes:
      known: whether the cgroups of this process could be read.
      memory: bytes; None for no limit.
      cores: CPU seconds per second; None for no quota.
    """

    known: bool
    memory: int | None
    cores: float | None


def limits(proc: Path = Path("/proc")) -> Limits:
    """Return the lowest of the limits that apply to this process."""
    memory, cpu = list(folders("memory", proc)), list(folders("cpu", proc))
    bytes_ = [limit for limit in map(memory_limit, memory) if limit is not None]
    cores = [limit for limit in map(_cores, cpu) if limit is not None]
    return Limits(bool(memory or cpu), min(bytes_, default=None), min(cores, default=None))


def memory_limit(folder: Path) -> int | None:
    """Return the bytes that the cgroup of a folder may use; None for no limit."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = read(folder / name).strip()
        if text.isdigit() and int(text) < _NO_LIMIT:
            return int(text)
    return None


def _cores(folder: Path) -> float | None:
    quota = read(folder / "cpu.max").split() or [
        read(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    ]
    return int(quota[0]) / int(quota[1]) if all(part.isdigit() for part in quota) else None


def folders(controller: str, proc: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and those above it, in each hierarchy that may have the controller."""
    for line in read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for mount in _mounts(proc, controller if controllers else None):
            folder = mount / path.lstrip("/")
            if not folder.is_dir():  # in a container, this may be a path of the host
                folder = mount
            yield from (each for each in (folder, *folder.parents) if each.is_relative_to(mount))


def _mounts(proc: Path, controller: str | None) -> Iterator[Path]:
    """Yield the mount points of the hierarchy of a controller; None stands for version 2, which has all controllers."""
    for line in read(proc / "mounts").splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2" if controller is None else kind == "cgroup" and controller in options.split(","):
            yield Path(where)


def read(path: Path) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
