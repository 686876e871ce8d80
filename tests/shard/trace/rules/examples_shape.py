"""Examples of primitives that move elements, and of elementwise ones."""

from __future__ import annotations

import jax.numpy as jnp
from hypothesis import assume
from hypothesis import strategies as st
from jax import lax
from jax.interpreters.ad import add_jaxvals
from tests.shard.trace.rules.examples import example, examples, integers, shapes, size

ALONG = st.integers(0, 7)


@examples("broadcast_in_dim")
@st.composite
def broadcast(draw):
    shape = draw(shapes(1, 4))
    kept = sorted(draw(st.sets(st.integers(0, len(shape) - 1))))
    operand = tuple(draw(st.sampled_from([1, shape[dim]])) for dim in kept)
    assume(operand != shape)  # JAX leaves that out
    return example(
        lambda x: lax.broadcast_in_dim_p.bind(x, shape=shape, broadcast_dimensions=tuple(kept), sharding=None), operand
    )


@examples("iota")
@st.composite
def created(draw):
    shape = draw(shapes())
    dim = draw(ALONG) % len(shape)
    return example(lambda: lax.broadcasted_iota("int32", shape, dim))


@examples("transpose")
@st.composite
def transposition(draw):
    shape = draw(shapes(2, 4))
    order = draw(st.permutations(range(len(shape))))
    return example(lambda x: lax.transpose_p.bind(x, permutation=tuple(order)), shape)


@examples("reshape")
@st.composite
def split_and_merge(draw):
    """Draw a reshape between two ways to merge the same dimensions."""
    parts = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=2, max_size=4))

    def merged():
        shape = [1]
        for part in parts:
            if draw(st.booleans()):
                shape[-1] *= part
            else:
                shape.append(part)
        return tuple(shape)

    before, after = merged(), merged()
    return example(lambda x: lax.reshape_p.bind(x, new_sizes=after, dimensions=None, sharding=None), before)


@examples("squeeze")
@st.composite
def squeezed(draw):
    shape = (1, draw(size), 1, draw(size))
    gone = draw(st.sampled_from([(0,), (2, 0), (-2,)]))
    return example(lambda x: lax.squeeze(x, gone), shape)


@examples("concatenate")
@st.composite
def concatenation(draw):
    shape = draw(shapes(2, 3))
    dim = draw(ALONG) % len(shape)
    other = tuple(3 if at == dim else each for at, each in enumerate(shape))
    return example(lambda x, y: lax.concatenate([x, y, x], dim), shape, other)


# JAX 0.10.0 writes a stack as a concatenation.
@examples(*(("stack", "tile") if hasattr(lax, "stack_p") else ("tile",)))
@st.composite
def repeated(draw):
    shape = draw(shapes(1, 2))
    axis = draw(ALONG) % len(shape)
    reps = tuple(draw(st.sampled_from([1, 2])) for _ in shape)
    return example(lambda x, y: (jnp.stack([x, y], axis), lax.tile_p.bind(x, reps=reps)), shape, shape)


# It is the transpose of a stack, so JAX 0.10.0 does not have it either.
@examples(*(("unstack",) if hasattr(lax, "stack_p") else ()))
@st.composite
def taking_apart(draw):
    shape = draw(shapes(2, 3))
    axis = draw(ALONG) % len(shape)
    return example(lambda x: tuple(jnp.unstack(x, axis=axis)), shape)


@examples("split")
@st.composite
def splitting(draw):
    shape = (draw(size), 8, draw(size))
    sizes = draw(st.sampled_from([(4, 4), (2, 6), (1, 7)]))
    return example(lambda x: lax.split(x, sizes, 1), shape)


@examples("pad")
@st.composite
def padding(draw):
    shape = draw(shapes(2, 3))
    config = [draw(st.sampled_from([(0, 0, 0), (0, 0, 0), (1, 1, 0), (2, 0, 0), (1, -1, 0), (0, 1, 1)])) for _ in shape]
    return example(lambda x: lax.pad(x, 0.0, config), shape)


@examples("slice")
@st.composite
def slicing(draw):
    shape = draw(shapes(2, 3))
    parts = tuple(slice(*draw(st.sampled_from([(0, each), (0, each), (each // 2, each), (0, each, 2)]))) for each in shape)
    strides = [part.step or 1 for part in parts]
    return example(lambda x: lax.slice(x, [part.start for part in parts], [part.stop for part in parts], strides), shape)


@examples("rev")
@st.composite
def reversal(draw):
    shape = draw(shapes(2, 3))
    dim = draw(ALONG) % len(shape)
    return example(lambda x: lax.rev(x, (dim,)), shape)


@examples("optimization_barrier")
@st.composite
def barrier(draw):
    return example(lambda *x: lax.optimization_barrier(x), draw(shapes()), draw(shapes()))


@examples("select_n", "clamp")
@st.composite
def choice(draw):
    """Draw a select and a clamp; predicate and bounds have the shape of the operand or are scalars."""
    shape = draw(shapes())
    scalar = draw(st.booleans())

    def choose(x, y):
        which, bound = (x.sum() > 0, x.max()) if scalar else (x > y, y)
        return lax.select_n(which, x, y), lax.clamp(bound - 1, x, bound)

    return example(choose, shape, shape)


@examples("bitcast_convert_type")
@st.composite
def bitcast(draw):
    shape = (*draw(shapes(1, 2)), 2)
    types = draw(st.sampled_from([("int32", "int16"), ("int16", "int32"), ("float32", "int32")]))
    return example(lambda x: lax.bitcast_convert_type(lax.bitcast_convert_type(x, types[0]), types[1]), shape)


@examples(
    "add", "mul", "exp", "square", "erf_inv", "reduce_precision", "integer_pow", "convert_element_type", "is_finite", "eq", "copy"
)
@st.composite
def elementwise(draw):
    def compute(x, y):
        return (
            x + y * 2.0,
            jnp.exp(x),
            jnp.square(x),
            lax.erf_inv(x / 8),
            lax.reduce_precision(x, 8, 7),
            x**3,
            x.astype("int32"),
            jnp.isfinite(x),
            x == y,
            lax.copy_p.bind(x),
        )

    shape = draw(shapes())
    return example(compute, shape, shape)


@examples(
    *("add", "add_any", "sub", "mul", "div", "rem", "max", "min", "pow", "atan2", "nextafter", "complex"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
)
@st.composite
def elementwise_of_size_one(draw):
    """Draw operands with dimensions of size one, which JAX leaves for the operation to broadcast."""
    shape = draw(st.sampled_from([(6, 3), (3, 4)]))
    small = tuple(draw(st.sampled_from([1, each])) for each in shape)
    pairs = [lax.add, lax.sub, lax.mul, lax.div, lax.rem, lax.max, lax.min, lax.pow, lax.atan2, lax.nextafter, lax.complex]
    pairs += [lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge]
    return example(lambda x, y: [add_jaxvals(x, x), *(pair(x, y) for pair in pairs)], shape, small)


@examples("and", "or", "xor", "shift_left", "shift_right_logical", "shift_right_arithmetic")
@st.composite
def elementwise_of_integers(draw):
    shape = draw(shapes())
    pairs = [
        lax.bitwise_and,
        lax.bitwise_or,
        lax.bitwise_xor,
        lax.shift_left,
        lax.shift_right_logical,
        lax.shift_right_arithmetic,
    ]
    return example(lambda x: [pair(x, x) for pair in pairs], integers(shape, 8))
