"""Define the results of a benchmark: samples, failures, and the outcome of each workload.

`model.py` defines its workloads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock_bench.model import Remarks, SizeName, Workload
from penstock_bench.repetition import Repetition


@dataclass(frozen=True)
class Sample:
    """A measurement of one variant in one round.

    Attributes:
      variant: the variant's name, followed by the part's name if the run scored several parts.
      again: whether this is the control's second run in the round.
      round: the round's number, from 0.
      position: the number of runs before this one in the round.
      started: seconds from the start of the benchmark.
      seconds: the duration of the process, from start to end.
      load: the machine's load average over the minute before the start; None if the system does not report it.
      values: from a metric's name to its number; computed from `steps` where `Measurement.values` lacked it.
      steps, details, remarks: as in the `Measurement`.
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
class Block:
    """A number that a live variant measured in its turn, and what happened on the machine meanwhile.

    Attributes:
      variant, again, round: as for `Sample`.
      turn: the number of the turn in the round, from 0. In a turn, each variant runs one block of the same metric.
      position: the number of blocks before this one in the turn.
      metric: the metric's name.
      value: its number.
      started: seconds from the start of the benchmark.
      seconds: the duration of the block, without the time for which it was stopped.
      cpu: the seconds of the processor that the variant's processes used.
      faults, switches: their page faults, and how often a core was taken away from one of their threads.
      others: the share of all cores' time that was used by neither them nor anybody's idling.
      reference: the seconds of the reference kernel (`reference_kernel.py`), the mean of just before and just after the block.
      slices: the number of slices in which the block ran (`slices.py`); 1 where it ran without a stop.

    The five before `slices` are None where the system does not tell, and the reference kernel's also for a block in slices.
    """

    variant: str
    again: bool
    round: int
    turn: int
    position: int
    metric: str
    value: float
    started: float
    seconds: float
    cpu: float | None
    faults: int | None
    switches: int | None
    others: float | None
    reference: float | None
    slices: int = 1


@dataclass(frozen=True)
class Failure:
    """A variant that crashed, took too long, or did not pass verification.

    Attributes:
      variant: the variant's name.
      round: the round's number; None if outputs were compared, before the first round.
      reason: the error, in one line.
      output: the text that its process wrote to stdout and stderr.
    """

    variant: str
    round: int | None
    reason: str
    output: str


@dataclass(frozen=True)
class Missing:
    """A variant that is not run.

    Attributes:
      variant: the variant's name.
      reason: why it is not run.
      command: a shell command that installs the missing packages; empty if none are missing.
    """

    variant: str
    reason: str
    command: str = ""


@dataclass(frozen=True)
class Parity:
    """The difference between a variant's outputs and the reference's, for one quantity.

    Attributes:
      variant: the variant's name.
      quantity: the outputs that are compared, such as "update".
      difference: relative; infinite where it is not a finite number, or the shapes differ.
      tolerance: the largest difference that is accepted.
      worst: the name of the output that differs most.
      least: the smallest difference that is accepted: see `Agreement.least`.
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
    """The results of one workload.

    A variant that failed once is not run in later rounds, and is left out of the tables of timed workloads.

    Attributes:
      workload, size: the workload that ran, and its size.
      control: the variant that ran twice in each round; None if no variant could run, in quick sizes, and if it is scored.
      samples: one for each run, or for each part of a run, in the order of running.
      failures: the variants that failed.
      missing: the variants that were not run.
      parity: one entry for each variant and quantity that was compared.
      blocks: what live variants measured in their turns, in the order of running.
      alone: why live variants ran one after the other instead; empty if they took turns, or if none is live.
      repetition: how the next round of live variants would be made; None before the first one, and if none took turns.
    """

    workload: Workload
    size: SizeName
    control: str | None
    samples: tuple[Sample, ...]
    failures: tuple[Failure, ...] = ()
    missing: tuple[Missing, ...] = ()
    parity: tuple[Parity, ...] = ()
    blocks: tuple[Block, ...] = ()
    alone: str = ""
    repetition: Repetition | None = None

    @property
    def live(self) -> bool:
        """Tell whether the variants took turns."""
        return bool(self.blocks)

    @property
    def pointless(self) -> bool:
        """Tell whether nothing more is measured, because fewer than two variants are left to compare."""
        gone = {failure.variant for failure in self.failures} | {missing.variant for missing in self.missing}
        return self.workload.only_together and sum(variant.name not in gone for variant in self.workload.variants) < 2

    @property
    def rounds(self) -> int:
        """Count the rounds in which something was measured."""
        return len({sample.round for sample in self.samples})

    def by_round(self, variant: str, metric: str, again: bool = False) -> dict[int, float]:
        """Return a variant's number in each round; an empty dict for a variant that failed.

        Args:
          variant, metric: their names.
          again: return the control's second runs instead of the first ones.

        Returns:
          From the round's number to the metric's number.
        """
        if any(failure.variant == variant for failure in self.failures):
            return {}
        mine = (sample for sample in self.samples if (sample.variant, sample.again) == (variant, again))
        return {sample.round: sample.values[metric] for sample in mine if metric in sample.values}


@dataclass(frozen=True)
class Run:
    """The results of one or more suites, with everything that a report needs.

    Attributes:
      suite: the name of the suite, or "all".
      size: the size of all workloads.
      seed: of the order of the variants within each round.
      machine: hardware, versions and settings, as `machine.describe` returns them.
      outcomes: one for each workload.
      seconds: the duration of the run.
      partial: why the run ended early; None if it is complete.
    """

    suite: str
    size: SizeName
    seed: int
    machine: Mapping[str, Any]
    outcomes: tuple[Outcome, ...]
    seconds: float
    partial: str | None = None
