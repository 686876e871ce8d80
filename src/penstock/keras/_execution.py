"""The batches of one execution of several steps, for versions of Keras that take them at once.

With `steps_per_execution=n`, Keras 3.16 takes one item for n steps: their batches stacked, [n, B, ...], which one program on the
device goes through. Batches go in here; such items come out, made on the thread that reads ahead:

    gather      read the batches of an execution            an `Execution`, on the host
    assemble    stack them there, and place the stack       the item that Keras takes: a `KerasItem`

An execution has fewer than n batches at the end of the data, at the end of an epoch of a Loader without end, and before an error:
the steps before the error count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.sparse import JAXSparse
from jax.sharding import Sharding
from keras.src import tree

from penstock._clock import Clock
from penstock._producers import Exhausted, Producers
from penstock.data.order.rows import Rows
from penstock.data.tree import Batch, is_numeric
from penstock.feed.adapters import BatchAdapter, Produced
from penstock.keras._aligned import empty
from penstock.keras.versions import partial_batches


class Execution(NamedTuple):
    """The host batches [B, ...] of one execution, in order.

    Attributes:
      batches: the batches.
      failure: the error that replaces the batch after them; None if there is none.
    """

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


def gather(read: Callable[[int], Batch], numbers: Iterable[int]) -> Execution:
    """Read the batches of these numbers, up to the end of the data or the first error.

    Raises:
      Exhausted, StopIteration: there is not even the first batch; the error of `read` is raised.
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
      execution: the host batches.
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
    """Stack batches [B, ...] to [steps, B, ...].

    Returns:
      None if they cannot be stacked, for example because the last one is shorter.

    Raises:
      ValueError: there are sparse arrays in them.
    """
    first = batches[0]
    if any(isinstance(leaf, JAXSparse) for leaf in tree.flatten(first)):
        raise ValueError(
            f"steps_per_execution={len(batches)} with sparse arrays, of which this version of Keras stacks none: "
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
      batch_adapter: the adapter of the batches.
      steps: number of batches in an execution.
      epoch_batches: an execution ends at every multiple of this number; None if the batches end by themselves.
      first: number of the first batch, from which the multiples are counted.
    """

    def __init__(self, batch_adapter: BatchAdapter, steps: int, epoch_batches: int | None, first: int):
        self._batch_adapter, self._steps, self._epoch_batches, self._first = batch_adapter, steps, epoch_batches, first
        self.name, self.workers, self.batch_sizes = batch_adapter.name, batch_adapter.workers, batch_adapter.batch_sizes

    def fingerprint(self) -> dict[str, Any]:
        """Return all that must be equal for a saved state to fit."""
        return self._batch_adapter.fingerprint()

    def restore(self, step: int, position: Any) -> None:
        """Continue after `step` batches."""
        self._batch_adapter.restore(step, position)

    def read_for(self, shardings: Sequence[Sharding]) -> Rows | None:
        """Read the rows that the devices of this process need."""
        return self._batch_adapter.read_for(shardings)

    def producers(self, clocks: Sequence[Clock]) -> Producers:
        """Return the producers of the items, with one clock for each worker."""
        producers = self._batch_adapter.producers(clocks)

        def gather_execution(work: Callable[[int], Batch], number: int) -> Execution:
            return gather(work, self.numbers(number))

        return producers._replace(works=[partial(gather_execution, work) for work in producers.works])

    def split(self, item: Execution) -> Produced:
        """Split a produced item into batch and position."""
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
