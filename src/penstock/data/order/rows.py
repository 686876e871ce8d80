"""Find the rows of a global batch that one process reads.

A *global batch* has B rows, over all processes. A process reads *ranges* of them: half-open, increasing and disjoint.

Each device needs the rows of its shard, so a process needs the rows of its own devices. Where a batch is replicated over
processes, each of these processes reads the same rows. Without shardings, process p of n reads the slice `p·B/n … (p+1)·B/n`.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Rows:
    """The ranges of rows that this process reads, by the number of rows of a global batch."""

    ranges: dict[int, Ranges]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_numbers", {rows: _numbers(ranges) for rows, ranges in self.ranges.items()})

    def __reduce__(self) -> Any:
        return Rows, (self.ranges,)

    def numbers(self, rows: int) -> np.ndarray:
        """Return the numbers of the rows, int64 [n], that this process reads of a global batch with `rows` rows."""
        return self._numbers[rows]  # type: ignore[attr-defined]  # set in __post_init__, as it follows from `ranges`

    @property
    def cover_all(self) -> bool:
        """Tell whether this process reads each row of each batch."""
        return all(ranges == ((0, rows),) for rows, ranges in self.ranges.items())

    def global_rows(self, local: int) -> int | None:
        """Return the number of rows of the global batch of which this process has `local` rows; None if there is none."""
        found = self._numbers.items()  # type: ignore[attr-defined]  # as above
        return next((rows for rows, numbers in found if len(numbers) == local), None)

    def local(self, rows: int, part: slice) -> slice:
        """Return where the rows of a shard are among the rows of this process.

        Args:
          rows: number of rows of the global batch.
          part: rows of the shard, as in `Sharding.addressable_devices_indices_map`.
        """
        start, stop, _ = part.indices(rows)
        before = 0
        for first, last in self.ranges[rows]:
            if first <= start and stop <= last:
                return slice(before + start - first, before + stop - first)
            before += last - first
        raise ValueError(f"rows {start} to {stop} of a batch of {rows} are not rows of this process: {self.ranges[rows]}")


def _numbers(ranges: Ranges) -> np.ndarray:
    return np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in ranges])


def index_and_count(process: Any) -> tuple[int, int]:
    """Return the index of a process and the number of processes. Raise ValueError if `process` is no such pair."""
    try:
        index, count = map(operator.index, process)
    except (TypeError, ValueError):
        index, count = 0, 0
    if not 0 <= index < count:
        raise ValueError(f"process={process!r}: needs (index, count) with 0 <= index < count")
    return index, count


def slice_rows(batch_sizes: Sequence[int], process: tuple[int, int]) -> Rows:
    """Return the slice that a process, (index, count), reads of global batches of some sizes. The usual size is the first."""
    index, count = process
    for rows in batch_sizes:
        if rows % count and rows == batch_sizes[0]:
            raise ValueError(f"batch_size={rows} cannot be divided among {count} processes: use a multiple of {count}")
        if rows % count:
            raise ValueError(
                f"remainder='keep' leaves {rows} records for the last batch, which cannot be divided among {count} processes: "
                "use remainder='drop' or 'pad'"
            )
    return Rows({rows: ((index * rows // count, (index + 1) * rows // count),) for rows in batch_sizes})


def device_rows(batch_sizes: Sequence[int], shardings: Sequence[Sharding], process: int) -> Rows:
    """Find the rows of global batches of some sizes that the devices of a process need, by the first dimension of the shardings.

    Two processes may need some rows in common and others not. Then both read the rows of both: a transform of a batch gives the
    same values only if it gets the same rows.

    Raises:
      TypeError: the rows of a sharding are unknown.
      ValueError: a batch does not divide over a sharding.
    """
    return Rows({rows: _rows_of_process(rows, shardings, process) for rows in batch_sizes})


def _rows_of_process(rows: int, shardings: Sequence[Sharding], process: int) -> Ranges:
    needed: dict[int, set[tuple[int, int]]] = {}
    for sharding in shardings:
        shards: Any = _first_dimension(sharding).devices_indices_map((rows,))
        for device, (part,) in shards.items():
            start, stop, _ = part.indices(rows)
            needed.setdefault(device.process_index, set()).add((start, stop))
    if process not in needed:
        raise ValueError(f"`to` has no device of process {process}: give shardings over the devices of all processes")
    cuts = sorted({cut for parts in needed.values() for part in parts for cut in part})
    readers: dict[tuple[int, int], set[int]] = {}  # by stretch between two cuts
    for reader, parts in needed.items():
        for start, stop in parts:
            inside = cuts[cuts.index(start) : cuts.index(stop) + 1]
            for stretch in itertools.pairwise(inside):
                readers.setdefault(stretch, set()).add(reader)
    group, stretches = {process}, set[tuple[int, int]]()
    while found := {stretch for stretch, who in readers.items() if who & group} - stretches:
        stretches |= found
        group = set[int]().union(*(readers[stretch] for stretch in stretches))
    return _merged(sorted(stretches))


def _merged(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Merge adjacent ranges."""
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def _first_dimension(sharding: Sharding) -> Sharding:
    """Return the sharding of an array [B] that shards its rows as `sharding` does."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    if sharding.is_fully_replicated or len(sharding.device_set) == 1:
        return sharding
    raise TypeError(f"the rows that each process needs are unknown for {sharding!r}: give a jax.sharding.NamedSharding")


def local_parts(sharding: Any, dimension: int) -> int:
    """Count the different shards along a dimension of a `NamedSharding` that the devices of this process hold."""
    return len({coordinates[dimension] for coordinates in shard_coordinates(sharding).get(jax.process_index(), ())})


def mesh_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes of an entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def shard_coordinates(sharding: Any) -> dict[int, set[tuple[tuple[int, ...], ...]]]:
    """Return, for each process, the shards of a `NamedSharding` that its devices hold.

    A shard is given, for each dimension of the spec, by its mesh coordinates along the mesh axes of the dimension.
    """
    mesh, names = sharding.mesh, list(sharding.mesh.axis_names)
    dims = [[names.index(axis) for axis in mesh_axes(entry)] for entry in sharding.spec]
    shards: dict[int, set[tuple[tuple[int, ...], ...]]] = {}
    for position, device in np.ndenumerate(mesh.devices):
        shard = tuple(tuple(position[axis] for axis in axes) for axes in dims)
        shards.setdefault(device.process_index, set()).add(shard)
    return shards
