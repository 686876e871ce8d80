"""Measure what inline items, a consumer that finishes, and no finisher while finishing is quick save in a prefetch pipeline.

    python bench/scripts/pipeline_modes.py --rounds 30 --json modes.json

The source is an array Loader or a generator, the batch 64 B, 100 KB or 3 MB, and the step beside it one of `STEPS`. Every round
runs each variant once, in a shuffled order, in one process: a new feed, some batches to warm up, then a timed block. A variant is
compared with the full pipeline within rounds, by `penstock_bench.statistics.compare`; the control is the full pipeline again.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import penstock as ps
from penstock import _pipeline
from penstock._pipeline import PrefetchPipeline
from penstock.feed import device_feed
from penstock_bench import machine
from penstock_bench.statistics import FEWEST_PAIRS, compare

Step = Callable[[Any], Any]  # from a batch to what says that the step has ended

SIZES = {"64 B": (16, (), np.float32), "100 KB": (256, (100,), np.float32), "3 MB": (64, (224, 224), np.uint8)}
_BLOCK_SECONDS = 0.08  # of a timed block, about
_WARM_UP_SECONDS = 0.03


class ConsumerOnlyTakes(PrefetchPipeline):
    """A pipeline whose consumer finishes nothing."""

    def __init__(self, producers: Any, *args: Any, **kwargs: Any):
        super().__init__(producers, *args, **{**kwargs, "consumer_context": lambda: None})


class NeverInline(PrefetchPipeline):
    """A pipeline whose producers make all items."""

    def __init__(self, producers: Any, *args: Any, **kwargs: Any):
        super().__init__(producers._replace(inline=False), *args, **kwargs)


class Variant(NamedTuple):
    """A pipeline, and the most seconds for which finishing is quick."""

    pipeline: type[PrefetchPipeline]
    quick: float = _pipeline._QUICK


VARIANTS = {
    "full": Variant(PrefetchPipeline),
    "control": Variant(PrefetchPipeline),
    "never inline": Variant(NeverInline),
    "consumer only takes": Variant(ConsumerOnlyTakes),
    "always a finisher": Variant(ConsumerOnlyTakes, quick=-1.0),
}


def arrays(rows: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return an endless Loader of arrays in memory."""
    return ps.Loader({"x": _data(rows, shape, dtype)}, batch_size=rows, epochs=None)


def generator(rows: int, shape: tuple[int, ...], dtype: Any) -> Iterator[Any]:
    """Yield slices of an array in memory, for ever."""
    data = _data(rows, shape, dtype)
    while True:
        for begin in range(0, len(data), rows):
            yield {"x": data[begin : begin + rows]}


@functools.lru_cache(maxsize=1)
def _data(rows: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.ones((16 * rows, *shape), dtype)


SOURCES = {"arrays": arrays, "generator": generator}


def _none() -> Step:
    return jax.block_until_ready


def _sleep(seconds: float) -> Step:
    def step(batch: Any) -> Any:
        jax.block_until_ready(batch)
        time.sleep(seconds)
        return batch

    return step


def _busy(seconds: float, wait: bool) -> Step:
    """Return a jitted step that keeps the cores busy for so many seconds; `wait` for its result each time, or never."""

    @functools.partial(jax.jit, static_argnums=2)
    def program(state: jax.Array, batch: Any, times: int) -> jax.Array:
        state = jax.lax.fori_loop(0, times, lambda _, x: jnp.cos(x @ x), state)
        return state + batch["x"].ravel()[0].astype(jnp.float32) * 1e-9

    states = [jnp.eye(128)]
    times = _times(lambda n: program(states[0], {"x": jnp.ones(1)}, n), seconds)

    def step(batch: Any) -> Any:
        states[0] = program(states[0], batch, times)
        return states[0].block_until_ready() if wait else states[0]

    return step


def _times(run: Callable[[int], jax.Array], seconds: float) -> int:
    """Return how often a program's loop takes so many seconds."""
    times = 32
    run(times).block_until_ready()
    taken = []
    for _ in range(100):
        begin = time.perf_counter()
        run(times).block_until_ready()
        taken.append(time.perf_counter() - begin)
    return max(1, round(times * seconds / float(np.median(taken))))


# A sleeping step stands for an accelerator: the consumer's thread waits without the interpreter lock, and the cores are free. A
# busy one is a step on the CPU, whose cores it takes. A queued one is a busy one that nothing waits for.
STEPS = {
    "none": _none,
    "busy 0.2 ms": functools.partial(_busy, 0.2e-3, True),
    "queued 0.2 ms": functools.partial(_busy, 0.2e-3, False),
    "sleep 1 ms": functools.partial(_sleep, 1e-3),
    "sleep 5 ms": functools.partial(_sleep, 5e-3),
    "busy 1 ms": functools.partial(_busy, 1e-3, True),
    "busy 5 ms": functools.partial(_busy, 5e-3, True),
    "queued 1 ms": functools.partial(_busy, 1e-3, False),
}


def block(variant: Variant, source: Callable[[], Any], step: Step, batches: int, warm_up: int) -> float:
    """Return the seconds for each batch of a new feed, after some that are not timed."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(device_feed, "PrefetchPipeline", variant.pipeline))
        stack.enter_context(mock.patch.object(_pipeline, "_QUICK", variant.quick))
        feed = stack.enter_context(ps.feed(source()))
        for count in (warm_up, batches):
            begin = time.perf_counter()
            for _ in range(count):
                ended = step(next(feed))
            jax.block_until_ready(ended)
        return (time.perf_counter() - begin) / batches


def measure(source: Callable[[], Any], step: Step, rounds: int) -> dict[str, list[float]]:
    """Return the seconds a batch, for each variant in each round."""
    full = VARIANTS["full"]
    block(full, source, step, 20, 20)  # compiles
    pace = block(full, source, step, 20, 20)
    batches, warm_up = max(8, round(_BLOCK_SECONDS / pace)), max(8, round(_WARM_UP_SECONDS / pace))
    taken: dict[str, list[float]] = {name: [] for name in VARIANTS}
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        for name in random.sample(list(VARIANTS), len(VARIANTS)):
            taken[name].append(block(VARIANTS[name], source, step, batches, warm_up))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help=f"blocks of each variant, at least {FEWEST_PAIRS} (default: 30)")
    parser.add_argument("--source", action="append", choices=SOURCES)
    parser.add_argument("--size", action="append", choices=SIZES)
    parser.add_argument("--step", action="append", choices=STEPS)
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    if args.rounds < FEWEST_PAIRS:
        parser.error(f"--rounds {args.rounds}: fewer than {FEWEST_PAIRS} give no interval")
    found = []
    others = [name for name in VARIANTS if name != "full"]
    print(f"| source | batch | step | full, µs | {' | '.join(others)} |\n|---|---|---|---:|{'---:|' * len(others)}", flush=True)
    steps = {name: STEPS[name]() for name in args.step or STEPS}
    for source in args.source or SOURCES:
        for size in args.size or SIZES:
            for step in steps:
                taken = measure(functools.partial(SOURCES[source], *SIZES[size]), steps[step], args.rounds)
                compared = {name: compare(taken[name], taken["full"]) for name in others}
                full = float(np.median(taken["full"])) * 1e6
                cells = [f"{c.ratio:.2f} ({c.low:.2f} to {c.high:.2f})" for c in compared.values()]
                print(f"| {source} | {size} | {step} | {full:,.0f} | {' | '.join(cells)} |", flush=True)
                ratios = {name: vars(comparison) for name, comparison in compared.items()}
                found.append({"source": source, "batch": size, "step": step, "full_us": full, "ratios": ratios})
    if args.json:
        args.json.write_text(json.dumps({"machine": machine.describe(), "rounds": args.rounds, "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
