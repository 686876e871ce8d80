"""Decisions written out as partition specs: of inputs, of outputs, and inside of the step."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.shard.search.exhaustive import all_layouts
from tests.shard.search.programs import FAST_LINKS, MESHES, model_of, random_step, solve
from tests.shard.steps import STEPS

from penstock.shard.apply.partition_specs import write_layouts
from penstock.shard.graph.step_model import build_step_model
from penstock.shard.mesh.compiler_models import CPU
from penstock.shard.search.costs import build_costs
from penstock.shard.trace.step import trace


def written(model, costs, assignment, state=None):
    return write_layouts(model.program, model.groups, model.graph, costs.links, assignment, state or {})


def anything(costs, seed):
    """Any assignment that gives nodes of a class the same layout."""
    rng = np.random.default_rng(seed)
    classes = [all_layouts(costs.graph.nodes[first], costs.links) for first in costs.folded.first]
    chosen = [layouts[rng.integers(len(layouts))] for layouts in classes]
    return [chosen[number] for number in costs.folded.of_node]


def found(costs):
    return solve(costs)[0].assignment


def shapes_and_specs(model, layouts):
    """Every layout that arrays are kept in, beside the shape of its value; not those on the way to an operation and from it."""
    program = model.program
    yield from ((program.values[value].shape, spec) for value, spec in zip(program.inputs, layouts.inputs, strict=True))
    for value, spec in zip(program.outputs, layouts.outputs, strict=True):
        if value is not None:
            yield program.values[value].shape, spec
    yield from ((program.values[value].shape, spec) for value, spec in layouts.used.items())
    constraints = layouts.sharding_constraints
    for op in program.ops:
        operands, results = constraints.operands.get(op.path) or (), constraints.results.get(op.path) or ()
        yield from ((program.values[value].shape, chain[0]) for value, chain in zip(op.operands, operands, strict=False) if chain)
        yield from ((program.values[value].shape, chain[-1]) for value, chain in zip(op.results, results, strict=False) if chain)


def assert_are_layouts(model, layouts, mesh):
    for chains in (*layouts.sharding_constraints.operands.values(), *layouts.sharding_constraints.results.values()):
        for spec in (spec for chain in chains for spec in chain or ()):
            axes = [axis for entry in spec for axis in entry]
            assert len(axes) == len(set(axes))
    for shape, spec in shapes_and_specs(model, layouts):
        axes = [axis for entry in spec for axis in entry]
        assert len(axes) == len(set(axes))
        assert len(spec) == len(shape)
        for size, entry in zip(shape, spec, strict=True):
            assert size % math.prod(mesh[axis] for axis in entry) == 0


@settings(max_examples=15)
@given(st.integers(0, 2**16), st.sampled_from(MESHES), st.booleans())
def test_every_spec_divides_its_shape_and_names_no_axis_twice(seed, mesh, searched):
    model = model_of(random_step(seed, 4))
    costs = build_costs(model, mesh, FAST_LINKS)
    assert_are_layouts(model, written(model, costs, found(costs) if searched else anything(costs, seed)), mesh)


@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_the_specs_of_steps_of_all_forms_divide_their_shapes(make):
    step, state, batch = make()
    traced = trace(step, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (*state, batch)))
    model, mesh = build_step_model(traced, {}, CPU), MESHES[STEPS.index(make) % 3]
    costs = build_costs(model, mesh, FAST_LINKS)
    for assignment in (found(costs), anything(costs, 0)):
        layouts = written(model, costs, assignment, traced.state)
        assert_are_layouts(model, layouts, mesh)
        for output, replaced in traced.state.items():
            assert layouts.outputs[output] == layouts.inputs[replaced]


@settings(max_examples=15)
@given(st.integers(0, 2**16), st.sampled_from(MESHES))
def test_inputs_are_stored_as_was_decided(seed, mesh):
    model = model_of(random_step(seed, 3))
    costs = build_costs(model, mesh, FAST_LINKS)
    assignment = anything(costs, seed)
    for node, spec in zip(model.inputs, written(model, costs, assignment).inputs, strict=True):
        assert tuple(costs.links.bits(entry) for entry in spec) == assignment[node]


def two_readers():
    """A value that two products read: the first product, and the nodes of the value, of its shared reshard and of the product."""
    step = lambda x, w: ((y := jax.numpy.sort(x)) @ w, y @ (w * 2))  # noqa: E731
    model = model_of((step, (jax.ShapeDtypeStruct((6, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32"))))
    costs = build_costs(model, MESHES[0], FAST_LINKS)
    op, node = next(
        (op, node) for op, node in zip(model.groups.non_elementwise, model.graph.op, strict=True) if op.primitive == "dot_general"
    )
    value = op.operands[0]
    return model, costs, op, (model.graph.group[value], model.graph.shared_reshard[value, 1.0, ()], node)


def test_an_operand_goes_from_its_group_by_way_of_the_shared_reshard_to_the_operation():
    model, costs, op, (group, shared, node) = two_readers()
    assignment = costs.start()
    assignment[group], assignment[shared] = (0, 1), (0, 3)
    assignment[node] = tuple(2 if factor == op.rule.operands[0][1] else 0 for factor in range(3))
    chain = written(model, costs, assignment).sharding_constraints.operands[op.path][0]
    assert (chain[0], chain[-1]) == (((), ("data",)), ((), ("model",)))
    assert ((), ("data", "model")) in chain or ((), ("model", "data")) in chain


def test_an_operand_ends_in_the_layout_of_the_operation_also_if_that_is_the_one_of_its_group():
    model, costs, op, (_, shared, _) = two_readers()
    assignment = costs.start()
    assignment[shared] = (0, 1)
    chain = written(model, costs, assignment).sharding_constraints.operands[op.path][0]
    assert chain[-1] == ((), ())


def test_a_reshard_that_readers_do_not_share_is_made_again_for_each_but_the_first():
    model, costs, _, _ = two_readers()
    readers = [(op, node) for op, node in zip(model.groups.non_elementwise, model.graph.op, strict=True) if "dot" in op.primitive]
    assignment = costs.start()
    for op, node in readers:
        assignment[node] = tuple(2 if factor == op.rule.operands[0][1] else 0 for factor in range(3))
    operands = written(model, costs, assignment).sharding_constraints.operands
    whole, cut = ((), ()), ((), ("model",))
    assert [operands[op.path][0] for op, _ in readers] == [(whole, cut), (whole, whole, cut)]


DATA, MODEL = ("data",), ("model",)


@pytest.mark.parametrize(
    ("summed", "wanted", "chain"),
    [
        (1, (0, 1), [((), ()), ((), DATA)]),
        (3, (0, 3), [((), ()), ((), DATA + MODEL)]),
        (3, (0, 1), [((), DATA)]),  # the sum over the other axis makes it one over both
        (3, (0, 0), [((), ())]),
        (1, (0, 2), [((), ()), ((), MODEL)]),
    ],
)
def test_a_slice_of_a_sum_is_requested_alone_where_the_full_sum_would_be_sent(summed, wanted, chain):
    model, costs, op, (*_, node) = two_readers()
    assignment = costs.start()
    assignment[node] = tuple(0 if factor in op.rule.results[0] else summed for factor in range(3))
    assignment[model.graph.group[op.results[0]]] = wanted
    assert list(written(model, costs, assignment).sharding_constraints.results[op.path][0]) == chain


@pytest.mark.parametrize("order", [("data", "model"), ("model", "data")])
def test_a_sum_over_two_axes_and_its_slices_are_requested_in_the_order_of_the_plan(order):
    w, x = (jax.ShapeDtypeStruct((64, 64), "float32") for _ in range(2))
    model = model_of((lambda w, x: w + x.T @ x, (w, x)))
    costs = build_costs(model, MESHES[0], FAST_LINKS).in_order(order != tuple(MESHES[0]))
    op, node = next(
        (op, node) for op, node in zip(model.groups.non_elementwise, model.graph.op, strict=True) if op.primitive == "dot_general"
    )
    assignment = costs.start()
    assignment[node] = tuple(0 if factor in op.rule.results[0] else 3 for factor in range(3))
    assignment[model.graph.group[op.results[0]]] = (3, 0)
    chain = written(model, costs, assignment).sharding_constraints.results[op.path][0]
    assert chain == (((), ()), (order, ()))


@pytest.mark.xfail(strict=True, reason="a reduce-scatter before an all-gather cuts a dimension over the axes of both")
def test_layouts_on_the_way_divide_the_shape():
    model, costs, op, (*_, node) = two_readers()
    rows, summed = op.rule.operands[0]
    assignment = costs.start()
    assignment[node] = tuple({rows: 2, summed: 1}.get(factor, 0) for factor in range(3))
    assignment[model.graph.group[op.results[0]]] = (1, 0)
    chain = written(model, costs, assignment).sharding_constraints.results[op.path][0]
    assert all(6 % math.prod(MESHES[0][axis] for axis in spec[0]) == 0 for spec in chain)


def test_where_nothing_is_sharded_no_spec_names_an_axis():
    model = model_of(random_step(0, 4))
    costs = build_costs(model, MESHES[0], FAST_LINKS)
    layouts = written(model, costs, costs.start())
    assert not any(any(spec) for _, spec in shapes_and_specs(model, layouts))
