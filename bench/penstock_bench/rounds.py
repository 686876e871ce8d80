"""Run the variants of workloads in interleaved rounds, and return the outcome of each workload.

The speed of a machine drifts: it warms up, and other users share it. So variants are compared within rounds only. In a round,
live variants take turns (`live_round.py`). Others run one after the other, in an order of its own. Each round has fresh
processes. So threads, caches and imports of one variant do not affect the next, and no result depends on one process. A scored
workload has one round, in the order of its variants.
"""

from __future__ import annotations

import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock_bench import statistics
from penstock_bench.agreement import Agreements
from penstock_bench.live_round import CannotLiveError, LiveRound
from penstock_bench.model import Remarks, SizeName, Variant, Workload
from penstock_bench.outcome import Failure, Outcome, Sample
from penstock_bench.process import Finished, run_variant
from penstock_bench.progress import Progress, begin, check_evidence, control

# There is no variance to plan the first round with: it turns for as long as its processes took to start. It ends earlier after
# so many turns, or when it has used its share of the time.
_FIRST_TURNS = 20


class Harness:
    """A runner that measures workloads round by round.

    It owns a temporary folder: call `close`, or use it as a context manager.

    Args:
      chosen: pairs (name of a suite's module, one of its workloads).
      size: the name of the size to run.
      seed: of the order of the runs within each round.
      variants: names of the variants to run; None for all.
      say: is called with the name of the next run.
      after_score: is called after each run of a scored workload, so that its result can be saved: a run may take minutes.
    """

    def __init__(
        self,
        chosen: Sequence[tuple[str, Workload]],
        size: SizeName,
        seed: int,
        variants: Collection[str] | None = None,
        say: Callable[[str], None] = lambda text: None,
        after_score: Callable[[], None] = lambda: None,
    ):
        self.size: SizeName = size
        self.seed = seed
        self._say = say
        self._after_score = after_score
        self._begin = time.perf_counter()
        # A process that a library leaves running may still write there.
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-bench-", ignore_cleanup_errors=True)
        self._cache = Path(self._folder.name) / "cache"
        self._cache.mkdir()
        self.progress = [begin(module, workload, variants) for module, workload in chosen]

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the temporary folder."""
        self._folder.cleanup()

    @property
    def seconds(self) -> float:
        """Return the seconds since the harness was made."""
        return time.perf_counter() - self._begin

    def outcomes(self) -> tuple[Outcome, ...]:
        """Return what was measured so far, for each workload."""
        return tuple(progress.outcome(self.size) for progress in self.progress)

    def check_agreement(self) -> None:
        """Compare the variants' outputs with the references', and do not run those that differ too much."""
        agreements = Agreements(Path(self._folder.name), self._run, self._say)
        for progress in self.progress:
            if progress.workload.agreement and progress.running:
                agreements.check(progress, progress.workload.agreement)

    def round(
        self,
        number: int,
        only: Collection[str] | None = None,
        turns: Mapping[str, int] | None = None,
        until: float = math.inf,
        share: float = math.inf,
    ) -> None:
        """Run every variant in a fresh process, and the controls in two.

        Args:
          number: the number of the round, from 0.
          only: names of the workloads to run; None for all.
          turns: from a workload's name to the number of turns, for live variants. For others, what `repetition.py` computes;
            while it knows nothing, one turn, or as many as take the time of the start.
          until: begin no process and no turn after this time, in seconds since the harness was made.
          share: seconds for a first round of one workload, or for one or two turns if they take longer.

        Raises:
          KeyboardInterrupt: Ctrl-C was pressed; earlier measurements are kept.
        """
        for progress in self.progress:
            if only is None or progress.workload.name in only:
                if progress.live and progress.running:
                    try:
                        self._live_round(progress, number, (turns or {}).get(progress.workload.name), until, share)
                        continue
                    except CannotLiveError as error:
                        progress.live_failed(str(error))
                self._round(progress, number, until)

    def _live_round(self, progress: Progress, number: int, turns: int | None, until: float, share: float) -> None:
        """Let the variants of a workload take turns.

        Raises:
          CannotLiveError: they cannot; nothing of this round is kept.
        """
        seats = self._with_control(progress, progress.running)
        if turns is None and (planned := progress.repetition()) is not None:
            turns = planned.turns
        load = _load()
        with LiveRound(
            progress.module, progress.workload, seats, self.size, self._cache, number, self.seed, lambda: self.seconds, self._say
        ) as live:
            live.start()
            while not _enough(live, turns, self.size, share) and (self.seconds < until or not live.turns):
                live.turn()
            results = live.finish()
        for name, (reason, output) in live.failed.items():
            progress.fail(name, number, reason, output)
        progress.blocks += live.blocks
        progress.costs.append((live.starting, live.turning, live.turns))
        evidence = []
        for position, ((name, again), result) in enumerate(results.items()):
            mine = [block for block in live.blocks if (block.variant, block.again) == (name, again)]
            steps = {metric.name: [b.value for b in mine if b.metric == metric.name] for metric in progress.workload.metrics}
            values = {metric: float(np.median(series)) for metric, series in steps.items() if series}
            seconds = (live.starting + live.turning) / len(results)
            started = min((block.started for block in mine), default=self.seconds)
            progress.samples.append(
                Sample(name, again, number, position, started, seconds, load, values, steps, result["details"])
            )
            evidence.append((name, result["evidence"]))
        check_evidence(progress, number, evidence)

    def _round(self, progress: Progress, number: int, until: float) -> None:
        """Run each variant of a workload that is still running, and the control twice."""
        evidence: list[tuple[str, Mapping[str, float]]] = []
        for variant, again in self._order(progress, number):
            if variant not in progress.running or (self.seconds > until and not progress.workload.scored):
                continue
            position = len(evidence)
            self._say(f"round {number + 1}, {progress.workload.name}: {variant}{' (A/A control)' if again else ''}")
            started, load = self.seconds, _load()
            finished = self._run(progress, progress.workload.variant(variant))
            reason = finished.reason or _lacks(progress.workload, finished.result)
            if reason or finished.result is None:
                progress.fail(variant, number, reason or "wrote no result", finished.output)
                continue
            seconds = self.seconds - started
            for name, result in _parts(variant, finished.result).items():
                values, steps = _numbers(result)
                details, remarks = result["details"], Remarks(**result["remarks"])
                progress.samples.append(
                    Sample(name, again, number, position, started, seconds, load, values, steps, details, remarks)
                )
                if remarks.failure:
                    progress.failures.append(Failure(name, number, remarks.failure, ""))
            evidence.append((variant, finished.result["evidence"]))
            if progress.workload.scored:
                self._after_score()
        check_evidence(progress, number, evidence)

    def _order(self, progress: Progress, number: int) -> Sequence[tuple[str, bool]]:
        """Return the runs of a round in their order: the variant's name, and whether it is the control's second run."""
        # Order all variants, also the failed ones, so that a failure does not change the order of the others.
        runs = self._with_control(progress, [variant.name for variant in progress.workload.variants])
        if progress.workload.scored or self.size == "quick":
            return runs
        return round_order(runs, self.seed, progress.workload.name, number)

    def _with_control(self, progress: Progress, names: Sequence[str]) -> list[tuple[str, bool]]:
        """Return one run of each variant, and a second one of the control where something is judged."""
        runs = [(name, False) for name in names]
        if progress.workload.scored or self.size == "quick":
            return runs
        progress.control = control(progress)
        return runs + ([(progress.control, True)] if progress.control else [])

    def _run(self, progress: Progress, variant: Variant, outputs: Path | None = None) -> Finished:
        """Run a variant once in a fresh process."""
        return run_variant(progress.module, progress.workload, variant, self.size, self._cache, outputs)


def _enough(live: LiveRound, turns: int | None, size: SizeName, share: float) -> bool:
    """Tell whether a round of live variants has had its turns."""
    if size == "quick":
        return live.turns >= 1
    if turns is not None:
        return live.turns >= turns
    if live.turns == 1:  # a second one tells how much turns scatter; it is worth it if both take no longer than the start
        return 2 * live.turning > live.starting
    longest = min(live.starting, share - live.starting)
    return live.turns % 2 == 0 and live.turns > 0 and (live.turning >= longest or live.turns >= _FIRST_TURNS)


def round_order(runs: Sequence[tuple[str, bool]], seed: int, workload: str, number: int) -> list[tuple[str, bool]]:
    """Return the runs in the order of this round, which depends only on the arguments.

    Every second round reverses the order of the round before it. So a machine that slows down at a steady pace affects all
    variants equally.

    Args:
      runs: pairs (name of the variant, whether it is the control's second run).
      seed: the seed of the benchmark.
      workload: the workload's name; each workload has its own order.
      number: the number of the round, from 0.
    """
    order = list(runs)
    random.Random(f"{seed}/{workload}/{number // 2}").shuffle(order)
    return order[::-1] if number % 2 else order


def _numbers(result: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the number of each metric of a run, and its steps."""
    steps = {name: [float(step) for step in series] for name, series in result["steps"].items()}
    return {**{name: statistics.typical(series) for name, series in steps.items()}, **result["values"]}, steps


def _parts(variant: str, result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the results of a run, by the variants' names in the report."""
    return {f"{variant} {name}": part for name, part in result["parts"].items()} or {variant: result}


def _lacks(workload: Workload, result: Mapping[str, Any] | None) -> str | None:
    """Return why a worker's result cannot be used; None if it can. A scored variant may lack a metric."""
    wanted = {metric.name for metric in workload.metrics}
    if result is not None and result.get("parts"):
        return next((reason for part in result["parts"].values() if (reason := _lacks(workload, part))), None)
    measured = {*result.get("values", ()), *result.get("steps", ())} if result is not None else set()
    if result is None or measured - wanted or (wanted - measured and not workload.scored):
        return "ended without a measurement of every metric"
    if empty := [name for name, series in result["steps"].items() if not series]:
        return f"timed no step of {', '.join(empty)}"
    numbers = [*result["values"].items(), *((name, step) for name, series in result["steps"].items() for step in series)]
    if odd := [f"{name} is {value}" for name, value in numbers if not math.isfinite(value)]:
        return f"measured no number: {odd[0]}"
    return None


def _load() -> float | None:
    """Return the machine's load average over the last minute; None where the system has none."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
