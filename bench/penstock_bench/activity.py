"""Read from Linux how much of the processor and of memory the processes of a session use.

A live variant may start processes of its own, such as the workers of a loader, so a session is read and not a process. Elsewhere
than on Linux nothing is known.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.environment.machine import cgroup_folders, cgroup_limits, cgroup_memory_limit, read

_PROC = Path("/proc")


@dataclass(frozen=True)
class Activity:
    """The use of the processor and of memory by the processes of a session, since their start.

    Attributes:
      cpu: seconds of the processor, over all threads.
      faults: page faults.
      switches: how often the system took a core away from a thread that could have gone on.
    """

    cpu: float
    faults: int
    switches: int

    def since(self, before: Activity) -> Activity:
        """Return what was used after `before`. Processes that have ended since are not counted."""
        return Activity(
            max(0.0, self.cpu - before.cpu), max(0, self.faults - before.faults), max(0, self.switches - before.switches)
        )


def known() -> bool:
    """Tell whether the system reports the use of the processor by process."""
    return (_PROC / "self/stat").exists()


class Session:
    """The living processes of a session."""

    def __init__(self, number: int):
        self._number = number
        self._processes: list[int] = []

    def look(self) -> Activity:
        """Find the processes, and return what they have used."""
        faults, switches = 0, 0
        self._processes = []
        for process, fields in _processes(self._number):
            self._processes.append(process)
            faults += int(fields[7]) + int(fields[9])  # minor and major
            switches += _switches(process)
        return Activity(self.cpu(), faults, switches)

    def cpu(self) -> float:
        """Return the seconds of the processor that the processes have used, of those that `look` found: this is quick."""
        return sum(map(_cpu_seconds, self._processes))

    def memory(self) -> int:
        """Return the bytes of memory that the processes hold. Shared memory is divided among the processes."""
        total = 0
        for process, fields in _processes(self._number):
            try:
                lines = (_PROC / str(process) / "smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
            except (OSError, StopIteration, ValueError):  # gone, or of a kernel without this file
                total += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        return total

    def shrunk(self) -> int:
        """Return the bytes of memory that the processes once held beyond what they hold now; 0 where the system does not say."""
        total = 0
        for process, _ in _processes(self._number):
            with contextlib.suppress(OSError, KeyError):
                status = dict(line.split(":", 1) for line in (_PROC / str(process) / "status").read_text().splitlines())
                total += int(status["VmHWM"].split()[0]) - int(status["VmRSS"].split()[0]) << 10
        return total


def cores() -> int:
    """Count the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def total_memory() -> int | None:
    """Return the bytes of memory of the machine, or of its cgroup; None where the system does not say."""
    found = [cgroup_limits().memory]
    with contextlib.suppress(AttributeError, ValueError, OSError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min((each for each in found if each is not None), default=None)


def available_memory() -> int | None:
    """Return the bytes of memory that can be used without swapping, here and in the cgroup; None where the system is silent."""
    found = [free_in_cgroup()]
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = (_PROC / "meminfo").read_text().splitlines()
        found.append(next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")))
    return min((each for each in found if each is not None), default=None)


def free_in_cgroup(proc: Path = _PROC) -> int | None:
    """Return the bytes that this process's cgroups may still use, where the page cache is free; None without a limit."""
    found = []
    for folder in cgroup_folders("memory", proc):
        limit = cgroup_memory_limit(folder)
        used = read(folder / "memory.current").strip() or read(folder / "memory.usage_in_bytes").strip()
        if limit is not None and used.isdigit():
            counts = dict(line.split(maxsplit=1) for line in read(folder / "memory.stat").splitlines() if line)
            cached = int(counts.get("total_inactive_file", counts.get("inactive_file", "0")))
            found.append(max(0, limit - int(used) + cached))
    return min(found, default=None)


def busy_seconds() -> float | None:
    """Return the seconds that all cores have worked since the machine started, for whomever; None if the system does not say.

    The time that the host took from a virtual machine ("steal") counts as work of others.
    """
    try:
        user, nice, system, _, _, irq, softirq, steal = map(int, (_PROC / "stat").read_text().split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class Busy:
    """The use of all cores since this was made."""

    def __init__(self) -> None:
        self._busy, self._ours, self._begin = busy_seconds(), time.process_time(), time.perf_counter()

    def by_others(self, cpu: float) -> float | None:
        """Return the share of all cores' time that was used neither by variants, for so many seconds, nor by this process.

        None if the system does not say.
        """
        seconds, busy = time.perf_counter() - self._begin, busy_seconds()
        if busy is None or self._busy is None:
            return None
        theirs = busy - self._busy - cpu - (time.process_time() - self._ours)
        return min(1.0, max(0.0, theirs) / (seconds * (os.cpu_count() or 1)))


def _processes(session: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the processes of a session, each with the fields of its `stat` after the name: man proc_pid_stat, from the third."""
    for entry in os.scandir(_PROC) if known() else ():
        if entry.name.isdecimal():
            try:
                fields = (_PROC / entry.name / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # gone
            if int(fields[3]) == session:
                yield int(entry.name), fields


def _cpu_seconds(process: int) -> float:
    """Return the seconds of the processor that all threads of a process have used, to the nanosecond."""
    try:
        # The clock of another process: clock_getcpuclockid(3), whose numbers are a part of Linux's ABI.
        return time.clock_gettime(~process << 3 | 2)
    except OSError:
        return 0.0  # gone


def _switches(process: int) -> int:
    """Return the involuntary switches of all threads of a process."""
    total = 0
    with contextlib.suppress(OSError):
        for task in os.scandir(_PROC / str(process) / "task"):
            with contextlib.suppress(OSError, StopIteration, ValueError):
                lines = reversed((Path(task.path) / "status").read_text().splitlines())
                total += next(int(line.split()[1]) for line in lines if line.startswith("nonvoluntary"))
    return total
