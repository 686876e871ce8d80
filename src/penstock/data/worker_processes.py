"""Read batches in worker processes, for Python code that holds the interpreter lock.

Processes are spawned, never forked: a fork of a process that runs JAX's threads can deadlock. Each worker process belongs to one
thread of the parent, which sends it a step, waits, and copies the batch out of shared memory:

    parent thread                         worker process
    send step ──────────────────────────► read the batch, pickle it without the bytes of its arrays
    make the segment larger ◄──────────── "the arrays need n bytes"   (only when they no longer fit)
    send its name ──────────────────────► copy the arrays into it
    copy them out ◄────────────────────── the rest of the pickle, sizes, seconds spent

*Ownership of the segment.* The parent creates and removes it. The worker writes to it only between a request and its reply, and
the parent reads it only after the reply. The batch is the parent's copy, in memory of its own, so nothing is written to memory
that a device may still read.

*Blocking.* A parent thread waits for the reply of its worker, and a worker waits for the next step. `ProcessPool.kill` ends
the processes, and with them every wait of a parent thread. A worker whose parent is gone reads the end of the pipe and ends.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any, NamedTuple

import jax
import numpy as np

from penstock._clock import Clock
from penstock.data.tree import Batch
from penstock.errors import WorkerDiedError

ReadBatch = Callable[[int, Clock], Batch]  # from a step to its batch; adds the seconds of each part to the clock


@dataclass(frozen=True)
class Workers:
    """The parsed option `workers`."""

    kind: str  # "none", "thread" or "process"
    count: int  # of threads or processes that read batches

    @classmethod
    def parse(cls, workers: int | str | None) -> Workers:
        """Parse None, a number of threads, or "process:N"."""
        if workers is None or workers == 0:
            return cls("none", 1)
        if isinstance(workers, str):
            kind, _, count = workers.partition(":")
            if kind == "process" and count.isdecimal() and int(count) > 0:
                return cls("process", int(count))
        elif isinstance(workers, (int, np.integer)) and not isinstance(workers, bool) and workers > 0:
            return cls("thread", int(workers))
        raise ValueError(f'workers={workers!r}: give None, a number of threads, or "process:N" for N processes')


class ProcessPool:
    """Worker processes, each with a copy of a picklable function that reads a batch. They share the bytes of its arrays."""

    def __init__(self, read: ReadBatch, count: int):
        context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._shared, payload, sizes = _share(read)
        name = self._shared.name if self._shared else None
        try:
            for _ in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, payload, name, sizes), daemon=True)
                process.start()
                theirs.close()  # so that the end of the worker is read as an EOF here
                self._workers.append(_Worker(process, ours))
        except BaseException:
            self.kill()
            self.release()
            raise

    @property
    def readers(self) -> list[ReadBatch]:
        """Return a function for each process, which reads a batch there. Each must be called by one thread at a time."""
        return [worker.read for worker in self._workers]

    def kill(self) -> None:
        """End the processes now. A reader that waits for one raises WorkerDiedError."""
        for worker in self._workers:
            worker.process.kill()

    def release(self) -> None:
        """End the processes, and free all shared memory. Call it when no reader runs any more, or after `kill`."""
        self.kill()
        for worker in self._workers:
            worker.process.join()  # not close(): `kill` may be called at any time, also after this
            worker.connection.close()
            _free(worker.segment)
        _free(self._shared)


class _Worker:
    """One worker process, as the parent sees it."""

    def __init__(self, process: Any, connection: Connection):
        self.process, self.connection = process, connection
        self.segment: SharedMemory | None = None

    def read(self, step: int, clock: Clock) -> Batch:
        """Read a batch in the process, and copy it out of shared memory."""
        try:
            reply = self._ask(step)
        except (EOFError, OSError) as error:
            self.process.join(1)
            raise WorkerDiedError(
                f"the worker process for batch {step} ended with exit code {self.process.exitcode}. -9 is mostly the kernel "
                "short of memory, -7 a full /dev/shm or a memory-mapped file that was cut short; if its output above speaks of "
                "bootstrapping, put the script's entry under `if __name__ == '__main__':`, which spawned processes need"
            ) from error
        if isinstance(reply, _Failure):
            raise reply.error()
        clock.add(reply.seconds)
        copies = [np.frombuffer(view, np.uint8).copy() for view in _views(self.segment, reply.sizes)]
        return pickle.loads(reply.pickled, buffers=copies)  # from our own worker, not from disk

    def _ask(self, step: int) -> _Reply | _Failure:
        """Send a step and receive the reply, with a larger segment if the worker asks for it."""
        self.connection.send(step)
        reply = self.connection.recv()
        if isinstance(reply, int):  # the number of bytes that it needs
            old, self.segment = self.segment, None
            _free(old)
            try:
                self.segment = _segment(reply)
            except MemoryError:
                self.connection.send(None)  # tells the worker to give up this batch
                raise
            self.connection.send(self.segment.name)
            reply = self.connection.recv()
        return reply


class _Reply(NamedTuple):
    """A batch that was read."""

    pickled: bytes  # without the bytes of its arrays
    sizes: list[int]  # bytes of each array, which lie in the shared segment in this order
    seconds: dict[str, float]  # time of each part of the work


class _Failure(NamedTuple):
    """An error in a worker process."""

    pickled: bytes | None  # None if it cannot be pickled
    message: str  # its type and message, used if it cannot be unpickled
    traceback: str

    def error(self) -> BaseException:
        """Return the error, with the traceback of the worker as a note."""
        try:
            error = pickle.loads(self.pickled) if self.pickled else None  # from our own worker, not from disk
        except Exception:
            error = None
        if not isinstance(error, BaseException):
            error = RuntimeError(self.message)
        error.add_note("penstock: in a worker process, whose traceback was\n" + self.traceback)
        return error


def _share(read: ReadBatch) -> tuple[SharedMemory | None, bytes, list[int]]:
    """Pickle a function with the bytes of its arrays in one shared segment, so that N workers need one copy."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(read, protocol=5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    sizes = [buffer.nbytes for buffer in raw]
    if not any(sizes):
        return None, pickled, sizes
    segment = _segment(sum(map(_padded, sizes)))
    _write(segment, raw)
    return segment, pickled, sizes


def _segment(size: int) -> SharedMemory:
    """Create a segment and reserve its memory. Without that, a write beyond the size of /dev/shm would kill the process."""
    segment = None
    try:
        segment = SharedMemory(create=True, size=size)
        if hasattr(os, "posix_fallocate"):  # not on macOS, nor on Windows
            os.posix_fallocate(segment._fd, 0, size)  # type: ignore[attr-defined]  # no public name gives its descriptor
    except OSError as error:
        _free(segment)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        raise MemoryError(
            f"worker processes need {size:,} more bytes of shared memory than /dev/shm has left, or a limit of file sizes "
            "allows: make it larger (docker run --shm-size=8g; an emptyDir of medium Memory in Kubernetes), or use threads "
            "(workers=N)"
        ) from error
    return segment


def _write(segment: SharedMemory, raw: Sequence[memoryview]) -> None:
    for (at, size), buffer in zip(_offsets([buffer.nbytes for buffer in raw]), raw, strict=True):
        _bytes(segment)[at : at + size] = buffer


def _views(segment: SharedMemory | None, sizes: Sequence[int]) -> list[Any]:
    return [_bytes(segment)[at : at + size].toreadonly() if size else b"" for at, size in _offsets(sizes)]


def _offsets(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the (offset, size) in bytes of the arrays of these sizes in a segment."""
    at = 0
    for size in sizes:
        yield at, size
        at += _padded(size)


def _padded(size: int) -> int:
    return -(-size // 64) * 64  # so that each array begins at a cache line


def _bytes(segment: SharedMemory | None) -> memoryview:
    assert segment is not None
    assert segment.buf is not None  # it is open
    return segment.buf


def _free(segment: SharedMemory | None) -> None:
    if segment is not None:
        segment.close()
        segment.unlink()


def _serve(connection: Connection, payload: bytes, shared: str | None, sizes: list[int]) -> None:
    """Run a worker process: answer requests until the parent closes its end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    jax.config.update("jax_platforms", "cpu")  # a transform that uses JAX must not use the device of the parent
    segment: SharedMemory | None = None
    try:
        held = SharedMemory(shared) if shared else None
        read = _result_or_failure(lambda: pickle.loads(payload, buffers=_views(held, sizes)))
        while True:
            step = connection.recv()
            segment = _answer(connection, read, step, segment)
    except (EOFError, OSError):
        pass  # the parent has ended, or has closed the pipe
    sys.stdout.flush()


def _answer(connection: Connection, read: Any, step: int, segment: SharedMemory | None) -> SharedMemory | None:
    """Read a batch, reply, and return the segment to use for the next one."""
    buffers: list[pickle.PickleBuffer] = []
    clock = Clock()

    def work() -> tuple[bytes, list[memoryview]]:
        pickled = pickle.dumps(read(step, clock), protocol=5, buffer_callback=buffers.append)
        return pickled, [buffer.raw() for buffer in buffers]

    result = read if isinstance(read, _Failure) else _result_or_failure(work)
    if isinstance(result, _Failure):
        connection.send(result)
        return segment
    pickled, raw = result
    sizes = [buffer.nbytes for buffer in raw]
    needed = sum(map(_padded, sizes))
    if needed > (segment.size if segment else 0):
        connection.send(needed)
        if segment:
            segment.close()
        segment, name = None, connection.recv()
        if name is None:
            return None
        segment = SharedMemory(name)
    if segment:
        _write(segment, raw)
    connection.send(_Reply(pickled, sizes, dict(clock)))
    return segment


def _result_or_failure(work: Callable[[], Any]) -> Any:
    """Return the result of a function, or its error as a `_Failure`."""
    try:
        return work()
    except Exception as error:
        message, text = f"{type(error).__name__}: {error}", traceback.format_exc()
        try:
            return _Failure(pickle.dumps(error), message, text)
        except Exception:
            return _Failure(None, message, text)
