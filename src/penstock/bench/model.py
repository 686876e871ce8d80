"""What a benchmark is made of, and what running it gives.

A *suite* is a module with a tuple `WORKLOADS`. A *workload* is one task; its *variants* do it with different libraries. Each
(variant, round) gives one *sample*, which has a number for every *metric* of the workload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SizeName = Literal["full", "quick"]


class VerificationError(Exception):
    """A variant did not deliver what the workload asks for, so its speed means nothing."""


@dataclass(frozen=True)
class Metric:
    """A number that a variant gets.

    Attributes:
      ideal: the value that a perfect variant would get, in the metric's unit, where that is known.
    """

    name: str
    unit: str
    better: Literal["higher", "lower"]
    ideal: float | None = None


@dataclass(frozen=True)
class Target:
    """What a variant is to reach: at least, or for a metric where lower is better at most, `bound`.

    Attributes:
      relative_to: the variant whose value `bound` is a multiple of; None where `bound` is in the metric's unit.
    """

    variant: str
    metric: str
    bound: float
    relative_to: str | None = None


@dataclass(frozen=True)
class Measurement:
    """What a variant measured: a number for each metric, and what a reader may want to know of how."""

    values: Mapping[str, float]
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Variant:
    """One way to do a workload.

    Attributes:
      measure: from one of the workload's sizes to a measurement; raises `VerificationError`. Runs in a process of its own.
      requires: modules that must be there; imported by `measure` and nobody else.
      note: what a reader must know to judge the number.
    """

    name: str
    measure: Callable[[Any], Measurement]
    requires: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Workload:
    """One task and the ways to do it.

    Attributes:
      title: what is measured; "{records:,}" in it stands for that field of the size, as it does in the variants' notes.
      baseline: the variant that ratios are to; None where there is nothing to compare.
      sizes: what `Variant.measure` gets; "quick" says nothing about speed, it shows that all works.
      time_limit: seconds that one (variant, round) may take.
    """

    name: str
    title: str
    metrics: tuple[Metric, ...]
    baseline: str | None
    variants: tuple[Variant, ...]
    sizes: Mapping[SizeName, Any]
    targets: tuple[Target, ...] = ()
    time_limit: float = 120.0

    def variant(self, name: str) -> Variant:
        return next(variant for variant in self.variants if variant.name == name)

    def fill(self, text: str, size: SizeName) -> str:
        """The title or a note, with the numbers of the size."""
        return text.format_map(vars(self.sizes[size]))


@dataclass(frozen=True)
class Sample:
    """A measurement of one variant in one round.

    Attributes:
      position: how many variants ran before it in its round.
      seconds: that its process took, from start to end.
    """

    variant: str
    round: int
    position: int
    seconds: float
    values: Mapping[str, float]
    details: Mapping[str, Any]


@dataclass(frozen=True)
class Failure:
    """A variant that crashed, took too long, or did not pass verification; `output` is what its process wrote."""

    variant: str
    round: int
    reason: str
    output: str


@dataclass(frozen=True)
class Missing:
    """A variant that was left out because `packages` are not installed."""

    variant: str
    packages: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """All that running one workload gave. A variant that failed once is in no later round, and has no place in a table."""

    workload: Workload
    size: SizeName
    samples: tuple[Sample, ...]
    failures: tuple[Failure, ...] = ()
    missing: tuple[Missing, ...] = ()


@dataclass(frozen=True)
class Run:
    """One run of a suite, with all that is needed to judge it.

    Attributes:
      seed: of the order of the variants within each round.
    """

    suite: str
    size: SizeName
    rounds: int
    seed: int
    machine: Mapping[str, Any]
    outcomes: tuple[Outcome, ...]
