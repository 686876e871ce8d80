"""Let the processes of a run meet before JAX joins them, so that one which does not come is an error that names it.

Where a process is missing, `jax.distributed.initialize` waits without a word and then aborts the process from C++, in JAX 0.10
to 0.12. No Python code can catch that. So the processes meet first, at the address that JAX will use:

- Process 0 listens there. Each other process connects, and sends a line with its index, the number of processes that it knows
  of, its host and its process id. Then it waits for an answer.
- When all have come, process 0 stops listening and answers "go". If they disagree, or some do not come in time, it answers with
  the error that it raises itself. So all processes say the same, and exit.
- After "go", JAX's service takes the port of process 0. The others knock until it is there, and then join it.

Process 0 runs one loop over its sockets, with one deadline; nobody else changes its tables. Every other process has one socket,
and each of its waits ends at its own deadline. So no process waits longer than its timeout, whatever happens to the others.

A process whose coordinator is a service of JAX already (it was started by other code) gets no answer of this form, and leaves
the rest to JAX.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import socket
import time
from typing import Any

from penstock.train.detection import DistributedError

HELLO = b"penstock 1 "
_HTTP2 = b"PRI * HTTP/2"  # the first bytes of gRPC, which `jax.distributed.initialize` speaks
_LONGEST = 65_536  # bytes of a line
_PAUSE = 0.05  # seconds between two attempts to connect
_SILENCE = 15.0  # seconds after which a process says for whom it waits

_log = logging.getLogger("penstock")


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of an address.

    Args:
      address: as "node1:1234" or "[::1]:1234".

    Raises:
      ValueError: it is not of this form.

    >>> split_address("node1:1234")
    ('node1', 1234)
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise ValueError(
            f"coordinator={address!r}: needs the host and a free port of process 0, the same in all processes, as 'node1:1234'"
        )
    return host.strip("[]"), int(port)


def meet(address: str, count: int, index: int, timeout: float, bind: str | None = None) -> None:
    """Return when all processes have come to the coordinator.

    Args:
      address: of the coordinator, which is process 0.
      count: number of processes.
      index: of this process.
      timeout: seconds to wait for the others.
      bind: the address at which process 0 listens; None for the coordinator's port on all interfaces, as in JAX.

    Raises:
      DistributedError: the coordinator cannot be reached, a process did not come, or the processes disagree.
    """
    deadline = time.monotonic() + timeout
    if index == 0:
        _Host(address, count, timeout, deadline).wait(*split_address(bind or f"[::]:{split_address(address)[1]}"))
    else:
        _join(address, count, index, timeout, deadline)


class _Host:
    """Process 0, for which the others look.

    Args:
      address, count, timeout: see `meet`.
      deadline: the end of the timeout on `time.monotonic`.
    """

    def __init__(self, address: str, count: int, timeout: float, deadline: float):
        self._address, self._count, self._timeout, self._deadline = address, count, timeout, deadline
        self._selector = selectors.DefaultSelector()
        self._received: dict[socket.socket, bytes] = {}  # by processes that have not said who they are
        self._came: dict[int, tuple[socket.socket, str]] = {}  # from an index to its connection, and where it runs
        self._left: dict[int, str] = {}  # those that came and went away
        self._stranger = ""

    def wait(self, host: str, port: int) -> None:
        """Wait until all have come, and let them go on.

        Raises:
          DistributedError: they did not.
        """
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
                    _log.warning("penstock: process 0 waits at %s for process %s", self._address, self._absent())
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
            self._see_off()
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
        if known is not None:  # it has nothing more to say, so it has closed the connection
            self._left[known] = self._came.pop(known)[1]
            self._drop(connection)
            return
        line = self._received[connection] = self._received[connection] + data
        if line.startswith(_HTTP2):
            self._stranger = (
                "; a process called jax.distributed.initialize() there, and all have to call ps.distributed() instead"
            )
        if line.startswith(HELLO) and line.endswith(b"\n"):
            self._greet(connection, _parse(line))
        elif not data or len(line) > _LONGEST or not line.startswith(HELLO[: len(line)]):
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._received.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()

    def _greet(self, connection: socket.socket, hello: dict[str, Any]) -> None:
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

    def _absent(self) -> str:
        return ranges(set(range(1, self._count)) - set(self._came))

    def _missing(self) -> str:
        absent = set(range(1, self._count)) - set(self._came)
        left = "".join(f"; process {index} ({where}) came and ended" for index, where in sorted(self._left.items()))
        came = f"process {ranges(set(self._came))} came" if self._came else "no other process came"
        return (
            f"{len(absent)} of {self._count} processes did not come to the coordinator, process 0 on {socket.gethostname()} at "
            f"{self._address}, in {self._timeout:g} s: process {ranges(absent)} ({came}{left}{self._stranger}). Look at their "
            "output for an error; see that they were started, call ps.distributed(), and can connect to this address"
        )

    def _answer(self, answer: dict[str, Any]) -> None:
        line = HELLO + json.dumps(answer).encode() + b"\n"
        greeted = [connection for connection, _ in self._came.values()]
        for connection in [*greeted, *(self._received if "error" in answer else ())]:
            with contextlib.suppress(OSError):  # that process has ended; JAX will notice
                connection.setblocking(True)
                connection.settimeout(5)
                connection.sendall(line)

    def _see_off(self) -> None:
        """Wait until the others have closed their connections, so that none of them keeps the port of this process in use."""
        for connection, _ in self._came.values():
            with contextlib.suppress(OSError):
                connection.recv(1)


def _join(address: str, count: int, index: int, timeout: float, deadline: float) -> None:
    """Go to process 0, wait for its answer, and then for the service of JAX."""
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
    _knock(address, me, timeout, time.monotonic() + timeout)


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


def _knock(address: str, me: str, timeout: float, deadline: float) -> None:
    """Wait until the service of JAX listens. JAX's client would pause a second first, and abort the process at its timeout."""
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
