"""Define the data of a benchmark: what it is made of, and what running it gives. No behaviour but properties.

A *suite* is a module of *workloads*. A workload is one task; its *variants* do it with different libraries. A *round* runs
every variant once, and one of them once more: the A/A *control*, which differs from its twin by nothing but chance. Each run
gives one *sample*, which has a number for every *metric* of the workload. A *scored* workload counts instead of timing: its
numbers are the same in each run, so it has one round and no control.

This module and the suites' own import nothing that is not in Python's library and NumPy at their top: a variant may run in
an interpreter that has nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from penstock.bench.environment import Environment

SizeName = Literal["full", "quick"]
Outputs = Mapping[str, np.ndarray]


class VerificationError(Exception):
    """A variant did not deliver what the workload asks for, so its speed means nothing."""


@dataclass(frozen=True)
class Metric:
    """A number that a variant gets.

    Attributes:
      better: "zero" where the nearer to 0 is the better, as for an error.
      ideal: the value that a perfect variant would get, in the metric's unit, where that is known.
    """

    name: str
    unit: str
    better: Literal["higher", "lower", "zero"]
    ideal: float | None = None


@dataclass(frozen=True)
class Target:
    """A bound that a variant should reach: a lower one where higher is better, otherwise an upper one.

    Attributes:
      variant: None for all variants of a scored workload.
      relative_to: the variant whose value `bound` is a multiple of; None where `bound` is in the metric's unit.
      over: how all variants are taken together: every one, at least half of them, or their median.
    """

    variant: str | None
    metric: str
    bound: float
    relative_to: str | None = None
    over: Literal["every", "half", "median"] = "every"


@dataclass(frozen=True)
class Remarks:
    """Text that goes into the report beside the numbers of a scored variant.

    Attributes:
      columns: more cells of the variant's row, by column.
      tables: rows of further tables, by title; a row has its cells by column. A row that several variants have is shown once.
      notes: sentences about what the numbers leave open.
      missed: by metric, why the variant misses the metric's targets, whatever its number is.
      exempt: by metric, why the metric's targets do not count the variant.
      failure: why the variant failed, where what it found before is kept.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, Sequence[Mapping[str, str]]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    missed: Mapping[str, str] = field(default_factory=dict)
    exempt: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class Measurement:
    """The numbers of one run: each metric in `values` or in `steps`.

    Attributes:
      values: a metric's number for the whole run.
      steps: a metric's number for each step, in order and without warm-up. Where `values` has none, the run's number is
        the median of what is left after the first and last tenth are taken off. A median does not see a stall in one
        step of ten: where stalls are what is measured, give the mean in `values`.
      evidence: numbers that all variants of a workload must get alike in every run, within the tolerance that the
        workload's `Agreement` has under the same name.
      details: how the numbers were made, for the reader of the JSON.
      remarks: text for the report; scored workloads only.
      parts: measurements by the rest of their variants' names, where one run scores several: "loose" of the variant "mlp 2x4"
        is "mlp 2x4 loose" in the report. Then the run has no numbers of its own; scored workloads only.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    steps: Mapping[str, Sequence[float]] = field(default_factory=dict)
    evidence: Mapping[str, float] = field(default_factory=dict)
    remarks: Remarks = field(default_factory=Remarks)
    parts: Mapping[str, Measurement] = field(default_factory=dict)


@dataclass(frozen=True)
class Variant:
    """One way to do a workload.

    Attributes:
      measure: from one of the workload's sizes to a measurement; raises `VerificationError`. Runs in a process of its own.
      requires: modules that must be there; imported by `measure` and nobody else.
      note: what a reader must know to judge the number.
      unsuited: why it takes no part in this workload; empty where it does.
      environment: the interpreter that it runs in; None for this one.
      outputs: from a size to what the variant computes, which the workload's `Agreement` compares before anything is timed.
    """

    name: str
    measure: Callable[[Any], Measurement]
    requires: tuple[str, ...] = ()
    note: str = ""
    unsuited: str = ""
    environment: Environment | None = None
    outputs: Callable[[Any], Outputs] | None = None


@dataclass(frozen=True)
class Agreement:
    """The outputs that variants must have in common before they are timed.

    Outputs are arrays by name; "update: head/bias" belongs to the quantity "update". See `parity.relative_differences`.

    Attributes:
      name: of what is computed; workloads that share it are checked once in a run.
      reference: is never timed; what it computes is the truth.
      tolerances: for each quantity, the largest relative difference from the reference.
      least: for some quantities, the smallest difference: a variant that is nearer has computed in a higher precision than was
        asked for.
    """

    name: str
    reference: Variant
    tolerances: Mapping[str, float]
    least: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    """One task and the ways to do it.

    Attributes:
      title: what is measured; "{records:,}" in it stands for that field of the size, as it does in the variants' notes.
      baseline: the variant that ratios are to; None where there is nothing to compare.
      sizes: what `Variant.measure` gets; "quick" says nothing about speed, it shows that all works.
      time_limit: seconds that one run of a variant may take.
      agreement: None where variants verify what they do by themselves.
      scored: its numbers are counted, not timed. They are the same in each run, and a variant may lack some of them.
      method: how a scored workload's numbers are made.
    """

    name: str
    title: str
    metrics: tuple[Metric, ...]
    baseline: str | None
    variants: tuple[Variant, ...]
    sizes: Mapping[SizeName, Any]
    targets: tuple[Target, ...] = ()
    time_limit: float = 120.0
    agreement: Agreement | None = None
    scored: bool = False
    method: str = ""

    def variant(self, name: str) -> Variant:
        """Return the variant of this name, or the reference of the agreement."""
        reference = [self.agreement.reference] if self.agreement else []
        return next(variant for variant in (*self.variants, *reference) if variant.name == name)

    def metric(self, name: str) -> Metric:
        """Return the metric of this name."""
        return next(metric for metric in self.metrics if metric.name == name)

    def fill(self, text: str, size: SizeName) -> str:
        """Return the title or a note with the numbers of the size filled in."""
        return text.format_map(vars(self.sizes[size]))


@dataclass(frozen=True)
class Sample:
    """A measurement of one variant in one round.

    Attributes:
      variant: with the part's name, where the run scored several.
      again: it is the control's second run in the round.
      position: how many runs came before it in its round.
      started: seconds from the start of the benchmark.
      seconds: that its process took, from start to end.
      load: the machine's load average over the minute before it started; None where that cannot be known.
      values: each metric's number, from the steps where there are any.
    """

    variant: str
    again: bool
    round: int
    position: int
    started: float
    seconds: float
    load: float | None
    values: Mapping[str, float]
    steps: Mapping[str, Sequence[float]]
    details: Mapping[str, Any]
    remarks: Remarks = field(default_factory=Remarks)


@dataclass(frozen=True)
class Failure:
    """A variant that crashed, took too long, or did not pass verification; `output` is what its process wrote.

    Attributes:
      round: None before the first one, when outputs are compared.
    """

    variant: str
    round: int | None
    reason: str
    output: str


@dataclass(frozen=True)
class Missing:
    """A variant that takes no part.

    Attributes:
      command: installs what it lacks; empty where that is not why.
    """

    variant: str
    reason: str
    command: str = ""


@dataclass(frozen=True)
class Parity:
    """The distance of a variant's outputs from the reference's.

    Attributes:
      difference: relative; infinite where it is no number, or the shapes differ.
      worst: the output, of the quantity, that differs most.
      least: a smaller difference is none that this precision can have.
    """

    variant: str
    quantity: str
    difference: float
    tolerance: float
    worst: str
    least: float = 0.0

    @property
    def agreed(self) -> bool:
        """Tell whether the difference is within the tolerance, and not below the least."""
        return self.least <= self.difference <= self.tolerance


@dataclass(frozen=True)
class Outcome:
    """All that running one workload gave. A variant that failed once is in no later round, and has no place in a timed table.

    Attributes:
      control: the variant that ran twice in each round; None where none could run, or nothing is timed.
    """

    workload: Workload
    size: SizeName
    control: str | None
    samples: tuple[Sample, ...]
    failures: tuple[Failure, ...] = ()
    missing: tuple[Missing, ...] = ()
    parity: tuple[Parity, ...] = ()

    @property
    def rounds(self) -> int:
        """Count the rounds in which something was measured."""
        return len({sample.round for sample in self.samples})

    def by_round(self, variant: str, metric: str, again: bool = False) -> dict[int, float]:
        """Return a variant's number in each round; nothing for a variant that failed."""
        if any(failure.variant == variant for failure in self.failures):
            return {}
        mine = (sample for sample in self.samples if (sample.variant, sample.again) == (variant, again))
        return {sample.round: sample.values[metric] for sample in mine if metric in sample.values}


@dataclass(frozen=True)
class Run:
    """One run of one or more suites, with all that is needed to judge it.

    Attributes:
      seed: of the order of the variants within each round.
      seconds: that it took.
      partial: why it ended before it was done; None where it did not.
    """

    suite: str
    size: SizeName
    seed: int
    machine: Mapping[str, Any]
    outcomes: tuple[Outcome, ...]
    seconds: float
    partial: str | None = None
