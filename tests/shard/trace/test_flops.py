"""FLOPs of equations are those that XLA's cost analysis counts."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from tests.shard.trace.rules.examples import example, integers
from tests.shard.trace.rules.sharded import Equation, equations_of

from penstock.shard.hlo.analysis import measure
from penstock.shard.trace.flops import count_flops

X = (8, 16)


def assert_as_counted(equation: Equation, analysis) -> None:
    assert count_flops(equation.equation) == pytest.approx(analysis.cost_analysis().get("flops", 0.0), rel=0.01), equation


def compiled(equation: Equation):
    return jax.jit(equation).lower(*equation.operands).compile()


@pytest.mark.parametrize(
    ("left", "right", "numbers"),
    [((4, 8, 16), (16, 6), "abk,kc->abc"), ((3, 4, 5), (3, 5, 6), "bij,bjk->bik"), ((4, 3, 2), (3, 2, 5), "abc,bcd->ad")],
)
def test_products(left, right, numbers):
    given = example(jax.grad(lambda x, y: (jnp.einsum(numbers, x, y) ** 2).sum(), (0, 1)), left, right)
    for equation in equations_of(["dot_general"], given):
        assert_as_counted(equation, compiled(equation))


@pytest.mark.parametrize(
    ("stride", "dilation", "padding", "groups"),
    [(1, 1, "SAME", 1), (2, 1, "SAME", 2), (2, 1, "VALID", 8), (1, 2, "VALID", 1), (1, 2, "VALID", 2), (1, 1, "SAME", 8)],
)
def test_convolutions_and_their_gradients(stride, dilation, padding, groups):
    """Compare with the analysis before compilation: on CPUs, the gradient of a depthwise kernel becomes a dense convolution."""

    def loss(x, w):
        given = {"rhs_dilation": (dilation, dilation), "feature_group_count": groups}
        y = lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), **given)
        return (y**2).sum()

    found = equations_of(["conv_general_dilated"], example(jax.grad(loss, (0, 1)), (2, 8, 8, 8), (3, 3, 8 // groups, 8)))
    assert len(found) == 3
    for equation in found:
        if equation.equation.params["batch_group_count"] < 8:
            assert_as_counted(equation, jax.jit(equation).lower(*equation.operands))


def test_the_gradient_of_a_depthwise_kernel_is_counted_as_the_dense_one_that_it_becomes():
    def loss(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        return (lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=32) ** 2).sum()

    found = equations_of(["conv_general_dilated"], example(jax.grad(loss, 1), (8, 8, 8, 32), (3, 3, 1, 32)))
    for equation in found:
        assert_as_counted(equation, compiled(equation))
    assert count_flops(found[1].equation) > 30 * count_flops(found[0].equation)


def reductions(x):
    return x.sum(1), x.max(), (x > 1).all(0), x.argmax(0), lax.cumsum(x, 0), lax.cumprod(x, 1), lax.cummax(x, 0)


def pooled(x):
    y = x.reshape(2, 8, 4, 2)
    return lax.reduce_window(y, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME"), lax.max(y, y)


def elementwise(x):
    powers = x**2, x**3, x**7, x**-2
    return x + x, x / x, -x, abs(x), lax.sign(x), lax.exp(x), lax.tanh(x), lax.logistic(x), *powers, lax.erf_inv(x), lax.erfc(x)


def choices(x):
    return x < 2, jnp.where(x < 2, x, 0.0), x.astype("int32"), lax.is_finite(x), ~(x < 2), lax.clamp(0.0, x, 1.0)


def moves(x):
    return x.T, x.reshape(-1), lax.concatenate([x, x], 0), x[:3], lax.pad(x, 0.0, ((1, 1, 0), (0, 0, 0))), lax.rev(x, (0,))


@pytest.mark.parametrize("function", [reductions, pooled, elementwise, choices, moves])
def test_other_operations(function):
    given = example(function, X)
    names = {each.primitive.name for each in jax.make_jaxpr(function)(*given.arguments).eqns} - {"jit"}
    for equation in equations_of(names, given):
        assert_as_counted(equation, compiled(equation))


def test_a_gradient_of_a_lookup_adds_each_update():
    given = example(jax.grad(lambda table, at: (table[at] ** 2).sum()), X, integers((6,), 8))
    for equation in equations_of(["gather", "scatter-add"], given):
        assert_as_counted(equation, compiled(equation))


def test_a_long_scan_is_cut_into_blocks():
    (equation,) = equations_of(["cumsum"], example(lax.cumsum, (4096, 2)))
    assert_as_counted(equation, compiled(equation))


def test_each_row_of_a_ragged_product_meets_one_group():
    given = example(
        jax.grad(lambda x, w, sizes: (lax.ragged_dot(x, w, sizes) ** 2).sum(), (0, 1)), (8, 4), (3, 4, 5), jnp.array([2, 2, 4])
    )
    assert {count_flops(each.equation) for each in equations_of(["ragged_dot_general"], given)} == {2.0 * 8 * 4 * 5}


@pytest.mark.parametrize("transform", [jnp.fft.fft, jnp.fft.rfft, jnp.fft.fft2, lambda x: jnp.fft.irfft(x, 16)])
def test_fourier_transforms(transform):
    for equation in equations_of(["fft"], example(transform, (4, 8, 16))):
        assert_as_counted(equation, jax.jit(equation).lower(*equation.operands))


@pytest.mark.parametrize("draw", [jax.random.bits, jax.random.normal, jax.random.bernoulli])
def test_random_numbers_take_the_operations_of_threefry(draw):
    key, numbers = jax.random.key(0), 1 << 12
    equations = jax.make_jaxpr(lambda key: draw(key, shape=(numbers,)))(key).eqns
    while not any(each.primitive.name == "random_bits" for each in equations):
        equations = [inner for each in equations if "jaxpr" in each.params for inner in each.params["jaxpr"].eqns]
    counted = sum(count_flops(each) for each in equations if each.primitive.name == "random_bits")
    compiled = jax.jit(lambda key: draw(key, shape=(numbers,))).lower(key).compile()
    assert 100 * numbers < counted < measure(compiled, {"x": 1}).flops < 250 * numbers


def test_numbers_of_hardware_generators_count_nothing():
    key = jax.random.key(0, impl="rbg")
    (equation,) = jax.make_jaxpr(lambda key: jax.random.bits(key, (64,)))(key).eqns
    assert (equation.primitive.name, count_flops(equation)) == ("random_bits", 0.0)
