"""The statistics of a feed: where its time was spent, and which part of the work is the bottleneck.

Seconds that a `Feed` measured go in; shares, the bottleneck and a summary come out. `starvation` measures for how long the
devices starved, and `verdict` words the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.feed import verdict as wording
from penstock.feed.starvation import Meter
from penstock.feed.verdict import Caller


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
        return Stats(
            steps=self.steps + other.steps,
            startup=self.startup + other.startup,
            seconds=self.seconds + other.seconds,
            wait=self.wait + other.wait,
            starved=self.starved + other.starved,
            host={name: self.host.get(name, 0.0) + other.host.get(name, 0.0) for name in {**self.host, **other.host}},
            workers=max(self.workers, other.workers),
            place=self.place + other.place,
            bytes=self.bytes + other.bytes,
            late=self.late + other.late,
            blocked=self.blocked + other.blocked,
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
        return wording.verdict(self.steps, self.seconds, self.starved_share, self.bottleneck, self.caller)

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
      meter: has measured the waits.
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
