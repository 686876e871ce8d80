"""The order of mesh axes that meet in a dimension."""

import jax
import numpy as np
import pytest

import penstock as ps
from penstock.shard.apply.partition_specs import axis_orders
from penstock.shard.graph.decisions import Edge, Graph, Node
from penstock.shard.mesh.hardware import Hardware
from penstock.shard.mesh.resharding import MeshLinks

A, B, C = 1, 2, 4
CHEAP_LINKS = Hardware("made up", {"float32": 1e9}, 1 << 30, 1e9, 1e12, 1e-9, "")
MESH = MeshLinks(("a", "b", "c"), (2, 2, 2), 5e10, 1e-6)


def orders_of(layouts, *edges, fixed=None):
    """Return the axis orders of a graph whose decisions have two dimensions each.

    Args:
      edges: (decision, decision, their dimensions, bytes) of each edge.
    """
    nodes = tuple(Node("op", (64, 64), (), fixed.get(at) if fixed else None, at) for at in range(len(layouts)))
    made = tuple(Edge(a, b, source, target, (), size, 1.0, 0, "operand") for a, b, source, target, size in edges)
    return axis_orders(Graph(nodes, made, {}, {}, {}, ()), MESH, layouts)


def of(order, axes):
    return [axis for axis in order if axes >> axis & 1]


def test_what_stays_while_the_other_is_gathered_comes_first():
    orders = orders_of([(A | B, 0), (B, 0)], (0, 1, (0, 1), (0, 1), 100))
    assert of(orders[0, 0], A | B) == [1, 0]
    assert orders[1, 0] == orders[0, 0]


def test_of_two_wishes_that_of_more_bytes_is_granted():
    edges = (0, 1, (0, 1), (0, 1), 100), (0, 2, (0, 1), (0, 1), 101)
    assert of(orders_of([(A | B, 0), (A, 0), (B, 0)], *edges)[0, 0], A | B) == [1, 0]


def test_axes_that_go_to_another_dimension_together_have_one_order_in_both():
    # In the first dimension c has to be the first, as it stays while a and b go on to a third decision.
    layouts = [(A | B | C, 0), (0, A | B | C), (C, 0)]
    orders = orders_of(layouts, (0, 2, (0, None), (0, None), 100), (0, 1, (0, 1), (1, 0), 100))
    assert of(orders[0, 0], A | B | C)[0] == 2
    crossed = orders_of(layouts, (0, 2, (0, None), (0, None), 100), (0, 1, (0, 1), (0, 1), 100))
    assert of(crossed[0, 0], A | B | C) == of(crossed[1, 1], A | B | C)


def test_a_prescribed_order_is_followed_by_the_dimension_that_the_axes_go_to():
    fixed = {0: (("c", "a", "b"), ())}
    orders = orders_of([(A | B | C, 0), (0, A | B | C)], (0, 1, (0, 1), (0, 1), 100), fixed=fixed)
    assert list(orders[0, 0]) == [2, 0, 1]
    assert list(orders[1, 1]) == [2, 0, 1]


@pytest.mark.parametrize("mesh", [{"a": 2, "b": 4}, pytest.param({"a": 2, "b": 2, "c": 2}, marks=pytest.mark.slow)], ids=str)
def test_what_is_exchanged_between_dimensions_is_not_permuted_as_well(mesh):
    def step(x):
        by_rows = jax.numpy.sort(x, axis=-1)
        by_columns = jax.numpy.sort(jax.numpy.sin(by_rows), axis=0)
        return jax.numpy.sort(jax.numpy.sin(by_columns), axis=-1)

    shape = jax.ShapeDtypeStruct((4096, 4096), np.float32)
    plan = ps.plan(step, shape, mesh=mesh, hardware=CHEAP_LINKS, check=False)
    assert {each.kind for each in plan.verify().measured.collectives} == {"all-to-all"}
