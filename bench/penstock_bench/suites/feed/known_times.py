"""Define steps and sources that take known times, and the verdict that follows from them by arithmetic.

Each function takes seconds, and returns a compiled step, an iterable of batches or a source. `device_times` measures them.

A step sleeps inside of its compiled program, so it takes no processor from the others. It is dispatched asynchronously like a
step of real work. `jax.pure_callback` would not do: XLA:CPU runs a program that has one before the call returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penstock.feed.stats import Stats
from penstock_bench.suites.feed.device_times import DeviceTimes, Lost, sleep

TOLERANCE = 0.08  # in shares, between a verdict and the times that were measured
KEPT = 0.06  # in shares, between these and arithmetic: a busy machine makes steps and sleeps longer than they say,
KEPT_UP = 0.03  # and an input that keeps up loses nothing by arithmetic
SPREAD = 0.05  # in shares: a busy machine also needs this much from a batch to the begin of its step
ATTEMPTS = 6  # runs at the most

State = dict[str, jax.Array]


def sleep_on_device(x: jax.Array, seconds: float, is_step: bool = False) -> jax.Array:
    """Return a float32 zero, `seconds` after `x` is there. To be called inside of a jitted function.

    Args:
      x: an array of numbers.
      seconds: for how long to sleep.
      is_step: whether to note the sleep as a step, in the newest `DeviceTimes`.
    """
    # The product of floats with zero is one that XLA does not leave out, as it may be NaN. So the sleep depends on `x`.
    zero = jnp.ravel(x)[0].astype(jnp.float32) * 0
    # XLA:CPU runs a program that seems cheap before the call returns. A product of matrices makes it dear.
    square = jnp.ones((256, 256), jnp.float32) * zero
    return sleep((square @ square)[0, 0], seconds, is_step)


def make_step(seconds: float, donate: bool = False, noted: bool = False) -> Callable[[State, Any], tuple[State, jax.Array]]:
    """Return a compiled training step that takes `seconds` on the device; `noted` notes its times in the newest `DeviceTimes`."""

    def step(state: State, batch: Any) -> tuple[State, jax.Array]:
        slept = sleep_on_device(state["w"] + jax.tree.leaves(batch)[0].ravel()[0] * 0, seconds, noted)
        return jax.tree.map(lambda w: w + slept, state), state["w"].sum() + slept

    return jax.jit(step, donate_argnums=0 if donate else ())


def new_state() -> State:
    """Return the state of a small model."""
    return {"w": jnp.zeros(8), "b": jnp.zeros((64, 64))}


def batches(seconds: float, count: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches, each after `seconds`."""
    for number in range(count):
        time.sleep(seconds)
        yield {"x": np.full((8, 16), number, np.float32)}


class SlowSource:
    """A source for a Loader whose reads take `seconds`."""

    def __init__(self, seconds: float, length: int = 100_000):
        self._seconds, self._length = seconds, length

    def __len__(self) -> int:
        """Return the number of records."""
        return self._length

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Read records, slowly."""
        time.sleep(self._seconds)
        return {"x": np.zeros((len(indices), 16), np.float32)}


def share_lost(input_seconds: float, step_seconds: float) -> float:
    """Return the share of the time, 0 to 1, that a device starves if input and step take so long for a batch."""
    return max(0.0, (input_seconds - step_seconds) / max(input_seconds, step_seconds))


def difference(
    attempts: Iterable[tuple[Stats, DeviceTimes]], input_seconds: float, step_seconds: float, part: str, counted: int = 1
) -> str:
    """Compare the verdict of a loop with arithmetic.

    Arithmetic assumes times that a busy machine may exceed. So only runs count whose measured times agree with arithmetic,
    whatever their verdicts are.

    Args:
      attempts: runs of the loop: the statistics of its feed, and its measured times. None is taken that is not needed.
      input_seconds, step_seconds: the time that the input and a step take for one batch.
      part: the part of the input that takes longest.
      counted: runs that count, at most. The verdict is right if it is in the first of them, or in most of them.

    Returns:
      How they differ; "" if they do not. If no run has kept the times, the verdict of the last one is compared
      with the share that was measured.
    """
    share, found = share_lost(input_seconds, step_seconds), []
    for stats, times in attempts:
        lost = times.lost(stats.seconds)
        if is_kept(stats, times, input_seconds, step_seconds):
            found.append(wrong(stats, share, lost, part))
        if found and (not found[0] or len(found) == counted):
            break
    if found:
        return "" if not found[0] or 2 * found.count("") > counted else found[0]
    if lost.least - 2 * TOLERANCE < stats.starved_share < lost.most + 2 * TOLERANCE:
        return ""
    return f"{lost.least:.0%} to {lost.most:.0%} were lost as measured, {share:.0%} by arithmetic: {stats}"


def is_kept(stats: Stats, times: DeviceTimes, input_seconds: float, step_seconds: float) -> bool:
    """Return whether a loop has lost, as measured, the share that is lost by arithmetic, on a machine that was free."""
    share, lost = share_lost(input_seconds, step_seconds), times.lost(stats.seconds)
    if share == 0:
        return lost.least < KEPT_UP
    return abs(lost.mean - share) < KEPT and lost.most - lost.least < SPREAD


def wrong(stats: Stats, share: float, lost: Lost, part: str) -> str:
    """Return what is wrong with a verdict; "" if it is right.

    Args:
      stats: the statistics with the verdict.
      share: the share of the time, 0 to 1, that is lost by arithmetic.
      lost: the same as measured.
      part: the part of the input that takes longest.
    """
    if share == 0:
        return "" if stats.verdict.startswith("keeps up") else f"it keeps up: {stats}"
    if not stats.verdict.startswith("input-bound") or f"`{part}`" not in stats.verdict:
        return f"input-bound on `{part}`: {stats}"
    if lost.least - TOLERANCE < stats.starved_share < lost.most + TOLERANCE:
        return ""
    return f"{lost.least:.0%} to {lost.most:.0%} are lost: {stats}"
