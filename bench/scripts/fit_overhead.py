"""Measure what `ps.fit` costs: a bare jitted loop and `fit` train the same step, fed by the same feed, in turns, in one process.

python bench/scripts/fit_overhead.py --rounds 12 --json out.json

A *block* is one training of `--steps` steps, from the batch after the warm-up to the end of the last step on the device. Blocks
of the bare loop and of `fit` take turns, in an order that changes from round to round. The ratio of each round is of two of its
blocks. The report has the median of the ratios, with a bootstrap interval (95 %), and an A/A ratio of bare loops.
Beside the bare loop, which never waits for the device, there is one that reads the metrics as `fit` does.

With --save it also measures how long an asynchronous save blocks the loop, beside the time of the copy of the state to the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import bootstrap

import penstock as ps
from penstock.feed import Feed
from penstock.train.checkpoint import Checkpoints

WARM_UP = 30


def make_step(width: int) -> tuple[Callable[[Any, Any], Any], Callable[[], Any]]:
    """Return a training step of a multilayer perceptron with Adam, and a function that makes its state."""

    def init() -> Any:
        keys = jax.random.split(jax.random.key(0), 4)
        w = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]
        return {"w": w, "m": jax.tree.map(jnp.zeros_like, w), "v": jax.tree.map(jnp.zeros_like, w), "step": jnp.int32(0)}

    def step(state: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            x = batch["x"]
            for layer in w:
                x = jnp.tanh(x @ layer)
            return jnp.mean((x - batch["x"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(state["w"])
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], gradients)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state["v"], gradients)
        w = jax.tree.map(lambda w, m, v: w - 1e-3 * m / (jnp.sqrt(v) + 1e-8), state["w"], m, v)
        return {"w": w, "m": m, "v": v, "step": state["step"] + 1}, {"loss": value, "size": jnp.abs(w[0]).mean()}

    return step, init


class _TimedFeed:
    """Notes the time at which batch `WARM_UP` is asked for, by way of `Feed.__next__`."""

    def __init__(self, feed: Feed):
        self.begin = 0.0
        count, take = 0, type(feed).__next__

        class Timed(type(feed)):
            def __next__(inner: Any) -> Any:
                nonlocal count
                count += 1
                if count == WARM_UP:
                    self.begin = time.perf_counter()
                return take(inner)

        feed.__class__ = Timed


def bare(step: Any, init: Any, loader: ps.Loader, steps: int, log_every: int | None = None) -> float:
    """Return the seconds per step of a bare loop; with `log_every`, it reads metrics, an interval late."""
    train, before = jax.jit(step, donate_argnums=0), None
    with ps.feed(loader) as feed:
        timed = _TimedFeed(feed)
        state = init()
        for number in range(steps):
            state, metrics = train(state, next(feed))
            if log_every and number % log_every == 0:
                jax.device_get(before)
                before = metrics
        jax.block_until_ready((state, metrics))
        return (time.perf_counter() - timed.begin) / (steps - WARM_UP + 1)


def fitted(step: Any, init: Any, loader: ps.Loader, steps: int, log_every: int) -> float:
    """Return the seconds per step of `fit`, with a logger that gets the metrics."""
    points: list[ps.Point] = []
    with ps.feed(loader) as feed:
        timed = _TimedFeed(feed)
        ps.fit(step, init, feed, steps=steps, log=[points.append], log_every=log_every)
        seconds = (time.perf_counter() - timed.begin) / (steps - WARM_UP + 1)
    assert sum(point.kind == "train" for point in points) == -(-steps // log_every)
    return seconds


def compare(step: Any, init: Any, loader: ps.Loader, args: argparse.Namespace) -> dict[str, Any]:
    """Run the blocks in turns, and return the ratios."""
    names: list[tuple[str, Callable[[], float]]] = [
        ("bare", lambda: bare(step, init, loader, args.steps)),
        ("fit", lambda: fitted(step, init, loader, args.steps, args.log_every)),
        ("bare, metrics read", lambda: bare(step, init, loader, args.steps, args.log_every)),
        ("bare again", lambda: bare(step, init, loader, args.steps)),
    ]
    seconds: dict[str, list[float]] = {name: [] for name, _ in names}
    orders = [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1)]
    for number in range(args.rounds + 1):
        for index in orders[number % len(orders)]:
            name, run = names[index]
            value = run()
            if number:  # the first round warms up
                seconds[name].append(value)
        print(f"round {number}", {name: f"{1e3 * values[-1]:.3f} ms" for name, values in seconds.items() if values}, flush=True)
    base = np.asarray(seconds["bare"])
    result: dict[str, Any] = {"seconds": seconds}
    for name in ("fit", "bare, metrics read", "bare again"):
        ratios = np.asarray(seconds[name]) / base
        interval = bootstrap((ratios,), np.median, method="percentile", rng=0).confidence_interval
        result[name] = {"ratio": float(np.median(ratios)), "low": float(interval.low), "high": float(interval.high)}
    return result


def blocked(init: Any, folder: Path, saves: int = 9) -> dict[str, float]:
    """Return the median seconds for which a save blocks, and of a copy of the state to the host."""
    checkpoints, state = Checkpoints(folder), jax.block_until_ready(init())
    leaves = {str(number): leaf for number, leaf in enumerate(jax.tree.leaves(state))}
    blocks, copies = [], []
    for number in range(saves):
        checkpoints.wait()
        begin = time.perf_counter()
        checkpoints.save(number, leaves, {})
        blocks.append(time.perf_counter() - begin)
        checkpoints.wait()
        begin = time.perf_counter()
        for leaf in leaves.values():
            np.array(leaf)
        copies.append(time.perf_counter() - begin)
    checkpoints.close()
    size = sum(leaf.nbytes for leaf in leaves.values())
    return {"MB": size / 1e6, "save blocks": statistics.median(blocks[1:]), "copy to the host": statistics.median(copies[1:])}


def main() -> None:
    """Print the ratios, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--width", type=int, default=576, help="of the layers; 576 gives a step of 4 to 6 ms on two cores")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--save", action="store_true", help="measure saves instead")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    step, init = make_step(args.width)
    loader = ps.Loader({"x": np.random.default_rng(0).normal(size=(4096, args.width)).astype(np.float32)}, 64, shuffle=True)
    if args.save:
        with tempfile.TemporaryDirectory() as folder:
            result: dict[str, Any] = blocked(init, Path(folder))
    else:
        result = compare(step, init, loader, args)
    print(json.dumps({name: value for name, value in result.items() if name != "seconds"}, indent=1))
    if args.json:
        args.json.write_text(json.dumps({"jax": jax.__version__, "settings": vars(args) | {"json": None}, **result}, indent=1))


if __name__ == "__main__":
    main()
