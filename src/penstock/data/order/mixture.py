"""Sources that are mixed by weight: `mix`.

Sources and weights go in; a `Mixture` comes out, whose records a `Loader` reads in the order of a `MixedSequence`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from penstock._arguments import at_least
from penstock.data.concatenation import ConcatSource, as_sources
from penstock.data.source import Source
from penstock.data.tree import Batch, Record

Stop = Literal["first_exhausted", "all_exhausted"]

# A weight is a multiple of 2^-30, so that counts are exact integers.
BITS = 30
ONE = 1 << BITS


def mix(
    sources: Sequence[Any],
    weights: Sequence[float] | Mapping[int, Sequence[float]] | None = None,
    *,
    seed: int | None = None,
    stop: Stop = "first_exhausted",
) -> Mixture:
    """Mix sources by weight: of every batch, each source has its share.

    Each source goes through its own records again and again, in a new order each time if the Loader shuffles. Among the first n
    rows, the count of a source differs from n·weight by less than the number of sources. For this, weights are rounded to
    multiples of 2^-30, about 10^-9.

    Args:
      sources: whatever a `Loader` takes, each. Their records need to be alike, see `concat`.
      weights: the share of each source, summing to 1. Or stages: a dict from a step to the weights from that step on; the first
        step is 0. None for shares by number of records.
      seed: selects the rows of a batch that a source gets. None for the seed of the Loader.
      stop: the end of an epoch. "first_exhausted" ends it before the first row that would repeat a record. "all_exhausted" ends
        it when each source was read completely; shorter ones repeat. With `epochs=None`, a Loader goes on for ever, and all
        sources repeat.

    Returns:
      A `Mixture`, for `ps.Loader`.

    Raises:
      TypeError: `sources` is not a list, or holds a mixture or a `Loader`.
      ValueError: a source is empty; the records of two sources differ; weights are of another number, negative, not finite, or do
        not sum to 1; the stages do not begin at step 0.

    Examples:
      >>> a, b = {"x": np.arange(100)}, {"x": np.arange(1000, 1010)}
      >>> loader = ps.Loader(mix([a, b], [0.75, 0.25]), batch_size=8, shuffle=True)
      >>> [int((loader[step]["x"] >= 1000).sum()) for step in (0, 1, 10**9)]
      [2, 2, 2]
    """
    made = as_sources(sources, "mix")
    if stop not in get_args(Stop):
        raise ValueError(f"stop={stop!r}: choose from {', '.join(get_args(Stop))}")
    stages = _stages(weights, [len(source) for source in made])
    return Mixture(made, stages, None if seed is None else at_least(0, "seed", seed), stop)


@dataclass(frozen=True)
class Stage:
    """The weights from a step on.

    Attributes:
      step: the first step.
      shares: the weight of each source, in units of 2^-30. They add up to 2^30.
    """

    step: int
    shares: tuple[int, ...]


class Mixture:
    """Sources with weights. As a `Source`, it has the records of all of them, one after the other.

    Args:
      sources: the sources.
      stages: the weights of each stage, in the order of their steps.
      seed, stop: see `mix`.
    """

    def __init__(self, sources: Sequence[Source], stages: Sequence[Stage], seed: int | None, stop: Stop):
        self.source = ConcatSource(sources)
        self.stages, self.seed, self.stop = tuple(stages), seed, stop
        self.is_gather, self.gather = self.source.is_gather, self.source.gather

    def __len__(self) -> int:
        """Return the number of records of all sources."""
        return len(self.source)

    def read(self, indices: np.ndarray) -> Batch | list[Record]:
        """Return the records at int64 [n], which count through all sources."""
        return self.source.read(indices)

    def describe(self) -> str:
        """Return what each source says of itself, with its number of records."""
        return self.source.describe()

    def __repr__(self) -> str:
        shares = [share / ONE for share in self.stages[0].shares]
        parts = ", ".join(f"{w:.3g} × {type(s).__name__}" for w, s in zip(shares, self.source.sources, strict=True))
        return f"mix({parts}{f'; {len(self.stages)} stages' if len(self.stages) > 1 else ''})"


def _stages(weights: Any, records: Sequence[int]) -> list[Stage]:
    """Check the weights, and return them as stages."""
    if weights is None:
        return [Stage(0, _shares(np.array(records) / sum(records)))]
    if not isinstance(weights, Mapping):
        return [Stage(0, _checked(weights, len(records), "weights"))]
    steps = sorted(at_least(0, "a step of weights", step) for step in weights)
    if not steps or steps[0] != 0:
        raise ValueError(f"weights has the steps {steps}: stages need to begin at step 0")
    return [Stage(step, _checked(weights[step], len(records), f"weights[{step}]")) for step in steps]


def _checked(weights: Any, count: int, name: str) -> tuple[int, ...]:
    try:
        given = np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"{name}={weights!r}: needs a list of numbers, one for each of the {count} sources") from None
    if given.shape != (count,):
        raise ValueError(
            f"{name}={weights!r}: needs a list of {count} numbers, one for each source, and has the shape {given.shape}"
        )
    if not (np.isfinite(given) & (given >= 0)).all():
        raise ValueError(f"{name}={weights!r}: each weight needs to be finite and >= 0")
    with np.errstate(over="ignore"):
        total = float(given.sum())
    if not _is_one(total, count):
        shares = f": did you mean {_shares_to_suggest(given)}?" if total > 0 else ""
        raise ValueError(f"{name}={weights!r} sum to {total:.6g}, and shares need to sum to 1{shares}")
    return _shares(given / total)


def _is_one(total: float, count: int) -> bool:
    return abs(total - 1) <= 1e-6 * count


def _shares_to_suggest(weights: np.ndarray) -> list[float]:
    """Return weights divided by their sum, with as few digits as they need to be accepted."""
    scaled = weights / weights.max()  # so that the sum cannot overflow
    exact = scaled / scaled.sum()
    rounded = ([float(f"{share:.{digits}g}") for share in exact] for digits in range(4, 17))
    return next((shares for shares in rounded if _is_one(float(np.sum(shares)), len(shares))), exact.tolist())


def _shares(weights: np.ndarray) -> tuple[int, ...]:
    """Round weights to multiples of 2^-30 that add up to 1, by the largest remainders. A weight above 0 stays above 0."""
    exact = weights * ONE
    floor = np.maximum(np.floor(exact), weights > 0).astype(np.int64)
    short = ONE - int(floor.sum())
    order = np.argsort(-(exact - floor), kind="stable")
    floor[order[: max(0, short)]] += 1
    floor[np.argmax(floor)] += min(0, short)
    return tuple(floor.tolist())
