"""Define the data classes that describe a benchmark: workloads, their variants, and what a variant measures.

`outcome.py` defines its results.

A *suite* is a module of *workloads*. A workload is one task; its *variants* do the task with different libraries. A *round*
starts every variant in a fresh process, and one of them a second time: the A/A *control*. Its two processes differ only by
chance. If all variants of a workload are *live*, the processes of a round stay warm side by side and take *turns*. In its turn, a
process runs a *block* of a fraction of a second, while the others wait. Otherwise they run one after the other, each once. A
process gives one *sample*, which has a number for every *metric* of the workload. A *scored* workload counts instead of timing:
its numbers are the same in each run, so it has one round and no control.

At their top, this module and the suites' modules import only Python's standard library and NumPy. A variant may run in an
interpreter that has nothing else installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from penstock_bench.environment import Environment

SizeName = Literal["full", "quick"]
Outputs = Mapping[str, np.ndarray]


# Shorter than most bursts in which others take a machine's time, and long beside what it takes to fill the caches again.
SLICE_SECONDS = 0.05


class VerificationError(Exception):
    """An error in a variant's results: it did not do the workload's task, so its time is not used."""


@dataclass(frozen=True)
class Metric:
    """A quantity that is measured for each variant.

    Attributes:
      name: such as "step"; the key in `Measurement.values` and `Measurement.steps`.
      unit: as the report prints it, such as "ms".
      better: "higher", "lower", or "zero" where a value closer to 0 is better, as for an error.
      ideal: the value of a perfect variant, in `unit`; None where it is not known.
    """

    name: str
    unit: str
    better: Literal["higher", "lower", "zero"]
    ideal: float | None = None


@dataclass(frozen=True)
class Target:
    """A bound that a variant should reach: a lower bound where higher is better, otherwise an upper bound.

    Attributes:
      variant: the name of the variant; None for all variants of a scored workload.
      metric: the name of the metric.
      bound: in the metric's unit, or a ratio if `relative_to` is given.
      relative_to: the variant whose value is multiplied by `bound`; None where `bound` is in the metric's unit.
      over: which variants must reach the bound if `variant` is None: "every" variant, at least "half", their "median", or the
        "total" of all.
    """

    variant: str | None
    metric: str
    bound: float
    relative_to: str | None = None
    over: Literal["every", "half", "median", "total"] = "every"


@dataclass(frozen=True)
class Remarks:
    """Text that goes into the report beside the numbers of a scored variant.

    Attributes:
      columns: additional cells of the variant's row: from the column's name to the cell.
      tables: additional tables: from the title to the rows. A row maps column names to cells. Equal rows of several variants
        are shown once.
      notes: sentences about limits of the numbers.
      missed: from a metric's name to the reason why the variant misses the metric's targets, whatever its number is.
      exempt: from a metric's name to the reason why the metric's targets do not count the variant.
      failure: why the variant failed; the numbers that it got before are kept. Empty if it did not fail.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, Sequence[Mapping[str, str]]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    missed: Mapping[str, str] = field(default_factory=dict)
    exempt: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class Measurement:
    """The numbers of one run; each metric is in `values`, in `steps`, or in both.

    Attributes:
      values: from a metric's name to its number for the run.
      details: how the numbers were made, for readers of the JSON.
      steps: from a metric's name to its number for each step, in order and without warm-up. If `values` lacks the metric, the
        run's number is the median of the steps without the first and the last tenth. A median hides a stall in one step of
        ten: to measure stalls, give the mean in `values`.
      evidence: results that must be equal in all variants and all runs, such as a loss. The tolerance is the one with the same
        name in the workload's `Agreement`.
      remarks: text for the report; scored workloads only.
      parts: several measurements from one run; scored workloads only. The key is appended to the variant's name: the part
        "loose" of the variant "mlp 2x4" is "mlp 2x4 loose" in the report. The run then has no numbers of its own.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    steps: Mapping[str, Sequence[float]] = field(default_factory=dict)
    evidence: Mapping[str, float] = field(default_factory=dict)
    remarks: Remarks = field(default_factory=Remarks)
    parts: Mapping[str, Measurement] = field(default_factory=dict)


@dataclass(frozen=True)
class Live:
    """A variant that is compiled and warm, and waits for its turn without using the processor.

    Attributes:
      blocks: from a metric's name to a function. The function gets a number of seconds, works for about so long, at least one
        step, and returns the metric's number for this time, such as the mean of its steps in milliseconds.
      finish: called after the last block; returns evidence and details, without numbers. It raises `VerificationError` if the
        results of the blocks are wrong.
    """

    blocks: Mapping[str, Callable[[float], float]]
    finish: Callable[[], Measurement] = Measurement


@dataclass(frozen=True)
class Variant:
    """An implementation of a workload's task with one library. It has either `measure` or `live`.

    Attributes:
      name: unique in its workload.
      measure: called with one of the workload's sizes, in a fresh process; returns a measurement. It raises
        `VerificationError` if the results are wrong.
      requires: modules that must be installed. Only `measure` and `outputs` import them.
      note: a sentence that readers need to interpret the number.
      unsuited: why the variant cannot do this workload; empty if it can.
      environment: the interpreter that it runs in; None for this one.
      outputs: called with a size; returns arrays by name. The workload's `Agreement` compares them before any timing.
      live: called with a size, in a fresh process; returns a context in which the variant is warm. At its end, threads and files
        are closed.
      variables: environment variables of its process, in place of those that the user has set.

    Raises:
      ValueError: it has both or none of `measure` and `live`.
    """

    name: str
    measure: Callable[[Any], Measurement] | None = None
    requires: tuple[str, ...] = ()
    note: str = ""
    unsuited: str = ""
    environment: Environment | None = None
    outputs: Callable[[Any], Outputs] | None = None
    live: Callable[[Any], AbstractContextManager[Live]] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.measure is None) == (self.live is None):
            raise ValueError(f"variant {self.name!r} has {'both' if self.live else 'none'} of measure and live; it needs one")


@dataclass(frozen=True)
class Agreement:
    """The outputs that variants must have in common before they are timed.

    Outputs are arrays by name; "update: head/bias" belongs to the quantity "update". See `parity.relative_differences`.

    Attributes:
      name: of the computation. Workloads whose agreements have the same name are checked once in a run.
      reference: a variant whose outputs are taken as correct; it is never timed.
      tolerances: from a quantity to the largest relative difference from the reference that is accepted.
      least: from a quantity to the smallest difference that is accepted. A variant with a smaller one has computed in a
        higher precision than the workload prescribes.
      evidence: from a name in `Measurement.evidence` that is not a quantity to its tolerance.
      one_by_one: whether the outputs of one variant are computed at a time, and not of as many as there are cores.
      floor: an output that is tiny compared with the others of its quantity is rounding noise, such as the gradient of a bias
        that cancels out. Its difference is relative to this share of the others' typical size, not to its own size.
    """

    name: str
    reference: Variant
    tolerances: Mapping[str, float]
    least: Mapping[str, float] = field(default_factory=dict)
    evidence: Mapping[str, float] = field(default_factory=dict)
    one_by_one: bool = False
    floor: float = 0.01


@dataclass(frozen=True)
class Workload:
    """A task, the variants that do it, and the metrics that compare them.

    Attributes:
      name: unique in its suite.
      title: a description for the report. "{records:,}" in it is replaced by that field of the size; the same holds for the
        variants' notes.
      metrics: the quantities that every variant measures.
      baseline: the name of the variant that the others are divided by; None if nothing is compared.
      variants: the implementations, in the order of the report.
      sizes: the argument of `Variant.measure`, for "full" and "quick". A quick run checks that everything works; its times
        mean nothing.
      targets: bounds that the report judges.
      time_limit: the seconds after which one run of a variant is ended as a failure.
      agreement: outputs to compare before timing; None if each variant verifies its results by itself.
      scored: the numbers are counted, not timed. They are the same in each run, and a variant may lack some of them.
      method: for a scored workload, how its numbers are made.
      verifies: what each process verifies outside of the timed part, for the report, such as "each record arrives once". Empty if
        nothing is verified.
      only_together: nothing more is measured when fewer than two variants are left.
      block_seconds: the length of a block, for live variants; 0.2 to 1 is short for the drift of a machine, and long beside the
        change from one process to the next.
      slice_seconds: for live variants that are stopped and continued within their blocks, so that the blocks of a turn run at the
        same time (`slices.py`): how long one works before the next one does. None to run the blocks one after the other, which a
        workload needs whose variants sleep, or measure time otherwise than by `working_clock.now` (as a `StepClock` does).

    Raises:
      ValueError: slices shorter than a millisecond, of which most would be the change from one process to the next; or a title
        or a note with a name in braces that a size has not.
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
    verifies: str = ""
    only_together: bool = False
    block_seconds: float = 0.5
    slice_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.slice_seconds is not None and not self.slice_seconds >= 1e-3:
            raise ValueError(f"workload {self.name!r} has slices of {self.slice_seconds} s; they must have 0.001 s or more")
        for size in self.sizes:
            for text in (self.title, *(variant.note for variant in self.variants)):
                self.fill(text, size)

    @property
    def live(self) -> bool:
        """Tell whether all variants can take turns."""
        return not self.scored and all(variant.live is not None for variant in self.variants)

    def variant(self, name: str) -> Variant:
        """Return the variant of this name, which may be the reference of the agreement.

        Raises:
          StopIteration: there is none.
        """
        reference = [self.agreement.reference] if self.agreement else []
        return next(variant for variant in (*self.variants, *reference) if variant.name == name)

    def metric(self, name: str) -> Metric:
        """Return the metric of this name.

        Raises:
          StopIteration: there is none.
        """
        return next(metric for metric in self.metrics if metric.name == name)

    def fill(self, text: str, size: SizeName) -> str:
        """Return a title or a note in which the fields of the size replace the names in braces.

        Raises:
          ValueError: the size has no field of a name in braces.
        """
        fields = getattr(self.sizes[size], "__dict__", {})
        try:
            return text.format_map(fields)
        except (LookupError, ValueError, AttributeError) as error:
            raise ValueError(
                f"workload {self.name!r}: {text!r} has a name in braces that its size {size!r} has not ({error!r}): use "
                f"{', '.join(f'{{{name}}}' for name in fields) or 'none'}, and double other braces"
            ) from error
