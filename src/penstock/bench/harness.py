"""Runs the variants of workloads, interleaved, each in a fresh process.

Machines drift: they warm up, and others use them too. So a round runs every variant of every workload once, in an order of
its own, and variants are compared within rounds. A fresh process for each run keeps one variant's threads, caches and imports
away from the next.
"""

from __future__ import annotations

import importlib.util
import math
import os
import random
import tempfile
import time
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.bench import statistics
from penstock.bench.model import Agreement, Failure, Missing, Outcome, Outputs, Parity, Sample, SizeName, Variant, Workload
from penstock.bench.parity import compare_outputs
from penstock.bench.process import Finished, run_variant

# Names on the package index that differ from the module's.
_PACKAGES = {"keras_hub": "keras-hub", "PIL": "pillow"}


@dataclass
class Progress:
    """What was measured of one workload so far.

    Attributes:
      module: that the workload's suite is in; worker processes import it by this name.
      running: names of the variants that take part in the next round.
      control: the one that runs twice in each; None before the first round.
    """

    module: str
    workload: Workload
    running: list[str]
    missing: tuple[Missing, ...]
    control: str | None = None
    samples: list[Sample] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    parity: list[Parity] = field(default_factory=list)

    def outcome(self, size: SizeName) -> Outcome:
        return Outcome(
            self.workload,
            size,
            self.control,
            tuple(self.samples),
            tuple(self.failures),
            self.missing,
            tuple(self.parity),
        )

    def fail(self, variant: str, number: int | None, reason: str, output: str = "") -> None:
        """Leave the variant out from now on. Its reason stays the first one."""
        if variant in self.running:
            self.running.remove(variant)
            self.failures.append(Failure(variant, number, reason, output))
            self.compare_with_one_that_runs()

    def compare_with_one_that_runs(self) -> None:
        """Where the baseline takes no part, the first that does is the baseline: what is measured is compared with something."""
        if self.workload.baseline and self.running and self.workload.baseline not in self.running:
            self.workload = replace(self.workload, baseline=self.running[0])


@dataclass
class _Compared:
    """What is known of an agreement: the reference's outputs, and how far each variant is from them, or why it has none."""

    reference: Outputs | Failure
    variants: dict[str, list[Parity] | Failure] = field(default_factory=dict)


class Harness:
    """Measures workloads round by round. `close` it, or use it as a context manager: it has a temporary folder.

    Args:
      chosen: pairs of a suite's module, by name, and one of its workloads.
      variants: names of those that are to run; None for all.
      seed: of the order of the runs within each round.
      say: is told what runs next.
    """

    def __init__(
        self,
        chosen: Sequence[tuple[str, Workload]],
        size: SizeName,
        seed: int,
        variants: Collection[str] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ):
        self.size: SizeName = size
        self.seed = seed
        self._say = say
        self._begin = time.perf_counter()
        # What a library leaves running may still write there.
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-bench-", ignore_cleanup_errors=True)
        self._cache = Path(self._folder.name) / "cache"
        self._cache.mkdir()
        self._compared: dict[str, _Compared] = {}
        self.progress = [_begin(module, workload, variants) for module, workload in chosen]

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._folder.cleanup()

    @property
    def seconds(self) -> float:
        """Since the harness was made."""
        return time.perf_counter() - self._begin

    def outcomes(self) -> tuple[Outcome, ...]:
        return tuple(progress.outcome(self.size) for progress in self.progress)

    def check_agreement(self) -> None:
        """Compute what the variants of each workload must agree on, and leave out those that do not."""
        for progress in self.progress:
            if progress.workload.agreement and progress.running:
                self._check(progress, progress.workload.agreement)

    def round(self, number: int, only: Collection[str] | None = None) -> None:
        """Run every variant once more, and the controls twice.

        Args:
          number: of the round, from 0.
          only: names of the workloads to run; None for all.

        Raises:
          KeyboardInterrupt: Ctrl-C; what was measured before stays.
        """
        for progress in self.progress:
            if only is None or progress.workload.name in only:
                self._round(progress, number)

    def _round(self, progress: Progress, number: int) -> None:
        progress.control = _control(progress)
        # All that there are, so that the order of the others stays as it is when one fails.
        runs = [(variant.name, False) for variant in progress.workload.variants]
        runs += [(progress.control, True)] if progress.control else []
        evidence: list[tuple[str, Mapping[str, float]]] = []
        for variant, again in round_order(runs, self.seed, progress.workload.name, number):
            if variant not in progress.running:
                continue
            position = len(evidence)
            self._say(f"round {number + 1}, {progress.workload.name}: {variant}{' (A/A control)' if again else ''}")
            started, load = self.seconds, _load()
            finished = self._run(progress, progress.workload.variant(variant))
            reason = finished.reason or _lacks(progress.workload, finished.result)
            if reason or finished.result is None:
                progress.fail(variant, number, reason or "wrote no result", finished.output)
                continue
            values, steps = _numbers(finished.result)
            seconds = self.seconds - started
            progress.samples.append(
                Sample(variant, again, number, position, started, seconds, load, values, steps, finished.result["details"])
            )
            evidence.append((variant, finished.result["evidence"]))
        _check_evidence(progress, number, evidence)

    def _check(self, progress: Progress, agreement: Agreement) -> None:
        if agreement.name not in self._compared:
            self._compared[agreement.name] = _Compared(self._compute(progress, agreement, agreement.reference))
        compared = self._compared[agreement.name]
        if isinstance(compared.reference, Failure):
            reason = f"not timed: its reference, {agreement.reference.name}, failed"
            for name in list(progress.running):
                progress.fail(name, None, reason, compared.reference.output)
            return
        for name in list(progress.running):
            if name not in compared.variants:
                found = self._compute(progress, agreement, progress.workload.variant(name))
                compared.variants[name] = (
                    found if isinstance(found, Failure) else compare_outputs(name, found, compared.reference, agreement)
                )
            parity = compared.variants[name]
            if isinstance(parity, Failure):
                progress.fail(name, None, parity.reason, parity.output)
                continue
            progress.parity += parity
            if apart := [row for row in parity if not row.agreed]:
                progress.fail(name, None, "not timed: it computes something else; " + "; ".join(map(_apart, apart)))

    def _compute(self, progress: Progress, agreement: Agreement, variant: Variant) -> Outputs | Failure:
        if variant.outputs is None:
            return {}
        self._say(f"parity, {agreement.name}: {variant.name}")
        path = Path(self._folder.name) / "outputs.npz"
        path.unlink(missing_ok=True)  # nobody is judged by another's
        finished = self._run(progress, variant, path)
        reason = finished.reason
        if reason is None:
            try:
                with np.load(path, allow_pickle=False) as file:
                    return dict(file)
            except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
                reason = f"its outputs cannot be read: {error}"
        return Failure(variant.name, None, f"computing what is compared: {reason}", finished.output)

    def _run(self, progress: Progress, variant: Variant, outputs: Path | None = None) -> Finished:
        return run_variant(progress.module, progress.workload, variant, self.size, self._cache, outputs)


def lacks(variant: Variant) -> Missing | None:
    """Why the variant can take no part, with the command that installs what it needs; None where it can."""
    if variant.unsuited:
        return Missing(variant.name, variant.unsuited)
    command = ""
    if variant.environment:
        command = variant.environment.command if variant.environment.lacks(variant.requires) else ""
    elif absent := [module for module in variant.requires if importlib.util.find_spec(module) is None]:
        command = f"pip install {' '.join(_PACKAGES.get(module, module) for module in absent)}"
    return Missing(variant.name, "not installed", command) if command else None


def round_order(runs: Sequence[tuple[str, bool]], seed: int, workload: str, number: int) -> list[tuple[str, bool]]:
    """The runs in the order of this round, which is the same for the same seed.

    Every second round has the order of the one before it backwards, so that what gets slower at a steady pace does as
    much harm to each variant as to any other.
    """
    order = list(runs)
    random.Random(f"{seed}/{workload}/{number // 2}").shuffle(order)
    return order[::-1] if number % 2 else order


def _begin(module: str, workload: Workload, variants: Collection[str] | None) -> Progress:
    names = [variant.name for variant in workload.variants if variants is None or variant.name in variants]
    missing = tuple(found for name in names if (found := lacks(workload.variant(name))))
    absent = {one.variant for one in missing}
    progress = Progress(module, workload, [name for name in names if name not in absent], missing)
    progress.compare_with_one_that_runs()
    return progress


def _control(progress: Progress) -> str | None:
    """The baseline where it runs, or else the first that does; the same in all rounds as long as it lasts."""
    for name in (progress.control, progress.workload.baseline, *progress.running):
        if name in progress.running:
            return name
    return None


def _numbers(result: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, list[float]]]:
    steps = {name: [float(step) for step in series] for name, series in result["steps"].items()}
    return {**{name: statistics.typical(series) for name, series in steps.items()}, **result["values"]}, steps


def _lacks(workload: Workload, result: Mapping[str, Any] | None) -> str | None:
    """Why a worker's result is none."""
    wanted = {metric.name for metric in workload.metrics}
    if result is None or {*result.get("values", ()), *result.get("steps", ())} != wanted:
        return "ended without a measurement of every metric"
    if empty := [name for name, series in result["steps"].items() if not series]:
        return f"timed no step of {', '.join(empty)}"
    numbers = [*result["values"].items(), *((name, step) for name, series in result["steps"].items() for step in series)]
    if odd := [f"{name} is {value}" for name, value in numbers if not math.isfinite(value)]:
        return f"measured no number: {odd[0]}"
    return None


def _check_evidence(progress: Progress, number: int, evidence: Sequence[tuple[str, Mapping[str, float]]]) -> None:
    """Leave out the variants that computed something else than most when they were timed: both, where there are two.

    Each may be off the truth by the tolerance of the workload's agreement, and so may the median.
    """
    agreement = progress.workload.agreement
    for name, tolerance in (agreement.tolerances if agreement else {}).items():
        by_variant = {variant: shown[name] for variant, shown in evidence if name in shown}  # the control has one vote
        numbers = [value for value in by_variant.values() if math.isfinite(value)]
        center = float(np.median(numbers)) if numbers else math.nan
        for variant, shown in evidence if by_variant else ():
            value = shown.get(name, math.nan)  # others have it
            if not abs(value - center) <= 2 * tolerance * abs(center):  # NaN is not
                reason = f"computed something else when it was timed: its {name} is {value:g}, the variants' median {center:g}"
                progress.fail(variant, number, reason)


def _apart(row: Parity) -> str:
    if row.difference < row.least:
        return (
            f"{row.worst} is only {row.difference:.2g} from the reference, which this precision cannot be (least {row.least:g})"
        )
    return f"{row.worst} is {row.difference:.2g} from the reference (tolerance {row.tolerance:g})"


def _load() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
