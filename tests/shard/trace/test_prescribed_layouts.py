"""The layouts and meshes that a program itself prescribes."""

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.shard.steps import array

from penstock.shard.trace.flat_program import find_meshes, prescribed_layouts

MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def jaxpr_of(function, *args):
    return jax.make_jaxpr(function)(*args).jaxpr


def constrain(spec):
    return lambda x: lax.with_sharding_constraint(x * 2, NamedSharding(MESH, spec))


def test_a_sharding_constraint_prescribes_its_operand_and_its_result():
    equation = jaxpr_of(constrain(P(("data", "model"), None, P.UNCONSTRAINED)), array(8, 8, 8, 8)).eqns[-1]
    layout = (("data", "model"), (), None, ())
    assert prescribed_layouts(equation) == (layout, layout)


def test_a_shard_map_prescribes_each_operand_and_result():
    mapped = jax.shard_map(lambda x, y: x + y, mesh=MESH, in_specs=(P("data"), P("data", None)), out_specs=P("data"))
    (equation,) = jaxpr_of(mapped, array(8, 8), array(8, 8)).eqns
    assert prescribed_layouts(equation) == ((("data",), ()),) * 3


def test_other_operations_prescribe_nothing():
    assert prescribed_layouts(jaxpr_of(lambda x: x * 2, array(8)).eqns[0]) is None


def test_meshes_are_found_in_nested_programs():
    def step(x):
        return lax.scan(lambda carry, _: (jax.jit(constrain(P("data")))(carry), None), x, None, length=2)[0]

    assert find_meshes(jaxpr_of(step, array(8, 8))) == [MESH]
    assert find_meshes(jaxpr_of(lambda x: x * 2, array(8, 8))) == []
