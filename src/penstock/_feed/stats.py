"""Where the time of a feed went, and what that means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Below this share of waiting there is nothing to gain; a busy machine makes that much by itself.
_KEEPS_UP = 0.03

# Seconds. In less, a loop that does not wait for its results has only started its steps, not run them.
_TOO_SHORT = 0.02

_ADVICE = {
    "read": "give the Loader more workers, or store the data so that a batch is one read (arrays, Arrow, ArrayRecord)",
    "transform": "more workers ('process:N' if it is Python code), or move the cast to the device with feed(transform=...)",
    "collate": "more workers, or records that need no padding",
    "iterate": "the iterable makes batches on one thread: let it work in parallel, or use a Loader with workers",
    "place": "send smaller dtypes (the cast can be feed(transform=...)), fewer leaves, or larger batches",
}


@dataclass(frozen=True)
class Stats:
    """What a feed did so far. Times are in seconds.

    Attributes:
      steps: batches that the consumer had.
      startup: until the first batch was there; not part of the others, except `host` and `place`.
      seconds: from the first batch to the last `next()`.
      wait: how much of `seconds` the consumer waited inside of `next()`.
      host: worker seconds by part of the work: "read", "transform", "collate" of a Loader, or "iterate".
      workers: threads or processes over which `host` is spread.
      place: seconds spent putting batches on devices.
      bytes: host bytes that the placed batches had.
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
        """Both together, of feeds that ran one after the other; what lies between them is no part of it."""
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
        """The share of the time, 0 to 1, that the consumer waited for input."""
        return self.wait / self.seconds if self.seconds > 0 else 0.0

    @property
    def bottleneck(self) -> str:
        """The part that limits how fast batches can come: a key of `host`, or "place"."""
        host = sum(self.host.values()) / self.workers
        if self.place >= host or not self.host:
            return "place"
        return max(self.host, key=lambda part: self.host[part])

    @property
    def verdict(self) -> str:
        """One sentence: does the feed keep up, and if not, what it waits on and what helps."""
        if self.steps < 2:
            return f"no verdict yet: {self.steps} batch{'' if self.steps == 1 else 'es'}"
        if self.seconds < _TOO_SHORT:
            return f"no verdict yet: {self.seconds * 1e3:.1f} ms"
        share = f"{self.wait_share:.1%}".replace("%", " %")
        if self.wait_share < _KEEPS_UP:
            return f"keeps up: the step waits for input {share} of its time"
        part = self.bottleneck
        return f"input-bound: {share} of the step waits on `{part}`; {_ADVICE[part]}"

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.host.items())
        workers = f" on {self.workers} workers" if self.workers > 1 else ""
        return (
            f"{self.steps:,} batches ({self.bytes / 1e6:,.1f} MB) in {self.seconds:.2f} s, after {self.startup:.2f} s to the "
            f"first; waited {self.wait:.2f} s; {parts}{workers}; place {self.place:.2f} s\n{self.verdict}"
        )
