"""Measure how far plans are from the best of all layouts, by the proof of the search: the table of docs/search.md.

    python bench/scripts/proved_gaps.py --json gaps.json

Each step of the suites is planned on 8 devices without compiling anything: on the mesh 2 × 4, or with the mesh searched.
`penstock bench shard` has the same three limits; here, predicted memory sets them: the memory of the hardware (loose), half of
what data parallelism needs (half), and 1.02 times what the smallest baseline needs (tight). The last column divides the bound by
the time of the fastest baseline within the limit, so that no plan can gain more. Steps whose packages are missing are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np

from penstock.shard.mesh.compiler_models import COMPILER_MODELS
from penstock.shard.mesh.hardware import find_hardware
from penstock.shard.mesh.shapes import candidate_shapes
from penstock.shard.search.baselines import DATA_PARALLEL
from penstock.shard.search.costs import GAP
from penstock.shard.search.solver import best_baselines, prepare_meshes, search_meshes
from penstock.shard.trace.step import trace
from penstock_bench import machine
from penstock_bench.suites.shard import steps

SUITES = ("zoo", "outside", "keras")
MESHES = {"2x4": {"data": 2, "model": 4}, "searched": None}
_COLUMNS = ("steps", "mesh", "limit", "searches", "nothing fits", "gap ≤ 1 %", "median", "95 %", "worst")
_COLUMNS += ("seconds: median", "95 %", "worst", "bound over baseline: median")


@dataclass(frozen=True)
class Found:
    """The proof of a search.

    Attributes:
      fastest, bound: seconds of the fastest layout, and of the bound. None if none was found, and if none fits.
      seconds: of the search.
      baseline: seconds of the fastest baseline within the limit; None if none fits.
    """

    suite: str
    step: str
    mesh: str
    limit: str
    fastest: float | None
    bound: float | None
    seconds: float
    baseline: float | None

    @property
    def gap(self) -> float:
        """Return the proved gap; 0 if nothing fits, which is proved, and infinite if that is not proved."""
        if self.fastest is None:
            return math.inf if self.bound is not None else 0.0
        return max(0.0, self.fastest / self.bound - 1) if self.bound else 0.0


def search_step(suite: str, name: str, meshes: Sequence[str], chip: str) -> Iterator[Found]:
    """Yield the proof of each mesh and limit of a step."""
    model = steps.load(suite, name)
    traced = trace(model.step, (jax.eval_shape(model.init), model.batch(0)), kwargs={})
    hardware = find_hardware(chip)
    compiler = COMPILER_MODELS[hardware.platform]
    for mesh in meshes:
        shape = MESHES[mesh]
        shapes, _ = candidate_shapes(shape, None if shape else 8)
        prepared = prepare_meshes(traced, shapes, hardware, None, {}, compiler)
        memory = {each: plan.candidate.memory for each, plan in best_baselines(prepared, math.inf).items()}
        limits = {"loose": float(hardware.memory)}
        limits |= {"half": memory[DATA_PARALLEL] / 2, "tight": 1.02 * min(memory.values())}
        for limit, size in limits.items():
            # Prepared again, because a search keeps what an earlier one has found.
            prepared = prepare_meshes(traced, shapes, hardware, None, {}, compiler)
            begun = time.perf_counter()
            proof = search_meshes(prepared, size).proof
            assert proof is not None
            took = time.perf_counter() - begun
            baselines = (plan.candidate for plan in best_baselines(prepared, size).values())
            baseline = min((each.seconds for each in baselines if each.memory <= size), default=None)
            yield Found(suite, name, mesh, limit, proof.fastest, proof.seconds, took, baseline)


def report(found: Sequence[Found]) -> Iterator[str]:
    """Yield the lines of the table, as Markdown."""
    groups: dict[tuple[str, str, str], list[Found]] = defaultdict(list)
    for each in found:
        groups[each.suite, each.mesh, each.limit].append(each)
    yield f"| {' | '.join(_COLUMNS)} |"
    yield f"|{'---|' * 3}{'--:|' * (len(_COLUMNS) - 3)}"
    for key, each in [*groups.items(), (("all", "", ""), list(found))]:
        gaps, took = [one.gap for one in each], [one.seconds for one in each]
        within = sum(gap <= GAP * (1 + 1e-9) for gap in gaps)
        cells = [str(len(each)), str(sum(one.bound is None for one in each)), str(within)]
        cells += [f"{value:.2%}" for value in _figures(gaps)] + [f"{value:.1f}" for value in _figures(took)]
        over = [one.bound / one.baseline for one in each if one.bound and one.baseline]
        cells.append(f"{np.median(over):.2f}" if over else "–")
        yield f"| {' | '.join([*key, *cells])} |"
    for each in sorted(found, key=lambda one: -one.gap):
        if each.gap > GAP * (1 + 1e-9):
            name = f"{each.suite} {each.step}, {each.mesh}, {each.limit}"
            yield f"above {GAP:.0%}: {name}: {each.gap:.2%} after {each.seconds:.1f} s"


def _figures(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the value that 95 % do not exceed, and the largest."""
    return float(np.median(values)), float(np.quantile(values, 0.95, method="higher")), max(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", choices=SUITES, help="may be given several times (default: all)")
    parser.add_argument("--mesh", action="append", choices=tuple(MESHES), help="may be given several times (default: all)")
    parser.add_argument("--chip", choices=("tpu-v5e", "h100"), default="tpu-v5e", help="default: %(default)s")
    parser.add_argument("--only", action="append", metavar="STEP", help="this step; may be given several times (default: all)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the proof of each search, after each step")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    found: list[Found] = []
    described = machine.describe()
    for suite in args.suite or SUITES:
        for name in steps.names(suite):
            if args.only and name not in args.only:
                continue
            try:
                found += search_step(suite, name, args.mesh or list(MESHES), args.chip)
            except ImportError as error:
                print(f"{suite} {name} is left out: {error}", file=sys.stderr)
            if args.json:
                content = {"machine": described, "searches": [asdict(each) for each in found]}
                args.json.write_text(json.dumps(content, indent=1) + "\n")
    print("\n".join(report(found)))


if __name__ == "__main__":
    main()
