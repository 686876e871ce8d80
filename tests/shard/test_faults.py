"""Each fault of XLA that plans work around is reproduced; the test fails once it is fixed."""

from __future__ import annotations

from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from penstock._jaxlib_faults import (
    DENSE_DEPTHWISE_GRADIENT,
    FAULTS,
    GATHERED_TRANSFORM,
    PATCHES_SHARDED_TWICE,
    SCATTER_OF_A_SLICE,
    Fault,
)
from penstock.shard.hlo.flops import count_flops


def assert_as_declared(fault: Fault, seen: bool) -> None:
    here = f"jaxlib {version('jaxlib')}"
    if fault.present:
        assert seen, f"{here} has the fault no more: set its `fixed`, and see {fault.where}: {fault.what}"
    else:
        assert not seen, f"{here} has a fault that was fixed in {fault.fixed}: {fault.what}"


def constrained(array, mesh, *axes):
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec(*axes)))


def mesh_of(**sizes: int):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def test_a_scatter_of_a_slice():
    mesh = mesh_of(x=8)
    x = np.random.default_rng(0).normal(size=(16, 16)).astype("float32")

    def step(x, apart):
        cut = constrained(constrained(x, mesh), mesh, None, "x")
        cut = jax.lax.optimization_barrier(cut) if apart else cut
        return constrained(cut.at[:, 2].add(1.0), mesh, None, "x")

    expected = x + np.eye(16, dtype="float32")[2]
    np.testing.assert_allclose(jax.jit(lambda x: step(x, apart=True))(x), expected)
    assert_as_declared(SCATTER_OF_A_SLICE, not np.allclose(jax.jit(lambda x: step(x, apart=False))(x), expected))


def test_patches_sharded_by_position_and_by_feature():
    mesh = mesh_of(a=2, b=4)
    rng = np.random.default_rng(0)
    image, kernel = rng.normal(size=(2, 32, 32, 3)).astype("float32"), rng.normal(size=(8, 8, 3, 16)).astype("float32")

    def patches(image, kernel):
        return jax.lax.conv_general_dilated(image, kernel, (8, 8), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def sharded(image, kernel):
        image, kernel = constrained(image, mesh, None, "a"), constrained(kernel, mesh, None, None, None, "b")
        return constrained(patches(image, kernel), mesh, None, "a", None, "b")

    right = np.allclose(jax.jit(sharded)(image, kernel), jax.jit(patches)(image, kernel), atol=1e-3)
    assert_as_declared(PATCHES_SHARDED_TWICE, not right)


def test_the_gradient_of_a_depthwise_kernel_is_dense():
    features = 32

    def loss(kernel, image):
        numbers = ("NHWC", "HWIO", "NHWC")
        out = jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=features)
        return jnp.sum(out**2)

    image, kernel = jnp.ones((4, 16, 16, features)), jnp.ones((3, 3, 1, features))
    forward, both = (
        count_flops(jax.jit(function).lower(kernel, image).compile().as_text()) for function in (loss, jax.grad(loss))
    )
    assert_as_declared(DENSE_DEPTHWISE_GRADIENT, both > features / 2 * forward)


def test_the_batch_of_a_transform_is_gathered():
    rows = NamedSharding(mesh_of(x=8), PartitionSpec("x"))
    compiled = jax.jit(jnp.fft.fft, in_shardings=rows, out_shardings=rows).lower(jnp.ones((8, 16))).compile()
    assert_as_declared(GATHERED_TRANSFORM, "all-gather" in compiled.as_text())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_says_what_is_done_about_it(fault):
    assert fault.what.endswith(".")
    assert fault.instead.endswith(".")
