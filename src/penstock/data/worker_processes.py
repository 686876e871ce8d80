"""Worker processes that load batches, for Python code that holds the interpreter lock.

A process is spawned, never forked: forking a process that runs JAX's threads can deadlock. Each belongs to one
thread of the parent, which sends it a step, waits, and copies the batch out of shared memory:

    parent thread                         worker process
    send step ──────────────────────────► load it, pickle it without its arrays' bytes
    make the segment larger ◄──────────── "the arrays need n bytes"   (only when they no longer fit)
    send its name ──────────────────────► copy the arrays into it
    copy them out ◄────────────────────── the rest of the pickle, sizes, seconds spent

Who owns the segment: the parent, which makes and removes it; the worker writes to it only between a request
and its reply, the parent reads it only after the reply. The parent's copy is a batch's own memory, so nothing is
written to while a device may still read it.
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

BatchReader = Callable[[int, Clock], Batch]  # from a step to its batch; the time it took goes to the clock


class WorkerDiedError(RuntimeError):
    """A worker process ended by itself: killed for memory, crashed, or never came up."""


@dataclass(frozen=True)
class Workers:
    """What `workers=` asks for: `kind` is "none", "thread" or "process"."""

    kind: str
    count: int

    @classmethod
    def parse(cls, workers: int | str | None) -> Workers:
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
    """N processes that hold a copy of `load`; `loads` are the functions that drive them, one for each thread."""

    def __init__(self, load: BatchReader, count: int):
        context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._shared, payload, sizes = _share(load)
        name = self._shared.name if self._shared else None
        try:
            for _ in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, payload, name, sizes), daemon=True)
                process.start()
                theirs.close()  # so that the worker's death is an EOF here
                self._workers.append(_Worker(process, ours))
        except BaseException:
            self.kill()
            self.release()
            raise

    @property
    def loads(self) -> list[BatchReader]:
        return [worker.load for worker in self._workers]

    def kill(self) -> None:
        """End the processes now; a `load` that waits for one returns with an error."""
        for worker in self._workers:
            worker.process.kill()

    def release(self) -> None:
        """Free everything; after `kill`, or when the processes have no more to do."""
        self.kill()
        for worker in self._workers:
            worker.process.join()  # and not close(): `kill` may come at any time, and again
            worker.connection.close()
            _free(worker.segment)
        _free(self._shared)


class _Worker:
    """The parent's end of one process."""

    def __init__(self, process: Any, connection: Connection):
        self.process, self.connection = process, connection
        self.segment: SharedMemory | None = None

    def load(self, step: int, clock: Clock) -> Batch:
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
        return pickle.loads(reply.pickled, buffers=self._copies(reply.sizes))  # from our own worker, not from disk

    def _ask(self, step: int) -> _Loaded | _Failure:
        self.connection.send(step)
        reply = self.connection.recv()
        if isinstance(reply, int):  # the bytes it needs
            old, self.segment = self.segment, None
            _free(old)
            try:
                self.segment = _segment(reply)
            except MemoryError:
                self.connection.send(None)  # the worker gives this batch up
                raise
            self.connection.send(self.segment.name)
            reply = self.connection.recv()
        return reply

    def _copies(self, sizes: Sequence[int]) -> list[np.ndarray]:
        return [
            np.frombuffer(_bytes(self.segment), np.uint8, size, at).copy() if size else np.empty(0, np.uint8)
            for at, size in _places(sizes)
        ]


class _Loaded(NamedTuple):
    pickled: bytes
    sizes: list[int]
    seconds: dict[str, float]


class _Failure(NamedTuple):
    pickled: bytes | None
    words: str  # type and message, for where it does not unpickle
    text: str

    def error(self) -> BaseException:
        try:
            error = pickle.loads(self.pickled) if self.pickled else None  # from our own worker, not from disk
        except Exception:
            error = None
        if not isinstance(error, BaseException):
            error = RuntimeError(self.words)
        error.add_note("penstock: in a worker process, whose traceback was\n" + self.text)
        return error


def _share(load: BatchReader) -> tuple[SharedMemory | None, bytes, list[int]]:
    """Pickle `load` with the bytes of its arrays in one shared segment, so that N workers need one copy."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(load, protocol=5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    sizes = [buffer.nbytes for buffer in raw]
    if not any(sizes):
        return None, pickled, sizes
    segment = _segment(sum(map(_padded, sizes)))
    _write(segment, raw)
    return segment, pickled, sizes


def _segment(size: int) -> SharedMemory:
    """A new segment whose memory is there: a write to one that does not fit into /dev/shm would kill the process."""
    segment = None
    try:
        segment = SharedMemory(create=True, size=size)
        if hasattr(os, "posix_fallocate"):  # not on macOS, nor on Windows
            os.posix_fallocate(segment._fd, 0, size)  # type: ignore[attr-defined]  # its file, which no public name gives
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
    for (at, size), buffer in zip(_places([buffer.nbytes for buffer in raw]), raw, strict=True):
        _bytes(segment)[at : at + size] = buffer


def _views(segment: SharedMemory | None, sizes: Sequence[int]) -> list[Any]:
    return [_bytes(segment)[at : at + size].toreadonly() if size else b"" for at, size in _places(sizes)]


def _places(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where in a segment the arrays of these sizes lie: (offset, size) in bytes."""
    at = 0
    for size in sizes:
        yield at, size
        at += _padded(size)


def _bytes(segment: SharedMemory | None) -> memoryview:
    assert segment is not None
    assert segment.buf is not None  # it is open
    return segment.buf


def _padded(size: int) -> int:
    return -(-size // 64) * 64  # keeps every array on its own cache line


def _free(segment: SharedMemory | None) -> None:
    if segment is not None:
        segment.close()
        segment.unlink()


def _serve(connection: Connection, payload: bytes, shared: str | None, sizes: list[int]) -> None:
    """A worker's life: until the parent closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    jax.config.update("jax_platforms", "cpu")  # a transform that uses JAX must not take the parent's device
    segment: SharedMemory | None = None
    try:
        held = SharedMemory(shared) if shared else None
        load = _loaded_or_failure(lambda: pickle.loads(payload, buffers=_views(held, sizes)))
        while True:
            step = connection.recv()
            segment = _answer(connection, load, step, segment)
    except (EOFError, OSError):
        pass  # the parent is gone, or has no use for us any more
    sys.stdout.flush()


def _answer(connection: Connection, load: Any, step: int, segment: SharedMemory | None) -> SharedMemory | None:
    buffers: list[pickle.PickleBuffer] = []
    clock = Clock()

    def work() -> tuple[bytes, list[memoryview]]:
        pickled = pickle.dumps(load(step, clock), protocol=5, buffer_callback=buffers.append)
        return pickled, [buffer.raw() for buffer in buffers]

    result = load if isinstance(load, _Failure) else _loaded_or_failure(work)
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
    connection.send(_Loaded(pickled, sizes, dict(clock)))
    return segment


def _loaded_or_failure(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:
        words, text = f"{type(error).__name__}: {error}", traceback.format_exc()
        try:
            return _Failure(pickle.dumps(error), words, text)
        except Exception:
            return _Failure(None, words, text)
