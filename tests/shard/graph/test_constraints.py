"""Layouts and roles by patterns: the last pattern counts, and errors suggest a layout that fits."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import penstock as ps
from penstock.shard.graph.constraints import axes_in_constraints, fixed_layouts, given_roles
from penstock.shard.trace.step import Leaf

MESH = {"a": 6, "b": 4}


def leaf(path, *shape):
    return Leaf(path, shape, jnp.dtype("float32"))


LEAVES = [leaf("p/a", 64, 64), leaf("p/b", 64), leaf("p/w[0]", 64), leaf("batch", 8, 8)]


def test_the_last_of_several_patterns_counts_and_only_its_layout_has_to_fit():
    fixed = fixed_layouts({"p/*": P(None, "b"), "p/b": P(), "w[0]": P("b")}, LEAVES, MESH)
    assert fixed == {0: ((), ("b",)), 1: ((),), 2: (("b",),)}
    with pytest.raises(ValueError, match=r"constraints\['p/\*'\] .* for 'p/b', shape \[64\]"):
        fixed_layouts({"p/b": P(), "p/*": P(None, "b")}, LEAVES, MESH)


def test_the_axes_of_a_replaced_constraint_do_not_count():
    constraints = {"p/*": P("x"), "*": P(("data", "fsdp"), None, P.UNCONSTRAINED)}
    assert axes_in_constraints(constraints, LEAVES) == {"data", "fsdp"}
    assert axes_in_constraints(None, LEAVES) == set()


def test_a_path_matches_its_leaf_even_with_special_characters():
    assert fixed_layouts({"p/w[0]": P("b")}, LEAVES, MESH) == fixed_layouts({"w[0]": P("b")}, LEAVES, MESH) == {2: (("b",),)}
    assert given_roles({"p/w[0]": "other"}, LEAVES) == {2: "other"}
    assert set(fixed_layouts({"p/[ab]": P()}, LEAVES, MESH)) == {0, 1}


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        (P(("a", "b")), (64,), r"dimension 0 of size 64 does not divide into 24; P\('b'\) would do"),
        (P(("a", "b"), None), (36, 64), r"does not divide into 24; P\('a'\) would do"),
        (P("b", "a"), (64, 64), r"dimension 1 of size 64 does not divide into 6; P\('b'\) would do"),
        (P("a"), (64, 12), r"does not divide into 6; P\(None, 'a'\) would do"),
        (P("a", P.UNCONSTRAINED), (64, 12, 12), r"P\(None, P.UNCONSTRAINED, 'a'\) would do"),
        (P("a"), (64, 64), r"does not divide into 6; replicate it with P\(\)"),
        (P("b", None, None), (64, 64), r"has 3 dimensions and the leaf 2; P\('b'\) would do"),
        (P(None, None, ("b", "a")), (64, 24), r"has 3 dimensions and the leaf 2; P\(None, \('b', 'a'\)\) would do"),
        (P("b"), (), r"the leaf 0; replicate it with P\(\)"),
        (P("b", "b"), (64, 64), r"a mesh axis stands in it twice; P\('b'\) would do"),
        (P(("b", "b")), (64,), r"a mesh axis stands in it twice; P\('b'\) would do"),
        (P("c"), (64,), r"the mesh has no axis 'c'; its axes are a, b"),
        (P(3), (64,), r"the mesh has no axis 3; its axes are a, b"),
    ],
    ids=str,
)
def test_the_error_for_a_layout_that_does_not_fit_suggests_one_that_does(spec, shape, message):
    with pytest.raises(ValueError, match=message):
        fixed_layouts({"w": spec}, [leaf("w", *shape)], MESH)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"constraints": [P()]}, r"constraints=\[P\(\)\] is not a dict by path patterns, such as {"),
        ({"constraints": []}, r"constraints=\[\] is not a dict"),
        ({"constraints": {5: P()}}, "constraints has the key 5; a pattern of paths is a string"),
        ({"constraints": {"w": "data"}}, r"constraints\['w'\] is 'data'; a layout is a jax.sharding.PartitionSpec"),
        ({"roles": ["batch"]}, r"roles=\['batch'\] is not a dict by path patterns"),
        ({"roles": {5: "batch"}}, "roles has the key 5; a pattern of paths is a string"),
    ],
    ids=str,
)
@pytest.mark.parametrize("mesh", [{"mesh": {"data": 2}}, {"devices": 2}], ids=str)
def test_other_types_than_a_dict_by_patterns_are_refused(options, message, mesh):
    with pytest.raises(TypeError, match=message):
        ps.plan(lambda w: w * 2, jax.ShapeDtypeStruct((8, 8), "float32"), hardware="v5e", check=False, **mesh, **options)
