"""Measure one variant, and write the measurement to a file, or run its blocks as they are asked for. The harness starts this
program as a process.

The program is started by its path, in the interpreter that the variant needs; penstock and JAX may not be installed there.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import signal
import socket
import sys
import types
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock_bench.model import Measurement, Variant, Workload

FOLDER = "PENSTOCK_BENCH_FOLDER_OF_PENSTOCK"  # the variable by which an interpreter without penstock finds its modules
_OTHER_CLOCK = "{!r} was measured without working_clock.now: other clocks do not stop between the slices of a block"
_PR_SET_PDEATHSIG = 1  # Linux's <sys/prctl.h>


def main() -> None:
    """Measure a variant, run its blocks, or compute its outputs, as the arguments say."""
    parser = argparse.ArgumentParser(prog="penstock bench worker")
    for name in ("module", "workload", "variant", "size"):
        parser.add_argument(name)
    written = parser.add_mutually_exclusive_group(required=True)
    written.add_argument("--result", type=Path, help="measure, and write what was measured here, as JSON")
    written.add_argument("--outputs", type=Path, help="compute the outputs that variants are compared by, and write them here")
    written.add_argument("--live", type=int, metavar="FD", help="serve requests for blocks on this socket, until it is closed")
    parser.add_argument(
        "--stopped", type=int, metavar="FD", help="shared memory with the time for which this process was stopped"
    )
    args = parser.parse_args()
    sys.path.pop(0)  # this folder: its modules must not be importable as top-level modules
    _find_packages()
    from penstock_bench.suites import find

    workload = find(args.module, args.workload)
    variant, size = workload.variant(args.variant), workload.sizes[args.size]
    if args.outputs:
        import numpy as np

        assert variant.outputs is not None, f"{variant.name} has no outputs"
        np.savez(args.outputs, allow_pickle=False, **variant.outputs(size))
        return
    if args.live is not None:
        with socket.socket(fileno=args.live) as channel:
            serve(channel, variant, size, args.stopped)
        return
    measured = variant.measure(size) if variant.measure else _alone(variant, size, workload)
    args.result.write_text(json.dumps(result_of(measured)))


def serve(channel: socket.socket, variant: Variant, size: Any, stopped: int | None = None) -> None:
    """Warm a live variant up, say so, and answer requests. Requests and answers are JSON, one on each line.

    A request for a block is {"metric": …, "seconds": …}, its answer {"value": …}. The request {"finish": true} is the last one;
    its answer is the result. A request is read by a blocking call, so the main thread uses no processor while it waits.

    Args:
      channel: for requests and answers.
      variant, size: what to run.
      stopped: descriptor of the memory with the time for which this process was stopped; None if it never is.

    Raises:
      RuntimeError: a block that may be stopped was timed by another clock than `working_clock.now`.
    """
    from penstock_bench import working_clock

    if stopped is not None:
        _end_with_the_harness()
        working_clock.count_stops(stopped)
    assert variant.live is not None, f"{variant.name} is not live"
    with variant.live(size) as live, channel.makefile("rw") as lines:
        _answer(lines, {"ready": True})
        for line in lines:
            request = json.loads(line)
            if "finish" in request:
                _answer(lines, result_of(live.finish()))
                return
            before = working_clock.reads()
            value = float(live.blocks[request["metric"]](request["seconds"]))
            if before is not None and working_clock.reads() == before:
                raise RuntimeError(_OTHER_CLOCK.format(request["metric"]))
            _answer(lines, {"value": value})


def _answer(lines: Any, answer: dict[str, Any]) -> None:
    lines.write(json.dumps(answer) + "\n")
    lines.flush()


def _end_with_the_harness() -> None:
    """Let Linux kill this process when the harness ends, because a stopped process does not see that its channel is closed."""
    harness = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != harness:  # it ended before
        sys.exit()


_BLOCKS = 5  # of each metric, for a live variant that is measured alone


def _alone(variant: Variant, size: Any, workload: Workload) -> Measurement:
    """Measure a live variant that no other takes turns with: a few blocks of each metric, one after the other."""
    assert variant.live is not None
    with variant.live(size) as live:
        steps: dict[str, list[float]] = {metric.name: [] for metric in workload.metrics}
        for _ in range(_BLOCKS):
            for name, series in steps.items():
                series.append(float(live.blocks[name](workload.block_seconds)))
        finished = live.finish()
    return replace(finished, steps=steps)


def result_of(measurement: Measurement) -> dict[str, Any]:
    """Return a measurement as data for JSON, which the harness reads."""
    return {
        "values": dict(measurement.values),
        "steps": {name: list(steps) for name, steps in measurement.steps.items()},
        "evidence": dict(measurement.evidence),
        "remarks": asdict(measurement.remarks),
        "parts": {name: result_of(part) for name, part in measurement.parts.items()},
        "details": {**(_device() if "device" not in measurement.details else {}), **measurement.details},
    }


def _find_packages() -> None:
    """Make the modules of `penstock_bench` and `penstock` importable in an interpreter that has not installed them.

    `penstock/__init__.py` imports JAX, so it does not run where JAX is not installed either.
    """
    if importlib.util.find_spec("penstock_bench") is None:
        _add_package("penstock_bench", str(Path(__file__).parent))
    if importlib.util.find_spec("penstock") is None or importlib.util.find_spec("jax") is None:
        _add_package("penstock", os.environ[FOLDER])


def _add_package(name: str, folder: str) -> None:
    package = types.ModuleType(name)
    package.__path__ = [folder]
    sys.modules[name] = package


def _device() -> dict[str, str]:
    """Return the device of JAX as a detail; nothing if the variant has not imported JAX."""
    if (jax := sys.modules.get("jax")) is None:
        return {}
    device = jax.devices()[0]
    return {"device": f"{device.platform}: {device.device_kind}"}


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a process that a library under test has spawned, and which unpickles classes of penstock
    _find_packages()
