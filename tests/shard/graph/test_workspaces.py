"""Arrays that a compiler makes to carry out single operations."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from penstock.shard.graph.live_ranges import find_layout_copies, find_workspaces
from penstock.shard.mesh.compiler_models import CPU
from penstock.shard.trace.step import trace

ROWS, GROUPS, WIDTH = 256, 4, 32


def workspaces(step, *args):
    """Return the bytes of the workspaces of a step, from the smallest, and the primitives of their operations."""
    program = trace(step, args).program
    found = find_workspaces(program, CPU.writes_dense)
    return sorted(each.bytes for each in found), {program.ops[each.end].primitive for each in found}


def test_a_ragged_product_repeats_its_rows_for_every_group():
    rows = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    weights = jax.ShapeDtypeStruct((GROUPS, WIDTH, WIDTH), jnp.float32)
    sizes = jax.ShapeDtypeStruct((GROUPS,), jnp.int32)
    found, primitives = workspaces(lax.ragged_dot, rows, weights, sizes)
    repeated = GROUPS * ROWS * WIDTH * 4
    assert primitives == {"ragged_dot_general"}
    assert found == [repeated, repeated * 5 / 4]  # the second has a mask, a byte an element


def test_ragged_products_of_one_operand_share_its_repeated_rows():
    rows = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    weights = jax.ShapeDtypeStruct((GROUPS, WIDTH, WIDTH), jnp.float32)
    sizes = jax.ShapeDtypeStruct((GROUPS,), jnp.int32)

    def both(rows, weights, others, sizes):
        return lax.ragged_dot(rows, weights, sizes), lax.ragged_dot(rows, others, sizes)

    found, _ = workspaces(both, rows, weights, weights, sizes)
    assert len([size for size in found if size == GROUPS * ROWS * WIDTH * 5]) == 1


@pytest.mark.parametrize("size", [8, 16])
def test_the_gradient_of_a_max_pool_has_an_index_for_each_dimension(size):
    def step(x):
        def pooled(x):
            return jnp.sum(lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") ** 2)

        return jax.grad(pooled)(x)

    found, primitives = workspaces(step, jax.ShapeDtypeStruct((4, size, size, 3), jnp.float32))
    assert primitives == {"select_and_scatter_add"}
    assert found == [4 * 4 * (4 * size // 2 * size // 2 * 3), 4 * 4 * (4 * size * size * 3)]


def test_other_operations_need_no_workspace():
    matrix = jax.ShapeDtypeStruct((ROWS, ROWS), jnp.float32)
    assert workspaces(lambda x: jnp.tanh(x @ x).sum(axis=0), matrix) == ([], set())


def copies(loss, kernel):
    """Return the shapes of the state that an update with momentum copies into another layout."""

    def step(kernel, momentum, x):
        momentum = 0.9 * momentum + jax.grad(loss)(kernel, x)
        return kernel - 0.1 * momentum, momentum

    rows = jax.ShapeDtypeStruct((ROWS, 512), jnp.float32)
    program = trace(step, (kernel, kernel, rows)).program
    found = find_layout_copies(program)
    assert len({(each.start, each.end) for each in found}) <= 1  # parameters and momentum at once
    return [program.inputs.index(each.value) for each in found]


def test_state_whose_gradient_is_a_transposed_product_is_copied():
    kernel = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    assert sorted(copies(lambda kernel, x: jnp.sum(jnp.tanh(x @ kernel)), kernel)) == [0, 1]


def test_state_is_not_copied_if_its_gradient_is_not_transposed():
    kernel = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    assert copies(lambda kernel, x: jnp.sum(jnp.tanh(kernel @ x.T)), kernel) == []


def test_state_that_is_stored_transposed_to_save_padding_is_not_copied():
    kernel = jax.ShapeDtypeStruct((512, 8), jnp.float32)
    assert copies(lambda kernel, x: jnp.sum(jnp.tanh(x @ kernel)), kernel) == []
