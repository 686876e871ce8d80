"""Compare remat="auto" with the policies of `jax.checkpoint`, in programs of the TPU or GPU compiler.

Each model is planned without checkpoints, with one around each layer, and with the policies that keep products, for some limits.
Each plan is compiled. The last column is the time of the program of remat="auto" over the fastest of the others that fit: FLOPs
at the peak, and then the bytes of each collective over its link.

    python bench/scripts/recomputation.py llama-3b-16 llama-7b-16 --limits 16GiB 12GiB 9GiB
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import warnings

import jax

import penstock as ps
from penstock._bytes import format_bytes, parse_bytes
from penstock.shard import find_hardware
from penstock.shard.mesh.explicit_axes import automatic_axes
from penstock.shard.planning import Options, plan_traced, trace_with
from penstock.shard.wording import format_seconds
from penstock_bench.suites.shard import real

POLICIES = {
    "no checkpoints": None,
    "each layer": "nothing_saveable",
    "dots": "dots_saveable",
    "dots without batch dims": "dots_with_no_batch_dims_saveable",
}
AUTO = 'remat="auto"'
_HOPELESS = 2
"""A step whose smallest plan is predicted to need so many times the limit is not compiled. No prediction was further off."""


Found = tuple[float, float, float]
"""The seconds of a program, its bytes, and the seconds that it took to plan."""


def attempt(case: real.Case, limit: int, remat: str | None) -> Found | None:
    """Return what is known of the program of the fastest plan; None if none fits."""
    options = Options(devices=case.devices, memory=limit, check=case.topology, remat=remat)
    traced = trace_with(options, case.step, (jax.eval_shape(case.init), case.batch), {})
    found, begin = None, time.perf_counter()
    with automatic_axes(), contextlib.suppress(ps.PlanError):
        predicted = plan_traced(traced, options.by_prediction())
        if predicted.cost.memory.total > _HOPELESS * limit:
            return None
        begin = time.perf_counter()
        plan = plan_traced(traced, options)  # without options of a refusal
        assert plan.checked is not None
        seconds = plan.checked.seconds(find_hardware(plan.hardware), "bfloat16", plan.mesh_shape)
        found = seconds, plan.checked.memory, time.perf_counter() - begin
    print(f"{case.name}, {format_bytes(limit)}, remat={remat}: {found}, {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    return found


def plan_limits(case: real.Case, limits: list[int], remat: str | None) -> list[Found | None]:
    """Return what `attempt` returns for each limit, the largest first.

    A program that fits the next limit is planned once, and what fits no limit is not planned for the next.
    """
    found = [attempt(case, limits[0], remat)]
    for limit in limits[1:]:
        last = found[-1]
        found.append(last if last is None or last[1] <= limit else attempt(case, limit, remat))
    return found


def compare(name: str, limits: list[int], sequences: int | None, layers: int | None) -> None:
    """Print the rows of a model."""
    load = {"sequences": sequences, "layers": layers}
    results = {words: plan_limits(real.load(name, **load, policy=policy), limits, None) for words, policy in POLICIES.items()}
    results[AUTO] = plan_limits(real.load(name, **load, policy=None), limits, "auto")
    for at, limit in enumerate(limits):
        row = {words: found[at] for words, found in results.items()}
        best = min((found[0] for words, found in row.items() if found and words != AUTO), default=None)
        cells = [
            f"{format_seconds(found[0])}, {format_bytes(found[1])}, {found[2]:.0f} s" if found else "–" for found in row.values()
        ]
        ours = row[AUTO]
        ratio = f"{ours[0] / best:.2f}" if ours and best else "alone" if ours else "refused" if best else "–"
        print(f"| {name} | {format_bytes(limit)} | {' | '.join(cells)} | {ratio} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", help="as llama-7b-16")
    parser.add_argument("--limits", nargs="+", type=parse_bytes, default=[parse_bytes("16GiB")])
    parser.add_argument("--sequences", type=int, help="sequences of a chip")
    parser.add_argument("--layers", type=int)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    warnings.simplefilter("ignore")
    print(f"| model | limit | {' | '.join([*POLICIES, AUTO])} | ratio |\n|---|--:|{'--:|' * (len(POLICIES) + 2)}", flush=True)
    for name in args.cases:
        compare(name, sorted(args.limits, reverse=True), args.sequences, args.layers)


if __name__ == "__main__":
    main()
