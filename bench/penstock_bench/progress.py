"""Keep what was measured of a workload so far, and which of its variants still run."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from penstock_bench.live_pairs import round_pairs
from penstock_bench.model import SizeName, Variant, Workload
from penstock_bench.outcome import Block, Failure, Missing, Outcome, Parity, Sample
from penstock_bench.repetition import Repetition, repetition, variances

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
      blocks: what live variants measured in their turns.
      alone: why live variants run one after the other instead; empty if they take turns.
      costs: for each round of live variants, the seconds of its start, the seconds of all of its turns, and their number.
    """

    module: str
    workload: Workload
    running: list[str]
    missing: tuple[Missing, ...]
    control: str | None = None
    samples: list[Sample] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    parity: list[Parity] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    alone: str = ""
    costs: list[tuple[float, float, int]] = field(default_factory=list)

    @property
    def live(self) -> bool:
        """Tell whether the variants of the next round take turns."""
        return self.workload.live and not self.alone

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
            tuple(self.blocks),
            self.alone,
            self.repetition(),
        )

    def repetition(self) -> Repetition | None:
        """Return how the next round of live variants is made best; None before the first one."""
        starting = [start for start, _, turns in self.costs if turns]
        turning = [seconds / turns for _, seconds, turns in self.costs if turns]
        if not turning:
            return None
        # The first start compiles; later ones find it in the cache.
        usual = float(np.median(starting[1:] or starting)), float(np.median(turning))
        baseline = self.workload.baseline or (self.running[0] if self.running else None)
        if baseline is None:
            return None
        others = [(name, False) for name in self.running if name != baseline]
        others += [(baseline, True)] if self.control == baseline else []
        found = [
            variances([pairs.logs for pairs in round_pairs(self.blocks, metric.name, seat, (baseline, False))])
            for metric in self.workload.metrics
            for seat in others
        ]
        return repetition([one for one in found if one], *usual)

    def live_failed(self, reason: str) -> None:
        """Let live variants run one after the other from now on. Drop what they measured in turns: the two do not mix."""
        self.alone = reason
        self.samples.clear()
        self.blocks.clear()
        self.costs.clear()

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


def begin(module: str, workload: Workload, variants: Collection[str] | None) -> Progress:
    """Return the initial progress of a workload, without the variants that cannot run."""
    names = [variant.name for variant in workload.variants if variants is None or variant.name in variants]
    missing = tuple(found for name in names if (found := lacks(workload.variant(name))))
    absent = {one.variant for one in missing}
    progress = Progress(module, workload, [name for name in names if name not in absent], missing)
    progress.replace_absent_baseline()
    return progress


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


def control(progress: Progress) -> str | None:
    """Return the control of the next round: the same as before if it still runs, or else the baseline or the first variant."""
    for name in (progress.control, progress.workload.baseline, *progress.running):
        if name in progress.running:
            return name
    return None


def check_evidence(progress: Progress, number: int, evidence: Sequence[tuple[str, Mapping[str, float]]]) -> None:
    """Fail the variants whose evidence differs from the median of all; with two variants that differ, fail both.

    Twice the tolerance of the workload's agreement is accepted, because both the variant and the median may be off by it.
    """
    agreement = progress.workload.agreement
    tolerances = {**agreement.tolerances, **agreement.evidence} if agreement else {}
    for name, tolerance in tolerances.items():
        by_variant = {variant: shown[name] for variant, shown in evidence if name in shown}  # the control has one vote
        numbers = [value for value in by_variant.values() if math.isfinite(value)]
        center = float(np.median(numbers)) if numbers else math.nan
        for variant, shown in evidence if by_variant else ():
            value = shown.get(name, math.nan)  # NaN: other variants have this number, but this one does not
            if not abs(value - center) <= 2 * tolerance * abs(center):  # `not <=`, so that NaN fails
                reason = f"computed something else when it was timed: its {name} is {value:g}, the variants' median {center:g}"
                progress.fail(variant, number, reason)
