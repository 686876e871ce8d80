"""The batches of one execution of several steps, for versions of Keras that take them at once.

With `steps_per_execution=n`, Keras 3.16 takes one item for n steps: their batches stacked, [n, B, ...], through which a program
on the device goes. Here batches become such items, on the thread that reads ahead:

    gather      read the batches of an execution            an `Execution`, on the host
    assemble    stack them there, and place the stack       what Keras takes: a `Ready`

An execution ends before n batches at the end of the data, at the end of an epoch of a Loader that goes on, and before an
error: the steps before the error count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.sparse import JAXSparse
from keras.src import tree

from penstock._clock import Clock
from penstock._feed.adapters import BatchAdapter, Produced
from penstock._producers import Exhausted, Producers
from penstock.data.tree import Batch, is_numeric
from penstock.keras._aligned import empty
from penstock.keras._versions import partial_batches


class Execution(NamedTuple):
    """The host batches [B, ...] of one execution, in order.

    Attributes:
      failure: what stood in the place of the batch after them.
    """

    batches: list[Batch]
    failure: BaseException | None


class Ready(NamedTuple):
    """An item that Keras takes at one `next`.

    Attributes:
      item: a batch, a stack of batches, or a list of them that Keras steps through.
      steps: batches in it.
      failure: what stood in the place of the batch after them.
    """

    item: Any
    steps: int = 1
    failure: BaseException | None = None


def gather(read: Callable[[int], Batch], numbers: Iterable[int]) -> Execution:
    """Read the batches of those numbers, as far as there are any.

    Raises:
      Exhausted, StopIteration: there is not even the first; whatever `read` raises for that.
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


def assemble(execution: Execution, steps: int, place: Callable[[Batch, bool], Batch]) -> Ready:
    """Place an execution as Keras takes it: stacked if it has all its steps and they are alike, else as a list.

    Args:
      place: puts a batch on the device, or, given True, a stack [steps, B, ...] of them.
    """
    batches, failure = execution
    try:
        stack = _stack(batches) if len(batches) == steps else None
        if stack is not None:
            return Ready(place(stack, True), steps, failure)
    except Exception as error:
        return Ready(None, 0, error)
    placed = []
    for batch in batches:
        try:
            placed.append(place(batch, False))
        except Exception as error:
            return Ready(partial_batches(placed), len(placed), error)
    return Ready(partial_batches(placed), len(placed), failure)


def _stack(batches: Sequence[Batch]) -> Batch | None:
    """Stack batches [B, ...] as [steps, B, ...]. None if they cannot be stacked, as where the last is a shorter one.

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
    except (TypeError, ValueError, RuntimeError):  # of other shapes, or no numbers, of which placing has more to say
        return None


def _stack_leaves(*leaves: Any) -> Any:
    first = leaves[0]
    alike = all(isinstance(x, np.ndarray) and (x.shape, x.dtype) == (first.shape, first.dtype) for x in leaves)
    if alike and is_numeric(first.dtype):
        return np.stack(leaves, out=empty((len(leaves), *first.shape), first.dtype))
    return jax.numpy.stack(leaves)


class Executions:
    """An `Upstream` of the executions of another's batches. See `Upstream`.

    Args:
      steps: batches in an execution.
      whole: an execution ends at every multiple of so many batches; None where the batches end by themselves.
      first: number of the first batch, from which multiples are counted.
    """

    def __init__(self, batch_adapter: BatchAdapter, steps: int, whole: int | None, first: int):
        self._batch_adapter, self._steps, self._whole, self._first = batch_adapter, steps, whole, first
        self.name, self.workers, self.batch_sizes = batch_adapter.name, batch_adapter.workers, batch_adapter.batch_sizes

    def fingerprint(self) -> dict[str, Any]:
        return self._batch_adapter.fingerprint()

    def restore(self, step: int, position: Any) -> None:
        self._batch_adapter.restore(step, position)

    def producers(self, clocks: Sequence[Clock]) -> Producers:
        producers = self._batch_adapter.producers(clocks)

        def gather_execution(work: Callable[[int], Batch], number: int) -> Execution:
            return gather(work, self.numbers(number))

        return producers._replace(works=[partial(gather_execution, work) for work in producers.works], may_run_inline=False)

    def split(self, item: Execution) -> Produced:
        return Produced(item._replace(batches=[self._batch_adapter.split(batch).batch for batch in item.batches]), None)

    def numbers(self, execution: int) -> range:
        """Return the numbers that the upstream gives the batches of an execution."""
        steps, whole = self._steps, self._whole
        if whole is None:
            return range(execution * steps, (execution + 1) * steps)
        begun = self._first % whole  # batches of the first epoch that were had
        in_first = -(-(whole - begun) // steps)  # executions
        if execution < in_first:
            start, end = begun + execution * steps, whole
        else:
            epoch, number = divmod(execution - in_first, -(-whole // steps))
            start, end = (1 + epoch) * whole + number * steps, (2 + epoch) * whole
        return range(start - begun, min(start + steps, end) - begun)
