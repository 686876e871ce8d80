"""Mesh axes that meet in a dimension: the one that stays is the major one, so that what is gathered stays in its block."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from penstock.shard.apply.partition_specs import axis_orders
from penstock.shard.graph.decisions import Edge, Graph, Node
from penstock.shard.mesh.resharding import MeshLinks
from penstock.shard.mesh.shapes import concrete_mesh

AXES = {"a": 2, "b": 2, "c": 2}
LINKS = MeshLinks(tuple(AXES), tuple(AXES.values()), 1e10, 1e-6)
subsets = st.integers(1, 7)


def orders_of(layouts, edges):
    nodes = tuple(Node("op", (64, 64), (), None, at) for at in range(len(layouts)))
    made = tuple(Edge(a, b, (0, 1), (0, 1), (), size, 1.0, 0, "operand") for a, b, size in edges)
    return axis_orders(Graph(nodes, made, {}, {}, {}, ()), LINKS, layouts)


def names(order, mask):
    return tuple(LINKS.names[axis] for axis in order if mask >> axis & 1)


def blocks(names):
    """The rows that each device holds of 64 that are sharded over some axes."""
    rows = NamedSharding(concrete_mesh(AXES), P(names)).devices_indices_map((64,))
    return {device: range(*index[0].indices(64)) for device, index in rows.items()}


@given(subsets, subsets)
def test_a_gather_keeps_the_block_that_a_device_has(more, kept):
    before, after = more | kept, kept
    orders = orders_of([(before, 0), (after, 0)], [(0, 1, 100)])
    assert orders[0, 0] == orders[1, 0]
    have, get = blocks(names(orders[0, 0], before)), blocks(names(orders[1, 0], after))
    for device, rows in have.items():
        assert set(rows) <= set(get[device])


@given(subsets, subsets)
def test_a_cut_takes_a_part_of_the_block_that_a_device_has(more, kept):
    orders = orders_of([(kept, 0), (more | kept, 0)], [(0, 1, 100)])
    have, get = blocks(names(orders[0, 0], kept)), blocks(names(orders[1, 0], more | kept))
    for device, rows in get.items():
        assert set(rows) <= set(have[device])


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=2, max_size=4), st.data())
def test_each_dimension_has_one_order_of_all_axes(layouts, data):
    disjoint = [(one, other & ~one) for one, other in layouts]
    pairs = list(itertools.combinations(range(len(layouts)), 2))
    edges = [(a, b, data.draw(st.integers(1, 100))) for a, b in data.draw(st.lists(st.sampled_from(pairs), unique=True))]
    orders = orders_of(disjoint, edges)
    assert set(orders) == {(node, dim) for node in range(len(layouts)) for dim in range(2)}
    assert all(sorted(order) == [0, 1, 2] for order in orders.values())
    for a, b, _ in edges:
        assert all(orders[a, dim] == orders[b, dim] for dim in range(2))


@pytest.mark.parametrize("wish", [0b001, 0b010, 0b100])
def test_a_dimension_without_a_wish_has_the_order_of_the_others(wish):
    orders = orders_of([(0b111, 0), (wish, 0), (0b111, 0)], [(0, 1, 100)])
    assert 1 << orders[0, 0][0] == wish
    # A dimension without a wish has the order of the others.
    assert orders[2, 0] == orders[0, 0]
