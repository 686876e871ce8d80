"""Run a model's training, evaluation or prediction by a plan, in place of the function that Keras's trainer makes.

A `PlannedFunction` maps (state, iterator) to (outputs, state), and the trainer calls it for each execution. The first batch of
each signature is planned for; its arrays are then brought into the layouts of the plan.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from penstock.keras.model_step import ModelStep, StepArguments, explained
from penstock.keras.variables import concatenated, is_in_layout, put
from penstock.keras.versions import behaviour, is_partial

State = tuple[list[Any], ...]
"""The values of the variables of each group, in Keras's order."""


class PlannedFunction:
    """A function that Keras's trainer calls for each execution, with the layouts of a plan.

    Args:
      distribution: the `AutoShardDistribution` that plans.
      model, function: as for `ModelStep`.

    The given state is donated, as in Keras. A state that this function returned is known to be in its layouts; any other one, as
    where an epoch begins, is brought there.
    """

    def __init__(self, distribution: Any, model: Any, function: str):
        self.distribution = distribution
        self._step = ModelStep(model, function)
        self._layouts: dict[Hashable, Layouts] = {}
        self._jitted: dict[tuple[Hashable, int], Any] = {}
        self._shapes: Hashable = None

    def __call__(self, state: State, iterator: Iterator[Any]) -> tuple[Any, State]:
        """Take one execution of the iterator: `steps_per_execution` batches, fewer at the end of the data.

        Returns:
          The logs of the last batch, or all outputs of "predict"; and the new state.
        """
        steps = self._step.model.steps_per_execution
        item = next(iterator)
        if steps == 1:
            return self._run(state, item)
        if not behaviour().stacks:
            return self._run_each(state, itertools.chain([item], itertools.islice(iterator, steps - 1)))
        if is_partial(item):
            return self._run_each(state, iter(item))
        count = jax.tree_util.tree_leaves(item)[0].shape[0]
        if count == steps:
            return self._run(state, item, stacked=steps)
        return self._run_each(state, (jax.tree_util.tree_map(lambda leaf, n=n: leaf[n], item) for n in range(count)))

    def prepare(self, data: Any) -> Layouts:
        """Plan for the shapes and dtypes of a batch, before there is one to run."""
        return self._prepare(self._step.arguments(data))

    def _run_each(self, state: State, batches: Iterator[Any]) -> tuple[Any, State]:
        every = []
        for batch in batches:
            outputs, state = self._run(state, batch)
            every.append(outputs)
        if self._step.function != "predict":
            return every[-1], state
        return jax.tree_util.tree_map(lambda *parts: concatenated(parts), *every), state

    def _run(self, state: State, data: Any, stacked: int = 0) -> tuple[Any, State]:
        """Run one batch, or `stacked` of them, stacked [stacked, B, ...]."""
        leaves, structure = jax.tree_util.tree_flatten(data)
        skip = int(bool(stacked))
        own = state if isinstance(state, _OwnState) and state.function is self else None
        begins = own is None
        if begins:
            self._shapes = tuple((each.shape, each.dtype) for group in state for each in group)
        batch = tuple((leaf.shape[skip:], leaf.dtype) for leaf in leaves)
        key = (structure, batch, self._shapes)
        layouts = self._layouts.get(key)
        if layouts is None or (begins and not self._is_current(layouts)):
            data = jax.tree_util.tree_unflatten(structure, [jax.ShapeDtypeStruct(*each) for each in batch])
            try:
                layouts = self._prepare(self._step.arguments(data))
            except BaseException:
                self._give_back(state)
                raise
            self._layouts[key], begins = layouts, True
            self._jitted = {each: jitted for each, jitted in self._jitted.items() if each[0] != key}
        if begins or (own is not None and own.layouts != layouts.state):
            _place_state(state, layouts.state)
        first = (key, stacked) not in self._jitted
        if first:
            self._jitted[key, stacked] = _jit(layouts, stacked, self._step.function)
        jitted = self._jitted[key, stacked]
        placed = [_place(leaf, sharding, skip) for leaf, sharding in zip(leaves, layouts.data, strict=True)]
        with explained(self._step) if first else contextlib.nullcontext():  # JAX may find a kept tensor only as it compiles
            outputs, flat = jitted([each for group in state for each in group], placed)
        values = iter(flat)
        returned = _OwnState([next(values) for _ in group] for group in state)
        returned.function, returned.layouts = self, layouts.state
        return jax.tree_util.tree_unflatten(layouts.logs, outputs), returned

    def _prepare(self, arguments: StepArguments) -> Layouts:
        """Return the layouts of a plan for a batch, or the compiler's, for fewer rows than were planned for."""
        current = {key: layouts for key, layouts in self._layouts.items() if self._is_current(layouts)}
        smaller = any(layouts.planned and _is_part(arguments.data, key) for key, layouts in current.items())
        if smaller or (current and self.distribution._is_uneven(arguments)):
            return self.distribution._leave_to_compiler(self._step, arguments)
        # Later shapes keep the layouts of the first, or all variables would move whenever the shape changes.
        return self.distribution._plan_step(self._step, arguments, keep=bool(current))

    def _is_current(self, layouts: Layouts) -> bool:
        """Return whether the variables still have these layouts. The plan of another function may have changed them."""
        variables = self._step.all_variables()
        return len(variables) == len(layouts.state) and all(
            getattr(variable._layout, "backend_layout", None) == sharding
            for variable, sharding in zip(variables, layouts.state, strict=True)
        )

    def _give_back(self, state: State) -> None:
        """Give the variables their values, which the trainer has taken, so that a failed plan loses no weights."""
        for variables, values in zip(self._step.variables().values(), state, strict=False):
            for variable, value in zip(variables, values, strict=False):
                variable._value = value


@dataclass(frozen=True)
class Layouts:
    """The shardings of a step's arrays, and the step with its sharding constraints.

    Attributes:
      state, data, outputs: a sharding for each variable, for each leaf of a batch, and for each of the logs.
      run: from the flat state and the flat batch to the flat logs and the flat new state.
      logs: the structure of the logs.
      planned: whether a plan chose the inner layouts, and not the compiler.
    """

    state: tuple[NamedSharding, ...]
    data: tuple[NamedSharding, ...]
    outputs: tuple[NamedSharding, ...]
    run: Callable[..., list[Any]]
    logs: Any
    planned: bool


class _OwnState(tuple):
    """A state that a planned function returned, in the layouts of its plan.

    The function keeps no reference to it, which would keep the values of variables alive after others are loaded.
    """

    function: PlannedFunction
    layouts: tuple[NamedSharding, ...]


def _is_part(data: Any, key: Any) -> bool:
    """Return whether a batch is like one that was planned for, with fewer rows."""
    structure, shapes, _ = key
    leaves, found = jax.tree_util.tree_flatten(data)
    if found != structure or len(leaves) != len(shapes):
        return False
    pairs = [(leaf.shape, tuple(shape)) for leaf, (shape, _) in zip(leaves, shapes, strict=True) if leaf.shape or shape]
    return all(len(one) == len(other) and one[1:] == other[1:] and one[0] < other[0] for one, other in pairs)


def _place_state(state: State, shardings: Sequence[NamedSharding]) -> None:
    """Bring the values of variables into their layouts, one after the other, so that at most one is there twice."""
    expected = iter(shardings)
    for group in state:
        for number, value in enumerate(group):
            sharding = next(expected)
            # An equivalent sharding on another mesh would do, but JAX would compile the step once more for it.
            if not isinstance(value, jax.Array) or value.sharding != sharding:
                group[number] = put(value, None, sharding)
                del value
                # Without waiting, all values would be there twice. In several processes, each of these programs communicates,
                # and those that run at the same time on CPUs may do so in another order in each process, and block each other.
                jax.block_until_ready(group[number])


def _place(leaf: Any, sharding: NamedSharding, skip: int) -> jax.Array:
    """Return a leaf of a batch in its layout. In several processes, a host array has the rows of this process.

    Args:
      sharding: the layout of one batch.
      skip: the number of dimensions before the rows, which are not sharded.
    """
    if skip:
        sharding = _stacked(sharding)
    if is_in_layout(leaf, sharding):
        return leaf
    if isinstance(leaf, jax.Array) or sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    return jax.make_array_from_process_local_data(sharding, leaf)


def _stacked(sharding: NamedSharding) -> NamedSharding:
    """Return the sharding of several arrays that are stacked along a new first dimension."""
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def _jit(layouts: Layouts, stacked: int, function: str) -> Any:
    """Return the jitted function from the flat state and batch to the flat logs and new state.

    Args:
      stacked: the number of batches in one; 0 if they are not stacked.
      function: "predict" concatenates the outputs of its batches; others return the last logs.
    """
    count = layouts.logs.num_leaves

    def one(state: list[Any], data: list[Any]) -> tuple[list[Any], list[Any]]:
        flat = layouts.run(*state, *data)
        return flat[:count], flat[count:]

    def several(state: list[Any], data: list[Any]) -> tuple[list[Any], list[Any]]:
        def body(state: list[Any], data: list[Any]) -> tuple[list[Any], list[Any]]:
            outputs, state = one(state, data)
            return state, outputs

        state, every = jax.lax.scan(body, state, data, length=stacked)
        if function == "predict":
            return [each.reshape(-1, *each.shape[2:]) for each in every], state
        return [each[-1] for each in every], state

    data = [_stacked(each) if stacked else each for each in layouts.data]
    return jax.jit(
        several if stacked else one,
        in_shardings=(list(layouts.state), data),
        out_shardings=(list(layouts.outputs), list(layouts.state)),
        donate_argnums=0,
        keep_unused=True,
    )
