"""`distributed`: join the processes of a run, however they were started."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
from dataclasses import dataclass
from types import TracebackType

import jax

from penstock._arguments import at_least
from penstock._jax import backends_started, joined_processes
from penstock.train.detection import DistributedError, Place, find_place
from penstock.train.meeting import meet, split_address

_MOVE = (
    "call ps.distributed() at the top of the script, right after its imports. Arrays, jax.devices(), jax.jit'ed calls and "
    "everything else that uses a device have to come later, also in modules that the script imports"
)


@dataclass(frozen=True)
class Processes:
    """The processes of this run, returned by `distributed`. Printed, it says which process this is.

    Attributes:
      index: of this process, from 0 to count - 1. Process 0 is the one to print and to write files.
      count: number of processes; 1 if this process is alone.
      how: how that was found out, such as "SLURM" or "penstock launch".
      coordinator: the address of process 0; None if this process is alone.
    """

    index: int
    count: int
    how: str
    coordinator: str | None = None

    @property
    def local_devices(self) -> int:
        """Return the number of devices of this process. It starts JAX's devices, so settings of JAX have to come before."""
        return jax.local_device_count()

    def __str__(self) -> str:
        devices = f"{self.local_devices} device{'s' if self.local_devices > 1 else ''}"
        if self.count == 1:
            return f"one process with {devices} ({self.how})"
        return f"process {self.index} of {self.count} with {devices} ({self.how}, coordinator {self.coordinator})"


_joined: Processes | None = None  # the result of the first call, for later ones


def distributed(
    coordinator: str | None = None, count: int | None = None, index: int | None = None, *, timeout: float = 300.0
) -> Processes:
    """Join the processes of this run. Call it at the top of a script, before anything uses a device.

    Without arguments it joins the processes of `penstock launch`, SLURM, Open MPI, a TPU pod, or an indexed Job of Kubernetes, as
    `jax.distributed.initialize` detects them, and does nothing if none of them is found. All processes meet before JAX joins
    them. So one that is missing is an error which names it, where JAX would abort the process. CPUs use gloo for collectives.
    If an uncaught exception ends a process, it ends at once, and does not wait at its exit for the others, which wait for it.

    Args:
      coordinator: the address of process 0, as "node1:1234", the same in all processes; None to find it out. The environment
        variables of JAX apply too: JAX_COORDINATOR_ADDRESS, JAX_COORDINATOR_PORT, JAX_LOCAL_DEVICE_IDS.
      count: number of processes; None to find it out. 1: this process is alone, whatever is found.
      index: of this process, from 0 to count - 1; None to find it out.
      timeout: seconds to wait for the other processes.

    Returns:
      The place of this process. A later call returns the same.

    Raises:
      DistributedError: the coordinator cannot be reached, a process did not come, the processes disagree about the run, or a
        device was used before.
      ValueError: the arguments make no sense, are incomplete, or differ from those of an earlier call.

    Examples:
      >>> processes = ps.distributed()
      >>> processes.index, processes.count
      (0, 1)
    """
    global _joined  # noqa: PLW0603 - a process joins once
    if count is not None:
        at_least(1, "count", count)
    if index is not None and at_least(0, "index", index) >= (math.inf if count is None else count):
        raise ValueError(f"index={index}: needs an integer from 0 to {count} - 1, as there are count={count} processes")
    if coordinator is not None:
        if not isinstance(coordinator, str):
            raise TypeError(f'coordinator={coordinator!r}: needs the address of process 0, as "node1:1234"')
        split_address(coordinator)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise ValueError(f"timeout={timeout!r}: needs seconds > 0")
    if _joined is None and (joined := joined_processes()):
        _joined = Processes(*joined, "jax.distributed.initialize was called before")
    if _joined is not None:
        _same(_joined, coordinator, count, index)
        return _joined
    place = find_place(coordinator, count, index, timeout)
    if place.coordinator is not None:
        if not 0 <= place.index < place.count:
            raise ValueError(f"index={place.index}, count={place.count} ({place.how}): the index has to be below the count")
        return join(place, place.coordinator, timeout)
    return Processes(0, 1, place.how)  # nothing is joined, so a later call with arguments may join


def join(place: Place, coordinator: str, timeout: float) -> Processes:
    """Join the processes of a run at a place that is known. Later calls of `distributed` return the result.

    Args:
      place: of this process.
      coordinator: the address of process 0.
      timeout: seconds to wait for the other processes.

    Raises:
      DistributedError: see `distributed`.
    """
    global _joined  # noqa: PLW0603 - a process joins once
    _initialize(place, coordinator, timeout)
    _joined = Processes(place.index, place.count, place.how, coordinator)
    return _joined


def _same(joined: Processes, coordinator: str | None, count: int | None, index: int | None) -> None:
    """Raise ValueError if a later call gives other arguments than the processes have joined by."""
    for name, value in (("coordinator", coordinator), ("count", count), ("index", index)):
        have = getattr(joined, name)
        if value is not None and have is not None and value != have:
            raise ValueError(f"{name}={value!r}: this process has joined with {name}={have!r} ({joined.how}), and can do so once")


def _initialize(place: Place, coordinator: str, timeout: float) -> None:
    if backends_started():
        raise DistributedError(
            f"process {place.index} of {place.count} ({place.how}) cannot join the others any more, because a device was used "
            f"before ps.distributed(): {_MOVE}"
        )
    meet(coordinator, place.count, place.index, timeout, place.bind)
    if jax.config.values.get("jax_cpu_collectives_implementation") in (None, "none"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator,
            place.count,
            place.index,
            cluster_detection_method=None if place.in_cluster else "deactivate",
            initialization_timeout=math.ceil(timeout),
            coordinator_bind_address=place.bind,
        )
    except (RuntimeError, ValueError) as error:
        raise DistributedError(f"process {place.index} of {place.count} ({place.how}) could not join: {error}") from error
    _leave_at_once_after_an_error()


def _leave_at_once_after_an_error() -> None:
    """End the process after an uncaught exception without JAX's exit function, which waits for all other processes.

    They wait for this one, in a collective. So both would wait until JAX's limit, five minutes, and then abort, with another exit
    code. The exit functions that were registered after this call run before it. Those registered before do not run.
    """
    failed: list[int] = []

    def note(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if not hasattr(sys, "ps1"):  # an interactive session goes on
            failed.append(130 if issubclass(kind, KeyboardInterrupt) else 1)
        before(kind, value, traceback)

    def leave() -> None:
        if failed:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # it may be closed
                    stream.flush()
            os._exit(failed[-1])

    before, sys.excepthook = sys.excepthook, note
    atexit.register(leave)
