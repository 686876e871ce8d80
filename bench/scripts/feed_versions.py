"""Compare `ps.feed` of two versions of penstock, beside steps of 1 and 5 ms.

    git worktree add /tmp/before COMMIT
    python bench/scripts/feed_versions.py before=/tmp/before/src now=src --rounds 8 --json versions.json

A version is a folder with the package. Each case is a record size, a batch size, the place of the cast to float32, and a step:

- sleep: the loop waits for the batch and sleeps, like for an accelerator. The cores are free meanwhile.
- busy: the loop waits for a step that computes on the CPU, and so takes the cores.
- queued: the same, but nothing waits for it.

Every version runs in a fresh process in each round, in a shuffled order. All processes repeat the same computation in their
steps. Ratios are of one round, and their intervals over rounds, as in `penstock bench`. The first version runs twice in each
round, as the A/A control.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SHAPES = {"784 B": (28, 28), "3 KB": (32, 32, 3), "12 KB": (64, 64, 3)}
CASES = [("784 B", 128, "host"), ("3 KB", 256, "host"), ("3 KB", 1024, "host"), ("3 KB", 256, "device"), ("12 KB", 256, "device")]
STEPS = ("sleep", "busy", "queued")
MILLISECONDS = (1, 5)
_WARM_UP, _BLOCKS, _BLOCK_SECONDS = 60, 3, 0.15

Step = Callable[[Any], Any]


@functools.partial(jax.jit, static_argnums=2)
def _program(state: jax.Array, batch: Any, times: int) -> jax.Array:
    state = jax.lax.fori_loop(0, times, lambda _, x: jnp.cos(x @ x), state)
    return state + batch["x"].ravel()[0].astype(jnp.float32) * 1e-9


def times_of(milliseconds: float) -> int:
    """Return how often the loop of `_program` takes so long on this machine."""
    state, batch, times = jnp.eye(128), {"x": jnp.ones(1)}, 32
    taken = []
    for _ in range(100):
        begin = time.perf_counter()
        _program(state, batch, times).block_until_ready()
        taken.append(time.perf_counter() - begin)
    return max(1, round(times * milliseconds / 1e3 / float(np.median(taken))))


def step_of(kind: str, milliseconds: float, times: int) -> Step:
    """Return a step, from a batch to an array that says when it has ended."""
    state = jnp.eye(128)

    def sleep(batch: Any) -> Any:
        jax.block_until_ready(batch)
        time.sleep(milliseconds / 1e3)
        return batch

    def compute(batch: Any) -> Any:
        nonlocal state
        state = _program(state, batch, times)
        return state if kind == "queued" else state.block_until_ready()

    return sleep if kind == "sleep" else compute


def _on_host(batch: Any) -> Any:
    return {"x": batch["x"].astype(np.float32) / 255, "y": batch["y"]}


def _on_device(batch: Any) -> Any:
    return {"x": batch["x"].astype(jnp.float32) / 255, "y": batch["y"]}


def measure(times: dict[str, int]) -> dict[str, float]:
    """Return the microseconds of a step with its batch, by case."""
    import penstock as ps

    found = {}
    for record, batch_size, cast in CASES:
        shape = SHAPES[record]
        count = (96 << 20) // int(np.prod(shape))
        data = {"x": np.random.default_rng(0).integers(0, 255, (count, *shape), np.uint8), "y": np.arange(count, dtype=np.int32)}
        for kind in STEPS:
            for milliseconds in MILLISECONDS:
                loader = ps.Loader(data, batch_size, shuffle=True, transform=_on_host if cast == "host" else None)
                feed = ps.feed(loader, to=jax.devices()[0], transform=_on_device if cast == "device" else None)
                step = step_of(kind, milliseconds, times[str(milliseconds)])
                count = round(_BLOCK_SECONDS / milliseconds * 1e3)
                with feed:
                    _microseconds(feed, step, _WARM_UP)
                    blocks = [_microseconds(feed, step, count) for _ in range(_BLOCKS)]
                found[f"{record} × {batch_size:,}, cast on the {cast}, {kind} {milliseconds} ms"] = float(np.median(blocks))
    return found


def _microseconds(feed: Any, step: Step, count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        ended = step(next(feed))
    jax.block_until_ready(ended)
    return (time.perf_counter() - begin) / count * 1e6


def run(source: Path, times: dict[str, int]) -> dict[str, float]:
    """Measure one version in a fresh process."""
    command = [sys.executable, __file__, "--measure", json.dumps(times), "unused=."]
    environment = {**os.environ, "PYTHONPATH": str(source.absolute())}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(finished.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="+", metavar="NAME=FOLDER", help="versions to compare; the first is the baseline")
    parser.add_argument("--rounds", type=int, default=8, help="at least 6 (default: 8)")
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--measure", metavar="TIMES", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(json.loads(args.measure))))
        return
    from penstock_bench import machine
    from penstock_bench.statistics import FEWEST_PAIRS, compare

    if args.rounds < FEWEST_PAIRS:
        parser.error(f"--rounds {args.rounds}: fewer than {FEWEST_PAIRS} give no interval")
    versions = {name: Path(folder) for name, _, folder in (text.partition("=") for text in args.version)}
    times = {str(milliseconds): times_of(milliseconds) for milliseconds in MILLISECONDS}
    baseline = next(iter(versions))
    turns = {**versions, "control": versions[baseline]}
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in turns}
    for _ in range(args.rounds):
        for name in random.sample(list(turns), len(turns)):
            taken[name].append(run(turns[name], times))
    others = [name for name in turns if name != baseline]
    print(f"| case | {baseline}, µs a step | {' | '.join(others)} |\n|---|---:|{'---:|' * len(others)}")
    compared = {}
    for case in taken[baseline][0]:
        before = [found[case] for found in taken[baseline]]
        compared[case] = {name: compare([found[case] for found in taken[name]], before) for name in others}
        cells = [f"{c.ratio:.2f} ({c.low:.2f} to {c.high:.2f})" for c in compared[case].values()]
        print(f"| {case} | {np.median(before):,.0f} | {' | '.join(cells)} |", flush=True)
    if args.json:
        ratios = {case: {name: asdict(c) for name, c in each.items()} for case, each in compared.items()}
        everything = {"machine": machine.describe(), "rounds": args.rounds, "times": times, "us": taken, "ratios": ratios}
        args.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
