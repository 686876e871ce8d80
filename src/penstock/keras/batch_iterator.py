"""The iterator over batches that Keras uses inside of an epoch: `BatchIterator`.

It takes `ResumableBatches`, and returns batches placed as Keras needs them. A `Feed` reads them ahead, unless the source says
that a thread would save no time. `KerasPlacement` puts them where Keras would.

An *execution* is what Keras does at one call of its jitted function: `steps_per_execution=n` steps. Keras 3.16 takes one item for
it: its batches stacked, [n, B, ...], which one program on the device goes through. The thread that reads ahead makes such items:

    gather      read the batches of an execution            an `Execution`, on the host
    assemble    stack them there, and place the stack       the item that Keras takes: a `KerasItem`

An execution has fewer than n batches at the end of the data, or of an epoch of a Loader without end. It also has fewer before an
error: the steps before the error count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.sparse import JAXSparse
from jax.sharding import Sharding
from keras.src import tree
from keras.src.backend.common import global_state
from keras.src.distribution import distribution_lib
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED

from penstock._clock import Clock
from penstock._pipeline import Exhausted, Producers
from penstock.data.order.rows import Rows
from penstock.data.tree import Batch, describe, is_numeric, leaves_with_names
from penstock.feed.adapters import BatchAdapter, Produced
from penstock.feed.device_feed import Feed, interrupt, later_stats
from penstock.feed.placement import Context, Placed, Placement
from penstock.feed.starvation import Meter
from penstock.feed.stats import Caller, LaterStats
from penstock.keras.batches import ResumableBatches, UnthreadedBatches, aligned, empty
from penstock.keras.versions import behaviour, is_partial, partial_batches

_DEVICE_BUFFER = 2
_HOST_BUFFER = 4


class Execution(NamedTuple):
    """The host batches [B, ...] of one execution, in order, and the error that replaces the batch after them."""

    batches: list[Batch]
    failure: BaseException | None


class KerasItem(NamedTuple):
    """An item that Keras takes at one `next`.

    Attributes:
      item: a batch, a stack of batches, or a list of them that Keras steps through.
      steps: number of batches in it.
      failure: the error that replaces the batch after them; None if there is none.
    """

    item: Any
    steps: int = 1
    failure: BaseException | None = None


class BatchIterator(Iterator[Batch]):
    """An iterator over the batches of one source, which are read ahead only while Keras is in its loop over batches.

    A `Feed` reads them, and `pause` ends its threads. The source keeps the batches that were read and not consumed, and the next
    feed begins with them, so nothing is lost or read twice. A batch counts as consumed when Keras takes it with `next`. `peek`
    does not consume it: Keras peeks before it begins an execution, which it cannot interrupt.

    *Errors.* An error in the place of a batch is raised at that batch, once. Inside of an execution of several steps, Keras would
    lose its state by it. So the batches before it end the execution first, and `failure` then holds the error.

    *Executions.* Where Keras takes all batches of an execution at one `next`, whole executions are read, placed and peeked.
    Consumed batches are still counted one by one.

    Args:
      add_stats: is called with the statistics of each feed when it ends.
      caller: the call that made the batches, for the advice of a verdict.
      limit: number of batches that Keras takes until the end of its epoch, if the source must not be read beyond it; None for no
        limit.
      steps_per_execution: number of batches that Keras takes in one execution.
      epoch_batches: an execution ends at every multiple of this number; None if the source ends by itself.
      first: number of batches that a run consumed before, which this one continues.

    Attributes:
      consumed: number of batches that were consumed, with `first`.
      failure: the error that ended the last execution; None if there is none.
    """

    def __init__(
        self,
        source: ResumableBatches,
        add_stats: Callable[[LaterStats], None],
        caller: Caller,
        limit: int | None,
        steps_per_execution: int,
        epoch_batches: int | None = None,
        first: int = 0,
    ):
        self._per_item = steps_per_execution if behaviour().stacks else 1  # batches that Keras takes at one `next`
        self._source, self._placement, self._add_stats = source, KerasPlacement(self._per_item), add_stats
        self._caller = caller
        self._limit, self._steps, self._epoch_batches = limit, steps_per_execution, epoch_batches
        self._feed: Feed | None = None
        self.consumed = self._begin = first
        self._consumed_of_feed = 0
        self._feed_stop = -1  # number of the first batch that a feed with a limit does not have
        # Whether batches that are read on this thread are also placed on it. Some versions of Keras pass host arrays on.
        self._places = not source.prefetched and (behaviour().on_device or self._per_item > 1)
        self._varies = not isinstance(source, UnthreadedBatches)  # whether batches may differ in structure
        self._peeked: KerasItem | None = None  # the next item
        self._structure: Any = None  # of the first batch, as are `_parts` and `_first`
        self._parts: Any = None
        self._first = ""
        self._in_execution = 0  # batches that Keras took in this execution
        self._meter = self._new_meter()  # of the batches that are read on this thread
        self.failure: BaseException | None = None

    @property
    def in_first_execution(self) -> bool:
        """Return whether Keras has taken the batches of at most one execution."""
        return self.taken <= self._steps

    @property
    def taken(self) -> int:
        """Return the number of batches that Keras has taken from this iterator."""
        return self.consumed - self._begin

    def interrupt(self) -> None:
        """Let a `peek` that waits in another thread raise RuntimeError."""
        feed = self._feed or self._source.prefetched
        if feed is not None:
            interrupt(feed)

    def peek(self) -> bool:
        """Wait for the next batch before Keras begins an execution, without consuming it. Return whether there is one.

        Raises:
          BaseException: the error in the place of the next batch.
        """
        self._in_execution = 0
        if self._peeked is None:
            try:
                self._peeked = self._next_item()
            except StopIteration:
                return False
        return True

    def __next__(self) -> Any:
        """Return the next item for Keras, and count its batches as consumed."""
        ready, self._peeked = self._peeked, None
        if ready is None:
            if self._epoch_batches and self._in_execution and self.consumed % self._epoch_batches == 0:
                raise StopIteration
            try:
                ready = self._next_item()
            except StopIteration:
                raise
            except BaseException as error:
                if self._in_execution == 0:
                    raise
                self.failure = error
                raise StopIteration from None
        item, steps, failure = ready
        self._in_execution += steps
        self._count_consumed(steps)
        if failure is not None:
            self.failure = self._skip_failed_batch(failure)
        return item

    def _next_item(self) -> KerasItem:
        """Return the next item from wherever batches are read now."""
        try:
            ready = self._next_from_feed() if self._source.threaded else self._next_on_this_thread()
        except StopIteration:
            self._end_feed()
            raise
        except Exception as error:
            self._skip_failed_batch(error)
            raise
        if self._varies:
            ready = self._cut_at_other_structure(ready)
        if ready.steps:
            return ready
        assert ready.failure is not None
        failure = self._skip_failed_batch(ready.failure)
        del ready
        try:
            raise failure
        finally:
            del failure  # otherwise its traceback and this frame would refer to each other

    def _skip_failed_batch(self, error: BaseException) -> BaseException:
        """Add the number of the batch to its error, and count it as consumed, so that the next reader does not get it again."""
        error.add_note(f"penstock: in the place of batch {self.consumed} of {self._source.name}")
        self._end_feed()
        self._count_consumed(1)
        return error

    def _count_consumed(self, batches: int) -> None:
        self.consumed += batches
        for _ in range(batches):
            self._source.consume()

    def _next_on_this_thread(self) -> KerasItem:
        if self._per_item == 1:
            return KerasItem(self._read(0))
        # The batches are on their devices, and are stacked there.
        return assemble(gather(self._read, range(self._per_item)), self._per_item, lambda batch, stacked: batch)

    def _read(self, ahead: int) -> Batch:
        batch = self._meter.take(lambda timeout: self._source.read(ahead), None)
        self._meter.hand_over(None, 0.0)
        return tree.map_structure(jax.device_put, batch, none_is_leaf=False) if self._places else batch

    def _next_from_feed(self) -> KerasItem:
        """Take the next item from a feed, and start one if there is none."""
        if self._feed is None:
            self._feed = self._start_feed()
        try:
            item = next(self._feed)
        except StopIteration:
            if self.consumed != self._feed_stop:
                raise
            # Keras takes more batches than it announced, as in a train function of the user.
            self._end_feed()
            self._feed = self._start_feed()
            item = next(self._feed)
        ready = item if self._per_item > 1 else KerasItem(item)
        self._consumed_of_feed += ready.steps
        return ready

    def _start_feed(self) -> Feed:
        self._placement.take_settings()
        self._feed_stop = -1 if self._limit is None else self.consumed + self._limit
        batch_adapter = self._source.batch_adapter(self._limit)
        host_buffer, device_buffer = max(_HOST_BUFFER, self._steps), _DEVICE_BUFFER
        if self._per_item > 1:
            batch_adapter = ExecutionAdapter(batch_adapter, self._per_item, self._epoch_batches, self.consumed)
            # One execution waits while another runs: at least as many batches as without stacking.
            host_buffer, device_buffer = -(-host_buffer // self._per_item), 1
        return Feed(
            batch_adapter,
            self._placement,
            host_buffer=host_buffer,
            device_buffer=device_buffer,
            timeout=None,
            strict=False,
            first=self.consumed,
            caller=self._caller,
        )

    def pause(self) -> None:
        """End the threads, unless they are slow to start, when Keras has left its loop. The next `next()` starts new ones."""
        if not self._source.slow_to_start:
            self.close()

    def stop_for_inner_loop(self) -> None:
        """End the threads before a loop inside of this one, which may read the batches that were not consumed."""
        self._end_feed()
        self._peeked = None

    def close(self) -> None:
        """End the threads, and wait for them as `Feed.close` does."""
        self.stop_for_inner_loop()
        meter = self._meter
        if meter.steps:
            meter.end(after_step=True)
            self._add_stats(LaterStats(meter, {"iterate": meter.startup + meter.wait}, 1, 0.0, 0, self._caller))
            self._meter = self._new_meter()

    def _new_meter(self) -> Meter:
        feed = self._source.prefetched
        return Meter(inner=feed._meter if feed else None)

    def _end_feed(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            feed._meter.end(after_step=not self._source.slow_to_start)  # such a source is not paused at the end of the loop
            feed.close()
            self._placement.leave_settings()
            self._add_stats(later_stats(feed)._replace(steps=self._consumed_of_feed))
            self._consumed_of_feed = 0

    def _cut_at_other_structure(self, ready: KerasItem) -> KerasItem:
        """Cut an item before the first batch whose structure differs from the batches before it."""
        batches = ready.item if is_partial(ready.item) else [ready.item][: ready.steps]
        for number, batch in enumerate(batches):
            failure = self._other_structure(batch, number)
            if failure is not None:
                return KerasItem(partial_batches(batches[:number]) if number else None, number, failure)
        return ready

    def _other_structure(self, batch: Batch, ahead: int) -> ValueError | None:
        """Return the error for a batch whose structure differs from the batches before it; None if it is the same."""
        structure = jax.tree.structure(batch)
        if self._structure is None:
            self._structure, self._parts, self._first = structure, _parts(batch), describe(batch)
        if structure == self._structure or _parts(batch) == self._parts:
            return None
        return ValueError(
            f"batch {self.consumed + ahead} of {self._source.name} has another structure than those before it: it holds "
            f"{describe(batch)} ({_parts(batch)}), where {self._first} ({self._parts}) is needed; all batches of a run "
            "need the same parts, (x, y) or (x, y, sample_weight), and the same keys"
        )


def _parts(batch: Batch) -> Any:
    """Return the structure with arrays as leaves. The structure of a sparse array holds its shape, which may differ."""
    return jax.tree.structure(batch, is_leaf=lambda part: hasattr(part, "shape"))


# Placement on devices.


# Settings that Keras keeps for each thread. Data that is made with layers of Keras or with `keras.random` depends on them.
_SHARED = (distribution_lib.GLOBAL_ATTRIBUTE_NAME, "dtype_policy", GLOBAL_RANDOM_SEED, GLOBAL_SEED_GENERATOR)

_REMEMBERED = 256  # signatures of batches


class _Layout(NamedTuple):
    """The names of the leaves of batches with one structure and one set of shapes, and the placement of a dict of them."""

    names: tuple[str, ...]
    placement: Placement


class KerasPlacement:
    """A placement of batches where Keras's own iterator would put them: on the default device, or as the distribution says.

    The layout is computed once for each structure and set of shapes. On a CPU without a distribution, some versions of Keras pass
    host arrays to their functions. There the arrays stay on the host, and are only copied to aligned memory: see `aligned`. An
    `Execution` becomes a `KerasItem` for all its steps.

    It is made on the thread that calls `fit`, and gives Keras's settings of this thread to the thread that reads: the
    distribution, the dtype policy, and the seed generator of `keras.random`.

    Args:
      steps: number of batches in a complete `Execution`.
    """

    def __init__(self, steps: int = 1) -> None:
        self._steps = steps
        self._distribution = distribution_lib.distribution()
        self._default = Placement(None, None)
        self._layouts: dict[Hashable, _Layout] = {}
        self._rows: Rows | None = None
        self._on_host = jax.default_backend() == "cpu" and not behaviour().on_device
        self._state: dict[str, Any] = {}

    def take_settings(self) -> None:
        """Note the Keras settings of this thread, before a new thread starts."""
        self._state = {name: global_state.get_global_attribute(name) for name in _SHARED}

    def leave_settings(self) -> None:
        """Give this thread the seed generator that the other thread made, after that thread has ended."""
        generator = self._state.get(GLOBAL_SEED_GENERATOR)
        if generator is not None and global_state.get_global_attribute(GLOBAL_SEED_GENERATOR) is None:
            global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)

    def check_rows(self, batch_sizes: Sequence[int]) -> None:
        """Check nothing: the layout depends on the shapes, so each batch is checked by itself."""

    def shardings_over_processes(self) -> list[Sharding]:
        if self._distribution is None:
            return []
        sharding = self._distribution.get_data_layout((1,)).backend_layout
        return [] if sharding.is_fully_addressable else [sharding]

    def expect(self, rows: Rows | None, name: str) -> None:
        """Note the rows that host batches have: read by a Loader, or given to Keras by each process."""
        self._rows = rows

    @contextlib.contextmanager
    def context(self) -> Iterator[object]:
        """Enter the JAX and Keras settings on a new thread."""
        for name, value in self._state.items():
            global_state.set_global_attribute(name, value)
        with self._default.context():
            try:
                yield None
            finally:
                generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
                if generator is not None:  # a thread that makes batches may have one, a thread that only places them has none
                    self._state[GLOBAL_SEED_GENERATOR] = generator

    def consumer_context(self) -> Context | None:
        return self._default.consumer_context()

    def __call__(self, batch: Batch | Execution) -> Placed:
        """Put a batch or an execution on its devices."""
        if isinstance(batch, Execution):
            return self._place_execution(batch)
        return self._place_batch(batch, stacked=False)

    def _place_execution(self, execution: Execution) -> Placed:
        sizes: list[int] = []

        def place(batch: Batch, stacked: bool) -> Batch:
            placed = self._place_batch(batch, stacked)
            sizes.append(placed.bytes)
            return placed.batch

        return Placed(assemble(execution, self._steps, place), sum(sizes), "")

    def _place_batch(self, batch: Batch, stacked: bool) -> Placed:
        if self._on_host and self._distribution is None:
            batch = aligned(batch)
            return Placed(batch, sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree_util.tree_leaves(batch)), "")
        distribution = self._distribution
        placed = self._default(batch) if distribution is None else self._distribute(batch, distribution, stacked)
        # JAX sorts the keys of dicts, but a model that runs eagerly may depend on their order.
        ordered = tree.map_structure(lambda _, leaf: leaf, batch, placed.batch, none_is_leaf=False)
        return Placed(ordered, placed.bytes, "")  # no `change`: a shorter last batch is normal for Keras

    def _distribute(self, batch: Batch, distribution: Any, stacked: bool) -> Placed:
        leaves, treedef = jax.tree_util.tree_flatten(batch)
        key = (stacked, treedef, *[leaf.shape for leaf in leaves])
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _REMEMBERED:
                self._layouts.clear()
            layout = self._layouts[key] = _make_layout(batch, stacked, distribution, self._rows)
        placed = layout.placement(dict(zip(layout.names, leaves, strict=True)))
        leaves = [placed.batch[name] for name in layout.names]
        return Placed(jax.tree_util.tree_unflatten(treedef, leaves), placed.bytes, "")


def _make_layout(batch: Batch, stacked: bool, distribution: Any, rows: Rows | None) -> _Layout:
    """Return the layout of a batch. Leaves go by name, because a pytree of shardings cannot have None for a leaf that is None."""
    shardings = {name: _layout(distribution, leaf.shape, stacked).backend_layout for name, leaf in leaves_with_names(batch)}
    placement = Placement(shardings, None, row_dim=int(stacked))
    if rows is not None:
        placement.expect(rows, "the Loader")
    return _Layout(tuple(shardings), placement)


def _layout(distribution: Any, shape: tuple[int, ...], stacked: bool) -> Any:
    """Return the layout of [B, ...], or of [steps, B, ...], in which the dimension of steps is not sharded."""
    if not stacked:
        return distribution.get_data_layout(shape)
    layout = distribution.get_data_layout(shape[1:])
    return distribution_lib.TensorLayout((None, *layout.axes), layout.device_mesh)


# Executions of several steps.


def gather(read: Callable[[int], Batch], numbers: Iterable[int]) -> Execution:
    """Read the batches of these numbers, up to the end of the data or the first error.

    Raises:
      Exhausted, StopIteration: the error of `read`, if there is not even the first batch.
    """
    batches: list[Batch] = []
    try:
        for number in numbers:
            batches.append(read(number))
    except (Exhausted, StopIteration):
        if not batches:
            raise
    except Exception as error:
        return Execution(batches, error)
    return Execution(batches, None)


def assemble(execution: Execution, steps: int, place: Callable[[Batch, bool], Batch]) -> KerasItem:
    """Place an execution in the form that Keras takes.

    Args:
      steps: number of batches in a complete execution.
      place: puts a batch on the device, or, with True as second argument, a stack [steps, B, ...] of batches.

    Returns:
      A stack if the execution is complete and its batches have the same shapes, otherwise a list.
    """
    batches, failure = execution
    try:
        stack = _stack(batches) if len(batches) == steps else None
        if stack is not None:
            return KerasItem(place(stack, True), steps, failure)
    except Exception as error:
        return KerasItem(None, 0, error)
    placed = []
    for batch in batches:
        try:
            placed.append(place(batch, False))
        except Exception as error:
            return KerasItem(partial_batches(placed), len(placed), error)
    return KerasItem(partial_batches(placed), len(placed), failure)


def _stack(batches: Sequence[Batch]) -> Batch | None:
    """Stack batches [B, ...] to [steps, B, ...]; None if they cannot be stacked, as where the last one is shorter."""
    first = batches[0]
    if any(isinstance(leaf, JAXSparse) for leaf in tree.flatten(first)):
        raise ValueError(
            f"steps_per_execution={len(batches)} with sparse arrays, which this version of Keras cannot stack: "
            "use steps_per_execution=1, or dense arrays"
        )
    structure: Any = jax.tree.structure(first)
    if any(structure != jax.tree.structure(batch) for batch in batches[1:]):
        return None
    try:
        return tree.map_structure(_stack_leaves, *batches, none_is_leaf=False)
    except (TypeError, ValueError, RuntimeError):  # other shapes, or no numbers; the placement raises a more precise error
        return None


def _stack_leaves(*leaves: Any) -> Any:
    first = leaves[0]
    same = all(isinstance(x, np.ndarray) and (x.shape, x.dtype) == (first.shape, first.dtype) for x in leaves)
    if same and is_numeric(first.dtype):
        return np.stack(leaves, out=empty((len(leaves), *first.shape), first.dtype))
    return jax.numpy.stack(leaves)


class ExecutionAdapter:
    """A `BatchAdapter` whose items are executions of the batches of another adapter.

    Args:
      steps: number of batches in an execution.
      epoch_batches: an execution ends at every multiple of this number; None if the batches end by themselves.
      first: number of the first batch, from which the multiples are counted.
    """

    def __init__(self, batch_adapter: BatchAdapter, steps: int, epoch_batches: int | None, first: int):
        self._batch_adapter, self._steps, self._epoch_batches, self._first = batch_adapter, steps, epoch_batches, first
        self.name, self.workers, self.batch_sizes = batch_adapter.name, batch_adapter.workers, batch_adapter.batch_sizes
        self.fingerprint, self.restore, self.read_for = batch_adapter.fingerprint, batch_adapter.restore, batch_adapter.read_for

    def producers(self, clocks: Sequence[Clock]) -> Producers:
        producers = self._batch_adapter.producers(clocks)

        def gather_execution(work: Callable[[int], Batch], number: int) -> Execution:
            return gather(work, self.numbers(number))

        return producers._replace(works=[partial(gather_execution, work) for work in producers.works], inline=False)

    def split(self, item: Execution) -> Produced:
        return Produced(item._replace(batches=[self._batch_adapter.split(batch).batch for batch in item.batches]), None)

    def numbers(self, execution: int) -> range:
        """Return the numbers of the batches of an execution, as the adapter of the batches counts them."""
        steps, epoch_batches = self._steps, self._epoch_batches
        if epoch_batches is None:
            return range(execution * steps, (execution + 1) * steps)
        begun = self._first % epoch_batches  # batches of the first epoch that were consumed before
        in_first = -(-(epoch_batches - begun) // steps)  # executions in the rest of the first epoch
        if execution < in_first:
            start, end = begun + execution * steps, epoch_batches
        else:
            epoch, number = divmod(execution - in_first, -(-epoch_batches // steps))
            start, end = (1 + epoch) * epoch_batches + number * steps, (2 + epoch) * epoch_batches
        return range(start - begun, min(start + steps, end) - begun)
