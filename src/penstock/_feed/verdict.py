"""The verdict of a feed in one sentence: whether it keeps up with the training step, and if not, what helps.

The share of waiting and the slowest part go in, a sentence comes out.
"""

from __future__ import annotations

_KEEPS_UP = 0.03  # share of waiting below which there is nothing to gain: a busy machine causes as much by itself
_TOO_SHORT = 0.02  # seconds; a loop that does not wait for its results may have started its steps in this time, and run none

_ADVICE = {
    "read": "give the Loader more workers, or store the data so that a batch is one read (arrays, Arrow, ArrayRecord)",
    "transform": "more workers ('process:N' if it is Python code), or move the cast to the device with feed(transform=...)",
    "collate": "more workers, or records that need no padding",
    "iterate": "the iterable makes batches on one thread: let it work in parallel, or use a Loader with workers",
    "place": "send smaller dtypes (the cast can be feed(transform=...)), fewer leaves, or larger batches",
}


def verdict(steps: int, seconds: float, wait_share: float, bottleneck: str) -> str:
    """Word the verdict of a feed.

    Args:
      steps: batches that the consumer took.
      seconds: the time that it took them in.
      wait_share: share of this time, 0 to 1, that it waited.
      bottleneck: the slowest part of the work: "read", "transform", "collate", "iterate" or "place".

    Returns:
      One sentence.

    Example:
      >>> verdict(steps=100, seconds=2.0, wait_share=0.01, bottleneck="read")
      'keeps up: the step waits for input 1.0 % of its time'
    """
    if steps < 2:
        return f"no verdict yet: {steps} batch{'' if steps == 1 else 'es'}"
    if seconds < _TOO_SHORT:
        return f"no verdict yet: {seconds * 1e3:.1f} ms"
    share = f"{wait_share:.1%}".replace("%", " %")
    if wait_share < _KEEPS_UP:
        return f"keeps up: the step waits for input {share} of its time"
    return f"input-bound: {share} of the step waits on `{bottleneck}`; {_ADVICE[bottleneck]}"
