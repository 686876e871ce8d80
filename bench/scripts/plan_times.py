"""Compare the planner's estimate of time with steps that run: on CPU processes, each with one device.

    python bench/scripts/plan_times.py --json times.json

Every process computes with one thread, and collectives go through gloo. First all processes together measure what a device has
while all are busy: FLOP/s of a product, memory bandwidth, bandwidth and latency of an all-reduce. Steps of the zoo are then
planned for this hardware. The plan and each of its baselines run in turns, in a shuffled order in each round.

The cores are shared, so seconds mean little: the shape of the estimate is compared. Columns are times over the times of
data parallelism, predicted and measured (medians over rounds). Below are the share of pairs of layouts that are measured in the
predicted order, and the error of the predicted ratios, with what is hidden of the collectives by three rules: nothing, as the
planner has it for CPUs; a quarter of the compute; and all that the compute can hide. A step takes three minutes on two cores, for
the most part to compile in eight processes.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

STEPS = ("mlp", "gpt2", "llama-gqa", "moe-dense", "encoder-decoder", "vit", "dit")
"""Steps of the zoo whose state of all layouts fits beside each other, and whose steps take less than some seconds."""
BASIS = "data parallel"
_BLOCK_SECONDS = 1.0
_COLLECTIVES = 32
_APART = 1.1
"""Layouts whose predicted times differ by less than this factor are no pair with an order."""
_HIDDEN = {"nothing hidden": 0.0, "a quarter": 0.25, "all": 1.0}
_GIB = 1 << 30


@dataclass(frozen=True)
class Timed:
    """A layout of a step.

    Attributes:
      step, layout: their names; the layout is "plan" or the name of a baseline.
      compute, collectives: predicted seconds.
      measured: seconds of a step in each round.
    """

    step: str
    layout: str
    compute: float
    collectives: float
    measured: tuple[float, ...]

    def predicted(self, hidden: float) -> float:
        """Return the predicted seconds, if this part of the compute hides collectives."""
        return self.compute + max(0.0, self.collectives - hidden * self.compute)


# --- in each process


def work(names: Sequence[str], rounds: int, out: Path) -> None:
    """Measure all steps in this process, together with the others; the first process writes the file."""
    hardware = measure_hardware()
    found = [each for name in names for each in measure_step(name, hardware, rounds)]
    if jax.process_index() == 0:
        figures = {"flops": hardware.flops["float32"], "memory_bandwidth": hardware.memory_bandwidth}
        figures |= {"link_bandwidth": hardware.link_bandwidth, "link_latency": hardware.link_latency}
        out.write_text(json.dumps({"hardware": figures, "layouts": [vars(each) for each in found]}))


def measure_hardware() -> Any:
    """Return the hardware of one process while all are busy. It is the same in all processes, as plans have to be."""
    from jax.experimental import multihost_utils

    from penstock.shard import Hardware

    n, size, count = 512, 16 << 20, jax.device_count()
    square, vector = jnp.ones((n, n)), jnp.ones(size)
    mesh = jax.make_mesh((count,), ("all",))
    over_all, replicated = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("all",), ()))
    all_reduce = jax.jit(lambda x: x.sum(0), out_shardings=replicated)
    summands = [jax.jit(functools.partial(jnp.ones, (count, each)), out_shardings=over_all)() for each in (1, 1 << 20)]
    product = _busy_seconds(jax.jit(lambda x: x @ x), square / n)
    update = _busy_seconds(jax.jit(lambda x: x + 1, donate_argnums=0), vector)  # donated, as the state of a step is
    small, large = (_collective_seconds(all_reduce, each) for each in summands)
    mine = np.array([2 * n**3 / product, 8 * size / update, small, large])
    flops, memory, small, large = multihost_utils.process_allgather(mine).mean(axis=0).tolist()
    ring_steps = 2 * (count - 1)
    sent = ring_steps / count * 4 * (1 << 20)
    return Hardware(
        "these processes",
        {"float32": flops},
        64 * _GIB,  # no limit: the fastest layout is asked for
        memory,
        link_bandwidth=sent / max(large - small, 1e-9),
        link_latency=small / ring_steps,
        source="measured while all processes are busy",
        platform="cpu",
        reduce_scatters=False,
    )


def _busy_seconds(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """Return the seconds of a call that only this process takes part in, while all processes repeat it for a while."""
    x = function(x).block_until_ready()
    _wait_for_all()
    calls, begin = 0, time.perf_counter()
    while (passed := time.perf_counter() - begin) < _BLOCK_SECONDS:
        x = function(x).block_until_ready()
        calls += 1
    _wait_for_all()
    return passed / calls


def _collective_seconds(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """Return the seconds of a call that all processes take part in."""
    function(x).block_until_ready()
    _wait_for_all()
    begin = time.perf_counter()
    for _ in range(_COLLECTIVES):
        function(x).block_until_ready()
    return (time.perf_counter() - begin) / _COLLECTIVES


def measure_step(name: str, hardware: Any, rounds: int) -> Iterator[Timed]:
    """Measure the plan of a step, and its baselines."""
    import penstock as ps
    from penstock_bench.suites.shard.zoo import load

    model = load(name)
    batch = model.batch(0)
    count = jax.device_count()
    mesh = jax.make_mesh((2, count // 2), ("x", "y"))
    plan = ps.plan(model.step, jax.eval_shape(model.init), batch, mesh=mesh, hardware=hardware, check=False)
    layouts = {"plan": plan, **plan.alternatives}
    running = {layout: _Running(each, model, batch) for layout, each in layouts.items()}
    steps = {layout: _steps_of_block(each) for layout, each in running.items()}
    measured: dict[str, list[float]] = {layout: [] for layout in layouts}
    order = random.Random(0)  # the same in all processes
    for _ in range(rounds):
        for layout in order.sample(sorted(running), len(running)):
            measured[layout].append(running[layout].seconds(steps[layout]))
    for layout, each in layouts.items():
        collectives = sum(one.seconds for one in each.cost.collectives)
        yield Timed(name, layout, each.cost.compute, collectives, tuple(measured[layout]))


class _Running:
    """A layout with its compiled step and its state."""

    def __init__(self, plan: Any, model: Any, batch: Any) -> None:
        self._step = plan.jit(model.step, donate_argnums=0)
        self._state, self._batch = plan.init(model.init), plan.put(batch)
        self.seconds(1)  # compiles

    def seconds(self, steps: int) -> float:
        """Return the seconds of a step, over a block of steps that all processes begin together."""
        _wait_for_all()
        begin = time.perf_counter()
        for _ in range(steps):
            self._state, loss = self._step(self._state, self._batch)
        jax.block_until_ready((self._state, loss))
        _wait_for_all()
        return (time.perf_counter() - begin) / steps


def _steps_of_block(running: _Running) -> int:
    """Return how many steps make a block, the same in all processes."""
    from jax.experimental import multihost_utils

    seconds = float(np.max(multihost_utils.process_allgather(np.array(running.seconds(1)))))
    return max(1, round(_BLOCK_SECONDS / seconds))


def _wait_for_all() -> None:
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("plan_times")


# --- the report


def report(layouts: Sequence[Timed]) -> Iterator[str]:
    """Yield the lines of the tables, as Markdown."""
    basis = {each.step: each for each in layouts if each.layout == BASIS}
    yield "| step | layout | predicted | measured | compute, predicted | collectives, predicted |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for each in layouts:
        of = basis[each.step]
        predicted = each.predicted(0) / of.predicted(0)
        parts = " | ".join(f"{seconds * 1e3:.3g} ms" for seconds in (each.compute, each.collectives))
        yield f"| {each.step} | {each.layout} | {predicted:.2f} | {_measured_ratio(each, of):.2f} | {parts} |"
    yield ""
    yield "| hidden of collectives | pairs of layouts | in the predicted order | error of a ratio: median | worst |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for rule, hidden in _HIDDEN.items():
        right, pairs = order_of_pairs(layouts, hidden)
        errors = ratio_errors(layouts, hidden)
        yield f"| {rule} | {pairs} | {right / max(pairs, 1):.0%} | {median(errors):.2f}× | {max(errors):.2f}× |"
    yield ""
    yield "| step | fastest by prediction | its measured time, over that of the fastest measured |"
    yield "| --- | --- | ---: |"
    for step in basis:
        mine = [each for each in layouts if each.step == step]
        first, fastest = min(mine, key=lambda each: each.predicted(0)), min(mine, key=lambda each: median(each.measured))
        yield f"| {step} | {first.layout} | {_measured_ratio(first, fastest):.2f} |"


def order_of_pairs(layouts: Sequence[Timed], hidden: float) -> tuple[int, int]:
    """Return how many pairs of layouts of a step are measured in the predicted order, and how many pairs there are.

    Args:
      layouts: of all steps.
      hidden: the part of the compute that hides collectives.
    """
    right = pairs = 0
    for one, other in itertools.combinations(layouts, 2):
        ratio = one.predicted(hidden) / other.predicted(hidden)
        if one.step == other.step and max(ratio, 1 / ratio) > _APART:
            pairs += 1
            right += (_measured_ratio(one, other) > 1) == (ratio > 1)
    return right, pairs


def ratio_errors(layouts: Sequence[Timed], hidden: float) -> list[float]:
    """Return by which factor, at least 1, the predicted ratio of each layout to data parallelism is off.

    Args:
      layouts: of all steps.
      hidden: the part of the compute that hides collectives.
    """
    basis = {each.step: each for each in layouts if each.layout == BASIS}
    others = [each for each in layouts if each.layout != BASIS]
    ratios = [
        each.predicted(hidden) / basis[each.step].predicted(hidden) / _measured_ratio(each, basis[each.step]) for each in others
    ]
    return [max(ratio, 1 / ratio) for ratio in ratios]


def _measured_ratio(one: Timed, other: Timed) -> float:
    """Return the median, over rounds, of the ratio of the times of two layouts."""
    return median(a / b for a, b in zip(one.measured, other.measured, strict=True))


# --- the command


def run(names: Sequence[str], processes: int, rounds: int) -> dict[str, Any]:
    """Start the processes, and return what they measured.

    Args:
      names: the steps of the zoo.
      processes: an even number.
      rounds: how often each layout runs.

    Raises:
      RuntimeError: a process failed; the message has the end of its errors.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        logs = [(Path(folder) / f"{index}.log").open("w+") for index in range(processes)]
        command = [sys.executable, __file__, "--rounds", str(rounds), "--out", str(out), *(f"--only={name}" for name in names)]
        started = [
            # Gloo writes a line to the standard output for each group of processes.
            subprocess.Popen([*command, f"--process={address},{processes},{index}"], stdout=log, stderr=log, env=_one_thread())
            for index, log in enumerate(logs)
        ]
        try:
            _wait(started)
        finally:
            for process in started:
                process.kill()
                process.wait()
        failed = [log for log, process in zip(logs, started, strict=True) if process.returncode]
        if failed:
            failed[0].seek(0)
            raise RuntimeError(f"a process failed:\n{failed[0].read()[-3000:]}")
        return dict(json.loads(out.read_text()))


def _wait(started: Sequence[subprocess.Popen]) -> None:
    """Wait until all processes have ended, or one has failed: the others would wait for it."""
    while any(process.poll() is None for process in started) and not any(process.returncode for process in started):
        time.sleep(0.2)


def _one_thread() -> Mapping[str, str]:
    """Return the environment of a process whose device computes with one thread."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip(), "NPROC": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=STEPS, help="this step; may be given several times (default: all)")
    parser.add_argument("--processes", type=int, default=8, help="an even number (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="how often each layout runs (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures")
    parser.add_argument("--process", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.only or list(STEPS)
    if args.process:
        address, count, index = args.process.split(",")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_num_cpu_devices", 1)
        jax.distributed.initialize(address, int(count), int(index))
        work(names, args.rounds, args.out)
        return
    if args.processes < 2 or args.processes % 2:
        parser.error(f"--processes {args.processes}: give an even number, for a mesh of 2 × {max(args.processes // 2, 1)}")
    from penstock_bench import machine

    figures = run(names, args.processes, args.rounds)
    layouts = [Timed(**{**each, "measured": tuple(each["measured"])}) for each in figures["layouts"]]
    print("\n".join(report(layouts)))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine.describe(), "processes": args.processes, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
