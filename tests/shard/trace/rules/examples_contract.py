"""Examples of matrix products and convolutions."""

from __future__ import annotations

import jax
from hypothesis import strategies as st
from jax import lax
from tests.shard.trace.rules.examples import even, example, examples, numbers, size


@examples("dot_general")
@st.composite
def product(draw):
    """Draw a product with batch, contracted and free dimensions in any order."""
    sizes = {name: draw(size) for name in "bckmn"}
    left, right = draw(st.permutations("bckm")), draw(st.permutations("bckn"))

    def at(order, names):
        return tuple(order.index(name) for name in names)

    contracted, batch = draw(st.sampled_from([("k", "b"), ("ck", "b"), ("k", "bc"), ("kc", ""), ("", "kb")]))
    numbers_ = ((at(left, contracted), at(right, contracted)), (at(left, batch), at(right, batch)))
    shapes = [tuple(sizes[name] for name in order) for order in (left, right)]
    return example(lambda x, y: lax.dot_general(x, y, numbers_), *shapes)


@examples("dot_general")
@st.composite
def gradient_of_product(draw):
    sizes = [draw(even) for _ in range(3)]
    return example(jax.grad(lambda x, y: (x @ y).sum(), (0, 1)), (*sizes[:1], 3, sizes[1]), (sizes[1], sizes[2]))


@examples("ragged_dot_general")
@st.composite
def ragged(draw):
    """Draw a ragged product with both gradients."""
    rows, inner, outer, groups = 8, draw(even), draw(even), draw(st.sampled_from([2, 3, 4]))
    counts = [2] * groups
    return example(
        jax.value_and_grad(lambda x, w, g: (lax.ragged_dot(x, w, g) ** 2).sum(), (0, 1)),
        (rows, inner),
        (groups, inner, outer),
        jax.numpy.array(counts, "int32"),
    )


SPECS = [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("HWCN", "IHWO", "CNHW")]


@st.composite
def _convolution(draw, groups: bool):
    spec = draw(st.sampled_from(SPECS))
    feature_groups = draw(st.sampled_from([2, 3, 4, 8])) if groups else 1
    sizes = {
        "N": draw(even),
        "C": feature_groups * draw(st.sampled_from([1, 2, 4])),
        "H": draw(st.sampled_from([6, 5, 8])),
        "W": draw(st.sampled_from([4, 6])),
    }
    window = draw(st.sampled_from([(3, 3), (1, 1), (2, 2), (3, 1)]))
    kernel = {
        "H": window[0],
        "W": window[1],
        "I": sizes["C"] // feature_groups,
        "O": feature_groups * draw(st.sampled_from([1, 2])) if groups else draw(even),
    }
    stride = draw(st.sampled_from([(1, 1), (2, 2), (1, 2)]))
    padding = draw(st.sampled_from(["SAME", "VALID"]))
    dilation = draw(st.sampled_from([(1, 1), (1, 1), (2, 1)]))

    def convolve(x, w):
        return lax.conv_general_dilated(
            x, w, stride, padding, dimension_numbers=spec, feature_group_count=feature_groups, rhs_dilation=dilation
        )

    return convolve, tuple(sizes[name] for name in spec[0]), tuple(kernel[name] for name in spec[1])


@examples("conv_general_dilated")
@st.composite
def convolution(draw):
    return example(*draw(_convolution(groups=False)))


@examples("conv_general_dilated")
@st.composite
def gradient_of_convolution(draw):
    """Draw the gradients of the image (a transposed convolution) and of the kernel (batch and features exchanged)."""
    convolve, *shapes = draw(_convolution(groups=False))
    return example(jax.grad(lambda x, w: (convolve(x, w)).sum(), (0, 1)), *shapes)


@examples("conv_general_dilated")
@st.composite
def grouped_convolution(draw):
    return example(*draw(_convolution(groups=True)))


@examples("conv_general_dilated")
@st.composite
def gradient_of_grouped_convolution(draw):
    """Draw both gradients; the gradient of the kernel has groups of the batch."""
    convolve, *shapes = draw(_convolution(groups=True))
    return example(jax.grad(lambda x, w: (convolve(x, w)).sum(), (0, 1)), *shapes)


@examples("conv_general_dilated")
@st.composite
def pointwise_convolution(draw):
    """Draw a matrix product at each position, with its gradients."""
    sizes = [draw(even) for _ in range(5)]
    spec = draw(st.sampled_from(SPECS[:2]))
    named = dict(zip("NHWCO", sizes, strict=True), I=sizes[3])
    shapes = [tuple(named.get(name, 1) if name not in "HW" or spec_ is spec[0] else 1 for name in spec_) for spec_ in spec[:2]]
    return example(
        jax.value_and_grad(
            lambda x, w: (lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=spec) ** 2).sum(), (0, 1)
        ),
        *map(numbers, shapes),
    )


@examples("conv_general_dilated")
@st.composite
def patches(draw):
    """Draw windows that do not overlap, as a vision transformer cuts an image, with their gradients."""
    batch, tall, wide, features = draw(even), draw(st.sampled_from([4, 8, 6])), draw(st.sampled_from([4, 8])), draw(even)
    return example(
        jax.value_and_grad(
            lambda x, w: (lax.conv_general_dilated(x, w, (2, 2), "VALID", dimension_numbers=SPECS[0]) ** 2).sum(), (0, 1)
        ),
        (batch, tall, wide, 3),
        (2, 2, 3, features),
    )
