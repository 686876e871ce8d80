"""Examples of gathers, scatters, and slices at positions that are known only at run time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax
from tests.shard.trace.rules.examples import distinct, even, example, examples, integers, shapes, size

MODES = ["fill", "clip", "promise_in_bounds"]


@examples("gather")
@st.composite
def lookup(draw):
    rows, features, places, mode = draw(even), draw(size), draw(shapes(1, 2)), draw(st.sampled_from(MODES))
    return example(lambda table, at: table.at[at].get(mode=mode), (rows, features), integers(places, rows))


@examples("gather")
@st.composite
def lookup_that_keeps_a_unit_dimension(draw):
    """Draw a lookup in the form of PyTorch's embedding."""
    rows, features, places = draw(even), draw(even), draw(even)
    numbers = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0, 1))
    at = jnp.stack([integers((places,), rows), jnp.zeros(places, "int32")], -1)
    return example(lambda table, at: lax.gather(table, at, numbers, (1, features)), (rows, features), at)


@examples("gather")
@st.composite
def lookup_in_two_dimensions(draw):
    rows, columns, places = draw(even), draw(even), draw(even)
    return example(
        lambda table, i, j: table[i, j], (rows, columns, draw(size)), integers((places,), rows), integers((places,), columns)
    )


@examples("gather")
@st.composite
def windows(draw):
    """Draw a gather of slices of two rows."""
    rows, places = draw(st.sampled_from([4, 6, 8])), draw(even)
    cut = jax.vmap(lambda table, at: lax.dynamic_slice(table, (at, 0), (2, table.shape[1])), (None, 0))
    return example(cut, (rows, draw(size)), integers((places,), rows - 1))


@examples("gather")
@st.composite
def take_along_axis(draw):
    batch, rows, features = draw(size), draw(even), draw(size)
    along = draw(st.sampled_from([1, 2]))
    count = draw(st.sampled_from([1, 2]))
    shape = (batch, count, features) if along == 1 else (batch, rows, count)
    below = rows if along == 1 else features
    return example(lambda x, at: jnp.take_along_axis(x, at, along), (batch, rows, features), integers(shape, below))


@examples("scatter-add")
@st.composite
def gradient_of_lookup(draw):
    rows, features, places = draw(even), draw(size), draw(shapes(1, 2))
    return example(jax.grad(lambda table, at: (table[at] ** 2).sum()), (rows, features), integers(places, rows))


@examples("scatter-add")
@st.composite
def gradient_of_take_along_axis(draw):
    batch, rows = draw(size), draw(even)
    at = integers((batch, draw(st.sampled_from([1, 2]))), rows)
    return example(jax.grad(lambda x, at: (jnp.take_along_axis(x, at, 1) ** 2).sum()), (batch, rows), at)


@examples("scatter-add")
@st.composite
def gradient_of_lookup_that_keeps_a_unit_dimension(draw):
    given = draw(lookup_that_keeps_a_unit_dimension())
    return example(jax.grad(lambda table, at: (given.function(table, at) ** 2).sum()), *given.arguments)


@examples("scatter-add")
@st.composite
def histogram(draw):
    return example(lambda at: jnp.zeros(8).at[at].add(1.0), integers((draw(even),), 8))


@examples("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
@st.composite
def update(draw):
    """Draw updates of rows, each at most once, as the order of updates is not defined."""
    rows, features = 8, draw(size)
    at = distinct((rows,)).astype("int32")[: draw(even)]
    return example(_all_updates, (rows, features), at, (len(at), features))


@examples("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
@st.composite
def batched_update(draw):
    batch, rows = draw(even), draw(even)
    at = integers((batch, 1), rows)
    return example(jax.vmap(_all_updates), (batch, rows), at, (batch, 1))


@examples("scatter", "scatter-add")
@st.composite
def update_of_windows(draw):
    """Draw updates of more than one row."""
    numbers = lax.ScatterDimensionNumbers(update_window_dims=(1, 2), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,))

    def both(table, at, rows):
        return lax.scatter_add(table, at, rows, numbers), lax.scatter(table, at, rows, numbers)

    features = draw(even)
    return example(both, (8, features), jnp.array([[0], [4]], "int32"), (2, draw(st.sampled_from([2, 4])), features))


def _all_updates(table, at, rows):
    there = table.at[at]
    return there.set(rows), there.add(rows), there.subtract(rows), there.multiply(rows), there.min(rows), there.max(rows)


@examples("dynamic_slice", "dynamic_update_slice")
@st.composite
def slice_at(draw):
    """Draw slices whose sizes are one, some or all elements of a dimension."""
    shape = draw(shapes(2, 3))
    sizes = tuple(draw(st.sampled_from(sorted({1, max(1, each // 2), each}))) for each in shape)
    starts = [jnp.int32(min(1, each - taken)) for each, taken in zip(shape, sizes, strict=True)]

    def take_and_put(x, part, *starts):
        return lax.dynamic_slice(x, starts, sizes), lax.dynamic_update_slice(x, part, starts)

    return example(take_and_put, shape, sizes, *starts)
