"""Axis groups: elementwise operations and loops connect values, other operations separate them."""

import jax.numpy as jnp
import pytest
from jax import lax
from tests.shard.steps import STEPS, array

from penstock.shard.graph.axis_groups import find_axis_groups
from penstock.shard.trace.step import trace


def flat(step, *args):
    return trace(step, args).program


def test_a_carry_is_in_the_group_of_its_start_and_its_end():
    program = flat(lambda w, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0], array(3, 8, 8), array(4, 8))
    _, start = program.inputs
    groups = find_axis_groups(program)
    (product,) = (op for op in program.ops if op.primitive == "dot_general")
    assert groups.group[program.outputs[0]] == groups.group[start] == groups.group[product.operands[0]]


def test_a_stack_that_a_scan_slices_is_replicated_along_the_scan():
    program = flat(lambda w, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0], array(3, 8, 8), array(4, 8))
    groups = find_axis_groups(program)
    stack, _ = program.inputs
    assert groups.dims[stack][0] in groups.groups[groups.group[stack]].replicated


def test_a_product_separates_the_groups_of_its_operands_and_its_result():
    program = flat(lambda w, x: jnp.tanh(x @ w) * 2, array(8, 8), array(4, 8))
    groups = find_axis_groups(program)
    (product,) = groups.non_elementwise
    assert product.primitive == "dot_general"
    assert len({groups.group[value] for value in (*product.operands, *product.results)}) == 3
    assert groups.group[program.outputs[0]] == groups.group[product.results[0]]


def test_an_operation_with_contradicting_dimensions_is_in_no_group():
    def step(x):
        y = x @ x
        return y + y.T

    groups = find_axis_groups(flat(step, array(8, 8)))
    assert [op.primitive for op in groups.non_elementwise] == ["dot_general", "add"]


@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_values_have_the_sizes_of_their_group(make):
    step, state, batch = make()
    program = flat(step, *state, batch)
    groups = find_axis_groups(program)
    for number, value in enumerate(program.values):
        group = groups.groups[groups.group[number]]
        for dim, size in zip(groups.dims[number], value.shape, strict=True):
            assert dim is None or group.sizes[dim] == size
        used = [dim for dim in groups.dims[number] if dim is not None]
        assert len(set(used)) == len(used)
    assert sum(len(group.elementwise) for group in groups.groups if group is not None) + len(groups.non_elementwise) == len(
        program.ops
    )
