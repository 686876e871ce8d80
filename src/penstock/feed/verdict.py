"""The verdict of a feed in one sentence: whether it keeps up with the training step, and if not, what its caller can do.

The share of starving, the slowest part and the caller go in, a sentence comes out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from penstock.data.loader import Loader
from penstock.data.steps import Steps

INPUT_BOUND = 0.05  # share of starving from which on a feed is input-bound: a busy machine causes some by itself
_TOO_SHORT = 0.02  # seconds; steps that take less in all say nothing about those that follow

_DEVICE_CAST = {
    "feed": "the cast can be feed(transform=...)",
    "pk.data": "the cast can be a layer of the model, as keras.layers.Rescaling",
    "threaded epochs": "the cast can be a layer of the model, as keras.layers.Rescaling",
}
_LIBRARIES = {
    "torch": "raise num_workers of the DataLoader",
    "grain": "let Grain read in parallel (mp_prefetch, or more threads in its ReadOptions)",
    "tensorflow": "let tf.data work in parallel (num_parallel_calls, prefetch)",
    "PyDataset": "give the PyDataset workers=4, and use_multiprocessing=True for Python code",
    "Feed": "the feed inside is too slow, and its own stats() say which part of it",
}


@dataclass(frozen=True)
class Caller:
    """The call that made a feed, on which the advice of its verdict depends.

    Attributes:
      by: the function that was called.
      kind: what makes the batches: "rows" is a Loader that copies rows of arrays, "Loader" another one, "Steps" are `ps.Steps`,
        "arrays" are arrays in `fit` of Keras, and "iterable" is anything else without an entry of its own in `_LIBRARIES`.
      workers: who works for the Loader or the Steps: "none", "thread" or "process".
      count: number of workers.
      transform: whether the feed has a transform on the device.
    """

    by: Literal["feed", "pk.data", "threaded epochs"] = "feed"
    kind: str = "iterable"
    workers: str = "none"
    count: int = 1
    transform: bool = False


def caller_of(batches: Any, by: Literal["feed", "pk.data", "threaded epochs"] = "feed", transform: bool = False) -> Caller:
    """Return the description of a call with these batches."""
    if isinstance(batches, Loader):
        kind = "rows" if batches.copies_rows else "Loader"
        return Caller(by, kind, batches.workers.kind, batches.workers.count, transform)
    if isinstance(batches, Steps):
        return Caller(by, "Steps", batches.workers.kind, batches.workers.count, transform)
    library = type(batches).__module__.partition(".")[0]
    return Caller(by, library if library in _LIBRARIES else "iterable", transform=transform)


def verdict(steps: int, seconds: float, share: float, part: str, caller: Caller) -> str:
    """Word the verdict of a feed.

    Args:
      steps: batches that the consumer took.
      seconds: the time that the steps took.
      share: share of this time, 0 to 1, that the devices starved.
      part: the slowest part of the work: "read", "transform", "collate", "iterate", "unpack" or "place".
      caller: the call that made the feed.

    Returns:
      One sentence.

    Examples:
      >>> verdict(steps=100, seconds=2.0, share=0.01, part="read", caller=Caller())
      'keeps up: the step waits for input 1.0 % of its time'
    """
    if steps < 2:
        return f"no verdict yet: {steps} batch{'' if steps == 1 else 'es'}"
    if seconds < _TOO_SHORT:
        return f"no verdict yet: {seconds * 1e3:.1f} ms"
    percent = f"{share:.1%}".replace("%", " %")
    if share < INPUT_BOUND:
        return f"keeps up: the step waits for input {percent} of its time"
    return f"input-bound: {percent} of the step waits on `{part}`; {advice(part, caller)}"


def advice(part: str, caller: Caller) -> str:
    """Say what the caller can do about the part of the work that takes longest.

    Args:
      part: "read", "transform", "collate", "iterate", "unpack" or "place".
      caller: the call that made the feed.
    """
    cast = _DEVICE_CAST[caller.by]
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
