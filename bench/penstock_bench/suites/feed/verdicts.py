"""Count the verdicts of feeds that agree with arithmetic, in loops whose input and steps take known times."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import penstock as ps
from penstock.feed.stats import Stats
from penstock_bench.model import Measurement, Metric, Target, Variant, Workload
from penstock_bench.suites.feed.device_times import DeviceTimes
from penstock_bench.suites.feed.known_times import (
    ATTEMPTS,
    SlowSource,
    batches,
    difference,
    is_kept,
    make_step,
    new_state,
    share_lost,
)


@dataclass(frozen=True)
class Size:
    """The size of the loops.

    Attributes:
      steps: number of steps of each.
      times: pairs of seconds, of the input and of a step for one batch.
    """

    steps: int
    times: tuple[tuple[float, float], ...]


def _sleeping(seconds: float) -> Callable[[Any], Any]:
    def transform(batch: Any) -> Any:
        time.sleep(seconds)
        return batch

    return transform


def _placing(seconds: float) -> Callable[[Any], Any]:
    def transform(batch: Any) -> Any:
        shape = jax.ShapeDtypeStruct(batch["x"].shape, jnp.float32)
        return {"x": jax.pure_callback(_sleeping(seconds), shape, batch["x"])}

    return transform


_SOURCES: dict[str, Callable[[float], ps.Feed]] = {
    "iterate": lambda seconds: ps.feed(batches(seconds, 1000)),
    "read": lambda seconds: ps.feed(ps.Loader(SlowSource(seconds), 8)),
    "transform": lambda seconds: ps.feed(ps.Loader(SlowSource(0.0), 8, transform=_sleeping(seconds))),
    "place": lambda seconds: ps.feed(batches(0.0, 1000), transform=_placing(seconds)),
}
_LOOPS = ("every loss fetched", "asynchronous", "asynchronous, donated")


def _run(feed: ps.Feed, loop: str, seconds: float, steps: int) -> tuple[Stats, DeviceTimes]:
    times = DeviceTimes()
    step, state = make_step(seconds, "donated" in loop, noted=True), new_state()
    state, loss = step(state, {"x": np.zeros((8, 16), np.float32)})
    jax.block_until_ready(state)
    times.clear()
    with feed:
        for batch in itertools.islice(feed, steps):
            times.take()
            state, loss = step(state, batch)
            if loop == _LOOPS[0]:
                float(loss)
    return feed.stats(), times


def measure(size: Size) -> Measurement:
    right, rows = 0, []
    for (part, make), loop, (input_seconds, step_seconds) in itertools.product(_SOURCES.items(), _LOOPS, size.times):
        runs: list[tuple[Stats, DeviceTimes]] = []
        while len(runs) < ATTEMPTS:
            runs.append(_run(make(input_seconds), loop, step_seconds, size.steps))
            if is_kept(*runs[-1], input_seconds, step_seconds):
                break
        differs = difference(runs, input_seconds, step_seconds, part)
        stats, times = runs[-1]
        right += not differs
        rows.append(
            {
                "input": f"{part}, {input_seconds * 1e3:.0f} ms",
                "step": f"{loop}, {step_seconds * 1e3:.0f} ms",
                "lost by arithmetic": share_lost(input_seconds, step_seconds),
                "lost as measured": times.lost(stats.seconds).mean,
                "starved": stats.starved_share,
                "host waited": stats.wait_share,
                "runs": len(runs),
                "verdict": stats.verdict,
                "differs": differs,
            }
        )
    return Measurement({"right": right}, {"verdicts": rows})


WORKLOAD = Workload(
    name="verdicts",
    title="verdicts that are those of arithmetic, of 24: four inputs and steps of known times, in three loops",
    metrics=(Metric("right", "of 24", "higher", ideal=24),),
    baseline=None,
    variants=(Variant("penstock", measure, note="each loop has {steps} steps"),),
    sizes={
        "full": Size(steps=40, times=((0.03, 0.01), (0.01, 0.02))),
        "quick": Size(steps=6, times=((0.03, 0.01), (0.002, 0.01))),
    },
    targets=(Target("penstock", "right", 24),),
)
