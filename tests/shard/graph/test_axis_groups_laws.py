"""Axis groups: dimensions that elementwise operations connect are one decision, in whatever order and under whatever name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.shard.search.programs import array, random_step
from tests.shard.steps import STEPS

from penstock.shard.graph.axis_groups import find_axis_groups
from penstock.shard.trace.step import trace


@st.composite
def elementwise_steps(draw):
    """A step of sums, products and broadcasts of arrays of one shape, without transposes, so that nothing is contradicted."""
    shape = draw(st.sampled_from([(4, 6), (6, 4, 2), (4, 1, 6)]))
    choices = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8))

    def step(x, y):
        values = [jnp.sort(x), jnp.sort(y)]
        for kind, one, other in choices:
            a, b = values[one % len(values)], values[other % len(values)]
            values.append([a + b, a * b, jnp.tanh(a), jnp.sort(a), a - b.sum(axis=0, keepdims=True)][kind])
        return values

    return step, (array(*shape), array(*shape))


def partition(groups):
    """The sets of (value, dimension) that are one decision; this has no names of groups or of their dimensions."""
    found = {}
    for value, (group, dims) in enumerate(zip(groups.group, groups.dims, strict=True)):
        for dim, of_group in enumerate(dims):
            if of_group is not None:
                found.setdefault((group, of_group), set()).add((value, dim))
    return {frozenset(each) for each in found.values()}


def program(step, *args):
    return trace(step, args).program


@settings(max_examples=20)
@given(elementwise_steps(), st.randoms(use_true_random=False))
def test_the_order_of_merging_does_not_matter(step, random):
    made = program(step[0], *step[1])
    shuffled = dataclasses.replace(made, ops=random.sample(made.ops, len(made.ops)))
    assert partition(find_axis_groups(shuffled)) == partition(find_axis_groups(made))


@settings(max_examples=20)
@given(elementwise_steps(), st.randoms(use_true_random=False))
def test_the_numbers_of_values_do_not_matter(step, random):
    made = program(step[0], *step[1])
    new = random.sample(range(len(made.values)), len(made.values))
    values = [made.values[new.index(number)] for number in range(len(new))]
    ops = [
        dataclasses.replace(
            op,
            operands=tuple(None if each is None else new[each] for each in op.operands),
            results=tuple(new[each] for each in op.results),
        )
        for op in made.ops
    ]
    renamed = dataclasses.replace(made, values=values, ops=ops, inputs=[new[each] for each in made.inputs])
    back = {frozenset((new.index(value), dim) for value, dim in each) for each in partition(find_axis_groups(renamed))}
    assert back == partition(find_axis_groups(made))


def assert_is_a_grouping(made):
    groups = find_axis_groups(made)
    for number, group in enumerate(groups.groups):
        if group is not None:
            assert group.values
            assert all(groups.group[value] == number for value in group.values)
            assert group.replicated <= set(range(len(group.sizes)))
    assert sorted(value for group in groups.groups if group for value in group.values) == list(range(len(made.values)))
    for value, (group, dims) in enumerate(zip(groups.group, groups.dims, strict=True)):
        held = [dim for dim in dims if dim is not None]
        assert len(held) == len(set(held))
        for size, dim in zip(made.values[value].shape, dims, strict=True):
            assert (dim is None) or size == groups.groups[group].sizes[dim] > 1
    elementwise = [id(op) for group in groups.groups if group for op in group.elementwise]
    assert sorted([*elementwise, *map(id, groups.non_elementwise)]) == sorted(map(id, made.ops))
    for operand, result, dims in groups.broadcast_uses:
        for size, dim in zip(made.values[operand].shape, dims, strict=True):
            assert dim is None or size in (1, made.values[result].shape[dim])


@settings(max_examples=20)
@given(st.integers(0, 2**16), st.integers(1, 8))
def test_every_value_is_in_one_group_and_its_dimensions_have_the_sizes_of_the_group(seed, operations):
    step, args = random_step(seed, operations, (4, 6, 8))
    assert_is_a_grouping(program(step, *args))


@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_steps_of_all_forms_are_grouped(make):
    step, state, batch = make()
    assert_is_a_grouping(program(step, *state, batch))


def group_of_results(step, *args):
    """The groups, and the number of that of each output."""
    made = program(step, *args)
    groups = find_axis_groups(made)
    return groups, [groups.group[value] for value in made.outputs]


def test_elementwise_operations_connect_and_others_do_not():
    _, (y, z, total) = group_of_results(lambda x: ((y := jnp.sort(x)), jnp.tanh(y) * 2, (y @ y)), array(4, 4))
    assert y == z != total


def test_transposed_values_are_one_group_where_nothing_contradicts_it():
    groups, (y, z) = group_of_results(lambda x: ((y := jnp.sort(x)), jnp.tanh(y.T)), array(4, 6))
    assert y == z
    assert groups.groups[y].sizes in ((4, 6), (6, 4))


def test_a_sum_with_its_own_transpose_is_an_operation_of_its_own():
    made = program(lambda x: (y := jnp.sort(x)) + y.T, array(4, 4))
    assert [op.primitive for op in find_axis_groups(made).non_elementwise] == ["sort", "add"]


def test_a_transpose_that_contradicts_itself_by_a_detour_is_an_operation_of_its_own():
    made = program(lambda x: jnp.sin(jnp.tanh((y := jnp.sort(x)).T)) * y, array(4, 4))
    assert [op.primitive for op in find_axis_groups(made).non_elementwise] == ["sort", "mul"]


def test_an_input_has_its_own_decision_beside_that_of_its_use():
    made = program(lambda x: jnp.tanh(x) + 1, array(4, 6))
    groups = find_axis_groups(made)
    assert groups.group[made.inputs[0]] != groups.group[made.outputs[0]]
    assert [(value, dims) for value, _, dims in groups.broadcast_uses] == [(made.inputs[0], (0, 1))]


def test_dimensions_of_size_one_belong_to_nothing():
    made = program(jnp.tanh, array(4, 1, 6))
    groups = find_axis_groups(made)
    assert groups.dims[made.outputs[0]] == (0, None, 1)


def test_a_dimension_that_a_loop_runs_over_stays_replicated():
    made = program(lambda x: jax.lax.scan(lambda c, row: (c + row, row), jnp.zeros(6), x)[0], array(4, 6))
    groups = find_axis_groups(made)
    group = groups.groups[groups.group[made.inputs[0]]]
    assert group.sizes == (4, 6)
    assert group.replicated == {0}
    assert np.isin(groups.dims[made.inputs[0]], [0, 1]).all()
