"""Show where a step of a ViT spends its time on a CPU: in JAX with its defaults, started by `penstock run`, and in PyTorch eager.

    python bench/scripts/step_profile.py --model tiny --batch 8 --json profile.json

Each variant runs alone, in a process of its own, one after the other. So the milliseconds of two variants compare only roughly:
`penstock bench frameworks --at-best` compares them. The duration of a step, the time of the processor (system: page faults, above
all) and the page faults are of steps without a profiler. Then JAX is profiled by `jax.profiler`, whose events are the thunks of
XLA's runtime. PyTorch is profiled by `torch.profiler`; its times are of the main thread without the operations inside. A thunk
may hand a part of its work to other threads, as products do, and the profiler has no event for it. That time is under "not in an
event", the processor time outside of all events. An operation is put under a kind by its name:

- products: `dot`, `dot_general`, `addmm`, `bmm`, `mm` and convolutions
- reductions: `reduce`, `reduce-window`, sums, means and norms with their gradients, softmax
- copies: `copy`, `transpose`, `concatenate`, slices, `cat`
- fused or element by element: all others
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

_SECONDS = 20.0  # for the steps that are counted, and again for those that are profiled
_FEWEST, _MOST = 4, 20  # steps
_WARM_UP = 10  # steps, in which the heap grows
_KINDS = {
    "products": r"dot|conv(?!ert)|::(add|b|ba)?mm\b",
    "reductions": r"reduce|sum|mean|norm|softmax",
    "copies": r"copy|transpose|concatenate|slice|bitcast|::cat\b|clone",
}
_OTHER = "fused or element by element"
_OUTSIDE = "not in an event"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=("tiny", "small", "base"))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {}
    for name in ("JAX", "JAX, penstock run", "PyTorch eager"):
        results[name] = _in_fresh_process(name, args.model, args.batch)
        _print(name, results[name])
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "batch": args.batch, "results": results}, indent=1) + "\n")


def _in_fresh_process(name: str, model: str, batch: int) -> dict[str, Any]:
    from penstock_bench.launcher import variables_of_run

    before = dict(os.environ)
    try:
        if name.endswith("penstock run"):
            os.environ.update(variables_of_run()[0])
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(_profile, (name, model, batch))
    finally:
        os.environ.clear()
        os.environ.update(before)


def _profile(name: str, model: str, batch: int) -> dict[str, Any]:
    from penstock_bench.suites.frameworks.experiment import Experiment
    from penstock_bench.suites.frameworks.trainer import Trainer
    from penstock_bench.suites.frameworks.weights import fixed_batch
    from penstock_bench.suites.frameworks.workload import make_flax, make_torch_eager, workload_of

    experiment = Experiment(model, batch, "fp32", "eager", "sgd", "random")
    size = workload_of(experiment).sizes["full"]
    make = make_torch_eager if name.startswith("PyTorch") else make_flax
    trainer: Trainer = make(experiment, size)
    placed = trainer.place(fixed_batch(size.geometry, batch))
    for _ in range(_WARM_UP):
        begin = time.perf_counter()
        trainer.loss(placed)
    steps = min(_MOST, max(_FEWEST, round(_SECONDS / (time.perf_counter() - begin))))
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(steps):
        trainer.loss(placed)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    system = 1e3 * (after.ru_stime - before.ru_stime) / steps
    processor = 1e3 * (after.ru_utime - before.ru_utime) / steps + system
    operations = (_of_torch if name.startswith("PyTorch") else _of_jax)(trainer, placed, steps)
    kinds: Counter[str] = Counter()
    for operation, milliseconds in operations.items():
        kinds[next((kind for kind, pattern in _KINDS.items() if re.search(pattern, operation)), _OTHER)] += milliseconds
    kinds[_OUTSIDE] = max(0.0, processor - sum(operations.values()))
    return {
        "steps": steps,
        "ms a step": 1e3 * seconds / steps,
        "ms of the processor a step": processor,
        "of it, ms in the system": system,
        "page faults a step": (after.ru_minflt - before.ru_minflt) / steps,
        "ms a step, by kind": dict(kinds.most_common()),
        "by operation": dict(operations.most_common(15)),
    }


def _of_jax(trainer: Any, batch: Any, steps: int) -> Counter[str]:
    """Return the milliseconds that a step spends in each kind of thunk, summed over threads."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                trainer.loss(batch)
        path = next(Path(folder).rglob("*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(path))
    spent: Counter[str] = Counter()
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                operation = next((value for key, value in event.stats if key == "hlo_op"), None)
                if operation is not None:
                    spent[re.sub(r"[.\d]+$", "", operation)] += event.duration_ns / 1e6 / steps
    return spent


def _of_torch(trainer: Any, batch: Any, steps: int) -> Counter[str]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(steps):
            trainer.loss(batch)
    return Counter({event.key: event.self_cpu_time_total / 1e3 / steps for event in profiled.key_averages()})


def _print(name: str, result: dict[str, Any]) -> None:
    print(
        f"{name}: {result['ms a step']:,.0f} ms a step, {result['ms of the processor a step']:,.0f} ms of the processor, "
        f"{result['of it, ms in the system']:,.0f} of it in the system; {result['page faults a step']:,.0f} page faults a step"
    )
    for title in ("ms a step, by kind", "by operation"):
        total = sum(result["ms a step, by kind"].values())
        print(f"  {title}:")
        for key, milliseconds in result[title].items():
            print(f"    {key:48} {milliseconds:8.1f} {milliseconds / total:6.1%}")


if __name__ == "__main__":
    main()
