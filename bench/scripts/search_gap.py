"""Measure how far the plans that the search finds are from the best of all plans: the table of docs/search.md.

    python bench/scripts/search_gap.py

Input: small training and inference steps, random programs and random graphs, on meshes of one, two and three axes, without a
memory limit and with two. Output: a table in Markdown of the search's plan over the best of all, which is found by an
independent method (`tests/shard/search/exhaustive.py`). All is drawn from fixed seeds: the table is the same each time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.shard.search import programs
from tests.shard.search.exhaustive import Exhaustive, TooLarge
from tests.shard.search.gap import Case, Gap, case_of, gap, limits_of, random_case

_MESHES = (programs.ONE_AXIS, *programs.MESHES)
_BEST = 1.001
"""A plan is called the best up to this: the search gives away that much time for a layout that stores less."""
_WITHOUT, _WITH = "none", "20 %, 60 %"
_COLUMNS = ("problems", "mesh", "limit", "searches", "known", "fastest: best", "median", "95 %", "worst")
_COLUMNS += ("taken: best", "median", "95 %", "worst")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50, help="random programs, and graphs, for each mesh (default: %(default)s)")
    parser.add_argument("--most", type=int, default=300_000, help="plans to look at one by one (default: %(default)s)")
    parser.add_argument("--log", action="store_true", help="print each problem as well")
    args = parser.parse_args()
    begun, skipped = time.perf_counter(), 0
    found: dict[tuple[str, str, str], list[Gap]] = defaultdict(list)
    for mesh in _MESHES:
        shape = " × ".join(map(str, mesh.values()))
        for kind, name, case in _cases(mesh, args.seeds):
            try:
                every = Exhaustive(case.costs)
                limits = [float("inf"), *limits_of(case, every)]
                gaps = [gap(case, every, limit, args.most) for limit in limits]
            except TooLarge:
                skipped += 1
                continue
            found[kind, shape, _WITHOUT].append(gaps[0])
            found[kind, shape, _WITH] += gaps[1:]
            if args.log:
                print(kind, name, shape, *gaps, file=sys.stderr, flush=True)
    print("|", " | ".join(_COLUMNS), "|")
    print("|" + "---|" * len(_COLUMNS))
    for (kind, shape, limit), gaps in sorted(found.items(), key=lambda each: (each[0][2], each[0][0], len(each[0][1]), each[0])):
        print("|", " | ".join([kind, shape, limit, *_row(gaps)]), "|")
    bounded = [each.seconds for gaps in found.values() for each in gaps if not _known(each)]
    print(f"\n{len(bounded)} searches have only a bound, of at most (median, 95 %, worst) {', '.join(_figures(bounded)[1:])}")
    print(f"{skipped} problems were too large; {time.perf_counter() - begun:.0f} s")


def _cases(mesh: dict[str, int], seeds: int) -> Iterator[tuple[str, str, Case]]:
    """Yield each problem for a mesh: its kind, its name and itself."""
    for name, step in programs.steps(mesh).items():
        model = programs.model_of(step)
        for hardware in programs.HARDWARE:
            yield "steps", f"{name} on {hardware.name}", case_of(model, mesh, hardware)
    for seed in range(seeds):
        model = programs.model_of(programs.random_step(seed, 2 + seed % 4))
        yield "random programs", str(seed), case_of(model, mesh, programs.HARDWARE[seed % len(programs.HARDWARE)])
    for seed in range(seeds):
        yield "random graphs", str(seed), random_case(seed, mesh, 3 + seed % 3)


def _known(found: Gap) -> bool:
    """Say whether the best plan is known, or the bound proves that it was found."""
    return found.exact or found.seconds <= _BEST


def _row(gaps: Sequence[Gap]) -> list[str]:
    """Return the columns of some searches: seconds of the fastest plan, and of the plan that is taken."""
    known = [each for each in gaps if _known(each)]
    fastest, taken = [each.seconds for each in known], [each.taken for each in known]
    return [str(len(gaps)), str(len(known)), *_figures(fastest), *_figures(taken)]


def _figures(ratios: Sequence[float]) -> list[str]:
    """Return how many are the best, the median, the ratio that 95 % do not exceed, and the largest."""
    if not ratios:
        return [""] * 4
    figures = np.median(ratios), np.quantile(ratios, 0.95, method="higher"), max(ratios)
    return [str(sum(each <= _BEST for each in ratios)), *(f"{each:.3f}" for each in figures)]


if __name__ == "__main__":
    main()
