"""Join the processes of a run, however they were started (`distributed`).

*Place.* The first source that knows the coordinator, the count and the index decides: the arguments, `penstock launch`, and the
clusters that JAX knows, in JAX's order (Open MPI, SLURM, TPU pods, Kubernetes). Missing arguments are taken from the next source.

*Meeting.* Where a process is missing, `jax.distributed.initialize` waits without a word and then aborts the process from C++, in
JAX 0.10 to 0.12. No Python code can catch that. So the processes meet first, at the address that JAX will use, and a missing
process is an error that names it:

- Process 0 listens there. Each other process connects, and sends a line with its index, the number of processes that it knows
  of, its host and its process id. Then it waits for an answer.
- When all have come, process 0 stops listening and answers "go". If they disagree, or some do not come in time, it answers with
  the error that it raises itself. So all processes say the same, and exit.
- After "go", JAX's service takes the port of process 0. The others try to connect until it is there, and then join it.

Process 0 runs one loop over its sockets, with one deadline; no other thread changes its tables. Every other process has one
socket, and each of its waits ends at its own deadline. So no process waits longer than its timeout, whatever happens to the
others. A process whose coordinator is a service of JAX already, started by other code, gets no answer of this form, and leaves
the rest to JAX.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import multiprocessing
import os
import selectors
import socket
import sys
import time
import warnings
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import jax

from penstock import _heartbeat
from penstock._arguments import at_least
from penstock._jax import backends_started, clusters, joined_processes
from penstock.errors import DistributedError

_log = logging.getLogger("penstock")


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

    Without arguments it joins the processes of `penstock launch`, SLURM, Open MPI, a TPU pod, or an indexed Job of Kubernetes. It
    detects them as `jax.distributed.initialize` does, and does nothing if it finds none. All processes meet before JAX joins
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
      ValueError: the arguments make no sense, are incomplete, or differ from an earlier call's arguments.

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
    """Join the processes of a run at a place that is known. Later calls of `distributed` return the result."""
    global _joined  # noqa: PLW0603 - a process joins once
    if backends_started():
        raise DistributedError(
            f"process {place.index} of {place.count} ({place.how}) cannot join the others any more, because a device was used "
            "before ps.distributed(): call ps.distributed() at the top of the script, right after its imports. Arrays, "
            "jax.devices(), jax.jit'ed calls and everything else that uses a device have to come later, also in modules that the "
            "script imports"
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
    _skip_shutdown_barrier_after_error()
    _joined = Processes(place.index, place.count, place.how, coordinator)
    return _joined


def _same(joined: Processes, coordinator: str | None, count: int | None, index: int | None) -> None:
    """Raise ValueError if a later call gives other arguments than the processes have joined by."""
    for name, value in (("coordinator", coordinator), ("count", count), ("index", index)):
        have = getattr(joined, name)
        if value is not None and have is not None and value != have:
            raise ValueError(f"{name}={value!r}: this process has joined with {name}={have!r} ({joined.how}), and can do so once")


def _skip_shutdown_barrier_after_error() -> None:
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


# The place of this process.
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
"""The variables that JAX needs all of. `srun` sets them; `salloc`, `sbatch` and a hook of ssh set some."""
_NAMES = {"slurm": "SLURM", "ompi": "Open MPI", "gcetpu": "TPU pod", "gketpu": "TPU pod", "tpu": "TPU pod", "": "Kubernetes"}


@dataclass(frozen=True)
class Place:
    """The place of this process in a run."""

    coordinator: str | None  # the address of process 0; None if this process is alone
    count: int
    index: int
    how: str  # the source, in words
    bind: str | None = None  # the address at which process 0 listens; None for JAX's default
    in_cluster: bool = False  # whether JAX may take the devices of this process from the cluster


def find_place(coordinator: str | None, count: int | None, index: int | None, timeout: float) -> Place:
    """Return the place of this process, for the arguments of `distributed`; see there for its errors."""
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS") or None
    given: dict[str, Any] = {"coordinator": coordinator, "count": count, "index": index}
    some = any(value is not None for value in given.values())
    if count == 1 or (not some and multiprocessing.parent_process() is not None):
        return Place(None, 1, 0, "count=1 was given" if count == 1 else "a worker process, which joins no others")
    known, how, in_cluster = _from_environment(timeout, complete=None not in given.values())
    if not some and not known:
        return Place(None, 1, 0, how)
    found: dict[str, Any] = {name: known.get(name) if value is None else value for name, value in given.items()}
    if found["count"] == 1:
        return Place(None, 1, 0, how)
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise ValueError(
            f"ps.distributed needs {' and '.join(f'{name}=' for name in missing)} too, as no cluster was found that says it "
            f"({how}): give coordinator='host:port' of process 0, the count of processes, and the index of this one"
        )
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or (known.get("bind") if coordinator is None else None)
    how = how if not some else "arguments" if None not in given.values() else f"arguments and {how}"
    return Place(found["coordinator"], int(found["count"]), int(found["index"]), how, bind, in_cluster)


def _from_environment(timeout: float, complete: bool) -> tuple[dict[str, Any], str, bool]:
    """Return the place that the environment gives, its source, and whether this is a cluster of JAX.

    A cluster is not asked for the place if the arguments are complete.
    """
    if _heartbeat.is_launched() and _heartbeat.COORDINATOR in os.environ:
        address, count, index = (os.environ[name] for name in (_heartbeat.COORDINATOR, _heartbeat.COUNT, _heartbeat.INDEX))
        place = {"coordinator": address, "count": int(count), "index": int(index), "bind": address}
        return place, "penstock launch", False
    for cluster in clusters():
        name = _NAMES.get(cluster.name, cluster.name)
        if name == "Kubernetes" and not _has_index_in_kubernetes():
            continue
        try:
            if not cluster.is_env_present():
                continue
            return ({} if complete else _from_cluster(cluster, timeout)), name, True
        except Exception as error:  # of the clients of HTTP and Kubernetes, too
            raise DistributedError(
                f"this process runs under {name}, and JAX could not find out its place there: {error}. Give coordinator=, "
                "count= and index= to ps.distributed, or count=1 to train alone"
            ) from error
    return {}, _why_alone(), False


def _from_cluster(cluster: Any, timeout: float) -> dict[str, Any]:
    count = cluster.get_process_count()
    if count == 1:
        return {"count": 1}
    port = os.environ.get("JAX_COORDINATOR_PORT")
    coordinator = cluster.get_coordinator_address(timeout_secs=max(1, int(timeout)), override_coordinator_port=port)
    return {"coordinator": coordinator, "count": count, "index": cluster.get_process_id()}


def _has_index_in_kubernetes() -> bool:
    """Return whether this is a pod of an indexed Job, the only kind that JAX can join. Raise if JAX lacks a package for it."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ or "JOB_COMPLETION_INDEX" not in os.environ:
        return False
    try:
        import kubernetes  # noqa: F401 - is it installed?
    except ImportError:
        raise DistributedError(
            "this is a pod of an indexed Job, and JAX finds the others by the package kubernetes, which is not installed: "
            'pip install "jax[k8s]", or call ps.distributed(count=1) to train alone'
        ) from None
    return True


def _why_alone() -> str:
    """Return why this process is alone, and warn if its SLURM job is meant to have several processes."""
    present = ", ".join(name for name in _SLURM if name in os.environ)
    if not present:
        in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
        pod = "a pod without JOB_COMPLETION_INDEX, which the pods of a Job with completionMode: Indexed have"
        return pod if in_pod else "no cluster was found"
    missing = ", ".join(name for name in _SLURM if name not in os.environ)
    tasks = os.environ.get("SLURM_NTASKS", "1")
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", os.environ.get("SLURM_NNODES", "1"))
    if (tasks, nodes) != ("1", "1"):
        warnings.warn(
            f"this process trains alone, on its own devices, although its SLURM job has {tasks} tasks on {nodes} nodes. It was "
            f"not started by srun: {present} set, as by salloc and sbatch, and {missing} missing, which srun sets. Start it with "
            "`srun python train.py`; ps.distributed(count=1) says that it is meant to be alone",
            RuntimeWarning,
            stacklevel=5,
        )
    return f"a SLURM job without srun: {present} set, {missing} not"


# The meeting before JAX joins the processes.
HELLO = b"penstock 1 "
_HTTP2 = b"PRI * HTTP/2"  # the first bytes of gRPC, which `jax.distributed.initialize` speaks
_LONGEST = 65_536  # bytes of a line
_PAUSE = 0.05  # seconds between two attempts to connect
_SILENCE = 15.0  # seconds after which a process logs for whom it waits


def meet(address: str, count: int, index: int, timeout: float, bind: str | None = None) -> None:
    """Return when all processes have come to the coordinator; raise DistributedError if not, or if they disagree.

    Process 0 listens at `bind`; None for the coordinator's port on all interfaces, as in JAX.
    """
    if index == 0:
        _Meeting(address, count, timeout).wait(*split_address(bind or f"[::]:{split_address(address)[1]}"))
    else:
        _attend(address, count, index, timeout)


class _Meeting:
    """The meeting at process 0. Arguments are as for `meet`."""

    def __init__(self, address: str, count: int, timeout: float):
        self._address, self._count, self._timeout, self._deadline = address, count, timeout, time.monotonic() + timeout
        self._selector = selectors.DefaultSelector()
        self._received: dict[socket.socket, bytes] = {}  # by processes that have not said who they are
        self._came: dict[int, tuple[socket.socket, str]] = {}  # from an index to its connection, and where it runs
        self._left: dict[int, str] = {}  # from the index of a process that came and went away to where it ran
        self._hint = ""

    def wait(self, host: str, port: int) -> None:
        """Wait until all have come, and let them go on; or raise DistributedError."""
        listening = self._listen(host, port)
        self._selector.register(listening, selectors.EVENT_READ)
        try:
            speak = time.monotonic() + _SILENCE
            while len(self._came) < self._count - 1:
                now = time.monotonic()
                if now >= self._deadline:
                    raise DistributedError(self._missing())
                if now >= speak:
                    speak = now + 2 * _SILENCE
                    _log.warning("penstock: process 0 waits at %s for process %s", self._address, ranges(self._absent()))
                for key, _ in self._selector.select(min(self._deadline, speak) - now):
                    if key.fileobj is listening:
                        with contextlib.suppress(OSError):  # it went away at once
                            self._accept(listening.accept()[0])
                    else:
                        self._read(key.fileobj)  # type: ignore[arg-type]  # all others are sockets
        except DistributedError as error:
            self._answer({"error": str(error)[:4000]})
            raise
        else:
            listening.close()  # before the answer: a process that knocks again must not find this socket
            self._answer({"go": True})
            self._wait_for_closed_connections()
        finally:
            listening.close()
            for connection in [*self._received, *(connection for connection, _ in self._came.values())]:
                connection.close()
            self._selector.close()

    def _listen(self, host: str, port: int) -> socket.socket:
        try:
            both = host == "::" and socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both or (":" in host and host != "::") else socket.AF_INET
            return socket.create_server(("" if host == "::" else host, port), family=family, backlog=1024, dualstack_ipv6=both)
        except OSError as error:
            raise DistributedError(
                f"process 0 of {self._count} cannot listen at port {port} of {host}, where the others look for it "
                f"(coordinator {self._address}): {error.strerror or error}. If the port is in use, another run or another "
                "process with index 0 has it: choose another in all processes (coordinator='host:port' or JAX_COORDINATOR_PORT)"
            ) from None

    def _accept(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._received[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        known = next((index for index, (each, _) in self._came.items() if each is connection), None)
        if known is not None:  # it sends nothing more, so it has closed the connection
            self._left[known] = self._came.pop(known)[1]
            self._drop(connection)
            return
        line = self._received[connection] = self._received[connection] + data
        if line.startswith(_HTTP2):
            self._hint = "; a process called jax.distributed.initialize() there, and all have to call ps.distributed() instead"
        if line.startswith(HELLO) and line.endswith(b"\n"):
            self._admit(connection, _parse(line))
        elif not data or len(line) > _LONGEST or not line.startswith(HELLO[: len(line)]):
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._received.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()

    def _admit(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        index, where = int(hello["index"]), f"process id {hello['pid']} on {hello['host']}"
        if hello["count"] != self._count:
            raise DistributedError(
                f"process {index} ({where}) was started as one of {hello['count']} processes, and process 0 as one of "
                f"{self._count}: start all with the same number"
            )
        if index in self._came:
            raise DistributedError(
                f"two processes have the index {index} of {self._count} ({self._came[index][1]}, and {where}): each needs its own"
            )
        del self._received[connection]
        self._left.pop(index, None)
        self._came[index] = (connection, where)

    def _absent(self) -> set[int]:
        return set(range(1, self._count)) - set(self._came)

    def _missing(self) -> str:
        absent = self._absent()
        left = "".join(f"; process {index} ({where}) came and ended" for index, where in sorted(self._left.items()))
        came = f"process {ranges(set(self._came))} came" if self._came else "no other process came"
        return (
            f"{len(absent)} of {self._count} processes did not come to the coordinator, process 0 on {socket.gethostname()} at "
            f"{self._address}, in {self._timeout:g} s: process {ranges(absent)} ({came}{left}{self._hint}). Look at their output "
            "for an error; see that they were started, call ps.distributed(), and can connect to this address"
        )

    def _answer(self, answer: dict[str, Any]) -> None:
        line = HELLO + json.dumps(answer).encode() + b"\n"
        admitted = [connection for connection, _ in self._came.values()]
        for connection in [*admitted, *(self._received if "error" in answer else ())]:
            with contextlib.suppress(OSError):  # that process has ended; JAX will notice
                connection.setblocking(True)
                connection.settimeout(5)
                connection.sendall(line)

    def _wait_for_closed_connections(self) -> None:
        """Wait until the others have closed their connections, so that none of them keeps the port of this process in use."""
        for connection, _ in self._came.values():
            with contextlib.suppress(OSError):
                connection.recv(1)


def _attend(address: str, count: int, index: int, timeout: float) -> None:
    """Connect to process 0, wait for its answer, and then for the service of JAX."""
    deadline = time.monotonic() + timeout
    hello = {"index": index, "count": count, "host": socket.gethostname(), "pid": os.getpid()}
    line = HELLO + json.dumps(hello).encode() + b"\n"
    me = f"process {index} of {count} on {socket.gethostname()}"
    why, speak, answer = "", time.monotonic() + _SILENCE, b""
    while not answer:
        now = time.monotonic()
        if now >= deadline:
            raise DistributedError(
                f"{me} could not reach the coordinator, process 0 at {address}, in {timeout:g} s: {why}. See that process 0 was "
                "started and is at this address, and that the port is open between the two; its output may have an error"
            )
        if now >= speak:
            speak = now + 2 * _SILENCE
            _log.warning("penstock: %s waits for process 0 at %s: %s", me, address, why or "it has not answered")
        try:
            with _connect(address, min(5.0, deadline - now)) as connection:
                connection.sendall(line)
                answer = _answer_of(connection, me, address, timeout, deadline)
                why = "it closed the connection without an answer"
        except socket.gaierror as error:
            why = f"the name is not known here ({error.strerror})"
        except ConnectionRefusedError:
            why = "no program listens there"
        except TimeoutError:
            why = "no answer, as where a firewall drops packets"
        except OSError as error:
            why = error.strerror or str(error)
        if not answer:
            time.sleep(_PAUSE)
    if not answer.startswith(HELLO):
        return  # a service of JAX, which was started without a meeting
    message = _parse(answer)
    if "error" in message:
        raise DistributedError(f"{me} was turned away by process 0: {message['error']}")
    _wait_for_service(address, me, timeout)


def _answer_of(connection: socket.socket, me: str, address: str, timeout: float, deadline: float) -> bytes:
    """Return the line that process 0 answers, or the first bytes of another protocol; b"" if it went away."""
    answer = b""
    while not answer.endswith(b"\n"):
        # Process 0 answers at its own deadline, which may be a little later, and its answer says more than this process knows.
        connection.settimeout(max(deadline - time.monotonic(), 0) + 2)
        try:
            data = connection.recv(4096)
        except TimeoutError:
            raise DistributedError(
                f"{me} reached the coordinator, process 0 at {address}, which still waits for others after {timeout:g} s: see "
                "its output"
            ) from None
        if not data:
            return b""
        answer += data
        if not answer.startswith(HELLO[: len(answer)]):
            break
    return answer


def _wait_for_service(address: str, me: str, timeout: float) -> None:
    """Wait until the service of JAX listens. JAX's client would pause a second first, and abort the process at its timeout."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            _connect(address, 5.0).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise DistributedError(
                    f"{me}: all processes had come to process 0 at {address}, and then its service did not start in "
                    f"{timeout:g} s ({error.strerror or error}): its output may have an error"
                ) from None
            time.sleep(_PAUSE)


def _connect(address: str, seconds: float) -> socket.socket:
    connection = socket.create_connection(split_address(address), timeout=seconds)
    if connection.getsockname() == connection.getpeername():
        # Linux connects a socket to itself if it happens to choose the port that it looks for.
        connection.close()
        raise ConnectionRefusedError
    return connection


def _parse(line: bytes) -> dict[str, Any]:
    return dict(json.loads(line[len(HELLO) :]))


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of an address such as "node1:1234" or "[::1]:1234"; ValueError if it has another form.

    >>> split_address("node1:1234")
    ('node1', 1234)
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise ValueError(
            f"coordinator={address!r}: needs the host and a free port of process 0, the same in all processes, as 'node1:1234'"
        )
    return host.strip("[]"), int(port)


def ranges(numbers: set[int]) -> str:
    """Return numbers as text, with adjacent ones put together.

    >>> ranges({1, 2, 3, 7})
    '1–3, 7'
    """
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("–".join(map(str, part)) for part in parts)
