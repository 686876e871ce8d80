"""Read records without a length as host batches, shuffled in a window, with an exact and small state: `stream`.

A *block* is the next W records of an epoch, where W is the window. A block is read completely and permuted by (seed, epoch,
number of the block). So the state is the position at the beginning of a block, and how many of its records were given. Restoring
reads that block again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import numpy as np

from penstock._arguments import at_least
from penstock._bytes import counted
from penstock.data.collate import stack
from penstock.data.order.rows import index_and_count
from penstock.data.streams.records import Cursor, IterableRecords, Raw, Records
from penstock.data.transform import Transform, per_record
from penstock.data.tree import Batch, Record, is_sparse, leaves_with_names, to_arrays

Deal = Literal["records", "files", "own"]


def stream(
    source: Any,
    batch_size: int,
    *,
    shuffle: int | None = None,
    seed: int = 0,
    epochs: int | None = None,
    transform: Callable[..., Batch] | per_record | None = None,
    collate: Callable[[Sequence[Record]], Batch] | None = None,
    remainder: Literal["drop", "keep"] = "drop",
    deal: Deal = "records",
    process: tuple[int, int] | None = None,
) -> Stream:
    """Make batches of records that have no length and no random access, for `ps.feed`.

    Where the records can be indexed, a `Loader` is the better choice: it shuffles completely, and its state is one integer.

    Args:
      source: `ps.jsonl(...)`, `ps.webdataset(...)`, or any iterable of records, such as a Hugging Face `IterableDataset`. Its
        position can be saved if it or its iterator has `state_dict` and `load_state_dict`, or `get_state` and `set_state`.
      batch_size: records in the *global* batch, over all processes.
      shuffle: size W of the shuffle window, in records; None keeps the order. Each W consecutive records are permuted, so W
        undecoded records are held in memory. The order of files is shuffled too, and eight of them are read in turn.
      seed: selects the orders and the random numbers of transforms, >= 0.
      epochs: how often to go through the source; None for no end. An iterator, which cannot begin again, ends after one.
        Batches may have records of two epochs.
      transform, collate: as for `Loader`.
      remainder: what happens to the last records of the last epoch, if they are fewer than a batch: "drop" or "keep". If there
        is not one complete batch, "drop" is an error.
      deal: which process gets which records. With "records", every process reads all files, and decodes and transforms only its
        own rows: the batches do not depend on the number of processes, which may change. With "files", process p of n reads each
        n-th file, and with "own", its source has only its own records. Their epochs differ in length, so they need `epochs=None`.
      process: (index, count) of this process; None asks JAX, which starts its backend.

    Returns:
      An iterable of host batches. Its iterators have `get_state` and `set_state`, if positions of the source can be saved.

    Raises:
      ValueError, TypeError: the arguments do not fit each other or the source.

    Examples:
      >>> class Count:
      ...     def __init__(self):
      ...         self.n = 0
      ...
      ...     def __iter__(self):
      ...         while True:
      ...             self.n += 1
      ...             yield {"x": self.n}
      ...
      ...     def state_dict(self):
      ...         return {"n": self.n}
      ...
      ...     def load_state_dict(self, state):
      ...         self.n = state["n"]
      >>> with ps.feed(ps.stream(Count(), batch_size=4, shuffle=8, seed=1)) as batches:
      ...     sorted(next(batches)["x"].tolist() + next(batches)["x"].tolist())
      [1, 2, 3, 4, 5, 6, 7, 8]
    """
    batch_size = at_least(1, "batch_size", batch_size)
    window = batch_size if shuffle is None else _window(shuffle)
    seed = at_least(0, "seed", seed)
    if epochs is not None:
        at_least(1, "epochs", epochs)
    for name, value, choices in (("remainder", remainder, ("drop", "keep")), ("deal", deal, get_args(Deal))):
        if value not in choices:
            raise ValueError(f"{name}={value!r}: choose from {', '.join(choices)}")
    if collate is not None and not callable(collate):
        raise TypeError(f"collate={collate!r} is not a function from a list of records to a batch")
    records = _as_records(source)
    index, count = (jax.process_index(), jax.process_count()) if process is None else index_and_count(process)
    _check_processes(records, batch_size, remainder, deal, epochs, count)
    return Stream(
        records=records,
        source=records.describe(),
        batch_size=batch_size,
        window=window,
        shuffled=shuffle is not None,
        seed=seed,
        epochs=epochs if records.repeats else 1,
        transform=None if transform is None else Transform(transform, seed),
        collate=stack if collate is None else collate,
        keep=remainder == "keep",
        deal=deal,
        process=(index, count),
    )


def _window(shuffle: Any) -> int:
    try:
        return at_least(2, "shuffle", shuffle)
    except ValueError as error:
        raise ValueError(
            f"{error}. A stream is shuffled in a window, so give its size in records, such as shuffle=10_000, or None for the "
            "order of the source"
        ) from None


def _as_records(source: Any) -> Records:
    if all(hasattr(source, name) for name in ("cursor", "decode", "describe")):
        return source
    is_data = hasattr(source, "dtype") or hasattr(source, "__arrow_c_stream__")  # whose items are no records but columns
    if isinstance(source, (str, bytes, Mapping)) or is_data or not isinstance(source, Iterable):
        raise TypeError(
            f"stream needs an iterable of records, got {type(source).__name__}: for files, ps.jsonl(paths) or "
            "ps.webdataset(paths); for arrays and other data with random access, ps.Loader"
        )
    return IterableRecords(source)


def _check_processes(records: Records, batch_size: int, remainder: str, deal: str, epochs: int | None, count: int) -> None:
    """Raise ValueError if the processes could not make batches together."""
    if batch_size % count:
        raise ValueError(f"batch_size={batch_size} cannot be divided among {count} processes: use a multiple of {count}")
    if count == 1:
        return
    if remainder == "keep":
        raise ValueError(f"remainder='keep' may leave a batch that cannot be divided among {count} processes: use 'drop'")
    if deal != "records" and (epochs is not None or not records.repeats):
        raise ValueError(
            f"deal={deal!r} with an end: the processes would end at different steps, and hang in the next collective; use "
            "epochs=None and count steps, or deal='records'"
        )
    files = getattr(records, "files", None)
    if deal == "files" and (files is None or len(files) < count):
        has = "the source has no files" if files is None else f"there are {len(files)} files"
        raise ValueError(f"deal='files' gives each of the {count} processes files of its own, and {has}: use deal='records'")


@dataclass(frozen=True, repr=False)
class Stream(Iterable[Batch]):
    """Batches of records without a length, as `stream` makes them. Each iterator begins at the beginning.

    Attributes:
      source: description of the records when the stream was made.
      window: records that are permuted together, or read together if `shuffled` is false.
      keep: whether a last batch that is not full is given.
      deal: says which process gets which records, see `stream`.
      process: (index, count).
    """

    records: Records
    source: str
    batch_size: int
    window: int
    shuffled: bool
    seed: int
    epochs: int | None
    transform: Transform | None
    collate: Callable[[Sequence[Record]], Batch]
    keep: bool
    deal: Deal
    process: tuple[int, int]

    def __repr__(self) -> str:
        shuffle = self.window if self.shuffled else None
        return (
            f"Stream({self.source}; batch_size={self.batch_size}, shuffle={shuffle}, seed={self.seed}, epochs={self.epochs}, "
            f"deal={self.deal!r}, process={self.process})"
        )

    def __iter__(self) -> StreamIterator:
        """Return an iterator from the beginning on."""
        return RestorableStreamIterator(self) if self.records.restorable else StreamIterator(self)

    def fingerprint(self) -> dict[str, Any]:
        """Return the options that decide which records a batch has."""
        same = {"source": self.source, "batch_size": self.batch_size, "seed": self.seed, "deal": self.deal}
        same["shuffle"] = self.window if self.shuffled else None
        return same if self.deal == "records" else {**same, "process": list(self.process)}


class StreamIterator(Iterator[Batch]):
    """An iterator over the batches of a stream."""

    def __init__(self, stream: Stream):
        self._stream = stream
        self._step = self._epoch = self._number = 0  # the next batch, the epoch, and the number of its block
        self._begin: Any = None  # the position at the beginning of the block; None for the beginning of the epoch
        self._block: list[Raw] = []
        self._given = 0
        self._cursor: Cursor | None = None

    def __iter__(self) -> StreamIterator:
        return self

    def __next__(self) -> Batch:
        stream = self._stream
        index, count = stream.process
        rows = stream.batch_size if stream.deal == "records" else stream.batch_size // count
        raws: list[Raw] = []
        while len(raws) < rows:
            if self._given == len(self._block) and not self._read_block():
                break
            more = self._block[self._given : self._given + rows - len(raws)]
            raws += more
            self._given += len(more)
        if len(raws) < rows and not (raws and stream.keep):
            if self._step == 0 and raws:
                raise ValueError(
                    f"not one batch: {stream.source} has {counted(len(raws), 'record')} in {counted(self._epoch, 'epoch')}, and "
                    f"a batch needs {rows}: use a smaller batch_size, more epochs, or remainder='keep'"
                )
            raise StopIteration
        first = index * stream.batch_size // count
        if stream.deal == "records" and count > 1:
            raws = raws[first : first + rows // count]
        batch = self._make(raws, first)
        self._step += 1
        return batch

    def close(self) -> None:
        """Close the files."""
        if self._cursor is not None:
            self._cursor.close()
            self._cursor = None

    def _read_block(self) -> bool:
        """Read the next block, of this epoch or the next one, and return whether there is one."""
        stream = self._stream
        while stream.epochs is None or self._epoch < stream.epochs:
            following = self._cursor is not None
            cursor = self._open()
            if following:  # otherwise the cursor begins where the block does
                self._begin = cursor.position()
                self._number += 1
            block = _take(cursor, stream.window)
            if block:
                self._block, self._given = self._permuted(block), 0
                return True
            if self._number == 0 and self._begin is None:
                raise ValueError(f"no records: epoch {self._epoch} of {stream.source} is empty")
            self.close()
            self._epoch, self._number, self._begin, self._block, self._given = self._epoch + 1, 0, None, [], 0
        return False

    def _open(self) -> Cursor:
        stream = self._stream
        if self._cursor is None:
            share = stream.process if stream.deal == "files" else (0, 1)
            seed = stream.seed if stream.shuffled else None
            self._cursor = stream.records.cursor(self._begin, self._epoch, seed, share)
        return self._cursor

    def _permuted(self, block: list[Raw]) -> list[Raw]:
        if not self._stream.shuffled:
            return block
        rng = np.random.default_rng([self._stream.seed, self._epoch, self._number, 1])
        return [block[i] for i in rng.permutation(len(block))]

    def _make(self, raws: list[Raw], row: int) -> Batch:
        """Decode, transform and collate records. The first is `row` of the global batch."""
        stream, transform = self._stream, self._stream.transform
        records = [stream.records.decode(raw) for raw in raws]
        try:
            if transform is not None and transform.each_record:
                places, rows = [raw.place for raw in raws], np.arange(row, row + len(raws))
                records = transform.records(records, places, self._step, rows)
            batch = stream.collate(records)
            if transform is not None and not transform.each_record:
                batch = transform.batch(batch, self._step, row)
            batch = to_arrays(batch)
        except Exception as error:
            error.add_note(f"penstock: while making batch {self._step}, whose first record is {raws[0].place}")
            raise
        for name, leaf in leaves_with_names(batch, is_sparse):
            if not getattr(leaf, "ndim", 0) or leaf.shape[0] != len(raws):
                raise ValueError(
                    f"batch {self._step}: leaf {name!r} has shape {list(getattr(leaf, 'shape', []))}; every leaf needs the "
                    f"batch's {len(raws)} rows as its first dimension"
                )
        return batch


class RestorableStreamIterator(StreamIterator):
    """A stream's iterator whose position can be saved and set."""

    def get_state(self) -> dict[str, Any]:
        """Return the position as a small dict for JSON."""
        begin, number, given = self._begin, self._number, self._given
        if self._cursor is not None and given == len(self._block):  # at the end of a block
            begin, number, given = self._cursor.position(), number + 1, 0
        position = {"step": self._step, "epoch": self._epoch, "block": number, "begin": begin, "given": given}
        return {**position, "of": self._stream.fingerprint()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue at a position.

        Raises:
          ValueError: it belongs to a stream of other records, or in another order.
        """
        saved, own = state["of"], self._stream.fingerprint()
        if differing := [name for name in {**saved, **own} if saved.get(name) != own.get(name)]:
            listed = "; ".join(f"{name} was {saved.get(name)!r} and is {own.get(name)!r}" for name in differing)
            remedy = (
                ". With deal='files' and 'own', each process needs the state that it has saved, and as many processes; "
                "with deal='records' from the beginning, their number may change"
            )
            raise ValueError(f"the state belongs to something else: {listed}{remedy if 'process' in differing else ''}")
        self.close()
        self._step, self._epoch, self._number = state["step"], state["epoch"], state["block"]
        self._begin, self._block, self._given = state["begin"], [], 0
        if given := state["given"]:
            block = _take(self._open(), self._stream.window)
            if len(block) < given:
                raise ValueError(
                    f"the block that the state was saved in had at least {given:,} records, and has {len(block):,}: the source "
                    "has changed, or does not return to its state exactly"
                )
            self._block, self._given = self._permuted(block), given


def _take(cursor: Cursor, number: int) -> list[Raw]:
    """Return the next records, at most `number`."""
    block: list[Raw] = []
    with contextlib.suppress(StopIteration):
        while len(block) < number:
            block.append(next(cursor))
    return block
