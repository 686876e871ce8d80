"""Read host batches ahead of the training step, place them on the devices, and save and restore the position.

A `PrefetchPipeline` has the threads and buffers, `adapters` reads the batches, and `placement` puts them on the devices.
"""

from __future__ import annotations

import itertools
import math
import operator
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, get_args

import jax
import numpy as np

from penstock import _heartbeat
from penstock._arguments import at_least
from penstock._clock import Clock
from penstock._memory import keep_freed_memory
from penstock._pipeline import Exhausted, GetTimeout, PipelineClosed, PrefetchPipeline
from penstock.data.steps import Steps
from penstock.data.tree import Batch
from penstock.feed.adapters import BatchAdapter, NoPosition, adapt, given_to, has_choice_of_shapes
from penstock.feed.placement import BatchPlacement, Placed, Placement, Replicated, To
from penstock.feed.replicas import ReplicaCheck
from penstock.feed.starvation import Meter, note_waiting
from penstock.feed.stats import Caller, LaterStats, Stats, caller_of

STATE_VERSION = 1


def feed(
    batches: Any,
    to: To = None,
    *,
    host_buffer: int = 4,
    device_buffer: int = 2,
    transform: Callable[[Batch], Batch] | None = None,
    timeout: float | None = None,
    strict: bool = False,
    replicated: Replicated = "refuse",
) -> Feed:
    """Feed the devices: read batches and put them on the devices in the background, while the training step runs.

    Args:
      batches: a `Loader`; `Steps`; a Grain dataset, data loader or iterator; a torch `DataLoader`; a `tf.data.Dataset`; or any
        other iterable of batches (pytrees of arrays [B, ...]). With several processes, a Loader reads the rows that the devices
        of this process need under `to`. Any other iterable brings them: the rows of this process.
      to: where a batch goes: None (JAX's default device), a `jax.Device`, a `Sharding`, a pytree of these that is a prefix of the
        batch, or a `Plan` (the sharding that its step has for the batch; the mask of a Loader with remainder="pad" is sharded as
        the rows, if the step does not take it).
      host_buffer: host batches that may be in work or waiting. A Loader gets at least one for each worker.
      device_buffer: device batches that may be in work or waiting.
      transform: a function from batch to batch, which is jitted and runs on the device. Cast and scale here, so that small dtypes
        are transferred.
      timeout: seconds that one `next()` may wait; None for no limit.
      strict: whether to raise ValueError, instead of warning once, for a batch with other shapes, dtypes or structure than the
        batch before.
      replicated: what happens if `to` replicates rows over several processes, and `batches` is not a Loader. "refuse" raises
        ValueError, as nothing makes sure that they bring the same rows. "check" compares a hash of each leaf over the
        processes that hold the same rows of it. This takes about 1.5 ms, and 2 ms for each MB of these rows.

    Returns:
      A `Feed`, which is an iterator and a context manager. A `with` guarantees that its threads end.

    Raises:
      TypeError, ValueError: at once, if `batches` cannot be fed, its batch size does not divide over `to`, or `to` replicates
        its rows over processes.

    Examples:
      >>> loader = ps.Loader({"x": np.arange(8, dtype=np.uint8)}, batch_size=4, epochs=1)
      >>> with ps.feed(loader, transform=lambda b: {"x": b["x"] / 255}) as batches:
      ...     [batch["x"].shape for batch in batches]
      [(4,), (4,)]
    """
    if transform is not None and not callable(transform):
        raise TypeError(f"transform={transform!r} is not a function from a batch to a batch")
    if replicated not in get_args(Replicated):
        raise ValueError(f"replicated={replicated!r}: choose from {', '.join(get_args(Replicated))}")
    return Feed(
        adapt(batches),
        Placement(to, transform, replicated),
        host_buffer=at_least(1, "host_buffer", host_buffer),
        device_buffer=at_least(1, "device_buffer", device_buffer),
        timeout=_seconds(timeout),
        strict=strict,
        caller=caller_of(batches, transform=transform is not None),
    )


class _Item:
    """A device batch, the position of the source after it, and the seconds that placing it took."""

    __slots__ = ("__weakref__", "placed", "position", "seconds")

    def __init__(self, placed: Placed, position: Any, seconds: float):
        self.placed, self.position, self.seconds = placed, position, seconds


class Feed(Iterator[Batch]):
    """An iterator of device batches, returned by `feed`. Several threads may share it: each batch goes to one of them.

    Its threads start with the first `next()`. They end with the batches, at an error, at the end of the `with`, and by `close()`.
    They also end when the feed is garbage-collected, and at interpreter exit.

    Args:
      adapter: makes the host batches.
      placement: puts them on the devices.
      host_buffer, device_buffer, timeout, strict: see `feed`.
      first: number of the first batch, for errors and for `state()`.
      caller: who makes the batches, and what the verdict can advise.

    Examples:
      >>> feed = ps.feed([np.arange(3), np.arange(3)])
      >>> int(next(feed).sum()), feed.state()["step"]
      (3, 1)
      >>> feed.close()
    """

    def __init__(
        self,
        adapter: BatchAdapter,
        placement: BatchPlacement,
        *,
        host_buffer: int,
        device_buffer: int,
        timeout: float | None,
        strict: bool,
        first: int = 0,
        caller: Caller | None = None,
    ):
        placement.check_rows(adapter.batch_sizes)
        self._replica_check: ReplicaCheck | None = None
        if shardings := placement.shardings_over_processes():
            self._replica_check = placement.expect(adapter.read_for(shardings), adapter.name)
        if self._replica_check:
            self._replica_check.first = first
            weakref.finalize(self, self._replica_check.end, "it was dropped").atexit = False
        self._adapter, self._placement = adapter, placement
        self._host_buffer, self._device_buffer = host_buffer, device_buffer
        self._timeout, self._strict = timeout, strict
        self._fingerprint = adapter.fingerprint()
        # Held by the thread inside of `next()`. So the threads that share a feed are one consumer for the pipeline and the meter:
        # one of them starts it, each batch is taken once, and the end is seen first by one thread, which sets `_ended` before the
        # others go on. `close`, `interrupt` and `state` take no lock, as a `next()` may wait for ever. It is re-entrant for a
        # signal handler that calls `next()` during one.
        self._consuming = threading.RLock()
        self._pipeline: PrefetchPipeline[_Item] | None = None
        self._ended = self._closed = False
        self._warned = has_choice_of_shapes(adapter)  # a caller who asked for several shapes needs no warning
        # The position of the consumer: it counts the batches that were handed over, and not those that wait in a buffer.
        self._at: tuple[int, Any] = (first, None)  # the number of the next batch, and the position; one value for other threads
        self._bytes = 0
        self._meter, self._caller = Meter(), caller or Caller()
        self._host_clocks = [Clock() for _ in range(adapter.workers)]
        self._place_clock = Clock()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._close("it was closed" if error is None else f"it was closed by {_summary(error)}")

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Batch:
        """Return the next device batch, and wait for it if necessary.

        Raises:
          StopIteration: there are no more batches, or another thread got the error that ended them.
          TimeoutError: the batch did not come within `timeout` seconds. `next()` may be called again.
          RuntimeError: the feed is closed.
          BaseException: the error of the source, the placement or the transform, once, after all batches before it.
        """
        if self._timeout is None:
            with self._consuming:
                return self._take(None)
        begin = time.monotonic()
        if not self._consuming.acquire(timeout=self._timeout):
            raise self._late()
        try:
            return self._take(max(0.0, self._timeout - (time.monotonic() - begin)))
        finally:
            self._consuming.release()

    def _take(self, timeout: float | None) -> Batch:
        """Take the next batch from the pipeline, on the one thread that holds `_consuming`."""
        pipeline = self._pipeline
        if pipeline is None or self._ended:
            pipeline = self._start()
        try:
            with jax.profiler.TraceAnnotation("penstock.wait"):
                item = self._meter.take(pipeline.get, timeout)
            placed = item.placed
            if placed.change:
                self._report(placed.change)
        except GetTimeout:
            raise self._late() from None
        except Exhausted:
            self._end("it was exhausted")
            raise StopIteration from None
        except PipelineClosed:
            raise RuntimeError(f"the feed was closed while batch {self._step} was awaited") from None
        except BaseException as error:  # of the source or the placement, or Ctrl-C on this thread
            self._end(f"it failed with {_summary(error)}")
            raise
        self._at = (self._step + 1, item.position)
        self._bytes += placed.bytes
        self._meter.hand_over(placed.batch, item.seconds)
        _heartbeat.batch()
        return placed.batch

    @property
    def _step(self) -> int:
        return self._at[0]

    def _late(self) -> TimeoutError:
        return TimeoutError(
            f"batch {self._step} did not come within timeout={self._timeout} s: {self._adapter.name} is still making "
            "it; next() may be called again to wait on"
        )

    def close(self) -> None:
        """End the threads and drop the buffered batches. It returns within a second, and may be called again.

        A thread inside a read that cannot be interrupted ends when the read returns.
        """
        self._close("it was closed")

    def state(self) -> dict[str, Any]:
        """Return the position of the consumer, as a small dict for JSON.

        Batches that wait in a buffer are not counted: a feed that is restored to this state reads them again.

        Returns:
          The version of the format, the number of the next step, a fingerprint of the source ("of"), and the position of an
          iterator that has one.

        Raises:
          TypeError: the iterable has no state, so no feed could continue here.
        """
        step, position = self._at
        if isinstance(position, NoPosition):
            raise TypeError(position.reason)
        state = {"version": STATE_VERSION, "step": step, "of": self._fingerprint}
        return state if position is None else {**state, "position": position}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved state. To be called before the first `next()`.

        Args:
          state: the result of `state()`, of a feed with the same source.

        Raises:
          ValueError: the state belongs to another source; the message lists the differences.
          TypeError: the iterable cannot be moved to a position.
          RuntimeError: the feed has started.

        Examples:
          >>> loader = ps.Loader({"x": np.arange(8)}, batch_size=2)
          >>> with ps.feed(loader) as feed:
          ...     _ = next(feed)
          ...     state = feed.state()
          >>> with ps.feed(loader) as feed:
          ...     feed.restore(state)
          ...     next(feed)["x"].tolist()
          [2, 3]
        """
        if self._pipeline or self._ended:
            raise RuntimeError("restore() comes before the first batch: make a new feed and restore that")
        check_state(state, self._fingerprint)
        self._adapter.restore(state["step"], state.get("position"))
        self._at = state["step"], state.get("position")
        if self._replica_check:
            self._replica_check.first = self._step

    def stats(self) -> Stats:
        """Return where the time was spent so far. Print it for a summary with a verdict.

        After the end of the feed, it waits until the devices have finished the steps that were given to them.
        """
        return later_stats(self)()

    def _start(self) -> PrefetchPipeline[_Item]:
        """Start the threads, or raise if the feed has ended."""
        if self._closed:
            raise RuntimeError("the feed is closed: make a new one, and restore() the state() of this one to go on")
        if self._ended:
            raise StopIteration
        keep_freed_memory()
        self._pipeline = PrefetchPipeline(
            self._adapter.producers(self._host_clocks),
            max(self._host_buffer, self._adapter.workers),
            finish=_placing(self._adapter, self._placement, self._place_clock, self._step),
            done_capacity=self._device_buffer,
            context=self._placement.context,
            # With a timeout, the consumer's thread must not do work that it cannot leave.
            consumer_context=self._placement.consumer_context if self._timeout is None else lambda: None,
        )
        # The pipeline has no reference to the Feed, so a Feed without references can be collected. At interpreter exit,
        # `_threads` closes the pipeline and waits for its threads.
        weakref.finalize(self, self._pipeline.close, wait=False).atexit = False
        self._close_if_late()
        return self._pipeline

    def _close_if_late(self) -> None:
        """Close the pipeline if another thread closed the feed before it could see it."""
        if self._closed:
            self._end("it was closed")

    def _close(self, why: str) -> None:
        self._closed = True
        self._end(why)

    def _end(self, why: str) -> None:
        self._ended = True
        self._meter.end()
        if self._replica_check:
            self._replica_check.end(why)
        if self._pipeline:
            self._pipeline.close()

    def _report(self, change: str) -> None:
        """Warn of a change of shapes once, or raise ValueError if `strict`."""
        if self._warned and not self._strict:
            return
        message = f"batch {self._step}: {change}; every jitted function that takes it compiles again"
        if self._strict:
            raise ValueError(f"{message}, which strict=True refuses")
        self._warned = True
        warnings.warn(
            f"{message}. Make the batches alike (remainder='drop' or 'pad', ps.pad_to), or refuse others with strict=True. "
            "Later changes are not reported",
            stacklevel=4,
        )


def later_stats(feed: Feed) -> LaterStats:
    """Return the statistics of a feed as a function, which does not wait until it is called and has no reference to the feed."""
    host = Clock()
    for clock in feed._host_clocks:
        host.add(dict(clock))
    place = feed._place_clock.get("place", 0.0)
    return LaterStats(feed._meter, dict(host), feed._adapter.workers, place, feed._bytes, feed._caller)


def interrupt(feed: Feed) -> None:
    """Make a `next()` of a feed that waits in another thread, and every later one, raise RuntimeError. Its `state()` stays."""
    if feed._pipeline:
        feed._pipeline.close(wait=False)


def has_begun(feed: Feed) -> bool:
    """Return whether a batch was asked for, after which a feed cannot be moved to another position."""
    return feed._pipeline is not None or feed._ended


def has_no_end(batches: Any) -> bool:
    """Return whether batches are declared to be endless: `Steps` without a length, or `epochs=None`."""
    given = given_to(batches._adapter) if isinstance(batches, Feed) else batches
    return given.length is None if isinstance(given, Steps) else getattr(given, "epochs", 1) is None


def repeatable(feed: Feed) -> Any:
    """Return the batches that `reopened` can read again from the start; None if there are none, as for an iterator.

    To be called before the end of the feed, which drops them.
    """
    adapter = feed._adapter
    given = given_to(adapter) if isinstance(feed._placement, Placement) else None
    return None if isinstance(given, Iterator) else given


def reopened(feed: Feed, batches: Any = None) -> Feed:
    """Return a new feed to the same place, with the same transform.

    Args:
      batches: the batches to feed; None for the batches of `feed` from the start.

    Raises:
      TypeError, ValueError: `batches` cannot be fed, or cannot be read a second time.
    """
    placement, adapter = feed._placement, feed._adapter
    if not isinstance(placement, Placement):
        raise TypeError("only a feed made by ps.feed can be opened again")
    return Feed(
        adapt(given_to(adapter) if batches is None else batches),
        placement.renewed(),
        host_buffer=feed._host_buffer,
        device_buffer=feed._device_buffer,
        timeout=feed._timeout,
        strict=feed._strict,
        caller=feed._caller,
    )


def _placing(adapter: BatchAdapter, placement: BatchPlacement, clock: Clock, first: int) -> Callable[[int, Any], _Item]:
    """Return the function `finish` of the pipeline. It has no reference to the Feed."""

    def finish(number: int, item: Any) -> _Item:
        try:
            batch, position = adapter.split(item)
            before = clock.get("place", 0.0)
            with clock.time("place"):
                placed = placement(batch)
            item = _Item(placed, position, clock["place"] - before)
            note_waiting(item)
            return item
        except Exception as error:
            error.add_note(f"penstock: while placing batch {first + number}")
            raise

    return finish


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _seconds(timeout: Any) -> float | None:
    """Check a timeout, and return its seconds; None for no limit."""
    if timeout is None or timeout == math.inf:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, np.number)) or not timeout > 0:
        raise ValueError(f"timeout={timeout!r}: needs seconds > 0, or None to wait for ever")
    return min(float(timeout), threading.TIMEOUT_MAX)


# The saved state.

# Characters: a longer value is shortened to its difference from another value, with so much equal text around it.
_LONG, _AROUND = 100, 30


def check_state(state: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> None:
    """Raise ValueError if a state is not one of a feed, or does not belong to this source."""
    if not _is_state(state):
        raise ValueError(f"not a state of a feed (version {STATE_VERSION}): {str(state)[:200]}")
    saved = state["of"]
    differing = [name for name in {**saved, **fingerprint} if saved.get(name) != fingerprint.get(name)]
    if differing:
        listed = "; ".join(_difference(name, saved.get(name), fingerprint.get(name)) for name in differing)
        raise ValueError(f"the state belongs to something else: {listed}. Step {state['step']} would hold other records")


def _is_state(state: Any) -> bool:
    if not isinstance(state, Mapping) or state.get("version") != STATE_VERSION or not isinstance(state.get("of"), Mapping):
        return False
    step = state.get("step")
    return isinstance(step, int) and not isinstance(step, bool) and step >= 0


def _difference(name: str, was: Any, now: Any) -> str:
    """Describe two values that differ. Long ones are cut to where they differ."""
    one, other = repr(was), repr(now)
    if max(len(one), len(other)) > _LONG:
        same = _common(one, other)
        same_end = _common(one[same:][::-1], other[same:][::-1])
        one, other = _cut(one, same, same_end), _cut(other, same, same_end)
    return f"{name} was {one} and is {other}"


def _common(one: str, other: str) -> int:
    """Count the characters at the beginning of two texts that are the same."""
    return sum(1 for _ in itertools.takewhile(bool, map(operator.eq, one, other)))


def _cut(text: str, same: int, same_end: int) -> str:
    """Keep the beginning of a text, the part between its first `same` and last `same_end` characters, and words around that."""
    begin, end = same - _AROUND, max(len(text) - same_end, same) + _AROUND
    begin = 0 if begin < _AROUND else text.rfind(" ", _AROUND, begin) + 1 or begin
    end = len(text) if end > len(text) else text.find(" ", end)
    middle = text[begin:] if end < 0 else text[begin:end]
    if len(middle) > 2 * _LONG:
        middle = f"{middle[:_LONG]} … {middle[-_AROUND:]}"
    return f"{text[:_AROUND]} … " * (begin > 0) + middle + " …" * (0 <= end < len(text))
