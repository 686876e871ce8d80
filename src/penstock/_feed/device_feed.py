"""feed(): any iterable of host batches as an iterator of device batches, made ahead of time."""

from __future__ import annotations

import math
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np

from penstock._arguments import at_least
from penstock._clock import Clock
from penstock._feed.adapters import BatchAdapter, adapt
from penstock._feed.placement import Placed, Placement, Places, To
from penstock._feed.stats import Stats
from penstock._pipeline import PrefetchPipeline
from penstock._producers import Exhausted, GetTimeout, PipelineClosed
from penstock.data.tree import Batch

_STATE_VERSION = 1


def feed(
    batches: Any,
    to: To = None,
    *,
    host_buffer: int = 4,
    device_buffer: int = 2,
    transform: Callable[[Batch], Batch] | None = None,
    timeout: float | None = None,
    strict: bool = False,
) -> Feed:
    """Feed the devices: batches are made and placed in the background while the consumer's step runs.

    Args:
      batches: a `Loader`; a Grain dataset, data loader or iterator; a torch `DataLoader`; a `tf.data.Dataset`; or any other
        iterable of batches (pytrees of arrays [B, ...]). In several processes, each process's own rows.
      to: where a batch goes: None (JAX's default device), a `jax.Device`, a `Sharding`, a pytree of these that is a
        prefix of the batch, or a `Plan` (where its step has the batch).
      host_buffer: host batches that may be in work or waiting (at least one for each worker of a Loader).
      device_buffer: placed batches that may be in work or waiting.
      transform: from batch to batch, jitted and run on the device: casts and scaling belong here, so
        that small dtypes cross the bus.
      timeout: seconds that one `next()` may wait, None for ever.
      strict: raise ValueError for a batch whose shapes, dtypes or structure differ from those of the one before,
        instead of warning once.

    Returns:
      A `Feed`: an iterator and a context manager. Use it in a `with`, which ends its threads for certain.

    Raises:
      TypeError, ValueError: at once, if `batches` cannot be fed, or not over `to`.

    Example:
      >>> loader = ps.Loader({"x": np.arange(8, dtype=np.uint8)}, batch_size=4, epochs=1)
      >>> with ps.feed(loader, transform=lambda b: {"x": b["x"] / 255}) as batches:
      ...     [batch["x"].shape for batch in batches]
      [(4,), (4,)]
    """
    if transform is not None and not callable(transform):
        raise TypeError(f"transform={transform!r} is no function from a batch to a batch")
    return Feed(
        adapt(batches),
        Placement(to, transform),
        host_buffer=at_least(1, "host_buffer", host_buffer),
        device_buffer=at_least(1, "device_buffer", device_buffer),
        timeout=_seconds(timeout),
        strict=strict,
    )


class _Item(NamedTuple):
    placed: Placed
    position: Any


class Feed(Iterator[Batch]):
    """An iterator of device batches; made by `feed`, used by one thread.

    Its threads start with the first `next()`. They end when the batches are exhausted, at an error, on leaving
    the `with`, by `close()`, when the feed is garbage-collected, and at interpreter exit.
    """

    def __init__(
        self,
        adapter: BatchAdapter,
        placement: Places,
        *,
        host_buffer: int,
        device_buffer: int,
        timeout: float | None,
        strict: bool,
        first: int = 0,
    ):
        placement.check_rows(adapter.batch_sizes)
        self._adapter, self._placement = adapter, placement
        self._host_buffer, self._device_buffer = host_buffer, device_buffer
        self._timeout, self._strict = timeout, strict
        self._fingerprint = adapter.fingerprint()
        self._pipeline: PrefetchPipeline[_Item] | None = None
        self._ended = self._closed = self._warned = False
        # The consumer's place: only what it has had counts, never what lies in a buffer.
        self._step = first  # number of the batch that comes next
        self._position: Any = None
        self._had = self._bytes = 0
        self._first_at = self._last_at = self._startup = self._wait = 0.0
        self._host_clocks = [Clock() for _ in range(adapter.workers)]
        self._place_clock = Clock()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Batch:
        pipeline = self._pipeline
        if pipeline is None or self._ended:
            pipeline = self._start()
        begin = time.perf_counter()
        try:
            with jax.profiler.TraceAnnotation("penstock.wait"):
                placed, position = pipeline.get(self._timeout)
            if placed.change:
                self._report(placed.change)
        except GetTimeout:
            raise TimeoutError(
                f"batch {self._step} did not come within timeout={self._timeout} s: {self._adapter.name} is still making "
                "it; next() may be called again to wait on"
            ) from None
        except Exhausted:
            self._end()
            raise StopIteration from None
        except PipelineClosed:
            raise RuntimeError(f"the feed was closed while batch {self._step} was awaited") from None
        except BaseException:  # of the upstream, of the placement, or Ctrl-C in this thread
            self._end()
            raise
        self._last_at = now = time.perf_counter()
        if self._had:
            self._wait += now - begin
        else:
            self._first_at, self._startup = now, now - begin
        self._had += 1
        self._step += 1
        self._bytes += placed.bytes
        self._position = position
        return placed.batch

    def close(self) -> None:
        """End the threads and drop the buffered batches; idempotent, and back within a second.

        A thread inside of a read that nothing can interrupt ends when the read returns.
        """
        self._closed = True
        self._end()

    def state(self) -> dict[str, Any]:
        """Where the consumer is, as a small dict that JSON holds.

        Batches that were made or placed but not handed over are not counted: a feed that this is restored to
        gives them again.
        """
        state = {"version": _STATE_VERSION, "step": self._step, "of": self._fingerprint}
        return state if self._position is None else {**state, "position": self._position}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state()` was taken, before the first batch is asked for.

        Raises:
          ValueError: a state of something else, with what differs.
          TypeError: the iterable has no state to go back to.
          RuntimeError: the feed has started.
        """
        if self._pipeline or self._ended:
            raise RuntimeError("restore() comes before the first batch: make a new feed and restore that")
        _check_state(state, self._fingerprint)
        self._adapter.restore(state["step"], state.get("position"))
        self._step, self._position = state["step"], state.get("position")

    def stats(self) -> Stats:
        """Where the time went so far; `print` it for a summary with a verdict."""
        host: dict[str, float] = {}
        for clock in self._host_clocks:
            for name, seconds in list(clock.items()):
                host[name] = host.get(name, 0.0) + seconds
        return Stats(
            steps=self._had,
            startup=self._startup,
            seconds=self._last_at - self._first_at,
            wait=self._wait,
            host=host,
            workers=self._adapter.workers,
            place=self._place_clock.get("place", 0.0),
            bytes=self._bytes,
        )

    def _start(self) -> PrefetchPipeline[_Item]:
        if self._closed:
            raise RuntimeError("the feed is closed: make a new one, and restore() the state() of this one to go on")
        if self._ended:
            raise StopIteration
        self._pipeline = PrefetchPipeline(
            self._adapter.producers(self._host_clocks),
            max(self._host_buffer, self._adapter.workers),
            finish=_placing(self._adapter, self._placement, self._place_clock, self._step),
            done_capacity=self._device_buffer,
            context=self._placement.context,
            # With a timeout, nothing may keep the consumer's thread that it cannot leave.
            consumer_context=self._placement.consumer_context if self._timeout is None else lambda: None,
        )
        # The pipeline knows nothing of the Feed, so an abandoned Feed can be collected; at interpreter exit the
        # pipelines are closed by their own module, and waited for.
        weakref.finalize(self, self._pipeline.close, wait=False).atexit = False
        return self._pipeline

    def _end(self) -> None:
        self._ended = True
        if self._pipeline:
            self._pipeline.close()

    def _report(self, change: str) -> None:
        if self._warned and not self._strict:
            return
        message = f"batch {self._step}: {change}; every jitted function that takes it compiles again"
        if self._strict:
            raise ValueError(f"{message}, which strict=True refuses")
        self._warned = True
        warnings.warn(
            f"{message}. Make the batches alike (remainder='drop' or 'pad', ps.pad_to), or refuse others with strict=True. "
            "Later changes are not reported",
            stacklevel=3,
        )


def _placing(adapter: BatchAdapter, placement: Places, clock: Clock, first: int) -> Callable[[int, Any], _Item]:
    def finish(number: int, item: Any) -> _Item:
        try:
            batch, position = adapter.split(item)
            with clock.time("place"):
                return _Item(placement(batch), position)
        except Exception as error:
            error.add_note(f"penstock: while placing batch {first + number}")
            raise

    return finish


def _seconds(timeout: Any) -> float | None:
    if timeout is None or timeout == math.inf:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, np.number)) or not timeout > 0:
        raise ValueError(f"timeout={timeout!r}: needs seconds > 0, or None to wait for ever")
    return min(float(timeout), threading.TIMEOUT_MAX)


def _check_state(state: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> None:
    if not _is_state(state):
        raise ValueError(f"not a state of a feed (version {_STATE_VERSION}): {str(state)[:200]}")
    saved = state["of"]
    differing = [name for name in {**saved, **fingerprint} if saved.get(name) != fingerprint.get(name)]
    if differing:
        listed = "; ".join(f"{name} was {saved.get(name)!r} and is {fingerprint.get(name)!r}" for name in differing)
        raise ValueError(f"the state belongs to something else: {listed}. Step {state['step']} would hold other records")


def _is_state(state: Any) -> bool:
    if not isinstance(state, Mapping) or state.get("version") != _STATE_VERSION or not isinstance(state.get("of"), Mapping):
        return False
    step = state.get("step")
    return isinstance(step, int) and not isinstance(step, bool) and step >= 0
