"""Read the records of a Ray Data dataset at random, so that a `Loader` gives them in an exact order (`source`).

The dataset is computed once, in the order of its records. Its blocks, as NumPy arrays, lie in Ray's object store, on the nodes
that made them. A worker gets a block when it first reads a record of it. Ray copies it to the node, where all workers share it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.ray._versions import require_ray

if TYPE_CHECKING:
    import ray.data

_HELD = 1 << 30  # bytes of blocks that a process holds on to; Ray may move all others to a disk

Block = Mapping[str, np.ndarray]
Columns = Mapping[str, tuple[tuple[int, ...], np.dtype]]


def source(dataset: ray.data.Dataset) -> RaySource:
    """Make a source for `ps.Loader` of a Ray Data dataset, by computing it now.

    Call it in the driver, and give the result to the training function. A Loader of it has an exact and shuffled order, whose
    state is one integer, and in several processes each reads the rows that its devices need. An iterator of Ray Data has no
    state, so `ps.fit` could not continue with it.

    Records have the order of the dataset's input (`preserve_order`, which this sets while it computes). So a run continues
    exactly in the same driver, and in another driver too if the dataset gives the same records again: files that stay the same,
    and transforms that are deterministic and change nothing in the order. A dataset that was materialised before has its order
    already.

    All of the dataset has to fit the object stores of the cluster, which write to disk what does not fit. With a shuffled Loader,
    each node reads from all blocks. For more data than that, write it once: `dataset.write_parquet(folder)`, and
    `ps.Loader(folder + "/*.parquet", ...)`.

    Args:
      dataset: columns of numbers, or of arrays of one shape.

    Raises:
      UnsupportedVersionError: Ray is not installed, or too old.
      TypeError: it is not a dataset of Ray Data, or a column has no numbers; the message names it.
      ValueError: it has no records, or its blocks have different columns.

    Examples:
      >>> def train(records):
      ...     return ps.fit(step, init, ps.Loader(records, batch_size=8), steps=1000, checkpoint="/shared/run")
      >>> def main(dataset):  # in the driver
      ...     return pr.run(train, {"records": pr.source(dataset)}, workers=4)
    """
    require_ray()
    import ray
    import ray.data

    if not isinstance(dataset, ray.data.Dataset):
        raise TypeError(f"penstock.ray.source needs a ray.data.Dataset, got a {type(dataset).__name__}")
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        references = dataset.to_numpy_refs()
    finally:
        options.preserve_order = before
    describe = ray.remote(_describe)
    found = ray.get([describe.remote(reference) for reference in references])
    kept = [(reference, *each) for reference, each in zip(references, found, strict=True) if each[0]]
    if not kept:
        raise ValueError("the dataset has no records")
    columns = kept[0][2]
    for _, _, others in kept:
        _check_alike(columns, others)
    return RaySource([reference for reference, _, _ in kept], [rows for _, rows, _ in kept], columns)


def _describe(block: Any) -> tuple[int, Columns]:
    """Return the number of records of a block, and the shape and dtype of a record in each column. Runs in a task of Ray."""
    rows = len(next(iter(block.values()))) if block else 0
    return rows, {name: (column.shape[1:], column.dtype) for name, column in block.items()}


def _check_alike(first: Columns, columns: Columns) -> None:
    for name, (_, dtype) in first.items():
        if dtype.hasobject or dtype.kind in "USmM":
            raise TypeError(
                f"column {name!r} of the dataset has no numbers of one shape (dtype {dtype}): convert it, for example by "
                f"dataset.map_batches(tokenize), or leave it out by dataset.drop_columns([{name!r}])"
            )
    if dict(columns) != dict(first):
        different = next(name for name in {**first, **columns} if first.get(name) != columns.get(name))
        raise ValueError(
            f"column {different!r} differs between blocks of the dataset: {_text(first.get(different))} and "
            f"{_text(columns.get(different))}. Records need one shape and dtype: pad or cast them, by dataset.map_batches"
        )


def _text(column: tuple[tuple[int, ...], np.dtype] | None) -> str:
    return "no such column" if column is None else f"{column[1]}{list(column[0])}"


class RaySource:
    """Random access to the records of a dataset in Ray's object store, as `source` makes it. It can be sent to workers of Ray.

    Args:
      references: the blocks, as dicts of NumPy arrays [n, ...].
      rows: the number of records of each.
      columns: the shape and dtype of a record in each column.
    """

    def __init__(self, references: Sequence[Any], rows: Sequence[int], columns: Columns):
        self._references, self._columns = list(references), columns
        self._ends = np.cumsum(np.asarray(rows, np.int64))
        self._begins = np.concatenate([[0], self._ends[:-1]])
        self._record_bytes = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in columns.values())
        self._held: OrderedDict[int, Block] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": OrderedDict(), "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def describe(self) -> str:
        """Describe this source. The description has to be the same when a saved state of a feed is restored."""
        columns = ", ".join(f"{name} {_text(column)}" for name, column in sorted(self._columns.items()))
        return f"a Ray dataset of {len(self):,} records: {columns}"

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Read records.

        Args:
          indices: int64 [n], in any order, possibly repeated.

        Returns:
          An array [n, ...] for each column.
        """
        batch = {name: np.empty((len(indices), *shape), dtype) for name, (shape, dtype) in self._columns.items()}
        if not len(indices):
            return batch
        blocks = np.searchsorted(self._ends, indices, side="right")
        order = np.argsort(blocks, kind="stable")
        needed, firsts = np.unique(blocks[order], return_index=True)
        within = np.split((indices - self._begins[blocks])[order], firsts[1:])
        found = self._get(needed.tolist())
        for name, column in batch.items():
            column[order] = np.concatenate([block[name][rows] for block, rows in zip(found, within, strict=True)])
        return batch

    def _get(self, numbers: list[int]) -> list[Block]:
        """Return blocks, and hold on to those that were used last."""
        import ray

        with self._lock:
            have = {number: self._held[number] for number in numbers if number in self._held}
        missing = [number for number in numbers if number not in have]
        have.update(zip(missing, ray.get([self._references[number] for number in missing]), strict=True))
        with self._lock:
            for number in numbers:
                self._held[number] = have[number]
                self._held.move_to_end(number)
            while len(self._held) > 1 and self._bytes_held() > _HELD:
                self._held.popitem(last=False)
        return [have[number] for number in numbers]

    def _bytes_held(self) -> int:
        held = list(self._held)
        return int((self._ends[held] - self._begins[held]).sum()) * self._record_bytes
