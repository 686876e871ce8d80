"""A step with sharding constraints computes what it computes without them, and the compiler is told each of them."""

import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from tests.shard.apply.test_partition_specs import anything, written
from tests.shard.search.programs import FAST_LINKS, MESHES, random_step, steps
from tests.shard.steps import custom_derivatives, custom_derivatives_forward, scanned_layers, while_loop

import penstock as ps
from penstock.shard.apply.sharding_constraints import ShardingConstraints, insert_constraints
from penstock.shard.graph.step_model import build_step_model
from penstock.shard.mesh.compiler_models import CPU
from penstock.shard.mesh.shapes import concrete_mesh
from penstock.shard.search.costs import build_costs
from penstock.shard.trace.step import trace

SMALL = (4, 8, 6, 5)


def planned(step, args, mesh, seed):
    """The traced step, and any constraints for it."""
    traced = trace(step, args)
    model = build_step_model(traced, {}, CPU)
    costs = build_costs(model, mesh, FAST_LINKS)
    return traced, written(model, costs, anything(costs, seed), traced.state).sharding_constraints


def arrays(args, seed=0):
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.normal(size=leaf.shape) * 0.3, leaf.dtype) for leaf in jax.tree.leaves(args)]


def in_text(spec):
    """A layout as StableHLO has it."""
    return "[" + ", ".join("{" + ", ".join(f'"{axis}"' for axis in entry) + "}" for entry in spec) + "]"


def constraints_of(made):
    """All layouts, of operands and of results."""
    chains = [chain for each in (made.operands, made.results) for chains in each.values() for chain in chains]
    return {spec for chain in chains for spec in chain or ()}


@settings(max_examples=3)
@given(st.integers(0, 2**16), st.sampled_from(MESHES))
def test_the_values_are_those_of_one_device_and_each_constraint_is_in_the_program(seed, mesh):
    step, args = random_step(seed, 3, SMALL, every=True)
    traced, constraints = planned(step, args, mesh, seed)
    given_arrays = arrays(args, seed)
    constrained = jax.jit(insert_constraints(traced.closed, constraints, concrete_mesh(mesh)))
    layouts = {in_text(spec) for spec in constraints_of(constraints)}
    assert written_in(jax.make_jaxpr(constrained)(*given_arrays).jaxpr) == constraints_of(constraints)
    text = constrained.lower(*given_arrays).as_text()
    told = set(re.findall(r"sdy.sharding_constraint %\S+ <@mesh, (\[.*?\])>", text))
    assert told
    assert told <= layouts  # those of results that nothing reads are not in it
    expected = jax.tree.leaves(jax.jit(step)(*given_arrays))
    for one, other in zip(constrained(*given_arrays), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def written_in(jaxpr):
    """The layouts that a program prescribes, and those nested in it."""
    found = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "sharding_constraint":
            spec = equation.params["sharding"].spec
            rank = equation.invars[0].aval.ndim
            found.add(tuple(() if entry is None else (entry,) if isinstance(entry, str) else entry for entry in spec[:rank]))
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda each: hasattr(each, "eqns")):
            inner = getattr(value, "jaxpr", value)
            found |= written_in(inner) if hasattr(inner, "eqns") else set()
    return found


@pytest.mark.parametrize(
    "make",
    [scanned_layers, pytest.param(custom_derivatives, marks=pytest.mark.slow), custom_derivatives_forward, while_loop],
    ids=lambda make: make.__name__,
)
def test_constraints_reach_into_loops_choices_and_what_is_computed_again(make):
    step, state, batch = make()
    args, mesh = (*state, batch), MESHES[0]
    traced, constraints = planned(step, args, mesh, 0)
    constrained = jax.jit(insert_constraints(traced.closed, constraints, concrete_mesh(mesh)))
    flat = jax.tree.leaves(args)
    assert written_in(jax.make_jaxpr(constrained)(*flat).jaxpr) >= constraints_of(constraints)
    for one, other in zip(constrained(*flat), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@jax.custom_vjp
def product_with_vjp(x, w):
    return x @ w


product_with_vjp.defvjp(lambda x, w: (x @ w, (x, w)), lambda _, g: (g, g * 0.0 + 7.0))


@jax.custom_jvp
def product_with_jvp(x, w):
    return x @ w


product_with_jvp.defjvp(lambda primals, tangents: (primals[0] @ primals[1], 7.0 * (tangents[0] + tangents[1])))


@pytest.mark.parametrize("product", [product_with_vjp, product_with_jvp], ids=["vjp", "jvp"])
def test_constraints_hold_inside_of_a_function_with_its_own_derivative(product):
    traced = trace(product, (jax.ShapeDtypeStruct((8, 8), "float32"),) * 2)
    (equation,) = traced.closed.jaxpr.eqns
    assert equation.primitive.name.startswith("custom_")
    inside = ShardingConstraints(results={(0, 0): (((("data",), ("model",)),),)})
    mesh = concrete_mesh({"data": 2, "model": 4})
    run, args = insert_constraints(traced.closed, inside, mesh), arrays(traced.closed.in_avals)
    compiled = jax.jit(run, out_shardings=NamedSharding(mesh, PartitionSpec())).lower(*args).compile()
    assert re.search(r"= f32\[4,2\]\S* dot\(", compiled.as_text())
    np.testing.assert_allclose(compiled(*args)[0], args[0] @ args[1], rtol=1e-5)
    np.testing.assert_array_equal(jax.grad(lambda w: run(args[0], w)[0].sum())(args[1]), np.full((8, 8), 7.0))


def test_without_constraints_the_program_is_the_step():
    step, args = steps(MESHES[0])["forward"]
    traced = trace(step, args)
    run = insert_constraints(traced.closed, ShardingConstraints(), concrete_mesh(MESHES[0]))
    primitives = [str(equation.primitive) for equation in jax.make_jaxpr(run)(*jax.tree.leaves(args)).eqns]
    assert "sharding_constraint" not in primitives
    assert primitives.count("dot_general") == 2


@pytest.mark.parametrize("again", [False, True])
def test_an_array_that_two_operations_want_in_one_layout_is_brought_there_once_or_again(again):
    traced = trace(lambda w, x: (x @ w, jax.numpy.sin(x) @ w), (jax.ShapeDtypeStruct((8, 8), "float32"),) * 2)
    products = [n for n, equation in enumerate(traced.closed.jaxpr.eqns) if equation.primitive.name == "dot_general"]
    cut, whole = (("data",), ()), ((), ())
    wanted = {(number,): (None, (cut, whole)) for number in products}
    if again:
        wanted[products[1],] = (None, (cut, cut, whole))
    mesh = concrete_mesh(MESHES[0])
    run, given = insert_constraints(traced.closed, ShardingConstraints(wanted), mesh), arrays(traced.closed.in_avals)
    lowered = jax.jit(run, out_shardings=NamedSharding(mesh, PartitionSpec())).lower(*given)
    assert lowered.as_text().count("sharding_constraint") == 2 + again
    compiled = lowered.compile()
    assert len(re.findall(r" all-gather\(", compiled.as_text())) == 1 + again
    np.testing.assert_allclose(compiled(*given)[1], np.sin(given[1]) @ given[0], rtol=1e-5)


def loop_with(kind):
    """A loop in which an input, which only elementwise operations read, is a constant."""

    def step(w, batch):
        def body(w):
            return w - 0.1 * ((batch["x"] @ w - batch["y"]) * batch["scale"]).T @ batch["x"]

        if kind == "while":
            return jax.lax.while_loop(lambda w: (w**2).sum() < 9, lambda w: body(w).T, w)
        if kind == "scan":
            return jax.lax.scan(lambda w, _: (body(w).T, None), w, None, length=3)[0]
        return jax.scipy.sparse.linalg.cg(lambda v: body(v).T, w, maxiter=2)[0]

    return step


@pytest.mark.parametrize("kind", ["while", "scan", "linear solve"])
def test_a_loop_does_not_gather_an_input_that_it_reads_elementwise(kind):
    rows, width = 512, 8
    large = jax.ShapeDtypeStruct((rows, width), "float32")
    args = (jax.ShapeDtypeStruct((width, width), "float32"), {"x": large, "y": large, "scale": large})
    plan = ps.plan(loop_with(kind), *args, mesh={"x": 8}, hardware="tpu-v5e", check=False)
    compiled = plan.alternatives["data parallel"].verify().measured
    assert not [each for each in compiled.collectives if each.bytes >= rows * width * 4]
