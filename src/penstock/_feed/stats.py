"""The statistics of a feed: where its time was spent, and which part of the work is the bottleneck.

Seconds that a `Feed` measured go in; shares, the bottleneck and a summary come out. `verdict` words the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock._feed import verdict as wording


@dataclass(frozen=True)
class Stats:
    """The statistics of a feed so far. Times are in seconds.

    Attributes:
      steps: batches that the consumer took.
      startup: time until the first batch was there. It is not part of `seconds` and `wait`, but `host` and `place` include it.
      seconds: time from the first batch to the last `next()`.
      wait: the part of `seconds` that the consumer waited inside of `next()`.
      host: worker seconds by part of the work: "read", "transform" and "collate" of a Loader, or "iterate".
      workers: number of threads or processes that share the work in `host`.
      place: time spent putting batches on devices.
      bytes: size of the host batches that were placed.

    Example:
      >>> with ps.feed([np.zeros(4, np.float32)] * 3) as feed:
      ...     batches = list(feed)
      >>> stats = feed.stats()
      >>> stats.steps, stats.bytes, 0 <= stats.wait_share <= 1
      (3, 48, True)
    """

    steps: int
    startup: float
    seconds: float
    wait: float
    host: Mapping[str, float]
    workers: int
    place: float
    bytes: int

    def __add__(self, other: Stats) -> Stats:
        """Add the statistics of two feeds that ran one after the other. The time between them is left out."""
        return Stats(
            steps=self.steps + other.steps,
            startup=self.startup + other.startup,
            seconds=self.seconds + other.seconds,
            wait=self.wait + other.wait,
            host={name: self.host.get(name, 0.0) + other.host.get(name, 0.0) for name in {**self.host, **other.host}},
            workers=max(self.workers, other.workers),
            place=self.place + other.place,
            bytes=self.bytes + other.bytes,
        )

    @property
    def wait_share(self) -> float:
        """Return the share of the time, 0 to 1, that the consumer waited for input."""
        return self.wait / self.seconds if self.seconds > 0 else 0.0

    @property
    def bottleneck(self) -> str:
        """Return the part of the work that limits the rate of batches: a key of `host`, or "place"."""
        host = sum(self.host.values()) / self.workers
        if self.place >= host or not self.host:
            return "place"
        return max(self.host, key=lambda part: self.host[part])

    @property
    def verdict(self) -> str:
        """Say in one sentence whether the feed keeps up, and if not, which part it waits for and what helps."""
        return wording.verdict(self.steps, self.seconds, self.wait_share, self.bottleneck)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.host.items())
        workers = f" on {self.workers} workers" if self.workers > 1 else ""
        return (
            f"{self.steps:,} batches ({self.bytes / 1e6:,.1f} MB) in {self.seconds:.2f} s, after {self.startup:.2f} s to the "
            f"first; waited {self.wait:.2f} s; {parts}{workers}; place {self.place:.2f} s\n{self.verdict}"
        )
