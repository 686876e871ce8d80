"""Mix sources by weight: `mix`, and the order in which a `Loader` reads the records of a `Mixture`.

The *stream* is all rows of all batches in turn: row r of step k is slot k·B + r. Among the first n slots, source i has C_i(n).
Each source is repeated without end, so the rank of a slot in its source says which record it is.

Method. C_1(n) is n·w_1, rounded. Among the other n − C_1(n) slots, source 2 has its share, rounded, and so on. Each C_i grows by
0 or 1 from one slot to the next, they add up to n, and they follow from n alone. So step 10^9 costs what step 0 costs, and any
process can compute any slot. The rows of each batch are then permuted, so that no source has rows of its own. Levanter (Stanford
CRFM, 2024) has block-deterministic mixtures, which fix the counts of each block of slots. They showed that a mixture can be a
function of the step.

Example. With the weights 0.5, 0.3 and 0.2, the first 10 slots have 5 of source 1. Source 2 has 0.3 / 0.5 of the other 5 slots,
which is 3, and source 3 has the remaining 2. The first 11 slots have 5.5 of source 1, rounded up to 6, and 3 and 2 of the others.
So slot 10 belongs to source 1, which has had 5 slots before: it is the record of rank 5.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from penstock._arguments import at_least
from penstock.data.concatenation import ConcatSource, as_sources
from penstock.data.order.batch_order import Remainder
from penstock.data.order.permutation import many_keys, permute, permute_all
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
    """Mix sources by weight: each source has its share of every batch.

    Each source repeats its records without end, in a new order each time if the Loader shuffles. Among the first n
    rows, the count of a source differs from n·weight by less than the number of sources. For this, weights are rounded to
    multiples of 2^-30, about 10^-9.

    Args:
      sources: each of them is data for a `Loader`. Their records need to be alike, see `concat`.
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
    """The weights of all sources from a step on, in units of 2^-30. They add up to 2^30."""

    step: int
    shares: tuple[int, ...]


class Mixture:
    """Sources with weights. As a `Source`, it has the records of all of them, one after the other.

    Args:
      sources: their records are alike, see `concat`.
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
        """Return the description of each source, with its number of records."""
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
        needed = f"needs a list of {count} numbers, one for each source"
        raise ValueError(f"{name}={weights!r}: {needed}, and has the shape {given.shape}")
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


_HALF = ONE // 2
_FEW = 8  # epochs of a source whose keys are derived one by one
_SMALL = 1 << 16  # records of a source whose orders are kept, at most; so many are ordered at a time,
_PART = 8  # but no more than so many times the records that a block of as many rows needs


class MixedSequence:
    """The order of a mixture, for batches of one size.

    Args:
      batch_size: rows of a global batch.
      remainder: what happens to the last rows of an epoch.
      shuffle: whether the records of each source, and the rows of each batch, have a random order.
      endless: whether epochs follow each other without end. With `remainder="drop"`, their rows are then one stream, so an epoch
        that is shorter than a batch is made as long as one.

    Attributes:
      records: number of rows in an epoch.
    """

    def __init__(self, mixture: Mixture, batch_size: int, remainder: Remainder, shuffle: bool, seed: int, endless: bool):
        self._starts = mixture.source.starts
        self._lengths = np.diff(self._starts).tolist()
        self._batch_size, self._shuffle, self._seed = batch_size, shuffle, seed
        self._row_seed = seed if mixture.seed is None else mixture.seed
        self._stages, self._stop = mixture.stages, mixture.stop
        self._whole = [self._kept_epochs(source) for source in range(len(self._lengths))]
        self._shares = [_shares_of_rest(stage.shares) for stage in self._stages]
        self._first = [stage.step * batch_size for stage in self._stages]  # the first slot of each stage, in the first epoch
        self._before = self._counts_before()
        self.records = self._epoch()
        if endless and remainder == "drop":
            self.records = max(self.records, batch_size)
        full, rest = divmod(self.records, batch_size)
        steps = full + (rest > 0 and remainder != "drop")
        self._slots = full * batch_size if remainder == "drop" else self.records  # of an epoch
        if steps:  # a stage after the first epoch does not change where that ends
            self._first = [epoch * self._slots + k * batch_size for epoch, k in (divmod(s.step, steps) for s in self._stages)]
            self._before = self._counts_before()
        self._steps = max(1, steps)

    def _counts_before(self) -> list[list[int]]:
        """Return, for each stage, the count of each source before it."""
        counts = [[0] * len(self._lengths)]
        for stage, (begin, end) in enumerate(zip(self._first, self._first[1:], strict=False)):
            inside = _counts(self._shares[stage], end - begin)
            counts.append([before + count for before, count in zip(counts[-1], inside, strict=True)])
        return counts

    def at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the record indices at positions [steps, rows], which increase, of an epoch. They count through all sources."""
        # Stages begin with a batch, and the rows of a batch are permuted among themselves.
        low, high = (int(positions.flat[end]) // self._batch_size * self._batch_size for end in (0, -1))
        begin = epoch * self._slots + low  # of the stream. Slots are counted from here on.
        slots = self._permuted(epoch, positions, low)
        first, last = (np.searchsorted(self._first, [begin, begin + high - low], side="right") - 1).tolist()
        count = high - low + self._batch_size
        if 2 * slots.size > count:
            found = [self._run(*part) for part in self._parts(first, last, begin, count)]
            return (found[0] if len(found) == 1 else np.concatenate(found)).take(slots)
        # A process that reads few rows of each batch finds them alone.
        slots = slots.reshape(-1)
        if first == last:
            return self._in_stage(first, begin - self._first[first], slots).reshape(positions.shape)
        stage_of = np.searchsorted(self._first, slots + begin, side="right") - 1
        indices = np.empty(slots.shape, np.int64)
        for stage in range(first, last + 1):
            inside = np.flatnonzero(stage_of == stage)
            if len(inside):
                base = max(begin, self._first[stage])
                indices[inside] = self._in_stage(stage, base - self._first[stage], slots[inside] + (begin - base))
        return indices.reshape(positions.shape)

    def fingerprint(self) -> Mapping[str, Any]:
        stages = {str(stage.step): list(stage.shares) for stage in self._stages}
        return {"shuffle": self._shuffle, "seed": self._seed, "mix_seed": self._row_seed, "stop": self._stop, "weights": stages}

    def _permuted(self, epoch: int, positions: np.ndarray, base: int) -> np.ndarray:
        """Permute the rows of each batch, and return the slots of an epoch at positions [steps, rows], counted from `base` on."""
        if not self._shuffle:
            return positions - base
        step = positions[:, 0] // self._batch_size
        first = step * self._batch_size
        row = positions[0] - first[0]  # the same in each batch, except for a short last one
        keys = many_keys(self._row_seed, 0, epoch * self._steps + step)
        # Rows need to be mixed, and not equally likely in all their orders. So all batches have one order, which begins at
        # another row in each: this takes a third of the time.
        begins = (keys[0] % np.uint64(self._batch_size)).astype(np.int64)
        order = _order_twice(self._batch_size, self._row_seed)
        if len(row) == self._batch_size:
            permuted = np.lib.stride_tricks.sliding_window_view(order, self._batch_size)[begins]  # takes half the time
        else:
            permuted = order.take(np.add.outer(begins, row))
        permuted += (first - base)[:, None]
        for at in np.flatnonzero(first + self._batch_size > self.records).tolist():  # a short last batch
            start = int(first[at])
            permuted[at] = start - base + permute(positions[at] - start, self.records - start, keys[:, at])
        return permuted

    def _parts(self, first: int, last: int, begin: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Cut `count` slots from `begin` on by stages: yield the stage, the slot counted from its beginning, and the length."""
        for stage in range(first, last + 1):
            end = begin + count if stage == last else min(begin + count, self._first[stage + 1])
            yield stage, begin - self._first[stage], end - begin
            begin, count = end, count - (end - begin)

    def _run(self, stage: int, base: int, count: int) -> np.ndarray:
        """Return the record indices, int64 [count], at slots of a stage that follow each other.

        So the ranks of each source follow each other as well, and so do the slots that each source leaves to the next sources.
        `stage` and `base` are as in `_in_stage`, and the count is less than 2^32.
        """
        indices = np.empty(count, np.int64)
        where = None
        for source, share, rest, start in self._sources(stage, base):
            if share == ONE:  # all that is left
                indices[slice(None) if where is None else where] = self._records_run(source, start, count)
                break
            grows = _grows(share, rest, count)
            mine, others = np.flatnonzero(grows), np.flatnonzero(~grows)
            indices[_among(where, mine)] = self._records_run(source, start, len(mine))
            where, count = _among(where, others), len(others)
            if not count:
                break
        return indices

    def _sources(self, stage: int, base: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield each source with a share in a stage, up to a slot `base` of it.

        Yields:
          (source, share, rest, start): the share, in units of 2^-30, among the slots that the sources before it left; what is
          left of its count up to `base` after rounding it down; the rank of its next record.
        """
        for source, share in enumerate(self._shares[stage]):
            if share:
                before, rest = divmod(share * base + _HALF, ONE)
                yield source, share, rest, before + self._before[stage][source]
                base -= before

    def _records_run(self, source: int, start: int, count: int) -> np.ndarray:
        """Return the indices of `count` records of a source, int64 [count], from rank `start` on, counted through all sources."""
        if not count:
            return np.empty(0, np.int64)
        length = self._lengths[source]
        if found := self._orders(source, start // length, (start + count - 1) // length, count):
            first, orders = found
            size = len(orders[0])
            parts = [(start - rank, start - rank + count) for rank in range(first, first + size * len(orders), size)]
            records = np.concatenate([order[max(0, begin) : end] for order, (begin, end) in zip(orders, parts, strict=True)])
        else:
            records = self._records(source, np.arange(start, start + count))
        records += self._starts[source]
        return records

    def _orders(self, source: int, low: int, high: int, count: int) -> tuple[int, list[np.ndarray]] | None:
        """Return the orders of a small source that hold the epochs `low … high`, and the rank with which the first one begins.

        None if so few records are wanted of them, `count`, that it takes less time to find these.
        """
        length, epochs = self._lengths[source], self._whole[source]
        if not epochs or (high - low) * length > _PART * count:
            return None
        orders = [_whole_orders(length, self._seed, source + 1, at, epochs) for at in range(low // epochs, high // epochs + 1)]
        return low // epochs * epochs * length, orders

    def _kept_epochs(self, source: int) -> int:
        """Return how many epochs of a source are ordered at a time, completely; 0 if it is too large for its share."""
        share = max(stage.shares[source] for stage in self._stages)
        return min(_SMALL, _PART * _SMALL * share // ONE) // self._lengths[source] if self._shuffle else 0

    def _in_stage(self, stage: int, base: int, left: np.ndarray) -> np.ndarray:
        """Return the record indices at slots of a stage, int64 [n].

        Args:
          base: a slot, counted from the beginning of the stage. Counts are exact integers of Python up to here, and of 64 bits
            from here on.
          left: the slots, counted from `base`: int64 [n], less than 2^32, which may be written to.
        """
        indices = np.empty(len(left), np.int64)
        where = None
        for source, share, rest, start in self._sources(stage, base):
            if share == ONE:  # all that is left
                rest_of_slots = slice(None) if where is None else where
                indices[rest_of_slots] = self._starts[source] + self._records(source, left + start)
                break
            scaled = left * share
            scaled += rest
            count = scaled >> BITS
            scaled &= ONE - 1
            grows = scaled >= ONE - share  # the count is larger by 1 after this slot, so the slot is this source's
            mine, others = np.flatnonzero(grows), np.flatnonzero(~grows)
            indices[_among(where, mine)] = self._starts[source] + self._records(source, count.take(mine) + start)
            left -= count
            where, left = _among(where, others), left.take(others)
            if not len(left):
                break
        return indices

    def _records(self, source: int, ranks: np.ndarray) -> np.ndarray:
        """Return the records of a source, int64 [n], at these ranks of its endless order."""
        length = self._lengths[source]
        if not len(ranks):
            return ranks
        low, high = (int(rank) // length for rank in (ranks.min(), ranks.max()))
        if found := self._orders(source, low, high, len(ranks)):
            first, orders = found
            return (orders[0] if len(orders) == 1 else np.concatenate(orders)).take(ranks - first)
        if not self._shuffle or high - low >= _FEW:
            epochs, positions = np.divmod(ranks, length)
            keys = many_keys(self._seed, source + 1, epochs) if self._shuffle else None
            return positions if keys is None else permute(positions, length, keys)
        if low == high:
            return permute(ranks - low * length, length, many_keys(self._seed, source + 1, np.array(low)))
        records = np.empty_like(ranks)
        for epoch in range(low, high + 1):
            here = np.flatnonzero((ranks >= epoch * length) & (ranks < (epoch + 1) * length))
            keys = many_keys(self._seed, source + 1, np.array(epoch))
            records[here] = permute(ranks.take(here) - epoch * length, length, keys)
        return records

    def _epoch(self) -> int:
        """Return the number of slots until the first source, or the last one, has no record left."""
        ends = self._stop == "first_exhausted"
        last = zip(self._stages[-1].shares, self._before[-1], self._lengths, strict=True)
        if not ends and (never := [i for i, (share, before, length) in enumerate(last) if not share and before < length]):
            step = self._stages[-1].step
            raise ValueError(
                f"stop='all_exhausted' would never come: source {never[0]} has the weight 0 from step {step} on, and not all of "
                "its records are read before"
            )
        low, high = 0, 1  # the end is in (low, high]
        while not self._over(high, ends):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._over(middle, ends) else (middle, high)
        return low if ends else high

    def _over(self, slots: int, ends: bool) -> bool:
        """Tell whether a source has more than its records in the first slots; or, if not `ends`, each has at least them."""
        stage = int(np.searchsorted(self._first, slots, side="right")) - 1
        inside = _counts(self._shares[stage], slots - self._first[stage])
        counts = [before + count for before, count in zip(self._before[stage], inside, strict=True)]
        if ends:
            return any(count > length for count, length in zip(counts, self._lengths, strict=True))
        return all(count >= length for count, length in zip(counts, self._lengths, strict=True))


@functools.lru_cache(maxsize=32)
def _whole_orders(length: int, seed: int, stream: int, number: int, epochs: int) -> np.ndarray:
    """Return the orders of a small source in the epochs from `number * epochs` on, int64 [epochs * length].

    They are kept, as several blocks of steps need them. A call of NumPy has its cost, so many records are ordered in one.
    """
    first = number * epochs
    orders = permute_all(length, many_keys(seed, stream, np.arange(first, first + epochs))).reshape(-1)
    orders.flags.writeable = False
    return orders


@functools.lru_cache(maxsize=8)
def _order_twice(length: int, seed: int) -> np.ndarray:
    """Return the order of the rows of batches, int64 [2 * length], twice, so that it can be read from any row on."""
    return np.tile(_whole_orders(length, seed, 0, 0, 1), 2)


def _grows(share: int, rest: int, count: int) -> np.ndarray:
    """Return at which slots the count of a source grows, bool [count]: where `share * slot + rest` passes a multiple of 2^30."""
    scaled = np.arange(count, dtype=np.uint32)
    scaled *= np.uint32(share)  # only the lowest 30 bits of the product are needed
    scaled += np.uint32(rest)
    scaled &= np.uint32(ONE - 1)
    return scaled >= ONE - share


def _among(where: np.ndarray | None, chosen: np.ndarray) -> np.ndarray:
    """Return the elements of `where` at the places `chosen`; None stands for all numbers from 0 on."""
    return chosen if where is None else where.take(chosen)


def _counts(shares: Sequence[int], slots: int) -> list[int]:
    """Return the count of each source among the first slots of a stage: its share of the rest that the sources before it left."""
    counts, left = [], slots
    for share in shares:
        counts.append((share * left + _HALF) >> BITS if share else 0)
        left -= counts[-1]
    return counts


def _shares_of_rest(shares: Sequence[int]) -> list[int]:
    """Return the share of each source among the slots that the sources before it left, in units of 2^-30."""
    result, left = [], ONE
    for share in shares:
        result.append(max(1, (share * ONE + left // 2) // left) if share else 0)
        left -= share
    return result
