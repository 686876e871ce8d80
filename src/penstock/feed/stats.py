"""The statistics of a feed: where its time was spent, and a verdict in one sentence.

The verdict says whether the feed keeps up with the training step. If not, it says what the caller can do about the slowest part
of the work. `starvation` measures for how long the devices starved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from penstock.data.loader import Loader
from penstock.data.steps import Steps
from penstock.feed.starvation import Meter


@dataclass(frozen=True)
class Caller:
    """The call that made a feed, on which the advice of its verdict depends.

    Attributes:
      by: the function that was called.
      kind: the source of the batches. "rows" is a Loader that copies rows of arrays, "Loader" another one, and "Steps" are
        `ps.Steps`. "arrays" are arrays in `fit` of Keras, and "iterable" is any other source that is not in `_LIBRARIES`.
      workers: who works for the Loader or the Steps: "none", "thread" or "process".
      count: number of workers.
      transform: whether the feed has a transform on the device.
    """

    by: Literal["feed", "pk.data", "threaded epochs"] = "feed"
    kind: str = "iterable"
    workers: str = "none"
    count: int = 1
    transform: bool = False


def caller_of(batches: Any, by: Literal["feed", "pk.data"] = "feed", transform: bool = False) -> Caller:
    """Return the description of a call with these batches."""
    if isinstance(batches, (Loader, Steps)):
        kind = "Steps" if isinstance(batches, Steps) else "rows" if batches.copies_rows else "Loader"
        return Caller(by, kind, batches.workers.kind, batches.workers.count, transform)
    library = type(batches).__module__.partition(".")[0]
    return Caller(by, library if library in _LIBRARIES else "iterable", transform=transform)


@dataclass(frozen=True)
class Stats:
    """The statistics of a feed so far. Times are in seconds.

    Attributes:
      steps: batches that the consumer took.
      startup: time until the first batch was there. It is not part of `seconds` and `wait`, but `host` and `place` include it.
      seconds: time from the first batch to the last one. After the end of the feed, to the end of the last step.
      wait: the part of `seconds` that the consumer waited inside of `next()`. The devices may have worked meanwhile.
      starved: the part of `seconds` in which the devices had finished all steps given to them, and waited for the next batch.
      late: the part of `starved` after the batch was handed over: its transfer, or its transform on the device, took so long.
      host: worker seconds by part of the work: "read", "transform" and "collate" of a Loader, or "iterate".
      workers: number of threads or processes that share the work in `host`.
      place: time spent putting batches on devices.
      blocked: the part of `place` in which the devices had no room for another program, because they were behind. It is an
        estimate.
      bytes: size of the host batches that were placed.
      caller: the call that made the feed, for the advice in the verdict.

    Examples:
      >>> with ps.feed([np.zeros(4, np.float32)] * 3) as feed:
      ...     batches = list(feed)
      >>> stats = feed.stats()
      >>> stats.steps, stats.bytes, 0 <= stats.starved_share <= 1
      (3, 48, True)
    """

    steps: int
    startup: float
    seconds: float
    wait: float
    starved: float
    host: Mapping[str, float]
    workers: int
    place: float
    bytes: int
    late: float = 0.0
    blocked: float = 0.0
    caller: Caller = field(default=Caller(), repr=False)

    def __add__(self, other: Stats) -> Stats:
        """Add the statistics of two feeds that ran one after the other. The time between them is left out."""
        added = ("steps", "startup", "seconds", "wait", "starved", "place", "bytes", "late", "blocked")
        return Stats(
            **{name: getattr(self, name) + getattr(other, name) for name in added},
            host={name: self.host.get(name, 0.0) + other.host.get(name, 0.0) for name in {**self.host, **other.host}},
            workers=max(self.workers, other.workers),
            caller=self.caller if self.steps else other.caller,
        )

    @property
    def wait_share(self) -> float:
        """Return the share of the time, 0 to 1, that the consumer waited for input."""
        return self.wait / self.seconds if self.seconds > 0 else 0.0

    @property
    def starved_share(self) -> float:
        """Return the share of the time, 0 to 1, that the devices starved for input."""
        return self.starved / self.seconds if self.seconds > 0 else 0.0

    @property
    def bottleneck(self) -> str:
        """Return the part of the work that is busy for the largest share of the time: a key of `host`, or "place"."""
        host = sum(self.host.values()) / self.workers
        if self.late > max(self.starved / 2, 0.01 * self.seconds) or self.place - self.blocked >= host or not self.host:
            return "place"
        return max(self.host, key=lambda part: self.host[part])

    @property
    def verdict(self) -> str:
        """Say in one sentence whether the feed keeps up, and if not, which part it waits for and what helps."""
        return verdict(self.steps, self.seconds, self.starved_share, self.bottleneck, self.caller)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.host.items())
        workers = f" on {self.workers} workers" if self.workers > 1 else ""
        return (
            f"{self.steps:,} batches ({self.bytes / 1e6:,.1f} MB) in {self.seconds:.2f} s, after {self.startup:.2f} s to the "
            f"first; the devices starved {self.starved:.2f} s, the host waited {self.wait:.2f} s; {parts}{workers}; place "
            f"{self.place:.2f} s\n{self.verdict}"
        )


class LaterStats(NamedTuple):
    """The statistics of a feed at some moment, without the feed itself. A call returns them.

    Attributes:
      host, workers, place, bytes, caller: see `Stats`.
      steps: number of batches that were used; None for those that were handed over.
    """

    meter: Meter
    host: Mapping[str, float]
    workers: int
    place: float
    bytes: int
    caller: Caller
    steps: int | None = None

    def __call__(self) -> Stats:
        """Return the statistics. After the end of the feed, wait until the devices have finished the steps given to them."""
        self.meter.settle()
        starved = self.meter.starved(self.place)
        return Stats(
            steps=self.meter.steps if self.steps is None else self.steps,
            startup=self.meter.startup,
            seconds=self.meter.seconds,
            wait=self.meter.wait,
            starved=starved.seconds,
            host=self.host,
            workers=self.workers,
            place=self.place,
            bytes=self.bytes,
            late=starved.late,
            blocked=starved.blocked,
            caller=self.caller,
        )


# The verdict.

_INPUT_BOUND = 0.05  # share of starving from which on a feed is input-bound: a busy machine causes some by itself
_TOO_SHORT = 0.02  # seconds; if all steps took less, they say nothing about the next ones

_LIBRARIES = {
    "torch": "raise num_workers of the DataLoader",
    "grain": "let Grain read in parallel (mp_prefetch, or more threads in its ReadOptions)",
    "tensorflow": "let tf.data work in parallel (num_parallel_calls, prefetch)",
    "PyDataset": "give the PyDataset workers=4, and use_multiprocessing=True for Python code",
    "Feed": "the feed inside is too slow, and its own stats() say which part of it",
}


def verdict(steps: int, seconds: float, share: float, part: str, caller: Caller) -> str:
    """Return the verdict of a feed in one sentence.

    Args:
      steps: batches that the consumer took.
      seconds: the time that the steps took.
      share: share of this time, 0 to 1, that the devices starved.
      part: the slowest part of the work: "read", "transform", "collate", "iterate", "unpack" or "place".

    Examples:
      >>> verdict(steps=100, seconds=2.0, share=0.01, part="read", caller=Caller())
      'keeps up: the step waits for input 1.0 % of its time'
    """
    if steps < 2:
        return f"no verdict yet: {steps} batch{'' if steps == 1 else 'es'}"
    if seconds < _TOO_SHORT:
        return f"no verdict yet: {seconds * 1e3:.1f} ms"
    percent = f"{share:.1%}".replace("%", " %")
    if share < _INPUT_BOUND:
        return f"keeps up: the step waits for input {percent} of its time"
    return f"input-bound: {percent} of the step waits on `{part}`; {advice(part, caller)}"


def advice(part: str, caller: Caller) -> str:
    """Say what the caller can do about the part of the work that takes longest. The parts are named as in `verdict`."""
    layer = "the cast can be a layer of the model, as keras.layers.Rescaling"
    cast = "the cast can be feed(transform=...)" if caller.by == "feed" else layer
    if part == "place":
        text = f"send smaller dtypes ({cast}), fewer leaves, or larger batches"
        return f"{text}; the transform on the device counts as well: make it cheaper" if caller.transform else text
    if part == "iterate":
        return _iterable_advice(caller, cast)
    if part == "read" and caller.kind == "rows":
        return f"a batch is a copy of its rows: store smaller dtypes ({cast}), or {_more_workers(caller)}"
    if part == "read":
        return f"{_more_workers(caller)}, or store the data so that a batch is one read (arrays, Arrow, ArrayRecord)"
    if part == "collate":
        return f"{_more_workers(caller)}, or make records that need no padding"
    if part == "unpack":
        return f"{_more_workers(caller)}, or do the work of `unpack` in the transform of the Loader or in the model"
    return f"{_more_workers(caller)}, or move work to the device ({cast})"


def _more_workers(caller: Caller) -> str:
    name = "Steps" if caller.kind == "Steps" else "the Loader"
    if caller.workers == "none":
        return f"give {name} workers=4 ('process:4' for Python code that holds the interpreter lock)"
    if caller.workers == "thread":
        return f"give {name} more than {caller.count} workers, or processes ('process:{caller.count}') for Python code"
    return f"give {name} more than {caller.count} processes, if there are cores for them"


def _iterable_advice(caller: Caller, cast: str) -> str:
    if caller.kind == "arrays":
        return f"Keras takes the rows on one thread: use smaller dtypes ({cast}), or pk.data(ps.Loader(..., workers=4))"
    if caller.kind == "Steps":
        return f"{_more_workers(caller)}, or make the function cheaper"
    if caller.kind in _LIBRARIES:
        return _LIBRARIES[caller.kind]
    loader = "feed a Loader with workers" if caller.by == "feed" else "use pk.data(ps.Loader(..., workers=4))"
    return f"the iterable makes batches on one thread: let it work in parallel, or {loader}"
