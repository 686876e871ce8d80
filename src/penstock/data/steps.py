"""Feed any function from a step to a host batch, with the step as the state: `Steps`."""

from __future__ import annotations

import math
import operator
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock._arguments import at_least
from penstock._clock import Clock
from penstock._pipeline import Producers
from penstock.data.read_batch import batch_producers
from penstock.data.tree import Batch, leaves_with_names, to_arrays
from penstock.data.worker_processes import Workers


class Steps:
    """A function from a step number to a host batch, as data for `ps.feed`.

    The state of its feed is one integer, the step. So restoring is exact and costs as much as step 0, provided that the function
    depends on its argument alone.

    Args:
      fn: a function from a step, 0 <= step < length, to a batch (a pytree of arrays). With several processes, it returns the rows
        of this process.
      length: number of steps; None for no end.
      workers: see `Loader`. `fn` must be safe to call from several threads, or picklable for "process:N".
      name: is compared when a state is restored; None for the name of the function.

    Raises:
      TypeError: `fn` is not a function.
      ValueError: `length` or `workers` is invalid.

    Examples:
      >>> steps = ps.Steps(lambda step: {"x": np.full(4, step)}, length=10)
      >>> with ps.feed(steps) as feed:
      ...     feed.restore({**feed.state(), "step": 7})
      ...     [int(batch["x"][0]) for batch in feed]
      [7, 8, 9]
    """

    def __init__(
        self, fn: Callable[[int], Batch], length: int | None = None, *, workers: int | str | None = None, name: str | None = None
    ):
        if not callable(fn):
            raise TypeError(f"Steps needs a function from a step to a batch, got {type(fn).__name__}")
        self.length = None if length is None else at_least(0, "length", length)
        self.workers = Workers.parse(workers)
        self.name = name or getattr(fn, "__qualname__", None) or type(fn).__name__
        self._read = _Read(fn, self.name)
        if self.workers.kind == "process":
            try:
                pickle.dumps(fn)
            except Exception as error:
                raise ValueError(
                    f"workers='process:N' sends {self.name} to other processes, but it does not pickle ({error}): define it "
                    "at the top of a module"
                ) from error

    batch_sizes: Sequence[int] = ()

    def __len__(self) -> int:
        """Return the number of steps.

        Raises:
          TypeError: there is no end.
        """
        if self.length is None:
            raise TypeError("Steps without a length go on for ever")
        return self.length

    def __getitem__(self, step: int) -> Batch:
        """Return the batch of a step.

        Raises:
          IndexError: there is no such step.
        """
        step = operator.index(step)
        if step < 0 or (self.length is not None and step >= self.length):
            raise IndexError(f"no step {step} in Steps {'without end' if self.length is None else f'of length {self.length:,}'}")
        return self._read(step, Clock())

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches from step 0 on."""
        step = 0
        while self.length is None or step < self.length:
            yield self[step]
            step += 1

    def __repr__(self) -> str:
        return f"Steps({self.name}, {'without end' if self.length is None else f'{self.length:,} steps'})"

    def fingerprint(self) -> dict[str, Any]:
        """Return the name. The length may change between runs."""
        return {"source": f"Steps({self.name})"}

    def producers(self, start: int, clocks: Sequence[Clock]) -> Producers:
        """Return the producers of the batches from step `start` on, for a `PrefetchPipeline`: one for each clock."""
        return batch_producers(self._read, self.workers, start, math.inf if self.length is None else self.length, clocks)


@dataclass
class _Read:
    """The function from a step to a batch of NumPy (or JAX) arrays. Each worker process gets a copy of it."""

    fn: Callable[[int], Batch]
    name: str

    def __call__(self, step: int, clock: Clock) -> Batch:
        """Call the function, and add its time to the clock."""
        with clock.time("iterate"):
            try:
                # A copy, as the function may fill the same buffer for each step, and a feed reads ahead.
                batch = to_arrays(self.fn(step), copy=True)
            except Exception as error:
                error.add_note(f"penstock: while {self.name} made batch {step}")
                raise
        for name, leaf in leaves_with_names(batch):
            if isinstance(leaf, np.ndarray) and leaf.dtype == object:
                raise TypeError(f"batch {step} of {self.name}: leaf {name!r} is not numeric, and no device can hold it")
        return batch
