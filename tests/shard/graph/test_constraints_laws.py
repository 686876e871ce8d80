"""Layouts that the user prescribes: what is accepted divides, the last pattern wins, and a suggestion can be followed."""

import fnmatch
import math
import re

import jax.numpy as jnp
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from penstock.shard.graph.constraints import fixed_layouts, given_roles, match_constraints, matching
from penstock.shard.trace.step import Leaf

MESH = {"a": 2, "b": 4, "c": 3}
PATHS = ("params/in/w", "params/in/b", "params/out/w", "opt/mu/w", "batch/x")
PATTERNS = ("*", "params/*", "*/w", "params/in/*", "in/w", "opt/*", "batch/x", "*/[bx]")

axes = st.lists(st.sampled_from([*MESH]), max_size=3).map(tuple)
entries = st.one_of(st.none(), st.sampled_from([*MESH]), axes, st.just(P.UNCONSTRAINED))
specs = st.lists(entries, max_size=3).map(lambda given: P(*given))
shapes = st.lists(st.sampled_from([1, 2, 6, 8, 12, 24, 7]), max_size=3).map(tuple)


def leaf(path, shape):
    return Leaf(path, tuple(shape), jnp.dtype("float32"))


def follow(message):
    """The layout that an error suggests, read from it."""
    if "replicate it with P()" in message:
        return P()
    return eval(re.search(r"(P\(.*\)) would do", message[message.index(";") :])[1], {"P": P})


def assert_fits(fixed, shape):
    used = [axis for entry in fixed for axis in entry or ()]
    assert len(fixed) == len(shape)
    assert len(used) == len(set(used))
    for size, entry in zip(shape, fixed, strict=True):
        assert entry is None or size % math.prod(MESH[axis] for axis in entry) == 0


@settings(max_examples=300)
@given(specs, shapes)
def test_a_layout_is_accepted_if_it_divides_and_otherwise_one_that_does_is_suggested(spec, shape):
    one = [leaf("w", shape)]
    try:
        fixed = fixed_layouts({"w": spec}, one, MESH)[0]
    except ValueError as error:
        assert_fits(fixed_layouts({"w": follow(str(error))}, one, MESH)[0], shape)
    else:
        assert_fits(fixed, shape)
        for dim, entry in enumerate(fixed):
            given_entry = spec[dim] if dim < len(spec) else None
            names = (given_entry,) if isinstance(given_entry, str) else given_entry or ()
            assert entry is None if given_entry is P.UNCONSTRAINED else entry == tuple(names)


@given(st.lists(st.tuples(st.sampled_from(PATTERNS), specs), min_size=1, max_size=5))
def test_of_several_patterns_the_last_that_matches_counts(given_layouts):
    constraints = dict(given_layouts)
    leaves = [leaf(path, (24, 24, 24)) for path in PATHS]
    found = match_constraints(constraints, leaves)
    for index, path in enumerate(PATHS):
        names = (path, path.partition("/")[2])
        those = [pattern for pattern in constraints if any(fnmatch.fnmatchcase(name, pattern) for name in names)]
        assert found.get(index) == ((those[-1], constraints[those[-1]]) if those else None)


@given(specs, st.sampled_from(["x", "A", "data"]), st.integers(0, 2))
def test_an_unknown_axis_is_refused_by_its_name(spec, axis, dim):
    entries = [*spec, None, None, None][:3]
    entries[dim] = axis
    with pytest.raises(ValueError, match=f"the mesh has no axis '{axis}'; its axes are a, b, c"):
        fixed_layouts({"w": P(*entries)}, [leaf("w", (24, 24, 24))], MESH)


@given(st.sampled_from(PATTERNS), st.permutations(PATHS))
def test_a_pattern_finds_the_same_leaves_in_whatever_order_they_come(pattern, paths):
    def names(order):
        leaves = [leaf(path, ()) for path in order]
        return {order[index] for index in matching(pattern, leaves, "constraints")}

    assert names(paths) == names(PATHS)


@given(st.text(st.characters(codec="ascii", exclude_characters="*?[]"), min_size=1))
def test_a_pattern_that_matches_nothing_names_the_nearest_leaves(pattern):
    leaves = [leaf(path, ()) for path in PATHS]
    names = {name for path in PATHS for name in (path, path.partition("/")[2])}
    assume(pattern not in names)
    with pytest.raises(ValueError, match="matches no leaf; the nearest are '"):
        matching(pattern, leaves, "constraints")


@given(st.lists(st.tuples(st.sampled_from(PATTERNS), st.sampled_from(["parameters", "optimizer", "batch", "other"])), max_size=4))
def test_of_several_roles_the_last_counts(given_list):
    roles = dict(given_list)
    leaves = [leaf(path, ()) for path in PATHS]
    found = given_roles(roles, leaves)
    for index in range(len(PATHS)):
        those = [role for pattern, role in roles.items() if index in matching(pattern, leaves, "roles")]
        assert found.get(index) == (those[-1] if those else None)
