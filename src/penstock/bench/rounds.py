"""Run the variants of workloads in interleaved rounds: workloads go in, outcomes come out.

The speed of a machine drifts: it warms up, and other users share it. So a round runs every variant of every workload once, in
an order of its own, and variants are compared within rounds. Each run has a fresh process, so that threads, caches and imports
of one variant do not affect the next. A scored workload has one round, in the order of its variants.
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
from penstock.bench.model import Agreement, Outputs, Remarks, SizeName, Variant, Workload
from penstock.bench.outcome import Failure, Missing, Outcome, Parity, Sample
from penstock.bench.parity import compare_outputs
from penstock.bench.process import Finished, run_variant

# Modules whose package on PyPI has another name.
_PACKAGES = {
    "keras_hub": "keras-hub",
    "PIL": "pillow",
    "haiku": "dm-haiku",
    "e3nn_jax": "e3nn-jax",
    # Later releases have no models in Flax.
    "transformers": '"transformers==4.46.*"',
}


@dataclass
class Progress:
    """The measurements of one workload so far.

    Attributes:
      module: the module of the workload's suite; worker processes import it by this name.
      running: names of the variants that take part in the next round.
      control: the variant that runs twice in each round; None before the first one, in quick sizes, and in a scored workload.
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
        """Return the measurements so far, as frozen data."""
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
        """Record a failure, and do not run the variant again. Later failures of the variant are not recorded."""
        if variant in self.running:
            self.running.remove(variant)
            self.failures.append(Failure(variant, number, reason, output))
            self.replace_absent_baseline()

    def replace_absent_baseline(self) -> None:
        """Make the first running variant the baseline, if the workload's baseline does not run."""
        if self.workload.baseline and self.running and self.workload.baseline not in self.running:
            self.workload = replace(self.workload, baseline=self.running[0])


@dataclass
class _Compared:
    """The outputs of an agreement's reference, and each variant's differences from them, or the failures."""

    reference: Outputs | Failure
    variants: dict[str, list[Parity] | Failure] = field(default_factory=dict)


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
        self._compared: dict[str, _Compared] = {}
        self.progress = [_begin(module, workload, variants) for module, workload in chosen]

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
        for progress in self.progress:
            if progress.workload.agreement and progress.running:
                self._check(progress, progress.workload.agreement)

    def round(self, number: int, only: Collection[str] | None = None) -> None:
        """Run every variant once more, and the controls twice.

        Args:
          number: the number of the round, from 0.
          only: names of the workloads to run; None for all.

        Raises:
          KeyboardInterrupt: Ctrl-C was pressed; earlier measurements are kept.
        """
        for progress in self.progress:
            if only is None or progress.workload.name in only:
                self._round(progress, number)

    def _round(self, progress: Progress, number: int) -> None:
        """Run each variant of a workload that is still running, and the control twice."""
        evidence: list[tuple[str, Mapping[str, float]]] = []
        for variant, again in self._order(progress, number):
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
        _check_evidence(progress, number, evidence)

    def _order(self, progress: Progress, number: int) -> Sequence[tuple[str, bool]]:
        """Return the runs of a round in their order: the variant's name, and whether it is the control's second run."""
        # Order all variants, also the failed ones, so that a failure does not change the order of the others.
        runs = [(variant.name, False) for variant in progress.workload.variants]
        if progress.workload.scored or self.size == "quick":  # of quick sizes nothing is judged
            return runs
        progress.control = _control(progress)
        runs += [(progress.control, True)] if progress.control else []
        return round_order(runs, self.seed, progress.workload.name, number)

    def _check(self, progress: Progress, agreement: Agreement) -> None:
        """Compare each variant's outputs with the reference's, once for all workloads with the same agreement."""
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
        """Return the outputs that a variant computes in a fresh process, or its failure."""
        if variant.outputs is None:
            return {}
        self._say(f"parity, {agreement.name}: {variant.name}")
        path = Path(self._folder.name) / "outputs.npz"
        path.unlink(missing_ok=True)  # so that a variant is never judged by the outputs of another one
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
        """Run a variant once in a fresh process."""
        return run_variant(progress.module, progress.workload, variant, self.size, self._cache, outputs)


def lacks(variant: Variant) -> Missing | None:
    """Return why the variant cannot run, with the command that installs the missing packages; None if it can."""
    if variant.unsuited:
        return Missing(variant.name, variant.unsuited)
    command = ""
    if variant.environment:
        command = variant.environment.command if variant.environment.lacks(variant.requires) else ""
    elif absent := [module for module in variant.requires if importlib.util.find_spec(module) is None]:
        command = f"pip install {' '.join(_PACKAGES.get(module, module) for module in absent)}"
    return Missing(variant.name, "not installed", command) if command else None


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


def _begin(module: str, workload: Workload, variants: Collection[str] | None) -> Progress:
    """Return the initial progress of a workload, without the variants that cannot run."""
    names = [variant.name for variant in workload.variants if variants is None or variant.name in variants]
    missing = tuple(found for name in names if (found := lacks(workload.variant(name))))
    absent = {one.variant for one in missing}
    progress = Progress(module, workload, [name for name in names if name not in absent], missing)
    progress.replace_absent_baseline()
    return progress


def _control(progress: Progress) -> str | None:
    """Return the control of the next round: the same as before if it still runs, or else the baseline or the first variant."""
    for name in (progress.control, progress.workload.baseline, *progress.running):
        if name in progress.running:
            return name
    return None


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


def _check_evidence(progress: Progress, number: int, evidence: Sequence[tuple[str, Mapping[str, float]]]) -> None:
    """Fail the variants whose evidence differs from the median of all; with two variants that differ, fail both.

    Twice the tolerance of the workload's agreement is accepted, because both the variant and the median may be off by it.
    """
    agreement = progress.workload.agreement
    for name, tolerance in (agreement.tolerances if agreement else {}).items():
        by_variant = {variant: shown[name] for variant, shown in evidence if name in shown}  # the control has one vote
        numbers = [value for value in by_variant.values() if math.isfinite(value)]
        center = float(np.median(numbers)) if numbers else math.nan
        for variant, shown in evidence if by_variant else ():
            value = shown.get(name, math.nan)  # NaN: other variants have this number, but this one does not
            if not abs(value - center) <= 2 * tolerance * abs(center):  # `not <=`, so that NaN fails
                reason = f"computed something else when it was timed: its {name} is {value:g}, the variants' median {center:g}"
                progress.fail(variant, number, reason)


def _apart(row: Parity) -> str:
    """Word the difference between a variant and the reference."""
    if row.difference < row.least:
        return (
            f"{row.worst} is only {row.difference:.2g} from the reference, which this precision cannot be (least {row.least:g})"
        )
    return f"{row.worst} is {row.difference:.2g} from the reference (tolerance {row.tolerance:g})"


def _load() -> float | None:
    """Return the machine's load average over the last minute; None where the system has none."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
